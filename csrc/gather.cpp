// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include "gather.h"

#include <algorithm>
#include <cstring>

#include "cpu.h"
#include "gather_kernels.h"

namespace pinstage {
namespace {

constexpr std::int64_t kNever = std::int64_t{1} << 62;

// Row and output sizes, in bytes, from which a regime is chosen.
struct Thresholds {
  std::int64_t stream_output;    // outputs from here may use non-temporal stores
  std::int64_t stream_short_max; // rows up to here do so by kStream,
  std::int64_t stream_long_min;  // rows from here by kStreamLong; those between stay plain
  std::int64_t libc_row;         // plain rows from here go by memcpy
};
constexpr Thresholds kThresholds[] = {
    {kNever, 0, kNever, 2048},
    {6 << 20, 8191, 8192, 4097},
    {8 << 20, 512, 2048, kNever},
};
constexpr std::size_t kStreamCopyBytes = 256 << 10;

template <class Index>
std::int64_t scan_bad_index(const void* index, std::int64_t stride, std::int64_t count, std::int64_t rows) noexcept {
  const char* at = static_cast<const char*>(index);
  const std::int64_t step = stride * static_cast<std::int64_t>(sizeof(Index));
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t row = kernels::load_index<Index>(at + i * step);
    if (row < 0 || row >= rows) return i;
  }
  return -1;
}

Regime short_regime(std::int64_t row_bytes) noexcept {
  switch (row_bytes) {
    case 1: return Regime::kRow1;
    case 2: return Regime::kRow2;
    case 4: return Regime::kRow4;
    case 8: return Regime::kRow8;
    case 16: return Regime::kRow16;
    case 32: return Regime::kRow32;
    default: return Regime::kShort;
  }
}

Regime plain_regime(std::int64_t row_bytes, std::int64_t libc_row) noexcept {
  if (row_bytes >= libc_row) return Regime::kLibc;
  if (row_bytes == 64) return Regime::kRow64;
  return row_bytes < static_cast<std::int64_t>(kernels::kPrefetchAhead) ? Regime::kBlocks : Regime::kLong;
}

bool rows_on_lines(const Gather& g) noexcept {
  const auto bits = reinterpret_cast<std::uintptr_t>(g.dst) | static_cast<std::uintptr_t>(g.dst_row_stride) |
                    static_cast<std::uintptr_t>(g.dst_outer_stride) | static_cast<std::uintptr_t>(g.row_bytes);
  return bits % kernels::kLine == 0;
}

}  // namespace

Regime choose_regime(const Gather& g, const Kernels& kernels) noexcept {
  if (g.row_bytes < static_cast<std::int64_t>(kernels::kMinBlockRow)) return short_regime(g.row_bytes);
  const Thresholds& t = kThresholds[static_cast<int>(kernels.isa)];
  if (g.outer * g.count * g.row_bytes >= t.stream_output) {
    if (g.row_bytes >= t.stream_long_min) return Regime::kStreamLong;
    if (g.row_bytes <= t.stream_short_max && rows_on_lines(g)) return Regime::kStream;
  }
  return plain_regime(g.row_bytes, t.libc_row);
}

RangeKernel choose_range_kernel(const Gather& g) noexcept {
  const Kernels& kernels = active_kernels();
  return kernels.range[static_cast<int>(choose_regime(g, kernels))][g.index_is_64 ? 1 : 0];
}

void gather(const Gather& g) noexcept {
  const RangeKernel range = choose_range_kernel(g);
  for (std::int64_t outer = 0; outer < g.outer; ++outer) range(g, outer, 0, g.count);
}

std::int64_t first_bad_index(const void* index, bool is_64, std::int64_t stride, std::int64_t count,
                             std::int64_t rows) noexcept {
  if (stride == 1 && active_kernels().all_inside[is_64 ? 1 : 0](index, count, rows)) return -1;
  return is_64 ? scan_bad_index<std::int64_t>(index, stride, count, rows)
               : scan_bad_index<std::int32_t>(index, stride, count, rows);
}

void copy_bytes(void* dst, const void* src, std::size_t nbytes) noexcept {
  if (nbytes <= kStreamCopyBytes) {
    std::memcpy(dst, src, nbytes);
  } else {
    active_kernels().stream(static_cast<char*>(dst), static_cast<const char*>(src), nbytes);
  }
}

}  // namespace pinstage
