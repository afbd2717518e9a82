# Owner(s): ["module: inductor"]
"""
item() of a CPU tensor whose value only computes: Dynamo's graph takes it as a float, and no value is
guarded or compiled into it.
"""

from __future__ import annotations

import math
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
import torch._dynamo
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.pygraph_common import aot_eager, DynamoTestCase, PYGRAPH
from torch.utils.checkpoint import checkpoint


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


global_scale = torch.tensor(1.0)


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(1.0))
        self.shift = torch.tensor(1.0, dtype=torch.float64)
        self.kept = [torch.nn.Parameter(torch.tensor(1.0), requires_grad=False)]

    def forward(self, x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return x * self.scale.item() + self.shift.item() - self.kept[0].item() / x

    def set(self, value: float) -> None:
        for t in (self.scale, self.shift, self.kept[0]):
            t.fill_(value)


def of_closure() -> tuple[Callable[..., Any], Callable[[float], Any]]:
    scale = torch.tensor(1.0)
    return lambda x, s: x * scale.item(), scale.fill_


def of_global(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return x * global_scale.item()


def with_context(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x * s.item()
    return y + x


def in_place(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    v = s.item()
    y = x.clone()
    y *= v
    return y.add_(v).mul_(v)


def written_after(x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * s.item()
    s.add_(1)
    return y, y * s


def rebound(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    y = x * s.item()
    s = s + 1
    return y * s


# What may be done to the value of a tensor on the CPU.
OPERANDS = {
    "right": lambda x, s: x * s.item() + s.item() - s.item() / x,
    "left": lambda x, s: s.item() - s.item() / (s.item() * (s.item() + x)),
    "functions": lambda x, s: torch.mul(x, s.item()).add(s.item()).div(s.item()),
    "float": lambda x, s: x * float(s),
    "tensor_too": lambda x, s: (x + s) * s.item(),
    "integers": lambda x, s: x.int() * s.item(),
    "inner_function": lambda x, s: (lambda t: x * t.item())(s),
    "with_context": with_context,
    "in_place": in_place,
    "written_after": written_after,
    "rebound": rebound,
    "of_global": of_global,
}


def with_data(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    s.data.add_(1)
    return x * s.item()


def with_other_data(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    s.data = torch.full_like(s, 3)
    return x * s.item()


def written_twice(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    y = x * s.item()
    s.mul_(2)
    y = y + s.item()
    s.copy_(y.sum())
    return y * s.item()


def alias_written(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    s.view(1)[0] = 3
    return x * s.item()


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        ctx.scale = s.item()
        return x * ctx.scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.scale, None


def kept_by_program(x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    found = {}
    found["scale"] = s.item()
    return x * found["scale"], found


def in_try(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    try:
        return x * s.item() if s.item() < 1 else x / 0 * s.item()
    finally:
        x.sin_()


# With these it is as without PyGraph: the graph breaks where the value is read.
BREAKS = {
    "branch": lambda x, s: x * s.item() if s.item() > 0.5 else x + 1,
    "branch_later": lambda x, s: (x * s.item()) * (2 if s.item() > 0.5 else 3),
    "integer": lambda x, s: x * int(s.item() * 3),
    "size": lambda x, s: x.new_zeros(int(s) + 2),
    "boolean": lambda x, s: x * s.item() if s else x,
    "python": lambda x, s: x * (s.item() + 1),
    "python_of_two": lambda x, s: x * (s.item() * s.item()),
    "function": lambda x, s: x * math.exp(s.item()),
    "maximum": lambda x, s: x * max(s.item(), 0.5),
    "comparison": lambda x, s: x > s.item(),
    "power": lambda x, s: x ** s.item(),
    "clamp": lambda x, s: x.clamp(max=s.item()),
    "alpha": lambda x, s: torch.add(x, s, alpha=s.item()),
    "complex": lambda x, s: (x + 1j) * s.item(),
    "full": lambda x, s: x + torch.full_like(x, s.item()),
    "returned": lambda x, s: (x * s.item(), s.item()),
    "dictionary": lambda x, s: x * {s.item(): s.item()}[s.item()],
    "element": lambda x, s: x * s.view(1)[0].item(),
    "written_before": lambda x, s: s.add_(1) * x * s.item(),
    "written_twice": written_twice,
    "with_data": with_data,
    "with_other_data": with_other_data,
    "alias_written": alias_written,
    "result": lambda x, s: x * (s + 1).item(),
    "function_of_autograd": lambda x, s: Function.apply(x, s),
    "checkpoint": lambda x, s: checkpoint(lambda y: y * s.item(), x, use_reentrant=False),
    "kept_by_program": kept_by_program,
    "printed": lambda x, s: (x * s.item(), f"{s.item():.3f}"),
    "formatted": lambda x, s: (x * s.item(), "%.3f" % float(s)),  # noqa: UP031
    "in_try": in_try,
}

VALUES = (0.3, 1.0, 0.0, -0.0, -2.5, 0.7, float("inf"), float("nan"), 1e-45, 0.1)
FINITE = (0.3, 1.0, 0.0, 0.7, 0.1)


class ItemTest(DynamoTestCase):
    """The value of a tensor on the CPU is an input of the graph, where nobody looks at it."""

    def check(
        self,
        fn: Callable[..., Any],
        values: Sequence[float] = VALUES,
        dtype: torch.dtype = torch.float32,
        change: Callable[[float], Any] = global_scale.fill_,
        **options: Any,
    ) -> None:
        compiled = self.compile(fn, **options)
        for value in values:
            x = torch.rand(5)
            s = torch.tensor(value, dtype=dtype)
            inputs = x.clone(), s.clone()
            change(value)
            actual = compiled(*inputs)
            change(value)
            self.assertEqual(actual, fn(x, s), atol=0, rtol=0, exact_dtype=True)
            self.assertEqual(inputs, (x, s), atol=0, rtol=0)

    def assertOneGraph(self) -> None:
        self.assertEqual((self.num_graphs(), counters["graph_break"]), (1, {}))

    @parametrize("name", list(OPERANDS))
    def test_operands(self, name: str) -> None:
        self.check(OPERANDS[name])
        self.assertOneGraph()

    @parametrize("dtype", (torch.float64, torch.bfloat16, torch.float16))
    def test_dtypes(self, dtype: torch.dtype) -> None:
        self.check(OPERANDS["right"], dtype=dtype)
        self.assertOneGraph()

    def test_module(self) -> None:
        module = Scale()
        self.check(module, change=module.set)
        self.assertOneGraph()

    def test_closure(self) -> None:
        fn, change = of_closure()
        self.check(fn, change=change)
        self.assertOneGraph()

    def test_first_value_is_none_that_a_symbol_could_have(self) -> None:
        for value in VALUES:
            torch._dynamo.reset()
            counters.clear()
            self.check(OPERANDS["right"], (value, 0.3))
            self.assertOneGraph()

    @parametrize("mode", (torch.no_grad, torch.inference_mode))
    def test_modes(self, mode: Callable[[], Any]) -> None:
        with mode():
            self.check(OPERANDS["right"])
        self.assertOneGraph()

    @parametrize("dynamic", (False, True))
    def test_dynamic(self, dynamic: bool) -> None:
        fn = OPERANDS["right"]
        compiled = torch.compile(fn, options=PYGRAPH, dynamic=dynamic)
        for n, value in enumerate(VALUES):
            x, s = torch.rand(n + 3 if dynamic else 3), torch.tensor(value)
            self.assertEqual(compiled(x, s), fn(x, s), atol=0, rtol=0)
        self.assertOneGraph()

    def test_no_guard_reads_it(self) -> None:
        for dtype in (torch.float32, torch.float64):
            torch._dynamo.reset()
            fn = lambda x, s: x * s.item()  # noqa: E731
            self.check(fn, dtype=dtype)
            (entry,) = _debug_get_cache_entry_list(fn.__code__)
            self.assertNotIn("L['s'].item", str(entry.guard_manager))

    @parametrize("name", list(BREAKS))
    def test_breaks(self, name: str) -> None:
        self.check(BREAKS[name], FINITE)
        graphs = self.num_graphs()
        torch._dynamo.reset()
        counters.clear()
        self.check(BREAKS[name], FINITE, pygraph=False)
        # Fewer, where it is read again after the graph was broken.
        self.assertLessEqual(graphs, self.num_graphs())

    def test_alias(self) -> None:
        "Another argument that is the tensor, or has its memory."

        def fn(x: torch.Tensor, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            t += 1
            return x * s.item()

        x, s = torch.rand(5), torch.tensor(2.0)
        for t in (s, s.detach(), s.view(1), s.data, torch.tensor(0.0)):
            torch._dynamo.reset()
            expected = x * (s.item() + (t.data_ptr() == s.data_ptr()))
            self.assertEqual(self.compile(fn)(x, s, t), expected)

    def test_gradients_are_not_lost(self) -> None:
        def fn(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
            return x * s.item() + s

        compiled = self.compile(fn)
        for value in FINITE:
            s = torch.tensor(value, requires_grad=True)
            x = torch.rand(3, requires_grad=True)
            actual = torch.autograd.grad(compiled(x, s).sum(), (x, s))
            expected = torch.autograd.grad(fn(x, s).sum(), (x, s))
            self.assertEqual(actual, expected)
        self.assertOneGraph()

    @parametrize("joined", (False, True))
    def test_two_losses(self, joined: bool) -> None:
        "Of two graphs the one is called backward after the other."

        def fn(x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            first = x.sin().pow(2).sum()
            second = (s.item() * (first + x if joined else x)).cos().sum()
            return first, second

        compiled = self.compile(fn)
        with mock.patch.object(torch._TorchCompileInductorWrapper, "__call__", aot_eager):
            for value in FINITE:
                x, grads = torch.rand(3, requires_grad=True), []
                for f in (fn, compiled):
                    for loss in reversed(f(x, torch.tensor(value))):
                        grads.append(torch.autograd.grad(loss, x, retain_graph=joined)[0])
                self.assertEqual(grads[:2], grads[2:])
        self.assertGreater(self.num_graphs(), 1)

    def test_gradient_of_a_result(self) -> None:
        "Of two graphs the first gives it, and the second takes it."

        def fn(x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = x.sin()
            return hidden, (s.item() * hidden).cos().sum()

        compiled = self.compile(fn)
        with mock.patch.object(torch._TorchCompileInductorWrapper, "__call__", aot_eager):
            for value in FINITE:
                x, grads = torch.rand(3, requires_grad=True), []
                for f in (fn, compiled):
                    hidden, loss = f(x, torch.tensor(value))
                    hidden.retain_grad()
                    loss.backward()
                    grads.append(hidden.grad)
                self.assertEqual(*grads)

    @parametrize("transform", (torch.func.grad, torch.func.vmap))
    def test_functorch(self, transform: Callable[..., Any]) -> None:
        self.check(lambda x, s: transform(lambda y: (y * s.item()).sum())(x), FINITE)

    def test_others_break(self) -> None:
        fn = lambda x, s: x * s.item()  # noqa: E731
        backend = CompileCounter()
        for compiled in (torch.compile(fn, backend=backend), torch.compile(fn)):
            torch._dynamo.reset()
            counters.clear()
            for value in FINITE:
                x, s = torch.rand(3), torch.tensor(value)
                self.assertEqual(compiled(x, s), fn(x, s))
            self.assertGreater(sum(counters["graph_break"].values()), 0)

    def test_fullgraph(self) -> None:
        "As stock does it, with a symbol that has no value."
        fn = OPERANDS["right"]
        compiled = torch.compile(fn, options=PYGRAPH, fullgraph=True)
        for value in FINITE:
            x, s = torch.rand(3), torch.tensor(value)
            self.assertEqual(compiled(x, s), fn(x, s))
        self.assertOneGraph()


instantiate_parametrized_tests(ItemTest)


if __name__ == "__main__":
    run_tests()
