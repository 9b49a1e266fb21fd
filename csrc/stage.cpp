// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include "stage.h"

#include <algorithm>

#include "bulk.h"
#include "team.h"

namespace pinstage {
namespace {

constexpr std::size_t kPage = 4096;

// Through one slot, or piece by piece, cut at multiples of `grain` (bulk.h). `fill(slot, begin, nbytes, in_pieces)`
// writes that many of the dense bytes, from `begin` on.
template <class Fill>
void stage_all(Pool& pool, const CopyPlan& plan, DevicePtr dst, Stream stream, const Wait& wait, std::size_t grain,
               const Fill& fill, Ticket* ticket = nullptr) {
  const std::size_t nbytes = plan.nbytes(), piece = pool.piece_bytes(nbytes);
  if (piece == nbytes) {
    pool.stage(nbytes, plan, dst, stream, wait, [&](char* slot) { fill(slot, 0, nbytes, false); }, ticket);
    return;
  }
  stage_in_pieces(pool, plan, dst, stream, wait, piece, grain,
                  [&](char* slot, std::size_t begin, std::size_t n) { fill(slot, begin, n, true); });
  if (ticket != nullptr) *ticket = pool.device().fence(stream);
}

DevicePtr address(const TensorView& dst) { return reinterpret_cast<DevicePtr>(dst.data); }

// The bytes [begin, begin + nbytes) of what `source` is densely; they may begin and end in the middle of a row.
void copy_strided_part(char* dst, const Strided& source, std::size_t begin, std::size_t nbytes) {
  const auto row_bytes = static_cast<std::size_t>(source.row_bytes);
  const auto part_of_row = [&](std::size_t row, std::size_t from, std::size_t n) {
    copy_bytes_in_parallel(dst, row_of(source, static_cast<std::int64_t>(row)) + from, n, true);
    dst += n;
    begin += n;
    nbytes -= n;
  };
  if (begin % row_bytes != 0 || nbytes < row_bytes) {
    part_of_row(begin / row_bytes, begin % row_bytes, std::min(nbytes, row_bytes - begin % row_bytes));
  }
  const std::size_t first = begin / row_bytes, rows = nbytes / row_bytes;
  if (rows > 0) {
    copy_strided_in_parallel(dst, source, static_cast<std::int64_t>(first), static_cast<std::int64_t>(first + rows));
    dst += rows * row_bytes;
    nbytes -= rows * row_bytes;
  }
  if (nbytes > 0) part_of_row(first + rows, 0, nbytes);
}

}  // namespace

void stage_copy(Pool& pool, const CopyPlan& plan, const TensorView& dst, const TensorView& src, Stream stream,
                const Wait& wait) {
  stage_all(pool, plan, address(dst), stream, wait, kPage,
            [&](char* slot, std::size_t begin, std::size_t n, bool in_pieces) {
              copy_bytes_in_parallel(slot, src.data + begin, n, in_pieces);
            });
}

void stage_strided(Pool& pool, const CopyPlan& plan, const TensorView& dst, const Strided& source, Stream stream,
                   const Wait& wait) {
  stage_all(pool, plan, address(dst), stream, wait, static_cast<std::size_t>(source.row_bytes),
            [&](char* slot, std::size_t begin, std::size_t n, bool) { copy_strided_part(slot, source, begin, n); });
}

void stage_converted(Pool& pool, const CopyPlan& plan, const TensorView& dst, const TensorView& src, Conversion convert,
                     Stream stream, const Wait& wait) {
  const std::size_t to = dst.itemsize(), from = src.itemsize();
  stage_all(pool, plan, address(dst), stream, wait, to, [&](char* slot, std::size_t begin, std::size_t n, bool) {
    convert(slot, src.data + begin / to * from, static_cast<std::int64_t>(n / to));
  });
}

void stage_rows(Pool& pool, const CopyPlan& plan, DevicePtr dst, Gather rows, Stream stream, const Wait& wait,
                Ticket* ticket) {
  stage_all(
      pool, plan, dst, stream, wait, static_cast<std::size_t>(rows.row_bytes),
      [&](char* slot, std::size_t begin, std::size_t n, bool in_pieces) {
        rows.cached = in_pieces && Team::instance().threads() > 1;
        gather_part(rows, static_cast<std::int64_t>(begin), static_cast<std::int64_t>(begin + n), slot);
      },
      ticket);
}

void stage_segments(Pool& pool, const CopyPlan& plan, char* dst, const std::vector<Segment>& segments, Stream stream,
                    const Wait& wait) {
  stage_all(pool, plan, reinterpret_cast<DevicePtr>(dst), stream, wait, kPage,
            [&](char* slot, std::size_t begin, std::size_t n, bool) {
              copy_segments_in_parallel(slot, segments.data(), segments.size(), begin, begin + n);
            });
}

TensorView narrow(const TensorView& dst, int dim, std::int64_t count) {
  TensorView view = dst;
  view.shape[dim] = count;
  return view;
}

bool plan_gather(const TensorView& src, int dim, const TensorView& index, Gather* out) {
  const auto itemsize = static_cast<std::int64_t>(src.itemsize());
  std::int64_t row = 1;  // elements of one row, which must lie densely
  for (int i = src.ndim - 1; i > dim; --i) {
    if (src.shape[i] == 1) continue;
    if (src.strides[i] != row) return false;
    row *= src.shape[i];
  }
  std::int64_t outer = 1, outer_stride = 0;  // dimensions before `dim`, which must lie at one stride
  for (int i = dim - 1; i >= 0; --i) {
    if (src.shape[i] == 1) continue;
    if (outer == 1) {
      outer_stride = src.strides[i];
    } else if (src.strides[i] != outer_stride * outer) {
      return false;
    }
    outer *= src.shape[i];
  }
  *out = Gather{};
  out->src = src.data;
  out->src_rows = src.shape[dim];
  out->src_row_stride = src.strides[dim] * itemsize;
  out->src_outer_stride = outer_stride * itemsize;
  out->outer = outer;
  out->row_bytes = row * itemsize;
  out->index = index.data;
  out->index_stride = index.strides[0];
  out->index_is_64 = index.dtype.bits == 64;
  out->count = index.shape[0];
  out->dst_row_stride = out->row_bytes;
  out->dst_outer_stride = out->row_bytes * out->count;
  return true;
}

}  // namespace pinstage
