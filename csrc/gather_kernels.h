// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// The loops behind gather.h, written once and compiled for each instruction set.
//
// A loop is a template over a Block, the widest unit that one instruction moves, and is always_inline: it takes on the
// target of the function that it is expanded into. Only a Block's functions and the entry points of gather_<isa>.cpp
// carry a target attribute, so no wide instruction leaks into code that an older CPU runs, as it does with per-file
// -mavx2. Blocks go from memory to memory: no vector value crosses a function without the attribute.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "gather.h"

#define PINSTAGE_INLINE __attribute__((always_inline)) inline

namespace pinstage {

// How rows are copied. Each takes any alignment, unless it says otherwise, and every row size of its bracket.
enum class Regime : int {
  kRow1,  // exactly N bytes
  kRow2,
  kRow4,
  kRow8,
  kRow16,
  kRow32,
  kRow64,
  kShort,        // below kMinBlockRow bytes
  kWhole,        // kMinBlockRow bytes and up; requests whole rows ahead
  kHeads,        // kMinBlockRow bytes and up; requests the heads of pages ahead
  kLibc,         // any; memcpy
  kStreamWhole,  // as kWhole, by non-temporal stores; rows of dst are whole lines and start on one
  kStreamHeads,  // as kHeads, by non-temporal stores
};
inline constexpr int kRegimes = static_cast<int>(Regime::kStreamHeads) + 1;

enum class Isa : int { kPortable, kAvx2, kAvx512 };

// One instruction set's loops.
struct Kernels {
  Isa isa;
  const char* name;
  bool (*supported)() noexcept;
  GatherRange range[kRegimes][2];  // [regime][index_is_64]
  // Whether a contiguous index lies in [0, rows) throughout; [index_is_64].
  bool (*all_inside[2])(const void* index, std::int64_t count, std::int64_t rows) noexcept;
  void (*stream)(char* dst, const char* src, std::size_t nbytes) noexcept;  // memcpy by non-temporal stores
};

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

Regime choose_regime(const Gather& g, Isa isa, bool by_team) noexcept;

namespace kernels {

inline constexpr std::size_t kLine = 64;

// The shortest row of the block loops: a whole block of any instruction set, so that a last partial one may overlap it.
inline constexpr std::size_t kMinBlockRow = 64;

// How far ahead of the copy whole rows are requested: 2 KB is 32 lines, more than a core has miss buffers (10-16), so
// that they never run dry. Between 1 KB and 4 KB no difference could be measured (Ice Lake server, cold 512 MB table).
inline constexpr std::size_t kPrefetchAhead = 2048;

// How far ahead heads are requested. What a head is for is the walk of the page tables: a walk takes as long as a miss
// or two, there are two walkers, and a request for a line finds no use for a miss buffer before its walk is done. Past
// the head the core's own prefetchers have the rest of the page. With 8 KB, rows of 64 KB were 5-10 % slower.
inline constexpr std::size_t kHeadsAhead = 16384;
inline constexpr std::size_t kPage = 4096;

// Values of __builtin_prefetch's locality.
enum Hint : int {
  kNonTemporal = 0,  // PREFETCHNTA: L1 only
  kAllLevels = 3,    // PREFETCHT0
};

// Never faults, so p may be any address.
template <Hint kHint>
PINSTAGE_INLINE void prefetch(const char* p) noexcept {
  __builtin_prefetch(p, 0, kHint);
}

enum class Store { kPlain, kStream };

template <class Block, Store kStore>
PINSTAGE_INLINE void copy_line(char* dst, const char* src) noexcept {
  for (std::size_t at = 0; at < kLine; at += Block::kBytes) {
    if constexpr (kStore == Store::kStream) {
      Block::stream(dst + at, src + at);
    } else {
      Block::copy(dst + at, src + at);
    }
  }
}

// The end of a row of n bytes, less than a line: whole blocks, then one more that overlaps what is copied already.
// dst and src are disjoint, so bytes may be written twice; nothing outside the row is touched.
template <class Block>
PINSTAGE_INLINE void copy_rest(char* dst, const char* src, std::size_t at, std::size_t n) noexcept {
  for (; at + Block::kBytes <= n; at += Block::kBytes) Block::copy(dst + at, src + at);
  if (at < n) Block::copy(dst + n - Block::kBytes, src + n - Block::kBytes);
}

// --- Row kinds: how a row is copied while the row `ahead` is requested, and how many rows ahead that one lies.

// Also the most of any kind: more requests than a core can hold.
inline constexpr std::int64_t kShortRowsAhead = kPrefetchAhead / kLine;

template <std::size_t N>
struct FixedRow {
  static PINSTAGE_INLINE std::int64_t rows_ahead(std::size_t) noexcept { return kShortRowsAhead; }
  static PINSTAGE_INLINE void request(const char* row, std::size_t) noexcept { prefetch<kAllLevels>(row); }
  static PINSTAGE_INLINE void copy(char* dst, const char* src, std::size_t, const char* ahead) noexcept {
    prefetch<kAllLevels>(ahead);
    std::memcpy(dst, src, N);
  }
  static PINSTAGE_INLINE void finish() noexcept {}
};

// A row of one line.
template <class Block, Hint kHint>
struct LineRow {
  static PINSTAGE_INLINE std::int64_t rows_ahead(std::size_t) noexcept { return kShortRowsAhead; }
  static PINSTAGE_INLINE void request(const char* row, std::size_t) noexcept { prefetch<kHint>(row); }
  static PINSTAGE_INLINE void copy(char* dst, const char* src, std::size_t, const char* ahead) noexcept {
    prefetch<kHint>(ahead);
    copy_line<Block, Store::kPlain>(dst, src);
  }
  static PINSTAGE_INLINE void finish() noexcept {}
};

// N to 2N bytes by two moves that overlap.
template <std::size_t N>
PINSTAGE_INLINE void move_pair(char* dst, const char* src, std::size_t n) noexcept {
  std::memcpy(dst, src, N);
  std::memcpy(dst + n - N, src + n - N, N);
}

// All rows of a gather have one size, so these branches are predicted from the second row on.
struct ShortRow {
  static PINSTAGE_INLINE std::int64_t rows_ahead(std::size_t) noexcept { return kShortRowsAhead; }
  static PINSTAGE_INLINE void request(const char* row, std::size_t) noexcept { prefetch<kAllLevels>(row); }
  static PINSTAGE_INLINE void copy(char* dst, const char* src, std::size_t n, const char* ahead) noexcept {
    prefetch<kAllLevels>(ahead);
    if (n >= 32) return move_pair<32>(dst, src, n);
    if (n >= 16) return move_pair<16>(dst, src, n);
    if (n >= 8) return move_pair<8>(dst, src, n);
    if (n >= 4) return move_pair<4>(dst, src, n);
    if (n >= 2) return move_pair<2>(dst, src, n);
    if (n == 1) *dst = *src;
  }
  static PINSTAGE_INLINE void finish() noexcept {}
};

// A row at least kMinBlockRow long; whole rows are requested.
template <class Block, Store kStore, Hint kHint>
struct WholeRow {
  static PINSTAGE_INLINE std::int64_t rows_ahead(std::size_t n) noexcept {
    if (n >= kPrefetchAhead) return 1;
    // 32 bits: a 64-bit division costs 40 cycles on CPUs before Ice Lake, as much as a short row.
    return static_cast<std::uint32_t>(kPrefetchAhead) / static_cast<std::uint32_t>(n);
  }
  static PINSTAGE_INLINE void request(const char* row, std::size_t n) noexcept {
    for (std::size_t at = 0; at < n; at += kLine) prefetch<kHint>(row + at);
  }
  static PINSTAGE_INLINE void copy(char* dst, const char* src, std::size_t n, const char* ahead) noexcept {
    std::size_t at = 0;
    // Request and copy alternate: all of a row's requests first, then its copy, cost up to 20 % (Ice Lake, 4 KB).
    for (; at + kLine <= n; at += kLine) {
      prefetch<kHint>(ahead + at);
      copy_line<Block, kStore>(dst + at, src + at);
    }
    if (at == n) return;
    prefetch<kHint>(ahead + n - 1);
    copy_rest<Block>(dst, src, at, n);
  }
  static PINSTAGE_INLINE void finish() noexcept { Block::template finish<kStore>(); }
};

// A row at least kMinBlockRow long; of each page's worth of bytes its head is requested, and no more. The hint is
// kAllLevels for streams too: with kNonTemporal, Ice Lake falls from 1.5x of memcpy to 0.7x (rows >= 16 KB, 64 MB).
template <class Block, Store kStore, Hint kShortHint>
struct HeadRow {
  static PINSTAGE_INLINE std::int64_t rows_ahead(std::size_t n) noexcept {
    if (n >= kHeadsAhead) return 1;
    const auto rows = static_cast<std::uint32_t>(kHeadsAhead) / static_cast<std::uint32_t>(n);
    return std::min<std::int64_t>(rows, kShortRowsAhead);
  }
  // Enough lines for the core's prefetchers to see which way it goes, not so many that heads crowd each other out.
  static PINSTAGE_INLINE void request_head(const char* page, std::size_t n) noexcept {
    if (n <= 2 * kLine) return prefetch<kShortHint>(page);
    prefetch<kAllLevels>(page);
    if (n < 512) return prefetch<kAllLevels>(page + 2 * kLine);  // lines come in pairs: 1.05-1.15x (Ice Lake, 256 B)
    prefetch<kAllLevels>(page + kLine);
    if (n < 1024) return;
    prefetch<kAllLevels>(page + 2 * kLine);
    prefetch<kAllLevels>(page + 3 * kLine);
  }
  static PINSTAGE_INLINE void request(const char* row, std::size_t n) noexcept {
    for (std::size_t at = 0; at < std::min(n, kHeadsAhead); at += kPage) request_head(row + at, n);
  }
  static PINSTAGE_INLINE void copy(char* dst, const char* src, std::size_t n, const char* ahead) noexcept {
    std::size_t at = 0;
    if constexpr (kStore == Store::kStream) {
      // A stream starts on a line: one that starts on a half line was slower than memcpy (Ice Lake, AVX2, 0.75x).
      at = -reinterpret_cast<std::uintptr_t>(dst) & (kLine - 1);
      if (at != 0) copy_line<Block, Store::kPlain>(dst, src);
    }
    if (n <= kPage) {
      request_head(ahead, n);
      at = copy_lines(dst, src, at, n);
    } else {
      // Of a row longer than kHeadsAhead its own later pages are requested first, then those of the row `ahead`.
      const std::size_t own = n > kHeadsAhead ? (n - kHeadsAhead + kPage - 1) & ~(kPage - 1) : 0;
      for (std::size_t page = 0; page < n; page += kPage) {
        request_head(page < own ? src + page + kHeadsAhead : ahead + (page - own), n);
        at = copy_lines(dst, src, at, std::min(page + kPage, n));
      }
    }
    copy_rest<Block>(dst, src, at, n);
  }
  static PINSTAGE_INLINE std::size_t copy_lines(char* dst, const char* src, std::size_t at, std::size_t end) noexcept {
    for (; at + kLine <= end; at += kLine) copy_line<Block, kStore>(dst + at, src + at);
    return at;
  }
  static PINSTAGE_INLINE void finish() noexcept { Block::template finish<kStore>(); }
};

// memcpy, with the head of the next row requested.
struct LibcRow {
  static PINSTAGE_INLINE std::int64_t rows_ahead(std::size_t) noexcept { return 1; }
  static PINSTAGE_INLINE void request(const char* row, std::size_t n) noexcept {
    for (std::size_t at = 0; at < std::min(n, kPrefetchAhead); at += kLine) prefetch<kAllLevels>(row + at);
  }
  static PINSTAGE_INLINE void copy(char* dst, const char* src, std::size_t n, const char* ahead) noexcept {
    request(ahead, n);
    std::memcpy(dst, src, n);
  }
  static PINSTAGE_INLINE void finish() noexcept {}
};

// --- The loops themselves.

// Reads an index of any alignment.
template <class Index>
PINSTAGE_INLINE std::int64_t load_index(const char* at) noexcept {
  Index value;
  std::memcpy(&value, at, sizeof(Index));
  return value;
}

// The rows of one outer index. Copies of what g says, because as far as the compiler knows the rows may overlap g.
template <class Index>
struct Source {
  const char* base;
  std::int64_t stride;
  std::uint64_t last;
  // The index was checked, but another thread may have changed it since: whatever it is now, the row is one of the
  // table. With a cold table no cost was measured.
  PINSTAGE_INLINE const char* row(const char* index) const noexcept {
    auto row = static_cast<std::uint64_t>(load_index<Index>(index));
    __asm__("" : "+r"(row));  // it is read once: what is compared is what is used
    return base + static_cast<std::int64_t>(std::min(row, last)) * stride;
  }
  // Where to look ahead: any address may be requested.
  PINSTAGE_INLINE const char* hint(const char* index) const noexcept {
    const auto row = static_cast<std::uint64_t>(load_index<Index>(index));
    return reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(base) +
                                         row * static_cast<std::uint64_t>(stride));
  }
};

template <class Index, class Row>
PINSTAGE_INLINE void gather_range(const Gather& g, std::int64_t outer, std::int64_t begin, std::int64_t end) noexcept {
  const Source<Index> src{g.src + outer * g.src_outer_stride, g.src_row_stride,
                          static_cast<std::uint64_t>(g.src_rows - 1)};
  // Where the next outer index finds its rows; behind the last one, these rows again.
  const Source<Index> next{src.base + (outer + 1 < g.outer ? g.src_outer_stride : 0), src.stride, src.last};
  const std::int64_t index_step = g.index_stride * static_cast<std::int64_t>(sizeof(Index));
  const std::int64_t dst_stride = g.dst_row_stride;
  const auto n = static_cast<std::size_t>(g.row_bytes);
  const std::int64_t lead = std::min(Row::rows_ahead(n), end - begin);

  const char* const first = static_cast<const char*>(g.index) + begin * index_step;
  const char* index = first;
  const char* ahead = first + lead * index_step;
  char* dst = g.dst + outer * g.dst_outer_stride + begin * dst_stride;
  for (std::int64_t i = 0; i < lead; ++i) Row::request(src.hint(first + i * index_step), n);
  for (std::int64_t left = end - begin - lead; left > 0; --left) {
    Row::copy(dst, src.row(index), n, src.hint(ahead));
    index += index_step;
    ahead += index_step;
    dst += dst_stride;
  }
  // The last rows have none ahead of them in this outer index: they request the first ones of the next.
  ahead = first;
  for (std::int64_t left = lead; left > 0; --left) {
    Row::copy(dst, src.row(index), n, next.hint(ahead));
    index += index_step;
    ahead += index_step;
    dst += dst_stride;
  }
  Row::finish();
}

// x is outside [0, last] exactly when x or last - x has its sign bit: the latter cannot overflow for x >= 0. Three
// operations that every compiler vectorises, and no early exit. Ice Lake, 1024 cached indices: int32 0.17 ns an index
// (portable), 0.09 (AVX2), 0.08 (AVX-512), int64 0.32, 0.19, 0.14; one by one 0.6.
template <class Signed, class Unsigned>
PINSTAGE_INLINE bool all_inside(const void* index, std::int64_t count, std::int64_t rows) noexcept {
  constexpr std::int64_t kMax = static_cast<std::int64_t>(static_cast<Unsigned>(-1) >> 1);
  const auto last = static_cast<Unsigned>(std::min(rows - 1, kMax));
  const char* at = static_cast<const char*>(index);
  Unsigned outside = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto x = static_cast<Unsigned>(load_index<Signed>(at + i * static_cast<std::int64_t>(sizeof(Signed))));
    outside |= x | (last - x);
  }
  return static_cast<Signed>(outside) >= 0;
}

