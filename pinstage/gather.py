# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""Row gather on the host, and what its callers share: reading and checking tables and indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from pinstage import _core
from pinstage.devices import holding


def as_host_tensor(data: Any, name: str) -> torch.Tensor:
    """`data` itself if it is a tensor, else a tensor over (or, where torch cannot view it, of) a NumPy array.

    Raises:
        TypeError: neither.
    """
    if isinstance(data, torch.Tensor):
        return data
    if not hasattr(data, "__array_interface__"):
        raise TypeError(f"{name} must be a torch.Tensor or a NumPy array, not {type(data).__name__}")
    import numpy as np

    array = np.asarray(data)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    elif not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()  # torch has no read-only tensors and no negative strides
    return torch.from_numpy(array)


def as_index(index: Any) -> torch.Tensor:
    """A 1-D int32 or int64 CPU tensor of row numbers.

    Raises:
        TypeError: not integers.
        ValueError: not one-dimensional, or not on the host.
    """
    if isinstance(index, (list, tuple, range)):
        index = torch.tensor(index, dtype=None if len(index) else torch.int64, device="cpu")
    rows = as_host_tensor(index, "index")
    if rows.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"an index is of int32 or int64, not {rows.dtype}")
    if rows.dim() != 1 or rows.device.type != "cpu":
        raise ValueError(f"an index is one-dimensional and on the CPU, not {tuple(rows.shape)} on {rows.device}")
    return rows


def _dimension(src: torch.Tensor, dim: Any) -> int:
    if not isinstance(dim, int):
        raise TypeError(f"dim is an int, not {type(dim).__name__}")
    if not -src.dim() <= dim < src.dim():
        raise IndexError(f"dim {dim} is out of range for a table of {src.dim()} dimensions")
    return dim % src.dim()


def check_rows(out: torch.Tensor, src: torch.Tensor, index: torch.Tensor, dim: int, *, exact: bool) -> int:
    """Checks a gather of rows before anything is written.

    Args:
        out: the destination.
        src: the table.
        index: the rows.
        dim: their dimension, maybe negative.
        exact: whether `out` must have exactly ``len(index)`` rows, or at least.

    Returns:
        `dim`, not negative.

    Raises:
        IndexError: `dim` or an index is out of range.
        ValueError: shapes or dtypes do not fit.
    """
    if src.device.type != "cpu" or holding(src) is not None:
        raise ValueError(f"rows are gathered on the host; src is on {src.device}, in device memory")
    dim = _dimension(src, dim)
    if out.dtype != src.dtype:
        raise ValueError(f"the destination is of {out.dtype}, the table of {src.dtype}")
    rows = index.numel()
    expected = (*src.shape[:dim], rows, *src.shape[dim + 1 :])
    fits = tuple(out.shape) == expected or (
        not exact
        and out.dim() == src.dim()
        and out.shape[dim] >= rows
        and (*out.shape[:dim], rows, *out.shape[dim + 1 :]) == expected
    )
    if not fits:
        raise ValueError(
            f"the destination is {tuple(out.shape)}; {rows} rows of {tuple(src.shape)} along dimension {dim} need "
            f"{expected}{'' if exact else ' (or more along it)'}"
        )
    bad = ((index < 0) | (index >= src.shape[dim])).nonzero()
    if bad.numel():
        position = int(bad[0])
        raise IndexError(
            f"index {int(index[position])} at position {position} is out of range for {src.shape[dim]} rows"
        )
    return dim


def check_segments(dst: torch.Tensor, segments: Sequence[torch.Tensor], dim: int) -> tuple[int, int]:
    """Checks a concatenation before anything is written.

    Args:
        dst: the destination, which has at least the segments' rows.
        segments: what follows one another along `dim`.
        dim: maybe negative.

    Returns:
        `dim`, not negative, and the segments' rows.

    Raises:
        IndexError: `dim` is out of range.
        ValueError: shapes, dtypes or devices do not fit.
    """
    dim, rows = _dimension(dst, dim), 0
    for i, segment in enumerate(segments):
        if segment.device.type != "cpu" or holding(segment) is not None:
            raise ValueError(f"segments are read on the host; src[{i}] is on {segment.device}, in device memory")
        if segment.dtype != dst.dtype:
            raise ValueError(f"the destination is of {dst.dtype}, src[{i}] of {segment.dtype}")
        expected = (*dst.shape[:dim], *segment.shape[dim : dim + 1], *dst.shape[dim + 1 :])
        if tuple(segment.shape) != expected:
            raise ValueError(
                f"the destination is {tuple(dst.shape)}; src[{i}] of {tuple(segment.shape)} may differ from it only "
                f"along dimension {dim}"
            )
        rows += segment.shape[dim]
    if rows > dst.shape[dim]:
        raise ValueError(f"the {len(segments)} segments have {rows} rows, the destination {dst.shape[dim]}")
    return dim, rows


def gather_rows(src: Any, index: Any, *, dim: int = 0, out: torch.Tensor | None = None) -> torch.Tensor:
    """Gathers rows on the host, like ``torch.index_select(src, dim, index)`` (contract: snapshot).

    Args:
        src: CPU tensor or NumPy array of at least one dimension, any strides.
        index: rows to take, in order, repeats allowed: 1-D int32 or int64 CPU tensor, NumPy array, or list of ints.
        dim: the dimension that `index` counts along.
        out: contiguous or strided CPU tensor of the result's shape and dtype, not overlapping src.

    Returns:
        `out`, or a new contiguous tensor of src's shape with ``len(index)`` along `dim`.

    Raises:
        IndexError: an index is negative or past the table (the message names the first and its place), or a bad `dim`.
        ValueError: shapes, dtypes or devices that do not fit, or an `out` that overlaps `src`.
        TypeError: an index that is not of integers.

    Example:
        >>> import torch, pinstage
        >>> pinstage.gather_rows(torch.tensor([[1, 2], [3, 4]]), [1, 1, 0]).tolist()
        [[3, 4], [3, 4], [1, 2]]
    """
    # What comes here has no `out`, or not one dense block of rows, or an index that is no tensor yet.
    src, index = as_host_tensor(src, "src"), as_index(index)
    if out is None:
        shape = list(src.shape)
        shape[_dimension(src, dim)] = index.numel()
        out = torch.empty(shape, dtype=src.dtype, device="cpu")
    elif out.device.type != "cpu":
        raise ValueError(f"rows are gathered on the host; out is on {out.device}, see copy_rows_")
    dim = check_rows(out, src, index, dim, exact=True)
    if _core.try_gather(out, src, index, dim):
        return out
    if torch._C._overlaps(out, src) or torch._C._overlaps(out, index):
        raise ValueError("out overlaps src or index, which the gather still reads; pass an out of its own")
    return torch.index_select(src, dim, index, out=out) if out.numel() else out


if not TYPE_CHECKING:
    gather_rows = _core.gather_rows_builtin(gather_rows)


def set_num_threads(threads: int) -> None:
    """Sets how many threads share one large snapshot or gather, the caller counted.

    Args:
        threads: at least 1; more than the CPUs that the process may use count as those. 0 is the default:
            ``PINSTAGE_THREADS``, or at most 16.

    Raises:
        ValueError: negative.

    Example:
        >>> import pinstage
        >>> pinstage.set_num_threads(1)
        >>> pinstage.set_num_threads(0)
    """
    _core.set_num_threads(threads)
