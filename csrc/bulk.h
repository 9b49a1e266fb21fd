// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// Bulk: a snapshot too large for one slot goes through a pipeline of pieces.
//
//   the team     writes piece i+1 ─────▶ writes piece i+2 ─────▶ ...
//   copy engine  reads piece i ────────▶ reads piece i+1 ──────▶ ...
//
// Each piece has its slot and its fence, as a snapshot of its own has; a slot is used again by its fence alone. The
// bytes of kPiecesInFlight pieces of one snapshot may be in flight: then the call waits for its own oldest piece, so
// that neither the pool grows with the source, nor is it drained of room for others. A call that waits holds no slot
// that is not in flight, so that callers which share a small pool cannot block one another.
//
// Pieces are written by plain stores where several threads write: the copy engine then finds them in the cache, and
// non-temporal stores lowered the rate of the pipeline from 51 to 38-42 GB/s (H200, 8 workers). One thread alone is
// slower than the copy engine, and writes as is fastest for it.
#pragma once

#include <cstdint>
#include <functional>

#include "gather.h"
#include "pool.h"

namespace pinstage {

// Writes `nbytes` of the snapshot's dense bytes, from `begin` on, into a slot.
using PieceFill = std::function<void(char* slot, std::size_t begin, std::size_t nbytes)>;

// dst (laid out as `plan`) <- what `fill` writes, in pieces of at most `most` bytes, cut at multiples of `grain` where
// that can be; the first in parts of its own, so that the device can begin early. When an Error or Interrupted is
// thrown after the first piece, what was enqueued is fenced, dst holds a mixture of old and new bytes, and an Error
// says so.
void stage_in_pieces(Pool& pool, const CopyPlan& plan, DevicePtr dst, Stream stream, const Wait& wait, std::size_t most,
                     std::size_t grain, const PieceFill& fill);

// The bytes [begin, end) of what `g` would write densely, into `dst`; its own destination is not used. They may begin
// and end in the middle of a row.
void gather_part(const Gather& g, std::int64_t begin, std::int64_t end, char* dst);

}  // namespace pinstage
