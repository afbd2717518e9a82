"""
The steady state of a recording.

Trees look for the recording that fits each call: they compare generations, try the
children of the last graph and then the roots, and rebuild every output from its metadata.
Where nothing of a path outlives it, the answer was known when it was recorded. What
is left is what can change from call to call, and any change goes to trees:

- the last path left something in the pool, or is not executed but recorded
- this node's cached tensors were dropped, as they are while something is recorded, or have
  another shape or other memory
- the function is to be recorded anew, since its gradients were held
- a static input moved
- a bound input is less aligned than the recording, or a conjugate that is not computed, as
  a tangent may be in one call and not in the next: no guard asks for that

Not asked again: whether a mutated input is bound and whether the function was warmed up,
which a recording implies; liveness and managed inputs, which a root does not have.

Compiled code (compiled_replay) also replays what follows another graph on its path, such as
a backward, if the last graph is the one that it was recorded after: managed inputs have to
lie where they lay, and what was dead has to be dead, before and after the inputs are let go.
A new generation does not end the path here: trees try the children first too. Where several
recordings would do, any of them is right.
"""

from __future__ import annotations

import functools
import itertools
import operator
from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo.mutation_guard import GenerationTracker
from torch._inductor import config, cudagraph_trees
from torch._inductor.cudagraph_trees import (
    AliasesBoundMemory,
    CompilationMode,
    ExecutionState,
    MarkStepBox,
    thread_containers,
)
from torch._inductor.pygraph import native
from torch._inductor.pygraph.trees.cached import caches_are_whole, is_lazy, renew
from torch._inductor.pygraph.trees.threads import lock_of, stream_order_of
from torch._inductor.utils import GPU_ALIGN_BYTES


if TYPE_CHECKING:
    from torch._inductor.cudagraph_trees import (
        CUDAGraphNode,
        CUDAGraphTreeManager,
        PathOutputIndex,
    )
    from torch._inductor.cudagraph_utils import ModelType, OutputType
    from torch._inductor.pygraph.capture.bound import BoundGraphNode
    from torch._inductor.pygraph.select.controller import Controller
    from torch._inductor.utils import InputType


def is_steady(node: BoundGraphNode) -> bool:
    """
    Whether all that a replay needs is known: the node copies nothing, and each of its
    outputs is bound memory, a tensor that the node caches, a static input, or no tensor.
    """
    return (
        not node.non_static_input_idx
        and not node.returned_from_pool
        and node.rerecord_if_static_inputs_change
        and not config.triton.fast_path_cudagraph_asserts
        and not config.triton.force_cudagraph_sync
        and all(
            not isinstance(metadata, dict)
            or (isinstance(alias, AliasesBoundMemory) and alias.is_whole)
            or is_cached
            or static is not None
            for alias, metadata, is_cached, static in zip(
                node.output_storage_alias,
                node.outputs_metadata,
                node.unaliased_in_all_paths,
                node.static_output_tensors,
            )
        )
    )


def constant_outputs(node: BoundGraphNode) -> list[tuple[int, Any]]:
    "(place, value) of the outputs that are the same in each call: numbers, views of weights."
    return [
        (i, metadata if isinstance(metadata, int) else static)
        for i, (metadata, static) in enumerate(
            zip(node.outputs_metadata, node.static_output_tensors)
        )
        if isinstance(metadata, int)
        or (
            static is not None
            and i not in node.returned_inputs
            and i not in node.empty_outputs
        )
    ]


# What running a function of a mode sets running_forwards_with_pending_backwards to.
PENDING_BACKWARDS = {
    CompilationMode.FORWARD: True,
    CompilationMode.BACKWARD: False,
    CompilationMode.INFERENCE: None,
}


