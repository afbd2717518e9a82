"""
Programs whose sizes vary from call to call, compiled once for all sizes (``dynamic=True``). Consecutive calls go through
a ring of inputs, each of a size of its own.
"""

from __future__ import annotations

import random

import torch
from torch import nn

from .case import adding, Inputs, Suite
from .models.language import BertPretraining
from .models.lengths import Generating, PackedEncoder, PromptedDecoder, SpeechEncoder
from .models.small import MLP
from .scg import Recommender


SUITE = Suite(
    ("eager", "no_cg", "stock_cg", "pygraph", "by_size"),
    must_equal=("pygraph", "by_size"),
    dynamic=True,
    # In more rounds PyGraph records the sizes of the ring one by one while it is timed.
    rounds=9,
    max_case_s=45.0,
    run_alone=("no_cg", "pygraph", "largest_size"),
)
# The least share of calls that a recording for many sizes has to serve.
MIN_CAPTURED = 0.9

sizes = adding("sizes", capturable=False, ring=40, alone=True)


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


def _short_prompt(small: bool) -> Inputs:
    return (torch.randint(100 if small else 1000, (1, _between(16, 256, small))),), {}


def _audio(small: bool) -> Inputs:
    mels = torch.randn(1, 8 if small else 80, 2 * _between(50, 750, small), dtype=torch.float16)
    return (mels,), {}


def _documents(small: bool) -> Inputs:
    length = _between(256, 1024, small)
    documents = torch.sort(torch.randint(2 if small else 8, (1, length))).values
    return (torch.randint(100 if small else 1000, (1, length)), documents), {}


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
    min_sizes_gain=2.5,
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
sizes(
    "bert_length_steps",
    lambda small: BertPretraining(100, 64, 1, 2) if small else BertPretraining(1000, 768, 2, 12),
    _sentences,
    mode="training",
    dtype=torch.float16,
    # Each takes a forward and a backward.
    ring=16,
    about="own; a step of two layers of BERT base, 4 sentences, padded to 16 to 256 tokens",
    obstacle="a size for each length",
    min_sizes_gain=2.5,
)
sizes(
    "packed_steps",
    lambda small: PackedEncoder(100, 64, 1, 2) if small else PackedEncoder(1000, 768, 2, 12),
    _documents,
    mode="training",
    dtype=torch.float16,
    ring=16,
    about="own; a step of a two-layer encoder, 8 documents in a row of 256 to 1024 tokens",
    obstacle="a size for each row",
)
sizes(
    "llama_generation",
    lambda small: (
        Generating(
            4,
            vocab_size=100,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        if small
        else Generating(
            16,
            vocab_size=1000,
            hidden_size=2048,
            intermediate_size=8192,
            # Generated code of more layers takes too long to compile.
            num_hidden_layers=2,
            num_attention_heads=32,
            num_key_value_heads=8,
        )
    ),
    _short_prompt,
    dtype=torch.float16,
    ring=6,
    compiled_part="model",
    about="transformers' generate: 16 tokens of two layers of a 1B Llama behind prompts of 16 to 256 tokens",
    obstacle="the cache has another size in each step",
    needs=("transformers",),
    without_cudnn_attention=True,
    min_sizes_gain=2.0,
    alone=False,
)
sizes(
    "speech_encoder",
    lambda small: SpeechEncoder(8, 64, 1, 2) if small else SpeechEncoder(80, 384, 4, 6),
    _audio,
    dtype=torch.float16,
    ring=20,
    about="own; Whisper tiny's encoder of 1 to 15 seconds of audio",
    obstacle="a size for each length",
    without_cudnn_attention=True,
)
