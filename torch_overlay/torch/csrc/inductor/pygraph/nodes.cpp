#include "nodes.h"

#include <algorithm>

namespace torch::inductor::pygraph {

Node::Node(PyObject* description)
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

bool Node::call() const {
  if (context.has_value()) {
    using Set = int (*)(void*, void*, const void*, void*);
    return reinterpret_cast<Set>(set)(executable, node, params, *context) == 0;
  }
  using Set = int (*)(void*, void*, const void*);
  return reinterpret_cast<Set>(set)(executable, node, params) == 0;
}

Nodes::Nodes(PyObject* args, PyObject* /*kwargs*/) {
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
        PyErr_SetString(PyExc_IndexError, "a word of an unknown input");
        throw Error();
      }
    }
  });
  keep = Ref::share(owner);
}

bool Nodes::update(const uint64_t* to) {
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
      // The next update sets every node.
      is_known = false;
      return false;
    }
  }
  std::copy_n(to, pointers.size(), pointers.begin());
  is_known = true;
  return true;
}

namespace {

PyObject* update(PyObject* self, PyObject* values) {
  return guarded([&]() -> PyObject* {
    Nodes& nodes = Boxed<Nodes>::of(self);
    auto to = as_words(values);
    if (to.size() != nodes.pointers.size()) {
      PyErr_SetString(PyExc_ValueError, "expected a pointer for each input");
      return nullptr;
    }
    return PyBool_FromLong(nodes.update(to.data()));
  });
}

PyObject* pointers(PyObject* self, void* /*closure*/) {
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

PyMethodDef methods[] = {
    {"update", update, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef getset[] = {
    {"pointers", pointers, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

} // namespace

bool add_nodes(PyObject* module) {
  return Boxed<Nodes>::ready(
      module, "torch._inductor.pygraph._replay.Nodes", methods, getset);
}

} // namespace torch::inductor::pygraph
