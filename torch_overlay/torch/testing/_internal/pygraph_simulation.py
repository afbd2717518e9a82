"""A simulated host and device for tests of what PyGraph selects."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import types
from typing import Any, TYPE_CHECKING
from unittest import mock

from hypothesis import strategies as st

import torch
from torch._dynamo.utils import counters
from torch._inductor.pygraph import FunctionReport, reset_report
from torch._inductor.pygraph.select import deploy, timing
from torch._inductor.pygraph.select.controller import Controller
from torch._inductor.pygraph.select.timing import Cost, Estimate
from torch._inductor.pygraph.types import journal
from torch._inductor.pygraph.types.function import FunctionSpec, RecordingFacts, Refused
from torch._inductor.pygraph.types.partition import PartitionInfo
from torch._inductor.pygraph.types.reason import Code, Reason
from torch._inductor.test_case import TestCase
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# Calls of a candidate whose times do not vary, and the most there are.
TIMED = timing.WARMUP_SAMPLES + 2 * timing.SAMPLES + timing.DEVICE_SAMPLES
# For a decision, of such times.
ENOUGH = 5 * TIMED
MAX_TIMED = TIMED - 2 * timing.SAMPLES + timing.MAX_SAMPLES

# Of a function that returns one output, and writes over no input.
INFO = PartitionInfo("run", returned_output_idxs=(0,))

# What the host takes to record an event, in the simulation.
EVENT_US = 10

estimates = st.builds(Estimate, st.floats(1e-3, 1e6), st.floats(0, 1e3))
costs = st.builds(Cost, estimates, estimates, estimates)


def cost(program: float, host: float, device: float, error: float = 0) -> Cost:
    return Cost(*[Estimate(us, error) for us in (program, host, device)])


def new_report(name: str, mode: str) -> FunctionReport:
    entry = FunctionReport(name, mode)
    journal.add(entry)
    return entry


def new_controller(name: str, mode: str = "inference") -> Controller:
    "Of a function that returns one output, and writes over no input."
    spec = FunctionSpec(
        dataclasses.replace(INFO, name=name),
        objects={},
        mode=mode,
        compile_id="",
        device_index=0,
        is_distributed=False,
    )
    return Controller(spec, FunctionReport(name, mode))


DIFFERS = Reason.of(Code.DIFFERS, result="output 0")


def refuse(
    controller: Controller,
    reason: Reason = DIFFERS,
    *,
    is_capturable: bool = True,
    has_prelude: bool = False,
) -> None:
    "What trees do when a recording fails."
    facts = RecordingFacts(has_prelude=has_prelude)
    refused = Refused(reason, is_capturable, facts, rerun=list)
    controller.refused(mock.Mock(), refused)


def captured(controller: Controller, **facts: Any) -> None:
    "What trees do when a recording is made."
    controller.recorded(RecordingFacts(has_captured=True, **facts))


def codes(entry: FunctionReport) -> list[Code]:
    return [reason.code for reason in entry.reasons]


def launching(us: float, error: float = 0) -> Cost:
    "The device waits for the host."
    return cost(us, us, us / 2, error)


class Simulation:
    """
    Time, in microseconds, of one host and one stream of a device.

    A program calls a function and then does something else for ``gap_host`` and
    ``gap_device``.
    """

    def __init__(self) -> None:
        self.host = 0.0
        self.device = 0.0
        self.freed: list[str] = []

    def work(self, host: float, device: float) -> None:
        start = self.host
        self.host += host
        self.device = max(self.device, start) + device
        # Nothing ends on the device before the host has launched it all.
        self.device = max(self.device, self.host)

    def replay(self, host: float, device: float) -> None:
        "All of the host's work comes before the graph begins."
        self.host += host
        self.device = max(self.device, self.host) + device

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)

    def event(self, enable_timing: bool) -> Any:
        if not enable_timing:
            raise AssertionError("cannot be read")
        event = types.SimpleNamespace(time=None)

        def record(stream: Any) -> None:
            self.host += EVENT_US
            event.time = max(self.device, self.host)

        def synchronize() -> None:
            self.host = max(self.host, event.time)

        event.record = record
        event.synchronize = synchronize
        event.elapsed_time = lambda end: (end.time - event.time) / 1e3
        return event

    def sleep(self, cycles: int) -> None:
        self.work(0, cycles / timing.CYCLES_PER_US)

    def clear(self) -> None:
        self.freed.append("workspaces")

    def empty(self) -> None:
        self.freed.append("cache")

    @contextlib.contextmanager
    def patched(self) -> Iterator[Simulation]:
        clock = types.SimpleNamespace(perf_counter=lambda: self.host / 1e6)
        with (
            mock.patch.object(timing, "time", clock),
            mock.patch("torch.cuda.Event", self.event),
            mock.patch("torch.cuda.current_stream", lambda device=None: None),
            mock.patch("torch.cuda.stream", contextlib.nullcontext),
            mock.patch("torch.cuda._sleep", self.sleep),
            mock.patch("torch.cuda.is_current_stream_capturing", lambda: False),
            mock.patch("torch.cuda.empty_cache", self.empty),
            mock.patch("torch._C._cuda_clearCublasWorkspaces", self.clear, create=True),
            mock.patch("torch._C._cuda_getCurrentRawStream", lambda index: 0, create=True),
        ):
            yield self


class NoisySimulation(Simulation):
    """The host's times vary by 10 %, and now and then one is three times as long."""

    def __init__(self, random: random.Random) -> None:
        super().__init__()
        self.random = random

    def noise(self) -> float:
        return self.random.lognormvariate(0, 0.1) * (3 if self.random.random() < 0.03 else 1)

    def work(self, host: float, device: float) -> None:
        super().work(host * self.noise(), device)

    def replay(self, host: float, device: float) -> None:
        super().replay(host * self.noise(), device)


