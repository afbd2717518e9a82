"""
Plots of a suite's rows, as files. They need matplotlib.

    speedup    PyGraph and stock CUDA graphs over no CUDA graphs (the paper's figure 9)
    ablation   what each step adds (figure 10)
    copies     bytes of inputs copied, before and after (table 3)
    memory     reserved by PyGraph, over stock CUDA graphs
    figure8    what each way to give a graph its inputs takes, by their number
"""

from __future__ import annotations

import statistics
from typing import Any, TYPE_CHECKING

import matplotlib


matplotlib.use("Agg")

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.ticker import NullLocator  # noqa: E402

from .report import bytes_text, copied, FIGURE8, in_order, label, present, speedup, ways  # noqa: E402


if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .report import Row


STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 11,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "figure.dpi": 110,
    # Files that do not change without reason.
    "svg.hashsalt": "pygraph",
}
GREY, LIGHT, BLUE, ORANGE = "#9a9a9a", "#cfcfcf", "#1f5fa8", "#e07b1f"
Bars = dict[str, tuple[str, list[float | None]]]


def draw(suite: str, rows: list[Row], directory: Path, more: Row | None = None) -> dict[str, str]:
    """
    The titles and names of the files written. What no row has a value for is left out.
    ``more``: what a suite has beside rows.
    """
    rows = in_order(rows)
    files = {}
    with matplotlib.rc_context(STYLE):
        for name, (title, plot) in PLOTS.items():
            figure = _figure8((more or {}).get("figure8", [])) if plot is None else plot(rows)
            if figure is None:
                continue
            figure.suptitle(f"{title} ({suite})", x=0.01, ha="left", fontweight="bold", fontsize=12)
            file = directory / f"{suite}-{name}.png"
            figure.savefig(file, metadata={"Software": None})
            plt.close(figure)
            files[title] = file.name
    return files


def _speedups(rows: list[Row], steps: dict[str, tuple[str, str]], *needed: str) -> Any:
    """Bars of variants, of the rows that have a time of one that is ``needed``."""
    rows = [row for row in rows if any(speedup(row, name, "no_cg") for name in needed)]
    bars = {name: (color, [speedup(row, step, "no_cg") for row in rows]) for name, (color, step) in steps.items()}
    return _grouped(rows, bars, "times as fast as no CUDA graphs", geomean=True)


def _speedup(rows: list[Row]) -> Any:
    steps = {"stock CUDA graphs": (GREY, "stock_cg"), "PyGraph": (BLUE, "pygraph")}
    return _speedups(rows, steps, "stock_cg", "pygraph")


def _ablation(rows: list[Row]) -> Any:
    steps = {
        "stock CUDA graphs": (LIGHT, "stock_cg"),
        "CGCT": (GREY, "forced_copy"),
        "CGCT + PI": (ORANGE, "forced_node_update"),
        "CGCT + PI + SCG": (BLUE, "pygraph"),
    }
    return _speedups(rows, steps, "forced_copy", "forced_node_update")


def _memory(rows: list[Row]) -> Any:
    def ratio(row: Row, peak: str) -> float | None:
        ours, theirs = row.get(f"{peak}reserved_mib"), row.get(f"{peak}stock_reserved_mib")
        return ours / theirs if ours and theirs else None

    rows = [row for row in rows if ratio(row, "")]
    bars = {
        "in the steady state": (BLUE, [ratio(row, "") for row in rows]),
        "peak": (LIGHT, [ratio(row, "peak_") for row in rows]),
    }
    return _grouped(rows, bars, "reserved memory, of stock CUDA graphs'", geomean=False)


