# Owner(s): ["module: inductor"]
"""
Recordings for many sizes: generated code of dynamic programs, on a device whose Triton kernels run with
numpy and whose libraries choose kernels by size.

    python test_pygraph_many_sizes.py --programs 500 [--seed 0]
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import functools
import gc
import itertools
import random
import tempfile
import types
import unittest
import weakref
from pathlib import Path
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
from torch._dynamo import mark_dynamic, mark_static
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor import config, cudagraph_trees as trees
from torch._inductor.exc import InductorError
from torch._inductor.pygraph import report, reset_report
from torch._inductor.pygraph.capture import compared, library, sized
from torch._inductor.pygraph.capture.allocation import Allocation
from torch._inductor.pygraph.capture.at_sizes import not_for_many_sizes, SizedModel
from torch._inductor.pygraph.graph import sized as graph_sized
from torch._inductor.pygraph.report import text
from torch._inductor.pygraph.select import by_size, many_sizes, proofs, store, timing
from torch._inductor.pygraph.select.controller import Controller
from torch._inductor.pygraph.select.preparation import ALLOWED, Preparation, SAVED, SPENT
from torch._inductor.pygraph.trees.manager import manager_of
from torch._inductor.pygraph.types.candidate import NO_GRAPH
from torch._inductor.pygraph.types.reason import Code, Reason
from torch._inductor.pygraph.types.sizes import KernelAt, OperatorAt, SizeMap
from torch._inductor.pygraph.values.sizes import Steps
from torch._inductor.pygraph.verify.rehearsal import Rehearsal
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.modelled_cuda import modelled_device, WORKSPACE_FLOATS
from torch.testing._internal.modelled_nodes import cu
from torch.testing._internal.modelled_operators import on_host
from torch.testing._internal.modelled_sizes import (
    compiled,
    delivering,
    SizedDevice,
    SizedDriver,
    SizedProgram,
    stack_depth,
    symbolic_graphs,
    symbols,
)
from torch.testing._internal.modelled_triton import NotModelled, Triton
from torch.testing._internal.pygraph_common import ByPython, run_programs, wants_programs
from torch.testing._internal.pygraph_simulation import NoisySimulation


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


# In a run of the tests.
PROGRAMS = 6

MLP_SHAPES = (37, 16), (16, 32), (32, 8), (32,)


def dynamic(*shape: int, dims: Sequence[int] = (0,)) -> torch.Tensor:
    t = torch.zeros(shape, device="cuda")
    for dim in dims:
        mark_dynamic(t, dim)
    return t


def mlp(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, b: torch.Tensor) -> tuple[Any, ...]:
    h = torch.nn.functional.relu(x @ w + b)
    return (h @ v).softmax(-1), h.sum(0), x.shape[0]


@functools.cache
def compiled_of(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> Any:
    def program() -> None:
        with torch.no_grad():
            torch.compile(fn)(*(dynamic(*s) if i == 0 else torch.zeros(s, device="cuda") for i, s in enumerate(shapes)))

    (found,) = compiled(program)
    return found


# Buckets end at powers of two, and at one and a half times these.
SIZES = (37, 2, 33, 64, 65, 3, 16, 17, 4, 5, 31, 32, 7, 8, 9, 63, 127, 0, 1, 37)

def others_captured(device: SizedDevice) -> int:
    """Return how many kernels of no library the graph has that is being captured."""
    nodes = (device.driver.nodes[i] for i in device.driver.graphs[device.captured.handle])
    return sum(not node.kernel.name.startswith("product") for node in nodes)


UNARY: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.sin,
    torch.relu,
    lambda x: x.sum(0),
    lambda x: x.sum(-1),
    lambda x: x.mean(-1, keepdim=True),
    lambda x: x / x.shape[0],
    lambda x: x * (x.shape[0] + x.shape[-1]),
    lambda x: x.softmax(-1),
    lambda x: x.t(),
    lambda x: x.t().contiguous(),
    lambda x: x.reshape(-1),
    lambda x: x.reshape(-1, 4),
    lambda x: x[1:],
    lambda x: x[..., :-1],
    lambda x: x[: x.shape[0] // 2],
    lambda x: torch.nn.functional.pad(x, (1, 3)),
    lambda x: torch.cat((x, x.sin())),
    lambda x: torch.stack((x, x.cos()), 1),
    lambda x: x.repeat(2, *([1] * (x.dim() - 1))),
    lambda x: x + torch.arange(x.shape[-1], device=x.device),
    lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    lambda x: x @ x.t(),
    lambda x: x @ x.t(),
    lambda x: torch.bmm(x, x.transpose(1, 2)),
    lambda x: x.new_zeros(x.shape[0], 2 * x.shape[-1] + 1),
    lambda x: x.roll(2, 0),
    lambda x: torch.nn.functional.dropout(x, 0.3),
    lambda x: torch.nn.functional.conv1d(x.mT, x.mT[:1, :, :3], padding=1),
    lambda x: torch.nn.functional.conv1d(x.mT, x.mT[:2, :, :3], stride=2),
)
BINARY: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    torch.add,
    torch.mul,
    torch.mm,
    torch.mm,
    torch.bmm,
    lambda x, y: x @ y.t(),
    lambda x, y: torch.cat((x, y)),
    lambda x, y: torch.where(x > y, x, y),
    lambda x, y: torch.addmm(y, x, x.t()),
)


# Of a CPU value.
SCALED: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    lambda x, value: x * (value if value.dim() == 0 else value.to(x.device)[0]),
    lambda x, value: x + value.sum().to(x.device),
)


class RandomProgram:
    """A random program of two sizes, a weight, and perhaps two CPU values."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        shapes = [(37, 16), (37,), (41, 16), (37, 41), (3, 37, 8)]
        self.shapes = [shapes[0], (16, 12), *chance.sample(shapes[1:], chance.choice((1, 2)))]
        # Operation, operands, whether it is given the CPU values, too.
        self.steps: list[tuple[Callable[..., torch.Tensor], tuple[int, ...], bool]] = []
        self.outputs = chance.choice((1, 2, 3))
        values = [torch.zeros(shape, device="meta") for shape in self.shapes]
        self.has_values = chance.random() < 0.3
        for _ in range(200):
            if self.has_values and chance.random() < 0.3:
                scaled, i, k = chance.choice(SCALED), chance.randrange(len(values)), chance.randrange(2)
                values.append(values[i])
                self.steps.append((lambda x, *on_cpu, scaled=scaled, k=k: scaled(x, on_cpu[k]), (i,), True))
                continue
            operations = chance.choice((UNARY, BINARY))
            operation = chance.choice(operations)
            operands = [chance.choice([*range(len(values)), len(values) - 1]) for _ in range(1 + (operations is BINARY))]
            try:
                value = operation(*(values[i] for i in operands))
            except (RuntimeError, IndexError):
                continue
            if 0 < value.numel() < 2**13:
                values.append(value.to("meta"))
                self.steps.append((operation, tuple(operands), False))
            if len(self.steps) >= 6:
                break

    def __call__(self) -> None:
        def function(on_cpu: tuple[torch.Tensor, ...], *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
            values = [*values]
            for operation, operands, takes_values in self.steps:
                values.append(operation(*(values[i] for i in operands), *(on_cpu if takes_values else ())))
            return tuple(values[-self.outputs :])

        inputs = [dynamic(*shape, dims=[d for d, n in enumerate(shape) if n in (37, 41)]) for shape in self.shapes]
        with torch.no_grad():
            torch.compile(function)((torch.zeros((), dtype=torch.float64), torch.zeros(3)) if self.has_values else (), *inputs)


@unittest.skipIf(cu is None, "requires cuda-bindings")
class ManySizesTestCase(TestCase):
    # How many sizes have recordings of their own.
    few_sizes = 0

    def setUp(self) -> None:
        super().setUp()
        trees.reset_cudagraph_trees()
        reset_report()
        counters.clear()
        self.addCleanup(trees.reset_cudagraph_trees)
        self.stack = contextlib.ExitStack()
        self.addCleanup(self.stack.close)
        options = {"pygraph": True, "pygraph_sizes": True, "triton.cudagraph_dynamic_shape_warn_limit": None}
        self.stack.enter_context(config.patch(options))
        self.refused: list[Reason] = []
        note = lambda _, reason: self.refused.append(reason)  # noqa: E731
        self.stack.enter_context(mock.patch.object(many_sizes, "log_reason", note))
        self.stack.enter_context(mock.patch.object(by_size, "FEW_SIZES", self.few_sizes))

    @classmethod
    def tearDownClass(cls) -> None:
        super().tearDownClass()
        # Devices have blocks that cannot be freed while the interpreter ends.
        gc.collect()

    def device(self) -> SizedDevice:
        return self.stack.enter_context(modelled_device(SizedDriver, SizedDevice))

    def check(self, program: SizedProgram, sizes: Sequence[int]) -> int:
        """Compare each call with the uncaptured function. Return in how many it can run."""
        names = symbols(program.inputs)
        ran = 0
        for k, n in enumerate(sizes):
            at = {name: sizes[(k + 7 * i) % len(sizes)] if k else n for i, name in enumerate(names)}
            (generator,) = torch.cuda.default_generators
            before = generator.get_state()
            try:
                given = program.make_inputs(at)
                expected = program.call(given, captured=False)
            except (RuntimeError, ZeroDivisionError, ValueError):
                # Generated code is for other sizes.
                continue
            after = generator.get_state()
            generator.set_state(before)
            self.assertEqual(program.call(given, captured=True), expected, f"{at}", atol=0, rtol=0)
            self.assertEqual(generator.get_state(), after)
            ran += 1
        return ran

    def program(self, fn: Callable[..., Any], *shapes: tuple[int, ...], force: str | None = "node_update") -> SizedProgram:
        return SizedProgram(self.device(), compiled_of(fn, *(shapes or MLP_SHAPES)), force)

    @contextlib.contextmanager
    def outputs_elsewhere(self) -> Iterator[None]:
        """Replays that are proven do not write the outputs that the call gets."""
        bind, elsewhere = sized.SizedRecording.bind, []

        def bind_others(self: Any, inputs: Any, kept: Any, **kwargs: Any) -> Any:
            tensors = bind(self, inputs, kept, **kwargs)
            others = [t if i < len(self.model.inputs) else t.clone() for i, t in enumerate(tensors)]
            elsewhere.extend(others)
            kept.launches.move([*(t.data_ptr() for t in others), *self.numbers(kept.at)])
            return tensors

        with mock.patch.object(sized.SizedRecording, "bind", bind_others):
            yield

    def memo(self) -> library.Memo:
        return next(iter(memory.memo for memory in many_sizes._memories.values() if memory.recordings))

    def check_captured(self, program: SizedProgram, sizes: Sequence[int]) -> None:
        """All calls from the second on are replays of recordings for many sizes."""
        self.check(program, sizes)
        self.assertEqual([str(r) for r in self.refused], [])
        for entry in report():
            self.assertEqual((entry.calls, entry.captured_calls), (len(sizes) - 2, len(sizes) - 2))


class RandomProgramsTest(ManySizesTestCase):
    def run_program(self, seed: int, totals: collections.Counter[str]) -> None:
        torch.manual_seed(seed)
        trees.reset_cudagraph_trees()
        reset_report()
        torch._dynamo.reset()
        self.refused.clear()
        try:
            (program,) = compiled(RandomProgram(seed))
        except (BackendCompilerFailed, InductorError, ValueError):
            # Upstream does not compile all programs.
            totals["not compiled"] += 1
            return
        with modelled_device(SizedDriver, SizedDevice) as device, delivering(device):
            if seed % 2 == 1:
                device.undefined = stack_depth
            try:
                sized = SizedProgram(device, program, "node_update")
                totals["calls"] += self.check(sized, SIZES)
            except NotModelled:
                totals["not modelled"] += 1
                return
            totals.update(r.code.name for r in self.refused)
            totals["refused"] += bool(self.refused)
            totals["captured calls"] += sum(r.captured_calls for r in report())
            totals["programs"] += 1

    def test_random_programs(self) -> None:
        """Each call of a program equals the uncaptured function, bit for bit."""
        totals: collections.Counter[str] = collections.Counter()
        for seed in range(PROGRAMS):
            with self.subTest(seed=seed):
                self.run_program(seed, totals)
        self.assertGreater(totals["captured calls"], 0.4 * totals["calls"], totals)


class ManySizesTest(ManySizesTestCase):
    def test_sizes_of_a_bucket(self) -> None:
        """One recording serves all sizes up to the end of the bucket."""
        program = self.program(mlp)
        self.check_captured(program, (37, 37, 2, 40, 64, 63, 3, 33))
        (entry,) = report()
        self.assertEqual((entry.buckets, entry.num_sizes), ([[64]], 7))
        self.assertEqual(counters["pygraph"]["proven_sizes"], 4)

    def test_view_of_another_dtype(self) -> None:
        """Without graph partition, functions return views of inputs. A replay would return them with the input's dtype."""
        with config.patch(graph_partition=False):
            program = self.program(lambda x: (x.view(torch.int32), x + 1), (37, 8))
        self.check(program, (37, 37, 5, 33))
        self.assertEqual(len(self.refused), 1)

    def test_larger_bucket(self) -> None:
        """A recording for larger sizes takes the place of the others."""
        program = self.program(mlp)
        self.check_captured(program, (5, 5, 7, 9, 16, 8, 17, 32, 31, 5))
        (entry,) = report()
        self.assertEqual(entry.buckets, [[32]])

    def test_no_bucket(self) -> None:
        """A function that has no memory of its own but outputs has one recording for all sizes."""
        self.check_captured(self.program(lambda x: (x.sin(), x.sum(0)), (37, 8)), (5, 5, 9, 64, 65, 2, 513))
        (entry,) = report()
        self.assertEqual(entry.buckets, [[6]])

    def test_number_of_the_program(self) -> None:
        """A number that the program passes is no size: it may be negative."""

        def program() -> None:
            x = torch.zeros(37, 8, device="cuda")
            mark_static(x)
            torch.compile(lambda x, n: (x * n, x.sum(0) - n, n * 3), dynamic=True)(x, 5)

        (found,) = compiled(program)
        self.check_captured(SizedProgram(self.device(), found, "node_update"), (5, 5, -3, 7, -100, 64, 8, 3))

    def test_sizes_without_hints(self) -> None:
        """Code for sizes that nothing is known of runs at 0 and 1, too."""

        def program() -> None:
            x, w = torch.zeros(37, 8, device="cuda"), torch.zeros(8, 4, device="cuda")
            mark_unbacked(x, 0)
            with torch.no_grad():
                torch.compile(lambda x, w: ((x @ w).relu(), x.cos(), x.sum(0)))(x, w)

        (found,) = compiled(program)
        self.check(SizedProgram(self.device(), found, "node_update"), SIZES)
        self.assertEqual([str(r) for r in self.refused], [])
        (entry,) = report()
        # Without rows the product launches nothing.
        self.assertEqual(entry.calls - entry.captured_calls, 1)

    def test_bucket_ends_at_the_guards(self) -> None:
        model = mock.Mock()
        model.function.size_map.sizes = [mock.Mock(upper=50), mock.Mock(upper=None)]
        for sizes, top in (((37, 37), (48, 48)), ((50, 64), (50, 64)), ((0, 1), (1, 1)), ((2, 65), (2, 96)), ((3, 97), (3, 128))):
            self.assertEqual(SizedModel.top(model, sizes), top)

    def test_topologies(self) -> None:
        """A library launches more kernels for large products: these have a recording of their own."""
        program = self.program(mlp)
        self.check_captured(program, (127, 127, 128, 120, 8, 9, 7, 128, 9, 126))
        (entry,) = report()
        self.assertGreater(len(entry.buckets), 1)

    def test_new_sizes_of_topologies_that_take_turns(self) -> None:
        """A call that prepares a size is not timed as a replay, whichever recording does it."""
        program = self.program(mlp)
        self.check_captured(program, (127, 127, 128, 120, 8, 9, 7, 128, 9, 126))
        (entry,) = report()
        self.assertGreater(len(entry.buckets), 1)
        for n in (125, 11, 124, 12, 123, 13):
            with mock.patch.object(Controller, "prepared_size") as prepared:
                self.check(program, (n,))
                self.check(program, (n,))
            self.assertEqual(prepared.call_count, 1, n)
        self.assertEqual(len(entry.buckets), 2)

    def test_clusters(self) -> None:
        """Kernels that need other clusters have an executable graph of their own, over the memory of the recording."""
        program = self.program(lambda x, w: (x @ w).sin() @ w, (37, 4), (4, 4))
        driver = program.device.driver
        self.check_captured(program, (37, *range(37, 44)))
        graphs, launches = len(driver.own), []
        for n in (37, 38, 39, 40, 40, 41, 42, 43):
            before = driver.own_launches
            self.check(program, (n,))
            launches.append(driver.own_launches - before)
        self.assertEqual({*launches}, {0, 1})
        # For each set of attributes but the captured ones.
        self.assertEqual((graphs, len(driver.own)), (1, 1))
        (entry,) = report()
        self.assertEqual(entry.buckets, [[48]])

    def test_own_graphs_are_bounded(self) -> None:
        """The executable graph that was not launched for long is let go, and made again."""
        program = self.program(lambda x, w: (x @ w, x[1:] @ w), (37, 4), (4, 4))
        driver = program.device.driver
        sizes = (37, 37, 38, 39, 40, 41, 42, 43, 37, 38, 39, 40, 41, 42, 43)
        with mock.patch.multiple(graph_sized, MAX_OWN_GRAPHS=1, IDLE_LAUNCHES=0):
            self.check_captured(program, sizes)
            self.assertEqual(len(driver.own), 1)
        self.check(program, (37, 38, 39, 40, 41, 42, 43))
        self.assertEqual(len(driver.own), 2)

    def test_own_graphs_do_not_take_turns(self) -> None:
        """While all executable graphs are in use, sizes that need a further one have another recording."""
        program = self.program(lambda x, w: (x @ w, x[1:] @ w), (37, 4), (4, 4))
        driver = program.device.driver
        with mock.patch.object(graph_sized, "MAX_OWN_GRAPHS", 1):
            self.check_captured(program, (37, 37, 38, 39, 40, 41, 42, 43, *range(37, 44)))
            graphs = [*driver.own]
            self.check(program, [*range(37, 44)] * 4)
        self.assertEqual(driver.own, graphs)
        (entry,) = report()
        self.assertEqual(len(entry.buckets), 2)

    def test_call_that_does_not_vary(self) -> None:
        """Its nodes are not set again where another call launches other kernels."""
        program = self.program(lambda x, v, w: x @ (v @ w), (37, 4), (4, 5), (5, 4))
        driver = program.device.driver
        (name,) = symbols(program.inputs)
        inputs = [program.make_inputs({name: n}) for n in range(37, 44)]
        fixed = [t for t in inputs[0] if isinstance(t, torch.Tensor) and t.shape[0] < 6]
        for given in inputs:
            given[:] = [next((f for f in fixed if isinstance(t, torch.Tensor) and f.shape == t.shape), t) for t in given]
        for given in inputs[:1] + inputs * 2:
            program.run(given, captured=True)
        driver.sets.clear()
        for given in inputs:
            expected = program.call(given, captured=False)
            self.assertEqual(program.call(given, captured=True), expected, atol=0, rtol=0)
        self.assertEqual(len(driver.sets), len(inputs))
        self.assertEqual([str(r) for r in self.refused], [])

    def test_own_graphs_are_let_go(self) -> None:
        """They live as long as their recording."""
        program = self.program(mlp)
        self.check(program, (37, *range(37, 44)))
        self.assertGreater(len(program.device.driver.own), 0)
        self.check(program, (65,))
        self.assertEqual(program.device.driver.own, [])

    def test_row_that_differs(self) -> None:
        """
        Where a row is proven, results are compared after the nodes were set to others and back. If they differ, the
        function is recorded by size, and the call has the results of the uncaptured function.
        """
        self.stack.enter_context(mock.patch.object(graph_sized, "UNPROVEN_ROWS", 1))
        program = self.program(mlp)
        self.check(program, (37, 37, 5, 6, 7, 9))
        with self.outputs_elsewhere():
            # The first call has the results of the uncaptured function. The next one is rehearsed.
            self.check(program, (10, 11, 10))
        (reason,) = self.refused
        self.assertEqual(reason.code, Code.DIFFERS_AT_SIZES)
        self.check(program, (10, 5, 10))

    def test_atomic_additions(self) -> None:
        """Sums in another order in each run are compared as such where a row is proven. A fault is still seen."""
        chance = random.Random(0)
        add = Triton.atomic_add

        def add_otherwise(self: Any, pointer: Any, value: Any, mask: Any = None, **kwargs: Any) -> None:
            add(self, pointer, value * (1 + chance.uniform(-1e-5, 1e-5)), mask, **kwargs)

        def sums(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
            at = torch.arange(x.shape[0], device="cuda") // 2
            return torch.zeros_like(x).index_add(0, at, x @ w), x.cos()

        program = self.program(sums, (37, 8), (8, 8))
        (name,) = symbols(program.inputs)

        def check(sizes: Sequence[int]) -> None:
            for n in sizes:
                given = program.make_inputs({name: n})
                expected = program.call(given, captured=False)
                self.assertEqual(program.call(given, captured=True), expected, atol=1e-3, rtol=1e-3)

        repeats = Rehearsal.repeats_itself
        with (
            mock.patch.object(Triton, "atomic_add", add_otherwise),
            # Uncaptured runs may add in one order, and the graph in another one.
            mock.patch.object(Rehearsal, "repeats_itself", lambda self: (repeats(self), True)[1]),
        ):
            check((37, 37, 4, 7, 10))
            with mock.patch.object(proofs.Proofs, "rehearse", side_effect=AssertionError("rehearsed")):
                check((13, 5, 5, 6, 6, 9, 11, 12))
            self.assertEqual([str(r) for r in self.refused], [])
            (entry,) = report()
            self.assertEqual(entry.captured_calls, entry.calls)
            with self.outputs_elsewhere(), mock.patch.object(graph_sized, "UNPROVEN_ROWS", 1):
                for n in (14, 14):
                    program.call(program.make_inputs({name: n}), captured=True)
        self.assertEqual(len(self.refused), 1)

    def test_rows_that_are_proven(self) -> None:
        """
        A row is proven if a library call launches kernels that were not compared yet, and one row in some is. At other
        rows a call runs no uncaptured function.
        """

        program = self.program(lambda x, w: torch.relu(x @ w), (37, 16), (16, 16))
        # One kernel of the library.
        self.check(program, (37, 37, 4, 7, 10, 13))
        memo = self.memo()
        forms = lambda: sum(form.is_compared for form in memo.forms.values())  # noqa: E731
        new, proven, before = [], [], forms()
        prove = proofs.Proofs.prove

        def noted(self: Any, recording: Any, kept: Any, *args: Any, **kwargs: Any) -> Any:
            proven.append(kept.at.sizes[0])
            return prove(self, recording, kept, *args, **kwargs)

        with (
            mock.patch.object(proofs.Proofs, "prove", noted),
            mock.patch.object(graph_sized, "UNPROVEN_ROWS", 8),
            mock.patch.object(sized.SizedRecording, "scratch", side_effect=AssertionError("captured")),
        ):
            for n in range(14, 65):
                if n != 37:
                    self.check(program, (n,))
                    new.append(forms() - before > len(new) and n)
        self.assertEqual([str(r) for r in self.refused], [])
        with_new = [n for n in proven if n in new]
        self.assertTrue(0 < forms() - before <= len(with_new) + 1, (new, proven))
        self.assertTrue(forms() - before < len(proven) <= forms() - before + 2 * (50 // 8) + 2, proven)
        (entry,) = report()
        self.assertEqual(entry.calls, entry.captured_calls)

    def test_address_that_was_not_found(self) -> None:
        """A further capture of a call, at other addresses, finds it before the call's kernel is launched."""
        program = self.program(lambda x, w: torch.relu(x @ w), (37, 16), (16, 16))
        # One kernel of the library.
        self.check(program, (37, 37, 4, 7, 10, 13))
        known = {form: True for form in self.memo().forms.values() if form.is_compared}
        entry_of = library.Memo._entry

        def without_the_first(self: Any, *args: Any) -> Any:
            entry = entry_of(self, *args)
            if all(map(known.get, entry.forms)):
                return entry
            slots = tuple(of_node[1:] for of_node in entry.slots)
            return library.Entry(entry.nodes, slots, entry.graph, entry.forms, entry.addresses, entry.is_whole)

        with mock.patch.object(library.Memo, "_entry", without_the_first):
            self.check(program, range(10, 65))
        (reason,) = self.refused
        self.assertEqual(reason.code, Code.DIFFERS_AT_SIZES)

    def test_nothing_to_do(self) -> None:
        """A node whose grid is empty is switched off, and on again."""
        program = self.program(lambda x: (x[: x.shape[0] // 16].sin(), x.cos()), (37, 8))
        driver = program.device.driver
        self.check_captured(program, (37, 37, 3))
        self.assertEqual(len(driver.disabled), 1)
        self.check(program, (33, 40, 15, 16, 5, 64))
        self.assertEqual(len(driver.disabled), 0)
        self.assertEqual([str(r) for r in self.refused], [])

    def test_empty_input(self) -> None:
        """A kernel gets the address 0 of a tensor without elements, and a proof at such sizes expects it."""
        self.check_captured(self.program(lambda x, y: torch.cat((x, y)) + 1, (37, 4), (4, 4)), (37, 37, 0, 5, 3))

    def test_switched_off_in_one_graph(self) -> None:
        """Each executable graph has its own state of what its nodes were set to."""
        program = self.program(lambda x, w: (x[: x.shape[0] // 32].sin(), x @ w), (40, 4), (4, 4))
        self.check(program, (40, 40, 5, 6, 7, 8, 9, 33, 10, 11, 12))
        self.assertGreater(program.device.driver.own_launches, 0)
        self.assertEqual([str(r) for r in self.refused], [])

    def test_no_mask(self) -> None:
        """A kernel without a mask writes as far as its grid goes, into the next tensor."""
        program = self.program(lambda x: x.sin(), (37, 1024))
        memory = program.device.tensor(torch.zeros(64 * 1024))
        self.check(program, (37, 37))
        (name,) = symbols(program.inputs)
        allocate = lambda *args: lambda: memory[: 3 * 1024].view(3, 1024)  # noqa: E731
        with mock.patch.object(Allocation, "allocator", allocate):
            program.call(program.make_inputs({name: 3}), captured=True)
        self.assertTrue(on_host(memory[: 3 * 1024]).any())
        self.assertFalse(on_host(memory[3 * 1024 :]).any())
        self.assertEqual([str(r) for r in self.refused], [])

    def test_outputs(self) -> None:
        """Outputs are those of the call: of exact size and strides, and no other call writes them."""

        def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[Any, ...]:
            h = x @ w
            return h[1:], h.t(), x, x[2:], x.shape[0] * 2, h.sin(), torch.cat((x, x.cos()))

        program = self.program(fn, (37, 8), (8, 8))
        (name,) = symbols(program.inputs)
        kept = []
        for n in (37, 37, 5, 64, 33, 6, 37):
            given = program.make_inputs({name: n})
            expected = program.run(given, captured=False)
            actual = program.run(given, captured=True)
            kept.append((actual, [on_host(t).clone() if isinstance(t, torch.Tensor) else t for t in expected]))
            for a, e in zip(actual, expected):
                if isinstance(a, torch.Tensor):
                    self.assertEqual((a.shape, a.stride(), a.dtype), (e.shape, e.stride(), e.dtype))
            for a, e in kept:
                self.assertEqual([on_host(t) if isinstance(t, torch.Tensor) else t for t in a], e, atol=0, rtol=0)
        self.assertEqual([str(r) for r in self.refused], [])

    def test_mutated_input(self) -> None:
        """A proof leaves an input as one call does."""
        program = self.program(lambda x: x.add_(1).sin() @ x.t(), (37, 8))
        (names,) = (f.sizes.inputs for f in program.info.functions)
        program.mutated = tuple(i for i, name in enumerate(names) if name.startswith("arg"))
        (name,) = symbols(program.inputs)
        for n in (37, 37, 5, 64, 33, 6, 37):
            given, copies = program.make_inputs({name: n}), []
            for t in given:
                copies.append(program.device.clone(t) if isinstance(t, torch.Tensor) else t)
            expected = program.call(copies, captured=False)
            self.assertEqual(program.call(given, captured=True), expected, atol=0, rtol=0)
            for a, e in zip(given, copies):
                self.assertEqual(on_host(a) if isinstance(a, torch.Tensor) else a, on_host(e) if isinstance(e, torch.Tensor) else e)
        self.assertEqual([str(r) for r in self.refused], [])

    def test_less_aligned_input(self) -> None:
        """A kernel was chosen for the alignment that it saw: another recording is made for less of it."""
        program = self.program(mlp)
        (name,) = symbols(program.inputs)
        for offset in (0, 0, 0, 4, 0, 4, 8):
            given = program.make_inputs({name: 37})
            at = next(i for i, t in enumerate(given) if isinstance(t, torch.Tensor) and t.shape == (37, 16))
            flat = program.device.tensor(torch.randn(37 * 16 + offset))
            given[at] = flat.as_strided((37, 16), (16, 1), offset)
            expected = program.call(given, captured=False)
            self.assertEqual(program.call(given, captured=True), expected, atol=0, rtol=0)
        self.assertEqual([str(r) for r in self.refused], [])
        (entry,) = report()
        self.assertEqual((entry.buckets, entry.captured_calls), ([[48], [48]], 5))

    def test_layers_share_library_calls(self) -> None:
        """
        A call of a signature is captured once for each size. Two captures find what the library leaves undefined, where
        the function is compared.
        """

        def layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            for _ in range(4):
                x = torch.relu(x @ w)
            return x

        program = self.program(layers, (37, 8), (8, 8))
        program.device.undefined = stack_depth
        self.check(program, (37, 37, 5))
        memo = self.memo()
        before = len(memo.known)
        with mock.patch.object(memo, "_operands", side_effect=memo._operands) as run:
            self.check(program, (9, 10, 9, 10))
        self.assertEqual((len(memo.known) - before, run.call_count), (2, 2 + 2))
        self.assertEqual([str(r) for r in self.refused], [])

    def test_call_that_launches_nothing(self) -> None:
        """It is captured together with another call, whose kernels are not its own."""

        def program() -> None:
            x, y = dynamic(37, 16), dynamic(41, 16)
            with torch.no_grad():
                torch.compile(lambda x, y: ((x * 2).t() @ x, y @ y.t()))(x, y)

        (found,) = compiled(program)
        sized = SizedProgram(self.device(), found, "node_update")
        first, second = (str(t.shape[0]) for t in sized.inputs if isinstance(t, torch.Tensor))
        for n, m in ((37, 101), (37, 101), (5, 100), (7, 99), (8, 98), (13, 97), (0, 96), (0, 95)):
            given = sized.make_inputs({first: n, second: m})
            expected = sized.call(given, captured=False)
            self.assertEqual(sized.call(given, captured=True), expected, f"{n}, {m}", atol=0, rtol=0)

    def test_memo_is_bounded(self) -> None:
        """Entries that were dropped are captured again, and what a graph holds stays."""
        with mock.patch.object(library, "MAX_MEMO_BYTES", 1), mock.patch.object(sized, "MAX_ROWS", 2):
            self.check_captured(self.program(mlp), (37, 37, 5, 6, 7, 9, 10, 11, 9, 5, 37))

    def test_undefined_parameters(self) -> None:
        """
        What a library leaves undefined differs between captures of one call, or between its callers; or it is an
        address of the host, in all captures or only behind another call, or half an address of an operand.
        """
        kept = []

        def address(device: SizedDevice) -> int:
            # Alone it is the same each time.
            if len(device.driver.graphs[device.captured.handle]) == 0:
                return ctypes.addressof(kept[0])
            kept.append(ctypes.create_string_buffer(8))
            return ctypes.addressof(kept[-1])

        def address_or_none(device: SizedDevice) -> int:
            return 0 if len(device.driver.graphs[device.captured.handle]) == 0 else address(device)

        def half_of_address(device: SizedDevice) -> int:
            # Its next parameter is in the other half.
            return device.operands[-1].data_ptr() % (1 << 32) | 1 << 32

        kept.append(ctypes.create_string_buffer(8))
        modes: dict[str, Any] = {"calls": lambda device: device.calls, "callers": lambda device: stack_depth()}
        modes |= {"address": address, "address in the function": address_or_none}
        modes |= {"half an address": half_of_address}
        for name, undefined in modes.items():
            with self.subTest(name):
                trees.reset_cudagraph_trees()
                reset_report()
                program = self.program(mlp)
                device = program.device
                device.undefined = functools.partial(undefined, device)
                self.check_captured(program, (37, 37, 5, 6, 7, 9))

    def test_halves_of_addresses(self) -> None:
        """Half an operand's address is none, a whole address outside of its operand is one."""

        def has_halves(found: int, expected: int, *addresses: tuple[int, int]) -> bool:
            words = (word.to_bytes(8, "little") for word in (found, expected))
            return compared.Difference(0, 0, 56, *words).has_halves(addresses)

        a, b, one = 0x7F10_2C20_0000, 0x7F10_0180_0100, 0x3F80_0000 << 32
        halves = a % compared.HALF | one, b % compared.HALF | one
        self.assertTrue(has_halves(*halves, (a + 256, b + 256), (a, b)))
        self.assertFalse(has_halves(*halves, (a + 256, b)))
        self.assertFalse(has_halves(*halves))
        self.assertFalse(has_halves(a + (1 << 30), b + (1 << 30), (a, b)))
        self.assertFalse(has_halves(a - (1 << 30), b - (1 << 30), (a, b)))

    def test_other_parameters(self) -> None:
        """A library that sees its neighbours is refused, and the reason names the word."""
        program = self.program(mlp)
        device = program.device
        device.undefined = lambda: others_captured(device)
        self.check(program, (37, 37, 5, 6))
        (reason,) = self.refused
        self.assertEqual(reason.code, Code.DIFFERS_AT_SIZES)
        self.assertRegex(reason.text, r"bytes 8 to 16 of \d+ of parameter 0 of node 0, product_\d_\d+ \(grid .*are 0\d0+ and alone 0+")

    def test_programmatic_launch_within_a_call(self) -> None:
        """The second kernel of a library call begins while the first one runs, at all sizes of a recording."""
        program = self.program(mlp, (37, 64), (64, 32), (32, 8), (32,))
        device, driver = program.device, program.device.driver
        device.begins_early = True
        self.check_captured(program, (127, 127, 128, 120, 119, 118, 117, 116, 8, 9, 7, 128, 9, 126))
        self.assertGreater(driver.own_launches, 0)

    def test_programmatic_launch(self) -> None:
        """A call that begins while the kernel before runs is not recorded for many sizes."""
        program = self.program(mlp)
        program.device.driver.programmatic = {*range(1, 1000)}
        self.check(program, (37, 37, 5, 6))
        self.assertEqual([r.code for r in self.refused], [Code.NODES_NOT_IN_ROW])

    def test_node_that_refuses(self) -> None:
        """Nothing was launched: the call runs uncaptured, and so do later calls of these sizes."""
        program = self.program(mlp)
        self.check(program, (37, 37, 5, 6, 7, 9))
        driver = program.device.driver
        with mock.patch.object(driver, "refuses", lambda node: True):
            self.check(program, (10,))
        self.check(program, (10, 10, 5, 5, 11))
        self.assertEqual([str(r) for r in self.refused], [])
        (entry,) = report()
        self.assertEqual(entry.calls - entry.captured_calls, 3)

    def test_call_of_some_sizes(self) -> None:
        """Sizes at which a library cannot be captured run uncaptured, and are not tried again."""
        program = self.program(mlp)
        self.check(program, (37, 37, 5))
        driver, device = program.device.driver, program.device
        driver.programmatic = {*range(1, 100_000)}
        self.check(program, (10,))
        tried = device.calls
        self.check(program, (10, 10))
        self.assertEqual(device.calls, tried)
        driver.programmatic = set()
        self.check(program, (5, 6, 11))
        self.assertEqual([str(r) for r in self.refused], [])
        (entry,) = report()
        self.assertEqual(entry.calls - entry.captured_calls, 3)

    def test_kernel_that_a_node_refuses(self) -> None:
        """Sizes whose kernels the driver does not let the nodes launch have a recording of their own."""
        program = self.program(mlp)
        driver = program.device.driver

        def cuGraphInstantiate(*args: Any) -> Any:
            return cu.CUresult.CUDA_ERROR_NOT_SUPPORTED, None

        with mock.patch.object(driver, "cuGraphInstantiate", cuGraphInstantiate), self.assertLogs(sized.__name__, "INFO") as logs:
            self.check_captured(program, (37, 37, 38, 39, 40, 41, 42, 43, 37, 38, 39))
        self.assertRegex(logs.output[0], "cannot be set to .*cuGraphInstantiate: CUDA_ERROR_NOT_SUPPORTED")
        (entry,) = report()
        self.assertEqual(entry.buckets, [[48]] * len(entry.buckets))
        self.assertGreater(len(entry.buckets), 1)

    def test_incomplete_map(self) -> None:
        """Where the map lacks something the proof finds it, and results are right."""
        compiled = compiled_of(mlp, *MLP_SHAPES)
        (info,) = compiled.graph.info.functions
        for what, size_map in incomplete(info.sizes):
            with self.subTest(what):
                trees.reset_cudagraph_trees()
                self.refused.clear()
                wrong = dataclasses.replace(compiled.graph.info, functions=(dataclasses.replace(info, sizes=size_map),))
                graph = dataclasses.replace(compiled.graph, info=wrong)
                with modelled_device(SizedDriver, SizedDevice) as device:
                    program = SizedProgram(device, dataclasses.replace(compiled, graph=graph), "node_update")
                    self.check(program, (37, 37, 5, 6, 7, 9, 64, 65))
                self.assertTrue(self.refused)

    def decided(self, uncaptured_us: float) -> SizedProgram:
        """Return a program whose graph was measured faster: 10 us a call."""
        few = {"WARMUP_SAMPLES": 0, "SAMPLES": 1, "MAX_SAMPLES": 1, "DEVICE_SAMPLES": 1, "MAX_DEVICE_SAMPLES": 1}
        costs = itertools.cycle([timing.Cost(*[timing.Estimate(us)] * 3) for us in (uncaptured_us, 10)])
        program = self.program(mlp, force=None)
        with mock.patch.multiple(timing, **few), mock.patch.object(timing.Samples, "cost", lambda _: next(costs)):
            self.check(program, range(30, 40))
            (entry,) = report()
            # Calls that capture library calls at their sizes are not timed.
            self.assertEqual(entry.choice, "undecided")
            self.check(program, range(30, 40))
        self.assertEqual((entry.choice, entry.sizes), ("node_update", []))
        self.assertIn("captured", text.facts(entry))
        return program

    def test_new_size_after_the_decision(self) -> None:
        """Selection makes one decision for all sizes of a function. Calls of new sizes follow that decision."""
        program = self.decided(1e6)
        (entry,) = report()
        captured = entry.captured_calls
        self.check(program, (51, 52, 53))
        self.assertEqual(entry.captured_calls - captured, 3)

    def test_size_that_comes_seldom(self) -> None:
        """If preparing a size takes longer than its calls gain, they run uncaptured until it came often enough."""
        program = self.decided(110)
        (entry,) = report()
        captured = []
        for function in itertools.chain(*(memory.functions for memory in many_sizes._memories.values())):
            function.preparation.us = 225
            function.preparation.budget_us = 1e6
        for n in (51, 51, 51, 52, 51, 51, 52):
            before = entry.captured_calls
            self.check(program, (n,))
            captured.append(entry.captured_calls - before)
        # Twice 225 us are what 4.5 calls gain.
        self.assertEqual(captured, [0, 0, 0, 0, 0, 1, 0])

    def test_new_sizes_of_late(self) -> None:
        """A new size will come as often as sizes did of late: not if each call has another one."""
        entry = types.SimpleNamespace(
            is_graph=True, saved_us=10.0, calls=0, captured_calls=0, num_sizes=10, timings_us={NO_GRAPH: 1e6}
        )
        preparation = Preparation()
        preparation.us = 25.0

        def due(sizes: Sequence[int], *, apart: int) -> int:
            found = 0
            for n in sizes:
                entry.calls += apart
                entry.num_sizes += 1
                found += preparation.is_due((n,), entry)
            return found

        self.assertEqual(due([11], apart=200), 1)
        self.assertLess(due(range(100, 150), apart=1), 8)
        self.assertEqual(due(range(200, 250), apart=1), 0)
        self.assertGreater(due(range(300, 310), apart=50), 4)

    def test_preparing_takes_what_calls_gain(self) -> None:
        """However seldom sizes come, and however long preparing takes, a program is not much slower."""
        for saved, preparing, num_sizes, pays in (
            (60.0, 500.0, 100, True),
            (60.0, 500.0, 2000, False),
            (60.0, 20_000.0, 100, False),
            (1.0, 5000.0, 10, False),
        ):
            entry = types.SimpleNamespace(
                is_graph=True, saved_us=saved, calls=0, captured_calls=0, num_sizes=1, timings_us={NO_GRAPH: 100.0}
            )
            preparation, prepared, spent = Preparation(), set[int](), 0.0
            numbers = random.Random(0)
            for _ in range(5000):
                n = numbers.randrange(num_sizes)
                entry.calls += 1
                if n in prepared:
                    entry.captured_calls += 1
                elif preparation.is_due((n,), entry):
                    prepared.add(n)
                    spent += preparing
                    preparation.note(preparing)
                gained = entry.captured_calls * saved
                self.assertLessEqual(spent, SPENT * gained + ALLOWED * 100.0 * entry.calls + preparing)
            self.assertEqual(len(prepared) > 0.9 * num_sizes, pays, len(prepared))

    def test_gains_are_not_saved_up(self) -> None:
        """After calls of prepared sizes, calls of new sizes prepare no more than they would after others."""
        entry = types.SimpleNamespace(
            is_graph=True, saved_us=60.0, calls=0, captured_calls=0, num_sizes=1, timings_us={NO_GRAPH: 100.0}
        )
        preparation = Preparation()
        preparation.note(500.0)
        entry.calls = entry.captured_calls = 100_000
        prepared = 0
        # Two new sizes take turns, so that each comes often.
        for call in range(400):
            entry.calls += 1
            if preparation.is_due((call % 2, prepared), entry):
                prepared += 1
                preparation.note(500.0)
        self.assertEqual(prepared, SAVED)

    def test_what_preparing_takes(self) -> None:
        """The mean of the first sizes that are prepared as later ones are, and later one that follows what changes."""
        preparation = Preparation()
        for us in (300.0, 100.0, -5.0):
            preparation.note(us)
        self.assertAlmostEqual(preparation.us, 400 / 3)
        for _ in range(200):
            preparation.note(50.0)
        self.assertAlmostEqual(preparation.us, 50, delta=1)
        # The first sizes beside the recording's are proven, which takes longer.
        program = self.program(mlp)
        noted: list[float] = []
        with mock.patch.object(Preparation, "note", lambda self, us: noted.append(us)):
            self.check(program, (37, 37, 37, *range(20, 20 + proofs.PROVEN_SIZES)))
            self.assertEqual(noted, [])
            self.check(program, (50, 51))
        self.assertEqual(len(noted), 2)

    def test_remembered(self) -> None:
        """What an earlier process decided holds for all sizes: the second call records."""
        program = self.program(mlp, force=None)
        with tempfile.TemporaryDirectory() as directory:
            entry = store.Entry(Path(directory), {})
            entry.save(store.Decision("node_update", [Reason.of(Code.NOT_FASTER)], {}))
            asked = []
            with mock.patch.object(store, "entry_for", lambda spec, inputs, static: asked.append(inputs) or entry):
                self.check_captured(program, (37, 5, 6, 40, 7))
        # No size is part of the key.
        self.assertEqual(asked, [()])
        (found,) = report()
        self.assertTrue(found.remembered)

    def test_memory(self) -> None:
        """A recording takes the memory of the largest size of its bucket, and proofs take no more."""
        program = self.program(lambda x: (x @ x.t()).sin() @ x, (37, 8))
        self.check(program, (50, 50))

        def reserved() -> int:
            return sum(b.nbytes for b in program.device.blocks if b.pool is not None)

        recorded = reserved()
        self.check(program, (64, 40, 9, 33, 64, 5))
        self.assertEqual([str(r) for r in self.refused], [])
        self.assertLessEqual(reserved(), recorded + 64 * len(report()[0].buckets))
        self.assertLessEqual(recorded, 1.1 * 4 * (64 * 64 + 64 * 64))

    def reserved_in_pool(self, program: SizedProgram, sizes: Sequence[int]) -> int:
        """Return what the pool of recordings takes after calls at these sizes."""
        self.check(program, sizes)
        pool = many_sizes.memory_of(manager_of(0)).pool
        return sum(b.nbytes for b in program.device.blocks if b.pool == pool)

    def test_memory_of_larger_buckets(self) -> None:
        """Memory of recordings for smaller sizes is let go."""
        reserved = []
        for sizes in ((64, 64, 40), (5, 5, 6, 9, 17, 33, 40, 64)):
            trees.reset_cudagraph_trees()
            reserved.append(self.reserved_in_pool(self.program(lambda x: (x @ x.t()).sin() @ x, (37, 8)), sizes))
        self.assertLessEqual(reserved[1], 1.1 * reserved[0])

    def test_graphs_of_smaller_buckets(self) -> None:
        """They and their memory are gone before a larger recording is made, and do not wait for Python's collector."""
        graphs = []
        init = sized.SizedRecording.__init__

        def made(recording: Any, *args: Any) -> None:
            self.assertEqual([b for b in program.device.blocks if b.pool is None and b.is_free], [])
            init(recording, *args)
            graphs.append(weakref.ref(recording.graph))

        program = self.program(mlp)
        gc.disable()
        self.addCleanup(gc.enable)
        with mock.patch.object(sized.SizedRecording, "__init__", made):
            self.check(program, (5, 5, 9, 17, 33, 64))
        self.assertEqual([graph() is not None for graph in graphs], [False, False, False, False, True])

    def test_memory_of_topologies(self) -> None:
        """Recordings of several topologies take the memory of one."""
        program = self.program(mlp)
        reserved = self.reserved_in_pool(program, (127, 127))
        # Parts of large products have temporary memory of their own.
        self.assertLessEqual(self.reserved_in_pool(program, (8, 9, 120, 7, 128, 9)), 1.1 * reserved)
        (entry,) = report()
        self.assertGreater(len(entry.buckets), 1)

    def test_one_workspace(self) -> None:
        """Recordings and library calls that are captured alone have one workspace of cuBLAS."""
        program = self.program(mlp)
        self.check_captured(program, (127, 127, 5, 120))
        nbytes = 4 * WORKSPACE_FLOATS
        (workspace,) = (b for b in program.device.blocks if b.pool is not None and b.nbytes == nbytes)
        self.assertTrue(workspace.is_free)

    def test_memory_of_a_proof(self) -> None:
        """What the uncaptured run at further sizes takes is freed, a workspace of cuBLAS, too."""
        program = self.program(mlp)
        self.check(program, (127, 127, 5, 120, 7, 9))
        device = program.device
        (name,) = symbols(program.inputs)
        given = program.make_inputs({name: 111})
        device.empty_cache()
        launch_kernel = device.launch_kernel

        def multiply(*args: Any) -> None:
            if device.captured is None:
                device.workspace(WORKSPACE_FLOATS)
            launch_kernel(*args)

        with mock.patch.object(device, "launch_kernel", multiply):
            outputs = program.run(given, captured=True)
        self.assertEqual(device.workspaces, {})
        self.assertEqual([b for b in device.blocks if b.pool is None and b.is_free], [], outputs)

    def test_bounds(self) -> None:
        """A function has a bounded number of recordings, and makes no more of them after a while."""
        # Up to 41 one kernel multiplies.
        sizes = (63, 63, 8, 60, 9, 64, 7, 8, 63, 5, 62)
        for limits, captured in (({"MAX_RECORDINGS": 1}, len(sizes) - 2), ({"MAX_CAPTURES": 1}, 4)):
            with self.subTest(limits), mock.patch.multiple(many_sizes, **limits):
                trees.reset_cudagraph_trees()
                reset_report()
                self.check(self.program(lambda x, w: (x @ w).sin(), (37, 64), (64, 32)), sizes)
                (entry,) = report()
                self.assertEqual((len(entry.buckets), entry.captured_calls), (1, captured))
        self.assertEqual([str(r) for r in self.refused], [])

    def test_attention(self) -> None:
        """What an operator returns lies in the recording's memory, or is an output of the call."""
        for is_returned in (False, True):
            with self.subTest(is_returned=is_returned):
                trees.reset_cudagraph_trees()
                reset_report()
                op = torch.ops.aten._scaled_dot_product_efficient_attention

                def fn(x: torch.Tensor, w: torch.Tensor, is_returned: bool = is_returned) -> torch.Tensor:
                    h = (x @ w).view(2, -1, 2, 8).transpose(1, 2)
                    out = op(h, h.sin(), h, None, False, 0.0, False)[0]
                    return out if is_returned else out.cos() @ out.sin().transpose(2, 3)

                program = SizedProgram(self.device(), compiled_of(fn, (37, 16), (16, 32)), "node_update")
                self.check_captured(program, (38, 38, 6, 64, 40, 2, 66, 38))

    def test_attention_of_training(self) -> None:
        """A forward with attention and its backward."""
        forward = torch.ops.aten._scaled_dot_product_efficient_attention
        backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward

        def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
            h = (x @ w).view(2, -1, 2, 8).transpose(1, 2)
            q = h.sin()
            out, *saved = forward(h, q, h, None, True, 0.0, False)
            return backward(out.cos(), h, q, h, None, out, *saved, 0.0, [True, True, True, False])[:3]

        program = SizedProgram(self.device(), compiled_of(fn, (37, 16), (16, 32)), "node_update")
        self.check_captured(program, (38, 38, 6, 64, 40, 2, 66, 38))

    def test_convolutions(self) -> None:
        """Strided, padded, with and without a bias: a batch and a length that vary."""
        convolve = torch.nn.functional.conv1d

        def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            h = torch.nn.functional.gelu(convolve(x, w, padding=1))
            return convolve(h, v, b, stride=2, padding=1).relu()

        def program() -> None:
            with torch.no_grad():
                shapes = (8, 4, 3), (6, 8, 3), (6,)
                torch.compile(fn)(dynamic(3, 4, 37, dims=(0, 2)), *(torch.zeros(s, device="cuda") for s in shapes))

        (found,) = compiled(program)
        sized = SizedProgram(self.device(), found, "node_update")
        first, second = sorted(symbols(found.inputs))
        for n, m in ((3, 37), (3, 37), (3, 38), (2, 64), (4, 5), (4, 40), (7, 41), (3, 37)):
            given = sized.make_inputs({first: n, second: m})
            expected = sized.call(given, captured=False)
            self.assertEqual(sized.call(given, captured=True), expected, f"{n}, {m}", atol=0, rtol=0)
        self.assertEqual(self.refused, [])

    def test_operands_that_cannot_be_told_apart(self) -> None:
        """At size 1 a matrix is its transpose. Nothing is recorded at this size, and others are captured."""

        def fn(x: torch.Tensor) -> torch.Tensor:
            product = x @ x.t()
            return torch.addmm(product, product, product.t())

        self.check(self.program(fn, (37, 8)), (1, 1, 1, 37, 5, 6, 7, 37))
        self.assertEqual([str(r) for r in self.refused], [])
        (entry,) = report()
        self.assertGreaterEqual(entry.captured_calls, 4)

    def test_settings_of_precision(self) -> None:
        """A program may set precisions by newer names, or by older ones. Entries are of these."""
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        precision = torch.get_float32_matmul_precision()
        found = [library.settings()]
        for of in (matmul, cudnn.conv):
            before = of.fp32_precision
            of.fp32_precision = "ieee" if before == "tf32" else "tf32"
            found.append(library.settings())
            of.fp32_precision = before
        self.addCleanup(torch.set_float32_matmul_precision, precision)
        torch.set_float32_matmul_precision("high")
        high = library.settings()
        torch.set_float32_matmul_precision("highest")
        self.assertNotEqual(library.settings(), high)
        self.assertEqual(len({*found}), 3)

    def test_result_of_length_one(self) -> None:
        """The stride of a length of 1 is not the one that generated code expects."""
        convolve = torch.nn.functional.conv1d
        program = self.program(lambda x, w: convolve(x.mT, w.mT).sin(), (37, 3, 4), (2, 3, 4))
        self.check_captured(program, (37, 37, 2, 5, 64, 33))

    def test_delivered_values(self) -> None:
        """CPU values of each call are words of its kernels, as the sizes are."""

        def fn(x: torch.Tensor, y: torch.Tensor, *on_cpu: torch.Tensor) -> tuple[torch.Tensor, ...]:
            a, b, c = on_cpu
            # The kernel that reads the first value is launched last.
            last = y * c.to(x.device).sum()
            first = torch.nn.functional.dropout(x * b, 0.3) + a.sin().to(x.device)
            return first, last + b

        def program() -> None:
            on_cpu = torch.zeros((), dtype=torch.float64), torch.zeros(()), torch.zeros(3)
            with torch.no_grad():
                torch.compile(fn)(dynamic(37, 16), dynamic(37, 5), *on_cpu)

        (found,) = compiled(program)
        device = self.device()
        with delivering(device):
            sized = SizedProgram(device, found, "node_update")
            # Each call has values of its own.
            self.check_captured(sized, (37, 37, 5, 6, 7, 9, 64, 63, 9, 37, 64, 63, 9, 9, 5))

    def test_other_programs(self) -> None:
        """What is no operator of a known library has a recording for each size, and the log says why."""
        program = self.program(lambda x: x.sort(0).values, (37, 8))
        self.check(program, (37, 37, 5))
        self.assertEqual([r.code for r in self.refused], [Code.CALL_AT_OTHER_SIZES])
        for entry in report():
            self.assertIn("a recording for each size: what aten.sort", text.facts(entry))

    def test_other_calls(self) -> None:
        """
        PyGraph does not know what some operators do at other sizes: embedding bags, attention with dropout, and convolutions
        if cuDNN times its kernels.
        """
        functional, efficient = torch.nn.functional, torch.ops.aten._scaled_dot_product_efficient_attention
        fill = lambda *shape: torch.zeros(shape, device="cuda")  # noqa: E731
        programs = {
            "a convolution with torch.backends.cudnn.benchmark": lambda: torch.compile(functional.conv1d)(
                dynamic(3, 4, 37, dims=(2,)), fill(4, 4, 3)
            ),
            "aten._embedding_bag": lambda: torch.compile(lambda x, w: functional.embedding_bag(x.long(), w))(
                dynamic(37, 5), fill(10, 8)
            ),
            "": lambda: torch.compile(lambda x: efficient(x, x, x, None, False, 0.3, False)[0].sin())(
                dynamic(2, 2, 37, 8, dims=(2,))
            ),
        }
        for call, program in programs.items():
            with torch.no_grad(), symbolic_graphs(program) as graphs:
                ((graph, _),) = graphs
            for info in graph.info.functions:
                if call:
                    with torch.backends.cudnn.flags(benchmark=True):
                        reason = not_for_many_sizes(mock.Mock(info=info), [])
                    self.assertEqual(reason.code, Code.CALL_AT_OTHER_SIZES)
                    self.assertIn(call, reason.text)
                else:
                    # The operator is not captured at all.
                    self.assertTrue(all(isinstance(c, KernelAt) for c in info.sizes.calls))

    def test_kernel_that_takes_scratch_memory(self) -> None:
        """Its memory was allocated for one grid. Blocks of a larger one would write behind it."""
        program = self.program(mlp)
        for kernel in program.runner.objects.values():
            if hasattr(kernel, "launchers"):
                kernel.launchers[0].global_scratch = 128
        self.check(program, (37, 37, 5, 64))
        self.assertEqual([r.code for r in self.refused], [Code.CALL_AT_OTHER_SIZES])

    def test_cudnn_attention(self) -> None:
        """cuDNN builds a plan for each size: the log names the setting that avoids it."""
        (info,) = compiled_of(mlp, *MLP_SHAPES).graph.info.functions
        calls = [OperatorAt("aten._scaled_dot_product_cudnn_attention.default", (), (), ())]
        size_map = dataclasses.replace(info.sizes, calls=(*info.sizes.calls, *calls))
        spec = mock.Mock(info=dataclasses.replace(info, sizes=size_map))
        reason = not_for_many_sizes(spec, [])
        self.assertEqual(reason.code, Code.CUDNN_PLANS)
        self.assertIn("TORCH_CUDNN_SDPA_DEPRIORITIZED", reason.advice)

    def test_off(self) -> None:
        """Without the option nothing is known of the sizes, and nothing is tried."""
        program = compiled_of(mlp, *MLP_SHAPES)
        (info,) = program.graph.info.functions
        off = dataclasses.replace(program.graph.info, functions=(dataclasses.replace(info, sizes=None),))
        program = dataclasses.replace(program, graph=dataclasses.replace(program.graph, info=off))
        with mock.patch.object(many_sizes, "ManySizes") as many:
            self.check(SizedProgram(self.device(), program, "node_update"), (37, 37, 5, 6))
        many.assert_not_called()
        self.assertEqual([r.sizes for r in report()], [[37], [5], [6]])


def feed_forward(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x @ w) @ v + x


def encoder(x: torch.Tensor, qkv: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A layer of BERT with two heads."""
    n, width = x.shape
    y = torch.nn.functional.layer_norm(x, (width,))
    q, k, values = ((y @ qkv).view(n, 3, 2, width // 2)).transpose(0, 2).unbind(1)
    scores = torch.nn.functional.dropout(torch.softmax(q @ k.transpose(1, 2), -1), 0.1)
    x = x + (scores @ values).transpose(0, 1).reshape(n, width)
    return torch.nn.functional.dropout(feed_forward(x, w, v), 0.1)


@functools.cache
def compiled_training(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> list[Any]:
    def program() -> None:
        x = torch.zeros(37, shapes[0][0], device="cuda", requires_grad=True)
        mark_dynamic(x, 0)
        torch.compile(fn)(x, *(torch.zeros(s, device="cuda", requires_grad=True) for s in shapes)).sum().backward()

    return compiled(program)


class TrainingTestCase(ManySizesTestCase):
    def programs(self, fn: Callable[..., Any], *shapes: tuple[int, ...], force: str | None = "node_update") -> None:
        device = self.device()
        forward, backward = compiled_training(fn, *shapes)
        self.forward = SizedProgram(device, forward, force, "forward")
        self.backward = SizedProgram(device, backward, force, "backward")

    def step(self, given: Sequence[Any], tangent: torch.Tensor, *, captured: bool) -> list[torch.Tensor]:
        """Return the output and the gradients of a step, as AOTAutograd runs it."""
        output, *saved = self.forward.run(given, captured=captured)
        sizes = [n for n in saved if isinstance(n, int)]
        tensors = [t for t in saved if not isinstance(t, int)]
        gradients = self.backward.run([*sizes, *tensors, tangent], captured=captured)
        return [on_host(t).clone() for t in (output, *gradients) if isinstance(t, torch.Tensor)]

    def check_steps(self, sizes: Sequence[int]) -> None:
        """Compare each step, and the generator behind it, with an uncaptured step."""
        (name,) = symbols(self.forward.inputs)
        (generator,) = torch.cuda.default_generators
        for n in sizes:
            given = self.forward.make_inputs({name: n})
            tangent = self.forward.device.tensor(torch.randn(n, 16))
            before = generator.get_state()
            expected = self.step(given, tangent, captured=False)
            after = generator.get_state()
            generator.set_state(before)
            self.assertEqual(self.step(given, tangent, captured=True), expected, f"{n}", atol=0, rtol=0)
            self.assertEqual(generator.get_state(), after)
        self.assertEqual([str(r) for r in self.refused], [])

    def check_captured_steps(self, sizes: Sequence[int]) -> None:
        self.check_steps(sizes)
        self.assertEqual([entry.mode for entry in report()], ["forward", "backward"])
        for entry in report():
            self.assertEqual((entry.calls, entry.captured_calls), (len(sizes) - 2, len(sizes) - 2))


class TrainingTest(TrainingTestCase):
    def test_steps(self) -> None:
        """What a forward saves is an output with the sizes of the call, and the backward binds it."""
        self.programs(feed_forward, (16, 24), (24, 16))
        self.check_captured_steps([n for n in SIZES if n > 1])
        # No guard admits these.
        self.check_steps((0, 1))

    def test_memory_of_what_is_saved(self) -> None:
        """What the backward alone reads takes as much memory at each size, a block for each dtype."""
        self.programs(encoder, (16, 48), (16, 24), (24, 16))
        (name,) = symbols(self.forward.inputs)
        found = []
        for n in (40, 40, 64, 33, 50):
            output, *saved = self.forward.run(self.forward.make_inputs({name: n}), captured=True)
            tensors = [t for t in saved if isinstance(t, torch.Tensor)]
            found.append({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors})
        blocks = [sorted(nbytes for address, nbytes in storages.items()) for storages in found[2:]]
        self.assertEqual(blocks[0], blocks[1])
        self.assertEqual(blocks[0], blocks[2])
        self.assertLess(len(blocks[0]), len(found[0]))

    def test_dropout(self) -> None:
        """A step with dropout draws what the uncaptured step draws."""
        self.programs(encoder, (16, 48), (16, 24), (24, 16))
        self.check_captured_steps((9, 9, 2, 8, 16, 17, 3, 15, 4, 5, 7, 6, 10, 12, 11, 13, 14, 18, 31, 32, 9))
        self.assertEqual([len(entry.buckets) for entry in report()], [1, 1])
        (name,) = symbols(self.forward.inputs)
        given = self.forward.make_inputs({name: 5})
        first, second = (self.forward.call(given, captured=True)[0] for _ in range(2))
        self.assertNotEqual(first, second)
        # Only the replay of a captured graph tells the generator, so that one goes before.
        self.assertGreater(self.forward.device.driver.own_launches, 0)
        state = torch.cuda.default_generators[0].get_state()
        for n in (5, 6, 7, 10, 11):
            given = self.forward.make_inputs({name: n})
            torch.cuda.default_generators[0].set_state(state)
            expected, after = self.forward.call(given, captured=False)[0], torch.cuda.default_generators[0].get_state()
            torch.cuda.default_generators[0].set_state(state)
            self.assertEqual(self.forward.call(given, captured=True)[0], expected, atol=0, rtol=0)
            self.assertEqual(torch.cuda.default_generators[0].get_state(), after)

    def test_results_that_differ_once(self) -> None:
        """A further call at these sizes is rehearsed: its inputs, which runs overwrite, are as the call had them."""
        self.programs(encoder, (16, 48), (16, 24), (24, 16))
        self.check_steps((9, 9, 2, 8, 16, 17, 3, 15))
        self.assertTrue(any(f.spec.reused_input_idxs for m in many_sizes._memories.values() for f in m.functions))
        repeats = Rehearsal.repeats_itself
        with (
            mock.patch.object(graph_sized, "UNPROVEN_ROWS", 1),
            mock.patch.object(Rehearsal, "repeats_itself", lambda self: (repeats(self), False)[1]),
        ):
            with mock.patch.object(proofs, "_are_identical", lambda a, b: False):
                self.check_steps((7, 12))
            proven = counters["pygraph"]["proven_sizes"]
            self.check_steps((7, 12))
        self.assertEqual(counters["pygraph"]["proven_sizes"] - proven, 4)

    def test_one_of_both(self) -> None:
        """A forward or a backward that cannot be recorded for many sizes has a recording for each size."""
        may_record = many_sizes.may_record
        for mode in ("forward", "backward"):
            trees.reset_cudagraph_trees()
            reset_report()
            by_size = lambda deployment, inputs, mode=mode: (  # noqa: E731
                deployment.spec.mode != mode and may_record(deployment, inputs)
            )
            with self.subTest(mode), mock.patch.object(many_sizes, "may_record", by_size):
                self.programs(feed_forward, (16, 24), (24, 16))
                self.check_steps((9, 5) * 4)
                captured = {entry.mode: entry.captured_calls for entry in report() if entry.num_sizes}
                self.assertEqual([*captured.values()], [6])
                self.assertEqual([entry.choice for entry in report()], ["node_update"] * 3)

    def test_selected(self) -> None:
        """A backward is recorded once it is known whether its gradients outlive a step."""
        few = {"WARMUP_SAMPLES": 0, "SAMPLES": 1, "MAX_SAMPLES": 1, "DEVICE_SAMPLES": 1, "MAX_DEVICE_SAMPLES": 1}
        cost = mock.Mock(side_effect=[timing.Cost(*[timing.Estimate(us)] * 3) for us in (100, 100, 10, 10)])
        self.programs(feed_forward, (16, 24), (24, 16), force=None)
        with mock.patch.multiple(timing, **few), mock.patch.object(timing.Samples, "cost", cost):
            self.check_steps([*range(30, 40), *range(30, 40)])
        self.assertEqual([entry.choice for entry in report()], ["node_update"] * 2)


class SimulatedDevice(NoisySimulation):
    """Times of an H100's order, in microseconds, of what a SizedDevice does."""

    def attach(self, device: SizedDevice) -> None:
        driver = device.driver
        launch_kernel, capture, set_node, launch = device.launch_kernel, device.capture_operator, driver._set, driver.launch

        def launch_one(kernel: Any, grid: tuple[int, ...], parameters: list[bytes]) -> None:
            if device.captured is None:
                self.work(20, 2)
            launch_kernel(kernel, grid, parameters)

        def launch_graph(executable: int, order: Any = None) -> None:
            self.replay(8, 3 * len(driver.graphs[driver.executables[executable]]))
            launch(executable, order)

        def after(us: float, fn: Callable[..., Any], *args: Any) -> Any:
            self.host += us
            return fn(*args)

        device.launch_kernel, driver.launch = launch_one, launch_graph
        device.capture_operator = functools.partial(after, 30, capture)
        driver._set = functools.partial(after, 2, set_node)

    @contextlib.contextmanager
    def patched(self) -> Iterator[SimulatedDevice]:
        new_event = torch.cuda.Event
        event = lambda *args, **kwargs: self.event(**kwargs) if kwargs else new_event(*args)  # noqa: E731
        with (
            mock.patch.object(timing, "time", types.SimpleNamespace(perf_counter=lambda: self.host / 1e6)),
            mock.patch("torch.cuda.Event", event),
            mock.patch("torch.cuda._sleep", self.sleep),
        ):
            yield self


class SelectionTest(ManySizesTestCase):
    few_sizes = by_size.FEW_SIZES

    def captured_calls(self, sizes: Sequence[int]) -> list[int]:
        """Run a program at these sizes, one a call. Return the calls that a recording served."""
        simulation = SimulatedDevice(random.Random(0))
        program = self.program(mlp, force=None)
        simulation.attach(program.device)
        (name,) = symbols(program.inputs)
        inputs = {n: program.make_inputs({name: n}) for n in {*sizes}}
        captured = []
        with simulation.patched(), mock.patch.object(store, "entry_for", lambda *args: None):
            for call, n in enumerate(sizes):
                before = sum(entry.captured_calls for entry in report())
                program.run(inputs[n], captured=True)
                if sum(entry.captured_calls for entry in report()) > before:
                    captured.append(call)
                simulation.work(5, 0)
        return captured

    def test_sizes_that_vary(self) -> None:
        """Calls are captured from the one that records on, while the graph is timed and after that."""
        draw = random.Random(0).randint
        ring = [draw(2, 32) for _ in range(20)]
        sequences = {"a ring": ring * 5, "one more in each call": range(2, 102)}
        for name, sizes in sequences.items():
            with self.subTest(name), mock.patch.object(timing, "MAX_SAMPLES", timing.SAMPLES):
                trees.reset_cudagraph_trees()
                reset_report()
                captured = self.captured_calls(sizes)
                # The call that records is none of them.
                self.assertEqual(captured, [*range(captured[0], 100)])
                self.assertLess(captured[0], 24 + self.few_sizes)
                self.assertEqual([entry.sizes for entry in report()], [[]])

    def test_sizes_that_take_turns(self) -> None:
        """Few sizes have recordings of their own, which stay when further sizes come."""
        with mock.patch.object(timing, "MAX_SAMPLES", timing.SAMPLES):
            captured = self.captured_calls([30, 7, 12] * 100 + [5, 6, 8, 9] * 15 + [30, 7, 12] * 5)
        found = [(entry.sizes, entry.choice, len(entry.buckets)) for entry in report()]
        self.assertEqual(found, [([n], "node_update", 0) for n in (30, 7, 12)] + [([], "node_update", 1)])
        # Of the recording for many sizes.
        self.assertEqual(captured, [*range(captured[0], 360)])


class FewSizesTest(ManySizesTestCase):
    few_sizes = by_size.FEW_SIZES

    def test_forced(self) -> None:
        """The first sizes have recordings of their own. All others share one."""
        self.check(self.program(mlp), (37, 5, 9) * 4 + (6, 6, 7, 8, 37, 5, 9, 33, 6))
        self.assertEqual([str(r) for r in self.refused], [])
        self.assertEqual([(entry.sizes, entry.buckets) for entry in report()], [([37], []), ([5], []), ([9], []), ([], [[48]])])
        *_, shared = report()
        self.assertEqual((shared.calls, shared.captured_calls, shared.num_sizes), (4, 4, 4))

    def test_function_that_cannot_share(self) -> None:
        """The report of each size says why it has a recording of its own, once sizes vary."""
        self.check(self.program(lambda x: x.sort(0).values, (37, 8), force=None), (37, 5, 9) * 4)
        self.assertEqual(self.refused, [])
        self.check(self.program(lambda x: x.sort(0).values, (37, 8), force=None), (37, 5, 9, 6))
        self.assertEqual([r.code for r in self.refused], [Code.CALL_AT_OTHER_SIZES])
        self.assertIn("a recording for each size: what aten.sort", text.facts([*report()][-1]))

    def test_sizes_to_capture(self) -> None:
        """Where the program names the sizes to capture, each has a recording, and no other size is captured."""
        sizes = (37, 5, 9, 6)
        with config.patch({"triton.cudagraph_capture_sizes": sizes}):
            self.check(self.program(mlp), (*sizes * 3, 7, 7, 7))
        self.assertEqual([entry.sizes for entry in report()], [[n] for n in sizes])

    def test_given_up(self) -> None:
        """If the recording for many sizes is given up, recordings of the first sizes stay."""
        program = self.program(mlp)
        self.check(program, (37, 5, 9) * 4 + (6, 6, 7, 8, 10))
        with self.outputs_elsewhere(), mock.patch.object(graph_sized, "UNPROVEN_ROWS", 1):
            self.check(program, (11, 11))
        self.check(program, (6, 6, 6, 37, 5, 9))
        self.assertEqual([r.code for r in self.refused], [Code.DIFFERS_AT_SIZES])
        self.assertEqual([entry.sizes for entry in report()], [[37], [5], [9], [6]])
        self.assertEqual([entry.choice for entry in report()], ["node_update"] * 4)


class FewSizesTrainingTest(TrainingTestCase):
    few_sizes = by_size.FEW_SIZES

    def test_steps(self) -> None:
        """Steps of the first sizes and of others take turns."""
        self.programs(feed_forward, (16, 24), (24, 16))
        self.check_steps((9, 5, 7) * 3 + (6, 6, 9, 8, 5, 6, 7, 33, 9, 64, 8, 5))
        self.assertEqual([entry.sizes for entry in report()], [[9], [9], [5], [5], [7], [7], [], []])
        self.assertEqual([len(entry.buckets) for entry in report()][-2:], [1, 1])

    def test_selected(self) -> None:
        """Steps of all sizes but the first few are selected for together."""
        few = {"WARMUP_SAMPLES": 0, "SAMPLES": 1, "MAX_SAMPLES": 1, "DEVICE_SAMPLES": 1, "MAX_DEVICE_SAMPLES": 1}
        costs = itertools.cycle([timing.Cost(*[timing.Estimate(us)] * 3) for us in (100, 100, 10, 10)])
        self.programs(feed_forward, (16, 24), (24, 16), force=None)
        with mock.patch.multiple(timing, **few), mock.patch.object(timing.Samples, "cost", lambda _: next(costs)):
            self.check_steps([*range(30, 40)] * 3)
        self.assertEqual([(entry.sizes, entry.choice) for entry in report()], [([], "node_update")] * 2)


class PythonManySizesTest(ByPython, ManySizesTestCase):
    """Replays where nothing is compiled."""

    test_topologies = ManySizesTest.test_topologies
    test_clusters = ManySizesTest.test_clusters
    test_own_graphs_are_bounded = ManySizesTest.test_own_graphs_are_bounded
    test_switched_off_in_one_graph = ManySizesTest.test_switched_off_in_one_graph
    test_outputs = ManySizesTest.test_outputs
    test_node_that_refuses = ManySizesTest.test_node_that_refuses


def incomplete(size_map: SizeMap) -> Iterator[tuple[str, SizeMap]]:
    """Yield maps in which a number is another one at most sizes."""
    steps = Steps(len(size_map.sizes), size_map.steps)
    # Right at the first size, and at no other.
    wrong = steps.add("minimum", 0, steps.constant(37))
    wrong = steps.add("maximum", wrong, steps.constant(37))
    size_map = dataclasses.replace(size_map, steps=tuple(steps.steps))

    def replace(i: int, call: Any) -> SizeMap:
        return dataclasses.replace(size_map, calls=(*size_map.calls[:i], call, *size_map.calls[i + 1 :]))

    for i, call in enumerate(size_map.calls):
        if isinstance(call, KernelAt):
            for k, word in enumerate(call.words):
                if word.value == 0:
                    words = (*call.words[:k], dataclasses.replace(word, value=wrong), *call.words[k + 1 :])
                    yield f"word {k} of {call.kernel}", replace(i, dataclasses.replace(call, words=words))
            for k, (name, value) in enumerate(call.arguments):
                if value == 0 and name == "xnumel":
                    arguments = (*call.arguments[:k], (name, wrong), *call.arguments[k + 1 :])
                    yield f"grid of {call.kernel}", replace(i, dataclasses.replace(call, arguments=arguments))
        else:
            operand = call.operands[0]
            lacking = dataclasses.replace(operand, size=(wrong, *operand.size[1:]))
            yield f"operand of {call.name}", replace(i, dataclasses.replace(call, operands=(lacking, *call.operands[1:])))


def main() -> None:
    test = RandomProgramsTest()
    run_programs(test, test.run_program)


if __name__ == "__main__":
    if wants_programs():
        main()
    else:
        run_tests()
