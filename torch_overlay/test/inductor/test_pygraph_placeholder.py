# Owner(s): ["module: inductor"]
"""
Addresses of placeholders, which input an address belongs to, and the extent of a graph's pool.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any
from unittest import mock

from hypothesis import given, settings, strategies as st

import torch
from torch._inductor.pygraph.capture.allocation import ALIGNMENTS, common_alignment
from torch._inductor.pygraph.graph import memory, placeholder, zeros
from torch._inductor.pygraph.graph.driver import DriverError
from torch._inductor.pygraph.graph.placeholder import (
    GUARD_BYTES,
    MAX_ALIGNMENT,
    PAGE_BYTES,
    Placeholder,
    PlaceholderArena,
    PlaceholderMap,
)
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    subtest,
)
from torch.testing._internal.modelled_driver import modelled_driver
from torch.testing._internal.modelled_nodes import cu
from torch.testing._internal.pygraph_common import needs_structs


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

    def test_shared_zeros(self):
        "All of them lie in one page, which no recording writes."
        with (
            modelled_driver() as model,
            mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
            mock.patch.object(torch.cuda, "current_stream"),
        ):
            placeholder.arena(0, placeholder.ZERO).place([(64, 16)])
            found = []
            for size in ((3,), (1 << 20, 3), (0, 4), (5 << 20,), ()):
                found.append(zeros.shared_zeros(size, torch.float32, 0))
            for t, size in zip(found, ((3,), (1 << 20, 3), (0, 4), (5 << 20,), ())):
                self.assertEqual((t.shape, t.is_contiguous()), (size, True))
                self.assertFalse(t.any())
            self.assertEqual(len(model.pages), 2)
            # What was given out stays where it is.
            self.assertEqual(found[-1].data_ptr(), found[3].data_ptr())
            self.assertTrue(all(t.data_ptr() in model.mapped for t in found if t.numel()))

            with mock.patch.object(
                torch.cuda, "is_current_stream_capturing", lambda: True
            ):
                zeros.shared_zeros((5 << 20,), torch.float32, 0)
                with self.assertRaisesRegex(RuntimeError, "captured"):
                    zeros.shared_zeros((64 << 20,), torch.float32, 0)

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

    def test_other_values(self):
        "For a while. Each dtype finds finite numbers that are not zero, or small indices."
        placeholder.arena.cache_clear()
        self.addCleanup(placeholder.arena.cache_clear)
        with modelled_driver() as model:
            for poison in placeholder.POISONS:
                placeholder.arena(0, poison).place([(64, 16)])
            pages = [page for _, page in model.pages]
            with placeholder.other_values(0):
                floats, integers, outputs = (torch.frombuffer(bytearray(page[:64]), dtype=torch.uint8) for page in pages)
                for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
                    values = floats.view(dtype)
                    self.assertTrue(bool((values.isfinite() & (values != 0)).all()))
                self.assertEqual(integers.view(torch.int64).unique().tolist(), [1])
                self.assertEqual(outputs.unique().tolist(), [placeholder.UNWRITTEN])
            for page, poison in zip(pages, placeholder.POISONS, strict=True):
                self.assertTrue(page[:] == bytes([poison]) * PAGE_BYTES)

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


if __name__ == "__main__":
    run_tests()
