# Owner(s): ["module: inductor"]
"""
The short way from Dynamo's bytecode to a replay, and wrappers of AOTAutograd that are not made.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import functools
import gc
import sys
import threading
import weakref
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
import torch._dynamo.testing
from torch._functorch._aot_autograd import runtime_wrappers
from torch._inductor import config, cudagraph_trees as trees
from torch._inductor.compile_fx import compile_fx
from torch._inductor.cudagraph_trees import (
    AliasesBoundMemory,
    CompilationMode,
    CUDAGraphTreeManager,
)
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.pygraph import native
from torch._inductor.pygraph.native import TreeState
from torch._inductor.pygraph.types.partition import DirectCall, GraphInfo
from torch._inductor.pygraph.values import deliver
from torch._inductor.pygraph.values.deliver import Deliver
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.pygraph_common import needs_compiled
from torch.testing._internal.pygraph_replay import Node


if TYPE_CHECKING:
    from collections.abc import Iterator


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
        "The graph mutates it, and autograd has to see that."
        x = torch.randn(4)
        self.check(lambda x: (x.add_(1).sin(),), True, x)
        before = x._version
        with config.patch(pygraph=True):
            compiled = torch.compile(lambda x: (x.add_(1).sin(),), backend="aot_eager_decomp_partition")
            for calls in range(1, 4):
                compiled(x)
                self.assertEqual(x._version, before + calls)

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


class RunnerOfMore(Runner):
    "Of a graph with statements beside its partition."

    direct = None


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


@needs_compiled
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

    def compiled_in_each_grad_mode(self) -> Iterator[tuple[Any, bool]]:
        """Yield (the function after its first call, whether gradients are enabled) with gradients disabled and enabled."""
        compiled = self.compile()
        for is_grad_enabled in (False, True):
            with torch.set_grad_enabled(is_grad_enabled):
                torch._dynamo.reset()
                self.runners.clear()
                self.check(compiled, layers=1, launches=0)
                yield compiled, is_grad_enabled

    def test_direct(self):
        for compiled, is_grad_enabled in self.compiled_in_each_grad_mode():
            self.record()
            for _ in range(3):
                self.check(compiled, layers=0, launches=1)
                self.assertEqual(torch.is_grad_enabled(), is_grad_enabled)
            with torch._dynamo.config.patch(error_on_recompile=True):
                self.check(compiled, layers=0, launches=1)

    @parametrize("runner", (Runner, RunnerOfMore))
    def test_mutated_input(self, runner):
        "Autograd sees that the graph mutates an input."
        self.runner = runner

        def fn(weight, bias, x):
            out = weight * bias + x
            bias.mul_(1)
            return out, weight - x

        self.fn = fn
        compiled = torch.compile(fn, options={"pygraph": True})
        self.check(compiled, layers=1, launches=0)
        self.record()
        for _ in range(3):
            self.check(compiled, layers=0, launches=1)
            # Once compiled, and once in eager mode.
            self.assertEqual(self.given[0]._version, 2)
        if runner is Runner:
            # The replay refuses a misaligned input, and the layers call the graph.
            self.check(compiled, layers=1, launches=0, x=torch.randn(9)[1:])
            self.assertEqual(self.given[0]._version, 2)

    def test_code(self):
        "From the second call on, bytecode calls the code of several partitions without the layers."
        self.runner = RunnerOfMore
        for compiled, is_grad_enabled in self.compiled_in_each_grad_mode():
            (runner,) = self.runners
            partition = runner.partitions[0]

            def run(inputs: list[Any], partition: Any = partition) -> Any:
                self.assertFalse(torch.is_grad_enabled())
                self.assertIs(torch._C._dynamo.eval_frame.set_eval_frame(None), None)
                return partition(inputs)

            runner.partitions[0] = run
            for _ in range(3):
                self.check(compiled, layers=0, launches=0)
                self.assertEqual(torch.is_grad_enabled(), is_grad_enabled)
            runner.partitions[0] = partition
            self.record()
            self.check(compiled, layers=0, launches=1)

    def test_code_that_is_watched(self):
        self.runner = RunnerOfMore
        compiled = self.compile()
        self.check(compiled, layers=1, launches=0)
        with torch.profiler.profile() as profile:
            self.check(compiled, layers=1, launches=0)
        self.assertTrue(any("CompiledFxGraph" in event.name for event in profile.events()))
        with mock.patch.object(torch._inductor.debug, "RECORD_GRAPH_EXECUTION", True):
            self.check(compiled, layers=1, launches=0)
        self.check(compiled, layers=0, launches=0)

    def test_code_that_raises(self):
        "All calls up to the first one that returns go through the layers. An error leaves gradients and Dynamo as they were."
        self.runner, errors = RunnerOfMore, [True, False, True, False]

        def call(runner: Any, args: list[Any]) -> Any:
            if errors.pop(0):
                raise RuntimeError("gone")
            return Runner.call(runner, args)

        with mock.patch.object(RunnerOfMore, "call", call), torch.enable_grad():
            compiled = self.compile()
            for layers in (1, 0):
                with self.assertRaisesRegex(RuntimeError, "gone"):
                    self.check(compiled, layers=layers, launches=0)
                self.assertEqual((self.layers_run, torch.is_grad_enabled()), (layers, True))
                self.check(compiled, layers=layers, launches=0)

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
        node.request.state.outdated.cell_contents = True
        self.check(compiled, layers=1, launches=0)
        node.request.state.outdated.cell_contents = False
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

    def compile_cpu_values(self) -> Any:
        """Return a function that takes CPU values, and is recorded."""
        self.runner = RunnerOfCpuValues
        self.give_cpu_values()
        compiled = self.compile()
        for _ in range(3):
            self.check(compiled, layers=1, launches=0)
        self.record_cpu_values()
        return compiled

    def test_cpu_values(self):
        compiled = self.compile_cpu_values()
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
        compiled = self.compile_cpu_values()
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
        def viewed(weight, bias, x):
            return weight + bias, x[1:]

        def trained(weight, bias, x):
            return weight + bias - x, weight - x

        made = []
        with mock.patch.object(
            native.compiled, "Direct", lambda **kwargs: made.append(kwargs)
        ):
            for fn, requires_grad, pygraph, expected in (
                (viewed, False, True, 0),
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


instantiate_parametrized_tests(DirectTest)


if __name__ == "__main__":
    run_tests()
