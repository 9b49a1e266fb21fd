// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// Every loop of every instruction set against the plain one, in memory that faults one byte past its ends.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "cpu.h"
#include "gather.h"
#include "gather_kernels.h"

namespace pinstage {
namespace {

using Rng = std::mt19937_64;

std::int64_t pick(Rng& rng, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(rng);
}

// Memory between two pages that no one may touch.
class FencedMemory {
 public:
  explicit FencedMemory(std::size_t nbytes) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    nbytes_ = (nbytes + page - 1) / page * page;
    mapped_ = nbytes_ + 2 * page;
    map_ = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(map_ != MAP_FAILED);
    begin_ = static_cast<char*>(map_) + page;
    CHECK_EQ(mprotect(begin_, nbytes_, PROT_READ | PROT_WRITE), 0);
  }
  ~FencedMemory() { munmap(map_, mapped_); }
  FencedMemory(const FencedMemory&) = delete;
  FencedMemory& operator=(const FencedMemory&) = delete;

  char* begin() { return begin_; }
  char* end() { return begin_ + nbytes_; }
  std::size_t nbytes() const { return nbytes_; }

 private:
  void* map_;
  char* begin_;
  std::size_t nbytes_, mapped_;
};

std::vector<const Kernels*> supported_kernels() {
  std::vector<const Kernels*> all = {&kPortableKernels};
#if defined(__x86_64__)
  for (const Kernels* table : {&kAvx2Kernels, &kAvx512Kernels}) {
    if (table->supported()) {
      all.push_back(table);
    } else {
      std::printf("  %s: not supported here, not tested\n", table->name);
    }
  }
#endif
  return all;
}

// Every regime that takes rows of `row_bytes`, whatever the thresholds say.
std::vector<Regime> regimes_of(std::int64_t row_bytes) {
  std::vector<Regime> regimes = {Regime::kLibc};
  constexpr std::int64_t kFixed[] = {1, 2, 4, 8, 16, 32, 64};
  for (int i = 0; i < 7; ++i) {
    if (row_bytes == kFixed[i]) regimes.push_back(static_cast<Regime>(i));
  }
  if (row_bytes < static_cast<std::int64_t>(kernels::kMinBlockRow)) {
    regimes.push_back(Regime::kShort);
    return regimes;
  }
  for (Regime any : {Regime::kWhole, Regime::kHeads, Regime::kStreamHeads}) regimes.push_back(any);
  if (row_bytes % static_cast<std::int64_t>(kernels::kLine) == 0) regimes.push_back(Regime::kStreamWhole);
  return regimes;
}

// Where an array lies: its end on the upper fence, or its start `offset` bytes above the lower one.
struct Place {
  bool at_end;
  std::int64_t offset;
  char* put(FencedMemory& memory, std::int64_t nbytes) const {
    CHECK(static_cast<std::size_t>(nbytes + offset) <= memory.nbytes());
    return at_end ? memory.end() - nbytes : memory.begin() + offset;
  }
};

struct Shape {
  std::int64_t row_bytes, rows, count, outer = 1;
  std::int64_t src_gap = 0, dst_gap = 0;
  bool src_backwards = false;
  std::int64_t index_stride = 1;
  Place src{true, 0}, dst{true, 0}, index{true, 0};
};

std::string describe(const Kernels& table, Regime regime, bool is_64, const Shape& s) {
  char text[400];
  std::snprintf(
      text, sizeof text,
      "%s regime %d index %s: row %lld rows %lld count %lld outer %lld gaps %lld/%lld%s index stride %lld, src "
      "%s+%lld dst %s+%lld index %s+%lld",
      table.name, static_cast<int>(regime), is_64 ? "int64" : "int32", static_cast<long long>(s.row_bytes),
      static_cast<long long>(s.rows), static_cast<long long>(s.count), static_cast<long long>(s.outer),
      static_cast<long long>(s.src_gap), static_cast<long long>(s.dst_gap), s.src_backwards ? " backwards" : "",
      static_cast<long long>(s.index_stride), s.src.at_end ? "end" : "begin", static_cast<long long>(s.src.offset),
      s.dst.at_end ? "end" : "begin", static_cast<long long>(s.dst.offset), s.index.at_end ? "end" : "begin",
      static_cast<long long>(s.index.offset));
  return text;
}

// Runs gathers in three pieces of fenced memory and compares each with the plain loop, gaps and surroundings included.
class Bench {
 public:
  explicit Bench(Rng& rng, std::size_t nbytes = 1 << 20) : rng_(rng), src_(nbytes), dst_(nbytes), index_(1 << 16) {
    for (std::size_t i = 0; i + 8 <= src_.nbytes(); i += 8) {
      const std::uint64_t word = rng_();
      std::memcpy(src_.begin() + i, &word, 8);
    }
  }

