"""Small networks that several suites use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class Pointwise(nn.Module):
    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        result = xs[0]
        for x in xs[1:]:
            result = torch.sin(result) + x
        return result * 2


class MLP(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


class MutatedInput(nn.Module):
    """A counter the caller owns, advanced in place before the network runs."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.mlp = MLP(width, depth)

    def forward(self, x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
        counter.add_(1)
        return self.mlp(x + counter)
