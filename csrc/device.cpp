// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include "device.h"

#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <thread>

#include "pool.h"
#include "scatter.h"

namespace pinstage {
namespace {

// Seconds for which a simulated device must say that nothing can run before a wait believes it: a snapshot counts as in
// flight while it is still being written, and is enqueued only then.
constexpr double kStuck = 0.1;

// CUDA is unusable in a forked child, and the child may have inherited a locked mutex: every call checks that the
// process is still the one that made the device. Counted by a fork handler, because getpid() is a system call.
std::atomic<unsigned> g_fork_generation{0};

unsigned fork_generation() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { g_fork_generation.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
  return g_fork_generation.load(std::memory_order_relaxed);
}

}  // namespace

Status pause_then_sleep(unsigned round) {
  if (round < 200) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(round < 1000 ? 5 : 50));
  }
  return status::kSuccess;
}

Waiter::Waiter(const Device& device, const Wait& wait)
    : device_(device), wait_(wait), start_(std::chrono::steady_clock::now()) {}

double Waiter::seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

bool Waiter::pause(bool queued_work) {
  if (wait_.timeout_seconds >= 0 && seconds() >= wait_.timeout_seconds) return false;
  // Signals are looked at about every millisecond once the wait sleeps: taking the GIL on each round would let one
  // waiter slow every Python thread.
  if (wait_.interrupted != nullptr && round_ % 32 == 31 && wait_.interrupted()) throw Interrupted{};
  const Status status = queued_work ? device_.driver().idle(round_) : pause_then_sleep(round_);
  if (status != status::kNothingCanRun) {
    stuck_since_ = -1;
  } else if (stuck_since_ < 0) {
    stuck_since_ = seconds();
  } else if (seconds() - stuck_since_ < kStuck) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));  // another thread may be about to enqueue
  } else {
    throw Error(ErrorKind::kDriver,
                device_.name() +
                    ": this wait would never end, because no queued step may run (schedule \"manual\", or a "
                    "wait on something that was never enqueued). Run the steps first: dev.run()",
                status);
  }
  ++round_;
  return true;
}

Device::Current::Current(const Device& device) : device_(device) {
  Context now = nullptr;
  device.check(device.driver_.ctx_get_current(&now), "cuCtxGetCurrent");
  if (now == device.context_) return;
  device.check(device.driver_.ctx_push_current(device.context_), "cuCtxPushCurrent");
  pushed_ = true;
}

Device::Current::~Current() {
  if (!pushed_) return;
  // A thread left with our context would send its next work on stream 0 to another device: a failure is worth a second
  // try.
  Context popped = nullptr;
  if (device_.driver_.ctx_pop_current(&popped) != status::kSuccess) device_.driver_.ctx_pop_current(&popped);
}

Device::Relaxed::Relaxed(const Device& device) noexcept
    : device_(device), entered_(device.driver_.thread_exchange_capture_mode(&previous_) == status::kSuccess) {}

Device::Relaxed::~Relaxed() {
  if (!entered_) return;
  // A thread left RELAXED could break captures unnoticed from then on: a failure is worth a second try.
  int mode = previous_;
  if (device_.driver_.thread_exchange_capture_mode(&mode) != status::kSuccess) {
    device_.driver_.thread_exchange_capture_mode(&previous_);
  }
}

Device::Device(const Driver& driver, Context context, DeviceKind kind, int index, CurrentStream stream_of, void* source)
    : poll_batch(kind == DeviceKind::kSimulated ? 1 : Fifo::kBatch),
      driver_(driver),
      context_(context),
      kind_(kind),
      index_(index),
      current_stream_(stream_of),
      source_(source),
      fork_generation_(fork_generation()),
      scatter_kernel_(load_scatter_kernel(*this)) {}

// Events and slabs are left to the driver's own end: by the time a Device dies, the driver may be gone (I8).
Device::~Device() = default;

std::string Device::name() const {
  return (kind_ == DeviceKind::kCuda ? "cuda:" : "simulated:") + std::to_string(index_);
}

void Device::shutdown() noexcept { shut_down_.store(true, std::memory_order_release); }

