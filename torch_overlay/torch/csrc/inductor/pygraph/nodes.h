#pragma once

// The nodes of executable graphs, and what sets them to the addresses and
// numbers of a call. graph/ in Python does the same where this is not compiled.

#include "object.h"

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

namespace torch::inductor::pygraph {

// One node of an executable graph that holds inputs, or whether it is enabled.
struct Node {
  // A word of the node's parameters, of 8 or 4 bytes: the address of an input,
  // or a number, plus an offset, plus another number if there is a `plus`.
  struct Word {
    // Returns whether the word changed.
    bool write(const uint64_t* inputs) const;

    void* place;
    bool is_short;
    size_t input;
    uint64_t offset;
    std::optional<size_t> plus;
  };

  Node() = default;
  explicit Node(PyObject* description);

  // Returns whether a word changed.
  bool write(const uint64_t* inputs) const;

  // Sets the node to `params`. False if the driver refused.
  bool call() const;

  // The driver function that sets the node.
  void* set = nullptr;
  void* executable = nullptr;
  void* node = nullptr;
  // The words lie in the parameters, or the parameters point to them.
  void* params = nullptr;
  std::optional<void*> context;
  std::vector<Word> words;
  // `params` is the flag that switches the node on.
  bool is_switch = false;
};

// Nodes(pointers, nodes, keep): the nodes of one executable graph that hold
// inputs, as graph/binding.py describes them. The graph holds `pointers` now.
// `keep` owns the memory that the nodes point to. A call updates them.
struct Nodes {
  Nodes(PyObject* args, PyObject* kwargs);
  PyObject* call(const Call& call);

  // Sets the nodes to these inputs. False if a node refused: the graph must not
  // be launched then.
  bool update(const uint64_t* to);

  template <typename F>
  void visit(F&& f) {
    f(keep);
  }

  std::vector<Node> nodes;
  Pointers pointers;
  Ref keep;
  bool is_known = true;
};

// NodeSet(nodes, keep): some nodes of an executable graph, which rows share, as
// Nodes has them.
//
// NodeSet(launched, executable, handles, sources, keep): the nodes of a library
// call, set to what it launches, as graph/entry.py describes it. `sources` has
// for each tensor where a call has its address, or None. Parameters are copied.
struct NodeSet {
  static constexpr bool IS_LEAF = true;

  NodeSet(PyObject* args, PyObject* kwargs);
  PyObject* call(const Call& /*call*/) {
    PyErr_SetString(PyExc_TypeError, "not callable");
    return nullptr;
  }

  std::vector<Node> nodes;
  Ref keep;
  // Of parameters that were copied.
  std::vector<std::unique_ptr<std::byte[]>> memory;
  // No other set has it, also after this one is gone.
  uint64_t number;

 private:
  // Where the address of a tensor is, as Node::Word has it.
  struct Source {
    size_t input;
    uint64_t offset;
    std::optional<size_t> plus;
  };

  void copy(
      PyObject* launched,
      const std::vector<std::optional<Source>>& sources);
};

// What the nodes of an executable graph were set to last.
struct Held {
  // The next update sets every node.
  void forget() {
    std::fill(sets.begin(), sets.end(), 0);
    row = 0;
  }

  // By node the number of the set, 0 if it is not known.
  std::vector<uint64_t> sets;
  // The number of the Row, 0 if none set all nodes, and what it was called with.
  uint64_t row = 0;
  Pointers inputs;
  uint64_t rows = 0;
};

// Row(count, sets, like): all nodes of an executable graph, as graph/sized.py
// has them. `like` is another row of the same graph, or None: what the nodes
// hold is not known then. A call sets them to addresses and numbers.
struct Row {
  static constexpr bool IS_LEAF = true;

  Row(PyObject* args, PyObject* kwargs);
  PyObject* call(const Call& call);

  // As Nodes::update.
  bool update(const Pointers& to);

  std::vector<Ref> sets;
  std::shared_ptr<Held> held;
  uint64_t number;
  // How many inputs the words of the nodes refer to.
  size_t count;
};

} // namespace torch::inductor::pygraph
