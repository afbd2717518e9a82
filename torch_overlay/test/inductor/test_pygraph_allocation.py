# Owner(s): ["module: inductor"]
"""
Which outputs leave a graph, which allocation each lies in, and what of the inputs is written
over, on a machine that need not have a GPU.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from typing import Any
from unittest import mock

import torch
from torch._inductor import compile_fx, cudagraph_trees as trees
from torch._inductor.pygraph.capture import allocation, copying
from torch._inductor.pygraph.capture.allocation import (
    Allocation,
    AllocationTrace,
    placed_allocator,
    with_allocator,
)
from torch._inductor.pygraph.graph.memory import segments_of
from torch._inductor.pygraph.graph.placeholder import storage_extent
from torch._inductor.pygraph.types.partition import PartitionInfo
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.fake_cuda import fake_cuda
from torch.utils._ordered_set import OrderedSet


ALLOCATOR = "empty_strided_cuda"
INFO = PartitionInfo("call", allocator=ALLOCATOR)


def empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def generated(source: str) -> types.FunctionType:
    "A function ``call`` in a module as Inductor writes them, on the CPU."
    module = {"torch": torch, ALLOCATOR: empty_strided}
    exec(source, module)
    return module["call"]  # type: ignore[return-value]


class OptionsTest(TestCase):
    def functions(self, fn: Any, *inputs: Any) -> list[tuple[str, Any, Any]]:
        "(mode, function, options) of each function that could be recorded"
        seen = []

        def cudagraphify(model, *, pygraph, is_backward, is_inference, **kwargs):
            mode = (
                "backward"
                if is_backward
                else "inference"
                if is_inference
                else "forward"
            )
            seen.append((mode, model, pygraph))
            return model

        with (
            fake_cuda() as graphs,
            mock.patch.object(compile_fx, "cudagraphify", cudagraphify),
        ):
            inputs = [make() for make in inputs]
            outputs = torch.compile(fn, options={"pygraph": True})(*inputs)
            if torch.is_grad_enabled():
                sum(t.sum() for t in outputs).backward()
        self.sources = [graph.source for graph in graphs]
        return seen

    def returned(self, *args: Any) -> list[tuple[str, list[str], list[str]]]:
        "(mode, what the function returns, what of that leaves the graph) where nothing is split"
        functions = self.functions(*args)
        self.assertEqual(len(functions), len(self.sources))
        result = []
        for (mode, _, options), source in zip(functions, self.sources):
            (names,) = re.findall(r"^    return \((.*), \)$", source, re.MULTILINE)
            names = names.split(", ")
            returned = [names[i] for i in options.info.returned_output_idxs]
            result.append((mode, names, returned))
        return result

    def reused(self, *args: Any) -> list[tuple[str, set[str], set[str]]]:
        "(mode, inputs that the code writes over, those that are said to be) of each function"
        functions = self.functions(*args)
        result = []
        defined = [
            (names, body)
            for source in self.sources
            for names, body in re.findall(
                r"^def partition_\d+\(args.*\):\n    (.*) = args\n((?:    .*\n|\n)*)",
                source,
                re.MULTILINE,
            )
        ]
        self.assertEqual(len(functions), len(defined))
        for (mode, _, options), (names, body) in zip(functions, defined):
            names = names.rstrip(",").split(", ")
            written = {*re.findall(r"; del (\w+)  # reuse", body)} & {*names}
            found = {names[i] for i in options.info.reused_input_idxs}
            result.append((mode, written, found))
        return result

    def test_donated_activation(self):
        "Of what the forward saved, only what the backward writes over is said to be."

        def fn(x, w):
            for _ in range(3):
                x = torch.nn.functional.gelu(x @ w).sin()
            return (x.sum(),)

        matrix = self.matrix(requires_grad=True)
        forward, backward = self.reused(fn, matrix, matrix)
        self.assertEqual(forward, ("forward", set(), set()))
        self.assertEqual(backward[0], "backward")
        self.assertTrue(backward[1])
        self.assertEqual(backward[2], backward[1])

    def test_buffers_of_another_partition(self):
        "All that a partition gets from another one may be written over."

        @torch.library.custom_op(
            "pygraph_test::opaque", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
        )
        def opaque(x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        opaque.register_fake(torch.empty_like)
        self.addCleanup(opaque._lib._destroy)

        def fn(x, w):
            y = (x @ w).sin()
            z = opaque(y)
            return ((y.cos() @ w + z).tanh(),)

        with torch.no_grad():
            first, second = self.reused(fn, self.matrix(), self.matrix())
        self.assertEqual(first, ("inference", set(), set()))
        mode, written, found = second
        self.assertTrue(written and written <= found, second)
        self.assertFalse({n for n in found if n.startswith("arg")})

    def matrix(self, **kwargs: Any) -> Any:
        return lambda: torch.randn(64, 64, device="cuda", **kwargs)

    def test_inference(self):
        with torch.no_grad():
            returned = self.returned(lambda x: (x.sin(), x, x @ x), self.matrix())
        self.assertEqual(returned, [("inference", ["buf0", "buf1"], ["buf0", "buf1"])])

    def test_saved_activations_stay(self):
        def fn(x, w):
            return (((x @ w).sin() @ w).sum(),)

        forward, backward = self.returned(
            fn, self.matrix(), self.matrix(requires_grad=True)
        )
        saved = ["buf0", "buf1", "primals_1", "primals_2"]
        self.assertEqual(
            (forward[0], sorted(forward[1])), ("forward", sorted(["buf3", *saved]))
        )
        self.assertEqual(forward[2], ["buf3"])
        self.assertEqual(backward, ("backward", ["buf4"], ["buf4"]))

    def test_output_that_is_saved_too(self):
        "Its buffer is returned once, under the number of either."

        def fn(x, w):
            y = (x @ w).tanh()
            return y, y.t(), (y @ w).sin().sum()

        forward, _ = self.returned(fn, self.matrix(), self.matrix(requires_grad=True))
        self.assertEqual(forward[1], ["buf1", "buf2", "buf3", "primals_1", "primals_2"])
        self.assertEqual(forward[2], ["buf1", "buf3"])

    def test_partitions(self):
        "What one partition passes on to the next does not leave the graph."

        def fn(x):
            y = x.sin()
            z = (x @ x).cos()
            return (y @ z) * y.sum(0).cpu().sum().item(), z

        with torch.no_grad(), torch._dynamo.config.patch(capture_scalar_outputs=True):
            functions = self.functions(fn, self.matrix())
        self.assertEqual(len(functions), 2)
        returned = [len(options.info.returned_output_idxs) for _, _, options in functions]
        self.assertEqual(returned, [1, 1])

    def test_generated_functions_can_be_given_an_allocator(self):
        "It is an argument, so another thread that runs the function has the usual one."
        with torch.no_grad():
            ((_, model, options),) = self.functions(lambda x: (x.sin(),), self.matrix())
        self.assertEqual(options.info.allocator, ALLOCATOR)
        default = inspect.signature(model).parameters[ALLOCATOR].default
        self.assertIs(default, allocation.empty_strided_cuda)
        given = with_allocator(model, options.info, empty_strided)
        self.assertIs(given.func, model)
        self.assertEqual(given.keywords, {ALLOCATOR: empty_strided})


class SegmentsTest(TestCase):
    def test_handle_of_a_pool_is_not_freed(self):
        "After 256 pools, its number is an object like any other."
        number = int("1000001")
        before = sys.getrefcount(number)
        for _ in range(8):
            self.assertEqual(segments_of((0, number)), [])
        self.assertGreaterEqual(sys.getrefcount(number), before)


class AllocationTest(TestCase):
    SOURCE = f"""
