// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// The choice of an instruction set, made once for the process; gather.h has the calls that force and name it.
#pragma once

#include "gather_kernels.h"

namespace pinstage {

// The table that select_isa chose; before any call of it, the best that the CPU supports, whatever the environment
// says.
const Kernels& active_kernels() noexcept;

}  // namespace pinstage
