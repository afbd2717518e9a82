"""
The controller of one function: the only writer of the function's state. Trees and nodes ask it how to record the
function and tell it what became of the recording. Selection tells it what was measured and decided.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

import torch
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.cudagraph_trees import ExecutionState, is_live
from torch._inductor.pygraph.capture.bound import BoundGraphNode
from torch._inductor.pygraph.capture.copying import CopyGraphNode
from torch._inductor.pygraph.graph.placeholder import MAX_ALIGNMENT
from torch._inductor.pygraph.trees.manager import current_path, drop, renew_pool, times_on_path
from torch._inductor.pygraph.types import journal
from torch._inductor.pygraph.types.candidate import (
    BINDINGS,
    Candidate,
    CHAIN,
    COPY,
    DAG,
    LANES,
    NO_GRAPH,
    NODE_UPDATE,
    PRELUDE,
    UNDECIDED,
)
from torch._inductor.pygraph.types.function import Evidence, FunctionState, RecordingRequest
from torch._inductor.pygraph.types.reason import Code, Reason
from torch._inductor.pygraph.types.schedule import ScheduleFacts
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from torch._inductor.cudagraph_trees import CUDAGraphNode, CUDAGraphTreeManager
    from torch._inductor.cudagraph_utils import FunctionID
    from torch._inductor.pygraph.types.function import FunctionSpec, RecordingFacts, Refused
    from torch._inductor.pygraph.types.report import FunctionReport


log = logging.getLogger(__name__)

# At most so many recordings of a function on one path: of layers that share their code, or before a backward.
MAX_TIMES_ON_PATH = 128

# At most so many recordings of a forward on one path whose outputs died before any backward. Without no_grad, a program
# that only evaluates holds its last output in each call, so that its path does not end.
MAX_DROPPED_ON_PATH = 8

# Selection tries other orders of a graph's calls only if the calls take so many times their critical path, and if the
# difference is this part of the time from one call of the function to the next. A recording of another order drops the
# recordings behind it on its path, which costs the program more than a small gain. Estimates.
MIN_PARALLELISM = 1.1
MIN_PART = 0.01

# Calls of a schedule that the report draws.
MAX_REPORTED_CALLS = 300


class StaticInputs:
    """
    The static inputs of a function's recordings. A program that keeps making new weights would be recorded without end.
    Its old weights are gone by one of the next recordings, unlike those of layers that share their code.
    """

    def __init__(self) -> None:
        # (storage, address) at the time of a recording, by input, while the storage is there
        self.noted: dict[int, list[tuple[StorageWeakRef, int]]] = {}
        # How often an earlier one was gone by a later recording.
        self.replaced = 0

    def note(self, inputs: Mapping[int, torch.Tensor]) -> OrderedSet[int]:
        """Take note of a recording. Return the inputs that the program keeps replacing."""
        gone = OrderedSet[int]()
        for i, t in inputs.items():
            noted = self.noted.get(i, [])
            there = [n for n in noted if not has_left(*n)]
            if len(there) < len(noted):
                gone.add(i)
            storage = t.untyped_storage()
            note = StorageWeakRef(storage), storage.data_ptr()
            self.noted[i] = there if note in there else [*there, note]
        self.replaced += bool(gone)
        if self.replaced <= config.triton.cudagraph_unexpected_rerecord_limit:
            return OrderedSet()
        for i in gone:
            del self.noted[i]
        return gone


def has_left(ref: StorageWeakRef, address: int) -> bool:
    """Return whether a storage is gone, or has other memory."""
    storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
    return storage is None or storage.data_ptr() != address


class Controller:
    """
    See the module's docstring. It is a GraphPolicy. ``reselect`` is called when the graph that was
    selected cannot be bound any more, or copies more than when it was timed. A forced one has none.
    """

    def __init__(self, spec: FunctionSpec, report: FunctionReport) -> None:
        # Another stream may read a gradient that nobody holds any more, to reduce it.
        outlive = not spec.is_backward or spec.is_distributed
        self.spec = spec
        self.report = report
        # Another recording of a forward, should the prelude be refused, would need another one of its backward.
        binding = PRELUDE if spec.mode == "inference" else NODE_UPDATE
        self.state = FunctionState(MAX_ALIGNMENT, outputs_outlive=outlive, has_stepped=outlive, binding=binding)
        self.reselect: Callable[[], None] | None = None
        self._static_inputs = StaticInputs()
        # The most bytes that reselect was called for.
        self._reselected_bytes = 0

    @property
    def binds_inputs(self) -> bool:
        return self.state.binding != COPY

    @property
    def owned_output_idxs(self) -> OrderedSet[int]:
        """Outputs that get memory of their own in each call. Gradients that die within the step stay in the pool."""
        return self.spec.returned_output_idxs if self.state.outputs_outlive else OrderedSet()

    # What trees and nodes call; see GraphPolicy

    def added(self, function_id: FunctionID) -> None:
        self.state.id = function_id

    def may_run(self, manager: CUDAGraphTreeManager) -> bool:
        if not self.state.is_capturable:
            return False
        if self.state.outdated.cell_contents:
            if times_on_path(manager, self):
                if not manager.current_node.all_outputs_are_dead():
                    counters["pygraph"]["held_gradients"] += 1
                    return False
                # Trees end a path when another function runs. There may be none.
                manager.current_node = None
            drop(manager, self.state.id)
            self.state.outdated.cell_contents = False
        last = manager.current_node
        if last is None or last.all_outputs_are_dead():
            return True
        if manager.in_warmup:
            # The last function is not PyGraph's. Its outputs would be taken away together with this function's.
            counters["pygraph"]["held_activations"] += 1
            return False
        # A backward may still need these outputs. Trees would end the path all the same, or go on along it.
        may_end = manager.can_start_new_generation()
        is_marked = may_end and manager.user_invoked_mark_step()
        times = times_on_path(manager, self)
        if is_marked and times and not _has_live_outputs(manager):
            # Stock's outputs are overwritten in the next step, as they are without PyGraph. Where this function is not
            # on their path yet, it goes on behind them: it may read them.
            return True
        # No micro-batch is in flight where the program begins a step.
        is_pipelined = may_end and not _note_held_gradients(manager) and not is_marked and _is_backward(last)
        in_flight = not may_end or is_pipelined
        most = MAX_TIMES_ON_PATH if in_flight else 1
        if times >= most or self._dropped_on_path(manager) >= MAX_DROPPED_ON_PATH:
            counters["pygraph"]["held_activations"] += 1
            return False
        if may_end:
            manager.update_generation()
        return True

    def _dropped_on_path(self, manager: CUDAGraphTreeManager) -> int:
        """Return how many recordings of a forward have no live output on a path without a backward."""
        path = [*current_path(manager)]
        if self.spec.mode != "forward" or any(map(_is_backward, path)):
            return 0
        of_function = (node for node in path if node.wrapped_function.pygraph is self)
        return sum(not any(map(is_live, node.outputs_weakrefs)) for node in of_function)

    def node_type(self) -> type[CUDAGraphNode]:
        return BoundGraphNode if self.binds_inputs else CopyGraphNode

    def request(self, declared_static: Mapping[int, torch.Tensor]) -> RecordingRequest:
        state = self.state
        moving = self._static_inputs.note({i: t for i, t in declared_static.items() if i not in state.moving_idxs})
        if moving:
            # Earlier recordings are dropped, and this one with them.
            state.moving_idxs |= moving
            state.outdated.cell_contents = True
            reason = Reason.of(Code.STATIC_INPUTS_REPLACED, count=len(moving))
            log.info("%s", self.report.line("bound from now on", reason))
        mutated = state.moving_idxs & OrderedSet(self.spec.mutated_input_idxs)
        # The graph would write a copy.
        is_refused = not self.binds_inputs and any(i in declared_static for i in mutated)
        return RecordingRequest(
            self.spec,
            dataclasses.replace(state),
            self.report.choice == state.binding,
            tuple(i for i in declared_static if i not in state.moving_idxs),
            self.owned_output_idxs,
            self.report.stock_copied_bytes,
            Reason.of(Code.MOVING_MUTATED_INPUT) if is_refused else None,
        )

    def recorded(self, facts: RecordingFacts) -> None:
        self._apply(facts)
        if facts.no_prelude is not None:
            self._bind_by_host(facts.no_prelude)
        elif self.state.binding == PRELUDE and not facts.has_prelude:
            self.state.binding = NODE_UPDATE
        self.state.staged_bytes = facts.staged_bytes
        if self.report.choice in BINDINGS:
            self.report.copied_bytes = facts.staged_bytes
        if facts.num_nodes is not None:
            self.report.kernel_nodes = facts.num_nodes
        if facts.updated_nodes is not None:
            self.report.updated_nodes = facts.updated_nodes
        if facts.schedule is not None:
            self._scheduled(facts.schedule)

    def _scheduled(self, facts: ScheduleFacts) -> None:
        report = self.report
        self.state.schedule = report.schedule = facts.schedule
        report.calls_us, report.critical_us, report.width = facts.calls_us, facts.critical_us, facts.width
        report.timeline = [*facts.timeline[:MAX_REPORTED_CALLS]]
        if facts.reason is not None:
            log.info("%s", report.line("not scheduled", facts.reason))

    def refused(self, manager: CUDAGraphTreeManager, refused: Refused) -> None:
        self._apply(refused.facts)
        error = refused.reason.text
        if refused.facts.needs_evidence and self.state.evidence < Evidence.COPIES:
            # The next recording finds out why results differ.
            self.state.evidence = Evidence(self.state.evidence + 1)
            _leave_recording(manager)
            return
        if self.state.schedule != CHAIN:
            # The next recording, a chain, shows whether the schedule is the cause: it may need more memory.
            self._scheduled(ScheduleFacts(CHAIN, reason=Reason.of(Code.NOT_SCHEDULED, error=error)))
            _leave_recording(manager)
            return
        self.state.is_capturable &= refused.is_capturable
        if refused.facts.has_prelude and refused.is_capturable:
            self._bind_by_host(Reason.of(Code.NO_PRELUDE, binding=self.state.binding, error=error))
        else:
            self._unbind(refused.reason)
        _leave_recording(manager)

    def interrupted(self, manager: CUDAGraphTreeManager) -> None:
        self.state.recordings += 1
        _leave_recording(manager)

    def prepared_size(self) -> None:
        """Take note that a call proved the graph at its sizes, or captured library calls at them."""
        self.state.prepared_sizes += 1

    def copied(self, nbytes: int) -> None:
        """Take note that a graph of the function copies so many bytes of inputs."""
        # If the graph of its forward is dropped later, a backward copies everything that was saved.
        report = self.report
        if report.choice == UNDECIDED:
            report.stock_copied_bytes = nbytes
        elif self.reselect is None:
            if report.choice == COPY:
                report.stock_copied_bytes = report.copied_bytes = nbytes
        elif nbytes > max(report.copied_bytes, self._reselected_bytes):
            # Once for each amount: a program may go back and forth.
            self._reselected_bytes = nbytes
            reason = Reason.of(Code.COPIES_MORE, nbytes=nbytes, timed_nbytes=report.copied_bytes)
            report.reasons = [reason]
            log.info("%s", report.line("decided anew", reason))
            self.reselect()

    def is_in(self, groups: Collection[str]) -> bool:
        info = self.spec.info
        # No groups: they are not known.
        return bool(info.collectives) and (not info.groups or any(group in groups for group in info.groups))

    def left_group(self) -> None:
        self.state.is_capturable = False
        if self.report.choice not in (UNDECIDED, NO_GRAPH):
            self.reselect = None
            self.decide(NO_GRAPH, Reason.of(Code.GROUP_DESTROYED))

    def _apply(self, facts: RecordingFacts) -> None:
        state, report = self.state, self.report
        state.recordings += facts.has_captured
        if facts.alignment is not None:
            state.alignment = facts.alignment
        if facts.needed_bytes is not None:
            state.needed_bytes = facts.needed_bytes
        if facts.external_inputs is not None:
            report.external_inputs = facts.external_inputs
        if facts.external_bytes is not None:
            report.stock_copied_bytes = facts.external_bytes
        if facts.copied_bytes:
            self.copied(facts.copied_bytes)

    def _unbind(self, reason: Reason) -> None:
        state, report = self.state, self.report
        was_bound, state.binding = self.binds_inputs, COPY
        state.schedule = report.schedule = CHAIN
        report.reasons = [reason]
        if (was_bound or not state.is_capturable) and self.reselect is not None:
            self.reselect()
        elif report.choice in (COPY, *BINDINGS):
            report.choice = COPY if state.is_capturable else NO_GRAPH
            report.copied_bytes = report.stock_copied_bytes if state.is_capturable else 0
        counters["pygraph"]["unbound"] += 1
        log.info("%s", report.line("inputs are copied" if state.is_capturable else "not captured", reason))

    def _bind_by_host(self, reason: Reason) -> None:
        """The graph cannot set its nodes itself: the host does so from now on."""
        state, report = self.state, self.report
        log.info("%s", report.line("bound by the host", reason))
        counters["pygraph"]["bound_by_host"] += 1
        report.reasons = [reason]
        if self.reselect is not None:
            self.reselect()
        elif report.choice == state.binding:
            report.choice = NODE_UPDATE
        state.binding = NODE_UPDATE

    # What replays and selection call

    def stepped(self, *, outputs_outlive: bool) -> None:
        """A step ended in which the function ran."""
        self.state.has_stepped = True
        self.state.outputs_outlive |= outputs_outlive

    def gradients_are_held(self) -> None:
        """Record the function anew, with memory of their own for its gradients."""
        self.state.outputs_outlive = self.state.outdated.cell_contents = True

    @property
    def candidate(self) -> str:
        """What the next recording is made for."""
        return str(Candidate(self.state.binding, self.state.schedule))

    def bind_as(self, choice: str) -> None:
        """Let the next recording be made for a candidate."""
        binding, self.state.schedule = Candidate.parse(choice)
        self.state.binding = binding if binding in BINDINGS else COPY

    def schedules(self, program_us: float) -> list[str]:
        """
        Return the candidates, at most three, in which calls of the recorded graph run side by side. ``program_us``: from one
        call of the function to the next.
        """
        report = self.report
        least_us = max((MIN_PARALLELISM - 1) * report.critical_us, MIN_PART * program_us)
        if not self.binds_inputs or report.calls_us - report.critical_us <= least_us:
            return []
        # With as many lanes as calls side by side, lanes are the DAG.
        lanes = [name for name, count in LANES.items() if count < report.width]
        names = dict.fromkeys([*lanes[:1], *lanes[-1:], DAG])
        return [str(Candidate(self.state.binding, name)) for name in names]

    def record_as(self, choice: str) -> None:
        """Record the function anew as another candidate, in its next call."""
        self.bind_as(choice)
        self.state.outdated.cell_contents = True

    def keep(self, choice: str) -> None:
        """Let the recordings be, which are of a candidate, if live outputs kept them from being dropped."""
        if self.state.outdated.cell_contents:
            self.bind_as(choice)
            self.state.outdated.cell_contents = False

    def calls_timed(self, times_us: Mapping[int, float]) -> None:
        self.state.call_times_us = times_us

    def waits(self, is_even: bool) -> None:
        """Whether the graph measured no better than none, and neighbours decide."""
        self.state.is_even = is_even

    def timed(self, candidate: str, us: float) -> None:
        self.report.timings_us[candidate] = us

    def reserved(self, candidate: str, nbytes: int) -> None:
        """Take note of what the graphs' pool reserves with a candidate."""
        self.report.pool_bytes[candidate] = nbytes

    def remember(self, timings_us: dict[str, float], choice: str) -> None:
        """An earlier process decided on a candidate."""
        self.report.remembered, self.report.timings_us = True, timings_us
        if choice != NO_GRAPH:
            self.bind_as(choice)

    def decide(self, choice: str, *reasons: Reason) -> None:
        report = self.report
        report.choice, _ = Candidate.parse(choice)
        report.reasons += reasons
        copied = {COPY: report.stock_copied_bytes, NO_GRAPH: 0}
        report.copied_bytes = copied.get(report.choice, self.state.staged_bytes)
        counters["pygraph"][report.choice] += 1
        log.info("%s", report.line(choice, *reasons))
        journal.publish(report)

    def undecide(self) -> None:
        """What was decided on copies its inputs now, or more of them: measure again."""
        counters["pygraph"]["reselected"] += 1
        report = self.report
        report.choice, report.remembered, report.timings_us = UNDECIDED, False, {}
        self.reselect = None


