// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include "gather.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu.h"
#include "gather_kernels.h"

namespace pinstage {
namespace {

constexpr auto kLine = static_cast<std::int64_t>(kernels::kLine);
constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

// From how many bytes on which regime pays. Rows below kMinBlockRow bytes have one loop each, with plain stores.
//
// A plain store into a cold line reads it first, a non-temporal one does not, but leaves the line in DRAM, where the
// copy engine must fetch it. So outputs that fit the last-level cache are stored plainly, and hot slots stay hot.
struct Thresholds {
  std::int64_t stream_output;     // outputs from here may use non-temporal stores:
  std::int64_t stream_short_row;  // rows up to here by kStreamWhole,
  std::int64_t stream_long_row;   // rows from here by kStreamHeads; those between are stored plainly
  std::int64_t heads_row;         // plain rows from here request heads (kHeads), shorter ones all of the row (kWhole)
  std::int64_t libc_row;          // plain rows from here go by memcpy
};

constexpr Thresholds thresholds(Isa isa) noexcept {
  switch (isa) {
    case Isa::kAvx2:
      // AMD Zen 3, 2 cores, 32 MB L3, cold table, 4 KB pages. Non-temporal stores win at every row size past 6 MB;
      // below, memcpy is ahead of our loop from rows of more than 4 KB.
      return {6 << 20, (8 << 10) - 1, 8 << 10, kNever, (4 << 10) + 1};
    case Isa::kAvx512:
      // Intel Ice Lake server, 2 cores, 48 MB L3, cold 512 MB table, 4 KB pages. Heads against whole rows, both plain:
      // 1.0-1.05x for rows of 128 and 256 B, 1.05-1.1x for 512 B, 1.15x for 1 KB, 1.25x for 2 KB, 1.2-1.3x for 4 KB;
      // and ahead of memcpy row by row at every size. With 32-byte moves instead of 64: 0.75x for 1 KB, 0.9x for the
      // others. Non-temporal stores against plain ones, both with heads: 0.8x for 512 B and 0.9x for 1 KB at any size;
      // for 2 KB 0.9x at 1 MB, 1.0-1.1x from 8 MB on; for 4 KB 0.95x, 1.25x and at 64 MB 1.35x; for 16 KB 1.0x, 1.4x
      // and 1.55x.
      return {8 << 20, 0, 2 << 10, kLine + 1, kNever};
    case Isa::kPortable:
      break;
  }
  // No non-temporal stores, and libc's memcpy has the vectors that portable code lacks.
  return {kNever, 0, kNever, kNever, 2 << 10};
}

// Rows that do not lie on whole lines begin and end with a line that is half streamed, half plain: below this size that
// costs more than streaming gains (Ice Lake, 64 MB: 0.95x of plain for 2.5 KB, 1.15x for 10 KB, 1.45x for 20 KB).
constexpr std::int64_t kStreamUnalignedRow = 8 << 10;

// Outputs of a team use non-temporal stores from here, as its plain copies do (team.cpp): their lines are in the caches
// of other cores.
constexpr std::int64_t kStreamByTeam = 256 << 10;

// copy_bytes: from here by non-temporal stores. Against memcpy into a cached destination they are (Ice Lake, AVX-512,
// source cached or cold) 0.15x or 0.6x at 256 KB, 0.8x or 0.9x at 1 MB, 1.0x or 1.1x at 2 MB, 1.2x at 4 MB, 1.3-1.6x at
// 8 MB. Below it the slot stays in the cache, where DMA reads it.
constexpr std::size_t kStreamCopy = 4 << 20;

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
    case 1:
      return Regime::kRow1;
    case 2:
      return Regime::kRow2;
    case 4:
      return Regime::kRow4;
    case 8:
      return Regime::kRow8;
    case 16:
      return Regime::kRow16;
    case 32:
      return Regime::kRow32;
    default:
      return Regime::kShort;
  }
}

Regime plain_regime(std::int64_t row_bytes, const Thresholds& t) noexcept {
  if (row_bytes >= t.libc_row) return Regime::kLibc;
  if (row_bytes == kLine) return Regime::kRow64;
  return row_bytes >= t.heads_row ? Regime::kHeads : Regime::kWhole;
}

bool rows_on_lines(const Gather& g) noexcept {
  const auto bits = reinterpret_cast<std::uintptr_t>(g.dst) | static_cast<std::uintptr_t>(g.dst_row_stride) |
                    static_cast<std::uintptr_t>(g.dst_outer_stride) | static_cast<std::uintptr_t>(g.row_bytes);
  return bits % kernels::kLine == 0;
}

}  // namespace

Regime choose_regime(const Gather& g, Isa isa, bool by_team) noexcept {
  if (g.row_bytes < static_cast<std::int64_t>(kernels::kMinBlockRow)) return short_regime(g.row_bytes);
  const Thresholds t = thresholds(isa);
  const std::int64_t from = by_team && t.stream_output != kNever ? kStreamByTeam : t.stream_output;
  if (!g.cached && g.outer * g.count * g.row_bytes >= from) {
    const bool on_lines = rows_on_lines(g);
    if (on_lines && g.row_bytes <= t.stream_short_row) return Regime::kStreamWhole;
    if (g.row_bytes >= (on_lines ? t.stream_long_row : kStreamUnalignedRow)) return Regime::kStreamHeads;
  }
  return plain_regime(g.row_bytes, t);
}

GatherRange gather_range_for(const Gather& g, bool by_team) noexcept {
  const Kernels& table = active_kernels();
  return table.range[static_cast<int>(choose_regime(g, table.isa, by_team))][g.index_is_64 ? 1 : 0];
}

void gather(const Gather& g) noexcept {
  const GatherRange range = gather_range_for(g);
  for (std::int64_t outer = 0; outer < g.outer; ++outer) range(g, outer, 0, g.count);
}

std::int64_t first_bad_index(const void* index, bool is_64, std::int64_t stride, std::int64_t count,
                             std::int64_t rows) noexcept {
  if (stride == 1 && active_kernels().all_inside[is_64 ? 1 : 0](index, count, rows)) return -1;
  return is_64 ? scan_bad_index<std::int64_t>(index, stride, count, rows)
               : scan_bad_index<std::int32_t>(index, stride, count, rows);
}

void copy_bytes(void* dst, const void* src, std::size_t nbytes) noexcept {
  if (nbytes < kStreamCopy) {
    std::memcpy(dst, src, nbytes);
  } else {
    active_kernels().stream(static_cast<char*>(dst), static_cast<const char*>(src), nbytes);
  }
}

void copy_segments(char* dst, const Segment* segments, std::size_t count, std::size_t begin, std::size_t end) noexcept {
  // Segments lie in memory of their own, a page each or more: they wait for what rows wait for (kHeadsAhead).
  constexpr std::ptrdiff_t kSegmentsAhead = 8;
  const Segment* const last = segments + count;
  const Segment* segment =
      std::partition_point(segments, last, [begin](const Segment& each) { return each.offset + each.nbytes <= begin; });
  for (const Segment* ahead = segment; ahead < last && ahead - segment < kSegmentsAhead; ++ahead) {
    kernels::prefetch<kernels::kAllLevels>(ahead->data);
  }
  for (; segment < last && segment->offset < end; ++segment) {
    if (last - segment > kSegmentsAhead) kernels::prefetch<kernels::kAllLevels>(segment[kSegmentsAhead].data);
    const std::size_t from = std::max(begin, segment->offset), to = std::min(end, segment->offset + segment->nbytes);
    if (from < to) copy_bytes(dst + (from - begin), segment->data + (from - segment->offset), to - from);
  }
}

}  // namespace pinstage
