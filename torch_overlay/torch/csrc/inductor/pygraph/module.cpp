// torch._inductor.pygraph._replay: replays, the nodes that they set, the CPU
// values that they take, and what compiled bytecode calls. Python does the same,
// slower, where this is not compiled; see torch/_inductor/pygraph/native.py.

#include "object.h"

#include <ATen/EmptyTensor.h>

namespace torch::inductor::pygraph {
namespace {

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "torch._inductor.pygraph._replay",
    nullptr,
    -1,
    nullptr};

// Whether a tensor lies in its Python object as object.h has it.
bool layout_matches() {
  // Made here: Python may be in a mode that makes other tensors.
  at::TensorBase made = at::detail::empty_cpu({3}, at::kFloat);
  const uint64_t address = address_of(made);
  Ref tensor(THPVariable_Wrap(std::move(made)));
  if (!tensor) {
    return false;
  }
  if (!PyObject_TypeCheck(
          tensor.get(), reinterpret_cast<PyTypeObject*>(THPVariableClass)) ||
      Py_TYPE(tensor.get())->tp_basicsize <
          static_cast<Py_ssize_t>(sizeof(THPVariable)) ||
      address_of(unpack(tensor.get())) != address) {
    PyErr_SetString(PyExc_ImportError, "compiled for another torch");
    return false;
  }
  return true;
}

} // namespace
} // namespace torch::inductor::pygraph

PyMODINIT_FUNC PyInit__replay() {
  using namespace torch::inductor::pygraph;
  Ref module(PyModule_Create(&definition));
  if (!module || !layout_matches() || !add_trees(module.get()) ||
      !add_values(module.get()) || !add_nodes(module.get()) ||
      !add_replay(module.get()) || !add_calls(module.get())) {
    return nullptr;
  }
  return module.release();
}
