// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// The pool's pinned memory: growing, trimming, giving back.
#include <algorithm>

#include "pool.h"

namespace pinstage {
namespace {

using Guard = std::lock_guard<std::mutex>;

constexpr std::uint64_t kPage = 4096;

}  // namespace

// Whole pages, unless only less than a page more is allowed.
std::uint64_t Pool::slab_size(std::uint64_t nbytes, std::uint64_t capacity) const noexcept {
  const std::uint64_t pages = (nbytes + kPage - 1) & ~(kPage - 1);
  return capacity + pages <= options_.max_bytes ? pages : Offsets::round_up(nbytes);
}

// A machine that cannot pin says so at a pool's first slab: then this device's memory is pageable from here on. Being
// out of memory is another matter, and an error.
Status Pool::allocate(std::uint64_t nbytes, std::uint64_t capacity, SlabMemory* out) {
  if (!pageable()) {
    const Status status = allocate_pinned(*device_, nbytes, &may_register_, out);
    if (capacity > 0 || (status != status::kNotSupported && status != status::kNotPermitted)) return status;
    device_->pinning_refused.store(status);
  }
  const Status status = allocate_pageable(nbytes, out);
  if (status == status::kSuccess) device_->pageable_notice.raise();
  return status;
}

// True when it is worth trying to place again.
bool Pool::grow(std::uint64_t nbytes) {
  const Guard growing(growth_);
  const std::uint64_t limit = options_.max_bytes;
  std::uint64_t capacity;
  {
    const Guard lock(device_->mutex());
    require_open();
    give_recent_back();
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
  SlabMemory memory;
  Status status = allocate(size, capacity, &memory);
  if (status != status::kSuccess && size > smallest) {
    size = smallest;
    status = allocate(size, capacity, &memory);
  }
  add_slab(memory, status, capacity);
  return true;
}

void Pool::add_slab(const SlabMemory& memory, Status status, std::uint64_t capacity) {
  if (status != status::kSuccess) {
    const std::string holds = std::to_string(memory.nbytes) + " bytes of host memory was refused; the pool holds " +
                              std::to_string(capacity) + " bytes and is unchanged. Free host memory, ";
    if (memory.kind == SlabKind::kPageable) {
      device_->fail(status, "posix_memalign", "Allocating " + holds + "or lower max_bytes");
    }
    device_->fail(status, "cuMemHostAlloc",
                  "Pinning " + holds +
                      "raise the limit on locked memory (ulimit -l), lower max_bytes, or set PINSTAGE_PINNED=never");
  }
  try {
    auto slab = std::make_unique<Slab>(memory);
    const Guard lock(device_->mutex());
    slabs_.push_back(std::move(slab));
    stats_.capacity += memory.nbytes;
    stats_.bytes[int(SlotState::kFree)] += memory.nbytes;
    ++stats_.host_allocations;
    ++changes_;
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
    give_recent_back();
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
    ++changes_;
  }
  for (const std::unique_ptr<Slab>& slab : gone) free_slab(*device_, slab->memory);
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
  SlabMemory memory;
  const Status status = allocate(size, capacity, &memory);
  add_slab(memory, status, capacity);
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

void Pool::discard_empty_slabs() noexcept {
  give_recent_back();
  for (std::unique_ptr<Slab>& slab : slabs_) {
    if (!slab->offsets.empty()) continue;
    stats_.capacity -= slab->memory.nbytes;
    stats_.bytes[int(SlotState::kFree)] -= slab->memory.nbytes;
    device_->discard(slab->memory);
    slab.reset();
  }
  slabs_.erase(std::remove(slabs_.begin(), slabs_.end(), nullptr), slabs_.end());
}

}  // namespace pinstage
