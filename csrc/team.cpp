// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include "team.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include "cpu.h"
#include "gather.h"
#include "strided.h"

namespace pinstage {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kDefaultThreads = 16;
constexpr int kMaxThreads = 64;  // as many as Team has places for
// After a job a worker spins for the next one this long, then it parks and costs nothing. The pieces of a bulk copy
// come as fast as the copy engine reads them, 150 us apart.
constexpr auto kSpin = std::chrono::microseconds(100), kSpinAfterLarge = std::chrono::microseconds(400);
constexpr std::size_t kLarge = 1 << 20;
// A job that begins within this time of the end of another makes a burst.
constexpr auto kBurst = std::chrono::microseconds(50);

// Callers within this time of one another are at work at once. Eight Python threads with 1 MB each send 24,000 a second
// where whoever comes first gets 16 threads (p99 2 ms: the workers take the CPUs of the other callers), and 45,000 each
// alone, which is the rate of the bus.
constexpr auto kTogether = std::chrono::nanoseconds(1'000'000);

// From here on several threads work. A burst of 64 KB copies costs 5.5 us each on one thread and 7.5 on three, of 128
// KB 13.3 and 9.5, of 256 KB 26 and 9 (H200 host, 16 vCPU, whole copy_ calls, DMA behind them; torch's OpenMP threads
// were given time to go to sleep: while they spin, as they do for milliseconds after each parallel operation, a worker
// that loses its CPU to one of them in the middle of a chunk holds the caller up, as it holds up torch itself).
constexpr std::size_t kShare = 96 << 10;
constexpr std::size_t kBytesPerThread = 24 << 10;  // 16 or 40 KB were slower at 256 KB
// From here on parked workers are woken for one job: after a pause, its bytes cold, one thread takes 205 us for 880 KB,
// a woken team 120 to 150, and the job after it finds them awake (25 to 37 us instead of 112). For 256 KB, 90 us alone,
// it gains nothing, and on a machine of 2 CPUs, one of which another thread's spinning takes, it costs twice the time.
// The caller wakes one for each so many bytes, and they wake the others: by a chain of wake-ups alone 15 workers took
// four times 80 us to come (4 MB: 255 us with one wake-up by the caller, 147 with 15).
constexpr std::size_t kWake = 384 << 10;
// From here on the parts of a copy are stored non-temporally: 256 KB 12.2 instead of 12.6 us, 1 MB 18 instead of 21,
// because the slot's lines are in other cores' caches (same runs).
constexpr std::size_t kStreamParts = 256 << 10;
constexpr std::size_t kMinChunk = 8 << 10, kMaxChunk = 256 << 10;

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

std::int64_t rows_of_chunk(std::size_t nbytes, int threads, std::int64_t row_bytes, std::int64_t rows) noexcept {
  return std::clamp<std::int64_t>(static_cast<std::int64_t>(chunk_bytes(nbytes, threads)) / row_bytes, 1, rows);
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

int Team::share() noexcept {
  static std::atomic<std::size_t> threads_seen{0};
  thread_local const std::size_t place = threads_seen.fetch_add(1, std::memory_order_relaxed) % called_.size();
  const std::int64_t now = std::chrono::nanoseconds(Clock::now().time_since_epoch()).count();
  called_[place].store(now, std::memory_order_relaxed);
  const auto callers = std::count_if(called_.begin(), called_.end(), [now](const std::atomic<std::int64_t>& called) {
    return now - called.load(std::memory_order_relaxed) < kTogether.count();
  });
  return std::max(threads() / std::max(static_cast<int>(callers), 1), 1);
}

// With job_mutex_. Fewer workers than wanted are no error: the others take their chunks.
void Team::start(int workers) noexcept {
  try {
    for (; workers_started_ < workers; ++workers_started_) {
      std::thread(&Team::work_for_ever, this, workers_started_).detach();
    }
  } catch (...) {
    return;
  }
}

bool Team::run(std::int64_t chunks, int threads, std::size_t nbytes, Chunk chunk, void* work_of_chunk) {
  const int parties = static_cast<int>(std::min<std::int64_t>(threads, chunks));
  std::unique_lock<std::mutex> job(job_mutex_, std::defer_lock);
  if (parties < 2 || !job.try_lock()) return false;
  const auto now = Clock::now();
  const bool burst = now <= burst_until_;
  // From when the job is done, be it by one thread on cold rows (4 GB/s).
  burst_until_ = now + kBurst + std::chrono::nanoseconds(nbytes / 4);
  if (nbytes < kWake && !burst) return false;
  start(parties - 1);
  spin_after_.store(nbytes >= kLarge ? kSpinAfterLarge : kSpin, std::memory_order_relaxed);
  open(parties, chunks, chunk, work_of_chunk);
  for (std::size_t woken = 0; woken < nbytes && wake_one(); woken += kWake) {
  }
  work(0, parties);
  close();
  return true;
}

void Team::open(int parties, std::int64_t chunks, Chunk chunk, void* work_of_chunk) noexcept {
  chunk_ = chunk;
  work_ = work_of_chunk;
  for (int party = 0; party < parties; ++party) {
    Range& range = ranges_[static_cast<std::size_t>(party)];
    range.next.store(chunks * party / parties, std::memory_order_relaxed);
    range.end = chunks * (party + 1) / parties;
  }
  wanted_.store(parties, std::memory_order_relaxed);
  open_.store(++jobs_ << kPartyBits | static_cast<unsigned>(parties));
}

void Team::close() noexcept {
  const int parties = parties_of(open_.load(std::memory_order_relaxed));
  open_.store(0);
  for (int worker = 0; worker < parties - 1; ++worker) {
    const std::atomic<bool>& inside = workers_[static_cast<std::size_t>(worker)].inside;
    for (int spins = 0; inside.load(); ++spins) {
      if (spins < 1000) {
        relax();
      } else {
        std::this_thread::yield();  // it lost its CPU in the middle of a chunk
      }
    }
  }
}

void Team::work(int party, int parties) noexcept {
  for (int turn = 0; turn < parties; ++turn) {
    Range& range = ranges_[static_cast<std::size_t>((party + turn) % parties)];
    // Looked at before it is touched: the others' ranges are mostly done when this one comes by.
    while (range.next.load(std::memory_order_relaxed) < range.end) {
      const std::int64_t index = range.next.fetch_add(1, std::memory_order_relaxed);
      if (index < range.end) chunk_(work_, index);
    }
  }
}

void Team::work_for_ever(int worker) {
  std::atomic<bool>& inside = workers_[static_cast<std::size_t>(worker)].inside;
  std::uint64_t job = 0;
  for (;;) {
    job = await(worker, job);
    // Entering before looking again: the caller closes before it looks who is inside. One of the two sees the other.
    inside.store(true);
    if (open_.load() == job) work(worker + 1, parties_of(job));
    inside.store(false, std::memory_order_release);
  }
}

// The next job after `seen` that has this worker as a party.
std::uint64_t Team::await(int worker, std::uint64_t seen) {
  const auto wanted = [&](std::uint64_t job) { return job != 0 && job != seen && worker + 1 < parties_of(job); };
  Worker& self = workers_[static_cast<std::size_t>(worker)];
  const std::uint64_t bit = std::uint64_t{1} << worker;
  for (;;) {
    const auto spin_until = Clock::now() + spin_after_.load(std::memory_order_relaxed);
    for (unsigned spins = 0; spins % 64 != 63 || Clock::now() < spin_until; ++spins) {
      const std::uint64_t job = open_.load(std::memory_order_acquire);
      if (wanted(job)) return job;
      relax();
    }
    std::unique_lock<std::mutex> lock(self.mutex);
    self.woken = false;
    parked_.fetch_or(bit);
    // A job opened before the bit was seen is found here; one opened later finds the bit.
    const std::uint64_t job = open_.load();
    if (wanted(job) && (parked_.fetch_and(~bit) & bit) != 0) return job;
    self.unpark.wait(lock, [&] { return self.woken; });
    lock.unlock();
    wake_one();
    wake_one();
  }
}

// Wakes the first party of the last job that is parked; false when none is.
bool Team::wake_one() {
  const std::uint64_t of_job = (std::uint64_t{1} << (wanted_.load(std::memory_order_relaxed) - 1)) - 1;
  for (std::uint64_t parked; (parked = parked_.load() & of_job) != 0;) {
    const std::uint64_t bit = parked & (~parked + 1);
    if ((parked_.fetch_and(~bit) & bit) == 0) continue;  // somebody else wakes it
    Worker& worker = workers_[static_cast<std::size_t>(__builtin_ctzll(bit))];
    const std::lock_guard<std::mutex> lock(worker.mutex);
    worker.woken = true;
    worker.unpark.notify_one();
    return true;
  }
  return false;
}

namespace {

void plain_bytes(char* dst, const char* src, std::size_t nbytes) noexcept { std::memcpy(dst, src, nbytes); }
void stream_bytes(char* dst, const char* src, std::size_t nbytes) noexcept {
  active_kernels().stream(dst, src, nbytes);
}

struct CopyJob {
  void (*copy)(char* dst, const char* src, std::size_t nbytes) noexcept;
  char* dst;
  const char* src;
  std::size_t nbytes, chunk;

  static void run(void* self, std::int64_t index) noexcept {
    const auto& job = *static_cast<const CopyJob*>(self);
    const std::size_t begin = static_cast<std::size_t>(index) * job.chunk;
    job.copy(job.dst + begin, job.src + begin, std::min(job.chunk, job.nbytes - begin));
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

struct SegmentsJob {
  char* dst;
  const Segment* segments;
  std::size_t count, begin, end, chunk;

  static void run(void* self, std::int64_t index) noexcept {
    const auto& job = *static_cast<const SegmentsJob*>(self);
    const std::size_t from = job.begin + static_cast<std::size_t>(index) * job.chunk;
    copy_segments(job.dst + (from - job.begin), job.segments, job.count, from, std::min(from + job.chunk, job.end));
  }
};

struct StridedJob {
  char* dst;
  const Strided* source;
  std::int64_t begin, end, rows;  // of the job, and of a chunk

  static void run(void* self, std::int64_t index) noexcept {
    const auto& job = *static_cast<const StridedJob*>(self);
    const std::int64_t at = index * job.rows;
    copy_strided(job.dst + at * job.source->row_bytes, *job.source, job.begin + at,
                 std::min(job.begin + at + job.rows, job.end));
  }
};

// `shared(team, threads)` on several threads, where that pays and succeeds, else `alone()`.
template <class Shared, class Alone>
void share(std::size_t nbytes, const Shared& shared, const Alone& alone) {
  if (nbytes < kShare) return alone();
  Team& team = Team::instance();
  if (!shared(team, threads_for(nbytes, team.share()))) alone();
}

}  // namespace

void copy_bytes_in_parallel(void* dst, const void* src, std::size_t nbytes, bool cached) {
  share(
      nbytes,
      [&](Team& team, int threads) {
        CopyJob job{nbytes >= kStreamParts && !cached ? &stream_bytes : &plain_bytes, static_cast<char*>(dst),
                    static_cast<const char*>(src), nbytes, chunk_bytes(nbytes, threads)};
        const auto chunks = static_cast<std::int64_t>((nbytes + job.chunk - 1) / job.chunk);
        return team.run(chunks, threads, nbytes, &CopyJob::run, &job);
      },
      [&] { copy_bytes(dst, src, nbytes); });
}

void gather_in_parallel(const Gather& g) {
  const auto nbytes = static_cast<std::size_t>(g.outer * g.count * g.row_bytes);
  share(
      nbytes,
      [&](Team& team, int threads) {
        GatherJob job{&g, gather_range_for(g, true), rows_of_chunk(nbytes, threads, g.row_bytes, g.count), 1};
        job.parts = (g.count + job.rows - 1) / job.rows;
        return team.run(g.outer * job.parts, threads, nbytes, &GatherJob::run, &job);
      },
      [&] { gather(g); });
}

void copy_segments_in_parallel(char* dst, const Segment* segments, std::size_t count, std::size_t begin,
                               std::size_t end) {
  share(
      end - begin,
      [&](Team& team, int threads) {
        SegmentsJob job{dst, segments, count, begin, end, chunk_bytes(end - begin, threads)};
        const auto chunks = static_cast<std::int64_t>((end - begin + job.chunk - 1) / job.chunk);
        return team.run(chunks, threads, end - begin, &SegmentsJob::run, &job);
      },
      [&] { copy_segments(dst, segments, count, begin, end); });
}

void copy_strided_in_parallel(char* dst, const Strided& source, std::int64_t begin, std::int64_t end) {
  const auto nbytes = static_cast<std::size_t>((end - begin) * source.row_bytes);
  if (source.ndim == 0) return copy_bytes_in_parallel(dst, source.src, nbytes);
  share(
      nbytes,
      [&](Team& team, int threads) {
        StridedJob job{dst, &source, begin, end, rows_of_chunk(nbytes, threads, source.row_bytes, end - begin)};
        const std::int64_t chunks = (end - begin + job.rows - 1) / job.rows;
        return team.run(chunks, threads, nbytes, &StridedJob::run, &job);
      },
      [&] { copy_strided(dst, source, begin, end); });
}

}  // namespace pinstage
