"""
Parameter indirection by node update.

Every parameter of every node of a captured graph can be read back. A word that points
into a placeholder (placeholder.py) is that input or output plus an offset: an argument of a Triton
kernel, one of the places where a cuBLAS kernel keeps an operand, the base of a TMA
descriptor, an end of a memcpy. Writing the address of another buffer into those words and
setting the node in the executable graph moves the input there: one driver call a node, and
nothing on the device.

cuGraphExecKernelNodeSetParams: launches that are already enqueued keep their parameters,
so the next call's addresses can be set while this call's graph still runs.

A graph that begins with a prelude (prelude.py) sets nodes itself, and the prelude's
parameters are the words that the host writes.
"""

from __future__ import annotations

import ctypes
import logging
import os
from typing import Any, TYPE_CHECKING

from torch._inductor.pygraph import native
from torch._inductor.pygraph.graph.driver import bindings, check, DriverError, entry_point
from torch._inductor.pygraph.types.reason import Code, Reason, RefusedError
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch._inductor.pygraph.graph.placeholder import PlaceholderMap
    from torch._inductor.pygraph.graph.prelude import Prelude


log = logging.getLogger(__name__)

# Parameters that a kernel reads from memory are out of reach. What is copied from the
# host during capture is looked at up to this size: arrays of pointers are smaller.
MAX_HOST_COPY_BYTES = 1 << 20

# CU_LAUNCH_PARAM_* tags of CUDA_KERNEL_NODE_PARAMS.extra
LAUNCH_PARAM_END = 0
LAUNCH_PARAM_BUFFER_POINTER = 1

WORD_BYTES = 8


class Word:
    """A parameter word that holds the address of an input plus an offset."""

    __slots__ = ("input", "offset", "value")

    def __init__(self, input: int, offset: int, value: ctypes.c_uint64) -> None:
        self.input = input
        self.offset = offset
        self.value = value


class NodeUpdate:
    """
    One node of the executable graph: the words to write, and the call that sets it.

    ``set`` takes (executable graph, node, parameters, ...) and was bound at record time;
    ``keep`` owns the memory that the parameters point to.
    """

    __slots__ = ("words", "set", "args", "keep")

    def __init__(
        self,
        words: list[Word],
        set: Callable[..., Any],
        args: tuple[Any, ...],
        keep: object,
    ) -> None:
        self.words = words
        self.set = set
        self.args = args
        self.keep = keep


def find_words(buffer: ctypes.Array[Any], placeholders: PlaceholderMap) -> list[Word]:
    """
    Every aligned word of a parameter buffer that lies in a placeholder's range.

    Words at other offsets are not looked at: a compiler aligns pointers, and bytes of two
    neighbours read as one word have passed for an address.
    """
    words = []
    whole = len(buffer) // WORD_BYTES * WORD_BYTES
    for i, value in enumerate(memoryview(bytes(buffer))[:whole].cast("Q")):
        if (hit := placeholders.find(value)) is not None:
            index, offset = hit
            word = ctypes.c_uint64.from_buffer(buffer, i * WORD_BYTES)
            words.append(Word(index, offset, word))
    return words


def find_kernel_words(
    buffer: ctypes.Array[Any], placeholders: PlaceholderMap
) -> list[Word]:
    """
    Those of a parameter of a kernel.

    Raises:
        RefusedError: the kernel may have been chosen for an alignment that another call's
            input does not have.
    """
    words = find_words(buffer, placeholders)
    if any(placeholders.is_better_aligned(w.input, w.offset) for w in words):
        raise RefusedError(Reason.of(Code.HIDDEN_ALIGNMENT))
    return words


def kernel_function(params: Any) -> Any:
    "What a kernel node launches, as a CUfunction."
    if int(params.func) == 0:
        # cuLibrary kernels (Triton's, cuDNN's) fill ``kern`` instead.
        return check(bindings().cuKernelGetFunction(params.kern))
    return params.func


def parameter_layout(function: Any) -> list[tuple[int, int]]:
    """
    (offset, size) in bytes of each parameter of a kernel.

    The driver API is needed: the runtime API fails for kernels that another library
    loaded.
    """
    cu = bindings()
    layout: list[tuple[int, int]] = []
    while True:
        result = cu.cuFuncGetParamInfo(function, len(layout))
        if result[0] == cu.CUresult.CUDA_ERROR_INVALID_VALUE:
            # Past the last parameter.
            return layout
        layout.append(check(result))


