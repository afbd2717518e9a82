"""
From a compiled function to what is called in its place. CUDA graph trees call ``deploy`` for the first inputs of each
set of sizes. What it returns replaces itself by what selection decides on.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import Counter
from typing import Any, TYPE_CHECKING, TypeVar

import torch
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import get_input_idxs_to_check
from torch._inductor.cudagraph_trees import cudagraphify, CUDAGraphTreeManager, get_manager, thread_containers
from torch._inductor.pygraph.capture import agreement
from torch._inductor.pygraph.graph.driver import DriverError
from torch._inductor.pygraph.graph.memory import segments_of
from torch._inductor.pygraph.replay.interpreter import ReplayChain
from torch._inductor.pygraph.select import many_sizes, store
from torch._inductor.pygraph.select.controller import Controller
from torch._inductor.pygraph.select.ranks import by_all_ranks
from torch._inductor.pygraph.select.selection import Selection
from torch._inductor.pygraph.select.timing import CallTimes
from torch._inductor.pygraph.trees.cached import NotReplayed
from torch._inductor.pygraph.trees.manager import (
    forget,
    has_trees,
    manager_of,
    max_recorded_again,
    policies_around,
    state_of,
    watch_groups,
)
from torch._inductor.pygraph.types import journal
from torch._inductor.pygraph.types.calls import NOTE
from torch._inductor.pygraph.types.candidate import Candidate, CHAIN, NO_GRAPH, NODE_UPDATE
from torch._inductor.pygraph.types.function import FunctionSpec
from torch._inductor.pygraph.types.reason import Code, Reason
from torch._inductor.pygraph.types.report import FunctionReport
from torch._inductor.pygraph.verify.kept import apart
from torch._inductor.utils import align_inputs_from_check_idxs, remove_unaligned_input_idxs
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch._inductor.cudagraph_utils import FunctionID, ModelType, OutputType
    from torch._inductor.pygraph.select.by_size import Sizes
    from torch._inductor.pygraph.types.partition import PartitionInfo
    from torch._inductor.utils import InputType


T = TypeVar("T")

# How many functions were called first, by their groups and names. Ranks of a group call them in one order.
_numbers: Counter[tuple[tuple[str, ...], str]] = Counter()


def deploy(
    model: ModelType,
    inputs: list[InputType],
    static_input_idxs: Sequence[int],
    replace: Callable[[ModelType], None],
    *,
    device_index: int,
    is_backward: bool,
    is_inference: bool,
    info: PartitionInfo,
    objects: Mapping[str, Any],
    mutated_input_idxs: tuple[int, ...] = (),
    force: str | None = None,
    fns: Sizes | None = None,
    decision: store.Decision | None = None,
    **kwargs: Any,
) -> ModelType:
    """
    Return what cudagraph_trees.cudagraphify_impl is to call for one set of sizes.

    Args:
        replace: called with a cheaper equivalent of what this returns, once there is one
        info, objects, force: see cudagraph_utils.PyGraphOptions
        fns: what is deployed, by sizes
        decision: taken over from other sizes, if an earlier process made none
        kwargs: further arguments of cudagraph_trees.cudagraphify
    """
    if force is not None:
        try:
            Candidate.parse(force)
        except ValueError as e:
            raise ValueError(f"config.pygraph_force: {e}") from None
    mode = "backward" if is_backward else "inference" if is_inference else "forward"
    compile_id = str(kwargs.get("compile_id") or "")
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    spec = FunctionSpec(info, objects, mode, compile_id, device_index, is_distributed, tuple(mutated_input_idxs))
    if info.collectives:
        key = info.groups, spec.rank_name
        _numbers[key] += 1
        spec = dataclasses.replace(spec, number=_numbers[key])
        watch_groups()
    deployment = Deployment(
        spec,
        model,
        replace,
        force,
        kwargs,
        sizes=[v for v in inputs if isinstance(v, int)],
        to_check=get_input_idxs_to_check(inputs, static_input_idxs),
        static_input_idxs=remove_unaligned_input_idxs(inputs, static_input_idxs),
    )
    if not has_trees():
        return deployment.wait()
    if fns is not None and fns.are_many and many_sizes.may_record(deployment, inputs):
        return many_sizes.start(deployment, fns)
    fn = deployment.start(inputs, decision=decision)
    # Ranks select in the same calls.
    if fns is not None and fns.first is None and force is None and not info.collectives:
        fns.first = deployment
    return fn


@dataclasses.dataclass(eq=False)
class Deployment:
    """
    The ways to run one function: uncaptured, recording it, replaying it. ``sizes`` are the integers among its inputs,
    ``to_check`` the inputs that may be misaligned.
    """

    spec: FunctionSpec
    model: ModelType
    replace: Callable[[ModelType], None]
    force: str | None
    kwargs: dict[str, Any]
    sizes: list[int]
    to_check: Sequence[int]
    static_input_idxs: Sequence[int]

    def realigned(self, fn: Callable[..., T]) -> Callable[..., T]:
        # A bound or uncaptured input is written in place, so that a clone is copied back.
        return align_inputs_from_check_idxs(fn, self.to_check, OrderedSet(self.spec.mutated_input_idxs))

    def _new_controller(self) -> Controller:
        spec, info = self.spec, self.spec.info
        source, compile_id = info.report.source, spec.compile_id
        report = FunctionReport(info.name, spec.mode, source=source, compile_id=compile_id, sizes=self.sizes)
        report.collectives = agreement.describe(info.collectives)
        report.by_size = many_sizes.why_not(self.model)
        journal.add(report)
        return Controller(spec, report)

    def wait(self) -> ModelType:
        """Run the function uncaptured until a thread calls it that trees know."""
        controller = self._new_controller()
        controller.decide(NO_GRAPH, Reason.of(Code.UNKNOWN_THREAD))
        run = self.realigned(self.model)

        def run_or_start(inputs: list[InputType]) -> OutputType:
            if not has_trees():
                return run(inputs)
            # The first caller was a thread of a pool, or an operator of a function that was being recorded.
            journal.drop([controller.report])
            # A copy: two threads may be here, and each starts for itself.
            fn = copy.copy(self).start(inputs)
            self.replace(fn)
            return fn(inputs)

        return run_or_start

    def start(
        self, inputs: Sequence[InputType], recorder: Any = None, *, decision: store.Decision | None = None
    ) -> ModelType:
        """Return what is to be called first. ``recorder`` records and drops recordings in the place of this object."""
        recorder = recorder or self
        self.owner = thread_containers()
        self.controller = controller = self._new_controller()
        self.run = self.run_backward if self.spec.is_backward else self.model
        self.uncaptured = self.realigned(self.run)
        force, reason, info = self.force, Reason.of(Code.FORCED), self.spec.info
        ranks_decide = force is None and info.ranks_decide and bool(info.groups)
        if force is None and info.collectives and not ranks_decide:
            force, reason = NODE_UPDATE, Reason.of(Code.COLLECTIVES_NOT_TIMED)
        if force is not None:
            controller.bind_as(force)
            controller.decide(force, reason)
        if force == NO_GRAPH:
            return self.uncaptured
        entry = store.entry_for(self.spec, inputs, self.static_input_idxs) if force is None else None
        remembered = None
        if entry is not None and (remembered := entry.load()) is not None and not ranks_decide:
            counters["pygraph"]["remembered"] += 1
            controller.remember(remembered.timings_us, remembered.choice)
        elif decision is not None:
            remembered = decision
            controller.bind_as(decision.choice)
        choice = force or (remembered and remembered.choice)
        may_schedule = recorder is self and self._may_schedule(choice)
        selection: Callable[..., Selection] = Selection
        if ranks_decide:
            selection = by_all_ranks(self.spec.number_on_ranks, functools.partial(agreement.agree, info.groups))
        self.selection = selection(
            controller,
            self.uncaptured,
            self.realigned(recorder.record),
            self.replace,
            recorder.forget,
            recorder.around,
            is_forced=force is not None,
            entry=entry,
            remembered=remembered,
            time_calls=self._time_calls if may_schedule else None,
            max_recorded_again=recorder.max_recorded_again,
            pool_bytes=self._pool_bytes,
        )
        return self.selection

    def may_share(self, inputs: Sequence[InputType]) -> bool:
        """Return whether a recording of the function may serve many sizes, and report why not."""
        may = many_sizes.may_record(self, inputs)
        self.controller.report.by_size = many_sizes.why_not(self.model)
        return may

    def is_remembered(self, inputs: Sequence[InputType]) -> bool:
        """Return whether an earlier process decided on the function at these sizes."""
        entry = store.entry_for(self.spec, inputs, self.static_input_idxs)
        return entry is not None and entry.load() is not None

    def _may_schedule(self, choice: str | None) -> bool:
        """Return whether calls may run side by side, given what was decided on, if anything."""
        info = self.spec.info
        # Ranks run their collectives in one order.
        may = bool(info.calls) and not info.collectives
        return may and (choice is None or Candidate.parse(choice).schedule != CHAIN)

    def _time_calls(self, inputs: list[InputType], host_us: float) -> OutputType:
        """Run the function uncaptured and time each of its calls on the device."""
        times = CallTimes(self.spec.device_index)
        times.begin(host_us, len(self.spec.info.calls))
        outputs = self.realigned(functools.partial(self.run, **{NOTE: times}))(inputs)
        self.controller.calls_timed(times.us())
        return outputs

    def _pool_bytes(self) -> int:
        """Return what the graphs' pool reserves."""
        pool = manager_of(self.spec.device_index).cuda_graphs_thread_pool
        return sum(s["total_size"] for s in segments_of(pool))

    def run_backward(self, inputs: list[InputType], **notes: Any) -> OutputType:
        """Run a backward uncaptured. See [Backward Generation Handling]."""
        manager = None
        # Other threads have another manager or none.
        if thread_containers() is self.owner:
            manager = get_manager(self.spec.device_index, create_if_none_exists=False)
        if manager is not None:
            manager.set_to_running_backward()
            state = state_of(manager)
            if not torch.cuda.is_current_stream_capturing() and state.acquire():
                # The next launch waits for this stream: the backward may read activations of the pool.
                try:
                    state.follow()
                finally:
                    state.release()
        return self.model(inputs, **notes)

    def record(self, inputs: list[InputType]) -> tuple[ModelType | None, OutputType]:
        """Record the function in a call. Return what replays it, None while another thread records, and outputs."""
        manager = manager_of(self.spec.device_index)
        state = state_of(manager)
        if not state.acquire():
            return None, self.uncaptured(inputs)
        try:
            state.follow()
            fn, outputs = cudagraphify(
                self.model,
                inputs,
                self.static_input_idxs,
                device_index=self.spec.device_index,
                is_backward=self.spec.is_backward,
                is_inference=self.spec.mode == "inference",
                mutated_input_idxs=self.spec.mutated_input_idxs,
                pygraph=self.controller,
                **self.kwargs,
            )
        finally:
            state.release()
        chain = ReplayChain(self.controller, manager, state, self.owner)
        replayer = Replayer(self, fn, chain)
        # Around both ways: the clone of a misaligned input that is mutated is copied back.
        replayer.general = self.realigned(replayer)
        return chain.add(replayer.general) or replayer.general, outputs

    def forget(self, function_id: FunctionID | None) -> bool | None:
        """See Selection. None while another thread records."""
        return self._locked(forget, function_id)

    def around(self, function_id: FunctionID | None) -> OrderedSet[Any] | None:
        return self._locked(policies_around, function_id)

    def max_recorded_again(self, function_id: FunctionID | None) -> int | None:
        return self._locked(max_recorded_again, function_id)

    def _locked(self, fn: Callable[[CUDAGraphTreeManager, FunctionID | None], T], id: FunctionID | None) -> T | None:
        """Call ``fn`` of the calling thread's trees. Return None while another thread records."""
        manager = get_manager(self.spec.device_index)
        state = state_of(manager)
        if not state.acquire():
            return None
        try:
            return fn(manager, id)
        finally:
            state.release()


