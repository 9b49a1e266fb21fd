// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include "team.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

#include "gather.h"

namespace pinstage {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kDefaultThreads = 8;
constexpr int kMaxThreads = 64;
// After a job a worker spins for the next one this long, then it parks and costs nothing.
constexpr auto kSpin = std::chrono::microseconds(200);

// From here on several threads work. At 4 MB they take the median from 268 to 72 us and the mean from 271 to 96; at 1
// MB the median from 83 to 36 us, but the mean stays at 84, and at 256 KB the mean rises from 23 to 187 (H200 host, 16
// vCPU, beside torch's own 16 threads; benchmarks/results/overhead*.json). The likely cause, not profiled: a worker
// that loses its CPU in the middle of a chunk holds the caller up.
const std::size_t kShare = std::getenv("X_SHARE") ? std::atol(std::getenv("X_SHARE")) : 48 << 10;
const std::size_t kWake = std::getenv("X_WAKE") ? std::atol(std::getenv("X_WAKE")) : 1 << 20;
const std::size_t kBytesPerThread = std::getenv("X_BPT") ? std::atol(std::getenv("X_BPT")) : 24 << 10;
const std::size_t kMinChunk = std::getenv("X_MINC") ? std::atol(std::getenv("X_MINC")) : 8 << 10, kMaxChunk = 256 << 10;

void relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

std::atomic<Team*>& current_team() {
  static std::atomic<Team*> team{nullptr};
  return team;
}

std::size_t chunk_bytes(std::size_t nbytes, int threads) noexcept {
  // A few chunks a thread, so that one which loses its CPU does not hold up the others; whole pages.
  const std::size_t even = nbytes / (static_cast<std::size_t>(threads) * 4);
  return (std::clamp(even, kMinChunk, kMaxChunk) + 4095) & ~std::size_t{4095};
}

int threads_for(std::size_t nbytes, int limit) noexcept {
  return static_cast<int>(std::min<std::size_t>(static_cast<std::size_t>(limit), nbytes / kBytesPerThread + 1));
}

int default_threads() {
  const int cpus = usable_cpus();
  const char* text = std::getenv("PINSTAGE_THREADS");
  if (text == nullptr || *text == '\0') return std::min(cpus, kDefaultThreads);
  char* end = nullptr;
  const long wanted = std::strtol(text, &end, 10);
  if (*end != '\0' || wanted < 1) {
    throw std::invalid_argument("PINSTAGE_THREADS must be a number of threads >= 1, not \"" + std::string(text) + "\"");
  }
  return static_cast<int>(std::min<long>(wanted, cpus));
}

}  // namespace

int usable_cpus() noexcept {
  int cpus = static_cast<int>(std::thread::hardware_concurrency());
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) cpus = CPU_COUNT(&set);
  if (std::FILE* file = std::fopen("/sys/fs/cgroup/cpu.max", "r")) {
    long quota = 0, period = 0;  // "max 100000": no quota
    if (std::fscanf(file, "%ld %ld", &quota, &period) == 2 && quota > 0 && period > 0) {
      cpus = std::min(cpus, static_cast<int>((quota + period - 1) / period));
    }
    std::fclose(file);
  }
  return std::clamp(cpus, 1, kMaxThreads);
}

Team& Team::instance() {
  Team* team = current_team().load(std::memory_order_acquire);
  if (team != nullptr) return *team;
  // In a forked child the parent's workers do not exist: it forgets the team and makes another.
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { current_team().store(nullptr, std::memory_order_relaxed); });
  (void)registered;
  Team* const made = new Team();
  if (current_team().compare_exchange_strong(team, made, std::memory_order_acq_rel)) return *made;
  delete made;  // another thread was first
  return *team;
}

Team::Team() : threads_(default_threads()) {}

void Team::set_threads(int threads) {
  if (threads < 0) throw std::invalid_argument("a number of threads cannot be negative: " + std::to_string(threads));
  threads_.store(threads == 0 ? default_threads() : std::min(threads, usable_cpus()), std::memory_order_relaxed);
}

// With job_mutex_. Fewer workers than wanted are no error: the caller works too.
void Team::start(int workers) noexcept {
  try {
    for (; workers_ < workers; ++workers_) std::thread(&Team::work_for_ever, this).detach();
  } catch (...) {
    return;
  }
}

