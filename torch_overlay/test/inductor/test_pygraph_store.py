# Owner(s): ["module: inductor"]
"""
What PyGraph remembers from one process to the next. Functions and times are those of
torch.testing._internal.pygraph_simulation, so that all but the last class needs no GPU.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import types
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import given, settings, strategies as st

import torch
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.pygraph import report
from torch._inductor.pygraph.select import deploy, store, timing
from torch._inductor.pygraph.select.selection import Selection
from torch._inductor.pygraph.select.store import Decision, Entry
from torch._inductor.pygraph.types.candidate import (
    BINDINGS,
    CANDIDATES,
    COPY,
    NO_GRAPH,
    NODE_UPDATE,
    PRELUDE,
    UNDECIDED,
)
from torch._inductor.pygraph.types.function import FunctionSpec, RecordingFacts
from torch._inductor.pygraph.types.partition import Collective, PartitionInfo
from torch._inductor.pygraph.types.reason import Code, Reason
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    subtest,
)
from torch.testing._internal.inductor_utils import HAS_CUDA_AND_TRITON
from torch.testing._internal.pygraph_simulation import (
    codes,
    DeployTestCase,
    ENOUGH,
    refuse,
    TIMED,
)


H200 = types.SimpleNamespace(name="NVIDIA H200", major=9, minor=0)

FASTER = Decision(
    NODE_UPDATE,
    [
        Reason.of(Code.COPIES_MORE, nbytes=2048, timed_nbytes=24),
        Reason.of(Code.FASTER, graph_us=10.0, uncaptured_us=100.0),
    ],
    {NO_GRAPH: 100.0, NODE_UPDATE: 10.0},
)


class EntryTestCase(TestCase):
    def setUp(self):
        super().setUp()
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)
        self.entry = self.make()

    def make(self, **function: str) -> Entry:
        return Entry(self.directory, {"code": "c", "driver": "1", **function})

    def assertIgnored(self, why: str, entry: Entry | None = None) -> None:
        "In one line that says why."
        with self.assertLogs(store.log, "INFO") as logs:
            self.assertIsNone((entry or self.entry).load())
        (record,) = logs.records
        self.assertIn(why, record.getMessage())
        self.assertNotIn("\n", record.getMessage())


class EntryTest(EntryTestCase):
    def write(self, content: bytes) -> None:
        self.entry.path.parent.mkdir(parents=True, exist_ok=True)
        self.entry.path.write_bytes(content)

    def test_round_trip(self):
        self.entry.save(FASTER)
        self.assertEqual(self.make().load(), FASTER)
        self.entry.save(Decision(NO_GRAPH, [Reason.of(Code.NOT_FASTER)], {}))
        self.assertEqual(self.make().load().choice, NO_GRAPH)
        # No more than the file itself is left behind.
        self.assertEqual(os.listdir(self.entry.path.parent), [self.entry.path.name])

    def test_nothing_is_kept(self):
        with self.assertNoLogs(store.log):
            self.assertIsNone(self.entry.load())

    def test_other_environment(self):
        self.entry.save(FASTER)
        with self.assertNoLogs(store.log):
            self.assertIsNone(self.make(driver="2").load())
            self.assertIsNone(self.make(CPU="fast").load())
        self.make(driver="2").save(Decision(COPY, [], {}))
        self.assertEqual(self.make().load(), FASTER)

    def test_unknown_candidate(self):
        self.entry.save(Decision("telepathy", [], {}))
        self.assertIgnored("no candidate 'telepathy'")

    @parametrize(
        "content",
        (
            subtest(b"", name="empty"),
            subtest(b"\xff\xfe\x00", name="binary"),
            subtest(b"[]", name="list"),
            subtest(b"{}", name="nothing"),
            subtest(b"null", name="null"),
            subtest(b"[" * 100_000, name="deep"),
        ),
    )
    def test_corrupt(self, content):
        self.write(content)
        self.assertIgnored(str(self.entry.path))

    @parametrize(
        "field,value",
        (
            ("choice", None),
            ("choice", ["copy"]),
            ("timings_us", 1),
            ("timings_us", {"copy": "fast"}),
            ("reasons", "measured faster"),
            ("reasons", [{}]),
            ("reasons", [{"code": "OTHER", "details": {}}]),
            ("reasons", [{"code": "FASTER", "details": {}}]),
        ),
    )
    def test_wrong_field(self, field, value):
        self.entry.save(FASTER)
        kept = json.loads(self.entry.path.read_text())
        self.write(json.dumps({**kept, field: value}).encode())
        self.assertIgnored(str(self.entry.path))

    def test_half_written(self):
        self.entry.save(FASTER)
        content = self.entry.path.read_bytes()
        for length in range(0, len(content), 7):
            self.write(content[:length])
            self.assertIgnored(str(self.entry.path))

    @settings(deadline=None)
    @given(st.binary())
    def test_any_content(self, content):
        self.write(content)
        self.assertIsNone(self.entry.load())

    def test_unreadable(self):
        self.entry.path.mkdir(parents=True)
        self.assertIgnored("IsADirectoryError")

    def test_unwritable(self):
        entry = Entry(self.directory / "file", {})
        (self.directory / "file").touch()
        with self.assertLogs(store.log, "INFO") as logs:
            entry.save(FASTER)
        self.assertIn("cannot be kept", logs.records[0].getMessage())

    def test_processes_at_once(self):
        "Each finds a whole decision at any time, its own or another's."
        fork = multiprocessing.get_context("fork")
        start = fork.Barrier(8)
        self.entry.save(FASTER)

        def work(rank: int) -> None:
            # Long enough that writing it in place could be caught halfway.
            reason = Reason.of(Code.ERROR, error=str(rank) * 20_000)
            start.wait()
            for _ in range(50):
                self.entry.save(Decision(NODE_UPDATE, [reason], {}))
                decision = self.make().load()
                if decision is None or len(set(dict(decision.reasons[0].details)["error"])) != 1:
                    os._exit(1)
            os._exit(0)

        processes = [fork.Process(target=work, args=(rank,)) for rank in range(8)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        self.assertEqual([process.exitcode for process in processes], [0] * 8)
        self.assertEqual(os.listdir(self.entry.path.parent), [self.entry.path.name])


instantiate_parametrized_tests(EntryTest)


class KeyTest(TestCase):
    def entry(self, device: Any = H200, **changes: Any) -> Entry:
        arguments = {
            "code_hash": "c",
            "name": "partition_0",
            "mode": "forward",
            "inputs": [torch.zeros(4, 8), 3],
            "static_input_idxs": [0],
            "device_index": 0,
            **changes,
        }
        info = PartitionInfo(arguments["name"], code_hash=arguments["code_hash"])
        spec = FunctionSpec(info, {}, arguments["mode"], "", arguments["device_index"], False)
        with (
            mock.patch("torch.cuda.get_device_properties", lambda index: device),
            mock.patch.object(store, "_driver", lambda: "580"),
        ):
            return store.entry_for(spec, arguments["inputs"], arguments["static_input_idxs"])

    def test_same(self):
        "Values and addresses do not matter."
        other = self.entry(inputs=[torch.ones(4, 8), 3])
        self.assertEqual(other.path, self.entry().path)

    @parametrize(
        "changes",
        (
            subtest({"code_hash": "d"}, name="code"),
            subtest({"name": "partition_1"}, name="partition"),
            subtest({"mode": "backward"}, name="mode"),
            subtest({"inputs": [torch.zeros(4, 9), 3]}, name="shape"),
            subtest({"inputs": [torch.zeros(8, 4).t(), 3]}, name="stride"),
            subtest({"inputs": [torch.zeros(4, 8).int(), 3]}, name="dtype"),
            subtest({"inputs": [torch.zeros(4, 8, device="meta"), 3]}, name="place"),
            subtest({"inputs": [torch.zeros(4, 8), 4]}, name="size"),
            subtest({"inputs": [torch.zeros(4, 8), torch.Generator()]}, name="type"),
            subtest({"static_input_idxs": []}, name="static"),
            subtest(
                {"device": types.SimpleNamespace(name="H100", major=9, minor=0)},
                name="device",
            ),
            subtest(
                {"device": types.SimpleNamespace(name=H200.name, major=9, minor=1)},
                name="capability",
            ),
        ),
    )
    def test_other(self, changes):
        self.assertNotEqual(self.entry(**changes).path, self.entry().path)

    def test_tag(self):
        with torch.compiler.config.patch(cache_key_tag="x"):
            other = self.entry()
        self.assertNotEqual(other.path, self.entry().path)

    def test_environment(self):
        path = self.entry().path
        self.assertLessEqual({"torch", "triton", "driver", "CPU", "debugging"}, set(self.entry().function))
        for name, fact in (
            ("torch_key", lambda: b"other"),
            ("triton_key", lambda: "other"),
            ("_cpu", lambda: "other"),
        ):
            with mock.patch.object(store, name, fact):
                self.assertNotEqual(self.entry().path, path, name)

    def test_debugging(self):
        "What is slower then may not be otherwise."
        for debugging in (
            mock.patch.dict("os.environ", CUDA_LAUNCH_BLOCKING="1"),
            config.patch("triton.force_cudagraph_sync", True),
            config.patch("triton.fast_path_cudagraph_asserts", True),
        ):
            with debugging:
                other = self.entry()
            self.assertNotEqual(other.path, self.entry().path)

    def test_driver(self):
        with mock.patch("torch._C._cuda_getDriverVersion", lambda: 13000, create=True):
            with mock.patch.object(store, "_first_line", lambda *_: None):
                self.assertEqual(store._driver(), "13000")
            with mock.patch.object(store, "_first_line", lambda *_: "NVRM 580"):
                self.assertEqual(store._driver(), "NVRM 580")

    def test_no_place(self):
        with (
            mock.patch.object(store, "cache_dir", mock.Mock(side_effect=OSError("no"))),
            self.assertLogs(store.log, "INFO"),
        ):
            self.assertIsNone(self.entry())

    @parametrize("fx_graph_cache", (False, True))
    @parametrize("force_disable_caches", (False, True))
    def test_switches(self, fx_graph_cache, force_disable_caches):
        with config.patch(
            fx_graph_cache=fx_graph_cache, force_disable_caches=force_disable_caches
        ):
            self.assertEqual(
                store.is_enabled(), fx_graph_cache and not force_disable_caches
            )


instantiate_parametrized_tests(KeyTest)


class RememberTest(DeployTestCase):
    "A deployed function, and the same one in what is for it another process."

    def setUp(self):
        super().setUp()
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        for target, name, value in (
            (store, "cache_dir", lambda: directory.name),
            (store, "_driver", lambda: "580"),
            (deploy, "cudagraphify", self.cudagraphify),
        ):
            patch = mock.patch.object(target, name, value)
            patch.start()
            self.addCleanup(patch.stop)
        patch = mock.patch("torch.cuda.get_device_properties", lambda index: H200)
        patch.start()
        self.addCleanup(patch.stop)
        self.replay_us = 10.0
        # Called with the controller when the function is recorded, and when it is replayed.
        self.on_record = self.on_replay = lambda controller: None

    def cudagraphify(self, model, inputs, static_idxs, *, pygraph, **kwargs):
        self.recorded.append(pygraph)
        pygraph.added("id")
        replay = self.candidate("replay", self.replay_us, 1)

        def fn(inputs):
            self.on_replay(pygraph)
            return replay(inputs)

        # A graph of a few kernels has a prelude only if that was decided on.
        pygraph.recorded(RecordingFacts(has_prelude=pygraph.report.choice == PRELUDE))
        self.on_record(pygraph)
        return fn, self.candidate("record")(inputs)

    def run_process(
        self, calls: int = ENOUGH, info: dict[str, Any] | None = None, **kwargs: Any
    ) -> list[str]:
        "Who ran, each call's outputs checked."
        self.deployed = []
        self.recorded.clear()
        info = {"code_hash": "c", "returned_output_idxs": (0,), **(info or {})}
        self.deploy(info=PartitionInfo("run", **info), **kwargs)
        return self.call(calls)

    def choices(self) -> list[str]:
        return [entry.choice for entry in report()]

    def test_graph(self):
        self.run_process()
        with mock.patch.object(timing.Samples, "call", None):
            ran = self.run_process(10)
        # The first call compiles, and tunes.
        self.assertEqual(ran, ["uncaptured", "record"] + ["replay"] * 8)
        self.assertEqual(len(self.deployed), 1)
        self.assertTrue(self.recorded[0].binds_inputs)
        first, second = report()
        self.assertEqual((first.choice, second.choice), (NODE_UPDATE, NODE_UPDATE))
        self.assertEqual((first.remembered, second.remembered), (False, True))
        self.assertEqual(first.timings_us, second.timings_us)
        self.assertEqual(first.reasons, second.reasons)
        self.assertEqual(counters["pygraph"]["remembered"], 1)

    @parametrize("replay_us,device_us", ((110.0, 10.0), (10.0, 10_000.0)))
    def test_no_graph(self, replay_us, device_us):
        "It lost, or the device was busy: the next process calls the function itself."
        self.replay_us = replay_us
        model = self.candidate("uncaptured", 100, device_us)
        self.run_process(model=model)
        self.assertEqual(self.run_process(5, model=model), ["uncaptured"] * 5)
        self.assertEqual(self.recorded, [])
        (deployed,) = self.deployed
        self.assertNotIsInstance(deployed, Selection)
        self.assertEqual(self.choices(), [NO_GRAPH] * 2)
        self.assertEqual(report()[0].reasons, report()[1].reasons)

    def test_copies(self):
        "What could not be bound is not tried again."
        self.on_record = refuse
        self.run_process()
        self.on_record = lambda controller: self.assertFalse(controller.binds_inputs)
        ran = self.run_process(4)
        self.assertEqual(ran, ["uncaptured", "record", "replay", "replay"])
        self.assertEqual(self.choices(), [COPY] * 2)
        self.assertExpectedInline(
            report()[1].reason,
            """output 0 differs from the uncaptured function's; measured faster: 10.0 us from call to call, 100.0 us without the graph""",  # noqa: B950
        )

    @parametrize("replay_us", (10.0, 110.0))
    def test_binding_falls_back(self, replay_us):
        "It is decided anew, and the next process has that decision."
        self.run_process()
        self.replay_us = replay_us
        self.on_record = refuse
        ran = self.run_process()
        self.assertEqual(ran[:2], ["uncaptured", "record"])
        self.assertEqual(ran[2 : 2 + TIMED], ["uncaptured"] * TIMED)
        self.assertEqual(ran[2 + TIMED : 2 + 2 * TIMED], ["replay"] * TIMED)
        self.assertEqual(counters["pygraph"]["reselected"], 1)
        # One recording: trees have it again at the next call.
        self.assertEqual(len(self.recorded), 1)
        entry = report()[1]
        anew = COPY if replay_us == 10 else NO_GRAPH
        self.assertEqual((entry.choice, entry.remembered), (anew, False))
        self.assertEqual(set(entry.timings_us), {NO_GRAPH, COPY})
        self.on_record = lambda controller: None
        self.run_process(4)
        self.assertEqual(self.choices(), [NODE_UPDATE, anew, anew])

    @parametrize("remembered", (False, True))
    def test_binding_falls_back_later(self, remembered):
        "A deployed graph is recorded again, for another path, and cannot be bound."
        self.run_process()
        if remembered:
            self.run_process(4)
        controller = self.recorded[0]

        def fall_back(controller):
            if controller.binds_inputs:
                refuse(controller)

        self.on_replay = fall_back
        ran = self.call(3 + 2 * TIMED)
        self.assertEqual(ran[0], "replay")
        self.assertEqual(ran[1 : 1 + TIMED], ["uncaptured"] * TIMED)
        self.assertEqual(ran[1 + TIMED :], ["replay"] * (TIMED + 2))
        entry = report()[-1]
        self.assertEqual((entry.choice, entry.remembered), (COPY, False))
        self.assertExpectedInline(
            entry.reason,
            """output 0 differs from the uncaptured function's; measured faster: 10.0 us from call to call, 100.0 us without the graph""",  # noqa: B950
        )
        self.assertIs(controller, self.recorded[-1])
        self.run_process(4)
        self.assertEqual(self.choices()[-1], COPY)
        self.assertEqual(counters["pygraph"]["reselected"], 1)

    def test_aligned_when_it_is_decided_anew(self):
        seen = []
        model = self.candidate("uncaptured", 100, 10)

        def aligned(inputs):
            seen.append(inputs[0].data_ptr() % 16)
            return model(inputs)

        with mock.patch.object(deploy, "get_input_idxs_to_check", lambda *_: [0]):
            self.run_process(model=aligned)
            refuse(self.recorded[0])
            seen.clear()
            x = torch.zeros(9)[1:]
            self.assertNotEqual(x.data_ptr() % 16, 0)
            self.deployed[-1]([x])
        self.assertEqual(seen, [0])

    @parametrize("remembered", (False, True))
    def test_capture_that_fails(self, remembered):
        "That may be for this process alone, so that the next one tries."
        if remembered:
            self.run_process()

        def fail(controller):
            reason = Reason.of(Code.CAPTURE_FAILED, error="out of memory")
            refuse(controller, reason, is_capturable=False)

        self.on_record = fail
        ran = self.run_process()
        self.assertEqual(ran.count("uncaptured"), len(ran) - 1)
        self.assertEqual(self.choices()[-1], NO_GRAPH)
        self.on_record = lambda controller: None
        ran = self.run_process()
        self.assertEqual(ran[1] == "record", remembered)
        self.assertEqual(self.choices()[-1], NODE_UPDATE)

    def test_recording_raises(self):
        "The program may free memory and call again."
        self.run_process()

        def out_of_memory(controller):
            raise torch.OutOfMemoryError("out of memory")

        self.on_record = out_of_memory
        self.assertEqual(self.run_process(1), ["uncaptured"])
        with self.assertRaises(torch.OutOfMemoryError):
            self.call(1)
        self.on_record = lambda controller: None
        self.assertEqual(self.call(2), ["record", "replay"])

    def test_other_sizes(self):
        self.run_process()
        self.run_process(3, inputs=[torch.zeros(5)])
        self.assertEqual(self.choices(), [NODE_UPDATE, UNDECIDED])

    def test_other_driver(self):
        self.run_process()
        with mock.patch.object(store, "_driver", lambda: "590"):
            self.assertEqual(self.run_process().count("uncaptured"), 1 + TIMED)

    @parametrize("force", CANDIDATES)
    @parametrize("replay_us,choice", ((10.0, NODE_UPDATE), (110.0, NO_GRAPH)))
    def test_forced(self, force, replay_us, choice):
        "Neither follows a decision nor makes one."
        self.replay_us = replay_us
        ran = self.run_process(3, force=force)
        self.run_process()
        self.assertEqual(self.choices()[-1], choice)
        self.assertFalse(report()[-1].remembered)
        self.assertEqual(self.run_process(3, force=force), ran)
        self.assertEqual(self.choices()[-1], force)
        for controller in self.recorded:
            self.assertEqual(controller.binds_inputs, force in BINDINGS)
            self.assertEqual(controller.state.binding, force)
        self.run_process(3)
        self.assertEqual(self.choices()[-1], choice)

    def test_collectives(self):
        "Ranks may have decided apart from each other."
        self.run_process()

        self.run_process(3, info={"collectives": (Collective("all_reduce_", "0"),)})
        self.assertEqual(self.choices()[-1], NODE_UPDATE)
        self.assertEqual(codes(report()[-1]), [Code.COLLECTIVES_NOT_TIMED])

    def test_caches_are_off(self):
        for _ in range(2):
            self.run_process(info={"code_hash": None})
        self.assertEqual(counters["pygraph"]["remembered"], 0)

    @settings(deadline=None, max_examples=30)
    @given(
        st.sampled_from([*CANDIDATES, "telepathy"]),
        st.floats(1, 1000),
        st.sampled_from(["", "unbind", "not capturable"]),
    )
    def test_any_decision(self, choice, replay_us, failure):
        "Right or wrong, results are those of the function (call checks them)."
        counters.clear()
        self.replay_us = replay_us
        spec = FunctionSpec(PartitionInfo("run", code_hash="c"), {}, "inference", "", 0, False)
        entry = store.entry_for(spec, [torch.zeros(4)], [])
        entry.save(Decision(choice, [], {}))

        def fail(controller):
            if failure == "not capturable":
                refuse(controller, is_capturable=False)
            elif failure and controller.binds_inputs:
                refuse(controller)

        self.on_record = fail
        ran = self.run_process(40)
        self.assertEqual(len([who for who in ran if who != "forget"]), 40)
        self.assertLessEqual(ran.count("record"), 1)
        self.assertEqual(counters["pygraph"]["remembered"], choice in CANDIDATES)


