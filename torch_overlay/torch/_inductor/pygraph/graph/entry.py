"""
What a library call launches: kernels and memsets, which nodes of other graphs are set to. library.Memo keeps entries.
"""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any, NamedTuple, TYPE_CHECKING

from torch._inductor.pygraph import native
from torch._inductor.pygraph.graph.binding import Word
from torch._inductor.pygraph.graph.driver import bindings, check, entry_point
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch._inductor.pygraph.graph.binding import NodeUpdate
    from torch._inductor.pygraph.graph.captured import CapturedNode


# Of an entry, beside its parameters.
ENTRY_BYTES = 2048

# Driver functions that set a node.
SET_KERNEL = "cuGraphExecKernelNodeSetParams"
SET_MEMSET = "cuGraphExecMemsetNodeSetParams"


class Slot(NamedTuple):
    """
    A word of a node's parameters that holds an address: that of tensor ``tensor`` plus ``delta`` bytes. The word is
    ``offset`` bytes behind the start of parameter ``buffer``.
    """

    buffer: int
    offset: int
    tensor: int
    delta: int


class Source(NamedTuple):
    """Where a call has the address of a tensor: a word plus ``offset``, plus another word if there is a ``plus``."""

    word: int
    offset: int
    plus: int | None


@dataclasses.dataclass(eq=False)
class Form:
    """
    A kernel, and which words of its parameters are addresses of operands or results.

    Attributes:
        is_compared: whether a capture in which these lay elsewhere was compared with a node of this form, byte by byte
        undefined: (buffer, byte) of parameters that the library was seen to leave undefined
    """

    is_compared: bool = False
    undefined: OrderedSet[tuple[int, int]] = dataclasses.field(default_factory=OrderedSet)


class Entry:
    """
    The nodes that a call adds to a graph.

    Attributes:
        slots: for each node the words that hold an address of an operand or a result. Tensors are numbered: first the
            operands, then the results
        graph: owns the nodes
        forms: of the nodes
        addresses: of the tensors at capture
        is_whole: whether there is a word for each operand, and for the first result
        sets: what sets nodes of executable graphs to these, by what identifies the nodes
    """

    # There are as many as sizes and calls, and the collector visits them all.
    __slots__ = ("nodes", "slots", "graph", "forms", "addresses", "is_whole", "sets", "launched")

    def __init__(
        self,
        nodes: tuple[CapturedNode, ...],
        slots: tuple[tuple[Slot, ...], ...],
        graph: torch.cuda.CUDAGraph,
        forms: tuple[Form, ...],
        addresses: tuple[int, ...],
        is_whole: bool,
    ) -> None:
        self.nodes = nodes
        self.slots = slots
        self.graph = graph
        self.forms = forms
        self.addresses = addresses
        self.is_whole = is_whole
        self.sets: dict[int, Any] = {}
        # As compiled code takes the nodes.
        self.launched: list[tuple[Any, ...]] = []

    @property
    def is_compared(self) -> bool:
        """Whether nothing in it is new. A call that does not read or write a tensor may leave that to another one."""
        return self.is_whole and all(form.is_compared for form in self.forms)

    @property
    def kinds(self) -> list[Any]:
        return [node.kind for node in self.nodes]

    @property
    def nbytes(self) -> int:
        return ENTRY_BYTES + sum(len(content) for node in self.nodes for content in node.captured)

    def updates(self, executable: Any, nodes: Sequence[Any], sources: Sequence[Source | None]) -> list[NodeUpdate]:
        """
        Return what sets nodes of an executable graph to what the call launches. Results that the function does not use
        have no source: they stay where the memo has them.
        """
        updates = []
        for node, launched, slots in zip(nodes, self.nodes, self.slots, strict=True):
            # Others share the entry.
            held = launched.copied()
            words = [
                Word(source.word, source.offset + slot.delta, _word(held, slot), source.plus)
                for slot in slots
                if (source := sources[slot.tensor]) is not None
            ]
            updates.append(held.update(executable, node, words))
        return updates

    def compiled(self, executable: Any, nodes: Sequence[Any], sources: Sequence[Source | None]) -> Any:
        """Return native.compiled.NodeSet of ``updates``. Raises DriverError if the driver lacks a function."""
        self.launched = self.launched or [*map(_launched, self.nodes, self.slots)]
        return native.compiled.NodeSet(self.launched, int(executable), [*map(int, nodes)], sources, self.graph)


def _launched(node: CapturedNode, slots: Sequence[Slot]) -> tuple[Any, ...]:
    if node.is_kernel:
        return entry_point(SET_KERNEL), node.struct, node.captured, None, slots
    context = int(check(bindings().cuCtxGetCurrent()))
    return entry_point(SET_MEMSET), node.struct, (), context, slots


def _word(node: CapturedNode, slot: Slot) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_buffer(node.buffers[slot.buffer], slot.offset)


def form_key(node: CapturedNode, slots: Sequence[Slot]) -> tuple[Any, ...]:
    """Return what identifies a form."""
    words = tuple((slot.buffer, slot.offset) for slot in slots)
    return node.launch, node.attributes, tuple(map(len, node.captured)), words
