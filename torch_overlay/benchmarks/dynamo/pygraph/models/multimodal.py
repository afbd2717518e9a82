"""Images from and beside text: CLIP, a DALL-E 2 pipeline, a diffusion transformer."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from .attention import Block, MLP, SelfAttention, sinusoids


def embed_time(time: torch.Tensor, width: int) -> torch.Tensor:
    """Of times (batch,)."""
    frequency = torch.exp(torch.arange(0, width, 2, device=time.device) * (-math.log(10000.0) / width))
    angle = time.float()[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], -1)


class TextTower(nn.Module):
    """CLIP's. As in its public code, the causal mask is a plain CPU attribute that every block moves to the input."""

    def __init__(self, width: int = 512, layers: int = 12, out: int = 512, vocabulary: int = 49408) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(77, width) * 0.01)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(layers))
        self.norm, self.project = nn.LayerNorm(width), nn.Linear(width, out, bias=False)
        self.mask = torch.full((77, 77), float("-inf"), device="cpu").triu(1)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The embedding (batch, out) at the last token, and of every token (batch, 77, width)."""
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x, self.mask.to(device=x.device, dtype=x.dtype))
        x = self.norm(x)
        last = x[torch.arange(x.shape[0], device=x.device), tokens.argmax(-1)]
        return self.project(last), x


class ImageTower(nn.Module):
    def __init__(self, width: int = 768, layers: int = 12, out: int = 512, patch: int = 32, size: int = 224) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch, bias=False)
        self.first = nn.Parameter(torch.randn(width) * 0.02)
        self.positions = nn.Parameter(torch.randn((size // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(layers))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project = nn.Linear(width, out, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = self.norm1(torch.cat([self.first.expand(x.shape[0], 1, -1), x], 1) + self.positions)
        for block in self.blocks:
            x = block(x)
        return self.project(self.norm2(x[:, 0]))


class CLIP(nn.Module):
    """ViT-B/32 (Radford et al. 2021)."""

    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        self.image, self.text = ImageTower(layers=layers), TextTower(layers=layers)

    def forward(self, images: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.normalize(self.image(images), dim=-1), F.normalize(self.text(tokens)[0], dim=-1)


class Prior(nn.Module):
    """Predicts an image embedding from a text embedding, one denoising step (Ramesh et al. 2022)."""

    def __init__(self, width: int = 512, layers: int = 6) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(layers))
        self.time = MLP(width, 4 * width)
        self.query, self.norm = nn.Parameter(torch.randn(width) * 0.02), nn.LayerNorm(width)
        self.mask = torch.full((81, 81), float("-inf"), device="cpu").triu(1)

    def forward(self, text: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        batch = text.shape[0]
        noisy = torch.randn_like(text)
        time = self.time(embed_time(torch.zeros(batch, device=text.device), self.width).to(text.dtype))
        query = self.query.expand(batch, -1)
        x = torch.cat([words, torch.stack([text, time, noisy, query], 1)], 1)
        for block in self.blocks:
            x = block(x, self.mask.to(device=x.device, dtype=x.dtype))
        return self.norm(x[:, -1])


class ResBlock(nn.Module):
    def __init__(self, a: int, b: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, a), nn.GroupNorm(8, b)
        self.conv1, self.conv2 = nn.Conv2d(a, b, 3, padding=1), nn.Conv2d(b, b, 3, padding=1)
        self.modulate = nn.Linear(time, 2 * b)
        self.skip = nn.Conv2d(a, b, 1) if a != b else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        scale, shift = self.modulate(F.silu(time))[..., None, None].chunk(2, 1)
        y = self.conv1(F.silu(self.norm1(x)))
        y = self.conv2(F.silu(self.norm2(y) * (1 + scale) + shift))
        return self.skip(x) + y


class CrossAttention(nn.Module):
    def __init__(self, width: int, memory_width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.GroupNorm(8, width), SelfAttention(width, max(1, width // 64), memory_width)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        y = self.attention(self.norm(x).flatten(2).transpose(1, 2), memory)
        return x + y.transpose(1, 2).unflatten(-1, x.shape[-2:])


class UNet(nn.Module):
    """Denoises images (batch, 3, n, n), given an image embedding, text and possibly a smaller image."""

    def __init__(self, width: int, multiples: tuple[int, ...], channels: int = 3, memory_width: int = 512) -> None:
        super().__init__()
        time = 4 * width
        widths = [width * m for m in multiples]
        self.width = width
        self.time, self.condition = nn.Linear(width, time), nn.Linear(512, time)
        self.first = nn.Conv2d(channels, width, 7, padding=3)
        pairs = list(zip([width, *widths], widths))
        self.down = nn.ModuleList(
            nn.ModuleList([ResBlock(a, a, time), ResBlock(a, a, time), nn.Conv2d(a, b, 4, 2, 1)]) for a, b in pairs
        )
        last = widths[-1]
        self.middle = nn.ModuleList([ResBlock(last, last, time), ResBlock(last, last, time)])
        self.attend = CrossAttention(last, memory_width)
        self.up = nn.ModuleList(
            nn.ModuleList([nn.ConvTranspose2d(b, a, 4, 2, 1), ResBlock(2 * a, a, time), ResBlock(a, a, time)])
            for a, b in reversed(pairs)
        )
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(
        self, x: torch.Tensor, time: torch.Tensor, embedding: torch.Tensor, words: torch.Tensor
    ) -> torch.Tensor:
        time = self.time(embed_time(time, self.width).to(x.dtype)) + self.condition(embedding)
        x = self.first(x)
        skips = []
        for block1, block2, shrink in self.down:
            x = block2(block1(x, time), time)
            skips.append(x)
            x = shrink(x)
        x = self.middle[1](self.attend(self.middle[0](x, time), words), time)
        for grow, block1, block2 in self.up:
            x = block2(block1(torch.cat([grow(x), skips.pop()], 1), time), time)
        return self.last(x)


class DALLE2(nn.Module):
    """
    Text encoder, prior and two UNets, one denoising step each: the structure and sizes
    of the public pipeline. Noise is drawn in forward.
    """

    def __init__(
        self,
        layers: int = 12,
        prior_layers: int = 6,
        width: int = 128,
        multiples: tuple[int, ...] = (1, 2, 4, 8),
        size: int = 128,
    ) -> None:
        super().__init__()
        self.text, self.prior, self.size = TextTower(layers=layers), Prior(layers=prior_layers), size
        self.decoder = UNet(width, multiples)
        self.upsampler = UNet(16, (*multiples, 2 * multiples[-1]), channels=6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        text, words = self.text(tokens[:, :77])
        embedding = self.prior(F.normalize(text, dim=-1), words)
        zeros = torch.zeros(tokens.shape[0], device=tokens.device)
        noise = torch.randn(tokens.shape[0], 3, self.size, self.size, device=tokens.device, dtype=words.dtype)
        small = self.denoised(self.decoder(noise, zeros, embedding, words), noise)
        small = F.interpolate(small, scale_factor=2, mode="bilinear")
        noise = torch.randn_like(small)
        return self.denoised(self.upsampler(torch.cat([noise, small], 1), zeros, embedding, words), noise)

    def denoised(self, predicted: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return ((noise - 0.5 * predicted) * 1.1).clamp(-1.0, 1.0) * 0.5 + 0.5


class DiTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.attention, self.mlp = SelfAttention(width, heads), MLP(width, 4 * width)
        self.modulate = nn.Linear(width, 6 * width)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulate(F.silu(condition))[:, None].chunk(6, -1)
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """The diffusion transformer (Peebles and Xie 2023) on latents (batch, 4, n, n)."""

    def __init__(self, layers: int, width: int, heads: int, size: int = 32, patch: int = 2) -> None:
        super().__init__()
        self.width, self.patch, self.grid = width, patch, size // patch
        self.patches, self.time = nn.Conv2d(4, width, patch, patch), MLP(width, width)
        self.classes = nn.Embedding(1001, width)
        self.register_buffer("positions", sinusoids(self.grid**2, width))
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(layers))
        self.norm, self.last = nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, patch**2 * 4)

    def forward(self, x: torch.Tensor, time: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        condition = self.time(embed_time(time, self.width).to(x.dtype)) + self.classes(label)
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x, condition)
        x = self.last(self.norm(x)).unflatten(1, (self.grid, self.grid))
        return x.unflatten(-1, (self.patch, self.patch, 4)).permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


class GuidedStep(nn.Module):
    """
    One Euler step of sampling with classifier-free guidance, from one noise level to the
    following. As in the samplers in use, they stay on the CPU, and a branch looks at one.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(
        self, x: torch.Tensor, label: torch.Tensor, sigma: torch.Tensor, following: torch.Tensor
    ) -> torch.Tensor:
        scaled = x / (sigma**2 + 1) ** 0.5
        time = torch.full((2 * x.shape[0],), 1.0, device=x.device) * (0.25 * sigma.log())
        both = self.net(torch.cat([scaled, scaled]), time, torch.cat([label, torch.full_like(label, 1000)]))
        guided, free = both.chunk(2)
        noise = free + 4.0 * (guided - free)
        if following < 0.05:
            return x - noise * sigma
        return x + noise * (following - sigma)
