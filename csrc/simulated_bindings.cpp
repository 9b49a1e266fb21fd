// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// The simulated device for pinstage/testing/simulated.py, which gives it its public face and raises on statuses.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "bindings.h"
#include "gil.h"
#include "simulated_driver.h"
#include "simulated_machine.h"

namespace nb = nanobind;

namespace pinstage {
namespace {

// A Python object that may be used and dropped on any thread, with or without the GIL. Steps are run and destroyed
// under no lock, so that taking the GIL here cannot deadlock. At interpreter exit it is leaked.
std::shared_ptr<PyObject> hold_object(nb::object held) {
  return {held.release().ptr(), [](PyObject* object) {
            if (!nb::is_alive()) return;
            const nb::gil_scoped_acquire gil;
            Py_DECREF(object);
          }};
}

// The error indicator is saved, because the thread that happens to run the step may be handling an exception.
void call_held(PyObject* callable) {
  if (!nb::is_alive()) return;
  const nb::gil_scoped_acquire gil;
  const nb::error_scope indicator;
  nb::borrow<nb::callable>(callable)();
}

using PythonKernel = nb::typed<nb::callable, nb::object()>;

Status launch(SimulatedDevice& device, std::uintptr_t stream, PythonKernel function) {
  Kernel kernel = [held = hold_object(std::move(function))] { call_held(held.get()); };
  const ReleasedGil released;
  return device.launch(stream_of(stream), std::move(kernel));
}

// The exception of the first kernel that failed, once, or None. It is handed out rather than kept, because its
// traceback may refer to the device, and Python's garbage collector cannot see a reference from here.
nb::object take_kernel_error(SimulatedDevice& device) {
  const std::exception_ptr failure = device.take_kernel_failure();
  if (!failure) return nb::none();
  try {
    std::rethrow_exception(failure);
  } catch (const nb::python_error& error) {
    return nb::borrow(error.value());
  } catch (const std::exception& error) {
    return nb::module_::import_("builtins").attr("RuntimeError")(error.what());
  }
}

std::pair<Status, std::shared_ptr<SimulatedLatch>> hold(SimulatedDevice& device, std::uintptr_t stream,
                                                        double timeout) {
  std::shared_ptr<SimulatedLatch> latch;
  const ReleasedGil released;
  const Status status = device.hold(stream_of(stream), timeout, &latch);
  return {status, std::move(latch)};
}

// A graph as Python sees it: opaque.
struct HeldGraph {
  SimulatedGraph graph;
};

std::pair<Status, HeldGraph> end_capture(SimulatedDevice& device, std::uintptr_t stream) {
  HeldGraph held;
  const Status status = device.end_capture(stream_of(stream), &held.graph);
  return {status, std::move(held)};
}

Status copy_async(SimulatedDevice& device, DevicePtr dst, std::uintptr_t src, std::size_t nbytes, std::uintptr_t stream,
                  nb::object owner) {
  std::shared_ptr<PyObject> held = hold_object(std::move(owner));
  const ReleasedGil released;
  return device.copy_async(dst, reinterpret_cast<const void*>(src), nbytes, stream_of(stream), std::move(held));
}

std::map<std::string, std::uint64_t> calls(const SimulatedDevice& device) {
  std::map<std::string, std::uint64_t> counts;
  for (const auto& [name, count] : device.calls()) counts.emplace(name, count);
  return counts;
}

std::pair<Status, std::uintptr_t> create_stream(SimulatedDevice& device) {
  Stream stream = nullptr;
  const Status status = device.create_stream(&stream);
  return {status, reinterpret_cast<std::uintptr_t>(stream)};
}

std::pair<std::string, std::string> error_texts(Status status) {
  return {sim::error_name(status), sim::error_text(status)};
}

}  // namespace

void bind_simulated_driver(nb::module_& m) {
  using ReleaseGil = nb::call_guard<ReleasedGil>;

  nb::enum_<Schedule>(m, "Schedule", "When the steps of a simulated device run.")
      .value("LATE", Schedule::kLate)
      .value("EAGER", Schedule::kEager)
      .value("RANDOM", Schedule::kRandom)
      .value("MANUAL", Schedule::kManual);

  nb::class_<SimulatedLatch>(m, "SimulatedLatch", "A step that holds a simulated stream.")
      .def("release", &SimulatedLatch::release, ReleaseGil())
      .def_prop_ro("held", &SimulatedLatch::held)
      .def_prop_ro("timed_out", &SimulatedLatch::timed_out);

  nb::class_<HeldGraph>(m, "SimulatedGraph", "Captured steps of a simulated stream.");

  nb::class_<SimulatedDevice>(m, "SimulatedDevice",
                              "The core of pinstage.testing.SimulatedDevice. Methods return CUresult values.")
      .def(nb::init<int, Schedule, std::uint64_t, std::size_t, bool>(), nb::arg("index"), nb::arg("schedule"),
           nb::arg("seed"), nb::arg("queue_depth") = SimulatedDevice::kQueueDepth, nb::arg("lying_queries") = false)
      .def("close", &SimulatedDevice::close, ReleaseGil())
      .def_prop_ro("closed", &SimulatedDevice::closed)
      .def_prop_ro("index", &SimulatedDevice::index)
      .def_prop_ro("context", [](const SimulatedDevice& d) { return reinterpret_cast<std::uintptr_t>(d.context()); })
      .def_prop_ro("schedule", &SimulatedDevice::schedule)
      .def_static(
          "find", [](std::uintptr_t p) { return SimulatedDevice::find(reinterpret_cast<const void*>(p)); },
          nb::arg("address"), nb::rv_policy::reference, nb::sig("def find(address: int) -> SimulatedDevice | None"))
      .def_static(
          "of_stream", [](std::uintptr_t s) { return SimulatedDevice::of_stream(stream_of(s)); }, nb::arg("stream"),
          nb::rv_policy::reference)
      .def_static("current", &SimulatedDevice::current, nb::rv_policy::reference,
                  nb::sig("def current() -> SimulatedDevice | None"))
      .def_static("live", &SimulatedDevice::live)
      .def("make_current", &SimulatedDevice::make_current)
      .def("drop_current", &SimulatedDevice::drop_current)
      .def("create_stream", &create_stream)
      .def(
          "destroy_stream", [](SimulatedDevice& d, std::uintptr_t s) { return d.destroy_stream(stream_of(s)); },
          nb::arg("stream"))
      .def_prop_rw(
          "current_stream",
          [](const SimulatedDevice& d) { return reinterpret_cast<std::uintptr_t>(d.current_stream()); },
          [](SimulatedDevice& d, std::uintptr_t s) { d.set_current_stream(stream_of(s)); })
      .def("launch", &launch, nb::arg("stream"), nb::arg("kernel"))
      .def("hold", &hold, nb::arg("stream"), nb::arg("timeout"))
      .def(
          "run", [](SimulatedDevice& d, std::size_t steps) { return d.run(steps); }, nb::arg("steps"), ReleaseGil())
      .def(
          "run_stream",
          [](SimulatedDevice& d, std::size_t steps, std::uintptr_t s) { return d.run(steps, stream_of(s)); },
          nb::arg("steps"), nb::arg("stream"), ReleaseGil())
      .def("pending", [](const SimulatedDevice& d) { return d.pending(); })
      .def(
          "pending_stream", [](const SimulatedDevice& d, std::uintptr_t s) { return d.pending(stream_of(s)); },
          nb::arg("stream"))
      .def(
          "synchronize", [](SimulatedDevice& d) { return d.synchronize(); }, ReleaseGil())
      .def(
          "synchronize_stream", [](SimulatedDevice& d, std::uintptr_t s) { return d.synchronize(stream_of(s)); },
          nb::arg("stream"), ReleaseGil())
      .def(
          "begin_capture",
          [](SimulatedDevice& d, std::uintptr_t s, int mode) { return d.begin_capture(stream_of(s), mode); },
          nb::arg("stream"), nb::arg("mode"))
      .def("end_capture", &end_capture, nb::arg("stream"))
      .def(
          "replay",
          [](SimulatedDevice& d, const HeldGraph& g, std::uintptr_t s) { return d.replay(g.graph, stream_of(s)); },
          nb::arg("graph"), nb::arg("stream"), ReleaseGil())
      .def("copy_async", &copy_async, nb::arg("dst"), nb::arg("src"), nb::arg("nbytes"), nb::arg("stream"),
           nb::arg("owner"))
      .def(
          "heap_alloc",
          [](SimulatedDevice& d, std::size_t n) { return reinterpret_cast<std::uintptr_t>(d.heap_alloc(n)); },
          nb::arg("nbytes"))
      .def_static(
          "heap_free", [](std::uintptr_t p) { SimulatedDevice::heap_free(reinterpret_cast<void*>(p)); },
          nb::arg("address"))
      .def("fail", &SimulatedDevice::fail, nb::arg("entry"), nb::arg("nth"), nb::arg("status"), nb::arg("times"))
      .def("lose", &SimulatedDevice::lose, nb::arg("status") = status::kLaunchFailed, nb::arg("calls") = 0)
      .def("take_kernel_error", &take_kernel_error, nb::sig("def take_kernel_error(self) -> BaseException | None"))
      .def_prop_ro("sticky_status", &SimulatedDevice::sticky_status)
      .def_prop_ro("calls", &calls)
      .def_prop_ro("violations", &SimulatedDevice::violations)
      .def_prop_ro("host_allocations", &SimulatedDevice::host_allocations);

  m.def("prepare_exit", &prepare_exit,
        "From here on, threads that come back from a wait stay away from the interpreter.");
  m.def("simulated_error", &error_texts, nb::arg("status"), "Name and text of a CUresult.");
}

}  // namespace pinstage
