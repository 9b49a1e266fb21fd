// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// The simulated driver's copies, heap and pinned memory.
#include "simulated_fixture.h"

namespace {

using namespace pinstage;
using namespace pinstage::check;

Memcpy2D rows(char* dst, std::size_t dst_pitch, const char* src, std::size_t src_pitch, std::size_t width,
              std::size_t height) {
  Memcpy2D copy{};
  copy.src_type = kMemoryTypeHost;
  copy.src_host = src;
  copy.src_pitch = src_pitch;
  copy.dst_type = kMemoryTypeDevice;
  copy.dst_device = Sim::address(dst);
  copy.dst_pitch = dst_pitch;
  copy.width = width;
  copy.height = height;
  return copy;
}

TEST("a 2-D copy writes its rows and nothing between them") {
  Sim sim(Schedule::kEager);
  char* dst = sim.heap(12);
  Memcpy2D copy = rows(dst, 4, "ab.cd.ef", 3, 2, 3);
  copy.dst_x = 1;
  CHECK_EQ(sim.driver.memcpy_2d_async(&copy, nullptr), status::kSuccess);
  const std::string p = poison(1);
  CHECK_EQ(bytes(dst, 12), p + "ab" + p + p + "cd" + p + p + "ef" + p);
}

TEST("a 3-D copy writes its planes and nothing between them") {
  Sim sim(Schedule::kEager);
  char* dst = sim.heap(12);
  Memcpy3D copy{};
  copy.src_type = kMemoryTypeHost;
  copy.src_host = "abcdefgh";
  copy.src_pitch = 2;
  copy.src_height = 2;
  copy.dst_type = kMemoryTypeDevice;
  copy.dst_device = Sim::address(dst);
  copy.dst_pitch = 2;
  copy.dst_height = 3;
  copy.width = copy.height = copy.depth = 2;
  CHECK_EQ(sim.driver.memcpy_3d_async(&copy, nullptr), status::kSuccess);
  CHECK_EQ(bytes(dst, 12), "abcd" + poison(2) + "efgh" + poison(2));
  copy.dst_height = 1;
  CHECK_EQ(sim.driver.memcpy_3d_async(&copy, nullptr), status::kInvalidValue);
}

TEST("a copy between device blocks runs in stream order") {
  Sim sim(Schedule::kLate);
  char *first = sim.heap(2), *second = sim.heap(2);
  CHECK_EQ(sim.copy(first, "ab", 2), status::kSuccess);
  Memcpy2D copy = rows(second, 2, nullptr, 2, 2, 1);
  copy.src_type = kMemoryTypeDevice;
  copy.src_device = Sim::address(first);
  CHECK_EQ(sim.driver.memcpy_2d_async(&copy, nullptr), status::kSuccess);
  CHECK_EQ(sim.driver.ctx_synchronize(), status::kSuccess);
  CHECK_EQ(bytes(second, 2), "ab");
}

TEST("an empty copy is a no-op whatever its pointers") {
  Sim sim(Schedule::kLate);
  CHECK_EQ(sim.driver.memcpy_htod_async(0, nullptr, 0, nullptr), status::kSuccess);
  const Memcpy2D copy = rows(nullptr, 0, nullptr, 0, 0, 5);
  CHECK_EQ(sim.driver.memcpy_2d_async(&copy, nullptr), status::kSuccess);
  CHECK_EQ(sim.device.pending(), 0);
}

TEST("a copy out of bounds is refused") {
  Sim sim(Schedule::kLate);
  char* dst = sim.heap(8);
  char local[8];
  CHECK_EQ(sim.copy(local, "12345678", 8), status::kInvalidValue);
  CHECK_EQ(sim.copy(dst + 1, "12345678", 8), status::kInvalidValue);
  CHECK_EQ(sim.copy(dst, nullptr, 8), status::kInvalidValue);
  CHECK_EQ(sim.copy(dst, "12345678", ~std::size_t{0}), status::kInvalidValue);
  Memcpy2D copy = rows(dst, 4, "12345678", 4, 4, 3);
  CHECK_EQ(sim.driver.memcpy_2d_async(&copy, nullptr), status::kInvalidValue);
  copy = rows(dst, 3, "12345678", 4, 4, 2);  // pitch below the width
  CHECK_EQ(sim.driver.memcpy_2d_async(&copy, nullptr), status::kInvalidValue);
  copy = rows(dst, std::size_t{1} << 31, "12345678", 4, 4, 1);  // pitch past the limit
  CHECK_EQ(sim.driver.memcpy_2d_async(&copy, nullptr), status::kInvalidValue);
  copy = rows(dst, 4, "12345678", 4, 4, 2);
  CHECK_EQ(sim.driver.memcpy_2d_async(&copy, nullptr), status::kSuccess);
  CHECK_EQ(sim.device.pending(), 1);
}

TEST("an address is of the allocation that holds it") {
  Sim sim(Schedule::kLate);
  char* block = sim.heap(8);
  DevicePtr base = 0;
  std::size_t nbytes = 0;
  CHECK_EQ(sim.driver.mem_get_address_range(&base, &nbytes, Sim::address(block + 7)), status::kSuccess);
  CHECK_EQ(base, Sim::address(block));
  CHECK_EQ(nbytes, 8);
  CHECK_EQ(sim.driver.mem_get_address_range(&base, &nbytes, Sim::address(block + 8)), status::kNotFound);
  CHECK_EQ(sim.driver.mem_get_address_range(nullptr, nullptr, Sim::address(block)), status::kSuccess);
}

TEST("a row may not span two registrations, a copy may") {
  Sim sim(Schedule::kEager);
  alignas(8) char src[] = "abcdefgh";
  CHECK_EQ(sim.driver.mem_host_register(src, 4, 0), status::kSuccess);
  CHECK_EQ(sim.driver.mem_host_register(src + 4, 4, 0), status::kSuccess);
  char* dst = sim.heap(8);
  CHECK_EQ(sim.copy(dst, src, 8), status::kInvalidValue);
  const Memcpy2D copy = rows(dst, 4, src, 4, 4, 2);
  CHECK_EQ(sim.driver.memcpy_2d_async(&copy, nullptr), status::kSuccess);
  CHECK_EQ(bytes(dst, 8), "abcdefgh");
  CHECK_EQ(sim.driver.mem_host_unregister(src), status::kSuccess);
  CHECK_EQ(sim.driver.mem_host_unregister(src + 4), status::kSuccess);
}

struct Batch {
  std::vector<DevicePtr> dsts, srcs;
  std::vector<std::size_t> sizes;
  MemcpyAttributes attributes{};
  std::size_t first = 0;

