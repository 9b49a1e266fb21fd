// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include "seeded_bugs.h"

#include <climits>
#include <cstddef>
#include <memory>

#include "check.h"

namespace pinstage::check {
namespace {

// Everything goes through volatile: the compiler must neither see the bug (and warn) nor remove it.

void overflow_the_heap() {
  volatile std::size_t n = 17;  // malloc rounds it up, so the stray byte is nobody's
  const std::unique_ptr<volatile char[]> bytes(new volatile char[n]);
  bytes[n] = 1;
}

void overflow_an_int() {
  volatile int n = INT_MAX;
  n = n + 1;
}

void race_for_an_int() {
  volatile int shared = 0;
  run_together(2, [&shared](int) {
    for (int i = 0; i < 1000; ++i) shared = shared + 1;
  });
}

}  // namespace

bool run_seeded_bug(const std::string& kind) {
  if (kind == "address") {
    overflow_the_heap();
  } else if (kind == "undefined") {
    overflow_an_int();
  } else if (kind == "thread") {
    race_for_an_int();
  } else {
    return false;
  }
  return true;
}

}  // namespace pinstage::check
