# Owner(s): ["module: inductor"]
"""
PyGraph on a device: results, aliasing and mutation are those of torch.compile without
CUDA graphs, on inputs that change with every call. Each trap has a test that fails on a
build without its handling.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import traceback
import unittest
from unittest import mock

import torch
import torch._dynamo
import torch._inductor.cudagraph_trees as trees
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.pygraph import native, report, reset_report
from torch._inductor.pygraph.graph import binding
from torch._inductor.pygraph.graph.memory import segments_of
from torch._inductor.pygraph.select import deploy, timing
from torch._inductor.pygraph.types.reason import Code, Reason, RefusedError
from torch._inductor.pygraph.verify.diagnose import Verdict
from torch._inductor.test_case import run_tests, TestCase
from torch.nn.attention import sdpa_kernel, SDPBackend
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import HAS_CUDA_AND_TRITON


FORCED = {"pygraph": True, "pygraph_force": "node_update"}
DEVICE = "cuda"
# More than it takes to choose.
MOST_CALLS = 440


def randn(*size, **kwargs):
    return torch.randn(*size, device=DEVICE, **kwargs)


class MLP(torch.nn.Module):
    def __init__(self, dim=64, layers=3, dropout=0.0, norm=False):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(dim, dim) for _ in range(layers)
        )
        self.norm = torch.nn.BatchNorm1d(dim) if norm else torch.nn.Identity()
        self.dropout = dropout

    def forward(self, x):
        for layer in self.layers:
            x = F.gelu(layer(self.norm(x)))
        return F.dropout(x, self.dropout, self.training)


@unittest.skipUnless(HAS_CUDA_AND_TRITON, "requires CUDA and Triton")
class PyGraphTestCase(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        torch.manual_seed(0)
        counters.clear()
        reset_report()

    def tearDown(self):
        super().tearDown()
        torch._dynamo.reset()
        gc.collect()

    def recordings(self):
        "Graphs recorded on the current device so far, and this call's own id."
        manager = trees.get_manager(torch.cuda.current_device())
        return manager.new_graph_id().id

    def compiled(self, fn, **options):
        return torch.compile(fn, options={**FORCED, **options})

    def check(self, fn, make_inputs, calls=6, exact=True, keep=False, **options):
        """
        Compares fn compiled with PyGraph and without CUDA graphs: outputs, and inputs
        afterwards, on fresh inputs for each call; with ``keep``, when all calls are done.
        Returns PyGraph's compiled function.
        """
        expected_fn = torch.compile(lambda *args: fn(*args))
        actual_fn = self.compiled(fn, **options)
        tolerance = {"atol": 0, "rtol": 0} if exact else {}
        pairs = []
        with torch.no_grad():
            for i in range(calls):
                inputs = make_inputs()
                copies = [
                    i.clone() if isinstance(i, torch.Tensor) else i for i in inputs
                ]
                expected = expected_fn(*copies)
                pairs += (actual_fn(*inputs), expected), (list(inputs), copies)
                del expected
                if not keep or i == calls - 1:
                    for actual, expected in pairs:
                        self.assertEqual(actual, expected, **tolerance)
                    pairs.clear()
                    del actual, expected
        return actual_fn

    def assertBound(self, functions=1):
        "Every recorded function replays with no input copied."
        self.assertEqual(counters["pygraph"]["unbound"], 0, str(report()))
        self.assertEqual([r.copied_bytes for r in report()], [0] * len(report()))
        self.assertEqual(len([r for r in report() if r.updated_nodes]), functions)


class BindingTest(PyGraphTestCase):
    def test_pointwise(self):
        self.check(
            lambda a, b: (a.sin() + b, a * b), lambda: (randn(1000), randn(1000))
        )
        self.assertBound()
        (entry,) = report()
        self.assertEqual(entry.external_inputs, 2)
        self.assertEqual(entry.stock_copied_bytes, 8000)

    @parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
    @parametrize("size", (64, 1024))
    def test_matmul(self, dtype, size):
        weight = randn(size, size, dtype=dtype)
        self.check(
            lambda x: (x @ weight).relu(), lambda: (randn(size, size, dtype=dtype),)
        )
        self.assertBound()

    def test_tma_descriptors(self):
        "cuBLAS's Hopper kernels hold an operand several times, in descriptors too."
        module = MLP(4096, 2).to(DEVICE).bfloat16()
        self.check(module, lambda: (randn(4096, 4096, dtype=torch.bfloat16),))
        self.assertBound()

    @parametrize("dtype", (torch.bfloat16, torch.float32))
    def test_attention(self, dtype):
        self.check(
            F.scaled_dot_product_attention,
            lambda: tuple(randn(2, 4, 256, 64, dtype=dtype) for _ in range(3)),
        )
        self.assertBound()

    @parametrize("padding", (0, 1))
    @parametrize("dtype", (torch.float32, torch.float16))
    def test_convolution(self, padding, dtype):
        conv = torch.nn.Conv2d(16, 32, 3, padding=padding).to(DEVICE, dtype)
        self.check(
            lambda x: conv(x).relu(),
            lambda: (randn(4, 16, 32, 32, dtype=dtype),),
            exact=False,
        )
        self.assertBound()

    def test_embedding_and_index(self):
        table = randn(1000, 32)

        def fn(tokens, positions):
            return F.embedding(tokens, table) + table[positions], tokens + 1

        self.check(
            fn,
            lambda: (
                torch.randint(0, 1000, (8, 16), device=DEVICE),
                torch.randint(0, 1000, (8, 16), device=DEVICE, dtype=torch.int32),
            ),
        )
        self.assertBound()

    def test_sort_topk(self):
        self.check(
            lambda x: (x.sort(0)[0], x.topk(5)[0]),
            lambda: (randn(512, 16),),
            exact=False,
        )
        self.assertBound()

    def test_memcpy_node(self):
        def fn(x):
            return x.clone(), torch.cat([x, x])

        with config.patch(fallback_random=True):
            self.check(fn, lambda: (randn(1 << 16),))
        self.assertBound()

    def test_empty_input(self):
        self.check(lambda x, y: (x + 1, y * 2), lambda: (randn(0, 8), randn(16)))

    def test_strides(self):
        "Transposed, expanded, padded and overlapping inputs keep their layout."
        self.check(
            lambda a, b, c: a + b + c,
            lambda: (randn(8, 8).t(), randn(8, 1).expand(8, 8), randn(8, 16)[:, :8]),
        )
        self.assertBound()

    def test_inputs_alias_each_other(self):
        compiled = self.compiled(lambda a, b: a * 2 + b)
        for _ in range(5):
            base = randn(64, 64)
            self.assertEqual(compiled(base, base.t()), base * 2 + base.t())
        self.assertBound()

    def test_many_inputs(self):
        self.check(
            lambda *xs: sum(xs[1:], xs[0]) * 2,
            lambda: tuple(randn(128) for _ in range(64)),
        )
        self.assertBound()

    def test_input_no_kernel_reads(self):
        compiled = self.compiled(lambda x, y: x * y.shape[0])
        for _ in range(4):
            x = randn(32)
            self.assertEqual(compiled(x, randn(7)), x * 7)

    @mock.patch.object(native, "compiled", None)
    def test_same_pointers_need_no_update(self):
        "By compiled code too; test_pygraph_replay.py has it."
        compiled = self.compiled(lambda x: x + 1)
        x = randn(32)
        for _ in range(3):
            compiled(x)
        with mock.patch(
            "torch._inductor.pygraph.graph.binding.NodeUpdateBinding.update"
        ) as update:
            x.fill_(3)
            # The output takes the memory that the last one left.
            self.assertEqual(compiled(x), torch.full_like(x, 4))
        update.assert_not_called()

    def test_replay_does_not_copy(self):
        from torch.profiler import profile, ProfilerActivity

        compiled = self.compiled(lambda x: x + 1)
        for _ in range(4):
            compiled(randn(1 << 20))
        inputs = [randn(1 << 20) for _ in range(3)]
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as prof:
            for x in inputs:
                compiled(x)
            torch.cuda.synchronize()
        names = [e.name for e in prof.events() if e.device_type.name == "CUDA"]
        self.assertFalse([n for n in names if "copy" in n.lower()], str(names))

    def test_placeholders_cost_no_memory(self):
        from torch._inductor.pygraph.graph.placeholder import arena, NAN

        compiled = self.compiled(lambda x: x.sum())
        compiled(randn(1 << 26))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        x = randn(1 << 26)
        before = torch.cuda.memory_reserved()
        compiled(x)
        torch.cuda.empty_cache()
        self.assertLess(torch.cuda.memory_reserved() - before, 64 << 20)
        self.assertGreater(arena(x.device.index, NAN).nbytes, x.nbytes)
        self.assertBound()

    def test_stream_of_graphs_has_no_segment_of_its_own(self):
        "What replays read of a generator's state is where other tensors are."
        self.check(lambda x: x + 1, lambda: (randn(64),))
        stream = trees.get_manager(torch.cuda.current_device()).stream.cuda_stream
        torch.cuda.empty_cache()
        segments = torch.cuda.memory_snapshot()
        pools = [s["segment_pool_id"] for s in segments if s["stream"] == stream]
        self.assertNotIn((0, 0), [tuple(pool) for pool in pools])


instantiate_parametrized_tests(BindingTest)


class AliasTest(PyGraphTestCase):
    def test_output_is_input(self):
        compiled = self.compiled(lambda x: (x, x + 1))
        for _ in range(5):
            x = randn(32)
            same, more = compiled(x)
            self.assertEqual(same.data_ptr(), x.data_ptr())
            self.assertEqual(more, x + 1)
            same.add_(1)
            self.assertEqual(same, x)

    def test_output_is_view_of_input(self):
        compiled = self.compiled(lambda x: (x[2:].view(torch.int32), x.t(), x * 2))
        for _ in range(5):
            x = randn(32, 4)
            bits, transposed, double = compiled(x)
            self.assertEqual(bits, x[2:].view(torch.int32))
            self.assertEqual(bits.data_ptr(), x[2:].data_ptr())
            self.assertEqual(transposed, x.t())
            self.assertEqual(double, x * 2)

    def test_offset_input(self):
        compiled = self.compiled(lambda x: (x.view(-1)[4:], x.sin()))
        for _ in range(5):
            x = randn(64, 4)[16:]
            tail, sin = compiled(x)
            self.assertEqual(tail.data_ptr(), x.view(-1)[4:].data_ptr())
            self.assertEqual(tail, x.view(-1)[4:])
            self.assertEqual(sin, x.sin())

    def test_output_of_last_generation_is_input(self):
        "It lies where the graph writes: y = f(y) must read it before."

        def fn(y):
            return torch.softmax(y @ y.t(), 1) @ y + 1

        compiled = self.compiled(fn)
        with torch.no_grad():
            actual = expected = randn(256, 256) / 16
            plain = torch.compile(lambda y: fn(y))
            for i in range(8):
                torch.compiler.cudagraph_mark_step_begin()
                actual, expected = compiled(actual), plain(expected)
                self.assertEqual(actual, expected)
        self.assertBound()

    @parametrize("mark_step", (False, True))
    def test_output_of_a_stock_function_is_input(self, mark_step):
        "It lies in the pool, and trees may overwrite it."
        stock = torch.compile(lambda x: x.sin(), mode="reduce-overhead")
        compiled = self.compiled(lambda y: torch.softmax(y @ y.t(), 1) @ y + 1)
        with torch.no_grad():
            for _ in range(8):
                x = randn(64, 64)
                y = stock(x)
                if mark_step:
                    torch.compiler.cudagraph_mark_step_begin()
                actual = compiled(y)
                y = x.sin()
                expected = torch.softmax(y @ y.t(), 1) @ y + 1
                self.assertEqual(actual, expected, atol=1e-4, rtol=1e-4)

    def test_equal_address_is_no_identity(self):
        "Intermediates reuse memory of inputs of an earlier partition that died."

        def fn(x, y):
            a = x.sin() @ y
            torch._dynamo.graph_break()
            b = (a @ a).cos()
            return b @ a + x

        self.check(fn, lambda: (randn(64, 64), randn(64, 64)), exact=False)

    def test_partitions(self):
        "Inputs pass through partitions; a CPU operation lies between them."

        def fn(x, y):
            a = x.sin() + y
            b = a.sum(0).cpu() * 2
            return a @ y + b.cuda() + x

        self.check(fn, lambda: (randn(64, 64), randn(64, 64)), calls=8, exact=False)

    def test_chain_of_functions(self):
        "Outputs of one graph are external inputs of the next."
        first = self.compiled(lambda x: x.sin() + 1)
        second = self.compiled(lambda y, z: (y * z).cos())
        for _ in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            x, z = randn(64), randn(64)
            self.assertEqual(second(first(x), z), ((x.sin() + 1) * z).cos())
        self.assertBound(functions=2)


instantiate_parametrized_tests(AliasTest)


class OutputTest(PyGraphTestCase):
    "What a function returned is the program's: no later call writes it."

    def check_kept(self, fn, make_inputs, calls=8, **options):
        "Outputs of all calls are compared after the last."
        compiled = self.compiled(fn, **options)
        plain = torch.compile(lambda *args: fn(*args))
        with torch.no_grad():
            inputs = [make_inputs() for _ in range(calls)]
            actual = [compiled(*args) for args in inputs]
            self.assertEqual(actual, [plain(*args) for args in inputs])

    @parametrize("force", ("node_update", "copy", None))
    def test_kept(self, force):
        self.check_kept(
            lambda a, b: (a.sin() + b, (a * b).sum()),
            lambda: (randn(64, 64), randn(64, 64)),
            calls=8 if force else 40,
            pygraph_force=force,
        )
        self.assertEqual(counters["pygraph"]["copied_outputs"], 2 * (force == "copy"))

    def test_kept_until_the_next(self):
        "As in ``y = f(x)`` in a loop: memory alternates between two places."
        fn = self.compiled(lambda x: x.sin() + 1)
        y = fn(x := randn(1000))
        for _ in range(8):
            last, last_x, x = y, x, randn(1000)
            y = fn(x)
            self.assertEqual((last, y), (last_x.sin() + 1, x.sin() + 1))
        self.assertBound()

    def test_no_inputs(self):
        fn = self.compiled(lambda: torch.arange(64, device=DEVICE).sin())
        outputs = [fn() for _ in range(5)]
        self.assertEqual(len({y.data_ptr() for y in outputs}), 5)
        for y in outputs:
            self.assertEqual(y, torch.arange(64, device=DEVICE).sin())

    def test_allocated_by_an_operator(self):
        "Which the wrapper does not see."
        self.check_kept(
            lambda x: (*x.topk(3), x + 1), lambda: (randn(16, 64),)
        )
        self.assertEqual(counters["pygraph"]["copied_outputs"], 0)
        self.assertEqual(counters["pygraph"]["bound_outputs"], 3)
        self.assertBound()

    def test_in_memory_that_is_used_again(self):
        "Allocated in another shape than it is returned in; compiled code replays that too."
        conv = torch.nn.Conv2d(64, 64, 3, padding=1).to(DEVICE)
        linear = torch.nn.Linear(64, 64).to(DEVICE)
        for fn, size in (
            (lambda x: conv(x).relu(), (2, 64, 8, 8)),
            (lambda x: F.layer_norm(linear(x) + x, (64,)), (4, 8, 64)),
        ):
            self.check_kept(fn, lambda: (randn(*size),))
        self.assertEqual(counters["pygraph"]["bound_outputs"], 2)
        self.assertEqual(counters["pygraph"]["unsteady_recordings"], 0)
        self.assertBound(functions=2)

    def test_allocated_by_a_convolution(self):
        "In another order than the input's, and replayed by compiled code."
        module = torch.nn.Conv2d(8, 16, 3, bias=False).to(DEVICE)
        module = module.to(memory_format=torch.channels_last)
        self.check_kept(module, lambda: (randn(2, 8, 16, 16),))
        self.assertEqual(counters["pygraph"]["copied_outputs"], 0)
        self.assertEqual(counters["pygraph"]["bound_outputs"], 1)
        self.assertBound()

    def test_constant(self):
        "Is returned itself, not a copy."
        constant = randn(16)
        fn = self.compiled(lambda x: (x + 1, constant))
        for _ in range(5):
            x = randn(16)
            y, same = fn(x)
            self.assertEqual(y, x + 1)
            self.assertEqual(same.data_ptr(), constant.data_ptr())

    def test_aliases(self):
        def fn(x):
            y = x.sin()
            s, i = x.sort()
            return y, y.t(), y[1:], s, s.t(), i

        self.check_kept(fn, lambda: (randn(16, 16),))
        y, y_t, y_1, s, s_t, _ = self.compiled(fn)(randn(16, 16))
        for t, base in ((y_t, y), (y_1, y), (s_t, s)):
            self.assertEqual(
                t.untyped_storage().data_ptr(), base.untyped_storage().data_ptr()
            )

    def test_partitions(self):
        "A buffer that one partition returns to the program and to the next."

        def fn(x):
            y = x.sin()
            return y, (y @ x) * y.sum(0).cpu().cuda()

        self.check_kept(fn, lambda: (randn(64, 64),))

    def test_saved_for_backward_too(self):
        def fn(x, w):
            y = (x @ w).tanh()
            return y, (y @ w).sum()

        w = randn(64, 64, requires_grad=True)
        compiled = self.compiled(fn)
        kept = []
        for _ in range(6):
            x = randn(64, 64)
            y, loss = compiled(x, w)
            loss.backward()
            kept.append((y, w.grad, x))
            w.grad = None
        for y, grad, x in kept:
            expected, loss = fn(x, w)
            self.assertEqual(y, expected)
            self.assertEqual(
                grad, torch.autograd.grad(loss, w)[0], atol=1e-3, rtol=1e-3
            )

    def test_memory_is_freed(self):
        "Nothing that is returned stays in the pool."
        fn = self.compiled(lambda x: x.sin())
        x = randn(1 << 24)
        for _ in range(4):
            y = fn(x)
        del y
        torch.cuda.empty_cache()
        self.assertLess(torch.cuda.memory_reserved(), 2 * x.nbytes)


instantiate_parametrized_tests(OutputTest)


class MutationTest(PyGraphTestCase):
    def test_mutated_input_is_captured(self):
        module = MLP().to(DEVICE)

        def fn(x, state):
            state.add_(1)
            return module(x + state)

        self.check(fn, lambda: (randn(8, 64), randn(8, 64)))
        self.assertBound()
        self.assertEqual(counters["inductor"]["cudagraph_skips"], 0)

    def test_mutation_runs_once_in_every_call(self):
        "Recording rehearses the function: its mutations must be undone."
        compiled = self.compiled(lambda x: x.mul_(2).sum())
        x = torch.ones(128, device=DEVICE)
        for i in range(6):
            compiled(x)
            self.assertEqual(x, torch.full_like(x, 2.0 ** (i + 1)))

    def test_kv_cache(self):
        def fn(cache, key, position):
            cache.index_copy_(1, position, key)
            return cache.sum(1)

        cache = randn(4, 32, 16)
        expected = cache.clone()
        compiled = self.compiled(fn)
        for i in range(8):
            key, position = randn(4, 1, 16), torch.tensor([i], device=DEVICE)
            self.assertEqual(
                compiled(cache, key, position), fn(expected, key, position)
            )
            self.assertEqual(cache, expected)
        self.assertBound()

    def test_mutated_view(self):
        def fn(x, y):
            x[1:].copy_(y)
            return x * 2

        self.check(fn, lambda: (randn(9, 8), randn(8, 8)))
        self.assertBound()

    def test_mutated_misaligned_input(self):
        "A clone that is aligned takes the mutation; it has to come back."

        def fn(x):
            x.add_(1)
            return x * 2

        compiled = self.compiled(fn)
        for i in range(6):
            base = randn(65)
            x = base[1:] if i % 2 else base[:64]
            expected = x + 1
            self.assertEqual(compiled(x), expected * 2)
            self.assertEqual(x, expected)

    def test_mutated_output_of_last_generation(self):
        def fn(y):
            y.mul_(0.5)
            return y + 1

        compiled = self.compiled(fn)
        y = expected = randn(1 << 12)
        for _ in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            y = compiled(y.clone())
            expected = expected * 0.5 + 1
            self.assertEqual(y, expected)


class AlignmentTest(PyGraphTestCase):
    def test_less_aligned_than_recorded(self):
        "Vendor kernels are picked by alignment: the placeholder must promise no more."
        weight = randn(64, 64, dtype=torch.bfloat16)
        compiled = self.compiled(lambda x: x @ weight)
        base = randn(64 * 64 + 64, dtype=torch.bfloat16)
        for offset in (0, 0, 0, 8, 8, 16, 0, 8, 64):
            x = base[offset : offset + 4096].view(64, 64)
            self.assertEqual(compiled(x), x @ weight)
        self.assertBound()

    @parametrize("first", (0, 1))
    def test_misaligned(self, first):
        compiled = self.compiled(lambda x: x.sin() * 2)
        base = randn(4097)
        for i in range(8):
            x = base[(i + first) % 2 :][:4096]
            self.assertEqual(compiled(x), x.sin() * 2)

    def test_recordings_for_alignment_are_few(self):
        compiled = self.compiled(lambda x, y: x @ y)
        base = randn(64 * 64 + 64)
        before = self.recordings()
        for i in range(40):
            x, y = (base[o : o + 4096].view(64, 64) for o in (4 * (i % 7), 4 * (i % 5)))
            self.assertEqual(compiled(x, y), x @ y)
        self.assertLessEqual(self.recordings() - before, 4)


instantiate_parametrized_tests(AlignmentTest)


class ProofTest(PyGraphTestCase):
    """What can not be proven is copied, as stock does, and the result is right."""

    @staticmethod
    @contextlib.contextmanager
    def missing_words_of(index):
        "As if a node hid the address of one input or output."
        original = binding.find_words

        def find_words(buffer, placeholders):
            words = original(buffer, placeholders)
            return [word for word in words if word.input != index]

        with mock.patch.object(binding, "find_words", find_words):
            yield

    def check_copied(self, fn, make_inputs):
        self.check(fn, make_inputs)
        self.assertEqual(counters["pygraph"]["unbound"], 1)
        (entry,) = report()
        self.assertNotEqual(entry.reason, "")
        return entry

    @parametrize("integers", (False, True))
    def test_missed_word(self, integers):
        table = randn(100, 8)

        def make_inputs():
            if integers:
                return (torch.randint(1, 100, (64,), device=DEVICE),)
            return (randn(64, 8),)

        fn = (lambda x: table[x] * 2) if integers else (lambda x: x * 2)
        with self.missing_words_of(0):
            entry = self.check_copied(fn, make_inputs)
        self.assertIn("differs", entry.reason)

    def test_missed_write(self):
        def fn(x):
            x.add_(1)
            return x * 2

        with self.missing_words_of(0):
            self.check_copied(fn, lambda: (randn(64),))

    @parametrize("dtype", (torch.float32, torch.int64, torch.bool))
    def test_missed_word_of_an_output(self, dtype):
        "Nothing shows it but what the graph wrote elsewhere."
        with self.missing_words_of(1):
            entry = self.check_copied(
                lambda x: (x.abs().clamp(max=0) - 1).to(dtype), lambda: (randn(64),)
            )
        self.assertIn("wrote to an address", entry.reason)

    def test_missed_word_after_managed_input(self):
        "The failed replay overwrote an input that died: outputs must come from before."

        def fn(x, z):
            y = x @ z
            scale = y.sum().cpu() / 1e9 + 2
            return (((y * scale.cuda()) @ z) @ z).cos() @ z

        with self.missing_words_of(0):
            self.check(fn, lambda: (randn(64, 64), randn(64, 64) / 8), exact=False)
        self.assertGreaterEqual(counters["pygraph"]["unbound"], 2)

    def test_node_that_may_hide_an_input(self):

        def kernel_update(*args):
            raise RefusedError(Reason.of(Code.UNKNOWN_NODE, kind="other"))

        with mock.patch("torch._inductor.pygraph.graph.binding.kernel_update", kernel_update):
            self.check_copied(lambda x: x * 2, lambda: (randn(64),))

    def test_random_draws_of_the_rehearsal_are_undone(self):
        def fn(x):
            return F.dropout(x, 0.5), torch.rand_like(x)

        compiled, plain = self.compiled(fn), torch.compile(lambda x: fn(x))
        states = []
        for f in (plain, compiled):
            torch.manual_seed(1)
            inputs = [randn(256) for _ in range(6)]
            states.append([[t.clone() for t in f(x)] for x in inputs])
            states[-1].append(torch.cuda.get_rng_state())
        self.assertEqual(states[0], states[1], atol=0, rtol=0)

    def test_capture_that_fails(self):
        "An operator waits for the device: the program goes on without a graph."

        @torch.library.custom_op("pygraph_test::waits", mutates_args=())
        def waits(x: torch.Tensor) -> torch.Tensor:
            return x * float(x.abs().max().item())

        waits.register_fake(torch.empty_like)

        def fn(x):
            return waits(x.sin()) + torch.rand_like(x)

        plain = torch.compile(lambda x: fn(x))
        for options in (FORCED, {"pygraph": True}):
            torch._dynamo.reset()
            reset_report()
            compiled = torch.compile(lambda x: fn(x), options=options)
            for i in range(MOST_CALLS):
                x = randn(64)
                torch.manual_seed(i)
                actual = compiled(x)
                torch.manual_seed(i)
                self.assertEqual(actual, plain(x))
            self.assertIn("capture failed", report()[-1].reason)
        # What follows can be captured.
        torch._dynamo.reset()
        self.check(lambda x: x * 3, lambda: (randn(64),))

    def test_output_that_is_not_written(self):
        compiled = self.compiled(lambda x: (x * 2, torch.empty_like(x)))
        for _ in range(5):
            x = randn(64)
            self.assertEqual(compiled(x)[0], x * 2)
        self.assertBound()

    def test_attention_that_draws_nothing(self):
        "It returns the generator's state for the backward, uninitialised."
        compiled = self.compiled(F.scaled_dot_product_attention)
        for _ in range(5):
            q, k, v = (
                randn(2, 4, 128, 64, dtype=torch.bfloat16, requires_grad=True)
                for _ in range(3)
            )
            compiled(q, k, v).sum().backward()
            expected = F.scaled_dot_product_attention(q, k, v)
            grads = torch.autograd.grad(expected.sum(), (q, k, v))
            self.assertEqual((q.grad, k.grad, v.grad), grads, atol=5e-2, rtol=5e-2)
        self.assertBound(functions=2)

    def test_input_on_the_cpu(self):
        table = randn(100, 8)
        compiled = self.compiled(lambda index, x: table[index] + x)
        for _ in range(5):
            index, x = torch.randint(0, 100, (16,)), randn(16, 8)
            self.assertEqual(compiled(index, x), table[index] + x)

    def test_rehearsal_out_of_memory(self):
        with mock.patch(
            "torch._inductor.pygraph.verify.rehearsal.Rehearsal._first_run",
            side_effect=torch.OutOfMemoryError("no memory"),
        ):
            entry = self.check_copied(lambda x: x * 2, lambda: (randn(64),))
        self.assertEqual(entry.choice, "no_graph")
        self.assertIn("out of memory", entry.reason)

    def test_no_bindings(self):
        with (
            mock.patch(
                "torch._inductor.pygraph.graph.placeholder.bindings",
                side_effect=ImportError("no cuda-bindings"),
            ),
            mock.patch(
                "torch._inductor.pygraph.graph.placeholder.arena",
                side_effect=ImportError("no cuda-bindings"),
            ),
            mock.patch(
                "torch._inductor.pygraph.capture.allocation.arena",
                side_effect=ImportError("no cuda-bindings"),
            ),
        ):
            self.check_copied(lambda x: x * 2, lambda: (randn(64),))


instantiate_parametrized_tests(ProofTest)


@unittest.skipIf(native.compiled is None, "requires torch._inductor.pygraph._replay")
class CompiledReplayTest(PyGraphTestCase):
    @staticmethod
    def around_trees():
        return mock.patch.object(
            trees.CUDAGraphTreeManager, "_run", side_effect=AssertionError("trees")
        )

    def test_inference_goes_around_trees(self):
        def fn(x, y):
            return (x @ y).relu(), x.sin()

        compiled = self.compiled(fn)
        with torch.no_grad():
            for _ in range(4):
                compiled(randn(64, 64), randn(64, 64))
            kept = []
            with self.around_trees():
                for _ in range(4):
                    x, y = randn(64, 64), randn(64, 64)
                    kept.append((x, y, compiled(x, y)))
            for x, y, outputs in kept:
                self.assertEqual(outputs, fn(x, y))

    def test_cpu_values_go_around_the_layers(self):
        "Each call has its own, however far the host is ahead."

        def fn(x, v, s, by):
            return x * s + v.to(DEVICE) * by

        compiled = self.compiled(fn)
        x, v = torch.full((1024,), 2.0, device=DEVICE), torch.empty(1024)
        with torch.no_grad():

            def call(n):
                v.numpy()[:] = n
                return compiled(x, v, torch.tensor(float(n)), n + 0.5)

            for n in range(10):
                call(n)
            layers = mock.patch.object(
                CompiledFxGraph, "__call__", side_effect=AssertionError("layers")
            )
            with layers, self.around_trees():
                for sleep in (0, 1 << 26, 0):
                    torch.cuda._sleep(sleep)
                    results = [call(n // 2) for n in range(80)]
                    v.fill_(-1)
                    for i, result in enumerate(results):
                        n = i // 2
                        expected = torch.full_like(x, 2 * n + n * (n + 0.5))
                        self.assertEqual(result, expected, atol=0, rtol=0)

    @parametrize("non_blocking", (False, True))
    @parametrize("numel", (4, 4096, 1 << 20))
    def test_pinned_memory_that_is_being_filled(self, numel, non_blocking):
        "Its content is what the stream has when it gets there, as in eager mode."

        def fn(x, h):
            return x * h.to(DEVICE, non_blocking=non_blocking)

        def there_and_back(x):
            h = (x + 1).to("cpu", non_blocking=True)
            return h.to(DEVICE, non_blocking=non_blocking) * 2

        given, own = self.compiled(fn), self.compiled(there_and_back)
        x, pinned = randn(numel), torch.zeros(numel, pin_memory=True)
        with torch.no_grad():
            for _ in range(6):
                given(x, pinned)
                own(x)
            for n in range(1, 6):
                content = torch.full_like(x, n)
                # What is not pinned, with the bytes that pinned memory has now, and not then.
                other = pinned.clone()
                torch.cuda.synchronize()
                torch.cuda._sleep(1 << 28)
                done = torch.cuda.Event()
                done.record()
                pinned.copy_(content, non_blocking=True)
                results = [given(x, pinned)]
                self.assertEqual(done.query(), not non_blocking)
                torch.cuda._sleep(1 << 26)
                results.append(own(content))
                results.append(given(x, other))
                expected = [x * n, (content + 1) * 2, x * (n - 1)]
                self.assertEqual(results, expected, atol=0, rtol=0)

    def test_training_goes_around_trees(self):
        module = MLP().to(DEVICE)
        compiled, plain = self.compiled(module), torch.compile(lambda x: module(x))

        def step(fn, x):
            loss = fn(x).square().mean()
            loss.backward()
            grads = [p.grad.clone() for p in module.parameters()]
            module.zero_grad()
            return loss.detach().clone(), grads

        for _ in range(8):
            step(compiled, randn(8, 64))
        xs = [randn(8, 64) for _ in range(4)]
        with self.around_trees():
            actual = [step(compiled, x) for x in xs]
        self.assertEqual(actual, [step(plain, x) for x in xs])
        # Gradients that are held, and are not to be overwritten.
        compiled(xs[0]).square().mean().backward()
        held = [p.grad for p in module.parameters()]
        expected = [grad.clone() for grad in held]
        module.zero_grad()
        for x, (loss, grads) in zip(xs, actual):
            self.assertEqual(step(compiled, x), (loss, grads))
            self.assertEqual(held, expected)

    def test_same_as_python(self):
        module = MLP(norm=True).to(DEVICE).eval()
        results = []
        for compiled in (native.compiled, None):
            torch._dynamo.reset()
            with mock.patch.object(native, "compiled", compiled), torch.no_grad():
                torch.manual_seed(0)
                fn = self.compiled(lambda x, y: (module(x) + y, y * 2))
                wide = randn(8, 256)
                results.append(
                    [
                        fn(x, y)
                        for i in range(8)
                        for x, y in ((randn(8, 64), wide[:, 64 : 128 + i][:, :64]),)
                    ]
                )
        self.assertEqual(results[0], results[1], atol=0, rtol=0)

    def test_another_stream(self):
        compiled = self.compiled(lambda x: x.sin() * 2)
        stream = torch.cuda.Stream()
        with torch.no_grad():
            for _ in range(4):
                compiled(randn(1 << 16))
            stream.wait_stream(torch.cuda.current_stream())
            with self.around_trees(), torch.cuda.stream(stream):
                x = randn(1 << 16)
                out = compiled(x)
            stream.synchronize()
            self.assertEqual(out, x.sin() * 2)


instantiate_parametrized_tests(CompiledReplayTest)


class TrainingTest(PyGraphTestCase):
    def train(self, module, compiled, steps=8, accumulate=1, optimizer=None, seed=3):
        torch.manual_seed(seed)
        losses, grads = [], []
        for _ in range(steps):
            for _ in range(accumulate):
                torch.compiler.cudagraph_mark_step_begin()
                x = randn(16, 64)
                loss = compiled(x).square().mean()
                loss.backward()
                losses.append(loss.detach().clone())
            grads.append([p.grad.clone() for p in module.parameters()])
            if optimizer is not None:
                optimizer(module)
            module.zero_grad(set_to_none=True)
        return losses, grads, [b.clone() for b in module.buffers()]

    def compare(self, make, functions=2, **kwargs):
        results = []
        for options in (None, FORCED):
            torch._dynamo.reset()
            reset_report()
            torch.manual_seed(0)
            module = make().to(DEVICE)
            compiled = (
                torch.compile(module)
                if options is None
                else torch.compile(module, options=options)
            )
            results.append(self.train(module, compiled, **kwargs))
        self.assertEqual(results[0], results[1])
        self.assertBound(functions)

    def test_mlp(self):
        self.compare(MLP)

    def test_accumulation(self):
        "Gradients of the last step are still there when this step's are written."
        self.compare(MLP, accumulate=3)
        self.assertEqual(counters["pygraph"]["copied_outputs"], 0)

    def test_gradients_kept_into_the_next_step(self):
        "Both graphs run in every step all the same."
        module = MLP().to(DEVICE)
        compiled = self.compiled(module)
        kept = []
        for _ in range(6):
            x = randn(16, 64)
            loss = compiled(x).square().mean()
            kept.append(torch.autograd.grad(loss, list(module.parameters())))
            kept.append(
                torch.autograd.grad(
                    module(x).square().mean(), list(module.parameters())
                )
            )
        for actual, expected in zip(kept[::2], kept[1::2]):
            self.assertEqual(actual, expected, atol=1e-5, rtol=1e-4)
        self.assertBound(functions=2)

    @parametrize("steps", ((1,) * 6, (2,) * 6, (1, 1, 1, 1, 2, 1, 3, 2)))
    def test_pending_backwards(self, steps):
        "Activations of one call must outlive the next; each has its own backward."
        module = MLP().to(DEVICE)
        compiled = self.compiled(module)
        for calls in steps:
            inputs = [randn(16, 64) for _ in range(calls)]
            for loss in [compiled(x).square().mean() for x in inputs]:
                loss.backward()
            actual = [p.grad for p in module.parameters()]
            module.zero_grad(set_to_none=True)
            for x in inputs:
                module(x).square().mean().backward()
            expected = [p.grad for p in module.parameters()]
            module.zero_grad(set_to_none=True)
            self.assertEqual(actual, expected, atol=1e-5, rtol=1e-4)

    def test_activations_kept_by_retain_graph(self):
        "The next step's graphs write where they lie, unless someone looks."
        weights = [randn(64, 64, requires_grad=True) for _ in range(2)]

        def fn(x, a, b):
            return ((x @ a).sin() @ b).cos().sum()

        compiled = self.compiled(fn)
        with torch._functorch.config.patch(donated_buffer=False):
            for i in range(8):
                x = randn(64, 64)
                loss = compiled(x, *weights)
                torch.autograd.grad(loss, weights, retain_graph=i == 5)
                if i == 5:
                    kept, kept_x = loss, x
            expected = torch.autograd.grad(fn(kept_x, *weights), weights)
            actual = torch.autograd.grad(kept, weights)
        self.assertEqual(actual, expected, atol=1e-3, rtol=1e-3)
        self.assertGreater(counters["pygraph"]["held_activations"], 0)

    def test_batch_norm(self):
        self.compare(lambda: MLP(norm=True))

    def test_dropout(self):
        self.compare(lambda: MLP(dropout=0.3))

    @parametrize("backend", ("FLASH", "EFFICIENT", "CUDNN"))
    def test_attention_with_dropout(self, backend):
        "The forward hands its seed to the backward, of which either may be captured alone."

        def fn(q):
            return F.scaled_dot_product_attention(q * 1.5, q, q, dropout_p=0.2).sin()

        kernel = getattr(SDPBackend, f"{backend}_ATTENTION")
        new = functools.partial(randn, 2, 4, 64, 64, dtype=torch.float16)
        try:
            with sdpa_kernel(kernel):
                fn(new())
        except RuntimeError as e:
            self.skipTest(str(e))
        for force, steps in (None, 80), ("no_graph", 3):
            torch._dynamo.reset()
            options = {"pygraph": True, "pygraph_force": force}
            compiled = torch.compile(fn, options=options)
            for i in range(steps):
                q, results = new(requires_grad=True), []
                for f in (compiled, fn):
                    with (
                        sdpa_kernel(kernel),
                        torch._functorch.config.patch(donated_buffer=False),
                    ):
                        torch.manual_seed(i)
                        out = f(q)
                        # What is retained keeps graphs from being replayed.
                        grads = torch.autograd.grad(out.sum(), q, retain_graph=i % 7 == 5)
                    results.append((out, grads))
                self.assertEqual(*results, atol=1e-2, rtol=1e-2)

    @parametrize("compile_optimizer", (False, True))
    def test_optimizer(self, compile_optimizer):
        optimizers = {}

        def step(module):
            if module not in optimizers:
                opt = torch.optim.AdamW(module.parameters(), lr=1e-2, capturable=True)
                fn = opt.step
                if compile_optimizer and len(optimizers) == 1:
                    fn = torch.compile(fn, options=FORCED)
                optimizers[module] = fn
            optimizers[module]()

        self.compare(MLP, optimizer=step, functions=2 + compile_optimizer)
        self.assertEqual(len(report()), 2 + compile_optimizer)

    def test_saved_user_input_moves(self):
        "Backward gets the caller's tensor, at another address in every step."
        compiled = self.compiled(lambda x, w: (x.sin() * w).sum())
        w = randn(64, requires_grad=True)
        recorded = []
        for _ in range(8):
            torch.compiler.cudagraph_mark_step_begin()
            x = randn(32, 64, requires_grad=True)
            compiled(x, w).backward()
            expected = torch.autograd.grad((x.sin() * w).sum(), (x, w))
            self.assertEqual((x.grad, w.grad), expected)
            w.grad = None
            recorded.append(self.recordings())
        # Each look draws an id itself.
        self.assertEqual(recorded[-1] - recorded[-4], 3)
        self.assertBound(functions=2)

    def test_saved_input_changed_before_backward(self):
        "The saved tensor is the caller's: autograd has to see that it was changed."
        compiled = self.compiled(lambda x, w: (x * w).sum())
        w = randn(64, requires_grad=True)
        for i in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            x = randn(64)
            loss = compiled(x, w)
            x.add_(1)
            with self.assertRaisesRegex(RuntimeError, "modified by an inplace"):
                loss.backward()

    def test_forward_without_graph(self):
        "Activations of an uncaptured forward move; trees take them for static."
        original = deploy.deploy

        def forced(*args, **kwargs):
            if not kwargs["is_backward"]:
                kwargs["force"] = "no_graph"
            return original(*args, **kwargs)

        with mock.patch.object(deploy, "deploy", forced):
            module = MLP().to(DEVICE)
            compiled = torch.compile(module, options=FORCED)
            plain = torch.compile(lambda x: module(x))
            recorded = []
            for _ in range(8):
                x = randn(16, 64)
                compiled(x).square().mean().backward()
                actual = [p.grad.clone() for p in module.parameters()]
                module.zero_grad(set_to_none=True)
                plain(x).square().mean().backward()
                expected = [p.grad.clone() for p in module.parameters()]
                module.zero_grad(set_to_none=True)
                self.assertEqual(actual, expected)
                recorded.append(self.recordings())
        self.assertEqual(recorded[-1] - recorded[-4], 3)

    def test_expanded_activation(self):
        "It can not be written as a tensor when the rehearsal is undone."

        def fn(x, w):
            mask = (x.sum(-1, keepdim=True) > 0).to(x.dtype).expand(-1, 64)
            return ((x @ w) * mask).sin() * mask

        compiled = self.compiled(fn)
        w = randn(64, 64, requires_grad=True)
        for _ in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            x = randn(64, 64)
            compiled(x, w).sum().backward()
            actual, w.grad = w.grad.clone(), None
            (expected,) = torch.autograd.grad(fn(x, w).sum(), w)
            self.assertEqual(actual, expected, atol=1e-3, rtol=1e-3)

    def test_two_modules_pending_backward(self):
        first, second = MLP().to(DEVICE), MLP().to(DEVICE)
        compiled = [self.compiled(m) for m in (first, second)]
        for _ in range(6):
            x = randn(8, 64)
            compiled[1](compiled[0](x)).sum().backward()
            actual = [p.grad.clone() for m in (first, second) for p in m.parameters()]
            for m in (first, second):
                m.zero_grad(set_to_none=True)
            second(first(x)).sum().backward()
            expected = [p.grad for m in (first, second) for p in m.parameters()]
            self.assertEqual(actual, expected)
            for m in (first, second):
                m.zero_grad(set_to_none=True)

    def test_donated_activations(self):
        "Backward reuses the memory of activations: rehearsing must not use them up."

        def fn(x, w):
            return ((x @ w).sin() @ w).cos().sum()

        self.assertTrue(torch._functorch.config.donated_buffer)
        compiled = self.compiled(fn)
        w = randn(64, 64, requires_grad=True)
        for _ in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            x = randn(64, 64)
            compiled(x, w).backward()
            actual, w.grad = w.grad.clone(), None
            (expected,) = torch.autograd.grad(fn(x, w), w)
            self.assertEqual(actual, expected, atol=1e-3, rtol=1e-3)
        self.assertBound(functions=2)


instantiate_parametrized_tests(TrainingTest)


class LittleMemoryTest(PyGraphTestCase):
    """
    What runs without graphs in so much memory does with them, whatever is captured, as long
    as it needs most of that in what it compiles: graphs keep their memory between calls.
    """

    def setUp(self):
        super().setUp()
        layers = []
        for _ in range(6):
            linear = torch.nn.Linear(1024, 1024, dtype=torch.bfloat16)
            norm = torch.nn.LayerNorm(1024, dtype=torch.bfloat16)
            layers += [linear, torch.nn.GELU(), norm]
        self.module = torch.nn.Sequential(*layers).to(DEVICE)
        self.addCleanup(torch.cuda.set_per_process_memory_fraction, 1.0)

    def train(self, fn, steps):
        "The gradients' norms of each step."
        norms = []
        for i in range(steps):
            torch.manual_seed(i % 3)
            x = randn(8192, 1024, dtype=torch.bfloat16)
            fn(x).float().square().mean().backward()
            grads = [p.grad.float().norm() for p in self.module.parameters()]
            norms.append(torch.stack(grads).cpu())
            self.module.zero_grad(set_to_none=True)
        return norms

    def infer(self, fn, calls):
        sums = []
        with torch.no_grad():
            for i in range(calls):
                torch.manual_seed(i % 3)
                x = randn(65536, 1024, dtype=torch.bfloat16)
                sums.append(torch.linalg.vector_norm(fn(x), dtype=torch.float32).cpu())
                del x
        return sums

    def peak(self, run, fn):
        "Of the memory that the process has, with all that run needs, in bytes."
        run(fn, 2)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run(fn, 2)
        peak = torch.cuda.max_memory_reserved()
        torch.cuda.empty_cache()
        return peak

    def check_limited(self, run, share, calls, **options):
        uncaptured = torch.compile(lambda x: self.module(x))
        limit = int(share * self.peak(run, uncaptured))
        expected = run(uncaptured, 3)
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit / total)
        actual = run(torch.compile(self.module, options={"pygraph": True, **options}), calls)
        for i, value in enumerate(actual):
            self.assertEqual(value, expected[i % 3], atol=1e-3, rtol=2e-2)

    @parametrize("share", (1.15, 1.4))
    @parametrize("force", (None, "node_update"))
    def test_training(self, share, force):
        self.check_limited(self.train, share, 6 if force else 100, pygraph_force=force)
        if force and share == 1.4:
            self.assertBound(functions=2)

    @parametrize("share", (1.02, 1.6))
    @parametrize("force", (None, "node_update"))
    def test_inference(self, share, force):
        self.check_limited(self.infer, share, 6 if force else 100, pygraph_force=force)
        if force and share == 1.6:
            self.assertBound()

    def test_proof_that_fails(self):
        "What was captured for it is gone when the call runs uncaptured."
        with mock.patch(
            "torch._inductor.pygraph.capture.bound.verify",
            lambda *args: Verdict(Reason.of(Code.ONLY_CLOSE)),
        ):
            self.check_limited(self.infer, 1.02, 6, pygraph_force="node_update")
        self.assertEqual(counters["pygraph"]["bound_inputs"], 0)


instantiate_parametrized_tests(LittleMemoryTest)


class SelectionTest(PyGraphTestCase):
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

    def test_launch_bound_function_is_recorded(self):
        module = MLP(layers=20).to(DEVICE)
        with torch.no_grad():
            entry = self.run_until_decided(
                torch.compile(module, options={"pygraph": True}),
                lambda: (randn(8, 64),),
                torch.compile(lambda x: module(x)),
            )
        self.assertEqual(entry.choice, "node_update", str(entry))
        self.assertEqual(set(entry.timings_us), {"no_graph", "node_update"})

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
class TwoDevicesTest(PyGraphTestCase):
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


class ProgramTest(PyGraphTestCase):
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


if __name__ == "__main__":
    if HAS_CUDA_AND_TRITON:
        run_tests()
