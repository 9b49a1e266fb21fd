# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""Staging pools and leases: pinned slots that are reused only after the device has read them."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index
from types import TracebackType
from typing import Literal, TypeAlias

import torch
from typing_extensions import Self

from pinstage import _core
from pinstage.budget import SMALLEST_SLOT, default_max_bytes
from pinstage.devices import DeviceLike, StreamLike, holding, is_never, resolve, run_on_stream, stream_handle
from pinstage.dtypes import code_of
from pinstage.errors import LeaseStateError, PinstageError
from pinstage.ticket import Ticket, release_passed

ShapeLike: TypeAlias = int | Sequence[int]

_INITIAL_BYTES = 8 << 20  # one pinning of 4 to 5 ms on an H200 host; doubles from there


@dataclass(frozen=True)
class PoolStats:
    """A staging pool at one moment. Bytes are bytes of slots, rounded up to 256; the states add up to the capacity.

    Attributes:
        capacity_bytes: pinned by the pool.
        open_bytes: leased, being filled.
        in_flight_bytes: handed over, not yet read by the device as far as was polled.
        held_bytes: read by the device, but a tensor over them still lives.
        parked_bytes: handed over without `copy_to` or `retire`: nobody knows who reads them.
        captured_bytes: baked into a CUDA graph.
        quarantined_bytes: no fence could be had for them; never reused.
        free_bytes: ready to be leased.
        high_water_bytes: most that was not free at once.
        slabs: pinned allocations that the pool holds now.
        host_allocations: pinned allocations made so far.
        events_created: CUDA events made so far on this device.
        copies: copies submitted so far; of a large one, its pieces; of a batch, its slots.
        waits: leases and copies that had to wait for room, so far; not a large copy's waits for its own pieces.
        wait_seconds: time that they waited.
        pageable: the memory is not pinned: ``PINSTAGE_PINNED=never``, or the machine cannot.
    """

    capacity_bytes: int
    open_bytes: int
    in_flight_bytes: int
    held_bytes: int
    parked_bytes: int
    captured_bytes: int
    quarantined_bytes: int
    free_bytes: int
    high_water_bytes: int
    slabs: int
    host_allocations: int
    events_created: int
    copies: int
    waits: int
    wait_seconds: float
    pageable: bool


