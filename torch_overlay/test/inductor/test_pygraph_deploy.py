# Owner(s): ["module: inductor"]
"""
What runs in the place of a compiled function from its first call on, for each size, thread and mode.
"""

from __future__ import annotations

import dataclasses
import threading
import types
from collections import Counter
from typing import TYPE_CHECKING
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch._inductor import cudagraph_trees as trees
from torch._inductor.cudagraph_utils import PyGraphOptions
from torch._inductor.pygraph import report, reset_report
from torch._inductor.pygraph.capture import agreement
from torch._inductor.pygraph.capture.bound import BoundGraphNode
from torch._inductor.pygraph.capture.copying import CopyGraphNode
from torch._inductor.pygraph.select import by_size, deploy, selection as selections
from torch._inductor.pygraph.select.controller import Controller, log
from torch._inductor.pygraph.types import journal
from torch._inductor.pygraph.types.candidate import (
    BINDINGS,
    COPY,
    NO_GRAPH,
    NODE_UPDATE,
    UNDECIDED,
)
from torch._inductor.pygraph.types.partition import Collective, PartitionInfo
from torch._inductor.pygraph.types.reason import Code, Reason
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.pygraph_simulation import (
    codes,
    DeployTestCase,
    DIFFERS,
    ENOUGH,
    INFO,
    new_controller,
    new_report,
    refuse,
    SelectTestCase,
    TIMED,
)
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._inductor.cudagraph_utils import ModelType


