"""
Times of candidates, taken in the program's own calls, and which of two is better. Each call is run by one candidate,
and everything around the function (a busy device, a cold cache) is part of the measurement.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch._inductor.pygraph.types.reason import Code, Reason


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._inductor.cudagraph_utils import ModelType, OutputType
    from torch._inductor.pygraph.types.function import FunctionState
    from torch._inductor.utils import InputType

# Calls of each candidate that come first and do not count: the allocator and the clocks settle.
WARMUP_SAMPLES = 2

# Calls that are timed on the host. Further SAMPLES follow while they are faster than those
# before and while the median's error exceeds PRECISION of it, up to MAX_SAMPLES.
SAMPLES = 12
MAX_SAMPLES = 96
PRECISION = 0.01

# Code that the process has seldom run takes longer. Earlier calls do not count while the median of the last SAMPLES is
# below this part of the median of those before.
WARMER = 0.95

# MIN_SAMPLES are enough if they take this long.
MIN_SAMPLES = 6
ENOUGH_US = 50_000.0

# One of so many timed calls has an event, and each call that comes that long after the last.
CALLS_PER_EVENT = 4
EVENT_AFTER_US = 1_000.0

# Calls after the timed ones that show the device's time. Further ones follow while the median's error exceeds
# DEVICE_PRECISION of it: the first call at some sizes may load kernels of a library.
DEVICE_SAMPLES = 3
MAX_DEVICE_SAMPLES = 12
DEVICE_PRECISION = 0.2

# The device waits before one of these calls for the host's time of the events plus twice the function's, and at most
# for what the driver can queue. Clocks are no faster.
CYCLES_PER_US = 2000
MIN_DELAY_US = 50.0
MAX_DELAY_US = 10_000.0

# What an event takes the host, if generated code notes each call.
EVENT_US = 10.0

# Empty kernels are timed in front of the calls.
EMPTY_CALLS = 4

# The least time of a node in a graph, about what an H100 takes.
MIN_NODE_US = 1.2

# A difference counts if one time is below this part of the other, and beyond so many standard errors.
MARGIN = 0.98
CONFIDENCE = 2.0

# The program can gain or lose by a function at most so many times the function's own time.
MAX_DIFFERENCE = 10

# A graph that is as fast as the uncaptured function stays if it takes less of the host, by this part of a call. The program
# gains in calls in which the device waits for the host. An estimate.
SPARED = 0.25

# At most so many calls that record do not count: a function may be recorded for each of several sets of weights.
MAX_RECORDING_CALLS = 200


class Estimate(NamedTuple):
    """A median in microseconds and its standard error."""

    us: float
    error: float = 0.0

    @classmethod
    def of(cls, samples: Sequence[float]) -> Estimate:
        median = statistics.median(samples)
        if len(samples) < 2:
            return cls(median, math.inf)
        # The standard error of a median of normal samples, from quartiles, which outliers do not move.
        low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, 0.93 * (high - low) / math.sqrt(len(samples)))


def noise(a: Estimate, b: Estimate) -> float:
    """Return what the difference has to exceed to be more than chance."""
    return CONFIDENCE * math.hypot(a.error, b.error)


def is_less(a: Estimate, b: Estimate) -> bool:
    return a.us < MARGIN * b.us and b.us - a.us > noise(a, b)


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """
    What a call of one candidate takes.

    Attributes:
        program: from the start of a call to the start of the next, on the host's or the device's clock, whichever shows
            more. The host clock misses a growing device queue; the device clock misses host time while it drains
        host, device: of the function, on the device with the launch queued ahead
    """

    program: Estimate
    host: Estimate
    device: Estimate

    @property
    def call(self) -> Estimate:
        """The function by itself: host and device work at the same time."""
        return max(self.host, self.device)


class Start(NamedTuple):
    """The start of a timed call on the host's clock, and on the device in some calls."""

    us: float
    # What timing had taken until then.
    own_us: float
    event: torch.cuda.Event | None


