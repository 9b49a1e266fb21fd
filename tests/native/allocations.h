// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace pinstage::check {

// How often this thread has called operator new, which this binary replaces to count: "no allocation in the steady
// state" is then a fact to check.
std::uint64_t allocations() noexcept;

}  // namespace pinstage::check
