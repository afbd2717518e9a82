"""
The trees of one thread: how they call PyGraph, their lock and stream order, and questions about and drops of
recordings, which are called with the manager's lock held, or while a node is recorded.
"""

from __future__ import annotations

import collections
import contextlib
import warnings
import weakref
from typing import Any, Protocol, TYPE_CHECKING

import torch
from torch._inductor import cudagraph_trees
from torch._inductor.cudagraph_trees import get_manager, is_live, thread_containers
from torch._inductor.pygraph import native
from torch._inductor.pygraph.native import TreeState
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from torch._inductor.cudagraph_trees import CUDAGraphNode, CUDAGraphTreeManager
    from torch._inductor.cudagraph_utils import FunctionID
    from torch._inductor.pygraph.types.function import FunctionSpec, RecordingFacts, RecordingRequest, Refused
    from torch.cuda import _POOL_HANDLE


class GraphPolicy(Protocol):
    """What trees and their nodes call: ``WrappedFunction.pygraph``."""

    @property
    def spec(self) -> FunctionSpec: ...

    @property
    def binds_inputs(self) -> bool:
        """Whether a mutated external input is written where the caller has it."""

    def added(self, function_id: FunctionID) -> None:
        """Trees gave the function a name, under which it will be recorded."""

    def may_run(self, manager: CUDAGraphTreeManager) -> bool:
        """Return whether trees may run the function in this call. Called before trees end a path."""

    def node_type(self) -> type[CUDAGraphNode]: ...

    def request(self, declared_static: Mapping[int, torch.Tensor]) -> RecordingRequest:
        """Return what the recording is to be like, given the declared static inputs that no graph of the path owns."""

    def recorded(self, facts: RecordingFacts) -> None: ...

    def refused(self, manager: CUDAGraphTreeManager, refused: Refused) -> None:
        """Called once the node is gone, before the call runs uncaptured."""

    def interrupted(self, manager: CUDAGraphTreeManager) -> None:
        """An exception that is not the recording's own ended it, such as an interrupt."""

    def copied(self, nbytes: int) -> None:
        """A replay copied so many bytes of inputs."""

    def is_in(self, groups: Collection[str]) -> bool:
        """Return whether the function may have collectives of these process groups."""

    def left_group(self) -> None:
        """A process group of the function's collectives is destroyed."""


class NoTrees(dict[int, Any]):
    """The containers of a thread while it records; see without_trees."""


def has_trees() -> bool:
    """Return whether trees know this thread, so that it may record or replay a function."""
    containers = thread_containers()
    return containers is not None and not isinstance(containers, NoTrees)


@contextlib.contextmanager
def without_trees() -> Iterator[None]:
    """
    Hide trees from this thread while it records a function. A custom operator may call another compiled function, whose
    replay would change the path that the recording is about to join.
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

    Replays read the generator's state from 16 bytes. The manager's first capture would allocate them from the stream of
    graphs, which would need a segment for them.
    """
    manager = get_manager(device_index, create_if_none_exists=False)
    if manager is None:
        with torch.cuda.device(device_index):
            # The bytes live as long as a graph has them. This graph lives until the return.
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(torch.cuda.default_generators[device_index])
            manager = get_manager(device_index)
    return manager


class StreamOrder:
    """Orders the launches of one manager: its graphs share memory, and the generator's state."""

    def __init__(self, device_index: int) -> None:
        self.device_index = device_index
        self.stream: torch.cuda.Stream | None = None

    def wait(self) -> None:
        """Make the current stream wait for that of the last launch, or of a backward that reads the pool uncaptured."""
        last, stream = self.stream, torch.cuda.current_stream(self.device_index)
        if last is not None:
            try:
                with torch.cuda.stream(last):
                    is_captured = torch.cuda.is_current_stream_capturing()
                # If the program captures it, no launch is pending, and waiting would pull this stream into the capture.
                if not is_captured:
                    stream.wait_stream(last)
            except RuntimeError:
                # The program made the stream, and destroyed it.
                torch.cuda.synchronize(self.device_index)
        self.stream = stream


_states: weakref.WeakKeyDictionary[CUDAGraphTreeManager, Any] = weakref.WeakKeyDictionary()


def state_of(manager: CUDAGraphTreeManager) -> Any:
    """Return the TreeState of a manager."""
    state = _states.get(manager)
    if state is None:
        index = manager.device_index
        state = TreeState(index, torch._C._cuda_getCurrentRawStream, StreamOrder(index).wait)
        # Another thread may have added one.
        state = _states.setdefault(manager, state)
    return state


