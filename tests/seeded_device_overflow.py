# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""Has a kernel read past the end of device memory: `.ci/gpu` runs this to prove that memcheck looks.

The allocation is of 512 bytes; the tensor over it claims 4096. Without memcheck the stray read does no harm.
"""

from __future__ import annotations

import torch
from cuda.bindings import driver

torch.zeros(1, device="cuda")  # makes the context
status, allocated = driver.cuMemAlloc(512)
assert status == driver.CUresult.CUDA_SUCCESS, status


class Claim:
    __cuda_array_interface__ = {"shape": (4096,), "typestr": "|u1", "data": (int(allocated), False), "version": 3}  # noqa: RUF012


print(torch.as_tensor(Claim(), device="cuda").sum().item())
