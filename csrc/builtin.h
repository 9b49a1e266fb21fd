// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// Python functions with a fast path: what it takes is done without the frame of a Python function (0.1 us); every other
// call, and whatever it declines, goes to that function, the builtin's self, as it came.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "bindings.h"

namespace pinstage {

// What `fast()` returns, or, when that is no object, what `general` makes of the arguments.
template <class Fast>
PyObject* fast_or_general(Fast&& fast, PyObject* general, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  try {
    nanobind::object result = fast();
    if (result.is_valid()) return result.release().ptr();
  } catch (const Error& error) {
    raise(error);
    return nullptr;
  } catch (const Interrupted&) {
    return nullptr;
  } catch (nanobind::python_error& error) {
    error.restore();
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  return PyObject_Vectorcall(general, args, static_cast<std::size_t>(count), names);
}

// Is the i-th keyword `name`?
inline bool is_named(PyObject* names, Py_ssize_t i, const char* name) {
  return PyUnicode_CompareWithASCIIString(PyTuple_GetItem(names, i), name) == 0;
}

// Called once a function, with the Python one; the builtin has its name, signature and documentation.
template <PyObject* (*kCall)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*)>
nanobind::object builtin(const nanobind::callable& general, const char* signature) {
  using nanobind::cast;
  static const std::string name = cast<std::string>(general.attr("__name__"));
  static const std::string doc = name + signature + "\n--\n\n" + cast<std::string>(general.attr("__doc__"));
  static PyMethodDef method = {name.c_str(), reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(kCall)),
                               METH_FASTCALL | METH_KEYWORDS, doc.c_str()};
  const nanobind::object module_name = general.attr("__module__");
  return nanobind::steal(PyCFunction_NewEx(&method, general.ptr(), module_name.ptr()));
}

}  // namespace pinstage
