"""Triton kernels of generated code, which numpy runs on host memory, on any grid and any parameters."""

from __future__ import annotations

import math
import types
from typing import Any, TYPE_CHECKING

import numpy as np

import torch
from torch._inductor.runtime.triton_heuristics import get_constexprs, GridExpr
from torch.testing._internal.modelled_nodes import memory, u64


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.testing._internal.modelled_sizes import SizedDevice


class Block(np.ndarray):
    def to(self, dtype: Any, **kwargs: Any) -> Any:
        return self.astype(dtype)

    def broadcast_to(self, *shape: int) -> Block:
        return Triton.broadcast_to(self, *shape)


def block(values: Any) -> Block:
    return np.asarray(values).view(Block)


class Pointer:
    """Addresses of elements."""

    def __init__(self, addresses: Any, dtype: np.dtype) -> None:
        self.addresses, self.dtype = addresses, dtype

    def __add__(self, elements: Any) -> Pointer:
        return Pointer(self.addresses + np.asarray(elements, dtype=np.int64) * self.dtype.itemsize, self.dtype)

    def elements(self, mask: Any, shape: Any) -> tuple[Any, Any, Any]:
        """Return the memory that is pointed to, and places in it where ``mask`` is true."""
        addresses = np.broadcast_to(self.addresses, shape)
        mask = np.broadcast_to(True if mask is None else mask, shape)
        chosen = addresses[mask]
        if chosen.size == 0:
            return np.empty(0, self.dtype), chosen, mask
        low, high = int(chosen.min()), int(chosen.max())
        content = np.frombuffer(memory(low, high - low + self.dtype.itemsize), self.dtype)
        return content, (chosen - low) // self.dtype.itemsize, mask


class Triton:
    """The module triton.language, as far as generated code uses it. Another name raises AttributeError."""

    int1, int8, int16, int32, int64 = np.bool_, np.int8, np.int16, np.int32, np.int64
    uint8, uint16, uint32, uint64 = np.uint8, np.uint16, np.uint32, np.uint64
    float16, float32, float64 = np.float16, np.float32, np.float64
    range = static_range = staticmethod(range)
    constexpr = int
    full = staticmethod(lambda shape, value, dtype: block(np.full(shape, value, dtype)))
    zeros = staticmethod(lambda shape, dtype: block(np.zeros(shape, dtype)))
    where = staticmethod(lambda *args: block(np.where(*args)))
    broadcast_to = staticmethod(lambda x, *shape: block(np.broadcast_to(x, shape[0] if len(shape) == 1 else shape)))
    sum = staticmethod(lambda x, axis: block(np.sum(x, axis, dtype=x.dtype)))
    arange = staticmethod(lambda start, end: block(np.arange(start, end, dtype=np.int32)))
    device_assert = debug_barrier = staticmethod(lambda *args: None)
    sigmoid = staticmethod(lambda x: block((1 / (1 + np.exp(-x))).astype(x.dtype)))
    fma = staticmethod(lambda x, y, z: block(x * y + z))
    exp = staticmethod(lambda x: block(np.exp(x)))
    sqrt_rn = staticmethod(lambda x: block(np.sqrt(x)))
    div_rn = staticmethod(lambda x, y: block(x / y))
    # Not Philox, but a function of the same arguments.
    rand = staticmethod(lambda seed, i: block((np.sin(i + seed % 1009) * 1009 % 1).astype(np.float32)))

    def __init__(self, program: tuple[int, ...], grid: tuple[int, ...]) -> None:
        self.program, self.grid = program, grid

    def program_id(self, axis: int) -> Block:
        return block(np.int32(self.program[axis]))

    def num_programs(self, axis: int) -> int:
        return self.grid[axis]

    def load(self, pointer: Pointer, mask: Any = None, other: Any = 0, **kwargs: Any) -> Block:
        shape = np.broadcast_shapes(np.shape(pointer.addresses), np.shape(mask) if mask is not None else ())
        content, places, mask = pointer.elements(mask, shape)
        result = np.full(shape, other, pointer.dtype)
        result[mask] = content[places]
        return block(result)

    def store(self, pointer: Pointer, value: Any, mask: Any = None, **kwargs: Any) -> None:
        shape = np.broadcast_shapes(
            np.shape(pointer.addresses), np.shape(value), np.shape(mask) if mask is not None else ()
        )
        content, places, mask = pointer.elements(mask, shape)
        content[places] = np.broadcast_to(value, shape)[mask]

    def atomic_add(self, pointer: Pointer, value: Any, mask: Any = None, **kwargs: Any) -> None:
        shape = np.broadcast_shapes(
            np.shape(pointer.addresses), np.shape(value), np.shape(mask) if mask is not None else ()
        )
        content, places, mask = pointer.elements(mask, shape)
        np.add.at(content, places, np.broadcast_to(value, shape)[mask])


def _floats(function: Callable[..., Any]) -> Callable[..., Block]:
    return lambda *args: block(function(*args))


_erf = np.vectorize(math.erf, otypes=[np.float32])
_SAME_NAMES = "sin", "cos", "exp", "log", "sqrt", "tanh", "floor", "ceil", "log1p", "exp2", "log2"
MATH = types.SimpleNamespace(
    **{n: _floats(getattr(np, n)) for n in _SAME_NAMES},
    abs=_floats(np.abs),
    rsqrt=_floats(lambda x: (1 / np.sqrt(x)).astype(x.dtype)),
    erf=_floats(_erf),
    pow=_floats(lambda x, y: np.power(x, y, dtype=np.result_type(x))),
    sqrt_rn=_floats(np.sqrt),
)


