# Owner(s): ["module: inductor"]
"""
How PyGraph chooses between candidates, on a machine that need not have a GPU: functions
run on the CPU, and the times are those of a simulated host and device.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
from random import Random
from typing import Any, TYPE_CHECKING
from unittest import mock

from hypothesis import given, settings, strategies as st

import torch
from torch._dynamo.mutation_guard import GenerationTracker
from torch._dynamo.utils import counters
from torch._inductor import cudagraph_trees as trees
from torch._inductor.pygraph.select import selection as selections, timing
from torch._inductor.pygraph.select.controller import Controller
from torch._inductor.pygraph.select.selection import (
    DEVICE_BOUND,
    MAX_RECORDED_AGAIN,
    MAX_WAITING_CALLS,
    RETIRE_CALLS,
    ROUND_CALLS,
    Selection,
)
from torch._inductor.pygraph.select.store import Decision
from torch._inductor.pygraph.types import journal
from torch._inductor.pygraph.types.candidate import (
    CHAIN,
    COPY,
    NO_GRAPH,
    NODE_UPDATE,
    PRELUDE,
    UNDECIDED,
)
from torch._inductor.pygraph.types.reason import Code, Reason
from torch._inductor.pygraph.types.schedule import ScheduleFacts
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    subtest,
)
from torch.testing._internal.pygraph_simulation import (
    captured,
    codes,
    cost,
    ENOUGH,
    launching,
    new_controller,
    NoisySimulation,
    refuse,
    SelectTestCase,
    Simulation,
    TIMED,
)
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable


class SelectionTest(SelectTestCase):
    def selection(
        self,
        uncaptured: tuple[float, float] = (100, 10),
        graph: tuple[float, float] = (10, 10),
        forget: Callable[[], bool] = lambda: True,
        around: Callable[[], OrderedSet[Controller] | None] = OrderedSet,
        record: Callable | None = None,
        is_forced: bool = False,
    ) -> Selection:
        self.controller = new_controller("f")
        self.controller.added("id")
        self.deployed: list[Callable] = []
        self.forgotten: list[Any] = []
        self.uncaptured = self.candidate("uncaptured", *uncaptured)
        self.replay = self.candidate("replay", *graph)

        def record_it(inputs: list[Any]) -> tuple[Callable, list[Any]]:
            captured(self.controller)
            return self.replay, self.candidate("record", 10_000, 10_000)(inputs)

        def forgotten(id: Any) -> bool:
            self.ran.append("forget")
            self.forgotten.append(id)
            return forget()

        return Selection(
            self.controller,
            self.uncaptured,
            record or record_it,
            self.deployed.append,
            forgotten,
            lambda id: around(),
            is_forced=is_forced,
        )

    def call(self, selection: Callable, times: int = 1) -> list[str]:
        "Who ran, each call's outputs checked."
        self.ran.clear()
        for i in range(times):
            x = torch.tensor([float(i)])
            (y,) = selection([x])
            self.assertEqual(y, x + 1)
            self.simulation.work(5, 5)
        return list(self.ran)

    def test_graph_wins(self):
        selection = self.selection()
        # The first call compiles, and the last decides.
        self.assertEqual(self.call(selection, 1 + TIMED), ["uncaptured"] * (1 + TIMED))
        freed = self.simulation.freed
        self.assertEqual(freed, [])
        self.assertEqual(self.call(selection), ["record"])
        self.assertEqual(freed, ["workspaces"])
        self.assertEqual(self.call(selection, TIMED), ["replay"] * TIMED)
        self.assertEqual((self.deployed, freed), ([], ["workspaces"]))
        self.assertEqual(self.controller.report.choice, UNDECIDED)
        # What the call that recorded returned may be alive for some more.
        self.assertEqual(self.call(selection, RETIRE_CALLS), ["replay"] * RETIRE_CALLS)
        self.assertEqual((self.deployed, freed), ([], ["workspaces"]))
        self.assertEqual(self.controller.report.choice, NODE_UPDATE)
        self.assertEqual(self.call(selection, 3), ["replay"] * 3)
        self.assertEqual(self.deployed, [self.replay])
        # A workspace would keep the segment that it lies in.
        self.assertEqual(freed, ["workspaces", "workspaces", "cache"])
        entry = self.controller.report
        self.assertExpectedInline(
            entry.reason,
            """measured faster: 15.0 us from call to call, 105.0 us without the graph""",
        )
        entry.timings_us.update({k: round(us) for k, us in entry.timings_us.items()})
        (reason,) = entry.reasons
        rounded = {name: round(us) for name, us in reason.details.items()}
        entry.reasons = [Reason.of(reason.code, **rounded)]
        self.assertExpectedInline(
            str(entry),
            """FunctionReport(name='f', mode='inference', choice='node_update', reasons=[Reason(code=<Code.FASTER: 'measured faster: {graph_us:.1f} us from call to call, {uncaptured_us:.1f} us without the graph'>, details={'graph_us': 15, 'uncaptured_us': 105})], timings_us={'no_graph': 100, 'node_update': 10}, external_inputs=0, stock_copied_bytes=0, copied_bytes=0, kernel_nodes=0, updated_nodes=0)""",  # noqa: B950
        )
        self.assertEqual(dict(counters["pygraph"]), {"node_update": 1})

    def test_graph_loses(self):
        selection = self.selection(graph=(110, 10))
        # Both are timed twice.
        self.call(selection, 1 + TIMED + 1 + 3 * TIMED)
        self.assertEqual(self.deployed, [])
        # Before the call takes memory of its own.
        self.assertEqual(self.call(selection), ["forget", "uncaptured"])
        self.assertEqual(self.deployed, [self.uncaptured])
        self.assertEqual(self.call(selection, 3), ["uncaptured"] * 3)
        entry = self.controller.report
        self.assertEqual(entry.choice, NO_GRAPH)
        self.assertExpectedInline(
            entry.reason,
            """measured slower: 115.0 us from call to call, 105.0 us without the graph""",
        )
        times = {candidate: round(us) for candidate, us in entry.timings_us.items()}
        self.assertEqual(times, {NO_GRAPH: 100, NODE_UPDATE: 110})
        self.assertEqual(dict(counters["pygraph"]), {NO_GRAPH: 1})

    def test_outputs_of_a_graph_that_lost_are_kept(self):
        selection = self.selection(graph=(110, 10), forget=lambda: False)
        self.call(selection, 1 + TIMED + 1 + 3 * TIMED)
        self.assertEqual(
            self.call(selection, RETIRE_CALLS), ["forget", "uncaptured"] * RETIRE_CALLS
        )
        self.assertEqual(self.deployed, [])
        self.assertEqual(self.call(selection, 2), ["uncaptured"] * 2)
        self.assertEqual(self.deployed, [self.uncaptured])

    def test_device_bound(self):
        selection = self.selection(uncaptured=(10, 1000))
        ran = self.call(selection, ENOUGH)
        self.assertEqual(ran, ["uncaptured"] * ENOUGH)
        self.assertEqual(self.deployed, [self.uncaptured])
        self.assertExpectedInline(
            self.controller.report.reason,
            """launching takes 10 us of the device's 1000 us""",
        )
        self.assertEqual(dict(counters["pygraph"]), {NO_GRAPH: 1})
        # A graph of the program's own may use cuBLAS's workspace.
        self.assertEqual(self.simulation.freed, ["cache"])

    @parametrize("ratio,recorded", ((0.5, True), (0.99, True), (1.01, False)))
    def test_device_bound_limit(self, ratio, recorded):
        device = 10 * DEVICE_BOUND * ratio
        selection = self.selection(uncaptured=(10, device), graph=(1, device))
        self.assertEqual("record" in self.call(selection, ENOUGH), recorded)

    def test_decision_follows_the_samples(self):
        for wins in (False, True):
            losing, winning = launching(99), launching(9)
            costs = [losing, winning] if wins else [winning, losing, losing, winning]
            selection = self.selection()
            with mock.patch.object(timing.Samples, "cost", mock.Mock(side_effect=costs)):
                self.call(selection, ENOUGH)
            self.assertEqual(
                self.controller.report.choice, NODE_UPDATE if wins else NO_GRAPH
            )

    def test_prelude(self):
        "A graph that begins with one is timed as such, one whose kernels are few is not."
        for binding in (PRELUDE, NODE_UPDATE):
            def record(inputs: list[Any]) -> tuple[Callable, list[Any]]:
                captured(self.controller, has_prelude=binding == PRELUDE, updated_nodes=1)
                return self.replay, self.candidate("record")(inputs)

            selection = self.selection(graph=(40, 30), record=record)
            self.call(selection, ENOUGH)
            entry = self.controller.report
            self.assertEqual((entry.choice, entry.updated_nodes), (binding, 1))
            self.assertEqual(set(entry.timings_us), {NO_GRAPH, binding})
            self.assertEqual(self.controller.state.binding, binding)

    @parametrize(
        "mode,choice,asked",
        (
            ("inference", None, (PRELUDE, False)),
            ("inference", PRELUDE, (PRELUDE, True)),
            ("inference", NODE_UPDATE, (NODE_UPDATE, True)),
            ("forward", None, (NODE_UPDATE, False)),
            ("forward", PRELUDE, (PRELUDE, True)),
        ),
    )
    def test_binding_that_is_asked_for(self, mode, choice, asked):
        controller = new_controller("f", mode)
        if choice is not None:
            controller.bind_as(choice)
            controller.decide(choice)
        request = controller.request({})
        self.assertEqual((request.state.binding, request.is_decided), asked)

    def test_not_captured_later(self):
        "What was captured before goes."
        selection = self.selection()
        self.call(selection, ENOUGH)
        self.assertEqual(self.controller.report.choice, NODE_UPDATE)
        refuse(self.controller, is_capturable=False)
        self.call(self.deployed[-1], ENOUGH)
        self.assertEqual(self.controller.report.choice, NO_GRAPH)
        self.assertEqual(self.deployed[-1], self.uncaptured)
        self.assertEqual(self.forgotten, ["id"])

    @parametrize(
        "owner,name",
        (
            subtest((timing.Samples, "cost"), name="while_it_waits_for_the_device"),
            subtest((journal, "publish"), name="while_it_decides"),
            subtest((torch.cuda, "empty_cache"), name="while_it_frees_memory"),
            subtest((None, "around"), name="while_it_waits_for_others"),
        ),
    )
    def test_interrupt(self, owner, name):
        "The next call goes on."
        raised = 0

        def interrupt(*args: Any) -> Any:
            nonlocal raised
            if not raised:
                raised = 1
                raise KeyboardInterrupt
            return original(*args) if owner else OrderedSet()

        # As fast as none.
        selection = self.selection(graph=(99, 10), around=interrupt)
        with contextlib.ExitStack() as stack:
            if owner:
                original = getattr(owner, name)
                selection.around = lambda id: OrderedSet()
                stack.enter_context(mock.patch.object(owner, name, interrupt))
            for _ in range(2 * ENOUGH):
                with contextlib.suppress(KeyboardInterrupt):
                    self.call(selection)
        self.assertEqual(raised, 1)
        self.assertNotEqual(self.controller.report.choice, UNDECIDED)
        self.assertNotEqual(self.deployed, [])
        self.assertFalse(self.controller.state.is_even)

    def test_no_prelude(self):
        "Where a node refuses, the host sets the nodes."
        selection = self.selection(graph=(40, 30))
        recorded = selection.record

        def record(inputs: list[Any]) -> tuple[Callable, list[Any]]:
            if self.controller.state.binding == PRELUDE:
                error = Reason.of(Code.DRIVER, error="a node refused")
                refuse(self.controller, error, has_prelude=True)
            return recorded(inputs)

        selection.record = record
        self.call(selection, ENOUGH)
        self.assertEqual(self.deployed, [self.replay])
        self.assertEqual(self.controller.report.choice, NODE_UPDATE)
        self.assertEqual(codes(self.controller.report), [Code.NO_PRELUDE, Code.FASTER])
        self.assertIn("no prelude: a node refused;", self.controller.report.reason)

    def test_machine_was_busy(self):
        "While the graph was timed for the first time, and ever since."
        for later in (9, 20), (29, 40):
            costs = [launching(20), launching(30), *map(launching, later)]
            selection = self.selection()
            with mock.patch.object(timing.Samples, "cost", mock.Mock(side_effect=costs)):
                self.call(selection, ENOUGH)
            self.assertEqual(self.controller.report.choice, NODE_UPDATE)
            self.assertEqual(self.ran.count("record"), 1)

    def test_second_timing_decides(self):
        costs = map(launching, (20, 21, 19.9, 20))
        selection = self.selection()
        with mock.patch.object(timing.Samples, "cost", mock.Mock(side_effect=costs)):
            self.call(selection, ENOUGH)
        self.assertEqual(self.controller.report.choice, NO_GRAPH)
        times = self.controller.report.timings_us
        self.assertEqual((times[NODE_UPDATE], times[NO_GRAPH]), (19.9, 20))

    def test_what_loses_on_the_device_is_timed_twice(self):
        "The host of a process that is still cold would decide."
        cold, warm, graph = cost(101, 95, 84), cost(85, 80, 84), cost(93, 30, 93)
        selection = self.selection()
        costs = mock.Mock(side_effect=[cold, graph, graph, warm])
        with mock.patch.object(timing.Samples, "cost", costs):
            self.call(selection, ENOUGH)
        self.assertEqual(self.controller.report.choice, NO_GRAPH)

    @parametrize(
        "choice,joins",
        ((NODE_UPDATE, True), (COPY, True), (NO_GRAPH, False), (UNDECIDED, False)),
    )
    def test_even_graph_follows_those_around_it(self, choice, joins):
        "Their memory is used anyway. It waits for them, unless they wait for it."
        other, busy = new_controller("other"), [None]
        selection = self.selection(
            graph=(99, 10), around=lambda: busy.pop() if busy else OrderedSet([other])
        )
        self.call(selection, 1 + TIMED + 1 + 3 * TIMED)
        self.assertEqual(self.call(selection, 5), ["replay"] * 5)
        self.assertEqual((self.deployed, self.forgotten), ([], []))
        other.report.choice = choice
        other.waits(choice == UNDECIDED)
        self.assertEqual(
            self.call(selection, 2), ["replay"] * 2 if joins else ["forget"] + ["uncaptured"] * 2
        )
        self.assertEqual(self.controller.report.choice, NODE_UPDATE if joins else NO_GRAPH)
        self.assertEqual(
            codes(self.controller.report), [Code.NOT_FASTER] + [Code.JOINS_NEIGHBOURS] * joins
        )

    def test_even_graph_does_not_wait_for_ever(self):
        selection = self.selection(
            graph=(99, 10), around=lambda: OrderedSet([new_controller("other")])
        )
        self.call(selection, 1 + TIMED + 1 + 3 * TIMED + MAX_WAITING_CALLS)
        self.assertEqual(self.ran[-1], "replay")
        self.assertEqual(self.call(selection), ["forget", "uncaptured"])

    @parametrize(
        "uncaptured,graph",
        (
            subtest(((100, 10), (101, 10)), name="function"),
            subtest(((50, 100), (60, 100)), name="host"),
        ),
    )
    def test_what_costs_anything_is_not_even(self, uncaptured, graph):
        other = new_controller("other")
        other.report.choice = NODE_UPDATE
        selection = self.selection(uncaptured, graph, around=lambda: OrderedSet([other]))
        self.call(selection, ENOUGH)
        self.assertEqual(self.controller.report.choice, NO_GRAPH)

    def test_even_graph_that_copies(self):
        "Copies of its inputs are memory that nothing else has."
        other = new_controller("other")
        other.report.choice = NODE_UPDATE
        selection = self.selection(graph=(99, 10), around=lambda: OrderedSet([other]))
        refuse(self.controller)
        self.call(selection, ENOUGH)
        self.assertEqual(self.controller.report.choice, NO_GRAPH)

    def copying(self, nbytes: list[int]) -> Selection:
        "Of a function whose inputs are copied, ``nbytes[-1]`` of them in each replay."

        def record(inputs: list[Any]) -> Any:
            if self.controller.binds_inputs:
                refuse(self.controller)
            return replay, self.candidate("record")(inputs)

        selection = self.selection(record=record)
        run = self.replay

        def replay(inputs: list[Any]) -> list[Any]:
            self.controller.copied(nbytes[-1])
            return run(inputs)

        return selection

    def copying_more(self, copied: list[int]) -> Selection:
        "Which is selected for the second time."
        copied.append(24)
        selection = self.copying(copied)
        self.call(selection, ENOUGH)
        entry = self.controller.report
        self.assertEqual((entry.choice, entry.copied_bytes), (COPY, 24))
        self.assertEqual(len(self.deployed), 1)
        copied.append(2048)
        self.assertEqual(self.call(self.deployed[-1]), ["replay"])
        self.assertEqual(self.deployed[1:], [selection])
        self.assertEqual(entry.choice, UNDECIDED)
        return selection

    def test_copies_more_than_it_was_timed_with(self):
        "The forward whose activations lay in the pool was not faster as a graph."
        selection = self.copying_more([])
        entry = self.controller.report
        self.assertEqual(self.call(selection, TIMED), ["uncaptured"] * TIMED)
        self.call(selection, TIMED + 3)
        self.assertEqual((entry.choice, entry.copied_bytes), (COPY, 2048))
        self.assertExpectedInline(
            entry.reason,
            """it copies 2048 bytes, not 24 as timed; measured faster: 15.0 us from call to call, 105.0 us without the graph""",  # noqa: B950
        )

    def test_copies_more_and_less(self):
        "It goes back and forth, and is decided no more than once for each amount."
        copied: list[int] = []
        selection = self.copying_more(copied)
        copied.append(24)
        self.call(selection, ENOUGH)
        entry = self.controller.report
        self.assertEqual((entry.choice, entry.copied_bytes), (COPY, 24))
        copied.append(2048)
        self.assertEqual(self.call(self.deployed[-1], 3), ["replay"] * 3)
        self.assertEqual(counters["pygraph"]["reselected"], 1)

    def test_copies_so_much_more_that_it_loses(self):
        selection = self.copying_more([])
        slower = Reason.of(Code.SLOWER_BY_ITSELF)
        with mock.patch.object(timing, "judge", lambda *args: (False, slower)):
            self.call(selection, ENOUGH)
        self.assertEqual(self.controller.report.choice, NO_GRAPH)
        self.assertEqual(self.deployed[-1], self.uncaptured)
        self.assertEqual(self.forgotten, ["id"])

    def test_recorded_and_device_bound_later(self):
        "What was recorded before it was decided anew goes."
        selection = self.copying_more([])
        self.uncaptured = self.candidate("uncaptured", 10, 1000)
        selection.uncaptured = self.uncaptured
        self.call(selection, ENOUGH)
        self.assertEqual(self.controller.report.choice, NO_GRAPH)
        self.assertEqual(self.deployed[-1], self.uncaptured)
        self.assertEqual(self.forgotten, ["id"])

    def test_selection_is_no_part_of_the_program(self):
        "What it does before it calls a candidate is taken off."
        selection = self.selection()
        begin = mock.patch.object(
            selections, "begin_call", lambda controller: self.simulation.work(40, 0)
        )
        with begin:
            self.call(selection, ENOUGH)
        self.assertRegex(
            self.controller.report.reason,
            "15.0 us from call to call, 105.0 us without the graph",
        )

    def test_unbound_while_recording(self):
        selection = self.selection()

        def record(inputs: list[Any]) -> Any:
            refuse(self.controller)
            return self.replay, self.candidate("record")(inputs)

        selection.record = record
        self.call(selection, ENOUGH)
        entry = self.controller.report
        self.assertEqual(entry.choice, COPY)
        self.assertExpectedInline(
            entry.reason,
            """output 0 differs from the uncaptured function's; measured faster: 15.0 us from call to call, 105.0 us without the graph""",  # noqa: B950
        )
        self.assertEqual(set(entry.timings_us), {NO_GRAPH, COPY})
        self.assertEqual(dict(counters["pygraph"]), {"unbound": 1, COPY: 1})

    def test_not_capturable(self):
        selection = self.selection()

        def record(inputs: list[Any]) -> Any:
            failed = Reason.of(Code.CAPTURE_FAILED, error="reason")
            refuse(self.controller, failed, is_capturable=False)
            return self.replay, self.candidate("rehearsal")(inputs)

        selection.record = record
        ran = self.call(selection, ENOUGH)
        self.assertEqual(ran.count("rehearsal"), 1)
        self.assertEqual(ran.count("uncaptured"), ENOUGH - 1)
        self.assertEqual(self.deployed, [self.uncaptured])
        self.assertEqual(self.controller.report.choice, NO_GRAPH)
        self.assertEqual(
            codes(self.controller.report), [Code.CAPTURE_FAILED, Code.NOT_CAPTURABLE]
        )
        self.assertIn("capture failed: reason", self.controller.report.reason)

    def test_recording_raises(self):
        "The program may free memory and call again."
        selection = self.selection()
        recorded = selection.record
        selection.record = mock.Mock(side_effect=torch.OutOfMemoryError("out of memory"))
        self.call(selection, 1 + TIMED)
        with self.assertRaises(torch.OutOfMemoryError):
            self.call(selection)
        selection.record = recorded
        self.call(selection, 2)

    @parametrize("how", ("selected", "forced", "remembered"))
    def test_recorded_when_no_other_thread_records(self, how):
        selection = self.selection(is_forced=how == "forced")
        if how == "remembered":
            selection.remembered = Decision(NODE_UPDATE, [], {})
        recorded = selection.record
        selection.record = lambda inputs: (None, self.uncaptured(inputs))
        before = 1 + (TIMED if how == "selected" else 0)
        self.assertEqual(
            self.call(selection, before + 3), ["uncaptured"] * (before + 3)
        )
        self.assertEqual(self.deployed, [])
        selection.record = recorded
        self.assertEqual(self.call(selection), ["record"])
        self.assertEqual(self.call(selection), ["replay"])

    def test_other_thread(self):
        selection = self.selection()
        ran = self.call(selection, 3)
        errors = []

        def work() -> None:
            try:
                if trees.thread_containers() is not None:
                    raise AssertionError("trees know this thread")
                ran.extend(self.call(selection, ENOUGH))
            except BaseException as e:
                errors.append(e)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        self.assertEqual(errors, [])
        self.assertEqual(ran, ["uncaptured"] * (3 + ENOUGH))
        # None of them was a step, or was timed.
        self.assertEqual(self.call(selection, TIMED - 2), ["uncaptured"] * (TIMED - 2))
        self.assertEqual(self.call(selection), ["record"])

    def test_two_threads_at_once(self):
        "As backwards run, one on the CPU and one on the device."
        containers = trees.thread_containers()
        outputs: list[Any] = []

        def work() -> None:
            outputs.append(selection([torch.tensor(1.0)]))

        thread = threading.Thread(target=work)

        def forget() -> bool:
            thread.start()
            thread.join(0.1)
            return True

        selection = self.selection(graph=(110, 10), forget=forget)
        with mock.patch.object(selections, "thread_containers", lambda: containers):
            self.call(selection, 1 + TIMED + 1 + 3 * TIMED + 2)
            thread.join()
        self.assertEqual(outputs, [[torch.tensor(2.0)]])
        self.assertEqual(self.deployed, [self.uncaptured])

    @parametrize("is_backward", (False, True))
    def test_gradients_that_two_threads_look_at(self, is_backward):
        "Those of two devices: one runs the backward, and the other a forward once more."
        backward, forward = (new_controller(mode, mode) for mode in ("backward", "forward"))
        held = [torch.zeros(1)]
        selections.end_call(backward, held)
        self.addCleanup(selections._gradients.clear)
        calls = [lambda: selections.begin_call(backward if is_backward else forward)]

        class Asked(dict):
            def __contains__(self, key: Any) -> bool:
                found = super().__contains__(key)
                for other in [*calls]:
                    calls.clear()
                    thread = threading.Thread(target=other)
                    thread.start()
                    thread.join()
                return found

            def pop(self, *args: Any) -> Any:
                self.__contains__(args[0])
                return super().pop(*args)

        with mock.patch.object(selections, "_gradients", Asked(selections._gradients)):
            GenerationTracker.generation += 1
            selections.begin_call(backward)
            self.assertEqual(selections._gradients, {})
        state = backward.state
        self.assertEqual((state.has_stepped, state.outputs_outlive), (True, True))

    def test_called_by_what_a_step_frees(self):
        "A finalizer calls the function."
        outputs: list[Any] = []

        def forget() -> bool:
            outputs.append(selection([torch.tensor(1.0)]))
            return True

        selection = self.selection(graph=(110, 10), forget=forget)
        self.call(selection, 1 + TIMED + 1 + 3 * TIMED + 2)
        self.assertEqual(outputs, [[torch.tensor(2.0)]])
        self.assertEqual(self.deployed, [self.uncaptured])

    @parametrize("how", ("selected", "forced", "remembered"))
    def test_two_threads_record(self, how):
        "One runs uncaptured meanwhile, and ends after the other."
        containers = trees.thread_containers()
        recording, is_recorded = threading.Event(), threading.Event()
        program = threading.get_ident()

        def record(inputs: list[Any]) -> tuple[Callable | None, list[Any]]:
            if threading.get_ident() == program:
                thread.start()
                recording.wait()
                captured(self.controller)
                return self.replay, self.candidate("record", 10_000, 10_000)(inputs)
            recording.set()
            is_recorded.wait()
            return None, self.uncaptured(inputs)

        thread = threading.Thread(target=lambda: selection([torch.tensor(1.0)]))
        selection = self.selection(record=record, is_forced=how == "forced")
        if how == "remembered":
            selection.remembered = Decision(NODE_UPDATE, [], {NODE_UPDATE: 10.0})
        with mock.patch.object(selections, "thread_containers", lambda: containers):
            self.call(selection, 1 + (TIMED if how == "selected" else 0))
            self.assertEqual(self.call(selection), ["record"])
            is_recorded.set()
            thread.join()
            self.assertNotIn("record", self.call(selection, ENOUGH))
        self.assertEqual(self.deployed, [self.replay])

    def test_inside_of_a_capture(self):
        "The program captures a graph of its own."
        selection = self.selection()
        self.call(selection, 1 + TIMED)
        with mock.patch("torch.cuda.is_current_stream_capturing", lambda: True):
            self.assertEqual(self.call(selection, 20), ["uncaptured"] * 20)
        self.assertEqual(self.call(selection), ["record"])

    @settings(deadline=None, max_examples=40)
    @given(*[st.tuples(st.floats(1, 1e4), st.floats(1, 1e4))] * 3)
    def test_any_times(self, uncaptured, graph, gap):
        self.ran.clear()
        counters.clear()
        selection = self.selection(uncaptured, graph)
        for i in range(ENOUGH):
            self.assertEqual(selection([torch.tensor(i)])[0].item(), i + 1)
            self.simulation.work(*gap)
        ran = [who for who in self.ran if who != "forget"]
        # Each call ran once, the graph was recorded once at most, and one was deployed.
        self.assertEqual(len(ran), ENOUGH)
        self.assertLessEqual(ran.count("record"), 1)
        choice = self.controller.report.choice
        final = self.replay if choice == NODE_UPDATE else self.uncaptured
        self.assertEqual(self.deployed, [final])
        self.assertEqual(ran[-1], "replay" if choice == NODE_UPDATE else "uncaptured")
        self.assertEqual(dict(counters["pygraph"]), {choice: 1})
        if graph[0] > 1.05 * uncaptured[0] and graph[1] > 1.05 * uncaptured[1]:
            self.assertEqual(choice, NO_GRAPH)


