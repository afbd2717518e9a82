"""
What the nodes of a captured graph launch. A node of another graph can be set to launch the same.

cuGraphExecKernelNodeSetParams changes a node's function, grid and parameters. It leaves the attributes as they are, of
which a kernel may need others, such as the clusters of its thread blocks: its launch would end the context.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import struct
from typing import Any, NamedTuple, TYPE_CHECKING

from torch._inductor.pygraph.graph import binding
from torch._inductor.pygraph.graph.driver import bindings, check, function as driver_function
from torch._inductor.pygraph.types.reason import Code, Reason, RefusedError


if TYPE_CHECKING:
    from collections.abc import Callable


# CU_LAUNCH_ATTRIBUTE_* of a kernel node, and CU_FUNC_ATTRIBUTE_* of its function.
NODE_ATTRIBUTES = (
    "CLUSTER_DIMENSION",
    "CLUSTER_SCHEDULING_POLICY_PREFERENCE",
    "COOPERATIVE",
    "PREFERRED_CLUSTER_DIMENSION",
    "PREFERRED_SHARED_MEMORY_CARVEOUT",
    "PRIORITY",
)
FUNCTION_ATTRIBUTES = ("REQUIRED_CLUSTER_WIDTH", "REQUIRED_CLUSTER_HEIGHT", "REQUIRED_CLUSTER_DEPTH")

# sizeof(CUlaunchAttributeValue)
ATTRIBUTE_BYTES = 64

# sizeof(CUDA_KERNEL_NODE_PARAMS)
KERNEL_BYTES = 72
# The driver's structs, by their size in bytes
STRUCTS = {
    KERNEL_BYTES: "CUDA_KERNEL_NODE_PARAMS",
    binding.MEMSET_BYTES: "CUDA_MEMSET_NODE_PARAMS",
    binding.MEMCPY_BYTES: "CUDA_MEMCPY3D",
}
# Where CUDA_KERNEL_NODE_PARAMS has gridDimX, gridDimY and gridDimZ.
GRID_OFFSETS = (8, 12, 16)
# Format and offset of the grid, of the block, and of sharedMemBytes.
KERNEL_FIELDS = (("=3I", 8), ("=3I", 20), ("=I", 32))
# The bytes of kernelParams and extra.
POINTERS = range(40, 56)


# Type and ports of an edge whose node waits for the end of the node before.
PLAIN_EDGE = (0, 0, 0)


@dataclasses.dataclass(frozen=True, eq=False)
class CapturedNode:
    """
    Attributes:
        edge: type and ports, from the node before. A programmatic one lets a kernel begin while that node runs
        struct: the driver's. A kernel's has no parameters
        grid: of a kernel
        launch: whether it is a kernel, and of a kernel its function, block and shared memory
        attributes: of a kernel, and of its function
        captured: of a kernel each parameter, of a memset and a copy the struct
    """

    node: Any
    edge: tuple[int, int, int]
    struct: bytes
    grid: tuple[int, int, int]
    launch: tuple[Any, ...]
    attributes: tuple[Any, ...]
    captured: tuple[bytes, ...]

    @property
    def is_kernel(self) -> bool:
        return self.launch[0]

    @property
    def kind(self) -> tuple[bool, tuple[int, int, int]]:
        """What cannot be set to that of another node."""
        return self.is_kernel, self.edge

    @property
    def function(self) -> int:
        return self.launch[1]

    # What sets another node to launch the same

    @functools.cached_property
    def params(self) -> Any:
        """The driver's struct. A kernel's points to ``buffers``."""
        params = getattr(bindings(), STRUCTS[len(self.struct)])()
        ctypes.memmove(int(params.getPtr()), self.struct, len(self.struct))
        if self.is_kernel:
            # The driver reads the parameters from ``keep``.
            object.__setattr__(self, "keep", binding.set_kernel_parameters(params, self.buffers))
        return params

    @functools.cached_property
    def buffers(self) -> tuple[ctypes.Array[Any], ...]:
        """Of a kernel each parameter, of a memset and a copy the struct."""
        if not self.is_kernel:
            return (binding.struct_buffer(self.params, len(self.struct)),)
        return tuple(ctypes.create_string_buffer(content, len(content)) for content in self.captured)

    def __str__(self) -> str:
        if not self.is_kernel:
            return binding.describe(self.params)
        _, function, block, shared_bytes = self.launch
        status, name = bindings().cuFuncGetName(bindings().CUfunction(function))
        grid = [place.value for place in self.grid_places()]
        return (
            f"{hex(function) if int(status) else name.decode()} (grid {grid}, block {[*block]}, {shared_bytes} bytes of "
            f"shared memory, {len(self.buffers)} parameters)"
        )

    def words(self, lowest: int = 0) -> list[tuple[int, int, int]]:
        """Return (buffer, offset, value) of each aligned word at capture that is not below ``lowest``."""
        return [
            (i, binding.WORD_BYTES * k, value)
            for i, content in enumerate(self.captured)
            for k, value in enumerate(binding.aligned_words(content))
            if value >= lowest
        ]

    def grid_places(self) -> list[ctypes.c_uint32]:
        address = int(self.params.getPtr())
        return [ctypes.c_uint32.from_address(address + offset) for offset in GRID_OFFSETS]

    def copied(self) -> CapturedNode:
        """Return a copy, with parameters of its own."""
        # dataclasses.replace takes several times as long.
        same = self.node, self.edge, self.struct, self.grid, self.launch, self.attributes, self.captured
        return CapturedNode(*same)

    def alone(self) -> CapturedNode:
        """Return the node as if there was none before."""
        return self if self.edge == PLAIN_EDGE else dataclasses.replace(self, edge=PLAIN_EDGE)

    def update(self, executable: Any, node: Any, words: list[binding.Word]) -> binding.NodeUpdate:
        """Return the update that lets ``node`` of an executable graph launch the same."""
        cu = bindings()
        if self.is_kernel:
            return binding.NodeUpdate(words, cu.cuGraphExecKernelNodeSetParams, (executable, node, self.params), self)
        context = check(cu.cuCtxGetCurrent())
        return binding.NodeUpdate(
            words, cu.cuGraphExecMemsetNodeSetParams, (executable, node, self.params, context), self
        )


class Function(NamedTuple):
    """A kernel's parameters as (offset, size) in bytes, and its attributes."""

    layout: list[tuple[int, int]]
    attributes: tuple[Any, ...]

    @classmethod
    def of(cls, function: Any) -> Function:
        found = []
        for which in _function_attribute_ids():
            status, value = bindings().cuFuncGetAttribute(which, function)
            found.append(None if int(status) else value)
        return cls(binding.parameter_layout(function), tuple(found))


