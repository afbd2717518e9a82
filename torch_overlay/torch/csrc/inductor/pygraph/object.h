#pragma once

// What the files of torch._inductor.pygraph._replay share: references, errors,
// Python types of C++ classes, and access to tensors.
//
// The module is compiled against an installed torch. It includes few headers,
// so that this takes seconds, and needs no CUDA toolkit: driver functions come
// as addresses.

#include <Python.h>
#include <structmember.h>

#include <ATen/core/TensorBase.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

// From torch/csrc/autograd/python_variable.h, whose headers take ten times as
// long to compile as a file of this module. The import checks the layout.
struct THPVariable {
  PyObject_HEAD
  at::TensorBase cdata;
  PyObject* backward_hooks;
  PyObject* post_accumulate_grad_hooks;
};
extern PyObject* THPVariableClass;
PyObject* THPVariable_Wrap(at::TensorBase&& var);

namespace torch {
// From torch/csrc/Exceptions.h
void translate_exception_to_python(const std::exception_ptr& e_ptr);
} // namespace torch

namespace torch::inductor::pygraph {

// Each adds the types and functions of one file to the module.
bool add_calls(PyObject* module);
bool add_nodes(PyObject* module);
bool add_replay(PyObject* module);
bool add_trees(PyObject* module);
bool add_values(PyObject* module);

// Owns a reference, or is empty where a Python call failed. Python's members
// of type T_OBJECT are Refs.
class Ref {
 public:
  explicit Ref(PyObject* object = nullptr) : object_(object) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() {
    Py_XDECREF(object_);
  }
  static Ref share(PyObject* object) {
    Py_XINCREF(object);
    return Ref(object);
  }
  PyObject* get() const {
    return object_;
  }
  PyObject* release() {
    return std::exchange(object_, nullptr);
  }
  explicit operator bool() const {
    return object_ != nullptr;
  }

 private:
  PyObject* object_;
};

// Thrown when a Python error is set.
struct Error {};

// Thrown, without a Python error, when a call has to take the general path.
struct Unusual {};

[[noreturn]] inline void raise(PyObject* type, const char* message) {
  PyErr_SetString(type, message);
  throw Error();
}

inline Ref checked(PyObject* object) {
  if (object == nullptr) {
    throw Error();
  }
  return Ref(object);
}

inline void checked(int status) {
  if (status < 0) {
    throw Error();
  }
}

// The i'th item of a list, borrowed.
inline PyObject* item_of(PyObject* list, Py_ssize_t i) {
  PyObject* item = PyList_GetItem(list, i);
  if (item == nullptr) {
    throw Error();
  }
  return item;
}

inline uint64_t as_word(PyObject* value) {
  uint64_t word = PyLong_AsUnsignedLongLong(value);
  if (PyErr_Occurred()) {
    throw Error();
  }
  return word;
}

inline void* as_address(PyObject* value) {
  return reinterpret_cast<void*>(as_word(value));
}

template <typename F>
void for_each(PyObject* values, F&& f) {
  Ref items = checked(PySequence_Fast(values, "expected a sequence"));
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.get()); ++i) {
    f(PySequence_Fast_GET_ITEM(items.get(), i));
  }
}

using Pointers = c10::SmallVector<uint64_t, 32>;

inline Pointers as_words(PyObject* values) {
  Pointers words;
  for_each(values, [&](PyObject* word) { words.push_back(as_word(word)); });
  return words;
}

// Of numbers that may be negative.
inline Pointers as_numbers(PyObject* values) {
  Pointers words;
  for_each(values, [&](PyObject* number) {
    words.push_back(PyLong_AsUnsignedLongLongMask(number));
  });
  if (PyErr_Occurred()) {
    throw Error();
  }
  return words;
}

inline std::vector<int64_t> as_sizes(PyObject* values) {
  auto words = as_words(values);
  return {words.begin(), words.end()};
}

inline Ref as_list(const Pointers& words) {
  Ref list = checked(PyList_New(static_cast<Py_ssize_t>(words.size())));
  for (size_t i = 0; i < words.size(); ++i) {
    Ref word = checked(PyLong_FromUnsignedLongLong(words[i]));
    PyList_SET_ITEM(list.get(), i, word.release());
  }
  return list;
}

// The members of a tuple of N.
template <size_t N>
std::array<PyObject*, N> members(PyObject* tuple) {
  if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != N) {
    PyErr_Format(PyExc_TypeError, "expected a tuple of %zu", N);
    throw Error();
  }
  std::array<PyObject*, N> result;
  std::copy_n(PySequence_Fast_ITEMS(tuple), N, result.begin());
  return result;
}

// Calls f and turns what it throws into a Python error.
template <typename F>
PyObject* guarded(F&& f) {
  try {
    return f();
  } catch (const Error&) {
  } catch (const Unusual&) {
    PyErr_SetString(PyExc_TypeError, "expected a tensor");
  } catch (const std::exception&) {
    // As torch does: the program may catch torch.OutOfMemoryError.
    torch::translate_exception_to_python(std::current_exception());
  }
  return nullptr;
}

