// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// to_device's one call for Python lists: numbers are read as torch.tensor() reads them, staged and copied.
//
// Only what needs no second thought is read here: lists and tuples, nested evenly, of exact bool, int and float, each
// of a value that the dtype holds. None of that runs code of the user, so the list stays as it is while it is read.
// Whatever else comes, mistakes included, is torch.tensor()'s to convert or to refuse.
#include <nanobind/nanobind.h>

#include <cstring>
#include <limits>
#include <memory>

#include "bindings.h"
#include "builtin.h"
#include "gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pinstage {
namespace {

constexpr std::size_t kOnStack = 16 << 10;  // bytes of a list that is converted without an allocation

enum class Kind { kBool, kInt, kFloat };  // in the order of promotion

enum class Element { kBool, kUInt8, kInt8, kInt16, kInt32, kInt64, kFloat16, kBFloat16, kFloat32, kFloat64, kCount };
constexpr int kElements = static_cast<int>(Element::kCount);
constexpr const char* kNames[kElements] = {"bool",  "uint8",   "int8",     "int16",   "int32",
                                           "int64", "float16", "bfloat16", "float32", "float64"};
constexpr std::size_t kSizes[kElements] = {1, 1, 1, 2, 4, 8, 2, 2, 4, 8};

// torch's objects, looked up once.
struct TorchNames {
  PyObject* dtypes[kElements] = {};
  PyObject* empty = nullptr;              // torch.empty
  PyObject* get_default_dtype = nullptr;  // torch.get_default_dtype
  PyObject* device_type = nullptr;        // torch.device
  PyObject* empty_keywords = nullptr;     // ("dtype", "device")
  PyObject* type = nullptr;               // "type" and "index", of a torch.device
  PyObject* index = nullptr;
};
TorchNames torch_names;

bool find_dtype(PyObject* dtype, Element* out) {
  for (int i = 0; i < kElements; ++i) {
    if (torch_names.dtypes[i] != dtype) continue;
    *out = static_cast<Element>(i);
    return true;
  }
  return false;
}

bool is_list(PyObject* object) { return PyList_CheckExact(object) || PyTuple_CheckExact(object); }
Py_ssize_t size_of(PyObject* list) { return PyList_CheckExact(list) ? PyList_Size(list) : PyTuple_Size(list); }
PyObject* item_of(PyObject* list, Py_ssize_t i) {  // borrowed
  return PyList_CheckExact(list) ? PyList_GetItem(list, i) : PyTuple_GetItem(list, i);
}

// The shape as the first elements tell it; reading the others finds out whether they agree.
struct Shape {
  int ndim = 0;
  std::int64_t sizes[kMaxDims];
  std::size_t numel = 1;
};

bool find_shape(PyObject* data, Shape* out) {
  while (is_list(data)) {
    const Py_ssize_t size = size_of(data);
    if (size == 0 || out->ndim == kMaxDims) return false;
    out->sizes[out->ndim++] = size;
    // A list may be nested in itself: its size is then no measure of its elements.
    if (__builtin_mul_overflow(out->numel, static_cast<std::size_t>(size), &out->numel) || out->numel > 1u << 28) {
      return false;
    }
    data = item_of(data, 0);
  }
  return true;
}

bool kind_of(PyObject* object, Kind* out) {
  PyTypeObject* const type = Py_TYPE(object);
  if (type == &PyLong_Type) {
    *out = Kind::kInt;
  } else if (type == &PyFloat_Type) {
    *out = Kind::kFloat;
  } else if (type == &PyBool_Type) {
    *out = Kind::kBool;
  } else {
    return false;
  }
  return true;
}

std::uint16_t to_bfloat16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return 0x7fc0;
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Rounds to nearest, ties to even.
std::uint16_t to_float16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const std::uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  std::uint32_t half;
  if (bits > 0x7f800000) {
    half = 0x7e00;  // NaN
  } else if (bits >= 0x477ff000) {
    half = 0x7c00;  // 65520 and up round to infinity
  } else if (bits >= 0x38800000) {
    half = (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
  } else {
    // Subnormal: the sum with 0.5 is rounded at the weight of a half's last bit, 2^-24.
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof magnitude);
    magnitude += 0.5f;
    std::memcpy(&half, &magnitude, sizeof half);
    half -= 0x3f000000;
  }
  return static_cast<std::uint16_t>(sign | half);
}

template <class T>
char* put(char* out, T value) {
  std::memcpy(out, &value, sizeof value);
  return out + sizeof value;
}

