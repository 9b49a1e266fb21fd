// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include "batch.h"

#include <algorithm>

#include "scatter.h"
#include "stage.h"
#include "team.h"

namespace pinstage {
namespace {

// 16 copies of 4 KB cost the host 37 us one by one and 17 us as a batch, 4 of them 9.4 and 5.4, one 2.3 and 2.4 (H200).
constexpr std::size_t kFewestBatched = 3;
// A 2-D copy costs the host what a 1-D one does, about 2 us, and each copy of a batch 1 us: fewer rows stay in it.
constexpr std::size_t kFewestRows = 3;
// A slot of the batch: larger batches go in several, so that the device reads the first while the next is filled. Not
// measured.
constexpr std::size_t kSlotBytes = std::size_t{4} << 20;
// From here on a slot, a fence and a driver call of the copy's own (2 us) are little beside the time of its bytes, 24
// us for 1 MB with four threads (H200's host).
constexpr std::size_t kAloneBytes = std::size_t{1} << 20;

bool on_legacy_stream(Stream stream) {
  return stream == nullptr || stream == reinterpret_cast<Stream>(std::uintptr_t{1});  // CU_STREAM_LEGACY
}

// Sorts by destination unless two of them overlap; returns whether they do.
bool sort_unless_overlapping(std::vector<BatchPiece>* pieces) {
  const auto before = [](const BatchPiece& a, const BatchPiece& b) { return a.dst < b.dst; };
  std::vector<BatchPiece> copy;
  std::vector<BatchPiece>* sorted = pieces;
  if (!std::is_sorted(pieces->begin(), pieces->end(), before)) {
    copy = *pieces;
    std::sort(copy.begin(), copy.end(), before);
    sorted = &copy;
  }
  for (std::size_t i = 1; i < sorted->size(); ++i) {
    const BatchPiece& last = (*sorted)[i - 1];
    if (last.dst + last.plan.span() > (*sorted)[i].dst) return true;
  }
  if (sorted == &copy) pieces->swap(copy);
  return false;
}

AllocationRange range_on_device(const void* context, DevicePtr p) {
  const auto& device = *static_cast<const Device*>(context);
  if (device.driver().mem_get_address_range == nullptr) return {};
  DevicePtr base = 0;
  std::size_t nbytes = 0;
  const Device::Relaxed relaxed(device);
  if (device.driver().mem_get_address_range(&base, &nbytes, p) != status::kSuccess) return {};
  return {base, base + nbytes};
}

std::vector<BatchCopy> one_each(const BatchPiece* pieces, std::size_t count) {
  std::vector<BatchCopy> copies;
  copies.reserve(count);
  for (std::size_t i = 0; i < count; ++i) copies.push_back({pieces[i].plan, pieces[i].dst, i, 1, 0});
  return copies;
}

// What one slot of the batch becomes.
class Submission {
 public:
  Submission(Pool& pool, Stream stream, const BatchPiece* pieces, std::size_t count, bool in_order)
      : pool_(pool),
        device_(pool.device()),
        stream_(stream),
        copies_(in_order ? one_each(pieces, count) : merge_pieces(pieces, count, &range_on_device, &device_)) {
    segments_.reserve(count);
    if (!in_order) choose_way();
    for (std::size_t i = 0; i < copies_.size(); ++i) {
      BatchCopy& copy = copies_[i];
      const bool scattered = way_ == Way::kScatter && i < together_;
      copy.offset = scattered ? slot_.add(copy.dst, copy.plan.width) : slot_.place(copy.plan.nbytes());
      std::size_t offset = copy.offset;
      for (std::size_t piece = copy.first; piece < copy.first + copy.count; ++piece) {
        segments_.push_back({pieces[piece].src, pieces[piece].plan.nbytes(), offset});
        offset += segments_.back().nbytes;
      }
      end_ = offset;
    }
    if (way_ != Way::kBatch) return;
    dsts_.reserve(together_);
    srcs_.resize(together_);
    sizes_.reserve(together_);
    for (std::size_t i = 0; i < together_; ++i) {
      dsts_.push_back(copies_[i].dst);
      sizes_.push_back(copies_[i].plan.width);
    }
  }

