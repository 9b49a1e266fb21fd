// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include "table.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <string>

#include "scatter.h"
#include "stage.h"
#include "team.h"

namespace pinstage {
namespace {

using Guard = std::lock_guard<std::mutex>;

// Comparing so many bytes takes one thread about as long as handing the job to the team (10 GB/s, cold).
constexpr std::int64_t kCompareAlone = 256 << 10;

std::int32_t checked_row(const NamedRows& named, std::int64_t position, std::int64_t rows) {
  const std::int64_t row = named.at(position);
  if (row >= 0 && row < rows) return static_cast<std::int32_t>(row);
  throw Error(ErrorKind::kIndex, "row " + std::to_string(row) + " at position " + std::to_string(position) +
                                     " is out of range for a table of " + std::to_string(rows) + " rows");
}

// In order, each once. The index may be one that is being written: each element is read once, then checked.
std::vector<std::int32_t> ascending(const NamedRows& named, std::int64_t rows) {
  std::vector<std::int32_t> sorted(static_cast<std::size_t>(named.count));
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    sorted[i] = checked_row(named, static_cast<std::int64_t>(i), rows);
  }
  if (!std::is_sorted(sorted.begin(), sorted.end())) std::sort(sorted.begin(), sorted.end());
  sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
  return sorted;
}

}  // namespace

void Table::Free::operator()(char* memory) const noexcept { std::free(memory); }

Table::Table(const TableShape& shape, const char* host, Tracking tracking)
    : shape_(shape), host_(host), tracking_(tracking) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (shape.rows * shape.planes > kMost || shape.columns > kMost) {
    throw Error(ErrorKind::kValue, "a StagedTable has at most 2^31 - 1 rows (times planes) and columns, not " +
                                       std::to_string(shape.rows * shape.planes) + " and " +
                                       std::to_string(shape.columns));
  }
  // Host, shadow and device begin as zeros: the device has every column, and every tail holds the pad value 0.
  lines_.assign(static_cast<std::size_t>(shape.rows * shape.planes), {static_cast<std::int32_t>(shape.columns), 0});
  if (tracking == Tracking::kCompare) {
    // calloc: columns that never live cost no memory
    const auto nbytes = static_cast<std::size_t>(shape.outer * shape.rows * shape.planes * shape.columns);
    shadow_.reset(
        static_cast<char*>(std::calloc(std::max<std::size_t>(nbytes, 1), static_cast<std::size_t>(shape.itemsize))));
    if (shadow_ == nullptr) throw std::bad_alloc();
  }
}

void Table::mark(const NamedRows& rows) {
  const std::vector<std::int32_t> marked = ascending(rows, shape_.rows);
  const Guard lock(mutex_);
  for (const std::int32_t row : marked) {
    for (std::int64_t plane = 0; plane < shape_.planes; ++plane) {
      lines_[static_cast<std::size_t>(row * shape_.planes + plane)].current = 0;
    }
  }
}

void Table::forget_padding() {
  const Guard lock(mutex_);
  for (Line& each : lines_) each.padded = static_cast<std::int32_t>(shape_.columns);
}

char* Table::line(char* base, std::int64_t outer, std::int64_t number) const noexcept {
  return base + (outer * shape_.rows * shape_.planes + number) * shape_.columns * shape_.itemsize;
}

// libc's memcmp has the vectors of this CPU: of 1024 rows of 880 B, 32 KB apart, it reads 26 GB/s cached and 5.5 cold,
// and a vectorised loop of our own no more (Ice Lake server, one thread).
bool Table::differs(std::int64_t row, const Window& window) const noexcept {
  const auto nbytes = static_cast<std::size_t>(window.width * shape_.itemsize);
  for (std::int64_t outer = 0; outer < shape_.outer; ++outer) {
    for (std::int64_t plane = window.plane; plane < window.plane + window.planes; ++plane) {
      const std::int64_t number = row * shape_.planes + plane;
      const char* const written = line(const_cast<char*>(host_), outer, number);
      if (std::memcmp(written, line(shadow_.get(), outer, number), nbytes) != 0) return true;
    }
  }
  return false;
}

void Table::find_changes(const NamedRows& named, const Window& window, std::vector<std::uint8_t>* changed) const {
  changed->resize(static_cast<std::size_t>(named.count));
  struct Job {
    const Table* table;
    const NamedRows* named;
    const Window* window;
    std::uint8_t* changed;
    std::int64_t rows;  // of a chunk

    static void run(void* self, std::int64_t chunk) noexcept {
      const auto& job = *static_cast<const Job*>(self);
      const std::int64_t end = std::min((chunk + 1) * job.rows, job.named->count);
      for (std::int64_t i = chunk * job.rows; i < end; ++i) {
        job.changed[i] = job.table->differs(job.named->at(i), *job.window);
      }
    }
  };
  const std::int64_t nbytes = named.count * row_bytes(window);
  Job job{this, &named, &window, changed->data(), named.count};
  if (nbytes > kCompareAlone) {
    Team& team = Team::instance();
    const std::int64_t threads = std::min<std::int64_t>(team.share(), nbytes / (kCompareAlone / 2));
    job.rows = std::max<std::int64_t>(named.count * (kCompareAlone / 4) / nbytes, 1);
    const std::int64_t chunks = (named.count + job.rows - 1) / job.rows;
    if (team.run(chunks, static_cast<int>(threads), static_cast<std::size_t>(nbytes), &Job::run, &job)) return;
    job.rows = named.count;
  }
  Job::run(&job, 0);
}

