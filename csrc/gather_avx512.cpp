// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include "gather_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define PINSTAGE_TARGET __attribute__((target("avx512f,avx512bw,avx512vl")))

namespace pinstage {
namespace {

struct Avx512 {
  struct Block {
    static constexpr std::size_t kBytes = 64;
    PINSTAGE_TARGET static inline void copy(char* dst, const char* src) noexcept {
      _mm512_storeu_si512(reinterpret_cast<__m512i*>(dst), _mm512_loadu_si512(reinterpret_cast<const __m512i*>(src)));
    }
    PINSTAGE_TARGET static inline void stream(char* dst, const char* src) noexcept {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), _mm512_loadu_si512(reinterpret_cast<const __m512i*>(src)));
    }
    template <kernels::Store kStore>
    static void finish() noexcept {
      if constexpr (kStore == kernels::Store::kStream) _mm_sfence();
    }
  };

  // Past L2, so that the page tables stay in it, whose walk is what each short row waits for: 1.2-1.3x of requesting
  // into all levels from 8 MB on, even below (Ice Lake server, rows of 64 B; 1.1x with 128 B, nothing from 256 B on).
  static constexpr kernels::Hint kShortHint = kernels::kNonTemporal;

  static bool supported() noexcept {
    return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
           __builtin_cpu_supports("avx512vl") != 0;
  }

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

constexpr Kernels kAvx512Kernels = kernels::make_kernels<Avx512>(Isa::kAvx512, "avx512");

}  // namespace pinstage

#endif  // __x86_64__
