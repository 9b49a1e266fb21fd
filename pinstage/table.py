# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""`StagedTable`: a persistent host table and its mirror on the device."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from numbers import Integral, Number
from typing import Any, Literal

import torch

from pinstage import _core
from pinstage.copy import copy_rows_
from pinstage.devices import DeviceLike, StreamLike, empty, holding, on_stream, resolve, run_on_stream, stream_handle
from pinstage.dtypes import code_of
from pinstage.errors import LeaseStateError
from pinstage.gather import as_index
from pinstage.pool import ShapeLike, StagingPool, default_pool
from pinstage.ticket import Ticket, keep_until, release_passed

Tracking = Literal["marks", "compare"]
_TRACKING = {None: 0, "marks": 1, "compare": 2}
# What scatters and fills move, by itemsize: bits, of a dtype that every torch kernel takes.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class StagedTable:
    """A table in ordinary host memory, written at any time, and its mirror on the device (contract: snapshot).

    For block tables and the like: `host` is written in place, by torch, NumPy or C++ through its pointer, and a step's
    `commit` sends what is live of it. Host and mirror are allocated once, as zeros, and keep their addresses.

    The host table may be written, by anyone, as soon as `commit` or `commit_to` returns. A writer on another
    thread that comes *during* the call may leave a row of which some bytes are old and some new, each as it was at some
    moment of the call; no other row and no other byte is touched. Once it has marked the row (or with
    ``track="compare"``), the next commit that names the row sends it again.

    Only commits write `device`. Who still reads it on another stream is the caller's to order, as with any tensor:
    commit on the stream of the readers, or make the commit's stream wait for them.

    Args:
        shape: at least two dimensions: rows along `dim`, columns along the last, planes (such as key and value) along
            those between, and any number of tables before `dim`: ``[P, C, 2, W]`` with ``dim=1`` are P tables of C
            rows, 2 planes and W columns.
        dtype: any dtype but quantized and sub-byte ones.
        device: where the mirror is; None is the current device. A SimulatedDevice too. Making a table waits until the
            mirror's zeros are written.
        dim: the dimension that rows count along; not the last.
        track: which rows of a commit are known to be unchanged and stay at home. None: none, every named row is sent.
            ``"marks"``: all that were not named by `mark` since they were sent. ``"compare"``: all that equal, in the
            live columns, what was last sent, byte by byte; costs host memory as large as the table, a read of the named
            rows, and another copy of those that changed.
        pool: the staging pool; None is the default pool of `device`.

    Attributes:
        shape, dtype, dim: as given.
        host: CPU tensor of `shape`, pageable; its ``.numpy()`` and ``.data_ptr()`` stay valid as long as it lives.
        device: tensor of `shape` on the device.

    Raises:
        ValueError: fewer than two dimensions, one of size 0, a `dim` that leaves no columns, an unknown `track`, a
            pool of another device.
        TypeError: a dtype that a slot cannot hold.
        DriverError: no such device, or no driver.

    Example:
        >>> import torch, pinstage
        >>> from pinstage.testing import SimulatedDevice
        >>> with SimulatedDevice(schedule="late") as dev:
        ...     table = pinstage.StagedTable((4, 8), torch.int32, dev)
        ...     table.host[:2, :3] = torch.tensor([[1, 2, 3], [4, 5, 6]])
        ...     ticket = table.commit(2, width=3)
        ...     _ = table.host.fill_(9)  # at once: the copy has not run yet
        ...     ticket.wait()
        ...     table.device[:3, :4].tolist()
        [[1, 2, 3, 0], [4, 5, 6, 0], [0, 0, 0, 0]]
    """

    def __init__(
        self,
        shape: ShapeLike,
        dtype: torch.dtype,
        device: DeviceLike = None,
        *,
        dim: int = 0,
        track: Tracking | None = None,
        pool: StagingPool | None = None,
    ) -> None:
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if len(sizes) < 2 or min(sizes) < 1:
            raise ValueError(f"a table has rows and columns, at least one of each; shape is {sizes}")
        if not -len(sizes) <= dim < len(sizes) or dim % len(sizes) == len(sizes) - 1:
            raise ValueError(f"dim is {dim}: rows count along a dimension before the last of {sizes}")
        if track not in _TRACKING:
            raise ValueError(f'track is None, "marks" or "compare", not {track!r}')
        code_of(dtype)
        self.shape, self.dtype, self.dim = sizes, dtype, dim % len(sizes)
        self._core_device = resolve(device)
        if pool is not None and pool.device is not self._core_device:
            raise ValueError(f"the pool is of {pool.device.name}, the table on {self._core_device.name}")
        self._pool = pool
        self._track = track
        self._lock = threading.RLock()  # a signal handler may commit while a commit waits
        self._pad: Any = 0
        self._pad_word: Any = 0
        self._tickets: dict[int, _core.Ticket] = {}  # the last of each stream but the one that owns the mirror's memory

        release_passed()  # mirrors of tables that are gone
        outer, planes = math.prod(sizes[: self.dim]), math.prod(sizes[self.dim + 1 : -1])
        self._grid_shape = (outer, sizes[self.dim], planes, sizes[-1])
        self._home = self._core_device.current_stream
        self._core_device.require_not_capturing(self._home)
        with torch.inference_mode(False):  # what commits write must have a version counter
            self.host = torch.zeros(sizes, dtype=dtype, device="cpu")
            self.device = empty(self._core_device, sizes, dtype).zero_()
            self._grid = self.device.view(_WORDS[dtype.itemsize]).view(self._grid_shape)
        if self._core_device.simulation is None:
            self._core_device.fence(self._home).wait()  # or a commit on another stream could come before the zeros
        self._core = _core.Table.make(self.host, self.device, *self._grid_shape, _TRACKING[track])

    def mark(self, rows: Any) -> None:
        """Declares rows that were written since they were last sent. Call it after writing; from any thread.

        Args:
            rows: 1-D int32 or int64 CPU tensor, NumPy array, list or range; any order, repeats allowed. A single row is
                ``[row]``: an int, which for `commit` is a number of rows, is refused.

        Raises:
            LeaseStateError: the table does not track.
            IndexError: a row is negative or past the table; none is marked then.
            TypeError, ValueError: not an index.
        """
        if self._track is None:
            raise LeaseStateError('this table tracks no rows; make it with track="marks"')
        if isinstance(rows, (int, Integral)):
            raise TypeError(f"mark takes an index: [{rows}] for one row, range({rows}) for the first {rows}")
        index = as_index(rows)
        if index.numel():
            self._core.mark(index)

    def commit(
        self,
        rows: Any = None,
        *,
        width: int | None = None,
        planes: int | range | None = None,
        pad: complex | None = None,
        stream: StreamLike | None = None,
    ) -> Ticket:
        """Brings the mirror up to date in the named rows and the live columns (contract: snapshot).

        Only rows that are named and, where the table tracks, not known to be unchanged are sent, and of those only the
        live columns. With tracking, a wider commit also sends what a narrower one left out: rows that were marked are
        sent once more, so let `width` grow in steps.

        One or two runs of neighbours, or a few large ones, go as a pitched copy each. Scattered rows go by one kernel,
        which reads them in the staging slot and writes each to its place; where their tails are to be padded, or the
        driver refuses the kernel, as a copy for each run if these are few, as one copy of all from the first to the
        last if that sends few others and `rows` names those too, else packed, to be scattered by torch.

        Args:
            rows: an int is the first so many rows; a 1-D int32 or int64 CPU tensor, NumPy array, list or range are
                those rows, any order, a row named twice is sent once; None is every row.
            width: live columns, from the first on. None is all of them.
            planes: one plane's number, or a range of them, for tables that have planes; None is all of them.
            pad: value of the columns from `width` on of the rows and planes named, on the device only. They are filled
                where a commit before this one left something else. None leaves them as they are.
            stream: `torch.cuda.Stream`, int handle or object with ``__cuda_stream__``; None is the current stream.

        Returns:
            A ticket that is done once the mirror holds all this and what was enqueued on the stream before.

        Raises:
            IndexError: a row or plane is negative or past the table; the message names the first, and its place.
            ValueError: a width beyond the table; a pad value that the dtype does not hold; a tensor of the table was
                resized; a stream of another device.
            TypeError: not an index, a width, planes or a stream.
            CaptureError: the stream is being captured into a CUDA graph. Nothing was enqueued.
            PoolExhausted, DriverError: as `copy_`. The mirror's named rows may hold a mixture of old and new bytes.
            Whatever is raised, rows that were to be sent are still so: the next commit sends them.
        """
        plane, count, live = self._window(planes, width)
        named = self._named(rows)
        core = self._core_device
        handle = core.current_stream if stream is None else stream_handle(stream, core)
        if not core.usable:
            core.fence(handle)  # raises, and says why
        with self._lock:
            if pad is not None:
                self._pad_with(pad)
            taken = self._core.take(named, plane, count, live, pad is not None)
            if taken is None:
                return Ticket(core.fence(handle))
            try:
                ticket = self._send(taken, (plane, count, live), handle)
            except BaseException:
                taken.put_back()  # now, not when the traceback dies
                raise
            taken.settle()
            if handle != self._home:
                self._tickets[handle] = ticket
        return Ticket(ticket)

    def commit_to(
        self,
        dst: torch.Tensor,
        index: Any,
        *,
        width: int | None = None,
        planes: int | range | None = None,
        stream: StreamLike | None = None,
    ) -> Ticket:
        """Builds a table in another order, such as that of a batch, from the host rows (contract: snapshot).

        Like ``dst[:, :n].copy_(host[:, index, planes, :width])`` for a table with ``dim=1``. Tracking has no part in
        it, and the mirror none.

        Args:
            dst: tensor on the table's device, of its dtype, any strides; shaped like the table but for the rows, of
                which it has at least ``len(index)``, the columns, at least `width`, and the planes, as `planes` says.
                The rest of it is left alone.
            index: rows to take, in order, repeats allowed: 1-D int32 or int64 CPU tensor, NumPy array, list or range.
            width: columns to take, from the first on. None is all of them.
            planes: one plane's number: dst has no dimension for planes; a range of them; None is all.
            stream: as in `commit`.

        Returns:
            The copy's ticket.

        Raises:
            IndexError, ValueError, TypeError, CaptureError, PoolExhausted, DriverError: as `commit`.
            ValueError: a dst of another shape, dtype or device.

        Example:
            >>> import torch, pinstage
            >>> from pinstage.testing import SimulatedDevice
            >>> with SimulatedDevice() as dev:
            ...     table = pinstage.StagedTable((1, 4, 2, 3), torch.int32, dev, dim=1)
            ...     table.host[0, :, 0] = torch.arange(12).reshape(4, 3)
            ...     batch = dev.empty((1, 2, 3), torch.int32)
            ...     table.commit_to(batch, [3, 1], planes=0).wait()
            ...     batch.tolist()
            [[[9, 10, 11], [3, 4, 5]]]
        """
        plane, count, live = self._window(planes, width)
        rows = as_index(index)
        core = self._core_device
        part = self._destination(dst, rows.numel(), live, planes)
        handle = core.current_stream if stream is None else stream_handle(stream, core)
        pool = self._staging()
        ticket = self._core.send_rows(part, rows, plane, count, live, handle, pool) if part.numel() else None
        if ticket is None:  # empty, elsewhere, or laid out as no copy engine writes it well
            if holding(dst) is not core:
                raise ValueError(f"dst is on {dst.device}, in other memory than that of {core.name}")
            core.require_not_capturing(handle)
            with on_stream(core, handle):
                copy_rows_(part, self._source(planes).narrow(-1, 0, live), rows, dim=self.dim, pool=pool)
            ticket = core.fence(handle)
        return Ticket(ticket)

    # --- what a caller names, checked ---

    def _named(self, rows: Any) -> Any:
        """Number of leading rows, or an index tensor that is not empty."""
        most = self._grid_shape[1]
        if rows is None:
            return most
        if isinstance(rows, (int, Integral)):  # an int is found at once, a NumPy integer by the slower look
            count = int(rows)
            if not 0 <= count <= most:
                raise IndexError(f"the first {count} rows, of a table of {most}; an index names single rows: [{count}]")
            return count
        index = as_index(rows)
        return index if index.numel() else 0

    def _window(self, planes: int | range | None, width: int | None) -> tuple[int, int, int]:
        """First plane, number of planes, live columns."""
        _, _, most_planes, columns = self._grid_shape
        if width is None:
            width = columns
        elif not isinstance(width, (int, Integral)):
            raise TypeError(f"width is a number of columns, not {type(width).__name__}")
        if not 0 <= width <= columns:
            raise ValueError(f"width is {width}, of a table of {columns} columns")
        if planes is None:
            return 0, most_planes, int(width)
        if len(self.shape) == self.dim + 2:
            raise ValueError(f"planes is {planes}, but a table of {self.shape} with dim={self.dim} has none")
        named = range(planes, planes + 1) if isinstance(planes, int) else planes
        if not isinstance(named, range) or named.step != 1:
            raise TypeError(f"planes is the number of one plane or a range of step 1, not {planes!r}")
        if len(named) and not 0 <= named.start <= named.stop <= most_planes:
            raise IndexError(f"planes is {planes}, of a table of {most_planes} planes")
        return (named.start, len(named), int(width)) if len(named) else (0, 0, int(width))

    def _source(self, planes: int | range | None) -> torch.Tensor:
        """The host table's planes, shaped as `commit_to` shapes them."""
        if planes is None:
            return self.host
        flat = self.host.view(*self.shape[: self.dim + 1], -1, self.shape[-1])
        if isinstance(planes, int):
            return flat.select(-2, planes)
        return flat[..., planes.start : planes.stop, :]

    def _destination(self, dst: torch.Tensor, rows: int, width: int, planes: int | range | None) -> torch.Tensor:
        """The part of `dst` that `commit_to` writes."""
        if not isinstance(dst, torch.Tensor):
            raise TypeError(f"dst must be a torch.Tensor, not {type(dst).__name__}")
        if planes is None:
            inner = self.shape[self.dim + 1 : -1]
        else:
            inner = () if isinstance(planes, int) else (len(planes),)
        expected = (*self.shape[: self.dim], rows, *inner, width)
        sizes = tuple(dst.shape)
        fits = sizes == expected or (
            len(sizes) == len(expected)
            and all(
                size == wanted or (i in (self.dim, len(sizes) - 1) and size > wanted)
                for i, (size, wanted) in enumerate(zip(sizes, expected, strict=True))
            )
        )
        if not fits or dst.dtype != self.dtype:
            raise ValueError(
                f"dst is {sizes} {dst.dtype}; {rows} rows of this table need {expected} {self.dtype} (or more rows and "
                "columns)"
            )
        if sizes == expected:
            return dst
        return dst.narrow(self.dim, 0, rows).narrow(-1, 0, width)

    # --- how rows travel ---

    def _staging(self) -> StagingPool:
        if self._pool is not None:
            return self._pool
        pool: StagingPool = self._core_device.default_pool or default_pool(self._core_device)
        return pool

    def _send(self, taken: _core.TakenRows, window: tuple[int, int, int], handle: int) -> _core.Ticket:
        core = self._core_device
        pool = self._staging()
        ticket = self._core.send(taken, handle, pool)
        if ticket is not None and taken.fill_to <= window[2]:
            return ticket
        # The device has work of its own to do, on the stream of the copy.
        with on_stream(core, handle):
            if ticket is None:
                self._scatter(taken, window, handle, pool)
            else:
                for first, count in taken.runs:
                    tail = self._tail(window, taken.fill_to).narrow(1, first, count)
                    self._run(partial(tail.fill_, self._pad_word))
        return core.fence(handle)

    def _scatter(self, taken: _core.TakenRows, window: tuple[int, int, int], handle: int, pool: StagingPool) -> None:
        """Rows that neither the kernel nor a few pitched copies bring: packed, with their numbers, for torch.

        The kernel knows no padding, and some drivers have no kernel.
        """
        core = self._core_device
        core.require_not_capturing(handle)
        plane, planes, width = window
        outer, itemsize = self._grid_shape[0], self.dtype.itemsize
        row_bytes = outer * planes * width * itemsize
        mirror = self._grid.narrow(2, plane, planes).narrow(3, 0, width)
        most = max(pool._piece_bytes(taken.count * row_bytes) // max(row_bytes, 1), 1)
        for begin in range(0, taken.count, most):
            count = min(most, taken.count - begin)
            index_bytes = self._core.packed_index_bytes(count)
            packed = empty(core, (index_bytes + count * row_bytes,), torch.uint8)
            self._core.send_packed(taken, begin, count, packed, handle, pool)
            index = packed[: count * 8].view(torch.int64)
            rows = packed[index_bytes:].view(mirror.dtype).view(outer, count, planes, width)
            self._run(partial(mirror.index_copy_, 1, index, rows))
            if taken.fill_to > width:
                tail = self._tail(window, taken.fill_to)
                self._run(partial(tail.index_fill_, 1, index, self._pad_word))

    def _tail(self, window: tuple[int, int, int], end: int) -> torch.Tensor:
        """Columns of the mirror from the live ones to `end`."""
        plane, planes, width = window
        return self._grid.narrow(2, plane, planes).narrow(3, width, end - width)

    def _run(self, step: Callable[[], object]) -> None:
        with torch.no_grad():
            run_on_stream(self._core_device, step, writes=self.device)

    def _pad_with(self, pad: complex) -> None:
        """The value that tails hold from now on."""
        if not isinstance(pad, Number):
            raise TypeError(f"pad is a number, not {type(pad).__name__}")
        if pad == self._pad:
            return
        try:
            word = torch.tensor([pad], dtype=self.dtype, device="cpu").view(self._grid.dtype).item()
        except (RuntimeError, OverflowError) as error:
            raise ValueError(f"pad is {pad!r}, which {self.dtype} does not hold") from error
        if word != self._pad_word:  # the bits: NaN equals itself
            self._core.forget_padding()
        self._pad, self._pad_word = pad, word

    def __del__(self) -> None:
        # The allocator knows of no stream but its own: the mirror stays until commits on others are over.
        for handle, ticket in getattr(self, "_tickets", {}).items():
            keep_until(ticket, self._core_device, handle, self.device)

    def __repr__(self) -> str:
        return f"<StagedTable {self.shape} {self.dtype} on {self._core_device.name}>"
