// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include "simulated_machine.h"

#include <pthread.h>

#include <algorithm>
#include <new>

namespace pinstage::sim {
namespace {

Machine& machine() noexcept { return Machine::get(); }

bool alive(const Device& device) noexcept { return !device.closed && device.sticky == status::kSuccess; }

bool ready(const Step& step) {
  if (step.kind == Kind::kWait) return step.record->done;
  if (step.kind == Kind::kLatch) return !step.latch->holds();
  return true;
}

bool legal(const Queue& queue) {
  return !queue.busy && !queue.steps.empty() && alive(*queue.device) && ready(queue.steps.front());
}

bool automatic(const Device& device) { return device.schedule != Schedule::kManual; }

bool in_kernel() noexcept { return this_thread().kernels > 0; }

// The legal step that was submitted first, over the devices that `wanted` accepts.
template <class Wanted>
std::shared_ptr<Queue> oldest_legal(Wanted wanted) {
  std::shared_ptr<Queue> oldest;
  for (const std::shared_ptr<Device>& device : machine().devices) {
    if (!wanted(*device)) continue;
    for (const std::shared_ptr<Queue>& queue : device->queues) {
      if (legal(*queue) && (!oldest || queue->steps.front().number < oldest->steps.front().number)) oldest = queue;
    }
  }
  return oldest;
}

std::shared_ptr<Queue> random_legal(Device& device) {
  std::vector<std::shared_ptr<Queue>> choice;
  for (const std::shared_ptr<Queue>& queue : device.queues) {
    if (legal(*queue)) choice.push_back(queue);
  }
  return choice.empty() ? nullptr : choice[device.random() % choice.size()];
}

// The queue whose head must run next for `queue` to advance: its own, or, where that waits for a record, the one that
// the record depends on. Null when that one is held, busy, dead, or left to run(). It ends, because a wait only ever
// points at a step submitted before it.
std::shared_ptr<Queue> next_needed(std::shared_ptr<Queue> queue, Waiting waiting) {
  while (queue && !queue->busy && !queue->steps.empty() && alive(*queue->device)) {
    const Step& head = queue->steps.front();
    if (ready(head)) return waiting == Waiting::kAsTest || automatic(*queue->device) ? queue : nullptr;
    if (head.kind != Kind::kWait) return nullptr;
    queue = std::shared_ptr<Queue>(head.record->queue);
  }
  return nullptr;
}

// Calls f(latch) for every latch that holds a stream.
template <class F>
void for_each_latch(F f) {
  for (const std::shared_ptr<Device>& device : machine().devices) {
    for (const std::shared_ptr<Queue>& queue : device->queues) {
      if (queue->steps.empty() || queue->steps.front().kind != Kind::kLatch) continue;
      const Latch& latch = *queue->steps.front().latch;
      if (latch.holds()) f(*device, latch);
    }
  }
}

bool latch_holds(bool automatic_only) {
  bool found = false;
  for_each_latch([&](const Device& device, const Latch&) { found |= !automatic_only || automatic(device); });
  return found;
}

// Until something changed, the next latch is due, or `limit` passed.
void wait_for_change(Lock& lock, Clock::time_point limit = Clock::time_point::max()) {
  for_each_latch([&](const Device&, const Latch& latch) { limit = std::min(limit, latch.deadline); });
  if (limit == Clock::time_point::max()) {
    machine().changed.wait(lock);
  } else {
    machine().changed.wait_until(lock, limit);
  }
}

class InKernel {
 public:
  InKernel() { ++this_thread().kernels; }
  ~InKernel() { --this_thread().kernels; }
  InKernel(const InKernel&) = delete;
  InKernel& operator=(const InKernel&) = delete;
};

// What the kernel threw, or null.
std::exception_ptr execute(const Step& step) {
  if (step.kind == Kind::kCopy) run_copies(step.copies);
  if (step.kind != Kind::kKernel) return nullptr;
  const InKernel scope;
  try {
    (*step.kernel)();
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

void finish(Step& step, Queue& queue) {
  end_copies(step.copies);
  if (step.kind == Kind::kRecord) {
    step.record->done = true;
    step.record->queue.reset();
  }
  if (step.kind == Kind::kLatch) step.latch->passed = true;
  --queue.device->pending;
  queue.busy = false;
  if (queue.destroyed && queue.steps.empty()) {
    auto& queues = queue.device->queues;
    queues.erase(std::remove_if(queues.begin(), queues.end(), [&](const auto& q) { return q.get() == &queue; }),
                 queues.end());
  }
  ++machine().finished;
  machine().changed.notify_all();
}

void fail_kernel(Lock& lock, Device& device, std::exception_ptr failure) {
  if (!device.kernel_failure) device.kernel_failure.swap(failure);
  fail_device(device, status::kLaunchFailed);
  lock.unlock();  // a second failure is dropped, and dropping it may take the GIL
  failure = nullptr;
  lock.lock();
}

void run_head(Lock& lock, const std::shared_ptr<Queue>& queue) {
  Step step = std::move(queue->steps.front());
  queue->steps.pop_front();
  queue->busy = true;
  ++machine().running;
  const Status begun = begin_copies(*queue->device, step);
  lock.unlock();
  std::exception_ptr failure = execute(step);
  step.keep_alive.reset();
  step.kernel.reset();  // before the lock, and before anyone can see that the step is done
  lock.lock();
  --machine().running;
  finish(step, *queue);
  if (begun != status::kSuccess) fail_device(*queue->device, begun);
  if (failure) fail_kernel(lock, *queue->device, std::move(failure));
}

// The end of every wait: what the calling thread polls from now on is up to date.
Status seen(Status status) {
  this_thread().seen = machine().finished;
  return status;
}

Status injected(Device& device, Entry entry) {
  auto& failures = device.failures[static_cast<int>(entry)];
  Status status = status::kSuccess;
  for (Failure& failure : failures) {
    if (failure.skip > 0) {
      --failure.skip;
    } else if (failure.times > 0) {
      --failure.times;
      if (status == status::kSuccess) status = failure.status;
    }
  }
  while (!failures.empty() && failures.front().times == 0) failures.pop_front();
  return status;
}

// Calls that say nothing of the device's health.
bool ignores_failures(Entry entry) {
  switch (entry) {
    case Entry::ctx_get_current:
    case Entry::ctx_push_current:
    case Entry::ctx_pop_current:
    case Entry::thread_exchange_capture_mode:
    case Entry::get_error_name:
    case Entry::get_error_string:
      return true;
    default:
      return false;
  }
}

bool works_after_close(Entry entry) {
  switch (entry) {
    case Entry::mem_free_host:
    case Entry::mem_host_unregister:
    case Entry::event_query:
    case Entry::event_synchronize:
    case Entry::event_destroy:
    case Entry::ctx_synchronize:
      return true;
    default:
      return ignores_failures(entry);
  }
}

// Waits while the device's launch queue is full. Runs steps to make room where the schedule lets it.
Status admit(Lock& lock, Device& device) {
  if (in_kernel()) return status::kNotPermitted;
  while (device.pending >= device.queue_depth) {
    if (const Status status = usable(device)) return status;
    std::shared_ptr<Queue> next;
    if (automatic(device)) {
      next = oldest_legal([&](const Device& other) { return &other == &device; });
      if (!next) next = oldest_legal(automatic);  // what a step of ours waits for
    }
    if (next) {
      run_head(lock, next);
    } else {
      wait_for_change(lock);
    }
  }
  return status::kSuccess;
}

void push(const std::shared_ptr<Queue>& queue, Step step) {
  step.number = machine().next_step++;
  if (step.kind == Kind::kRecord) step.record->queue = queue;
  queue->steps.push_back(std::move(step));
  ++queue->device->pending;
}

// Waits until `done`, running what `next` names meanwhile.
template <class Done, class Next>
Status wait_until(Lock& lock, Device& device, Waiting waiting, Done done, Next next) {
  if (in_kernel()) return status::kNotPermitted;
  while (!done()) {
    if (const Status status = usable(device)) return seen(status);
    std::shared_ptr<Queue> queue = device.schedule == Schedule::kRandom ? random_legal(device) : nullptr;
    if (!queue) queue = next();
    if (queue) {
      run_head(lock, queue);
    } else if (waiting == Waiting::kAsTest && machine().running == 0 && !latch_holds(false)) {
      return seen(status::kNothingCanRun);
    } else {
      wait_for_change(lock);
    }
  }
  run_eager(lock);
  return seen(device.sticky);
}

}  // namespace

const char* entry_name(Entry entry) noexcept {
  static constexpr const char* kNames[] = {
#define PINSTAGE_NAME(field, name, version, required, parameters) name,
      PINSTAGE_DRIVER_TABLE(PINSTAGE_NAME)
#undef PINSTAGE_NAME
  };
  return kNames[static_cast<int>(entry)];
}

Machine& Machine::get() noexcept {
  static Machine* const machine = [] {
    static Machine* made = new Machine;
    // A fork takes the lock along, so that the child has a machine that no missing thread is amid a change of. Of the
    // threads that wait or run a step, the child has the one that forked: from within a kernel perhaps.
    pthread_atfork([] { made->mutex.lock(); }, [] { made->mutex.unlock(); },
                   [] {
                     new (&made->changed) std::condition_variable;
                     made->running = this_thread().kernels;
                     made->mutex.unlock();
                   });
    return made;
  }();
  return *machine;
}

ThreadState& this_thread() noexcept {
  static thread_local ThreadState state;
  return state;
}

Device* current_device() noexcept {
  const std::vector<Context>& stack = this_thread().contexts;
  if (stack.empty()) return nullptr;
  const auto found = machine().contexts.find(stack.back());
  return found == machine().contexts.end() ? nullptr : found->second.get();
}

Status enter(Device& device, Entry entry) {
  ++device.calls[static_cast<int>(entry)];
  if (device.calls_left > 0 && --device.calls_left == 0) fail_device(device, device.lost_then);
  if (const Status status = injected(device, entry)) return status;
  if (device.sticky != status::kSuccess && !ignores_failures(entry)) return device.sticky;
  if (device.closed && !works_after_close(entry)) return status::kDeinitialized;
  return status::kSuccess;
}

Status usable(const Device& device) noexcept {
  if (device.sticky != status::kSuccess) return device.sticky;
  return device.closed ? status::kDeinitialized : status::kSuccess;
}

std::shared_ptr<Queue> find_queue(Device& device, Stream handle) {
  const Stream legacy = reinterpret_cast<Stream>(1);  // CU_STREAM_LEGACY
  if (handle == nullptr || handle == legacy) return device.default_queue;
  const auto found = machine().streams.find(handle);
  return found == machine().streams.end() ? nullptr : found->second;
}

Status submit(Lock& lock, const std::shared_ptr<Queue>& queue, Step& step) {
  if (!queue->capture) {
    if (const Status status = admit(lock, *queue->device)) return status;
    if (queue->destroyed) return status::kInvalidHandle;  // while we waited
    if (const Status status = usable(*queue->device)) return status;
  }
  if (const Status status = check_enqueue(*queue)) return status;
  if (queue->capture) {
    append_captured(*queue, std::move(step));
  } else {
    push(queue, std::move(step));
  }
  return status::kSuccess;
}

Status submit_all(Lock& lock, const std::shared_ptr<Queue>& queue, std::vector<Step>& steps) {
  for (std::size_t i = 0; i < steps.size(); ++i) {
    if (i == 0) {
      if (const Status status = submit(lock, queue, steps[i])) return status;
    } else if (queue->capture) {
      append_captured(*queue, std::move(steps[i]));
    } else {
      push(queue, std::move(steps[i]));
    }
  }
  return status::kSuccess;
}

void run_some_random(Lock& lock) {
  if (in_kernel()) return;
  auto& devices = machine().devices;
  for (std::size_t i = 0; i < devices.size(); ++i) {  // by index: the list may change while a step runs
    const std::shared_ptr<Device> device = devices[i];
    if (device->schedule != Schedule::kRandom) continue;
    for (std::uint64_t n = device->random() % 4; n > 0; --n) {
      const std::shared_ptr<Queue> queue = random_legal(*device);
      if (!queue) break;
      run_head(lock, queue);
    }
  }
}

void run_eager(Lock& lock) {
  if (in_kernel()) return;
  const auto eager = [](const Device& device) { return device.schedule == Schedule::kEager; };
  while (const std::shared_ptr<Queue> queue = oldest_legal(eager)) run_head(lock, queue);
}

std::size_t run_oldest(Lock& lock, Device& device, std::size_t max_steps, const Queue* only) {
  if (in_kernel()) return 0;
  std::size_t ran = 0;
  while (ran < max_steps) {
    std::shared_ptr<Queue> next;
    for (const std::shared_ptr<Queue>& queue : device.queues) {
      if (only != nullptr && queue.get() != only) continue;
      if (legal(*queue) && (!next || queue->steps.front().number < next->steps.front().number)) next = queue;
    }
    if (!next) break;
    run_head(lock, next);
    ++ran;
  }
  run_eager(lock);
  seen(status::kSuccess);
  return ran;
}

// kNothingCanRun is a claim about the polls that the caller made since its last idle(): that none of them can change
// any more. So it is never made when a step ended after that, be it on another thread and after the poll it concerns.
Status idle(Lock& lock) {
  if (in_kernel()) return status::kNotPermitted;
  if (std::shared_ptr<Queue> queue = oldest_legal(automatic)) {
    if (queue->device->schedule == Schedule::kRandom) queue = random_legal(*queue->device);
    run_head(lock, queue);
    run_eager(lock);
    return seen(status::kSuccess);
  }
  if (machine().finished != this_thread().seen) return seen(status::kSuccess);
  if (machine().running == 0 && !latch_holds(true)) return status::kNothingCanRun;
  wait_for_change(lock, Clock::now() + std::chrono::milliseconds(1));
  return seen(status::kSuccess);
}

Status wait_for_record(Lock& lock, const std::shared_ptr<Record>& record, Device& device) {
  return wait_until(
      lock, device, Waiting::kAsDriver, [&] { return record->done; },
      [&] { return next_needed(record->queue, Waiting::kAsDriver); });
}

Status wait_for_queue(Lock& lock, const std::shared_ptr<Queue>& queue, Waiting waiting) {
  return wait_until(
      lock, *queue->device, waiting, [&] { return queue->steps.empty() && !queue->busy; },
      [&] { return next_needed(queue, waiting); });
}

Status wait_for_device(Lock& lock, Device& device, Waiting waiting) {
  return wait_until(
      lock, device, waiting, [&] { return device.pending == 0; },
      [&] {
        std::shared_ptr<Queue> first;
        for (const std::shared_ptr<Queue>& queue : device.queues) {
          const std::shared_ptr<Queue> next = next_needed(queue, waiting);
          if (next && (!first || next->steps.front().number < first->steps.front().number)) first = next;
        }
        return first;
      });
}

void fail_device(Device& device, Status status) {
  if (device.sticky == status::kSuccess) device.sticky = status;
  announce_change();
}

// The thread that makes the change knows of it: nothing that it polled before needs another look for it.
void announce_change() {
  const bool up_to_date = this_thread().seen == machine().finished;
  ++machine().finished;
  if (up_to_date) this_thread().seen = machine().finished;
  machine().changed.notify_all();
}

std::vector<Step> take_steps(Device& device) {
  std::vector<Step> steps;
  for (const std::shared_ptr<Queue>& queue : device.queues) {
    for (Step& step : queue->steps) steps.push_back(std::move(step));
    queue->steps.clear();
  }
  device.pending -= steps.size();
  return steps;
}

}  // namespace pinstage::sim
