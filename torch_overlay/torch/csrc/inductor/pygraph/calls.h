#pragma once

#include "object.h"

namespace torch::inductor::pygraph {

// Adds what compiled bytecode calls; see calls/direct.py and calls/training.py.
bool add_calls(PyObject* module);

} // namespace torch::inductor::pygraph
