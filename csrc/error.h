// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// What the core throws. Each kind becomes one Python class (pinstage/errors.py); the message says what, the numbers and
// the remedy.
#pragma once

#include <exception>
#include <string>
#include <utility>

#include "driver.h"

namespace pinstage {

enum class ErrorKind { kValue, kIndex, kPoolExhausted, kLeaseState, kCapture, kDriver, kForked, kTimeout };

class Error : public std::exception {
 public:
  Error(ErrorKind kind, std::string message, Status status = status::kSuccess)
      : kind_(kind), message_(std::move(message)), status_(status) {}
  ErrorKind kind() const noexcept { return kind_; }
  Status status() const noexcept { return status_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  ErrorKind kind_;
  std::string message_;
  Status status_;
};

// A signal handler raised while a wait was under way, or torch did; the Python error is already set on this thread.
struct Interrupted {};

}  // namespace pinstage
