"""
Whether a bound graph launches what the function launches in the same call.

Equal results prove a graph. Where atomic additions add in another order in each run, results are close at best. The
function is then captured once more, with inputs and outputs where the call has them, and the nodes are compared. A
node of the graph, set to the addresses of the call, has to launch the same kernel with the same parameters. Only
addresses of intermediate results differ: each capture has memory of its own.

Libraries leave some bytes of parameters undefined. Such bytes hold what the stack held before, so that they may differ
between two captures. Two further captures tell them from addresses. Both run on a stack of the same content. One has the inputs
and outputs where the call has them, and the other has them at the placeholders. A word that is the same in both does not depend
on these addresses. No kernel reads half an address: the other half was overwritten, so that the word is undefined, too.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple, TYPE_CHECKING

import torch
from torch._inductor import cudagraph_trees
from torch._inductor.pygraph.capture.allocation import Copied, placed_allocator, with_allocator
from torch._inductor.pygraph.capture.compared import differences, is_same_launch, on_other_stack
from torch._inductor.pygraph.capture.library import cublas_workspaces, Scratch
from torch._inductor.pygraph.graph import binding
from torch._inductor.pygraph.graph.captured import PLAIN_EDGE, read_copy, read_node
from torch._inductor.pygraph.graph.copies import replace_copies
from torch._inductor.pygraph.graph.driver import bindings, DriverError
from torch._inductor.pygraph.graph.memory import PoolRanges
from torch._inductor.pygraph.graph.placeholder import storage_extent
from torch._inductor.pygraph.types.reason import RefusedError
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from torch._inductor.cudagraph_utils import ModelType
    from torch._inductor.pygraph.capture.allocation import BoundMemory
    from torch._inductor.pygraph.capture.compared import Difference
    from torch._inductor.pygraph.graph.captured import CapturedNode
    from torch._inductor.pygraph.types.function import FunctionSpec
    from torch._inductor.utils import InputType

# The content of the stack for these two captures.
FILL = 0x5A


def adds_atomically(spec: FunctionSpec) -> bool:
    """Return whether a Triton kernel of a function has atomic additions."""
    kernels = (spec.objects[name] for name in spec.info.kernels)
    return any(getattr(kernel, "inductor_meta", {}).get("atomic_add_found") for kernel in kernels)


def nodes_of(graph: torch.cuda.CUDAGraph) -> list[CapturedNode]:
    """Raises RefusedError: one is neither a kernel, a memset nor a copy."""
    copy = bindings().CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY
    nodes = binding.graph_nodes(bindings().CUgraph(graph.raw_cuda_graph()))
    return [read_copy(node) if kind == copy else read_node(node, kind, PLAIN_EDGE) for node, kind in nodes]


class _Memory(NamedTuple):
    """Memory as (start, end) addresses, which may overlap."""

    ranges: list[tuple[int, int]]

    def __contains__(self, address: object) -> bool:
        return any(start <= address < end for start, end in self.ranges)  # type: ignore[operator]


def _other_launch(nodes: Sequence[CapturedNode], others: Sequence[CapturedNode]) -> str | None:
    """Return how nodes launch other kernels than those of another capture, or None."""
    if len(nodes) != len(others):
        return f"{len(nodes)} nodes, not {len(others)}"
    pairs = ((node, other) for node, other in zip(nodes, others) if not is_same_launch(node, other))
    return next((f"{node} is launched as {other}" for node, other in pairs), None)


def _words(
    nodes: Sequence[CapturedNode],
    others: Sequence[CapturedNode],
    own: Container[int],
    of_others: Container[int],
) -> Iterator[Difference]:
    """Yield the words in which nodes differ from those of another capture. Each has addresses of memory of its own."""

    def expected(buffer: int, offset: int, value: int, found: int) -> int:
        return found if value in own and found in of_others else value

    for k, (node, other) in enumerate(zip(nodes, others)):
        yield from differences(k, node, other, expected)


class Again:
    """
    Captures a function where its ``inputs`` lie in a call, and at placeholders, where they are ``placed``. ``memory`` has
    placeholders for ``tensors``.
    """

    def __init__(
        self,
        model: ModelType,
        spec: FunctionSpec,
        inputs: list[InputType],
        placed: list[InputType],
        memory: BoundMemory,
        tensors: Sequence[torch.Tensor],
        scratch: Scratch,
    ) -> None:
        self.model, self.spec, self.inputs, self.placed = model, spec, inputs, placed
        self.memory, self.scratch = memory, scratch
        self.addresses = [t.data_ptr() for t in tensors]
        self.bound = _Memory([(t.data_ptr(), t.data_ptr() + storage_extent(t)) for t in tensors])

    def _call_address(self, placeholder: int) -> int:
        k, offset = self.memory.placeholders.find(placeholder)  # type: ignore[misc]
        return self.addresses[k] + offset

    def _moved(self, node: CapturedNode) -> CapturedNode:
        """Return a captured node as the binding sets it in the call."""
        node = node.copied()
        for buffer in node.buffers:
            for word in binding.find_words(buffer, self.memory.placeholders):
                word.write(self.addresses)
        return dataclasses.replace(node, captured=tuple(map(bytes, node.buffers)))

    def _capture(self, byte: int | None = None, *, is_placed: bool = False) -> tuple[list[CapturedNode], PoolRanges]:
        """
        Capture the function with its inputs and outputs at the placeholders, if ``is_placed``, or where the call has them.
        Fill the stack with ``byte`` before. Return the nodes, and the memory of the capture.
        """
        device = self.scratch.device
        allocations, copies = self.memory.allocations, self.memory.copies
        if not is_placed:
            allocations = {n: (nbytes, self._call_address(a)) for n, (nbytes, a) in allocations.items()}
            copies = {i: (copy, self._call_address(a)) for i, (copy, a) in copies.items()}
        pool = torch.cuda.graph_pool_handle()
        model = with_allocator(self.model, self.spec.info, placed_allocator(allocations, device))
        run = functools.partial(Copied(model, copies, device), [*(self.placed if is_placed else self.inputs)])
        if byte is not None:
            run = functools.partial(on_other_stack, byte, run)
        with cudagraph_trees.preserve_rng_state(), cublas_workspaces():
            graph, outputs = self.scratch.capture(run, pool)
        # Kernels also make these copies in the graph.
        replace_copies(graph.raw_cuda_graph(), self.memory.placeholders if is_placed else self.bound, device)
        # While the outputs are alive, the pool has its memory.
        found = nodes_of(graph), PoolRanges(pool)
        del outputs
        return found

    def _moved_buffers(
        self, nodes: Sequence[CapturedNode], others: Sequence[CapturedNode], own: Container[int], of_others: Container[int]
    ) -> list[tuple[int, int]]:
        """Return pairs of addresses of the same buffer: in the capture of ``others``, and in that of ``nodes``."""
        bound = zip(self.addresses, (p.address for p in self.memory.placeholders.placeholders))
        pairs = OrderedSet(
            (found, value)
            for node, other in zip(nodes, others)
            for (_, _, value), (_, _, found) in zip(node.words(), other.words())
            if value in own and found in of_others
        )
        return [*bound, *pairs]

    def _that_move(self, found: list[Difference]) -> list[Difference]:
        """Return those of the words ``found`` that may hold an address. Raises RefusedError."""
        filled, filled_pool = self._capture(FILL)
        placed, placed_pool = self._capture(FILL, is_placed=True)
        placed = [*map(self._moved, placed)]
        if _other_launch(placed, filled) is not None:
            return found
        moving = OrderedSet(word.place for word in _words(placed, filled, placed_pool, filled_pool))
        # A library may have allocated memory for the graph's capture alone, and freed it since.
        return [word for word in found if word.place in moving or word.expects_memory()]

    def difference(self, graph: torch.cuda.CUDAGraph, own: Container[int], added: int) -> str | None:
        """
        Return how the graph's nodes, without those ``added`` to it, differ from what the function launches, or None.
        Addresses in ``own`` are of its memory.
        """
        try:
            nodes = nodes_of(graph)
            nodes = [*map(self._moved, nodes[: len(nodes) - added])]
            expected, pool = self._capture()
            if (other := _other_launch(nodes, expected)) is not None:
                return other
            found = [*_words(nodes, expected, own, pool)]
            if found:
                found = self._that_move(found)
            # Few words are left. Each is compared with the addresses of all buffers.
            moved = self._moved_buffers(nodes, expected, own, pool) if found else []
            found = [word for word in found if not (word.is_of_host() or word.has_halves(moved))]
        except (RefusedError, DriverError) as e:
            return str(e)
        if not found:
            return None
        word = found[0]
        where = f"parameter {word.buffer} of {nodes[word.node]} from byte {word.offset}"
        return f"{len(found)} words differ, first in {where}: {word.found.hex()}, not {word.expected.hex()}"
