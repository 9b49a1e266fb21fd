# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""`copy_` and `copy_rows_`: asynchronous copies whose source may be written as soon as they return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._device import DeviceContext

from pinstage import _core
from pinstage.bulk import Region, snapshot
from pinstage.devices import dispatches, holding
from pinstage.dtypes import stageable
from pinstage.gather import as_host_tensor, as_index, check_rows, check_segments, gather_rows
from pinstage.pool import StagingPool, default_pool

_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def copy_(dst: torch.Tensor, src: Any, non_blocking: bool = True, *, pool: StagingPool | None = None) -> torch.Tensor:
    """Copies like ``dst.copy_(src, non_blocking=True)``, and `src` may be written at once (contract: snapshot).

    The bytes of `src` are copied into a pinned slot before the call returns; the device reads the slot, on the current
    stream of dst's device. What torch takes is taken: any CPU source (pageable or pinned, strided, expanded, of another
    dtype, a NumPy array), any destination. Copies that are not host to device go to torch as they are.

    A source of more than 8 MB, or than the pool, goes in pieces (of 2 to 8 MB; of less where max_bytes is below 32 MB):
    the device reads one while the next is written, and no more than 32 MB (or max_bytes) of it are in flight. A larger
    one therefore waits until the stream has come that far. An error or Ctrl-C in the middle leaves the pool whole, and
    dst with a mixture of old and new bytes.

    Args:
        dst: tensor on a CUDA device, of any strides and dtype.
        src: tensor or NumPy array that broadcasts to dst's shape, or a Python number.
        non_blocking: False waits until the copy is done, as torch does.
        pool: the staging pool; None is the default pool of dst's device.

    Returns:
        dst.

    Raises:
        RuntimeError: shapes that do not broadcast, and all else that ``Tensor.copy_`` refuses, as torch raises it.
        CaptureError: the stream is being captured into a CUDA graph. Nothing was enqueued.
        PoolExhausted: no room in the pool, see `StagingPool.lease`. Larger than max_bytes, with ``when_full="raise"``.
        ValueError: `pool` is of another device than dst.
        DriverError: the driver refused.

    Example:
        >>> import torch, pinstage
        >>> from pinstage.testing import SimulatedDevice
        >>> with SimulatedDevice(schedule="late") as dev:
        ...     table, dst = torch.arange(4), dev.empty((4,), torch.int64)
        ...     _ = pinstage.copy_(dst, table)
        ...     _ = table.fill_(-1)  # at once: the copy has not run yet
        ...     dev.synchronize()
        ...     dst.tolist()
        [0, 1, 2, 3]
    """
    # What comes here is not one dense block of one dtype, or torch must see it itself, or it has arguments of its own.
    if not isinstance(dst, torch.Tensor):
        raise TypeError(f"dst must be a torch.Tensor, not {type(dst).__name__}")
    if not isinstance(src, torch.Tensor):
        src = (
            torch.tensor(src, dtype=_NUMBERS[type(src)], device="cpu")
            if type(src) in _NUMBERS
            else as_host_tensor(src, "src")
        )
    if dispatches(dst) or dispatches(src):
        return _leave_to_torch(dst, src, non_blocking and src.device.type != "cpu")
    device = holding(dst)
    if device is None or src.device.type != "cpu" or holding(src) is not None:
        return _leave_to_torch(dst, src, non_blocking)
    device.require_not_capturing(device.current_stream)
    pool = _pool_of(device, pool)
    if _torch_must_see(dst, src) or not _broadcasts(src, dst) or (not non_blocking and device.simulation is None):
        # Blocking: a pinned source passed on unguarded would be the race that this library exists to end.
        return _leave_to_torch(dst, src, non_blocking=False)
    with torch.no_grad(), torch._C.DisableTorchFunction():  # of a default device, see _function_mode_active
        if not _core.try_copy(dst, src, pool):
            if src.dtype != dst.dtype:
                src = src.resolve_neg()  # torch negates what it has cast, which a bool cannot be
            snapshot(pool, dst, lambda lease, region: lease.fill(_part(src, dst, region)))
    if not non_blocking:
        device.fence(device.current_stream).wait()
    return dst