def steady_replay(
    node: BoundGraphNode,
    manager: CUDAGraphTreeManager,
    mode: CompilationMode,
    general: ModelType,
) -> ModelType:
    """
    What to call instead of ``general``, which runs trees.

    The caller sees to it that the thread is the one that recorded, and to the stream.
    """
    bound_idxs = node.bound_input_idxs
    static_idxs = node.non_managed_static_input_idxs
    static_pointers = node.static_input_data_ptrs
    allocators = node.allocators
    binding = node.binding
    alignment = max(node.alignment, GPU_ALIGN_BYTES)
    cached_idxs = [
        i for i, is_cached in enumerate(node.unaliased_in_all_paths) if is_cached
    ]
    # Outputs that the node does not cache.
    from_bound = [
        (i, alias.index)
        for i, alias in enumerate(node.output_storage_alias)
        if isinstance(alias, AliasesBoundMemory)
    ]
    constants = constant_outputs(node)
    returned_inputs = [*node.returned_inputs.items()]
    empty_outputs = [*node.empty_outputs.items()]
    pending = PENDING_BACKWARDS[mode]
    values = node.values
    delivers_values = values.num_words > 0
    pointers_equal = torch._C._tensors_data_ptrs_at_indices_equal

    def replay(inputs: list[InputType]) -> OutputType:
        last = manager._current_node
        if last is not None and (
            manager.path_state is not ExecutionState.EXECUTION
            or not last.all_outputs_are_dead()
        ):
            return general(inputs)
        if node.wrapped_function.pygraph.state.is_outdated:
            return general(inputs)
        if not node.is_steady or not pointers_equal(
            inputs,  # type: ignore[arg-type]
            static_pointers,
            static_idxs,
        ):
            return general(inputs)
        if not caches_are_whole(node):
            return general(inputs)
        tensors: list[torch.Tensor] = [inputs[i] for i in bound_idxs]  # type: ignore[misc]
        pointers = [t.data_ptr() for t in tensors]
        if functools.reduce(operator.or_, pointers, 0) % alignment:
            return general(inputs)
        if any(map(is_lazy, tensors)):
            return general(inputs)
        # Before the allocations, where the collector may run what packs others.
        words = values.words() if delivers_values else []
        for allocate in allocators:
            tensors.append(t := allocate())
            pointers.append(t.data_ptr())
        pointers += words
        if pointers != binding.pointers:
            node.move(tensors, pointers)
        if last is not node:
            manager.current_node = node
            manager.path_state = ExecutionState.EXECUTION
        manager.update_generation()
        node.run_graph()
        if pending is not None:
            manager.running_forwards_with_pending_backwards = pending
        outputs: OutputType = node.cached_tensor_outputs.copy()
        for i in cached_idxs:
            renew(outputs[i])  # type: ignore[arg-type]
        for i, k in from_bound:
            outputs[i] = tensors[k]
        for i, constant in constants:
            outputs[i] = constant
        for i, k in returned_inputs:
            outputs[i] = inputs[k]  # type: ignore[call-overload]
        for i, allocate in empty_outputs:
            outputs[i] = allocate()
        inputs.clear()
        return outputs

    return replay


def path_outputs(
    node: CUDAGraphNode, indices: list[PathOutputIndex]
) -> list[tuple[list[Any], list[Any], int]]:
    "For each (depth, index), what the node there keeps of its outputs, and the index."
    path = list(node._path_from_root)
    return [
        (path[depth].outputs_weakrefs, path[depth].cached_tensor_outputs, i)
        for depth, i in indices
    ]


def live_outputs(node: CUDAGraphNode) -> list[tuple[list[Any], list[Any], int]]:
    "path_outputs of those that all_outputs_are_dead looks at."
    return path_outputs(node, node.live_indices_after_graph)


