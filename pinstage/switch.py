# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""`staged_copies`: a switch that sends the asynchronous copies of code you cannot edit through pinstage.

While it is on, three methods of `torch.Tensor` are replaced, in the whole process: a `TorchFunctionMode` would see only
the thread that entered it, and an engine copies from its worker threads. While it is off, nothing is replaced.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pinstage.copy import copy_, meant_for_torch
from pinstage.devices import holding
from pinstage.errors import CaptureError, PoolExhausted

_lock = threading.RLock()  # a finalizer may leave a block wherever the collector runs
_blocks = 0  # that are open, in all threads
_installed: dict[str, Callable[..., Any]] = {}  # the replacement of each method, while a block is open
_copies = _nbytes = 0
_warned_of_capture = False


class StagedCopies:
    """What went through the switch since a block began; frozen when it ends.

    Attributes:
        copies: host-to-device copies.
        nbytes: their bytes; sparse tensors do not count.
    """

    def __init__(self) -> None:
        self._begin = (_copies, _nbytes)
        self._end: tuple[int, int] | None = None

    @property
    def copies(self) -> int:
        """Host-to-device copies, in the whole process."""
        return (_copies if self._end is None else self._end[0]) - self._begin[0]

    @property
    def nbytes(self) -> int:
        """Their bytes."""
        return (_nbytes if self._end is None else self._end[1]) - self._begin[1]

    def __repr__(self) -> str:
        return f"<{self.copies} staged copies of {self.nbytes} bytes>"


@contextmanager
def staged_copies() -> Iterator[StagedCopies]:
    """Sends the asynchronous copies of all code in the process through pinstage.

    For code that you cannot edit, and to learn whether a corruption goes away.

    In the block, ``Tensor.copy_(src, non_blocking=True)``, ``Tensor.to(device, non_blocking=True)`` and
    ``Tensor.cuda(non_blocking=True)`` from a CPU source return when the source may be written (contract: snapshot). The
    results are torch's. What autograd, a subclass or a mode must see, and what is larger than the pool, torch copies
    itself, but waits until the copy is done.

    The switch is on in every thread while any thread is in a block. Blocks may nest and overlap; the last one to end
    takes the switch away, whatever it ends by, but leaves alone what somebody else put over it meanwhile. The three
    methods cost a Python call more while it is on, and nothing while it is off.

    It does not see copies that do not pass through these methods: those of C++ code, of compiled or scripted functions
    and of ``torch._foreach_copy_``. A copy that is captured into a CUDA graph stays torch's, with a warning: each
    replay reads the source anew, which no staging at capture time can make safe.

    Yields:
        A count of the copies that went through the switch: none means that the block proves nothing.

    Example:
        >>> import torch, pinstage
        >>> from pinstage.testing import SimulatedDevice
        >>> with SimulatedDevice(schedule="late") as dev, pinstage.staged_copies() as staged:
        ...     table, dst = torch.arange(4), dev.empty((4,), torch.int64)
        ...     _ = dst.copy_(table, non_blocking=True)
        ...     _ = table.fill_(-1)
        ...     dev.synchronize()
        ...     dst.tolist(), staged.copies
        ([0, 1, 2, 3], 1)
    """
    count = StagedCopies()
    _enter()
    try:
        yield count
    finally:
        _leave()
        count._end = (_copies, _nbytes)


def _enter() -> None:
    global _blocks
    with _lock:
        _blocks += 1
        if _blocks == 1:
            for name, replace in _REPLACEMENTS.items():
                present = getattr(torch.Tensor, name)
                # Ours is there already when somebody put it back after it was taken away.
                _installed[name] = present if hasattr(present, "_replaced") else _replacement(present, replace)
                setattr(torch.Tensor, name, _installed[name])


def _leave() -> None:
    global _blocks
    with _lock:
        _blocks -= 1
        if _blocks == 0:
            for name, ours in _installed.items():
                if vars(torch.Tensor).get(name) is not ours:
                    continue  # somebody replaced it in turn, and may call it: from here on it passes every call on
                before = ours._replaced
                if getattr(torch._C.TensorBase, name) is before:
                    delattr(torch.Tensor, name)  # torch.Tensor inherits its methods
                else:
                    setattr(torch.Tensor, name, before)
            _installed.clear()


