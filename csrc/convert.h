// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// Conversions straight into a slot, for the dtypes that schedulers convert each step: 32-bit to 64-bit integers and
// back. Everything else is torch's, whose own copy into the slot costs 2.8 us more (64 elements, 2-core AMD Zen 3).
#pragma once

#include <cstdint>

#include "dlpack.h"

namespace pinstage {

// dst[i] = src[i], densely; any alignment. Integers wrap, as in torch.
using Conversion = void (*)(char* dst, const char* src, std::int64_t count) noexcept;

// nullptr for what is torch's.
Conversion conversion(DlDataType from, DlDataType to) noexcept;

// Past this, torch's copy works on several threads.
inline constexpr std::int64_t kMaxConverted = 32768;

}  // namespace pinstage
