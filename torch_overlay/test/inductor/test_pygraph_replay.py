# Owner(s): ["module: inductor"]
"""
The replay of a recording by its plan, on a machine that need not have a GPU: the graph is a
function of what is bound, and trees' part is looked at from outside.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import functools
import gc
import itertools
import sys
import threading
import types
import unittest
import weakref
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
import torch._dynamo.testing
from torch._dynamo.mutation_guard import GenerationTracker
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd import runtime_wrappers
from torch._inductor import config, cudagraph_trees as trees
from torch._inductor.compile_fx import compile_fx
from torch._inductor.cudagraph_trees import (
    AliasesBoundMemory,
    AliasesNewOutput,
    CompilationMode,
    CUDAGraphNode,
    CUDAGraphTreeManager,
    ExecutionState,
    MarkStepBox,
    UnaliasedStorage,
)
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.pygraph import native
from torch._inductor.pygraph.capture import bound
from torch._inductor.pygraph.capture.allocation import empty_strided_cuda
from torch._inductor.pygraph.graph import memory
from torch._inductor.pygraph.graph.binding import Nodes, NodeUpdate, Word
from torch._inductor.pygraph.native import PythonTreeState, TreeState
from torch._inductor.pygraph.replay import interpreter, plan as replay_plan_module
from torch._inductor.pygraph.replay.plan import replay_plan
from torch._inductor.pygraph.trees.cached import is_steady
from torch._inductor.pygraph.trees.manager import without_trees
from torch._inductor.pygraph.types.partition import DirectCall, GraphInfo
from torch._inductor.pygraph.values import deliver
from torch._inductor.pygraph.values.deliver import CapturedValues, Deliver
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)


if TYPE_CHECKING:
    from collections.abc import Callable


class Saves(torch.autograd.Function):
    "Holds tensors as a forward does its activations: by C++ alone."

    @staticmethod
    def forward(ctx, leaf, activations):
        ctx.save_for_backward(*activations)
        return leaf.clone()

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError


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
        self.request = types.SimpleNamespace(outdated=types.CellType(False))
        self.cudagraph_managed_idxs = []
        self.expected_dead_indices_before_graph = []
        self.expected_dead_indices_after_graph = []
        self.returned_from_pool = []
        self.returned_inputs = {4: 0}
        self.empty_outputs = {}
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


class ReplayTest(TestCase):
    "By Python; CompiledReplayTest runs the same by compiled code."

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
        self.assertEqual(self.node.sets, [0, 1])

    def test_values_of_the_call(self):
        "Words of CPU tensors follow the pointers."
        value = Deliver(0, (torch.int64, ()))
        self.node.values.tokens(value)
        value.packed().target = object()
        self.node.binding = None
        x, y = torch.randn(8), torch.empty(8)
        self.node.allocators[0] = lambda: y
        replay = self.steady(CompilationMode.INFERENCE)
        self.node.inputs, self.node.output = [x], y
        for n, sets in ((5, [0, 1, 2, 3]), (6, [2]), (6, []), (7, [2])):
            self.node.sets.clear()
            value.pack([torch.tensor(n)])
            replay([self.weight, x, 5])
            self.assertEqual(self.node.pointers, [x.data_ptr(), y.data_ptr(), n, 0])
            self.assertEqual(self.node.sets, sets)

    def test_last_path(self):
        for state, live, steady in (
            (ExecutionState.EXECUTION, False, True),
            (ExecutionState.EXECUTION, True, False),
            (ExecutionState.RECORDING, False, False),
            (ExecutionState.WARMUP, False, False),
        ):
            self.last(state, live)
            self.assertEqual(self.call(), steady, (state, live))

    def test_outdated_function(self):
        outdated = self.node.request.outdated
        outdated.cell_contents = True
        self.assertFalse(self.call())
        outdated.cell_contents = False
        self.assertTrue(self.call())

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

    def test_static_input_that_is_another_object(self):
        "It is returned itself, not what had its memory when it was recorded."
        for _ in range(2):
            self.assertTrue(self.call(weight=self.weight.detach()))

    def test_output_without_elements(self):
        self.node.outputs_metadata[3] = {"size": (0,)}
        self.node.static_output_tensors[3] = torch.empty(0)
        self.node.empty_outputs = {3: lambda: torch.empty(0, 3)}
        replay = self.steady(CompilationMode.INFERENCE)
        made = []
        for _ in range(2):
            self.node.output, x = torch.empty(8), torch.randn(8)
            self.node.inputs = [*self.seen, x]
            self.seen += [x, self.node.output]
            made.append(replay([self.weight, x, 5])[3])
            self.assertEqual(made[-1].shape, (0, 3))
        self.assertIsNot(made[0], made[1])

    def test_conjugate(self):
        for x in (torch.randn(8, dtype=torch.complex64), torch.randn(16)[::2]):
            lazy = x.conj() if x.is_complex() else torch._neg_view(x)
            self.assertFalse(self.call(lazy))

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
        """
        It lies where the graph writes. Trees give the graph a copy; what is written to the
        copy is written back.
        """
        x = torch.ones(8)
        self.node.pool_ranges.bounds = [x.data_ptr(), x.data_ptr() + x.nbytes]
        self.replay = self.steady(CompilationMode.INFERENCE)
        self.assertFalse(self.call(x))
        self.node.written_bound = (0,)
        copies: list[torch.Tensor] = []

        def clone(t):
            copies.append(t.clone())
            return copies[-1]

        def update(pointers):
            self.assertNotEqual(pointers[0], x.data_ptr())
            (staged,) = copies
            self.assertEqual((pointers[0], staged), (staged.data_ptr(), x))
            self.node.inputs.append(staged)
            staged.add_(1)
            self.node.binding.nodes.pointers = list(pointers)

        self.node.binding.update = update
        self.node.output = torch.empty(8)
        tensors = [x, self.node.output]
        with mock.patch.object(bound, "clone_preserve_strides", clone):
            self.node.move(tensors, [t.data_ptr() for t in tensors])
        self.node.run_graph()
        self.assertEqual(x, torch.full((8,), 2.0))
        self.assertEqual(self.node.output, x + self.weight)
        self.assertEqual(self.node.staged, [])

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

    def test_what_is_not_steady(self):
        self.assertTrue(is_steady(self.node))
        aliases = self.node.output_storage_alias
        for changes in (
            {"non_static_input_idx": [2]},
            {"returned_from_pool": [[(2, 2)]]},
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

    def test_replaced_in_the_chain_while_it_runs(self):
        "As ReplayChain.add does."
        other = type(self)("test_steady")
        other.setUp()
        self.addCleanup(other.doCleanups)
        self.replay.general, other.replay = other.replay, None

        def launch() -> None:
            other.node.launches += 1
            self.replay.general = self.general
            gc.collect()

        other.node.launch = launch
        x, other.node.output = torch.randn(8), torch.empty(8)
        outputs = self.replay([other.weight, x, 5])
        self.assertEqual(other.node.launches, 1)
        self.assertIs(outputs[0], other.node.output)
        self.assertIs(outputs[4], other.weight)

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

    def test_node_of_python_that_refuses(self):
        self.node.refuses = True
        self.assertFalse(self.call())
        self.assertIsNone(self.manager.current_node)
        self.assertEqual(self.node.pointers, [-1, -1])
        self.node.refuses = False
        self.assertTrue(self.call())

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

    def test_capture_of_the_program(self):
        self.capturing = True
        self.assertFalse(self.call())
        self.capturing = False
        self.assertTrue(self.call())

    def test_another_stream(self):
        "It waits for the last one before the launch, and before all that it writes."
        followed = []
        self.wait = lambda: followed.append((self.raw_stream, self.node.launches))
        for stream in (1 << 40, 1 << 40, 0, 0, 1 << 40, 1 << 40):
            self.raw_stream = stream
            self.assertTrue(self.call())
        self.assertEqual(followed, [(1 << 40, 0), (0, 2), (1 << 40, 4)])
        self.raw_stream = 7
        self.wait = mock.Mock(side_effect=RuntimeError("the device is gone"))
        for _ in range(2):
            with self.assertRaisesRegex(RuntimeError, "the device is gone"):
                self.call()
        self.assertEqual(self.node.launches, 6)
        self.assertEqual(self.state.raw_stream, 1 << 40)
        # Nobody has the lock.
        self.assertTrue(self.state.acquire())

    def test_another_call_has_the_lock(self):
        self.assertTrue(self.state.acquire())
        self.assertFalse(self.state.acquire())
        self.assertFalse(self.call())
        self.state.release()
        self.assertTrue(self.call())

    def share_containers(self) -> None:
        "With this thread, as autograd does. It lets go of them in the end."
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.owner))
        torch._C._stash_obj_in_tls("tree_manager_containers", self.owner)

    def test_thread(self):
        "Of autograd, which has the containers of the one that recorded; any other."
        steady = []

        def call(knows_containers: bool) -> None:
            if knows_containers:
                self.share_containers()
            steady.append(self.call())

        for knows_containers in (True, False):
            thread = threading.Thread(target=call, args=(knows_containers,))
            thread.start()
            thread.join()
        self.assertEqual(steady, [True, False])
        self.owner = {}
        self.replay = self.steady(CompilationMode.INFERENCE)
        self.assertFalse(self.call())

    def test_thread_that_records(self):
        "What it calls meanwhile, on another device for one, is not replayed."
        for _ in range(2):
            with without_trees():
                self.assertFalse(self.call())
            self.assertTrue(self.call())

    def test_inputs_that_are_none(self):
        for inputs in ([], [self.weight], [self.weight, None, 5], (self.weight, None, 5)):
            self.assertEqual(self.replay(inputs), ["general"])
        self.assertEqual(self.general.call_count, 4)

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

    def test_errors_of_the_launch(self):
        "They are the program's, as any other of the device."

        def fail() -> None:
            raise RuntimeError("the device is gone")

        self.node.launch = fail
        with self.assertRaisesRegex(RuntimeError, "the device is gone"):
            self.call()


instantiate_parametrized_tests(ReplayTest)


@unittest.skipIf(native.compiled is None, "requires _replay")
class CompiledReplayTest(ReplayTest):
    "With the nodes in Python, and in ``compiled_nodes`` compiled as well."

    replay_type = getattr(native.compiled, "Replay", None)
    tree_state = TreeState

    def compiled_nodes(self) -> None:
        """
        One node of x and one of the output. ``refuses`` says what setting one does,
        ``sets`` which were set.
        """
        self.words = [ctypes.c_uint64(1), ctypes.c_uint64(2)]
        self.sets: list[int] = []
        self.refuses = False

        def set_node(executable: int, node: int, params: int) -> int:
            self.sets.append(node)
            return self.refuses

        function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3)(set_node)
        address = ctypes.cast(function, ctypes.c_void_p).value
        nodes = [
            (address, 8, 10 + k, 9, None, [(ctypes.addressof(w), k, 16 * k)])
            for k, w in enumerate(self.words)
        ]
        compiled = native.compiled.Nodes([1, 2], nodes, function)  # keeps the function
        self.node.binding = types.SimpleNamespace(nodes=compiled)
        self.replay = self.steady(CompilationMode.INFERENCE)

    def launch(self, x: torch.Tensor) -> bool:
        self.node.launch = lambda: setattr(self.node, "launches", 1)
        self.node.launches = 0
        self.replay([self.weight, x, 5])
        return self.node.launches == 1

    def test_nodes_that_are_set(self):
        self.compiled_nodes()
        x, y, self.node.output = (torch.empty(8) for _ in range(3))
        for given, sets in ((x, [10, 11]), (x, []), (y, [10]), (y, []), (x, [10])):
            self.sets.clear()
            self.assertTrue(self.launch(given))
            self.assertEqual(self.sets, sets)
            held = [w.value for w in self.words]
            to = [given.data_ptr(), self.node.output.data_ptr()]
            self.assertEqual(self.node.pointers, to)
            self.assertEqual(held, [to[0], to[1] + 16])
        self.general.assert_not_called()

    def test_node_that_refuses(self):
        "Nothing is launched, and what the graph holds counts as unknown."
        self.compiled_nodes()
        x, self.node.output = torch.empty(8), torch.empty(8)
        self.refuses = True
        self.assertFalse(self.launch(x))
        self.general.assert_called_once()
        self.assertIsNone(self.manager.current_node)
        self.assertEqual(self.node.pointers, [-1, -1])
        self.refuses = False
        self.sets.clear()
        self.assertTrue(self.launch(x))
        self.assertEqual(self.sets, [10, 11])

    def test_thread_of_autograd_is_known_at_once(self):
        "Python's object of the thread has nothing there, and would take an exception to say so."
        steady = []

        def call() -> None:
            self.share_containers()
            steady.append(self.call())

        asked = mock.Mock(side_effect=AssertionError("asked"))
        with mock.patch.object(replay_plan_module, "thread_containers", asked):
            self.replay = self.steady(CompilationMode.INFERENCE)
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        self.assertEqual(steady, [True])

    def test_errors_of_an_allocator(self):
        "They are those of generated code's: of OutOfMemoryError's type, and without C++'s frames."
        like = (1 << 50,), (1,), torch.float32
        found = []
        for allocate in (
            native.compiled.Allocator(*like, 0),
            functools.partial(empty_strided_cuda, *like),
        ):
            with self.assertRaises(RuntimeError) as raised:
                allocate()
            has_frames = "Exception raised from" in str(raised.exception)
            found.append((type(raised.exception), has_frames))
        self.assertEqual(*found)

    def test_nothing_is_leaked(self):
        self.compiled_nodes()
        self.node.launch = lambda: None
        constant = self.weight
        x, self.node.output = torch.empty(8), torch.empty(8)
        objects = [constant, x, self.node.output, self.node.saved, self.node]

        def counts() -> list[int]:
            return [sys.getrefcount(o) for o in objects]

        for _ in range(2):
            self.replay([self.weight, x, 5])
        before = counts()
        for _ in range(10):
            self.replay([self.weight, x, 5])
        self.assertEqual(counts(), before)
        self.capturing = True
        for _ in range(10):
            self.replay([self.weight, x, 5])
        self.general.reset_mock()
        self.assertEqual(counts(), before)
        replay_ref = weakref.ref(self.node)
        cycle = [self.replay]
        cycle.append(cycle)
        self.general.cycle = cycle
        objects.clear()
        del cycle
        self.replay = self.node = self.manager = self.general = None
        gc.collect()
        self.assertIsNone(replay_ref())


class IdleWrappersTest(TestCase):
    """
    AOTAutograd's runtime wrappers: with pygraph they are not made where they would have
    nothing to do.
    """

    def check(self, fn: Any, idle: bool, *args: Any) -> None:
        "``idle`` says whether a later call goes around them."
        for pygraph in (False, True):
            torch._dynamo.reset()
            with config.patch(pygraph=pygraph):
                compiled = torch.compile(fn, backend="aot_eager", fullgraph=True)
                for _ in range(2):
                    self.check_call(compiled, fn, *args)
            wrapper = "call_func_at_runtime_with_args"
            general = getattr(runtime_wrappers, wrapper)
            with mock.patch.object(runtime_wrappers, wrapper, wraps=general) as called:
                self.check_call(compiled, fn, *args)
                self.assertEqual(called.called, not (pygraph and idle))
                with torch.autograd.profiler.profile():
                    self.check_call(compiled, fn, *args)
                self.assertTrue(called.called)

    def check_call(self, compiled: Any, fn: Any, *args: Any) -> None:
        copies = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
        for is_grad_enabled in (True, False):
            with torch.set_grad_enabled(is_grad_enabled):
                outputs = compiled(*copies)
                expected = fn(*args)
                self.assertEqual(torch.is_grad_enabled(), is_grad_enabled)
            self.assertEqual(outputs, expected)
            self.assertEqual(copies, list(args))
            for output, other in zip(outputs, expected):
                self.assertEqual(output.requires_grad, other.requires_grad)
                self.assertEqual(
                    any(output is c for c in copies), any(other is a for a in args)
                )
                self.assertEqual(output._is_view(), other._is_view())

    def test_plain(self):
        self.check(lambda x, y: (x.sin(), x + y), True, torch.randn(4), torch.randn(4))

    def test_no_outputs_of_the_graph(self):
        self.check(lambda x: (x.sin().sum(),), True, torch.randn(4))

    def test_mutated_input(self):
        self.check(lambda x: (x.add_(1).sin(),), False, torch.randn(4))

    def test_input_returned(self):
        "By Dynamo's bytecode, not by the graph."
        self.check(lambda x: (x, x.sin()), True, torch.randn(4))

    def test_view_of_an_input(self):
        self.check(lambda x: (x[1:], x.sin()), False, torch.randn(4))

    def test_views_of_one_output(self):
        def fn(x):
            y = x.sin()
            return y[1:], y[:2]

        self.check(fn, False, torch.randn(4, requires_grad=True))

    def test_grad_mode_that_the_function_sets(self):
        def fn(x):
            y = x.sin()
            torch._C._set_grad_enabled(False)
            return (y,)

        x = torch.randn(4)
        with config.patch(pygraph=True):
            compiled = torch.compile(fn, backend="aot_eager")
            for _ in range(3):
                with torch.enable_grad():
                    compiled(x)
                    self.assertFalse(torch.is_grad_enabled())

    def test_error_in_the_graph(self):
        x, index = torch.randn(4), torch.tensor([1])
        with config.patch(pygraph=True):
            compiled = torch.compile(lambda x, i: x[i], backend="aot_eager")
            self.assertEqual(compiled(x, index), x[index])
            for is_grad_enabled in (True, False):
                with torch.set_grad_enabled(is_grad_enabled):
                    with self.assertRaisesRegex(IndexError, "out of bounds"):
                        compiled(x, index + 7)
                    self.assertEqual(torch.is_grad_enabled(), is_grad_enabled)

    def test_record_of_the_bytecode_before_a_graph(self):
        "For the profiler only, and Dynamo does not look at the functions that make it."
        counters.clear()
        compiled = torch.compile(lambda x: x.sin(), backend="eager")
        x = torch.randn(4)
        for _ in range(3):
            compiled(x)
        with torch.profiler.profile() as profile:
            compiled(x)
        names = [event.name for event in profile.events()]
        self.assertEqual(names.count("Pregraph bytecode"), 1)
        self.assertEqual(counters["frames"]["total"], 1)
        with torch._dynamo.config.patch(error_on_recompile=True):
            self.assertEqual(compiled(x), x.sin())

    def test_autocast(self):
        x = torch.randn(4, 4)
        with config.patch(pygraph=True), torch.autocast("cpu", torch.bfloat16):
            compiled = torch.compile(lambda x: x @ x, backend="aot_eager")
            for _ in range(3):
                self.assertEqual(compiled(x), x @ x)


# Of RunnerOfCpuValues.
deliver_buf2: Any = None
stage_buf0: Any = None


def floats(words: Any) -> torch.Tensor:
    return torch.frombuffer(array.array("Q", words), dtype=torch.float32).clone()


class Runner:
    "As generated for a graph that is one partition, with another order of everything."

    direct = DirectCall(3, (), (), (2, 0, 1), 2, (1, 0))

    def __init__(self, partitions):
        self.partitions = partitions

    def call(self, args):
        arg0_1, arg1_1, arg2_1 = args
        args.clear()
        partition0_args = [arg2_1, arg0_1, arg1_1]
        del arg2_1, arg0_1
        (buf0, buf1) = self.partitions[0](partition0_args)
        del partition0_args
        return (buf1, buf0)


class RunnerOfCpuValues:
    "As generated where the second argument is delivered, and the third one is staged."

    direct = DirectCall(
        3, (("deliver_buf2", (1,)),), (("stage_buf0", 2),), (3, 0), 2, (1, 0)
    )

    def __init__(self, partitions):
        self.partitions = partitions

    def call(self, args):
        arg0_1, arg1_1, arg2_1 = args
        args.clear()
        # Topologically Sorted Source Nodes: [], Original ATen: []
        buf0 = stage_buf0.stage(arg2_1)
        del arg2_1
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            buf1 = buf0
            del buf0
        deliver_buf2.pack([arg1_1])
        del arg1_1
        partition0_args = [buf1, arg0_1]
        del buf1, arg0_1
        (buf3, buf4) = self.partitions[0](partition0_args)
        del partition0_args
        return (buf4, buf3)


@unittest.skipIf(native.compiled is None, "requires _replay")
class DirectTest(TestCase):
    "What compiled bytecode calls; the layers between it and the replay are counted."

    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        self.runner: type[Any] = Runner
        self.runners: list[Any] = []
        self.layers_run = self.launches = 0
        self.is_capturing = False
        self.asked = mock.Mock(side_effect=lambda: self.is_capturing)
        self.given: list[torch.Tensor] = []
        post_compile, call = CompiledFxGraph.post_compile, CompiledFxGraph.__call__

        def with_runner(graph: CompiledFxGraph, *args: Any) -> None:
            "As on a GPU, where the code is in a partition."
            post_compile(graph, *args)
            if graph.fx_kwargs["is_backward"]:
                return
            run = graph.current_callable

            def partition(inputs: list[Any]) -> Any:
                if self.runner is RunnerOfCpuValues:
                    inputs.append(floats(deliver_buf2.packed().words))
                x, weight, bias = inputs
                return run([weight, bias, x])[::-1]

            graph.compiled_fn_runner = self.runner([partition])
            graph.compiled_fn_runner.objects = globals()
            graph.graph_info = GraphInfo(direct=self.runner.direct)
            graph.current_callable = graph.compiled_fn_runner.call
            self.runners.append(graph.compiled_fn_runner)

        def counted(graph: CompiledFxGraph, inputs: list[Any]) -> Any:
            self.layers_run += 1
            return call(graph, inputs)

        for target, name, value in (
            (CompiledFxGraph, "post_compile", with_runner),
            (CompiledFxGraph, "__call__", counted),
            (torch._C, "_cuda_isCurrentStreamCapturing", self.asked),
            (torch._C, "_cuda_getCurrentRawStream", lambda index: 0),
        ):
            patch = mock.patch.object(target, name, value, create=True)
            patch.start()
            self.addCleanup(patch.stop)
        self.weight, self.bias = torch.randn(8), torch.randn(8)
        self.manager = CUDAGraphTreeManager.__new__(CUDAGraphTreeManager)
        self.manager.current_node = None
        self.manager.device_index = 0

    def compile(self, **options: Any) -> Any:
        def fn(weight, bias, x):
            return weight * bias + x, weight - x

        self.fn = fn
        return torch.compile(fn, options={"pygraph": True, **options})

    def record(self) -> Node:
        "A replay of the partition is deployed, of this weight and any bias and x."
        (runner,) = self.runners
        node = Node(self.weight)
        node.non_managed_static_input_idxs = [1]
        node.static_input_data_ptrs = [None, self.weight.data_ptr(), None]
        node.bound_input_idxs = [0, 2]
        node.output_storage_alias = [AliasesBoundMemory(k, 0, True) for k in (2, 3)]
        node.outputs_metadata, node.unaliased_in_all_paths = [{}, {}], [False] * 2
        node.static_output_tensors, node.returned_inputs = [None, None], {}
        results = []

        def allocate() -> torch.Tensor:
            # While gradients and Dynamo are disabled, as in AOTAutograd's wrapper.
            self.assertFalse(torch.is_grad_enabled())
            self.assertIs(torch._C._dynamo.eval_frame.set_eval_frame(None), None)
            results.append(torch.empty(8))
            return results[-1]

        def launch() -> None:
            self.launches += 1
            x, bias = (
                next(t for t in self.given if t.data_ptr() == pointer)
                for pointer in node.pointers[:2]
            )
            minus, plus = results[-2:]
            minus.copy_(self.weight - x)
            plus.copy_(self.weight * bias + x)

        node.allocators, node.launch = [allocate] * 2, launch
        node.cache()
        self.partition = runner.partitions[0]
        runner.partitions[0] = self.replay_of(node, CompilationMode.INFERENCE)
        return node

    def replay_of(self, node: Node, mode: CompilationMode) -> Any:
        node.binding = None
        plan = node.plan(self.manager, mode, trees.thread_containers())
        state = TreeState(0, torch._C._cuda_getCurrentRawStream, lambda: None)
        return native.compiled.Replay(plan, state, self.partition)

    def check(self, compiled: Any, layers: int, launches: int, **given: Any) -> None:
        "A call goes through so many layers, and launches so often."
        self.layers_run = self.launches = 0
        weight = given.get("weight", self.weight)
        bias, x = torch.randn(8), given.get("x", torch.randn(8))
        self.given = [bias, x]
        self.assertEqual(compiled(weight, bias, x), self.fn(weight, bias, x))
        self.assertEqual((self.layers_run, self.launches), (layers, launches))

    def test_direct(self):
        compiled = self.compile()
        for is_grad_enabled in (False, True):
            with torch.set_grad_enabled(is_grad_enabled):
                torch._dynamo.reset()
                self.runners.clear()
                self.check(compiled, layers=1, launches=0)
                self.record()
                for _ in range(3):
                    self.check(compiled, layers=0, launches=1)
                    self.assertEqual(torch.is_grad_enabled(), is_grad_enabled)
                with torch._dynamo.config.patch(error_on_recompile=True):
                    self.check(compiled, layers=0, launches=1)

    def test_who_looks_at_the_layers(self):
        compiled = self.compile()
        self.check(compiled, layers=1, launches=0)
        self.record()
        with torch.profiler.profile() as profile:
            self.check(compiled, layers=1, launches=1)
        names = [event.name for event in profile.events()]
        self.assertTrue(any("CompiledFxGraph" in name for name in names))
        with mock.patch.object(torch._inductor.debug, "RECORD_GRAPH_EXECUTION", True):
            self.check(compiled, layers=1, launches=1)
        self.check(compiled, layers=0, launches=1)

    def test_call_that_was_not_recorded(self):
        compiled = self.compile()
        self.check(compiled, layers=1, launches=0)
        node = self.record()
        self.check(compiled, layers=1, launches=0, weight=torch.randn(8))
        node.request.outdated.cell_contents = True
        self.check(compiled, layers=1, launches=0)
        node.request.outdated.cell_contents = False
        self.check(compiled, layers=0, launches=1)

    def test_further_recording(self):
        "The first one leaves to it what it was not recorded for."
        compiled = self.compile()
        self.check(compiled, layers=1, launches=0)
        self.record()
        (runner,) = self.runners
        second, first_weight = runner.partitions[0], self.weight
        runner.partitions[0], self.weight = self.partition, torch.randn(8)
        self.record()
        runner.partitions[0].general = second
        self.check(compiled, layers=0, launches=1)
        self.weight = first_weight
        self.check(compiled, layers=0, launches=1)
        self.check(compiled, layers=1, launches=0, weight=torch.randn(8))

    def test_other_decision(self):
        compiled = self.compile()
        self.check(compiled, layers=1, launches=0)
        self.record()
        self.check(compiled, layers=0, launches=1)
        self.runners[0].partitions[0] = self.partition
        self.check(compiled, layers=1, launches=0)

    def test_other_thread(self):
        compiled = self.compile()
        self.check(compiled, layers=1, launches=0)
        self.record()
        thread = threading.Thread(target=self.check, args=(compiled, 1, 0))
        thread.start()
        thread.join()
        self.assertEqual((self.layers_run, self.launches), (1, 0))
        self.check(compiled, layers=0, launches=1)

    def test_errors(self):
        "They leave gradients and Dynamo as they were."
        compiled = self.compile()
        with torch.enable_grad():
            self.check(compiled, layers=1, launches=0)
            node, calls = self.record(), mock.Mock(side_effect=RuntimeError("gone"))
            launch, node.launch = node.launch, calls
            with self.assertRaisesRegex(RuntimeError, "gone"):
                self.check(compiled, layers=0, launches=1)
            calls.assert_called_once()
            self.assertTrue(torch.is_grad_enabled())
            node.launch = launch
            self.check(compiled, layers=0, launches=1)

    def test_nothing_is_leaked(self):
        compiled = self.compile()
        self.check(compiled, layers=1, launches=0)
        self.record()
        x = torch.randn(8)
        objects = [self.weight, x]
        self.check(compiled, layers=0, launches=1, x=x)
        before = [sys.getrefcount(o) for o in objects]
        for _ in range(5):
            self.check(compiled, layers=0, launches=1, x=x)
            self.check(compiled, layers=1, launches=0, x=x, weight=self.bias)
        self.given = []
        # One was of self.given.
        self.assertEqual([sys.getrefcount(o) + (o is x) for o in objects], before)

    def test_graphs_that_are_let_go(self):
        compiled = self.compile()
        self.check(compiled, layers=1, launches=0)
        node = weakref.ref(self.record())
        self.check(compiled, layers=0, launches=1)
        self.runners.clear()
        self.partition = self.manager.current_node = None
        torch._dynamo.reset()
        del compiled, self.fn
        gc.collect()
        self.assertIsNone(node())

    def give_cpu_values(self) -> None:
        "Of RunnerOfCpuValues, whose device is the CPU."
        enqueue = ctypes.CFUNCTYPE(
            *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
            ctypes.c_void_p,
        )(lambda to, host, nbytes, _: 0 * ctypes.memmove(to, host, nbytes))
        # Nothing is pinned: the memory type stays 0.
        pointer_attributes = ctypes.CFUNCTYPE(
            *(ctypes.c_int, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p),
            ctypes.c_uint64,
        )(lambda count, attributes, results, address: 0)
        functions = {
            "cuMemcpyHtoDAsync": enqueue,
            "cuPointerGetAttributes": pointer_attributes,
        }
        addresses = {
            name: ctypes.cast(function, ctypes.c_void_p).value
            for name, function in functions.items()
        }
        self.addCleanup(lambda: functions)
        guard = mock.Mock(side_effect=lambda index: contextlib.nullcontext())
        for target, name, value in (
            (torch._C, "_cuda_getDevice", lambda: 0),
            (torch.cuda, "current_device", lambda: None),
            (torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing),
            (torch.cuda, "current_stream", lambda device: None),
            (torch.cuda, "set_device", lambda index: None),
            (torch.cuda, "Event", mock.Mock),
            (torch.cuda, "_DeviceGuard", guard),
            (deliver, "bindings", mock.Mock(side_effect=ImportError)),
            (deliver, "entry_point", addresses.__getitem__),
            (deliver, "pinned_copy", torch.clone),
            (deliver, "_Target", lambda *_: mock.Mock(spec=[])),
        ):
            patch = mock.patch.object(target, name, value, create=True)
            patch.start()
            self.addCleanup(patch.stop)
        stage = deliver.Stage(0)
        stage.device = torch.device("cpu")
        module = sys.modules[__name__]
        for name, value in (
            ("stage_buf0", stage),
            ("deliver_buf2", Deliver(0, (torch.float32, (8,)))),
        ):
            patch = mock.patch.object(module, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def record_cpu_values(self) -> None:
        node = self.record()
        node.bound_input_idxs, node.output_storage_alias = (
            [0],
            [AliasesBoundMemory(k, 0, True) for k in (1, 2)],
        )
        node.static_input_data_ptrs = [None, self.weight.data_ptr()]
        node.values.tokens(deliver_buf2)
        results = []

        def allocate() -> torch.Tensor:
            results.append(torch.empty(8))
            return results[-1]

        def launch() -> None:
            self.launches += 1
            (staged,) = stage_buf0.kept.values()
            x, *_, = node.pointers
            self.assertEqual(x, staged.copy.data_ptr())
            bias = floats(node.pointers[3:])
            minus, plus = results[-2:]
            minus.copy_(self.weight - staged.copy)
            plus.copy_(self.weight * bias + staged.copy)

        node.allocators, node.launch = [allocate] * 2, launch
        self.runners[0].partitions[0] = self.replay_of(node, CompilationMode.INFERENCE)

    def test_cpu_values(self):
        self.runner = RunnerOfCpuValues
        self.give_cpu_values()
        compiled = self.compile()
        for _ in range(3):
            self.check(compiled, layers=1, launches=0)
        self.record_cpu_values()
        for _ in range(3 * deliver.MAX_BATCH):
            self.check(compiled, layers=0, launches=1)
        x = torch.randn(8)
        for value in 0, 0, 5, -0.0:
            # No version counter sees this.
            x.numpy()[3] = value
            self.check(compiled, layers=0, launches=1, x=x)
        self.asked.reset_mock()
        self.check(compiled, layers=0, launches=1)
        self.asked.assert_called_once_with()
        # What the replay leaves to the layers is given again.
        self.check(compiled, layers=1, launches=0, weight=torch.randn(8))
        self.check(compiled, layers=0, launches=1)
        self.is_capturing = True
        self.check(compiled, layers=1, launches=0)
        self.is_capturing = False
        self.check(compiled, layers=0, launches=1)
        thread = threading.Thread(target=self.check, args=(compiled, 1, 0))
        thread.start()
        thread.join()
        self.assertEqual((self.layers_run, self.launches), (1, 0))

    @parametrize("values", (1, 2))
    def test_values_of_what_a_finalizer_calls(self, values):
        """
        The same function, with others, where the collector runs it: where an object is made,
        after one value of the call was given, or both.
        """
        self.runner = RunnerOfCpuValues
        asked, finalizers = [], []

        def stream(index: int) -> int:
            asked.append(index)
            if len(asked) == values and finalizers:
                finalizers.pop()()
            return 0

        with mock.patch.object(torch._C, "_cuda_getCurrentRawStream", stream):
            self.give_cpu_values()
            compiled = self.compile()
            for _ in range(3):
                self.check(compiled, layers=1, launches=0)
            self.record_cpu_values()
            self.check(compiled, layers=0, launches=1)

            def call() -> tuple[Any, Any]:
                args = [self.weight, torch.randn(8), torch.randn(8)]
                return compiled(*args), self.fn(*args)

            for _ in range(3):
                found: list[tuple[Any, Any]] = []
                finalizers.append(lambda: found.append(call()))
                asked.clear()
                found.append(call())
                self.assertEqual(len(found), 2)
                for outputs, expected in found:
                    self.assertEqual(outputs, expected)
            self.check(compiled, layers=0, launches=1)

    def test_nothing_of_cpu_values_is_leaked(self):
        self.runner = RunnerOfCpuValues
        self.give_cpu_values()
        compiled = self.compile()
        for _ in range(3):
            self.check(compiled, layers=1, launches=0)
        self.record_cpu_values()
        bias, x = torch.randn(8), torch.randn(8)
        compiled(self.weight, bias, x)
        (staged,) = stage_buf0.kept.values()
        objects = [self.weight, bias, x, staged.copy]
        before = [sys.getrefcount(o) for o in objects]
        for _ in range(20):
            compiled(self.weight, bias, x.add_(1))
        self.assertEqual([sys.getrefcount(o) for o in objects], before)

    def test_training(self):
        "The replay of a forward, called by AOTAutograd's function."

        def fn(weight, bias, x):
            return weight.exp() + bias + x

        self.fn, self.weight = fn, self.weight.requires_grad_()
        compiled = torch.compile(fn, options={"pygraph": True})

        def check(layers: int, launches: int, **given: Any) -> None:
            self.check(compiled, layers, launches, **given)
            weight = given.get("weight", self.weight)
            bias, x = torch.randn(8), torch.randn(8)
            self.given, weight.grad = [bias, x], None
            compiled(weight, bias, x).sum().backward()
            self.assertEqual(weight.grad, weight.exp())

        for _ in range(3):
            check(layers=1, launches=0)
        node = self.record()
        # Of the partition: what is saved, and the output.
        launch, results = node.launch, []
        allocate = node.allocators[0]

        def allocated() -> torch.Tensor:
            results.append(allocate())
            return results[-1]

        def launched() -> None:
            launch()
            x, bias = self.given[1], self.given[0]
            saved, output = results[-2:]
            saved.copy_(self.weight)
            output.copy_(saved.exp() + bias + x)

        node.allocators, node.launch = [allocated] * 2, launched
        (runner,) = self.runners
        runner.partitions[0] = self.replay_of(node, CompilationMode.FORWARD)
        for _ in range(3):
            check(layers=0, launches=1)
        with torch.profiler.profile():
            self.check(compiled, layers=1, launches=1)
        check(layers=1, launches=0, weight=torch.randn(8, requires_grad=True))
        check(layers=0, launches=1)

    def test_layers_that_have_work(self):
        def mutated(weight, bias, x):
            bias.add_(x)
            return weight + bias, weight - x

        def trained(weight, bias, x):
            return weight + bias - x, weight - x

        made = []
        with mock.patch.object(
            native.compiled, "Direct", lambda **kwargs: made.append(kwargs)
        ):
            for fn, requires_grad, pygraph, expected in (
                (mutated, False, True, 0),
                # Of the forward graph, called by AOTAutograd's function.
                (trained, True, True, 1),
                (trained, False, False, 0),
            ):
                torch._dynamo.reset()
                made.clear()
                compiled = torch.compile(fn, options={"pygraph": pygraph})
                args = [torch.randn(8) for _ in range(3)]
                args[0].requires_grad_(requires_grad)
                for _ in range(2):
                    copies = [a.detach().clone() for a in args]
                    self.assertEqual(compiled(*args), fn(*copies))
                self.assertEqual(len(made), expected)

    def test_backend_that_wraps(self):
        "What it does is not left out, even if it looks like what it wraps."
        calls = []

        def backend(gm, inputs):
            with config.patch(pygraph=True):
                inner = compile_fx(gm, inputs)

            @functools.wraps(inner)
            def outer(*args):
                calls.append(args)
                return inner(*args)

            return outer

        self.compile()
        compiled = torch.compile(self.fn, backend=backend)
        self.check(compiled, layers=1, launches=0)
        self.record()
        self.check(compiled, layers=1, launches=1)
        self.assertEqual(len(calls), 2)

    def test_hooks_of_saved_tensors(self):
        "Those that a graph inlines are not the same as none, or as others."
        compiles = torch._dynamo.testing.CompileCounter()
        compiled = torch.compile(lambda x: x.sin(), backend=compiles)
        x = torch.randn(4, requires_grad=True)
        pack, unpack = (torch.fx.symbolic_trace(lambda x: x * 1) for _ in range(2))
        hooks = torch.autograd.graph.saved_tensors_hooks
        for pair, frames in (
            (None, 1),
            ((lambda x: x, lambda x: x), 1),
            ((pack, unpack), 2),
            (None, 2),
            ((pack, unpack), 2),
        ):
            with hooks(*pair) if pair else contextlib.nullcontext():
                compiled(x)
            self.assertEqual(compiles.frame_count, frames)


instantiate_parametrized_tests(DirectTest)


if __name__ == "__main__":
    run_tests()
