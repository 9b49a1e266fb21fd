// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <memory>

#include "pool.h"
#include "simulated_fixture.h"

namespace {

using namespace pinstage;
using namespace pinstage::check;

TEST("no fence outlives the pool of its slot, although nothing tells whether it passed") {
  Sim sim(Schedule::kLate);
  const auto device = std::make_shared<Device>(
      sim.driver, sim.device.context(), DeviceKind::kSimulated, 0,
      [](void* self, int) { return static_cast<SimulatedDevice*>(self)->current_stream(); }, &sim.device);
  PoolOptions options;
  options.initial_bytes = options.max_bytes = 4096;
  std::shared_ptr<Pool> pool = Pool::make(device, options);
  CopyPlan plan;
  plan.width = 256;
  pool->stage(256, plan, Sim::address(sim.heap(256)), nullptr, {}, [](char* slot) { std::memset(slot, 1, 256); });
  CHECK(sim.device.fail("cuEventQuery", 1, status::kOutOfMemory, 2));
  device->release_pools();
  pool.reset();
  CHECK_EQ(sim.device.synchronize(), status::kSuccess);
  CHECK(!device->poll_all());  // the fence would lead to the pool
  device->shutdown();
  device->release_pools();
}

}  // namespace
