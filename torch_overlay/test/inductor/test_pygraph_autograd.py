# Owner(s): ["module: inductor"]
"""
Training graphs, whose autograd.Function does with pygraph only what each graph needs: outputs,
gradients and errors are those of eager mode and of stock torch.compile.
"""

from __future__ import annotations

import contextlib
import copy
import subprocess
import sys
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch._dynamo.testing
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import runtime_wrappers
from torch._functorch._aot_autograd.schemas import SubclassCreationMeta
from torch._inductor import config
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.pygraph import native
from torch._inductor.pygraph.calls import shortener, unused
from torch._inductor.test_case import run_tests
from torch._inductor.utils import fresh_cache
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.pygraph_autograd import (
    AutogradTestCase,
    backend,
    interpreted,
    mlp,
    outcome,
)
from torch.testing._internal.pygraph_common import ByPython, needs_compiled
from torch.testing._internal.two_tensor import TwoTensor


class AutogradTest(AutogradTestCase):
    def test_module(self):
        self.check(mlp(), torch.randn(3, 4))
        self.check(mlp(), torch.randn(3, 4, requires_grad=True))
        self.check(mlp(), torch.randn(3, 4), use=lambda y: y.sum().backward())

    def test_outputs_of_each_kind(self):
        def fn(x, w):
            y = x @ w
            return y.sin(), y.detach().cos(), y.argmax(), x.exp(), (w * 2).sum()

        args = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        self.check(fn, *args)
        # Those that are not used have gradients of zeros, or none.
        for i in (0, 3, 4):
            self.check(
                fn,
                *args,
                use=lambda outputs, i=i: outputs[i].sum().backward(),
                # It has no gradient at all for an input that an output did not need.
                eager=False,
            )

        def use(outputs):
            return torch.autograd.grad(outputs[0].sum(), outputs[1])

        self.check(fn, *args, use=use)

    def test_outputs_that_need_no_gradient(self):
        def fn(x, w):
            return x * 2, (x * w).sin()

        args = torch.randn(4), torch.randn(4, requires_grad=True)
        self.check(fn, *args)

        # And are given none, which would have to be made.
        seen: list[Any] = []
        with config.patch(pygraph=True):
            torch._dynamo.reset()
            compiled = torch.compile(fn, backend="aot_eager")
            for i in range(4):
                plain, output = compiled(*args)
                if i == 0:
                    node = type(output.grad_fn)
                    apply = node.apply
                    node.apply = lambda ctx, *g: seen.append(g) or apply(ctx, *g)
                output.sum().backward()
        self.assertEqual(len(seen), 4)
        self.assertTrue(all(of_plain is None for of_plain, _ in seen))

    def test_unsafe_views(self):
        def fn(x, w):
            # Nobody else has what the first one is a view of.
            return (x @ w).sin().view(-1), torch.nn.functional.linear(x, w)

        args = torch.randn(2, 3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        self.check(fn, *args, eager=False)

        def use(outputs):
            # It is not to be seen that one was a view.
            outputs[0].mul_(2)
            self.differentiate(outputs)

        self.check(fn, *args, use=use, eager=False)

    def test_outputs_that_alias(self):
        def input_and_view(x):
            return x, x[1:], x.sin()

        def views_of_one(x):
            y = x.sin()
            return y[1:], y[:2], y

        x = torch.randn(4, requires_grad=True)
        self.check(input_and_view, x, forward=False, backward=False)
        self.check(views_of_one, x, forward=False, backward=False)

    def test_mutated_inputs(self):
        def data(x, y):
            y.add_(x)
            return (x * y).sin()

        def metadata(x, y):
            y.t_()
            return x @ y

        def both(x, y):
            y.t_()
            y.mul_(2)
            return x @ y

        def leaf_without_grad(x, y):
            y.detach().mul_(2)
            return x @ y

        def of_a_view(x, y):
            y[0].mul_(2)
            return x * y

        x, y = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3)
        for fn in (data, metadata, both, leaf_without_grad, of_a_view):
            with self.subTest(fn.__name__):
                self.check(fn, x, y, forward=None, backward=None)
                found = []
                for variant in ("eager", "stock", "pygraph"):
                    torch._dynamo.reset()
                    with config.patch(pygraph=variant == "pygraph"):
                        compiled = torch.compile(fn, backend="aot_eager")
                        run = fn if variant == "eager" else compiled
                        grads = []
                        for _ in range(3):
                            leaves = [t.detach().clone().requires_grad_() for t in (x, y)]
                            other = leaves[1] * 1
                            total = run(leaves[0], other).sum() + other.square().sum()
                            total.backward()
                            grads.append([other.detach(), *(t.grad for t in leaves)])
                        found.append(grads)
                self.assertEqual(found[2], found[0])
                self.assertEqual(found[2], found[1])

    def test_buffers(self):
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.check(module, torch.randn(3, 4))

    def test_version_of_a_mutated_buffer(self):
        "Autograd sees that the graph wrote to what somebody else saved."

        def fn(x, buffer):
            with torch.no_grad():
                buffer.add_(1)
            return x.sin()

        def unseen(gm: torch.fx.GraphModule) -> Any:
            "As a kernel."
            run = interpreted(gm)

            def call(args: list[Any]) -> Any:
                with torch.autograd._unsafe_preserve_version_counter(tuple(args)):
                    return run(args)

            return call

        for pygraph in (False, True):
            torch._dynamo.reset()
            with config.patch(pygraph=pygraph):
                compiled = torch.compile(fn, backend=backend(unseen, interpreted))
                for _ in range(3):
                    x, buffer = torch.randn(4, requires_grad=True), torch.randn(4)
                    y, version = x * buffer, buffer._version
                    compiled(x, buffer)
                    self.assertGreater(buffer._version, version)
                    with self.assertRaisesRegex(RuntimeError, "inplace operation"):
                        y.sum().backward()

    def test_inputs_that_get_no_gradient(self):
        def fn(x, w):
            return x.detach() * w

        leaf = torch.randn(4, requires_grad=True)
        for pygraph in (False, True):
            torch._dynamo.reset()
            with config.patch(pygraph=pygraph):
                compiled = torch.compile(fn, backend="aot_eager")
                w = torch.randn(4, requires_grad=True)
                hidden = leaf * 2
                hidden.sum().backward()
                # Its graph was freed, and nothing goes there.
                for _ in range(4):
                    w.grad = None
                    compiled(hidden, w).sum().backward()
                    self.assertEqual(w.grad, hidden.detach())

    def test_strides_of_gradients(self):
        "Of expanded, transposed and other ones, the backward is given what it was compiled for."
        seen: list[tuple[int, ...]] = []

        def recorded(gm: torch.fx.GraphModule) -> Any:
            places = [
                i
                for i, n in enumerate(gm.graph.find_nodes(op="placeholder"))
                if "tangent" in n.name
            ]
            run = interpreted(gm)

            def call(args: list[Any]) -> Any:
                seen.extend(args[i].stride() for i in places)
                return run(args)

            return call

        def flat(x, w):
            return x * w

        def channels_last(x, w):
            return torch.nn.functional.conv2d(
                x.to(memory_format=torch.channels_last), w
            )

        for fn, shape in ((flat, (3, 4)), (channels_last, (2, 4, 5, 5))):
            w = torch.randn(4, 4, 1, 1) if len(shape) == 4 else torch.randn(shape)
            w.requires_grad_()
            x = torch.randn(shape)
            gradients = [
                lambda y: torch.ones(()).expand(y.shape),
                lambda y: torch.randn(y.shape).mT.contiguous().mT,
                lambda y: torch.randn(y.shape),
                lambda y: torch.randn_like(y),
                lambda y: torch.randn(*y.shape, 2)[..., 0],
            ]
            for guess in (False, True):
                strides = []
                for pygraph in (False, True):
                    torch._dynamo.reset()
                    torch.manual_seed(0)
                    seen.clear()
                    with (
                        config.patch(pygraph=pygraph),
                        functorch_config.patch(guess_tangent_strides_as_outputs=guess),
                    ):
                        compiled = torch.compile(
                            fn, backend=backend(interpreted, recorded)
                        )
                        for gradient in gradients:
                            for _ in range(2):
                                y, expected = compiled(x, w), fn(x, w)
                                g = gradient(expected)
                                with self.counted() as counts:
                                    (of_w,) = torch.autograd.grad(y, w, g)
                                (of_eager,) = torch.autograd.grad(expected, w, g)
                                self.assertEqual(of_w, of_eager)
                        self.assertEqual(counts[1] == 0, pygraph)
                    strides.append(list(seen))
                self.assertEqual(*strides)
                self.assertEqual(len({*strides[0]}), 1)

    def test_gradients_that_are_no_plain_tensors(self):
        gradients = (
            lambda: TwoTensor(torch.ones(4), torch.ones(4)),
            lambda: torch.nn.Parameter(torch.ones(4)),
        )
        for gradient in gradients:
            found = []
            for pygraph in (False, True):
                torch._dynamo.reset()
                with config.patch(pygraph=pygraph):
                    compiled = torch.compile(lambda x: x.sin(), backend="aot_eager")
                    for g in (torch.ones(4), torch.ones(4), gradient()):
                        x = torch.ones(4, requires_grad=True)
                        with self.counted() as counts:
                            used = outcome(lambda: compiled(x).backward(g))
                    self.assertEqual(counts[1], 1)
                    found.append((used, x.grad))
            self.assertEqual(*found)
            self.assertIn("we guessed its\nmetadata incorrectly", found[1][0][1])

    def test_subclasses(self):
        x = TwoTensor(torch.randn(4), torch.randn(4)).requires_grad_()
        for pygraph in (False, True):
            torch._dynamo.reset()
            with config.patch(pygraph=pygraph):
                compiled = torch.compile(lambda x: x.sin() * 2, backend="aot_eager")
                for _ in range(3):
                    x.grad = None
                    compiled(x).sum().backward()
                    self.assertEqual(x.grad.a, 2 * x.a.cos())
                    self.assertEqual(x.grad.b, 2 * x.b.cos())

    def test_subclass_that_needs_no_gradient(self):
        "The gradient that the graph takes is a plain tensor; its inputs are not all."
        for pygraph in (False, True):
            torch._dynamo.reset()
            with config.patch(pygraph=pygraph):
                compiled = torch.compile(
                    lambda x, w: (x * 2, w.sin()), backend="aot_eager"
                )
                for _ in range(3):
                    x = TwoTensor(torch.randn(4), torch.randn(4))
                    w = torch.randn(4, requires_grad=True)
                    doubled, y = compiled(x, w)
                    self.assertEqual(doubled.b, 2 * x.b)
                    y.sum().backward()
                    self.assertEqual(w.grad, w.cos())

    def test_errors_of_the_graph(self):
        "They leave the thread as it was."

        def failing(gm: torch.fx.GraphModule) -> Any:
            run = interpreted(gm)

            def call(args: list[Any]) -> Any:
                if self.fails:
                    raise ValueError("failed")
                return run(args)

            return call

        self.fails = False
        with config.patch(pygraph=True):
            compiled = torch.compile(lambda x: x.sin(), backend=backend(failing, failing))
            for is_grad_enabled in (True, False):
                for self.fails in (False, False, False, True, False):
                    with torch.set_grad_enabled(is_grad_enabled):
                        x = torch.randn(4, requires_grad=True)
                        if self.fails:
                            with self.assertRaisesRegex(ValueError, "failed"):
                                compiled(x)
                        else:
                            self.assertEqual(compiled(x), x.sin())
                        self.assertEqual(torch.is_grad_enabled(), is_grad_enabled)
                        self.assertFalse(torch._C._is_view_replay_enabled())
            x = torch.randn(4, requires_grad=True)
            y = compiled(x)
            self.fails = True
            with self.assertRaisesRegex(ValueError, "failed"):
                y.sum().backward()
            self.fails = False
            compiled(x).sum().backward()
            self.assertEqual(x.grad, x.cos())

    def test_number_of_outputs(self):
        def short(gm: torch.fx.GraphModule) -> Any:
            run = interpreted(gm)
            return lambda args: run(args)[: 1 if self.fails else None]

        self.fails = False
        with config.patch(pygraph=True):
            compiled = torch.compile(
                lambda x: (x.sin(), x.cos()), backend=backend(short, interpreted)
            )
            x = torch.randn(4, requires_grad=True)
            for _ in range(3):
                compiled(x)
            self.fails = True
            with self.assertRaisesRegex(AssertionError, "expected 2 outputs, got 1"):
                compiled(x)

    def test_backends_of_other_conventions(self):
        "Functions of arguments, not of a list of them, and one gradient that is no list."

        def unboxed(gm: torch.fx.GraphModule, inputs: Any) -> Any:
            return lambda *args: gm(*args)

        def bare(gm: torch.fx.GraphModule, inputs: Any) -> Any:
            def call(args: list[Any]) -> Any:
                outs = gm(*args)
                return outs[0] if len(outs) == 1 else outs

            call._boxed_call = True
            return call

        for forward, backward in ((bare, bare), (unboxed, bare), (bare, unboxed)):
            with config.patch(pygraph=True):
                torch._dynamo.reset()
                compiled = torch.compile(
                    lambda x: x.sin(),
                    backend=aot_autograd(fw_compiler=forward, bw_compiler=backward),
                )
                for _ in range(4):
                    x = torch.randn(1, requires_grad=True)
                    compiled(x).sum().backward()
                    self.assertEqual(x.grad, x.cos())
                    x = torch.randn(4, requires_grad=True)
                    compiled(x).sum().backward()
                    self.assertEqual(x.grad, x.cos())

    @needs_compiled
    @parametrize("is_analysed", (True, False))
    def test_first_call(self, is_analysed):
        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return (x.sin(),)

        first = runtime_wrappers._FirstInvocationContext()
        layer = shortener.runtime_wrapper(
            Function.apply, Function.apply, first, 1, [], [], False
        )
        seen: list[torch.Tensor] = []

        def general(x):
            seen.append(x)
            with first():
                return [x.sin()]

        compiled = native.compiled.Training(
            slow=general,
            set_eval_frame=torch._C._dynamo.eval_frame.set_eval_frame,
            **shortener.natives[layer],
        )
        x = torch.randn(4)
        with functorch_config.patch(check_custom_op_aliasing=is_analysed):
            for _ in range(3):
                self.assertEqual(compiled(x), [x.sin()])
        self.assertEqual(len(seen), int(is_analysed))

    def test_wrapper_of_a_transform_that_is_gone(self):
        "The graph does not see it."
        kept: list[torch.Tensor] = []

        def keep(x):
            kept.append(x)
            return x.sum()

        torch.func.grad(keep)(torch.randn(4))
        (wrapper,) = kept
        is_wrapper = torch._C._functorch.is_gradtrackingtensor
        seen: list[bool] = []

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, w):
                seen.append(is_wrapper(x))
                return x * w

            @staticmethod
            def backward(ctx, g):
                return None, g

        first = runtime_wrappers._FirstInvocationContext()
        first._is_first = False
        layer = shortener.runtime_wrapper(
            Function.apply, Function.apply, first, 4, [], [], False
        )
        w = torch.randn(4, requires_grad=True)
        for run in (lambda *args: layer([*args]), shortener._disabled(layer)):
            for x in (torch.randn(4), wrapper):
                self.assertEqual(is_wrapper(x), x is wrapper)
                run(x, w)
            with self.assertRaisesRegex(RuntimeError, "setup_context"):
                torch.vmap(lambda x: run(x, w))(torch.randn(3, 4))
        self.assertEqual(seen, [False] * 4)

    def test_sizes_that_vary(self):
        def fn(x, w):
            return (x * w).sin().reshape(-1, x.shape[0]), x.shape[0] * w

        for n in (3, 5, 6):
            x, w = torch.randn(n, 4), torch.randn(n, 4, requires_grad=True)
            self.check(fn, x, w, dynamic=True, eager=False)
        def marked(t):
            return getattr(t, "_dynamo_weak_dynamic_indices", None)

        marks = []
        for pygraph in (False, True):
            torch._dynamo.reset()
            with config.patch(pygraph=pygraph):
                compiled = torch.compile(fn, backend="aot_eager", dynamic=True)
                marks.append([])
                for i, n in enumerate((3, 5, 6, 3, 5, 7)):
                    x, w = torch.randn(n, 4), torch.randn(n, 4, requires_grad=True)
                    other = w.detach().clone().requires_grad_()
                    outputs = compiled(x, w)
                    node = outputs[0].grad_fn
                    marks[-1].append([marked(t) for t in (*outputs, *node.saved_tensors)])
                    with (
                        torch._dynamo.compiled_autograd._enable(
                            torch.compile(backend="aot_eager", dynamic=True)
                        )
                        if i > 3
                        else contextlib.nullcontext()
                    ):
                        self.differentiate(outputs)
                    self.differentiate(fn(x, other))
                    self.assertEqual(w.grad, other.grad)
        # For Dynamo, and for compiled autograd.
        self.assertEqual(marks[0], marks[1])
        self.assertTrue(marks[0][0][0])

    def test_first_call_is_analyzed(self):
        "As without pygraph, for custom operators whose outputs alias inputs."
        with torch.library._scoped_library("pygraph_test", "FRAGMENT") as lib:
            lib.define("alias(Tensor x) -> Tensor")
            lib.impl("alias", lambda x: x.view(-1), "CPU")
            lib.impl("alias", lambda x: x.view(-1), "Meta")
            for pygraph in (False, True):
                torch._dynamo.reset()
                with config.patch(pygraph=pygraph):
                    compiled = torch.compile(
                        lambda x, w: torch.ops.pygraph_test.alias(x).sin() * w,
                        backend="aot_eager",
                    )
                    w = torch.randn(4, requires_grad=True)
                    with functorch_config.patch(
                        check_custom_op_aliasing=True, error_on_custom_op_aliasing=True
                    ):
                        with self.assertRaisesRegex(RuntimeError, "alias"):
                            compiled(torch.randn(4), w)

    def test_dynamo_looks_at_none_of_this(self):
        x = torch.randn(4, requires_grad=True)
        with config.patch(pygraph=True):
            compiles = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

            @torch.compile(backend=compiles)
            def step(x):
                y = x.sin().sum()
                torch._dynamo.graph_break()
                y.backward()
                return y * 2

            for i in range(4):
                if i == 1:
                    frames = counters["frames"]["total"], compiles.frame_count
                x.grad = None
                step(x)
                self.assertEqual(x.grad, x.cos())
            self.assertEqual(
                (counters["frames"]["total"], compiles.frame_count), frames
            )
            with torch._dynamo.config.patch(error_on_recompile=True):
                step(x)

    def shared(self):
        "Every unused result counts as large, and one tensor of zeros is shared; returns all calls for it."
        calls = []

        def shared_zeros(size, dtype, device_index):
            calls.append(torch.zeros(size, dtype=dtype))
            return calls[-1]

        patches = contextlib.ExitStack()
        patches.enter_context(mock.patch.object(unused, "is_large", lambda t: True))
        patches.enter_context(mock.patch.object(unused, "MIN_BYTES", 0))
        patches.enter_context(mock.patch.object(unused, "shared_zeros", shared_zeros))
        self.addCleanup(patches.close)
        return calls

    @parametrize("name", ("aot_eager", "inductor"))
    def test_unused_results(self, name):
        calls = self.shared()

        def fn(x, w):
            y = (x @ w).sin()
            return y, y.exp() * w, y.detach().cos(), (w.cos() * x).sum()

        args = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        for used in ((0,), (1,), (3,), (0, 1), (1, 3), (0, 1, 3)):
            calls.clear()
            self.check(
                fn,
                *args,
                use=lambda y: sum(y[i].square().sum() for i in used).backward(),
                backend=name,
                eager=False,
            )
            # One that the size of an earlier call fits is used again.
            self.assertEqual(len(calls), (3 - len(used)) * (name == "inductor"))
            self.assertTrue(all(not t.any() for t in calls))

    @parametrize("name", ("aot_eager", "inductor"))
    def test_unused_results_of_other_backwards(self, name):
        "Of a graph that is kept, that is differentiated again, whose sizes vary, and with hooks."
        self.shared()

        def fn(x, w):
            return (x * w).sin(), x * w.exp()

        w = torch.randn(4, 4, requires_grad=True)

        def twice(outputs):
            outputs[0].sum().backward(retain_graph=True)
            outputs[1].sum().backward()

        def again(outputs):
            outputs[0].sum().backward(create_graph=True)

        def hooked(outputs):
            seen = []
            outputs[1].register_hook(seen.append)
            outputs[0].sum().backward()
            return seen

        for use in (twice, again, hooked):
            self.check(fn, torch.randn(4, 4), w, use=use, backend=name, backward=None, eager=False)
        with config.patch(pygraph=True):
            torch._dynamo.reset()
            compiled = torch.compile(lambda x, w: (x * w.sin(), x + w), backend=name, dynamic=True)
            for n in (3, 5, 6, 3, 5):
                w = torch.randn(n, 4, requires_grad=True)
                x = torch.randn(n, 4)
                compiled(x, w)[n % 2].sum().backward()
                self.assertEqual(w.grad, torch.ones_like(w) if n % 2 else x * w.cos())

    def test_unused_results_and_compiled_autograd(self):
        "It takes the gradients of a graph as autograd would make them, and runs the graph's own backward."
        self.shared()

        def fn(x, w):
            return (x * w).sin(), x * w.exp()

        with config.patch(pygraph=True):
            compiled = torch.compile(fn, backend="aot_eager")
            for i in range(6):
                x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
                loss = compiled(x, w)[i % 2].sum()
                if i > 1:
                    with torch._dynamo.compiled_autograd._enable(
                        torch.compile(backend="aot_eager")
                    ):
                        loss.backward()
                else:
                    loss.backward()
                self.assertEqual(w.grad, x * (w.exp() if i % 2 else (x * w).cos()))

    def test_unused_results_whose_gradients_are_returned(self):
        "No zeros that others read become a gradient of the program, which may write it."
        calls = self.shared()
        with torch.library._scoped_library("pygraph_test", "FRAGMENT") as lib:
            lib.define("ones(Tensor(a!) x) -> ()")
            lib.impl("ones", lambda x: None if x.fill_(1) is x else x, "CPU")
            lib.impl("ones", lambda x: None, "Meta")

            class Written(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x):
                    return x.sin()

                @staticmethod
                def backward(ctx, grad):
                    torch.ops.pygraph_test.ones(grad)
                    return grad * 2

            for fn in (
                lambda x, w: (x + 1, w.sin()),
                lambda x, w: (x.t() + 1, w.sin()),
                lambda x, w: ((x + 1).reshape(2, 8), w.sin()),
                lambda x, w: (x[:2] + w[2:], w.sin()),
                lambda x, w: (torch.view_as_complex(x.reshape(8, 2)) + 1, w.sin()),
                lambda x, w: (Written.apply(x), w.sin()),
            ):
                torch._dynamo.reset()
                with config.patch(pygraph=True):
                    compiled = torch.compile(fn)
                    for _ in range(4):
                        x, w = (torch.randn(4, 4, requires_grad=True) for _ in "xw")
                        compiled(x, w)[1].sum().backward()
                        self.assertEqual(w.grad, w.cos())
                        for t in (x, w):
                            if t.grad is not None:
                                t.grad.fill_(7)
                self.assertTrue(all(not t.any() for t in calls))

    def test_what_is_plain(self):
        "What a graph may need beside tensors of its own keeps CompiledFunction's methods."
        is_plain = shortener.is_plain
        with (
            config.patch(pygraph=True),
            mock.patch.object(shortener, "is_plain", wraps=is_plain) as called,
        ):
            compiled = torch.compile(lambda x: x.sin(), backend="aot_eager")
            compiled(torch.randn(4, requires_grad=True))
        ((metadata,), _) = called.call_args
        self.assertTrue(is_plain(metadata))
        (tangent,) = metadata.subclass_tangent_meta
        for name, value in (
            ("num_mutated_inp_runtime_indices", 1),
            ("num_outputs_aliased", 1),
            ("num_intermediate_bases", 1),
            ("tokens", {"ordered": torch.empty(0)}),
            ("num_backward_tokens", 1),
            ("is_rng_op_functionalized", True),
            ("num_graphsafe_rng_states", 1),
            ("num_opaque_objects_saved_for_bw", 1),
            ("num_tensors_saved_with_no_vc_check", 1),
            ("subclass_tangent_meta", []),
            ("subclass_tangent_meta", [mock.Mock(SubclassCreationMeta)]),
            ("subclass_tangent_meta", [replace(tangent, memory_format=None)]),
        ):
            other = copy.copy(metadata)
            self.assertTrue(hasattr(other, name))
            setattr(other, name, value)
            self.assertFalse(is_plain(other), name)
        with functorch_config.patch(debug_assert=True):
            self.assertFalse(is_plain(metadata))

    def test_without_pygraph(self):
        "Nothing of this is made."
        shortener.forwards_to.clear()
        module, x = mlp(), torch.randn(3, 4)
        with (
            mock.patch.object(shortener, "specialize") as specialize,
            mock.patch.object(shortener, "runtime_wrapper") as wrapper,
            mock.patch.object(shortener, "direct") as called,
        ):
            compiled = torch.compile(module, backend="aot_eager")
            for _ in range(2):
                with self.counted() as counts:
                    y = compiled(x)
                    node = y.grad_fn
                    y.sum().backward()
            for made in (specialize, wrapper, called):
                made.assert_not_called()
        self.assertEqual(counts, [2, 1])
        self.assertEqual(len(shortener.forwards_to), 0)
        self.assertNotIn("symints", vars(type(node)))
        self.assertNotIn("apply", vars(type(node)))

    def test_first_import_in_a_mode(self):
        "Where a tensor that Python makes is another one."
        program = """
import torch
from torch._inductor import config

config.pygraph = True
x = torch.ones(3, requires_grad=True)
torch.compile(lambda x: x.sin(), backend="aot_eager")(x).sum().backward()
assert torch.equal(x.grad, x.cos())
"""
        subprocess.run([sys.executable, "-c", program], check=True)

    @parametrize("is_native", [False, True])
    def test_inductor(self, is_native):
        if is_native and native.compiled is None:
            self.skipTest("requires _replay")
        compiled_part = native.compiled if is_native else None
        module, x = mlp(), torch.randn(3, 4)
        module(x).sum().backward()
        expected = [p.grad.clone() for p in module.parameters()]
        call, calls = CompiledFxGraph.__call__, []

        def counted(graph: CompiledFxGraph, inputs: Any) -> Any:
            calls.append(graph)
            return call(graph, inputs)

        with (
            fresh_cache(),
            mock.patch.object(CompiledFxGraph, "__call__", counted),
            mock.patch.object(native, "compiled", compiled_part),
        ):
            # The second time it comes from the cache, with its backward.
            for _ in range(2):
                torch._dynamo.reset()
                compiled = torch.compile(module, options={"pygraph": True})
                for i in range(4):
                    calls.clear()
                    module.zero_grad()
                    with self.counted() as counts:
                        compiled(x).sum().backward()
                    grads = [p.grad for p in module.parameters()]
                    self.assertEqual(grads, expected)
                    if i > 1:
                        self.assertEqual(counts, [0, 0])
                        # The forward has no replay on a CPU.
                        self.assertEqual(len(calls), 1)
                with torch.profiler.profile() as profile:
                    calls.clear()
                    compiled(x).sum().backward()
                self.assertEqual(len(calls), 2)
                names = [e.name for e in profile.events()]
                self.assertEqual(sum("Call CompiledFxGraph" in n for n in names), 2)
                with mock.patch.object(
                    torch._inductor.debug, "RECORD_GRAPH_EXECUTION", True
                ):
                    calls.clear()
                    compiled(x).sum().backward()
                self.assertEqual(len(calls), 2)


instantiate_parametrized_tests(AutogradTest)


@needs_compiled
class PythonTest(ByPython, AutogradTest):
    test_inductor_is_native_False = test_inductor_is_native_True = None
    test_first_call_is_analysed_False = test_first_call_is_analysed_True = None
    test_first_import_in_a_mode = None


if __name__ == "__main__":
    run_tests()
