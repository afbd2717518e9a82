# Owner(s): ["module: inductor"]
"""
Whole programs on a device: what is selected for them, their streams, threads, shapes and devices.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import traceback
import unittest
from pathlib import Path
from unittest import mock

import torch
import torch._dynamo
import torch._inductor.cudagraph_trees as trees
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.pygraph import report, reset_report
from torch._inductor.pygraph.graph.memory import segments_of
from torch._inductor.pygraph.select import timing
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.pygraph_device import (
    DEVICE,
    DeviceTestCase,
    MLP,
    MOST_CALLS,
    randn,
)


class SelectionTest(DeviceTestCase):
    def run_until_decided(self, compiled, make_inputs, expected_fn):
        for _ in range(MOST_CALLS):
            inputs = make_inputs()
            self.assertEqual(compiled(*inputs), expected_fn(*inputs))
        (entry,) = report()
        return entry

    def test_device_bound_function_is_not_recorded(self):
        before = self.recordings()
        cost = timing.Cost(*map(timing.Estimate, (1000.0, 10.0, 1000.0)))
        with mock.patch.object(timing.Samples, "cost", lambda self: cost):
            entry = self.run_until_decided(
                torch.compile(lambda x: x.sin() + 1, options={"pygraph": True}),
                lambda: (randn(64),),
                lambda x: x.sin() + 1,
            )
        self.assertEqual(entry.choice, "no_graph")
        self.assertEqual(self.recordings() - before, 1)

    def test_both_are_timed(self):
        module = MLP(layers=20).to(DEVICE)
        with torch.no_grad():
            entry = self.run_until_decided(
                torch.compile(module, options={"pygraph": True}),
                lambda: (randn(8, 64),),
                torch.compile(lambda x: module(x)),
            )
        self.assertEqual(set(entry.timings_us), {"no_graph", "node_update"}, str(entry))

    @parametrize("graph_wins", (False, True))
    def test_choice_follows_the_times(self, graph_wins):
        graph = (60.0, 20.0, 9.0) if graph_wins else (99.0, 49.5, 10.0)
        costs = iter(
            [
                timing.Cost(*map(timing.Estimate, times))
                for times in ((100.0, 50.0, 10.0), graph, graph, (100.0, 50.0, 10.0))
            ]
        )
        with mock.patch.object(timing.Samples, "cost", lambda self: next(costs)):
            entry = self.run_until_decided(
                torch.compile(lambda x: x * 2, options={"pygraph": True}),
                lambda: (randn(64),),
                lambda x: x * 2,
            )
        self.assertEqual(entry.choice, "node_update" if graph_wins else "no_graph")

    def test_graph_that_lost_gives_its_memory_back(self):
        losing = iter([timing.Cost(*[timing.Estimate(us)] * 3) for us in (9.0, 99.0, 99.0, 9.0)])
        compiled = torch.compile(lambda x: x * 2, options={"pygraph": True})
        x = randn(1 << 26)
        with mock.patch.object(timing.Samples, "cost", lambda self: next(losing)):
            for _ in range(MOST_CALLS):
                y = compiled(x)
        manager = trees.get_manager(x.device.index)
        self.assertEqual(segments_of(manager.cuda_graphs_thread_pool), [])
        del y
        torch.cuda.empty_cache()
        self.assertLess(torch.cuda.memory_reserved(), 2 * x.nbytes)

    def test_mutation_is_applied_once_while_selecting(self):
        compiled = torch.compile(lambda x: x.add_(1).sum(), options={"pygraph": True})
        x = torch.zeros(64, device=DEVICE)
        for i in range(MOST_CALLS):
            compiled(x)
            self.assertEqual(x, torch.full_like(x, i + 1))

    def test_dynamic_shapes(self):
        compiled = torch.compile(
            lambda x: x.sin() + x.shape[0], options={"pygraph": True}, dynamic=True
        )
        for size in (8, 16, 24) * MOST_CALLS:
            x = randn(size, 4)
            self.assertEqual(compiled(x), x.sin() + size)
        self.assertEqual(len(report()), 3)
        self.assertNotIn("undecided", [r.choice for r in report()])

    @parametrize("force", ("no_graph", "copy", "node_update"))
    def test_forced(self, force):
        self.check(
            lambda a, b: a @ b + 1,
            lambda: (randn(32, 32), randn(32, 32)),
            pygraph_force=force,
        )
        (entry,) = report()
        self.assertEqual(entry.choice, force)

    def test_training_while_selecting(self):
        module = MLP(dropout=0.2, norm=True).to(DEVICE)
        twin = MLP(dropout=0.2, norm=True).to(DEVICE)
        twin.load_state_dict(module.state_dict())
        results = []
        for m, options in ((twin, None), (module, {"pygraph": True})):
            torch._dynamo.reset()
            compiled = torch.compile(m, options=options)
            opt = torch.optim.SGD(m.parameters(), lr=0.1)
            torch.manual_seed(5)
            losses = []
            for _ in range(80):
                loss = compiled(randn(16, 64)).square().mean()
                loss.backward()
                opt.step()
                opt.zero_grad()
                losses.append(loss.detach().clone())
            results.append(losses)
        self.assertEqual(results[0], results[1])


instantiate_parametrized_tests(SelectionTest)


@unittest.skipIf(torch.cuda.device_count() < 2, "requires two GPUs")
class TwoDevicesTest(DeviceTestCase):
    """
    Graphs on one GPU in a process that uses two. test_pygraph_values.py has one with values on
    the CPU.
    """

    def on(self, index, *size):
        return torch.randn(*size, device=f"cuda:{index}")

    def test_device_that_is_not_current(self):
        weight = self.on(1, 64, 64)
        self.check(
            lambda x, y: (x @ weight).relu() + y,
            lambda: (self.on(1, 64, 64), self.on(1, 64)),
        )
        self.assertBound()

    def test_in_turns(self):
        "A function of each device, and calls of other functions on both in between."
        compiled = [self.compiled(lambda x, i=i: x.sin() + i) for i in range(2)]
        kept = []
        for i in range(20):
            x = self.on(i % 2, 1000)
            y = compiled[i % 2](x)
            self.assertEqual(y.device, x.device)
            kept.append((y, x.sin() + i % 2))
            self.on(1 - i % 2, 1000).mul_(2)
        for actual, expected in kept:
            self.assertEqual(actual, expected)
        self.assertBound(functions=2)

    def test_current_device_changes(self):
        compiled = self.compiled(lambda x: x.sin() + 1)
        for i in range(12):
            x = self.on(1, 1000)
            with torch.cuda.device(i % 2):
                y = compiled(x)
                self.assertEqual(torch.cuda.current_device(), i % 2)
            self.assertEqual(y, x.sin() + 1)

    def test_selection(self):
        compiled = torch.compile(lambda x: x.sin() + 1, options={"pygraph": True})
        for _ in range(MOST_CALLS):
            x = self.on(1, 1000)
            self.assertEqual(compiled(x), x.sin() + 1)
        self.assertNotIn("undecided", [r.choice for r in report()])

    def test_training(self):
        modules = [MLP().to("cuda:1") for _ in range(2)]
        modules[1].load_state_dict(modules[0].state_dict())
        fns = torch.compile(modules[0]), self.compiled(modules[1])
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in modules]
        for _ in range(8):
            x = self.on(1, 16, 64)
            losses = []
            for fn, optimizer in zip(fns, optimizers):
                loss = fn(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            self.assertEqual(*losses)
        for a, b in zip(*(m.parameters() for m in modules)):
            self.assertEqual(a, b)

    def test_function_of_both(self):
        self.check(
            lambda x, y: (x.sin() + 1, y.cos(), x + y.to(x.device)),
            lambda: (self.on(0, 64), self.on(1, 64)),
            exact=False,
        )


class ProgramTest(DeviceTestCase):
    def test_flag_off_records_stock_nodes(self):
        compiled = torch.compile(lambda x: x + 1, options={"triton.cudagraphs": True})
        for _ in range(4):
            compiled(randn(64))
        manager = trees.get_manager(torch.cuda.current_device())
        self.assertEqual({type(n) for n in manager.get_roots()}, {trees.CUDAGraphNode})
        self.assertEqual(len(report()), 0)

    def test_dynamic_shapes(self):
        self.check(
            lambda x, y: x @ y,
            iter(
                [(randn(n, 8), randn(8, n)) for n in (4, 5, 6, 4, 5, 6, 4, 5, 6, 7)]
            ).__next__,
            calls=10,
            exact=False,
        )
        self.assertEqual(counters["pygraph"]["unsteady_recordings"], 0)

    def test_other_stream(self):
        compiled = self.compiled(lambda x: x.sin() + 1)
        stream = torch.cuda.Stream()
        for i in range(8):
            x = randn(1 << 16)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream if i % 2 else torch.cuda.current_stream()):
                y = compiled(x)
                self.assertEqual(y, x.sin() + 1)
            torch.cuda.synchronize()

    def test_two_streams_at_once(self):
        "Graphs have the same memory for what they compute in between."

        def sines(x, w):
            for _ in range(16):
                x = (x @ w).sin()
            return x

        def cosines(x, w):
            for _ in range(16):
                x = (x @ w).cos()
            return x

        plain = sines, cosines
        compiled = [self.compiled(fn) for fn in plain]
        streams = [torch.cuda.Stream() for _ in plain]
        with torch.no_grad():
            w = randn(256, 256) / 16
            for fn in compiled:
                for _ in range(4):
                    fn(randn(256, 256), w)
            calls = []
            for _ in range(20):
                xs = [randn(256, 256) for _ in plain]
                for stream in streams:
                    stream.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(stream):
                        # Both begin when both are queued.
                        torch.cuda._sleep(10_000_000)
                for fn, x, stream in zip(compiled, xs, streams):
                    with torch.cuda.stream(stream):
                        calls.append((x, fn(x, w)))
            torch.cuda.synchronize()
            for i, (x, out) in enumerate(calls):
                self.assertEqual(out, plain[i % 2](x, w), atol=1e-3, rtol=1e-3)
        self.assertBound(functions=2)

    def test_back_to_back_replays(self):
        "A replay in flight keeps the pointers it was launched with."
        compiled = self.compiled(lambda x: x + 1)
        for _ in range(3):
            compiled(randn(1 << 22))
        xs = [torch.full((1 << 22,), float(i), device=DEVICE) for i in range(16)]
        results = []
        torch.cuda._sleep(200_000_000)
        for x in xs:
            torch.compiler.cudagraph_mark_step_begin()
            results.append(compiled(x).clone())
        self.assertEqual([r[0].item() for r in results], [i + 1.0 for i in range(16)])

    def test_captured_by_the_program(self):
        "A graph of the program's own holds the kernels, not a replay."
        compiled = self.compiled(lambda x: x.sin() + 1)
        x = randn(64)
        for _ in range(5):
            compiled(randn(64))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = compiled(x)
        for _ in range(3):
            compiled(randn(64))
            x.copy_(randn(64))
            graph.replay()
            self.assertEqual(y, x.sin() + 1)

    def test_threads(self):
        errors = []

        shared = self.compiled(lambda x, seed: x.sin() * 2 + seed)

        def work(seed):
            generator = torch.Generator(DEVICE).manual_seed(seed)
            for _ in range(50):
                x = torch.randn(256, device=DEVICE, generator=generator)
                y = shared(x, seed)
                if not torch.equal(y, x.sin() * 2 + seed):
                    errors.append(seed)

        def guarded(seed):
            try:
                work(seed)
            except Exception:
                errors.append(traceback.format_exc())

        guarded(0)
        threads = [threading.Thread(target=guarded, args=(0,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        guarded(0)
        for thread in threads:
            thread.join()
        self.assertEqual(errors, [])

    def test_graph_cache(self):
        "A cache hit skips code generation; what replay needs comes with the graph."
        from torch._inductor.utils import fresh_cache

        fn_source = lambda x, y: (x @ y).relu()  # noqa: E731
        with fresh_cache(), config.patch(fx_graph_cache=True):
            for attempt in range(2):
                torch._dynamo.reset()
                counters.clear()
                reset_report()
                compiled = self.compiled(fn_source)
                for _ in range(4):
                    x, y = randn(32, 32), randn(32, 32)
                    self.assertEqual(compiled(x, y), fn_source(x, y))
                self.assertBound()
            self.assertGreaterEqual(counters["inductor"]["fxgraph_cache_hit"], 1)

    def test_environment_flag(self):
        with config.patch(pygraph=True, pygraph_force="node_update"):
            compiled = torch.compile(lambda x: x + 1)
            for _ in range(4):
                x = randn(64)
                self.assertEqual(compiled(x), x + 1)
        self.assertBound()

    def test_no_grad_and_inference_mode(self):
        compiled = self.compiled(lambda x: x.sin() + 1)
        for context in (torch.no_grad, torch.inference_mode) * 3:
            with context():
                x = randn(64)
                self.assertEqual(compiled(x), x.sin() + 1)

    def test_functions_are_freed(self):
        compiled = self.compiled(lambda x: x + 1)
        for _ in range(4):
            compiled(randn(64))
        del compiled
        torch._dynamo.reset()
        gc.collect()
        self.assertIsNone(trees.get_container(0).tree_manager)


class MendedProgramsTest(DeviceTestCase):
    # Each test starts a process, which makes the GPU the default device of all tensors.
    @parametrize("force", ("", "node_update"))
    @parametrize("seed", range(200_000, 200_040, 4))
    def test_random_programs(self, force, seed):
        script = Path(__file__).with_name("test_pygraph_mend.py")
        command = [sys.executable, str(script), "--programs", "4", "--seed", str(seed), "--device", DEVICE]
        environment = {**os.environ, **({"TORCHINDUCTOR_PYGRAPH_FORCE": force} if force else {})}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, f"{done.stdout}\n{done.stderr}")
        self.assertIn("'programs': 4", done.stdout)


instantiate_parametrized_tests(MendedProgramsTest)


if __name__ == "__main__":
    run_tests()
