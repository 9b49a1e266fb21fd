// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// SimulatedDevice: what a test does with the machine, beside the driver table.
#include <algorithm>
#include <new>

#include "simulated_driver.h"
#include "simulated_machine.h"

namespace pinstage {
namespace {

using namespace sim;

// So that find() costs programs without a simulated device one load.
std::atomic<int> g_live{0};

Machine& machine() noexcept { return Machine::get(); }

SimulatedDevice* handle_of(const sim::Device* device) noexcept { return device == nullptr ? nullptr : device->handle; }

// Submits a step on a stream of `device`, where handle 0 is its default stream.
Status submit_to(sim::Device& device, Stream stream, Step& step) {
  Lock lock(machine().mutex);
  if (const Status status = usable(device)) return status;
  const std::shared_ptr<Queue> queue = find_queue(device, stream);
  if (!queue || queue->device != &device) return status::kInvalidHandle;
  if (queue->capture && step.kind == Kind::kLatch) return status::kStreamCaptureUnsupported;
  if (const Status status = submit(lock, queue, step)) return status;
  run_eager(lock);
  return status::kSuccess;
}

std::shared_ptr<Queue> own_queue(sim::Device& device, Stream stream) {
  const std::shared_ptr<Queue> queue = find_queue(device, stream);
  return queue && queue->device == &device ? queue : nullptr;
}

}  // namespace

void SimulatedLatch::release() {
  Lock lock(machine().mutex);
  if (latch_->released) return;
  latch_->held = latch_->holds();
  latch_->released = true;
  machine().changed.notify_all();
  run_eager(lock);
}

bool SimulatedLatch::held() const {
  const Lock lock(machine().mutex);
  return latch_->released ? latch_->held : latch_->holds();
}

bool SimulatedLatch::timed_out() const {
  const Lock lock(machine().mutex);
  return latch_->released ? !latch_->held : latch_->passed || latch_->due();
}

SimulatedDevice::SimulatedDevice(int index, Schedule schedule, std::uint64_t seed, std::size_t queue_depth,
                                 bool lying_queries)
    : device_(std::make_shared<sim::Device>(index, schedule, seed, queue_depth > 0 ? queue_depth : 1, lying_queries)) {
  const Lock lock(machine().mutex);
  device_->handle = this;
  device_->context = machine().new_handle();
  device_->scatter_module = machine().new_handle();
  device_->default_queue = std::make_shared<Queue>(device_.get(), nullptr);
  device_->queues.push_back(device_->default_queue);
  machine().contexts.emplace(device_->context, device_);
  machine().devices.push_back(device_);
  g_live.fetch_add(1, std::memory_order_relaxed);
}

SimulatedDevice::~SimulatedDevice() {
  close();
  take_kernel_failure();
}

void SimulatedDevice::close() noexcept {
  std::vector<Step> steps;  // both destroyed after the lock
  std::vector<std::shared_ptr<Capture>> captures;
  const Lock lock(machine().mutex);
  if (device_->closed) return;
  device_->closed = true;
  device_->handle = nullptr;
  captures = abandon_captures(*device_);
  steps = take_steps(*device_);
  for (const std::shared_ptr<Queue>& queue : device_->queues) {
    const auto named = machine().streams.find(queue->handle);  // a destroyed queue's handle may name another by now
    if (named == machine().streams.end() || named->second != queue) continue;
    machine().streams.erase(named);
    machine().spare_streams.push_back(queue->handle);
  }
  device_->queues.clear();
  auto& devices = machine().devices;
  devices.erase(std::find(devices.begin(), devices.end(), device_));
  g_live.fetch_sub(1, std::memory_order_relaxed);
  announce_change();
}

bool SimulatedDevice::closed() const noexcept {
  const Lock lock(machine().mutex);
  return device_->closed;
}

SimulatedDevice* SimulatedDevice::find(const void* p) noexcept {
  if (g_live.load(std::memory_order_relaxed) == 0) return nullptr;
  const Lock lock(machine().mutex);
  const HeapBlock* block = find_block(p);
  return block == nullptr ? nullptr : block->device->handle;
}

SimulatedDevice* SimulatedDevice::of_stream(Stream stream) noexcept {
  const Lock lock(machine().mutex);
  const auto found = machine().streams.find(stream);
  return found == machine().streams.end() ? nullptr : found->second->device->handle;
}

SimulatedDevice* SimulatedDevice::current() noexcept {
  if (g_live.load(std::memory_order_relaxed) == 0) return nullptr;
  const Lock lock(machine().mutex);
  return handle_of(current_device());
}

int SimulatedDevice::live() noexcept { return g_live.load(std::memory_order_relaxed); }

int SimulatedDevice::index() const noexcept { return device_->index; }

Schedule SimulatedDevice::schedule() const noexcept { return device_->schedule; }

Driver SimulatedDevice::driver() const noexcept { return driver_table(); }

Context SimulatedDevice::context() const noexcept { return device_->context; }

void SimulatedDevice::make_current() {
  std::vector<Context>& stack = this_thread().contexts;
  if (stack.empty()) {
    stack.push_back(device_->context);
  } else {
    stack.back() = device_->context;
  }
}

void SimulatedDevice::drop_current() noexcept {
  std::vector<Context>& stack = this_thread().contexts;
  stack.erase(std::remove(stack.begin(), stack.end(), device_->context), stack.end());
}

Status SimulatedDevice::create_stream(Stream* out) {
  const Lock lock(machine().mutex);
  if (const Status status = usable(*device_)) return status;
  std::vector<Stream>& spare = machine().spare_streams;
  const Stream handle = spare.empty() ? machine().new_handle() : spare.back();
  const auto queue = std::make_shared<Queue>(device_.get(), handle);
  device_->queues.push_back(queue);
  machine().streams.emplace(handle, queue);
  if (!spare.empty()) spare.pop_back();
  *out = handle;
  return status::kSuccess;
}

Status SimulatedDevice::destroy_stream(Stream stream) {
  const Lock lock(machine().mutex);
  const auto found = machine().streams.find(stream);
  if (found == machine().streams.end() || found->second->device != device_.get()) return status::kInvalidHandle;
  const std::shared_ptr<Queue> queue = found->second;
  if (queue->capture) return status::kStreamCaptureUnsupported;
  queue->destroyed = true;
  machine().streams.erase(found);
  machine().spare_streams.push_back(stream);
  auto& queues = device_->queues;
  if (queue->steps.empty() && !queue->busy) queues.erase(std::find(queues.begin(), queues.end(), queue));
  return status::kSuccess;
}

Stream SimulatedDevice::current_stream() const noexcept {
  const auto& streams = this_thread().streams;
  const auto found = streams.find(device_.get());
  return found == streams.end() ? nullptr : found->second;
}

void SimulatedDevice::set_current_stream(Stream stream) {
  if (stream == nullptr) {
    this_thread().streams.erase(device_.get());
  } else {
    this_thread().streams[device_.get()] = stream;
  }
}

Status SimulatedDevice::launch(Stream stream, Kernel kernel) {
  Step step;
  step.kind = Kind::kKernel;
  step.kernel = std::make_shared<Kernel>(std::move(kernel));
  return submit_to(*device_, stream, step);
}

Status SimulatedDevice::copy_async(DevicePtr dst, const void* src, std::size_t nbytes, Stream stream,
                                   std::shared_ptr<void> owner) {
  std::vector<Context>& stack = this_thread().contexts;
  stack.push_back(device_->context);  // stream 0 is the current context's
  const Status status = copy_keeping_alive(dst, src, nbytes, stream, std::move(owner));
  stack.pop_back();
  return status;
}

Status SimulatedDevice::hold(Stream stream, double timeout_seconds, std::shared_ptr<SimulatedLatch>* out) {
  Step step;
  step.kind = Kind::kLatch;
  step.latch = std::make_shared<Latch>();
  const std::chrono::duration<double> timeout(std::max(0.0, std::min(timeout_seconds, 1e6)));
  step.latch->deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout);
  auto latch = std::make_shared<SimulatedLatch>(step.latch);
  if (const Status status = submit_to(*device_, stream, step)) return status;
  *out = std::move(latch);
  return status::kSuccess;
}

