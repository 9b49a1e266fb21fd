// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include "scatter.h"

#include <algorithm>
#include <cstring>

#include "device.h"
#include "pool.h"

namespace pinstage {

Function load_scatter_kernel(const Device& device) noexcept {
  const Driver& driver = device.driver();
  if (driver.module_load_data == nullptr || driver.module_get_function == nullptr || driver.launch_kernel == nullptr) {
    return nullptr;
  }
  try {
    const Device::Current current(device);
    const Device::Relaxed relaxed(device);
    Module module = nullptr;
    Function kernel = nullptr;
    if (driver.module_load_data(&module, kScatterPtx) != status::kSuccess) return nullptr;
    // Where the driver loads kernels lazily, this call loads it.
    return driver.module_get_function(&kernel, module, kScatterName) == status::kSuccess ? kernel : nullptr;
  } catch (const Error&) {
    return nullptr;  // the context cannot be made current: whoever copies is told
  }
}

bool can_scatter(const Pool& pool) noexcept { return pool.device().scatter_kernel() != nullptr && !pool.pageable(); }

std::size_t Scatter::add(DevicePtr dst, std::size_t nbytes) {
  const std::size_t from_vector = dst % kScatterVector;
  const std::size_t offset = aligned(end_) + from_vector;
  first_ = std::min(first_, dst);
  last_ = std::max(last_, dst + nbytes);
  if (pieces_.empty()) pieces_.reserve(64);  // one allocation for most slots
  // Cut where dst is a multiple of the piece's size, counted from the vector in which it begins.
  for (std::size_t begin = 0; begin < nbytes;) {
    const std::size_t end = std::min(nbytes, begin + kScatterPieceBytes - (begin == 0 ? from_vector : 0));
    ScatterPiece piece;
    piece.dst = dst + begin;
    piece.nbytes = (end - begin) & 0xffff;
    piece.offset = (offset + begin) & 0xffffffffffff;
    pieces_.push_back(piece);
    begin = end;
  }
  end_ = offset + nbytes;
  return offset;
}

std::size_t Scatter::place(std::size_t nbytes) noexcept {
  const std::size_t offset = aligned(end_);
  end_ = offset + nbytes;
  return offset;
}

void Scatter::write_pieces(char* slot) const noexcept {
  if (!pieces_.empty()) std::memcpy(slot + aligned(end_), pieces_.data(), pieces_.size() * sizeof(ScatterPiece));
}

Status Scatter::launch(const Device& device, const char* slot, Stream stream, const char** call) const noexcept {
  const Function kernel = device.scatter_kernel();
  if (kernel == nullptr) return status::kNotSupported;  // another thread has met a refusal since
  *call = "cuMemHostGetDevicePointer";
  DevicePtr mapped = 0;
  Status status;
  {
    const Device::Relaxed relaxed(device);
    status = device.driver().mem_host_get_device_pointer(&mapped, const_cast<char*>(slot), 0);
  }
  if (status != status::kSuccess) return status;
  *call = "cuLaunchKernel";
  DevicePtr pieces = mapped + aligned(end_);
  DevicePtr first = first_, end = last_;
  void* parameters[] = {&mapped, &pieces, &first, &end};
  return device.driver().launch_kernel(kernel, static_cast<unsigned>(pieces_.size()), 1, 1, kScatterThreads, 1, 1, 0,
                                       stream, parameters, nullptr);
}

Status Scatter::enqueue(Device& device, const char* slot, Stream stream, std::size_t* enqueued,
                        const char** call) const noexcept {
  *enqueued = 0;
  const Status launched = launch(device, slot, stream, call);
  if (launched == status::kSuccess) *enqueued = 1;
  if (!declined(launched)) return launched;
  *call = "cuMemcpyHtoDAsync";
  for (const ScatterPiece& piece : pieces_) {
    const Status status = device.driver().memcpy_htod_async(piece.dst, slot + piece.offset, piece.nbytes, stream);
    if (status != status::kSuccess) return status;
    ++*enqueued;
  }
  // The copies were good, so it was the call that the driver did not like.
  device.refuses_scatter.store(true, std::memory_order_relaxed);
  return status::kSuccess;
}

}  // namespace pinstage
