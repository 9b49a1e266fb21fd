# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""Ways to the device for a step's tensors: the reference, two that engines have today, and pinstage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from model import StepInputs
from step_tensors import Step, StepTensors
from typing_extensions import override

import pinstage
from pinstage.cli.backends import Backend


class Upload(ABC):
    """The tensors of a step on both sides, and a way between them.

    Args:
        backend: the device.
        slots: rows of the block map.
        width: its columns.
        tokens: most tokens of a step.

    Attributes:
        host: written anew for each step.
        map: the block map, [slots, width] int32, of which the scheduler changes some rows in each step.
    """

    def __init__(self, backend: Backend, slots: int, width: int, tokens: int) -> None:
        self._backend = backend
        self.host = StepTensors(self._host_tensor, tokens, slots)
        self._device = StepTensors(backend.device_tensor, tokens, slots)
        self.map, self._device_map = self._make_map(slots, width)

    def _make_map(self, slots: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The block map on the host and on the device."""
        return self._host_tensor((slots, width), torch.int32), self._backend.device_tensor((slots, width))

    def _host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def wait_before_refill(self) -> None:  # noqa: B027  # most ways need no wait
        """Blocks until `host` and `map` may be written."""

    def send(self, step: Step) -> StepInputs:
        """Enqueues the copies of a step that was written; returns what the device reads."""
        dsts, srcs = (side.live(step.tokens, len(step.chunks)) for side in (self._device, self.host))
        self._send(dsts, srcs, step)
        return StepInputs._make((*dsts, self._device_map[:, : step.width]))

    @abstractmethod
    def _send(self, dsts: list[torch.Tensor], srcs: list[torch.Tensor], step: Step) -> None: ...


class BlockingUpload(Upload):
    """Copies that the host waits for, between steps that it waits for: the reference."""

    @override
    def _send(self, dsts: list[torch.Tensor], srcs: list[torch.Tensor], step: Step) -> None:
        self._backend.synchronize()
        for dst, src in zip((*dsts, self._device_map), (*srcs, self.map), strict=True):
            dst.copy_(src)


class BareUpload(Upload):
    """Pinned tensors, copied as they are and refilled at once: the copies read whatever they hold by then."""

    @override
    def _host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._backend.pinned_tensor(shape, dtype)

    @override
    def _send(self, dsts: list[torch.Tensor], srcs: list[torch.Tensor], step: Step) -> None:
        for dst, src in zip((*dsts, self._device_map), (*srcs, self.map), strict=True):
            self._backend.bare_copy(dst, src)


class EventWaitUpload(BareUpload):
    """The same, with an event behind the copies that the host waits for before it writes the tensors again."""

    def __init__(self, backend: Backend, slots: int, width: int, tokens: int) -> None:
        super().__init__(backend, slots, width, tokens)
        self._copied = backend.event()

    @override
    def wait_before_refill(self) -> None:
        self._copied.synchronize()

    @override
    def _send(self, dsts: list[torch.Tensor], srcs: list[torch.Tensor], step: Step) -> None:
        super()._send(dsts, srcs, step)
        self._copied.record()


class PinstageUpload(Upload):
    """Ordinary tensors in one submission, and a table for the map, of which the live columns of changed rows are sent.

    Args:
        backend: the device.
        slots: rows of the block map.
        width: its columns.
        tokens: most tokens of a step.
        pool: the staging pool; None is the device's default pool.
    """

    def __init__(
        self, backend: Backend, slots: int, width: int, tokens: int, pool: pinstage.StagingPool | None = None
    ) -> None:
        self._pool = pool
        super().__init__(backend, slots, width, tokens)

    @override
    def _make_map(self, slots: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        # Compared with what was last sent: the scheduler need not know that somebody wants to be told of its writes.
        self._table = pinstage.StagedTable(
            (slots, width), torch.int32, self._backend.device, track="compare", pool=self._pool
        )
        return self._table.host, self._table.device

    @override
    def _send(self, dsts: list[torch.Tensor], srcs: list[torch.Tensor], step: Step) -> None:
        pinstage.copy_batch_(dsts, srcs, pool=self._pool)
        self._table.commit(width=step.width)


# Of a backend, slots, width and tokens, as Upload says.
MakeUpload = Callable[[Backend, int, int, int], Upload]

# By their names in the JSON.
UPLOADS: dict[str, MakeUpload] = {
    "bare": BareUpload,
    "event_wait": EventWaitUpload,
    "pinstage": PinstageUpload,
}
