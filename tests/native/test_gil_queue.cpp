// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include <mutex>
#include <thread>

#include "check.h"
#include "gil_queue.h"

namespace {

using namespace pinstage;
using namespace pinstage::check;

constexpr int kThreads = 8, kTurns = 2000;

TEST("a turn is asked for until it is got or given up, and never after a fork") {
  GilQueue queue;
  CHECK(!queue.asked());
  queue.wait_for_turn();
  CHECK(queue.asked());
  queue.got();
  CHECK(!queue.asked());
  queue.let_go();
  queue.wait_for_turn();
  queue.gave_up();
  CHECK(!queue.asked());
  queue.wait_for_turn();
  queue.forget();
  CHECK(!queue.asked());
}

TEST("whoever waits behind a holder that never lets go, or behind one that asks for ever, asks all the same") {
  GilQueue queue;
  queue.wait_for_turn();
  queue.wait_for_turn();  // behind one that asks
  queue.got();
  queue.got();
  queue.wait_for_turn();  // behind a holder
  CHECK(queue.asked());
  queue.got();
  CHECK(!queue.asked());
}

// Half of them leave the mutex unseen now and then, as other code does that takes the GIL and lets go of it.
TEST("threads that take turns at a mutex all get through, and leave nobody asking") {
  GilQueue queue;
  std::mutex gil;
  int turns = 0;
  run_together(kThreads, [&](int i) {
    for (int turn = 0; turn < kTurns; ++turn) {
      queue.wait_for_turn();
      {
        const std::lock_guard<std::mutex> held(gil);
        queue.got();
        ++turns;
      }
      if (i % 2 == 0 || turn % 8 != 0) queue.let_go();
    }
  });
  CHECK_EQ(turns, kThreads * kTurns);
  CHECK(!queue.asked());
}

}  // namespace