  void check(const Kernels& table, Regime regime, bool is_64, const Shape& shape) {
    const Gather g = lay_out(shape, is_64);
    fill(g);
    const GatherRange range = table.range[static_cast<int>(regime)][is_64 ? 1 : 0];
    for (std::int64_t o = 0; o < g.outer; ++o) range(g, o, 0, g.count);
    if (std::memcmp(window_, want_.data(), want_.size()) != 0) {
      throw std::runtime_error("other bytes than the plain loop: " + describe(table, regime, is_64, shape));
    }
  }

  void check_all(const Shape& shape) {
    for (const Kernels* table : tables_) {
      for (Regime regime : regimes_of(shape.row_bytes)) {
        Shape s = shape;
        if (regime == Regime::kStreamWhole) {  // wants rows on lines
          s.dst_gap = s.dst_gap / 64 * 64;
          s.dst.offset = 0;
        }
        check(*table, regime, false, s);
        check(*table, regime, true, s);
      }
    }
  }

 private:
  Gather lay_out(const Shape& s, bool is_64) {
    const std::int64_t src_stride = s.row_bytes + s.src_gap, dst_stride = s.row_bytes + s.dst_gap;
    const std::int64_t src_plane = (s.rows - 1) * src_stride + s.row_bytes;
    const std::int64_t dst_plane = (s.count - 1) * dst_stride + s.row_bytes;
    const std::int64_t src_outer = src_plane + s.src_gap, dst_outer = dst_plane + s.dst_gap;
    const std::int64_t width = is_64 ? 8 : 4;
    dst_nbytes_ = (s.outer - 1) * dst_outer + dst_plane;

    Gather g{};
    g.src = s.src.put(src_, (s.outer - 1) * src_outer + src_plane);
    g.src_rows = s.rows;
    g.src_row_stride = src_stride;
    g.src_outer_stride = src_outer;
    if (s.src_backwards) {
      g.src += (s.rows - 1) * src_stride;
      g.src_row_stride = -src_stride;
    }
    g.dst = s.dst.put(dst_, dst_nbytes_);
    g.dst_row_stride = dst_stride;
    g.dst_outer_stride = dst_outer;
    g.outer = s.outer;
    g.row_bytes = s.row_bytes;
    g.index_is_64 = is_64;
    g.index_stride = s.index_stride;
    g.count = s.count;
    char* index = s.index.put(index_, ((s.count - 1) * std::abs(s.index_stride) + 1) * width);
    if (s.index_stride < 0) index += (s.count - 1) * -s.index_stride * width;
    g.index = index;
    for (std::int64_t i = 0; i < s.count; ++i) {
      // The first and the last row are always among them: they lie on the fences.
      const std::int64_t row = i == 0 ? s.rows - 1 : i == s.count - 1 ? 0 : pick(rng_, 0, s.rows - 1);
      const auto row32 = static_cast<std::int32_t>(row);
      std::memcpy(index + i * s.index_stride * width, is_64 ? static_cast<const void*>(&row) : &row32,
                  static_cast<std::size_t>(width));
      chosen_.resize(static_cast<std::size_t>(s.count));
      chosen_[static_cast<std::size_t>(i)] = row;
    }
    return g;
  }

  // Fills dst and 64 bytes around it with a pattern, and computes what must be there afterwards.
  void fill(const Gather& g) {
    char* begin = std::max(dst_.begin(), g.dst - 64);
    char* end = std::min(dst_.end(), g.dst + dst_nbytes_ + 64);
    window_ = begin;
    want_.resize(static_cast<std::size_t>(end - begin));
    for (std::size_t i = 0; i < want_.size(); ++i) want_[i] = static_cast<char>(0xA5 + i % 11);
    std::memcpy(begin, want_.data(), want_.size());
    for (std::int64_t o = 0; o < g.outer; ++o) {
      for (std::int64_t i = 0; i < g.count; ++i) {
        const char* row = g.src + o * g.src_outer_stride + chosen_[static_cast<std::size_t>(i)] * g.src_row_stride;
        std::memcpy(want_.data() + (g.dst - begin) + o * g.dst_outer_stride + i * g.dst_row_stride, row,
                    static_cast<std::size_t>(g.row_bytes));
      }
    }
  }

