"""
Questions about the recordings in trees, and dropping them.

All of it is called with the manager's lock held, or while a node is recorded.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch._inductor.cudagraph_trees import is_live
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch._inductor.cudagraph_trees import CUDAGraphNode, CUDAGraphTreeManager
    from torch._inductor.cudagraph_utils import FunctionID
    from torch._inductor.pygraph.trees.policy import GraphPolicy
    from torch.cuda import _POOL_HANDLE


def current_path(manager: CUDAGraphTreeManager) -> Iterator[CUDAGraphNode]:
    """Yield the nodes of the current path, the last one first."""
    node = manager.current_node
    while node is not None:
        yield node
        node = node.parent


def times_on_path(manager: CUDAGraphTreeManager, policy: GraphPolicy) -> int:
    """Return how many nodes of the current path belong to a function."""
    return sum(n.wrapped_function.pygraph is policy for n in current_path(manager))


def recordings(
    manager: CUDAGraphTreeManager, function_id: FunctionID
) -> list[CUDAGraphNode]:
    """Return the recordings of a function, and all nodes behind them in the tree."""
    found = []

    def find(
        children: dict[FunctionID, list[CUDAGraphNode]], *, follows: bool
    ) -> None:
        for id, nodes in children.items():
            of_function = follows or id == function_id
            for node in nodes:
                if of_function:
                    found.append(node)
                find(node.children, follows=of_function)

    find(manager.roots, follows=False)
    return found


def policies_around(
    manager: CUDAGraphTreeManager, function_id: FunctionID
) -> OrderedSet[GraphPolicy] | None:
    """
    Return the policies of the other functions on the paths of a function's recordings.

    Returns None if there is no recording: it was dropped together with the recording of a
    function in front of it, and will be made anew.
    """
    found = recordings(manager, function_id)
    if not found:
        return None
    return OrderedSet(
        policy
        for node in found
        for on_path in node._path_from_root
        if on_path.wrapped_function.id != function_id
        and (policy := on_path.wrapped_function.pygraph) is not None
    )


def drop(manager: CUDAGraphTreeManager, function_id: FunctionID) -> None:
    """Drop the recordings of a function while none of them is on the current path."""
    for node in recordings(manager, function_id):
        node.remove_node_cached_tensors()
        node.graph = None
        siblings = manager.roots if node.parent is None else node.parent.children
        siblings.pop(function_id, None)


def forget(manager: CUDAGraphTreeManager, function_id: FunctionID) -> bool:
    """
    Drop the recordings of a function that will not be replayed, and all nodes behind them.

    The memory pool is freed with the last recording, once the caching allocator's cache is
    emptied.

    Returns False, and drops nothing, while one of these nodes has a live output, or is on a
    path that has one.
    """
    found = recordings(manager, function_id)
    last = manager.current_node
    if last is not None:
        if last.all_outputs_are_dead():
            manager.current_node = None
        elif any(node in found for node in last._path_from_root):
            return False
    if any(is_live(ref) for node in found for ref in node.outputs_weakrefs):
        return False
    drop(manager, function_id)
    if not any(manager.roots.values()):
        renew_pool(manager)
    return True


def empty_capture(
    device_index: int, stream: torch.cuda.Stream, pool: _POOL_HANDLE
) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with (
        # torch warns that the graph is empty.
        warnings.catch_warnings(record=True),
        torch.cuda.device(device_index),
        torch.cuda.graph(
            graph, pool=pool, stream=stream, capture_error_mode="thread_local"
        ),
    ):
        pass
    return graph


def renew_pool(manager: CUDAGraphTreeManager) -> None:
    """
    Exchange a pool that no graph uses, so that its segments can be freed.

    A dropped graph, or a recording that failed, leaves segments in the pool.
    """
    pool = torch.cuda.graph_pool_handle()
    manager.graph = empty_capture(manager.device_index, manager.stream, pool)
    manager.cuda_graphs_thread_pool = pool
