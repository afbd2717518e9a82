#include "nodes.h"

#include <algorithm>

namespace torch::inductor::pygraph {

Node::Node(PyObject* description) {
  auto [set_, executable_, node_, params_, context_, words_] =
      members<6>(description);
  set = as_address(set_);
  executable = as_address(executable_);
  node = as_address(node_);
  params = as_address(params_);
  if (context_ != Py_None) {
    context = as_address(context_);
  }
  for_each(words_, [&](PyObject* word) {
    auto [place, input, offset_] = members<3>(word);
    long long offset = PyLong_AsLongLong(offset_);
    if (PyErr_Occurred()) {
      throw Error();
    }
    words.push_back(
        {static_cast<uint64_t*>(as_address(place)),
         as_word(input),
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
  auto [held, descriptions, owner] = members<3>(args);
  pointers = as_words(held);
  for_each(descriptions, [&](PyObject* item) {
    nodes.emplace_back(item);
    for (const auto& word : nodes.back().words) {
      if (word.input >= pointers.size()) {
        raise(PyExc_IndexError, "a word of an unknown input");
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
      raise(PyExc_ValueError, "expected a pointer for each input");
    }
    return PyBool_FromLong(nodes.update(to.data()));
  });
}

PyObject* pointers(PyObject* self, void* /*closure*/) {
  return guarded([&]() -> PyObject* {
    const Nodes& nodes = Boxed<Nodes>::of(self);
    if (nodes.is_known) {
      return as_list(nodes.pointers).release();
    }
    Ref unknown = checked(Py_BuildValue("[i]", -1));
    return PySequence_Repeat(unknown.get(), nodes.pointers.size());
  });
}

PyMethodDef methods[] = {{"update", update, METH_O, nullptr}, {}};
PyGetSetDef getset[] = {{"pointers", pointers, nullptr, nullptr, nullptr}, {}};

} // namespace

bool add_nodes(PyObject* module) {
  return Boxed<Nodes>::ready(
      module, "torch._inductor.pygraph._replay.Nodes", methods, getset);
}

} // namespace torch::inductor::pygraph
