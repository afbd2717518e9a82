# Owner(s): ["module: inductor"]
"""
PyGraph's placeholders, binding and proof, on a machine that need not have a GPU: the driver
is modelled, with its own structs, and parameters are read from memory as it reads them.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import mmap
import struct
import threading
import types
import unittest
from typing import Any, TYPE_CHECKING
from unittest import mock

from hypothesis import given, settings, strategies as st

import torch
from torch._inductor.pygraph import native
from torch._inductor.pygraph.capture.allocation import ALIGNMENTS, common_alignment
from torch._inductor.pygraph.graph import (
    binding,
    driver,
    memory,
    placeholder,
    prelude,
    table,
)
from torch._inductor.pygraph.graph.binding import (
    NodeUpdateBinding,
)
from torch._inductor.pygraph.graph.driver import DriverError
from torch._inductor.pygraph.graph.placeholder import (
    GUARD_BYTES,
    MAX_ALIGNMENT,
    PAGE_BYTES,
    Placeholder,
    PlaceholderArena,
    PlaceholderMap,
)
from torch._inductor.pygraph.graph.prelude import CAPACITIES, Prelude, PreludeUnavailable
from torch._inductor.pygraph.types.reason import RefusedError
from torch._inductor.pygraph.verify import proof
from torch._inductor.pygraph.verify.rehearsal import SavedInput
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    subtest,
)
from torch.testing._internal.modelled_cuda import (
    cu,
    EXECUTABLE,
    GRAPH,
    INDIRECT_FUNCTION,
    KernelNode,
    MemcpyNode,
    MemsetNode,
    modelled_driver,
    Node,
    PRELUDE_FUNCTION,
    u64,
)
from torch.utils._python_dispatch import TorchDispatchMode


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

needs_structs = unittest.skipIf(cu is None, "requires cuda-bindings")
needs_compiled = unittest.skipIf(native.compiled is None, "requires _replay")

def place(*sizes: int, alignment: int = MAX_ALIGNMENT) -> PlaceholderMap:
    with modelled_driver():
        requests = [(nbytes, alignment) for nbytes in sizes]
        return PlaceholderMap(PlaceholderArena(0, 0xFF).place(requests))


@needs_structs
class ModelTest(TestCase):
    "What binding assumes of the structs."

    def test_sizes(self):
        params = cu.CUDA_MEMCPY3D()
        params.srcXInBytes, params.Depth = 1, 2
        words = struct.unpack("<25Q", ctypes.string_at(params.getPtr(), 200))
        self.assertEqual((words[0], words[-1]), (1, 2))
        self.assertEqual(binding.MEMCPY_BYTES, 200)
        params = cu.CUDA_MEMSET_NODE_PARAMS()
        params.dst, params.height = cu.CUdeviceptr(1), 2
        words = struct.unpack("<5Q", ctypes.string_at(params.getPtr(), 40))
        self.assertEqual((words[0], words[-1]), (1, 2))
        self.assertEqual(binding.MEMSET_BYTES, 40)

    def test_struct_is_written_in_place(self):
        params = cu.CUDA_MEMCPY3D()
        params.dstDevice = cu.CUdeviceptr(0x1234)
        buffer = binding.struct_buffer(params, binding.MEMCPY_BYTES)
        at = bytes(buffer).index(u64(0x1234))
        ctypes.c_uint64.from_buffer(buffer, at).value = 0x5678
        self.assertEqual(int(params.dstDevice), 0x5678)

    def test_check(self):
        ok, bad = cu.CUresult.CUDA_SUCCESS, cu.CUresult.CUDA_ERROR_INVALID_VALUE
        self.assertEqual(
            [driver.check((ok,)), driver.check((ok, 1)), driver.check((ok, 1, 2))],
            [None, 1, (1, 2)],
        )
        with self.assertRaisesRegex(DriverError, "CUDA_ERROR_INVALID_VALUE"):
            driver.check((bad, 1))


# Real addresses, as the caching allocator gives them.
NEAR, FAR, OTHER = 0x7F2A_4000_0000, 0x7F2A_5000_0200, 0x3_1280_0000


@needs_structs
class BindingTest(TestCase):
    "By Python; CompiledBindingTest runs the same by compiled nodes."

    compiled: Any = None

    def setUp(self):
        super().setUp()
        patch = mock.patch.object(native, "compiled", self.compiled)
        patch.start()
        self.addCleanup(patch.stop)

    @contextlib.contextmanager
    def bound(self, places: PlaceholderMap, *nodes: Node) -> Iterator[Any]:
        with modelled_driver(*nodes) as model:
            yield model, NodeUpdateBinding(GRAPH, EXECUTABLE, places)

    @parametrize("packed", (False, True))
    @parametrize("kern", (False, True))
    def test_parameters(self, packed, kern):
        places = place(4096, 64)
        x, y = (p.address for p in places.placeholders)
        kernel = KernelNode(
            b"\1\2\3\4", u64(x), u64(OTHER), b"\5", u64(y + 16), packed=packed, kern=kern
        )
        with self.bound(places, kernel) as (model, bound):
            self.assertEqual((bound.num_nodes, len(bound.updates)), (1, 1))
            for pointers in ((NEAR, FAR), (FAR, FAR), (OTHER, NEAR)):
                bound.update(pointers)
                self.assertEqual(
                    model.held[0],
                    [
                        b"\1\2\3\4",
                        u64(pointers[0]),
                        u64(OTHER),
                        b"\5",
                        u64(pointers[1] + 16),
                    ],
                )

    @parametrize("packed", (False, True))
    def test_every_occurrence_in_a_block(self, packed):
        "cuBLAS keeps an operand several times, descriptors of TMA among them."
        places = place(1 << 20)
        (x,) = (p.address for p in places.placeholders)
        offsets = {0: 0, 64: 4096, 128: -192, 1024: 1 << 20, 1712: 0}

        def block(address: int) -> bytes:
            block = bytearray(i * 37 % 251 for i in range(1720))
            for at, offset in offsets.items():
                block[at : at + 8] = u64(address + offset)
            return bytes(block)

        with self.bound(places, KernelNode(block(x), packed=packed)) as (model, bound):
            (update,) = bound.updates
            self.assertEqual([w.offset for w in update.words], list(offsets.values()))
            for address in (NEAR, FAR, OTHER):
                bound.update([address])
                self.assertEqual(model.held[0], [block(address)])
            self.assertEqual(model.sets, [0, 0, 0])

    @parametrize("alignment", ALIGNMENTS)
    def test_offsets_up_to_the_guards(self, alignment):
        "Padded convolutions start before the tensor; ends lie past it."
        places = place(PAGE_BYTES, 100, 100, alignment=alignment)
        offsets = (-GUARD_BYTES, -8, -1, 0, 100, 101, 100 + GUARD_BYTES)
        offsets = [n for n in offsets if n & -n != alignment or alignment == MAX_ALIGNMENT]
        address = places.placeholders[1].address
        kernel = KernelNode(*[u64(address + offset) for offset in offsets])
        with self.bound(places, kernel) as (model, bound):
            bound.update([OTHER, NEAR, OTHER])
            self.assertEqual(model.held[0], [u64(NEAR + offset) for offset in offsets])

    @parametrize("alignment", ALIGNMENTS)
    def test_offsets_that_align_better(self, alignment):
        """
        A kernel with wide loads may have been chosen for such an address, and where an input
        is at a multiple of more than its placeholder is, they are misaligned.
        """
        places = place(4096, alignment=alignment)
        address = places.placeholders[0].address
        for offset in (-3 * alignment, -alignment, alignment, 3 * alignment, 5 * alignment):
            nodes = [
                KernelNode(u64(OTHER), u64(address + offset)),
                MemcpyNode(OTHER, address + offset, 64),
                MemsetNode(address + offset),
            ]
            for node in nodes:
                if node is nodes[0] and alignment < MAX_ALIGNMENT:
                    with self.assertRaisesRegex(RefusedError, "less aligned"):
                        with self.bound(places, node):
                            pass
                    continue
                with self.bound(places, node) as (model, bound):
                    bound.update([NEAR])
                    self.assertEqual(model.held[0], moved(node, places, [NEAR]))

    def test_other_values_stay(self):
        places = place(4096, 4096)
        low, high = places.low, places.high
        values = (0, 1, low - 1, high, high + 1, (1 << 64) - 1, OTHER, low << 1, low >> 1)
        values += (low | 1 << 63, low & 0xFFFFFFFF)
        x = places.placeholders[0].address
        with self.bound(places, KernelNode(u64(*values), u64(x))) as (model, bound):
            bound.update([NEAR, FAR])
            self.assertEqual(model.held[0], [u64(*values), u64(NEAR)])

    @parametrize("packed", (False, True))
    @parametrize("shift", range(1, 8))
    def test_overlap_of_two_words_is_no_address(self, packed, shift):
        "It was one in an nvjet kernel, and writing it hung the device."
        places = place(4096)
        address = places.placeholders[0].address
        overlap = b"\xee" * shift + u64(address) + b"\xee" * (8 - shift)
        for word in struct.unpack("<2Q", overlap):
            self.assertIsNone(places.find(word))
        block = overlap + u64(address)
        with self.bound(places, KernelNode(block, packed=packed)) as (model, bound):
            self.assertEqual(len(bound.updates[0].words), 1)
            bound.update([NEAR])
            self.assertEqual(model.held[0], [overlap + u64(NEAR)])

    @parametrize("size", range(1, 8))
    def test_parameter_smaller_than_a_word(self, size):
        places = place(4096)
        address = places.placeholders[0].address
        small = u64(address)[:size]
        nodes = (KernelNode(small, u64(address) + small), KernelNode(small))
        with self.bound(places, *nodes) as (model, bound):
            bound.update([NEAR])
            self.assertEqual(model.held, [[small, u64(NEAR) + small], [small]])
            self.assertEqual(model.sets, [0])

    def test_only_nodes_whose_inputs_moved_are_set(self):
        places = place(64, 64, 64)
        x, y, z = (p.address for p in places.placeholders)
        nodes = (
            KernelNode(u64(x)),
            KernelNode(u64(x), u64(y)),
            KernelNode(u64(OTHER)),
            MemcpyNode(OTHER, z, 64),
            KernelNode(u64(x), packed=True),
            MemsetNode(y),
        )
        with self.bound(places, *nodes) as (model, bound):
            self.assertEqual((bound.num_nodes, len(bound.updates)), (6, 5))

            def sets(*pointers: int) -> list[int]:
                model.sets.clear()
                bound.update(pointers)
                self.assertEqual(
                    model.held,
                    [
                        [u64(pointers[0])],
                        [u64(pointers[0]), u64(pointers[1])],
                        [u64(OTHER)],
                        (OTHER, pointers[2]),
                        [u64(pointers[0])],
                        (pointers[1],),
                    ],
                )
                return sorted(model.sets)

            self.assertEqual(sets(NEAR, FAR, OTHER), [0, 1, 3, 4, 5])
            self.assertEqual(sets(NEAR, FAR, OTHER), [])
            self.assertEqual(sets(NEAR, FAR, NEAR), [3])
            self.assertEqual(sets(FAR, FAR, NEAR), [0, 1, 4])
            self.assertEqual(sets(FAR, NEAR, NEAR), [1, 5])
            # Two inputs that alias, and then do not.
            self.assertEqual(sets(NEAR, NEAR, NEAR), [0, 1, 4])
            self.assertEqual(sets(NEAR, FAR, FAR), [1, 3, 5])

    def test_pointers_are_what_the_graph_holds(self):
        "record.py compares them with those of the next call."
        places = place(64, 64)
        addresses = [p.address for p in places.placeholders]
        with self.bound(places, KernelNode(u64(*addresses))) as (model, bound):
            self.assertEqual(bound.pointers, addresses)
            pointers = [NEAR, FAR]
            bound.update(pointers)
            pointers[0] = OTHER
            self.assertEqual(bound.pointers, [NEAR, FAR])

    @parametrize("input_is", ("src", "dst", "both"))
    def test_memcpy(self, input_is):
        places = place(4096)
        address = places.placeholders[0].address
        dst = OTHER if input_is == "src" else address + 512
        src = OTHER if input_is == "dst" else address
        with self.bound(places, MemcpyNode(dst, src, 256)) as (model, bound):
            for pointer in (NEAR, FAR):
                bound.update([pointer])
                self.assertEqual(
                    model.held[0],
                    (
                        OTHER if input_is == "src" else pointer + 512,
                        OTHER if input_is == "dst" else pointer,
                    ),
                )

    def test_memset(self):
        places = place(4096)
        address = places.placeholders[0].address
        with self.bound(places, MemsetNode(address + 8), MemsetNode(OTHER)) as (
            model,
            bound,
        ):
            bound.update([NEAR])
            self.assertEqual(model.held, [(NEAR + 8,), (OTHER,)])
            self.assertEqual(model.sets, [0])

    def test_host_copy_into_an_input(self):
        places = place(4096)
        node = MemcpyNode(places.placeholders[0].address, u64(1, 2, 3))
        with self.bound(places, node) as (model, bound):
            bound.update([NEAR])
            self.assertEqual(model.held[0], (NEAR, ctypes.addressof(node.host)))

    @parametrize("position", (0, 3, 511))
    def test_address_in_host_memory(self, position):
        "Grouped GEMMs read their pointers from memory, where a replay cannot set them."
        places = place(4096)
        table = [OTHER] * 512
        table[position] = places.placeholders[0].address + 16
        with self.assertRaisesRegex(RefusedError, "copied from the host"):
            with self.bound(places, MemcpyNode(OTHER, u64(*table))):
                pass

    def test_host_memory_that_is_gone(self):
        "Its pages may be unmapped by now: reading must fail, and not the process."
        page = mmap.mmap(-1, 1 << 20)
        view = ctypes.c_char.from_buffer(page)
        address = ctypes.addressof(view)
        page[:4] = b"here"
        self.assertEqual(binding.read_host_memory(address, 4).raw, b"here")
        del view
        page.close()
        with self.assertRaisesRegex(RefusedError, "gone"):
            binding.read_host_memory(address, 4)

    def test_large_host_copy_is_not_read(self):
        places = place(4096)
        table = u64(places.placeholders[0].address)
        node = MemcpyNode(OTHER, table, binding.MAX_HOST_COPY_BYTES + 1)
        with self.bound(places, node) as (_, bound):
            self.assertEqual(bound.updates, [])

    def test_kinds_of_nodes(self):
        "A kind that a new driver brings is refused until someone looked at it."
        allowed = []
        for kind in cu.CUgraphNodeType:
            name = kind.name.removeprefix("CU_GRAPH_NODE_TYPE_")
            if name in ("KERNEL", "MEMCPY", "MEMSET"):
                continue
            try:
                with self.bound(place(64), Node(name)) as (_, bound):
                    self.assertEqual((bound.num_nodes, bound.updates), (1, []))
            except RefusedError as e:
                self.assertEqual(str(e), f"the graph holds a {kind.name} node")
            else:
                allowed.append(name)
        self.assertEqual(
            sorted(allowed),
            ["EMPTY", "EVENT_RECORD", "MEM_ALLOC", "MEM_FREE", "WAIT_EVENT"],
        )

    @parametrize("kind", ("HOST", "GRAPH", "CONDITIONAL"))
    def test_refused_node_after_bound_ones(self, kind):
        places = place(64)
        with self.assertRaisesRegex(RefusedError, kind):
            with self.bound(
                places, KernelNode(u64(places.placeholders[0].address)), Node(kind)
            ):
                pass

    def test_empty_graph(self):
        with self.bound(place(64)) as (model, bound):
            bound.update([NEAR])
            self.assertEqual((bound.num_nodes, model.sets), (0, []))

    def test_kernel_without_parameters(self):
        places = place(64)
        kernel = KernelNode(u64(places.placeholders[0].address))
        with self.bound(places, KernelNode(), kernel) as (model, bound):
            bound.update([NEAR])
            self.assertEqual(model.held, [[], [u64(NEAR)]])

    @parametrize(
        "call",
        (
            "cuGraphGetNodes",
            "cuGraphNodeGetType",
            "cuGraphKernelNodeGetParams",
            "cuKernelGetFunction",
            "cuGraphMemcpyNodeGetParams",
            "cuGraphMemsetNodeGetParams",
            "cuCtxGetCurrent",
        ),
    )
    def test_graph_that_cannot_be_read(self, call):
        places = place(64)
        address = places.placeholders[0].address
        nodes = (
            KernelNode(u64(address), kern=True),
            MemcpyNode(OTHER, address, 64),
            MemsetNode(address),
        )
        with modelled_driver(*nodes) as model:
            model.failing = call
            with self.assertRaisesRegex(DriverError, "CUDA_ERROR_OUT_OF_MEMORY"):
                NodeUpdateBinding(GRAPH, EXECUTABLE, places)

    @parametrize("refused", (0, 1, 2))
    def test_node_that_cannot_be_set(self, refused):
        places = place(64, 64)
        x, y = (p.address for p in places.placeholders)
        nodes = (KernelNode(u64(x)), MemcpyNode(OTHER, x, 64), MemsetNode(y))
        with self.bound(places, *nodes) as (model, bound):
            bound.update([NEAR, FAR])
            model.refused = {refused}
            with self.assertRaises(DriverError):
                bound.update([FAR, NEAR])
            # Nothing may pass for up to date: neither the new addresses nor the old.
            self.assertNotIn(bound.pointers, ([FAR, NEAR], [NEAR, FAR]))
            model.refused = set()
            model.sets.clear()
            bound.update([NEAR, FAR])
            self.assertEqual(sorted(model.sets), [0, 1, 2])
            self.assertEqual(model.held, [[u64(NEAR)], (OTHER, NEAR), (FAR,)])

    def test_find_words(self):
        places = place(64)
        address = places.placeholders[0].address
        buffer = ctypes.create_string_buffer(u64(1, address + 4, 2) + b"123", 27)
        (word,) = binding.find_words(buffer, places)
        self.assertEqual((word.input, word.offset), (0, 4))
        word.value.value = NEAR
        self.assertEqual(bytes(buffer), u64(1, NEAR, 2) + b"123")


instantiate_parametrized_tests(BindingTest)


@needs_structs
@needs_compiled
class CompiledBindingTest(BindingTest):
    compiled = native.compiled

    def test_same_calls(self):
        "The driver is called alike, in the same order, by compiled nodes and by Python."
        places = place(64, 64, 64)
        x, y, z = (p.address for p in places.placeholders)
        nodes = (
            KernelNode(u64(x), u64(y + 8)),
            MemcpyNode(y, z, 64),
            MemsetNode(z),
            KernelNode(u64(z)),
            KernelNode(u64(x + 32)),
        )
        calls = []
        for compiled in (native.compiled, None):
            with (
                mock.patch.object(native, "compiled", compiled),
                self.bound(places, *nodes) as (model, bound),
            ):
                kind = type(bound.nodes)
                self.assertIs(kind is binding.Nodes, compiled is None)
                for pointers in itertools.product((NEAR, FAR), (NEAR, OTHER), (FAR,)):
                    for _ in range(2):
                        bound.update(list(pointers))
                        model.sets.append(-1)
                    self.assertEqual(bound.pointers, list(pointers))
                calls.append((model.sets, model.held))
        self.assertEqual(calls[0], calls[1])

    def test_driver_without_the_functions(self):
        places = place(64)
        address = places.placeholders[0].address
        with modelled_driver(KernelNode(u64(address))) as model:
            model.failing = "cuGetProcAddress"
            bound = NodeUpdateBinding(GRAPH, EXECUTABLE, places)
            self.assertIsInstance(bound.nodes, binding.Nodes)
            bound.update([NEAR])
            self.assertEqual(model.held, [[u64(NEAR)]])



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


@needs_structs
class RandomGraphTest(TestCase):
    @settings(deadline=None, max_examples=150)
    @given(graphs, calls)
    def test_executable_graph_holds_the_inputs(self, graph, calls):
        with modelled_driver():
            near, far = (
                PlaceholderArena(0, poison).place([(n, MAX_ALIGNMENT) for n in sizes])
                for poison, sizes in ((0xFF, SIZES[:2]), (0, SIZES[2:]))
            )
        places = PlaceholderMap(near + far)
        self.assertIsNone(places.find(far[-1].end))
        named = {"low": places.low - 1, "high": places.high, "between": far[-1].end}

        def word(spec: Any, addresses: Sequence[int]) -> int:
            if isinstance(spec, tuple):
                # An empty tensor's address is zero.
                return (addresses[spec[0]] + spec[1]) % (1 << 64)
            value = named.get(spec, spec)
            return value if places.find(value) is None else 0

        def holds(spec: Any, addresses: Sequence[int]) -> Any:
            kind, *rest = spec
            if kind != "kernel":
                return tuple(word(w, addresses) for w in rest)
            return [
                u64(*[word(w, addresses) for w in words]) + tail for words, tail in rest[0]
            ]

        def inputs(spec: Any) -> set[int]:
            kind, *rest = spec
            words = (
                itertools.chain(*[words for words, _ in rest[0]])
                if kind == "kernel"
                else rest
            )
            return {w[0] for w in words if isinstance(w, tuple)}

        captured = [p.address for p in places.placeholders]
        nodes: list[Node] = []
        for spec in graph:
            held = holds(spec, captured)
            if spec[0] == "kernel":
                nodes.append(KernelNode(*held, packed=spec[2], kern=spec[3]))
            elif spec[0] == "memcpy":
                nodes.append(MemcpyNode(*held, 64))
            else:
                nodes.append(MemsetNode(*held))
        with modelled_driver(*nodes) as model:
            bound = NodeUpdateBinding(GRAPH, EXECUTABLE, places)
            last, current, failed = captured, captured, False
            for given_pointers, refused in calls:
                current = [
                    old if new is None else new for old, new in zip(last, given_pointers)
                ]
                moved = {
                    k for k, (a, b) in enumerate(zip(last, current)) if a != b or failed
                }
                due = [i for i, spec in enumerate(graph) if inputs(spec) & moved]
                model.sets.clear()
                model.refused = {refused}
                last = current
                failed = refused in due
                if failed:
                    with self.assertRaises(DriverError):
                        bound.update(current)
                    continue
                bound.update(current)
                self.assertEqual(sorted(model.sets), due)
                expected = [holds(spec, current) for spec in graph]
                self.assertTrue(model.held == expected, (model.held, expected))


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


@needs_structs
class PreludeTest(TestCase):
    @contextlib.contextmanager
    def bound(self, places, *nodes, stubborn=(), table=None):
        functions = {n: cu.CUfunction(PRELUDE_FUNCTION + n) for n in CAPACITIES}
        with (
            modelled_driver(*nodes) as model,
            mock.patch.object(prelude, "_kernels", lambda *args: functions),
            mock.patch.object(Prelude, "_device", torch.device("cpu")),
        ):
            model.stubborn = set(stubborn)
            made = Prelude(GRAPH, places, 0, table)
            yield model, NodeUpdateBinding(GRAPH, EXECUTABLE, places, made.nodes)

    def check(self, places, nodes, pointers, **kwargs):
        "Returns how many nodes the host set."
        with self.bound(places, *nodes, **kwargs) as (model, bound):
            for values in pointers:
                model.sets.clear()
                bound.update(values)
                model.run_preludes()
                expected = [moved(node, places, values) for node in nodes]
                self.assertEqual(model.held[: len(nodes)], expected)
                # What the device sets, the host must not.
                self.assertFalse(set(model.sets) & set(model.updatable))
            return len(set(model.sets))

    @parametrize("others", (0, 1))
    def test_pays(self, others):
        "Kernels count that read an input, and nothing changes."
        places = place(64)
        (x,) = (p.address for p in places.placeholders)
        reading = prelude.PAYS_FROM_KERNELS - others
        nodes = [KernelNode(u64(x))] * reading + [KernelNode(u64(OTHER)), MemcpyNode(x, OTHER, 64)]
        with modelled_driver(*nodes) as model:
            self.assertEqual(prelude.prelude_pays(GRAPH, places), not others)
            self.assertEqual((model.updatable, len(model.nodes)), ([], reading + 2))

    def test_one_host_action(self):
        places = place(4096, 64)
        x, y = (p.address for p in places.placeholders)
        nodes = [
            KernelNode(b"\1\2\3\4", u64(x), u64(OTHER), b"\5", u64(y + 16)),
            KernelNode(u64(1, x, 2, x + 8), b"abc", packed=True),
            KernelNode(u64(y - 8), u64(0), kern=True),
            KernelNode(u64(OTHER)),
        ]
        count = self.check(places, nodes, [(NEAR, FAR), (FAR, FAR), (OTHER, NEAR)])
        self.assertEqual(count, 1)

    def test_it_is_first(self):
        places = place(64)
        (x,) = (p.address for p in places.placeholders)
        with self.bound(places, KernelNode(u64(OTHER)), KernelNode(u64(x))) as (model, _):
            self.assertEqual(model.edges, [(0, 1), (2, 0)])

    def test_several_are_in_a_row(self):
        "Two may set one node, and all of them come before it."
        start, count = 0x5A3C_9600_0000, CAPACITIES[-1] + 1
        places = PlaceholderMap(
            [Placeholder(p, p + 64, p) for p in range(start, start + 64 * count, 64)]
        )
        words = [p.address for p in places.placeholders]
        with self.bound(places, KernelNode(u64(*words))) as (model, _):
            self.assertEqual(model.edges, [(1, 2), (2, 0)])

    def test_values_on_the_cpu(self):
        "Words of any value, captured as tokens."
        token = 0x5AC3_96F0_0000_0000
        places = PlaceholderMap(
            [
                *place(64).placeholders,
                *[Placeholder(t, t + 1, t) for t in (token, token + 1)],
            ]
        )
        (x, *_) = (p.address for p in places.placeholders)
        nodes = [KernelNode(u64(OTHER), u64(token, token + 1)), KernelNode(u64(x))]
        moves = [(NEAR, (1 << 64) - 1, 0), (FAR, 1 << 63, 5)]
        self.assertEqual(self.check(places, nodes, moves), 1)

    def test_input_that_no_kernel_reads(self):
        "Nor the host's check that a CPU value is a parameter must see it."
        places = place(64, 64)
        x, y = (p.address for p in places.placeholders)
        with self.bound(places, KernelNode(u64(y))) as (_, bound):
            self.assertEqual([bool(nodes) for nodes in bound.nodes_of], [False, True])

    def test_node_that_refuses(self):
        places = place(64)
        (x,) = (p.address for p in places.placeholders)
        nodes = [KernelNode(u64(x)), KernelNode(u64(x + 8)), KernelNode(u64(x))]
        self.assertEqual(self.check(places, nodes, [(NEAR,), (FAR,)], stubborn=[1]), 2)

    def test_all_nodes_refuse(self):
        places = place(64)
        (x,) = (p.address for p in places.placeholders)
        with self.assertRaisesRegex(PreludeUnavailable, "no kernel can be updated"):
            self.check(places, [KernelNode(u64(x))], [(NEAR,)], stubborn=[0])

    def test_copies_and_fills_are_set_by_the_host(self):
        places = place(64, 64)
        x, y = (p.address for p in places.placeholders)
        nodes = [KernelNode(u64(x)), MemcpyNode(y, x, 64), MemsetNode(y + 8)]
        self.assertEqual(self.check(places, nodes, [(NEAR, FAR), (FAR, NEAR)]), 3)

    @parametrize("count", (1, 16, 17, 128, 129, 500, 501, 1201))
    def test_many_inputs(self, count):
        sizes = [16] * count
        start = 0x5A3C_9600_0000
        places = PlaceholderMap(
            [Placeholder(start + 64 * k, start + 64 * (k + 1), start + 64 * k) for k in range(len(sizes))]
        )
        words = [p.address + 8 for p in places.placeholders]
        nodes = [KernelNode(u64(*words)), KernelNode(*map(u64, words[::3]))]
        pointers = [[NEAR + 512 * k for k in range(count)], [FAR + 64 * k for k in range(count)]]
        self.assertEqual(self.check(places, nodes, pointers), -(-count // CAPACITIES[-1]))

    def test_offset_that_aligns_better(self):
        places = place(64, alignment=16)
        (x,) = (p.address for p in places.placeholders)
        with modelled_driver(KernelNode(u64(x)), KernelNode(u64(x + 16))) as model:
            with self.assertRaisesRegex(RefusedError, "less aligned"):
                Prelude(GRAPH, places, 0)
            self.assertEqual((model.updatable, len(model.nodes)), ([], 2))

    def test_nothing_is_changed_if_there_is_none(self):
        places = place(64)
        (x,) = (p.address for p in places.placeholders)
        with (
            modelled_driver(KernelNode(u64(x))) as model,
            mock.patch.object(prelude, "_kernels", side_effect=PreludeUnavailable("no")),
        ):
            with self.assertRaisesRegex(PreludeUnavailable, "no"):
                Prelude(GRAPH, places, 0)
            self.assertEqual((model.updatable, len(model.nodes)), ([], 1))

    @parametrize(
        "call",
        ("cuGraphGetRootNodes", "cuGraphAddKernelNode", "cuGraphAddDependencies"),
    )
    def test_node_that_cannot_be_added(self, call):
        places = place(64)
        (x,) = (p.address for p in places.placeholders)
        functions = {n: cu.CUfunction(PRELUDE_FUNCTION + n) for n in CAPACITIES}
        with (
            modelled_driver(KernelNode(u64(x))) as model,
            mock.patch.object(prelude, "_kernels", lambda *args: functions),
            mock.patch.object(Prelude, "_device", torch.device("cpu")),
        ):
            model.failing = call
            with self.assertRaisesRegex(RefusedError, "no prelude could be added"):
                Prelude(GRAPH, places, 0)

    @parametrize("others", (False, True))
    def test_table(self, others):
        "Kernels that take slots read there what they would be passed; others are set."
        places = place(64, 64)
        x, y = (p.address for p in places.placeholders)
        slots = (ctypes.c_uint64 * 3)()

        class Table:
            num_kernels = 0
            addresses: dict[tuple[int, int], int] = {}

            def takes(self, reader):
                node = model.nodes[int(reader.node)]
                if node.parameters[0] == b"vendor__":
                    return False
                for i, at, (k, delta, _) in reader.words:
                    place = self.addresses.setdefault(
                        (k, delta), ctypes.addressof(slots) + 8 * len(self.addresses)
                    )
                    node.parameters[i] = u64(place)
                return True

            def writes(self):
                return [binding.Write(k, d, a, binding.SLOT) for (k, d), a in self.addresses.items()]

        nodes = [
            KernelNode(b"jit_____", u64(x), u64(y)),
            KernelNode(b"jit_____", u64(y), u64(x + 32)),
        ]
        if others:
            nodes.append(KernelNode(b"vendor__", u64(x)))
        functions = {n: cu.CUfunction(PRELUDE_FUNCTION + n) for n in CAPACITIES}
        kinds = []

        def kernels(device_index, sets_nodes):
            kinds.append(sets_nodes)
            return functions

        with (
            modelled_driver(*nodes) as model,
            mock.patch.object(prelude, "_kernels", kernels),
            mock.patch.object(Prelude, "_device", torch.device("cpu")),
        ):
            made = Prelude(GRAPH, places, 0, Table())
            bound = NodeUpdateBinding(GRAPH, EXECUTABLE, places, made.nodes)
            # The form that calls the device runtime is only for nodes.
            self.assertEqual(kinds[-1], others)
            for near, far in ((NEAR, FAR), (FAR, NEAR)):
                model.sets.clear()
                bound.update((near, far))
                model.run_preludes()
                self.assertEqual(list(slots), [near, far, near + 32])
                self.assertEqual(model.sets, [len(nodes)])
                if others:
                    self.assertEqual(model.held[2], [b"vendor__", u64(near)])

    @settings(deadline=None, max_examples=60)
    @given(
        st.lists(st.one_of(kernels, kernels, copies, fills), min_size=1, max_size=8),
        st.lists(st.lists(pointers, min_size=4, max_size=4), min_size=1, max_size=4),
        st.sets(st.integers(0, 7)),
    )
    def test_random_graphs(self, graph, moves, stubborn):
        with modelled_driver():
            places = PlaceholderMap(
                PlaceholderArena(0, 0xFF).place([(n, MAX_ALIGNMENT) for n in SIZES])
            )

        def word(spec: Any) -> int:
            if isinstance(spec, tuple):
                return places.placeholders[spec[0]].address + spec[1]
            return {"low": 1, "high": 2, "between": 3}.get(spec, spec)

        nodes: list[Node] = []
        for kind, *rest in graph:
            if kind == "kernel":
                held = [u64(*map(word, words)) + tail for words, tail in rest[0]]
                nodes.append(KernelNode(*held, packed=rest[1], kern=rest[2]))
            elif kind == "memcpy":
                nodes.append(MemcpyNode(*map(word, rest), 64))
            else:
                nodes.append(MemsetNode(word(rest[0])))
        with contextlib.suppress(PreludeUnavailable):
            self.check(places, nodes, moves, stubborn=stubborn)


instantiate_parametrized_tests(PreludeTest)


@needs_structs
class TableTest(TestCase):
    "Kernels are named kernel_0 and so on by the model, after the nodes that launch them."

    def takes(self, *nodes, places, autotuners, num_warps=4, load=None, refused=()):
        "Of each node that reads an input: whether the table takes it."
        asked = []

        def compile_indirect(autotuner, config, positions):
            asked.append((autotuner, config, positions))
            metadata = types.SimpleNamespace(num_warps=num_warps, shared=512)
            return types.SimpleNamespace(metadata=metadata, number=autotuner.number)

        def zeros(count, *, dtype, device):
            return torch.empty(count, dtype=dtype)

        with (
            modelled_driver(*nodes) as model,
            mock.patch.object(table, "compile_indirect", compile_indirect),
            mock.patch.object(
                table,
                "_load",
                load or (lambda compiled, _: INDIRECT_FUNCTION + compiled.number),
            ),
            mock.patch.object(table.torch, "zeros", zeros),
        ):
            model.refused = set(refused)
            made = table.Table((), 0)
            for autotuner in autotuners:
                made.autotuners.setdefault(autotuner.name, []).append(autotuner)
            readers = list(binding.kernels_that_read(cu.CUgraph(GRAPH), places))
            taken = [made.takes(reader) for reader in readers]
        return made, model, taken, asked

    @staticmethod
    def launcher(config, handle):
        "As CompileResult.make_launcher has it."
        kernel = types.SimpleNamespace(function=handle)
        return types.SimpleNamespace(config=config, kernel=kernel)

    @classmethod
    def autotuner(cls, number, **kwargs):
        found = {
            "name": f"kernel_{number}",
            "number": number,
            "launchers": [cls.launcher(f"config {number}", 0x20000 + number)],
            **kwargs,
        }
        return types.SimpleNamespace(**found)

    def test_slots(self):
        places = place(64, 64)
        x, y = (p.address for p in places.placeholders)
        nodes = [
            KernelNode(u64(x), b"\1\2\3\4", u64(y + 16), u64(OTHER)),
            KernelNode(u64(OTHER), u64(x)),
            KernelNode(u64(y)),
        ]
        autotuners = [self.autotuner(0), self.autotuner(1)]
        made, model, taken, asked = self.takes(
            *nodes, places=places, autotuners=autotuners
        )
        # The last is a vendor's.
        self.assertEqual(taken, [True, True, False])
        self.assertEqual(
            [(a.number, config, positions) for a, config, positions in asked],
            [(0, "config 0", (0, 2)), (1, "config 1", (1,))],
        )
        # One slot for each input and offset.
        base = made.pages[0].data_ptr()
        self.assertEqual(made.slots, {(0, 0): base, (1, 16): base + 8})
        self.assertEqual(
            model.replaced,
            {
                0: (512, [u64(base), b"\1\2\3\4", u64(base + 8), u64(OTHER)]),
                1: (512, [u64(OTHER), u64(base)]),
            },
        )
        self.assertEqual(
            made.writes(),
            [(0, 0, base, binding.SLOT), (1, 16, base + 8, binding.SLOT)],
        )
        self.assertEqual(made.num_kernels, 2)

    def test_many_slots(self):
        places = place(1 << 20)
        (x,) = (p.address for p in places.placeholders)
        count = 2 * table.PAGE_SLOTS + 1
        nodes = [KernelNode(u64(x + 16 * i)) for i in range(count)]
        made, _, taken, _ = self.takes(
            *nodes, places=places, autotuners=[self.autotuner(i) for i in range(count)]
        )
        self.assertTrue(all(taken))
        self.assertEqual(len(made.pages), 3)
        self.assertEqual(len(set(made.slots.values())), count)

    @parametrize(
        "case", ("part of a parameter", "not tuned", "warps", "layout", "refused", "load")
    )
    def test_node_stays_as_it_was(self, case):
        places = place(64)
        (x,) = (p.address for p in places.placeholders)
        nodes = [
            KernelNode(u64(x, 0)) if case == "part of a parameter" else KernelNode(u64(x)),
            KernelNode(u64(OTHER), u64(OTHER)),
        ]
        autotuner = self.autotuner(0)
        if case == "layout":
            autotuner.number = 1
        if case == "not tuned":
            autotuner.launchers *= 2

        def load(compiled, device_index):
            raise RuntimeError("out of memory")

        _, model, taken, _ = self.takes(
            *nodes,
            places=places,
            autotuners=[autotuner],
            num_warps=8 if case == "warps" else 4,
            load=load if case == "load" else None,
            refused=[0] if case == "refused" else (),
        )
        self.assertEqual((taken, model.replaced), ([False], {}))

    def test_two_kernels_of_one_name(self):
        "A user's, specialized in two ways: the one that was launched is known by its handle."
        places = place(64)
        (x,) = (p.address for p in places.placeholders)

        autotuners = [
            self.autotuner(0, launchers=[self.launcher("that", 0x777)]),
            self.autotuner(0, launchers=[self.launcher("this", 0x20000)]),
        ]
        *_, taken, asked = self.takes(KernelNode(u64(x)), places=places, autotuners=autotuners)
        self.assertEqual((taken, asked[0][1]), ([True], "this"))
        *_, taken, _ = self.takes(KernelNode(u64(x)), places=places, autotuners=autotuners[:1])
        self.assertEqual(taken, [False])

    def test_kernel_of_an_operator(self):
        "It has the name of one of the module's, and is another."
        places = place(64)
        (x,) = (p.address for p in places.placeholders)
        _, model, taken, _ = self.takes(
            KernelNode(u64(x)),
            KernelNode(u64(x)),
            places=places,
            autotuners=[self.autotuner(0, launchers=[self.launcher("", 0x20001)])],
        )
        self.assertEqual((taken, model.replaced), ([False, False], {}))


instantiate_parametrized_tests(TableTest)


@needs_structs
class PlaceholderTest(TestCase):
    @settings(deadline=None, max_examples=60)
    @given(
        st.lists(
            st.tuples(
                st.one_of(
                    st.integers(0, 4096),
                    st.sampled_from((PAGE_BYTES - 256, PAGE_BYTES - 1, PAGE_BYTES)),
                    st.integers(0, 1 << 26),
                ),
                st.sampled_from(ALIGNMENTS),
            ),
            min_size=1,
            max_size=8,
        ),
    )
    def test_place(self, requests):
        with modelled_driver() as model:
            arena = PlaceholderArena(0, 0xFF)
            placed = arena.place(requests)
            self.assertEqual(len(placed), len(requests))
            ((low, high),) = model.reserved
            for p, (nbytes, alignment) in zip(placed, requests):
                self.assertEqual(p.address % alignment, 0)
                self.assertNotEqual(p.address % (2 * alignment), 0)
                self.assertGreaterEqual(p.address - p.start, GUARD_BYTES)
                self.assertGreaterEqual(p.end - (p.address + nbytes), GUARD_BYTES)
                self.assertLessEqual(low, p.start)
                self.assertLessEqual(p.end, high)
                for page in range(p.start, p.end, PAGE_BYTES):
                    self.assertIn(page, model.mapped)
            for p, q in itertools.pairwise(placed):
                self.assertLessEqual(p.end, q.start)
            # All of it is one page.
            self.assertEqual([len(page) for _, page in model.pages], [PAGE_BYTES])
            self.assertEqual(model.accessible, model.reserved)
            places = PlaceholderMap(placed)
            for k, (p, (size, _)) in enumerate(zip(placed, requests)):
                for offset in (0, size, -GUARD_BYTES, size + GUARD_BYTES - 1):
                    self.assertEqual(places.find(p.address + offset), (k, offset))

    def test_no_sizes(self):
        with modelled_driver() as model:
            self.assertEqual(PlaceholderArena(0, 0).place([]), [])
            self.assertEqual((model.pages, model.reserved), ([], []))

    def test_next_recording_uses_the_range_again(self):
        with modelled_driver() as model:
            arena = PlaceholderArena(0, 0xFF)
            first = arena.place([(4096, 16), (100, 16)])
            self.assertEqual(arena.place([(4096, 16), (100, 16)]), first)
            (smaller,) = arena.place([(64, 16)])
            self.assertEqual(smaller.address, first[0].address)
            self.assertEqual(len(model.reserved), 1)

    def test_growth(self):
        "A larger range is reserved elsewhere; the page stays the only one."
        with modelled_driver() as model:
            arena = PlaceholderArena(0, 0xFF)
            arena.place([(64, 16)])
            (large,) = arena.place([(64 << 20, 16)])
            self.assertEqual(len(model.pages), 1)
            (_, small_end), (start, end) = model.reserved
            self.assertGreaterEqual(start, small_end)
            self.assertLessEqual((start, large.end), (large.start, end))
            self.assertEqual({model.mapped[p] for p in model.mapped}, {0})
            self.assertEqual(arena.place([(64, 16)])[0].start, start)

    def test_two_threads_at_once(self):
        "The one with the smaller range may be the last to have it."
        first, second = threading.Event(), threading.Event()
        placed = []
        with modelled_driver() as model:
            arena = PlaceholderArena(0, 0xFF)
            set_access = model.cuMemSetAccess

            def wait(start: int, nbytes: int, *args: Any) -> Any:
                if not first.is_set():
                    first.set()
                    second.wait(0.2)
                return set_access(start, nbytes, *args)

            def place_more() -> None:
                first.wait()
                placed.extend(arena.place([(64 << 20, 16)]))
                second.set()

            with mock.patch.object(model, "cuMemSetAccess", wait):
                thread = threading.Thread(target=place_more)
                thread.start()
                placed.extend(arena.place([(64, 16)]))
                thread.join()
            for p in placed:
                for page in range(p.start, p.end, PAGE_BYTES):
                    self.assertIn(page, model.mapped)

    @parametrize("device_index", (0, 3))
    def test_page_is_of_the_device(self, device_index):
        with modelled_driver() as model:
            PlaceholderArena(device_index, 0).place([(64, 16)])
            ((prop, _),) = model.pages
            self.assertEqual(prop.location.id, device_index)
            self.assertEqual(
                prop.location.type, cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            )

    def test_hint(self):
        with modelled_driver() as model:
            nan, zero = PlaceholderArena(0, 0xFF), PlaceholderArena(0, 0)
            placed = nan.place([(64, 16)]) + zero.place([(64, 16)])
            self.assertEqual([p.start for p in placed], model.hints)
            for p in placed:
                # A user-space address in which few bits are zero.
                self.assertLess(p.start, 1 << 47)
                self.assertGreaterEqual(p.address.bit_count(), 10)

    def test_hint_is_no_promise(self):
        with modelled_driver() as model:
            taken = placeholder.ADDRESS_HINT
            model.occupied = [(taken, taken + (1 << 30))]
            (p,) = PlaceholderArena(0, 0).place([(64, 16)])
            self.assertEqual(p.start, taken + (1 << 30))

    @parametrize(
        "call", ("cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess")
    )
    def test_driver_fails(self, call):
        with modelled_driver() as model:
            arena = PlaceholderArena(0, 0xFF)
            model.failing = call
            with self.assertRaisesRegex(DriverError, "CUDA_ERROR_OUT_OF_MEMORY"):
                arena.place([(64, 16)])
            self.assertFalse(arena.take_damage())
            model.failing = None
            (p,) = arena.place([(64, 16)])
            self.assertIn((p.start, p.end), model.accessible)
            self.assertEqual(len(model.pages), 1)

    @parametrize("poison", (0, 0xFF))
    def test_damage(self, poison):
        with modelled_driver() as model:
            arena = PlaceholderArena(0, poison)
            self.assertFalse(arena.take_damage())
            arena.place([(4 * PAGE_BYTES, 16)])
            _, page = model.pages[0]
            # Compared whole: assertEqual would look at each byte.
            self.assertTrue(page[:] == bytes([poison]) * PAGE_BYTES)
            self.assertFalse(arena.take_damage())
            for at, value in itertools.product((0, 4097, PAGE_BYTES - 1), (1, 0x80, 0x7F)):
                page[at] = value
                self.assertTrue(arena.take_damage())
                self.assertTrue(page[:] == bytes([poison]) * PAGE_BYTES)
                self.assertFalse(arena.take_damage())
            page[:] = bytes([0x55]) * PAGE_BYTES
            self.assertTrue(arena.take_damage())

    def test_arenas(self):
        placeholder.arena.cache_clear()
        self.addCleanup(placeholder.arena.cache_clear)
        kinds = (placeholder.ZERO, placeholder.NAN)
        arenas = [placeholder.arena(d, kind) for d in (0, 1) for kind in kinds]
        self.assertEqual([(a.device_index, a.poison) for a in arenas],
                         [(0, 0), (0, 0xFF), (1, 0), (1, 0xFF)])
        self.assertIs(placeholder.arena(1, placeholder.NAN), arenas[-1])
        poison = torch.full((8,), 0xFF, dtype=torch.uint8)
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16,
                      torch.float8_e4m3fn, torch.float8_e5m2):
            values = poison.view(dtype).double()
            self.assertTrue(values.isnan().all(), dtype)


instantiate_parametrized_tests(PlaceholderTest)


class PlaceholderMapTest(TestCase):
    def test_find(self):
        # The order is that of the inputs, not of the addresses; 300 to 400 is a gap.
        places = PlaceholderMap(
            [
                Placeholder(200, 300, 250),
                Placeholder(400, 500, 410),
                Placeholder(100, 200, 116),
            ]
        )
        expected = {
            0: None,
            99: None,
            100: (2, -16),
            116: (2, 0),
            199: (2, 83),
            200: (0, -50),
            250: (0, 0),
            299: (0, 49),
            300: None,
            399: None,
            400: (1, -10),
            499: (1, 89),
            500: None,
            (1 << 64) - 1: None,
        }
        self.assertEqual({a: places.find(a) for a in expected}, expected)

    def test_no_placeholders(self):
        places = PlaceholderMap([])
        self.assertEqual([places.find(a) for a in (0, 1, (1 << 64) - 1)], [None] * 3)

    @settings(deadline=None)
    @given(
        st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=6),
        st.randoms(use_true_random=False),
    )
    def test_find_is_a_linear_search(self, gaps_and_sizes, random):
        placed, end = [], 1
        for gap, size in gaps_and_sizes:
            start, end = end + gap, end + gap + size
            placed.append(Placeholder(start, end, start + random.randrange(size)))
        random.shuffle(placed)
        places = PlaceholderMap(placed)
        for address in range(end + 2):
            hits = [
                (k, address - p.address)
                for k, p in enumerate(placed)
                if p.start <= address < p.end
            ]
            self.assertEqual([places.find(address)], hits or [None])

    @parametrize(
        "tensor,nbytes",
        (
            subtest((lambda: torch.empty(4, 6), 96), name="contiguous"),
            subtest((lambda: torch.empty(4, 6).t(), 96), name="transposed"),
            subtest((lambda: torch.empty(4, 6)[:, :2], (3 * 6 + 2) * 4), name="padded"),
            subtest((lambda: torch.empty(4, 1).expand(4, 9), 16), name="expanded"),
            subtest((lambda: torch.empty(8)[3:5], 8), name="offset"),
            subtest((lambda: torch.empty(0, 8), 0), name="empty"),
            subtest((lambda: torch.empty((), dtype=torch.int8), 1), name="scalar"),
            subtest((lambda: torch.empty(2, dtype=torch.cfloat), 16), name="complex"),
            subtest(
                (lambda: torch.empty(10).as_strided((3, 3), (2, 1)), 28), name="overlaps"
            ),
        ),
    )
    def test_storage_extent(self, tensor, nbytes):
        self.assertEqual(placeholder.storage_extent(tensor()), nbytes)


instantiate_parametrized_tests(PlaceholderMapTest)


class PoolTest(TestCase):
    def ranges(self, *segments: tuple[int, int, tuple[int, int]]) -> memory.PoolRanges:
        snapshot = [
            {"address": start, "total_size": size, "segment_pool_id": pool}
            for start, size, pool in segments
        ]
        with mock.patch("torch.cuda.memory_snapshot", return_value=snapshot) as taken:
            ranges = memory.PoolRanges((0, 1))
        taken.assert_called_once_with((0, 1), include_traces=False)
        return ranges

    def test_ranges(self):
        ranges = self.ranges(
            (500, 100, (0, 1)), (100, 50, (0, 1)), (150, 50, (0, 1)), (300, 50, (0, 2))
        )
        expected = [100, 149, 150, 199, 500, 599]
        outside = [0, 99, 200, 300, 349, 499, 600, 1 << 47]
        self.assertEqual([a for a in sorted(expected + outside) if a in ranges], expected)

    def test_pool_that_holds_nothing(self):
        self.assertNotIn(0, self.ranges())
        self.assertNotIn(310, self.ranges((300, 50, (0, 2))))

    def test_pool_id_may_be_a_list(self):
        self.assertIn(310, self.ranges((300, 50, [0, 1])))

    @parametrize(
        "pointers,alignment",
        (
            subtest(((), MAX_ALIGNMENT), name="none"),
            subtest(((512,), 256), name="larger"),
            subtest(((256, 512), 256), name="256"),
            subtest(((256, 128), 16), name="128"),
            subtest(((256, 64 + 16), 16), name="16"),
            subtest(((256, 8), 8), name="8"),
            subtest(((16, 4), 4), name="4"),
            subtest(((2, 16), 2), name="2"),
            subtest(((256, 256, 7), 1), name="odd"),
        ),
    )
    def test_common_alignment(self, pointers, alignment):
        self.assertEqual(common_alignment(pointers), alignment)

    @given(st.lists(st.integers(0, 1 << 48), min_size=1))
    def test_common_alignment_divides_all(self, pointers):
        alignment = common_alignment(pointers)
        self.assertTrue(all(p % alignment == 0 for p in pointers))
        for larger in ALIGNMENTS[: ALIGNMENTS.index(alignment)]:
            self.assertTrue(any(p % larger for p in pointers))


instantiate_parametrized_tests(PoolTest)


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
FLOAT8 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
INTEGERS = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
)
DTYPES = FLOATS + COMPLEX + FLOAT8 + INTEGERS

# Fewer elements than chunks, as many, a remainder, several in each.
SHAPES = ((), (1,), (7,), (1024,), (1025,), (33, 77), (4, 32, 48))


def random_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if dtype in FLOATS:
        return torch.randn(shape).to(dtype)
    if dtype in COMPLEX:
        return torch.view_as_complex(torch.randn(*shape, 2).to(dtype.to_real()))
    nbytes = math.prod(shape) * dtype.itemsize
    high = 2 if dtype == torch.bool else 100
    raw = torch.randint(0, high, (nbytes,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def same(expected: torch.Tensor, *others: torch.Tensor) -> bool:
    return proof.same(*map(proof.fingerprint, (expected, *others)))


class ProofTest(TestCase):
    @parametrize("dtype", DTYPES)
    def test_equal(self, dtype):
        for shape in SHAPES:
            t = random_tensor(shape, dtype)
            copy = t.clone()
            self.assertTrue(same(t, copy), shape)

    @parametrize("dtype", DTYPES)
    def test_changed_element(self, dtype):
        "To the poison of its dtype, or, where that is zero, by one bit."
        for shape in SHAPES:
            n = math.prod(shape)
            for at in sorted({0, n // 2, n - 1}):
                t = random_tensor(shape, dtype)
                changed = t.clone()
                element = changed.view(-1)[at : at + 1].view(torch.uint8)
                if t.is_floating_point() or t.is_complex():
                    element.fill_(0xFF)
                else:
                    element[0] ^= 1
                self.assertFalse(same(t, changed), (shape, at))
                self.assertFalse(same(changed, t), (shape, at))

    @parametrize("dtype", FLOATS + COMPLEX + INTEGERS)
    def test_element_that_was_not_written(self, dtype):
        "In a tensor of which each chunk is one element."
        t = torch.ones(1024).to(dtype)
        for at in (0, 511, 1023):
            changed = t.clone()
            changed[at] = 0
            self.assertFalse(same(t, changed))

    @parametrize("dtype", FLOATS)
    def test_small_differences_pass_for_floats(self, dtype):
        t = torch.rand(64 * 1024, dtype=torch.float64).to(dtype)
        t[0] = 1
        next_value = t.clone()
        next_value.view(proof._BITS[t.element_size()]).add_(1)
        self.assertFalse(torch.equal(t, next_value))
        self.assertTrue(same(t, next_value))
        tolerance = proof.TOLERANCE[dtype]
        self.assertFalse(same(t, (t.double() * (1 + 3 * tolerance)).to(dtype)))

    # Sums of bits are equal where as many numbers become negative as become positive.
    def test_element_that_is_almost_zero(self):
        "The sum of others may be, and is not more exact than these are."
        t = torch.randn(768)
        t[3], other = 1e-7, t.clone()
        other[3] = 3e-4
        self.assertTrue(same(t, other))
        other[3] = 3e-3
        self.assertFalse(same(t, other))

    def test_sums_that_cancel_out(self):
        "They may differ by as much as in another run, within reason."
        t = torch.randn(768)
        noise = 3e-3 * torch.randn(768)
        other, again = t + noise, t + noise.roll(1)
        self.assertFalse(same(t, other))
        self.assertTrue(same(t, other, again))
        self.assertTrue(same(t, other, t, again, t))
        self.assertFalse(same(t, t + 12 * noise, again))
        # Of float32, by what came from bfloat16.
        self.assertTrue(same(t, t + 12 * noise, t + 12 * noise.roll(1)))
        self.assertFalse(same(t, t + 300 * noise, t + 300 * noise))
        for wrong in (1.0, math.nan):
            other[5] = wrong
            self.assertFalse(same(t, other, again))
        self.assertFalse(same(t, t + noise, t * math.nan))

    @parametrize("dtype", FLOATS)
    def test_chunks_that_sum_up_to_zero(self, dtype):
        "Gradients of a normalized input: each row does, whatever it is."
        rows = torch.randn(3, 1024, 768, dtype=torch.float64)
        t, other, again = (
            torch.ops.aten.native_layer_norm_backward(
                grad, x, [768], x.mean(1, True), x.var(1, keepdim=True).rsqrt(), None, None, [True, False, False]
            )[0].to(dtype)
            for grad, x in zip(rows, rows.roll(1, 0))
        )
        noise = (t.double() * (1 + 1e-7 * torch.randn(t.shape))).to(dtype)
        unwritten = torch.empty_like(t)
        proof.mark_unwritten(unwritten)
        for wrong in (unwritten, torch.zeros_like(t), -t, other, again):
            self.assertFalse(same(t, wrong))
            self.assertFalse(same(t, wrong, noise))
        self.assertTrue(same(t, noise))

    def test_errors_that_are_larger_in_one_run(self):
        "A gradient that is zero but for rounding, before a batch norm for instance."

        def run() -> torch.Tensor:
            return torch.randn(1 << 20) * (1 + torch.rand(()))

        runs = [[run() for _ in range(5)] for _ in range(10)]
        self.assertGreater(sum(same(*of_ten) for of_ten in runs), 8)
        for t, _, *others in runs:
            self.assertFalse(same(t, torch.zeros_like(t), *others))

    @parametrize("numel", (512, 32_000))
    def test_few_large_elements_are_not_typical(self, numel):
        "As in masked logits."
        t, other = torch.randn(2, numel)
        for i in range(0, numel, 100):
            t[i] = other[i] = torch.finfo(torch.float32).min
        self.assertFalse(same(t, other))

    def test_large_tensor_takes_little_memory(self):
        "Sums of bfloat16 as float64 would take four times what it does."
        with mock.patch.object(proof, "MAX_ELEMENTS", 1 << 14):
            t = torch.randn((1 << 20) + 7).to(torch.bfloat16)
            expected = proof.fingerprint(t)
        actual = proof.fingerprint(t)
        self.assertEqual(expected.bits, actual.bits)
        self.assertEqual(expected.sums["total"], actual.sums["total"])
        self.assertEqual(expected.sums["signed"], actual.sums["signed"])
        self.assertEqual(expected.sums["norm"], actual.sums["norm"])

    def test_sign(self):
        t = torch.tensor([1.0, -2.0]).repeat(4096)
        self.assertFalse(same(t, -t))

    # Sums of eight-byte words wrap.
    def test_sign_of_float64(self):
        t = torch.rand(4096, dtype=torch.float64)
        self.assertFalse(same(t, -t))

    @parametrize("dtype", INTEGERS[1:] + FLOAT8[:2])
    def test_no_difference_passes_for_others(self, dtype):
        t = random_tensor((64 * 1024,), dtype)
        for at in (0, 40_000, -1):
            changed = t.clone()
            changed[at : at + 1 or None].view(torch.uint8)[0] ^= 1
            self.assertFalse(same(t, changed))

    @parametrize("dtype", FLOATS)
    @parametrize("shape", ((8,), (1024,), (64, 1024)))
    def test_nan_never_passes(self, dtype, shape):
        t = random_tensor(shape, dtype)
        poisoned = t.clone()
        poisoned.view(-1)[-1] = math.nan
        self.assertFalse(same(t, poisoned))
        self.assertFalse(same(poisoned, t))
        poison = torch.full((t.numel() * t.element_size(),), 0xFF, dtype=torch.uint8)
        self.assertFalse(same(t, poison.view(dtype).view(shape)))
        # It is the program's own NaN where the bits are the same, and only there.
        self.assertTrue(same(poisoned, poisoned.clone()))
        poisoned.view(-1)[0] += 1
        self.assertFalse(same(t, poisoned))

    # An infinity makes the chunk's norm infinite, and with it the tolerance.
    def test_infinity_is_in_no_tolerance(self):
        masked = torch.randn(8).index_fill(0, torch.tensor([2]), -math.inf)
        other = torch.zeros(8)
        self.assertFalse(same(masked, other))

    # All of a tensor with fewer elements than chunks is one chunk.
    def test_element_of_small_tensor_that_was_not_written(self):
        t = torch.ones(1000, dtype=torch.bfloat16)
        changed = t.clone()
        changed[5:15] = 0
        self.assertFalse(same(t, changed))

    @parametrize("dtype", FLOATS + (torch.int64, torch.uint8))
    def test_permuted_chunks(self, dtype):
        rows = torch.arange(1, 1025).remainder(120)[:, None].expand(1024, 3).to(dtype)
        swapped = rows.clone()
        swapped[[0, 500]] = rows[[500, 0]]
        self.assertFalse(same(rows, swapped))
        self.assertFalse(same(rows, rows.flip(0)))

    @parametrize("dtype", FLOATS + (torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64))
    def test_permuted_elements(self, dtype):
        "In a chunk: other results whose elements sum up to the same for any input."
        rows = random_tensor((1024, 64), dtype)
        once = torch.zeros(1024, 64).index_fill(1, torch.tensor(3), 1).to(dtype)
        for t in (rows, once):
            for other in (t.flip(1), t.roll(2, 1)):
                marks = map(proof.fingerprint, (t, other))
                self.assertFalse(proof.identical(*marks))
            self.assertTrue(same(t, t.clone()))
        self.assertFalse(same(rows, rows.flip(1)))

    @parametrize("shape", ((2048, 512), (1024, 7), (4, 1 << 16)))
    def test_indices_of_a_sort(self, shape):
        x, y = torch.randn(2, *shape)
        self.assertFalse(same(x.argsort(-1), y.argsort(-1)))
        self.assertFalse(same(x.argsort(-1), (x * math.nan).argsort(-1)))

    @parametrize("shape", ((2, 3), (64, 64), (100, 33)))
    def test_layouts(self, shape):
        t = torch.randn(shape)
        rows, columns = shape
        padded = torch.full((rows, columns + 5), math.nan)
        padded[:, :columns] = t
        offset = torch.full((t.numel() + 3,), math.nan)
        offset[3:] = t.flatten()
        for other in (padded[:, :columns], offset[3:].view(shape)):
            self.assertTrue(same(t, other))
            self.assertTrue(same(other, t))
        # Padding is not looked at, elements are.
        padded[:, columns:] = 0
        self.assertTrue(same(t, padded[:, :columns]))
        padded[rows - 1, columns - 1] += 1 + rows * columns
        self.assertFalse(same(t, padded[:, :columns]))

    @parametrize("shape", ((2, 3), (64, 64), (100, 33)))
    def test_transposed(self, shape):
        t = torch.randn(shape).t()
        self.assertTrue(same(t, t.clone(memory_format=torch.preserve_format)))
        changed = t.clone(memory_format=torch.preserve_format)
        changed[-1, -1] += 1 + t.numel()
        self.assertFalse(same(t, changed))

    def test_dense_tensor_is_not_copied(self):
        for t in (
            torch.randn(4, 5, 6),
            torch.randn(4, 5, 6).permute(2, 0, 1),
            torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            torch.randn(40)[8:],
        ):
            self.assertEqual(proof._dense(t).data_ptr(), t.data_ptr())
            self.assertEqual(proof._dense(t).shape, (t.numel(),))

    @parametrize("dtype", (torch.int8, torch.float32, torch.float64, torch.int64))
    def test_elements_at_one_distance(self, dtype):
        base = torch.arange(24).to(dtype).view(6, 4)
        for t in base[:, 0], base[:, :1], base.view(-1)[::2], base[0, :1].expand(9):
            self.assertTrue(same(t, t.clone()))
            other = t.contiguous()
            other[-1] += 1
            self.assertFalse(same(t, other))
            self.assertFalse(proof.is_unwritten(t))

    def test_expanded(self):
        t = torch.randn(64, 1).expand(64, 80)
        self.assertTrue(same(t, t.clone()))
        self.assertTrue(same(t, t.contiguous()))
        other = t.contiguous()
        other[3, 4] += 100
        self.assertFalse(same(t, other))

    @parametrize("dtype", (torch.float32, torch.int64, torch.bool, torch.complex64))
    def test_empty(self, dtype):
        empty = torch.empty(0, 3, dtype=dtype)
        self.assertTrue(same(empty, torch.empty(0, 3, dtype=dtype)))
        self.assertFalse(same(empty, torch.zeros(3, dtype=dtype)))
        self.assertFalse(same(torch.zeros(3, dtype=dtype), empty))

    def test_scalar(self):
        self.assertTrue(same(torch.tensor(2.5), torch.tensor(2.5)))
        self.assertFalse(same(torch.tensor(2.5), torch.tensor(2.6)))
        self.assertFalse(same(torch.tensor(2), torch.tensor(3)))

    def test_zero(self):
        "The tolerance is relative: nothing passes for zero but zero."
        zero = torch.zeros(4096)
        self.assertTrue(same(zero, -zero))
        self.assertFalse(same(zero, torch.full((4096,), 1e-30)))

    def test_needs_grad(self):
        t = torch.randn(8, requires_grad=True)
        self.assertFalse(proof.fingerprint(t).sums["total"].requires_grad)

    # A lazy conjugate or negative has to be resolved first.
    def test_conjugate(self):
        t = torch.randn(8, dtype=torch.complex64)
        self.assertTrue(same(t.conj(), t.conj().resolve_conj()))

    def test_negative(self):
        t = torch.randn(8, dtype=torch.complex64).conj().imag
        self.assertTrue(same(t, t.resolve_neg()))

    @settings(deadline=None)
    @given(
        st.integers(1, 5000), st.integers(0, 1 << 30), st.sampled_from((32, 16, 8))
    )
    def test_any_size(self, n, at, bits):
        t = torch.arange(n).remainder(100).to(getattr(torch, f"int{bits}"))
        self.assertTrue(same(t, t.clone()))
        changed = t.clone()
        changed[at % n] += 1
        self.assertFalse(same(t, changed))

    def test_fingerprint_is_small(self):
        mark = proof.fingerprint(torch.randn(1 << 20))
        self.assertLessEqual(mark.bits.numel(), proof.CHUNKS + 1)
        self.assertEqual(mark.bits.shape, mark.sums["total"].shape)
        self.assertEqual(mark.bits.shape, mark.sums["signed"].shape)
        self.assertEqual(mark.bits.shape, mark.sums["norm"].shape)

    @parametrize("written", (False, True))
    def test_memory_of_a_comparison_with_the_mark(self, written):
        class Largest(TorchDispatchMode):
            nbytes = count = 0

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                result = func(*args, **(kwargs or {}))
                if func is torch.ops.aten.eq.Scalar:
                    self.count += 1
                    self.nbytes = max(self.nbytes, result.nbytes)
                return result

        t = torch.randn(1 << 20)
        if not written:
            proof.mark_unwritten(t)
        with mock.patch.object(proof, "MAX_ELEMENTS", 1 << 18), Largest() as largest:
            self.assertEqual(proof.is_unwritten(t), not written)
        # The program gets the tensor of a recording. It is as new.
        self.assertEqual(t._version, 0)
        self.assertEqual(largest.nbytes, 1 << 18)
        self.assertEqual(largest.count, 1 if written else 16)
        self.assertTrue(proof.is_unwritten(torch.empty(0)))

    def test_failure(self):
        def of_output(output: Any) -> proof.Fingerprint | None:
            return proof.fingerprint(output) if isinstance(output, torch.Tensor) else None

        def proved(*inputs_and_outputs: list[Any]) -> proof.Proof:
            return proof.Proof(*inputs_and_outputs, mutated=[2])

        a, b, c = torch.randn(8), torch.randn(8), torch.randn(8)
        x, y = torch.randn(64), torch.randn(2000)
        with mock.patch.object(proof.Proof, "_of_output", staticmethod(of_output)):
            checked = proved([a, b, c], [x, 3, None, y])
            self.assertIsNone(checked.failure(proved([a, b, c], [x, 3, None, y])))
            # An input that is not mutated is not looked at, nor is what is no tensor.
            self.assertIsNone(checked.failure(proved([a, b + 1, c], [x, 4, None, y])))
            self.assertRegex(
                str(checked.failure(proved([a, b, c], [x, 3, None, y * 2]))),
                r"^output 3 \(torch.float32 \[2000\]\) differs",
            )
            self.assertRegex(
                str(checked.failure(proved([a, b, c], [x + 1, 3, None, y * 2]))),
                "^output 0 .*differs",
            )
            c += 1
            self.assertRegex(
                str(checked.failure(proved([a, b, c], [x, 3, None, y]))),
                "^mutated input 2 .*differs",
            )

    @parametrize("dtype", (torch.int64, torch.bool, torch.int32, torch.complex64, torch.float32))
    def test_scalars(self, dtype):
        "Those that an operator allocates may be a seed that was not written."
        values = torch.tensor([0, 1]).to(dtype)

        def proved(i: int, *unmarked: int) -> proof.Proof:
            on_device = placeholder.tensor_at(values[i].data_ptr(), values[i].to("meta"), 0)
            return proof.Proof([], [on_device], [], unmarked)

        def on_host(t: torch.Tensor) -> proof.Fingerprint:
            (value,) = [v for v in values if v.data_ptr() == t.data_ptr()]
            return fingerprint(value)

        fingerprint = proof.fingerprint
        with (
            mock.patch.object(proof, "fingerprint", on_host),
            mock.patch.object(proof, "is_unwritten", lambda t: False),
        ):
            self.assertIsNone(proved(0).failure(proved(0)))
            self.assertIsNotNone(proved(0).failure(proved(1)))
            is_seed = proved(0).failure(proved(1, 0)) is None
            self.assertEqual(is_seed, dtype == torch.int64)

    def test_outputs_on_the_host_are_skipped(self):
        checked = proof.Proof([], [torch.zeros(4), None, 1], mutated=[])
        self.assertEqual(checked.outputs, [None, None, None])


instantiate_parametrized_tests(ProofTest)


class SavedInputTest(TestCase):
    @parametrize(
        "make",
        (
            lambda: torch.randn(8, 4),
            lambda: torch.randn(8, 1).expand(8, 4),
            lambda: torch.randn(8, 16)[:, 3:7],
            lambda: torch.randn(4, 8).t(),
            lambda: torch.randn(16).as_strided((5, 4), (2, 1), 3),
            lambda: torch.randn(0, 4),
            lambda: torch.tensor(3.0),
        ),
    )
    def test_restores_the_memory(self, make):
        t = make()
        before = t.clone()
        saved = SavedInput(t)
        t.untyped_storage().fill_(0x55)
        saved.restore(t)
        self.assertEqual(t, before, atol=0, rtol=0)

    def test_leaves_what_lies_outside(self):
        base = torch.zeros(16)
        saved = SavedInput(base[4:8])
        base.fill_(1)
        saved.restore(base[4:8])
        self.assertEqual(base, torch.tensor([1.0] * 4 + [0.0] * 4 + [1.0] * 8))


instantiate_parametrized_tests(SavedInputTest)


if __name__ == "__main__":
    run_tests()
