// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include "pool.h"

#include <algorithm>
#include <cstdlib>
#include <new>

namespace pinstage {
namespace {

using Lock = std::unique_lock<std::mutex>;
using Guard = std::lock_guard<std::mutex>;

constexpr std::uint64_t kPage = 4096;
constexpr char kAfterFailedCopy[] =
    "dst may hold old bytes, new ones or a mixture; the slot is reused only after a fence that covers it";

const void* this_thread() noexcept {
  static thread_local const char tag = 0;
  return &tag;
}

SlabMemory allocate_slab(const Device& device, std::uint64_t nbytes, bool pageable, Status* status) {
  void* data = nullptr;
  if (pageable) {
    *status = posix_memalign(&data, kPage, nbytes) == 0 ? status::kSuccess : status::kOutOfMemory;
  } else {
    const Device::Relaxed relaxed(device);
    *status = device.driver().mem_host_alloc(&data, nbytes, kHostAllocPortable | kHostAllocDeviceMap);
  }
  return {static_cast<char*>(data), nbytes, pageable};
}

}  // namespace

void free_slab(Device& device, const SlabMemory& memory) noexcept {
  if (memory.pageable) {
    std::free(memory.data);
    return;
  }
  Status status;
  {
    const Device::Relaxed relaxed(device);
    status = device.driver().mem_free_host(memory.data);
  }
  if (status == status::kSuccess || is_fatal(status)) return;
  const Guard lock(device.mutex());
  device.discard(memory);  // the next sweep tries again
}

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
      }()) {
  stats_.pageable = options.pageable;
}

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
  for (const std::unique_ptr<Slab>& slab : slabs_) {
    if (spare_slots_.empty()) {
      spare_slots_.reserve(slots_.size() + 1);  // so that free_slot() cannot fail
      spare_slots_.push_back(&slots_.emplace_back());
    }
    const Offsets::Taken taken = slab->offsets.take(nbytes);
    if (taken.offset == Offsets::kNone) continue;
    Slot* slot = spare_slots_.back();
    spare_slots_.pop_back();
    *slot = Slot{};
    slot->pool = this;
    slot->slab = slab.get();
    slot->block = taken.block;
    slot->data = slab->memory.data + taken.offset;
    slot->nbytes = Offsets::round_up(nbytes);
    slot->owned = owned;
    slot->thread = this_thread();
    slot->lease = ++leases_;
    set_state(slot, SlotState::kOpen);
    stats_.high_water = std::max(stats_.high_water, stats_.capacity - stats_.bytes[int(SlotState::kFree)]);
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
  const auto count_wait = [&] {
    if (waited) stats_.wait_seconds += waiter.seconds();
  };
  for (;;) {
    const bool progress = device_->poll_all();
    {
      const Guard lock(device_->mutex());
      if (Slot* slot = place(nbytes, owned)) {
        count_wait();
        return slot;
      }
    }
    if (grow(nbytes)) continue;
    if (!block) return nullptr;
    bool queued_work;
    {
      const Guard lock(device_->mutex());
      if (!options_.wait_when_full) exhausted(nbytes, "when_full is \"raise\"");
      queued_work = pending_ > 0;
      if (!queued_work && only_this_thread_can_help()) {
        count_wait();
        exhausted(nbytes, "nothing is in flight, so waiting could not help");
      }
      if (!waited) {
        ++stats_.waits;
        waited = true;
        if (options_.warn_on_wait && stats_.waits == 1) wait_notice_.store(true, std::memory_order_relaxed);
      }
    }
    if (!progress && !waiter.pause(queued_work)) {
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
  throw Error(ErrorKind::kPoolExhausted,
              "no room for " + std::to_string(nbytes) + " bytes in the staging pool of " + device_->name() + ": " +
                  why + ". max_bytes " + std::to_string(options_.max_bytes) + ", capacity " +
                  std::to_string(stats_.capacity) + ", of which open " + bytes(SlotState::kOpen) + ", in flight " +
                  bytes(SlotState::kInFlight) + ", held by living tensors " + bytes(SlotState::kHeld) + ", parked " +
                  bytes(SlotState::kParked) + ", captured " + bytes(SlotState::kCaptured) + ", quarantined " +
                  bytes(SlotState::kQuarantined) + ", free " + bytes(SlotState::kFree) +
                  ". Raise max_bytes, hand leases over sooner, or drop tensors that still view handed-over slots");
}

// Whole pages, unless only less than a page more is allowed.
std::uint64_t Pool::slab_size(std::uint64_t nbytes, std::uint64_t capacity) const noexcept {
  const std::uint64_t pages = (nbytes + kPage - 1) & ~(kPage - 1);
  return capacity + pages <= options_.max_bytes ? pages : Offsets::round_up(nbytes);
}

// True when it is worth trying to place again.
bool Pool::grow(std::uint64_t nbytes) {
  const Guard growing(growth_);
  const std::uint64_t limit = options_.max_bytes;
  std::uint64_t capacity;
  {
    const Guard lock(device_->mutex());
    require_open();
    for (const std::unique_ptr<Slab>& slab : slabs_) {
      if (slab->offsets.largest_free() >= Offsets::round_up(nbytes)) return true;  // another thread grew or gave back
    }
    capacity = stats_.capacity;
  }
  if (capacity + Offsets::round_up(nbytes) > limit) {
    // Small slabs from the time when the pool was small may be in the way of a large one.
    capacity -= free_empty_slabs(capacity + Offsets::round_up(nbytes) - limit);
    if (capacity + Offsets::round_up(nbytes) > limit) return false;
  }
  const std::uint64_t smallest = slab_size(nbytes, capacity);
  const std::uint64_t doubled = std::max({nbytes, capacity, options_.initial_bytes});
  std::uint64_t size = std::max(smallest, slab_size(std::min(doubled, limit - capacity), capacity));
  Status status;
  SlabMemory memory = allocate_slab(*device_, size, options_.pageable, &status);
  if (status != status::kSuccess && size > smallest) {
    size = smallest;
    memory = allocate_slab(*device_, size, options_.pageable, &status);
  }
  add_slab(memory, status, capacity);
  return true;
}

void Pool::add_slab(const SlabMemory& memory, Status status, std::uint64_t capacity) {
  if (status != status::kSuccess) {
    device_->fail(status, "cuMemHostAlloc",
                  "Pinning " + std::to_string(memory.nbytes) + " bytes of host memory was refused; the pool holds " +
                      std::to_string(capacity) +
                      " bytes and is unchanged. Free host memory, raise the limit on locked "
                      "memory (ulimit -l), lower max_bytes, or set PINSTAGE_PINNED=never");
  }
  try {
    auto slab = std::make_unique<Slab>(memory);
    const Guard lock(device_->mutex());
    slabs_.push_back(std::move(slab));
    stats_.capacity += memory.nbytes;
    stats_.bytes[int(SlotState::kFree)] += memory.nbytes;
    ++stats_.host_allocations;
  } catch (...) {
    free_slab(*device_, memory);
    throw;
  }
}

// Frees empty slabs, smallest first, if together they give `enough` bytes (0: all of them). growth_ is held.
std::uint64_t Pool::free_empty_slabs(std::uint64_t enough) {
  std::vector<std::unique_ptr<Slab>> gone;
  std::uint64_t freed = 0;
  {
    const Guard lock(device_->mutex());
    std::stable_sort(slabs_.begin(), slabs_.end(),
                     [](const auto& a, const auto& b) { return a->memory.nbytes < b->memory.nbytes; });
    std::uint64_t available = 0;
    for (const std::unique_ptr<Slab>& slab : slabs_) {
      if (slab->offsets.empty()) available += slab->memory.nbytes;
    }
    if (available < enough) return 0;
    gone.reserve(slabs_.size());
    for (std::unique_ptr<Slab>& slab : slabs_) {
      if (!slab->offsets.empty() || (enough != 0 && freed >= enough)) continue;
      freed += slab->memory.nbytes;
      gone.push_back(std::move(slab));
    }
    slabs_.erase(std::remove(slabs_.begin(), slabs_.end(), nullptr), slabs_.end());
    stats_.capacity -= freed;
    stats_.bytes[int(SlotState::kFree)] -= freed;
  }
  for (const std::unique_ptr<Slab>& slab : gone) free_slab(*device_, slab->memory);
  return freed;
}

void Pool::require_open() const {
  if (closed_) {
    throw Error(ErrorKind::kLeaseState, "the staging pool of " + device_->name() + " is closed; make a new one");
  }
}

// --- submitting ---

Pool::Prepared Pool::begin(std::uint64_t nbytes, Stream stream, const Wait& wait) {
  Lock lock(device_->mutex());
  require_open();
  Fifo& fifo = device_->retirement().fifo(stream);
  if (fifo.worth_polling(device_->poll_batch)) device_->poll(lock, fifo);
  Slot* slot = place(nbytes, false);
  if (slot == nullptr) {
    lock.unlock();
    slot = take_slowly(nbytes, wait, true, false);
    lock.lock();
  }
  // A snapshot's slot never shows as OPEN: nobody but this call can reach it.
  slot->handed_over = true;
  slot->declared = 1;
  fifo.count_bytes(slot->nbytes);
  ++slot->pending;
  ++pending_;
  set_state(slot, SlotState::kInFlight);
  ++stats_.copies;
  try {
    return {slot, device_->reserve(lock, fifo)};
  } catch (...) {
    --stats_.copies;
    fence_passed(slot);
    throw;
  }
}

void Pool::undo(const Prepared& prepared) noexcept {
  const Guard lock(device_->mutex());
  device_->release(prepared.reserved);
  --stats_.copies;
  fence_passed(prepared.slot);
}

void Pool::finish(const Prepared& prepared, const CopyPlan& plan, DevicePtr dst, Stream stream) {
  const char* call = "";
  const Status status = copy_and_record(prepared.slot, prepared.reserved, plan, dst, stream, nullptr, &call);
  device_->check(status, call, kAfterFailedCopy);
}

Slot* Pool::open(const LeaseRef& lease) const {
  if (lease.slot->lease != lease.lease || lease.slot->handed_over) {
    throw Error(ErrorKind::kLeaseState, "this lease was handed over or cancelled; take a new one with pool.lease()");
  }
  return lease.slot;
}

Device::Reserved Pool::begin_fence(const LeaseRef& lease, Stream stream, bool copy) {
  Lock lock(device_->mutex());
  require_open();
  Slot* slot = open(lease);
  // Counted first: while the lock is let go of below, a hand-over elsewhere must find the slot in use.
  ++slot->declared;
  ++slot->pending;
  ++pending_;
  try {
    const Device::Reserved reserved = device_->reserve(lock, device_->retirement().fifo(stream));
    stats_.copies += copy ? 1 : 0;
    return reserved;
  } catch (...) {
    --slot->declared;
    fence_passed(slot);
    throw;
  }
}

Status Pool::copy_and_record(Slot* slot, Device::Reserved reserved, const CopyPlan& plan, DevicePtr dst, Stream stream,
                             Ticket* ticket, const char** call) noexcept {
  std::size_t enqueued = 0;
  const Status copied = enqueue_copy(device_->driver(), plan, dst, slot->data, stream, &enqueued, call);
  if (copied != status::kSuccess && enqueued == 0 && enqueued_nothing(copied)) {
    const Guard lock(device_->mutex());
    device_->release(reserved);
    --stats_.copies;
    // A snapshot's slot goes back; a lease is as it was before the call.
    if (!slot->handed_over) --slot->declared;
    fence_passed(slot);
    return copied;
  }
  // Also after a failed copy: what was or may have been enqueued before it reads the slot.
  const Status recorded = device_->record(reserved, stream, slot, ticket);
  if (recorded != status::kSuccess) {
    const Guard lock(device_->mutex());
    fence_failed(slot, recorded);
    if (copied == status::kSuccess) *call = "cuEventRecord";
  }
  return copied != status::kSuccess ? copied : recorded;
}

Ticket Pool::submit(const LeaseRef& lease, const CopyPlan& plan, DevicePtr dst, Stream stream) {
  device_->require_usable();
  const Device::Current current(*device_);
  device_->require_not_capturing(stream);
  const Device::Reserved reserved = begin_fence(lease, stream, true);
  Ticket ticket{device_};
  const char* call = "";
  const Status status = copy_and_record(lease.slot, reserved, plan, dst, stream, &ticket, &call);
  device_->check(status, call, kAfterFailedCopy);
  return ticket;
}

Ticket Pool::retire(const LeaseRef& lease, Stream stream) {
  device_->require_usable();
  const Device::Current current(*device_);
  device_->require_not_capturing(stream);
  const Device::Reserved reserved = begin_fence(lease, stream, false);
  Ticket ticket{device_};
  const Status status = device_->record(reserved, stream, lease.slot, &ticket);
  if (status != status::kSuccess) {
    const Guard lock(device_->mutex());
    fence_failed(lease.slot, status);
  }
  device_->check(status, "cuEventRecord",
                 "Nothing tells when the readers of this slot end: it is quarantined once it is handed over");
  return ticket;
}

bool Pool::is_open(const LeaseRef& lease) {
  const Guard lock(device_->mutex());
  return lease.slot->lease == lease.lease && !lease.slot->handed_over;
}

bool Pool::declared(const LeaseRef& lease) {
  const Guard lock(device_->mutex());
  return open(lease)->declared > 0;
}

char* Pool::data(const LeaseRef& lease) {
  const Guard lock(device_->mutex());
  return open(lease)->data;
}

DevicePtr Pool::device_address(const LeaseRef& lease) {
  device_->require_usable();
  const Device::Current current(*device_);
  DevicePtr address = 0;
  device_->check(device_->driver().mem_host_get_device_pointer(&address, data(lease), 0), "cuMemHostGetDevicePointer",
                 options_.pageable ? "This pool's memory is pageable: kernels cannot read it in place" : "");
  return address;
}

bool Pool::hand_over(const LeaseRef& lease) {
  const Guard lock(device_->mutex());
  Slot* slot = open(lease);
  slot->handed_over = true;
  // The owner of a buffer knows its readers: every fill that was submitted has its fence.
  if (slot->owned) ++slot->declared;
  const bool declared = slot->declared > 0;
  settle(slot);
  return declared;
}

void Pool::cancel(const LeaseRef& lease) {
  const Guard lock(device_->mutex());
  Slot* slot = open(lease);
  if (slot->declared > 0) {
    throw Error(
        ErrorKind::kLeaseState,
        "a lease that was copied from or retired cannot be cancelled: its bytes are being read. Close it instead");
  }
  slot->handed_over = true;
  slot->declared = 1;
  settle(slot);
}

void Pool::wait_reusable(const LeaseRef& lease, const Wait& wait) {
  device_->require_usable();
  Waiter waiter(*device_, wait);
  bool waited = false;
  for (;;) {
    const bool progress = device_->poll_all();
    {
      const Guard lock(device_->mutex());
      Slot* slot = open(lease);
      if (slot->unfenced != status::kSuccess) {
        throw Error(ErrorKind::kDriver,
                    "no fence could be recorded for the last use of this buffer, so nothing tells when "
                    "it may be written again; make a new buffer",
                    slot->unfenced);
      }
      if (slot->pending == 0) {
        if (waited) stats_.wait_seconds += waiter.seconds();
        return;
      }
      if (!waited) ++stats_.waits;
      waited = true;
    }
    if (!progress && !waiter.pause(true)) {
      throw Error(ErrorKind::kTimeout, "the buffer is still being read after " + std::to_string(wait.timeout_seconds) +
                                           " s; its last copy waits behind other work on its stream");
    }
  }
}

// --- states ---

void Pool::tensor_born(const LeaseRef& lease) {
  const Guard lock(device_->mutex());
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
  slot->unfenced = status;
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
  slot->slab->offsets.give(slot->block);
  slot->nbytes = 0;
  slot->lease = 0;
  spare_slots_.push_back(slot);
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

std::uint64_t Pool::reclaim(bool synchronize) {
  device_->require_usable();
  const Device::Current current(*device_);
  const auto free_bytes = [this] {
    const Guard lock(device_->mutex());
    return stats_.bytes[int(SlotState::kFree)];
  };
  const std::uint64_t before = free_bytes();
  device_->poll_all();
  if (synchronize) {
    const Guard growing(growth_);
    free_parked();
    device_->poll_all();
  }
  device_->sweep();
  const std::uint64_t after = free_bytes();
  return after > before ? after - before : 0;
}

std::uint64_t Pool::trim() {
  device_->require_usable();
  const Device::Current current(*device_);
  device_->poll_all();
  std::uint64_t freed;
  {
    const Guard growing(growth_);
    bool parked;
    {
      const Guard lock(device_->mutex());
      parked = stats_.bytes[int(SlotState::kParked)] > 0;
    }
    if (parked) free_parked();
    freed = free_empty_slabs(0);
  }
  device_->sweep();
  return freed;
}

void Pool::reserve(std::uint64_t nbytes) {
  device_->require_usable();
  const Device::Current current(*device_);
  const Guard growing(growth_);
  std::uint64_t capacity;
  {
    const Guard lock(device_->mutex());
    require_open();
    // max_bytes was rounded down to whole granules: what was asked for may be rounded likewise.
    if (nbytes / Offsets::kGranule > options_.max_bytes / Offsets::kGranule) {
      exhausted(nbytes, "reserve() asks for more than max_bytes");
    }
    nbytes = std::min(Offsets::round_up(nbytes), options_.max_bytes);
    capacity = stats_.capacity;
  }
  if (nbytes <= capacity) return;
  const std::uint64_t size = slab_size(nbytes - capacity, capacity);
  Status status;
  const SlabMemory memory = allocate_slab(*device_, size, options_.pageable, &status);
  add_slab(memory, status, capacity);
}

void Pool::close(const Wait& wait) {
  {
    const Guard lock(device_->mutex());
    closed_ = true;
  }
  if (!device_->usable()) return;
  const Device::Current current(*device_);
  Waiter waiter(*device_, wait);
  for (;;) {
    const bool progress = device_->poll_all();
    {
      const Guard lock(device_->mutex());
      if (pending_ == 0) break;
    }
    if (!progress && !waiter.pause(true)) break;
  }
  trim();
}

void Pool::abandon() noexcept {
  if (!device_->usable()) return;
  const Guard lock(device_->mutex());
  closed_ = true;
}

bool Pool::drained() const noexcept { return closed_ && pending_ == 0; }

void Pool::discard_empty_slabs() noexcept {
  for (std::unique_ptr<Slab>& slab : slabs_) {
    if (!slab->offsets.empty()) continue;
    stats_.capacity -= slab->memory.nbytes;
    stats_.bytes[int(SlotState::kFree)] -= slab->memory.nbytes;
    device_->discard(slab->memory);
    slab.reset();
  }
  slabs_.erase(std::remove(slabs_.begin(), slabs_.end(), nullptr), slabs_.end());
}

PoolStats Pool::stats() {
  const Guard lock(device_->mutex());
  PoolStats stats = stats_;
  stats.slabs = slabs_.size();
  stats.events_created = device_->retirement().events_created();
  return stats;
}

bool Pool::consistent() {
  const Guard lock(device_->mutex());
  std::uint64_t bytes[kSlotStates] = {};
  std::uint64_t capacity = 0, pending = 0;
  for (const std::unique_ptr<Slab>& slab : slabs_) {
    if (!slab->offsets.consistent()) return false;
    capacity += slab->memory.nbytes;
    bytes[int(SlotState::kFree)] += slab->offsets.free_bytes();
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
