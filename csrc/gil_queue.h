// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// Turns at the GIL, for threads that let go of it for a few us at a time.
//
// A thread that asks for the GIL while another has it falls asleep. Waking it takes 50 to 100 us and costs whoever lets
// go a system call, and by then the GIL is mostly taken again: it sleeps on, and displaces another when it gets in. So
// eight Python threads that copy got a third of one thread's work done (H200 host: 103,000 calls of 256 B a second).
// Taking turns here, awake, only one of them asks for the GIL, and only when it is free: 400,000.
//
// This is a courtesy among our own calls, not a lock. Other code takes the GIL and lets go of it unseen, so whoever
// sees nothing move for a while asks all the same, and sleeps where everyone does.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace pinstage {

class GilQueue {
 public:
  // To be called before the GIL is asked for, and followed by got() or by gave_up().
  void wait_for_turn() noexcept {
    std::uint64_t seen = state_.load(std::memory_order_relaxed);
    if (idle(seen) && state_.compare_exchange_strong(seen, seen + kAsking)) return;
    const Clock::time_point start = Clock::now();
    Clock::time_point moved = start, now = start;
    // One that asks while nobody has it is being woken up.
    while (now - moved < ((seen & kHeld) != 0 ? kHold : kWakeUp) && now - start < kLongest) {
      std::this_thread::yield();  // to threads that have no CPU: the holder may be among them
      std::uint64_t state = state_.load(std::memory_order_relaxed);
      if (idle(state) && state_.compare_exchange_strong(state, state + kAsking)) return;
      now = Clock::now();
      if (state != seen) moved = now;
      seen = state;
    }
    state_.fetch_add(kAsking);
  }
  void got() noexcept {
    std::uint64_t seen = state_.load(std::memory_order_relaxed);
    while (!state_.compare_exchange_weak(seen, ((seen - kAsking) | kHeld) + kOnce)) continue;
  }
  void gave_up() noexcept { state_.fetch_sub(kAsking); }

  // Once the GIL was let go of.
  void let_go() noexcept { state_.fetch_and(~kHeld, std::memory_order_relaxed); }

  // Does a thread ask, between wait_for_turn() and got()?
  bool asked() const noexcept { return (state_.load() & kAllAsking) != 0; }

  // In a forked child, which has none of the other threads.
  void forget() noexcept { state_.store(0); }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::microseconds kHold{20}, kWakeUp{100}, kLongest{1000};

  // The number of threads that ask; whether the last one that got it has it still; how many got it.
  static constexpr std::uint64_t kAsking = 1, kAllAsking = 0xffff, kHeld = 1 << 16, kOnce = 1 << 17;
  static bool idle(std::uint64_t state) noexcept { return (state & (kAllAsking | kHeld)) == 0; }

  std::atomic<std::uint64_t> state_{0};
};

}  // namespace pinstage
