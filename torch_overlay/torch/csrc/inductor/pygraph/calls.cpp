#include "calls.h"

#include "replay.h"
#include "values.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/AutogradState.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <vector>

namespace torch::inductor::pygraph {
namespace {

// Names that a call looks up.
struct {
  PyObject* is_first;
  PyObject* is_needed;
  PyObject* is_profiler_enabled;
  PyObject* record_graph_execution;
  PyObject* detach;
} names;

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
// Keeps Dynamo from compiling Python that is called meanwhile, as disable() does.
class NoDynamo {
 public:
  explicit NoDynamo(PyObject* set)
      : set_(set), prior_(checked(PyObject_CallOneArg(set, Py_None))) {}
  NoDynamo(const NoDynamo&) = delete;
  NoDynamo& operator=(const NoDynamo&) = delete;
  ~NoDynamo() {
    PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
    PyErr_Fetch(&type, &value, &traceback);
    if (!Ref(PyObject_CallOneArg(set_, prior_.get()))) {
      PyErr_WriteUnraisable(set_);
    }
    PyErr_Restore(type, value, traceback);
  }

 private:
  PyObject* set_;
  Ref prior_;
};

// What compiled bytecode calls to replay an inference graph of one partition.
// calls/direct.py makes it, and says which layers it leaves out and why they have
// nothing to do.
struct Direct {
  Direct(PyObject* args, PyObject* kwargs) {
    static const char* keywords[] = {
        "slow",
        "partitions",
        "num_args",
        "packs",
        "stages",
        "inputs",
        "num_outputs",
        "outputs",
        "set_eval_frame",
        "profiler",
        "debug",
        nullptr};
    PyObject *objects[5], *pack_list = nullptr, *stage_list = nullptr,
                          *input_list = nullptr, *output_list = nullptr;
    Py_ssize_t num_partition_outputs = 0;
    if (!PyArg_ParseTupleAndKeywords(
            args,
            kwargs,
            "$OO!nOOOnOOO!O!",
            const_cast<char**>(keywords),
            &objects[0],
            &PyList_Type,
            &objects[1],
            &num_args,
            &pack_list,
            &stage_list,
            &input_list,
            &num_partition_outputs,
            &output_list,
            &objects[2],
            &PyDict_Type,
            &objects[3],
            &PyDict_Type,
            &objects[4])) {
      throw Error();
    }
    Ref* owned[] = {&slow, &partitions, &set_eval_frame, &profiler, &debug};
    for (size_t i = 0; i < std::size(owned); ++i) {
      *owned[i] = Ref::share(objects[i]);
    }
    num_outputs = num_partition_outputs;
    std::vector<Py_ssize_t> of_args;
    for_each(pack_list, [&](PyObject* item) {
      packs.emplace_back(
          Boxed<Pack>::share(field(item, 0)), std::vector<Py_ssize_t>());
      auto& values = packs.back().second;
      for (uint64_t k : as_words(field(item, 1))) {
        values.push_back(static_cast<Py_ssize_t>(k));
      }
      if (values.size() !=
          Boxed<Pack>::of(packs.back().first.get()).places.size()) {
        PyErr_SetString(PyExc_ValueError, "not as many values as are packed");
        throw Error();
      }
      of_args.insert(of_args.end(), values.begin(), values.end());
    });
    for_each(stage_list, [&](PyObject* item) {
      stages.emplace_back(
          Boxed<Stage>::share(field(item, 0)),
          static_cast<Py_ssize_t>(as_word(field(item, 1))));
      of_args.push_back(stages.back().second);
    });
    for (uint64_t i : as_words(input_list)) {
      inputs.push_back(static_cast<Py_ssize_t>(i));
    }
    is_in_order = true;
    for (uint64_t i : as_words(output_list)) {
      is_in_order &= i == outputs.size();
      outputs.push_back(static_cast<Py_ssize_t>(i));
    }
    is_in_order &= static_cast<Py_ssize_t>(outputs.size()) == num_outputs;
    auto is_beyond = [](Py_ssize_t end) {
      return [end](Py_ssize_t i) { return i < 0 || i >= end; };
    };
    const auto num_values = num_args + static_cast<Py_ssize_t>(stages.size());
    if (std::any_of(of_args.begin(), of_args.end(), is_beyond(num_args)) ||
        std::any_of(inputs.begin(), inputs.end(), is_beyond(num_values)) ||
        std::any_of(outputs.begin(), outputs.end(), is_beyond(num_outputs))) {
      PyErr_SetString(PyExc_IndexError, "no such argument or output");
      throw Error();
    }
  }

