"""The kernels and memsets of a library call, which library.Memo keeps."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, TYPE_CHECKING


if TYPE_CHECKING:
    import torch
    from torch._inductor.pygraph.graph.captured import CapturedNode


# Of an entry, beside its parameters.
ENTRY_BYTES = 2048


class Slot(NamedTuple):
    """
    A word of a node's parameters that holds an address: that of tensor ``tensor`` plus ``delta`` bytes. The word is
    ``offset`` bytes behind the start of parameter ``buffer``.
    """

    buffer: int
    offset: int
    tensor: int
    delta: int


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """
    The nodes that a call adds to a graph. ``slots`` has for each node the words that hold an address of an operand or a
    result. Tensors are numbered: first the operands, then the results. ``graph`` owns the nodes.
    """

    nodes: tuple[CapturedNode, ...]
    slots: tuple[tuple[Slot, ...], ...]
    graph: torch.cuda.CUDAGraph

    @property
    def kinds(self) -> list[Any]:
        return [node.kind for node in self.nodes]

    @property
    def nbytes(self) -> int:
        return ENTRY_BYTES + sum(len(content) for node in self.nodes for content in node.captured)
