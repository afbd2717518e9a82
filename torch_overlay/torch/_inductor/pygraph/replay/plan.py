"""
The plan of a replay: all that a replay of one recording checks, sets and hands out.

Trees look for the recording that fits each call, and rebuild every output from its metadata. A plan has the answers
that do not change between calls. A call takes the general path, which is trees', if something else changed, as the
attributes of ReplayPlan say, if another call has the lock of the trees, if a cached tensor was changed by its last
owner, or if a bound input is a conjugate or a negative that is not computed.

A recording for many sizes is none of trees': its plan has no ``node``. A call of such a plan has numbers besides the
inputs, and what sets the nodes. The numbers are further words, and what outputs have for sizes and strides.

Two interpreters follow a plan: interpreter.Replay, and Replay of the compiled module. They read ``_current_node`` and
``path_state`` of the manager, ``MarkStepBox.mark_step_counter``, ``GenerationTracker.generation``,
``local.tree_manager_containers`` and ``extra_ref_check`` of a StorageWeakRefWrapper. They set ``_current_node``,
``path_state``, ``current_gen`` and ``running_forwards_with_pending_backwards`` of the manager, and nothing else of
trees.
"""

from __future__ import annotations

import dataclasses
import itertools
from types import CellType
from typing import Any, Literal, NamedTuple, TYPE_CHECKING

import torch
from torch._dynamo.mutation_guard import GenerationTracker
from torch._inductor import cudagraph_trees
from torch._inductor.cudagraph_trees import AliasesBoundMemory, ExecutionState, MarkStepBox, thread_containers
from torch._inductor.pygraph.graph.sized import OwnGraph
from torch._inductor.pygraph.trees.cached import CachedTensor
from torch._inductor.utils import GPU_ALIGN_BYTES


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._inductor.cudagraph_trees import CUDAGraphNode, CUDAGraphTreeManager, PathOutputIndex
    from torch._inductor.pygraph.capture.bound import BoundGraphNode
    from torch._inductor.pygraph.capture.sized import SizedRecording
    from torch._inductor.pygraph.graph.sized import SizedGraph
    from torch._inductor.utils import InputType


class Output(NamedTuple):
    """
    An output of a replay. By kind, ``value`` is:

    - bound: the position of the tensor: bound inputs first, then allocations, then views
    - cached: the CachedTensor that lies at the output's position in ``cached``
    - constant: the output, the same in each call: a number, None
    - input: the position of the static input that the output is
    - made: a function that makes a view of a static input, or a tensor without elements
    - number: the position among the numbers of the call
    """

    kind: Literal["bound", "cached", "constant", "input", "made", "number"]
    value: Any


class PathOutput(NamedTuple):
    """An output of a graph of the path: its place in the lists of its node."""

    weakrefs: list[Any]
    cached: list[Any]
    index: int


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ReplayPlan:
    """
    See the module's docstring.

    Attributes:
        graph: a cell with the node's graph, or None while its cached tensors were dropped, or once it was
        is_outdated: a cell: whether the function is to be recorded again
        mark_step, tracker: where the program's steps and Dynamo's generations are counted
        local, containers: where threads find their containers, and what returns those of the calling thread
        owner: the containers of the thread that recorded, which alone replays
        parent: the node before on the path, which the call's path has to end with
        live_outputs: returns what has to be dead of the path before a new one begins, given its last node
        dead_before, dead_after: what has to be dead of the path, before and after ``dropped`` inputs are gone
        pending_backward: what running_forwards_with_pending_backwards is set to, if at all
        num_inputs: a call has at least so many
        static: (position, address) of inputs that may not move
        bound: positions of inputs that may
        alignments: of their addresses in bytes
        pool: bounds of the segments of the graphs' memory, where no bound input may lie: starts and ends in turn
        dropped: positions of inputs that earlier graphs of the path returned. The replay lets go of them
        restore: rebuilds these, given the inputs, where the call takes the general path
        allocators: each makes memory for an output, given the numbers of the call if it has some
        views: of bound inputs and allocations: (position, size, stride, offset in bytes, itemsize). Size, stride and
            offset are positions in the numbers
        nodes: sets the addresses of bound inputs and allocations, and the words. Returns False if a node refused. None if
            each call has its own
        cached: tensors that the node caches, by output
    """

    node: BoundGraphNode | None
    graph: CellType
    is_outdated: CellType
    manager: CUDAGraphTreeManager
    executing: ExecutionState = ExecutionState.EXECUTION
    mark_step: Any = MarkStepBox
    tracker: Any = GenerationTracker
    local: Any = cudagraph_trees.local
    containers: Callable[[], object]
    owner: object
    parent: CUDAGraphNode | None = None
    live_outputs: Callable[[CUDAGraphNode], tuple[PathOutput, ...]]
    dead_before: tuple[PathOutput, ...] = ()
    dead_after: tuple[PathOutput, ...] = ()
    pending_backward: bool | None = None
    is_capturing: Callable[[], bool]
    num_inputs: int
    static: tuple[tuple[int, int], ...] = ()
    bound: tuple[int, ...]
    alignments: tuple[int, ...]
    pool: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    restore: Callable[[list[InputType]], None]
    allocators: tuple[Callable[..., torch.Tensor], ...]
    views: tuple[tuple[Any, ...], ...] = ()
    words: Callable[[], list[int]] | None = None
    nodes: Callable[[list[int]], bool] | None = None
    launch: Callable[[Any], None]
    cached: list[torch.Tensor | None]
    outputs: tuple[Output, ...]


