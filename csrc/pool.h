// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// The staging pool: slabs of pinned memory, slots cut from them, and the states a slot goes through.
//
//            take            submit / retire + hand over          last fence passed
//     FREE ────────▶ OPEN ──────────────────────────────▶ IN_FLIGHT ────────────────▶ FREE
//                     │ cancel ─▶ FREE                        │ a tensor over it lives ─▶ HELD ─▶ FREE
//                     └ handed over undeclared ─▶ PARKED      └ no fence could be had  ─▶ QUARANTINED (for good)
//
// All state changes happen under Device::mutex(); memory is allocated and freed outside it.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "copy_plan.h"
#include "device.h"
#include "offsets.h"
#include "slab_memory.h"

namespace pinstage {

class Pool;

enum class SlotState : std::uint8_t { kFree, kOpen, kInFlight, kHeld, kParked, kCaptured, kQuarantined };
inline constexpr int kSlotStates = 7;

struct Slot;

struct Slab {
  Slab(const SlabMemory& slab_memory) : memory(slab_memory), offsets(slab_memory.nbytes) {}
  SlabMemory memory;
  Offsets offsets;
};

// Free slots that keep their bytes for the next request of the same size, the last to come back first: a steady state
// repeats its sizes, and then neither the offsets nor the slot need to be worked out anew. They are given back to
// their slabs before anything is refused or grown for want of room.
class RecentSlots {
 public:
  // Null: none of exactly `nbytes`.
  Slot* take(std::uint64_t nbytes) noexcept;
  // False: no place for it.
  bool keep(Slot* slot) noexcept;
  // Removes and returns any one, null when empty.
  Slot* pop() noexcept;
  // Where the slot lies that take() would return, or null.
  const char* next(std::uint64_t nbytes) const noexcept;
  bool empty() const noexcept { return count_ == 0; }

 private:
  static constexpr std::size_t kBins = 16, kDepth = Fifo::kBatch;
  struct Bin {
    std::array<Slot*, kDepth> slots;
    std::size_t count = 0;
  };
  static std::size_t bin_of(std::uint64_t nbytes) noexcept {
    return nbytes / Offsets::kGranule * 0x9E3779B97F4A7C15u >> 60;
  }

  std::array<Bin, kBins> bins_;
  std::size_t count_ = 0;
};

struct Slot {
  Pool* pool = nullptr;
  Slab* slab = nullptr;
  Offsets::Block block = 0;
  char* data = nullptr;
  std::uint64_t nbytes = 0;  // reserved: the request rounded up to 256 (I3)
  SlotState state = SlotState::kFree;
  bool handed_over = false;      // nobody writes it any more
  std::uint32_t declared = 0;    // copies and retires that cover its readers
  bool owned = false;            // DoubleBuffer and its like: reused in place by its owner, by fence alone
  Status unfenced = 0;           // why work that reads it has no fence: then quarantined when it is handed over
  std::uint32_t pending = 0;     // fences that have not passed
  std::uint32_t tensors = 0;     // exported tensors that live
  const void* thread = nullptr;  // who took it
  std::uint64_t lease = 0;       // number of the take, never repeated: a stale LeaseRef finds another one here
};

// The caller's hold on a slot it took. Any use after the hand-over is an error, never an access to somebody else's
// slot.
struct LeaseRef {
  std::shared_ptr<Pool> pool;
  Slot* slot = nullptr;
  std::uint64_t lease = 0;
};

// The largest pieces of a bulk snapshot, and how many of them it has in flight at most. An H200 took 51 GB/s of
// pageable memory through 4 x 8 MB, 0.92 of what it takes of pinned memory.
inline constexpr std::uint64_t kPieceBytes = 8 << 20;
inline constexpr std::uint64_t kPiecesInFlight = 4;
inline constexpr std::uint64_t kPieceGrain = 64 << 10;

// A slot that the device has read lies no longer where it is quick to write, so the lines of the next small snapshot's
// slot are requested ahead: 0.64-0.67 of a bare copy became 0.61-0.62 at 4 KB, 0.81-0.83 became 0.79 at 16 KB (H200).
inline constexpr std::uint64_t kRequested = 16 << 10;

struct PoolStats {
  std::uint64_t capacity = 0, high_water = 0, slabs = 0, host_allocations = 0, events_created = 0, copies = 0,
                waits = 0;
  std::uint64_t bytes[kSlotStates] = {};
  double wait_seconds = 0;
  bool pageable = false;
};

struct PoolOptions {
  std::uint64_t initial_bytes = 0, max_bytes = 0;
  bool wait_when_full = true;
  bool warn_on_wait = false;  // nobody chose max_bytes: the first wait for it is worth a warning
  bool pageable = false;
};

class Pool : public std::enable_shared_from_this<Pool> {
 public:
  static std::shared_ptr<Pool> make(std::shared_ptr<Device> device, const PoolOptions& options);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  Device& device() const noexcept { return *device_; }
  const std::shared_ptr<Device>& shared_device() const noexcept { return device_; }
  const PoolOptions& options() const noexcept { return options_; }
  // Memory that is allocated from now on is not pinned: by choice, or because the driver refused to.
  bool pageable() const noexcept {
    return options_.pageable || device_->pinning_refused.load(std::memory_order_relaxed) != status::kSuccess;
  }

