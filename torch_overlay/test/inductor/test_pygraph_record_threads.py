# Owner(s): ["module: inductor"]
"""
Streams and threads: who may record, replay or wait, and what launches follow.

Functions as Inductor writes them are deployed on the modelled device of modelled_cuda.py.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import random
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch._inductor import cudagraph_trees as trees
from torch._inductor.pygraph import report
from torch._inductor.pygraph.capture import allocation
from torch._inductor.pygraph.select import deploy
from torch._inductor.pygraph.trees.manager import state_of
from torch._inductor.pygraph.values import deliver
from torch._inductor.test_case import run_tests
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.modelled_cuda import ModelledStream
from torch.testing._internal.modelled_operators import on_host
from torch.testing._internal.pygraph_functions import (
    Deployed,
    HeldByAutograd,
    new_generation,
    RecordTestCase,
)


if TYPE_CHECKING:
    from collections.abc import Callable


class ThreadsTest(RecordTestCase):
    def streams(self, *raw: int) -> list[ModelledStream]:
        return [ModelledStream(self.device, cuda_stream) for cuda_stream in raw]

    def enqueued(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: self.device.stream.work.append(lambda: compute(*args))

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


instantiate_parametrized_tests(ThreadsTest)


class ThreadsPythonTest(ThreadsTest):
    "Without compiled code."

    compiled = None


if __name__ == "__main__":
    run_tests()
