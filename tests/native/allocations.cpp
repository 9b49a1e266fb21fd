// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include "allocations.h"

#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

thread_local std::uint64_t count = 0;

void* counted(void* p) {
  if (p == nullptr) throw std::bad_alloc();
  ++count;
  return p;
}

}  // namespace

// The array forms of the standard library call these; its nothrow form does too, but not a sanitizer's.
void* operator new(std::size_t nbytes) { return counted(std::malloc(nbytes > 0 ? nbytes : 1)); }
void* operator new(std::size_t nbytes, const std::nothrow_t&) noexcept {
  ++count;
  return std::malloc(nbytes > 0 ? nbytes : 1);
}
void* operator new(std::size_t nbytes, std::align_val_t alignment) {
  const auto align = static_cast<std::size_t>(alignment);
  return counted(std::aligned_alloc(align, (nbytes + align - 1) / align * align));
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, const std::nothrow_t&) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }

namespace pinstage::check {

std::uint64_t allocations() noexcept { return count; }

}  // namespace pinstage::check