@dataclasses.dataclass(eq=False)
class Replayer:
    """
    Replays the recordings of a function by ``trees``, or runs it uncaptured. ``general`` is this object behind the
    alignment of inputs.
    """

    deployment: Deployment
    trees: ModelType
    chain: ReplayChain
    general: ModelType = dataclasses.field(init=False)

    def __call__(self, inputs: list[InputType]) -> OutputType:
        deployment = self.deployment
        # A graph is updated and launched by the thread that recorded it, and by autograd's threads on its behalf. A
        # graph that the program itself captures right now must not depend on the pool's memory. torch._dynamo.reset
        # drops graphs, and a backward may come after it.
        if (
            thread_containers() is not deployment.owner
            or self.chain.manager.roots is None
            or torch.cuda.is_current_stream_capturing()
            or not self.chain.state.acquire()
        ):
            return deployment.uncaptured(inputs)
        restored: frozenset[int] = frozenset()
        try:
            self.chain.state.follow()
            outputs = self.trees(inputs)
            if (first := self.chain.add(self.general)) is not None:
                deployment.selection.shorten(first)
            return outputs
        except NotReplayed as e:
            restored = e.restored
            if e.error is None:
                counters["pygraph"]["held_activations"] += 1
            else:
                self._failed(e.error)
        except DriverError as e:
            self._failed(e)
        finally:
            self.chain.state.release()
        return apart(deployment.uncaptured(inputs), restored)

    def _failed(self, error: DriverError) -> None:
        """Nothing was launched: the driver refused to set a node."""
        self.deployment.controller.decide(NO_GRAPH, Reason.of(Code.REPLAY_FAILED, error=str(error)))
        self.deployment.selection.retire()
