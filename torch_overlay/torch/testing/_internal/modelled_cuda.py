"""
A CUDA driver and a CUDA device on host memory, for tests of CUDA graphs without a GPU.

:class:`ModelledDriver` has the functions of ``cuda.bindings.driver`` that read and set graphs and map memory, with
the driver's own structs: parameters are read from memory as the driver reads them, and compiled code calls them by
address. :func:`modelled_driver` puts it in the place of ``cuda.bindings.driver``.

:class:`ModelledDevice` has memory, streams, pools and capture. Its tensors are CUDA tensors whose addresses are host
memory. :func:`modelled_device` puts it behind ``torch.cuda``, and lets the host run the operators that have a CUDA
kernel. :meth:`ModelledDevice.launch` computes on the host or, while a graph is captured, becomes a kernel node that
computes in each replay, at the addresses that the node then holds. Memory is handed out again as soon as its storage is
dead, as the caching allocator does, so that a graph that writes what the program still has is seen.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import functools
import itertools
import mmap
import os
import struct
import threading
import types
import warnings
import weakref
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
from torch._inductor import cudagraph_trees as trees
from torch._inductor.pygraph.capture import allocation
from torch._inductor.pygraph.graph import binding, conditional, driver, placeholder, prelude
from torch._inductor.pygraph.graph.placeholder import PAGE_BYTES, round_up, storage_extent, tensor_at
from torch._inductor.pygraph.graph.prelude import BRANCH, CAPACITIES, COPY
from torch.multiprocessing.reductions import StorageWeakRef


if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Iterator, Sequence

try:
    from cuda.bindings import driver as cu
except ImportError:
    cu = None

GRAPH, EXECUTABLE, CONTEXT = 0x6A0, 0x6B0, 0x6C0
# Handles of what a node launches are a number behind one of these.
NODE_FUNCTION, PRELUDE_FUNCTION, KERNEL_FUNCTION = 0x20000, 0x40000, 0x80000
BRANCH_FUNCTION, COPY_FUNCTION = 0xC0000, 0xC0001
SIDE_STREAM = 0xE0000
DEVICE_NODE = 0xD00000
LAUNCH_PARAM_BUFFER_SIZE = 2


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


def _random(t: torch.Tensor, low: int, high: int | None, generator: torch.Generator | None = None) -> torch.Tensor:
    return t.random_(low, high, generator=generator or torch.cuda.default_generators[0])


# Operators without a kernel for the host, and those that draw.
_ON_HOST = {
    torch.ops.aten._scaled_dot_product_efficient_attention.default: _efficient_attention,
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
            return (op if device == "meta" else _ON_HOST.get(op, op))(*given, **named)

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


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *[v % (1 << 64) for v in values])


@dataclasses.dataclass(eq=False)
class ModelledKernel:
    """
    A kernel that several nodes launch, as a Triton kernel is.

    Attributes:
        function: its handle
    """

    name: str
    function: int
    layout: list[tuple[int, int]]


@dataclasses.dataclass(eq=False)
class Launch:
    """
    Attributes:
        compute: takes a host tensor for each argument
        likes: metadata of the arguments
        written: arguments that it writes
    """

    compute: Callable[..., Any]
    likes: list[torch.Tensor]
    written: Sequence[int]
    kernel: ModelledKernel

    def run(self, parameters: Sequence[bytes]) -> None:
        pointers = [int.from_bytes(p, "little") for p in parameters]
        self.compute(*(on_host(tensor_at(p, like, 0)) for p, like in zip(pointers, self.likes)))


@dataclasses.dataclass
class Node:
    "A node of the modelled graph that holds no address, or hides it."

    kind: str

    @property
    def type(self) -> Any:
        return getattr(cu.CUgraphNodeType, f"CU_GRAPH_NODE_TYPE_{self.kind}")


class KernelNode(Node):
    """
    A node that launches a kernel.

    Args:
        parameters: bytes of each; of natural alignment, up to eight bytes
        packed: launched with ``extra``, as one block
        kern: ``func`` is null, as for kernels of a cuLibrary
        launch: what it does, of the tensors at its parameters
    """

    def __init__(
        self,
        *parameters: bytes,
        packed: bool = False,
        kern: bool = False,
        launch: Launch | None = None,
    ) -> None:
        super().__init__("KERNEL")
        self.launch = launch
        self.parameters = list(parameters)
        self.packed = packed
        self.kern = kern
        self.layout: list[tuple[int, int]] = []
        end = 0
        for parameter in parameters:
            size = len(parameter)
            alignment = min(8, size & -size) or 1
            start = -(-end // alignment) * alignment
            self.layout.append((start, size))
            end = start + size
        self.nbytes = end

    @property
    def function(self) -> int | None:
        return None if self.launch is None else self.launch.kernel.function

    def block(self, parameters: Sequence[bytes]) -> bytes:
        block = bytearray(b"\xcc" * self.nbytes)
        for (start, size), parameter in zip(self.layout, parameters):
            block[start : start + size] = parameter
        return bytes(block)

    def params(self, handle: int) -> Any:
        params = cu.CUDA_KERNEL_NODE_PARAMS()
        if self.kern:
            params.kern = cu.CUkernel(handle + 0x10000)
        else:
            params.func = cu.CUfunction(self.function or handle + NODE_FUNCTION)
        params.gridDimX, params.blockDimX, params.sharedMemBytes = 7, 128, 4096
        if self.packed:
            block = self.block(self.parameters)
            memory = ctypes.create_string_buffer(block, len(block))
            size = ctypes.c_size_t(len(block))
            extra = (ctypes.c_void_p * 5)(
                LAUNCH_PARAM_BUFFER_SIZE,
                ctypes.addressof(size),
                binding.LAUNCH_PARAM_BUFFER_POINTER,
                ctypes.addressof(memory),
                binding.LAUNCH_PARAM_END,
            )
            params.extra = ctypes.addressof(extra)
            self.memory = (memory, size, extra)
        else:
            buffers = [ctypes.create_string_buffer(p, len(p)) for p in self.parameters]
            pointers = (ctypes.c_void_p * max(len(buffers), 1))(
                *map(ctypes.addressof, buffers)
            )
            params.kernelParams = ctypes.addressof(pointers)
            self.memory = (buffers, pointers)
        return params


class PreludeNode(KernelNode):
    "What prelude.SOURCE does, on memory of the host."

    def __init__(self, *parameters: bytes, threads: int) -> None:
        super().__init__(*parameters)
        self.threads = threads

    def writes(self, parameters: list[bytes]) -> Iterator[tuple[int, int, int]]:
        "(target, offset, value)"
        rows, first, _, (targets,) = (
            struct.unpack("<Q" if len(p) == 8 else "<i", p) for p in parameters[:4]
        )
        words = struct.unpack(f"<{len(parameters[4]) // 8}Q", parameters[4])
        if targets > self.threads:
            raise AssertionError("too few threads")
        starts = (ctypes.c_int32 * (targets + 1)).from_address(*first)
        seen = set()
        for i in range(targets):
            table = (ctypes.c_int64 * (4 * starts[targets])).from_address(*rows)
            for k in range(starts[i], starts[i + 1]):
                target, offset, word, delta = table[4 * k : 4 * k + 4]
                if (target, i) not in seen and target in {t for t, _ in seen}:
                    raise AssertionError("two threads for one target")
                seen.add((target, i))
                yield target, offset, (words[word] + delta) % (1 << 64)


class BranchNode(KernelNode):
    """Sets the condition of a conditional node: a handle, and the address of a bool."""


class CopyingNode(KernelNode):
    """Copies: to, from, number of bytes."""


class ConditionalNode(Node):
    """
    Attributes:
        bodies: the graphs for a condition that is not zero, and for zero, or the body of a loop
    """

    def __init__(self, handle: int, bodies: tuple[int, ...]) -> None:
        super().__init__("CONDITIONAL")
        self.handle = handle
        self.bodies = bodies
        self.memory = (ctypes.c_void_p * len(bodies))(*bodies)


class MemcpyNode(Node):
    "A copy of one row between device addresses, or from host memory."

    def __init__(
        self, dst: int, src: int | bytes, nbytes: int | None = None
    ) -> None:
        super().__init__("MEMCPY")
        self.dst = dst
        self.src = src
        self.nbytes = nbytes if nbytes is not None else len(src)

    def params(self, handle: int) -> Any:
        params = cu.CUDA_MEMCPY3D()
        if isinstance(self.src, bytes):
            self.host = ctypes.create_string_buffer(self.src, len(self.src))
            params.srcMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_HOST
            params.srcHost = ctypes.addressof(self.host)
        else:
            params.srcMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
            params.srcDevice = cu.CUdeviceptr(self.src)
        params.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
        params.dstDevice = cu.CUdeviceptr(self.dst)
        params.WidthInBytes, params.Height, params.Depth = self.nbytes, 1, 1
        return params


class MemsetNode(Node):
    def __init__(self, dst: int) -> None:
        super().__init__("MEMSET")
        self.dst = dst

    def params(self, handle: int) -> Any:
        params = cu.CUDA_MEMSET_NODE_PARAMS()
        params.dst = cu.CUdeviceptr(self.dst)
        params.value, params.elementSize, params.width, params.height = 9, 4, 64, 1
        return params


class ModelledDriver:
    """
    The part of cuda.bindings.driver that PyGraph calls.

    Args:
        nodes: of the graph GRAPH, whose executable graph is EXECUTABLE

    Attributes:
        nodes: of all graphs; a handle is an index
        graphs: the nodes of each graph
        executables: the graph of each executable graph
        capturing: the graph that is being captured
        disabled: nodes that a launch leaves out
        kernels: what several nodes launch, by handle
        held: by the executable graph, for each node: for a kernel the bytes of each
            parameter, for a copy its two addresses, for a memset its one
        sets: the nodes that were set, in order
        refused: nodes that cannot be set; what they hold then is unknown
        refuses: whether a node that is set refuses this time
        failing: a call that fails
        edges: (node, a node behind it); captured nodes are in a row
        allocations: gives the ranges of device memory that is no placeholder
        updatable: nodes that can be set from the device, in the order of their handles
        stubborn: nodes that cannot become updatable
        conditions: of conditional nodes, by handle: the graph, and the value
        captures: the graph of a path that is captured, by stream
        streams: how many streams PyGraph created
    """

    def __init__(self, nodes: Sequence[Node] = ()) -> None:
        self.conditions: dict[int, tuple[int, int | None]] = {}
        self.captures: dict[int, int] = {}
        self.streams = 0
        self.nodes = list(nodes)
        self.graphs = {GRAPH: [*range(len(self.nodes))]}
        self.executables = {EXECUTABLE: GRAPH}
        self.capturing = 0
        self.disabled: set[int] = set()
        self.kernels: dict[int, ModelledKernel] = {}
        self.refuses: Callable[[int], bool] = lambda node: False
        self.sets: list[int] = []
        self.refused: set[int] = set()
        self.failing: str | None = None
        self.functions: list[Any] = []
        self.pages: list[tuple[Any, mmap.mmap]] = []
        self.files: list[int] = []
        self.reserved: list[tuple[int, int]] = []
        self.hints: list[int] = []
        self.mapped: dict[int, int] = {}
        self.accessible: list[tuple[int, int]] = []
        self.occupied: list[tuple[int, int]] = []
        if cu is not None:
            self.success = cu.CUresult.CUDA_SUCCESS
            self.invalid = cu.CUresult.CUDA_ERROR_INVALID_VALUE
        self.held: list[Any] = [self._captured(i) for i in range(len(self.nodes))]
        self.edges = [(i, i + 1) for i in range(len(self.nodes) - 1)]
        self.allocations: Callable[[], Iterable[tuple[int, int]]] = lambda: ()
        self.updatable: list[int] = []
        self.stubborn: set[int] = set()

    def __getattribute__(self, name: str) -> Any:
        # Structs and enums are CU*, calls are cu*.
        if name.startswith("CU"):
            return getattr(cu, name)
        if name.startswith("cu") and name == self.failing:
            return lambda *args: (cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
        return super().__getattribute__(name)

    def _captured(self, i: int) -> Any:
        node = self.nodes[i]
        if isinstance(node, KernelNode):
            return list(node.parameters)
        if isinstance(node, (MemcpyNode, MemsetNode)):
            return self._addresses(node.params(i))
        return None

    # Graphs

    def cuGraphGetNodes(self, graph: Any, count: int = 0) -> Any:
        if int(graph) not in self.graphs:
            return self.invalid, None, 0
        nodes = self.graphs[int(graph)]
        return self.success, [cu.CUgraphNode(i) for i in nodes[:count]], count or len(nodes)

    def cuGraphNodeGetType(self, node: Any) -> Any:
        return self.success, self.nodes[int(node)].type

    def _get_params(self, node: Any) -> Any:
        return self.success, self.nodes[int(node)].params(int(node))

    cuGraphKernelNodeGetParams = _get_params
    cuGraphMemcpyNodeGetParams = _get_params
    cuGraphMemsetNodeGetParams = _get_params

    def cuFuncGetAttribute(self, which: Any, function: Any) -> Any:
        return self.success, 0

    def cuKernelGetFunction(self, kern: Any) -> Any:
        return self.success, cu.CUfunction(int(kern) + 0x10000)

    def cuFuncGetParamInfo(self, function: Any, index: int) -> Any:
        if int(function) in self.kernels:
            layout = self.kernels[int(function)].layout
        elif int(function) == BRANCH_FUNCTION:
            layout = [(0, 8), (8, 8)]
        elif int(function) == COPY_FUNCTION:
            layout = [(0, 8), (8, 8), (16, 8)]
        elif int(function) - PRELUDE_FUNCTION in CAPACITIES:
            words = 8 * (int(function) - PRELUDE_FUNCTION)
            layout = [(0, 8), (8, 8), (16, 8), (24, 4), (32, words)]
        else:
            layout = self.nodes[int(function) - NODE_FUNCTION].layout
        if index >= len(layout):
            return self.invalid, 0, 0
        return self.success, *layout[index]

    def cuFuncGetName(self, function: Any) -> Any:
        if int(function) in self.kernels:
            return self.success, self.kernels[int(function)].name.encode()
        return self.success, f"kernel_{int(function) - NODE_FUNCTION}".encode()

    def cuGraphGetRootNodes(self, graph: Any, count: int = 0) -> Any:
        behind = {b for _, b in self.edges}
        roots = [i for i in self.graphs[int(graph)] if i not in behind]
        return self.success, [cu.CUgraphNode(i) for i in roots[:count]], len(roots)

    def cuGraphAddKernelNode(
        self, graph: Any, behind: list[Any], count: int, params: Any
    ) -> Any:
        if int(graph) not in self.graphs or count != len(behind):
            return self.invalid, None
        grid = (params.gridDimX, params.gridDimY, params.gridDimZ)
        block = (params.blockDimX, params.blockDimY, params.blockDimZ)
        if 0 in grid or 0 in block:
            return self.invalid, None
        values = [bytes(value) for _, value in binding.kernel_parameters(params)]
        if int(params.func) == BRANCH_FUNCTION:
            new = BranchNode(*values)
        elif int(params.func) == COPY_FUNCTION:
            new = CopyingNode(*values)
        else:
            new = PreludeNode(*values, threads=grid[0] * block[0])
        return self.success, cu.CUgraphNode(self.add_node(int(graph), new, map(int, behind)))

    # Conditional nodes

    def cuDriverGetVersion(self) -> Any:
        return self.success, 13000

    def cuGraphConditionalHandleCreate(self, graph: Any, context: Any, default: int, flags: int) -> Any:
        if int(graph) not in self.graphs or int(context) != CONTEXT:
            return self.invalid, None
        handle = 0xF00 + len(self.conditions)
        self.conditions[handle] = int(graph), None
        return self.success, cu.CUgraphConditionalHandle(handle)

    def cuGraphAddNode(self, graph: Any, behind: list[Any], data: Any, count: int, params: Any) -> Any:
        conditional, handle = params.conditional, int(params.conditional.handle)
        kinds = cu.CUgraphConditionalNodeType
        size = {kinds.CU_GRAPH_COND_TYPE_IF: 2, kinds.CU_GRAPH_COND_TYPE_WHILE: 1}[conditional.type]
        is_right = (
            params.type == cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
            and (conditional.size, int(conditional.ctx), data, count) == (size, CONTEXT, None, len(behind))
            and self.conditions.get(handle) == (int(graph), None)
            and isinstance(setter := self.nodes[int(behind[0])], BranchNode)
            and setter.parameters[0] == u64(handle)
        )
        if not is_right:
            return self.invalid, None
        node = ConditionalNode(handle, tuple(self.add_graph() for _ in range(size)))
        # Where the struct has phGraph_out.
        ctypes.c_void_p.from_address(int(params.getPtr()) + 32).value = ctypes.addressof(node.memory)
        return self.success, cu.CUgraphNode(self.add_node(int(graph), node, map(int, behind)))

    def cuStreamCreate(self, flags: int) -> Any:
        self.streams += 1
        return self.success, cu.CUstream(SIDE_STREAM + self.streams)

    def cuStreamUpdateCaptureDependencies(self, stream: Any, nodes: list[Any], data: Any, count: int, flags: int) -> Any:
        # A captured node is behind the last one.
        last = self.graphs[self.captured_by(int(stream))][-1]
        return (self.success if ([*map(int, nodes)], data, count, flags) == ([last], None, 1, 1) else self.invalid,)

    def cuStreamBeginCaptureToGraph(
        self, stream: Any, graph: Any, behind: Any, data: Any, count: int, mode: Any
    ) -> Any:
        if int(stream) in self.captures or count or self.graphs[int(graph)] or not self.capturing:
            return (self.invalid,)
        self.captures[int(stream)] = int(graph)
        return (self.success,)

    def cuStreamEndCapture(self, stream: Any) -> Any:
        if int(stream) not in self.captures:
            return self.invalid, None
        return self.success, cu.CUgraph(self.captures.pop(int(stream)))

    def captured_by(self, stream: int) -> int:
        """Return the graph that a stream is captured into."""
        if stream > SIDE_STREAM:
            return self.captures[stream]
        return self.capturing

    def with_bodies(self, graph: int) -> Iterator[int]:
        """Yield the nodes of a graph, and those in the bodies of conditional nodes."""
        for i in self.graphs[graph]:
            yield i
            if isinstance(node := self.nodes[i], ConditionalNode):
                for body in node.bodies:
                    yield from self.with_bodies(body)

    def add_node(self, graph: int, node: Node, behind: Iterable[int]) -> int:
        new = len(self.nodes)
        self.nodes.append(node)
        self.graphs[graph].append(new)
        self.held.append(self._captured(new))
        self.edges += [(before, new) for before in behind]
        return new

    def add_graph(self) -> int:
        handle = GRAPH + 0x10000 * len(self.graphs)
        self.graphs[handle] = []
        return handle

    def instantiate(self, graph: int) -> int:
        handle = graph + (EXECUTABLE - GRAPH)
        has_branches = any(isinstance(self.nodes[i], ConditionalNode) for i in self.graphs[graph])
        if handle in self.executables and has_branches:
            raise RuntimeError("a graph with conditional nodes has one executable graph at a time")
        self.executables[handle] = graph
        for i in self.with_bodies(graph):
            self.held[i] = self._captured(i)
        return handle

    def add_kernel(self, name: str, layout: list[tuple[int, int]]) -> ModelledKernel:
        """Return the kernel of this name and layout."""
        for kernel in self.kernels.values():
            if (kernel.name, kernel.layout) == (name, layout):
                return kernel
        kernel = ModelledKernel(name, KERNEL_FUNCTION + len(self.kernels), layout)
        self.kernels[kernel.function] = kernel
        return kernel

    def launch(self, executable: int, order: random.Random | None = None) -> None:
        """
        Run a graph: preludes, then kernels.

        Args:
            order: draws one of the orders that dependencies allow; by default nodes run as they were added
        """
        nodes = self.graphs[self.executables[executable]]
        self.run_preludes(nodes)
        self._run(nodes, order)

    def _run(self, nodes: Sequence[int], order: random.Random | None) -> None:
        waiting = [i for i in nodes if not isinstance(self.nodes[i], PreludeNode)]
        behind = collections.defaultdict(list)
        for before, after in self.edges:
            behind[after].append(before)
        left = {*waiting}
        while waiting:
            ready = (at for at, i in enumerate(waiting) if left.isdisjoint(behind[i]))
            i = waiting.pop(next(ready) if order is None else order.choice([*ready]))
            left.discard(i)
            if i not in self.disabled:
                self.run_node(i, order)

    def run_node(self, i: int, order: random.Random | None) -> None:
        node = self.nodes[i]
        if isinstance(node, ConditionalNode):
            while True:
                graph, value = self.conditions[node.handle]
                if value is None:
                    raise AssertionError("no condition was set")
                # The next launch has to set it again.
                self.conditions[node.handle] = graph, None
                is_loop = len(node.bodies) == 1
                if not is_loop or value:
                    self._run(self.graphs[node.bodies[value == 0]], order)
                if not is_loop or not value:
                    return
        computes = isinstance(node, KernelNode) and node.launch is not None
        if not computes and not isinstance(node, (BranchNode, CopyingNode, MemcpyNode)):
            return
        if self.held[i] is None:
            raise AssertionError("launched with a node that refused")
        if isinstance(node, MemcpyNode):
            ctypes.memmove(*self.held[i], node.nbytes)
        elif isinstance(node, CopyingNode):
            ctypes.memmove(*(int.from_bytes(p, "little") for p in self.held[i]))
        elif isinstance(node, BranchNode):
            handle, address = (int.from_bytes(p, "little") for p in self.held[i])
            self.conditions[handle] = self.conditions[handle][0], ctypes.c_uint8.from_address(address).value
        else:
            node.launch.run(self.held[i])

    def cuGraphNodeSetEnabled(self, executable: Any, node: Any, enabled: int) -> Any:
        if int(executable) not in self.executables:
            return (self.invalid,)
        (self.disabled.discard if enabled else self.disabled.add)(int(node))
        return (self.success,)

    def cuGraphDestroyNode(self, node: Any) -> Any:
        for nodes in self.graphs.values():
            if int(node) in nodes:
                nodes.remove(int(node))
        self.edges = [edge for edge in self.edges if int(node) not in edge]
        return (self.success,)

    def cuGraphUpload(self, executable: Any, stream: Any) -> Any:
        return (self.success if int(executable) in self.executables else self.invalid,)

    def cuStreamGetCaptureInfo(self, stream: Any) -> Any:
        status = cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        graph = self.captured_by(int(stream))
        last = [cu.CUgraphNode(i) for i in self.graphs[graph][-1:]]
        return self.success, status, 1, cu.CUgraph(graph), last, None, len(last)

    def cuGraphKernelNodeSetParams(self, node: Any, params: Any) -> Any:
        if int(node) in self.refused or int(node) not in range(len(self.nodes)):
            return (self.invalid,)
        held = self.nodes[int(node)]
        pointers = (ctypes.c_void_p * len(held.layout)).from_address(params.kernelParams)
        values = [ctypes.string_at(pointer, size) for pointer, (_, size) in zip(pointers, held.layout)]
        self.nodes[int(node)] = KernelNode(*values, launch=held.launch)
        return (self.success,)

    def cuGraphAddDependencies(
        self, graph: Any, froms: list[Any], tos: list[Any], *edges_and_count: Any
    ) -> Any:
        if edges_and_count != (None, len(froms)) or len(froms) != len(tos):
            return (self.invalid,)
        added = [(int(a), int(b)) for a, b in zip(froms, tos)]
        if {*added} & {*self.edges}:
            return (self.invalid,)
        self.edges += added
        return (self.success,)

    def cuGraphRemoveDependencies(self, graph: Any, froms: list[Any], tos: list[Any], *edges_and_count: Any) -> Any:
        removed = {(int(a), int(b)) for a, b in zip(froms, tos)}
        if edges_and_count != (None, len(froms)) or not removed <= {*self.edges}:
            return (self.invalid,)
        self.edges = [edge for edge in self.edges if edge not in removed]
        return (self.success,)

    def cuGraphGetEdges(self, graph: Any, count: int = 0) -> Any:
        nodes = {*self.graphs[int(graph)]}
        edges = [edge for edge in self.edges if edge[0] in nodes]
        froms, tos = ([cu.CUgraphNode(edge[i]) for edge in edges[:count]] for i in (0, 1))
        return self.success, froms, tos, [cu.CUgraphEdgeData() for _ in froms], count or len(edges)

    def cuPointerGetAttribute(self, attribute: Any, address: int) -> Any:
        for start, end in self.allocations():
            if start <= address < end:
                is_start = attribute == cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
                return self.success, start if is_start else end - start
        return self.invalid, None

    def cuGraphKernelNodeSetAttribute(self, node: Any, which: Any, value: Any) -> Any:
        if int(node) in self.stubborn or int(node) in self.updatable:
            return (self.invalid,)
        if value.deviceUpdatableKernelNode.deviceUpdatable != 1:
            return (self.invalid,)
        self.updatable.append(int(node))
        return (self.success,)

    def cuGraphKernelNodeGetAttribute(self, node: Any, which: Any) -> Any:
        value = cu.CUkernelNodeAttrValue()
        if which != cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE:
            return self.success, value
        handle = DEVICE_NODE + self.updatable.index(int(node))
        value.deviceUpdatableKernelNode.devNode = cu.CUgraphDeviceNode(handle)
        return self.success, value

    def run_preludes(self, nodes: Iterable[int] | None = None) -> None:
        "What they do at the start of a launch, each behind those that it depends on."
        for i in range(len(self.nodes)) if nodes is None else nodes:
            if isinstance(node := self.nodes[i], PreludeNode):
                for target, offset, value in node.writes(self.held[i]):
                    held = self.held[at := self.updatable[target - DEVICE_NODE]]
                    k, (start, _) = max(
                        (k, place)
                        for k, place in enumerate(self.nodes[at].layout)
                        if place[0] <= offset
                    )
                    held[k] = (
                        held[k][: offset - start]
                        + u64(value)
                        + held[k][offset - start + 8 :]
                    )

    def cuCtxGetCurrent(self) -> Any:
        return self.success, cu.CUcontext(CONTEXT)

    def _set(self, executable: Any, node: Any, read: Callable[[Node], Any]) -> Any:
        i = int(node)
        if int(executable) not in self.executables:
            return (self.invalid,)
        self.sets.append(i)
        if i in self.refused or self.refuses(i):
            self.held[i] = None
            return (self.invalid,)
        self.held[i] = read(self.nodes[i])
        return (self.success,)

    def cuGraphExecKernelNodeSetParams(
        self, executable: Any, node: Any, params: Any
    ) -> Any:
        def read(kernel: Node) -> list[bytes]:
            function = int(params.func) or int(params.kern) + 0x10000
            if function != (kernel.function or int(node) + NODE_FUNCTION):
                raise AssertionError("another kernel")
            if not params.kernelParams or params.extra:
                raise AssertionError("either kernelParams or extra")
            if (params.gridDimX, params.blockDimX, params.sharedMemBytes) != (7, 128, 4096):
                raise AssertionError("another launch")
            layout = kernel.layout
            pointers = (ctypes.c_void_p * len(layout)).from_address(params.kernelParams)
            return [
                ctypes.string_at(pointer, size)
                for pointer, (_, size) in zip(pointers, layout)
            ]

        return self._set(executable, node, read)

    def _addresses(self, params: Any) -> tuple[int, ...]:
        if isinstance(params, cu.CUDA_MEMSET_NODE_PARAMS):
            if (params.value, params.elementSize, params.width) != (9, 4, 64):
                raise AssertionError("another memset")
            return (int(params.dst),)
        if params.srcMemoryType == cu.CUmemorytype.CU_MEMORYTYPE_HOST:
            return int(params.dstDevice), int(params.srcHost)
        return int(params.dstDevice), int(params.srcDevice)

    def cuGraphExecMemcpyNodeSetParams(
        self, executable: Any, node: Any, params: Any, context: Any
    ) -> Any:
        if int(context) != CONTEXT:
            return (self.invalid,)
        return self._set(executable, node, lambda _: self._addresses(params))

    def cuGraphExecMemsetNodeSetParams(
        self, executable: Any, node: Any, params: Any, context: Any
    ) -> Any:
        return self.cuGraphExecMemcpyNodeSetParams(executable, node, params, context)

    # The same, as compiled code calls it.

    def cuGetProcAddress(self, name: bytes, version: int, flags: int) -> Any:
        found = {
            b"cuGraphExecKernelNodeSetParams": (int, int, cu.CUDA_KERNEL_NODE_PARAMS),
            b"cuGraphExecMemcpyNodeSetParams": (int, int, cu.CUDA_MEMCPY3D, cu.CUcontext),
            b"cuGraphExecMemsetNodeSetParams": (int, int, cu.CUDA_MEMSET_NODE_PARAMS, cu.CUcontext),
            b"cuGraphNodeSetEnabled": (int, int, int),
        }.get(name)
        if found is None:
            return self.success, 0, cu.CUdriverProcAddressQueryResult.CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
        function = getattr(self, name.decode())

        def called(*arguments: int | None) -> int:
            # Of a null pointer, ctypes makes None.
            status, *_ = function(*(type_(a or 0) for type_, a in zip(found, arguments)))
            return int(status)

        pointer = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * len(found))(called)
        self.functions.append(pointer)
        address = ctypes.cast(pointer, ctypes.c_void_p).value
        return self.success, address, cu.CUdriverProcAddressQueryResult.CU_GET_PROC_ADDRESS_SUCCESS

    # Memory

    def cuMemCreate(self, nbytes: int, prop: Any, flags: int) -> Any:
        file = os.memfd_create("page")
        os.ftruncate(file, nbytes)
        self.files.append(file)
        self.pages.append((prop, mmap.mmap(file, nbytes)))
        return self.success, cu.CUmemGenericAllocationHandle(len(self.pages) - 1)

    def cuMemAddressReserve(
        self, nbytes: int, alignment: int, hint: Any, flags: int
    ) -> Any:
        start = int(hint)
        self.hints.append(start)
        if nbytes % PAGE_BYTES or start % PAGE_BYTES:
            return self.invalid, None
        for low, high in sorted(self.reserved + self.occupied):
            if start < high and low < start + nbytes:
                start = high
        while not _map(start, nbytes, 0):
            start += nbytes
        self.reserved.append((start, start + nbytes))
        return self.success, cu.CUdeviceptr(start)

    def cuMemMap(
        self, address: int, nbytes: int, offset: int, handle: Any, flags: int
    ) -> Any:
        low_high = [r for r in self.reserved if r[0] <= address < r[1]]
        if not low_high or nbytes != PAGE_BYTES or offset or address in self.mapped:
            return (self.invalid,)
        self.mapped[int(address)] = int(handle)
        return (self.success,)

    def cuMemSetAccess(
        self, address: int, nbytes: int, descs: list[Any], count: int
    ) -> Any:
        pages = range(address, address + nbytes, PAGE_BYTES)
        if not all(page in self.mapped for page in pages) or count != len(descs):
            return (self.invalid,)
        for page in pages:
            if not _map(page, PAGE_BYTES, mmap.PROT_READ | mmap.PROT_WRITE, self.files[self.mapped[page]]):
                return (self.invalid,)
        self.accessible.append((address, address + nbytes))
        return (self.success,)

    def close(self) -> None:
        """Unmap what was mapped."""
        for start, end in self.reserved:
            _libc().munmap(start, end - start)
        for file, (_, page) in zip(self.files, self.pages):
            page.close()
            os.close(file)


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def _map(address: int, nbytes: int, access: int, file: int | None = None) -> bool:
    """Map a file, or reserve addresses, exactly there. Return whether it could."""
    fixed, no_reserve, fixed_no_replace = 0x10, 0x4000, 0x100000
    if file is None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve | fixed_no_replace
    else:
        flags = mmap.MAP_SHARED | fixed
    return _libc().mmap(address, nbytes, access, flags, -1 if file is None else file, 0) == address


@contextlib.contextmanager
def modelled_driver(*nodes: Node, driver_type: Callable[..., ModelledDriver] | None = None) -> Iterator[ModelledDriver]:
    """
    A driver with these nodes in one graph in the place of ``cuda.bindings.driver``. Operators on CUDA tensors run on
    the host.
    """
    model = ModelledDriver(nodes) if driver_type is None else driver_type()
    caches = (driver.bindings, placeholder.arena, conditional.side_stream)
    with mock.patch("cuda.bindings.driver", model), host_operators():
        for cache in caches:
            cache.cache_clear()
        try:
            yield model
        finally:
            for cache in caches:
                cache.cache_clear()
            model.close()


@dataclasses.dataclass
class Block:
    """
    Attributes:
        owners: storages that lie in it; it is free once they are dead
    """

    memory: torch.Tensor
    nbytes: int
    pool: tuple[int, int] | None
    owners: list[StorageWeakRef]
    stream: int = 0

    @property
    def address(self) -> int:
        return -(-self.memory.data_ptr() // 256) * 256

    @property
    def is_free(self) -> bool:
        return all(owner.expired() for owner in self.owners)


class ModelledGraph:
    """What torch.cuda.CUDAGraph is."""

    def __init__(self, device: ModelledDevice, keep_graph: bool = False) -> None:
        self.device = device
        self.handle = device.driver.add_graph()
        self.executable: int | None = None
        self.keeps_graph = keep_graph

    @property
    def launches(self) -> list[Launch]:
        driver = self.device.driver
        return [driver.nodes[i].launch for i in driver.graphs[self.handle]]

    def register_generator_state(self, generator: Any) -> None:
        pass

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self.context = self.device.capture(self, pool)
        self.context.__enter__()

    def capture_end(self) -> None:
        self.context.__exit__(None, None, None)

    def reset(self) -> None:
        pass

    def instantiate(self) -> None:
        self.executable = self.device.driver.instantiate(self.handle)

    def raw_cuda_graph(self) -> int:
        return self.handle

    def raw_cuda_graph_exec(self) -> int:
        if self.executable is None:
            raise AssertionError("not instantiated")
        return self.executable

    def replay(self) -> None:
        self.device.driver.launch(self.raw_cuda_graph_exec(), self.device.order)


class ModelledStream:
    """
    Attributes:
        work: functions, and of what it waits for the stream and how much that had to do
        done: so much of it
        is_captured: by the program
        is_destroyed: the program's own
    """

    def __init__(self, device: ModelledDevice, cuda_stream: int) -> None:
        self.device = device
        self.cuda_stream = cuda_stream
        self.work: list[Callable[[], Any] | tuple[ModelledStream, int]] = []
        self.done = 0
        self.is_captured = self.is_destroyed = False

    def wait_stream(self, other: ModelledStream) -> None:
        if other.is_destroyed:
            raise RuntimeError("invalid resource handle")
        self.device.waits.append((self.cuda_stream, other.cuda_stream))
        self.work.append((other, len(other.work)))

    def synchronize(self) -> None:
        pass

    def advance(self) -> bool:
        """Do one thing. Return False if there is none, or it waits."""
        if self.done == len(self.work):
            return False
        work = self.work[self.done]
        if isinstance(work, tuple):
            other, count = work
            if other.done < count:
                return False
        else:
            work()
        self.done += 1
        return True


class ModelledEvent(mock.Mock):
    def elapsed_time(self, other: Any) -> float:
        return 0.001


class ModelledDevice:
    """
    Attributes:
        driver: of its graphs
        captured: the graph that is being captured
        pools: the pools that each thread allocates in, the last one now
        uses: graphs and contexts that hold a pool
        blocks: what functions allocate
        results: what operators allocate, by size; it takes no memory of the device
        limit: bytes that there are
        stream: the current one
        waits: streams of which the first waited for the second
        order: draws an order of a graph's nodes
        captures_chain: captured nodes depend on the one before; else, if there is an order, only on nodes that touch
            the same memory
    """

    def __init__(self, driver: ModelledDriver) -> None:
        self.driver = driver
        self.stream = ModelledStream(self, 0)
        self.new_stream: Callable[..., Any] = mock.Mock()
        self.waits: list[tuple[int, int]] = []
        self.blocks: list[Block] = []
        self.results: collections.defaultdict[int, list[Block]] = collections.defaultdict(list)
        self.limit = 1 << 30
        self.captured: ModelledGraph | None = None
        self.pool_of_capture: tuple[int, int] | None = None
        self.pools: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
        self.uses: collections.Counter[tuple[int, int]] = collections.Counter()
        self.numbers = itertools.count(1)
        self.checkpointed: list[StorageWeakRef] = []
        self.order: random.Random | None = None
        self.captures_chain = False
        driver.allocations = self.allocations

    def allocations(self) -> Iterator[tuple[int, int]]:
        for block in itertools.chain(self.blocks, *self.results.values()):
            yield block.address, block.address + block.nbytes

    # Memory

    @property
    def pool(self) -> tuple[int, int] | None:
        """The pool that this thread allocates in."""
        if pools := self.pools.get(threading.get_native_id()):
            return pools[-1]
        # The capture of the first stream began it.
        return None if self.side_stream else self.pool_of_capture

    def empty_strided(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, *, is_counted: bool = True
    ) -> torch.Tensor:
        like = torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device="meta")
        nbytes = storage_extent(like)
        if nbytes == 0:
            return tensor_at(0, like, 0)
        pool = self.pool if is_counted else None
        blocks = self.blocks if is_counted else self.results[nbytes]
        stream = self.side_stream
        free = (b for b in blocks if (b.nbytes, b.pool, b.stream) == (nbytes, pool, stream) and b.is_free)
        block = next(free, None)
        if block is None:
            if is_counted and self.captured is None:
                self.empty_cache()
            if is_counted and self.nbytes + nbytes > self.limit:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            memory = torch.zeros(nbytes + 512, dtype=torch.uint8, device="cpu")
            block = Block(memory, nbytes, pool, [], stream)
            blocks.append(block)
        t = tensor_at(block.address, like, 0)
        block.owners = [StorageWeakRef(t.untyped_storage())]
        if self.captured is None and t.is_contiguous():
            # What nobody wrote is no number, or a mark, which tells that.
            content = on_host(t).view(-1).view(torch.uint8)
            if not bool((content == placeholder.UNWRITTEN).all()):
                content.fill_(0xFF)
        return t

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self.blocks)

    def empty_cache(self) -> None:
        self.blocks[:] = [b for b in self.blocks if b.pool is not None or not b.is_free]

    def mem_get_info(self, device_index: int | None = None) -> tuple[int, int]:
        return self.limit - self.nbytes, self.limit

    def memory_snapshot(self, pool: Any = None, include_traces: bool = True) -> list[dict[str, Any]]:
        """A block is a segment."""
        return [
            {
                "address": b.address,
                "total_size": b.nbytes,
                "active_size": 0 if b.is_free else b.nbytes,
                "segment_pool_id": b.pool or (0, 0),
                "blocks": [
                    {
                        "address": b.address,
                        "size": round_up(b.nbytes, 8),
                        "state": "inactive" if b.is_free else "active_allocated",
                    }
                ],
            }
            for b in self.blocks
        ]

    def begin_allocate(self, device_index: int, pool: tuple[int, int]) -> None:
        self.uses[tuple(pool)] += 1
        self.pools[threading.get_native_id()].append(tuple(pool))

    def end_allocate(self, device_index: int, pool: tuple[int, int]) -> None:
        pools = self.pools[threading.get_native_id()]
        if self.pool_of_capture == tuple(pool) and tuple(pool) not in pools:
            self.pool_of_capture = None
        elif pools:
            pools.remove(tuple(pool))

    def release_pool(self, device_index: int, pool: tuple[int, int]) -> None:
        self.uses[tuple(pool)] -= 1
        if self.uses[tuple(pool)] <= 0:
            # The cache of all has it.
            for block in self.blocks:
                if block.pool == tuple(pool):
                    block.pool = None

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        t = self.empty_strided(values.shape, values.stride(), values.dtype)
        on_host(t).copy_(values)
        return t

    def clone(self, t: torch.Tensor) -> torch.Tensor:
        copied = self.empty_strided(t.shape, t.stride(), t.dtype)
        self.launch(torch.Tensor.copy_, copied, t)
        return copied

    def clone_storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        like = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
        return self.clone(tensor_at(storage.data_ptr(), like, 0)).untyped_storage()

    def set_checkpoint(self, device: int, state: Any, stale: list[Any], live: list[int]) -> None:
        "Memory of live outputs, which replays rebuilt, is not free."
        # Of an output that lies in another one there are two references.
        for cdata in {*live}:
            storage = torch.UntypedStorage._new_with_weak_ptr(cdata)
            # As addStorageDeleterFns of torch/csrc/cuda/Module.cpp has it.
            if any(s.cdata == cdata and not s.expired() for s in self.checkpointed):
                raise RuntimeError("Not expecting deleter function")
            self.checkpointed.append(StorageWeakRef(storage))
            (block,) = [b for b in self.blocks if b.address == storage.data_ptr()]
            block.owners.append(StorageWeakRef(storage))

    def check_pool(self, device: int, pool: Any, live: Sequence[Any]) -> None:
        "What trees take for live is what is not free."
        owned = {b.address for b in self.blocks if b.pool == tuple(pool) and not b.is_free}
        claimed = {w.data_ptr() for w in live if w()}
        if owned != claimed:
            raise AssertionError(f"live in the pool: {owned}, as trees see it: {claimed}")

    def new_pool(self) -> tuple[int, int]:
        return (0, next(self.numbers))

    # Graphs

    def launch(self, compute: Callable[..., Any], *args: torch.Tensor, written: Sequence[int] = (0,)) -> None:
        """
        Args:
            written: arguments that it writes
        """
        if self.captured is None:
            compute(*map(on_host, args))
            return
        likes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in args]
        layout = [(8 * i, 8) for i in range(len(args))]
        kernel = self.driver.add_kernel(getattr(compute, "__name__", "kernel"), layout)
        node = KernelNode(*(u64(t.data_ptr()) for t in args), launch=Launch(compute, likes, written, kernel))
        self.driver.add_node(self.capturing, node, self.nodes_before(node))

    @property
    def capturing(self) -> int:
        """The graph that the current stream is captured into."""
        return self.driver.captured_by(self.side_stream)

    @property
    def side_stream(self) -> int:
        """The current stream if PyGraph created it, or 0. That of trees is a mock."""
        stream = self.stream.cuda_stream
        return stream if isinstance(stream, int) and stream > SIDE_STREAM else 0

    def capture_operator(self, name: str, compute: Callable[..., Any], tensors: list[torch.Tensor]) -> None:
        """Add the nodes of an operator that works on these tensors, and may write all of them."""
        self.launch(compute, *tensors, written=range(len(tensors)))

    def nodes_before(self, node: KernelNode) -> list[int]:
        """Return the captured nodes that it depends on: the last one, or those that touch the same memory."""
        nodes = self.driver.graphs[self.capturing]
        if self.order is None or self.captures_chain:
            return nodes[-1:]
        return [i for i in nodes if depend(self.driver.nodes[i], node)]

    @contextlib.contextmanager
    def capture(self, graph: ModelledGraph, pool: Any = None, **kwargs: Any) -> Iterator[None]:
        if self.captured is not None:
            raise AssertionError("captured twice")
        self.captured = graph
        self.driver.capturing = graph.handle
        self.pool_of_capture = pool = (0, next(self.numbers)) if pool is None else tuple(pool)
        self.uses[pool] += 1
        weakref.finalize(graph, self.release_pool, 0, pool)
        try:
            yield
        finally:
            if self.pool_of_capture is None:
                self.end_allocate(0, pool)
            self.captured = self.pool_of_capture = None
            self.driver.capturing = 0
        if not graph.keeps_graph:
            graph.executable = self.driver.instantiate(graph.handle)

    @contextlib.contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def is_capturing(self) -> bool:
        if self.stream.is_destroyed:
            raise RuntimeError("invalid resource handle")
        return self.captured is not None or self.stream.is_captured

    @contextlib.contextmanager
    def allocate_to_pool(self, device: int, mem_pool: Any, stream: Any) -> Iterator[None]:
        self.begin_allocate(device, mem_pool)
        try:
            yield
        finally:
            self.end_allocate(device, mem_pool)
            self.release_pool(device, mem_pool)


def depend(first: KernelNode, second: KernelNode) -> bool:
    """Return whether the order of two nodes matters. Inputs of other calls may share memory that is written."""
    ranges = []
    for node in (first, second):
        starts = [int.from_bytes(p, "little") for p in node.parameters]
        ends = [start + storage_extent(like) for start, like in zip(starts, node.launch.likes)]
        ranges.append([(s, e, i in node.launch.written) for i, (s, e) in enumerate(zip(starts, ends))])
    return any(
        (writes or also_writes) and start < other_end and other_start < end
        for start, end, writes in ranges[0]
        for other_start, other_end, also_writes in ranges[1]
    )


@contextlib.contextmanager
def modelled_device(
    driver_type: Callable[..., ModelledDriver] | None = None,
    device_type: Callable[[Any], ModelledDevice] = ModelledDevice,
) -> Iterator[ModelledDevice]:
    """A device in the place of device 0."""
    with modelled_driver(driver_type=driver_type) as modelled:
        device = device_type(modelled)
        nothing = lambda *args, **kwargs: contextlib.nullcontext()  # noqa: E731

        functions: dict[Any, Any] = {n: cu.CUfunction(PRELUDE_FUNCTION + n) for n in CAPACITIES}
        functions |= {BRANCH: cu.CUfunction(BRANCH_FUNCTION), COPY: cu.CUfunction(COPY_FUNCTION)}
        patches: list[tuple[Any, dict[str, Any]]] = [
            (
                torch.cuda,
                {
                    "CUDAGraph": functools.partial(ModelledGraph, device),
                    "graph": device.capture,
                    "graph_pool_handle": device.new_pool,
                    "device": nothing,
                    "stream": device.on_stream,
                    "Stream": device.new_stream,
                    "ExternalStream": lambda raw, device_index=None, **kwargs: ModelledStream(device, raw),
                    "Event": lambda **kwargs: ModelledEvent(),
                    "current_stream": lambda index=None: device.stream,
                    "set_stream": mock.Mock(),
                    "_sleep": lambda cycles: None,
                    "synchronize": lambda *args: None,
                    "empty_cache": device.empty_cache,
                    "mem_get_info": device.mem_get_info,
                    "memory_reserved": lambda index=None: device.nbytes,
                    "memory_snapshot": device.memory_snapshot,
                    "get_per_process_memory_fraction": lambda index=None: 1.0,
                    "is_current_stream_capturing": device.is_capturing,
                    "device_count": lambda: 1,
                    "default_generators": [torch.Generator()],
                },
            ),
            (
                torch._C,
                {
                    "_cuda_getCheckpointState": lambda *args: object(),
                    "_cuda_setCheckpointPoolState": device.set_checkpoint,
                    "_cuda_cudaCachingAllocator_raw_delete": lambda address: None,
                    "_cuda_clearCublasWorkspaces": lambda: None,
                    "_has_Standard_Deleter": lambda storage: True,
                    "_cuda_isCurrentStreamCapturing": device.is_capturing,
                    "_cuda_getCurrentRawStream": lambda index: device.stream.cuda_stream,
                    "_cuda_beginAllocateCurrentThreadToPool": device.begin_allocate,
                    "_cuda_endAllocateToPool": device.end_allocate,
                    "_cuda_releasePool": device.release_pool,
                },
            ),
            (
                trees,
                {
                    "check_memory_pool": device.check_pool,
                    "preserve_rng_state": nothing,
                    "clear_cublas_manager": nothing,
                    "_use_cuda_memory_pool_manager": device.allocate_to_pool,
                },
            ),
            # Generated code allocates in C++, without an operator.
            (
                allocation,
                {"empty_strided_cuda": device.empty_strided, "native": types.SimpleNamespace(compiled=None)},
            ),
            # No kernel is compiled.
            (prelude, {"_kernels": lambda *args: functions}),
            (torch.UntypedStorage, {"clone": lambda storage: device.clone_storage(storage)}),
        ]
        with contextlib.ExitStack() as stack:
            stack.enter_context(host_operators(device))
            for target, values in patches:
                stack.enter_context(mock.patch.multiple(target, **values))
            yield device
