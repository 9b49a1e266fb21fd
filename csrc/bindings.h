// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// What the bindings of pinstage._core share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "pool.h"
#include "tensor_view.h"

namespace pinstage {

void bind_simulated_driver(nanobind::module_& module);  // simulated_bindings.cpp
void bind_pool(nanobind::module_& module);              // pool_bindings.cpp
void bind_snapshots(nanobind::module_& module);         // snapshot_bindings.cpp
void bind_batch(nanobind::module_& module);             // batch_bindings.cpp
void bind_lists(nanobind::module_& module);             // list_bindings.cpp
void bind_table(nanobind::module_& module);             // table_bindings.cpp

constexpr int kMaxCudaDevices = 64;

// What copies without `pool=` find: by CUDA index here, by address for simulated devices (SimulatedDevice::owner).
extern Device* cuda_devices[kMaxCudaDevices];

// The device that holds `view`, if pinstage has met it.
Device* device_of(const TensorView& view);

// Host memory, of no simulated device.
bool on_host(const TensorView& view);

// The pool that a copy to `dst` uses: the one given, else the default pool of dst's device. Null: the general path
// finds out what is wrong, or sets the default pool up.
std::shared_ptr<Pool> pool_for(const TensorView& dst, nanobind::handle given);

struct PyDevice {
  std::shared_ptr<Device> device;
  nanobind::object simulated;                        // keeps the SimulatedDevice alive; None for CUDA
  nanobind::object default_pool = nanobind::none();  // a StagingPool, over device->default_pool

  PyDevice(std::shared_ptr<Device> core, nanobind::object source)
      : device(std::move(core)), simulated(std::move(source)) {}
  PyDevice(const PyDevice&) = delete;
  void shutdown();
  ~PyDevice();
};

struct PyPool {
  std::shared_ptr<Pool> pool;
  ~PyPool() { pool->abandon(); }
};

// Handles travel as numbers.
inline Stream stream_of(std::uintptr_t handle) { return reinterpret_cast<Stream>(handle); }

// Waits that Ctrl-C ends. Throws Error(kValue) for a negative timeout.
Wait wait_for(std::optional<double> timeout);

// Sets the Python error that stands for `error`.
void raise(const Error& error);

// Warns once of a default limit that makes callers wait, and of memory that is not pinned. False with the Python error
// set when warnings are errors.
bool warn(Pool& pool);

}  // namespace pinstage
