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
        expected = [outcome_of(fn, fn, args) for args in calls]
        torch.manual_seed(0)
        found = [outcome_of(compiled, fn, args) for args in calls]
        for one, other in zip(expected, found):
            self.assertEqual(one, other)
        self.assertEqual(number_of_graphs(), graphs)


def outcome_of(fn: Callable[..., Any], module: object, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the result or the error, gradients, arguments afterwards and the state of the generator."""
    args = copy.deepcopy(args)
    leaves = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
    leaves += list(module.parameters()) if isinstance(module, torch.nn.Module) else []
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
            self.assertEqual(outcome_of(fn, fn, args), outcome_of(compiled, fn, args))
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


class LayerDrop(torch.nn.Module):
    """Layers of which each call drops some, as in BART: a flag, and in-place writes and stores in a path."""

    def __init__(self, layers: int = 2, layerdrop: float = 0.5) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(layers))
        self.layerdrop = layerdrop
        self.used: list[int] = []
        self.last = None

    def forward(self, x):
        self.used = []
        for i, layer in enumerate(self.layers):
            to_drop = False
            if self.training:
                probability = torch.rand([])
                if probability < self.layerdrop:
                    to_drop = True
            if not to_drop:
                x = torch.nn.functional.dropout(layer(x), 0.5, self.training)
                self.used.append(i)
                self.last = x.detach()
        return x


class Started(torch.nn.Module):
    """Sets its scale at the first call, as ActNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.started = torch.nn.Buffer(torch.zeros((), dtype=torch.uint8))
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        if not self.started:
            with torch.no_grad():
                self.scale.copy_(1 / x.std(0))
            self.started.fill_(1)
        return x * self.scale


class HostTest(BranchTest):
    """Where the host knows a CPU value before the graph runs, each outcome has its graph."""

    @parametrize("layers", (1, 2))
    def test_layerdrop(self, layers):
        """Gradients of dropped layers are None, and random numbers are those of eager mode."""
        with torch._inductor.config.patch(fallback_random=True):
            eager, compiled = LayerDrop(layers), LayerDrop(layers)
            compiled.load_state_dict(eager.state_dict())
            forward = torch.compile(compiled, options={"pygraph": True})
            calls = [(torch.randn(3, 4, requires_grad=True),) for _ in range(12)]
            torch.manual_seed(1)
            expected = [(outcome_of(eager, eager, args), eager.used, eager.last) for args in calls]
            torch.manual_seed(1)
            found = [(outcome_of(forward, compiled, args), compiled.used, compiled.last) for args in calls]
        # Of 1 layer, which has a dropout behind the draw; of 2, the first dropout is drawn between two branches.
        self.assertEqual(found, expected)
        self.assertEqual(number_of_graphs() == 2, layers == 1)

    def test_layerdrop_with_inductor(self):
        """Without eager mode's random numbers: the layers that ran are those that the gradients show."""
        self.backend.stop()
        model = LayerDrop(2)
        compiled = torch.compile(model, options={"pygraph": True})
        for _ in range(30):
            model.zero_grad()
            compiled(torch.ones(3, 4, requires_grad=True)).sum().backward()
            self.assertEqual([i for i in (0, 1) if model.layers[i].weight.grad is not None], model.used)
        self.assertEqual(number_of_graphs(), 4)
        self.assertEqual(counters["resumes"], {})
        self.backend.start()

    def test_many_layers(self):
        """More branches than outcomes can have graphs: as stock."""
        model = LayerDrop(4, 0.1)
        compiled = torch.compile(model, options={"pygraph": True})
        for _ in range(20):
            model.zero_grad()
            compiled(torch.ones(3, 4)).sum().backward()
            self.assertEqual([i for i in range(4) if model.layers[i].weight.grad is not None], model.used)

    def test_buffer(self):
        eager, compiled = Started(), Started()
        forward = torch.compile(compiled, options={"pygraph": True})
        for _ in range(3):
            x = torch.randn(5, 4)
            self.assertEqual(eager(x), forward(x))
        self.assertEqual(eager.state_dict(), compiled.state_dict())
        self.assertEqual(number_of_graphs(), 2)
        with torch.no_grad():
            eager.started.zero_()
            compiled.started.zero_()
        for _ in range(2):
            x = torch.randn(5, 4)
            self.assertEqual(eager(x), forward(x))
        self.assertEqual(number_of_graphs(), 2)

    @parametrize("name", ("written", "alias", "number_used", "number_returned", "many", "nan"))
    def test_values(self, name):
        def written(x, flag):
            flag.add_(1)
            return x + 1 if flag > 1 else x - 1

        def alias(x, flag):
            flag.view(1)[0] = 3
            return x + 1 if flag > 1 else x - 1

        def number_used(x, flag):
            number = torch.rand([])
            return x + number if number < 0.5 else x - number

        def number_returned(x, flag):
            number = torch.rand(1)
            return x + 1 if number < 0.5 else x - 1, number

        def many(x, flag):
            if flag > 0:
                x = x + 1
            if (flag * 2 + 1 > 4).any():
                x = x * 2
            return x if flag != 7 else x * 3

        def nan(x, flag):
            return x + 1 if flag * float("nan") else x - 1

        fn = locals()[name]
        calls = [(torch.ones(3, requires_grad=True), torch.tensor(n)) for n in (0, 1, 2, -1, 7, 8, 9)]
        compiled = torch.compile(fn, options={"pygraph": True})
        torch.manual_seed(0)
        expected = [outcome_of(fn, None, args) for args in calls]
        torch.manual_seed(0)
        self.assertEqual([outcome_of(compiled, None, args) for args in calls], expected)

    def test_bound(self):
        def fn(x, n):
            if n > 1:
                x = x * 2
            if n > 2:
                x = x * 3
            if n > 3:
                x = x * 4
            if n > 4:
                x = x * 5
            if n > 5:
                x = x * 6
            return x + 1

        compiled = torch.compile(fn, options={"pygraph": True})
        for n in range(8):
            x, n = torch.ones(2), torch.tensor(n)
            self.assertEqual(compiled(x, n), fn(x, n))
            self.assertEqual(counters["resumes"] == {}, bool(n < 5))

    def test_generator_that_is_reset(self):
        def fn(x):
            return x + 1 if torch.rand([]) < 0.5 else x - 1

        compiled = torch.compile(fn, options={"pygraph": True})
        for seed in range(10):
            torch.manual_seed(seed)
            expected = [fn(torch.ones(1)) for _ in range(3)]
            torch.manual_seed(seed)
            self.assertEqual([compiled(torch.ones(1)) for _ in range(3)], expected)
        self.assertEqual(number_of_graphs(), 2)


instantiate_parametrized_tests(GuardTest)
instantiate_parametrized_tests(HostTest)


if __name__ == "__main__":
    if HAS_CPU:
        run_tests()
