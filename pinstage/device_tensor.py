# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""`to_device`: new device tensors from lists, arrays and CPU tensors."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from pinstage import _core
from pinstage.copy import copy_
from pinstage.devices import DeviceLike, empty, resolve
from pinstage.gather import as_host_tensor
from pinstage.pool import StagingPool


def to_device(
    data: Any, device: DeviceLike, dtype: torch.dtype | None = None, *, pool: StagingPool | None = None
) -> torch.Tensor:
    """A new tensor on `device` with the values of `data`, which may be written at once (contract: snapshot).

    Replaces ``torch.tensor(data, dtype=dtype, pin_memory=True).to(device, non_blocking=True)``, and for arrays and CPU
    tensors ``data.pin_memory().to(device, dtype, non_blocking=True)``. The numbers of a list go straight into the
    staging memory. The tensor is made by torch's allocator and filled on the current stream of `device`.

    Args:
        data: what ``torch.tensor`` takes: a number, a list or nested lists of numbers, a NumPy array, a CPU tensor.
        device: `torch.device`, its name or number, or a `pinstage.testing.SimulatedDevice`.
        dtype: of the new tensor; None is what torch infers: int64 for ints, bool for bools, the default dtype for
            floats, and that of an array or tensor.
        pool: the staging pool; None is the default pool of `device`.

    Returns:
        A tensor of data's shape, with the memory layout of a dense tensor `data` (as ``Tensor.to``). Like that of
        ``torch.tensor``, it requires no grad and has no history; for copies that autograd sees use ``Tensor.to``.

    Raises:
        ValueError, TypeError, RuntimeError, OverflowError: as ``torch.tensor(data, dtype=dtype)`` raises them, for
            ragged lists, values that the dtype does not hold, and what is no number.
        ValueError: `device` is no CUDA device, or `pool` is of another one.
        CaptureError: the stream is being captured into a CUDA graph. Nothing was enqueued.
        PoolExhausted, DriverError: as `copy_`.

    Example:
        >>> import torch, pinstage
        >>> from pinstage.testing import SimulatedDevice
        >>> with SimulatedDevice() as dev:
        ...     lengths = pinstage.to_device([[3, 1], [4, 1]], dev, torch.int32)
        ...     dev.synchronize()
        ...     (lengths.tolist(), lengths.dtype)
        ([[3, 1], [4, 1]], torch.int32)
    """
    # No list of plain numbers, or one that torch words the mistake of best, or there is no default pool yet.
    if device is None:
        raise TypeError("to_device needs a device: a torch.device, its name or number")
    src = _as_tensor(data, dtype)
    core = resolve(device)
    order = list(range(src.dim()))
    if not src.is_contiguous():
        by_stride = sorted(order, key=src.stride, reverse=True)
        if src.permute(by_stride).is_contiguous():  # dense, in an order of dimensions of its own
            order = by_stride
    dense = src.permute(order)
    dst = empty(core, dense.shape, src.dtype if dtype is None else dtype)
    copy_(dst, dense, pool=pool)
    return dst.permute([order.index(dim) for dim in range(src.dim())])


if not TYPE_CHECKING:
    to_device = _core.to_device_builtin(to_device)


def _as_tensor(data: Any, dtype: torch.dtype | None) -> torch.Tensor:
    if isinstance(data, torch.Tensor):
        return data.detach()
    numpy = sys.modules.get("numpy")  # whoever passes an array has imported it
    if numpy is not None and isinstance(data, numpy.ndarray):
        return as_host_tensor(data, "data")
    return torch.tensor(data, dtype=dtype)
