// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "allocations.h"
#include "check.h"
#include "offsets.h"

namespace {

using namespace pinstage::check;
using pinstage::Offsets;

constexpr std::uint64_t kGranule = Offsets::kGranule;
constexpr std::uint64_t kKiB = 1024, kMiB = 1024 * kKiB;
constexpr std::uint64_t kMaxCapacity = std::uint64_t{1} << 46;

// ---------------------------------------------------------------------------------------------------------------------
// Exact offsets. The range is drawn with one character a granule: the name of the block that holds it, '.' where free.

struct Step {
  const char* change;  // "+A3" A takes 3 granules, "-A" A is given back, "?3" a take of 3 granules is refused
  const char* range;   // afterwards
};

class DrawnRange {
 public:
  explicit DrawnRange(std::size_t granules) : offsets_(granules * kGranule), drawing_(granules, '.') {}

  void apply(const std::string& change) {
    switch (change[0]) {
      case '+':
        return take(change[1], std::stoull(change.substr(2)));
      case '-':
        return give(change[1]);
      case '?':
        CHECK_EQ(offsets_.take(std::stoull(change.substr(1)) * kGranule).offset, Offsets::kNone);
        return;
      default:
        throw std::invalid_argument("no such change: " + change);
    }
  }

  const std::string& drawing() const { return drawing_; }

  void check_against_drawing() const {
    const auto free = std::count(drawing_.begin(), drawing_.end(), '.');
    CHECK_EQ(offsets_.free_bytes(), static_cast<std::uint64_t>(free) * kGranule);
    CHECK_EQ(offsets_.largest_free(), longest_gap() * kGranule);
    CHECK_EQ(offsets_.empty(), static_cast<std::size_t>(free) == drawing_.size());
    CHECK(offsets_.consistent());
  }

 private:
  void take(char name, std::uint64_t granules) {
    const Offsets::Taken taken = offsets_.take(granules * kGranule);
    CHECK(taken.offset != Offsets::kNone);
    CHECK_EQ(taken.offset % kGranule, 0);
    CHECK(taken.offset / kGranule + granules <= drawing_.size());
    const auto first = drawing_.begin() + static_cast<std::ptrdiff_t>(taken.offset / kGranule);
    const auto last = first + static_cast<std::ptrdiff_t>(granules);
    CHECK(std::all_of(first, last, [](char c) { return c == '.'; }));
    std::fill(first, last, name);
    blocks_[name] = taken.block;
  }

  void give(char name) {
    offsets_.give(blocks_.at(name));
    std::replace(drawing_.begin(), drawing_.end(), name, '.');
  }

  std::uint64_t longest_gap() const {
    std::uint64_t longest = 0, gap = 0;
    for (const char c : drawing_) longest = std::max(longest, gap = c == '.' ? gap + 1 : 0);
    return longest;
  }

