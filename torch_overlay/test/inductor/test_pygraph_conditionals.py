# Owner(s): ["module: inductor"]
"""torch.cond and torch.while_loop in captured functions: the graph branches, with the results of the uncaptured code."""

from __future__ import annotations

import contextlib
import functools
import gc
import unittest
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
from torch._inductor import config, cudagraph_trees as trees
from torch._inductor.pygraph import report, reset_report
from torch._inductor.pygraph.compile import conditionals
from torch._inductor.pygraph.graph.prelude import PreludeUnavailable
from torch._inductor.pygraph.types.reason import Code
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, subtest
from torch.testing._internal.fake_cuda import fake_cuda
from torch.testing._internal.modelled_cuda import modelled_device
from torch.testing._internal.modelled_nodes import cu, MemcpyNode
from torch.testing._internal.modelled_operators import on_host
from torch.testing._internal.modelled_sizes import compiled, SizedDevice, SizedDriver, SizedProgram, symbols
from torch.testing._internal.pygraph_functions import hiding


if TYPE_CHECKING:
    from collections.abc import Callable


def gated(x, w, v, p):
    """A gated MLP."""
    h = (x @ w).sin()
    y = torch.cond(
        p, lambda h, w, v: (h @ v).relu() @ w + 1, lambda h, w, v: (h * 2).cos(), (h, w, v)
    )
    return y @ v, h


def two_in_a_row(x, w, v, p):
    y = torch.cond(p, lambda x, w: (x @ w).sin(), lambda x, w: x + w, (x, w))
    z, s = torch.cond(
        y.sum() > 0, lambda y, v: (y @ v, y.sum(0)), lambda y, v: ((y - v).sin(), v.sum(0) * 3), (y, v)
    )
    return z + y, s


def nested(x, w, v, p):
    def outer(x, w, v):
        inner = torch.cond(x.sum() > 0, lambda x, w: (x @ w).relu(), lambda x, w: x - w, (x, w))
        return inner + 1, inner * v

    y, z = torch.cond(p, outer, lambda x, w, v: (x.cos(), (x @ v).sin()), (x, w, v))
    return y @ w, z


def result_only(x, w, v, p):
    """The results of the branch are those of the function; one is a copy."""
    return torch.cond(p, lambda x, w: (x + w, x.clone()), lambda x, w: (x @ w, w * 2), (x, w))


def mutated(x, w, v, p):
    x.add_(1)
    y = torch.cond(p, lambda x, w: x @ w, lambda x, w: x - w, (x, w))
    x.mul_(y)
    return y + 1


def without_use(x, w, v, p):
    """Nothing but the branch reads an input, and one path reads none."""
    return torch.cond(p, lambda x, w, v: x + 1, lambda x, w, v: (w @ v), (x, w, v)).sin()


def behind_a_graph(x, w, v, p):
    """The second captured partition reads what the first one left in the pool."""
    y = (x @ w).sin()
    z = torch.cond(p, lambda y, v: y[v.long()[0]], lambda y, v: y + v, (y, v))
    return torch.cond(y.sum() > 0, lambda y, z, w: y @ z, lambda y, z, w: (y * w).cos() - z, (y, z, w)) + y


def looped(x, w, v, p):
    """No iteration, or up to four."""
    n = torch.where(p, x.abs().sum().clamp(max=2.5), x.sum())
    n, y = torch.while_loop(lambda n, y: n > 0, lambda n, y: (n.clamp(max=4) - 1, (y @ w).sin() + v[0]), (n, x))
    return y @ v, n


def exchanged(x, w, v, p):
    """The body of a loop swaps two tensors. A path of a later branch reads both."""
    n = torch.where(p, 3.0, x.sum().sign())
    n, y, z = torch.while_loop(
        lambda n, y, z: n + y.sum() * 0 > 0, lambda n, y, z: (n - 1, z.clone(), y.clone()), (n, x + 1, w)
    )
    return torch.cond(p, lambda y, z: y @ z, lambda y, z: y - z, (y, z)), y * 2


def idle(x, w, v, p):
    """A loop without an iteration."""
    n = x.sum() * 0 - 1
    return torch.while_loop(lambda n, x: n > 0, lambda n, x: (n - 1, x @ w), (n, x))[1].sin()


