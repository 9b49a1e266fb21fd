// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// Which pieces of a batch become one driver copy.
#include <string>
#include <vector>

#include "batch.h"
#include "simulated_fixture.h"

namespace {

using namespace pinstage;
using namespace pinstage::check;

// Allocations of 1000 bytes, side by side.
AllocationRange thousand(const void* queries, DevicePtr p) {
  if (queries != nullptr) ++*static_cast<int*>(const_cast<void*>(queries));
  return {p / 1000 * 1000, p / 1000 * 1000 + 1000};
}
AllocationRange unknown(const void*, DevicePtr) { return {}; }

struct Piece {
  DevicePtr dst;
  std::size_t nbytes;
  std::size_t height = 1, pitch = 0;
};

// "dst+bytes" for a dense copy, "dst+bytes*rows/pitch" for a 2-D one, in the order of their pieces.
std::string merged(const std::vector<Piece>& pieces, AllocationRange (*range_of)(const void*, DevicePtr) = &thousand,
                   int* queries = nullptr) {
  std::vector<BatchPiece> batch;
  std::size_t nbytes = 0;
  for (const Piece& piece : pieces) {
    CopyPlan plan;
    plan.width = piece.nbytes;
    plan.height = piece.height;
    plan.pitch = piece.pitch;
    batch.push_back({plan, piece.dst, nullptr});
    nbytes += plan.nbytes();
  }
  std::string text;
  std::size_t first = 0, total = 0;
  for (const BatchCopy& copy : merge_pieces(batch.data(), batch.size(), range_of, queries)) {
    CHECK_EQ(copy.first, first);  // every piece once, in order
    first += copy.count;
    total += copy.plan.nbytes();
    text += (text.empty() ? "" : " ") + std::to_string(copy.dst) + "+" + std::to_string(copy.plan.width);
    if (copy.plan.height > 1) text += "*" + std::to_string(copy.plan.height) + "/" + std::to_string(copy.plan.pitch);
  }
  CHECK_EQ(first, pieces.size());
  CHECK_EQ(total, nbytes);
  return text;
}

TEST("adjacent pieces become one copy, whatever their sizes") {
  CHECK_EQ(merged({{100, 4}, {104, 16}, {120, 1}}), "100+21");
  CHECK_EQ(merged({{100, 4}, {105, 16}, {121, 1}}), "100+4 105+17");
}

TEST("three rows of one size at one pitch become a 2-D copy, two do not") {
  CHECK_EQ(merged({{100, 4}, {110, 4}, {120, 4}}), "100+4*3/10");
  CHECK_EQ(merged({{100, 4}, {110, 4}}), "100+4 110+4");
  CHECK_EQ(merged({{100, 4}, {110, 4}, {120, 5}}), "100+4 110+4 120+5");
  CHECK_EQ(merged({{100, 4}, {110, 4}, {121, 4}}), "100+4 110+4 121+4");
}

TEST("rows begin wherever a pitch begins") {
  CHECK_EQ(merged({{100, 4}, {107, 4}, {117, 4}, {127, 4}, {137, 9}}), "100+4 107+4*3/10 137+9");
}

TEST("rows may be made of adjacent pieces") {
  CHECK_EQ(merged({{100, 4}, {104, 2}, {110, 1}, {111, 5}, {120, 6}}), "100+6*3/10");
}

TEST("no copy reaches over the end of an allocation") {
  CHECK_EQ(merged({{990, 10}, {1000, 10}, {1010, 10}}), "990+10 1000+20");
  CHECK_EQ(merged({{970, 5}, {980, 5}, {990, 5}, {1000, 5}, {1010, 5}, {1020, 5}}), "970+5*3/10 1000+5*3/10");
  CHECK_EQ(merged({{980, 5}, {990, 5}, {1000, 5}, {1010, 5}}), "980+5 990+5 1000+5 1010+5");
}

TEST("nothing is merged where the driver does not tell the allocations") {
  CHECK_EQ(merged({{100, 4}, {104, 4}, {108, 4}}, &unknown), "100+4 104+4 108+4");
  CHECK_EQ(merged({{100, 4}, {110, 4}, {120, 4}}, &unknown), "100+4 110+4 120+4");
}

TEST("a pitched piece stays alone") { CHECK_EQ(merged({{100, 4}, {104, 2, 3, 8}, {122, 4}}), "100+4 104+2*3/8 122+4"); }

TEST("rows wider apart than the copy engine's pitch stay apart") {
  const auto everywhere = [](const void*, DevicePtr) { return AllocationRange{0, ~DevicePtr{0}}; };
  const DevicePtr far = kMaxPitch + 1;
  CHECK_EQ(merged({{0, 4}, {far, 4}, {2 * far, 4}}, everywhere),
           "0+4 " + std::to_string(far) + "+4 " + std::to_string(2 * far) + "+4");
  CHECK_EQ(merged({{0, 4}, {far - 1, 4}, {2 * far - 2, 4}}, everywhere), "0+4*3/" + std::to_string(kMaxPitch));
}

TEST("an allocation is asked for once") {
  int queries = 0;
  std::vector<Piece> rows;
  for (DevicePtr i = 0; i < 20; ++i) rows.push_back({100 + 10 * i, 10});
  for (DevicePtr i = 0; i < 20; ++i) rows.push_back({400 + 20 * i, 10});
  CHECK_EQ(merged(rows, &thousand, &queries), "100+200 400+10*20/20");
  CHECK_EQ(queries, 1);
}

TEST("a range holds what lies wholly in it") {
  const AllocationRange range{100, 200};
  CHECK(range.holds(100, 100));
  CHECK(range.holds(150, 50));
  CHECK(!range.holds(150, 51));
  CHECK(!range.holds(99, 1));
  CHECK(!range.holds(200, 1));
  CHECK(!range.holds(150, ~std::size_t{0}));
  CHECK(!AllocationRange{}.holds(0, 1));
}

// A pool over a simulated device, whose driver table lacks what old drivers lack.
struct OldDriver {
  OldDriver() : sim(Schedule::kLate) {
    sim.driver.launch_kernel = nullptr;
    sim.driver.memcpy_batch_async = nullptr;
    sim.driver.mem_get_address_range = nullptr;
    device = std::make_shared<Device>(sim.driver, sim.device.context(), DeviceKind::kSimulated, 0, nullptr, nullptr);
    pool = Pool::make(device, {4096, 4096});
  }
  ~OldDriver() {
    pool.reset();
    device->release_pools();
  }
  std::uint64_t calls(const std::string& entry) const {
    for (const auto& [name, count] : sim.device.calls()) {
      if (entry == name) return count;
    }
    throw Failure(__FILE__, __LINE__, "no entry " + entry);
  }