template <class Block>
PINSTAGE_INLINE void stream_copy(char* dst, const char* src, std::size_t nbytes) noexcept {
  if (nbytes < kPrefetchAhead) {
    std::memcpy(dst, src, nbytes);
    return;
  }
  using Row = HeadRow<Block, Store::kStream, kAllLevels>;
  Row::copy(dst, src, nbytes, src);
  Row::finish();
}

template <class Target, class Row>
constexpr void set_range(Kernels& k, Regime regime) noexcept {
  k.range[static_cast<int>(regime)][0] = Target::template range<std::int32_t, Row>;
  k.range[static_cast<int>(regime)][1] = Target::template range<std::int64_t, Row>;
}

// Fills the table from a Target: its Block, kShortHint (what rows of a line or two are requested into), and its entry
// points range, all_inside, stream and supported, which expand the loops above under the target attribute.
template <class Target>
constexpr Kernels make_kernels(Isa isa, const char* name) noexcept {
  using Block = typename Target::Block;
  Kernels k{};
  k.isa = isa;
  k.name = name;
  k.supported = Target::supported;
  set_range<Target, FixedRow<1>>(k, Regime::kRow1);
  set_range<Target, FixedRow<2>>(k, Regime::kRow2);
  set_range<Target, FixedRow<4>>(k, Regime::kRow4);
  set_range<Target, FixedRow<8>>(k, Regime::kRow8);
  set_range<Target, FixedRow<16>>(k, Regime::kRow16);
  set_range<Target, FixedRow<32>>(k, Regime::kRow32);
  set_range<Target, LineRow<Block, Target::kShortHint>>(k, Regime::kRow64);
  set_range<Target, ShortRow>(k, Regime::kShort);
  set_range<Target, WholeRow<Block, Store::kPlain, kAllLevels>>(k, Regime::kWhole);
  set_range<Target, HeadRow<Block, Store::kPlain, Target::kShortHint>>(k, Regime::kHeads);
  set_range<Target, LibcRow>(k, Regime::kLibc);
  set_range<Target, WholeRow<Block, Store::kStream, Target::kShortHint>>(k, Regime::kStreamWhole);
  set_range<Target, HeadRow<Block, Store::kStream, Target::kShortHint>>(k, Regime::kStreamHeads);
  k.all_inside[0] = Target::template all_inside<std::int32_t, std::uint32_t>;
  k.all_inside[1] = Target::template all_inside<std::int64_t, std::uint64_t>;
  k.stream = Target::stream;
  return k;
}

}  // namespace kernels
}  // namespace pinstage
