"""
Programs whose sizes vary from call to call, compiled once for all sizes (``dynamic=True``). Consecutive calls go through
a ring of inputs, each of a size of its own.
"""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn import functional as F

from .case import adding, Inputs, Suite
from .models.language import BertPretraining, GatedMLP, rotate
from .models.small import MLP
from .scg import Recommender


SUITE = Suite(
    ("eager", "no_cg", "stock_cg", "pygraph", "many_sizes"),
    must_equal=("pygraph", "many_sizes"),
    dynamic=True,
    # In more rounds PyGraph records the sizes of the ring one by one while it is timed.
    rounds=9,
    max_case_s=45.0,
)
# The least share of calls that a recording for many sizes has to serve.
MIN_CAPTURED = 0.9

sizes = adding("sizes", capturable=False, ring=40)


class GraphConvolutions(nn.Module):
    """Sums over the edges of a graph (Kipf and Welling 2017)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        for layer in self.layers:
            sums = torch.zeros_like(nodes).index_add(0, target, nodes[source])
            nodes = layer(sums).relu()
        return nodes


class PromptedDecoder(nn.Module):
    """A Llama-like decoder that reads a prompt."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, size = heads, width // heads
        self.tokens, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.projections = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4)) for _ in range(layers)
        )
        self.mlps = nn.ModuleList(GatedMLP(width, hidden) for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * layers + 1))
        frequency = 500000.0 ** (-torch.arange(0, size, 2) / size)
        angle = torch.arange(2048)[:, None] * frequency
        self.register_buffer("rotation", torch.stack([angle.cos(), angle.sin()]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        rotation = self.rotation[:, : tokens.shape[1]]
        norms = iter(self.norms)
        for projections, mlp in zip(self.projections, self.mlps):
            y = next(norms)(x)
            q, k, v = (p(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in projections[:3])
            y = F.scaled_dot_product_attention(rotate(q, rotation), rotate(k, rotation), v, is_causal=True)
            x = x + projections[3](y.transpose(1, 2).flatten(2))
            x = x + mlp(next(norms)(x))
        return self.head(next(norms)(x)[:, -1])


def _between(low: int, high: int, small: bool) -> int:
    return random.randint(3, 9) if small else random.randint(low, high)


def _features(small: bool) -> Inputs:
    return (torch.randn(_between(2, 512, small), 16 if small else 512),), {}


def _ratings(small: bool) -> Inputs:
    batch, tables, rows = _between(2, 1024, small), 8, 100 if small else 100_000
    return (torch.randn(batch, 13), *(torch.randint(rows, (batch,)) for _ in range(tables))), {}


def _sentences(small: bool) -> Inputs:
    shape = (2, _between(16, 256, small)) if small else (4, _between(16, 256, small))
    return (torch.randint(1, 100 if small else 1000, shape), torch.randint(3, shape)), {}


def _graph(small: bool) -> Inputs:
    nodes, edges = (10, _between(0, 0, True)) if small else (2048, _between(1000, 20_000, small))
    return (torch.randn(nodes, 16 if small else 128), torch.randint(nodes, (2, edges))), {}


def _prompt(small: bool) -> Inputs:
    return (torch.randint(100 if small else 1000, (1, _between(16, 512, small))),), {}


sizes(
    "mlp_batches",
    lambda small: MLP(16, 2) if small else MLP(512, 12),
    _features,
    about="own; batches of 2 to 512",
    obstacle="a size for each batch",
    quick=True,
)
sizes(
    "recommender_batches",
    lambda small: Recommender(8, 100) if small else Recommender(8, 100_000),
    _ratings,
    about="own; a DLRM and batches of 2 to 1024",
    obstacle="a size for each batch",
)
sizes(
    "bert_lengths",
    # Generated code of more layers takes too long to compile.
    lambda small: BertPretraining(100, 64, 1, 2) if small else BertPretraining(1000, 768, 2, 12),
    _sentences,
    dtype=torch.float16,
    about="own; two layers of BERT base, 4 sentences, padded to 16 to 256 tokens",
    obstacle="a size for each length",
    min_sizes_gain=2.0,
)
sizes(
    "graph_edges",
    lambda small: GraphConvolutions(16, 2) if small else GraphConvolutions(128, 6),
    _graph,
    about="own; a graph network, 2048 nodes, 1,000 to 20,000 edges",
    obstacle="a size for each number of edges; sums in another order in each call",
)
sizes(
    "llama_prompts",
    lambda small: PromptedDecoder(100, 64, 1, 4, 128) if small else PromptedDecoder(1000, 2048, 2, 32, 5632),
    _prompt,
    dtype=torch.float16,
    about="own; two layers of a 1B Llama-like decoder read prompts of 16 to 512 tokens",
    obstacle="a size for each prompt",
    without_cudnn_attention=True,
)
