// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include "tensor_view.h"

#include <Python.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "pool.h"
#include "torch_access.h"

namespace pinstage {
namespace {

// Calls a cached builtin of torch on one argument (or none). A failure counts as "not plain": torch itself then reports
// what is wrong when the general path asks it.
bool is_true(PyObject* callable, PyObject* argument) {
  PyObject* result = PyObject_Vectorcall(callable, &argument, argument != nullptr ? 1 : 0, nullptr);
  if (result == nullptr) {
    PyErr_Clear();
    return true;
  }
  const int truth = result == Py_False ? 0 : result == Py_True ? 1 : PyObject_IsTrue(result);
  Py_DECREF(result);
  return truth != 0;
}

// A torch function mode or dispatch mode, which wants to see every call.
bool mode_active(PyObject* tensor) {
  if (torch.native.word != 0) return torch.native.function_mode() || torch.native.dispatch_modes(false);
  return is_true(torch.has_torch_function, tensor) || is_true(torch.dispatch_stack, nullptr);
}

// Names go with a copy, and are checked against dst's: torch's to do.
bool has_names(PyObject* tensor) {
  if (torch.has_names == nullptr) return false;
  if (torch.native.word == 0 || torch.native.has_names == nullptr) return is_true(torch.has_names, tensor);
  return torch.native.has_names(*static_cast<void* const*>(torch.native.tensor(tensor)));
}

bool is_neg(PyObject* tensor) {
  return torch.native.word != 0 ? torch.native.is_neg(torch.native.tensor(tensor)) : is_true(torch.is_neg, tensor);
}

bool is_conj(PyObject* tensor) {
  return torch.native.word != 0 ? torch.native.is_conj(torch.native.tensor(tensor)) : is_true(torch.is_conj, tensor);
}

// Autograd records what is done to the tensor.
bool watched(PyObject* tensor) {
  PyObject* result = torch.requires_grad.of(tensor);
  if (result == nullptr) {
    PyErr_Clear();
    return true;
  }
  const bool truth = result != Py_False;
  Py_DECREF(result);
  return truth && is_true(torch.grad_enabled, nullptr);
}

// DLPack calls torch's sub-byte integers, which torch itself does not convert, 8-bit ones as well.
bool is_sub_byte(PyObject* tensor, DlDataType dtype) {
  if (dtype.bits != 8 || (dtype.code != kDlInt && dtype.code != kDlUInt)) return false;
  PyObject* const named = torch.dtype.of(tensor);
  const bool known = named == torch.uint8 || named == torch.int8;
  Py_XDECREF(named);
  PyErr_Clear();
  return !known;
}

// Forward-mode AD is under way: a float tensor may carry a tangent.
bool in_dual_level() {
  PyObject* level = PyObject_GetAttr(torch.forward_ad, torch.current_level);
  const bool inside = level == nullptr || PyLong_AsLong(level) >= 0;
  Py_XDECREF(level);
  PyErr_Clear();
  return inside;
}

bool is_integral(DlDataType dtype) { return dtype.code == kDlInt || dtype.code == kDlUInt || dtype.code == kDlBool; }
// Owns a tensor's shape and its hold on the slot.
struct SlotTensor {
  DlManagedTensor managed{};
  std::vector<std::int64_t> shape, strides;
  LeaseRef lease;

