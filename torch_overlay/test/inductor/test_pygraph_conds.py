# Owner(s): ["module: inductor"]
"""Branches on tensors that become torch.cond: results, gradients, changes and errors are those of eager mode."""

from __future__ import annotations

import copy
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
import torch._dynamo
from torch._inductor.pygraph.types import journal
from torch._inductor.pygraph.types.reason import Code
from torch._inductor.test_case import run_tests, TestCase
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.nn import functional
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, subtest
from torch.testing._internal.fake_cuda import fake_cuda
from torch.testing._internal.inductor_utils import HAS_CPU
from torch.testing._internal.pygraph_common import aot_eager
from torch.testing._internal.pygraph_mend import BranchTestCase, number_of_graphs, outcome_of, VALUES


if TYPE_CHECKING:
    from collections.abc import Callable


COND = torch.ops.higher_order.cond


def work(x, factor=1.0):
    """Return what takes more operators than paths may have that both run."""
    for _ in range(6):
        x = (x * factor).sin() + x
    return x


class Layers(torch.nn.Module):
    """Paths with the same parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(10))

    def forward(self, x):
        if x.sum() > 0:
            for layer in self.layers:
                x = layer(x).relu()
        else:
            for layer in self.layers:
                x = layer(x.tanh())
        return x + 1


class TwoWeights(torch.nn.Module):
    """Each path has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = torch.nn.Parameter(torch.ones(4))
        self.w2 = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return work(x * self.w1) if x.sum() > 0 else work(x * self.w2)


class Norm(torch.nn.Module):
    def __init__(self, training: bool) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4).train(training)

    def forward(self, x):
        x = torch.stack([x, x * 2])
        return self.norm(x) * 2 if x.sum() > 0 else work(self.norm.weight * x)


class OneNorm(Norm):
    def forward(self, x):
        x = torch.stack([x, x * 2])
        return self.norm(x) if x.sum() > 0 else x * self.norm.weight + self.norm.bias


