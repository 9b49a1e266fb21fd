// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// What the simulated driver is made of: one machine with its devices, streams, events and memory, under one mutex.
//
// Rules that every function here keeps:
//  - `Lock` is held on entry and on return; run_head() and the waits let go of it in between, nothing else does;
//  - steps own kernels, whose destruction may take the GIL: a step is destroyed without the lock, never under it;
//  - the table's functions throw nothing.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <unordered_map>

#include "scatter_kernel.h"
#include "simulated_driver.h"

namespace pinstage::sim {

using Lock = std::unique_lock<std::mutex>;
using Clock = std::chrono::steady_clock;

// Statuses that only the simulation returns. Values as in cuda.h.
inline constexpr Status kIllegalState = 401;
inline constexpr Status kIllegalAddress = 700;
inline constexpr Status kHostMemoryNotRegistered = 713;
inline constexpr Status kCaptureUnmatched = 902;
inline constexpr Status kCaptureMerge = 903;
inline constexpr Status kCaptureUnjoined = 904;
inline constexpr Status kCaptureIsolation = 905;
inline constexpr Status kCaptureWrongThread = 908;

enum class Entry : int {
#define PINSTAGE_ENTRY(field, name, version, required, parameters) field,
  PINSTAGE_DRIVER_TABLE(PINSTAGE_ENTRY)
#undef PINSTAGE_ENTRY
      kCount
};
const char* entry_name(Entry entry) noexcept;

struct Queue;
struct Capture;

// --- Memory ---

struct HeapBlock {
  HeapBlock(Device* owner, std::size_t size);  // throws std::bad_alloc
  ~HeapBlock();
  HeapBlock(const HeapBlock&) = delete;
  HeapBlock& operator=(const HeapBlock&) = delete;

  Device* device;
  char* data;
  std::size_t nbytes;
};

// Pinned memory: allocated by us, or registered by the caller.
struct HostRange {
  Device* device;
  char* data;
  std::size_t nbytes;
  bool allocated;
  bool alive = true;  // false: freed or unregistered; copies that have yet to run must not read it
  int readers = 0;    // copies that are reading it this moment
};

// Rows of a copy. 1-D is one row, 2-D one plane.
struct Extent {
  std::size_t width = 0, height = 1, depth = 1;
  std::size_t src_pitch = 0, src_plane = 0, dst_pitch = 0, dst_plane = 0;
};

struct Copy {
  const char* src = nullptr;
  char* dst = nullptr;
  Extent extent;
  std::vector<std::shared_ptr<HostRange>> sources;  // pinned memory that it reads; empty for pageable memory
  std::vector<std::shared_ptr<HeapBlock>> blocks;   // device memory that it keeps alive
  std::shared_ptr<char> snapshot;                   // the source, where the call itself had to read it
  bool poisoned = false;                            // its source was freed: decided when the step begins
};

// The arguments of a launch of scatter_kernel.h.
struct ScatterLaunch {
  const char* slot;
  const ScatterPiece* pieces;
  DevicePtr first, end;
  unsigned count;
};

// --- Steps and queues ---

// One record of an event. The event points at its last one; a wait keeps the one it found.
struct Record {
  bool done = false;
  std::shared_ptr<Queue> queue;  // where the step is; null once done
};

struct Latch {
  Clock::time_point deadline;
  bool released = false;
  bool passed = false;  // the stream went on
  bool held = false;    // set by the first release

  bool due() const { return Clock::now() >= deadline; }
  bool holds() const { return !released && !passed && !due(); }
};

enum class Kind { kCopy, kRecord, kWait, kKernel, kLatch };

struct Step {
  Kind kind = Kind::kKernel;
  std::uint64_t number = 0;              // order of submission over the whole machine
  std::vector<Copy> copies;              // unordered
  std::optional<ScatterLaunch> scatter;  // the copies are what its pieces say when the step runs
  std::shared_ptr<Record> record;
  std::shared_ptr<Latch> latch;
  std::shared_ptr<Kernel> kernel;
  std::shared_ptr<void> keep_alive;  // what a copy's source belongs to, where the caller gave it
};

// A stream without its handle: a destroyed one lives on until its steps ran, while the handle already names another.
struct Queue {
  Queue(Device* owner, Stream name) : device(owner), handle(name), id(next_id()) {}

