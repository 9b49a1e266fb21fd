// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// Scatter: brings pieces of a pinned slot to addresses on the device, by one kernel that reads the slot in place.
//
//   slot     | bytes of A      | bytes of B | ... | A.0 | A.1 | B.0 | ...     pinned, mapped into the device
//   kernel                                          block 0, 1, 2, ...        one for each descriptor, of at most 8 KB
//   device     A . . . . . .     B . . .   ...                                written by them
//
// A driver copy costs the host 1 to 2 us, inside cuMemcpyBatchAsync too; a launch 2.5 us, whatever the number of
// pieces. To the stream it is one step like a copy: descriptors and bytes are read when it executes, and the fence that
// is recorded behind it covers it. The pieces have no order among themselves, so they must not overlap.
//
// The kernel is loaded with its device, not at first use: loading may wait for the device, which a copy must not. Where
// the driver has none (no JIT compiler, say) or declines to launch it, everything goes as it would without it.
#pragma once

#include <cstddef>
#include <vector>

#include "driver.h"
#include "scatter_kernel.h"

namespace pinstage {

class Device;
class Pool;

// Fewer copies than this are left to the copy engines, and so are more bytes, which they move without taking
// multiprocessors from the model; but for rows so scattered that only a kernel of torch's would bring them.
inline constexpr std::size_t kFewestScattered = 3;
inline constexpr std::size_t kMostScatteredBytes = std::size_t{1} << 20;
// A batch of many bytes wants one copy more for each so many: 16 copies apart take 0.78 of the time of
// cuMemcpyBatchAsync with 1 KB each, 0.89 with 4 KB and 0.95 with 16 KB, a few copies of 64 KB 1.1 to 1.2 of it (H200).
inline constexpr std::size_t kScatteredBytesPerCopy = std::size_t{32} << 10;

// Null: the driver has none, or refused it. Never an error. Nothing unloads it: it ends with its context (I8).
Function load_scatter_kernel(const Device& device) noexcept;

// Whether slots of `pool` can go this way, as far as can be told before one is taken.
bool can_scatter(const Pool& pool) noexcept;

// A slot: what lies where in it, and what goes by the kernel.
class Scatter {
 public:
  // Room for bytes that the kernel brings to `dst`. Returns their offset in the slot.
  std::size_t add(DevicePtr dst, std::size_t nbytes);
  // Room for bytes that go another way.
  std::size_t place(std::size_t nbytes) noexcept;
  // The most that either adds to slot_bytes().
  static constexpr std::size_t most_bytes(std::size_t nbytes) noexcept {
    const std::size_t from_vector = nbytes + kScatterVector - 1;
    return aligned(from_vector) + sizeof(ScatterPiece) * (from_vector / kScatterPieceBytes + 1);
  }

  std::size_t slot_bytes() const noexcept { return aligned(end_) + pieces_.size() * sizeof(ScatterPiece); }
  // Writes the descriptors. After the last add() and place().
  void write_pieces(char* slot) const noexcept;

  // Enqueues the kernel, or one copy a piece where the driver declines it; it is not asked again then. *enqueued counts
  // as enqueue_copy() counts. The context is current.
  Status enqueue(Device& device, const char* slot, Stream stream, std::size_t* enqueued,
                 const char** call) const noexcept;

 private:
  // A cache line, so that the device never reads one that two copies share.
  static constexpr std::size_t kAlignment = 64;
  static constexpr std::size_t aligned(std::size_t nbytes) noexcept {
    return (nbytes + kAlignment - 1) & ~(kAlignment - 1);
  }

  Status launch(const Device& device, const char* slot, Stream stream, const char** call) const noexcept;

  std::vector<ScatterPiece> pieces_;
  std::size_t end_ = 0;                         // of the bytes in the slot
  DevicePtr first_ = ~DevicePtr{0}, last_ = 0;  // of all destinations: the lowest, the end of the highest
};

}  // namespace pinstage
