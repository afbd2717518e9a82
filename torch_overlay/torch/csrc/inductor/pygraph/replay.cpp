#include "replay.h"

#include <ATen/cuda/EmptyTensor.h>
#include <torch/csrc/Dtype.h>

#include <algorithm>

namespace torch::inductor::pygraph {
namespace {

at::ScalarType dtype_of(PyObject* dtype) {
  if (!THPDtype_Check(dtype)) {
    PyErr_SetString(PyExc_TypeError, "expected a dtype");
    throw Error();
  }
  return reinterpret_cast<THPDtype*>(dtype)->scalar_type;
}

std::vector<int64_t> as_sizes(PyObject* values) {
  auto words = as_words(values);
  return {words.begin(), words.end()};
}

// Whether a tensor is not what lies at its address; is_lazy in Python.
bool is_lazy(const at::TensorBase& tensor) {
  constexpr c10::DispatchKeySet LAZY(
      {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  return tensor.key_set().has_any(LAZY);
}

// Takes from a cached tensor what its last owner left; renew in Python.
void renew(PyObject* tensor) {
  auto* variable = reinterpret_cast<THPVariable*>(tensor);
  Py_CLEAR(variable->backward_hooks);
  Py_CLEAR(variable->post_accumulate_grad_hooks);
  c10::TensorImpl* impl = variable->cdata.unsafeGetTensorImpl();
  if (impl->autograd_meta() != nullptr) {
    impl->set_autograd_meta(nullptr);
  }
  PyObject** attributes = _PyObject_GetDictPtr(tensor);
  if (attributes != nullptr && *attributes != nullptr &&
      PyDict_GET_SIZE(*attributes) != 0) {
    // A finalizer of what it lets go of may give the tensor another dictionary.
    Ref cleared = Ref::share(*attributes);
    PyDict_Clear(cleared.get());
  }
}

} // namespace

Allocator::Allocator(PyObject* args, PyObject* /*kwargs*/) {
  PyObject *sizes = nullptr, *strides = nullptr, *dtype = nullptr;
  int index = 0;
  if (!PyArg_ParseTuple(args, "OOOi", &sizes, &strides, &dtype, &index)) {
    throw Error();
  }
  size = as_sizes(sizes);
  stride = as_sizes(strides);
  scalar_type = dtype_of(dtype);
  device = c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
}

at::TensorBase Allocator::allocate() const {
  return at::detail::empty_strided_cuda(size, stride, scalar_type, device);
}

PyObject* Allocator::call(
    PyObject* object,
    PyObject* const* /*args*/,
    size_t nargs,
    PyObject* kwnames) {
  return guarded([&]() -> PyObject* {
    check_no_arguments(nargs, kwnames);
    return THPVariable_Wrap(Boxed<Allocator>::of(object).allocate());
  });
}

Replay::Replay(PyObject* args, PyObject* kwargs) {
  PyObject *of_plan = nullptr, *of_state = nullptr, *function = nullptr;
  static const char* keywords[] = {"plan", "state", "general", nullptr};
  if (!PyArg_ParseTupleAndKeywords(
          args,
          kwargs,
          "OOO",
          const_cast<char**>(keywords),
          &of_plan,
          &of_state,
          &function)) {
    throw Error();
  }
  plan = Ref::share(of_plan);
  state = Boxed<TreeState>::share(of_state);
  general = Ref::share(function);
  trees = Trees(of_plan);
  graph = Boxed<Cell>::share(field_of(of_plan, "graph").get());
  is_outdated = Boxed<Cell>::share(field_of(of_plan, "is_outdated").get());
  node = field_of(of_plan, "node");
  parent = field_of(of_plan, "parent");
  live_outputs = field_of(of_plan, "live_outputs");
  is_capturing = field_of(of_plan, "is_capturing");
  restore = field_of(of_plan, "restore");
  launch = field_of(of_plan, "launch");
  nodes = field_of(of_plan, "nodes");
  if (!Boxed<Nodes>::is(nodes.get())) {
    nodes = field_of(nodes.get(), "update");
  }
  words = field_of(of_plan, "words");
  cached = field_of(of_plan, "cached");
  dead_before = path_outputs(field_of(of_plan, "dead_before").get());
  dead_after = path_outputs(field_of(of_plan, "dead_after").get());
  for_each(field_of(of_plan, "static").get(), [&](PyObject* input) {
    static_inputs.emplace_back(
        as_word(field(input, 0)), as_word(field(input, 1)));
  });
  for (uint64_t i : as_words(field_of(of_plan, "bound").get())) {
    bound.push_back(i);
  }
  for (uint64_t i : as_words(field_of(of_plan, "dropped").get())) {
    dropped.push_back(static_cast<Py_ssize_t>(i));
  }
  num_inputs = as_word(field_of(of_plan, "num_inputs").get());
  alignment = as_word(field_of(of_plan, "alignment").get());
  auto bounds = as_words(field_of(of_plan, "pool").get());
  pool.assign(bounds.begin(), bounds.end());
  for_each(field_of(of_plan, "allocators").get(), [&](PyObject* allocate) {
    allocators.push_back(Ref::share(allocate));
  });
  for_each(field_of(of_plan, "outputs").get(), [&](PyObject* output) {
    add_output(output);
  });
}

void Replay::add_output(PyObject* output) {
  PyObject* kind = field(output, 0);
  PyObject* value = field(output, 1);
  auto is = [&](const char* name) {
    return PyUnicode_Check(kind) &&
        PyUnicode_CompareWithASCIIString(kind, name) == 0;
  };
  if (is("bound") || is("input")) {
    outputs.push_back(
        {is("bound") ? Output::BOUND : Output::INPUT, as_word(value)});
    const Output& added = outputs.back();
    if (added.index >=
        (added.kind == Output::BOUND ? bound.size() + allocators.size()
                                     : num_inputs)) {
      PyErr_SetString(PyExc_IndexError, "an output of an unknown tensor");
      throw Error();
    }
  } else if (is("constant")) {
    outputs.push_back({Output::CONSTANT, 0, Ref::share(value)});
  } else if (is("empty")) {
    outputs.push_back({Output::EMPTY, 0, Ref::share(value)});
  } else if (is("cached")) {
    outputs.push_back(
        {Output::CACHED,
         outputs.size(),
         Ref(),
         as_word(field(value, 0)),
         as_sizes(field(value, 1)),
         as_sizes(field(value, 2)),
         dtype_of(field(value, 3))});
  } else {
    PyErr_SetString(PyExc_ValueError, "expected a kind of output");
    throw Error();
  }
}

namespace {

// The lock of the trees.
class Held {
 public:
  explicit Held(PyObject* state) : state_(Ref::share(state)) {
    if (!Boxed<TreeState>::of(state).acquire()) {
      throw Unusual();
    }
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() {
    Boxed<TreeState>::of(state_.get()).release();
  }

 private:
  Ref state_;
};

} // namespace

PyObject* Replay::call(
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
      // No memory, or a tensor without storage. Nothing was launched, and the
      // general path raises the error that the program sees.
    }
    if (has_dropped &&
        !Ref(PyObject_CallOneArg(self.restore.get(), args[0]))) {
      return nullptr;
    }
  }
  // It may be replaced while it runs, which may let go of its only reference.
  Ref general = Ref::share(self.general.get());
  return PyObject_Vectorcall(general.get(), args, nargs, kwnames);
}

bool Replay::fits(PyObject* inputs) const {
  return static_cast<size_t>(PyList_GET_SIZE(inputs)) >= num_inputs &&
      // The collector clears this first.
      Boxed<TreeState>::is(state.get()) &&
      std::all_of(
             static_inputs.begin(), static_inputs.end(), [&](const auto& input) {
               return address_of(PyList_GET_ITEM(inputs, input.first)) ==
                   input.second;
             });
}

PyObject* Replay::run(
    PyObject* inputs,
    bool& has_dropped,
    const Given* given) {
  trees.check_thread();
  Held held(state.get());
  Boxed<TreeState>::of(state.get()).follow();
  Ref last = trees.last();
  check_path(last.get());
  check_caches();

  c10::SmallVector<Ref, 16> tensors;
  Pointers pointers;
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
  // Before the allocations: there the collector may run a finalizer that packs
  // other values.
  Pointers of_values;
  append_words(of_values);
  if (given != nullptr) {
    given->check_packed();
  }
  for (const Ref& allocate : allocators) {
    if (Boxed<Allocator>::is(allocate.get())) {
      at::TensorBase tensor = Boxed<Allocator>::of(allocate.get()).allocate();
      pointers.push_back(
          reinterpret_cast<uint64_t>(tensor.mutable_data_ptr()));
      tensors.push_back(checked(THPVariable_Wrap(std::move(tensor))));
    } else {
      tensors.push_back(checked(PyObject_CallNoArgs(allocate.get())));
      pointers.push_back(address_of(tensors.back().get()));
    }
  }
  pointers.append(of_values.begin(), of_values.end());
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
    trees.enter(node.get(), last.get() == Py_None);
  }
  trees.update_generation();
  Ref launched = Ref::share(Boxed<Cell>::of(graph.get()).value.get());
  PyObject* launch_args[] = {launched.get()};
  checked(PyObject_Vectorcall(launch.get(), launch_args, 1, nullptr));
  trees.note_backward();
  Ref result = collect(inputs, tensors);
  if (PyList_SetSlice(inputs, 0, PyList_GET_SIZE(inputs), nullptr) != 0) {
    throw Error();
  }
  return result.release();
}

// Throws Unusual unless the recording may follow the current path, and may be
// replayed at all.
void Replay::check_path(PyObject* last) {
  if (parent.get() != Py_None) {
    if (last != parent.get()) {
      throw Unusual();
    }
    trees.check_executing();
  } else if (last != Py_None) {
    trees.check_executing();
    if (last != last_seen.get()) {
      Ref outputs_of_last =
          checked(PyObject_CallOneArg(live_outputs.get(), last));
      live_of_last = std::make_shared<std::vector<PathOutput>>(
          path_outputs(outputs_of_last.get()));
      last_seen = Ref::share(last);
    }
    // A finalizer may call this again, after another graph.
    auto live = live_of_last;
    check_dead(*live);
  }
  if (Boxed<Cell>::of(graph.get()).value.get() == Py_None ||
      Boxed<Cell>::of(is_outdated.get()).value.get() != Py_False) {
    throw Unusual();
  }
}

// Throws Unusual unless the tensors that the node caches are as they were
// recorded; caches_are_whole in Python.
void Replay::check_caches() const {
  auto* type = reinterpret_cast<PyTypeObject*>(THPVariableClass);
  for (const Output& output : outputs) {
    if (output.kind != Output::CACHED) {
      continue;
    }
    PyObject* value = PyList_GetItem(cached.get(), output.index);
    if (value == nullptr) {
      throw Error();
    }
    const at::TensorBase& tensor = unpack(value);
    if (!Py_IS_TYPE(value, type) || tensor.scalar_type() != output.dtype ||
        is_lazy(tensor) || tensor.key_set().has(c10::DispatchKey::Named) ||
        reinterpret_cast<uint64_t>(tensor.const_data_ptr()) !=
            output.address ||
        tensor.sizes() != c10::IntArrayRef(output.sizes) ||
        tensor.strides() != c10::IntArrayRef(output.strides)) {
      throw Unusual();
    }
  }
}

bool Replay::is_in_pool(uint64_t address) const {
  // Bounds alternate between the start and the end of a segment.
  auto above = std::upper_bound(pool.begin(), pool.end(), address);
  return (above - pool.begin()) % 2 == 1;
}

void Replay::append_words(Pointers& to) const {
  if (Boxed<Words>::is(words.get())) {
    Boxed<Words>::of(words.get()).append_to(to);
  } else if (words.get() != Py_None) {
    to = as_words(checked(PyObject_CallNoArgs(words.get())).get());
  }
}

// Sets the nodes. Throws Unusual if one refused: the general path tries again
// and reports the error.
void Replay::bind(const Pointers& pointers) const {
  if (Boxed<Nodes>::is(nodes.get())) {
    Nodes& compiled = Boxed<Nodes>::of(nodes.get());
    if (pointers.size() != compiled.pointers.size() ||
        !compiled.update(pointers.data())) {
      throw Unusual();
    }
    return;
  }
  Ref list = as_list(pointers.data(), pointers.size());
  if (checked(PyObject_CallOneArg(nodes.get(), list.get())).get() != Py_True) {
    throw Unusual();
  }
}

// The outputs. Cached tensors are renewed last: what they let go of may be the
// program's, whose finalizers run.
Ref Replay::collect(
    PyObject* inputs,
    const c10::SmallVector<Ref, 16>& tensors) const {
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
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i].kind == Output::CACHED) {
      renew(PyList_GET_ITEM(result.get(), i));
    }
  }
  return result;
}

namespace {

PyGetSetDef getset[] = {
    {"plan", get<Replay, &Replay::plan>, nullptr, nullptr, nullptr},
    {"general",
     get<Replay, &Replay::general>,
     set<Replay, &Replay::general>,
     nullptr,
     nullptr},
    // A benchmark replaces these two, to leave them out of a time.
    {"nodes",
     get<Replay, &Replay::nodes>,
     set<Replay, &Replay::nodes>,
     nullptr,
     nullptr},
    {"launch",
     get<Replay, &Replay::launch>,
     set<Replay, &Replay::launch>,
     nullptr,
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

} // namespace

bool add_replay(PyObject* module) {
  return Boxed<Allocator>::ready(
             module, "torch._inductor.pygraph._replay.Allocator") &&
      Boxed<Replay>::ready(
             module,
             "torch._inductor.pygraph._replay.Replay",
             nullptr,
             getset);
}

} // namespace torch::inductor::pygraph