class Unread(torch.nn.Module):
    """No gradient reaches the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.threshold = torch.nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x + (x > self.threshold) if x.sum() > 0 else work(x)


def if_else(x):
    if x.sum() > 0:
        y = work(x)
    else:
        y = x - 1
    return y.relu() + 3


def argument(x):
    return torch.add(x * 3, work(x * 2) if x.sum() > 0 else x - 1).relu()


def early_return(x):
    if x.sum() > 0:
        return work(x)
    x = x + 1
    return work(x, 2)


def early_tuple(x):
    if x.sum() > 0:
        return work(x), 3, [x * 2, None]
    return x.neg(), 3, [x - 2, None]


def no_else(x):
    y = x * 2
    if not torch.isfinite(y).all():
        y = work(torch.clamp(y, min=-100, max=100))
    return y + 1


def elifs(x):
    s = x.sum()
    if s > 10:
        z = work(x)
    elif s > 0:
        z = x * 2
    elif s < -10:
        z = work(x, 3)
    else:
        z = x + 1
    return z + 1


def logic(x):
    if (x > -100).all() and x.sum() > 0 or x[0] < -5:
        return work(x)
    return x - 1


def inlined(x):
    def inner(x):
        return x.exp() if x.sum() > 0 else x.sin() + x

    return inner(x) + inner(-x)


def in_loop(x):
    for _ in range(3):
        if x.sum() > 1:
            x = work(x, 0.5)
        else:
            x = x.sqrt().nan_to_num() + 1
    return x


def root(x):
    s = x.sum()
    return s.sqrt() if s > 0 else s * 2


def root_of_negative(x):
    s = x.mean()
    if s < 0:
        return x * 2
    return x.sqrt()


def flag(x):
    if x.sum() > 0:
        y, above = work(x), bool(x.mean() > 1)
    else:
        y, above = x - 1, False
    return y * 2 if above else y + x


def flags(x):
    x = x + 1
    done = bool(x.max() > 8)
    if x.sum() > 0:
        x, done = work(x), not done
    return x + 1, done


def nested(x):
    if x.sum() > 0:
        y = work(x)
        y = y + 1 if y.mean() > 1 else work(y, 2)
    else:
        y = x * 2
        if x[0] < -2:
            y = y - 1
    return y


def kept(x):
    """The second path leaves a tensor as it was."""
    y = x * 2
    if x.sum() > 5:
        y = work(y)
    elif x.sum() < -5:
        y = y + 1
    return y * 3


def written(x):
    y = x * 2
    if x.sum() > 0:
        z = work(x)
        z.add_(x)
        z[0] = x[1]
    else:
        z = functional.relu(x + 1, inplace=True)
    return z + y


def parts(x):
    if x.sum() > 0:
        a, b = work(x).chunk(2)
        return a * b
    a, b = (x * 2).unbind()[:2]
    return torch.stack([a, b])


def part(x):
    return work(x)[1:] if x.sum() > 0 else x[1:] * 2


def without_gradient(x):
    @torch.no_grad()
    def scale(x):
        return x.abs().max() + 1

    return x / scale(x) if x.sum() > 0 else work(x)


def some_gradients(x):
    if x.sum() > 0:
        y, z = work(x), x.detach() * 2
    else:
        y, z = x * 2, work(x.detach())
    return y, z


def no_gradients(x):
    y = work(x.detach()) if x.sum() > 0 else x.detach() + 1
    return y, x * 2


def raising(x):
    """One path raises for the elements of the other one."""
    matrix = torch.diag(x) + 0.0
    if (x > 0).all():
        return torch.linalg.cholesky(matrix).contiguous()
    return matrix * 2


def indexed(x):
    i = x.long()
    if ((i >= 0) & (i < 4)).all():
        y = x[i]
    else:
        y = work(x)
    return y


def embedded(x):
    table = torch.arange(8.0).reshape(4, 2) * x.detach().mean()
    i = x.detach().nan_to_num(posinf=9).long()
    return functional.embedding(i, table) if (i.abs() < 4).all() and (i >= 0).all() else table * 2


def divided(x):
    i = x.detach().nan_to_num(posinf=9).long()
    return 12 // i if (i != 0).all() else i + 1


def attention(x):
    x = x.reshape(1, 1, 2, 2)
    if x.sum() > 0:
        return functional.scaled_dot_product_attention(x, x, x)
    return x * 2


def empty(x):
    return work(x) if (x[:0] > 0).all() else x - 1


def not_a_number(x):
    return work(x) if (x * float("nan")).sum() else x - 1


def clipped(x):
    """As DETR's encoder layers."""
    x = functional.layer_norm(x, (4,))
    if torch.isinf(x).any() or torch.isnan(x).any():
        limit = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(work(x.exp().log1p()), min=-limit, max=limit)
    return x * 2


def euler_step(x):
    """As a step of a diffusion sampler, whose last step is another one."""
    sigmas = torch.tensor([4.0, 2.0, 1.0, 0.0])
    step = x.sum().nan_to_num(0, 0, 0).abs().long().clamp(0, 2).reshape(1)
    sigma, following = sigmas[step], sigmas[step + 1]
    denoised = x - sigma * work(x)
    if following == 0:
        return denoised
    return x + (x - denoised) / sigma * (following - sigma)


# Programs of one graph, and how often it calls torch.cond without and with gradients. With None the graph breaks.
CONDS: dict[Callable[..., Any], tuple[int, int | None]] = {
    if_else: (1, 1),
    argument: (1, 1),
    early_return: (1, 1),
    early_tuple: (1, 1),
    no_else: (1, 1),
    elifs: (1, 1),
    logic: (1, None),
    inlined: (0, 2),
    in_loop: (3, 3),
    root: (0, 1),
    root_of_negative: (0, 1),
    flag: (1, 2),
    flags: (1, 1),
    nested: (1, 1),
    kept: (1, 1),
    written: (1, 1),
    parts: (1, 1),
    part: (1, 1),
    without_gradient: (1, 1),
    some_gradients: (1, 1),
    no_gradients: (1, 1),
    raising: (1, 1),
    indexed: (1, 1),
    embedded: (1, 1),
    divided: (1, 1),
    attention: (1, 1),
    empty: (1, 1),
    not_a_number: (1, 1),
    clipped: (1, 1),
    euler_step: (0, 1),
}


