# Owner(s): ["module: inductor"]
"""
Calls of a captured graph side by side: what code generation tells of calls, the order that follows
from it, and random programs whose nodes run in any order that the graph allows.

    python test_pygraph_schedule.py --programs 2000 [--seed 0]
"""

from __future__ import annotations

import ast
import collections
import contextlib
import ctypes
import dataclasses
import functools
import itertools
import os
import pickle
import random
import re
import sys
import textwrap
import types
import warnings
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
from torch._dynamo import mark_dynamic
from torch._inductor import cudagraph_trees as trees
from torch._inductor.pygraph import report, reset_report
from torch._inductor.pygraph.capture import bound
from torch._inductor.pygraph.compile import describe
from torch._inductor.pygraph.compile.calls import describe_calls
from torch._inductor.pygraph.graph import prelude
from torch._inductor.pygraph.graph.edges import chain_of
from torch._inductor.pygraph.schedule import buffers, plan, pointers, recording, workspaces
from torch._inductor.pygraph.schedule.dag import Access, Call, critical_path, dependencies, reduced, width
from torch._inductor.pygraph.schedule.lanes import CROSSING_US, in_lanes, MAX_LANES, order
from torch._inductor.pygraph.schedule.workspaces import divided, spread
from torch._inductor.pygraph.select import timing
from torch._inductor.pygraph.select.controller import Controller
from torch._inductor.pygraph.select.deploy import Deployment
from torch._inductor.pygraph.select.timing import MIN_NODE_US
from torch._inductor.pygraph.types.calls import CallInfo, NOTE, Operand, RANDOM
from torch._inductor.pygraph.types.candidate import Candidate, CHAIN, DAG, LANES, SCHEDULES
from torch._inductor.pygraph.types.partition import Collective, PartitionInfo
from torch._inductor.pygraph.types.sizes import SizeMap
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.virtualized import V
from torch.testing._internal import pygraph_functions
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize
from torch.testing._internal.fake_cuda import fake_cuda
from torch.testing._internal.modelled_nodes import KernelNode, PreludeNode
from torch.testing._internal.modelled_operators import on_host
from torch.testing._internal.pygraph_common import run_programs, wants_programs
from torch.testing._internal.pygraph_functions import hiding, new_generation, RecordTestCase


# Make the helper files in test/ importable
pytorch_test_dir = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.append(pytorch_test_dir)
from inductor.test_pygraph_codegen import comparable, PROGRAMS as PROGRAMS_TO_COMPILE


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

# Of each schedule, in a run of the tests, and orders of nodes for each.
PROGRAMS = 8
ORDERS = 20

# Calls of a program until it is replayed, and replays.
CALLS = 6


# What code generation tells