def compiled_replay(
    node: BoundGraphNode,
    manager: CUDAGraphTreeManager,
    mode: CompilationMode,
    general: ModelType,
    owner: object,
) -> ModelType:
    """
    The same as one call of native.compiled. Unlike steady_replay it sees to the thread
    itself, whose containers have to be ``owner``, to captures of the program, to the lock,
    and to the stream. Calls ``general`` too where an input lies in the graphs' pool, where
    another thread has the lock, and where a node refused, to find out what to do about it.

    Of the nodes of a function on one path it has to be the first; see Function.may_run.
    """
    static_pointers = node.static_input_data_ptrs
    static_idxs = [*node.non_managed_static_input_idxs, *node.cudagraph_managed_idxs]
    constants = dict(constant_outputs(node))

    def described(i: int, alias: Any, metadata: Any) -> tuple[str, Any]:
        "An output's kind, one of replay.cpp's, and which one it is."
        if i in constants:
            return "constant", constants[i]
        if i in node.returned_inputs:
            return "input", node.returned_inputs[i]
        if i in node.empty_outputs:
            return "empty", node.empty_outputs[i]
        if isinstance(alias, AliasesBoundMemory):
            return "bound", alias.index
        if metadata is None:
            return "constant", None
        offset = metadata["storage_offset"] * metadata["dtype"].itemsize
        # A tensor without elements says that it lies nowhere.
        address = 0 if 0 in metadata["size"] else metadata["data_ptr"] + offset
        recorded = metadata["size"], metadata["stride"], metadata["dtype"]
        return "cached", (address, *recorded)

    # What torch.cuda.CUDAGraph's methods forward to.
    graph_type = torch._C._CUDAGraph
    if not isinstance(node.graph, graph_type):
        graph_type = type(node.graph)  # type: ignore[assignment]
    binding = node.binding
    nodes = getattr(binding, "nodes", None)
    lock = lock_of(manager)
    return native.compiled.Replay(
        general=general,
        node=node,
        manager=manager,
        executing=ExecutionState.EXECUTION,
        mark_step=MarkStepBox,
        tracker=GenerationTracker,
        pending=PENDING_BACKWARDS[mode],
        local=cudagraph_trees.local,
        owner=owner,
        containers=thread_containers,
        acquire=lock.acquire,
        release=lock.release,
        stream_order=stream_order_of(manager),
        current_stream=torch._C._cuda_getCurrentRawStream,
        device_index=manager.device_index,
        is_capturing=torch._C._cuda_isCurrentStreamCapturing,
        launch=graph_type.replay,
        binding=nodes if isinstance(nodes, native.compiled.Nodes) else binding,
        values=node.values.words_for_replay(),
        static=[(i, static_pointers[i]) for i in static_idxs],
        bound=node.bound_input_idxs,
        alignment=max(node.alignment, GPU_ALIGN_BYTES),
        parent=node.parent,
        restore=node.restore_managed,
        dropped=[
            i
            for i in node.cudagraph_managed_idxs
            if not node.preserved_aliased_inputs[i]
        ],
        function=node.wrapped_function.pygraph.state,
        live_outputs=live_outputs,
        dead_before=path_outputs(node, node.expected_dead_indices_before_graph),
        dead_after=path_outputs(node, node.expected_dead_indices_after_graph),
        pool=node.pool_ranges.bounds,
        allocators=node.allocators,
        outputs=list(
            map(
                described,
                itertools.count(),
                node.output_storage_alias,
                node.outputs_metadata,
            )
        ),
    )


# Recordings of one function that compiled code replays: as many are tried at most before
# trees are.
MAX_COMPILED = 32


class CompiledReplays:
    """
    The recordings of one function that compiled code replays, a chain: each leaves to the
    next one what it was not recorded for, and the last one leaves it to ``general``.
    """

    def __init__(
        self,
        function: Controller,
        manager: CUDAGraphTreeManager,
        mode: CompilationMode,
        owner: object,
    ) -> None:
        self.function = function
        self.manager = manager
        self.mode = mode
        self.owner = owner
        # (recording, what replays it)
        self.replays: list[tuple[BoundGraphNode, Any]] = []

    def add(self, general: ModelType) -> ModelType | None:
        """
        Adds the recording that trees ran last, unless it is known, in place of those that
        were dropped. Returns what replays the first one if that is another now, else None.
        """
        node: Any = self.manager._current_node
        before = self.replays
        if native.compiled is None or any(node is known for known, _ in before):
            return None
        recorded = [(n, r) for n, r in before if n.graph is not None]
        if (
            len(recorded) == MAX_COMPILED
            or not self.function.binds_inputs
            or not isinstance(node, self.function.node_type())
            or [n.wrapped_function.pygraph for n in node._path_to_root].count(
                self.function
            )
            != 1
            or node.wrapped_function.pygraph is not self.function
        ):
            return None
        added = compiled_replay(node, self.manager, self.mode, general, self.owner)
        self.replays = [*recorded, (node, added)]
        for (_, replay), (_, following) in itertools.pairwise(self.replays):
            replay.general = following
        _, first = self.replays[0]
        return None if before and first is before[0][1] else first