  Rng& rng_;
  std::vector<const Kernels*> tables_ = supported_kernels();
  FencedMemory src_, dst_, index_;
  std::int64_t dst_nbytes_ = 0;
  char* window_ = nullptr;
  std::vector<char> want_;
  std::vector<std::int64_t> chosen_;
};

Place any_place(Rng& rng) { return pick(rng, 0, 1) == 0 ? Place{true, 0} : Place{false, pick(rng, 0, 63)}; }

Shape any_shape(Rng& rng, std::int64_t row_bytes) {
  Shape s{row_bytes, pick(rng, 1, 9), pick(rng, 1, row_bytes < 100 ? 80 : 12)};
  s.outer = pick(rng, 1, 3);
  s.src_gap = pick(rng, 0, 1) * pick(rng, 0, 130);
  s.dst_gap = pick(rng, 0, 1) * pick(rng, 0, 130);
  s.src_backwards = pick(rng, 0, 3) == 0;
  constexpr std::int64_t kIndexStrides[] = {1, 1, 1, 2, 3, -1};
  s.index_stride = kIndexStrides[pick(rng, 0, 5)];
  s.src = any_place(rng);
  s.dst = any_place(rng);
  s.index = any_place(rng);
  return s;
}

// Restores the instruction set that was in use.
class IsaGuard {
 public:
  IsaGuard() : name_(isa()) {}
  ~IsaGuard() { select_isa(name_); }

 private:
  const char* name_;
};

}  // namespace

TEST("every kernel copies rows of 0 to 600 bytes as the plain loop does") {
  Rng rng(check::printed_seed());
  Bench bench(rng);
  for (std::int64_t row_bytes = 0; row_bytes <= 600; ++row_bytes) {
    for (int repeat = 0; repeat < 3; ++repeat) bench.check_all(any_shape(rng, row_bytes));
  }
}

TEST("every kernel copies rows of each size up to 4200 bytes as the plain loop does") {
  Rng rng(check::printed_seed());
  Bench bench(rng);
  for (std::int64_t row_bytes = 601; row_bytes <= 4200; ++row_bytes) {
    Shape s{row_bytes, pick(rng, 1, 4), pick(rng, 1, 4)};
    s.src = any_place(rng);
    s.dst = any_place(rng);
    bench.check_all(s);
  }
}

TEST("every kernel copies long rows in any layout as the plain loop does") {
  Rng rng(check::printed_seed());
  Bench bench(rng, 4 << 20);
  std::vector<std::int64_t> sizes = {1024, 2047, 2048, 2049, 2112,  2304,  4095,  4096,
                                     4097, 4200, 8192, 9000, 16384, 16385, 20000, 40000};
  for (int i = 0; i < 60; ++i) sizes.push_back(pick(rng, 601, 4200));
  for (std::int64_t row_bytes : sizes) {
    for (int repeat = 0; repeat < 3; ++repeat) bench.check_all(any_shape(rng, row_bytes));
  }
}

TEST("case 29: rows of odd sizes at odd addresses are copied exactly, and nothing past them is touched") {
  Rng rng(check::printed_seed());
  Bench bench(rng);
  for (std::int64_t row_bytes : {1, 3, 92, 100, 576, 584, 2500}) {
    for (std::int64_t offset = 0; offset < 64; ++offset) {
      Shape s{row_bytes, 5, 7};
      s.src = Place{false, offset};
      s.dst = Place{false, pick(rng, 0, 63)};
      s.index = Place{false, offset % 8};
      bench.check_all(s);
      std::swap(s.src, s.dst);
      bench.check_all(s);
    }
    Shape on_the_fence{row_bytes, 5, 7};
    bench.check_all(on_the_fence);
    on_the_fence.src_backwards = true;
    bench.check_all(on_the_fence);
  }
}

