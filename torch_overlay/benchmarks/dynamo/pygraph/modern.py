"""
Workloads of today that are bound by launches or by copies, or that stock CUDA graphs do
not capture; some, as the static cache, are there because nothing is left to gain.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

import torch
from torch import nn

from .case import adding, Inputs, sized, WORKLOADS
from .models.hpc import ShallowWater
from .models.hub import token_inputs, transformers_model
from .models.language import CachedDecoder, Decoder, empty_caches, GatheredExperts, RelativeEncoder, RoutedExperts
from .models.multimodal import DiT, GuidedStep
from .models.tables import CartPoleRollout, CrossNetworkRecommender, GraphAttentionNetwork, PolicyUpdate


SUITE = WORKLOADS
modern = adding("modern")


# decoding


def llama(small: bool) -> Decoder:
    """The sizes of Llama 3.2 1B."""
    if small:
        return Decoder(256, 64, 2, 4, 2, 128, 32)
    return Decoder(128256, 2048, 16, 32, 8, 8192, 2048)


def mixture(small: bool) -> Decoder:
    width, layers, length = (64, 2, 32) if small else (1024, 12, 2048)

    def experts() -> nn.Module:
        return GatheredExperts(width, width // 2, 4 if small else 32, 2 if small else 4)

    return Decoder(256 if small else 32000, width, layers, width // 16, 2, 0, length, experts)


def _next_token(small: bool, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(256, (batch, 1)), torch.randint(32, (1,))


def _session(small: bool) -> Inputs:
    with torch.device("meta"):
        shapes = [cache.shape for cache in empty_caches(llama(small), 4)]
    return (*_next_token(small, 4), [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]), {}


class RoutedLM(nn.Module):
    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 64, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.experts = nn.ModuleList(RoutedExperts(width, 2 * width, 4, 2) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer, experts in zip(self.layers, self.experts):
            x = layer(x)
            x = x + experts(x)
        return self.head(x)


modern(
    "llama_decode",
    lambda small: CachedDecoder(llama(small), 1),
    lambda small: (_next_token(small), {}),
    dtype=torch.bfloat16,
    about="own; Llama 3.2 1B's sizes, one token, the cache is a buffer",
    obstacle="none: stock captures all of it",
    gib=6,
)
modern(
    "llama_sessions",
    llama,
    _session,
    dtype=torch.bfloat16,
    about="own; Llama 3.2 1B's sizes, one token for each of 4 sequences, whose caches are arguments",
    obstacle="16 inputs that are mutated and move: stock captures nothing",
    capturable=False,
    quick=True,
    ring=4,
    gib=8,
    alone=True,
)
modern(
    "moe_decode",
    lambda small: CachedDecoder(mixture(small), 1),
    lambda small: (_next_token(small), {}),
    dtype=torch.bfloat16,
    about="own; 12 layers, 4 of 32 experts, whose weights are gathered",
    obstacle="none",
    gib=5,
)
modern(
    "moe_routed",
    lambda small: RoutedLM(128, 1, 256) if small else RoutedLM(1024, 4, 32000),
    lambda small: ((torch.randint(256, (1, 16 if small else 64)),), {}),
    dtype=torch.bfloat16,
    about="own; as GraphMend's moe-minicpm-x4-base",
    obstacle="the number of tokens of each expert depends on the data: graph breaks",
    capturable=False,
)


# transformers


def _phi4(small: bool) -> nn.Module:
    head = 64 if small else 96
    sizes = {"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24, "num_key_value_heads": 8}
    if small:
        sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "short_factor": [1.0] * (head // 2),
        "long_factor": [2.0] * (head // 2),
        "original_max_position_embeddings": 4096,
    }
    if not small:
        rope["partial_rotary_factor"] = 0.75
    return transformers_model(
        "Phi3ForCausalLM",
        small,
        **sizes,
        vocab_size=200064,
        num_hidden_layers=32,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        partial_rotary_factor=rope["partial_rotary_factor"],
        rope_parameters=rope,
        pad_token_id=0,
        tie_word_embeddings=True,
    )


def _longformer(small: bool) -> nn.Module:
    return transformers_model(
        "LongformerForMaskedLM",
        small,
        # One for each layer.
        attention_window=[8] if small else [512] * 12,
        max_position_embeddings=4098,
        type_vocab_size=1,
        vocab_size=50265,
    )


modern(
    "phi4_mini",
    _phi4,
    token_inputs(200064, 1, 128, labels=""),
    dtype=torch.bfloat16,
    about="transformers' Phi3ForCausalLM in the sizes of Phi-4-mini",
    obstacle="the longrope branch on the largest position: graph breaks",
    needs=("transformers",),
    capturable=False,
    ring=3,
    gib=16,
)
modern(
    "longformer",
    _longformer,
    token_inputs(50265, 1, 1024, labels=""),
    dtype=torch.float16,
    about="transformers' LongformerForMaskedLM",
    obstacle=".item() on the attention mask: graph breaks",
    needs=("transformers",),
    capturable=False,
)
modern(
    "xlnet_cpu_positions",
    lambda small: RelativeEncoder(256, 64, 2, 2, 128) if small else RelativeEncoder(),
    lambda small: ((torch.randint(256, (1, 16 if small else 512)),), {}),
    dtype=torch.float16,
    about="own; XLNet as transformers had it when the paper was written",
    obstacle="a position table computed on the CPU in every forward",
    capturable=False,
    gib=3,
)


# diffusion, detection


def _guided(small: bool) -> nn.Module:
    return GuidedStep(DiT(1, 64, 2, 8) if small else DiT(28, 1152, 16))


def _latents(small: bool) -> Inputs:
    batch, size = (1, 8) if small else (2, 32)
    # Not an element of a table that the step is given: Inductor, other than for PyGraph, gives
    # GPU kernels the address of the table, which is on the CPU.
    step = random.randrange(50)
    sigma, following = (level.clone() for level in torch.linspace(14.6, 0.03, 51, device="cpu")[step : step + 2])
    x, label = torch.randn(batch, 4, size, size, dtype=torch.float16), torch.randint(1000, (batch,))
    return (x, label, sigma, following), {}


def _ssdlite(small: bool) -> nn.Module:
    from torchvision.models.detection import ssdlite320_mobilenet_v3_large

    return ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None)


modern(
    "dit_step",
    _guided,
    _latents,
    dtype=torch.float16,
    about="own; a guided Euler step of DiT-XL/2",
    obstacle="noise levels and a branch on the CPU",
    capturable=False,
    gib=5,
)
modern(
    "ssdlite",
    _ssdlite,
    lambda small: (([torch.rand(3, 320, 320)],), {}),
    about="torchvision's ssdlite320_mobilenet_v3_large, on random images",
    obstacle="shapes that depend on the data: graph breaks",
    not_as_eager="rounding decides which boxes the model keeps",
    needs=("torchvision",),
    built_on_cpu=True,
    capturable=False,
)


# graphs, policies, recommenders, grids


def _sampled_graph(small: bool) -> Inputs:
    nodes, edges = (32, 128) if small else (10_000, 100_000)
    features = torch.randn(nodes, 16 if small else 128)
    return (features, torch.randint(nodes, (2, edges)), torch.randint(10, (nodes,))), {}


def _minibatch(small: bool) -> Inputs:
    n = 16 if small else 4096
    tensors = [torch.randn(n, 60), torch.randn(n, 8), torch.randn(n) - 10, torch.randn(n), torch.randn(n)]
    return tuple(tensors), {}


def _poles(small: bool) -> Inputs:
    n = 16 if small else 8192
    return (torch.rand(n, 4) * 0.1 - 0.05, torch.rand(n, 4) * 0.1 - 0.05), {}


def _clicks(small: bool) -> Inputs:
    batch, rows, tables = (8, 100, 4) if small else (2048, 200_000, 26)
    ids = [torch.randint(rows, (batch,)) for _ in range(tables)]
    return (torch.randn(batch, 13, dtype=torch.float16), *ids), {}


def _cross_network(small: bool) -> nn.Module:
    return CrossNetworkRecommender(4, 100, 16, 8) if small else CrossNetworkRecommender(26, 200_000, 128, 512)


def _water(n: int) -> Callable[[], Inputs]:
    def inputs() -> Inputs:
        heights = [torch.rand(n, n) + (50 if i % 3 == 2 else 0) for i in range(6)]
        # A step chosen by the simulation, as a NumPy scalar.
        return (*heights, np.float64(np.random.uniform(0.5e-3, 1e-3))), {}

    return inputs


modern(
    "gat_train",
    lambda small: GraphAttentionNetwork(16 if small else 128, 8 if small else 64, 10),
    _sampled_graph,
    "training",
    about="own; a graph attention network on sampled graphs of 10,000 nodes",
    obstacle="every graph is new: features and edges to copy; sums in no fixed order",
    quick=True,
)
modern(
    "ppo_update",
    lambda small: PolicyUpdate(),
    _minibatch,
    "training",
    about="own; the loss of proximal policy optimization on a minibatch of 4096",
    obstacle="many small kernels, five new inputs",
    quick=True,
)
modern(
    "cartpole_rollout",
    lambda small: CartPoleRollout(2 if small else 16),
    _poles,
    about="own; 16 steps of a policy in 8192 simulated cart-poles",
    obstacle="many small kernels",
)
modern(
    "dlrm_dcn",
    _cross_network,
    _clicks,
    dtype=torch.float16,
    about="own; DLRM-DCNv2 with 26 tables",
    obstacle="27 inputs that move",
    gib=3,
)
modern(
    "shallow_water",
    lambda small: ShallowWater(),
    sized(_water(2048), _water(32)),
    about="own; a leap-frog step on a grid of 2048 x 2048",
    obstacle="96 MiB to copy for two kernels; a NumPy scalar that changes",
    capturable=False,
    quick=True,
)
