# Owner(s): ["module: inductor"]
"""
Addresses that reach kernels by way of a graph's first node: compiling it, and, on a device, that
replays compute what they should. What the prelude does to a graph is tested on a modelled one in
test_pygraph_prelude_binding.py.
"""

from __future__ import annotations

import contextlib
import tempfile
import types
import unittest
from pathlib import Path
from unittest import mock

import torch
import torch._dynamo
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.pygraph import report
from torch._inductor.pygraph.graph import prelude
from torch._inductor.pygraph.graph.driver import DriverError
from torch._inductor.pygraph.graph.prelude import CAPACITIES, Prelude, PreludeUnavailable
from torch._inductor.pygraph.select import timing
from torch._inductor.pygraph.select.selection import Selection
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import fresh_cache
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.pygraph_device import DeviceTestCase, MLP, randn


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

try:
    from cuda.bindings import nvjitlink, nvrtc

    HAS_COMPILER = int(nvrtc.nvrtcVersion()[0]) == 0 and bool(nvjitlink.version())
except Exception:
    HAS_COMPILER = False

needs_compiler = unittest.skipUnless(HAS_COMPILER, "requires NVRTC and nvJitLink")

if triton is not None:

    @triton.jit
    def scaled(in_ptr, out_ptr, by, n, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out_ptr + i, tl.load(in_ptr + i, i < n) * by, i < n)


@torch.library.triton_op("test_pygraph_prelude::scale", mutates_args=())
def scale(x: torch.Tensor, by: float) -> torch.Tensor:
    out = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 256),)
    torch.library.wrap_triton(scaled)[grid](x, out, by, x.numel(), BLOCK=256)
    return out


class CompileTest(TestCase):
    def setUp(self):
        super().setUp()
        prelude._kernels.cache_clear()
        self.addCleanup(prelude._kernels.cache_clear)

    @needs_compiler
    @parametrize("architecture", ("sm_80", "sm_90", "sm_100"))
    @parametrize("sets_nodes", (False, True))
    def test_cubin(self, architecture, sets_nodes):
        cubin = prelude.compile_prelude(architecture, sets_nodes=sets_nodes)
        self.assertEqual(cubin[:4], b"\x7fELF")
        for capacity in CAPACITIES:
            self.assertEqual(f"pygraph_prelude_{capacity}\0".encode() in cubin, sets_nodes)
        self.assertEqual(b"cudaGraphKernelNodeSetParam" in cubin, sets_nodes)

    @needs_compiler
    def test_unknown_architecture(self):
        with self.assertRaisesRegex(PreludeUnavailable, "gpu-architecture"):
            prelude.compile_prelude("sm_1", sets_nodes=True)

    def test_parameters_fit(self):
        self.assertLessEqual(32 + 8 * CAPACITIES[-1], 4096)

    @contextlib.contextmanager
    def device(self, load, driver=13000):
        properties = types.SimpleNamespace(major=9, minor=0)
        with (
            tempfile.TemporaryDirectory() as directory,
            mock.patch.object(torch.cuda, "get_device_properties", lambda _: properties),
            mock.patch.object(prelude, "cache_dir", lambda: directory),
            mock.patch.object(prelude, "bindings") as bindings,
            mock.patch.object(prelude, "_load", load),
        ):
            bindings().cuDriverGetVersion.return_value = (0, driver)
            yield Path(directory)

    @needs_compiler
    def test_kept_on_disk(self):
        # assertEqual would look at each byte of a cubin, for seconds.
        with self.device(lambda cubin, sets_nodes: {16: cubin}) as directory:
            first = prelude._kernels(0, True)
            (file,) = directory.rglob("*.cubin")
            self.assertTrue(file.read_bytes() == first[16])
            prelude._kernels.cache_clear()
            with mock.patch.object(prelude, "compile_prelude", side_effect=AssertionError):
                self.assertTrue(prelude._kernels(0, True) == first)
            # The other form is another file.
            prelude._kernels(0, False)
            self.assertEqual(len(list(directory.rglob("*.cubin"))), 2)

    @needs_compiler
    def test_damaged_file(self):
        def load(cubin, sets_nodes):
            if not cubin.startswith(b"\x7fELF"):
                raise DriverError("not an image")
            return {16: cubin}

        with self.device(load) as directory:
            first = prelude._kernels(0, True)
            (file,) = directory.rglob("*.cubin")
            file.write_bytes(b"damaged")
            prelude._kernels.cache_clear()
            self.assertTrue(prelude._kernels(0, True) == first)
            self.assertTrue(file.read_bytes() == first[16])

    def test_old_driver(self):
        with self.device(lambda cubin, sets_nodes: {}, driver=12030):
            with self.assertRaisesRegex(PreludeUnavailable, "no device-side updates"):
                prelude._kernels(0, True)

    @parametrize("error", (ImportError("none"), RuntimeError("none"), OSError("none")))
    def test_no_compiler(self, error):
        with (
            self.device(lambda cubin, sets_nodes: {}),
            mock.patch.object(prelude, "_cache_path", side_effect=error),
            self.assertRaisesRegex(PreludeUnavailable, "none"),
        ):
            prelude._kernels(0, True)

    @needs_compiler
    def test_driver_that_does_not_load_it(self):
        def load(cubin, sets_nodes):
            raise DriverError("CUDA driver: CUDA_ERROR_NO_BINARY_FOR_GPU")

        with self.device(load), self.assertRaisesRegex(PreludeUnavailable, "NO_BINARY"):
            prelude._kernels(0, True)


