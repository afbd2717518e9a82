#include "trees.h"

#include <ATen/ThreadLocalPythonObjects.h>

#include <string>

// From torch/csrc/PyInterpreter.h
c10::impl::PyInterpreter* getPyInterpreter();

namespace torch::inductor::pygraph {
namespace {

// Attributes of trees. ReplayPlan lists them.
struct {
  PyObject* tree_manager_containers;
  PyObject* current_node;
  PyObject* path_state;
  PyObject* current_gen;
  PyObject* running_forwards;
  PyObject* mark_step_counter;
  PyObject* generation;
  PyObject* extra_ref_check;
} names;

// Whether the thread records, and what it calls is to run uncaptured.
thread_local bool is_without_trees = false;

} // namespace

Trees::Trees(PyObject* plan)
    : manager_(field_of(plan, "manager")),
      executing_(field_of(plan, "executing")),
      mark_step_(field_of(plan, "mark_step")),
      tracker_(field_of(plan, "tracker")),
      local_(field_of(plan, "local")),
      containers_(field_of(plan, "containers")),
      owner_(field_of(plan, "owner")),
      pending_backward_(field_of(plan, "pending_backward")) {}

void Trees::check_thread() const {
  using Objects = at::impl::ThreadLocalPythonObjects;
  static const std::string key = "tree_manager_containers";
  if (is_without_trees) {
    throw Unusual();
  }
  // Threads of autograd have no `local`: to ask for its attribute would raise,
  // which takes longer than the rest of a replay.
  if (Objects::contains(key)) {
    if (Objects::get(key)->ptr(getPyInterpreter()) != owner_.get()) {
      throw Unusual();
    }
    return;
  }
  Ref known(PyObject_GetAttr(local_.get(), names.tree_manager_containers));
  if (!known) {
    PyErr_Clear();
    known = checked(PyObject_CallNoArgs(containers_.get()));
  }
  if (known.get() != owner_.get()) {
    throw Unusual();
  }
}

Ref Trees::last() const {
  return attribute(manager_.get(), names.current_node);
}

void Trees::check_executing() const {
  if (attribute(manager_.get(), names.path_state).get() != executing_.get()) {
    throw Unusual();
  }
}

void Trees::enter(PyObject* node, bool begins_path) const {
  // As the property current_node does, which does more for None alone.
  set_attribute(manager_.get(), names.current_node, node);
  if (begins_path) {
    set_attribute(manager_.get(), names.path_state, executing_.get());
  }
}

void Trees::update_generation() const {
  Ref generation = attribute(mark_step_.get(), names.mark_step_counter);
  int is_marked = PyObject_IsTrue(generation.get());
  if (is_marked < 0) {
    throw Error();
  }
  if (is_marked == 0) {
    generation = attribute(tracker_.get(), names.generation);
  }
  set_attribute(manager_.get(), names.current_gen, generation.get());
}

void Trees::note_backward() const {
  if (pending_backward_.get() != Py_None) {
    set_attribute(
        manager_.get(), names.running_forwards, pending_backward_.get());
  }
}

std::vector<PathOutput> path_outputs(PyObject* descriptions) {
  std::vector<PathOutput> result;
  for_each(descriptions, [&](PyObject* output) {
    result.push_back(
        {Ref::share(field(output, 0)),
         Ref::share(field(output, 1)),
         static_cast<Py_ssize_t>(as_word(field(output, 2)))});
  });
  return result;
}

void check_dead(const std::vector<PathOutput>& outputs) {
  for (const auto& output : outputs) {
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

namespace {

// set_without_trees(value): returns the value before; see without_trees in
// trees/threads.py.
PyObject* set_without_trees(PyObject* /*module*/, PyObject* value) {
  return PyBool_FromLong(std::exchange(is_without_trees, value == Py_True));
}

PyMethodDef functions[] = {
    {"set_without_trees", set_without_trees, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};

} // namespace

bool add_trees(PyObject* module) {
  return intern(
             {{&names.tree_manager_containers, "tree_manager_containers"},
              {&names.current_node, "_current_node"},
              {&names.path_state, "path_state"},
              {&names.current_gen, "current_gen"},
              {&names.running_forwards,
               "running_forwards_with_pending_backwards"},
              {&names.mark_step_counter, "mark_step_counter"},
              {&names.generation, "generation"},
              {&names.extra_ref_check, "extra_ref_check"}}) &&
      PyModule_AddFunctions(module, functions) == 0;
}

} // namespace torch::inductor::pygraph
