# Owner(s): ["module: inductor"]
"""
Recording and replay, from deploy() to trees, on a machine without a GPU.

The tensors are CUDA tensors whose addresses are host memory. What would run on the device
is launched by hand: a launch computes on the host, or, while it is captured, becomes a node
that computes when the graph is replayed, at the addresses that the node then holds. Memory
is handed out again as soon as its storage is dead, as the caching allocator does, so that
a graph that writes what the program still has is seen.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import random
import tempfile
import threading
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TYPE_CHECKING
from unittest import mock

import numpy as np
from hypothesis import given, HealthCheck, settings, strategies as st

import torch
from torch._dynamo.utils import counters
from torch._inductor import config, cudagraph_trees as trees
from torch._inductor.pygraph import native, report, reset_report
from torch._inductor.pygraph.capture import allocation, bound, collectives, copying
from torch._inductor.pygraph.graph.binding import NodeUpdateBinding
from torch._inductor.pygraph.graph.driver import DriverError
from torch._inductor.pygraph.graph.placeholder import (
    tensor_at,
)
from torch._inductor.pygraph.graph.prelude import PreludeUnavailable
from torch._inductor.pygraph.replay import interpreter
from torch._inductor.pygraph.select import deploy, selection, store, timing
from torch._inductor.pygraph.trees.manager import drop, policies_around, state_of
from torch._inductor.pygraph.types import candidate
from torch._inductor.pygraph.types.reason import Code, Reason, RefusedError
from torch._inductor.pygraph.values import deliver
from torch._inductor.pygraph.verify import diagnose, rehearsal
from torch._inductor.pygraph.verify.rehearsal import HostGenerators, SavedInput
from torch._inductor.test_case import run_tests
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.modelled_cuda import (
    ModelledGraph,
    ModelledStream,
    on_host,
)
from torch.testing._internal.pygraph_functions import (
    Deployed,
    HeldByAutograd,
    HeldByName,
    hiding,
    mul,
    new_generation,
    Ranks,
    RecordTestCase,
    sin,
)


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class RecordTest(RecordTestCase):
    @parametrize("force", ("node_update", "copy", None))
    def test_outputs_are_kept(self, force):
        self.check(self.ADD, force=force, calls=7 if force else 40)
        self.assertEqual(counters["pygraph"]["unbound"], 0)
        if force:
            self.assertEqual(
                counters["pygraph"]["bound_outputs"], force == "node_update"
            )
            self.assertEqual(counters["pygraph"]["copied_outputs"], force == "copy")

    def test_steady_state_goes_around_trees(self):
        fn = self.check(self.ADD)
        manager = trees.get_manager(0)
        with mock.patch.object(manager, "_run", side_effect=AssertionError("searched")):
            x, y = self.randn(), self.randn()
            (out,) = fn(x, y)
            self.assertEqual(on_host(out), on_host(x).sin() + on_host(y))

    def streams(self, *raw: int) -> list[ModelledStream]:
        return [ModelledStream(self.device, cuda_stream) for cuda_stream in raw]

    def test_two_streams(self):
        "Intermediates of both functions lie at the same addresses."
        body = """
            x, y = args; args.clear()
            a = new(); launch(sin, a, x)
            b = new(); launch(mul, b, a, y)
            c = new(); launch(add, c, b, y)
            return (c,)
        """
        fns = [self.check(body) for _ in range(2)]
        for node in trees.get_manager(0).get_roots():
            for launch in node.graph.launches:
                launch.compute = self.enqueued(launch.compute)
        streams = self.streams(1, 2)
        calls = []
        for i in range(6):
            inputs = [self.randn(), self.randn()]
            expected, _, _ = self.expected(fns[i % 2], inputs)
            with torch.cuda.stream(streams[i % 2]):
                calls.append((inputs, fns[i % 2](*inputs), expected))
        # As much at the same time as they may.
        while sum(stream.advance() for stream in streams):
            pass
        for _, (out,), expected in calls:
            self.assertEqual(on_host(out), expected)

    def enqueued(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: self.device.stream.work.append(lambda: compute(*args))

    @parametrize("force", ("node_update", "copy"))
    def test_back_and_forth_between_streams(self, force):
        "Of several functions, some of which are recorded meanwhile."
        waits = self.device.waits
        default, (other,) = self.device.stream, self.streams(9)
        fns = [self.check(self.ADD, force=force)]
        self.assertEqual(waits, [])
        with torch.cuda.stream(other):
            fns.append(self.check(self.ADD, force=force))
            self.assertEqual(waits, [(9, 0)])
        for stream, expected in (
            (default, [(0, 9)]),
            (default, []),
            (other, [(9, 0)]),
            (other, []),
            (default, [(0, 9)]),
        ):
            waits.clear()
            with torch.cuda.stream(stream):
                for fn in (*fns, *fns):
                    fn(self.randn(), self.randn())
            self.assertEqual(waits, expected)

    def test_stream_of_an_uncaptured_backward(self):
        "It reads activations in the pool: who may overwrite them waits."
        a, b = self.streams(1, 2)
        x, w, t = (self.randn() for _ in range(3))
        new_generation()
        with torch.cuda.stream(a):
            forward = self.deploy_forward(x, w)
            for _ in range(2):
                _, saved, _ = forward.call([x, w])
            backward = self.deploy(
                self.BACKWARD, [saved, w, t], mode="backward", force="no_graph"
            )
        with torch.cuda.stream(b):
            self.check(self.ADD, calls=2)
        self.device.waits.clear()
        with torch.cuda.stream(a):
            backward.call([saved, w, t])
        with torch.cuda.stream(b):
            forward.call([x, w])
        self.assertEqual(self.device.waits, [(1, 2), (2, 1)])

    def test_streams_that_cannot_be_waited_for(self):
        "One that is gone, and one that the program captures, which waits for the device."
        fn = self.check(self.ADD)
        for stream, state in zip(self.streams(1, 2), ("is_destroyed", "is_captured")):
            with torch.cuda.stream(stream):
                fn(self.randn(), self.randn())
            setattr(stream, state, True)
            self.device.waits.clear()
            with mock.patch.object(torch.cuda, "synchronize") as synchronize:
                for _ in range(2):
                    fn(self.randn(), self.randn())
            self.assertEqual(self.device.waits, [])
            self.assertEqual(synchronize.call_count, state == "is_destroyed")

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

    def test_one_thread_at_a_time(self):
        """
        Autograd runs a backward of outputs on the CPU beside another one. What is called
        while the other thread records runs uncaptured: that thread may wait for it.
        """
        fn = self.check(self.ADD)
        other = self.deploy(
            "hook(); x, y = args; args.clear(); a = new(); launch(add, a, x, y); return (a,)",
            [self.randn(), self.randn()],
        )
        other(self.randn(), self.randn())
        shared = trees.local.tree_manager_containers
        x, y, outputs = self.randn(), self.randn(), []

        def replay():
            trees.local.tree_manager_containers = shared
            outputs.append(fn(x, y))

        manager = trees.get_manager(0)

        def start():
            self.hook = lambda: None
            last = manager.current_node
            thread = threading.Thread(target=replay)
            thread.start()
            thread.join(10)
            self.assertFalse(thread.is_alive())
            self.assertIs(manager.current_node, last)

        self.hook = start
        a, b = self.randn(), self.randn()
        (out,) = other(a, b)
        self.assertEqual(on_host(out), on_host(a) + on_host(b))
        self.assertEqual(on_host(outputs[0][0]), on_host(x).sin() + on_host(y))
        (function, recorded) = report()
        self.assertEqual([function.choice, recorded.choice], ["node_update"] * 2)
        self.assertEqual(counters["pygraph"]["unbound"], 0)

    def test_function_that_a_finalizer_calls(self):
        """
        The collector runs it where a replay allocates, which has seen by then which graph was
        last: it runs uncaptured, so that the replay's is last as it was before.
        """
        metric = self.check(self.ADD)
        weight, x, y = self.randn(), self.randn(), self.randn()
        forward, seen = None, []

        class Logs:
            def __del__(self) -> None:
                seen.append(metric(x, y))

        def collecting(*args: Any) -> torch.Tensor:
            self.hook()
            return self.device.empty_strided(*args)

        def collect() -> None:
            self.hook = lambda: None
            gc.collect()

        def call() -> tuple[HeldByAutograd, torch.Tensor]:
            nonlocal forward
            new_generation()
            v = self.randn()
            expected = on_host(v) * on_host(weight)
            forward = forward or self.deploy_forward(v, weight)
            _, a, _ = forward.call([v, weight])
            return HeldByAutograd(a), expected

        with mock.patch.object(allocation, "empty_strided_cuda", collecting):
            for _ in range(6):
                # Nobody calls its backward.
                call()
                trees.get_manager(0).set_to_running_backward()
        gc.disable()
        self.addCleanup(gc.enable)
        logs = Logs()
        logs.cycle = logs
        del logs
        self.hook = collect
        held, expected = call()
        ((out,),) = seen
        self.assertEqual(on_host(out), on_host(x).sin() + on_host(y))
        metric(self.randn(), self.randn())
        self.assertEqual(on_host(held.activation()), expected)

    @parametrize("force", ("node_update", "copy"))
    @parametrize("by_autograd", (False, True))
    def test_operator_that_calls_a_function(self, force, by_autograd):
        "Another one, which is not replayed while this one is recorded."
        if not by_autograd:
            self.check_operator(force)
            return
        shared, locks, seen = trees.thread_containers(), trees.local.tree_manager_locks, []

        def run() -> None:
            for name, value in (
                ("tree_manager_containers", shared),
                ("tree_manager_locks", locks),
            ):
                # The thread's, which lets go of it in the end.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
                torch._C._stash_obj_in_tls(name, value)
            try:
                self.check_operator(force)
                seen.append(trees.thread_containers())
            except BaseException as e:
                seen.append(e)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        self.assertIs(seen[0], shared)

    def test_operator_that_calls_a_function_for_the_first_time(self):
        "While it is recorded, which the other one is not before that is done."
        inner: list[Deployed] = []

        def hook():
            x, y = (self.device.tensor(torch.arange(8.0)) for _ in range(2))
            if trees.thread_containers() is not containers:
                inner[:] = inner or [self.deploy(self.ADD, [x, y])]
                inner[0](x, y)

        self.hook, containers = hook, trees.thread_containers()
        outer = self.check(
            "hook(); x, y = args; args.clear(); a = new(); launch(add, a, x, y); return (a,)",
            calls=3,
        )
        self.assertEqual([r.choice for r in report()], ["node_update", "no_graph"])
        for _ in range(4):
            x, y = self.randn(), self.randn()
            (out,) = inner[0](x, y)
            self.assertEqual(on_host(out), on_host(x).sin() + on_host(y))
        outer(self.randn(), self.randn())
        roots = [len(nodes) for nodes in trees.get_manager(0).roots.values()]
        self.assertEqual((roots, [r.choice for r in report()]), ([1, 1], ["node_update"] * 2))

    def check_operator(self, force: str) -> None:
        inner = self.check(self.ADD, calls=5)
        ran = []

        def hook():
            # What draws on the host is not captured.
            x, y = (self.device.tensor(torch.arange(8.0)) for _ in range(2))
            (out,) = inner(x, y)
            if self.device.captured is None:
                ran.append((self.values([out]), self.expected(inner, [x, y])[:1]))

        self.hook = hook
        outer = self.deploy(
            "hook(); x, y = args; args.clear(); a = new(); launch(add, a, x, y); return (a,)",
            [self.randn(), self.randn()],
            force=force,
        )
        for _ in range(6):
            x, y = self.randn(), self.randn()
            (out,) = outer(x, y)
            self.assertEqual(on_host(out), on_host(x) + on_host(y))
        for actual, expected in ran:
            self.assertEqual(actual, expected)
        manager = trees.get_manager(0)
        roots = [len(nodes) for nodes in manager.roots.values()]
        self.assertEqual((roots, manager.new_graph_id().id), ([1, 1], 2))
        self.assertEqual([r.choice for r in report()], ["node_update", force])

    COLLECTIVES = {
        "in_between": """
            x, y = args; args.clear()
            a = new(); launch(sin, a, x)
            c10d.wait_tensor(c10d.all_reduce_(a, 'sum', '0'))
            b = new(); launch(add, b, a, y)
            return (b,)
        """,
        "of_an_output": """
            x, y = args; args.clear()
            a = new(); launch(add, a, x, y)
            c10d.wait_tensor(c10d.all_reduce_(a, 'sum', '0'))
            return (a,)
        """,
        "after_a_mutation": """
            x, y = args; args.clear()
            launch(add, x, x, y)
            a = new(); launch(sin, a, x)
            c10d.wait_tensor(c10d.all_reduce_(a, 'sum', '0'))
            return (a,)
        """,
        "of_an_input": """
            x, y = args; args.clear()
            c10d.wait_tensor(c10d.all_reduce_(x, 'sum', '0'))
            a = new(); launch(add, a, x, y)
            return (a,)
        """,
        "gathered": """
            x, y = args; args.clear()
            a = new(); launch(add, a, x, y)
            c10d.wait_tensor(c10d.all_reduce_(a, 'sum', '0'))
            return (c10d.all_gather_into_tensor(a, 2, '0'),)
        """,
    }

    def check_collectives(self, name: str) -> None:
        "Each call of a function runs its collectives once, whatever it does else."
        body = "c10d = torch.ops._c10d_functional\n" + self.COLLECTIVES[name].strip()
        mutated = (0,) if name in ("after_a_mutation", "of_an_input") else ()
        fn = None
        with Ranks(self.device) as ranks:
            for _ in range(7):
                inputs = [self.randn(), self.randn()]
                fn = fn or self.deploy(body, inputs, force=None, mutated=mutated)
                ranks.ran = 0
                expected = self.expected(fn, inputs)
                in_eager, ranks.ran = ranks.ran, 0
                outputs = fn(*inputs)
                self.assertEqual(self.values([*outputs, *inputs]), expected)
                self.assertEqual(ranks.ran, in_eager)
                del outputs, inputs

    @parametrize("name", ("in_between", "of_an_output", "after_a_mutation"))
    def test_collectives(self, name):
        self.check_collectives(name)
        (entry,) = report()
        self.assertEqual((entry.choice, entry.copied_bytes), ("node_update", 0))
        self.assertEqual(counters["pygraph"]["bound_outputs"], 1)
        self.assertEqual(counters["pygraph"]["unsteady_recordings"], 0)

    @parametrize(
        "name, reason",
        (
            ("of_an_input", Reason.of(Code.COLLECTIVE_OF_INPUT)),
            (
                "gathered",
                Reason.of(
                    Code.COLLECTIVE_NOT_OMITTABLE,
                    op="_c10d_functional.all_gather_into_tensor.default",
                ),
            ),
        ),
        name_fn=lambda name, reason: name,
    )
    def test_collectives_that_are_copied(self, name, reason):
        self.check_collectives(name)
        (entry,) = report()
        self.assertEqual((entry.choice, entry.reasons), ("copy", [reason]))

    @parametrize(
        "failure, choice",
        (
            ("proof", "no_graph"),
            ("nodes", "no_graph"),
            ("deploy", "no_graph"),
            ("capture", "copy"),
        ),
    )
    def test_collectives_of_a_graph_that_fails(self, failure, choice):
        "Here, or on another rank."
        asked = []

        def agree(group, what, ready):
            asked.append((group, what.rpartition("/")[2], ready))
            return ready and what.rpartition("/")[2] != failure

        refused = DriverError("refused")
        here = {
            "proof": hiding(0),
            "nodes": mock.patch.object(collectives.Collectives, "_enable", side_effect=refused),
        }
        with (
            mock.patch.object(collectives, "agree", agree),
            here.get(failure, contextlib.nullcontext()),
        ):
            self.check_collectives("in_between")
        (entry,) = report()
        self.assertEqual((entry.choice, entry.copied_bytes != 0), (choice, choice == "copy"))
        ready = failure == "deploy"
        both = [("0", "capture", True), ("0", "deploy", ready)]
        self.assertEqual(asked, both[:1] if failure == "capture" else both)

    def test_collectives_of_many_sizes(self):
        "Where not all ranks came to the first, none waits for others to come to the next ones."
        body = "c10d = torch.ops._c10d_functional\n" + self.COLLECTIVES["in_between"].strip()
        model, asked = self.generated(body), []

        def agree(group, what, ready):
            asked.append((what.rpartition("/")[2], ready))
            return False

        with (
            Ranks(self.device) as ranks,
            mock.patch.object(collectives, "agree", agree),
            mock.patch.object(self, "generated", lambda body: model),
        ):
            for _ in range(4):
                fn = self.deploy(body, [self.randn(), self.randn()], force=None)
                for _ in range(4):
                    inputs = [self.randn(), self.randn()]
                    expected = self.expected(fn, inputs)
                    ranks.ran = 0
                    self.assertEqual(self.values([*fn(*inputs), *inputs]), expected)
                    self.assertEqual(ranks.ran, 1)
        self.assertEqual(asked, [("capture", True)] + [("capture", False)] * 3)

    def test_collectives_of_a_backward(self):
        "What the forward left in the pool is gone after the proof."
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
            force=None,
        )
        asked = []

        def agree(group, what, ready):
            asked.append((what.rpartition("/")[2], ready))
            return ready

        with (
            Ranks(self.device) as ranks,
            mock.patch.object(collectives, "agree", agree),
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
        self.assertEqual([entry.choice for entry in report()], ["node_update", "copy"])
        # A rank on which the forward is no graph would wait.
        self.assertEqual(asked, [("capture", False)])

    @parametrize("groups", ((), ("0", "1")))
    def test_collectives_of_several_groups(self, groups):
        "Or of none that is known."
        self.groups = groups
        self.check_collectives("in_between")
        (entry,) = report()
        self.assertEqual(entry.choice, "copy")

    @parametrize("repeats", (True, False))
    def test_results_that_are_only_close(self, repeats):
        """
        As those of a function that is not deterministic are. One that is has to be
        reproduced to the bit: what is wrong may be a small part of the result.
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
        for _ in range(6):
            x, y = self.randn(), self.randn()
            (out,) = fn(x, y)
            self.assertEqual(on_host(out), on_host(x), atol=1e-4, rtol=1e-4)
        self.assertEqual(counters["pygraph"]["unbound"], repeats, str(report()))

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

        def failing(*args):
            failures[method].start()
            self.addCleanup(failures[method].stop)
            return diagnose.verify(*args)

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

    def test_random_numbers_of_another_thread(self):
        "It draws while the function is rehearsed, not as often each time."
        draws = []

        def hook():
            draws.append([random.random() for _ in range(20 - len(draws))])

        self.hook = hook
        self.check(f"hook(); {self.ADD.strip()}")
        self.assertEqual(report()[0].choice, "node_update")
        self.assertTrue(draws[-1])
        seen, repeated = set(), 0
        for numbers in draws:
            repeated += not seen.isdisjoint(numbers)
            seen.update(numbers)
        # Only while that is found out.
        self.assertEqual(repeated, 2)

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

    def not_rehearsed(self, body: str, size: int = 8) -> Iterator[tuple[Any, Any]]:
        "What is given to a function that writes an earlier graph's output, and its results."
        first = second = None
        for i in range(7):
            new_generation()
            x, y = self.randn(), self.randn(size)
            first = first or self.deploy(
                "x, = args; args.clear(); a = new(); launch(sin, a, x); return (a,)",
                [x],
                returned=[],
            )
            (a,) = first.call([x])
            second = second or self.deploy(
                f"a, y = args; args.clear(); hook(); {body}",
                [a, y],
                names=["partition_1_placeholder_0", "arg1_1"],
                mutated=(0,),
            )
            inputs, given = [a, y], [on_host(a).clone(), on_host(y)]
            del a
            self.device.empty_cache()
            if i == 2:
                self.device.limit = self.device.nbytes + 4096
            (result,) = second.call(inputs)
            self.device.limit = 1 << 30
            yield given, on_host(result)
            del result, inputs

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

    def test_no_memory_for_what_is_not_rehearsed(self):
        for (a, _), result in self.not_rehearsed(
            "launch(mul, a, a, a); c = new(); launch(add, c, a, a); return (c,)", 4096
        ):
            self.assertEqual(result, 2 * a * a)
        self.assertIn("out of memory", report()[1].reason)

    def test_inference_tensor_is_restored(self):
        with torch.inference_mode():
            x = torch.arange(4.0)
        for t in (x, torch.nn.Parameter(torch.arange(4.0))):
            saved = SavedInput(t)
            with torch.inference_mode():
                t.zero_()
            version = t.is_inference() or t._version
            saved.restore(t)
            self.assertEqual(t.detach(), torch.arange(4.0))
            self.assertEqual(t.is_inference() or t._version, version)

    @parametrize("force", ("node_update", "copy"))
    def test_recorded_in_inference_mode(self, force):
        "Dynamo has one function for an inference tensor, in inference mode and outside of it."
        fn = None
        for i in range(7):
            with torch.inference_mode():
                inputs = [self.randn(), self.randn()]
            with torch.inference_mode(i < 4):
                fn = fn or self.deploy(self.ADD, inputs, force=force)
                expected, *_ = self.expected(fn, inputs)
                (out,) = fn(*inputs)
            self.assertEqual(on_host(out), expected)
            self.assertEqual(out.is_inference(), i < 4)
        self.assertEqual(counters["pygraph"]["unbound"], 0)

    def test_output_passed_back_in(self):
        x = self.randn()
        fn = self.deploy(self.ADD, [x, x])
        expected = on_host(x).clone()
        for _ in range(8):
            (x,) = fn(x, x)
            expected = expected.sin() + expected
            self.assertEqual(on_host(x), expected)

    @parametrize("name", ("mutated", "returned", "view", "number"))
    def test_outputs_of_each_kind(self, name):
        body, returned, mutated = {
            "mutated": (
                "x, y = args; args.clear(); launch(add, x, x, y); a = new(); launch(sin, a, x); return (a,)",
                [0],
                (0,),
            ),
            "returned": (
                "x, y = args; args.clear(); a = new(); launch(add, a, x, y); return (x, a, a)",
                [0, 1, 2],
                (),
            ),
            "view": (
                "x, y = args; args.clear(); a = new(); launch(add, a, x, y); "
                "return (a, torch.as_strided(a, (4,), (2,)), torch.as_strided(x, (4,), (1,)))",
                [0, 1, 2],
                (),
            ),
            "number": (
                "x, y = args; args.clear(); a = new(); launch(add, a, x, y); return (a, None, 7)",
                [0, 1, 2],
                (),
            ),
        }[name]
        self.check(body, returned=returned, mutated=mutated)
        self.assertEqual(counters["pygraph"]["unbound"], 0, str(report()))

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
        ),
    )
    def test_operator_that_is_not_captured(self, force, body):
        """
        It launches on a stream of its own, or on the default one, as libraries for custom
        kernels do, while another is captured: at once, on what the capture was given.
        """

        def operator(out: torch.Tensor, x: torch.Tensor) -> None:
            torch.sin(on_host(x), out=on_host(out))

        fn = None
        for _ in range(6 if force else 130):
            x = self.randn()
            expected = on_host(x).sin()
            fn = fn or self.deploy(
                f"x, = args; args.clear(); {body}",
                [x],
                force=force,
                mutated=(0,) if "(x, x)" in body else (),
            )
            fn.model.__globals__.update(operator=operator, copy=torch.Tensor.copy_)
            (out,) = fn(x)
            self.assertEqual(on_host(out), expected)
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
            )
            stride = (1,) * len(size)
            number = functools.partial(self.device.empty_strided, size, stride, torch.int64)
            fn.model.__globals__.update(operator=operator, copy=torch.Tensor.copy_, number=number)
            out, _ = fn(x)
            self.assertEqual(on_host(out), expected)
        (entry,) = report()
        self.assertEqual(entry.choice, "no_graph")
        self.assertIn("not captured", entry.reason)

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
        (entry,) = report()
        self.assertIn("not captured", entry.reason)

    def test_returned_input_is_the_callers(self):
        body = "x, y = args; args.clear(); a = new(); launch(add, a, x, y); return (x, a, a)"
        fn = self.check(body, returned=[0, 1, 2])
        x, y = self.randn(), self.randn()
        outputs = fn(x, y)
        self.assertIs(outputs[0], x)
        self.assertIs(outputs[1], outputs[2])

    def test_allocated_by_an_operator(self):
        self.check(
            "x, y = args; args.clear(); a = empty(); launch(add, a, x, y); b = new(); launch(sin, b, a); return (a, b)",
            returned=[0, 1],
        )
        self.assertEqual(counters["pygraph"]["copied_outputs"], 0)
        self.assertEqual(counters["pygraph"]["bound_outputs"], 2)

    def test_allocated_by_an_operator_and_shared(self):
        self.check(
            "x, y = args; args.clear(); b = empty(); launch(add, b, x, y); return (b, b.view(2, 4))",
            returned=[0, 1],
        )
        self.assertEqual(counters["pygraph"]["copied_outputs"], 1)
        self.assertEqual(counters["pygraph"]["bound_outputs"], 0)

    @contextlib.contextmanager
    def delivering(self) -> Iterator[None]:
        "Words that a kernel takes are addresses, of which it looks at nothing else."
        empty = torch.empty

        def device_empty(size: Any, **kwargs: Any) -> torch.Tensor:
            if "cuda" in str(kwargs.get("device")):
                return self.device.empty_strided((size,), (1,), kwargs["dtype"])
            return empty(size, **kwargs)

        def launch(sizes: tuple[int, ...], *args: Any) -> tuple[int]:
            *_, parameters, _ = args
            pointers = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
            (to,) = ctypes.cast(pointers[0], ctypes.POINTER(ctypes.c_void_p))[:1]
            nbytes = sum(sizes)
            words = ctypes.cast(pointers[1], ctypes.POINTER(ctypes.c_uint64))
            like = empty(nbytes, dtype=torch.uint8, device="meta")
            word = empty(1, dtype=torch.uint8, device="meta")
            self.device.launch(
                write,
                tensor_at(to, like, 0),
                *(tensor_at(w, word, 0) for w in words[: nbytes // 8]),
            )
            return (0,)

        def write(out: torch.Tensor, *words: torch.Tensor) -> None:
            content = (ctypes.c_uint64 * len(words))(*(w.data_ptr() for w in words))
            ctypes.memmove(out.data_ptr(), content, ctypes.sizeof(content))

        with (
            mock.patch.object(torch, "empty", device_empty),
            mock.patch.object(deliver, "bindings") as bindings,
            mock.patch.object(deliver, "_kernel", lambda sizes: sizes),
            mock.patch.object(
                torch._C, "_cuda_getCurrentRawStream", lambda index: 0, create=True
            ),
        ):
            bindings.return_value.cuLaunchKernel = launch
            yield

    @parametrize("force", ("node_update", "copy", None))
    def test_values_on_the_cpu(self, force):
        "They are those of each call, packed ahead of it."

        def scale(out: torch.Tensor, x: torch.Tensor, s: torch.Tensor) -> None:
            torch.mul(x, s.sum(), out=out)

        values = deliver.Deliver(0, (torch.int64, (2,)))
        with self.delivering():
            fn = self.deploy(
                "x, y = args; args.clear(); (s,) = values.launch(); a = new(); "
                "launch(scale, a, x, s); b = new(); launch(add, b, a, y); return (b,)",
                [self.randn(), self.randn()],
                force=force,
            )
            fn.model.__globals__.update(values=values, scale=scale)
            for i in range(120):
                x, y = self.randn(), self.randn()
                value = torch.tensor([(i + 1) // 2 + 1, 7])
                values.pack([value])
                value.zero_()
                (out,) = fn(x, y)
                expected = on_host(x) * ((i + 1) // 2 + 8) + on_host(y)
                self.assertEqual(on_host(out), expected)
        self.assertEqual(counters["pygraph"]["unbound"], 0, str(report()))
        if force:
            (entry,) = report()
            self.assertEqual(entry.choice, force)
            self.assertEqual(entry.reasons, [Reason.of(Code.FORCED)])

    @parametrize("times", (3, 6))
    def test_values_of_what_a_finalizer_calls(self, times):
        "The same function, with others, where the collector runs it: where a replay allocates."

        def scale(out: torch.Tensor, x: torch.Tensor, s: torch.Tensor) -> None:
            torch.mul(x, s.sum(), out=out)

        def call(n: int) -> tuple[torch.Tensor, torch.Tensor]:
            x, y = self.randn(), self.randn()
            values.pack([torch.tensor([n, 0])])
            (out,) = fn(x, y)
            return out, on_host(x) * n + on_host(y)

        def collecting(*args: Any) -> torch.Tensor:
            self.hook()
            return self.device.empty_strided(*args)

        def finalizer() -> None:
            self.hook = lambda: None
            seen.append(call(5))

        values, seen = deliver.Deliver(0, (torch.int64, (2,))), []
        with (
            self.delivering(),
            mock.patch.object(allocation, "empty_strided_cuda", collecting),
        ):
            fn = self.deploy(
                "x, y = args; args.clear(); (s,) = values.launch(); a = new(); "
                "launch(scale, a, x, s); b = new(); launch(add, b, a, y); return (b,)",
                [self.randn(), self.randn()],
            )
            fn.model.__globals__.update(values=values, scale=scale)
            for i in range(times):
                if i == times - 1:
                    self.hook = finalizer
                seen.append(call(7))
        self.assertEqual(len(seen), times + 1)
        for out, expected in seen:
            self.assertEqual(on_host(out), expected)

    @parametrize("force", ("node_update", "copy", None))
    def test_values_of_what_an_operator_calls(self, force):
        "It packs them while it is captured, and for other callers at any time."

        def scale(out: torch.Tensor, x: torch.Tensor, s: torch.Tensor) -> None:
            torch.mul(x, s.sum(), out=out)

        values = deliver.Deliver(0, (torch.int64, (2,)))

        def op(x: torch.Tensor, factor: int) -> torch.Tensor:
            values.pack([torch.tensor([factor, 0])])
            return inner(x)[0]

        with self.delivering():
            inner = self.deploy(
                "x, = args; args.clear(); (s,) = values.launch(); a = new(); launch(scale, a, x, s); return (a,)",
                [self.randn()],
                force="no_graph",
            )
            inner.model.__globals__.update(values=values, scale=scale)
            fn = self.deploy(
                "x, = args; args.clear(); a = op(x, 3); b = op(x, 5); c = new(); launch(add, c, a, b); return (c,)",
                [self.randn()],
                force=force,
            )
            fn.model.__globals__.update(op=op)
            for i in range(120):
                x = self.randn()
                (out,) = fn(x)
                self.assertEqual(on_host(out), on_host(x) * 8)
                self.assertEqual(on_host(op(x, i)), on_host(x) * i)
        self.assertEqual(counters["pygraph"]["unbound"], 0, str(report()))

    def test_copied_values_of_another_stream(self):
        "What a replay of the last one may still read is written behind it."
        calls = []

        def logged(owner: Any, name: str) -> Any:
            function = getattr(owner, name)
            return lambda *args: calls.append(name) or function(*args)

        def logged_state(manager: Any) -> Any:
            state = state_of(manager)
            return types.SimpleNamespace(
                acquire=state.acquire,
                release=state.release,
                follow=logged(state, "follow"),
            )

        values = deliver.Deliver(0, (torch.float32, (8,)))
        with (
            self.delivering(),
            mock.patch.object(deploy, "state_of", logged_state),
            mock.patch.object(
                deliver._Target, "write", logged(deliver._Target, "write")
            ),
        ):
            fn = self.deploy(
                "x, = args; args.clear(); (s,) = values.launch(); a = new(); launch(add, a, x, s); return (a, s)",
                [self.randn()],
                force="copy",
            )
            fn.model.__globals__.update(values=values)
            for i in range(8):
                x, value = self.randn(), torch.full((8,), float(i))
                calls.clear()
                values.pack([value])
                self.assertEqual(calls, [])
                a, _ = fn(x)
                self.assertEqual(on_host(a), on_host(x) + value)
        self.assertEqual(calls, ["follow", "write"])

    @parametrize("force", ("node_update", "copy"))
    def test_values_of_another_thread(self, force):
        "As autograd's has them, which calls what the program's thread recorded."
        values = deliver.Deliver(0, (torch.float32, (8,)))
        threads = iter([1] * 8 + [2, 1, 2, 2, 1])
        with self.delivering():
            fn = self.deploy(
                "x, = args; args.clear(); (s,) = values.launch(); a = new(); launch(add, a, x, s); return (a, s)",
                [self.randn()],
                force=force,
            )
            fn.model.__globals__.update(values=values)
            for i, thread in enumerate(threads):
                with mock.patch("threading.get_ident", lambda: thread):
                    x, value = self.randn(), torch.full((8,), float(i))
                    values.pack([value])
                    a, s = fn(x)
                    self.assertEqual(on_host(a), on_host(x) + value)
                    self.assertEqual(on_host(s), value)

    @contextlib.contextmanager
    def failing_once(self, method: str) -> Iterator[None]:
        "Of the graph, if it has such a method."
        original = getattr(ModelledGraph, method, None)
        if original is None:
            yield
            return
        calls = []

        def fail(graph: ModelledGraph) -> None:
            calls.append(graph)
            if len(calls) == 1:
                raise RuntimeError("no memory\nand advice")
            original(graph)

        with mock.patch.object(ModelledGraph, method, fail):
            yield
        self.assertGreater(len(calls), 0)

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

    @parametrize("force", ("prelude", "table"))
    @parametrize(
        "end",
        ("works", "unavailable", "broken", "instantiate", "replay", "on the device"),
    )
    def test_prelude(self, force, end):
        "Without one, or where it fails, the host sets the nodes, of this graph or the next."
        made = []

        class Prelude:
            nodes: tuple[int, ...] = ()

            def __init__(self, graph: Any, places: Any, index: int, table: Any) -> None:
                made.append(self)
                self.table = table
                if end == "unavailable":
                    raise PreludeUnavailable("no compiler")
                if end == "broken":
                    raise RefusedError(Reason.of(Code.ERROR, error="no node"))

            def upload(self, executable: Any) -> None:
                self.is_uploaded = True

            def failure(self) -> Reason | None:
                failed = Reason.of(Code.NODE_REFUSED_ON_DEVICE, status=9)
                return failed if end == "on the device" else None

        with mock.patch.object(bound, "Prelude", Prelude), self.failing_once(end):
            self.check(self.ADD, force=force)
        self.assertEqual(len(made), 1)
        self.assertEqual(made[0].table is not None, force == "table")
        (entry,) = report()
        self.assertEqual(counters["pygraph"]["unbound"], 0)
        self.assertEqual(counters["pygraph"]["bound_by_host"], end != "works")
        if end == "works":
            self.assertTrue(made[0].is_uploaded)
            self.assertEqual(entry.choice, force)
            self.assertEqual(entry.reasons, [Reason.of(Code.FORCED)])
            return
        reason = {
            "unavailable": "no compiler",
            "broken": "recording failed: no node",
            "instantiate": "the graph cannot be instantiated: no memory",
            "replay": "the graph cannot be launched: no memory",
            "on the device": "cudaGraphKernelNodeSetParam failed on the device with 9",
        }
        self.assertEqual(entry.choice, "node_update")
        self.assertEqual(entry.reason, f"no {force}: {reason[end]}")
        self.assertGreater(entry.updated_nodes, 0)
        self.assertEqual(entry.copied_bytes, 0)

    @parametrize("end", ("works", "few kernels", "unavailable", "on the device"))
    def test_prelude_is_selected(self, end):
        "A graph of many kernels has one if it can, and is what a replay finds at once."

        class Prelude:
            nodes: tuple[int, ...] = ()
            table = None

            def __init__(self, *args: Any) -> None:
                if end == "unavailable":
                    raise PreludeUnavailable("no compiler")

            def upload(self, executable: Any) -> None:
                pass

            def failure(self) -> Reason | None:
                failed = Reason.of(Code.NODE_REFUSED_ON_DEVICE, status=9)
                return failed if end == "on the device" else None

        costs = iter([timing.Cost(*[timing.Estimate(us)] * 3) for us in (99.0, 50.0)])
        with (
            mock.patch.object(bound, "Prelude", Prelude),
            mock.patch.object(bound, "prelude_pays", lambda *_: end != "few kernels"),
            mock.patch.object(timing.Samples, "cost", lambda samples: next(costs)),
        ):
            fn = self.check(self.ADD, force=None, calls=170)
        (entry,) = report()
        self.assertEqual(entry.choice, "prelude" if end == "works" else "node_update")
        failed = end in ("unavailable", "on the device")
        self.assertEqual(counters["pygraph"]["bound_by_host"], failed)
        manager = trees.get_manager(0)
        (nodes,) = filter(None, manager.roots.values())
        self.assertEqual(len(nodes), 1)
        self.assertEqual(nodes[0].prelude is not None, end == "works")
        with mock.patch.object(manager, "_run", side_effect=AssertionError("searched")):
            x, y = self.randn(), self.randn()
            (out,) = fn(x, y)
            self.assertEqual(on_host(out), on_host(x).sin() + on_host(y))

    def test_prelude_of_what_cannot_be_captured(self):
        with (
            mock.patch.object(bound, "Prelude", side_effect=AssertionError),
            mock.patch.object(bound, "Rehearsal", side_effect=RuntimeError("out")),
        ):
            self.check(self.ADD, force="prelude")
        (entry,) = report()
        self.assertEqual(entry.choice, "copy")

    def test_no_inputs(self):
        self.check(
            "args.clear(); a = new(); launch(torch.Tensor.zero_, a); b = new(); launch(sin, b, a); return (b,)",
            list,
        )
        self.assertEqual(counters["pygraph"]["bound_outputs"], 1)

    @parametrize("hidden", (0, 1, 2))
    def test_hidden_word(self, hidden):
        "The proof fails, the call is right, and so are those that copy."
        with hiding(hidden):
            self.check(self.ADD)
        self.assertEqual(counters["pygraph"]["unbound"], 1)
        self.assertEqual(counters["pygraph"]["copied_outputs"], 1)

    @contextlib.contextmanager
    def remembered(self, choice: str = candidate.NODE_UPDATE) -> Iterator[store.Entry]:
        "An earlier process bound it, or copied its inputs, and it was faster."
        with tempfile.TemporaryDirectory() as directory:
            entry = store.Entry(Path(directory), {}, {})
            entry.save(store.Decision(choice, [Reason.of(Code.NOT_FASTER)], {}))
            with mock.patch.object(store, "entry_for", lambda *args: entry):
                yield entry

    @parametrize("hidden", (None, 0, 1, 2))
    def test_remembered(self, hidden):
        "It is bound again at the second call, or decided anew where it can not be."
        with (
            hiding(hidden),
            self.remembered() as entry,
        ):
            calls = 3 if hidden is None else 200
            self.check(self.ADD, force=None, code_hash="c", calls=calls)
            kept = entry.load(candidate.CANDIDATES)
        (function,) = report()
        self.assertEqual(function.choice, kept.choice)
        self.assertEqual(function.remembered, hidden is None)
        self.assertEqual(function.choice == candidate.NODE_UPDATE, hidden is None)
        self.assertEqual(counters["pygraph"]["reselected"], int(hidden is not None))

    def test_remembered_copies(self):
        "They are no more than it was decided with."
        with self.remembered(candidate.COPY):
            self.check(self.ADD, force=None, code_hash="c", calls=12)
        (function,) = report()
        self.assertEqual((function.choice, function.copied_bytes), ("copy", 64))
        self.assertTrue(function.remembered)
        self.assertEqual(counters["pygraph"]["reselected"], 0)

    def test_remembered_and_not_bound_later(self):
        "A recording for inputs that are less aligned can not be bound."
        memory, calls, hidden = self.randn(64), itertools.count(), [None]

        def make():
            call = next(calls)
            hidden.append(0 if call > 3 else None)
            offset = 4 if call > 3 else 0
            x = torch.as_strided(memory, (8,), (1,), offset)
            return [x, self.randn()]

        with (
            hiding(lambda: hidden[-1]),
            self.remembered() as entry,
        ):
            self.check(self.ADD, make, force=None, code_hash="c", calls=120)
            kept = entry.load(candidate.CANDIDATES)
        (function,) = report()
        self.assertNotEqual(function.choice, candidate.NODE_UPDATE)
        self.assertEqual(function.choice, kept.choice)
        self.assertEqual(counters["pygraph"]["reselected"], 1)

    def refusing(self, refuses: Callable[[int], bool]) -> Any:
        return mock.patch.object(self.device.driver, "refuses", refuses)

    def is_of_backward(self, node: int) -> bool:
        nodes, graphs = self.device.driver.nodes, self.device.driver.graphs.values()
        return any(node in graph and nodes[graph[0]].launch.kernel.name == "cos_" for graph in graphs)

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

    @contextlib.contextmanager
    def selects_at_once(self, *us: float) -> Iterator[None]:
        "What is timed takes so long, in turns."
        costs = [timing.Cost(*[timing.Estimate(t)] * 3) for t in us]
        times = itertools.cycle(costs)
        few = dict(WARMUP_SAMPLES=0, SAMPLES=1, MAX_SAMPLES=1, DEVICE_SAMPLES=1)
        with (
            mock.patch.multiple(timing, **few),
            mock.patch.object(timing.Samples, "cost", lambda _: next(times)),
        ):
            yield

    def test_forced_copies_are_reported(self):
        self.check(self.ADD, force="copy", calls=3)
        (function,) = report()
        self.assertEqual((function.choice, function.copied_bytes), ("copy", 64))

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
                with mock.patch.object(copying, "room", lambda *_: 0):
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

    def test_recording_that_is_found_later(self):
        "What was not recorded in the call that should have is replayed the short way too."
        add = interpreter.ReplayChain.add
        with mock.patch.object(interpreter.ReplayChain, "add", lambda replays, general: None):
            fn = self.check(self.ADD, calls=1)
            x, y = self.randn(), self.randn()
            fn(x, y)
        self.assertIs(interpreter.ReplayChain.add, add)
        fn(x, y)
        manager = trees.get_manager(0)
        with mock.patch.object(manager, "_run", side_effect=AssertionError("searched")):
            x, y = self.randn(), self.randn()
            (out,) = fn(x, y)
            self.assertEqual(on_host(out), on_host(x).sin() + on_host(y))

    @parametrize("is_dropped", (False, True))
    def test_as_many_recordings_as_a_chain_tries(self, is_dropped):
        manager = types.SimpleNamespace(_current_node=None)
        function = mock.Mock(binds_inputs=True, node_type=lambda: types.SimpleNamespace)
        replays = interpreter.ReplayChain(function, manager, None, object())

        def record() -> types.SimpleNamespace:
            node = types.SimpleNamespace(graph=object())
            node.wrapped_function = types.SimpleNamespace(pygraph=function)
            node._path_to_root = [node]
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

    def conjugating(self, body: str) -> Any:
        "A function whose operator_mul is aten.mul: what it launches depends on its inputs."

        def mul_of_conjugate(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
            torch.mul(x.conj(), y, out=out)

        def operator_mul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            out = self.device.empty_strided((8,), (1,), torch.complex64)
            kernel = mul_of_conjugate if x.is_conj() else mul
            self.device.launch(kernel, out, x, y)
            return out

        fn = RecordTest.generated(self, body)
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
        body = (
            "x, s = args; args.clear(); launch(add, s, s, x); "
            "a = new(); launch(sin, a, s); return (a,)"
        )
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

    LAYER = """
        x, w, b = args; args.clear()
        a = new(); launch(add, a, x, w)
        c = new(); launch(add, c, a, b)
        return (c,)
    """

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

    def test_weight_that_is_saved(self):
        "Is the call's: others may have its memory by now, and autograd asks for its version."
        body = "x, w = args; args.clear(); a = new(); launch(mul, a, x, w); return (a, w)"
        for force in ("node_update", "copy"):
            with self.subTest(force=force):
                weights = [
                    torch.nn.Parameter(self.randn(), requires_grad=False)
                    for _ in range(2)
                ]
                fn = None
                for i in range(6):
                    if i == 4:
                        first, second = weights
                        first.data, second.data = second.data, first.data
                    for weight in weights:
                        x = self.randn()
                        fn = fn or self.deploy(
                            body, [x, weight], force=force, mode="forward", static=[1]
                        )
                        out, saved = fn(x, weight)
                        self.assertEqual(on_host(out), on_host(x) * on_host(weight))
                        self.assertIs(saved, weight)
                        del out
                ref = weakref.ref(weights.pop())
                del weight, saved, first, second
                self.assertIsNone(ref())

    def test_output_without_elements(self):
        body = "x, y = args; args.clear(); a = new(); launch(add, a, x, y); e = empty_strided_cuda((0, 4), (4, 1), torch.float32); return (a, e)"
        for force in ("node_update", "copy"):
            with self.subTest(force=force):
                fn = None
                kept = []
                for _ in range(6):
                    inputs = [self.randn(), self.randn()]
                    fn = fn or self.deploy(body, inputs, force=force, returned=[0, 1])
                    _, e = fn(*inputs)
                    self.assertEqual(
                        (e.size(), e.stride(), e.dtype), ((0, 4), (4, 1), torch.float32)
                    )
                    self.assertFalse(e.requires_grad)
                    # What the program does to one is not seen of another.
                    kept.append(e.unsqueeze_(0).requires_grad_())

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

    def test_misaligned_input(self):
        memory = self.randn(64)
        fn = None
        for offset in (0, 4, 1, 2, 4, 0, 4):
            x, y = torch.as_strided(memory, (8,), (1,), offset), self.randn()
            fn = fn or self.deploy(self.ADD, [x, y])
            (out,) = fn(x, y)
            self.assertEqual(on_host(out), on_host(x).sin() + on_host(y))

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

    FORWARD = """
        x, w = args; args.clear()
        a = new(); launch(mul, a, x, w)
        b = new(); launch(sin, b, a)
        return (b, a, w)
    """
    # The gradient lies where the activation did.
    BACKWARD = """
        a, w, t = args; args.clear()
        launch(torch.Tensor.cos_, a)
        launch(mul, a, a, t)
        c = new(); launch(mul, c, a, w)
        return (a, c)
    """

    def deploy_forward(
        self, x: torch.Tensor, weight: torch.Tensor, force: str = "node_update"
    ) -> Deployed:
        return self.deploy(
            self.FORWARD,
            [x, weight],
            mode="forward",
            force=force,
            static=[1],
            names=["primals_1", "primals_2"],
        )

    def deploy_backward(
        self, inputs: list[torch.Tensor], force: str | None = "node_update"
    ) -> Deployed:
        return self.deploy(
            self.BACKWARD,
            inputs,
            mode="backward",
            force=force,
            returned=[0, 1],
            static=[0, 1],
            names=["mul", "primals_2", "tangents_1"],
            reused=[0],
        )

    def step(
        self,
        x: torch.Tensor,
        retained: list[Any] | None = None,
        force: str = "node_update",
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """
        Outputs and gradients of one step, and what they have to be. Without a backward
        if its activation is retained instead.
        """
        t = self.randn()
        new_generation()
        self.forward = self.forward or self.deploy_forward(x, self.weight, force)
        out, a, w = self.forward.call([x, self.weight])
        expected_a = on_host(x) * on_host(self.weight)
        kept = [(out, expected_a.sin())]
        if retained is not None:
            retained.append((a, expected_a))
        self.backward = self.backward or self.deploy_backward(
            [a, w, t], force
        )
        if retained is None:
            inputs = [a, w, t]
            del a
            grad, grad_x = self.backward.call(inputs)
            expected = expected_a.cos() * on_host(t)
            kept += [(grad, expected), (grad_x, expected * on_host(self.weight))]
        return kept

    def test_training(self):
        self.weight = self.randn()
        kept = []
        for _ in range(7):
            kept += self.step(self.randn())
            for actual, expected in kept:
                self.assertEqual(on_host(actual), expected)
        self.assertEqual(counters["pygraph"]["unbound"], 0, str(report()))
        # The gradient in the activation's memory.
        self.assertEqual(counters["pygraph"]["copied_outputs"], 1)

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

    def test_even_graph_that_is_timed_in_fewer_calls(self):
        "The others become graphs when it is timed without one."
        weight, even = self.randn(), []
        forwards: list[Deployed | None] = [None, None]
        backwards: list[Deployed | None] = [None, None]

        def complete(samples: timing.Samples) -> bool:
            return samples.calls >= (4 if samples.state in even else 16)

        def cost(samples: timing.Samples) -> timing.Cost:
            us = 10.0 if samples.state.report.timings_us else 90.0
            us = 50.0 if samples.state in even else us
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
        reasons = [f.report.reason for f in even]
        self.assertEqual(
            reasons, ["not measured faster; it shares the memory of neighbouring graphs"] * 2
        )

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
            mock.patch.object(
                selection,
                "judge",
                lambda *args: (stays, Reason.of(Code.NOT_FASTER)),
            ),
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

    @parametrize("error", (5e-4, 1.0))
    def test_gradients_that_do_not_repeat(self, error):
        "By more than a tolerance, as sums do that cancel out; or by far more than they do."
        self.weight, runs, is_python = self.randn(), itertools.count(1), [False]

        def noisy(out: torch.Tensor, x: torch.Tensor, by: torch.Tensor) -> None:
            by_run = (5e-4, -5e-4)[next(runs) % 2] if is_python[0] else error
            torch.add(torch.mul(x, by), by_run, out=out)

        forward = backward = None
        for _ in range(7):
            new_generation()
            x, t = self.randn(), self.randn()
            forward = forward or self.deploy_forward(x, self.weight)
            out, a, w = forward.call([x, self.weight])
            inputs = [a, t]
            backward = backward or self.deploy(
                "a, t = args; args.clear(); is_python[0] = True; c = new(); "
                "launch(noisy, c, a, t); is_python[0] = False; return (c,)",
                inputs,
                mode="backward",
                static=[0],
                names=["mul", "tangents_1"],
            )
            backward.model.__globals__.update(noisy=noisy, is_python=is_python)
            del a
            (grad,) = backward.call(inputs)
            expected = on_host(x) * on_host(self.weight) * on_host(t)
            self.assertEqual(on_host(grad), expected, atol=2 * error, rtol=0)
        self.assertEqual(counters["pygraph"]["unbound"], error > 1e-2, str(report()))

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
        # The backward is recorded again. One gradient lies in the activation's memory.
        steps(2, held=False)
        self.assertEqual(outcome(), (2, 2, 3 if copied else 1))
        steps(4, held=True)
        self.assertEqual(outcome(), (2, 2, 3 if copied else 1))

    def gradient(self, force: str) -> torch.Tensor:
        "Of a step whose backward is all that is compiled."
        new_generation()
        inputs = t, w = [self.randn(), self.weight]
        self.backward = self.backward or self.deploy(
            "t, w = args; args.clear(); g = new(); launch(mul, g, t, w); return (g,)",
            inputs,
            mode="backward",
            force=force,
            names=["tangents_1", "primals_1"],
        )
        (grad,) = self.backward.call(inputs)
        self.assertEqual(on_host(grad), on_host(t) * on_host(w))
        return grad

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
        self.assertEqual(bool(counters["pygraph"]["copied_outputs"]), held)

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

    @parametrize("which", range(8))
    def test_interrupt_where_the_device_is_waited_for(self, which):
        "Before a graph is recorded, before it is captured and once it is; of a training step."
        self.weight, waits = self.randn(), itertools.count()
        interrupted, inputs = [], []

        def synchronize(*args):
            if next(waits) == which:
                raise KeyboardInterrupt

        with mock.patch.object(torch.cuda, "synchronize", synchronize):
            for i in range(9):
                if i == 5:
                    counters.clear()
                x = self.randn()
                inputs.append(StorageWeakRef(x.untyped_storage()))
                try:
                    kept = self.step(x)
                except KeyboardInterrupt:
                    interrupted.append(i)
                    continue
                for actual, expected in kept:
                    self.assertEqual(on_host(actual), expected)
                del x, actual, kept
        self.assertEqual(len(interrupted), which < 7)
        # Nothing is held that only the interrupted call had.
        self.assertTrue(all(x.expired() for x in inputs))
        self.assertEqual(counters["pygraph"]["held_activations"], 0)
        self.assertTrue(trees.get_manager(0).current_node.all_outputs_are_dead())

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

    def test_skipped_backward_of_a_thread_that_trees_do_not_know(self):
        from torch._inductor.cudagraph_utils import BoxedDeviceIndex
        from torch._inductor.output_code import maybe_handle_backward_generation

        graph = types.SimpleNamespace(
            current_callable=lambda inputs: inputs, fx_kwargs={"is_backward": True}
        )
        with ThreadPoolExecutor(1) as pool:
            index = BoxedDeviceIndex(0)
            pool.submit(maybe_handle_backward_generation, graph, index).result()
        self.assertEqual(graph.current_callable([1]), [1])

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

    def test_training_in_little_memory(self):
        choices = self.check_fits(self.train, "node_update")
        self.assertEqual([*dict.fromkeys(choices)], ["no_graph", "node_update"])

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

    def test_inference_in_little_memory(self):
        choices = self.check_fits(self.run_deep, "node_update")
        self.assertEqual([*dict.fromkeys(choices)], ["no_graph", "node_update"])

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

    def test_graph_that_lost_gives_its_memory_back(self):
        costs = iter([timing.Cost(*[timing.Estimate(us)] * 3) for us in (9.0, 99.0, 99.0, 9.0)])
        with mock.patch.object(timing.Samples, "cost", lambda samples: next(costs)):
            self.check(self.ADD, force=None, calls=120)
        self.assertEqual(report()[0].choice, "no_graph")
        self.assertFalse(any(trees.get_manager(0).roots.values()))


instantiate_parametrized_tests(RecordTest)


class PythonRecordTest(RecordTest):
    "Without compiled code."

    compiled = None
    test_training_goes_around_trees = None
    test_as_many_recordings_as_compiled_code_tries_is_dropped_False = None
    test_as_many_recordings_as_compiled_code_tries_is_dropped_True = None


class Program:
    """
    A program of several functions, of which the test chooses each step. What it keeps is
    compared with what it has to be after every step.
    """

    def __init__(self, test: RecordTest, force: str | None) -> None:
        self.test = test
        self.force = force
        self.deployed: dict[str, Deployed] = {}
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.weight = test.randn()
        # (what holds the activation, weight, what the activation has to be)
        self.pending: list[tuple[Any, torch.Tensor, torch.Tensor]] = []

    def function(
        self, name: str, body: str, inputs: list[Any], **kwargs: Any
    ) -> Deployed:
        if name not in self.deployed:
            self.deployed[name] = self.test.deploy(
                body, inputs, force=self.force, **kwargs
            )
        return self.deployed[name]

    def pick(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        "Something that is kept, or a new tensor, with its value on the host."
        if k < len(self.kept):
            return self.kept[k]
        x = self.test.randn()
        return x, on_host(x).clone()

    def infer(self, k: int, j: int) -> None:
        (x, x_value), (y, y_value) = self.pick(k), self.pick(j)
        (out,) = self.function("add", self.test.ADD, [x, y]).call([x, y])
        self.kept.append((out, x_value.sin() + y_value))

    def mutate(self, k: int, j: int) -> None:
        # Nobody else may hold what is written.
        x, (y, y_value) = self.test.randn(), self.pick(j)
        value = on_host(x) + y_value
        body = "x, y = args; args.clear(); launch(add, x, x, y); a = new(); launch(sin, a, x); return (a, x)"
        out, returned = self.function(
            "mutate", body, [x, y], mutated=(0,), returned=[0, 1]
        ).call([x, y])
        self.test.assertIs(returned, x)
        self.kept += [(out, value.sin()), (x, value)]

    def partitions(self, k: int, j: int) -> None:
        (x, x_value), (y, y_value) = self.pick(k), self.pick(j)
        a, b = self.function(
            "first",
            "x, y = args; args.clear(); a = new(); launch(sin, a, x); b = new(); launch(add, b, x, y); return (a, b)",
            [x, y],
            returned=[1],
        ).call([x, y])
        inputs = [a, b]
        del a
        (c,) = self.function(
            "second",
            "a, b = args; args.clear(); c = new(); launch(mul, c, a, b); d = new(); launch(sin, d, c); return (d,)",
            inputs,
            names=["partition_1_placeholder_0", "partition_1_placeholder_1"],
        ).call(inputs)
        self.kept += [
            (b, x_value + y_value),
            (c, (x_value.sin() * (x_value + y_value)).sin()),
        ]

    def forward(self, k: int, j: int) -> None:
        x, x_value = self.pick(k)
        out, a, w = self.function(
            "forward",
            self.test.FORWARD,
            [x, self.weight],
            mode="forward",
            static=[1],
            names=["primals_1", "primals_2"],
        ).call([x, self.weight])
        value = x_value * on_host(self.weight)
        self.kept.append((out, value.sin()))
        held = HeldByAutograd(a) if j % 2 else HeldByName(a)
        self.pending.append((held, w, value))

    def backward(self, k: int, j: int) -> None:
        if not self.pending:
            return
        retain = j % 3 == 0
        k %= len(self.pending)
        held, w, value = self.pending[k] if retain else self.pending.pop(k)
        t, t_value = self.pick(j)
        inputs = [held.activation(), w, t]
        del held
        body = "a, w, t = args; args.clear(); b = new(); launch(mul, b, a, t); c = new(); launch(mul, c, b, w); return (b, c)"
        grads = self.function(
            "backward",
            body,
            inputs,
            mode="backward",
            static=[0, 1],
            returned=[0, 1],
            names=["mul", "primals_2", "tangents_1"],
        ).call(inputs)
        expected = value * t_value
        self.kept += zip(grads, (expected, expected * on_host(w)))

    def forget_kept(self, k: int, j: int) -> None:
        del self.kept[k:j]

    def abandon_pending(self, k: int, j: int) -> None:
        del self.pending[k:]

    def new_weight(self, k: int, j: int) -> None:
        self.weight = self.test.randn()

    def mark_step(self, k: int, j: int) -> None:
        trees.mark_step_begin()

    def run(self, steps: Sequence[tuple[str, int, int, bool]]) -> None:
        for name, k, j, is_new in steps:
            if is_new:
                new_generation()
            getattr(self, name)(k, j)
            self.check()

    def check(self) -> None:
        for actual, expected in self.kept:
            self.test.assertEqual(on_host(actual), expected)
        for held, _, expected in self.pending:
            self.test.assertEqual(on_host(held.activation()), expected)


STEPS = (
    "infer",
    "mutate",
    "partitions",
    "forward",
    "backward",
    "backward",
    "forget_kept",
    "abandon_pending",
    "new_weight",
    "mark_step",
)


# (step, its two arguments, whether a compiled function is called anew)
STEP = st.tuples(
    st.sampled_from(STEPS), st.integers(0, 5), st.integers(0, 5), st.booleans()
)

in_short = settings(
    deadline=None,
    max_examples=60,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


class ProgramTest(RecordTest):
    @in_short
    @given(
        st.sampled_from(("node_update", "copy")),
        st.lists(
            STEP,
            min_size=4,
            max_size=40,
        ),
    )
    def test_random_programs(self, force, steps):
        trees.reset_cudagraph_trees()
        trees.MarkStepBox.mark_step_counter = 0
        program = Program(self, force)
        # To the steady state of each.
        for name in ("infer", "mutate", "partitions", "forward", "backward") * 4:
            new_generation()
            getattr(program, name)(5, 1)
            program.check()
            program.kept.clear()
        program.run(steps)

    @in_short
    @given(
        # Whatever the times, so that graphs come and go.
        st.lists(st.sampled_from((10.0, 50.0, 90.0)), min_size=1, max_size=8),
        st.lists(
            STEP,
            min_size=20,
            max_size=80,
        ),
    )
    def test_random_programs_while_selecting(self, times, steps):
        trees.reset_cudagraph_trees()
        trees.MarkStepBox.mark_step_counter = 0
        costs = (timing.Cost(*[timing.Estimate(t)] * 3) for t in itertools.cycle(times))
        with (
            mock.patch.multiple(
                timing,
                WARMUP_SAMPLES=0,
                SAMPLES=1,
                MAX_SAMPLES=1,
                DEVICE_SAMPLES=1,
            ),
            mock.patch.object(timing.Samples, "cost", lambda samples: next(costs)),
        ):
            program = Program(self, None)
            program.run(steps)


# Their tests would run again.
for name in dir(RecordTest):
    if name.startswith("test_"):
        setattr(ProgramTest, name, None)


if __name__ == "__main__":
    run_tests()
