"""
From a captured graph, a row of nodes, to one whose calls wait for what they depend on. The nodes that were added since
the note before are a call's, and stay in a row. Nodes behind the last note belong to no call: they wait for all others.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple, TYPE_CHECKING

from torch._inductor.pygraph.graph.captured import is_kernel, move_words
from torch._inductor.pygraph.graph.driver import bindings, DriverError
from torch._inductor.pygraph.graph.edges import chain_of, change_edges
from torch._inductor.pygraph.schedule.buffers import MIN_GAIN
from torch._inductor.pygraph.schedule.dag import Call, critical_path, dependencies, width
from torch._inductor.pygraph.schedule.lanes import order
from torch._inductor.pygraph.schedule.notes import Apart, declared_call, NODE_US
from torch._inductor.pygraph.schedule.pointers import undeclared
from torch._inductor.pygraph.schedule.timeline import timeline
from torch._inductor.pygraph.schedule.workspaces import divided, MAX_PARTS, spread
from torch._inductor.pygraph.types.candidate import CHAIN, LANES
from torch._inductor.pygraph.types.reason import Code, first_line, Reason, RefusedError
from torch._inductor.pygraph.types.schedule import ScheduleFacts


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

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
    The units of a captured graph that is not instantiated, and what each uses. ``workspaces``: of libraries, and the
    call by which each was allocated.

    Raises:
        DriverError: the graph cannot be read.
        ValueError: its nodes are in no row, or not all of its calls were noted.
    """

    def __init__(
        self,
        raw_graph: int,
        log: CallLog,
        memory: Memory,
        moving: Collection[int],
        workspaces: Mapping[Range, int],
    ) -> None:
        self.graph = bindings().CUgraph(raw_graph)
        self.memory = memory
        self.moving = moving
        self.allocated = workspaces
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
        live = [extent for first, end, extent in self.lives.values() if first <= number < end]
        return live + [memory for memory, first in self.allocated.items() if first <= number]

    @functools.cached_property
    def others(self) -> list[set[Range] | None]:
        """What each unit uses besides what it declares, or None if that is not known."""
        found: list[set[Range] | None] = []
        for unit in self.units:
            if unit.call is None or unit.note is None or not unit.call.is_declared:
                found.append(None)
            else:
                declared = [use.memory for use in unit.note.uses]
                found.append(undeclared(unit.nodes, declared, self.memory, self._live(unit.note.number)))
        return found

    def workspaces(self) -> dict[Range, list[int]]:
        """Return the workspaces that several units use, and these units."""
        users: dict[Range, list[int]] = {}
        for i, (unit, others) in enumerate(zip(self.units, self.others)):
            if unit.call is not None and unit.call.has_workspace and all(map(is_kernel, unit.nodes)):
                for memory in self.allocated.keys() & (others or ()):
                    users.setdefault(memory, []).append(i)
        return {memory: units for memory, units in users.items() if len(units) > 1}

    def calls(self, apart: Apart | None = None, places: Mapping[tuple[int, Range], Range | None] | None = None) -> list[Call]:
        """Return what each unit uses. ``places`` is where workspaces come to lie; None counts as no memory."""
        found = []
        for i, (unit, others) in enumerate(zip(self.units, self.others)):
            if others is None or unit.note is None or unit.call is None:
                found.append(Call(is_barrier=True))
                continue
            moved = ((places or {}).get((i, memory), memory) for memory in others)
            found.append(declared_call(unit.note, unit.call, self.moving, {*filter(None, moved)}, apart))
        return found

    def times(self, times_us: Mapping[int, float]) -> list[float]:
        """Return the time of each unit, given the times of calls."""
        return [
            times_us.get(unit.note.number if unit.note else -1, NODE_US * len(unit.nodes)) for unit in self.units
        ]

    def edges(self, waits: Waits) -> set[Edge]:
        """Return the edges between units."""
        first, last = ([int(unit.nodes[end]) for unit in self.units] for end in (0, -1))
        return {(last[before], first[i]) for i, mine in enumerate(waits) for before in mine}


def schedule_graph(
    graph: Graph, schedule: str, times_us: Mapping[int, float], used: Callable[[list[Unit], Range], int]
) -> ScheduleFacts:
    """
    Give a graph the order of a schedule, and return facts about the schedule.

    Args:
        used: returns how many of the first bytes of a workspace some units use

    Raises:
        RefusedError: the graph is of no use.
    """
    times = graph.times(times_us)
    if schedule == CHAIN:
        # What another schedule could do; see buffers.py and workspaces.py.
        none = {(i, memory): None for memory, users in graph.workspaces().items() for i in users}
        waits = dependencies(graph.calls(Apart(graph.notes), none))
        return ScheduleFacts(CHAIN, sum(times), critical_path(waits, times), width(waits))
    places = _divide_workspaces(graph, schedule, times, used)
    waits = dependencies(graph.calls(places=places))
    facts = ScheduleFacts(CHAIN, sum(times), critical_path(waits, times), width(waits))
    try:
        for (i, memory), (start, _) in places.items():
            for node in graph.units[i].nodes if start != memory[0] else ():
                move_words(node, memory, start)
    except DriverError as e:
        raise RefusedError(Reason.of(Code.DRIVER, error=str(e))) from e
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


def _divide_workspaces(
    graph: Graph, schedule: str, times: list[float], used: Callable[[list[Unit], Range], int]
) -> dict[tuple[int, Range], Range]:
    """Return (unit, workspace) -> the part of it that the unit takes."""
    places: dict[tuple[int, Range], Range] = {}
    for memory, users in graph.workspaces().items():
        none = {(i, memory): None for i in users}
        waits, without = (dependencies(graph.calls(places=p)) for p in (places, {**places, **none}))
        if critical_path(waits, times) < MIN_GAIN * critical_path(without, times):
            continue
        parts = divided(memory, used([graph.units[i] for i in users], memory), LANES.get(schedule, MAX_PARTS))
        for i, k in spread(without, users, times, len(parts)).items():
            places[i, memory] = parts[k]
    return places
