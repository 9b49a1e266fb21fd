// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// Which rows of a table travel, in which runs, and that their bytes, and no others, arrive.
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "simulated_fixture.h"
#include "table.h"

namespace {

using namespace pinstage;
using namespace pinstage::check;

struct Rig {
  explicit Rig(const TableShape& table_shape, Tracking tracking)
      : shape(table_shape), host(nbytes(), 'h'), table(shape, host.data(), tracking) {
    device = std::make_shared<Device>(sim.driver, sim.device.context(), DeviceKind::kSimulated, 0, nullptr, nullptr);
    pool = Pool::make(device, {1 << 20, 1 << 20});
    mirror = sim.heap(nbytes());
    std::memset(mirror, 'd', nbytes());
  }

  ~Rig() {
    pool.reset();
    device->release_pools();
  }

  std::size_t nbytes() const {
    return static_cast<std::size_t>(shape.outer * shape.rows * shape.planes * shape.columns * shape.itemsize);
  }
  Table::Taken take(const std::vector<std::int32_t>& rows, Window window, bool pad = false) {
    return table.take({rows.data(), false, 1, static_cast<std::int64_t>(rows.size())}, window, pad);
  }
  Table::Taken take_first(std::int64_t rows, Window window, bool pad = false) {
    return table.take({nullptr, false, 1, rows}, window, pad);
  }
  void mark(const std::vector<std::int32_t>& rows) {
    table.mark({rows.data(), false, 1, static_cast<std::int64_t>(rows.size())});
  }
  bool send(const Table::Taken& taken) {
    const bool sent = table.send(taken, *pool, Sim::address(mirror), nullptr, {}).has_value();
    CHECK_EQ(sim.device.synchronize(), status::kSuccess);
    return sent;
  }

  Sim sim{Schedule::kLate};
  TableShape shape;
  std::string host;
  Table table;
  std::shared_ptr<Device> device;
  std::shared_ptr<Pool> pool;
  char* mirror;
};

// "first+count" of each run, or "scattered"; then how many rows travel.
std::string told(const Table::Taken& taken) {
  if (taken.rows.empty()) return "nothing";
  std::string text;
  for (const RowRun& run : taken.runs) {
    text += std::to_string(run.first) + "+" + std::to_string(run.count) + " ";
  }
  return (text.empty() ? "scattered " : text) + "of " + std::to_string(taken.rows.size());
}

constexpr TableShape kShape{2, 12, 3, 10, 4};
constexpr Window kAll{0, 3, 10};

}  // namespace

TEST("neighbours are one run, whatever their order and however often they are named") {
  Rig rig(kShape, Tracking::kNone);
  CHECK_EQ(told(rig.take({3, 1, 2, 2, 7}, kAll)), "1+3 7+1 of 4");
  CHECK_EQ(told(rig.take_first(5, kAll)), "0+5 of 5");
  CHECK_EQ(told(rig.take({}, kAll)), "nothing");
  CHECK_EQ(told(rig.take_first(0, kAll)), "nothing");
}

TEST("too many runs go as one copy if those between were named too and are few, else scattered") {
  Rig rig(kShape, Tracking::kMarks);
  const std::int64_t row_bytes = rig.table.row_bytes(kAll);
  CHECK_EQ(row_bytes, 2 * 3 * 10 * 4);
  rig.table.most_runs = 2;
  for (const auto& [surplus, expected] :
       {std::pair{3 * row_bytes, "1+6 of 6"}, std::pair{3 * row_bytes - 1, "scattered of 3"}}) {
    rig.table.most_surplus_bytes = surplus;
    rig.mark({1, 3, 6});
    CHECK_EQ(told(rig.take_first(12, kAll)), expected);
    rig.mark({1, 3, 6});
    CHECK_EQ(told(rig.take({6, 1, 3}, kAll)), "scattered of 3");
  }
}

TEST("a row is lacked until it was taken at the width, or once it was put back") {
  Rig rig(kShape, Tracking::kMarks);
  CHECK_EQ(told(rig.take_first(12, kAll)), "nothing");
  rig.mark({4});
  CHECK_EQ(told(rig.take_first(4, kAll)), "nothing");
  CHECK_EQ(told(rig.take_first(12, {0, 3, 6})), "4+1 of 1");
  CHECK_EQ(told(rig.take_first(12, {0, 3, 6})), "nothing");
  const Table::Taken wider = rig.take_first(12, {1, 1, 10});
  CHECK_EQ(told(wider), "4+1 of 1");
  rig.table.put_back(wider);
  CHECK_EQ(told(rig.take_first(12, {0, 1, 6})), "nothing");  // of plane 0, that width was sent
  CHECK_EQ(told(rig.take_first(12, {1, 1, 2})), "4+1 of 1");
}

