# Owner(s): ["module: inductor"]
"""
What a function does at other sizes, as code generation tells it, against the generated code itself:
it runs at 20 sizes on fake tensors, with kernels and operators that only note their arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import random
import types
from typing import Any, TYPE_CHECKING
from unittest import mock

import triton
import triton.language as tl

import torch
from torch._dynamo import mark_dynamic
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import async_compile, config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.exc import InductorError
from torch._inductor.pygraph.types.reason import Code, Reason
from torch._inductor.pygraph.types.sizes import DeliverAt, KernelAt, OperatorAt, SizeMap, TensorAt
from torch._inductor.pygraph.values import deliver
from torch._inductor.pygraph.values.sizes import LaunchOf, lower, SizedFunction, Steps
from torch._inductor.runtime.triton_heuristics import get_constexprs, GridExpr
from torch._inductor.test_case import run_tests, TestCase
from torch.overrides import TorchFunctionMode
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    slowTest,
    subtest,
)
from torch.testing._internal.fake_cuda import CompiledGraph, fake_cuda
from torch.testing._internal.modelled_sizes import numbers, symbolic_graphs, symbols
from torch.utils import _pytree as pytree


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


# Buckets end at powers of two.
SIZES = (37, 0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 513)


@dataclasses.dataclass
class Event:
    """A launch of a kernel, or a call of an operator."""

    name: str
    arguments: list[Any]
    results: Any = None
    is_kernel: bool = False


@dataclasses.dataclass
class Run:
    """What a function did in one call."""

    inputs: list[Any]
    events: list[Event] = dataclasses.field(default_factory=list)
    allocations: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.Tensor]] = dataclasses.field(
        default_factory=list
    )
    outputs: tuple[Any, ...] = ()


class Kernel:
    """In the place of a CachingAutotuner, whose signature and configurations it has."""

    def __init__(self, dry_run: DryRun, name: str, source: str) -> None:
        self.dry_run = dry_run
        self.name = ""
        autotuner = async_compile._load_triton_kernel_from_source(name, source)
        self.inductor_meta = autotuner.inductor_meta
        self.configs = autotuner.configs
        constants = get_constexprs(autotuner.fn)
        self.names = [n for i, n in enumerate(autotuner.fn.arg_names) if i not in constants]
        self.signature = autotuner.triton_meta["signature"]
        compiled = [n for n in self.names if self.signature[n] != "constexpr"]
        self.parameters = {n: i for i, n in enumerate(compiled)}
        self.choose(0)

    def choose(self, i: int) -> None:
        """Choose one of the configurations, as autotuning does."""
        self.launchers = [types.SimpleNamespace(config=self.configs[i % len(self.configs)])]

    def run(self, *arguments: Any, stream: int) -> None:
        self.dry_run.run.events.append(Event(self.name, [*arguments], is_kernel=True))

    def named(self, arguments: Sequence[Any]) -> dict[str, Any]:
        return dict(zip([*self.names, *self.inductor_meta.get("extra_launcher_args", ())], arguments, strict=True))

    def grid(self, arguments: Sequence[Any]) -> tuple[int, int, int]:
        numbers = {n: a for n, a in self.named(arguments).items() if not isinstance(a, torch.Tensor)}
        return GridExpr.from_meta(self.inductor_meta, self.launchers[0].config).eval_slow(numbers)


class Noted:
    """A module, or a namespace of operators, whose functions note their calls."""

    def __init__(self, dry_run: DryRun, real: Any, name: str = "") -> None:
        self.dry_run = dry_run
        self.real = real
        self.name = name

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.real, name)
        is_space = isinstance(value, (types.ModuleType, torch._ops._OpNamespace, torch._ops._Ops))
        is_operator = isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
        if name in ("empty_strided", "device") or not (is_space or is_operator or self.name == "extern_kernels"):
            return value
        return Noted(self.dry_run, value, self.name if is_space else f"{self.name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.dry_run.in_operator = True
        result = kwargs["out"] if "out" in kwargs else self.real(*args, **kwargs)
        self.dry_run.in_operator = False
        name = self.name.split(".")[1]
        # A view of another dtype is no call.
        if name != "view":
            arguments = pytree.tree_leaves((args, kwargs))
            self.dry_run.run.events.append(Event(name, arguments, result))
        return result


class NotedDeliver:
    """In the place of a Deliver."""

    def __init__(self, dry_run: DryRun, values: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self.dry_run = dry_run
        self.values = values

    def pack(self, values: Sequence[torch.Tensor]) -> None:
        pass

    def launch(self) -> list[torch.Tensor]:
        results = [torch.empty(shape, dtype=dtype, device="cuda") for dtype, shape in self.values]
        self.dry_run.run.events.append(Event("launch", [], results))
        return results


class Copier:
    """In the place of a Stage or an Upload, which are outside of the functions."""

    def __init__(self, *args: Any) -> None:
        pass

    def stage(self, value: torch.Tensor) -> torch.Tensor:
        return torch.empty(value.shape, dtype=value.dtype, device="cuda")

    upload = stage


class NotedReductions(TorchFunctionMode):
    """Notes the sums that code calls as methods of a tensor."""

    def __init__(self, dry_run: DryRun) -> None:
        super().__init__()
        self.dry_run = dry_run

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.Tensor.sum and not self.dry_run.in_operator:
            self.dry_run.run.events.append(Event("sum", [args[0]], result))
        return result


class DryRun:
    """Runs the code of a graph, without what kernels and operators do."""

    def __init__(self, graph: CompiledGraph, inputs: Sequence[Any]) -> None:
        self.info = graph.info
        # Symbolic, as the graph was compiled for.
        self.inputs = inputs
        self.kernels: dict[str, Kernel] = {}
        self.run: Run | None = None
        self.in_operator = False
        scope: dict[str, Any] = {"__name__": "dry_run"}

        def make_kernel(_: Any, name: str, source: str, *args: Any, **kwargs: Any) -> Kernel:
            return Kernel(self, name, source)

        make_deliver = lambda device, *values: NotedDeliver(self, values)  # noqa: E731
        with (
            mock.patch.object(AsyncCompile, "triton", make_kernel),
            mock.patch.object(AsyncCompile, "cpp_pybinding", lambda *args: lambda *args: None),
            mock.patch.multiple(deliver, Deliver=make_deliver, Stage=Copier, Upload=Copier),
        ):
            exec(compile(graph.source, "<dry run>", "exec"), scope)
        self.kernels = {n: k for n, k in scope.items() if isinstance(k, Kernel)}
        for name, kernel in self.kernels.items():
            kernel.name = name
        scope.update(
            torch=Noted(self, torch, "torch"),
            aten=Noted(self, torch.ops.aten, "aten"),
            extern_kernels=Noted(self, scope["extern_kernels"], "extern_kernels"),
            get_raw_stream=lambda device: 0,
            empty_strided_cpu=lambda *a: torch.empty_strided(*a[:2], dtype=a[2]),
            # A nested region's. Functions take theirs as an argument.
            empty_strided_cuda=lambda *a: torch.empty_strided(*a[:2], dtype=a[2], device="cuda"),
            assert_size_stride=lambda *a: None,
            assert_alignment=lambda *a: None,
            reinterpret_tensor=lambda t, size, stride, offset: t.as_strided(
                size, stride, t.storage_offset() + offset
            ),
        )
        if config.graph_partition:
            self.functions = scope["runner"].partitions
            self.call = scope["call"]
        else:
            self.functions = [scope["call"]]
            self.call = lambda args: self.functions[0](args)
        self.runs: list[list[Run]] = [[] for _ in self.functions]
        self.functions[:] = [self._noting(i, function) for i, function in enumerate(self.functions)]

    def _noting(self, i: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def noting(args: list[Any]) -> Any:
            outer, self.run = self.run, Run([*args])
            if self.info.functions[i].allocator is None:
                outputs = function(args)
            else:
                outputs = function(args, self._allocate)
            run, self.run = self.run, outer
            run.outputs = outputs
            self.runs[i].append(run)
            return outputs

        # Other partitions are not described.
        return noting if i < len(self.info.functions) else function

    def _allocate(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        t = torch.empty_strided(size, stride, dtype=dtype, device="cuda")
        self.run.allocations.append((size, stride, dtype, t))
        return t

    def at(self, sizes: dict[str, int], is_first: bool) -> None:
        """Run at these sizes. Forget it if generated code cannot, which was compiled for the first ones."""
        self.run, self.in_operator = Run([]), False
        before = [len(runs) for runs in self.runs]
        try:
            with NotedReductions(self):
                self.call([_concrete(i, sizes) for i in self.inputs])
        except (RuntimeError, ZeroDivisionError, ValueError):
            for runs, count in zip(self.runs, before):
                del runs[count:]
            if is_first:
                raise


def _concrete(i: Any, sizes: dict[str, int]) -> Any:
    values = numbers(i, sizes)
    if not isinstance(i, torch.Tensor):
        return values[0]
    return torch.empty_strided(values[: i.dim()], values[i.dim() :], dtype=i.dtype, device=i.device)


class Mismatch(Exception):
    pass


def expect(expected: Any, actual: Any, what: str) -> None:
    if expected != actual:
        raise Mismatch(f"{what}: described as {actual}, generated code has {expected}")


class Check:
    """Compares a SizeMap with what its function did in runs at several sizes."""

    def __init__(self, size_map: SizeMap, kernels: dict[str, Kernel]) -> None:
        self.map = size_map
        self.kernels = kernels
        self.everything = lower(
            len(size_map.sizes), size_map.steps, range(len(size_map.sizes) + len(size_map.steps))
        )
        self.function = SizedFunction(size_map, kernels)
        self.words = 0

    def runs(self, runs: Sequence[Run]) -> None:
        for run in runs:
            self.run(run, runs[0])

    def run(self, run: Run, first: Run) -> None:
        sizes = [run.inputs[size.input] for size in self.map.sizes]
        self.values = self.everything(*sizes)
        # Else a tensor without elements may have other strides.
        # Guards admit no other sizes of these programs.
        self.is_admitted = all(n > 1 for n in sizes)
        self.owners: dict[str, tuple[Any, int]] = {}
        for name, t in zip(self.map.inputs, run.inputs, strict=True):
            if isinstance(t, torch.Tensor):
                self.own(name, t)
        expect(len(run.allocations), len(self.map.allocations), "allocations")
        for allocation, (size, stride, dtype, t) in zip(self.map.allocations, run.allocations):
            actual = self.numbers(allocation.size), self.numbers(allocation.stride), allocation.dtype
            expect((tuple(size), tuple(stride), str(dtype)), actual, f"allocation of {allocation.buffer}")
            self.own(allocation.buffer, t)
        self.calls(run, first)
        expect(len(run.outputs), len(self.map.outputs), "outputs")
        for t, output in zip(run.outputs, self.map.outputs):
            if isinstance(output, TensorAt):
                self.tensor(t, output, "output")
            else:
                expect(t, None if output is None else self.values[output], "output")
        events = [e for e in run.events if e.is_kernel]
        try:
            for event in events:
                self.kernels[event.name].grid(event.arguments)
        except ZeroDivisionError:
            # So it does where the launcher does.
            with contextlib.suppress(ZeroDivisionError):
                self.function.compute(*sizes)
                raise Mismatch("a launcher divides by zero")
            return
        values = self.function.compute(*sizes)
        launches = [e for e in self.function.events if isinstance(e, LaunchOf)]
        for launch, event in zip(launches, events, strict=True):
            kernel = self.kernels[event.name]
            grid = kernel.grid(event.arguments)
            expect(0 not in grid, bool(values[launch.is_launched]), f"launch of {event.name}")
            expect(tuple(max(n, 1) for n in grid), tuple(values[i] for i in launch.grid), f"grid of {event.name}")
            given = {kernel.parameters.get(n): a for n, a in kernel.named(event.arguments).items()}
            for parameter, _, i in launch.words:
                expect(given[parameter], values[i], f"word of {event.name}")
            for parameter, owner, i in launch.pointers:
                self.address(given[parameter], owner, values[i], f"pointer of {event.name}")

    def numbers(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.values[value] for value in values)

    def own(self, owner: str, t: torch.Tensor) -> None:
        self.owners[owner] = (t.untyped_storage()._cdata, t.storage_offset() * t.element_size())

    def address(self, t: torch.Tensor, owner: str, offset: int, what: str) -> None:
        # The result of an operator, or a constant, is known from where it is first used.
        if owner not in self.owners:
            self.owners[owner] = (t.untyped_storage()._cdata, t.storage_offset() * t.element_size() - offset)
        storage, start = self.owners[owner]
        expected = t.untyped_storage()._cdata, t.storage_offset() * t.element_size()
        expect(expected, (storage, start + offset), f"address of {what}, {owner}")

    def tensor(self, t: torch.Tensor, described: TensorAt, what: str) -> None:
        size, stride = self.numbers(described.size), self.numbers(described.stride)
        expect((tuple(t.shape), str(t.dtype)), (size, described.dtype), what)
        if self.is_admitted:
            expect(t.stride(), stride, what)
        self.address(t, described.owner, self.values[described.offset], what)

    def calls(self, run: Run, first: Run) -> None:
        calls = iter(self.map.calls)
        kernels = sum(isinstance(call, KernelAt) for call in self.map.calls)
        expect(sum(e.is_kernel for e in run.events), kernels, "kernels")
        for event, event_before in zip(run.events, first.events, strict=True):
            for call in calls:
                if event.is_kernel:
                    is_described = isinstance(call, KernelAt) and event.name == call.kernel
                elif isinstance(call, DeliverAt):
                    is_described = event.name == "launch"
                else:
                    is_described = isinstance(call, OperatorAt) and event.name in call.name.split(".")
                if is_described:
                    break
            else:
                raise Mismatch(f"{event.name} is not described")
            if isinstance(call, DeliverAt):
                self.results(call, event)
            else:
                (self.kernel if event.is_kernel else self.operator)(call, event, event_before)

    def kernel(self, call: KernelAt, event: Event, event_before: Event) -> None:
        kernel = self.kernels[call.kernel]
        named, before = kernel.named(event.arguments), kernel.named(event_before.arguments)
        pointers = {p.parameter: p for p in call.pointers}
        words = {w.parameter: w for w in call.words}
        for name, argument in named.items():
            parameter = kernel.parameters.get(name)
            if isinstance(argument, torch.Tensor):
                pointer = pointers.pop(parameter)
                self.address(argument, pointer.owner, self.values[pointer.offset], f"{call.kernel} {name}")
            elif parameter in words:
                word = words.pop(parameter)
                expect(argument, self.values[word.value], f"{call.kernel} {name}")
                expect({"i32": 4, "i64": 8}[kernel.signature[name]], word.nbytes, f"bytes of {call.kernel} {name}")
                self.words += 1
            elif parameter is not None:
                # All that differs between sizes is a word.
                expect(argument, before[name], f"{call.kernel} {name}")
        expect(({}, {}), (pointers, words), f"parameters of {call.kernel}")

    def operator(self, call: OperatorAt, event: Event, event_before: Event) -> None:
        operands = [*call.operands, *call.results]
        for argument, before in zip(event.arguments, event_before.arguments, strict=True):
            if isinstance(argument, torch.Tensor):
                for operand in operands:
                    with contextlib.suppress(Mismatch):
                        self.tensor(argument, operand, call.name)
                        break
                else:
                    raise Mismatch(f"operand {argument.shape} {argument.stride()} of {call.name}: {operands}")
            elif argument != before and argument not in self.numbers(call.numbers):
                raise Mismatch(f"argument of {call.name}")
        self.results(call, event)

    def results(self, call: OperatorAt | DeliverAt, event: Event) -> None:
        results = [t for t in pytree.tree_leaves(event.results) if isinstance(t, torch.Tensor)]
        for result, t in zip(call.results, results) if len(results) == len(call.results) else ():
            self.tensor(t, result, f"result of {event.name}")


def dynamic(*shape: int, dims: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    t = torch.zeros(shape, dtype=dtype, device="cuda")
    for dim in dims:
        mark_dynamic(t, dim)
    return t


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Memory-efficient attention, which a device would choose for these."""
    if bias is not None:
        n = bias.shape[-1]
        if n % 8:
            bias = torch.nn.functional.pad(bias, (0, 8 - n % 8))[..., :n]
        bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    op = torch.ops.aten._scaled_dot_product_efficient_attention
    return op(q, k, v, bias, q.requires_grad, 0.0, False)[0]


