"""What a report holds. All of it is plain data, because reports of other processes are read from JSON."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any, TYPE_CHECKING

from torch._inductor.pygraph.types.candidate import Candidate, CHAIN, COPY, NO_GRAPH, UNDECIDED
from torch._inductor.pygraph.types.reason import Code, log_line, Reason
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch._inductor.pygraph.types.schedule import ScheduledCall


# The key in a node's meta of the CpuValues that the node brings to the GPU.
CPU_VALUES = "pygraph_cpu_values"

_numbers = itertools.count()


@dataclasses.dataclass
class FunctionReport:
    """
    One function: a graph, or one partition of it, for one set of sizes.

    Attributes:
        choice, reasons: the candidate that is deployed, or UNDECIDED, and why, the latest last
        timings_us: median time of a call by candidate, on the host or on the device, whichever is longer
        external_inputs, stock_copied_bytes: what trees would copy at each replay
        copied_bytes: what the chosen candidate copies at each replay
        kernel_nodes: nodes of the last recording, of any kind
        updated_nodes: nodes that the host sets when all external inputs moved
        collectives: what waits for other ranks, and for which
        remembered: whether an earlier process measured it
        calls_us, critical_us: time of all calls, and of the longest that wait for one another
        width: the most calls that may run side by side; 0 if that is not known
        timeline: the first calls of its schedule, unless they are in a row
        pool_bytes: what the graphs' pool reserves with each candidate, if schedules were timed
        buckets: the largest sizes of its recordings for many sizes
        by_size: why a function whose sizes vary has a recording for each
        num_sizes, calls, captured_calls: of a function that is recorded so, how many sizes came, and
            how many calls once it was recorded
    """

    name: str
    mode: str
    choice: str = UNDECIDED
    reasons: list[Reason] = dataclasses.field(default_factory=list)
    timings_us: dict[str, float] = dataclasses.field(default_factory=dict)
    external_inputs: int = 0
    stock_copied_bytes: int = 0
    copied_bytes: int = 0
    kernel_nodes: int = 0
    updated_nodes: int = 0
    source: str = dataclasses.field(default="", repr=False)
    compile_id: str = dataclasses.field(default="", repr=False)
    sizes: list[int] = dataclasses.field(default_factory=list, repr=False)
    collectives: list[str] = dataclasses.field(default_factory=list, repr=False)
    remembered: bool = dataclasses.field(default=False, repr=False)
    schedule: str = dataclasses.field(default=CHAIN, repr=False)
    calls_us: float = dataclasses.field(default=0.0, repr=False)
    critical_us: float = dataclasses.field(default=0.0, repr=False)
    width: int = dataclasses.field(default=0, repr=False)
    timeline: list[ScheduledCall] = dataclasses.field(default_factory=list, repr=False)
    pool_bytes: dict[str, int] = dataclasses.field(default_factory=dict, repr=False)
    number: int = dataclasses.field(default_factory=lambda: next(_numbers), repr=False)
    buckets: list[list[int]] = dataclasses.field(default_factory=list, repr=False)
    by_size: str = dataclasses.field(default="", repr=False)
    num_sizes: int = dataclasses.field(default=0, repr=False)
    calls: int = dataclasses.field(default=0, repr=False)
    captured_calls: int = dataclasses.field(default=0, repr=False)

    @property
    def reason(self) -> str:
        return "; ".join(reason.text for reason in self.reasons)

    @property
    def is_graph(self) -> bool:
        return self.choice not in (NO_GRAPH, UNDECIDED)

    @property
    def candidate(self) -> str:
        """The key of the choice in ``timings_us``."""
        return str(Candidate(self.choice, self.schedule)) if self.is_graph else self.choice

    @property
    def bound_inputs(self) -> int:
        return self.external_inputs if self.is_graph and self.choice != COPY else 0

    @property
    def saved_us(self) -> float:
        """Microseconds that the choice saves in a call over no graph."""
        times = self.timings_us
        return times.get(NO_GRAPH, 0) - times.get(self.candidate, times.get(NO_GRAPH, 0))

    def line(self, outcome: str, *reasons: Reason) -> str:
        function = " ".join(filter(None, (self.mode, self.compile_id)))
        return log_line(self.source or self.name, function, outcome, *reasons)


@dataclasses.dataclass(frozen=True)
class Blocker:
    """An operator that cannot be captured."""

    op: str
    reason: Reason
    source: str


@dataclasses.dataclass(frozen=True)
class CpuValue:
    """A value on the CPU that GPU code reads, and how it reaches the GPU; see compile/placement.py."""

    name: str
    type: str
    how: str
    source: str


@dataclasses.dataclass(frozen=True)
class PartitionReport:
    """Consecutive kernels that are captured together or, if there are blockers, not at all."""

    kernels: int
    source: str
    blockers: tuple[Blocker, ...] = ()
    cpu_values: tuple[CpuValue, ...] = ()

    @property
    def avoidable(self) -> list[Blocker]:
        """The blockers that the user can change. CPU values reach the GPU ahead of the graph."""
        return [b for b in self.blockers if b.reason.code != Code.BRINGS_CPU_VALUES]


@dataclasses.dataclass
class GraphReport:
    """One compiled graph. With ``blockers`` nothing of it is captured."""

    compile_id: str
    mode: str
    device: str
    source: str = ""
    blockers: list[Blocker] = dataclasses.field(default_factory=list)
    partitions: list[PartitionReport] = dataclasses.field(default_factory=list)

    @property
    def cpu_values(self) -> OrderedSet[CpuValue]:
        return OrderedSet(v for p in self.partitions for v in p.cpu_values)


@dataclasses.dataclass(frozen=True)
class BreakReport:
    """A place at which Dynamo breaks the graph without PyGraph, and with it unless ``is_repaired``."""

    source: str
    reason: Reason
    is_repaired: bool
    compile_id: str = dataclasses.field(default="", compare=False)


def as_json(entry: Any) -> dict[str, Any]:
    """Return what json.dumps should write for a report or a part of one."""
    return entry.as_json() if isinstance(entry, Reason) else vars(entry)


class ReportData(list[FunctionReport]):
    """The functions of one process, its graphs, and its graph breaks."""

    def __init__(
        self,
        functions: Iterable[FunctionReport],
        graphs: Iterable[GraphReport],
        title: str = "",
        breaks: Iterable[BreakReport] = (),
    ) -> None:
        super().__init__(functions)
        self.graphs = list(graphs)
        self.breaks = list(breaks)
        self.title = title

    def by_gain(self) -> list[FunctionReport]:
        """Return the functions: those that save most first, then those that take longest."""
        return sorted(self, key=lambda f: (-f.saved_us, -max(f.timings_us.values(), default=0)))

    def json(self) -> str:
        content = {"title": self.title, "functions": [*self], "graphs": self.graphs}
        if self.breaks:
            content["breaks"] = self.breaks
        return json.dumps(content, indent=1, default=as_json)
