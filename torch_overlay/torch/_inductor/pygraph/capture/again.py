"""
Whether a bound graph launches what the function launches in the same call.

Equal results prove a graph. Where atomic additions add in another order in each run, results are close at best. The
function is then captured once more, with inputs and outputs where the call has them, and the nodes are compared. A
node of the graph, set to the addresses of the call, has to launch the same kernel with the same parameters. Only
addresses of intermediate results differ: each capture has memory of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor import cudagraph_trees
from torch._inductor.pygraph.capture.allocation import Copied, placed_allocator, with_allocator
from torch._inductor.pygraph.capture.compared import differences, is_same_launch, on_other_stack
from torch._inductor.pygraph.capture.library import cublas_workspaces, Scratch
from torch._inductor.pygraph.graph import binding
from torch._inductor.pygraph.graph.captured import PLAIN_EDGE, read_node
from torch._inductor.pygraph.graph.driver import bindings, DriverError
from torch._inductor.pygraph.graph.memory import PoolRanges
from torch._inductor.pygraph.types.reason import RefusedError
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from torch._inductor.cudagraph_utils import ModelType
    from torch._inductor.pygraph.capture.allocation import BoundMemory
    from torch._inductor.pygraph.capture.compared import Difference
    from torch._inductor.pygraph.graph.captured import CapturedNode
    from torch._inductor.pygraph.types.function import FunctionSpec
    from torch._inductor.utils import InputType


def adds_atomically(spec: FunctionSpec) -> bool:
    """Return whether a Triton kernel of a function has atomic additions."""
    kernels = (spec.objects[name] for name in spec.info.kernels)
    return any(getattr(kernel, "inductor_meta", {}).get("atomic_add_found") for kernel in kernels)


def nodes_of(graph: torch.cuda.CUDAGraph) -> list[CapturedNode]:
    """Raises RefusedError: one is neither a kernel nor a memset."""
    raw = bindings().CUgraph(graph.raw_cuda_graph())
    return [read_node(node, kind, PLAIN_EDGE) for node, kind in binding.graph_nodes(raw)]


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
    """Captures a function where its ``inputs`` lie in a call. ``memory`` has placeholders for ``tensors``."""

    def __init__(
        self,
        model: ModelType,
        spec: FunctionSpec,
        inputs: list[InputType],
        memory: BoundMemory,
        tensors: Sequence[torch.Tensor],
        scratch: Scratch,
    ) -> None:
        self.model, self.spec, self.inputs = model, spec, inputs
        self.memory, self.scratch = memory, scratch
        self.addresses = [t.data_ptr() for t in tensors]

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

    def _capture(self, run_on: Callable[[Callable[[], Any]], Any]) -> tuple[list[CapturedNode], PoolRanges]:
        device = self.scratch.device
        allocations = {n: (nbytes, self._call_address(a)) for n, (nbytes, a) in self.memory.allocations.items()}
        copies = {i: (copy, self._call_address(a)) for i, (copy, a) in self.memory.copies.items()}
        pool = torch.cuda.graph_pool_handle()
        model = with_allocator(self.model, self.spec.info, placed_allocator(allocations, device))
        run = functools.partial(Copied(model, copies, device), [*self.inputs])
        with cudagraph_trees.preserve_rng_state(), cublas_workspaces():
            graph, outputs = self.scratch.capture(functools.partial(run_on, run), pool)
        # While the outputs are alive, the pool has its memory.
        found = nodes_of(graph), PoolRanges(pool)
        del outputs
        return found

    def difference(self, graph: torch.cuda.CUDAGraph, own: Container[int], added: int) -> str | None:
        """
        Return how the graph's nodes, without those ``added`` to it, differ from what the function launches, or None.
        Addresses in ``own`` are of its memory.
        """
        try:
            nodes = nodes_of(graph)
            nodes = [*map(self._moved, nodes[: len(nodes) - added])]
            expected, pool = self._capture(lambda run: run())
            if len(nodes) != len(expected):
                return f"{len(nodes)} nodes, not {len(expected)}"
            for node, other in zip(nodes, expected):
                if not is_same_launch(node, other):
                    return f"{node} is launched as {other}"
            found = [*_words(nodes, expected, own, pool)]
            for byte in (0x5A, 0xA5) if found else ():
                # Libraries leave some bytes of parameters undefined. These hold what the stack held before.
                again, other_pool = self._capture(functools.partial(on_other_stack, byte))
                undefined = OrderedSet(
                    place for word in _words(again, expected, other_pool, pool) for place in word.places()
                )
                found = [word for word in found if not (undefined.issuperset(word.places()) or word.is_of_host())]
        except (RefusedError, DriverError) as e:
            return str(e)
        if not found:
            return None
        word = found[0]
        where = f"parameter {word.buffer} of {nodes[word.node]} from byte {word.offset}"
        return f"{len(found)} words differ, first in {where}: {word.found.hex()}, not {word.expected.hex()}"
