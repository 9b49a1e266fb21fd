// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// What torch offers beside its DLPack exchange API, looked up once at import: C++ functions and C shims by symbol,
// proved on tensors before they are used, and the Python entry points that take their place where that fails. Only
// tensor_view.cpp calls them. Every call needs the GIL.
#pragma once

#include <Python.h>

#include "tensor_view.h"

namespace pinstage {

constexpr std::int32_t kDtypes = 64;

// torch's own functions, see find_native().
struct Native {
  bool (*function_mode)() = nullptr;              // at::impl::torch_function_mode_enabled
  bool (*dispatch_modes)(bool) = nullptr;         // c10::impl::TorchDispatchModeTLS::any_modes_set
  void (*bump)(const void* tensor) = nullptr;     // torch::autograd::impl::bump_version; throws for what torch refuses
  bool (*is_neg)(const void* tensor) = nullptr;   // at::native::is_neg
  bool (*has_names)(const void* impl) = nullptr;  // at::impl::has_names; may be null
  bool (*is_conj)(const void* tensor) = nullptr;  // at::native::is_conj
  bool (*is_inference)(const void* tensor) = nullptr;  // at::native::is_inference
  std::size_t word = 0;                                // where a Python tensor holds its at::Tensor

  const void* tensor(PyObject* object) const { return reinterpret_cast<void**>(object) + word; }
};

// torch's C shims, which read one property of an at::Tensor each and return 0; see find_shims().
struct Shims {
  int (*layout)(const void* tensor, std::int32_t* out) = nullptr;
  int (*dtype)(const void* tensor, std::int32_t* out) = nullptr;
  int (*device_type)(const void* tensor, std::int32_t* out) = nullptr;
  int (*device_index)(const void* tensor, std::int32_t* out) = nullptr;
  int (*data)(const void* tensor, void** out) = nullptr;
  int (*ndim)(const void* tensor, std::int64_t* out) = nullptr;
  int (*shape)(const void* tensor, std::int64_t** out) = nullptr;
  int (*strides)(const void* tensor, std::int64_t** out) = nullptr;
  std::int32_t strided = 0;               // the layout of plain tensors
  std::int32_t cpu = 0, cuda = 0;         // device types
  DlDataType dtypes[kDtypes] = {};        // by torch's number; bits 0: not known
  PyObject* dtype_objects[kDtypes] = {};  // those that are known
  // May be null: what makes tensors rather than reads them.
  int (*current_device)(std::int32_t* out) = nullptr;
  int (*empty)(std::int64_t ndim, const std::int64_t* shape, const std::int64_t* strides, std::int32_t dtype,
               std::int32_t device_type, std::int32_t device_index, void** out) = nullptr;
  int (*drop)(void* tensor) = nullptr;
  PyObject* (*wrap)(const void* tensor) = nullptr;  // THPVariable_Wrap
  bool usable = false;
};

// A property of torch.Tensor.
struct Property {
  PyObject* descriptor = nullptr;
  descrgetfunc get = nullptr;

  // New reference, or nullptr with the Python error set.
  PyObject* of(PyObject* tensor) const { return get(descriptor, tensor, reinterpret_cast<PyObject*>(Py_TYPE(tensor))); }
};

// What torch offers, looked up once. The module's state, not the core's: one interpreter has one torch.
struct Torch {
  const DlExchangeApi* exchange = nullptr;
  PyTypeObject* tensor_type = nullptr;
  PyObject* has_torch_function = nullptr;  // (tensor) -> bool; for an exact Tensor: is a torch function mode active
  PyObject* dispatch_stack = nullptr;      // () -> int
  PyObject* has_names = nullptr;           // Tensor.has_names, in torch < 2.13
  PyObject* is_neg = nullptr;              // Tensor.is_neg
  PyObject* is_conj = nullptr;             // Tensor.is_conj
  PyObject* is_inference = nullptr;        // Tensor.is_inference
  PyObject* increment_version = nullptr;   // (iterable of tensors) -> None
  PyObject* grad_enabled = nullptr;        // () -> bool
  PyObject* copy = nullptr;                // Tensor.copy_, whatever others replaced it by
  PyObject* uint8 = nullptr;
  PyObject* int8 = nullptr;
  Property requires_grad;
  Property dtype;
  Native native;
  Shims shims;
  PyObject* forward_ad = nullptr;     // torch.autograd.forward_ad
  PyObject* current_level = nullptr;  // "_current_level", -1 outside
};
extern Torch torch;

// Both: false for what view_tensor declines; `object` is exactly a torch.Tensor.
bool view_by_dlpack(PyObject* object, TensorView* out);
bool view_by_shims(const Shims& shims, PyObject* object, TensorView* out);

}  // namespace pinstage