instantiate_parametrized_tests(CompileTest)


@needs_compiler
class ReplayTest(DeviceTestCase):
    def check(self, fn, make_inputs, force="prelude", **options):
        "The outputs of all calls are kept."
        super().check(fn, make_inputs, keep=True, pygraph_force=force, **options)

    def assertBound(self, functions=1, host=1):
        "All functions replay, and the host sets ``host`` nodes of each."
        self.assertEqual(counters["pygraph"]["bound_by_host"], 0, str(report()))
        self.assertEqual(counters["pygraph"]["unbound"], 0, str(report()))
        self.assertEqual([r.choice for r in report()], ["prelude"] * functions)
        self.assertEqual([r.updated_nodes for r in report()], [host] * functions)
        self.assertEqual(sum(r.copied_bytes for r in report()), 0)

    def test_pointwise(self):
        self.check(
            lambda a, b: (a.sin() + b, a * b), lambda: (randn(1000), randn(1000))
        )
        self.assertBound()
        self.assertEqual(counters["pygraph"]["device_updated_nodes"], 1)

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    @parametrize("size", (64, 4096))
    def test_matmul(self, dtype, size):
        "Triton and vendors' kernels; those of Hopper hold an operand several times."
        weight = randn(size, size, dtype=dtype)
        self.check(
            lambda x: (x @ weight).relu() + x,
            lambda: (randn(size, size, dtype=dtype),),
            calls=4,
        )
        self.assertBound()
        self.assertGreater(counters["pygraph"]["device_updated_nodes"], 0)

    def test_attention(self):
        self.check(
            F.scaled_dot_product_attention,
            lambda: tuple(randn(2, 4, 256, 64, dtype=torch.bfloat16) for _ in range(3)),
        )
        self.assertBound()

    def test_convolution(self):
        conv = torch.nn.Conv2d(16, 32, 3, padding=1).cuda().half()
        self.check(
            lambda x: conv(x).relu(),
            lambda: (randn(4, 16, 32, 32, dtype=torch.float16),),
            exact=False,
        )
        self.assertEqual(counters["pygraph"]["unbound"], 0, str(report()))
        self.assertEqual(counters["pygraph"]["bound_by_host"], 0, str(report()))

    def test_reductions_and_mutation(self):
        def fn(x, total):
            total.add_(x.sum(0))
            return F.layer_norm(x, (512,)), x.argmax(1)

        self.check(fn, lambda: (randn(256, 512), randn(512)), exact=False)
        self.assertBound()

    @parametrize("count", (64, 600))
    def test_many_inputs(self, count):
        "More than one kernel's parameters hold take a second prelude."
        self.check(
            lambda *xs: [x.amax(0) for x in xs],
            lambda: tuple(randn(16, 8) for _ in range(count // 2)),
            calls=4,
        )
        self.assertBound(host=1 if count <= CAPACITIES[-1] else 2)

    def test_offsets_and_views(self):
        def make():
            base = randn(64, 64)
            return base[3:], base.t(), randn(64, 1).expand(64, 64)

        self.check(lambda a, b, c: (a * 2, b + c, a[8:]), make)
        self.assertEqual(counters["pygraph"]["unbound"], 0, str(report()))
        self.assertEqual(counters["pygraph"]["bound_by_host"], 0, str(report()))

    def test_misaligned(self):
        self.check(lambda x: x.sin() + 1, lambda: (randn(1025)[1:],))
        self.assertEqual(counters["pygraph"]["unbound"], 0, str(report()))

    def test_copies_are_set_by_the_host(self):
        with config.patch(fallback_random=True):
            self.check(
                lambda x: (torch.cat([x, x]), x.sin() @ x), lambda: (randn(256, 256),)
            )
        self.assertEqual(counters["pygraph"]["unbound"], 0, str(report()))

    def test_values_on_the_cpu(self):
        compiled = self.compiled(lambda x, s, i: x * s + x[i], pygraph_force="prelude")
        for k in range(8):
            x, s = randn(64, 64), torch.tensor(float(k))
            i = torch.tensor([k, 2 * k])[:1]
            self.assertEqual(compiled(x, s, i), x * k + x[i.cuda()])
        self.assertEqual(counters["pygraph"]["unbound"], 0, str(report()))
        self.assertEqual(counters["pygraph"]["bound_by_host"], 0, str(report()))

    def test_training(self):
        expected, actual = MLP().cuda(), MLP().cuda()
        actual.load_state_dict(expected.state_dict())
        expected_fn = torch.compile(expected)
        actual_fn = self.compiled(actual, pygraph_force="prelude")
        for _ in range(6):
            x = randn(8, 64)
            losses = [f(x).square().mean() for f in (expected_fn, actual_fn)]
            self.assertEqual(*losses)
            for module, loss in zip((expected, actual), losses):
                module.zero_grad(set_to_none=True)
                loss.backward()
            for p, q in zip(expected.parameters(), actual.parameters()):
                self.assertEqual(p.grad, q.grad)
        self.assertEqual(counters["pygraph"]["unbound"], 0, str(report()))
        self.assertEqual(counters["pygraph"]["bound_by_host"], 0, str(report()))

    def test_users_kernel(self):
        "One kernel, called with an input here and an intermediate there."
        self.check(lambda x: scale(scale(x, 2.0) + 1, 3.0), lambda: (randn(1000),))
        self.assertBound()

    def test_replays_that_wait(self):
        "One that is enqueued keeps its addresses when the next call sets its own."
        compiled = self.compiled(lambda x, y: (x @ y).relu() + x, pygraph_force="prelude")
        for _ in range(4):
            x, y = randn(256, 256), randn(256, 256)
            compiled(x, y)
        inputs = [(randn(256, 256), randn(256, 256)) for _ in range(4)]
        expected = [(x @ y).relu() + x for x, y in inputs]
        # Memory for all outputs: having more mapped could wait for the device.
        del x, y
        _ = [torch.empty_like(t) for t in expected * 4]
        del _
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)
        outputs = [compiled(x, y) for x, y in inputs]
        enqueued = torch.cuda.Event()
        enqueued.record()
        self.assertFalse(enqueued.query(), "they ran before all were enqueued")
        for actual, wanted in zip(outputs, expected):
            self.assertEqual(actual, wanted)
        self.assertBound()

    def test_words_in_memory_of_the_host_would_be_seen(self):
        "What the test above is for: they are those of the last call when the graph runs."
        page = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        words = torch.zeros(1, dtype=torch.int64, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            words.copy_(page, non_blocking=True)
        seen = []
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)
        for value in (1, 2):
            page[0] = value
            graph.replay()
            seen.append(words.clone())
        self.assertEqual([int(word) for word in seen], [2, 2])

    @parametrize("pays", (False, True))
    def test_selection(self, pays):
        "A graph of many kernels begins with a prelude."
        costs = iter([timing.Cost(*[timing.Estimate(us)] * 3) for us in (99.0, 50.0)])
        with (
            mock.patch.object(prelude, "PAYS_FROM_KERNELS", 1 if pays else 99),
            mock.patch.object(timing.Samples, "cost", lambda samples: next(costs)),
            # How many calls it takes does not depend on how busy the machine is.
            mock.patch.object(Selection, "has_fixed_samples", True),
        ):
            self.check(MLP().cuda(), lambda: (randn(8, 64),), None, calls=200, exact=False)
        (entry,) = report()
        self.assertEqual(entry.choice, "prelude" if pays else "node_update")
        self.assertEqual(set(entry.timings_us), {"no_graph", entry.choice})
        self.assertEqual(counters["pygraph"]["bound_by_host"], 0)

    def test_node_that_refuses(self):
        refused = []

        def refuse(node):
            refused.append(node)
            raise DriverError("refused")

        weight = randn(64, 64)
        with mock.patch.object(prelude, "_make_updatable", refuse):
            self.check(lambda x: (x @ weight).relu() + x, lambda: (randn(64, 64),))
        self.assertGreater(len(refused), 0)
        self.assertEqual(counters["pygraph"]["unbound"], 0, str(report()))
        self.assertEqual([r.choice for r in report()], ["node_update"])

    def test_no_compiler(self):
        with (
            fresh_cache(),
            mock.patch.object(prelude, "compile_prelude", side_effect=RuntimeError("none")),
        ):
            prelude._kernels.cache_clear()
            self.check(lambda x: x.sin(), lambda: (randn(64),))
        (entry,) = report()
        self.assertEqual(entry.choice, "node_update")
        self.assertIn("none", entry.reason)
        self.assertEqual(counters["pygraph"]["unbound"], 0)

    def test_wrong_write_is_not_proven(self):
        "The host sets the nodes of the next recording."
        original = Prelude._add_nodes

        def add_nodes(self, kernels, placeholders, writes):
            writes = [w._replace(delta=w.delta + 64) for w in writes]
            original(self, kernels, placeholders, writes)

        # Nothing lies within 64 bytes behind these tensors.
        with mock.patch.object(Prelude, "_add_nodes", add_nodes):
            self.check(lambda x: x.sin().amax(0), lambda: (randn(1000, 8),))
        (entry,) = report()
        self.assertEqual(entry.choice, "node_update")
        self.assertEqual(counters["pygraph"]["bound_by_host"], 1)
        self.assertEqual(counters["pygraph"]["unbound"], 0)


instantiate_parametrized_tests(ReplayTest)


if __name__ == "__main__":
    run_tests()