def _has_live_outputs(manager: CUDAGraphTreeManager) -> bool:
    """Return whether an output of a function of PyGraph's is alive on the current path."""
    ours = (node for node in current_path(manager) if node.wrapped_function.pygraph is not None)
    return any(is_live(ref) for node in ours for ref in node.outputs_weakrefs)


def _is_backward(node: CUDAGraphNode) -> bool:
    """Return whether a path goes on behind a backward: other micro-batches are in flight."""
    policy: Controller | None = node.wrapped_function.pygraph
    return policy is not None and policy.spec.is_backward


def _note_held_gradients(manager: CUDAGraphTreeManager) -> bool:
    """Find the functions of the last path whose gradients outlived their step. Return whether there are any."""
    has_any = False
    for node in current_path(manager):
        policy: Controller | None = node.wrapped_function.pygraph
        if policy is None:
            continue
        if any(is_live(node.outputs_weakrefs[i]) for i in policy.spec.returned_output_idxs - policy.owned_output_idxs):
            policy.gradients_are_held()
        has_any |= policy.state.outdated.cell_contents
    return has_any


def _leave_recording(manager: CUDAGraphTreeManager) -> None:
    """Put a manager into the state before a recording that failed."""
    if manager.current_node is not None:
        # The allocator knows by now what the path left alive, and cannot be told twice.
        manager.path_state = ExecutionState.RECORDING
    elif not any(manager.roots.values()):
        renew_pool(manager)
