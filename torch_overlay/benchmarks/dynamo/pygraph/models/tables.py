"""Recommenders, graph networks and policies."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


def perceptron(*widths: int, last: nn.Module) -> nn.Sequential:
    layers = [[nn.Linear(a, b), nn.ReLU()] for a, b in zip(widths, widths[1:])]
    layers[-1][1] = last
    return nn.Sequential(*sum(layers, []))


class DeepRecommender(nn.Module):
    """A deep autoencoder for collaborative filtering (Kuchaiev and Ginsburg 2017)."""

    def __init__(self, items: int, hidden: tuple[int, ...] = (512, 512, 1024)) -> None:
        super().__init__()
        widths = (items, *hidden)
        self.encode = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))
        self.decode = nn.ModuleList(nn.Linear(b, a) for a, b in reversed(list(zip(widths, widths[1:]))))
        self.dropout = nn.Dropout(0.8)

    def forward(self, ratings: torch.Tensor) -> torch.Tensor:
        x = ratings
        for layer in self.encode:
            x = F.selu(layer(x))
        x = self.dropout(x)
        for layer in self.decode:
            x = F.selu(layer(x))
        return x


class DLRM(nn.Module):
    """Dot interaction of dense and embedded features (Naumov et al. 2019); index tables from Python lists."""

    def __init__(self, rows: int, width: int = 64, tables: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.features = tables + 1
        self.bottom = perceptron(512, 512, 64, last=nn.ReLU())
        pairs = self.features * (self.features - 1) // 2
        self.top = perceptron(pairs + width, 1024, 1024, 1024, 1, last=nn.Sigmoid())

    def forward(self, dense: torch.Tensor, offsets: list[torch.Tensor], indices: list[torch.Tensor]) -> torch.Tensor:
        x = self.bottom(dense)
        embedded = [table(index, offset) for table, index, offset in zip(self.tables, indices, offsets)]
        features = torch.stack([x, *embedded], 1)
        products = torch.bmm(features, features.transpose(1, 2))
        rows = torch.tensor([i for i in range(self.features) for _ in range(i)], device=x.device)
        columns = torch.tensor([j for i in range(self.features) for j in range(i)], device=x.device)
        return self.top(torch.cat([x, products[:, rows, columns]], 1))


class CrossNetworkRecommender(nn.Module):
    """DLRM-DCNv2: low-rank crosses of the features (Wang et al. 2021); every table has an input of its own."""

    def __init__(self, tables: int, rows: int, width: int, rank: int, crosses: int = 3) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = perceptron(13, 512, 256, width, last=nn.ReLU())
        features = (tables + 1) * width
        self.down = nn.ModuleList(nn.Linear(features, rank, bias=False) for _ in range(crosses))
        self.up = nn.ModuleList(nn.Linear(rank, features) for _ in range(crosses))
        self.top = perceptron(features, 1024, 1024, 512, 256, 1, last=nn.Sigmoid())

    def forward(self, dense: torch.Tensor, *ids: torch.Tensor) -> torch.Tensor:
        embedded = [table(index) for table, index in zip(self.tables, ids)]
        start = x = torch.cat([self.bottom(dense), *embedded], 1)
        for down, up in zip(self.down, self.up):
            x = start * up(down(x)) + x
        return self.top(x)


class GraphAttention(nn.Module):
    """Attention of each node over its incoming edges (Velickovic et al. 2018)."""

    def __init__(self, width: int, out: int, heads: int) -> None:
        super().__init__()
        self.heads, self.project = heads, nn.Linear(width, heads * out, bias=False)
        self.source, self.target = (nn.Parameter(torch.randn(heads, out) * out**-0.5) for _ in range(2))

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        h = self.project(x).unflatten(-1, (self.heads, -1))
        score = F.leaky_relu((h * self.source).sum(-1)[source] + (h * self.target).sum(-1)[target], 0.2)
        score = score.float()
        index = target[:, None].expand_as(score)
        nodes = x.shape[0]
        highest = score.new_full((nodes, self.heads), -torch.inf)
        highest = highest.scatter_reduce(0, index, score.detach(), "amax")
        weight = (score - highest[target]).exp()
        total = score.new_zeros(nodes, self.heads).scatter_add(0, index, weight)
        weight = weight / total[target].clamp_min(1e-16)
        message = h[source] * weight.to(h.dtype)[..., None]
        return h.new_zeros(h.shape).index_add(0, target, message).flatten(1)


class GraphAttentionNetwork(nn.Module):
    """
    Classifies the nodes of a sampled graph: features (nodes, width), edges (2, edges),
    labels (nodes,). Every sample is a new graph of the same size.
    """

    def __init__(self, width: int, hidden: int, classes: int, heads: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                GraphAttention(width, hidden, heads),
                GraphAttention(heads * hidden, hidden, heads),
                GraphAttention(heads * hidden, classes, 1),
            ]
        )

    def forward(self, features: torch.Tensor, edges: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, (source, target) = features, edges
        for layer in self.layers[:-1]:
            x = F.elu(layer(x, source, target))
        return F.cross_entropy(self.layers[-1](x, source, target).float(), labels)


class PolicyUpdate(nn.Module):
    """The clipped loss of proximal policy optimization (Schulman et al. 2017) on one minibatch."""

    def __init__(self, observations: int = 60, actions: int = 8, width: int = 256) -> None:
        super().__init__()

        def network(out: int) -> nn.Sequential:
            tanh = nn.Tanh
            return nn.Sequential(
                nn.Linear(observations, width), tanh(), nn.Linear(width, width), tanh(), nn.Linear(width, out)
            )

        self.actor, self.critic = network(actions), network(1)
        self.log_std = nn.Parameter(torch.zeros(actions))

    def forward(
        self,
        observation: torch.Tensor,
        action: torch.Tensor,
        old_log_prob: torch.Tensor,
        advantage: torch.Tensor,
        returns: torch.Tensor,
    ) -> torch.Tensor:
        mean, value = self.actor(observation), self.critic(observation).squeeze(-1)
        deviation = (action - mean) * torch.exp(-self.log_std)
        log_prob = -(0.5 * deviation.square() + self.log_std + 0.9189385).sum(-1)
        ratio = (log_prob - old_log_prob).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        entropy = (self.log_std + 1.4189385).sum()
        return -gain.mean() + 0.5 * (returns - value).square().mean() - 0.01 * entropy


class CartPoleRollout(nn.Module):
    """Steps of a policy in a batch of simulated cart-poles that start over when they fall."""

    def __init__(self, steps: int = 8, width: int = 64) -> None:
        super().__init__()
        self.steps = steps
        self.policy = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.force = nn.Linear(width, 1)

    def forward(self, state: torch.Tensor, start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        reward = state.new_zeros(state.shape[0])
        for _ in range(self.steps):
            force = 10.0 * self.force(self.policy(state)).squeeze(-1).tanh()
            state = self.physics(state, force)
            fallen = (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > 0.2095)
            reward = reward + (~fallen)
            state = torch.where(fallen[:, None], start, state)
        return state, reward

    def physics(self, state: torch.Tensor, force: torch.Tensor) -> torch.Tensor:
        x, speed, angle, spin = state.unbind(-1)
        push = (force + 0.05 * spin.square() * angle.sin()) / 1.1
        turn = (9.8 * angle.sin() - angle.cos() * push) / (0.5 * (4 / 3 - 0.1 * angle.cos().square() / 1.1))
        pull = push - 0.05 * turn * angle.cos() / 1.1
        return state + 0.02 * torch.stack([speed, pull, spin, turn], -1)
