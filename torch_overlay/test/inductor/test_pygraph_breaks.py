# Owner(s): ["module: inductor"]
"""
What is captured before a loop that breaks the graph, and before an index that a tensor bounds.
"""

from __future__ import annotations

import operator
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
import torch._dynamo
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.resume_execution import ContinueExecutionCache
from torch._inductor.pygraph.dynamo import obstacles
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.pygraph_common import DynamoTestCase, opaque, PYGRAPH


if TYPE_CHECKING:
    from collections.abc import Callable


class BeforeLoopTest(DynamoTestCase):
    def test_input_that_is_written_before_a_loop(self) -> None:
        "A graph that raises has not written it."
        for target, of_input, is_write in (
            (operator.ifloordiv, True, True),
            (operator.setitem, True, True),
            (torch.relu_, True, True),
            (operator.ifloordiv, False, False),
            (operator.floordiv, True, False),
            (operator.add, True, False),
        ):
            graph = torch.fx.Graph()
            x = graph.placeholder("x")
            graph.call_function(target, (x if of_input else graph.call_function(torch.sin, (x,)), 2))
            self.assertEqual(any("writes an input" in o for o in obstacles.of_graph(graph)), is_write)
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        graph.call_function(torch.sin, (graph.call_method("cos", (x,)),), {"out": x})
        self.assertEqual(sum("writes an input" in o for o in obstacles.of_graph(graph)), 1)

    @parametrize("dynamic", (False, True))
    def test_views_before_a_loop(self, dynamic: bool) -> None:
        "Of what is computed, Inductor makes some dense, and of two that are equal one."

        def is_compiled(make: Callable[[torch.Tensor], Any]) -> bool:
            def f(x: torch.Tensor) -> Any:
                y = make(x.sin() * 2)
                for _ in range(2):
                    opaque()
                return y

            torch.compile(f, options=PYGRAPH, dynamic=dynamic)(torch.rand(3, 3))
            return bool(_debug_get_cache_entry_list(f.__code__))

        for make, expected in (
            (lambda y: y[1:], True),
            (lambda y: y.t()[1:], True),
            (lambda y: (y.t() / 3), True),
            (lambda y: (y, y[1:], y[:2], [y]), True),
            (lambda y: (y.t() / 3)[1:], False),
            (lambda y: [(y > 0), (y > 0).view(-1)], True),
            (lambda y: [y, y.view(3, 3)], False),
            (lambda y: [y[1:], y[1:]], False),
            (lambda y: y + torch.ones(3, 3).expand_as(y), True),
        ):
            torch._dynamo.reset()
            self.assertEqual(is_compiled(make), expected)

    def test_draws_before_a_loop(self) -> None:
        F = torch.nn.functional

        def attention(x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
            x = x.expand(3, 1, 3)
            weights = (torch.ones(9, 3), torch.ones(9), None, None, False, p)
            return F.multi_head_attention_forward(
                *(x, x, x, 3, 1, *weights, torch.ones(3, 3), torch.ones(3)), training=training
            )[0]

        for fn, is_random in (
            (lambda x: torch.rand(3), True),
            (lambda x: x.bernoulli(), True),
            (lambda x: x.sin().uniform_(), True),
            (lambda x: torch.randperm(3), True),
            (lambda x: F.dropout(x, 0.2), True),
            (lambda x: F.dropout(x, training=False), False),
            (lambda x: F.dropout2d(x[None, None], 0.2, True), True),
            (lambda x: F.gumbel_softmax(x), True),
            (lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]), False),
            (lambda x: F.scaled_dot_product_attention(*[x[None]] * 3, dropout_p=0.5), True),
            (lambda x: F.scaled_dot_product_attention(*[x[None]] * 3, None, 0.5, True), True),
            (lambda x: F.scaled_dot_product_attention(*[x[None]] * 3, None, 0.0, True), False),
            (lambda x: F.fractional_max_pool2d(x.expand(1, 3, 3), 2, output_size=1), True),
            (lambda x: torch.svd_lowrank(x.expand(3, 3), 1)[1], True),
            (lambda x: attention(x, 0.5, True), True),
            (lambda x: attention(x, 0.5, False), False),
            (lambda x: attention(x, 0.0, True), False),
            (lambda x: torch.ops.aten.bernoulli.p(x, 0.5), True),
            (lambda dropout: dropout * 2, False),
            (lambda x: x.sort()[0], False),
        ):
            graphs: list[torch.fx.Graph] = []

            def backend(gm: torch.fx.GraphModule, _inputs: list[Any]) -> Any:
                graphs.append(gm.graph)  # noqa: B023
                return gm.forward

            torch.compile(fn, backend=backend)(torch.rand(3))
            self.assertEqual(any("is random" in o for o in obstacles.of_graph(graphs[0])), is_random)

    def test_sign_of_zero_before_a_loop(self) -> None:
        def f(x: torch.Tensor, n: float) -> Any:
            y = x.abs() * n
            for row in y:
                opaque(row)
            return y.signbit().tolist()

        def rebound(x: torch.Tensor, n: float) -> Any:
            y = x.abs() * n
            n = 1
            for row in y:
                opaque(row)
            return y.signbit().tolist()

        x = torch.ones(3)
        for fn in (f, rebound):
            compiled = self.compile(fn)
            for n in (0.0, -0.0):
                self.assertEqual(compiled(x, n), fn(x, n))


