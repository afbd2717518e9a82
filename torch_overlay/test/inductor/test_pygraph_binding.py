# Owner(s): ["module: inductor"]
"""
Bindings of a graph's nodes, on a machine that need not have a GPU: the driver is modelled, with
its own structs, and parameters are read from memory as it reads them.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import struct
from typing import Any, TYPE_CHECKING
from unittest import mock

from hypothesis import given, settings

from torch._inductor.pygraph import native
from torch._inductor.pygraph.capture.allocation import ALIGNMENTS
from torch._inductor.pygraph.graph import binding, copies as copying, driver
from torch._inductor.pygraph.graph.binding import NodeUpdateBinding
from torch._inductor.pygraph.graph.driver import DriverError
from torch._inductor.pygraph.graph.placeholder import (
    GUARD_BYTES,
    MAX_ALIGNMENT,
    PAGE_BYTES,
    PlaceholderArena,
    PlaceholderMap,
)
from torch._inductor.pygraph.types.reason import RefusedError
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    subtest,
)
from torch.testing._internal.modelled_driver import modelled_driver
from torch.testing._internal.modelled_nodes import (
    COPY_FUNCTION,
    cu,
    EXECUTABLE,
    GRAPH,
    KernelNode,
    MemcpyNode,
    MemsetNode,
    Node,
    u64,
)
from torch.testing._internal.pygraph_common import needs_compiled, needs_structs
from torch.testing._internal.pygraph_graphs import (
    calls,
    FAR,
    graphs,
    moved,
    NEAR,
    OTHER,
    place,
    SIZES,
)


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


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


@needs_structs
class CopiesTest(TestCase):
    "Copies that kernels make in the place of nodes."

    class Copy(MemcpyNode):
        def __init__(self, *args, **fields):
            super().__init__(*args)
            self.fields = fields

        def params(self, handle):
            params = super().params(handle)
            for name, value in self.fields.items():
                setattr(params, name, value)
            return params

    @parametrize(
        "fields",
        [subtest({name: value}, name=f"{name}_{value}") for name in ("Height", "Depth") for value in (0, 2)]
        + [subtest({name: 1}, name=name) for name in ("srcY", "srcZ", "dstY", "dstZ")],
    )
    def test_not_one_row(self, fields):
        """A copy of one row at the given addresses has a kernel. Other copies keep their nodes."""
        places = place(64)
        (x,) = (p.address for p in places.placeholders)
        with (
            modelled_driver(self.Copy(OTHER, x, 64), self.Copy(OTHER, x, 64, **fields)) as model,
            mock.patch.object(copying, "copy_kernel", lambda index: cu.CUfunction(COPY_FUNCTION)),
        ):
            copying.replace_copies(GRAPH, places, 0)
            kinds = [model.nodes[i].kind for i in model.graphs[GRAPH]]
        self.assertEqual(kinds, ["MEMCPY", "KERNEL"])


instantiate_parametrized_tests(CopiesTest)


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
        with self.assertRaisesRegex(RefusedError, "may have freed"):
            binding.read_host_memory(address, 4)

    @parametrize("nbytes", (64, binding.MAX_HOST_COPY_BYTES + 1))
    @parametrize("ends", ((OTHER, u64(1, 2, 3)), (u64(0), OTHER)))
    def test_host_memory_that_may_be_freed(self, ends, nbytes):
        "As the vector of sizes that a grouped GEMM copies. No graph can replay the copy."
        with self.assertRaisesRegex(RefusedError, "may have freed") as raised:
            with self.bound(place(4096), MemcpyNode(*ends, nbytes, pinned=False)):
                pass
        self.assertFalse(raised.exception.is_capturable)

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
            kernel, copy, memset = "kernel_0", "1 x 64 bytes from device to device", "64 x 1 elements of 4 bytes"
            refusal = "CUDA_ERROR_INVALID_VALUE: .*" + (kernel, copy, memset)[refused]
            with self.assertRaisesRegex(DriverError, refusal):
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


if __name__ == "__main__":
    run_tests()