class Samples:
    """
    Consecutive calls of one candidate: 2 * SAMPLES on the host and DEVICE_SAMPLES on the device if ``is_fixed``, else as
    many as it takes.

    Two events around each call would add the host's work to the device's. So the first calls are timed on the host,
    with an event now and then. The last few are queued behind a delay, so that the device never waits for the host.
    """

    # Microseconds that timing and recording of any function took until now, which are no part of the program.
    own_us = 0.0

    def __init__(self, device_index: int, state: FunctionState, *, is_fixed: bool = False) -> None:
        self.device_index = device_index
        self.state = state
        self.is_fixed = is_fixed
        self.calls = 0
        self.recording_calls = 0
        # The starts of the timed calls, and of the one after them. None stands for a call that recorded.
        self.starts: list[Start | None] = []
        self.host: list[float] = []
        self.timed_calls = 0
        self.total_us = 0.0
        self.host_is_timed = False
        self.device: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def call(self, fn: ModelType, entered: float, inputs: list[InputType]) -> OutputType:
        """Run and time a call that began at ``entered`` on ``clock_us``."""
        recorded, timed, own_us = self._recorded(), len(self.host), Samples.own_us
        outputs, end = self._call(fn, inputs, entered)
        if (
            self._recorded() != recorded
            and self.recording_calls < MAX_RECORDING_CALLS
            # Another thread may compute the cost once it is complete.
            and not self.complete
        ):
            self.recording_calls += 1
            Samples.own_us = own_us + end - entered
            del self.host[timed:]
            self.starts.append(None)
            self.device.clear()
            self.host_is_timed = False
        elif len(self.host) > timed:
            self.timed_calls += 1
            self.host_is_timed = self._suffices()
        Samples.own_us += clock_us() - end
        return outputs

    def _recorded(self) -> int:
        """Return how many calls recorded, or prepared a recording's replays at further sizes."""
        return self.state.recordings + self.state.prepared_sizes

    def _call(self, fn: ModelType, inputs: list[InputType], entered: float) -> tuple[OutputType, float]:
        """Return the outputs, and when the host had them."""
        self.calls += 1
        if self.calls <= WARMUP_SAMPLES:
            return fn(inputs), clock_us()
        if self.host_is_timed:
            return self._time_device(fn, inputs, entered)
        last = self.starts[-1] if self.starts else None
        is_marked = len(self.host) % CALLS_PER_EVENT == 0 or (last is not None and entered - last.us > EVENT_AFTER_US)
        start = self._start(entered, is_marked)
        outputs = fn(inputs)
        end = clock_us()
        if last is not None:
            self.total_us += start.us - last.us
        self.starts.append(start)
        self.host.append(end - start.us)
        return outputs, end

    def _start(self, entered: float, is_marked: bool) -> Start:
        event = _now(torch.cuda.current_stream(self.device_index)) if is_marked else None
        now = clock_us()
        Samples.own_us += now - entered
        return Start(now, Samples.own_us, event)

    def _time_device(self, fn: ModelType, inputs: list[InputType], entered: float) -> tuple[OutputType, float]:
        if not self.device:
            self.starts.append(self._start(entered, True))
        stream = torch.cuda.current_stream(self.device_index)
        delay = min(MIN_DELAY_US + 2 * statistics.median(self.host), MAX_DELAY_US)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(delay * CYCLES_PER_US))
        start = _now(stream)
        outputs = fn(inputs)
        self.device.append((start, _now(stream)))
        return outputs, clock_us()

    def _suffices(self) -> bool:
        count = len(self.host)
        if self.is_fixed:
            return count == 2 * SAMPLES
        if self.total_us + self.host[-1] > ENOUGH_US and count >= MIN_SAMPLES:
            return True
        if count % SAMPLES:
            return False
        if self.timed_calls >= MAX_SAMPLES:
            return True
        if count == SAMPLES:
            return False
        before, last = self.host[-2 * SAMPLES : -SAMPLES], self.host[-SAMPLES:]
        if statistics.median(last) < WARMER * statistics.median(before):
            del self.host[:-SAMPLES], self.starts[:-SAMPLES]
            return False
        median, error = Estimate.of(self.host)
        return error <= PRECISION * median

    @property
    def complete(self) -> bool:
        count = len(self.device)
        if count < DEVICE_SAMPLES or count >= MAX_DEVICE_SAMPLES or self.is_fixed:
            return count >= DEVICE_SAMPLES
        median, error = self._device()
        return error <= DEVICE_PRECISION * median

    def cost(self) -> Cost:
        """Wait for the device and return what a call takes."""
        for event in [start.event for start in self.starts if start and start.event]:
            # The program may have called on several streams.
            event.synchronize()
        host, device = Estimate.of(self.host), self._device()
        program = self._program()
        return Cost(max(host if program is None else program, device), host, device)

    def _device(self) -> Estimate:
        """Wait for the device and return what the function takes on it."""
        for event in itertools.chain.from_iterable(self.device):
            event.synchronize()
        return Estimate.of([a.elapsed_time(b) * 1e3 for a, b in self.device])

    def _program(self) -> Estimate | None:
        """Return the time from call to call, or None if no two calls follow each other."""
        on_host, timed, on_device = [], [], []
        # The last start with an event, and how many calls ago it was.
        marked: Start | None = None
        calls = 0
        for a, b in itertools.pairwise(self.starts):
            if a is None or b is None:
                marked = None
                continue
            on_host.append(b.us - b.own_us - a.us + a.own_us)
            if a.event is not None:
                marked, calls = a, 0
            calls += 1
            if marked is not None and b.event is not None:
                timed.append((b.us - marked.us) / calls)
                on_device.append(marked.event.elapsed_time(b.event) * 1e3 / calls)
        if not on_host:
            return None
        if timed and is_less(Estimate.of(timed), device := Estimate.of(on_device)):
            return device
        # The device waits for the host, and so for what timing takes of the host.
        return Estimate.of(on_host)


