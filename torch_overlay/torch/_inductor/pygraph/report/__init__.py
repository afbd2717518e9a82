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
from torch._inductor.pygraph.report import advice, html, text
from torch._inductor.pygraph.report.data import ReportData
from torch._inductor.pygraph.types import journal
from torch._inductor.pygraph.types.report import (
    BRINGS_CPU_VALUES,
    GraphReport,
)
from torch._inductor.pygraph.types.source import innermost
from torch.utils._ordered_set import OrderedSet


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
    name = f"{entry.compile_id or 'graph'} ({entry.mode})"
    if entry.skip_reason:
        why = f"{entry.skip_reason}. {advice.advice(entry.skip_reason)}"
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
            f"\n  {b.source}: {b.op}: {b.reason}. {advice.advice(b.reason)}" for b in blockers
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
