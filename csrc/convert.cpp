// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include "convert.h"

#include <cstring>

namespace pinstage {
namespace {

template <class From, class To>
__attribute__((always_inline)) inline void convert_all(char* dst, const char* src, std::int64_t count) noexcept {
  for (std::int64_t i = 0; i < count; ++i) {
    From from;
    std::memcpy(&from, src + i * static_cast<std::int64_t>(sizeof(From)), sizeof(From));
    const auto to = static_cast<To>(from);
    std::memcpy(dst + i * static_cast<std::int64_t>(sizeof(To)), &to, sizeof(To));
  }
}

template <class From, class To>
void portable(char* dst, const char* src, std::int64_t count) noexcept {
  convert_all<From, To>(dst, src, count);
}

#if defined(__x86_64__)
template <class From, class To>
__attribute__((target("avx2"))) void avx2(char* dst, const char* src, std::int64_t count) noexcept {
  convert_all<From, To>(dst, src, count);
}
#endif

template <class From, class To>
Conversion best() noexcept {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return &avx2<From, To>;
#endif
  return &portable<From, To>;
}

bool is_int(DlDataType dtype, int bits) noexcept {
  return dtype.code == kDlInt && dtype.bits == bits && dtype.lanes == 1;
}

}  // namespace

Conversion conversion(DlDataType from, DlDataType to) noexcept {
  if (is_int(from, 32) && is_int(to, 64)) return best<std::int32_t, std::int64_t>();
  if (is_int(from, 64) && is_int(to, 32)) return best<std::int64_t, std::int32_t>();
  return nullptr;
}

}  // namespace pinstage
