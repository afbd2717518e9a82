"""
Nodes of a CUDA graph whose kernels compute on host memory.

Their parameters are given by the driver's own structs: they are read from memory as the driver reads them.
"""

from __future__ import annotations

import ctypes
import dataclasses
import struct
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor.pygraph.graph import binding
from torch._inductor.pygraph.graph.placeholder import tensor_at
from torch.testing._internal.modelled_operators import on_host


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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


def memory(address: int, nbytes: int) -> ctypes.Array[Any]:
    return (ctypes.c_char * nbytes).from_address(address)


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
            pointers = (ctypes.c_void_p * max(len(buffers), 1))(*map(ctypes.addressof, buffers))
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
        rows, first, _, (targets,) = (struct.unpack("<Q" if len(p) == 8 else "<i", p) for p in parameters[:4])
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

    function = COPY_FUNCTION


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
    "A copy of one row between device addresses, or from or to host memory, which is pinned or pageable."

    host: Any = None

    def __init__(self, dst: int | bytes, src: int | bytes, nbytes: int | None = None, *, pinned: bool = True) -> None:
        super().__init__("MEMCPY")
        self.pinned = pinned
        self.dst = dst
        self.src = src
        self.nbytes = nbytes if nbytes is not None else len(src)

    def params(self, handle: int) -> Any:
        params = cu.CUDA_MEMCPY3D()
        for end, place in (("src", self.src), ("dst", self.dst)):
            kind = "HOST" if isinstance(place, bytes) else "DEVICE"
            setattr(params, f"{end}MemoryType", getattr(cu.CUmemorytype, f"CU_MEMORYTYPE_{kind}"))
            if isinstance(place, bytes):
                self.host = ctypes.create_string_buffer(place, len(place))
                setattr(params, f"{end}Host", ctypes.addressof(self.host))
            else:
                setattr(params, f"{end}Device", cu.CUdeviceptr(place))
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
