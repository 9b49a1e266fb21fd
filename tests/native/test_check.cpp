// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstdint>
#include <string>

#include "allocations.h"
#include "check.h"

namespace {

using namespace pinstage::check;

TEST("a failed check throws what was expected and what was found") {
  CHECK(throws<Failure>([] { CHECK(1 > 2); }));
  std::string message;
  try {
    CHECK_EQ(std::uint8_t{65}, 66);
  } catch (const Failure& failure) {
    message = failure.what();
  }
  CHECK(message.find("65 is not 66") != std::string::npos);
}

TEST("integers of unlike sign are compared by value") {
  CHECK_EQ(std::uint64_t{3}, 3);
  CHECK_EQ(3, std::uint64_t{3});
  CHECK(!equal(std::uint64_t{0} - 1, -1));
  CHECK(!equal(-1, std::uint64_t{0} - 1));
}

TEST("threads that run together are all inside at once") {
  constexpr int kThreads = 4;
  Barrier inside(kThreads);  // nobody passes it unless all are
  std::atomic<int> passed{0};
  run_together(kThreads, [&](int) {
    for (int round = 0; round < 100; ++round) inside.arrive_and_wait();
    ++passed;
  });
  CHECK_EQ(passed.load(), kThreads);
}

TEST("a failure in one thread fails the test once all have ended") {
  std::atomic<int> ended{0};
  CHECK(throws<Failure>([&ended] {
    run_together(3, [&ended](int i) {
      ++ended;
      CHECK(i != 1);
    });
  }));
  CHECK_EQ(ended.load(), 3);
}

TEST("allocations are counted for each thread apart") {
  const std::uint64_t before = allocations();
  run_together(1, [](int) {
    const std::uint64_t before_here = allocations();
    const std::string text(1000, ' ');
    CHECK_EQ(allocations() - before_here, 1);
    CHECK_EQ(text.size(), 1000);
  });
  const std::uint64_t after_threads = allocations();
  const std::string text(1000, ' ');
  CHECK_EQ(allocations() - after_threads, 1);
  CHECK(after_threads > before);  // run_together itself allocates, in this thread
}

}  // namespace
