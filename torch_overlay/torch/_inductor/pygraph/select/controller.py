"""
Which candidate a function is deployed as: uncaptured, or as a graph whose inputs are
bound or copied.

Candidates are timed in the program's own calls, each call run by one of them, so that
nothing runs twice, results are those of the program, and what surrounds the function
(a busy device, a cold cache) is in the measurement:

1. The first calls run uncaptured. The first of them compiles and tunes, two more do not
   count; the rest are timed.
2. Where the device is busy for ten times as long as the host needs to launch, there is
   little for a graph to save, and it is not recorded: it would cost memory.
3. Otherwise one call records, and the next ones are timed as replays.
4. The graph stays if it is faster by more than the noise. If not, or if a host that is
   still cold may have decided, both are timed anew, if there is memory for both, in the
   other order, since what else the machine did meanwhile would count against one of them.
   If it is not faster then, it is dropped, unless it is no slower and other graphs of its
   path stay: what lies in their memory is out of reach for uncaptured calls, which would
   take as much again.
5. A graph many of whose nodes are set in each call is recorded once more, to set them
   itself (prelude.py), and timed as that too.

What is timed is what is deployed, called from where it will be.

A decision is kept for the next process (store.py), which deploys it without step 2 and
the times of step 3. Where inputs cannot be bound any more, or more are copied than when it
was timed, it is made anew.

See Samples for what is timed and judge for how it decides.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import statistics
import threading
import time
import weakref
from typing import Any, NamedTuple, TYPE_CHECKING, TypeVar

import torch
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.compile_fx import get_input_idxs_to_check
from torch._inductor.cudagraph_trees import (
    CompilationMode,
    cudagraphify,
    CUDAGraphNode,
    CUDAGraphTreeManager,
    ExecutionState,
    get_manager,
    thread_containers,
)
from torch._inductor.pygraph.capture.collectives import has_collectives
from torch._inductor.pygraph.capture.shared import has_trees, InputHeld
from torch._inductor.pygraph.graph.driver import DriverError
from torch._inductor.pygraph.graph.memory import room
from torch._inductor.pygraph.graph.placeholder import MAX_ALIGNMENT
from torch._inductor.pygraph.replay.chain import ReplayChain
from torch._inductor.pygraph.report import (
    COPY,
    drop_reports,
    FunctionReport,
    new_report,
    NO_GRAPH,
    NODE_UPDATE,
    PRELUDE,
    publish,
    TABLE,
    UNDECIDED,
)
from torch._inductor.pygraph.select import store
from torch._inductor.pygraph.trees.state import state_of
from torch._inductor.pygraph.types.replay_state import Cell
from torch._inductor.utils import (
    align_inputs_from_check_idxs,
    remove_unaligned_input_idxs,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from torch._inductor.cudagraph_utils import FunctionID, ModelType, OutputType
    from torch._inductor.utils import InputType


T = TypeVar("T")

log = logging.getLogger(__name__)

get_curr_generation = CUDAGraphTreeManager.get_curr_generation

# Calls of each candidate that come first and do not count: the allocator and the clocks
# settle. Calls that are timed: as many, again and again until they are no faster than those
# before, and the median's error is a small enough part of it; fewer do where they take this
# long. Of these, how many there are to an event, if not a long time passes between two. And
# the calls after them that show the device's work.
WARMUP_SAMPLES = 2
SAMPLES = 12
MAX_SAMPLES = 96
# Code that a process has seldom run takes longer: the interpreter specializes it as it runs,
# and the processor has not seen it. As long as the last dozen of calls takes less than this
# part of the one before, what came before does not count.
WARMER = 0.95
PRECISION = 0.01
MIN_SAMPLES = 6
CALLS_PER_EVENT = 4
EVENT_AFTER_US = 1_000.0
ENOUGH_US = 50_000.0
DEVICE_SAMPLES = 3

# For as long the device waits before the latter: what their events take of the host, twice
# the function, and at most what can be queued. Clocks are no faster.
CYCLES_PER_US = 2000
MIN_DELAY_US = 50.0
MAX_DELAY_US = 10_000.0

# Calls that record do not count, up to so many: a function that is called with several sets
# of weights, or after several others, is recorded for each, but not for ever.
MAX_RECORDING_CALLS = 200

# For how many calls a graph that lost is kept, if its outputs are, and one that won is called
# before what else lies in the allocator's cache is given back.
RETIRE_CALLS = 4

# For how many calls one that neither won nor lost waits for what happens to those around it,
# and a backward for the next step.
MAX_WAITING_CALLS = 200

# Step 2 of the module's docstring.
DEVICE_BOUND = 10

# Step 5. Setting that many takes longer than the kernel in front of a graph that does so
# itself, by enough to find out, at the cost of one more recording (suite bindings).
PRELUDE_FROM_NODES = 32

# How many sizes of a function are kept that came once, and of all that were not recorded.
MAX_SEEN_ONCE = 256
MAX_UNRECORDED = 2048

# How often a function is recorded along one path, calls of it that wait for a backward.
MAX_TIMES_ON_PATH = 16

# A difference counts from here on, and beyond so many standard errors of it.
MARGIN = 0.98
CONFIDENCE = 2.0

# The most that the program can gain or lose by a function, in times of the function's own.
MAX_DIFFERENCE = 10

# Ways to bind external inputs by address. TABLE is only forced.
BINDINGS = (NODE_UPDATE, PRELUDE, TABLE)

CANDIDATES = (NO_GRAPH, COPY, *BINDINGS)

NOT_CAPTURABLE = "it can not be captured"


class Function:
    """
    What is known of one function that trees may record.

    Attributes:
        binds_inputs: external inputs are bound by address; cleared for good when a
            recording could not be bound or proven
        binding: how, one of BINDINGS
        id: trees' name for it, once recorded
        returned_output_idxs: outputs that the program gets; a forward's others are what its
            backward needs
        reused_input_idxs: inputs whose memory the code may use again
        needed_bytes: what a call takes of the device's memory, once it was rehearsed
        is_backward: the outputs that the program gets are gradients
        outputs_outlive: set for good when gradients were held beyond their step
        has_stepped: that was looked at, or need not be
        outdated: a cell for is_outdated, which replays read
        is_outdated: it was recorded before that
        recordings: how often its capture began
        is_capturable: cleared for good when a capture failed
        reselect: called when the graph that was selected cannot be bound any more, or copies
            more than it did when it was timed
        reselected_bytes: the most that it was called for
        is_even: its graph is as good as none, and waits for the decisions around it
        alignment: of the external inputs' addresses in bytes, the least seen
        static_inputs: storages of these when it was recorded, and their addresses, as long as
            they are there
        replaced: how often one of them was gone by a later recording
        moving_idxs: those that are external all the same, since the program goes on to replace
            them
        restored: where inputs lie that were let go, and are nobody's; see record.apart
    """

    def __init__(
        self,
        report: FunctionReport,
        returned_output_idxs: OrderedSet[int],
        *,
        reused_input_idxs: OrderedSet[int],
        is_backward: bool = False,
    ) -> None:
        self.report = report
        self.returned_output_idxs = returned_output_idxs
        self.reused_input_idxs = reused_input_idxs
        self.needed_bytes = 0
        self.is_backward = is_backward
        # A reduction of gradients on another stream may read what nobody holds any more.
        self.outputs_outlive = not is_backward or (
            torch.distributed.is_available() and torch.distributed.is_initialized()
        )
        self.has_stepped = self.outputs_outlive
        self.outdated = Cell(False)
        self.recordings = 0
        self.binds_inputs = True
        self.binding = NODE_UPDATE
        self.is_capturable = True
        self.reselect: Callable[[], None] | None = None
        self.reselected_bytes = 0
        self.is_even = False
        self.id: FunctionID | None = None
        self.alignment = MAX_ALIGNMENT
        self.static_inputs: dict[int, list[tuple[StorageWeakRef, int]]] = {}
        self.replaced = 0
        self.moving_idxs: OrderedSet[int] = OrderedSet()
        self.restored: OrderedSet[int] = OrderedSet()

    @property
    def is_outdated(self) -> bool:
        return self.outdated.value

    @is_outdated.setter
    def is_outdated(self, value: bool) -> None:
        self.outdated.value = value

    def node_type(self) -> type[CUDAGraphNode]:
        from torch._inductor.pygraph.capture import record

        return record.BoundGraphNode if self.binds_inputs else record.CopyGraphNode

    @property
    def owned_output_idxs(self) -> OrderedSet[int]:
        """
        Outputs that get memory of their own.

        Gradients that are gone when the next step begins need none. In the pool they lie
        where the activations were that the backward is done with; trees see to it that
        they are gone in every step.
        """
        return self.returned_output_idxs if self.outputs_outlive else OrderedSet()

    def may_run(self, manager: CUDAGraphTreeManager) -> bool:
        """
        Called before trees end a path, which takes its outputs away. False if the function
        has to run uncaptured this time.
        """
        from torch._inductor.pygraph.capture import record

        if not self.is_capturable:
            return False
        if self.is_outdated:
            if record.times_on_path(manager, self):
                if not manager.current_node.all_outputs_are_dead():
                    # The gradients that are held.
                    counters["pygraph"]["held_gradients"] += 1
                    return False
                # Trees end a path when another function runs. There may be none.
                manager.current_node = None
            record.drop(manager, self.id)
            self.is_outdated = False
        last = manager.current_node
        if last is not None and not last.all_outputs_are_dead():
            if manager.in_warmup:
                # Of a function that is not ours: what it left would be taken away with
                # what this one returns.
                counters["pygraph"]["held_activations"] += 1
                return False
            # What a backward may still need: trees would end the path all the same, or
            # go on along it for as long as no backward runs.
            may_end = manager.can_start_new_generation()
            if may_end:
                record.find_held_gradients(manager)
            times = record.times_on_path(manager, self)
            if times >= (1 if may_end else MAX_TIMES_ON_PATH):
                counters["pygraph"]["held_activations"] += 1
                return False
            if may_end:
                manager.update_generation()
        return True

    def abandoned(self, manager: CUDAGraphTreeManager) -> None:
        """
        Called when a recording failed, before its call runs uncaptured, or was interrupted.
        """
        from torch._inductor.pygraph.capture import record

        if manager.current_node is not None:
            # The allocator knows by now what the path left alive, and can not be told twice.
            manager.path_state = ExecutionState.RECORDING
        elif not any(manager.roots.values()):
            record.renew_pool(manager)

    def bind_as(self, choice: str) -> None:
        self.binds_inputs = choice in BINDINGS
        self.binding = choice if self.binds_inputs else NODE_UPDATE

    def bind_by_host(self, reason: str) -> None:
        """The graph cannot set its nodes itself: the host does so from now on."""
        log.info("%s: no %s: %s", self.report.name, self.binding, reason)
        counters["pygraph"]["bound_by_host"] += 1
        self.report.reason = f"no {self.binding}: {reason}"
        if self.reselect is not None:
            self.reselect()
        elif self.report.choice == self.binding:
            # It was forced.
            self.report.choice = NODE_UPDATE
        self.binding = NODE_UPDATE

    def note_static_inputs(self, inputs: dict[int, torch.Tensor]) -> None:
        """
        Called when it is about to be recorded.

        Layers that share their code have a recording each, and replays have nothing to do for
        their weights. Of a program that goes on to make new weights, that has no end: those
        before are gone, if not by the next recording, as where another layer is recorded
        between the two, or the last state is kept beside the present one.
        """
        gone = []
        for i, t in inputs.items():
            if i in self.moving_idxs:
                continue
            noted = self.static_inputs.get(i, [])
            there = [n for n in noted if not has_left(*n)]
            if len(there) < len(noted):
                gone.append(i)
            storage = t.untyped_storage()
            note = StorageWeakRef(storage), storage.data_ptr()
            self.static_inputs[i] = there if note in there else [*there, note]
        self.replaced += bool(gone)
        if gone and self.replaced > config.triton.cudagraph_unexpected_rerecord_limit:
            # What was recorded before is dropped, and this once more.
            self.moving_idxs |= gone
            self.is_outdated = True
            log.info(
                "%s: %d static inputs replaced, %d times: bound from now on",
                self.report.name,
                len(gone),
                self.replaced,
            )
            for i in gone:
                del self.static_inputs[i]

    def note_copied_bytes(self, nbytes: int) -> None:
        """
        Called when a graph of it is recorded, or runs, that copies so many bytes of inputs.

        A backward copies next to nothing behind a forward that is a graph. If the forward's
        loses after that, the backward copies all that was saved.
        """
        report = self.report
        if report.choice == UNDECIDED:
            report.stock_copied_bytes = nbytes
        elif report.choice == COPY and self.reselect is None:
            # It was forced.
            report.stock_copied_bytes = report.copied_bytes = nbytes
        elif (
            self.reselect is not None
            and nbytes > report.copied_bytes
            and nbytes > self.reselected_bytes
        ):
            # Once for each amount: a program may go back and forth.
            self.reselected_bytes = nbytes
            report.reason = f"it copies {nbytes} bytes, not {report.copied_bytes}"
            log.info("%s: %s", report.name, report.reason)
            self.reselect()

    def unbind(self, reason: str) -> None:
        was_bound, self.binds_inputs = self.binds_inputs, False
        self.report.reason = reason
        if (was_bound or not self.is_capturable) and self.reselect is not None:
            self.reselect()
        elif self.report.choice in (COPY, *BINDINGS):
            # It was not selected.
            self.report.choice = COPY if self.is_capturable else NO_GRAPH
            copied = self.report.stock_copied_bytes if self.is_capturable else 0
            self.report.copied_bytes = copied
        counters["pygraph"]["unbound"] += 1
        way = "inputs are copied" if self.is_capturable else "it is not captured"
        log.info("%s: %s: %s", self.report.name, way, reason)


def has_left(ref: StorageWeakRef, address: int) -> bool:
    """Whether a storage is gone, or has other memory."""
    storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
    return storage is None or storage.data_ptr() != address


# What backwards that are not recorded yet returned in one step, and its generation.
_gradients: dict[Function, tuple[int, list[StorageWeakRef]]] = {}


def begin_call(function: Function) -> None:
    """
    Looks for gradients that outlived their step: whatever is no backward begins the next
    one. Once a backward is recorded, trees look.
    """
    for backward in (function,) if function.is_backward else tuple(_gradients):
        # Autograd's threads, one for each device, may look at the same ones.
        noted = _gradients.get(backward)
        if noted is None:
            continue
        generation, refs = noted
        if function.is_backward and generation == get_curr_generation():
            # Several layers have its code.
            continue
        _gradients.pop(backward, None)
        backward.has_stepped = True
        if any(not ref.expired() for ref in refs):
            backward.outputs_outlive = True


def end_call(function: Function, outputs: OutputType) -> None:
    """Notes the gradients of a backward."""
    generation = get_curr_generation()
    noted, refs = _gradients.get(function, (generation, []))
    kept = [ref for ref in refs if noted == generation and not ref.expired()]
    kept += [
        StorageWeakRef(t.untyped_storage())
        for i in function.returned_output_idxs
        if isinstance(t := outputs[i], torch.Tensor)
    ]
    _gradients[function] = generation, kept


class Estimate(NamedTuple):
    """A median in microseconds, and its standard error."""

    us: float
    error: float = 0.0

    @classmethod
    def of(cls, samples: Sequence[float]) -> Estimate:
        median = statistics.median(samples)
        if len(samples) < 2:
            return cls(median, math.inf)
        # From quartiles, which outliers do not move; of normal samples.
        low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, 0.93 * (high - low) / math.sqrt(len(samples)))


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """
    Of one candidate:

    program: from the start of a call to the start of the next, on the clock, the host's or
        the device's, on which that takes longer. The host's, from which what timing and
        recording take is taken off, misses a device that falls behind, and the device's a
        host while the device catches up
    host: the function's time on the host
    device: the function's time on the device, launched ahead of it
    """

    program: Estimate
    host: Estimate
    device: Estimate

    @property
    def call(self) -> Estimate:
        "Of the function by itself: host and device work at the same time."
        return max(self.host, self.device)


class Start(NamedTuple):
    """
    Of a timed call: where the host's clock was, how much timing had taken of it until then,
    both in microseconds, and where the device was, of some calls.
    """

    us: float
    own_us: float
    event: torch.cuda.Event | None


class Samples:
    """
    Consecutive calls of one candidate.

    Two events around each call would tell how long it takes from an idle device, which
    adds the host's work in front of a graph, and the launch, to the device's; a program
    that does not wait overlaps them. So first come calls that are timed on the host, with
    an event now and then, and then a few whose device work is queued behind a delay, so that
    the device never waits for the host in them.

    What timing and recording take of the host, be it of other functions, is no part of the
    program, and is taken off.
    """

    # All that timing and recording took until now, of whichever function.
    own_us = 0.0

    def __init__(self, device_index: int, function: Function) -> None:
        self.device_index = device_index
        self.function = function
        self.calls = 0
        self.recording_calls = 0
        # Where the timed calls start, and the one after them. None follows one that recorded.
        self.starts: list[Start | None] = []
        self.host: list[float] = []
        self.timed_calls = 0
        self.total_us = 0.0
        self.host_is_timed = False
        self.device: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def call(
        self, fn: ModelType, entered: float, inputs: list[InputType]
    ) -> OutputType:
        """Times a call that Selection began at ``entered``, by _clock."""
        recordings, timed = self.function.recordings, len(self.host)
        own_us = Samples.own_us
        outputs, end = self._call(fn, inputs, entered)
        if (
            self.function.recordings != recordings
            and self.recording_calls < MAX_RECORDING_CALLS
            # Else another thread may have its cost at this moment.
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
        Samples.own_us += _clock() - end
        return outputs

    def _call(
        self, fn: ModelType, inputs: list[InputType], entered: float
    ) -> tuple[OutputType, float]:
        """The outputs, and when the host had them."""
        self.calls += 1
        if self.calls <= WARMUP_SAMPLES:
            return fn(inputs), _clock()
        if self.host_is_timed:
            return self._time_device(fn, inputs, entered)
        last = self.starts[-1] if self.starts else None
        is_marked = len(self.host) % CALLS_PER_EVENT == 0 or (
            last is not None and entered - last.us > EVENT_AFTER_US
        )
        start = self._start(entered, is_marked)
        outputs = fn(inputs)
        end = _clock()
        if last is not None:
            self.total_us += start.us - last.us
        self.starts.append(start)
        self.host.append(end - start.us)
        return outputs, end

    def _start(self, entered: float, is_marked: bool) -> Start:
        event = _now(torch.cuda.current_stream(self.device_index)) if is_marked else None
        now = _clock()
        Samples.own_us += now - entered
        return Start(now, Samples.own_us, event)

    def _time_device(
        self, fn: ModelType, inputs: list[InputType], entered: float
    ) -> tuple[OutputType, float]:
        if not self.device:
            self.starts.append(self._start(entered, True))
        stream = torch.cuda.current_stream(self.device_index)
        delay = min(MIN_DELAY_US + 2 * statistics.median(self.host), MAX_DELAY_US)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(delay * CYCLES_PER_US))
        start = _now(stream)
        outputs = fn(inputs)
        self.device.append((start, _now(stream)))
        return outputs, _clock()

    def _suffices(self) -> bool:
        count = len(self.host)
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
        return len(self.device) >= DEVICE_SAMPLES

    def cost(self) -> Cost:
        """Waits for the calls."""
        events = [start.event for start in self.starts if start and start.event]
        for event in (*events, *itertools.chain.from_iterable(self.device)):
            # The program may have called from several streams.
            event.synchronize()
        host = Estimate.of(self.host)
        device = Estimate.of([a.elapsed_time(b) * 1e3 for a, b in self.device])
        program = self._program()
        return Cost(max(host if program is None else program, device), host, device)

    def _program(self) -> Estimate | None:
        """From the start of a call to the start of the next, if there are two in a row."""
        on_host, timed, on_device = [], [], []
        # The last one with an event, and how many calls ago it was.
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
        # The device waits for the host, and for what timing takes of it.
        return Estimate.of(on_host)


def _clock() -> float:
    """In microseconds."""
    return time.perf_counter() * 1e6


def _now(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def noise(a: Estimate, b: Estimate) -> float:
    """What their difference has to exceed to be more than chance."""
    return CONFIDENCE * math.hypot(a.error, b.error)


def is_less(a: Estimate, b: Estimate) -> bool:
    return a.us < MARGIN * b.us and b.us - a.us > noise(a, b)


def takes_less(a: Cost, b: Cost) -> bool:
    """
    Whether a function takes less by itself. It takes as long as the host and as long as the
    device, so that the one that is known better may tell, be it the shorter one.
    """
    return is_less(a.call, b.host) or is_less(a.call, b.device)


def is_own_difference(a: Cost, b: Cost) -> bool:
    """Whether what the program differs by can be the function's doing."""
    most = max(cost.host.us + cost.device.us for cost in (a, b))
    return abs(a.program.us - b.program.us) <= MAX_DIFFERENCE * most


