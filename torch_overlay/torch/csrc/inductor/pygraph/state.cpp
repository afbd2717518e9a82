#include "state.h"

namespace torch::inductor::pygraph {

Cell::Cell(PyObject* args, PyObject* /*kwargs*/) {
  PyObject* object = nullptr;
  if (!PyArg_ParseTuple(args, "O", &object)) {
    throw Error();
  }
  value = Ref::share(object);
}

TreeState::TreeState(PyObject* args, PyObject* /*kwargs*/) {
  PyObject *index = nullptr, *stream = nullptr, *function = nullptr;
  if (!PyArg_ParseTuple(args, "OOO", &index, &stream, &function)) {
    throw Error();
  }
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

namespace {

PyObject* acquire(PyObject* self, PyObject* /*unused*/) {
  return PyBool_FromLong(Boxed<TreeState>::of(self).acquire());
}

PyObject* release(PyObject* self, PyObject* /*unused*/) {
  Boxed<TreeState>::of(self).release();
  Py_RETURN_NONE;
}

PyObject* follow(PyObject* self, PyObject* /*unused*/) {
  return guarded([&]() -> PyObject* {
    Boxed<TreeState>::of(self).follow();
    Py_RETURN_NONE;
  });
}

PyObject* get_raw_stream(PyObject* self, void* /*closure*/) {
  const auto& stream = Boxed<TreeState>::of(self).raw_stream;
  if (!stream.has_value()) {
    Py_RETURN_NONE;
  }
  return PyLong_FromUnsignedLongLong(*stream);
}

PyMethodDef tree_state_methods[] = {
    {"acquire", acquire, METH_NOARGS, nullptr},
    {"release", release, METH_NOARGS, nullptr},
    {"follow", follow, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef tree_state_getset[] = {
    {"raw_stream", get_raw_stream, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyGetSetDef cell_getset[] = {
    {"value", get<Cell, &Cell::value>, set<Cell, &Cell::value>, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

} // namespace

bool add_state(PyObject* module) {
  return Boxed<Cell>::ready(
             module,
             "torch._inductor.pygraph._replay.Cell",
             nullptr,
             cell_getset) &&
      Boxed<TreeState>::ready(
             module,
             "torch._inductor.pygraph._replay.TreeState",
             tree_state_methods,
             tree_state_getset);
}

} // namespace torch::inductor::pygraph
