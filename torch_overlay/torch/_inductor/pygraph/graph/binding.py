"""
Parameter indirection by node update.

Every parameter of every node of a captured graph can be read back. A word that points into a placeholder
(placeholder.py) is that input or output plus an offset. Setting the node with the address of another buffer in those
words moves the input there: one driver call a node, and nothing on the device. Launches that are already enqueued keep
their parameters.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import struct
from typing import Any, NamedTuple, TYPE_CHECKING

from torch._inductor.pygraph import native
from torch._inductor.pygraph.graph.driver import bindings, check, DriverError, entry_point
from torch._inductor.pygraph.types.reason import Code, Reason, RefusedError
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from torch._inductor.pygraph.graph.placeholder import PlaceholderMap


log = logging.getLogger(__name__)

# What is copied from the host during capture is looked at up to this size: arrays of pointers are smaller.
MAX_HOST_COPY_BYTES = 1 << 20

# CU_LAUNCH_PARAM_* tags of CUDA_KERNEL_NODE_PARAMS.extra
LAUNCH_PARAM_END = 0
LAUNCH_PARAM_BUFFER_POINTER = 1

WORD_BYTES = 8


class Word(NamedTuple):
    """
    A parameter word that holds the address of an input plus an offset, or a number that depends on the sizes of a call.
    Another number is added if there is a ``plus``.
    """

    input: int
    offset: int
    value: ctypes.c_uint64 | ctypes.c_uint32
    plus: int | None = None

    def write(self, inputs: Sequence[int]) -> bool:
        """Return whether the word changed."""
        before, value = self.value.value, inputs[self.input] + self.offset
        self.value.value = value if self.plus is None else value + inputs[self.plus]
        return self.value.value != before


@functools.cache
def _words(count: int) -> struct.Struct:
    return struct.Struct(f"={count}Q")


def aligned_words(buffer: Any) -> tuple[int, ...]:
    return _words(len(buffer) // WORD_BYTES).unpack_from(buffer)


def find_words(buffer: ctypes.Array[Any], placeholders: PlaceholderMap) -> list[Word]:
    """Return every aligned word of a parameter buffer that lies in a placeholder's range."""
    # Bytes of two neighbours read as one word have passed for an address.
    return [
        Word(*hit, ctypes.c_uint64.from_buffer(buffer, i * WORD_BYTES))
        for i, value in enumerate(aligned_words(buffer))
        if (hit := placeholders.find(value)) is not None
    ]


def kernel_function(params: Any) -> Any:
    """Return what a kernel node launches, as a CUfunction."""
    if int(params.func) == 0:
        # cuLibrary kernels (Triton's, cuDNN's) fill ``kern`` instead.
        return check(bindings().cuKernelGetFunction(params.kern))
    return params.func


def parameter_layout(function: Any) -> list[tuple[int, int]]:
    """Return (offset, size) in bytes of each parameter of a kernel."""
    # Not by the runtime API, which fails for kernels that another library loaded.
    cu = bindings()
    layout: list[tuple[int, int]] = []
    while True:
        result = cu.cuFuncGetParamInfo(function, len(layout))
        if result[0] == cu.CUresult.CUDA_ERROR_INVALID_VALUE:
            # Past the last parameter.
            return layout
        layout.append(check(result))


def read_parameters(params: Any, layout: Sequence[tuple[int, int]]) -> list[tuple[int, bytes]]:
    """Return (offset in bytes, content) of each parameter of a kernel node."""
    if params.kernelParams:
        pointers = ctypes.cast(int(params.kernelParams), ctypes.POINTER(ctypes.c_void_p))
        addresses = [pointers[i] for i in range(len(layout))]
    elif params.extra:
        # One packed block, as nvjet kernels of cuBLAS launch.
        extra = ctypes.cast(int(params.extra), ctypes.POINTER(ctypes.c_void_p))
        i = block = 0
        while (tag := extra[i] or LAUNCH_PARAM_END) != LAUNCH_PARAM_END:
            if tag == LAUNCH_PARAM_BUFFER_POINTER:
                block = extra[i + 1]
            i += 2
        addresses = [block + offset for offset, _ in layout]
    else:
        return []
    return [(offset, ctypes.string_at(address, size)) for address, (offset, size) in zip(addresses, layout)]