def judge(graph: Cost, uncaptured: Cost) -> tuple[bool, str]:
    """
    Whether the graph is to stay, and why.

    The program decides where it shows a difference, and the function by itself where it
    does not. Neighbours are timed in the same calls, and what they gain or lose is in the
    program's time too. So a graph that gains nothing by itself, on the host or on the
    device, is not carried by them, and a difference of many times the function's own time
    says nothing about it.
    """
    gains = is_less(graph.host, uncaptured.host) or is_less(
        graph.device, uncaptured.device
    )
    is_own = is_own_difference(graph, uncaptured)
    from_call_to_call = (
        f"{graph.program.us:.1f} us from call to call, "
        f"{uncaptured.program.us:.1f} without it"
    )
    if is_own and gains and is_less(graph.program, uncaptured.program):
        return True, f"measured faster: {from_call_to_call}"
    if is_own and is_less(uncaptured.program, graph.program):
        return False, f"measured slower: {from_call_to_call}"
    if is_less(uncaptured.host, graph.host):
        # What it gains on the device may be lost on the host, which the program needs too.
        if is_less(graph.device, uncaptured.device):
            return False, "measured faster on the device, and slower on the host"
        return False, "measured slower, by itself"
    if takes_less(graph, uncaptured):
        return True, "measured faster, by itself"
    if takes_less(uncaptured, graph):
        return False, "measured slower, by itself"
    gain = uncaptured.call.us - graph.call.us
    if gain > (1 - MARGIN) * uncaptured.call.us:
        within = noise(graph.call, uncaptured.call)
        return False, f"not measured faster: {gain:.1f} us are within {within:.1f} of noise"
    return False, "not measured faster"