bool Device::usable() const noexcept {
  return !shut_down_.load(std::memory_order_acquire) &&
         fork_generation_ == g_fork_generation.load(std::memory_order_relaxed);
}

void Device::require_usable() const {
  require_not_forked();
  if (shut_down_.load(std::memory_order_acquire)) {
    throw Error(ErrorKind::kLeaseState, name() + " was shut down; make a new device or pool");
  }
}

void Device::require_not_forked() const {
  if (fork_generation_ == g_fork_generation.load(std::memory_order_relaxed)) return;
  throw Error(ErrorKind::kForked,
              name() +
                  " was set up before this process was forked, and CUDA does not survive a fork. "
                  "Start workers with the \"spawn\" method, or fork before the first use of pinstage");
}

void Device::fail(Status status, const char* call, const std::string& detail) const {
  const char* error_name = nullptr;
  const char* text = nullptr;
  driver_.get_error_name(status, &error_name);
  driver_.get_error_string(status, &text);
  std::string message = std::string(call) + " failed on " + name() + ": " +
                        (error_name != nullptr ? error_name : "unknown error") + " (" + std::to_string(status) + ")";
  if (text != nullptr) message += std::string(", ") + text;
  if (!detail.empty()) message += ". " + detail;
  message += std::string(". ") + remedy(status);
  throw Error(ErrorKind::kDriver, std::move(message), status);
}

void Device::require_not_capturing(Stream stream) const {
  int capture_status = kCaptureStatusNone;
  const Status status = driver_.stream_is_capturing(stream, &capture_status);
  if (status == status::kSuccess && capture_status == kCaptureStatusNone) return;
  if (status != status::kSuccess && status != status::kStreamCaptureImplicit) fail(status, "cuStreamIsCapturing", "");
  throw Error(ErrorKind::kCapture,
              std::string(status == status::kStreamCaptureImplicit
                              ? "another stream of " + name() +
                                    " is being captured, and work on the default stream would "
                                    "break that capture"
                              : "the stream is being captured into a CUDA graph on " + name()) +
                  ": every replay would read this slot again, after others have written it. Nothing was enqueued. Copy "
                  "before the capture, or stage on a stream that is not captured",
              status);
}

Device::Reserved Device::reserve(std::unique_lock<std::mutex>& lock, Fifo& fifo) {
  fifo.reserve_one();
  FenceCell* cell = retirement_.take_cell();
  try {
    while (cell == nullptr) {
      create_events(lock);
      cell = retirement_.take_cell();
    }
  } catch (...) {
    fifo.cancel_reservation();
    throw;
  }
  return {&fifo, cell, fifo.submitted()};
}

// A batch at a time, so that a program which warmed up with a copy or two makes no more in its steady state.
void Device::create_events(std::unique_lock<std::mutex>& lock) {
  constexpr int kEvents = 3 * Fifo::kBatch;
  Event events[kEvents];
  int made = 0;
  Status status = status::kSuccess;
  lock.unlock();
  {
    const Relaxed relaxed(*this);
    while (made < kEvents && status == status::kSuccess) {
      status = driver_.event_create(&events[made], kEventDisableTiming);
      if (status == status::kSuccess) ++made;
    }
  }
  lock.lock();
  for (int i = 0; i < made; ++i) retirement_.add_cell(events[i]);
  if (made == 0) check(status, "cuEventCreate");
}

void Device::release(Reserved reserved) noexcept {
  reserved.fifo->cancel_reservation();
  retirement_.give_cell(reserved.cell);
}

Status Device::record(Reserved reserved, Stream stream, Slot* slot, Ticket* ticket) noexcept {
  unsigned long long stream_id = 0;
  if (driver_.stream_get_id != nullptr && driver_.stream_get_id(stream, &stream_id) != status::kSuccess) stream_id = 0;
  const Status status = driver_.event_record(reserved.cell->event, stream);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (status != status::kSuccess) {
    release(reserved);
    return status;
  }
  if (ticket != nullptr) {
    ticket->cell = reserved.cell;
    ticket->generation = reserved.cell->generation.load(std::memory_order_relaxed);
  }
  reserved.fifo->push({reserved.cell, slot, stream_id, reserved.behind});
  return status;
}

