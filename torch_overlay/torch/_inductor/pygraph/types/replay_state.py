"""
State that replays read and change: a cell for each fact of a recording that changes, and one
TreeState for the trees of a thread.

Compiled replays read the fields of these objects without Python, so the compiled module has
both types too. It is chosen where it was compiled; Python's replays work with either.
"""

from __future__ import annotations

import threading
from typing import Any, TYPE_CHECKING

from torch._inductor.pygraph import native


if TYPE_CHECKING:
    from collections.abc import Callable


class PythonCell:
    """Hold an object that changes."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class PythonTreeState:
    """
    Hold the lock of the trees of one thread, and the stream of their last launch.

    A thread holds the lock while it records or replays. Another thread runs uncaptured
    meanwhile. It never waits, since the first thread may wait for it: autograd runs the
    backward of CPU outputs in the thread that called it, and the backward of other outputs in
    threads of its own, at the same time. A finalizer that the collector runs inside of a
    replay runs uncaptured too: the replay has read the path already.

    Attributes:
        raw_stream: the address of the last launch's stream, or None
    """

    __slots__ = ("device_index", "current_stream", "wait", "raw_stream", "_lock")

    def __init__(
        self,
        device_index: int,
        current_stream: Callable[[int], int],
        wait: Callable[[], None],
    ) -> None:
        """
        Args:
            current_stream: returns the address of a device's current stream
            wait: makes the current stream wait for the last launch
        """
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
        """
        Wait for the last launch if it was on another stream.

        Called with the lock, outside of captures, before a launch and all that it writes.
        """
        raw_stream = self.current_stream(self.device_index)
        if raw_stream != self.raw_stream:
            self.wait()
            self.raw_stream = raw_stream


Cell: Any = getattr(native.compiled, "Cell", PythonCell)
TreeState: Any = getattr(native.compiled, "TreeState", PythonTreeState)
