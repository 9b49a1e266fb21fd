// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// One GPU (or one simulated GPU): its driver table, its context, its fences, and the mutex that guards them together
// with every pool on the device. One lock, because a passing fence and the slot that it frees change as one.
//
// Rules that every function here keeps:
//  - no driver call is made while mutex() is held;
//  - the GIL is never taken while mutex() is held (the GIL is the outermost lock);
//  - queries, allocation and event creation run in the RELAXED capture mode, so that they cannot break a capture;
//  - after shutdown(), and in a forked child, the driver is not called any more (I8).
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "driver.h"
#include "error.h"
#include "retirement.h"
#include "status.h"

namespace pinstage {

class Device;
class Pool;
struct SlabMemory;

enum class DeviceKind { kCuda, kSimulated };

inline constexpr int kNoNumaNode = -1;
inline constexpr int kMaxNumaNode = 1023;  // of a kernel with the widest node masks

// How long a call may wait, and how it learns of Ctrl-C.
struct Wait {
  double timeout_seconds = -1;      // negative: no limit
  bool (*interrupted)() = nullptr;  // true: give up, a Python error is set
};

// One wait. pause() between two polls, holding no lock.
class Waiter {
 public:
  Waiter(const Device& device, const Wait& wait);
  // False when the time is up. `queued_work`: what is waited for is work on the device (and not another thread).
  // Throws Interrupted, or Error when the device says that nothing can ever run.
  bool pause(bool queued_work);
  double seconds() const;

 private:
  const Device& device_;
  const Wait wait_;
  const std::chrono::steady_clock::time_point start_;
  unsigned round_ = 0;
  double stuck_since_ = -1;  // seconds(), when the device first said that nothing can run
};

// Something to tell the user once, by a thread that has the GIL.
class Notice {
 public:
  void raise() noexcept {
    int quiet = kQuiet;
    state_.compare_exchange_strong(quiet, kRaised);
  }
  bool take() noexcept {
    int raised = kRaised;
    return state_.load(std::memory_order_relaxed) == kRaised && state_.compare_exchange_strong(raised, kTold);
  }

 private:
  enum { kQuiet, kRaised, kTold };
  std::atomic<int> state_{kQuiet};
};

// The public handle of a fence. Copyable; outlives the reuse of its event.
struct Ticket {
  std::shared_ptr<Device> device;
  FenceCell* cell = nullptr;
  std::uint64_t generation = 0;

  bool done() const;
  // Throws Error(kTimeout) when the time is up.
  void wait(const Wait& wait) const;
  // Device-side: work enqueued on `stream` of the device `where` from now on runs after the fence; the host goes on.
  void wait_on(Stream stream, const Device& where) const;
};

class Device : public std::enable_shared_from_this<Device> {
 public:
  using CurrentStream = Stream (*)(void* source, int index);

  // `stream_of(source, index)` is the stream that is current in the calling thread. A simulated device polls at every
  // chance rather than in batches: slots are reused as early as can be, so that races show. So does a device under
  // test.
  Device(const Driver& driver, Context context, DeviceKind kind, int index, CurrentStream stream_of, void* source);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Driver& driver() const noexcept { return driver_; }
  DeviceKind kind() const noexcept { return kind_; }
  int index() const noexcept { return index_; }
  std::string name() const;  // "cuda:0", "simulated:0"
  Stream current_stream() const { return current_stream_(source_, index_); }
  std::mutex& mutex() noexcept { return mutex_; }
  // Takes mutex(). Throws ForkedError in a forked child, where a thread that does not exist there may hold it.
  std::unique_lock<std::mutex> lock() {
    require_not_forked();
    return std::unique_lock<std::mutex>(mutex_);
  }

  // No driver call after this. Idempotent; called at interpreter exit and when a simulated device closes.
  void shutdown() noexcept;
  bool usable() const noexcept;
  // Throws ForkedError in a forked child, LeaseStateError after shutdown().
  void require_usable() const;
  void require_not_forked() const;
  // Throws CaptureError when work enqueued on `stream` would be captured (or would break a capture).
  void require_not_capturing(Stream stream) const;

  // Throws DriverError unless `status` is success.
  void check(Status status, const char* call, const char* detail = "") const {
    if (status != status::kSuccess) fail(status, call, detail);
  }
  [[noreturn]] void fail(Status status, const char* call, const std::string& detail) const;