def path_outputs(node: CUDAGraphNode, indices: list[PathOutputIndex]) -> tuple[PathOutput, ...]:
    """Return the outputs at these (depth, index) of a node's path."""
    path = list(node._path_from_root)
    return tuple(PathOutput(path[depth].outputs_weakrefs, path[depth].cached_tensor_outputs, i) for depth, i in indices)


def launch_of(graph: Any) -> Callable[[Any], None]:
    """Return what launches a graph, given the graph."""
    if isinstance(graph, OwnGraph):
        return graph.launch if graph.drawing is None else OwnGraph.replay
    # What torch.cuda.CUDAGraph's methods forward to.
    base: type[Any] = torch._C._CUDAGraph
    return (base if isinstance(graph, base) else type(graph)).replay


def replay_plan(node: BoundGraphNode, manager: CUDAGraphTreeManager, mode: str, owner: object) -> ReplayPlan:
    managed = node.cudagraph_managed_idxs
    static_idxs = [*node.non_managed_static_input_idxs, *managed]
    return ReplayPlan(
        node=node,
        graph=node.replay_graph,
        is_outdated=node.request.state.outdated,
        manager=manager,
        containers=thread_containers,
        owner=owner,
        parent=node.parent,
        live_outputs=lambda last: path_outputs(last, last.live_indices_after_graph),
        dead_before=path_outputs(node, node.expected_dead_indices_before_graph),
        dead_after=path_outputs(node, node.expected_dead_indices_after_graph),
        pending_backward={"forward": True, "backward": False}.get(mode),
        is_capturing=torch._C._cuda_isCurrentStreamCapturing,
        num_inputs=1 + max((*static_idxs, *node.bound_input_idxs), default=-1),
        static=tuple((i, node.static_input_data_ptrs[i]) for i in static_idxs),  # type: ignore[misc]
        bound=tuple(node.bound_input_idxs),
        alignments=(max(node.alignment, GPU_ALIGN_BYTES),) * len(node.bound_input_idxs),
        pool=tuple(node.pool_ranges.bounds),
        dropped=tuple(i for i in managed if not node.preserved_aliased_inputs[i]),
        restore=node.restore_managed,
        allocators=tuple(node.allocators),
        words=node.values.words_for_replay(),
        nodes=node.binding.nodes,
        launch=launch_of(node.graph),
        cached=node.cached_tensor_outputs,
        outputs=outputs_of(node),
    )


def sized_plan(
    recording: SizedRecording, on: SizedGraph, manager: CUDAGraphTreeManager, mode: str, owner: object
) -> ReplayPlan:
    """Return the plan of a recording for all sizes at which ``on`` is launched."""

    def nothing(of: object) -> tuple[()]:
        return ()

    return ReplayPlan(
        node=None,
        graph=on.cell,
        is_outdated=CellType(False),
        manager=manager,
        containers=thread_containers,
        owner=owner,
        live_outputs=nothing,
        # A forward leaves nothing in the graphs' pool.
        pending_backward=False if mode == "backward" else None,
        is_capturing=torch._C._cuda_isCurrentStreamCapturing,
        num_inputs=1 + max(recording.model.inputs, default=-1),
        bound=tuple(recording.model.inputs),
        alignments=recording.bound_alignments,
        restore=nothing,  # type: ignore[arg-type]
        allocators=tuple(recording.allocators),
        views=tuple(recording.views),
        launch=launch_of(on.graph),
        cached=[None] * len(recording.outputs),
        outputs=tuple(Output(kind, value) for kind, value in recording.outputs),  # type: ignore[arg-type]
    )


def outputs_of(node: BoundGraphNode) -> tuple[Output, ...]:
    """Return what a replay returns, of a node for which is_steady holds."""

    def output(i: int, alias: Any, metadata: Any) -> Output:
        if i in node.returned_inputs:
            return Output("input", node.returned_inputs[i])
        if i in node.made_outputs:
            return Output("made", node.made_outputs[i])
        if not isinstance(metadata, dict):
            return Output("constant", metadata)
        if isinstance(alias, AliasesBoundMemory):
            return Output("bound", alias.index)
        return Output("cached", CachedTensor.of(metadata))

    return tuple(map(output, itertools.count(), node.output_storage_alias, node.outputs_metadata))
