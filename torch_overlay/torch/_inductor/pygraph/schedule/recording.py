"""What a recording does for a schedule: in the rehearsal, while it captures, and with the captured graph."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

import torch
from torch._inductor.pygraph.graph.driver import DriverError
from torch._inductor.pygraph.graph.memory import allocated_in, PoolRanges
from torch._inductor.pygraph.schedule.buffers import Buffers, buffers_apart
from torch._inductor.pygraph.schedule.notes import CallLog
from torch._inductor.pygraph.schedule.plan import Graph, schedule_graph
from torch._inductor.pygraph.schedule.pointers import Memory
from torch._inductor.pygraph.schedule.workspaces import used_bytes
from torch._inductor.pygraph.types.calls import NOTE
from torch._inductor.pygraph.types.candidate import CHAIN
from torch._inductor.pygraph.types.reason import Code, first_line, Reason
from torch._inductor.pygraph.types.schedule import ScheduleFacts


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from torch._inductor.cudagraph_utils import ModelType
    from torch._inductor.pygraph.graph.placeholder import PlaceholderMap
    from torch._inductor.pygraph.schedule.notes import Note
    from torch._inductor.pygraph.schedule.plan import Unit
    from torch._inductor.pygraph.schedule.pointers import Range
    from torch._inductor.pygraph.types.function import RecordingRequest
    from torch.cuda import _POOL_HANDLE


log = logging.getLogger(__name__)

# What buffers of a schedule may take beyond the chain, as a part of all reserved memory.
MORE_MEMORY = 0.1


class ScheduledRecording:
    """``has_managed``: the pool's memory holds inputs of the call until the graph has run."""

    def __init__(
        self, request: RecordingRequest, device_index: int, pool: _POOL_HANDLE, *, has_managed: bool
    ) -> None:
        self.state, self.calls = request.state, request.spec.info.calls
        self.device_index = device_index
        self.pool = pool
        self.has_managed = has_managed
        # Of the rehearsal, then of the capture.
        self.log: CallLog | None = None
        self.buffers: Buffers | None = None
        # Workspaces of libraries in the pool, and the number of the call that allocated each.
        self.workspaces: dict[Range, int] | None = None

    def note_rehearsal(self) -> dict[str, CallLog]:
        """Return what an uncaptured run takes to note its calls."""
        if self.state.schedule == CHAIN or not self.calls:
            return {}
        self.log = CallLog(self.calls, self.device_index, is_captured=False)
        return {NOTE: self.log}

    def allocator(
        self, moving: Collection[int], allocate: Callable[..., torch.Tensor], needed_bytes: int
    ) -> Buffers | None:
        """Return what allocates for calls that are to run side by side, given their rehearsal."""
        self.moving, self.needed_bytes = moving, needed_bytes
        if self.log is not None:
            self.buffers = buffers_apart(self.log, moving, self.state.call_times_us, allocate, self._more_bytes())
        return self.buffers

    def note_capture(self, model: ModelType) -> ModelType:
        buffers, state = self.buffers, self.state
        # If times of calls are known, the chain reports what other schedules could gain.
        if self.calls and (state.schedule != CHAIN or state.call_times_us):
            ends = None if buffers is None else buffers.ends
            # A chain reuses buffers as a function without notes does.
            reuses = state.schedule == CHAIN
            self.log = CallLog(self.calls, self.device_index, reuses=reuses, noted=self._noted, ends=ends)
            model = functools.partial(model, **{NOTE: self.log})
            if any(call.has_workspace for call in self.calls):
                self.before = allocated_in(self.pool)
        return model if buffers is None else buffers.until_end(model)

    def allocating_alike(self, model: ModelType) -> ModelType:
        """Return a function that makes the allocations of the captured one, in their order."""
        if self.state.schedule == CHAIN or not self.calls:
            return model
        return functools.partial(model, **{NOTE: CallLog(self.calls, self.device_index, is_captured=False)})

    def _noted(self, note: Note) -> None:
        if self.workspaces is None and self.calls[note.number].has_workspace:
            # The library allocates its workspace in its first call. Other new memory belongs to a tensor.
            (*tensors,) = (u.extent for n in self.log.notes for u in n.uses if not u.storage.expired())
            found = allocated_in(self.pool) - self.before
            self.workspaces = {m: note.number for m in found if not _overlaps(m, tensors)}
        if self.buffers is not None:
            self.buffers.noted(note)

    def apply(self, raw_graph: int, placeholders: PlaceholderMap) -> ScheduleFacts | None:
        """Let calls of the captured graph run side by side, if the request says so."""
        state, log = self.state, self.log
        if log is None and state.schedule == CHAIN:
            return None
        try:
            if log is None:
                raise ValueError("what they use is not known")
            memory = Memory(PoolRanges(self.pool), placeholders)
            graph = Graph(raw_graph, log, memory, self.moving, self._known_workspaces(log))
            used = functools.partial(self._used_bytes, graph)
            return schedule_graph(graph, state.schedule, state.call_times_us, used)
        except (DriverError, ValueError) as e:
            return ScheduleFacts(CHAIN, reason=Reason.of(Code.NOT_SCHEDULED, error=first_line(e)))

    def _more_bytes(self) -> int:
        """Return how many bytes a schedule may take beyond the chain."""
        return int(MORE_MEMORY * (torch.cuda.memory_reserved(self.device_index) + self.needed_bytes))

    def _known_workspaces(self, log: CallLog) -> dict[Range, int]:
        workspaces = self.workspaces or {}
        first = min(workspaces.values(), default=0)
        # Tensors that were allocated ahead of their first call.
        (*tensors,) = (use.extent for note in log.notes[first + 1 :] for use in note.uses)
        return {memory: number for memory, number in workspaces.items() if not _overlaps(memory, tensors)}

    def _used_bytes(self, graph: Graph, units: list[Unit], memory: Range) -> int:
        """Return how many of the first bytes of a workspace units use, or all if they cannot run alone."""
        writes = (use.operand for unit in units for use in unit.note.uses if use.operand.writes)
        if not self.has_managed and all(operand.input is None for operand in writes):
            nodes = [node for unit in units for node in unit.nodes]
            try:
                return used_bytes(graph.graph, nodes, memory, self.device_index)
            except DriverError as e:
                log.info("a workspace stays whole: %s", e)
        return memory[1] - memory[0]


def _overlaps(memory: Range, others: Iterable[Range]) -> bool:
    return any(start < memory[1] and memory[0] < end for start, end in others)