  Offsets offsets_;
  std::string drawing_;
  std::map<char, Offsets::Block> blocks_;
};

void replay(const std::vector<Step>& steps) {
  DrawnRange range(std::string(steps.front().range).size());
  for (const Step& step : steps) {
    range.apply(step.change);
    // The change is part of what is compared, so that a failure tells its step.
    CHECK_EQ(step.change + (" " + range.drawing()), step.change + (" " + std::string(step.range)));
    range.check_against_drawing();
  }
}

TEST("blocks are cut from the low end, to the granule") {
  replay({
      {"+A3", "AAA....."},
      {"+B1", "AAAB...."},
      {"?5", "AAAB...."},
      {"+C4", "AAABCCCC"},
      {"?1", "AAABCCCC"},
  });
}

TEST("a block given back coalesces with both neighbours at once") {
  replay({
      {"+A2", "AA......"},
      {"+B2", "AABB...."},
      {"+C2", "AABBCC.."},
      {"+D2", "AABBCCDD"},
      {"-A", "..BBCCDD"},  // no neighbour is free
      {"-C", "..BB..DD"},
      {"?3", "..BB..DD"},  // 4 are free, but apart
      {"-B", "......DD"},  // both are
      {"+E6", "EEEEEEDD"},
      {"-D", "EEEEEE.."},
      {"-E", "........"},  // the one above is
      {"+F8", "FFFFFFFF"},
      {"-F", "........"},
      {"+G3", "GGG....."},
      {"+H5", "GGGHHHHH"},
      {"-G", "...HHHHH"},
      {"-H", "........"},  // the one below is
      {"+I8", "IIIIIIII"},
  });
}

TEST("a size that recurs gets the same bytes again") {
  replay({
      {"+A3", "AAA........."},
      {"+B3", "AAABBB......"},
      {"-A", "...BBB......"},
      {"+C3", "CCCBBB......"},
      {"-B", "CCC........."},
      {"+D3", "CCCDDD......"},
  });
}

TEST("of equal holes the one given back last is taken first") {
  replay({
      {"+A2", "AA......"},
      {"+B1", "AAB....."},
      {"+C2", "AABCC..."},
      {"+D1", "AABCCD.."},
      {"+E2", "AABCCDEE"},
      {"-A", "..BCCDEE"},
      {"-E", "..BCCD.."},
      {"-C", "..B..D.."},
      {"+F2", "..BFFD.."},
      {"+G2", "..BFFDGG"},
      {"+H2", "HHBFFDGG"},
  });
}

TEST("the tightest hole is filled and larger ones stay whole") {
  replay({
      {"+A4", "AAAA........"},
      {"+B1", "AAAAB......."},
      {"+C2", "AAAABCC....."},
      {"+D1", "AAAABCCD...."},
      {"+E3", "AAAABCCDEEE."},
      {"+F1", "AAAABCCDEEEF"},
      {"-C", "AAAAB..DEEEF"},
      {"-E", "AAAAB..D...F"},
      {"-A", "....B..D...F"},
      {"+G2", "....BGGD...F"},
      {"+H3", "....BGGDHHHF"},
      {"+I1", "I...BGGDHHHF"},
      {"+J3", "IJJJBGGDHHHF"},
  });
}

// ---------------------------------------------------------------------------------------------------------------------
// Classes. From 64 granules on a class holds several sizes: 64 and 65 are the first two to share one.

TEST("a fitting block is found behind one of its class that is too small") {
  Offsets offsets(131 * kGranule);
  //  | A 65 | B 1 | C 64 | D 1 |
  const Offsets::Taken a = offsets.take(65 * kGranule);
  CHECK_EQ(offsets.take(kGranule).offset, 65 * kGranule);
  const Offsets::Taken c = offsets.take(64 * kGranule);
  CHECK_EQ(c.offset, 66 * kGranule);
  CHECK_EQ(offsets.take(kGranule).offset, 130 * kGranule);
  //  |  65  | B 1 |  64  | D 1 |     the newest of the class is the 64
  offsets.give(a.block);
  offsets.give(c.block);
  CHECK_EQ(offsets.largest_free(), 65 * kGranule);
  //  | E 65 | B 1 |  64  | D 1 |
  CHECK_EQ(offsets.take(65 * kGranule).offset, 0);
  //  | E 65 | B 1 | F 64 | D 1 |
  CHECK_EQ(offsets.take(65 * kGranule).offset, Offsets::kNone);
  CHECK_EQ(offsets.take(64 * kGranule).offset, 66 * kGranule);
  CHECK_EQ(offsets.free_bytes(), 0);
  CHECK(offsets.consistent());
}

TEST("a free range of any size can be taken whole, and not one byte more") {
  std::vector<std::uint64_t> sizes;
  for (std::uint64_t granules = 1; granules <= 2100; ++granules) sizes.push_back(granules * kGranule);
  for (unsigned log2 = 20; log2 < 46; ++log2) {
    const std::uint64_t power = std::uint64_t{1} << log2;
    for (const std::uint64_t size : {power - kGranule, power, power + kGranule, power + power / 2}) {
      sizes.push_back(size);
    }
  }
  sizes.push_back(kMaxCapacity);
  for (const std::uint64_t size : sizes) {
    Offsets offsets(size);
    CHECK_EQ(offsets.capacity(), size);
    CHECK_EQ(offsets.largest_free(), size);
    CHECK_EQ(offsets.take(size + 1).offset, Offsets::kNone);
    const Offsets::Taken whole = offsets.take(size);
    CHECK_EQ(whole.offset, 0);
    CHECK_EQ(offsets.largest_free(), 0);
    CHECK_EQ(offsets.take(1).offset, Offsets::kNone);
    offsets.give(whole.block);
    CHECK(offsets.empty());
    CHECK_EQ(offsets.take(size - 1).offset, 0);
  }
}

TEST("a take beyond the capacity is refused and changes nothing") {
  Offsets offsets(kMiB);
  const Offsets::Taken a = offsets.take(kKiB);
  for (const std::uint64_t nbytes :
       {kMiB - kKiB + 1, kMiB, kMiB + 1, kMaxCapacity + 1, Offsets::kNone - 255, Offsets::kNone - 1, Offsets::kNone}) {
    CHECK_EQ(offsets.take(nbytes).offset, Offsets::kNone);
    CHECK_EQ(offsets.free_bytes(), kMiB - kKiB);
    CHECK(offsets.consistent());
  }
  offsets.give(a.block);
  CHECK_EQ(offsets.take(kMiB).offset, 0);
}

TEST("offsets beyond 2^32 granules are exact") {
  //  | A 2^45 + 256 | B 1 | rest |
  Offsets offsets(kMaxCapacity);
  const std::uint64_t nbytes = kMaxCapacity / 2 + kGranule;
  const Offsets::Taken a = offsets.take(nbytes);
  const Offsets::Taken b = offsets.take(1);
  CHECK_EQ(a.offset, 0);
  CHECK_EQ(b.offset, nbytes);
  CHECK_EQ(offsets.largest_free(), kMaxCapacity - nbytes - kGranule);
  CHECK_EQ(offsets.take(offsets.largest_free()).offset, nbytes + kGranule);
  CHECK(offsets.consistent());
}

TEST("a range that is no multiple of a granule, empty or past 2^46 is rejected") {
  for (const std::uint64_t nbytes : {std::uint64_t{0}, std::uint64_t{1}, kGranule - 1, kGranule + 1, kMaxCapacity + 1,
                                     kMaxCapacity + kGranule, Offsets::kNone}) {
    CHECK(throws<std::invalid_argument>([nbytes] { Offsets offsets(nbytes); }));
  }
}

// Case 15.
TEST("2^k + 1 bytes reserve at most 1.125 times as many") {
  for (unsigned k = 11; k < 46; ++k) {
    const std::uint64_t nbytes = (std::uint64_t{1} << k) + 1;
    Offsets offsets(kMaxCapacity);
    CHECK_EQ(offsets.take(nbytes).offset, 0);
    const std::uint64_t reserved = offsets.capacity() - offsets.free_bytes();
    CHECK_EQ(reserved, Offsets::round_up(nbytes));
    CHECK(reserved <= nbytes + nbytes / 8);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// No stranding.

TEST("seven blocks given back in any of their 5040 orders leave one free block") {
  // 64 and 65 share a class, 1 and 1 are equal, 200 is of a class of its own.
  const std::vector<std::uint64_t> granules = {3, 64, 1, 65, 200, 1, 40};
  std::uint64_t capacity = 0;
  for (const std::uint64_t size : granules) capacity += size * kGranule;
  Offsets offsets(capacity);
  std::vector<std::size_t> order = {0, 1, 2, 3, 4, 5, 6};
  do {
    std::vector<Offsets::Block> blocks;
    for (const std::uint64_t size : granules) blocks.push_back(offsets.take(size * kGranule).block);
    CHECK_EQ(offsets.free_bytes(), 0);
    for (const std::size_t i : order) {
      offsets.give(blocks[i]);
      CHECK(offsets.largest_free() >= granules[i] * kGranule);
    }
    CHECK_EQ(offsets.largest_free(), capacity);
    CHECK(offsets.consistent());
  } while (std::next_permutation(order.begin(), order.end()));
}

// The distributions of <random> differ between standard libraries; a printed seed should not.
class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::uint64_t below(std::uint64_t n) { return engine_() % n; }
  bool chance(std::uint64_t percent) { return below(100) < percent; }
  // From 1 to 2^(max_log2 + 1) - 1, each power of two as likely as the next.
  std::uint64_t nbytes(unsigned max_log2) {
    const std::uint64_t power = std::uint64_t{1} << below(max_log2 + 1);
    return power + below(power);
  }
  template <class T>
  void shuffle(std::vector<T>& items) {
    for (std::size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[below(i)]);
  }

 private:
  std::mt19937_64 engine_;
};

std::vector<Offsets::Block> fill(Offsets& offsets, Random& random) {
  std::vector<Offsets::Block> blocks;
  while (offsets.free_bytes() > 0) {
    const Offsets::Taken taken = offsets.take(std::min(random.nbytes(18), offsets.largest_free()));
    CHECK(taken.offset != Offsets::kNone);
    blocks.push_back(taken.block);
  }
  return blocks;
}

// Case 18.
TEST("after a fill to the last granule and a give of all the whole capacity can be taken, whatever the order") {
  struct Order {
    const char* name;
    void (*arrange)(std::vector<Offsets::Block>&, Random&);
  };
  const Order orders[] = {
      {"first in, first out", [](std::vector<Offsets::Block>&, Random&) {}},
      {"last in, first out", [](std::vector<Offsets::Block>& b, Random&) { std::reverse(b.begin(), b.end()); }},
      {"random", [](std::vector<Offsets::Block>& b, Random& random) { random.shuffle(b); }},
  };
  Random random(printed_seed());
  for (const std::uint64_t capacity : {16 * kMiB, 16 * kMiB + kGranule, 24 * kMiB - kGranule}) {
    Offsets offsets(capacity);  // one range for all rounds: later ones find the lists as earlier ones left them
    for (int round = 0; round < 10; ++round) {
      for (const Order& order : orders) {
        std::vector<Offsets::Block> blocks = fill(offsets, random);
        CHECK(offsets.consistent());
        order.arrange(blocks, random);
        for (const Offsets::Block block : blocks) offsets.give(block);
        CHECK(offsets.empty());
        const Offsets::Taken whole = offsets.take(capacity);
        CHECK_EQ(order.name + std::string(" ") + std::to_string(whole.offset), order.name + std::string(" 0"));
        offsets.give(whole.block);
      }
    }
  }
}

TEST("nothing is allocated once the range has been cut into as many blocks before") {
  Offsets offsets(16 * kMiB);
  std::vector<Offsets::Block> blocks;
  blocks.reserve(1000);
  std::uint64_t in_first_round = 0;
  for (int round = 0; round < 5; ++round) {
    const std::uint64_t before_takes = allocations();
    for (std::uint64_t i = 0; i < 1000; ++i) blocks.push_back(offsets.take((i * 37 + 1) % 16000 + 1).block);
    const std::uint64_t before_gives = allocations();
    // Every other one first, so that the free lists are long before anything coalesces.
    for (std::size_t i = 0; i < blocks.size(); i += 2) offsets.give(blocks[i]);
    for (std::size_t i = 1; i < blocks.size(); i += 2) offsets.give(blocks[i]);
    CHECK_EQ(allocations() - before_gives, 0);
    if (round == 0) in_first_round = before_gives - before_takes;
    if (round > 0) CHECK_EQ(before_gives - before_takes, 0);
    blocks.clear();
  }
  CHECK(in_first_round > 0);  // else the counter counts nothing
}

// ---------------------------------------------------------------------------------------------------------------------
// Random operations against the obvious model.

class Model {
 public:
  explicit Model(std::uint64_t capacity) : capacity_(capacity), free_(capacity) {}

  // Overlaps nothing and lies within the range (I2, I3).
  bool accepts(std::uint64_t offset, std::uint64_t size) const {
    const auto above = taken_.lower_bound(offset);
    const bool clear_above = (above == taken_.end() ? capacity_ : above->first) >= offset + size;
    if (above == taken_.begin()) return clear_above;
    const auto below = std::prev(above);
    return clear_above && below->first + below->second <= offset;
  }

  void take(std::uint64_t offset, std::uint64_t size) {
    taken_[offset] = size;
    free_ -= size;
  }

  void give(std::uint64_t offset) {
    free_ += taken_.at(offset);
    taken_.erase(offset);
  }

  std::uint64_t largest_gap() const {
    std::uint64_t largest = 0, end = 0;
    for (const auto& [offset, size] : taken_) {
      largest = std::max(largest, offset - end);
      end = offset + size;
    }
    return std::max(largest, capacity_ - end);
  }

  std::uint64_t free_bytes() const { return free_; }

 private:
  std::uint64_t capacity_, free_;
  std::map<std::uint64_t, std::uint64_t> taken_;  // offset, size
};

class AgainstModel {
 public:
  explicit AgainstModel(std::uint64_t capacity) : offsets_(capacity), model_(capacity) {}

  void take(std::uint64_t nbytes) {
    const Offsets::Taken taken = offsets_.take(nbytes);
    const std::uint64_t size = Offsets::round_up(nbytes);
    if (taken.offset == Offsets::kNone) {
      CHECK(size > model_.largest_gap());  // it refuses nothing that fits
      ++refused_;
      return;
    }
    CHECK_EQ(taken.offset % kGranule, 0);
    CHECK(model_.accepts(taken.offset, size));
    model_.take(taken.offset, size);
    in_use_.push_back(taken);
  }

  void give_any(Random& random) {
    if (in_use_.empty()) return;
    // Recent ones more often than old ones, as in a pool.
    const std::size_t newest = in_use_.size() - 1;
    const std::size_t i =
        random.chance(50) ? newest - random.below(std::min<std::size_t>(newest + 1, 4)) : random.below(in_use_.size());
    model_.give(in_use_[i].offset);
    offsets_.give(in_use_[i].block);
    std::swap(in_use_[i], in_use_.back());
    in_use_.pop_back();
  }

  void give_all(Random& random) {
    while (!in_use_.empty()) give_any(random);
  }

  void check() {
    CHECK(offsets_.consistent());
    CHECK_EQ(offsets_.free_bytes(), model_.free_bytes());
    CHECK_EQ(offsets_.largest_free(), model_.largest_gap());
    // No stranding at any moment: the largest free block can be taken to its last byte.
    if (offsets_.largest_free() == 0) return;
    const Offsets::Taken largest = offsets_.take(offsets_.largest_free());
    CHECK(largest.offset != Offsets::kNone);
    offsets_.give(largest.block);
  }

  bool empty() const { return offsets_.empty(); }
  std::uint64_t refused() const { return refused_; }

 private:
  Offsets offsets_;
  Model model_;
  std::vector<Offsets::Taken> in_use_;
  std::uint64_t refused_ = 0;
};

TEST("random takes and gives agree with a map of intervals") {
  struct Load {
    std::uint64_t capacity;
    unsigned max_log2;  // of the sizes
  };
  const Load loads[] = {{64 * kGranule, 11}, {kMiB, 17}, {4 * kMiB + kGranule, 20}, {64 * kMiB - kGranule, 23}};
  constexpr int kOperations = 60'000;  // for each load
  Random random(printed_seed());
  for (const Load& load : loads) {
    AgainstModel range(load.capacity);
    std::uint64_t percent_takes = 50;
    for (int i = 0; i < kOperations; ++i) {
      // Drift between nearly empty and so full that takes are refused.
      if (i % 1000 == 0) percent_takes = 30 + random.below(50);
      if (random.chance(percent_takes)) {
        range.take(random.nbytes(load.max_log2));
      } else {
        range.give_any(random);
      }
      if (i % 64 == 0) range.check();
    }
    CHECK(range.refused() > 100);  // else it never was full
    range.give_all(random);
    CHECK(range.empty());
    range.check();
  }
}

}  // namespace
