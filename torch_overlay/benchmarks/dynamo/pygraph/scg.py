"""
Suite scg: graphs for the choice between candidates, spread over what decides it: the number
of kernels and the work in each, the number and size of inputs that move, outputs, several
graphs in one program, and whether the program waits.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .case import adding, normal, sized, Suite
from .models.small import Function, MLP, MutatedInput, Pointwise


KIB, MIB = 1 << 8, 1 << 18  # in float32

SUITE = Suite(
    ("no_cg", "stock_cg", "pygraph", "forced_copy", "forced_node_update"),
    max_case_s=30.0,
    exhaustive=True,
    selects_in_loop=True,
    rounds=41,
    round_s=0.004,
)
add = adding("scg", gib=1.0)


class SharedInput(nn.Module):
    """One small input that a kernel of every layer reads."""

    def __init__(self, depth: int, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + mask
        return x


def stencil(salt: torch.Tensor, heat: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
    """As in the paper's EOS: much arithmetic on few large fields."""
    root = salt.abs().sqrt()
    density = 999.8 + heat * (6.8e-2 - heat * 9.1e-3)
    for power in range(1, 6):
        density = density + salt * (0.8 - heat * 4e-3 / power) + root * heat * 1e-4 * power
    return density / (1 - depth / (1 + depth * density * 1e-5))


