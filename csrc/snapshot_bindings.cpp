// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// The calls that run on every copy, and the host gather.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "builtin.h"
#include "gil.h"
#include "simulated_driver.h"
#include "stage.h"
#include "team.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pinstage {

std::shared_ptr<Pool> pool_for(const TensorView& dst, nb::handle given) {
  Device* const device = device_of(dst);
  if (device == nullptr) return nullptr;
  if (given.is_none()) return device->default_pool;
  PyPool* pool = nullptr;
  if (!nb::try_cast(given, pool) || pool == nullptr || &pool->pool->device() != device) return nullptr;
  return pool->pool;
}

bool on_host(const TensorView& view) {
  return view.device.type == kDlCpu && (SimulatedDevice::live() == 0 || SimulatedDevice::find(view.data) == nullptr);
}

namespace {

// Do the bytes between first and last element of the two meet?
bool overlap(const TensorView& a, const TensorView& b) {
  const auto end = [](const TensorView& view) {
    std::int64_t last = 0;
    for (int i = 0; i < view.ndim; ++i) last += (view.shape[i] - 1) * view.strides[i];
    return view.data + (last + 1) * static_cast<std::int64_t>(view.itemsize());
  };
  return a.numel() > 0 && b.numel() > 0 && a.data < end(b) && b.data < end(a);
}

// --- snapshots: true when done, false when the call is not one for the fast path (nothing happened then) ---

// What every snapshot does once its tensors are viewed, and their bytes or values are found to be all: `part` of dst is
// written, `stage(pool, plan, stream, no_gil)` enqueues it.
template <class Stage>
bool snapshot(nb::handle dst, const TensorView& part, nb::handle given_pool, bool in_pieces, Stage&& stage) {
  CopyPlan plan;
  if (part.numel() == 0 || !plan_copy(part.ndim, part.shape, part.strides, part.itemsize(), &plan)) return false;
  const std::shared_ptr<Pool> pool = pool_for(part, given_pool);
  if (pool == nullptr || (!in_pieces && pool->piece_bytes(plan.nbytes()) < plan.nbytes())) return false;
  const Stream stream = pool->device().current_stream();
  if (!bump_version(dst.ptr())) return false;
  {
    ReleasedGil no_gil;
    stage(*pool, plan, stream, no_gil);
  }
  // The copy is under way: a warning that is an error must not make it look as if it were not.
  if (!warn(*pool)) PyErr_WriteUnraisable(dst.ptr());
  return true;
}

// A source that torch's own CPU copy takes into the slot: of another dtype, or scattered in memory. What goes in pieces
// is Python's.
bool try_convert(nb::handle dst, const TensorView& d, nb::handle src, const TensorView& s, nb::handle given_pool) {
  if (!copies_values_only(dst.ptr(), d.dtype, src.ptr(), s.dtype)) return false;
  const auto stage = [&](Pool& pool, const CopyPlan& plan, Stream stream, ReleasedGil& no_gil) {
    pool.stage(plan.nbytes(), plan, reinterpret_cast<DevicePtr>(d.data), stream, wait_for({}), [&](char* slot) {
      no_gil.with_gil([&] {
        if (!copy_by_torch(slot, d.ndim, d.shape, d.dtype, src.ptr())) throw Interrupted{};
      });
    });
  };
  return snapshot(dst, d, given_pool, false, stage);
}

bool try_copy(nb::handle dst, nb::handle src, nb::handle given_pool) {
  TensorView d, s;
  if (!view_tensor(dst.ptr(), &d) || !view_tensor(src.ptr(), &s)) return false;
  if (!on_host(s)) return false;
  const bool one_dtype = d.dtype == s.dtype, dense = d.same_shape(s) && s.contiguous();
  const auto plain = [&] { return copies_bytes_only(dst.ptr(), src.ptr(), d.dtype); };
  if (one_dtype && dense) {
    return plain() && snapshot(dst, d, given_pool, true, [&](Pool& pool, const CopyPlan& plan, Stream stream, auto&) {
             stage_copy(pool, plan, d, s, stream, wait_for({}));
           });
  }
  Strided rows;
  if (!plan_strided(s.data, s.ndim, s.shape, s.strides, s.itemsize(), d.ndim, d.shape, &rows)) return false;
  const Conversion convert = dense && s.numel() <= kMaxConverted ? conversion(s.dtype, d.dtype) : nullptr;
  if ((convert != nullptr || (one_dtype && suits_rows(rows))) && plain()) {
    const auto stage = [&](Pool& pool, const CopyPlan& plan, Stream stream, auto&) {
      if (convert != nullptr) {
        stage_converted(pool, plan, d, s, convert, stream, wait_for({}));
      } else {
        stage_strided(pool, plan, d, rows, stream, wait_for({}));
      }
    };
    if (snapshot(dst, d, given_pool, true, stage)) return true;
  }
  return try_convert(dst, d, src, s, given_pool);
}

// The checked gather of `src` rows along `dim`; false when `src` or `index` is not of the form that the kernels take.
bool plan_checked_gather(const TensorView& src, const TensorView& index, int dim, Gather* rows) {
  if (!on_host(src) || !on_host(index) || index.ndim != 1 || index.dtype.code != kDlInt ||
      (index.dtype.bits != 32 && index.dtype.bits != 64) || dim < 0 || dim >= src.ndim) {
    return false;
  }
  if (!plan_gather(src, dim, index, rows)) return false;
  const std::int64_t bad =
      first_bad_index(rows->index, rows->index_is_64, rows->index_stride, rows->count, rows->src_rows);
  if (bad >= 0) {
    const std::int64_t at = bad * rows->index_stride;
    const std::int64_t value = rows->index_is_64 ? static_cast<const std::int64_t*>(rows->index)[at]
                                                 : static_cast<const std::int32_t*>(rows->index)[at];
    throw Error(ErrorKind::kIndex, "index " + std::to_string(value) + " at position " + std::to_string(bad) +
                                       " is out of range for " + std::to_string(rows->src_rows) + " rows");
  }
  return true;
}

// dst has src's shape but for `dim`, where it has at least `count`.
bool takes_rows(const TensorView& dst, const TensorView& src, int dim, std::int64_t count) {
  if (!(dst.dtype == src.dtype) || dst.ndim != src.ndim || dst.shape[dim] < count) return false;
  for (int i = 0; i < dst.ndim; ++i) {
    if (i != dim && dst.shape[i] != src.shape[i]) return false;
  }
  return true;
}

bool try_copy_rows(nb::handle dst, nb::handle src, nb::handle index, int dim, nb::handle given_pool) {
  TensorView d, s, x;
  if (!view_tensor(dst.ptr(), &d) || !view_tensor(src.ptr(), &s) || !view_tensor(index.ptr(), &x)) return false;
  Gather rows;
  if (!plan_checked_gather(s, x, dim, &rows) || !takes_rows(d, s, dim, rows.count)) return false;
  const TensorView part = narrow(d, dim, rows.count);
  if (!copies_bytes_only(dst.ptr(), src.ptr(), d.dtype)) return false;
  return snapshot(dst, part, given_pool, true, [&](Pool& pool, const CopyPlan& plan, Stream stream, auto&) {
    stage_rows(pool, plan, reinterpret_cast<DevicePtr>(part.data), rows, stream, wait_for({}));
  });
}

// dst.narrow(0, 0, total) <- torch.cat(segments), of a list or tuple of dense tensors of dst's dtype and row shape.
bool try_copy_segments(nb::handle dst, nb::handle sources, nb::handle given_pool) {
  TensorView d;
  if (!view_tensor(dst.ptr(), &d) || d.ndim == 0) return false;
  const Py_ssize_t count = PySequence_Size(sources.ptr());
  if (count < 1) {
    PyErr_Clear();
    return false;
  }
  std::vector<Segment> segments;
  segments.reserve(static_cast<std::size_t>(count));
  std::int64_t rows = 0;
  std::size_t nbytes = 0;
  // The list may change, and its tensors die, once the GIL is let go of.
  std::vector<nb::object> held;
  held.reserve(static_cast<std::size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    const nb::object& source = held.emplace_back(nb::steal(PySequence_GetItem(sources.ptr(), i)));
    TensorView s;
    if (!source.is_valid() || !view_tensor(source.ptr(), &s)) {
      PyErr_Clear();
      return false;
    }
    if (s.ndim == 0 || !on_host(s) || !s.contiguous() || !copies_bytes_only(dst.ptr(), source.ptr(), d.dtype)) {
      return false;
    }
    if (!takes_rows(d, s, 0, rows += s.shape[0])) return false;
    segments.push_back({s.data, s.nbytes(), nbytes});
    nbytes += s.nbytes();
  }
  const TensorView part = narrow(d, 0, rows);
  return snapshot(dst, part, given_pool, true, [&](Pool& pool, const CopyPlan& plan, Stream stream, auto&) {
    stage_segments(pool, plan, part.data, segments, stream, wait_for({}));
  });
}

bool try_gather(nb::handle out, nb::handle src, nb::handle index, int dim) {
  TensorView o, s, x;
  if (!view_tensor(out.ptr(), &o) || !view_tensor(src.ptr(), &s) || !view_tensor(index.ptr(), &x)) return false;
  Gather rows;
  if (!plan_checked_gather(s, x, dim, &rows) || !takes_rows(o, s, dim, rows.count)) return false;
  if (!on_host(o) || !o.contiguous() || o.shape[dim] != rows.count || o.numel() == 0) return false;
  if (!copies_bytes_only(out.ptr(), src.ptr(), o.dtype)) return false;
  if (overlap(o, s) || overlap(o, x)) {
    throw Error(ErrorKind::kValue, "out overlaps src or index, which the gather still reads; pass an out of its own");
  }
  rows.dst = o.data;
  // A few µs at most: for less than letting go of the GIL and taking it again may cost.
  constexpr std::int64_t kWithGil = 32 << 10;
  if (rows.outer * rows.count * rows.row_bytes <= kWithGil) {
    gather(rows);
  } else {
    const ReleasedGil no_gil;
    gather_in_parallel(rows);
  }
  bump_version(out.ptr());
  return true;
}

// --- builtins, see builtin.h ---

PyObject* call_copy(PyObject* general, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  nb::handle pool = nb::none();
  bool plain = count == 2 || (count == 3 && args[2] == Py_True);
  for (Py_ssize_t i = 0; names != nullptr && i < PyTuple_Size(names); ++i) {
    if (is_named(names, i, "pool")) {
      pool = args[count + i];
    } else {
      plain = plain && count == 2 && args[count + i] == Py_True && is_named(names, i, "non_blocking");
    }
  }
  const auto fast = [&] { return plain && try_copy(args[0], args[1], pool) ? nb::borrow(args[0]) : nb::object(); };
  return fast_or_general(fast, general, args, count, names);
}

PyObject* call_gather_rows(PyObject* general, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  PyObject* out = Py_None;
  long dim = 0;
  bool plain = count == 2;
  for (Py_ssize_t i = 0; names != nullptr && i < PyTuple_Size(names); ++i) {
    if (is_named(names, i, "out")) {
      out = args[count + i];
    } else if (is_named(names, i, "dim") && PyLong_CheckExact(args[count + i])) {
      int overflow = 0;
      dim = PyLong_AsLongAndOverflow(args[count + i], &overflow);
      plain = plain && dim >= 0 && dim < kMaxDims;
    } else {
      plain = false;
    }
  }
  const auto fast = [&] {
    const bool done = plain && out != Py_None && try_gather(out, args[0], args[1], static_cast<int>(dim));
    return done ? nb::borrow(out) : nb::object();
  };
  return fast_or_general(fast, general, args, count, names);
}

}  // namespace

void bind_snapshots(nb::module_& m) {
  m.def("try_copy", &try_copy, "dst"_a, "src"_a, "pool"_a.none());
  m.def(
      "copy_builtin",
      [](nb::callable general) { return builtin<call_copy>(general, "(dst, src, non_blocking=True, *, pool=None)"); },
      "general"_a, nb::sig("def copy_builtin(general: Callable[..., typing.Any]) -> Callable[..., typing.Any]"),
      "copy_ as a builtin, with `general` for what its fast path declines.");
  m.def(
      "gather_rows_builtin",
      [](nb::callable general) { return builtin<call_gather_rows>(general, "(src, index, *, dim=0, out=None)"); },
      "general"_a, nb::sig("def gather_rows_builtin(general: Callable[..., typing.Any]) -> Callable[..., typing.Any]"),
      "gather_rows as a builtin, likewise.");
  m.def("try_copy_rows", &try_copy_rows, "dst"_a, "src"_a, "index"_a, "dim"_a, "pool"_a.none());
  m.def("try_copy_segments", &try_copy_segments, "dst"_a, "segments"_a, "pool"_a.none());
  m.def("try_gather", &try_gather, "out"_a, "src"_a, "index"_a, "dim"_a);
}

}  // namespace pinstage
