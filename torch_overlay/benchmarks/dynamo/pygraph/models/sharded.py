"""A block of a Llama-like decoder, which suite dist shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import distributed as dist, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    parallelize_module,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)


if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = 64
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Experts(FeedForward):
    """One expert a rank. Each takes an equal part of every rank's tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sent = functional.all_to_all_single_autograd(x.flatten(0, 1), None, None, dist.group.WORLD)
        back = functional.all_to_all_single_autograd(FeedForward.forward(self, sent), None, None, dist.group.WORLD)
        return back.view_as(x)


class Block(nn.Module):
    def __init__(self, width: int, *, experts: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width)
        self.mlp = (Experts if experts else FeedForward)(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def split_block(block: Block, mesh: DeviceMesh) -> None:
    """Tensor parallel inside, sequence parallel between."""
    whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    columns = dict.fromkeys(("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"), ColwiseParallel())
    rows = dict.fromkeys(("attention.out", "mlp.down"), RowwiseParallel(output_layouts=Shard(1)))
    norms = dict.fromkeys(("norm1", "norm2"), SequenceParallel())
    parallelize_module(block, mesh, {**norms, "attention": whole, "mlp": whole, **columns, **rows})
