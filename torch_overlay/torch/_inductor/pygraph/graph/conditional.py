"""
IF/ELSE and WHILE nodes, by which a graph branches on a bool in device memory.

A kernel in front of the node sets the condition, and one at the end of a loop's body. Each path is captured into a
graph that the node owns. The nodes of these graphs are set by the executable graph of the outermost graph.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch._inductor.pygraph.graph.binding import add_kernel, kernel_parameters, set_kernel_parameters
from torch._inductor.pygraph.graph.driver import bindings, check, edge_data
from torch._inductor.pygraph.graph.prelude import branch_kernel


if TYPE_CHECKING:
    from collections.abc import Iterator


class Setter(NamedTuple):
    """The kernel that sets a condition, and the address of the bool that it was captured with."""

    node: Any
    predicate: int


@dataclasses.dataclass(frozen=True, eq=False)
class ConditionalNode:
    """
    Attributes:
        handle: of the condition
        setters: the one in front of the node. A loop's body adds one
        bodies: the graph of the path for true, then for false, or the body of a loop
    """

    node: Any
    handle: Any
    setters: list[Setter]
    bodies: tuple[Any, ...]


def add_conditional(predicate: int, device_index: int, *, is_loop: bool = False) -> ConditionalNode:
    """
    Add an IF/ELSE or a WHILE node to the graph that the current stream is captured in.

    Args:
        predicate: the address of a bool
    """
    cu = bindings()
    _, graph, _ = _captured(device_index)
    context = check(cu.cuCtxGetCurrent())
    handle = check(cu.cuGraphConditionalHandleCreate(graph, context, 0, 0))
    setter = add_setter(predicate, handle, device_index)
    kinds = cu.CUgraphConditionalNodeType
    params = cu.CUgraphNodeParams()
    params.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    params.conditional.handle = handle
    params.conditional.type = kinds.CU_GRAPH_COND_TYPE_WHILE if is_loop else kinds.CU_GRAPH_COND_TYPE_IF
    params.conditional.size = 1 if is_loop else 2
    params.conditional.ctx = context
    node = check(cu.cuGraphAddNode(graph, [setter.node], *edge_data(), 1, params))
    bodies = tuple(cu.CUgraph(int(body)) for body in params.conditional.phGraph_out)
    _continue_behind(node, device_index)
    return ConditionalNode(node, handle, [setter], bodies)


def add_setter(predicate: int, handle: Any, device_index: int) -> Setter:
    """Add a kernel that sets a condition to the graph that the current stream is captured in."""
    _, graph, behind = _captured(device_index)
    buffers = [ctypes.c_uint64(int(handle)), ctypes.c_uint64(predicate)]
    node = add_kernel(graph, behind, branch_kernel(device_index), buffers)
    _continue_behind(node, device_index)
    return Setter(node, predicate)


def _captured(device_index: int) -> tuple[Any, Any, list[Any]]:
    """Return the current stream, the graph that it is captured in, and the nodes that the next one is behind."""
    cu = bindings()
    stream = cu.CUstream(torch.cuda.current_stream(device_index).cuda_stream)
    _, _, graph, behind, *_ = check(cu.cuStreamGetCaptureInfo(stream))
    return stream, graph, behind


def _continue_behind(node: Any, device_index: int) -> None:
    cu = bindings()
    stream, *_ = _captured(device_index)
    flag = cu.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
    check(cu.cuStreamUpdateCaptureDependencies(stream, [node], *edge_data(), 1, int(flag)))


@functools.cache
def side_stream(device_index: int, depth: int, thread: int) -> torch.cuda.Stream:
    """Return a stream that nothing else runs on, for a thread to capture paths inside of ``depth`` other ones."""
    cu = bindings()
    flag = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
    return torch.cuda.ExternalStream(int(check(cu.cuStreamCreate(int(flag)))), device=device_index)


@contextlib.contextmanager
def captured_into(body: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """A context in which ``stream`` is current and captured into the graph of a path."""
    cu = bindings()
    raw = cu.CUstream(stream.cuda_stream)
    mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    check(cu.cuStreamBeginCaptureToGraph(raw, body, [], [], 0, mode))
    try:
        with torch.cuda.stream(stream):
            yield
    except BaseException:
        # The error is that of the path.
        cu.cuStreamEndCapture(raw)
        raise
    check(cu.cuStreamEndCapture(raw))


def set_predicate(executable: Any, setter: Setter, address: int) -> None:
    """Let an executable graph branch on another bool. Raises DriverError: the node refused."""
    cu = bindings()
    params = check(cu.cuGraphKernelNodeGetParams(setter.node))
    buffers = [buffer for _, buffer in kernel_parameters(params)]
    ctypes.c_uint64.from_buffer(buffers[1]).value = address
    keep = set_kernel_parameters(params, buffers)
    status = cu.cuGraphExecKernelNodeSetParams(executable, setter.node, params)
    del keep
    check(status)