def same_or_new(x):
    x = x.detach()
    y = x if x.sum() > 0 else work(x)
    y.add_(1)
    return y * 2


def returned_as_it_is(x):
    return x if x.sum() > 0 else work(x)


def view_returned(x):
    y = x * 2
    return y, y.view(2, 2) if x.sum() > 0 else work(y).view(2, 2)


def view_written(x):
    y = x * 2
    z = y.view(-1) if x.sum() > 0 else work(y)
    z[0] = 7
    return y + z


def twice(x):
    y = work(x) if x.sum() > 0 else x * 2
    z = y
    if x.mean() > 1:
        z = work(z)
    z.add_(1)
    return y, z


def nested_alias(x):
    y = x * 2
    if x.sum() > 0:
        z = y if x.mean() > 1 else y + 1
        z = z.view(4)
    else:
        z = work(x)
    y.add_(1)
    return z


def shared(x):
    if x.sum() > 0:
        y = work(x)
        z = y.view(2, 2)
    else:
        y, z = x * 2, (x * 3).view(2, 2)
    y.add_(1)
    return y, z


def two_parts(x):
    a, b = work(x).chunk(2) if x.sum() > 0 else (x * 2).split(2)
    return a * b


def shapes(x):
    y = work(x[:2]) if x.sum() > 0 else x[:3]
    return y + 1


def strides(x):
    y = work(x).reshape(2, 2) if x.sum() > 0 else x.reshape(2, 2).t() * 1
    return y.stride(), y.reshape(-1)


def dtypes(x):
    y = work(x) if x.sum() > 0 else x.double()
    return y * 2


def tensor_or_number(x):
    y = work(x) if x.sum() > 0 else 0.0
    return y + x


def integers(x):
    x, n = (work(x), 2) if x.sum() > 0 else (x, 3)
    return x * n


def other_gradients(x):
    w1, w2 = x.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
    y = work(x * w1) if x.sum() > 0 else x * w2
    y.sum().backward()
    return w1.grad, w2.grad


def gradients_of_one(x):
    """Nothing needs the gradient of z, which alone reaches w."""
    w = x.detach().clone().requires_grad_()
    y, z = (work(x), w * 2) if x.sum() > 0 else (x * 2, work(w))
    y.sum().backward()
    return w.grad, z.detach()


def dropped_out(x):
    return functional.dropout(work(x), 0.5) if x.sum() > 0 else x - 1


def input_written(x):
    x = x.detach()
    if x.sum() > 0:
        x.add_(work(x))
    return x * 2


def data_written(x):
    if x.sum() > 0:
        x.data.mul_(2)
        y = work(x)
    else:
        y = x * 2
    return y


def indexed_by_number(x):
    i = x.sum().long()
    return work(x[i]) if (i < 4 and i >= 0) else x[0] - 1


def counted(x):
    return work(x[x > 1]).sum() if x.sum() > 0 else x.sum()


def many_elements(x):
    return work(x) if x > 0 else x - 1


def hooked(x):
    y = x * 2
    z = work(y) if x.sum() > 0 else y
    if y.requires_grad:
        z.register_hook(lambda grad: grad * 2)
    return z, y


REFUSED = (
    same_or_new,
    returned_as_it_is,
    view_returned,
    view_written,
    nested_alias,
    shared,
    two_parts,
    shapes,
    strides,
)
REFUSED += (dtypes, tensor_or_number, integers, other_gradients, input_written, data_written)
REFUSED += (indexed_by_number, counted, many_elements, hooked, dropped_out)

# One of two branches breaks the graph, or only without gradients.
PARTLY = (twice, gradients_of_one)


class HostTestCase(BranchTestCase):
    """The host does not know conditions before the graph runs."""

    def setUp(self) -> None:
        super().setUp()
        self.without_hosts()


