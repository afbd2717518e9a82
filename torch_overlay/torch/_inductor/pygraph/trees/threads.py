"""Which threads may record and replay, and the trees of a thread."""

from __future__ import annotations

import contextlib
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