  // --- a lease: taken, then handed over or cancelled. After that each of these throws Error(kLeaseState). ---

  // An OPEN slot of nbytes. `block` false: an empty LeaseRef instead of waiting (growing is allowed).
  // Throws Error(kPoolExhausted): larger than max_bytes, timeout, when_full = raise, or a wait that could not end (I6).
  LeaseRef take(std::uint64_t nbytes, const Wait& wait, bool block = true, bool owned = false);
  // Copies the slot's first plan.nbytes() bytes to dst on `stream` and fences it, as one act.
  Ticket submit(const LeaseRef& lease, const CopyPlan& plan, DevicePtr dst, Stream stream);
  // A fence on what is enqueued on `stream` so far, for readers that the caller launched.
  Ticket retire(const LeaseRef& lease, Stream stream);
  // Returns false when nothing was declared: the slot is then PARKED.
  bool hand_over(const LeaseRef& lease);
  void cancel(const LeaseRef& lease);
  // Owned slots: until every fence over the slot passed.
  void wait_reusable(const LeaseRef& lease, const Wait& wait);
  bool is_open(const LeaseRef& lease);
  bool declared(const LeaseRef& lease);  // open, and a copy or a retire covers its readers
  char* data(const LeaseRef& lease);
  DevicePtr device_address(const LeaseRef& lease);  // the same bytes as kernels on the device address them
  void tensor_born(const LeaseRef& lease);
  void tensor_died(Slot* slot) noexcept;  // any thread, with or without the GIL; never calls the driver

  // --- a snapshot: one call, `fill` writes the slot before the copy is enqueued. ---
  template <class Fill>
  void stage(std::uint64_t nbytes, const CopyPlan& plan, DevicePtr dst, Stream stream, const Wait& wait, Fill&& fill,
             Ticket* ticket = nullptr);
  // The same for bytes that go to several places. `enqueue(slot, &enqueued, &call)` throws nothing; it returns the
  // status of the first copy that the driver refused, and counts those that it took.
  template <class Fill, class Enqueue>
  void stage_several(std::uint64_t nbytes, Stream stream, const Wait& wait, Fill&& fill, Enqueue&& enqueue,
                     Ticket* ticket = nullptr);
  // Bytes of the slots that a snapshot of `nbytes` goes through: as many, or less where it goes in pieces (bulk.h).
  std::uint64_t piece_bytes(std::uint64_t nbytes) const noexcept;
  std::uint64_t most_piece_bytes = kPieceBytes;  // set before the pool is used; for tests and measurements

  // --- maintenance ---
  std::uint64_t reclaim(bool synchronize, const Wait& wait);  // bytes that became free
  std::uint64_t trim();                                       // frees whole slabs; bytes unpinned
  void reserve(std::uint64_t nbytes);                         // capacity of at least nbytes
  void close(const Wait& wait);
  void abandon() noexcept;  // the last owner is gone: close without waiting
  PoolStats stats();
  bool take_wait_notice() noexcept {  // looks first: an exchange is a write, even of what is there
    return wait_notice_.load(std::memory_order_relaxed) && wait_notice_.exchange(false, std::memory_order_relaxed);
  }
  // Walks everything: I1, I2 and the counters.
  bool consistent();

