// What compiled bytecode calls; see calls/shortener.py.

#include "replay.h"
#include "values.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/AutogradState.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <vector>

namespace torch::inductor::pygraph {
namespace {

// Names that a call looks up.
const struct {
  PyObject* is_first = PyUnicode_InternFromString("_is_first");
  PyObject* is_needed = PyUnicode_InternFromString("is_needed");
  PyObject* is_profiling = PyUnicode_InternFromString("_is_profiler_enabled");
  PyObject* is_debugging = PyUnicode_InternFromString("RECORD_GRAPH_EXECUTION");
  PyObject* detach = PyUnicode_InternFromString("detach");
} names;

// Keyword arguments, for the members of what is made of them.
struct Keywords {
  Ref of(const char* name) const {
    return checked(PyMapping_GetItemString(all.get(), name));
  }

  Py_ssize_t number(const char* name) const {
    return static_cast<Py_ssize_t>(as_word(of(name).get()));
  }

  Ref all;
};

// torch._as_tensor_fullprec. Makes the tensor of a float here, in a tenth of the
// time, unless the thread is in a mode such as fake tensors or functorch.
PyObject* as_tensor_fullprec(PyObject* /*module*/, PyObject* value) {
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  if (PyFloat_CheckExact(value) &&
      (included - c10::default_included_set).empty()) {
    return guarded([&]() -> PyObject* {
      at::TensorBase tensor = at::detail::empty_cpu({}, c10::kDouble);
      *static_cast<double*>(tensor.mutable_data_ptr()) =
          PyFloat_AS_DOUBLE(value);
      return THPVariable_Wrap(std::move(tensor));
    });
  }
  Ref torch(PyImport_ImportModule("torch"));
  return torch
      ? PyObject_CallMethod(torch.get(), "_as_tensor_fullprec", "O", value)
      : nullptr;
}

// Keeps Dynamo from compiling Python that is called in the scope of the result,
// as disable() does.
auto without_dynamo(const Ref& set_eval_frame) {
  PyObject* set = set_eval_frame.get();
  Ref prior = checked(PyObject_CallOneArg(set, Py_None));
  return c10::make_scope_exit([set, prior = std::move(prior)]() {
    PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
    PyErr_Fetch(&type, &value, &traceback);
    if (!Ref(PyObject_CallOneArg(set, prior.get()))) {
      PyErr_WriteUnraisable(set);
    }
    PyErr_Restore(type, value, traceback);
  });
}

// The arguments that a graph mutates.
struct Mutated {
  explicit Mutated(const Keywords& keywords)
      : increment_version(keywords.of("increment_version")),
        places(as_sizes(keywords.of("mutated").get())) {}

  // Lets autograd see the mutations of a call.
  void increment_versions(PyObject* const* args, Py_ssize_t num_args) const {
    if (places.empty()) {
      return;
    }
    Ref list = checked(PyList_New(0));
    for (Py_ssize_t i : places) {
      if (i >= num_args) {
        raise(PyExc_IndexError, "no such argument");
      }
      checked(PyList_Append(list.get(), args[i]));
    }
    checked(PyObject_CallOneArg(increment_version.get(), list.get()));
  }

  Ref increment_version;
  std::vector<int64_t> places;
};

// What the two direct calls below ask for and call in the place of the layers.
struct Layers {
  explicit Layers(const Keywords& keywords)
      : slow(keywords.of("slow")),
        set_eval_frame(keywords.of("set_eval_frame")),
        profiler(keywords.of("profiler")),
        debug(keywords.of("debug")),
        mutated(keywords) {}

  // With a profiler or a debugger a call goes through every layer.
  bool are_watched() const {
    return PyDict_GetItem(profiler.get(), names.is_profiling) != Py_False ||
        PyDict_GetItem(debug.get(), names.is_debugging) != Py_False;
  }

  template <typename F>
  void visit(F&& f) {
    f(slow, set_eval_frame, profiler, debug, mutated.increment_version);
  }

  Ref slow;
  Ref set_eval_frame;
  Ref profiler;
  Ref debug;
  Mutated mutated;
};

// What compiled bytecode calls to replay an inference graph of one partition.
// calls/shortener.py makes it, and says which layers it leaves out and why they have
// nothing to do.
struct Direct {
  Direct(PyObject* /*args*/, PyObject* kwargs) : keywords{Ref::share(kwargs)} {
    for_each(keywords.of("packs").get(), [&](PyObject* item) {
      auto [pack, values] = members<2>(item);
      packs.emplace_back(Boxed<Pack>::share(pack), as_sizes(values));
    });
    for_each(keywords.of("stages").get(), [&](PyObject* item) {
      auto [stage, value] = members<2>(item);
      stages.emplace_back(Boxed<Stage>::share(stage), as_word(value));
    });
    std::vector<int64_t> in_order(num_outputs);
    std::iota(in_order.begin(), in_order.end(), 0);
    is_in_order = outputs == in_order;
  }

