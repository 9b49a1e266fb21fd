# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""Where the demo runs: a GPU, or a simulated device where there is none."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from typing_extensions import override

from pinstage.cli.errors import UsageError
from pinstage.testing import SimulatedDevice


class Event(Protocol):
    """A point of the device's work that the host can wait for. Not recorded, there is nothing to wait for."""

    def record(self) -> None:
        """Marks the work enqueued so far."""

    def synchronize(self) -> None:
        """Blocks the host until the marked work has run."""


class Backend(ABC):
    """What the engine needs of a device. All work goes to one stream, in order.

    Attributes:
        name: for people, and for the JSON.
        reason: why this device was chosen.
        simulated: whether times are those of a simulation.
        device: what pinstage takes as `device=`.
    """

    name: str
    reason: str
    simulated: bool
    device: Any

    @abstractmethod
    def device_tensor(self, shape: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """A new tensor on the device."""

    @abstractmethod
    def pinned_tensor(self, shape: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """A new tensor in pinned host memory."""

    @abstractmethod
    def event(self) -> Event:
        """A new event."""

    @abstractmethod
    def set_layers(self, milliseconds: float) -> None:
        """Sets how long `enqueue_layers` keeps the device busy, about."""

    @abstractmethod
    def enqueue_layers(self) -> None:
        """Enqueues the work that a step's copy queues behind, as it does behind a model's layers."""

    @abstractmethod
    def bare_copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Enqueues an asynchronous copy to the device that nothing guards."""

    @abstractmethod
    def own_stream(self) -> AbstractContextManager[object]:
        """Makes a new stream current for a block: the default stream takes no batches of copies."""

    @abstractmethod
    def launch(self, kernel: Callable[[], object]) -> None:
        """Enqueues torch operations on device tensors."""

    def enqueue_attention(self, table: torch.Tensor, seen: torch.Tensor) -> None:
        """Enqueues a kernel that reads the device's `table` and keeps in `seen` what it read."""
        self.launch(lambda: seen.copy_(table))

    @abstractmethod
    def synchronize(self) -> None:
        """Blocks the host until everything has run."""


class CudaBackend(Backend):
    """A GPU. A step's layers are matrix products."""

    simulated = False

    _SIZE = 4096  # 0.14 TFLOP a product: 0.2 ms on an H200

    def __init__(self, index: int, reason: str) -> None:
        self.device = torch.device("cuda", index)
        self.name = f"{torch.cuda.get_device_name(index)} ({self.device})"
        self.reason = reason
        self._weights = torch.randn(self._SIZE, self._SIZE, dtype=torch.float16, device=self.device)
        self._product = torch.empty_like(self._weights)
        self._products = 1
        self._product_ms = self._measure_layers()

    def _measure_layers(self) -> float:
        """Milliseconds of the layers: the quickest of some runs, so that the GPU has warmed up."""
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        times = []
        for _ in range(20):
            start.record()
            self.enqueue_layers()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return float(min(times))

    @override
    def device_tensor(self, shape: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.device)

    @override
    def pinned_tensor(self, shape: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, pin_memory=True)

    @override
    def event(self) -> Event:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    @override
    def set_layers(self, milliseconds: float) -> None:
        self._products = math.ceil(milliseconds / self._product_ms)

    @override
    def enqueue_layers(self) -> None:
        for _ in range(self._products):
            torch.mm(self._weights, self._weights, out=self._product)

    @override
    def bare_copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src, non_blocking=True)

    @override
    def own_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    @override
    def launch(self, kernel: Callable[[], object]) -> None:
        kernel()

    @override
    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


class _SimulatedEvent:
    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._pending = 0

    def record(self) -> None:
        self._pending += 1
        self._device.launch(self._pass)

    def _pass(self) -> None:
        self._pending -= 1

    def synchronize(self) -> None:
        # Runs no more than it must: what comes after the event stays queued, as behind a busy GPU.
        while self._pending:
            if self._device.run(steps=1) == 0:
                self._device.synchronize()  # raises: says why nothing can run


class SimulatedBackend(Backend):
    """A simulated device. With its schedule "late", everything stays queued until the host waits for it."""

    simulated = True

    device: SimulatedDevice

    def __init__(self, device: SimulatedDevice, reason: str) -> None:
        self.device = device
        self.name = "simulated device"
        self.reason = reason

    @override
    def device_tensor(self, shape: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return self.device.empty(shape, dtype)

    @override
    def pinned_tensor(self, shape: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype)  # no pinning without a GPU; the simulation asks for none

    @override
    def event(self) -> Event:
        return _SimulatedEvent(self.device)

    @override
    def set_layers(self, milliseconds: float) -> None:
        """Nothing: the schedule keeps the device busy."""

    @override
    def enqueue_layers(self) -> None:
        """Nothing: the schedule keeps the device busy."""

    @override
    def bare_copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.device.copy_async(dst, src)

    @override
    def own_stream(self) -> AbstractContextManager[object]:
        return self.device.stream()

    @override
    def launch(self, kernel: Callable[[], object]) -> None:
        self.device.launch(kernel)

    @override
    def synchronize(self) -> None:
        self.device.synchronize()


@contextmanager
def open_backend(name: str) -> Iterator[Backend]:
    """The backend that `--device` names.

    Args:
        name: "auto" (a GPU if there is one), "cuda", "cuda:N" or "simulated".

    Raises:
        UsageError: no such device here, or not a device that the demo knows.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "simulated" or (name == "auto" and gpus == 0):
        reason = "as asked for" if name == "simulated" else "no GPU found"
        with SimulatedDevice(schedule="late") as device:
            yield SimulatedBackend(device, reason)
        return
    kind, colon, number = name.partition(":")
    if name != "auto" and (kind != "cuda" or bool(colon) != number.isdecimal()):
        raise UsageError(f"--device is {name!r}: use auto, cuda, cuda:N or simulated")
    if gpus == 0:
        raise UsageError(f"--device is {name!r}, but torch sees no GPU here; use --device simulated")
    index = int(number) if number else torch.cuda.current_device()
    if index >= gpus:
        raise UsageError(f"there is no cuda:{index}; torch sees {gpus} GPU{'s' if gpus > 1 else ''}, from cuda:0")
    with torch.cuda.device(index):
        yield CudaBackend(index, "found by torch" if name == "auto" else "as asked for")
