// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include "strided.h"

#include <algorithm>
#include <cstring>

namespace pinstage {
namespace {

constexpr std::int64_t kShortRow = 16;
constexpr std::int64_t kFewRows = 4096;

constexpr std::int64_t kRequestAhead = 16 << 10, kMostRowsAhead = 32;
constexpr std::size_t kLine = 64, kHead = 4 * kLine;

// `count` rows of N bytes.
template <std::size_t N>
void copy_fixed(char* dst, const char* src, std::int64_t stride, std::int64_t count) noexcept {
  for (std::int64_t i = 0; i < count; ++i, dst += N, src += stride) std::memcpy(dst, src, N);
}

void copy_rows(char* dst, const char* src, std::int64_t row_bytes, std::int64_t stride, std::int64_t count) noexcept {
  switch (row_bytes) {
    case 1:
      return copy_fixed<1>(dst, src, stride, count);
    case 2:
      return copy_fixed<2>(dst, src, stride, count);
    case 4:
      return copy_fixed<4>(dst, src, stride, count);
    case 8:
      return copy_fixed<8>(dst, src, stride, count);
    case 16:
      return copy_fixed<16>(dst, src, stride, count);
    default:
      break;
  }
  // Rows apart begin on pages of their own: their first lines are requested early, as a gather does (gather_kernels.h).
  const auto n = static_cast<std::size_t>(row_bytes);
  const std::int64_t lead = std::clamp<std::int64_t>(kRequestAhead / row_bytes, 1, kMostRowsAhead);
  const std::size_t head = std::min<std::size_t>(n, kHead);
  for (; count > 0; --count, dst += n, src += stride) {
    if (count > lead) {
      for (std::size_t at = 0; at < head; at += kLine) __builtin_prefetch(src + lead * stride + at);
    }
    std::memcpy(dst, src, n);
  }
}

}  // namespace

bool plan_strided(const char* src, int src_ndim, const std::int64_t* src_shape, const std::int64_t* src_strides,
                  std::size_t itemsize, int ndim, const std::int64_t* shape, Strided* out) {
  const int missing = ndim - src_ndim;  // leading dimensions that the source repeats over
  if (missing < 0) return false;
  const auto item = static_cast<std::int64_t>(itemsize);
  *out = Strided{};
  out->src = src;
  for (int i = 0; i < ndim; ++i) {
    const std::int64_t have = i < missing ? 1 : src_shape[i - missing];
    if (have != shape[i] && have != 1) return false;
    if (shape[i] == 1) continue;
    const std::int64_t stride = have == 1 ? 0 : src_strides[i - missing] * item;
    const int last = out->ndim - 1;
    if (last >= 0 && out->stride[last] == stride * shape[i]) {  // merges with the one around it
      out->size[last] *= shape[i];
      out->stride[last] = stride;
    } else {
      out->size[out->ndim] = shape[i];
      out->stride[out->ndim++] = stride;
    }
  }
  out->row_bytes = item;
  if (out->ndim > 0 && out->stride[out->ndim - 1] == item) out->row_bytes *= out->size[--out->ndim];
  for (int i = 0; i < out->ndim; ++i) out->rows *= out->size[i];
  return true;
}

bool suits_rows(const Strided& source) noexcept { return source.row_bytes >= kShortRow || source.rows <= kFewRows; }

const char* row_of(const Strided& source, std::int64_t index) noexcept {
  const char* row = source.src;
  for (int i = source.ndim - 1; i >= 0; --i) {
    row += index % source.size[i] * source.stride[i];
    index /= source.size[i];
  }
  return row;
}

void copy_strided(char* dst, const Strided& source, std::int64_t begin, std::int64_t end) noexcept {
  const int inner = source.ndim - 1;
  if (begin >= end) return;
  if (inner < 0) {
    std::memcpy(dst, source.src, static_cast<std::size_t>(source.row_bytes));
    return;
  }
  // Where row `begin` lies.
  std::int64_t at[kMaxDims];
  const char* src = source.src;
  std::int64_t rest = begin;
  for (int i = inner; i >= 0; --i) {
    at[i] = rest % source.size[i];
    rest /= source.size[i];
    src += at[i] * source.stride[i];
  }
  while (begin < end) {
    const std::int64_t count = std::min(source.size[inner] - at[inner], end - begin);
    copy_rows(dst, src, source.row_bytes, source.stride[inner], count);
    dst += count * source.row_bytes;
    begin += count;
    // On to the next row but those: back to the start of the innermost dimension, one step in the ones around it.
    src -= at[inner] * source.stride[inner];
    at[inner] = 0;
    for (int i = inner - 1; i >= 0; --i) {
      src += source.stride[i];
      if (++at[i] < source.size[i]) break;
      src -= source.size[i] * source.stride[i];
      at[i] = 0;
    }
  }
}

}  // namespace pinstage
