# Owner(s): ["module: inductor"]
"""Slices with tensor bounds that a number is stored to: one graph, with the results of eager mode."""

from __future__ import annotations

import math
import unittest

import torch
from torch._inductor.pygraph import report, reset_report
from torch._inductor.pygraph.dynamo import fills
from torch._inductor.pygraph.types.reason import Code
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize
from torch.testing._internal.fake_cuda import fake_cuda
from torch.testing._internal.inductor_utils import HAS_CPU
from torch.testing._internal.pygraph_mend import BranchTestCase, number_of_graphs


ROWS, SIZE = 3, 4
BOUNDS = (-6, -5, -4, -1, 0, 1, 3, 4, 5, 7, -(2**62), 2**63 - 1)


def masks(x, n, m):
    """The mask of padded frames, as speech models make it."""
    kept = x.new_ones(x.shape)
    lengths = torch.stack([n, m, n])
    for i in range(x.shape[0]):
        kept[i, lengths[i] :] = 0
    return x * kept


def start(x, n, m):
    y = x * 2
    y[n:] = 7
    return y.cos()


def stop(x, n, m):
    y = x * 2
    y[:, :n] = -1.5
    return y.cos()


def both(x, n, m):
    y = x * 2
    y[1, n:m] = math.inf
    return y


def step_of_one(x, n, m):
    y = x * 2
    y[n:m:1] = True
    return y


def beside_a_constant(x, n, m):
    y = x * 2
    y[n:-1, -9:m] = 3
    return y


def ellipsis(x, n, m):
    y = torch.stack([x, x + 1])
    y[n:, ..., None, :m] = 3
    return y


def ellipsis_in_front(x, n, m):
    y = torch.stack([x, x + 1])
    y[..., n:, 1] = 3
    return y


def argument(x, n, m):
    x[n:, 2] = 5
    return x.sum()


def view(x, n, m):
    y = x * 2
    rows = y.t()
    rows[n:m] = 0
    return y, y.sum()


def masks_of_columns(x, n, m):
    y = x.new_ones(x.shape)
    y[:, n:] = 0
    y[n:-1, :m] = 2
    return x * y


def saved(x, n, m):
    """Its backward reads what the graph writes later: eager mode raises."""
    y = x * 2
    z = y.pow(2)
    y[n:] = 0
    return z


def element(x, n, m):
    y = x * 2
    y[n:, 1:] = y[1, 1]
    return y * x


def both_orders(x, n, m):
    y = x * 2
    y[0, n:] = x.sum()
    y[1, :m] = 4
    y[2] = y[0] + y[1]
    return y


def of_bools(x, n, m):
    y = x > 0
    y[n:m] = 1
    return y


def of_integers(x, n, m):
    y = (x * 9).to(torch.int8)
    y[n:m] = -100
    return y


FUNCTIONS = (masks, start, stop, both, step_of_one, beside_a_constant, ellipsis, ellipsis_in_front, argument, view)
FUNCTIONS += (element, both_orders, of_bools, of_integers)
WITHOUT_GRADIENTS = (argument, of_bools, of_integers)


def too_large_a_number(x, n, m):
    y = (x * 9).to(torch.int8)
    y[n:] = 1000
    return y


def of_another_type(x, n, m):
    y = (x * 9).to(torch.int32)
    y[n:] = 2.5
    return y


def tensor(x, n, m):
    y = x * 2
    y[n:] = x[:1]
    return y


def two_steps(x, n, m):
    y = x * 2
    y[n:m:2] = 0
    return y


def step_of_a_float(x, n, m):
    y = x * 2
    y[n:m:1.0] = 0
    return y


def of_a_mask(x, n, m):
    y = x * 2
    y[n:, y[0] > 0] = 0
    return y


def by_a_float(x, n, m):
    y = x * 2
    y[n * 1.0 :] = 0
    return y


def by_two(x, n, m):
    y = x * 2
    y[torch.stack([n, m]) :] = 0
    return y


def of_expanded(x, n, m):
    y = x[0].clone().expand(ROWS, SIZE)
    y[n:] = 0
    return y


def too_many_indices(x, n, m):
    y = x * 2
    y[0, 0, n:] = 0
    return y


def of_a_list(x, n, m):
    y = [*x]
    y[n:] = ()
    return y


AS_EAGER = (too_large_a_number, of_another_type, tensor, two_steps, step_of_a_float, of_a_mask, by_a_float)
AS_EAGER += (by_two, of_expanded, too_many_indices, of_a_list, saved)


def calls(pairs, *, dtype=torch.int64, requires_grad=False):
    x = torch.linspace(-1, 1, ROWS * SIZE).reshape(ROWS, SIZE)
    return [(x.clone().requires_grad_(requires_grad), *(torch.tensor(b, dtype=dtype) for b in p)) for p in pairs]


