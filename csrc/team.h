// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// The team: worker threads that share the chunks of one large snapshot with its caller.
//
//   caller   posts a job ── takes chunks ── closes the job ── waits for the chunks that are still being worked on
//   workers  spin a while after each job, because the next copy of a step is close behind; then they park
//
// A hand-off to a spinning worker costs 0.4 us, waking a parked one 16-100 us and 10-17 us of the caller (on the
// host of an H200), so only large jobs come here. The caller always works itself: with no worker free, or on one CPU,
// it does the job alone. One job at a time has the workers; callers beside it work alone rather than queue up.
//
// Workers are started when first wanted, never end, and hold no lock while they work; the team is never destroyed, so
// it can be at work while the process exits. A forked child starts a team of its own.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace pinstage {

class Team {
 public:
  // Chunk `index` of `work`; called once for each, in no order, on several threads at once.
  using Chunk = void (*)(void* work, std::int64_t index) noexcept;

  static Team& instance();

  // Calls `chunk` for 0 .. chunks-1, on up to `threads` threads, the caller among them. `worth_waking`: parked workers
  // are woken for this job alone; else only when it follows another one closely.
  void run(std::int64_t chunks, int threads, bool worth_waking, Chunk chunk, void* work);

  // Threads that may work on one job, the caller counted. 0: the default, PINSTAGE_THREADS or at most 8 of the CPUs
  // that the process may use.
  void set_threads(int threads);
  int threads() const noexcept { return threads_.load(std::memory_order_relaxed); }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

 private:
  Team();
  void start(int workers) noexcept;
  void work_for_ever();
  std::uint64_t await(std::uint64_t seen);
  void wake_one();

  std::atomic<int> threads_;
  std::mutex job_mutex_;  // held by the caller whose job has the workers
  // Guarded by job_mutex_:
  int workers_ = 0;  // started so far
  std::chrono::steady_clock::time_point last_job_{};

  // The job. A worker reads it only between entering (active_) and leaving while open_ is true; the caller changes it
  // only while open_ is false and active_ is 0.
  Chunk chunk_ = nullptr;
  void* work_ = nullptr;
  std::int64_t chunks_ = 0;
  std::atomic<std::int64_t> next_{0};
  std::atomic<int> places_{0};  // workers that may still join
  std::atomic<bool> open_{false};
  std::atomic<int> active_{0};

  std::atomic<std::uint64_t> posted_{0};  // jobs so far: what workers watch
  std::atomic<int> parked_{0};
  std::mutex park_mutex_;
  std::condition_variable unpark_;
};

// CPUs that this process may run on: its affinity and its control group's quota.
int usable_cpus() noexcept;

// The snapshot of `nbytes` dense bytes, on as many threads as pay.
void copy_bytes_in_parallel(void* dst, const void* src, std::size_t nbytes);
// The same for a gather.
struct Gather;
void gather_in_parallel(const Gather& g);

}  // namespace pinstage
