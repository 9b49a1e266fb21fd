// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "simulated_machine.h"

namespace pinstage::sim {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kHeapAlignment = 256;  // cuMemAlloc's
constexpr std::size_t kHeapGap = 256;        // one past a block is not the next block

Machine& machine() noexcept { return Machine::get(); }

std::uintptr_t address(const void* p) noexcept { return reinterpret_cast<std::uintptr_t>(p); }

// The range of `map` that holds `p`, or null.
template <class Map>
typename Map::mapped_type find_in(const Map& map, std::uintptr_t p) {
  auto after = map.upper_bound(p);
  if (after == map.begin()) return nullptr;
  const auto& range = std::prev(after)->second;
  return p - address(range->data) < range->nbytes ? range : nullptr;
}

template <class Range>
bool holds(const Range& range, std::uintptr_t p, std::size_t nbytes) {
  const std::size_t offset = p - address(range.data);
  return offset <= range.nbytes && nbytes <= range.nbytes - offset;
}

// A pinned range that has a byte in [p, p + nbytes), or null.
std::shared_ptr<HostRange> find_overlap(std::uintptr_t p, std::size_t nbytes) {
  auto after = machine().host.lower_bound(p + nbytes);
  if (after == machine().host.begin()) return nullptr;
  const auto& range = std::prev(after)->second;
  return address(range->data) + range->nbytes > p ? range : nullptr;
}

// Bytes from the first to the last of an extent, false on overflow.
bool span(const Extent& extent, std::size_t pitch, std::size_t plane, std::size_t* out) {
  std::size_t planes, rows;
  return !__builtin_mul_overflow(extent.depth - 1, plane, &planes) &&
         !__builtin_mul_overflow(extent.height - 1, pitch, &rows) && !__builtin_add_overflow(planes, rows, out) &&
         !__builtin_add_overflow(*out, extent.width, out);
}

bool overflows(std::uintptr_t p, std::size_t nbytes) {
  std::uintptr_t end;
  return __builtin_add_overflow(p, nbytes, &end);
}

// Finds the pinned ranges that the copy reads. Each row must lie in one, or in none.
Status find_sources(std::uintptr_t src, std::size_t nbytes, Copy* copy) {
  std::shared_ptr<HostRange> range = find_overlap(src, nbytes);
  if (!range) return status::kSuccess;  // pageable
  if (holds(*range, src, nbytes)) {
    copy->sources.push_back(std::move(range));
    return status::kSuccess;
  }
  const Extent& extent = copy->extent;
  for (std::size_t z = 0; z < extent.depth; ++z) {
    for (std::size_t y = 0; y < extent.height; ++y) {
      const std::uintptr_t row = src + z * extent.src_plane + y * extent.src_pitch;
      std::shared_ptr<HostRange> of_row = find_overlap(row, extent.width);
      if (!of_row) continue;
      if (!holds(*of_row, row, extent.width)) return status::kInvalidValue;
      const bool known = std::find(copy->sources.begin(), copy->sources.end(), of_row) != copy->sources.end();
      if (!known) copy->sources.push_back(std::move(of_row));
    }
  }
  return status::kSuccess;
}

void write_row(const Copy& copy, char* dst, const char* src, std::size_t nbytes) {
  if (copy.poisoned) {
    std::memset(dst, SimulatedDevice::kPoison, nbytes);
  } else {
    std::memmove(dst, src, nbytes);
  }
}

void run_copy(const Copy& copy) {
  const Extent& extent = copy.extent;
  for (std::size_t z = 0; z < extent.depth; ++z) {
    const char* src = copy.src + z * extent.src_plane;
    char* dst = copy.dst + z * extent.dst_plane;
    for (std::size_t y = 0; y < extent.height; ++y) {
      write_row(copy, dst + y * extent.dst_pitch, src + y * extent.src_pitch, extent.width);
    }
  }
}

// Counts the copies that are queued and read `range`, on the devices where they wait.
void count_violations(const HostRange& range) {
  const auto reads_it = [&](const Copy& copy) {
    return std::any_of(copy.sources.begin(), copy.sources.end(), [&](const auto& s) { return s.get() == &range; });
  };
  for (const std::shared_ptr<Device>& device : machine().devices) {
    for (const std::shared_ptr<Queue>& queue : device->queues) {
      for (const Step& step : queue->steps) {
        device->violations +=
            static_cast<std::uint64_t>(std::count_if(step.copies.begin(), step.copies.end(), reads_it));
      }
    }
  }
  range.device->violations += static_cast<std::uint64_t>(range.readers);
}

}  // namespace

HeapBlock::HeapBlock(Device* owner, std::size_t size)
    : device(owner),
      data(static_cast<char*>(::operator new(size + kHeapGap, std::align_val_t{kHeapAlignment}))),
      nbytes(size) {
  std::memset(data, SimulatedDevice::kPoison, size + kHeapGap);
}

HeapBlock::~HeapBlock() { ::operator delete(data, std::align_val_t{kHeapAlignment}); }

HeapBlock* find_block(const void* p) { return find_in(machine().heap, address(p)).get(); }

const HostRange* find_host(const void* p) { return find_in(machine().host, address(p)).get(); }