  // --- called by Device, with the mutex held ---
  void fence_passed(Slot* slot) noexcept;
  void fence_failed(Slot* slot, Status status) noexcept;
  bool drained() const noexcept;  // closed, and no fence is pending
  bool has_slabs() const noexcept { return !slabs_.empty(); }
  void discard_empty_slabs() noexcept;

 private:
  Pool(std::shared_ptr<Device> device, PoolOptions options);

  struct Prepared {
    Slot* slot;
    Device::Reserved reserved;
    const char* next;  // where the slot of the next snapshot of this size may be, or null
  };
  Prepared begin(std::uint64_t nbytes, Stream stream, const Wait& wait);
  void finish(const Prepared& prepared, Stream stream, Status copied, std::size_t enqueued, const char* call,
              Ticket* ticket);
  void undo(const Prepared& prepared) noexcept;
  Device::Reserved begin_fence(const LeaseRef& lease, Stream stream, bool copy);
  Slot* open(const LeaseRef& lease) const;
  Status fence_copies(Slot* slot, Device::Reserved reserved, Stream stream, Status copied, std::size_t enqueued,
                      Ticket* ticket, const char** call) noexcept;

  Slot* place(std::uint64_t nbytes, bool owned);
  Slot* take_slowly(std::uint64_t nbytes, const Wait& wait, bool block, bool owned);
  std::uint64_t slab_size(std::uint64_t nbytes, std::uint64_t capacity) const noexcept;
  Status allocate(std::uint64_t nbytes, std::uint64_t capacity, SlabMemory* out);
  bool grow(std::uint64_t nbytes);
  void add_slab(const SlabMemory& memory, Status status, std::uint64_t capacity);
  std::uint64_t free_empty_slabs(std::uint64_t enough);
  void require_open() const;
  bool only_this_thread_can_help() const noexcept;
  [[noreturn]] void exhausted(std::uint64_t nbytes, const std::string& why);
  std::uint64_t free_parked();
  void wait_for_fences(const Wait& wait);

  void set_state(Slot* slot, SlotState state) noexcept;
  void settle(Slot* slot) noexcept;
  void free_slot(Slot* slot) noexcept;
  void give_back(Slot* slot) noexcept;
  bool give_recent_back() noexcept;
  Slot* cut(std::uint64_t nbytes);

  const std::shared_ptr<Device> device_;
  const PoolOptions options_;

  std::mutex growth_;  // one thread grows or trims at a time; taken before the device's mutex, never with the GIL
  bool may_register_ = true;  // guarded by growth_

  // Guarded by device_->mutex():
  std::vector<std::unique_ptr<Slab>> slabs_;
  std::deque<Slot> slots_;
  std::vector<Slot*> spare_slots_;  // without bytes
  RecentSlots recent_;
  PoolStats stats_;
  std::uint64_t pending_ = 0;  // fences over slots of this pool
  std::uint64_t leases_ = 0;
  std::uint64_t changes_ = 0;          // slots that became free, slabs that came or went
  Status failure_ = status::kSuccess;  // why the last slot was quarantined
  bool closed_ = false;

  std::atomic<bool> wait_notice_{false};
};

template <class Fill>
void Pool::stage(std::uint64_t nbytes, const CopyPlan& plan, DevicePtr dst, Stream stream, const Wait& wait,
                 Fill&& fill, Ticket* ticket) {
  stage_several(
      nbytes, stream, wait, fill,
      [&](const char* slot, std::size_t* enqueued, const char** call) {
        return enqueue_copy(device_->driver(), plan, dst, slot, stream, enqueued, call);
      },
      ticket);
}

template <class Fill, class Enqueue>
void Pool::stage_several(std::uint64_t nbytes, Stream stream, const Wait& wait, Fill&& fill, Enqueue&& enqueue,
                         Ticket* ticket) {
  device_->require_usable();
  Device::Current current(*device_);
  device_->require_not_capturing(stream);
  const Prepared prepared = begin(nbytes, stream, wait);
  try {
    fill(prepared.slot->data);
  } catch (...) {
    undo(prepared);
    throw;
  }
  std::size_t enqueued = 0;
  const char* call = "";
  const Status copied = enqueue(prepared.slot->data, &enqueued, &call);
  finish(prepared, stream, copied, enqueued, call, ticket);
  if (prepared.next != nullptr && nbytes <= kRequested) {
    for (std::size_t at = 0; at < nbytes; at += 64) __builtin_prefetch(prepared.next + at, 1);
  }
}

}  // namespace pinstage
