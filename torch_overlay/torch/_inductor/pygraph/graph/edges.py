"""The order of a graph's nodes, and how it is changed before the graph is instantiated."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
from torch._inductor.pygraph.graph.driver import bindings, check, edge_data


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# (a node, a node behind it), by handle.
Edge = tuple[int, int]


def capturing_graph(device_index: int | None = None) -> Any:
    """Return the graph that the current stream is captured in."""
    cu = bindings()
    stream = torch.cuda.current_stream(device_index).cuda_stream
    _, _, graph, *_ = check(cu.cuStreamGetCaptureInfo(cu.CUstream(stream)))
    return graph


def count_nodes(graph: Any) -> int:
    _, count = check(bindings().cuGraphGetNodes(graph))
    return count


def chain_of(graph: Any) -> list[Any] | None:
    """Return the nodes of a graph in their order, or None if they are in no row."""
    cu = bindings()
    count = count_nodes(graph)
    nodes, _ = check(cu.cuGraphGetNodes(graph, count))
    by_handle = {int(node): node for node in nodes}
    *_, num_edges = check(cu.cuGraphGetEdges(graph))
    if num_edges != count - 1:
        return None
    before, after, *data, _ = check(cu.cuGraphGetEdges(graph, num_edges))
    # Programmatic edges let a kernel start before the one in front of it has ended.
    if any(int(edge.type) for edge in (data[0] if data else ())):
        return None
    behind = {int(a): int(b) for a, b in zip(before, after)}
    (first, *others) = by_handle.keys() - behind.values() or [None]
    chain: list[Any] = []
    while first is not None and not others:
        chain.append(by_handle[first])
        first = behind.get(first)
    return chain if len(chain) == count else None


def change_edges(graph: Any, nodes: Sequence[Any], added: set[Edge], removed: set[Edge]) -> None:
    """
    Add and remove edges of a graph that is not instantiated.

    Raises:
        DriverError: the graph has more edges than it should have, and none too few.
    """
    cu = bindings()
    by_handle = {int(node): node for node in nodes}
    for change, edges in ((cu.cuGraphAddDependencies, added), (cu.cuGraphRemoveDependencies, removed)):
        if edges:
            before, after = ([by_handle[edge[i]] for edge in sorted(edges)] for i in (0, 1))
            check(change(graph, before, after, *edge_data(), len(edges)))


def remove_nodes(graph: Any, nodes: Iterable[Any]) -> None:
    """
    Remove nodes from a graph that is to be instantiated again. For each removed node, its dependent nodes then depend on
    the nodes that it depended on. Raises DriverError.
    """
    cu = bindings()
    for node in nodes:
        *_, count = check(cu.cuGraphGetEdges(graph))
        froms, tos, *_ = check(cu.cuGraphGetEdges(graph, count)) if count else ((), ())
        edges = {(int(a), int(b)) for a, b in zip(froms, tos)}
        before = [a for a, b in zip(froms, tos) if int(b) == int(node)]
        behind = [b for a, b in zip(froms, tos) if int(a) == int(node)]
        added = [(a, b) for a in before for b in behind if (int(a), int(b)) not in edges]
        if added:
            check(cu.cuGraphAddDependencies(graph, *map(list, zip(*added)), *edge_data(), len(added)))
        check(cu.cuGraphDestroyNode(node))
