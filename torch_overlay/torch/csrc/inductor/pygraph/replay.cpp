#include "replay.h"

namespace torch::inductor::pygraph {

// What renew in replay.py does.
void renew(PyObject* tensor) {
  auto* variable = reinterpret_cast<THPVariable*>(tensor);
  if (variable->backward_hooks != nullptr) {
    set_attribute(tensor, replay_names.backward_hooks, Py_None);
  }
  if (variable->post_accumulate_grad_hooks != nullptr) {
    set_attribute(tensor, replay_names.post_accumulate_grad_hooks, Py_None);
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

namespace {

// set_without_trees(value): returns what it was. See without_trees in record.py.
PyObject* set_without_trees(PyObject* /*module*/, PyObject* value) {
  return PyBool_FromLong(std::exchange(is_without_trees, value == Py_True));
}

PyMethodDef functions[] = {
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

} // namespace

bool add_replay(PyObject* module) {
  return intern({{&replay_names.tree_manager_containers, "tree_manager_containers"},
             {&replay_names.current_node, "_current_node"},
             {&replay_names.path_state, "path_state"},
             {&replay_names.extra_ref_check, "extra_ref_check"},
             {&replay_names.is_outdated, "is_outdated"},
             {&replay_names.backward_hooks, "_backward_hooks"},
             {&replay_names.post_accumulate_grad_hooks, "_post_accumulate_grad_hooks"},
             {&replay_names.is_steady, "is_steady"},
             {&replay_names.graph, "graph"},
             {&replay_names.cached_tensor_outputs, "cached_tensor_outputs"},
             {&replay_names.mark_step_counter, "mark_step_counter"},
             {&replay_names.generation, "generation"},
             {&replay_names.current_gen, "current_gen"},
             {&replay_names.running_forwards, "running_forwards_with_pending_backwards"},
             {&replay_names.pointers, "pointers"},
             {&replay_names.update, "update"},
             {&replay_names.raw_stream, "raw_stream"},
             {&replay_names.follow, "follow"}}) &&
      PyModule_AddFunctions(module, functions) == 0 &&
      Boxed<Allocator>::ready(
             module, "torch._inductor.pygraph._replay.Allocator") &&
      Boxed<Replay>::ready(
             module,
             "torch._inductor.pygraph._replay.Replay",
             nullptr,
             replay_getset);
}

} // namespace torch::inductor::pygraph
