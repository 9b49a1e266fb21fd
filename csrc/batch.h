// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// Many small snapshots as one: one slot, one fence and as few driver calls as the destinations allow.
//
//   pairs in list order      a0 a1 b0 c0 c1 c2 d0         dst of a0, a1 adjacent; c0, c1, c2 at one pitch
//   sorted by dst, merged   [a0 a1] [b0] [c0|c1|c2] [d0]
//   submitted                one kernel launch (scatter.h) or batch call for the dense ones, one 2-D copy for the rows
//
// The copies of either call have no order among themselves. Where two destinations overlap, the pairs are therefore
// copied one by one, in list order, so that the later one wins as it does in a loop.
#pragma once

#include <memory>
#include <vector>

#include "pool.h"

namespace pinstage {

// One pair: dense host memory at `src`, laid out as `plan` at `dst`.
struct BatchPiece {
  CopyPlan plan;
  DevicePtr dst;
  const char* src;
};

// The pairs of a batch whose destinations are on one device.
struct BatchPart {
  std::shared_ptr<Pool> pool;
  Stream stream;
  std::vector<BatchPiece> pieces;
};

// One driver copy: `count` pieces from the first one on, packed in the slot.
struct BatchCopy {
  CopyPlan plan;
  DevicePtr dst;
  std::size_t first, count;
  std::size_t offset;  // in the slot
};

// Where an allocation on the device begins and ends.
struct AllocationRange {
  DevicePtr begin = 0, end = 0;
  bool holds(DevicePtr p, std::size_t nbytes) const noexcept {
    return begin <= p && nbytes <= end - begin && p - begin <= end - begin - nbytes;
  }
};

// The copies for pieces that are sorted by destination and do not overlap. Pieces of two allocations are never merged,
// because a driver copy may not reach over an allocation's end. `range_of(context, p)` finds the one that holds p.
std::vector<BatchCopy> merge_pieces(const BatchPiece* pieces, std::size_t count,
                                    AllocationRange (*range_of)(const void* context, DevicePtr p), const void* context);

// Stages and enqueues every part. The sources may be written when it returns. Of several parts, none is begun while a
// stream of another is being captured. *begun is set once a copy may have been enqueued: an error after that, of the
// driver or from a full pool, leaves dsts written in part.
void stage_batch(std::vector<BatchPart>& parts, const Wait& wait, bool* begun);

}  // namespace pinstage
