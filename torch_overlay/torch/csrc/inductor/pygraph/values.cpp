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
  auto [function, descriptions, count] = members<3>(args);
  general = Ref::share(function);
  num_words = as_word(count);
  for_each(descriptions, [&](PyObject* place) {
    auto [offset, size] = members<2>(place);
    places.emplace_back(as_word(offset), as_word(size));
  });
}

PyObject* Pack::call(const Call& call) {
  auto pack = [&]() -> PyObject* {
    if (!call.has_list() ||
        static_cast<size_t>(PyList_GET_SIZE(call.args[0])) != places.size()) {
      return nullptr;
    }
    copy([&](size_t i) { return PyList_GET_ITEM(call.args[0], i); });
    Py_RETURN_NONE;
  };
  return attempted(pack, [&]() { return call.pass_to(general); });
}

Stage::Stage(PyObject* args, PyObject* /*kwargs*/) {
  auto [function, index, captures, stream, device] = members<5>(args);
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
  checked(is_current);
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

PyObject* Stage::call(const Call& call) {
  auto stage = [&]() -> PyObject* {
    check_not_captured(is_capturing);
    return call.count() == 1 ? (*this)(call.args[0]).release() : nullptr;
  };
  return attempted(stage, [&]() { return call.pass_to(general); });
}

Words::Words(PyObject* args, PyObject* /*kwargs*/) {
  auto [function, list] = members<2>(args);
  general = Ref::share(function);
  for_each(list, [&](PyObject* pack) {
    packs.push_back(Boxed<Pack>::share(pack));
  });
}

Pointers Words::get() const {
  Pointers words;
  for (const Ref& ref : packs) {
    // The collector may have cleared it.
    Pack* pack =
        Boxed<Pack>::is(ref.get()) ? &Boxed<Pack>::of(ref.get()) : nullptr;
    const Pack::Memory* memory = pack == nullptr ? nullptr : pack->memory();
    if (memory == nullptr) {
      return as_words(checked(PyObject_CallNoArgs(general.get())).get());
    }
    const size_t start = words.size();
    words.resize(start + pack->num_words);
    std::memcpy(
        words.data() + start,
        memory->address,
        pack->num_words * sizeof(uint64_t));
  }
  return words;
}

PyObject* Words::call(const Call& /*call*/) {
  return guarded([&]() { return as_list(get()).release(); });
}

namespace {

// Pack.add(thread, address, owner, pointer_attributes): gives a thread memory.
PyObject* add_memory(PyObject* self, PyObject* args) {
  return guarded([&]() -> PyObject* {
    auto [thread, address, owner, attributes] = members<4>(args);
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
    auto [thread, stream, copy, batch, used, enqueue, attributes] =
        members<7>(args);
    const at::TensorBase& tensor = unpack(copy);
    Stage::Staged added{
        Ref::share(copy),
        Ref::share(batch),
        address_of(tensor),
        tensor.nbytes(),
        {},
        as_word(used),
        reinterpret_cast<decltype(Stage::Staged::enqueue)>(
            as_address(enqueue)),
        reinterpret_cast<PointerAttributes>(as_address(attributes))};
    for_each(batch, [&](PyObject* host) {
      added.hosts.push_back(unpack(host).mutable_data_ptr());
    });
    Boxed<Stage>::of(self).staged.insert_or_assign(
        Stage::ThreadAndStream(as_word(thread), as_word(stream)),
        std::move(added));
    Py_RETURN_NONE;
  });
}

// Stage.take(thread, stream): undoes add. Returns how much of the batch is
// used now, or None if nothing was added.
PyObject* take_staged(PyObject* self, PyObject* args) {
  return guarded([&]() -> PyObject* {
    auto [thread, stream] = members<2>(args);
    auto& all = Boxed<Stage>::of(self).staged;
    auto taken =
        all.extract(Stage::ThreadAndStream(as_word(thread), as_word(stream)));
    if (taken.empty()) {
      Py_RETURN_NONE;
    }
    return PyLong_FromSize_t(taken.mapped().used);
  });
}

PyMethodDef pack_methods[] = {{"add", add_memory, METH_VARARGS, nullptr}, {}};
PyMethodDef stage_methods[] = {
    {"add", add_staged, METH_VARARGS, nullptr},
    {"take", take_staged, METH_VARARGS, nullptr},
    {}};

} // namespace

bool add_values(PyObject* module) {
  Boxed<Pack>::type.tp_methods = pack_methods;
  Boxed<Stage>::type.tp_methods = stage_methods;
  return Boxed<Pack>::ready(module, "Pack") &&
      Boxed<Stage>::ready(module, "Stage") &&
      Boxed<Words>::ready(module, "Words");
}

} // namespace torch::inductor::pygraph
