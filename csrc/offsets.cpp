// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include "offsets.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <stdexcept>
#include <string>

namespace pinstage {
namespace {

unsigned lowest_bit(std::uint64_t bits) noexcept { return static_cast<unsigned>(__builtin_ctzll(bits)); }
unsigned highest_bit(std::uint64_t bits) noexcept { return 63u - static_cast<unsigned>(__builtin_clzll(bits)); }
bool bit(std::uint64_t bits, unsigned index) noexcept { return (bits >> index & 1) != 0; }

}  // namespace

Offsets::Offsets(std::uint64_t nbytes) : capacity_(nbytes / kGranule) {
  static_assert(kSubclasses == std::numeric_limits<std::uint32_t>::digits, "one bit of sub_maps_ a subclass");
  static_assert(kLevels <= std::numeric_limits<std::uint64_t>::digits, "one bit of level_map_ a level");
  if (nbytes == 0 || nbytes % kGranule != 0 || capacity_ > std::uint64_t{1} << kMaxLog2) {
    throw std::invalid_argument("a range of " + std::to_string(nbytes) + " bytes cannot be cut into blocks: give a " +
                                "multiple of " + std::to_string(kGranule) + " from " + std::to_string(kGranule) +
                                " to 2^46");
  }
  newest_.fill(kNil);
  nodes_.push_back({0, capacity_, kNil, kNil, kNil, kNil, State::kFree});
  free_ = capacity_;
  list(0);
}

Offsets::Taken Offsets::take(std::uint64_t nbytes) {
  assert(nbytes > 0);
  if (nbytes > capacity()) return {kNone, kNil};  // before round_up, which would wrap near 2^64
  const std::uint64_t size = round_up(nbytes) / kGranule;
  const Block block = find(size);
  if (block == kNil) return {kNone, kNil};
  // The only step that may throw comes before the first change.
  const Block rest = nodes_[block].size > size ? new_node() : kNil;

  unlist(block);
  if (rest != kNil) split(block, size, rest);
  nodes_[block].state = State::kTaken;
  free_ -= size;
  return {nodes_[block].offset * kGranule, block};
}

void Offsets::give(Block block) noexcept {
  assert(block < nodes_.size() && nodes_[block].state == State::kTaken);
  free_ += nodes_[block].size;
  nodes_[block].state = State::kFree;

  const Block after = nodes_[block].after;
  if (after != kNil && nodes_[after].state == State::kFree) {
    unlist(after);
    absorb_after(block);
  }
  const Block before = nodes_[block].before;
  if (before != kNil && nodes_[before].state == State::kFree) {
    unlist(before);
    absorb_after(before);
    block = before;
  }
  list(block);
}

std::uint64_t Offsets::largest_free() const noexcept {
  if (level_map_ == 0) return 0;
  const unsigned level = highest_bit(level_map_);
  std::uint64_t largest = 0;
  Block block = newest_[level * kSubclasses + highest_bit(sub_maps_[level])];
  for (; block != kNil; block = nodes_[block].older) largest = std::max(largest, nodes_[block].size);
  return largest * kGranule;
}

// A small floating-point number: the exponent is the level, the kSubclassBits below the leading one are the subclass.
// Sizes below 2 * kSubclasses have a class each. Classes ascend with size across levels, so every block of a higher
// class is larger.
unsigned Offsets::class_of(std::uint64_t size) noexcept {
  const unsigned shift = size < kSubclasses ? 0 : highest_bit(size) - kSubclassBits;
  return shift * kSubclasses + static_cast<unsigned>(size >> shift);
}

Offsets::Block Offsets::find(std::uint64_t size) const noexcept {
  const unsigned own = class_of(size);
  // The newest of the own class first: of a size that recurs, it is the very hole that the last one left, and larger
  // blocks stay whole.
  const Block newest = newest_[own];
  if (newest != kNil && nodes_[newest].size >= size) return newest;

  const unsigned larger = first_class_in_use(own + 1);
  if (larger != kClasses) return newest_[larger];

  // What is left may fit by less than a class is wide. Without this search a range of 65 granules, all free, would
  // refuse 65.
  Block block = newest;
  while (block != kNil && nodes_[block].size < size) block = nodes_[block].older;
  return block;
}

// kClasses when there is none. `from` may be kClasses - 1 at most.
unsigned Offsets::first_class_in_use(unsigned from) const noexcept {
  unsigned level = from / kSubclasses;
  std::uint32_t subs = sub_maps_[level] & ~std::uint32_t{0} << from % kSubclasses;
  if (subs == 0) {
    const std::uint64_t levels = level_map_ & ~std::uint64_t{0} << (level + 1);
    if (levels == 0) return kClasses;
    level = lowest_bit(levels);
    subs = sub_maps_[level];
  }
  return level * kSubclasses + lowest_bit(subs);
}

Offsets::Block Offsets::new_node() {
  if (spares_ != kNil) {
    const Block node = spares_;
    spares_ = nodes_[node].after;
    return node;
  }
  if (nodes_.size() == kNil) throw std::length_error("a range cannot be cut into 2^32 blocks");
  nodes_.emplace_back();
  return static_cast<Block>(nodes_.size() - 1);
}

// Cuts `block` to `size`; `rest` becomes the free block above it.
void Offsets::split(Block block, std::uint64_t size, Block rest) noexcept {
  Node& low = nodes_[block];
  nodes_[rest] = {low.offset + size, low.size - size, block, low.after, kNil, kNil, State::kFree};
  if (low.after != kNil) nodes_[low.after].before = rest;
  low.after = rest;
  low.size = size;
  list(rest);
}

// Joins `block` with the block above it, neither of them listed, and leaves that one's node to be used again.
void Offsets::absorb_after(Block block) noexcept {
  Node& low = nodes_[block];
  const Block absorbed = low.after;
  Node& high = nodes_[absorbed];
  low.size += high.size;
  low.after = high.after;
  if (low.after != kNil) nodes_[low.after].before = block;
  high.state = State::kSpare;
  high.after = spares_;
  spares_ = absorbed;
}

void Offsets::list(Block block) noexcept {
  Node& node = nodes_[block];
  const unsigned size_class = class_of(node.size);
  Block& newest = newest_[size_class];
  node.newer = kNil;
  node.older = newest;
  if (newest != kNil) nodes_[newest].newer = block;
  newest = block;
  const unsigned level = size_class / kSubclasses;
  sub_maps_[level] |= std::uint32_t{1} << size_class % kSubclasses;
  level_map_ |= std::uint64_t{1} << level;
}

void Offsets::unlist(Block block) noexcept {
  const Node& node = nodes_[block];
  if (node.older != kNil) nodes_[node.older].newer = node.newer;
  if (node.newer != kNil) {
    nodes_[node.newer].older = node.older;
    return;  // the list keeps its head, so it is not empty
  }
  const unsigned size_class = class_of(node.size);
  newest_[size_class] = node.older;
  if (node.older != kNil) return;
  const unsigned level = size_class / kSubclasses;
  sub_maps_[level] &= ~(std::uint32_t{1} << size_class % kSubclasses);
  if (sub_maps_[level] == 0) level_map_ &= ~(std::uint64_t{1} << level);
}

bool Offsets::consistent() const { return range_consistent() && lists_consistent() && spares_consistent(); }

std::size_t Offsets::count(State state) const noexcept {
  const auto is_state = [state](const Node& node) { return node.state == state; };
  return static_cast<std::size_t>(std::count_if(nodes_.begin(), nodes_.end(), is_state));
}

// The blocks tile the range without gap or overlap (I1, I2), and no two free ones touch.
bool Offsets::range_consistent() const {
  std::uint64_t end = 0, free = 0;
  std::size_t blocks = 0;
  Block before = kNil;
  bool before_free = false;
  for (Block block = 0; block != kNil; block = nodes_[block].after) {
    if (block >= nodes_.size()) return false;
    const Node& node = nodes_[block];
    const bool is_free = node.state == State::kFree;
    if (node.state == State::kSpare || node.before != before || node.offset != end) return false;
    if (node.size == 0 || node.size > capacity_ - end || (is_free && before_free)) return false;
    end += node.size;
    if (is_free) free += node.size;
    before = block;
    before_free = is_free;
    ++blocks;
  }
  return end == capacity_ && free == free_ && blocks + count(State::kSpare) == nodes_.size();
}

// Each free block is in the list of its class, and the bitmaps tell exactly the lists in use. The back links rule out
// cycles and a block in two lists.
bool Offsets::lists_consistent() const {
  std::size_t listed = 0;
  for (unsigned size_class = 0; size_class < kClasses; ++size_class) {
    const bool in_use = newest_[size_class] != kNil;
    if (in_use != bit(sub_maps_[size_class / kSubclasses], size_class % kSubclasses)) return false;
    Block newer = kNil;
    for (Block block = newest_[size_class]; block != kNil; block = nodes_[block].older) {
      if (block >= nodes_.size()) return false;
      const Node& node = nodes_[block];
      if (node.state != State::kFree || node.newer != newer || class_of(node.size) != size_class) return false;
      newer = block;
      ++listed;
    }
  }
  for (unsigned level = 0; level < kLevels; ++level) {
    if (bit(level_map_, level) != (sub_maps_[level] != 0)) return false;
  }
  return listed == count(State::kFree) && level_map_ >> kLevels == 0;
}

bool Offsets::spares_consistent() const {
  const std::size_t expected = count(State::kSpare);
  std::size_t found = 0;
  for (Block node = spares_; node != kNil; node = nodes_[node].after) {
    if (node >= nodes_.size() || nodes_[node].state != State::kSpare || ++found > expected) return false;
  }
  return found == expected;
}

}  // namespace pinstage
