"""
Copies of inputs and outputs by kernels.

Operators copy memory by copy nodes: addmm copies a matrix to its result. The driver refuses to move the ends of a copy
node from a placeholder to other memory. So a kernel takes the place of the node before the graph is instantiated.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
from typing import Any, NamedTuple, TYPE_CHECKING

from torch._inductor.pygraph.graph.binding import add_kernel, graph_nodes
from torch._inductor.pygraph.graph.driver import bindings, check, edge_data
from torch._inductor.pygraph.graph.prelude import copy_kernel, PreludeUnavailable


if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence


log = logging.getLogger(__name__)

# Of a block, and blocks. A thread copies 16 bytes at a time.
THREADS = 256
MAX_BLOCKS = 2048


class Row(NamedTuple):
    to: int
    source: int
    nbytes: int


def replace_copies(
    raw_graph: int, bound: Container[int], device_index: int, bodies: Mapping[int, Sequence[Any]] = {}
) -> None:
    """
    Let kernels make the copies of a graph from inputs and to outputs. The graph is not instantiated.

    Args:
        bound: addresses of inputs and outputs
        bodies: see graph_nodes

    Raises:
        DriverError: the graph is of no use.
    """
    cu = bindings()
    for graph in (cu.CUgraph(raw_graph), *itertools.chain.from_iterable(bodies.values())):
        for node, kind in [*graph_nodes(graph)]:
            if kind != cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY or (row := _row(node, bound)) is None:
                continue
            try:
                kernel = copy_kernel(device_index)
            except PreludeUnavailable as e:
                log.info("copy nodes stay: %s", e)
                return
            _replace(graph, node, kernel, row)


def _row(node: Any, bound: Container[int]) -> Row | None:
    """Return what a copy node copies if an end of it is bound, and it is one row of device memory."""
    cu = bindings()
    params = check(cu.cuGraphMemcpyNodeGetParams(node))
    device = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE, cu.CUmemorytype.CU_MEMORYTYPE_UNIFIED
    if not {params.srcMemoryType, params.dstMemoryType} <= {*device}:
        return None
    # A copy without rows copies nothing. A later row begins at another address.
    later = params.srcY, params.srcZ, params.dstY, params.dstZ
    if (params.Height, params.Depth) != (1, 1) or any(later):
        return None
    if not (int(params.dstDevice) in bound or int(params.srcDevice) in bound):
        return None
    to, source = int(params.dstDevice) + params.dstXInBytes, int(params.srcDevice) + params.srcXInBytes
    return Row(to, source, params.WidthInBytes)


def _replace(graph: Any, node: Any, kernel: Any, row: Row) -> None:
    cu = bindings()
    *_, count = check(cu.cuGraphGetEdges(graph))
    froms, tos, *_ = check(cu.cuGraphGetEdges(graph, count)) if count else ((), ())
    before = [a for a, b in zip(froms, tos) if int(b) == int(node)]
    behind = [b for a, b in zip(froms, tos) if int(a) == int(node)]
    blocks = max(1, min(MAX_BLOCKS, -(-row.nbytes // (16 * THREADS))))
    new = add_kernel(graph, before, kernel, [*map(ctypes.c_uint64, row)], blocks, THREADS)
    if behind:
        check(cu.cuGraphAddDependencies(graph, [new] * len(behind), behind, *edge_data(), len(behind)))
    check(cu.cuGraphDestroyNode(node))
