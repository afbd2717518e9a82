"""
Whether a captured graph launches what a replay at its sizes sets.

A Triton kernel is compared in full. A library call lies elsewhere when it is captured alone: addresses of operands and
of temporary memory are those of the other capture. Libraries also leave bytes of their parameters undefined, or pass
where alpha and beta lie on the stack. Such bytes are found by captures with other content and another depth of the
stack, or by what they hold: an address of the host, or half an address of an operand.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import struct
from typing import Any, NamedTuple, TYPE_CHECKING

from torch._inductor.pygraph.graph.binding import aligned_words, is_known, WORD_BYTES
from torch._inductor.pygraph.graph.entry import Slot
from torch._inductor.pygraph.graph.memory import is_pageable
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from torch._inductor.pygraph.graph.captured import CapturedNode
    from torch._inductor.pygraph.graph.entry import Entry


# Of the stack that is filled, and by which a call moves down.
FILLED_BYTES = 256 << 10
MOVED_BYTES = 16 << 10

# Of a message.
MAX_WORDS = 4

# Half an address is a number modulo this.
HALF = 1 << 32

# (node, buffer, byte)
Place = tuple[int, int, int]


class _Filled(ctypes.Structure):
    _fields_ = [("content", ctypes.c_char * FILLED_BYTES)]


class _Moved(ctypes.Structure):
    _fields_ = [("content", ctypes.c_char * MOVED_BYTES)]


def on_other_stack(byte: int, run: Callable[[], Any]) -> Any:
    """Return what ``run`` returns, run further down the stack, which is filled with ``byte``."""
    results: list[Any] = []

    def callback(_: _Moved) -> None:
        try:
            results.append((run(), None))
        except Exception as e:
            results.append((None, e))

    # A struct that is passed by value is copied to the stack.
    filled = _Filled()
    ctypes.memset(ctypes.byref(filled), byte, FILLED_BYTES)
    ctypes.CFUNCTYPE(None, _Filled)(lambda _: None)(filled)
    ctypes.CFUNCTYPE(None, _Moved)(callback)(_Moved())
    result, error = results[0]
    if error is not None:
        raise error
    return result


class Difference(NamedTuple):
    """A word of a parameter at ``offset``, as it is and as it was expected."""

    node: int
    buffer: int
    offset: int
    found: bytes
    expected: bytes

    @property
    def place(self) -> Place:
        """The place of the word's first byte."""
        return self.node, self.buffer, self.offset

    def places(self) -> list[Place]:
        """Return the places of the bytes that differ."""
        pairs = enumerate(zip(self.found, self.expected))
        return [(self.node, self.buffer, self.offset + i) for i, (a, b) in pairs if a != b]

    def has_halves(self, addresses: Sequence[tuple[int, int]]) -> bool:
        """
        Return whether halves of the word that differ are halves of an operand's address. No kernel reads half an address:
        the upper half was overwritten. ``addresses``: of operands, as found and as expected.
        """
        if len(self.found) != WORD_BYTES:
            return False
        words = [int.from_bytes(word, "little") for word in (self.found, self.expected)]
        # A whole address may lie outside of its operand.
        if any(abs(a - b) < HALF for both in addresses for a, b in zip(words, both)):
            return False
        moved = OrderedSet((a - b) % HALF for a, b in addresses)
        pairs = zip(*(struct.unpack("<II", word) for word in (self.found, self.expected)))
        return all(a == b or (a - b) % HALF in moved for a, b in pairs)

    def expects_memory(self) -> bool:
        """Return whether the expected word is an address of memory that CUDA has allocated or registered."""
        return is_known(int.from_bytes(self.expected, "little"))

    def is_of_host(self) -> bool:
        """
        Return whether one is an address that no kernel of a library reads. In both captures, a library sets the same words.
        So the kernel does not read the other, either: it is what was on the stack in the place of the address.
        """
        return any(is_pageable(int.from_bytes(word, "little")) for word in (self.found, self.expected))


def differences(
    k: int,
    launched: CapturedNode,
    node: CapturedNode,
    expected: Callable[[int, int, int, int], int],
    known: Container[tuple[int, int]] = (),
) -> Iterator[Difference]:
    """
    Compare the parameters of a captured node with the expected ones. Yield each word that differs.

    Args:
        k: the position of the node
        launched: another capture of the node, with parameters of the same sizes
        expected: returns the expected word, given (buffer, offset, word of ``launched``, word of ``node``)
        known: (buffer, offset) of words to ask ``expected`` for even if they are equal in both captures
    """
    for buffer, (a, b) in enumerate(zip(launched.captured, node.captured)):
        words = zip(itertools.count(0, WORD_BYTES), aligned_words(a), aligned_words(b))
        for offset, value, found in words:
            if value != found or (buffer, offset) in known:
                if (word := expected(buffer, offset, value, found)) != found:
                    yield Difference(k, buffer, offset, *(n.to_bytes(WORD_BYTES, "little") for n in (found, word)))
        rest = len(a) // WORD_BYTES * WORD_BYTES
        if a[rest:] != b[rest:]:
            yield Difference(k, buffer, rest, b[rest:], a[rest:])