std::size_t SimulatedDevice::run(std::size_t max_steps) {
  Lock lock(machine().mutex);
  return run_oldest(lock, *device_, max_steps, nullptr);
}

std::size_t SimulatedDevice::run(std::size_t max_steps, Stream only) {
  Lock lock(machine().mutex);
  const std::shared_ptr<Queue> queue = own_queue(*device_, only);
  return queue ? run_oldest(lock, *device_, max_steps, queue.get()) : 0;
}

std::size_t SimulatedDevice::pending() const {
  const Lock lock(machine().mutex);
  return device_->pending;
}

std::size_t SimulatedDevice::pending(Stream stream) const {
  const Lock lock(machine().mutex);
  const std::shared_ptr<Queue> queue = own_queue(*device_, stream);
  return queue ? queue->steps.size() + (queue->busy ? 1 : 0) : 0;
}

Status SimulatedDevice::synchronize() {
  Lock lock(machine().mutex);
  if (const Status status = usable(*device_)) return status;
  if (const Status status = check_unsafe_call()) return status;
  return wait_for_device(lock, *device_, Waiting::kAsTest);
}

Status SimulatedDevice::synchronize(Stream stream) {
  Lock lock(machine().mutex);
  if (const Status status = usable(*device_)) return status;
  const std::shared_ptr<Queue> queue = own_queue(*device_, stream);
  if (!queue) return status::kInvalidHandle;
  if (const Status status = check_unsafe_call()) return status;
  return wait_for_queue(lock, queue, Waiting::kAsTest);
}