class CallTimes:
    """
    Times on the device of the calls of one uncaptured run, which generated code notes.

    The device waits until the host has launched them. Empty kernels show what a launch takes between two events: that
    is no part of a call in a graph.
    """

    # An attribute of NOTE; see types/calls.py.
    reuses = True

    def __init__(self, device_index: int) -> None:
        self.device_index = device_index
        self.empty: list[torch.cuda.Event] = []
        self.events: list[tuple[int, torch.cuda.Event]] = []

    def begin(self, host_us: float, num_calls: int) -> None:
        """``host_us``: what the run takes the host without these events, or MAX_DELAY_US if that is not known."""
        stream = torch.cuda.current_stream(self.device_index)
        delay = min(MIN_DELAY_US + 2 * host_us + EVENT_US * num_calls, MAX_DELAY_US)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(delay * CYCLES_PER_US))
            self.empty = [_now(stream)]
            for _ in range(EMPTY_CALLS):
                torch.cuda._sleep(0)
                self.empty.append(_now(stream))

    def __call__(self, number: int, *values: Any) -> None:
        self.events.append((number, _now(torch.cuda.current_stream(self.device_index))))

    def us(self) -> dict[int, float]:
        """Wait for the device and return the time that each call takes in a graph, by its number."""
        events = [*self.empty, *(event for _, event in self.events)]
        for event in events:
            event.synchronize()
        times = [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events)]
        empty_us = min(times[:EMPTY_CALLS])
        numbers = (number for number, _ in self.events)
        return {number: max(us - empty_us, 0.0) + MIN_NODE_US for number, us in zip(numbers, times[EMPTY_CALLS:])}


def clock_us() -> float:
    return time.perf_counter() * 1e6