@functools.cache
def _function_attribute_ids() -> list[Any]:
    return [getattr(bindings().CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}") for name in FUNCTION_ATTRIBUTES]


@functools.cache
def _node_attribute_ids() -> list[int]:
    # Older bindings lack some.
    of_nodes = bindings().CUlaunchAttributeID
    ids = (getattr(of_nodes, f"CU_LAUNCH_ATTRIBUTE_{name}", None) for name in NODE_ATTRIBUTES)
    return [int(which) for which in ids if which is not None]


class Shared:
    """
    Facts that several captured nodes share, so that each fact is read and stored once.

    Attributes:
        functions: facts of kernels, by the address of their CUfunction
        tuples: launches and attributes. Nodes with equal tuples have the same object
    """

    def __init__(self) -> None:
        self.functions: dict[int, Function] = {}
        self.tuples: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    @functools.cached_property
    def get_attribute(self) -> Callable[[int, int, Any], int]:
        """Takes a node, an attribute's number, and a buffer of ATTRIBUTE_BYTES for its value. Returns the driver's status."""
        return driver_function("cuGraphKernelNodeGetAttribute", ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)

    def function(self, function: Any) -> Function:
        if (known := self.functions.get(int(function))) is None:
            known = self.functions[int(function)] = Function.of(function)
        return known

    def same(self, t: tuple[Any, ...]) -> tuple[Any, ...]:
        return self.tuples.setdefault(t, t)


def read_node(node: Any, kind: Any, edge: tuple[int, int, int], shared: Shared | None = None) -> CapturedNode:
    """Raises RefusedError: it is neither a kernel nor a memset."""
    cu = bindings()
    shared = shared or Shared()
    if kind == cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
        params = check(cu.cuGraphKernelNodeGetParams(node))
        function = binding.kernel_function(params)
        known = shared.function(function)
        captured = tuple(content for _, content in binding.read_parameters(params, known.layout))
        content = ctypes.string_at(int(params.getPtr()), KERNEL_BYTES)
        grid, block, (shared_bytes,) = (struct.unpack_from(f, content, n) for f, n in KERNEL_FIELDS)
        launch = shared.same((True, int(function), block, shared_bytes))
        without_parameters = content[: POINTERS.start] + bytes(len(POINTERS)) + content[POINTERS.stop :]
        attributes = shared.same((*_attributes(node, shared), *known.attributes))
        return CapturedNode(node, edge, without_parameters, grid, launch, attributes, captured)
    if kind == cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET:
        params = check(cu.cuGraphMemsetNodeGetParams(node))
        content = bytes(binding.struct_buffer(params, binding.MEMSET_BYTES))
        return CapturedNode(node, edge, content, (1, 1, 1), (False,), (), (content,))
    raise RefusedError(Reason.of(Code.UNKNOWN_NODE, kind=kind.name))


def read_copy(node: Any) -> CapturedNode:
    """Return a copy node, to compare it with others. No node is set to launch it."""
    content = bytes(binding.struct_buffer(check(bindings().cuGraphMemcpyNodeGetParams(node)), binding.MEMCPY_BYTES))
    return CapturedNode(node, PLAIN_EDGE, content, (1, 1, 1), (False,), (), (content,))


def _attributes(node: Any, shared: Shared) -> tuple[Any, ...]:
    found = []
    for which in _node_attribute_ids():
        # The driver writes the bytes that the attribute has.
        value = ctypes.create_string_buffer(ATTRIBUTE_BYTES)
        # Older drivers lack some.
        found.append(None if shared.get_attribute(int(node), which, value) else value.raw)
    return tuple(found)


def read_graph(graph: Any, shared: Shared | None = None) -> list[CapturedNode]:
    """
    Return the nodes of a graph in the order of their creation. ``shared``: facts of nodes that were read before.

    Raises:
        RefusedError: a node is neither a kernel nor a memset, or does not wait for the one before.
    """
    nodes = [*binding.graph_nodes(graph)]
    order = {int(node): i for i, (node, _) in enumerate(nodes)}
    cu = bindings()
    *_, count = check(cu.cuGraphGetEdges(graph))
    froms, tos, *data_and_count = check(cu.cuGraphGetEdges(graph, count))
    edges = sorted((order[int(a)], order[int(b)]) for a, b in zip(froms, tos))
    if edges != [(i, i + 1) for i in range(len(nodes) - 1)]:
        raise RefusedError(Reason.of(Code.NODES_NOT_IN_ROW))
    # Before CUDA 13 there is no such data.
    data = data_and_count[0] if len(data_and_count) > 1 else ()
    of_node = {int(b): (int(edge.type), int(edge.from_port), int(edge.to_port)) for b, edge in zip(tos, data or ())}
    return [read_node(node, kind, of_node.get(int(node), PLAIN_EDGE), shared) for node, kind in nodes]


def is_kernel(node: Any) -> bool:
    cu = bindings()
    return check(cu.cuGraphNodeGetType(node)) == cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL


def move_words(node: Any, memory: tuple[int, int], to: int) -> None:
    """Let a captured kernel take other memory for a range. Raises DriverError: the node is as it was."""
    params = check(bindings().cuGraphKernelNodeGetParams(node))
    buffers = [buffer for _, buffer in binding.kernel_parameters(params)]
    for buffer in buffers:
        for offset in range(0, len(buffer) - binding.WORD_BYTES + 1, binding.WORD_BYTES):
            word = ctypes.c_uint64.from_buffer(buffer, offset)
            if memory[0] <= word.value < memory[1]:
                word.value += to - memory[0]
    # The parameters point to ``keep``. The driver copies them when it sets the node.
    keep = binding.set_kernel_parameters(params, buffers)
    result = bindings().cuGraphKernelNodeSetParams(node, params)
    del keep
    check(result)
