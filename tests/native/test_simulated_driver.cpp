// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// Streams, events, contexts, kernels and faults of the simulated driver.
#include <memory>
#include <stdexcept>

#include "simulated_fixture.h"

namespace {

using namespace pinstage;
using namespace pinstage::check;

// ---------------------------------------------------------------------------------------------------------------------
// When a copy reads its source

TEST("a copy reads its source when it runs") {
  Sim sim(Schedule::kLate);
  char* dst = sim.heap(4);
  char src[] = "old";
  CHECK_EQ(sim.copy(dst, src, 4), status::kSuccess);
  std::memcpy(src, "new", 4);
  CHECK_EQ(sim.driver.ctx_synchronize(), status::kSuccess);
  CHECK_EQ(bytes(dst, 3), "new");
}

TEST("an eager device reads the source at once") {
  Sim sim(Schedule::kEager);
  char* dst = sim.heap(4);
  char src[] = "old";
  CHECK_EQ(sim.copy(dst, src, 4), status::kSuccess);
  std::memcpy(src, "new", 4);
  CHECK_EQ(bytes(dst, 3), "old");
}

TEST("an eager device waits for its latch") {
  Sim sim(Schedule::kEager);
  const Stream stream = sim.stream();
  std::shared_ptr<SimulatedLatch> latch;
  CHECK_EQ(sim.device.hold(stream, 60, &latch), status::kSuccess);
  sim.log('a', stream);
  CHECK_EQ(sim.text, "");
  latch->release();
  CHECK_EQ(sim.text, "a");
}

// ---------------------------------------------------------------------------------------------------------------------
// Events

TEST("a never-recorded event is done") {
  Sim sim(Schedule::kLate);
  CHECK_EQ(sim.driver.event_query(sim.event()), status::kSuccess);
  CHECK_EQ(sim.driver.event_synchronize(sim.event()), status::kSuccess);
}

TEST("a query never runs a step on late and manual devices") {
  for (const Schedule schedule : {Schedule::kLate, Schedule::kManual}) {
    Sim sim(schedule);
    const Event event = sim.record(nullptr);
    for (int i = 0; i < 10; ++i) CHECK_EQ(sim.driver.event_query(event), status::kNotReady);
    CHECK_EQ(sim.device.pending(), 1);
  }
}

TEST("an event that is done stays done until it is recorded anew") {
  Sim sim(Schedule::kLate);
  const Event event = sim.record(nullptr);
  CHECK_EQ(sim.driver.event_synchronize(event), status::kSuccess);
  sim.log('a', nullptr);
  CHECK_EQ(sim.driver.event_query(event), status::kSuccess);
  CHECK_EQ(sim.driver.event_record(event, nullptr), status::kSuccess);
  CHECK_EQ(sim.driver.event_query(event), status::kNotReady);
}

TEST("a wait runs only the steps that it needs") {
  Sim sim(Schedule::kLate);
  const Stream one = sim.stream(), other = sim.stream();
  sim.log('x', other);
  sim.log('a', one);
  const Event event = sim.record(one);
  sim.log('b', one);
  CHECK_EQ(sim.driver.event_synchronize(event), status::kSuccess);
  CHECK_EQ(sim.text, "a");
  CHECK_EQ(sim.device.pending(), 2);
}

TEST("a stream wait is for the record that it found") {
  Sim sim(Schedule::kLate);
  const Stream producer = sim.stream(), consumer = sim.stream();
  sim.log('p', producer);
  const Event event = sim.record(producer);
  CHECK_EQ(sim.driver.stream_wait_event(consumer, event, 0), status::kSuccess);
  sim.log('c', consumer);
  sim.log('q', producer);
  CHECK_EQ(sim.driver.event_record(event, producer), status::kSuccess);
  CHECK_EQ(sim.device.synchronize(consumer), status::kSuccess);
  CHECK_EQ(sim.text, "pc");
}

TEST("a stream waits for another device's event") {
  Sim sim(Schedule::kLate);
  SimulatedDevice second(1, Schedule::kLate, 0);
  Event event;
  bool ran = false;
  {
    const Current current(second);
    CHECK_EQ(sim.driver.event_create(&event, 0), status::kSuccess);
    CHECK_EQ(second.launch(nullptr, [&] { ran = true; }), status::kSuccess);
    CHECK_EQ(sim.driver.event_record(event, nullptr), status::kSuccess);
  }
  CHECK_EQ(sim.driver.stream_wait_event(nullptr, event, 0), status::kSuccess);
  CHECK_EQ(sim.driver.ctx_synchronize(), status::kSuccess);
  CHECK(ran);
}

TEST("a destroyed event is an invalid handle, and its wait goes on") {
  Sim sim(Schedule::kLate);
  const Stream producer = sim.stream(), consumer = sim.stream();
  sim.log('p', producer);
  const Event event = sim.record(producer);
  CHECK_EQ(sim.driver.stream_wait_event(consumer, event, 0), status::kSuccess);
  sim.log('c', consumer);
  CHECK_EQ(sim.driver.event_destroy(event), status::kSuccess);
  CHECK_EQ(sim.driver.event_query(event), status::kInvalidHandle);
  CHECK_EQ(sim.driver.event_record(event, producer), status::kInvalidHandle);
  CHECK_EQ(sim.driver.event_destroy(event), status::kInvalidHandle);
  CHECK_EQ(sim.device.synchronize(consumer), status::kSuccess);
  CHECK_EQ(sim.text, "pc");
}

TEST("lying queries say done while the work is queued") {
  Sim sim(Schedule::kLate, 0, 16, true);
  sim.log('a', nullptr);
  CHECK_EQ(sim.driver.event_query(sim.record(nullptr)), status::kSuccess);
  CHECK_EQ(sim.text, "");
}

// ---------------------------------------------------------------------------------------------------------------------
// Contexts and streams

TEST("a thread without a current context gets 201") {
  SimulatedDevice device(0, Schedule::kLate, 0);
  const Driver driver = device.driver();
  void* host;
  Event event;
  int capturing;
  Context context = &context;
  CHECK_EQ(driver.ctx_get_current(&context), status::kSuccess);
  CHECK(context == nullptr);
  CHECK_EQ(driver.mem_host_alloc(&host, 16, 0), status::kInvalidContext);
  CHECK_EQ(driver.event_create(&event, 0), status::kInvalidContext);
  CHECK_EQ(driver.stream_is_capturing(nullptr, &capturing), status::kInvalidContext);
  CHECK_EQ(driver.memcpy_htod_async(0, "x", 1, nullptr), status::kInvalidContext);
  CHECK_EQ(driver.ctx_pop_current(&context), status::kInvalidContext);
  CHECK_EQ(driver.ctx_synchronize(), status::kInvalidContext);
}

TEST("stream 0 is the current context's") {
  Sim sim(Schedule::kManual);
  SimulatedDevice second(1, Schedule::kManual, 0);
  {
    const Current current(second);
    sim.copy(sim.heap(1), "x", 1, nullptr);
  }
  CHECK_EQ(sim.device.pending(), 0);
  CHECK_EQ(second.pending(), 1);
}

TEST("an event cannot be recorded on another device's stream") {
  Sim sim(Schedule::kLate);
  SimulatedDevice second(1, Schedule::kLate, 0);
  const Event event = sim.event();
  const Current current(second);
  CHECK_EQ(sim.driver.event_record(event, nullptr), status::kInvalidHandle);
}

TEST("a stream's handle is recycled and its pending work still runs") {
  Sim sim(Schedule::kLate);
  const Stream first = sim.stream();
  sim.log('a', first);
  CHECK_EQ(sim.device.destroy_stream(first), status::kSuccess);
  CHECK_EQ(sim.copy(sim.heap(1), "x", 1, first), status::kInvalidHandle);
  const Stream second = sim.stream();
  CHECK(first == second);
  sim.log('b', second);
  CHECK_EQ(sim.device.synchronize(second), status::kSuccess);
  CHECK_EQ(sim.text, "b");
  CHECK_EQ(sim.device.synchronize(), status::kSuccess);
  CHECK_EQ(sim.text, "ba");
}

TEST("the current stream belongs to the thread and the device") {
  Sim sim(Schedule::kLate);
  SimulatedDevice second(1, Schedule::kLate, 0);
  const Stream stream = sim.stream();
  sim.device.set_current_stream(stream);
  CHECK(sim.device.current_stream() == stream);
  CHECK(second.current_stream() == nullptr);
  run_together(1, [&](int) { CHECK(sim.device.current_stream() == nullptr); });
  sim.device.set_current_stream(nullptr);
}

// ---------------------------------------------------------------------------------------------------------------------
// Kernels and faults

TEST("a kernel may query and destroy, but not enqueue or wait") {
  Sim sim(Schedule::kLate);
  const Event event = sim.event();
  char* dst = sim.heap(1);
  std::vector<Status> refused;
  CHECK_EQ(sim.device.launch(nullptr,
                             [&] {
                               refused = {sim.copy(dst, "x", 1), sim.driver.ctx_synchronize(), sim.driver.idle(0),
                                          sim.device.launch(nullptr, [] {})};
                               CHECK_EQ(sim.driver.event_query(event), status::kSuccess);
                               CHECK_EQ(sim.driver.event_destroy(event), status::kSuccess);
                             }),
           status::kSuccess);
  CHECK_EQ(sim.device.synchronize(), status::kSuccess);
  CHECK(refused == std::vector<Status>(4, Status{status::kNotPermitted}));
}

TEST("a kernel that throws fails the device for good") {
  Sim sim(Schedule::kLate);
  CHECK_EQ(sim.device.launch(nullptr, [] { throw std::domain_error("from the kernel"); }), status::kSuccess);
  sim.log('a', nullptr);
  CHECK_EQ(sim.driver.ctx_synchronize(), status::kLaunchFailed);
  CHECK_EQ(sim.copy(sim.heap(1), "x", 1), status::kLaunchFailed);
  CHECK_EQ(sim.text, "");
  CHECK(throws<std::domain_error>([&] { std::rethrow_exception(sim.device.take_kernel_failure()); }));
}

TEST("a kernel is destroyed when it ran, and when its device closes") {
  const auto token = std::make_shared<int>(0);
  {
    Sim sim(Schedule::kManual);
    for (int i = 0; i < 2; ++i) CHECK_EQ(sim.device.launch(nullptr, [token] {}), status::kSuccess);
    CHECK_EQ(token.use_count(), 3);
    CHECK_EQ(sim.device.run(1), 1);
    CHECK_EQ(token.use_count(), 2);
  }
  CHECK_EQ(token.use_count(), 1);
}

TEST("the nth call fails, has no effect, and the next succeeds") {
  Sim sim(Schedule::kEager);
  CHECK(sim.device.fail("cuMemcpyHtoDAsync", 2, status::kOutOfMemory, 2));
  CHECK(!sim.device.fail("cuNoSuchCall", 1, status::kOutOfMemory));
  char* dst = sim.heap(4);
  const Status expected[] = {status::kSuccess, status::kOutOfMemory, status::kOutOfMemory, status::kSuccess};
  for (int i = 0; i < 4; ++i) CHECK_EQ(sim.copy(dst + i, "abcd" + i, 1), expected[i]);
  CHECK_EQ(bytes(dst, 4), "a" + poison(2) + "d");
  for (const auto& [name, count] : sim.device.calls()) {
    if (std::string(name) == "cuMemcpyHtoDAsync") CHECK_EQ(count, 4);
  }
}

TEST("a failed record leaves the event as it was") {
  Sim sim(Schedule::kLate);
  const Event event = sim.event();
  CHECK(sim.device.fail("cuEventRecord", 1, status::kUnknown));
  CHECK_EQ(sim.driver.event_record(event, nullptr), status::kUnknown);
  CHECK_EQ(sim.driver.event_query(event), status::kSuccess);
}

TEST("a failed destroy or free destroys nothing") {
  Sim sim(Schedule::kLate);
  const Event event = sim.event();
  char* host = sim.host(16);
  CHECK(sim.device.fail("cuEventDestroy", 1, status::kUnknown));
  CHECK(sim.device.fail("cuMemFreeHost", 1, status::kUnknown));
  CHECK_EQ(sim.driver.event_destroy(event), status::kUnknown);
  CHECK_EQ(sim.driver.mem_free_host(host), status::kUnknown);
  CHECK_EQ(sim.device.host_allocations(), 1);
  CHECK_EQ(sim.driver.event_destroy(event), status::kSuccess);
  CHECK_EQ(sim.driver.mem_free_host(host), status::kSuccess);
}

TEST("a lost device runs nothing, answers everything with its error, and leaves others alone") {
  Sim sim(Schedule::kLate);
  Sim other(Schedule::kLate);
  const Event event = [&] {
    const Current current(sim.device);
    sim.log('a', nullptr);
    return sim.record(nullptr);
  }();
  sim.device.lose();
  CHECK_EQ(sim.driver.event_query(event), status::kLaunchFailed);
  CHECK_EQ(sim.driver.event_synchronize(event), status::kLaunchFailed);
  CHECK_EQ(sim.device.synchronize(), status::kLaunchFailed);
  CHECK_EQ(sim.device.run(), 0);
  CHECK_EQ(sim.text, "");
  other.log('b', nullptr);
  CHECK_EQ(other.driver.ctx_synchronize(), status::kSuccess);
  CHECK_EQ(other.text, "b");
}

TEST("statuses have names") {
  Sim sim(Schedule::kLate);
  const char* name = nullptr;
  CHECK_EQ(sim.driver.get_error_name(status::kStreamCaptureImplicit, &name), status::kSuccess);
  CHECK_EQ(std::string(name), "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT");
  CHECK_EQ(sim.driver.get_error_string(12345, &name), status::kSuccess);
  CHECK_EQ(std::string(name), "unknown error 12345");
}

TEST("a closed device still frees and destroys, and does nothing else") {
  SimulatedDevice device(0, Schedule::kLate, 0);
  const Driver driver = device.driver();
  const Current current(device);
  void* host;
  Event done, pending;
  CHECK_EQ(driver.mem_host_alloc(&host, 16, 0), status::kSuccess);
  CHECK_EQ(driver.event_create(&done, 0), status::kSuccess);
  CHECK_EQ(driver.event_create(&pending, 0), status::kSuccess);
  CHECK_EQ(driver.event_record(done, nullptr), status::kSuccess);
  CHECK_EQ(driver.ctx_synchronize(), status::kSuccess);
  CHECK_EQ(driver.event_record(pending, nullptr), status::kSuccess);
  const int live = SimulatedDevice::live();
  device.close();
  CHECK_EQ(SimulatedDevice::live(), live - 1);
  CHECK(SimulatedDevice::current() == nullptr);
  CHECK_EQ(driver.event_query(done), status::kSuccess);
  CHECK_EQ(driver.event_query(pending), status::kDeinitialized);
  CHECK_EQ(driver.event_synchronize(pending), status::kDeinitialized);
  CHECK_EQ(driver.event_record(done, nullptr), status::kDeinitialized);
  CHECK_EQ(driver.event_destroy(pending), status::kSuccess);
  CHECK_EQ(driver.event_destroy(done), status::kSuccess);
  CHECK_EQ(driver.mem_free_host(host), status::kSuccess);
  CHECK_EQ(device.host_allocations(), 0);
}

}  // namespace
