# Owner(s): ["module: inductor"]
"""
CPU values in graphs on a device: results are eager mode's in every call.
"""

from __future__ import annotations

import threading
import unittest
from typing import Any
from unittest import mock

import numpy as np

import torch
from torch._dynamo.utils import counters
from torch._inductor.pygraph import report
from torch._inductor.pygraph.compile import placement
from torch._inductor.pygraph.values import deliver
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.pygraph_device import DeviceTestCase, FORCED
from torch.testing._internal.pygraph_values import cpu, cuda, PROGRAMS
from torch.utils import _pytree as pytree


def aliases(inputs: Any, outputs: Any) -> list[tuple[int, ...]]:
    "For each output, which inputs and outputs share its storage."
    storages = [
        t.untyped_storage().data_ptr() if isinstance(t, torch.Tensor) else None
        for t in (*pytree.tree_leaves(inputs), *outputs)
    ]
    return [
        tuple(i for i, s in enumerate(storages) if s == t.untyped_storage().data_ptr())
        for t in outputs
    ]


class DeviceTest(DeviceTestCase):
    """Results are eager's, in every call."""

    CALLS = 12

    def setUp(self):
        super().setUp()
        np.random.seed(0)

    def check_call(self, fn, compiled, inputs):
        copies = pytree.tree_map_only(torch.Tensor, torch.clone, inputs)
        expected, actual = fn(*copies), compiled(*inputs)
        if isinstance(expected, torch.Tensor):
            expected, actual = (expected,), (actual,)
        for e, a in zip(expected, actual, strict=True):
            self.assertEqual((a.dtype, a.device), (e.dtype, e.device))
            self.assertEqual((a.shape, a.stride()), (e.shape, e.stride()))
        self.assertEqual(actual, expected, atol=1e-4, rtol=1e-4)
        self.assertEqual(inputs, copies, atol=1e-5, rtol=1e-5)
        self.assertEqual(aliases(inputs, actual), aliases(copies, expected))

    def recorded(self):
        return [r for r in report() if r.kernel_nodes]

    def check_program(self, name, options, calls):
        program = PROGRAMS[name]
        compiled = torch.compile(program.fn, options=options, dynamic=program.dynamic)
        with torch.no_grad():
            for _ in range(calls):
                self.check_call(program.fn, compiled, program.inputs())
        self.assertEqual(counters["inductor"]["cudagraph_skips"], 0)
        return program

    @parametrize("name", list(PROGRAMS))
    def test_program(self, name):
        program = self.check_program(name, FORCED, self.CALLS)
        self.assertEqual(len(self.recorded()), program.partitions, str(report()))
        self.assertEqual([r.copied_bytes for r in report()], [0] * len(report()))

    @parametrize("name", ("dtypes", "long_chain", "scalar_mutated", "copy_returned"))
    def test_copied(self, name):
        "Graphs that are replayed as they are read the values from memory."
        self.check_program(name, {**FORCED, "pygraph_force": "copy"}, self.CALLS)

    @parametrize("name", ("dtypes", "long_chain", "scalar_mutated", "copy_returned"))
    def test_selected(self, name):
        # As many as it takes to choose, as a rule; see select.py.
        self.check_program(name, {"pygraph": True}, 60)

    @parametrize("force", ("node_update", "copy"))
    def test_floats(self, force):
        fn = lambda x, s, t: x * s + t  # noqa: E731
        compiled = torch.compile(fn, options={**FORCED, "pygraph_force": force})
        for n in range(1, self.CALLS):
            self.check_call(fn, compiled, (cuda(30, 30), n + 0.5, n / 7))
        self.assertEqual({r.choice for r in report()}, {force}, str(report()))

    def test_all_dtypes(self):
        dtypes = (
            torch.bool,
            torch.uint8,
            torch.int8,
            torch.int16,
            torch.int32,
            torch.int64,
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
        )

        def fn(x, scalars):
            return tuple(x + s for s in scalars)

        compiled = torch.compile(fn, options=FORCED)
        for _ in range(self.CALLS):
            scalars = [cpu(dtype=dtype) for dtype in dtypes]
            x = cuda(8, dtype=torch.int32)
            self.check_call(fn, compiled, (x, scalars))
        self.assertEqual(len(self.recorded()), 1)

    def test_many_values(self):
        def fn(x, scalars):
            for s in scalars:
                x = x * 0.5 + s
            return x

        compiled = torch.compile(fn, options=FORCED)
        for _ in range(4):
            self.check_call(fn, compiled, (cuda(8), [cpu() for _ in range(300)]))

    # What is uploaded is small here: the host must not be busy for as long as the device is.
    @mock.patch.object(placement, "MAX_STAGED_BYTES", 4096)
    def test_the_host_runs_ahead(self):
        "Values of later calls are there before the first call's kernels run."

        def fn(x, s, v, w):
            return x * s + v.to("cuda") + w.to("cuda").sum()

        compiled = torch.compile(fn, options=FORCED)
        x = cuda(300, 3)
        v, w = cpu(300, 3), cpu(2048)
        for i in range(4):
            self.check_call(fn, compiled, (x, cpu(), v, w))
        self.assertEqual(counters["pygraph"]["staged_tensors"], 1)
        self.assertEqual(counters["pygraph"]["uploaded_tensors"], 1)
        calls = 8
        # Allocating pinned memory might wait for the device.
        pinned = [torch.empty(t.shape, pin_memory=True) for t in (v, w) * 2 * calls]
        del pinned
        torch.cuda.synchronize()
        torch.cuda._sleep(1 << 30)  # half a second
        done = torch.cuda.Event()
        done.record()
        actual = []
        for i in range(calls):
            s = torch.tensor(float(i))
            v.fill_(i)
            w.fill_(i)
            actual.append(compiled(x, s, v, w))
            s.fill_(-1)
            v.fill_(-1)
            w.fill_(-1)
        # Or the calls waited for the device.
        self.assertFalse(done.query())
        expected = [x * i + i + float(i * w.numel()) for i in range(calls)]
        self.assertEqual(actual, expected, atol=1e-3, rtol=1e-5)

    def test_what_did_not_change_is_not_copied(self):
        table = cpu(100, 100)
        fn = lambda x: x + table.to("cuda")  # noqa: E731
        compiled = torch.compile(fn, options=FORCED)
        put = deliver._Staged.put
        with mock.patch.object(
            deliver._Staged, "put", autospec=True, side_effect=put
        ) as copies:
            for _ in range(5):
                self.check_call(fn, compiled, (cuda(100, 100),))
            self.assertEqual(copies.call_count, 1)
            table.numpy()[3, 4] = 17
            self.check_call(fn, compiled, (cuda(100, 100),))
            self.assertEqual(copies.call_count, 2)

    @parametrize("numel", (200, 4000, 40_000))
    def test_what_changes_in_every_call(self, numel):
        "Also while the device is behind, so that pinned memory is still to be read."
        fn = lambda x, v: x + v.to("cuda")  # noqa: E731
        compiled = torch.compile(fn, options=FORCED)
        x, v = cuda(numel), cpu(numel)
        for _ in range(4):
            self.check_call(fn, compiled, (x, v))
        for sleep in (0, 1 << 26, 0):
            torch.cuda._sleep(sleep)
            actual = []
            for i in range(40):
                v.numpy()[:] = i
                actual.append(compiled(x, v))
            self.assertEqual(actual, [x + i for i in range(40)])

    def test_module_attributes(self):
        class Module(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = np.float32(2.0)
                self.shift = torch.tensor(1.0)
                self.table = cpu(32, 32)
                self.register_buffer("positions", torch.arange(32))
                self.linear = torch.nn.Linear(32, 32, device="cuda")

            def forward(self, x):
                x = self.linear(x) * self.scale + self.shift
                return (x @ self.table.to("cuda"))[self.positions]

        module = Module()
        compiled = torch.compile(module, options=FORCED)
        with torch.no_grad():
            for i in range(self.CALLS):
                module.scale = np.float32(i)
                module.shift = torch.tensor(float(i))
                if i % 3 == 0:
                    module.table = cpu(32, 32)
                if i % 4 == 0:
                    module.positions.copy_(torch.randperm(32))
                self.check_call(module, compiled, (cuda(32, 32),))
        self.assertEqual(len(self.recorded()), 1)

    def test_python_floats(self):
        fn = lambda x, by: x * by + 1  # noqa: E731
        compiled = torch.compile(fn, options=FORCED)
        for i in range(self.CALLS):
            self.check_call(fn, compiled, (cuda(8, 8), i + 0.5))
        self.assertEqual(counters["stats"]["unique_graphs"], 2)

    @parametrize("force", ("node_update", "copy"))
    def test_items(self, force):
        fn = lambda x, s, t: (x * s.item() + t.item(), x / s.item())  # noqa: E731
        compiled = torch.compile(fn, options={**FORCED, "pygraph_force": force})
        s, t = cpu(dtype=torch.float64), cpu()
        for n in range(1, self.CALLS):
            s.fill_(n + 0.5)
            t.fill_(n / 7)
            self.check_call(fn, compiled, (cuda(30, 30), s, t))
        self.assertEqual(counters["stats"]["unique_graphs"], 1)
        self.assertEqual(counters["graph_break"], {})

    def test_training(self):
        def fn(x, weight, v, s):
            return ((x @ weight) * v.to("cuda") * s).sin().sum()

        compiled = torch.compile(fn, options=FORCED)
        weight = cuda(32, 32).requires_grad_()
        for _ in range(self.CALLS):
            s = cpu().requires_grad_()
            x, v = cuda(32, 32), cpu(32, 32)
            with torch.random.fork_rng():
                grads = torch.autograd.grad(compiled(x, weight, v, s), (weight, s))
            expected = torch.autograd.grad(fn(x, weight, v, s), (weight, s))
            self.assertEqual([g.device for g in grads], [g.device for g in expected])
            self.assertEqual(grads, expected, atol=1e-3, rtol=1e-3)
            del grads

    def test_streams(self):
        fn = lambda x, s, v: x * s + v.to("cuda")  # noqa: E731
        compiled = torch.compile(fn, options=FORCED)
        streams = [torch.cuda.Stream() for _ in range(2)]
        v = cpu(30, 30)
        for i in range(8):
            with torch.cuda.stream(streams[i % 2]):
                self.check_call(fn, compiled, (cuda(30, 30), cpu(), v))
            torch.cuda.synchronize()

    def test_threads(self):
        fn = lambda x, s: x * s  # noqa: E731
        compiled = torch.compile(fn, options=FORCED)
        self.check_call(fn, compiled, (cuda(64), cpu()))
        failures = []

        def run(value):
            try:
                x, s = torch.ones(64, device="cuda"), torch.tensor(value)
                for _ in range(50):
                    if not bool((compiled(x, s) == value).all()):
                        failures.append(value)
            except Exception as e:
                failures.append(e)

        threads = [threading.Thread(target=run, args=(float(i),)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])

    @unittest.skipIf(torch.cuda.device_count() < 2, "requires two GPUs")
    def test_other_device(self):
        fn = lambda x, s, v: x * s + v.to(x.device)  # noqa: E731
        compiled = torch.compile(fn, options=FORCED)
        for _ in range(self.CALLS):
            x = cuda(30, 30).to("cuda:1")
            self.check_call(fn, compiled, (x, cpu(), cpu(30, 30)))


instantiate_parametrized_tests(DeviceTest)


if __name__ == "__main__":
    run_tests()
