// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// pinstage._core: the core as seen from Python. Policy, checks of what a user passes and documentation are in the
// Python package; here are thin handles: errors, waits, devices and tickets. Pools and leases are in pool_bindings.cpp,
// what runs on every copy in snapshot_bindings.cpp.
#include "bindings.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "gather.h"
#include "gil.h"
#include "simulated_driver.h"
#include "team.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pinstage {
namespace {

// Runs on a waiting thread that holds neither the GIL nor a lock. Python handles signals on its main thread alone, so
// no other one need take the GIL for them.
unsigned long main_thread;

bool signal_raised() {
  if (PyThread_get_thread_ident() != main_thread) return false;
  const nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

}  // namespace

Device* cuda_devices[kMaxCudaDevices];

Wait wait_for(std::optional<double> timeout) {
  if (timeout.has_value() && !(*timeout >= 0)) {
    throw Error(ErrorKind::kValue, "a timeout is a number of seconds >= 0, or None; not " + std::to_string(*timeout));
  }
  return {timeout.value_or(-1), &signal_raised};
}

void raise(const Error& error) {
  const char* name = nullptr;
  switch (error.kind()) {
    case ErrorKind::kValue:
      PyErr_SetString(PyExc_ValueError, error.what());
      return;
    case ErrorKind::kIndex:
      PyErr_SetString(PyExc_IndexError, error.what());
      return;
    case ErrorKind::kPoolExhausted:
      name = "PoolExhausted";
      break;
    case ErrorKind::kLeaseState:
      name = "LeaseStateError";
      break;
    case ErrorKind::kCapture:
      name = "CaptureError";
      break;
    case ErrorKind::kDriver:
      name = "DriverError";
      break;
    case ErrorKind::kForked:
      name = "ForkedError";
      break;
    case ErrorKind::kTimeout:
      name = "WaitTimeout";
      break;
  }
  const nb::object type = nb::module_::import_("pinstage.errors").attr(name);
  const nb::object value = error.kind() == ErrorKind::kDriver ? type(error.what(), error.status()) : type(error.what());
  PyErr_SetObject(type.ptr(), value.ptr());
}

namespace {

bool warn_of_waits(Pool& pool) {
  if (!pool.take_wait_notice()) return true;
  const std::string message = "the staging pool of " + pool.device().name() +
                              " is full and callers wait for copies to finish: its default max_bytes of " +
                              std::to_string(pool.options().max_bytes) +
                              " is too small for this program. Set PINSTAGE_MAX_BYTES or pass max_bytes";
  return PyErr_WarnEx(PyExc_RuntimeWarning, message.c_str(), 2) == 0;
}

bool warn_of_pageable_memory(Device& device) {
  if (!device.pageable_notice.take()) return true;
  const Status refused = device.pinning_refused.load();
  const std::string why = refused == status::kSuccess
                              ? "PINSTAGE_PINNED=never"
                              : "the driver refused to pin, with status " + std::to_string(refused);
  const std::string message = "staging for " + device.name() + " uses pageable memory (" + why +
                              "): copies stay correct, but the driver may make them wait for the device, and kernels "
                              "cannot read slots in place";
  return PyErr_WarnEx(PyExc_RuntimeWarning, message.c_str(), 2) == 0;
}

}  // namespace

bool warn(Pool& pool) { return warn_of_waits(pool) && warn_of_pageable_memory(pool.device()); }

Device* device_of(const TensorView& view) {
  if (view.device.type == kDlCuda) return view.device.id < kMaxCudaDevices ? cuda_devices[view.device.id] : nullptr;
  if (view.device.type != kDlCpu) return nullptr;
  const SimulatedDevice* simulated = SimulatedDevice::find(view.data);
  return simulated != nullptr ? static_cast<Device*>(simulated->owner()) : nullptr;
}

void PyDevice::shutdown() {
  // A GPU's memory goes with its process; simulated devices come and go within one.
  if (!simulated.is_none()) device->release_pools();
  device->shutdown();
  device->default_pool = nullptr;
  default_pool = nb::none();
}

PyDevice::~PyDevice() {
  shutdown();
  if (simulated.is_none()) {
    if (cuda_devices[device->index()] == device.get()) cuda_devices[device->index()] = nullptr;
  } else {
    nb::cast<SimulatedDevice&>(simulated).set_owner(nullptr);
  }
}

namespace {

Driver driver_from_addresses(const nb::dict& addresses) {
  Driver driver;
#define PINSTAGE_SET(field, cuda_name, version, required, parameters)                                        \
  if (addresses.contains(cuda_name)) {                                                                       \
    driver.field = reinterpret_cast<decltype(driver.field)>(nb::cast<std::uintptr_t>(addresses[cuda_name])); \
  }                                                                                                          \
  if (required && driver.field == nullptr) throw nb::value_error("the driver lacks " cuda_name);
  PINSTAGE_DRIVER_TABLE(PINSTAGE_SET)
#undef PINSTAGE_SET
  driver.idle = &pause_then_sleep;
  return driver;
}

nb::list driver_entries() {
  nb::list entries;
#define PINSTAGE_LIST(field, cuda_name, version, required, parameters) \
  entries.append(nb::make_tuple(cuda_name, version, required));
  PINSTAGE_DRIVER_TABLE(PINSTAGE_LIST)
#undef PINSTAGE_LIST
  return entries;
}

// The negative control of a race test: a query that always says done.
Status lying_event_query(Event) { return status::kSuccess; }

// --- devices ---

std::unique_ptr<PyDevice> cuda_device(const nb::dict& addresses, std::uintptr_t context, int index) {
  if (index < 0 || index >= kMaxCudaDevices) throw nb::value_error("CUDA device index out of range");
  const Driver driver = driver_from_addresses(addresses);
  std::shared_ptr<Device> device;
  {
    const ReleasedGil no_gil;  // loading its kernel may wait for the device
    device = std::make_shared<Device>(driver, reinterpret_cast<Context>(context), DeviceKind::kCuda, index,
                                      &cuda_current_stream, nullptr);
  }
  cuda_devices[index] = device.get();
  return std::make_unique<PyDevice>(std::move(device), nb::none());
}

std::unique_ptr<PyDevice> simulated_device(nb::object simulated) {
  auto& source = nb::cast<SimulatedDevice&>(simulated);
  const auto stream_of = [](void* self, int) { return static_cast<SimulatedDevice*>(self)->current_stream(); };
  std::shared_ptr<Device> device;
  {
    const ReleasedGil no_gil;
    device = std::make_shared<Device>(source.driver(), source.context(), DeviceKind::kSimulated, source.index(),
                                      stream_of, &source);
  }
  source.set_owner(device.get());
  return std::make_unique<PyDevice>(std::move(device), std::move(simulated));
}

}  // namespace
}  // namespace pinstage