class CondTest(HostTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.conds = 0

        def count(_self: Any, gm: torch.fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
            self.conds += len(gm.graph.find_nodes(op="call_function", target=COND))
            return gm.forward

        backend = mock.patch.object(torch._TorchCompileInductorWrapper, "__call__", count)
        backend.start()
        self.addCleanup(backend.stop)

    def calls(self, grad: bool) -> list[tuple[torch.Tensor]]:
        return [(torch.tensor(v, requires_grad=grad),) for v in VALUES]

    @parametrize("fn", [subtest(f, name=f.__name__) for f in CONDS])
    @parametrize("grad", (False, True))
    def test_cond(self, fn, grad):
        expected = CONDS[fn][grad]
        self.check(fn, self.calls(grad), graphs=None if expected is None else 1)
        if expected is not None:
            self.assertEqual(self.conds, expected)

    @parametrize("fn", [subtest(f, name=f.__name__) for f in REFUSED + PARTLY])
    @parametrize("grad", (False, True))
    def test_equal(self, fn, grad):
        compiled = torch.compile(fn, options={"pygraph": True})
        with torch._inductor.config.patch(fallback_random=True):
            results = []
            for f in (fn, compiled):
                torch.manual_seed(0)
                results.append([outcome_of(f, fn, args) for args in self.calls(grad)])
        self.assertEqual(*results)
        if fn in REFUSED:
            self.assertEqual(self.conds, 0)

    @parametrize("make", [subtest(m, name=m.__name__) for m in (Layers, TwoWeights, Unread)])
    def test_parameters(self, make):
        """Parameters have the gradients of eager mode, or none, and weights are its after three steps."""
        eager = make()
        compiled = copy.deepcopy(eager)
        forward = torch.compile(compiled, options={"pygraph": True})
        modules = ((eager, eager), (compiled, forward))
        optimizers = [torch.optim.AdamW(m.parameters(), 0.1, weight_decay=0.5) for m, _ in modules]
        for (x,) in self.calls(True)[:5]:
            one, other = (outcome_of(run, module, (x,)) for module, run in modules)
            self.assertEqual(one, other)
            for optimizer in optimizers:
                optimizer.step()
        self.assertEqual(eager.state_dict(), compiled.state_dict())
        self.assertEqual(self.conds, 0 if make is TwoWeights else 1)

    @parametrize("make", [subtest(m, name=m.__name__) for m in (Norm, OneNorm)])
    @parametrize("training", (False, True))
    def test_statistics(self, make, training):
        eager = make(training)
        compiled = copy.deepcopy(eager)
        forward = torch.compile(compiled, options={"pygraph": True})
        for (x,) in self.calls(True):
            self.assertEqual(outcome_of(eager, eager, (x,)), outcome_of(forward, compiled, (x,)))
        self.assertEqual(eager.state_dict(), compiled.state_dict())
        self.assertEqual(self.conds, 0 if training else make is OneNorm)

    @parametrize("fallback", (False, True))
    def test_random_numbers(self, fallback):
        """They are drawn in the order of the program."""

        def fn(x):
            y = work(x) + torch.rand(4) if x.sum() > 0 else x
            return y + 1 + torch.rand(4)

        compiled = torch.compile(fn, options={"pygraph": True})
        with torch._inductor.config.patch(fallback_random=fallback):
            for (x,) in self.calls(False):
                self.assertEqual(*(drawn(f, x) for f in (fn, compiled)))
        self.assertEqual(self.conds, not fallback)

    def test_own_cond(self):
        def fn(x):
            if x.sum() > 0:
                return torch.cond(x.mean() > 2, lambda x: x.sin(), lambda x: work(x), (x,))
            return x * 2

        compiled = torch.compile(fn, options={"pygraph": True})
        for (x,) in self.calls(True):
            self.assertEqual(outcome_of(fn, None, (x,)), outcome_of(compiled, None, (x,)))
        self.assertEqual(self.conds, 1)

    @parametrize("grad", (False, True))
    def test_autocast(self, grad):
        """The backward would run a path again without it."""

        def fn(x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = layer(x)
                return layer(y) if y.sum() > 0 else layer(-y).sqrt()

        layer = torch.nn.Linear(4, 4)
        with torch.set_grad_enabled(grad):
            self.check(fn, self.calls(grad), graphs=3 if grad else 1)
        self.assertEqual(self.conds, not grad)

    def test_backend_fails(self):
        """Gradients of the paths have other strides, which torch.cond cannot join. The graph breaks."""
        compiled = torch.compile(raising, options={"pygraph": True})
        with mock.patch.object(torch._TorchCompileInductorWrapper, "__call__", aot_eager):
            for (x,) in self.calls(True)[:3]:
                self.assertEqual(outcome_of(raising, None, (x,)), outcome_of(compiled, None, (x,)))
        self.assertEqual(number_of_graphs(), 3)

    @parametrize("grad", (False, True))
    def test_sizes(self, grad):
        """A graph for all sizes."""
        compiled = torch.compile(if_else, options={"pygraph": True}, dynamic=True)
        for n in (3, 4, 5):
            for sign in (1.0, -1.0):
                x = torch.full((n, n + 1), sign, requires_grad=grad)
                self.assertEqual(outcome_of(if_else, None, (x,)), outcome_of(compiled, None, (x,)))
        self.assertEqual((number_of_graphs(), self.conds), (1, 1))

    def test_report(self):
        journal.breaks.clear()
        self.check(root, self.calls(True), graphs=1)
        self.assertEqual([report.reason.code for report in journal.breaks], [Code.COND_IN_GRAPH])


class CondWithInductorTest(HostTestCase):
    @parametrize("dynamic", (False, True))
    def test_gradients(self, dynamic):
        """Of two calls at x = 1, the gradient is e + 1."""

        def fn(x):
            def inner(x):
                return x.exp() if x.sum() > 0 else -x

            return inner(x) + inner(-x)

        with self.inductor():
            compiled = torch.compile(fn, options={"pygraph": True}, dynamic=dynamic)
            for sign in (1.0, -1.0):
                x = torch.full((4,), sign, requires_grad=True)
                compiled(x).sum().backward()
                self.assertEqual(x.grad, torch.full((4,), sign * (torch.e + 1)))
        self.assertEqual(number_of_graphs(), 1)

    def test_joins(self):
        """A result is no operand, and neither is written for the other."""

        def fn(x):
            y = x * 2
            z = y if x.sum() > 0 else work(y)
            above = not x.sum() > 0
            if x.mean() > 1:
                z, above = work(z), not above
            return z.relu_() if above else z + 1

        with self.inductor():
            calls = [(torch.tensor(v),) for v in VALUES]
            # The last branch writes the join: the graph breaks there, and each path is another one.
            self.check(fn, calls, graphs=3)


class PartitionTest(TestCase):
    @parametrize("grad", (False, True))
    def test_captured_around(self, grad):
        """On a GPU, what is before and behind torch.cond is captured."""

        def fn(x):
            x = (x @ x).relu()
            y = work(x) @ x if x.sum() > 0 else (x.sin() @ x) + 1
            return (y @ x).relu()

        with fake_cuda() as graphs, torch._inductor.config.patch(pygraph_cond=True):
            x = torch.randn(64, 64, device="cuda", requires_grad=grad)
            result = torch.compile(fn, options={"pygraph": True})(x)
            if grad:
                result.sum().backward()
        self.assertEqual(len(graphs), 1 + grad)
        for graph in graphs:
            self.assertEqual([p.captured for p in graph.partitions], [True, False, True])

    def test_off(self):
        journal.breaks.clear()
        with fake_cuda(), self.assertRaises(DataDependentOutputException):
            torch.compile(root, options={"pygraph": True})(torch.randn(4, device="cuda", requires_grad=True))
        self.assertEqual([report.reason.details for report in journal.breaks], [{"why": "config.pygraph_cond is off"}])


def drawn(fn: Callable[..., Any], x: torch.Tensor) -> Any:
    torch.manual_seed(0)
    return fn(x)


instantiate_parametrized_tests(CondTest)
instantiate_parametrized_tests(CondWithInductorTest)
instantiate_parametrized_tests(PartitionTest)


if __name__ == "__main__":
    if HAS_CPU:
        run_tests()