def kernel_parameters(params: Any) -> list[tuple[int, ctypes.Array[Any]]]:
    "(offset in bytes, copy) of each parameter of a kernel node."
    layout = parameter_layout(kernel_function(params))
    if params.kernelParams:
        pointers = ctypes.cast(
            int(params.kernelParams), ctypes.POINTER(ctypes.c_void_p)
        )
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
    return [
        (offset, ctypes.create_string_buffer(ctypes.string_at(address, size), size))
        for address, (offset, size) in zip(addresses, layout)
    ]


def set_kernel_parameters(params: Any, buffers: Sequence[ctypes.Array[Any]]) -> object:
    "Lets a kernel node's parameters be read from buffers, while what it returns is alive."
    pointers = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
    params.kernelParams = ctypes.addressof(pointers)
    params.extra = 0
    return buffers, pointers


def kernel_update(
    executable: Any, node: Any, placeholders: PlaceholderMap
) -> NodeUpdate | None:
    cu = bindings()
    params = check(cu.cuGraphKernelNodeGetParams(node))
    buffers = [buffer for _, buffer in kernel_parameters(params)]
    words = [word for b in buffers for word in find_kernel_words(b, placeholders)]
    if not words:
        return None
    keep = set_kernel_parameters(params, buffers)
    set = cu.cuGraphExecKernelNodeSetParams
    return NodeUpdate(words, set, (executable, node, params), keep)


def read_host_memory(address: int, nbytes: int) -> ctypes.Array[Any]:
    """
    A copy of this process's memory. The source of a captured copy may have been freed
    since, so that it can not be read through a pointer.

    Raises:
        RefusedError: nothing is mapped there.
    """
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            content = os.pread(memory.fileno(), nbytes, address)
    except OSError:
        content = b""
    if len(content) != nbytes:
        raise RefusedError(Reason.of(Code.HOST_COPY_GONE))
    return ctypes.create_string_buffer(content, nbytes)


def struct_buffer(params: Any, nbytes: int) -> ctypes.Array[Any]:
    "The memory of a cuda.bindings struct, in place."
    return (ctypes.c_char * nbytes).from_address(int(params.getPtr()))


def struct_update(
    executable: Any,
    node: Any,
    params: Any,
    words: list[Word],
    set: Callable[..., Any],
) -> NodeUpdate | None:
    "The update of a node whose parameters are one struct, which holds the words itself."
    if not words:
        return None
    context = check(bindings().cuCtxGetCurrent())
    return NodeUpdate(words, set, (executable, node, params, context), None)


# sizeof(CUDA_MEMCPY3D) and sizeof(CUDA_MEMSET_NODE_PARAMS) on 64-bit hosts
MEMCPY_BYTES = 200
MEMSET_BYTES = 40


def memcpy_update(
    executable: Any, node: Any, placeholders: PlaceholderMap
) -> NodeUpdate | None:
    cu = bindings()
    params = check(cu.cuGraphMemcpyNodeGetParams(node))
    if params.srcMemoryType == cu.CUmemorytype.CU_MEMORYTYPE_HOST:
        rows = params.Height * params.Depth
        nbytes = params.srcPitch * (rows - 1) + params.WidthInBytes
        if nbytes <= MAX_HOST_COPY_BYTES:
            host = read_host_memory(int(params.srcHost), nbytes)
            if find_words(host, placeholders):
                raise RefusedError(Reason.of(Code.HOST_COPY_OF_ADDRESS))
    words = find_words(struct_buffer(params, MEMCPY_BYTES), placeholders)
    return struct_update(
        executable, node, params, words, cu.cuGraphExecMemcpyNodeSetParams
    )


def memset_update(
    executable: Any, node: Any, placeholders: PlaceholderMap
) -> NodeUpdate | None:
    cu = bindings()
    params = check(cu.cuGraphMemsetNodeGetParams(node))
    words = find_words(struct_buffer(params, MEMSET_BYTES), placeholders)
    return struct_update(
        executable, node, params, words, cu.cuGraphExecMemsetNodeSetParams
    )


def graph_nodes(graph: Any) -> Iterator[tuple[Any, Any]]:
    "(node, type) of each node of a graph, in the order of their creation."
    cu = bindings()
    _, count = check(cu.cuGraphGetNodes(graph))
    nodes, _ = check(cu.cuGraphGetNodes(graph, count))
    for node in nodes:
        yield node, check(cu.cuGraphNodeGetType(node))


