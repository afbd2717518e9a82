"""
The cases of each suite, built from configurations with random weights.

``small`` shrinks a case so that a machine without a GPU can check that it runs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F


Inputs = tuple[tuple[Any, ...], dict[str, Any]]

# Relative to the size of the values. benchmarks/dynamo allows the same for these types.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 1e-2}


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
    # For workloads: what it is, the paper's name for it, and what stands in the way of
    # CUDA graphs.
    about: str = ""
    paper: str = ""
    obstacle: str = ""
    # Keyword inputs that are set as attributes of the module before each call.
    attributes: tuple[str, ...] = ()
    # Libraries it is built from.
    needs: tuple[str, ...] = ()
    # Moved to the device once built, as programs do, so that what is no parameter or
    # buffer stays on the CPU.
    built_on_cpu: bool = False
    # Why its results cannot be compared with eager's.
    not_as_eager: str = ""
    # Its convolutions are, as cuDNN has it by default, so that rounding errors of other
    # kernels before them become as large as float16's: the mantissa has as many bits. Where
    # CPU values are placed otherwise there are other kernels.
    in_tf32: bool = False
    # They are not in TF32, as rounding would decide its gradients.
    without_tf32: bool = False
    # A user could capture a whole step: fixed shapes, no CPU values, no inputs to mutate.
    capturable: bool = True
    quick: bool = False
    # Device memory that it holds while others are measured.
    gib: float = 2.0
    # One variant after the other takes longer to compile than a run has. Side by side each
    # tunes its own kernels, so that variants differ by rounding.
    apart: bool = False

    @property
    def tolerance(self) -> float:
        return TOLERANCE[torch.float16 if self.in_tf32 else self.dtype]

    @property
    def tolerance_of_eager(self) -> float:
        """Of results that are compared with eager's: benchmarks/dynamo allows more in training."""
        return max(self.tolerance, 1e-3) if self.mode == "training" else self.tolerance

    @property
    def autocast(self) -> bool:
        return self.mode == "training" and self.dtype != torch.float32

    @property
    def missing(self) -> str:
        """The libraries that are not installed."""
        return ", ".join(name for name in self.needs if importlib.util.find_spec(name) is None)


@dataclass(frozen=True)
class Suite:
    variants: tuple[str, ...]
    # Whether a training step updates the weights, or is a forward and a backward, as in the
    # paper.
    optimizer: bool = False
    # Gradients are comparable to eager's only without dropout; its kernels stay.
    dropout: bool = False
    rounds: int = 21
    # A case that hangs must not take the time of the others.
    max_case_s: float = 90.0
    # Cases that are prepared at the same time: they also need the host's memory.
    together: int = 16
    # Variants that are also run alone, for the memory they need, what they launch and copy,
    # and, from cold caches, the time until their steady state.
    solo: tuple[str, ...] = ("stock_cg", "pygraph")
    cold: bool = True
    profile: bool = True
    # Those of which it is also known what they launch where they were timed, beside others.
    # What is dropped once it is measured is not: of those only the last stays.
    profiled: tuple[str, ...] = ()
    # Variants whose results must be those without CUDA graphs.
    must_equal: tuple[str, ...] = ("pygraph",)
    # Every variant is timed in turns with the others.
    exhaustive: bool = False
    # PyGraph selects in the loop that is timed then, and not in one that compares results. In
    # another program another choice may be right.
    selects_in_loop: bool = False
    # Seconds that a round of a variant takes at least.
    round_s: float = 0.02
    # Cases that processes after the first repeat with its decisions, and the one that is
    # decided by several processes at once.
    repeated: tuple[str, ...] = ()
    decided_at_once: str = ""

    @property
    def candidates(self) -> tuple[str, ...]:
        """What PyGraph must not be slower than."""
        if not self.exhaustive:
            return ("no_cg", "stock_cg")
        return tuple(name for name in self.variants if name != "pygraph")


WORKLOADS = Suite(
    (
        "eager",
        "no_cg",
        "stock_cg",
        "stock_whole",
        "pygraph",
        "forced_node_update",
        "hand_written",
        "forced_copy",
    ),
    profiled=("stock_whole", "pygraph", "forced_copy"),
)