def current_path(manager: CUDAGraphTreeManager) -> Iterator[CUDAGraphNode]:
    """Yield the nodes of the current path, the last one first."""
    node = manager.current_node
    while node is not None:
        yield node
        node = node.parent


def times_on_path(manager: CUDAGraphTreeManager, policy: GraphPolicy) -> int:
    """Return how many nodes of the current path belong to a function."""
    return sum(n.wrapped_function.pygraph is policy for n in current_path(manager))


def recordings(manager: CUDAGraphTreeManager, function_id: FunctionID) -> list[CUDAGraphNode]:
    """Return the recordings of a function, and all nodes behind them in the tree."""
    found = []

    def find(children: dict[FunctionID, list[CUDAGraphNode]], *, follows: bool) -> None:
        for id, nodes in children.items():
            of_function = follows or id == function_id
            for node in nodes:
                if of_function:
                    found.append(node)
                find(node.children, follows=of_function)

    find(manager.roots, follows=False)
    return found


def max_recorded_again(manager: CUDAGraphTreeManager, function_id: FunctionID) -> int:
    """
    Dropping the recordings of a function drops all recordings behind them, too. Return the largest number of these recordings
    that belong to one function.
    """
    counts = collections.Counter(node.wrapped_function.id for node in recordings(manager, function_id))
    return max(counts.values(), default=0)


def policies_around(manager: CUDAGraphTreeManager, function_id: FunctionID) -> OrderedSet[GraphPolicy] | None:
    """Return the policies of the other functions on the paths of a function's recordings, None if it has none."""
    found = recordings(manager, function_id)
    if not found:
        return None
    return OrderedSet(
        policy
        for node in found
        for on_path in node._path_from_root
        if on_path.wrapped_function.id != function_id and (policy := on_path.wrapped_function.pygraph) is not None
    )


def destroy_graph(node: CUDAGraphNode) -> None:
    """
    Destroy the graph of a node that is not replayed any more, whoever holds the node or the graph: a process group
    whose collectives it has captured cannot be destroyed before.
    """
    graph, node.graph = node.graph, None
    if graph is not None:
        graph.reset()


def drop(manager: CUDAGraphTreeManager, function_id: FunctionID) -> None:
    """Drop the recordings of a function while none of them is on the current path."""
    for node in recordings(manager, function_id):
        node.remove_node_cached_tensors()
        destroy_graph(node)
        siblings = manager.roots if node.parent is None else node.parent.children
        siblings.pop(function_id, None)


def leave_groups(groups: Collection[str]) -> None:
    """
    Destroy the graphs with collectives of process groups, which are about to be destroyed: NCCL waits for these graphs.
    Their functions run uncaptured from now on.
    """
    for manager, state in [*_states.items()]:
        functions = [f for f in manager.ids_to_funcs.values() if f.pygraph is not None and f.pygraph.is_in(groups)]
        # If another thread uses the graphs, it uses the groups, too.
        if not functions or manager.roots is None or not state.acquire():
            continue
        try:
            for function in functions:
                function.pygraph.left_group()
                _destroy_recordings(manager, function.id)
        finally:
            state.release()


def _destroy_recordings(manager: CUDAGraphTreeManager, function_id: FunctionID) -> None:
    """Destroy the graphs of a function, which does not run captured again, and all behind them. Outputs stay alive."""
    found = recordings(manager, function_id)
    for node in found:
        node.remove_node_cached_tensors()
        destroy_graph(node)
    if manager.current_node in found:
        # What follows is recorded again.
        manager.current_node.children.clear()


def watch_groups() -> None:
    """Let ``leave_groups`` be called when a process group is destroyed."""
    hooks = torch.distributed.distributed_c10d._shutdown_hooks
    if leave_groups not in hooks:
        hooks.append(leave_groups)


def forget(manager: CUDAGraphTreeManager, function_id: FunctionID) -> bool:
    """
    Drop the recordings of a function and all nodes behind them. Return False, and drop nothing, while one of these
    nodes has a live output, or is on a path that has one.
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


def empty_capture(device_index: int, stream: torch.cuda.Stream, pool: _POOL_HANDLE) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with (
        # torch warns that the graph is empty.
        warnings.catch_warnings(record=True),
        torch.cuda.device(device_index),
        torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
    ):
        pass
    return graph


def renew_pool(manager: CUDAGraphTreeManager) -> None:
    """Exchange a pool in which dropped graphs or a failed recording left segments, so that they can be freed."""
    pool = torch.cuda.graph_pool_handle()
    manager.graph = empty_capture(manager.device_index, manager.stream, pool)
    manager.cuda_graphs_thread_pool = pool