def depends_on_host(graph: Cost, uncaptured: Cost) -> bool:
    """Whether the graph loses on the device what it gains from call to call, or more."""
    gain = uncaptured.program.us - graph.program.us
    return gain < graph.device.us - uncaptured.device.us


def costs_nothing(graph: Cost, uncaptured: Cost) -> bool:
    """
    Whether a graph that did not win takes no longer, beyond the noise: neither the function
    by itself, nor the host, nor the program.
    """
    # Within the noise, chance would decide; but much of it is no excuse for a loss.
    most = min(noise(graph.call, uncaptured.call), (1 - MARGIN) * uncaptured.call.us)
    return graph.call.us - uncaptured.call.us <= most and not (
        is_less(uncaptured.host, graph.host)
        or (
            is_own_difference(graph, uncaptured)
            and is_less(uncaptured.program, graph.program)
        )
    )


def is_better_graph(a: Cost, b: Cost) -> bool:
    """
    Of two that were recorded. Neither is the safe choice, as no graph is: what is less by
    itself wins, by however little, unless the program says otherwise.
    """
    gain = b.call.us - a.call.us
    return gain > noise(a.call, b.call) and not is_less(b.program, a.program)


class Selection:
    """
    Runs a function through the steps of the module's docstring.

    ``deploy`` is called with what shall be called from then on, ``forget`` drops what was
    recorded under an id, ``around`` returns the other functions of its paths, ``entry`` is
    where the decision is kept, if it is, and ``remembered`` a graph that it was decided on
    before. ``forget`` and ``around`` return nothing while another thread records.
    """

    def __init__(
        self,
        function: Function,
        uncaptured: ModelType,
        record: Callable[[list[InputType]], tuple[ModelType | None, OutputType]],
        deploy: Callable[[ModelType], None],
        forget: Callable[[FunctionID | None], bool | None],
        around: Callable[[FunctionID | None], OrderedSet[Function] | None],
        device_index: int,
        is_forced: bool,
        entry: store.Entry | None = None,
        remembered: store.Decision | None = None,
    ) -> None:
        self.function = function
        self.entry = entry
        self.remembered = remembered
        self.forget = forget
        self.around = around
        self.uncaptured = uncaptured
        self.record = record
        self.deploy = deploy
        self.owner = thread_containers()
        self.device_index = device_index
        self.is_forced = is_forced
        self.replay: ModelType | None = None
        self.is_deployed = False
        # Calls that were to record, before it was known whether gradients outlive a step.
        self.waits = 0
        # What lost, until it is dropped.
        self.losers: list[FunctionID | None] = []
        # When the last call began, by _clock. What is done from then on, until a candidate is
        # called, is no part of the program: it ends with the decision.
        self.entered = 0.0
        self.calls = 0
        # What runs the next calls, one each. Autograd's threads may call at the same time.
        self.steps = self._steps()
        self.lock = threading.Lock()

    def __call__(self, inputs: list[InputType]) -> OutputType:
        self.entered = _clock()
        self.calls += 1
        if (
            thread_containers() is not self.owner
            or torch.cuda.is_current_stream_capturing()
        ):
            return self.uncaptured(inputs)
        begin_call(self.function)
        outputs = (self._next_step() or self._chosen())(inputs)
        if self.function.is_backward and self.replay is None:
            end_call(self.function, outputs)
        return outputs

    def _next_step(self) -> ModelType | None:
        if not self.lock.acquire(blocking=False):
            # Another thread's call is at it, or the one that a finalizer called this from.
            return self.uncaptured
        try:
            return next(self.steps, None)
        except BaseException:
            # The program may catch it and go on, as after an interrupt.
            self.steps = self._resumed()
            raise
        finally:
            self.lock.release()

    def _chosen(self) -> ModelType:
        if self.replay is None or self.function.report.choice == NO_GRAPH:
            return self.uncaptured
        return self.replay

    def _steps(self) -> Iterator[ModelType]:
        # It compiles and tunes.
        yield self.uncaptured
        # What is not selected is tried until it is recorded: the program may free memory, or
        # another thread end, and it is called again.
        if self.is_forced:
            while not self.is_deployed:
                yield functools.partial(self._record, then=self._deploy_forced)
            return
        if self.remembered is None:
            yield from self._select()
            return
        if self.remembered.choice == NO_GRAPH:
            self._decide(NO_GRAPH, self.remembered.reason)
        while self.function.report.choice == UNDECIDED:
            yield functools.partial(self._record, then=self._decide_as_remembered)
        yield from self._stay()

    def _resumed(self) -> Iterator[ModelType]:
        """The steps that are left after one of them raised."""
        self.function.is_even = False
        if self.is_forced:
            return self._steps()
        is_decided = self.function.report.choice != UNDECIDED
        return self._finish() if is_decided else self._select()

    def _deploy_forced(self) -> None:
        if not self.is_deployed:
            self.is_deployed = True
            self.deploy(self._chosen())
            publish(self.function.report)

    def _decide_as_remembered(self) -> None:
        if self.remembered is None:
            raise AssertionError("nothing is remembered")
        if self.function.report.choice != UNDECIDED:
            return
        if not self.function.is_capturable:
            self._decide(NO_GRAPH, NOT_CAPTURABLE)
        elif self._graph_choice() == self.remembered.choice:
            self._decide(self.remembered.choice, self.remembered.reason)
        else:
            self._reselect()

    def _select(self) -> Iterator[ModelType]:
        # Of a decision before this one.
        self._drop_losers()
        yield from self._compare()
        yield from self._finish()

    def _finish(self) -> Iterator[ModelType]:
        """From the decision on: drops what lost, and deploys what stays."""
        # Before a call, which takes its own memory. What the last one returned may only die
        # when the program gets others, if at all.
        for _ in range(RETIRE_CALLS):
            self._drop_losers()
            if not self.losers:
                break
            yield self._chosen()
        yield from self._stay()

    def _drop_losers(self) -> None:
        self.losers = [id for id in self.losers if not self.forget(id)]

    def _compare(self) -> Iterator[ModelType]:
        """Until it is decided, and ``losers`` have what that leaves unused."""
        uncaptured = yield from self._time(NO_GRAPH)
        host, device = uncaptured.host.us, uncaptured.device.us
        if device > DEVICE_BOUND * host:
            self._decide(
                NO_GRAPH, f"launching takes {host:.0f} us of the device's {device:.0f}"
            )
            self._keep()
            if self.replay is not None:
                # It was recorded before it is decided anew.
                self.losers.append(self.function.id)
            return
        yield self._record
        while self.replay is None:
            # It raised, or another thread was recording.
            yield self._record
        if not self.function.is_capturable:
            # Not kept: that may be for what else the process does, or has no memory for.
            self._decide(NO_GRAPH, NOT_CAPTURABLE)
            # Others were captured before it.
            self.losers.append(self.function.id)
            return
        graph = yield from self._time()
        stays, reason = judge(graph, uncaptured)
        is_doubtful = not stays or depends_on_host(graph, uncaptured)
        if is_doubtful and self._can_run_uncaptured():
            graph = yield from self._time()
            uncaptured = yield from self._time(NO_GRAPH)
            stays, reason = judge(graph, uncaptured)
        if not stays and costs_nothing(graph, uncaptured):
            stays = yield from self._joins()
            reason += "; its memory is that of other graphs" if stays else ""
        if not stays:
            self.losers.append(self.function.id)
        elif self._sets_many_nodes():
            yield from self._try_prelude(graph)
        self._decide(self._graph_choice() if stays else NO_GRAPH, reason)
        self._keep()

    def _time(self, choice: str | None = None) -> Generator[ModelType, None, Cost]:
        "Of the graph, if no choice is given, which may begin to copy its inputs meanwhile."
        samples = Samples(self.device_index, self.function)
        while not samples.complete:
            run = self.uncaptured if choice == NO_GRAPH else self.replay
            yield functools.partial(samples.call, run, self.entered)
        cost = samples.cost()
        timings = self.function.report.timings_us
        timings[choice or self._graph_choice()] = cost.call.us
        return cost

    def _joins(self) -> Generator[ModelType, None, bool]:
        """Whether other functions of its paths are graphs, once that is decided."""
        function = self.function
        function.is_even = True
        others: OrderedSet[Function] | None = None
        for _ in range(MAX_WAITING_CALLS):
            # First, since others may have become graphs while it was timed without one.
            yield self._chosen()
            others = self.around(function.id)
            if others is not None and all(
                other.is_even or other.report.choice != UNDECIDED for other in others
            ):
                break
        function.is_even = False
        return self._graph_choice() != COPY and any(
            other.report.choice in (COPY, *BINDINGS) for other in others or ()
        )

    def _can_run_uncaptured(self) -> bool:
        """Whether there is memory for it beside the graph's."""
        needed = self.function.needed_bytes
        return not needed or room(self.device_index) >= needed

    def _sets_many_nodes(self) -> bool:
        entry = self.function.report
        return (
            self._graph_choice() == NODE_UPDATE
            and entry.updated_nodes >= PRELUDE_FROM_NODES
            # Another forward would be one more backward to record and to time.
            and entry.mode == "inference"
        )

    def _try_prelude(self, by_host: Cost) -> Iterator[ModelType]:
        """
        Records the graph once more, to set its nodes itself, and leaves the better of the two.
        The other one has lost.
        """
        function, report = self.function, self.function.report
        replay, id, recordings = self.replay, function.id, function.recordings
        updated_nodes = report.updated_nodes
        function.binding, self.replay = PRELUDE, None
        yield self._record
        samples = Samples(self.device_index, function)
        while (
            self.replay is not None
            and self._graph_choice() == PRELUDE
            and not samples.complete
        ):
            yield functools.partial(samples.call, self.replay, self.entered)
        if samples.complete and self._graph_choice() == PRELUDE:
            cost = samples.cost()
            report.timings_us[PRELUDE] = cost.call.us
            if (
                function.recordings > recordings
                and function.is_capturable
                and is_better_graph(cost, by_host)
            ):
                self.losers.append(id)
                return
        if function.id != id:
            # Else another thread had the lock, and nothing was recorded.
            self.losers.append(function.id)
            function.id = id
        self.replay = replay
        function.bind_as(NODE_UPDATE)
        function.is_capturable = True
        report.updated_nodes = updated_nodes

    def _record(
        self, inputs: list[InputType], then: Callable[[], None] | None = None
    ) -> OutputType:
        """``then`` is called once it is recorded."""
        if self.replay is not None:
            # It could not be bound, and this call records it with copies.
            outputs = self.replay(inputs)
        elif not self.function.has_stepped and self.waits < MAX_WAITING_CALLS:
            # Of several layers in the first step.
            self.waits += 1
            outputs = self.uncaptured(inputs)
        else:
            # cuBLAS's workspaces of the uncaptured calls; the graph has its own.
            torch._C._cuda_clearCublasWorkspaces()
            replay, outputs = self.record(inputs)
            if replay is not None:
                # Else another thread was recording, which may be done by now.
                self.replay = replay
            Samples.own_us += _clock() - self.entered
        if then is not None and self.replay is not None:
            # Of two threads one does.
            with self.lock:
                then()
        return outputs

    def _graph_choice(self) -> str:
        return self.function.binding if self.function.binds_inputs else COPY

    def _decide(self, choice: str, reason: str) -> None:
        decide(self.function, choice, reason)
        if choice != NO_GRAPH:
            # Weakly: trees keep the function, this keeps the replay, and the replay keeps
            # trees, so that graphs would outlive the code that calls them.
            method = weakref.WeakMethod(self._reselect)

            def reselect() -> None:
                if (bound := method()) is not None:
                    bound()

            self.function.reselect = reselect

    def _keep(self) -> None:
        if self.entry is not None:
            report = self.function.report
            decision = store.Decision(report.choice, report.reason, report.timings_us)
            self.entry.save(decision)

    def _stay(self) -> Iterator[ModelType]:
        if self.function.report.choice != NO_GRAPH:
            # What the call that recorded returned, gradients for instance, may be alive until
            # a later one has begun.
            for _ in range(RETIRE_CALLS):
                yield self._chosen()
        self.is_deployed = True
        self.deploy(self._chosen())
        # What tuning had, what was dropped, and uncaptured calls if it is a graph, is not
        # needed again.
        if self.replay is not None:
            # A workspace of cuBLAS's keeps the whole segment that it lies in. Where nothing
            # was recorded none was dropped before: a graph of the program's own may use it.
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def _reselect(self) -> None:
        """
        The graph that was decided on copies its inputs now, or more of them: whether that is
        still faster than no graph was not measured.
        """
        counters["pygraph"]["reselected"] += 1
        report = self.function.report
        report.choice, report.remembered, report.timings_us = UNDECIDED, False, {}
        self.function.reselect = None
        self.is_deployed = False
        self.steps = self._select()
        self.deploy(self)

    def retire(self) -> None:
        """Called once it is decided that a graph is not to be replayed any more."""
        self.function.reselect = None
        self.is_deployed = False
        self.losers.append(self.function.id)
        self.steps = self._finish()
        self.deploy(self)

    def shorten(self, replay: ModelType) -> None:
        """Called with a shorter way to replay the same recordings, once there is one."""
        self.replay = replay
        if self.is_deployed:
            self.deploy(replay)