  Device* const device;
  const Stream handle;
  const unsigned long long id;  // never given twice, unlike the handle
  bool destroyed = false;
  bool busy = false;  // a step is being run
  std::deque<Step> steps;

  std::shared_ptr<Capture> capture;
  std::vector<bool> captured_before;  // which captured steps this stream's next one comes after

 private:
  static unsigned long long next_id() {
    static std::atomic<unsigned long long> last{0};
    return ++last;
  }
};

// --- Capture ---

struct Capture {
  Device* device;
  int mode;
  std::thread::id thread;
  Queue* origin;
  bool valid = true;
  bool ended = false;
  std::vector<Step> steps;  // in an order that respects their dependencies
};

struct Graph {
  std::vector<Step> steps;
};

struct EventState {
  Device* device;
  std::shared_ptr<Record> record;
  // Set by a record inside a capture, until a record outside of one.
  std::shared_ptr<Capture> capture;
  std::vector<bool> captured_before;
};

// --- Device and machine ---

struct Failure {
  std::uint64_t skip;   // calls that still succeed
  std::uint64_t times;  // then so many fail
  Status status;
};

struct Device {
  Device(int device_index, Schedule when, std::uint64_t seed, std::size_t depth, bool lying)
      : index(device_index), schedule(when), queue_depth(depth), lying_queries(lying), random(seed) {}

  const int index;
  const Schedule schedule;
  const std::size_t queue_depth;
  const bool lying_queries;
  Context context = nullptr;
  void* scatter_module = nullptr;     // and its function: handles, never dereferenced
  SimulatedDevice* handle = nullptr;  // null once closed
  bool closed = false;
  Status sticky = status::kSuccess;
  std::exception_ptr kernel_failure;  // like a kernel, destroyed without the lock: by ~SimulatedDevice
  std::mt19937_64 random;
  std::shared_ptr<Queue> default_queue;
  std::vector<std::shared_ptr<Queue>> queues;  // default_queue first; destroyed ones while they have steps
  std::size_t pending = 0;                     // steps queued or being run
  std::uint64_t calls[static_cast<int>(Entry::kCount)] = {};
  std::deque<Failure> failures[static_cast<int>(Entry::kCount)];
  std::uint64_t calls_left = 0;  // the device is lost, with `lost_then`, when this comes to 0 again
  Status lost_then = status::kSuccess;
  std::uint64_t violations = 0;
  std::size_t host_ranges = 0;
};

struct Machine {
  std::mutex mutex;
  std::condition_variable changed;  // a step ended, a latch was released, a device was lost or closed

  std::vector<std::shared_ptr<Device>> devices;                   // open ones
  std::unordered_map<Context, std::shared_ptr<Device>> contexts;  // every one ever made: threads keep them
  std::unordered_map<Stream, std::shared_ptr<Queue>> streams;
  std::vector<Stream> spare_streams;  // last in, first out, as real handles are
  std::unordered_map<Event, EventState> events;
  std::vector<std::shared_ptr<Capture>> captures;  // not ended
  std::map<std::uintptr_t, std::shared_ptr<HeapBlock>> heap;
  std::map<std::uintptr_t, std::shared_ptr<HostRange>> host;
  std::uint64_t next_step = 0;
  std::uint64_t finished = 0;               // steps that ended, and what else may end a wait
  std::uintptr_t next_handle = 0x51000000;  // contexts, streams and events: numbers, never dereferenced
  int running = 0;                          // steps being run, on any thread

