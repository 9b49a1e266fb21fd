// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// Several threads at one pool that has room for one of them.
#include <cstring>
#include <memory>

#include "pool.h"
#include "simulated_fixture.h"

namespace {

using namespace pinstage;
using namespace pinstage::check;

constexpr int kThreads = 8, kLeases = 60000, kCopies = 3000;
constexpr std::size_t kWhole = 4096;

struct Tight {
  Sim sim{Schedule::kEager};
  std::shared_ptr<Device> device = std::make_shared<Device>(
      sim.driver, sim.device.context(), DeviceKind::kSimulated, 0,
      [](void* self, int) { return static_cast<SimulatedDevice*>(self)->current_stream(); }, &sim.device);
  std::shared_ptr<Pool> pool = Pool::make(device, options());

  static PoolOptions options() {
    PoolOptions options;
    options.initial_bytes = options.max_bytes = kWhole;
    return options;
  }
  ~Tight() {
    pool->close({});
    device->release_pools();
    device->shutdown();
  }
};

// Whoever finds the pool full, and then nothing in flight or open elsewhere, has room: it came back meanwhile, or its
// slab is being replaced.
TEST("a wait for another thread's lease ends with room, never with an exhausted pool") {
  Tight tight;
  run_together(kThreads, [&](int) {
    for (int turn = 0; turn < kLeases; ++turn) tight.pool->cancel(tight.pool->take(kWhole, {}));
  });
}

TEST("a wait for another thread's copy ends with room, never with an exhausted pool") {
  Tight tight;
  CopyPlan plan;
  plan.width = kWhole;
  char* const dst = tight.sim.heap(kWhole * kThreads);
  run_together(kThreads, [&](int i) {
    for (int turn = 0; turn < kCopies; ++turn) {
      tight.pool->stage(kWhole, plan, Sim::address(dst + kWhole * static_cast<std::size_t>(i)), nullptr, {},
                        [i](char* slot) { std::memset(slot, i, kWhole); });
    }
  });
}

}  // namespace
