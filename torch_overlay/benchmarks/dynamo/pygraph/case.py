"""
What a case and a suite are, and helpers to declare them. Each suite declares its cases in a
module of its own; ``catalogue`` knows all suites.

``small`` shrinks a case so that a machine without a GPU can check that it runs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn


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
    # Of PyGraph with schedules.
    min_scheduled_gain: float | None = None
    # Of one recording for many sizes: over no CUDA graphs, and over stock's in calls of random sizes.
    min_sizes_gain: float | None = None
    min_saved_mib: float = 0.0
    # Graph breaks that PyGraph may leave.
    max_breaks: int | None = None
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
    # PyTorch chooses another attention, as with TORCH_CUDNN_SDPA_DEPRIORITIZED=1: cuDNN builds a plan for each new size.
    without_cudnn_attention: bool = False
    # A user could capture a whole step: fixed shapes, no CPU values, no inputs to mutate.
    capturable: bool = True
    # The submodule that is compiled, if not all of the module is: the rest runs as it is.
    compiled_part: str = ""
    quick: bool = False
    # Each of Suite.run_alone also runs in a process that has the device to itself and starts with cold caches. These runs
    # give start-up time, memory, launched kernels and copied bytes.
    alone: bool = False
    # Device memory that it holds while others are measured.
    gib: float = 2.0

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
    # For which a case may have the machine to itself: while it is timed, all others stop.
    max_case_s: float = 60.0
    # Those of which it is also known what they launch where they were timed, beside others.
    # What is dropped once it is measured is not: of those only the last stays.
    profiled: tuple[str, ...] = ()
    # Variants that some cases also run alone: Case.alone.
    run_alone: tuple[str, ...] = ("stock_cg", "pygraph")
    # Variants whose results must be those without CUDA graphs.
    must_equal: tuple[str, ...] = ("pygraph",)
    # Every variant is timed in turns with the others.
    exhaustive: bool = False
    # PyGraph selects in the loop that is timed then, and not in one that compares results. In
    # another program another choice may be right.
    selects_in_loop: bool = False
    # Compiled for all sizes at once. A round goes once around the ring, whose inputs differ in size, and no timing is
    # repeated: sizes come too seldom for a recording of each.
    dynamic: bool = False
    # Dynamo breaks the graph at other places in the variants.
    breaks_graphs: bool = False
    # Seconds that a round of a variant takes at least.
    round_s: float = 0.02

    @property
    def compiled(self) -> tuple[str, ...]:
        """
        The variants that Inductor compiles. A forced variant runs the code of ``pygraph``, and the one captured by hand that
        of ``no_cg``.
        """
        others = ("eager", "hand_written", "jax")
        return tuple(name for name in self.variants if name not in others and not name.startswith("forced_"))

    @property
    def candidates(self) -> tuple[str, ...]:
        """What PyGraph must not be slower than."""
        if not self.exhaustive:
            return ("no_cg", "stock_cg")
        return tuple(name for name in self.variants if name != "pygraph")


# For suites of whole workloads.
WORKLOADS = Suite(
    (
        "eager",
        "no_cg",
        "stock_cg",
        "stock_whole",
        "pygraph",
        "hand_written",
        "forced_node_update",
        "forced_copy",
    ),
    selects_in_loop=True,
    # PyGraph where no forced variant was measured after it.
    profiled=("stock_cg", "stock_whole", "pygraph", "forced_node_update", "forced_copy"),
)


# By name, of all suites.
CASES: dict[str, Case] = {}


def adding(suite: str, kind: type[Case] = Case, **common: Any) -> Callable[..., None]:
    """What adds a case to a suite. ``common``: what all are created with, unless a case says otherwise."""

    def add(name: str, *args: Any, **kwargs: Any) -> None:
        if name in CASES:
            raise ValueError(f"two cases {name}")
        CASES[name] = kind(name, suite, *args, **{**common, **kwargs})

    return add


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


def images(batch: int, dtype: torch.dtype = torch.float16, small_size: int = 64) -> Callable[[bool], Inputs]:
    full = normal((batch, 3, 224, 224), dtype=dtype)
    return sized(full, normal((2, 3, small_size, small_size), dtype=dtype))
