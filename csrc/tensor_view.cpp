// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include "tensor_view.h"

#include <Python.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "pool.h"

namespace pinstage {
namespace {

constexpr std::int32_t kDtypes = 64;

// torch's own functions, see find_native().
struct Native {
  bool (*function_mode)() = nullptr;              // at::impl::torch_function_mode_enabled
  bool (*dispatch_modes)(bool) = nullptr;         // c10::impl::TorchDispatchModeTLS::any_modes_set
  void (*bump)(const void* tensor) = nullptr;     // torch::autograd::impl::bump_version; throws for what torch refuses
  bool (*is_neg)(const void* tensor) = nullptr;   // at::native::is_neg
  bool (*has_names)(const void* impl) = nullptr;  // at::impl::has_names; may be null
  bool (*is_conj)(const void* tensor) = nullptr;  // at::native::is_conj
  bool (*is_inference)(const void* tensor) = nullptr;  // at::native::is_inference
  std::size_t word = 0;                                // where a Python tensor holds its at::Tensor

  const void* tensor(PyObject* object) const { return reinterpret_cast<void**>(object) + word; }
};

// torch's C shims, which read one property of an at::Tensor each and return 0; see find_shims().
struct Shims {
  int (*layout)(const void* tensor, std::int32_t* out) = nullptr;
  int (*dtype)(const void* tensor, std::int32_t* out) = nullptr;
  int (*device_type)(const void* tensor, std::int32_t* out) = nullptr;
  int (*device_index)(const void* tensor, std::int32_t* out) = nullptr;
  int (*data)(const void* tensor, void** out) = nullptr;
  int (*ndim)(const void* tensor, std::int64_t* out) = nullptr;
  int (*shape)(const void* tensor, std::int64_t** out) = nullptr;
  int (*strides)(const void* tensor, std::int64_t** out) = nullptr;
  std::int32_t strided = 0;               // the layout of plain tensors
  std::int32_t cpu = 0, cuda = 0;         // device types
  DlDataType dtypes[kDtypes] = {};        // by torch's number; bits 0: not known
  PyObject* dtype_objects[kDtypes] = {};  // those that are known
  // May be null: what makes tensors rather than reads them.
  int (*current_device)(std::int32_t* out) = nullptr;
  int (*empty)(std::int64_t ndim, const std::int64_t* shape, const std::int64_t* strides, std::int32_t dtype,
               std::int32_t device_type, std::int32_t device_index, void** out) = nullptr;
  int (*drop)(void* tensor) = nullptr;
  PyObject* (*wrap)(const void* tensor) = nullptr;  // THPVariable_Wrap
  bool usable = false;
};

// A property of torch.Tensor.
struct Property {
  PyObject* descriptor = nullptr;
  descrgetfunc get = nullptr;

