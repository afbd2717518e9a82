"""Placeholders of inputs, and random graphs whose nodes hold addresses in them, for the modelled driver."""

from __future__ import annotations

import struct
from typing import Any, TYPE_CHECKING

from hypothesis import strategies as st

from torch._inductor.pygraph.graph.placeholder import (
    GUARD_BYTES,
    MAX_ALIGNMENT,
    PAGE_BYTES,
    PlaceholderArena,
    PlaceholderMap,
)
from torch.testing._internal.modelled_driver import modelled_driver
from torch.testing._internal.modelled_nodes import KernelNode, MemcpyNode, Node, u64


if TYPE_CHECKING:
    from collections.abc import Sequence


def place(*sizes: int, alignment: int = MAX_ALIGNMENT) -> PlaceholderMap:
    with modelled_driver():
        requests = [(nbytes, alignment) for nbytes in sizes]
        return PlaceholderMap(PlaceholderArena(0, 0xFF).place(requests))


# Real addresses, as the caching allocator gives them.
NEAR, FAR, OTHER = 0x7F2A_4000_0000, 0x7F2A_5000_0200, 0x3_1280_0000

# Sizes of the inputs of random graphs, apart and next to each other.
SIZES = (4096, 1, 3 * PAGE_BYTES, 0)

# (input, offset), or a word that is none.
input_words = st.tuples(
    st.integers(0, len(SIZES) - 1),
    st.one_of(
        st.integers(-GUARD_BYTES, GUARD_BYTES),
        st.sampled_from((-GUARD_BYTES, -1, 0, 0, 0, 1, GUARD_BYTES - 16)),
    ),
)
other_words = st.one_of(
    st.integers(0, 4096),
    st.integers(0, (1 << 64) - 1),
    st.sampled_from((NEAR, FAR, OTHER, (1 << 64) - 1, "low", "high", "between")),
)
parameters = st.one_of(
    st.tuples(st.just([]), st.binary(min_size=1, max_size=4)),
    st.tuples(
        st.lists(st.one_of(input_words, other_words), min_size=1, max_size=16),
        st.sampled_from((b"", b"", b"tail", b"longer_")),
    ),
)
kernels = st.tuples(
    st.just("kernel"),
    st.lists(parameters, min_size=1, max_size=6),
    st.booleans(),
    st.booleans(),
)
copies = st.tuples(st.just("memcpy"), input_words, st.one_of(input_words, st.just(FAR)))
fills = st.tuples(st.just("memset"), st.one_of(input_words, st.just(FAR)))
graphs = st.lists(st.one_of(kernels, kernels, copies, fills), min_size=1, max_size=8)
pointers = st.one_of(
    st.sampled_from((NEAR, FAR, OTHER)), st.integers(0, 1 << 43).map(lambda p: p * 16)
)
# Of each call: the inputs' addresses, None for those of the last call, and a node that
# cannot be set.
calls = st.lists(
    st.tuples(
        st.lists(
            st.one_of(st.none(), pointers), min_size=len(SIZES), max_size=len(SIZES)
        ),
        st.one_of(st.none(), st.none(), st.integers(0, 7)),
    ),
    min_size=1,
    max_size=12,
)


def moved(node: Node, places: PlaceholderMap, pointers: Sequence[int]) -> Any:
    "What a node holds after its inputs were moved, from what it was captured with."

    def word(value: int) -> int:
        hit = places.find(value)
        return value if hit is None else (pointers[hit[0]] + hit[1]) % (1 << 64)

    if isinstance(node, KernelNode):
        return [
            u64(*map(word, struct.unpack_from(f"<{len(p) // 8}Q", p)))
            + p[len(p) // 8 * 8 :]
            for p in node.parameters
        ]
    if isinstance(node, MemcpyNode):
        return (word(node.dst), word(node.src))
    return (word(node.dst),)
