// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include "bulk.h"

#include <algorithm>
#include <deque>
#include <string>

#include "team.h"

namespace pinstage {
namespace {

// A wait looks for Ctrl-C by itself, but a pipeline at full speed waits too briefly for that. Taking the GIL more often
// than every 256 MB could cost milliseconds each time, where other Python threads are busy.
constexpr std::size_t kPiecesPerSignalCheck = 32;
// The copy engine is idle until the first piece is written, by a team that is still waking up: the first goes in parts.
constexpr std::size_t kFirstPart = 1 << 20;

std::int64_t index_at(const Gather& g, std::int64_t i) noexcept {
  return g.index_is_64 ? static_cast<const std::int64_t*>(g.index)[i * g.index_stride]
                       : static_cast<const std::int32_t*>(g.index)[i * g.index_stride];
}

}  // namespace

void stage_in_pieces(Pool& pool, const CopyPlan& plan, DevicePtr dst, Stream stream, const Wait& wait, std::size_t most,
                     std::size_t grain, const PieceFill& fill) {
  const PlanPieces pieces(plan, most, grain);
  struct InFlight {
    Ticket ticket;
    std::size_t nbytes;
  };
  std::deque<InFlight> in_flight;
  std::size_t in_flight_bytes = 0, enqueued = 0;
  const auto stage = [&](const PlanPieces::Piece& piece) {
    const std::size_t nbytes = piece.plan.nbytes();
    while (!in_flight.empty() && in_flight_bytes + nbytes > kPiecesInFlight * most) {
      in_flight.front().ticket.wait(wait);
      in_flight_bytes -= in_flight.front().nbytes;
      in_flight.pop_front();
    }
    in_flight.push_back({Ticket{pool.shared_device()}, nbytes});
    pool.stage(
        nbytes, piece.plan, dst + static_cast<DevicePtr>(piece.dst_offset), stream, wait,
        [&](char* slot) { fill(slot, piece.begin, nbytes); }, &in_flight.back().ticket);
    in_flight_bytes += nbytes;
    enqueued += nbytes;
  };
  try {
    const PlanPieces::Piece first = pieces.at(0);
    const PlanPieces parts(first.plan, std::min(most, kFirstPart), grain);
    for (std::size_t i = 0; i < parts.count(); ++i) stage(parts.at(i));  // the first piece begins where the whole does
    for (std::size_t i = 1; i < pieces.count(); ++i) {
      if (i % kPiecesPerSignalCheck == 0 && wait.interrupted != nullptr && wait.interrupted()) throw Interrupted{};
      stage(pieces.at(i));
    }
  } catch (const Error& error) {
    if (enqueued == 0) throw;
    throw Error(error.kind(),
                std::string(error.what()) + ". Before this, " + std::to_string(enqueued) + " of " +
                    std::to_string(plan.nbytes()) +
                    " bytes were enqueued: dst holds a mixture of old and new bytes. Copy it again",
                error.status());
  }
}

void gather_part(const Gather& g, std::int64_t begin, std::int64_t end, char* dst) {
  const std::int64_t block = g.count * g.row_bytes;  // the rows of one outer index
  while (begin < end) {
    const std::int64_t outer = begin / block, row = begin % block / g.row_bytes, skip = begin % g.row_bytes;
    const char* const src = g.src + outer * g.src_outer_stride;
    Gather part = g;
    if (row == 0 && skip == 0 && end - begin >= block) {
      part.outer = (end - begin) / block;
    } else {
      part.outer = 1;
      part.count = skip == 0 ? std::min((end - begin) / g.row_bytes, g.count - row) : 0;
    }
    std::int64_t nbytes = part.outer * part.count * g.row_bytes;
    if (nbytes > 0) {
      part.src = src;
      part.index = static_cast<const char*>(g.index) + row * g.index_stride * (g.index_is_64 ? 8 : 4);
      part.dst = dst;
      part.dst_row_stride = g.row_bytes;
      part.dst_outer_stride = block;
      gather_in_parallel(part);
    } else {
      nbytes = std::min(end - begin, g.row_bytes - skip);
      copy_bytes_in_parallel(dst, src + index_at(g, row) * g.src_row_stride + skip, static_cast<std::size_t>(nbytes));
    }
    begin += nbytes;
    dst += nbytes;
  }
}

}  // namespace pinstage