instantiate_parametrized_tests(SelectionTest)


class SchedulesTest(SelectTestCase):
    """Which binding and order of its calls a graph gets, whose calls may run side by side."""

    def select(
        self,
        times: dict[str, tuple[float, float]],
        rest: tuple[float, float] = (5, 5),
        waits: bool = False,
        width: int = 8,
        fails: Callable[[str], str | None] = lambda candidate: None,
        max_recorded_again: Callable[[], int | None] = lambda: 0,
    ) -> str:
        """
        Return the candidate of the last recording, once the function is deployed.

        Args:
            times: on host and device; unlike others, NO_GRAPH keeps the device waiting
            rest: what the program does besides
            waits: for the device in each call
            fails: what becomes of the recording of a candidate: "refused", "not_captured", "held", "chain", or None
        """
        controller = new_controller("f")
        controller.added("id")
        self.recorded: list[str] = []
        self.recorded_at: list[int] = []
        state, deployed = controller.state, []
        if "prelude" not in times:
            controller.bind_as(NODE_UPDATE)

        def record(inputs: list[Any]) -> list[Any]:
            what = fails(controller.candidate)
            if what == "held":
                return run(NO_GRAPH)(inputs)
            state.outdated.cell_contents = False
            state.recordings += 1
            if what in ("refused", "not_captured"):
                refuse(controller, is_capturable=what == "refused")
                self.recorded.append("none")
                return run(NO_GRAPH)(inputs)
            schedule = CHAIN if what == "chain" else state.schedule
            facts = ScheduleFacts(schedule, calls_us=100, critical_us=50, width=width)
            captured(controller, has_prelude=state.binding == PRELUDE, schedule=facts)
            self.recorded.append(controller.candidate)
            self.recorded_at.append(selection.calls)
            self.simulation.work(10_000, 10_000)
            return []

        def run(candidate: str) -> Callable:
            launch = self.simulation.work if candidate == NO_GRAPH else self.simulation.replay
            return lambda inputs: launch(*times[candidate]) or []

        def replay(inputs: list[Any]) -> list[Any]:
            is_recorded = self.recorded[-1] != "none" and not state.outdated.cell_contents
            return run(self.recorded[-1])(inputs) if is_recorded else record(inputs)

        selection = Selection(
            controller,
            run(NO_GRAPH),
            lambda inputs: (replay, record(inputs)),
            deployed.append,
            lambda id: True,
            lambda id: OrderedSet(),
            is_forced=False,
            time_calls=lambda inputs, host_us: run(NO_GRAPH)(inputs),
            max_recorded_again=lambda id: max_recorded_again(),
        )
        while not deployed:
            selection([])
            self.rest(self.simulation, rest, waits)
        self.report = controller.report
        if self.report.choice != NO_GRAPH:
            self.assertEqual(self.report.candidate, self.recorded[-1])
        return self.report.candidate

    def rest(self, simulation: Simulation, rest: tuple[float, float], waits: bool) -> None:
        simulation.work(*rest)
        if waits:
            simulation.synchronize()

    def steady(self, times: tuple[float, float], rest: tuple[float, float], waits: bool) -> float:
        """Return the microseconds of a call of the program with a graph."""
        simulation = Simulation()
        for i in range(60):
            simulation.replay(*times)
            self.rest(simulation, rest, waits)
            if i == 29:
                simulation.synchronize()
                start = simulation.host
        simulation.synchronize()
        return (simulation.host - start) / 30

    # Of a mixture of experts on an H100. Branches take the host longer to launch.
    EXPERTS = {
        NO_GRAPH: (881, 250),
        NODE_UPDATE: (60, 128.4),
        "node_update,lanes2": (66, 89.0),
        "node_update,lanes4": (75, 108.3),
        "node_update,dag": (80, 115.9),
    }
    # All orders take about as long on the device.
    EVEN = EXPERTS | {"node_update,lanes4": (75, 89.5), "node_update,dag": (80, 90.0)}

    # Four lanes are faster than two.
    WIDE = EXPERTS | {"node_update,lanes4": (75, 85.0), "node_update,dag": (80, 95.0)}

    @parametrize("times", ("EXPERTS", "EVEN", "WIDE"))
    @parametrize("rest", ((5, 5), (3000, 10), (20, 500)))
    @parametrize("waits", (False, True))
    def test_the_fastest_is_deployed(self, times, rest, waits):
        "No wider order is tried than four lanes if they are no faster than two."
        is_wide, times = times == "WIDE", getattr(self, times)
        tried = [*times][: None if is_wide else -1]
        best = "node_update,lanes4" if is_wide else "node_update,lanes2"
        self.assertEqual(self.select(times, rest, waits), best)
        self.assertEqual(self.recorded, [*tried[1:], best])
        self.assertEqual([*self.report.timings_us], tried)
        # Functions of a path record in the same calls.
        self.assertEqual([call % ROUND_CALLS for call in self.recorded_at[1:]], [0] * (len(tried) - 1))

    @parametrize("by,rest", ((2, 5), (1, 100)))
    def test_a_program_that_waits_for_the_host_keeps_the_chain(self, by, rest):
        times = {name: (by * host, device) for name, (host, device) in self.EXPERTS.items()}
        self.assertEqual(self.select(times, (rest, 5)), NODE_UPDATE)
        self.assertEqual(self.recorded[-1], NODE_UPDATE)

    def test_a_program_that_waits_for_the_device_gains(self):
        "The host takes longer than the device."
        times = {name: (3 * host, device) for name, (host, device) in self.EXPERTS.items()}
        self.assertEqual(self.select(times, waits=True), "node_update,lanes2")
        self.assertEqual(self.select(times), NODE_UPDATE)

    def test_any_program(self):
        "No choice takes a noisy program much longer than the best candidate does, or than the chain."
        random = Random(0)
        self.simulation = NoisySimulation(random)
        regrets, losses = [], []
        with self.simulation.patched():
            for _ in range(100):
                host, device = (10 ** random.uniform(1, 3) for _ in range(2))
                times = {
                    NODE_UPDATE: (host, device),
                    "node_update,lanes2": (host * random.uniform(1, 1.3), device * random.uniform(0.5, 1.05)),
                    "node_update,dag": (host * random.uniform(1, 1.5), device * random.uniform(0.4, 1.1)),
                }
                rest = (10 ** random.uniform(0, 3), 10 ** random.uniform(0, 3))
                waits = random.random() < 0.5
                chosen = self.select({NO_GRAPH: (10 * host, 1.5 * device), **times}, rest, waits, width=3)
                if chosen == NO_GRAPH:
                    continue
                takes = {name: self.steady(us, rest, waits) for name, us in times.items()}
                regrets.append(takes[chosen] / min(takes.values()))
                losses.append(takes[chosen] / takes[NODE_UPDATE])
        self.assertLess(statistics.geometric_mean(regrets), 1.01)
        self.assertLess(statistics.geometric_mean(losses), 0.95)
        self.assertLess(max(losses), 1.05)

    @parametrize(
        "width,tried",
        (
            (1, ()),
            (2, ("dag",)),
            (3, ("lanes2", "dag")),
            (4, ("lanes2", "lanes3", "dag")),
            (9, ("lanes2", "lanes4", "dag")),
        ),
    )
    def test_what_is_tried(self, width, tried):
        "At most three orders, none of which equals another one."
        controller = new_controller("f")
        critical = 100.0 if width == 1 else 50.0
        captured(controller, schedule=ScheduleFacts(CHAIN, 100.0, critical, width))
        self.assertEqual(controller.schedules(200.0), [f"node_update,{name}" for name in tried])

    def test_an_order_that_gains_the_program_little(self):
        "Each order is a recording, which drops those behind it on its path."
        controller = new_controller("f")
        captured(controller, schedule=ScheduleFacts(CHAIN, 14.0, 10.0, 2))
        self.assertEqual([*map(controller.schedules, (300.0, 500.0))], [["node_update,dag"], []])

    PRELUDES = {
        NO_GRAPH: (6754, 900),
        PRELUDE: (40, 875),
        "prelude,lanes2": (44, 700),
        "prelude,lanes4": (48, 690),
        "prelude,dag": (44, 710),
        "node_update,lanes4": (70, 640),
    }

    def test_the_host_binds_where_the_device_decides(self):
        self.assertEqual(self.select(self.PRELUDES), "node_update,lanes4")

    def test_a_prelude_stays_where_it_pays(self):
        self.assertEqual(self.select(self.PRELUDES | {"node_update,lanes4": (70, 689)}), "prelude,lanes4")
        self.assertEqual(self.recorded[-2:], ["node_update,lanes4", "prelude,lanes4"])

    @parametrize("what", ("refused", "not_captured", "held", "chain"))
    def test_a_schedule_that_is_not_recorded(self, what):
        "What was the fastest before is deployed, in the end by another recording."
        def fails(candidate: str) -> str | None:
            return what if candidate == "node_update,lanes4" else None

        times = self.EVEN | {"node_update,dag": (66, 70)}
        self.assertEqual(self.select(times, fails=fails), "node_update,lanes2")
        self.assertNotIn("node_update,dag", self.recorded)

    @parametrize("most", (MAX_RECORDED_AGAIN, MAX_RECORDED_AGAIN + 1, None))
    def test_a_function_that_is_recorded_on_many_paths(self, most):
        "The fastest of what was recorded before is deployed."
        def max_recorded_again() -> int | None:
            return most if self.recorded[-1] == "node_update,lanes2" else None

        self.assertEqual(self.select(self.EXPERTS, max_recorded_again=max_recorded_again), "node_update,lanes2")
        is_most = most == MAX_RECORDED_AGAIN + 1
        self.assertEqual(self.recorded == ["node_update", "node_update,lanes2"], is_most)

    def test_outputs_that_are_alive_keep_what_is_recorded(self):
        def fails(candidate: str) -> str | None:
            return "held" if len(self.recorded) == 4 else None

        self.assertEqual(self.select(self.WIDE, fails=fails), "node_update,dag")


instantiate_parametrized_tests(SchedulesTest)


if __name__ == "__main__":
    run_tests()
