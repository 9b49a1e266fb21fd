// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// Pools and leases.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>

#include "bindings.h"
#include "gil.h"
#include "torch_access.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pinstage {
namespace {

constexpr int kMaxLeaseDims = 64;  // as torch
constexpr std::uint64_t kMaxLeaseBytes = std::uint64_t{1} << 46;

// A lease with the shape and dtype that its tensor has.
struct PyLease {
  LeaseRef ref;
  int ndim = 0;
  std::int64_t shape[kMaxLeaseDims];
  DlDataType dtype{};
};

// The itemsize, code and bits of a dtype travel as one number: code | bits << 8.
DlDataType unpack_dtype(int packed) {
  return {static_cast<std::uint8_t>(packed & 0xff), static_cast<std::uint8_t>(packed >> 8 & 0xff), 1};
}

std::optional<PyLease> take(PyPool& self, const nb::tuple& shape, int dtype, std::optional<double> timeout, bool block,
                            bool owned) {
  PyLease lease;
  lease.dtype = unpack_dtype(dtype);
  if (shape.size() > kMaxLeaseDims) {
    throw Error(ErrorKind::kValue, "a lease has at most " + std::to_string(kMaxLeaseDims) + " dimensions, this shape " +
                                       std::to_string(shape.size()));
  }
  std::uint64_t nbytes = lease.dtype.bits / 8;
  for (nb::handle size : shape) {
    std::int64_t n = 0;
    if (!nb::try_cast(size, n)) throw nb::type_error("a shape is made of ints");
    if (n < 0) throw Error(ErrorKind::kValue, "a dimension of a lease is negative: " + std::to_string(n));
    if (__builtin_mul_overflow(nbytes, static_cast<std::uint64_t>(n), &nbytes) || nbytes > kMaxLeaseBytes) {
      throw Error(ErrorKind::kPoolExhausted, "no host has the memory for a lease of this shape");
    }
    lease.shape[lease.ndim++] = n;
  }
  {
    const ReleasedGil no_gil;
    lease.ref = self.pool->take(std::max<std::uint64_t>(nbytes, 1), wait_for(timeout), block, owned);
  }
  if (lease.ref.slot == nullptr) return std::nullopt;
  if (!warn(*self.pool)) {
    self.pool->cancel(lease.ref);
    throw nb::python_error();
  }
  return lease;
}

// None when `dst` is not one that a copy engine can write from here; ValueError when it does not match the lease.
std::optional<Ticket> submit(PyLease& self, nb::handle dst) {
  TensorView d, s;
  if (!view_tensor(dst.ptr(), &d)) return std::nullopt;
  s.ndim = self.ndim;
  if (self.ndim > kMaxDims) return std::nullopt;
  std::copy_n(self.shape, self.ndim, s.shape);
  CopyPlan plan;
  if (!(d.dtype == self.dtype) || !d.same_shape(s) || d.numel() == 0 ||
      !plan_copy(d.ndim, d.shape, d.strides, d.itemsize(), &plan) ||
      !copies_bytes_only(dst.ptr(), dst.ptr(), d.dtype)) {
    return std::nullopt;
  }
  Device& device = self.ref.pool->device();
  if (device_of(d) != &device) return std::nullopt;
  const Stream stream = device.current_stream();
  if (!bump_version(dst.ptr())) return std::nullopt;
  const ReleasedGil no_gil;
  return self.ref.pool->submit(self.ref, plan, reinterpret_cast<DevicePtr>(d.data), stream);
}

nb::object tensor_over(PyLease& self, void* data, DlDevice device) {
  PyObject* tensor = tensor_over_slot(self.ref, data, device, self.ndim, self.shape, self.dtype);
  if (tensor == nullptr) throw nb::python_error();
  return nb::steal(tensor);
}

nb::object tensor_of(PyLease& self) { return tensor_over(self, self.ref.pool->data(self.ref), {kDlCpu, 0}); }

// The slot's bytes from torch's own copy_, without a tensor that could be kept.
void fill(PyLease& self, nb::handle src) {
  char* const data = self.ref.pool->data(self.ref);
  if (!copy_by_torch(data, self.ndim, self.shape, self.dtype, src.ptr())) throw nb::python_error();
}

// The slot as the device reads it in place. On a simulated device that is the host tensor.
nb::object device_view_of(PyLease& self) {
  const Device& device = self.ref.pool->device();
  DevicePtr address = 0;
  {
    const ReleasedGil no_gil;
    address = self.ref.pool->device_address(self.ref);
  }
  if (device.kind() == DeviceKind::kSimulated) return tensor_of(self);
  return tensor_over(self, reinterpret_cast<void*>(address), {kDlCuda, device.index()});
}

nb::tuple stats_of(PyPool& self) {
  const PoolStats s = self.pool->stats();
  const auto bytes = [&s](SlotState state) { return s.bytes[static_cast<int>(state)]; };
  return nb::make_tuple(s.capacity, bytes(SlotState::kOpen), bytes(SlotState::kInFlight), bytes(SlotState::kHeld),
                        bytes(SlotState::kParked), bytes(SlotState::kCaptured), bytes(SlotState::kQuarantined),
                        bytes(SlotState::kFree), s.high_water, s.slabs, s.host_allocations, s.events_created, s.copies,
                        s.waits, s.wait_seconds, s.pageable);
}

}  // namespace

