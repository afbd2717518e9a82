"""Models whose parts do not depend on one another."""

from __future__ import annotations

import torch
from torch import nn

from .language import GatedMLP
from .tables import perceptron


class LoopedExperts(nn.Module):
    """A mixture of experts, each of which computes all tokens: a loop, as programs write it."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(GatedMLP(width, hidden) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            y = y + expert(x) * weights[..., i, None]
        return y


class TwoTowers(nn.Module):
    """Scores items for users, whose embeddings come from a tower each (Covington et al. 2016)."""

    def __init__(self, tables: int, rows: int, width: int, hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables)) for _ in range(2)
        )
        self.towers = nn.ModuleList(
            perceptron(tables * width, hidden, hidden, hidden // 2, last=nn.Tanh()) for _ in range(2)
        )

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        sides = []
        for tables, tower, ids in zip(self.tables, self.towers, (users, items)):
            sides.append(tower(torch.cat([table(ids[:, i]) for i, table in enumerate(tables)], -1)))
        return (sides[0] * sides[1]).sum(-1)


class PolicyEnsemble(nn.Module):
    """The mean action of policies, and how far they disagree."""

    def __init__(self, count: int, observed: int, hidden: int, actions: int) -> None:
        super().__init__()
        self.policies = nn.ModuleList(
            perceptron(observed, hidden, hidden, hidden, actions, last=nn.Tanh()) for _ in range(count)
        )

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        actions = torch.stack([policy(observation) for policy in self.policies])
        return actions.mean(0), actions.var(0)


class AdamWStep(nn.Module):
    """AdamW's update of many tensors (Loshchilov and Hutter 2019), given their gradients."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.count = len(shapes)
        for i, shape in enumerate(shapes):
            for name in ("parameter", "mean", "square"):
                self.register_buffer(f"{name}{i}", torch.rand(shape))
        self.register_buffer("step", torch.ones(()))

    def _all(self, name: str) -> list[torch.Tensor]:
        return [getattr(self, f"{name}{i}") for i in range(self.count)]

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        parameters, means, squares = map(self._all, ("parameter", "mean", "square"))
        self.step += 1
        rate = 1e-3 / (1 - 0.9**self.step)
        scale = (1 - 0.999**self.step).sqrt()
        for parameter, mean, square, gradient in zip(parameters, means, squares, gradients):
            parameter.mul_(1 - 1e-5)
            mean.lerp_(gradient, 0.1)
            square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            parameter.sub_(rate * mean / (square.sqrt() / scale + 1e-8))
        return self.step
