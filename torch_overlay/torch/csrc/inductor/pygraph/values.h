#pragma once

// How CPU values reach a graph; see values/deliver.py, which makes these.

#include "object.h"

#include <cstring>
#include <map>
#include <vector>

namespace torch::inductor::pygraph {

// cuPointerGetAttributes
using PointerAttributes = int (*)(unsigned, int*, void**, uint64_t);

// Whether an address may lie in pinned memory. An earlier copy from the GPU to
// pinned memory may not have been made yet: the general path waits for it, or
// copies behind it.
bool may_be_pinned(PointerAttributes attributes_of, const void* address);

// Pack(general, places, num_words): Deliver.pack, with the (offset, size) of
// each value. A call copies the values to the memory of its thread. It calls
// `general` if no memory was added for the thread, or if a value is pinned.
struct Pack {
  struct Memory {
    char* address = nullptr;
    Ref owner;
    PointerAttributes pointer_attributes = nullptr;
    // How often it was written.
    uint64_t times = 0;
  };

  Pack(PyObject* args, PyObject* kwargs);
  PyObject* call(const Call& call);

  // The memory of the calling thread, or null.
  Memory* memory() {
    auto found = memories.find(PyThread_get_thread_ident());
    return found == memories.end() ? nullptr : &found->second;
  }

  // Copies the tensors value(0), value(1), ... Returns where they lie.
  template <typename F>
  const Memory& copy(F&& value) {
    Memory* to = memory();
    if (to == nullptr) {
      throw Unusual();
    }
    ++to->times;
    for (size_t i = 0; i < places.size(); ++i) {
      const auto& [offset, size] = places[i];
      const void* from = unpack(value(i)).const_data_ptr();
      if (may_be_pinned(to->pointer_attributes, from)) {
        throw Unusual();
      }
      std::memcpy(to->address + offset, from, size);
    }
    return *to;
  }

  template <typename F>
  void visit(F&& f) {
    // Owners of memory are in no cycle, and live until the end.
    f(general);
  }

  Ref general;
  std::vector<std::pair<size_t, size_t>> places;
  size_t num_words = 0;
  // By thread.
  std::map<uint64_t, Memory> memories;
};

// Stage(general, device_index, is_capturing, current_stream, current_device):
// Stage.stage. A call compares a value with the one before, and copies it to
// the GPU if it changed, through pinned memory that was added for the thread
// and stream. It calls `general` for pinned values, and where that memory is
// used up. The last three arguments are torch's functions of the CUDA runtime.
struct Stage {
  using ThreadAndStream = std::pair<uint64_t, uint64_t>;

  struct Staged {
    Ref copy;
    // Its tensors own the hosts.
    Ref batch;
    uint64_t address;
    size_t nbytes;
    std::vector<void*> hosts;
    // At least one. The last host that is used has the value of the copy.
    size_t used;
    // cuMemcpyHtoDAsync
    int (*enqueue)(uint64_t, const void*, size_t, void*);
    PointerAttributes pointer_attributes;
  };

  Stage(PyObject* args, PyObject* kwargs);
  PyObject* call(const Call& call);

  // The copy of a value, outside of captures.
  Ref operator()(PyObject* value);

  // False if it takes more than a copy from the next host.
  bool put(PyObject* value, Staged& to, void* stream) const;

  template <typename F>
  void visit(F&& f) {
    // What is staged is in no cycle.
    f(general, is_capturing, current_stream, current_device);
  }

  Ref general;
  Ref device_index;
  Ref is_capturing;
  Ref current_stream;
  Ref current_device;
  std::map<ThreadAndStream, Staged> staged;
  // How often it was called, by all threads.
  uint64_t times = 0;
};

// Words(general, packs): a call gives the words that the thread packed last.
// It calls `general`, which does the same, where a pack has no memory of the
// thread.
struct Words {
  Words(PyObject* args, PyObject* kwargs);
  PyObject* call(const Call& call);

  Pointers get() const;

  template <typename F>
  void visit(F&& f) {
    f(general);
    for (Ref& pack : packs) {
      f(pack);
    }
  }

  Ref general;
  std::vector<Ref> packs;
};

} // namespace torch::inductor::pygraph
