"""Suite pi: small graphs, each for one thing that parameter indirection must show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .case import adding, images, normal, sized, Suite
from .models.hub import token_inputs, torchvision_model, transformers_model
from .models.small import MLP, MutatedInput, Pointwise


SUITE = Suite(
    ("no_cg", "stock_cg", "pygraph", "forced_node_update", "hand_written", "jax"),
    optimizer=True,
    dropout=True,
    must_equal=("pygraph", "forced_node_update"),
    selects_in_loop=True,
)
add = adding("pi")


class Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 64, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).relu()


add(
    "pointwise_2x1GiB",
    lambda small: Pointwise(),
    sized(normal((1 << 28,), (1 << 28,)), normal((1 << 10,), (1 << 10,))),
    ring=3,
    min_gain_over_stock=2.5,
    min_saved_mib=1.9 * 1024,
    alone=True,
)
add(
    "pointwise_16x4MiB",
    lambda small: Pointwise(),
    sized(normal(*[(1 << 20,)] * 16), normal(*[(1 << 10,)] * 16)),
)
add(
    "pointwise_2x4KiB",
    lambda small: Pointwise(),
    lambda small: normal((1 << 10,), (1 << 10,))(),
)
add(
    "mlp_20x64",
    lambda small: MLP(64, 2 if small else 20),
    lambda small: normal((8, 64))(),
)
add(
    "mlp_bf16_2x4096",
    lambda small: MLP(64 if small else 4096, 2),
    sized(
        normal((16384, 4096), dtype=torch.bfloat16),
        normal((16, 64), dtype=torch.bfloat16),
    ),
    dtype=torch.bfloat16,
)
add(
    "sdpa_bf16",
    lambda small: Attention(),
    sized(
        normal(*[(8, 16, 1024, 64)] * 3, dtype=torch.bfloat16),
        normal(*[(1, 2, 16, 64)] * 3, dtype=torch.bfloat16),
    ),
    dtype=torch.bfloat16,
)
add(
    "conv2d",
    lambda small: Conv(),
    sized(normal((32, 64, 56, 56)), normal((2, 64, 8, 8))),
)
add(
    "mutated_input_mlp",
    lambda small: MutatedInput(64, 10),
    lambda small: normal((8, 64), (8, 64))(),
    must_capture=True,
    min_gain_over_stock=2.5,
    capturable=False,
)


def _bert(layers: int) -> Callable[[bool], nn.Module]:
    return lambda small: transformers_model("BertForMaskedLM", small, drops=True, num_hidden_layers=layers)


def _llama(layers: int) -> Callable[[bool], nn.Module]:
    sizes = {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12}
    return lambda small: transformers_model("LlamaForCausalLM", small, drops=True, num_hidden_layers=layers, **sizes)


def _model(name: str, mode: str, *what: Any) -> None:
    # Weights in bfloat16 for inference, in float32 under autocast for training.
    needs = "torchvision" if name.startswith("resnet") else "transformers"
    add(f"{name}_{mode}", *what, mode, dtype=torch.bfloat16, needs=(needs,))


# Half the depth for training: its graphs take several times as long to compile.
_model("bert", "inference", _bert(12), token_inputs(30522, 4, 128))
_model("bert", "training", _bert(6), token_inputs(30522, 8, 128))
_model("llama", "inference", _llama(12), token_inputs(32000, 1, 256))
_model("llama", "training", _llama(6), token_inputs(32000, 4, 256))
_model("resnet18", "inference", torchvision_model("resnet18"), images(16, torch.bfloat16))
_model("resnet18", "training", torchvision_model("resnet18"), images(32, torch.float32))
