// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// A current simulated device with short names for what the tests of the simulated driver do with it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "simulated_driver.h"

namespace pinstage::check {

// Makes a context current for a scope.
class Current {
 public:
  explicit Current(const SimulatedDevice& device) : driver_(device.driver()) {
    CHECK_EQ(driver_.ctx_push_current(device.context()), status::kSuccess);
  }
  ~Current() {
    Context popped;
    driver_.ctx_pop_current(&popped);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const Driver driver_;
};

class CaptureMode {
 public:
  CaptureMode(const Driver& driver, int mode) : driver_(driver), mode_(mode) {
    driver_.thread_exchange_capture_mode(&mode_);
  }
  ~CaptureMode() { driver_.thread_exchange_capture_mode(&mode_); }
  CaptureMode(const CaptureMode&) = delete;
  CaptureMode& operator=(const CaptureMode&) = delete;

 private:
  const Driver driver_;
  int mode_;
};

struct Sim {
  explicit Sim(Schedule schedule, std::uint64_t seed = 0, std::size_t depth = SimulatedDevice::kQueueDepth,
               bool lying_queries = false)
      : device(0, schedule, seed, depth, lying_queries), driver(device.driver()), current(device) {}

  Stream stream() {
    Stream created = nullptr;
    CHECK_EQ(device.create_stream(&created), status::kSuccess);
    return created;
  }
  Event event() {
    Event created = nullptr;
    CHECK_EQ(driver.event_create(&created, kEventDisableTiming), status::kSuccess);
    return created;
  }
  Event record(Stream stream) {
    const Event recorded = event();
    CHECK_EQ(driver.event_record(recorded, stream), status::kSuccess);
    return recorded;
  }
  char* heap(std::size_t nbytes) { return static_cast<char*>(device.heap_alloc(nbytes)); }
  char* host(std::size_t nbytes) {
    void* allocated = nullptr;
    CHECK_EQ(driver.mem_host_alloc(&allocated, nbytes, kHostAllocPortable), status::kSuccess);
    return static_cast<char*>(allocated);
  }
  Status copy(char* dst, const char* src, std::size_t nbytes, Stream stream = nullptr) {
    return driver.memcpy_htod_async(address(dst), src, nbytes, stream);
  }
  // Enqueues a kernel that adds `letter` to `log`.
  void log(char letter, Stream stream) {
    CHECK_EQ(device.launch(stream, [this, letter] { text += letter; }), status::kSuccess);
  }
  static DevicePtr address(const void* p) { return reinterpret_cast<DevicePtr>(p); }

  SimulatedDevice device;
  Driver driver;
  Current current;
  std::string text;
};

inline std::string bytes(const char* p, std::size_t n) { return std::string(p, n); }
inline std::string poison(std::size_t n) { return std::string(n, static_cast<char>(SimulatedDevice::kPoison)); }

}  // namespace pinstage::check