class Recommender(nn.Module):
    """Embeddings of many index inputs beside a dense one, and a small network."""

    def __init__(self, tables: int, rows: int, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = nn.Linear(13, width)
        self.top = nn.Sequential(nn.Linear(width * (tables + 1), 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, dense: torch.Tensor, *indices: torch.Tensor) -> torch.Tensor:
        found = [table(index) for table, index in zip(self.tables, indices)]
        return torch.sigmoid(self.top(torch.cat([self.bottom(dense).relu(), *found], 1)))


class Decoder(nn.Module):
    """One large first layer, as in a recommender that decodes into all items."""

    def __init__(self, items: int, width: int) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(items, width), nn.Linear(width, items)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(F.selu(self.encode(x)))


class Chain(nn.Module):
    """Graphs that follow one another: what one is deployed as decides where the next one's input lies."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, part in enumerate(self.parts):
            if i:
                torch._dynamo.graph_break()
            x = part(x)
        return x


class Waits(nn.Module):
    """The host needs a value of the first graph before it launches the second."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        if y.sum().item() == float("inf"):
            return y
        return self.second(y)


class Cache(nn.Module):
    """A step that writes one position of a large tensor of the caller's and reads all of it."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.mlp = MLP(width, depth)

    def forward(self, x: torch.Tensor, cache: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, position, self.mlp(x))
        return cache.mean(0) + x


class Scaled(nn.Module):
    """A network and a value on the CPU."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.mlp = MLP(width, depth)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.mlp(x) * scale


class Norms(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm in self.norms:
            # Sums over the other dimension, so that the next does not fuse with it.
            x = norm(x) - x.mean(0)
        return x


class Convolutions(nn.Module):
    def __init__(self, depth: int, channels: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


class SelfAttention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v) + q


def _mlp(width: int, depth: int, batch: int, name: str = "", **kwargs: Any) -> None:
    dtype = kwargs.get("dtype", torch.float32)
    add(
        name or f"mlp_{depth}x{width}_of_{batch}",
        lambda small: MLP(64 if small else width, min(depth, 2) if small else depth),
        sized(normal((batch, width), dtype=dtype), normal((2, 64), dtype=dtype)),
        **kwargs,
    )


def _on_mlp_inputs(name: str, build: Any, batch: int = 8, width: int = 64, inputs: int = 1, **kwargs: Any) -> None:
    add(name, build, sized(normal(*[(batch, width)] * inputs), normal(*[(2, width)] * inputs)), **kwargs)


# Pointwise: one kernel, and all of the inputs move.
for _inputs, _size, _text in (
    (1, KIB, "1KiB"),
    (1, 64 * MIB, "64MiB"),
    (4, 4 * KIB, "4KiB"),
    (4, MIB, "1MiB"),
    (4, 16 * MIB, "16MiB"),
    (16, MIB, "1MiB"),
    (64, 4 * KIB, "4KiB"),
):
    _full, _small = normal(*[(_size,)] * _inputs), normal(*[(KIB,)] * _inputs)
    add(f"pointwise_{_inputs}x{_text}", lambda small: Pointwise(), sized(_full, _small))

# Networks: from one kernel to many, from launch bound to compute bound.
_mlp(64, 1, 8)
_mlp(64, 5, 8)
_mlp(64, 40, 8)
_mlp(1024, 4, 64)
_mlp(1024, 12, 1024)
_mlp(4096, 2, 8192, dtype=torch.bfloat16)
_mlp(64, 10, 8, "train_mlp", mode="training")
_mlp(1024, 4, 2048, "train_large_mlp", mode="training")

# One input in many kernels: where copying it once could be better than setting every node.
for _depth in (32, 96):
    _on_mlp_inputs(f"shared_input_{_depth}", lambda small, depth=_depth: SharedInput(2 if small else depth), inputs=2)

_on_mlp_inputs("norms_of_32MiB", lambda small: Norms(3, 1024), batch=8192, width=1024)
_on_mlp_inputs("outputs_16x1KiB", lambda small: Function(lambda x: [torch.sin(x + i) for i in range(16)]), batch=1, width=256)
_on_mlp_inputs("outputs_8x4MiB", lambda small: Function(lambda x: [torch.sin(x + i) for i in range(8)]), batch=1024, width=1024)

add("convolutions_6", lambda small: Convolutions(6, 16), sized(normal((2, 16, 16, 16)), normal((1, 16, 4, 4))))
add(
    "attention_small", lambda small: SelfAttention(), sized(normal(*[(2, 4, 128, 64)] * 3), normal(*[(1, 1, 4, 8)] * 3))
)
add("density_of_3x4MiB", lambda small: Function(stencil), sized(normal(*[(204 * 204 * 26,)] * 3), normal(*[(KIB,)] * 3)))


def _recommended(small: bool) -> Any:
    batch, rows, tables = (2, 8, 3) if small else (2048, 1000, 26)
    return (torch.rand(batch, 13), *[torch.randint(rows, (batch,)) for _ in range(tables)]), {}


add(
    "recommender",
    lambda small: Recommender(3, 8) if small else Recommender(26, 1000),
    _recommended,
)
add(
    "item_decoder",
    lambda small: Decoder(64, 8) if small else Decoder(50_000, 128),
    sized(normal((256, 50_000)), normal((2, 64))),
)

# Inputs that the program keeps and the graph writes.
_on_mlp_inputs("mutated_mlp", lambda small: MutatedInput(64, 4), inputs=2)


def _cached(small: bool) -> Any:
    rows = 8 if small else 1 << 16
    return (torch.randn(1, 64), torch.randn(rows, 64), torch.randint(rows, (1,))), {}


add("cache_16MiB", lambda small: Cache(64, 4), _cached)


def _scaled(small: bool) -> Any:
    return (torch.randn(8, 64), torch.randn((), device="cpu")), {}


add("cpu_scalar", lambda small: Scaled(64, 6), _scaled)


def _of_any_size(small: bool) -> Any:
    return normal((random.choice((16, 32)), 64))()


# The size varies from call to call: one graph for each of two, as often on every device.
add("batches_of_any_size", lambda small: MLP(64, 2 if small else 10), _of_any_size, ring=16)

# Several graphs.
_on_mlp_inputs("chain_3", lambda small: Chain(MLP(64, 4), MLP(64, 4), MLP(64, 4)))
_on_mlp_inputs("chain_mixed", lambda small: Chain(MLP(2048, 2), MLP(2048, 1), MLP(2048, 2)), batch=4096, width=2048)
_on_mlp_inputs("chain_of_one_kernel_each", lambda small: Chain(*[Pointwise() for _ in range(4)]))
_on_mlp_inputs("train_chain", lambda small: Chain(MLP(64, 4), MLP(64, 4)), mode="training")
_on_mlp_inputs("waits_for_a_value", lambda small: Waits(MLP(64, 4), MLP(64, 4)))