Status make_copy(std::uintptr_t dst, std::uintptr_t src, const Extent& extent, Copy* out) {
  std::size_t src_bytes, dst_bytes;
  if (!span(extent, extent.src_pitch, extent.src_plane, &src_bytes) || overflows(src, src_bytes) ||
      !span(extent, extent.dst_pitch, extent.dst_plane, &dst_bytes) || src == 0) {
    return status::kInvalidValue;
  }
  std::shared_ptr<HeapBlock> target = find_in(machine().heap, dst);
  if (!target || !holds(*target, dst, dst_bytes)) return status::kInvalidValue;
  out->src = reinterpret_cast<const char*>(src);
  out->dst = reinterpret_cast<char*>(dst);
  out->extent = extent;
  out->blocks.push_back(std::move(target));
  if (std::shared_ptr<HeapBlock> source = find_in(machine().heap, src)) {
    if (!holds(*source, src, src_bytes)) return status::kInvalidValue;
    out->blocks.push_back(std::move(source));
    return status::kSuccess;
  }
  return find_sources(src, src_bytes, out);
}

void take_snapshot(Copy& copy) {
  copy.snapshot = std::shared_ptr<char>(new char[copy.extent.width], std::default_delete<char[]>());
  std::memcpy(copy.snapshot.get(), copy.src, copy.extent.width);
  copy.src = copy.snapshot.get();
  copy.sources.clear();
}

Status make_scatter(const ScatterLaunch& launch, std::vector<Copy>* copies) {
  copies->resize(launch.count);
  for (unsigned i = 0; i < launch.count; ++i) {
    const ScatterPiece& piece = launch.pieces[i];
    const char* const src = launch.slot + piece.offset;
    Copy& copy = (*copies)[i];
    const bool foreign = piece.dst < launch.first || piece.dst > launch.end || piece.dst + piece.nbytes > launch.end ||
                         src + piece.nbytes > reinterpret_cast<const char*>(launch.pieces) ||
                         (address(src) ^ piece.dst) % kScatterVector != 0;
    if (foreign || piece.nbytes == 0) {
      copy = Copy{};
      continue;
    }
    // What the kernel relies on.
    if (piece.dst % kScatterVector + piece.nbytes > kScatterPieceBytes || find_host(src) == nullptr) {
      return kIllegalAddress;
    }
    // As it was at the launch: what it keeps alive may have been freed since.
    if (copy.src == src && address(copy.dst) == piece.dst && copy.extent.width == piece.nbytes) continue;
    copy = Copy{};
    Extent extent;
    extent.width = piece.nbytes;
    if (make_copy(piece.dst, address(src), extent, &copy) != status::kSuccess) return kIllegalAddress;
  }
  return status::kSuccess;
}

Status begin_copies(Device& device, Step& step) {
  std::vector<Copy>& copies = step.copies;
  // The kernel reads what the slot holds now; one that is gone reads as poison, like any source.
  if (step.scatter && std::none_of(copies.begin(), copies.end(), reads_freed_memory)) {
    if (const Status status = make_scatter(*step.scatter, &copies)) {
      copies.clear();  // which of them ran is anyone's guess
      return status;
    }
  }
  const auto nothing = [](const Copy& copy) { return copy.dst == nullptr; };
  copies.erase(std::remove_if(copies.begin(), copies.end(), nothing), copies.end());
  // A batch has no order. Whoever relies on one finds it reversed, or shuffled.
  if (device.schedule == Schedule::kRandom) {
    std::shuffle(copies.begin(), copies.end(), device.random);
  } else if (device.schedule != Schedule::kEager) {
    std::reverse(copies.begin(), copies.end());
  }
  for (Copy& copy : copies) {
    copy.poisoned = reads_freed_memory(copy);
    for (const std::shared_ptr<HostRange>& range : copy.sources) ++range->readers;
  }
  return status::kSuccess;
}

void run_copies(const std::vector<Copy>& copies) noexcept {
  for (const Copy& copy : copies) run_copy(copy);
}

void end_copies(const std::vector<Copy>& copies) {
  for (const Copy& copy : copies) {
    for (const std::shared_ptr<HostRange>& range : copy.sources) --range->readers;
  }
}

bool reads_freed_memory(const Copy& copy) {
  return std::any_of(copy.sources.begin(), copy.sources.end(), [](const auto& range) { return !range->alive; });
}

Status host_alloc(Device& device, void** out, std::size_t nbytes) {
  if (out == nullptr || nbytes == 0) return status::kInvalidValue;
  if (nbytes > ~std::size_t{0} - kPage) return status::kOutOfMemory;
  void* data = std::aligned_alloc(kPage, (nbytes + kPage - 1) / kPage * kPage);
  if (data == nullptr) return status::kOutOfMemory;
  std::memset(data, SimulatedDevice::kPoison, nbytes);
  auto range = std::make_shared<HostRange>(HostRange{&device, static_cast<char*>(data), nbytes, true});
  machine().host.emplace(address(data), std::move(range));
  ++device.host_ranges;
  *out = data;
  return status::kSuccess;
}

Status host_register(Device& device, void* p, std::size_t nbytes) {
  if (p == nullptr || nbytes == 0 || overflows(address(p), nbytes)) return status::kInvalidValue;
  if (find_overlap(address(p), nbytes)) return status::kHostMemoryAlreadyRegistered;
  auto range = std::make_shared<HostRange>(HostRange{&device, static_cast<char*>(p), nbytes, false});
  machine().host.emplace(address(p), std::move(range));
  ++device.host_ranges;
  return status::kSuccess;
}

Status host_release(Lock& lock, void* p, bool allocated) {
  const auto found = machine().host.find(address(p));
  if (found == machine().host.end() || found->second->allocated != allocated) {
    return allocated ? status::kInvalidValue : kHostMemoryNotRegistered;
  }
  const std::shared_ptr<HostRange> range = found->second;
  machine().host.erase(found);
  range->alive = false;
  count_violations(*range);
  --range->device->host_ranges;
  machine().changed.wait(lock, [&] { return range->readers == 0; });  // a copy under way holds no lock: it ends
  if (allocated) std::free(range->data);
  return status::kSuccess;
}

}  // namespace pinstage::sim
