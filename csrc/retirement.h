// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// Retirement: one fence per submission, a FIFO of fences per stream, only the oldest of each is ever polled.
//
//   submit ──▶ [ fence 7 | fence 6 | fence 5 ] ──▶ poll the head; when it passed, its slot has one fence less
//
// A fence is a recorded event. Events are recycled, so a fence is named by its cell and the cell's generation: once the
// generation moved on, that fence has passed, whatever the event is doing now. Stream handles are recycled too, so a
// passed fence proves nothing about an older one under the same handle (I4), unless the driver names the streams: of
// two fences with one cuStreamGetId, the one that was recorded first passes first. Threads that share a stream may push
// in another order than they recorded, so a fence answers only for those that were in the FIFO before it was recorded.
//
// When to poll. While a stream has work queued, each query that finds a fence passed costs 1.3 to 1.5 us, in vain 0.2
// us (H200, driver 580: benchmarks/results/event_query.json). So a caller who is not short of room lets fences come
// together and asks for a young one of them, which answers for the older ones of its stream.
//
// Nothing here locks or calls the driver: Device does both, and holds its mutex around every call.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "driver.h"

namespace pinstage {

struct Slot;

// An event and the number of fences it has been. Cells live as long as their Device.
struct FenceCell {
  Event event = nullptr;
  std::atomic<std::uint64_t> generation{0};
  // The device failed under this fence: it never passes, its event is never used again.
  std::atomic<Status> failure{status::kSuccess};
  std::uint32_t pins = 0;  // wait_on() calls under way: the event may not be recorded anew before they end
  bool passed = false;     // passed while pinned: recycled by the last unpin
};

struct Fence {
  FenceCell* cell;
  Slot* slot;                    // nullptr: nothing but a ticket waits on it
  unsigned long long stream_id;  // cuStreamGetId; 0 where the driver has none
  std::uint64_t behind;          // fences that had been pushed before this one was recorded
};

// Fences of one stream in submission order. A ring that grows to the peak in flight and then allocates no more (I7).
class Fifo {
 public:
  static constexpr std::uint64_t kBatch = 64;
  // Small slots come back while they are still in the writing core's cache: 16 KB copies cost 3.3 us when 256 KB of
  // them are in flight, 3.8 when 1 MB is. Slots past that size are not, and a query is saved (H200 host, 2 MB L2).
  static constexpr std::uint64_t kBatchBytes = 256 << 10, kManyBytes = 1 << 20, kFew = 4;

  bool empty() const noexcept { return submitted_ == completed_; }
  std::uint64_t size() const noexcept { return submitted_ - completed_; }
  std::uint64_t submitted() const noexcept { return submitted_; }
  std::uint64_t completed() const noexcept { return completed_; }
  // The i-th oldest fence.
  const Fence& at(std::uint64_t i) const noexcept { return ring_[(completed_ + i) & (ring_.size() - 1)]; }

  // Is a poll worth its cost to a caller who is not short of room? Once two batches of fences came together (the older
  // one has likely passed) or enough bytes did; after a poll in vain, when half a batch more did.
  // `batch` is kBatch, or 1 to reuse slots as early as can be.
  bool worth_polling(std::uint64_t batch) const noexcept {
    return size() >= 2 * batch - 1 ? submitted_ >= next_poll_
                                   : bytes_ >= (submitted_ - polled_at_ < kFew ? kManyBytes : kBatchBytes);
  }
  void polled(std::uint64_t batch) noexcept {
    polled_at_ = submitted_;
    next_poll_ = submitted_ + batch / 2;
    bytes_ = 0;
  }

  // Makes room for one more push, which then cannot fail: a fence that was recorded must not be lost to bad_alloc.
  void reserve_one() {
    // `reserved_` pushes are promised to other submissions under way.
    if (submitted_ - completed_ + reserved_ + 1 > ring_.size()) grow();
    ++reserved_;
  }
  void cancel_reservation() noexcept { --reserved_; }
  void push(Fence fence) noexcept {
    --reserved_;
    ring_[submitted_++ & (ring_.size() - 1)] = fence;
  }
  void count_bytes(std::uint64_t nbytes) noexcept { bytes_ += nbytes; }
  Fence pop() noexcept { return ring_[completed_++ & (ring_.size() - 1)]; }

 private:
  void grow() {
    std::vector<Fence> bigger(ring_.size() * 2);
    for (std::uint64_t i = completed_; i != submitted_; ++i) {
      bigger[i & (bigger.size() - 1)] = ring_[i & (ring_.size() - 1)];
    }
    ring_.swap(bigger);
  }

  std::vector<Fence> ring_{std::vector<Fence>(16)};  // size is a power of two
  std::uint64_t submitted_ = 0, completed_ = 0;      // completed_ <= submitted_, neither decreases (I4)
  std::uint64_t reserved_ = 0;
  std::uint64_t next_poll_ = 0;  // value of submitted_ from which on a poll is worth it
  std::uint64_t polled_at_ = 0;  // value of submitted_ at the last poll
  std::uint64_t bytes_ = 0;      // submitted since the last poll
};

class Retirement {
 public:
  // The FIFO of a stream; made on first use, never destroyed (as many as there were stream handles alive at once).
  Fifo& fifo(Stream stream) {
    if (last_ != nullptr && last_stream_ == stream) return *last_;
    std::unique_ptr<Fifo>& entry = by_stream_[stream];
    if (!entry) {
      entry = std::make_unique<Fifo>();
      try {
        order_.push_back(entry.get());
      } catch (...) {
        by_stream_.erase(stream);
        throw;
      }
    }
    last_stream_ = stream;
    last_ = entry.get();
    return *last_;
  }
  const std::vector<Fifo*>& fifos() const noexcept { return order_; }

  FenceCell* take_cell() noexcept {
    if (free_.empty()) return nullptr;
    FenceCell* cell = free_.back();
    free_.pop_back();
    return cell;
  }
  // Makes a free cell around a new event. Reserves the free list's room for it, so that give_cell cannot fail.
  void add_cell(Event event) {
    free_.reserve(cells_.size() + 1);
    FenceCell& cell = cells_.emplace_back();
    cell.event = event;
    free_.push_back(&cell);
  }
  // The cell's fence passed, or was never recorded.
  void give_cell(FenceCell* cell) noexcept {
    cell->generation.fetch_add(1, std::memory_order_release);
    if (cell->pins == 0) {
      free_.push_back(cell);
    } else {
      cell->passed = true;
    }
  }
  void pin(FenceCell* cell) noexcept { ++cell->pins; }
  void unpin(FenceCell* cell) noexcept {
    if (--cell->pins == 0 && cell->passed) {
      cell->passed = false;
      free_.push_back(cell);
    }
  }

  std::uint64_t events_created() const noexcept { return cells_.size(); }

 private:
  std::unordered_map<Stream, std::unique_ptr<Fifo>> by_stream_;
  std::vector<Fifo*> order_;
  Stream last_stream_ = nullptr;
  Fifo* last_ = nullptr;
  std::deque<FenceCell> cells_;
  std::vector<FenceCell*> free_;
};

}  // namespace pinstage
