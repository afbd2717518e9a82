"""Operators on CUDA tensors of a modelled device, which the host runs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import warnings
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
from torch._inductor.pygraph.graph.placeholder import storage_extent


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.testing._internal.modelled_cuda import ModelledDevice


def on_host(t: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a CPU tensor."""
    extent = storage_extent(t)
    if extent == 0:
        return torch.empty(t.shape, dtype=t.dtype, device="cpu")
    memory = (ctypes.c_char * extent).from_address(t.data_ptr())
    flat = torch.frombuffer(memory, dtype=t.dtype)
    return flat.as_strided(t.shape, t.stride())


# Stands for a CUDA tensor among arguments.
_GIVEN = object()


def _replace(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Return a value with each leaf of its containers replaced."""
    if isinstance(value, (list, tuple)):
        return type(value)([_replace(v, replace) for v in value])
    if isinstance(value, dict):
        return {k: _replace(v, replace) for k, v in value.items()}
    return replace(value)


@functools.cache
def _takes_tensors(op: Any) -> list[bool]:
    return ["Tensor" in str(argument.type) for argument in op._schema.arguments]


def _efficient_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias, is_causal=is_causal, scale=scale)
    rows = -(-q.shape[2] // 32) * 32 if compute_log_sumexp else 0
    seeds = torch.zeros((), dtype=torch.long, device="cpu"), torch.zeros((), dtype=torch.long, device="cpu")
    return (
        out.transpose(1, 2).contiguous().transpose(1, 2),
        torch.zeros(*q.shape[:2], rows, device="cpu"),
        *seeds,
    )


def _efficient_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    seed: torch.Tensor,
    offset: torch.Tensor,
    dropout_p: float,
    needed: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor | None, ...]:
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    with torch.enable_grad():
        again = torch.nn.functional.scaled_dot_product_attention(*inputs, bias, is_causal=is_causal, scale=scale)
    found = torch.autograd.grad(again, inputs, grad)
    return *(t.transpose(1, 2).contiguous().transpose(1, 2) for t in found), None


def _random(t: torch.Tensor, low: int, high: int | None, generator: torch.Generator | None = None) -> torch.Tensor:
    return t.random_(low, high, generator=generator or torch.cuda.default_generators[0])


def _cudnn_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    padding: Any,
    stride: Any,
    dilation: Any,
    groups: int,
    *settings: bool,
) -> torch.Tensor:
    like = x.device.type == "meta"
    if like:
        # For meta tensors PyTorch chooses other strides.
        x, weight = (torch.zeros_like(t, device="cpu") for t in (x, weight))
    result = torch.convolution(x, weight, None, stride, padding, dilation, False, [0] * len(padding), groups)
    return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta") if like else result


# Operators of CUDA alone, which have no kernel for meta tensors either.
_OF_CUDA = {torch.ops.aten.cudnn_convolution.default: _cudnn_convolution}
# Operators without a kernel for the host, and those that draw.
_ON_HOST = {
    **_OF_CUDA,
    torch.ops.aten._scaled_dot_product_efficient_attention.default: _efficient_attention,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default: _efficient_attention_backward,
    getattr(torch.ops.aten.random_, "from"): _random,
}


class _Operators:
    """
    The CUDA kernels of all operators, which run on the host.

    Attributes:
        device: the modelled device, or None if there is a driver alone
        active: contexts that operators run in; outside there is no device
    """

    def __init__(self) -> None:
        self.library: Any = None
        self.device: ModelledDevice | None = None
        self.active = 0

    def register(self) -> None:
        if self.library is not None:
            return
        self.library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            # Each overrides a kernel.
            warnings.simplefilter("ignore")
            # copy_ has one kernel for all devices.
            for full_name in [*torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"), "aten::copy_"]:
                namespace, _, name = full_name.partition("::")
                if namespace != "aten":
                    continue
                name, _, overload = name.partition(".")
                op = getattr(getattr(torch.ops.aten, name), overload or "default")
                # Views change no memory.
                if all(r.alias_info is None or r.alias_info.is_write for r in op._schema.returns):
                    run = {"empty_strided": self._empty_strided, "empty": self._empty}.get(name)
                    self.library.impl(op, run or functools.partial(self.run, op), "CUDA")

    def _empty_strided(self, size: Any, stride: Any, *, dtype: Any = None, **kwargs: Any) -> torch.Tensor:
        return self._allocate(size, stride, dtype or torch.get_default_dtype())

    def _empty(self, size: Any, *, dtype: Any = None, memory_format: Any = None, **kwargs: Any) -> torch.Tensor:
        like = torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format, device="meta")
        return self._allocate(like.shape, like.stride(), like.dtype)

    def _allocate(self, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        if self.device is None:
            raise RuntimeError("no CUDA device is modelled")
        return self.device.empty_strided(size, stride, dtype)

    def run(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        if any(is_tensor and isinstance(a, (int, float)) for a, is_tensor in zip(args, _takes_tensors(op))):
            # A number that is a tensor in C++ arrives as a number.
            op = op.overloadpacket
        if not self.active:
            raise RuntimeError("Found no NVIDIA driver on your system: no CUDA device is modelled")
        tensors: list[torch.Tensor] = []
        # A captured call keeps none of them alive.
        args, kwargs = _replace(
            (args, kwargs), lambda a: tensors.append(a) or _GIVEN if isinstance(a, torch.Tensor) and a.is_cuda else a
        )

        def call(*hosted: torch.Tensor, device: str = "cpu") -> Any:
            rest = iter(hosted)
            given, named = _replace(
                (args, kwargs),
                lambda a: next(rest) if a is _GIVEN else torch.device(device) if isinstance(a, torch.device) else a,
            )
            return (_OF_CUDA if device == "meta" else _ON_HOST).get(op, op)(*given, **named)

        if self.device is not None and self.device.captured is not None:
            return self._capture(op, call, tensors)
        hosted = [*map(on_host, tensors)]
        results = call(*hosted)
        for t, h in zip(tensors, hosted):
            if h.shape != t.shape:
                # Operators resize what is empty.
                t.data = self._result(h)
        return self._returned(results, hosted, tensors, self._result)

    def _returned(self, results: Any, given: list[Any], tensors: list[Any], new: Callable[[Any], Any]) -> Any:
        """Return results as tensors of the device: those that were given are the caller's."""

        def one(result: Any) -> Any:
            if not isinstance(result, torch.Tensor):
                return result
            known = next((t for g, t in zip(given, tensors) if g is result), None)
            return new(result) if known is None else known

        return _replace(results, one)

    def _result(self, values: torch.Tensor) -> torch.Tensor:
        if self.device is None:
            return values
        # It is not counted: what functions allocate is.
        t = self.device.empty_strided(values.shape, values.stride(), values.dtype, is_counted=False)
        on_host(t).copy_(values)
        return t

    def _capture(self, op: Any, call: Callable[..., Any], tensors: list[torch.Tensor]) -> Any:
        device = self.device
        likes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors]
        made: list[torch.Tensor] = []

        def new(like: torch.Tensor) -> torch.Tensor:
            made.append(device.empty_strided(like.shape, like.stride(), like.dtype))
            return made[-1]

        results = self._returned(call(*likes, device="meta"), likes, tensors, new)
        written: list[Any] = []
        _replace(results, written.append)
        written = [t for t in written if isinstance(t, torch.Tensor)]
        if written and not any(t.numel() for t in written):
            # A library launches nothing. A product that sums over nothing fills its result.
            return results

        def compute(*hosted: torch.Tensor) -> None:
            outputs, given = hosted[: len(made)], hosted[len(made) :]
            found: list[Any] = []
            _replace(call(*given), found.append)
            fresh = [r for r in found if isinstance(r, torch.Tensor) and not any(r is g for g in given)]
            for output, values in zip(outputs, fresh, strict=True):
                output.copy_(values)

        device.capture_operator(op.__name__.partition(".")[0], compute, [*made, *tensors])
        return results


