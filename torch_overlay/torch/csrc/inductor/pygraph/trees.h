#pragma once

// What a replay reads and sets of CUDA graph trees, and the state that replays
// share. Only trees.cpp knows the attributes of trees by name; replay/plan.py
// lists them.

#include "object.h"

#include <optional>
#include <vector>

namespace torch::inductor::pygraph {

// Cell(value): holds an object that changes, `value`.
struct Cell : NotCallable {
  Cell(PyObject* args, PyObject* kwargs);

  template <typename F>
  void visit(F&& f) {
    f(value);
  }

  Ref value;
};

// TreeState(device_index, current_stream, wait): the lock of the trees of one
// thread, and the stream of their last launch; see PythonTreeState.
struct TreeState : NotCallable {
  TreeState(PyObject* args, PyObject* kwargs);

  // Whether nobody had the lock. The caller has it then. Nobody waits for it.
  bool acquire() {
    return !std::exchange(is_held, true);
  }

  // Calls `wait` if the current stream is another than the last launch's.
  void follow();

  template <typename F>
  void visit(F&& f) {
    f(device_index, current_stream, wait);
  }

  Ref device_index;
  Ref current_stream;
  Ref wait;
  std::optional<uint64_t> raw_stream;
  // The GIL makes this a lock.
  bool is_held = false;
};

// A field of a plan. Called only while a replay is made.
inline Ref field_of(PyObject* plan, const char* name) {
  return checked(PyObject_GetAttrString(plan, name));
}

// The trees of the thread that recorded, given a plan.
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
    f(manager_, executing_, mark_step_, tracker_);
    f(local_, containers_, owner_, pending_backward_);
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

std::vector<PathOutput> path_outputs(const Ref& descriptions);

// Throws Unusual if one of them is alive. An output that its node caches is dead
// if nobody else has the tensor or its storage, as StorageWeakRefWrapper.expired
// and CopyGraphNode._is_only_cached have it.
void check_dead(const std::vector<PathOutput>& outputs);

} // namespace torch::inductor::pygraph