SUITES = {
    "pi": Suite(
        ("no_cg", "stock_cg", "pygraph", "forced_node_update", "hand_written", "jax"),
        optimizer=True,
        dropout=True,
        cold=False,
        profile=False,
        must_equal=("pygraph", "forced_node_update"),
        selects_in_loop=True,
    ),
    "cgct": Suite(
        ("no_cg", "stock_cg", "pygraph", "gpu", "forced_node_update", "gpu_node_update"),
        max_case_s=60.0,
        solo=(),
        must_equal=("pygraph", "forced_node_update"),
    ),
    # Those of pi with each way to bind inputs.
    "bindings": Suite(
        (
            "no_cg",
            "stock_cg",
            "pygraph",
            "forced_copy",
            "forced_node_update",
            "forced_prelude",
            "forced_table",
        ),
        optimizer=True,
        dropout=True,
        solo=(),
        cold=False,
        profile=False,
        must_equal=("pygraph", "forced_node_update", "forced_prelude", "forced_table"),
        exhaustive=True,
        selects_in_loop=True,
    ),
    "paper": WORKLOADS,
    "modern": WORKLOADS,
    # Graphs of all sizes, for the choice between all candidates.
    "scg": Suite(
        ("no_cg", "stock_cg", "pygraph", "forced_copy", "forced_node_update"),
        max_case_s=30.0,
        together=17,
        solo=(),
        cold=False,
        profile=False,
        exhaustive=True,
        selects_in_loop=True,
        rounds=41,
        round_s=0.004,
        repeated=("mlp_40x64_of_8", "pointwise_4x16MiB", "chain_3", "train_mlp", "mutated_mlp", "waits_for_a_value"),
        decided_at_once="chain_3",
    ),
    # A few of both, in the time of a coffee.
    "quick": Suite(("eager", "no_cg", "stock_cg", "pygraph"), rounds=11, max_case_s=60.0, solo=()),
}

CASES: dict[str, Case] = {}


def add(name: str, *args: Any, suite: str = "pi", **kwargs: Any) -> None:
    if name in CASES:
        raise ValueError(f"two cases {name}")
    CASES[name] = Case(name, suite, *args, **kwargs)


def select(suite: str, names: list[str] | None = None) -> list[Case]:
    cases = [case for case in CASES.values() if case.suite == suite]
    if suite == "bindings":
        cases = [replace(case, suite=suite) for case in CASES.values() if case.suite == "pi"]
    if suite == "quick":
        # Rows of their own, which do not replace those of a full run.
        cases = [replace(case, suite=suite) for case in CASES.values() if case.quick]
    if names is None:
        return cases
    unknown = set(names) - {case.name for case in cases}
    if unknown:
        raise ValueError(f"suite {suite} has no case {', '.join(sorted(unknown))}")
    return [case for case in cases if case.name in names]


def described(case: Case) -> dict[str, Any]:
    """What the tables and plots say about a case."""
    found = {"suite": case.suite, "name": case.name}
    if case.about:
        found |= {"mode": case.mode, "paper": case.paper, "about": case.about, "obstacle": case.obstacle}
    return found


def normal(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Callable[[], Inputs]:
    return lambda: (tuple(torch.randn(shape, dtype=dtype) for shape in shapes), {})


def sized(full: Callable[[], Any], small: Callable[[], Any]) -> Callable[[bool], Any]:
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
    sized(normal((1 << 28,), (1 << 28,)), normal((1 << 10,), (1 << 10,))),
    ring=3,
    min_gain_over_stock=2.5,
    min_saved_mib=1.9 * 1024,
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
    return sized(
        normal((batch, 3, 224, 224), dtype=dtype),
        normal((2, 3, 64, 64), dtype=dtype),
    )


def _model(name: str, mode: str, *what: Any) -> None:
    # Weights in bfloat16 for inference, in float32 under autocast for training.
    needs = "torchvision" if name.startswith("resnet") else "transformers"
    add(f"{name}_{mode}", *what, mode, dtype=torch.bfloat16, needs=(needs,))


# Half the depth for training: its graphs take several times as long to compile.
_model("bert", "inference", _bert(12), _tokens(30522, 4, 128))
_model("bert", "training", _bert(6), _tokens(30522, 8, 128))
_model("llama", "inference", _llama(12), _tokens(32000, 1, 256))
_model("llama", "training", _llama(6), _tokens(32000, 4, 256))
_model("resnet18", "inference", _resnet, _images(16, torch.bfloat16))
_model("resnet18", "training", _resnet, _images(32, torch.float32))


# They add theirs.
from . import cgct, modern, paper, scg  # noqa: E402, F401