// Calls f, and then `general` if f cannot: if it returns null without a Python
// error, or throws. Where memory or a storage is missing, `general` raises the
// error that the program sees.
template <typename F, typename G>
PyObject* attempted(F&& f, G&& general) {
  try {
    PyObject* result = f();
    if (result != nullptr || PyErr_Occurred()) {
      return result;
    }
  } catch (const Error&) {
    return nullptr;
  } catch (const Unusual&) {
  } catch (const std::exception&) {
  }
  return general();
}

inline const at::TensorBase& unpack(PyObject* object) {
  if (!PyObject_TypeCheck(
          object, reinterpret_cast<PyTypeObject*>(THPVariableClass))) {
    throw Unusual();
  }
  return reinterpret_cast<THPVariable*>(object)->cdata;
}

inline uint64_t address_of(const at::TensorBase& tensor) {
  return reinterpret_cast<uint64_t>(tensor.mutable_data_ptr());
}

// Throws Unusual while the program captures the current stream.
// `is_capturing` is torch._C._cuda_isCurrentStreamCapturing.
inline void check_not_captured(const Ref& is_capturing) {
  if (checked(PyObject_CallNoArgs(is_capturing.get())).get() != Py_False) {
    throw Unusual();
  }
}

// The arguments of a call.
struct Call {
  // How many, or -1 if some have keywords.
  Py_ssize_t count() const {
    return kwnames == nullptr ? PyVectorcall_NARGS(nargs) : -1;
  }

  // Whether a list is the only argument.
  bool has_list() const {
    return count() == 1 && PyList_CheckExact(args[0]);
  }

  // Calls f with the same arguments.
  PyObject* pass_to(const Ref& f) const {
    // f may be replaced meanwhile, which may let go of its only reference.
    Ref callee = Ref::share(f.get());
    return PyObject_Vectorcall(callee.get(), args, nargs, kwnames);
  }

  PyObject* const* args;
  size_t nargs;
  PyObject* kwnames;
};

template <typename T, typename = void>
struct IsLeaf : std::false_type {};
template <typename T>
struct IsLeaf<T, std::void_t<decltype(T::IS_LEAF)>> : std::true_type {};

// A Python object that holds a T, and its type. T has a constructor that
// Python calls, T(args, kwargs), and visit(f), which calls f with the Refs that
// the collector follows. It may have a function `call`, which Python calls too.
// The collector does not see a T with IS_LEAF, whose Refs are in no cycle: it
// needs no visit(f).
template <typename T>
struct Boxed {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  T value;

  static inline PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};

  static T& of(PyObject* self) {
    return reinterpret_cast<Boxed*>(self)->value;
  }

  static bool is(PyObject* object) {
    return Py_IS_TYPE(object, &type);
  }

  // A new reference.
  static Ref share(PyObject* object) {
    if (!is(object)) {
      PyErr_Format(PyExc_TypeError, "expected a %s", type.tp_name);
      throw Error();
    }
    return Ref::share(object);
  }

  static PyObject* call(
      PyObject* self,
      PyObject* const* args,
      size_t nargs,
      PyObject* kwnames) {
    return of(self).call(Call{args, nargs, kwnames});
  }

  static PyObject* make(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    return guarded([&]() -> PyObject* {
      T value(args, kwargs);
      PyObject* self = type->tp_alloc(type, 0);
      if (self != nullptr) {
        new (&of(self)) T(std::move(value));
        reinterpret_cast<Boxed*>(self)->vectorcall = call;
      }
      return self;
    });
  }

  static void dealloc(PyObject* self) {
    if constexpr (!IsLeaf<T>::value) {
      PyObject_GC_UnTrack(self);
    }
    of(self).~T();
    Py_TYPE(self)->tp_free(self);
  }

  static int traverse(PyObject* self, visitproc visit, void* arg) {
    int result = 0;
    auto one = [&](Ref& ref) {
      if (result == 0 && ref) {
        result = visit(ref.get(), arg);
      }
    };
    of(self).visit([&](auto&... refs) { (one(refs), ...); });
    return result;
  }

  static int clear(PyObject* self) {
    of(self).visit([](auto&... refs) { ((refs = Ref::share(Py_None)), ...); });
    return 0;
  }

  // Adds the type to the module.
  static bool ready(PyObject* module, const char* name) {
    // As the type, it is never freed.
    auto* full = new std::string("torch._inductor.pygraph._replay.");
    type.tp_name = full->append(name).c_str();
    type.tp_basicsize = sizeof(Boxed);
    type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL |
        (IsLeaf<T>::value ? 0 : Py_TPFLAGS_HAVE_GC);
    type.tp_vectorcall_offset = offsetof(Boxed, vectorcall);
    type.tp_call = PyVectorcall_Call;
    type.tp_new = make;
    type.tp_dealloc = dealloc;
    if constexpr (!IsLeaf<T>::value) {
      type.tp_traverse = traverse;
      type.tp_clear = clear;
    }
    return PyModule_AddType(module, &type) == 0;
  }
};

} // namespace torch::inductor::pygraph
