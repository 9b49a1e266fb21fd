// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// Stream capture on the simulated driver.
#include "simulated_fixture.h"

namespace {

using namespace pinstage;
using namespace pinstage::check;

constexpr int kModes[] = {kCaptureModeGlobal, kCaptureModeThreadLocal, kCaptureModeRelaxed};

TEST("a captured copy runs at each replay and reads its source then") {
  Sim sim(Schedule::kLate);
  const Stream stream = sim.stream();
  char* dst = sim.heap(4);
  char src[] = "one";
  SimulatedGraph graph;
  CHECK_EQ(sim.device.begin_capture(stream, kCaptureModeGlobal), status::kSuccess);
  CHECK_EQ(sim.copy(dst, src, 4, stream), status::kSuccess);
  CHECK_EQ(sim.device.pending(), 0);
  CHECK_EQ(sim.device.end_capture(stream, &graph), status::kSuccess);
  for (const char* text : {"two", "six"}) {
    CHECK_EQ(sim.device.replay(graph, stream), status::kSuccess);
    std::memcpy(src, text, 4);
    CHECK_EQ(sim.device.synchronize(), status::kSuccess);
    CHECK_EQ(bytes(dst, 3), text);
  }
}

TEST("a capture tells its state") {
  Sim sim(Schedule::kLate);
  const Stream stream = sim.stream();
  int state = -1;
  CHECK_EQ(sim.driver.stream_is_capturing(stream, &state), status::kSuccess);
  CHECK_EQ(state, kCaptureStatusNone);
  CHECK_EQ(sim.device.begin_capture(nullptr, kCaptureModeGlobal), status::kStreamCaptureUnsupported);
  CHECK_EQ(sim.device.begin_capture(stream, kCaptureModeGlobal), status::kSuccess);
  CHECK_EQ(sim.driver.stream_is_capturing(stream, &state), status::kSuccess);
  CHECK_EQ(state, kCaptureStatusActive);
  CHECK_EQ(sim.driver.event_query(sim.event()), status::kStreamCaptureUnsupported);
  CHECK_EQ(sim.driver.stream_is_capturing(stream, &state), status::kSuccess);
  CHECK_EQ(state, kCaptureStatusInvalidated);
  CHECK_EQ(sim.copy(sim.heap(1), "x", 1, stream), status::kStreamCaptureInvalidated);
  SimulatedGraph graph;
  CHECK_EQ(sim.device.end_capture(stream, &graph), status::kStreamCaptureInvalidated);
  CHECK(graph == nullptr);
  CHECK_EQ(sim.copy(sim.heap(1), "x", 1, stream), status::kSuccess);
}

TEST("a stream that waits for a captured event joins the capture") {
  Sim sim(Schedule::kLate);
  const Stream main = sim.stream(), side = sim.stream();
  SimulatedGraph graph;
  CHECK_EQ(sim.device.begin_capture(main, kCaptureModeGlobal), status::kSuccess);
  sim.log('a', main);
  CHECK_EQ(sim.driver.stream_wait_event(side, sim.record(main), 0), status::kSuccess);
  sim.log('b', side);
  CHECK_EQ(sim.driver.stream_wait_event(main, sim.record(side), 0), status::kSuccess);
  sim.log('c', main);
  CHECK_EQ(sim.device.end_capture(main, &graph), status::kSuccess);
  CHECK_EQ(sim.text, "");
  CHECK_EQ(sim.device.replay(graph, side), status::kSuccess);
  CHECK_EQ(sim.device.synchronize(), status::kSuccess);
  CHECK_EQ(sim.text, "abc");
}

TEST("a capture with an unjoined stream fails") {
  Sim sim(Schedule::kLate);
  const Stream main = sim.stream(), side = sim.stream();
  SimulatedGraph graph;
  CHECK_EQ(sim.device.begin_capture(main, kCaptureModeGlobal), status::kSuccess);
  CHECK_EQ(sim.driver.stream_wait_event(side, sim.record(main), 0), status::kSuccess);
  sim.log('b', side);
  CHECK_EQ(sim.device.end_capture(side, &graph), 902);
  CHECK_EQ(sim.device.end_capture(main, &graph), 904);
}

TEST("a captured stream cannot wait for work outside of its capture") {
  Sim sim(Schedule::kLate);
  const Stream stream = sim.stream();
  const Event outside = sim.record(nullptr);
  CHECK_EQ(sim.device.begin_capture(stream, kCaptureModeGlobal), status::kSuccess);
  CHECK_EQ(sim.driver.stream_wait_event(stream, outside, 0), 905);
  SimulatedGraph graph;
  CHECK_EQ(sim.device.end_capture(stream, &graph), status::kStreamCaptureInvalidated);
}

TEST("a captured event cannot be queried in any mode, until it is recorded outside") {
  Sim sim(Schedule::kLate);
  const Stream stream = sim.stream();
  const CaptureMode relaxed(sim.driver, kCaptureModeRelaxed);
  SimulatedGraph graph;
  CHECK_EQ(sim.device.begin_capture(stream, kCaptureModeRelaxed), status::kSuccess);
  const Event event = sim.record(stream);
  CHECK_EQ(sim.device.end_capture(stream, &graph), status::kSuccess);
  CHECK_EQ(sim.driver.event_query(event), status::kCapturedEvent);
  CHECK_EQ(sim.driver.event_synchronize(event), status::kCapturedEvent);
  CHECK_EQ(sim.driver.event_record(event, stream), status::kSuccess);
  CHECK_EQ(sim.driver.event_query(event), status::kNotReady);
}

TEST("a batch does not enter a capture, and only its status says so") {
  Sim sim(Schedule::kLate);
  const Stream stream = sim.stream();
  DevicePtr dst = Sim::address(sim.heap(1)), src = Sim::address("x");
  std::size_t size = 1, first = 0;
  MemcpyAttributes attributes{1, {}, {}, 0};
  SimulatedGraph graph;
  CHECK_EQ(sim.device.begin_capture(stream, kCaptureModeGlobal), status::kSuccess);
  CHECK_EQ(sim.driver.memcpy_batch_async(&dst, &src, &size, 1, &attributes, &first, 1, stream),
           status::kStreamCaptureUnsupported);
  CHECK_EQ(sim.device.end_capture(stream, &graph), status::kSuccess);
}

// Every potentially unsafe call of the table.
std::vector<Status> unsafe_calls(Sim& sim, Event event) {
  void* allocated = nullptr;
  char local[16];
  std::vector<Status> statuses = {sim.driver.event_query(event), sim.driver.event_synchronize(event),
                                  sim.driver.ctx_synchronize(), sim.driver.mem_host_alloc(&allocated, 16, 0),
                                  sim.driver.mem_host_register(local, 16, 0)};
  // Undone in the relaxed mode, so that it does not count.
  const bool registered = statuses.back() == status::kSuccess;
  const CaptureMode relaxed(sim.driver, kCaptureModeRelaxed);
  if (allocated != nullptr) CHECK_EQ(sim.driver.mem_free_host(allocated), status::kSuccess);
  if (registered) CHECK_EQ(sim.driver.mem_host_unregister(local), status::kSuccess);
  return statuses;
}

// cuThreadExchangeStreamCaptureMode's documentation, as a table.
bool forbidden(int capture_mode, int thread_mode, bool own_capture) {
  if (thread_mode == kCaptureModeRelaxed) return false;
  if (own_capture) return capture_mode != kCaptureModeRelaxed;
  return thread_mode == kCaptureModeGlobal && capture_mode == kCaptureModeGlobal;
}

TEST("unsafe calls beside a capture break it exactly as documented") {
  for (const int capture_mode : kModes) {
    for (const int thread_mode : kModes) {
      for (const bool own_capture : {true, false}) {
        Sim sim(Schedule::kLate);
        const Stream stream = sim.stream();
        const Event event = sim.event();
        SimulatedGraph graph;
        CHECK_EQ(sim.device.begin_capture(stream, capture_mode), status::kSuccess);
        std::vector<Status> statuses;
        const auto call = [&] {
          const Current current(sim.device);
          const CaptureMode mode(sim.driver, thread_mode);
          statuses = unsafe_calls(sim, event);
        };
        own_capture ? call() : run_together(1, [&](int) { call(); });
        const bool broken = forbidden(capture_mode, thread_mode, own_capture);
        // The first call breaks the capture; a broken one forbids nothing any more.
        CHECK_EQ(statuses[0], broken ? status::kStreamCaptureUnsupported : status::kSuccess);
        for (std::size_t i = 1; i < statuses.size(); ++i) CHECK_EQ(statuses[i], status::kSuccess);
        CHECK_EQ(sim.device.end_capture(stream, &graph), broken ? status::kStreamCaptureInvalidated : status::kSuccess);
      }
    }
  }
}

TEST("every unsafe call is forbidden beside a global capture") {
  for (int which = 0; which < 7; ++which) {
    Sim sim(Schedule::kLate);
    const Stream stream = sim.stream();
    const Event event = sim.event();
    void* allocated = sim.host(16);
    char local[16], registered[16];
    CHECK_EQ(sim.driver.mem_host_register(registered, 16, 0), status::kSuccess);
    CHECK_EQ(sim.device.begin_capture(stream, kCaptureModeGlobal), status::kSuccess);
    void* out = nullptr;
    const Status status = which == 0   ? sim.driver.event_query(event)
                          : which == 1 ? sim.driver.event_synchronize(event)
                          : which == 2 ? sim.driver.ctx_synchronize()
                          : which == 3 ? sim.driver.mem_host_alloc(&out, 16, 0)
                          : which == 4 ? sim.driver.mem_free_host(allocated)
                          : which == 5 ? sim.driver.mem_host_register(local, 16, 0)
                                       : sim.driver.mem_host_unregister(registered);
    CHECK_EQ(status, status::kStreamCaptureUnsupported);
    CHECK_EQ(sim.device.host_allocations(), 2);
    SimulatedGraph graph;
    CHECK_EQ(sim.device.end_capture(stream, &graph), status::kStreamCaptureInvalidated);
    CHECK_EQ(sim.driver.mem_free_host(allocated), status::kSuccess);
    CHECK_EQ(sim.driver.mem_host_unregister(registered), status::kSuccess);
  }
}

TEST("stream 0 is unusable beside a capture, and its use breaks the capture unless relaxed") {
  for (const int mode : {kCaptureModeGlobal, kCaptureModeRelaxed}) {
    Sim sim(Schedule::kLate);
    const Stream stream = sim.stream();
    const Event event = sim.event();
    SimulatedGraph graph;
    CHECK_EQ(sim.device.begin_capture(stream, kCaptureModeGlobal), status::kSuccess);
    {
      const CaptureMode thread_mode(sim.driver, mode);
      int state;
      CHECK_EQ(sim.driver.stream_is_capturing(nullptr, &state), status::kStreamCaptureImplicit);
      CHECK_EQ(sim.copy(sim.heap(1), "x", 1, stream), status::kSuccess);  // still whole
      CHECK_EQ(sim.copy(sim.heap(1), "x", 1), status::kStreamCaptureImplicit);
      CHECK_EQ(sim.driver.event_record(event, nullptr), status::kStreamCaptureImplicit);
    }
    CHECK_EQ(sim.device.pending(), 0);
    CHECK_EQ(sim.device.end_capture(stream, &graph),
             mode == kCaptureModeRelaxed ? status::kSuccess : status::kStreamCaptureInvalidated);
  }
}

TEST("stream 0 of another device is usable beside a capture") {
  Sim sim(Schedule::kLate);
  SimulatedDevice second(1, Schedule::kLate, 0);
  const Stream stream = sim.stream();
  SimulatedGraph graph;
  CHECK_EQ(sim.device.begin_capture(stream, kCaptureModeGlobal), status::kSuccess);
  {
    const Current current(second);
    CHECK_EQ(sim.copy(sim.heap(1), "x", 1), status::kSuccess);
  }
  CHECK_EQ(sim.device.end_capture(stream, &graph), status::kSuccess);
}

TEST("a capture ends on the thread that began it, unless relaxed") {
  for (const int mode : kModes) {
    Sim sim(Schedule::kLate);
    const Stream stream = sim.stream();
    SimulatedGraph graph;
    CHECK_EQ(sim.device.begin_capture(stream, mode), status::kSuccess);
    run_together(1, [&](int) {
      CHECK_EQ(sim.device.end_capture(stream, &graph), mode == kCaptureModeRelaxed ? status::kSuccess : 908);
    });
  }
}

TEST("a replay that reads freed host memory is counted, and reads poison") {
  Sim sim(Schedule::kLate);
  const Stream stream = sim.stream();
  char *dst = sim.heap(1), *host = sim.host(1);
  SimulatedGraph graph;
  CHECK_EQ(sim.device.begin_capture(stream, kCaptureModeGlobal), status::kSuccess);
  CHECK_EQ(sim.copy(dst, host, 1, stream), status::kSuccess);
  CHECK_EQ(sim.device.end_capture(stream, &graph), status::kSuccess);
  CHECK_EQ(sim.driver.mem_free_host(host), status::kSuccess);
  CHECK_EQ(sim.device.violations(), 0);
  *dst = 'x';
  CHECK_EQ(sim.device.replay(graph, stream), status::kSuccess);
  CHECK_EQ(sim.device.synchronize(), status::kSuccess);
  CHECK_EQ(sim.device.violations(), 1);
  CHECK_EQ(bytes(dst, 1), poison(1));
}

TEST("a device that closes ends its captures") {
  SimulatedDevice device(0, Schedule::kLate, 0);
  const auto token = std::make_shared<int>(0);
  Stream stream;
  CHECK_EQ(device.create_stream(&stream), status::kSuccess);
  CHECK_EQ(device.begin_capture(stream, kCaptureModeGlobal), status::kSuccess);
  CHECK_EQ(device.launch(stream, [token] {}), status::kSuccess);
  device.close();
  CHECK_EQ(token.use_count(), 1);
  Sim sim(Schedule::kLate);
  CHECK_EQ(sim.driver.event_query(sim.event()), status::kSuccess);
}

}  // namespace