  // Any thread, with or without the GIL, possibly at interpreter exit.
  static void destroy(DlManagedTensor* managed) {
    const std::unique_ptr<SlotTensor> self(static_cast<SlotTensor*>(managed->manager_ctx));
    if (self->lease.pool != nullptr) self->lease.pool->tensor_died(self->lease.slot);
  }
};

// A contiguous tensor over `data`. New reference, or nullptr with the Python error set.
PyObject* tensor_over(const LeaseRef& lease, void* data, DlDevice device, int ndim, const std::int64_t* shape,
                      DlDataType dtype) {
  auto self = std::make_unique<SlotTensor>();
  self->shape.assign(shape, shape + ndim);
  self->strides.resize(self->shape.size());
  std::int64_t stride = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    self->strides[i] = stride;
    stride *= shape[i] > 0 ? shape[i] : 1;
  }
  self->lease = lease;
  DlManagedTensor& managed = self->managed;
  managed.version = {kDlpackMajor, 0};
  managed.manager_ctx = self.get();
  managed.deleter = &SlotTensor::destroy;
  managed.dl_tensor = {data, device, ndim, dtype, self->shape.data(), self->strides.data(), 0};
  if (lease.pool != nullptr) lease.pool->tensor_born(lease);
  void* object = nullptr;
  // torch owns `managed` from here on, and calls the deleter also when it fails.
  if (torch.exchange->managed_tensor_to_py_object_no_sync(&self.release()->managed, &object) != 0) return nullptr;
  return static_cast<PyObject*>(object);
}

}  // namespace

