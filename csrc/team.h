// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// The team: worker threads that share the chunks of one large snapshot with its caller.
//
//   caller   opens a job ── works ── closes the job ── waits for the workers that are still inside it
//   workers  enter an open job ── work ── leave ── spin a while, because the next copy of a step is close behind ──
//   park
//
// Every party of a job (the caller is party 0) begins with a range of chunks of its own, the same one in every job of a
// size, so that the bytes of a slot stay in the cache of the core that writes them, and takes chunks of the others when
// its own are done. A party that never comes, or loses its CPU, costs nothing but the chunk that it is in.
//
// Handing a job to a spinning worker costs 0.4 us, waking a parked one 16-100 us and 10-17 us of the caller (on the
// host of an H200). So a parked worker is woken for a large job, or for one of a burst; other jobs the caller does
// alone. One job at a time has the workers; callers beside it work alone rather than queue up, and where several call
// within a millisecond each takes its share of the threads, because theirs have CPUs already.
//
// Workers are started when first wanted, never end, and hold no lock while they work; the team is never destroyed, so
// it can be at work while the process exits. A forked child starts a team of its own.
#pragma once

#include <array>
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

  // Calls `chunk` for 0 .. chunks-1, on up to `threads` threads, the caller among them. False, with nothing called,
  // when the caller had better work alone: others have the workers, or they are parked and a job of `nbytes` is not
  // worth waking them (a large one is, and so is one that follows another closely).
  bool run(std::int64_t chunks, int threads, std::size_t nbytes, Chunk chunk, void* work);

  // The calling thread's share of the threads: all of them, divided by the callers of the last millisecond. Called by
  // whoever has something that the team could share.
  int share() noexcept;

  // Threads that may work on one job, the caller counted. 0: the default, PINSTAGE_THREADS or at most 16 of the CPUs
  // that the process may use.
  void set_threads(int threads);
  int threads() const noexcept { return threads_.load(std::memory_order_relaxed); }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

 private:
  Team();
  void start(int workers) noexcept;
  void open(int parties, std::int64_t chunks, Chunk chunk, void* work) noexcept;
  void close() noexcept;
  void work(int party, int parties) noexcept;
  void work_for_ever(int worker);
  std::uint64_t await(int worker, std::uint64_t seen);
  bool wake_one();

  // A job's name: its number, and how many parties it has in the low kPartyBits. Never 0, never repeated.
  static constexpr int kPartyBits = 8;
  static int parties_of(std::uint64_t job) noexcept { return static_cast<int>(job & ((1u << kPartyBits) - 1)); }

  static constexpr std::size_t kApart = 128;  // lines that two cores write lie two apart: they are fetched in pairs
  static constexpr int kMaxParties = 64;

  struct alignas(kApart) Range {
    std::atomic<std::int64_t> next{0};
    std::int64_t end = 0;
  };
  struct alignas(kApart) Worker {
    std::atomic<bool> inside{false};
    std::mutex mutex;
    std::condition_variable unpark;
    bool woken = false;  // guarded by mutex
  };

  std::atomic<int> threads_;
  std::array<std::atomic<std::int64_t>, 16> called_{};  // when each caller last called; several may have one place
  std::mutex job_mutex_;                                // held by the caller whose job has the workers
  // Guarded by job_mutex_:
  int workers_started_ = 0;
  std::uint64_t jobs_ = 0;
  std::chrono::steady_clock::time_point burst_until_{};

  // The job that is open, or 0; what workers watch. A worker reads what follows only while it is inside and has seen
  // its job open since it entered; the caller changes it only while no job is open and no party of the last is inside.
  alignas(kApart) std::atomic<std::uint64_t> open_{0};
  alignas(kApart) Chunk chunk_ = nullptr;
  void* work_ = nullptr;
  std::array<Range, kMaxParties> ranges_;  // by party

  std::atomic<std::chrono::microseconds> spin_after_{};   // the last job
  std::atomic<int> wanted_{1};                            // parties of the last job
  alignas(kApart) std::atomic<std::uint64_t> parked_{0};  // bit w: worker w sleeps, and who clears it must wake it
  std::array<Worker, kMaxParties> workers_;               // worker w is party w + 1
};

// CPUs that this process may run on: its affinity and its control group's quota.
int usable_cpus() noexcept;

// The snapshot of `nbytes` dense bytes, on as many threads as pay. `cached`: dst is left in the cache where it can be,
// for a device that reads it at once; else it is stored as is fastest for the caller.
void copy_bytes_in_parallel(void* dst, const void* src, std::size_t nbytes, bool cached = false);
// The same for a gather.
struct Gather;
void gather_in_parallel(const Gather& g);
// For segments (gather.h).
struct Segment;
void copy_segments_in_parallel(char* dst, const Segment* segments, std::size_t count, std::size_t begin,
                               std::size_t end);
// And for the rows [begin, end) of a strided source, into dense memory.
struct Strided;
void copy_strided_in_parallel(char* dst, const Strided& source, std::int64_t begin, std::int64_t end);

}  // namespace pinstage
