"""
What a library call launches: kernels and memsets, which nodes of other graphs are set to. library.Memo keeps entries.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import Any, NamedTuple, TYPE_CHECKING

from torch._inductor.pygraph import native
from torch._inductor.pygraph.graph.binding import MEMSET_BYTES, struct_buffer, Word
from torch._inductor.pygraph.graph.captured import KERNEL_BYTES
from torch._inductor.pygraph.graph.driver import entry_point


if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch._inductor.pygraph.graph.binding import NodeUpdate
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


class Source(NamedTuple):
    """Where a call has the address of a tensor: a word plus ``offset``, plus another word if there is a ``plus``."""

    word: int
    offset: int
    plus: int | None


@dataclasses.dataclass(eq=False)
class Form:
    """
    An operator, its kernels, and which words of their parameters are addresses. ``is_compared``: a capture in which the
    operands lay elsewhere was compared with an entry of this form, byte by byte.
    """

    is_compared: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """
    The nodes that a call adds to a graph. ``slots`` has for each node the words that hold an address of an operand or a
    result. Tensors are numbered: first the operands, then the results. ``addresses`` are theirs at capture. ``graph`` owns
    the nodes.
    """

    nodes: tuple[CapturedNode, ...]
    slots: tuple[tuple[Slot, ...], ...]
    graph: torch.cuda.CUDAGraph
    form: Form
    addresses: tuple[int, ...]

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
        return native.compiled.NodeSet(self._described, int(executable), [*map(int, nodes)], sources, self)

    @functools.cached_property
    def _described(self) -> list[tuple[Any, ...]]:
        """The nodes, as compiled code takes them."""
        described = []
        for node, slots in zip(self.nodes, self.slots):
            update = node.update(None, None, [])
            *_, params, context = update.args if len(update.args) == 4 else (*update.args, None)
            params = bytes(struct_buffer(params, KERNEL_BYTES if node.is_kernel else MEMSET_BYTES))
            contents = node.captured if node.is_kernel else ()
            context = None if context is None else int(context)
            described.append((entry_point(update.set.__name__), params, contents, context, slots))
        return described


def _word(node: CapturedNode, slot: Slot) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_buffer(node.buffers[slot.buffer], slot.offset)


def form_key(nodes: Sequence[CapturedNode], slots: Sequence[Sequence[Slot]]) -> tuple[Any, ...]:
    """Return what kernels and which words of addresses identify."""
    words = tuple((slot.buffer, slot.offset, slot.tensor) for of_node in slots for slot in of_node)
    kernels = tuple((node.launch, node.attributes, *map(len, node.captured)) for node in nodes)
    return kernels, words
