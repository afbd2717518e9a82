"""A recorded node whose graph is a function of what is bound, and the replay of it, for tests without a GPU."""

from __future__ import annotations

import ctypes
import sys
import types
from typing import Any
from unittest import mock

import torch
from torch._inductor import cudagraph_trees as trees
from torch._inductor.cudagraph_trees import (
    AliasesBoundMemory,
    CompilationMode,
    CUDAGraphNode,
    CUDAGraphTreeManager,
    ExecutionState,
    UnaliasedStorage,
)
from torch._inductor.pygraph import native
from torch._inductor.pygraph.capture import bound
from torch._inductor.pygraph.graph import memory
from torch._inductor.pygraph.graph.binding import Nodes, NodeUpdate, Word
from torch._inductor.pygraph.native import PythonTreeState, TreeState
from torch._inductor.pygraph.replay import interpreter
from torch._inductor.pygraph.replay.plan import replay_plan
from torch._inductor.pygraph.values.deliver import CapturedValues
from torch._inductor.test_case import TestCase


class Compiled:
    "Of a ReplayTestCase: replays by compiled code."

    replay_type = getattr(native.compiled, "Replay", None)
    tree_state = TreeState


class Graph:
    def __init__(self, node: Node) -> None:
        self.node = node

    def replay(self) -> None:
        self.node.launch()


def cached_ref(cached: list[torch.Tensor], i: int = 0) -> trees.StorageWeakRefWrapper:
    "As a node has it of an output that it caches, in a list."
    return trees.StorageWeakRefWrapper(
        cached[i],
        lambda: sys.getrefcount(cached[i]) == 2 and cached[i]._use_count() == 1,
    )