if not TYPE_CHECKING:
    copy_ = _core.copy_builtin(copy_)


def _pool_of(device: _core.Device, pool: StagingPool | None) -> StagingPool:
    if pool is None:
        return default_pool(device)
    if not isinstance(pool, StagingPool):
        raise TypeError(f"pool must be a StagingPool, not {type(pool).__name__}")
    if pool.device is not device:
        raise ValueError(f"the pool is of {pool.device.name}, dst on {device.name}; use a pool of dst's device")
    return pool


def _leave_to_torch(dst: torch.Tensor, src: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    # torch knows nothing of a simulated device's streams: what is queued there goes first.
    for device in (holding(tensor) for tensor in (dst, src) if tensor.device.type == "cpu"):
        if device is not None:
            device.fence(device.current_stream).wait()
    return dst.copy_(src, non_blocking=non_blocking)


def _part(src: torch.Tensor, dst: torch.Tensor, region: Region | None) -> torch.Tensor:
    """What goes to ``dst[region]``."""
    return src if region is None else src.expand(dst.shape)[region]


def _gather_part(slot: torch.Tensor, src: torch.Tensor, index: torch.Tensor, dim: int, region: Region | None) -> None:
    """Gathers what goes to a region of the result."""
    if region is not None:
        index = index[region[dim]] if dim < len(region) else index
        src = src[tuple(slice(None) if i == dim else part for i, part in enumerate(region))]
    gather_rows(src, index, dim=dim, out=slot)


def _broadcasts(src: torch.Tensor, dst: torch.Tensor) -> bool:
    try:
        src.expand(dst.shape)
    except RuntimeError:
        return False
    return True


def meant_for_torch(*tensors: torch.Tensor) -> bool:
    """True for what changes the meaning of a copy, or has no plain bytes."""
    return (
        any(
            type(tensor) is not torch.Tensor
            or tensor.layout != torch.strided
            or not stageable(tensor.dtype)
            or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
            or torch._is_functional_tensor(tensor)
            or tensor._is_zerotensor()
            or (hasattr(tensor, "has_names") and tensor.has_names())  # torch < 2.13 has named tensors
            for tensor in tensors
        )
        or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
        or torch.autograd.forward_ad._current_level >= 0
        or _function_mode_active()
        or torch._C._len_torch_dispatch_stack() > 0
    )


def _function_mode_active() -> bool:
    """True where a torch function mode may want to see a copy. A default device is one that only places new tensors."""
    if torch._C._len_torch_function_stack() == 0:
        return False
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # torch leaves it so
    return any(type(mode) is not DeviceContext for mode in modes)


def _torch_must_see(dst: torch.Tensor, src: torch.Tensor) -> bool:
    """True for what is meant for torch, copies nothing, or is an error that torch words best."""
    return (
        meant_for_torch(dst, src)
        or dst.numel() == 0
        or (dst.is_inference() and not torch.is_inference_mode_enabled())
        or torch._debug_has_internal_overlap(dst) == 1
    )


def copy_rows_(
    dst: torch.Tensor,
    src: Any,
    index: Any = None,
    *,
    dim: int = 0,
    pool: StagingPool | None = None,
) -> torch.Tensor:
    """Copies rows of a host table, or of many: ``dst.narrow(dim, 0, n) <- src.index_select(dim, index)``.

    The rows are gathered straight into a pinned slot; `src` and `index` may be written as soon as the call returns
    (contract: snapshot), but not by another thread before. Many rows go in pieces, as a large source of `copy_` does.
    Without an index, `src` is a sequence of segments, whose rows follow one another:
    ``dst.narrow(dim, 0, n) <- torch.cat(src, dim)``, as for the block lists of a batch's requests.

    Args:
        dst: tensor on a CUDA device, of src's dtype and of its shape except along `dim`, where it has at least the `n`
            rows that are copied. Rows past those are left alone.
        src: CPU tensor or NumPy array, the table; or, without an index, a list or tuple of them.
        index: rows to take, in order, repeats allowed: 1-D int32 or int64 CPU tensor, NumPy array, or list of ints.
        dim: the dimension that `index` counts along, or that the segments follow one another along.
        pool: the staging pool; None is the default pool of dst's device.

    Returns:
        dst.

    Raises:
        IndexError: an index is negative or past the table (the message names the first and its place), or a bad `dim`.
        ValueError: shapes or dtypes that do not fit (the message names the segment), dst too small, or a pool of
            another device.
        TypeError: an index that is not of integers, or none with a table.
        CaptureError, PoolExhausted, DriverError: as `copy_`.
        Whatever is raised, dst was not written, unless the message says that pieces were enqueued before.

    Example:
        >>> import torch, pinstage
        >>> from pinstage.testing import SimulatedDevice
        >>> with SimulatedDevice() as dev:
        ...     table = torch.arange(8).reshape(4, 2)
        ...     dst = dev.empty((3, 2), torch.int64)
        ...     _ = pinstage.copy_rows_(dst, table, [3, 0, 3])
        ...     dev.synchronize()
        ...     print(dst.tolist())
        ...     blocks = dev.zeros(5, dtype=torch.int64)
        ...     _ = pinstage.copy_rows_(blocks, [torch.tensor([7, 2]), torch.tensor([9])])
        ...     dev.synchronize()
        ...     print(blocks.tolist())
        [[6, 7], [0, 1], [6, 7]]
        [7, 2, 9, 0, 0]
    """
    if index is None:
        return _copy_segments(dst, src, dim, pool)
    if _core.try_copy_rows(dst, src, index, dim, pool):
        return dst
    src, index = as_host_tensor(src, "src"), as_index(index)
    dim = check_rows(dst, src, index, dim, exact=False)
    if not _core.try_copy_rows(dst, src, index, dim, pool):  # they are tensors now
        part = dst.narrow(dim, 0, index.numel())
        _stage_rows(part, [src], lambda slot, region: _gather_part(slot, src, index, dim, region), pool)
    return dst


def _copy_segments(dst: torch.Tensor, src: Any, dim: int, pool: StagingPool | None) -> torch.Tensor:
    if not isinstance(src, (list, tuple)):
        raise TypeError(f"without an index, src is a list or tuple of tensors, not {type(src).__name__}")
    if dim == 0 and _core.try_copy_segments(dst, src, pool):
        return dst
    segments = [as_host_tensor(segment, f"src[{i}]") for i, segment in enumerate(src)]
    dim, rows = check_segments(dst, segments, dim)
    segments = [segment for segment in segments if segment.numel()]  # torch gives empty tensors no address
    if dim == 0 and segments and _core.try_copy_segments(dst, segments, pool):
        return dst

    whole = cache(lambda: torch.cat(segments, dim))

    def concatenate(slot: torch.Tensor, region: Region | None) -> None:
        with torch.no_grad():
            if region is None:
                torch.cat(segments, dim, out=slot)
            else:
                slot.copy_(whole()[region])

    _stage_rows(dst.narrow(dim, 0, rows), segments, concatenate, pool)
    return dst


def _stage_rows(
    part: torch.Tensor,
    sources: Sequence[torch.Tensor],
    fill: Callable[[torch.Tensor, Region | None], object],
    pool: StagingPool | None,
) -> None:
    """Copies to `part` what `fill` makes of the sources, see `bulk.snapshot`."""
    device = holding(part)
    if device is not None:
        device.require_not_capturing(device.current_stream)
        pool = _pool_of(device, pool)
    elif part.device.type != "cpu":
        raise ValueError(f"dst is on {part.device}; copy_rows_ writes CUDA (or host) tensors")
    if part.numel() == 0:
        return
    if pool is None or device is None or any(_torch_must_see(part, source) for source in sources):
        made = torch.empty(part.shape, dtype=part.dtype, device="cpu")
        fill(made, None)
        _leave_to_torch(part, made, non_blocking=False)
    else:
        with torch._C.DisableTorchFunction():  # of a default device, see _function_mode_active
            snapshot(pool, part, lambda lease, region: fill(lease.tensor(), region))