class DeployTest(DeployTestCase):
    def by_size(self, model: ModelType, force: str | None = None) -> ModelType:
        "What trees make of a function of a tensor and an integer."
        options = PyGraphOptions(
            info=INFO, objects={}, force=force, replace=lambda fn: None
        )
        return trees.cudagraphify_impl(
            model,
            [torch.tensor(0), 3],
            (),
            device_index=0,
            is_backward=False,
            is_inference=True,
            stack_traces=None,
            pygraph=options,
        )

    def test_config_is_asked_once_for_each_size(self):
        "And not in what is replayed."
        fn = self.by_size(lambda inputs: [inputs[0] + 1], force=NO_GRAPH)
        asked = []
        captures = lambda sizes: not asked.append(sizes)  # noqa: E731
        with mock.patch.object(trees, "is_cudagraph_capture_sizes", captures):
            for n in (3, 4, 3, 4, 3):
                self.assertEqual(fn([torch.tensor(n), n]), [torch.tensor(n + 1)])
        self.assertEqual(asked, [3, 4])

    def sizes_of(self, fn: ModelType) -> by_size.Sizes:
        "What is deployed of a function, by sizes."
        cells = dict(zip(fn.__code__.co_freevars, fn.__closure__))
        return cells["fn_cache"].cell_contents

    def call_at(self, fn: ModelType, *sizes: int) -> list[str]:
        "Return who ran each call."
        before = len(self.ran)
        for n in sizes:
            self.assertEqual(fn([torch.tensor(n), n]), [torch.tensor(n + 1)])
        return self.ran[before:]

    def test_sizes_that_come_once(self):
        "They run uncaptured and are not timed, looked up or reported. So many of them are kept."
        fn = self.by_size(self.candidate("uncaptured", 100, 10))
        kept = []
        with (
            mock.patch.object(by_size, "MAX_WAITING", 8),
            mock.patch.object(selections.timing.Samples, "call", side_effect=AssertionError),
            mock.patch.object(deploy.store, "entry_for", return_value=None) as look_up,
        ):
            for n in range(200):
                self.call_at(fn, n)
                kept.append(len(self.sizes_of(fn)))
        self.assertEqual(max(kept), 1 + 8)
        self.assertEqual(len(report()), 1)
        self.assertEqual(look_up.call_count, 1)
        self.assertEqual({*self.ran}, {"uncaptured"})

    def test_sizes_that_come_often(self):
        "The first sizes are selected for at once, others once they came often enough."
        fn = self.by_size(self.candidate("uncaptured", 100, 10))
        with mock.patch.object(by_size, "MAX_WAITING", 8):
            for n in range(10, 200):
                self.call_at(fn, 3, n, 4)
                if n == 10 + by_size.MIN_CALLS - 1:
                    self.assertEqual([f.sizes for f in report()], [[3]])
        self.assertEqual([f.sizes for f in report()], [[3], [4]])
        self.assertEqual(len(self.recorded), 2)

    def test_few_sizes_are_timed_at_a_time(self):
        fn = self.by_size(self.candidate("uncaptured", 100, 10))
        sizes = [*range(3, 15)]
        with mock.patch.object(by_size, "TIMED_PART", 100):
            self.call_at(fn, *sizes * (by_size.MIN_CALLS + 2))
            self.assertEqual(len(report()), by_size.MIN_TIMED)
            # Sizes that stopped coming give their places to others.
            self.call_at(fn, *sizes[by_size.MIN_TIMED :] * (by_size.MIN_CALLS + 2))
            self.assertEqual([f.sizes for f in report()], [[n] for n in sizes[:4]])
            later = [*range(20, 24)]
            self.call_at(fn, *later * (by_size.MIN_CALLS + 2))
            self.assertEqual([f.sizes for f in report()], [[n] for n in later])

    def test_sizes_come_as_often_as_makes_up_for_a_recording(self):
        sizes, waiting = by_size.Sizes(), mock.Mock(calls=5000, since=0, sizes=7)
        for gain, expected in ((100, 50), (10, 500), (1, by_size.MAX_CALLS), (0, by_size.MAX_CALLS), (5000, 4), (0, 16)):
            entry = mock.Mock(choice=NODE_UPDATE, candidate=NODE_UPDATE, saved_us=gain, remembered=False)
            sizes.timed[3] = mock.Mock(report=entry, record_us=5000.0)
            self.assertTrue(sizes.is_due(waiting, []))
            self.assertEqual((sizes.min_calls, sizes.timed), (expected, {}))

    def test_sizes_between_others(self):
        "Where a graph was measured faster at smaller and at larger sizes, it is recorded without being timed."
        fn = self.by_size(self.candidate("uncaptured", 100, 10))
        self.call_at(fn, 3)
        self.sizes_of(fn).faster |= {(3,): NODE_UPDATE, (9,): NODE_UPDATE, (20,): COPY}
        with mock.patch.object(selections.timing.Samples, "call", side_effect=AssertionError):
            ran = self.call_at(fn, *[5] * (by_size.MIN_CALLS + 4))
        self.assertEqual(ran, ["uncaptured"] * (by_size.MIN_CALLS + 1) + ["record"] + ["replay"] * 2)
        _, entry = report()
        self.assertEqual((entry.choice, codes(entry)), (NODE_UPDATE, [Code.AS_OTHER_SIZES]))
        # It was not measured.
        self.assertNotIn((5,), self.sizes_of(fn).faster)
        for n in (2, 12, 21):
            with self.subTest(n), mock.patch.object(selections.timing.Samples, "call", side_effect=ZeroDivisionError):
                self.assertRaises(ZeroDivisionError, self.call_at, fn, *[n] * (by_size.MIN_CALLS + 4))

    def test_remembered_sizes(self):
        "An earlier process decided on them: they are deployed when they come again."
        decision = deploy.store.Decision(NODE_UPDATE, [], {})
        is_known = lambda inputs: inputs[1] == 4  # noqa: E731
        entry = lambda spec, inputs, static: mock.Mock(load=lambda: decision if is_known(inputs) else None)  # noqa: E731
        fn = self.by_size(self.candidate("uncaptured", 100, 10))
        with mock.patch.object(deploy.store, "entry_for", entry):
            ran = self.call_at(fn, 3, 4, 5, 4, 5, 4, 5, 4)
        self.assertEqual(ran, ["uncaptured"] * 5 + ["record", "uncaptured", "replay"])

    def test_waiting_sizes_begin_a_step(self):
        "A forward that is not selected for yet also shows which gradients outlived the last step."
        fn = self.by_size(self.candidate("uncaptured", 100, 10))
        self.call_at(fn, 3)
        backward = mock.Mock()
        with mock.patch.dict(selections._gradients, {backward: (-1, [])}):
            self.call_at(fn, 4)
        backward.stepped.assert_called_once_with(outputs_outlive=False)

    def test_forced_sizes(self):
        fn = self.by_size(self.candidate("uncaptured", 100, 10), force=NODE_UPDATE)
        self.assertEqual(self.call_at(fn, 3, 4, 3, 4, 3, 4), ["uncaptured"] * 2 + ["record"] * 2 + ["replay"] * 2)

    def test_force_no_graph(self):
        self.deploy(force=NO_GRAPH)
        self.assertEqual(self.call(30), ["uncaptured"] * 30)
        self.assertEqual((self.recorded, self.deployed), ([], []))
        (entry,) = report()
        self.assertEqual((entry.choice, codes(entry)), (NO_GRAPH, [Code.FORCED]))

    def test_trace(self):
        "A decision is written when it is made, and a forced one when it is recorded."
        written = []

        def publish(entry):
            written.append((entry.choice, len(self.ran)))

        with mock.patch.object(journal, "publish", publish):
            self.deploy()
            self.call(ENOUGH)
            # One more, in which it looks for others.
            self.assertEqual(written, [(UNDECIDED, 0), (NO_GRAPH, 3 + 4 * TIMED)])
            written.clear()
            self.ran.clear()
            self.deploy(force=NODE_UPDATE)
            self.call(10)
            self.assertEqual(
                written, [(UNDECIDED, 0), (NODE_UPDATE, 0), (NODE_UPDATE, 2)]
            )

    def test_force_what_there_is_not(self):
        with self.assertRaisesRegex(ValueError, "'graph': use one of no_graph, copy"):
            self.deploy(force="graph")

    @parametrize("force", (COPY, *BINDINGS))
    def test_force_graph(self, force):
        self.deploy(force=force)
        self.assertEqual(self.call(6), ["uncaptured", "record"] + ["replay"] * 4)
        (recorded,) = self.recorded
        self.assertEqual(recorded["pygraph"].binds_inputs, force != COPY)
        self.assertEqual(recorded["pygraph"].state.binding, force)
        self.assertEqual(len(self.deployed), 1)
        (entry,) = report()
        self.assertEqual((entry.choice, codes(entry)), (force, [Code.FORCED]))
        self.assertEqual(dict(counters["pygraph"]), {force: 1})

    def test_selection(self):
        self.deploy()
        ran = self.call(ENOUGH)
        first = 1 + TIMED
        self.assertEqual(ran[:first], ["uncaptured"] * first)
        self.assertEqual(ran[first], "record")
        self.assertEqual(ran[first + 1 : first + 1 + TIMED], ["replay"] * TIMED)
        # It replays the same function, in the same time.
        self.assertEqual(ran[-1], "uncaptured")
        self.assertEqual(self.forgotten, [(self.manager, "id")])
        self.assertEqual(len(self.deployed), 1)
        (recorded,) = self.recorded
        self.assertTrue(recorded["pygraph"].binds_inputs)

    def test_arguments_reach_trees(self):
        traces = ["trace"]
        self.deploy(
            force=NODE_UPDATE,
            device_index=3,
            is_inference=False,
            mutated_input_idxs=(1,),
            stack_traces=traces,
            info=PartitionInfo(
                "run", returned_output_idxs=(1,), reused_input_idxs=(2,)
            ),
            inputs=[torch.zeros(4), torch.zeros(9)[1:], torch.zeros(4)],
            static_input_idxs=[0, 1],
        )
        self.call(2)
        (recorded,) = self.recorded
        spec = recorded.pop("pygraph").spec
        self.assertEqual(spec.returned_output_idxs, OrderedSet([1]))
        self.assertEqual(spec.reused_input_idxs, OrderedSet([2]))
        self.assertEqual(spec.mutated_input_idxs, (1,))
        self.assertEqual(
            recorded,
            {
                # The other is not aligned.
                "static": [0],
                "device_index": 3,
                "is_backward": False,
                "is_inference": False,
                "mutated_input_idxs": (1,),
                "stack_traces": traces,
            },
        )

    @parametrize(
        "is_backward,is_inference,mode",
        ((True, False, "backward"), (False, True, "inference"), (False, False, "forward")),
    )
    def test_report(self, is_backward, is_inference, mode):
        def partition_7(inputs):
            return [inputs[0] + 1]

        self.deploy(
            partition_7,
            is_backward=is_backward,
            is_inference=is_inference,
            info=dataclasses.replace(INFO, name="partition_7"),
        )
        (entry,) = report()
        self.assertEqual(
            (entry.name, entry.mode, entry.choice), ("partition_7", mode, UNDECIDED)
        )

    def test_uncaptured_backward_belongs_to_its_generation(self):
        self.deploy(is_backward=True, is_inference=False)
        self.call(3)
        self.assertEqual(self.manager.set_to_running_backward.call_count, 3)

    @parametrize("force", (None, NODE_UPDATE, COPY, NO_GRAPH))
    def test_thread_that_trees_do_not_know(self, force):
        errors = []

        def work() -> None:
            try:
                self.deploy(force=force, is_backward=True, is_inference=False)
                self.assertEqual(self.call(40), ["uncaptured"] * 40)
            except BaseException as e:
                errors.append(e)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        self.assertEqual(errors, [])
        (entry,) = report()
        self.assertEqual(
            (entry.choice, codes(entry)), (NO_GRAPH, [Code.UNKNOWN_THREAD])
        )
        self.assertEqual((self.recorded, self.deployed), ([], []))
        self.manager.set_to_running_backward.assert_not_called()

    def test_thread_that_trees_do_not_know_calls_first(self):
        "The one that they know gets a graph all the same."
        threads = [
            threading.Thread(target=self.deploy, kwargs={"force": NODE_UPDATE}),
            threading.Thread(target=self.call, args=(3,)),
        ]
        for thread in threads:
            thread.start()
            thread.join()
        self.assertEqual(self.ran, ["uncaptured"] * 3)
        self.assertEqual(report()[0].choice, NO_GRAPH)
        self.assertEqual(self.call(4), ["uncaptured", "record", "replay", "replay"])
        self.assertEqual([r.choice for r in report()], [NODE_UPDATE])

    def test_two_threads_call_after_one_that_trees_do_not_know(self):
        "Both had what waits. Each records what it deploys, and for itself."
        thread = threading.Thread(target=self.deploy, kwargs={"force": NODE_UPDATE})
        thread.start()
        thread.join()
        for _ in range(2):
            self.fn([torch.tensor(1)])
        for selection in self.deployed[:2]:
            selection([torch.tensor(1)])
        recorded = [r["pygraph"] for r in self.recorded]
        self.assertEqual(recorded, [s.controller for s in self.deployed[:2]])
        self.assertIsNot(*recorded)

    def test_backward_in_a_thread_that_trees_do_not_know(self):
        "It has no manager."
        self.deploy(is_backward=True, is_inference=False)

        def manager(*args, **kwargs):
            self.assertIsNotNone(trees.thread_containers())
            return self.manager

        ran = []
        with mock.patch.object(deploy, "get_manager", manager):
            thread = threading.Thread(target=lambda: ran.extend(self.call(2)))
            thread.start()
            thread.join()
        self.assertEqual(ran, ["uncaptured"] * 2)

    def test_other_thread_after_deployment(self):
        self.deploy(force=NODE_UPDATE)
        def call_in_other_thread() -> None:
            thread = threading.Thread(target=self.call, args=(4,))
            thread.start()
            thread.join()
            self.assertEqual(self.ran, ["uncaptured"] * 4)

        self.assertEqual(self.call(1), ["uncaptured"])
        call_in_other_thread()
        self.assertEqual(self.call(3), ["record", "replay", "replay"])
        call_in_other_thread()
        self.assertEqual(self.call(2), ["replay"] * 2)

    @parametrize("force", (NO_GRAPH, NODE_UPDATE, None))
    def test_misaligned_input_is_written_back(self, force):
        "An input that is cloned for alignment is the program's all the same."
        seen = []

        def model(inputs):
            self.ran.append("model")
            seen.append(inputs[0].data_ptr() % 16)
            return [inputs[0].add_(1).sum()]

        with mock.patch.object(deploy, "get_input_idxs_to_check", lambda *_: [0]):
            self.deploy(model, force=force, mutated_input_idxs=(0,))
        x = torch.zeros(9)[1:]
        self.assertNotEqual(x.data_ptr() % 16, 0)
        for i in range(50):
            fn = self.deployed[-1] if self.deployed else self.fn
            (y,) = fn([x])
            self.assertEqual((x, y), (torch.full((8,), i + 1.0), torch.tensor(8 * (i + 1.0))))
        self.assertEqual(set(seen), {0})

    def test_collectives_are_chosen_alike_by_all_ranks(self):
        self.deploy(info=PartitionInfo("run", collectives=(Collective("all_reduce_", "0"),)))
        self.assertEqual(self.call(3), ["uncaptured", "record", "replay"])
        self.assertTrue(self.recorded[0]["pygraph"].binds_inputs)
        self.assertEqual(report()[0].choice, NODE_UPDATE)

    def test_names_on_ranks(self):
        "They do not depend on what else a rank compiles, nor on the names of its groups."

        def names(*groups: str, compile_id: str) -> list[str]:
            found = []
            with mock.patch.object(deploy, "_numbers", Counter()):
                for ops in (["all_reduce_"], [], ["all_reduce_", "all_gather"], ["all_reduce_"]):
                    collectives = tuple(map(Collective, ops, groups))
                    self.deploy(info=PartitionInfo("run", collectives=collectives), compile_id=compile_id)
                    if collectives:
                        found.append(self.fn.controller.spec.number_on_ranks)
            return found

        first = names("0", "1", compile_id="0/0")
        self.assertEqual(len(set(first)), 3)
        self.assertEqual(names("2", "1", compile_id="5/0"), first)
        self.assertNotEqual(names("1", "1", compile_id="0/0"), first)

    def test_ranks_do_not_ask_without_collectives(self):
        "A rank may run such a function alone."
        self.deploy(info=PartitionInfo("run", ranks_decide=True))
        with mock.patch.object(agreement, "agree", side_effect=AssertionError("asked")):
            self.call(ENOUGH)
        self.assertNotEqual(report()[0].choice, UNDECIDED)

    def test_log(self):
        with self.assertLogs(log, "INFO") as logs:
            self.deploy(force=NO_GRAPH)
        self.assertExpectedInline(
            logs.records[0].getMessage(),
            """run inference: no_graph (FORCED) config.pygraph_force is set""",
        )


