"""Convolutional networks: a discriminator, a mobile classifier, a detector with its training loss."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F


class Discriminator(nn.Sequential):
    """Of DCGAN (Radford et al. 2015), for images of 64 x 64."""

    def __init__(self, width: int = 64) -> None:
        def layer(a: int, b: int) -> list[nn.Module]:
            return [nn.Conv2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2, inplace=True)]

        super().__init__(
            nn.Conv2d(3, width, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            *layer(width, 2 * width),
            *layer(2 * width, 4 * width),
            *layer(4 * width, 8 * width),
            nn.Conv2d(8 * width, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )


def conv_norm(a: int, b: int, kernel: int, stride: int = 1, groups: int = 1, act: nn.Module | None = None):
    layers = [nn.Conv2d(a, b, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(b)]
    return nn.Sequential(*layers, *filter(None, [act]))


class SqueezeExcite(nn.Module):
    def __init__(self, width: int, squeezed: int, act: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(width, squeezed, 1), nn.Conv2d(squeezed, width, 1)
        self.act, self.gate = act, gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gate(self.expand(self.act(self.reduce(x.mean((2, 3), keepdim=True)))))


class LCNet(nn.Module):
    """PP-LCNet (Cui et al. 2021) at a width of 0.5: depthwise-separable blocks, the last two with squeeze-excite."""

    # kernel, output width at 1.0, stride of each block
    blocks = (
        (3, 32, 1),
        (3, 64, 2),
        (3, 64, 1),
        (3, 128, 2),
        (3, 128, 1),
        (3, 256, 2),
        *[(5, 256, 1)] * 5,
        (5, 512, 2),
        (5, 512, 1),
    )

    def __init__(self, scale: float = 0.5, classes: int = 1000) -> None:
        super().__init__()
        width = int(16 * scale)
        layers = [conv_norm(3, width, 3, 2, act=nn.Hardswish())]
        for i, (kernel, out, stride) in enumerate(self.blocks):
            layers.append(conv_norm(width, width, kernel, stride, width, nn.Hardswish()))
            if i >= len(self.blocks) - 2:
                layers.append(SqueezeExcite(width, width // 4, nn.ReLU(), nn.Hardsigmoid()))
            layers.append(conv_norm(width, int(out * scale), 1, act=nn.Hardswish()))
            width = int(out * scale)
        self.features = nn.Sequential(*layers)
        self.head, self.classify = nn.Conv2d(width, 1280, 1), nn.Linear(1280, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.features(images).mean((2, 3), keepdim=True)
        return self.classify(F.hardswish(self.head(x)).flatten(1))


class InvertedBottleneck(nn.Module):
    def __init__(self, a: int, b: int, kernel: int, stride: int, expand: int) -> None:
        super().__init__()
        width = a * expand
        self.residual = a == b and stride == 1
        self.layers = nn.Sequential(
            *([conv_norm(a, width, 1, act=nn.SiLU())] if expand > 1 else []),
            conv_norm(width, width, kernel, stride, width, nn.SiLU()),
            SqueezeExcite(width, max(1, a // 4), nn.SiLU(), nn.Sigmoid()),
            conv_norm(width, b, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) if self.residual else self.layers(x)


class EfficientNet(nn.Module):
    """The features of EfficientNet-B1 (Tan and Le 2019) with strides of 8, 16 and 32."""

    # expansion, kernel, stride, output width, layers
    stages = (
        (1, 3, 1, 16, 2),
        (6, 3, 2, 24, 3),
        (6, 5, 2, 40, 3),
        (6, 3, 2, 80, 4),
        (6, 5, 1, 112, 4),
        (6, 5, 2, 192, 5),
        (6, 3, 1, 320, 2),
    )
    widths = (40, 112, 320)

    def __init__(self, shallow: bool) -> None:
        super().__init__()
        self.stem = conv_norm(3, 32, 3, 2, act=nn.SiLU())
        self.layers = nn.ModuleList()
        width = 32
        for expand, kernel, stride, out, depth in self.stages:
            stage = [InvertedBottleneck(width, out, kernel, stride, expand)]
            stage += [InvertedBottleneck(out, out, kernel, 1, expand) for _ in range(0 if shallow else depth - 1)]
            self.layers.append(nn.Sequential(*stage))
            width = out

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = self.stem(x)
        features = []
        for stage in self.layers:
            x = stage(x)
            features.append(x)
        return [features[2], features[4], features[6]]


def separable(a: int, b: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(a, a, 3, padding=1, groups=a, bias=False), nn.Conv2d(a, b, 1))


class Fuse(nn.Module):
    """A weighted sum of feature maps of one size."""

    def __init__(self, width: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(inputs))
        self.conv, self.norm = separable(width, width), nn.BatchNorm2d(width)

    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        weight = self.weight.relu()
        weight = weight / (weight.sum() + 1e-4)
        return self.norm(self.conv(F.silu(sum(x * w for x, w in zip(xs, weight)))))


class BidirectionalPyramid(nn.Module):
    """One BiFPN layer over five levels, the finest first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(Fuse(width, 2) for _ in range(4))
        self.up = nn.ModuleList(Fuse(width, 3 if i < 3 else 2) for i in range(4))

    def forward(self, levels: list[torch.Tensor]) -> list[torch.Tensor]:
        tops = [levels[-1]]
        for fuse, x in zip(self.down, reversed(levels[:-1])):
            tops.append(fuse(x, F.interpolate(tops[-1], size=x.shape[-2:])))
        tops.reverse()
        out = [tops[0]]
        for i, fuse in enumerate(self.up):
            smaller = F.max_pool2d(out[-1], 3, 2, 1)
            own = (levels[i + 1], tops[i + 1]) if i < 3 else (levels[i + 1],)
            out.append(fuse(*own, smaller))
        return out


