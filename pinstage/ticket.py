# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""Tickets: when has the device consumed what was enqueued?"""

from __future__ import annotations

import os
import threading
from collections import deque

from pinstage import _core
from pinstage.devices import StreamLike, device_of, resolve, stream_handle
from pinstage.errors import DriverError


class Ticket:
    """Tells when everything enqueued before a point of a stream has run.

    Returned by `Lease.copy_to`, `Lease.retire`, `DoubleBuffer.copy_to` and `keep_alive`. A ticket stays valid forever,
    also after the event behind it serves other copies.

    Example:
        >>> import torch, pinstage
        >>> from pinstage.testing import SimulatedDevice
        >>> with SimulatedDevice(schedule="late") as dev:
        ...     pool = pinstage.StagingPool(dev)
        ...     dst = dev.empty((4,), torch.int32)
        ...     with pool.lease((4,), torch.int32) as lease:
        ...         _ = lease.tensor.fill_(7)
        ...         ticket = lease.copy_to(dst)
        ...     before = ticket.done()
        ...     ticket.wait()
        ...     (before, ticket.done(), dst.tolist())
        (False, True, [7, 7, 7, 7])
    """

    __slots__ = ("_ticket",)

    def __init__(self, ticket: _core.Ticket) -> None:
        self._ticket = ticket

    def done(self) -> bool:
        """Whether the work has run. Never blocks.

        Raises:
            DriverError: the device failed; the work may never have run.
        """
        return self._ticket.done()

    def wait(self, timeout: float | None = None) -> None:
        """Blocks the host until the work has run, without the GIL; Ctrl-C gets through.

        Args:
            timeout: seconds; None waits as long as it takes.

        Raises:
            WaitTimeout: the time is up.
            DriverError: the device failed.
        """
        self._ticket.wait(timeout)

    def wait_on(self, stream: StreamLike) -> None:
        """Makes work enqueued on `stream` from now on run after this ticket's; the host goes on at once.

        Args:
            stream: a `torch.cuda.Stream`, an int handle, or an object with ``__cuda_stream__``; of any device, but a
                handle 0 stands for the default stream of the ticket's.

        Raises:
            CaptureError: `stream` is being captured.
            DriverError: the driver refused.
            ValueError: one is of a GPU, the other of a simulated device.
        """
        self._ticket.wait_on(stream_handle(stream), device_of(stream))


# Objects kept alive, per device and stream, oldest first: only the head of each is asked.
_kept: dict[tuple[_core.Device, int], deque[tuple[_core.Ticket, object]]] = {}
_kept_lock = threading.RLock()  # a finalizer may run, and call keep_alive, wherever the collector does


def _after_fork() -> None:
    global _kept_lock
    _kept_lock = threading.RLock()  # a thread that does not exist here may hold the old one
    _kept.clear()


os.register_at_fork(after_in_child=_after_fork)


def keep_alive(obj: object, stream: StreamLike | None = None, *, device: object = None) -> Ticket:
    """Keeps `obj` alive until what is enqueued on a stream so far has run (contract: borrow).

    For buffers that the device reads in place: nobody may write them before the ticket is done, and until then they are
    not freed, whoever drops them. A reference is dropped by the first `keep_alive` call after its fence passed.

    Args:
        obj: any object, typically the pinned tensor that an asynchronous copy or kernel reads.
        stream: the stream of the readers; None is the device's current one. A `torch.cuda.Stream`, an int handle, or an
            object with ``__cuda_stream__``.
        device: the stream's device; None is the one that `stream` says, else the current one.

    Returns:
        The ticket of the fence.

    Raises:
        CaptureError: the stream is being captured.
        DriverError: no device, or the driver refused.
        ValueError: the stream is not of `device`.

    Example:
        >>> import torch, pinstage
        >>> from pinstage.testing import SimulatedDevice
        >>> with SimulatedDevice(schedule="late") as dev:
        ...     ticket = pinstage.keep_alive(torch.zeros(4), dev.default_stream, device=dev)
        ...     ticket.wait()
    """
    told = device_of(stream) if device is None and stream is not None else None
    core = told or resolve(device)
    handle = core.current_stream if stream is None else stream_handle(stream, core)
    ticket = core.fence(handle)
    keep_until(ticket, core, handle, obj)
    release_passed()
    return Ticket(ticket)


def keep_until(ticket: _core.Ticket, core: _core.Device, handle: int, obj: object) -> None:
    """Keeps `obj` alive until a fence that was recorded on the stream has passed. Calls no driver."""
    with _kept_lock:
        _kept.setdefault((core, handle), deque()).append((ticket, obj))


def release_passed() -> None:
    """Drops the objects whose fences have passed."""
    dropped = []  # destroyed after the lock is gone: a finalizer may call keep_alive
    with _kept_lock:
        for key in list(_kept):
            queue = _kept.get(key, deque())
            while queue and _over(queue[0][0], key[0]):
                dropped.append(queue.popleft())
            if not queue:
                _kept.pop(key, None)


def _over(ticket: _core.Ticket, core: _core.Device) -> bool:
    """Whether nothing reads the ticket's object any more; a failed device's objects are kept for good."""
    if not core.usable:
        return True
    try:
        return ticket.done()
    except DriverError:
        return False
