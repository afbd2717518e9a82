"""
What the nodes of a captured graph may use, from the addresses among their parameters. An address that lies in none of
the tensors that generated code declares stands for memory of the operator's own, such as a workspace: all that may
begin there.
"""

from __future__ import annotations

import bisect
from typing import Any, TYPE_CHECKING

from torch._inductor.pygraph.graph import binding
from torch._inductor.pygraph.graph.driver import bindings, check


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch._inductor.pygraph.graph.memory import PoolRanges
    from torch._inductor.pygraph.graph.placeholder import PlaceholderMap

Range = tuple[int, int]


def words_of(node: Any) -> list[int] | None:
    """Return the aligned words among a node's parameters, or None if they do not tell what it uses."""
    cu = bindings()
    kinds = cu.CUgraphNodeType
    kind = check(cu.cuGraphNodeGetType(node))
    if kind == kinds.CU_GRAPH_NODE_TYPE_EMPTY:
        return []
    if kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL:
        params = check(cu.cuGraphKernelNodeGetParams(node))
        buffers = [buffer for _, buffer in binding.kernel_parameters(params)]
        if not buffers and binding.parameter_layout(binding.kernel_function(params)):
            return None
    elif kind == kinds.CU_GRAPH_NODE_TYPE_MEMSET:
        params = check(cu.cuGraphMemsetNodeGetParams(node))
        buffers = [binding.struct_buffer(params, binding.MEMSET_BYTES)]
    elif kind == kinds.CU_GRAPH_NODE_TYPE_MEMCPY:
        params = check(cu.cuGraphMemcpyNodeGetParams(node))
        buffers = [binding.struct_buffer(params, binding.MEMCPY_BYTES)]
    else:
        return None
    return [word for buffer in buffers for word in binding.aligned_words(buffer)]


class Memory:
    """What else may lie at an address, in the ``pool`` of the function, at ``placeholders``, or elsewhere."""

    def __init__(self, pool: PoolRanges, placeholders: PlaceholderMap) -> None:
        self.pool = pool
        self.placeholders = placeholders
        # Of addresses outside of the pool and the placeholders.
        self.known: dict[int, Range | None] = {}

    def around(self, address: int, live: Iterable[Range]) -> Range | None:
        """Return the memory that may belong to what lies at an address, None if it is none. ``live`` is allocated."""
        if (hit := self.placeholders.find(address)) is not None:
            placeholder = self.placeholders.placeholders[hit[0]]
            return placeholder.start, placeholder.end
        if (segment := self.pool.find(address)) is not None:
            return _between(address, segment, live)
        if address not in self.known:
            self.known[address] = _allocation(address)
        return self.known[address]


def _between(address: int, segment: Range, live: Iterable[Range]) -> Range:
    """Return the tensor that an address lies in, or the memory up to the next ones."""
    start, end = segment
    for low, high in live:
        if low <= address < high:
            return low, high
        if high <= address:
            start = max(start, high)
        else:
            end = min(end, low)
    return start, end


def _allocation(address: int) -> Range | None:
    """Return the driver's allocation that an address lies in."""
    cu = bindings()
    attributes = cu.CUpointer_attribute
    found = []
    for attribute in (
        attributes.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        attributes.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
    ):
        status, value = cu.cuPointerGetAttribute(attribute, address)
        if int(status) != 0:
            return None
        found.append(int(value))
    start, nbytes = found
    return (start, start + nbytes) if nbytes else None


def undeclared(nodes: Sequence[Any], declared: Sequence[Range], memory: Memory, live: Iterable[Range]) -> set[Range] | None:
    """Return what the nodes of a call may use besides what it declares, or None if that is not known."""
    found: set[Range] = set()
    # Disjoint, so that one comparison tells.
    starts, ends = zip(*_merged(declared)) if declared else ((), ())
    for node in nodes:
        words = words_of(node)
        if words is None:
            return None
        for word in words:
            at = bisect.bisect_right(starts, word) - 1
            if word and (at < 0 or word >= ends[at]):
                if (around := memory.around(word, live)) is not None:
                    found.add(around)
    return found


def _merged(ranges: Iterable[Range]) -> list[Range]:
    merged: list[Range] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged
