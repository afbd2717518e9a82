// The steady replay of a CUDA graph, the nodes that it sets, and the CPU values
// that it takes: what torch/_inductor/pygraph/replay.py, binding.py and
// deliver.py do in Python where this is not compiled.
//
// It is a module of its own, torch._inductor.pygraph._replay, so that it can be
// compiled against an installed torch: it takes seconds, since it includes few
// headers, and no CUDA toolkit, since driver functions come as addresses.

#include <Python.h>

#include <ATen/EmptyTensor.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/core/TensorBase.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/core/AutogradState.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Dtype.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

// From torch/csrc/autograd/python_variable.h, whose headers take ten times as
// long to compile as all of this. The layout is checked when the module is
// imported.
struct THPVariable {
  PyObject_HEAD
  at::TensorBase cdata;
  PyObject* backward_hooks;
  PyObject* post_accumulate_grad_hooks;
};
extern PyObject* THPVariableClass;
PyObject* THPVariable_Wrap(at::TensorBase&& var);
// From torch/csrc/PyInterpreter.h
c10::impl::PyInterpreter* getPyInterpreter();

namespace torch {
// From torch/csrc/Exceptions.h
void translate_exception_to_python(const std::exception_ptr& e_ptr);
} // namespace torch

namespace {

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

// A Python error is set.
struct Error {};

// Neither checks nor errors: the general path is to be taken.
struct Unusual {};

Ref checked(PyObject* object) {
  if (object == nullptr) {
    throw Error();
  }
  return Ref(object);
}

Ref attribute(PyObject* object, PyObject* name) {
  return checked(PyObject_GetAttr(object, name));
}

void set_attribute(PyObject* object, PyObject* name, PyObject* value) {
  if (PyObject_SetAttr(object, name, value) != 0) {
    throw Error();
  }
}

uint64_t as_word(PyObject* value) {
  uint64_t word = PyLong_AsUnsignedLongLong(value);
  if (PyErr_Occurred()) {
    throw Error();
  }
  return word;
}

void* as_address(PyObject* value) {
  return reinterpret_cast<void*>(as_word(value));
}

template <typename F>
void for_each(PyObject* values, F&& f) {
  Ref items = checked(PySequence_Fast(values, "a sequence is needed"));
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.get()); ++i) {
    f(PySequence_Fast_GET_ITEM(items.get(), i));
  }
}

c10::SmallVector<uint64_t, 32> as_words(PyObject* values) {
  c10::SmallVector<uint64_t, 32> words;
  for_each(values, [&](PyObject* word) { words.push_back(as_word(word)); });
  return words;
}

Ref as_list(const uint64_t* words, size_t count) {
  Ref list = checked(PyList_New(static_cast<Py_ssize_t>(count)));
  for (size_t i = 0; i < count; ++i) {
    Ref word = checked(PyLong_FromUnsignedLongLong(words[i]));
    PyList_SET_ITEM(list.get(), i, word.release());
  }
  return list;
}

void check_no_arguments(size_t nargs, PyObject* kwnames) {
  if (PyVectorcall_NARGS(nargs) != 0 || kwnames != nullptr) {
    PyErr_SetString(PyExc_TypeError, "it takes no arguments");
    throw Error();
  }
}

