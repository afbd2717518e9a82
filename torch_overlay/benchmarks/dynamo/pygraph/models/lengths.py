"""Models of sequences whose length varies from call to call."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .language import GatedMLP, rotate


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


class Generating(nn.Module):
    """transformers' Llama generates with its default cache, which is longer by a token in each step."""

    def __init__(self, tokens: int, **sizes: int) -> None:
        super().__init__()
        import transformers

        self.new_tokens = tokens
        self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        self.model.generation_config.eos_token_id = None

    def forward(self, prompt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found: Any = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=self.new_tokens,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return found.sequences, torch.stack(found.logits)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
        if mask is None:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~mask, -1e4)
            y = scores.softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class SpeechEncoder(nn.Module):
    """Whisper's encoder (Radford et al. 2022) of audio that is not padded to 30 seconds."""

    def __init__(self, mels: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(mels, width, 3, padding=1), nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.positions = nn.Parameter(torch.randn(1500, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, mels: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(mels)))).transpose(1, 2)
        x = x + self.positions[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class PackedEncoder(nn.Module):
    """An encoder of several documents in one row, each of which attends to itself."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        mask = (documents[:, :, None] == documents[:, None, :])[:, None]
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x).log_softmax(-1)
