"""
Plots of a suite's rows, as files. They need matplotlib.

    speedup    PyGraph and stock CUDA graphs over no CUDA graphs (the paper's figure 9)
    ablation   what each step adds (figure 10)
    figure8    what each way to give a graph its inputs takes, by their number
"""

from __future__ import annotations

import statistics
from typing import Any, TYPE_CHECKING

import matplotlib


matplotlib.use("Agg")

from matplotlib import pyplot as plt  # noqa: E402

from .report import FIGURE8, in_order, label, present, speedup, ways  # noqa: E402


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


def _speedups(rows: list[Row], steps: dict[str, tuple[str, str]], *needed: str) -> Any:
    """
    Bars of variants side by side around the line of no change, for the rows that have a
    time of one that is ``needed``.
    """
    rows = [row for row in rows if any(speedup(row, name, "no_cg") for name in needed)]
    if not rows:
        return None
    labels = [label(row) for row in rows]
    columns = {name: [speedup(row, step, "no_cg") for row in rows] for name, (_, step) in steps.items()}
    if len(rows) > 1:
        # Of the rows that have all of the bars.
        complete = [values for values in zip(*columns.values()) if None not in values]
        labels.append("geomean")
        for values, found in zip(columns.values(), zip(*complete) if complete else [()] * len(columns)):
            values.append(statistics.geometric_mean(found) if found else None)
    figure_width = max(6.0, 1.6 + len(labels) * (0.30 + 0.11 * len(steps)))
    figure, axes = plt.subplots(figsize=(min(figure_width, 16.0), 4.2), layout="constrained")
    width = 0.8 / len(steps)
    shown = [value for values in columns.values() for value in present(values)]
    # A few workloads that gain much must not flatten the others.
    top = min(max(shown) * 1.08, max(4.0, 2.5 * statistics.median(shown)))
    for i, (name, (color, _)) in enumerate(steps.items()):
        places = [x + (i - (len(steps) - 1) / 2) * width for x in range(len(labels))]
        for place, value in zip(places, columns[name]):
            if value is None:
                axes.text(place, 0.02, "x", ha="center", color=color, fontsize=9)
            elif value > top:
                axes.text(place, top, f"{value:.1f}", ha="center", va="bottom", fontsize=8)
        axes.bar(places, [min(v or 0.0, top) for v in columns[name]], width * 0.92, color=color, label=name)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_ylim(0, top * 1.04)
    axes.set_ylabel("times as fast as no CUDA graphs")
    if len(rows) > 1:
        axes.axvline(len(labels) - 1.5, color="#bdbdbd", linewidth=0.8, linestyle=":")
    long = max(map(len, labels)) > 5 or len(labels) > 14
    turned = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if long else {}
    axes.set_xticks(range(len(labels)), labels, **turned)
    axes.tick_params(length=0)
    axes.set_xlim(-0.6, len(labels) - 0.4)
    figure.legend(loc="outside lower center", ncols=4, fontsize=9)
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


PLOTS: dict[str, tuple[str, Callable[[list[Row]], Any] | None]] = {
    "speedup": ("Speed-up over no CUDA graphs", _speedup),
    "ablation": ("What each step adds", _ablation),
    # Of what are no rows.
    "figure8": ("Inputs that move", None),
}
