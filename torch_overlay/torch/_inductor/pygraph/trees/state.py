"""The lock and the stream order of the trees of one thread."""

from __future__ import annotations

import weakref
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor.pygraph.native import TreeState


if TYPE_CHECKING:
    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager


class StreamOrder:
    """
    Order the launches of one manager, on whichever streams they are: its graphs use the same
    memory, and a replay reads the generator's state where the next one sets it.
    """

    __slots__ = ("device_index", "stream")

    def __init__(self, device_index: int) -> None:
        self.device_index = device_index
        self.stream: torch.cuda.Stream | None = None

    def wait(self) -> None:
        """
        Make the current stream wait for the queue of the last launch's stream. The queue
        includes an uncaptured backward that reads activations of the pool.
        """
        stream = torch.cuda.current_stream(self.device_index)
        if self.stream is not None:
            try:
                if not is_captured(self.stream):
                    stream.wait_stream(self.stream)
            except RuntimeError:
                # The program made the stream, and destroyed it.
                torch.cuda.synchronize(self.device_index)
        self.stream = stream


def is_captured(stream: torch.cuda.Stream) -> bool:
    """
    Return whether the program captures a stream. No launch is pending then: the device was
    idle when the capture began. Waiting on an event of a capturing stream would pull the
    current stream into the capture.
    """
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


_states: weakref.WeakKeyDictionary[CUDAGraphTreeManager, Any] = (
    weakref.WeakKeyDictionary()
)


def state_of(manager: CUDAGraphTreeManager) -> Any:
    """Return the TreeState of a manager."""
    state = _states.get(manager)
    if state is None:
        index = manager.device_index
        state = TreeState(
            index, torch._C._cuda_getCurrentRawStream, StreamOrder(index).wait
        )
        # Another thread may have added one.
        state = _states.setdefault(manager, state)
    return state
