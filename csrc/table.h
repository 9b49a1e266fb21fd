// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// The core of a StagedTable: which rows the device lacks, and how they travel there.
//
//   host      [outer, rows, planes, columns], written by anyone at any time
//     take()       the rows that a commit names and the device lacks; from here on they count as sent
//   Taken ──── send()         snapshot into a slot, one fence: a pitched copy for each of a few runs of rows, or one
//         │                   kernel that brings each row to its place (scatter.h)
//         ──── send_packed()  without that kernel: their numbers and they, as one dense copy, for torch to scatter
//         ──── put_back()     when they were not sent after all
//
// With Tracking::kCompare a shadow holds what was last taken. Rows are snapshot from it, so that what counts as sent is
// what was sent, to the byte, whoever writes the host table meanwhile.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "gather.h"
#include "pool.h"

namespace pinstage {

// A dense tensor of [outer, rows, planes, columns].
struct TableShape {
  std::int64_t outer = 1, rows = 0, planes = 1, columns = 0, itemsize = 1;
};

enum class Tracking { kNone, kMarks, kCompare };

// Columns [0, width) of planes [plane, plane + planes).
struct Window {
  std::int64_t plane = 0, planes = 1, width = 0;
};

// The rows that a caller names: by an index (int32 or int64, any order, repeats allowed), or the first `count`.
struct NamedRows {
  const void* index = nullptr;
  bool index_is_64 = false;
  std::int64_t index_stride = 1, count = 0;

  std::int64_t at(std::int64_t i) const noexcept {
    if (index == nullptr) return i;
    return index_is_64 ? static_cast<const std::int64_t*>(index)[i * index_stride]
                       : static_cast<const std::int32_t*>(index)[i * index_stride];
  }
};

// Consecutive rows: `count` from `first` on, which is number `at` of all that travel.
struct RowRun {
  std::int64_t first, count, at;
};

class Table {
 public:
  // `host` stays valid as long as the table.
  Table(const TableShape& shape, const char* host, Tracking tracking);

  const TableShape& shape() const noexcept { return shape_; }
  const char* host() const noexcept { return host_; }

  // Rows were written: the next commit that names them sends them.
  void mark(const NamedRows& rows);
  // What the tails were padded with is not what they shall be padded with from now on.
  void forget_padding();

  struct Taken {
    Window window;
    std::vector<std::int32_t> rows;    // what travels, ascending
    std::vector<std::int32_t> lacked;  // those of them that the device lacks; the others lie between and go along
    std::vector<RowRun> runs;          // of `rows`; empty when they are scattered
    std::int64_t fill_to = 0;          // columns [window.width, fill_to) still hold something else than pad
    std::vector<std::int32_t> padded;  // from which column on, of the lines of `lacked`, before
  };
  // Which of `named` the device lacks in `window`; with `pad`, also rows whose tail is not padded. All of them without
  // tracking. One commit at a time may be between take() and its end.
  Taken take(const NamedRows& named, const Window& window, bool pad);
  void put_back(const Taken& taken);

  // Snapshots what was taken and copies it to the table at `dst` on the device. Nothing when torch has to: tails of
  // scattered rows are to be filled, or the kernel is refused and no pitched copies suit.
  std::optional<Ticket> send(const Taken& taken, Pool& pool, DevicePtr dst, Stream stream, const Wait& wait);

  // For a scatter by torch: bytes of the int64 numbers of `count` rows, then of the rows themselves.
  static constexpr std::int64_t packed_index_bytes(std::int64_t count) noexcept { return (count * 8 + 255) & ~255; }
  std::int64_t row_bytes(const Window& window) const noexcept {
    return shape_.outer * window.planes * window.width * shape_.itemsize;
  }
  // Copies both, for `count` rows from number `begin` on, to `dst`; the rows as a dense [outer, count, planes, width].
  void send_packed(const Taken& taken, std::int64_t begin, std::int64_t count, Pool& pool, DevicePtr dst, Stream stream,
                   const Wait& wait);

  // Copies the rows of `index`, checked, in its order, to a tensor on the device that is laid out as `plan`.
  Ticket send_rows(const NamedRows& index, const Window& window, Pool& pool, const CopyPlan& plan, DevicePtr dst,
                   Stream stream, const Wait& wait);

  // Without the kernel: runs of rows that get a copy each. A copy costs the host 1.6 us, a scatter by torch about 20: a
  // new tensor, views of it, a copy and a kernel (H200, from what its parts cost; `python benchmarks cache_manager`
  // measures both).
  std::size_t most_runs = 12;
  // Rows that the device has already go along, if that makes one copy of all, up to so many bytes: what one thread
  // snapshots in the time of a scatter.
  std::int64_t most_surplus_bytes = 128 << 10;

 private:
  // One row of one plane, in all outer indices: what the device has of it.
  struct Line {
    std::int32_t current;  // leading columns that are as they were last taken
    std::int32_t padded;   // columns from here on hold pad
  };

  std::vector<std::int32_t> checked_rows(const NamedRows& named) const;  // as they are named
  char* line(char* base, std::int64_t outer, std::int64_t number) const noexcept;
  bool differs(std::int64_t row, const Window& window) const noexcept;
  void find_changes(const NamedRows& named, const Window& window, std::vector<std::uint8_t>* changed) const;
  bool lacks(std::int64_t row, const Window& window, bool pad) const noexcept;
  bool has_first(std::int64_t rows, const Window& window, bool pad) const noexcept;
  void find_runs(Taken* taken, bool gaps_may_travel) const;
  bool worth_scattering(const Taken& taken, const Pool& pool) const noexcept;
  Ticket send_scattered(const Taken& taken, Pool& pool, DevicePtr dst, Stream stream, const Wait& wait);
  void count_as_sent(Taken* taken, bool pad) noexcept;
  Gather gather_of(const Window& window, const char* base) const noexcept;
  std::vector<std::int32_t> line_numbers(const std::vector<std::int32_t>& rows, const Window& window) const;
  bool whole_rows(const Window& window) const noexcept {
    return window.planes == shape_.planes && window.width == shape_.columns;
  }
  const char* source() const noexcept { return shadow_ != nullptr ? shadow_.get() : host_; }

  const TableShape shape_;
  const char* const host_;
  const Tracking tracking_;

  struct Free {
    void operator()(char* memory) const noexcept;
  };
  std::unique_ptr<char[], Free> shadow_;  // as large as the host table

  std::mutex mutex_;         // no other lock is taken and no driver call made under it
  std::vector<Line> lines_;  // guarded by mutex_; [row * planes + plane]
};

}  // namespace pinstage
