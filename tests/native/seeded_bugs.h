// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// One bug for each sanitizer to find, so that CI can prove that the sanitizer it relies on is really at work.
#pragma once

#include <string>

namespace pinstage::check {

// `kind` is "address", "undefined" or "thread"; false for any other. Under the matching sanitizer the process dies
// with a nonzero status, at the latest when it exits; without one the bug does no harm.
bool run_seeded_bug(const std::string& kind);

}  // namespace pinstage::check
