// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include "status.h"

namespace pinstage {

bool is_fatal(Status status) noexcept {
  switch (status) {
    case 4:    // deinitialized
    case 46:   // device unavailable
    case 100:  // no device
    case 101:  // invalid device
    case 201:  // invalid context
    case 214:  // uncorrectable ECC error
    case 220:  // uncorrectable NVLink error
    case 700:  // illegal address
    case 702:  // launch timeout
    case 709:  // context is destroyed
    case 710:  // assert
    case 714:  // hardware stack error
    case 715:  // illegal instruction
    case 716:  // misaligned address
    case 717:  // invalid address space
    case 718:  // invalid program counter
    case 719:  // launch failed
    case 721:  // tensor memory leak, external device and the like
    case 999:  // unknown
      return true;
    default:
      return false;
  }
}

bool enqueued_nothing(Status status) noexcept {
  switch (status) {
    case status::kInvalidValue:
    case status::kOutOfMemory:
    case status::kInvalidHandle:
    case status::kNotPermitted:
    case status::kNotSupported:
    case status::kStreamCaptureUnsupported:
    case status::kStreamCaptureInvalidated:
    case status::kStreamCaptureImplicit:
      return true;
    default:
      return false;
  }
}

bool declined(Status status) noexcept {
  switch (status) {
    case status::kInvalidValue:
    case status::kNotSupported:
    case status::kNoBinaryForGpu:
    case status::kInvalidPtx:
    case status::kLaunchOutOfResources:
      return true;
    default:
      return false;
  }
}

const char* remedy(Status status) noexcept {
  if (status == status::kDeinitialized) {
    return "The driver is shutting down: end what copies before the process exits";
  }
  if (is_fatal(status)) {
    return "The device or its context is lost for this process: restart it. compute-sanitizer finds a kernel that did "
           "this";
  }
  switch (status) {
    case status::kOutOfMemory:
      return "Free memory of the host or the device and call again; the pool is whole";
    case status::kNotReady:
      return "Call again once the device has come further; the pool is whole";
    case status::kNotPermitted:
    case status::kNotSupported:
      return "The driver does not do this here, and will not if it is called again; the pool is whole";
    case status::kStreamCaptureUnsupported:
    case status::kStreamCaptureInvalidated:
    case status::kStreamCaptureImplicit:
    case status::kCapturedEvent:
      return "Copy before the capture, or on a stream that is not captured";
    default:
      return "The pool is whole: correct the stream or the tensor that the driver does not take, and call again";
  }
}

}  // namespace pinstage