Ticket Device::fence(Stream stream) {
  require_usable();
  Current current(*this);
  require_not_capturing(stream);
  Reserved reserved;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    Fifo& fifo = retirement_.fifo(stream);
    if (fifo.worth_polling(poll_batch)) poll(lock, fifo);
    reserved = reserve(lock, fifo);
  }
  Ticket ticket{shared_from_this()};
  check(record(reserved, stream, nullptr, &ticket), "cuEventRecord");
  return ticket;
}

bool Device::poll(std::unique_lock<std::mutex>& lock, Fifo& fifo, Status* error) {
  Fence fences[Fifo::kBatch];
  std::uint64_t generations[Fifo::kBatch];
  const std::uint64_t first = fifo.completed();
  const std::uint64_t count = std::min(fifo.size(), Fifo::kBatch);
  for (std::uint64_t i = 0; i < count; ++i) {
    fences[i] = fifo.at(i);
    generations[i] = fences[i].cell->generation.load(std::memory_order_relaxed);
  }
  fifo.polled(poll_batch);
  if (count == 0) return false;
  lock.unlock();
  std::uint64_t passed = 0;
  Status status = status::kNotReady;
  {
    const Relaxed relaxed(*this);
    // The youngest of the batch, else of its older half, and so on down to the head.
    std::uint64_t asked = count;
    while ((status = driver_.event_query(fences[asked - 1].cell->event)) == status::kNotReady && asked > 1) asked /= 2;
    if (status == status::kSuccess) {
      // It answers for the fences of its stream that came before it; the others are asked one by one, and the first
      // that has not passed ends the walk.
      const Fence& young = fences[asked - 1];
      const auto answered = [&](std::uint64_t i) {
        return young.stream_id != 0 && fences[i].stream_id == young.stream_id && first + i < young.behind;
      };
      while (passed + 1 < asked &&
             (answered(passed) || (status = driver_.event_query(fences[passed].cell->event)) == status::kSuccess)) {
        ++passed;
      }
      if (passed + 1 == asked) ++passed;
    } else if (asked > 1) {
      // An error: it is the head's to report.
      status = driver_.event_query(fences[0].cell->event);
      if (status == status::kSuccess) passed = 1;
    }
  }
  lock.lock();
  // Another thread may have popped some meanwhile; then the answers were about something else.
  std::uint64_t popped = 0;
  while (popped < passed && !fifo.empty() && fifo.at(0).cell == fences[popped].cell &&
         fences[popped].cell->generation.load(std::memory_order_relaxed) == generations[popped]) {
    const Fence fence = fifo.pop();
    retirement_.give_cell(fence.cell);
    if (fence.slot != nullptr) fence.slot->pool->fence_passed(fence.slot);
    ++popped;
  }
  if (popped < passed) return true;
  if (is_fatal(status) || status == status::kCapturedEvent) {
    if (fifo.empty() || fifo.at(0).cell != fences[passed].cell ||
        fences[passed].cell->generation.load(std::memory_order_relaxed) != generations[passed]) {
      return true;
    }
    const Fence fence = fifo.pop();
    fence.cell->failure.store(status, std::memory_order_release);
    if (fence.slot != nullptr) fence.slot->pool->fence_failed(fence.slot, status);
    return true;
  }
  if (status != status::kSuccess && status != status::kNotReady && error != nullptr) *error = status;
  return popped > 0;
}

bool Device::poll_all() {
  const Current current(*this);
  bool any = false;
  Status error = status::kSuccess;
  std::unique_lock<std::mutex> lock(mutex_);
  for (std::size_t i = 0; i < retirement_.fifos().size(); ++i) {
    Fifo& fifo = *retirement_.fifos()[i];
    while (poll(lock, fifo, &error)) any = true;
  }
  lock.unlock();
  if (!any) check(error, "cuEventQuery");
  return any;
}

void Device::poll_some(std::unique_lock<std::mutex>& lock) {
  const std::size_t count = retirement_.fifos().size();
  for (std::size_t i = 0; i < std::min<std::size_t>(2, count); ++i) {
    poll(lock, *retirement_.fifos()[turn_++ % count]);
  }
}

