#include "nodes.h"

#include <algorithm>
#include <cstring>

namespace torch::inductor::pygraph {
namespace {

std::optional<size_t> as_optional_word(PyObject* value) {
  return value == Py_None ? std::nullopt : std::optional(as_word(value));
}

} // namespace

Node::Node(PyObject* description) {
  auto [set_, executable_, node_, params_, context_, words_] =
      members<6>(description);
  set = as_address(set_);
  executable = as_address(executable_);
  node = as_address(node_);
  params = as_address(params_);
  is_switch = context_ == Py_False;
  if (context_ != Py_None && !is_switch) {
    context = as_address(context_);
  }
  for_each(words_, [&](PyObject* word) {
    auto [place, nbytes, input, offset, plus] = members<5>(word);
    words.push_back(
        {as_address(place),
         as_word(nbytes) == sizeof(uint32_t),
         as_word(input),
         PyLong_AsUnsignedLongLongMask(offset),
         as_optional_word(plus)});
  });
}

bool Node::Word::write(const uint64_t* inputs) const {
  const uint64_t value =
      inputs[input] + offset + (plus.has_value() ? inputs[*plus] : 0);
  if (is_short) {
    auto* to = static_cast<uint32_t*>(place);
    return std::exchange(*to, static_cast<uint32_t>(value)) !=
        static_cast<uint32_t>(value);
  }
  return std::exchange(*static_cast<uint64_t*>(place), value) != value;
}

bool Node::write(const uint64_t* inputs) const {
  bool has_changed = false;
  for (const Word& word : words) {
    has_changed |= word.write(inputs);
  }
  return has_changed;
}

bool Node::call() const {
  if (is_switch) {
    using Set = int (*)(void*, void*, unsigned);
    const unsigned flag = *static_cast<const uint32_t*>(params);
    return reinterpret_cast<Set>(set)(executable, node, flag) == 0;
  }
  if (context.has_value()) {
    using Set = int (*)(void*, void*, const void*, void*);
    return reinterpret_cast<Set>(set)(executable, node, params, *context) == 0;
  }
  using Set = int (*)(void*, void*, const void*);
  return reinterpret_cast<Set>(set)(executable, node, params) == 0;
}

Nodes::Nodes(PyObject* args, PyObject* /*kwargs*/) {
  auto [known, descriptions, owner] = members<3>(args);
  pointers = as_words(known);
  for_each(descriptions, [&](PyObject* item) { nodes.emplace_back(item); });
  keep = Ref::share(owner);
}

PyObject* Nodes::call(const Call& call) {
  return guarded([&]() -> PyObject* {
    auto to = as_numbers(call.count() == 1 ? call.args[0] : Py_None);
    if (to.size() != pointers.size()) {
      raise(PyExc_ValueError, "expected a pointer for each input");
    }
    return PyBool_FromLong(update(to.data()));
  });
}

bool Nodes::update(const uint64_t* to) {
  if (is_known && std::equal(pointers.begin(), pointers.end(), to)) {
    return true;
  }
  const bool sets_all = !std::exchange(is_known, false);
  for (const Node& node : nodes) {
    const bool has_changed = node.write(to);
    if ((has_changed || sets_all) && !node.call()) {
      return false;
    }
  }
  std::copy_n(to, pointers.size(), pointers.begin());
  is_known = true;
  return true;
}

NodeSet::NodeSet(PyObject* args, PyObject* /*kwargs*/) {
  static uint64_t count = 0;
  number = ++count;
  if (PyTuple_Check(args) && PyTuple_GET_SIZE(args) == 2) {
    auto [descriptions, owner] = members<2>(args);
    for_each(descriptions, [&](PyObject* item) { nodes.emplace_back(item); });
    keep = Ref::share(owner);
    return;
  }
  auto [launched, executable, handles, sources, owner] = members<5>(args);
  Ref to = checked(PySequence_Fast(handles, "expected a sequence"));
  std::vector<std::optional<Source>> of_tensors;
  for_each(sources, [&](PyObject* source) {
    of_tensors.emplace_back();
    if (source != Py_None) {
      auto [input, offset, plus] = members<3>(source);
      of_tensors.back() = {
          as_word(input),
          PyLong_AsUnsignedLongLongMask(offset),
          as_optional_word(plus)};
    }
  });
  Py_ssize_t i = 0;
  for_each(launched, [&](PyObject* node) {
    if (i == PySequence_Fast_GET_SIZE(to.get())) {
      raise(PyExc_ValueError, "expected a node for each launch");
    }
    nodes.emplace_back();
    nodes.back().executable = as_address(executable);
    nodes.back().node =
        as_address(PySequence_Fast_GET_ITEM(to.get(), i++));
    copy(node, of_tensors);
  });
  keep = Ref::share(owner);
}

// Gives the last node parameters of its own.
void NodeSet::copy(
    PyObject* launched,
    const std::vector<std::optional<Source>>& sources) {
  // Where CUDA_KERNEL_NODE_PARAMS has kernelParams.
  constexpr size_t KERNEL_PARAMS = 40;
  auto [set, params, contents, context, slots] = members<5>(launched);
  Node& node = nodes.back();
  node.set = as_address(set);
  auto add = [&](size_t nbytes) {
    memory.push_back(std::make_unique<std::byte[]>(nbytes));
    return memory.back().get();
  };
  auto copied = [&](PyObject* content) {
    char* from = nullptr;
    Py_ssize_t nbytes = 0;
    checked(PyBytes_AsStringAndSize(content, &from, &nbytes));
    std::byte* to = add(nbytes);
    std::memcpy(to, from, nbytes);
    return std::pair(to, static_cast<size_t>(nbytes));
  };
  std::vector<std::pair<std::byte*, size_t>> buffers = {copied(params)};
  auto [structure, structure_bytes] = buffers[0];
  node.params = structure;
  if (context != Py_None) {
    // Words lie in the struct itself.
    node.context = as_address(context);
  } else {
    buffers.clear();
    for_each(contents, [&](PyObject* c) { buffers.push_back(copied(c)); });
    std::byte* pointers = add(buffers.size() * sizeof(void*));
    for (size_t i = 0; i < buffers.size(); ++i) {
      std::memcpy(
          pointers + i * sizeof(void*), &buffers[i].first, sizeof(void*));
    }
    if (structure_bytes < KERNEL_PARAMS + sizeof(void*)) {
      raise(PyExc_ValueError, "expected CUDA_KERNEL_NODE_PARAMS");
    }
    std::memcpy(structure + KERNEL_PARAMS, &pointers, sizeof(void*));
  }
  for_each(slots, [&](PyObject* slot) {
    auto [buffer, offset, tensor, delta] = members<4>(slot);
    const size_t first = as_word(offset);
    if (as_word(buffer) >= buffers.size() || as_word(tensor) >= sources.size() ||
        first + sizeof(uint64_t) > buffers[as_word(buffer)].second) {
      raise(PyExc_ValueError, "expected a word of a parameter");
    }
    // Others stay where the library call had them.
    if (const auto& source = sources[as_word(tensor)]) {
      node.words.push_back(
          {buffers[as_word(buffer)].first + first,
           false,
           source->input,
           source->offset + PyLong_AsUnsignedLongLongMask(delta),
           source->plus});
    }
  });
}

Row::Row(PyObject* args, PyObject* /*kwargs*/) {
  auto [count_, sets_, like] = members<3>(args);
  count = as_word(count_);
  size_t nodes = 0;
  for_each(sets_, [&](PyObject* set) {
    sets.push_back(Boxed<NodeSet>::share(set));
    nodes += Boxed<NodeSet>::of(set).nodes.size();
  });
  if (like == Py_None) {
    held = std::make_shared<Held>();
    held->sets.resize(nodes);
  } else {
    held = Boxed<Row>::of(Boxed<Row>::share(like).get()).held;
  }
  number = ++held->rows;
  if (held->sets.size() != nodes) {
    raise(PyExc_ValueError, "expected all nodes of the graph");
  }
}

PyObject* Row::call(const Call& call) {
  return guarded([&]() -> PyObject* {
    return PyBool_FromLong(
        update(as_numbers(call.count() == 1 ? call.args[0] : Py_None)));
  });
}

bool Row::update(const Pointers& to) {
  if (to.size() != count) {
    raise(PyExc_ValueError, "expected all addresses and numbers");
  }
  if (held->row == number && held->inputs == to) {
    return true;
  }
  held->row = 0;
  auto last = held->sets.begin();
  for (const Ref& ref : sets) {
    const NodeSet& set = Boxed<NodeSet>::of(ref.get());
    for (const Node& node : set.nodes) {
      const bool has_changed = node.write(to.data());
      if ((has_changed || *last != set.number) && !node.call()) {
        held->forget();
        return false;
      }
      *last++ = set.number;
    }
  }
  held->inputs = to;
  held->row = number;
  return true;
}

namespace {

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

PyGetSetDef nodes_getset[] = {
    {"pointers", pointers, nullptr, nullptr, nullptr},
    {}};

} // namespace

bool add_nodes(PyObject* module) {
  Boxed<Nodes>::type.tp_getset = nodes_getset;
  return Boxed<Nodes>::ready(module, "Nodes") &&
      Boxed<NodeSet>::ready(module, "NodeSet") &&
      Boxed<Row>::ready(module, "Row");
}

} // namespace torch::inductor::pygraph
