// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include "cpu.h"

#include <atomic>
#include <stdexcept>
#include <string>

namespace pinstage {
namespace {

// Best first.
constexpr const Kernels* kAll[] = {
#if defined(__x86_64__)
    &kAvx512Kernels,
    &kAvx2Kernels,
#endif
    &kPortableKernels,
};

// The one piece of state: a pointer that starts null without any constructor.
std::atomic<const Kernels*> g_active{nullptr};

const Kernels* best() noexcept {
  for (const Kernels* k : kAll) {
    if (k->supported()) return k;
  }
  return &kPortableKernels;
}

std::string valid_names() {
  std::string names;
  for (const Kernels* k : kAll) {
    if (!k->supported()) continue;
    if (!names.empty()) names += ", ";
    names += k->name;
  }
  return names;
}

}  // namespace

const Kernels& active_kernels() noexcept {
  const Kernels* active = g_active.load(std::memory_order_relaxed);
  if (active == nullptr) {
    active = best();
    g_active.store(active, std::memory_order_relaxed);
  }
  return *active;
}

const char* isa() noexcept { return active_kernels().name; }

void select_isa(const char* name) {
  if (name == nullptr || *name == '\0') {
    g_active.store(best(), std::memory_order_relaxed);
    return;
  }
  for (const Kernels* k : kAll) {
    if (std::string(name) != k->name) continue;
    if (!k->supported()) {
      throw std::invalid_argument("instruction set '" + std::string(name) +
                                  "' is not supported by this CPU; use one of: " + valid_names() +
                                  ", or leave PINSTAGE_ISA unset");
    }
    g_active.store(k, std::memory_order_relaxed);
    return;
  }
  throw std::invalid_argument("unknown instruction set '" + std::string(name) + "'; use one of: " + valid_names() +
                              ", or leave PINSTAGE_ISA unset");
}

}  // namespace pinstage
