# Owner(s): ["module: inductor"]
"""
Training graphs, whose autograd.Function does with pygraph only what each graph needs: the same
gradients and errors as eager mode and as without pygraph, whatever is done with them.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import subprocess
import sys
import threading
import unittest
import weakref
from dataclasses import replace
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
import torch._dynamo.testing
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import runtime_wrappers
from torch._functorch._aot_autograd.schemas import SubclassCreationMeta
from torch._inductor import config
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.pygraph import native
from torch._inductor.pygraph.calls import shortener
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import fresh_cache
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint


if TYPE_CHECKING:
    from collections.abc import Callable


def mlp(layers: int = 2) -> torch.nn.Module:
    modules = [m for _ in range(layers) for m in (torch.nn.Linear(4, 4), torch.nn.Tanh())]
    return torch.nn.Sequential(*modules)


def backend(compile_forward: Callable[..., Any], compile_backward: Callable[..., Any]) -> Any:
    "Of what takes a graph and its inputs, and gives a function of a list."

    def boxed(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
        def compiler(gm: torch.fx.GraphModule, inputs: Any) -> Any:
            run = compile_graph(gm)
            run._boxed_call = True
            return run

        return compiler

    return aot_autograd(
        fw_compiler=boxed(compile_forward),
        bw_compiler=boxed(compile_backward),
        # As Inductor.
        keep_inference_input_mutations=True,
    )


def interpreted(gm: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    def run(args: list[Any]) -> Any:
        return torch.fx.Interpreter(gm).boxed_run(args)

    return run


def outcome(call: Callable[[], Any]) -> Any:
    "What it returns, or how it fails."
    try:
        return call()
    except Exception as e:
        return type(e), str(e)


class AutogradTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        torch._dynamo.reset()
        torch.manual_seed(0)

    @contextlib.contextmanager
    def counted(self) -> Any:
        "How often CompiledFunction's own methods run: of [the forward, the backward]."
        counts = [0, 0]
        call, prologue = (
            runtime_wrappers.call_func_at_runtime_with_args,
            runtime_wrappers._backward_prologue_functional,
        )

        def counted_call(f: Any, *args: Any, **kwargs: Any) -> Any:
            name = sys._getframe(1).f_code.co_name
            counts[0] += name in ("forward", "runtime_wrapper")
            return call(f, *args, **kwargs)

        def counted_prologue(*args: Any) -> Any:
            counts[1] += 1
            return prologue(*args)

        with (
            mock.patch.object(
                runtime_wrappers, "call_func_at_runtime_with_args", counted_call
            ),
            mock.patch.object(
                runtime_wrappers, "_backward_prologue_functional", counted_prologue
            ),
        ):
            yield counts

    def check(
        self,
        fn: Callable[..., Any],
        *inputs: Any,
        use: Callable[..., Any] | None = None,
        forward: bool | None = True,
        backward: bool | None = True,
        calls: int = 4,
        eager: bool = True,
        **options: Any,
    ) -> Any:
        """
        In each of several calls, ``use(outputs)`` of ``fn`` has the same outcome, and leaves
        the same inputs and gradients, as in eager mode, if that is to be compared, and as
        without pygraph. ``forward`` and ``backward`` say whether later calls are without
        CompiledFunction's own methods; None is not to say.
        """
        use = use or (lambda outputs: self.differentiate(outputs))
        options = {"backend": "aot_eager", **options}
        found = {}
        for variant in ("eager", "stock", "pygraph") if eager else ("stock", "pygraph"):
            torch._dynamo.reset()
            torch.manual_seed(1)
            with config.patch(pygraph=variant == "pygraph"):
                f = copy.deepcopy(fn) if isinstance(fn, torch.nn.Module) else fn
                run = f if variant == "eager" else torch.compile(f, **options)
                found[variant] = []
                for i in range(calls):
                    with self.counted() as counts:
                        found[variant].append(self.step(f, run, inputs, use))
                    for count, expected in zip(counts, (forward, backward)):
                        if variant == "pygraph" and i > 1 and expected is not None:
                            self.assertEqual(count == 0, expected)
        for other in found:
            self.assertEqual(found["pygraph"], found[other], msg=other)
        return found["pygraph"]

    def differentiate(self, outputs: Any) -> None:
        if isinstance(outputs, torch.Tensor):
            outputs = [outputs]
        total = sum(
            (i + 1) * o.square().sum() for i, o in enumerate(outputs) if o.requires_grad
        )
        total.backward()

    def step(self, f: Any, run: Any, inputs: Any, use: Any) -> Any:
        copies = [
            a.detach().clone().requires_grad_(a.requires_grad)
            if isinstance(a, torch.Tensor)
            else a
            for a in inputs
        ]
        is_grad_enabled = torch.is_grad_enabled()
        outputs: list[Any] = []

        def call() -> Any:
            outputs.append(run(*copies))
            return use(outputs[0])

        used = outcome(call)
        self.assertEqual(torch.is_grad_enabled(), is_grad_enabled)
        self.assertFalse(torch._C._is_view_replay_enabled())
        leaves = [c for c in copies if isinstance(c, torch.Tensor) and c.is_leaf]
        if isinstance(f, torch.nn.Module):
            leaves += [*f.parameters(), *f.buffers()]
        grads = [None if t.grad is None else t.grad.clone() for t in leaves]
        if isinstance(f, torch.nn.Module):
            f.zero_grad()
        flat = torch.utils._pytree.tree_leaves(outputs)
        properties = [
            (o.requires_grad, o.stride(), o._is_view(), o.is_leaf)
            for o in flat
            if isinstance(o, torch.Tensor)
        ]
        same = [any(o is c for c in copies) for o in flat]
        values = [t.detach().clone() for t in leaves]
        detached = [o.detach() if isinstance(o, torch.Tensor) else o for o in flat]
        return used, detached, properties, same, values, grads

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

    def test_second_backward(self):
        def twice(y):
            y.sum().backward()
            y.sum().backward()

        for fn in (lambda x: x.sin().cos(), lambda x: x * 2):
            used, *_ = self.check(
                fn, torch.randn(4, requires_grad=True), use=twice, eager=False
            )[-1]
            if used is not None:
                self.assertIn("backward through the graph a second time", used[1])

    @parametrize("donated", [False, True])
    def test_retained_graph(self, donated):
        def use(y):
            y.sum().backward(retain_graph=True)
            y.sum().backward()

        with functorch_config.patch(donated_buffer=donated):
            self.check(
                lambda x: (x.sin() * x.cos()).exp(),
                torch.randn(4, requires_grad=True),
                use=use,
                backward=False,
            )

    def test_graph_retained_after_it_was_compiled_to_donate(self):
        "A backward that was compiled to overwrite what it is given does not run."
        found = []
        for pygraph in (False, True):
            torch._dynamo.reset()
            with config.patch(pygraph=pygraph):
                compiled = torch.compile(
                    lambda x: (x @ x).tanh() @ x, backend=self.partitioned()
                )
                outcomes = []
                for retain_graph in (False, False, True, False):
                    x = torch.ones(4, 4, requires_grad=True)
                    y = compiled(x).sum()
                    used = outcome(lambda: y.backward(retain_graph=retain_graph))
                    outcomes.append((used, x.grad))
                found.append(outcomes)
        self.assertEqual(*found)
        self.assertIn("donated", found[1][2][0][1])
        self.assertIsNotNone(found[1][3][1])

    @staticmethod
    def partitioned() -> Any:
        "It saves what is between two products."
        return aot_autograd(
            fw_compiler=boxed_nop, partition_fn=min_cut_rematerialization_partition
        )

    @parametrize("retain_graph", [False, True])
    def test_double_backward(self, retain_graph):
        x = torch.randn(4, requires_grad=True)

        def use(y):
            (g,) = torch.autograd.grad(
                y.sum(), inputs[0], create_graph=True, retain_graph=retain_graph
            )
            self.assertTrue(g.requires_grad)
            values.append(g.detach())
            g.sum().backward()

        found = []
        for pygraph in (False, True):
            torch._dynamo.reset()
            values: list[Any] = []
            with config.patch(pygraph=pygraph), functorch_config.patch(donated_buffer=False):
                compiled = torch.compile(lambda x: x.sin(), backend="aot_eager")
                outcomes = []
                for i in range(4):
                    inputs = [x.detach().clone().requires_grad_()]
                    y = compiled(*inputs)
                    outcomes.append(outcome(lambda: use(y)))
                    y = compiled(*inputs)
                    y.sum().backward()
                    self.assertEqual(inputs[0].grad, x.cos())
            found.append((outcomes, values))
        self.assertEqual(*found)
        self.assertEqual(found[1][1], [x.cos().detach()] * 4)
        self.assertIn("does not currently support double backward", found[1][0][-1][1])

    def test_saved_input_that_was_modified(self):
        for pygraph in (False, True):
            torch._dynamo.reset()
            with config.patch(pygraph=pygraph):
                compiled = torch.compile(lambda x, w: (x * w).sin(), backend="aot_eager")
                for _ in range(4):
                    x, w = torch.randn(4), torch.randn(4, requires_grad=True)
                    y = compiled(x, w)
                    x.add_(1)
                    with self.assertRaisesRegex(RuntimeError, "inplace operation"):
                        y.sum().backward()

    def test_saved_views(self):
        "Of a view of an input the graph saves a tensor that is no view."
        base = torch.randn(8)
        found = []
        for pygraph in (False, True):
            torch._dynamo.reset()
            with config.patch(pygraph=pygraph):
                compiled = torch.compile(lambda x, w: (x * w).sin(), backend="aot_eager")
                saved = []
                for _ in range(3):
                    w = torch.randn(4, requires_grad=True)
                    y = compiled(base[4:], w)
                    saved.append([t._is_view() for t in y.grad_fn.saved_tensors])
                    y.sum().backward()
                    self.assertEqual(w.grad, base[4:] * (base[4:] * w).cos())
                found.append(saved)
        self.assertEqual(*found)
        self.assertFalse(any(map(any, found[1])))

    def test_hooks_of_saved_tensors(self):
        found = []
        for pygraph in (False, True):
            torch._dynamo.reset()
            torch.manual_seed(0)
            calls: list[str] = []

            def pack(x):
                calls.append("pack")
                return x.numpy().copy()

            def unpack(x):
                calls.append("unpack")
                return torch.from_numpy(x)

            with config.patch(pygraph=pygraph):
                compiled = torch.compile(lambda x, w: (x * w).sin(), backend="aot_eager")
                for i in range(4):
                    x, w = torch.randn(4), torch.randn(4, requires_grad=True)
                    hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
                    with hooks if i % 2 else contextlib.nullcontext():
                        y = compiled(x, w)
                    y.sum().backward()
                    self.assertEqual(w.grad, x * (x * w).cos())
            found.append(calls)
        self.assertEqual(*found)
        self.assertTrue(found[1])

    def test_hooks_that_a_graph_inlines(self):
        "They are applied once."
        pack, unpack = (torch.fx.symbolic_trace(lambda x, k=k: x * k) for k in (2, 3))
        x = torch.randn(4)
        found = []
        for pygraph in (False, True):
            torch._dynamo.reset()
            with (
                config.patch(pygraph=pygraph),
                functorch_config.patch(saved_tensors_hooks_filtering_mode="all"),
            ):
                compiled = torch.compile(lambda x, w: (x * w).sin(), backend="aot_eager")
                grads = []
                for _ in range(3):
                    w = torch.ones(4, requires_grad=True)
                    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                        y = compiled(x, w)
                    y.sum().backward()
                    grads.append(w.grad)
                found.append(grads)
        self.assertEqual(*found)
        self.assertNotEqual(found[1][0], x * x.cos())

    def test_hooks_of_gradients(self):
        module = mlp()
        found = []
        for pygraph in (False, True):
            torch._dynamo.reset()
            calls: list[Any] = []
            m = copy.deepcopy(module)
            for name, p in m.named_parameters():
                p.register_hook(lambda g: g * 2)
                p.register_post_accumulate_grad_hook(
                    lambda p, name=name: calls.append((name, p.grad.clone()))
                )
            with config.patch(pygraph=pygraph):
                compiled = torch.compile(m, backend="aot_eager")
                for _ in range(4):
                    y = compiled(torch.ones(3, 4))
                    y.register_hook(lambda g: g * 3)
                    y.grad_fn.register_hook(lambda *args: calls.append(args))
                    y.grad_fn.register_prehook(lambda g: calls.append(g))
                    y.sum().backward()
                    m.zero_grad()
            found.append(calls)
        self.assertEqual(*found)
        self.assertEqual(len(found[1]), 4 * (4 + 2))

    @parametrize("in_backward", [False, True])
    def test_autocast(self, in_backward):
        "The backward is not cast again, wherever it is called."
        found = []
        for pygraph in (False, True):
            torch._dynamo.reset()
            torch.manual_seed(0)
            seen: list[bool] = []

            def recorded(gm: torch.fx.GraphModule) -> Any:
                run = interpreted(gm)

                def call(args: list[Any]) -> Any:
                    seen.append(torch.is_autocast_enabled("cpu"))
                    return run(args)

                return call

            module = mlp()
            with config.patch(pygraph=pygraph):
                compiled = torch.compile(module, backend=backend(recorded, recorded))
                grads = []
                for _ in range(4):
                    with torch.autocast("cpu", torch.bfloat16):
                        y = compiled(torch.ones(3, 4))
                    with (
                        torch.autocast("cpu", torch.bfloat16, enabled=in_backward),
                        self.counted() as counts,
                    ):
                        y.sum().backward()
                        self.assertEqual(torch.is_autocast_enabled("cpu"), in_backward)
                    grads.append([y.dtype, *(p.grad for p in module.parameters())])
                    module.zero_grad()
                self.assertEqual(counts[1] == 0, pygraph)
            self.assertEqual(len(seen), 8)
            self.assertFalse(any(seen))
            found.append(grads)
        self.assertEqual(*found)

    def test_grad_mode(self):
        def fn(x):
            with torch.enable_grad():
                return x.sin()

        x = torch.randn(4, requires_grad=True)
        with torch.no_grad():
            self.check(fn, x, use=lambda y: torch.autograd.backward(y, torch.ones(4)))

        def fn(x):
            y = x.sin()
            torch._C._set_grad_enabled(False)
            return y

        found = []
        for pygraph in (False, True):
            torch._dynamo.reset()
            with config.patch(pygraph=pygraph):
                compiled = torch.compile(fn, backend="aot_eager")
                modes = []
                for _ in range(3):
                    with torch.enable_grad():
                        y = compiled(x)
                        modes.append((torch.is_grad_enabled(), y.requires_grad))
                found.append(modes)
        self.assertEqual(*found)
        self.assertEqual(found[1], [(False, True)] * 3)

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

    def test_functorch(self):
        x = torch.randn(4, requires_grad=True)

        def in_vmap(y):
            return torch.vmap(
                lambda g: torch.autograd.grad(y, xs[0], g, retain_graph=True)[0]
            )(torch.eye(4))

        def in_grad(y):
            return torch.func.grad(
                lambda g: torch.autograd.grad(y, xs[0], g)[0].sum()
            )(torch.ones(4))

        def batched(y):
            return torch.autograd.grad(y, xs[0], torch.eye(4), is_grads_batched=True)

        for use in (in_vmap, in_grad, batched):
            found = []
            for pygraph in (False, True):
                torch._dynamo.reset()
                with config.patch(pygraph=pygraph), functorch_config.patch(donated_buffer=False):
                    compiled = torch.compile(lambda x: x.sin(), backend="aot_eager")
                    for _ in range(3):
                        xs = [x.detach().clone().requires_grad_()]
                        compiled(*xs).sum().backward()
                    found.append(outcome(lambda: use(compiled(*xs))))
            self.assertEqual(*found)
            if use is not batched:
                self.assertIn("within vmap/grad/vjp", found[1][1])

        def transformed(x):
            return torch.func.grad(lambda x: compiled(x).sum())(x)

        found = []
        for pygraph in (False, True):
            torch._dynamo.reset()
            with config.patch(pygraph=pygraph):
                compiled = torch.compile(lambda x: x.sin(), backend="aot_eager")
                for _ in range(3):
                    compiled(x).sum().backward()
                found.append(outcome(lambda: transformed(x.detach())))
        self.assertEqual(*found)

    @unittest.skipIf(native.compiled is None, "requires _replay")
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

    def test_deterministic_algorithms(self):
        found = []
        for pygraph in (False, True):
            torch._dynamo.reset()
            with config.patch(pygraph=pygraph):
                compiled = torch.compile(lambda x: x.sin(), backend="aot_eager")
                outcomes = []
                for deterministic in (False, False, True, False):
                    x = torch.ones(4, requires_grad=True)
                    y = compiled(x)
                    torch.use_deterministic_algorithms(deterministic)
                    try:
                        outcomes.append((outcome(lambda: y.sum().backward()), x.grad))
                    finally:
                        torch.use_deterministic_algorithms(False)
                found.append(outcomes)
        self.assertEqual(*found)
        self.assertIn("use_deterministic_algorithms", found[1][2][0][1])

    def test_compiled_autograd(self):
        module = mlp()
        x = torch.randn(3, 4)
        module(x).sum().backward()
        expected = [p.grad.clone() for p in module.parameters()]
        module.zero_grad()
        with config.patch(pygraph=True):
            compiled = torch.compile(module, backend="aot_eager")
            for i in range(6):
                counters.clear()
                context = (
                    compiled_autograd._enable(torch.compile(backend="aot_eager"))
                    if i % 2
                    else contextlib.nullcontext()
                )
                y = compiled(x)
                with context:
                    y.sum().backward()
                self.assertEqual([p.grad for p in module.parameters()], expected)
                self.assertEqual(counters["compiled_autograd"]["captures"], i == 1)
                module.zero_grad()

    def test_compiled_autograd_around_the_forward(self):
        x = torch.randn(4, requires_grad=True)
        with config.patch(pygraph=True):
            with torch._dynamo.config.patch(compiled_autograd=True):

                @torch.compile(backend="aot_eager")
                def step(x):
                    loss = x.sin().sum()
                    loss.backward()
                    return loss

                for _ in range(3):
                    x.grad = None
                    step(x)
                    self.assertEqual(x.grad, x.cos())

    def test_hooks_in_the_graph(self):
        "Compiled autograd is given what they are."

        def fn(x):
            y = x.sin()
            y.register_hook(lambda g: g * 3)
            return y * 2

        with config.patch(pygraph=True):
            compiled = torch.compile(fn, backend="aot_eager", fullgraph=True)
            for _ in range(3):
                x = torch.randn(4, requires_grad=True)
                with compiled_autograd._enable(torch.compile(backend="aot_eager")):
                    compiled(x).sum().backward()
                self.assertEqual(x.grad, 6 * x.cos())

    @parametrize("use_reentrant", [False, True])
    @parametrize("inside", [False, True])
    def test_checkpoint(self, use_reentrant, inside):
        if inside and use_reentrant:
            self.skipTest("does not compile")
        module = mlp()

        class Checkpointed(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = copy.deepcopy(module)

            def forward(self, x):
                return checkpoint(self.inner, x, use_reentrant=use_reentrant)

        x = torch.randn(3, 4, requires_grad=True)
        module(x).sum().backward()
        expected = [x.grad, *(p.grad for p in module.parameters())]
        with config.patch(pygraph=True):
            outer = Checkpointed()
            if inside:
                run = torch.compile(outer, backend="aot_eager")
            else:
                run = outer
                outer.inner = torch.compile(outer.inner, backend="aot_eager")
            for _ in range(4):
                x.grad = None
                outer.zero_grad()
                run(x).sum().backward()
                grads = [x.grad, *(p.grad for p in outer.parameters())]
                self.assertEqual(grads, expected)

    def test_anomaly_mode(self):
        def fn(x):
            return x.sqrt()

        x = torch.zeros(4, requires_grad=True)
        found = []
        for pygraph in (False, True):
            torch._dynamo.reset()
            with config.patch(pygraph=pygraph):
                compiled = torch.compile(fn, backend="aot_eager")
                for _ in range(3):
                    compiled(x).sum().backward()
                with torch.autograd.detect_anomaly(check_nan=True):
                    y = compiled(x) * 0
                    found.append(outcome(lambda: y.sum().backward()))
        self.assertEqual(*found)
        self.assertIn("nan values in its 0th output", found[1][1])

    def test_profiler(self):
        module, x = mlp(), torch.randn(3, 4)
        found = []
        for pygraph in (False, True):
            torch._dynamo.reset()
            with config.patch(pygraph=pygraph):
                compiled = torch.compile(module, backend="aot_eager")
                for _ in range(3):
                    compiled(x).sum().backward()
                with torch.profiler.profile() as profile:
                    compiled(x).sum().backward()
                names = [e.name for e in profile.events()]
            found.append({n for n in names if "AOT" in n or "Compiled" in n})
        self.assertEqual(*found)
        self.assertIn("AOTDispatcher Runtime Wrapper Prologue", found[1])
        self.assertIn("CompiledFunctionBackward", found[1])

    def test_sizes_that_vary(self):
        def fn(x, w):
            return (x * w).sin().reshape(-1, x.shape[0]), x.shape[0] * w

        for n in (3, 5, 6):
            x, w = torch.randn(n, 4), torch.randn(n, 4, requires_grad=True)
            self.check(
                fn, x, w, forward=None, backward=None, dynamic=True, eager=False
            )
        with config.patch(pygraph=True):
            torch._dynamo.reset()
            compiled = torch.compile(fn, backend="aot_eager", dynamic=True)
            for n in (3, 5, 6, 3, 5):
                x, w = torch.randn(n, 4), torch.randn(n, 4, requires_grad=True)
                other = w.detach().clone().requires_grad_()
                self.differentiate(compiled(x, w))
                self.differentiate(fn(x, other))
                self.assertEqual(w.grad, other.grad)

    def test_custom_functions(self):
        class Scale(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, factor):
                ctx.factor = factor
                # Not by save_for_backward.
                ctx.x = x
                return x * factor

            @staticmethod
            def backward(ctx, g):
                return g * ctx.factor + 0 * ctx.x, None

        def fn(x):
            return Scale.apply(x.sin(), 3)

        self.check(
            fn, torch.randn(4, requires_grad=True), forward=None, backward=None
        )

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

    def test_threads(self):
        module, x = mlp(), torch.randn(3, 4)
        module(x).sum().backward()
        expected = [p.grad.clone() for p in module.parameters()]
        with config.patch(pygraph=True):
            compiled = torch.compile(module, backend="aot_eager")
            compiled(x)
            found = []

            def run() -> None:
                for _ in range(20):
                    y = compiled(x).sum()
                    found.append(torch.autograd.grad(y, [*module.parameters()]))

            threads = [threading.Thread(target=run) for _ in range(4)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
        self.assertEqual(len(found), 80)
        for grads in found:
            self.assertEqual([*grads], expected)

    def test_what_is_saved_is_free_when_the_backward_runs(self):
        "Nobody but the graph has it then, nor a gradient that was copied for the graph."
        alive: list[int] = []
        saved: list[Any] = []

        def forward(gm: torch.fx.GraphModule) -> Any:
            run = interpreted(gm)

            def call(args: list[Any]) -> Any:
                outs = run(args)
                saved[:] = [weakref.ref(t.untyped_storage()) for t in outs[1:]]
                return outs

            return call

        def backward(gm: torch.fx.GraphModule) -> Any:
            run = interpreted(gm)

            def call(args: list[Any]) -> Any:
                refs = [weakref.ref(t) for t in args]
                own = [t.clone() for t in args]
                args.clear()
                alive.append(sum(ref() is not None for ref in refs))
                return run(own)

            return call

        with config.patch(pygraph=True):
            compiled = torch.compile(
                lambda x: x.sin().exp().tanh(), backend=backend(forward, backward)
            )
            for _ in range(4):
                x = torch.randn(4, requires_grad=True)
                with self.counted() as counts:
                    compiled(x * 2).sum().backward()
            self.assertEqual(counts, [0, 0])
        self.assertEqual(alive[2:], [0, 0])

    def test_nothing_is_leaked(self):
        with config.patch(pygraph=True):
            module = mlp()
            compiled = torch.compile(module, backend="aot_eager")
            x = torch.randn(3, 4)
            objects = [x, *module.parameters()]

            def step() -> None:
                compiled(x).sum().backward()
                module.zero_grad()
                # Not differentiated.
                compiled(x)

            for _ in range(3):
                step()
            gc.collect()
            before = [sys.getrefcount(o) for o in objects]
            for _ in range(5):
                step()
            gc.collect()
            self.assertEqual([sys.getrefcount(o) for o in objects], before)

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
            ("num_symints_saved_for_bw", 1),
            ("num_opaque_objects_saved_for_bw", 1),
            ("num_tensors_saved_with_no_vc_check", 1),
            ("dynamic_saved_tensors_idxs", {0: {0}}),
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

    def test_write_to_a_scalar_that_nobody_reads(self):
        "It has the value of an input that is specialized."

        def count(x, k, n):
            y = x.sin()[:k].cos()
            n.add_(1)
            return y * 2

        compiled = torch.compile(count, options={"pygraph": True})
        n = torch.tensor(0.0, dtype=torch.float64)
        for i in range(4):
            x = torch.ones(8, requires_grad=True)
            compiled(x, torch.tensor(2 + i), n).sum().backward()
            self.assertEqual(n.item(), i + 1)

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


@unittest.skipIf(native.compiled is None, "no other than AutogradTest")
class PythonTest(AutogradTest):
    "Where nothing is compiled."

    test_inductor_is_native_False = test_inductor_is_native_True = None
    test_first_call_is_analysed_False = test_first_call_is_analysed_True = None
    test_first_import_in_a_mode = test_write_to_a_scalar_that_nobody_reads = None

    def setUp(self) -> None:
        super().setUp()
        patch = mock.patch.object(native, "compiled", None)
        patch.start()
        self.addCleanup(patch.stop)


if __name__ == "__main__":
    run_tests()
