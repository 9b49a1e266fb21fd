// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// copy_batch_'s one call: every tensor is viewed and checked before the GIL is let go of, once for the whole batch.
#include <nanobind/nanobind.h>

#include <vector>

#include "batch.h"
#include "bindings.h"
#include "gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pinstage {
namespace {

// -1: not a list or tuple.
Py_ssize_t length(nb::handle sequence) {
  PyObject* const object = sequence.ptr();
  return PyList_CheckExact(object) || PyTuple_CheckExact(object) ? PySequence_Size(object) : -1;
}

// Adds the pair to its device's part; false when it is not one for the fast path.
bool add_pair(PyObject* dst, PyObject* src, nb::handle given_pool, std::vector<BatchPart>* parts, Py_ssize_t expected) {
  TensorView d, s;
  if (!view_tensor(dst, &d) || !view_tensor(src, &s)) return false;
  if (!(d.dtype == s.dtype) || !d.same_shape(s) || !s.contiguous() || !on_host(s)) return false;
  BatchPiece piece;
  if (d.numel() == 0 || !plan_copy(d.ndim, d.shape, d.strides, d.itemsize(), &piece.plan)) return false;
  if (!copies_bytes_only(dst, src, d.dtype)) return false;
  // Inside inference_mode this counts nothing; outside torch refuses.
  if (is_inference(dst) && !bump_version(dst)) return false;
  piece.dst = reinterpret_cast<DevicePtr>(d.data);
  piece.src = s.data;
  Device* const device = device_of(d);
  for (BatchPart& part : *parts) {
    if (&part.pool->device() == device) {
      part.pieces.push_back(piece);
      return true;
    }
  }
  std::shared_ptr<Pool> pool = pool_for(d, given_pool);
  if (pool == nullptr) return false;
  BatchPart& part = parts->emplace_back();
  part.stream = pool->device().current_stream();
  part.pool = std::move(pool);
  part.pieces.reserve(static_cast<std::size_t>(expected));
  part.pieces.push_back(piece);
  return true;
}

// -1: all are under way. Else nothing happened, and this is the first pair that is not one for the fast path.
Py_ssize_t try_copy_batch(nb::handle dsts, nb::handle srcs, nb::handle pool) {
  const Py_ssize_t count = length(dsts);
  if (count <= 0 || length(srcs) != count) return 0;
  // The lists may change, and their tensors die, once the GIL is let go of.
  std::vector<nb::object> held;
  held.reserve(2 * static_cast<std::size_t>(count));
  std::vector<BatchPart> parts;
  for (Py_ssize_t i = 0; i < count; ++i) {
    held.push_back(nb::steal(PySequence_GetItem(dsts.ptr(), i)));
    held.push_back(nb::steal(PySequence_GetItem(srcs.ptr(), i)));
    PyObject *const dst = held[held.size() - 2].ptr(), *const src = held.back().ptr();
    if (dst == nullptr || src == nullptr)
      throw nb::python_error();  // the list was made shorter by a __torch_function__
    if (!add_pair(dst, src, pool, &parts, count)) return i;
  }
  const auto count_writes = [&held] {
    for (std::size_t i = 0; i < held.size(); i += 2) bump_version(held[i].ptr());
  };
  bool begun = false;
  try {
    const ReleasedGil no_gil;
    stage_batch(parts, wait_for({}), &begun);
  } catch (...) {
    const nb::error_scope kept;  // of a signal handler
    if (begun) count_writes();
    throw;
  }
  count_writes();
  for (const BatchPart& part : parts) {
    // The copies are under way: a warning that is an error must not make it look as if they were not.
    if (!warn(*part.pool)) PyErr_WriteUnraisable(dsts.ptr());
  }
  return -1;
}

}  // namespace

void bind_batch(nb::module_& m) {
  m.def("try_copy_batch", &try_copy_batch, "dsts"_a.none(), "srcs"_a.none(), "pool"_a.none(),
        "-1: all are under way. Else nothing happened, and this is the first pair that is not one for the fast path.");
}

}  // namespace pinstage