TEST("case 30: row offsets beyond 2^31 and 2^32 bytes find their rows, by int32 and int64 indices") {
  constexpr std::int64_t kStride = std::int64_t{3} << 29;  // row 2 lies past 2^31, row 3 past 2^32
  constexpr std::int64_t kRows = 4, kOuter = 2, kRow = 200;
  constexpr std::int64_t kPlane = kRows * kStride;
  const auto nbytes = static_cast<std::size_t>(kPlane * kOuter);
  void* sparse = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (sparse == MAP_FAILED) {
    std::printf("  skipped: this machine does not map 12 GiB of unused memory\n");
    return;
  }
  const std::unique_ptr<void, void (*)(void*)> unmap(
      sparse, [](void* p) { munmap(p, static_cast<std::size_t>(kPlane * kOuter)); });
  char* table = static_cast<char*>(sparse);
  for (std::int64_t i = 0; i < kRows * kOuter; ++i) std::memset(table + i * kStride, static_cast<int>(i + 1), kRow);

  const std::int64_t index64[] = {3, 0, 2, 1};
  const std::int32_t index32[] = {3, 0, 2, 1};
  for (const Kernels* kernels : supported_kernels()) {
    for (Regime regime : {Regime::kWhole, Regime::kHeads, Regime::kLibc}) {
      for (bool is_64 : {false, true}) {
        for (bool backwards : {false, true}) {
          std::vector<char> out(static_cast<std::size_t>(kOuter * 4 * kRow));
          const char* row0 = backwards ? table + (kRows - 1) * kStride : table;
          const void* index = is_64 ? static_cast<const void*>(index64) : index32;
          const Gather g{
              row0,  kRows, backwards ? -kStride : kStride, kPlane, out.data(), kRow, 4 * kRow, kOuter, kRow, index, 1,
              is_64, 4};
          for (std::int64_t o = 0; o < kOuter; ++o) kernels->range[static_cast<int>(regime)][is_64](g, o, 0, 4);
          for (std::int64_t i = 0; i < kOuter * 4; ++i) {
            const std::int64_t row = index64[i % 4];
            const std::int64_t want = i / 4 * kRows + (backwards ? kRows - 1 - row : row) + 1;
            CHECK_EQ(static_cast<std::int64_t>(out[static_cast<std::size_t>(i * kRow)]), want);
            CHECK_EQ(static_cast<std::int64_t>(out[static_cast<std::size_t>((i + 1) * kRow - 1)]), want);
          }
        }
      }
    }
  }
}

namespace {

// Puts `bad` at each position of arrays of up to 70 indices that end on the fence, and of misaligned ones.
template <class Index>
void check_bad_index(std::int64_t rows, const std::vector<Index>& bad_values) {
  FencedMemory memory(4096);
  for (std::int64_t stride : {1, 2, -1}) {
    for (std::int64_t count = 1; count <= 70; ++count) {
      const auto width = static_cast<std::int64_t>(sizeof(Index));
      const std::int64_t nbytes = ((count - 1) * std::abs(stride) + 1) * width;
      for (std::int64_t offset : {std::int64_t{-1}, std::int64_t{0}, std::int64_t{3}}) {
        char* low = offset < 0 ? memory.end() - nbytes : memory.begin() + offset;
        char* index = stride > 0 ? low : low + (count - 1) * width;
        std::memset(memory.begin(), 0xFF, memory.nbytes());  // what lies between strided indices is out of range
        const auto set = [&](std::int64_t i, Index value) {
          std::memcpy(index + i * stride * width, &value, sizeof value);
        };
        const auto first_bad = [&] { return first_bad_index(index, width == 8, stride, count, rows); };
        for (std::int64_t i = 0; i < count; ++i) set(i, static_cast<Index>(i % 2 == 0 ? 0 : rows - 1));
        CHECK_EQ(first_bad(), -1);
        for (std::int64_t i = 0; i < count; ++i) {
          for (Index bad : bad_values) {
            set(i, bad);
            CHECK_EQ(first_bad(), i);
            set(count - 1, bad);  // a second one behind it changes nothing
            CHECK_EQ(first_bad(), i);
            set(count - 1, 0);
            set(i, 0);
          }
        }
      }
    }
  }
}

}  // namespace

