# Owner(s): ["module: inductor"]
"""
Refusals: graphs that cannot be captured, bound or proven.

Functions as Inductor writes them are deployed on the modelled device of modelled_cuda.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
from typing import Any, TYPE_CHECKING
from unittest import mock

import numpy as np

import torch
from torch._dynamo.utils import counters
from torch._inductor import cudagraph_trees as trees
from torch._inductor.pygraph import report, reset_report
from torch._inductor.pygraph.capture import again, agreement, bound, collectives, copying
from torch._inductor.pygraph.graph.binding import NodeUpdateBinding
from torch._inductor.pygraph.graph.driver import DriverError
from torch._inductor.pygraph.types.reason import Code, Reason, RefusedError
from torch._inductor.pygraph.verify import diagnose, rehearsal
from torch._inductor.pygraph.verify.rehearsal import HostGenerators
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.modelled_nodes import MemcpyNode
from torch.testing._internal.modelled_operators import on_host
from torch.testing._internal.pygraph_collectives import CollectiveTestCase
from torch.testing._internal.pygraph_functions import (
    hiding,
    mul,
    RecordTestCase,
    sin,
)


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class RefusalTest(CollectiveTestCase):
    def numbers_of_the_host(
        self, number: Callable[[], float], calls: int, force: str | None
    ) -> list[float]:
        "What each call of a function gives whose kernel takes a number from host code."

        def scale(out: torch.Tensor, x: torch.Tensor) -> None:
            by = number()
            self.device.launch(lambda o, a: torch.mul(a, by, out=o), out, x)

        x = self.device.tensor(torch.ones(8))
        fn = self.deploy(
            "x, = args; args.clear(); a = new(); scale(a, x); return (a,)",
            [x],
            force=force,
        )
        fn.model.__globals__["scale"] = scale
        return [on_host(fn(x)[0])[0].item() for _ in range(calls)]

    def conjugating(self, body: str) -> Any:
        "A function whose operator_mul is aten.mul: what it launches depends on its inputs."

        def mul_of_conjugate(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
            torch.mul(x.conj(), y, out=out)

        def operator_mul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            out = self.device.empty_strided((8,), (1,), torch.complex64)
            kernel = mul_of_conjugate if x.is_conj() else mul
            self.device.launch(kernel, out, x, y)
            return out

        fn = RecordTestCase.generated(self, body)
        fn.__globals__["operator_mul"] = operator_mul
        return fn

    def check_complex(
        self, body: str, force: str, mode: str, conjugated_from: int
    ) -> None:
        def value(t: torch.Tensor) -> torch.Tensor:
            on_cpu = on_host(t).clone()
            return on_cpu.conj().resolve_conj() if t.is_conj() else on_cpu

        fn = None
        for i in range(8):
            x, y = (
                self.device.tensor(torch.randn(8, dtype=torch.complex64))
                for _ in range(2)
            )
            if i >= conjugated_from:
                x = torch.ops.aten._conj(x)
            fn = fn or self.deploy(
                body,
                [x, y],
                force=force,
                mode=mode,
                names=["tangents_1", "tangents_2"],
            )
            expected = value(x) * value(y)
            (out,) = fn(x, y)
            if "_conj" in body:
                expected = expected.conj()
            self.assertEqual(value(out), expected)
            del out

    @parametrize(
        "failure, choice",
        (
            ("proof", "no_graph"),
            ("nodes", "no_graph"),
            ("deploy", "no_graph"),
            ("collective", "no_graph"),
            ("capture", "copy"),
        ),
    )
    def test_collectives_of_a_graph_that_fails(self, failure, choice):
        "Here, or on another rank."
        asked = []
        step = "0" if failure == "collective" else failure

        def agree(groups, name, value):
            asked.append((groups, name.rpartition("/")[2], value))
            return value and name.rpartition("/")[2] != step

        refused = DriverError("refused")
        capture = torch.cuda.graph

        @contextlib.contextmanager
        def forked(*args, **kwargs):
            try:
                with capture(*args, **kwargs):
                    yield
            except RefusedError:
                raise RuntimeError("the stream of the collectives has not joined")

        here = {
            "proof": hiding(0),
            "collective": mock.patch.object(torch.cuda, "graph", forked),
            "nodes": mock.patch.object(collectives.Collectives, "_enable", side_effect=refused),
        }
        with (
            mock.patch.object(agreement, "agree", agree),
            here.get(failure, contextlib.nullcontext()),
        ):
            self.check_collectives("in_between")
        (entry,) = report()
        self.assertEqual((entry.choice, entry.copied_bytes != 0), (choice, choice == "copy"))
        capture = [("capture", True)]
        # Here it fails behind the last collective, which other ranks do not know.
        ends = {"deploy": [("deploy", True)], "collective": [("deploy", None)]}
        rest = [("0", True), *ends.get(failure, [("deploy", None), ("1", None)])]
        steps = capture if failure == "capture" else capture + rest
        self.assertEqual(asked, [(("0",), *step) for step in steps])
        if failure == "collective":
            self.assertEqual(entry.reasons[0].code, Code.RANKS_DISAGREE_ON_CAPTURE)

    @parametrize("failure", ("", "capture", "0", "deploy"))
    def test_collectives_whose_inputs_are_copied(self, failure):
        "As where inputs are bound: no rank captures or deploys the graph alone."
        self.ranks_decide, self.force, asked = True, "copy", []

        def agree(groups, name, value):
            asked.append((name.rpartition("/")[2], value))
            return value and name.rpartition("/")[2] != failure

        with mock.patch.object(agreement, "agree", agree):
            self.check_collectives("in_between")
        (entry,) = report()
        self.assertEqual(entry.choice, "no_graph" if failure else "copy")
        expected = [("capture", True), ("0", True), ("deploy", None if failure == "0" else True)]
        self.assertEqual(asked, expected[:1] if failure == "capture" else expected)

    def test_memory_that_one_rank_lacks(self):
        "The others do not wait for it to copy inputs."
        self.ranks_decide, self.force, asked = True, "copy", []
        lack = Reason.of(Code.NO_MEMORY_BEFORE_CAPTURE)
        with (
            mock.patch.object(agreement, "agree", lambda groups, name, value: asked.append(value)),
            mock.patch.object(copying.CopyGraphNode, "_lack_of_memory", lambda node: lack),
        ):
            self.check_collectives("in_between")
        self.assertEqual(asked, [None])

    def test_recording_that_fails_between_collectives_of_two_groups(self):
        "The ranks of either group wait at another step."
        self.ranks_decide, self.groups, self.force, asked = True, ("0", "1"), "node_update", []

        def agree(groups, name, value):
            # With the number of the recording, or the group.
            step = "/".join(name.split("/")[-2:])
            asked.append((groups, step, value))
            return value and step != "0/0"

        with mock.patch.object(agreement, "agree", agree):
            self.check_collectives("scattered")
        both, first, second = ("0", "1"), ("0",), ("1",)
        expected = [(both, "1/capture", True), (first, "0/0", True), (second, "1/0", None), (both, "1/deploy", None)]
        self.assertEqual(asked, expected)

    @parametrize("is_interrupt", (False, True))
    def test_recording_with_collectives_ends(self, is_interrupt):
        """
        Other ranks learn of it, also from an interrupt. The graph is destroyed, whatever holds it: its process group could
        not be destroyed before.
        """
        asked, graphs = [], []

        def agree(groups, name, value):
            asked.append((name.rpartition("/")[2], value))
            return value

        def fail(node, graph):
            graphs.append(graph)
            raise KeyboardInterrupt if is_interrupt else RefusedError(Reason.of(Code.LAUNCH_FAILED, error=""))

        with (
            mock.patch.object(agreement, "agree", agree),
            mock.patch.object(bound.BoundGraphNode, "_prove", fail),
            self.assertRaises(KeyboardInterrupt) if is_interrupt else contextlib.nullcontext(),
        ):
            self.check_collectives("in_between")
        self.assertEqual(asked, [("capture", True), ("0", True), ("deploy", None), ("1", None)])
        self.assertEqual([graph.is_destroyed for graph in graphs], [True])

    @parametrize("repeats, adds_atomically", ((True, False), (False, False), (True, True)))
    def test_results_that_are_only_close(self, repeats, adds_atomically):
        """
        As those of a function that is not deterministic are. One that is has to be
        reproduced to the bit: what is wrong may be a small part of the result.
        Atomic additions may repeat their order in all runs that are not a graph's.
        """
        runs, is_python = itertools.count(1), [False]

        def near(out: torch.Tensor, x: torch.Tensor) -> None:
            wrong = not is_python[0] if repeats else next(runs) % 3
            torch.mul(x, 1 + 1e-5 * wrong, out=out)

        fn = self.deploy(
            "x, y = args; args.clear(); is_python[0] = True; a = new(); "
            "launch(near, a, x); is_python[0] = False; return (a,)",
            [self.randn(), self.randn()],
        )
        fn.model.__globals__.update(near=near, is_python=is_python)
        with mock.patch.object(bound, "adds_atomically", lambda spec: adds_atomically):
            for _ in range(6):
                x, y = self.randn(), self.randn()
                (out,) = fn(x, y)
                self.assertEqual(on_host(out), on_host(x), atol=1e-4, rtol=1e-4)
        self.assertEqual(counters["pygraph"]["unbound"], repeats and not adds_atomically, str(report()))

    @parametrize("hidden", (False, True))
    def test_input_that_matters_little_beside_atomic_additions(self, hidden):
        "Where a node hides its address, the results are close, and the launches differ."
        is_python = [False]

        def near(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
            torch.add(x, torch.nan_to_num(y), alpha=1e-5 * (1 + is_python[0]), out=out)

        with hiding(1) if hidden else contextlib.nullcontext():
            fn = self.deploy(
                "x, y = args; args.clear(); is_python[0] = True; a = new(); "
                "launch(near, a, x, y); is_python[0] = False; return (a,)",
                [self.randn(), self.randn()],
            )
            fn.model.__globals__.update(near=near, is_python=is_python)
            with mock.patch.object(bound, "adds_atomically", lambda spec: True):
                for _ in range(6):
                    x, y = self.randn(), self.randn()
                    (out,) = fn(x, y)
                    self.assertEqual(on_host(out), on_host(x), atol=1e-3, rtol=1e-3)
        self.assertEqual(counters["pygraph"]["unbound"], hidden, str(report()))
        self.assertIn("launches otherwise: 1 words differ, first in parameter" if hidden else "", report()[0].reason)

    def check_results_that_vary(self, body: str, is_bound: bool, **names: Any) -> None:
        """A function of ``x`` and ``y`` launches ``vary``, whose results differ in their sign from run to run."""
        runs = itertools.count()

        def vary(out: torch.Tensor, x: torch.Tensor) -> None:
            torch.mul(x, (-1) ** (next(runs) % 3), out=out)

        fn = self.deploy(f"x, y = args; args.clear(); {body}", [self.randn(), self.randn()])
        fn.model.__globals__.update(vary=vary, **names)
        for _ in range(6):
            x, y = self.randn(), self.randn()
            (out,) = fn(x, y)
            self.assertEqual(on_host(out).abs(), on_host(x).abs())
        self.assertEqual(counters["pygraph"]["unbound"], not is_bound, str(report()))

    @parametrize("hidden", (False, True))
    def test_results_that_vary_from_run_to_run(self, hidden):
        """
        As the gradient of a bias in front of a batch norm, which is the rounding of a sum that cancels out. No operator
        says that it adds atomically. Where a node hides its address, the launches differ.
        """
        with hiding(0) if hidden else contextlib.nullcontext():
            self.check_results_that_vary("a = new(); launch(vary, a, x); return (a,)", not hidden)

    # What a kernel's further parameter holds in four captures: in the graph; in the call; and in the two on a stack of the same
    # content, with the addresses of the call and with placeholders.
    PARAMETERS = {
        "undefined": (7, 0, 0, 0),
        "half": ("half", "half", "half", "half"),
        "counter": (0, 1, 2, 3),
        "memory": ("memory", 0, 0, 0),
    }

    @parametrize("case", [*PARAMETERS])
    def test_parameters_that_vary_from_capture_to_capture(self, case):
        """
        A parameter is undefined if it is the same at other addresses, or half an address. A counter is not, nor is memory that
        a library may have freed.
        """
        read, contents, memory = again.nodes_of, iter(self.PARAMETERS[case]), self.randn()

        def with_parameter(graph: Any) -> list[Any]:
            (node,) = read(graph)
            content = next(contents)
            if content == "half":
                word = node.captured[1][:4] + b"none"
            else:
                word = (memory.data_ptr() if content == "memory" else content).to_bytes(8, "little")
            return [dataclasses.replace(node, captured=(*node.captured, word))]

        with mock.patch.object(again, "nodes_of", with_parameter):
            self.check_results_that_vary("a = new(); launch(vary, a, x); return (a,)", case in ("half", "undefined"))

    @parametrize("hidden", (False, True))
    def test_copy_nodes_of_results_that_vary(self, hidden):
        """Copy nodes copy between buffers. Kernels copy from inputs and to outputs, in the further captures, too."""
        driver = self.device.driver

        def copy(out: torch.Tensor, x: torch.Tensor) -> None:
            if self.device.captured is None:
                self.device.launch(lambda to, of: to.copy_(of), out, x)
            else:
                graph = self.device.capturing
                driver.add_node(graph, MemcpyNode(out.data_ptr(), x.data_ptr(), x.nbytes), driver.graphs[graph][-1:])

        body = (
            "a = new(); copy(a, x); b = new(); launch(vary, b, a); c = new(); copy(c, b); d = new(); copy(d, c); return (d,)"
        )
        with hiding(0) if hidden else contextlib.nullcontext():
            self.check_results_that_vary(body, not hidden, copy=copy)

    @parametrize("force", ("node_update", None))
    def test_host_that_varies(self, force):
        "As of an operator that counts its calls: a graph would have the first number."
        count = itertools.count().__next__
        seen = self.numbers_of_the_host(count, 6 if force else 130, force)
        self.assertEqual(seen, sorted(set(seen)))
        self.assertEqual(report()[0].choice, "no_graph")

    @parametrize("method", ("repeats_itself", "room"))
    def test_host_that_may_vary(self, method):
        "There is no memory to see whether it does, once the function was rehearsed."
        failures = {
            "repeats_itself": mock.patch.object(
                rehearsal.Rehearsal,
                "repeats_itself",
                side_effect=torch.OutOfMemoryError("out of memory"),
            ),
            "room": mock.patch.object(diagnose, "room", lambda *args: 0),
        }

        def failing(*args, **kwargs):
            failures[method].start()
            self.addCleanup(failures[method].stop)
            return diagnose.verify(*args, **kwargs)

        with mock.patch.object(bound, "verify", failing):
            count = itertools.count().__next__
            seen = self.numbers_of_the_host(count, 6, "node_update")
        self.assertEqual(seen, sorted(set(seen)))
        (entry,) = report()
        self.assertEqual(entry.choice, "no_graph")
        self.assertIs(entry.reasons[-1].code, Code.NO_MEMORY_FOR_PROOF)

    @parametrize("source", ("torch", "random", "numpy"))
    @parametrize("force", ("node_update", None))
    def test_random_numbers_of_the_host(self, force, source):
        draw = {
            "torch": lambda: torch.rand(()).item(),
            "random": random.random,
            "numpy": np.random.rand,
        }[source]
        calls = 6 if force else 130
        before = HostGenerators()
        expected = torch.tensor([draw() for _ in range(calls)], dtype=torch.float32)
        before.restore()
        seen = self.numbers_of_the_host(draw, calls, force)
        self.assertEqual(torch.tensor(seen), expected)
        self.assertEqual(report()[0].choice, "no_graph")

    def test_random_numbers_of_another_bit_generator(self):
        before = np.random.get_bit_generator()
        self.addCleanup(np.random.set_bit_generator, before)
        np.random.set_bit_generator(np.random.PCG64(1))
        first = HostGenerators()
        drawn = np.random.rand(3)
        self.assertFalse(first.equals(HostGenerators()))
        first.restore()
        self.assertTrue(first.equals(HostGenerators()))
        self.assertEqual(np.random.rand(3), drawn)

    def test_random_numbers_of_what_is_not_rehearsed(self):
        drawn: list[float] = []
        self.hook = lambda: drawn.append(random.random())
        before = HostGenerators()
        expected = [random.random() for _ in range(7)]
        before.restore()
        for (a, y), result in self.not_rehearsed(
            "launch(add, a, a, a); c = new(); launch(add, c, a, y); return (c,)"
        ):
            self.assertEqual(result, 2 * a + y)
            self.assertEqual(drawn.pop(), expected.pop(0))
        self.assertEqual(report()[1].choice, "no_graph")
        self.assertIn("on the host", report()[1].reason)

    @parametrize("by", ("new", "empty"))
    def test_output_that_is_not_written(self, by):
        fn = self.deploy(
            f"x, y = args; args.clear(); a = new(); launch(add, a, x, y); return (a, {by}())",
            [self.randn(), self.randn()],
            returned=[0, 1],
        )
        for _ in range(6):
            x, y = self.randn(), self.randn()
            self.assertEqual(on_host(fn(x, y)[0]), on_host(x) + on_host(y))
        self.assertEqual(counters["pygraph"]["unbound"], 0)

    def test_output_that_is_not_written_beside_one_that_differs(self):
        "An operator leaves it so, and all that it launches is captured."
        with hiding(0):
            fn = self.deploy(
                "x, y = args; args.clear(); a = new(); launch(add, a, x, y); return (a, empty())",
                [self.randn(), self.randn()],
                returned=[0, 1],
            )
            for _ in range(6):
                x, y = self.randn(), self.randn()
                self.assertEqual(on_host(fn(x, y)[0]), on_host(x) + on_host(y))
        (entry,) = report()
        self.assertEqual(entry.choice, "copy")
        self.assertIn("output 0", entry.reason)

    @parametrize("force", ("node_update", None))
    @parametrize(
        "body",
        (
            "a = empty(); operator(a, x); return (a,)",
            "a = empty(); operator(a, x); b = new(); launch(copy, b, a); return (b,)",
            "a = new(); operator(a, x); return (a,)",
            "a = new(); launch(copy, a, x); operator(x, x); return (x,)",
            "a = empty(); operator(a, x); launch(negate, a, a); return (a,)",
            "a = new(); operator(a, x); launch(negate, a, a); return (a,)",
            "operator(x, x); launch(negate, x, x); return (x,)",
            "b = empty(); launch(copy, b, x); del b; a = empty(); operator(a, x); return (a,)",
        ),
    )
    def test_operator_that_is_not_captured(self, force, body):
        """
        It launches on a stream of its own, or on the default one, as libraries for custom
        kernels do, while another is captured: at once, on what the capture was given. Captured kernels may write its
        results, too, and the memory before.
        """

        def operator(out: torch.Tensor, x: torch.Tensor) -> None:
            torch.sin(on_host(x), out=on_host(out))

        def negate(out: torch.Tensor, x: torch.Tensor) -> None:
            torch.neg(x, out=out)

        fn = None
        for _ in range(6 if force else 130):
            x = self.randn()
            expected = on_host(x).sin()
            fn = fn or self.deploy(
                f"x, = args; args.clear(); {body}",
                [x],
                force=force,
                mutated=(0,) if "(x, x)" in body else (),
                custom=True,
            )
            fn.model.__globals__.update(operator=operator, copy=torch.Tensor.copy_, negate=negate)
            (out,) = fn(x)
            self.assertEqual(on_host(out), -expected if "negate" in body else expected)
        (entry,) = report()
        self.assertEqual(entry.choice, "no_graph")
        self.assertIn("not captured" if force else "", entry.reason)

    @parametrize("force", ("node_update", None))
    @parametrize("part", (1, 1e-5))
    def test_operator_on_a_weight_that_is_not_captured(self, force, part):
        """
        The operator may convert a weight. While the graph is captured, the weight lies where it lies in each call. The
        operator's result may be a small part of the graph's.
        """
        weight = self.randn()

        def operator(out: torch.Tensor, x: torch.Tensor) -> None:
            torch.sin(on_host(x), out=on_host(out))

        def added(out: torch.Tensor, x: torch.Tensor, a: torch.Tensor) -> None:
            torch.add(x, a, alpha=part, out=out)

        fn = None
        for _ in range(6 if force else 130):
            x = self.randn()
            on_host(weight).add_(0.25)
            fn = fn or self.deploy(
                "x, w = args; args.clear(); a = empty(); operator(a, w); b = new(); launch(added, b, x, a); return (b,)",
                [x, weight],
                force=force,
                static=[1],
                custom=True,
            )
            fn.model.__globals__.update(operator=operator, added=added)
            (out,) = fn(x, weight)
            expected = torch.add(on_host(x), on_host(weight).sin(), alpha=part)
            self.assertEqual(on_host(out), expected, atol=0, rtol=0)
        (entry,) = report()
        self.assertEqual(entry.choice, "no_graph")
        self.assertIn("not captured" if force else "", entry.reason)

    @parametrize("size", ((), (2,)))
    @parametrize("returned", ([0], [0, 1]))
    def test_operator_that_is_not_captured_beside_a_seed(self, size, returned):
        "That nobody wrote it, as of attention that draws nothing, says nothing of the other one."

        def operator(out: torch.Tensor, x: torch.Tensor) -> None:
            torch.sin(on_host(x), out=on_host(out))

        fn = None
        for _ in range(6):
            x = self.randn()
            expected = on_host(x).sin()
            fn = fn or self.deploy(
                "x, = args; args.clear(); a = empty(); operator(a, x); seed = number(); "
                "b = new(); launch(copy, b, a); return (b, seed)",
                [x],
                returned=returned,
                custom=True,
            )
            stride = (1,) * len(size)
            number = functools.partial(self.device.empty_strided, size, stride, torch.int64)
            fn.model.__globals__.update(operator=operator, copy=torch.Tensor.copy_, number=number)
            out, _ = fn(x)
            self.assertEqual(on_host(out), expected)
        (entry,) = report()
        self.assertEqual(entry.choice, "no_graph")
        self.assertIn("not captured", entry.reason)

    @parametrize("force", ("node_update", None))
    def test_number_of_an_operator_that_is_not_captured(self, force):
        """A single integer may be an attention's seed, which is not compared. An operator of another library returns none."""

        def operator(x: torch.Tensor) -> torch.Tensor:
            out = self.device.empty_strided((), (), torch.int64)
            on_host(out).fill_((on_host(x) > 0).sum())
            return out

        body = "x, y = args; args.clear(); a = new(); launch(sin, a, x); return (a, operator(y))"
        fn = self.deploy(body, [self.randn(), self.randn()], returned=[0, 1], custom=True, force=force)
        fn.model.__globals__.update(operator=operator)
        for _ in range(6 if force else 130):
            x, y = self.randn(), self.randn()
            _, count = fn(x, y)
            self.assertEqual(on_host(count), (on_host(y) > 0).sum())
        self.assertEqual(report()[0].choice, "no_graph")

    @parametrize("force", ("node_update", "prelude", None))
    @parametrize("is_static", (True, False))
    def test_operator_that_writes_and_is_not_captured(self, force, is_static):
        """
        While the graph is captured, the operator writes the input itself, if that is static. The input then is what the graph
        should leave.
        """
        w = self.device.tensor(torch.ones(8))
        expected = torch.ones(8)
        body = "x, w = args; args.clear(); a = new(); launch(sin, a, x); operator(w); return (a,)"
        static = [1] if is_static else []
        fn = self.deploy(body, [self.randn(), w], mutated=(1,), static=static, custom=True, force=force)
        fn.model.__globals__.update(operator=lambda t: on_host(t).mul_(0.5))
        for _ in range(6 if force else 130):
            expected *= 0.5
            fn(self.randn(), w)
            self.assertEqual(on_host(w), expected, atol=0, rtol=0)
        self.assertEqual(report()[0].choice, "no_graph")

    @parametrize("force", ("node_update", "prelude", None))
    def test_operator_that_may_write_and_is_not_captured(self, force):
        """The operator changes nothing in the call that is recorded, so that results are equal."""
        body = "x, y = args; args.clear(); a = new(); launch(sin, a, x); operator(y); return (a,)"
        fn = self.deploy(body, [self.randn(), self.randn()], mutated=(1,), custom=True, force=force)
        fn.model.__globals__.update(operator=lambda t: on_host(t).clamp_(max=0.5))
        calls = 8 if force else 130
        for call in range(calls):
            y = self.device.tensor(torch.full((8,), 0.25 if call < calls - 5 else 2.0))
            expected = on_host(y).clamp(max=0.5)
            fn(self.randn(), y)
            self.assertEqual(on_host(y), expected)
        self.assertEqual(report()[0].choice, "no_graph")

    @parametrize("force", ("node_update", "copy", None))
    def test_table_of_an_operator_that_is_not_captured(self, force):
        """
        The operator computes a table from a weight, in memory of its own. The graph reads what the operator computed while it
        was captured, so that the proof finds no difference.
        """
        weight, table = self.randn(), self.randn()
        with torch.library._scoped_library("pygraph_test", "FRAGMENT") as library:
            library.define("tabulate(Tensor weight) -> Tensor")
            library.impl("tabulate", lambda w: (on_host(table).copy_(on_host(w) * 2), table)[1], "CUDA")
            body = "x, w = args; args.clear(); a = new(); launch(mul, a, x, operator(w)); return (a,)"
            fn = self.deploy(body, [self.randn(), weight], static=[1], custom=True, force=force)
            fn.model.__globals__.update(operator=torch.ops.pygraph_test.tabulate.default)
            for _ in range(6 if force else 130):
                x = self.randn()
                on_host(weight).add_(1)
                (a,) = fn(x, weight)
                self.assertEqual(on_host(a), on_host(x) * on_host(weight) * 2)
            self.assertEqual(report()[0].choice, "no_graph")

    def test_operator_that_returns_what_it_keeps(self):
        "A table, for instance, that it computed in its first call."
        table = self.randn()
        expected = on_host(table).clone()
        fn = self.deploy(
            "x, = args; args.clear(); a = new(); launch(sin, a, x); return (a, table)",
            [self.randn()],
            returned=[0, 1],
        )
        fn.model.__globals__.update(table=table)
        for _ in range(6):
            x = self.randn()
            out, given = fn(x)
            self.assertEqual(on_host(out), on_host(x).sin())
            self.assertEqual(on_host(given), expected)
            self.assertEqual(on_host(table), expected)
        self.assertEqual(counters["pygraph"]["unbound"], 0)

    def test_indices_of_an_operator_that_is_not_captured(self):
        "Those that the graph is given instead are in bounds, or the device would fail."

        def operator(out: torch.Tensor, x: torch.Tensor) -> None:
            on_host(out).copy_(on_host(x).argsort())

        def take(out: torch.Tensor, y: torch.Tensor, at: torch.Tensor) -> None:
            torch.index_select(y, 0, at, out=out)

        fn = None
        for _ in range(6):
            x, y = self.randn(), self.randn()
            expected = on_host(y)[on_host(x).argsort()]
            fn = fn or self.deploy(
                "x, y = args; args.clear(); i = numbers(); operator(i, x); "
                "b = new(); launch(take, b, y, i); return (b,)",
                [x, y],
                custom=True,
            )
            numbers = functools.partial(self.device.empty_strided, (8,), (1,), torch.int64)
            fn.model.__globals__.update(operator=operator, take=take, numbers=numbers)
            (out,) = fn(x, y)
            self.assertEqual(on_host(out), expected)
        (entry,) = report()
        self.assertIn("not captured", entry.reason)

    @parametrize("body", ("return (a,)", "b = new(); launch(copy, b, a); return (b,)"))
    def test_operator_that_writes_in_part(self, body):
        "The rest is what lay there, captured or not. All that it launches is captured."
        fn = self.deploy(
            "x, = args; args.clear(); a = empty(); "
            f"launch(sin, torch.as_strided(a, (4,), (2,)), torch.as_strided(x, (4,), (2,))); {body}",
            [self.randn()],
        )
        fn.model.__globals__.update(copy=torch.Tensor.copy_)
        for _ in range(6):
            x = self.randn()
            self.assertEqual(on_host(fn(x)[0])[::2], on_host(x)[::2].sin())
        (entry,) = report()
        self.assertEqual(entry.choice, "copy")

    def test_output_that_is_written_in_part(self):
        fn = self.deploy(
            "x, y = args; args.clear(); a = new(); launch(sin, torch.as_strided(a, (4,), (2,)), torch.as_strided(x, (4,), (2,))); return (a,)",
            [self.randn(), self.randn()],
        )
        for _ in range(6):
            x, y = self.randn(), self.randn()
            self.assertEqual(on_host(fn(x, y)[0])[::2], on_host(x)[::2].sin())
        self.assertEqual(counters["pygraph"]["unbound"], 0, str(report()))

    def test_output_that_is_written_elsewhere(self):
        "In memory that is neither a placeholder nor an output."
        elsewhere = self.randn()
        bind = NodeUpdateBinding.update

        def update(binding: NodeUpdateBinding, pointers: Sequence[int]) -> None:
            bind(binding, [*pointers[:-1], elsewhere.data_ptr()])

        with mock.patch.object(NodeUpdateBinding, "update", update):
            self.check(self.ADD)
        self.assertEqual(counters["pygraph"]["unbound"], 1)
        self.assertEqual(report()[0].choice, "copy")

    @parametrize("method", ("instantiate", "replay"))
    def test_graph_that_fails_once_bound(self, method):
        with self.failing_once(method):
            self.check(self.ADD)
        (entry,) = report()
        self.assertEqual(entry.choice, "copy")
        self.assertIn("no memory", entry.reason)
        self.assertNotIn("advice", entry.reason)

    def test_copied_graph_that_can_not_be_launched(self):
        with self.failing_once("replay"):
            self.check(self.ADD, force="copy")
        (entry,) = report()
        self.assertEqual(entry.choice, "no_graph")
        self.assertIn("no memory", entry.reason)

    @parametrize("hidden", (0, 1, 2))
    @parametrize("custom", (False, True))
    def test_hidden_word(self, hidden, custom):
        "The proof fails, the call is right, and so are those that copy. A custom operator may launch the kernel."
        with hiding(hidden):
            self.check(self.ADD, custom=custom)
        self.assertEqual(counters["pygraph"]["unbound"], 1)
        self.assertEqual(counters["pygraph"]["copied_outputs"], 1)
        # How the function launches, captured once more, goes with the reason.
        self.assertIn("words differ, first in parameter", report()[0].reasons[0].details["launches"])

    @parametrize("force", ("node_update", None))
    def test_node_that_refuses_later(self, force):
        "The program goes on without a graph."
        sets = itertools.count()
        with self.refusing(lambda node: next(sets) > 7):
            fn = self.check(self.ADD, force=force, calls=120)
        (function,) = report()
        self.assertEqual(function.choice, "no_graph")
        self.assertIn("could not be set", function.reason)
        self.assertNotIn("replay", getattr(fn.current, "__qualname__", ""))

    def test_node_that_refuses_a_misaligned_input(self):
        "The clone in its place is what was mutated."
        body = "x, y = args; args.clear(); launch(add, x, x, y); a = new(); launch(sin, a, x); return (a,)"
        fn = None
        for i in range(9):
            x = torch.as_strided(self.randn(64), (8,), (1,), int(i > 2))
            y = self.randn()
            expected = on_host(x) + on_host(y)
            fn = fn or self.deploy(body, [x, y], mutated=(0,))
            with self.refusing(lambda node: i > 5):
                (out,) = fn(x, y)
            self.assertEqual(on_host(x), expected)
            self.assertEqual(on_host(out), expected.sin())
        self.assertEqual(report()[0].choice, "no_graph")

    @parametrize("force", ("node_update", "copy"))
    def test_capture_that_fails(self, force):
        def fails(out, x):
            if self.device.captured is not None:
                raise RuntimeError("not while capturing")
            sin(out, x)

        body = "args.clear(); a = new(); launch(torch.Tensor.zero_, a); b = new(); fails(b, a); return (b,)"
        with mock.patch.object(copying, "clean_up_failed_capture"):
            fn = None
            for _ in range(5):
                fn = fn or self.deploy(body, [], force=force)
                fn.model.__globals__["fails"] = lambda out, x: fails(
                    on_host(out), on_host(x)
                )
                (out,) = fn()
                self.assertEqual(on_host(out), torch.zeros(8))
        self.assertIn("capture failed: not while capturing", report()[0].reason)
        self.assertEqual(report()[0].choice, "no_graph")

    def test_conjugate_is_returned(self):
        body = "x, y = args; args.clear(); a = operator_mul(x, y); return (torch.ops.aten._conj(a),)"
        for force in ("node_update", "copy"):
            for mode in ("inference", "backward"):
                with (
                    self.subTest(force=force, mode=mode),
                    mock.patch.object(self, "generated", self.conjugating),
                ):
                    reset_report()
                    self.check_complex(body, force, mode, conjugated_from=8)
                    (entry,) = report()
                    self.assertEqual(
                        entry.reason, "it returns a conjugate that is not computed"
                    )

    def test_tangent_becomes_a_conjugate(self):
        "No guard asks for it."
        body = "x, y = args; args.clear(); a = operator_mul(x, y); return (a,)"
        for force in ("node_update", "copy"):
            with (
                self.subTest(force=force),
                mock.patch.object(self, "generated", self.conjugating),
            ):
                self.check_complex(body, force, "backward", conjugated_from=5)

    def test_interrupted_recording(self):
        "As by Ctrl-C. The allocator knows by then what the path left alive."
        self.weight, interrupts = self.randn(), iter([KeyboardInterrupt])
        traceback = []

        def hook():
            if self.device.captured is not None:
                for interrupt in interrupts:
                    raise interrupt

        self.hook = hook
        with mock.patch.object(
            self, "BACKWARD", f"hook(); {self.BACKWARD.strip()}"
        ):
            for _ in range(3):
                # Only the forward is recorded, and replayed.
                self.step(self.randn(), [])
                trees.get_manager(0).running_forwards_with_pending_backwards = False
            for _ in range(8):
                try:
                    kept = self.step(self.randn())
                except KeyboardInterrupt as interrupt:
                    traceback.append(interrupt)
                    continue
                for actual, expected in kept:
                    self.assertEqual(on_host(actual), expected)
                del actual
        self.assertEqual(len(traceback), 1)
        # It holds the activation.
        traceback.clear()


instantiate_parametrized_tests(RefusalTest)


class RefusalPythonTest(RefusalTest):
    "Without compiled code."

    compiled = None


if __name__ == "__main__":
    run_tests()
