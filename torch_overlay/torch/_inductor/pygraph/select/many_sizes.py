"""
A function that is recorded for many sizes together: its calls of all sizes but the first few (by_size.py) are one
function for selection. Where the function cannot be recorded so, each set of sizes is a function of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import operator
import weakref
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor.cudagraph_trees import thread_containers
from torch._inductor.pygraph.capture.at_sizes import not_for_many_sizes, SizedModel
from torch._inductor.pygraph.capture.library import Memo
from torch._inductor.pygraph.capture.sized import SizedRecording
from torch._inductor.pygraph.graph.driver import DriverError
from torch._inductor.pygraph.graph.memory import lack_of_memory, without_growth
from torch._inductor.pygraph.replay.interpreter import make_replay
from torch._inductor.pygraph.replay.plan import sized_plan
from torch._inductor.pygraph.select import timing
from torch._inductor.pygraph.select.preparation import Preparation
from torch._inductor.pygraph.select.proofs import Proofs
from torch._inductor.pygraph.trees.manager import manager_of, state_of
from torch._inductor.pygraph.types import journal
from torch._inductor.pygraph.types.candidate import NO_GRAPH, NODE_UPDATE, UNDECIDED
from torch._inductor.pygraph.types.function import RecordingFacts
from torch._inductor.pygraph.types.reason import Code, first_line, Reason, RefusedError
from torch._inductor.pygraph.types.report import FunctionReport
from torch._inductor.pygraph.verify.rehearsal import Rehearsal
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager
    from torch._inductor.cudagraph_utils import FunctionID, ModelType, OutputType
    from torch._inductor.pygraph.capture.sized import KeptSizes
    from torch._inductor.pygraph.select.by_size import Sizes
    from torch._inductor.pygraph.types.function import FunctionSpec
    from torch._inductor.utils import InputType
    from torch.cuda import _POOL_HANDLE


log = logging.getLogger(__name__)

# Of one function: one for each bucket and topology. The least recently used one is dropped.
MAX_RECORDINGS = 16
# How many are made at most, and at how many sizes that is tried in vain.
MAX_CAPTURES = 32
# A function cannot be recorded so at some sizes, because of what a library launches at these.
OF_SOME_SIZES = (
    Code.CAPTURE_FAILED,
    Code.DRIVER,
    Code.HIDDEN_ALIGNMENT,
    Code.NODES_NOT_IN_ROW,
    Code.OPERANDS_AT_SIZES,
    Code.OUT_OF_MEMORY,
    Code.UNKNOWN_NODE,
)

# At how many sizes a call is replayed without a look at the recordings.
MAX_KNOWN_SIZES = 1024


class SizedMemory:
    """What the recordings of a manager share: the memo, and the memory of what they compute."""

    def __init__(self, manager: CUDAGraphTreeManager) -> None:
        self.memo = Memo(manager)
        self.functions: weakref.WeakSet[ManySizes] = weakref.WeakSet()
        self.recordings: weakref.WeakSet[SizedRecording] = weakref.WeakSet()
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def pool(self) -> _POOL_HANDLE:
        if not self.recordings:
            # What earlier ones took can be freed.
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def renew(self) -> None:
        """
        Drop all recordings before one for larger sizes is made: no larger block fits in the memory of the others. Each
        function records again in its next call.
        """
        for function in self.functions:
            function.renew()
        # The allocator keeps the memory of dropped graphs, which nothing else uses.
        torch.cuda.empty_cache()


_memories: weakref.WeakKeyDictionary[CUDAGraphTreeManager, SizedMemory] = weakref.WeakKeyDictionary()


def memory_of(manager: CUDAGraphTreeManager) -> SizedMemory:
    """Return what recordings of a manager share. Called with the manager's lock held."""
    memory = _memories.get(manager)
    if memory is None:
        memory = _memories[manager] = SizedMemory(manager)
    return memory


# Why functions cannot be recorded for many sizes, of those for which it was tried.
_reasons: weakref.WeakKeyDictionary[ModelType, Reason] = weakref.WeakKeyDictionary()


def why_not(model: ModelType) -> str:
    return f"{why.text} ({why.code.name})" if (why := _reasons.get(model)) is not None else ""


def log_reason(spec: FunctionSpec, reason: Reason) -> None:
    report = FunctionReport(spec.info.name, spec.mode, source=spec.info.report.source)
    log.info("%s", report.line("a recording for each size", reason))


