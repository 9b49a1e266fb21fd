# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""A gate that holds a stream until a test lets it go.

A race shows only while work is still queued. Timed sleeps hold too short or too long; a latch holds exactly until
released, and says afterwards whether it really held, so that no test passes for want of a race.
"""

from __future__ import annotations

import ctypes
import threading
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from pinstage import _core
from pinstage.devices import StreamLike, stream_handle
from pinstage.errors import DriverError
from pinstage.testing.simulated import SimulatedStream

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from typing_extensions import Self


class Latch(ABC):
    """A held stream. Made by `latch()`; leaving its `with` block releases it."""

    @abstractmethod
    def release(self) -> None:
        """Lets the stream go on. Repeating it changes nothing."""

    @property
    @abstractmethod
    def held(self) -> bool:
        """Whether the stream stood still until `release()` (before it: whether it does)."""

    @property
    @abstractmethod
    def timed_out(self) -> bool:
        """Whether the timeout let the stream go before `release()` did."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def latch(stream: StreamLike, timeout: float = 10.0) -> Latch:
    """Holds `stream`: work enqueued on it from now on waits until the latch is released.

    Check `held` at the end of the test: where it is false, the test may have seen no race at all.

    Example:
        >>> import torch
        >>> from pinstage.testing import SimulatedDevice, latch
        >>> with SimulatedDevice(schedule="eager") as dev, dev.stream() as stream:
        ...     word = dev.zeros((), torch.int64)
        ...     with latch(stream) as gate:
        ...         dev.launch(lambda: word.fill_(7))
        ...         word.item()
        ...     stream.synchronize()
        ...     gate.held, word.item()
        0
        (True, 7)

    Args:
        stream: A stream of a simulated device, a `torch.cuda.Stream`, an int handle, or an object with
            `__cuda_stream__`. A handle 0 that does not say its device is the default stream of the current one, of a
            simulated one if there is one.
        timeout: Seconds after which the stream goes on by itself, so that a failing test ends.

    Raises:
        ValueError: `timeout` is not positive.
        TypeError: `stream` is no stream.
        DriverError: The driver refused.
    """
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout}: it must be a positive number of seconds")
    if isinstance(stream, SimulatedStream):
        return _SimulatedLatch(stream.device._core, stream.handle, timeout)
    handle = stream_handle(stream)
    if not isinstance(stream, torch.cuda.Stream):
        core = _core.SimulatedDevice.current() if handle == 0 else _core.SimulatedDevice.of_stream(handle)
        if core is not None:
            return _SimulatedLatch(core, handle, timeout)
    return _CudaLatch(handle, stream.device.index if isinstance(stream, torch.cuda.Stream) else None, timeout)


class _SimulatedLatch(Latch):
    def __init__(self, core: _core.SimulatedDevice, handle: int, timeout: float) -> None:
        status, self._latch = core.hold(handle, timeout)
        if status != 0:
            name, text = _core.simulated_error(status)
            raise DriverError(f"holding stream {handle:#x} failed: {name} ({status}), {text}", status)

    def release(self) -> None:
        self._latch.release()

    @property
    def held(self) -> bool:
        return self._latch.held

    @property
    def timed_out(self) -> bool:
        return self._latch.timed_out


class _Gate:
    """A pinned word that a stream waits on, and an event behind that wait."""

    def __init__(self, stream: int) -> None:
        driver = _driver()
        self.word = _take_word()
        self.word.value = 0
        self.event = _call("cuEventCreate", driver.CUevent_flags.CU_EVENT_DISABLE_TIMING.value)
        address = _call("cuMemHostGetDevicePointer", ctypes.addressof(self.word), 0)
        geq = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ.value
        try:
            _call("cuStreamWaitValue32", stream, address, 1, geq)
            _call("cuEventRecord", self.event, stream)
        except DriverError:
            self.open()
            raise

    def open(self) -> None:
        self.word.value = 1

    def passed(self) -> bool:
        driver = _driver()
        (status,) = driver.cuEventQuery(self.event)
        if status not in (driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_NOT_READY):
            _raise("cuEventQuery", status)
        return bool(status == driver.CUresult.CUDA_SUCCESS)


# Pinned words are never freed, since freeing can wait for the device, which another latch may hold. They are used again
# once their stream has read them; until then an opened gate waits here.
_WORDS_A_BLOCK = 1024
_words: list[ctypes.c_uint32] = []
_opened: list[_Gate] = []
_words_lock = threading.Lock()


def _take_word() -> ctypes.c_uint32:
    with _words_lock:
        for gate in [gate for gate in _opened if gate.passed()]:
            _opened.remove(gate)
            _words.append(gate.word)
            _call("cuEventDestroy", gate.event)
        if not _words:
            driver = _driver()
            flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
            block = _call("cuMemHostAlloc", 4 * _WORDS_A_BLOCK, flags)
            _words.extend(ctypes.c_uint32.from_address(block + 4 * i) for i in range(_WORDS_A_BLOCK))
        return _words.pop()


class _CudaLatch(Latch):
    def __init__(self, handle: int, index: int | None, timeout: float) -> None:
        with _context_of(handle, index), _relaxed():
            self._gate = _Gate(handle)
        self._lock = threading.Lock()
        self._released = False
        self._held = False
        self._timed_out = False
        self._watchdog = threading.Timer(timeout, self._time_out)
        self._watchdog.daemon = True
        self._watchdog.start()

    def release(self) -> None:
        with self._lock:
            if self._released:
                return
            self._held = self._holds()
            self._released = True
            self._gate.open()
        self._watchdog.cancel()
        with _words_lock:
            _opened.append(self._gate)

    def _time_out(self) -> None:
        # Without the lock: release() may hold it in a query that waits for this very gate, behind a full launch queue.
        if not self._released:
            self._timed_out = True
            self._gate.open()

    def _holds(self) -> bool:
        with _relaxed():
            return not self._timed_out and not self._gate.passed()

    @property
    def held(self) -> bool:
        with self._lock:
            return self._held if self._released else self._holds()

    @property
    def timed_out(self) -> bool:
        return self._timed_out


def _driver() -> Any:  # cuda-bindings has no annotations
    from cuda.bindings import driver  # only a GPU needs it

    return driver


def _call(name: str, *args: object) -> Any:
    """Calls cuda-python, raises on a status that is not success, returns the one result there may be."""
    status, *results = getattr(_driver(), name)(*args)
    if status != _driver().CUresult.CUDA_SUCCESS:
        _raise(name, status)
    return results[0] if results else None


def _raise(name: str, status: Any) -> None:
    raise DriverError(f"{name} failed: {status.name} ({int(status)})", int(status))


@contextmanager
def _context_of(stream: int, index: int | None) -> Iterator[None]:
    """Makes the stream's context current; of a default stream, which any device has, that of the device `index`."""
    if stream in (0, 1, 2):
        device = _call("cuDeviceGet", torch.cuda.current_device() if index is None else index)
        context = _call("cuDevicePrimaryCtxRetain", device)  # kept: the gate's event lives in it
    else:
        context = _call("cuStreamGetCtx", stream)
    _call("cuCtxPushCurrent", context)
    try:
        yield
    finally:
        _call("cuCtxPopCurrent")


@contextmanager
def _relaxed() -> Iterator[None]:
    """The RELAXED capture mode: queries and allocations of the latch break nobody's capture."""
    mode = _driver().CUstreamCaptureMode
    before = _call("cuThreadExchangeStreamCaptureMode", mode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield
    finally:
        _call("cuThreadExchangeStreamCaptureMode", before)
