"""What a recording does for a schedule: in the rehearsal, while it captures, and with the captured graph."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch._inductor.pygraph.graph.driver import DriverError
from torch._inductor.pygraph.graph.memory import PoolRanges
from torch._inductor.pygraph.schedule.buffers import Buffers, buffers_apart
from torch._inductor.pygraph.schedule.notes import CallLog
from torch._inductor.pygraph.schedule.plan import Graph, schedule_graph
from torch._inductor.pygraph.schedule.pointers import Memory
from torch._inductor.pygraph.schedule.workspaces import Ring, ring_of
from torch._inductor.pygraph.types.calls import NOTE
from torch._inductor.pygraph.types.candidate import CHAIN
from torch._inductor.pygraph.types.reason import Code, first_line, Reason
from torch._inductor.pygraph.types.schedule import ScheduleFacts


if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch._inductor.cudagraph_utils import ModelType
    from torch._inductor.pygraph.graph.placeholder import PlaceholderMap
    from torch._inductor.pygraph.types.function import RecordingRequest
    from torch.cuda import _POOL_HANDLE


# What buffers of a schedule may take beyond the chain, as a part of all reserved memory. So may workspaces, or as a
# part of the device's memory: programs that reserve little need them too.
MORE_MEMORY = 0.1
WORKSPACES = 0.00125


class ScheduledRecording:
    """``ring`` has the workspaces of kernels that run side by side, if the graph has some."""

    def __init__(self, request: RecordingRequest, device_index: int, pool: _POOL_HANDLE) -> None:
        self.state, self.calls = request.state, request.spec.info.calls
        self.device_index = device_index
        self.pool = pool
        # Of the rehearsal, then of the capture.
        self.log: CallLog | None = None
        self.buffers: Buffers | None = None
        self.ring: Ring | None = None

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
        buffers = self.buffers
        if self.calls:
            kept = {} if buffers is None else {"noted": buffers.noted, "ends": buffers.ends}
            self.log = CallLog(self.calls, self.device_index, **kept)
            model = functools.partial(model, **{NOTE: self.log})
        return model if buffers is None else buffers.until_end(model)

    def apply(self, raw_graph: int, placeholders: PlaceholderMap) -> ScheduleFacts | None:
        """Let calls of the captured graph run side by side, if the request says so."""
        state, log = self.state, self.log
        if log is None and state.schedule == CHAIN:
            return None
        try:
            if log is None:
                raise ValueError("what they use is not known")
            graph = Graph(raw_graph, log, Memory(PoolRanges(self.pool), placeholders), self.moving)
            return schedule_graph(graph, state.schedule, state.call_times_us, self._take_workspaces)
        except (DriverError, ValueError) as e:
            return ScheduleFacts(CHAIN, reason=Reason.of(Code.NOT_SCHEDULED, error=first_line(e)))

    def _more_bytes(self) -> int:
        """Return how many bytes a schedule may take beyond the chain."""
        return int(MORE_MEMORY * (torch.cuda.memory_reserved(self.device_index) + self.needed_bytes))

    def _take_workspaces(self, nbytes: int, count: int) -> list[int]:
        self.ring = ring_of(self.device_index, self.pool)
        _, total = torch.cuda.mem_get_info(self.device_index)
        return self.ring.take(nbytes, count, max(self._more_bytes(), int(total * WORKSPACES)))
