// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include "gather_kernels.h"

namespace pinstage {
namespace {

struct Portable {
  // Sixteen bytes are what every 64-bit CPU moves at once. There is no portable non-temporal store.
  struct Block {
    static constexpr std::size_t kBytes = 16;
    static void copy(char* dst, const char* src) noexcept { std::memcpy(dst, src, kBytes); }
    static void stream(char* dst, const char* src) noexcept { std::memcpy(dst, src, kBytes); }
    template <kernels::Store>
    static void finish() noexcept {}
  };

  static constexpr kernels::Hint kShortHint = kernels::kAllLevels;

  static bool supported() noexcept { return true; }

  template <class Index, class Row>
  static void range(const Gather& g, std::int64_t outer, std::int64_t begin, std::int64_t end) noexcept {
    kernels::gather_range<Index, Row>(g, outer, begin, end);
  }

  template <class Signed, class Unsigned>
  static bool all_inside(const void* index, std::int64_t count, std::int64_t rows) noexcept {
    return kernels::all_inside<Signed, Unsigned>(index, count, rows);
  }

  static void stream(char* dst, const char* src, std::size_t nbytes) noexcept { std::memcpy(dst, src, nbytes); }
};

}  // namespace

constexpr Kernels kPortableKernels = kernels::make_kernels<Portable>(Isa::kPortable, "portable");

}  // namespace pinstage