def kernel_parameters(params: Any) -> list[tuple[int, ctypes.Array[Any]]]:
    """Return (offset in bytes, copy) of each parameter of a kernel node."""
    layout = parameter_layout(kernel_function(params))
    return [(offset, ctypes.create_string_buffer(c, len(c))) for offset, c in read_parameters(params, layout)]


def set_kernel_parameters(params: Any, buffers: Sequence[ctypes.Array[Any]]) -> object:
    """Let a kernel node's parameters be read from buffers, while what it returns is alive."""
    pointers = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
    params.kernelParams = ctypes.addressof(pointers)
    params.extra = 0
    return buffers, pointers


def add_kernel(
    graph: Any, behind: list[Any], function: Any, buffers: Sequence[Any], blocks: int = 1, threads: int = 1
) -> Any:
    """Add a kernel node behind other nodes of a graph, with a grid and a block of one dimension. Return the node."""
    cu = bindings()
    params = cu.CUDA_KERNEL_NODE_PARAMS()
    params.func = function
    params.gridDimX, params.blockDimX = blocks, threads
    params.gridDimY = params.gridDimZ = params.blockDimY = params.blockDimZ = 1
    # The parameters point to ``keep``. The driver copies them when it adds the node.
    keep = set_kernel_parameters(params, buffers)
    node = check(cu.cuGraphAddKernelNode(graph, behind, len(behind), params))
    del keep
    return node


def graph_nodes(graph: Any, bodies: Mapping[int, Sequence[Any]] = {}) -> Iterator[tuple[Any, Any]]:
    """
    Yield (node, type) of each node of a graph, in the order of their creation. Nodes of the graphs in ``bodies`` take
    the place of the conditional node that owns them.
    """
    cu = bindings()
    _, count = check(cu.cuGraphGetNodes(graph))
    nodes, _ = check(cu.cuGraphGetNodes(graph, count))
    for node in nodes:
        if (graphs := bodies.get(int(node))) is None:
            yield node, check(cu.cuGraphNodeGetType(node))
            continue
        for body in graphs:
            yield from graph_nodes(body, bodies)


class ReadParameters(NamedTuple):
    """A captured kernel node: the parameters that are read, and what each holds."""

    node: Any
    params: Any
    # (offset in bytes, value) of each parameter.
    parameters: list[tuple[int, ctypes.Array[Any]]]
    # (parameter, offset in it, word)
    words: list[tuple[int, int, Word]]


def read_kernel(node: Any, placeholders: PlaceholderMap) -> ReadParameters:
    """Raises RefusedError if the kernel may be chosen for an alignment that another call's input does not have."""
    params = check(bindings().cuGraphKernelNodeGetParams(node))
    parameters = kernel_parameters(params)
    words = [
        (i, ctypes.addressof(word.value) - ctypes.addressof(buffer), word)
        for i, (_, buffer) in enumerate(parameters)
        for word in find_words(buffer, placeholders)
    ]
    if any(placeholders.is_better_aligned(w.input, w.offset) for *_, w in words):
        raise RefusedError(Reason.of(Code.HIDDEN_ALIGNMENT))
    return ReadParameters(node, params, parameters, words)


def kernels_that_read(graph: Any, placeholders: PlaceholderMap) -> Iterator[ReadParameters]:
    """Yield the kernel nodes whose parameters hold an input. Raises as read_kernel."""
    kernel = bindings().CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    kernels = (read_kernel(node, placeholders) for node, kind in graph_nodes(graph) if kind == kernel)
    return (read for read in kernels if read.words)


class NodeUpdate(NamedTuple):
    """
    One node of the executable graph: the words to write, and the call that sets it, whose ``args`` are (executable
    graph, node, parameters, ...). ``keep`` owns the memory that the parameters point to.
    """

    words: list[Word]
    set: Callable[..., Any]
    args: tuple[Any, ...]
    keep: Any = None

    def write(self, inputs: Sequence[int]) -> bool:
        """Write the words of a call. Return whether one changed."""
        # Not by any, which stops at the first one.
        return sum(word.write(inputs) for word in self.words) > 0

    def refusal(self) -> str | None:
        """Set the node, and return which call refuses and how, or None."""
        status, *_ = self.set(*self.args)
        if int(status) == 0:
            return None
        return f"{self.set.__name__}: {status.name}: {describe(self.args[2])}"