def _welford_reduce(value: Any, mean: Any, m2: Any, weight: Any, is_first: bool) -> tuple[Any, ...]:
    """Take one more value into means, sums of squares of differences from these, and weights."""
    if is_first:
        return block(value), block(np.zeros_like(m2)), block(np.ones_like(weight))
    delta = value - mean
    mean = mean + delta / (weight + 1)
    return block(mean), block(m2 + delta * (value - mean)), block(weight + 1)


def _welford(mean: Any, m2: Any, weight: Any, axis: int) -> tuple[Any, ...]:
    """Combine these along an axis."""
    total = np.sum(weight, axis, dtype=weight.dtype, keepdims=True)
    combined = np.sum(mean * weight, axis, dtype=mean.dtype, keepdims=True) / np.maximum(total, 1)
    squares = np.sum(m2 + weight * (mean - combined) ** 2, axis, dtype=m2.dtype)
    return block(combined.squeeze(axis)), block(squares), block(total.squeeze(axis))


HELPERS = types.SimpleNamespace(
    maximum=_floats(np.maximum),
    minimum=_floats(np.minimum),
    div_floor_integer=_floats(np.floor_divide),
    max2=lambda x, axis: block(np.max(x, axis)),
    min2=lambda x, axis: block(np.min(x, axis)),
    any=lambda x, axis: block(np.any(x, axis)),
    promote_to_tensor=block,
    welford=_welford,
    welford_reduce=_welford_reduce,
)
DTYPES = {
    "fp16": np.float16,
    "fp32": np.float32,
    "fp64": np.float64,
    "i1": np.bool_,
    "i8": np.int8,
    "u8": np.uint8,
    "i16": np.int16,
    "u16": np.uint16,
    "i32": np.int32,
    "i64": np.int64,
    "u32": np.uint32,
    "u64": np.uint64,
}


class NotModelled(Exception):
    """Generated code does what there is no model of."""


class ModelledTriton:
    """A Triton kernel of generated code, in the place of its CachingAutotuner."""

    def __init__(self, device: SizedDevice, name: str, autotuner: Any) -> None:
        self.device = device
        self.fn = types.SimpleNamespace(__name__=name)
        self.inductor_meta = autotuner.inductor_meta
        self.config = autotuner.configs[0]
        self.names = [n for i, n in enumerate(autotuner.fn.arg_names) if i not in get_constexprs(autotuner.fn)]
        signature = autotuner.triton_meta["signature"]
        self.given = {n: signature[n] for n in self.names}
        self.constants = {
            **{n: v for (n, *_), v in _constants(autotuner.triton_meta["constants"])},
            **{n: v for n, v in self.config.kwargs.items() if n in autotuner.fn.arg_names},
        }
        self.parameters = [(n, t) for n, t in self.given.items() if t != "constexpr"]
        if any(t.removeprefix("*") not in DTYPES for _, t in self.parameters):
            raise NotModelled(f"parameters of {name}: {signature}")
        self.code = autotuner.fn.fn.__code__
        layout, end = [], 0
        for _, type_ in self.parameters:
            nbytes = 8 if type_[0] == "*" else np.dtype(DTYPES[type_]).itemsize
            start = -(-end // nbytes) * nbytes
            layout.append((start, nbytes))
            end = start + nbytes
        kernel = device.driver.add_sized_kernel(f"{name}_{id(self)}", layout, self.execute)
        self.kernel = kernel
        self.launchers = [
            types.SimpleNamespace(config=self.config, kernel=types.SimpleNamespace(function=kernel.function))
        ]

    def execute(self, grid: tuple[int, ...], parameters: list[bytes]) -> None:
        arguments: dict[str, Any] = {**self.constants}
        for (name, type_), content in zip(self.parameters, parameters):
            if type_[0] == "*":
                arguments[name] = Pointer(int.from_bytes(content, "little"), np.dtype(DTYPES[type_[1:]]))
            else:
                arguments[name] = block(np.frombuffer(content, DTYPES[type_])[0])
        scope = {"libdevice": MATH, "tl_math": MATH, "triton_helpers": HELPERS}
        with np.errstate(all="ignore"):
            for program in np.ndindex(*grid):
                function = types.FunctionType(self.code, {**scope, "tl": Triton(program, grid)})
                try:
                    function(**arguments)
                except (AttributeError, NameError, TypeError) as e:
                    raise NotModelled(f"{self.fn.__name__}: {e}") from e

    def run(self, *arguments: Any, stream: int) -> None:
        extra = self.inductor_meta.get("extra_launcher_args", ())
        named = dict(zip([*self.names, *extra], arguments, strict=True))
        numbers = {n: a for n, a in named.items() if not isinstance(a, torch.Tensor)}
        grid = GridExpr.from_meta(self.inductor_meta, self.config).eval_slow(numbers)
        if 0 in grid:
            return
        parameters = []
        for name, type_ in self.parameters:
            value = named[name]
            parameters.append(u64(value.data_ptr()) if type_[0] == "*" else np.array(value, DTYPES[type_]).tobytes())
        self.device.launch_kernel(self.kernel, tuple(grid), parameters)


def _constants(constants: dict[Any, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in constants.items():
        yield ((name,) if isinstance(name, str) else name), value
