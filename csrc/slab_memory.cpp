// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include "slab_memory.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>

#include "team.h"

namespace pinstage {
namespace {

constexpr std::uint64_t kHugePage = 2 << 20;
// From a few huge pages on it pays to map, and from more on to share the work: a process that makes small copies alone
// shall not have worker threads for its first slab.
constexpr std::uint64_t kMinRegistered = 8 << 20;
constexpr std::uint64_t kMinShared = 32 << 20;

constexpr std::uint64_t round_up(std::uint64_t nbytes, std::uint64_t unit) noexcept {
  return (nbytes + unit - 1) / unit * unit;
}

std::uint64_t page_bytes() noexcept {
  static const auto nbytes = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  return nbytes;
}

// Whole pages on a border of huge pages, or null. Cleared pages appear when they are first touched.
char* map_pages(std::uint64_t nbytes) noexcept {
  const std::uint64_t mapped = nbytes + kHugePage - page_bytes();
  void* const p = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  char* const first = static_cast<char*>(p);
  const std::uint64_t before =
      round_up(reinterpret_cast<std::uintptr_t>(p), kHugePage) - reinterpret_cast<std::uintptr_t>(p);
  char* const data = first + before;
  if (before > 0) munmap(first, before);
  if (mapped - before > nbytes) munmap(data + nbytes, mapped - before - nbytes);
  // A forked child does not share these pages: had it a copy-on-write claim to them, this process could be the one that
  // gets the copies, and the device would read the originals. The child finds zeros there, so that a tensor which it
  // inherited can be touched.
  if (madvise(data, nbytes, MADV_WIPEONFORK) != 0 && madvise(data, nbytes, MADV_DONTFORK) != 0) {
    munmap(data, nbytes);
    return nullptr;
  }
  madvise(data, nbytes, MADV_HUGEPAGE);  // a kernel without them has small ones
  return data;
}

// Asks for the pages of a mapping on `node`, before they are made; where it has no room they come from another. False:
// nothing was changed, because the process may not ask (containers often forbid it) or the node is none of its own, or
// because it has a memory policy, numactl's for one: that is the user's word, and stays.
bool prefer_node(char* data, std::uint64_t nbytes, int node) noexcept {
  constexpr unsigned kBits = 8 * sizeof(unsigned long);
  unsigned long nodes[(kMaxNumaNode + 1) / kBits] = {};
  nodes[static_cast<unsigned>(node) / kBits] |= 1UL << (static_cast<unsigned>(node) % kBits);
  // By the bare system calls: libnuma, which wraps them, is not on every machine.
  int policy = MPOL_DEFAULT;
  if (syscall(SYS_get_mempolicy, &policy, nullptr, 0UL, nullptr, 0UL) != 0) return false;
  if (policy != MPOL_DEFAULT && policy != MPOL_LOCAL) return false;
  // The kernel takes the number of bits to be one more than there are.
  return syscall(SYS_mbind, data, nbytes, MPOL_PREFERRED, nodes, 8 * sizeof(nodes) + 1, 0UL) == 0;
}

struct TouchJob {
  char* data;
  std::uint64_t nbytes;

  static void run(void* self, std::int64_t index) noexcept {
    const auto& job = *static_cast<const TouchJob*>(self);
    const std::uint64_t begin = static_cast<std::uint64_t>(index) * kHugePage;
    const std::uint64_t end = std::min(begin + kHugePage, job.nbytes);
    const std::uint64_t page = page_bytes();
    for (std::uint64_t at = begin; at < end; at += page) *const_cast<volatile char*>(job.data + at) = 0;
  }
};

}  // namespace

Status allocate_pinned(Device& device, std::uint64_t nbytes, bool* may_register, SlabMemory* out) {
  *out = {nullptr, nbytes, SlabKind::kAllocated};
  if (*may_register && nbytes >= kMinRegistered) {
    const std::uint64_t pages = round_up(nbytes, page_bytes());
    if (char* const data = map_pages(pages)) {
      const int node = device.numa_node;
      if (node >= 0 && !prefer_node(data, pages, node)) device.numa_node = kNoNumaNode;
      TouchJob job{data, pages};
      Team& team = Team::instance();
      const int threads = pages < kMinShared ? 1 : team.threads();
      const auto chunks = static_cast<std::int64_t>(round_up(pages, kHugePage) / kHugePage);
      if (!team.run(chunks, threads, pages, &TouchJob::run, &job)) {
        for (std::int64_t i = 0; i < chunks; ++i) TouchJob::run(&job, i);
      }
      Status status;
      {
        const Device::Relaxed relaxed(device);
        status = device.driver().mem_host_register(data, pages, kHostAllocPortable | kHostAllocDeviceMap);
      }
      if (status == status::kSuccess) {
        out->data = data;
        out->kind = SlabKind::kRegistered;
        return status;
      }
      munmap(data, pages);
      if (status == status::kNotSupported) {
        *may_register = false;
        device.numa_node = kNoNumaNode;  // what follows lies where the driver puts it
      }
    }
  }
  void* data = nullptr;
  const Device::Relaxed relaxed(device);
  const Status status = device.driver().mem_host_alloc(&data, nbytes, kHostAllocPortable | kHostAllocDeviceMap);
  out->data = static_cast<char*>(data);
  return status;
}

Status allocate_pageable(std::uint64_t nbytes, SlabMemory* out) noexcept {
  void* data = nullptr;
  const bool got = posix_memalign(&data, page_bytes(), nbytes) == 0;
  *out = {static_cast<char*>(data), nbytes, SlabKind::kPageable};
  return got ? status::kSuccess : status::kOutOfMemory;
}

void free_slab(Device& device, const SlabMemory& memory) noexcept {
  if (memory.kind == SlabKind::kPageable) {
    std::free(memory.data);
    return;
  }
  Status status;
  {
    const Device::Relaxed relaxed(device);
    status = memory.kind == SlabKind::kRegistered ? device.driver().mem_host_unregister(memory.data)
                                                  : device.driver().mem_free_host(memory.data);
  }
  if (status == status::kSuccess) {
    if (memory.kind == SlabKind::kRegistered) munmap(memory.data, round_up(memory.nbytes, page_bytes()));
    return;
  }
  if (is_fatal(status)) return;
  const std::lock_guard<std::mutex> lock(device.mutex());
  device.discard(memory);  // the next sweep tries again
}

}  // namespace pinstage
