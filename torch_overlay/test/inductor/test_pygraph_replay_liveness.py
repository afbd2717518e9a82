# Owner(s): ["module: inductor"]
"""
Which tensors of earlier calls and graphs have to be dead for a replay, and what becomes of those
that trees cache.
"""

from __future__ import annotations

import itertools
import types
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
from torch._dynamo.mutation_guard import GenerationTracker
from torch._inductor.cudagraph_trees import (
    CompilationMode,
    CUDAGraphNode,
    ExecutionState,
    MarkStepBox,
)
from torch._inductor.test_case import run_tests
from torch.testing._internal.pygraph_common import needs_compiled
from torch.testing._internal.pygraph_functions import Saves
from torch.testing._internal.pygraph_replay import (
    cached_ref,
    Compiled,
    Node,
    ReplayTestCase,
)


if TYPE_CHECKING:
    from collections.abc import Callable


class LivenessTest(ReplayTestCase):
    "By Python; CompiledLivenessTest runs the same by compiled code."

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

    def test_cached_tensor_that_was_changed(self):
        "In place, which trees make good."
        t, memory = self.node.saved, self.node.saved.data

        class Other(torch.Tensor):
            pass

        for change, undo in (
            (
                lambda: setattr(t, "data", memory.view(torch.int32)),
                lambda: setattr(t, "data", memory),
            ),
            (
                lambda: setattr(t, "data", torch._neg_view(memory)),
                lambda: setattr(t, "data", memory),
            ),
            (lambda: t.rename_("a"), lambda: t.rename_(None)),
            (lambda: setattr(t, "__class__", Other), lambda: setattr(t, "__class__", torch.Tensor)),
            (lambda: t.unsqueeze_(0), lambda: t.squeeze_(0)),
            (lambda: t.as_strided_((8,), (0,)), lambda: t.as_strided_((8,), (1,))),
            (lambda: setattr(t, "data", torch.zeros(8)), lambda: setattr(t, "data", memory)),
        ):
            self.assertTrue(self.call())
            change()
            self.assertFalse(self.call())
            undo()
        self.assertTrue(self.call())

    def test_cached_tensor_without_elements(self):
        node = self.node
        node.saved, node.output = torch.zeros(8)[4:4], torch.empty(8)
        node.launch = lambda: setattr(node, "launches", node.launches + 1)
        node.outputs_metadata[2] = CUDAGraphNode._tensor_metadata(
            node.saved, ignore_storage_offset=False
        )
        node.cache()
        self.replay = self.steady(CompilationMode.INFERENCE)
        for _ in range(2):
            outputs = self.replay([self.weight, torch.randn(8), 5])
            self.assertIs(outputs[2], node.saved)
        self.general.assert_not_called()

    def test_cached_tensor_that_was_used(self):
        "What the last call's had besides its memory."
        t, ran = self.node.saved, []
        for _ in range(3):
            self.assertTrue(self.call())
            self.assertEqual((t.requires_grad, t.grad, t.grad_fn), (False, None, None))
            self.assertIsNone(t._backward_hooks)
            self.assertEqual(t.__dict__, {})
            t.requires_grad_()
            t.register_hook(lambda grad: ran.append("hook"))
            t.register_post_accumulate_grad_hook(lambda t: ran.append("accumulated"))
            t.tag = 1
            (t * 2).sum().backward()
            self.assertEqual(t.grad, torch.full((8,), 2.0))
            self.assertEqual(ran, ["hook", "accumulated"])
            ran.clear()

    def test_attributes_that_a_finalizer_replaces(self):
        "Of a cached tensor: the dictionary is freed while what it had is let go of."
        t = self.node.saved

        class Tag:
            def __del__(self) -> None:
                t.__dict__ = {}
                # Takes memory that was freed.
                self.other = [dict.fromkeys(range(n), n) for n in range(20)]

        for _ in range(20):
            self.assertTrue(self.call())
            self.assertEqual(t.__dict__, {})
            for name in "abcdef":
                setattr(t, name, Tag())
        t.__dict__.clear()

    def test_cached_tensor_with_a_history(self):
        w = torch.ones(8, requires_grad=True)
        for _ in range(2):
            self.assertTrue(self.call())
            self.assertFalse(self.node.saved.requires_grad)
            self.node.saved.mul_(w).sum().backward()

    def test_pending_backwards(self):
        for mode, before, after in (
            (CompilationMode.INFERENCE, False, False),
            (CompilationMode.FORWARD, False, True),
            (CompilationMode.INFERENCE, True, True),
            (CompilationMode.BACKWARD, True, False),
        ):
            self.manager.running_forwards_with_pending_backwards = before
            self.replay = self.steady(mode)
            self.assertTrue(self.call())
            pending = self.manager.running_forwards_with_pending_backwards
            self.assertEqual(pending, after, (mode, before))

    def test_generation(self):
        "Of the call, whether Dynamo counts it or the program marks its steps."
        self.assertTrue(self.call())
        GenerationTracker.generation += 1
        self.assertTrue(self.manager.in_new_torch_compile_invocation())
        self.assertTrue(self.call())
        with mock.patch.object(MarkStepBox, "mark_step_counter", -7):
            self.assertTrue(self.manager.in_new_torch_compile_invocation())
            self.assertTrue(self.call())
            self.assertEqual(self.manager.current_gen, -7)

    def test_another_path_is_seen_while_it_is_asked_what_is_alive(self):
        replay, weight, manager = self.replay, self.weight, self.manager
        self.node.launch, self.node.output = lambda: None, torch.empty(8)
        asks: list[Callable[[], object]] = []

        class Dead:
            extra_ref_check = None

            def __call__(self) -> None:
                if asks:
                    asks.pop()()

        def run_after(outputs: int) -> list[Any]:
            last = types.SimpleNamespace(
                all_outputs_are_dead=lambda: True,
                live_indices_after_graph=[(0, i) for i in range(outputs)],
                cached_tensor_outputs=[None] * outputs,
                outputs_weakrefs=[Dead() for _ in range(outputs)],
            )
            last._path_from_root = [last]
            manager._current_node, manager.path_state = last, ExecutionState.EXECUTION
            return replay([weight, torch.randn(8), 5])

        asks.append(lambda: run_after(3))
        self.assertEqual(len(run_after(1000)), 5)

    def test_cached_tensors_are_dropped_by_a_finalizer(self):
        "Of what the program left on one, after the launch."
        node = self.node
        other = torch.zeros(8)
        node.outputs_metadata[3] = CUDAGraphNode._tensor_metadata(
            other, ignore_storage_offset=False
        )
        node.unaliased_in_all_paths[3] = True
        node.cached_tensor_outputs[3] = other
        replay = self.steady(CompilationMode.INFERENCE)
        node.launch, node.output = lambda: None, torch.empty(8)

        class Tag:
            def __del__(self) -> None:
                node.cached_tensor_outputs.clear()

        node.saved.tag = Tag()
        outputs = replay([self.weight, torch.randn(8), 5])
        self.assertIs(outputs[2], node.saved)
        self.assertIs(outputs[3], other)

    def test_input_in_the_pool(self):
        x = torch.ones(8)
        start = x.data_ptr()
        for bounds, steady in (
            ([start, start + 32], False),
            ([start - 32, start + 4], False),
            ([start - 32, start], True),
            ([start + 4, start + 32], True),
            ([16, 32, start, start + 32, start + 64, start + 96], False),
            ([16, 32, start + 64, start + 96], True),
        ):
            self.node.pool_ranges.bounds = bounds
            self.replay = self.steady(CompilationMode.INFERENCE)
            self.assertEqual(self.call(x), steady, bounds)

    def follow(self) -> list[Any]:
        """
        Makes the weight an activation, which the graph before this one left in the pool
        and which dies in this one. Returns what that graph caches.
        """
        cached = [self.weight]
        parent = types.SimpleNamespace(
            parent=None,
            cached_tensor_outputs=cached,
            outputs_weakrefs=[cached_ref(cached)],
            live_indices_after_graph=[(0, 0)],
        )
        node = self.node
        node._parent = lambda: parent
        node.non_managed_static_input_idxs = []
        node.cudagraph_managed_idxs = [0]
        node.preserved_aliased_inputs = [False] * 3
        node.expected_dead_indices_after_graph = [(0, 0)]
        node.weight, node.static_output_tensors = None, [None] * 5
        node.returned_inputs = {}
        node.outputs_metadata[4] = None
        node.restore_managed = lambda inputs: inputs.__setitem__(0, "restored")
        node.launch = lambda: setattr(node, "launches", node.launches + 1)
        node.output, self.weight = torch.empty(8), None
        self.parent = parent
        self.path(parent)
        self.replay = self.steady(CompilationMode.BACKWARD)
        return cached

    def path(self, last: Any, state: Any = ExecutionState.EXECUTION) -> None:
        self.manager.current_node = last
        self.manager.path_state = state

    def call_after(self, cached: list[Any]) -> bool:
        "Whether the call went the short way. Otherwise no input is missing."
        launches = self.node.launches
        inputs = [cached[0], torch.randn(8), 5]
        outputs = self.replay(inputs)
        if self.node.launches == launches:
            self.assertEqual(outputs, ["general"])
            self.assertIsNotNone(inputs[0])
            # It has them too.
            self.general.reset_mock()
            return False
        self.assertEqual(inputs, [])
        self.assertIs(self.manager.current_node, self.node)
        self.path(self.parent)
        return True

    def test_after_another_graph(self):
        cached = self.follow()
        for _ in range(3):
            self.assertTrue(self.call_after(cached))
        for last, state in (
            (None, ExecutionState.NONE),
            (self.node, ExecutionState.EXECUTION),
            (types.SimpleNamespace(live_indices_after_graph=[]), ExecutionState.EXECUTION),
            (self.parent, ExecutionState.RECORDING),
        ):
            self.path(last, state)
            self.assertFalse(self.call_after(cached), (last, state))
        self.path(self.parent)
        self.assertTrue(self.call_after(cached))

    def test_activation_that_is_held(self):
        "It is overwritten, or was expected to be dead, unless nobody else has it."
        holders = ("name", "view", "autograd", "uncached")
        for before, holder in itertools.product((False, True), holders):
            with self.subTest(holder=holder, before=before):
                self.weight = torch.randn(8)
                self.node = Node(self.weight)
                self.node.cache()
                self.check_held(holder, before)

    def check_held(self, holder: str, before: bool) -> None:
        cached = self.follow()
        if before:
            # It is no input here.
            other = torch.randn(8)
            self.parent.cached_tensor_outputs = [other]
            self.parent.outputs_weakrefs = [cached_ref(self.parent.cached_tensor_outputs)]
            self.node.expected_dead_indices_before_graph = [(0, 0)]
            self.node.expected_dead_indices_after_graph = []
            del other
            self.replay = self.steady(CompilationMode.BACKWARD)
        outputs = self.parent.cached_tensor_outputs
        self.assertTrue(self.call_after(cached))
        if holder == "name":
            held = outputs[0]
        elif holder == "view":
            held = outputs[0].detach()
        elif holder == "autograd":
            held = Saves.apply(torch.zeros(1, requires_grad=True), outputs)
        else:
            # A later graph returned it too: trees no longer cache it.
            self.parent.outputs_weakrefs[0].remove_extra_reference()
            held = None
        self.assertFalse(self.call_after(cached))
        del held
        if holder != "uncached":
            self.assertTrue(self.call_after(cached))

    def test_what_the_last_graph_left_dies(self):
        self.last(ExecutionState.EXECUTION, live=True)
        last = self.manager.current_node
        self.assertFalse(self.call())
        self.held = None
        self.assertTrue(self.call())
        self.manager.current_node = last
        self.held = last.cached_tensor_outputs[0].detach()
        self.assertFalse(self.call())

    def test_activation_that_moved(self):
        cached = self.follow()
        self.assertFalse(self.call_after([torch.randn(8)]))
        self.assertTrue(self.call_after(cached))

    def test_activations_that_are_no_longer_cached(self):
        cached = self.follow()
        activation = cached.pop()
        self.assertFalse(self.call_after([activation]))

    def test_node_that_refuses_after_inputs_are_gone(self):
        cached = self.follow()
        self.node.refuses = True
        self.assertFalse(self.call_after(cached))


@needs_compiled
class CompiledLivenessTest(Compiled, LivenessTest):
    pass


if __name__ == "__main__":
    run_tests()
