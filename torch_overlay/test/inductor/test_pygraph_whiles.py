# Owner(s): ["module: inductor"]
"""While loops on tensors as torch.while_loop: one graph, with the results of eager mode."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.pygraph.compile import conditionals
from torch._inductor.pygraph.dynamo import whiles
from torch._inductor.pygraph.graph.prelude import PreludeUnavailable
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, subtest
from torch.testing._internal.fake_cuda import fake_cuda
from torch.testing._internal.pygraph_mend import BOX, BranchTestCase, number_of_graphs


WEIGHT = torch.eye(4) / 2


def clock(x, n):
    """The loop runs at least once, so that its result is never its operand."""
    t = torch.ones((), device=x.device)
    while t >= 0.05:
        x = x - 0.1 * torch.tanh(x)
        t = t - 0.1
    return x


def below(x, n):
    y = x * 1
    while y.sum() < n:
        y = y + x.abs() @ WEIGHT
    return y + 1


def flips(x, n):
    y = x * 1
    done = y.sum() > n
    while not done:
        y = y + 1
        done = y.sum() > n
    return y * 2


def until(x, n):
    y = x * 1
    while True:
        y = y + x.abs()
        if y.sum() > n:
            break
    return y


def unchanged(x, n):
    y, z = x * 2, x.abs()
    while y.sum() < n:
        y = y + z
        z = z if n is not None else y
    return y, z


def swapped(x, n):
    y, z = x.abs(), x.abs() + 1
    while y.sum() < n:
        y, z = z * 2, y
    return y - z


def in_closure(x, n):
    weight = x.abs() + 1

    def add(y):
        return y + weight

    y = x * 1
    while y.sum() < n:
        y = add(y)
    return y * 2


def given(x, n):
    """The loop may run zero times, and returns its operand then."""
    while x.sum() < n:
        x = x + 1
    return x


def counts(x, n):
    y, turns = x * 1, 0
    while y.sum() < n:
        y = y + x.abs()
        turns += 1
    return y * turns


def prints(x, n):
    y = x * 1
    while y.sum() < n:
        print("turn")
        y = y + x.abs()
    return y * 1


def draws(x, n):
    y = x * 1
    while y.sum() < n:
        y = y + torch.rand(4)
    return y * 1


def indexes(x, n):
    y = x * 1
    while y.sum() < n:
        y = y + x.abs()[torch.zeros(4, dtype=torch.long)]
    return y * 1


def branches(x, n):
    y = x * 1
    while y.sum() < n:
        if y[0] > 3:
            y = y + 1
        y = y + x.abs()
    return y * 1


def writes(x, n):
    y = x * 1
    while y.sum() < n:
        y.add_(x.abs())
    return y * 1


def stores(x, n):
    y = BOX.seen = x * 1
    while y.sum() < n:
        y = y + x.abs()
        BOX.seen = y
    return y * 1, BOX.seen


def grows(x, n):
    y = x.abs()
    while y.shape[0] < 8 and y.sum() < n:
        y = torch.cat((y, x.abs()))
    return y * 1


def two_exits(x, n):
    y = x * 1
    while y.sum() < n:
        y = y + x.abs()
        if y[0] > 5:
            return y * 3
    return y * 1


def converts(x, n):
    y = x * 1
    while y.sum() < n:
        y = (y + x.abs()).double()
    return y * 1


WHOLE = (clock, below, flips, until, unchanged, swapped, in_closure)
AS_BEFORE = (given, counts, prints, draws, indexes, branches, writes, stores, grows, two_exits, converts)
CALLS = [(torch.tensor(values), torch.tensor(n)) for values in ([1.0, -2, 3, 0.5],) for n in (-100.0, 5.0, 50.0)]


def named(programs):
    return [subtest(program, name=program.__name__) for program in programs]


class WhileTest(BranchTestCase):
    def setUp(self):
        super().setUp()
        self.stack = contextlib.ExitStack()
        self.addCleanup(self.stack.close)
        # These tensors stand for tensors on a GPU.
        self.stack.enter_context(mock.patch.object(whiles, "is_on_gpu", lambda node: True))
        self.stack.enter_context(mock.patch.object(conditionals, "branch_kernel", lambda index: None))
        self.without_hosts()
        self.stack.enter_context(torch.no_grad())
        self.stack.enter_context(config.patch(pygraph_conditionals=True))

    def number_of_loops(self, program):
        loops = 0

        def count(_self, gm, _inputs):
            nonlocal loops
            loops += sum(node.target is whiles.WHILE_LOOP for node in gm.graph.nodes)
            return gm.forward

        with mock.patch.object(torch._TorchCompileInductorWrapper, "__call__", count):
            self.check(program, CALLS, graphs=None)
        return loops

    @parametrize("program", named(WHOLE))
    def test_whole(self, program):
        self.assertEqual(self.number_of_loops(program), 1)
        self.assertEqual(number_of_graphs(), 1)

    @parametrize("program", named(AS_BEFORE))
    def test_as_before(self, program):
        """The body is compiled, and the loop runs in Python."""
        torch.manual_seed(0)
        self.assertEqual(self.number_of_loops(program), 0)

    def test_gradient(self):
        with torch.enable_grad():
            x = CALLS[0][0].clone().requires_grad_()
            self.check(below, [(x, n) for _, n in CALLS], graphs=None)

    def test_no_nodes(self):
        with mock.patch.object(conditionals, "branch_kernel", side_effect=PreludeUnavailable("none")):
            self.assertEqual(self.number_of_loops(below), 0)

    def test_off(self):
        with config.patch(pygraph_conditionals=False):
            self.assertEqual(self.number_of_loops(below), 0)
        self.assertGreater(number_of_graphs(), 1)


class CodegenTest(TestCase):
    def test_one_partition(self):
        torch._dynamo.reset()
        counters.clear()
        with (
            fake_cuda() as graphs,
            mock.patch.object(conditionals, "branch_kernel", lambda index: None),
            config.patch(pygraph_conditionals=True),
            torch.no_grad(),
        ):
            x = torch.randn(16, 16, device="cuda")
            torch.compile(clock, options={"pygraph": True})(x, None)
        (graph,) = graphs
        self.assertEqual([p.captured for p in graph.partitions], [True])
        (function,) = graph.info.functions
        self.assertEqual(len(function.paths), 2)


instantiate_parametrized_tests(WhileTest)

if __name__ == "__main__":
    run_tests()
