#pragma once

// The replay of a recording. torch/_inductor/pygraph/replay/ has the plan that
// it follows, and does the same where this is not compiled.

#include "nodes.h"
#include "trees.h"

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <vector>

namespace torch::inductor::pygraph {

// Allocator(size, stride, dtype, device_index): a call makes a tensor.
struct Allocator {
  Allocator(PyObject* args, PyObject* kwargs);
  PyObject* call(const Call& call) const;

  at::TensorBase allocate() const;

  template <typename F>
  void visit(F&&) {}

  std::vector<int64_t> size;
  std::vector<int64_t> stride;
  c10::ScalarType scalar_type;
  c10::Device device{c10::kCUDA};
};

// What a replay returns; see replay/plan.py for the kinds.
struct Output {
  enum Kind { BOUND, CACHED, CONSTANT, INPUT, EMPTY } kind;
  size_t index = 0;
  // The constant, or the function that makes an empty tensor.
  Ref value = Ref();
  // Of a cached tensor, as it was recorded.
  uint64_t address = 0;
  std::vector<int64_t> sizes = {};
  std::vector<int64_t> strides = {};
  c10::ScalarType dtype = c10::kFloat;
};

// How often the CPU values of a call had been written when the call wrote them,
// each with the present count. The collector may run a finalizer wherever an
// object is made, and the finalizer may call the same function with other
// values: the interrupted call has to give its own again.
struct Given {
  using Times = c10::SmallVector<std::pair<const uint64_t*, uint64_t>, 4>;

  // Throws Unusual if some were written since.
  static void check(const Times& all) {
    for (const auto& [now, then] : all) {
      if (*now != then) {
        throw Unusual();
      }
    }
  }

  Times packed;
  Times staged;
};

// Replay(plan, state, general): a call replays the recording if the plan allows
// it, and else calls `general` with the same inputs.
struct Replay {
  Replay(PyObject* args, PyObject* kwargs);
  PyObject* call(const Call& call);

  // Whether the static inputs are those of the recording. Recordings of one
  // function differ by these as a rule, and to throw takes longer than a replay.
  bool fits(PyObject* inputs) const;

  // Replays for inputs that fit, outside of captures. Throws Unusual if the
  // general path has to be taken; `has_dropped` says whether inputs are missing
  // then.
  PyObject* run(PyObject* inputs, bool& has_dropped, const Given& given = {});

  template <typename F>
  void visit(F&& f) {
    trees.visit(f);
    f(state, plan, general, graph, is_outdated, node, parent, live_outputs);
    f(is_capturing, restore, launch, nodes, words, cached, last_seen);
    for (auto* of_path : {&dead_before, &dead_after, live_of_last.get()}) {
      for (PathOutput& output : *of_path) {
        f(output.weakrefs, output.cached);
      }
    }
    for (Ref& allocate : allocators) {
      f(allocate);
    }
    for (Output& output : outputs) {
      if (output.value) {
        f(output.value);
      }
    }
  }

  Ref state;
  Ref plan;
  Ref general;
  Trees trees;
  Ref graph;
  Ref is_outdated;
  Ref node;
  Ref parent;
  Ref live_outputs;
  Ref is_capturing;
  Ref restore;
  Ref launch;
  Ref nodes;
  Ref words;
  Ref cached;
  // The last node of the path when this was called last, and its outputs.
  Ref last_seen;
  std::shared_ptr<std::vector<PathOutput>> live_of_last =
      std::make_shared<std::vector<PathOutput>>();
  std::vector<PathOutput> dead_before;
  std::vector<PathOutput> dead_after;
  std::vector<std::pair<size_t, uint64_t>> static_inputs;
  Pointers bound;
  Pointers dropped;
  uint64_t alignment = 1;
  Pointers pool;
  std::vector<Ref> allocators;
  std::vector<Output> outputs;
  size_t num_inputs = 0;

 private:
  void add_output(PyObject* output);
  void check_path(PyObject* last);
  void check_caches() const;
  bool is_in_pool(uint64_t address) const;
  void bind(const Pointers& pointers) const;
  Ref collect(PyObject* inputs, const c10::SmallVector<Ref, 16>& tensors) const;
};

} // namespace torch::inductor::pygraph
