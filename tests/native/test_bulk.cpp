// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "bulk.h"
#include "check.h"
#include "simulated_fixture.h"

using namespace pinstage;
using pinstage::check::run_together;
using pinstage::check::Sim;
using pinstage::check::throws;

namespace {

std::vector<char> random_bytes(std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<char> bytes(n);
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

// What the copy engine does with a plan.
void run_plan(const CopyPlan& plan, char* dst, const char* src) {
  for (std::size_t repeat = 0; repeat < plan.repeats; ++repeat) {
    for (std::size_t slice = 0; slice < plan.depth; ++slice) {
      for (std::size_t row = 0; row < plan.height; ++row) {
        std::memcpy(
            dst + static_cast<std::int64_t>(repeat) * plan.repeat_stride + (slice * plan.slice_rows + row) * plan.pitch,
            src, plan.width);
        src += plan.width;
      }
    }
  }
}

CopyPlan random_plan(std::mt19937& random) {
  const auto upto = [&](unsigned n) { return 1 + random() % n; };
  CopyPlan plan;
  plan.width = upto(300);
  if (random() % 4 == 0) return plan;
  plan.height = upto(9);
  plan.pitch = plan.width + random() % 50;
  if (random() % 3 == 0) return plan;
  plan.depth = upto(6);
  plan.slice_rows = plan.height + random() % 3;
  plan.repeats = upto(4);
  plan.repeat_stride = static_cast<std::int64_t>(plan.pitch * plan.slice_rows * plan.depth + random() % 70);
  return plan;
}

std::size_t extent_of(const CopyPlan& plan) {
  return static_cast<std::size_t>(plan.repeat_stride) * (plan.repeats - 1) +
         (plan.slice_rows * (plan.depth - 1) + plan.height) * plan.pitch + plan.width;
}

CopyPlan dense(std::size_t nbytes) {
  CopyPlan plan;
  plan.width = nbytes;
  return plan;
}

struct Table {
  std::vector<char> bytes;
  std::vector<std::int64_t> index64;
  std::vector<std::int32_t> index32;
  Gather g{};
  std::vector<char> gathered;  // by the plain loop

  Table(std::int64_t outer, std::int64_t rows, std::int64_t count, std::int64_t row_bytes, bool is_64,
        std::int64_t stride, unsigned seed) {
    const std::int64_t pitch = row_bytes + 5;
    bytes = random_bytes(static_cast<std::size_t>(outer * rows * pitch), seed);
    std::mt19937 random(seed);
    for (std::int64_t i = 0; i < count * stride; ++i) {
      index64.push_back(static_cast<std::int64_t>(random() % static_cast<unsigned>(rows)));
      index32.push_back(static_cast<std::int32_t>(index64.back()));
    }
    g.src = bytes.data();
    g.src_rows = rows;
    g.src_row_stride = pitch;
    g.src_outer_stride = rows * pitch;
    g.outer = outer;
    g.row_bytes = row_bytes;
    g.index = is_64 ? static_cast<const void*>(index64.data()) : index32.data();
    g.index_is_64 = is_64;
    g.index_stride = stride;
    g.count = count;
    for (std::int64_t o = 0; o < outer; ++o) {
      for (std::int64_t i = 0; i < count; ++i) {
        const char* row = g.src + o * g.src_outer_stride + index64[static_cast<std::size_t>(i * stride)] * pitch;
        gathered.insert(gathered.end(), row, row + row_bytes);
      }
    }
  }
};

}  // namespace

TEST("the pieces of a plan write what the plan writes, once, and no piece is larger than asked for") {
  std::mt19937 random(1);
  for (int round = 0; round < 3000; ++round) {
    const CopyPlan plan = random_plan(random);
    const std::size_t most = 1 + random() % (2 * plan.nbytes());
    const std::size_t grain = 1 + random() % 64;
    const std::vector<char> src = random_bytes(plan.nbytes(), static_cast<unsigned>(round));
    std::vector<char> whole(extent_of(plan), 'x'), pieced(extent_of(plan), 'x');
    run_plan(plan, whole.data(), src.data());
    const PlanPieces pieces(plan, most, grain);
    std::size_t at = 0;
    for (std::size_t i = 0; i < pieces.count(); ++i) {
      const PlanPieces::Piece piece = pieces.at(i);
      CHECK_EQ(piece.begin, at);
      CHECK(piece.plan.nbytes() >= 1 && piece.plan.nbytes() <= most);
      run_plan(piece.plan, pieced.data() + piece.dst_offset, src.data() + piece.begin);
      at += piece.plan.nbytes();
    }
    CHECK_EQ(at, plan.nbytes());
    CHECK(whole == pieced);
    if (most >= plan.nbytes()) CHECK_EQ(pieces.count(), 1);
    CHECK(pieces.count() <= 4 * (plan.nbytes() / most + 1));
  }
}

TEST("a run of bytes is cut evenly, at multiples of the grain") {
  const PlanPieces pieces(dense(100'000), 40'000, 4096);
  CHECK_EQ(pieces.count(), 3);
  CHECK_EQ(pieces.at(1).begin, 36'864);  // 33'334 and up to the next multiple
  CHECK_EQ(pieces.at(2).begin, 73'728);
  CHECK_EQ(pieces.at(2).plan.width, 26'272);
  CHECK_EQ(pieces.at(2).dst_offset, 73'728);
}

TEST("any part of a gather equals that part of the whole") {
  std::mt19937 random(3);
  for (std::int64_t row_bytes : {1, 3, 64, 100, 584, 4096}) {
    for (std::int64_t outer : {1, 4}) {
      const Table table(outer, 20, 17, row_bytes, outer == 1, 1 + row_bytes % 2, static_cast<unsigned>(row_bytes));
      const auto size = static_cast<std::int64_t>(table.gathered.size());
      for (int round = 0; round < 200; ++round) {
        const std::int64_t begin = static_cast<std::int64_t>(random()) % size;
        const std::int64_t end = begin + 1 + static_cast<std::int64_t>(random()) % (size - begin);
        std::vector<char> dst(static_cast<std::size_t>(end - begin) + 64, 'x');
        gather_part(table.g, begin, end, dst.data());
        CHECK(std::memcmp(dst.data(), table.gathered.data() + begin, static_cast<std::size_t>(end - begin)) == 0);
        CHECK(std::vector<char>(dst.end() - 64, dst.end()) == std::vector<char>(64, 'x'));
      }
    }
  }
}

namespace {

// A pool of `max_bytes` on a simulated device.
struct Pools {
  Pools(Sim& sim, std::uint64_t max_bytes)
      : device(std::make_shared<Device>(
            sim.driver, sim.device.context(), DeviceKind::kSimulated, 0,
            [](void* self, int) { return static_cast<SimulatedDevice*>(self)->current_stream(); }, &sim.device)) {
    PoolOptions options;
    options.initial_bytes = options.max_bytes = max_bytes;
    pool = Pool::make(device, options);
  }
  ~Pools() {
    pool->close({});
    device->release_pools();
    device->shutdown();
  }
  std::shared_ptr<Device> device;
  std::shared_ptr<Pool> pool;
};

void copy_in_pieces(Pool& pool, char* dst, const std::vector<char>& src, Stream stream) {
  stage_in_pieces(pool, dense(src.size()), Sim::address(dst), stream, {}, pool.piece_bytes(src.size()), 64,
                  [&](char* slot, std::size_t begin, std::size_t nbytes) { std::memcpy(slot, &src[begin], nbytes); });
}

}  // namespace

TEST("threads on streams of their own send large copies through a pool of four small slots") {
  Sim sim(Schedule::kLate);
  constexpr std::size_t kBytes = 40'000;
  constexpr int kThreads = 4;
  Pools pools(sim, 4096);
  char* dst[kThreads];
  Stream streams[kThreads];
  for (int i = 0; i < kThreads; ++i) {
    dst[i] = sim.heap(kBytes);
    streams[i] = sim.stream();
  }
  run_together(kThreads, [&](int i) {
    for (unsigned round = 0; round < 5; ++round) {
      std::vector<char> src = random_bytes(kBytes, round * kThreads + static_cast<unsigned>(i));
      copy_in_pieces(*pools.pool, dst[i], src, streams[i]);
      std::memset(src.data(), 0, src.size());
    }
  });
  CHECK_EQ(sim.device.synchronize(), status::kSuccess);
  for (int i = 0; i < kThreads; ++i) {
    const std::vector<char> last = random_bytes(kBytes, 4 * kThreads + static_cast<unsigned>(i));
    CHECK(std::memcmp(dst[i], last.data(), kBytes) == 0);
  }
  CHECK(pools.pool->stats().capacity <= 4096);
  CHECK(pools.pool->consistent());
  CHECK_EQ(sim.device.violations(), 0);
}

TEST("control: where queries lie, a large copy goes wrong") {
  Sim sim(Schedule::kLate, 0, SimulatedDevice::kQueueDepth, true);
  constexpr std::size_t kBytes = 40'000;
  Pools pools(sim, 4096);
  char* const dst = sim.heap(kBytes);
  const std::vector<char> src = random_bytes(kBytes, 1);
  copy_in_pieces(*pools.pool, dst, src, nullptr);
  CHECK_EQ(sim.device.synchronize(), status::kSuccess);
  CHECK(std::memcmp(dst, src.data(), kBytes) != 0);
}

TEST("an error in the middle names what was enqueued, and one before the first piece does not") {
  Sim sim(Schedule::kLate);
  Pools pools(sim, 4096);
  char* const dst = sim.heap(10'240);
  const std::vector<char> src(10'240, 'a');
  const auto error_of = [&](std::uint64_t nth) {
    sim.device.fail("cuMemcpyHtoDAsync", nth, status::kOutOfMemory);
    try {
      copy_in_pieces(*pools.pool, dst, src, nullptr);
    } catch (const Error& error) {
      CHECK_EQ(error.status(), status::kOutOfMemory);
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(error_of(1).find("mixture of old and new") == std::string::npos);
  CHECK(error_of(3).find("2048 of 10240 bytes were enqueued") != std::string::npos);
  CHECK(pools.pool->consistent());
}

TEST("a large slab is mapped on a border of huge pages, registered, and given back") {
  Sim sim(Schedule::kLate);
  {
    Pools pools(sim, 9 << 20);
    const LeaseRef lease = pools.pool->take(9 << 20, {});
    char* const data = pools.pool->data(lease);
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(data) % (2 << 20), 0);
    std::memset(data, 1, 9 << 20);
    CHECK_EQ(sim.device.host_allocations(), 1);
    pools.pool->cancel(lease);
  }
  CHECK_EQ(sim.device.host_allocations(), 0);
}