void Team::run(std::int64_t chunks, int threads, bool worth_waking, Chunk chunk, void* work) {
  std::unique_lock<std::mutex> job(job_mutex_, std::defer_lock);
  const int helpers = static_cast<int>(std::min<std::int64_t>(threads, chunks)) - 1;
  bool alone = helpers < 1 || !job.try_lock();
  if (!alone && !worth_waking) {
    const auto now = Clock::now();
    alone = now - last_job_ > kSpin;
    last_job_ = now;
  }
  if (alone) {
    for (std::int64_t i = 0; i < chunks; ++i) chunk(work, i);
    return;
  }
  start(helpers);
  chunk_ = chunk;
  work_ = work;
  chunks_ = chunks;
  next_.store(0, std::memory_order_relaxed);
  places_.store(helpers, std::memory_order_relaxed);
  open_.store(true);
  posted_.fetch_add(1);
  if (parked_.load() > 0) wake_one();
  for (std::int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < chunks;) chunk(work, i);
  open_.store(false);
  for (int spins = 0; active_.load() != 0; ++spins) {
    if (spins < 1000) {
      relax();
    } else {
      std::this_thread::yield();  // a worker lost its CPU in the middle of a chunk
    }
  }
}

// The woken wake the next: the caller pays for one.
void Team::wake_one() {
  const std::lock_guard<std::mutex> lock(park_mutex_);
  unpark_.notify_one();
}

void Team::work_for_ever() {
  std::uint64_t seen = 0;
  for (;;) {
    seen = await(seen);
    // Entering before looking: the caller closes before it looks at who is inside. One of the two sees the other.
    active_.fetch_add(1);
    if (open_.load() && places_.fetch_sub(1, std::memory_order_relaxed) > 0) {
      for (std::int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < chunks_;) chunk_(work_, i);
    }
    active_.fetch_sub(1);
  }
}

// The number of the first job posted after `seen`.
std::uint64_t Team::await(std::uint64_t seen) {
  std::uint64_t posted;
  const auto spin_until = Clock::now() + kSpin;
  for (unsigned spins = 0; (posted = posted_.load()) == seen; ++spins) {
    relax();
    if (spins % 64 == 63 && Clock::now() > spin_until) {
      std::unique_lock<std::mutex> lock(park_mutex_);
      parked_.fetch_add(1);
      unpark_.wait(lock, [&] { return (posted = posted_.load()) != seen; });
      if (parked_.fetch_sub(1) > 1 && places_.load(std::memory_order_relaxed) > 0) unpark_.notify_one();
      break;
    }
  }
  return posted;
}

namespace {

struct CopyJob {
  char* dst;
  const char* src;
  std::size_t nbytes, chunk;

  static void run(void* self, std::int64_t index) noexcept {
    const auto& job = *static_cast<const CopyJob*>(self);
    const std::size_t begin = static_cast<std::size_t>(index) * job.chunk;
    copy_bytes(job.dst + begin, job.src + begin, std::min(job.chunk, job.nbytes - begin));
  }
};

struct GatherJob {
  const Gather* gather;
  GatherRange range;
  std::int64_t rows, parts;  // rows of a chunk, chunks of one outer index

  static void run(void* self, std::int64_t index) noexcept {
    const auto& job = *static_cast<const GatherJob*>(self);
    const std::int64_t begin = index % job.parts * job.rows;
    job.range(*job.gather, index / job.parts, begin, std::min(begin + job.rows, job.gather->count));
  }
};

}  // namespace

void copy_bytes_in_parallel(void* dst, const void* src, std::size_t nbytes) {
  if (nbytes < kShare) {
    copy_bytes(dst, src, nbytes);
    return;
  }
  Team& team = Team::instance();
  const int threads = threads_for(nbytes, team.threads());
  CopyJob job{static_cast<char*>(dst), static_cast<const char*>(src), nbytes, chunk_bytes(nbytes, threads)};
  if (threads == 1) job.chunk = nbytes;
  team.run(static_cast<std::int64_t>((nbytes + job.chunk - 1) / job.chunk), threads, nbytes >= kWake, &CopyJob::run,
           &job);
}

void gather_in_parallel(const Gather& g) {
  const std::int64_t nbytes = g.outer * g.count * g.row_bytes;
  if (nbytes < static_cast<std::int64_t>(kShare)) {
    gather(g);
    return;
  }
  Team& team = Team::instance();
  const auto bytes = static_cast<std::size_t>(nbytes);
  const int threads = threads_for(bytes, team.threads());
  GatherJob job{&g, gather_range_for(g), g.count, 1};
  if (threads > 1) {
    job.rows =
        std::clamp<std::int64_t>(static_cast<std::int64_t>(chunk_bytes(bytes, threads)) / g.row_bytes, 1, g.count);
    job.parts = (g.count + job.rows - 1) / job.rows;
  }
  team.run(g.outer * job.parts, threads, bytes >= kWake, &GatherJob::run, &job);
}

}  // namespace pinstage
