"""Programs in which GPU code reads CPU values, and their code for an H200."""

from __future__ import annotations

import dataclasses
from typing import Any, TYPE_CHECKING

import numpy as np

import torch
from torch.testing._internal.fake_cuda import fake_cuda


if TYPE_CHECKING:
    from collections.abc import Callable


@torch.library.custom_op("test_pygraph_values::host_op", mutates_args=())
def host_op(s: torch.Tensor) -> torch.Tensor:
    return s.clone()


@host_op.register_fake
def _(s: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(s)


@torch.library.custom_op("test_pygraph_values::on_both", mutates_args=())
def on_both(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return x * s.item()


@on_both.register_fake
def _(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("test_pygraph_values::to_host", mutates_args=())
def to_host(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0).cpu()


@to_host.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape[1:], dtype=x.dtype)


@torch.library.custom_op(
    "test_pygraph_values::pair",
    mutates_args=(),
    tags=(torch._C.Tag.cudagraph_unsafe,),
)
def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + 1, x - 1


@pair.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


ops = torch.ops.test_pygraph_values


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


def compile_for_h200(program: Program, **options: Any) -> list[Any]:
    with fake_cuda() as graphs, torch.no_grad():
        compiled = torch.compile(
            program.fn, options={"pygraph": True, **options}, dynamic=program.dynamic
        )
        compiled(*program.inputs())
    return graphs