instantiate_parametrized_tests(BeforeLoopTest)


def paste(x: torch.Tensor, box: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(8, 8)
    left, right = box[0].clamp(min=0), box[1] + 1
    y[left:right, left:right] = x.sin()[(left - box[0]) : (right - box[0]), : right - left]
    return y.cos() + 1


def paste_behind_a_break(x: torch.Tensor, box: torch.Tensor) -> torch.Tensor:
    "As in torchvision's Mask R-CNN."
    width = int(box[1] - box[0])
    mask = x.sin()[:, None, :width].repeat(1, 2, 1).sum(1)
    left, right = max(box[0], 0), min(box[1], 4)
    y = torch.zeros(4, 8)
    y[:, left:right] = mask[:, (left - box[0]) : (right - box[0])]
    return y


def sliced_in_loop(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    for i in range(2):
        y = y + x[:n].sum() + i
    return y


def sliced_in_context(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x.sin()[n:].cos()
    return y + 1


def sliced_in_function(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    def first(x: torch.Tensor) -> torch.Tensor:
        return x.sin()[: n + 1]

    return first(x).cos()


def sliced_in_place(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    y[n:] += x.cos()[n:]
    return y.cos()


def deleted_from_list(x: torch.Tensor, n: torch.Tensor) -> list[torch.Tensor]:
    xs = [x.sin(), x.cos(), x + 1]
    try:
        del xs[n:]
    except TypeError:
        xs.append(x)
    return xs[: n + 1]


def sliced_in_function_before_try(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    def first(x: torch.Tensor) -> torch.Tensor:
        return x.sin()[: n + 1]

    y = first(x)
    try:
        z = y.cos() * 2
    except IndexError:
        z = y
    return z.tanh() + 1


class Rows:
    def __init__(self, x: torch.Tensor) -> None:
        self.rows = list(x.sin())

    def __getitem__(self, key: Any) -> Any:
        try:
            del self.rows[key[-1]]
        except TypeError:
            return None
        return self.rows


# Of a tensor of 4 x 4 and one that bounds a slice, and whether PyGraph captures more; None
# where that depends on the version of Python.
SLICES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], bool | None]] = {
    "paste": (lambda x, n: paste(x, torch.stack([n - 1, n + 1])), True),
    "behind_a_break": (lambda x, n: paste_behind_a_break(x, torch.stack([n - 1, n + 1])), True),
    "start_stop_and_step": (lambda x, n: x.sin()[n - 1 : n + 2 : n + 1].cos(), True),
    "ellipsis": (lambda x, n: x.sin()[..., : n + 0].cos(), True),
    "beside_others": (lambda x, n: x.sin()[x.sum(1) > 2, n : n + 1].cos(), True),
    "argument": (lambda x, n: torch.cat([x.sin(), x.cos()[:n]]), True),
    "bool": (lambda x, n: x.sin()[n > 1 :].cos(), True),
    "branch": (lambda x, n: (x.sin()[n:] if x.dim() == 2 else x[:n]).cos(), True),
    "function_before_try": (sliced_in_function_before_try, True),
    "in_place": (sliced_in_place, None),
    "context": (sliced_in_context, True),
    "function": (sliced_in_function, True),
    "loop": (sliced_in_loop, False),
    "list": (deleted_from_list, False),
    "tuple": (lambda x, n: (x.sin(), x.cos(), x)[n:], False),
    "list_of_a_class": (lambda x, n: Rows(x)[n, n:], None),
    "no_index": (lambda x, n: slice(n, n + 1).stop * x, False),
}


class SliceTest(DynamoTestCase):
    """What is indexed by values of tensors breaks the graph there, and no sooner."""

    def captured(self, fn: Callable[..., Any], pygraph: bool) -> int:
        "How many calls are, of all frames."
        torch._dynamo.reset()
        count = 0

        def backend(_self: Any, gm: torch.fx.GraphModule, _inputs: list[Any]) -> Any:
            nonlocal count
            count += sum(node.op.startswith("call_") for node in gm.graph.nodes)
            return gm.forward

        compiled = self.compile(fn, pygraph=pygraph)
        with mock.patch.object(torch._TorchCompileInductorWrapper, "__call__", backend):
            for n in (1, 2, 3, 1, 4, 0):
                x, bound = torch.rand(4, 4), torch.tensor(n)
                self.assertEqual(compiled(x, bound), fn(x, bound), atol=0, rtol=0)
        return count

    @parametrize("name", list(SLICES))
    def test_captured(self, name: str) -> None:
        fn, captures_more = SLICES[name]
        on, off = self.captured(fn, True), self.captured(fn, False)
        if captures_more is None:
            self.assertGreaterEqual(on, off)
        elif captures_more:
            self.assertGreater(on, off)
        else:
            self.assertEqual(on, off)

    def test_nothing_is_compiled_to_store_at_the_end(self) -> None:
        self.captured(SLICES["behind_a_break"][0], True)
        parts = [*ContinueExecutionCache.cache[paste_behind_a_break.__code__].values()]
        self.assertEqual([bool(_debug_get_cache_entry_list(part)) for part in parts], [True, False])

    def test_what_follows_does_not_compile(self) -> None:
        "It runs eagerly, as without pygraph."

        def refuse(_self: Any, gm: torch.fx.GraphModule, _inputs: list[Any]) -> Any:
            if any(node.target == "copy_" for node in gm.graph.nodes):
                raise RuntimeError("not supported")
            return gm.forward

        def fn(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            y = x.sin()[:n].sum()
            x.copy_(x + y)
            return x + y

        compiled = self.compile(fn)
        with mock.patch.object(torch._TorchCompileInductorWrapper, "__call__", refuse):
            for n in (1, 2, 3):
                x, bound = torch.rand(4), torch.tensor(n)
                self.assertEqual(compiled(x.clone(), bound), fn(x.clone(), bound))

    def test_fullgraph(self) -> None:
        fn = lambda x, n: x.sin()[: n.clamp(0, 4)].sum()  # noqa: E731
        compiled = torch.compile(fn, options=PYGRAPH, fullgraph=True)
        x, n = torch.rand(4), torch.tensor(2)
        self.assertEqual(compiled(x, n), fn(x, n))
        self.assertEqual(self.num_graphs(), 1)


instantiate_parametrized_tests(SliceTest)


if __name__ == "__main__":
    run_tests()
