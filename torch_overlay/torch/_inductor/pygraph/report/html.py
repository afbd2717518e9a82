"""A report as one page: no script, and nothing to load."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from torch._inductor.pygraph.report import text
from torch._inductor.pygraph.types.candidate import NO_GRAPH


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch._inductor.pygraph.types.report import FunctionReport, ReportData


_STYLE = """
:root {
  color-scheme: light dark; --page: #f6f7f9; --card: #fff; --line: #dfe3e8; --text: #1c2024; --soft: #5c6670;
  --graph: #2f7d4f; --plain: #5b6ea8; --other: #c3cad2;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171a; --card: #1d2125; --line: #31373e; --text: #e6e9ec; --soft: #9aa5af;
    --graph: #4fae78; --plain: #8093d3; --other: #4b545d;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 62rem; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif;
}
h1 { margin: 0; font-size: 1.5rem; }
h2 { margin: 2.25rem 0 .75rem; font-size: 1.1rem; }
h3 { margin: 0; font: 600 .95rem ui-monospace, monospace; overflow-wrap: anywhere; }
p { margin: .4rem 0 0; }
.soft, .tile span, .title { color: var(--soft); font-size: .85rem; }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem; margin-top: 1.25rem; }
.tile, .card {
  background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: 1rem; margin-bottom: .75rem;
}
.tile { flex: 1 1 13rem; }
.tile b { display: block; }
.head { display: flex; flex-wrap: wrap; gap: .25rem .75rem; align-items: baseline; }
.choice { margin-left: auto; padding: 0 .6rem; border-radius: 1rem; color: var(--card); background: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: .25rem 2.5rem; }
.chart { display: grid; grid-template-columns: auto 1fr 4.5rem; gap: .3rem .75rem; align-items: center; }
.title { grid-column: 1 / -1; }
.bar { height: .8rem; border-radius: .2rem; background: var(--other); min-width: 2px; }
.row { display: contents; }
.chosen > * { font-weight: 600; }
.number { text-align: right; white-space: nowrap; }
.stack { display: flex; }
.part { height: 1.1rem; border-right: 1px solid var(--card); }
.timeline { margin-top: .75rem; }
.lane { position: relative; height: 1.3rem; margin-top: .2rem; background: var(--page); }
.call {
  position: absolute; height: 100%; overflow: hidden; padding: 0 .2rem; border-right: 1px solid var(--card);
  background: var(--graph); color: var(--card); font: .7rem/1.3rem ui-monospace, monospace;
}
.graph { background: var(--graph); }
.plain { background: var(--plain); }
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>PyGraph report</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def render(reports: Iterable[ReportData]) -> str:
    """Return one page for the reports of one run, one for each process."""
    body = "\n".join(line for report in reports for line in _process(report))
    return _PAGE.format(style=_STYLE, body=body)


def _process(report: ReportData) -> Iterator[str]:
    subtitle = " on ".join(filter(None, (report.title, text.devices(report))))
    yield f'<h1>PyGraph</h1><p class="soft">{escape(subtitle)}</p><div class="tiles">'
    for number, what in text.summary(report):
        yield f'<div class="tile"><b>{number}</b><span>{what}</span></div>'
    yield "</div>"
    yield from _overview(report)
    if report:
        yield "<h2>Functions, by what the choice saves</h2>"
    for f in report.by_gain():
        yield from _function(f)
    for title, parts in text.sections(report):
        if parts:
            yield f"<h2>{title}</h2>"
        for where, which, lines in parts:
            yield _head(where, which)
            yield from (f"<p>{escape(line)}</p>" for line in lines)
            yield "</div>"


