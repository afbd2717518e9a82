# Owner(s): ["module: inductor"]
"""Branches on tensors: what is returned, differentiated, changed and raised is that of eager mode."""

from __future__ import annotations

import copy
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
import torch._dynamo
from torch._dynamo.utils import counters
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, subtest
from torch.testing._internal.inductor_utils import HAS_CPU


if TYPE_CHECKING:
    from collections.abc import Callable


def as_is(_self: Any, gm: torch.fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
    return gm.forward


def number_of_graphs() -> int:
    return counters["stats"]["unique_graphs"]


class BranchTest(TestCase):
    """Compares with eager mode. Graphs run as Dynamo made them, unless a test compiles them."""

    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        counters.clear()
        self.backend = mock.patch("torch._TorchCompileInductorWrapper.__call__", as_is)
        self.backend.start()
        self.addCleanup(self.backend.stop)

    def check(self, fn: Callable[..., Any], calls: list[tuple[Any, ...]], *, graphs: int, **options: Any) -> None:
        """Call ``fn`` with copies of each arguments, eagerly and compiled, and compare all that a program can see."""
        compiled = torch.compile(fn, options={"pygraph": True}, **options)
        torch.manual_seed(0)
        expected = [outcome(fn, args) for args in calls]
        torch.manual_seed(0)
        found = [outcome(compiled, args) for args in calls]
        for one, other in zip(expected, found):
            self.assertEqual(one, other)
        self.assertEqual(number_of_graphs(), graphs)


def outcome(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the result or the error, gradients, arguments afterwards and the state of the generator."""
    args = copy.deepcopy(args)
    leaves = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
    leaves += list(fn.parameters()) if isinstance(fn, torch.nn.Module) else []
    leaves = [t for t in leaves if t.requires_grad]
    for leaf in leaves:
        leaf.grad = None
    try:
        result = fn(*args)
    except Exception as e:  # noqa: BLE001
        return type(e), str(e), args
    tensors = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    needs = [t.requires_grad for t in tensors]
    total = sum(t.float().sum() * (i + 1) for i, t in enumerate(tensors) if t.requires_grad)
    if any(needs):
        total.backward()
    gradients = [None if t.grad is None else t.grad.clone() for t in leaves]
    inputs = [[i for i, a in enumerate(args) if a is t] for t in tensors]
    plain = torch.utils._pytree.tree_map(lambda t: t.detach().clone() if isinstance(t, torch.Tensor) else t, result)
    return plain, needs, gradients, inputs, args, torch.get_rng_state()


class Rotary(torch.nn.Module):
    """The rotary embedding of Phi-4, which has other frequencies for long sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = 8

    def forward(self, x, position_ids=None, past=0):
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device) + past
            position_ids = position_ids.unsqueeze(0)
        length = torch.max(position_ids) + 1
        if length > self.limit:
            if not hasattr(self, "long"):
                self.long = self.limit * 2
            frequency = 0.5
        else:
            frequency = 2.0
        return x * frequency * position_ids


def any_above(x):
    if (torch.arange(x.shape[0]) > 5).any():
        return x + 1
    return x - 1


def all_below(x):
    return x + 1 if bool_all(torch.arange(1, x.shape[0])) and True else x - 1


def bool_all(positions):
    return not (positions >= 6).any()


def value_of_or(x):
    return x + ((torch.arange(x.shape[0]).max() > 3) or 7)


def nested_logic(x):
    n = torch.arange(x.shape[0]).max()
    if (n > 2) & (n < 6) | ~(n > 0):
        return x.sin()
    return x.cos()


class GuardTest(BranchTest):
    """Where sizes decide, only the path that is taken is traced."""

    @parametrize("dynamic", (False, None, True))
    def test_longrope(self, dynamic):
        model = Rotary()
        x = torch.randn(2, 4)
        with torch.no_grad():
            compiled = torch.compile(model, options={"pygraph": True}, dynamic=dynamic)
            for size in (4, 5, 6, 7):
                x = torch.randn(2, size)
                self.assertEqual(compiled(x), model(x))
            self.assertFalse(hasattr(model, "long"))
            self.assertEqual(number_of_graphs(), {False: 4, None: 2, True: 1}[dynamic])
            for size in (8, 9, 20, 30):
                x = torch.randn(2, size)
                self.assertEqual(compiled(x), Rotary()(x))
            self.assertEqual(model.long, 16)
            self.assertEqual(compiled(x, None, 3), Rotary()(x, None, 3))
        self.assertEqual(counters["resumes"], {})

    @parametrize("fn", [subtest(f, name=f.__name__) for f in (any_above, all_below, value_of_or, nested_logic)])
    @parametrize("dynamic", (False, True))
    def test_sizes(self, fn, dynamic):
        calls = [(torch.randn(n, requires_grad=True),) for n in (5, 7, 2, 9)]
        compiled = torch.compile(fn, options={"pygraph": True}, dynamic=dynamic)
        for args in calls:
            self.assertEqual(outcome(fn, args), outcome(compiled, args))
        self.assertEqual(counters["resumes"], {})

    def test_written(self):
        """A write to what sizes told makes it unknown."""

        def fn(x):
            positions = torch.arange(x.shape[0])
            positions[0] = 9
            return x + 1 if positions.max() > 5 else x - 1

        def of_alias(x):
            positions = torch.arange(x.shape[0])
            positions.data[0] = 9
            return x + 1 if positions.max() > 5 else x - 1

        for f in (fn, of_alias):
            torch._dynamo.reset()
            self.assertEqual(torch.compile(f, options={"pygraph": True})(torch.ones(3)), torch.ones(3) + 1)

    def test_other_dtypes(self):
        """Elements that are converted or rounded are unknown."""

        def fn(x):
            return x + 1 if torch.arange(x.shape[0]).to(torch.uint8).max() > 200 else x - 1

        x = torch.ones(258)
        self.assertEqual(torch.compile(fn, options={"pygraph": True})(x), fn(x))

    def test_probability_zero(self):
        """A random number is drawn though the outcome is known."""

        def fn(x, layerdrop):
            for i in range(3):
                dropped = torch.rand([])
                if dropped < layerdrop:
                    continue
                x = x * 2 + i
            return x

        calls = [(torch.ones(3, requires_grad=True), 0.0)] * 3
        with torch._inductor.config.patch(fallback_random=True):
            self.check(fn, calls, graphs=1)
            self.backend.stop()
            torch._dynamo.reset()
            self.check(fn, calls, graphs=2)
            self.backend.start()
        self.assertEqual(counters["resumes"], {})

    def test_off(self):
        compiled = torch.compile(any_above, options={"pygraph": True, "pygraph_mend": False})
        compiled(torch.ones(3))
        self.assertNotEqual(counters["resumes"], {})


instantiate_parametrized_tests(GuardTest)


if __name__ == "__main__":
    if HAS_CPU:
        run_tests()
