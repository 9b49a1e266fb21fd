// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// What a status of the driver means to us, and to the caller.
#pragma once

#include "driver.h"

namespace pinstage {

// True when `status` says that the context or the device is gone, so that no fence under it will ever pass.
bool is_fatal(Status status) noexcept;
// True when a call that returned `status` certainly enqueued nothing (and did not merely report an older fault).
bool enqueued_nothing(Status status) noexcept;
// True when the driver took nothing, because it does not do this kind of call here; others may do the same.
bool declined(Status status) noexcept;
// What the caller can do about it: the last sentence of an error's message.
const char* remedy(Status status) noexcept;

}  // namespace pinstage
