"""What a report says, and its form as text."""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from typing import TYPE_CHECKING

from torch._inductor.pygraph.types.candidate import (
    COPY,
    DAG,
    LANES,
    NO_GRAPH,
    NODE_UPDATE,
    PRELUDE,
    UNDECIDED,
)


if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch._inductor.pygraph.types.report import Blocker, BreakReport, FunctionReport, GraphReport, ReportData


LABELS = {
    NO_GRAPH: "no graph",
    COPY: "graph, inputs copied",
    NODE_UPDATE: "graph, inputs bound",
    PRELUDE: "graph, inputs bound by a prelude",
    UNDECIDED: "undecided",
}
SCHEDULE_LABELS = {DAG: "side by side"} | {name: f"in {count} lanes" for name, count in LANES.items()}


def label(candidate: str) -> str:
    binding, _, schedule = candidate.partition(",")
    return ", ".join(filter(None, (LABELS.get(binding, binding), SCHEDULE_LABELS.get(schedule, schedule))))


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
    """Return a source with the last two components of its path."""
    path, colon, rest = source.partition(":")
    return os.sep.join(path.split(os.sep)[-2:]) + colon + rest or "(unknown source)"


def which(entry: FunctionReport | GraphReport, *more: str) -> str:
    """Return what tells a function or a graph from others of the same source."""
    return ", ".join(filter(None, (entry.mode, entry.compile_id and f"graph {entry.compile_id}", *more)))


def which_function(f: FunctionReport) -> str:
    return which(f, f.name, f"sizes {', '.join(map(str, f.sizes))}" if f.sizes else "")


def devices(report: ReportData) -> str:
    return ", ".join(dict.fromkeys(g.device for g in report.graphs))


def summary(report: ReportData) -> Iterator[tuple[str, str]]:
    """Yield numbers of the whole run, and what they are."""
    remembered = sum(f.remembered for f in report)
    yield (
        f"{sum(f.is_graph for f in report)} of {plural(len(report), 'function')}",
        "deployed as CUDA graphs" + (f", {remembered} as measured earlier" if remembered else ""),
    )
    if kernels := sum(p.kernels for g in report.graphs for p in g.partitions):
        captured = sum(p.kernels for g in report.graphs if not g.blockers for p in g.partitions if not p.blockers)
        yield f"{captured} of {kernels} kernels", "in functions that can be captured"
    if known := [f for f in report if {NO_GRAPH, f.candidate} <= f.timings_us.keys()]:
        before, after = (sum(f.timings_us[c or f.candidate] for f in known) for c in (NO_GRAPH, None))
        what = f"a call of each, without graphs and as chosen: {before / after:.2f}x"
        yield f"{format_us(before)} → {format_us(after)}", what
    graphs = [f for f in report if f.is_graph]
    if copied_before := sum(f.stock_copied_bytes for f in graphs):
        copied = format_bytes(sum(f.copied_bytes for f in graphs))
        yield f"{format_bytes(copied_before)} → {copied}", "copied by a replay of each: stock CUDA graphs and now"


def reason(f: FunctionReport) -> str:
    if f.choice == UNDECIDED:
        return "it was not called often enough to be measured"
    codes = ", ".join(reason.code.name for reason in f.reasons)
    return f.reason + (f" ({codes})" if codes else "") + (" (by an earlier process)" if f.remembered else "")


def facts(f: FunctionReport) -> str:
    """Return what was recorded, empty if nothing was."""
    parts = []
    if f.kernel_nodes:
        parts.append(f"{plural(f.kernel_nodes, 'node')} captured")
    if f.is_graph and f.external_inputs:
        parts.append(f"{f.bound_inputs} of {plural(f.external_inputs, 'external input')} bound")
    if f.bound_inputs:
        parts.append(f"{plural(f.updated_nodes, 'node')} updated")
    if f.width > 1:
        times = f"{format_us(f.critical_us)} of {format_us(f.calls_us)}"
        parts.append(f"up to {f.width} kernels side by side, critical path {times}")
    if f.calls:
        buckets = ", ".join(" x ".join(map(str, sizes)) for sizes in f.buckets)
        share = f"{f.captured_calls / f.calls:.0%} of {plural(f.calls, 'call')} captured"
        parts.append(f"one recording for many sizes: {plural(f.num_sizes, 'size')} came, up to {buckets}, {share}")
    if f.by_size:
        parts.append(f"a recording for each size: {f.by_size}")
    parts += f.collectives
    return ", ".join(parts)


