// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include "table.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <string>

#include "team.h"

namespace pinstage {
namespace {

using Guard = std::lock_guard<std::mutex>;

// Comparing so many bytes takes one thread about as long as handing the job to the team (10 GB/s, cold).
constexpr std::int64_t kCompareAlone = 256 << 10;

// In order, each once.
std::vector<std::int32_t> ascending(std::vector<std::int32_t> rows) {
  if (!std::is_sorted(rows.begin(), rows.end())) std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  return rows;
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

// The index may be one that is being written: each element is read once, then checked.
std::vector<std::int32_t> Table::checked_rows(const NamedRows& named) const {
  std::vector<std::int32_t> rows(static_cast<std::size_t>(named.count));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::int64_t row = named.at(static_cast<std::int64_t>(i));
    if (row < 0 || row >= shape_.rows) {
      throw Error(ErrorKind::kIndex, "row " + std::to_string(row) + " at position " + std::to_string(i) +
                                         " is out of range for a table of " + std::to_string(shape_.rows) + " rows");
    }
    rows[i] = static_cast<std::int32_t>(row);
  }
  return rows;
}

void Table::mark(const NamedRows& rows) {
  const std::vector<std::int32_t> marked = ascending(checked_rows(rows));
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
    sorted = ascending(checked_rows(named));
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

}  // namespace pinstage
