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
        self, asks_tensor: bool, steps: int = 10, width: int = 1024, layers: int = 18, actions: int = 32
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
        y = self.enter(x) + self.clock(time.view(1).to(x.dtype)) + observation
        for layer in self.layers:
            y = layer(y)
        return self.leave(y)

    def forward(self, x: torch.Tensor, observation: torch.Tensor) -> torch.Tensor:
        step = 1.0 / self.steps
        time = torch.ones((), device=x.device)
        if self.asks_tensor:
            while time >= step / 2:
                x = x - step * self.velocity(x, observation, time)
                time = time - step
        else:
            for _ in range(self.steps):
                x = x - step * self.velocity(x, observation, time)
                time = time - step
        return x


class AdaptiveOde(nn.Module):
    """
    A neural ODE (Chen et al. 2018), solved by steps of fourth order whose sizes follow the error (Dormand and Prince
    1980). The solver ends where a tensor says so.
    """

    NODES = (0.0, 1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0)
    STAGES = (
        (),
        (1 / 5,),
        (3 / 40, 9 / 40),
        (44 / 45, -56 / 15, 32 / 9),
        (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
        (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
        (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
    )
    ERROR = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)

    def __init__(self, width: int, hidden: int, tolerance: float = 1e-4) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width + 1, hidden), nn.Linear(hidden, width)
        self.tolerance = tolerance

    def field(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(torch.cat((y, t.expand(y.shape[0], 1)), 1))))

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        t = torch.zeros((), device=y.device)
        h = torch.full((), 0.05, device=y.device)
        for _ in range(1000):
            slopes = []
            z = y
            for node, weights in zip(self.NODES, self.STAGES):
                z = y
                for weight, slope in zip(weights, slopes):
                    z = z + h * weight * slope
                slopes.append(self.field(t + node * h, z))
            error = h * sum(weight * slope for weight, slope in zip(self.ERROR, slopes))
            scale = self.tolerance * (1 + torch.maximum(y.abs(), z.abs()))
            ratio = (error / scale).square().mean().sqrt()
            y = torch.where(ratio <= 1, z, y)
            t = torch.where(ratio <= 1, t + h, t)
            h = torch.minimum(h * (0.9 * ratio**-0.2).clamp(0.2, 10.0), 1 - t)
            if t >= 1 - 1e-6:
                break
        return y


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
