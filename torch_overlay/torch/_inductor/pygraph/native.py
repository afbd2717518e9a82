"""
Load the compiled part of a call, torch/csrc/inductor/pygraph/: replays and the CPU values
that they take.

The build compiles it if it finds a C++ compiler. Without it Python does the same, slower.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch


log = logging.getLogger(__name__)

# torch._inductor.pygraph._replay
compiled: Any = None

try:
    compiled = importlib.import_module("torch._inductor.pygraph._replay")
except ImportError as e:
    log.info("graphs are replayed by Python: %s", e)

# Called from bytecode that Dynamo makes.
as_tensor_fullprec = torch._as_tensor_fullprec
if compiled is not None:
    as_tensor_fullprec = compiled.as_tensor_fullprec


def callback(wrapper: Any, backend: Any) -> Any:
    """Dynamo's callback, whose backend each frame finds in less time. See Link."""
    if compiled is None:
        return wrapper
    return compiled.Link(wrapper, compiled.Link(backend, None))