  PyObject* call(const Call& call) const {
    auto run = [&]() {
      bool is_short = call.count() == num_args && has_replay();
      return is_short ? replay(call.args) : nullptr;
    };
    return attempted(run, [&]() { return call.pass_to(layers.slow); });
  }

  // A decision against the graph replaces the replay in the list.
  bool has_replay() const {
    return PyList_CheckExact(partitions.get()) &&
        PyList_GET_SIZE(partitions.get()) == 1 &&
        Boxed<Replay>::is(PyList_GET_ITEM(partitions.get(), 0)) &&
        !layers.are_watched();
  }

  // Tries the recordings in turn, as Replay.general has them. A call that none of
  // them fits takes the slow path from its beginning. The caller has the
  // arguments for as long as the call takes, so that none is lost.
  PyObject* replay(PyObject* const* args) const {
    // Another thread may replace it while a stage releases the GIL.
    Ref fn = Ref::share(PyList_GET_ITEM(partitions.get(), 0));
    // For the stages too.
    check_not_captured(Boxed<Replay>::of(fn.get()).is_capturing);
    auto no_dynamo = without_dynamo(layers.set_eval_frame);
    c10::AutoGradMode no_grad(false);
    // The slow path may do both again. It packs the same bytes to the same
    // places. A stage holds the value already, or copies it again from pinned
    // memory.
    Given given;
    for (const auto& [pack, values] : packs) {
      const Pack::Memory& memory = Boxed<Pack>::of(pack.get()).copy(
          [&, of_pack = values.data()](size_t i) { return args[of_pack[i]]; });
      given.packed.emplace_back(&memory.times, memory.times);
    }
    c10::SmallVector<Ref, 4> staged;
    for (const auto& [ref, value] : stages) {
      Stage& stage = Boxed<Stage>::of(ref.get());
      const uint64_t times = stage.times + 1;
      staged.push_back(stage(args[value]));
      given.staged.emplace_back(&stage.times, times);
    }
    Ref list = listed(args, staged);
    while (true) {
      Replay& recording = Boxed<Replay>::of(fn.get());
      bool has_dropped = false;
      if (static_cast<Py_ssize_t>(recording.outputs.size()) == num_outputs &&
          recording.fits(list.get())) {
        try {
          Ref outputs(recording.run(list.get(), has_dropped, given));
          // The slow path does it itself.
          layers.mutated.increment_versions(args, num_args);
          return in_order(outputs.release());
        } catch (const Unusual&) {
        }
      }
      fn = Ref::share(recording.general.get());
      if (!Boxed<Replay>::is(fn.get())) {
        throw Unusual();
      }
      if (has_dropped) {
        list = listed(args, staged);
      }
    }
  }

  // The inputs of the partition.
  Ref listed(PyObject* const* args, const c10::SmallVector<Ref, 4>& staged)
      const {
    Ref list = checked(PyList_New(inputs.size()));
    for (size_t i = 0; i < inputs.size(); ++i) {
      PyObject* input = inputs[i] < num_args
          ? args[inputs[i]]
          : staged[inputs[i] - num_args].get();
      PyList_SET_ITEM(list.get(), i, Ref::share(input).release());
    }
    return list;
  }

  // The graph's outputs, given the partition's.
  PyObject* in_order(PyObject* of_partition) const {
    if (is_in_order) {
      return of_partition;
    }
    Ref owned(of_partition);
    Ref result = checked(PyList_New(outputs.size()));
    for (size_t i = 0; i < outputs.size(); ++i) {
      PyObject* output = PyList_GET_ITEM(of_partition, outputs[i]);
      PyList_SET_ITEM(result.get(), i, Ref::share(output).release());
    }
    return result.release();
  }

  template <typename F>
  void visit(F&& f) {
    f(keywords.all, partitions);
    layers.visit(f);
    for (auto& pack : packs) {
      f(pack.first);
    }
    for (auto& stage : stages) {
      f(stage.first);
    }
  }

