#pragma once

#include "nodes.h"
#include "values.h"

#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/cuda/EmptyTensor.h>
#include <torch/csrc/Dtype.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>

// From torch/csrc/PyInterpreter.h
c10::impl::PyInterpreter* getPyInterpreter();

namespace torch::inductor::pygraph {

// Names of attributes that a replay looks up.
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
  PyObject* raw_stream;
  PyObject* follow;
};

inline Names replay_names;

void renew(PyObject* tensor);

// Whether the thread records, and what it calls is to run uncaptured.
inline thread_local bool is_without_trees = false;

inline at::ScalarType dtype_of(PyObject* dtype) {
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
    Ref last = attribute(manager.get(), replay_names.current_node);
    check_path(last.get());
    Ref cached = attribute(node.get(), replay_names.cached_tensor_outputs);
    check_whole(cached.get());

    c10::SmallVector<Ref, 16> tensors;
    Words64 pointers;
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
    Words64 words;
    if (Boxed<Words>::is(values.get())) {
      Boxed<Words>::of(values.get()).append_to(words);
    } else if (values.get() != Py_None) {
      words = as_words(checked(PyObject_CallNoArgs(values.get())).get());
    }
    if (given != nullptr) {
      given->check_packed();
    }
    for (const Ref& allocate : allocators) {
      if (Boxed<Allocator>::is(allocate.get())) {
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
      set_attribute(manager.get(), replay_names.current_node, node.get());
      if (last.get() == Py_None) {
        // Else check_path saw it.
        set_attribute(manager.get(), replay_names.path_state, executing.get());
      }
    }
    update_generation();
    Ref graph = attribute(node.get(), replay_names.graph);
    PyObject* launch_args[] = {graph.get()};
    checked(PyObject_Vectorcall(launch.get(), launch_args, 1, nullptr));
    if (pending.get() != Py_None) {
      set_attribute(manager.get(), replay_names.running_forwards, pending.get());
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
    Ref known(PyObject_GetAttr(local.get(), replay_names.tree_manager_containers));
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
    Ref last = attribute(stream_order.get(), replay_names.raw_stream);
    int is_last = PyObject_RichCompareBool(stream.get(), last.get(), Py_EQ);
    if (is_last < 0) {
      throw Error();
    }
    if (is_last == 0) {
      checked(PyObject_CallMethodNoArgs(stream_order.get(), replay_names.follow));
    }
  }

  void check_path(PyObject* last) {
    if (parent.get() != Py_None) {
      if (last != parent.get() ||
          attribute(manager.get(), replay_names.path_state).get() !=
              executing.get()) {
        throw Unusual();
      }
    } else if (last != Py_None) {
      if (attribute(manager.get(), replay_names.path_state).get() !=
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
    if (attribute(node.get(), replay_names.is_steady).get() != Py_True ||
        attribute(function.get(), replay_names.is_outdated).get() != Py_False) {
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
      if (attribute(weakref, replay_names.extra_ref_check).get() == Py_None) {
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
  void bind(const Words64& pointers) {
    if (Boxed<Nodes>::is(binding.get())) {
      Nodes& nodes = Boxed<Nodes>::of(binding.get());
      if (pointers.size() != nodes.pointers.size() ||
          !nodes.update(pointers.data())) {
        throw Unusual();
      }
      return;
    }
    Ref list = as_list(pointers.data(), pointers.size());
    Ref held = attribute(binding.get(), replay_names.pointers);
    int equal = PyObject_RichCompareBool(list.get(), held.get(), Py_EQ);
    if (equal < 0) {
      throw Error();
    }
    if (equal == 0 &&
        !Ref(PyObject_CallMethodOneArg(
            binding.get(), replay_names.update, list.get()))) {
      if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        throw Error();
      }
      PyErr_Clear();
      throw Unusual();
    }
  }

  // CUDAGraphTreeManager.update_generation
  void update_generation() {
    Ref generation = attribute(mark_step.get(), replay_names.mark_step_counter);
    int is_marked = PyObject_IsTrue(generation.get());
    if (is_marked < 0) {
      throw Error();
    }
    if (is_marked == 0) {
      generation = attribute(tracker.get(), replay_names.generation);
    }
    set_attribute(manager.get(), replay_names.current_gen, generation.get());
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

bool add_replay(PyObject* module);

} // namespace torch::inductor::pygraph
