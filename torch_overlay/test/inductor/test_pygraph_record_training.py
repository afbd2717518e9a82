# Owner(s): ["module: inductor"]
"""
Training: activations, gradients, and graphs that follow one another.

Functions as Inductor writes them are deployed on the modelled device of modelled_cuda.py.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import types
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch._inductor import cudagraph_trees as trees
from torch._inductor.pygraph import report
from torch._inductor.pygraph.capture import agreement, bound
from torch._inductor.pygraph.select import controller, timing
from torch._inductor.pygraph.trees.manager import drop, max_recorded_again, policies_around
from torch._inductor.pygraph.types.reason import Code, Reason
from torch._inductor.pygraph.verify import rehearsal
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.modelled_operators import on_host
from torch.testing._internal.pygraph_collectives import Ranks
from torch.testing._internal.pygraph_functions import (
    Deployed,
    HeldByAutograd,
    hiding,
    new_generation,
    RecordTestCase,
)


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class TrainingTest(RecordTestCase):
    def is_of_backward(self, node: int) -> bool:
        nodes, graphs = self.device.driver.nodes, self.device.driver.graphs.values()
        return any(node in graph and nodes[graph[0]].launch.kernel.name == "cos_" for graph in graphs)

    @parametrize("ranks_decide", (False, True))
    def test_collectives_of_a_backward(self, ranks_decide):
        "What the forward left in the pool is gone after the proof, or restored from a copy."
        self.ranks_decide = ranks_decide
        forward = self.deploy(
            "x, = args; args.clear(); a = new(); launch(sin, a, x); return (a,)",
            [self.randn()],
            mode="forward",
            returned=(),
        )
        reduce = "torch.ops._c10d_functional.all_reduce_.default"
        backward = self.deploy(
            f"a, = args; args.clear(); launch(sin, a, a); {reduce}(a, 'sum', '0')\n"
            "b = new(); launch(sin, b, a); return (b,)",
            [self.randn()],
            mode="backward",
            names=("sin",),
            reused=(0,),
            force="node_update",
        )
        asked = []

        def agree(groups, name, value):
            asked.append((name.rpartition("/")[2], value))
            return value

        with (
            Ranks(self.device) as ranks,
            mock.patch.object(agreement, "agree", agree),
        ):
            for _ in range(9):
                x = self.randn()
                expected = on_host(x).sin().sin().mul(2).sin()
                ranks.ran = 0
                activations = list(forward(x))
                (out,) = backward.call(activations)
                self.assertEqual(on_host(out), expected)
                self.assertEqual(ranks.ran, 1)
                del out
        self.assertEqual(
            [entry.choice for entry in report()], ["node_update", "node_update" if ranks_decide else "copy"]
        )
        # A rank on which the forward is no graph would wait.
        steps = [("capture", True), ("0", True), ("deploy", True)]
        self.assertEqual(asked, steps if ranks_decide else [("capture", None)])

    def test_node_that_refuses_in_a_backward(self):
        "Whose activation was let go by then."
        self.weight = self.randn()
        held, sets = [], itertools.count()
        with self.refusing(lambda node: self.is_of_backward(node) and next(sets) > 2):
            for _ in range(9):
                # So that the tangent moves.
                held.append(self.randn())
                for actual, expected in self.step(self.randn()):
                    self.assertEqual(on_host(actual), expected)
                del actual
        self.assertEqual([f.choice for f in report()].count("no_graph"), 1)

    @parametrize("how", ("refuses", "no_memory"))
    def test_gradient_of_a_backward_that_is_not_replayed(self, how):
        "It lies where the activation did, which was let go, and the program keeps it."
        self.weight = self.randn()
        calls = itertools.count()

        def no_memory(t):
            # A copy of the forward's input, and then of the tangent.
            if next(calls) > 0:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return copied(t)

        kept, copied = [], trees.static_input
        force = "copy" if how == "no_memory" else "node_update"
        with (
            self.refusing(lambda node: self.is_of_backward(node) and next(calls) > 2),
            mock.patch.object(trees, "static_input", no_memory),
        ):
            for _ in range(9):
                x, y = self.randn(), self.randn()
                step = self.step(x, force=force)
                # Into the next steps, as where gradients are accumulated.
                if not kept and report()[-1].choice == "no_graph":
                    kept = step
                for actual, expected in [*step, *kept]:
                    self.assertEqual(on_host(actual), expected)
                del step, actual, y
        self.assertEqual(len(kept), 3)

    def test_activations_of_a_forward_without_a_graph(self):
        "They move from step to step, also where the backward copies its inputs."
        with hiding(0):
            kept, fn = [], None
            for _ in range(8):
                x, y = inputs = [self.randn(), self.randn()]
                kept.append(x)
                fn = fn or self.deploy(
                    "x, y = args; args.clear(); a = new(); launch(mul, a, x, y); return (a,)",
                    inputs,
                    mode="backward",
                    static=[0],
                    names=["mul", "tangents_1"],
                )
                (out,) = fn(x, y)
                self.assertEqual(on_host(out), on_host(x) * on_host(y))
                del out
        self.assertEqual(report()[0].choice, "copy")
        (recordings,) = trees.get_manager(0).roots.values()
        self.assertEqual(len(recordings), 1)

    def test_partitions(self):
        "What one passes on to the next lies in the pool, and is not copied."
        first = second = None
        kept = []
        for _ in range(7):
            new_generation()
            x, y = self.randn(), self.randn()
            first = first or self.deploy(
                "x, y = args; args.clear(); a = new(); launch(sin, a, x); b = new(); launch(add, b, x, y); return (a, b)",
                [x, y],
                returned=[1],
            )
            a, b = first.call([x, y])
            second = second or self.deploy(
                "a, y = args; args.clear(); launch(mul, a, a, y); c = new(); launch(add, c, a, y); return (c,)",
                [a, y],
                names=["partition_1_placeholder_0", "arg1_1"],
                reused=[0],
            )
            inputs = [a, y]
            del a
            (c,) = second.call(inputs)
            del inputs
            kept.append(
                (
                    b,
                    c,
                    on_host(x) + on_host(y),
                    on_host(x).sin() * on_host(y) + on_host(y),
                )
            )
            for b, c, expected_b, expected_c in kept:
                self.assertEqual((on_host(b), on_host(c)), (expected_b, expected_c))
        self.assertEqual(counters["pygraph"]["copied_outputs"], 0)
        self.assertEqual([e.external_inputs for e in report()], [2, 1])

    def test_training(self):
        self.weight = self.randn()
        kept = []
        for _ in range(7):
            kept += self.step(self.randn())
            for actual, expected in kept:
                self.assertEqual(on_host(actual), expected)
        self.assertEqual(counters["pygraph"]["unbound"], 0, str(report()))
        # The graph copies the gradient that lies in the activation's memory.
        self.assertEqual(counters["pygraph"]["copied_outputs"], 0)
        self.assertEqual(counters["pygraph"]["unsteady_recordings"], 0)

    def test_functions_around(self):
        "Those of one path, seen from either."
        self.weight = self.randn()
        for _ in range(4):
            self.step(self.randn())
        other = self.check(self.ADD)
        manager = trees.get_manager(0)
        (forward,) = [node for node in manager.get_roots() if node.children]
        ((backward,),) = forward.children.values()
        functions = [node.wrapped_function for node in (forward, backward)]
        for f, g in (functions, functions[::-1]):
            self.assertEqual(list(policies_around(manager, f.id)), [g.pygraph])
        (alone,) = [node for node in manager.get_roots() if not node.children]
        self.assertEqual(alone.wrapped_function.model, other.model)
        around = policies_around(manager, alone.wrapped_function.id)
        self.assertEqual(len(around), 0)
        # A graph takes those that follow it with it. They are recorded anew.
        manager.current_node = None
        drop(manager, functions[0].id)
        self.assertIsNone(policies_around(manager, functions[1].id))

    def test_recordings_behind(self):
        "A backward has one for each place behind each number of forwards."
        def node(id: str, *children: mock.Mock) -> mock.Mock:
            by_id = collections.defaultdict(list)
            for child in children:
                by_id[child.wrapped_function.id].append(child)
            return mock.Mock(wrapped_function=mock.Mock(id=id), children=by_id)

        layers = node("f", node("b"), node("f", node("b", node("b"))))
        manager = mock.Mock(roots=node("", layers, node("g")).children)
        most = {id: max_recorded_again(manager, id) for id in ("f", "b", "g", "other")}
        self.assertEqual(most, {"f": 3, "b": 3, "g": 1, "other": 0})

    def test_even_graph_that_is_timed_in_fewer_calls(self):
        "The others become graphs when it is timed without one."
        weight, even, timed = self.randn(), [], []
        forwards: list[Deployed | None] = [None, None]
        backwards: list[Deployed | None] = [None, None]

        def complete(samples: timing.Samples) -> bool:
            return samples.calls >= (4 if samples.state in even else 16)

        def cost(samples: timing.Samples) -> timing.Cost:
            us = 10.0 if samples.state in timed else 90.0
            us = 50.0 if samples.state in even else us
            timed.append(samples.state)
            return timing.Cost(*[timing.Estimate(us)] * 3)

        with (
            mock.patch.object(timing.Samples, "complete", property(complete)),
            mock.patch.object(timing.Samples, "cost", cost),
        ):
            for _ in range(60):
                new_generation()
                h, pending = self.randn(), []
                for k in range(2):
                    if forwards[k] is None:
                        forwards[k] = self.deploy_forward(h, weight, None)
                        even += [forwards[k].current.state] * k
                    h, a, _ = forwards[k].call([h, weight])
                    pending.append(a)
                    del a
                for k in (1, 0):
                    inputs = [pending.pop(), weight, self.randn()]
                    if backwards[k] is None:
                        backwards[k] = self.deploy_backward(inputs, None)
                        even += [backwards[k].current.state] * k
                    backwards[k].call(inputs)
        self.assertEqual([e.choice for e in report()], ["node_update"] * 4)
        reasons = [entry.reason for entry in report()]
        self.assertEqual(reasons.count("not measured faster; it shares the memory of neighbouring graphs"), 2)

    def test_backward_copies_more_without_its_forward(self):
        "As a graph it was timed behind another graph, and is decided anew when that goes."
        self.weight = self.randn()
        x = self.randn()
        uncaptured = self.deploy_forward(x, self.weight, "no_graph")
        graph = self.deploy_forward(x, self.weight, "copy")
        entry = None

        def run(forward: Deployed, until: Callable[[], bool]) -> None:
            nonlocal entry
            self.forward = forward
            for _ in range(900):
                for actual, expected in self.step(self.randn(), force=None):
                    self.assertEqual(on_host(actual), expected)
                entry = report()[-1]
                if until():
                    return
            self.fail("it never came to that")

        stays = True
        with (
            hiding(0),
            mock.patch.object(timing, "judge", lambda *args: (stays, Reason.of(Code.NOT_FASTER))),
        ):
            # It is recorded for both.
            run(uncaptured, lambda: entry.external_inputs > 0)
            run(graph, lambda: entry.choice != "undecided")
            # The gradient, and not the activation.
            self.assertEqual((entry.choice, entry.copied_bytes), ("copy", 32))
            run(graph, lambda: True)
            self.assertEqual(counters["pygraph"]["reselected"], 0)
            stays = False
            run(uncaptured, lambda: entry.choice == "undecided")
            self.assertEqual(entry.reason, "it copies 64 bytes, not 32 as timed")
            run(uncaptured, lambda: entry.choice != "undecided")
        self.assertEqual(entry.choice, "no_graph")
        self.assertEqual(counters["pygraph"]["reselected"], 1)

    def backwards(
        self,
        body: str,
        calls: int = 7,
        around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        *,
        force: str | None = "node_update",
        custom: bool = False,
        **functions: Any,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """
        Yield activation, tangent and gradient, on the host, of steps whose backward is ``body``. The activation ``a`` lies
        in the pool. The backward is called in a context that ``around`` gives.
        """
        weight, forward, backward = self.randn(), None, None
        for _ in range(calls):
            new_generation()
            x, t = self.randn(), self.randn()
            forward = forward or self.deploy_forward(x, weight)
            out, a, w = forward.call([x, weight])
            inputs = [a, t]
            backward = backward or self.deploy(
                f"a, t = args; args.clear(); {body}; return (c,)",
                inputs,
                force=force,
                custom=custom,
                mode="backward",
                static=[0],
                names=["mul", "tangents_1"],
            )
            backward.model.__globals__.update(functions)
            del a
            with around():
                (grad,) = backward.call(inputs)
            yield on_host(x) * on_host(weight), on_host(t), on_host(grad)

    @parametrize("error", (5e-4, 1.0))
    def test_gradients_that_do_not_repeat(self, error):
        "By more than a tolerance, as sums do that cancel out; or by far more than they do."
        runs, is_python = itertools.count(1), [False]

        def noisy(out: torch.Tensor, x: torch.Tensor, by: torch.Tensor) -> None:
            by_run = (5e-4, -5e-4)[next(runs) % 2] if is_python[0] else error
            torch.add(torch.mul(x, by), by_run, out=out)

        body = "is_python[0] = True; c = new(); launch(noisy, c, a, t); is_python[0] = False"
        for a, t, grad in self.backwards(body, noisy=noisy, is_python=is_python):
            self.assertEqual(grad, a * t, atol=2 * error, rtol=0)
        self.assertEqual(counters["pygraph"]["unbound"], error > 1e-2, str(report()))

    def varying(self, **kwargs: Any) -> None:
        """
        Run backwards whose gradients vary from run to run, as that of a bias in front of a batch norm does: it is the
        rounding of a sum that cancels out.
        """
        runs = itertools.count()

        def vary(out: torch.Tensor, x: torch.Tensor, by: torch.Tensor) -> None:
            torch.mul(x, by * (-1) ** next(runs), out=out)

        for a, t, grad in self.backwards("c = new(); launch(vary, c, a, t)", vary=vary, **kwargs):
            self.assertEqual(grad.abs(), (a * t).abs())

    @parametrize("varies", (False, True))
    def test_a_backward_runs_again_if_results_differ(self, varies):
        "Until then its recording runs it once."
        runs, other_runs = [], rehearsal.Rehearsal.other_runs

        def run_again(self, inputs):
            runs.append(len(inputs))
            return other_runs(self, inputs)

        with mock.patch.object(rehearsal.Rehearsal, "other_runs", run_again):
            if varies:
                self.varying()
            else:
                for a, t, grad in self.backwards("c = new(); launch(mul, c, a, t)"):
                    self.assertEqual(grad, a * t)
        self.assertEqual(len(runs) > 0, varies)
        self.assertEqual([entry.choice for entry in report()], ["node_update"] * 2, str(report()))

    @parametrize("hidden", (False, True))
    def test_gradients_that_vary_from_run_to_run(self, hidden):
        "The graph overwrites the activation. So another recording keeps a copy, and tells why results differ."
        self.varying(around=lambda: hiding(0) if hidden else contextlib.nullcontext())
        self.assertEqual(report()[-1].choice, "no_graph" if hidden else "node_update", str(report()))

    @parametrize("custom", (False, True))
    def test_activations_without_memory_for_copies(self, custom):
        "PyGraph does not find out why results differ. It captures no function that calls a custom operator."
        with mock.patch.object(bound.BoundGraphNode, "_has_room_for_copies", lambda self, inputs: False):
            self.varying(custom=custom)
        entry = report()[-1]
        self.assertEqual(entry.choice, "no_graph" if custom else "copy", str(report()))
        self.assertIs(entry.reasons[-1].code, Code.NO_MEMORY_FOR_PROOF if custom else Code.DIFFERS)

    @parametrize("force", ("node_update", None))
    @parametrize("of", ("a", "t"))
    @parametrize(
        "body",
        (
            "b = empty(); operator(b, {of}); c = new(); launch(mul, c, b, {other})",
            "c = empty(); operator(c, {of}); launch(mul, c, c, {other})",
            "c = new(); operator(c, {of}); launch(mul, c, c, {other})",
        ),
    )
    def test_operator_that_is_not_captured_in_a_backward(self, force, of, body):
        """
        It launches at once while the graph is captured. There it may find an activation as it is in the call. The gradient
        may be written over its result.
        """

        def operator(out: torch.Tensor, x: torch.Tensor) -> None:
            torch.sin(on_host(x), out=on_host(out))

        other = "t" if of == "a" else "a"
        body = body.format(of=of, other=other)
        calls = 7 if force else 130
        for a, t, grad in self.backwards(body, calls, force=force, custom=True, operator=operator):
            self.assertEqual(grad, a.sin() * t if of == "a" else t.sin() * a)
        self.assertEqual(report()[-1].choice, "no_graph", str(report()))

    @parametrize("force", ("node_update", None))
    def test_host_that_varies_in_a_backward(self, force):
        "As of an operator that counts its calls: a graph would have the number of its capture."
        count, seen = itertools.count(), []

        def counted(out: torch.Tensor, a: torch.Tensor, t: torch.Tensor) -> None:
            number = 100 * next(count)
            self.device.launch(lambda o, a, t: torch.mul(a, t, out=o).add_(number), out, a, t)

        calls = 7 if force else 130
        for a, t, grad in self.backwards("c = new(); counted(c, a, t)", calls, force=force, custom=True, counted=counted):
            seen += (grad - a * t).round().unique().tolist()
        self.assertEqual(seen, sorted({*seen}))
        self.assertEqual(report()[-1].choice, "no_graph", str(report()))

    @parametrize("error,is_bound", ((5e-4, True), (5e-2, True), (10.0, False)))
    def test_results_that_do_not_repeat(self, error, is_bound):
        """
        The graph differs by as much as uncaptured runs do, or by far more. What is mutated is
        looked at before another run writes it.
        """
        runs, is_python = itertools.count(1), [False]

        def noisy(out: torch.Tensor, x: torch.Tensor, by: torch.Tensor) -> None:
            run = next(runs)
            by_run = 5e-2 * (run % 3 == 0) if is_python[0] else error * (1 + run % 2 / 100)
            torch.add(torch.mul(x, by), by_run, out=out)

        fn = None
        for _ in range(7):
            x, t = (self.device.tensor(torch.randn(8).abs() + 1) for _ in range(2))
            m = self.randn()
            inputs = [x, t, m]
            fn = fn or self.deploy(
                "x, t, m = args; args.clear(); is_python[0] = True; c = new(); "
                "launch(mul, c, x, t); launch(noisy, m, x, t); "
                "is_python[0] = False; return (c,)",
                inputs,
                mutated=(2,),
            )
            fn.model.__globals__.update(noisy=noisy, is_python=is_python)
            (out,) = fn.call(inputs)
            expected = on_host(x) * on_host(t)
            for actual in (out, m):
                self.assertEqual(on_host(actual), expected, atol=0.06, rtol=0)
        self.assertEqual(counters["pygraph"]["unbound"], not is_bound, str(report()))

    @parametrize("force", ("node_update", "copy"))
    def test_gradients_of_a_step(self, force):
        "In the pool, unless the program has them when it begins the next step."
        self.weight = self.randn()

        def outcome() -> tuple[int, ...]:
            return tuple(
                counters["pygraph"][name]
                for name in ("held_gradients", "held_activations", "copied_outputs")
            )

        def steps(number: int, *, held: bool) -> None:
            kept: list[Any] = []
            for _ in range(number):
                if not held:
                    kept.clear()
                kept += self.step(self.randn(), force=force)
                for actual, expected in kept:
                    self.assertEqual(on_host(actual), expected)
                del actual

        copied = force == "copy"
        steps(6, held=False)
        self.assertEqual(outcome(), (0, 0, copied))
        # The second step and the third run uncaptured: gradients of the first lie where
        # a replay would write.
        steps(3, held=True)
        self.assertEqual(outcome(), (2, 2, copied))
        # The backward is recorded again. The graph copies the gradient that lies in the activation's memory.
        steps(2, held=False)
        self.assertEqual(outcome(), (2, 2, 3 if copied else 0))
        steps(4, held=True)
        self.assertEqual(outcome(), (2, 2, 3 if copied else 0))

    @parametrize("layers", (1, 2, 3))
    @parametrize("held", (False, True))
    def test_gradients_of_layers(self, layers, held):
        "Those of one code are called one after the other, which is no new step."
        weight, forward, backward = self.randn(), None, None
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for step in range(8):
            h, pending, grads = self.randn(), [], []
            for _ in range(layers):
                new_generation()
                forward = forward or self.deploy_forward(h, weight)
                value = on_host(h) * on_host(weight)
                h, a, _ = forward.call([h, weight])
                pending.append((a, value))
                del a
            while pending:
                a, value = pending.pop()
                inputs = [a, weight, t := self.randn()]
                del a
                if backward is None:
                    backward = self.deploy_backward(inputs)
                    function = backward.current.state
                grad, grad_x = backward.call(inputs)
                expected = value.cos() * on_host(t)
                grads += [(grad, expected), (grad_x, expected * on_host(weight))]
                del grad, grad_x
            for actual, expected in (*kept, *grads):
                self.assertEqual(on_host(actual), expected)
            # Into the next step, where gradients are accumulated.
            kept = grads if held else []
            del actual, grads
        self.assertEqual(function.outputs_outlive, held)
        self.assertEqual(counters["pygraph"]["copied_outputs"], 0)

    def test_layers_are_replayed_without_trees(self):
        "Each has a recording of the code that all share, further down the path."
        code = (
            "x, w = args; args.clear(); a = new(); launch(mul, a, x, w); b = new(); launch(sin, b, a); return (b, a)",
            "a, t = args; args.clear(); b = new(); launch(mul, b, a, t); return (b,)",
        )
        weights, forward, backward = [self.randn() for _ in range(20)], None, None
        for step in range(5):
            if step == 4:
                searches = mock.patch.object(trees.get_manager(0), "_run", side_effect=AssertionError("searched"))
                searches.start()
                self.addCleanup(searches.stop)
            h, t, pending = self.randn(), self.randn(), []
            for weight in weights:
                new_generation()
                forward = forward or self.deploy(
                    code[0], [h, weight], mode="forward", static=[1], names=["primals_1", "primals_2"]
                )
                expected = on_host(h) * on_host(weight)
                h, a = forward.call([h, weight])
                self.assertEqual(on_host(h), expected.sin())
                pending.append(a)
                del a
            while pending:
                inputs = [pending.pop(), t]
                backward = backward or self.deploy(
                    code[1], inputs, mode="backward", static=[0], names=["mul", "tangents_1"]
                )
                expected = on_host(inputs[0]) * on_host(t)
                (t,) = backward.call(inputs)
                self.assertEqual(on_host(t), expected)

    @parametrize("ahead", (1, 2, 4))
    @parametrize("held", (False, True))
    def test_micro_batches_in_flight(self, ahead, held):
        "One forward, one backward, with further forwards ahead of them, as in the stages of a pipeline."
        weights, forward, backward = [self.randn(), self.randn()], None, None
        order = [*range(ahead), *(i for first in range(8 - ahead) for i in (~first, ahead + first))]
        order += [~i for i in range(8 - ahead, 8)]
        for step in range(10):
            if step == 8:
                counters.clear()
                if held:
                    # A replay knows its recording. Else the last gradient is alive in the pool, and trees look for one.
                    searches = mock.patch.object(trees.get_manager(0), "_run", side_effect=AssertionError("searched"))
                    searches.start()
                    self.addCleanup(searches.stop)
            pending: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
            # Gradients of the first micro-batch, to which the others are added.
            grads: list[tuple[torch.Tensor, torch.Tensor]] = []
            for i in order:
                if i >= 0:
                    h, pending[i] = self.randn(), []
                    for weight in weights:
                        new_generation()
                        forward = forward or self.deploy_forward(h, weight)
                        value = on_host(h) * on_host(weight)
                        h, a, _ = forward.call([h, weight])
                        pending[i].append((a, value))
                        del a
                    continue
                t = self.randn()
                for weight in reversed(weights):
                    a, value = pending[~i].pop()
                    inputs = [a, weight, t]
                    del a
                    backward = backward or self.deploy_backward(inputs)
                    expected = value.cos() * on_host(t)
                    grad, t = backward.call(inputs)
                    self.assertEqual(on_host(grad), expected)
                    self.assertEqual(on_host(t), expected * on_host(weight))
                    if held and ~i == 0:
                        grads.append((grad, expected))
                    del grad
            for grad, expected in grads:
                self.assertEqual(on_host(grad), expected)
            grad = None
        # All were recorded before, and nothing runs uncaptured.
        self.assertEqual(counters["pygraph"], {})

    def marked_steps(self, held: Any, steps: int) -> list[int]:
        "Return how many recordings there are in each of some steps, of two micro-batches, while a tensor is held."
        weights, recorded = [self.randn(), self.randn()], []
        init = trees.CUDAGraphNode.__init__

        def counted(node: Any, *args: Any, **kwargs: Any) -> None:
            recorded[-1] += 1
            init(node, *args, **kwargs)

        patch = mock.patch.object(trees.CUDAGraphNode, "__init__", counted)
        patch.start()
        self.addCleanup(patch.stop)
        for step in range(steps):
            recorded.append(0)
            torch.compiler.cudagraph_mark_step_begin()
            for _ in range(2):
                h, t, pending = self.randn(), self.randn(), []
                for weight in weights:
                    new_generation()
                    self.forward = self.forward or self.deploy_forward(h, weight)
                    value = on_host(h) * on_host(weight)
                    h, a, _ = self.forward.call([h, weight])
                    pending.append(([a, weight], value))
                    del a
                if step == 3 and not held:
                    held += pending.pop()[0]
                while pending:
                    inputs, value = pending.pop()
                    inputs.append(t)
                    self.backward = self.backward or self.deploy_backward(inputs)
                    expected = value.cos() * on_host(t)
                    grad, t = self.backward.call(inputs)
                    self.assertEqual(on_host(grad), expected)
                    del grad
                del t
        return recorded

    def of_stock_graphs(self) -> Callable[[torch.Tensor], Any]:
        "Return a function that stock CUDA graphs run. Its outputs lie in the pool."
        # Trees free these outputs by functions of CUDA's allocator. The model has none.
        patch = mock.patch.object(torch._C, "_free_And_Remove_DeleterFn")
        patch.start()
        self.addCleanup(patch.stop)
        code = self.generated("x, = args; args.clear(); a = new(); launch(sin, a, x); return (a,)")
        deployed: list[Any] = []

        def run(x: torch.Tensor) -> Any:
            if deployed:
                return deployed[0]([x])
            compiled, outputs = trees.cudagraphify(
                code,
                [x],
                device_index=0,
                is_backward=False,
                is_inference=True,
                stack_traces=[None],
                constants=(),
                placeholders=(),
                mutated_input_idxs=(),
                compile_id=None,
            )
            deployed.append(compiled)
            return outputs

        return run

    def test_output_of_a_stock_function_is_read_behind_a_marked_step(self):
        "Trees would take it away before the function reads it."
        patch = mock.patch.object(trees.MarkStepBox, "mark_step_counter", 0)
        patch.start()
        self.addCleanup(patch.stop)
        stock, function = self.of_stock_graphs(), None
        body = "y, = args; args.clear(); a = new(); launch(sin, a, y); return (a,)"
        for _ in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            x = self.randn()
            (y,) = stock(x)
            torch.compiler.cudagraph_mark_step_begin()
            function = function or self.deploy(body, [y])
            (a,) = function.call([y])
            self.assertEqual(on_host(a), on_host(x).sin().sin())
            del y

    @parametrize("of_stock", (False, True))
    def test_output_that_outlives_a_marked_step(self, of_stock):
        "No path goes on through the steps, each of which would be recorded behind the last one."
        held: list[Any] = []
        patch = mock.patch.object(trees.MarkStepBox, "mark_step_counter", 0)
        patch.start()
        self.addCleanup(patch.stop)
        if of_stock:
            stock = self.of_stock_graphs()
            for _ in range(3):
                held.clear()
                torch.compiler.cudagraph_mark_step_begin()
                held += stock(self.randn())
        recorded = self.marked_steps(held, 8)
        self.assertTrue(any(recorded[:4]))
        self.assertEqual(recorded[4:], [0] * 4)
        self.assertEqual(counters["pygraph"]["held_activations"] > 0, not of_stock)

    def test_gradient_held_while_micro_batches_are_in_flight(self):
        "It lies in the memory of an activation, and another backward is recorded behind it."
        weight, forward, backward = self.randn(), None, None
        for step in range(6):
            pending, held = [], []
            for is_forward in (1, 1, 0, 1, 0, 0) if step < 5 else (1, 1, 0, 0):
                if is_forward:
                    new_generation()
                    x = self.randn()
                    forward = forward or self.deploy_forward(x, weight)
                    a = forward.call([x, weight])[1]
                    pending.append((a, on_host(x) * on_host(weight)))
                else:
                    (a, value), t = pending.pop(), self.randn()
                    inputs, expected = [a, weight, t], value.cos() * on_host(t)
                    del a
                    backward = backward or self.deploy_backward(inputs)
                    actual = backward.call(inputs)[0]
                    self.assertEqual(on_host(actual), expected)
                    if step == 5:
                        held.append((actual, expected))
                for actual, expected in itertools.chain(held, pending):
                    self.assertEqual(on_host(actual), expected)
                actual = a = None

    @parametrize("force", ("node_update", "copy"))
    def test_gradient_that_was_used(self, force):
        "The next one is the same tensor, without what the program made of it."
        self.weight, seen = self.randn(), []
        for i in range(7):
            grad = self.gradient(force)
            seen.append(id(grad))
            self.assertFalse(grad.requires_grad)
            self.assertEqual(grad._version, 0)
            self.assertIsNone(grad.grad)
            self.assertEqual(grad.__dict__, {})
            grad.requires_grad_()
            grad.grad, grad.step = self.randn(), i
            torch.autograd.graph.increment_version(grad)
            del grad
        self.assertEqual(seen[-3:], seen[-1:] * 3)

    @parametrize("force", ("node_update", "copy"))
    def test_gradient_in_inference_mode(self, force):
        "What is cached then is returned outside of it later, where it is no inference tensor."
        self.weight = self.randn()
        for i in range(6):
            with torch.inference_mode(i == 2):
                grad = self.gradient(force)
            self.assertFalse(i != 2 and grad.is_inference())
            del grad

    @parametrize("force", ("node_update", "copy"))
    @parametrize("change", ("unsqueeze_", "resize_", "data"))
    def test_gradient_that_was_changed_in_place(self, change, force):
        self.weight = self.randn()
        for _ in range(8):
            grad = self.gradient(force)
            self.assertEqual(grad.shape, (8,))
            if change == "data":
                grad.data = self.weight
            else:
                getattr(grad, change)(0)
            del grad

    @parametrize("force", ("node_update", "copy"))
    @parametrize("first", (0, 4))
    def test_activation_that_outlives_its_backward(self, first, force):
        "As retain_graph=True has it in some steps, the recorded one or a later one."
        weight = self.randn()
        forward = backward = None
        kept = []
        for i in range(first + 8):
            new_generation()
            x, t = self.randn(), self.randn()
            forward = forward or self.deploy_forward(x, weight, force)
            out, a, w = forward.call([x, weight])
            expected_a = on_host(x) * on_host(weight)
            inputs = [a, t]
            backward = backward or self.deploy(
                """
                a, t = args; args.clear()
                b = new(); launch(sin, b, a)
                c = new(); launch(mul, c, b, t)
                return (c,)
                """,
                inputs,
                mode="backward",
                force=force,
                static=[0],
                names=["mul", "tangents_1"],
            )
            held = [(a, expected_a)] if first <= i < first + 4 else []
            del a
            (grad,) = backward.call(inputs)
            kept += [(out, expected_a.sin()), (grad, expected_a.sin() * on_host(t))]
            for actual, expected in (*kept, *held):
                self.assertEqual(on_host(actual), expected)
            del held, actual, expected
        self.assertEqual(
            counters["pygraph"]["held_activations"] > 0, first > 0, dict(counters)
        )

    def test_training_goes_around_trees(self):
        "A backward too, after the graph that it follows, unless an activation is held."
        weight = self.randn()
        forward = backward = None
        by_trees = []
        run = trees.CUDAGraphTreeManager.run

        def counted(manager: Any, *args: Any, **kwargs: Any) -> Any:
            by_trees.append(manager)
            return run(manager, *args, **kwargs)

        with mock.patch.object(trees.CUDAGraphTreeManager, "run", counted):
            for i in range(18):
                if i == 6:
                    by_trees.clear()
                new_generation()
                x, t = self.randn(), self.randn()
                forward = forward or self.deploy_forward(x, weight)
                out, a, w = forward.call([x, weight])
                expected_a = on_host(x) * on_host(weight)
                inputs = [a, t]
                backward = backward or self.deploy(
                    """
                    a, t = args; args.clear()
                    b = new(); launch(sin, b, a); del a
                    c = new(); launch(mul, c, b, t)
                    return (c,)
                    """,
                    inputs,
                    mode="backward",
                    static=[0],
                    names=["mul", "tangents_1"],
                )
                held = HeldByAutograd(a) if i in (9, 11) else None
                retained = {13: a, 14: a.detach()}.get(i)
                del a
                (grad,) = backward.call(inputs)
                self.assertEqual(inputs, [])
                self.assertEqual(on_host(out), expected_a.sin())
                self.assertEqual(on_host(grad), expected_a.sin() * on_host(t))
                for kept in (held.activation() if held else None, retained):
                    if kept is not None:
                        self.assertEqual(on_host(kept), expected_a)
                if i == 8:
                    self.assertEqual(by_trees, [])
                del held, retained, kept
        self.assertGreater(len(by_trees), 0)
        self.assertGreater(counters["pygraph"]["held_activations"], 0)

    @parametrize("force", ("node_update", "copy"))
    def test_activation_that_only_autograd_holds(self, force):
        "Two forwards before a backward, after steps of one each."

        weight = self.randn()
        forward = None
        for calls in (1, 1, 1, 1, 2, 1, 3, 2, 2):
            pending, expected = [], []
            for _ in range(calls):
                new_generation()
                x = self.randn()
                forward = forward or self.deploy_forward(x, weight, force)
                out, a, w = forward.call([x, weight])
                pending.append(HeldByAutograd(a))
                del a
                expected.append(on_host(x) * on_host(weight))
            seen = [on_host(held.activation()).clone() for held in pending]
            self.assertEqual(seen, expected)
            trees.get_manager(0).set_to_running_backward()

    @mock.patch.object(controller, "MAX_TIMES_ON_PATH", 16)
    def test_activations_in_the_pool_and_outside(self):
        """
        Beyond MAX_TIMES_ON_PATH forwards run uncaptured. Their backward, recorded with an
        activation that moves, is later given one that lies in the pool, and writes over it.
        """
        weight = self.randn()
        forward = backward = None
        for length in (18, 18, 18, 17, 17, 18, 20, 19, 16):
            pending = []
            for _ in range(length):
                new_generation()
                x = self.randn()
                forward = forward or self.deploy_forward(x, weight)
                _, a, _ = forward.call([x, weight])
                pending.append((a, on_host(x) * on_host(weight)))
                del a
            while pending:
                a, expected_a = pending.pop()
                inputs = [a, weight, t := self.randn()]
                del a
                backward = backward or self.deploy_backward(inputs)
                grad, grad_x = backward.call(inputs)
                expected = expected_a.cos() * on_host(t)
                self.assertEqual(on_host(grad), expected)
                self.assertEqual(on_host(grad_x), expected * on_host(weight))
                del grad, grad_x
        self.assertGreater(counters["pygraph"]["staged_inputs"], 0)

    def test_forwards_without_a_backward(self):
        "Without no_grad, a program that only evaluates holds the last output when it asks for the next one."
        weight, forward, held = self.randn(), None, None
        for _ in range(40):
            new_generation()
            x = self.randn()
            forward = forward or self.deploy_forward(x, weight)
            out, a, _ = forward.call([x, weight])
            expected = on_host(x) * on_host(weight)
            self.assertEqual((on_host(out), on_host(a)), (expected.sin(), expected))
            held = HeldByAutograd(a)
            del out, a
        self.assertEqual(on_host(held.activation()), expected)
        # It is not recorded anew in each call.
        self.assertEqual(counters["pygraph"]["bound_outputs"], controller.MAX_DROPPED_ON_PATH + 1)
        self.assertLess(counters["pygraph"]["held_activations"], 40 // controller.MAX_DROPPED_ON_PATH)

    def test_skipped_backward_before_its_forward_is_recorded(self):
        from torch._inductor.cudagraph_utils import BoxedDeviceIndex
        from torch._inductor.output_code import maybe_handle_backward_generation

        graph = types.SimpleNamespace(
            current_callable=lambda inputs: inputs, fx_kwargs={"is_backward": True}
        )
        maybe_handle_backward_generation(graph, BoxedDeviceIndex(0))
        manager = trees.get_manager(0, create_if_none_exists=False)
        manager.running_forwards_with_pending_backwards = True
        self.assertEqual(graph.current_callable([1]), [1])
        self.assertFalse(manager.running_forwards_with_pending_backwards)


instantiate_parametrized_tests(TrainingTest)


class TrainingPythonTest(TrainingTest):
    "Without compiled code."

    compiled = None
    test_training_goes_around_trees = None


if __name__ == "__main__":
    run_tests()
