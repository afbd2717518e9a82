"""
What PyGraph did with each compiled graph and each function, and why.

``report()`` returns it while the program runs. The structured trace (TORCH_TRACE, tlparse)
keeps it in artifacts named "pygraph_report". For a finished run::

    python -m torch._inductor.pygraph.report TRACE_DIRECTORY_OR_LOG_OR_JSON [--html FILE]
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch._guards import CompileContext
from torch._inductor.pygraph.compile.upstream import blocker_of_graph
from torch._inductor.pygraph.report import html, text
from torch._inductor.pygraph.report.data import ReportData
from torch._inductor.pygraph.types import journal
from torch._inductor.pygraph.types.reason import Code, log_line, Reason
from torch._inductor.pygraph.types.report import Blocker, GraphReport


if TYPE_CHECKING:
    from torch._inductor.output_code import CompiledFxGraph


log = logging.getLogger(__name__)


class Report(ReportData):
    """The functions and graphs of one process. As a sequence, its functions."""

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = 88) -> str:
        """Return the report for a terminal of that many columns."""
        return text.render(self, width)

    def html(self) -> str:
        """Return one page that needs no other file."""
        return html.render([self])


def report() -> Report:
    """What was seen since the process started or :func:`reset_report` was called."""
    return Report(journal.functions, journal.graphs)


def reset_report() -> None:
    journal.clear()


def new_graph(compiled: CompiledFxGraph) -> None:
    """Called when a graph was compiled, or came from a cache."""
    if "cuda" not in compiled.device_types:
        return
    info = compiled.graph_info
    partitions = list(info.reports or ()) if info is not None else []
    blockers = _blockers(compiled)
    device_index = min(compiled.device_idxs, default=0)
    entry = GraphReport(
        compile_id=str(CompileContext.current_compile_id() or ""),
        mode=_mode(compiled),
        device=torch.cuda.get_device_properties(device_index).name,
        source=next((p.source for p in (*blockers, *partitions) if p.source), ""),
        blockers=blockers,
        partitions=partitions,
    )
    journal.add(entry)
    log_uncaptured(entry)


def log_uncaptured(entry: GraphReport) -> None:
    """Log a line for the graph, or for each operator of it, that is not captured and could be."""
    graph = f"{entry.mode} {entry.compile_id}".strip()
    for b in entry.blockers or [b for p in entry.partitions for b in p.avoidable]:
        what = f"{b.op} is not captured" if b.op else "not captured"
        log.info("%s", log_line(b.source or entry.source, graph, what, b.reason))


def _mode(compiled: CompiledFxGraph) -> str:
    if compiled.fx_kwargs["is_backward"]:
        return "backward"
    return "inference" if compiled.fx_kwargs["is_inference"] else "forward"


def _blockers(compiled: CompiledFxGraph) -> list[Blocker]:
    """Return why nothing of a graph is captured."""
    if compiled.disabled_cudagraphs_reason:
        return [blocker_of_graph(compiled.disabled_cudagraphs_reason)]
    if compiled.cudagraph_info is None:
        # cpp_wrapper, or a backward whose forward was skipped
        return [Blocker("", Reason.of(Code.GRAPHS_OFF), "")]
    return [*map(blocker_of_graph, compiled.cudagraph_info.cudagraph_fail_reasons)]
