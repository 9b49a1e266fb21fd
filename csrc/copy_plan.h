// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// How the dense bytes of a slot travel to a strided destination: as one 1-D, 2-D or 3-D copy, or as a few of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "driver.h"

namespace pinstage {

inline constexpr int kMaxDims = 8;  // tensors of more dimensions take the general path

// CU_DEVICE_ATTRIBUTE_MAX_PITCH of every GPU so far.
inline constexpr std::size_t kMaxPitch = (std::size_t{1} << 31) - 1;

struct CopyPlan {
  // The slot's bytes, densely: depth slices of height rows of width bytes, repeated over `repeats` outer steps.
  std::size_t width = 0, height = 1, depth = 1;
  std::size_t pitch = 0;       // bytes between rows at the destination (height > 1 or depth > 1)
  std::size_t slice_rows = 0;  // rows between slices at the destination (depth > 1)
  std::size_t repeats = 1;     // outer steps, each a copy of its own
  std::int64_t repeat_stride = 0;

  std::size_t nbytes() const noexcept { return width * height * depth * repeats; }
  bool dense() const noexcept { return height == 1 && depth == 1 && repeats == 1; }
  // Bytes at the destination from the first to the last, those in between that are not written included.
  std::size_t span() const noexcept {
    return (repeats - 1) * static_cast<std::size_t>(repeat_stride) + ((depth - 1) * slice_rows + height - 1) * pitch +
           width;
  }
};

// The plan for a destination of `ndim` dimensions (strides in elements), or false when the copy engine cannot do it
// well: a stride of 0 (overlap), innermost elements apart, rows too short, too many outer steps, a pitch past the
// hardware's.
bool plan_copy(int ndim, const std::int64_t* shape, const std::int64_t* strides, std::size_t itemsize, CopyPlan* plan);

// A plan cut into plans of at most `most` bytes, in the order of the slot's dense bytes: along the outermost extent of
// which one step fits, in even parts. Runs of bytes are cut at multiples of `grain`, where that many fit.
class PlanPieces {
 public:
  PlanPieces(const CopyPlan& whole, std::size_t most, std::size_t grain) noexcept;

  struct Piece {
    CopyPlan plan;
    std::size_t begin;        // of its bytes among the dense ones
    std::int64_t dst_offset;  // of its first byte from that of the whole
  };
  std::size_t count() const noexcept { return outer_ * parts_; }
  Piece at(std::size_t i) const noexcept;

 private:
  static constexpr int kLevels = 4;  // repeats, depth, height, width

  CopyPlan whole_;
  std::size_t extent_[kLevels], nbytes_[kLevels];  // steps of a level, dense bytes of one
  std::int64_t stride_[kLevels];                   // bytes between steps at the destination
  int level_ = 0;                                  // the one that is cut
  std::size_t step_, parts_;                       // its steps in a piece, its pieces
  std::size_t outer_ = 1;                          // steps of the levels above, together
};

// Enqueues the plan. *enqueued counts the copies that the driver took, also when a later one failed.
Status enqueue_copy(const Driver& driver, const CopyPlan& plan, DevicePtr dst, const char* src, Stream stream,
                    std::size_t* enqueued, const char** call) noexcept;

}  // namespace pinstage
