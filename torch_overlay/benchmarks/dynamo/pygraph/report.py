"""The table of a suite's rows. A row is what the GPU record keeps of a case."""

from __future__ import annotations

from typing import Any


Row = dict[str, Any]

_MICROSECONDS = ("no_cg_us", "stock_cg_us", "pygraph_us", "forced_node_update_us")


def format_table(rows: list[Row], *, markdown: bool = False) -> str:
    """Times in microseconds a call, bytes copied a call, and what the case must show."""
    header = [
        "case",
        "no CG",
        "stock CG",
        "PyGraph",
        "x best",
        "node update",
        "choice",
        "copied",
        "reserved MiB",
        "equal",
        "must",
    ]
    table = [header, *(_cells(row) for row in rows)]
    if markdown:
        table.insert(1, ["---"] * len(header))
        return "\n".join("| " + " | ".join(cells) + " |" for cells in table)
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip() for cells in table]
    lines.insert(1, "-" * max(map(len, lines)))
    notes = [f"{row['name']}: {note}" for row in rows for note in _notes(row)]
    return "\n".join([*lines, *notes])


def _cells(row: Row) -> list[str]:
    no_cg, stock_cg, pygraph, forced = (_us(row.get(key)) for key in _MICROSECONDS)
    baselines = [row[key] for key in _MICROSECONDS[:2] if row.get(key)]
    ratio = "-"
    if baselines and row.get("pygraph_us"):
        ratio = f"{row['pygraph_us'] / min(baselines):.3f}"
    return [
        row["name"],
        no_cg,
        stock_cg,
        pygraph,
        ratio,
        forced,
        row.get("choice") or "-",
        f"{_amount(row.get('copied_bytes'))} of {_amount(row.get('stock_copied_bytes'))}",
        f"{_amount(row.get('reserved_mib'))} of {_amount(row.get('stock_reserved_mib'))}",
        _equality(row),
        "FAIL" if row.get("missed") else "pass",
    ]


def _notes(row: Row) -> list[str]:
    return [*row.get("missed", ()), *filter(None, [row.get("note")])]


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _amount(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _equality(row: Row) -> str:
    if row.get("equal") is None:
        return "-"
    if row.get("bitwise"):
        return "bitwise"
    diff = "" if row.get("max_diff") is None else f" ({row['max_diff']:.1e})"
    return f"within tolerance{diff}" if row["equal"] else f"NO{diff}"
