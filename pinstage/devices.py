# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""From what a caller passes as `device=` and `stream=` to the core's devices and stream handles."""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias, Union

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from pinstage import _core, cuda
from pinstage.errors import DriverError


class SupportsCudaStream(Protocol):
    """An object that offers its stream by the ``__cuda_stream__`` protocol of cuda-python."""

    def __cuda_stream__(self) -> tuple[int, int]:
        """(protocol version, stream handle)."""


StreamLike: TypeAlias = Union["torch.cuda.Stream", int, SupportsCudaStream]
# A torch device, its name or number, or a pinstage.testing.SimulatedDevice (known by its `_core`).
DeviceLike: TypeAlias = Any

_cuda_devices: dict[int, _core.Device] = {}
_simulated_devices: dict[int, _core.Device] = {}  # by id(); each Device keeps its simulation alive
_opening = threading.RLock()  # a device is opened once, although opening it lets other threads run


def _after_fork() -> None:
    global _opening
    _opening = threading.RLock()  # a thread that does not exist here may hold the old one


os.register_at_fork(after_in_child=_after_fork)


def resolve(device: DeviceLike = None) -> _core.Device:
    """The core's device for `device`; None means the current one, as torch sees it.

    Raises:
        DriverError: no such GPU, or no driver.
        ValueError: not a CUDA device.
    """
    if isinstance(device, _core.Device):
        return device
    simulation = getattr(device, "_core", None)
    if device is None and not torch.cuda.is_available():
        simulation = _core.SimulatedDevice.current()
        if simulation is None:
            cuda.open_device(0)  # raises, and says what to do
    if isinstance(simulation, _core.SimulatedDevice):
        return _simulated(simulation)
    if isinstance(device, int):
        index = device
    else:
        named = torch.device("cuda" if device is None else device)
        if named.type != "cuda":
            raise ValueError(f"pinstage copies to CUDA devices (or a SimulatedDevice), not to {named}")
        if str(named) == "cuda" and torch.cuda.is_available():
            named = torch.device("cuda", torch.cuda.current_device())
        index = named.index or 0
    core = _cuda_devices.get(index)
    if core is None:
        with _opening:
            core = _cuda_devices.get(index)
            if core is None:
                core = _cuda_devices[index] = _opened(cuda.open_device(index))
    return core


def is_never(variable: str) -> bool:
    """What the environment chooses between "auto", which is the default, and "never".

    Raises:
        ValueError: it says something else.
    """
    choice = os.environ.get(variable, "auto")
    if choice not in ("auto", "never"):
        raise ValueError(f'{variable} is "auto" or "never", not {choice!r}')
    return choice == "never"


def _opened(core: _core.Device) -> _core.Device:
    if is_never("PINSTAGE_KERNEL"):
        core.refuses_scatter = True
    return core


def _simulated(simulation: _core.SimulatedDevice) -> _core.Device:
    core = _simulated_devices.get(id(simulation))
    if core is None:
        if simulation.closed:
            raise DriverError(f"simulated:{simulation.index} is closed; use a device that is open")
        with _opening:
            core = _simulated_devices.get(id(simulation))
            if core is None:
                core = _simulated_devices[id(simulation)] = _opened(_core.Device.simulated(simulation))
    return core


def forget_simulated(simulation: _core.SimulatedDevice) -> None:
    """A simulated device closes: no driver call is made for it any more."""
    core = _simulated_devices.pop(id(simulation), None)
    if core is not None:
        core.shutdown()


