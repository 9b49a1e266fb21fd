// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// Which instruction set the kernels use.
#pragma once

#include "gather_kernels.h"

namespace pinstage {

// The table in use: the one that select_isa chose, or the CPU's best before any call of it.
const Kernels& active_kernels() noexcept;

}  // namespace pinstage