def _overview(report: ReportData) -> Iterator[str]:
    """Draw a call of each function, end to end, without graphs and as chosen."""
    known = [f for f in report.by_gain() if {NO_GRAPH, f.candidate} <= f.timings_us.keys()]
    if len(known) < 2:
        return
    longest = sum(f.timings_us[NO_GRAPH] for f in known)
    yield '<h2>A call of each function, end to end</h2><div class="card"><div class="chart">'
    for name, chosen in (("without graphs", False), ("as chosen", True)):
        yield f'<div class="row"><span>{name}</span><div class="stack">'
        times = [f.timings_us[f.candidate if chosen else NO_GRAPH] for f in known]
        for f, us in zip(known, times):
            kind = "graph" if chosen and f.is_graph else "plain"
            title = escape(f"{text.shorten(f.source)}, {text.which_function(f)}: {text.format_us(us)}")
            yield f'<div class="part {kind}" style="width: {100 * us / longest:.2f}%" title="{title}"></div>'
        yield f'</div><span class="number">{text.format_us(sum(times))}</span></div>'
    yield '</div><p><span class="choice plain">no graph</span> <span class="choice graph">CUDA graph</span></p></div>'


def _function(f: FunctionReport) -> Iterator[str]:
    kind = "graph" if f.is_graph else "plain" if f.timings_us else ""
    badge = f'<span class="choice {kind}">{text.label(f.candidate)}</span>'
    yield _head(text.shorten(f.source), text.which_function(f), badge)
    yield '<div class="charts">'
    times = [(text.label(c), us, text.format_us(us), c == f.candidate) for c, us in f.timings_us.items()]
    yield from _chart("time of a call", times, kind)
    if f.is_graph:
        copies = (("stock", f.stock_copied_bytes, False), ("now", f.copied_bytes, True))
        yield from _chart("copied by a replay", [(n, b, text.format_bytes(b), c) for n, b, c in copies], kind)
    if f.pool_bytes:
        pools = [(text.label(c), b, text.format_bytes(b), c == f.candidate) for c, b in f.pool_bytes.items()]
        yield from _chart("reserved by the graphs' pool", pools, kind)
    yield "</div>"
    yield from _timeline(f)
    for line in (text.reason(f), text.facts(f), text.change(f)):
        if line:
            yield f"<p>{escape(line[:1].upper() + line[1:]).rstrip('.')}.</p>"
    yield "</div>"


def _timeline(f: FunctionReport) -> Iterator[str]:
    """Draw a row for each lane, with a bar for each call."""
    if not f.timeline:
        return
    longest = max(start + us for _, _, start, us in f.timeline) or 1
    yield '<div class="timeline"><span class="title">calls side by side, as estimated from times of single calls</span>'
    for lane in range(1 + max(row for _, row, *_ in f.timeline)):
        yield '<div class="lane">'
        for name, row, start, us in f.timeline:
            if row == lane:
                place = f"left: {100 * start / longest:.2f}%; width: {100 * us / longest:.2f}%"
                title = escape(f"{name}: {text.format_us(us)}")
                yield f'<div class="call" style="{place}" title="{title}">{escape(name)}</div>'
        yield "</div>"
    yield "</div>"


def _head(where: str, which: str, badge: str = "") -> str:
    """Return the beginning of a card."""
    return (
        f'<div class="card"><div class="head"><h3>{escape(where)}</h3>'
        f'<span class="soft">{escape(which)}</span>{badge}</div>'
    )


def _chart(title: str, rows: list[tuple[str, float, str, bool]], kind: str) -> Iterator[str]:
    """Draw rows of (name, value, value as text, whether it was chosen)."""
    if not rows:
        return
    longest = max(value for _, value, *_ in rows) or 1
    yield f'<div class="chart"><span class="title">{title}</span>'
    for name, value, shown, chosen in rows:
        yield f'<div class="row{" chosen" if chosen else ""}"><span>{name}</span>'
        yield f'<div><div class="bar {kind if chosen else ""}" style="width: {100 * value / longest:.1f}%"></div></div>'
        yield f'<span class="number">{shown}</span></div>'
    yield "</div>"