def call(args, {ALLOCATOR}={ALLOCATOR}):
    (x,) = args
    dead = {ALLOCATOR}((8,), (1,), torch.float32)
    buf0 = {ALLOCATOR}((4, 2), (2, 1), torch.float32)
    buf1 = buf0; del buf0
    torch.add(x, 1, out=buf1)
    buf2 = {ALLOCATOR}((0,), (1,), torch.int64)
    buf3 = {ALLOCATOR}((8, 2), (2, 1), torch.float32)
    buf3.copy_(torch.cat([buf1, buf1]))
    return buf1, buf2, buf3[4:], torch.sort(buf3)[0], x, 3
"""
    OUTPUTS = {
        1: Allocation((4, 2), (2, 1), torch.float32),
        3: Allocation((8, 2), (2, 1), torch.float32),
    }

    def setUp(self):
        super().setUp()
        patch = mock.patch.object(allocation, "empty_strided_cuda", empty_strided)
        patch.start()
        self.addCleanup(patch.stop)
        self.call = generated(self.SOURCE)
        self.x = torch.arange(8.0).view(4, 2)

    def test_trace(self):
        trace = AllocationTrace()
        outputs = with_allocator(self.call, INFO, trace)([self.x])
        self.assertEqual(trace.of(outputs), self.OUTPUTS)
        self.assertEqual(trace.of([outputs[2]]), {3: self.OUTPUTS[3]})
        self.assertEqual(trace.of([]), {})
        # The function itself allocates as ever.
        self.call([self.x])
        self.assertEqual(len(trace.allocations), 4)

    def test_storages_count_not_addresses(self):
        "An operator allocated where a buffer was that is gone."
        memory = torch.empty(8)

        def allocated(*size):
            return torch.frombuffer(memory.numpy(), dtype=torch.float32)[: size[0]]

        trace = AllocationTrace()
        with mock.patch.object(
            allocation, "empty_strided_cuda", lambda size, *_: allocated(*size)
        ):
            trace((8,), (1,), torch.float32)
            t = trace((4,), (1,), torch.float32)
        other = allocated(4)
        self.assertEqual(t.data_ptr(), other.data_ptr())
        self.assertEqual(
            trace.of([t, other]), {1: Allocation((4,), (1,), torch.float32)}
        )

    def test_output_in_memory_that_is_used_again(self):
        "Each call allocates what it returns, not what the buffer was first."
        trace = AllocationTrace()
        t = trace((4, 2), (2, 1), torch.float32)
        for output in (
            t.as_strided((2, 4), (1, 2)),
            t.view(8),
            t.view(torch.int32),
            t.view(torch.bfloat16),
        ):
            found = Allocation(tuple(output.shape), output.stride(), output.dtype)
            self.assertEqual(trace.of([output]), {0: found})
            self.assertEqual(trace.of([t[1:], output, t[0]]), {0: found})
        plain = Allocation((4, 2), (2, 1), torch.float32)
        for part in t[1:], t[:1], t.as_strided((4, 4), (1, 1)):
            self.assertEqual(trace.of([part]), {0: plain})

    def test_what_operators_allocated(self):
        trace = AllocationTrace()
        own = trace((4,), (1,), torch.float32)
        x, pair = torch.empty(4), torch.empty(6)
        outputs = [
            own,
            torch.empty(4, 2).t(),
            x.view(2, 2),
            pair,
            pair[1:],
            torch.empty(5)[1:],
            torch.empty(4).expand(3, 4),
            torch.empty(0),
            torch.empty(4, dtype=torch.complex64).conj(),
            3,
            None,
            torch.empty(3),
        ]

        def others(idxs):
            return trace.others([x, 7], outputs, idxs, torch.device("cpu"))

        expected = Allocation((2, 4), (1, 2), torch.float32)
        self.assertEqual(others(range(len(outputs) - 1)), {1: expected})
        self.assertEqual(others([0, 2]), {})

    def test_copied(self):
        places = {1000: torch.empty(4), 2000: torch.empty(2, 3)}
        placed = {
            0: (Allocation((4,), (1,), torch.float32), 1000),
            2: (Allocation((2, 3), (3, 1), torch.float32), 2000),
        }
        results = (torch.arange(4.0), torch.ones(2), torch.randn(2, 3))
        with mock.patch.object(
            allocation, "tensor_at", lambda address, like, _: places.get(address, like)
        ):
            copied = allocation.Copied(lambda inputs: results, placed, 0)
            outputs = copied([])
        self.assertEqual(
            [t.data_ptr() for t in copied.sources],
            [results[i].data_ptr() for i in (0, 2)],
        )
        self.assertEqual(outputs, list(results))
        self.assertIs(outputs[0], places[1000])
        self.assertIs(outputs[1], results[1])
        self.assertIs(outputs[2], places[2000])

    def placed(
        self, placed: dict[int, Allocation]
    ) -> tuple[Any, dict[int, torch.Tensor]]:
        memory = {1000 + n: empty_strided(*a) for n, a in placed.items()}

        def tensor_at(address, like, device_index):
            self.assertEqual((like.device.type, device_index), ("meta", 0))
            t = memory[address]
            self.assertEqual(
                (t.shape, t.stride(), t.dtype), (like.shape, like.stride(), like.dtype)
            )
            return t

        with mock.patch.object(allocation, "tensor_at", tensor_at):
            allocate = placed_allocator(
                {n: (storage_extent(memory[1000 + n]), 1000 + n) for n in placed}, 0
            )
            outputs = with_allocator(self.call, INFO, allocate)([self.x])
        self.assertEqual(outputs, self.call([self.x]))
        return outputs, memory

    def test_outputs_are_placed(self):
        outputs, memory = self.placed(self.OUTPUTS)
        self.assertEqual(outputs[0].data_ptr(), memory[1001].data_ptr())
        self.assertEqual(outputs[2].data_ptr(), memory[1003][4:].data_ptr())

    def test_other_allocation_than_expected(self):
        other = Allocation((4, 3), (3, 1), torch.float32)
        outputs, memory = self.placed({1: other})
        self.assertNotEqual(outputs[0].data_ptr(), memory[1001].data_ptr())

    def test_function_without_an_allocator(self):
        info = PartitionInfo("call")
        self.assertIs(with_allocator(self.call, info, empty_strided), self.call)


class CopyGraphNodeTest(TestCase):
    "What leaves the pool, with nodes whose graph is a function."

    def run_node(
        self,
        outputs: list[Any],
        returned: list[int],
        aliases: dict[int, Any] | None = None,
    ) -> list[Any]:
        "Outputs of the call that records, with those of later calls checked against them."
        aliases = aliases or {}
        node = object.__new__(copying.CopyGraphNode)
        node.output_storage_alias = [
            aliases.get(i, trees.UnaliasedStorage) for i in range(len(outputs))
        ]
        node.returned_inputs, node.made_outputs = {}, {}
        node.static_output_tensors = [
            t
            if isinstance(t, torch.Tensor) and i in aliases and aliases[i] is None
            else None
            for i, t in enumerate(outputs)
        ]
        node.outputs_metadata = [
            trees.CUDAGraphNode._tensor_metadata(t, ignore_storage_offset=False)
            if isinstance(t, torch.Tensor)
            else t
            for t in outputs
        ]
        node.wrapped_function = mock.Mock()
        node.request = mock.Mock(owned_output_idxs=OrderedSet(returned))

        def rebuild(metadata, storage):
            t = torch.empty(0, dtype=metadata["dtype"])
            return t.set_(
                storage,
                metadata["storage_offset"],
                metadata["size"],
                metadata["stride"],
            )

        node._reconstruct_from_tensor_metadata = rebuild
        with (
            mock.patch.object(
                trees.CUDAGraphNode, "run_first_inputs", lambda self, _: outputs
            ),
            mock.patch.object(trees.CUDAGraphNode, "run", lambda self, _: outputs),
        ):
            first = node.run_first_inputs([])
            later = node.run([])
        for mine, copy, again in zip(outputs, first, later):
            self.assertEqual(copy, mine)
            self.assertEqual(again, mine)
            if isinstance(mine, torch.Tensor):
                self.assertEqual(copy.stride(), mine.stride())
                self.assertEqual(copy is mine, again is mine)
        return first

    def test_returned_outputs_are_copied(self):
        a, b = torch.randn(4, 4), torch.randn(4)
        copies = self.run_node([a, b, None, 3], [0, 2, 3])
        self.assertNotEqual(copies[0].data_ptr(), a.data_ptr())
        # The backward finds its own in the pool.
        self.assertIs(copies[1], b)

    def test_aliases_stay_aliases(self):
        base = torch.randn(4, 4)
        copies = self.run_node(
            [base.t(), torch.randn(4), base[1:]], [2], {2: trees.AliasesNewOutput(0)}
        )
        addresses = [t.untyped_storage().data_ptr() for t in copies]
        self.assertEqual(addresses[0], addresses[2])
        self.assertNotEqual(addresses[0], base.data_ptr())

    def test_what_is_not_in_the_pool_is_not_copied(self):
        static, bound = torch.randn(4), torch.randn(4)
        outputs = [static, bound]
        copies = self.run_node(
            outputs, [0, 1], {0: None, 1: trees.AliasesBoundMemory(0, 0, True)}
        )
        self.assertIs(copies, outputs)


if __name__ == "__main__":
    run_tests()
