"""A report as one page: no script, and nothing to load."""

from __future__ import annotations

import string
from html import escape
from typing import TYPE_CHECKING

from torch._inductor.pygraph.report.text import (
    change,
    facts,
    format_bytes,
    format_us,
    kernels,
    label,
    place,
    placed,
    plural,
    reason,
    skipped,
    totals,
    which,
)
from torch._inductor.pygraph.types.candidate import (
    NO_GRAPH,
)


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch._inductor.pygraph.report.data import ReportData
    from torch._inductor.pygraph.types.report import (
        FunctionReport,
    )


_STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #fff; --line: #dfe3e8; --text: #1c2024; --soft: #5c6670;
  --graph: #2f7d4f; --plain: #5b6ea8; --other: #c3cad2; --warn: #a8591c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171a; --card: #1d2125; --line: #31373e; --text: #e6e9ec; --soft: #9aa5af;
    --graph: #4fae78; --plain: #8093d3; --other: #4b545d; --warn: #e0954f;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 62rem; background: var(--page);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif;
}
h1 { margin: 0; font-size: 1.5rem; }
h2 { margin: 2.25rem 0 .75rem; font-size: 1.1rem; }
h3 { margin: 0; font: 600 .95rem ui-monospace, monospace; overflow-wrap: anywhere; }
p { margin: .4rem 0 0; }
.soft { color: var(--soft); }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem; margin-top: 1.25rem; }
.tile, .card {
  background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
}
.tile { flex: 1 1 13rem; padding: .75rem 1rem; }
.tile b { display: block; font-size: 1.05rem; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: .85rem; }
.card { padding: 1rem 1.15rem; margin-bottom: .75rem; }
.head { display: flex; flex-wrap: wrap; gap: .25rem .75rem; align-items: baseline; }
.head .soft { font-size: .85rem; }
.choice {
  margin-left: auto; padding: .05rem .6rem; border-radius: 1rem; font-size: .8rem;
  font-weight: 600; color: var(--card); background: var(--soft); white-space: nowrap;
}
.choice.graph { background: var(--graph); }
.choice.plain { background: var(--plain); }
.charts { display: grid; grid-template-columns: 3fr 2fr; gap: .25rem 2.5rem; margin-top: .7rem; }
@media (max-width: 44rem) { .charts { grid-template-columns: 1fr; } }
.chart { display: grid; grid-template-columns: auto 1fr 4.5rem; gap: .3rem .75rem;
  align-items: center; align-content: start; font-size: .85rem; }
.times { grid-template-columns: 11rem 1fr 4.5rem; }
.chart > .title { grid-column: 1 / -1; color: var(--soft); font-size: .8rem; }
.bar { height: .8rem; border-radius: .2rem; background: var(--other); min-width: 2px; }
.chosen .bar { background: var(--graph); }
.chosen.plain .bar { background: var(--plain); }
.row { display: contents; }
.row.chosen > * { font-weight: 600; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.stack { display: flex; }
.part { height: 1.1rem; border-right: 1px solid var(--card); }
.part.graph, .legend .graph { background: var(--graph); }
.part.plain, .legend .plain { background: var(--plain); }
.legend { font-size: .8rem; }
.legend i { display: inline-block; width: .7rem; height: .7rem; margin: 0 .35rem 0 .6rem; }
.why { color: var(--warn); }
code { font: .85em ui-monospace, monospace; overflow-wrap: anywhere; }
"""

_PAGE = string.Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>PyGraph report</title>
<style>$style</style>
</head>
<body>
$body
</body>
</html>
""")


def render(reports: Iterable[ReportData]) -> str:
    """One page for the reports of one run, one for each process."""
    body = "\n".join(line for report in reports for line in _process(report))
    return _PAGE.substitute(style=_STYLE, body=body)


def _process(report: ReportData) -> Iterator[str]:
    devices = ", ".join(dict.fromkeys(g.device for g in report.graphs))
    subtitle = " on ".join(filter(None, (report.title, devices)))
    yield f'<h1>PyGraph</h1><p class="soft">{escape(subtitle)}</p>'
    yield from _tiles(report)
    yield from _overview(report)
    if len(report):
        yield "<h2>Functions, by what the choice saves</h2>"
    for f in report.by_gain():
        yield from _function(f)
    for index, graph in enumerate(placed(report)):
        if index == 0:
            yield "<h2>CPU values that GPU code reads</h2>"
        yield '<div class="card"><div class="head">'
        yield f"<h3>{escape(graph.where)}</h3>"
        yield f'<span class="soft">{escape(graph.which)}</span></div>'
        for text in graph.values:
            yield f"<p>{escape(text)}</p>"
        yield "</div>"
    skips = list(skipped(report))
    if skips:
        yield "<h2>Not captured</h2>"
    for skip in skips:
        yield '<div class="card"><div class="head">'
        yield f"<h3>{escape(skip.where)}</h3>"
        yield f'<span class="soft">{escape(skip.which)}</span></div>'
        for text in skip.reasons:
            yield f'<p class="why">{escape(text)}</p>'
        for text in skip.changes:
            yield f"<p>{escape(text)}</p>"
        yield "</div>"


