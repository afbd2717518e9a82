"""A report as text."""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from typing import NamedTuple, TYPE_CHECKING

from torch._inductor.pygraph.types.candidate import (
    COPY,
    NO_GRAPH,
    NODE_UPDATE,
    PRELUDE,
    TABLE,
    UNDECIDED,
)


if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch._inductor.pygraph.report.data import ReportData
    from torch._inductor.pygraph.types.report import Blocker, FunctionReport, GraphReport


LABELS = {
    NO_GRAPH: "no graph",
    COPY: "graph, inputs copied",
    NODE_UPDATE: "graph, inputs bound",
    PRELUDE: "graph, inputs bound by a prelude",
    TABLE: "graph, inputs bound by a table",
    UNDECIDED: "undecided",
}


def label(candidate: str) -> str:
    return LABELS.get(candidate, candidate)


def format_us(us: float) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= 0.9995 * size:
            return f"{us / size:.3g} {unit}"
    return f"{us:.3g} us"


def format_bytes(nbytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes} B"


def plural(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def shorten(source: str) -> str:
    "The last two components of a path: enough to know it by."
    path, colon, rest = source.partition(":")
    return os.sep.join(path.split(os.sep)[-2:]) + colon + rest


def place(entry: FunctionReport | GraphReport) -> str:
    return shorten(entry.source) or "(unknown source)"


def which(f: FunctionReport) -> str:
    """What tells a function from others of the same source."""
    parts = [f.mode]
    if f.compile_id:
        parts.append(f"graph {f.compile_id}")
    parts.append(f.name)
    if f.sizes:
        parts.append(f"sizes {', '.join(map(str, f.sizes))}")
    return ", ".join(parts)


def reason(f: FunctionReport) -> str:
    if f.choice == UNDECIDED:
        return "it was not called often enough to be measured"
    return f.reason + (" (by an earlier process)" if f.remembered else "")


def facts(f: FunctionReport) -> str:
    """What was recorded, empty if nothing was."""
    parts = []
    if f.kernel_nodes:
        parts.append(f"{plural(f.kernel_nodes, 'node')} captured")
    if f.is_graph and f.external_inputs:
        inputs = plural(f.external_inputs, "external input")
        parts.append(f"{f.bound_inputs} of {inputs} bound")
    if f.bound_inputs:
        parts.append(f"{plural(f.updated_nodes, 'node')} updated")
    return ", ".join(parts)


def totals(report: ReportData) -> tuple[float, float, int, int]:
    """
    Of a call of each function: microseconds without graphs and as chosen, where both are
    known, and bytes that stock CUDA graphs and the chosen candidates copy.
    """
    known = [f for f in report if f.choice in f.timings_us and NO_GRAPH in f.timings_us]
    graphs = [f for f in report if f.is_graph]
    return (
        sum(f.timings_us[NO_GRAPH] for f in known),
        sum(f.timings_us[f.choice] for f in known),
        sum(f.stock_copied_bytes for f in graphs),
        sum(f.copied_bytes for f in graphs),
    )


def _which_graph(g: GraphReport) -> str:
    return f"{g.mode}, graph {g.compile_id}" if g.compile_id else g.mode


class Skipped(NamedTuple):
    """Kernels that Inductor keeps out of functions: reasons, and what to change."""

    where: str
    which: str
    reasons: list[str]
    changes: list[str]


def skipped(report: ReportData) -> Iterator[Skipped]:
    for g in report.graphs:
        which = _which_graph(g)
        if g.blockers:
            yield _skip(place(g), f"{which}, all of it", g.blockers)
            continue
        for p in g.partitions:
            if p.avoidable:
                yield _skip(shorten(p.source) or place(g), f"{which}, {plural(p.kernels, 'kernel')}", p.avoidable)


def _skip(where: str, which: str, blockers: list[Blocker]) -> Skipped:
    reasons = []
    for b in blockers:
        at = f" at {shorten(b.source) or 'an unknown place'}" if b.op else ""
        reasons.append(f"{b.op} {b.reason.text}{at} ({b.reason.code.name})".strip())
    changes = dict.fromkeys(b.reason.advice for b in blockers)
    return Skipped(where, which, reasons, [change for change in changes if change])


class Placed(NamedTuple):
    """What GPU code of one graph reads of the CPU, in lines."""

    where: str
    which: str
    values: list[str]


def placed(report: ReportData) -> Iterator[Placed]:
    for g in report.graphs:
        counts = Counter((v.how, v.type, v.source) for v in g.cpu_values)
        if counts:
            lines = [
                f"{how}: {type}{f' x {count}' if count > 1 else ''}, "
                f"{shorten(source) or 'an unknown place'}"
                for (how, type, source), count in counts.items()
            ]
            yield Placed(place(g), _which_graph(g), lines)


def kernels(report: ReportData) -> tuple[int, int]:
    """Kernels that Inductor lets be captured, and all of them."""
    captured = every = 0
    for g in report.graphs:
        for p in g.partitions:
            every += p.kernels
            if not g.blockers and not p.blockers:
                captured += p.kernels
    return captured, every


def change(f: FunctionReport) -> str:
    """What the user could change about a choice, empty if nothing."""
    bound = f.is_graph and f.choice != COPY
    return "" if bound else next((r.advice for r in f.reasons if r.advice), "")


def render(report: ReportData, width: int) -> str:
    return "\n".join(line.rstrip() for line in _lines(report, width))


def _lines(report: ReportData, width: int) -> Iterator[str]:
    yield from _summary(report)
    bar_width = width - 40
    for number, f in enumerate(report.by_gain(), 1):
        yield ""
        yield from _wrap(f"{number}. {place(f)}", f"   {which(f)}", width)
        yield from _paragraph(f"{label(f.choice)}: {reason(f)}", width)
        longest = max(f.timings_us.values(), default=0)
        for candidate, us in f.timings_us.items():
            bar = "#" * max(1, round(us / longest * bar_width)) if longest else ""
            mark = "*" if candidate == f.choice else " "
            yield f"   {mark} {label(candidate):<22}{format_us(us):>9}  {bar}"
        if text := facts(f):
            yield from _paragraph(text, width)
        if f.is_graph:
            before, now = map(format_bytes, (f.stock_copied_bytes, f.copied_bytes))
            yield f"   copied by each replay: {now}; by stock CUDA graphs: {before}"
        if text := change(f):
            yield from _paragraph(f"change: {text}", width)
    for index, graph in enumerate(placed(report)):
        if index == 0:
            yield ""
            yield "CPU values that GPU code reads"
        yield ""
        yield from _wrap(f"   {graph.where}", f"   {graph.which}", width)
        for text in graph.values:
            yield from _paragraph(text, width)
    for index, skip in enumerate(skipped(report)):
        if index == 0:
            yield ""
            yield "Not captured"
        yield ""
        yield from _wrap(f"   {skip.where}", f"   {skip.which}", width)
        for text in skip.reasons:
            yield from _paragraph(f"why: {text}", width)
        for text in skip.changes:
            yield from _paragraph(f"change: {text}", width)


def _paragraph(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent="   ",
        subsequent_indent="     ",
        break_on_hyphens=False,
    )


def _wrap(first: str, second: str, width: int) -> Iterator[str]:
    "On one line if they fit, the second at its end."
    gap = width - len(first) - len(second.lstrip())
    if gap >= 2:
        yield first + " " * gap + second.lstrip()
    else:
        yield from textwrap.wrap(first, width, subsequent_indent="     ")
        yield from textwrap.wrap(second, width, subsequent_indent="     ")


def _summary(report: ReportData) -> Iterator[str]:
    devices = ", ".join(dict.fromkeys(g.device for g in report.graphs))
    title = f"PyGraph, {report.title}" if report.title else "PyGraph"
    yield f"{title} on {devices}" if devices else title
    choices = [f.choice for f in report]
    counts = [f"{choices.count(c)} {label(c)}" for c in dict.fromkeys(sorted(choices))]
    line = plural(len(report), "function")
    yield f"{line}: {'; '.join(counts)}" if counts else line
    captured, every = kernels(report)
    if every:
        yield f"{captured} of {every} kernels are in functions that can be captured"
    before, after, copied_before, copied = totals(report)
    if before:
        yield (
            f"a call of each: {format_us(before)} without graphs, {format_us(after)} as "
            f"chosen ({before / after:.2f}x)"
        )
    if copied_before:
        yield (
            f"copied by a replay of each: {format_bytes(copied)}; by stock CUDA graphs: "
            f"{format_bytes(copied_before)}"
        )
    remembered = sum(f.remembered for f in report)
    if remembered:
        yield f"{remembered} of {len(report)} measured by an earlier process"
