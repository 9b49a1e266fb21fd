// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// The driver: a table of function pointers with the signatures of the CUDA driver API.
//
// Nothing here links against CUDA. On a GPU the pointers come from cuGetProcAddress (pinstage/cuda.py); the simulated
// driver fills the same table (simulated_driver.h), so the code above it cannot tell the two apart. A table belongs to
// one Device. Types are redeclared rather than included: the build needs no CUDA toolkit, and these layouts are frozen
// by the versions under which the entry points are resolved.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pinstage {

using Status = int;  // CUresult
using Context = void*;
using Stream = void*;
using Event = void*;
using Module = void*;
using Function = void*;
using DevicePtr = std::uint64_t;

// The statuses that this library tells apart. Values as in cuda.h.
namespace status {
inline constexpr Status kSuccess = 0;
inline constexpr Status kInvalidValue = 1;
inline constexpr Status kOutOfMemory = 2;
inline constexpr Status kDeinitialized = 4;
inline constexpr Status kInvalidContext = 201;
inline constexpr Status kNoBinaryForGpu = 209;
inline constexpr Status kInvalidPtx = 218;
inline constexpr Status kHostMemoryAlreadyRegistered = 712;
inline constexpr Status kInvalidHandle = 400;
inline constexpr Status kNotFound = 500;
inline constexpr Status kNotReady = 600;
inline constexpr Status kLaunchOutOfResources = 701;
inline constexpr Status kLaunchFailed = 719;
inline constexpr Status kNotPermitted = 800;
inline constexpr Status kNotSupported = 801;
inline constexpr Status kStreamCaptureUnsupported = 900;
inline constexpr Status kStreamCaptureInvalidated = 901;
inline constexpr Status kStreamCaptureImplicit = 906;
inline constexpr Status kCapturedEvent = 907;
inline constexpr Status kUnknown = 999;
// Not a CUDA status: the simulated device's idle() found nothing that could ever run (a wait that would hang).
inline constexpr Status kNothingCanRun = -1;
}  // namespace status

inline constexpr int kSourceOrderStream = 1;        // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
inline constexpr unsigned kHostAllocPortable = 1;   // CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE
inline constexpr unsigned kHostAllocDeviceMap = 2;  // CU_MEMHOSTALLOC_DEVICEMAP
inline constexpr unsigned kEventDisableTiming = 2;  // CU_EVENT_DISABLE_TIMING
inline constexpr int kCaptureModeGlobal = 0;        // CUstreamCaptureMode
inline constexpr int kCaptureModeThreadLocal = 1;
inline constexpr int kCaptureModeRelaxed = 2;
inline constexpr int kCaptureStatusNone = 0;  // CUstreamCaptureStatus
inline constexpr int kCaptureStatusActive = 1;
inline constexpr int kCaptureStatusInvalidated = 2;
inline constexpr unsigned kMemoryTypeHost = 1;  // CUmemorytype
inline constexpr unsigned kMemoryTypeDevice = 2;

// CUDA_MEMCPY2D_v2
struct Memcpy2D {
  std::size_t src_x, src_y;
  unsigned src_type;
  const void* src_host;
  DevicePtr src_device;
  void* src_array;
  std::size_t src_pitch;
  std::size_t dst_x, dst_y;
  unsigned dst_type;
  void* dst_host;
  DevicePtr dst_device;
  void* dst_array;
  std::size_t dst_pitch;
  std::size_t width, height;
};
static_assert(sizeof(Memcpy2D) == 128, "layout of CUDA_MEMCPY2D_v2");

// CUDA_MEMCPY3D_v2
struct Memcpy3D {
  std::size_t src_x, src_y, src_z, src_lod;
  unsigned src_type;
  const void* src_host;
  DevicePtr src_device;
  void* src_array;
  void* reserved0;
  std::size_t src_pitch, src_height;
  std::size_t dst_x, dst_y, dst_z, dst_lod;
  unsigned dst_type;
  void* dst_host;
  DevicePtr dst_device;
  void* dst_array;
  void* reserved1;
  std::size_t dst_pitch, dst_height;
  std::size_t width, height, depth;
};
static_assert(sizeof(Memcpy3D) == 200, "layout of CUDA_MEMCPY3D_v2");

// CUmemLocation, CUmemcpyAttributes_v1
struct MemLocation {
  int type, id;
};
struct MemcpyAttributes {
  int src_access_order;
  MemLocation src_hint, dst_hint;
  unsigned flags;
};
static_assert(sizeof(MemcpyAttributes) == 24, "layout of CUmemcpyAttributes_v1");