  // New reference, or nullptr with the Python error set.
  PyObject* of(PyObject* tensor) const { return get(descriptor, tensor, reinterpret_cast<PyObject*>(Py_TYPE(tensor))); }
};

// What torch offers, looked up once. The module's state, not the core's: one interpreter has one torch.
struct Torch {
  const DlExchangeApi* exchange = nullptr;
  PyTypeObject* tensor_type = nullptr;
  PyObject* has_torch_function = nullptr;  // (tensor) -> bool; for an exact Tensor: is a torch function mode active
  PyObject* dispatch_stack = nullptr;      // () -> int
  PyObject* has_names = nullptr;           // Tensor.has_names, in torch < 2.13
  PyObject* is_neg = nullptr;              // Tensor.is_neg
  PyObject* is_conj = nullptr;             // Tensor.is_conj
  PyObject* is_inference = nullptr;        // Tensor.is_inference
  PyObject* increment_version = nullptr;   // (iterable of tensors) -> None
  PyObject* grad_enabled = nullptr;        // () -> bool
  PyObject* copy = nullptr;                // Tensor.copy_, whatever others replaced it by
  PyObject* uint8 = nullptr;
  PyObject* int8 = nullptr;
  Property requires_grad;
  Property dtype;
  Native native;
  Shims shims;
  PyObject* forward_ad = nullptr;     // torch.autograd.forward_ad
  PyObject* current_level = nullptr;  // "_current_level", -1 outside
};
Torch torch;

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

// Calls a cached builtin of torch on one argument (or none). A failure counts as "not plain": torch itself then reports
// what is wrong when the general path asks it.
bool is_true(PyObject* callable, PyObject* argument) {
  PyObject* result = PyObject_Vectorcall(callable, &argument, argument != nullptr ? 1 : 0, nullptr);
  if (result == nullptr) {
    PyErr_Clear();
    return true;
  }
  const int truth = result == Py_False ? 0 : result == Py_True ? 1 : PyObject_IsTrue(result);
  Py_DECREF(result);
  return truth != 0;
}

// A torch function mode or dispatch mode, which wants to see every call.
bool mode_active(PyObject* tensor) {
  if (torch.native.word != 0) return torch.native.function_mode() || torch.native.dispatch_modes(false);
  return is_true(torch.has_torch_function, tensor) || is_true(torch.dispatch_stack, nullptr);
}

// Names go with a copy, and are checked against dst's: torch's to do.
bool has_names(PyObject* tensor) {
  if (torch.has_names == nullptr) return false;
  if (torch.native.word == 0 || torch.native.has_names == nullptr) return is_true(torch.has_names, tensor);
  return torch.native.has_names(*static_cast<void* const*>(torch.native.tensor(tensor)));
}

bool is_neg(PyObject* tensor) {
  return torch.native.word != 0 ? torch.native.is_neg(torch.native.tensor(tensor)) : is_true(torch.is_neg, tensor);
}

bool is_conj(PyObject* tensor) {
  return torch.native.word != 0 ? torch.native.is_conj(torch.native.tensor(tensor)) : is_true(torch.is_conj, tensor);
}

// Autograd records what is done to the tensor.
bool watched(PyObject* tensor) {
  PyObject* result = torch.requires_grad.of(tensor);
  if (result == nullptr) {
    PyErr_Clear();
    return true;
  }
  const bool truth = result != Py_False;
  Py_DECREF(result);
  return truth && is_true(torch.grad_enabled, nullptr);
}

// DLPack calls torch's sub-byte integers, which torch itself does not convert, 8-bit ones as well.
bool is_sub_byte(PyObject* tensor, DlDataType dtype) {
  if (dtype.bits != 8 || (dtype.code != kDlInt && dtype.code != kDlUInt)) return false;
  PyObject* const named = torch.dtype.of(tensor);
  const bool known = named == torch.uint8 || named == torch.int8;
  Py_XDECREF(named);
  PyErr_Clear();
  return !known;
}

// Forward-mode AD is under way: a float tensor may carry a tangent.
bool in_dual_level() {
  PyObject* level = PyObject_GetAttr(torch.forward_ad, torch.current_level);
  const bool inside = level == nullptr || PyLong_AsLong(level) >= 0;
  Py_XDECREF(level);
  PyErr_Clear();
  return inside;
}

bool is_integral(DlDataType dtype) { return dtype.code == kDlInt || dtype.code == kDlUInt || dtype.code == kDlBool; }

// Both: false for what view_tensor declines; `object` is exactly a torch.Tensor.
bool view_by_dlpack(PyObject* object, TensorView* out) {
  DlTensor tensor;
  if (torch.exchange->dltensor_from_py_object_no_sync(object, &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  if (tensor.ndim > kMaxDims || tensor.data == nullptr || tensor.dtype.bits % 8 != 0) return false;
  if (is_sub_byte(object, tensor.dtype)) return false;
  out->data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  out->device = tensor.device;
  out->dtype = tensor.dtype;
  out->ndim = tensor.ndim;
  for (int i = 0; i < tensor.ndim; ++i) {
    out->shape[i] = tensor.shape[i];
    out->strides[i] = tensor.strides[i];
  }
  return true;
}

bool view_by_shims(const Shims& shims, PyObject* object, TensorView* out) {
  const void* const tensor = torch.native.tensor(object);
  std::int32_t layout, dtype, type, index;
  std::int64_t ndim, *shape, *strides;
  void* data;
  if (shims.layout(tensor, &layout) != 0 || layout != shims.strided || shims.dtype(tensor, &dtype) != 0 || dtype < 0 ||
      dtype >= kDtypes || shims.dtypes[dtype].bits == 0 || shims.data(tensor, &data) != 0 || data == nullptr ||
      shims.ndim(tensor, &ndim) != 0 || ndim > kMaxDims || shims.shape(tensor, &shape) != 0 ||
      shims.strides(tensor, &strides) != 0 || shims.device_type(tensor, &type) != 0) {
    return false;
  }
  if (type == shims.cpu) {
    out->device = {kDlCpu, 0};
  } else if (type == shims.cuda && shims.device_index(tensor, &index) == 0) {
    out->device = {kDlCuda, index};
  } else {
    return false;
  }
  out->data = static_cast<char*>(data);
  out->dtype = shims.dtypes[dtype];
  out->ndim = static_cast<int>(ndim);
  for (int i = 0; i < out->ndim; ++i) {
    out->shape[i] = shape[i];
    out->strides[i] = strides[i];
  }
  return true;
}

bool same_view(const TensorView& a, const TensorView& b) {
  return a.data == b.data && a.device.type == b.device.type && a.device.id == b.device.id && a.dtype == b.dtype &&
         a.same_shape(b) && std::equal(a.strides, a.strides + a.ndim, b.strides);
}

// Reading a tensor through the exchange API costs 75 ns, through these 20 (H200 host; 270 and 65 on an Ice Lake). Each
// number that torch gives a dtype is learnt from a tensor of it, read both ways.
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

// Owns a tensor's shape and its hold on the slot.
struct SlotTensor {
  DlManagedTensor managed{};
  std::vector<std::int64_t> shape, strides;
  LeaseRef lease;

  // Any thread, with or without the GIL, possibly at interpreter exit.
  static void destroy(DlManagedTensor* managed) {
    const std::unique_ptr<SlotTensor> self(static_cast<SlotTensor*>(managed->manager_ctx));
    if (self->lease.pool != nullptr) self->lease.pool->tensor_died(self->lease.slot);
  }
};

// A contiguous tensor over `data`. New reference, or nullptr with the Python error set.
PyObject* tensor_over(const LeaseRef& lease, void* data, DlDevice device, int ndim, const std::int64_t* shape,
                      DlDataType dtype) {
  auto self = std::make_unique<SlotTensor>();
  self->shape.assign(shape, shape + ndim);
  self->strides.resize(self->shape.size());
  std::int64_t stride = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    self->strides[i] = stride;
    stride *= shape[i] > 0 ? shape[i] : 1;
  }
  self->lease = lease;
  DlManagedTensor& managed = self->managed;
  managed.version = {kDlpackMajor, 0};
  managed.manager_ctx = self.get();
  managed.deleter = &SlotTensor::destroy;
  managed.dl_tensor = {data, device, ndim, dtype, self->shape.data(), self->strides.data(), 0};
  if (lease.pool != nullptr) lease.pool->tensor_born(lease);
  void* object = nullptr;
  // torch owns `managed` from here on, and calls the deleter also when it fails.
  if (torch.exchange->managed_tensor_to_py_object_no_sync(&self.release()->managed, &object) != 0) return nullptr;
  return static_cast<PyObject*>(object);
}

}  // namespace

std::int64_t TensorView::numel() const noexcept {
  std::int64_t n = 1;
  for (int i = 0; i < ndim; ++i) n *= shape[i];
  return n;
}

bool TensorView::contiguous() const noexcept {
  std::int64_t expected = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    if (shape[i] == 1) continue;
    if (strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

bool TensorView::same_shape(const TensorView& other) const noexcept {
  return ndim == other.ndim && std::memcmp(shape, other.shape, sizeof(shape[0]) * static_cast<std::size_t>(ndim)) == 0;
}

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

bool view_tensor(PyObject* object, TensorView* out) {
  if (Py_TYPE(object) != torch.tensor_type) return false;
  return (torch.shims.usable && view_by_shims(torch.shims, object, out)) || view_by_dlpack(object, out);
}

bool copies_bytes_only(PyObject* dst, PyObject* src, DlDataType dtype) {
  if (mode_active(dst)) return false;
  if (is_neg(dst) || is_neg(src) || has_names(dst) || has_names(src)) return false;
  if (is_integral(dtype)) return true;  // knows no gradient
  if (watched(dst) || watched(src) || in_dual_level()) return false;
  return dtype.code != kDlComplex || !(is_conj(dst) || is_conj(src));
}

bool is_inference(PyObject* tensor) {
  return torch.native.word != 0 ? torch.native.is_inference(torch.native.tensor(tensor))
                                : is_true(torch.is_inference, tensor);
}

bool copies_values_only(PyObject* dst, DlDataType dtype, PyObject* src, DlDataType src_dtype) {
  if (mode_active(dst) || is_neg(dst) || has_names(dst) || has_names(src)) return false;
  if (!is_integral(dtype) && (watched(dst) || in_dual_level())) return false;
  if (!is_integral(src_dtype) && (watched(src) || in_dual_level())) return false;
  return dtype.code != kDlComplex || !is_conj(dst);
}

bool bump_version(PyObject* dst) {
  if (torch.native.word != 0) {
    try {
      torch.native.bump(torch.native.tensor(dst));
      return true;
    } catch (...) {
      return false;
    }
  }
  PyObject* tensors = PyTuple_Pack(1, dst);
  PyObject* result = tensors != nullptr ? PyObject_Vectorcall(torch.increment_version, &tensors, 1, nullptr) : nullptr;
  Py_XDECREF(tensors);
  Py_XDECREF(result);
  PyErr_Clear();
  return result != nullptr;
}

const char* torch_access() { return torch.shims.usable ? "shims" : torch.native.word != 0 ? "native" : "python"; }

Stream cuda_current_stream(void*, int index) {
  void* stream = nullptr;
  if (torch.exchange->current_work_stream(kDlCuda, index, &stream) != 0) {
    PyErr_Clear();
    throw std::runtime_error("torch has no current stream for cuda:" + std::to_string(index));
  }
  return stream;
}

int current_cuda_device() {
  std::int32_t index = -1;
  return torch.shims.empty != nullptr && torch.shims.current_device(&index) == 0 ? index : -1;
}

PyObject* empty_cuda_tensor(int ndim, const std::int64_t* shape, PyObject* dtype, int index) {
  const Shims& shims = torch.shims;
  if (shims.empty == nullptr || torch.native.function_mode() || torch.native.dispatch_modes(false)) return nullptr;
  const auto number = std::find(std::begin(shims.dtype_objects), std::end(shims.dtype_objects), dtype);
  if (number == std::end(shims.dtype_objects) || dtype == nullptr) return nullptr;
  std::int64_t strides[kMaxDims], stride = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= shape[i];
  }
  void* tensor = nullptr;
  if (shims.empty(ndim, shape, strides, static_cast<std::int32_t>(number - std::begin(shims.dtype_objects)), shims.cuda,
                  index, &tensor) != 0) {
    return nullptr;
  }
  PyObject* const object = shims.wrap(tensor);
  shims.drop(tensor);
  PyErr_Clear();
  return object;
}

PyObject* tensor_over_slot(const LeaseRef& lease, void* data, DlDevice device, int ndim, const std::int64_t* shape,
                           DlDataType dtype) {
  return tensor_over(lease, data, device, ndim, shape, dtype);
}

bool copy_by_torch(void* data, int ndim, const std::int64_t* shape, DlDataType dtype, PyObject* src) {
  // Nobody but torch's copy_ ever sees this tensor, so it need not hold the slot.
  PyObject* const dst = tensor_over(LeaseRef{}, data, {kDlCpu, 0}, ndim, shape, dtype);
  if (dst == nullptr) return false;
  PyObject* const arguments[] = {dst, src};
  PyObject* const result = PyObject_Vectorcall(torch.copy, arguments, 2, nullptr);
  Py_XDECREF(result);
  Py_DECREF(dst);
  return result != nullptr;
}

}  // namespace pinstage