// A member of the tuple that describes something.
PyObject* field(PyObject* description, Py_ssize_t i) {
  PyObject* value = PyTuple_Check(description)
      ? PyTuple_GetItem(description, i)
      : (PyErr_SetString(PyExc_TypeError, "a tuple is needed"), nullptr);
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

const at::TensorBase& unpack(PyObject* object) {
  if (!PyObject_TypeCheck(
          object, reinterpret_cast<PyTypeObject*>(THPVariableClass))) {
    throw Unusual();
  }
  return reinterpret_cast<THPVariable*>(object)->cdata;
}

// A capture of the current stream is the program's own. `is_capturing` is
// torch's function that tells.
void check_not_captured(const Ref& is_capturing) {
  if (checked(PyObject_CallNoArgs(is_capturing.get())).get() != Py_False) {
    throw Unusual();
  }
}

uint64_t address_of(const at::TensorBase& tensor) {
  return reinterpret_cast<uint64_t>(tensor.mutable_data_ptr());
}

uint64_t address_of(PyObject* tensor) {
  return address_of(unpack(tensor));
}

// C++ objects in Python objects: T has the constructor that Python calls,
// T(args, kwargs), and visit(f), which calls f with each PyObject* it owns.
template <typename T>
struct Boxed {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  T value;

  static T& of(PyObject* self) {
    return reinterpret_cast<Boxed*>(self)->value;
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

  static bool ready(PyTypeObject& type, PyObject* module) {
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

// Of a Ref in a T, to be read and replaced by Python.
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

// One node of the executable graph. Words hold the address of an input plus an
// offset, or a value; `set` is the driver function that sets the node to
// `params`, in which the words lie or to which they belong.
struct Node {
  struct Word {
    uint64_t* place;
    size_t input;
    uint64_t offset;
  };

  explicit Node(PyObject* description)
      : set(as_address(field(description, 0))),
        executable(as_address(field(description, 1))),
        node(as_address(field(description, 2))),
        params(as_address(field(description, 3))) {
    if (field(description, 4) != Py_None) {
      context = as_address(field(description, 4));
    }
    for_each(field(description, 5), [&](PyObject* word) {
      long long offset = PyLong_AsLongLong(field(word, 2));
      if (PyErr_Occurred()) {
        throw Error();
      }
      words.push_back(
          {static_cast<uint64_t*>(as_address(field(word, 0))),
           as_word(field(word, 1)),
           static_cast<uint64_t>(offset)});
    });
  }

  bool call() const {
    if (context.has_value()) {
      using Set = int (*)(void*, void*, const void*, void*);
      return reinterpret_cast<Set>(set)(executable, node, params, *context) ==
          0;
    }
    using Set = int (*)(void*, void*, const void*);
    return reinterpret_cast<Set>(set)(executable, node, params) == 0;
  }

  void* set;
  void* executable;
  void* node;
  void* params;
  std::optional<void*> context;
  std::vector<Word> words;
};

PyTypeObject NodesType = {PyVarObject_HEAD_INIT(nullptr, 0)};

// Nodes(pointers, nodes, keep): the nodes of one executable graph that hold
// inputs. It holds `pointers` now; `keep` owns what the nodes point to.
struct Nodes {
  Nodes(PyObject* args, PyObject* /*kwargs*/) {
    PyObject *held = nullptr, *descriptions = nullptr, *owner = nullptr;
    if (!PyArg_ParseTuple(args, "OOO", &held, &descriptions, &owner)) {
      throw Error();
    }
    auto words = as_words(held);
    pointers.assign(words.begin(), words.end());
    for_each(descriptions, [&](PyObject* item) {
      nodes.emplace_back(item);
      for (const auto& word : nodes.back().words) {
        if (word.input >= pointers.size()) {
          PyErr_SetString(PyExc_IndexError, "a word of no input");
          throw Error();
        }
      }
    });
    keep = Ref::share(owner);
  }

  // False if a node refused: the graph must not be launched then.
  bool update(const uint64_t* to) {
    if (is_known && std::equal(pointers.begin(), pointers.end(), to)) {
      return true;
    }
    for (auto& node : nodes) {
      bool is_dirty = !is_known;
      for (auto& word : node.words) {
        uint64_t value = to[word.input] + word.offset;
        is_dirty |= *word.place != value;
        *word.place = value;
      }
      if (is_dirty && !node.call()) {
        // Unknown what the graph holds now: the next update sets every node.
        is_known = false;
        return false;
      }
    }
    std::copy_n(to, pointers.size(), pointers.begin());
    is_known = true;
    return true;
  }

  template <typename F>
  void visit(F&& f) {
    f(keep);
  }

  static PyObject* call(PyObject*, PyObject* const*, size_t, PyObject*) {
    PyErr_SetString(PyExc_TypeError, "not callable");
    return nullptr;
  }

  static PyObject* py_update(PyObject* self, PyObject* values) {
    return guarded([&]() -> PyObject* {
      Nodes& nodes = Boxed<Nodes>::of(self);
      auto to = as_words(values);
      if (to.size() != nodes.pointers.size()) {
        PyErr_SetString(PyExc_ValueError, "a pointer for each input is needed");
        return nullptr;
      }
      return PyBool_FromLong(nodes.update(to.data()));
    });
  }

  static PyObject* py_pointers(PyObject* self, void* /*closure*/) {
    return guarded([&]() -> PyObject* {
      const Nodes& nodes = Boxed<Nodes>::of(self);
      Ref list = checked(PyList_New(nodes.pointers.size()));
      for (size_t i = 0; i < nodes.pointers.size(); ++i) {
        PyObject* pointer = nodes.is_known
            ? PyLong_FromUnsignedLongLong(nodes.pointers[i])
            : PyLong_FromLong(-1);
        PyList_SET_ITEM(list.get(), i, checked(pointer).release());
      }
      return list.release();
    });
  }

  std::vector<Node> nodes;
  std::vector<uint64_t> pointers;
  bool is_known = true;
  Ref keep;
};

PyTypeObject AllocatorType = {PyVarObject_HEAD_INIT(nullptr, 0)};

at::ScalarType dtype_of(PyObject* dtype) {
  if (!THPDtype_Check(dtype)) {
    PyErr_SetString(PyExc_TypeError, "expected a dtype");
    throw Error();
  }
  return reinterpret_cast<THPDtype*>(dtype)->scalar_type;
}

// Allocator(size, stride, dtype, device_index): a call gives a new tensor.
struct Allocator {
  Allocator(PyObject* args, PyObject* /*kwargs*/) {
    PyObject *sizes = nullptr, *strides = nullptr, *dtype = nullptr;
    int index = 0;
    if (!PyArg_ParseTuple(args, "OOOi", &sizes, &strides, &dtype, &index)) {
      throw Error();
    }
    for (uint64_t n : as_words(sizes)) {
      size.push_back(static_cast<int64_t>(n));
    }
    for (uint64_t n : as_words(strides)) {
      stride.push_back(static_cast<int64_t>(n));
    }
    scalar_type = dtype_of(dtype);
    device = c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
  }

  at::TensorBase allocate() const {
    return at::detail::empty_strided_cuda(size, stride, scalar_type, device);
  }

  template <typename F>
  void visit(F&&) {}

  static PyObject* call(
      PyObject* self,
      PyObject* const* /*args*/,
      size_t nargs,
      PyObject* kwnames) {
    return guarded([&]() -> PyObject* {
      check_no_arguments(nargs, kwnames);
      return THPVariable_Wrap(Boxed<Allocator>::of(self).allocate());
    });
  }

  std::vector<int64_t> size;
  std::vector<int64_t> stride;
  c10::ScalarType scalar_type;
  c10::Device device{c10::kCUDA};
};

// Attributes, and members of modules, that a call looks up.
struct Names {
  PyObject* tree_manager_containers;
  PyObject* current_node;
  PyObject* path_state;
  PyObject* extra_ref_check;
  PyObject* is_outdated;
  PyObject* backward_hooks;
  PyObject* post_accumulate_grad_hooks;
  PyObject* is_steady;
  PyObject* graph;
  PyObject* cached_tensor_outputs;
  PyObject* mark_step_counter;
  PyObject* generation;
  PyObject* current_gen;
  PyObject* running_forwards;
  PyObject* pointers;
  PyObject* update;
  PyObject* is_first;
  PyObject* is_needed;
  PyObject* is_profiler_enabled;
  PyObject* record_graph_execution;
  PyObject* raw_stream;
  PyObject* follow;
  PyObject* detach;
} names;

bool intern_names() {
  const std::pair<PyObject**, const char*> all[] = {
      {&names.tree_manager_containers, "tree_manager_containers"},
      {&names.current_node, "_current_node"},
      {&names.path_state, "path_state"},
      {&names.extra_ref_check, "extra_ref_check"},
      {&names.is_outdated, "is_outdated"},
      {&names.backward_hooks, "_backward_hooks"},
      {&names.post_accumulate_grad_hooks, "_post_accumulate_grad_hooks"},
      {&names.is_steady, "is_steady"},
      {&names.graph, "graph"},
      {&names.cached_tensor_outputs, "cached_tensor_outputs"},
      {&names.mark_step_counter, "mark_step_counter"},
      {&names.generation, "generation"},
      {&names.current_gen, "current_gen"},
      {&names.running_forwards, "running_forwards_with_pending_backwards"},
      {&names.pointers, "pointers"},
      {&names.update, "update"},
      {&names.is_first, "_is_first"},
      {&names.is_needed, "is_needed"},
      {&names.is_profiler_enabled, "_is_profiler_enabled"},
      {&names.record_graph_execution, "RECORD_GRAPH_EXECUTION"},
      {&names.raw_stream, "raw_stream"},
      {&names.follow, "follow"},
      {&names.detach, "detach"},
  };
  for (const auto& [name, text] : all) {
    *name = PyUnicode_InternFromString(text);
    if (*name == nullptr) {
      return false;
    }
  }
  return true;
}

// What renew in replay.py does.
void renew(PyObject* tensor) {
  auto* variable = reinterpret_cast<THPVariable*>(tensor);
  if (variable->backward_hooks != nullptr) {
    set_attribute(tensor, names.backward_hooks, Py_None);
  }
  if (variable->post_accumulate_grad_hooks != nullptr) {
    set_attribute(tensor, names.post_accumulate_grad_hooks, Py_None);
  }
  c10::TensorImpl* impl = variable->cdata.unsafeGetTensorImpl();
  if (impl->autograd_meta() != nullptr) {
    impl->set_autograd_meta(nullptr);
  }
  PyObject** attributes = _PyObject_GetDictPtr(tensor);
  if (attributes != nullptr && *attributes != nullptr &&
      PyDict_GET_SIZE(*attributes) != 0) {
    // What it lets go of may give the tensor another one.
    Ref cleared = Ref::share(*attributes);
    PyDict_Clear(cleared.get());
  }
}

// cuPointerGetAttributes
using PointerAttributes = int (*)(unsigned, int*, void**, uint64_t);

// An earlier copy from the GPU to pinned memory may not have been made yet: what
// is general waits for it, or copies behind it. Asked for one attribute alone,
// the driver fails where memory is not its own, and to fail takes it several
// times as long as to give the type 0, as it does here.
bool may_be_pinned(PointerAttributes attributes_of, const void* address) {
  constexpr uint32_t host = 1; // CU_MEMORYTYPE_HOST
  int memory_type = 2; // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
  uint32_t type = 0;
  void* types[] = {&type};
  int status = attributes_of(
      1, &memory_type, types, reinterpret_cast<uint64_t>(address));
  return status != 0 || type == host;
}

PyTypeObject PackType = {PyVarObject_HEAD_INIT(nullptr, 0)};

// Pack(general, places, num_words): Deliver.pack, with the (offset, size) of
// each value. A call copies the values to the memory of its thread, if that was
// added and none of them is pinned, and else calls `general`.
struct Pack {
  struct Memory {
    char* address = nullptr;
    Ref owner;
    PointerAttributes pointer_attributes = nullptr;
    // How often it was written.
    uint64_t times = 0;
  };

  Pack(PyObject* args, PyObject* /*kwargs*/) {
    PyObject *function = nullptr, *descriptions = nullptr;
    unsigned long long count = 0;
    if (!PyArg_ParseTuple(args, "OOK", &function, &descriptions, &count)) {
      throw Error();
    }
    general = Ref::share(function);
    num_words = count;
    for_each(descriptions, [&](PyObject* place) {
      places.emplace_back(as_word(field(place, 0)), as_word(field(place, 1)));
    });
  }

  Memory* memory() {
    auto found = memories.find(PyThread_get_thread_ident());
    return found == memories.end() ? nullptr : &found->second;
  }

  // Of the tensors value(0), value(1), ... Returns to where.
  template <typename F>
  const Memory& copy(F&& value) {
    Memory* to = memory();
    if (to == nullptr) {
      throw Unusual();
    }
    ++to->times;
    for (size_t i = 0; i < places.size(); ++i) {
      const auto& [offset, size] = places[i];
      const void* from = unpack(value(i)).const_data_ptr();
      if (may_be_pinned(to->pointer_attributes, from)) {
        throw Unusual();
      }
      std::memcpy(to->address + offset, from, size);
    }
    return *to;
  }

  static PyObject* call(
      PyObject* object,
      PyObject* const* args,
      size_t nargs,
      PyObject* kwnames) {
    Pack& self = Boxed<Pack>::of(object);
    if (PyVectorcall_NARGS(nargs) == 1 && kwnames == nullptr &&
        PyList_CheckExact(args[0]) &&
        static_cast<size_t>(PyList_GET_SIZE(args[0])) == self.places.size()) {
      try {
        self.copy([&](size_t i) { return PyList_GET_ITEM(args[0], i); });
        Py_RETURN_NONE;
      } catch (const Unusual&) {
      } catch (const std::exception&) {
        // The general way raises what Python is to see.
      }
    }
    return PyObject_Vectorcall(self.general.get(), args, nargs, kwnames);
  }

  // add(thread, address, owner, pointer_attributes): the memory of a thread.
  static PyObject* py_add(PyObject* self, PyObject* args) {
    return guarded([&]() -> PyObject* {
      PyObject *thread = nullptr, *address = nullptr, *owner = nullptr,
               *attributes = nullptr;
      if (!PyArg_ParseTuple(
              args, "OOOO", &thread, &address, &owner, &attributes)) {
        return nullptr;
      }
      Memory memory{
          static_cast<char*>(as_address(address)),
          Ref::share(owner),
          reinterpret_cast<PointerAttributes>(as_address(attributes))};
      Memory& known = Boxed<Pack>::of(self).memories[as_word(thread)];
      // `general` wrote it.
      memory.times = known.times + 1;
      std::swap(known, memory);
      Py_RETURN_NONE;
    });
  }

  template <typename F>
  void visit(F&& f) {
    // Not the owners, which are in no cycle: memory is there until the end.
    f(general);
  }

  Ref general;
  std::vector<std::pair<size_t, size_t>> places;
  size_t num_words = 0;
  // By thread.
  std::unordered_map<uint64_t, Memory> memories;
};

PyTypeObject StageType = {PyVarObject_HEAD_INIT(nullptr, 0)};

// Stage(general, device_index, is_capturing, current_stream, current_device):
// Stage.stage. A call compares, and copies to the GPU what has changed, by way
// of the pinned memory that was added for its thread and stream, while there is
// some left that is not read; for the rest, pinned values for one, it calls
// `general`. The last three are torch's own functions of the CUDA runtime.
struct Stage {
  using ThreadAndStream = std::pair<uint64_t, uint64_t>;

  struct Hash {
    size_t operator()(const ThreadAndStream& key) const {
      return std::hash<uint64_t>()(key.first ^ (key.second * 31));
    }
  };

  struct Staged {
    Ref copy;
    // Its tensors are the hosts.
    Ref batch;
    uint64_t address;
    size_t nbytes;
    std::vector<void*> hosts;
    // So many of the hosts, and at least one. The last has what was copied.
    size_t used;
    // cuMemcpyHtoDAsync
    int (*enqueue)(uint64_t, const void*, size_t, void*);
    PointerAttributes pointer_attributes;
  };

  Stage(PyObject* args, PyObject* /*kwargs*/) {
    PyObject *function = nullptr, *index = nullptr, *captures = nullptr,
             *stream = nullptr, *device = nullptr;
    if (!PyArg_ParseTuple(
            args,
            "OO!OOO",
            &function,
            &PyLong_Type,
            &index,
            &captures,
            &stream,
            &device)) {
      throw Error();
    }
    general = Ref::share(function);
    device_index = Ref::share(index);
    is_capturing = Ref::share(captures);
    current_stream = Ref::share(stream);
    current_device = Ref::share(device);
  }

  // The copy of a value, outside of captures.
  Ref operator()(PyObject* value) {
    ++times;
    Ref stream = checked(
        PyObject_CallOneArg(current_stream.get(), device_index.get()));
    auto found =
        staged.find({PyThread_get_thread_ident(), as_word(stream.get())});
    if (found == staged.end() ||
        !put(value, found->second, as_address(stream.get()))) {
      return checked(PyObject_CallOneArg(general.get(), value));
    }
    return Ref::share(found->second.copy.get());
  }

  // False if it takes more than a copy from the next host.
  bool put(PyObject* value, Staged& to, void* stream) const {
    const at::TensorBase& tensor = unpack(value);
    if (tensor.nbytes() != to.nbytes) {
      return false;
    }
    const void* from = tensor.const_data_ptr();
    if (may_be_pinned(to.pointer_attributes, from)) {
      return false;
    }
    if (std::memcmp(to.hosts[to.used - 1], from, to.nbytes) == 0) {
      return true;
    }
    if (to.used == to.hosts.size()) {
      return false;
    }
    // The context of a null stream is the current one.
    Ref device = checked(PyObject_CallNoArgs(current_device.get()));
    int is_current =
        PyObject_RichCompareBool(device.get(), device_index.get(), Py_EQ);
    if (is_current < 0) {
      throw Error();
    }
    if (is_current == 0) {
      return false;
    }
    // The driver may wait here, until the device has done some of what it has
    // to do. Meanwhile others add theirs, which leaves this where it is.
    int status = 0;
    Py_BEGIN_ALLOW_THREADS;
    void* host = to.hosts[to.used];
    std::memcpy(host, from, to.nbytes);
    status = to.enqueue(to.address, host, to.nbytes, stream);
    Py_END_ALLOW_THREADS;
    if (status != 0) {
      // What is general tries again and says so.
      return false;
    }
    ++to.used;
    return true;
  }

  static PyObject* call(
      PyObject* object,
      PyObject* const* args,
      size_t nargs,
      PyObject* kwnames) {
    Stage& self = Boxed<Stage>::of(object);
    if (PyVectorcall_NARGS(nargs) == 1 && kwnames == nullptr) {
      try {
        check_not_captured(self.is_capturing);
        return self(args[0]).release();
      } catch (const Error&) {
        return nullptr;
      } catch (const Unusual&) {
      } catch (const std::exception&) {
        // As in Pack::call.
      }
    }
    return PyObject_Vectorcall(self.general.get(), args, nargs, kwnames);
  }

  // add(thread, stream, copy, batch, used, enqueue, pointer_attributes)
  static PyObject* py_add(PyObject* self, PyObject* args) {
    return guarded([&]() -> PyObject* {
      PyObject *thread = nullptr, *stream = nullptr, *copy = nullptr,
               *batch = nullptr, *used = nullptr, *enqueue = nullptr,
               *attributes = nullptr;
      if (!PyArg_ParseTuple(
              args,
              "OOOO!OOO",
              &thread,
              &stream,
              &copy,
              &PyList_Type,
              &batch,
              &used,
              &enqueue,
              &attributes)) {
        return nullptr;
      }
      try {
        const at::TensorBase& tensor = unpack(copy);
        Staged added{
            Ref::share(copy),
            Ref::share(batch),
            reinterpret_cast<uint64_t>(tensor.mutable_data_ptr()),
            tensor.nbytes(),
            {},
            as_word(used),
            reinterpret_cast<decltype(Staged::enqueue)>(as_address(enqueue)),
            reinterpret_cast<PointerAttributes>(as_address(attributes))};
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(batch); ++i) {
          const at::TensorBase& host = unpack(PyList_GET_ITEM(batch, i));
          if (host.nbytes() != added.nbytes) {
            throw Unusual();
          }
          added.hosts.push_back(host.mutable_data_ptr());
        }
        if (added.used == 0 || added.used > added.hosts.size()) {
          throw Unusual();
        }
        Boxed<Stage>::of(self).staged.insert_or_assign(
            ThreadAndStream(as_word(thread), as_word(stream)),
            std::move(added));
      } catch (const Unusual&) {
        PyErr_SetString(PyExc_ValueError, "no copy, or no memory of its size");
        return nullptr;
      }
      Py_RETURN_NONE;
    });
  }

  // take(thread, stream): undoes add. How much of the batch is used now, None
  // if none was added.
  static PyObject* py_take(PyObject* self, PyObject* args) {
    return guarded([&]() -> PyObject* {
      PyObject *thread = nullptr, *stream = nullptr;
      if (!PyArg_ParseTuple(args, "OO", &thread, &stream)) {
        return nullptr;
      }
      auto& all = Boxed<Stage>::of(self).staged;
      auto taken =
          all.extract(ThreadAndStream(as_word(thread), as_word(stream)));
      if (taken.empty()) {
        Py_RETURN_NONE;
      }
      return PyLong_FromSize_t(taken.mapped().used);
    });
  }

  template <typename F>
  void visit(F&& f) {
    // Not what is staged, which is in no cycle, as in Pack.
    for (Ref* ref :
         {&general, &is_capturing, &current_stream, &current_device}) {
      f(*ref);
    }
  }

  Ref general;
  Ref device_index;
  Ref is_capturing;
  Ref current_stream;
  Ref current_device;
  std::unordered_map<ThreadAndStream, Staged, Hash> staged;
  // How often it was called, by all threads.
  uint64_t times = 0;
};

// The values that a call was given. What a finalizer calls, which the collector may
// run where an object is made, gives others to the same memory, if it is the same
// function: this call has to give its own again then.
struct Given {
  static void check(bool is_last) {
    if (!is_last) {
      throw Unusual();
    }
  }

  void check_packed() const {
    for (const auto& [memory, times] : packed) {
      check(memory->times == times);
    }
  }

  void check_staged() const {
    for (const auto& [stage, times] : staged) {
      check(stage->times == times);
    }
  }

  c10::SmallVector<std::pair<const Pack::Memory*, uint64_t>, 4> packed;
  c10::SmallVector<std::pair<const Stage*, uint64_t>, 4> staged;
};

PyTypeObject WordsType = {PyVarObject_HEAD_INIT(nullptr, 0)};

// Words(general, packs): a call gives what the thread packed last, as `general`
// does, which it calls where it does not know.
struct Words {
  Words(PyObject* args, PyObject* /*kwargs*/) {
    PyObject *function = nullptr, *list = nullptr;
    if (!PyArg_ParseTuple(args, "OO", &function, &list)) {
      throw Error();
    }
    general = Ref::share(function);
    for_each(list, [&](PyObject* pack) {
      if (!Py_IS_TYPE(pack, &PackType)) {
        PyErr_SetString(PyExc_TypeError, "a Pack is needed");
        throw Error();
      }
      packs.push_back(Ref::share(pack));
    });
  }

  void append_to(c10::SmallVector<uint64_t, 32>& words) const {
    const size_t before = words.size();
    for (const Ref& ref : packs) {
      Pack* pack = Py_IS_TYPE(ref.get(), &PackType)
          ? &Boxed<Pack>::of(ref.get())
          : nullptr;
      const Pack::Memory* memory = pack == nullptr ? nullptr : pack->memory();
      if (memory == nullptr) {
        words.resize(before);
        Ref all = checked(PyObject_CallNoArgs(general.get()));
        for (uint64_t word : as_words(all.get())) {
          words.push_back(word);
        }
        return;
      }
      const size_t start = words.size();
      words.resize(start + pack->num_words);
      std::memcpy(
          words.data() + start,
          memory->address,
          pack->num_words * sizeof(uint64_t));
    }
  }

  static PyObject* call(
      PyObject* self,
      PyObject* const* /*args*/,
      size_t nargs,
      PyObject* kwnames) {
    return guarded([&]() -> PyObject* {
      check_no_arguments(nargs, kwnames);
      c10::SmallVector<uint64_t, 32> words;
      Boxed<Words>::of(self).append_to(words);
      return as_list(words.data(), words.size()).release();
    });
  }

  template <typename F>
  void visit(F&& f) {
    f(general);
    for (Ref& pack : packs) {
      f(pack);
    }
  }

  Ref general;
  std::vector<Ref> packs;
};

// torch._as_tensor_fullprec. It makes the tensor of a float itself, in a tenth
// of the time, unless the thread is in a mode: fake tensors, functorch.
PyObject* as_tensor_fullprec(PyObject* /*module*/, PyObject* value) {
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  if (PyFloat_CheckExact(value) &&
      (included - c10::default_included_set).empty()) {
    return guarded([&]() -> PyObject* {
      at::TensorBase tensor = at::detail::empty_cpu({}, c10::kDouble);
      *static_cast<double*>(tensor.mutable_data_ptr()) =
          PyFloat_AS_DOUBLE(value);
      return THPVariable_Wrap(std::move(tensor));
    });
  }
  Ref torch(PyImport_ImportModule("torch"));
  return torch
      ? PyObject_CallMethod(torch.get(), "_as_tensor_fullprec", "O", value)
      : nullptr;
}

// Whether the thread records, and what it calls is to run uncaptured.
thread_local bool is_without_trees = false;

// set_without_trees(value): returns what it was. See without_trees in record.py.
PyObject* set_without_trees(PyObject* /*module*/, PyObject* value) {
  return PyBool_FromLong(
      std::exchange(is_without_trees, value == Py_True));
}

PyTypeObject ReplayType = {PyVarObject_HEAD_INIT(nullptr, 0)};

// See replay.py, which makes it, for the arguments and for what is checked.
struct Replay {
  // What an output is: a tensor that is bound, one that the node caches, a
  // constant, a static input, or a new tensor without elements.
  struct Output {
    enum Kind { BOUND, CACHED, CONSTANT, INPUT, EMPTY } kind;
    size_t index;
    // The constant, or what makes the tensor.
    Ref value;
    // Of one that is cached: what it was recorded with.
    uint64_t address = 0;
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
    at::ScalarType dtype = at::kFloat;
  };

  // An output of a graph of the path: its place in what its node keeps.
  struct PathOutput {
    Ref weakrefs;
    Ref cached;
    Py_ssize_t index;
  };

  Replay(PyObject* args, PyObject* kwargs) {
    static const char* keywords[] = {
        "general",
        "node",
        "manager",
        "executing",
        "mark_step",
        "tracker",
        "pending",
        "local",
        "owner",
        "containers",
        "is_capturing",
        "launch",
        "binding",
        "values",
        "parent",
        "restore",
        "function",
        "live_outputs",
        "acquire",
        "release",
        "stream_order",
        "current_stream",
        "device_index",
        "static",
        "bound",
        "alignment",
        "pool",
        "allocators",
        "outputs",
        "dropped",
        "dead_before",
        "dead_after",
        nullptr};
    auto owned = refs();
    PyObject *objects[23], *static_inputs = nullptr, *bound_inputs = nullptr,
                           *pool_bounds = nullptr, *allocator_list = nullptr,
                           *output_list = nullptr, *dropped_inputs = nullptr,
                           *before = nullptr, *after = nullptr;
    static_assert(std::size(objects) == std::tuple_size_v<decltype(owned)>);
    unsigned long long needed_alignment = 0;
    if (!PyArg_ParseTupleAndKeywords(
            args,
            kwargs,
            "$OOOOOOOOOOOOOOOOOOOOOOOOOKOOOOOO",
            const_cast<char**>(keywords),
            &objects[0],
            &objects[1],
            &objects[2],
            &objects[3],
            &objects[4],
            &objects[5],
            &objects[6],
            &objects[7],
            &objects[8],
            &objects[9],
            &objects[10],
            &objects[11],
            &objects[12],
            &objects[13],
            &objects[14],
            &objects[15],
            &objects[16],
            &objects[17],
            &objects[18],
            &objects[19],
            &objects[20],
            &objects[21],
            &objects[22],
            &static_inputs,
            &bound_inputs,
            &needed_alignment,
            &pool_bounds,
            &allocator_list,
            &output_list,
            &dropped_inputs,
            &before,
            &after)) {
      throw Error();
    }
    for (size_t i = 0; i < owned.size(); ++i) {
      *owned[i] = Ref::share(objects[i]);
    }
    alignment = needed_alignment;
    for_each(static_inputs, [&](PyObject* input) {
      statics.emplace_back(as_word(field(input, 0)), as_word(field(input, 1)));
      num_inputs = std::max(num_inputs, statics.back().first + 1);
    });
    for (uint64_t i : as_words(bound_inputs)) {
      bound.push_back(i);
      num_inputs = std::max<size_t>(num_inputs, i + 1);
    }
    for (uint64_t i : as_words(dropped_inputs)) {
      dropped.push_back(static_cast<Py_ssize_t>(i));
      num_inputs = std::max<size_t>(num_inputs, i + 1);
    }
    dead_before = path_outputs(before);
    dead_after = path_outputs(after);
    auto bounds = as_words(pool_bounds);
    pool.assign(bounds.begin(), bounds.end());
    for_each(allocator_list, [&](PyObject* allocate) {
      allocators.push_back(Ref::share(allocate));
    });
    for_each(output_list, [&](PyObject* output) { add_output(output); });
  }

  void add_output(PyObject* output) {
    PyObject* kind = field(output, 0);
    PyObject* value = field(output, 1);
    auto is = [&](const char* name) {
      return PyUnicode_Check(kind) &&
          PyUnicode_CompareWithASCIIString(kind, name) == 0;
    };
    if (is("bound") || is("input")) {
      outputs.push_back(
          {is("bound") ? Output::BOUND : Output::INPUT, as_word(value), Ref()});
      const Output& added = outputs.back();
      if (added.index >=
          (added.kind == Output::BOUND ? bound.size() + allocators.size()
                                       : num_inputs)) {
        PyErr_SetString(PyExc_IndexError, "an output that is not known");
        throw Error();
      }
    } else if (is("constant")) {
      outputs.push_back({Output::CONSTANT, 0, Ref::share(value)});
    } else if (is("empty")) {
      outputs.push_back({Output::EMPTY, 0, Ref::share(value)});
    } else if (is("cached")) {
      auto sizes = as_words(field(value, 1));
      auto strides = as_words(field(value, 2));
      outputs.push_back(
          {Output::CACHED,
           outputs.size(),
           Ref(),
           as_word(field(value, 0)),
           {sizes.begin(), sizes.end()},
           {strides.begin(), strides.end()},
           dtype_of(field(value, 3))});
    } else {
      PyErr_SetString(PyExc_ValueError, "expected a kind of output");
      throw Error();
    }
  }

  static std::vector<PathOutput> path_outputs(PyObject* descriptions) {
    std::vector<PathOutput> result;
    for_each(descriptions, [&](PyObject* output) {
      result.push_back(
          {Ref::share(field(output, 0)),
           Ref::share(field(output, 1)),
           static_cast<Py_ssize_t>(as_word(field(output, 2)))});
    });
    return result;
  }

  // The lock of the manager. Where another thread has it, the general path runs
  // uncaptured.
  class Held {
   public:
    explicit Held(const Replay& replay) : replay_(replay) {
      Ref got = checked(PyObject_CallOneArg(replay.acquire.get(), Py_False));
      if (got.get() != Py_True) {
        throw Unusual();
      }
    }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    ~Held() {
      PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
      PyErr_Fetch(&type, &value, &traceback);
      if (!Ref(PyObject_CallNoArgs(replay_.release.get()))) {
        PyErr_WriteUnraisable(replay_.release.get());
      }
      PyErr_Restore(type, value, traceback);
    }

   private:
    const Replay& replay_;
  };

  static PyObject* call(
      PyObject* object,
      PyObject* const* args,
      size_t nargs,
      PyObject* kwnames) {
    Replay& self = Boxed<Replay>::of(object);
    if (PyVectorcall_NARGS(nargs) == 1 && kwnames == nullptr &&
        PyList_CheckExact(args[0])) {
      bool has_dropped = false;
      try {
        if (self.fits(args[0])) {
          check_not_captured(self.is_capturing);
          return self.run(args[0], has_dropped);
        }
      } catch (const Error&) {
        return nullptr;
      } catch (const Unusual&) {
      } catch (const std::exception&) {
        // No memory, or a tensor without storage: nothing was launched, and the
        // general path raises what Python is to see.
      }
      if (has_dropped &&
          !Ref(PyObject_CallOneArg(self.restore.get(), args[0]))) {
        return nullptr;
      }
    }
    // Others may replace it while it runs, and have been its only owner.
    Ref general = Ref::share(self.general.get());
    return PyObject_Vectorcall(general.get(), args, nargs, kwnames);
  }

  // Whether it was recorded for these static inputs, by which recordings of one
  // function differ as a rule: to throw would take longer than all of run.
  bool fits(PyObject* inputs) const {
    return static_cast<size_t>(PyList_GET_SIZE(inputs)) >= num_inputs &&
        std::all_of(statics.begin(), statics.end(), [&](const auto& input) {
             return address_of(PyList_GET_ITEM(inputs, input.first)) ==
                 input.second;
           });
  }

  // Of inputs that fit, outside of captures: what the program captures must not
  // depend on the pool's memory. Sets has_dropped once inputs are gone that the
  // general path needs. `given` are the values of the call, if that is known.
  PyObject* run(
      PyObject* inputs,
      bool& has_dropped,
      const Given* given = nullptr) {
    check_thread();
    Held held(*this);
    follow();
    Ref last = attribute(manager.get(), names.current_node);
    check_path(last.get());
    Ref cached = attribute(node.get(), names.cached_tensor_outputs);
    check_whole(cached.get());

    c10::SmallVector<Ref, 16> tensors;
    c10::SmallVector<uint64_t, 32> pointers;
    uint64_t combined = 0;
    for (size_t i : bound) {
      // Others may drop theirs while the launch lets them run.
      tensors.push_back(Ref::share(PyList_GET_ITEM(inputs, i)));
      const at::TensorBase& tensor = unpack(tensors.back().get());
      pointers.push_back(address_of(tensor));
      combined |= pointers.back();
      if (is_in_pool(pointers.back()) || is_lazy(tensor)) {
        throw Unusual();
      }
    }
    if (combined % alignment != 0) {
      throw Unusual();
    }
    // Before the allocations, where the collector may run what packs others.
    c10::SmallVector<uint64_t, 32> words;
    if (Py_IS_TYPE(values.get(), &WordsType)) {
      Boxed<Words>::of(values.get()).append_to(words);
    } else if (values.get() != Py_None) {
      words = as_words(checked(PyObject_CallNoArgs(values.get())).get());
    }
    if (given != nullptr) {
      given->check_packed();
    }
    for (const Ref& allocate : allocators) {
      if (Py_IS_TYPE(allocate.get(), &AllocatorType)) {
        at::TensorBase tensor =
            Boxed<Allocator>::of(allocate.get()).allocate();
        pointers.push_back(
            reinterpret_cast<uint64_t>(tensor.mutable_data_ptr()));
        tensors.push_back(checked(THPVariable_Wrap(std::move(tensor))));
      } else {
        tensors.push_back(checked(PyObject_CallNoArgs(allocate.get())));
        pointers.push_back(address_of(tensors.back().get()));
      }
    }
    pointers.append(words.begin(), words.end());
    check_dead(dead_before);
    for (Py_ssize_t i : dropped) {
      has_dropped = true;
      if (PyList_SetItem(inputs, i, Ref::share(Py_None).release()) != 0) {
        throw Error();
      }
    }
    check_dead(dead_after);
    bind(pointers);
    if (given != nullptr) {
      given->check_staged();
    }

    if (last.get() != node.get()) {
      // As the property current_node does, which does more for None alone.
      set_attribute(manager.get(), names.current_node, node.get());
      if (last.get() == Py_None) {
        // Else check_path saw it.
        set_attribute(manager.get(), names.path_state, executing.get());
      }
    }
    update_generation();
    Ref graph = attribute(node.get(), names.graph);
    PyObject* launch_args[] = {graph.get()};
    checked(PyObject_Vectorcall(launch.get(), launch_args, 1, nullptr));
    if (pending.get() != Py_None) {
      set_attribute(manager.get(), names.running_forwards, pending.get());
    }

    Ref result = checked(PyList_New(outputs.size()));
    for (size_t i = 0; i < outputs.size(); ++i) {
      const Output& output = outputs[i];
      if (output.kind == Output::EMPTY) {
        Ref made = checked(PyObject_CallNoArgs(output.value.get()));
        PyList_SET_ITEM(result.get(), i, made.release());
        continue;
      }
      PyObject* value = output.value.get();
      if (output.kind == Output::BOUND) {
        value = tensors[output.index].get();
      } else if (output.kind == Output::CACHED) {
        value = PyList_GetItem(cached.get(), output.index);
      } else if (output.kind == Output::INPUT) {
        value = PyList_GetItem(inputs, output.index);
      }
      if (value == nullptr) {
        throw Error();
      }
      PyList_SET_ITEM(result.get(), i, Ref::share(value).release());
    }
    // What they let go of may be the program's, and runs what it runs.
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (outputs[i].kind == Output::CACHED) {
        renew(PyList_GET_ITEM(result.get(), i));
      }
    }
    if (PyList_SetSlice(inputs, 0, PyList_GET_SIZE(inputs), nullptr) != 0) {
      throw Error();
    }
    return result.release();
  }

  // A graph is updated and launched by the thread that recorded it, and by
  // autograd's on its behalf. These have no `local`: to ask for its attribute
  // would raise, which takes longer than the rest of a replay.
  void check_thread() const {
    using Objects = at::impl::ThreadLocalPythonObjects;
    static const std::string key = "tree_manager_containers";
    if (is_without_trees) {
      throw Unusual();
    }
    if (Objects::contains(key)) {
      if (Objects::get(key)->ptr(getPyInterpreter()) != owner.get()) {
        throw Unusual();
      }
      return;
    }
    Ref known(PyObject_GetAttr(local.get(), names.tree_manager_containers));
    if (!known) {
      PyErr_Clear();
      known = checked(PyObject_CallNoArgs(containers.get()));
    }
    if (known.get() != owner.get()) {
      throw Unusual();
    }
  }

  // StreamOrder.follow, called only where the stream is another.
  void follow() const {
    Ref stream = checked(
        PyObject_CallOneArg(current_stream.get(), device_index.get()));
    Ref last = attribute(stream_order.get(), names.raw_stream);
    int is_last = PyObject_RichCompareBool(stream.get(), last.get(), Py_EQ);
    if (is_last < 0) {
      throw Error();
    }
    if (is_last == 0) {
      checked(PyObject_CallMethodNoArgs(stream_order.get(), names.follow));
    }
  }

  void check_path(PyObject* last) {
    if (parent.get() != Py_None) {
      if (last != parent.get() ||
          attribute(manager.get(), names.path_state).get() !=
              executing.get()) {
        throw Unusual();
      }
    } else if (last != Py_None) {
      if (attribute(manager.get(), names.path_state).get() !=
          executing.get()) {
        throw Unusual();
      }
      if (last != last_seen.get()) {
        Ref outputs_of_last =
            checked(PyObject_CallOneArg(live_outputs.get(), last));
        live_of_last = std::make_shared<std::vector<PathOutput>>(
            path_outputs(outputs_of_last.get()));
        last_seen = Ref::share(last);
      }
      // What is asked may run what calls this again, after another graph.
      auto live = live_of_last;
      check_dead(*live);
    }
    if (attribute(node.get(), names.is_steady).get() != Py_True ||
        attribute(function.get(), names.is_outdated).get() != Py_False) {
      throw Unusual();
    }
  }

  // As caches_are_whole in replay.py.
  void check_whole(PyObject* cached) const {
    auto* type = reinterpret_cast<PyTypeObject*>(THPVariableClass);
    for (const Output& output : outputs) {
      if (output.kind != Output::CACHED) {
        continue;
      }
      PyObject* value = PyList_GetItem(cached, output.index);
      if (value == nullptr) {
        throw Error();
      }
      const at::TensorBase& tensor = unpack(value);
      if (!Py_IS_TYPE(value, type) ||
          tensor.scalar_type() != output.dtype ||
          is_lazy(tensor) || tensor.key_set().has(c10::DispatchKey::Named) ||
          reinterpret_cast<uint64_t>(tensor.const_data_ptr()) !=
              output.address ||
          tensor.sizes() != c10::IntArrayRef(output.sizes) ||
          tensor.strides() != c10::IntArrayRef(output.strides)) {
        throw Unusual();
      }
    }
  }

  // Of outputs in the pool that the graph may overwrite. One that its
  // node caches is dead where nobody else has the tensor or its storage, as
  // StorageWeakRefWrapper.expired and CopyGraphNode._is_only_cached have it.
  static void check_dead(const std::vector<PathOutput>& outputs_of_path) {
    for (const auto& output : outputs_of_path) {
      PyObject* weakref = PyList_GetItem(output.weakrefs.get(), output.index);
      if (weakref == nullptr) {
        throw Error();
      }
      if (attribute(weakref, names.extra_ref_check).get() == Py_None) {
        if (checked(PyObject_CallNoArgs(weakref)).get() != Py_None) {
          throw Unusual();
        }
        continue;
      }
      if (output.index >= PyList_GET_SIZE(output.cached.get())) {
        throw Unusual();
      }
      PyObject* cached = PyList_GET_ITEM(output.cached.get(), output.index);
      const at::TensorBase& tensor = unpack(cached);
      // The storage is the tensor's and its Python object's.
      if (Py_REFCNT(cached) != 1 || tensor.use_count() != 1 ||
          tensor.storage().use_count() != 2) {
        throw Unusual();
      }
    }
  }

  // As is_lazy in replay.py.
  static bool is_lazy(const at::TensorBase& tensor) {
    constexpr c10::DispatchKeySet LAZY(
        {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
    return tensor.key_set().has_any(LAZY);
  }

  bool is_in_pool(uint64_t address) const {
    // Bounds alternate between the start and the end of a segment.
    auto above = std::upper_bound(pool.begin(), pool.end(), address);
    return (above - pool.begin()) % 2 == 1;
  }

  // Where a node refuses, the general path tries again and says so.
  void bind(const c10::SmallVector<uint64_t, 32>& pointers) {
    if (Py_IS_TYPE(binding.get(), &NodesType)) {
      Nodes& nodes = Boxed<Nodes>::of(binding.get());
      if (pointers.size() != nodes.pointers.size() ||
          !nodes.update(pointers.data())) {
        throw Unusual();
      }
      return;
    }
    Ref list = as_list(pointers.data(), pointers.size());
    Ref held = attribute(binding.get(), names.pointers);
    int equal = PyObject_RichCompareBool(list.get(), held.get(), Py_EQ);
    if (equal < 0) {
      throw Error();
    }
    if (equal == 0 &&
        !Ref(PyObject_CallMethodOneArg(
            binding.get(), names.update, list.get()))) {
      if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        throw Error();
      }
      PyErr_Clear();
      throw Unusual();
    }
  }

  // CUDAGraphTreeManager.update_generation
  void update_generation() {
    Ref generation = attribute(mark_step.get(), names.mark_step_counter);
    int is_marked = PyObject_IsTrue(generation.get());
    if (is_marked < 0) {
      throw Error();
    }
    if (is_marked == 0) {
      generation = attribute(tracker.get(), names.generation);
    }
    set_attribute(manager.get(), names.current_gen, generation.get());
  }

  // Arguments of the constructor, in their order.
  std::array<Ref*, 23> refs() {
    return {
        &general,
        &node,
        &manager,
        &executing,
        &mark_step,
        &tracker,
        &pending,
        &local,
        &owner,
        &containers,
        &is_capturing,
        &launch,
        &binding,
        &values,
        &parent,
        &restore,
        &function,
        &live_outputs,
        &acquire,
        &release,
        &stream_order,
        &current_stream,
        &device_index};
  }

  template <typename F>
  void visit(F&& f) {
    for (Ref* ref : refs()) {
      f(*ref);
    }
    f(last_seen);
    for (auto* of_path : {&dead_before, &dead_after, live_of_last.get()}) {
      for (PathOutput& output : *of_path) {
        f(output.weakrefs);
        f(output.cached);
      }
    }
    for (Ref& allocate : allocators) {
      f(allocate);
    }
    for (Output& output : outputs) {
      if (output.value) {
        f(output.value);
      }
    }
  }

  Ref general;
  Ref node;
  Ref manager;
  Ref executing;
  Ref mark_step;
  Ref tracker;
  Ref pending;
  Ref local;
  Ref owner;
  Ref containers;
  Ref is_capturing;
  Ref acquire;
  Ref release;
  Ref stream_order;
  Ref current_stream;
  Ref device_index;
  Ref launch;
  Ref binding;
  Ref values;
  Ref parent;
  Ref restore;
  Ref function;
  Ref live_outputs;
  // The graph that was last when this was last called, and what it left alive.
  Ref last_seen;
  std::shared_ptr<std::vector<PathOutput>> live_of_last =
      std::make_shared<std::vector<PathOutput>>();
  std::vector<PathOutput> dead_before;
  std::vector<PathOutput> dead_after;
  std::vector<Py_ssize_t> dropped;
  std::vector<std::pair<size_t, uint64_t>> statics;
  std::vector<size_t> bound;
  uint64_t alignment = 1;
  std::vector<uint64_t> pool;
  std::vector<Ref> allocators;
  std::vector<Output> outputs;
  size_t num_inputs = 0;
};

// Dynamo compiles no Python that is called while this lives, as in disable().
class NoDynamo {
 public:
  explicit NoDynamo(PyObject* set)
      : set_(set), prior_(checked(PyObject_CallOneArg(set, Py_None))) {}
  NoDynamo(const NoDynamo&) = delete;
  NoDynamo& operator=(const NoDynamo&) = delete;
  ~NoDynamo() {
    PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
    PyErr_Fetch(&type, &value, &traceback);
    if (!Ref(PyObject_CallOneArg(set_, prior_.get()))) {
      PyErr_WriteUnraisable(set_);
    }
    PyErr_Restore(type, value, traceback);
  }

 private:
  PyObject* set_;
  Ref prior_;
};

PyTypeObject DirectType = {PyVarObject_HEAD_INIT(nullptr, 0)};

// See direct.py, which makes it, for what lies between the two and why that has
// nothing to do.
struct Direct {
  Direct(PyObject* args, PyObject* kwargs) {
    static const char* keywords[] = {
        "slow",
        "partitions",
        "num_args",
        "packs",
        "stages",
        "inputs",
        "num_outputs",
        "outputs",
        "set_eval_frame",
        "profiler",
        "debug",
        nullptr};
    PyObject *objects[5], *pack_list = nullptr, *stage_list = nullptr,
                          *input_list = nullptr, *output_list = nullptr;
    Py_ssize_t num_partition_outputs = 0;
    if (!PyArg_ParseTupleAndKeywords(
            args,
            kwargs,
            "$OO!nOOOnOOO!O!",
            const_cast<char**>(keywords),
            &objects[0],
            &PyList_Type,
            &objects[1],
            &num_args,
            &pack_list,
            &stage_list,
            &input_list,
            &num_partition_outputs,
            &output_list,
            &objects[2],
            &PyDict_Type,
            &objects[3],
            &PyDict_Type,
            &objects[4])) {
      throw Error();
    }
    Ref* owned[] = {&slow, &partitions, &set_eval_frame, &profiler, &debug};
    for (size_t i = 0; i < std::size(owned); ++i) {
      *owned[i] = Ref::share(objects[i]);
    }
    num_outputs = num_partition_outputs;
    std::vector<Py_ssize_t> of_args;
    for_each(pack_list, [&](PyObject* item) {
      packs.emplace_back(
          of_type(field(item, 0), PackType), std::vector<Py_ssize_t>());
      auto& values = packs.back().second;
      for (uint64_t k : as_words(field(item, 1))) {
        values.push_back(static_cast<Py_ssize_t>(k));
      }
      if (values.size() !=
          Boxed<Pack>::of(packs.back().first.get()).places.size()) {
        PyErr_SetString(PyExc_ValueError, "not as many values as are packed");
        throw Error();
      }
      of_args.insert(of_args.end(), values.begin(), values.end());
    });
    for_each(stage_list, [&](PyObject* item) {
      stages.emplace_back(
          of_type(field(item, 0), StageType),
          static_cast<Py_ssize_t>(as_word(field(item, 1))));
      of_args.push_back(stages.back().second);
    });
    for (uint64_t i : as_words(input_list)) {
      inputs.push_back(static_cast<Py_ssize_t>(i));
    }
    is_in_order = true;
    for (uint64_t i : as_words(output_list)) {
      is_in_order &= i == outputs.size();
      outputs.push_back(static_cast<Py_ssize_t>(i));
    }
    is_in_order &= static_cast<Py_ssize_t>(outputs.size()) == num_outputs;
    auto is_beyond = [](Py_ssize_t end) {
      return [end](Py_ssize_t i) { return i < 0 || i >= end; };
    };
    const auto num_values = num_args + static_cast<Py_ssize_t>(stages.size());
    if (std::any_of(of_args.begin(), of_args.end(), is_beyond(num_args)) ||
        std::any_of(inputs.begin(), inputs.end(), is_beyond(num_values)) ||
        std::any_of(outputs.begin(), outputs.end(), is_beyond(num_outputs))) {
      PyErr_SetString(PyExc_IndexError, "no such argument or output");
      throw Error();
    }
  }

  static Ref of_type(PyObject* object, PyTypeObject& type) {
    if (!Py_IS_TYPE(object, &type)) {
      PyErr_Format(PyExc_TypeError, "a %s is needed", type.tp_name);
      throw Error();
    }
    return Ref::share(object);
  }

  static PyObject* call(
      PyObject* object,
      PyObject* const* args,
      size_t nargs,
      PyObject* kwnames) {
    Direct& self = Boxed<Direct>::of(object);
    if (PyVectorcall_NARGS(nargs) == self.num_args && kwnames == nullptr &&
        self.has_replay()) {
      try {
        return self.replay(args);
      } catch (const Error&) {
        return nullptr;
      } catch (const Unusual&) {
      } catch (const std::exception&) {
        // As in Replay::call.
      }
    }
    return PyObject_Vectorcall(self.slow.get(), args, nargs, kwnames);
  }

  // What is replaced in the list when the decision changes. Who profiles or
  // debugs sees every layer.
  bool has_replay() const {
    return PyList_CheckExact(partitions.get()) &&
        PyList_GET_SIZE(partitions.get()) == 1 &&
        Py_IS_TYPE(PyList_GET_ITEM(partitions.get(), 0), &ReplayType) &&
        PyDict_GetItem(profiler.get(), names.is_profiler_enabled) ==
        Py_False &&
        PyDict_GetItem(debug.get(), names.record_graph_execution) == Py_False;
  }

  // The recordings in turn, as Replay.general has them. What none of them was
  // recorded for goes the slow way from its beginning: arguments are the
  // caller's for as long as the call takes, so that none can be lost.
  PyObject* replay(PyObject* const* args) {
    // Others may replace it while a stage lets them run.
    Ref fn = Ref::share(PyList_GET_ITEM(partitions.get(), 0));
    // For the stages too.
    check_not_captured(Boxed<Replay>::of(fn.get()).is_capturing);
    NoDynamo no_dynamo(set_eval_frame.get());
    c10::AutoGradMode no_grad(false);
    // Both may be done again by the slow way: it packs the same bytes to the
    // same places, and to a stage they are what it holds, or are copied again
    // from pinned memory.
    Given given;
    for (const auto& [pack, values] : packs) {
      const auto& of_pack = values;
      const Pack::Memory& memory = Boxed<Pack>::of(pack.get()).copy(
          [&](size_t i) { return args[of_pack[i]]; });
      given.packed.emplace_back(&memory, memory.times);
    }
    c10::SmallVector<Ref, 4> staged;
    for (const auto& [ref, value] : stages) {
      Stage& stage = Boxed<Stage>::of(ref.get());
      const uint64_t times = stage.times + 1;
      staged.push_back(stage(args[value]));
      given.staged.emplace_back(&stage, times);
    }
    Ref list = listed(args, staged);
    while (true) {
      Replay& recording = Boxed<Replay>::of(fn.get());
      bool has_dropped = false;
      if (static_cast<Py_ssize_t>(recording.outputs.size()) == num_outputs &&
          recording.fits(list.get())) {
        try {
          return in_order(recording.run(list.get(), has_dropped, &given));
        } catch (const Unusual&) {
        }
      }
      fn = Ref::share(recording.general.get());
      if (!Py_IS_TYPE(fn.get(), &ReplayType)) {
        throw Unusual();
      }
      if (has_dropped) {
        list = listed(args, staged);
      }
    }
  }

  // What the partition is called with.
  Ref listed(PyObject* const* args, const c10::SmallVector<Ref, 4>& staged)
      const {
    Ref list = checked(PyList_New(inputs.size()));
    for (size_t i = 0; i < inputs.size(); ++i) {
      PyObject* input = inputs[i] < num_args
          ? args[inputs[i]]
          : staged[inputs[i] - num_args].get();
      PyList_SET_ITEM(list.get(), i, Ref::share(input).release());
    }
    return list;
  }

  // The graph's outputs, of its partition's.
  PyObject* in_order(PyObject* of_partition) const {
    if (is_in_order) {
      return of_partition;
    }
    Ref owned(of_partition);
    Ref result = checked(PyList_New(outputs.size()));
    for (size_t i = 0; i < outputs.size(); ++i) {
      PyObject* output = PyList_GET_ITEM(of_partition, outputs[i]);
      PyList_SET_ITEM(result.get(), i, Ref::share(output).release());
    }
    return result.release();
  }

  template <typename F>
  void visit(F&& f) {
    for (Ref* ref : {&slow, &partitions, &set_eval_frame, &profiler, &debug}) {
      f(*ref);
    }
    for (auto& pack : packs) {
      f(pack.first);
    }
    for (auto& stage : stages) {
      f(stage.first);
    }
  }

  Ref slow;
  Ref partitions;
  Ref set_eval_frame;
  Ref profiler;
  Ref debug;
  Py_ssize_t num_args = 0;
  // Each with its arguments, or argument.
  std::vector<std::pair<Ref, std::vector<Py_ssize_t>>> packs;
  std::vector<std::pair<Ref, Py_ssize_t>> stages;
  Py_ssize_t num_outputs = 0;
  // Of the arguments, followed by what is staged.
  std::vector<Py_ssize_t> inputs;
  std::vector<Py_ssize_t> outputs;
  bool is_in_order = false;
};

PyTypeObject TrainingType = {PyVarObject_HEAD_INIT(nullptr, 0)};

// What compiled bytecode calls to run a training graph: see runtime_wrapper in
// training.py, whose wrapper does the same, for the arguments.
struct Training {
  Training(PyObject* args, PyObject* kwargs) {
    static const char* keywords[] = {
        "slow",
        "apply",
        "first",
        "has_transforms",
        "increment_version",
        "mutated",
        "disable_amp",
        "num_outputs",
        "set_eval_frame",
        "profiler",
        nullptr};
    PyObject *objects[7], *mutated_args = nullptr;
    int disables_amp = 0;
    if (!PyArg_ParseTupleAndKeywords(
            args,
            kwargs,
            "$OOOOOOpnOO!",
            const_cast<char**>(keywords),
            &objects[0],
            &objects[1],
            &objects[2],
            &objects[3],
            &objects[4],
            &mutated_args,
            &disables_amp,
            &num_outputs,
            &objects[5],
            &PyDict_Type,
            &objects[6])) {
      throw Error();
    }
    for (uint64_t i : as_words(mutated_args)) {
      mutated.push_back(static_cast<Py_ssize_t>(i));
    }
    disable_amp = disables_amp != 0;
    auto owned = refs();
    static_assert(std::size(objects) == std::tuple_size_v<decltype(owned)>);
    for (size_t i = 0; i < owned.size(); ++i) {
      *owned[i] = Ref::share(objects[i]);
    }
  }

  static PyObject* call(
      PyObject* object,
      PyObject* const* args,
      size_t nargs,
      PyObject* kwnames) {
    Training& self = Boxed<Training>::of(object);
    const auto num_args = PyVectorcall_NARGS(nargs);
    return guarded([&]() -> PyObject* {
      if (kwnames == nullptr && self.is_steady(args, num_args)) {
        return self.run(args, num_args);
      }
      return PyObject_Vectorcall(self.slow.get(), args, nargs, kwnames);
    });
  }

  // The first call is analysed, where that is set, and who profiles sees every
  // layer. A wrapper of one of functorch's transforms that is gone has to be
  // unwrapped.
  bool is_steady(PyObject* const* args, Py_ssize_t num_args) const {
    auto* type = reinterpret_cast<PyTypeObject*>(THPVariableClass);
    return PyDict_GetItem(profiler.get(), names.is_profiler_enabled) ==
        Py_False &&
        !is_analysed() &&
        checked(PyObject_CallNoArgs(has_transforms.get())).get() == Py_False &&
        std::none_of(args, args + num_args, [&](PyObject* arg) {
             return PyObject_TypeCheck(arg, type) &&
                 reinterpret_cast<THPVariable*>(arg)->cdata.key_set().has(
                     c10::DispatchKey::FuncTorchGradWrapper);
           });
  }

  bool is_analysed() const {
    if (attribute(first.get(), names.is_first).get() == Py_False) {
      return false;
    }
    Ref needed =
        checked(PyObject_CallMethodNoArgs(first.get(), names.is_needed));
    return needed.get() != Py_False;
  }

  PyObject* run(PyObject* const* args, Py_ssize_t num_args) const {
    NoDynamo no_dynamo(set_eval_frame.get());
    if (!mutated.empty()) {
      Ref list = checked(PyList_New(0));
      for (Py_ssize_t i : mutated) {
        if (i >= num_args) {
          PyErr_SetString(PyExc_IndexError, "no such argument");
          throw Error();
        }
        if (PyList_Append(list.get(), args[i]) != 0) {
          throw Error();
        }
      }
      checked(PyObject_CallOneArg(increment_version.get(), list.get()));
    }
    c10::AutoGradMode with_grad(true);
    ViewReplay view_replay;
    // torch._C._DisableAutocast
    std::optional<c10::impl::ExcludeDispatchKeyGuard> no_autocast;
    if (disable_amp) {
      no_autocast.emplace(c10::autocast_dispatch_keyset);
    }
    Ref outputs = checked(
        PyObject_Vectorcall(apply.get(), args, num_args, nullptr));
    if (PyObject_Length(outputs.get()) != num_outputs) {
      PyErr_Format(
          PyExc_AssertionError,
          "expected %zd outputs, got %zd",
          num_outputs,
          PyObject_Length(outputs.get()));
      throw Error();
    }
    return PySequence_List(outputs.get());
  }

  // torch.autograd._force_original_view_tracking(True)
  class ViewReplay {
   public:
    ViewReplay()
        : prior_(c10::AutogradState::get_tls_state().get_view_replay_enabled()) {
      c10::AutogradState::get_tls_state().set_view_replay_enabled(true);
    }
    ViewReplay(const ViewReplay&) = delete;
    ViewReplay& operator=(const ViewReplay&) = delete;
    ~ViewReplay() {
      c10::AutogradState::get_tls_state().set_view_replay_enabled(prior_);
    }

   private:
    bool prior_;
  };

  // In the order of the arguments.
  std::array<Ref*, 7> refs() {
    return {
        &slow,
        &apply,
        &first,
        &has_transforms,
        &increment_version,
        &set_eval_frame,
        &profiler};
  }

  template <typename F>
  void visit(F&& f) {
    for (Ref* ref : refs()) {
      f(*ref);
    }
  }

  Ref slow;
  Ref apply;
  Ref first;
  Ref has_transforms;
  Ref increment_version;
  Ref set_eval_frame;
  Ref profiler;
  std::vector<Py_ssize_t> mutated;
  bool disable_amp = false;
  Py_ssize_t num_outputs = 0;
};

// saved(outputs, start): what saved_tensors in training.py returns.
PyObject* saved(PyObject* /*module*/, PyObject* args) {
  return guarded([&]() -> PyObject* {
    PyObject* outputs = nullptr;
    Py_ssize_t start = 0;
    if (!PyArg_ParseTuple(args, "O!n", &PyList_Type, &outputs, &start)) {
      return nullptr;
    }
    Ref tensors = checked(
        PyList_GetSlice(outputs, start, PyList_GET_SIZE(outputs)));
    Ref result = checked(PyList_AsTuple(tensors.get()));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(result.get()); ++i) {
      PyObject* tensor = PyTuple_GET_ITEM(result.get(), i);
      if (!PyObject_TypeCheck(
              tensor, reinterpret_cast<PyTypeObject*>(THPVariableClass))) {
        PyErr_SetString(PyExc_TypeError, "what is saved is no tensor");
        return nullptr;
      }
      if (reinterpret_cast<THPVariable*>(tensor)->cdata.is_view()) {
        Ref detached =
            checked(PyObject_CallMethodNoArgs(tensor, names.detach));
        PyTuple_SET_ITEM(result.get(), i, detached.release());
        Py_DECREF(tensor);
      }
    }
    return result.release();
  });
}

PyTypeObject LinkType = {PyVarObject_HEAD_INIT(nullptr, 0)};

// Link(object, next): does all that `object` does, but knows its
// _torchdynamo_orig_backend: `next`, or that there is none if it is None.
//
// In each frame Dynamo follows that attribute from its callback to an object
// without one, the backend, by char*: for objects of Python a string a step and
// an exception in the end.
struct Link {
  Link(PyObject* args, PyObject* /*kwargs*/) {
    PyObject *of = nullptr, *to = nullptr;
    if (!PyArg_ParseTuple(args, "OO", &of, &to)) {
      throw Error();
    }
    object = Ref::share(of);
    next = Ref::share(to);
  }

  static PyObject* call(
      PyObject* self,
      PyObject* const* args,
      size_t nargs,
      PyObject* kwnames) {
    return PyObject_Vectorcall(object_of(self), args, nargs, kwnames);
  }

  static PyObject* getattr(PyObject* self, char* name) {
    if (std::strcmp(name, "_torchdynamo_orig_backend") != 0) {
      return PyObject_GetAttrString(object_of(self), name);
    }
    PyObject* next = Boxed<Link>::of(self).next.get();
    if (next == Py_None) {
      PyErr_SetNone(PyExc_AttributeError);
      return nullptr;
    }
    return Ref::share(next).release();
  }

  static PyObject* getattro(PyObject* self, PyObject* name) {
    return PyObject_GetAttr(object_of(self), name);
  }

  // Two callbacks share what was compiled if their backends are equal.
  static PyObject* richcompare(PyObject* a, PyObject* b, int op) {
    return PyObject_RichCompare(object_of(a), object_of(b), op);
  }

  static Py_hash_t hash(PyObject* self) {
    return PyObject_Hash(object_of(self));
  }

  static PyObject* object_of(PyObject* self) {
    return Py_IS_TYPE(self, &LinkType) ? Boxed<Link>::of(self).object.get()
                                       : self;
  }

  template <typename F>
  void visit(F&& f) {
    f(object);
    f(next);
  }

  Ref object;
  Ref next;
};

PyTypeObject NoHooksType = {PyVarObject_HEAD_INIT(nullptr, 0)};

// NoHooks(general): whether the thread has no hooks of saved tensors, or else
// what `general` says. A guard of each frame.
struct NoHooks {
  NoHooks(PyObject* args, PyObject* /*kwargs*/) {
    PyObject* slow = nullptr;
    if (!PyArg_ParseTuple(args, "O", &slow)) {
      throw Error();
    }
    general = Ref::share(slow);
  }

  static PyObject* call(
      PyObject* self,
      PyObject* const* args,
      size_t nargs,
      PyObject* kwnames) {
    return guarded([&] {
      return at::SavedTensorDefaultHooks::get_hooks(true).has_value()
          ? PyObject_Vectorcall(
                Boxed<NoHooks>::of(self).general.get(), args, nargs, kwnames)
          : Ref::share(Py_True).release();
    });
  }

  template <typename F>
  void visit(F&& f) {
    f(general);
  }

  Ref general;
};

PyMethodDef nodes_methods[] = {
    {"update", Nodes::py_update, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef nodes_getset[] = {
    {"pointers", Nodes::py_pointers, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMethodDef pack_methods[] = {
    {"add", Pack::py_add, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyMethodDef stage_methods[] = {
    {"add", Stage::py_add, METH_VARARGS, nullptr},
    {"take", Stage::py_take, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyMethodDef module_methods[] = {
    {"as_tensor_fullprec", as_tensor_fullprec, METH_O, nullptr},
    {"saved", saved, METH_VARARGS, nullptr},
    {"set_without_trees", set_without_trees, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef replay_getset[] = {
    {"general",
     get<Replay, &Replay::general>,
     set<Replay, &Replay::general>,
     nullptr,
     nullptr},
    // These two a benchmark replaces, to leave them out of a time.
    {"binding",
     get<Replay, &Replay::binding>,
     set<Replay, &Replay::binding>,
     nullptr,
     nullptr},
    {"launch",
     get<Replay, &Replay::launch>,
     set<Replay, &Replay::launch>,
     nullptr,
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

// These two a benchmark replaces, to leave out what is below.
PyGetSetDef direct_getset[] = {
    {"slow",
     get<Direct, &Direct::slow>,
     set<Direct, &Direct::slow>,
     nullptr,
     nullptr},
    {"partitions",
     get<Direct, &Direct::partitions>,
     set<Direct, &Direct::partitions>,
     nullptr,
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    "torch._inductor.pygraph._replay",
    nullptr,
    -1,
    module_methods};

// Whether a tensor lies in its Python object as it does here.
bool layout_matches() {
  // Not by Python: it may be imported in a mode, which makes other tensors.
  at::TensorBase made = at::detail::empty_cpu({3}, at::kFloat);
  const auto address = reinterpret_cast<uint64_t>(made.mutable_data_ptr());
  Ref tensor(THPVariable_Wrap(std::move(made)));
  if (!tensor) {
    return false;
  }
  if (!PyObject_TypeCheck(
          tensor.get(), reinterpret_cast<PyTypeObject*>(THPVariableClass)) ||
      Py_TYPE(tensor.get())->tp_basicsize <
          static_cast<Py_ssize_t>(sizeof(THPVariable)) ||
      address_of(tensor.get()) != address) {
    PyErr_SetString(PyExc_ImportError, "compiled for another torch");
    return false;
  }
  return true;
}

} // namespace

PyMODINIT_FUNC PyInit__replay() {
  NodesType.tp_name = "torch._inductor.pygraph._replay.Nodes";
  NodesType.tp_methods = nodes_methods;
  NodesType.tp_getset = nodes_getset;
  AllocatorType.tp_name = "torch._inductor.pygraph._replay.Allocator";
  PackType.tp_name = "torch._inductor.pygraph._replay.Pack";
  PackType.tp_methods = pack_methods;
  StageType.tp_name = "torch._inductor.pygraph._replay.Stage";
  StageType.tp_methods = stage_methods;
  WordsType.tp_name = "torch._inductor.pygraph._replay.Words";
  ReplayType.tp_name = "torch._inductor.pygraph._replay.Replay";
  ReplayType.tp_getset = replay_getset;
  DirectType.tp_name = "torch._inductor.pygraph._replay.Direct";
  DirectType.tp_getset = direct_getset;
  TrainingType.tp_name = "torch._inductor.pygraph._replay.Training";
  LinkType.tp_name = "torch._inductor.pygraph._replay.Link";
  LinkType.tp_getattr = Link::getattr;
  LinkType.tp_getattro = Link::getattro;
  LinkType.tp_richcompare = Link::richcompare;
  LinkType.tp_hash = Link::hash;
  NoHooksType.tp_name = "torch._inductor.pygraph._replay.NoHooks";
  Ref module(PyModule_Create(&module_definition));
  if (!module || !layout_matches() || !intern_names() ||
      !Boxed<Nodes>::ready(NodesType, module.get()) ||
      !Boxed<Allocator>::ready(AllocatorType, module.get()) ||
      !Boxed<Pack>::ready(PackType, module.get()) ||
      !Boxed<Stage>::ready(StageType, module.get()) ||
      !Boxed<Words>::ready(WordsType, module.get()) ||
      !Boxed<Replay>::ready(ReplayType, module.get()) ||
      !Boxed<Direct>::ready(DirectType, module.get()) ||
      !Boxed<Training>::ready(TrainingType, module.get()) ||
      !Boxed<Link>::ready(LinkType, module.get()) ||
      !Boxed<NoHooks>::ready(NoHooksType, module.get())) {
    return nullptr;
  }
  return module.release();
}