// One row per entry point: field, CUDA name, CUDA version whose signature it has, required, parameters.
// "required" false: the pointer may be null on old drivers, and callers check it.
#define PINSTAGE_DRIVER_TABLE(X)                                                                                      \
  X(mem_host_alloc, "cuMemHostAlloc", 2020, true, (void** out, std::size_t nbytes, unsigned flags))                   \
  X(mem_free_host, "cuMemFreeHost", 2000, true, (void* p))                                                            \
  X(mem_host_register, "cuMemHostRegister", 6050, true, (void* p, std::size_t nbytes, unsigned flags))                \
  X(mem_host_unregister, "cuMemHostUnregister", 4000, true, (void* p))                                                \
  X(mem_host_get_device_pointer, "cuMemHostGetDevicePointer", 3020, true, (DevicePtr * out, void* p, unsigned flags)) \
  X(memcpy_htod_async, "cuMemcpyHtoDAsync", 3020, true,                                                               \
    (DevicePtr dst, const void* src, std::size_t nbytes, Stream stream))                                              \
  X(memcpy_2d_async, "cuMemcpy2DAsync", 3020, true, (const Memcpy2D* copy, Stream stream))                            \
  X(memcpy_3d_async, "cuMemcpy3DAsync", 3020, true, (const Memcpy3D* copy, Stream stream))                            \
  X(memcpy_batch_async, "cuMemcpyBatchAsync", 13000, false,                                                           \
    (DevicePtr * dsts, DevicePtr * srcs, std::size_t* sizes, std::size_t count, MemcpyAttributes* attrs,              \
     std::size_t* attr_indices, std::size_t num_attrs, Stream stream))                                                \
  X(module_load_data, "cuModuleLoadData", 2000, false, (Module * out, const void* image))                             \
  X(module_get_function, "cuModuleGetFunction", 2000, false, (Function * out, Module module, const char* name))       \
  X(launch_kernel, "cuLaunchKernel", 4000, false,                                                                     \
    (Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,        \
     unsigned block_z, unsigned shared_bytes, Stream stream, void** parameters, void** extra))                        \
  X(mem_get_address_range, "cuMemGetAddressRange", 3020, false, (DevicePtr * base, std::size_t* nbytes, DevicePtr p)) \
  X(event_create, "cuEventCreate", 2000, true, (Event * out, unsigned flags))                                         \
  X(event_record, "cuEventRecord", 2000, true, (Event event, Stream stream))                                          \
  X(event_query, "cuEventQuery", 2000, true, (Event event))                                                           \
  X(event_synchronize, "cuEventSynchronize", 2000, true, (Event event))                                               \
  X(event_destroy, "cuEventDestroy", 4000, true, (Event event))                                                       \
  X(stream_wait_event, "cuStreamWaitEvent", 3020, true, (Stream stream, Event event, unsigned flags))                 \
  X(stream_is_capturing, "cuStreamIsCapturing", 10000, true, (Stream stream, int* capture_status))                    \
  X(stream_get_id, "cuStreamGetId", 12000, false, (Stream stream, unsigned long long* out))                           \
  X(ctx_get_current, "cuCtxGetCurrent", 4000, true, (Context * out))                                                  \
  X(ctx_push_current, "cuCtxPushCurrent", 4000, true, (Context context))                                              \
  X(ctx_pop_current, "cuCtxPopCurrent", 4000, true, (Context * out))                                                  \
  X(ctx_synchronize, "cuCtxSynchronize", 2000, true, ())                                                              \
  X(thread_exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", 10010, true, (int* mode))                      \
  X(get_error_name, "cuGetErrorName", 6000, true, (Status error, const char** out))                                   \
  X(get_error_string, "cuGetErrorString", 6000, true, (Status error, const char** out))

struct Driver {
#define PINSTAGE_FIELD(field, name, version, required, parameters) Status(*field) parameters = nullptr;
  PINSTAGE_DRIVER_TABLE(PINSTAGE_FIELD)
#undef PINSTAGE_FIELD

  // Called between two polls of a wait, holding no lock and not the GIL. `round` counts the polls of this wait that
  // saw nothing new. On a GPU: a pause, then short sleeps. On the simulated device: run the next legal step, and
  // kNothingCanRun when there is none and nothing else can release one.
  Status (*idle)(unsigned round) = nullptr;
};

}  // namespace pinstage
