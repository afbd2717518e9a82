# Owner(s): ["module: inductor"]
"""
What a recording's replay checks, sets and hands out, on a machine that need not have a GPU: the
graph is a function of what is bound, and trees' part is looked at from outside.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import struct
import sys
import threading
import types
import weakref
from unittest import mock

import torch
from torch._inductor import config
from torch._inductor.cudagraph_trees import (
    AliasesBoundMemory,
    AliasesNewOutput,
    CompilationMode,
)
from torch._inductor.pygraph import native
from torch._inductor.pygraph.capture import bound
from torch._inductor.pygraph.capture.allocation import empty_strided_cuda
from torch._inductor.pygraph.replay import plan as replay_plan_module
from torch._inductor.pygraph.trees.cached import is_steady
from torch._inductor.pygraph.trees.manager import without_trees
from torch._inductor.pygraph.values.deliver import Deliver
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.pygraph_common import needs_compiled
from torch.testing._internal.pygraph_replay import Compiled, ReplayTestCase


class ReplayTest(ReplayTestCase):
    "By Python; CompiledReplayTest runs the same by compiled code."

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

    def test_outdated_function(self):
        outdated = self.node.request.state.outdated
        outdated.cell_contents = True
        self.assertFalse(self.call())
        outdated.cell_contents = False
        self.assertTrue(self.call())

    def test_static_input_that_is_another_object(self):
        "It is returned itself, not what had its memory when it was recorded."
        for _ in range(2):
            self.assertTrue(self.call(weight=self.weight.detach()))

    def test_output_without_elements(self):
        self.node.outputs_metadata[3] = {"size": (0,)}
        self.node.static_output_tensors[3] = torch.empty(0)
        self.node.made_outputs = {3: lambda: torch.empty(0, 3)}
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

    def test_node_of_python_that_refuses(self):
        self.node.refuses = True
        self.assertFalse(self.call())
        self.assertIsNone(self.manager.current_node)
        self.assertEqual(self.node.pointers, [-1, -1])
        self.node.refuses = False
        self.assertTrue(self.call())

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

    def test_errors_of_the_launch(self):
        "They are the program's, as any other of the device."

        def fail() -> None:
            raise RuntimeError("the device is gone")

        self.node.launch = fail
        with self.assertRaisesRegex(RuntimeError, "the device is gone"):
            self.call()


instantiate_parametrized_tests(ReplayTest)


@needs_compiled
class CompiledReplayTest(Compiled, ReplayTest):
    "With the nodes in Python, and in ``compiled_nodes`` compiled as well."

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
            (address, 8, 10 + k, 9, None, [(ctypes.addressof(w), 8, k, 16 * k, None)])
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

    def node_that_notes(self) -> tuple[list[int], int, object]:
        "Return a list of the parameters that a node is set to, the address of the function that does, and its owner."
        sets: list[int] = []

        def set_node(executable: int, node: int, params: int) -> int:
            sets.append(params)
            return self.refuses

        self.refuses = False
        function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3)(set_node)
        return sets, ctypes.cast(function, ctypes.c_void_p).value, function

    def test_rows_of_launches(self):
        "A node is set again after another row set it to other parameters, or refused, also if these lie where others lay."
        sets, address, function = self.node_that_notes()
        word = ctypes.c_uint64()

        def node_set(params: int) -> object:
            node = address, 8, 10, params, None, [(ctypes.addressof(word), 8, 0, 0, None)]
            return native.compiled.NodeSet([node], function)

        def row(nodes: object, like: object) -> object:
            return native.compiled.Row(1, [nodes], like)

        shared = node_set(9)
        first = row(shared, None)
        other = row(node_set(11), first)
        for called in (first, first, other, first):
            self.assertTrue(called([5]))
        self.assertEqual(sets, [9, 11, 9])
        self.assertTrue(row(shared, other)([5]))
        self.assertEqual(sets, [9, 11, 9])
        self.refuses = True
        self.assertFalse(first([6]))
        self.refuses = False
        self.assertTrue(first([6]))
        self.assertEqual(sets, [9, 11, 9, 9, 9])
        shared = first = None
        self.assertTrue(row(node_set(9), other)([6]))
        self.assertEqual(sets, [9, 11, 9, 9, 9, 9])
        with self.assertRaises(ValueError):
            other([5, 6])

    def test_nodes_of_a_library_call(self):
        "They have parameters of their own, with the addresses of a call, and what the library passed beside them."
        contents: list[bytes] = []

        def set_node(executable: int, node: int, params: int) -> int:
            parameters = ctypes.c_uint64.from_address(params + 40).value
            for k in range(2):
                contents.append(ctypes.string_at(ctypes.c_uint64.from_address(parameters + 8 * k).value, 16))
            return 0

        function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3)(set_node)
        address = ctypes.cast(function, ctypes.c_void_p).value
        given = [struct.pack("<QQ", 1, 2), struct.pack("<QQ", 3, 4)]
        slots = [(0, 8, 0, 16), (1, 0, 1, 0), (1, 8, 2, 0)]
        launched = [(address, bytes(72), given, None, slots)]
        places = [(0, 5, None), None, (1, 0, 2)]
        nodes = [native.compiled.NodeSet(launched, 8, [10], places, function) for _ in range(2)]
        for k, to in enumerate(([100, 200, 7], [1000, 200, 8])):
            self.assertTrue(native.compiled.Row(3, [nodes[k]], None)(to))
        self.assertEqual(
            [struct.unpack("<QQ", content) for content in contents],
            [(1, 100 + 5 + 16), (3, 200 + 7), (1, 1000 + 5 + 16), (3, 200 + 8)],
        )
        with self.assertRaises(ValueError):
            native.compiled.NodeSet([(address, bytes(72), given, None, [(0, 9, 0, 0)])], 8, [10], places, function)

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


if __name__ == "__main__":
    run_tests()
