// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include "cpu.h"

#include <atomic>
#include <stdexcept>
#include <string>

namespace pinstage {
namespace {

constexpr const Kernels* kBestFirst[] = {
#if defined(__x86_64__)
    &kAvx512Kernels,
    &kAvx2Kernels,
#endif
    &kPortableKernels,
};

// The process's choice, null until it is made: tables are constants and this needs no constructor, so that nothing
// depends on the order in which files are initialised.
std::atomic<const Kernels*> chosen{nullptr};

const Kernels& best() noexcept {
  for (const Kernels* table : kBestFirst) {
    if (table->supported()) return *table;
  }
  return kPortableKernels;
}

const Kernels& named(const std::string& name) {
  std::string problem = "is unknown", valid;
  for (const Kernels* table : kBestFirst) {
    const bool supported = table->supported();
    if (name == table->name) {
      if (supported) return *table;
      problem = "is not supported by this CPU";
    }
    if (supported) valid += (valid.empty() ? "" : ", ") + std::string(table->name);
  }
  throw std::invalid_argument("instruction set '" + name + "' " + problem + "; PINSTAGE_ISA may be one of " + valid +
                              ", or unset for the first of them");
}

}  // namespace

const Kernels& active_kernels() noexcept {
  if (const Kernels* table = chosen.load(std::memory_order_relaxed)) return *table;
  const Kernels& table = best();
  chosen.store(&table, std::memory_order_relaxed);
  return table;
}

const char* isa() noexcept { return active_kernels().name; }

std::vector<const char*> supported_isas() {
  std::vector<const char*> names;
  for (const Kernels* table : kBestFirst) {
    if (table->supported()) names.push_back(table->name);
  }
  return names;
}

void select_isa(const char* name) {
  const bool any = name == nullptr || *name == '\0';
  chosen.store(any ? &best() : &named(name), std::memory_order_relaxed);
}

}  // namespace pinstage
