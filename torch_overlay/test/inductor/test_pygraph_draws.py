# Owner(s): ["module: inductor"]
"""
Random numbers in generated code: draws stay in their order, whatever is captured and delivered.
"""

from __future__ import annotations

import re

import torch
from torch._inductor.pygraph.compile import analysis
from torch._inductor.test_case import run_tests, TestCase
from torch._prims import rng_prims
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.fake_cuda import fake_cuda
from torch.testing._internal.pygraph_values import compile_for_h200, cpu, cuda, Program


draws_two, draws_three = (
    torch.compiler.nested_compile_region(fn)
    for fn in (
        lambda x: torch.multinomial(x.softmax(-1), 2),
        lambda x: torch.multinomial(x.softmax(-1), 3),
    )
)


def draws_in_regions(x, s, t):
    return draws_two(x * s), draws_three(x), x * t.exp()


def draws_in_a_branch(x, s, t, q):
    first = torch.cond(
        q,
        lambda x: torch.multinomial(x.softmax(-1), 2),
        lambda x: torch.multinomial(x.softmax(-1), 2) + 1,
        (x * s,),
    )
    return first, torch.multinomial(x.softmax(-1), 3), x * t.exp()


def draws_in_a_branch_on_the_cpu(x, y, q):
    first = torch.cond(
        q,
        lambda x: torch.multinomial(x.softmax(-1).cpu(), 2),
        lambda x: torch.multinomial(x.softmax(-1).cpu(), 2) + 1,
        (x.sin(),),
    )
    return first, x[torch.multinomial(y, 3)] + 1


DRAWS_OF_GRAPHS = {
    "regions": Program(draws_in_regions, lambda: (cuda(8), cpu(), cpu())),
    "branch": Program(
        draws_in_a_branch,
        lambda: (cuda(8), cpu(), cpu(), cpu(dtype=torch.bool)),
    ),
    "branch_on_the_cpu": Program(
        draws_in_a_branch_on_the_cpu,
        lambda: (cuda(8), torch.rand(8), cuda(dtype=torch.bool)),
    ),
}


class DrawTest(TestCase):
    def test_random_draws_stay_in_order(self):
        "Where values are brought in between."

        def fn(x, s):
            first = torch.multinomial((x * s).softmax(-1), 2)
            return first, torch.multinomial(x.softmax(-1), 3), x * s.exp()

        (graph,) = compile_for_h200(Program(fn, lambda: (cuda(8), cpu())))
        draws = re.findall(r"multinomial\.default\(\w+, (\d)\)", graph.source)
        self.assertEqual(draws, ["2", "3"])

    @parametrize("name", list(DRAWS_OF_GRAPHS))
    def test_random_draws_of_graphs_stay_in_order(self, name):
        "Of a higher-order operator."
        (graph,) = compile_for_h200(DRAWS_OF_GRAPHS[name])
        _, _, runner = graph.source.partition("class Runner")

        def partition(call):
            _, _, code = graph.source.partition(f"def partition_{call[1]}(args")
            return code.partition("\n    return (")[0] + call[0]

        source = re.sub(r"self\.partitions\[(\d)\]\(", partition, runner)
        calls = r"= (?:(repeated_subgraph|true_graph_)0|(?:repeated_subgraph1|.*multinomial\.default))\("
        draws = re.findall(calls, source)
        self.assertEqual([bool(first) for first in draws], [True, False], source)

    def test_draws_of_a_checkpoint(self):
        "It repeats them from a state of its own."
        graph = torch.fx.Graph()
        args = torch.ops.aten.native_dropout.default, graph.placeholder("x"), 0.5, True
        state = graph.placeholder("state")
        draws = graph.call_function(rng_prims.run_and_save_rng_state, args)
        repeats = graph.call_function(rng_prims.run_with_rng_state, (state, *args))
        self.assertTrue(analysis.draws_random_numbers(draws))
        self.assertFalse(analysis.draws_random_numbers(repeats))

    @parametrize("dropout", (0.0, 0.1))
    def test_attention_draws_for_dropout(self, dropout):
        "Else what is computed behind it can be delivered with what is known before."
        attention = torch.ops.aten._scaled_dot_product_efficient_attention

        def fn(q, s, v):
            out, *_ = attention(q * s, q, q, None, False, dropout)
            return out * s, q * v.exp()

        (graph,) = compile_for_h200(
            Program(fn, lambda: (cuda(1, 1, 8, 8), cpu(), cpu()))
        )
        self.assertEqual(graph.source.count(" = Deliver("), 2 if dropout else 1)

    @parametrize("dropout", (0.0, 0.1))
    @parametrize("nested", (False, True))
    @parametrize("kernel", ("efficient", "flash"))
    def test_seed_of_attention(self, kernel, nested, dropout):
        "Of a forward and its backward one may be captured, and the seed lies elsewhere then."
        attention = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
        options = (None, True, dropout) if kernel == "efficient" else (dropout,)

        def attend(q):
            out, *_ = attention(q, q, q, *options)
            return out

        if nested:
            attend = torch.compiler.nested_compile_region(attend)
        with fake_cuda() as graphs:
            compiled = torch.compile(
                lambda q: attend(q * 2).sin(), options={"pygraph": True}
            )
            q = cuda(2, 2, 64, 64, dtype=torch.float16)
            compiled(q.requires_grad_()).sum().backward()
        self.assertEqual(len(graphs), 2)
        for graph in graphs:
            partitions, _, runner = graph.source.partition("class Runner")
            calls = rf"{kernel}_attention|subgraph_0_0\("
            self.assertRegex(partitions + runner, calls)
            # Names of kernels follow the Runner's code.
            runner, _, _ = runner.partition("runner.objects")
            is_left_out = re.search(calls, runner) is not None
            self.assertEqual(is_left_out, kernel == "efficient" and dropout > 0)
        if kernel == "efficient" and not dropout and not nested:
            # The forward's seed and offset are on the CPU in calls that are not captured. A checkpoint would notice.
            (info,) = graphs[1].info.functions
            self.assertEqual(len(info.saved_input_idxs), 3)
            _, _, returned = graphs[0].source.rpartition("return (")
            self.assertEqual(returned.partition(")")[0].count("buf"), 4, returned)


instantiate_parametrized_tests(DrawTest)


if __name__ == "__main__":
    run_tests()
