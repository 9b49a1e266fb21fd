// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// What is done with a slot: submitting its copy, fencing its readers, handing it over.
#include "pool.h"

namespace pinstage {
namespace {

using Lock = std::unique_lock<std::mutex>;
using Guard = std::lock_guard<std::mutex>;

constexpr char kAfterFailedCopy[] =
    "dst may hold old bytes, new ones or a mixture; the slot is reused only after a fence that covers it";

}  // namespace

// --- a snapshot ---

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
    return {slot, device_->reserve(lock, fifo), recent_.next(slot->nbytes)};
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

void Pool::finish(const Prepared& prepared, Stream stream, Status copied, std::size_t enqueued, const char* call,
                  Ticket* ticket) {
  const Status status = fence_copies(prepared.slot, prepared.reserved, stream, copied, enqueued, ticket, &call);
  device_->check(status, call, kAfterFailedCopy);
}

// --- a lease ---

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
    settle(slot);  // an owned slot counts as in flight from here on
    return reserved;
  } catch (...) {
    --slot->declared;
    fence_passed(slot);
    throw;
  }
}

// The fence after copies from `slot`, of which the driver took `enqueued` before one ended with `copied`.
Status Pool::fence_copies(Slot* slot, Device::Reserved reserved, Stream stream, Status copied, std::size_t enqueued,
                          Ticket* ticket, const char** call) noexcept {
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
  std::size_t enqueued = 0;
  const char* call = "";
  const Status copied = enqueue_copy(device_->driver(), plan, dst, lease.slot->data, stream, &enqueued, &call);
  const Status status = fence_copies(lease.slot, reserved, stream, copied, enqueued, &ticket, &call);
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
  const Lock lock = device_->lock();
  return lease.slot->lease == lease.lease && !lease.slot->handed_over;
}

bool Pool::declared(const LeaseRef& lease) {
  const Lock lock = device_->lock();
  return open(lease)->declared > 0;
}

char* Pool::data(const LeaseRef& lease) {
  const Lock lock = device_->lock();
  return open(lease)->data;
}

DevicePtr Pool::device_address(const LeaseRef& lease) {
  device_->require_usable();
  const Device::Current current(*device_);
  char* const host = data(lease);
  if (lease.slot->slab->memory.kind == SlabKind::kPageable) {
    device_->fail(status::kNotSupported, "cuMemHostGetDevicePointer",
                  "This pool's memory is pageable, which kernels cannot read in place: use copy_to()");
  }
  DevicePtr address = 0;
  device_->check(device_->driver().mem_host_get_device_pointer(&address, host, 0), "cuMemHostGetDevicePointer");
  return address;
}

bool Pool::hand_over(const LeaseRef& lease) {
  const Lock lock = device_->lock();
  Slot* slot = open(lease);
  slot->handed_over = true;
  // The owner of a buffer knows its readers: every fill that was submitted has its fence.
  if (slot->owned) ++slot->declared;
  const bool declared = slot->declared > 0;
  settle(slot);
  return declared;
}

void Pool::cancel(const LeaseRef& lease) {
  const Lock lock = device_->lock();
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

}  // namespace pinstage