class FillTest(BranchTestCase):
    @parametrize("fn", FUNCTIONS)
    def test_bounds(self, fn):
        reset_report()
        pairs = [(n, m) for n in BOUNDS for m in BOUNDS]
        self.check(fn, calls(pairs), graphs=1, fullgraph=True)
        self.assertEqual({b.reason.code for b in report().breaks}, {Code.FILLED_IN_GRAPH})
        self.assertTrue(all(b.is_repaired for b in report().breaks))

    @parametrize("fn", [fn for fn in FUNCTIONS if fn not in WITHOUT_GRADIENTS])
    def test_gradients(self, fn):
        pairs = [(n, m) for n in BOUNDS[1:10:2] for m in BOUNDS[:10:2]]
        self.check(fn, calls(pairs, requires_grad=True), graphs=1, fullgraph=True)

    @parametrize("dtype", (torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool))
    def test_types_of_bounds(self, dtype):
        pairs = [(n, m) for n in (0, 1, 4, 127) for m in (0, 3, 100)]
        pairs += [] if dtype in (torch.uint8, torch.bool) else [(-128, 4), (-3, -1), (0, -1)]
        self.check(both, calls(pairs, dtype=dtype), graphs=1, fullgraph=True)

    def test_bound_of_one_element(self):
        self.check(both, [(x, n.view(1, 1), m.view(1)) for x, n, m in calls([(-2, 3), (1, 9)])], graphs=1)

    @parametrize("dtype", (torch.uint16, torch.float32))
    def test_other_types_of_bounds(self, dtype):
        self.check(both, calls([(0, 1), (1, 0)], dtype=dtype), graphs=None)
        self.assertNotEqual(number_of_graphs(), 0)

    @parametrize("fn", AS_EAGER)
    def test_as_eager(self, fn):
        for requires_grad in (False, True):
            torch._dynamo.reset()
            self.check(fn, calls([(0, 1), (1, 3), (-1, 4)], requires_grad=requires_grad), graphs=None)

    def test_leaf(self):
        self.check(argument, calls([(0, 1), (5, 1)], requires_grad=True), graphs=None)

    def test_without_gradients(self):
        with torch.no_grad():
            self.check(argument, calls([(0, 1), (5, 1)], requires_grad=True), graphs=1)

    def test_dynamic_sizes(self):
        rows = [(torch.randn(k, 5), torch.tensor(n), torch.tensor(4)) for k in (3, 5, 8) for n in (-4, 0, 3, 6)]
        for fn in (start, masks_of_columns):
            torch._dynamo.reset()
            self.check(fn, rows, graphs=None, dynamic=True, fullgraph=True)

    def test_version(self):
        x, n, m = calls([(9, 0)])[0]
        for fn in (argument, torch.compile(argument, options={"pygraph": True})):
            before = x._version
            fn(x, n, m)
            self.assertEqual(x._version, before + 1)

    def test_many_elements(self):
        self.addCleanup(setattr, fills, "MAX_ELEMENTS", fills.MAX_ELEMENTS)
        fills.MAX_ELEMENTS = SIZE
        self.check(masks, calls([(1, 2), (-1, 7)]), graphs=1)
        torch._dynamo.reset()
        reset_report()
        self.check(start, calls([(1, 2), (-1, 7)]), graphs=None)
        self.assertEqual([b.reason.code for b in report().breaks], [Code.DYNAMO])


class CompiledTest(TestCase):
    @unittest.skipIf(not HAS_CPU, "needs a compiler")
    @parametrize("fn", (masks, beside_a_constant, element))
    def test_values(self, fn):
        compiled = torch.compile(fn, options={"pygraph": True}, fullgraph=True)
        pairs = [(n, m) for n in BOUNDS for m in BOUNDS[:7]]
        for args, same in zip(calls(pairs, requires_grad=True), calls(pairs, requires_grad=True)):
            expected, found = fn(*args), compiled(*same)
            self.assertEqual(found, expected)
            expected.sum().backward()
            found.sum().backward()
            self.assertEqual(same[0].grad, args[0].grad)

    @parametrize("device", ("cuda", "cpu"))
    def test_on_a_gpu(self, device):
        with fake_cuda() as graphs, torch.no_grad():
            x, n = torch.randn(ROWS, SIZE, device="cuda"), torch.tensor(1, device=device)
            torch.compile(both, options={"pygraph": True}, fullgraph=True)(x, n, n)
        (graph,) = graphs
        # A kernel in front of the captured ones brings the bounds from the CPU.
        self.assertEqual([p.captured for p in graph.partitions], [False, True] if device == "cpu" else [True])


instantiate_parametrized_tests(CompiledTest)
instantiate_parametrized_tests(FillTest)

if __name__ == "__main__":
    run_tests()
