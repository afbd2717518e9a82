#pragma once

// What the files of torch._inductor.pygraph._replay share: references, errors,
// Python types of C++ classes, and access to tensors.
//
// The module is compiled against an installed torch. It includes few headers,
// so that this takes seconds, and needs no CUDA toolkit: driver functions come
// as addresses.

#include <Python.h>

#include <ATen/core/TensorBase.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <exception>
#include <initializer_list>
#include <new>
#include <utility>

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

// Owns a reference, or is empty where a Python call failed.
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

inline Ref checked(PyObject* object) {
  if (object == nullptr) {
    throw Error();
  }
  return Ref(object);
}

inline Ref attribute(PyObject* object, PyObject* name) {
  return checked(PyObject_GetAttr(object, name));
}

inline void set_attribute(PyObject* object, PyObject* name, PyObject* value) {
  if (PyObject_SetAttr(object, name, value) != 0) {
    throw Error();
  }
}

// Interns names of attributes, when the module is imported.
inline bool intern(
    std::initializer_list<std::pair<PyObject**, const char*>> names) {
  for (const auto& [name, text] : names) {
    *name = PyUnicode_InternFromString(text);
    if (*name == nullptr) {
      return false;
    }
  }
  return true;
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

inline Ref as_list(const uint64_t* words, size_t count) {
  Ref list = checked(PyList_New(static_cast<Py_ssize_t>(count)));
  for (size_t i = 0; i < count; ++i) {
    Ref word = checked(PyLong_FromUnsignedLongLong(words[i]));
    PyList_SET_ITEM(list.get(), i, word.release());
  }
  return list;
}

inline void check_no_arguments(size_t nargs, PyObject* kwnames) {
  if (PyVectorcall_NARGS(nargs) != 0 || kwnames != nullptr) {
    PyErr_SetString(PyExc_TypeError, "expected no arguments");
    throw Error();
  }
}

// The i'th member of a tuple.
inline PyObject* field(PyObject* tuple, Py_ssize_t i) {
  PyObject* value = PyTuple_Check(tuple)
      ? PyTuple_GetItem(tuple, i)
      : (PyErr_SetString(PyExc_TypeError, "expected a tuple"), nullptr);
  if (value == nullptr) {
    throw Error();
  }
  return value;
}

// Calls f and turns what it throws into a Python error.
template <typename F>
PyObject* guarded(F&& f) {
  try {
    return f();
  } catch (const Error&) {
  } catch (const std::exception&) {
    // As torch does: the program may catch torch.OutOfMemoryError.
    torch::translate_exception_to_python(std::current_exception());
  }
  return nullptr;
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

inline uint64_t address_of(PyObject* tensor) {
  return address_of(unpack(tensor));
}

// Throws Unusual while the program captures the current stream.
// `is_capturing` is torch._C._cuda_isCurrentStreamCapturing.
inline void check_not_captured(const Ref& is_capturing) {
  if (checked(PyObject_CallNoArgs(is_capturing.get())).get() != Py_False) {
    throw Unusual();
  }
}

// A Python object that holds a T, and its type. T has a constructor that
// Python calls, T(args, kwargs), a static function `call`, which Python calls
// too, and visit(f), which calls f with each Ref that the collector follows.
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

  static PyObject* make(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    return guarded([&]() -> PyObject* {
      T value(args, kwargs);
      PyObject* self = type->tp_alloc(type, 0);
      if (self != nullptr) {
        new (&of(self)) T(std::move(value));
        reinterpret_cast<Boxed*>(self)->vectorcall = T::call;
      }
      return self;
    });
  }

  static void dealloc(PyObject* self) {
    PyObject_GC_UnTrack(self);
    of(self).~T();
    Py_TYPE(self)->tp_free(self);
  }

  static int traverse(PyObject* self, visitproc visit, void* arg) {
    int result = 0;
    of(self).visit([&](Ref& ref) {
      if (result == 0 && ref) {
        result = visit(ref.get(), arg);
      }
    });
    return result;
  }

  static int clear(PyObject* self) {
    of(self).visit([](Ref& ref) {
      Ref none = Ref::share(Py_None);
      std::swap(ref, none);
    });
    return 0;
  }

  // Adds the type to the module.
  static bool ready(
      PyObject* module,
      const char* name,
      PyMethodDef* methods = nullptr,
      PyGetSetDef* getset = nullptr) {
    type.tp_name = name;
    type.tp_methods = methods;
    type.tp_getset = getset;
    type.tp_basicsize = sizeof(Boxed);
    type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC |
        Py_TPFLAGS_HAVE_VECTORCALL;
    type.tp_vectorcall_offset = offsetof(Boxed, vectorcall);
    type.tp_call = PyVectorcall_Call;
    type.tp_new = make;
    type.tp_dealloc = dealloc;
    type.tp_traverse = traverse;
    type.tp_clear = clear;
    return PyModule_AddType(module, &type) == 0;
  }
};

// Getter and setter of a Ref in a T.
template <typename T, Ref T::*member>
PyObject* get(PyObject* self, void* /*closure*/) {
  return Ref::share((Boxed<T>::of(self).*member).get()).release();
}

template <typename T, Ref T::*member>
int set(PyObject* self, PyObject* value, void* /*closure*/) {
  if (value == nullptr) {
    PyErr_SetString(PyExc_AttributeError, "it cannot be deleted");
    return -1;
  }
  Boxed<T>::of(self).*member = Ref::share(value);
  return 0;
}

// Of a type that Python does not call.
inline PyObject* not_callable(
    PyObject* /*self*/,
    PyObject* const* /*args*/,
    size_t /*nargs*/,
    PyObject* /*kwnames*/) {
  PyErr_SetString(PyExc_TypeError, "not callable");
  return nullptr;
}

} // namespace torch::inductor::pygraph