  Keywords keywords;
  Layers layers{keywords};
  Ref partitions = keywords.of("partitions");
  Py_ssize_t num_args = keywords.number("num_args");
  Py_ssize_t num_outputs = keywords.number("num_outputs");
  // Each with the positions of its arguments.
  std::vector<std::pair<Ref, std::vector<int64_t>>> packs;
  std::vector<std::pair<Ref, Py_ssize_t>> stages;
  // Positions in the arguments, which the staged values follow.
  std::vector<int64_t> inputs = as_sizes(keywords.of("inputs").get());
  std::vector<int64_t> outputs = as_sizes(keywords.of("outputs").get());
  bool is_in_order = false;
};

// What compiled bytecode calls to run the code of another inference graph. The
// first call, which AOTAutograd analyses, goes through every layer.
struct DirectCode {
  DirectCode(PyObject* /*args*/, PyObject* kwargs)
      : keywords{Ref::share(kwargs)} {}

  PyObject* call(const Call& call) {
    const Py_ssize_t num_args = call.count();
    if (has_run && num_args >= 0 && !layers.are_watched()) {
      return guarded([&]() { return run(call.args, num_args); });
    }
    PyObject* outputs = call.pass_to(layers.slow);
    has_run = has_run || outputs != nullptr;
    return outputs;
  }

  PyObject* run(PyObject* const* args, Py_ssize_t num_args) const {
    auto no_dynamo = without_dynamo(layers.set_eval_frame);
    layers.mutated.increment_versions(args, num_args);
    c10::AutoGradMode no_grad(false);
    Ref list = checked(PyList_New(num_args));
    for (Py_ssize_t i = 0; i < num_args; ++i) {
      PyList_SET_ITEM(list.get(), i, Ref::share(args[i]).release());
    }
    Ref outputs = checked(PyObject_CallOneArg(code.get(), list.get()));
    return PySequence_List(outputs.get());
  }

  template <typename F>
  void visit(F&& f) {
    f(keywords.all, code);
    layers.visit(f);
  }

  Keywords keywords;
  Layers layers{keywords};
  Ref code = keywords.of("code");
  bool has_run = false;
};

// What compiled bytecode calls to run a training graph. runtime_wrapper in
// calls/shortener.py does the same, and explains the arguments.
struct Training {
  Training(PyObject* /*args*/, PyObject* kwargs)
      : keywords{Ref::share(kwargs)} {}

  PyObject* call(const Call& call) const {
    return guarded([&]() {
      return is_steady(call.args, call.count()) ? run(call.args, call.count())
                                                : call.pass_to(slow);
    });
  }

  // Not steady: a first call that AOTAutograd analyses, a call under a profiler,
  // and an argument that a functorch transform, which has ended, still wraps.
  bool is_steady(PyObject* const* args, Py_ssize_t num_args) const {
    auto* type = reinterpret_cast<PyTypeObject*>(THPVariableClass);
    return num_args >= 0 &&
        PyDict_GetItem(profiler.get(), names.is_profiling) == Py_False &&
        !is_analysed() &&
        checked(PyObject_CallNoArgs(has_transforms.get())).get() == Py_False &&
        std::none_of(args, args + num_args, [&](PyObject* arg) {
             return PyObject_TypeCheck(arg, type) &&
                 reinterpret_cast<THPVariable*>(arg)->cdata.key_set().has(
                     c10::DispatchKey::FuncTorchGradWrapper);
           });
  }

  bool is_analysed() const {
    PyObject* of = first.get();
    return checked(PyObject_GetAttr(of, names.is_first)).get() != Py_False &&
        checked(PyObject_CallMethodNoArgs(of, names.is_needed)).get() !=
        Py_False;
  }

  PyObject* run(PyObject* const* args, Py_ssize_t num_args) const {
    auto no_dynamo = without_dynamo(set_eval_frame);
    mutated.increment_versions(args, num_args);
    c10::AutoGradMode with_grad(true);
    // torch.autograd._force_original_view_tracking(True)
    auto& state = c10::AutogradState::get_tls_state();
    auto view_replay = c10::make_scope_exit(
        [&state, prior = state.get_view_replay_enabled()]() {
          state.set_view_replay_enabled(prior);
        });
    state.set_view_replay_enabled(true);
    // torch._C._DisableAutocast
    std::optional<c10::impl::ExcludeDispatchKeyGuard> no_autocast;
    if (disable_amp) {
      no_autocast.emplace(c10::autocast_dispatch_keyset);
    }
    Ref outputs = checked(
        PyObject_Vectorcall(apply.get(), args, num_args, nullptr));
    if (PyObject_Length(outputs.get()) != num_outputs) {
      PyErr_Format(
          PyExc_AssertionError,
          "expected %zd outputs, got %zd",
          num_outputs,
          PyObject_Length(outputs.get()));
      throw Error();
    }
    return PySequence_List(outputs.get());
  }