def describe(params: Any) -> str:
    """Return what a node with these parameters does."""
    cu = bindings()
    if isinstance(params, cu.CUDA_MEMSET_NODE_PARAMS):
        return f"a memset of {params.width} x {params.height} elements of {params.elementSize} bytes"
    if isinstance(params, cu.CUDA_MEMCPY3D):
        kinds = (kind.name.rpartition("_")[2].lower() for kind in (params.srcMemoryType, params.dstMemoryType))
        rows = max(params.Height, 1) * max(params.Depth, 1)
        return f"a copy of {rows} x {params.WidthInBytes} bytes from {' to '.join(kinds)} memory"
    status, name = cu.cuFuncGetName(kernel_function(params))
    return "a kernel without a name" if int(status) else name.decode()


def kernel_update(executable: Any, node: Any, placeholders: PlaceholderMap) -> NodeUpdate:
    _, params, parameters, words = read_kernel(node, placeholders)
    keep = set_kernel_parameters(params, [buffer for _, buffer in parameters])
    args = (executable, node, params)
    return NodeUpdate([word for *_, word in words], bindings().cuGraphExecKernelNodeSetParams, args, keep)


def is_known(address: int) -> bool:
    """Return whether an address is of memory that CUDA knows."""
    cu = bindings()
    status, _ = cu.cuPointerGetAttribute(cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
    return int(status) == 0


def read_host_memory(address: int, nbytes: int) -> ctypes.Array[Any]:
    """Return a copy of this process's memory. Raises RefusedError if nothing is mapped there."""
    # Not through a pointer: the source of a captured copy may have been freed since.
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            content = os.pread(memory.fileno(), nbytes, address)
    except OSError:
        content = b""
    if len(content) != nbytes:
        raise RefusedError(Reason.of(Code.HOST_COPY_OF_TEMPORARY), is_capturable=False)
    return ctypes.create_string_buffer(content, nbytes)


def struct_buffer(params: Any, nbytes: int) -> ctypes.Array[Any]:
    """Return the memory of a cuda.bindings struct, in place."""
    return (ctypes.c_char * nbytes).from_address(int(params.getPtr()))


# sizeof(CUDA_MEMCPY3D) and sizeof(CUDA_MEMSET_NODE_PARAMS) on 64-bit hosts
MEMCPY_BYTES = 200
MEMSET_BYTES = 40


def memory_update(executable: Any, node: Any, kind: Any, placeholders: PlaceholderMap) -> NodeUpdate:
    """Return the update of a copy or a fill, whose parameters are one struct."""
    cu = bindings()
    if kind == cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET:
        params, nbytes = check(cu.cuGraphMemsetNodeGetParams(node)), MEMSET_BYTES
        set = cu.cuGraphExecMemsetNodeSetParams
    else:
        params, nbytes = check(cu.cuGraphMemcpyNodeGetParams(node)), MEMCPY_BYTES
        set = cu.cuGraphExecMemcpyNodeSetParams
        ends = (params.srcMemoryType, params.srcHost), (params.dstMemoryType, params.dstHost)
        if any(kind == cu.CUmemorytype.CU_MEMORYTYPE_HOST and not is_known(int(address)) for kind, address in ends):
            # A replay would read, or overwrite, what the program holds there by then. So would a graph that copies inputs.
            raise RefusedError(Reason.of(Code.HOST_COPY_OF_TEMPORARY), is_capturable=False)
        if params.srcMemoryType == cu.CUmemorytype.CU_MEMORYTYPE_HOST:
            copied = params.srcPitch * (params.Height * params.Depth - 1) + params.WidthInBytes
            source = read_host_memory(int(params.srcHost), copied) if copied <= MAX_HOST_COPY_BYTES else b""
            if find_words(source, placeholders):
                raise RefusedError(Reason.of(Code.HOST_COPY_OF_ADDRESS))
    words = find_words(struct_buffer(params, nbytes), placeholders)
    return NodeUpdate(words, set, (executable, node, params, check(cu.cuCtxGetCurrent())))


class Nodes:
    """
    The nodes of one executable graph that hold inputs, which now lie at ``pointers``. ``nodes_of`` has for each input
    the nodes to set when it moves. native.compiled.Nodes does the same by the nodes' words.
    """

    def __init__(self, pointers: list[int], updates: list[NodeUpdate], nodes_of: list[list[int]]) -> None:
        self.pointers = pointers
        self.updates = updates
        self.nodes_of = nodes_of

    def __call__(self, pointers: Sequence[int]) -> bool:
        """Move the inputs to new addresses. Return False if a node refused: the graph must not be launched then."""
        moved = (k for k, (a, b) in enumerate(zip(self.pointers, pointers)) if a != b)
        for i in sorted(OrderedSet(i for k in moved for i in self.nodes_of[k])):
            update = self.updates[i]
            update.write(pointers)
            if update.set(*update.args)[0] != 0:
                # Unknown what the graph holds now: no address may count as unchanged.
                self.pointers = [-1] * len(pointers)
                return False
        self.pointers = list(pointers)
        return True


def compiled_nodes(pointers: list[int], updates: list[NodeUpdate]) -> Any:
    """Return native.compiled.Nodes of these updates, or None where there is none."""
    if native.compiled is None:
        return None
    try:
        return native.compiled.Nodes(pointers, [*map(description, updates)], updates)
    except DriverError as e:
        log.info("nodes are set by Python: %s", e)
        return None


def description(update: NodeUpdate) -> tuple[Any, ...]:
    """Return an update as compiled code takes it. Raises DriverError if the driver lacks a function."""
    executable, node, params, *context = update.args
    address = params.getPtr() if hasattr(params, "getPtr") else ctypes.addressof(params)
    words = [(ctypes.addressof(w.value), ctypes.sizeof(w.value), w.input, w.offset, w.plus) for w in update.words]
    handles = entry_point(update.set.__name__), int(executable), int(node), int(address)
    if isinstance(params, ctypes.c_uint32):
        # It is the flag that switches a node on.
        return *handles, False, words
    return *handles, int(context[0]) if context else None, words


class NodeUpdateBinding:
    """The external inputs and outputs of one executable graph, both called inputs here."""

    def __init__(
        self,
        raw_graph: int,
        raw_executable: int,
        placeholders: PlaceholderMap,
        set_on_device: Collection[int] = (),
        bodies: Mapping[int, Sequence[Any]] = {},
    ) -> None:
        """
        Args:
            set_on_device: handles of the nodes that the graph sets itself
            bodies: see graph_nodes

        Raises:
            RefusedError: a node may hide an input.
            DriverError: a node's parameters could not be read.
        """
        cu = bindings()
        kind = cu.CUgraphNodeType
        no_parameters = (
            kind.CU_GRAPH_NODE_TYPE_EMPTY,
            kind.CU_GRAPH_NODE_TYPE_EVENT_RECORD,
            kind.CU_GRAPH_NODE_TYPE_WAIT_EVENT,
            kind.CU_GRAPH_NODE_TYPE_MEM_ALLOC,
            kind.CU_GRAPH_NODE_TYPE_MEM_FREE,
        )
        executable = cu.CUgraphExec(raw_executable)
        self.updates: list[NodeUpdate] = []
        self.num_nodes = 0
        for node, node_type in graph_nodes(cu.CUgraph(raw_graph), bodies):
            self.num_nodes += 1
            if int(node) in set_on_device or node_type in no_parameters:
                continue
            if node_type == kind.CU_GRAPH_NODE_TYPE_KERNEL:
                update = kernel_update(executable, node, placeholders)
            elif node_type in (kind.CU_GRAPH_NODE_TYPE_MEMCPY, kind.CU_GRAPH_NODE_TYPE_MEMSET):
                update = memory_update(executable, node, node_type, placeholders)
            else:
                raise RefusedError(Reason.of(Code.UNKNOWN_NODE, kind=node_type.name))
            if update.words:
                self.updates.append(update)
        pointers = [p.address for p in placeholders.placeholders]
        # For each input the nodes to set when it moves.
        self.nodes_of: list[list[int]] = [[] for _ in pointers]
        for i, update in enumerate(self.updates):
            for index in OrderedSet(word.input for word in update.words):
                self.nodes_of[index].append(i)
        self.nodes = compiled_nodes(pointers, self.updates) or Nodes(pointers, self.updates, self.nodes_of)

    @property
    def pointers(self) -> list[int]:
        """The addresses that the graph now holds, one for each input."""
        return self.nodes.pointers

    def update(self, pointers: Sequence[int]) -> None:
        """Move the inputs. Raises DriverError if a node refused: the graph must not be launched then."""
        if not self.nodes(pointers):
            refusals = [how for update in self.updates if (how := update.refusal()) is not None]
            raise DriverError(": ".join(["a node of the graph could not be set", *refusals[:1]]))