def may_record(deployment: Any, inputs: Sequence[InputType]) -> bool:
    """Return whether a function may be recorded for many sizes together. Log once if the function is the reason."""
    spec, model = deployment.spec, deployment.model
    # Without config.pygraph_sizes nothing is known of the sizes.
    if spec.info.sizes is None or deployment.force not in (None, NODE_UPDATE):
        return False
    # A recording for many sizes would capture others, too.
    if torch._inductor.config.triton.cudagraph_capture_sizes is not None:
        return False
    if model not in _reasons and (reason := not_for_many_sizes(spec, inputs)) is not None:
        _reasons[model] = reason
        log_reason(spec, reason)
    return model not in _reasons


def start(deployment: Any, fns: Sizes) -> ModelType:
    """Start selection for all sizes together that have no recording or decision. Return what their calls run."""
    deployment.replace, deployment.sizes = functools.partial(fns.__setitem__, None), []
    first = deployment.start((), ManySizes(deployment, fns))
    fns.share(first)
    return first


@dataclasses.dataclass(eq=False)
class ManySizes:
    """Records a function for many sizes, and replays it, in the place of its Deployment. ``fns`` is what is deployed."""

    deployment: Any
    fns: Sizes

    def __post_init__(self) -> None:
        self.spec, self.model = self.deployment.spec, self.deployment.model
        self.manager = manager_of(self.spec.device_index)
        self.state = state_of(self.manager)
        self.sized: SizedModel | None = None
        # All for the sizes up to ``top``, the most recently used one last.
        self.recordings: list[SizedRecording] = []
        self.top: tuple[int, ...] = ()
        # How many were dropped for a function that needed larger ones.
        self.renewals = 0
        # By sizes: the Replay, the numbers of the sizes, and the Row that sets the nodes. A call passes the last two on.
        self.known: dict[Any, tuple[Any, tuple[int, ...], Any]] = {}
        self.sizes_of = operator.itemgetter(*(size.input for size in self.spec.info.sizes.sizes))
        self.sizes_seen: OrderedSet[tuple[int, ...]] = OrderedSet()
        # Sizes at which the function runs uncaptured.
        self.refused: OrderedSet[tuple[int, ...]] = OrderedSet()
        self.preparation = Preparation()
        # In this call.
        self.may_have_run = False
        self.proofs = Proofs(self.spec, self.model)

    @property
    def report(self) -> FunctionReport:
        return self.deployment.controller.report

    # What selection calls

    def record(self, inputs: list[InputType]) -> tuple[ModelType | None, OutputType]:
        """Record the function in a call. Return what replays it, or None if it cannot be, and the outputs."""
        if not self.state.acquire():
            return None, self.deployment.uncaptured(inputs)
        try:
            self._begin()
            outputs = self._record(inputs)
        finally:
            self.state.release()
        if outputs is None:
            return None, self.deployment.uncaptured(inputs)
        return (self.deployment.realigned(self.replay()) if self.recordings else None), outputs

    def forget(self, function_id: FunctionID | None) -> bool:
        self._drop(self.recordings)
        return True

    def renew(self) -> None:
        self.renewals += len(self.recordings)
        self._drop(self.recordings)

    def around(self, function_id: FunctionID | None) -> OrderedSet[Any]:
        """No recording shares its memory with neighbours on a path."""
        return OrderedSet()

    def max_recorded_again(self, function_id: FunctionID | None) -> int:
        return len(self.recordings)

    # Calls

    def replay(self) -> ModelType:
        """Return what replays the recordings."""
        report, known, sizes_of, manager = self.report, self.known, self.sizes_of, self.manager

        def replay(inputs: list[InputType]) -> OutputType:
            report.calls += 1
            found = known.get(sizes_of(inputs))
            # torch._dynamo.reset drops graphs.
            if found is None or manager.roots is None:
                return self.general(inputs)
            run, numbers, row = found
            report.captured_calls += 1
            return run(inputs, numbers, row)

        return replay

    def not_replayed(self, inputs: list[InputType], numbers: tuple[int, ...], row: Any) -> OutputType:
        """Take the general path in a call that was counted as a replay."""
        self.report.captured_calls -= 1
        return self.general(inputs, is_new=False)

    def general(self, inputs: list[InputType], *, is_new: bool = True) -> OutputType:
        """``is_new``: whether a replay at these sizes was not tried yet."""
        uncaptured = self.deployment.uncaptured
        if (
            thread_containers() is not self.deployment.owner
            or self.manager.roots is None
            or torch.cuda.is_current_stream_capturing()
            or (is_new and not self.preparation.is_due(self._sizes(inputs), self.report))
            or not self.state.acquire()
        ):
            return uncaptured(inputs)
        outputs: OutputType | None = None
        found: tuple[Any, tuple[int, ...], Any] | None = None
        self.may_have_run = False
        start = timing.clock_us()
        try:
            self._begin()
            found = self._trusted(inputs) if is_new else None
            # The first sizes are proven as a recording is, which later ones are not.
            is_usual = is_new and self.proofs.has_proven_first
            outputs = self._replay(inputs) if found is None else None
            if is_usual:
                call_us = 0.0 if found is not None else self.report.timings_us.get(NO_GRAPH, 0.0)
                self.preparation.note(timing.clock_us() - start - call_us)
        except Exception as e:
            if self.may_have_run:
                raise
            self._give_up(_reason(e))
        finally:
            self.state.release()
        if found is not None:
            run, numbers, row = found
            self.report.captured_calls += 1
            return run(inputs, numbers, row)
        return uncaptured(inputs) if outputs is None else outputs

    def _trusted(self, inputs: list[InputType]) -> tuple[Any, tuple[int, ...], Any] | None:
        """Return what replays these sizes without a proof, if a recording does."""
        sizes = self._sizes(inputs)
        if not self.proofs.has_proven_first or sizes in self.refused:
            return None
        for recording in reversed(self.recordings):
            try:
                kept = recording.at_sizes(sizes)
            except RefusedError:
                # The general path notes the refusal.
                return None
            if kept is not None:
                if not self.proofs.is_trusted(recording, kept):
                    return None
                self.deployment.controller.prepared_size()
                self._used(recording)
                return self._know(recording, kept, self.sizes_of(inputs))
        return None

    def _run_call(self, inputs: list[InputType]) -> OutputType:
        self.may_have_run = True
        return self.model(inputs)

    def _begin(self) -> None:
        self.state.follow()
        if self.spec.is_backward:
            # Of a forward that trees recorded.
            self.manager.set_to_running_backward()

    def _sizes(self, inputs: Sequence[InputType]) -> tuple[int, ...]:
        """Return the sizes of a call, and take note of them. A call at known sizes does not come here."""
        sizes = tuple(inputs[size.input] for size in self.spec.info.sizes.sizes)  # type: ignore[union-attr]
        if len(self.sizes_seen) < 1 << 16:
            self.sizes_seen.add(sizes)  # type: ignore[arg-type]
            self.report.num_sizes = len(self.sizes_seen)
        return sizes  # type: ignore[return-value]

    def _replay(self, inputs: list[InputType]) -> OutputType | None:
        """Return None if the call has to run uncaptured."""
        sizes = self._sizes(inputs)
        # What replays at these sizes may have refused.
        self.known.pop(self.sizes_of(inputs), None)
        if sizes in self.refused:
            return None
        for recording in reversed(self.recordings):
            try:
                if (kept := recording.at_sizes(sizes)) is None:
                    continue
                is_first = self.proofs.is_first(sizes)
                if is_first or not self.proofs.is_trusted(recording, kept):
                    self.deployment.controller.prepared_size()
                    # While the graph is timed, memory stays until all is decided.
                    is_decided = self.report.choice != UNDECIDED
                    with without_growth(self.spec.device_index) if is_decided else contextlib.nullcontext():
                        outputs = self.proofs.prove(recording, kept, inputs, self._run_call, is_first=is_first)
                elif (tensors := recording.bind(inputs, kept)) is None:
                    outputs = None
                else:
                    self.may_have_run = True
                    outputs = recording.launch(inputs, kept, tensors)
            except RefusedError as e:
                self._refuse(sizes, e.reason)
                return None
            if outputs is not None:
                self._used(recording)
                if kept.launches.is_trusted:
                    self._know(recording, kept, self.sizes_of(inputs))
                self.report.captured_calls += 1
                inputs.clear()
                return outputs
        # A recording that is dropped is to die.
        recording = kept = None
        return self._record(inputs)

    def _used(self, recording: SizedRecording) -> None:
        if recording is not self.recordings[-1]:
            self.recordings.remove(recording)
            self.recordings.append(recording)

    def _know(self, recording: SizedRecording, kept: KeptSizes, sizes: Any) -> tuple[Any, tuple[int, ...], Any]:
        """Replay further calls at these sizes without this object."""
        if len(self.known) >= MAX_KNOWN_SIZES:
            self.known.clear()
        on: Any = kept.launches.on
        if on.replay is None:
            plan = sized_plan(recording, on, self.manager, self.spec.mode, self.deployment.owner)
            on.replay = make_replay(plan, self.state, self.not_replayed)
            if (values := recording.values.words_for_replay()) is not None:
                on.replay = _with_values(on.replay, values)
        self.known[sizes] = known = on.replay, recording.numbers(kept.at), kept.launches.set
        return known

    def _drop(self, recordings: Sequence[SizedRecording]) -> None:
        self.known.clear()
        for recording in [*recordings]:
            recording.close()
            self.recordings.remove(recording)

    # Recording

    def _record(self, inputs: list[InputType]) -> OutputType | None:
        """
        Add a recording for the sizes of a call. Return its outputs, or those of the uncaptured function
        if it cannot be recorded for many sizes; None if it is not to be recorded at these.
        """
        sizes, controller = self._sizes(inputs), self.deployment.controller
        memory = memory_of(self.manager)
        if max(controller.state.recordings - self.renewals, len(self.refused)) >= MAX_CAPTURES:
            return None
        rehearsal: Rehearsal | None = None
        try:
            self.sized = self.sized or SizedModel(self.model, self.spec, inputs)
            if not self.sized.launches_all(sizes):
                return None
            rehearsal = self.proofs.rehearse(inputs)
            top = self._top(sizes)
            self._check_memory(rehearsal, sizes, top, memory)
            self._retire(top, memory)
            recording = SizedRecording(self.sized, inputs, sizes, top, memory.memo, memory.pool)
            memory.recordings.add(recording)
            memory.functions.add(self)
            kept = recording.at_sizes(sizes)
            outputs = self.proofs.prove_whole(recording, kept, inputs, rehearsal)
            if outputs is None:
                raise RefusedError(recording.refusal or Reason.of(Code.LAZY_OUTPUT))
        except Exception as e:
            # If the error is the program's own, the uncaptured run raises it again.
            self.may_have_run = True
            self._refuse(sizes, _reason(e))
            return self.model(inputs) if rehearsal is None else rehearsal.rerun()
        self.recordings.append(recording)
        self.report.captured_calls += self.report.calls > 0
        self.report.buckets = [[*r.top] for r in self.recordings]
        controller.recorded(
            RecordingFacts(
                has_captured=True,
                needed_bytes=rehearsal.needed_bytes,
                external_inputs=len(self.sized.inputs),
                num_nodes=recording.num_nodes,
                updated_nodes=recording.num_nodes,
            )
        )
        inputs.clear()
        return outputs

    def _top(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return for which sizes a recording is: all of the bucket, and those of earlier recordings."""
        return tuple(map(max, zip(self.sized.top(sizes), self.top or sizes)))

    def _retire(self, top: tuple[int, ...], memory: SizedMemory) -> None:
        """Drop recordings of smaller buckets, or the least recently used one if there are too many."""
        if self.recordings and self.top != top:
            memory.renew()
        self.top = top
        self._drop(self.recordings[: max(0, len(self.recordings) - MAX_RECORDINGS + 1)])

    def _check_memory(
        self, rehearsal: Rehearsal, sizes: tuple[int, ...], top: tuple[int, ...], memory: SizedMemory
    ) -> None:
        # Both are too much: some memory is for all sizes, and some serves several tensors.
        factor = functools.reduce(lambda f, pair: f * pair[0] / max(pair[1], 1), zip(top, sizes), 1.0)
        at, reserve = map(self.sized.function.at, (sizes, top))
        more = sum(max(reserve.extent(t) - at.extent(t), 0) for t in self.sized.memory.values())
        needed = min(int(rehearsal.needed_bytes * factor), rehearsal.needed_bytes + more)
        if (lack := lack_of_memory(needed, self.spec.device_index, memory.pool)) is not None:
            raise RefusedError(lack)

    def _refuse(self, sizes: tuple[int, ...], reason: Reason) -> None:
        """Run these sizes uncaptured, or record the function for each size from now on."""
        # What was true of the first sizes may be true of all.
        is_of_these = reason.code in OF_SOME_SIZES and (self.recordings or reason.code is Code.OPERANDS_AT_SIZES)
        if not is_of_these:
            self._give_up(reason)
            return
        log.info("not captured at sizes %s: %s", ", ".join(map(str, sizes)), reason.text)
        self.refused.add(sizes)

    def _give_up(self, reason: Reason) -> None:
        self._drop(self.recordings)
        self.fns.pop(None, None)
        journal.drop([self.report])
        _reasons[self.model] = reason
        log_reason(self.spec, reason)


def _with_values(replay: Any, values: Callable[[], Sequence[int]]) -> Callable[..., OutputType]:
    """Return what replays with the words of a call's CPU values behind its numbers."""
    return lambda inputs, numbers, row: replay(inputs, (*numbers, *values()), row)


def _reason(error: Exception) -> Reason:
    if isinstance(error, RefusedError):
        return error.reason
    if isinstance(error, torch.OutOfMemoryError):
        return Reason.of(Code.NO_MEMORY_BEFORE_CAPTURE)
    if isinstance(error, DriverError):
        return Reason.of(Code.DRIVER, error=str(error))
    return Reason.of(Code.ERROR, error=f"{type(error).__name__}: {first_line(error)}")
