// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// How the rows of a table travel: as one copy, a copy for each run, by the kernel of scatter.h, or packed for torch.
#include <algorithm>
#include <cstring>

#include "scatter.h"
#include "stage.h"
#include "table.h"
#include "team.h"

namespace pinstage {

// Rows that are sent whole are one line each, else every plane of a row is a line of its own.
Gather Table::gather_of(const Window& window, const char* base) const noexcept {
  const std::int64_t column_bytes = shape_.columns * shape_.itemsize;
  const std::int64_t lines = whole_rows(window) ? 1 : shape_.planes;  // of a row
  Gather g{};
  g.src = base;
  g.src_rows = shape_.rows * lines;
  g.src_row_stride = column_bytes * (shape_.planes / lines);
  g.src_outer_stride = column_bytes * shape_.planes * shape_.rows;
  g.outer = shape_.outer;
  g.row_bytes = whole_rows(window) ? g.src_row_stride : window.width * shape_.itemsize;
  g.index_stride = 1;
  return g;
}

std::vector<std::int32_t> Table::line_numbers(const std::vector<std::int32_t>& rows, const Window& window) const {
  if (whole_rows(window)) return rows;
  std::vector<std::int32_t> numbers;
  numbers.reserve(rows.size() * static_cast<std::size_t>(window.planes));
  for (const std::int32_t row : rows) {
    for (std::int64_t plane = window.plane; plane < window.plane + window.planes; ++plane) {
      numbers.push_back(static_cast<std::int32_t>(row * shape_.planes + plane));
    }
  }
  return numbers;
}

namespace {

// `count` of the lines, from number `begin` on, densely to `dst`.
Gather part_of(const Gather& all, const std::vector<std::int32_t>& lines, std::int64_t begin, std::int64_t count,
               char* dst) noexcept {
  Gather g = all;
  g.index = lines.data() + begin;
  g.count = count;
  g.dst = dst;
  g.dst_row_stride = g.row_bytes;
  g.dst_outer_stride = g.row_bytes * count;
  return g;
}

}  // namespace

bool Table::worth_scattering(const Taken& taken, const Pool& pool) const noexcept {
  const auto rows = static_cast<std::uint64_t>(taken.lacked.size()),
             row = static_cast<std::uint64_t>(row_bytes(taken.window));
  if (rows * row == 0 || taken.fill_to > taken.window.width || !can_scatter(pool)) return false;
  // A pool that never waits takes them at once, any other at least one line; the packed form is smaller.
  const auto line = static_cast<std::uint64_t>(gather_of(taken.window, nullptr).row_bytes);
  const std::uint64_t lines = pool.options().wait_when_full ? 1 : rows * row / line;
  if (lines * Scatter::most_bytes(line) > pool.options().max_bytes) return false;
  if (taken.runs.empty()) return true;  // the other way to bring them is torch's scatter
  const bool gaps = taken.rows.size() > rows;
  return (gaps || taken.runs.size() >= kFewestScattered) && rows * row <= kMostScatteredBytes;
}

// Line by line, whatever the runs. Lines that lie alike on a vector of the kernel go together: they are as far apart in
// the slot as one is from the next, which is how they are gathered.
Ticket Table::send_scattered(const Taken& taken, Pool& pool, DevicePtr dst, Stream stream, const Wait& wait) {
  Gather all = gather_of(taken.window, source());
  const auto line_bytes = static_cast<std::size_t>(all.row_bytes);
  // Of all outer indices, because these too are lines one behind the other.
  std::vector<std::int64_t> lines;
  const std::vector<std::int32_t> numbers = line_numbers(taken.lacked, taken.window);
  lines.reserve(numbers.size() * static_cast<std::size_t>(shape_.outer));
  for (std::int64_t outer = 0; outer < shape_.outer; ++outer) {
    for (const std::int32_t number : numbers) lines.push_back(outer * all.src_rows + number);
  }
  all.src_rows *= shape_.outer;
  all.outer = 1;
  all.index_is_64 = true;
  const auto place = [&](std::int64_t number) { return dst + static_cast<DevicePtr>(number * all.src_row_stride); };
  const auto from_vector = [&](std::int64_t number) { return place(number) % kScatterVector; };
  if (all.src_row_stride % static_cast<std::int64_t>(kScatterVector) != 0) {
    std::stable_sort(lines.begin(), lines.end(),
                     [&](std::int64_t a, std::int64_t b) { return from_vector(a) < from_vector(b); });
  }

  Ticket ticket{pool.shared_device()};
  const std::size_t most_bytes = Scatter::most_bytes(line_bytes);
  const std::size_t most = std::max<std::size_t>(pool.piece_bytes(lines.size() * most_bytes) / most_bytes, 1);
  for (std::size_t begin = 0; begin < lines.size(); begin += most) {
    const std::size_t end = std::min(begin + most, lines.size());
    Scatter layout;
    struct Alike {
      std::size_t first, count, offset, stride;
    };
    std::vector<Alike> groups;
    for (std::size_t i = begin; i < end; ++i) {
      const std::size_t offset = layout.add(place(lines[i]), line_bytes);
      if (i == begin || from_vector(lines[i]) != from_vector(lines[i - 1])) groups.push_back({i, 0, offset, 0});
      Alike& group = groups.back();
      if (group.count++ == 1) group.stride = offset - group.offset;
    }
    pool.stage_several(
        layout.slot_bytes(), stream, wait,
        [&](char* slot) {
          for (const Alike& group : groups) {
            Gather g = all;
            g.index = lines.data() + group.first;
            g.count = static_cast<std::int64_t>(group.count);
            g.dst = slot + group.offset;
            g.dst_row_stride = static_cast<std::int64_t>(group.stride);
            gather_in_parallel(g);
          }
          layout.write_pieces(slot);
        },
        [&](const char* slot, std::size_t* enqueued, const char** call) {
          return layout.enqueue(pool.device(), slot, stream, enqueued, call);
        },
        &ticket);
  }
  return ticket;
}

std::optional<Ticket> Table::send(const Taken& taken, Pool& pool, DevicePtr dst, Stream stream, const Wait& wait) {
  const Window& window = taken.window;
  if (worth_scattering(taken, pool)) return send_scattered(taken, pool, dst, stream, wait);
  if (taken.runs.empty()) return std::nullopt;
  if (row_bytes(window) == 0) return pool.device().fence(stream);  // there are tails to fill
  const std::int64_t row_stride = shape_.planes * shape_.columns;
  struct Copy {
    CopyPlan plan;
    DevicePtr dst;
    Gather lines;
  };
  const std::vector<std::int32_t> numbers = line_numbers(taken.rows, window);
  const std::int64_t lines = whole_rows(window) ? 1 : window.planes;  // that travel, of a row
  const Gather all = gather_of(window, source());
  std::vector<Copy> copies(taken.runs.size());
  std::size_t nbytes = 0;
  for (std::size_t i = 0; i < copies.size(); ++i) {
    const RowRun& run = taken.runs[i];
    const std::int64_t shape[] = {shape_.outer, run.count, window.planes, window.width};
    const std::int64_t strides[] = {shape_.rows * row_stride, row_stride, shape_.columns, 1};
    Copy& copy = copies[i];
    if (!plan_copy(4, shape, strides, static_cast<std::size_t>(shape_.itemsize), &copy.plan)) return std::nullopt;
    copy.dst = dst + static_cast<DevicePtr>((run.first * row_stride + window.plane * shape_.columns) * shape_.itemsize);
    copy.lines = part_of(all, numbers, run.at * lines, run.count * lines, nullptr);
    nbytes += copy.plan.nbytes();
  }

  Ticket ticket{pool.shared_device()};
  if (copies.size() == 1 || pool.piece_bytes(nbytes) < nbytes) {
    for (const Copy& copy : copies) stage_rows(pool, copy.plan, copy.dst, copy.lines, stream, wait, &ticket);
    return ticket;
  }
  pool.stage_several(
      nbytes, stream, wait,
      [&](char* slot) {
        for (const Copy& copy : copies) {
          Gather g = copy.lines;
          g.dst = slot;
          gather_in_parallel(g);
          slot += copy.plan.nbytes();
        }
      },
      [&](const char* slot, std::size_t* enqueued, const char** call) {
        Status status = status::kSuccess;
        *enqueued = 0;
        for (std::size_t i = 0; i < copies.size() && status == status::kSuccess; ++i) {
          std::size_t taken_by_driver = 0;
          status =
              enqueue_copy(pool.device().driver(), copies[i].plan, copies[i].dst, slot, stream, &taken_by_driver, call);
          *enqueued += taken_by_driver;
          slot += copies[i].plan.nbytes();
        }
        return status;
      },
      &ticket);
  return ticket;
}

void Table::send_packed(const Taken& taken, std::int64_t begin, std::int64_t count, Pool& pool, DevicePtr dst,
                        Stream stream, const Wait& wait) {
  const std::vector<std::int32_t> rows(taken.rows.begin() + begin, taken.rows.begin() + begin + count);
  const std::vector<std::int32_t> numbers = line_numbers(rows, taken.window);
  const std::int64_t index_bytes = packed_index_bytes(count);
  CopyPlan plan;
  plan.width = static_cast<std::size_t>(index_bytes + count * row_bytes(taken.window));
  pool.stage(plan.width, plan, dst, stream, wait, [&](char* slot) {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::int64_t row = rows[i];
      std::memcpy(slot + i * sizeof(row), &row, sizeof(row));
    }
    if (row_bytes(taken.window) == 0) return;
    gather_in_parallel(part_of(gather_of(taken.window, source()), numbers, 0, static_cast<std::int64_t>(numbers.size()),
                               slot + index_bytes));
  });
}

Ticket Table::send_rows(const NamedRows& index, const Window& window, Pool& pool, const CopyPlan& plan, DevicePtr dst,
                        Stream stream, const Wait& wait) {
  const std::vector<std::int32_t> numbers = line_numbers(checked_rows(index), window);
  Ticket ticket{pool.shared_device()};
  const Gather lines =
      part_of(gather_of(window, host_), numbers, 0, static_cast<std::int64_t>(numbers.size()), nullptr);
  stage_rows(pool, plan, dst, lines, stream, wait, &ticket);
  return ticket;
}

}  // namespace pinstage