def _replacement(method: Callable[..., Any], replace: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def replaced(tensor: torch.Tensor, /, *args: Any, **kwargs: Any) -> Any:
        if _blocks == 0:
            return method(tensor, *args, **kwargs)
        return replace(method, tensor, *args, **kwargs)

    replaced._replaced = method  # type: ignore[attr-defined]
    return replaced


def _copy(method: Callable[..., Any], dst: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """``Tensor.copy_(src, non_blocking)``."""
    values = {**dict(zip(("src", "non_blocking"), args, strict=False)), **kwargs}
    src = values.get("src")
    if (
        not values.get("non_blocking")
        or not isinstance(src, torch.Tensor)
        or src.device.type != "cpu"
        or not (dst.device.type == "cuda" or holding(dst) is not None)
        or holding(src) is not None
    ):
        return method(dst, *args, **kwargs)
    return _staged(lambda: copy_(dst, src), lambda wait: method(dst, src, non_blocking=not wait))


def _to(method: Callable[..., Any], src: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """``Tensor.to(device, dtype, non_blocking, copy)``, ``(dtype, ...)`` or ``(tensor, non_blocking, copy)``."""
    first = args[0] if args else None
    if isinstance(first, torch.dtype):
        names: tuple[str, ...] = ("dtype", "non_blocking", "copy")
    elif isinstance(first, torch.Tensor):
        names = ("tensor", "non_blocking", "copy")
    else:
        names = ("device", "dtype", "non_blocking", "copy")
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    if not values.get("non_blocking") or src.device.type != "cpu":
        return method(src, *args, **kwargs)
    other = values.pop("tensor", None)
    if isinstance(other, torch.Tensor):
        values |= {"device": other.device, "dtype": other.dtype}
    if values.get("device") is None or torch.device(values["device"]).type != "cuda":
        return method(src, *args, **kwargs)
    return _moved(method, src, values)


def _cuda(method: Callable[..., Any], src: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """``Tensor.cuda(device, non_blocking)``."""
    values = {"device": None, **dict(zip(("device", "non_blocking"), args, strict=False)), **kwargs}
    if not values.get("non_blocking") or src.device.type != "cpu":
        return method(src, *args, **kwargs)
    return _moved(method, src, values)


def _moved(method: Callable[..., Any], src: torch.Tensor, values: dict[str, Any]) -> Any:
    """`src` on the device, by `method` of the arguments `values`."""

    def by_torch(wait: bool) -> Any:
        return method(src, **{**values, "non_blocking": not wait})

    plain = src.detach() if type(src) is torch.nn.Parameter and not torch.is_grad_enabled() else src
    if meant_for_torch(plain) or plain.is_conj() or plain.is_neg():
        return _counted(by_torch(True))
    return _staged(lambda: copy_(_allocate(plain, values), plain), by_torch)


def _allocate(src: torch.Tensor, values: dict[str, Any]) -> torch.Tensor:
    device = values["device"]
    return torch.empty_like(
        src,
        device="cuda" if device is None else device,
        dtype=values.get("dtype") or src.dtype,
        memory_format=values.get("memory_format") or torch.preserve_format,
    )


def _staged(stage: Callable[[], torch.Tensor], by_torch: Callable[[bool], torch.Tensor]) -> torch.Tensor:
    """Stages a copy, or leaves it to torch: `by_torch(True)` waits until it is done."""
    global _warned_of_capture
    try:
        return _counted(stage())
    except PoolExhausted:
        return _counted(by_torch(True))
    except CaptureError:
        if not _warned_of_capture:
            _warned_of_capture = True
            warnings.warn(
                "staged_copies() leaves a copy alone that is captured into a CUDA graph: each replay reads its source "
                "again, so whoever refills that source must wait for the replay",
                RuntimeWarning,
                stacklevel=4,
            )
        return by_torch(False)


def _counted(result: torch.Tensor) -> torch.Tensor:
    global _copies, _nbytes
    with _lock:
        _copies += 1
        _nbytes += result.nbytes if result.layout == torch.strided else 0
    return result


_REPLACEMENTS = {"copy_": _copy, "to": _to, "cuda": _cuda}
