// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// When the simulated driver runs what, on which thread.
#include <atomic>
#include <memory>
#include <set>

#include "simulated_fixture.h"

namespace {

using namespace pinstage;
using namespace pinstage::check;

// ---------------------------------------------------------------------------------------------------------------------
// Schedules

TEST("steps run in the order of submission over all streams of a late device") {
  Sim sim(Schedule::kLate);
  const Stream one = sim.stream(), two = sim.stream();
  sim.log('a', one);
  sim.log('b', two);
  sim.log('c', one);
  CHECK_EQ(sim.driver.idle(0), status::kSuccess);
  CHECK_EQ(sim.text, "a");
  CHECK_EQ(sim.driver.ctx_synchronize(), status::kSuccess);
  CHECK_EQ(sim.text, "abc");
}

TEST("a manual device runs what it is told to") {
  Sim sim(Schedule::kManual);
  const Stream one = sim.stream(), two = sim.stream();
  for (const char letter : {'a', 'b', 'c'}) sim.log(letter, letter == 'b' ? two : one);
  CHECK_EQ(sim.driver.idle(0), status::kNothingCanRun);
  CHECK_EQ(sim.device.run(1, two), 1);
  CHECK_EQ(sim.text, "b");
  CHECK_EQ(sim.device.run(1), 1);
  CHECK_EQ(sim.text, "ba");
  CHECK_EQ(sim.device.run(), 1);
  CHECK_EQ(sim.device.run(), 0);
  CHECK_EQ(sim.driver.idle(0), status::kNothingCanRun);
}

TEST("an idle caller runs no step of a manual device") {
  Sim sim(Schedule::kManual);
  SimulatedDevice late(1, Schedule::kLate, 0);
  bool ran = false;
  sim.log('m', nullptr);
  CHECK_EQ(late.launch(nullptr, [&] { ran = true; }), status::kSuccess);
  CHECK_EQ(sim.driver.idle(0), status::kSuccess);
  CHECK(ran);
  CHECK_EQ(sim.driver.idle(0), status::kNothingCanRun);
  CHECK_EQ(sim.text, "");
}

TEST("a manual device is synchronized by its test unless another device holds it back") {
  Sim sim(Schedule::kManual);
  SimulatedDevice lost(1, Schedule::kManual, 0);
  sim.log('a', nullptr);
  CHECK_EQ(sim.device.synchronize(), status::kSuccess);
  Event event;
  {
    const Current current(lost);
    CHECK_EQ(sim.driver.event_create(&event, 0), status::kSuccess);
    CHECK_EQ(sim.driver.event_record(event, nullptr), status::kSuccess);
  }
  CHECK_EQ(sim.driver.stream_wait_event(nullptr, event, 0), status::kSuccess);
  lost.lose();
  CHECK_EQ(sim.device.synchronize(), status::kNothingCanRun);
}

// The order in which a random device runs one letter on each of eight streams.
std::string random_order(std::uint64_t seed) {
  Sim sim(Schedule::kRandom, seed);
  for (char letter = 'a'; letter < 'i'; ++letter) sim.log(letter, sim.stream());
  CHECK_EQ(sim.driver.ctx_synchronize(), status::kSuccess);
  return sim.text;
}

TEST("one seed gives one interleaving, many seeds give many") {
  const std::uint64_t seed = printed_seed();
  CHECK_EQ(random_order(seed), random_order(seed));
  std::set<std::string> orders;
  for (std::uint64_t i = 0; i < 32; ++i) orders.insert(random_order(seed + i));
  CHECK(orders.size() > 16);
}

TEST("a random device keeps the order of each stream") {
  Sim sim(Schedule::kRandom, printed_seed());
  const Stream lower = sim.stream(), upper = sim.stream();
  for (char i = 0; i < 26; ++i) {
    sim.log(static_cast<char>('a' + i), lower);
    sim.log(static_cast<char>('A' + i), upper);
  }
  CHECK_EQ(sim.driver.ctx_synchronize(), status::kSuccess);
  std::string of_lower, of_upper;
  for (const char c : sim.text) (c >= 'a' ? of_lower : of_upper) += c;
  CHECK_EQ(of_lower, "abcdefghijklmnopqrstuvwxyz");
  CHECK_EQ(of_upper, "ABCDEFGHIJKLMNOPQRSTUVWXYZ");
}

TEST("an idle caller that has yet to see another thread's step is not told that nothing can run") {
  Sim sim(Schedule::kManual);
  const Event event = sim.record(nullptr);
  CHECK_EQ(sim.driver.event_query(event), status::kNotReady);
  run_together(1, [&](int) { CHECK_EQ(sim.device.run(), 1); });
  CHECK_EQ(sim.driver.idle(0), status::kSuccess);
  CHECK_EQ(sim.driver.event_query(event), status::kSuccess);
  CHECK_EQ(sim.driver.idle(1), status::kNothingCanRun);
}

// ---------------------------------------------------------------------------------------------------------------------
// Latches and the launch queue

TEST("a latch holds until it is released, and says so") {
  Sim sim(Schedule::kLate);
  const Stream stream = sim.stream();
  std::shared_ptr<SimulatedLatch> latch;
  CHECK_EQ(sim.device.hold(stream, 60, &latch), status::kSuccess);
  sim.log('a', stream);
  CHECK_EQ(sim.driver.idle(0), status::kSuccess);  // it waits for the latch, since that ends
  CHECK_EQ(sim.device.run(), 0);
  CHECK(latch->held());
  latch->release();
  CHECK(latch->held());
  CHECK(!latch->timed_out());
  CHECK_EQ(sim.device.synchronize(), status::kSuccess);
  CHECK_EQ(sim.text, "a");
}

TEST("a latch past its deadline lets go and did not hold") {
  Sim sim(Schedule::kLate);
  std::shared_ptr<SimulatedLatch> latch;
  CHECK_EQ(sim.device.hold(nullptr, 0.001, &latch), status::kSuccess);
  sim.log('a', nullptr);
  CHECK_EQ(sim.driver.ctx_synchronize(), status::kSuccess);
  CHECK_EQ(sim.text, "a");
  CHECK(latch->timed_out());
  latch->release();
  CHECK(!latch->held());
  CHECK(latch->timed_out());
}

TEST("a full late queue makes room by running the oldest step") {
  Sim sim(Schedule::kLate, 0, 2);
  for (const char letter : {'a', 'b', 'c'}) sim.log(letter, nullptr);
  CHECK_EQ(sim.text, "a");
  CHECK_EQ(sim.device.pending(), 2);
}

TEST("a full queue blocks its caller until another thread releases the latch") {
  for (const Schedule schedule : {Schedule::kLate, Schedule::kEager, Schedule::kRandom}) {
    Sim sim(schedule, 0, 2);
    std::shared_ptr<SimulatedLatch> latch;
    CHECK_EQ(sim.device.hold(nullptr, 60, &latch), status::kSuccess);
    sim.log('a', nullptr);
    std::atomic<bool> submitted{false};
    run_together(2, [&](int i) {
      if (i == 0) {
        sim.log('b', nullptr);
        submitted = true;
      } else {
        for (int j = 0; j < 1000; ++j) CHECK(!submitted);
        latch->release();
      }
    });
    CHECK(latch->held());
    CHECK_EQ(sim.device.synchronize(), status::kSuccess);
    CHECK_EQ(sim.text, "ab");
  }
}

TEST("a full manual queue blocks its caller until another thread runs a step") {
  Sim sim(Schedule::kManual, 0, 1);
  sim.log('a', nullptr);
  run_together(2, [&](int i) {
    if (i == 0) {
      sim.log('b', nullptr);
    } else {
      while (sim.device.run(1) == 0) std::this_thread::yield();
    }
  });
  CHECK_EQ(sim.device.synchronize(), status::kSuccess);
  CHECK_EQ(sim.text, "ab");
}

// ---------------------------------------------------------------------------------------------------------------------
// Threads

// Copies on a stream of its own, refilling the source after each fence; waits as the core does.
void copy_and_refill(Sim& sim, int thread, int rounds) {
  const Current current(sim.device);
  const Stream stream = sim.stream();
  const Event event = sim.event();
  char* host = sim.host(64);
  char* dst = sim.heap(64);
  for (int round = 0; round < rounds; ++round) {
    const char letter = static_cast<char>('a' + (thread + round) % 26);
    std::memset(host, letter, 64);
    CHECK_EQ(sim.copy(dst, host, 64, stream), status::kSuccess);
    CHECK_EQ(sim.driver.event_record(event, stream), status::kSuccess);
    Status status;
    while ((status = sim.driver.event_query(event)) == status::kNotReady) {
      CHECK_EQ(sim.driver.idle(0), status::kSuccess);
    }
    CHECK_EQ(status, status::kSuccess);
    CHECK_EQ(bytes(dst, 64), std::string(64, letter));
  }
  CHECK_EQ(sim.driver.mem_free_host(host), status::kSuccess);
  SimulatedDevice::heap_free(dst);
}

TEST("threads with their own streams see their own copies") {
  for (const Schedule schedule : {Schedule::kLate, Schedule::kEager, Schedule::kRandom}) {
    Sim sim(schedule, printed_seed(), 3);
    run_together(4, [&](int i) { copy_and_refill(sim, i, 200); });
    CHECK_EQ(sim.device.violations(), 0);
    CHECK_EQ(sim.device.host_allocations(), 0);
  }
}

TEST("threads that wait in the driver see their own copies") {
  for (const Schedule schedule : {Schedule::kLate, Schedule::kEager, Schedule::kRandom}) {
    Sim sim(schedule, printed_seed(), 4);
    run_together(4, [&](int i) {
      const Current current(sim.device);
      const Stream stream = sim.stream();
      char* dst = sim.heap(1);
      for (char round = 0; round < 100; ++round) {
        const char letter = static_cast<char>(i + round);
        CHECK_EQ(sim.copy(dst, &letter, 1, stream), status::kSuccess);
        const Event event = sim.record(stream);
        CHECK_EQ(sim.driver.event_synchronize(event), status::kSuccess);
        CHECK_EQ(*dst, letter);
        CHECK_EQ(sim.driver.event_destroy(event), status::kSuccess);
      }
    });
  }
}

}  // namespace
