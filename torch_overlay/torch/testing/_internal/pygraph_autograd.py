"""Compares what training graphs compute with eager mode and with stock torch.compile."""

from __future__ import annotations

import contextlib
import copy
import sys
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch._aot_autograd import runtime_wrappers
from torch._inductor import config
from torch._inductor.test_case import TestCase


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


class AutogradTestCase(TestCase):
    "Compares graphs of training with eager mode and with stock torch.compile."

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

    @staticmethod
    def partitioned() -> Any:
        "It saves what is between two products."
        return aot_autograd(
            fw_compiler=boxed_nop, partition_fn=min_cut_rematerialization_partition
        )