Status SimulatedDevice::begin_capture(Stream stream, int mode) {
  const Lock lock(machine().mutex);
  if (const Status status = usable(*device_)) return status;
  const std::shared_ptr<Queue> queue = own_queue(*device_, stream);
  return queue ? sim::begin_capture(queue, mode) : status::kInvalidHandle;
}

Status SimulatedDevice::end_capture(Stream stream, SimulatedGraph* out) {
  std::shared_ptr<Capture> capture;  // destroyed after the lock
  Status status;
  {
    const Lock lock(machine().mutex);
    const std::shared_ptr<Queue> queue = own_queue(*device_, stream);
    status = queue ? sim::end_capture(*queue, &capture) : status::kInvalidHandle;
  }
  if (status == status::kSuccess) *out = std::make_shared<Graph>(Graph{std::move(capture->steps)});
  return status;
}

Status SimulatedDevice::replay(const SimulatedGraph& graph, Stream stream) {
  if (!graph) return status::kInvalidValue;
  std::vector<Step> steps = graph->steps;
  Lock lock(machine().mutex);
  if (const Status status = usable(*device_)) return status;
  const std::shared_ptr<Queue> queue = own_queue(*device_, stream);
  if (!queue) return status::kInvalidHandle;
  for (const Step& step : steps) {
    device_->violations +=
        static_cast<std::uint64_t>(std::count_if(step.copies.begin(), step.copies.end(), reads_freed_memory));
  }
  if (const Status status = submit_all(lock, queue, steps)) return status;
  run_eager(lock);
  return status::kSuccess;
}

void* SimulatedDevice::heap_alloc(std::size_t nbytes) {
  const auto block = std::make_shared<HeapBlock>(device_.get(), std::max<std::size_t>(nbytes, 1));
  const Lock lock(machine().mutex);
  machine().heap.emplace(reinterpret_cast<std::uintptr_t>(block->data), block);
  return block->data;
}

void SimulatedDevice::heap_free(void* p) noexcept {
  std::shared_ptr<HeapBlock> block;
  const Lock lock(machine().mutex);
  const auto found = machine().heap.find(reinterpret_cast<std::uintptr_t>(p));
  if (found == machine().heap.end()) return;
  block = std::move(found->second);
  machine().heap.erase(found);
}

bool SimulatedDevice::fail(const std::string& entry, std::uint64_t nth, Status status, std::uint64_t times) {
  const Lock lock(machine().mutex);
  for (int i = 0; i < static_cast<int>(Entry::kCount); ++i) {
    if (entry != entry_name(static_cast<Entry>(i))) continue;
    if (nth > 0 && times > 0) device_->failures[i].push_back({nth - 1, times, status});
    return true;
  }
  return false;
}

void SimulatedDevice::lose(Status status, std::uint64_t calls) {
  const Lock lock(machine().mutex);
  if (calls == 0) return fail_device(*device_, status);
  device_->calls_left = calls + 1;
  device_->lost_then = status;
}

Status SimulatedDevice::sticky_status() const noexcept {
  const Lock lock(machine().mutex);
  return device_->sticky;
}

std::exception_ptr SimulatedDevice::take_kernel_failure() noexcept {
  std::exception_ptr failure;
  const Lock lock(machine().mutex);
  failure.swap(device_->kernel_failure);
  return failure;
}

std::vector<std::pair<const char*, std::uint64_t>> SimulatedDevice::calls() const {
  std::vector<std::pair<const char*, std::uint64_t>> calls;
  const Lock lock(machine().mutex);
  for (int i = 0; i < static_cast<int>(Entry::kCount); ++i) {
    calls.emplace_back(entry_name(static_cast<Entry>(i)), device_->calls[i]);
  }
  return calls;
}

std::uint64_t SimulatedDevice::violations() const {
  const Lock lock(machine().mutex);
  return device_->violations;
}

std::size_t SimulatedDevice::host_allocations() const {
  const Lock lock(machine().mutex);
  return device_->host_ranges;
}

}  // namespace pinstage