def residual(x, w, v, p):
    """addmm copies a matrix to its result."""
    return torch.cond(p, lambda x, w: torch.addmm(x, x, w), lambda x, w: x - w, (x, w))


PROGRAMS = (gated, two_in_a_row, nested, result_only, mutated, without_use, behind_a_graph, looped, exchanged)


def indexed(x, i, p):
    return torch.cond(p, lambda x, i: x[i], lambda x, i: x + 1, (x, i))


def drawn(x, i, p):
    return torch.cond(p, lambda x, i: torch.rand_like(x) + x, lambda x, i: x + 1, (x, i))


def factorized(x, i, p):
    return torch.cond(p, lambda x, i: torch.linalg.cholesky(x).contiguous(), lambda x, i: x + 1, (x, i))


def on_cpu(x, i, p):
    return torch.cond(p.cpu(), lambda x, i: x + 2, lambda x, i: x + 1, (x, i))


def loop_indexed(x, i, p):
    return torch.while_loop(lambda n, x: n > 0, lambda n, x: (n - 1, x[i]), (x.sum(), x))[1]


def loop_of_branches(x, i, p):
    def body(n, x):
        return n - 1, torch.cond(p, lambda x: x + 1, lambda x: x.sin(), (x,))

    return torch.while_loop(lambda n, x: n > 0, body, (x.sum(), x))[1]


def inner_indexed(x, i, p):
    def outer(x, i):
        return torch.cond(x.sum() > 0, lambda x, i: x[i], lambda x, i: x + 1, (x, i))

    return torch.cond(p, outer, lambda x, i: x + 1, (x, i))


REFUSED = {
    indexed: Code.BRANCH_MAY_FAIL,
    factorized: Code.BRANCH_MAY_FAIL,
    inner_indexed: Code.BRANCH_MAY_FAIL,
    drawn: Code.BRANCH_DRAWS,
    on_cpu: Code.CONTROL_FLOW,
    loop_indexed: Code.BRANCH_MAY_FAIL,
    loop_of_branches: Code.SUBGRAPH_NOT_CAPTURABLE,
}


@contextlib.contextmanager
def conditional_nodes():
    """A compiler that finds a device with conditional nodes."""
    with mock.patch.object(conditionals, "branch_kernel", lambda index: None), config.patch(pygraph_conditionals=True):
        yield


@functools.cache
def compiled_of(fn: Callable[..., Any]) -> Any:
    def program() -> None:
        x, w, v = (torch.zeros(16, 16, device="cuda") for _ in range(3))
        with torch.no_grad():
            torch.compile(fn)(x, w, v, torch.ones((), dtype=torch.bool, device="cuda"))

    with conditional_nodes():
        (found,) = compiled(program, pygraph_sizes=False)
    return found


class CodegenTest(TestCase):
    def graph(self, fn, *inputs):
        torch._dynamo.reset()
        with fake_cuda() as graphs, conditional_nodes(), torch.no_grad():
            x = torch.randn(16, 16, device="cuda")
            i = torch.ones(16, dtype=torch.int64, device="cuda")
            p = torch.ones((), dtype=torch.bool, device="cuda")
            torch.compile(fn, options={"pygraph": True})(x, *(inputs or (i,)), p)
        return graphs[0]

    def test_one_partition(self):
        for fn, paths in ((gated, 2), (two_in_a_row, 2), (nested, 3), (looped, 2)):
            graph = compiled_of(fn).graph
            self.assertEqual([p.captured for p in graph.partitions], [True])
            (function,) = graph.info.functions
            self.assertEqual(len(function.paths), paths)
            self.assertNotIn(".item()", graph.source)

    def test_calls_stay_in_their_order(self):
        """Calls around a branch are not described, so that no schedule moves them."""
        with config.patch(pygraph_schedules=True):
            (function,) = self.graph(lambda x, i, p: torch.cond(p, torch.sin, torch.cos, (x,)) + x.exp()).info.functions
        self.assertEqual((len(function.paths), function.calls), (2, ()))

    @parametrize("fn", [subtest(f, name=f.__name__) for f in REFUSED])
    def test_refused(self, fn):
        """The graph splits at a branch that would run with values of the other path, or draws."""
        graph = self.graph(fn)
        codes = [b.reason.code for r in graph.info.reports for b in r.blockers]
        self.assertIn(REFUSED[fn], codes)
        self.assertEqual([f.paths for f in graph.info.functions], [()] * len(graph.info.functions))

    def test_no_nodes(self):
        """Without conditional nodes the graph splits as before."""
        with mock.patch.object(torch._inductor.pygraph.graph.prelude, "_kernels", side_effect=PreludeUnavailable("none")):
            with fake_cuda() as graphs, config.patch(pygraph_conditionals=True), torch.no_grad():
                x, w, v = (torch.randn(16, 16, device="cuda") for _ in range(3))
                with mock.patch.object(conditionals, "branch_kernel", side_effect=PreludeUnavailable("none")):
                    torch.compile(gated, options={"pygraph": True})(x, w, v, torch.ones((), dtype=torch.bool, device="cuda"))
        self.assertEqual([p.captured for p in graphs[0].partitions], [True, False, True])

    def test_no_driver(self):
        """The same where cuda-bindings or the driver's library is missing."""
        for error in (ImportError("No module named 'cuda'"), RuntimeError("Failed to dlopen libcuda.so.1")):
            torch._dynamo.reset()
            with fake_cuda() as graphs, config.patch(pygraph_conditionals=True), torch.no_grad():
                x, w, v = (torch.randn(16, 16, device="cuda") for _ in range(3))
                with mock.patch.object(torch._inductor.pygraph.graph.prelude, "bindings", side_effect=error):
                    torch.compile(gated, options={"pygraph": True})(x, w, v, torch.ones((), dtype=torch.bool, device="cuda"))
            self.assertEqual([p.captured for p in graphs[0].partitions], [True, False, True])


