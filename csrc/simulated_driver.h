// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// The simulated driver: CUDA's asynchronous semantics on a machine without a GPU.
//
// A SimulatedDevice fills the same Driver table as a GPU, so the code above runs unchanged and can be raced anywhere.
// What it models is *when* things happen, for that is what breaks staging code:
//
//   * a stream is a queue of steps (copy, event record, event wait, kernel, latch) that run in order, later;
//   * a copy reads its host source when its step runs, never when it is enqueued;
//   * an event is done once the step of its last record ran; a never-recorded event is done;
//   * a full queue blocks the call that submits; stream handles are recycled; stream 0 is the current context's.
//
// Nothing runs on a thread of its own. Who runs the steps is the schedule:
//
//   late    whoever waits, and only the steps that the wait needs: every copy reads its source at the last legal moment
//   eager   whoever enqueues, at once
//   random  every driver call runs zero to three legal steps, chosen by the seed; a wait runs further ones
//   manual  run() alone
//
// A step is legal when it is the next of its stream and what it waits for has happened. Copies and kernels run under
// no lock of the machine. A kernel may query and destroy, but a call from it that enqueues or waits fails with 800.
//
// Where CUDA leaves a choice, the harsher one is taken: pageable sources are read late too, the copies of a batch and
// the blocks of the kernel of scatter.h (the only one of the driver's) run in any order, freed memory that a queued
// copy still reads is counted in violations() and reads as poison.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "driver.h"

namespace pinstage {

namespace sim {
struct Device;  // what outlives the handle: simulated_machine.h
struct Latch;
struct Graph;
}  // namespace sim

enum class Schedule { kLate, kEager, kRandom, kManual };

// The body of a kernel. It runs on whichever thread advances the stream, under no lock. If it throws, the device fails
// with 719 and keeps the exception. Called once per launch or replay; destroyed outside the machine's lock, on any
// thread.
using Kernel = std::function<void()>;

// A step that holds its stream until released, or until its deadline: a test may fail, but never hangs on it.
class SimulatedLatch {
 public:
  explicit SimulatedLatch(std::shared_ptr<sim::Latch> latch) : latch_(std::move(latch)) {}

  void release();     // May run steps (schedule eager). Repeating it changes nothing.
  bool held() const;  // Released before the deadline (or not yet due), and the stream had not passed it.
  bool timed_out() const;

 private:
  std::shared_ptr<sim::Latch> latch_;
};

// A captured sequence of steps. Holds what they use alive; replay() enqueues them anew.
using SimulatedGraph = std::shared_ptr<sim::Graph>;

class SimulatedDevice {
 public:
  static constexpr std::size_t kQueueDepth = 1024;  // as a real launch queue: about a thousand
  static constexpr std::size_t kEveryStep = ~static_cast<std::size_t>(0);

  SimulatedDevice(int index, Schedule schedule, std::uint64_t seed, std::size_t queue_depth = kQueueDepth,
                  bool lying_queries = false);
  ~SimulatedDevice();
  SimulatedDevice(const SimulatedDevice&) = delete;
  SimulatedDevice& operator=(const SimulatedDevice&) = delete;

  // Drops the pending steps without running them and takes the device off the machine. Afterwards its tensors are still
  // memory, its contexts can be made current, finished events query as done, and host memory and events can be freed;
  // whatever would need the device returns kDeinitialized. Neither blocks nor runs steps.
  void close() noexcept;
  bool closed() const noexcept;

  // --- Finding a device ---
  static SimulatedDevice* find(const void* p) noexcept;       // whose heap holds p; one relaxed load if there is none
  static SimulatedDevice* of_stream(Stream stream) noexcept;  // a created stream's; null for stream 0 and unknown ones
  static SimulatedDevice* current() noexcept;                 // of this thread's current context, else null
  static int live() noexcept;                                 // devices not closed

  int index() const noexcept;
  Schedule schedule() const noexcept;
  Driver driver() const noexcept;  // one table for all simulated devices: calls find theirs by context and handle
  Context context() const noexcept;

  // A back pointer for the core's Device; the simulation never reads it.
  void* owner() const noexcept { return owner_.load(std::memory_order_acquire); }
  void set_owner(void* owner) noexcept { owner_.store(owner, std::memory_order_release); }

  void make_current();           // like cuCtxSetCurrent
  void drop_current() noexcept;  // removes its context from this thread's stack

  // --- Streams. Here, unlike in the table, handle 0 is this device's default stream ---
  Status create_stream(Stream* out);
  Status destroy_stream(Stream stream);    // pending work still runs; the handle is given out again
  Stream current_stream() const noexcept;  // of this thread
  void set_current_stream(Stream stream);

  // --- Work ---
  Status launch(Stream stream, Kernel kernel);
  // The bare copy, as the negative control of race tests. `owner`, if any, keeps the source alive until it was read;
  // like a kernel it is destroyed outside the machine's lock, on any thread.
  Status copy_async(DevicePtr dst, const void* src, std::size_t nbytes, Stream stream, std::shared_ptr<void> owner);
  Status hold(Stream stream, double timeout_seconds, std::shared_ptr<SimulatedLatch>* out);

  // Runs up to `max_steps` legal steps, the oldest first, whatever the schedule. Never waits. Returns how many ran.
  std::size_t run(std::size_t max_steps = kEveryStep);
  std::size_t run(std::size_t max_steps, Stream only);
  // Steps that have not finished.
  std::size_t pending() const;
  std::size_t pending(Stream stream) const;
  // Runs and waits until the device (or stream) is idle, in manual too. Waits for latches and for other threads;
  // kNothingCanRun when what remains waits for something that nobody can run from here.
  Status synchronize();
  Status synchronize(Stream stream);

  // --- Capture ---
  Status begin_capture(Stream stream, int mode);
  Status end_capture(Stream stream, SimulatedGraph* out);
  Status replay(const SimulatedGraph& graph, Stream stream);

  // --- Heap: a block lives until it is freed and no queued step or graph uses it ---
  void* heap_alloc(std::size_t nbytes);     // filled with kPoison; 256-byte aligned; throws std::bad_alloc
  static void heap_free(void* p) noexcept;  // also after close()
  static constexpr unsigned char kPoison = 0xCD;

  // --- Faults and observation
  // ----------------------------------------------------------------------------------------- The calls number nth ..
  // nth+times-1 from now (1-based) of a CUDA entry point, named as in the table, return `status` and do nothing else.
  // False when the table has no such entry.
  bool fail(const std::string& entry, std::uint64_t nth, Status status, std::uint64_t times = 1);
  // Nothing runs any more, every call returns `status`: from now on, or only after `calls` further calls of the table.
  void lose(Status status = status::kLaunchFailed, std::uint64_t calls = 0);
  Status sticky_status() const noexcept;  // what lose() or a failed kernel left
  // What the first failed kernel threw, once: a second call returns null. The device stays failed.
  std::exception_ptr take_kernel_failure() noexcept;
  std::vector<std::pair<const char*, std::uint64_t>> calls() const;  // every entry point by CUDA name
  std::uint64_t violations() const;      // host memory freed or unregistered under a copy that had yet to read it
  std::size_t host_allocations() const;  // live blocks of cuMemHostAlloc and cuMemHostRegister

 private:
  std::shared_ptr<sim::Device> device_;
  std::atomic<void*> owner_{nullptr};
};

}  // namespace pinstage
