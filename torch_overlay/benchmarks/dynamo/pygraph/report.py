"""
Tables of a suite's rows. A row is what the GPU record keeps of a case; tables and plots are
made of rows alone.
"""

from __future__ import annotations

import statistics
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


Row = dict[str, Any]
Columns = dict[str, "Callable[[Row], str]"]

MIB = 2**20

# Of the paper (https://arxiv.org/abs/2503.19779), which had an H100 NVL and PyTorch 2.4.
# Table 2: percent of kernels in CUDA graphs, with PyTorch's and after its transformations.
PAPER_COVERAGE = {
    "ST": (5.14, 74.22),
    "DALLE2": (79.56, 99.32),
    "MMC": (0, 99.32),
    "XLNET-T": (1.53, 98.06),
    "XLNET-I": (0, 99.28),
    "VM": (58.84, 71.01),
}
# Table 3: bytes copied in each iteration, before and after parameter indirection.
PAPER_COPIES = {
    "EOS": ("4.1 MB", "24 B"),
    "ST": ("1.3 MB", "336 B"),
    "DALLE2": ("4.0 KB", "16 B"),
    "MMC": ("314.0 KB", "16 B"),
    "TKE": ("174.0 MB", "168 B"),
    "DR-T": ("290.0 MB", "16 B"),
    "DR-I": ("3.0 GB", "8 B"),
    "VM": ("1.6 MB", "184 B"),
    "ALNET": ("588.0 KB", "8 B"),
    "DLRM": ("14.6 MB", "136 B"),
    "TEFD": ("6.2 MB", "120 B"),
    "DCGAN": ("1.5 MB", "16 B"),
    "BERT": ("156.3 MB", "32 B"),
    "DNET": ("18.4 MB", "8 B"),
    "XLNET-I": ("8.0 KB", "16 B"),
    "XLNET-T": ("362.0 MB", "232 B"),
    "MTCG-T": ("1.0 GB", "312 B"),
    "MTCG-I": ("32.0 KB", "16 B"),
    "MBERT": ("130.0 KB", "24 B"),
    "DBV2": ("4.0 KB", "24 B"),
    "BSCG": ("1.6 GB", "56 B"),
    "DGPT2": ("953.4 MB", "136 B"),
    "STCLM": ("849.5 MB", "136 B"),
    "DMLM": ("548.8 MB", "136 B"),
    "LCNET": ("73.5 MB", "8 B"),
}


# facts of a row


def time_of(row: Row, variant: str) -> float | None:
    """Microseconds a call, if the results were right."""
    if variant in row.get("failed", ()) or (variant == "pygraph" and not row.get("equal")):
        return None
    return row.get(f"{variant}_us")


def speedup(row: Row, variant: str, over: str) -> float | None:
    time, reference = time_of(row, variant), time_of(row, over)
    return reference / time if time and reference else None


def best_speedup(row: Row) -> float | None:
    """Of PyGraph over the better of no CUDA graphs and stock ones."""
    times = list(filter(None, (time_of(row, name) for name in ("no_cg", "stock_cg"))))
    pygraph = time_of(row, "pygraph")
    return min(times) / pygraph if times and pygraph else None


def coverage(row: Row, variant: str) -> float | None:
    """Percent of the kernels launched from CUDA graphs."""
    found = row.get("launches", {}).get(variant)
    return 100 * found["kernels_in_graphs"] / found["kernels"] if found and found["kernels"] else None


def copied(row: Row, variant: str) -> int | None:
    """Bytes of inputs copied a call."""
    found = row.get("launches", {}).get(variant)
    return None if found is None else found["copied_bytes"]


def start_up(row: Row, variant: str) -> float | None:
    """Seconds of compiling from cold caches and warming up."""
    alone = row.get("alone", {}).get(variant)
    return alone["compile_s"] + alone["warm_up_s"] if alone else None


def deployed(row: Row) -> tuple[int, int]:
    """CUDA graphs, of the candidates."""
    choices = [graph["choice"] for graph in row.get("graphs", ())]
    return sum(choice != "no_graph" for choice in choices), len(choices)


def present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def label(row: Row) -> str:
    return row.get("paper") or row["name"]


def in_order(rows: list[Row]) -> list[Row]:
    """As in the paper's tables, and then as recorded."""
    order = list(PAPER_COPIES)
    return sorted(rows, key=lambda row: order.index(label(row)) if label(row) in order else len(order))


