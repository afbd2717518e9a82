#include "replay.h"

#include "nodes.h"
#include "values.h"

#include <ATen/cuda/EmptyTensor.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/Dtype.h>

#include <algorithm>

namespace torch::inductor::pygraph {

Launch::Launch(PyObject* args, PyObject* /*kwargs*/) {
  auto [function, graph, index, device, stream, fallback, like] =
      members<7>(args);
  launch = as_address(function);
  executable = as_address(graph);
  device_index = Ref::share(index);
  current_device = Ref::share(device);
  current_stream = Ref::share(stream);
  general = Ref::share(fallback);
  count = like == Py_None
      ? std::make_shared<uint64_t>(0)
      : Boxed<Launch>::of(Boxed<Launch>::share(like).get()).count;
  last = ++*count;
}

PyObject* Launch::call(const Call& call) {
  return guarded([&]() -> PyObject* {
    last = ++*count;
    Ref device = checked(PyObject_CallNoArgs(current_device.get()));
    if (as_word(device.get()) == as_word(device_index.get())) {
      Ref stream = checked(
          PyObject_CallOneArg(current_stream.get(), device_index.get()));
      using Function = int (*)(void*, void*);
      int status = 0;
      void* to = as_address(stream.get());
      // As torch.cuda.CUDAGraph.replay, which may wait for the driver.
      Py_BEGIN_ALLOW_THREADS;
      status = reinterpret_cast<Function>(launch)(executable, to);
      Py_END_ALLOW_THREADS;
      if (status == 0) {
        Py_RETURN_NONE;
      }
    }
    return call.pass_to(general);
  });
}

namespace {

PyObject* age(PyObject* self, void* /*closure*/) {
  const Launch& launch = Boxed<Launch>::of(self);
  return PyLong_FromUnsignedLongLong(*launch.count - launch.last);
}

// How many other launches of the recording there were since the last one.
PyGetSetDef launch_getset[] = {
    {"age", age, nullptr, nullptr, nullptr},
    {}};

at::ScalarType dtype_of(PyObject* dtype) {
  return reinterpret_cast<THPDtype*>(dtype)->scalar_type;
}

// Whether a tensor is not what lies at its address; is_lazy in Python.
bool is_lazy(const at::TensorBase& tensor) {
  constexpr c10::DispatchKeySet LAZY(
      {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  return tensor.key_set().has_any(LAZY);
}

// The numbers at these places.
c10::SmallVector<int64_t, 5> at_places(
    const std::vector<int64_t>& places,
    const uint64_t* numbers) {
  c10::SmallVector<int64_t, 5> result;
  for (int64_t i : places) {
    result.push_back(static_cast<int64_t>(numbers[i]));
  }
  return result;
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
  if (impl->version_counter().current_version() != 0) {
    impl->set_version_counter(c10::VariableVersion(0));
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
  is_sized = PyTuple_Check(args) && PyTuple_GET_SIZE(args) == 5;
  Ref fixed = checked(PyTuple_GetSlice(args, 0, 4));
  auto [sizes, strides, dtype, index] = members<4>(fixed.get());
  size = as_sizes(sizes);
  stride = as_sizes(strides);
  scalar_type = dtype_of(dtype);
  device.set_index(static_cast<c10::DeviceIndex>(as_word(index)));
}

at::TensorBase Allocator::allocate(const uint64_t* numbers) const {
  if (!is_sized) {
    return at::detail::empty_strided_cuda(size, stride, scalar_type, device);
  }
  return at::detail::empty_strided_cuda(
      at_places(size, numbers), at_places(stride, numbers), scalar_type, device);
}

PyObject* Allocator::call(const Call& call) const {
  return guarded([&]() {
    Pointers numbers;
    if (is_sized) {
      numbers = as_numbers(call.count() == 1 ? call.args[0] : Py_None);
    }
    return THPVariable_Wrap(allocate(numbers.data()));
  });
}

View::View(PyObject* description) {
  auto [tensor_, size_, stride_, offset_, itemsize_] = members<5>(description);
  tensor = as_word(tensor_);
  size = as_sizes(size_);
  stride = as_sizes(stride_);
  offset = as_word(offset_);
  itemsize = as_word(itemsize_);
}

// As torch::inductor::_reinterpret_tensor.
Ref View::of(const at::TensorBase& base, const uint64_t* numbers) const {
  auto view = at::detail::make_tensor_base<c10::TensorImpl>(
      c10::Storage(base.storage()), base.key_set(), base.dtype());
  c10::TensorImpl* impl = view.unsafeGetTensorImpl();
  impl->set_storage_offset(
      base.storage_offset() + static_cast<int64_t>(numbers[offset] / itemsize));
  impl->set_sizes_and_strides(
      at_places(size, numbers), at_places(stride, numbers));
  return checked(THPVariable_Wrap(std::move(view)));
}

Replay::Replay(PyObject* args, PyObject* /*kwargs*/)
    : Trees(members<3>(args)[0]),
      state(Boxed<TreeState>::share(members<3>(args)[1])),
      general(Ref::share(members<3>(args)[2])) {
  for_each(of("static").get(), [&](PyObject* input) {
    auto [i, address] = members<2>(input);
    static_inputs.emplace_back(as_word(i), as_word(address));
  });
  for_each(of("allocators").get(), [&](PyObject* allocate) {
    allocators.push_back(Ref::share(allocate));
  });
  for_each(of("views").get(), [&](PyObject* view) { views.emplace_back(view); });
  for_each(of("outputs").get(), [&](PyObject* output) { add_output(output); });
}

void Replay::add_output(PyObject* output) {
  auto [kind, value] = members<2>(output);
  auto is = [kind = kind](const char* name) {
    return PyUnicode_Check(kind) &&
        PyUnicode_CompareWithASCIIString(kind, name) == 0;
  };
  if (is("bound") || is("input") || is("number")) {
    outputs.push_back(
        {is("bound")       ? Output::BOUND
             : is("input") ? Output::INPUT
                           : Output::NUMBER,
         as_word(value)});
  } else if (is("constant") || is("made")) {
    outputs.push_back(
        {is("made") ? Output::MADE : Output::CONSTANT, 0, Ref::share(value)});
  } else {
    auto [address, sizes, strides, dtype] = members<4>(value);
    outputs.push_back(
        {Output::CACHED,
         outputs.size(),
         Ref(),
         as_word(address),
         as_sizes(sizes),
         as_sizes(strides),
         dtype_of(dtype)});
  }
}

PyObject* Replay::call(const Call& call) {
  bool has_dropped = false;
  auto replay = [&]() -> PyObject* {
    const bool has_numbers = call.count() == 3;
    if (!(has_numbers || call.count() == 1) ||
        !PyList_CheckExact(call.args[0]) || !fits(call.args[0])) {
      return nullptr;
    }
    check_not_captured(is_capturing);
    PyObject* numbers = has_numbers ? call.args[1] : nullptr;
    PyObject* row = has_numbers ? call.args[2] : nullptr;
    return run(call.args[0], has_dropped, {}, numbers, row);
  };
  return attempted(replay, [&]() -> PyObject* {
    bool is_whole = !has_dropped || Ref(call.pass_to(restore));
    return is_whole ? call.pass_to(general) : nullptr;
  });
}

bool Replay::fits(PyObject* inputs) const {
  return static_cast<size_t>(PyList_GET_SIZE(inputs)) >= num_inputs &&
      // The collector clears this first.
      Boxed<TreeState>::is(state.get()) &&
      std::all_of(
             static_inputs.begin(), static_inputs.end(), [&](const auto& input) {
               const auto& tensor = unpack(PyList_GET_ITEM(inputs, input.first));
               return address_of(tensor) == input.second;
             });
}

PyObject* Replay::run(
    PyObject* inputs,
    bool& has_dropped,
    const Given& given,
    PyObject* numbers,
    PyObject* row) {
  check_thread();
  TreeState& of_trees = Boxed<TreeState>::of(state.get());
  if (!of_trees.acquire()) {
    throw Unusual();
  }
  auto held = c10::make_scope_exit(
      [&of_trees, owner = Ref::share(state.get())]() { of_trees.is_held = false; });
  of_trees.follow();
  // Without a node the recording is none of trees'.
  const bool is_in_tree = node.get() != Py_None;
  Ref last = is_in_tree ? last_node() : Ref::share(Py_None);
  check_path(last.get());
  check_caches();

  c10::SmallVector<Ref, 16> tensors;
  Pointers pointers;
  uint64_t misaligned = 0;
  for (size_t k = 0; k < bound.size(); ++k) {
    // Others may drop theirs while the launch lets them run.
    tensors.push_back(Ref::share(PyList_GET_ITEM(inputs, bound[k])));
    const at::TensorBase& tensor = unpack(tensors.back().get());
    pointers.push_back(address_of(tensor));
    // Alignments are powers of two.
    misaligned |= pointers.back() & (alignments[k] - 1);
    // Bounds alternate between the start and the end of a segment.
    auto above = std::upper_bound(pool.begin(), pool.end(), pointers.back());
    if ((above - pool.begin()) % 2 == 1 || is_lazy(tensor)) {
      throw Unusual();
    }
  }
  if (misaligned != 0) {
    throw Unusual();
  }
  // Before the allocations: there the collector may run a finalizer that packs
  // other values.
  Pointers of_values;
  if (Boxed<Words>::is(words.get())) {
    of_values = Boxed<Words>::of(words.get()).get();
  } else if (words.get() != Py_None) {
    of_values = as_words(checked(PyObject_CallNoArgs(words.get())).get());
  }
  Given::check(given.packed);
  if (numbers != nullptr) {
    of_values = as_numbers(numbers);
  }
  for (const Ref& allocate : allocators) {
    PyObject* allocated = Boxed<Allocator>::is(allocate.get())
        ? THPVariable_Wrap(Boxed<Allocator>::of(allocate.get())
                               .allocate(of_values.data()))
        : PyObject_Vectorcall(
              allocate.get(), &numbers, numbers == nullptr ? 0 : 1, nullptr);
    tensors.push_back(checked(allocated));
    pointers.push_back(address_of(unpack(allocated)));
  }
  pointers.append(of_values.begin(), of_values.end());
  check_dead(dead_before);
  for (uint64_t i : dropped) {
    has_dropped = true;
    checked(PyList_SetItem(inputs, i, Ref::share(Py_None).release()));
  }
  check_dead(dead_after);
  bind(pointers, row);
  Given::check(given.staged);

  if (is_in_tree) {
    if (last.get() != node.get()) {
      enter(node.get(), last.get() == Py_None);
    }
    update_generation();
  }
  Ref launched = checked(PyCell_Get(graph.get()));
  checked(PyObject_CallOneArg(launch.get(), launched.get()));
  note_backward();
  for (const View& view : views) {
    const at::TensorBase& base = unpack(tensors[view.tensor].get());
    tensors.push_back(view.of(base, of_values.data()));
  }
  Ref result = collect(inputs, tensors, numbers);
  checked(PyList_SetSlice(inputs, 0, PyList_GET_SIZE(inputs), nullptr));
  return result.release();
}

// Throws Unusual unless the recording may follow the current path, and may be
// replayed at all.
void Replay::check_path(PyObject* last) {
  if (parent.get() != Py_None) {
    if (last != parent.get()) {
      throw Unusual();
    }
    check_executing();
  } else if (last != Py_None) {
    check_executing();
    if (last != last_seen.get()) {
      Ref outputs_of_last =
          checked(PyObject_CallOneArg(live_outputs.get(), last));
      live_of_last = std::make_shared<std::vector<PathOutput>>(
          path_outputs(outputs_of_last));
      last_seen = Ref::share(last);
    }
    // A finalizer may call this again, after another graph.
    auto live = live_of_last;
    check_dead(*live);
  }
  // The collector may have emptied the cells.
  PyObject* recorded = PyCell_GET(graph.get());
  if (recorded == nullptr || recorded == Py_None ||
      PyCell_GET(is_outdated.get()) != Py_False) {
    throw Unusual();
  }
}

// Throws Unusual unless the tensors that the node caches are as they were
// recorded.
void Replay::check_caches() const {
  auto* type = reinterpret_cast<PyTypeObject*>(THPVariableClass);
  for (const Output& output : outputs) {
    if (output.kind != Output::CACHED) {
      continue;
    }
    PyObject* value = item_of(cached.get(), output.index);
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

// Sets the nodes. Throws Unusual if one refused: the general path tries again
// and reports the error.
void Replay::bind(const Pointers& pointers, PyObject* row) const {
  PyObject* to = row == nullptr ? nodes.get() : row;
  if (Boxed<Row>::is(to)) {
    Row& compiled = Boxed<Row>::of(to);
    if (pointers.size() != compiled.count || !compiled.update(pointers)) {
      throw Unusual();
    }
    return;
  }
  if (Boxed<Nodes>::is(to)) {
    Nodes& compiled = Boxed<Nodes>::of(to);
    if (pointers.size() != compiled.pointers.size() ||
        !compiled.update(pointers.data())) {
      throw Unusual();
    }
    return;
  }
  Ref list = as_list(pointers);
  if (checked(PyObject_CallOneArg(to, list.get())).get() != Py_True) {
    throw Unusual();
  }
}

// The outputs. Cached tensors are renewed last: what they let go of may be the
// program's, whose finalizers run.
Ref Replay::collect(
    PyObject* inputs,
    const c10::SmallVector<Ref, 16>& tensors,
    PyObject* numbers) const {
  Ref result = checked(PyList_New(outputs.size()));
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Output& output = outputs[i];
    if (output.kind == Output::MADE) {
      Ref made = checked(PyObject_CallNoArgs(output.value.get()));
      PyList_SET_ITEM(result.get(), i, made.release());
      continue;
    }
    PyObject* value = output.value.get();
    if (output.kind == Output::BOUND) {
      value = tensors[output.index].get();
    } else if (output.kind == Output::CACHED) {
      value = item_of(cached.get(), output.index);
    } else if (output.kind == Output::INPUT) {
      value = item_of(inputs, output.index);
    } else if (output.kind == Output::NUMBER) {
      value = PyTuple_GetItem(numbers, static_cast<Py_ssize_t>(output.index));
      if (value == nullptr) {
        throw Error();
      }
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

// A benchmark replaces nodes and launch, to leave them out of a time.
PyMemberDef replay_members[] = {
    {"plan", T_OBJECT, offsetof(Boxed<Replay>, value.plan)},
    {"general", T_OBJECT, offsetof(Boxed<Replay>, value.general)},
    {"nodes", T_OBJECT, offsetof(Boxed<Replay>, value.nodes)},
    {"launch", T_OBJECT, offsetof(Boxed<Replay>, value.launch)},
    {}};

} // namespace

bool add_replay(PyObject* module) {
  Boxed<Launch>::type.tp_getset = launch_getset;
  Boxed<Replay>::type.tp_members = replay_members;
  return Boxed<Allocator>::ready(module, "Allocator") &&
      Boxed<Launch>::ready(module, "Launch") &&
      Boxed<Replay>::ready(module, "Replay");
}

} // namespace torch::inductor::pygraph