bool view_by_dlpack(PyObject* object, TensorView* out) {
  DlTensor tensor;
  if (torch.exchange->dltensor_from_py_object_no_sync(object, &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  if (tensor.ndim > kMaxDims || tensor.data == nullptr || tensor.dtype.bits % 8 != 0) return false;
  if (is_sub_byte(object, tensor.dtype)) return false;
  out->data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  out->device = tensor.device;
  out->dtype = tensor.dtype;
  out->ndim = tensor.ndim;
  for (int i = 0; i < tensor.ndim; ++i) {
    out->shape[i] = tensor.shape[i];
    out->strides[i] = tensor.strides[i];
  }
  return true;
}

bool view_by_shims(const Shims& shims, PyObject* object, TensorView* out) {
  const void* const tensor = torch.native.tensor(object);
  std::int32_t layout, dtype, type, index;
  std::int64_t ndim, *shape, *strides;
  void* data;
  if (shims.layout(tensor, &layout) != 0 || layout != shims.strided || shims.dtype(tensor, &dtype) != 0 || dtype < 0 ||
      dtype >= kDtypes || shims.dtypes[dtype].bits == 0 || shims.data(tensor, &data) != 0 || data == nullptr ||
      shims.ndim(tensor, &ndim) != 0 || ndim > kMaxDims || shims.shape(tensor, &shape) != 0 ||
      shims.strides(tensor, &strides) != 0 || shims.device_type(tensor, &type) != 0) {
    return false;
  }
  if (type == shims.cpu) {
    out->device = {kDlCpu, 0};
  } else if (type == shims.cuda && shims.device_index(tensor, &index) == 0) {
    out->device = {kDlCuda, index};
  } else {
    return false;
  }
  out->data = static_cast<char*>(data);
  out->dtype = shims.dtypes[dtype];
  out->ndim = static_cast<int>(ndim);
  for (int i = 0; i < out->ndim; ++i) {
    out->shape[i] = shape[i];
    out->strides[i] = strides[i];
  }
  return true;
}
std::int64_t TensorView::numel() const noexcept {
  std::int64_t n = 1;
  for (int i = 0; i < ndim; ++i) n *= shape[i];
  return n;
}

bool TensorView::contiguous() const noexcept {
  std::int64_t expected = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    if (shape[i] == 1) continue;
    if (strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

bool TensorView::same_shape(const TensorView& other) const noexcept {
  return ndim == other.ndim && std::memcmp(shape, other.shape, sizeof(shape[0]) * static_cast<std::size_t>(ndim)) == 0;
}
bool view_tensor(PyObject* object, TensorView* out) {
  if (Py_TYPE(object) != torch.tensor_type) return false;
  return (torch.shims.usable && view_by_shims(torch.shims, object, out)) || view_by_dlpack(object, out);
}

bool copies_bytes_only(PyObject* dst, PyObject* src, DlDataType dtype) {
  if (mode_active(dst)) return false;
  if (is_neg(dst) || is_neg(src) || has_names(dst) || has_names(src)) return false;
  if (is_integral(dtype)) return true;  // knows no gradient
  if (watched(dst) || watched(src) || in_dual_level()) return false;
  return dtype.code != kDlComplex || !(is_conj(dst) || is_conj(src));
}

bool is_inference(PyObject* tensor) {
  return torch.native.word != 0 ? torch.native.is_inference(torch.native.tensor(tensor))
                                : is_true(torch.is_inference, tensor);
}

bool copies_values_only(PyObject* dst, DlDataType dtype, PyObject* src, DlDataType src_dtype) {
  if (mode_active(dst) || is_neg(dst) || is_neg(src) || has_names(dst) || has_names(src)) return false;
  if (!is_integral(dtype) && (watched(dst) || in_dual_level())) return false;
  if (!is_integral(src_dtype) && (watched(src) || in_dual_level())) return false;
  return dtype.code != kDlComplex || !is_conj(dst);
}

bool bump_version(PyObject* dst) {
  if (torch.native.word != 0) {
    try {
      torch.native.bump(torch.native.tensor(dst));
      return true;
    } catch (...) {
      return false;
    }
  }
  PyObject* tensors = PyTuple_Pack(1, dst);
  PyObject* result = tensors != nullptr ? PyObject_Vectorcall(torch.increment_version, &tensors, 1, nullptr) : nullptr;
  Py_XDECREF(tensors);
  Py_XDECREF(result);
  PyErr_Clear();
  return result != nullptr;
}

const char* torch_access() { return torch.shims.usable ? "shims" : torch.native.word != 0 ? "native" : "python"; }

Stream cuda_current_stream(void*, int index) {
  void* stream = nullptr;
  if (torch.exchange->current_work_stream(kDlCuda, index, &stream) != 0) {
    PyErr_Clear();
    throw std::runtime_error("torch has no current stream for cuda:" + std::to_string(index));
  }
  return stream;
}

int current_cuda_device() {
  std::int32_t index = -1;
  return torch.shims.empty != nullptr && torch.shims.current_device(&index) == 0 ? index : -1;
}

PyObject* empty_cuda_tensor(int ndim, const std::int64_t* shape, PyObject* dtype, int index) {
  const Shims& shims = torch.shims;
  if (shims.empty == nullptr || torch.native.function_mode() || torch.native.dispatch_modes(false)) return nullptr;
  const auto number = std::find(std::begin(shims.dtype_objects), std::end(shims.dtype_objects), dtype);
  if (number == std::end(shims.dtype_objects) || dtype == nullptr) return nullptr;
  std::int64_t strides[kMaxDims], stride = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= shape[i];
  }
  void* tensor = nullptr;
  if (shims.empty(ndim, shape, strides, static_cast<std::int32_t>(number - std::begin(shims.dtype_objects)), shims.cuda,
                  index, &tensor) != 0) {
    return nullptr;
  }
  PyObject* const object = shims.wrap(tensor);
  shims.drop(tensor);
  PyErr_Clear();
  return object;
}

PyObject* tensor_over_slot(const LeaseRef& lease, void* data, DlDevice device, int ndim, const std::int64_t* shape,
                           DlDataType dtype) {
  return tensor_over(lease, data, device, ndim, shape, dtype);
}

bool copy_by_torch(void* data, int ndim, const std::int64_t* shape, DlDataType dtype, PyObject* src) {
  // Nobody but torch's copy_ ever sees this tensor, so it need not hold the slot.
  PyObject* const dst = tensor_over(LeaseRef{}, data, {kDlCpu, 0}, ndim, shape, dtype);
  if (dst == nullptr) return false;
  PyObject* const arguments[] = {dst, src};
  PyObject* const result = PyObject_Vectorcall(torch.copy, arguments, 2, nullptr);
  Py_XDECREF(result);
  Py_DECREF(dst);
  return result != nullptr;
}

}  // namespace pinstage