  std::size_t slot_bytes() const noexcept { return slot_.slot_bytes(); }

  void fill(char* slot) const {
    slot_.write_pieces(slot);
    copy_segments_in_parallel(slot, segments_.data(), segments_.size(), 0, end_);
  }

  Status enqueue(const char* slot, std::size_t* enqueued, const char** call) noexcept {
    std::size_t done = 0;
    bool refused = false;
    if (way_ == Way::kScatter) {
      const Status status = slot_.enqueue(device_, slot, stream_, enqueued, call);
      if (status != status::kSuccess) return status;
      done = together_;
    } else if (way_ == Way::kBatch && !pool_.pageable()) {
      // Of pageable sources the documentation promises nothing. Whether the slot is pinned is known only now that it is
      // taken: the driver may have refused to pin the pool's first slab.
      *call = "cuMemcpyBatchAsync";
      const Status status = enqueue_batched(slot);
      refused = declined(status);
      if (status != status::kSuccess && !refused) return status;
      if (!refused) done = *enqueued = together_;
    }
    for (std::size_t i = done; i < copies_.size(); ++i) {
      std::size_t taken = 0;
      const BatchCopy& copy = copies_[i];
      const Status status =
          enqueue_copy(device_.driver(), copy.plan, copy.dst, slot + copy.offset, stream_, &taken, call);
      *enqueued += taken;
      if (status != status::kSuccess) return status;
    }
    // The copies were good, so it was the call that the driver did not like.
    if (refused) device_.refuses_batches.store(true, std::memory_order_relaxed);
    return status::kSuccess;
  }

 private:
  // How the dense copies go, if they go together.
  enum class Way { kLoop, kScatter, kBatch };

  void choose_way() {
    const auto loose =
        std::stable_partition(copies_.begin(), copies_.end(), [](const BatchCopy& copy) { return copy.plan.dense(); });
    together_ = static_cast<std::size_t>(loose - copies_.begin());
    std::size_t nbytes = 0;
    for (std::size_t i = 0; i < together_; ++i) nbytes += copies_[i].plan.width;
    if (together_ >= kFewestScattered + nbytes / kScatteredBytesPerCopy && nbytes <= kMostScatteredBytes &&
        can_scatter(pool_)) {
      way_ = Way::kScatter;
    } else if (together_ >= kFewestBatched && !on_legacy_stream(stream_) &&
               device_.driver().memcpy_batch_async != nullptr &&
               !device_.refuses_batches.load(std::memory_order_relaxed)) {
      way_ = Way::kBatch;
    }
  }

  Status enqueue_batched(const char* slot) noexcept {
    for (std::size_t i = 0; i < together_; ++i) srcs_[i] = reinterpret_cast<DevicePtr>(slot + copies_[i].offset);
    MemcpyAttributes attributes{};
    attributes.src_access_order = kSourceOrderStream;
    std::size_t first = 0;
    return device_.driver().memcpy_batch_async(dsts_.data(), srcs_.data(), sizes_.data(), together_, &attributes,
                                               &first, 1, stream_);
  }

