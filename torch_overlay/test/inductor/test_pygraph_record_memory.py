# Owner(s): ["module: inductor"]
"""
The pool and liveness: what lies where, what is freed when, and little memory.

Functions as Inductor writes them are deployed on the modelled device of modelled_cuda.py.
"""

from __future__ import annotations

import gc
import itertools
import types
import weakref
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch._inductor import config, cudagraph_trees as trees
from torch._inductor.pygraph import native, report, reset_report
from torch._inductor.pygraph.capture import bound
from torch._inductor.pygraph.graph import memory
from torch._inductor.pygraph.graph.placeholder import storage_extent
from torch._inductor.pygraph.replay import interpreter
from torch._inductor.pygraph.select import selection, timing
from torch._inductor.pygraph.types.reason import Code, Reason
from torch._inductor.pygraph.verify import kept, proof, rehearsal
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.modelled_operators import on_host
from torch.testing._internal.pygraph_functions import (
    ALLOCATOR,
    Deployed,
    hiding,
    new_generation,
    RecordTestCase,
)


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class MemoryTest(RecordTestCase):
    LAYER = """
        x, w, b = args; args.clear()
        a = new(); launch(add, a, x, w)
        c = new(); launch(add, c, a, b)
        return (c,)
    """

    def fits(
        self, limit: int, program: Callable[[str | None, Any], Any], force: str | None
    ) -> bool:
        "Whether a program gets along with so much memory, in a process of its own."
        self.forward = self.backward = None
        trees.reset_cudagraph_trees()
        reset_report()
        self.device.blocks.clear()
        self.device.limit = limit
        try:
            # Before: graphs keep their memory between calls, of which calls need more.
            inputs = [(self.randn(), self.randn()) for _ in range(5)]
            program(force, itertools.cycle(inputs))
        except torch.OutOfMemoryError:
            return False
        return True

    def check_fits(
        self, program: Callable[[str | None, Any], Any], force: str | None
    ) -> list[str]:
        "What is chosen for the last function, from where the program fits without graphs."
        limit = next(n for n in range(0, 4096, 32) if self.fits(n, program, "no_graph"))
        choices = []
        for n in range(limit, 4 * limit, 32):
            self.assertTrue(self.fits(n, program, force), f"{n} bytes of {limit}")
            choices.append(report()[-1].choice)
        self.device.limit = 1 << 30
        return choices

    def train(self, force: str | None, inputs: Iterator[Any]) -> None:
        self.weight, _ = next(inputs)
        for _ in range(7):
            x, t = next(inputs)
            with mock.patch.object(self, "randn", lambda: t):
                for actual, expected in self.step(x, force=force):
                    self.assertEqual(on_host(actual), expected)
            # Nothing is kept into the next step.
            del actual

    # Eight times the sine, and y added.
    DEEP = "x, y = args; args.clear(); " + "".join(
        f"{b} = new(); launch(sin, {b}, {a}); "
        for a, b in itertools.pairwise("xabcdefgh")
    )

    DEEP += "i = new(); launch(add, i, h, y); return (i,)"

    def run_deep(self, force: str | None, inputs: Iterator[Any], calls: int = 5) -> None:
        fn = None
        for _ in range(calls):
            x, y = next(inputs)
            fn = fn or self.deploy(self.DEEP, [x, y], force=force)
            expected = on_host(x)
            for _ in range(8):
                expected = expected.sin()
            (out,) = fn(x, y)
            self.assertEqual(on_host(out), expected + on_host(y))
            del out

    def run_shared(self, force: str | None, inputs: Iterator[Any]) -> None:
        body = """
            x, y = args; args.clear()
            a = empty(); launch(sin, a, x); launch(add, a, a, y)
            return (a, a.view(2, 4))
        """
        fn = None
        for _ in range(5):
            x, y = next(inputs)
            fn = fn or self.deploy(body, [x, y], force=force, returned=[0, 1])
            out, view = fn(x, y)
            self.assertEqual(on_host(out), on_host(x).sin() + on_host(y))
            del out, view

    @parametrize("force", ("node_update", "copy", None))
    def test_outputs_are_kept(self, force):
        self.check(self.ADD, force=force, calls=7 if force else 40)
        self.assertEqual(counters["pygraph"]["unbound"], 0)
        if force:
            self.assertEqual(counters["pygraph"]["bound_outputs"], force == "node_update")
            self.assertEqual(counters["pygraph"]["copied_outputs"], force == "copy")

    def test_steady_state_of_dynamic_shapes(self):
        "The function is recorded for its sizes, which nothing copies."
        sizes = """
            s0, x, s1, y = args; args.clear()
            a = new(); launch(sin, a, x)
            b = new(); launch(add, b, a, y)
            return (b, s0 + s1)
        """
        fn = self.check(sizes, lambda: [3, self.randn(), 5, self.randn()])
        self.assertEqual(counters["pygraph"]["unsteady_recordings"], 0)
        manager = trees.get_manager(0)
        with mock.patch.object(manager, "_run", side_effect=AssertionError("searched")):
            x, y = self.randn(), self.randn()
            out, size = fn(3, x, 5, y)
            self.assertEqual(on_host(out), on_host(x).sin() + on_host(y))
            self.assertEqual(size, 8)

    def test_no_memory_for_what_is_not_rehearsed(self):
        for (a, _), result in self.not_rehearsed(
            "launch(mul, a, a, a); c = new(); launch(add, c, a, a); return (c,)", 4096
        ):
            self.assertEqual(result, 2 * a * a)
        self.assertIn("out of memory", report()[1].reason)

    def test_no_memory_to_stage(self):
        "What was staged by then is not written back by a later call."
        body = """
            a, b = args; args.clear(); launch(add, a, a, a); launch(add, b, b, b)
            c = new(); launch(add, c, a, b)
            return (c,)
        """
        self.check(body, mutated=(0, 1))
        node = trees.get_manager(0).current_node
        pooled = [self.randn(), self.randn()]
        before = self.values(pooled)
        copies = iter([self.device.clone(pooled[0])])

        def staged(t: torch.Tensor) -> torch.Tensor:
            for copy in copies:
                return copy
            raise torch.OutOfMemoryError("no memory")

        with (
            mock.patch.object(node, "pool_ranges", [t.data_ptr() for t in pooled]),
            mock.patch.object(bound, "clone_preserve_strides", staged),
            self.assertRaises(torch.OutOfMemoryError),
        ):
            tensors = [*pooled, self.randn()]
            node.move(tensors, [t.data_ptr() for t in tensors])
        on_host(pooled[0]).fill_(7.0)
        node.run([self.randn(), self.randn()])
        self.assertEqual(self.values(pooled), [torch.full((8,), 7.0), before[1]])

    @parametrize("force", ("node_update", "copy", None))
    def test_graphs_go_with_the_functions(self, force):
        with self.selects_at_once(99.0, 9.0):
            fn = self.check(self.ADD, force=force, calls=40)
        (function,) = report()
        self.assertIn(function.choice, ("node_update", "copy"))
        manager = weakref.ref(trees.get_manager(0))
        del fn
        gc.collect()
        self.assertIsNone(trees.get_manager(0, create_if_none_exists=False))
        self.assertIsNone(manager())

    @parametrize("force", ("node_update", None))
    @parametrize("is_alone", (True, False))
    def test_graph_of_a_node_that_refuses_is_dropped(self, force, is_alone):
        other = None if is_alone else self.check(self.ADD)
        reset_report()
        sets = itertools.count()
        with (
            self.refusing(lambda node: next(sets) > 17),
            self.selects_at_once(99.0, 9.0),
        ):
            fn = self.check(self.ADD, force=force, calls=60)
        self.assertEqual(report()[0].choice, "no_graph")
        recorded = sum(map(len, trees.get_manager(0).roots.values()))
        self.assertEqual(recorded, int(not is_alone))
        del fn, other

    @parametrize("hidden,choice", ((None, "node_update"), (1, "copy")))
    def test_no_memory_for_another_recording(self, hidden, choice):
        "Of a weight that moved. Those that there are go, as there is no graph any more."
        other = self.check(self.ADD)
        (manager, w, moved) = (trees.get_manager(0), self.randn(), self.randn())
        before = sum(map(len, manager.roots.values()))
        reset_report()
        with hiding(hidden):
            fn = self.deploy(self.ADD, [w, self.randn()], force=None, static=[0])

            def call(w: torch.Tensor) -> None:
                y = self.randn()
                (out,) = fn(w, y)
                self.assertEqual(on_host(out), on_host(w).sin() + on_host(y))

            with self.selects_at_once(99.0, 9.0):
                for _ in range(20):
                    call(w)
            self.assertEqual(report()[0].choice, choice)
            with self.selects_at_once(99.0):
                with mock.patch.object(memory, "room", lambda *_: 0):
                    call(moved)
                for _ in range(20):
                    call(w)
        self.assertEqual(report()[0].choice, "no_graph")
        self.assertEqual(sum(map(len, manager.roots.values())), before)
        with mock.patch.object(manager, "_run", side_effect=AssertionError("by trees")):
            call(w)
        del other

    def test_backward_that_lost_behind_a_graph_is_dropped(self):
        "Its call always begins with activations that are alive."
        self.weight = self.randn()
        self.forward = self.deploy_forward(self.randn(), self.weight, "node_update")
        with self.selects_at_once(9.0, 99.0, 99.0, 9.0):
            for _ in range(40):
                for actual, expected in self.step(self.randn(), force=None):
                    self.assertEqual(on_host(actual), expected)
                del actual
        self.assertEqual(report()[-1].choice, "no_graph")
        (forward,) = trees.get_manager(0).get_roots()
        self.assertFalse(any(forward.children.values()))

    @parametrize("is_dropped", (False, True))
    def test_as_many_recordings_as_a_chain_tries(self, is_dropped):
        manager = types.SimpleNamespace(_current_node=None)
        function = mock.Mock(binds_inputs=True, node_type=lambda: types.SimpleNamespace)
        replays = interpreter.ReplayChain(function, manager, None, object())

        def record() -> types.SimpleNamespace:
            node = types.SimpleNamespace(graph=object())
            node.wrapped_function = types.SimpleNamespace(pygraph=function)
            manager._current_node = node
            return node

        with (
            mock.patch.object(interpreter, "replay_plan", lambda *_: None),
            mock.patch.object(interpreter, "make_replay", lambda *_: mock.Mock()),
        ):
            nodes = []
            for _ in range(interpreter.MAX_REPLAYS):
                nodes.append(record())
                replays.add(mock.Mock())
            if is_dropped:
                for node in nodes:
                    node.graph = None
            record()
            self.assertEqual(replays.add(mock.Mock()) is not None, is_dropped)
        self.assertEqual(len(replays.replays), 1 if is_dropped else len(nodes))

    def test_static_input_moves(self):
        weight = self.randn()
        fn = None
        for i in range(9):
            if i == 5:
                weight = self.randn()
            x = self.randn()
            fn = fn or self.deploy(self.ADD, [x, weight], static=[1])
            (out,) = fn(x, weight)
            self.assertEqual(on_host(out), on_host(x).sin() + on_host(weight))

    @parametrize("force", ("node_update", "copy"))
    def test_weight_that_is_new_in_each_call(self, force):
        "From some recordings on it is an external input. Another one stays static."
        limit, bias, fn, kept = 3, self.randn(), None, []
        with config.patch("triton.cudagraph_unexpected_rerecord_limit", limit):
            for _ in range(20):
                inputs = [self.randn(), self.randn(), bias]
                fn = fn or self.deploy(self.LAYER, inputs, force=force, static=[1, 2])
                expected = sum(map(on_host, inputs))
                (out,) = fn(*inputs)
                self.assertEqual(on_host(out), expected)
                del inputs, out
                # The next weight lies elsewhere.
                kept.append(self.randn())
        (node,) = itertools.chain.from_iterable(trees.get_manager(0).roots.values())
        external = [*node.bound_input_idxs, *node.non_static_input_idx]
        self.assertEqual(external, [0, 1])
        # The first, as many more as may be, the one that tells, and the last.
        self.assertEqual(node.wrapped_function.pygraph.state.recordings, limit + 3)

    @parametrize("force", ("node_update", "copy"))
    def test_state_of_which_the_last_one_is_kept(self, force):
        "It is gone a call later: ``self.before, self.state = self.state, new``."
        before, state, fn, kept = self.randn(), self.randn(), None, []
        with config.patch("triton.cudagraph_unexpected_rerecord_limit", 3):
            for _ in range(40):
                inputs = [self.randn(), before, state]
                fn = fn or self.deploy(self.LAYER, inputs, force=force, static=[1, 2])
                expected = sum(map(on_host, inputs))
                (out,) = fn(*inputs)
                self.assertEqual(on_host(out), expected)
                del inputs
                before, state = state, self.randn()
                # The next one lies elsewhere.
                kept.append(self.randn())
        (node,) = itertools.chain.from_iterable(trees.get_manager(0).roots.values())
        external = [*node.bound_input_idxs, *node.non_static_input_idx]
        self.assertEqual(external, [0, 1, 2])
        self.assertLess(node.wrapped_function.pygraph.state.recordings, 12)

    @parametrize("force,choice", (("node_update", "node_update"), ("copy", "no_graph")))
    def test_buffer_that_is_new_in_each_call(self, force, choice):
        "What the function writes to it is the caller's, and not a copy's."
        fn, kept = None, []
        body = "x, s = args; args.clear(); launch(add, s, s, x); a = new(); launch(sin, a, s); return (a,)"
        with config.patch("triton.cudagraph_unexpected_rerecord_limit", 3):
            for _ in range(12):
                inputs = x, s = [self.randn(), self.randn()]
                expected = on_host(x) + on_host(s)
                fn = fn or self.deploy(body, inputs, force=force, static=[1], mutated=(1,))
                (out,) = fn(*inputs)
                self.assertEqual((on_host(s), on_host(out)), (expected, expected.sin()))
                del inputs, x, s, out
                # The next buffer lies elsewhere.
                kept.append(self.randn())
        self.assertEqual(report()[0].choice, choice)

    @parametrize("force", ("node_update", "copy"))
    def test_layers_of_one_code(self, force):
        "As many as there are, each with weights that stay."
        layers, fn = 6, None
        weights = [[self.randn(), self.randn()] for _ in range(layers)]
        with config.patch("triton.cudagraph_unexpected_rerecord_limit", 3):
            for _ in range(4):
                for w, b in weights:
                    inputs = [self.randn(), w, b]
                    fn = fn or self.deploy(self.LAYER, inputs, force=force, static=[1, 2])
                    (out,) = fn(*inputs)
                    self.assertEqual(on_host(out), sum(map(on_host, inputs)))
        nodes = [*itertools.chain.from_iterable(trees.get_manager(0).roots.values())]
        self.assertEqual(len(nodes), layers)
        for node in nodes:
            external = [*node.bound_input_idxs, *node.non_static_input_idx]
            self.assertEqual(external, [0])

    def test_weight_that_is_saved(self):
        "Is the call's: others may have its memory by now, and autograd asks for its version."
        body = "x, w = args; args.clear(); a = new(); launch(mul, a, x, w); return (a, w)"
        for force in ("node_update", "copy"):
            with self.subTest(force=force):
                weights = [torch.nn.Parameter(self.randn(), requires_grad=False) for _ in range(2)]
                fn = None
                for i in range(6):
                    if i == 4:
                        first, second = weights
                        first.data, second.data = second.data, first.data
                    for weight in weights:
                        x = self.randn()
                        fn = fn or self.deploy(body, [x, weight], force=force, mode="forward", static=[1])
                        out, saved = fn(x, weight)
                        self.assertEqual(on_host(out), on_host(x) * on_host(weight))
                        self.assertIs(saved, weight)
                        del out
                ref = weakref.ref(weights.pop())
                del weight, saved, first, second
                self.assertIsNone(ref())

    def test_result_that_is_saved(self):
        "One tensor, so that a write to it is seen by the backward."
        for result in ("empty()", "new()"):
            for force in ("node_update", "copy"):
                with self.subTest(result=result, force=force):
                    fn = None
                    for _ in range(5):
                        x, y = self.randn(), self.randn()
                        fn = fn or self.deploy(
                            f"x, y = args; args.clear(); a = {result}; launch(mul, a, x, y); return (a, a, x)",
                            [x, y],
                            force=force,
                            mode="forward",
                        )
                        out, saved, _ = fn(x, y)
                        self.assertEqual(on_host(out), on_host(x) * on_host(y))
                        self.assertIs(out, saved)
                        del out, saved

    @parametrize("force", ("node_update", "copy"))
    def test_gradient_that_is_held_for_some_steps(self, force):
        "Of a backward with no other graph, whose run would end the path."
        self.weight, kept = self.randn(), []
        for i in range(20):
            grad = self.gradient(force)
            if i == 8:
                kept.append((grad, on_host(grad).clone()))
            del grad
            if kept:
                self.assertEqual(on_host(kept[0][0]), kept[0][1])
            if i == 12:
                kept.clear()
        # Of the steps 9 to 12.
        self.assertEqual(counters["pygraph"]["held_gradients"], 3)
        self.assertEqual(counters["pygraph"]["held_activations"], 1)
        if force == "node_update":
            # The first recording is in no call's way.
            replay = self.backward.current
            replay_type = getattr(native.compiled, "Replay", interpreter.Replay)
            self.assertIsInstance(replay, replay_type)
            self.assertNotIsInstance(replay.general, replay_type)

    def test_activations_that_are_kept(self):
        "Without a look at what is held, the next forward would write them."
        self.weight = self.randn()
        kept, retained = [], []
        for i in range(12):
            kept += self.step(self.randn(), retained if i in (5, 8) else None)
            trees.get_manager(0).running_forwards_with_pending_backwards = False
            for actual, expected in (*kept, *retained):
                self.assertEqual(on_host(actual), expected)
            if i == 10:
                retained.clear()
        self.assertGreater(counters["pygraph"]["held_activations"], 0)

    def test_recording_that_is_abandoned_after_replays(self):
        "What the path left alive is not made the allocator's twice."
        weight = self.randn()
        forwards: list[Deployed | None] = [None, None]
        backwards: list[Deployed | None] = [None, None]
        for step in range(8):
            pending = []
            h = self.randn()
            for k in range(2):
                new_generation()
                forwards[k] = forwards[k] or self.deploy_forward(h, weight)
                out, a, _ = forwards[k].call([h, weight])
                pending.append((a, on_host(h) * on_host(weight)))
                h = out
                del out, a
            while pending:
                k = len(pending) - 1
                a, expected_a = pending.pop()
                if step < 3:
                    trees.get_manager(0).running_forwards_with_pending_backwards = False
                    continue
                inputs = [a, weight, t := self.randn()]
                del a
                backwards[k] = backwards[k] or self.deploy_backward(inputs)
                hidden = 1 if k else None
                with hiding(hidden):
                    grad, _ = backwards[k].call(inputs)
                self.assertEqual(on_host(grad), expected_a.cos() * on_host(t))
                del grad, _
        self.assertEqual(counters["pygraph"]["unbound"], 1)

    def test_reset(self):
        "torch._dynamo.reset, of functions that the program still has."
        fn = self.check(self.ADD)
        trees.reset_cudagraph_trees()
        for _ in range(3):
            x, y = self.randn(), self.randn()
            (out,) = fn(x, y)
            self.assertEqual(on_host(out), on_host(x).sin() + on_host(y))

    def test_reset_before_a_backward(self):
        self.weight = self.randn()
        for _ in range(7):
            self.step(self.randn())
        x, t = self.randn(), self.randn()
        new_generation()
        _, a, w = self.forward.call([x, self.weight])
        expected = (on_host(x) * on_host(self.weight)).cos() * on_host(t)
        # What has the pool until the backward ran.
        pool = weakref.ref(trees.get_manager(0).graph)
        trees.reset_cudagraph_trees()
        self.assertIsNotNone(pool())
        inputs = [a, w, t]
        del a
        grad, _ = self.backward.call(inputs)
        self.assertEqual(on_host(grad), expected)
        self.forward = self.backward = None
        gc.collect()
        self.assertIsNone(pool())

    def test_training_in_little_memory(self):
        choices = self.check_fits(self.train, "node_update")
        self.assertEqual([*dict.fromkeys(choices)], ["no_graph", "node_update"])

    def test_inference_in_little_memory(self):
        choices = self.check_fits(self.run_deep, "node_update")
        self.assertEqual([*dict.fromkeys(choices)], ["no_graph", "node_update"])

    def test_copied_outputs_in_little_memory(self):
        "They are in the pool, and once more outside, from the call that records on."
        choices = self.check_fits(self.run_shared, "node_update")
        self.assertEqual([*dict.fromkeys(choices)], ["no_graph", "node_update"])

    def test_proof_that_fails_in_little_memory(self):
        "What was captured is gone when the call runs uncaptured."
        with hiding(0):
            choices = self.check_fits(self.run_deep, "node_update")
        self.assertEqual([*dict.fromkeys(choices)], ["no_graph", "copy"])

    def test_selection_in_little_memory(self):
        "A graph that seems to lose is timed again if there is memory for both."
        timed = []

        def run(force: str | None, inputs: Iterator[Any]) -> None:
            costs = [timing.Cost(*[timing.Estimate(us)] * 3) for us in (9.0, 99.0, 99.0, 9.0)]
            with (
                mock.patch.object(timing.Samples, "cost", lambda samples: costs.pop(0)),
                mock.patch.object(timing.Samples, "_suffices", lambda samples: True),
            ):
                self.run_deep(force, inputs, calls=40)
            timed.append(4 - len(costs))

        self.assertEqual({*self.check_fits(run, None)}, {"no_graph"})
        # First those of which it was found where the program fits.
        self.assertEqual([*dict.fromkeys(timed)], [0, 1, 2, 4])

    @parametrize("stays", (False, True))
    def test_peak_of_training(self, stays):
        "While a graph is selected, its activations are not there twice."
        size, names = 1 << 15, "abcdefgh"
        new = f"{ALLOCATOR}(({size},), (1,), torch.float32)"
        sines = " ".join(f"{b} = {new}; launch(sin, {b}, {a});" for a, b in itertools.pairwise(f"x{names}"))
        products = " ".join(f"p = {new}; launch(mul, p, t, {a}); t = p; del {a};" for a in reversed(names))
        saved = ", ".join(names)
        # Each of the two functions is judged twice.
        verdicts = itertools.chain([False, False], itertools.repeat(stays))
        with (
            self.selects_at_once(9.0),
            mock.patch.object(timing, "judge", lambda *_: (next(verdicts), Reason.of(Code.NOT_FASTER))),
            mock.patch.object(timing, "costs_nothing", lambda *_: False),
            mock.patch.object(selection, "MIN_BESIDE_BYTES", 0),
        ):
            forward = backward = None
            for _ in range(60):
                new_generation()
                x, t = self.randn(size), self.randn(size)
                forward = forward or self.deploy(
                    f"x, = args; args.clear(); {sines} return ({saved})", [x], mode="forward", returned=(), force=None
                )
                inputs = [*forward.call([x]), t]
                del x, t
                backward = backward or self.deploy(
                    f"{saved}, t = args; args.clear(); {products} return (t,)",
                    inputs,
                    mode="backward",
                    names=[*names, "tangents_1"],
                    force=None,
                )
                backward.call(inputs)
        self.assertEqual({entry.choice for entry in report()}, {"node_update" if stays else "no_graph"})
        # Eight activations, temporary tensors of the backward, its gradient twice, and fingerprints fit. A second set of
        # activations does not.
        self.assertLess(self.device.peak, 15 * size * 4)

    @parametrize("is_large", (False, True))
    def test_peak_of_a_function_that_writes_its_inputs(self, is_large):
        "Copies of them wait on the host, unless they are large."
        size, fn = 1 << 15, None
        body = "p, m = args; args.clear(); launch(add, m, m, p); launch(add, p, p, m); a = new(); launch(sin, a, p[:8]); return (a,)"
        with (
            mock.patch.object(rehearsal, "MAX_BYTES", 0 if is_large else 1 << 30),
            mock.patch.object(proof, "MAX_ELEMENTS", 1 << 11),
        ):
            for _ in range(5):
                inputs = [self.randn(size), self.randn(size)]
                fn = fn or self.deploy(body, inputs, mutated=(0, 1))
                p, m = map(on_host, inputs)
                expected = [(2 * p + m)[:8].sin(), 2 * p + m, p + m]
                self.assertEqual(self.values([*fn(*inputs), *inputs]), expected)
                del inputs, p, m
        self.assertEqual(report()[0].choice, "node_update")
        self.assertEqual(self.device.peak > 3 * size * 4, is_large)

    @parametrize("is_large", (False, True))
    def test_peak_of_a_backward_that_writes_over_activations(self, is_large):
        size, names = 1 << 15, "abcdefgh"
        new = f"{ALLOCATOR}(({size},), (1,), torch.float32)"
        sines = " ".join(f"{b} = {new}; launch(sin, {b}, {a});" for a, b in itertools.pairwise(f"x{names}"))
        products = " ".join(f"launch(mul, {a}, t, {a}); t = {a};" for a in reversed(names))
        saved = ", ".join(names)
        forward = backward = None
        with (
            mock.patch.object(rehearsal, "MAX_BYTES", 0 if is_large else 1 << 30),
            mock.patch.object(proof, "MAX_ELEMENTS", 1 << 11),
        ):
            for _ in range(6):
                new_generation()
                x, t = self.randn(size), self.randn(size)
                expected = on_host(t).clone()
                forward = forward or self.deploy(
                    f"x, = args; args.clear(); {sines} return ({saved})", [x], mode="forward", returned=()
                )
                inputs = [*forward.call([x]), t]
                for a in inputs[:-1]:
                    expected *= on_host(a)
                del x, t, a
                backward = backward or self.deploy(
                    f"{saved}, t = args; args.clear(); {products} g = {new}; launch(mul, g, t, t); return (g,)",
                    inputs,
                    mode="backward",
                    names=[*names, "tangents_1"],
                    reused=range(8),
                )
                (g,) = backward.call(inputs)
                self.assertEqual(on_host(g), expected * expected)
                del g
        self.assertEqual({entry.choice for entry in report()}, {"node_update"})
        # Eight activations, the inputs and the gradient.
        self.assertEqual(self.device.peak > 12 * size * 4, is_large)

    @parametrize("hidden", (None, 0))
    @parametrize("lends", (True, False))
    def test_peak_of_a_backward_with_temporary_tensors(self, hidden, lends):
        "Its rehearsal takes the memory that the forward's have left in the pool. So may what the call returns."
        size, forward, backward = 1 << 12, None, None
        new = f"{ALLOCATOR}(({size},), (1,), torch.float32)"
        temporary = "".join(f"{b} = {new}; launch(sin, {b}, {a}); " for a, b in itertools.pairwise("xabcd"))
        sums = f"s = {new}; launch(add, s, a, b); launch(add, s, s, c); launch(add, s, s, d)"
        products = "".join(f"{b} = {new}; launch(mul, {b}, {a}, s); " for a, b in itertools.pairwise("tabcd"))
        with mock.patch.object(memory, "MIN_LENT_BYTES", size if lends else 1 << 30):
            for _ in range(7):
                new_generation()
                x, t = self.randn(size), self.randn(size)
                forward = forward or self.deploy(
                    f"x, = args; args.clear(); {temporary}{sums}; return (s,)", [x], mode="forward", returned=()
                )
                inputs = [*forward.call([x]), t]
                s, expected = on_host(inputs[0]).clone(), on_host(t).clone()
                powers = [expected := expected * s for _ in "abcd"]
                del x, t
                backward = backward or self.deploy(
                    f"s, t = args; args.clear(); {products}launch(add, a, a, c); return (d, a, b)",
                    inputs,
                    mode="backward",
                    names=["saved", "tangents_1"],
                )
                with hiding(hidden):
                    gradients = backward.call(inputs)
                a, b, c, d = powers
                self.assertEqual(self.values(gradients), [d, a + c, b])
                del gradients, inputs
        self.assertEqual([entry.choice for entry in report()], ["node_update", "copy" if hidden == 0 else "node_update"])
        if hidden is None:
            # The inputs, the forward's memory, and the gradients on their way to the host.
            self.assertEqual(self.device.peak < 11 * size * 4, lends)

    @mock.patch.object(memory, "MIN_LENT_BYTES", 1)
    def test_result_of_a_rehearsal_in_the_pool_proves_nothing(self):
        "The graph leaves its result out, and has it where the rehearsal had it."
        size, forward, backward = 1 << 12, None, None
        new = f"{ALLOCATOR}(({size},), (1,), torch.float32)"
        for _ in range(4):
            new_generation()
            x, t = self.randn(size), self.randn(size)
            forward = forward or self.deploy(
                f"x, = args; args.clear(); a = {new}; launch(sin, a, x); s = {new}; launch(sin, s, a); return (s,)",
                [x],
                mode="forward",
                returned=(),
            )
            inputs = [*forward.call([x]), t]
            del x, t
            backward = backward or self.deploy(
                f"s, t = args; args.clear(); g = {new}; u = {new}; launch(add, u, s, t)\n"
                "torch.cuda.is_current_stream_capturing() or launch(mul, g, s, t); return (g, u)",
                inputs,
                mode="backward",
                names=["saved", "tangents_1"],
            )
            backward.call(inputs)
            del inputs
        self.assertIs(report()[1].reasons[-1].code, Code.DIFFERS)

    @mock.patch.object(memory, "MIN_LENT_BYTES", 1)
    def test_free_memory_of_a_pool_is_lent(self):
        pool = self.device.new_pool()
        # A graph has it.
        self.device.uses[pool] += 1
        with self.device.allocate_to_pool(0, pool, None):
            *tensors, known = [self.randn(n) for n in (256, 1024, 512)]
        addresses = [t.data_ptr() for t in tensors]
        del tensors
        free = memory.FreeMemory(pool, 0)
        like = torch.empty(130, device="meta")
        # The smallest gap first, then parts of a larger one.
        lent = [free.lend(like) for _ in range(2)]
        self.assertEqual([t.data_ptr() for t in lent], [addresses[0], addresses[1]])
        lent.append(free.lend(like))
        self.assertEqual(lent[2].data_ptr(), addresses[1] + 1024)
        self.assertIsNone(free.lend(torch.empty(1024, device="meta")))
        del lent[1]
        self.assertEqual(free.lend(like).data_ptr(), addresses[1])
        self.assertEqual(free.nbytes, 3 * 1024)

    def test_rehearsal_gives_its_memory_back(self):
        with memory.OwnPool(0) as own_pool:
            self.randn(), self.randn(3)
        self.assertEqual(own_pool.nbytes, 44)
        self.assertEqual(self.device.nbytes, 0)

    def test_fingerprints_wait_on_the_host(self):
        for t in (self.randn(3000), self.randn(0), self.randn(5).view(torch.int32)):
            (mark,) = proof.fingerprints([t])
            self.assertEqual({s.device.type for s in (mark.bits, mark.values) if s is not None}, {"cpu"})

    def test_fingerprints_of_several_devices(self):
        "PyTorch joins no tensors of several devices."
        on_host, counts = proof._on_host, []

        def copied(found):
            counts.append(len(found))
            return on_host(found)

        tensors = [self.randn(3000), torch.randn(5), torch.randn(6), self.randn(7)]
        with mock.patch.object(proof, "_on_host", copied):
            found = proof.fingerprints(tensors)
        self.assertEqual(counts, [1, 2, 1])
        for t, mark in zip(tensors, found, strict=True):
            self.assertTrue(proof.identical(mark, *proof.fingerprints([t])))

    @parametrize("most,part", ((1 << 20, 0), (0, 0), (1 << 20, 1), (1 << 20, 0.1)))
    def test_outputs_wait(self, most, part):
        "On the host, or in memory of their own if they are a small part of all. They share memory as before."
        known = self.randn(2000 if part == 0.1 else 8)
        is_small = part > 0
        with (
            memory.OwnPool(0) as own_pool,
            mock.patch.object(kept, "MAX_BYTES", most),
            mock.patch.object(kept, "MAX_PART", part),
        ):
            whole = self.randn(4, 6)
            outputs = [whole, 3, whole[1:, 2].view(torch.int32), known, None, whole.t()]
            expected = self.values(outputs)
            waiting = kept.KeptOutputs(outputs, own_pool, 0)
            del whole, outputs
        # What waits in the pool is not counted as memory that the function needs.
        self.assertEqual(own_pool.nbytes, 96)
        self.assertEqual(self.device.nbytes, storage_extent(known) + (96 if is_small or not most else 0))
        actual = waiting.on_device()
        self.assertEqual(self.values(actual), expected)
        self.assertIs(actual[3], known)
        self.assertFalse(any(t._is_view() for t in actual if isinstance(t, torch.Tensor)) and most)
        self.assertEqual([t.stride() for t in (actual[0], actual[2], actual[5])], [(6, 1), (6,), (1, 6)])
        on_host(actual[0]).fill_(1.0)
        self.assertEqual(on_host(actual[2]).view(torch.float32), torch.ones(3))

    def test_graph_that_lost_gives_its_memory_back(self):
        costs = iter([timing.Cost(*[timing.Estimate(us)] * 3) for us in (9.0, 99.0, 99.0, 9.0)])
        with mock.patch.object(timing.Samples, "cost", lambda samples: next(costs)):
            self.check(self.ADD, force=None, calls=120)
        self.assertEqual(report()[0].choice, "no_graph")
        self.assertFalse(any(trees.get_manager(0).roots.values()))


instantiate_parametrized_tests(MemoryTest)


class MemoryPythonTest(MemoryTest):
    "Without compiled code."

    compiled = None


if __name__ == "__main__":
    run_tests()