void bind_pool(nb::module_& m) {
  using Unlocked = nb::call_guard<ReleasedGil>;

  m.attr("PIECES_IN_FLIGHT") = kPiecesInFlight;
  nb::class_<PyPool>(m, "Pool")
      .def(
          "__init__",
          [](PyPool* self, const PyDevice& device, std::uint64_t initial_bytes, std::uint64_t max_bytes,
             bool wait_when_full, bool warn_on_wait, bool pageable) {
            const ReleasedGil no_gil;
            new (self)
                PyPool{Pool::make(device.device, {initial_bytes, max_bytes, wait_when_full, warn_on_wait, pageable})};
          },
          "device"_a, "initial_bytes"_a, "max_bytes"_a, "wait_when_full"_a, "warn_on_wait"_a, "pageable"_a)
      .def("_take", &take, "shape"_a, "dtype"_a, "timeout"_a.none(), "block"_a, "owned"_a,
           nb::sig("def _take(self, shape: tuple[int, ...], dtype: int, timeout: float | None, block: bool, "
                   "owned: bool) -> Lease | None"))
      .def(
          "_reclaim", [](PyPool& self, bool synchronize) { return self.pool->reclaim(synchronize, wait_for({})); },
          "synchronize"_a, Unlocked())
      .def(
          "_trim", [](PyPool& self) { return self.pool->trim(); }, Unlocked())
      .def(
          "_reserve",
          [](PyPool& self, std::uint64_t nbytes) {
            {
              const ReleasedGil no_gil;
              self.pool->reserve(nbytes);
            }
            if (!warn(*self.pool)) throw nb::python_error();
          },
          "nbytes"_a)
      .def_prop_ro("_pageable", [](PyPool& self) { return self.pool->pageable(); })
      .def("_close",
           [](PyPool& self) {
             Device& device = self.pool->device();
             if (device.default_pool == self.pool) device.default_pool = nullptr;
             const ReleasedGil no_gil;
             self.pool->close(wait_for({}));
           })
      .def(
          "_piece_bytes", [](const PyPool& self, std::uint64_t nbytes) { return self.pool->piece_bytes(nbytes); },
          "nbytes"_a, "Bytes of the slots that a snapshot of `nbytes` goes through.")
      .def_prop_rw(
          "_most_piece_bytes", [](const PyPool& self) { return self.pool->most_piece_bytes; },
          [](PyPool& self, std::uint64_t nbytes) { self.pool->most_piece_bytes = nbytes; },
          "For tests and measurements.")
      .def("_stats", &stats_of, nb::sig("def _stats(self) -> tuple[typing.Any, ...]"))
      .def("_consistent", [](PyPool& self) { return self.pool->consistent(); }, "I1 and I2 hold. For tests.");

  nb::class_<PyLease>(m, "Lease")
      .def("tensor", &tensor_of, nb::sig("def tensor(self) -> torch.Tensor"))
      .def("device_view", &device_view_of, nb::sig("def device_view(self) -> torch.Tensor"))
      .def("fill", &fill, "src"_a)
      .def("submit", &submit, "dst"_a)
      .def(
          "retire",
          [](PyLease& self, std::uintptr_t stream) { return self.ref.pool->retire(self.ref, stream_of(stream)); },
          "stream"_a, Unlocked())
      .def("hand_over", [](PyLease& self) { return self.ref.pool->hand_over(self.ref); })
      .def("cancel", [](PyLease& self) { self.ref.pool->cancel(self.ref); })
      .def("declared", [](PyLease& self) { return self.ref.pool->declared(self.ref); })
      .def("is_open", [](PyLease& self) { return self.ref.pool->is_open(self.ref); })
      .def(
          "wait_reusable",
          [](PyLease& self, std::optional<double> timeout) {
            self.ref.pool->wait_reusable(self.ref, wait_for(timeout));
          },
          "timeout"_a.none(), Unlocked());
}

}  // namespace pinstage