  static PyObject* call(
      PyObject* object,
      PyObject* const* args,
      size_t nargs,
      PyObject* kwnames) {
    Direct& self = Boxed<Direct>::of(object);
    if (PyVectorcall_NARGS(nargs) == self.num_args && kwnames == nullptr &&
        self.has_replay()) {
      try {
        return self.replay(args);
      } catch (const Error&) {
        return nullptr;
      } catch (const Unusual&) {
      } catch (const std::exception&) {
        // As in Replay::call.
      }
    }
    return PyObject_Vectorcall(self.slow.get(), args, nargs, kwnames);
  }

  // A decision against the graph replaces the replay in the list. With a profiler
  // or a debugger the call goes through every layer.
  bool has_replay() const {
    return PyList_CheckExact(partitions.get()) &&
        PyList_GET_SIZE(partitions.get()) == 1 &&
        Boxed<Replay>::is(PyList_GET_ITEM(partitions.get(), 0)) &&
        PyDict_GetItem(profiler.get(), names.is_profiler_enabled) ==
        Py_False &&
        PyDict_GetItem(debug.get(), names.record_graph_execution) == Py_False;
  }

  // Tries the recordings in turn, as Replay.general has them. A call that none of
  // them fits takes the slow path from its beginning. The caller has the
  // arguments for as long as the call takes, so that none is lost.
  PyObject* replay(PyObject* const* args) {
    // Another thread may replace it while a stage releases the GIL.
    Ref fn = Ref::share(PyList_GET_ITEM(partitions.get(), 0));
    // For the stages too.
    check_not_captured(Boxed<Replay>::of(fn.get()).is_capturing);
    NoDynamo no_dynamo(set_eval_frame.get());
    c10::AutoGradMode no_grad(false);
    // The slow path may do both again. It packs the same bytes to the same
    // places. A stage holds the value already, or copies it again from pinned
    // memory.
    Given given;
    for (const auto& [pack, values] : packs) {
      const auto& of_pack = values;
      const Pack::Memory& memory = Boxed<Pack>::of(pack.get()).copy(
          [&](size_t i) { return args[of_pack[i]]; });
      given.packed.emplace_back(&memory, memory.times);
    }
    c10::SmallVector<Ref, 4> staged;
    for (const auto& [ref, value] : stages) {
      Stage& stage = Boxed<Stage>::of(ref.get());
      const uint64_t times = stage.times + 1;
      staged.push_back(stage(args[value]));
      given.staged.emplace_back(&stage, times);
    }
    Ref list = listed(args, staged);
    while (true) {
      Replay& recording = Boxed<Replay>::of(fn.get());
      bool has_dropped = false;
      if (static_cast<Py_ssize_t>(recording.outputs.size()) == num_outputs &&
          recording.fits(list.get())) {
        try {
          return in_order(recording.run(list.get(), has_dropped, &given));
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
    for (Ref* ref : {&slow, &partitions, &set_eval_frame, &profiler, &debug}) {
      f(*ref);
    }
    for (auto& pack : packs) {
      f(pack.first);
    }
    for (auto& stage : stages) {
      f(stage.first);
    }
  }

  Ref slow;
  Ref partitions;
  Ref set_eval_frame;
  Ref profiler;
  Ref debug;
  Py_ssize_t num_args = 0;
  // Each with the positions of its arguments.
  std::vector<std::pair<Ref, std::vector<Py_ssize_t>>> packs;
  std::vector<std::pair<Ref, Py_ssize_t>> stages;
  Py_ssize_t num_outputs = 0;
  // Positions in the arguments, which the staged values follow.
  std::vector<Py_ssize_t> inputs;
  std::vector<Py_ssize_t> outputs;
  bool is_in_order = false;
};

// What compiled bytecode calls to run a training graph. runtime_wrapper in
// calls/training.py does the same, and explains the arguments.
struct Training {
  Training(PyObject* args, PyObject* kwargs) {
    static const char* keywords[] = {
        "slow",
        "apply",
        "first",
        "has_transforms",
        "increment_version",
        "mutated",
        "disable_amp",
        "num_outputs",
        "set_eval_frame",
        "profiler",
        nullptr};
    PyObject *objects[7], *mutated_args = nullptr;
    int disables_amp = 0;
    if (!PyArg_ParseTupleAndKeywords(
            args,
            kwargs,
            "$OOOOOOpnOO!",
            const_cast<char**>(keywords),
            &objects[0],
            &objects[1],
            &objects[2],
            &objects[3],
            &objects[4],
            &mutated_args,
            &disables_amp,
            &num_outputs,
            &objects[5],
            &PyDict_Type,
            &objects[6])) {
      throw Error();
    }
    for (uint64_t i : as_words(mutated_args)) {
      mutated.push_back(static_cast<Py_ssize_t>(i));
    }
    disable_amp = disables_amp != 0;
    auto owned = refs();
    static_assert(std::size(objects) == std::tuple_size_v<decltype(owned)>);
    for (size_t i = 0; i < owned.size(); ++i) {
      *owned[i] = Ref::share(objects[i]);
    }
  }

  static PyObject* call(
      PyObject* object,
      PyObject* const* args,
      size_t nargs,
      PyObject* kwnames) {
    Training& self = Boxed<Training>::of(object);
    const auto num_args = PyVectorcall_NARGS(nargs);
    return guarded([&]() -> PyObject* {
      if (kwnames == nullptr && self.is_steady(args, num_args)) {
        return self.run(args, num_args);
      }
      return PyObject_Vectorcall(self.slow.get(), args, nargs, kwnames);
    });
  }

  // Not steady: a first call that AOTAutograd analyses, a call under a profiler,
  // and an argument that a functorch transform, which has ended, still wraps.
  bool is_steady(PyObject* const* args, Py_ssize_t num_args) const {
    auto* type = reinterpret_cast<PyTypeObject*>(THPVariableClass);
    return PyDict_GetItem(profiler.get(), names.is_profiler_enabled) ==
        Py_False &&
        !is_analysed() &&
        checked(PyObject_CallNoArgs(has_transforms.get())).get() == Py_False &&
        std::none_of(args, args + num_args, [&](PyObject* arg) {
             return PyObject_TypeCheck(arg, type) &&
                 reinterpret_cast<THPVariable*>(arg)->cdata.key_set().has(
                     c10::DispatchKey::FuncTorchGradWrapper);
           });
  }

  bool is_analysed() const {
    if (attribute(first.get(), names.is_first).get() == Py_False) {
      return false;
    }
    Ref needed =
        checked(PyObject_CallMethodNoArgs(first.get(), names.is_needed));
    return needed.get() != Py_False;
  }

  PyObject* run(PyObject* const* args, Py_ssize_t num_args) const {
    NoDynamo no_dynamo(set_eval_frame.get());
    if (!mutated.empty()) {
      Ref list = checked(PyList_New(0));
      for (Py_ssize_t i : mutated) {
        if (i >= num_args) {
          PyErr_SetString(PyExc_IndexError, "no such argument");
          throw Error();
        }
        if (PyList_Append(list.get(), args[i]) != 0) {
          throw Error();
        }
      }
      checked(PyObject_CallOneArg(increment_version.get(), list.get()));
    }
    c10::AutoGradMode with_grad(true);
    ViewReplay view_replay;
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

  // torch.autograd._force_original_view_tracking(True)
  class ViewReplay {
   public:
    ViewReplay()
        : prior_(c10::AutogradState::get_tls_state().get_view_replay_enabled()) {
      c10::AutogradState::get_tls_state().set_view_replay_enabled(true);
    }
    ViewReplay(const ViewReplay&) = delete;
    ViewReplay& operator=(const ViewReplay&) = delete;
    ~ViewReplay() {
      c10::AutogradState::get_tls_state().set_view_replay_enabled(prior_);
    }

   private:
    bool prior_;
  };

  // In the order of the arguments.
  std::array<Ref*, 7> refs() {
    return {
        &slow,
        &apply,
        &first,
        &has_transforms,
        &increment_version,
        &set_eval_frame,
        &profiler};
  }

  template <typename F>
  void visit(F&& f) {
    for (Ref* ref : refs()) {
      f(*ref);
    }
  }

  Ref slow;
  Ref apply;
  Ref first;
  Ref has_transforms;
  Ref increment_version;
  Ref set_eval_frame;
  Ref profiler;
  std::vector<Py_ssize_t> mutated;
  bool disable_amp = false;
  Py_ssize_t num_outputs = 0;
};

// saved(outputs, start): returns the same as saved_tensors in calls/training.py.
PyObject* saved(PyObject* /*module*/, PyObject* args) {
  return guarded([&]() -> PyObject* {
    PyObject* outputs = nullptr;
    Py_ssize_t start = 0;
    if (!PyArg_ParseTuple(args, "O!n", &PyList_Type, &outputs, &start)) {
      return nullptr;
    }
    Ref tensors = checked(
        PyList_GetSlice(outputs, start, PyList_GET_SIZE(outputs)));
    Ref result = checked(PyList_AsTuple(tensors.get()));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(result.get()); ++i) {
      PyObject* tensor = PyTuple_GET_ITEM(result.get(), i);
      if (!PyObject_TypeCheck(
              tensor, reinterpret_cast<PyTypeObject*>(THPVariableClass))) {
        PyErr_SetString(PyExc_TypeError, "what is saved is no tensor");
        return nullptr;
      }
      if (reinterpret_cast<THPVariable*>(tensor)->cdata.is_view()) {
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
    PyObject *of = nullptr, *to = nullptr;
    if (!PyArg_ParseTuple(args, "OO", &of, &to)) {
      throw Error();
    }
    object = Ref::share(of);
    next = Ref::share(to);
  }

  static PyObject* call(
      PyObject* self,
      PyObject* const* args,
      size_t nargs,
      PyObject* kwnames) {
    return PyObject_Vectorcall(object_of(self), args, nargs, kwnames);
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
    return Boxed<Link>::is(self) ? Boxed<Link>::of(self).object.get()
                                       : self;
  }

  template <typename F>
  void visit(F&& f) {
    f(object);
    f(next);
  }

  Ref object;
  Ref next;
};

// A benchmark replaces these two, to leave out what is below them.
PyGetSetDef direct_getset[] = {
    {"slow",
     get<Direct, &Direct::slow>,
     set<Direct, &Direct::slow>,
     nullptr,
     nullptr},
    {"partitions",
     get<Direct, &Direct::partitions>,
     set<Direct, &Direct::partitions>,
     nullptr,
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMethodDef functions[] = {
    {"as_tensor_fullprec", as_tensor_fullprec, METH_O, nullptr},
    {"saved", saved, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

} // namespace

bool add_calls(PyObject* module) {
  PyTypeObject& link = Boxed<Link>::type;
  link.tp_getattr = Link::getattr;
  link.tp_getattro = Link::getattro;
  link.tp_richcompare = Link::richcompare;
  link.tp_hash = Link::hash;
  return intern(
             {{&names.is_first, "_is_first"},
              {&names.is_needed, "is_needed"},
              {&names.is_profiler_enabled, "_is_profiler_enabled"},
              {&names.record_graph_execution, "RECORD_GRAPH_EXECUTION"},
              {&names.detach, "detach"}}) &&
      PyModule_AddFunctions(module, functions) == 0 &&
      Boxed<Direct>::ready(
             module,
             "torch._inductor.pygraph._replay.Direct",
             nullptr,
             direct_getset) &&
      Boxed<Training>::ready(
             module, "torch._inductor.pygraph._replay.Training") &&
      Boxed<Link>::ready(module, "torch._inductor.pygraph._replay.Link");
}

} // namespace torch::inductor::pygraph
