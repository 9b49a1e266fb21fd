// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// The part of the DLPack 1.x ABI that is used here. Layouts are fixed by DLPack's major version, which is checked
// before the first use (tensor_view.cpp). https://dmlc.github.io/dlpack/latest/c_api.html
#pragma once

#include <cstdint>

namespace pinstage {

inline constexpr std::uint32_t kDlpackMajor = 1;
inline constexpr std::int32_t kDlCpu = 1, kDlCuda = 2;
inline constexpr std::uint8_t kDlInt = 0, kDlUInt = 1, kDlComplex = 5, kDlBool = 6;

struct DlVersion {
  std::uint32_t major, minor;
};
struct DlDevice {
  std::int32_t type, id;
};
struct DlDataType {
  std::uint8_t code, bits;
  std::uint16_t lanes;
  bool operator==(const DlDataType& other) const {
    return code == other.code && bits == other.bits && lanes == other.lanes;
  }
};
struct DlTensor {
  void* data;
  DlDevice device;
  std::int32_t ndim;
  DlDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements
  std::uint64_t byte_offset;
};
struct DlManagedTensor {  // DLManagedTensorVersioned
  DlVersion version;
  void* manager_ctx;
  void (*deleter)(DlManagedTensor* self);
  std::uint64_t flags;
  DlTensor dl_tensor;
};

struct DlExchangeHeader {
  DlVersion version;
  DlExchangeHeader* prev_api;
};
struct DlExchangeApi {
  DlExchangeHeader header;
  int (*managed_tensor_allocator)(DlTensor* prototype, DlManagedTensor** out, void* error_ctx,
                                  void (*set_error)(void* error_ctx, const char* kind, const char* message));
  int (*managed_tensor_from_py_object_no_sync)(void* object, DlManagedTensor** out);
  int (*managed_tensor_to_py_object_no_sync)(DlManagedTensor* tensor, void** out_object);
  int (*dltensor_from_py_object_no_sync)(void* object, DlTensor* out);
  int (*current_work_stream)(std::int32_t device_type, std::int32_t device_id, void** out_stream);
};

}  // namespace pinstage