class Node(bound.BoundGraphNode):
    """
    Of a function (weight, x, 5) -> (x + weight, 5, a saved tensor, None, weight): weight is
    static, x is bound, and so is the first output.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.launches = 0
        # How often each bound tensor or word was set.
        self.sets: list[int] = []
        self.refuses = False
        self.replay_graph = types.CellType(None)
        self.weight = weight
        self._parent = None
        self.non_static_input_idx = []
        self.non_managed_static_input_idxs = [0]
        self.static_input_data_ptrs = [weight.data_ptr(), None, None]
        self.rerecord_if_static_inputs_change = True
        self.live_indices_after_graph = []
        self.request = types.SimpleNamespace(state=types.SimpleNamespace(outdated=types.CellType(False)))
        self.cudagraph_managed_idxs = []
        self.expected_dead_indices_before_graph = []
        self.expected_dead_indices_after_graph = []
        self.returned_from_pool = []
        self.returned_inputs = {4: 0}
        self.made_outputs = {}
        self.values = CapturedValues([], is_bound=True)
        self.bound_input_idxs = [1]
        self.alignment = 16
        self.saved = torch.zeros(8)
        self.output_storage_alias = [
            AliasesBoundMemory(1, 0, True),
            UnaliasedStorage,
            UnaliasedStorage,
            UnaliasedStorage,
            None,
        ]
        saved = CUDAGraphNode._tensor_metadata(self.saved, ignore_storage_offset=False)
        self.outputs_metadata = [{}, 5, saved, None, {}]
        self.static_output_tensors = [None, None, None, None, weight]
        self.unaliased_in_all_paths = [False, False, True, False, False]
        self.cached_tensor_outputs = []
        self.outputs_weakrefs = []
        self.allocators = [lambda: self.output]
        self.staged = []
        self.pool_ranges = memory.PoolRanges.__new__(memory.PoolRanges)
        self.pool_ranges.bounds = []
        self.written_bound = ()
        self.graph = Graph(self)
        self.binding = None

    def set(self, k: int) -> tuple[int]:
        self.sets.append(k)
        return (int(self.refuses),)

    def plan(self, manager: CUDAGraphTreeManager, mode: CompilationMode, owner: Any) -> Any:
        "Makes a graph with a node for each bound tensor and word, unless there is one."
        if self.binding is None:
            count = len(self.bound_input_idxs) + len(self.allocators)
            count += self.values.num_words
            updates = [
                NodeUpdate([Word(k, 0, ctypes.c_uint64())], self.set, (k,), None)
                for k in range(count)
            ]
            nodes = Nodes([-1] * count, updates, [[k] for k in range(count)])
            self.binding = types.SimpleNamespace(nodes=nodes)
        return replay_plan(self, manager, mode.name.lower(), owner)

    @property
    def pointers(self) -> list[int]:
        return self.binding.nodes.pointers

    def launch(self) -> None:
        self.launches += 1
        # What the graph was told, not what the call was given.
        x = next(t for t in self.inputs if t.data_ptr() == self.pointers[0])
        self.output.copy_(x + self.weight)
        self.saved.detach().copy_(x)

    def all_outputs_are_dead(self) -> bool:
        return True

    def cache(self) -> None:
        with mock.patch.object(
            CUDAGraphNode, "_initialize_cached_tensors", lambda self: None
        ):
            self._initialize_cached_tensors()
        self.cached_tensor_outputs[:] = [None, None, self.saved, None, None]

    def drop(self) -> None:
        with mock.patch.object(
            CUDAGraphNode, "remove_node_cached_tensors", lambda self: None
        ):
            self.remove_node_cached_tensors()
        self.cached_tensor_outputs.clear()


class ReplayTestCase(TestCase):
    "Replays the node of a function by Python, and counts its launches."

    replay_type: Any = interpreter.Replay
    tree_state: Any = PythonTreeState

    def setUp(self):
        super().setUp()
        self.capturing = False
        self.raw_stream = 1 << 40
        self.waits: list[int] = []
        self.owner = trees.thread_containers()
        patch = mock.patch.object(
            torch._C,
            "_cuda_isCurrentStreamCapturing",
            lambda: self.capturing,
            create=True,
        )
        patch.start()
        self.addCleanup(patch.stop)
        # Never the same object.
        self.state = self.tree_state(
            0, lambda index: int(str(self.raw_stream)), lambda: self.wait()
        )
        self.weight = torch.randn(8)
        self.node = Node(self.weight)
        self.node.cache()
        self.manager = CUDAGraphTreeManager.__new__(CUDAGraphTreeManager)
        self.manager.current_node = None
        self.manager.device_index = 0
        self.manager.running_forwards_with_pending_backwards = False
        self.general = mock.Mock(return_value=["general"])
        self.replay = self.steady(CompilationMode.INFERENCE)
        # Kept, so that each call's memory is another's.
        self.seen: list[torch.Tensor] = []

    def steady(self, mode: CompilationMode) -> Any:
        plan = self.node.plan(self.manager, mode, self.owner)
        return self.replay_type(plan, self.state, self.general)

    def wait(self) -> None:
        self.waits.append(self.raw_stream)

    def call(
        self, x: torch.Tensor | None = None, weight: torch.Tensor | None = None
    ) -> bool:
        "Whether the call went the short way; its outputs are checked."
        x = torch.randn(8) if x is None else x
        self.node.output = torch.empty(8)
        self.seen += [x, self.node.output]
        self.node.inputs = self.seen
        inputs = [self.weight if weight is None else weight, x, 5]
        launches = self.node.launches
        outputs = self.replay(inputs)
        if self.node.launches == launches:
            self.assertEqual(outputs, ["general"])
            self.general.assert_called_with(inputs)
            self.assertEqual(len(inputs), 3)
            return False
        self.assertEqual(inputs, [])
        self.assertEqual(outputs, [x + self.weight, 5, x, None, self.weight])
        self.assertIs(outputs[4], self.weight if weight is None else weight)
        self.assertIs(outputs[0], self.node.output)
        self.assertIs(outputs[2], self.node.saved)
        self.assertIs(self.manager.current_node, self.node)
        self.assertIs(self.manager.path_state, ExecutionState.EXECUTION)
        self.assertFalse(self.manager.in_new_torch_compile_invocation())
        return True

    def last(self, state: ExecutionState, live: bool) -> None:
        # One output, which the node caches.
        cached = [torch.randn(8)]
        self.held = cached[0] if live else None
        last = types.SimpleNamespace(
            all_outputs_are_dead=lambda: not live,
            live_indices_after_graph=[(0, 0)],
            cached_tensor_outputs=cached,
            outputs_weakrefs=[cached_ref(cached)],
        )
        last._path_from_root = [last]
        self.manager._current_node = last
        self.manager.path_state = state
