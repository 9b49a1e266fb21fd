// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// What the Python suite cannot make fail (tests/test_every_fault.py has all the rest): a slot's address on the device,
// for which a simulated device is not asked. Here the core takes the simulated driver for a GPU's.
#include <algorithm>
#include <memory>
#include <string>

#include "pool.h"
#include "simulated_fixture.h"

namespace {

using namespace pinstage;
using namespace pinstage::check;

TEST("an address on the device that the driver refuses changes nothing, and the error says what to do") {
  Sim sim(Schedule::kLate);
  const auto device = std::make_shared<Device>(
      sim.driver, sim.device.context(), DeviceKind::kCuda, 0,
      [](void* self, int) { return static_cast<SimulatedDevice*>(self)->current_stream(); }, &sim.device);
  PoolOptions options;
  options.initial_bytes = options.max_bytes = 4096;
  const std::shared_ptr<Pool> pool = Pool::make(device, options);
  const LeaseRef lease = pool->take(1000, {});
  for (const Status status : {status::kOutOfMemory, status::kInvalidValue, status::kNotReady, status::kLaunchFailed,
                              Status{700}, status::kDeinitialized}) {
    const PoolStats before = pool->stats();
    CHECK(sim.device.fail("cuMemHostGetDevicePointer", 1, status));
    try {
      pool->device_address(lease);
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::kDriver);
      CHECK_EQ(error.status(), status);
      CHECK(std::string(error.what()).find(remedy(status)) != std::string::npos);
    }
    CHECK(pool->consistent());
    CHECK(std::equal(before.bytes, before.bytes + kSlotStates, pool->stats().bytes));
    CHECK_EQ(pool->device_address(lease), Sim::address(pool->data(lease)));
  }
  pool->cancel(lease);
  pool->close({});
  device->shutdown();
  CHECK_EQ(sim.device.host_allocations(), 0);
}

}  // namespace
