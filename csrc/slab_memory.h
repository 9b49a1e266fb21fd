// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// The memory of one slab: where it comes from, and how it goes.
//
// cuMemHostAlloc makes every page on one thread, under locks of the driver that other CUDA calls wait for. So large
// slabs are mapped here instead, on huge pages where the system has some, touched by the team (the kernel clears the
// pages on all its threads), and then registered. 256 MB took 145 ms by cuMemHostAlloc, 58 + 6.5 ms this way, with one
// thread touching (H200 host).
//
// A slab is one registration however large it is: a copied range may not span two, and a slot may lie anywhere in its
// slab. On huge pages the call that registers is short: what took time was making the pages.
//
// A mapped slab lies on the NUMA node of its device, where Device::numa_node names one: a device reads the memory of
// another socket through the link between the two. The driver's own memory lies where the driver puts it. That is below
// 8 MB, less than a pool's first slab has by default.
#pragma once

#include <cstdint>

#include "device.h"

namespace pinstage {

enum class SlabKind : std::uint8_t { kAllocated, kRegistered, kPageable };

struct SlabMemory {
  char* data = nullptr;
  std::uint64_t nbytes = 0;
  SlabKind kind = SlabKind::kAllocated;
};

// Pinned memory of `nbytes`, by registration where `*may_register` and that pays. A system that supports none
// (confidential computing) clears `*may_register`; that or any other refusal is followed by cuMemHostAlloc, whose
// status is returned. The device's context is current; no lock of it is held.
Status allocate_pinned(Device& device, std::uint64_t nbytes, bool* may_register, SlabMemory* out);
Status allocate_pageable(std::uint64_t nbytes, SlabMemory* out) noexcept;

// Memory that the driver does not let go of now is handed to Device::discard, for the next sweep.
void free_slab(Device& device, const SlabMemory& memory) noexcept;

}  // namespace pinstage
