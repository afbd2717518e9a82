"""
From a captured graph, a row of nodes, to one whose calls wait for what they depend on.

Generated code notes each call while it is captured (notes.py). The nodes that were added since the note
before are the call's. They stay in a row. Nodes behind the last note belong to no call: they wait for
all others.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple, TYPE_CHECKING

from torch._inductor.pygraph.graph.driver import bindings, DriverError
from torch._inductor.pygraph.graph.edges import chain_of, change_edges
from torch._inductor.pygraph.schedule.dag import Call, critical_path, dependencies, width
from torch._inductor.pygraph.schedule.lanes import order
from torch._inductor.pygraph.schedule.notes import Apart, declared_call, NODE_US
from torch._inductor.pygraph.schedule.pointers import undeclared
from torch._inductor.pygraph.schedule.timeline import timeline
from torch._inductor.pygraph.types.candidate import CHAIN
from torch._inductor.pygraph.types.reason import Code, first_line, Reason
from torch._inductor.pygraph.types.schedule import ScheduleFacts


if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch._inductor.pygraph.graph.edges import Edge
    from torch._inductor.pygraph.schedule.dag import Waits
    from torch._inductor.pygraph.schedule.notes import CallLog, Note
    from torch._inductor.pygraph.schedule.pointers import Memory, Range
    from torch._inductor.pygraph.types.calls import CallInfo
    from torch.multiprocessing.reductions import StorageWeakRef


class Unit(NamedTuple):
    """The nodes of a call. Nodes without a note are a unit without a call."""

    nodes: list[Any]
    note: Note | None
    call: CallInfo | None


class Graph:
    """
    The units of a captured graph, and what each uses.

    Args:
        raw_graph: not instantiated
        moving: inputs that lie elsewhere in another call

    Raises:
        DriverError: the graph cannot be read.
        ValueError: its nodes are in no row, or not all of its calls were noted.
    """

    def __init__(self, raw_graph: int, log: CallLog, memory: Memory, moving: Collection[int]) -> None:
        self.graph = bindings().CUgraph(raw_graph)
        self.memory = memory
        self.moving = moving
        nodes = chain_of(self.graph)
        if nodes is None:
            raise ValueError("its nodes are captured from several streams")
        if not log.is_complete:
            raise ValueError("the code did not call what it describes")
        bounds = [0, *(note.end for note in log.notes), len(nodes)]
        noted = [*zip(log.notes, log.calls), (None, None)]
        self.units = [
            Unit(nodes[start:end], note, call)
            for (start, end), (note, call) in zip(itertools.pairwise(bounds), noted)
            if end > start
        ]
        self.nodes = nodes
        self.notes = log.notes
        # (the first call, behind the last call) between which a storage is certain to live.
        self.lives: dict[StorageWeakRef, tuple[int, int, Range]] = {}
        for note in log.notes:
            for use in note.uses:
                first, *_ = self.lives.get(use.storage, (note.number,))
                self.lives[use.storage] = first, log.ends.get(use.storage, note.number + 1), use.extent

    def _live(self, number: int) -> list[Range]:
        return [extent for first, end, extent in self.lives.values() if first <= number < end]

    def calls(self, apart: Apart | None = None) -> list[Call]:
        """
        Return what each unit uses.

        Args:
            apart: gives buffers memory of their own, if any does
        """
        return [self._call(unit, apart) for unit in self.units]

    def _call(self, unit: Unit, apart: Apart | None) -> Call:
        if unit.call is None or unit.note is None or not unit.call.is_declared:
            return Call(is_barrier=True)
        declared = [use.memory for use in unit.note.uses]
        others = undeclared(unit.nodes, declared, self.memory, self._live(unit.note.number))
        if others is None:
            return Call(is_barrier=True)
        return declared_call(unit.note, unit.call, self.moving, others, apart)

    def times(self, times_us: Mapping[int, float]) -> list[float]:
        """Return the time of each unit, given the times of calls."""
        return [
            times_us.get(unit.note.number if unit.note else -1, NODE_US * len(unit.nodes)) for unit in self.units
        ]

    def edges(self, waits: Waits) -> set[Edge]:
        """Return the edges between units."""
        first, last = ([int(unit.nodes[end]) for unit in self.units] for end in (0, -1))
        return {(last[before], first[i]) for i, mine in enumerate(waits) for before in mine}


def schedule_graph(graph: Graph, schedule: str, times_us: Mapping[int, float]) -> ScheduleFacts:
    """
    Give a graph the order of a schedule, and return what is known of it.

    Args:
        times_us: time of each call that was timed
    """
    times = graph.times(times_us)
    # Another schedule has other memory; see buffers.py.
    waits = dependencies(graph.calls(Apart(graph.notes) if schedule == CHAIN else None))
    facts = ScheduleFacts(CHAIN, sum(times), critical_path(waits, times), width(waits))
    if schedule == CHAIN:
        return facts
    chain = graph.edges(order(CHAIN, waits, times))
    ordered = order(schedule, waits, times)
    wanted = graph.edges(ordered)
    try:
        # What fails leaves an order that is stricter.
        change_edges(graph.graph, graph.nodes, wanted - chain, chain - wanted)
    except DriverError as e:
        return dataclasses.replace(facts, reason=Reason.of(Code.NOT_SCHEDULED, error=first_line(e)))
    names = [unit.call.name if unit.call else "" for unit in graph.units]
    return dataclasses.replace(facts, schedule=schedule, timeline=timeline(names, ordered, times))