bool Table::lacks(std::int64_t row, const Window& window, bool pad) const noexcept {
  if (tracking_ == Tracking::kNone) return true;
  for (std::int64_t plane = window.plane; plane < window.plane + window.planes; ++plane) {
    const Line& each = lines_[static_cast<std::size_t>(row * shape_.planes + plane)];
    if (each.current < window.width || (pad && each.padded > window.width)) return true;
  }
  return false;
}

// Most commits of an unchanged table end here: one pass that compilers vectorise, 0.3 us for 1024 lines.
bool Table::has_first(std::int64_t rows, const Window& window, bool pad) const noexcept {
  if (tracking_ == Tracking::kNone) return false;
  const auto width = static_cast<std::int32_t>(window.width);
  const std::int32_t most_padded = pad ? width : std::numeric_limits<std::int32_t>::max();
  int lacking = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(rows * shape_.planes); ++i) {
    lacking |= static_cast<int>(lines_[i].current < width) | static_cast<int>(lines_[i].padded > most_padded);
  }
  return lacking == 0;
}

Table::Taken Table::take(const NamedRows& named_rows, const Window& window, bool pad) {
  Taken taken;
  taken.window = window;
  NamedRows named = named_rows;
  std::vector<std::int32_t> sorted;
  if (named.index != nullptr) {
    sorted = ascending(named, shape_.rows);
    named = {sorted.data(), false, 1, static_cast<std::int64_t>(sorted.size())};
  }
  std::vector<std::uint8_t> changed;
  if (tracking_ == Tracking::kCompare) find_changes(named, window, &changed);
  const auto changes = std::count(changed.begin(), changed.end(), std::uint8_t{1});

  {
    const Guard lock(mutex_);
    if (named.index == nullptr && changes == 0 && has_first(named.count, window, pad)) return taken;
    for (std::int64_t i = 0; i < named.count; ++i) {
      const std::int64_t row = named.at(i);
      const bool differs = !changed.empty() && changed[static_cast<std::size_t>(i)] != 0;
      if (differs || lacks(row, window, pad)) taken.lacked.push_back(static_cast<std::int32_t>(row));
    }
    find_runs(&taken, named.index == nullptr);
    taken.padded.reserve(taken.lacked.size() * static_cast<std::size_t>(window.planes));
    count_as_sent(&taken, pad);  // all that could fail is done
  }
  if (shadow_ != nullptr) {
    // After they were taken: a row that is written and marked from here on is taken again by the next commit.
    const auto nbytes = static_cast<std::size_t>(window.width * shape_.itemsize);
    for (const std::int32_t row : taken.lacked) {
      for (std::int64_t outer = 0; outer < shape_.outer; ++outer) {
        for (std::int64_t plane = window.plane; plane < window.plane + window.planes; ++plane) {
          const std::int64_t number = row * shape_.planes + plane;
          std::memcpy(line(shadow_.get(), outer, number), line(const_cast<char*>(host_), outer, number), nbytes);
        }
      }
    }
  }
  return taken;
}

void Table::count_as_sent(Taken* taken, bool pad) noexcept {
  const Window& window = taken->window;
  const auto width = static_cast<std::int32_t>(window.width);
  for (const std::int32_t row : taken->lacked) {
    for (std::int64_t plane = window.plane; plane < window.plane + window.planes; ++plane) {
      Line& each = lines_[static_cast<std::size_t>(row * shape_.planes + plane)];
      taken->padded.push_back(each.padded);
      if (pad) {
        taken->fill_to = std::max<std::int64_t>(taken->fill_to, each.padded);
        each = {width, width};
      } else {
        each = {std::max(each.current, width), std::max(each.padded, width)};
      }
    }
  }
}

void Table::find_runs(Taken* taken, bool gaps_may_travel) const {
  const std::vector<std::int32_t>& lacked = taken->lacked;
  taken->rows = lacked;
  for (std::size_t i = 0; i < lacked.size() && taken->runs.size() <= most_runs; ++i) {
    if (taken->runs.empty() || lacked[i] != lacked[i - 1] + 1) {
      taken->runs.push_back({lacked[i], 0, static_cast<std::int64_t>(i)});
    }
    ++taken->runs.back().count;
  }
  if (taken->runs.size() <= most_runs) return;
  taken->runs.clear();
  const std::int64_t first = lacked.front(), span = lacked.back() - first + 1;
  const std::int64_t surplus = span - static_cast<std::int64_t>(lacked.size());
  if (!gaps_may_travel || surplus * row_bytes(taken->window) > most_surplus_bytes) return;
  taken->rows.resize(static_cast<std::size_t>(span));
  for (std::int64_t i = 0; i < span; ++i) {
    taken->rows[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(first + i);
  }
  taken->runs.push_back({first, span, 0});
}

void Table::put_back(const Taken& taken) {
  const Guard lock(mutex_);
  const std::int32_t* padded = taken.padded.data();
  for (const std::int32_t row : taken.lacked) {
    for (std::int64_t plane = taken.window.plane; plane < taken.window.plane + taken.window.planes; ++plane) {
      Line& each = lines_[static_cast<std::size_t>(row * shape_.planes + plane)];
      each = {0, std::max(each.padded, *padded++)};
    }
  }
}

// --- how rows travel ---

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
  std::vector<std::int32_t> rows(static_cast<std::size_t>(index.count));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i] = checked_row(index, static_cast<std::int64_t>(i), shape_.rows);
  }
  const std::vector<std::int32_t> numbers = line_numbers(rows, window);
  Ticket ticket{pool.shared_device()};
  const Gather lines =
      part_of(gather_of(window, host_), numbers, 0, static_cast<std::int64_t>(numbers.size()), nullptr);
  stage_rows(pool, plan, dst, lines, stream, wait, &ticket);
  return ticket;
}

}  // namespace pinstage