def drop_seen_once(fns: dict[Any, ModelType]) -> None:
    """
    Called before another one is added to what is deployed of a function, by its sizes. Those
    that came once go when there are too many: their number may have no end. So do, of those
    that several layers came with in a step of the program, those that came the longest ago.
    """
    if len(fns) < MAX_SEEN_ONCE:
        return
    unrecorded = {
        sizes: fn
        # Another thread may add some.
        for sizes, fn in [*fns.items()]
        if isinstance(fn, Selection) and fn.function.recordings == 0
    }
    dropped = [sizes for sizes, fn in unrecorded.items() if fn.calls == 1]
    if len(dropped) < MAX_SEEN_ONCE:
        if len(unrecorded) < MAX_UNRECORDED:
            return
        # Half of them: to look for them takes longer than to keep them.
        by_age = sorted(unrecorded, key=lambda sizes: unrecorded[sizes].entered)
        dropped = by_age[: len(by_age) // 2]
    for sizes in dropped:
        fns.pop(sizes, None)
    drop_reports([unrecorded[sizes].function.report for sizes in dropped])


def manager_of(device_index: int) -> CUDAGraphTreeManager:
    """
    The calling thread's. Before there is one, the device's generator gets the 16 bytes that
    replays read its state from. The manager's first capture would take them from the stream
    of graphs, which has nothing else outside of the pool, and needed a segment for them.
    """
    manager = get_manager(device_index, create_if_none_exists=False)
    if manager is None:
        with torch.cuda.device(device_index):
            # They last as long as a graph has them: until the return, this one.
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(torch.cuda.default_generators[device_index])
            manager = get_manager(device_index)
    return manager


def decide(function: Function, choice: str, reason: str) -> None:
    entry = function.report
    entry.choice = choice
    entry.reason = f"{entry.reason}; {reason}" if entry.reason else reason
    entry.copied_bytes = entry.stock_copied_bytes if choice == COPY else 0
    counters["pygraph"][choice] += 1
    log.info("%s (%s): %s, %s", entry.name, entry.mode, choice, reason)
    publish(entry)


def deploy(
    model: ModelType,
    inputs: list[InputType],
    static_input_idxs: Sequence[int],
    replace: Callable[[ModelType], None],
    *,
    device_index: int,
    is_backward: bool,
    is_inference: bool,
    returned_output_idxs: OrderedSet[int],
    reused_input_idxs: OrderedSet[int],
    mutated_input_idxs: tuple[int, ...] = (),
    force: str | None = None,
    code_hash: str | None = None,
    source: str = "",
    **kwargs: Any,
) -> ModelType:
    """
    What cudagraph_trees.cudagraphify_impl calls for inputs of one set of sizes.

    Args:
        replace: called with a cheaper equivalent of what this returns, once there is one
        returned_output_idxs: see cudagraph_utils.get_returned_output_idxs
        reused_input_idxs: see cudagraph_utils.PyGraphOptions
        force: one of CANDIDATES, to skip the selection; config.pygraph_force
        code_hash: of the code that the function belongs to, if its decision is kept
        source: where it is in the program
        kwargs: further arguments of cudagraph_trees.cudagraphify

    Raises:
        ValueError: there is no candidate ``force``.
    """
    mode = (
        CompilationMode.BACKWARD
        if is_backward
        else CompilationMode.INFERENCE
        if is_inference
        else CompilationMode.FORWARD
    )
    if force is not None and force not in CANDIDATES:
        raise ValueError(
            f"config.pygraph_force is {force!r}: use one of {', '.join(CANDIDATES)}"
        )
    name = getattr(model, "__name__", "graph")
    entry = new_report(
        name,
        mode.name.lower(),
        source=source,
        compile_id=str(kwargs.get("compile_id") or ""),
        sizes=[v for v in inputs if isinstance(v, int)],
    )
    function = Function(
        entry,
        returned_output_idxs,
        reused_input_idxs=reused_input_idxs,
        is_backward=is_backward,
    )
    to_check = get_input_idxs_to_check(inputs, static_input_idxs)
    aligned_static_idxs = remove_unaligned_input_idxs(inputs, static_input_idxs)

    def realigned(fn: ModelType) -> ModelType:
        # A bound or uncaptured input is written in place, so a clone is copied back.
        return align_inputs_from_check_idxs(
            fn, to_check, OrderedSet(mutated_input_idxs)
        )

    uncaptured = model
    owner = thread_containers()
    if not has_trees():
        decide(function, NO_GRAPH, "trees do not know this thread")
        run = realigned(uncaptured)

        def run_or_deploy(inputs: list[InputType]) -> OutputType:
            if not has_trees():
                return run(inputs)
            # One of a pool was the first that called it, or an operator of what was recorded.
            drop_reports([entry])
            fn = deploy(
                model,
                inputs,
                static_input_idxs,
                replace,
                device_index=device_index,
                is_backward=is_backward,
                is_inference=is_inference,
                returned_output_idxs=returned_output_idxs,
                reused_input_idxs=reused_input_idxs,
                mutated_input_idxs=mutated_input_idxs,
                force=force,
                code_hash=code_hash,
                source=source,
                **kwargs,
            )
            replace(fn)
            return fn(inputs)

        return run_or_deploy
    if is_backward:

        def run_backward(inputs: list[InputType]) -> OutputType:
            # See [Backward Generation Handling]. Other threads have another manager or none.
            manager = None
            if thread_containers() is owner:
                manager = get_manager(device_index, create_if_none_exists=False)
            if manager is not None:
                manager.set_to_running_backward()
                state = state_of(manager)
                if not torch.cuda.is_current_stream_capturing() and state.acquire():
                    # The next launch waits for it: it may read activations of the pool.
                    try:
                        state.follow()
                    finally:
                        state.release()
            return model(inputs)

        uncaptured = run_backward
    uncaptured = realigned(uncaptured)

    reason = "forced"
    if force is None and has_collectives(model):
        force, reason = NODE_UPDATE, "ranks would not time its collectives alike"
    if force == NO_GRAPH:
        decide(function, NO_GRAPH, "forced")
        return uncaptured

    from torch._inductor.pygraph.capture.record import apart, forget, functions_around

    def record(inputs: list[InputType]) -> tuple[ModelType | None, OutputType]:
        manager = manager_of(device_index)
        state = state_of(manager)
        if not state.acquire():
            return None, uncaptured(inputs)
        try:
            state.follow()
            fn, outputs = cudagraphify(
                model,
                inputs,
                aligned_static_idxs,
                device_index=device_index,
                is_backward=is_backward,
                is_inference=is_inference,
                mutated_input_idxs=mutated_input_idxs,
                pygraph=function,
                **kwargs,
            )
        finally:
            state.release()
        replays = ReplayChain(function, manager, state, mode, owner)

        def replay_or_not(inputs: list[InputType]) -> OutputType:
            # A graph is updated and launched by the thread that recorded it, and by
            # autograd's on its behalf. One that the program itself captures right now
            # must not depend on the pool's memory. And torch._dynamo.reset drops graphs,
            # of which a backward may still be to come.
            if (
                thread_containers() is not owner
                or manager.roots is None
                or torch.cuda.is_current_stream_capturing()
                or not state.acquire()
            ):
                return uncaptured(inputs)
            try:
                state.follow()
                outputs = fn(inputs)
                if (first := replays.add(replay)) is not None:
                    selection.shorten(first)
                return outputs
            except InputHeld:
                counters["pygraph"]["held_activations"] += 1
            except DriverError as e:
                # Nothing was launched.
                if function.binding == PRELUDE and entry.choice == UNDECIDED:
                    # It is tried, against one that the host sets.
                    function.bind_by_host(str(e))
                else:
                    decide(function, NO_GRAPH, f"a replay failed: {e}")
                    selection.retire()
            finally:
                state.release()
            return apart(uncaptured(inputs), function)

        # Around both ways: the clone of a misaligned input that is mutated is copied back.
        replay = realigned(replay_or_not)
        return replays.add(replay) or replay, outputs

    if force is not None:
        function.bind_as(force)
        decide(function, force, reason)

    def locked(
        fn: Callable[[CUDAGraphTreeManager, FunctionID | None], T],
    ) -> Callable[[FunctionID | None], T | None]:
        """``fn`` of the thread's trees. It returns None while another thread records."""

        def of_id(id: FunctionID | None) -> T | None:
            manager = get_manager(device_index)
            state = state_of(manager)
            if not state.acquire():
                return None
            try:
                return fn(manager, id)
            finally:
                state.release()

        return of_id

    kept = remembered = None
    if code_hash is not None and force is None:
        kept = store.entry_for(
            code_hash, name, entry.mode, inputs, aligned_static_idxs, device_index
        )
    if kept is not None and (remembered := kept.load(CANDIDATES)) is not None:
        counters["pygraph"]["remembered"] += 1
        entry.remembered = True
        entry.timings_us = remembered.timings_us
        if remembered.choice != NO_GRAPH:
            function.bind_as(remembered.choice)

    selection = Selection(
        function,
        uncaptured,
        realigned(record),
        replace,
        locked(forget),
        locked(functions_around),
        device_index,
        is_forced=force is not None,
        entry=kept,
        remembered=remembered,
    )
    return selection
