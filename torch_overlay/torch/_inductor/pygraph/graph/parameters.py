"""
The parameters of the nodes of a captured graph, and the words in them that hold an address.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, TYPE_CHECKING

from torch._inductor.pygraph.graph.driver import bindings, check
from torch._inductor.pygraph.types.reason import Code, Reason, RefusedError


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch._inductor.pygraph.graph.placeholder import PlaceholderMap


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


def graph_nodes(graph: Any) -> Iterator[tuple[Any, Any]]:
    "(node, type) of each node of a graph, in the order of their creation."
    cu = bindings()
    _, count = check(cu.cuGraphGetNodes(graph))
    nodes, _ = check(cu.cuGraphGetNodes(graph, count))
    for node in nodes:
        yield node, check(cu.cuGraphNodeGetType(node))


class Write(NamedTuple):
    """
    The address of an input plus ``delta`` goes to ``target``: a slot, or a device-updatable
    node, at ``offset`` bytes of its parameters. ``offset`` is SLOT for a slot.
    """

    input: int
    delta: int
    target: int
    offset: int


SLOT = -1


class ReadParameters(NamedTuple):
    """A captured kernel node: the parameters that are read, and what each holds."""

    node: Any
    params: Any
    # (offset in bytes, value) of each parameter.
    parameters: list[tuple[int, ctypes.Array[Any]]]
    # (parameter, offset in it, input, delta) of each word.
    words: list[tuple[int, int, int, int]]


def kernels_that_read(
    graph: Any, placeholders: PlaceholderMap
) -> Iterator[ReadParameters]:
    """
    The kernel nodes whose parameters hold an input.

    Raises:
        RefusedError: see find_kernel_words.
    """
    cu = bindings()
    for node, node_type in graph_nodes(graph):
        if node_type != cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            continue
        params = check(cu.cuGraphKernelNodeGetParams(node))
        parameters = kernel_parameters(params)
        words = [
            (
                i,
                ctypes.addressof(word.value) - ctypes.addressof(buffer),
                word.input,
                word.offset,
            )
            for i, (_, buffer) in enumerate(parameters)
            for word in find_kernel_words(buffer, placeholders)
        ]
        if words:
            yield ReadParameters(node, params, parameters, words)