_operators = _Operators()
_getitem, _copy, _contiguous = torch.Tensor.__getitem__, torch.Tensor.copy_, torch.Tensor.contiguous


# Python's bindings of these ask the driver for the current device.


def _cuda_copy(t: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return (torch.ops.aten.copy_.default if t.is_cuda or source.is_cuda else _copy)(t, source)


def _cuda_contiguous(t: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
    if not t.is_cuda:
        return _contiguous(t, memory_format=memory_format)
    return t if t.is_contiguous(memory_format=memory_format) else t.clone(memory_format=memory_format)


def _cuda_getitem(t: torch.Tensor, index: Any) -> torch.Tensor:
    if not t.is_cuda:
        return _getitem(t, index)
    if isinstance(index, torch.Tensor):
        return torch.ops.aten.index.Tensor(t, [index])
    view = _getitem(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"), index)
    return t.as_strided(view.shape, view.stride(), t.storage_offset() + view.storage_offset())


@contextlib.contextmanager
def host_operators(device: ModelledDevice | None = None) -> Iterator[None]:
    """Operators on CUDA tensors run on the host, with the memory of a modelled device."""
    _operators.register()
    before = _operators.device
    _operators.device = device or before
    _operators.active += 1
    try:
        with (
            mock.patch.object(torch.cuda, "_lazy_init", lambda: None),
            mock.patch.object(torch.Tensor, "__getitem__", _cuda_getitem),
            mock.patch.object(torch.Tensor, "copy_", _cuda_copy),
            mock.patch.object(torch.Tensor, "contiguous", _cuda_contiguous),
        ):
            yield
    finally:
        _operators.active -= 1
        _operators.device = before
