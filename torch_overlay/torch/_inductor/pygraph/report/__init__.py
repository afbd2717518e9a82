"""
What PyGraph did with each graph that was compiled and each function that trees could
record, and why.

report() has it while the program runs, and the structured trace (TORCH_TRACE, tlparse)
keeps it as artifacts named "pygraph_report". Of a finished run::

    python -m torch._inductor.pygraph.report TRACE_DIRECTORY_OR_LOG_OR_JSON [--html FILE]

text, html    what a report looks like
advice        what the user could change about a reason
trace         from the structured trace and JSON to a report
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
import re
from collections.abc import Sequence
from typing import Any, overload, TYPE_CHECKING

import torch
from torch._guards import CompileContext, CompileId
from torch._inductor.pygraph.types.partition import Blocker, CpuValue, PartitionReport
from torch._logging import trace_structured
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.scheduler import BaseSchedulerNode


NO_GRAPH = "no_graph"
COPY = "copy"
NODE_UPDATE = "node_update"
PRELUDE = "prelude"
TABLE = "table"

UNDECIDED = "undecided"

ARTIFACT = "pygraph_report"

# Why something is not captured that nobody has to change anything about; see transform.py.
BRINGS_CPU_VALUES = "brings CPU values to the GPU"

# Of a copy in the other direction.
COPIES_TO_CPU = "copies a result of the GPU to the CPU"

# Where nodes of a graph keep the CpuValues that they bring there.
CPU_VALUES = "pygraph_cpu_values"

log = logging.getLogger(__name__)

_numbers = itertools.count()


@dataclasses.dataclass
class FunctionReport:
    """
    One function (a graph, or one partition of it, for one set of sizes).

    Times are microseconds a call of the function by itself, on the host or on the device,
    whichever is longer (medians); bytes are per replay. ``stock_copied_bytes`` is what
    cudagraph trees would copy, ``copied_bytes`` what the chosen candidate does.
    ``kernel_nodes`` are the nodes of the last recording, of any kind, ``updated_nodes``
    those that the host sets when all external inputs moved. Both bytes and nodes are 0 until it is recorded.

    ``source`` is where it is in the program, ``compile_id`` names its graph, and
    ``remembered`` says that an earlier process measured it.
    """

    name: str
    mode: str
    choice: str = UNDECIDED
    reason: str = ""
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
    def is_graph(self) -> bool:
        return self.choice not in (NO_GRAPH, UNDECIDED)

    @property
    def bound_inputs(self) -> int:
        return self.external_inputs if self.is_graph and self.choice != COPY else 0

    @property
    def saved_us(self) -> float:
        "What the choice saves in a call over no graph."
        times = self.timings_us
        return times.get(NO_GRAPH, 0) - times.get(self.choice, times.get(NO_GRAPH, 0))


@dataclasses.dataclass
class GraphReport:
    """
    One compiled graph. ``skip_reason`` is why all of it is not captured, if so;
    ``partitions`` are those of Inductor, in their order.
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


class Report(Sequence[FunctionReport]):
    """The functions and graphs of one process; as a sequence, its functions."""

    def __init__(
        self,
        functions: Iterable[FunctionReport],
        graphs: Iterable[GraphReport],
        title: str = "",
    ) -> None:
        self.functions = list(functions)
        self.graphs = list(graphs)
        self.title = title

    def __len__(self) -> int:
        return len(self.functions)

    @overload
    def __getitem__(self, index: int) -> FunctionReport: ...

    @overload
    def __getitem__(self, index: slice) -> list[FunctionReport]: ...

    def __getitem__(self, index: int | slice) -> FunctionReport | list[FunctionReport]:
        return self.functions[index]

    def __str__(self) -> str:
        return self.text()

    def by_gain(self) -> list[FunctionReport]:
        "What saves most first, then what takes longest."
        return sorted(
            self.functions,
            key=lambda f: (-f.saved_us, -max(f.timings_us.values(), default=0)),
        )

    def text(self, width: int = 88) -> str:
        """For a terminal of that many columns."""
        from torch._inductor.pygraph.report.text import render

        return render(self, width)

    def html(self) -> str:
        """One page that needs no other file."""
        from torch._inductor.pygraph.report.html import render

        return render([self])

    def json(self) -> str:
        content = {
            "title": self.title,
            "functions": [dataclasses.asdict(f) for f in self.functions],
            "graphs": [dataclasses.asdict(g) for g in self.graphs],
        }
        return json.dumps(content, indent=1)


_functions: list[FunctionReport] = []
_graphs: list[GraphReport] = []


def report() -> Report:
    """What was seen since the process started or :func:`reset_report` was called."""
    return Report(_functions, _graphs)


def reset_report() -> None:
    _functions.clear()
    _graphs.clear()


def new_report(name: str, mode: str, **facts: Any) -> FunctionReport:
    entry = FunctionReport(name, mode, **facts)
    _functions.append(entry)
    publish(entry)
    return entry


def drop_reports(entries: Iterable[FunctionReport]) -> None:
    numbers = OrderedSet(entry.number for entry in entries)
    _functions[:] = [f for f in _functions if f.number not in numbers]


def publish(entry: FunctionReport | GraphReport) -> None:
    """Writes to the structured trace; of one function, the last that is written holds."""
    kind = "function" if isinstance(entry, FunctionReport) else "graph"
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": ARTIFACT, "encoding": "json"},
        payload_fn=lambda: json.dumps({kind: dataclasses.asdict(entry)}),
        expect_trace_id=False,
        compile_id=CompileId.from_string(entry.compile_id or None),
    )


