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
from torch._inductor.pygraph.graph.parameters import (
    find_kernel_words,
    find_words,
    graph_nodes,
    kernel_parameters,
    set_kernel_parameters,
    Word,
)
from torch._inductor.pygraph.types.reason import Code, Reason, RefusedError
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._inductor.pygraph.graph.placeholder import PlaceholderMap
    from torch._inductor.pygraph.graph.prelude import Prelude


log = logging.getLogger(__name__)

# Parameters that a kernel reads from memory are out of reach. What is copied from the
# host during capture is looked at up to this size: arrays of pointers are smaller.
MAX_HOST_COPY_BYTES = 1 << 20


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
