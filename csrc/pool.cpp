// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include "pool.h"

#include <algorithm>
#include <new>

namespace pinstage {
namespace {

using Lock = std::unique_lock<std::mutex>;
using Guard = std::lock_guard<std::mutex>;

const void* this_thread() noexcept {
  static thread_local const char tag = 0;
  return &tag;
}

}  // namespace

std::shared_ptr<Pool> Pool::make(std::shared_ptr<Device> device, const PoolOptions& options) {
  device->sweep();
  std::shared_ptr<Pool> pool(new Pool(std::move(device), options));
  pool->device_->adopt(pool);
  return pool;
}

Pool::Pool(std::shared_ptr<Device> device, PoolOptions options)
    : device_(std::move(device)), options_([&options] {
        options.max_bytes &= ~(Offsets::kGranule - 1);
        return options;
      }()) {}

// No lease and no tensor is left. What is still taken is PARKED or QUARANTINED: someone may read it, so it is leaked.
Pool::~Pool() {
  if (!device_->usable()) return;
  const Guard lock(device_->mutex());
  discard_empty_slabs();
}

// --- taking a slot ---

LeaseRef Pool::take(std::uint64_t nbytes, const Wait& wait, bool block, bool owned) {
  device_->require_usable();
  const Device::Current current(*device_);
  Slot* slot;
  {
    Lock lock(device_->mutex());
    device_->poll_some(lock);
    slot = place(nbytes, owned);
  }
  if (slot == nullptr) slot = take_slowly(nbytes, wait, block, owned);
  if (slot == nullptr) return {};
  return {shared_from_this(), slot, slot->lease};
}

Slot* Pool::place(std::uint64_t nbytes, bool owned) {
  require_open();
  if (nbytes > options_.max_bytes) return nullptr;
  const std::uint64_t reserved = Offsets::round_up(nbytes);
  Slot* slot = recent_.take(reserved);
  if (slot == nullptr) {
    slot = cut(reserved);
    if (slot == nullptr && give_recent_back()) slot = cut(reserved);
    if (slot == nullptr) return nullptr;
  }
  slot->handed_over = false;
  slot->declared = 0;
  slot->owned = owned;
  slot->unfenced = status::kSuccess;
  slot->thread = this_thread();
  slot->lease = ++leases_;
  set_state(slot, SlotState::kOpen);
  stats_.high_water = std::max(stats_.high_water, stats_.capacity - stats_.bytes[int(SlotState::kFree)]);
  return slot;
}

// A free slot of `nbytes`, a multiple of the granule, from the first slab that has room.
Slot* Pool::cut(std::uint64_t nbytes) {
  for (const std::unique_ptr<Slab>& slab : slabs_) {
    if (spare_slots_.empty()) {
      spare_slots_.reserve(slots_.size() + 1);  // so that give_back() cannot fail
      spare_slots_.push_back(&slots_.emplace_back());
    }
    const Offsets::Taken taken = slab->offsets.take(nbytes);
    if (taken.offset == Offsets::kNone) continue;
    Slot* slot = spare_slots_.back();
    spare_slots_.pop_back();
    slot->pool = this;
    slot->slab = slab.get();
    slot->block = taken.block;
    slot->data = slab->memory.data + taken.offset;
    slot->nbytes = nbytes;
    return slot;
  }
  return nullptr;
}

Slot* Pool::take_slowly(std::uint64_t nbytes, const Wait& wait, bool block, bool owned) {
  if (Offsets::round_up(nbytes) > options_.max_bytes) {
    const Guard lock(device_->mutex());
    exhausted(nbytes, "it is larger than max_bytes");
  }
  Waiter waiter(*device_, wait);
  bool waited = false;
  std::uint64_t last_change = 0;
  const auto count_wait = [&] {
    if (waited) stats_.wait_seconds += waiter.seconds();
  };
  for (;;) {
    const bool progress = device_->poll_all();
    std::uint64_t seen;
    {
      const Guard lock(device_->mutex());
      if (Slot* slot = place(nbytes, owned)) {
        count_wait();
        return slot;
      }
      seen = changes_;
    }
    if (grow(nbytes)) continue;
    if (!block) return nullptr;
    bool queued_work, moved;
    {
      const Guard lock(device_->mutex());
      if (!options_.wait_when_full) exhausted(nbytes, "when_full is \"raise\"");
      queued_work = pending_ > 0;
      // What changed since we looked may have left the room that we want, with nothing in flight or open any more.
      if (!queued_work && changes_ == seen && only_this_thread_can_help()) {
        count_wait();
        exhausted(nbytes, "nothing is in flight, so waiting could not help");
      }
      moved = changes_ != last_change;
      last_change = changes_;
      if (!waited) {
        ++stats_.waits;
        waited = true;
        if (options_.warn_on_wait && stats_.waits == 1) wait_notice_.store(true, std::memory_order_relaxed);
      }
    }
    // While other threads have their turns, a device that has nothing to run is not stuck.
    if (!progress && !waiter.pause(queued_work && !moved)) {
      const Guard lock(device_->mutex());
      count_wait();
      exhausted(nbytes, "the timeout of " + std::to_string(wait.timeout_seconds) + " s passed");
    }
  }
}

// Another thread's OPEN or HELD slot may yet come back; an owned one stays with its owner.
bool Pool::only_this_thread_can_help() const noexcept {
  return std::none_of(slots_.begin(), slots_.end(), [](const Slot& slot) {
    return (slot.state == SlotState::kOpen || slot.state == SlotState::kHeld) && !slot.owned &&
           slot.thread != this_thread();
  });
}

void Pool::exhausted(std::uint64_t nbytes, const std::string& why) {
  const auto bytes = [this](SlotState state) { return std::to_string(stats_.bytes[int(state)]); };
  const bool would_fit = Offsets::round_up(nbytes) <= options_.max_bytes;
  if (would_fit && stats_.bytes[int(SlotState::kQuarantined)] > 0 && is_fatal(failure_)) {
    throw Error(ErrorKind::kDriver,
                "no room for " + std::to_string(nbytes) + " bytes in the staging pool of " + device_->name() +
                    ": the device failed under " + bytes(SlotState::kQuarantined) + " bytes of it (status " +
                    std::to_string(failure_) + "). " + remedy(failure_),
                failure_);
  }
  throw Error(ErrorKind::kPoolExhausted,
              "no room for " + std::to_string(nbytes) + " bytes in the staging pool of " + device_->name() + ": " +
                  why + ". max_bytes " + std::to_string(options_.max_bytes) + ", capacity " +
                  std::to_string(stats_.capacity) + ", of which open " + bytes(SlotState::kOpen) + ", in flight " +
                  bytes(SlotState::kInFlight) + ", held by living tensors " + bytes(SlotState::kHeld) + ", parked " +
                  bytes(SlotState::kParked) + ", captured " + bytes(SlotState::kCaptured) + ", quarantined " +
                  bytes(SlotState::kQuarantined) + ", free " + bytes(SlotState::kFree) +
                  ". Raise max_bytes, hand leases over sooner, or drop tensors that still view handed-over slots");
}

void Pool::require_open() const {
  if (closed_) {
    throw Error(ErrorKind::kLeaseState, "the staging pool of " + device_->name() + " is closed; make a new one");
  }
}

// --- states ---

void Pool::tensor_born(const LeaseRef& lease) {
  const Lock lock = device_->lock();
  ++open(lease)->tensors;
}

void Pool::tensor_died(Slot* slot) noexcept {
  if (!device_->usable()) return;
  const Guard lock(device_->mutex());
  --slot->tensors;
  settle(slot);
}

void Pool::fence_passed(Slot* slot) noexcept {
  --slot->pending;
  --pending_;
  settle(slot);
}

void Pool::fence_failed(Slot* slot, Status status) noexcept {
  slot->unfenced = failure_ = status;
  fence_passed(slot);
}

// Moves a slot to the state that its facts call for. The only place where a slot becomes free (I5).
void Pool::settle(Slot* slot) noexcept {
  if (!slot->handed_over) {
    if (slot->owned) set_state(slot, slot->pending > 0 ? SlotState::kInFlight : SlotState::kOpen);
  } else if (slot->unfenced != status::kSuccess) {
    set_state(slot, SlotState::kQuarantined);
  } else if (slot->declared == 0) {
    set_state(slot, SlotState::kParked);
  } else if (slot->pending > 0) {
    set_state(slot, SlotState::kInFlight);
  } else if (slot->tensors > 0) {
    set_state(slot, SlotState::kHeld);
  } else {
    free_slot(slot);
  }
}

void Pool::set_state(Slot* slot, SlotState state) noexcept {
  stats_.bytes[int(slot->state)] -= slot->nbytes;
  stats_.bytes[int(state)] += slot->nbytes;
  slot->state = state;
}

void Pool::free_slot(Slot* slot) noexcept {
  set_state(slot, SlotState::kFree);
  ++changes_;
  slot->lease = 0;
  if (!recent_.keep(slot)) give_back(slot);
}

void Pool::give_back(Slot* slot) noexcept {
  slot->slab->offsets.give(slot->block);
  slot->nbytes = 0;
  spare_slots_.push_back(slot);
}

bool Pool::give_recent_back() noexcept {
  if (recent_.empty()) return false;
  while (Slot* slot = recent_.pop()) give_back(slot);
  return true;
}

Slot* RecentSlots::take(std::uint64_t nbytes) noexcept {
  Bin& bin = bins_[bin_of(nbytes)];
  if (bin.count == 0 || bin.slots[bin.count - 1]->nbytes != nbytes) return nullptr;
  --count_;
  return bin.slots[--bin.count];
}

const char* RecentSlots::next(std::uint64_t nbytes) const noexcept {
  const Bin& bin = bins_[bin_of(nbytes)];
  return bin.count == 0 || bin.slots[bin.count - 1]->nbytes != nbytes ? nullptr : bin.slots[bin.count - 1]->data;
}

bool RecentSlots::keep(Slot* slot) noexcept {
  Bin& bin = bins_[bin_of(slot->nbytes)];
  if (bin.count == kDepth) return false;
  bin.slots[bin.count++] = slot;
  ++count_;
  return true;
}

Slot* RecentSlots::pop() noexcept {
  for (Bin& bin : bins_) {
    if (bin.count == 0) continue;
    --count_;
    return bin.slots[--bin.count];
  }
  return nullptr;
}

std::uint64_t Pool::piece_bytes(std::uint64_t nbytes) const noexcept {
  // A pool that raises when it is full never waits, and takes a snapshot whole or not at all.
  if (nbytes <= std::min(most_piece_bytes, options_.max_bytes) || !options_.wait_when_full) return nbytes;
  const std::uint64_t of_pool =
      std::max(options_.max_bytes / kPiecesInFlight & ~(Offsets::kGranule - 1), Offsets::kGranule);
  // The device waits for the first piece to be written, so a source of a few large pieces goes in smaller ones: a
  // quarter, and thus all of it in flight at once, up to a multiple that suits every way to cut it.
  const std::uint64_t of_source = (nbytes / kPiecesInFlight | (kPieceGrain - 1)) + 1;
  return std::min({most_piece_bytes, of_pool, of_source});
}

// --- maintenance ---

// Synchronizes the context, then frees the slots that were PARKED before: whoever read them has ended. growth_ is held.
std::uint64_t Pool::free_parked() {
  std::vector<Slot*> parked;
  {
    const Guard lock(device_->mutex());
    for (Slot& slot : slots_) {
      if (slot.state == SlotState::kParked) parked.push_back(&slot);
    }
  }
  {
    const Device::Relaxed relaxed(*device_);
    device_->check(device_->driver().ctx_synchronize(), "cuCtxSynchronize");
  }
  const Guard lock(device_->mutex());
  for (Slot* slot : parked) {
    slot->declared = 1;
    settle(slot);
  }
  return parked.size();
}

std::uint64_t Pool::reclaim(bool synchronize, const Wait& wait) {
  device_->require_usable();
  const Device::Current current(*device_);
  const auto bytes = [this](SlotState state) {
    const Guard lock(device_->mutex());
    return stats_.bytes[int(state)];
  };
  const std::uint64_t before = bytes(SlotState::kFree);
  device_->poll_all();
  if (synchronize) {
    wait_for_fences(wait);
    if (bytes(SlotState::kParked) > 0) {
      const Guard growing(growth_);
      free_parked();
    }
  }
  device_->sweep();
  const std::uint64_t after = bytes(SlotState::kFree);
  return after > before ? after - before : 0;
}

// By polling, so that Ctrl-C gets through. Throws Error when the device says that nothing can ever run.
void Pool::wait_for_fences(const Wait& wait) {
  Waiter waiter(*device_, wait);
  for (;;) {
    const bool progress = device_->poll_all();
    {
      const Guard lock(device_->mutex());
      if (pending_ == 0) return;
    }
    if (!progress && !waiter.pause(true)) return;
  }
}

void Pool::close(const Wait& wait) {
  {
    const Lock lock = device_->lock();
    closed_ = true;
  }
  if (!device_->usable()) return;
  const Device::Current current(*device_);
  wait_for_fences(wait);
  trim();
}

void Pool::abandon() noexcept {
  if (!device_->usable()) return;
  const Guard lock(device_->mutex());
  closed_ = true;
}

bool Pool::drained() const noexcept { return closed_ && pending_ == 0; }

PoolStats Pool::stats() {
  const Lock lock = device_->lock();
  PoolStats stats = stats_;
  stats.slabs = slabs_.size();
  stats.pageable = pageable();
  stats.events_created = device_->retirement().events_created();
  return stats;
}

bool Pool::consistent() {
  const Lock lock = device_->lock();
  std::uint64_t bytes[kSlotStates] = {};
  std::uint64_t capacity = 0, pending = 0;
  for (const std::unique_ptr<Slab>& slab : slabs_) {
    if (!slab->offsets.consistent()) return false;
    capacity += slab->memory.nbytes;
    bytes[int(SlotState::kFree)] += slab->offsets.free_bytes();
  }
  for (const Slot& slot : slots_) {
    if (slot.state == SlotState::kFree) bytes[int(SlotState::kFree)] += slot.nbytes;  // a recent one
  }
  std::vector<const Slot*> taken;
  for (const Slot& slot : slots_) {
    pending += slot.pending;
    if (slot.state == SlotState::kFree) continue;
    bytes[int(slot.state)] += slot.nbytes;
    taken.push_back(&slot);
  }
  std::sort(taken.begin(), taken.end(), [](const Slot* a, const Slot* b) { return a->data < b->data; });
  for (std::size_t i = 1; i < taken.size(); ++i) {
    if (taken[i - 1]->data + taken[i - 1]->nbytes > taken[i]->data) return false;  // I2
  }
  std::uint64_t sum = 0;
  for (int i = 0; i < kSlotStates; ++i) sum += bytes[i];
  return sum == capacity && capacity == stats_.capacity && pending == pending_ &&
         std::equal(bytes, bytes + kSlotStates, stats_.bytes);  // I1
}

}  // namespace pinstage
