"""The compiled part of a call, torch/csrc/inductor/pygraph/. Where no C++ compiler was found, Python does the same."""

from __future__ import annotations

import importlib
import logging
import threading
from typing import Any, TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

# torch._inductor.pygraph._replay
compiled: Any = None

try:
    compiled = importlib.import_module("torch._inductor.pygraph._replay")
except ImportError as e:
    log.info("graphs are replayed by Python: %s", e)


def callback(wrapper: Any, backend: Any) -> Any:
    """Dynamo's callback, whose backend each frame finds in less time. See Link."""
    if compiled is None:
        return wrapper
    return compiled.Link(wrapper, compiled.Link(backend, None))


class PythonTreeState:
    """
    Hold the lock of the trees of one thread, and the stream of their last launch.

    A thread holds the lock while it records or replays. Another thread, or a finalizer inside of a replay, runs
    uncaptured meanwhile. It never waits, since the first thread may wait for it, as for autograd's.
    """

    __slots__ = ("device_index", "current_stream", "wait", "raw_stream", "_lock")

    def __init__(self, device_index: int, current_stream: Callable[[int], int], wait: Callable[[], None]) -> None:
        self.device_index = device_index
        self.current_stream = current_stream
        self.wait = wait
        self.raw_stream: int | None = None
        self._lock = threading.Lock()

    def acquire(self) -> bool:
        """Take the lock if nobody has it; say whether."""
        return self._lock.acquire(blocking=False)

    def release(self) -> None:
        self._lock.release()

    def follow(self) -> None:
        """Wait for the last launch if it was on another stream. Called with the lock, outside of captures."""
        raw_stream = self.current_stream(self.device_index)
        if raw_stream != self.raw_stream:
            self.wait()
            self.raw_stream = raw_stream


TreeState: Any = getattr(compiled, "TreeState", PythonTreeState)

# Called from bytecode that Dynamo makes.
as_tensor_fullprec = getattr(compiled, "as_tensor_fullprec", torch._as_tensor_fullprec)
