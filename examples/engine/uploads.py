# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""Ways to the device for a step's tensors: the reference, two that engines have today, and pinstage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from kv_cache import KvCache
from model import StepInputs
from step_tensors import Step, StepTensors
from typing_extensions import override

import pinstage
from pinstage.cli.backends import Backend


class Upload(ABC):
    """The tensors of a step on both sides, and a way between them.

    Args:
        backend: the device.
        cache: whose block map the tables are made from.
        tokens: most tokens of a step.
    """

    def __init__(self, backend: Backend, cache: KvCache, tokens: int) -> None:
        self._backend = backend
        self._map = cache.map
        sequences, width = cache.map.shape
        self.host = StepTensors(self._host_tensor, tokens, sequences)
        self._device = StepTensors(backend.device_tensor, tokens, sequences)
        self._device_table = backend.device_tensor((sequences, width))

    def _host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def wait_before_refill(self) -> None:  # noqa: B027  # most ways need no wait
        """Blocks until the host's tensors may be written."""

    def send(self, step: Step) -> StepInputs:
        """Enqueues the copies of a step that was written to `host`; returns what the device reads."""
        sequences = len(step.chunks)
        dsts, srcs = (side.live(step.tokens, sequences) for side in (self._device, self.host))
        self._send(dsts, srcs, self._device_table[:sequences], step)
        return StepInputs._make((*dsts, self._device_table[:sequences, : step.width]))

    @abstractmethod
    def _send(self, dsts: list[torch.Tensor], srcs: list[torch.Tensor], table: torch.Tensor, step: Step) -> None: ...


class BlockingUpload(Upload):
    """Copies that the host waits for, between steps that it waits for: the reference."""

    @override
    def _send(self, dsts: list[torch.Tensor], srcs: list[torch.Tensor], table: torch.Tensor, step: Step) -> None:
        self._backend.synchronize()
        for dst, src in zip(dsts, srcs, strict=True):
            dst.copy_(src)
        table.copy_(self._map[step.slots])


class BareUpload(Upload):
    """Pinned tensors, copied as they are and refilled at once: the copies read whatever they hold by then."""

    def __init__(self, backend: Backend, cache: KvCache, tokens: int) -> None:
        super().__init__(backend, cache, tokens)
        self._table = backend.pinned_tensor(cache.map.shape)

    @override
    def _host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._backend.pinned_tensor(shape, dtype)

    @override
    def _send(self, dsts: list[torch.Tensor], srcs: list[torch.Tensor], table: torch.Tensor, step: Step) -> None:
        rows = self._table[: len(step.chunks)]
        torch.index_select(self._map, 0, step.slots, out=rows)
        for dst, src in zip((*dsts, table), (*srcs, rows), strict=True):
            self._backend.bare_copy(dst, src)


class EventWaitUpload(BareUpload):
    """The same, with an event behind the copies that the host waits for before it writes the tensors again."""

    def __init__(self, backend: Backend, cache: KvCache, tokens: int) -> None:
        super().__init__(backend, cache, tokens)
        self._copied = backend.event()

    @override
    def wait_before_refill(self) -> None:
        self._copied.synchronize()

    @override
    def _send(self, dsts: list[torch.Tensor], srcs: list[torch.Tensor], table: torch.Tensor, step: Step) -> None:
        super()._send(dsts, srcs, table, step)
        self._copied.record()


class PinstageUpload(Upload):
    """Ordinary tensors: one submission for the small ones, and the table gathered from the map, its live width only.

    Args:
        backend: the device.
        cache: whose block map the tables are made from.
        tokens: most tokens of a step.
        pool: the staging pool; None is the device's default pool.
    """

    def __init__(self, backend: Backend, cache: KvCache, tokens: int, pool: pinstage.StagingPool | None = None) -> None:
        super().__init__(backend, cache, tokens)
        self._pool = pool

    @override
    def _send(self, dsts: list[torch.Tensor], srcs: list[torch.Tensor], table: torch.Tensor, step: Step) -> None:
        pinstage.copy_batch_(dsts, srcs, pool=self._pool)
        pinstage.copy_rows_(table[:, : step.width], self._map[:, : step.width], step.slots, pool=self._pool)


# By their names in the JSON.
UPLOADS: dict[str, Callable[[Backend, KvCache, int], Upload]] = {
    "bare": BareUpload,
    "event_wait": EventWaitUpload,
    "pinstage": PinstageUpload,
}