class FeaturePyramid(nn.Module):
    """The pyramid of EfficientDet-D1, between the backbone and the heads: feature maps, the finest first."""

    def __init__(self, width: int = 88, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(BidirectionalPyramid(width) for _ in range(depth))

    def forward(self, *levels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = [*levels]
        for layer in self.layers:
            found = layer(found)
        return tuple(found)


class Head(nn.Module):
    """Shared convolutions, with batch norms of their own for each level."""

    def __init__(self, width: int, out: int, depth: int = 3, levels: int = 5) -> None:
        super().__init__()
        self.out = out
        self.convs = nn.ModuleList(separable(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.ModuleList(nn.BatchNorm2d(width) for _ in range(levels)) for _ in range(depth))
        self.predict = separable(width, 9 * out)

    def forward(self, levels: list[torch.Tensor]) -> torch.Tensor:
        found = []
        for i, x in enumerate(levels):
            for conv, norms in zip(self.convs, self.norms):
                x = F.silu(norms[i](conv(x)))
            found.append(self.predict(x).permute(0, 2, 3, 1).flatten(1, 2).unflatten(-1, (9, self.out)).flatten(1, 2))
        return torch.cat(found, 1)


def anchors(size: int, levels: int = 5) -> torch.Tensor:
    """Boxes (y0, x0, y1, x1) in the order of the predictions."""
    boxes = []
    for stride in (8 << i for i in range(levels)):
        centers = (torch.arange(-(-size // stride)) + 0.5) * stride
        y, x = torch.meshgrid(centers, centers, indexing="ij")
        shapes = [
            (4 * stride * 2 ** (octave / 3) * math.sqrt(ratio), 4 * stride * 2 ** (octave / 3) / math.sqrt(ratio))
            for octave in range(3)
            for ratio in (1.0, 2.0, 0.5)
        ]
        half = torch.tensor(shapes) / 2
        center = torch.stack([y, x], -1).reshape(-1, 1, 2)
        boxes.append(torch.cat([center - half, center + half], -1).reshape(-1, 4))
    return torch.cat(boxes)


class EfficientDet(nn.Module):
    """
    EfficientDet-D1 with its training loss (Tan et al. 2020): images (batch, 3, size, size),
    boxes (batch, n, 4), classes (batch, n), of which those under 0 are padding. The
    selection of real boxes has a shape that depends on the data: a graph break.
    """

    def __init__(self, size: int = 640, width: int = 88, depth: int = 4, classes: int = 90, shallow: bool = False):
        super().__init__()
        self.classes = classes
        self.backbone = EfficientNet(shallow)
        self.lateral = nn.ModuleList(conv_norm(w, width, 1) for w in (*self.backbone.widths, self.backbone.widths[-1]))
        self.pyramid = nn.ModuleList(BidirectionalPyramid(width) for _ in range(depth))
        self.classify, self.locate = Head(width, classes), Head(width, 4)
        self.register_buffer("anchors", anchors(size))

    def forward(self, images: torch.Tensor, boxes: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        features = self.backbone(images)
        levels = [lateral(x) for lateral, x in zip(self.lateral, (*features, features[-1]))]
        levels[3] = F.max_pool2d(levels[3], 3, 2, 1)
        levels.append(F.max_pool2d(levels[3], 3, 2, 1))
        for layer in self.pyramid:
            levels = layer(levels)
        scores, offsets = self.classify(levels), self.locate(levels)
        return self.loss(scores.to(images.dtype), offsets.to(images.dtype), *self.targets(boxes, classes))

    def targets(self, boxes: torch.Tensor, classes: torch.Tensor) -> list[torch.Tensor]:
        """
        Of each image. The loop, which breaks the graph, is in a method of its own, as in the
        original: a function with such a loop is not compiled.
        """
        found = [self.match(*one) for one in zip(boxes, classes)]
        return [torch.stack(t) for t in zip(*found)]

    def match(self, boxes: torch.Tensor, classes: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of each anchor: the class, offsets, whether it has a box, and whether it must be right about that."""
        real = classes >= 0
        boxes, classes = boxes[real], classes[real]
        low = torch.maximum(self.anchors[:, None, :2], boxes[:, :2])
        high = torch.minimum(self.anchors[:, None, 2:], boxes[:, 2:])
        common = (high - low).clamp_min(0).prod(-1)
        area, anchor_area = ((b[:, 2:] - b[:, :2]).prod(-1) for b in (boxes, self.anchors))
        overlap, match = (common / (area + anchor_area[:, None] - common)).max(1)
        positive, counted = overlap >= 0.5, (overlap >= 0.5) | (overlap < 0.4)
        anchor_size = self.anchors[:, 2:] - self.anchors[:, :2]
        matched = boxes[match]
        shift = ((matched[:, :2] + matched[:, 2:]) - (self.anchors[:, :2] + self.anchors[:, 2:])) / 2 / anchor_size
        growth = ((matched[:, 2:] - matched[:, :2]) / anchor_size).log()
        return classes[match], torch.cat([shift, growth], -1), positive, counted

    def loss(
        self,
        scores: torch.Tensor,
        offsets: torch.Tensor,
        classes: torch.Tensor,
        wanted_offsets: torch.Tensor,
        positive: torch.Tensor,
        counted: torch.Tensor,
    ) -> torch.Tensor:
        wanted = (F.one_hot(classes, self.classes) * positive[..., None]).to(scores.dtype)
        probability = scores.sigmoid()
        modulated = (wanted - probability).abs() ** 1.5 * (0.25 * wanted + 0.75 * (1 - wanted))
        focal = modulated * F.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
        distance = F.huber_loss(offsets, wanted_offsets, reduction="none", delta=0.1)
        positives = positive.sum() + 1.0
        return ((focal * counted[..., None]).sum() + 50 * (distance * positive[..., None]).sum() / 4) / positives
