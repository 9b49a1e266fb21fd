// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// The floor under a staged copy: memcpy into a slot, cuMemcpyHtoDAsync, cuEventRecord, called straight from C++.
// overhead.py compiles it (g++ -O3 -shared) and passes the driver's addresses.
#include <chrono>
#include <cstddef>
#include <cstring>

using CopyHtoD = int (*)(unsigned long long, const void*, std::size_t, void*);
using EventRecord = int (*)(void*, void*);

// Nanoseconds, or -1 when the driver refused.
extern "C" double staged_copy(void* copy, void* record, unsigned long long dst, void* slot, const void* src,
                              std::size_t nbytes, void* stream, void* event) {
  const auto start = std::chrono::steady_clock::now();
  std::memcpy(slot, src, nbytes);
  const int copied = reinterpret_cast<CopyHtoD>(copy)(dst, slot, nbytes, stream);
  const int recorded = reinterpret_cast<EventRecord>(record)(event, stream);
  const auto stop = std::chrono::steady_clock::now();
  return copied == 0 && recorded == 0 ? std::chrono::duration<double, std::nano>(stop - start).count() : -1;
}