class Nodes:
    """
    The nodes of one executable graph that hold inputs, which now lie at ``pointers``.

    native.compiled.Nodes does the same by the nodes' words, without ``nodes_of``.

    Args:
        nodes_of: for each input the nodes to set when it moves
    """

    def __init__(
        self,
        pointers: list[int],
        updates: list[NodeUpdate],
        nodes_of: list[list[int]],
    ) -> None:
        self.pointers = pointers
        self.updates = updates
        self.nodes_of = nodes_of

    def update(self, pointers: Sequence[int]) -> bool:
        """
        Moves the inputs to new addresses. False if a node refused: the graph must not be
        launched then.
        """
        old = self.pointers
        dirty: set[int] = set()  # noqa: set_linter
        for index, pointer in enumerate(pointers):
            if pointer != old[index]:
                dirty.update(self.nodes_of[index])
        for i in sorted(dirty):
            update = self.updates[i]
            for word in update.words:
                word.value.value = pointers[word.input] + word.offset
            if update.set(*update.args)[0] != 0:
                # Unknown what the graph holds now: no address may count as unchanged.
                self.pointers = [-1] * len(old)
                return False
        self.pointers = list(pointers)
        return True


def compiled_nodes(pointers: list[int], updates: list[NodeUpdate]) -> Any:
    "native.compiled.Nodes of these updates, or None where there is none."
    if native.compiled is None:
        return None
    try:
        set_functions = [entry_point(update.set.__name__) for update in updates]
    except DriverError as e:
        log.info("nodes are set by Python: %s", e)
        return None
    nodes = []
    for set_function, update in zip(set_functions, updates):
        executable, node, params, *context = update.args
        words = [
            (ctypes.addressof(word.value), word.input, word.offset)
            for word in update.words
        ]
        nodes.append(
            (
                set_function,
                int(executable),
                int(node),
                int(params.getPtr()),
                int(context[0]) if context else None,
                words,
            )
        )
    return native.compiled.Nodes(pointers, nodes, updates)


class NodeUpdateBinding:
    """
    The external inputs and outputs of one executable graph, called inputs here: where an
    address is written is the same for either.

    An instantiated graph must not be updated by two threads; trees keep a manager, and so
    its graphs, per thread.
    """

    def __init__(
        self,
        raw_graph: int,
        raw_executable: int,
        placeholders: PlaceholderMap,
        prelude: Prelude | None = None,
    ) -> None:
        """
        Args:
            prelude: what the graph begins with, if it sets nodes itself

        Raises:
            RefusedError: a node may hide an input.
            DriverError: a node's parameters could not be read.
        """
        cu = bindings()
        kind = cu.CUgraphNodeType
        find = {
            kind.CU_GRAPH_NODE_TYPE_KERNEL: kernel_update,
            kind.CU_GRAPH_NODE_TYPE_MEMCPY: memcpy_update,
            kind.CU_GRAPH_NODE_TYPE_MEMSET: memset_update,
        }
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
        self.prelude = prelude
        for node, node_type in graph_nodes(cu.CUgraph(raw_graph)):
            self.num_nodes += 1
            if prelude is not None and int(node) in prelude.nodes:
                continue
            if node_type in find:
                update = find[node_type](executable, node, placeholders)
                if update is not None:
                    self.updates.append(update)
            elif node_type not in no_parameters:
                raise RefusedError(Reason.of(Code.UNKNOWN_NODE, kind=node_type.name))
        pointers = [p.address for p in placeholders.placeholders]
        # For each input the nodes to set when it moves.
        self.nodes_of: list[list[int]] = [[] for _ in pointers]
        for i, update in enumerate(self.updates):
            for index in OrderedSet(word.input for word in update.words):
                self.nodes_of[index].append(i)
        self.nodes = compiled_nodes(pointers, self.updates) or Nodes(
            pointers, self.updates, self.nodes_of
        )

    @property
    def pointers(self) -> list[int]:
        "The addresses that the graph now holds, one for each input."
        return self.nodes.pointers

    def update(self, pointers: Sequence[int]) -> None:
        """
        Moves the inputs to new addresses (bytes, one for each input).

        Raises:
            DriverError: a node refused. The graph must not be launched then.
        """
        if not self.nodes.update(pointers):
            raise DriverError("a node of the graph could not be set")
