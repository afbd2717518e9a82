# Owner(s): ["module: inductor"]
"""
On a device: what a recording's proof finds, and calls that compiled code replays.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
import torch._dynamo
import torch._inductor.cudagraph_trees as trees
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.pygraph import native, report, reset_report
from torch._inductor.pygraph.graph import binding
from torch._inductor.pygraph.select import selection
from torch._inductor.pygraph.types.reason import Code, Reason, RefusedError
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.pygraph_common import needs_compiled
from torch.testing._internal.pygraph_device import (
    DEVICE,
    DeviceTestCase,
    FORCED,
    MLP,
    MOST_CALLS,
    randn,
)


class ProofTest(DeviceTestCase):
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

    # Where other processes use the device, too, such an operator takes long there.
    @mock.patch.object(selection, "DEVICE_BOUND", float("inf"))
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

    # If other processes use the device, too, it may be busy for ten times as long as the host needs.
    @mock.patch.object(selection, "DEVICE_BOUND", float("inf"))
    @parametrize("trains", (False, True))
    def test_operator_on_a_stream_of_its_own(self, trains):
        "The operator does not join a capture. It reads a weight, or an activation that a graph left in the pool."
        side, weight = torch.cuda.Stream(), randn(64)
        torch._dynamo.mark_static_address(weight)

        @torch.library.custom_op("pygraph_test::aside", mutates_args=())
        def aside(x: torch.Tensor) -> torch.Tensor:
            is_capturing = torch.cuda.is_current_stream_capturing()
            out = torch.empty_like(x)
            if not is_capturing:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.sin(x, out=out)
            if not is_capturing:
                torch.cuda.current_stream().wait_stream(side)
            return out

        aside.register_fake(torch.empty_like)

        @torch.library.custom_op("pygraph_test::scaled", mutates_args=())
        def scaled(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        scaled.register_fake(torch.empty_like)
        scaled.register_autograd(
            lambda ctx, grad: grad * aside(*ctx.saved_tensors),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        )

        def fn(x, w):
            return scaled(x.cos() * w).sum() if trains else x * aside(w)

        for options in (FORCED, {"pygraph": True}):
            torch._dynamo.reset()
            reset_report()
            compiled = torch.compile(lambda x, w: fn(x, w), options=options)
            for _ in range(8 if options is FORCED else MOST_CALLS):
                x = randn(64, requires_grad=trains)
                weight.add_(0.25)
                out = compiled(x, weight)
                if trains:
                    out.backward()
                    a = (x.cos() * weight).detach()
                    self.assertEqual(x.grad, -x.detach().sin() * weight * a.sin())
                else:
                    self.assertEqual(out, x * weight.sin())
            codes = [reason.code for entry in report() for reason in entry.reasons]
            self.assertIn(Code.KERNELS_NOT_CAPTURED, codes, str(report()))

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
        ):
            self.check_copied(lambda x: x * 2, lambda: (randn(64),))


instantiate_parametrized_tests(ProofTest)


@needs_compiled
class CompiledReplayTest(DeviceTestCase):
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


if __name__ == "__main__":
    run_tests()