  const Pool& pool_;
  Device& device_;
  const Stream stream_;
  std::vector<BatchCopy> copies_;  // those that go together first
  Way way_ = Way::kLoop;
  std::size_t together_ = 0;
  Scatter slot_;
  std::vector<Segment> segments_;
  std::size_t end_ = 0;  // of their bytes
  std::vector<DevicePtr> dsts_, srcs_;
  std::vector<std::size_t> sizes_;
};

void stage_slot(Pool& pool, Stream stream, const BatchPiece* pieces, std::size_t count, bool in_order, const Wait& wait,
                bool* begun) {
  Submission submission(pool, stream, pieces, count, in_order);
  pool.stage_several(
      submission.slot_bytes(), stream, wait, [&](char* slot) { submission.fill(slot); },
      [&](const char* slot, std::size_t* enqueued, const char** call) {
        *begun = true;
        return submission.enqueue(slot, enqueued, call);
      });
}

void stage_alone(Pool& pool, Stream stream, const BatchPiece& piece, const Wait& wait, bool* begun) {
  TensorView dst, src;
  dst.data = reinterpret_cast<char*>(piece.dst);
  src.data = const_cast<char*>(piece.src);
  try {
    stage_copy(pool, piece.plan, dst, src, stream, wait);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kDriver) *begun = true;  // as far as can be told
    throw;
  }
  *begun = true;
}

void stage_part(BatchPart& part, const Wait& wait, bool* begun) {
  Pool& pool = *part.pool;
  pool.device().require_usable();
  const Device::Current current(pool.device());
  const bool in_order = sort_unless_overlapping(&part.pieces);
  const std::size_t room = std::min<std::size_t>(kSlotBytes, pool.options().max_bytes);
  const BatchPiece* const end = part.pieces.data() + part.pieces.size();
  for (const BatchPiece* first = part.pieces.data(); first != end;) {
    std::size_t nbytes = 0;
    const BatchPiece* last = first;
    for (; last != end; ++last) {
      const std::size_t more = Scatter::most_bytes(last->plan.nbytes());
      if (more >= kAloneBytes || nbytes + more > room) break;
      nbytes += more;
    }
    if (last == first) {
      stage_alone(pool, part.stream, *first++, wait, begun);
    } else {
      stage_slot(pool, part.stream, first, static_cast<std::size_t>(last - first), in_order, wait, begun);
      first = last;
    }
  }
}

}  // namespace

std::vector<BatchCopy> merge_pieces(const BatchPiece* pieces, std::size_t count,
                                    AllocationRange (*range_of)(const void* context, DevicePtr p),
                                    const void* context) {
  AllocationRange known;
  // Do `from` and what lies `nbytes` further on belong to one allocation?
  const auto in_one = [&](DevicePtr from, std::size_t nbytes) {
    if (!known.holds(from, nbytes)) known = range_of(context, from);
    return known.holds(from, nbytes);
  };
  std::vector<BatchCopy> runs;
  runs.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    const BatchPiece& piece = pieces[i];
    if (!runs.empty() && piece.plan.dense() && runs.back().plan.dense()) {
      BatchCopy& run = runs.back();
      const std::size_t both = run.plan.width + piece.plan.width;
      if (run.dst + run.plan.width == piece.dst && in_one(run.dst, both)) {
        run.plan.width = both;
        ++run.count;
        continue;
      }
    }
    runs.push_back({piece.plan, piece.dst, i, 1, 0});
  }

  std::vector<BatchCopy> copies;
  copies.reserve(runs.size());
  for (std::size_t i = 0; i < runs.size();) {
    BatchCopy copy = runs[i];
    std::size_t rows = 1;
    if (copy.plan.dense() && i + 1 < runs.size()) {
      const std::size_t width = copy.plan.width, pitch = runs[i + 1].dst - copy.dst;
      while (pitch <= kMaxPitch && i + rows < runs.size() && runs[i + rows].plan.dense() &&
             runs[i + rows].plan.width == width && runs[i + rows].dst == copy.dst + rows * pitch) {
        ++rows;
      }
      if (rows >= kFewestRows && !in_one(copy.dst, (rows - 1) * pitch + width)) {
        rows = in_one(copy.dst, width) ? (known.end - copy.dst - width) / pitch + 1 : 1;
      }
      if (rows < kFewestRows) rows = 1;
      copy.plan.height = rows;
      copy.plan.pitch = rows > 1 ? pitch : 0;
    }
    for (std::size_t row = 1; row < rows; ++row) copy.count += runs[i + row].count;
    copies.push_back(copy);
    i += rows;
  }
  return copies;
}

void stage_batch(std::vector<BatchPart>& parts, const Wait& wait, bool* begun) {
  if (parts.size() > 1) {
    for (const BatchPart& part : parts) {
      const Device& device = part.pool->device();
      device.require_usable();
      const Device::Current current(device);
      device.require_not_capturing(part.stream);
    }
  }
  for (BatchPart& part : parts) stage_part(part, wait, begun);
}

}  // namespace pinstage
