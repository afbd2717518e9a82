# Owner(s): ["module: inductor"]
"""
PyGraph on a device: results, aliasing and mutation are those of torch.compile without
CUDA graphs, on inputs that change with every call. Each trap has a test that fails on a
build without its handling.
"""

from __future__ import annotations

from unittest import mock

import torch
import torch._dynamo
import torch._inductor.cudagraph_trees as trees
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.pygraph import native, report
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.pygraph_device import DEVICE, DeviceTestCase, MLP, randn


class BindingTest(DeviceTestCase):
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


class AliasTest(DeviceTestCase):
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


class OutputTest(DeviceTestCase):
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


class MutationTest(DeviceTestCase):
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


class AlignmentTest(DeviceTestCase):
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


if __name__ == "__main__":
    run_tests()