def new_graph(compiled: CompiledFxGraph) -> None:
    """Called when a graph was compiled, or came from a cache."""
    if "cuda" not in compiled.device_types:
        return
    skip_reason, _, trace = _skip_reason(compiled).partition("Found from")
    info = compiled.graph_info
    partitions = list(info.reports or ()) if info is not None else []
    device_index = min(compiled.device_idxs, default=0)
    entry = GraphReport(
        compile_id=str(CompileContext.current_compile_id() or ""),
        mode=_mode(compiled),
        device=torch.cuda.get_device_properties(device_index).name,
        skip_reason=skip_reason.removeprefix("skipping cudagraphs due to ").strip(". "),
        source=innermost(trace) or next((p.source for p in partitions if p.source), ""),
        partitions=partitions,
    )
    _graphs.append(entry)
    publish(entry)
    log_uncaptured(entry)


def log_uncaptured(entry: GraphReport) -> None:
    """Logs what of a graph is not captured, and the lines of the program that it is."""
    from torch._inductor.pygraph.report.advice import advice

    name = f"{entry.compile_id or 'graph'} ({entry.mode})"
    if entry.skip_reason:
        why = f"{entry.skip_reason}. {advice(entry.skip_reason)}"
        log.info("%s is not captured: %s: %s", name, entry.source, why)
        return
    blockers = OrderedSet(
        blocker
        for partition in entry.partitions
        for blocker in partition.blockers
        if blocker.reason != BRINGS_CPU_VALUES
    )
    if blockers:
        captured = sum(not partition.blockers for partition in entry.partitions)
        lines = (
            f"\n  {b.source}: {b.op}: {b.reason}. {advice(b.reason)}" for b in blockers
        )
        log.info("%s, graphs: %d, not captured:%s", name, captured, "".join(lines))


def _mode(compiled: CompiledFxGraph) -> str:
    if compiled.fx_kwargs["is_backward"]:
        return "backward"
    return "inference" if compiled.fx_kwargs["is_inference"] else "forward"


def _skip_reason(compiled: CompiledFxGraph) -> str:
    if compiled.disabled_cudagraphs_reason:
        return compiled.disabled_cudagraphs_reason
    if compiled.cudagraph_info is None:
        # cpp_wrapper, or a backward whose forward was skipped
        return "CUDA graphs were off when it was compiled"
    return ", ".join(compiled.cudagraph_info.cudagraph_fail_reasons)


def describe_partition(
    nodes: Sequence[BaseSchedulerNode],
    why_not: Callable[[BaseSchedulerNode], str | None],
) -> PartitionReport:
    """
    Args:
        nodes: the partition
        why_not: why a node cannot be captured, None if it can
    """
    from torch._inductor.scheduler import NopKernelSchedulerNode

    kernels = [node for node in nodes if not isinstance(node, NopKernelSchedulerNode)]
    blockers = OrderedSet(
        Blocker(_op(node), reason, innermost(next(iter(_traces(node)), "")))
        for node in kernels
        if (reason := why_not(node)) is not None
    )
    return PartitionReport(
        kernels=sum(why_not(node) != BRINGS_CPU_VALUES for node in kernels),
        source=span(trace for node in kernels for trace in _traces(node)),
        blockers=tuple(sorted(blockers, key=lambda b: (b.source, b.op))),
        cpu_values=tuple(
            OrderedSet(
                value
                for node in kernels
                for origin in _all_origins(node)
                for value in origin.meta.get(CPU_VALUES, ())
            )
        ),
    )


def _traces(node: BaseSchedulerNode) -> list[str]:
    "Stack traces of the operators that became a node."
    return [o.stack_trace for o in _origins(node) if o.stack_trace]


def _origins(node: BaseSchedulerNode) -> list[torch.fx.Node]:
    """
    Without the copies to the GPU, which Inductor adds to the origins of what they read, and
    of a copy to the CPU without the origins of what it reads.
    """
    from torch._inductor.ir import DeviceCopy

    origins = [
        origin
        for origin in _all_origins(node)
        if getattr(origin.target, "namespace", None) != "pygraph"
    ]
    if isinstance(node.node, DeviceCopy):
        put = torch.ops.prims.device_put.default
        origins = [o for o in origins if o.target is put] or origins
    return origins


def _all_origins(node: BaseSchedulerNode) -> Iterator[torch.fx.Node]:
    for part in node.get_nodes():
        if part.node is not None:
            yield from part.node.get_origins()


def _op(node: BaseSchedulerNode) -> str:
    ops = dict.fromkeys(
        str(origin.target) for origin in _origins(node) if origin.op == "call_function"
    )
    return ", ".join(ops) or type(node.node).__name__


_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')
_TORCH = os.path.dirname(torch.__file__)


def _frames(trace: str) -> list[tuple[str, int, str]]:
    "(file, line, function) of a stack trace, outermost first; torch's own if no others."
    frames = [(f, int(line), fn) for f, line, fn in _FRAME.findall(trace)]
    return [f for f in frames if not f[0].startswith(_TORCH + os.sep)] or frames


def innermost(trace: str) -> str:
    """The line of the program that a stack trace ends in: "file:line in function"."""
    frames = _frames(trace)
    if not frames:
        return ""
    file, line, function = frames[-1]
    return f"{file}:{line} in {function}"


def span(traces: Iterable[str | None]) -> str:
    """
    The lines of the compiled function that stack traces go through: "file:first-last in
    function", of the function that most of them belong to.
    """
    lines: dict[tuple[str, str], list[int]] = {}
    for trace in traces:
        if frames := _frames(trace or ""):
            file, line, function = frames[0]
            lines.setdefault((file, function), []).append(line)
    if not lines:
        return ""
    (file, function), found = max(lines.items(), key=lambda item: len(item[1]))
    first, last = min(found), max(found)
    where = f"{first}" if first == last else f"{first}-{last}"
    return f"{file}:{where} in {function}"
