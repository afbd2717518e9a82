# Owner(s): ["module: inductor"]
"""
The steady replay of a recording, on a machine that need not have a GPU: the graph is a
function of what is bound, and trees' part is looked at from outside.
"""

from __future__ import annotations

import types
from typing import Any
from unittest import mock

import torch
from torch._inductor import config
from torch._inductor.cudagraph_trees import (
    AliasesBoundMemory,
    AliasesNewOutput,
    CompilationMode,
    CUDAGraphNode,
    ExecutionState,
    UnaliasedStorage,
)
from torch._inductor.pygraph import record
from torch._inductor.pygraph.deliver import CapturedValues, Deliver
from torch._inductor.pygraph.replay import is_steady, steady_replay
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)


class Node(record.BoundGraphNode):
    """
    Of a function (weight, x, 5) -> (x + weight, 5, a saved tensor, None, weight): weight is
    static, x is bound, and so is the first output.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.launches = 0
        self.weight = weight
        self._parent = None
        self.non_static_input_idx = []
        self.non_managed_static_input_idxs = [0]
        self.static_input_data_ptrs = [weight.data_ptr(), None, None]
        self.rerecord_if_static_inputs_change = True
        self.returned_from_pool = []
        self.values = CapturedValues(is_bound=True)
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
        self.outputs_metadata = [{}, 5, {}, None, {}]
        self.static_output_tensors = [None, None, None, None, weight]
        self.unaliased_in_all_paths = [False, False, True, False, False]
        self.cached_tensor_outputs = []
        self.outputs_weakrefs = []
        self.allocators = [lambda: self.output]
        self.staged = []
        self.pool_ranges = range(0)
        self.mutated_bound = ()
        self.graph = types.SimpleNamespace(replay=self.launch)
        self.binding = mock.Mock(pointers=[-1, -1])
        self.binding.update.side_effect = lambda pointers: setattr(
            self.binding, "pointers", list(pointers)
        )

    def launch(self) -> None:
        self.launches += 1
        # What the graph was told, not what the call was given.
        x = next(t for t in self.inputs if t.data_ptr() == self.binding.pointers[0])
        self.output.copy_(x + self.weight)
        self.saved.copy_(x)

    def all_outputs_are_dead(self) -> bool:
        return True

    def cache(self) -> None:
        with mock.patch.object(
            CUDAGraphNode, "_initialize_cached_tensors", lambda self: None
        ):
            self._initialize_cached_tensors()
        self.cached_tensor_outputs = [None, None, self.saved, None, None]

    def drop(self) -> None:
        with mock.patch.object(
            CUDAGraphNode, "remove_node_cached_tensors", lambda self: None
        ):
            self.remove_node_cached_tensors()
        self.cached_tensor_outputs = []


class ReplayTest(TestCase):
    def setUp(self):
        super().setUp()
        self.weight = torch.randn(8)
        self.node = Node(self.weight)
        self.node.cache()
        self.manager = mock.Mock(path_state=ExecutionState.NONE, _current_node=None)
        self.manager.running_forwards_with_pending_backwards = False
        self.general = mock.Mock(return_value=["general"])
        self.replay = self.steady(CompilationMode.INFERENCE)
        # Kept, so that each call's memory is another's.
        self.seen: list[torch.Tensor] = []

    def steady(self, mode: CompilationMode) -> Any:
        return steady_replay(self.node, self.manager, mode, self.general)

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
        self.assertIs(outputs[4], self.weight)
        self.assertIs(outputs[0], self.node.output)
        self.assertIs(outputs[2], self.node.saved)
        self.assertIs(self.manager.current_node, self.node)
        self.assertIs(self.manager.path_state, ExecutionState.EXECUTION)
        self.manager.update_generation.assert_called_once_with()
        self.manager.update_generation.reset_mock()
        return True

    def last(self, state: ExecutionState, live: bool) -> None:
        self.manager._current_node = types.SimpleNamespace(
            all_outputs_are_dead=lambda: not live
        )
        self.manager.path_state = state

    def test_steady(self):
        for _ in range(3):
            self.assertTrue(self.call())
        self.general.assert_not_called()

    def test_same_pointers_need_no_update(self):
        x, y = torch.randn(8), torch.empty(8)
        self.node.allocators[0] = lambda: y
        replay = self.steady(CompilationMode.INFERENCE)
        self.node.inputs, self.node.output = [x], y
        for _ in range(3):
            replay([self.weight, x, 5])
        self.node.binding.update.assert_called_once()

    def test_values_of_the_call(self):
        "Words of CPU tensors follow the pointers."
        value = Deliver(0, (torch.int64, ()))
        self.node.values.tokens(value)
        x, y = torch.randn(8), torch.empty(8)
        self.node.allocators[0] = lambda: y
        replay = self.steady(CompilationMode.INFERENCE)
        self.node.inputs, self.node.output = [x], y
        for n in (5, 6, 6, 7):
            value.packed().words[0] = n
            replay([self.weight, x, 5])
            pointers = [x.data_ptr(), y.data_ptr(), n, 0]
            self.node.binding.update.assert_called_with(pointers)
        self.assertEqual(self.node.binding.update.call_count, 3)

    def test_last_path(self):
        for state, live, steady in (
            (ExecutionState.EXECUTION, False, True),
            (ExecutionState.EXECUTION, True, False),
            (ExecutionState.RECORDING, False, False),
            (ExecutionState.WARMUP, False, False),
        ):
            self.last(state, live)
            self.assertEqual(self.call(), steady, (state, live))

    def test_dropped_tensors(self):
        self.node.drop()
        self.assertFalse(self.call())
        self.node.cache()
        self.assertTrue(self.call())

    def test_output_that_a_later_graph_aliases(self):
        "Trees no longer cache it, once tensors are cached again."
        self.node.drop()
        self.node.unaliased_in_all_paths[2] = False
        self.node.cache()
        self.assertFalse(self.call())

    def test_static_input_moved(self):
        self.assertFalse(self.call(weight=self.weight.clone()))
        self.assertTrue(self.call())

    @parametrize("alignment", (4, 16, 64))
    def test_alignment(self, alignment):
        "A kernel compiled for 16 bytes never gets less."
        self.node.alignment = alignment
        self.replay = self.steady(CompilationMode.INFERENCE)
        memory = torch.zeros(256)
        start = -memory.data_ptr() % 256 // 4
        for offset in (0, 4, 16, 32, 64):
            x = memory[start + offset // 4 :][:8]
            self.assertEqual(self.call(x), offset % max(alignment, 16) == 0, offset)

    def test_staged_input(self):
        "It lies where the graph writes; what is written to the copy is written back."
        x = torch.ones(8)
        self.node.pool_ranges = (x.data_ptr(),)
        self.node.mutated_bound = (0,)

        def update(pointers):
            self.assertNotEqual(pointers[0], x.data_ptr())
            ((_, _, staged),) = self.node.staged
            self.assertEqual((pointers[0], staged), (staged.data_ptr(), x))
            self.node.inputs.append(staged)
            staged.add_(1)
            self.node.binding.pointers = list(pointers)

        self.node.binding.update.side_effect = update
        self.assertTrue(self.call(x))
        self.assertEqual(x, torch.full((8,), 2.0))
        self.assertEqual(self.node.staged, [])

    def test_forward_is_pending(self):
        self.replay = self.steady(CompilationMode.FORWARD)
        self.assertTrue(self.call())
        self.assertTrue(self.manager.running_forwards_with_pending_backwards)

    def test_inference_is_not(self):
        self.assertTrue(self.call())
        self.assertFalse(self.manager.running_forwards_with_pending_backwards)

    def test_what_is_not_steady(self):
        self.assertTrue(is_steady(self.node))
        aliases = self.node.output_storage_alias
        for changes in (
            {"_parent": lambda: self.node},
            {"non_static_input_idx": [2]},
            {"returned_from_pool": [[2]]},
            {"rerecord_if_static_inputs_change": False},
            {"static_output_tensors": [None] * 5},
            {"output_storage_alias": [AliasesBoundMemory(1, 4, False), *aliases[1:]]},
            {
                "output_storage_alias": [
                    *aliases[:2],
                    AliasesNewOutput(0),
                    *aliases[3:],
                ],
                "unaliased_in_all_paths": [False] * 5,
            },
        ):
            with mock.patch.multiple(self.node, **changes):
                self.assertFalse(is_steady(self.node), changes)
        for name in ("fast_path_cudagraph_asserts", "force_cudagraph_sync"):
            with config.patch({f"triton.{name}": True}):
                self.assertFalse(is_steady(self.node), name)


instantiate_parametrized_tests(ReplayTest)


if __name__ == "__main__":
    run_tests()
