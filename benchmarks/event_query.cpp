// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// Times cuEventQuery on 16 fences that have passed: the 16th first, then the others from the oldest. event_query.py
// compiles it, passes the driver's addresses, and says whether more work is queued behind them.
#include <chrono>
#include <cstddef>

using CopyHtoD = int (*)(unsigned long long, const void*, std::size_t, void*);
using EventRecord = int (*)(void*, void*);
using EventQuery = int (*)(void*);

namespace {
double now() {
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
}  // namespace

extern "C" void enqueue(void* copy, void* record, unsigned long long dst, const void* src, void* stream, void** events,
                        int count) {
  for (int i = 0; i < count; ++i) {
    reinterpret_cast<CopyHtoD>(copy)(dst, src, 256, stream);
    reinterpret_cast<EventRecord>(record)(events[i], stream);
  }
}

// Nanoseconds: times[0] of the youngest of `count` events, times[1..] of the others. Returns how many had not passed.
extern "C" int query(void* query_event, void** events, int count, double* times) {
  int busy = 0;
  for (int i = 0; i < count; ++i) {
    const double start = now();
    busy += reinterpret_cast<EventQuery>(query_event)(events[i == 0 ? count - 1 : i - 1]) != 0;
    times[i] = now() - start;
  }
  return busy;
}
