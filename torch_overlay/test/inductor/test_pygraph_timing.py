# Owner(s): ["module: inductor"]
"""
Times of candidates on a simulated host and device, what they decide, and whether that is best for
the whole program.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import threading
from typing import Any, TYPE_CHECKING
from unittest import mock

from hypothesis import given, settings, strategies as st

import torch
from torch._inductor.pygraph.select import timing
from torch._inductor.pygraph.select.controller import Controller
from torch._inductor.pygraph.select.selection import DEVICE_BOUND, Selection
from torch._inductor.pygraph.select.timing import Cost, costs_nothing, Estimate, judge
from torch._inductor.pygraph.types.candidate import NO_GRAPH, UNDECIDED
from torch._inductor.pygraph.types.reason import Code
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    subtest,
)
from torch.testing._internal.pygraph_simulation import (
    captured,
    cost,
    costs,
    EVENT_US,
    launching,
    MAX_TIMED,
    new_controller,
    NoisySimulation,
    SelectTestCase,
    Simulation,
    TIMED,
)
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def stays(graph: Cost, uncaptured: Cost) -> bool:
    return judge(graph, uncaptured)[0]


def noisy(program: float, host: float, device: float) -> Cost:
    return Cost(Estimate(program, 8), Estimate(host, 0.4), Estimate(device, 0.4))


class DecisionTest(TestCase):
    @parametrize(
        "graph,uncaptured,reason",
        (
            subtest(
                (
                    launching(50),
                    launching(100),
                    "measured faster: 50.0 us from call to call, 100.0 us without the graph",
                ),
                name="launch_bound",
            ),
            subtest((launching(100), launching(100), Code.NOT_FASTER), name="same"),
            subtest((launching(99), launching(100), Code.NOT_FASTER), name="alike"),
            subtest((launching(97), launching(100), Code.FASTER), name="faster"),
            subtest((launching(101), launching(100), Code.NOT_FASTER), name="above"),
            subtest(
                (
                    launching(103),
                    launching(100),
                    "measured slower: 103.0 us from call to call, 100.0 us without the graph",
                ),
                name="slower",
            ),
            subtest(
                (
                    launching(80, error=10),
                    launching(100, error=10),
                    "not measured faster: 20.0 us are within 28.3 us of noise",
                ),
                name="within_noise",
            ),
            subtest(
                (launching(60, error=10), launching(100, error=10), Code.FASTER),
                name="beyond_noise",
            ),
            # A busy machine: the program's times say nothing, the function's own do.
            subtest(
                (
                    Cost(Estimate(150, 40), Estimate(13.5, 0.6), Estimate(8, 0.2)),
                    Cost(Estimate(120, 40), Estimate(20.5, 0.9), Estimate(8, 0.2)),
                    Code.FASTER_BY_ITSELF,
                ),
                name="noisy_program",
            ),
            # Few calls of a busy host: the device, which is known better, takes as long or less.
            subtest(
                (
                    Cost(Estimate(12_000, 500), Estimate(100, 5), Estimate(3470, 1)),
                    Cost(Estimate(12_100, 500), Estimate(4000, 300), Estimate(3570, 1)),
                    Code.FASTER_BY_ITSELF,
                ),
                name="noisy_host",
            ),
            subtest(
                (
                    Cost(Estimate(12_100, 500), Estimate(4000, 300), Estimate(3570, 1)),
                    Cost(Estimate(12_000, 500), Estimate(3900, 300), Estimate(3470, 1)),
                    Code.NOT_FASTER,
                ),
                name="noisy_hosts",
            ),
            # The host is freed, and the device's work takes as long as it did.
            subtest(
                (cost(80, 10, 80), cost(100, 60, 80), Code.FASTER),
                name="host_of_program_gains",
            ),
            # Both hide behind the rest of the program; the function itself gains.
            subtest(
                (cost(1000, 10, 20), cost(1000, 60, 60), Code.FASTER_BY_ITSELF),
                name="function_gains",
            ),
            # The host launches the graph while the device runs the last one.
            subtest(
                (cost(57, 30, 57), cost(363, 340, 60), Code.FASTER),
                name="overlap",
            ),
            # The same, but the program pays for it.
            subtest(
                (cost(1100, 10, 20), cost(1000, 60, 60), Code.SLOWER),
                name="program_loses",
            ),
            # Another function was replayed in the same calls for the first time.
            subtest(
                (cost(500, 70, 70), cost(1000, 60, 60), Code.SLOWER_BY_ITSELF),
                name="neighbour_gains",
            ),
            subtest(
                (cost(500, 60, 60), cost(1000, 60, 60), Code.NOT_FASTER),
                name="neighbour_alone_gains",
            ),
            # Calls of one size, each after many of others, which were compiled meanwhile.
            subtest(
                (
                    cost(31_000, 130, 10),
                    cost(94_000, 100, 25),
                    Code.SLOWER_ON_HOST,
                ),
                name="seldom_called",
            ),
            subtest(
                (cost(1800, 20, 5), cost(900, 22, 10), Code.FASTER_BY_ITSELF),
                name="neighbour_loses",
            ),
            # Updating nodes costs the host more than launching did, and the device less.
            subtest(
                (cost(90, 70, 60), cost(100, 60, 90), Code.FASTER),
                name="device_gains",
            ),
            subtest(
                (cost(100, 70, 90), cost(100, 60, 90), Code.SLOWER_BY_ITSELF),
                name="host_loses",
            ),
            subtest(
                (
                    cost(100, 70, 80),
                    cost(100, 60, 90),
                    Code.SLOWER_ON_HOST,
                ),
                name="program_shows_neither",
            ),
            # The host does its other work while the device runs the graph, if slower.
            subtest(
                (cost(80, 40, 70), cost(100, 60, 60), Code.FASTER),
                name="host_gains",
            ),
            # The device takes most of the time, and the host nearly as much: it may be slower at another time.
            subtest((cost(100, 40, 100), cost(101, 90, 100), Code.SPARES_HOST), name="spares_host"),
            subtest((cost(100, 70, 100), cost(101, 90, 100), Code.NOT_FASTER), name="spares_little"),
            subtest((cost(100, 40, 101), cost(101, 90, 100), Code.NOT_FASTER), name="spares_host_only"),
            # The device's time does not depend on who launched.
            subtest(
                (cost(1000, 5, 1000), cost(1000, 90, 1000), Code.NOT_FASTER),
                name="device_bound",
            ),
        ),
    )
    def test_cases(self, graph, uncaptured, reason):
        "A text where the case is about its numbers, else a code."
        chosen, why = judge(graph, uncaptured)
        self.assertIn(reason, (why.code, why.text))
        self.assertEqual(chosen, why.code in (Code.FASTER, Code.FASTER_BY_ITSELF, Code.SPARES_HOST))

    @parametrize(
        "graph,uncaptured,expected",
        (
            subtest((cost(100, 60, 99), cost(100, 60, 100), True), name="same"),
            subtest((cost(100, 60, 101), cost(100, 60, 100), False), name="function"),
            subtest((cost(100, 60, 101, 0.5), cost(100, 60, 100, 0.5), True), name="noise"),
            subtest((cost(100, 60, 102, 0.5), cost(100, 60, 100, 0.5), False), name="loss"),
            subtest((cost(100, 60, 103, 9), cost(100, 60, 100, 9), False), name="in_noise"),
            subtest((cost(100, 70, 99), cost(100, 60, 100), False), name="host"),
            subtest((cost(1100, 60, 99), cost(1000, 60, 100), False), name="program"),
            # Many times its own, as where its neighbours pause.
            subtest((cost(4000, 60, 99), cost(1000, 60, 100), True), name="neighbours"),
        ),
    )
    def test_costs_nothing(self, graph, uncaptured, expected):
        self.assertEqual(costs_nothing(graph, uncaptured), expected)

    @parametrize(
        "graph,other,expected",
        (
            subtest((cost(39, 20, 39), cost(44, 20, 44), True), name="device"),
            # The program waits for the host, which takes longer for branches.
            subtest((cost(53, 24, 39), cost(49, 21, 44), False), name="host"),
            subtest((noisy(53, 24, 39), noisy(49, 21, 44), False), name="noise"),
            # A gain that shows is one, though the host takes longer.
            subtest((noisy(45, 24, 39), noisy(49, 21, 44), True), name="shown"),
        ),
    )
    def test_improves(self, graph, other, expected):
        self.assertEqual(timing.improves(graph, other), expected)

    @given(costs, costs)
    def test_never_chooses_what_gains_nothing(self, graph, uncaptured):
        if graph.host.us >= uncaptured.host.us and graph.device.us >= uncaptured.device.us:
            self.assertFalse(stays(graph, uncaptured))

    @given(costs, costs)
    def test_chooses_what_wins_by_all(self, graph, uncaptured):
        if all(
            timing.is_less(getattr(graph, f), getattr(uncaptured, f))
            for f in ("program", "host", "device")
        ):
            self.assertTrue(stays(graph, uncaptured))

    @given(costs, costs)
    def test_not_both_of_two(self, a, b):
        self.assertFalse(stays(a, b) and stays(b, a))

    @given(costs)
    def test_equal(self, cost):
        self.assertFalse(stays(cost, cost))

    def test_cost(self):
        self.assertEqual(cost(9, 2, 3).call, Estimate(3))
        self.assertEqual(cost(2, 4, 3).call, Estimate(4))

    def test_estimate(self):
        # One by itself tells nothing of how they vary.
        self.assertEqual(Estimate.of([7.0]), Estimate(7.0, math.inf))
        self.assertEqual(Estimate.of([5.0] * 12), Estimate(5.0, 0.0))
        few = Estimate.of([1.0, 2.0, 3.0, 4.0] * 2)
        many = Estimate.of([1.0, 2.0, 3.0, 4.0] * 50)
        self.assertEqual((few.us, many.us), (2.5, 2.5))
        self.assertEqual(round(few.error / many.error), 5)
        # An outlier is no noise.
        outlier = Estimate.of([5.0] * 11 + [5000.0])
        self.assertEqual(outlier, Estimate(5.0, 0.0))


instantiate_parametrized_tests(DecisionTest)


class SamplesTest(SelectTestCase):
    def sample(
        self,
        times: Callable[[int], tuple[float, float]],
        gap: tuple[float, float],
        recording: Sequence[int] = (),
    ) -> tuple[Cost, int]:
        """
        The cost, and after how many calls; (host, device) by call. In those of ``recording``
        the function is recorded.
        """
        controller = new_controller("f")
        samples = timing.Samples(0, controller.state)
        for i in range(MAX_TIMED):

            def fn(inputs: list[Any], i: int = i) -> list[Any]:
                if i in recording:
                    captured(controller)
                return self.candidate("fn", *times(i))(inputs)

            (y,) = samples.call(fn, timing.clock_us(), [torch.tensor(i)])
            self.assertEqual(y, i + 1)
            self.simulation.work(*gap)
            if samples.complete:
                break
        self.assertTrue(samples.complete)
        return samples.cost(), i + 1

    def assertMedians(self, found: Cost, *expected: float) -> None:
        found = [getattr(found, f).us for f in ("program", "host", "device")]
        for a, b in zip(found, expected):
            self.assertAlmostEqual(a, b, places=3)

    def test_launch_bound(self):
        "What the device does is known although it waits in all of the program's calls."
        found, calls = self.sample(lambda i: (50, 10), (30, 5))
        self.assertMedians(found, 80, 50, 10)
        self.assertEqual(calls, TIMED)

    def test_device_bound(self):
        "The host runs ahead."
        found, _ = self.sample(lambda i: (10, 100), (5, 20))
        self.assertMedians(found, 120, 10, 100)

    def test_host_in_front_of_a_graph(self):
        "It overlaps the last replay, and does not add to this one's."
        found, _ = self.sample(lambda i: (30, 57), (5, 0))
        self.assertMedians(found, 57, 30, 57)
        self.assertEqual(found.call.us, found.device.us)

    def test_device_catches_up(self):
        "Its clock tells nothing of the host while it is behind."
        self.simulation.work(0, 10_000)
        found, _ = self.sample(lambda i: (50, 10), (30, 5))
        self.assertMedians(found, 80, 50, 10)

    def test_timing_of_other_functions(self):
        "It is no part of the program either."
        timed = [timing.Samples(0, new_controller(name).state) for name in "fgh"]
        for _ in range(TIMED):
            for samples in timed:
                samples.call(self.candidate("fn", 50, 10), timing.clock_us(), [torch.tensor(1)])
        for samples in timed:
            self.assertMedians(samples.cost(), 150, 50, 10)

    def test_recording_of_other_functions(self):
        "Nor is that: the call that is to record, or a later one that turns out to."
        for how in ("replay", "record"):
            controller, other = map(new_controller, "fg")
            samples = timing.Samples(0, controller.state)
            timed = timing.Samples(0, other.state)

            def record(inputs: list[Any], other: Controller = other) -> Any:
                captured(other)
                self.simulation.work(20_000, 10)
                return [inputs[0] + 1]

            record_it = Selection(
                other,
                record,
                lambda inputs: (None, record(inputs)),
                None,
                None,
                None,
                is_forced=False,
            )
            record_it.steps = itertools.repeat(record_it._record)
            for _ in range(TIMED):
                x = torch.tensor(1)
                samples.call(self.candidate("f", 50, 10), timing.clock_us(), [x])
                if how == "record":
                    record_it([x])
                else:
                    timed.call(record, timing.clock_us(), [x])
                self.simulation.work(30, 5)
            self.assertMedians(samples.cost(), 80, 50, 10)

    def test_first_calls_do_not_count(self):
        first = timing.WARMUP_SAMPLES
        found, _ = self.sample(lambda i: (1000 if i < first else 100, 10), (0, 0))
        self.assertMedians(found, 100, 100, 10)

    def test_calls_of_a_cold_process_do_not_count(self):
        "It becomes faster and faster, for as long as it is looked at."
        found, calls = self.sample(lambda i: (50 * (1 + 2 ** (-i / 12)), 10), (5, 5))
        self.assertLess(found.host.us, 55)
        self.assertLess(abs(found.program.us - found.host.us - 5), 1)
        self.assertLess(calls, MAX_TIMED)
        found, calls = self.sample(lambda i: (400 * 0.97**i, 1), (0, 0))
        self.assertEqual(calls, MAX_TIMED)

    def test_what_varies_is_timed_more_often(self):
        found, calls = self.sample(lambda i: (100 + i % 2, 10), (0, 0))
        self.assertEqual((calls, found.host), (TIMED, Estimate(100.5, found.host.error)))
        found, calls = self.sample(lambda i: (100 + 6 * (i % 2), 10), (0, 0))
        self.assertEqual((calls, found.host.us), (TIMED + timing.SAMPLES, 103))
        found, calls = self.sample(lambda i: (100 + 50 * (i % 2), 10), (0, 0))
        self.assertEqual((calls, found.host.us), (MAX_TIMED, 125))

    def test_outliers_do_not_count(self):
        found, _ = self.sample(lambda i: (1050 if i % 5 == 0 else 50, 10), (5, 5))
        self.assertMedians(found, 55, 50)

    @parametrize("when", (range(5, 12), range(15, 17)))
    def test_calls_that_record_do_not_count(self, when):
        found, calls = self.sample(
            lambda i: (10_000, 10_000) if i in when else (50, 10), (5, 5), when
        )
        self.assertMedians(found, 55, 50)
        self.assertGreater(calls, TIMED + len(when) - 1)

    def test_recording_that_ends_while_times_are_taken(self):
        "In another thread, as autograd has them, while this one waits for the device."
        controller, began, ends = new_controller("f"), threading.Event(), threading.Event()
        samples = timing.Samples(0, controller.state)

        def record(inputs: list[Any]) -> list[Any]:
            captured(controller)
            began.set()
            ends.wait(10)
            return inputs

        thread = threading.Thread(target=samples.call, args=(record, 0.0, [1]))
        for i in range(MAX_TIMED):
            samples.call(self.candidate("fn", 50, 10), timing.clock_us(), [torch.tensor(1)])
            self.simulation.work(5, 5)
            if i == timing.WARMUP_SAMPLES:
                thread.start()
                began.wait(10)
            if samples.complete:
                break
        _, event = samples.device[-1]

        def synchronize() -> None:
            ends.set()
            if threading.current_thread() is not thread:
                thread.join()

        event.synchronize = synchronize
        self.assertMedians(samples.cost(), 55, 50, 10)

    def test_function_that_goes_on_recording(self):
        "It pays for it in the end."
        with mock.patch.object(timing, "MAX_RECORDING_CALLS", 10):
            found, calls = self.sample(
                lambda i: (1000, 10), (0, 0), range(MAX_TIMED)
            )
        self.assertEqual((calls, round(found.host.us)), (TIMED + 8, 1000))

    def test_one_call_waits_for_the_device(self):
        "One of the first calls that show the device's time loads a kernel. Further ones show what the others take."
        first = timing.WARMUP_SAMPLES + 2 * timing.SAMPLES
        found, calls = self.sample(lambda i: (10, 5000 if i == first else 100), (0, 0))
        self.assertGreater(calls, TIMED)
        self.assertEqual(round(found.device.us), 100)
        self.assertLess(found.device.error, 100 * timing.DEVICE_PRECISION)

    def test_long_calls_are_few(self):
        us = timing.ENOUGH_US
        expected = timing.WARMUP_SAMPLES + timing.MIN_SAMPLES + timing.DEVICE_SAMPLES
        found, calls = self.sample(lambda i: (us, us / 100), (0, 0))
        self.assertEqual(calls, expected)
        self.assertEqual(round(found.host.us / us, 6), 1)


instantiate_parametrized_tests(SamplesTest)


class CallTimesTest(SelectTestCase):
    @parametrize("host", (5, 50))
    def test_what_a_launch_takes_is_no_part_of_a_call(self, host):
        "Each kernel takes 6 us more between two events than in a graph, beside what a node takes there."
        launch, calls = 6, (0, 3, 40, 0.5)
        simulation, sleep = self.simulation, self.simulation.sleep

        def sleep_or_launch(cycles: int) -> None:
            sleep(cycles) if cycles else simulation.work(host, launch)

        times = timing.CallTimes(0)
        with mock.patch("torch.cuda._sleep", sleep_or_launch):
            times.begin(host * len(calls), len(calls))
            for number, us in enumerate(calls):
                simulation.work(host, launch + us)
                times(number)
        found = times.us()
        self.assertEqual([*found.values()], [us + timing.MIN_NODE_US for us in calls], atol=1e-6, rtol=0)


instantiate_parametrized_tests(CallTimesTest)


class BestTest(SelectTestCase):
    """
    Whether what is chosen is what takes the whole program least, once it is all that runs.
    """

    def steady(self, candidate: str, program: dict[str, Any]) -> float:
        "Microseconds an iteration."
        simulation, times = Simulation(), []
        for _ in range(2):
            for _ in range(30):
                self.step(simulation, candidate, program)
            simulation.synchronize()
            times.append(simulation.host)
        return (times[1] - times[0]) / 30

    def step(self, simulation: Simulation, candidate: str, program: dict[str, Any]) -> None:
        run = simulation.replay if candidate == "graph" else simulation.work
        run(*program[candidate])
        self.rest(simulation, program)

    def rest(self, simulation: Simulation, program: dict[str, Any]) -> None:
        simulation.work(*program["rest"])
        if program["waits"]:
            simulation.synchronize()

    def choose(
        self,
        program: dict[str, Any],
        cold: float = 0,
        pause: Callable[[int], tuple[float, float]] = lambda calls: (0, 0),
    ) -> str:
        """
        ``cold``: the first call takes so many times more of the host; a dozen calls halve that.
        ``pause``: what else the host and the device do now and then, after so many calls.
        """
        simulation = self.simulation

        calls = itertools.count()

        def candidate(name: str) -> Callable:
            def run(inputs: list[Any]) -> list[Any]:
                launch = simulation.replay if name == "graph" else simulation.work
                host, device = program[name]
                launch(host * (1 + cold * 2 ** (-next(calls) / 12)), device)
                return []

            return run

        controller = new_controller("f")
        graph = candidate("graph")
        selection = Selection(
            controller,
            candidate("uncaptured"),
            lambda inputs: (graph, simulation.work(10_000, 10_000)),
            lambda fn: None,
            lambda id: True,
            lambda id: OrderedSet(),
            is_forced=False,
        )
        for i in range(3 + 4 * MAX_TIMED):
            selection([])
            self.rest(simulation, program)
            simulation.work(*pause(i))
            if controller.report.choice != UNDECIDED:
                break
        return "uncaptured" if controller.report.choice == NO_GRAPH else "graph"

    def assertBest(self, program: dict[str, Any], cold: float = 0) -> None:
        times = {name: self.steady(name, program) for name in ("uncaptured", "graph")}
        chosen = self.choose(program, cold)
        # What differs by less than the margin may be either, and whether the device falls
        # behind by less than timing takes of the host is not known.
        most = 1.005 / timing.MARGIN * min(times.values()) + EVENT_US / timing.CALLS_PER_EVENT
        self.assertLess(times[chosen], most, program)

    @parametrize(
        "uncaptured,graph,rest",
        (
            # Measured on an H200: host and device of an MLP of 20 layers, ...
            subtest(((340, 60), (30, 57), (23, 0)), name="mlp"),
            # ... a pointwise kernel of 8 KiB, ...
            subtest(((12, 2), (9, 3), (18, 0)), name="small"),
            # ... and one of 16 inputs, whose address takes longer to set than to launch.
            subtest(((15, 22), (28, 22), (18, 0)), name="many_inputs"),
            # The host has just the time for it that timing takes.
            subtest(((80, 84), (30, 91), (4, 0)), name="timing_takes_time"),
        ),
    )
    @parametrize("waits", (False, True))
    def test_cases(self, uncaptured, graph, rest, waits):
        self.assertBest(
            {"uncaptured": uncaptured, "graph": graph, "rest": rest, "waits": waits}
        )

    @parametrize("cold", (0.5, 1, 2))
    def test_cold_process(self, cold):
        program = {"uncaptured": (60, 84), "graph": (20, 91), "rest": (4, 0), "waits": False}
        self.assertBest(program, cold)

    @parametrize("where", ("host", "device"))
    @parametrize("waits", (False, True))
    def test_pauses_between_long_calls(self, where, waits):
        "More of some calls than of others are followed by one, or by a longer one."
        program = {
            "uncaptured": (4_000, 3_570),
            "graph": (100, 3_470),
            "rest": (8_000, 8_500),
            "waits": waits,
        }
        lengths, best = random.Random(0), 0
        for first in [0, 1, 2] * 10:

            def pause(calls: int, first: int = first) -> tuple[float, float]:
                us = lengths.uniform(20_000, 120_000) if calls % 3 == first else 0
                return (us, 0) if where == "host" else (us / 5, us)

            best += self.choose(program, pause=pause) == "graph"
        # All, but where the calls themselves vary, too.
        self.assertGreater(best, 29 if self.simulation_type is Simulation else 28)

    @settings(deadline=None, max_examples=150)
    @given(
        st.floats(10, 3000),
        st.floats(1, 3000),
        st.floats(0.02, 1.5),
        st.floats(0.6, 1.2),
        st.tuples(st.floats(0, 2000), st.floats(0, 2000)),
        st.booleans(),
    )
    def test_any_program(self, host, device, of_host, of_device, rest, waits):
        if device > DEVICE_BOUND * host:
            return
        graph = (of_host * host, of_device * device)
        self.assertBest(
            {"uncaptured": (host, device), "graph": graph, "rest": rest, "waits": waits}
        )


instantiate_parametrized_tests(BestTest)


class NoisyTest(BestTest):
    simulation_type = staticmethod(lambda: NoisySimulation(random.Random(0)))

    def test_any_program(self):
        "Which are the best of random programs' candidates, and what the others cost."
        chosen, best, regrets = random.Random(1), 0, []
        for _ in range(200):
            host = 10 ** chosen.uniform(1, 3.5)
            device = min(10 ** chosen.uniform(0, 3.5), (DEVICE_BOUND - 1) * host)
            program = {
                "uncaptured": (host, device),
                "graph": (host * chosen.uniform(0.02, 1.5), device * chosen.uniform(0.9, 1.1)),
                "rest": (10 ** chosen.uniform(0, 3), 10 ** chosen.uniform(0, 3)),
                "waits": chosen.random() < 0.3,
            }
            times = {name: self.steady(name, program) for name in ("uncaptured", "graph")}
            regrets.append(times[self.choose(program)] / min(times.values()))
            best += regrets[-1] == 1
        self.assertGreater(best, 180)
        self.assertLess(statistics.geometric_mean(regrets), 1.001)
        self.assertLess(max(regrets), 1.05)


if __name__ == "__main__":
    run_tests()
