"""
IF/ELSE nodes, by which a graph branches on a bool in device memory.

A kernel in front of the node sets the condition. Each path is captured into a graph that the node owns. The nodes of
these graphs are set by the executable graph of the outermost graph.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor.pygraph.graph.binding import kernel_parameters, set_kernel_parameters
from torch._inductor.pygraph.graph.driver import bindings, check
from torch._inductor.pygraph.graph.prelude import branch_kernel


if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclasses.dataclass(frozen=True, eq=False)
class ConditionalNode:
    """
    Attributes:
        setter: the kernel that sets the condition
        predicate: the address that it was captured with
        bodies: the graph of the path for true, then for false
    """

    node: Any
    setter: Any
    predicate: int
    bodies: tuple[Any, Any]


def _edge_data() -> list[None]:
    """Return what driver calls take for edges since CUDA 13."""
    return [None] if bindings().CUDA_VERSION >= 13000 else []


def add_conditional(predicate: int, device_index: int) -> ConditionalNode:
    """Add an IF/ELSE node to the graph that the current stream is captured in. ``predicate``: the address of a bool."""
    cu = bindings()
    stream = cu.CUstream(torch.cuda.current_stream(device_index).cuda_stream)
    _, _, graph, behind, *_ = check(cu.cuStreamGetCaptureInfo(stream))
    context = check(cu.cuCtxGetCurrent())
    handle = check(cu.cuGraphConditionalHandleCreate(graph, context, 0, 0))
    kernel = cu.CUDA_KERNEL_NODE_PARAMS()
    kernel.func = branch_kernel(device_index)
    kernel.gridDimX = kernel.gridDimY = kernel.gridDimZ = 1
    kernel.blockDimX = kernel.blockDimY = kernel.blockDimZ = 1
    # The node has a copy of what is kept here until it is added.
    keep = set_kernel_parameters(kernel, [ctypes.c_uint64(int(handle)), ctypes.c_uint64(predicate)])  # type: ignore[list-item]
    setter = check(cu.cuGraphAddKernelNode(graph, behind, len(behind), kernel))
    del keep
    params = cu.CUgraphNodeParams()
    params.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    params.conditional.handle = handle
    params.conditional.type = cu.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_IF
    params.conditional.size = 2
    params.conditional.ctx = context
    data = _edge_data()
    node = check(cu.cuGraphAddNode(graph, [setter], *data, 1, params))
    bodies = tuple(cu.CUgraph(int(body)) for body in params.conditional.phGraph_out)
    flag = cu.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
    check(cu.cuStreamUpdateCaptureDependencies(stream, [node], *data, 1, int(flag)))
    return ConditionalNode(node, setter, predicate, bodies)  # type: ignore[arg-type]


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


def set_predicate(executable: Any, conditional: ConditionalNode, address: int) -> None:
    """Let an executable graph branch on another bool. Raises DriverError: the node refused."""
    cu = bindings()
    params = check(cu.cuGraphKernelNodeGetParams(conditional.setter))
    buffers = [buffer for _, buffer in kernel_parameters(params)]
    ctypes.c_uint64.from_buffer(buffers[1]).value = address
    keep = set_kernel_parameters(params, buffers)
    status = cu.cuGraphExecKernelNodeSetParams(executable, conditional.setter, params)
    del keep
    check(status)