def launches_same(predicted: CapturedNode, node: CapturedNode) -> bool:
    """Return whether a captured node has the kernel, grid, attributes and parameters of ``predicted``."""
    return (
        (predicted.launch, predicted.attributes) == (node.launch, node.attributes)
        and tuple(place.value for place in predicted.grid_places()) == node.grid
        and tuple(map(bytes, predicted.buffers)) == node.captured
    )


@dataclasses.dataclass(frozen=True, eq=False)
class CallComparison:
    """
    Compares the nodes of a library call with those of its entry.

    Args:
        address: of an operand or a result, from its slot
        is_temporary, is_elsewhere: addresses of the memory of the entry, and of the other capture
        undefined: returns the bytes of the entry that the library leaves undefined. Its argument says whether to capture
            the call again to find them
    """

    entry: Entry
    nodes: Sequence[CapturedNode]
    address: Callable[[Slot], int]
    is_temporary: Container[int]
    is_elsewhere: Container[int]
    undefined: Callable[[bool], OrderedSet[Place]]

    def difference(self) -> str | None:
        """Return how they differ, or None."""
        if self.entry.kinds != [node.kind for node in self.nodes]:
            return "launches other kernels alone"
        for launched, node in zip(self.entry.nodes, self.nodes):
            if not is_same_launch(launched, node):
                return f"launches another kernel alone: {launched}, in the function {node}"
        found = [word for k in range(len(self.nodes)) for word in self._differences(k)]
        addresses = self._addresses() if found else []
        found = [word for word in found if not (word.is_of_host() or word.has_halves(addresses))]
        # Other entries with the kernel may have shown them.
        for captures in (False, True) if found else ():
            undefined = self.undefined(captures)
            found = [word for word in found if not undefined.issuperset(word.places())]
            if not found:
                break
        if not found:
            return None
        texts = [
            f"bytes {word.offset} to {word.offset + len(word.found)} of {len(self.nodes[word.node].captured[word.buffer])} of "
            f"parameter {word.buffer} of node {word.node}, {self.nodes[word.node]}, are {word.found.hex()} and alone "
            f"{word.expected.hex()}"
            for word in found[:MAX_WORDS]
        ]
        return f"has {len(found)} other words alone: {'; '.join(texts)}"

    def _addresses(self) -> list[tuple[int, int]]:
        """Return where each operand and result is, and where it is in the entry."""
        slots = OrderedSet(Slot(0, 0, slot.tensor, 0) for of_node in self.entry.slots for slot in of_node)
        return [(self.address(slot), self.entry.addresses[slot.tensor]) for slot in slots]

    def _differences(self, k: int) -> Iterator[Difference]:
        slots = {(slot.buffer, slot.offset): slot for slot in self.entry.slots[k]}

        def expected(buffer: int, offset: int, value: int, found: int) -> int:
            if (slot := slots.get((buffer, offset))) is not None:
                return self.address(slot)
            return found if value in self.is_temporary and found in self.is_elsewhere else value

        return differences(k, self.entry.nodes[k], self.nodes[k], expected, slots)


def undefined_bytes(
    entries: Sequence[Entry],
    capture: Callable[[Callable[[Callable[[], Any]], Any]], Sequence[Entry]],
    is_temporary: Container[int],
) -> list[OrderedSet[Place]]:
    """
    Return for each entry the bytes that differ between captures of its call alone.

    Args:
        capture: captures the calls of ``entries`` once more; see Memo.captured
        is_temporary: addresses of the memory of these captures
    """
    undefined = [OrderedSet[Place]() for _ in entries]
    other, another = (functools.partial(on_other_stack, byte) for byte in (0x5A, 0xA5))
    # What is between would leave something of its own on the stack.
    for around in (other, lambda run: another(functools.partial(another, run))) if entries else ():
        for entry, again, found in zip(entries, capture(around), undefined):
            for word in _words_that_differ(entry, again, is_temporary):
                found.update(word.places())
    return undefined


def _words_that_differ(entry: Entry, again: Entry, is_temporary: Container[int]) -> Iterator[Difference]:
    for k, (a, b, slots) in enumerate(zip(entry.nodes, again.nodes, entry.slots)):
        places = OrderedSet((slot.buffer, slot.offset) for slot in slots)

        def expected(buffer: int, offset: int, value: int, found: int, places: Any = places) -> int:
            is_address = value in is_temporary and found in is_temporary
            return found if is_address or (buffer, offset) in places else value

        if is_same_launch(a, b):
            yield from differences(k, a, b, expected)


def is_same_launch(a: CapturedNode, b: CapturedNode) -> bool:
    lengths = [[*map(len, node.captured)] for node in (a, b)]
    return (a.launch, a.grid, a.attributes, lengths[0]) == (b.launch, b.grid, b.attributes, lengths[1])
