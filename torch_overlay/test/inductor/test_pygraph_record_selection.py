# Owner(s): ["module: inductor"]
"""
Selection: remembered and forced decisions, and bindings that are tried.

Functions as Inductor writes them are deployed on the modelled device of modelled_cuda.py.
"""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch._inductor import cudagraph_trees as trees
from torch._inductor.pygraph import report
from torch._inductor.pygraph.capture import bound
from torch._inductor.pygraph.graph.prelude import PreludeUnavailable
from torch._inductor.pygraph.replay import interpreter
from torch._inductor.pygraph.select import timing
from torch._inductor.pygraph.types import candidate
from torch._inductor.pygraph.types.reason import Code, Reason, RefusedError
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.modelled_operators import on_host
from torch.testing._internal.pygraph_functions import (
    hiding,
    RecordTestCase,
)


class SelectionTest(RecordTestCase):
    @parametrize(
        "end",
        ("works", "unavailable", "broken", "instantiate", "replay", "on the device"),
    )
    def test_prelude(self, end):
        "Without one, or where it fails, the host sets the nodes, of this graph or the next."
        made = []

        class Prelude:
            nodes: tuple[int, ...] = ()

            def __init__(self, graph: Any, places: Any, index: int) -> None:
                made.append(self)
                if end == "unavailable":
                    raise PreludeUnavailable("no compiler")
                if end == "broken":
                    raise RefusedError(Reason.of(Code.ERROR, error="no node"))

            def upload(self, executable: Any) -> None:
                self.is_uploaded = True

            def failure(self) -> Reason | None:
                failed = Reason.of(Code.NODE_REFUSED_ON_DEVICE, status=9)
                return failed if end == "on the device" else None

        with mock.patch.object(bound, "Prelude", Prelude), self.failing_once(end):
            self.check(self.ADD, force="prelude")
        self.assertEqual(len(made), 1)
        (entry,) = report()
        self.assertEqual(counters["pygraph"]["unbound"], 0)
        self.assertEqual(counters["pygraph"]["bound_by_host"], end != "works")
        if end == "works":
            self.assertTrue(made[0].is_uploaded)
            self.assertEqual(entry.choice, "prelude")
            self.assertEqual(entry.reasons, [Reason.of(Code.FORCED)])
            return
        reason = {
            "unavailable": "no compiler",
            "broken": "recording failed: no node",
            "instantiate": "the graph cannot be instantiated: no memory",
            "replay": "the graph cannot be launched: no memory",
            "on the device": "cudaGraphKernelNodeSetParam failed on the device with 9",
        }
        self.assertEqual(entry.choice, "node_update")
        self.assertEqual(entry.reason, f"no prelude: {reason[end]}")
        self.assertGreater(entry.updated_nodes, 0)
        self.assertEqual(entry.copied_bytes, 0)

    @parametrize("end", ("works", "few kernels", "unavailable", "on the device"))
    def test_prelude_is_selected(self, end):
        "A graph of many kernels has one if it can, and is what a replay finds at once."

        class Prelude:
            nodes: tuple[int, ...] = ()

            def __init__(self, *args: Any) -> None:
                if end == "unavailable":
                    raise PreludeUnavailable("no compiler")

            def upload(self, executable: Any) -> None:
                pass

            def failure(self) -> Reason | None:
                failed = Reason.of(Code.NODE_REFUSED_ON_DEVICE, status=9)
                return failed if end == "on the device" else None

        costs = iter([timing.Cost(*[timing.Estimate(us)] * 3) for us in (99.0, 50.0)])
        with (
            mock.patch.object(bound, "Prelude", Prelude),
            mock.patch.object(bound, "prelude_pays", lambda *_: end != "few kernels"),
            mock.patch.object(timing.Samples, "cost", lambda samples: next(costs)),
        ):
            fn = self.check(self.ADD, force=None, calls=170)
        (entry,) = report()
        self.assertEqual(entry.choice, "prelude" if end == "works" else "node_update")
        failed = end in ("unavailable", "on the device")
        self.assertEqual(counters["pygraph"]["bound_by_host"], failed)
        manager = trees.get_manager(0)
        (nodes,) = filter(None, manager.roots.values())
        self.assertEqual(len(nodes), 1)
        self.assertEqual(nodes[0].prelude is not None, end == "works")
        with mock.patch.object(manager, "_run", side_effect=AssertionError("searched")):
            x, y = self.randn(), self.randn()
            (out,) = fn(x, y)
            self.assertEqual(on_host(out), on_host(x).sin() + on_host(y))

    def test_prelude_of_what_cannot_be_captured(self):
        with (
            mock.patch.object(bound, "Prelude", side_effect=AssertionError),
            mock.patch.object(bound, "Rehearsal", side_effect=RuntimeError("out")),
        ):
            self.check(self.ADD, force="prelude")
        (entry,) = report()
        self.assertEqual(entry.choice, "copy")

    @parametrize("hidden", (None, 0, 1, 2))
    def test_remembered(self, hidden):
        "It is bound again at the second call, or decided anew where it can not be."
        with (
            hiding(hidden),
            self.remembered() as entry,
        ):
            calls = 3 if hidden is None else 200
            self.check(self.ADD, force=None, code_hash="c", calls=calls)
            kept = entry.load()
        (function,) = report()
        self.assertEqual(function.choice, kept.choice)
        self.assertEqual(function.remembered, hidden is None)
        self.assertEqual(function.choice == candidate.NODE_UPDATE, hidden is None)
        self.assertEqual(counters["pygraph"]["reselected"], int(hidden is not None))

    def test_remembered_copies(self):
        "They are no more than it was decided with."
        with self.remembered(candidate.COPY):
            self.check(self.ADD, force=None, code_hash="c", calls=12)
        (function,) = report()
        self.assertEqual((function.choice, function.copied_bytes), ("copy", 64))
        self.assertTrue(function.remembered)
        self.assertEqual(counters["pygraph"]["reselected"], 0)

    def test_remembered_and_not_bound_later(self):
        "A recording for inputs that are less aligned can not be bound."
        memory, calls, hidden = self.randn(64), itertools.count(), [None]

        def make():
            call = next(calls)
            hidden.append(0 if call > 3 else None)
            offset = 4 if call > 3 else 0
            x = torch.as_strided(memory, (8,), (1,), offset)
            return [x, self.randn()]

        with (
            hiding(lambda: hidden[-1]),
            self.remembered() as entry,
        ):
            self.check(self.ADD, make, force=None, code_hash="c", calls=120)
            kept = entry.load()
        (function,) = report()
        self.assertNotEqual(function.choice, candidate.NODE_UPDATE)
        self.assertEqual(function.choice, kept.choice)
        self.assertEqual(counters["pygraph"]["reselected"], 1)

    def test_forced_copies_are_reported(self):
        self.check(self.ADD, force="copy", calls=3)
        (function,) = report()
        self.assertEqual((function.choice, function.copied_bytes), ("copy", 64))

    def test_recording_that_is_found_later(self):
        "What was not recorded in the call that should have is replayed the short way too."
        add = interpreter.ReplayChain.add
        with mock.patch.object(interpreter.ReplayChain, "add", lambda replays, general: None):
            fn = self.check(self.ADD, calls=1)
            x, y = self.randn(), self.randn()
            fn(x, y)
        self.assertIs(interpreter.ReplayChain.add, add)
        fn(x, y)
        manager = trees.get_manager(0)
        with mock.patch.object(manager, "_run", side_effect=AssertionError("searched")):
            x, y = self.randn(), self.randn()
            (out,) = fn(x, y)
            self.assertEqual(on_host(out), on_host(x).sin() + on_host(y))


instantiate_parametrized_tests(SelectionTest)


class SelectionPythonTest(SelectionTest):
    "Without compiled code."

    compiled = None


if __name__ == "__main__":
    run_tests()