class Encoder(torch.nn.Module):
    """BERT."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 1) -> None:
        super().__init__()
        self.heads = heads
        self.words = torch.nn.Embedding(100, width)
        self.positions = torch.nn.Embedding(512, width)
        self.norm = torch.nn.LayerNorm(width)
        names = {"q": width, "k": width, "v": width, "o": width, "up": 4 * width}
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {n: torch.nn.Linear(width, to) for n, to in names.items()}
                | {"down": torch.nn.Linear(4 * width, width)}
                | {n: torch.nn.LayerNorm(width) for n in ("norm1", "norm2")}
            )
            for _ in range(layers)
        )
        self.head = torch.nn.Linear(width, 100)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        b, n = ids.shape
        x = self.norm(self.words(ids) + self.positions(torch.arange(n, device=ids.device)))
        bias = ((1 - mask) * -1e9).to(x.dtype)[:, None, None, :]
        for layer in self.layers:
            q, k, v = (layer[name](x).view(b, n, self.heads, -1).transpose(1, 2) for name in "qkv")
            a = attention(q, k, v, bias).transpose(1, 2).reshape(b, n, -1)
            x = layer["norm1"](x + layer["o"](a))
            x = layer["norm2"](x + layer["down"](torch.nn.functional.gelu(layer["up"](x))))
        return self.head(x)


class Decoder(torch.nn.Module):
    """Llama; ``caches`` grow."""

    def __init__(self, width: int = 64, heads: int = 4, kv_heads: int = 2, layers: int = 1) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.words = torch.nn.Embedding(100, width)
        names = {"q": width, "k": kv_heads * self.size, "v": kv_heads * self.size, "o": width}
        names |= {"gate": 2 * width, "up": 2 * width}
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {n: torch.nn.Linear(width, to, bias=False) for n, to in names.items()}
                | {"down": torch.nn.Linear(2 * width, width, bias=False)}
                | {n: torch.nn.RMSNorm(width) for n in ("norm1", "norm2")}
            )
            for _ in range(layers)
        )
        self.head = torch.nn.Linear(width, 100, bias=False)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, *caches: torch.Tensor) -> tuple[torch.Tensor, ...]:
        b, n = ids.shape
        x = self.words(ids)
        angles = positions[..., None] * 10000.0 ** -torch.arange(0, 1, 2 / self.size, device=ids.device)
        cos, sin = (f(torch.cat((angles, angles), -1))[:, None] for f in (torch.cos, torch.sin))

        def rotate(t: torch.Tensor) -> torch.Tensor:
            left, right = t.chunk(2, -1)
            return t * cos + torch.cat((-right, left), -1) * sin

        grown = []
        for i, layer in enumerate(self.layers):
            h = layer["norm1"](x)
            q, k, v = (layer[name](h).view(b, n, -1, self.size).transpose(1, 2) for name in "qkv")
            q, k = rotate(q), rotate(k)
            if caches:
                k = torch.cat((caches[2 * i], k), 2)
                v = torch.cat((caches[2 * i + 1], v), 2)
            grown += [k, v]
            repeat = self.heads // self.kv_heads
            a = attention(q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1))
            x = x + layer["o"](a.transpose(1, 2).reshape(b, n, -1))
            h = layer["norm2"](x)
            x = x + layer["down"](torch.nn.functional.silu(layer["gate"](h)) * layer["up"](h))
        return (self.head(x), *grown)


class Recommender(torch.nn.Module):
    """DLRM."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = torch.nn.Sequential(torch.nn.Linear(13, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
        self.tables = torch.nn.ModuleList(torch.nn.EmbeddingBag(100, 16, mode="sum") for _ in range(4))
        self.top = torch.nn.Sequential(torch.nn.Linear(26, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        rows, columns = torch.tril_indices(5, 5, -1)
        self.register_buffer("rows", rows)
        self.register_buffer("columns", columns)

    def forward(self, numbers: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        x = self.bottom(numbers)
        t = torch.stack([x, *(table(indices[i]) for i, table in enumerate(self.tables))], 1)
        z = torch.bmm(t, t.transpose(1, 2))[:, self.rows, self.columns]
        return torch.sigmoid(self.top(torch.cat((x, z), 1)))


class GraphNetwork(torch.nn.Module):
    """GCN."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 32), torch.nn.Linear(32, 7)

    def layer(self, x: torch.Tensor, linear: Any, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        h = linear(x)
        ones = torch.ones_like(target, dtype=h.dtype)
        degree = torch.zeros(x.shape[0], device=x.device).index_add(0, target, ones).clamp(min=1)
        norm = (degree[source] * degree[target]).rsqrt()
        return torch.zeros_like(h).index_add(0, target, h[source] * norm[:, None])

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.relu(self.layer(x, self.first, source, target)), self.second, source, target)


def run(model: Callable[..., Any], *inputs: torch.Tensor, train: bool) -> None:
    model = model.cuda().train(train) if isinstance(model, torch.nn.Module) else model
    with torch.set_grad_enabled(train):
        outputs = torch.compile(model)(*inputs)
        if train:
            outputs.square().mean().backward()


def encoder(train: bool = False) -> None:
    ids, mask = (dynamic(8, 37, dims=[1], dtype=torch.int64) for _ in range(2))
    run(Encoder(), ids, mask, train=train)


def decode() -> None:
    ids, positions = (torch.zeros(1, 1, dtype=torch.int64, device="cuda") for _ in range(2))
    caches = [dynamic(1, 2, 37, 16, dims=[2], dtype=torch.bfloat16) for _ in range(2)]
    run(Decoder().bfloat16(), ids, positions, *caches, train=False)


def prefill() -> None:
    ids, positions = (dynamic(1, 37, dims=[1], dtype=torch.int64) for _ in range(2))
    run(Decoder().bfloat16(), ids, positions, train=False)


def mlp(train: bool = False) -> None:
    layers = [torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.LayerNorm(256), torch.nn.Linear(256, 10)]
    run(torch.nn.Sequential(*layers), dynamic(37, 64, dims=[0]), train=train)


def convolution(train: bool = False) -> None:
    layers = [torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU()]
    layers += [torch.nn.Conv2d(8, 16, 3, stride=2), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()]
    run(torch.nn.Sequential(*layers, torch.nn.Linear(16, 10)), dynamic(37, 3, 16, 16, dims=[0]), train=train)


def recommender(train: bool = False) -> None:
    indices = dynamic(4, 37, 3, dims=[1], dtype=torch.int64)
    run(Recommender(), dynamic(37, 13, dims=[0]), indices, train=train)


def graph_network(train: bool = False, nodes: bool = False) -> None:
    ends = [dynamic(201, dims=[0], dtype=torch.int64) for _ in range(2)]
    x = dynamic(50, 16, dims=[0] if nodes else [])
    run(GraphNetwork(), x, *ends, train=train)


def flex_decode() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.zeros(1, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (dynamic(1, 4, 137, 64, dims=[2], dtype=torch.bfloat16) for _ in range(2))
    run(lambda q, k, v: flex_attention(q, k, v, enable_gqa=True), q, k, v, train=False)


PROGRAMS: dict[str, Callable[[], None]] = {
    "decode": decode,
    "prefill": prefill,
    "encoder": encoder,
    "encoder_training": lambda: encoder(True),
    "mlp": mlp,
    "mlp_training": lambda: mlp(True),
    "convolution": convolution,
    "convolution_training": lambda: convolution(True),
    "recommender": recommender,
    "recommender_training": lambda: recommender(True),
    "graph_network": graph_network,
    "graph_network_training": lambda: graph_network(True),
    "graph_network_nodes": lambda: graph_network(nodes=True),
    "flex_decode": flex_decode,
}


UNARY: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.sin,
    torch.exp,
    lambda x: x.sum(0),
    lambda x: x.sum(-1),
    lambda x: x.mean(-1, keepdim=True),
    lambda x: x / x.shape[0],
    lambda x: x * (x.shape[0] + x.shape[-1]),
    lambda x: x.softmax(-1),
    lambda x: x.var(0),
    lambda x: x.t(),
    lambda x: x.t().contiguous(),
    lambda x: x.reshape(-1),
    lambda x: x.reshape(-1, 4),
    lambda x: x[1:],
    lambda x: x[..., :-1],
    lambda x: x[: x.shape[0] // 2],
    lambda x: x[x.shape[0] // 3 :: 2],
    lambda x: x.flip(0),
    lambda x: x.cumsum(0),
    lambda x: x.cumsum(-1),
    lambda x: torch.nn.functional.pad(x, (1, 3)),
    lambda x: torch.cat((x, x.sin())),
    lambda x: torch.cat((x, x[1:]), 0),
    lambda x: torch.stack((x, x.cos()), 1),
    lambda x: x.repeat(2, *([1] * (x.dim() - 1))),
    lambda x: x.unsqueeze(0).expand(3, *x.shape),
    lambda x: x.chunk(2, 0)[1],
    lambda x: x.sort(0).values,
    lambda x: x[x.argsort(-1)] if x.dim() == 1 else x.gather(-1, x.argsort(-1)),
    lambda x: x + torch.arange(x.shape[-1], device=x.device),
    lambda x: torch.zeros_like(x).index_add(0, torch.arange(x.shape[0], device=x.device) // 2, x),
    lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    lambda x: torch.nn.functional.dropout(x),
    lambda x: torch.tril(x),
    lambda x: x.bfloat16().float(),
    lambda x: x.bfloat16() @ x.bfloat16().t(),
    lambda x: x.logsumexp(0),
    lambda x: x @ x.t(),
    lambda x: torch.mv(x, x[0]),
    lambda x: torch.bmm(x, x.transpose(1, 2)),
    lambda x: x.new_zeros(x.shape[0], 2 * x.shape[-1] + 1),
    lambda x: x.new_full((x.shape[0] * x.shape[-1],), 2.0),
    lambda x: x.unfold(0, 2, 2),
    lambda x: x.view(torch.int32).float(),
    lambda x: x.roll(2, 0),
    lambda x: x.diff(dim=0),
    lambda x: torch.nn.functional.avg_pool1d(x.unsqueeze(0), 2),
    lambda x: torch.constant_pad_nd(x, (0, -x.shape[-1] % 8)),
    lambda x: x.argmax(0).float(),
)
BINARY: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    torch.add,
    torch.mul,
    torch.mm,
    torch.bmm,
    torch.outer,
    lambda x, y: x @ y.t(),
    lambda x, y: torch.cat((x, y)),
    lambda x, y: torch.cat((x, y), -1),
    lambda x, y: torch.where(x > y, x, y),
    lambda x, y: x.unsqueeze(-1) - y.unsqueeze(0),
    lambda x, y: torch.addmm(y, x, x.t()),
)


class GeneratedProgram:
    """A random program of two sizes."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.sizes = chance.choice((37, 53, 2053)), chance.choice((41, 61, 1031))
        self.trains = chance.random() < 0.25
        shapes = [(self.sizes[0], 16), (self.sizes[0],), (self.sizes[1], 16), (self.sizes[0], self.sizes[1])]
        self.shapes = [shapes[0], *chance.sample(shapes[1:], chance.choice((1, 2)))]
        self.steps: list[tuple[Callable[..., torch.Tensor], tuple[int, ...]]] = []
        values = [torch.zeros(shape, device="meta") for shape in self.shapes]
        while len(self.steps) < 5:
            operations = chance.choice((UNARY, UNARY, BINARY))
            operation = chance.choice(operations)
            # Chains are worth more than trees.
            operands = [chance.choice([*range(len(values)), len(values) - 1]) for _ in range(1 + (operations is BINARY))]
            try:
                value = operation(*(values[i] for i in operands))
            except (RuntimeError, IndexError):
                continue
            if 0 < value.numel() < 2**22 and value.dtype.is_floating_point:
                values.append(value.to("meta"))
                self.steps.append((operation, tuple(operands)))

    def __call__(self) -> None:
        def function(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
            values = [*values]
            for operation, operands in self.steps:
                values.append(operation(*(values[i] for i in operands)))
            return values[-1], values[-2]

        inputs = []
        for shape in self.shapes:
            t = torch.zeros(shape, device="cuda", requires_grad=self.trains)
            for dim, size in enumerate(shape):
                if size in self.sizes:
                    mark_dynamic(t, dim)
            inputs.append(t)
        with torch.set_grad_enabled(self.trains):
            outputs = torch.compile(function)(*inputs)
            if self.trains and any(t.requires_grad for t in outputs):
                sum(t.sum() for t in outputs).backward()


@contextlib.contextmanager
def dry_runs(program: Callable[[], None], **options: Any) -> Iterator[list[DryRun]]:
    """Compile a program; yield its graphs."""
    with symbolic_graphs(program, **options) as graphs:
        yield [DryRun(graph, inputs) for graph, inputs in graphs]


def check_graph(dry_run: DryRun) -> list[Check]:
    """Compare the functions of a graph with runs at all sizes."""
    names = symbols(dry_run.inputs)
    for n in range(len(SIZES)):
        # Sizes of their own for all symbols.
        sizes = {symbol: SIZES[(n + 7 * i) % len(SIZES)] for i, symbol in enumerate(names)}
        dry_run.at(sizes if n else dict.fromkeys(names, SIZES[0]), is_first=n == 0)
    checks = []
    for i, (function, runs) in enumerate(zip(dry_run.info.functions, dry_run.runs)):
        if isinstance(function.sizes, SizeMap) and runs:
            for kernel in dry_run.kernels.values():
                kernel.choose(i)
            check = Check(function.sizes, dry_run.kernels)
            check.runs(runs)
            checks.append(check)
    return checks


# Training has a forward of its own, and IncompleteMapTest checks prefill.
SLOW = ("convolution", "encoder", "graph_network", "graph_network_training", "mlp", "prefill", "recommender")


class SizesTestCase(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.refused: list[Reason] = []

    def check(self, program: Callable[[], None], **options: Any) -> list[Check]:
        checks = []
        with dry_runs(program, **options) as graphs:
            for graph in graphs:
                sizes = [f.sizes for f in graph.info.functions]
                self.refused += [s for s in sizes if isinstance(s, Reason)]
                for size_map in sizes:
                    self.assertEqual(pickle.loads(pickle.dumps(size_map)), size_map)
                checks += check_graph(graph)
        self.assertNotIn(Code.SIZES_NOT_DESCRIBED, [r.code for r in self.refused], self.refused)
        return checks


class ProgramsTest(SizesTestCase):
    @parametrize("name", [subtest(n, decorators=[slowTest] if n in SLOW else []) for n in PROGRAMS])
    def test_program(self, name: str) -> None:
        checks = self.check(PROGRAMS[name])
        self.assertEqual([str(r) for r in self.refused], [])
        self.assertTrue(checks)


class GeneratedProgramsTest(SizesTestCase):
    def check_programs(self, seeds: Sequence[int]) -> None:
        described = 0
        for seed in seeds:
            with self.subTest(seed=seed):
                program = GeneratedProgram(seed)
                try:
                    described += len(self.check(program))
                except (BackendCompilerFailed, InductorError):
                    # Upstream does not compile all programs.
                    with self.assertRaises((BackendCompilerFailed, InductorError)), fake_cuda():
                        program()
        self.assertGreater(described, 9 * len(self.refused))

    def test_programs(self) -> None:
        self.check_programs(range(8))

    @slowTest
    def test_500_programs(self) -> None:
        self.check_programs(range(8, 508))


@triton.jit
def scale_kernel(x, out, n, factor, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, i < n) * factor, i < n)


tuned_kernel = triton.autotune([triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 128})], key=[])(scale_kernel)


def scale(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    scale_kernel[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), x.shape[0], BLOCK=64)
    return out


def scale_tuned(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    tuned_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel(), x.shape[0])
    return out


@torch.compiler.nested_compile_region
def region(x: torch.Tensor) -> torch.Tensor:
    return x.sin() @ x.t()


class CallsTest(SizesTestCase):
    """Kinds of calls that code makes."""

    def check_function(self, fn: Callable[..., Any], *inputs: Any, **options: Any) -> list[Check]:
        make = lambda: [i() if callable(i) else i for i in inputs]  # noqa: E731
        checks = self.check(lambda: run(fn, *make(), train=False), **options)
        self.assertEqual([str(r) for r in self.refused], [])
        self.assertTrue(checks)
        return checks

    def matrix(self) -> torch.Tensor:
        return dynamic(37, 64, dims=[0])

    def calls(self, checks: list[Check], kind: type) -> list[Any]:
        return [call for check in checks for call in check.map.calls if isinstance(call, kind)]

    def test_mix_order_reduction(self) -> None:
        """The sums behind a mix-order reduction are operators on parts of its workspace."""
        norm = torch.nn.LayerNorm(1024)
        checks = self.check(lambda: run(norm, dynamic(8192, 1024, dims=[0]).requires_grad_(), train=True))
        self.assertEqual([str(r) for r in self.refused], [])
        sums = [call for call in self.calls(checks, OperatorAt) if call.name == "aten.sum"]
        self.assertEqual(len(sums), 2)

    def test_zeroed_workspace(self) -> None:
        """The workspace of a split scan is zeroed in front of the launch."""
        checks = self.check_function(lambda x: x.cumsum(0), lambda: dynamic(200000, dims=[0]))
        (workspace,) = (t for call in self.calls(checks, KernelAt) for t in call.zeroed)
        self.assertIsNone(Steps(1, checks[0].map.steps).known(workspace.size[0]))

    @parametrize("tuned", (False, True))
    def test_kernel_of_the_program(self, tuned: bool) -> None:
        fn = scale_tuned if tuned else scale
        checks = self.check_function(lambda x: fn(x[1:]) + 1, self.matrix)
        own = [call for call in self.calls(checks, KernelAt) if call.kernel.startswith("scale_kernel")]
        self.assertEqual([len(call.words) for call in own], [2])
        self.assertTrue(own[0].grid_arguments)

    def test_offsets(self) -> None:
        """Addresses in a buffer of other tensors depend on the sizes."""
        checks = self.check_function(lambda x, y: torch.cat((x @ x.t() @ x, y.sin(), y @ y.t() @ y)), self.matrix, self.matrix)
        offsets = [p.offset for call in self.calls(checks, KernelAt) for p in call.pointers]
        offsets += [t.offset for call in self.calls(checks, OperatorAt) for t in (*call.operands, *call.results)]
        (check,) = checks
        steps = Steps(len(check.map.sizes), check.map.steps)
        self.assertTrue([offset for offset in offsets if steps.known(offset) is None])

    def test_kernel_for_several_tensors(self) -> None:
        fn = lambda x, y: torch._foreach_add([x, y], 1)  # noqa: E731
        self.check_function(fn, self.matrix, lambda: dynamic(53, 16, dims=[0]))

    def test_cpu_value(self) -> None:
        """The launch that delivers CPU values is a call."""
        checks = self.check_function(lambda x, s: x * s + x.shape[0], self.matrix, lambda: torch.tensor(2.0))
        self.assertEqual(len(self.calls(checks, DeliverAt)), 1)

    def test_partitions(self) -> None:
        """Each partition takes the sizes that it needs."""
        fn = lambda x: (x.sin() @ x.t()).cpu().cos().cuda() @ x  # noqa: E731
        checks = self.check_function(fn, self.matrix)
        self.assertEqual(len(checks), 2)

    def test_without_partitions(self) -> None:
        self.check_function(lambda x: (x.sin() @ x.t(), x.shape[0]), self.matrix, graph_partition=False)

    def test_template(self) -> None:
        """The grid of a template is an argument of its launch."""
        options = {
            "max_autotune_gemm": True,
            "max_autotune_gemm_backends": "TRITON",
            "test_configs.max_mm_configs": 1,
        }
        x = lambda: dynamic(37, 64, dims=[0], dtype=torch.bfloat16)  # noqa: E731
        checks = self.check_function(lambda x: torch.relu(x @ x.t()), x, **options)
        templates = [call for call in self.calls(checks, KernelAt) if call.grid_arguments]
        self.assertEqual(len(templates), 1)

    def refusal(self, fn: Callable[..., Any], *inputs: Any, **options: Any) -> Reason:
        self.assertEqual(self.check(lambda: run(fn, *(make() for make in inputs), train=False), **options), [])
        (reason,) = self.refused
        return reason

    def test_unknown_call(self) -> None:
        """PyGraph does not describe what a nested region does."""
        reason = self.refusal(region, self.matrix)
        self.assertEqual(reason.code, Code.CALL_AT_OTHER_SIZES)

    def test_unknown_expression(self) -> None:
        """PyGraph does not describe a size that is computed with floats."""
        fn = lambda x: torch.nn.functional.interpolate(x[None, None], scale_factor=1.3)  # noqa: E731
        reason = self.refusal(fn, self.matrix)
        self.assertEqual(reason.code, Code.SIZE_EXPRESSION)

    def test_memory_planning(self) -> None:
        reason = self.refusal(lambda x: x.sin() @ x.t(), self.matrix, memory_planning=True)
        self.assertEqual(reason.code, Code.CALL_AT_OTHER_SIZES)

    @parametrize("enabled", (False, True))
    def test_no_map(self, enabled: bool) -> None:
        """A function that takes no size has no map, and without the option no function has one."""
        with mock.patch("torch._inductor.pygraph.compile.sizes._Describer") as describer:
            with fake_cuda() as graphs, config.patch(pygraph=True, pygraph_sizes=enabled):
                x = torch.zeros(64, 64, device="cuda") if enabled else self.matrix()
                run(lambda x: x.sin(), x, train=False)
        describer.assert_not_called()
        self.assertIsNone(graphs[0].info.functions[0].sizes)


class IncompleteMapTest(SizesTestCase):
    """The check finds what a map lacks."""

    def test_check(self) -> None:
        changed = 0
        with dry_runs(PROGRAMS["prefill"]) as graphs:
            (graph,) = graphs
            self.assertEqual(len(check_graph(graph)), 1)
            (function,), (runs,) = graph.info.functions, graph.runs
            for what, size_map in incomplete(function.sizes):
                with self.subTest(what), self.assertRaises(Mismatch):
                    Check(size_map, graph.kernels).runs(runs)
                changed += 1
        self.assertGreater(changed, 40)


def incomplete(size_map: SizeMap) -> Iterator[tuple[str, SizeMap]]:
    """Yield maps in which one number is missing, or no function of the sizes."""
    steps = Steps(len(size_map.sizes), size_map.steps)
    # No number of a map.
    wrong = steps.constant(123457)
    size_map = dataclasses.replace(size_map, steps=tuple(steps.steps))

    def replace(kind: str, i: int, value: Any) -> SizeMap:
        values = getattr(size_map, kind)
        return dataclasses.replace(size_map, **{kind: (*values[:i], value, *values[i + 1 :])})

    def is_dynamic(value: int) -> bool:
        return steps.known(value) is None

    for i, call in enumerate(size_map.calls):
        if isinstance(call, KernelAt):
            for word in call.words:
                words = tuple(w for w in call.words if w is not word)
                yield f"word {word} of {call.kernel}", replace("calls", i, dataclasses.replace(call, words=words))
            for n, (name, value) in enumerate(call.arguments):
                if is_dynamic(value) and name.endswith("numel"):
                    arguments = (*call.arguments[:n], (name, wrong), *call.arguments[n + 1 :])
                    changed = dataclasses.replace(call, arguments=arguments)
                    yield f"{name} of {call.kernel}", replace("calls", i, changed)
        else:
            for n, operand in enumerate(call.operands):
                for field in ("size", "stride"):
                    numbers = getattr(operand, field)
                    if any(map(is_dynamic, numbers)):
                        lacking = dataclasses.replace(operand, **{field: (wrong, *numbers[1:])})
                        operands = (*call.operands[:n], lacking, *call.operands[n + 1 :])
                        changed = dataclasses.replace(call, operands=operands)
                        yield f"operand {n} of {call.name}", replace("calls", i, changed)
    for kind in ("allocations", "outputs"):
        for i, tensor in enumerate(getattr(size_map, kind)):
            if any(map(is_dynamic, tensor.size)):
                yield f"{kind} {i}", replace(kind, i, dataclasses.replace(tensor, size=(wrong, *tensor.size[1:])))


instantiate_parametrized_tests(ProgramsTest)
instantiate_parametrized_tests(CallsTest)


if __name__ == "__main__":
    run_tests()
