// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// torch tensors without linking torch: read through torch's C shims or its DLPack C exchange API, made through the
// latter, and asked for what neither carries (torch_access.h). Every function needs the GIL, and none runs under a lock
// of ours.
#pragma once

#include <cstdint>

#include "copy_plan.h"
#include "dlpack.h"

struct _object;  // PyObject

namespace pinstage {

struct LeaseRef;

// Shape and strides are copies: they stay valid when the GIL is released and another thread resizes the tensor.
struct TensorView {
  char* data = nullptr;
  DlDevice device{};
  DlDataType dtype{};
  int ndim = 0;
  std::int64_t shape[kMaxDims];
  std::int64_t strides[kMaxDims];  // in elements

  std::size_t itemsize() const noexcept { return dtype.bits / 8 * std::size_t{dtype.lanes}; }
  std::int64_t numel() const noexcept;
  std::size_t nbytes() const noexcept { return static_cast<std::size_t>(numel()) * itemsize(); }
  bool contiguous() const noexcept;  // strides of dimensions of size 1 do not matter
  bool same_shape(const TensorView& other) const noexcept;
};

// Looks torch's entry points up, once, at import. Throws std::runtime_error when torch is older than 2.10.
void load_torch();

// False when `object` is not exactly a torch.Tensor, or not one that these bytes alone describe: more than kMaxDims
// dimensions, a dtype that DLPack lacks, null data (functionalized and zero tensors), bits packed below a byte.
bool view_tensor(_object* object, TensorView* out);
// True when torch would do nothing on `dst.copy_(src)` but copy bytes: no mode is active, autograd does not watch, no
// conjugate or negative bit is set.
bool copies_bytes_only(_object* dst, _object* src, DlDataType dtype);
// True when torch would do nothing on `dst.copy_(src)` but convert src's values, conjugated where its bit says
// so, and store them as they are.
bool copies_values_only(_object* dst, DlDataType dtype, _object* src, DlDataType src_dtype);
// An inference tensor takes no write outside of torch.inference_mode().
bool is_inference(_object* tensor);
// Counts an in-place write to dst, as torch does; inference tensors have no count. False: torch refuses such a write.
bool bump_version(_object* dst);

// How tensors are read: "shims", "native" (the exchange API, and torch's functions for what it lacks) or "python".
const char* torch_access();

Stream cuda_current_stream(void* unused, int index);

// A new dense CUDA tensor from torch's allocator, as torch.empty() makes it in half the time; index -1 is the current
// device. New reference, or nullptr, without an error set, when torch.empty() had better do it: a mode is active, the
// dtype is not known, the allocation failed.
_object* empty_cuda_tensor(int ndim, const std::int64_t* shape, _object* dtype, int index);
// The index of the current CUDA device, or -1.
int current_cuda_device();

// A tensor over `data`, the bytes of an open lease as `device` addresses them; the slot is not reused while it or a
// view of it lives. New reference, or nullptr with a Python error set.
_object* tensor_over_slot(const LeaseRef& lease, void* data, DlDevice device, int ndim, const std::int64_t* shape,
                          DlDataType dtype);

// torch's own copy_ of `src` into dense host memory: it converts and broadcasts as only torch does. False with the
// Python error set.
bool copy_by_torch(void* data, int ndim, const std::int64_t* shape, DlDataType dtype, _object* src);

}  // namespace pinstage
