# Owner(s): ["module: inductor"]
"""Tensors of a graph that a program makes leaves: compiled functions have the results and gradients of eager mode."""

from __future__ import annotations

import torch
import torch._dynamo
from torch._dynamo.utils import counters
from torch._inductor.pygraph import report, reset_report
from torch._inductor.pygraph.types.reason import Code
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, subtest
from torch.testing._internal.inductor_utils import HAS_CPU
from torch.testing._internal.pygraph_mend import BranchTestCase


def encoder(x, w):
    """As the feature encoder of Wav2Vec2"""
    hidden = x[:, None]
    hidden.requires_grad = True
    hidden = (hidden * w).relu()
    return hidden.sum(1) @ w


def reads(x, w):
    hidden = x * 2
    before = hidden.requires_grad
    hidden.requires_grad = True
    return hidden @ w, hidden.detach(), before, hidden.requires_grad, hidden.is_leaf


def called(x, w):
    return encoder(x, w) + encoder(x + 1, w)


def returned(x, w):
    hidden = x * 2
    hidden.requires_grad = True
    return hidden, hidden @ w


def stored(x, w):
    seen = []
    hidden = x * 2
    seen.append(hidden)
    hidden.requires_grad = True
    return (hidden @ w).sum(), seen


def alone(x, w):
    """A result that has no other leaf"""
    hidden = x * 2
    hidden.requires_grad = True
    return hidden.sin(), hidden @ w


def shape_of_parameter(x, w):
    """A parameter of which the result takes the shape alone"""
    hidden = x[0] * 2
    hidden.requires_grad = True
    return hidden.expand_as(w), w.sum()


def written(x, w):
    hidden = x * 2
    hidden.requires_grad = True
    own = torch.zeros(3)
    own.add_(hidden.sum())
    return own


def same_tensor(x, w):
    """The operator returns its operand."""
    hidden = x.contiguous()
    hidden.requires_grad = True
    return hidden @ w, x.requires_grad


def unset(x, w):
    hidden = x * 2
    hidden.requires_grad = False
    return hidden @ w


def not_leaf(x, w):
    hidden = x @ w
    hidden.requires_grad = True
    return hidden


def breaks_behind(x, w):
    hidden = x * 2
    hidden.requires_grad = True
    torch._dynamo.graph_break()
    return hidden @ w


def without_gradient(x, w):
    with torch.no_grad():
        hidden = x * 2
        hidden.requires_grad = True
        y = hidden * 2
    return y + hidden @ w


def integers(x, w):
    hidden = x.long()
    try:
        hidden.requires_grad = True
    except RuntimeError:
        return x + 1
    return hidden @ w


def in_place(x, w):
    hidden = x * 2
    hidden.requires_grad = True
    hidden.add_(1)
    return hidden @ w


REPAIRED = (encoder, reads, called)
STAY = (returned, stored, alone, shape_of_parameter, written, same_tensor, breaks_behind, without_gradient, integers)
STAY += (in_place, unset, not_leaf)


class LeafTest(BranchTestCase):
    def calls(self):
        return [(torch.randn(3, 3), torch.randn(3, 3, requires_grad=True)) for _ in range(2)]

    @parametrize("fn", [subtest(f, name=f.__name__) for f in REPAIRED])
    def test_in_graph(self, fn):
        reset_report()
        self.check(fn, self.calls(), graphs=1)
        self.assertEqual(sum(counters["graph_break"].values()), 0)
        self.assertEqual({b.reason.code for b in report().breaks}, {Code.LEAF_IN_GRAPH})

    @parametrize("fn", [subtest(f, name=f.__name__) for f in STAY])
    def test_stays(self, fn):
        self.check(fn, self.calls(), graphs=None)

    @parametrize("fn", [subtest(f, name=f.__name__) for f in (encoder, reads, alone)])
    def test_inductor(self, fn):
        with self.inductor():
            self.check(fn, self.calls(), graphs=None)

    def test_written_input(self):
        """The leaf makes an input need a gradient that the graph writes."""

        def fn(x, w):
            hidden = x * 2
            hidden.requires_grad = True
            x.add_(hidden.sin())
            return w + 1

        for compiled in (fn, self.compile(fn)):
            (x, w), *_ = self.calls()
            compiled(x, w)
            self.assertTrue(x.requires_grad)


instantiate_parametrized_tests(LeafTest)

if __name__ == "__main__":
    if HAS_CPU:
        run_tests()
