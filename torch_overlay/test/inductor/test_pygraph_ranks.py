# Owner(s): ["module: inductor"]
"""Simulated ranks select a function with collectives, in every order of arrival."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import random
import tempfile
import threading
from pathlib import Path
from typing import Any, TYPE_CHECKING
from unittest import mock

from hypothesis import given, settings, strategies as st

import torch
from torch._inductor.pygraph.capture import agreement, collectives
from torch._inductor.pygraph.select import timing
from torch._inductor.pygraph.select.ranks import RankSelection
from torch._inductor.pygraph.select.store import Decision, Entry
from torch._inductor.pygraph.types.candidate import NO_GRAPH, NODE_UPDATE, UNDECIDED
from torch._inductor.pygraph.types.reason import Code, Reason, RefusedError
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize
from torch.testing._internal.pygraph_simulation import (
    captured,
    codes,
    new_controller,
    refuse,
    SelectTestCase,
    Simulation,
    TIMED,
)


if TYPE_CHECKING:
    from collections.abc import Callable

REDUCE = torch.ops._c10d_functional.all_reduce_.default

# Until a decision, with a second look at both candidates.
CALLS = 4 * TIMED + 8


@dataclasses.dataclass
class Rank:
    """
    One rank and its program, which calls the function ``CALLS`` times. Ranks take turns.

    Args:
        graph, uncaptured: microseconds of the host
        device: microseconds of either on the device
        dies_after: calls
        never_calls: it does not compile the function
        sizes: of its inputs
        fails: in which part of a recording, if any: "rehearsal", which comes before the capture, "capture", between its
            two collectives, or "proof"
        remembered: the decision of an earlier process
    """

    number: int
    graph: float = 10.0
    uncaptured: float = 100.0
    device: float = 10.0
    dies_after: int = CALLS
    never_calls: bool = False
    sizes: tuple[int, ...] = ()
    fails: str = ""
    remembered: str | None = None
    began: int = 0
    ran: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.simulation = Simulation()
        self.turn = threading.Semaphore(0)
        self.registered = 0
        self.is_done = self.times_out = False
        self.blocked: Callable[[], bool] | None = None


@dataclasses.dataclass
class Store:
    """A rank's connection to what all ranks of a program share. Another rank may run behind each request."""

    program: Program
    rank: Rank

    def set(self, key: str, value: str) -> None:
        self.program.content[key] = value
        self.program.pause(self.rank)

    def get(self, key: str) -> bytes:
        value = self.program.content[key].encode()
        self.program.pause(self.rank)
        return value

    def add(self, key: str, amount: int) -> int:
        content = self.program.content
        content[key] = str(int(content.get(key, 0)) + amount)
        total = int(content[key])
        self.program.pause(self.rank)
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> None:
        self.program.content.setdefault(key, desired)
        self.program.pause(self.rank)

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None:
        def is_set() -> bool:
            return all(key in self.program.content for key in keys)

        if not self.program.pause(self.rank, is_set):
            raise RuntimeError("time-out")


