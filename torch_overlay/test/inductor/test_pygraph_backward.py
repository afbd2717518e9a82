# Owner(s): ["module: inductor"]
"""
What a program does with the backward of a training graph: it runs again, with hooks, in other threads,
under transforms and under other modes of autograd.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
import threading
import weakref
from typing import Any

import torch
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch._inductor.test_case import run_tests
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
from torch.utils.checkpoint import checkpoint


class BackwardTest(AutogradTestCase):
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


instantiate_parametrized_tests(BackwardTest)


@needs_compiled
class PythonBackwardTest(ByPython, BackwardTest):
    pass


if __name__ == "__main__":
    run_tests()