def memory(f: FunctionReport) -> str:
    """Return what the graphs' pool reserves with each candidate."""
    return ", ".join(f"{format_bytes(nbytes)} ({label(candidate)})" for candidate, nbytes in f.pool_bytes.items())


def change(f: FunctionReport) -> str:
    """Return what the user could change about a choice, empty if nothing."""
    bound = f.is_graph and f.choice != COPY
    return "" if bound else next((r.advice for r in f.reasons if r.advice), "")


def sections(report: ReportData) -> Iterator[tuple[str, list[tuple[str, str, list[str]]]]]:
    """Yield titles of what the report says of graphs, and their parts: a place, what is there, and lines."""
    values = []
    skipped = []
    for g in report.graphs:
        where = shorten(g.source)
        counts = Counter((v.how, v.type, v.source) for v in g.cpu_values)
        if counts:
            lines = [
                f"{how}: {type}{f' x {count}' if count > 1 else ''}, {shorten(source)}"
                for (how, type, source), count in counts.items()
            ]
            values.append((where, which(g), lines))
        if g.blockers:
            skipped.append((where, which(g, "all of it"), _why_not(g.blockers)))
            continue
        for p in g.partitions:
            if p.avoidable:
                kernels = which(g, plural(p.kernels, "kernel"))
                skipped.append((shorten(p.source or g.source), kernels, _why_not(p.avoidable)))
    yield "CPU values that GPU code reads", values
    yield "Not captured", skipped
    yield "Graph breaks that stay", [_break(b) for b in report.breaks if not b.is_repaired]
    yield "Graph breaks that were repaired", [_break(b) for b in report.breaks if b.is_repaired]


def _break(entry: BreakReport) -> tuple[str, str, list[str]]:
    reason = entry.reason
    lines = [f"{'how' if entry.is_repaired else 'why'}: {reason.text} ({reason.code.name})"]
    return shorten(entry.source), entry.compile_id, lines + [f"change: {reason.advice}"] * bool(reason.advice)


def _why_not(blockers: list[Blocker]) -> list[str]:
    lines = []
    for b in blockers:
        at = f" at {shorten(b.source)}" if b.op else ""
        lines.append(f"why: {b.op}{' ' if b.op else ''}{b.reason.text}{at} ({b.reason.code.name})")
    changes = dict.fromkeys(b.reason.advice for b in blockers)
    return lines + [f"change: {change}" for change in changes if change]


def render(report: ReportData, width: int) -> str:
    return "\n".join(line.rstrip() for line in _lines(report, width))


def _lines(report: ReportData, width: int) -> Iterator[str]:
    yield " on ".join(filter(None, ("PyGraph" + (report.title and f", {report.title}"), devices(report))))
    for number, what in summary(report):
        yield f"{number} {what}".replace("→", "to")
    for number, f in enumerate(report.by_gain(), 1):
        yield from _head(f"{number}. {shorten(f.source)}", which_function(f), width)
        yield from _paragraph(f"{label(f.candidate)}: {reason(f)}", width)
        longest = max(f.timings_us.values(), default=0) or 1
        column = max([22, *(len(label(candidate)) for candidate in f.timings_us)])
        for candidate, us in f.timings_us.items():
            bar = "#" * max(1, round(us / longest * (width - column - 18)))
            mark = "*" if candidate == f.candidate else " "
            yield f"   {mark} {label(candidate):<{column}}{format_us(us):>9}  {bar}"
        if f.pool_bytes:
            yield from _paragraph(f"reserved by the graphs' pool: {memory(f)}", width)
        if text := facts(f):
            yield from _paragraph(text, width)
        if f.is_graph:
            before, now = map(format_bytes, (f.stock_copied_bytes, f.copied_bytes))
            yield f"   copied by each replay: {now}; by stock CUDA graphs: {before}"
        if text := change(f):
            yield from _paragraph(f"change: {text}", width)
    for title, parts in sections(report):
        if parts:
            yield from ("", title)
        for where, which, lines in parts:
            yield from _head(f"   {where}", which, width)
            for text in lines:
                yield from _paragraph(text, width)


def _paragraph(text: str, width: int, indent: str = "   ") -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent="     ", break_on_hyphens=False)


def _head(first: str, second: str, width: int) -> list[str]:
    """Return an empty line and both on one line if they fit, the second at its end."""
    gap = width - len(first) - len(second)
    if gap >= 2:
        return ["", first + " " * gap + second]
    return ["", *_paragraph(first, width, ""), *_paragraph(second, width)]
