"""What a library call launches, as library.Memo keeps it."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, TYPE_CHECKING


if TYPE_CHECKING:
    import torch
    from torch._inductor.pygraph.graph.captured import CapturedNode


# Of an entry, beside its parameters.
ENTRY_BYTES = 2048


class Slot(NamedTuple):
    """The first bytes of an operand, or of a result, for the place of a word."""

    buffer: int
    offset: int
    tensor: int
    delta: int


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """
    What a call launches. For each node, ``slots`` are the words that hold the address of an operand or of a result.
    Results are counted behind the operands. The graph keeps the nodes.
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
