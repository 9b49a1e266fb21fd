// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>

#include "simulated_machine.h"

namespace pinstage::sim {
namespace {

struct ErrorText {
  Status status;
  const char* name;
  const char* text;
};

constexpr ErrorText kErrors[] = {
    {status::kSuccess, "CUDA_SUCCESS", "no error"},
    {status::kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {status::kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {status::kDeinitialized, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {status::kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {status::kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {kIllegalState, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {status::kNotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {status::kNotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
    {status::kHostMemoryAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {kHostMemoryNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered "
     "memory region"},
    {status::kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {status::kNotPermitted, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {status::kNotSupported, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {status::kStreamCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {status::kStreamCaptureInvalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {kCaptureMerge, "CUDA_ERROR_STREAM_CAPTURE_MERGE",
     "operation would result in a merge of separate capture sequences"},
    {kCaptureUnmatched, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not ended in the same stream as it began"},
    {kCaptureUnjoined, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {kCaptureIsolation, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another "
     "stream"},
    {status::kStreamCaptureImplicit, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {status::kCapturedEvent, "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a "
     "capturing stream"},
    {kCaptureWrongThread, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {status::kUnknown, "CUDA_ERROR_UNKNOWN", "unknown error"},
    {status::kNothingCanRun, "PINSTAGE_NOTHING_CAN_RUN", "no queued step can run on the simulated device"},
};

const ErrorText* find_error(Status status) {
  const auto* found =
      std::find_if(std::begin(kErrors), std::end(kErrors), [&](const ErrorText& e) { return e.status == status; });
  return found == std::end(kErrors) ? nullptr : found;
}

// Kept for good: callers keep the pointer, as they may with a real driver's.
const char* unknown_error(Status status) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  static std::map<Status, std::string>* const texts = new std::map<Status, std::string>;
  std::string& text = (*texts)[status];
  if (text.empty()) text = "unknown error " + std::to_string(status);
  return text.c_str();
}

}  // namespace

const char* error_name(Status status) {
  const ErrorText* known = find_error(status);
  return known != nullptr ? known->name : unknown_error(status);
}

const char* error_text(Status status) {
  const ErrorText* known = find_error(status);
  return known != nullptr ? known->text : unknown_error(status);
}

}  // namespace pinstage::sim