  Sim sim;
  std::shared_ptr<Device> device;
  std::shared_ptr<Pool> pool;
};

TEST("an old driver gets the copies one by one") {
  OldDriver old;
  const Stream stream = old.sim.stream();
  char* const dst = old.sim.heap(26);
  std::string letters = "abcdefghijklmnopqrstuvwxyz";
  std::vector<BatchPart> parts{{old.pool, stream, {}}};
  CopyPlan plan;
  plan.width = 1;
  for (std::size_t i = 0; i < 26; ++i) parts[0].pieces.push_back({plan, Sim::address(dst + i), &letters[i]});
  bool begun = false;
  stage_batch(parts, {}, &begun);
  CHECK(begun);
  letters.assign(26, '-');
  CHECK_EQ(old.calls("cuMemcpyHtoDAsync"), 26);
  CHECK_EQ(old.calls("cuEventRecord"), 1);
  CHECK_EQ(old.sim.driver.ctx_synchronize(), status::kSuccess);
  CHECK_EQ(bytes(dst, 26), "abcdefghijklmnopqrstuvwxyz");
}

TEST("of several devices none is begun while a stream of another is being captured") {
  OldDriver first, second;
  char *const dst = first.sim.heap(1), *const other = second.sim.heap(1);
  const Stream stream = second.sim.stream();
  CopyPlan plan;
  plan.width = 1;
  std::vector<BatchPart> parts{{first.pool, nullptr, {{plan, Sim::address(dst), "a"}}},
                               {second.pool, stream, {{plan, Sim::address(other), "b"}}}};
  CHECK_EQ(second.sim.device.begin_capture(stream, kCaptureModeRelaxed), status::kSuccess);
  bool begun = false;
  CHECK(throws<Error>([&] { stage_batch(parts, {}, &begun); }));
  CHECK(!begun);
  CHECK_EQ(first.sim.device.pending(), 0);
  SimulatedGraph graph;
  CHECK_EQ(second.sim.device.end_capture(stream, &graph), status::kSuccess);
  stage_batch(parts, {}, &begun);
  CHECK_EQ(first.sim.device.synchronize(), status::kSuccess);
  CHECK_EQ(second.sim.device.synchronize(), status::kSuccess);
  CHECK_EQ(bytes(dst, 1) + bytes(other, 1), "ab");
}

}  // namespace
