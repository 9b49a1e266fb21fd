// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "gather.h"
#include "team.h"

using namespace pinstage;
using pinstage::check::run_together;
using pinstage::check::throws;

namespace {

struct Counted {
  std::vector<std::atomic<int>> calls;
  explicit Counted(std::size_t chunks) : calls(chunks) {}
  static void run(void* self, std::int64_t index) noexcept {
    static_cast<Counted*>(self)->calls[static_cast<std::size_t>(index)].fetch_add(1);
  }
};

constexpr std::size_t kLarge = 4 << 20;

// True when the team did it.
bool run_and_check(std::size_t chunks, int threads, std::size_t nbytes = kLarge) {
  Counted counted(chunks);
  const bool done = Team::instance().run(static_cast<std::int64_t>(chunks), threads, nbytes, &Counted::run, &counted);
  for (const auto& calls : counted.calls) CHECK_EQ(calls.load(), done ? 1 : 0);
  return done;
}

std::vector<char> random_bytes(std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<char> bytes(n);
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

}  // namespace

TEST("every chunk is done exactly once before run() returns") {
  for (int round = 0; round < 300; ++round) {
    for (std::size_t chunks : {0, 1, 2, 7, 64}) run_and_check(chunks, 1 + round % 5);
  }
}

TEST("of several callers at once each gets all of its chunks done or none") {
  run_together(6, [](int caller) {
    for (int round = 0; round < 200; ++round) run_and_check(static_cast<std::size_t>(1 + (caller + round) % 40), 4);
  });
}

TEST("a job too small for its caller to wake parked workers is left to it, unless it follows another closely") {
  Team::instance().set_threads(2);
  while (run_and_check(4, 2, 1000)) std::this_thread::yield();  // until a pause made it no burst
  CHECK(run_and_check(4, 2));
  CHECK(!run_and_check(4, 1));
  CHECK(!run_and_check(1, 2));
  Team::instance().set_threads(0);
}

TEST("callers at work at once share the threads, and one who is alone again has them all") {
  Team& team = Team::instance();
  const int all = team.threads();                        // 1 on a machine with one CPU
  while (team.share() < all) std::this_thread::yield();  // until the callers before this test are forgotten
  std::atomic<bool> shared{false};
  run_together(3, [&](int) {
    while (!shared.load()) {
      if (team.share() <= std::max(all / 2, 1)) shared.store(true);
    }
  });
  CHECK(shared.load());
  while (team.share() < all) std::this_thread::yield();
}

TEST("a snapshot on several threads has the source's bytes and nothing past them") {
  run_together(3, [](int caller) {
    for (std::size_t nbytes : {std::size_t{1}, std::size_t{49151}, std::size_t{49152}, std::size_t{100001},
                               std::size_t{1} << 20, (std::size_t{5} << 20) + 13}) {
      const std::vector<char> src = random_bytes(nbytes, static_cast<unsigned>(caller + 1));
      std::vector<char> dst(nbytes + 64, 'x');
      copy_bytes_in_parallel(dst.data(), src.data(), nbytes);
      CHECK(std::memcmp(dst.data(), src.data(), nbytes) == 0);
      CHECK(std::vector<char>(dst.end() - 64, dst.end()) == std::vector<char>(64, 'x'));
    }
  });
}

TEST("a gather on several threads equals the plain loop") {
  const std::int64_t outer = 3, rows = 500, count = 333;
  for (std::int64_t row_bytes : {4, 92, 584, 4096}) {
    const std::vector<char> src = random_bytes(static_cast<std::size_t>(outer * rows * row_bytes), 7);
    std::vector<std::int32_t> index(static_cast<std::size_t>(count));
    std::mt19937 random(11);
    for (std::int32_t& i : index) i = static_cast<std::int32_t>(random() % static_cast<unsigned>(rows));
    std::vector<char> dst(static_cast<std::size_t>(outer * count * row_bytes));
    Gather g{};
    g.src = src.data();
    g.src_rows = rows;
    g.src_row_stride = row_bytes;
    g.src_outer_stride = rows * row_bytes;
    g.dst = dst.data();
    g.dst_row_stride = row_bytes;
    g.dst_outer_stride = count * row_bytes;
    g.outer = outer;
    g.row_bytes = row_bytes;
    g.index = index.data();
    g.index_stride = 1;
    g.count = count;
    gather_in_parallel(g);
    for (std::int64_t o = 0; o < outer; ++o) {
      for (std::int64_t i = 0; i < count; ++i) {
        const char* row = src.data() + (o * rows + index[static_cast<std::size_t>(i)]) * row_bytes;
        CHECK(std::memcmp(dst.data() + (o * count + i) * row_bytes, row, static_cast<std::size_t>(row_bytes)) == 0);
      }
    }
  }
}

TEST("the number of threads is at least one and at most the CPUs that may be used") {
  Team& team = Team::instance();
  team.set_threads(1000);
  CHECK_EQ(team.threads(), usable_cpus());
  team.set_threads(1);
  CHECK_EQ(team.threads(), 1);
  run_and_check(9, team.threads());
  CHECK(throws<std::invalid_argument>([&] { team.set_threads(-1); }));
  team.set_threads(0);
  CHECK(team.threads() >= 1);
}