TEST("case 31: the first index out of range is found at every position, whatever its value") {
  using Limits32 = std::numeric_limits<std::int32_t>;
  using Limits64 = std::numeric_limits<std::int64_t>;
  const IsaGuard guard;
  for (const Kernels* table : supported_kernels()) {
    select_isa(table->name);
    check_bad_index<std::int32_t>(5, {-1, 5, 6, Limits32::min(), Limits32::max()});
    check_bad_index<std::int64_t>(5, {-1, 5, 6, Limits64::min(), Limits64::max(), std::int64_t{1} << 32,
                                      (std::int64_t{1} << 32) + 1, Limits32::min(), (std::int64_t{1} << 63) + 1});
    check_bad_index<std::int64_t>(std::int64_t{1} << 40, {-1, std::int64_t{1} << 40, Limits64::min(), Limits64::max()});
  }
}

TEST("case 31: with no rows every index is out of range, with more than 2^31 every non-negative int32 is inside") {
  const IsaGuard guard;
  const std::int32_t zero = 0, largest = std::numeric_limits<std::int32_t>::max(), negative = -1;
  const std::int64_t zero64 = 0, largest64 = std::numeric_limits<std::int64_t>::max();
  for (const Kernels* table : supported_kernels()) {
    select_isa(table->name);
    CHECK_EQ(first_bad_index(&zero, false, 1, 1, 0), 0);
    CHECK_EQ(first_bad_index(&zero64, true, 1, 1, 0), 0);
    CHECK_EQ(first_bad_index(nullptr, true, 1, 0, 0), -1);
    for (std::int64_t rows : {std::int64_t{1} << 31, (std::int64_t{1} << 32) + 7, largest64}) {
      CHECK_EQ(first_bad_index(&largest, false, 1, 1, rows), -1);
      CHECK_EQ(first_bad_index(&negative, false, 1, 1, rows), 0);
    }
    CHECK_EQ(first_bad_index(&largest64, true, 1, 1, largest64), 0);
  }
}

TEST("case 31: an index that changes after the check gives rows of the table, never bytes outside it") {
  constexpr std::int64_t kRows = 6, kRow = 640;
  FencedMemory memory(kRows * kRow);
  char* table = memory.end() - kRows * kRow;  // a row past the last one faults, as the page before the first does
  for (std::int64_t row = 0; row < kRows; ++row) std::memset(table + row * kRow, static_cast<int>(row + 1), kRow);
  const std::int64_t index64[] = {
      2, -1, kRows, std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max(), 3};
  const std::int32_t index32[] = {
      2, -1, kRows, std::numeric_limits<std::int32_t>::min(), std::numeric_limits<std::int32_t>::max(), 3};
  for (const Kernels* kernels : supported_kernels()) {
    for (std::int64_t row_bytes : {1, 2, 4, 8, 16, 32, 48, 64, 100, 640}) {
      for (Regime regime : regimes_of(row_bytes)) {
        for (bool is_64 : {false, true}) {
          alignas(64) char out[6 * 640];
          const void* index = is_64 ? static_cast<const void*>(index64) : index32;
          const Gather g{table, kRows, kRow, 0, out, row_bytes, 0, 1, row_bytes, index, 1, is_64, 6};
          kernels->range[static_cast<int>(regime)][is_64 ? 1 : 0](g, 0, 0, 6);
          for (std::int64_t i = 0; i < 6; ++i) {
            const int want = i == 0 ? 3 : i == 5 ? 4 : static_cast<int>(kRows);
            CHECK_EQ(static_cast<int>(out[i * row_bytes]), want);
            CHECK_EQ(static_cast<int>(out[(i + 1) * row_bytes - 1]), want);
          }
        }
      }
    }
  }
}