  // Never destroyed: threads and tensors may outlive main().
  static Machine& get() noexcept;
  void* new_handle() noexcept { return reinterpret_cast<void*>(next_handle += 16); }
};

// This thread's view.
struct ThreadState {
  std::vector<Context> contexts;  // the stack of current ones
  int capture_mode = kCaptureModeGlobal;
  int kernels = 0;         // that this thread is inside of
  std::uint64_t seen = 0;  // Machine::finished when idle() or run() last returned
  std::unordered_map<const Device*, Stream> streams;
};
ThreadState& this_thread() noexcept;

// --- simulated_machine.cpp: which step may run, and running it ---

Device* current_device() noexcept;
// Counts the call. Returns what the call must return without doing anything (injected, sticky, closed), or success.
Status enter(Device& device, Entry entry);
// As enter(), for what has no entry in the table.
Status usable(const Device& device) noexcept;
std::shared_ptr<Queue> find_queue(Device& device, Stream handle);  // 0: the device's default stream; null: unknown

// Blocks while the launch queue is full, then puts the step behind the queue's others, or into its capture.
Status submit(Lock& lock, const std::shared_ptr<Queue>& queue, Step& step);
Status submit_all(Lock& lock, const std::shared_ptr<Queue>& queue, std::vector<Step>& steps);  // as one command

void run_some_random(Lock& lock);  // at the start of every driver call
void run_eager(Lock& lock);        // at the end of every call that may have made a step legal
std::size_t run_oldest(Lock& lock, Device& device, std::size_t max_steps, const Queue* only);
Status idle(Lock& lock);

Status wait_for_record(Lock& lock, const std::shared_ptr<Record>& record, Device& device);
// A wait of the driver waits for run() on a device with schedule manual; a wait of the test runs its steps itself, and
// gives up when nothing can.
enum class Waiting { kAsDriver, kAsTest };
Status wait_for_queue(Lock& lock, const std::shared_ptr<Queue>& queue, Waiting waiting);
Status wait_for_device(Lock& lock, Device& device, Waiting waiting);

void fail_device(Device& device, Status status);
void announce_change();  // of a kind that may end a wait
// Takes what has not run off a device that closes. The caller destroys it without the lock.
std::vector<Step> take_steps(Device& device);

// --- simulated_driver.cpp: the table ---

Driver driver_table() noexcept;
// cuMemcpyHtoDAsync that also keeps its source alive until it ran, as torch's allocators do. The bytes stay unguarded.
Status copy_keeping_alive(DevicePtr dst, const void* src, std::size_t nbytes, Stream stream,
                          std::shared_ptr<void> owner);
// simulated_errors.cpp. "unknown error N" for statuses that the simulation does not return by itself.
const char* error_name(Status status);
const char* error_text(Status status);

// --- simulated_memory.cpp: the heap, pinned memory, and the copies between them ---

HeapBlock* find_block(const void* p);
const HostRange* find_host(const void* p);
// Checks the ranges and finds who must stay alive. kInvalidValue: out of bounds, or a row over two registrations.
Status make_copy(std::uintptr_t dst, std::uintptr_t src, const Extent& extent, Copy* out);
void take_snapshot(Copy& copy);  // of a 1-D source: reads it now
// The copies that the pieces say now, from those that they said before. kIllegalAddress: one is out of bounds. One that
// the kernel skips is a copy of nothing.
Status make_scatter(const ScatterLaunch& launch, std::vector<Copy>* copies);
Status begin_copies(Device& device, Step& step);
void run_copies(const std::vector<Copy>& copies) noexcept;  // without the lock
void end_copies(const std::vector<Copy>& copies);
bool reads_freed_memory(const Copy& copy);
Status host_alloc(Device& device, void** out, std::size_t nbytes);
Status host_register(Device& device, void* p, std::size_t nbytes);
Status host_release(Lock& lock, void* p, bool allocated);

// --- simulated_capture.cpp: the rules of stream capture ---

Status check_unsafe_call();                // 900, and the captures concerned are broken
Status check_enqueue(const Queue& queue);  // 906 on stream 0 beside a capture; 901 in a broken one
Status capture_status(const Queue& queue, int* out);
void append_captured(Queue& queue, Step step);
void record_captured(const Queue& queue, EventState& event);
Status wait_captured(Queue& queue, const EventState& event);
Status begin_capture(const std::shared_ptr<Queue>& queue, int mode);
// Ends the capture, broken or not, and hands it out: its steps are destroyed by the caller, without the lock.
Status end_capture(Queue& queue, std::shared_ptr<Capture>* out);
std::vector<std::shared_ptr<Capture>> abandon_captures(const Device& device);

}  // namespace pinstage::sim
