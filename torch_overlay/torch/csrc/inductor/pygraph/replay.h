#pragma once

// The replay of a recording: the nodes that it sets, what it reads and sets of
// CUDA graph trees, and the state that replays share. replay/ in Python has the
// plan that a replay follows, and does the same where this is not compiled.

#include "object.h"

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <optional>
#include <vector>

namespace torch::inductor::pygraph {

// Launch(launch, executable, device_index, current_device, current_stream,
// general, like): launches an executable graph in the current stream, with
// the driver function `launch`. It calls `general` if another device is the
// current one, or if the driver refuses. `like` is another one of the same
// recording, or None.
struct Launch {
  Launch(PyObject* args, PyObject* kwargs);
  PyObject* call(const Call& call);

  template <typename F>
  void visit(F&& f) {
    f(device_index, current_device, current_stream, general);
  }

  void* launch;
  void* executable;
  Ref device_index;
  Ref current_device;
  Ref current_stream;
  Ref general;
  // How many launches there were of the recording, and until the last of this.
  std::shared_ptr<uint64_t> count;
  uint64_t last = 0;
};

// TreeState(device_index, current_stream, wait): the lock of the trees of one
// thread, and the stream of their last launch; see PythonTreeState.
struct TreeState {
  TreeState(PyObject* args, PyObject* kwargs);
  PyObject* call(const Call& /*call*/) {
    PyErr_SetString(PyExc_TypeError, "not callable");
    return nullptr;
  }

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

// The trees of the thread that recorded, given a plan.
struct Trees {
  explicit Trees(PyObject* of) : plan(Ref::share(of)) {}

  // A field of the plan. Called only while a replay is made.
  Ref of(const char* name) const {
    return checked(PyObject_GetAttrString(plan.get(), name));
  }

  // Throws Unusual unless the thread is the one that recorded, or one that
  // autograd uses on its behalf.
  void check_thread() const;

  // The last node of the current path.
  Ref last_node() const;

  // Throws Unusual unless graphs are replayed along the current path.
  void check_executing() const;

  // `node` is the last one of the path from now on.
  void enter(PyObject* node, bool begins_path) const;

  // CUDAGraphTreeManager.update_generation
  void update_generation() const;

  void note_backward() const;

  template <typename F>
  void visit(F&& f) {
    f(plan, manager, executing, mark_step, tracker);
    f(local, containers, owner, pending_backward);
  }

  Ref plan;
  Ref manager = of("manager");
  Ref executing = of("executing");
  Ref mark_step = of("mark_step");
  Ref tracker = of("tracker");
  Ref local = of("local");
  Ref containers = of("containers");
  Ref owner = of("owner");
  Ref pending_backward = of("pending_backward");
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

// Allocator(size, stride, dtype, device_index): a call makes a tensor.
// Allocator(size, stride, dtype, device_index, True): size and stride are places
// in the numbers that a call is given.
struct Allocator {
  Allocator(PyObject* args, PyObject* kwargs);
  PyObject* call(const Call& call) const;

  at::TensorBase allocate(const uint64_t* numbers) const;

  template <typename F>
  void visit(F&&) {}

  std::vector<int64_t> size;
  std::vector<int64_t> stride;
  c10::ScalarType scalar_type;
  c10::Device device{c10::kCUDA};
  bool is_sized = false;
};

// A view of a bound tensor. All but `tensor` and `itemsize` are places in the
// numbers of a call; the offset is in bytes.
struct View {
  explicit View(PyObject* description);

  Ref of(const at::TensorBase& base, const uint64_t* numbers) const;

  size_t tensor;
  std::vector<int64_t> size;
  std::vector<int64_t> stride;
  size_t offset;
  uint64_t itemsize;
};

// What a replay returns; see replay/plan.py for the kinds.
struct Output {
  enum Kind { BOUND, CACHED, CONSTANT, INPUT, MADE, NUMBER } kind;
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

// Replay(plan, state, general): a call with inputs, and with numbers and a Row if
// the plan is for many sizes, replays the recording if the plan allows it, and
// else calls `general` with the same arguments.
struct Replay : Trees {
  Replay(PyObject* args, PyObject* kwargs);
  PyObject* call(const Call& call);

  // Whether the static inputs are those of the recording. Recordings of one
  // function differ by these as a rule, and to throw takes longer than a replay.
  bool fits(PyObject* inputs) const;

  // Replays for inputs that fit, outside of captures. Throws Unusual if the
  // general path has to be taken; `has_dropped` says whether inputs are missing
  // then.
  PyObject* run(
      PyObject* inputs,
      bool& has_dropped,
      const Given& given = {},
      PyObject* numbers = nullptr,
      PyObject* row = nullptr);

  template <typename F>
  void visit(F&& f) {
    Trees::visit(f);
    f(state, general, graph, is_outdated, node, parent, live_outputs);
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
  Ref general;
  Ref graph = of("graph");
  Ref is_outdated = of("is_outdated");
  Ref node = of("node");
  Ref parent = of("parent");
  Ref live_outputs = of("live_outputs");
  Ref is_capturing = of("is_capturing");
  Ref restore = of("restore");
  Ref launch = of("launch");
  Ref nodes = of("nodes");
  Ref words = of("words");
  Ref cached = of("cached");
  // The last node of the path when this was called last, and its outputs.
  Ref last_seen;
  std::shared_ptr<std::vector<PathOutput>> live_of_last =
      std::make_shared<std::vector<PathOutput>>();
  std::vector<PathOutput> dead_before = path_outputs(of("dead_before"));
  std::vector<PathOutput> dead_after = path_outputs(of("dead_after"));
  std::vector<std::pair<size_t, uint64_t>> static_inputs;
  Pointers bound = as_words(of("bound").get());
  Pointers dropped = as_words(of("dropped").get());
  Pointers alignments = as_words(of("alignments").get());
  Pointers pool = as_words(of("pool").get());
  std::vector<Ref> allocators;
  std::vector<View> views;
  std::vector<Output> outputs;
  size_t num_inputs = as_word(of("num_inputs").get());

 private:
  void add_output(PyObject* output);
  void check_path(PyObject* last);
  void check_caches() const;
  void bind(const Pointers& pointers, PyObject* row) const;
  Ref collect(
      PyObject* inputs,
      const c10::SmallVector<Ref, 16>& tensors,
      PyObject* numbers) const;
};

} // namespace torch::inductor::pygraph