TEST("gather takes each regime by itself, past the size of non-temporal stores too") {
  Rng rng(check::printed_seed());
  const IsaGuard guard;
  constexpr std::int64_t kNbytes = 9 << 20;
  FencedMemory src(1 << 20), dst(kNbytes + 64);
  for (std::size_t i = 0; i < src.nbytes(); ++i) src.begin()[i] = static_cast<char>(rng());
  std::vector<std::int64_t> index;
  for (const Kernels* table : supported_kernels()) {
    select_isa(table->name);
    for (std::int64_t row_bytes : {4, 48, 64, 100, 256, 1024, 2304, 2500, 8192, 9001, 65536}) {
      for (std::int64_t output : {std::int64_t{128} << 10, kNbytes}) {
        const std::int64_t rows = (1 << 20) / row_bytes, count = output / row_bytes;
        index.resize(static_cast<std::size_t>(count));
        for (std::int64_t& row : index) row = pick(rng, 0, rows - 1);
        for (char* out : {dst.begin(), dst.end() - count * row_bytes}) {
          std::memset(out, 0, static_cast<std::size_t>(count * row_bytes));
          gather({src.begin(), rows, row_bytes, 0, out, row_bytes, 0, 1, row_bytes, index.data(), 1, true, count});
          for (std::int64_t i = 0; i < count; ++i) {
            const char* want = src.begin() + index[static_cast<std::size_t>(i)] * row_bytes;
            CHECK(std::memcmp(out + i * row_bytes, want, static_cast<std::size_t>(row_bytes)) == 0);
          }
        }
      }
    }
  }
}

TEST("only large outputs are streamed, and rows off the lines only when they are long") {
  alignas(64) static char dst[64];
  const auto regime = [&](std::int64_t row_bytes, std::int64_t output, std::int64_t offset) {
    Gather g{};
    g.dst = dst + offset;
    g.dst_row_stride = g.row_bytes = row_bytes;
    g.outer = 1;
    g.count = output / row_bytes;
    return choose_regime(g, Isa::kAvx512, false);
  };
  constexpr std::int64_t kSmall = 1 << 20, kLarge = 64 << 20;
  CHECK_EQ(regime(64, kSmall, 0), Regime::kRow64);
  CHECK_EQ(regime(256, kSmall, 0), Regime::kHeads);
  CHECK_EQ(regime(4096, kSmall, 0), Regime::kHeads);
  CHECK_EQ(regime(32, kLarge, 0), Regime::kRow32);
  CHECK_EQ(regime(256, kLarge, 0), Regime::kHeads);
  CHECK_EQ(regime(256, kLarge, 32), Regime::kHeads);
  CHECK_EQ(regime(4096, kLarge, 0), Regime::kStreamHeads);
  CHECK_EQ(regime(4096, kLarge, 8), Regime::kHeads);
  CHECK_EQ(regime(65536, kLarge, 8), Regime::kStreamHeads);
}

TEST("parts of the rows that threads copy by themselves make the whole") {
  Rng rng(check::printed_seed());
  constexpr std::int64_t kRows = 50, kCount = 301, kOuter = 3;
  for (std::int64_t row_bytes : {8, 100, 576, 2304}) {
    std::vector<char> src(static_cast<std::size_t>(kRows * kOuter * row_bytes));
    for (char& c : src) c = static_cast<char>(rng());
    std::vector<std::int32_t> index(kCount);
    for (std::int32_t& row : index) row = static_cast<std::int32_t>(pick(rng, 0, kRows - 1));
    std::vector<char> whole(static_cast<std::size_t>(kCount * kOuter * row_bytes)), parts(whole.size());
    Gather g{src.data(),
             kRows,
             row_bytes,
             kRows * row_bytes,
             whole.data(),
             row_bytes,
             kCount * row_bytes,
             kOuter,
             row_bytes,
             index.data(),
             1,
             false,
             kCount};
    gather(g);
    g.dst = parts.data();
    const GatherRange range = gather_range_for(g);
    check::run_together(4, [&](int thread) {
      for (std::int64_t o = 0; o < kOuter; ++o) {
        for (std::int64_t begin = thread * 7; begin < kCount; begin += 4 * 7) {
          range(g, o, begin, std::min(begin + 7, kCount));
        }
      }
    });
    CHECK(whole == parts);
  }
}