// Reads one number into `out` as `Target`. False: of another kind than the dtype takes, or a value that it does not
// hold. *kind is raised to the number's.
template <Element target>
bool put_number(PyObject* object, Kind* kind, char** out) {
  Kind found;
  if (!kind_of(object, &found)) return false;
  if (found > *kind) {
    *kind = found;
  }
  constexpr bool floating = target >= Element::kFloat16;
  if (found == Kind::kFloat) {
    if constexpr (!floating) return false;
  }
  if constexpr (floating) {
    double value;
    if (found == Kind::kFloat) {
      value = PyFloat_AsDouble(object);
    } else {
      int overflow = 0;
      value = static_cast<double>(PyLong_AsLongLongAndOverflow(object, &overflow));
      if (overflow != 0) return false;
    }
    if constexpr (target == Element::kFloat64) {
      *out = put(*out, value);
    } else if constexpr (target == Element::kFloat32) {
      *out = put(*out, static_cast<float>(value));
    } else if constexpr (target == Element::kFloat16) {
      *out = put(*out, to_float16(static_cast<float>(value)));
    } else {
      *out = put(*out, to_bfloat16(static_cast<float>(value)));
    }
    return true;
  } else {
    if constexpr (target == Element::kBool) {
      if (found != Kind::kBool) return false;
      *out = put(*out, object == Py_True);
      return true;
    }
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow != 0) return false;
    const auto in = [&](auto narrow) {
      using T = decltype(narrow);
      if (value < std::numeric_limits<T>::min() || value > std::numeric_limits<T>::max()) return false;
      *out = put(*out, static_cast<T>(value));
      return true;
    };
    if constexpr (target == Element::kUInt8) return in(std::uint8_t{});
    if constexpr (target == Element::kInt8) return in(std::int8_t{});
    if constexpr (target == Element::kInt16) return in(std::int16_t{});
    if constexpr (target == Element::kInt32) return in(std::int32_t{});
    if constexpr (target == Element::kInt64) return in(std::int64_t{});
  }
  return false;
}

template <Element target>
bool put_level(PyObject* data, const Shape& shape, int dim, Kind* kind, char** out) {
  if (dim == shape.ndim) return put_number<target>(data, kind, out);
  if (!is_list(data) || size_of(data) != shape.sizes[dim]) return false;
  for (Py_ssize_t i = 0; i < shape.sizes[dim]; ++i) {
    if (!put_level<target>(item_of(data, i), shape, dim + 1, kind, out)) return false;
  }
  return true;
}

using Read = bool (*)(PyObject* data, const Shape& shape, int dim, Kind* kind, char** out);
constexpr Read kReads[kElements] = {
    &put_level<Element::kBool>,    &put_level<Element::kUInt8>,    &put_level<Element::kInt8>,
    &put_level<Element::kInt16>,   &put_level<Element::kInt32>,    &put_level<Element::kInt64>,
    &put_level<Element::kFloat16>, &put_level<Element::kBFloat16>, &put_level<Element::kFloat32>,
    &put_level<Element::kFloat64>,
};

// The numbers of a list, converted.
struct Numbers {
  Shape shape;
  Element element;
  char stack[kOnStack];
  std::unique_ptr<char[]> heap;

  char* bytes() { return heap ? heap.get() : stack; }
  std::size_t nbytes() const { return shape.numel * kSizes[static_cast<int>(element)]; }
  void make_room() {
    if (nbytes() > kOnStack) heap.reset(new char[nbytes()]);
  }
};

bool read_as(PyObject* data, Element element, Kind* kind, Numbers* out) {
  out->element = element;
  out->make_room();
  char* end = out->bytes();
  return kReads[static_cast<int>(element)](data, out->shape, 0, kind, &end);
}

// The dtype that torch infers: the first number's, and a wider one's once a later number asks for it.
bool read_inferred(PyObject* data, Numbers* out) {
  PyObject* first = data;
  for (int i = 0; i < out->shape.ndim; ++i) first = item_of(first, 0);
  Kind kind;
  if (!kind_of(first, &kind)) return false;
  for (;;) {
    Element element = kind == Kind::kBool ? Element::kBool : Element::kInt64;
    if (kind == Kind::kFloat) {
      const nb::object dtype = nb::steal(PyObject_CallNoArgs(torch_names.get_default_dtype));
      if (!dtype.is_valid()) throw nb::python_error();
      if (!find_dtype(dtype.ptr(), &element)) return false;
    }
    const Kind assumed = kind;
    if (read_as(data, element, &kind, out)) return true;
    if (kind == assumed) return false;
  }
}

// The index of a CUDA device that is in use already, so that torch has set it up; -1: none, or not written plainly.
int known_cuda_index(PyObject* device) {
  long index = -1;
  if (PyLong_CheckExact(device)) {
    index = PyLong_AsLong(device);
  } else if (PyUnicode_CheckExact(device)) {
    if (PyUnicode_CompareWithASCIIString(device, "cuda") == 0) index = current_cuda_device();
  } else if (reinterpret_cast<PyObject*>(Py_TYPE(device)) == torch_names.device_type) {
    const nb::object type = nb::steal(PyObject_GetAttr(device, torch_names.type));
    const nb::object number = nb::steal(PyObject_GetAttr(device, torch_names.index));
    if (type.is_valid() && number.is_valid() && PyUnicode_CompareWithASCIIString(type.ptr(), "cuda") == 0) {
      index = number.is_none() ? current_cuda_device() : PyLong_AsLong(number.ptr());
    }
  }
  PyErr_Clear();
  return index >= 0 && index < kMaxCudaDevices && cuda_devices[index] != nullptr ? static_cast<int>(index) : -1;
}

