# Owner(s): ["module: inductor"]
"""Rows of CPU tensors that a CPU integer selects: one graph for all integers, with the results of eager mode."""

from __future__ import annotations

import torch
import torch.utils.checkpoint
from torch._inductor.pygraph import report, reset_report
from torch._inductor.pygraph.types.reason import Code
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize
from torch.testing._internal.pygraph_mend import BranchTestCase


TABLE = torch.linspace(0.9, 0.1, 10)
STEPS = (9, 6, 3, 0)


def step(x, t, table):
    """A step of DDIM."""
    before = t - 3
    a = table[t]
    b = table[before] if before >= 0 else table[0]
    y = (x - (1 - a) ** 0.5) / a**0.5
    return b**0.5 * y


def loop(x, times, table):
    for t in times:
        x = step(x, t, table)
    return x


def loop_of_layers(x, times, table):
    """Its body is too large for a graph of all steps."""
    for t in times:
        for _ in range(40):
            x = x.sin() + x
        x = step(x, t, table)
    return x


def row_of_two(x, t, table):
    return x * table.view(5, 2)[t]


def of_a_result(x, t, table):
    return x[:1] + (table * 2)[(t - 3).clamp(0, 4)]


def returned(x, t, table):
    return x + 1, table[t]


def written(x, t, table):
    row = table[t]
    row.add_(1)
    return x * table.sum()


def written_before_use(x, t, table):
    row = table[t]
    table.zero_()
    return x + row


def kept(x, t, table):
    row = table[t]
    torch._dynamo.graph_break()
    row.add_(1)
    return x * table.sum()


def mask(x, t, table):
    return x[:1] * table[(t > 1)].sum()


def large(x, t, table):
    return x[:1] + table.expand(2000, 10).t()[t].sum()


ONE_GRAPH = (row_of_two, of_a_result)
AS_EAGER = (returned, written, written_before_use, kept, mask, large)


def calls(fn, integers=STEPS, *, dtype=torch.int64):
    size = 2 if fn is row_of_two else 4
    return [(torch.randn(size), torch.tensor(t % 5 if size == 2 else t, dtype=dtype), TABLE.clone()) for t in integers]


class LookupTest(BranchTestCase):
    def test_step(self):
        # The last step takes the other path of the branch.
        reset_report()
        self.check(step, calls(step), graphs=2)
        codes = [b.reason.code for b in report().breaks]
        self.assertEqual({*codes}, {Code.HOST_LOOKS_UP, Code.HOST_DECIDES})
        self.assertTrue(all(b.is_repaired for b in report().breaks))

    def test_loop(self):
        self.check(loop, [(torch.randn(4), torch.tensor(STEPS), TABLE)] * 2, graphs=1)

    def test_body(self):
        # The last step has a graph of its own.
        self.check(loop_of_layers, [(torch.randn(4), torch.tensor(STEPS), TABLE)] * 2, graphs=2)

    @parametrize("fn", ONE_GRAPH)
    def test_one_graph(self, fn):
        self.check(fn, calls(fn), graphs=1)

    @parametrize("dtype", (torch.int32, torch.int8, torch.uint8, torch.bool))
    def test_dtypes(self, dtype):
        graphs = 1 if dtype == torch.int32 else None
        self.check(row_of_two, calls(row_of_two, dtype=dtype), graphs=graphs)

    @parametrize("fn", AS_EAGER)
    def test_as_eager(self, fn):
        self.check(fn, calls(fn), graphs=None)

    def test_out_of_bounds(self):
        negative = [(x, t - 5, table) for x, t, table in calls(row_of_two)]
        self.check(row_of_two, calls(row_of_two) + negative, graphs=1)
        for wrong in (5, -6):
            torch._dynamo.reset()
            call = (torch.randn(2), torch.tensor(wrong), TABLE)
            self.check(row_of_two, [*calls(row_of_two)[:1], call, *calls(row_of_two)], graphs=None)
            torch._dynamo.reset()
            self.check(row_of_two, [call, *calls(row_of_two)], graphs=None)

    def test_in_a_checkpoint(self):
        """The function has a graph of its own, of whose inputs no guard knows."""

        def fn(x, t, table):
            return torch.utils.checkpoint.checkpoint(row_of_two, x * 2, t, table, use_reentrant=False)

        of_two = [(torch.randn(2, requires_grad=True), t, table) for _, t, table in calls(row_of_two)]
        self.check(fn, of_two, graphs=None)

    def test_gradient(self):
        table = TABLE.clone().requires_grad_()
        self.check(row_of_two, [(x, t, table) for x, t, _ in calls(row_of_two)], graphs=None)


instantiate_parametrized_tests(LookupTest)

if __name__ == "__main__":
    run_tests()
