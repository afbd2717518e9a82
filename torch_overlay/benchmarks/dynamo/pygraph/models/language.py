"""Language models: BERT pre-training, a relative-position encoder, decoders with their caches."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from .attention import MLP, sinusoids


class BertBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))).masked_fill(mask == 0, -1e4)
        y = (self.dropout(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(y))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class BertPretraining(nn.Module):
    """With masked-token and next-sentence heads that return log-probabilities (Devlin et al. 2018)."""

    def __init__(self, vocabulary: int = 20005, width: int = 768, layers: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=0)
        self.segments = nn.Embedding(3, width, padding_idx=0)
        self.register_buffer("positions", sinusoids(512, width))
        self.blocks = nn.ModuleList(BertBlock(width, heads) for _ in range(layers))
        self.next_sentence, self.masked = nn.Linear(width, 2), nn.Linear(width, vocabulary)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: torch.Tensor, segments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        length = tokens.size(1)
        mask = (tokens > 0).unsqueeze(1).repeat(1, length, 1).unsqueeze(1)
        x = self.dropout(self.tokens(tokens) + self.positions[:length] + self.segments(segments))
        for block in self.blocks:
            x = block(x, mask)
        return self.next_sentence(x[:, 0]).log_softmax(-1), self.masked(x).log_softmax(-1)


class RelativeAttention(nn.Module):
    """Content and position scores with biases of their own (Dai et al. 2019, Yang et al. 2019)."""

    tensor_parallel = {"q": "columns", "k": "columns", "v": "columns", "r": "columns", "out": "rows"}
    tensor_parallel_counts = ("heads",)
    # Parameters with one row for each head.
    tensor_parallel_rows = ("content_bias", "position_bias")

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.q, self.k, self.v, self.r, self.out = (nn.Linear(width, width, bias=False) for _ in range(5))
        self.content_bias, self.position_bias = (
            nn.Parameter(torch.randn(heads, 1, self.head_width) * 0.02) for _ in range(2)
        )

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q, k, v, r = (
            layer(source).unflatten(-1, (self.heads, self.head_width)).transpose(-3, -2)
            for layer, source in ((self.q, x), (self.k, x), (self.v, x), (self.r, positions))
        )
        length = x.shape[1]
        content = (q + self.content_bias) @ k.transpose(-1, -2)
        position = (q + self.position_bias) @ r.transpose(-1, -2)
        # Row i of the scores belongs to the distances i - j.
        shifted = position.flatten(-2).unflatten(-1, (2 * length, length))[..., 1:, :]
        position = shifted.flatten(-2).unflatten(-1, (length, 2 * length - 1))[..., :length]
        weights = ((content + position) / math.sqrt(self.head_width)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class RelativeEncoder(nn.Module):
    """
    XLNet's architecture with the position table that transformers up to 4.40 computed on
    the CPU in every forward, as the paper ran it, in linear layers that can be split.
    """

    def __init__(
        self, vocabulary: int = 32000, width: int = 1024, layers: int = 24, heads: int = 16, hidden: int = 4096
    ) -> None:
        super().__init__()
        self.width = width
        self.tokens = nn.Embedding(vocabulary, width)
        self.attention = nn.ModuleList(RelativeAttention(width, heads) for _ in range(layers))
        self.mlps = nn.ModuleList(MLP(width, hidden) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        length = tokens.shape[1]
        distance = torch.arange(length, -length, -1.0, device="cpu")
        frequency = 1 / torch.pow(10000, torch.arange(0, self.width, 2.0, device="cpu") / self.width)
        angle = distance[:, None] * frequency
        positions = torch.cat([angle.sin(), angle.cos()], -1).to(x.device, x.dtype)
        norms = iter(self.norms)
        for attention, mlp in zip(self.attention, self.mlps):
            x = next(norms)(x + attention(x, positions))
            x = next(norms)(x + mlp(x))
        return self.head(x)


class DecoderAttention(nn.Module):
    """Grouped-query attention with rotary positions over a cache (batch, kv heads, length, head width)."""

    tensor_parallel = {"q": "columns", "k": "columns", "v": "columns", "out": "rows"}
    tensor_parallel_counts = ("heads", "kv_heads")

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, width // heads
        self.q = nn.Linear(width, heads * self.head_width, bias=False)
        self.k, self.v = (nn.Linear(width, kv_heads * self.head_width, bias=False) for _ in range(2))
        self.out = nn.Linear(heads * self.head_width, width, bias=False)

    def forward(
        self, x: torch.Tensor, rotation: torch.Tensor, mask: torch.Tensor, position: torch.Tensor, cache: torch.Tensor
    ) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (self.heads, self.head_width)).transpose(1, 2)
        k, v = (f(x).unflatten(-1, (self.kv_heads, self.head_width)).transpose(1, 2) for f in (self.k, self.v))
        cache[0].index_copy_(2, position, rotate(k, rotation))
        cache[1].index_copy_(2, position, v)
        y = F.scaled_dot_product_attention(rotate(q, rotation), cache[0], cache[1], attn_mask=mask, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    cos, sin = rotation
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class GatedMLP(nn.Module):
    tensor_parallel = {"gate": "columns", "up": "columns", "down": "rows"}

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GatheredExperts(nn.Module):
    """A mixture of experts that fetches the weights of the chosen ones: all shapes are fixed."""

    def __init__(self, width: int, hidden: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.router, self.chosen = nn.Linear(width, experts, bias=False), chosen
        self.gate, self.up = (nn.Parameter(torch.randn(experts, width, hidden) / math.sqrt(width)) for _ in range(2))
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / math.sqrt(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, expert = self.router(x).softmax(-1).topk(self.chosen, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        y = x[..., None, None, :]
        y = (F.silu(y @ self.gate[expert]) * (y @ self.up[expert])) @ self.down[expert]
        return (y.squeeze(-2) * weight[..., None]).sum(-2)


class RoutedExperts(nn.Module):
    """A mixture of experts that gathers the tokens of each: shapes depend on the data."""

    def __init__(self, width: int, hidden: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.router, self.chosen = nn.Linear(width, experts, bias=False), chosen
        self.experts = nn.ModuleList(GatedMLP(width, hidden) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        weight, chosen = self.router(tokens).softmax(-1).topk(self.chosen, -1)
        y = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            token, rank = torch.where(chosen == i)
            y.index_add_(0, token, expert(tokens[token]) * weight[token, rank, None])
        return y.view_as(x)


class Decoder(nn.Module):
    """
    A Llama-like decoder that continues ``tokens`` (batch, n) at ``position`` (n,), and
    writes its keys and values into ``caches``, one (2, batch, kv heads, length, head
    width) for each layer.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        layers: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        length: int,
        experts: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.attention = nn.ModuleList(DecoderAttention(width, heads, kv_heads) for _ in range(layers))
        self.mlps = nn.ModuleList(experts() if experts else GatedMLP(width, hidden) for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * layers + 1))
        frequency = 500000.0 ** (-torch.arange(0, width // heads, 2) / (width // heads))
        angle = torch.arange(length)[:, None] * frequency
        self.register_buffer("rotation", torch.stack([angle.cos(), angle.sin()]))

    def forward(self, tokens: torch.Tensor, position: torch.Tensor, caches: list[torch.Tensor]) -> torch.Tensor:
        x = self.tokens(tokens)
        rotation = self.rotation[:, position]
        mask = torch.arange(caches[0].shape[3], device=x.device) <= position[:, None]
        norms = iter(self.norms)
        for attention, mlp, cache in zip(self.attention, self.mlps, caches):
            x = x + attention(next(norms)(x), rotation, mask, position, cache)
            x = x + mlp(next(norms)(x))
        return self.head(next(norms)(x))


class CachedDecoder(nn.Module):
    """A decoder that owns its cache, which so has a fixed address."""

    def __init__(self, decoder: Decoder, batch: int) -> None:
        super().__init__()
        self.decoder = decoder
        for i, cache in enumerate(empty_caches(decoder, batch)):
            self.register_buffer(f"cache{i}", cache)

    @property
    def caches(self) -> list[torch.Tensor]:
        return [getattr(self, f"cache{i}") for i in range(len(self.decoder.attention))]

    def clear(self) -> None:
        for cache in self.caches:
            cache.zero_()

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return self.decoder(tokens, position, self.caches)


def empty_caches(decoder: Decoder, batch: int, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    shapes = [(2, batch, layer.kv_heads, decoder.rotation.shape[1], layer.head_width) for layer in decoder.attention]
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]