// torch.empty(shape, dtype=..., device=...), or the empty() of a simulated device. Null: neither, or it failed, which
// is then the general path's to tell.
nb::object allocate(const Numbers& numbers, PyObject* device) {
  PyObject* const dtype = torch_names.dtypes[static_cast<int>(numbers.element)];
  const int ndim = numbers.shape.ndim;
  if (const int index = known_cuda_index(device); index >= 0) {
    PyObject* const made = empty_cuda_tensor(ndim, numbers.shape.sizes, dtype, index);
    if (made != nullptr) return nb::steal(made);
  }
  nb::object shape = nb::steal(PyTuple_New(ndim));
  for (int i = 0; i < ndim; ++i) PyTuple_SetItem(shape.ptr(), i, PyLong_FromSsize_t(numbers.shape.sizes[i]));
  PyObject* made;
  if (reinterpret_cast<PyObject*>(Py_TYPE(device)) == torch_names.device_type || PyUnicode_CheckExact(device) ||
      PyLong_CheckExact(device)) {
    PyObject* args[] = {shape.ptr(), dtype, device};
    made = PyObject_Vectorcall(torch_names.empty, args, 1, torch_names.empty_keywords);
  } else {
    made = PyObject_CallMethod(device, "empty", "OO", shape.ptr(), dtype);
  }
  if (made == nullptr) PyErr_Clear();
  return nb::steal(made);
}

// A new tensor on `device` with the numbers of `data`; no object when the call is not one for the fast path (nothing
// was enqueued then).
nb::object try_to_device(nb::handle data, nb::handle device, nb::handle dtype, nb::handle given_pool) {
  Numbers numbers;
  Element element;
  Kind kind = Kind::kBool;
  if (!find_shape(data.ptr(), &numbers.shape)) return {};
  if (dtype.is_none()) {
    if (!read_inferred(data.ptr(), &numbers)) return {};
  } else if (!find_dtype(dtype.ptr(), &element) || !read_as(data.ptr(), element, &kind, &numbers)) {
    return {};
  }
  nb::object tensor = allocate(numbers, device.ptr());
  TensorView view;
  if (!tensor.is_valid() || !view_tensor(tensor.ptr(), &view) ||
      !copies_bytes_only(tensor.ptr(), tensor.ptr(), view.dtype)) {
    return {};
  }
  const std::shared_ptr<Pool> pool = pool_for(view, given_pool);
  if (pool == nullptr) return {};
  CopyPlan plan;
  plan.width = numbers.nbytes();
  const Stream stream = pool->device().current_stream();
  {
    const ReleasedGil no_gil;
    pool->stage(plan.width, plan, reinterpret_cast<DevicePtr>(view.data), stream, wait_for({}),
                [&](char* slot) { std::memcpy(slot, numbers.bytes(), plan.width); });
  }
  if (!warn(*pool)) throw nb::python_error();
  return tensor;
}

PyObject* call_to_device(PyObject* general, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  PyObject *dtype = count > 2 ? args[2] : Py_None, *pool = Py_None;
  bool plain = count == 2 || count == 3;
  for (Py_ssize_t i = 0; names != nullptr && i < PyTuple_Size(names); ++i) {
    if (is_named(names, i, "pool")) {
      pool = args[count + i];
    } else {
      plain = plain && count == 2 && is_named(names, i, "dtype");
      dtype = args[count + i];
    }
  }
  const auto fast = [&] { return plain ? try_to_device(args[0], args[1], dtype, pool) : nb::object(); };
  return fast_or_general(fast, general, args, count, names);
}

}  // namespace

void bind_lists(nb::module_& m) {
  const nb::module_ torch = nb::module_::import_("torch");
  for (int i = 0; i < kElements; ++i) torch_names.dtypes[i] = nb::object(torch.attr(kNames[i])).release().ptr();
  torch_names.empty = nb::object(torch.attr("empty")).release().ptr();
  torch_names.get_default_dtype = nb::object(torch.attr("get_default_dtype")).release().ptr();
  torch_names.device_type = nb::object(torch.attr("device")).release().ptr();
  torch_names.type = PyUnicode_InternFromString("type");
  torch_names.index = PyUnicode_InternFromString("index");
  torch_names.empty_keywords = nb::make_tuple("dtype", "device").release().ptr();
  m.def(
      "to_device_builtin",
      [](nb::callable general) { return builtin<call_to_device>(general, "(data, device, dtype=None, *, pool=None)"); },
      "general"_a, nb::sig("def to_device_builtin(general: Callable[..., typing.Any]) -> Callable[..., typing.Any]"),
      "to_device as a builtin, with `general` for all but lists of plain numbers.");
}

}  // namespace pinstage