TEST("copy_bytes copies blocks of any size and alignment exactly") {
  Rng rng(check::printed_seed());
  const IsaGuard guard;
  FencedMemory src(5 << 20), dst(5 << 20);
  for (std::size_t i = 0; i < src.nbytes(); ++i) src.begin()[i] = static_cast<char>(rng());
  for (const Kernels* table : supported_kernels()) {
    select_isa(table->name);
    for (std::int64_t nbytes : {0, 1, 63, 4096, 262145, (4 << 20) - 1, 4 << 20, (4 << 20) + 1, (4 << 20) + 200}) {
      for (int repeat = 0; repeat < 8; ++repeat) {
        const char* from = any_place(rng).put(src, nbytes);
        char* to = any_place(rng).put(dst, nbytes);
        std::memset(dst.begin(), 0x5A, dst.nbytes());
        copy_bytes(to, from, static_cast<std::size_t>(nbytes));
        CHECK(std::memcmp(to, from, static_cast<std::size_t>(nbytes)) == 0);
        CHECK(to == dst.begin() || to[-1] == 0x5A);
        CHECK(to + nbytes == dst.end() || to[nbytes] == 0x5A);
      }
    }
    for (std::size_t nbytes :
         {std::size_t{0}, std::size_t{100}, std::size_t{2047}, std::size_t{2048}, std::size_t{5001}}) {
      char* to = dst.end() - nbytes;
      table->stream(to, src.end() - nbytes, nbytes);
      CHECK(std::memcmp(to, src.end() - nbytes, nbytes) == 0);
    }
  }
}

TEST("segments of any size and place are copied exactly where they go, and nothing past them is touched") {
  Rng rng(check::printed_seed());
  FencedMemory src(1 << 16), dst(1 << 18);
  for (std::size_t i = 0; i < src.nbytes(); ++i) src.begin()[i] = static_cast<char>(rng());
  for (std::size_t count :
       {std::size_t{0}, std::size_t{1}, std::size_t{7}, std::size_t{8}, std::size_t{9}, std::size_t{200}}) {
    std::vector<Segment> segments;
    std::vector<char> want;
    want.reserve(1);  // memcmp wants an address even for nothing
    for (std::size_t i = 0; i < count; ++i) {
      const std::int64_t nbytes = pick(rng, 0, 1000);
      const char* data = any_place(rng).put(src, nbytes);
      segments.push_back({data, static_cast<std::size_t>(nbytes), want.size()});
      want.insert(want.end(), data, data + nbytes);
    }
    std::memset(dst.begin(), 0x5A, dst.nbytes());
    copy_segments(dst.begin() + 1, segments.data(), count, 0, want.size());
    CHECK(std::memcmp(dst.begin() + 1, want.data(), want.size()) == 0);
    CHECK_EQ(static_cast<int>(dst.begin()[0]), 0x5A);
    CHECK_EQ(static_cast<int>(dst.begin()[1 + want.size()]), 0x5A);
    for (int repeat = 0; repeat < 20; ++repeat) {
      const auto begin = static_cast<std::size_t>(pick(rng, 0, static_cast<std::int64_t>(want.size())));
      const auto nbytes = static_cast<std::size_t>(pick(rng, 0, static_cast<std::int64_t>(want.size() - begin)));
      std::memset(dst.begin(), 0x5A, dst.nbytes());
      copy_segments(dst.end() - nbytes, segments.data(), count, begin, begin + nbytes);
      CHECK(std::memcmp(dst.end() - nbytes, want.data() + begin, nbytes) == 0);
      CHECK_EQ(static_cast<int>(dst.end()[-1 - static_cast<std::ptrdiff_t>(nbytes)]), 0x5A);
    }
  }
}

TEST("the instruction set can be forced and named, and a name that cannot be had is an error that lists the others") {
  const IsaGuard guard;
  for (const Kernels* table : supported_kernels()) {
    select_isa(table->name);
    CHECK_EQ(std::string(isa()), table->name);
  }
  CHECK_EQ(supported_isas().size(), supported_kernels().size());
  CHECK_EQ(std::string(supported_isas().front()), std::string(supported_kernels().back()->name));
  select_isa("portable");
  for (const char* wrong : {"avx1024", "AVX2", " portable"}) {
    try {
      select_isa(wrong);
      CHECK(false);
    } catch (const std::invalid_argument& error) {
      CHECK(std::string(error.what()).find(wrong) != std::string::npos);
      CHECK(std::string(error.what()).find("portable") != std::string::npos);
    }
  }
  CHECK_EQ(std::string(isa()), std::string("portable"));  // as it was
  select_isa(nullptr);
  CHECK_EQ(std::string(isa()), std::string(supported_kernels().back()->name));
}

}  // namespace pinstage
