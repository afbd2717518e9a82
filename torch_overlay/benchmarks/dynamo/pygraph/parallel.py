"""
Programs whose parts do not depend on one another, with the kernels of a graph one after another and side by side. The
catalogue adds cases of the suites ``paper`` and ``modern`` (ALSO).
"""

from __future__ import annotations

import torch

from .case import adding, Inputs, normal, sized, Suite
from .models.branches import AdamWStep, LoopedExperts, PolicyEnsemble, TwoTowers
from .models.multimodal import UNet
from .models.vision import FeaturePyramid


# `--variants` also takes forced_lanes2, forced_lanes4, forced_dag and eager.
SUITE = Suite(
    ("no_cg", "stock_cg", "pygraph", "chain", "hand_written"),
    must_equal=("pygraph", "chain"),
    rounds=11,
    round_s=0.01,
    selects_in_loop=True,
)
# Cases of other suites: branches, and decoders, which have none.
ALSO = (
    "bert_pretraining",
    "llama_decode",
    "mm_clip",
    "moe_decode",
    "xlnet_infer",
)
# How much faster PyGraph is with schedules, at least: of no row more is lost than noise.
MIN_GAIN = 0.99
# What a program may reserve beyond stock if kernels run side by side: a part of stock's, and MiB if that is more.
MAX_MORE_MEMORY, MAX_MORE_MIB = 0.1, 8
# The same if no kernels run side by side, as a part of stock's.
MAX_MORE_OF_A_CHAIN = 0.02

concurrent = adding("concurrent")


def _ids(small: bool) -> Inputs:
    batch, tables, rows = (8, 2, 100) if small else (512, 8, 100_000)
    return (torch.randint(rows, (batch, tables)), torch.randint(rows, (batch, tables))), {}


def _shapes(small: bool) -> list[tuple[int, ...]]:
    """Those of GPT-2's parameters, of another width."""
    width, layers = (8, 1) if small else (256, 12)
    layer = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    layer += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return layers * layer


def _gradients(small: bool) -> Inputs:
    return ([torch.randn(shape) for shape in _shapes(small)],), {}


def _levels(small: bool) -> Inputs:
    """Feature maps of an image of 640 x 640."""
    batch, width, size = (2, 8, 16) if small else (1, 88, 80)
    return tuple(torch.randn(batch, width, size >> i, size >> i) for i in range(5)), {}


def _noisy(small: bool) -> Inputs:
    batch, size = (1, 16) if small else (1, 64)
    half = torch.float16
    image, words = torch.randn(batch, 3, size, size, dtype=half), torch.randn(batch, 77, 512, dtype=half)
    return (image, torch.rand(batch, dtype=half), torch.randn(batch, 512, dtype=half), words), {}


concurrent(
    "experts_loop",
    lambda small: LoopedExperts(64, 64, 2) if small else LoopedExperts(1024, 1024, 8),
    sized(normal((1, 64, 1024), dtype=torch.float16), normal((1, 4, 64), dtype=torch.float16)),
    dtype=torch.float16,
    about="own; eight experts, each of which computes all 64 tokens",
    obstacle="the experts wait for one another",
    min_scheduled_gain=1.8,
    alone=True,
)
concurrent(
    "two_towers",
    lambda small: TwoTowers(2, 100, 8, 16) if small else TwoTowers(8, 100_000, 64, 1024),
    _ids,
    dtype=torch.float16,
    about="own; a user tower and an item tower of eight tables each, 512 pairs",
    obstacle="one tower waits for the other",
)
concurrent(
    "policy_ensemble",
    lambda small: PolicyEnsemble(2, 8, 16, 2) if small else PolicyEnsemble(8, 60, 256, 8),
    sized(normal((64, 60)), normal((4, 8))),
    about="own; eight small policies and 64 observations",
    obstacle="the policies wait for one another",
    quick=True,
    alone=True,
)
concurrent(
    "adamw",
    lambda small: AdamWStep(_shapes(small)),
    _gradients,
    about="own; AdamW over 144 tensors of GPT-2's shapes",
    obstacle="144 gradients that move",
    capturable=False,
    ring=2,
)
concurrent(
    "unet_step",
    lambda small: UNet(16, (1, 2)) if small else UNet(128, (1, 2, 4)),
    _noisy,
    dtype=torch.float16,
    about="own; a denoising step of a U-Net at 64 x 64",
    obstacle="skip connections and the embedding of the time wait for the path through the middle",
    in_tf32=True,
)
concurrent(
    "pyramid_train",
    lambda small: FeaturePyramid(8, 1) if small else FeaturePyramid(),
    _levels,
    "training",
    without_tf32=True,
    about="own; two of the four layers of EfficientDet-D1's feature pyramid, in float32. The whole takes minutes to compile",
    obstacle="levels wait for one another",
    capturable=False,
)