void Device::adopt(std::shared_ptr<Pool> pool) {
  const std::lock_guard<std::mutex> lock(mutex_);
  pools_.push_back(std::move(pool));
}

void Device::discard(const SlabMemory& memory) noexcept {
  // Losing track of a slab (out of memory here) leaks it, which is safe; throwing from a destructor is not.
  try {
    discarded_.push_back(memory);
  } catch (const std::bad_alloc&) {
    return;
  }
}

void Device::sweep() {
  if (!usable()) return;
  std::vector<SlabMemory> memory;
  std::vector<std::shared_ptr<Pool>> drained;  // destroyed after the lock is gone
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const std::shared_ptr<Pool>& pool : pools_) {
      if (pool->drained()) pool->discard_empty_slabs();
    }
    auto keep = std::stable_partition(pools_.begin(), pools_.end(), [](const std::shared_ptr<Pool>& pool) {
      return !pool->drained() || pool->has_slabs();  // under tensors and leases that live: a later sweep
    });
    drained.assign(std::make_move_iterator(keep), std::make_move_iterator(pools_.end()));
    pools_.erase(keep, pools_.end());
    memory.swap(discarded_);
  }
  if (memory.empty()) return;
  const Current current(*this);
  for (const SlabMemory& slab : memory) free_slab(*this, slab);
}

void Device::release_pools() {
  if (!usable()) return;
  try {
    poll_all();
  } catch (const Error&) {
    // A lost device answers no query: what it may read is leaked.
  }
  std::vector<std::shared_ptr<Pool>> pools;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    // No fence may outlive the pool of its slot: what has not passed by now never will.
    for (Fifo* fifo : retirement_.fifos()) {
      while (!fifo->empty()) {
        const Fence fence = fifo->pop();
        if (fence.slot != nullptr) fence.slot->pool->fence_failed(fence.slot, status::kDeinitialized);
      }
    }
    pools.swap(pools_);
    for (const std::shared_ptr<Pool>& pool : pools) pool->discard_empty_slabs();
  }
  sweep();
}

bool Ticket::done() const {
  if (cell->generation.load(std::memory_order_acquire) != generation) return true;
  const Status failed = cell->failure.load(std::memory_order_acquire);
  if (failed != status::kSuccess) device->fail(failed, "cuEventQuery", "The work under this ticket may never have run");
  device->require_usable();
  Status status;
  {
    const Device::Current current(*device);
    const Device::Relaxed relaxed(*device);
    status = device->driver().event_query(cell->event);
  }
  // A recycled event answers for its new fence; the generation tells.
  if (cell->generation.load(std::memory_order_acquire) != generation) return true;
  if (status == status::kNotReady) return false;
  device->check(status, "cuEventQuery");
  return true;
}

void Ticket::wait(const Wait& wait) const {
  Waiter waiter(*device, wait);
  while (!done()) {
    if (!waiter.pause(true)) {
      throw Error(ErrorKind::kTimeout, "the fence did not pass within " + std::to_string(wait.timeout_seconds) +
                                           " s; the work before it on its stream is still running or held back");
    }
  }
}

void Ticket::wait_on(Stream stream, const Device& where) const {
  device->require_usable();
  where.require_usable();
  if (where.kind() != device->kind()) {
    throw Error(ErrorKind::kValue, "a stream of " + where.name() + " cannot wait for work on " + device->name());
  }
  {
    const std::lock_guard<std::mutex> lock(device->mutex_);
    if (cell->generation.load(std::memory_order_relaxed) != generation) return;  // passed: nothing to wait for
    device->retirement_.pin(cell);
  }
  Status status;
  try {
    const Device::Current current(where);  // whose default stream stream 0 is
    where.require_not_capturing(stream);
    status = where.driver().stream_wait_event(stream, cell->event, 0);
  } catch (...) {
    const std::lock_guard<std::mutex> lock(device->mutex_);
    device->retirement_.unpin(cell);
    throw;
  }
  {
    const std::lock_guard<std::mutex> lock(device->mutex_);
    device->retirement_.unpin(cell);
  }
  where.check(status, "cuStreamWaitEvent");
}

}  // namespace pinstage
