#include "replay.h"

#include <ATen/ThreadLocalPythonObjects.h>

#include <string>

// From torch/csrc/PyInterpreter.h
c10::impl::PyInterpreter* getPyInterpreter();

namespace torch::inductor::pygraph {
namespace {

// Attributes of trees. ReplayPlan lists them.
const struct {
  PyObject* containers = PyUnicode_InternFromString("tree_manager_containers");
  PyObject* current_node = PyUnicode_InternFromString("_current_node");
  PyObject* path_state = PyUnicode_InternFromString("path_state");
  PyObject* current_gen = PyUnicode_InternFromString("current_gen");
  PyObject* running_forwards = PyUnicode_InternFromString(
      "running_forwards_with_pending_backwards");
  PyObject* mark_step_counter = PyUnicode_InternFromString("mark_step_counter");
  PyObject* generation = PyUnicode_InternFromString("generation");
  PyObject* extra_ref_check = PyUnicode_InternFromString("extra_ref_check");
} names;

Ref get(PyObject* object, PyObject* name) {
  return checked(PyObject_GetAttr(object, name));
}

void set(const Ref& object, PyObject* name, PyObject* value) {
  checked(PyObject_SetAttr(object.get(), name, value));
}

// Whether the thread records, and what it calls is to run uncaptured.
thread_local bool is_without_trees = false;

} // namespace

TreeState::TreeState(PyObject* args, PyObject* /*kwargs*/) {
  auto [index, stream, function] = members<3>(args);
  device_index = Ref::share(index);
  current_stream = Ref::share(stream);
  wait = Ref::share(function);
}

void TreeState::follow() {
  const uint64_t stream = as_word(
      checked(PyObject_CallOneArg(current_stream.get(), device_index.get()))
          .get());
  if (raw_stream == stream) {
    return;
  }
  checked(PyObject_CallNoArgs(wait.get()));
  raw_stream = stream;
}

void Trees::check_thread() const {
  using Objects = at::impl::ThreadLocalPythonObjects;
  static const std::string key = "tree_manager_containers";
  if (is_without_trees) {
    throw Unusual();
  }
  // Threads of autograd have no `local`: to ask for its attribute would raise,
  // which takes longer than the rest of a replay.
  if (Objects::contains(key)) {
    if (Objects::get(key)->ptr(getPyInterpreter()) != owner.get()) {
      throw Unusual();
    }
    return;
  }
  Ref known(PyObject_GetAttr(local.get(), names.containers));
  if (!known) {
    PyErr_Clear();
    known = checked(PyObject_CallNoArgs(containers.get()));
  }
  if (known.get() != owner.get()) {
    throw Unusual();
  }
}

Ref Trees::last_node() const {
  return get(manager.get(), names.current_node);
}

void Trees::check_executing() const {
  if (get(manager.get(), names.path_state).get() != executing.get()) {
    throw Unusual();
  }
}

void Trees::enter(PyObject* node, bool begins_path) const {
  // As the property current_node does, which does more for None alone.
  set(manager, names.current_node, node);
  if (begins_path) {
    set(manager, names.path_state, executing.get());
  }
}

void Trees::update_generation() const {
  Ref generation = get(mark_step.get(), names.mark_step_counter);
  int is_marked = PyObject_IsTrue(generation.get());
  checked(is_marked);
  if (is_marked == 0) {
    generation = get(tracker.get(), names.generation);
  }
  set(manager, names.current_gen, generation.get());
}

void Trees::note_backward() const {
  if (pending_backward.get() != Py_None) {
    set(manager, names.running_forwards, pending_backward.get());
  }
}

std::vector<PathOutput> path_outputs(const Ref& descriptions) {
  std::vector<PathOutput> result;
  for_each(descriptions.get(), [&](PyObject* output) {
    auto [weakrefs, cached, index] = members<3>(output);
    result.push_back(
        {Ref::share(weakrefs),
         Ref::share(cached),
         static_cast<Py_ssize_t>(as_word(index))});
  });
  return result;
}

void check_dead(const std::vector<PathOutput>& outputs) {
  for (const auto& output : outputs) {
    PyObject* weakref = item_of(output.weakrefs.get(), output.index);
    if (get(weakref, names.extra_ref_check).get() == Py_None) {
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

namespace {

PyObject* acquire(PyObject* self, PyObject* /*unused*/) {
  return PyBool_FromLong(Boxed<TreeState>::of(self).acquire());
}

PyObject* release(PyObject* self, PyObject* /*unused*/) {
  Boxed<TreeState>::of(self).is_held = false;
  Py_RETURN_NONE;
}

PyObject* follow(PyObject* self, PyObject* /*unused*/) {
  return guarded([&]() -> PyObject* {
    Boxed<TreeState>::of(self).follow();
    Py_RETURN_NONE;
  });
}

PyObject* raw_stream(PyObject* self, void* /*closure*/) {
  const auto& stream = Boxed<TreeState>::of(self).raw_stream;
  if (!stream.has_value()) {
    Py_RETURN_NONE;
  }
  return PyLong_FromUnsignedLongLong(*stream);
}

// set_without_trees(value): returns the value before; see without_trees in
// trees/manager.py.
PyObject* set_without_trees(PyObject* /*module*/, PyObject* value) {
  return PyBool_FromLong(std::exchange(is_without_trees, value == Py_True));
}

PyMethodDef state_methods[] = {
    {"acquire", acquire, METH_NOARGS, nullptr},
    {"release", release, METH_NOARGS, nullptr},
    {"follow", follow, METH_NOARGS, nullptr},
    {}};
PyGetSetDef state_getset[] = {
    {"raw_stream", raw_stream, nullptr, nullptr, nullptr},
    {}};
PyMethodDef functions[] = {
    {"set_without_trees", set_without_trees, METH_O, nullptr},
    {}};

} // namespace

bool add_trees(PyObject* module) {
  Boxed<TreeState>::type.tp_methods = state_methods;
  Boxed<TreeState>::type.tp_getset = state_getset;
  return Boxed<TreeState>::ready(module, "TreeState") &&
      PyModule_AddFunctions(module, functions) == 0;
}

} // namespace torch::inductor::pygraph
