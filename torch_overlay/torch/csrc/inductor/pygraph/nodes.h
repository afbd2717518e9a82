#pragma once

#include "object.h"

#include <optional>
#include <vector>

namespace torch::inductor::pygraph {

// One node of an executable graph that holds inputs.
struct Node {
  // A word of the node's parameters: the address of an input plus an offset,
  // or a CPU value.
  struct Word {
    uint64_t* place;
    size_t input;
    uint64_t offset;
  };

  explicit Node(PyObject* description);

  // Sets the node to `params`. False if the driver refused.
  bool call() const;

  // The driver function that sets the node.
  void* set;
  void* executable;
  void* node;
  // The words lie in the parameters, or the parameters point to them.
  void* params;
  std::optional<void*> context;
  std::vector<Word> words;
};

// Nodes(pointers, nodes, keep): the nodes of one executable graph that hold
// inputs, as graph/binding.py describes them. The graph holds `pointers` now.
// `keep` owns the memory that the nodes point to.
struct Nodes : NotCallable {
  Nodes(PyObject* args, PyObject* kwargs);

  // Moves the inputs to new addresses. False if a node refused: the graph must
  // not be launched then.
  bool update(const uint64_t* to);

  template <typename F>
  void visit(F&& f) {
    f(keep);
  }

  std::vector<Node> nodes;
  Pointers pointers;
  // False after a node refused: the graph holds unknown addresses.
  bool is_known = true;
  Ref keep;
};

} // namespace torch::inductor::pygraph