TEST("a tail is padded once, and again after a wider commit or another value") {
  Rig rig(kShape, Tracking::kMarks);
  const Window narrow{0, 3, 4};
  CHECK_EQ(told(rig.take_first(2, narrow, true)), "nothing");  // the mirror began as zeros, and so did the value
  rig.table.forget_padding();
  const Table::Taken first = rig.take_first(2, narrow, true);
  CHECK_EQ(told(first), "0+2 of 2");
  CHECK_EQ(first.fill_to, 10);
  CHECK_EQ(told(rig.take_first(2, narrow, true)), "nothing");
  CHECK_EQ(rig.take_first(2, {0, 3, 7}).fill_to, 0);
  CHECK_EQ(rig.take_first(2, narrow, true).fill_to, 7);
  const Table::Taken failed = rig.take_first(2, {0, 3, 2}, true);
  CHECK_EQ(failed.fill_to, 4);
  rig.table.put_back(failed);
  CHECK_EQ(rig.take_first(2, {0, 3, 2}, true).fill_to, 4);
}

TEST("comparison finds the rows that differ in the live columns, and forgets them when they were taken") {
  Rig rig(kShape, Tracking::kCompare);
  std::memset(&rig.host[0], 0, rig.nbytes());
  CHECK_EQ(told(rig.take_first(12, kAll)), "nothing");
  const auto at = [&](int outer, int row, int plane, int column) {
    return static_cast<std::size_t>((((outer * 12 + row) * 3 + plane) * 10 + column) * 4);
  };
  rig.host[at(1, 5, 2, 6) + 3] = 'x';
  CHECK_EQ(told(rig.take_first(12, {0, 3, 6})), "nothing");
  CHECK_EQ(told(rig.take_first(12, {0, 2, 10})), "nothing");
  const Table::Taken taken = rig.take_first(12, kAll);
  CHECK_EQ(told(taken), "5+1 of 1");
  CHECK_EQ(told(rig.take_first(12, kAll)), "nothing");
  rig.table.put_back(taken);
  CHECK_EQ(told(rig.take_first(12, kAll)), "5+1 of 1");
}

TEST("large tables are compared by the team, with the same result") {
  Rig rig({1, 512, 1, 1024, 4}, Tracking::kCompare);
  std::memset(&rig.host[0], 0, rig.nbytes());
  const Window all{0, 1, 1024};
  CHECK_EQ(told(rig.take_first(512, all)), "nothing");
  for (const std::size_t row : {0, 255, 511}) rig.host[row * 4096 + 4095] = 'x';
  CHECK_EQ(told(rig.take_first(512, all)), "0+1 255+1 511+1 of 3");
}

TEST("named bytes arrive, and no others") {
  for (const auto& [width, plane, planes] : {std::tuple{10, 0, 3}, std::tuple{7, 0, 3}, std::tuple{3, 1, 2}}) {
    Rig rig({2, 12, 3, 10, 4}, Tracking::kNone);
    const Window window{plane, planes, width};
    CHECK(rig.send(rig.take({1, 2, 3, 8}, window)));
    std::string expected(rig.nbytes(), 'd');
    for (int line = 0; line < 2 * 12 * 3; ++line) {
      const int row = line / 3 % 12;
      if (line % 3 < plane || line % 3 >= plane + planes || !(row == 8 || (row >= 1 && row <= 3))) continue;
      std::memset(&expected[static_cast<std::size_t>(line) * 40], 'h', static_cast<std::size_t>(width) * 4);
    }
    CHECK(bytes(rig.mirror, rig.nbytes()) == expected);
  }
}

TEST("a row that is marked while others are taken is taken by the next") {
  Rig rig(kShape, Tracking::kMarks);
  std::atomic<bool> done{false};
  std::vector<int> taken(12);
  const auto take_all = [&] {
    for (const std::int32_t row : rig.take_first(12, kAll).lacked) ++taken[static_cast<std::size_t>(row)];
  };
  run_together(2, [&](int thread) {
    if (thread == 0) {
      for (std::int32_t i = 0; i < 5000; ++i) rig.mark({i % 12, (i * 5) % 12});
      done.store(true);
    } else {
      while (!done.load()) take_all();
      take_all();
    }
  });
  for (const int times : taken) CHECK(times > 0);
  CHECK_EQ(told(rig.take_first(12, kAll)), "nothing");
}

TEST("a row out of range is an error that names it and its place, and takes or marks nothing") {
  Rig rig(kShape, Tracking::kMarks);
  for (const std::int32_t bad : {12, -1, 1 << 30}) {
    CHECK(throws<Error>([&] { rig.take({0, bad}, kAll); }));
    try {
      rig.mark({0, bad});
    } catch (const Error& error) {
      CHECK_EQ(std::string(error.what()),
               "row " + std::to_string(bad) + " at position 1 is out of range for a table of 12 rows");
      continue;
    }
    CHECK(false);
  }
  CHECK_EQ(told(rig.take_first(12, kAll)), "nothing");
}
