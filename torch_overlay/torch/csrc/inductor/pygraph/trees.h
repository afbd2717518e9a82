#pragma once

// What a replay reads and sets of CUDA graph trees. Only trees.cpp knows their
// attributes by name; replay/plan.py lists them.

#include "object.h"

#include <vector>

namespace torch::inductor::pygraph {

// A field of a plan. Called only while a replay is made.
inline Ref field_of(PyObject* plan, const char* name) {
  return checked(PyObject_GetAttrString(plan, name));
}

// The trees of the thread that recorded.
class Trees {
 public:
  Trees() = default;
  explicit Trees(PyObject* plan);

  // Throws Unusual unless the thread is the one that recorded, or one that
  // autograd uses on its behalf.
  void check_thread() const;

  // The last node of the current path.
  Ref last() const;

  // Throws Unusual unless graphs are replayed along the current path.
  void check_executing() const;

  // `node` is the last one of the path from now on.
  void enter(PyObject* node, bool begins_path) const;

  // CUDAGraphTreeManager.update_generation
  void update_generation() const;

  void note_backward() const;

  template <typename F>
  void visit(F&& f) {
    for (Ref* ref :
         {&manager_,
          &executing_,
          &mark_step_,
          &tracker_,
          &local_,
          &containers_,
          &owner_,
          &pending_backward_}) {
      f(*ref);
    }
  }

 private:
  Ref manager_;
  Ref executing_;
  Ref mark_step_;
  Ref tracker_;
  Ref local_;
  Ref containers_;
  Ref owner_;
  Ref pending_backward_;
};

// An output of a graph of the path: its place in the lists of its node.
struct PathOutput {
  Ref weakrefs;
  Ref cached;
  Py_ssize_t index;
};

std::vector<PathOutput> path_outputs(PyObject* descriptions);

// Throws Unusual if one of them is alive. An output that its node caches is dead
// if nobody else has the tensor or its storage, as StorageWeakRefWrapper.expired
// and CopyGraphNode._is_only_cached have it.
void check_dead(const std::vector<PathOutput>& outputs);

bool add_trees(PyObject* module);

} // namespace torch::inductor::pygraph
