"""
Values on the CPU in programs for the GPU: what stock CUDA graphs split, refuse or get wrong.

Each case has new values in every call, and is also measured as the same program with these
values on the GPU; cgct_run.py says how, and what a case must show.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import torch
from torch import nn

from .case import adding, Case, Inputs, Suite
from .models.small import Function, MLP, MutatedInput


@dataclass(frozen=True)
class CpuValues(Case):
    # What stands between the inputs and the result.
    program: str = ""
    # The same with values on the GPU, if that takes other code.
    on_gpu: Callable[[bool], nn.Module] | None = None
    # CUDA graphs that a call has to launch, and why the host is needed in the middle, if so.
    graphs: int = 1
    host: str = ""


SUITE = Suite(
    ("no_cg", "stock_cg", "pygraph", "gpu", "forced_node_update", "gpu_node_update"),
    must_equal=("pygraph", "forced_node_update"),
)
add = adding("cgct", CpuValues, gib=0.5, capturable=False)


def _values(device: str | None, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.rand(size, dtype=dtype, device=device) + 0.5
    return torch.randint(8, size, dtype=dtype, device=device)


# "gpu" is on the current device.
gpu, cpu = functools.partial(_values, None), functools.partial(_values, "cpu")


def values(
    name: str, program: str, inputs: Callable[[], Any], module: Callable[[bool], nn.Module], **kwargs: Any
) -> None:
    """``inputs`` gives arguments, and attributes of the module where ``attributes`` names some."""

    def both(small: bool) -> Inputs:
        found = inputs()
        return found if isinstance(found[-1], dict) else (found, {})

    add(name, module, both, program=program, **kwargs)


def function(name: str, program: str, fn: Callable[..., Any], inputs: Callable[[], Any], **kwargs: Any) -> None:
    on_gpu = kwargs.pop("on_gpu", None)
    if on_gpu is not None:
        kwargs["on_gpu"] = lambda small: Function(on_gpu)
    values(name, program, inputs, lambda small: Function(fn), **kwargs)


# on one small kernel


@torch.library.custom_op("pygraph_benchmark::on_host", mutates_args=())
def on_host(s: torch.Tensor) -> torch.Tensor:
    return s.clone()


on_host.register_fake(torch.empty_like)

function("cpu_sum", "x * v.sum() + 1", lambda x, v: x * v.sum() + 1, lambda: (gpu(64, 64), cpu(8)))
function(
    "cpu_scalar_and_operator",
    "x * s + 1, custom_op(s)",
    lambda x, s: (x * s + 1, on_host(s)),
    lambda: (gpu(64, 64), cpu()),
    host="Python runs the operator in each call. With the value on the GPU, the operator is captured",
)
function("cpu_index", "x[i] + 1", lambda x, i: x[i] + 1, lambda: (gpu(64, 64), cpu(8, dtype=torch.int64)))
function("cpu_scalar_output", "x * s + 1, s + 1", lambda x, s: (x * s + 1, s + 1), lambda: (gpu(64, 64), cpu()))
function(
    "cpu_constructor_output",
    "x + 1, torch.zeros(2, 3)",
    lambda x: (x + 1, torch.zeros(2, 3, device="cpu")),
    lambda: (gpu(64, 64),),
    on_gpu=lambda x: (x + 1, torch.zeros(2, 3, device=x.device)),
)
function(
    "cpu_dtypes",
    "x * float64, n + int64",
    lambda x, n, s, t: (x * s, n + t),
    lambda: (gpu(64, 64), gpu(64, 64, dtype=torch.int64), cpu(dtype=torch.float64), cpu(dtype=torch.int64)),
)
function("cpu_element", "x / v[3]", lambda x, v: x / v[3], lambda: (gpu(64, 64), cpu(8)))
function(
    "cpu_expression",
    "x / (v[3] ** 2 + 1) ** 0.5",
    lambda x, v: x / (v[3] ** 2 + 1) ** 0.5,
    lambda: (gpu(64, 64), cpu(8)),
)
function("cpu_division", "x / v.sum()", lambda x, v: x / v.sum(), lambda: (gpu(64, 64), cpu(8)))
function("cpu_scalar_mutated", "x * s, s.add_(1)", lambda x, s: (x * s, s.add_(1)), lambda: (gpu(64, 64), cpu()))
function("python_float", "x * float + 1", lambda x, by: x * by + 1, lambda: (gpu(64, 64), random.uniform(0.5, 1.5)))
function("cpu_item", "x * s.item()", lambda x, s: x * s.item(), lambda: (gpu(64, 64), cpu()), on_gpu=lambda x, s: x * s)
function(
    "cpu_output",
    "x + 1, x.sum().cpu()",
    lambda x: (x + 1, x.sum().cpu()),
    lambda: (gpu(64, 64),),
    on_gpu=lambda x: (x + 1, x.sum()),
    host="a result on the CPU is waited for",
)
function(
    "cpu_in_the_middle",
    "(x.sum(0).cpu() * 2).to(device) + x + 1",
    lambda x: (x.sum(0).cpu() * 2).to(x.device) + x + 1,
    lambda: (gpu(64, 64),),
    on_gpu=lambda x: x.sum(0) * 2 + x + 1,
    graphs=2,
    host="the CPU computes with a result of the GPU",
)


# around ten layers

WIDTH, DEPTH = 64, 10


class Perceptron(nn.Module):
    """Ten layers, on what ``before`` makes of the input."""

    def __init__(self, small: bool, before: Callable[..., torch.Tensor] = lambda self, x: x) -> None:
        super().__init__()
        self.mlp = MLP(WIDTH, 2 if small else DEPTH)
        self.before = before

    def forward(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        return self.mlp(self.before(self, x, *args))


def perceptron(
    name: str, program: str, before: Callable[..., torch.Tensor], inputs: Callable[[], Any], **kwargs: Any
) -> None:
    values(name, program, inputs, lambda small: Perceptron(small, before), **kwargs)


class InTheMiddle(nn.Module):
    def __init__(self, small: bool) -> None:
        super().__init__()
        self.first, self.second = (MLP(WIDTH, 1 if small else DEPTH // 2) for _ in range(2))

    def forward(self, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x + v.to(x.device))


class Branch(InTheMiddle):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if x.sum() > 0:
            x = -x
        return self.second(x)


class Select(InTheMiddle):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(torch.where(x.sum() > 0, -x, x))


def _batch() -> torch.Tensor:
    return gpu(8, WIDTH)


def attribute(name: str, program: str, before: Callable[..., torch.Tensor], value: Callable[[], Any]) -> None:
    perceptron(name, program, before, lambda: ((_batch(),), {"value": value()}), attributes=("value",))


_TABLE = torch.linspace(0.5, 1.5, 8 * WIDTH, device="cpu").view(8, WIDTH)

attribute(
    "numpy_attribute",
    "mlp(x * self.value), a NumPy scalar",
    lambda self, x: x * self.value,
    lambda: np.float32(random.uniform(0.5, 1.5)),
)
attribute(
    "cpu_scalar_attribute",
    "mlp(x * self.value), a 0-d tensor",
    lambda self, x: x * self.value,
    cpu,
)
attribute(
    "cpu_tensor_attribute",
    "mlp(x + self.value.to(device)), another in each call",
    lambda self, x: x + self.value.to(x.device),
    lambda: cpu(8, WIDTH),
)
attribute(
    "cpu_table",
    "mlp(x + self.value.to(device)), always the same",
    lambda self, x: x + self.value.to(x.device),
    lambda: _TABLE,
)
perceptron(
    "cpu_tensor_input",
    "mlp(x + v.to(device))",
    lambda self, x, v: x + v.to(x.device),
    lambda: (_batch(), cpu(8, WIDTH)),
)
values("cpu_tensor_in_the_middle", "mlp(mlp(x) + v.to(device))", lambda: (_batch(), cpu(8, WIDTH)), InTheMiddle)
values(
    "mutated_input",
    "counter.add_(1), mlp(x + counter)",
    lambda: (_batch(), _batch()),
    lambda small: MutatedInput(WIDTH, 2 if small else DEPTH),
    on_gpu=lambda small: Perceptron(small, lambda self, x, counter: x + counter + 1),
)
values(
    "branch_on_sum",
    "y = mlp(x); mlp(-y if y.sum() > 0 else y)",
    lambda: (_batch(),),
    Branch,
    on_gpu=Select,
)
