// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// The core of a StagedTable as seen from Python (pinstage/table.py).
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings.h"
#include "gil.h"
#include "table.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pinstage {
namespace {

struct PyTable {
  const std::shared_ptr<Table> core;
  nb::object host, mirror;  // the tensors
  DevicePtr data;           // of the mirror

  PyTable(const TableShape& shape, const char* host_data, Tracking tracking, DevicePtr device_data)
      : core(std::make_shared<Table>(shape, host_data, tracking)), data(device_data) {}
};

std::unique_ptr<PyTable> make_table(nb::object host, nb::object mirror, std::int64_t outer, std::int64_t rows,
                                    std::int64_t planes, std::int64_t columns, int tracking) {
  TensorView h, d;
  if (!view_tensor(host.ptr(), &h) || !view_tensor(mirror.ptr(), &d)) {
    throw nb::type_error("a table is of plain tensors");
  }
  const TableShape shape{outer, rows, planes, columns, static_cast<std::int64_t>(h.itemsize())};
  auto table =
      std::make_unique<PyTable>(shape, h.data, static_cast<Tracking>(tracking), reinterpret_cast<DevicePtr>(d.data));
  table->host = std::move(host);
  table->mirror = std::move(mirror);
  return table;
}

// Somebody who resizes the tensors would have commits read and write memory that is gone.
void require_in_place(const PyTable& self) {
  const TableShape& shape = self.core->shape();
  const std::int64_t numel = shape.outer * shape.rows * shape.planes * shape.columns;
  const auto in_place = [&](nb::handle tensor, const char* data) {
    TensorView view;
    return view_tensor(tensor.ptr(), &view) && view.data == data && view.numel() == numel && view.contiguous();
  };
  if (!in_place(self.host, self.core->host())) {
    throw Error(ErrorKind::kValue, "table.host was resized or given other memory; make a new table instead");
  }
  if (!in_place(self.mirror, reinterpret_cast<const char*>(self.data))) {
    throw Error(ErrorKind::kValue, "table.device was resized or given other memory; make a new table instead");
  }
}

// The first `rows` rows when it is an int, else those of an index tensor that Python checked to be one.
NamedRows named(nb::handle rows) {
  // An index of one element would convert to an int too.
  if (nb::isinstance<nb::int_>(rows)) return {nullptr, false, 1, nb::cast<std::int64_t>(rows)};
  TensorView index;
  if (!view_tensor(rows.ptr(), &index)) throw nb::type_error("an index is a plain tensor");
  return {index.data, index.dtype.bits == 64, index.strides[0], index.shape[0]};
}

// Rows on their way. Whatever ends that way, Ctrl-C between two lines of Python included, they are not lost.
struct PyTaken {
  std::shared_ptr<Table> table;
  Table::Taken rows;
  bool settled = false;