class Lease:
    """A pinned slot, the caller's to fill until it hands it over (contract: handover).

    Fill `tensor`, enqueue with `copy_to` (or launch readers of your own and `retire` their streams), and leave the
    ``with`` block: nobody may write the bytes from then on until the fences passed. Made by `StagingPool.lease`.

    Example:
        >>> import torch, pinstage
        >>> from pinstage.testing import SimulatedDevice
        >>> with SimulatedDevice() as dev:
        ...     pool = pinstage.StagingPool(dev)
        ...     dst = dev.empty((2, 3), torch.float32)
        ...     with pool.lease((2, 3), torch.float32) as lease:
        ...         _ = lease.tensor.fill_(1.5)
        ...         ticket = lease.copy_to(dst)
        ...     ticket.wait()
        ...     dst.sum().item()
        9.0
    """

    __slots__ = ("__weakref__", "_lease", "_pool", "_tensor", "dtype", "shape")

    def __init__(self, pool: StagingPool, lease: _core.Lease, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._pool = pool  # open as long as its leases
        self._lease = lease
        self._tensor: torch.Tensor | None = None
        self.shape = shape
        self.dtype = dtype

    @property
    def tensor(self) -> torch.Tensor:
        """The slot as a pinned CPU tensor of exactly the leased shape, uninitialised.

        The slot is not reused while this tensor or any view of it (NumPy arrays and memoryviews too) lives: a name that
        lives on costs its bytes, which `PoolStats.held_bytes` counts.

        Raises:
            LeaseStateError: after the hand-over.
        """
        if self._tensor is None:
            self._tensor = self._lease.tensor()
        return self._tensor

    @property
    def device_view(self) -> torch.Tensor:
        """The slot as a tensor on the device, for kernels that read host memory in place.

        Launch the readers, then `retire` their streams before the hand-over. Work that reads the view later is not
        fenced. On a simulated device this is the host tensor.

        Raises:
            LeaseStateError: after the hand-over.
            DriverError: the memory is not mapped on the device (a pageable pool).
        """
        return self._lease.device_view()

    def copy_to(self, dst: torch.Tensor) -> Ticket:
        """Enqueues a copy of the whole slot to `dst` on the current stream of dst's device, and fences it.

        May be repeated, for several destinations.

        Args:
            dst: tensor of the leased shape and dtype on the pool's device, of any strides.

        Returns:
            The copy's ticket.

        Raises:
            LeaseStateError: after the hand-over, or the pool is closed.
            ValueError: other shape, dtype or device.
            CaptureError: the stream is being captured. Nothing was enqueued.
            DriverError: the driver refused; the slot is kept as safe as can be.
        """
        ticket = self._lease.submit(dst)
        return Ticket(self._submit_indirectly(dst) if ticket is None else ticket)

    def _submit_indirectly(self, dst: torch.Tensor) -> _core.Ticket:
        """For destinations that no copy engine writes well: a device-side copy reads the slot in place."""
        if not isinstance(dst, torch.Tensor):
            raise TypeError(f"copy_to needs a tensor, not {type(dst).__name__}")
        if not self._lease.is_open():
            raise LeaseStateError("this lease was handed over or cancelled; take a new one with pool.lease()")
        if tuple(dst.shape) != self.shape or dst.dtype != self.dtype:
            raise ValueError(
                f"dst is {tuple(dst.shape)} {dst.dtype}, the lease {self.shape} {self.dtype}: lease what dst needs"
            )
        stream = self._pool.device.current_stream
        if dst.numel() == 0:
            return self._lease.retire(stream)
        device = holding(dst)
        if device is not self._pool.device:
            where = "host memory" if device is None else device.name
            raise ValueError(
                f"dst is in {where}, the lease's pool on {self._pool.device.name}; use a pool of dst's device"
            )
        if dst.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError("dst is an inference tensor: write it inside torch.inference_mode(), or pass a clone")
        if torch.is_grad_enabled() and dst.requires_grad and dst.is_leaf:
            raise RuntimeError("dst is a leaf that requires grad: write it inside torch.no_grad()")
        device.require_not_capturing(stream)
        # A pageable slot goes through torch's own buffer. Not dst.copy_, which staged_copies() may have replaced.
        view = self._lease.tensor() if self._pool._pageable else self._lease.device_view()
        run_on_stream(device, lambda: torch._C.TensorBase.copy_(dst, view, non_blocking=True), writes=dst)
        return self._lease.retire(stream)

    def retire(self, *streams: StreamLike) -> Ticket:
        """Declares readers that the caller launched: fences all that is enqueued on `streams` so far.

        May be repeated. The slot is free once every fence of every stream passed.

        Args:
            *streams: at least one of `torch.cuda.Stream`, int handle, or object with ``__cuda_stream__``.

        Returns:
            The ticket of the last stream's fence.

        Raises:
            LeaseStateError: after the hand-over, or the pool is closed.
            CaptureError: a stream is being captured.
            DriverError: the driver refused.
            TypeError: no stream, or not a stream.
            ValueError: a stream of another device. Nothing was fenced.
        """
        if not streams:
            raise TypeError("retire needs the streams that read the slot; there is no default")
        handles = [stream_handle(stream, self._pool.device) for stream in streams]
        for handle in handles:
            ticket = self._lease.retire(handle)
        return Ticket(ticket)

    def cancel(self) -> None:
        """Gives the slot back unused.

        Raises:
            LeaseStateError: after the hand-over, or after `copy_to` or `retire`: the bytes are being read.
        """
        self._lease.cancel()
        self._tensor = None

    def close(self) -> None:
        """Hands the slot over; `tensor` raises from here on. Leaving the ``with`` block does this.

        Raises:
            LeaseStateError: handed over before, or no reader was declared by `copy_to` or `retire`. The slot is then
                parked until `StagingPool.reclaim(synchronize=True)`, because nobody can know who reads it.
        """
        declared = self._lease.hand_over()
        self._tensor = None
        if not declared:
            raise LeaseStateError(
                "the lease was left without copy_to() or retire(), so nothing tells when its readers end: its slot is "
                "parked until pool.reclaim(synchronize=True). Declare the readers, or cancel() an unused lease"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._lease.is_open():
            return
        try:
            self.close()
        except LeaseStateError:
            if exc_type is None:
                raise

    def __del__(self) -> None:
        try:
            abandoned = self._lease.is_open() and not self._lease.hand_over()
        except (AttributeError, PinstageError):  # never fully made, handed over meanwhile, or in a forked child
            return
        if abandoned:
            warnings.warn(
                f"a lease of {self.shape} {self.dtype} was dropped without copy_to(), retire() or cancel(); its slot "
                "is parked until pool.reclaim(synchronize=True)",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def __repr__(self) -> str:
        state = "open" if self._lease.is_open() else "handed over"
        return f"<Lease {self.shape} {self.dtype} on {self._pool.device.name}, {state}>"


class StagingPool(_core.Pool):
    """Pinned host memory for asynchronous copies to one device, reused as soon as the device has read it.

    Slots are cut from a few large pinned slabs. A slot comes back when the fence after its last reader passed and no
    tensor over it lives; the pool finds out by polling when it is next used, so nothing runs in the background. In the
    steady state no memory is pinned, no event made and nothing synchronized. All methods may be called from any thread.

    Args:
        device: `torch.device`, its name or number, or a `pinstage.testing.SimulatedDevice`; None is the current device.
        initial_bytes: size of the first slab, pinned when first needed; further slabs double the capacity.
        max_bytes: most to pin, in bytes. None: ``PINSTAGE_MAX_BYTES``, or an eighth of the memory that the process may
            use, shared among the node's local ranks; a wait for that default limit warns once.
        when_full: "wait" for the device to read older slots, or "raise" `PoolExhausted`. A pool that raises takes each
            copy whole or not at all: it never sends a large one in pieces, see `copy_`.

    Raises:
        ValueError: sizes that are not positive, or an unknown `when_full`.
        DriverError: no such device, or no driver.

    Example:
        >>> import torch, pinstage
        >>> from pinstage.testing import SimulatedDevice
        >>> with SimulatedDevice() as dev:
        ...     pool = pinstage.StagingPool(dev, max_bytes=1 << 20)
        ...     lease = pool.try_lease((1024,), torch.uint8)
        ...     lease.cancel()
        ...     pool.stats().capacity_bytes
        1048576
    """

    def __init__(
        self,
        device: DeviceLike = None,
        *,
        initial_bytes: int = _INITIAL_BYTES,
        max_bytes: int | None = None,
        when_full: Literal["wait", "raise"] = "wait",
    ) -> None:
        if when_full not in ("wait", "raise"):
            raise ValueError(f'when_full is "wait" or "raise", not {when_full!r}')
        if initial_bytes <= 0 or (max_bytes is not None and max_bytes < SMALLEST_SLOT):
            raise ValueError(
                f"initial_bytes must be positive and max_bytes at least {SMALLEST_SLOT}, the bytes of the smallest slot"
                f"; got initial_bytes {initial_bytes}, max_bytes {max_bytes}"
            )
        self.device = resolve(device)
        limit = default_max_bytes() if max_bytes is None else max_bytes
        super().__init__(
            self.device,
            initial_bytes=min(initial_bytes, limit),
            max_bytes=limit,
            wait_when_full=when_full == "wait",
            warn_on_wait=max_bytes is None,
            pageable=is_never("PINSTAGE_PINNED"),
        )

    def lease(self, shape: ShapeLike, dtype: torch.dtype, timeout: float | None = None) -> Lease:
        """Takes a slot for a tensor of `shape` and `dtype` (contract: handover).

        Args:
            shape: the tensor's shape: an int or a sequence of ints.
            dtype: any dtype but quantized and sub-byte ones.
            timeout: seconds to wait for room when the pool is full; None waits as long as something can come back.

        Returns:
            The open lease, uninitialised.

        Raises:
            PoolExhausted: larger than max_bytes; full and when_full is "raise"; the timeout passed; or nothing is in
                flight and only this thread's own leases and tensors hold the room.
            LeaseStateError: the pool is closed.
            DriverError: pinning more memory was refused.
            ValueError, TypeError: a negative size, or a dtype that a slot cannot hold.
        """
        lease = self._lease(shape, dtype, timeout, block=True, owned=False)
        assert lease is not None
        return lease

    def try_lease(self, shape: ShapeLike, dtype: torch.dtype) -> Lease | None:
        """Like `lease`, but returns None instead of waiting. May pin more memory, up to max_bytes.

        Args:
            shape: the tensor's shape: an int or a sequence of ints.
            dtype: any dtype but quantized and sub-byte ones.

        Raises:
            PoolExhausted: larger than max_bytes: it could never be served.
            LeaseStateError: the pool is closed.
            DriverError: pinning more memory was refused.
            ValueError, TypeError: a negative size, or a dtype that a slot cannot hold.
        """
        return self._lease(shape, dtype, None, block=False, owned=False)

    def _lease(
        self, shape: ShapeLike, dtype: torch.dtype, timeout: float | None, *, block: bool, owned: bool
    ) -> Lease | None:
        sizes = tuple(map(index, (shape,) if isinstance(shape, int) else shape))
        lease = self._take(sizes, code_of(dtype), timeout, block, owned)
        return None if lease is None else Lease(self, lease, sizes, dtype)

    def _snapshot(self, dst: torch.Tensor, fill: Callable[[_core.Lease], object]) -> Ticket:
        """Stages what `fill` writes into a slot of dst's shape and dtype, and copies it to `dst`."""
        lease = self.lease(tuple(dst.shape), dst.dtype)
        try:
            fill(lease._lease)
            return lease.copy_to(dst)
        except BaseException:
            if not lease._lease.declared():
                lease.cancel()
            raise
        finally:
            if lease._lease.is_open():
                lease.close()

    def stats(self) -> PoolStats:
        """The pool at this moment, as far as fences were polled; `reclaim` first for the present truth."""
        return PoolStats(*self._stats())

    def reclaim(self, synchronize: bool = False) -> int:
        """Frees the slots whose fences have passed.

        Args:
            synchronize: also wait for the copies in flight and, where slots are parked, for everything on the device,
                and free those slots.

        Returns:
            Bytes that became free.

        Raises:
            DriverError: the device failed.
        """
        release_passed()
        return self._reclaim(synchronize)

    def reserve(self, nbytes: int) -> None:
        """Pins memory ahead of time, so that the steady state pins none.

        Args:
            nbytes: the capacity wanted, in bytes; what is missing is pinned as one slab. The pages of a large one are
                made by several threads (`set_num_threads`), as huge pages where the system has them.

        Raises:
            PoolExhausted: more than max_bytes.
            DriverError: pinning was refused.
            LeaseStateError: the pool is closed.
        """
        self._reserve(nbytes)

    def trim(self) -> int:
        """Unpins every slab that is wholly free. Waits for the device if slots are parked.

        Returns:
            Bytes unpinned.
        """
        return self._trim()

    def close(self) -> None:
        """Waits for the copies in flight and unpins the memory. Leases and copies raise from here on.

        Slabs under living tensors and open leases stay until those end. Closing twice is harmless.
        """
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<StagingPool on {self.device.name}: {self.stats()}>"


_default_pools_lock = threading.RLock()  # a finalizer may run, and ask for a pool, wherever the collector does


def _after_fork() -> None:
    global _default_pools_lock
    _default_pools_lock = threading.RLock()  # a thread that does not exist here may hold the old one


os.register_at_fork(after_in_child=_after_fork)


def default_pool(device: DeviceLike = None) -> StagingPool:
    """The pool that calls without ``pool=`` use; one a device, made when first needed, made anew once it was closed.

    Args:
        device: `torch.device`, its name or number, or a `pinstage.testing.SimulatedDevice`; None is the current device.

    Raises:
        DriverError: no such device, or no driver.

    Example:
        >>> import pinstage
        >>> from pinstage.testing import SimulatedDevice
        >>> with SimulatedDevice() as dev:
        ...     pinstage.default_pool(dev) is pinstage.default_pool(dev)
        True
    """
    core = resolve(device)
    with _default_pools_lock:
        if core.default_pool is None:
            core.default_pool = StagingPool(core)
        pool: StagingPool = core.default_pool
        return pool
