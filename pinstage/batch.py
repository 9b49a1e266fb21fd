# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""`copy_batch_`: many small copies for the price of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pinstage import _core
from pinstage.copy import _broadcasts, _pool_of, _torch_must_see, copy_
from pinstage.devices import holding
from pinstage.gather import as_host_tensor
from pinstage.pool import StagingPool

# Up to here a second pass over the bytes costs less than a slot, a fence and a driver call of the pair's own.
_CONVERTED_FIRST = 64 << 10


def copy_batch_(dsts: Sequence[torch.Tensor], srcs: Sequence[Any], *, pool: StagingPool | None = None) -> None:
    """Copies like ``torch._foreach_copy_(dsts, srcs)``, and `srcs` may be written at once (contract: snapshot).

    All pairs share one slot and one fence per device (one per 4 MB of a large batch), and as few driver calls as the
    destinations allow: neighbours in memory become one copy, equally spaced rows of one size too. The rest, if it is
    three copies and one more for each 32 KB, up to 1 MB, goes by one kernel, which reads the slot in place and writes
    each destination; on any stream. Else, or where the driver refuses the kernel, it goes in one `cuMemcpyBatchAsync`,
    if the driver has it and the stream is not the default one. The kernel needs a multiprocessor: where another kernel
    occupies them all and waits for these bytes, set ``PINSTAGE_KERNEL=never``. Where destinations overlap, the later
    pair wins, as in a loop.

    What `copy_` takes is taken in each pair. Everything is checked before the first copy is enqueued: if a check fails,
    no dst has changed.

    Args:
        dsts: list or tuple of tensors, of any dtypes and strides, on one or several devices.
        srcs: as many tensors or NumPy arrays; each broadcasts to the shape of its dst.
        pool: the staging pool; None is the default pool of each device. One that is given must be of the device of all
            dsts. A batch larger than the pool goes through it in several slots.

    Raises:
        RuntimeError: no pairs, lists of two lengths, and what ``Tensor.copy_`` refuses of a pair.
        TypeError: not lists or tuples, or of something else than tensors.
        CaptureError: a stream is being captured into a CUDA graph. Nothing was enqueued.
        ValueError: `pool` is of another device than a dst.
        PoolExhausted: no room in the pool, see `StagingPool.lease`. The pairs of a batch that needs several slots may
            have been copied in part.
        DriverError: the driver refused. The pairs may have been copied in part.

    Example:
        >>> import torch, pinstage
        >>> from pinstage.testing import SimulatedDevice
        >>> with SimulatedDevice(schedule="late") as dev:
        ...     lengths, slots = torch.tensor([3, 1], dtype=torch.int32), torch.arange(4)
        ...     dsts = [dev.empty(2, torch.int32), dev.empty(4, torch.int64)]
        ...     pinstage.copy_batch_(dsts, [lengths, slots])
        ...     _ = lengths.zero_(), slots.zero_()  # at once: the copies have not run yet
        ...     dev.synchronize()
        ...     [dst.tolist() for dst in dsts]
        [[3, 1], [0, 1, 2, 3]]
    """
    if _core.try_copy_batch(dsts, srcs, pool) < 0:
        return
    # Not every pair is one dense block of one dtype, or torch must see one, or there is no default pool yet.
    pairs = _checked(dsts, srcs, pool)
    if all(on_device for _, _, on_device in pairs):
        # Read before the first copy is enqueued, which no dst in device memory can tell from a loop.
        with torch.no_grad():
            pairs = [(dst, _converted(dst, src), True) for dst, src, _ in pairs]
    for dst, src, _ in pairs:
        if dst.numel() == 0:
            copy_(dst, src, pool=pool)
    pairs = [pair for pair in pairs if pair[0].numel() > 0]
    _stage([dst for dst, _, _ in pairs], [src for _, src, _ in pairs], pool)


def _stage(dsts: list[torch.Tensor], srcs: list[torch.Tensor], pool: StagingPool | None) -> None:
    """In list order: runs of pairs for the fast path in one call each, and what lies between them by `copy_`."""
    while dsts:
        stop = _core.try_copy_batch(dsts, srcs, pool)
        if stop < 0:
            return
        _stage(dsts[:stop], srcs[:stop], pool)
        copy_(dsts[stop], srcs[stop], pool=pool)
        dsts, srcs = dsts[stop + 1 :], srcs[stop + 1 :]


def _checked(
    dsts: Sequence[torch.Tensor], srcs: Sequence[Any], pool: StagingPool | None
) -> list[tuple[torch.Tensor, torch.Tensor, bool]]:
    """(dst, src, copied from host to device) of each pair; raises for what any of them would."""
    for name, tensors in (("dsts", dsts), ("srcs", srcs)):
        if not isinstance(tensors, (list, tuple)):
            raise TypeError(f"{name} must be a list or tuple of tensors, not {type(tensors).__name__}")
    if len(dsts) != len(srcs):
        raise RuntimeError(f"dsts and srcs must be of one length, not {len(dsts)} and {len(srcs)}")
    if not dsts:
        raise RuntimeError("dsts and srcs must have at least one tensor each")
    pairs = [(dst, as_host_tensor(src, f"srcs[{i}]")) for i, (dst, src) in enumerate(zip(dsts, srcs, strict=True))]
    checked, devices = [], set()
    for i, (dst, src) in enumerate(pairs):
        if not isinstance(dst, torch.Tensor):
            raise TypeError(f"dsts[{i}] must be a torch.Tensor, not {type(dst).__name__}")
        if not _broadcasts(src, dst):
            torch.empty(dst.shape, device="meta").copy_(
                torch.empty(src.shape, device="meta")
            )  # raises, in torch's words
        refusal = _refusal(dst)
        if refusal is not None:
            raise RuntimeError(f"dsts[{i}] {refusal}")
        device = holding(dst)
        staged = device is not None and src.device.type == "cpu" and holding(src) is None
        if device is not None and staged:
            _pool_of(device, pool)
            devices.add(device)
        checked.append((dst, src, staged))
    for device in devices:
        device.require_not_capturing(device.current_stream)
    return checked


def _refusal(dst: torch.Tensor) -> str | None:
    """Why torch would not write `dst` in place."""
    if dst.is_inference() and not torch.is_inference_mode_enabled():
        return "is an inference tensor: write it inside torch.inference_mode(), or pass a clone"
    if dst.requires_grad and dst.is_leaf and torch.is_grad_enabled():
        return "is a leaf that requires grad: write it inside torch.no_grad()"
    if torch._debug_has_internal_overlap(dst) == 1:
        return "has elements that share memory, as of expand(): clone it before writing to it"
    return None


def _converted(dst: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    """`src` as it is to arrive: of dst's dtype and shape, dense. `src` itself where `copy_` does better."""
    plain = src.dtype == dst.dtype and src.shape == dst.shape and src.is_contiguous()
    if plain or dst.nbytes > _CONVERTED_FIRST or _torch_must_see(dst, src):
        return src
    return torch.empty(dst.shape, dtype=dst.dtype).copy_(src)
