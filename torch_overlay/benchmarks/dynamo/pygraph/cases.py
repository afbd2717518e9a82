"""
The cases of each suite, built from configurations with random weights.

``small`` shrinks a case so that a machine without a GPU can check that it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F


Inputs = tuple[tuple[Any, ...], dict[str, Any]]

# Relative to the size of the values. benchmarks/dynamo allows the same for these types.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Case:
    name: str
    suite: str
    module: Callable[[bool], nn.Module]
    inputs: Callable[[bool], Inputs]
    mode: Literal["inference", "training"] = "inference"
    # Of the inputs and weights, or of autocast when training.
    dtype: torch.dtype = torch.float32
    # Distinct sets of input buffers that consecutive calls go through.
    ring: int = 8
    # What the case must show, beyond what every case must.
    must_capture: bool = False
    min_gain_over_stock: float | None = None
    min_saved_mib: float = 0.0

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]

    @property
    def autocast(self) -> bool:
        return self.mode == "training" and self.dtype != torch.float32


CASES: dict[str, Case] = {}


def add(name: str, *args: Any, suite: str = "pi", **kwargs: Any) -> None:
    CASES[name] = Case(name, suite, *args, **kwargs)


def select(suite: str, names: list[str] | None = None) -> list[Case]:
    cases = [case for case in CASES.values() if case.suite == suite]
    if names is None:
        return cases
    unknown = set(names) - {case.name for case in cases}
    if unknown:
        raise ValueError(f"suite {suite} has no case {', '.join(sorted(unknown))}")
    return [case for case in cases if case.name in names]


def _normal(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Callable[[], Inputs]:
    return lambda: (tuple(torch.randn(shape, dtype=dtype) for shape in shapes), {})


def _sized(full: Callable[[], Any], small: Callable[[], Any]) -> Callable[[bool], Any]:
    return lambda is_small: small() if is_small else full()


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
    _sized(_normal((1 << 28,), (1 << 28,)), _normal((1 << 10,), (1 << 10,))),
    ring=3,
    min_gain_over_stock=2.5,
    min_saved_mib=1.9 * 1024,
)
add(
    "pointwise_16x4MiB",
    lambda small: Pointwise(),
    _sized(_normal(*[(1 << 20,)] * 16), _normal(*[(1 << 10,)] * 16)),
)
add(
    "pointwise_2x4KiB",
    lambda small: Pointwise(),
    lambda small: _normal((1 << 10,), (1 << 10,))(),
)
add(
    "mlp_20x64",
    lambda small: MLP(64, 2 if small else 20),
    lambda small: _normal((8, 64))(),
)
add(
    "mlp_bf16_2x4096",
    lambda small: MLP(64 if small else 4096, 2),
    _sized(
        _normal((16384, 4096), dtype=torch.bfloat16),
        _normal((16, 64), dtype=torch.bfloat16),
    ),
    dtype=torch.bfloat16,
)
add(
    "sdpa_bf16",
    lambda small: Attention(),
    _sized(
        _normal(*[(8, 16, 1024, 64)] * 3, dtype=torch.bfloat16),
        _normal(*[(1, 2, 16, 64)] * 3, dtype=torch.bfloat16),
    ),
    dtype=torch.bfloat16,
)
add(
    "conv2d",
    lambda small: Conv(),
    _sized(_normal((32, 64, 56, 56)), _normal((2, 64, 8, 8))),
)
add(
    "mutated_input_mlp",
    lambda small: MutatedInput(64, 10),
    lambda small: _normal((8, 64), (8, 64))(),
    must_capture=True,
    min_gain_over_stock=2.5,
)


def _bert(layers: int) -> Callable[[bool], nn.Module]:
    def build(small: bool) -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        return BertForMaskedLM(BertConfig(num_hidden_layers=1 if small else layers))

    return build


def _llama(layers: int) -> Callable[[bool], nn.Module]:
    def build(small: bool) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=32000,
                hidden_size=768,
                intermediate_size=2048,
                num_hidden_layers=1 if small else layers,
                num_attention_heads=12,
                use_cache=False,
            )
        )

    return build


def _resnet(small: bool) -> nn.Module:
    from torchvision.models import resnet18

    return resnet18()


def _tokens(vocabulary: int, batch: int, length: int) -> Callable[[bool], Inputs]:
    def inputs(small: bool) -> Inputs:
        shape = (1, 16) if small else (batch, length)
        return (), {name: torch.randint(vocabulary, shape) for name in ("input_ids", "labels")}

    return inputs


def _images(batch: int, dtype: torch.dtype) -> Callable[[bool], Inputs]:
    return _sized(
        _normal((batch, 3, 224, 224), dtype=dtype),
        _normal((2, 3, 64, 64), dtype=dtype),
    )


def _model(name: str, mode: str, *what: Any) -> None:
    # Weights in bfloat16 for inference, in float32 under autocast for training.
    add(f"{name}_{mode}", *what, mode, dtype=torch.bfloat16)


# Half the depth for training: its graphs take several times as long to compile.
_model("bert", "inference", _bert(12), _tokens(30522, 4, 128))
_model("bert", "training", _bert(6), _tokens(30522, 8, 128))
_model("llama", "inference", _llama(12), _tokens(32000, 1, 256))
_model("llama", "training", _llama(6), _tokens(32000, 4, 256))
_model("resnet18", "inference", _resnet, _images(16, torch.bfloat16))
_model("resnet18", "training", _resnet, _images(32, torch.float32))