def dispatches(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is of a subclass that implements operations itself: it may have no memory (a fake tensor)."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def holding(tensor: torch.Tensor) -> _core.Device | None:
    """The device whose memory `tensor` lies in, or None for host memory."""
    if tensor.device.type == "cuda":
        return resolve(tensor.device)
    if tensor.device.type != "cpu" or _core.SimulatedDevice.live() == 0 or dispatches(tensor):
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # no storage: a fake or functional tensor
        return None
    simulation = _core.SimulatedDevice.find(address)
    return None if simulation is None else _simulated(simulation)


def stream_handle(stream: StreamLike, core: _core.Device | None = None) -> int:
    """The driver's handle of a stream argument.

    Args:
        stream: what the caller passed.
        core: the device that it has to be of. The default streams of all devices have the same handle, 0: one of
            another device would be taken for this device's without a word.

    Raises:
        TypeError: not a torch stream, an int handle, or an object with ``__cuda_stream__``.
        ValueError: it says that it is of another device.
    """
    if isinstance(stream, int):
        return stream
    if not hasattr(stream, "__cuda_stream__") and not isinstance(stream, torch.cuda.Stream):
        raise TypeError(
            f"a stream is a torch.cuda.Stream, an int handle or has __cuda_stream__; got {type(stream).__name__}"
        )
    if core is not None and _is_elsewhere(stream, core):
        raise ValueError(f"{stream!r} is not of {core.name}: pass a stream of that device, or use the stream's device")
    return int(stream.cuda_stream if isinstance(stream, torch.cuda.Stream) else stream.__cuda_stream__()[1])


def _is_elsewhere(stream: StreamLike, core: _core.Device) -> bool:
    device = getattr(stream, "device", None)
    if isinstance(device, torch.device):
        return core.simulation is not None or device.index != core.index
    simulation = getattr(device, "_core", None)
    return isinstance(simulation, _core.SimulatedDevice) and simulation is not core.simulation


def device_of(stream: StreamLike) -> _core.Device | None:
    """The device that a stream says it is of; None where it does not say, as an int handle does not."""
    device = getattr(stream, "device", None)
    if isinstance(device, torch.device) or isinstance(getattr(device, "_core", None), _core.SimulatedDevice):
        return resolve(device)
    return None


def empty(core: _core.Device, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A new contiguous tensor on the device, uninitialised; on a GPU from torch's allocator, on the current stream."""
    if core.simulation is None:
        return torch.empty(tuple(shape), dtype=dtype, device=torch.device("cuda", core.index))
    return empty_simulated(core.simulation, shape, dtype)


def empty_simulated(simulation: _core.SimulatedDevice, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A new contiguous tensor over a new block of a simulated device's heap, which ends when its last view died."""
    nbytes = math.prod(shape) * dtype.itemsize
    address = simulation.heap_alloc(max(nbytes, 1))
    block = (ctypes.c_char * max(nbytes, 1)).from_address(address)
    weakref.finalize(block, _core.SimulatedDevice.heap_free, address).atexit = False
    return torch.frombuffer(block, dtype=torch.uint8)[:nbytes].view(dtype).view(tuple(shape))


@contextmanager
def on_stream(core: _core.Device, handle: int) -> Iterator[None]:
    """Makes a stream, given by its handle, the device's current one in this thread for a ``with`` block."""
    if handle == core.current_stream:
        yield
        return
    simulation = core.simulation
    if simulation is not None:
        before, simulation.current_stream = simulation.current_stream, handle
        try:
            yield
        finally:
            simulation.current_stream = before
        return
    # ExternalStream(0) would be a new stream.
    stream: torch.cuda.Stream = torch.cuda.default_stream(core.index)
    if handle != stream.cuda_stream:
        stream = torch.cuda.ExternalStream(handle, core.index)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield


def run_on_stream(core: _core.Device, step: Callable[[], object], *, writes: torch.Tensor) -> None:
    """Runs device-side torch work in order on the device's current stream; `writes` is the tensor that it writes."""
    simulation = core.simulation
    if simulation is None:
        step()
        return

    def kernel() -> None:
        with _unsafe_preserve_version_counter(writes), torch.no_grad():
            step()

    status = simulation.launch(core.current_stream, kernel)
    if status != 0:
        raise DriverError(f"launching a copy on {core.name} failed: {_core.simulated_error(status)[0]}", status)
    torch._C._increment_version([writes])  # now, as torch counts a write when it is enqueued


@atexit.register
def _shut_down() -> None:
    # First: a daemon thread whose wait ends by the shutdown shall not come back to tell of it.
    _core.prepare_exit()
    # Tensors and pools may outlive the driver; from here on none of them calls it.
    for core in (*_cuda_devices.values(), *_simulated_devices.values()):
        core.shutdown()
