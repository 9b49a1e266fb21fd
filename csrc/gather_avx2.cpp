// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include "gather_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define PINSTAGE_TARGET __attribute__((target("avx2")))

namespace pinstage {
namespace {

struct Avx2 {
  struct Block {
    static constexpr std::size_t kBytes = 32;
    PINSTAGE_TARGET static inline void copy(char* dst, const char* src) noexcept {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src)));
    }
    PINSTAGE_TARGET static inline void stream(char* dst, const char* src) noexcept {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(dst), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src)));
    }
    template <kernels::Store kStore>
    static void finish() noexcept {
      if constexpr (kStore == kernels::Store::kStream) _mm_sfence();
    }
  };

  // As for longer rows (Zen 3).
  static constexpr kernels::Hint kShortHint = kernels::kAllLevels;

  static bool supported() noexcept { return __builtin_cpu_supports("avx2") != 0; }

  template <class Index, class Row>
  PINSTAGE_TARGET static void range(const Gather& g, std::int64_t outer, std::int64_t begin,
                                    std::int64_t end) noexcept {
    kernels::gather_range<Index, Row>(g, outer, begin, end);
  }

  template <class Signed, class Unsigned>
  PINSTAGE_TARGET static bool all_inside(const void* index, std::int64_t count, std::int64_t rows) noexcept {
    return kernels::all_inside<Signed, Unsigned>(index, count, rows);
  }

  PINSTAGE_TARGET static void stream(char* dst, const char* src, std::size_t nbytes) noexcept {
    kernels::stream_copy<Block>(dst, src, nbytes);
  }
};

}  // namespace

constexpr Kernels kAvx2Kernels = kernels::make_kernels<Avx2>(Isa::kAvx2, "avx2");

}  // namespace pinstage

#endif  // __x86_64__
