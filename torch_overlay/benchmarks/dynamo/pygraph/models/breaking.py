"""Programs at which Dynamo breaks the graph: loops, branches, checks and logging that read tensors."""

from __future__ import annotations

import logging

import torch
from torch import nn
from torch.nn import functional as F

from .language import CachedDecoder, Decoder


log = logging.getLogger(__name__)
log.propagate = False
log.addHandler(logging.NullHandler())
log.setLevel(logging.INFO)


class FlowPolicy(nn.Module):
    """
    A flow-matching policy: Euler steps from noise to a chunk of actions (Black et al. 2024). Its clock is a tensor, as in
    the published code, or the loop counts in Python.
    """

    def __init__(
        self, asks_tensor: bool, steps: int = 10, width: int = 1024, layers: int = 6, actions: int = 32
    ) -> None:
        super().__init__()
        self.asks_tensor, self.steps = asks_tensor, steps
        self.enter, self.leave = nn.Linear(actions, width), nn.Linear(width, actions)
        self.clock = nn.Linear(1, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )

    def velocity(self, x: torch.Tensor, observation: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.enter(x) + self.clock(time.view(1)) + observation
        for layer in self.layers:
            y = layer(y)
        return self.leave(y)

    def forward(self, x: torch.Tensor, observation: torch.Tensor) -> torch.Tensor:
        step = 1.0 / self.steps
        time = torch.ones((), device=x.device, dtype=x.dtype)
        if self.asks_tensor:
            while time >= step / 2:
                x = x - step * self.velocity(x, observation, time)
                time = time - step
        else:
            for _ in range(self.steps):
                x = x - step * self.velocity(x, observation, time)
                time = time - step
        return x


class GreedyGeneration(nn.Module):
    """Greedy decoding that stops when all sequences have ended."""

    def __init__(self, decoder: Decoder, batch: int, new_tokens: int, end: int = 2) -> None:
        super().__init__()
        self.model, self.new_tokens, self.end = CachedDecoder(decoder, batch), new_tokens, end

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        position = torch.zeros(1, dtype=torch.long, device=token.device)
        ended = torch.zeros_like(token, dtype=torch.bool)
        found = []
        for _ in range(self.new_tokens):
            token = self.model(token, position).argmax(-1).masked_fill(ended, self.end)
            found.append(token)
            ended = ended | (token == self.end)
            if ended.all():
                break
            position = position + 1
        return torch.cat(found, 1)


class LayerDropEncoder(nn.Module):
    """Layers that training skips by a random number on the CPU (Fan et al. 2020)."""

    def __init__(self, width: int, layers: int, probability: float = 0.1) -> None:
        super().__init__()
        self.probability = probability
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.training and torch.rand([], device="cpu") < self.probability:
                continue
            x = layer(x)
        return x


class Classifier(nn.Module):
    def __init__(self, width: int, layers: int, classes: int = 1000) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)])
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.head(self.body(x)).float(), labels)

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, labels)


class LoggedLoss(Classifier):
    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        log.info("The loss is of %s labels.", labels.shape[0])
        return super().loss(logits, labels)


class CheckedLoss(Classifier):
    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if labels.max() >= logits.shape[-1]:
            raise ValueError(f"Labels are below {logits.shape[-1]}.")
        return super().loss(logits, labels)


class AssertedLoss(Classifier):
    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert (labels >= 0).all(), "Labels are at least 0."
        return super().loss(logits, labels)
