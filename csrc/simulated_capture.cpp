// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// Stream capture, as cuStreamBeginCapture and cuThreadExchangeStreamCaptureMode document it. A capture is a list of
// steps; each stream in it knows which of them its next step comes after, so that an unjoined stream is found out.
#include <algorithm>

#include "simulated_machine.h"

namespace pinstage::sim {
namespace {

Machine& machine() noexcept { return Machine::get(); }

void merge(std::vector<bool>& into, const std::vector<bool>& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (std::size_t i = 0; i < from.size(); ++i) {
    if (from[i]) into[i] = true;
  }
}

bool comes_after_all(const Queue& queue, const Capture& capture) {
  const auto& before = queue.captured_before;
  return static_cast<std::size_t>(std::count(before.begin(), before.end(), true)) == capture.steps.size();
}

bool is_default(const Queue& queue) { return queue.device->default_queue.get() == &queue; }

bool captures_on(const Device& device) {
  const auto& captures = machine().captures;
  return std::any_of(captures.begin(), captures.end(), [&](const auto& c) { return c->device == &device; });
}

// Whether this thread's unsafe calls would break `capture`.
bool forbids(const Capture& capture) {
  const int mode = this_thread().capture_mode;
  if (!capture.valid || mode == kCaptureModeRelaxed) return false;
  if (capture.thread == std::this_thread::get_id()) return capture.mode != kCaptureModeRelaxed;
  return mode == kCaptureModeGlobal && capture.mode == kCaptureModeGlobal;
}

void leave(Capture& capture) {
  capture.ended = true;
  for (const std::shared_ptr<Device>& device : machine().devices) {
    for (const std::shared_ptr<Queue>& queue : device->queues) {
      if (queue->capture.get() != &capture) continue;
      queue->captured_before.clear();
      queue->capture.reset();  // never the last reference: machine().captures holds one
    }
  }
}

}  // namespace

Status check_unsafe_call() {
  Status status = status::kSuccess;
  for (const std::shared_ptr<Capture>& capture : machine().captures) {
    if (!forbids(*capture)) continue;
    capture->valid = false;
    status = status::kStreamCaptureUnsupported;
  }
  return status;
}

Status check_enqueue(const Queue& queue) {
  if (queue.capture && !queue.capture->valid) return status::kStreamCaptureInvalidated;
  if (!is_default(queue) || !captures_on(*queue.device)) return status::kSuccess;
  if (this_thread().capture_mode != kCaptureModeRelaxed) {
    for (const std::shared_ptr<Capture>& capture : machine().captures) {
      if (capture->device == queue.device) capture->valid = false;
    }
  }
  return status::kStreamCaptureImplicit;
}

Status capture_status(const Queue& queue, int* out) {
  if (is_default(queue) && captures_on(*queue.device)) return status::kStreamCaptureImplicit;
  *out =
      !queue.capture ? kCaptureStatusNone : (queue.capture->valid ? kCaptureStatusActive : kCaptureStatusInvalidated);
  return status::kSuccess;
}

void append_captured(Queue& queue, Step step) {
  const std::size_t position = queue.capture->steps.size();
  queue.capture->steps.push_back(std::move(step));
  queue.captured_before.resize(position + 1);
  queue.captured_before[position] = true;
}

void record_captured(const Queue& queue, EventState& event) {
  event.record.reset();
  event.capture = queue.capture;
  event.captured_before = queue.captured_before;
}

Status wait_captured(Queue& queue, const EventState& event) {
  if (!event.capture) {
    if (!event.record) return status::kSuccess;  // never recorded
    queue.capture->valid = false;
    return kCaptureIsolation;
  }
  if (event.capture->ended) return status::kCapturedEvent;
  if (!event.capture->valid) return status::kStreamCaptureInvalidated;
  if (queue.capture && queue.capture != event.capture) {
    queue.capture->valid = event.capture->valid = false;
    return kCaptureMerge;
  }
  queue.capture = event.capture;
  merge(queue.captured_before, event.captured_before);
  return status::kSuccess;
}

Status begin_capture(const std::shared_ptr<Queue>& queue, int mode) {
  if (is_default(*queue)) return status::kStreamCaptureUnsupported;
  if (queue->capture) return kIllegalState;
  auto capture = std::make_shared<Capture>();
  capture->device = queue->device;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->origin = queue.get();
  machine().captures.push_back(capture);
  queue->capture = std::move(capture);
  return status::kSuccess;
}

Status end_capture(Queue& queue, std::shared_ptr<Capture>* out) {
  if (!queue.capture) return kIllegalState;
  Capture& capture = *queue.capture;
  if (capture.origin != &queue) return kCaptureUnmatched;
  if (capture.mode != kCaptureModeRelaxed && capture.thread != std::this_thread::get_id()) return kCaptureWrongThread;
  const bool joined = comes_after_all(queue, capture);
  *out = queue.capture;
  leave(capture);
  auto& captures = machine().captures;
  captures.erase(std::find(captures.begin(), captures.end(), *out));
  if (!capture.valid) return status::kStreamCaptureInvalidated;
  return joined ? status::kSuccess : kCaptureUnjoined;
}

std::vector<std::shared_ptr<Capture>> abandon_captures(const Device& device) {
  std::vector<std::shared_ptr<Capture>> abandoned;
  auto& captures = machine().captures;
  for (std::size_t i = 0; i < captures.size();) {
    if (captures[i]->device != &device) {
      ++i;
      continue;
    }
    captures[i]->valid = false;
    leave(*captures[i]);
    abandoned.push_back(std::move(captures[i]));
    captures.erase(captures.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return abandoned;
}

}  // namespace pinstage::sim
