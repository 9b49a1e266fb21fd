# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""Has the extension read past the end of a heap block: CI runs this to prove that AddressSanitizer is built into it.

The block is malloc's, of 7 numbers; a tensor that claims 8 is the index of a gather, which the extension's own code
walks. Without AddressSanitizer the stray read does no harm.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

import pinstage

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
block = ctypes.cast(libc.malloc(7 * 8), ctypes.POINTER(ctypes.c_int64))
ctypes.memset(block, 0, 7 * 8)
index = torch.from_numpy(np.ctypeslib.as_array(block, (8,)))
pinstage.gather_rows(torch.zeros(4, 4), index)