class SelectTestCase(TestCase):
    simulation_type: Callable[[], Simulation] = Simulation

    def setUp(self):
        super().setUp()
        counters.clear()
        reset_report()
        self.simulation = self.simulation_type()
        stack = contextlib.ExitStack()
        stack.enter_context(self.simulation.patched())
        self.addCleanup(stack.close)
        # Who ran each call.
        self.ran: list[str] = []

    def tearDown(self):
        super().tearDown()
        reset_report()

    def candidate(self, who: str, host: float = 1, device: float = 1) -> Callable:
        def run(inputs: list[Any]) -> list[Any]:
            self.ran.append(who)
            self.simulation.work(host, device)
            return [inputs[0] + 1]

        return run


class DeployTestCase(SelectTestCase):
    def setUp(self):
        super().setUp()
        self.manager = mock.Mock(roots={}, ids_to_funcs={})
        self.recorded: list[dict[str, Any]] = []
        self.forgotten: list[Any] = []

        def cudagraphify(model, inputs, static_idxs, **kwargs):
            self.recorded.append({"static": list(static_idxs), **kwargs})
            kwargs["pygraph"].added("id")
            outputs = model(inputs)
            self.ran[-1] = "record"

            def replay(inputs):
                outputs = model(inputs)
                self.ran[-1] = "replay"
                return outputs

            return replay, outputs

        def forget(manager, function_id):
            self.forgotten.append((manager, function_id))
            return True

        for name, value in (
            ("cudagraphify", cudagraphify),
            ("get_manager", lambda *args, **kwargs: self.manager),
            ("manager_of", lambda device_index: self.manager),
            ("forget", forget),
            ("policies_around", lambda manager, id: OrderedSet()),
        ):
            patch = mock.patch.object(deploy, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def deploy(self, model: Callable | None = None, **kwargs: Any) -> Callable:
        model = model or self.candidate("uncaptured", 100, 10)
        self.inputs = kwargs.pop("inputs", [torch.zeros(4)])
        self.deployed: list[Callable] = []
        self.fn = deploy.deploy(
            model,
            self.inputs,
            kwargs.pop("static_input_idxs", ()),
            self.deployed.append,
            **{
                "device_index": 0,
                "is_backward": False,
                "is_inference": True,
                "info": INFO,
                "objects": {},
                "stack_traces": None,
                **kwargs,
            },
        )
        return self.fn

    def call(self, times: int) -> list[str]:
        "As a program does: what was deployed last is called."
        self.ran.clear()
        for i in range(times):
            fn = self.deployed[-1] if self.deployed else self.fn
            (y,) = fn([torch.tensor(i)])
            self.assertEqual(y, torch.tensor(i + 1))
        return list(self.ran)
