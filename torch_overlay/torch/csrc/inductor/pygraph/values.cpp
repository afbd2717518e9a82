#include "values.h"

namespace torch::inductor::pygraph {

// Asked for one attribute alone, the driver fails where memory is not its own.
// To fail takes it several times as long as to give the type 0, as it does
// here.
bool may_be_pinned(PointerAttributes attributes_of, const void* address) {
  constexpr uint32_t host = 1; // CU_MEMORYTYPE_HOST
  int memory_type = 2; // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
  uint32_t type = 0;
  void* types[] = {&type};
  int status = attributes_of(
      1, &memory_type, types, reinterpret_cast<uint64_t>(address));
  return status != 0 || type == host;
}

Pack::Pack(PyObject* args, PyObject* /*kwargs*/) {
  PyObject *function = nullptr, *descriptions = nullptr;
  unsigned long long count = 0;
  if (!PyArg_ParseTuple(args, "OOK", &function, &descriptions, &count)) {
    throw Error();
  }
  general = Ref::share(function);
  num_words = count;
  for_each(descriptions, [&](PyObject* place) {
    places.emplace_back(as_word(field(place, 0)), as_word(field(place, 1)));
  });
}

Pack::Memory* Pack::memory() {
  auto found = memories.find(PyThread_get_thread_ident());
  return found == memories.end() ? nullptr : &found->second;
}

PyObject* Pack::call(
    PyObject* object,
    PyObject* const* args,
    size_t nargs,
    PyObject* kwnames) {
  Pack& self = Boxed<Pack>::of(object);
  if (PyVectorcall_NARGS(nargs) == 1 && kwnames == nullptr &&
      PyList_CheckExact(args[0]) &&
      static_cast<size_t>(PyList_GET_SIZE(args[0])) == self.places.size()) {
    try {
      self.copy([&](size_t i) { return PyList_GET_ITEM(args[0], i); });
      Py_RETURN_NONE;
    } catch (const Unusual&) {
    } catch (const std::exception&) {
      // The general path raises the error that the program sees.
    }
  }
  return PyObject_Vectorcall(self.general.get(), args, nargs, kwnames);
}

Stage::Stage(PyObject* args, PyObject* /*kwargs*/) {
  PyObject *function = nullptr, *index = nullptr, *captures = nullptr,
           *stream = nullptr, *device = nullptr;
  if (!PyArg_ParseTuple(
          args,
          "OO!OOO",
          &function,
          &PyLong_Type,
          &index,
          &captures,
          &stream,
          &device)) {
    throw Error();
  }
  general = Ref::share(function);
  device_index = Ref::share(index);
  is_capturing = Ref::share(captures);
  current_stream = Ref::share(stream);
  current_device = Ref::share(device);
}

Ref Stage::operator()(PyObject* value) {
  ++times;
  Ref stream =
      checked(PyObject_CallOneArg(current_stream.get(), device_index.get()));
  auto found =
      staged.find({PyThread_get_thread_ident(), as_word(stream.get())});
  if (found == staged.end() ||
      !put(value, found->second, as_address(stream.get()))) {
    return checked(PyObject_CallOneArg(general.get(), value));
  }
  return Ref::share(found->second.copy.get());
}

bool Stage::put(PyObject* value, Staged& to, void* stream) const {
  const at::TensorBase& tensor = unpack(value);
  if (tensor.nbytes() != to.nbytes) {
    return false;
  }
  const void* from = tensor.const_data_ptr();
  if (may_be_pinned(to.pointer_attributes, from)) {
    return false;
  }
  if (std::memcmp(to.hosts[to.used - 1], from, to.nbytes) == 0) {
    return true;
  }
  if (to.used == to.hosts.size()) {
    return false;
  }
  // The context of a null stream is the current one.
  Ref device = checked(PyObject_CallNoArgs(current_device.get()));
  int is_current =
      PyObject_RichCompareBool(device.get(), device_index.get(), Py_EQ);
  if (is_current < 0) {
    throw Error();
  }
  if (is_current == 0) {
    return false;
  }
  // The driver may wait here, until the device has done a part of its queue.
  // Other threads, which stage elsewhere, run meanwhile. They may add to
  // `staged`, which does not move `to`.
  int status = 0;
  Py_BEGIN_ALLOW_THREADS;
  void* host = to.hosts[to.used];
  std::memcpy(host, from, to.nbytes);
  status = to.enqueue(to.address, host, to.nbytes, stream);
  Py_END_ALLOW_THREADS;
  if (status != 0) {
    // The general path tries again and reports the error.
    return false;
  }
  ++to.used;
  return true;
}

PyObject* Stage::call(
    PyObject* object,
    PyObject* const* args,
    size_t nargs,
    PyObject* kwnames) {
  Stage& self = Boxed<Stage>::of(object);
  if (PyVectorcall_NARGS(nargs) == 1 && kwnames == nullptr) {
    try {
      check_not_captured(self.is_capturing);
      return self(args[0]).release();
    } catch (const Error&) {
      return nullptr;
    } catch (const Unusual&) {
    } catch (const std::exception&) {
      // As in Pack::call.
    }
  }
  return PyObject_Vectorcall(self.general.get(), args, nargs, kwnames);
}

Words::Words(PyObject* args, PyObject* /*kwargs*/) {
  PyObject *function = nullptr, *list = nullptr;
  if (!PyArg_ParseTuple(args, "OO", &function, &list)) {
    throw Error();
  }
  general = Ref::share(function);
  for_each(list, [&](PyObject* pack) {
    packs.push_back(Boxed<Pack>::share(pack));
  });
}

void Words::append_to(Pointers& words) const {
  const size_t before = words.size();
  for (const Ref& ref : packs) {
    // The collector may have cleared it.
    Pack* pack =
        Boxed<Pack>::is(ref.get()) ? &Boxed<Pack>::of(ref.get()) : nullptr;
    const Pack::Memory* memory = pack == nullptr ? nullptr : pack->memory();
    if (memory == nullptr) {
      words.resize(before);
      Ref all = checked(PyObject_CallNoArgs(general.get()));
      for (uint64_t word : as_words(all.get())) {
        words.push_back(word);
      }
      return;
    }
    const size_t start = words.size();
    words.resize(start + pack->num_words);
    std::memcpy(
        words.data() + start,
        memory->address,
        pack->num_words * sizeof(uint64_t));
  }
}

PyObject* Words::call(
    PyObject* self,
    PyObject* const* /*args*/,
    size_t nargs,
    PyObject* kwnames) {
  return guarded([&]() -> PyObject* {
    check_no_arguments(nargs, kwnames);
    Pointers words;
    Boxed<Words>::of(self).append_to(words);
    return as_list(words.data(), words.size()).release();
  });
}

namespace {

// Pack.add(thread, address, owner, pointer_attributes): gives a thread memory.
PyObject* add_memory(PyObject* self, PyObject* args) {
  return guarded([&]() -> PyObject* {
    PyObject *thread = nullptr, *address = nullptr, *owner = nullptr,
             *attributes = nullptr;
    if (!PyArg_ParseTuple(
            args, "OOOO", &thread, &address, &owner, &attributes)) {
      return nullptr;
    }
    Pack::Memory memory{
        static_cast<char*>(as_address(address)),
        Ref::share(owner),
        reinterpret_cast<PointerAttributes>(as_address(attributes))};
    Pack::Memory& known = Boxed<Pack>::of(self).memories[as_word(thread)];
    // `general` wrote it.
    memory.times = known.times + 1;
    std::swap(known, memory);
    Py_RETURN_NONE;
  });
}

// Stage.add(thread, stream, copy, batch, used, enqueue, pointer_attributes)
PyObject* add_staged(PyObject* self, PyObject* args) {
  return guarded([&]() -> PyObject* {
    PyObject *thread = nullptr, *stream = nullptr, *copy = nullptr,
             *batch = nullptr, *used = nullptr, *enqueue = nullptr,
             *attributes = nullptr;
    if (!PyArg_ParseTuple(
            args,
            "OOOO!OOO",
            &thread,
            &stream,
            &copy,
            &PyList_Type,
            &batch,
            &used,
            &enqueue,
            &attributes)) {
      return nullptr;
    }
    try {
      const at::TensorBase& tensor = unpack(copy);
      Stage::Staged added{
          Ref::share(copy),
          Ref::share(batch),
          reinterpret_cast<uint64_t>(tensor.mutable_data_ptr()),
          tensor.nbytes(),
          {},
          as_word(used),
          reinterpret_cast<decltype(Stage::Staged::enqueue)>(
              as_address(enqueue)),
          reinterpret_cast<PointerAttributes>(as_address(attributes))};
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(batch); ++i) {
        const at::TensorBase& host = unpack(PyList_GET_ITEM(batch, i));
        if (host.nbytes() != added.nbytes) {
          throw Unusual();
        }
        added.hosts.push_back(host.mutable_data_ptr());
      }
      if (added.used == 0 || added.used > added.hosts.size()) {
        throw Unusual();
      }
      Boxed<Stage>::of(self).staged.insert_or_assign(
          Stage::ThreadAndStream(as_word(thread), as_word(stream)),
          std::move(added));
    } catch (const Unusual&) {
      PyErr_SetString(
          PyExc_ValueError, "expected a copy, and memory of its size");
      return nullptr;
    }
    Py_RETURN_NONE;
  });
}

// Stage.take(thread, stream): undoes add. Returns how much of the batch is
// used now, or None if nothing was added.
PyObject* take_staged(PyObject* self, PyObject* args) {
  return guarded([&]() -> PyObject* {
    PyObject *thread = nullptr, *stream = nullptr;
    if (!PyArg_ParseTuple(args, "OO", &thread, &stream)) {
      return nullptr;
    }
    auto& all = Boxed<Stage>::of(self).staged;
    auto taken =
        all.extract(Stage::ThreadAndStream(as_word(thread), as_word(stream)));
    if (taken.empty()) {
      Py_RETURN_NONE;
    }
    return PyLong_FromSize_t(taken.mapped().used);
  });
}

PyMethodDef pack_methods[] = {
    {"add", add_memory, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyMethodDef stage_methods[] = {
    {"add", add_staged, METH_VARARGS, nullptr},
    {"take", take_staged, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

} // namespace

bool add_values(PyObject* module) {
  return Boxed<Pack>::ready(
             module, "torch._inductor.pygraph._replay.Pack", pack_methods) &&
      Boxed<Stage>::ready(
             module, "torch._inductor.pygraph._replay.Stage", stage_methods) &&
      Boxed<Words>::ready(module, "torch._inductor.pygraph._replay.Words");
}

} // namespace torch::inductor::pygraph