def branches(compile: Callable[..., Any]) -> None:
    """A buffer of the second branch takes the place of one of the first."""

    def f(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple((t @ w).softmax(-1) @ w for t in (x, y))

    with torch.no_grad():
        compile(f)(*(torch.randn(16, 16, device="cuda") for _ in range(3)))


def branches_of_training(compile: Callable[..., Any]) -> None:
    """Buffers of the backward take the place of what the forward saved."""

    def f(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a, b = ((t @ w).sin().softmax(-1) @ w for t in (x, y))
        return a * b

    x, y, w = (torch.randn(16, 16, device="cuda", requires_grad=True) for _ in range(3))
    for t in (x, y):
        mark_dynamic(t, 0)
    compile(f)(x, y, w).sum().backward()


OWN_PROGRAMS = {"branches": branches, "branches_of_training": branches_of_training}


class CallsTest(TestCase):
    def compile(self, name: str, **options: Any) -> tuple[list[Any], list[Any]]:
        """Return what Inductor made of a program, and the scheduler's nodes of each function."""
        torch._dynamo.reset()
        nodes: list[Any] = []

        def described(wrapper: Any, of_function: Any) -> Any:
            real = V.graph.scheduler.mutation_real_name
            uses = [
                tuple({real.get(dep.name, dep.name) for dep in deps} for deps in (rw.reads, rw.writes))
                for node in of_function
                for rw in (node.read_writes,)
            ]
            nodes.append(uses)
            return describe_calls(wrapper, of_function)

        with (
            warnings.catch_warnings(),
            fake_cuda() as graphs,
            mock.patch.object(describe, "describe_calls", described),
        ):
            warnings.simplefilter("ignore")
            program = {**PROGRAMS_TO_COMPILE, **OWN_PROGRAMS}[name]
            program(functools.partial(torch.compile, options={"pygraph": True, **options}))
        return [*graphs], nodes

    def unbound(self, code: str, reuses: bool) -> list[str]:
        """Return the tensors of notes that have no value, or none any more, in front of a return."""
        bound: set[str] = set()
        found: list[str] = []

        def run(statements: Sequence[ast.stmt]) -> None:
            for statement in statements:
                if isinstance(statement, ast.If) and isinstance(note := statement.body[0], ast.Expr):
                    found.extend(n.id for n in note.value.args[1:] if n.id not in bound)
                elif isinstance(statement, ast.If):
                    run(statement.body if reuses else statement.orelse)
                elif isinstance(statement, ast.Assign):
                    bound.update(n.id for t in statement.targets for n in ast.walk(t) if isinstance(n, ast.Name))
                elif isinstance(statement, ast.Delete):
                    bound.difference_update(target.id for target in statement.targets)
                elif isinstance(statement, (ast.With, ast.FunctionDef)):
                    run(statement.body)

        run(ast.parse(textwrap.dedent(code)).body)
        return found

    @parametrize("name", ("mlp_training", "partitioned", "mutation", "custom_op", "optimizer"))
    def test_calls_of_programs(self, name):
        "Each call is noted, and reads and writes what the scheduler's nodes do."
        with mock.patch("torch._inductor.pygraph.compile.calls._may_overlap", lambda calls: True):
            graphs, nodes = self.compile(name, pygraph_schedules=True)
        functions = [(graph, function) for graph in graphs for function in graph.info.functions]
        self.assertGreater(len(functions), 0)
        for (graph, function), uses in zip(functions, nodes, strict=True):
            code = graph.source[graph.source.index(f"def {function.name}(") :]
            code = code[: code.index("\n    return ")]
            notes = re.findall(rf"if {NOTE} is not None: {NOTE}\(([^)]*)\)", code)
            self.assertEqual(
                notes, [", ".join((str(i), *(o.buffer for o in c.operands))) for i, c in enumerate(function.calls)]
            )
            for reuses in (True, False):
                self.assertEqual(self.unbound(code, reuses), [])
            self.assertEqual(code.count(".run("), sum(c.name.startswith("triton_") for c in function.calls))
            operands = [o for call in function.calls for o in call.operands]
            known, written = {o.buffer for o in operands}, {o.buffer for o in operands if o.writes}
            # What is not declared uses anything.
            for reads, writes in uses if all(call.is_declared for call in function.calls) else ():
                self.assertLessEqual(writes & known, written)
                # Others are inside of a kernel.
                self.assertLessEqual({r for r in reads if r.startswith(("arg", "primals", "tangents"))}, known)
        self.assertEqual(pickle.loads(pickle.dumps(functions[0][1])), functions[0][1])

    @parametrize("name", ("mutation", "mlp_training", "branches"))
    def test_unchanged_without_a_recording(self, name):
        "Without the setting there are no notes. With it, code that is not noted runs as without."
        (with_it, *_), _ = self.compile(name, pygraph_schedules=True)
        (without, *_), _ = self.compile(name, pygraph_schedules=False)
        self.assertEqual(without.info.functions[0].calls, ())
        lines = [line for line in comparable(with_it.source).splitlines() if f"if {NOTE} is not None" not in line]
        apart = [line for line in lines if line.strip().startswith("else: del")]
        lines = [line for line in lines if line not in apart]
        lines = [line.replace(f", {NOTE}=None", "").replace(f"if {NOTE} is None or {NOTE}.reuses: ", "") for line in lines]
        # The first line has the number of the compilation.
        self.assertEqual(lines[1:], comparable(without.source).splitlines()[1:])
        self.assertEqual((bool(apart), bool(with_it.info.functions[0].calls)), (name == "branches",) * 2)

    def test_what_else_is_known_of_a_function(self):
        "Which inputs its code writes over, and how it depends on its sizes: the same with notes as without."
        (with_it, without), _ = zip(*(
            self.compile("branches_of_training", pygraph_sizes=True, pygraph_schedules=on) for on in (True, False)
        ))
        backward = with_it[1].info.functions[0]
        self.assertTrue(backward.calls and backward.reused_input_idxs)
        self.assertIsInstance(backward.sizes, SizeMap)
        for a, b in zip(with_it, without, strict=True):
            self.assertEqual([dataclasses.replace(f, calls=()) for f in a.info.functions], [*b.info.functions])

    def test_a_buffer_in_the_place_of_a_dead_one_begins(self):
        (graph, *_), _ = self.compile("branches", pygraph_schedules=True)
        (new,) = (o for call in graph.info.functions[0].calls for o in call.operands if o.begins)
        self.assertIn(f"else: del buf3; {new.buffer} = empty_strided_cuda(", graph.source)
        self.assertTrue(new.writes)


instantiate_parametrized_tests(CallsTest)


# The order of calls


def draw_calls(draw: random.Random, count: int) -> list[Call]:
    calls = []
    for _ in range(count):
        accesses = []
        for _ in range(draw.randint(0, 3)):
            start = draw.randrange(12)
            place = draw.choice((None, None, 0, 1))
            moves = place is not None and draw.random() < 0.5
            accesses.append(Access(start, start + draw.randint(1, 3), draw.random() < 0.4, place, moves))
        resources = frozenset([RANDOM] if draw.random() < 0.15 else ())
        calls.append(Call(tuple(accesses), resources, draw.random() < 0.05))
    return calls


def conflict(a: Call, b: Call) -> bool:
    """Return whether two calls have to keep their order."""
    if a.is_barrier or b.is_barrier or a.resources & b.resources:
        return True
    for x, y in itertools.product(a.accesses, b.accesses):
        if not (x.writes or y.writes):
            continue
        if x.start < y.end and y.start < x.end:
            return True
        if None not in (x.input, y.input) and x.input != y.input and (x.moves or y.moves):
            return True
    return False


def closure(waits: Sequence[set[int]]) -> list[set[int]]:
    """Return all calls that each call comes after."""
    found: list[set[int]] = []
    for mine in waits:
        found.append({*mine}.union(*(found[i] for i in mine)))
    return found


class OrderTest(TestCase):
    def test_dependencies_keep_each_conflict(self):
        "Of two calls that conflict, the later one waits; others are free, unless it follows."
        draw = random.Random(0)
        for _ in range(300):
            calls = draw_calls(draw, draw.randint(0, 14))
            expected = [{i for i in range(j) if conflict(calls[i], b)} for j, b in enumerate(calls)]
            self.assertEqual(closure(dependencies(calls)), closure(expected), calls)

    def test_reduced_waits_follow_from_nothing_else(self):
        draw = random.Random(1)
        for _ in range(200):
            waits = [{i for i in range(j) if draw.random() < 0.3} for j in range(draw.randint(0, 12))]
            less = reduced(waits)
            self.assertEqual(closure(less), closure(waits))
            for j, mine in enumerate(less):
                for i in mine:
                    others = [*less[:j], mine - {i}, *less[j + 1 :]]
                    self.assertNotEqual(closure(others), closure(waits))

    def test_critical_path_and_width(self):
        waits = [set(), set(), {0}, {0, 1}, {2, 3}]
        self.assertEqual(critical_path(waits, [1.0, 5.0, 1.0, 2.0, 1.0]), 8.0)
        self.assertEqual((width(waits), width([])), (2, 0))

    def test_each_schedule_keeps_dependencies(self):
        draw = random.Random(2)
        for _ in range(100):
            calls = draw_calls(draw, draw.randint(1, 20))
            waits = dependencies(calls)
            times = [draw.uniform(1, 9) for _ in calls]
            for schedule in SCHEDULES:
                result = closure(order(schedule, waits, times))
                for mine, needed in zip(result, closure(waits)):
                    self.assertLessEqual(needed, mine)

    def test_workspaces_are_spread(self):
        "Each call takes the workspace in which it starts first, and of these that of a call in front of it."
        waits = [set(), set(), {0}, {1}, {2, 3}]
        self.assertEqual(spread(waits, {0, 1, 2, 3, 4}, [1.0] * 5, 2), {0: 0, 1: 1, 2: 0, 3: 1, 4: 0})
        self.assertEqual(spread([set()] * 3, {0, 2}, [5.0, 1.0, 1.0], 1), {0: 0, 2: 0})

    def test_parts_of_a_workspace(self):
        "Kernels that use little of it get equal parts. Each part has twice what they use."
        unit = workspaces.UNIT_BYTES
        memory = 7 * unit, 71 * unit
        self.assertEqual(divided(memory, 0, 2), [(7 * unit, 39 * unit), (39 * unit, 71 * unit)])
        self.assertEqual(len(divided(memory, 4 * unit, 8)), 8)
        self.assertEqual(divided(memory, 8 * unit, 8)[-1], (55 * unit, 71 * unit))
        self.assertEqual(divided(memory, 17 * unit, 8), [memory])

    def test_lanes_are_rows(self):
        "No more calls than lanes are independent of one another."
        draw = random.Random(3)
        for _ in range(50):
            waits = dependencies(draw_calls(draw, 8))
            times = [draw.uniform(1, 9) for _ in waits]
            for count in LANES.values():
                after = closure(in_lanes(waits, times, count))
                for group in itertools.combinations(range(8), count + 1):
                    self.assertTrue(any(i in after[j] for i, j in itertools.combinations(group, 2)))

    def test_lanes_take_independent_rows(self):
        waits = [set(), {0}, {1}, set(), {3}, {4}]
        self.assertEqual(in_lanes(waits, [4.0] * 6, 2), waits)
        # It pays for no shorter calls.
        short = in_lanes([set(), {0}, {0}], [CROSSING_US / 2] * 3, 2)
        self.assertEqual(short, [set(), {0}, {1}])

    def test_a_wide_fan_has_lanes(self):
        "A graph without edges takes the host long to launch."
        result = order(DAG, [set() for _ in range(100)], [3.0] * 100)
        self.assertEqual(sum(not mine for mine in result), MAX_LANES)

    def test_candidates(self):
        for text in ("no_graph", "copy", "node_update", "prelude,dag", "node_update,lanes3"):
            self.assertEqual(str(Candidate.parse(text)), text)
        self.assertEqual(str(Candidate.parse("node_update,chain")), "node_update")
        for text in ("dag", "copy,dag", "node_update,lanes9", "node_update,"):
            with self.assertRaisesRegex(ValueError, "no candidate"):
                Candidate.parse(text)


# Random programs


@functools.cache
def combine(number: int) -> Callable[..., None]:
    """Return a kernel that computes what no other kernel does, of tensors of any sizes."""
    draw = random.Random(number)
    factors, constant = [draw.uniform(0.2, 0.8) for _ in range(3)], draw.random()

    def combine(out: torch.Tensor, *given: torch.Tensor) -> None:
        terms = [f * (t if t.shape == out.shape else t.mean()) for f, t in zip(factors, given)]
        out.copy_(sum(terms) + constant)

    return combine


@dataclasses.dataclass
class Program:
    """
    A function as Inductor writes it, with a note behind each call.

    Attributes:
        sizes: of its inputs
        mutated: inputs that it writes
        returned: number of outputs
    """

    body: str
    calls: tuple[CallInfo, ...]
    sizes: list[int]
    mutated: tuple[int, ...]
    returned: int


class Writer:
    """Draws a program of branches that work on tensors of a size each, and use memory again that is free."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.sizes = [draw.choice((8, 24, 40)) for _ in range(draw.randint(2, 4))]
        self.inputs = [f"x{i}" for i in range(len(self.sizes))]
        self.size_of = dict(zip(self.inputs, self.sizes))
        self.lines = [f"{', '.join(self.inputs)}, = args; args.clear()"]
        self.calls: list[CallInfo] = []
        self.mutated: set[int] = set()
        self.alive = [*self.inputs]

    def new(self, name: str, size: int) -> None:
        self.lines.append(f"{name} = empty_strided_cuda(({size},), (1,), torch.float32)")
        self.size_of[name] = size

    def note(
        self, name: str, reads: Iterable[str], *, is_declared: bool = True, has_workspace: bool = False
    ) -> None:
        number = len(self.calls)
        writes = {**dict.fromkeys(reads, False), name: True}
        operands = tuple(
            Operand(buffer, written, self.inputs.index(buffer) if buffer in self.inputs else None)
            for buffer, written in writes.items()
        )
        operands = operands if is_declared else ()
        info = CallInfo(f"call{number}", operands, is_declared=is_declared, has_workspace=has_workspace)
        self.calls.append(info)
        noted = ", ".join((str(number), *(o.buffer for o in self.calls[-1].operands)))
        self.lines.append(f"if {NOTE} is not None: {NOTE}({noted})")

    def target(self, name: str, size: int) -> str:
        """Return where a call writes: a new buffer, or one that there is."""
        if self.draw.random() < 0.2:
            known = [t for t in self.alive if self.size_of[t] == size]
            if known and (target := self.draw.choice(known)):
                if target in self.inputs:
                    self.mutated.add(self.inputs.index(target))
                return target
        self.new(name, size)
        self.alive.append(name)
        return name

    def launch(self, target: str, *operands: str) -> None:
        self.lines.append(f"launch(combine({len(self.lines)}), {', '.join((target, *operands))})")

    def call(self, n: int) -> None:
        draw = self.draw
        x = draw.choice(self.alive)
        size = self.size_of[x]
        # Branches seldom meet.
        others = self.alive if draw.random() < 0.1 else [t for t in self.alive if self.size_of[t] == size]
        reads = [x, *draw.sample(others, draw.randint(0, min(2, len(others))))]
        target = self.target(f"t{n}", size)
        # Memory of an operator's own is declared nowhere.
        own = draw.choice(("", "", "", "own", f"workspace{size}", f"pooled{size}"))
        if own == "own":
            self.new(own, size)
        if own:
            self.launch(own, *reads)
            self.launch(target, own, x)
        else:
            self.launch(target, *reads)
        if own == "own":
            self.lines.append("del own")
        has_workspace = own.startswith("pooled")
        self.note(target, reads, is_declared=draw.random() > 0.03, has_workspace=has_workspace)

    def program(self) -> Program:
        draw = self.draw
        for size in sorted({*self.sizes}):
            # As cuBLAS's. A call uses an eighth.
            self.new(f"whole{size}", 8 * size)
            self.lines.append(f"pooled{size} = whole{size}[:{size}]")
        for n in range(draw.randint(3, draw.choice((10, 30)))):
            self.call(n)
            dying = [t for t in self.alive if t not in self.inputs]
            if dying and draw.random() < 0.5:
                dead = draw.choice(dying)
                self.alive.remove(dead)
                self.lines.append(f"del {dead}")
        outputs = draw.sample(self.alive, min(len(self.alive), draw.randint(1, 3)))
        self.lines.append(f"return ({', '.join(outputs)},)")
        body = "\n".join(self.lines)
        return Program(body, tuple(self.calls), self.sizes, tuple(sorted(self.mutated)), len(outputs))


class Runs:
    """
    Runs the nodes of a graph in an order of the test's, from the same memory each time.

    Attributes:
        nodes: in the order of the capture
        edges: (node, a node behind it)
    """

    def __init__(self, driver: Any, graph: int) -> None:
        self.driver = driver
        self.nodes = [i for i in driver.graphs[graph] if not isinstance(driver.nodes[i], PreludeNode)]
        known = {*self.nodes}
        self.edges = {edge for edge in driver.edges if {*edge} <= known}
        self.held = {i: KernelNode(*driver.held[i], launch=driver.nodes[i].launch) for i in self.nodes}
        self.memory = {
            (int.from_bytes(p, "little"), like.nbytes): b""
            for node in self.held.values()
            for p, like in zip(node.parameters, node.launch.likes)
        }
        # A call before may have left what the next one writes.
        for address, nbytes in self.memory:
            values = torch.randn(nbytes // 4, device="cpu")
            ctypes.memmove(address, values.data_ptr(), nbytes)
        self.memory = {at: self._read(*at) for at in self.memory}

    @staticmethod
    def _read(address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)

    def flow(self, order: Iterable[int]) -> set[tuple[Any, int, int | None]]:
        """Return (node, address, node) of what each node reads and which node wrote it, and what is left in the end."""
        writer: dict[int, int] = {}
        found: set[tuple[Any, int, int | None]] = set()
        for i in order:
            node = self.held[i]
            at = [int.from_bytes(p, "little") for p in node.parameters]
            written = {at[k] for k in node.launch.written}
            found |= {(i, a, writer.get(a)) for k, a in enumerate(at) if k not in node.launch.written}
            writer |= dict.fromkeys(written, i)
        return found | {("end", a, i) for a, i in writer.items()}

    def run(self, order: Iterable[int]) -> dict[Any, bytes]:
        """Return what each node wrote, and what the memory holds in the end."""
        for (address, _), content in self.memory.items():
            ctypes.memmove(address, content, len(content))
        found: dict[Any, bytes] = {}
        for i in order:
            node = self.held[i]
            node.launch.run(node.parameters)
            for k in node.launch.written:
                at = int.from_bytes(node.parameters[k], "little")
                found[i, k] = self._read(at, node.launch.likes[k].nbytes)
        return found | {at: self._read(*at) for at in self.memory}

    def order(self, edges: set[tuple[int, int]], choose: Callable[[list[int]], int]) -> list[int]:
        """Return an order that edges allow; ``choose`` takes one of the nodes that may be next."""
        behind = collections.defaultdict(set)
        ahead = collections.Counter(b for _, b in edges)
        for a, b in edges:
            behind[a].add(b)
        ready = [i for i in self.nodes if not ahead[i]]
        found = []
        while ready:
            i = choose(ready)
            ready.remove(i)
            found.append(i)
            for b in behind[i]:
                ahead[b] -= 1
                if not ahead[b]:
                    ready.append(b)
        return found

    def swapped(self, edges: set[tuple[int, int]], before: int, after: int) -> list[int]:
        """Return an order close to the captured one in which a node comes behind another one, if edges allow it."""
        first: dict[int, int] = {}
        for turn, node in enumerate((after, before)):
            needed = {node}
            for i in reversed(self.nodes):
                if any((i, j) in edges for j in needed):
                    needed.add(i)
            first = dict.fromkeys(needed, turn) | first
        return self.order(edges, lambda ready: min(ready, key=lambda i: (first.get(i, 2), self.nodes.index(i))))


class ScheduleProgramsTest(RecordTestCase):
    def setUp(self):
        super().setUp()
        self.device.captures_chain = True
        self.workspaces = {
            f"workspace{size}": self.device.empty_strided((size,), (1,), torch.float32, is_counted=False)
            for size in (8, 24, 40)
        }
        # Of the last recording: what its calls use, and the call of each node.
        self.calls: list[Call] = []
        self.call_of: dict[int, int] = {}

    def schedule_graph(self, graph: plan.Graph, *args: Any) -> Any:
        def noted(calls: list[Call]) -> Any:
            self.calls = calls
            return dependencies(calls)

        self.call_of = {int(node): i for i, unit in enumerate(graph.units) for node in unit.nodes}
        with mock.patch.object(plan, "dependencies", noted):
            return plan.schedule_graph(graph, *args)

    def deploy_program(self, program: Program, inputs: Sequence[torch.Tensor], force: str) -> Any:
        fn = self.deploy(
            program.body,
            inputs,
            force=force,
            mutated=program.mutated,
            returned=range(program.returned),
            described=program.calls,
        )
        fn.model.__globals__.update(self.workspaces, combine=combine)
        return fn

    def record_program(self, program: Program, force: str, seed: int) -> Runs:
        """Compare each call with the uncaptured function. Return the graph."""
        trees.reset_cudagraph_trees()
        reset_report()
        self.device.order = random.Random(seed)
        fn = None
        for _ in range(CALLS):
            inputs = [self.randn(size) for size in program.sizes]
            fn = fn or self.deploy_program(program, inputs, force)
            expected = self.expected(fn, inputs)
            outputs = fn(*inputs)
            for found, wanted in zip(self.values([*outputs, *inputs]), expected):
                if not torch.equal(found, wanted):
                    raise AssertionError(f"seed {seed} of {force}: {found} for {wanted} in\n{program.body}")
        (entry,) = report()
        self.assertEqual(str(Candidate(entry.choice, entry.schedule)), force, (entry, program.body))
        driver = self.device.driver
        return Runs(driver, max(graph for graph, nodes in driver.graphs.items() if nodes))

    def check_orders(self, runs: Runs, draw: random.Random, text: str) -> None:
        """Each order that the edges allow gives what the captured order gives."""
        expected = runs.run(runs.nodes)
        for _ in range(ORDERS):
            if runs.run(runs.order(runs.edges, draw.choice)) != expected:
                raise AssertionError(text)

    def check_edges(self, runs: Runs, draw: random.Random, text: str) -> collections.Counter[str]:
        """
        Without an edge, some order of nodes gives something else. Others are of calls that might use the same, such as
        barriers, memory that is not declared, and inputs that may overlap, or of a lane.
        """
        expected, flow = runs.run(runs.nodes), runs.flow(runs.nodes)
        found: collections.Counter[str] = collections.Counter()
        for edge in sorted(runs.edges):
            less = runs.edges - {edge}
            orders = [runs.swapped(less, *edge), *(runs.order(less, draw.choice) for _ in range(4))]
            wrong = [order for order in orders if runs.flow(order) != flow]
            if wrong and runs.run(wrong[0]) == expected:
                raise AssertionError(f"the order without {edge} is not noticed in\n{text}")
            # Else it follows from the other edges.
            self.assertGreater(orders[0].index(edge[0]), orders[0].index(edge[1]))
            is_declared = conflict(*(self.calls[self.call_of[node]] for node in edge))
            found["noticed" if wrong else "declared" if is_declared else "of a lane"] += 1
        return found

    def run_program(self, schedule: str, seed: int) -> collections.Counter[str]:
        draw = random.Random(f"{schedule} {seed}")
        torch.manual_seed(seed)
        program = Writer(draw).program()
        binding = draw.choice(("node_update", "prelude"))
        # Every other program is short of memory, so that branches use the same.
        with (
            mock.patch.object(recording, "MORE_MEMORY", 100.0 * (seed % 2)),
            mock.patch.object(buffers, "MIN_GAIN", 1.0),
            mock.patch.object(plan, "MIN_GAIN", 1.0),
            mock.patch.object(workspaces, "UNIT_BYTES", 32),
            mock.patch.object(recording, "schedule_graph", self.schedule_graph),
        ):
            runs = self.record_program(program, str(Candidate(binding, schedule)), seed)
        text = f"seed {seed} of {schedule}:\n{program.body}"
        self.check_orders(runs, draw, text)
        return self.check_edges(runs, draw, text)

    @parametrize("schedule", (DAG, *LANES))
    def test_random_programs(self, schedule):
        "Each order of nodes that a scheduled graph allows gives the results of the chain, and needs its edges."
        found: collections.Counter[str] = collections.Counter()
        for seed in range(PROGRAMS):
            found += self.run_program(schedule, seed)
        self.assertGreater(found["noticed"], 5 * PROGRAMS, found)
        if schedule == DAG:
            self.assertEqual(found["of a lane"], 0)


class DeployTest(RecordTestCase):
    """Two branches, each of which uses its memory again."""

    BODY = """
        x, y = args; args.clear()
        a = new(); launch(sin, a, x)
        {0}
        b = new(); launch(sin, b, a)
        {1}
        del a
        c = empty_strided_cuda((24,), (1,), torch.float32); launch(sin, c, y)
        {2}
        d = empty_strided_cuda((24,), (1,), torch.float32); launch(sin, d, c)
        {3}
        del c
        return (b, d)
    """
    OPERANDS = (("x", "a"), ("a", "b"), ("y", "c"), ("c", "d"))
    CALLS = tuple(
        CallInfo(
            "sin", (Operand(x, False, ("x", "y").index(x) if x in ("x", "y") else None), Operand(to, writes=True))
        )
        for x, to in OPERANDS
    )

    def setUp(self):
        super().setUp()
        self.device.captures_chain = True
        self.device.order = random.Random(0)

    def body(self, *numbers: int) -> str:
        notes = [f"if {NOTE} is not None: {NOTE}({i}, {x}, {to})" for i, (x, to) in enumerate(self.OPERANDS)]
        return self.BODY.format(*(note if i in numbers else "" for i, note in enumerate(notes)))

    def check_branches(self, *, numbers: Sequence[int] = range(4), **kwargs: Any) -> Any:
        kwargs = {"force": "node_update,dag", "described": self.CALLS, "calls": 24, "returned": (0, 1), **kwargs}
        self.check(self.body(*numbers), lambda: [self.randn(), self.randn(24)], **kwargs)
        (entry,) = report()
        return entry

    def edges(self) -> int:
        driver = self.device.driver
        return len(Runs(driver, max(graph for graph, nodes in driver.graphs.items() if nodes)).edges)

    def test_branches_run_side_by_side(self):
        entry = self.check_branches()
        self.assertEqual((entry.choice, entry.schedule, entry.width), ("node_update", DAG, 2))
        # An empty kernel takes as long as these.
        self.assertEqual((entry.calls_us, entry.critical_us), (4 * MIN_NODE_US, 2 * MIN_NODE_US))
        self.assertEqual(self.edges(), 2)
        self.assertIn("up to 2 kernels side by side, critical path 2.4 us of 4.8 us", " ".join(str(report()).split()))

    @parametrize("more", (100.0, -1.0))
    def test_branches_have_memory_of_their_own(self, more):
        "A branch uses memory of another one again where the function may take no more than its chain."
        body = self.body(*range(4)).replace("(24,)", "(8,)")
        with mock.patch.object(recording, "MORE_MEMORY", more):
            self.check(body, force="node_update,dag", described=self.CALLS, calls=6, returned=(0, 1))
        (entry,) = report()
        self.assertEqual((entry.width, self.edges()), (2, 2) if more > 0 else (1, 3))

    @parametrize("hidden", (False, True))
    def test_atomic_additions(self, hidden):
        "A graph of another schedule that is only close is proven by its launches, too."
        is_python = [False]

        def near(out: torch.Tensor, x: torch.Tensor) -> None:
            out.copy_(1 + 1e-5 * (1 + is_python[0]) * torch.nan_to_num(x))

        body = self.body(*range(4)).replace("launch(sin, c, y)", "launch(near, c, y)").replace("launch(sin, d, c)", "launch(mul, d, c, c)")
        first, second = "x, y = args; args.clear()", "return (b, d)"
        body = body.replace(first, f"{first}; is_python[0] = True").replace(second, f"is_python[0] = False; {second}")
        names = {"near": near, "is_python": is_python}
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.dict(pygraph_functions.KERNELS, names))
            stack.enter_context(mock.patch.object(bound, "adds_atomically", lambda spec: True))
            if hidden:
                stack.enter_context(hiding(2))
            fn = None
            for _ in range(6):
                inputs = [self.randn(), self.randn(24)]
                given = {"force": "node_update,dag", "described": self.CALLS, "returned": (0, 1)}
                fn = fn or self.deploy(body, inputs, **given)
                found = self.values(fn(*inputs))
                wanted = [on_host(inputs[0]).sin().sin(), torch.ones(24, device="cpu")]
                self.assertEqual(found, wanted, atol=1e-3, rtol=1e-3)
        (entry,) = report()
        self.assertEqual((entry.schedule, entry.choice), (CHAIN, "copy") if hidden else (DAG, "node_update"), str(report()))

    @parametrize("schedule", (CHAIN, DAG))
    def test_a_chain_reuses_buffers(self, schedule):
        "A chain's buffers take the place of dead ones, as uncaptured. It still tells what runs side by side without."
        body = self.body(*range(4)).replace("(24,)", "(8,)")
        allocate = "c = empty_strided_cuda((8,), (1,), torch.float32);"
        self.assertEqual(body.count(f"del a\n        {allocate}"), 1)
        reuse = f"if {NOTE} is None or {NOTE}.reuses: c = a; del a\nelse: del a; {allocate}"
        body = body.replace(f"del a\n        {allocate}", f"{reuse}\n")
        begins = [dataclasses.replace(o, begins=o.buffer == "c") for o in self.CALLS[2].operands]
        described = (*self.CALLS[:2], dataclasses.replace(self.CALLS[2], operands=tuple(begins)), self.CALLS[3])
        # Whether the DAG is faster.
        with self.selects_at_once(100, 50, 30 if schedule == DAG else 50):
            self.check(body, force=None, described=described, calls=40, returned=(0, 1))
        (entry,) = report()
        self.assertEqual((entry.schedule, entry.width, 2 * entry.critical_us), (schedule, 2, entry.calls_us))
        driver = self.device.driver
        runs = Runs(driver, max(graph for graph, nodes in driver.graphs.items() if nodes))
        a, _, c, _ = ([int.from_bytes(p, "little") for p in node.parameters][0] for node in runs.held.values())
        self.assertEqual(a == c, schedule == CHAIN)

    # A call's kernels write eight of the workspace's floats.
    MATMULS = f"""
        x, y = args; args.clear()
        a, b = new(), new()
        w = workspace(64)[:8]; launch(sin, w, x); launch(sin, a, w); del w
        if {NOTE} is not None: {NOTE}(0, x, a)
        w = workspace(64)[:8]; launch(sin, w, y); launch(sin, b, w); del w
        if {NOTE} is not None: {NOTE}(1, y, b)
        return (a, b)
    """

    def check_matmuls(self, body: str = MATMULS, has_workspace: bool = True, **kwargs: Any) -> tuple[Any, int]:
        """Return the report of the function, and the number of edges of its graph."""
        calls = tuple(
            CallInfo("mm", (Operand(x, False, k), Operand(to, True)), has_workspace=has_workspace)
            for k, (x, to) in enumerate(("xa", "yb"))
        )
        kwargs = {"force": "node_update,dag", "described": calls, "calls": 6, "returned": (0, 1), **kwargs}
        names = {"workspace": self.device.workspace}
        with mock.patch.dict(pygraph_functions.KERNELS, names), mock.patch.object(workspaces, "UNIT_BYTES", 32):
            self.check(body, lambda: [self.randn(), self.randn()], **kwargs)
        (entry,) = report()
        return entry, self.edges()

    @parametrize("schedule", (CHAIN, DAG))
    def test_matmuls_divide_a_workspace(self, schedule):
        "Matmuls take parts of the workspace that their kernels name, and no further memory."
        with self.selects_at_once(100, 50, 30 if schedule == DAG else 50):
            entry, edges = self.check_matmuls(force=None, calls=40)
        self.assertEqual((entry.schedule, entry.width, edges), (schedule, 2, 3 if schedule == CHAIN else 2))
        driver = self.device.driver
        runs = Runs(driver, max(graph for graph, nodes in driver.graphs.items() if nodes))
        (block,) = (b for b in self.device.blocks if b.nbytes == 256 and b.pool)
        named = {int.from_bytes(p, "little") - block.address for node in runs.held.values() for p in node.parameters}
        self.assertEqual({at for at in named if 0 <= at < 256}, {0} if schedule == CHAIN else {0, 64})

    def test_matmuls_run_alone_in_their_order(self):
        "A call between them is not launched, and does not leave them side by side."
        body = self.MATMULS.replace("(1, y, b)", "(2, y, b)").replace(
            "w = workspace(64)[:8]; launch(sin, w, y)",
            f"c = new(); launch(sin, c, x)\n        if {NOTE} is not None: {NOTE}(1, x, c)\n"
            "        w = workspace(64)[:8]; launch(sin, w, y)",
        )
        described = (
            CallInfo("mm", (Operand("x", False, 0), Operand("a", True)), has_workspace=True),
            CallInfo("sin", (Operand("x", False, 0), Operand("c", True))),
            CallInfo("mm", (Operand("y", False, 1), Operand("b", True)), has_workspace=True),
        )
        driver, rows = self.device.driver, []
        instantiate = driver.cuGraphInstantiate

        def seen(graph: Any, flags: int) -> Any:
            rows.append(len(chain_of(graph) or ()))
            return instantiate(graph, flags)

        with mock.patch.object(driver, "cuGraphInstantiate", seen):
            self.check_matmuls(body, described=described)
        self.assertEqual(rows, [4])

    @parametrize("case", ("large", "uneven", "other_memory", "cuGraphClone", "no_gain"))
    def test_matmuls_keep_a_workspace(self, case):
        "Matmuls wait for one another where a kernel uses more than a half of the workspace, or it is not known."
        body = {
            "large": self.MATMULS.replace("workspace(64)[:8]", "workspace(8)"),
            "uneven": self.MATMULS.replace("workspace(64)", "workspace(65)"),
        }.get(case, self.MATMULS)
        if case.startswith("cu"):
            self.device.driver.failing = case
        gain = 3.0 if case == "no_gain" else plan.MIN_GAIN
        with mock.patch.object(plan, "MIN_GAIN", gain):
            entry, edges = self.check_matmuls(body, case != "other_memory")
        self.assertEqual((entry.schedule, entry.width, edges), (DAG, 1, 3))

    def test_matmuls_that_write_inputs_are_not_run_alone(self):
        "A run in front of the call would write them once more."
        body = self.MATMULS.replace("launch(sin, b, w)", "launch(sin, y, w)").replace("1, y, b", "1, y")
        calls = (
            CallInfo("mm", (Operand("x", False, 0), Operand("a", True)), has_workspace=True),
            CallInfo("mm", (Operand("y", True, 1),), has_workspace=True),
        )
        entry, edges = self.check_matmuls(body.replace("(a, b)", "(a,)"), described=calls, mutated=(1,), returned=(0,))
        self.assertEqual((entry.schedule, entry.width, edges), (DAG, 1, 3))

    @parametrize("cause", ("no_calls", "not_noted", "several_streams", "cuGraphGetEdges"))
    def test_a_graph_whose_calls_are_not_known_is_a_chain(self, cause):
        given = {"no_calls": {"described": ()}, "not_noted": {"numbers": (0, 1, 3)}}.get(cause, {})
        self.device.captures_chain = cause != "several_streams"
        if cause.startswith("cu"):
            self.device.driver.failing = cause
        with self.assertLogs("torch._inductor.pygraph", "INFO") as logs:
            entry = self.check_branches(**given)
        self.assertEqual((entry.choice, entry.schedule), ("node_update", CHAIN))
        self.assertEqual(sum("NOT_SCHEDULED" in line for line in logs.output), 1, logs.output)

    def test_edges_that_stay_are_stricter(self):
        self.device.driver.failing = "cuGraphRemoveDependencies"
        self.assertEqual(self.check_branches().schedule, CHAIN)

    @parametrize("is_declared", (True, False))
    def test_a_call_without_a_declaration_is_a_barrier(self, is_declared):
        calls = [dataclasses.replace(call, is_declared=is_declared or i != 1) for i, call in enumerate(self.CALLS)]
        self.assertEqual(self.check_branches(described=tuple(calls)).width, 2 if is_declared else 1)

    def test_a_node_whose_parameters_are_unknown_is_a_barrier(self):
        nodes: list[int] = []

        def words_of(node: Any) -> list[int] | None:
            nodes.append(int(node))
            return None if int(node) == nodes[0] + 1 else original(node)

        original = pointers.words_of
        with mock.patch.object(pointers, "words_of", words_of):
            self.assertEqual(self.check_branches().width, 1)

    @parametrize("collectives", ((), (Collective("all_reduce_", "0"),)))
    def test_functions_with_collectives_stay_chains(self, collectives):
        info = PartitionInfo("call", calls=self.CALLS, collectives=collectives)
        deployment = types.SimpleNamespace(spec=types.SimpleNamespace(info=info))
        self.assertEqual(Deployment._may_schedule(deployment, None), not collectives)

    def test_draws_keep_their_order(self):
        calls = tuple(dataclasses.replace(call, resources=(RANDOM,)) for call in self.CALLS)
        self.assertEqual(self.check_branches(described=calls).width, 1)

    def test_inputs_that_may_overlap_keep_their_order(self):
        "An input is written in front of a call that reads another one, which is a part of it in some calls."
        body = f"""
            x, y = args; args.clear()
            launch(sin, x, x)
            if {NOTE} is not None: {NOTE}(0, x)
            a = new(); launch(sin, a, y)
            if {NOTE} is not None: {NOTE}(1, y, a)
            return (a,)
        """
        calls = (
            CallInfo("sin", (Operand("x", True, 0),)),
            CallInfo("sin", (Operand("y", False, 1), Operand("a", True))),
        )
        fn = None
        for i in range(20):
            x = self.randn()
            y = x if i > 5 else self.randn()
            fn = fn or self.deploy(body, [x, y], force="node_update,dag", mutated=(0,), described=calls)
            wanted = torch.sin(torch.sin(on_host(x)) if x is y else on_host(y))
            (out,) = fn(x, y)
            self.assertEqual(on_host(out), wanted)

    def test_the_fastest_schedule_is_kept(self):
        "Time of no graph, the chain, and the DAG, which is remembered."
        with self.remembered() as entry:
            entry.path.unlink()
            with self.selects_at_once(100, 50, 30):
                found = self.check_branches(force=None)
            self.assertEqual((found.choice, found.schedule), ("node_update", DAG))
            self.assertEqual(found.timings_us, {"no_graph": 100, "node_update": 50, "node_update,dag": 30})
            self.assertEqual(entry.load().choice, "node_update,dag")
            lanes = [(row, start) for _, row, start, _ in found.timeline]
            self.assertEqual(lanes, [(0, 0.0), (0, MIN_NODE_US), (1, 0.0), (1, MIN_NODE_US)])
            self.assertEqual(found.pool_bytes.keys(), found.timings_us.keys() - {"no_graph"})

    def test_a_schedule_that_is_not_faster_is_dropped(self):
        with self.selects_at_once(100, 50, 50):
            found = self.check_branches(force=None)
        self.assertEqual((found.choice, found.schedule, found.timeline), ("node_update", CHAIN, []))
        self.assertEqual(self.edges(), 3)

    def test_a_further_recording_has_the_schedule(self):
        "An input is less aligned than those before."
        given = [self.randn() for _ in range(20)] + [self.randn(12)[4:] for _ in range(8)]
        with self.selects_at_once(100, 50, 30):
            self.check(
                self.body(*range(4)),
                lambda: [given.pop(0), self.randn(24)],
                force=None,
                described=self.CALLS,
                calls=len(given),
                returned=(0, 1),
            )
        (entry,) = report()
        # The chain, the DAG, and the DAG again.
        self.assertEqual((entry.candidate, sum(map(bool, self.device.driver.graphs.values()))), ("node_update,dag", 3))
        self.assertEqual(self.edges(), 2)

    @contextlib.contextmanager
    def selects_by(self, us: dict[str, float]) -> Iterator[None]:
        """Selection measures 100 us for an uncaptured function, ``us`` for each candidate, and 10 us for the host."""
        timed: set[Any] = set()

        def cost(samples: timing.Samples) -> timing.Cost:
            state = samples.state
            graph_us = us[str(Candidate(state.binding, state.schedule))] if state in timed else 100
            timed.add(state)
            estimates = [timing.Estimate(t) for t in (graph_us, graph_us if graph_us == 100 else 10, graph_us)]
            return timing.Cost(*estimates)

        with self.selects_at_once(), mock.patch.object(timing.Samples, "cost", cost):
            yield

    @parametrize("us", (25, 35))
    def test_a_schedule_with_and_without_a_prelude(self, us):
        times = {"prelude": 50, "prelude,dag": 30, "node_update,dag": us}
        with mock.patch.object(prelude, "PAYS_FROM_KERNELS", 1), self.selects_by(times):
            found = self.check_branches(force=None)
        self.assertEqual(found.timings_us, {"no_graph": 100, **times})
        self.assertEqual((found.candidate, found.updated_nodes), ("node_update,dag", 4) if us < 30 else ("prelude,dag", 1))

    def test_training(self):
        "A forward and its backward select at the same time. A recording of the forward drops that of the backward."
        forward = f"""
            x, w = args; args.clear()
            a = new(); launch(sin, a, x)
            if {NOTE} is not None: {NOTE}(0, x, a)
            b = new(); launch(mul, b, x, w)
            if {NOTE} is not None: {NOTE}(1, x, w, b)
            return (b, a, w)
        """
        backward = f"""
            a, w, t = args; args.clear()
            c = new(); launch(mul, c, a, t)
            if {NOTE} is not None: {NOTE}(0, a, t, c)
            d = new(); launch(mul, d, w, t)
            if {NOTE} is not None: {NOTE}(1, w, t, d)
            return (c, d)
        """

        def describe(*calls: tuple[str, ...]) -> tuple[CallInfo, ...]:
            (*inputs,) = dict.fromkeys(name for *read, _ in calls for name in read)
            return tuple(
                CallInfo("k", (*(Operand(n, False, inputs.index(n)) for n in read), Operand(to, writes=True)))
                for *read, to in calls
            )

        first = second = None
        w = self.randn()
        with self.selects_by({"node_update": 50, "node_update,dag": 30}):
            for _ in range(30):
                x, t = self.randn(), self.randn()
                new_generation()
                first = first or self.deploy(
                    forward,
                    [x, w],
                    mode="forward",
                    force=None,
                    static=[1],
                    names=["primals_1", "primals_2"],
                    described=describe(("x", "a"), ("x", "w", "b")),
                )
                b, a, saved = first.call([x, w])
                second = second or self.deploy(
                    backward,
                    [a, saved, t],
                    mode="backward",
                    force=None,
                    returned=[0, 1],
                    static=[0, 1],
                    names=["sin", "primals_2", "tangents_1"],
                    described=describe(("a", "t", "c"), ("w", "t", "d")),
                )
                inputs = [a, saved, t]
                wanted = [on_host(x) * on_host(w), on_host(x).sin() * on_host(t), on_host(w) * on_host(t)]
                del a, saved
                c, d = second.call(inputs)
                self.assertEqual(self.values([b, c, d]), wanted)
                del b, c, d, inputs
        times = {"no_graph": 100, "node_update": 50, "node_update,dag": 30}
        self.assertEqual([(f.candidate, f.timings_us) for f in report()], [("node_update,dag", times)] * 2)

    def replayed(self, times: Sequence[float], described: tuple[CallInfo, ...]) -> Any:
        """Return what the last recording is like, what five replays of it set, and what memory is reserved."""
        trees.reset_cudagraph_trees()
        reset_report()
        driver, fn = self.device.driver, None
        with self.selects_at_once(*times):
            for i in range(40):
                inputs = [self.randn(), self.randn(24)]
                fn = fn or self.deploy(self.body(*range(4)), inputs, force=None, described=described, returned=(0, 1))
                fn(*inputs)
                if i == 34:
                    before = len(driver.sets)
        (entry,) = report()
        self.assertEqual((entry.candidate, len(entry.timings_us)), ("node_update", len(times)))
        runs = Runs(driver, max(graph for graph, nodes in driver.graphs.items() if nodes))
        place = {node: i for i, node in enumerate(runs.nodes)}
        kernels = [[len(p) for p in node.parameters] for node in runs.held.values()]
        edges = {(place[a], place[b]) for a, b in runs.edges}
        sets = [place[node] for node in driver.sets[before:]]
        return kernels, edges, sets, entry.updated_nodes, entry.kernel_nodes, torch.cuda.memory_reserved()

    def test_a_chain_is_that_of_a_program_without_schedules(self):
        "Whether no schedule was tried, or one was and was not faster."
        in_row = tuple(dataclasses.replace(call, resources=(RANDOM,)) for call in self.CALLS)
        expected = self.replayed((100, 50), ())
        # Four nodes in each call.
        self.assertEqual(expected[2], [0, 1, 2, 3] * 5)
        self.assertEqual(self.replayed((100, 50), in_row), expected)
        self.assertEqual(self.replayed((100, 50, 60), self.CALLS), expected)

    def test_a_chain_that_cannot_be_dropped_stays(self):
        "Its outputs lie in the graphs' pool, and are alive."
        may_run = Controller.may_run

        def is_droppable(controller: Controller, manager: Any) -> bool:
            return not controller.state.outdated.cell_contents and may_run(controller, manager)

        with mock.patch.object(Controller, "may_run", is_droppable), self.selects_at_once(100, 50, 30):
            found = self.check_branches(force=None)
        self.assertEqual((found.choice, found.schedule), ("node_update", CHAIN))
        self.assertEqual(self.edges(), 3)

    def test_no_schedule_is_tried_that_cannot_gain(self):
        calls = tuple(dataclasses.replace(call, resources=(RANDOM,)) for call in self.CALLS)
        with self.selects_at_once(100, 50):
            found = self.check_branches(force=None, described=calls)
        self.assertEqual(set(found.timings_us), {"no_graph", "node_update"})

    def test_a_remembered_schedule_is_recorded_at_once(self):
        with self.remembered("node_update,dag"):
            found = self.check_branches(force=None)
        self.assertEqual((found.choice, found.schedule, found.timings_us), ("node_update", DAG, {}))


instantiate_parametrized_tests(DeployTest)
instantiate_parametrized_tests(ScheduleProgramsTest)


def main() -> None:
    test = ScheduleProgramsTest()
    schedules = (DAG, *LANES)
    run_programs(test, lambda seed, totals: totals.update(test.run_program(schedules[seed % len(schedules)], seed)))


if __name__ == "__main__":
    if wants_programs():
        main()
    else:
        run_tests()
