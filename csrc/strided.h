// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// The snapshot of a strided source: runs of bytes that lie at strides, copied into dense memory in the order of the
// shape that they are broadcast to.
#pragma once

#include <cstddef>
#include <cstdint>

#include "copy_plan.h"

namespace pinstage {

struct Strided {
  const char* src = nullptr;
  std::int64_t row_bytes = 0;  // what lies densely
  std::int64_t rows = 1;       // the product of the sizes
  int ndim = 0;
  std::int64_t size[kMaxDims];    // outermost first, none of them 1
  std::int64_t stride[kMaxDims];  // in bytes; 0 repeats
};

// The source of `src_ndim` dimensions (strides in elements) as broadcast to `shape`, or false when it does not.
bool plan_strided(const char* src, int src_ndim, const std::int64_t* src_shape, const std::int64_t* src_strides,
                  std::size_t itemsize, int ndim, const std::int64_t* shape, Strided* out);

// True when copy_strided() is the better loop; torch's own copy, which works in blocks, is for what is left.
bool suits_rows(const Strided& source) noexcept;

// Rows [begin, end), densely from dst on.
void copy_strided(char* dst, const Strided& source, std::int64_t begin, std::int64_t end) noexcept;

// Where row `index` lies.
const char* row_of(const Strided& source, std::int64_t index) noexcept;

}  // namespace pinstage
