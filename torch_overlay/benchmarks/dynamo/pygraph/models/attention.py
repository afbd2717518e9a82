"""
Building blocks of the transformers here.

``tensor_parallel`` of a module names the linear layers that tensor parallelism splits by
columns and by rows; ``tensor_parallel_counts`` the attributes that count heads, of which
each rank then has a share.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F


def sinusoids(positions: int, width: int) -> torch.Tensor:
    position = torch.arange(positions).unsqueeze(1)
    frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    return torch.stack([torch.sin(position * frequency), torch.cos(position * frequency)], -1).flatten(1)


class SelfAttention(nn.Module):
    tensor_parallel = {"q": "columns", "k": "columns", "v": "columns", "out": "rows"}
    tensor_parallel_counts = ("heads",)

    def __init__(self, width: int, heads: int, memory_width: int | None = None) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.q = nn.Linear(width, width)
        self.k, self.v = (nn.Linear(memory_width or width, width) for _ in range(2))
        self.out = nn.Linear(width, width)

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        memory = x if memory is None else memory
        q, k, v = (
            project(source).unflatten(-1, (self.heads, self.head_width)).transpose(1, 2)
            for project, source in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    tensor_parallel = {"up": "columns", "down": "rows"}

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Pre-norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = SelfAttention(width, heads), MLP(width, 4 * width)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), bias=bias)
        return x + self.mlp(self.norm2(x))
