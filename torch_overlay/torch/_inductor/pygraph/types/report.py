"""
What a report holds: the graphs that were compiled and the functions that could be
captured.

Reports of other processes are read from JSON, so that all of it is plain data.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from torch._inductor.pygraph.types.candidate import COPY, NO_GRAPH, UNDECIDED
from torch._inductor.pygraph.types.reason import Reason
from torch.utils._ordered_set import OrderedSet


# The reason of a blocker that the user need not change: kernels that bring CPU values to the
# GPU run in front of the graph.
BRINGS_CPU_VALUES = "brings CPU values to the GPU"

# The reason of a blocker that copies in the other direction.
COPIES_TO_CPU = "copies a result of the GPU to the CPU"

# The key in a node's meta of the CpuValues that the node brings to the GPU.
CPU_VALUES = "pygraph_cpu_values"

_numbers = itertools.count()


@dataclasses.dataclass
class FunctionReport:
    """
    One function: a graph, or one partition of it, for one set of sizes.

    Attributes:
        mode: "forward", "backward" or "inference"
        choice: the candidate that is deployed, or UNDECIDED
        reasons: why, the latest last
        timings_us: median time of a call in microseconds by candidate, on the host or on the
            device, whichever is longer
        external_inputs: how many inputs trees would copy
        stock_copied_bytes: bytes that trees would copy at each replay
        copied_bytes: bytes that the chosen candidate copies at each replay
        kernel_nodes: nodes of the last recording, of any kind
        updated_nodes: nodes that the host sets when all external inputs moved
        source: the lines of the program
        compile_id: the name of its graph
        remembered: whether an earlier process measured it
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
    remembered: bool = dataclasses.field(default=False, repr=False)
    number: int = dataclasses.field(default_factory=lambda: next(_numbers), repr=False)

    @property
    def reason(self) -> str:
        return "; ".join(reason.text for reason in self.reasons)

    @property
    def is_graph(self) -> bool:
        return self.choice not in (NO_GRAPH, UNDECIDED)

    @property
    def bound_inputs(self) -> int:
        return self.external_inputs if self.is_graph and self.choice != COPY else 0

    @property
    def saved_us(self) -> float:
        """Microseconds that the choice saves in a call over no graph."""
        times = self.timings_us
        return times.get(NO_GRAPH, 0) - times.get(self.choice, times.get(NO_GRAPH, 0))

    @property
    def place(self) -> str:
        """Where the function is: lines of the program, mode, graph and partition."""
        where = self.source.partition(" in ")[0] or self.name
        return " ".join(filter(None, (where, self.mode, self.compile_id)))

    def line(self, outcome: str, *reasons: Reason) -> str:
        """Return a line for the log: place, outcome, code, text and what to do."""
        said = "; ".join(f"({reason.code.value}) {reason.text}" for reason in reasons)
        advice = next((f". {r.advice}" for r in reasons if r.advice), "")
        return f"{self.place}: {outcome} {said}{advice}"

    def as_json(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self),
            "reasons": [reason.as_json() for reason in self.reasons],
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> FunctionReport:
        """
        Raises:
            LookupError, TypeError, ValueError: another version wrote it.
        """
        reasons = [Reason.from_json(reason) for reason in content["reasons"]]
        return cls(**{**content, "reasons": reasons})


@dataclasses.dataclass(frozen=True)
class Blocker:
    """An operator that cannot be captured."""

    op: str
    reason: str
    source: str


@dataclasses.dataclass(frozen=True)
class CpuValue:
    """
    A value on the CPU that GPU code reads.

    Args:
        name: the name of the node in the graph
        how: the way in which it reaches the GPU; see compile/
    """

    name: str
    type: str
    how: str
    source: str


@dataclasses.dataclass(frozen=True)
class PartitionReport:
    """
    Consecutive kernels that are captured together or, if there are blockers, not at all.

    Args:
        cpu_values: the CPU values that these kernels read or bring to the GPU
    """

    kernels: int
    source: str
    blockers: tuple[Blocker, ...] = ()
    cpu_values: tuple[CpuValue, ...] = ()

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> PartitionReport:
        blockers = tuple(Blocker(**b) for b in content["blockers"])
        cpu_values = tuple(CpuValue(**v) for v in content["cpu_values"])
        return cls(**{**content, "blockers": blockers, "cpu_values": cpu_values})


@dataclasses.dataclass
class GraphReport:
    """
    One compiled graph.

    Attributes:
        skip_reason: why nothing of the graph is captured, or an empty string
        partitions: Inductor's partitions in their order
    """

    compile_id: str
    mode: str
    device: str
    skip_reason: str = ""
    source: str = ""
    partitions: list[PartitionReport] = dataclasses.field(default_factory=list)

    @property
    def cpu_values(self) -> OrderedSet[CpuValue]:
        return OrderedSet(v for p in self.partitions for v in p.cpu_values)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> GraphReport:
        """
        Raises:
            LookupError, TypeError: another version wrote it.
        """
        partitions = [PartitionReport.from_json(p) for p in content["partitions"]]
        return cls(**{**content, "partitions": partitions})