def _grouped(rows: list[Row], bars: Bars, axis: str, geomean: bool) -> Any:
    """Bars side by side around the line of no change."""
    if not rows:
        return None
    labels = [label(row) for row in rows]
    columns = {name: list(values) for name, (_, values) in bars.items()}
    if geomean and len(rows) > 1:
        # Of the rows that have all of the bars.
        complete = [values for values in zip(*columns.values()) if None not in values]
        labels.append("geomean")
        for values, found in zip(columns.values(), zip(*complete) if complete else [()] * len(columns)):
            values.append(statistics.geometric_mean(found) if found else None)
    figure, axes = _figure(len(labels), len(bars))
    width = 0.8 / len(bars)
    highest = max((value for values in columns.values() for value in present(values)), default=1.0)
    # A few workloads that gain much must not flatten the others.
    top = min(highest * 1.08, max(4.0, 2.5 * statistics.median(v for vs in columns.values() for v in present(vs))))
    for i, (name, (color, _)) in enumerate(bars.items()):
        for x, value in enumerate(columns[name]):
            if value is None:
                axes.text(_at(x, i, len(bars), width), 0.02, "x", ha="center", color=color, fontsize=9)
            elif value > top:
                axes.text(_at(x, i, len(bars), width), top, f"{value:.1f}", ha="center", va="bottom", fontsize=8)
        places = [_at(x, i, len(bars), width) for x in range(len(labels))]
        axes.bar(places, [min(v or 0.0, top) for v in columns[name]], width * 0.92, color=color, label=name)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_ylim(0, top * 1.04)
    axes.set_ylabel(axis)
    if geomean and len(rows) > 1:
        axes.axvline(len(labels) - 1.5, color="#bdbdbd", linewidth=0.8, linestyle=":")
    _finish(figure, axes, labels)
    return figure


def _at(x: int, i: int, count: int, width: float) -> float:
    return x + (i - (count - 1) / 2) * width


def _copies(rows: list[Row]) -> Any:
    before = {id(row): copied(row, "stock_cg") for row in rows}
    rows = [row for row in rows if before[id(row)] or copied(row, "pygraph")]
    if not rows:
        return None
    rows.sort(key=lambda row: -(before[id(row)] or 0))
    figure, axes = _figure(len(rows), 1)
    for x, row in enumerate(rows):
        # One byte stands for none, which a logarithmic axis does not have.
        old, new = max(before[id(row)] or 0, 1), max(copied(row, "pygraph") or 0, 1)
        axes.plot([x, x], [new, old], color=LIGHT, linewidth=2, zorder=1)
        axes.scatter([x], [old], color=GREY, s=42, zorder=2, label="stock CUDA graphs" if x == 0 else None)
        axes.scatter([x], [new], color=BLUE, s=42, zorder=3, label="PyGraph" if x == 0 else None)
    axes.set_yscale("log")
    axes.set_ylim(0.4, 16 * 1024**3)
    axes.set_yticks([1024**i for i in range(4)], ["none", *(bytes_text(1024**i) for i in (1, 2, 3))])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("input bytes copied in a call")
    _finish(figure, axes, [label(row) for row in rows])
    return figure


def _figure8(points: list[Row]) -> Any:
    if not points:
        return None
    figure, panels = plt.subplots(1, len(FIGURE8), figsize=(13.0, 4.2), layout="constrained")
    for axes, (key, title) in zip(panels, FIGURE8.items()):
        for way in ways(points):
            found = [(point["parameters"], point["ways"].get(way, {}).get(key)) for point in points]
            found = [(x, y) for x, y in found if y is not None]
            if found:
                axes.plot(*zip(*found), marker="o", markersize=3, label=way if axes is panels[0] else None)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(title)
        axes.set_xlabel("inputs that move")
    panels[0].set_ylabel("us a call")
    figure.legend(loc="outside lower center", ncols=len(ways(points)), fontsize=9)
    return figure


def _figure(groups: int, bars: int) -> tuple[Any, Any]:
    width = max(6.0, 1.6 + groups * (0.30 + 0.11 * bars))
    return plt.subplots(figsize=(min(width, 16.0), 4.2), layout="constrained")


def _finish(figure: Any, axes: Any, labels: list[str]) -> None:
    long = max(map(len, labels)) > 5 or len(labels) > 14
    turned = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if long else {}
    axes.set_xticks(range(len(labels)), labels, **turned)
    axes.tick_params(length=0)
    axes.set_xlim(-0.6, len(labels) - 0.4)
    figure.legend(loc="outside lower center", ncols=4, fontsize=9)


PLOTS: dict[str, tuple[str, Callable[[list[Row]], Any] | None]] = {
    "speedup": ("Speed-up over no CUDA graphs", _speedup),
    "ablation": ("What each step adds", _ablation),
    "copies": ("Inputs copied", _copies),
    "memory": ("Memory", _memory),
    # Of what are no rows.
    "figure8": ("Inputs that move", None),
}
