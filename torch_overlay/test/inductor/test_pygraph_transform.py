# Owner(s): ["module: inductor"]
"""
CPU values in GPU graphs: with PyGraph, what is captured reads none of them, and results
are eager's. Most of it shows in generated code, on a machine that need not have a GPU.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import functools
import logging
import re
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from typing import Any, TYPE_CHECKING
from unittest import mock

import numpy as np

import torch
import torch._dynamo
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.pygraph import native, report, reset_report
from torch._inductor.pygraph.compile import analysis, placement
from torch._inductor.pygraph.compile.analysis import FUSED_OPTIMIZER_STEPS
from torch._inductor.pygraph.graph import binding
from torch._inductor.pygraph.graph.placeholder import MAX_ALIGNMENT, PlaceholderMap
from torch._inductor.pygraph.report.trace import load
from torch._inductor.pygraph.values import deliver
from torch._inductor.test_case import run_tests, TestCase
from torch._prims import rng_prims
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention
from torch.testing import FileCheck
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.fake_cuda import fake_cuda
from torch.testing._internal.inductor_utils import HAS_CPU, HAS_CUDA_AND_TRITON
from torch.utils import _pytree as pytree


if TYPE_CHECKING:
    from collections.abc import Callable


@torch.library.custom_op("test_pygraph_transform::host_op", mutates_args=())
def host_op(s: torch.Tensor) -> torch.Tensor:
    return s.clone()


@host_op.register_fake
def _(s: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(s)


@torch.library.custom_op("test_pygraph_transform::on_both", mutates_args=())
def on_both(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return x * s.item()


@on_both.register_fake
def _(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("test_pygraph_transform::to_host", mutates_args=())
def to_host(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0).cpu()


@to_host.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape[1:], dtype=x.dtype)


@torch.library.custom_op(
    "test_pygraph_transform::pair",
    mutates_args=(),
    tags=(torch._C.Tag.cudagraph_unsafe,),
)
def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + 1, x - 1


@pair.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.custom_op("test_pygraph_transform::distinct", mutates_args=())
def distinct(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.unique(return_counts=True)


@distinct.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(size), x.new_empty(size, dtype=torch.int64)


ops = torch.ops.test_pygraph_transform


def cuda(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return cpu(*size, dtype=dtype).to("cuda")


def cpu(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.rand(size).add(0.5).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 5, size, dtype=dtype)


def index_put(x, i, value):
    x = x.clone()
    x[i] = value
    return x


def masked(x, value):
    return torch.where(x > 0, x, value), x.masked_fill(x > 0.7, value)


def constructors_used_twice(x):
    index = torch.arange(8)
    return x[index], x[index * 2 + 1], index


def filled_by_host(x, values):
    return x.clone().copy_(values), x.add_(1)


def written_after_copy(x, values):
    y = values.to("cuda")
    y[0] = 1
    return x + y


def transposed(x, v):
    t = v.t()
    return x + t.to("cuda"), t.to("cuda")


def long_chain(x, a, b):
    y = (x * a).sum(0).cpu()
    z = x * (y.sum() * b)
    return z.sum().cpu() + a, z


def value_overwritten(x, s):
    y = torch.full((), 3.0, device="cuda") / (s.abs() + 1)
    y.copy_(x[0, 0])
    return x + 1, y


def values_around_a_copy(x, s):
    x = x[..., torch.arange(4)]
    y = (x * x).to("cpu")[0][0]
    z = x / (s.abs() + 1)
    return z.sum(-1), (y > y).cuda()


def positions(x):
    frequency = 1 / torch.pow(10000, torch.arange(0, 8, 2.0) / 8)
    angle = torch.arange(8, -8, -1.0)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], -1).to(x.device, x.dtype)


def known_is_written_to(x):
    table = torch.arange(16.0).sin().to("cuda")
    table[2] = x[0]
    shifted = torch.arange(16.0).cos().to("cuda").add_(x)
    return table * x, shifted


@dataclasses.dataclass(frozen=True)
class Program:
    """
    partitions: how many parts of it are captured
    delivered, staged, known: how many values are, at all
    """

    fn: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]]
    partitions: int = 1
    delivered: int = 0
    staged: int = 0
    known: int = 0
    dynamic: bool | None = None


PROGRAMS = {
    "order_in_memory_staged": Program(
        lambda x, v: x + v.t().to("cuda").as_strided((64,), (1,)),
        lambda: (cuda(64), cpu(32, 64)),
        staged=1,
    ),
    "order_in_memory_delivered": Program(
        lambda x, v: x + torch.as_strided(v.to("cuda"), (8,), (1,), 3),
        lambda: (cuda(8), cpu(8, 4).t()),
        delivered=1,
    ),
    "order_in_memory_computed": Program(
        lambda x, v: x + torch.as_strided((v + 1).to("cuda"), (8,), (1,), 3),
        lambda: (cuda(8), cpu(8, 4).t()),
        delivered=1,
    ),
    "order_in_memory_of_rows": Program(
        lambda x, v: x + v[1:3].to("cuda").as_strided((4,), (1,), 2),
        lambda: (cuda(4), cpu(4, 4)),
        delivered=1,
    ),
    "order_in_memory_of_expanded": Program(
        lambda x, v: x + v.to("cuda").as_strided((32,), (1,)),
        lambda: (cuda(32), cpu(4).expand(8, 4)),
        delivered=1,
    ),
    "order_in_memory_of_expanded_staged": Program(
        lambda x, v: x + v.expand(8, 512, 2).to("cuda").view(torch.int16).sum((0, 2)),
        lambda: (cuda(512), cpu(512, 2)),
        staged=1,
    ),
    "scalar": Program(lambda x, s: x * s + 1, lambda: (cuda(8, 8), cpu()), delivered=1),
    "numpy_scalar": Program(
        lambda x, s: x.sin() * s,
        lambda: (cuda(8, 8), np.float32(np.random.rand())),
        delivered=1,
    ),
    "sum": Program(
        lambda x, v: x * v.sum() + 1, lambda: (cuda(8, 8), cpu(8)), delivered=1
    ),
    "division_by_sum": Program(
        lambda x, v: x / v.sum(), lambda: (cuda(8, 8), cpu(8)), delivered=1
    ),
    "element": Program(
        lambda x, v: x / v[3], lambda: (cuda(8, 8), cpu(8)), delivered=1
    ),
    "element_of_large": Program(
        lambda x, v: x / v[3], lambda: (cuda(8, 8), cpu(4096)), delivered=1
    ),
    "expression": Program(
        lambda x, v: x / (v[3] ** 2 + 1) ** 0.5,
        lambda: (cuda(8, 8), cpu(8)),
        delivered=1,
    ),
    "scalar_and_custom_op": Program(
        lambda x, s: (x * s + 1, ops.host_op(s)),
        lambda: (cuda(8, 8), cpu()),
        delivered=1,
    ),
    "scalar_and_output": Program(
        lambda x, s: (x * s + 1, s + 1), lambda: (cuda(8, 8), cpu()), delivered=1
    ),
    "scalar_returned": Program(
        lambda x, s: (x * s, s), lambda: (cuda(8, 8), cpu()), delivered=1
    ),
    "scalar_mutated": Program(
        lambda x, s: (x * s, s.add_(1)), lambda: (cuda(8, 8), cpu()), delivered=1
    ),
    "scalar_mutated_before": Program(
        lambda x, s: (s.mul_(2), x * s), lambda: (cuda(8, 8), cpu()), delivered=1
    ),
    "dtypes": Program(
        lambda x, n, s, t: (x * s, n + t),
        lambda: (
            cuda(8, 8),
            cuda(8, 8, dtype=torch.int64),
            cpu(dtype=torch.float64),
            cpu(dtype=torch.int64),
        ),
        delivered=2,
    ),
    "constructor_returned": Program(
        lambda x: (x + 1, torch.zeros(2, 3)), lambda: (cuda(8, 8),)
    ),
    "constructors_used_twice": Program(constructors_used_twice, lambda: (cuda(32, 8),)),
    "constant": Program(
        lambda x: x * torch.tensor(2.5) + torch.tensor([1.0, 2, 3, 4]).to("cuda"),
        lambda: (cuda(4, 4),),
    ),
    "known": Program(
        lambda x: x @ positions(x), lambda: (cuda(4, 16, dtype=torch.float16),), known=1
    ),
    "known_scalar": Program(
        lambda x: x * torch.arange(4.0).exp().mean(), lambda: (cuda(8),), known=1
    ),
    "known_used_on_the_cpu": Program(
        lambda x, v: (x + (t := torch.arange(8.0).sin()).to("cuda"), t, t * v),
        lambda: (cuda(8), cpu(8)),
        known=1,
    ),
    "known_transposed": Program(
        lambda x: torch.arange(2048.0).sin().view(128, 16).t().to("cuda") + x,
        lambda: (cuda(16, 128),),
        known=1,
    ),
    "known_in_parts": Program(
        lambda x: (x + torch.arange(2048.0).sin().view(128, 16)[:, ::2].to("cuda")).sum(1),
        lambda: (cuda(128, 8),),
        known=1,
    ),
    "known_expanded": Program(
        lambda x: x + torch.arange(1024.0).sin()[:, None].expand(1024, 4).to("cuda"),
        lambda: (cuda(1024, 4),),
        known=1,
    ),
    "known_transposed_by_address": Program(
        lambda x: (torch.arange(16.0).view(4, 4).t() ** 2).to("cuda").as_strided((16,), (1,)) + x,
        lambda: (cuda(16),),
        known=1,
    ),
    "known_channels_last_by_address": Program(
        lambda x: x
        + torch.arange(120.0)
        .sin()
        .view(2, 3, 4, 5)
        .to(memory_format=torch.channels_last)
        .exp()
        .to("cuda")
        .as_strided((120,), (1,)),
        lambda: (cuda(120),),
        known=1,
    ),
    "known_of_a_list": Program(
        lambda x: x + torch.arange(8.0).sin().view(2, 4).topk(2)[0].to("cuda"),
        lambda: (cuda(2, 2),),
        known=1,
    ),
    "known_of_a_constant": Program(
        lambda x: x[torch.tensor([3, 1, 2, 0] * 3).sort().values],
        lambda: (cuda(4, 4),),
        known=1,
    ),
    "known_returned": Program(
        lambda x: (x + 1, torch.arange(16.0).sin().to("cuda")), lambda: (cuda(16),), known=1
    ),
    "known_is_written_to": Program(known_is_written_to, lambda: (cuda(16),), known=2),
    "known_but_for_a_factor": Program(
        lambda x, s: x + (torch.arange(8.0).sin() * s).to("cuda"),
        lambda: (cuda(8), cpu()),
        delivered=1,
    ),
    "casts": Program(
        lambda x, s, n: (
            x * s.float(),
            x * s.half(),
            x * n.double(),
            x + n.to(torch.int8),
        ),
        lambda: (cuda(8, 8), cpu(dtype=torch.float64), cpu(dtype=torch.int64)),
        delivered=3,
    ),
    "index": Program(
        lambda x, i: x[i] + 1,
        lambda: (cuda(8, 8), cpu(6, dtype=torch.int64)),
        delivered=1,
    ),
    "long_index": Program(
        lambda x, i: x[i] + 1,
        lambda: (cuda(8, 8), cpu(600, dtype=torch.int64)),
        staged=1,
    ),
    "computed_index": Program(
        lambda x, i: x[i * 2 + 1],
        lambda: (cuda(16, 8), cpu(6, dtype=torch.int64)),
        delivered=1,
    ),
    "constructed_index": Program(
        lambda x: (x[torch.arange(4).flip(0)], x[..., torch.arange(8).flip(0)]),
        lambda: (cuda(8, 8),),
    ),
    "index_put": Program(
        index_put,
        lambda: (cuda(8, 8), torch.randperm(8)[:4], cpu()),
        delivered=2,
    ),
    "masked": Program(masked, lambda: (cuda(8, 8), cpu()), delivered=1),
    "copy_at_start": Program(
        lambda x, v: x.sin() + v.to("cuda") + v.cuda().cos(),
        lambda: (cuda(32, 32), cpu(32, 32)),
        staged=1,
    ),
    "copy_in_the_middle": Program(
        lambda x, v: (x @ x).relu() @ v.to("cuda"),
        lambda: (cuda(32, 32), cpu(32, 32)),
        staged=1,
    ),
    "copy_of_transposed": Program(
        transposed,
        lambda: (cuda(64, 16), cpu(16, 64)),
        staged=1,
    ),
    "copy_returned": Program(
        lambda x, v, s: (x + v.to("cuda"), v.to("cuda").view(-1), s.to("cuda")),
        lambda: (cuda(32, 32), cpu(32, 32), cpu()),
        delivered=1,
        staged=1,
    ),
    "copy_cast": Program(
        lambda x, v: x + v.to("cuda", torch.float64),
        lambda: (cuda(32, 32), cpu(32, 32)),
        staged=1,
    ),
    "copy_written": Program(
        written_after_copy, lambda: (cuda(32, 32), cpu(32, 32)), staged=1
    ),
    "copy_into": Program(filled_by_host, lambda: (cuda(32, 32), cpu(32, 32)), staged=1),
    "copy_of_computed": Program(
        lambda x, v: x + (v * 2).to("cuda"),
        lambda: (cuda(32, 32), cpu(32, 32)),
        staged=1,
    ),
    "cpu_output": Program(lambda x: (x + 1, x.sum().cpu()), lambda: (cuda(8, 8),)),
    "cpu_in_the_middle": Program(
        lambda x: (x.sum(0).cpu() * 2).to("cuda") + x + 1,
        lambda: (cuda(8, 8),),
        partitions=2,
        delivered=1,
    ),
    "long_chain": Program(
        long_chain, lambda: (cuda(8, 8), cpu(), cpu()), partitions=2, delivered=2
    ),
    "value_overwritten": Program(
        value_overwritten, lambda: (cuda(8, 8), cpu()), delivered=1
    ),
    "values_around_a_copy": Program(
        values_around_a_copy,
        lambda: (cuda(3, 4), cpu()),
        partitions=2,
        delivered=2,
    ),
    "custom_op_with_two_results": Program(
        lambda x: tuple(y.sin() for y in ops.pair(x.cos())),
        lambda: (cuda(8, 8),),
        partitions=2,
    ),
    "custom_op_on_both": Program(
        lambda x, s: ops.on_both(x.sin(), s) + s,
        lambda: (cuda(8, 8), cpu()),
        partitions=2,
        delivered=1,
    ),
    "custom_op_to_the_host": Program(
        lambda x: (ops.to_host(x.sin()) + 1, x.cos() + 1), lambda: (cuda(8, 8),)
    ),
    "dynamic_shapes": Program(
        lambda x, v, s: (x + v.to("cuda")) * s,
        lambda: (cuda(48, 8), cpu(48, 8), cpu()),
        delivered=1,
        staged=1,
        dynamic=True,
    ),
}

MANY = analysis.MAX_KNOWN_BYTES // 4 + 1

# What a CPU value that reaches the GPU may not be, to be computed at compile time.
NOT_KNOWN = {
    "random": lambda x: (x[(i := torch.ones(8).multinomial(8))], i),
    "uninitialized": lambda x: x + torch.ones(8).new_empty_strided((8,), (1,)).sin().to("cuda"),
    "of_the_gpu": lambda x: x + (torch.ones(8, device="cuda").cpu() * 2).to("cuda"),
    "large": lambda x: x + torch.arange(float(MANY)).sin().to("cuda").sum(),
    "of_large_values": lambda x: x + torch.full((MANY,), 0.5).sin().sum(),
}


class Placed:
    """While active, keeps each graph that CPU values are placed in, before and after."""

    def __init__(self) -> None:
        self.graphs: list[tuple[torch.fx.GraphModule, torch.fx.GraphModule]] = []
        self.patch = mock.patch.object(
            placement,
            "place_cpu_values",
            functools.partial(self.place, placement.place_cpu_values),
        )

    def place(self, original: Callable[..., None], graph: torch.fx.Graph) -> None:
        def module() -> torch.fx.GraphModule:
            return torch.fx.GraphModule(graph.owning_module, copy.deepcopy(graph))

        before = module()
        original(graph)
        self.graphs.append((before, module()))


class OnTheCpu(torch.fx.Interpreter):
    def call_function(self, target, args, kwargs):
        # From one device to another it would be a copy.
        if target is torch.ops.prims.device_put.default:
            return args[0].clone()
        return super().call_function(target, args, kwargs)


def run_on_the_cpu(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    "Runs a graph with every GPU tensor on the CPU."

    def moved(a: Any) -> Any:
        return torch.device("cpu") if isinstance(a, torch.device) else a

    gm = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
    for node in gm.graph.nodes:
        node.args, node.kwargs = pytree.tree_map(moved, (node.args, node.kwargs))
    return OnTheCpu(gm).run(*inputs)


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


def like_placeholders(gm: torch.fx.GraphModule) -> list[Any]:
    vals = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]

    def like(v: torch.Tensor) -> torch.Tensor:
        size, stride = (tuple(map(int, n)) for n in (v.shape, v.stride()))
        given = [n if step else 1 for n, step in zip(size, stride)]
        t = torch.empty_strided(given, stride, dtype=v.dtype)
        return t.copy_(cpu(*given, dtype=v.dtype)).expand(size)

    return [like(v) if isinstance(v, torch.Tensor) else int(v) for v in vals]


def compile_for_h200(program: Program, **options: Any) -> list[Any]:
    with fake_cuda() as graphs, torch.no_grad():
        compiled = torch.compile(
            program.fn, options={"pygraph": True, **options}, dynamic=program.dynamic
        )
        compiled(*program.inputs())
    return graphs


class GeneratedCodeTest(TestCase):
    def setUp(self):
        super().setUp()
        counters.clear()

    def expected_outputs(self, program):
        with fake_cuda(), torch.no_grad():
            inputs = program.inputs()
            outputs = program.fn(*inputs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            # AOTAutograd returns inputs itself.
            return [
                (o.dtype, o.device.type)
                for o in outputs
                if not any(o is i for i in inputs)
            ]

    @parametrize("name", list(PROGRAMS))
    def test_program(self, name):
        program = PROGRAMS[name]
        placed = Placed()
        with placed.patch:
            (graph,) = compile_for_h200(program)
        self.assertIsNone(graph.skip_reason)
        captured = [p for p in graph.partitions if p.captured]
        self.assertEqual(len(captured), program.partitions)
        self.assertEqual([p.cpu_inputs for p in captured], [()] * len(captured))
        self.assertNotIn(".item()", graph.source)
        # Partitions come before the class that calls them; the operators need the host.
        self.assertNotIn(
            " = torch.ops.test_pygraph", graph.source.partition("class Runner")[0]
        )
        owner = r"((?:deliver|stage|upload)_buf\d+)"
        made = re.findall(rf"^{owner} = ", graph.source, re.MULTILINE)
        self.assertEqual({*re.findall(rf"\b{owner}\.", graph.source)}, {*made})
        for expected in self.expected_outputs(program):
            self.assertIn(expected, graph.outputs)
        self.assertEqual(
            counters["pygraph"]["delivered_values"], program.delivered, graph.source
        )
        staged = ("staged_tensors", "uploaded_tensors")
        self.assertEqual(sum(counters["pygraph"][k] for k in staged), program.staged)
        self.assertEqual(counters["pygraph"]["known_tensors"], program.known)
        # What was computed is nobody else's, and is on the GPU as it was on the CPU.
        self.assertNotRegex(graph.source, r"return .*_known|_known.*# (alias|reuse)")
        constant = r"^(\w+_known)(?:_cuda0)? = None  # device\(.*?\) (.*) \w+$"
        layouts = {*re.findall(constant, graph.source, re.MULTILINE)}
        self.assertEqual(len(layouts), len({name for name, _ in layouts}))
        if "custom_op" in name:
            return
        ((before, after),) = placed.graphs
        for _ in range(2):
            inputs = like_placeholders(before)
            copies = copy.deepcopy(inputs)
            self.assertEqual(
                run_on_the_cpu(after, copies), run_on_the_cpu(before, inputs)
            )
            self.assertEqual(copies, inputs)

    def test_elements_of_a_result_stay_with_it(self):
        "A graph is given tensors, and no lists, in whatever order nodes are."
        for program in "values_around_a_copy", "custom_op_with_two_results":
            (graph,) = compile_for_h200(
                PROGRAMS[program],
                **{"triton.reorder_for_reducing_graph_partitions": False},
            )
            lists = re.findall(r"(buf\d+) = (?:deliver_\w+\.launch|torch\.ops\.)", graph.source)
            self.assertTrue(lists)
            for args in re.findall(r"partition\d+_args = \[(.*)\]", graph.source):
                self.assertTrue({*lists}.isdisjoint(re.findall(r"\w+", args)), args)

    def test_size_of_a_result_takes_no_list(self):
        "It is a symbol, and an input of its own."

        def fn(x):
            values, counts = ops.distinct(x.sin())
            return (values * counts).sum()

        with (
            torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
            fake_cuda() as graphs,
            torch.no_grad(),
        ):
            # It was compiled, and fake tensors have no such sizes.
            with self.assertRaises(DynamicOutputShapeException):
                torch.compile(fn, options={"pygraph": True})(cuda(8))
        (graph,) = graphs
        operators, _, rest = graph.source.partition("class Runner")[2].partition(
            "partition1_args = ["
        )
        (found,) = re.findall(r"(buf\d+) = torch\.ops\.", operators)
        self.assertEqual(rest[: rest.index("]")], "buf2, buf3, u0", graph.source)
        self.assertNotRegex(graph.source, rf"(return|args).*\b{found}\b")

    def test_integer_that_is_read_is_an_input_alone(self):
        "And not what item() gives besides, which is None."
        with (
            torch._dynamo.config.patch(capture_scalar_outputs=True),
            fake_cuda() as graphs,
            torch.no_grad(),
        ):
            # It was compiled, and fake tensors have no values.
            with self.assertRaises(DataDependentOutputException):
                torch.compile(lambda x, n: x * n.item() + 1, options={"pygraph": True})(
                    cuda(8), cpu(dtype=torch.int64)
                )
        (graph,) = graphs
        FileCheck().check("u0 = ").check("partition0_args = [arg1_1, u0]").run(
            graph.source.partition("class Runner")[2]
        )
        captured = [p for p in graph.partitions if p.captured]
        self.assertEqual([p.cpu_inputs for p in captured], [()])

    @parametrize("by_index", (True, False))
    def test_what_is_written_later_is_delivered_before(self, by_index):
        "One launch brings what the program has and what it computes from that."

        def fn(x, v):
            y = x + v.to("cuda")
            if by_index:
                v[0] = 0
            else:
                v[0].zero_()
            return y, x * v.to("cuda")

        (graph,) = compile_for_h200(Program(fn, lambda: (cuda(4, 4), cpu(4, 4))))
        _, _, runner = graph.source.partition("class Runner")
        delivery = re.search(r"deliver_\w+\.pack\(\[.*\]\)", runner)
        self.assertIsNotNone(delivery)
        written = r"(?m)cpp_\w+\(.*\barg0_1\)$"
        before, after = runner[: delivery.start()], runner[delivery.end() :]
        self.assertNotRegex(before, written)
        self.assertRegex(after, written)

    def test_one_launch_for_each_time(self):
        program = PROGRAMS["long_chain"]
        (graph,) = compile_for_h200(program)
        self.assertEqual(graph.source.count(" = Deliver("), 2)
        (graph,) = compile_for_h200(PROGRAMS["dtypes"])
        FileCheck().check_count(" = Deliver(", 1, exactly=True).run(graph.source)
        FileCheck().check("Deliver(0, (torch.float64, ()), (torch.int64, ()))").run(
            graph.source
        )

    def test_launches_hold_what_a_kernel_takes(self):
        def fn(x, scalars):
            for s in scalars:
                x = x + s
            return x

        program = Program(fn, lambda: (cuda(8), [cpu() for _ in range(5)]))
        room_for_three = 3 * deliver.PIECE_BYTES
        with mock.patch.object(placement, "MAX_DELIVERED_BYTES", room_for_three):
            (graph,) = compile_for_h200(program)
        self.assertEqual(graph.source.count(" = Deliver("), 2)
        self.assertEqual(counters["pygraph"]["delivered_values"], 5)
        self.assertEqual(len([p for p in graph.partitions if p.captured]), 1)

    def test_large_tensors_are_uploaded(self):
        numel = placement.MAX_STAGED_BYTES // 4

        def source(numel):
            program = Program(
                lambda x, v: x + v.to("cuda"), lambda: (cuda(numel), cpu(numel))
            )
            return compile_for_h200(program)[0].source

        FileCheck().check("= Stage(0)").run(source(numel))
        FileCheck().check("= Upload(0)").run(source(numel + 1))

    def test_copies_of_pinned_memory(self):
        "They are in the order of the stream, and wait only where the program's do."

        def there_and_back(**options):
            def fn(x):
                h = (x + 1).to("cpu", non_blocking=True)
                return h.to("cuda", **options) * 2

            return fn

        def both(x, v):
            return v.to("cuda", non_blocking=True) * v.to("cuda")

        def view(x, v):
            return v.view(2, -1).to("cuda", non_blocking=True) + 1

        def computed(x, v):
            return (v.to(torch.int32) + 1).to("cuda", non_blocking=True) + 1

        def filled(x, v):
            return x.copy_(v, non_blocking=True) + 1

        def filled_by_another_type(x, v):
            return x.double().copy_(v, non_blocking=True) + 1

        small, staged, uploaded = 8, 1024, placement.MAX_STAGED_BYTES // 4 + 1
        non_blocking = there_and_back(non_blocking=True)
        for fn, numel, owner in (
            (non_blocking, small, "Stage(0, True)"),
            (non_blocking, staged, "Stage(0, True)"),
            (non_blocking, uploaded, "Upload(0, True)"),
            (there_and_back(), small, "Deliver(0, (torch.float32, (8,)))"),
            (there_and_back(), staged, "Stage(0)"),
            (there_and_back(), uploaded, "Upload(0)"),
            (both, small, "Deliver(0, (torch.float32, (8,)))"),
            (both, staged, "Stage(0)"),
            (view, small, "Stage(0, True)"),
            (view, staged, "Stage(0, True)"),
            (computed, small, "Deliver(0, (torch.int32, (8,)))"),
            (filled, small, "Stage(0, True)"),
            (filled_by_another_type, small, "Deliver(0, (torch.float32, (8,)))"),
        ):
            takes_cpu = fn.__code__.co_argcount == 2
            program = Program(
                fn, lambda: (cuda(numel), cpu(numel)) if takes_cpu else (cuda(numel),)
            )
            torch._dynamo.reset()
            (graph,) = compile_for_h200(program)
            made = re.findall(
                r"^\w+ = ((?:Deliver|Stage|Upload)\(.*\))$", graph.source, re.MULTILINE
            )
            self.assertEqual(made, [owner], f"{fn.__name__} of {numel}")
            self.assertEqual([p.cpu_inputs for p in graph.partitions if p.captured][-1], ())

    def test_permuted_values_are_copied_as_they_lie(self):
        "To make them contiguous the host would read pinned memory at once."
        for rows in 4, 400:
            program = Program(
                lambda x, v: x + v.to("cuda"), lambda: (cuda(2, rows), cpu(rows, 2).t())
            )
            (graph,) = compile_for_h200(program)
            FileCheck().check(f"reinterpret_tensor(arg0_1, ({rows}, 2), (2, 1)").run(
                graph.source
            )
            self.assertNotIn("cpp_fused", graph.source)

    def test_what_is_delivered_again_is_not_written_by_others(self):
        "Neither reused for other results, nor handed out."
        program = Program(
            lambda x, v, s: (
                v.to("cuda").sin(),
                s.to("cuda"),
                v.to("cuda").index_put((x.argmax(),), s),
            ),
            lambda: (cuda(1024), cpu(1024), cpu()),
        )
        (graph,) = compile_for_h200(program)
        kept = re.findall(r"(buf\d+) = (?:deliver|stage)_buf", graph.source)
        self.assertEqual(len(kept), 2)
        # Their elements; see codegen_multi_output.
        kept += re.findall(rf"(buf\d+) = (?:{'|'.join(kept)})\b", graph.source)
        self.assertEqual(len(kept), 4)
        self.assertNotRegex(graph.source, rf"return .*\b({'|'.join(kept)})\b")
        self.assertNotRegex(graph.source, rf"= ({'|'.join(kept)})\b.*# reuse")
        self.assertNotRegex(graph.source, "'in_out_ptr0'")

    @parametrize("what", list(NOT_KNOWN))
    def test_not_known(self, what):
        compile_for_h200(Program(NOT_KNOWN[what], lambda: (cuda(8),)))
        self.assertEqual(counters["pygraph"]["known_tensors"], 0)
        placed = ("delivered_values", "uploaded_tensors")
        self.assertEqual(sum(counters["pygraph"][k] for k in placed), 1)

    def test_no_call_computes_what_is_known(self):
        (graph,) = compile_for_h200(PROGRAMS["known"])
        self.assertNotIn("cpp_fused", graph.source)

    def test_what_eager_mode_fails_to_compute_is_staged(self):
        program = PROGRAMS["known"]
        with mock.patch.object(placement.Placement, "compute", side_effect=RuntimeError):
            (graph,) = compile_for_h200(program)
        self.assertEqual(len([p for p in graph.partitions if p.captured]), 1)
        FileCheck().check("= Stage(0)").run(graph.source)

    DRAWS = {
        "where_values_are_brought": (
            lambda x, s: (
                torch.multinomial((x * s).softmax(-1), 2),
                torch.multinomial(x.softmax(-1), 3),
                x * s.exp(),
            ),
            lambda: (cuda(8), cpu()),
        ),
        "of_the_cpu_between_partitions": (
            lambda x, q: (
                torch.multinomial(x.sin().softmax(-1).cpu(), 2),
                x[torch.multinomial(q, 3)] + 1,
            ),
            lambda: (cuda(8), torch.rand(8)),
        ),
    }

    @parametrize("name", list(DRAWS))
    def test_random_draws_stay_in_order(self, name):
        (graph,) = compile_for_h200(Program(*self.DRAWS[name]))
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

    @parametrize("training", (False, True))
    def test_score_of_flex_attention(self, training):
        "It becomes a part of a kernel, where nothing can be brought to the GPU."

        def fn(q, s):
            return flex_attention(q * s, q, q, score_mod=lambda score, *_: score * s)

        with fake_cuda() as graphs, torch.set_grad_enabled(training):
            compiled = torch.compile(fn, options={"pygraph": True})
            q = cuda(1, 2, 128, 64).requires_grad_(training)
            out = compiled(q, cpu())
            if training:
                out.sum().backward()
        self.assertEqual(len(graphs), 1 + training)
        self.assertIn(" = Deliver(", graphs[0].source)

    def test_many_integer_operations_in_a_row(self):
        "More than Python's stack has room for."

        def fn(x, i):
            for _ in range(200):
                i = i * 5 + 1
            return x[i & 7]

        (graph,) = compile_for_h200(
            Program(fn, lambda: (cuda(8), cpu(4, dtype=torch.int64)))
        )
        self.assertEqual(len([p for p in graph.partitions if p.captured]), 1)
        self.assertNotIn("cpp_fused", graph.source)

    REGIONS = {
        "draws_on_the_cpu": lambda x: x * (torch.rand(8) < 0.9).to("cuda"),
        "larger": lambda x: x * torch.rand(8, 1024).to("cuda")[:, 0],
        "table": lambda x: x * torch.arange(0, 512, 64).float().sin().to("cuda"),
        "on_the_gpu": lambda x: x * torch.arange(8).to("cuda") + x.sin(),
    }

    @parametrize("name", list(REGIONS))
    def test_nested_region(self, name):
        "It is captured as a whole, if what it does is done by a replay."
        region = torch.compiler.nested_compile_region(self.REGIONS[name])
        program = Program(lambda x: region(region(x).relu()), lambda: (cuda(8),))
        (graph,) = compile_for_h200(program)
        # Partitions come before the class that calls them, and the rest.
        _, _, runner = graph.source.partition("class Runner")
        self.assertEqual("repeated_subgraph0(" in runner, name != "on_the_gpu")
        # Inductor sets none of a subgraph.
        self.assertEqual(counters["pygraph"]["known_tensors"], 0)

    def test_without_trees(self):
        "A graph of torch._inductor.compile_fx.cudagraphify_impl would keep the first value."
        program = Program(lambda x, s: x * s, lambda: (cuda(8), cpu()))
        (graph,) = compile_for_h200(program, **{"triton.cudagraph_trees": False})
        self.assertNotIn("Deliver", graph.source)

    def test_floating_point_stays_on_the_cpu(self):
        "Where code for the GPU may contract a multiplication and an addition."
        for dtype, on_cpu in (torch.float32, True), (torch.int64, False):
            program = Program(
                lambda x, s: x * (s * 2 + 1), lambda: (cuda(8), cpu(dtype=dtype))
            )
            (graph,) = compile_for_h200(program)
            self.assertEqual("cpp_fused_add_mul" in graph.source, on_cpu)

    def test_value_with_the_negative_bit(self):
        "Its bytes are of what it is the negative of."
        program = Program(
            lambda x, s: x * s,
            lambda: (cuda(8), torch.tensor(1 + 2j).conj().imag),
        )
        (graph,) = compile_for_h200(program)
        FileCheck().check(".run(arg0_1, arg1_1.item(), ").run(graph.source)

    def test_learning_rate_of_a_fused_optimizer(self):
        "Kernels read one on the GPU as float32; another one is left to the host, as in eager mode."
        for op in FUSED_OPTIMIZER_STEPS:
            for dtype in torch.float32, torch.float64, torch.bfloat16:
                graph = torch.fx.Graph()
                lists = [[graph.placeholder(f"x{i}")] for i in range(6)]
                rate = graph.placeholder("rate")
                step = graph.call_function(op, tuple(lists), {"lr": rate})
                with fake_cuda():
                    for (node,) in lists:
                        node.meta["val"] = cuda(8)
                    rate.meta["val"] = cpu(dtype=dtype)
                    step.meta["val"] = [cuda(8)]
                read_on_gpu = [c.value for c in analysis.crossings(graph)]
                self.assertEqual(read_on_gpu, [rate] if dtype == torch.float32 else [])

    @parametrize("index", ("mask", "second", "accumulate", "two"))
    def test_scalar_that_fills_by_a_mask(self, index):
        "index_put_ waits for the device if the scalar is on the GPU."

        def fn(x, m, s):
            y = x.sin()
            indices = {"mask": [m], "two": [m, m]}.get(index, [None, m])
            put = torch.ops.aten.index_put_
            return put(y, indices, s, index == "accumulate") + 1

        (graph,) = compile_for_h200(
            Program(fn, lambda: (cuda(8, 8), cpu(8, dtype=torch.bool), cpu()))
        )
        values = re.findall(r"aten\.index_put_\(\w+, \[.*\], (\w+), ", graph.source)
        self.assertEqual(values == ["arg1_1"], index == "second", graph.source)
        self.assertEqual(values == [], index == "mask")
        # The mask is on the GPU in any case.
        delivered = counters["pygraph"]["delivered_values"]
        self.assertEqual(delivered, 1 if index == "second" else 2)

    def test_float8_is_converted_on_the_cpu(self):
        "GPU code for some of its types there is on some GPUs only."
        for dtype in torch.float8_e4m3fn, torch.float8_e5m2fnuz:
            program = Program(
                lambda x, v: x * v.float().to("cuda"),
                lambda: (cuda(8), torch.zeros(8, dtype=dtype)),
            )
            (graph,) = compile_for_h200(program)
            self.assertIn("Deliver(0, (torch.float32, (8,)))", graph.source)

    def test_floats_do_not_recompile(self):
        for options in {}, {"pygraph_force": "node_update"}:
            with (
                # As TORCHINDUCTOR_PYGRAPH=1 with stock's setting left on.
                config.patch({"pygraph": True, "triton.cudagraphs": True}),
                fake_cuda() as graphs,
                torch.no_grad(),
            ):
                compiled = torch.compile(lambda x, by: x * by + 1, options=options)
                for by in (0.5, 1.5, 2.5, 3.5, 4.5):
                    compiled(cuda(8), by)
            self.assertEqual(len(graphs), 2)
            self.assertIn("Deliver(0, (torch.float64, ()))", graphs[1].source)

    def test_backward(self):
        def fn(x, v, s):
            return (x * v.to("cuda") * s).sin()

        with fake_cuda() as graphs:
            x = cuda(32, 32).requires_grad_()
            compiled = torch.compile(fn, options={"pygraph": True})
            compiled(x, cpu(32, 32), cpu().requires_grad_()).sum().backward()
        self.assertEqual([g.is_backward for g in graphs], [False, True])
        for graph in graphs:
            captured = [p for p in graph.partitions if p.captured]
            self.assertEqual([p.cpu_inputs for p in captured], [()])
            self.assertNotIn(".item()", graph.source)

    def test_item(self):
        "A value that the host has to have is not captured as that of one call."
        for fn, dtype, captured in (
            (lambda x, s: x * s.item(), torch.float32, True),
            (lambda x, s: torch.full_like(x, s.item()), torch.float32, False),
            # There is a recording for each integer.
            (lambda x, s: torch.full_like(x, s.item()), torch.int64, True),
        ):
            with (
                torch._dynamo.config.patch(capture_scalar_outputs=True),
                fake_cuda() as graphs,
            ):
                try:
                    compiled = torch.compile(fn, options={"pygraph": True})
                    compiled(cuda(8), cpu(dtype=dtype))
                except DataDependentOutputException:
                    pass  # it was compiled, and fake tensors have no values
            self.assertEqual(any(p.captured for p in graphs[0].partitions), captured)

    def test_item_as_an_operand(self):
        "Delivered as a float that varies is. Nothing waits, nothing is compiled for a value."
        for dtype in torch.float32, torch.float64, torch.bfloat16:
            torch._dynamo.reset()
            with fake_cuda() as graphs, torch.no_grad():
                compiled = torch.compile(
                    lambda x, s: x.sin() * s.item() + s.item(),
                    options={"pygraph": True},
                )
                for value in 0.5, 1.0, 0.0, -2.5:
                    s = torch.empty((), dtype=dtype)
                    s.item_memo = value
                    compiled(cuda(8), s)
            (graph,) = graphs
            self.assertEqual([p.cpu_inputs for p in graph.partitions if p.captured], [()])
            self.assertIn("Deliver(0, (torch.float64, ()))", graph.source)
            self.assertNotIn(".item()", graph.source)
            self.assertEqual(counters["graph_break"], {})

    def test_item_in_training(self):
        with fake_cuda() as graphs:
            x, s = cuda(32, 32).requires_grad_(), torch.empty(())
            s.item_memo = 0.5
            fn = torch.compile(lambda x, s: (x * s.item()).sin(), options={"pygraph": True})
            fn(x, s).sum().backward()
        self.assertEqual([g.is_backward for g in graphs], [False, True])
        for graph in graphs:
            captured = [p for p in graph.partitions if p.captured]
            self.assertEqual([p.cpu_inputs for p in captured], [()])
            self.assertNotIn(".item()", graph.source)

    def test_log_names_the_line(self):
        def fn(x, s):
            a = x.sin().sum(0).cpu()
            b = a + s
            return x * b.to("cuda")

        first = fn.__code__.co_firstlineno
        with self.assertLogs("torch._inductor.pygraph.report", logging.INFO) as logs:
            compile_for_h200(Program(fn, lambda: (cuda(8, 8), cpu())))
        message = "\n".join(logs.output)
        FileCheck().check(
            f"{__file__}:{first + 1} inference 0/0: prims.device_put.default is not captured "
            "(COPIES_TO_CPU) copies a result of the GPU to the CPU. The host waits"
        ).check(f"{__file__}:{first + 2} inference 0/0: ").check("(CPU_OP) runs on the CPU. It runs in each call").run(
            message
        )
        # That a CPU value is brought to the GPU is no line's doing.
        self.assertNotIn("BRINGS_CPU_VALUES", message)

    def test_report_names_the_values(self):
        big = placement.MAX_STAGED_BYTES // 4 + 1

        def fn(x, s, t, table, v):
            x = x * s + t.sum()
            x = x + torch.arange(8)[2]
            x = x[:, None] + table.to("cuda")
            x = x + torch.arange(128.0).sin().to("cuda")
            return x.sum() + v.to("cuda")

        reset_report()
        self.addCleanup(reset_report)
        inputs = lambda: (cuda(8), cpu(), cpu(8), cpu(8, 128), cpu(big))  # noqa: E731
        compile_for_h200(Program(fn, inputs))
        (graph,) = report().graphs
        first = fn.__code__.co_firstlineno
        found = {(v.how, v.type, v.source) for v in graph.cpu_values}
        at = [f"{__file__}:{first + i} in fn" for i in range(6)]
        expected = {
            ("delivered", "float32[]", at[1]),
            ("made on the GPU", "int64[8]", at[2]),
            ("staged", "float32[8, 128]", at[3]),
            ("computed at compile time", "float32[128]", at[4]),
            ("uploaded", f"float32[{big}]", at[5]),
        }
        self.assertEqual(found, expected)
        # Two scalars, which are told apart.
        self.assertEqual(len(graph.cpu_values), 6)

        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory, "report.json")
            file.write_text(report().json())
            (loaded,) = load(file)
        self.assertEqual(loaded.graphs, report().graphs)
        place = f"test_pygraph_transform.py:{first + 1} in fn"
        FileCheck().check("CPU values that GPU code reads").check(
            f"delivered: float32[] x 2, inductor/{place}"
        ).run(loaded.text())
        self.assertIn(f"delivered: float32[] x 2, inductor/{place}", loaded.html())
        self.assertNotIn("BRINGS_CPU_VALUES", loaded.text())

    def test_log_names_a_value_that_is_no_constant(self):
        fn = lambda x: x * torch.arange(128.0).sin().to("cuda")  # noqa: E731
        fails = mock.patch.object(placement.Placement, "compute", side_effect=RuntimeError("no kernel"))
        with fails, self.assertLogs(placement.log, logging.INFO) as logs:
            compile_for_h200(Program(fn, lambda: (cuda(128),)))
        self.assertIn(f"{__file__}:{fn.__code__.co_firstlineno} ", logs.output[0])
        self.assertIn(": computed in each call (NOT_CONSTANT) eager mode", logs.output[0])

    def test_log_names_why_a_graph_is_skipped(self):
        program = Program(lambda x, s: x * s, lambda: (cuda(8), cpu()))
        with (
            config.patch(graph_partition=False),
            self.assertLogs("torch._inductor.pygraph.report", logging.INFO) as logs,
        ):
            compile_for_h200(program)
        FileCheck().check("is not captured (CPU_DEVICE)").run(logs.output[0])

    def test_two_devices(self):
        "Not captured, and what is generated is right: each part enters its own device."

        def fn(x, y):
            return x.sin() + 1, y.cos(), x + y.to(x.device)

        for options in {"pygraph": True}, {"triton.cudagraphs": True}:
            torch._dynamo.reset()
            with fake_cuda() as graphs, torch.no_grad():
                x, y = (torch.empty(64, device=f"cuda:{i}") for i in range(2))
                torch.compile(fn, options=options)(x, y)
            (graph,) = graphs
            self.assertIn("multiple devices", graph.skip_reason)
            FileCheck().check("def partition_0").check("_DeviceGuard(0)").check(
                "_DeviceGuard(1)"
            ).check("class Runner").check("_DeviceGuard(0)").run(graph.source)

    def test_off(self):
        with fake_cuda() as graphs, torch.no_grad():
            torch.compile(lambda x, s: x * s, mode="reduce-overhead")(cuda(8), cpu())
        self.assertNotIn("pygraph", graphs[0].source)


instantiate_parametrized_tests(GeneratedCodeTest)


REAL_KERNEL = deliver._kernel
REAL_PINNED_COPY = deliver.pinned_copy


class ModelledDriver:
    """
    Device memory is host memory, and a launch copies at once what its parameters hold,
    unless it is captured.
    """

    def __init__(self) -> None:
        self.launches = 0
        self.copies = 0
        self.stream = self.device = 0
        self.captured: list[tuple[Any, int, bytes]] | None = None
        # What is compiled is told so when it copies.
        self.refuses = False
        self.functions: list[Any] = []
        # What the device has not done yet, if it is behind the host.
        self.is_behind = False
        self.queue: list[Callable[[], Any]] = []
        # Addresses of pinned memory of the program's.
        self.pinned: set[int] = set()

    def enqueue(self, work: Callable[[], Any]) -> None:
        if self.is_behind:
            self.queue.append(work)
        else:
            work()

    def catch_up(self, after_copy: Callable[[], Any] = lambda: None) -> None:
        for work in self.queue:
            if not isinstance(work(), ModelledEvent):
                after_copy()
        self.queue.clear()

    def copy(self, to: int, host: int, nbytes: int, non_blocking: bool = True) -> None:
        self.copies += 1
        self.enqueue(lambda: ctypes.memmove(to, host, nbytes))
        if not non_blocking:
            self.catch_up()

    def synchronize(self) -> None:
        "Of the current stream, which this is too."
        self.catch_up()

    def to(
        self, value: torch.Tensor, device: torch.device, non_blocking: bool = False
    ) -> torch.Tensor:
        result = torch.empty_like(value)
        # Which keeps the value, as the allocator of pinned memory does.
        self.enqueue(lambda: result.copy_(value))
        if not non_blocking:
            self.catch_up()
        return result

    def cuMemcpyHtoDAsync(self, to, host, nbytes, stream):
        if stream != self.stream:
            raise AssertionError("on another stream")
        self.copy(to, host, nbytes)
        return (0,)

    def entry_point(self, name: str) -> int:
        def enqueue(to: int, host: int, nbytes: int, stream: int | None) -> int:
            if self.refuses or (stream or 0) != self.stream:
                return 1
            self.copy(to, host, nbytes)
            return 0

        def pointer_attributes(count: int, attributes, results, address: int) -> int:
            if attributes[:count] != [2]:
                raise AssertionError(f"{attributes[:count]} are not modelled")
            memory_type = int(address in self.pinned)
            ctypes.c_uint32.from_address(results[0]).value = memory_type
            return 0

        word, pointer, size = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t
        model, *types = {
            "cuMemcpyHtoDAsync": (enqueue, word, pointer, size, pointer),
            "cuPointerGetAttributes": (
                pointer_attributes,
                ctypes.c_uint,
                ctypes.POINTER(ctypes.c_int),
                ctypes.POINTER(pointer),
                word,
            ),
        }[name]
        function = ctypes.CFUNCTYPE(ctypes.c_int, *types)(model)
        self.functions.append(function)
        return ctypes.cast(function, ctypes.c_void_p).value

    def cuLaunchKernel(self, sizes, *args):
        *grid_and_block, shared, stream, parameters, extra = args
        nbytes = deliver.offsets(sizes, deliver.PIECE_BYTES)[-1]
        threads = nbytes // deliver.PIECE_BYTES
        expected = [1, 1, 1, threads, 1, 1]
        if grid_and_block != expected or (shared, extra) != (0, 0):
            raise AssertionError(f"launched as {args}")
        if stream != self.stream:
            raise AssertionError("on another stream")
        pointers = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        (destination,) = ctypes.cast(pointers[0], ctypes.POINTER(ctypes.c_void_p))[:1]
        words = ctypes.string_at(pointers[1], nbytes)
        if self.captured is not None:
            self.captured.append((sizes, destination, words))
        else:
            self.run(sizes, destination, words)
        return (0,)

    def run(self, sizes, destination, words):
        self.launches += 1
        source = ctypes.create_string_buffer(bytes(words))
        gaps = re.findall(
            r"setp.ge.u32 %behind, %piece, (\d+);\s*@%behind add.s64 %to, %to, (\d+);",
            deliver.ptx(sizes),
        )
        for start in range(0, len(words), deliver.PIECE_BYTES):
            piece = start // deliver.PIECE_BYTES
            offset = start + sum(int(gap) for first, gap in gaps if piece >= int(first))
            address = ctypes.addressof(source) + start
            ctypes.memmove(destination + offset, address, deliver.PIECE_BYTES)

    def patches(self):
        return (
            mock.patch.object(deliver, "bindings", lambda: self),
            mock.patch.object(deliver, "entry_point", self.entry_point),
            mock.patch.object(deliver, "_kernel", lambda sizes: sizes),
            mock.patch.object(
                torch._C,
                "_cuda_getCurrentRawStream",
                lambda i: self.stream,
                create=True,
            ),
            mock.patch.object(torch.cuda, "device", lambda i: mock.MagicMock()),
            mock.patch.object(
                torch.cuda,
                "is_current_stream_capturing",
                lambda: self.captured is not None,
            ),
            mock.patch.object(
                torch._C,
                "_cuda_isCurrentStreamCapturing",
                lambda: self.captured is not None,
            ),
            mock.patch.object(
                torch._C, "_cuda_getDevice", lambda: self.device, create=True
            ),
            mock.patch.object(deliver, "pinned_copy", self.pinned_copy),
            mock.patch.object(
                deliver._Staged,
                "_copy",
                lambda staged, host, non_blocking=True: self.copy(
                    staged.copy.data_ptr(), host.data_ptr(), host.nbytes, non_blocking
                ),
            ),
            mock.patch.object(
                torch.Tensor, "is_pinned", lambda t: t.data_ptr() in self.pinned
            ),
            mock.patch.object(torch.cuda, "current_device", lambda: None),
            mock.patch.object(torch.cuda, "current_stream", lambda device: self),
            mock.patch.object(torch.cuda, "Event", lambda: ModelledEvent(self)),
        )

    def pinned_copy(self, value):
        self.launches += 1
        return value.clone()


class ModelledEvent:
    def __init__(self, driver: ModelledDriver) -> None:
        self.driver = driver
        self.is_done = False

    def record(self, stream):
        self.driver.enqueue(self.done)

    def done(self):
        self.is_done = True
        return self

    def query(self):
        return self.is_done


class DeliverTest(TestCase):
    def setUp(self):
        super().setUp()
        self.driver = ModelledDriver()
        for patch in self.driver.patches():
            patch.start()
            self.addCleanup(patch.stop)

    def deliver(self, *values):
        d = deliver.Deliver(0, *((v.dtype, tuple(v.shape)) for v in values))
        d.device = torch.device("cpu")
        return d

    def give(self, d, *values):
        d.pack(values)
        return d.launch()

    def make(self):
        dtypes = (
            torch.float64,
            torch.int64,
            torch.bool,
            torch.uint8,
            torch.float16,
            torch.bfloat16,
            torch.int32,
            torch.float32,
        )
        sizes = ((), (3,), (2, 5))
        return [cpu(*size, dtype=dtype) for dtype in dtypes for size in sizes]

    def assertGiven(self, outputs, values):
        self.assertEqual(outputs, values, atol=0, rtol=0)
        self.assertEqual([o.dtype for o in outputs], [v.dtype for v in values])

    def test_each_value_keeps_its_dtype(self):
        d = self.deliver(*self.make())
        for calls in range(1, 4):
            values = self.make()
            outputs = self.give(d, *values)
            self.assertGiven(outputs, values)
            self.assertEqual(self.driver.launches, calls)
            for o in outputs:
                offset = o.storage_offset() * o.element_size()
                self.assertEqual(offset % MAX_ALIGNMENT, 0)

    def test_read_when_packed(self):
        d = self.deliver(cpu())
        s = torch.tensor(3.0)
        d.pack([s])
        s.fill_(4)
        self.assertEqual(d.launch(), [3.0])

    def test_each_stream_and_thread_has_its_own(self):
        d = self.deliver(cpu())
        first = self.give(d, torch.tensor(1.0))
        self.driver.stream = 7
        second = self.give(d, torch.tensor(2.0))
        results = []
        thread = threading.Thread(
            target=lambda: results.append(self.give(d, torch.tensor(3.0)))
        )
        thread.start()
        thread.join()
        self.assertEqual([first, second, *results], [[1.0], [2.0], [3.0]])
        self.assertIs(self.give(d, torch.tensor(4.0)), second)

    def test_a_programs_own_capture(self):
        "The values are those of the call, as all that it captures, in the graph's memory."
        d = self.deliver(cpu())
        before = self.give(d, torch.tensor(4.0))
        self.driver.captured = []
        d.pack([torch.tensor(5.0)])
        (output,) = d.launch()
        self.assertEqual(before, [4.0])
        ((sizes, destination, words),) = self.driver.captured
        self.driver.run(sizes, destination, words)
        self.assertEqual(output, 5.0)

    def test_captured_values_are_words_of_the_binding(self):
        first, second = self.make(), [cpu(), cpu(dtype=torch.int64)]
        delivers = [self.deliver(*first), self.deliver(*second)]
        for d, values in zip(delivers, (first, second)):
            d.pack(values)
        captured = deliver.CapturedValues(delivers, is_bound=True)
        self.driver.captured = graph = []
        with captured:
            outputs = [d.launch() for d in delivers]
        self.driver.captured = None
        # The memory is the graph's.
        self.assertEqual([len(d.targets) for d in delivers], [0, 0])
        for d, given in zip(delivers, outputs):
            self.assertIsNot(d.packed().target.outputs, given)

        # The executable graph, as NodeUpdateBinding finds and sets it.
        placeholders = PlaceholderMap(captured.placeholders())
        params = [ctypes.create_string_buffer(w, len(w)) for _, _, w in graph]
        updates = [
            binding.NodeUpdate(
                binding.find_words(p, placeholders), lambda: (0,), (), None
            )
            for p in params
        ]
        pointers = [p.address for p in captured.placeholders()]
        nodes_of = [[] for _ in pointers]
        for i, update in enumerate(updates):
            for word in update.words:
                nodes_of[word.input].append(i)
        self.assertTrue(all(len(n) == 1 for n in nodes_of))
        nodes = binding.Nodes(pointers, updates, nodes_of)

        words = captured.words_for_replay()
        for _ in range(3):
            self.assertEqual(words(), captured.words())
            nodes(captured.words())
            for (sizes, destination, _), p in zip(graph, params):
                self.driver.run(sizes, destination, p.raw)
            self.assertGiven(outputs[0], first)
            self.assertGiven(outputs[1], second)
            self.assertEqual(captured.words(), nodes.pointers)
            first, second = self.make(), [cpu(), cpu(dtype=torch.int64)]
            for d, values in zip(delivers, (first, second)):
                d.pack(values)

    def test_a_graph_that_is_replayed_as_it_is(self):
        "It reads memory that is written ahead of each replay, and by nothing else."
        d = self.deliver(cpu())
        for n in range(3):
            d.pack([torch.tensor(float(n))])
        captured = deliver.CapturedValues([d], is_bound=False)
        self.driver.captured = []
        self.driver.stream = 7
        # What the graph reads is what it begins with a copy of.
        read = mock.patch.object(torch.Tensor, "clone", lambda t: t)
        with captured, read:
            (read_by_graph,) = d.launch()
        self.assertEqual(self.driver.captured, [])
        self.driver.captured = None
        last = 2.0
        for stream in (0, 3):
            self.driver.stream = stream
            captured.write()
            self.assertEqual(read_by_graph, last)
            for value in (4.0 + stream, 5.0 + stream):
                self.assertEqual(self.give(d, torch.tensor(value)), [value])
                self.assertEqual(read_by_graph, last)
            captured.write()
            last = 5.0 + stream
            self.assertEqual(read_by_graph, last)

    def test_words_of_each_thread(self):
        values = self.make()
        first, second = self.deliver(*values), self.deliver(cpu(dtype=torch.int64))
        captured = deliver.CapturedValues([first, second], is_bound=True)
        self.assertIsNone(captured.words_for_replay())
        captured.tokens(first)
        captured.tokens(second)
        words = captured.words_for_replay()
        failures = []

        def check():
            try:
                self.assertEqual(words(), [0] * captured.num_words)
                for n in range(4):
                    first.pack(self.make())
                    self.assertEqual(words(), captured.words())
                    second.pack([torch.tensor(n)])
                    self.assertEqual(words(), captured.words())
                    self.assertEqual(words()[-2:], [n, 0])
            except AssertionError as e:
                failures.append(e)

        check()
        ours = words()
        thread = threading.Thread(target=check)
        thread.start()
        thread.join()
        self.assertEqual(failures, [])
        self.assertEqual(words(), ours)

    def test_calls_that_only_copy_are_compiled(self):
        if native.compiled is None:
            self.skipTest("requires _replay")
        values = self.make()
        d = self.deliver(*values)
        captured = deliver.CapturedValues([d], is_bound=True)
        captured.tokens(d)
        words = captured.words_for_replay()
        for _ in range(2):
            d.pack(values)
        error = AssertionError("done by Python")
        by_python = mock.patch.object(deliver.Deliver, "packed", side_effect=error)
        values = self.make()
        with by_python:
            d.pack(values)
            packed = words()
            for other in [], [*values, cpu()], tuple(values), [None] * len(values):
                with self.assertRaisesRegex(AssertionError, "done by Python"):
                    d.pack(other)
        self.assertEqual(packed, captured.words())
        self.assertGiven(d.launch(), values)
        with self.assertRaises(AttributeError):
            d.pack([None] * len(values))

    def test_other_captures_end(self):
        d = self.deliver(cpu())
        with self.assertRaises(KeyError), deliver.CapturedValues([d], is_bound=True):
            raise KeyError
        self.assertEqual(self.give(d, torch.tensor(2.0)), [2.0])

    def test_without_bindings(self):
        with mock.patch.object(deliver, "_kernel", lambda sizes: None):
            values = [cpu(3), cpu(dtype=torch.int64), cpu(2, 7)]
            d = self.deliver(*values)
            self.assertGiven(self.give(d, *values), values)
            self.driver.captured = []
            with self.assertRaisesRegex(RuntimeError, "cuda-bindings"):
                with deliver.CapturedValues([d], is_bound=True):
                    d.launch()

    def test_no_way_to_a_kernel(self):
        for error in ImportError("no module"), RuntimeError("no libcuda"):
            with mock.patch.object(deliver, "bindings", side_effect=error):
                self.assertIsNone(REAL_KERNEL.__wrapped__((4,)))

    def test_offsets(self):
        self.assertEqual(deliver.offsets([4, 16, 17, 1], 16), [0, 16, 32, 64, 80])

    def stage(self, non_blocking=False):
        stage = deliver.Stage(0, non_blocking)
        stage.device = torch.device("cpu")
        return stage

    def fill_later(self, pinned, content):
        "By an asynchronous copy from the GPU."
        self.driver.pinned.add(pinned.data_ptr())
        self.driver.is_behind = True
        self.driver.enqueue(lambda: pinned.fill_(content))

    def test_delivered_from_pinned_memory(self):
        "A copy to it may be under way, in each call: also when calls are compiled."
        values = [torch.zeros(()), torch.zeros(300), torch.zeros(3)]
        d = self.deliver(*values)
        for content in range(1, 5):
            self.fill_later(values[1], content)
            d.pack(values)
            self.assertEqual(self.driver.queue, [])
            self.driver.is_behind = False
            zeros = [values[0], values[2]]
            _, given, _ = d.launch()
            self.assertEqual(given, torch.full((300,), float(content)))
            self.assertEqual(d.launch()[::2], zeros)
        # By Python in each call, and by what is compiled where there is no pinned value.
        by_python = mock.patch.object(
            deliver.Deliver, "packed", side_effect=AssertionError("done by Python")
        )
        with by_python, self.assertRaisesRegex(AssertionError, "done by Python"):
            d.pack(values)
        if native.compiled is not None:
            with by_python:
                d.pack([cpu(), cpu(300), cpu(3)])

    def test_a_programs_own_capture_of_pinned_memory(self):
        "Which would end if the host waited."
        value, other = torch.ones(()), torch.ones(1000)
        self.driver.pinned = {value.data_ptr(), other.data_ptr()}
        stop = AssertionError("it waits")
        with mock.patch.object(self.driver, "synchronize", side_effect=stop):
            self.driver.captured = []
            self.deliver(value).pack([value])
            with mock.patch.object(torch.Tensor, "to") as to:
                for non_blocking in (False, True):
                    for owner in (
                        self.stage(non_blocking).stage,
                        deliver.Upload(0, non_blocking).upload,
                    ):
                        owner(other)
                        self.assertEqual(
                            to.call_args.kwargs, {"non_blocking": non_blocking}
                        )

    @parametrize("non_blocking", (False, True))
    def test_uploaded_from_pinned_memory(self, non_blocking):
        upload = deliver.Upload(0, non_blocking)
        to = mock.patch.object(
            torch.Tensor, "to", lambda *args, **kwargs: self.driver.to(*args, **kwargs)
        )
        pinned, value = torch.zeros(1000), torch.full((1000,), 2.0)
        with to:
            for content in (5.0, 7.0):
                self.fill_later(pinned, content)
                result = upload.upload(pinned)
                self.assertEqual(len(self.driver.queue), 2 if non_blocking else 0)
                self.driver.catch_up()
                self.assertEqual(result, torch.full((1000,), content))
            # The rest does not wait, and the program may change it at once.
            self.driver.is_behind = True
            result = upload.upload(value)
            self.assertEqual(len(self.driver.queue), 1)
            value.fill_(3)
            self.driver.catch_up()
            self.assertEqual(result, torch.full((1000,), 2.0))

    @parametrize("non_blocking", (False, True))
    def test_staged_from_pinned_memory(self, non_blocking):
        stage = self.stage(non_blocking)
        pinned, value = torch.zeros(1000), torch.zeros(1000)
        seen = []

        def check(value, expected, *, queued):
            copies = self.driver.copies
            copy = stage.stage(value)
            self.assertEqual(len(self.driver.queue), queued)
            self.driver.is_behind = False
            self.driver.catch_up()
            self.assertEqual(copy, torch.full((1000,), float(expected)))
            seen.append(self.driver.copies - copies)

        in_order = 2 if non_blocking else 0
        # Its bytes are those of the last host: at first by Python, then compiled.
        for content in (2, 4, 6):
            for filled in (content, content + 1):
                pinned.zero_()
                self.fill_later(pinned, filled)
                check(pinned, filled, queued=in_order)
            # They are not those of the copy now.
            for _ in range(3):
                check(value, 0, queued=0)
        self.assertEqual(seen, [1, 1, 1, 0, 0] * 3)
        self.fill_later(pinned, 4)
        check(pinned, 4, queued=in_order)
        value.fill_(9)
        check(value, 9, queued=0)
        check(value, 9, queued=0)
        self.assertEqual(seen[15:], [1, 1, 0])

    def test_staged_from_pinned_memory_while_hosts_are_read(self):
        "What is still to be copied from a host stays there."
        stage = self.stage(non_blocking=True)
        pinned = torch.full((1000,), -1.0)
        self.driver.pinned.add(pinned.data_ptr())
        for behind in (100, 30):
            self.driver.is_behind = True
            for i in range(behind):
                stage.stage(pinned if i % 3 == 2 else torch.full((1000,), i + 0.5))
            (staged,) = stage.kept.values()
            seen = []
            self.driver.catch_up(lambda: seen.append(staged.copy[-1].item()))
            expected = [-1.0 if i % 3 == 2 else i + 0.5 for i in range(behind)]
            self.assertEqual(seen, expected)

    def test_default_device(self):
        "It is the program's: memory is where it says."
        empty = torch.empty

        def pinned(*size, pin_memory=False, **options):
            made = empty(*size, **options)
            self.assertEqual(made.device.type, "cpu")
            return made

        value = torch.ones(1000)
        with torch.device("meta"):
            self.assertTrue(torch.empty(0).is_meta)
            with mock.patch.object(torch, "empty", pinned):
                copy = REAL_PINNED_COPY(value)
            stage, d = self.stage(), self.deliver(value[:3])
            staged = [stage.stage(value) for _ in range(3)]
            given = [self.give(d, value[:3])[0] for _ in range(3)]
        self.assertEqual([copy, *staged], [value] * 4)
        self.assertEqual(given, [value[:3]] * 3)

    def test_stage_copies_what_changed(self):
        stage = self.stage()
        value = torch.zeros(1000)
        staged = stage.stage(value)
        self.assertIs(stage.stage(value), staged)
        self.assertIs(stage.stage(value.clone()), staged)
        self.assertEqual(self.driver.copies, 1)
        # No version counter sees this.
        value.numpy()[-1] = 5
        self.assertIs(stage.stage(value), staged)
        self.assertEqual(staged, value)
        self.assertEqual(self.driver.copies, 2)
        # Equal to ==, but not the same.
        value[0] = -0.0
        self.assertTrue(stage.stage(value)[0].signbit())
        value[0] = float("nan")
        stage.stage(value)
        copies = self.driver.copies
        stage.stage(value)
        self.assertEqual(self.driver.copies, copies)
        self.driver.stream = 7
        self.assertIsNot(stage.stage(value), staged)

    @parametrize("numel", (3, 5000, 100_000))
    def test_stage_leaves_what_is_still_read(self, numel):
        "However far the host is ahead; pinned memory that was read is used again."
        stage = self.stage()
        self.driver.is_behind = True
        for behind in (100, 0, 30):
            for i in range(behind):
                stage.stage(torch.full((numel,), i + 0.5))
            (staged,) = stage.kept.values()
            seen = []
            self.driver.catch_up(lambda: seen.append(staged.copy[-1].item()))
            self.assertEqual(seen, [i + 0.5 for i in range(behind)])
        allocated = self.driver.launches
        for i in range(200):
            stage.stage(torch.full((numel,), float(i)))
            self.driver.catch_up()
        self.assertEqual(staged.copy[0], 199.0)
        self.assertLessEqual(self.driver.launches, allocated + deliver.MAX_BATCH)

    def test_stage_is_compiled_while_memory_is_left(self):
        if native.compiled is None:
            self.skipTest("requires _replay")
        stage = self.stage()
        by_python = []

        def staged(value):
            result = stage._stage(value)
            by_python.append(value[0].item())
            return result

        compiled = native.compiled.Stage(
            staged,
            0,
            torch._C._cuda_isCurrentStreamCapturing,
            torch._C._cuda_getCurrentRawStream,
            torch._C._cuda_getDevice,
        )
        stage.compiled = stage.stage = compiled

        def check(first, *, python):
            by_python.clear()
            value = torch.full((1000,), float(first))
            copy = stage.stage(value)
            self.assertEqual(copy, value, atol=0, rtol=0)
            self.assertEqual(by_python, [first] if python else [])
            return copy

        # Nothing is known, and each host is new.
        for i in range(deliver.MAX_BATCH):
            check(i, python=True)
            check(i, python=False)
        # The batch begins again, by Python.
        for n in range(1, 4):
            for i in range(deliver.MAX_BATCH):
                check(100 * n + i, python=i == 0)
                copies = self.driver.copies
                check(100 * n + i, python=False)
                self.assertEqual(self.driver.copies, copies)
        # From in between: another device, stream, thread, size, what is no tensor.
        check(401, python=True)
        check(402, python=False)
        self.driver.device = 1
        check(403, python=True)
        self.driver.device = 0
        check(404, python=False)
        self.driver.refuses = True
        check(405, python=True)
        self.driver.refuses = False
        check(406, python=False)
        self.driver.stream = 7
        check(406, python=True)
        self.driver.stream = 0
        check(406, python=False)
        thread = threading.Thread(target=check, args=(406,), kwargs={"python": True})
        thread.start()
        thread.join()
        self.assertEqual(by_python, [406])
        check(406, python=False)
        self.assertEqual(len(stage.kept), 3)
        self.driver.captured = []
        by_python.clear()
        stage.stage(torch.ones(1000))
        self.assertEqual(by_python, [1])
        self.driver.captured = None
        check(406, python=False)
        with self.assertRaises(AttributeError):
            stage.stage(None)
        with self.assertRaises(TypeError):
            stage.stage()
        copy = check(0, python=True)
        before = sys.getrefcount(copy)
        for i in range(30):
            stage.stage(torch.full((1000,), float(i)))
        self.assertEqual(sys.getrefcount(copy), before)

    def test_stage_without_bindings(self):
        with mock.patch.object(deliver, "entry_point", side_effect=ImportError):
            stage = self.stage()
            for i in range(20):
                value = torch.full((1000,), float(i))
                self.assertEqual(stage.stage(value), value)

    def test_inference_mode_of_the_first_call(self):
        "It is not that of later ones, which write to the same memory."
        stage = self.stage()
        for without_kernel in (False, True):
            with mock.patch.object(
                deliver, "_kernel", lambda sizes: None if without_kernel else sizes
            ):
                d = self.deliver(cpu(3))
                with torch.inference_mode():
                    self.assertFalse(stage.stage(torch.zeros(100)).is_inference())
                    self.give(d, torch.zeros(3))
                self.assertEqual(stage.stage(torch.ones(100)), torch.ones(100))
                self.assertEqual(self.give(d, torch.ones(3)), [torch.ones(3)])

    def test_stage_of_several_threads(self):
        stage = self.stage()
        seen = []

        def run(value):
            staged = stage.stage(torch.full((100,), value))
            seen.append((staged, value))
            barrier.wait()

        # Both live until the end, so that no identity is used again.
        barrier = threading.Barrier(2)
        threads = [threading.Thread(target=run, args=(float(i),)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(len(stage.kept), 2)
        for staged, value in seen:
            self.assertEqual(staged, torch.full((100,), value))

    def test_stage_in_a_programs_own_capture(self):
        "It copies as eager does, and keeps nothing of it."
        stage = self.stage()
        value = torch.zeros(100)
        kept = stage.stage(value)
        self.driver.captured = []
        self.assertIsNot(stage.stage(value), kept)
        self.assertEqual(self.driver.copies, 1)
        self.driver.captured = None
        self.assertIs(stage.stage(value), kept)

    def test_kernel_assembles(self):
        import triton

        ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
        if not ptxas.exists():
            self.skipTest("this Triton comes without ptxas")
        for sizes in (1,), (8, 24, 2048), (16,) * 255:
            self.assertLessEqual(
                deliver.offsets(sizes, deliver.PIECE_BYTES)[-1],
                deliver.MAX_DELIVERED_BYTES,
            )
            with tempfile.TemporaryDirectory() as directory:
                source = Path(directory, "deliver.ptx")
                source.write_text(deliver.ptx(sizes))
                subprocess.run(
                    [ptxas, "-arch=sm_90", source, "-o", Path(directory, "cubin")],
                    check=True,
                )


instantiate_parametrized_tests(DeliverTest)


class DeliverByPythonTest(DeliverTest):
    "As where nothing is compiled."

    def setUp(self):
        super().setUp()
        patch = mock.patch.object(native, "compiled", None)
        patch.start()
        self.addCleanup(patch.stop)


class FloatTest(TestCase):
    "What Dynamo has made of a float that varies."

    def assertSame(self, value):
        made = native.as_tensor_fullprec(value)
        expected = torch._as_tensor_fullprec(value)
        self.assertIs(type(made), type(expected))
        self.assertEqual(made.device, expected.device)
        self.assertEqual(made.is_inference(), expected.is_inference())
        self.assertEqual(made.requires_grad, expected.requires_grad)
        if type(made) is torch.Tensor:
            self.assertEqual(made, expected, atol=0, rtol=0, equal_nan=True)
        return made

    def test_as_in_eager_mode(self):
        class Float(float):
            pass

        for value in 1.5, 1 / 3, -0.0, float("nan"), float("inf"), 5e-324:
            made = self.assertSame(value)
            self.assertEqual(made.dtype, torch.float64)
            self.assertEqual(str(made.item()), str(value))
        for value in 3, True, Float(2.5), np.float32(0.1), np.ones(3), [1.0, 2.0]:
            self.assertSame(value)
        self.assertEqual(native.as_tensor_fullprec(3).dtype, torch.int64)
        with self.assertRaises(TypeError):
            native.as_tensor_fullprec("text")
        # Each is the caller's.
        kept = native.as_tensor_fullprec(1.5)
        native.as_tensor_fullprec(2.5)
        self.assertEqual(kept, 1.5)
        kept.requires_grad_().mul(3).backward()
        self.assertEqual(kept.grad, 3.0)

    def test_modes(self):
        for mode in (
            FakeTensorMode,
            torch.inference_mode,
            torch.no_grad,
            lambda: torch.device("meta"),
            lambda: torch.autocast("cpu"),
        ):
            with mode():
                self.assertSame(1.5)

        def fn(x):
            self.assertSame(1.5)
            return x * native.as_tensor_fullprec(2.5)

        self.assertEqual(torch.func.grad(fn)(torch.tensor(1.0)), 2.5)
        self.assertEqual(torch.func.vmap(fn)(torch.ones(2)), [2.5, 2.5])
        self.assertIn("lift_fresh", make_fx(fn)(torch.ones(2)).code)

    @parametrize("by_option", (False, True))
    def test_compiled_code_calls_it(self, by_option):
        real = native.as_tensor_fullprec
        for on in True, False:
            setting = {"pygraph": on}
            with (
                mock.patch.object(native, "as_tensor_fullprec", wraps=real) as made,
                config.patch({} if by_option else setting),
                fake_cuda() as graphs,
                torch.no_grad(),
            ):
                fn = torch.compile(
                    lambda x, a, b: x * a + b, options=setting if by_option else {}
                )
                for n in range(4):
                    fn(cuda(8), n + 0.5, n + 0.25)
            self.assertEqual(len(graphs), 2)
            values = [float(call.args[0]) for call in made.call_args_list]
            expected = [n + f for n in (1, 2, 3) for f in (0.5, 0.25)]
            self.assertEqual(values, expected if on else [])


instantiate_parametrized_tests(FloatTest)


@unittest.skipUnless(HAS_CPU, "requires a C++ compiler")
class ItemTest(TestCase):
    "What generated code makes of the value of a tensor on the CPU, all on the CPU."

    VALUES = (0.3, 1.0, 0.0, -0.0, -2.5, float("inf"), float("nan"), 1e-45, 1e300)

    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        counters.clear()

    def assertEager(self, fn, compiled, *inputs):
        copies = copy.deepcopy(inputs)
        actual, expected = compiled(*inputs), fn(*copies)
        self.assertEqual(actual, expected, atol=0, rtol=0, exact_dtype=True)
        self.assertEqual(inputs, copies, atol=0, rtol=0)

    def check(self, fn, dtype=torch.float32, x=None, values=VALUES):
        x = torch.randn(19) if x is None else x
        compiled = torch.compile(fn, options={"pygraph": True})
        for value in values:
            self.assertEager(fn, compiled, x.clone(), torch.tensor(value, dtype=dtype))
        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

    @parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16))
    def test_of_all_dtypes(self, dtype):
        fn = lambda x, s: (x * s.item(), s.item() + x, x - s.item(), s.item() / x)  # noqa: E731
        self.assertEqual(self.check(fn, dtype), (1, 0))

    @parametrize("dtype", (torch.float64, torch.bfloat16, torch.int64, torch.bool))
    def test_promotes_nothing(self, dtype):
        for x in torch.arange(-4, 5).to(dtype), torch.tensor(3).to(dtype):
            torch._dynamo.reset()
            counters.clear()
            fn = lambda x, s: (x * s.item(), s.item() * x)  # noqa: E731
            self.assertEqual(self.check(fn, torch.float64, x), (1, 0))

    def test_in_place_of_integers(self):
        "Eager mode raises an error, and writes nothing."
        for fn in (lambda x, s: x.mul_(s.item()), lambda x, s: x.div_(s.item())):
            for dtype in torch.int64, torch.bool:
                compiled = torch.compile(fn, options={"pygraph": True})
                x = torch.tensor([1, 0, 1]).to(dtype)
                before = x.clone()
                with self.assertRaisesRegex(RuntimeError, "can't be cast"):
                    compiled(x, torch.tensor(0.5))
                self.assertEqual(x, before)

    def test_written_after(self):
        def fn(x, s):
            y = x * s.item()
            s += 1
            x.mul_(2)
            return y, s + 1

        self.assertEqual(self.check(fn), (1, 0))

    def test_no_arithmetic(self):
        "Tensors are made of it, or it is not used at all. Or arithmetic of more than two."
        for fn in (
            lambda x, s: x * s.item() + torch.full_like(x, s.item()),
            lambda x, s: torch.add(x, s.item(), alpha=2),
            lambda x, s: (x * 2, s.item())[0],
        ):
            torch._dynamo.reset()
            counters.clear()
            graphs, breaks = self.check(fn, values=(0.3,))
            self.assertGreater(breaks, 0)

    @parametrize("failure", ("backend", "guard", "specialized"))
    def test_backend(self, failure):
        "Had it looked at a value, it would be as without PyGraph."
        real = torch._TorchCompileInductorWrapper.__call__

        def backend(wrapper, gm, inputs):
            for item in gm.graph.find_nodes(op="call_method", target="item"):
                value = item.meta["example_value"]
                if failure == "backend":
                    raise RuntimeError("does not compile")
                if failure == "guard":
                    bool(value > 0)
                elif failure == "specialized":
                    TensorifyState.specialize(str(value.node._expr))
                    raise TensorifyScalarRestartAnalysis
            return real(wrapper, gm, inputs)

        with mock.patch.object(torch._TorchCompileInductorWrapper, "__call__", backend):
            # The graph that follows has a float, to which the same is done.
            self.assertEqual(self.check(lambda x, s: x * s.item(), values=(0.3,)), (1, 1))

    def test_alpha_of_a_float(self):
        "Which the tensor that the float becomes would not have."
        fn = lambda x, by: torch.add(x, by, alpha=2)  # noqa: E731
        compiled = torch.compile(fn, options={"pygraph": True})
        x = torch.ones(3)
        for by in (0.25, 0.5, 1.5, 0.75):
            self.assertEqual(compiled(x, by), fn(x, by))

    @parametrize("training", (False, True))
    def test_specialized_floats_are_not_cached(self, training):
        fn = lambda x, by: x * by + torch.full_like(x, by)  # noqa: E731
        x = torch.ones(3, requires_grad=training)
        for _ in range(2):
            torch._dynamo.reset()
            compiled = torch.compile(fn, options={"pygraph": True})
            for by in (0.25, 0.5, 1.5, 0.75):
                y = compiled(x, by)
                self.assertEqual(y, fn(x, by))
                if training:
                    # An entry is saved once there is a backward, outside of options=.
                    (grad,) = torch.autograd.grad(y.sum(), x)
                    self.assertEqual(grad, torch.full((3,), by))

    def test_symbols_of_other_frames(self):
        "Names are of few numbers."
        fn = lambda x, s: x * s.item()  # noqa: E731
        names = {f"zf{n}" for n in range(200)}
        with mock.patch.object(TensorifyState, "force_specializations", names):
            self.assertEqual(self.check(fn), (1, 0))

    @parametrize("write", ("in_place", "data", "numpy"))
    def test_written_before_backward(self, write):
        def fn(x, s):
            return (x * s.item()).sin() * s.item()

        compiled = torch.compile(fn, options={"pygraph": True})
        for dtype in torch.float32, torch.float64:
            s = torch.zeros((), dtype=dtype)
            for value in (0.3, 1.0, 0.0, 2.5):
                s.fill_(value)
                x = torch.randn(19, requires_grad=True)
                y, expected = compiled(x, s), fn(x, s)
                if write == "in_place":
                    s.fill_(9)
                elif write == "data":
                    s.data.fill_(9)
                else:
                    s.numpy()[()] = 9
                grads = (torch.autograd.grad(out.sum(), x) for out in (y, expected))
                self.assertEqual(*grads)
        self.assertEqual(counters["stats"]["unique_graphs"], 2)
        self.assertEqual(counters["graph_break"], {})


instantiate_parametrized_tests(ItemTest)


def aliases(inputs: Any, outputs: Any) -> list[tuple[int, ...]]:
    "For each output, which inputs and outputs share its storage."
    storages = [
        t.untyped_storage().data_ptr() if isinstance(t, torch.Tensor) else None
        for t in (*pytree.tree_leaves(inputs), *outputs)
    ]
    return [
        tuple(i for i, s in enumerate(storages) if s == t.untyped_storage().data_ptr())
        for t in outputs
    ]


FORCED = {"pygraph": True, "pygraph_force": "node_update"}


@unittest.skipUnless(HAS_CUDA_AND_TRITON, "requires CUDA and Triton")
class DeviceTest(TestCase):
    """Results are eager's, in every call."""

    CALLS = 12

    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        torch.manual_seed(0)
        np.random.seed(0)
        counters.clear()
        reset_report()

    def tearDown(self):
        super().tearDown()
        torch._dynamo.reset()

    def check_call(self, fn, compiled, inputs):
        copies = pytree.tree_map_only(torch.Tensor, torch.clone, inputs)
        expected, actual = fn(*copies), compiled(*inputs)
        if isinstance(expected, torch.Tensor):
            expected, actual = (expected,), (actual,)
        for e, a in zip(expected, actual, strict=True):
            self.assertEqual((a.dtype, a.device), (e.dtype, e.device))
            self.assertEqual((a.shape, a.stride()), (e.shape, e.stride()))
        self.assertEqual(actual, expected, atol=1e-4, rtol=1e-4)
        self.assertEqual(inputs, copies, atol=1e-5, rtol=1e-5)
        self.assertEqual(aliases(inputs, actual), aliases(copies, expected))

    def recorded(self):
        return [r for r in report() if r.kernel_nodes]

    def check_program(self, name, options, calls):
        program = PROGRAMS[name]
        compiled = torch.compile(program.fn, options=options, dynamic=program.dynamic)
        with torch.no_grad():
            for _ in range(calls):
                self.check_call(program.fn, compiled, program.inputs())
        self.assertEqual(counters["inductor"]["cudagraph_skips"], 0)
        return program

    @parametrize("name", list(PROGRAMS))
    def test_program(self, name):
        program = self.check_program(name, FORCED, self.CALLS)
        self.assertEqual(len(self.recorded()), program.partitions, str(report()))
        self.assertEqual([r.copied_bytes for r in report()], [0] * len(report()))

    @parametrize("name", ("dtypes", "long_chain", "scalar_mutated", "copy_returned"))
    def test_copied(self, name):
        "Graphs that are replayed as they are read the values from memory."
        self.check_program(name, {**FORCED, "pygraph_force": "copy"}, self.CALLS)

    @parametrize("name", ("dtypes", "long_chain", "scalar_mutated", "copy_returned"))
    def test_selected(self, name):
        # As many as it takes to choose, as a rule; see select.py.
        self.check_program(name, {"pygraph": True}, 60)

    @parametrize("force", ("node_update", "copy"))
    def test_floats(self, force):
        fn = lambda x, s, t: x * s + t  # noqa: E731
        compiled = torch.compile(fn, options={**FORCED, "pygraph_force": force})
        for n in range(1, self.CALLS):
            self.check_call(fn, compiled, (cuda(30, 30), n + 0.5, n / 7))
        self.assertEqual({r.choice for r in report()}, {force}, str(report()))

    def test_all_dtypes(self):
        dtypes = (
            torch.bool,
            torch.uint8,
            torch.int8,
            torch.int16,
            torch.int32,
            torch.int64,
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
        )

        def fn(x, scalars):
            return tuple(x + s for s in scalars)

        compiled = torch.compile(fn, options=FORCED)
        for _ in range(self.CALLS):
            scalars = [cpu(dtype=dtype) for dtype in dtypes]
            x = cuda(8, dtype=torch.int32)
            self.check_call(fn, compiled, (x, scalars))
        self.assertEqual(len(self.recorded()), 1)

    def test_many_values(self):
        def fn(x, scalars):
            for s in scalars:
                x = x * 0.5 + s
            return x

        compiled = torch.compile(fn, options=FORCED)
        for _ in range(4):
            self.check_call(fn, compiled, (cuda(8), [cpu() for _ in range(300)]))

    # What is uploaded is small here: the host must not be busy for as long as the device is.
    @mock.patch.object(placement, "MAX_STAGED_BYTES", 4096)
    def test_the_host_runs_ahead(self):
        "Values of later calls are there before the first call's kernels run."

        def fn(x, s, v, w):
            return x * s + v.to("cuda") + w.to("cuda").sum()

        compiled = torch.compile(fn, options=FORCED)
        x = cuda(300, 3)
        v, w = cpu(300, 3), cpu(2048)
        for i in range(4):
            self.check_call(fn, compiled, (x, cpu(), v, w))
        self.assertEqual(counters["pygraph"]["staged_tensors"], 1)
        self.assertEqual(counters["pygraph"]["uploaded_tensors"], 1)
        calls = 8
        # Allocating pinned memory might wait for the device.
        pinned = [torch.empty(t.shape, pin_memory=True) for t in (v, w) * 2 * calls]
        del pinned
        torch.cuda.synchronize()
        torch.cuda._sleep(1 << 30)  # half a second
        done = torch.cuda.Event()
        done.record()
        actual = []
        for i in range(calls):
            s = torch.tensor(float(i))
            v.fill_(i)
            w.fill_(i)
            actual.append(compiled(x, s, v, w))
            s.fill_(-1)
            v.fill_(-1)
            w.fill_(-1)
        # Or the calls waited for the device.
        self.assertFalse(done.query())
        expected = [x * i + i + float(i * w.numel()) for i in range(calls)]
        self.assertEqual(actual, expected, atol=1e-3, rtol=1e-5)

    def test_what_did_not_change_is_not_copied(self):
        table = cpu(100, 100)
        fn = lambda x: x + table.to("cuda")  # noqa: E731
        compiled = torch.compile(fn, options=FORCED)
        put = deliver._Staged.put
        with mock.patch.object(
            deliver._Staged, "put", autospec=True, side_effect=put
        ) as copies:
            for _ in range(5):
                self.check_call(fn, compiled, (cuda(100, 100),))
            self.assertEqual(copies.call_count, 1)
            table.numpy()[3, 4] = 17
            self.check_call(fn, compiled, (cuda(100, 100),))
            self.assertEqual(copies.call_count, 2)

    @parametrize("numel", (200, 4000, 40_000))
    def test_what_changes_in_every_call(self, numel):
        "Also while the device is behind, so that pinned memory is still to be read."
        fn = lambda x, v: x + v.to("cuda")  # noqa: E731
        compiled = torch.compile(fn, options=FORCED)
        x, v = cuda(numel), cpu(numel)
        for _ in range(4):
            self.check_call(fn, compiled, (x, v))
        for sleep in (0, 1 << 26, 0):
            torch.cuda._sleep(sleep)
            actual = []
            for i in range(40):
                v.numpy()[:] = i
                actual.append(compiled(x, v))
            self.assertEqual(actual, [x + i for i in range(40)])

    def test_module_attributes(self):
        class Module(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = np.float32(2.0)
                self.shift = torch.tensor(1.0)
                self.table = cpu(32, 32)
                self.register_buffer("positions", torch.arange(32))
                self.linear = torch.nn.Linear(32, 32, device="cuda")

            def forward(self, x):
                x = self.linear(x) * self.scale + self.shift
                return (x @ self.table.to("cuda"))[self.positions]

        module = Module()
        compiled = torch.compile(module, options=FORCED)
        with torch.no_grad():
            for i in range(self.CALLS):
                module.scale = np.float32(i)
                module.shift = torch.tensor(float(i))
                if i % 3 == 0:
                    module.table = cpu(32, 32)
                if i % 4 == 0:
                    module.positions.copy_(torch.randperm(32))
                self.check_call(module, compiled, (cuda(32, 32),))
        self.assertEqual(len(self.recorded()), 1)

    def test_python_floats(self):
        fn = lambda x, by: x * by + 1  # noqa: E731
        compiled = torch.compile(fn, options=FORCED)
        for i in range(self.CALLS):
            self.check_call(fn, compiled, (cuda(8, 8), i + 0.5))
        self.assertEqual(counters["stats"]["unique_graphs"], 2)

    @parametrize("force", ("node_update", "copy"))
    def test_items(self, force):
        fn = lambda x, s, t: (x * s.item() + t.item(), x / s.item())  # noqa: E731
        compiled = torch.compile(fn, options={**FORCED, "pygraph_force": force})
        s, t = cpu(dtype=torch.float64), cpu()
        for n in range(1, self.CALLS):
            s.fill_(n + 0.5)
            t.fill_(n / 7)
            self.check_call(fn, compiled, (cuda(30, 30), s, t))
        self.assertEqual(counters["stats"]["unique_graphs"], 1)
        self.assertEqual(counters["graph_break"], {})

    def test_training(self):
        def fn(x, weight, v, s):
            return ((x @ weight) * v.to("cuda") * s).sin().sum()

        compiled = torch.compile(fn, options=FORCED)
        weight = cuda(32, 32).requires_grad_()
        for _ in range(self.CALLS):
            s = cpu().requires_grad_()
            x, v = cuda(32, 32), cpu(32, 32)
            with torch.random.fork_rng():
                grads = torch.autograd.grad(compiled(x, weight, v, s), (weight, s))
            expected = torch.autograd.grad(fn(x, weight, v, s), (weight, s))
            self.assertEqual([g.device for g in grads], [g.device for g in expected])
            self.assertEqual(grads, expected, atol=1e-3, rtol=1e-3)
            del grads

    def test_streams(self):
        fn = lambda x, s, v: x * s + v.to("cuda")  # noqa: E731
        compiled = torch.compile(fn, options=FORCED)
        streams = [torch.cuda.Stream() for _ in range(2)]
        v = cpu(30, 30)
        for i in range(8):
            with torch.cuda.stream(streams[i % 2]):
                self.check_call(fn, compiled, (cuda(30, 30), cpu(), v))
            torch.cuda.synchronize()

    def test_threads(self):
        fn = lambda x, s: x * s  # noqa: E731
        compiled = torch.compile(fn, options=FORCED)
        self.check_call(fn, compiled, (cuda(64), cpu()))
        failures = []

        def run(value):
            try:
                x, s = torch.ones(64, device="cuda"), torch.tensor(value)
                for _ in range(50):
                    if not bool((compiled(x, s) == value).all()):
                        failures.append(value)
            except Exception as e:
                failures.append(e)

        threads = [threading.Thread(target=run, args=(float(i),)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])

    @unittest.skipIf(torch.cuda.device_count() < 2, "requires two GPUs")
    def test_other_device(self):
        fn = lambda x, s, v: x * s + v.to(x.device)  # noqa: E731
        compiled = torch.compile(fn, options=FORCED)
        for _ in range(self.CALLS):
            x = cuda(30, 30).to("cuda:1")
            self.check_call(fn, compiled, (x, cpu(), cpu(30, 30)))


instantiate_parametrized_tests(DeviceTest)


if __name__ == "__main__":
    run_tests()