instantiate_parametrized_tests(RememberTest)


PROGRAM = """
import json, sys, torch
from torch._dynamo.utils import counters
from torch._inductor.pygraph import report
from torch._inductor.pygraph.select import timing

torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(10)]).cuda()
step = torch.compile(lambda x: model(x).relu().sum(), options={"pygraph": True})
grads, timed = [], timing.Samples.call
calls = []
timing.Samples.call = lambda *args: calls.append(1) or timed(*args)
for i in range(440):
    model.zero_grad()
    step(torch.full((8, 64), i / 40, device="cuda")).backward()
    grads.append(model[0].weight.grad.sum().item())
print(json.dumps({
    "choices": [(r.mode, r.choice) for r in report()],
    "remembered": counters["pygraph"]["remembered"],
    "timed": len(calls),
    "grads": grads,
}))
"""


@unittest.skipUnless(HAS_CUDA_AND_TRITON, "requires CUDA and Triton")
class ProcessTest(TestCase):
    def start(self, directory: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "TORCHINDUCTOR_CACHE_DIR": directory,
                "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
            },
        )

    def result(self, process: subprocess.Popen) -> dict[str, Any]:
        output, _ = process.communicate()
        self.assertEqual(process.returncode, 0)
        return json.loads(output.splitlines()[-1])

    def assertClose(self, actual: list[float], expected: list[float]) -> None:
        # A graph's matrix products may be another kernel's.
        self.assertEqual(actual, expected, atol=1e-4, rtol=1e-4)

    def test_second_process(self):
        with tempfile.TemporaryDirectory() as directory:
            first = self.result(self.start(directory))
            second = self.result(self.start(directory))
        self.assertGreater(first["timed"], 0)
        self.assertEqual(second["timed"], 0)
        self.assertEqual(second["remembered"], 2)
        self.assertEqual(second["choices"], first["choices"])
        self.assertClose(second["grads"], first["grads"])

    def test_eight_processes(self):
        with tempfile.TemporaryDirectory() as directory:
            first = [self.start(directory) for _ in range(8)]
            grads = [self.result(process)["grads"] for process in first]
            last = self.result(self.start(directory))
        for result in [*grads, last["grads"]]:
            self.assertClose(result, grads[0])
        self.assertEqual(last["timed"], 0)


if __name__ == "__main__":
    run_tests()