def _now(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def takes_less(a: Cost, b: Cost) -> bool:
    """Return whether the function takes less time by itself."""
    # A call takes at least the host's and at least the device's time. The one that is known better may tell.
    return is_less(a.call, b.host) or is_less(a.call, b.device)


def is_own_difference(a: Cost, b: Cost) -> bool:
    """Return whether the function can be the cause of the program's difference."""
    most = max(cost.host.us + cost.device.us for cost in (a, b))
    return abs(a.program.us - b.program.us) <= MAX_DIFFERENCE * most


def judge(graph: Cost, uncaptured: Cost) -> tuple[bool, Reason]:
    """
    Return whether the graph is to stay, and why.

    The program's time decides where it shows a difference, the function's own time where it does not. The program's
    time includes what neighbouring functions gain or lose in the same calls. So a graph that gains nothing by itself
    does not stay, and a difference of many times the function's own time says nothing. If neither time shows a difference,
    a graph stays that takes SPARED of a call less of the host.
    """
    gains = is_less(graph.host, uncaptured.host) or is_less(graph.device, uncaptured.device)
    is_own = is_own_difference(graph, uncaptured)
    from_call_to_call = {"graph_us": graph.program.us, "uncaptured_us": uncaptured.program.us}
    if is_own and gains and is_less(graph.program, uncaptured.program):
        return True, Reason.of(Code.FASTER, **from_call_to_call)
    if is_own and is_less(uncaptured.program, graph.program):
        return False, Reason.of(Code.SLOWER, **from_call_to_call)
    if is_less(uncaptured.host, graph.host):
        # The program needs the host, too.
        is_mixed = is_less(graph.device, uncaptured.device)
        return False, Reason.of(Code.SLOWER_ON_HOST if is_mixed else Code.SLOWER_BY_ITSELF)
    if takes_less(graph, uncaptured):
        return True, Reason.of(Code.FASTER_BY_ITSELF)
    if takes_less(uncaptured, graph):
        return False, Reason.of(Code.SLOWER_BY_ITSELF)
    gain = uncaptured.call.us - graph.call.us
    spared = uncaptured.host.us - graph.host.us
    if gain >= 0 and spared > SPARED * uncaptured.call.us and costs_nothing(graph, uncaptured):
        return True, Reason.of(Code.SPARES_HOST, spared_us=spared)
    if gain > (1 - MARGIN) * uncaptured.call.us:
        within = noise(graph.call, uncaptured.call)
        return False, Reason.of(Code.WITHIN_NOISE, gain_us=gain, noise_us=within)
    return False, Reason.of(Code.NOT_FASTER)


def improves(graph: Cost, other: Cost) -> bool:
    """
    Return whether a graph takes less time than another graph of the same function.

    The longer of host and device time decides, unless the program shows a difference that these times can have caused:
    a graph with branches takes the host longer to launch, and a program may wait for the host or for each result.
    """
    host, device = graph.host.us - other.host.us, graph.device.us - other.device.us
    program = graph.program.us - other.program.us
    if is_less(other.program, graph.program) and program <= 2 * max(host, device):
        return False
    # The program does not show the gain on the device. It may wait for the host, or its times vary more than the gain. In
    # both cases a graph that takes more of the host does not improve on the other.
    is_hidden = program > host + device / 2
    if is_hidden and host > (1 - MARGIN) / 2 * other.program.us and is_less(other.host, graph.host):
        return False
    if is_less(graph.program, other.program) and is_less(graph.device, other.device) and program >= 2 * device:
        return True
    return takes_less(graph, other)


def depends_on_host(graph: Cost, uncaptured: Cost) -> bool:
    """Return whether the graph loses as much device time as the program gains: the host was still warming up."""
    gain = uncaptured.program.us - graph.program.us
    return gain < graph.device.us - uncaptured.device.us


def costs_nothing(graph: Cost, uncaptured: Cost) -> bool:
    """Return whether a graph that did not win costs no time of the function, the host or the program."""
    # A difference within the noise is chance, but much noise must not hide a loss.
    most = min(noise(graph.call, uncaptured.call), (1 - MARGIN) * uncaptured.call.us)
    return (
        graph.call.us - uncaptured.call.us <= most
        and not is_less(uncaptured.host, graph.host)
        and not (is_own_difference(graph, uncaptured) and is_less(uncaptured.program, graph.program))
    )
