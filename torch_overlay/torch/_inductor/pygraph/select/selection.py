"""
Which candidate a function is deployed as. A function goes through these steps, one call each or several:

1. The first calls run uncaptured. One compiles and tunes, two more do not count, the rest are timed.
2. If the device is busy for ten times as long as the host needs to launch, the function is not recorded: a graph
   saves little and costs memory.
3. Otherwise one call records, and the next calls are timed as replays.
4. The graph stays if it is faster by more than the noise. Otherwise, if there is memory for both, both are timed again,
   in the other order, or the graph alone where both together take much more memory. A graph that is no slower stays if
   a neighbour on its path is a graph: running this function uncaptured would allocate a second copy of its memory.
5. If calls of a graph that stays may run side by side, and the program could gain by that, up to four further candidates
   are recorded and timed, the narrowest first. Selection tries no further one if the last was slower on the device than
   the best before it, or if a function would be recorded again more than MAX_RECORDED_AGAIN times. It tries a third one
   only if the second was faster.

The next process gets the decision from store.py and times nothing.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import threading
import weakref
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor.cudagraph_trees import CUDAGraphTreeManager, thread_containers
from torch._inductor.pygraph.graph.memory import room
from torch._inductor.pygraph.select import store, timing
from torch._inductor.pygraph.types import journal
from torch._inductor.pygraph.types.candidate import (
    BINDINGS,
    Candidate,
    CHAIN,
    COPY,
    NO_GRAPH,
    NODE_UPDATE,
    PRELUDE,
    UNDECIDED,
)
from torch._inductor.pygraph.types.function import Evidence
from torch._inductor.pygraph.types.reason import Code, Reason
from torch.multiprocessing.reductions import StorageWeakRef


if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from torch._inductor.cudagraph_utils import FunctionID, ModelType, OutputType
    from torch._inductor.pygraph.select.controller import Controller
    from torch._inductor.utils import InputType
    from torch.utils._ordered_set import OrderedSet


# For how many calls a graph that lost is kept while its outputs are alive, and how often a graph that won is called
# before the rest of the allocator's cache is freed.
RETIRE_CALLS = 4

# For how many calls an even graph waits for the decisions on its neighbours, and a backward for the next step.
MAX_WAITING_CALLS = 200

# Step 2 of the module's docstring.
DEVICE_BOUND = 10

# What an uncaptured function may take beside its graph, to be timed again: a part of what is reserved, or bytes.
PART_BESIDE, MIN_BESIDE_BYTES = 0.1, 32 << 20

# A schedule is recorded in one of so many calls. A recording drops those behind it on its path. So functions of a path, which
# are called equally often, record again in the same calls. As many calls record and time a function whose calls take long, as
# those of a training step do.
ROUND_CALLS = 1 + timing.WARMUP_SAMPLES + timing.MIN_SAMPLES + timing.DEVICE_SAMPLES

# How often each function may be recorded again for a schedule. A program may run a layer a different number of times in each
# step. The layer's backward then has a recording for each place behind each number, and takes long to be recorded again. An
# estimate.
MAX_RECORDED_AGAIN = 8

get_curr_generation = CUDAGraphTreeManager.get_curr_generation

# What backwards that are not recorded yet returned in one step, and the step's generation. Gradients that are gone
# when the next step begins may lie in the graphs' pool. Once a backward is recorded, trees see whether they are.
_gradients: dict[Controller, tuple[int, list[StorageWeakRef]]] = {}


def begin_call(controller: Controller) -> None:
    """Look for gradients that outlived their step. A function that is no backward begins the next step."""
    is_backward = controller.spec.is_backward
    for backward in (controller,) if is_backward else tuple(_gradients):
        # Autograd's threads, one for each device, may look at the same entry.
        noted = _gradients.get(backward)
        # Several layers may have the code of this backward.
        if noted is None or (is_backward and noted[0] == get_curr_generation()):
            continue
        _gradients.pop(backward, None)
        backward.stepped(outputs_outlive=any(not ref.expired() for ref in noted[1]))


def end_call(controller: Controller, outputs: OutputType) -> None:
    """Take note of the gradients that a backward returned."""
    generation = get_curr_generation()
    noted, refs = _gradients.get(controller, (generation, []))
    kept = [ref for ref in refs if noted == generation and not ref.expired()]
    kept += [
        StorageWeakRef(t.untyped_storage())
        for i in controller.spec.returned_output_idxs
        if isinstance(t := outputs[i], torch.Tensor)
    ]
    _gradients[controller] = generation, kept


class TimedAgain(enum.IntEnum):
    """What is timed a second time. Ranks agree on the least."""

    # The memory of both does not fit. A graph that seems to lose is dropped.
    NOTHING = 0
    # The uncaptured function would take much memory beside the graph.
    GRAPH = 1
    BOTH = 2


@dataclasses.dataclass(eq=False)
class Selection:
    """
    Runs a function through the steps of the module's docstring.

    Args:
        record: records the function in a call; returns what replays it, None while another thread records, and outputs
        deploy: called with what is to be called from then on
        forget: drops what was recorded under an id; returns False while it cannot, None while another thread records
        around: returns the controllers of the functions around an id on its paths
        time_calls: runs the function uncaptured and times its calls; None if they stay in a row
        max_recorded_again: returns how many recordings one function loses at most if those of an id are dropped; None while
            another thread records
        pool_bytes: returns what the graphs' pool reserves
    """

    controller: Controller
    uncaptured: ModelType
    record: Callable[[list[InputType]], tuple[ModelType | None, OutputType]]
    deploy: Callable[[ModelType], None]
    forget: Callable[[FunctionID | None], bool | None]
    around: Callable[[FunctionID | None], OrderedSet[Any] | None]
    _: dataclasses.KW_ONLY
    is_forced: bool
    entry: store.Entry | None = None
    remembered: store.Decision | None = None
    time_calls: Callable[..., OutputType] | None = None
    max_recorded_again: Callable[[FunctionID | None], int | None] = lambda id: 0
    pool_bytes: Callable[[], int] = lambda: 0

    # Whether each candidate is timed for the same number of calls in every process.
    has_fixed_samples = False

    def __post_init__(self) -> None:
        self.state, self.report = self.controller.state, self.controller.report
        self.device_index = self.controller.spec.device_index
        self.owner = thread_containers()
        self.replay: ModelType | None = None
        self.is_deployed = False
        # Calls that were to record before it was known whether gradients outlive a step.
        self.waits = 0
        # How many microseconds the call that recorded took.
        self.record_us = 0.0
        # Recordings that lost, until they are dropped.
        self.losers: list[FunctionID | None] = []
        # When the last call began, by clock_us. The time until a candidate is called is no part of the program.
        self.entered = 0.0
        self.calls = 0
        # What runs the next calls, one each. Autograd's threads may call at the same time.
        self.steps = self._steps()
        self.lock = threading.Lock()

    def __call__(self, inputs: list[InputType]) -> OutputType:
        self.entered = timing.clock_us()
        self.calls += 1
        if thread_containers() is not self.owner or torch.cuda.is_current_stream_capturing():
            return self.uncaptured(inputs)
        begin_call(self.controller)
        outputs = (self._next_step() or self._chosen())(inputs)
        if self.controller.spec.is_backward and self.replay is None:
            end_call(self.controller, outputs)
        return outputs

    def _next_step(self) -> ModelType | None:
        if not self.lock.acquire(blocking=False):
            # The call of another thread takes a step, or the call from which a finalizer called this one.
            return self.uncaptured
        try:
            return next(self.steps, None)
        except BaseException:
            # The program may catch an interrupt and go on.
            self.steps = self._resumed()
            raise
        finally:
            self.lock.release()

    def _chosen(self) -> ModelType:
        return self.uncaptured if self.report.choice == NO_GRAPH else self.replay or self.uncaptured

    def _steps(self) -> Iterator[ModelType]:
        # Compiles and tunes.
        yield self.uncaptured
        # A forced or remembered graph is tried until it is recorded: the program may free memory.
        if self.is_forced:
            yield from self._time_calls(timing.MAX_DELAY_US)
            while not self.is_deployed:
                yield functools.partial(self._record, then=self._deploy_forced)
            return
        if (remembered := self.remembered) is None:
            yield from self._select()
            return
        if remembered.choice == NO_GRAPH:
            self._decide(NO_GRAPH, *remembered.reasons)
        yield from self._time_calls(timing.MAX_DELAY_US)
        then = functools.partial(self._decide_as, remembered)
        while self.report.choice == UNDECIDED:
            yield functools.partial(self._record, then=then)
        yield from self._stay()

    def _resumed(self) -> Iterator[ModelType]:
        """Return the steps that are left after one of them raised."""
        self.controller.waits(False)
        if self.is_forced:
            return self._steps()
        return self._select() if self.report.choice == UNDECIDED else self._finish()

    def _deploy_forced(self) -> None:
        if not self.is_deployed:
            self.is_deployed = True
            self.deploy(self._chosen())
            journal.publish(self.report)

    def _decide_as(self, remembered: store.Decision) -> None:
        if self.report.choice != UNDECIDED:
            return
        if not self.state.is_capturable:
            self._decide(NO_GRAPH, Reason.of(Code.NOT_CAPTURABLE))
        elif self.state.binding == Candidate.parse(remembered.choice).binding:
            self._decide(self.controller.candidate, *remembered.reasons)
        else:
            self._reselect()

    def _select(self) -> Iterator[ModelType]:
        # Of an earlier decision.
        self._drop_losers()
        yield from self._compare()
        yield from self._finish()

    def _finish(self) -> Iterator[ModelType]:
        """Drop what lost, and deploy what stays."""
        # What the last call returned may die only when the program gets the next outputs.
        for _ in range(RETIRE_CALLS):
            self._drop_losers()
            if not self.losers:
                break
            yield self._chosen()
        yield from self._stay()

    def _drop_losers(self) -> None:
        self.losers = [id for id in self.losers if not self.forget(id)]

    def _compare(self) -> Iterator[ModelType]:
        """Decide, and put recordings that the decision leaves unused into ``losers``."""
        uncaptured = yield from self._time(NO_GRAPH)
        host, device = uncaptured.host.us, uncaptured.device.us
        if device > DEVICE_BOUND * host:
            self._decide(NO_GRAPH, Reason.of(Code.DEVICE_BOUND, host_us=host, device_us=device))
            self._keep()
            if self.replay is not None:
                # It was recorded before it was decided anew.
                self.losers.append(self.state.id)
            return
        yield from self._time_calls(host)
        yield from self._recorded()
        if not self._is_captured():
            # The decision is not kept: the cause may be something else in this process.
            self._decide(NO_GRAPH, Reason.of(Code.NOT_CAPTURABLE))
            # It may have been recorded with other inputs before.
            self.losers.append(self.state.id)
            return
        graph = yield from self._time()
        stays, *reasons = timing.judge(graph, uncaptured)
        is_doubtful = not stays or timing.depends_on_host(graph, uncaptured)
        if is_doubtful and (again := self._timed_again()):
            graph = yield from self._time()
            if again is TimedAgain.BOTH:
                uncaptured = yield from self._time(NO_GRAPH)
            stays, *reasons = timing.judge(graph, uncaptured)
        if not stays and timing.costs_nothing(graph, uncaptured):
            stays = yield from self._joins()
            if stays:
                reasons.append(Reason.of(Code.JOINS_NEIGHBOURS))
        if not stays:
            self.losers.append(self.state.id)
        elif self.time_calls is not None:
            yield from self._schedule(graph)
        self._decide(self.controller.candidate if stays else NO_GRAPH, *reasons)
        self._keep()

    def _time_calls(self, host_us: float) -> Iterator[ModelType]:
        """Time each call of the function, which decides on schedules."""
        if self.time_calls is not None:
            yield self._untimed(functools.partial(self.time_calls, host_us=host_us))

    def _untimed(self, run: ModelType) -> ModelType:
        """Return ``run`` for a call that is no part of the program's time."""

        def call(inputs: list[InputType]) -> OutputType:
            outputs = run(inputs)
            timing.Samples.own_us += timing.clock_us() - self.entered
            return outputs

        return call

    def _schedule(self, chain: timing.Cost) -> Iterator[ModelType]:
        """Record and time candidates whose calls run side by side. Keep the fastest."""
        controller = self.controller
        best, cost = controller.candidate, chain
        candidates = controller.schedules(chain.program.us)
        if candidates:
            controller.reserved(best, self.pool_bytes())
        for i, candidate in enumerate(candidates):
            found = yield from self._time_as(candidate)
            if found is None or timing.is_less(cost.device, found.device):
                # Calls side by side contend for the device. With more of them it would take longer still.
                break
            is_faster = timing.is_less(found.device, cost.device)
            if timing.improves(found, chain) and (cost is chain or found.call.us < cost.call.us):
                best, cost = candidate, found
            if i and not is_faster:
                # In measurements the third one was hardly ever faster then.
                break
        binding, schedule = Candidate.parse(best)
        if binding == PRELUDE and schedule != CHAIN and cost.device.us > cost.host.us:
            # The prelude spares the host and takes time of the device.
            candidate = str(Candidate(NODE_UPDATE, schedule))
            found = yield from self._time_as(candidate)
            if found is not None and timing.improves(found, cost):
                best = candidate
        for _ in range(RETIRE_CALLS):
            if controller.candidate == best or not controller.binds_inputs:
                break
            yield from self._next_round()
            yield from self._recorded_as(best)

    def _next_round(self) -> Iterator[ModelType]:
        """Go on until a call in which other functions record again, too."""
        while self.calls % ROUND_CALLS:
            yield self._chosen()

    def _time_as(self, candidate: str) -> Generator[ModelType, None, timing.Cost | None]:
        """Record and time the graph as a candidate. Return None if it cannot be recorded so, or too often."""
        yield from self._next_round()
        if (self.max_recorded_again(self.state.id) or 0) > MAX_RECORDED_AGAIN:
            return None
        yield from self._recorded_as(candidate)
        if self.controller.candidate != candidate:
            return None
        self.controller.reserved(candidate, self.pool_bytes())
        return (yield from self._time())

    def _recorded_as(self, candidate: str) -> Iterator[ModelType]:
        recorded = self.controller.candidate
        if candidate != recorded:
            self.controller.record_as(candidate)
            yield self._untimed(self._chosen())
            self.controller.keep(recorded)

    def _recorded(self) -> Iterator[ModelType]:
        yield self._record
        # The recording raised, or another thread was recording.
        while self.replay is None:
            yield self._record
        # Recordings may be refused for lack of evidence. One with more tells whether there is a graph.
        evidence = Evidence.ONE_RUN
        while self.state.evidence != evidence:
            evidence = self.state.evidence
            yield self._untimed(self._record)

    def _is_captured(self) -> bool:
        return self.state.is_capturable

    def _timed_again(self) -> TimedAgain:
        """
        Return what selection times again if the first times are close. That depends on the memory: while the uncaptured
        function runs, the graph keeps its own.
        """
        needed = self.state.needed_bytes
        if not needed:
            return TimedAgain.BOTH
        if room(self.device_index) < needed:
            return TimedAgain.NOTHING
        reserved = torch.cuda.memory_reserved(self.device_index)
        fits_easily = needed <= max(MIN_BESIDE_BYTES, PART_BESIDE * reserved)
        return TimedAgain.BOTH if fits_easily else TimedAgain.GRAPH

    def _time(self, choice: str | None = None) -> Generator[ModelType, None, timing.Cost]:
        """Time a candidate: the graph if no choice is given. It may be unbound meanwhile."""
        samples = timing.Samples(self.device_index, self.state, is_fixed=self.has_fixed_samples)
        while not samples.complete:
            run = self.uncaptured if choice == NO_GRAPH else self.replay
            yield functools.partial(samples.call, run, self.entered)
        cost = samples.cost()
        self.controller.timed(choice or self.controller.candidate, cost.call.us)
        return cost

    def _joins(self) -> Generator[ModelType, None, bool]:
        """Return whether a neighbour on its paths is a graph, once that is decided."""
        self.controller.waits(True)
        others: OrderedSet[Controller] | None = None
        for _ in range(MAX_WAITING_CALLS):
            # First a call: neighbours may have become graphs while this one was timed uncaptured.
            yield self._chosen()
            others = self.around(self.state.id)
            if others is not None and all(other.state.is_even or other.report.choice != UNDECIDED for other in others):
                break
        self.controller.waits(False)
        return self.state.binding != COPY and any(other.report.choice in (COPY, *BINDINGS) for other in others or ())

    def _record(self, inputs: list[InputType], then: Callable[[], None] | None = None) -> OutputType:
        """Record in a call, and call ``then`` once it is recorded."""
        if self.replay is not None:
            # It could not be bound, and this call records it with copies.
            outputs = self.replay(inputs)
        elif not self.state.has_stepped and self.waits < MAX_WAITING_CALLS:
            # Several layers have this code, and the first step is not over.
            self.waits += 1
            outputs = self.uncaptured(inputs)
        else:
            # cuBLAS's workspaces of the uncaptured calls. The graph has its own.
            torch._C._cuda_clearCublasWorkspaces()
            replay, outputs = self.record(inputs)
            self.record_us = timing.clock_us() - self.entered
            if replay is not None:
                self.replay = replay
            timing.Samples.own_us += self.record_us
        if then is not None and self.replay is not None:
            # Two threads may come here.
            with self.lock:
                then()
        return outputs

    def _decide(self, choice: str, *reasons: Reason) -> None:
        self.controller.decide(choice, *reasons)
        if choice != NO_GRAPH:
            # A weak reference: trees keep the controller, this object keeps the replay, and the replay keeps trees.
            # Graphs would outlive the code that calls them.
            method = weakref.WeakMethod(self._reselect)
            self.controller.reselect = lambda: (method() or (lambda: None))()

    def _keep(self) -> None:
        if self.entry is not None:
            self.entry.save(store.Decision(self.report.candidate, self.report.reasons, self.report.timings_us))

    def _stay(self) -> Iterator[ModelType]:
        if self.report.choice != NO_GRAPH:
            # Outputs of the call that recorded, such as gradients, may be alive until a later call has begun.
            for _ in range(RETIRE_CALLS):
                yield self._chosen()
        self.is_deployed = True
        self.deploy(self._chosen())
        # The memory of tuning, of what was dropped, and of a graph's uncaptured calls is not needed again.
        if self.replay is not None:
            # A workspace of cuBLAS keeps the whole segment that it lies in. If nothing was recorded, none was dropped
            # before: a graph of the program's own may use it.
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def _reselect(self) -> None:
        """Measure again: the graph copies its inputs now, or more of them."""
        self.controller.undecide()
        self._go_on(self._select())

    def retire(self) -> None:
        """Stop replaying the graph, once NO_GRAPH is decided."""
        self.controller.reselect = None
        self.losers.append(self.state.id)
        self._go_on(self._finish())

    def _go_on(self, steps: Iterator[ModelType]) -> None:
        self.is_deployed = False
        self.steps = steps
        self.deploy(self)

    def shorten(self, replay: ModelType) -> None:
        """Deploy a shorter way to replay the same recordings."""
        self.replay = replay
        if self.is_deployed:
            self.deploy(replay)