# cells


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _shown_time(variant: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        return "failed" if variant in row.get("failed", ()) else _us(row.get(f"{variant}_us"))

    return cell


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def _amount(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def bytes_text(value: float | None) -> str:
    if value is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"


def _equality(row: Row) -> str:
    if row.get("equal") is None or "skipped" in row:
        return "-"
    if row.get("bitwise"):
        return "bitwise"
    diff = "" if row.get("max_diff") is None else f" ({row['max_diff']:.1e})"
    return f"within tolerance{diff}" if row["equal"] else f"NO{diff}"


def _must(row: Row) -> str:
    if "skipped" in row:
        return "skipped"
    return "FAIL" if row.get("missed") else "pass"


def _ratio_to_best(row: Row) -> str:
    best = [row[f"{name}_us"] for name in ("no_cg", "stock_cg") if row.get(f"{name}_us")]
    return f"{row['pygraph_us'] / min(best):.3f}" if best and row.get("pygraph_us") else "-"


def _start_up_ratio(row: Row) -> float | None:
    ours, theirs = start_up(row, "pygraph"), start_up(row, "stock_cg")
    return ours / theirs if ours and theirs else None


def _of(ours: float | None, theirs: float | None) -> str:
    return f"{_amount(ours)} of {_amount(theirs)}"


SMALL_COLUMNS: Columns = {
    "case": lambda row: row["name"],
    "no CG": _shown_time("no_cg"),
    "stock CG": _shown_time("stock_cg"),
    "PyGraph": _shown_time("pygraph"),
    "x best": _ratio_to_best,
    "node update": _shown_time("forced_node_update"),
    "choice": lambda row: row.get("choice") or "-",
    "copied": lambda row: _of(row.get("copied_bytes"), row.get("stock_copied_bytes")),
    "reserved MiB": lambda row: _of(row.get("reserved_mib"), row.get("stock_reserved_mib")),
    "equal": _equality,
    "must": _must,
}

WORKLOAD_COLUMNS: Columns = {
    "workload": lambda row: f"{row['name']} ({row['paper']})" if row.get("paper") else row["name"],
    "eager": _shown_time("eager"),
    "no CG": _shown_time("no_cg"),
    "stock CG": _shown_time("stock_cg"),
    "PyGraph": _shown_time("pygraph"),
    "/ no CG": lambda row: _number(speedup(row, "pygraph", "no_cg")),
    "/ stock": lambda row: _number(speedup(row, "pygraph", "stock_cg")),
    "/ best": lambda row: _number(best_speedup(row)),
    "host": lambda row: _us(row.get("host_us", {}).get("pygraph")),
    "graphs": lambda row: "{} of {}".format(*deployed(row)) if row.get("graphs") else "-",
    "equal": _equality,
    "must": _must,
}

VARIANT_COLUMNS: Columns = {
    "workload": label,
    "no CG": _shown_time("no_cg"),
    "whole graphs": _shown_time("stock_whole"),
    "stock CG": _shown_time("stock_cg"),
    "CGCT": _shown_time("forced_copy"),
    "+ PI": _shown_time("forced_node_update"),
    "+ SCG": _shown_time("pygraph"),
    "hand-written": _shown_time("hand_written"),
}

LAUNCH_COLUMNS: Columns = {
    "workload": label,
    "kernels": lambda row: _amount(row.get("launches", {}).get("pygraph", {}).get("kernels")),
    "whole graphs %": lambda row: _number(coverage(row, "stock_whole"), ".1f"),
    "stock CG %": lambda row: _number(coverage(row, "stock_cg"), ".1f"),
    "CGCT %": lambda row: _number(coverage(row, "forced_copy"), ".1f"),
    "PyGraph %": lambda row: _number(coverage(row, "pygraph"), ".1f"),
    "paper %": lambda row: "{} to {}".format(*PAPER_COVERAGE[label(row)]) if label(row) in PAPER_COVERAGE else "-",
    "stock copies": lambda row: bytes_text(copied(row, "stock_cg")),
    "PyGraph copies": lambda row: bytes_text(copied(row, "pygraph")),
    "paper copies": lambda row: "{} to {}".format(*PAPER_COPIES[label(row)]) if label(row) in PAPER_COPIES else "-",
}

COST_COLUMNS: Columns = {
    "workload": label,
    "stock start-up s": lambda row: _number(start_up(row, "stock_cg"), ".1f"),
    "PyGraph start-up s": lambda row: _number(start_up(row, "pygraph"), ".1f"),
    "ratio": lambda row: _number(_start_up_ratio(row)),
    "reserved MiB": lambda row: _of(row.get("reserved_mib"), row.get("stock_reserved_mib")),
    "peak MiB": lambda row: _of(row.get("peak_reserved_mib"), row.get("peak_stock_reserved_mib")),
}

ABOUT_COLUMNS: Columns = {
    "workload": label,
    "mode": lambda row: row.get("mode", "-"),
    "what runs": lambda row: row.get("about", "-"),
    "what is in the way of CUDA graphs": lambda row: row.get("obstacle") or "-",
    "run": lambda row: f"{row.get('date', '-')[:10]}, {row.get('device') or '-'}, {row.get('sources', '-')[:12]}",
}


# Titles, texts and columns of what is shown of the rows that have a field.
SECTIONS = (
    (
        "Each step",
        "`whole graphs` is stock without graph partition, as in the paper's PyTorch. `CGCT` deploys every graph with "
        "its inputs copied, `+ PI` with its inputs bound, `+ SCG` chooses: PyGraph. `hand-written` captures the "
        "compiled step with `torch.cuda.graph` and copies the inputs to it.",
        VARIANT_COLUMNS,
        "stock_whole_us",
    ),
    (
        "Kernels in CUDA graphs, and copied inputs",
        "From the profiler, and counted in a call. `paper` is tables 2 and 3 of the paper, of other hardware and "
        "software.",
        LAUNCH_COLUMNS,
        "launches",
    ),
    (
        "What it costs",
        "Each alone in a process: seconds from the first call, with cold caches, to the steady state; memory of "
        "PyGraph's of stock's.",
        COST_COLUMNS,
        "alone",
    ),
)


# tables


def format_table(rows: list[Row], *, markdown: bool = False) -> str:
    """Times in microseconds a call, bytes copied a call, and what the case must show."""
    is_workload = any("about" in row for row in rows)
    text = _table(rows, WORKLOAD_COLUMNS if is_workload else SMALL_COLUMNS, markdown)
    if markdown:
        return text
    notes = [f"{row['name']}: {note}" for row in rows for note in _notes(row)]
    return "\n".join([text, *notes, *(summary(rows) if is_workload else [])])


def _table(rows: list[Row], columns: Columns, markdown: bool) -> str:
    table = [list(columns), *([cell(row) for cell in columns.values()] for row in rows)]
    if markdown:
        table.insert(1, ["---"] * len(columns))
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in table)
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip() for cells in table]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def _notes(row: Row) -> list[str]:
    failed = [f"{variant}: {reason}" for variant, reason in row.get("failed", {}).items()]
    return [*row.get("missed", ()), *failed, *filter(None, [row.get("skipped"), row.get("note")])]


