# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""A ring of pinned buffers with stable addresses, filled in turn."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType

import torch

from pinstage.devices import DeviceLike, StreamLike
from pinstage.errors import LeaseStateError, PinstageError
from pinstage.pool import Lease, ShapeLike, StagingPool, default_pool
from pinstage.ticket import Ticket


class DoubleBuffer:
    """Pinned buffers of one shape, filled in turn and never while the device reads them (contract: handover).

    Each `fill` hands out the next buffer, once the fence of *that* buffer has passed: it waits for no other copy and
    never counts frames. The buffers' addresses are stable. A fill that was never submitted is filled again in place.

    Args:
        shape: shape of each buffer.
        dtype: its dtype.
        device: where the copies go; None is the current device. A SimulatedDevice too.
        depth: number of buffers, at least 1: how many copies may be under way before `fill` waits.
        carry: start each fill from the last finished one's contents, for tables of which a step changes a few rows.
            A fill that an exception ended is not carried; if it was written over a finished one, neither is that.
        pool: take the buffers from this pool; None is the device's default pool.

    Raises:
        ValueError: a depth below 1, or a pool of another device.
        PoolExhausted: the pool has no room for `depth` buffers.

    Example:
        >>> import torch, pinstage
        >>> from pinstage.testing import SimulatedDevice
        >>> with SimulatedDevice() as dev:
        ...     buffer, dst = pinstage.DoubleBuffer((2,), torch.int32, dev), dev.empty((2,), torch.int32)
        ...     for step in range(3):
        ...         with buffer.fill() as host:
        ...             _ = host.fill_(step)
        ...         ticket = buffer.copy_to(dst)
        ...     ticket.wait()
        ...     dst.tolist()
        [2, 2]
    """

    def __init__(
        self,
        shape: ShapeLike,
        dtype: torch.dtype,
        device: DeviceLike = None,
        *,
        depth: int = 2,
        carry: bool = False,
        pool: StagingPool | None = None,
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth}")
        if pool is None:
            pool = default_pool(device)
        elif device is not None and pool.device is not default_pool(device).device:
            raise ValueError(f"the pool is of {pool.device.name}, another device than {device}")
        self._carry = carry
        self._slots: list[Lease] = []
        try:
            for _ in range(depth):
                slot = pool._lease(shape, dtype, None, block=True, owned=True)
                assert slot is not None
                self._slots.append(slot)
                slot.tensor  # noqa: B018  # made once: later fills hand out the same tensor
        except BaseException:  # at once: the error's traceback may keep this object alive
            for slot in self._slots:
                slot.cancel()
            self._slots.clear()
            raise
        self._filling = 0  # the slot that the next fill hands out
        self._filled: int | None = None  # the slot that copy_to and retire read
        self._last: int | None = None  # the slot that carry starts from
        self._open = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of each buffer."""
        return self._slots[0].shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of each buffer."""
        return self._slots[0].dtype

    @property
    def depth(self) -> int:
        """Number of buffers."""
        return len(self._slots)

    def fill(self, timeout: float | None = None) -> _Fill:
        """The next buffer, for a ``with`` block: entering waits for its fence and opens it for writing.

        Args:
            timeout: seconds; None waits as long as the device takes.

        Returns:
            A context manager over the pinned CPU tensor of the buffer. Nobody may write it after the block.

        Entering raises:
            WaitTimeout: the device still reads the buffer.
            LeaseStateError: a fill is open already.
            DriverError: the device failed.
        """
        return _Fill(self, timeout)

    def copy_to(self, dst: torch.Tensor) -> Ticket:
        """Enqueues a copy of the last fill to `dst` on the current stream of dst's device, and fences it.

        May be repeated, for several destinations.

        Args:
            dst: tensor of the buffer's shape and dtype on its device, of any strides.

        Returns:
            The copy's ticket.

        Raises:
            LeaseStateError: there is no finished fill to submit.
            ValueError: other shape, dtype or device.
            CaptureError: the stream is being captured. Nothing was enqueued.
            DriverError: the driver refused.
        """
        return self._after_submit(self._last_fill().copy_to(dst))

    def retire(self, *streams: StreamLike) -> Ticket:
        """Declares readers of the last fill that the caller launched: fences all that is enqueued on `streams` so far.

        Args:
            *streams: at least one of `torch.cuda.Stream`, int handle, or object with ``__cuda_stream__``.

        Returns:
            The ticket of the last stream's fence.

        Raises:
            LeaseStateError: there is no finished fill.
            CaptureError: a stream is being captured.
            DriverError: the driver refused.
            TypeError, ValueError: no stream, not a stream, or one of another device.
        """
        return self._after_submit(self._last_fill().retire(*streams))

    @property
    def device_view(self) -> torch.Tensor:
        """The last fill as a tensor on the device, for kernels that read it in place; `retire` their streams."""
        return self._last_fill().device_view

    def _last_fill(self) -> Lease:
        if self._filled is None:
            raise LeaseStateError("there is no finished fill to submit: use `with buffer.fill() as host:` first")
        return self._slots[self._filled]

    def _after_submit(self, ticket: Ticket) -> Ticket:
        if self._filling == self._filled:
            self._filling = (self._filling + 1) % len(self._slots)
        return ticket

    def _begin_fill(self, timeout: float | None) -> torch.Tensor:
        if self._open:
            raise LeaseStateError("the last fill is still open; leave its with block first")
        slot = self._slots[self._filling]
        slot._lease.wait_reusable(timeout)
        tensor = slot.tensor
        if self._carry and self._last is not None and self._last != self._filling:
            tensor.copy_(self._slots[self._last].tensor)
        self._open = True
        self._filled = None
        return tensor

    def _end_fill(self, finished: bool) -> None:
        self._open = False
        if finished:
            self._filled = self._last = self._filling
        elif self._last == self._filling:
            self._last = None  # spoilt in place: there is nothing to carry

    def __del__(self) -> None:
        # The pool waits for the fences; nothing is parked: every reader has one. In a forked child nothing is done.
        for slot in getattr(self, "_slots", ()):
            with suppress(PinstageError):
                slot._lease.hand_over()


class _Fill:
    """The context of one fill."""

    __slots__ = ("_buffer", "_timeout")

    def __init__(self, buffer: DoubleBuffer, timeout: float | None) -> None:
        self._buffer = buffer
        self._timeout = timeout

    def __enter__(self) -> torch.Tensor:
        return self._buffer._begin_fill(self._timeout)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._buffer._end_fill(finished=exc_type is None)
