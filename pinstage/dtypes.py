# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""The dtypes that a staging slot can hold, as the core names them."""

from __future__ import annotations

import torch

_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6  # DLPack type codes


def _packed(code: int, bits: int) -> int:
    return code | bits << 8


_CODES = {
    torch.bool: _packed(_BOOL, 8),
    torch.uint8: _packed(_UINT, 8),
    torch.uint16: _packed(_UINT, 16),
    torch.uint32: _packed(_UINT, 32),
    torch.uint64: _packed(_UINT, 64),
    torch.int8: _packed(_INT, 8),
    torch.int16: _packed(_INT, 16),
    torch.int32: _packed(_INT, 32),
    torch.int64: _packed(_INT, 64),
    torch.float16: _packed(_FLOAT, 16),
    torch.bfloat16: _packed(_BFLOAT, 16),
    torch.float32: _packed(_FLOAT, 32),
    torch.float64: _packed(_FLOAT, 64),
    torch.complex32: _packed(_COMPLEX, 32),
    torch.complex64: _packed(_COMPLEX, 64),
    torch.complex128: _packed(_COMPLEX, 128),
    # DLPack 1.1 gave each eight-bit float a code of its own.
    torch.float8_e4m3fn: _packed(10, 8),
    torch.float8_e4m3fnuz: _packed(11, 8),
    torch.float8_e5m2: _packed(12, 8),
    torch.float8_e5m2fnuz: _packed(13, 8),
    torch.float8_e8m0fnu: _packed(14, 8),
}


def stageable(dtype: torch.dtype) -> bool:
    """Whether a slot can hold `dtype`."""
    return dtype in _CODES


def code_of(dtype: torch.dtype) -> int:
    """The core's number of a dtype.

    Raises:
        TypeError: quantized, sub-byte or opaque dtypes have no DLPack form.
    """
    try:
        return _CODES[dtype]
    except KeyError:
        raise TypeError(f"a staging slot cannot hold {dtype}; stage its bytes as torch.uint8") from None