@unittest.skipIf(cu is None, "requires cuda-bindings")
class ConditionalTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        trees.reset_cudagraph_trees()
        reset_report()
        self.addCleanup(trees.reset_cudagraph_trees)
        self.stack = contextlib.ExitStack()
        self.addCleanup(self.stack.close)
        self.stack.enter_context(config.patch(pygraph=True))

    @classmethod
    def tearDownClass(cls) -> None:
        super().tearDownClass()
        gc.collect()

    def program(self, fn: Callable[..., Any], force: str = "node_update") -> SizedProgram:
        device = self.stack.enter_context(modelled_device(SizedDriver, SizedDevice))
        program = SizedProgram(device, compiled_of(fn), force)
        if fn is mutated:
            program.mutated = tuple(i for i, t in enumerate(program.inputs) if t.dtype != torch.bool)[:1]
        return program

    def inputs(self, program: SizedProgram, value: bool, sign: float, sizes: dict[str, int] | None = None) -> list[Any]:
        inputs = program.make_inputs(sizes or {})
        for t in inputs:
            if isinstance(t, torch.Tensor) and t.dtype == torch.bool:
                on_host(t).fill_(value)
            elif isinstance(t, torch.Tensor):
                on_host(t).copy_(on_host(t).abs() * sign if sign else on_host(t))
        return inputs

    def check(self, program: SizedProgram, calls: int = 14, value: bool | None = None) -> None:
        """Each call has new inputs and another predicate, or one value of it. All outputs are kept."""
        torch.manual_seed(0)
        kept = []
        for n in range(calls):
            given = self.inputs(program, n % 3 == 1 if value is None else value, (0, 1, -1, 1)[n % 4])
            copies = [program.device.clone(t) for t in given]
            expected = program.call(copies, captured=False) + [on_host(t).clone() for t in copies]
            outputs = program.run([*given], captured=True)
            kept.append(([*outputs, *given], expected))
            for actual, values in kept:
                self.assertEqual([on_host(t) for t in actual], values, atol=0, rtol=0)

    @parametrize("fn", [subtest(f, name=f.__name__) for f in PROGRAMS])
    def test_programs(self, fn):
        """Both paths of each branch run in replays, by the predicate of each call."""
        self.check(self.program(fn))
        for entry in report():
            self.assertEqual(entry.choice, "node_update", str(entry))
        self.assertEqual(len(report()), 1 + (fn is behind_a_graph))

    def check_refused(self, program: SizedProgram, choice: str, code: Code, **kwargs: Any) -> None:
        self.check(program, calls=6, **kwargs)
        (entry,) = report()
        self.assertEqual(entry.choice, choice, str(entry))
        self.assertIn(code, [reason.code for reason in entry.reasons])

    @parametrize("value", (False, True))
    @parametrize("hidden", (1, 2, 3))
    def test_proof_runs_both_paths(self, value, hidden):
        """A path that keeps an input's address is found in a call that takes the other path."""
        program = self.program(without_use)
        # Input 0 is the predicate. Only the path for true reads x, only the other one reads w and v.
        with hiding(hidden):
            self.check_refused(program, "copy", Code.DIFFERS, value=value)

    @parametrize("hidden", (0, 1))
    def test_proof_runs_an_iteration(self, hidden):
        """An input that only the body reads, or what the loop carries, is found in a call without an iteration."""
        with hiding(hidden):
            self.check_refused(self.program(idle), "copy", Code.DIFFERS)

    @parametrize(
        "name",
        (
            "cuGraphConditionalHandleCreate",
            "cuGraphAddNode",
            "cuStreamUpdateCaptureDependencies",
            "cuStreamBeginCaptureToGraph",
            "cuStreamEndCapture",
        ),
    )
    def test_driver_fails(self, name):
        program = self.program(nested)
        program.device.driver.failing = name
        self.check_refused(program, "no_graph", Code.CAPTURE_FAILED)

    def test_node_of_a_path_refuses(self):
        """The call runs uncaptured."""
        program = self.program(gated)
        self.check(program, calls=4)
        driver = program.device.driver
        (graph, *_) = (g for g in driver.graphs if len([*driver.with_bodies(g)]) > len(driver.graphs[g]))
        inner = {*driver.with_bodies(graph)} - {*driver.graphs[graph]}
        driver.refuses = lambda node: node in inner
        self.check(program, calls=3)
        (entry,) = report()
        self.assertIn(Code.REPLAY_FAILED, [reason.code for reason in entry.reasons])

    def test_copy_nodes_of_a_path(self):
        """A kernel copies in the place of a copy node of a path, as in a graph without branches."""
        program = self.program(residual)
        device, driver, capture = program.device, program.device.driver, program.device.capture_operator
        copies = []

        def captured(name: str, compute: Any, tensors: list[torch.Tensor]) -> None:
            if name == "addmm":
                node = MemcpyNode(tensors[-1].data_ptr(), tensors[0].data_ptr(), tensors[0].nbytes)
                copies.append(driver.add_node(device.capturing, node, driver.graphs[device.capturing][-1:]))
            capture(name, compute, tensors)

        driver.refuses = lambda node: node in copies
        with mock.patch.object(device, "capture_operator", captured):
            self.check(program)
        (entry,) = report()
        self.assertEqual((entry.choice, len(copies)), ("node_update", 1), str(entry))

    def test_no_prelude(self):
        """The host sets the nodes of paths."""
        self.check(self.program(two_in_a_row, "prelude"), calls=5)
        (entry,) = report()
        self.assertEqual(entry.choice, "node_update", str(entry))

    @parametrize("fn", [subtest(f, name=f.__name__) for f in (two_in_a_row, nested, behind_a_graph, looped)])
    def test_copied_inputs(self, fn):
        """A graph whose inputs are copied has branches, too."""
        self.check(self.program(fn, "copy"))
        for entry in report():
            self.assertEqual(entry.choice, "copy", str(entry))

    @parametrize("fn", [subtest(f, name=f.__name__) for f in (gated, looped)])
    def test_sizes(self, fn):
        """Each size has a recording."""

        def program() -> None:
            x, w, v = (torch.zeros(16, 16, device="cuda") for _ in range(3))
            torch._dynamo.mark_dynamic(x, 0)
            with torch.no_grad():
                torch.compile(fn)(x, w, v, torch.ones((), dtype=torch.bool, device="cuda"))

        with conditional_nodes():
            (found,) = compiled(program, pygraph_sizes=False)
        device = self.stack.enter_context(modelled_device(SizedDriver, SizedDevice))
        sized = SizedProgram(device, found, "node_update")
        (name,) = symbols(sized.inputs)
        for n in range(9):
            given = self.inputs(sized, n % 2 == 0, 0, {name: (5, 16, 33)[n % 3]})
            expected = sized.call(given, captured=False)
            self.assertEqual(sized.call(given, captured=True), expected, atol=0, rtol=0)
        self.assertEqual([entry.choice for entry in report()], ["node_update"] * 3)


instantiate_parametrized_tests(CodegenTest)
instantiate_parametrized_tests(ConditionalTest)


if __name__ == "__main__":
    run_tests()
