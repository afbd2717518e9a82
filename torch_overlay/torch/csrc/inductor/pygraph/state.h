#pragma once

// The state that replays read and change; see types/replay_state.py, which does
// the same where this is not compiled.

#include "object.h"

#include <optional>

namespace torch::inductor::pygraph {

// Cell(value): holds an object that changes, `value`.
struct Cell {
  Cell(PyObject* args, PyObject* kwargs);

  template <typename F>
  void visit(F&& f) {
    f(value);
  }

  static constexpr auto call = not_callable;

  Ref value;
};

// TreeState(device_index, current_stream, wait): the lock of the trees of one
// thread, and the stream of their last launch. current_stream(device_index)
// gives the current stream's address.
struct TreeState {
  TreeState(PyObject* args, PyObject* kwargs);

  // Whether nobody had the lock. The caller has it then. Nobody waits for it.
  bool acquire() {
    return !std::exchange(is_held, true);
  }

  void release() {
    is_held = false;
  }

  // Calls `wait` if the current stream is another than the last launch's.
  void follow();

  template <typename F>
  void visit(F&& f) {
    for (Ref* ref : {&device_index, &current_stream, &wait}) {
      f(*ref);
    }
  }

  static constexpr auto call = not_callable;

  Ref device_index;
  Ref current_stream;
  Ref wait;
  std::optional<uint64_t> raw_stream;
  // The GIL makes this a lock.
  bool is_held = false;
};

bool add_state(PyObject* module);

} // namespace torch::inductor::pygraph
