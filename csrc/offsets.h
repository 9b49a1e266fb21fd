// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// Cuts a range of bytes into blocks by offset arithmetic alone: no memory, no driver, no lock.
//
// Two-level segregated fit. Every block of the range, taken or free, is a node that knows its neighbours. The free ones
// are also listed by size class (powers of two, each split into kSubclasses), and two levels of bitmaps find the first
// non-empty class in constant time. A block is cut to exactly the granules asked for, from the low end; what comes back
// coalesces with both neighbours at once. Hence, at any time:
//
//   - a block starts on kGranule and wastes at most kGranule - 1 bytes (I3);
//   - two free blocks never touch, so when everything is back there is one free block, the whole range;
//   - a take succeeds if any free block is large enough, be it by not one byte larger (no stranding);
//   - bytes given back last are handed out first, while caches and TLB still know them.
//
//   offset 0                                            capacity
//     | taken A | free      | taken B | taken C | free     |      blocks, in order of address
//                 `--- class of its size          `--- class of its size
//
// Not thread-safe: the owner's lock guards it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pinstage {

class Offsets {
 public:
  static constexpr std::uint64_t kGranule = 256;
  static constexpr std::uint64_t kNone = ~std::uint64_t{0};
  using Block = std::uint32_t;  // handle of a block in use

  struct Taken {
    std::uint64_t offset;  // kNone: no free block is large enough; nothing changed
    Block block;           // hand this to give()
  };

  // `nbytes` must be a multiple of kGranule, > 0 and at most 2^46; throws std::invalid_argument otherwise.
  explicit Offsets(std::uint64_t nbytes);

  // Reserves round_up(nbytes) bytes. nbytes > 0. Constant time, unless the only free blocks large enough share the
  // request's own size class: then that one list is searched. Allocates (and may throw, with nothing changed) only when
  // the range is cut into more blocks than ever before.
  [[nodiscard]] Taken take(std::uint64_t nbytes);
  // Returns a block that take() handed out, once. Constant time, no allocation.
  void give(Block block) noexcept;

  std::uint64_t capacity() const noexcept { return capacity_ * kGranule; }
  std::uint64_t free_bytes() const noexcept { return free_ * kGranule; }
  // The most bytes that take() would grant now; 0 when full. Searches the list of the highest class in use.
  std::uint64_t largest_free() const noexcept;
  bool empty() const noexcept { return free_ == capacity_; }  // nothing is taken

  // Walks every block and free list; true when all are consistent (I1, I2 for this range). For tests and debug mode.
  bool consistent() const;

  static constexpr std::uint64_t round_up(std::uint64_t nbytes) noexcept {
    return (nbytes + kGranule - 1) & ~(kGranule - 1);
  }

 private:
  static constexpr Block kNil = ~Block{0};
  static constexpr unsigned kSubclassBits = 5;
  static constexpr unsigned kSubclasses = 1u << kSubclassBits;  // as many as sub_maps_ has bits
  static constexpr unsigned kMaxLog2 = 38;                      // of a capacity in granules: 2^46 bytes
  static constexpr unsigned kLevels = kMaxLog2 - kSubclassBits + 2;
  static constexpr unsigned kClasses = kLevels * kSubclasses;

  enum class State : std::uint8_t {
    kTaken,
    kFree,   // and in the list of its class
    kSpare,  // no block: a node to be used again
  };

  // Sizes and offsets inside are in granules.
  struct Node {
    std::uint64_t offset;
    std::uint64_t size;
    Block before, after;  // neighbours in the range; of a spare node, `after` is the next spare
    Block newer, older;   // neighbours in the free list; meaningless unless kFree
    State state;
  };

  static unsigned class_of(std::uint64_t size) noexcept;

  Block find(std::uint64_t size) const noexcept;
  unsigned first_class_in_use(unsigned from) const noexcept;

  Block new_node();
  void split(Block block, std::uint64_t size, Block rest) noexcept;
  void absorb_after(Block block) noexcept;
  void list(Block block) noexcept;
  void unlist(Block block) noexcept;

  std::size_t count(State state) const noexcept;
  bool range_consistent() const;
  bool lists_consistent() const;
  bool spares_consistent() const;

  std::uint64_t capacity_;
  std::uint64_t free_ = 0;
  // nodes_[0] is always the block at offset 0: splitting and coalescing both keep the lower block's node.
  std::vector<Node> nodes_;
  Block spares_ = kNil;
  std::uint64_t level_map_ = 0;                    // bit l: sub_maps_[l] is not 0
  std::array<std::uint32_t, kLevels> sub_maps_{};  // bit s of [l]: newest_[l * kSubclasses + s] is not kNil
  std::array<Block, kClasses> newest_;             // head of each free list
};

}  // namespace pinstage
