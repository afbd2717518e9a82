# Owner(s): ["module: inductor"]
"""
Graphs with collectives, on two GPUs, and how ranks agree. test_pygraph_record.py has the same
on a modelled device, and what is not bound.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TYPE_CHECKING
from unittest import mock

from hypothesis import given, settings, strategies as st

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor.pygraph import FunctionReport, report
from torch._inductor.pygraph.capture import agreement, allocation, bound, collectives
from torch._inductor.pygraph.report import Report
from torch._inductor.pygraph.types.partition import Collective
from torch._inductor.pygraph.types.reason import Code, Reason, RefusedError
from torch._inductor.pygraph.verify.diagnose import Verdict
from torch._inductor.test_case import TestCase
from torch.distributed import _functional_collectives as functional
from torch.testing._internal.common_distributed import (
    _dynamo_dist_per_rank_init,
    DynamoDistributedMultiProcTestCase,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode


if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator


def reduced(x: torch.Tensor) -> torch.Tensor:
    return functional.all_reduce(x, "sum", dist.group.WORLD)


class SimulatedStore:
    def __init__(self) -> None:
        self.content: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.content[key] = value

    def get(self, key: str) -> bytes:
        return self.content[key].encode()

    def add(self, key: str, amount: int) -> int:
        self.content[key] = str(int(self.content.get(key, 0)) + amount)
        return int(self.content[key])

    def compare_set(self, key: str, expected: str, desired: str) -> None:
        self.content.setdefault(key, desired)


@dataclasses.dataclass
class SimulatedRank:
    """A rank in the middle of an agreement, which may die after ``lives`` requests."""

    requests: Generator[Any, Any, Any]
    lives: int | None
    answer: Any = None
    request: Any = None
    returned: Any = None
    is_done: bool = False

    def step(self, store: SimulatedStore, *, times_out: bool = False) -> bool:
        """Answer a request. Return False if it waits."""
        if self.request is not None:
            method, *args = self.request
            if method == "wait":
                if args[0] not in store.content and not times_out:
                    return False
                self.answer = args[0] in store.content
            else:
                self.answer = getattr(store, method)(*args)
        try:
            self.request = self.requests.send(self.answer)
        except StopIteration as end:
            self.returned, self.is_done = end.value, True
        if self.lives is not None:
            self.lives -= 1
        return True

    @property
    def is_dead(self) -> bool:
        return self.lives is not None and self.lives <= 0 and not self.is_done


class AgreementTest(TestCase):
    """Ranks come in every order, late or never, and die at every request."""

    def agree(self, data: Any, groups: dict[int, list[list[int]]], *, faults: bool) -> list[SimulatedRank]:
        draw, store = data.draw, SimulatedStore()
        votes = [draw(st.sampled_from([True, True, True, None])) if faults else True for _ in groups]
        ranks = []
        for rank, vote in zip(groups, votes):
            requests = agreement.agreement("f/1", rank, groups[rank], vote and rank, sorted)
            ranks.append(SimulatedRank(requests, draw(st.none() | st.integers(0, 12)) if faults else None))
        while runs := [r for r in ranks if not r.is_done and not r.is_dead]:
            one = draw(st.sampled_from(runs))
            late = faults and draw(st.integers(0, 9)) == 0
            if one.step(store, times_out=late):
                continue
            if all(not r.step(store) for r in runs):
                # All wait. Without faults, none would.
                self.assertTrue(faults)
                one.step(store, times_out=True)
        expected = None if None in votes else [*groups]
        returned = [r.returned for r in ranks if r.is_done]
        # Ranks that return agree, and do so only if all of them took part.
        self.assertTrue(all(r in (None, expected) for r in returned), returned)
        self.assertLessEqual(len({str(r) for r in returned}), 1)
        if not faults:
            self.assertEqual(returned, [expected] * len(ranks))
        return ranks

    @settings(deadline=None, max_examples=60, derandomize=True)
    @given(st.data(), st.booleans())
    def test_one_group(self, data, faults):
        size = data.draw(st.integers(2, 8))
        self.agree(data, {rank: [[*range(size)]] for rank in range(size)}, faults=faults)

    @settings(deadline=None, max_examples=60, derandomize=True)
    @given(st.data(), st.booleans())
    def test_mesh(self, data, faults):
        """Each rank is in a row and a column. No group has them all."""
        rows, columns = data.draw(st.sampled_from([(2, 2), (2, 3), (2, 4), (4, 2), (1, 4)]))
        groups = {
            r: [
                [r // columns * columns + c for c in range(columns)],
                [r % columns + columns * i for i in range(rows)],
            ]
            for r in range(rows * columns)
        }
        self.agree(data, groups, faults=faults)

    def test_groups_of_other_ranks(self):
        """Two replicas without a group in common run a function of one name."""
        store = SimulatedStore()
        ranks = {
            r: SimulatedRank(agreement.agreement("f/1", r, [[r // 2 * 2, r // 2 * 2 + 1]], r, sum), None)
            for r in range(4)
        }
        while not all(r.is_done for r in ranks.values()):
            for rank in ranks.values():
                rank.is_done or rank.step(store)
        self.assertEqual([r.returned for r in ranks.values()], [1, 1, 5, 5])


class AgreeTest(TestCase):
    @parametrize("ready", ((True, True, True), (True, None, True), (None,) * 3))
    def test_all_or_none(self, ready):
        store = dist.HashStore()

        def ask(rank):
            requests = agreement.agreement("f", rank, [[0, 1, 2]], ready[rank], all)
            return agreement.run(requests, store, agreement.PATIENCE)

        with ThreadPoolExecutor(3) as pool:
            self.assertEqual(list(pool.map(ask, range(3))), [True if all(ready) else None] * 3)

    @parametrize("kind", ("hash", "file", "tcp"))
    def test_rank_that_does_not_come(self, kind):
        "What was decided without it holds for it when it does."
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        if kind == "file":
            store = dist.FileStore(f"{directory.name}/store", 2)
        elif kind == "tcp":
            store = dist.TCPStore("localhost", 0, 1, True, wait_for_workers=False)
        else:
            store = dist.HashStore()
        for rank in range(2):
            requests = agreement.agreement("f", rank, [[0, 1]], True, all)
            self.assertIsNone(agreement.run(requests, store, datetime.timedelta(seconds=0.1)))

    def test_group_that_is_gone(self):
        self.assertIsNone(agreement.agree(["no such group"], "f", True))

    def test_waits_in_vain(self):
        "Each makes the next one shorter."
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        self.addCleanup(dist.destroy_process_group)
        group = dist.group.WORLD.group_name
        given: list[float] = []
        clock = mock.Mock(monotonic=lambda: sum(given))

        def run(requests: Any, store: Any, patience: datetime.timedelta) -> None:
            given.append(patience.total_seconds())

        with (
            mock.patch.object(agreement, "run", run),
            mock.patch.object(agreement, "time", clock),
            mock.patch.object(agreement, "_waits_in_vain", 0),
        ):
            for i in range(3):
                self.assertIsNone(agreement.agree([group], f"f/{i}", True))
        self.assertEqual(given, [120, 30, 7.5])

    def test_patience(self):
        """A rank waits for a part of what its group waits for a collective."""
        dist.init_process_group(
            "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=8)
        )
        self.addCleanup(dist.destroy_process_group)
        with mock.patch.object(agreement, "run") as run:
            agreement.agree([dist.group.WORLD.group_name], "f", True)
        self.assertEqual(run.call_args.args[2], datetime.timedelta(seconds=2))
        self.assertTrue(agreement.agree([dist.group.WORLD.group_name], "f", True))


class DescribeTest(TestCase):
    def test_ranks_and_groups(self):
        self.assertEqual(agreement.own_name(), "")
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
        self.addCleanup(dist.destroy_process_group)
        pair, world = dist.new_group([0, 1]).group_name, dist.group.WORLD.group_name
        ops = [Collective("all_reduce_", pair), Collective("wait_tensor"), Collective("all_reduce_", pair)]
        described = agreement.describe([*ops, Collective("all_gather_into_tensor", world), Collective("a", "gone")])
        self.assertEqual(
            described,
            [
                f"all_reduce_ x 2 in group {pair} of ranks 0, 1",
                f"all_gather_into_tensor x 1 in group {world} of ranks 0, 1, 2, 3",
                "a x 1 in group gone of unknown ranks",
            ],
        )
        self.assertEqual(report().title, "rank 1")
        entry = FunctionReport("call", "inference", collectives=described[:1])
        self.assertIn(described[0], Report([entry], []).text(120))


class StandInTest(TestCase):
    @parametrize("size", (1, 4, 6, 7, 12, 24))
    def test_each_element_counts(self, size):
        operand, result = torch.randn(12), torch.empty(size)
        collectives.stand_in(result, operand)
        for i in range(12):
            other, changed = operand.clone(), torch.empty(size)
            other[i] += 1
            collectives.stand_in(changed, other)
            self.assertFalse(torch.equal(result, changed))

    def test_part_of_a_word(self):
        "Results of two bytes an element, of which there are odd numbers."
        operand, result = torch.randn(5).bfloat16(), torch.empty(7, dtype=torch.bfloat16)
        collectives.stand_in(result, operand)
        self.assertEqual(result, operand.repeat(2)[:7])

    def test_copy_in_the_middle_of_a_word(self):
        "A load of a word would fault on the device."

        class Aligned(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
            ) -> Any:
                for t in (*args, *(kwargs or {}).values()):
                    if isinstance(t, torch.Tensor) and "view" not in func.name():
                        case.assertEqual(t.data_ptr() % t.element_size(), 0)
                return func(*args, **(kwargs or {}))

        case = self
        source = torch.frombuffer(bytearray(range(16)), dtype=torch.bfloat16, offset=2, count=6)
        copy = torch.empty_like(source)
        with Aligned():
            allocation.copy_by_kernel(copy, source)
        self.assertEqual(copy, source)

    def test_without_elements(self):
        result = torch.empty(3)
        collectives.stand_in(result, torch.empty(0))
        self.assertEqual(result, torch.zeros(3))
        collectives.stand_in(torch.empty(0), result)


instantiate_parametrized_tests(AgreeTest)
instantiate_parametrized_tests(StandInTest)


@unittest.skipIf(torch.cuda.device_count() < 2, "requires CUDA and two GPUs")
class CollectivesTest(DynamoDistributedMultiProcTestCase):
    @property
    def world_size(self) -> int:
        return 2

    @contextlib.contextmanager
    def ranks(self) -> Iterator[None]:
        # By file: tests may run beside each other.
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("nccl", store=store, rank=self.rank, world_size=self.world_size)
        try:
            with _dynamo_dist_per_rank_init(self.rank, self.world_size, init_pg=False):
                yield
        finally:
            dist.destroy_process_group()

    def randn(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda")

    def check(self, fn: Callable[..., torch.Tensor], calls: int = 9, **options: Any) -> None:
        "Each rank has inputs of its own, other ones in each call."
        compiled = torch.compile(fn, options={"pygraph": True, "pygraph_ranks": False, **options})
        uncaptured = torch.compile(fn)
        torch.manual_seed(self.rank)
        kept = []
        for _ in range(calls):
            inputs = [self.randn(64, 64), self.randn(64)]
            expected = uncaptured(*(x.clone() for x in inputs))
            kept.append((compiled(*inputs), expected))
        for actual, expected in kept:
            self.assertTrue(torch.equal(actual, expected))

    def test_between_kernels(self):
        with self.ranks():
            weight = self.randn(64, 64)
            self.check(lambda x, y: reduced(x @ weight).relu() @ weight + y)
            (entry,) = report()
            self.assertEqual((entry.choice, entry.copied_bytes), ("node_update", 0))
            self.assertGreater(counters["pygraph"]["bound_inputs"], 0)

    def test_of_an_output(self):
        with self.ranks():
            self.check(lambda x, y: reduced(x.sin() + y))
            (entry,) = report()
            self.assertEqual((entry.choice, entry.copied_bytes), ("node_update", 0))

    def test_several(self):
        def fn(x, y):
            for _ in range(5):
                x = reduced(x.sin() + y).cos()
            return x

        with self.ranks():
            self.check(fn)
            (entry,) = report()
            self.assertEqual(entry.choice, "node_update")

    def test_gathered(self):
        def fn(x, y):
            x = functional.all_gather_tensor(x.sin() + y, 0, dist.group.WORLD)
            return x.cos()

        with self.ranks():
            self.check(fn)
            (entry,) = report()
            self.assertEqual(entry.choice, "copy")

    @parametrize("name", ("gather", "scatter", "exchange"))
    def test_bound_by_ranks(self, name):
        def fn(x, y):
            x, group = x.sin() + y, dist.group.WORLD
            if name == "gather":
                return functional.all_gather_tensor(x, 0, group).cos()
            if name == "scatter":
                return functional.reduce_scatter_tensor(x, "sum", 0, group).cos()
            return functional.all_to_all_single(x, None, None, group).cos()

        with self.ranks():
            self.check(fn, pygraph_ranks=True, pygraph_force="node_update")
            (entry,) = report()
            self.assertEqual((entry.choice, entry.copied_bytes), ("node_update", 0))

    def test_selected_by_ranks(self):
        with self.ranks():
            self.check(lambda x, y: reduced(x.sin() + y).cos(), calls=200, pygraph_ranks=True)
            (entry,) = report()
            choices = [None] * 2
            dist.all_gather_object(choices, (entry.choice, entry.timings_us))
            self.assertEqual(choices[0], choices[1])
            self.assertIn(entry.choice, ("no_graph", "node_update", "prelude"))

    def test_one_rank_fails(self):
        "Its proof: neither deploys the graph, nor runs a collective that the other does not."
        verdict = Verdict(Reason.of(Code.DIFFERS, result="output 0"))
        wrong = mock.patch.object(bound, "verify", return_value=verdict)
        with self.ranks():
            if self.rank == 1:
                wrong.start()
                self.addCleanup(wrong.stop)
            self.check(lambda x, y: reduced(x.sin() + y).cos())
            (entry,) = report()
            self.assertEqual(entry.choice, "no_graph")

    @parametrize("force", ("node_update", "copy"))
    def test_one_rank_fails_in_capture(self, force):
        "Between two collectives: NCCL would wait for it in the second one."
        agree, begun = collectives.agree_to_go_on, []

        def fail(*args: Any) -> None:
            begun.append(args)
            if self.rank == 1 and len(begun) == 2:
                raise RefusedError(Reason.of(Code.LAUNCH_FAILED, error=""))
            agree(*args)

        patch = mock.patch.object(collectives, "agree_to_go_on", fail)
        patch.start()
        self.addCleanup(patch.stop)
        with self.ranks():
            self.check(
                lambda x, y: reduced(reduced(x.sin() + y).cos()), pygraph_ranks=True, pygraph_force=force
            )
            (entry,) = report()
            self.assertEqual((entry.choice, len(begun)), ("no_graph", 2))


instantiate_parametrized_tests(CollectivesTest)

if __name__ == "__main__":
    run_tests()
