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

import json
import logging
from collections.abc import Sequence
from typing import overload, TYPE_CHECKING

import torch
from torch._guards import CompileContext
from torch._inductor.pygraph.types import journal
from torch._inductor.pygraph.types.report import (
    BRINGS_CPU_VALUES,
    FunctionReport,
    GraphReport,
)
from torch._inductor.pygraph.types.source import innermost
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch._inductor.output_code import CompiledFxGraph


log = logging.getLogger(__name__)


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
            "functions": [f.as_json() for f in self.functions],
            "graphs": [g.as_json() for g in self.graphs],
        }
        return json.dumps(content, indent=1)


def report() -> Report:
    """What was seen since the process started or :func:`reset_report` was called."""
    return Report(journal.functions, journal.graphs)


def reset_report() -> None:
    journal.clear()


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
    journal.add(entry)
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