instantiate_parametrized_tests(DeployTest)


class ControllerTest(SelectTestCase):
    def setUp(self):
        super().setUp()
        self.controller = new_controller("f", "forward")

    def may_run(
        self,
        path: Sequence[Controller | None] = (),
        live: bool = False,
        new_generation: bool = True,
        **states: bool,
    ) -> bool:
        "path: the controllers of the graphs that ran last, the last one first"
        node = None
        for controller in reversed(path):
            node = types.SimpleNamespace(
                wrapped_function=types.SimpleNamespace(pygraph=controller),
                parent=node,
                all_outputs_are_dead=lambda: not live,
                outputs_weakrefs=[],
            )
        self.manager = mock.Mock(current_node=node, in_recording=False, in_warmup=False)
        self.manager.can_start_new_generation.return_value = new_generation
        self.manager.user_invoked_mark_step.return_value = False
        self.manager.configure_mock(**states)
        return self.controller.may_run(self.manager)

    def test_may_run(self):
        self.assertTrue(self.may_run())
        for state in ("in_recording", "in_warmup"):
            self.assertTrue(self.may_run(**{state: True}))

    def test_activations_that_are_kept(self):
        "The path that left them goes on, and no function runs over its own."
        for path, runs in (
            ((self.controller,), False),
            ((None, self.controller), False),
            ((None,), True),
        ):
            self.assertEqual(self.may_run(path, live=True), runs)
            self.assertEqual(self.manager.update_generation.call_count, runs)
            self.assertTrue(self.may_run(path, live=False))
            # A backward is pending: trees do not end the path.
            self.assertTrue(self.may_run(path, live=True, new_generation=False))
            self.manager.update_generation.assert_not_called()
        self.assertEqual(counters["pygraph"]["held_activations"], 2)

    def test_output_of_a_warmup_that_is_kept(self):
        "Trees would take away what this function returns together with it."
        self.assertFalse(self.may_run((None,), live=True, in_warmup=True))
        self.manager.update_generation.assert_not_called()

    def test_not_capturable(self):
        refuse(self.controller, is_capturable=False)
        self.assertFalse(self.may_run())

    def test_unbind(self):
        self.assertIs(self.controller.node_type(), BoundGraphNode)
        with self.assertLogs(log, "INFO") as logs:
            refuse(self.controller, Reason.of(Code.HIDDEN_ALIGNMENT))
        self.assertIs(self.controller.node_type(), CopyGraphNode)
        self.assertExpectedInline(
            logs.records[0].getMessage(),
            """f forward: inputs are copied (HIDDEN_ALIGNMENT) a kernel reads a part of an input that may be less aligned""",  # noqa: B950
        )
        self.assertEqual(codes(self.controller.report), [Code.HIDDEN_ALIGNMENT])

    def test_decide(self):
        entry = self.controller.report
        entry.stock_copied_bytes = 4096
        for choice, copied in ((COPY, 4096), (NODE_UPDATE, 0), (NO_GRAPH, 0)):
            entry.reasons = []
            self.controller.decide(choice, DIFFERS)
            self.assertEqual(
                (entry.choice, entry.copied_bytes, entry.reasons), (choice, copied, [DIFFERS])
            )

    def test_report(self):
        self.assertEqual(report(), [])
        first = new_report("a", "forward")
        second = new_report("a", "forward")
        entries = report()
        self.assertEqual([id(e) for e in entries], [id(first), id(second)])
        self.assertIsNot(first.timings_us, second.timings_us)
        self.assertIsNot(first.reasons, second.reasons)
        # A list of its own, of the entries themselves.
        entries.clear()
        first.choice = COPY
        self.assertEqual([e.choice for e in report()], [COPY, UNDECIDED])
        reset_report()
        self.assertEqual(report(), [])
        self.assertEqual(first.choice, COPY)


if __name__ == "__main__":
    run_tests()