NB_MODULE(_core, m) {
  using namespace pinstage;
  using Unlocked = nb::call_guard<ReleasedGil>;

  m.doc() = "The compiled core of pinstage. Private: use the names of the pinstage package.";
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Error& error) {
      raise(error);
    } catch (const Interrupted&) {
      // The signal handler's exception is set on this thread already.
    }
  });
  nb::set_leak_warnings(false);  // threads that are parked at exit hold what they waited for
  main_thread = nb::cast<unsigned long>(nb::module_::import_("threading").attr("main_thread")().attr("ident"));
  pthread_atfork(nullptr, nullptr, &forget_threads_after_fork);
  load_torch();
  select_isa(std::getenv("PINSTAGE_ISA"));
  bind_simulated_driver(m);
  bind_snapshots(m);
  bind_batch(m);
  bind_lists(m);

  m.def("driver_entries", &driver_entries, nb::sig("def driver_entries() -> list[tuple[str, int, bool]]"),
        "(CUDA name, CUDA version, required) of every entry of the driver table.");
  m.def(
      "lying_event_query", [] { return reinterpret_cast<std::uintptr_t>(&lying_event_query); },
      "Address of a cuEventQuery that always says done: the negative control of race tests.");
  m.def("set_num_threads", [](int threads) { Team::instance().set_threads(threads); }, "threads"_a);
  m.def("num_threads", [] { return Team::instance().threads(); });
  Team::instance();  // reads PINSTAGE_THREADS: a mistake in it shows at import
  m.def("isa", &isa, "The instruction set of the gather kernels in use.");
  m.def(
      "supported_isas",
      [] {
        nb::list names;
        for (const char* name : supported_isas()) names.append(name);
        return names;
      },
      nb::sig("def supported_isas() -> list[str]"), "Those that this CPU can run, best first.");
  m.def("torch_access", &torch_access, "How tensors are read: \"shims\", \"native\" or \"python\", quickest first.");
  m.def("usable_cpus", &usable_cpus, "CPUs that this process may run on.");

  nb::class_<Ticket>(m, "Ticket")
      .def("done", &Ticket::done, Unlocked())
      .def(
          "wait", [](const Ticket& self, std::optional<double> timeout) { self.wait(wait_for(timeout)); },
          "timeout"_a.none() = nb::none(), Unlocked())
      .def(
          "wait_on",
          [](const Ticket& self, std::uintptr_t stream, const PyDevice* device) {
            self.wait_on(stream_of(stream), device != nullptr ? *device->device : *self.device);
          },
          "stream"_a, "device"_a.none(), Unlocked(),
          nb::sig("def wait_on(self, stream: int, device: Device | None) -> None"),
          "`device`: the stream's; None for the ticket's.");

  nb::class_<PyDevice>(m, "Device")
      .def_static("cuda", &cuda_device, "addresses"_a, "context"_a, "index"_a,
                  nb::sig("def cuda(addresses: dict[str, int], context: int, index: int) -> Device"))
      .def_static("simulated", &simulated_device, "device"_a)
      .def_prop_ro("name", [](const PyDevice& self) { return self.device->name(); })
      .def_prop_ro("index", [](const PyDevice& self) { return self.device->index(); })
      .def_prop_rw(
          "poll_batch", [](const PyDevice& self) { return self.device->poll_batch; },
          [](PyDevice& self, std::uint64_t batch) {
            self.device->poll_batch = std::clamp<std::uint64_t>(batch, 1, Fifo::kBatch);
          },
          "Fences that come together before a copy polls them: 1 reuses slots as early as can be. For tests.")
      .def_prop_rw(
          "numa_node",
          [](const PyDevice& self) {
            const int node = self.device->numa_node;
            return node == kNoNumaNode ? std::nullopt : std::optional<int>(node);
          },
          [](PyDevice& self, std::optional<int> node) {
            if (node && (*node < 0 || *node > kMaxNumaNode)) throw nb::value_error("not a NUMA node");
            self.device->numa_node = node.value_or(kNoNumaNode);
          },
          nb::for_setter(nb::arg("node").none()),
          "Where its slabs of 8 MB and more shall lie; None where there is nothing to choose, or the system refused.")
      .def_prop_rw(
          "refuses_scatter", [](const PyDevice& self) { return self.device->scatter_kernel() == nullptr; },
          [](PyDevice& self, bool refuses) { self.device->refuses_scatter.store(refuses); },
          "Pieces of a slot travel by driver copies, not by a kernel: because the driver refused it, or, for tests and "
          "measurements, because this was set.")
      .def_prop_ro(
          "usable", [](const PyDevice& self) { return self.device->usable(); },
          "False after shutdown() and in a forked child.")
      .def_prop_ro(
          "simulation", [](const PyDevice& self) { return self.simulated; },
          nb::sig("def simulation(self) -> SimulatedDevice | None"), "None for a GPU.")
      .def_prop_ro("current_stream",
                   [](const PyDevice& self) { return reinterpret_cast<std::uintptr_t>(self.device->current_stream()); })
      .def(
          "require_not_capturing",
          [](const PyDevice& self, std::uintptr_t stream) {
            const Device::Current current(*self.device);
            self.device->require_not_capturing(stream_of(stream));
          },
          "stream"_a)
      .def(
          "fence", [](const PyDevice& self, std::uintptr_t stream) { return self.device->fence(stream_of(stream)); },
          "stream"_a, Unlocked())
      .def_prop_rw(
          "default_pool",
          [](const PyDevice& self) { return self.device->default_pool != nullptr ? self.default_pool : nb::none(); },
          [](PyDevice& self, nb::object pool) {
            self.device->default_pool = nb::cast<PyPool&>(pool).pool;
            self.default_pool = std::move(pool);
          },
          nb::for_getter(nb::sig("def default_pool(self) -> typing.Any")),
          nb::for_setter(nb::sig("def default_pool(self, pool: Pool) -> None")),
          "The StagingPool of copies without a pool of their own; None at first and once it was closed.")
      .def("shutdown", &PyDevice::shutdown);

  bind_pool(m);
  bind_table(m);
}