  void put_back() {
    if (!settled) table->put_back(rows);
    settled = true;
  }
  ~PyTaken() { put_back(); }
};

std::unique_ptr<PyTaken> take(PyTable& self, nb::handle rows, std::int64_t plane, std::int64_t planes,
                              std::int64_t width, bool pad) {
  require_in_place(self);
  const NamedRows which = named(rows);
  auto taken = std::make_unique<PyTaken>();
  taken->table = self.core;
  const ReleasedGil no_gil;
  taken->rows = self.core->take(which, {plane, planes, width}, pad);
  return taken->rows.rows.empty() ? nullptr : std::move(taken);
}

std::optional<Ticket> send(PyTable& self, const PyTaken& taken, std::uintptr_t stream, PyPool& pool) {
  std::optional<Ticket> ticket;
  {
    const ReleasedGil no_gil;
    ticket = self.core->send(taken.rows, *pool.pool, self.data, stream_of(stream), wait_for({}));
  }
  bump_version(self.mirror.ptr());
  if (!warn(*pool.pool)) PyErr_WriteUnraisable(self.mirror.ptr());
  return ticket;
}

void send_packed(PyTable& self, const PyTaken& taken, std::int64_t begin, std::int64_t count, nb::handle dst,
                 std::uintptr_t stream, PyPool& pool) {
  TensorView packed;
  if (!view_tensor(dst.ptr(), &packed)) throw nb::type_error("rows are packed into a plain tensor");
  {
    const ReleasedGil no_gil;
    self.core->send_packed(taken.rows, begin, count, *pool.pool, reinterpret_cast<DevicePtr>(packed.data),
                           stream_of(stream), wait_for({}));
  }
  if (!warn(*pool.pool)) PyErr_WriteUnraisable(dst.ptr());
}

// None: no copy engine writes `part`, whose shape is that of the rows, well.
std::optional<Ticket> send_rows(PyTable& self, nb::handle dst, nb::handle index, std::int64_t plane,
                                std::int64_t planes, std::int64_t width, std::uintptr_t stream, PyPool& pool) {
  require_in_place(self);
  TensorView part;
  CopyPlan plan;
  if (!view_tensor(dst.ptr(), &part) || !copies_bytes_only(dst.ptr(), self.host.ptr(), part.dtype) ||
      device_of(part) != &pool.pool->device() ||
      !plan_copy(part.ndim, part.shape, part.strides, part.itemsize(), &plan) || !bump_version(dst.ptr())) {
    return std::nullopt;
  }
  const NamedRows rows = named(index);
  std::optional<Ticket> ticket;
  {
    const ReleasedGil no_gil;
    ticket = self.core->send_rows(rows, {plane, planes, width}, *pool.pool, plan,
                                  reinterpret_cast<DevicePtr>(part.data), stream_of(stream), wait_for({}));
  }
  if (!warn(*pool.pool)) PyErr_WriteUnraisable(dst.ptr());
  return ticket;
}

std::vector<std::pair<std::int64_t, std::int64_t>> runs_of(const PyTaken& taken) {
  std::vector<std::pair<std::int64_t, std::int64_t>> runs;
  for (const RowRun& run : taken.rows.runs) runs.emplace_back(run.first, run.count);
  return runs;
}

}  // namespace

void bind_table(nb::module_& m) {
  nb::class_<PyTaken>(m, "TakenRows", "Rows of a table on their way to the device.")
      .def_prop_ro("count", [](const PyTaken& self) { return self.rows.rows.size(); })
      .def_prop_ro("runs", &runs_of, "(first, count) of the rows that one copy each brings; empty: scattered.")
      .def_prop_ro(
          "fill_to", [](const PyTaken& self) { return self.rows.fill_to; },
          "Columns from the window's width up to this one are to be padded.")
      .def(
          "settle", [](PyTaken& self) { self.settled = true; },
          "They were sent. Else they are put back when this dies.")
      .def("put_back", &PyTaken::put_back);
  nb::class_<PyTable>(m, "Table")
      .def_static("make", &make_table, "host"_a, "mirror"_a, "outer"_a, "rows"_a, "planes"_a, "columns"_a, "tracking"_a)
      .def(
          "mark",
          [](PyTable& self, nb::handle rows) {
            const NamedRows which = named(rows);
            const ReleasedGil no_gil;
            self.core->mark(which);
          },
          "rows"_a)
      .def("forget_padding", [](PyTable& self) { self.core->forget_padding(); })
      .def("take", &take, "rows"_a, "plane"_a, "planes"_a, "width"_a, "pad"_a,
           nb::sig("def take(self, rows: typing.Any, plane: int, planes: int, width: int, pad: bool) -> "
                   "TakenRows | None"))
      .def("send", &send, "taken"_a, "stream"_a, "pool"_a)
      .def("send_packed", &send_packed, "taken"_a, "begin"_a, "count"_a, "dst"_a, "stream"_a, "pool"_a)
      .def("send_rows", &send_rows, "dst"_a, "index"_a, "plane"_a, "planes"_a, "width"_a, "stream"_a, "pool"_a)
      .def_static("packed_index_bytes", &Table::packed_index_bytes, "count"_a)
      .def_prop_rw(
          "most_runs", [](const PyTable& self) { return self.core->most_runs; },
          [](PyTable& self, std::size_t runs) { self.core->most_runs = runs; },
          "Runs of rows that get a copy each. For tests and measurements.")
      .def_prop_rw(
          "most_surplus_bytes", [](const PyTable& self) { return self.core->most_surplus_bytes; },
          [](PyTable& self, std::int64_t nbytes) { self.core->most_surplus_bytes = nbytes; },
          "Bytes that go along to make one copy of all. For tests and measurements.");
}

}  // namespace pinstage
