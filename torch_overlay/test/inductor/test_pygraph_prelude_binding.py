# Owner(s): ["module: inductor"]
"""
A prelude is added to graphs on the modelled driver. test_pygraph_prelude.py compiles its kernel and runs it.
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

from hypothesis import given, settings, strategies as st

import torch
from torch._inductor.pygraph.graph import prelude
from torch._inductor.pygraph.graph.binding import NodeUpdateBinding
from torch._inductor.pygraph.graph.placeholder import (
    MAX_ALIGNMENT,
    Placeholder,
    PlaceholderArena,
    PlaceholderMap,
)
from torch._inductor.pygraph.graph.prelude import CAPACITIES, Prelude, PreludeUnavailable
from torch._inductor.pygraph.types.reason import RefusedError
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.modelled_driver import modelled_driver
from torch.testing._internal.modelled_nodes import (
    cu,
    EXECUTABLE,
    GRAPH,
    KernelNode,
    MemcpyNode,
    MemsetNode,
    Node,
    PRELUDE_FUNCTION,
    u64,
)
from torch.testing._internal.pygraph_common import needs_structs
from torch.testing._internal.pygraph_graphs import (
    copies,
    FAR,
    fills,
    kernels,
    moved,
    NEAR,
    OTHER,
    place,
    pointers,
    SIZES,
)


@needs_structs
class PreludeTest(TestCase):
    @contextlib.contextmanager
    def bound(self, places, *nodes, stubborn=()):
        functions = {n: cu.CUfunction(PRELUDE_FUNCTION + n) for n in CAPACITIES}
        with (
            modelled_driver(*nodes) as model,
            mock.patch.object(prelude, "_kernels", lambda *args: functions),
            mock.patch.object(Prelude, "_device", torch.device("cpu")),
        ):
            model.stubborn = set(stubborn)
            made = Prelude(GRAPH, places, 0)
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


if __name__ == "__main__":
    run_tests()