  template <typename F>
  void visit(F&& f) {
    f(keywords.all, slow, apply, first, has_transforms);
    f(mutated.increment_version, set_eval_frame, profiler);
  }

  Keywords keywords;
  Ref slow = keywords.of("slow");
  Ref apply = keywords.of("apply");
  Ref first = keywords.of("first");
  Ref has_transforms = keywords.of("has_transforms");
  Ref set_eval_frame = keywords.of("set_eval_frame");
  Ref profiler = keywords.of("profiler");
  Mutated mutated{keywords};
  bool disable_amp = keywords.of("disable_amp").get() == Py_True;
  Py_ssize_t num_outputs = keywords.number("num_outputs");
};

// saved(outputs, start): returns the same as saved_tensors in calls/shortener.py.
PyObject* saved(PyObject* /*module*/, PyObject* args) {
  return guarded([&]() {
    auto [outputs, start] = members<2>(args);
    Ref tensors = checked(
        PyList_GetSlice(outputs, as_word(start), PyList_Size(outputs)));
    Ref result = checked(PyList_AsTuple(tensors.get()));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(result.get()); ++i) {
      PyObject* tensor = PyTuple_GET_ITEM(result.get(), i);
      if (unpack(tensor).is_view()) {
        Ref detached =
            checked(PyObject_CallMethodNoArgs(tensor, names.detach));
        PyTuple_SET_ITEM(result.get(), i, detached.release());
        Py_DECREF(tensor);
      }
    }
    return result.release();
  });
}

// Link(object, next): does all that `object` does. Its _torchdynamo_orig_backend
// is `next`; it has none if `next` is None.
//
// In each frame Dynamo follows that attribute from its callback to the backend,
// which has none. Dynamo asks by char*: for a Python object each step makes a
// string, and the last one raises an exception.
struct Link {
  Link(PyObject* args, PyObject* /*kwargs*/) {
    auto [of, to] = members<2>(args);
    object = Ref::share(of);
    next = Ref::share(to);
  }

  PyObject* call(const Call& call) const {
    return call.pass_to(object);
  }

  static PyObject* getattr(PyObject* self, char* name) {
    if (std::strcmp(name, "_torchdynamo_orig_backend") != 0) {
      return PyObject_GetAttrString(object_of(self), name);
    }
    PyObject* next = Boxed<Link>::of(self).next.get();
    if (next == Py_None) {
      PyErr_SetNone(PyExc_AttributeError);
      return nullptr;
    }
    return Ref::share(next).release();
  }

  static PyObject* getattro(PyObject* self, PyObject* name) {
    return PyObject_GetAttr(object_of(self), name);
  }

  // Two callbacks share what was compiled if their backends are equal.
  static PyObject* richcompare(PyObject* a, PyObject* b, int op) {
    return PyObject_RichCompare(object_of(a), object_of(b), op);
  }

  static Py_hash_t hash(PyObject* self) {
    return PyObject_Hash(object_of(self));
  }

  static PyObject* object_of(PyObject* self) {
    return Boxed<Link>::is(self) ? Boxed<Link>::of(self).object.get() : self;
  }

  template <typename F>
  void visit(F&& f) {
    f(object, next);
  }

  Ref object;
  Ref next;
};

// A benchmark replaces these two, to leave out what is below them.
PyMemberDef direct_members[] = {
    {"slow", T_OBJECT, offsetof(Boxed<Direct>, value.layers.slow)},
    {"partitions", T_OBJECT, offsetof(Boxed<Direct>, value.partitions)},
    {}};
PyMethodDef functions[] = {
    {"as_tensor_fullprec", as_tensor_fullprec, METH_O, nullptr},
    {"saved", saved, METH_VARARGS, nullptr},
    {}};

} // namespace

bool add_calls(PyObject* module) {
  Boxed<Direct>::type.tp_members = direct_members;
  PyTypeObject& link = Boxed<Link>::type;
  link.tp_getattr = Link::getattr;
  link.tp_getattro = Link::getattro;
  link.tp_richcompare = Link::richcompare;
  link.tp_hash = Link::hash;
  return PyModule_AddFunctions(module, functions) == 0 &&
      Boxed<Direct>::ready(module, "Direct") &&
      Boxed<DirectCode>::ready(module, "DirectCode") &&
      Boxed<Training>::ready(module, "Training") &&
      Boxed<Link>::ready(module, "Link");
}

} // namespace torch::inductor::pygraph
