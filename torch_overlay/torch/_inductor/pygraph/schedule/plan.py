"""
From a captured graph, a row of nodes, to one whose calls wait for what they depend on.

Generated code notes each call while it is captured (CallLog). The nodes that were added since the note
before are the call's. They stay in a row. Nodes behind the last note belong to no call: they wait for
all others.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple, TYPE_CHECKING

from torch._inductor.pygraph.graph.driver import bindings, DriverError
from torch._inductor.pygraph.graph.edges import capturing_graph, chain_of, change_edges, count_nodes
from torch._inductor.pygraph.graph.placeholder import storage_extent
from torch._inductor.pygraph.schedule.dag import Access, Call, critical_path, dependencies, width
from torch._inductor.pygraph.schedule.lanes import order
from torch._inductor.pygraph.schedule.pointers import Memory, Range, undeclared
from torch._inductor.pygraph.types.candidate import CHAIN
from torch._inductor.pygraph.types.reason import Code, first_line, Reason
from torch._inductor.pygraph.types.schedule import ScheduleFacts


if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch._inductor.pygraph.graph.edges import Edge
    from torch._inductor.pygraph.schedule.dag import Waits
    from torch._inductor.pygraph.types.calls import CallInfo, Operand

# What a node is taken to take if it was not timed.
NODE_US = 3.0


class Note(NamedTuple):
    """
    A call that was captured.

    Attributes:
        end: how many nodes the graph had behind it
        ranges: (operand, memory) of each tensor
    """

    number: int
    end: int
    ranges: list[tuple[Operand, Range]]


class CallLog:
    """
    Called by generated code behind each call while it is captured.

    Args:
        calls: of the function
    """

    def __init__(self, calls: Sequence[CallInfo], device_index: int) -> None:
        self.calls = calls
        self.device_index = device_index
        self.notes: list[Note] = []

    def __call__(self, number: int, *values: Any) -> None:
        operands = self.calls[number].operands
        ranges = [
            (operand, (start, start + nbytes))
            for operand, value in zip(operands, values, strict=True)
            for start, nbytes in _memory(value, is_input=operand.input is not None)
            if nbytes
        ]
        self.notes.append(Note(number, count_nodes(capturing_graph(self.device_index)), ranges))


def _memory(value: Any, *, is_input: bool) -> list[Range]:
    """Return (address, bytes) of a tensor, or of the tensors that an operator returned."""
    if isinstance(value, (list, tuple)):
        return [found for v in value for found in _memory(v, is_input=is_input)]
    if not hasattr(value, "untyped_storage") or not value.is_cuda:
        return []
    if is_input:
        # A kernel may read more of it than the tensor has.
        storage = value.untyped_storage()
        return [(storage.data_ptr(), storage.nbytes())]
    return [(value.data_ptr(), storage_extent(value))]


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
        if [note.number for note in log.notes] != [*range(len(log.calls))]:
            raise ValueError("the code did not call what it describes")
        bounds = [0, *(note.end for note in log.notes), len(nodes)]
        noted = [*zip(log.notes, log.calls), (None, None)]
        self.units = [
            Unit(nodes[start:end], note, call)
            for (start, end), (note, call) in zip(itertools.pairwise(bounds), noted)
            if end > start
        ]
        self.nodes = nodes
        self._find_lives()

    def _find_lives(self) -> None:
        """Note where each buffer lies, and from which unit to which it is certain to live."""
        self.lives: dict[str, tuple[int, int, set[Range]]] = {}
        for i, unit in enumerate(self.units):
            for operand, memory in unit.note.ranges if unit.note is not None else ():
                first, _, ranges = self.lives.get(operand.buffer, (i, i, set()))
                self.lives[operand.buffer] = first, i, ranges | {memory}

    def _live(self, i: int) -> list[Range]:
        return [r for first, last, ranges in self.lives.values() if first <= i <= last for r in ranges]

    def calls(self) -> list[Call]:
        """Return what each unit uses."""
        return [self._call(i, unit) for i, unit in enumerate(self.units)]

    def _call(self, i: int, unit: Unit) -> Call:
        if unit.call is None or unit.note is None or not unit.call.is_declared:
            return Call(is_barrier=True)
        ranges = unit.note.ranges
        others = undeclared(unit.nodes, [memory for _, memory in ranges], self.memory, self._live(i))
        if others is None:
            return Call(is_barrier=True)
        accesses = [Access(*memory, o.writes, o.input, o.input in self.moving) for o, memory in ranges]
        accesses += [Access(*memory, writes=True) for memory in sorted(others)]
        return Call(tuple(accesses), frozenset(unit.call.resources))

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
    waits = dependencies(graph.calls())
    facts = ScheduleFacts(CHAIN, sum(times), critical_path(waits, times), width(waits))
    if schedule == CHAIN:
        return facts
    chain = graph.edges(order(CHAIN, waits, times))
    wanted = graph.edges(order(schedule, waits, times))
    try:
        # What fails leaves an order that is stricter.
        change_edges(graph.graph, graph.nodes, wanted - chain, chain - wanted)
    except DriverError as e:
        return dataclasses.replace(facts, reason=Reason.of(Code.NOT_SCHEDULED, error=first_line(e)))
    return dataclasses.replace(facts, schedule=schedule)
