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
from torch._inductor.pygraph.capture import agreement
from torch._inductor.pygraph.compile.upstream import blocker_of_graph
from torch._inductor.pygraph.report import html, text
from torch._inductor.pygraph.types import journal
from torch._inductor.pygraph.types.reason import Code, log_line, Reason
from torch._inductor.pygraph.types.report import Blocker, GraphReport, ReportData


if TYPE_CHECKING:
    from torch._inductor.output_code import CompiledFxGraph


log = logging.getLogger(__name__)


class Report(ReportData):
    """The functions, graphs and graph breaks of one process. As a sequence, its functions."""

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
    return Report(journal.functions, journal.graphs, agreement.own_name(), breaks=journal.breaks)


def reset_report() -> None:
    journal.clear()


def new_graph(compiled: CompiledFxGraph) -> None:
    """Called when a graph was compiled, or came from a cache."""
    if "cuda" not in compiled.device_types:
        return
    info = compiled.graph_info
    partitions = list(info.reports or ()) if info is not None else []
    if compiled.disabled_cudagraphs_reason:
        blockers = [blocker_of_graph(compiled.disabled_cudagraphs_reason)]
    elif compiled.cudagraph_info is None:
        # cpp_wrapper, or a backward whose forward was skipped
        blockers = [Blocker("", Reason.of(Code.GRAPHS_OFF), "")]
    else:
        blockers = [*map(blocker_of_graph, compiled.cudagraph_info.cudagraph_fail_reasons)]
    kwargs = compiled.fx_kwargs
    mode = "backward" if kwargs["is_backward"] else "inference" if kwargs["is_inference"] else "forward"
    compile_id = str(CompileContext.current_compile_id() or "")
    device = torch.cuda.get_device_properties(min(compiled.device_idxs, default=0)).name
    source = next((p.source for p in (*blockers, *partitions) if p.source), "")
    journal.add(GraphReport(compile_id, mode, device, source, blockers, partitions))
    for b in blockers or [b for p in partitions for b in p.avoidable]:
        what = f"{b.op} is not captured" if b.op else "not captured"
        log.info("%s", log_line(b.source or source, f"{mode} {compile_id}", what, b.reason))
