# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""A device with CUDA's asynchronous semantics, on a machine without one.

It answers the same table of driver calls as a GPU, so pinstage runs on it unchanged. Nothing happens when it is
enqueued: a copy reads its source when its step runs, and the *schedule* says when that is. csrc/simulated_driver.h has
the model and the rules in full.
"""

from __future__ import annotations

import atexit
import os
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from pinstage import _core, devices
from pinstage.errors import DriverError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType
    from typing import TypeAlias

    from typing_extensions import Self

    class _CudaStreamLike(Protocol):
        def __cuda_stream__(self) -> tuple[int, int]: ...

    StreamLike: TypeAlias = "SimulatedStream | int | _CudaStreamLike"
    ScheduleName: TypeAlias = Literal["late", "eager", "random", "manual"]
    CaptureMode: TypeAlias = Literal["global", "thread_local", "relaxed"]

_SCHEDULES = {
    "late": _core.Schedule.LATE,
    "eager": _core.Schedule.EAGER,
    "random": _core.Schedule.RANDOM,
    "manual": _core.Schedule.MANUAL,
}
_CAPTURE_MODES = {"global": 0, "thread_local": 1, "relaxed": 2}
_EVERY_STEP = 2**63 - 1
_LAUNCH_FAILED = 719
_NOTHING_CAN_RUN = -1


class SimulatedStream:
    """A stream of a simulated device: a queue whose steps run in order, later.

    Made by `SimulatedDevice.stream()`. Its handle goes back to the device when the object dies, and may then name
    another stream, as with a real driver; steps still queued run all the same.

    Attributes:
        device: The device that it belongs to.
        handle: What stands for it in driver calls. 0 for the default stream.
    """

    def __init__(self, device: SimulatedDevice, handle: int) -> None:
        self.device = device
        self.handle = handle
        if handle != 0:
            weakref.finalize(self, device._core.destroy_stream, handle).atexit = False

    def __cuda_stream__(self) -> tuple[int, int]:
        """The stream protocol: its version, 0, and the handle."""
        return (0, self.handle)

    def __repr__(self) -> str:
        return f"<stream {self.handle:#x} of {self.device!r}>"

    def pending(self) -> int:
        """The number of steps that have not finished."""
        return self.device._core.pending_stream(self.handle)

    def synchronize(self) -> None:
        """Runs whatever this stream waits for until it is empty, in every schedule.

        Raises:
            DriverError: Its steps wait for something that nobody can run, or the device is lost.
            Exception: What a kernel raised.
        """
        self.device._check(self.device._core.synchronize_stream(self.handle), f"synchronizing {self!r}")


class SimulatedGraph:
    """What `SimulatedDevice.capture()` recorded: steps that every replay enqueues anew.

    A replayed copy reads the same source address again, at the time when its step runs.
    """

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._graph: _core.SimulatedGraph | None = None

    def replay(self, stream: StreamLike | None = None) -> None:
        """Enqueues the captured steps, in order, on `stream` (default: the current stream).

        Raises:
            RuntimeError: The capture has not ended, or failed.
            DriverError: The device is lost.
        """
        if self._graph is None:
            raise RuntimeError("this graph holds nothing: replay it after the capture() block ended without an error")
        handle = self._device._handle(stream)
        self._device._check(self._device._core.replay(self._graph, handle), "replaying a graph")


class SimulatedDevice:
    """A device without a GPU, whose every legal interleaving can be tested.

    Device tensors are ordinary CPU tensors in the device's own heap. Torch's operations on them happen at once; only
    what goes through a stream (copies, kernels given to `launch()`) is asynchronous. Read them after `synchronize()`.

    As a context manager it is closed at the end of the block: what can still run runs, what cannot is dropped. Tensors
    stay readable. Several devices may be open at once. Where the thread has no current device yet, entering makes this
    one current, so that stream 0 means its default stream there.

    Example:
        The bug that pinstage is for: the source is written while the copy is queued.

        >>> import torch
        >>> from pinstage.testing import SimulatedDevice
        >>> with SimulatedDevice(schedule="late") as dev:
        ...     table = torch.tensor([1, 2, 3], dtype=torch.int32)
        ...     mirror = dev.empty(3, torch.int32)
        ...     dev.copy_async(mirror, table)
        ...     _ = table.fill_(9)
        ...     dev.synchronize()
        ...     mirror.tolist()
        [9, 9, 9]

    Args:
        index: The device's number, as in "cuda:0".
        schedule: When steps run. "late": when something waits, and only what the wait needs, so that every copy reads
            its source at the last legal moment. "eager": at once. "random": zero to three steps at every driver call,
            and more in waits. "manual": when the test calls `run()`.
        seed: Of the schedule "random". One thread and one seed give one interleaving.
        queue_depth: Steps that may be pending before a submission blocks, as with a real launch queue.
        lying_queries: Event queries always say done: the negative control of a race test.

    Raises:
        ValueError: No such schedule, or a queue depth below 1.
    """

    def __init__(
        self,
        index: int = 0,
        schedule: ScheduleName = "late",
        seed: int = 0,
        queue_depth: int = 1024,
        lying_queries: bool = False,
    ) -> None:
        if schedule not in _SCHEDULES:
            raise ValueError(f"schedule is {schedule!r}: use one of {', '.join(map(repr, _SCHEDULES))}")
        if queue_depth < 1:
            raise ValueError(f"queue_depth is {queue_depth}: at least 1 step must fit")
        self.schedule = schedule
        self.seed = seed
        self._core = _core.SimulatedDevice(index, _SCHEDULES[schedule], seed, queue_depth, lying_queries)
        self._streams: weakref.WeakValueDictionary[int, SimulatedStream] = weakref.WeakValueDictionary()
        self._default_stream = SimulatedStream(self, 0)
        self._kernel_error: BaseException | None = None
        self._reported = False
        self._at_close: list[Callable[[], object]] = []
        _open_devices.add(self)

    def __enter__(self) -> Self:
        if _core.SimulatedDevice.current() is None:
            self.make_current()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
        if error is None and not self._reported:
            self._raise_kernel_error()

    def __repr__(self) -> str:
        return f"SimulatedDevice(index={self.index}, schedule={self.schedule!r}, seed={self.seed})"

    @property
    def index(self) -> int:
        """The device's number."""
        return self._core.index

    def make_current(self) -> None:
        """Makes this the thread's current device, like `cudaSetDevice`: the one whose default stream is stream 0."""
        self._core.make_current()

    def at_close(self, callback: Callable[[], object]) -> None:
        """Calls `callback` when the device closes, after its last steps ran. The latest is called first."""
        self._at_close.append(callback)

    def close(self) -> None:
        """Runs what can still run, drops what cannot, and takes the device away. Repeating it changes nothing."""
        if self._core.closed:
            return
        self._core.run(_EVERY_STEP)
        try:
            while self._at_close:
                self._at_close.pop()()
        finally:
            self._core.run(_EVERY_STEP)
            devices.forget_simulated(self._core)
            self._core.drop_current()
            self._core.close()
            self._take_kernel_error()

    # --- tensors ------------------------------------------------------------------------------------------------------

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A new contiguous device tensor of `shape`, filled with a poison pattern (0xCD bytes).

        Its memory lives until the last view died and the last step that uses it ran.
        """
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(size < 0 for size in sizes):
            raise ValueError(f"shape is {sizes}: sizes cannot be negative")
        return devices.empty_simulated(self._core, sizes, dtype)

    def zeros(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A new contiguous device tensor of zeros, at once rather than in stream order."""
        return self.empty(shape, dtype).zero_()

    # --- streams ------------------------------------------------------------------------------------------------------

    @property
    def default_stream(self) -> SimulatedStream:
        """Stream 0 of this device."""
        return self._default_stream

    @property
    def current_stream(self) -> SimulatedStream:
        """The stream that this thread's work on this device goes to."""
        return self._known_stream(self._core.current_stream)

    @contextmanager
    def stream(self, existing: StreamLike | None = None) -> Iterator[SimulatedStream]:
        """Makes a new stream, or an existing one of this device, current in this thread for a `with` block.

        Raises:
            ValueError: `existing` belongs to another device, or has been destroyed.
            DriverError: The device is lost or closed.
        """
        stream = self._new_stream() if existing is None else self._known_stream(self._handle(existing))
        before = self._core.current_stream
        self._core.current_stream = stream.handle
        try:
            yield stream
        finally:
            self._core.current_stream = before

    def _new_stream(self) -> SimulatedStream:
        status, handle = self._core.create_stream()
        self._check(status, "creating a stream")
        stream = SimulatedStream(self, handle)
        self._streams[handle] = stream
        return stream

    def _known_stream(self, handle: int) -> SimulatedStream:
        if handle == 0:
            return self._default_stream
        stream = self._streams.get(handle)
        if stream is None:
            raise ValueError(f"stream {handle:#x} is no stream of {self!r}, or not any more")
        return stream

    def _handle(self, stream: StreamLike | None) -> int:
        if stream is None:
            return self._core.current_stream
        if isinstance(stream, SimulatedStream):
            if stream.device is not self:
                raise ValueError(f"{stream!r} is used on {self!r}: use a stream of that device")
            return stream.handle
        return stream if isinstance(stream, int) else stream.__cuda_stream__()[1]

    # --- work ---------------------------------------------------------------------------------------------------------

    def launch(self, fn: Callable[[], object], stream: StreamLike | None = None) -> None:
        """Enqueues a Python callable as a kernel: it runs in stream order, on whichever thread advances the stream.

        It may read and write tensors at once. It must neither enqueue nor wait. If it raises, the device is lost, as
        after a failed kernel, and `synchronize()` raises the exception.

        Args:
            fn: Called without arguments, once (and once for each replay of a graph that it was captured into).
            stream: Default: the current stream.

        Raises:
            DriverError: The device is lost.
        """
        self._check(self._core.launch(self._handle(stream), fn), "launching a kernel")

    def copy_async(self, dst: torch.Tensor, src: torch.Tensor, stream: StreamLike | None = None) -> None:
        """Enqueues the bare copy that pinstage replaces, as `dst.copy_(src, non_blocking=True)` does on a GPU.

        A borrow without a fence: `src` is kept alive, yet nothing guards its bytes, which are read when the step runs.
        It is here as the negative control of race tests.

        Args:
            dst: A contiguous tensor of this device.
            src: A contiguous CPU tensor of the same shape and dtype, pinned or not.
            stream: Default: the current stream.

        Raises:
            ValueError: Shapes or dtypes differ, or a tensor is not contiguous.
            DriverError: `dst` is no device tensor, or the device is lost.
        """
        if dst.shape != src.shape or dst.dtype != src.dtype:
            raise ValueError(
                f"dst is {tuple(dst.shape)} {dst.dtype} and src is {tuple(src.shape)} {src.dtype}: "
                "a bare copy converts nothing; use pinstage.copy_"
            )
        if not (dst.is_contiguous() and src.is_contiguous()):
            raise ValueError("a bare copy needs contiguous tensors: use .contiguous(), or pinstage.copy_")
        nbytes = dst.numel() * dst.element_size()
        status = self._core.copy_async(dst.data_ptr(), src.data_ptr(), nbytes, self._handle(stream), src)
        self._check(status, "cuMemcpyHtoDAsync")

    def run(self, steps: int | None = None, stream: StreamLike | None = None) -> int:
        """Runs legal steps, the oldest first, in any schedule. Never waits.

        Args:
            steps: At most so many. Default: all that can run.
            stream: Only steps of this stream.

        Returns:
            The number of steps that ran; fewer than asked for when no other was legal.
        """
        limit = _EVERY_STEP if steps is None else steps
        if stream is None:
            return self._core.run(limit)
        return self._core.run_stream(limit, self._handle(stream))

    def pending(self) -> int:
        """The number of steps on all streams that have not finished."""
        return self._core.pending()

    def synchronize(self) -> None:
        """Runs everything that is queued, in every schedule; waits for latches and for steps that other threads run.

        Raises:
            DriverError: The rest waits for something that nobody can run, or the device is lost.
            Exception: What a kernel raised.
        """
        self._check(self._core.synchronize(), f"synchronizing {self!r}")

    @contextmanager
    def capture(self, stream: StreamLike | None = None, mode: CaptureMode = "global") -> Iterator[SimulatedGraph]:
        """Captures what the block enqueues on `stream`, and on streams that wait for it, into a graph.

        Args:
            stream: Default: the current stream, or a new one where that is the default stream, which cannot be
                captured. It is current inside the block.
            mode: Which calls break the capture: "global", "thread_local" or "relaxed", as of `cuStreamBeginCapture`.

        Raises:
            ValueError: No such mode.
            DriverError: The capture could not begin, or a call inside or beside it broke it.
        """
        if mode not in _CAPTURE_MODES:
            raise ValueError(f"mode is {mode!r}: use one of {', '.join(map(repr, _CAPTURE_MODES))}")
        if stream is None and self._core.current_stream != 0:
            stream = self.current_stream
        graph = SimulatedGraph(self)
        with self.stream(stream) as captured:
            self._check(self._core.begin_capture(captured.handle, _CAPTURE_MODES[mode]), "beginning a capture")
            try:
                yield graph
            except BaseException:
                self._core.end_capture(captured.handle)
                raise
            status, captured_graph = self._core.end_capture(captured.handle)
            self._check(status, "ending a capture")
            graph._graph = captured_graph

    # --- faults and observation ---------------------------------------------------------------------------------------

    def fail(self, entry: str, nth: int = 1, status: int = 2, times: int = 1) -> None:
        """Makes a driver call to come fail: it returns `status` and does nothing else.

        Args:
            entry: The CUDA name, as in `calls`.
            nth: The first call that fails, counted from now; 1 is the next.
            status: A CUresult; 2 is out of memory.
            times: How many calls in a row fail.

        Raises:
            ValueError: No such entry point, or `nth` or `times` below 1.
        """
        if nth < 1 or times < 1:
            raise ValueError(f"nth is {nth} and times is {times}: both count from 1")
        if not self._core.fail(entry, nth, status, times):
            raise ValueError(f"the driver table has no {entry!r}: use one of {', '.join(sorted(self.calls))}")

    def lose(self, status: int = _LAUNCH_FAILED, *, after: int = 0) -> None:
        """Loses the device: nothing runs any more, and every call returns `status`.

        Args:
            status: A CUresult; 719 is a failed launch.
            after: Driver calls that still succeed. 0: it is lost now.

        Raises:
            ValueError: `after` is negative.
        """
        if after < 0:
            raise ValueError(f"after is {after}: a number of calls cannot be negative")
        self._core.lose(status, after)

    @property
    def calls(self) -> Mapping[str, int]:
        """How often each driver entry point was called on this device, by CUDA name."""
        return self._core.calls

    @property
    def violations(self) -> int:
        """How many queued copies had their source freed or unregistered before they read it."""
        return self._core.violations

    @property
    def host_allocations(self) -> int:
        """Live blocks of host memory that were allocated or registered with this device current."""
        return self._core.host_allocations

    def _check(self, status: int, what: str) -> None:
        if status == 0:
            return
        if status == _LAUNCH_FAILED:
            self._raise_kernel_error()
        if status == _NOTHING_CAN_RUN:
            raise DriverError(
                f"{what}: {self.pending()} steps are queued and none can run. They wait for an event of a device "
                "that is lost or closed",
                status,
            )
        name, text = _core.simulated_error(status)
        raise DriverError(f"{what} failed: {name} ({status}), {text}", status)

    def _take_kernel_error(self) -> None:
        # Kept here, where the garbage collector sees that its traceback refers to this device.
        if self._kernel_error is None:
            self._kernel_error = self._core.take_kernel_error()

    def _raise_kernel_error(self) -> None:
        self._take_kernel_error()
        if self._kernel_error is not None:
            self._reported = True
            raise self._kernel_error


_pid = os.getpid()
_open_devices: weakref.WeakSet[SimulatedDevice] = weakref.WeakSet()


@atexit.register
def _drop_what_is_queued() -> None:
    # No kernel may run while the interpreter goes away. A forked child leaves its parent's devices alone.
    if os.getpid() != _pid:
        return
    _core.prepare_exit()  # as pinstage.devices does: a wait that ends by this is nobody's error
    for device in list(_open_devices):
        device._core.close()