  // Makes the device's context current for a scope (a thread may have another, or none).
  class Current {
   public:
    explicit Current(const Device& device);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const Device& device_;
    bool pushed_ = false;
  };
  // The RELAXED capture mode for a scope.
  class Relaxed {
   public:
    explicit Relaxed(const Device& device) noexcept;
    ~Relaxed();
    Relaxed(const Relaxed&) = delete;
    Relaxed& operator=(const Relaxed&) = delete;

   private:
    const Device& device_;
    int previous_ = kCaptureModeRelaxed;
    bool entered_;
  };

  // Everything that a fence needs, taken before anything is enqueued, so that recording is the last thing that can
  // fail.
  struct Reserved {
    Fifo* fifo = nullptr;
    FenceCell* cell = nullptr;
    std::uint64_t behind = 0;  // fences in the FIFO's history at this point, all recorded earlier than this one will be
  };
  // Both with mutex() held through `lock`; reserve() lets go of it while it creates an event. Context current.
  Reserved reserve(std::unique_lock<std::mutex>& lock, Fifo& fifo);
  void release(Reserved reserved) noexcept;

  // Records the fence; on success it is in its FIFO. Context current, mutex() not held. The caller counted the fence in
  // slot->pending before. On failure the reservation is spent, nothing is pushed, and the status is returned.
  Status record(Reserved reserved, Stream stream, Slot* slot, Ticket* ticket) noexcept;

  // A fence on what is enqueued on `stream` so far, with no slot behind it.
  Ticket fence(Stream stream);

  // Pops the fences of one FIFO that have passed, up to a batch of them; returns whether any had. The lock is let go
  // during the queries; the context is current. *error: a query failed in a way that says nothing of its fence.
  bool poll(std::unique_lock<std::mutex>& lock, Fifo& fifo, Status* error = nullptr);
  // Pops every fence that has passed, over all FIFOs. Returns whether any had; throws DriverError if a query failed and
  // none had. mutex() not held.
  bool poll_all();
  // For callers that know no stream: polls two FIFOs, taking turns.
  void poll_some(std::unique_lock<std::mutex>& lock);

  // Host memory of pools that are gone: freed by the next call that may call the driver, never by a destructor.
  void adopt(std::shared_ptr<Pool> pool);
  void discard(const SlabMemory& memory) noexcept;
  // The device ends: frees what no slot is in, while it may still call the driver, and lets go of its pools.
  void release_pools();
  void sweep();  // frees discarded memory and lets go of closed pools that drained; mutex() not held

  Retirement& retirement() noexcept { return retirement_; }

  // What copies without a pool of their own use. Guarded by the GIL, not by mutex().
  std::shared_ptr<Pool> default_pool;

  // The driver has cuMemcpyBatchAsync, but refused a batch whose copies it then took one by one.
  std::atomic<bool> refuses_batches{false};

  // The kernel of scatter.h; null where the driver has none, or declined to launch it.
  Function scatter_kernel() const noexcept {
    return refuses_scatter.load(std::memory_order_relaxed) ? nullptr : scatter_kernel_;
  }
  std::atomic<bool> refuses_scatter{false};

  // Fences that a caller who is not short of room lets come together before it polls. Set before the device is used.
  std::uint64_t poll_batch;

  // Where the slabs of this device shall lie; kNoNumaNode where there is nothing to choose, or the system refused.
  std::atomic<int> numa_node{kNoNumaNode};

  // What the driver said when a pool's first slab could not be pinned, and what is to be told of it; Pool::allocate.
  std::atomic<Status> pinning_refused{status::kSuccess};
  Notice pageable_notice;

 private:
  friend struct Ticket;

  void create_events(std::unique_lock<std::mutex>& lock);

  const Driver driver_;
  const Context context_;
  const DeviceKind kind_;
  const int index_;
  const CurrentStream current_stream_;
  void* const source_;
  const unsigned fork_generation_;
  std::atomic<bool> shut_down_{false};
  const Function scatter_kernel_;

  std::mutex mutex_;
  Retirement retirement_;
  std::size_t turn_ = 0;
  std::vector<std::shared_ptr<Pool>> pools_;  // every open pool, and closed ones until they drained
  std::vector<SlabMemory> discarded_;
};

// Driver::idle of a real GPU: a pause, then short sleeps.
Status pause_then_sleep(unsigned round);

}  // namespace pinstage
