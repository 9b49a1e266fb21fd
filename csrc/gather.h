// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// Row gather: dst[o, i, :] = src[o, index[i], :], rows of bytes, index checked before anything is written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pinstage {

struct Gather {
  const char* src;              // row 0 of outer 0
  std::int64_t src_rows;        // rows that may be indexed
  std::int64_t src_row_stride;  // bytes between rows; any value, negative included
  std::int64_t src_outer_stride;
  char* dst;  // rows lie dst_row_stride apart
  std::int64_t dst_row_stride;
  std::int64_t dst_outer_stride;
  std::int64_t outer;  // how many times the gather repeats
  std::int64_t row_bytes;
  const void* index;  // int32 or int64, `count` of them, index_stride elements apart
  std::int64_t index_stride;
  bool index_is_64;
  std::int64_t count;
  bool cached = false;  // the output shall stay in the cache, where DMA reads it next: plain stores at any size
};

// Position of the first index outside [0, rows), or -1 when all are inside.
std::int64_t first_bad_index(const void* index, bool is_64, std::int64_t stride, std::int64_t count,
                             std::int64_t rows) noexcept;

// The index must have been checked. One that is written meanwhile, a race of the caller's, gives other rows of the
// table, never bytes outside it. dst and src must not overlap.
void gather(const Gather& g) noexcept;

// Copies rows [begin, end) of one outer index. Its stores come before whatever the calling thread publishes afterwards,
// the fence after non-temporal ones included.
using GatherRange = void (*)(const Gather& g, std::int64_t outer, std::int64_t begin, std::int64_t end) noexcept;

// The loop that suits `g` as a whole. gather() calls it for all rows of each outer index; a team asks once (`by_team`)
// and calls it for parts of them, with the same `g`.
GatherRange gather_range_for(const Gather& g, bool by_team = false) noexcept;

// Plain copy of a contiguous block into a slot, by the kernel that suits its size.
void copy_bytes(void* dst, const void* src, std::size_t nbytes) noexcept;

// A run of bytes from anywhere, and where it goes in a slot.
struct Segment {
  const char* data;
  std::size_t nbytes, offset;
};

// What falls of the segments between the bytes `begin` and `end` of the slot, into memory that stands for that range of
// it. Their offsets ascend, and they do not overlap; bytes between them are left alone.
void copy_segments(char* dst, const Segment* segments, std::size_t count, std::size_t begin, std::size_t end) noexcept;

// The instruction set in use: "avx512", "avx2" or "portable".
const char* isa() noexcept;

// Those that this CPU can run, best first.
std::vector<const char*> supported_isas();

// Forces one; null or empty chooses the CPU's best. The bindings pass PINSTAGE_ISA at import. Throws
// std::invalid_argument, with the valid names, when the name is unknown or the CPU lacks it; the choice then stays.
void select_isa(const char* name);

}  // namespace pinstage
