// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include "torch_access.h"

#include <dlfcn.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>

namespace pinstage {

Torch torch;

namespace {

PyObject* attribute(PyObject* owner, const char* name) {
  PyObject* value = PyObject_GetAttrString(owner, name);
  if (value == nullptr) {
    PyErr_Clear();
    throw std::runtime_error(std::string("pinstage needs torch >= 2.10: it found no ") + name);
  }
  return value;
}

Property property(const char* name) {
  PyObject* const descriptor = attribute(reinterpret_cast<PyObject*>(torch.tensor_type), name);
  const auto get = reinterpret_cast<descrgetfunc>(PyType_GetSlot(Py_TYPE(descriptor), Py_tp_descr_get));
  if (get == nullptr) throw std::runtime_error(std::string("torch.Tensor has no property ") + name);
  return {descriptor, get};
}

std::uintptr_t number(PyObject* owner, const char* name) {
  PyObject* value = attribute(owner, name);
  const std::uintptr_t result = PyLong_AsSize_t(value);
  Py_DECREF(value);
  PyErr_Clear();
  return result;
}

// The word of a Python tensor that points to its TensorImpl: an at::Tensor is no more than that pointer. 0: not found.
std::size_t tensor_word(PyObject* tensor) {
  const std::uintptr_t impl = number(tensor, "_cdata");
  const std::size_t words = number(reinterpret_cast<PyObject*>(torch.tensor_type), "__basicsize__") / sizeof(void*);
  for (std::size_t i = 2; i < words; ++i) {
    if (reinterpret_cast<std::uintptr_t*>(tensor)[i] == impl) return i;
  }
  return 0;
}

template <class Function>
bool find_symbol(const char* library, const char* symbol, Function* out) {
  void* const handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return false;
  *out = reinterpret_cast<Function>(dlsym(handle, symbol));
  dlclose(handle);  // torch keeps it loaded
  return *out != nullptr;
}

// Do they say of a plain and a negated tensor what is true?
bool holds(Native* native, PyObject* plain, PyObject* negated) {
  if (Py_TYPE(plain) != torch.tensor_type || Py_TYPE(negated) != torch.tensor_type) return false;  // a mode is active
  native->word = tensor_word(plain);
  if (native->word == 0 || native->word != tensor_word(negated)) return false;
  const std::uintptr_t before = number(plain, "_version");
  native->bump(native->tensor(plain));
  const auto conj = [&](PyObject* tensor) { return native->is_conj(native->tensor(tensor)); };
  return number(plain, "_version") == before + 1 && !native->is_neg(native->tensor(plain)) &&
         native->is_neg(native->tensor(negated)) && !conj(plain) && !native->is_inference(native->tensor(plain)) &&
         !native->function_mode() && !native->dispatch_modes(false);
}

// What every copy asks and the exchange API does not carry costs 0.5 us of a copy's 3 when Python is asked: the count
// of writes, the negative bit, the active modes. torch exports the C++ functions behind them. They are used when all
// are there and when trying them shows that the word which holds a Python tensor's at::Tensor was found and that they
// do as expected; else the Python functions are.
void find_native(PyObject* module) {
  Native native;
  if (!find_symbol("libtorch_cpu.so", "_ZN2at4impl27torch_function_mode_enabledEv", &native.function_mode) ||
      !find_symbol("libc10.so", "_ZN3c104impl20TorchDispatchModeTLS13any_modes_setEb", &native.dispatch_modes) ||
      !find_symbol("libtorch_cpu.so", "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE", &native.bump) ||
      !find_symbol("libtorch_cpu.so", "_ZN2at6native6is_negERKNS_6TensorE", &native.is_neg) ||
      !find_symbol("libtorch_cpu.so", "_ZN2at6native7is_conjERKNS_6TensorE", &native.is_conj) ||
      !find_symbol("libtorch_cpu.so", "_ZN2at6native12is_inferenceERKNS_6TensorE", &native.is_inference)) {
    return;
  }
  find_symbol("libtorch_cpu.so", "_ZN2at4impl9has_namesEPKN3c1010TensorImplE", &native.has_names);
  // An inference tensor has no count: the import may stand in an inference_mode block.
  PyObject* normal = PyObject_CallMethod(module, "inference_mode", "O", Py_False);
  PyObject* entered = normal != nullptr ? PyObject_CallMethod(normal, "__enter__", nullptr) : nullptr;
  PyObject* plain = entered != nullptr ? PyObject_CallMethod(module, "ones", "i", 1) : nullptr;
  PyObject* negated = plain != nullptr ? PyObject_CallMethod(module, "_neg_view", "O", plain) : nullptr;
  if (negated != nullptr && holds(&native, plain, negated)) torch.native = native;
  PyErr_Clear();
  if (entered != nullptr) Py_XDECREF(PyObject_CallMethod(normal, "__exit__", "OOO", Py_None, Py_None, Py_None));
  PyErr_Clear();
  Py_XDECREF(negated);
  Py_XDECREF(plain);
  Py_XDECREF(entered);
  Py_XDECREF(normal);
}

bool same_view(const TensorView& a, const TensorView& b) {
  return a.data == b.data && a.device.type == b.device.type && a.device.id == b.device.id && a.dtype == b.dtype &&
         a.same_shape(b) && std::equal(a.strides, a.strides + a.ndim, b.strides);
}

// Reading a tensor through the exchange API cost 270 ns, through these 65 (Ice Lake, torch 2.13). Each number that
// torch gives a dtype is learnt from a tensor of it, read both ways.
void find_shims(PyObject* module) {
  static constexpr char kLibrary[] = "libtorch_cpu.so";
  Shims shims;
  std::int32_t (*strided)() = nullptr;
  std::int32_t (*cpu)() = nullptr;
  std::int32_t (*cuda)() = nullptr;
  if (torch.native.word == 0 || !find_symbol(kLibrary, "aoti_torch_get_layout", &shims.layout) ||
      !find_symbol(kLibrary, "aoti_torch_get_dtype", &shims.dtype) ||
      !find_symbol(kLibrary, "aoti_torch_get_device_type", &shims.device_type) ||
      !find_symbol(kLibrary, "aoti_torch_get_device_index", &shims.device_index) ||
      !find_symbol(kLibrary, "aoti_torch_get_data_ptr", &shims.data) ||
      !find_symbol(kLibrary, "aoti_torch_get_dim", &shims.ndim) ||
      !find_symbol(kLibrary, "aoti_torch_get_sizes", &shims.shape) ||
      !find_symbol(kLibrary, "aoti_torch_get_strides", &shims.strides) ||
      !find_symbol(kLibrary, "aoti_torch_layout_strided", &strided) ||
      !find_symbol(kLibrary, "aoti_torch_device_type_cpu", &cpu) ||
      !find_symbol(kLibrary, "aoti_torch_device_type_cuda", &cuda)) {
    return;
  }
  shims.strided = strided();
  shims.cpu = cpu();
  shims.cuda = cuda();
  if (!find_symbol(kLibrary, "aoti_torch_get_current_device_index", &shims.current_device) ||
      !find_symbol(kLibrary, "aoti_torch_empty_strided", &shims.empty) ||
      !find_symbol(kLibrary, "aoti_torch_delete_tensor_object", &shims.drop) ||
      !find_symbol("libtorch_python.so", "_Z16THPVariable_WrapRKN2at10TensorBaseE", &shims.wrap)) {
    shims.empty = nullptr;
  }
  static constexpr const char* kNames[] = {
      "bool",       "uint8",         "uint16",      "uint32",          "uint64",          "int8",          "int16",
      "int32",      "int64",         "float16",     "bfloat16",        "float32",         "float64",       "complex64",
      "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"};
  PyObject* empty = attribute(module, "empty");
  PyObject* extents = Py_BuildValue("((ii))", 2, 3);
  for (const char* name : kNames) {
    PyObject* dtype = PyObject_GetAttrString(module, name);
    PyObject* options = dtype != nullptr ? Py_BuildValue("{sOss}", "dtype", dtype, "device", "cpu") : nullptr;
    PyObject* whole = options != nullptr ? PyObject_Call(empty, extents, options) : nullptr;
    PyObject* sample = whole != nullptr ? PyObject_CallMethod(whole, "t", nullptr) : nullptr;
    std::int32_t number = -1;
    TensorView exact, quick;
    if (sample != nullptr && Py_TYPE(sample) == torch.tensor_type && view_by_dlpack(sample, &exact) &&
        shims.dtype(torch.native.tensor(sample), &number) == 0 && number >= 0 && number < kDtypes) {
      shims.dtypes[number] = exact.dtype;
      shims.dtype_objects[number] = dtype;  // torch's dtypes live as long as torch
      if (!view_by_shims(shims, sample, &quick) || !same_view(exact, quick)) shims.dtypes[number] = {};
    }
    PyErr_Clear();
    Py_XDECREF(sample);
    Py_XDECREF(whole);
    Py_XDECREF(options);
    Py_XDECREF(dtype);
  }
  Py_XDECREF(extents);
  Py_DECREF(empty);
  shims.usable = std::any_of(std::begin(shims.dtypes), std::end(shims.dtypes), [](DlDataType t) { return t.bits > 0; });
  if (shims.usable) torch.shims = shims;
}

}  // namespace

void load_torch() {
  PyObject* module = PyImport_ImportModule("torch");
  if (module == nullptr) {
    PyErr_Clear();
    throw std::runtime_error("pinstage needs torch >= 2.10: torch could not be imported");
  }
  PyObject* tensor_type = attribute(module, "Tensor");
  PyObject* capsule = attribute(tensor_type, "__dlpack_c_exchange_api__");
  auto* header = static_cast<DlExchangeHeader*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  PyErr_Clear();
  while (header != nullptr && header->version.major != kDlpackMajor) header = header->prev_api;
  if (header == nullptr) throw std::runtime_error("this torch offers no DLPack 1.x exchange API");
  torch.exchange = reinterpret_cast<DlExchangeApi*>(header);
  if (torch.exchange->dltensor_from_py_object_no_sync == nullptr || torch.exchange->current_work_stream == nullptr) {
    throw std::runtime_error("this torch's DLPack exchange API lacks dltensor_from_py_object_no_sync");
  }
  torch.tensor_type = reinterpret_cast<PyTypeObject*>(tensor_type);
  PyObject* internals = attribute(module, "_C");
  torch.has_torch_function = attribute(internals, "_has_torch_function_unary");
  torch.dispatch_stack = attribute(internals, "_len_torch_dispatch_stack");
  torch.increment_version = attribute(internals, "_increment_version");
  torch.grad_enabled = attribute(internals, "is_grad_enabled");
  torch.uint8 = attribute(module, "uint8");
  torch.int8 = attribute(module, "int8");
  torch.is_neg = attribute(tensor_type, "is_neg");
  torch.has_names = PyObject_GetAttrString(tensor_type, "has_names");
  PyErr_Clear();
  torch.is_conj = attribute(tensor_type, "is_conj");
  torch.is_inference = attribute(tensor_type, "is_inference");
  PyObject* base = attribute(internals, "TensorBase");
  torch.copy = attribute(base, "copy_");
  Py_DECREF(base);
  torch.requires_grad = property("requires_grad");
  torch.dtype = property("dtype");
  torch.forward_ad = PyImport_ImportModule("torch.autograd.forward_ad");
  torch.current_level = PyUnicode_InternFromString("_current_level");
  if (torch.forward_ad == nullptr || torch.current_level == nullptr) {
    PyErr_Clear();
    throw std::runtime_error("torch.autograd.forward_ad is missing");
  }
  find_native(module);
  find_shims(module);
  Py_DECREF(internals);
  Py_DECREF(capsule);
  Py_DECREF(module);
}

}  // namespace pinstage
