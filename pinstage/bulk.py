# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""Snapshots that go through Python, whole or in pieces; `csrc/bulk.h` has the rules, and does it for plain bytes."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from pinstage import _core
from pinstage.errors import PinstageError
from pinstage.pool import StagingPool
from pinstage.ticket import Ticket

Region = tuple[slice, ...]


def regions(shape: tuple[int, ...], itemsize: int, most: int) -> Iterator[Region]:
    """Cuts a tensor along its outermost dimension of which one step fits, in even parts, in order.

    Args:
        shape: of a tensor that has elements.
        itemsize: bytes of an element.
        most: bytes of a region, at least `itemsize`.

    Yields:
        Index tuples of slices, for the leading dimensions; together they cover the tensor, once.
    """
    nbytes = itemsize * math.prod(shape)
    if nbytes <= most:
        yield ()
        return
    dim = -1
    while nbytes > most:
        dim += 1
        nbytes //= shape[dim]  # of one step along dim
    parts = -(-shape[dim] // (most // nbytes))
    step = -(-shape[dim] // parts)
    for outer in itertools.product(*(range(size) for size in shape[:dim])):
        for begin in range(0, shape[dim], step):
            yield (*(slice(i, i + 1) for i in outer), slice(begin, begin + step))


def snapshot(pool: StagingPool, dst: torch.Tensor, fill: Callable[[_core.Lease, Region | None], object]) -> None:
    """Stages what `fill` writes, and copies it to `dst`: as a whole, or piece by piece where one slot is too small.

    Args:
        pool: of dst's device.
        dst: tensor on the device that has elements.
        fill: writes the lease it is given, of the shape of ``dst[region]``; a region of None is all of it.

    Raises:
        CaptureError, PoolExhausted, DriverError: as `copy_`. The message says so when pieces were enqueued before.
    """
    nbytes = dst.numel() * dst.element_size()
    most = pool._piece_bytes(nbytes)
    if most >= nbytes:
        pool._snapshot(dst, lambda lease: fill(lease, None))
        return

    def stage(region: Region, piece: torch.Tensor) -> Ticket:
        return pool._snapshot(piece, lambda lease: fill(lease, region))

    in_flight: deque[tuple[Ticket, int]] = deque()
    enqueued = done = 0
    try:
        with _one_write(dst):
            for region in regions(tuple(dst.shape), dst.element_size(), most):
                piece = dst[region]
                size = piece.numel() * piece.element_size()
                while in_flight and enqueued - done + size > _core.PIECES_IN_FLIGHT * most:
                    ticket, read = in_flight.popleft()
                    ticket.wait()
                    done += read
                in_flight.append((stage(region, piece), size))
                enqueued += size
    except PinstageError as error:
        if enqueued:
            mixture = (
                f"Before this, {enqueued} of {nbytes} bytes were enqueued: dst holds a mixture of old and new bytes"
            )
            error.args = (f"{error}. {mixture}. Copy it again",)
        raise


@contextmanager
def _one_write(dst: torch.Tensor) -> Iterator[None]:
    """What the block writes to `dst` counts as one write, as torch counts a copy; inference tensors have no count."""
    if dst.is_inference():
        yield
        return
    torch._C._increment_version([dst])
    with _unsafe_preserve_version_counter(dst):
        yield