class Program:
    """
    Runs ranks on threads, one at a time, in an order that ``choose`` draws. A collective ends when all ranks are in
    the same call of it, and a rank that reads an event waits for the collectives before it. A rank that captures a
    collective waits without a time-out until all ranks do, as NCCL does.
    """

    def __init__(self, ranks: list[Rank], choose: Callable[[list[Rank]], Rank], directory: Path) -> None:
        self.ranks = ranks
        self.choose = choose
        self.directory = directory
        self.content: dict[str, str] = {}
        self.back = threading.Semaphore(0)
        self.lost: list[set[str]] = [set() for _ in ranks]
        self.time_outs = 0

    def run(self) -> Program:
        threads = [threading.Thread(target=self._run_rank, args=(rank,), daemon=True) for rank in self.ranks]
        for thread in threads:
            thread.start()
        while left := [r for r in self.ranks if not r.is_done]:
            ready = [r for r in left if r.blocked is None or r.blocked()]
            if not ready:
                # As the store does; a collective of a rank that has gone never ends, and NCCL's own time-out ends it.
                waits = [r for r in left if r.times_out is False and r.blocked.__name__ == "is_set"]
                self.time_outs += bool(waits)
                ready = waits[:1] or [r for r in left if r.blocked.__name__ != "all_registered"][:1]
                if not ready:
                    raise AssertionError(f"ranks {[r.number for r in left]} wait for ever")
                ready[0].times_out = True
            self.current = self.choose(ready)
            self.current.turn.release()
            self.back.acquire()
        for thread in threads:
            thread.join()
        return self

    def pause(self, rank: Rank, until: Callable[[], bool] | None = None) -> bool:
        """Let another rank run. Return False after a time-out."""
        rank.blocked, rank.times_out = until, False
        self.back.release()
        rank.turn.acquire()
        rank.blocked = None
        return not rank.times_out

    def agree(self, rank: Rank, name: str, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        requests = agreement.agreement(name, rank.number, [[r.number for r in self.ranks]], value, decide)
        return agreement.run(requests, Store(self, rank), agreement.PATIENCE)

    def selection(self, rank: Rank) -> RankSelection:
        controller = new_controller("f")
        controller.report.sizes = [*rank.sizes]
        controller.added("id")
        entry = Entry(self.directory / str(rank.number), {})
        if rank.remembered is not None:
            entry.save(Decision(rank.remembered, [Reason.of(Code.FASTER_BY_ITSELF)], {NO_GRAPH: 1.0}))

        def candidate(who: str, host: float) -> Callable[[list[Any]], list[Any]]:
            def run(inputs: list[Any]) -> list[Any]:
                rank.ran.append(who)
                rank.simulation.work(host, rank.device)
                return [inputs[0] + 1]

            return run

        replay = candidate("replay", rank.graph)

        def record(inputs: list[Any]) -> tuple[Any, list[Any]]:
            steps = agreement.Steps("f", ("group",))
            # A process counts its recordings.
            steps.name = f"record/{len(rank.ran)}"
            recorded = collectives.Collectives(replay, steps, 0)
            capture = functools.partial(self.capture, rank, steps)
            parts = {
                "rehearsal": recorded.agree_to_capture,
                "first": capture,
                "capture": capture,
                "proof": functools.partial(recorded.agree_to_deploy, 0),
            }
            try:
                for part, run in parts.items():
                    if rank.fails == part:
                        raise RefusedError(Reason.of(Code.LAUNCH_FAILED, error=""))
                    run()
            except RefusedError:
                steps.refuse()
                refuse(controller, is_capturable=False)
                return candidate("fallback", rank.uncaptured), candidate("refused", 1000)(inputs)
            captured(controller)
            return replay, candidate("record", 1000)(inputs)

        rank.selection = RankSelection(
            controller,
            candidate("uncaptured", rank.uncaptured),
            record,
            lambda fn: None,
            lambda id: True,
            lambda id: None,
            is_forced=False,
            entry=entry,
            remembered=entry.load(),
            name="f/1",
            agree=functools.partial(self.agree, rank),
            lost=self.lost[rank.number],
        )
        return rank.selection

    def capture(self, rank: Rank, steps: agreement.Steps) -> None:
        """Capture a collective."""
        collectives.agree_to_go_on(steps, REDUCE, (None, "sum", "group"), {})
        rank.registered += 1
        count = rank.registered

        def all_registered() -> bool:
            return all(r.registered >= count for r in self.ranks)

        self.pause(rank, all_registered)

    def _run_rank(self, rank: Rank) -> None:
        rank.turn.acquire()
        try:
            selection = None if rank.never_calls else self.selection(rank)
            for i in range(0 if selection is None else min(rank.dies_after, CALLS)):
                rank.began += 1
                selection([torch.tensor(i)])
                self.pause(rank)
        finally:
            rank.is_done = True
            self.back.release()

    def synchronize(self, rank: Rank) -> None:
        """Wait for the collectives that the rank has launched."""
        began = len(rank.ran)
        self.pause(rank, lambda: all(len(r.ran) >= began for r in self.ranks))

    def choices(self) -> list[str]:
        return [r.selection.report.choice for r in self.ranks if not r.never_calls and r.dies_after >= CALLS]


class RanksTest(SelectTestCase):
    def program(self, ranks: list[Rank], choose: Callable[[list[Rank]], Rank] | None = None) -> Program:
        turn = itertools.count()
        program = Program(ranks, choose or (lambda ready: ready[next(turn) % len(ready)]), self.directory())

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.event = program.current.simulation.event(enable_timing)

            def record(self, stream: Any) -> None:
                self.event.record(stream)

            def synchronize(self) -> None:
                program.synchronize(program.current)
                self.event.synchronize()

            def elapsed_time(self, end: Event) -> float:
                return self.event.elapsed_time(end.event)

        clock = mock.Mock(perf_counter=lambda: program.current.simulation.host / 1e6)
        with (
            mock.patch.object(timing, "time", clock),
            mock.patch("torch.cuda.Event", Event),
            mock.patch("torch.cuda._sleep", lambda cycles: program.current.simulation.sleep(cycles)),
            mock.patch("torch._inductor.pygraph.select.selection.thread_containers", lambda: None),
            mock.patch.object(collectives.Collectives, "_enable"),
            mock.patch.object(
                agreement, "agree", lambda groups, name, value: program.agree(program.current, name, value, all)
            ),
        ):
            program.run()
        return program

    def directory(self) -> Path:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        return Path(directory.name)

    def test_graph_that_is_faster(self):
        program = self.program([Rank(i) for i in range(4)])
        self.assertEqual((program.choices(), program.time_outs), ([NODE_UPDATE] * 4, 0))
        first, *others = (r.ran for r in program.ranks)
        self.assertEqual(others, [first] * 3)

    def test_slowest_rank_decides(self):
        """One rank would lose more by the graph than the others gain."""
        ranks = [Rank(0), Rank(1), Rank(2, graph=150.0)]
        program = self.program(ranks)
        self.assertEqual((program.choices(), program.time_outs), ([NO_GRAPH] * 3, 0))
        times = [{c: round(us) for c, us in r.selection.report.timings_us.items()} for r in ranks]
        self.assertEqual(times, [{NO_GRAPH: 100, NODE_UPDATE: 150}] * 3)

    def test_rank_that_is_busy_with_the_device(self):
        """The largest times of all ranks say that a graph saves little."""
        program = self.program([Rank(0), Rank(1, device=2000.0)])
        self.assertEqual((program.choices(), program.time_outs), ([NO_GRAPH] * 2, 0))
        self.assertTrue(all(codes(r.selection.report) == [Code.DEVICE_BOUND] for r in program.ranks))

    @parametrize("fails", ("rehearsal", "capture", "proof"))
    def test_rank_that_cannot_record(self, fails):
        """The others do not wait for it."""
        program = self.program([Rank(0), Rank(1, fails=fails), Rank(2)])
        self.assertEqual((program.choices(), program.time_outs), ([NO_GRAPH] * 3, 0))

    def test_rank_that_never_calls(self):
        """The others wait once."""
        program = self.program([Rank(0), Rank(1), Rank(2, never_calls=True)])
        self.assertEqual((program.choices(), program.time_outs), ([NO_GRAPH] * 2, 1))
        self.assertEqual(codes(program.ranks[0].selection.report), [Code.RANKS_DISAGREE])

    def test_sizes_that_differ(self):
        """Nobody waits."""
        program = self.program([Rank(0), Rank(1, sizes=(7,)), Rank(2)])
        self.assertEqual((program.choices(), program.time_outs), ([NO_GRAPH] * 3, 0))

    @parametrize("calls", (1, TIMED, TIMED + 3))
    def test_rank_that_dies(self, calls):
        program = self.program([Rank(0), Rank(1), Rank(2, dies_after=calls)])
        # Before all had recorded it, or after.
        self.assertEqual(program.choices(), [NO_GRAPH if calls < TIMED + 2 else NODE_UPDATE] * 2)

    @parametrize(
        "remembered, choice, is_timed",
        (
            ((NODE_UPDATE, NODE_UPDATE), NODE_UPDATE, False),
            ((NO_GRAPH, NO_GRAPH), NO_GRAPH, False),
            ((NO_GRAPH, None), NODE_UPDATE, True),
            ((NO_GRAPH, NODE_UPDATE), NODE_UPDATE, True),
        ),
        name_fn=lambda remembered, choice, is_timed: "_".join(map(str, remembered)),
    )
    def test_restart(self, remembered, choice, is_timed):
        """A decision that not all ranks have stored is made again, and all store it."""
        program = self.program([Rank(i, remembered=r) for i, r in enumerate(remembered)])
        self.assertEqual((program.choices(), program.time_outs), ([choice] * 2, 0))
        for rank in program.ranks:
            self.assertEqual(rank.selection.report.remembered, not is_timed)
            self.assertEqual(rank.selection.entry.load().choice, choice)

    @settings(deadline=None, max_examples=25, derandomize=True)
    @given(st.data())
    def test_any_order(self, data):
        """Ranks that go on choose alike, whatever others do, and wait only where another does not come."""
        ranks = [
            Rank(
                i,
                graph=data.draw(st.sampled_from([10.0, 10.0, 150.0])),
                dies_after=data.draw(st.sampled_from([CALLS] * 5 + [1, 3, TIMED + 1, TIMED + 9])),
                never_calls=data.draw(st.integers(0, 9)) == 9,
                fails=data.draw(st.sampled_from([""] * 8 + ["rehearsal", "capture", "proof"])),
                remembered=data.draw(st.sampled_from([None, None, NO_GRAPH, NODE_UPDATE])),
            )
            for i in range(data.draw(st.integers(2, 8)))
        ]
        order = random.Random(data.draw(st.integers(0, 1 << 20)))
        program = self.program(ranks, order.choice)
        self.assertLessEqual(len(set(program.choices())), 1)
        self.assertNotIn(UNDECIDED, program.choices())
        if all(r.dies_after == CALLS and not r.never_calls for r in ranks):
            self.assertEqual(program.time_outs, 0)


instantiate_parametrized_tests(RanksTest)

if __name__ == "__main__":
    run_tests()