def summary(rows: list[Row]) -> list[str]:
    """One line for each number that a suite is judged by."""
    ran = [row for row in rows if "skipped" not in row]
    right = [row for row in ran if time_of(row, "pygraph")]
    lines = [f"{len(right)} of {len(rows)} workloads ran with right results, {len(rows) - len(ran)} were skipped."]
    for name, values in {
        "Speed-up over stock CUDA graphs": [speedup(row, "pygraph", "stock_cg") for row in right],
        "Speed-up over no CUDA graphs": [speedup(row, "pygraph", "no_cg") for row in right],
        "Speed-up over the better of the two": [best_speedup(row) for row in right],
        "Speed-up over stock without graph partition": [speedup(row, "pygraph", "stock_whole") for row in right],
        "Compile and warm-up, of stock CUDA graphs'": [_start_up_ratio(row) for row in right],
    }.items():
        found = present(values)
        if found:
            mean = statistics.geometric_mean(found)
            lines.append(f"{name}: geomean {mean:.3f} of {len(found)}, {min(found):.3f} to {max(found):.3f}.")
    return lines


def document(suite: str, rows: list[Row], plots: dict[str, str]) -> str:
    """A Markdown page: ``plots`` are titles and files."""
    rows = in_order(rows)
    small = not any("about" in row for row in rows)
    parts = [f"# Suite {suite}"]
    if not small:
        parts.append("\n".join(f"- {line}" for line in summary(rows)))
    parts += [f"![{title}]({file})" for title, file in plots.items()]
    parts += [
        "Microseconds a call: medians of interleaved rounds in one process, with new input buffers in each call. "
        "`host` is the time until a call of PyGraph's returns.",
        format_table(rows, markdown=True),
    ]
    if not small:
        ran = [row for row in rows if "skipped" not in row and "error" not in row]
        for title, text, columns, key in SECTIONS:
            having = [row for row in ran if row.get(key)]
            if having:
                parts += [f"## {title}", text, _table(having, columns, True)]
        parts += ["## The workloads", _table(rows, ABOUT_COLUMNS, True)]
    notes = [f"- `{row['name']}`: {note}" for row in rows for note in _notes(row)]
    if notes:
        parts += ["## Notes", "\n".join(notes)]
    return "\n\n".join(parts) + "\n"