def _tiles(report: ReportData) -> Iterator[str]:
    before, after, copied_before, copied = totals(report)
    graphs = sum(f.is_graph for f in report)
    remembered = sum(f.remembered for f in report)
    tiles = [
        (
            f"{graphs} of {plural(len(report), 'function')}",
            "deployed as CUDA graphs"
            + (f", {remembered} as measured earlier" if remembered else ""),
        )
    ]
    captured, every = kernels(report)
    if every:
        tiles.append(
            (f"{captured} of {every} kernels", "in functions that can be captured")
        )
    if before:
        tiles.append(
            (
                f"{format_us(before)} → {format_us(after)}",
                f"a call of each, without graphs and as chosen: {before / after:.2f}x",
            )
        )
    if copied_before:
        tiles.append(
            (
                f"{format_bytes(copied_before)} → {format_bytes(copied)}",
                "copied by a replay of each: stock CUDA graphs and now",
            )
        )
    yield '<div class="tiles">'
    for number, text in tiles:
        yield f'<div class="tile"><b>{number}</b><span>{text}</span></div>'
    yield "</div>"


def _overview(report: ReportData) -> Iterator[str]:
    "A call of each function, end to end, without graphs and as chosen."
    known = [f for f in report.by_gain() if {NO_GRAPH, f.choice} <= f.timings_us.keys()]
    if len(known) < 2:
        return
    longest = sum(f.timings_us[NO_GRAPH] for f in known)
    yield "<h2>A call of each function, end to end</h2>"
    yield '<div class="card"><div class="chart">'
    for name, choose in (("without graphs", False), ("as chosen", True)):
        yield f'<div class="row"><span>{name}</span><div class="stack">'
        total = 0.0
        for f in known:
            us = f.timings_us[f.choice if choose else NO_GRAPH]
            total += us
            kind = "graph" if choose and f.is_graph else "plain"
            title = f"{place(f)}, {which(f)}: {format_us(us)}"
            yield (
                f'<div class="part {kind}" style="width: {100 * us / longest:.2f}%" '
                f'title="{escape(title)}"></div>'
            )
        yield f'</div><span class="number">{format_us(total)}</span></div>'
    yield '</div><p class="soft legend"><i class="plain"></i>no graph '
    yield '<i class="graph"></i>CUDA graph</p></div>'


def _function(f: FunctionReport) -> Iterator[str]:
    kind = "graph" if f.is_graph else "plain" if f.timings_us else ""
    yield '<div class="card"><div class="head">'
    yield f'<h3 title="{escape(f.source)}">{escape(place(f))}</h3>'
    yield f'<span class="soft">{escape(which(f))}</span>'
    yield f'<span class="choice {kind}">{escape(label(f.choice))}</span></div>'
    if f.timings_us or f.is_graph:
        yield '<div class="charts">'
        times = {
            label(c): (us, format_us(us), c == f.choice)
            for c, us in f.timings_us.items()
        }
        yield from _chart("time of a call", times, kind, "times")
        if f.is_graph:
            now = f.copied_bytes
            copies = {
                "stock": (
                    f.stock_copied_bytes,
                    format_bytes(f.stock_copied_bytes),
                    False,
                ),
                "now": (now, format_bytes(now), True),
            }
            yield from _chart("copied by a replay", copies, kind)
        yield "</div>"
    recorded = facts(f)
    text = f"{reason(f)}. {recorded}." if recorded else f"{reason(f)}."
    yield f"<p>{escape(text[:1].upper() + text[1:])}</p>"
    if to_change := change(f):
        yield f"<p>{escape(to_change)}</p>"
    yield "</div>"


def _chart(
    title: str, rows: dict[str, tuple[float, str, bool]], kind: str, columns: str = ""
) -> Iterator[str]:
    "Rows of (value, as text, whether it was chosen)."
    if not rows:
        return
    longest = max(value for value, *_ in rows.values()) or 1
    yield f'<div class="chart {columns}"><span class="title">{title}</span>'
    for name, (value, text, chosen) in rows.items():
        mark = f"row chosen {kind}" if chosen else "row"
        width = f"width: {100 * value / longest:.1f}%"
        yield f'<div class="{mark}"><span>{escape(name)}</span>'
        yield f'<div><div class="bar" style="{width}"></div></div>'
        yield f'<span class="number">{text}</span></div>'
    yield "</div>"
