# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""Three ways to the device for a block table that is refilled in place each step: racing, stalling, and neither."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import torch
from typing_extensions import override

import pinstage
from pinstage.cli.backends import Backend
from pinstage.cli.kv_cache import TableShape


class Upload(ABC):
    """A host table and the way that it takes to the device.

    Attributes:
        table: filled by the engine before each `upload_to`.
    """

    table: torch.Tensor

    @property
    @abstractmethod
    def pinned_bytes(self) -> int:
        """Pinned host memory that this way needs."""

    @abstractmethod
    def wait_before_refill(self) -> None:
        """Blocks until the table may be written."""

    @abstractmethod
    def upload_to(self, dst: torch.Tensor) -> None:
        """Enqueues the copy to the device."""


class BareUpload(Upload):
    """A pinned table, copied as it is and refilled at once: the copy reads whatever the table holds when it runs."""

    def __init__(self, backend: Backend, shape: TableShape) -> None:
        self.table = backend.pinned_tensor(shape)
        self._backend = backend

    @property
    @override
    def pinned_bytes(self) -> int:
        return self.table.nbytes

    @override
    def wait_before_refill(self) -> None:
        """Nothing, and this is the bug."""

    @override
    def upload_to(self, dst: torch.Tensor) -> None:
        self._backend.bare_copy(dst, self.table)


class EventWaitUpload(BareUpload):
    """A pinned table with an event after its copy, which the host waits for before it writes the table."""

    def __init__(self, backend: Backend, shape: TableShape) -> None:
        super().__init__(backend, shape)
        self._copied = backend.event()

    @override
    def wait_before_refill(self) -> None:
        self._copied.synchronize()

    @override
    def upload_to(self, dst: torch.Tensor) -> None:
        super().upload_to(dst)
        self._copied.record()


class PinstageUpload(Upload):
    """An ordinary table, copied by `pinstage.copy_`.

    Args:
        backend: the device.
        shape: of the table.
        pool: the staging pool; None is the device's default pool.
    """

    def __init__(self, backend: Backend, shape: TableShape, pool: pinstage.StagingPool | None = None) -> None:
        self.table = torch.empty(*shape, dtype=torch.int32)
        self._pool = pinstage.default_pool(backend.device) if pool is None else pool
        self._copy = pinstage.copy_ if pool is None else partial(pinstage.copy_, pool=pool)

    @property
    @override
    def pinned_bytes(self) -> int:
        return self._pool.stats().capacity_bytes

    @override
    def wait_before_refill(self) -> None:
        """Nothing: `copy_` took a snapshot."""

    @override
    def upload_to(self, dst: torch.Tensor) -> None:
        self._copy(dst, self.table)


# By their names in the JSON.
UPLOADS: dict[str, Callable[[Backend, TableShape], Upload]] = {
    "bare": BareUpload,
    "event_wait": EventWaitUpload,
    "pinstage": PinstageUpload,
}