  explicit Batch(int order = 1) { attributes.src_access_order = order; }
  void add(char* dst, const char* src, std::size_t nbytes) {
    dsts.push_back(Sim::address(dst));
    srcs.push_back(Sim::address(src));
    sizes.push_back(nbytes);
  }
  Status submit(const Driver& driver, Stream stream) {
    return driver.memcpy_batch_async(dsts.data(), srcs.data(), sizes.data(), sizes.size(), &attributes, &first, 1,
                                     stream);
  }
};

TEST("the copies of a batch have no order") {
  for (const Schedule schedule : {Schedule::kEager, Schedule::kLate}) {
    Sim sim(schedule);
    const Stream stream = sim.stream();
    char* dst = sim.heap(1);
    Batch batch;
    batch.add(dst, "a", 1);
    batch.add(dst, "b", 1);
    CHECK_EQ(batch.submit(sim.driver, stream), status::kSuccess);
    CHECK_EQ(sim.driver.ctx_synchronize(), status::kSuccess);
    CHECK_EQ(*dst, schedule == Schedule::kEager ? 'b' : 'a');
  }
}

TEST("a batch reads its sources when it runs, or during the call where asked to") {
  for (const int order : {1, 2, 3}) {
    Sim sim(Schedule::kLate);
    const Stream stream = sim.stream();
    char* dst = sim.heap(4);
    char src[] = "old";
    Batch batch(order);
    batch.add(dst, src, 4);
    CHECK_EQ(batch.submit(sim.driver, stream), status::kSuccess);
    std::memcpy(src, "new", 4);
    CHECK_EQ(sim.driver.ctx_synchronize(), status::kSuccess);
    CHECK_EQ(bytes(dst, 3), order == 2 ? "old" : "new");
  }
}

TEST("a batch is refused on stream 0, empty, without attributes, and whole when one copy is bad") {
  Sim sim(Schedule::kLate);
  const Stream stream = sim.stream();
  char* dst = sim.heap(4);
  Batch batch;
  CHECK_EQ(batch.submit(sim.driver, stream), status::kInvalidValue);
  batch.add(dst, "abcd", 4);
  CHECK_EQ(batch.submit(sim.driver, nullptr), status::kInvalidValue);
  batch.add(dst, "abcd", 5);
  CHECK_EQ(batch.submit(sim.driver, stream), status::kInvalidValue);
  Batch without(0);
  without.add(dst, "abcd", 4);
  CHECK_EQ(without.submit(sim.driver, stream), status::kInvalidValue);
  CHECK_EQ(sim.device.pending(), 0);
}

TEST("an address finds its device, inside the block only") {
  Sim sim(Schedule::kLate);
  char* block = sim.heap(100);
  char local = 0;
  CHECK(SimulatedDevice::find(block) == &sim.device);
  CHECK(SimulatedDevice::find(block + 99) == &sim.device);
  CHECK(SimulatedDevice::find(block + 100) == nullptr);
  CHECK(SimulatedDevice::find(block - 1) == nullptr);
  CHECK(SimulatedDevice::find(&local) == nullptr);
  CHECK(SimulatedDevice::of_stream(sim.stream()) == &sim.device);
  CHECK(SimulatedDevice::of_stream(nullptr) == nullptr);
  SimulatedDevice::heap_free(block);
  CHECK(SimulatedDevice::find(block) == nullptr);
}

TEST("a heap block outlives the work queued on it") {
  Sim sim(Schedule::kLate);
  char* block = sim.heap(8);
  CHECK_EQ(sim.copy(block, "12345678", 8), status::kSuccess);
  SimulatedDevice::heap_free(block);
  CHECK_EQ(sim.copy(block, "12345678", 8), status::kInvalidValue);
  CHECK_EQ(sim.driver.ctx_synchronize(), status::kSuccess);  // the address sanitizer would see a write after free
}

TEST("freed host memory that a queued copy reads is counted, and read as poison") {
  Sim sim(Schedule::kLate);
  char* dst = sim.heap(8);
  char* host = sim.host(8);
  std::memcpy(host, "12345678", 8);
  CHECK_EQ(sim.copy(dst, host, 8), status::kSuccess);
  CHECK_EQ(sim.driver.mem_free_host(host), status::kSuccess);
  CHECK_EQ(sim.device.violations(), 1);
  CHECK_EQ(sim.driver.ctx_synchronize(), status::kSuccess);
  CHECK_EQ(bytes(dst, 8), poison(8));
  CHECK_EQ(sim.device.violations(), 1);
}

TEST("host memory freed after its copies ran is no violation") {
  Sim sim(Schedule::kLate);
  char src[] = "12345678";
  CHECK_EQ(sim.driver.mem_host_register(src, 8, 0), status::kSuccess);
  char* dst = sim.heap(8);
  CHECK_EQ(sim.copy(dst, src, 8), status::kSuccess);
  CHECK_EQ(sim.driver.ctx_synchronize(), status::kSuccess);
  CHECK_EQ(sim.driver.mem_host_unregister(src), status::kSuccess);
  CHECK_EQ(sim.device.violations(), 0);
  CHECK_EQ(bytes(dst, 8), "12345678");
}

TEST("memory is registered once and released as it was obtained") {
  Sim sim(Schedule::kLate);
  char src[64];
  char* host = sim.host(64);
  CHECK_EQ(sim.driver.mem_host_register(src, 64, 0), status::kSuccess);
  CHECK_EQ(sim.driver.mem_host_register(src + 63, 2, 0), status::kHostMemoryAlreadyRegistered);
  CHECK_EQ(sim.driver.mem_host_register(host, 8, 0), status::kHostMemoryAlreadyRegistered);
  CHECK_EQ(sim.driver.mem_free_host(src), status::kInvalidValue);
  CHECK_EQ(sim.driver.mem_host_unregister(host), 713);
  CHECK_EQ(sim.driver.mem_host_unregister(src + 1), 713);
  CHECK_EQ(sim.device.host_allocations(), 2);
  DevicePtr mapped = 0;
  CHECK_EQ(sim.driver.mem_host_get_device_pointer(&mapped, host + 5, 0), status::kSuccess);
  CHECK_EQ(mapped, Sim::address(host + 5));
  CHECK_EQ(sim.driver.mem_host_unregister(src), status::kSuccess);
  CHECK_EQ(sim.driver.mem_free_host(host), status::kSuccess);
  CHECK_EQ(sim.driver.mem_host_get_device_pointer(&mapped, host, 0), status::kInvalidValue);
  CHECK_EQ(sim.device.host_allocations(), 0);
}

}  // namespace
