"""An encoder-decoder transformer for speech (Dong et al. 2018), with the obstacles of its public code."""

from __future__ import annotations

import numpy as np

import torch
from torch import nn
from torch.nn import functional as F

from .attention import sinusoids


class ScaledAttention(nn.Module):
    """Scores are divided by a NumPy scalar, which Dynamo sees as a CPU tensor."""

    tensor_parallel = {"q": "columns", "k": "columns", "v": "columns", "out": "rows"}
    tensor_parallel_counts = ("heads",)

    def __init__(self, width: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, head_width
        self.q, self.k, self.v = (nn.Linear(width, heads * head_width) for _ in range(3))
        self.out, self.norm, self.dropout = nn.Linear(heads * head_width, width), nn.LayerNorm(width), nn.Dropout(0.1)
        self.temperature = np.power(head_width, 0.5)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(source).unflatten(-1, (self.heads, self.head_width)).permute(2, 0, 1, 3).flatten(0, 1)
            for layer, source in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        scores = torch.bmm(q, k.transpose(1, 2)) / self.temperature
        weights = self.dropout(scores.masked_fill(hidden.repeat(self.heads, 1, 1), -np.inf).softmax(-1))
        y = torch.bmm(weights, v).unflatten(0, (self.heads, -1)).permute(1, 2, 0, 3).flatten(2)
        return self.norm(self.dropout(self.out(y)) + x)


class FeedForward(nn.Module):
    tensor_parallel = {"up": "columns", "down": "rows"}

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.dropout(self.down(F.relu(self.up(x)))) + x)


class SpeechTransformer(nn.Module):
    """
    ``frames`` (batch, time, 320), their ``lengths`` (batch,), and ``targets`` (batch, n)
    padded with -1. Masks are built in a loop over the batch with bounds from a tensor, and
    targets are filtered by value: graph breaks.
    """

    padding, start, end = -1, 1, 2

    def __init__(self, layers: int = 6, width: int = 512, heads: int = 8, hidden: int = 2048, words: int = 4000):
        super().__init__()
        self.width = width
        self.project, self.norm = nn.Linear(320, width), nn.LayerNorm(width)
        self.words, self.dropout = nn.Embedding(words, width), nn.Dropout(0.1)
        self.register_buffer("positions", sinusoids(5000, width))

        def attention() -> nn.Module:
            return ScaledAttention(width, heads, 64)

        self.encoder = nn.ModuleList(nn.ModuleList([attention(), FeedForward(width, hidden)]) for _ in range(layers))
        self.decoder = nn.ModuleList(
            nn.ModuleList([attention(), attention(), FeedForward(width, hidden)]) for _ in range(layers)
        )

    def forward(
        self, frames: torch.Tensor, lengths: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        time = frames.shape[1]
        spoken = self.until(frames, lengths)
        silence = spoken.squeeze(-1).lt(1).unsqueeze(1)
        x = self.dropout(self.norm(self.project(frames)) + self.positions[:time])
        for attention, feed_forward in self.encoder:
            x = attention(x, x, silence.expand(-1, time, -1)) * spoken
            x = feed_forward(x) * spoken

        sentences = [target[target != self.padding] for target in targets]
        start = torch.tensor([self.start], device=frames.device)
        end = torch.tensor([self.end], device=frames.device)
        given = nn.utils.rnn.pad_sequence([torch.cat([start, s]) for s in sentences], True, self.end)
        wanted = nn.utils.rnn.pad_sequence([torch.cat([s, end]) for s in sentences], True, self.padding)
        length = given.shape[1]
        real = given.ne(self.end).to(x.dtype).unsqueeze(-1)
        later = torch.ones(length, length, device=x.device, dtype=torch.bool).triu(1)
        later = later | given.eq(self.end).unsqueeze(1)
        silence = self.until(x, lengths).squeeze(-1).lt(1).unsqueeze(1).expand(-1, length, -1)
        y = self.dropout(self.words(given) * self.width**0.5 + self.positions[:length])
        for own, cross, feed_forward in self.decoder:
            y = own(y, y, later) * real
            y = cross(y, x, silence) * real
            y = feed_forward(y) * real
        return F.linear(y, self.words.weight), wanted

    def until(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        kept = x.new_ones(x.shape[:2])
        for i in range(x.shape[0]):
            kept[i, lengths[i] :] = 0
        return kept.unsqueeze(-1)
