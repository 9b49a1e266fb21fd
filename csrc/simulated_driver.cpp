// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// The driver table's functions over the simulated machine. They find their device as CUDA's do: by the thread's current
// context, and by the handles they are given.
#include <cstring>
#include <new>
#include <utility>

#include "simulated_machine.h"

namespace pinstage::sim {
namespace {

constexpr std::size_t kMaxPitch = (std::size_t{1} << 31) - 1;  // CU_DEVICE_ATTRIBUTE_MAX_PITCH
constexpr unsigned kMemoryTypeUnified = 4;
constexpr int kSourceOrderDuringCall = 2, kSourceOrderAny = 3;

Machine& machine() noexcept { return Machine::get(); }

// Every function of the table runs through here, so that no exception leaves it. `body` owns no step: those are
// declared outside, to be destroyed without the lock.
template <class Body>
Status call(Body body) noexcept {
  try {
    Lock lock(machine().mutex);
    run_some_random(lock);
    return body(lock);
  } catch (const std::bad_alloc&) {
    return status::kOutOfMemory;
  } catch (...) {
    return status::kUnknown;
  }
}

Status enter_current(Entry entry, Device** out) {
  *out = current_device();
  return *out == nullptr ? status::kInvalidContext : enter(**out, entry);
}

Status enter_stream(Entry entry, Stream stream, std::shared_ptr<Queue>* out) {
  Device* current = current_device();
  if (current == nullptr) return status::kInvalidContext;
  *out = find_queue(*current, stream);
  return *out ? enter(*(*out)->device, entry) : status::kInvalidHandle;
}

EventState* find_event(Event event) {
  const auto found = machine().events.find(event);
  return found == machine().events.end() ? nullptr : &found->second;
}

// For calls that concern the process rather than a device, so that they too can be counted and made to fail.
Status enter_any(Entry entry) {
  Device* device = current_device();
  if (device == nullptr && !machine().devices.empty()) device = machine().devices.front().get();
  return device == nullptr ? status::kSuccess : enter(*device, entry);
}

// --- host memory ---

Status mem_host_alloc(void** out, std::size_t nbytes, unsigned) {
  return call([&](Lock&) -> Status {
    Device* device;
    if (const Status status = enter_current(Entry::mem_host_alloc, &device)) return status;
    if (const Status status = check_unsafe_call()) return status;
    return host_alloc(*device, out, nbytes);
  });
}

Status mem_host_register(void* p, std::size_t nbytes, unsigned) {
  return call([&](Lock&) -> Status {
    Device* device;
    if (const Status status = enter_current(Entry::mem_host_register, &device)) return status;
    if (const Status status = check_unsafe_call()) return status;
    return host_register(*device, p, nbytes);
  });
}

Status release_host(Entry entry, void* p, bool allocated) {
  return call([&](Lock& lock) -> Status {
    Device* device;
    if (const Status status = enter_current(entry, &device)) return status;
    if (const Status status = check_unsafe_call()) return status;
    return host_release(lock, p, allocated);
  });
}

Status mem_free_host(void* p) { return release_host(Entry::mem_free_host, p, true); }

Status mem_host_unregister(void* p) { return release_host(Entry::mem_host_unregister, p, false); }

Status mem_host_get_device_pointer(DevicePtr* out, void* p, unsigned flags) {
  return call([&](Lock&) -> Status {
    Device* device;
    if (const Status status = enter_current(Entry::mem_host_get_device_pointer, &device)) return status;
    if (out == nullptr || flags != 0 || find_host(p) == nullptr) return status::kInvalidValue;
    *out = reinterpret_cast<DevicePtr>(p);
    return status::kSuccess;
  });
}

// --- copies ---

Status mem_get_address_range(DevicePtr* base, std::size_t* nbytes, DevicePtr p) {
  return call([&](Lock&) -> Status {
    Device* device;
    if (const Status status = enter_current(Entry::mem_get_address_range, &device)) return status;
    const HeapBlock* block = find_block(reinterpret_cast<const void*>(p));
    if (block == nullptr) return status::kNotFound;
    if (base != nullptr) *base = reinterpret_cast<DevicePtr>(block->data);
    if (nbytes != nullptr) *nbytes = block->nbytes;
    return status::kSuccess;
  });
}

// Submits what `describe` adds to a copy step; a step without copies is a no-op.
template <class Describe>
Status submit_copy(Entry entry, Stream stream, Describe describe, std::shared_ptr<void> keep_alive = nullptr) {
  Step step;
  step.kind = Kind::kCopy;
  step.keep_alive = std::move(keep_alive);
  return call([&](Lock& lock) -> Status {
    std::shared_ptr<Queue> queue;
    if (const Status status = enter_stream(entry, stream, &queue)) return status;
    if (const Status status = check_enqueue(*queue)) return status;
    if (const Status status = describe(*queue, step.copies)) return status;
    if (step.copies.empty()) return status::kSuccess;
    if (const Status status = submit(lock, queue, step)) return status;
    run_eager(lock);
    return status::kSuccess;
  });
}

Status add_copy(std::uintptr_t dst, std::uintptr_t src, const Extent& extent, std::vector<Copy>& copies) {
  if (extent.width == 0 || extent.height == 0 || extent.depth == 0) return status::kSuccess;
  Copy copy;
  if (const Status status = make_copy(dst, src, extent, &copy)) return status;
  copies.push_back(std::move(copy));
  return status::kSuccess;
}

Status memcpy_htod_async(DevicePtr dst, const void* src, std::size_t nbytes, Stream stream) {
  return copy_keeping_alive(dst, src, nbytes, stream, nullptr);
}

// One side of a 2-D or 3-D copy. A pitch of zero is taken for a mistake unless there is but one row.
struct Side {
  unsigned type;
  const void* host;
  DevicePtr device;
  std::size_t x, y, z, pitch, height;
};

Status first_byte(const Side& side, const Extent& extent, std::uintptr_t* out) {
  const bool one_row = extent.height == 1 && extent.depth == 1 && side.y == 0 && side.z == 0;
  const bool one_plane = extent.depth == 1 && side.z == 0;
  if (side.pitch > kMaxPitch || (side.pitch != 0 && side.pitch < side.x + extent.width)) return status::kInvalidValue;
  if (side.pitch == 0 && !one_row) return status::kInvalidValue;
  if (!one_plane && side.height < side.y + extent.height) return status::kInvalidValue;
  if (side.type == kMemoryTypeHost) {
    *out = reinterpret_cast<std::uintptr_t>(side.host);
  } else if (side.type == kMemoryTypeDevice || side.type == kMemoryTypeUnified) {
    *out = side.device;
  } else {
    return status::kInvalidValue;  // arrays are not simulated
  }
  if (*out == 0) return status::kInvalidValue;
  *out += (side.z * side.height + side.y) * side.pitch + side.x;
  return status::kSuccess;
}

Status add_pitched(const Side& src, const Side& dst, Extent extent, std::vector<Copy>& copies) {
  if (extent.width == 0 || extent.height == 0 || extent.depth == 0) return status::kSuccess;
  std::uintptr_t from, to;
  if (const Status status = first_byte(src, extent, &from)) return status;
  if (const Status status = first_byte(dst, extent, &to)) return status;
  extent.src_pitch = src.pitch;
  extent.dst_pitch = dst.pitch;
  if (extent.depth > 1 && (__builtin_mul_overflow(src.pitch, src.height, &extent.src_plane) ||
                           __builtin_mul_overflow(dst.pitch, dst.height, &extent.dst_plane))) {
    return status::kInvalidValue;
  }
  return add_copy(to, from, extent, copies);
}

Status memcpy_2d_async(const Memcpy2D* copy, Stream stream) {
  return submit_copy(Entry::memcpy_2d_async, stream, [&](const Queue&, std::vector<Copy>& copies) -> Status {
    if (copy == nullptr) return status::kInvalidValue;
    const Memcpy2D& c = *copy;
    const Side src{c.src_type, c.src_host, c.src_device, c.src_x, c.src_y, 0, c.src_pitch, 0};
    const Side dst{c.dst_type, c.dst_host, c.dst_device, c.dst_x, c.dst_y, 0, c.dst_pitch, 0};
    Extent extent;
    extent.width = c.width;
    extent.height = c.height;
    return add_pitched(src, dst, extent, copies);
  });
}

Status memcpy_3d_async(const Memcpy3D* copy, Stream stream) {
  return submit_copy(Entry::memcpy_3d_async, stream, [&](const Queue&, std::vector<Copy>& copies) -> Status {
    if (copy == nullptr || copy->src_lod != 0 || copy->dst_lod != 0) return status::kInvalidValue;
    const Memcpy3D& c = *copy;
    const Side src{c.src_type, c.src_host, c.src_device, c.src_x, c.src_y, c.src_z, c.src_pitch, c.src_height};
    const Side dst{c.dst_type, c.dst_host, c.dst_device, c.dst_x, c.dst_y, c.dst_z, c.dst_pitch, c.dst_height};
    Extent extent;
    extent.width = c.width;
    extent.height = c.height;
    extent.depth = c.depth;
    return add_pitched(src, dst, extent, copies);
  });
}

bool attributes_valid(const MemcpyAttributes* attrs, const std::size_t* indices, std::size_t num_attrs,
                      std::size_t count) {
  if (attrs == nullptr || indices == nullptr || num_attrs == 0 || num_attrs > count || indices[0] != 0) return false;
  for (std::size_t i = 0; i < num_attrs; ++i) {
    if (attrs[i].src_access_order < kSourceOrderStream || attrs[i].src_access_order > kSourceOrderAny) return false;
    if (indices[i] >= count || (i > 0 && indices[i] <= indices[i - 1])) return false;
  }
  return true;
}

// Rejects the legacy default stream, and cannot be captured: it then fails without breaking the capture, so that a
// caller who does not look at the status loses the copies.
Status memcpy_batch_async(DevicePtr* dsts, DevicePtr* srcs, std::size_t* sizes, std::size_t count,
                          MemcpyAttributes* attrs, std::size_t* attr_indices, std::size_t num_attrs, Stream stream) {
  return submit_copy(Entry::memcpy_batch_async, stream, [&](const Queue& queue, std::vector<Copy>& copies) -> Status {
    if (queue.handle == nullptr || dsts == nullptr || srcs == nullptr || sizes == nullptr || count == 0) {
      return status::kInvalidValue;
    }
    if (queue.capture) return status::kStreamCaptureUnsupported;
    if (!attributes_valid(attrs, attr_indices, num_attrs, count)) return status::kInvalidValue;
    for (std::size_t i = 0, attr = 0; i < count; ++i) {
      if (attr + 1 < num_attrs && attr_indices[attr + 1] == i) ++attr;
      if (sizes[i] == 0) return status::kInvalidValue;
      Extent extent;
      extent.width = sizes[i];
      if (const Status status = add_copy(dsts[i], srcs[i], extent, copies)) return status;
      if (attrs[attr].src_access_order == kSourceOrderDuringCall) take_snapshot(copies.back());
    }
    return status::kSuccess;
  });
}

// --- the kernel of scatter.h: the only one that there is ---

Status module_load_data(Module* out, const void* image) {
  return call([&](Lock&) -> Status {
    Device* device;
    if (const Status status = enter_current(Entry::module_load_data, &device)) return status;
    if (const Status status = check_unsafe_call()) return status;
    if (out == nullptr || image == nullptr) return status::kInvalidValue;
    if (std::strcmp(static_cast<const char*>(image), kScatterPtx) != 0) return status::kInvalidPtx;
    *out = device->scatter_module;
    return status::kSuccess;
  });
}

Status module_get_function(Function* out, Module module, const char* name) {
  return call([&](Lock&) -> Status {
    Device* device;
    if (const Status status = enter_current(Entry::module_get_function, &device)) return status;
    if (const Status status = check_unsafe_call()) return status;
    if (out == nullptr || name == nullptr) return status::kInvalidValue;
    if (module != device->scatter_module) return status::kInvalidHandle;
    if (std::strcmp(name, kScatterName) != 0) return status::kNotFound;
    *out = device->scatter_module;
    return status::kSuccess;
  });
}

Status launch_kernel(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                     unsigned block_y, unsigned block_z, unsigned, Stream stream, void** parameters, void** extra) {
  Step step;
  step.kind = Kind::kCopy;
  return call([&](Lock& lock) -> Status {
    std::shared_ptr<Queue> queue;
    if (const Status status = enter_stream(Entry::launch_kernel, stream, &queue)) return status;
    if (const Status status = check_enqueue(*queue)) return status;
    if (function == nullptr || function != queue->device->scatter_module || parameters == nullptr || extra != nullptr ||
        grid_x == 0 || grid_y != 1 || grid_z != 1 || block_x != kScatterThreads || block_y != 1 || block_z != 1) {
      return status::kInvalidValue;
    }
    const auto parameter = [&](int i) { return *static_cast<const DevicePtr*>(parameters[i]); };
    step.scatter =
        ScatterLaunch{reinterpret_cast<const char*>(parameter(0)), reinterpret_cast<const ScatterPiece*>(parameter(1)),
                      parameter(2), parameter(3), grid_x};
    // Now too, for what the step keeps alive. A launch is not told of an address that is wrong.
    make_scatter(*step.scatter, &step.copies);
    if (const Status status = submit(lock, queue, step)) return status;
    run_eager(lock);
    return status::kSuccess;
  });
}

// --- events and streams ---

Status event_create(Event* out, unsigned) {
  return call([&](Lock&) -> Status {
    Device* device;
    if (const Status status = enter_current(Entry::event_create, &device)) return status;
    if (out == nullptr) return status::kInvalidValue;
    *out = machine().new_handle();
    machine().events.emplace(*out, EventState{device, nullptr, nullptr, {}});
    return status::kSuccess;
  });
}

Status event_record(Event event, Stream stream) {
  Step step;
  step.kind = Kind::kRecord;
  return call([&](Lock& lock) -> Status {
    std::shared_ptr<Queue> queue;
    if (const Status status = enter_stream(Entry::event_record, stream, &queue)) return status;
    const EventState* before = find_event(event);
    if (before == nullptr || before->device != queue->device) return status::kInvalidHandle;
    if (const Status status = check_enqueue(*queue)) return status;
    if (queue->capture) {
      record_captured(*queue, *find_event(event));
      return status::kSuccess;
    }
    const auto record = std::make_shared<Record>();
    step.record = record;
    if (const Status status = submit(lock, queue, step)) return status;
    if (EventState* state = find_event(event)) {  // submit() may have waited: the event may be gone
      state->record = record;
      state->capture.reset();
      state->captured_before.clear();
    }
    run_eager(lock);
    return status::kSuccess;
  });
}

// The event of a query or a wait, or why it must fail. Touching a captured event breaks its capture in every mode.
Status enter_event(Entry entry, Event event, EventState** out) {
  *out = find_event(event);
  if (*out == nullptr) return status::kInvalidHandle;
  if (const Status status = enter(*(*out)->device, entry)) return status;
  if ((*out)->capture) {
    (*out)->capture->valid = false;
    return status::kCapturedEvent;
  }
  return check_unsafe_call();
}

Status event_query(Event event) {
  return call([&](Lock&) -> Status {
    EventState* state;
    if (const Status status = enter_event(Entry::event_query, event, &state)) return status;
    if (state->device->lying_queries || !state->record || state->record->done) return status::kSuccess;
    return state->device->closed ? status::kDeinitialized : status::kNotReady;
  });
}

Status event_synchronize(Event event) {
  return call([&](Lock& lock) -> Status {
    EventState* state;
    if (const Status status = enter_event(Entry::event_synchronize, event, &state)) return status;
    const std::shared_ptr<Record> record = state->record;
    return record ? wait_for_record(lock, record, *state->device) : status::kSuccess;
  });
}

Status event_destroy(Event event) {
  return call([&](Lock&) -> Status {
    EventState* state = find_event(event);
    if (state == nullptr) return status::kInvalidHandle;
    if (const Status status = enter(*state->device, Entry::event_destroy)) return status;
    machine().events.erase(event);
    return status::kSuccess;
  });
}

Status stream_wait_event(Stream stream, Event event, unsigned) {
  Step step;
  step.kind = Kind::kWait;
  return call([&](Lock& lock) -> Status {
    std::shared_ptr<Queue> queue;
    if (const Status status = enter_stream(Entry::stream_wait_event, stream, &queue)) return status;
    const EventState* state = find_event(event);
    if (state == nullptr) return status::kInvalidHandle;
    if (const Status status = check_enqueue(*queue)) return status;
    if (queue->capture || state->capture) return wait_captured(*queue, *state);
    if (!state->record || state->record->done) return status::kSuccess;
    step.record = state->record;
    if (const Status status = submit(lock, queue, step)) return status;
    run_eager(lock);
    return status::kSuccess;
  });
}

Status stream_is_capturing(Stream stream, int* out) {
  return call([&](Lock&) -> Status {
    std::shared_ptr<Queue> queue;
    if (const Status status = enter_stream(Entry::stream_is_capturing, stream, &queue)) return status;
    return out == nullptr ? status::kInvalidValue : capture_status(*queue, out);
  });
}

Status stream_get_id(Stream stream, unsigned long long* out) {
  return call([&](Lock&) -> Status {
    std::shared_ptr<Queue> queue;
    if (const Status status = enter_stream(Entry::stream_get_id, stream, &queue)) return status;
    if (out == nullptr) return status::kInvalidValue;
    *out = queue->id;
    return status::kSuccess;
  });
}

// --- contexts ---

Status ctx_get_current(Context* out) {
  return call([&](Lock&) -> Status {
    if (const Status status = enter_any(Entry::ctx_get_current)) return status;
    if (out == nullptr) return status::kInvalidValue;
    const std::vector<Context>& stack = this_thread().contexts;
    *out = stack.empty() ? nullptr : stack.back();
    return status::kSuccess;
  });
}

Status ctx_push_current(Context context) {
  return call([&](Lock&) -> Status {
    const auto found = machine().contexts.find(context);
    if (found == machine().contexts.end()) return status::kInvalidContext;
    if (const Status status = enter(*found->second, Entry::ctx_push_current)) return status;
    this_thread().contexts.push_back(context);
    return status::kSuccess;
  });
}

Status ctx_pop_current(Context* out) {
  return call([&](Lock&) -> Status {
    Device* device;
    if (const Status status = enter_current(Entry::ctx_pop_current, &device)) return status;
    std::vector<Context>& stack = this_thread().contexts;
    if (out != nullptr) *out = stack.back();
    stack.pop_back();
    return status::kSuccess;
  });
}

Status ctx_synchronize() {
  return call([&](Lock& lock) -> Status {
    Device* device;
    if (const Status status = enter_current(Entry::ctx_synchronize, &device)) return status;
    if (const Status status = check_unsafe_call()) return status;
    return wait_for_device(lock, *device, Waiting::kAsDriver);
  });
}

Status thread_exchange_capture_mode(int* mode) {
  return call([&](Lock&) -> Status {
    if (const Status status = enter_any(Entry::thread_exchange_capture_mode)) return status;
    if (mode == nullptr || *mode < kCaptureModeGlobal || *mode > kCaptureModeRelaxed) return status::kInvalidValue;
    std::swap(*mode, this_thread().capture_mode);
    return status::kSuccess;
  });
}

// --- errors ---

Status get_error_name(Status error, const char** out) {
  return call([&](Lock&) -> Status {
    if (const Status status = enter_any(Entry::get_error_name)) return status;
    if (out == nullptr) return status::kInvalidValue;
    *out = error_name(error);
    return status::kSuccess;
  });
}

Status get_error_string(Status error, const char** out) {
  return call([&](Lock&) -> Status {
    if (const Status status = enter_any(Entry::get_error_string)) return status;
    if (out == nullptr) return status::kInvalidValue;
    *out = error_text(error);
    return status::kSuccess;
  });
}

Status idle_between_polls(unsigned) {
  return call([](Lock& lock) { return idle(lock); });
}

}  // namespace

Status copy_keeping_alive(DevicePtr dst, const void* src, std::size_t nbytes, Stream stream,
                          std::shared_ptr<void> owner) {
  const auto describe = [&](const Queue&, std::vector<Copy>& copies) {
    Extent extent;
    extent.width = nbytes;
    return add_copy(dst, reinterpret_cast<std::uintptr_t>(src), extent, copies);
  };
  return submit_copy(Entry::memcpy_htod_async, stream, describe, std::move(owner));
}

Driver driver_table() noexcept {
  Driver driver;
#define PINSTAGE_FILL(field, name, version, required, parameters) driver.field = &field;
  PINSTAGE_DRIVER_TABLE(PINSTAGE_FILL)
#undef PINSTAGE_FILL
  driver.idle = &idle_between_polls;
  return driver;
}

}  // namespace pinstage::sim
