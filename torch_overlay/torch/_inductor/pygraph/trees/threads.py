"""
Which threads may record and replay, one at a time, and in which order streams launch.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor import cudagraph_trees
from torch._inductor.cudagraph_trees import get_manager, thread_containers
from torch._inductor.pygraph import native


if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager


class NoTrees(dict[int, Any]):
    """The containers of a thread while it records; see without_trees."""


def has_trees() -> bool:
    """Return whether trees know this thread, so that it may record or replay a function."""
    containers = thread_containers()
    return containers is not None and not isinstance(containers, NoTrees)


@contextlib.contextmanager
def without_trees() -> Iterator[None]:
    """
    Hide trees from this thread while it records a function.

    A custom operator of the function may call another compiled function. A replay of that
    one would change the path that the recording is about to join, so it runs uncaptured.
    """
    local = cudagraph_trees.local
    is_local = hasattr(local, "tree_manager_containers")
    containers = thread_containers()
    local.tree_manager_containers = NoTrees()
    # Compiled code asks for the containers that autograd's threads share, not for these.
    compiled = native.compiled
    was_without = compiled is not None and compiled.set_without_trees(True)
    try:
        yield
    finally:
        if is_local:
            local.tree_manager_containers = containers
        else:
            # This thread has them from the thread that autograd runs it for.
            del local.tree_manager_containers
        if compiled is not None:
            compiled.set_without_trees(was_without)


def manager_of(device_index: int) -> CUDAGraphTreeManager:
    """
    Return the calling thread's manager, which is made if there is none.

    Replays read the generator's state from 16 bytes. They are allocated here, before the
    manager's first capture: that capture would allocate them from the stream of graphs,
    which has nothing else outside of the pool and would need a segment for them.
    """
    manager = get_manager(device_index, create_if_none_exists=False)
    if manager is None:
        with torch.cuda.device(device_index):
            # The bytes live as long as a graph has them. This graph lives until the return.
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(torch.cuda.default_generators[device_index])
            manager = get_manager(device_index)
    return manager


_locks: weakref.WeakKeyDictionary[CUDAGraphTreeManager, threading.Lock] = (
    weakref.WeakKeyDictionary()
)


def lock_of(manager: CUDAGraphTreeManager) -> threading.Lock:
    """
    Return the lock that a thread holds while it records or replays.

    A thread that does not get the lock runs the function uncaptured. It never waits: the
    holder may be waiting for it. Trees belong to one thread and to autograd's threads that
    work on its behalf. Autograd runs the backward of CPU outputs in the calling thread and
    that of GPU outputs in a thread of its own, both at the same time.

    A finalizer in the same thread does not get the lock either. The collector may run
    finalizers where a replay allocates, and the replay has already checked the path.
    """
    return _locks.setdefault(manager, threading.Lock())


class StreamOrder:
    """
    The order in which the graphs of one manager are launched on different streams.

    Launches must follow one another: the graphs use the same memory, and a replay reads the
    generator's state where the next replay writes it. The holder of the manager's lock uses
    this.

    Attributes:
        raw_stream: the stream of the last launch
    """

    __slots__ = ("device_index", "raw_stream", "stream")

    def __init__(self, device_index: int) -> None:
        self.device_index = device_index
        self.raw_stream: int | None = None
        self.stream: torch.cuda.Stream | None = None

    def follow(self) -> None:
        """
        Let the current stream wait for the last launch if that was on another stream.

        Called outside of captures, before a launch and before everything that is written
        for it. The wait covers all work of the other stream until now. An uncaptured
        backward that reads activations of the pool is part of that work.
        """
        raw_stream = torch._C._cuda_getCurrentRawStream(self.device_index)
        if raw_stream == self.raw_stream:
            return
        stream = torch.cuda.current_stream(self.device_index)
        if self.stream is not None:
            try:
                if not is_captured(self.stream):
                    stream.wait_stream(self.stream)
            except RuntimeError:
                # The program owned the stream and destroyed it.
                torch.cuda.synchronize(self.device_index)
        self.stream, self.raw_stream = stream, raw_stream


def is_captured(stream: torch.cuda.Stream) -> bool:
    """
    Return whether the program captures a stream.

    There is nothing to wait for then: the capture began when the device was done, and the
    captured work runs later. Waiting on an event of a capturing stream would pull the
    current stream into the capture.
    """
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


_stream_orders: weakref.WeakKeyDictionary[CUDAGraphTreeManager, StreamOrder] = (
    weakref.WeakKeyDictionary()
)


def stream_order_of(manager: CUDAGraphTreeManager) -> StreamOrder:
    return _stream_orders.setdefault(manager, StreamOrder(manager.device_index))
