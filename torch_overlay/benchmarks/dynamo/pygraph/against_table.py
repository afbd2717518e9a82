"""
What two builds measured of the same cases, as a table with flags.

An entry has, for each build, what each of its processes found, and what a process found that ran
PyGraph alone: ``{"old": [...], "new": [...], "memory": {"old": {...}, "new": {...}}}``.
"""

from __future__ import annotations

import statistics
from typing import Any, TYPE_CHECKING

from .report import as_table, bytes_text, geomean


if TYPE_CHECKING:
    from collections.abc import Callable

    from .report import Columns, Row

    Entry = dict[str, Any]


BUILDS = ("old", "new")
# Layers of a call, as the suite replay names them.
LAYERS = ("dynamo", "aot", "inductor", "trees", "inputs", "launch")
# The microseconds by which a layer may be slower in the new build.
MAX_LAYER_US = 0.5
# The new build is slower where all of its processes are slower than all of the old build's, and its
# median is by this factor. Processes of one build differ by a few percent.
MAX_SLOWDOWN = 1.05
# A variant that neither build changes.
REFERENCE = "no_cg"


def measured(row: Row) -> Row:
    """Return what is compared of the row that one process made of a case."""
    if "error" in row:
        return {"error": row["error"]}
    if "layers" in row:
        layers = row["layers"]["pygraph"]
        return {
            "us": {"pygraph": layers["host"]},
            "layers": {layer: layers[layer] for layer in LAYERS if layer in layers},
            "compiled": layers.get("compiled"),
            "choice": {},
            "equal": row["equal"],
            "failed": row["failed"],
        }
    times = {key.removesuffix("_us"): value for key, value in row.items() if key.endswith("_us")}
    return {
        "us": {name: us for name, us in times.items() if isinstance(us, (int, float))},
        "choice": {"pygraph": row["choice"], **{f"forced_{name}": c for name, c in row.get("forced", {}).items()}},
        "copied_bytes": row["copied_bytes"],
        "equal": row["equal"],
        "failed": row["failed"],
    }


def is_complete(entry: Entry) -> bool:
    return not any("error" in found for build in BUILDS for found in entry[build])


def rows(cases: dict[str, Entry]) -> list[Row]:
    """Return a row for each case and variant."""
    return [row for name, entry in cases.items() for row in _rows(name, entry)]


def _rows(name: str, entry: Entry) -> list[Row]:
    found = {build: [run for run in entry[build] if "error" not in run] for build in BUILDS}
    variants = dict.fromkeys(v for build in BUILDS for run in found[build] for v in run["us"] if v != REFERENCE)
    made = [_row(name, variant, entry, found) for variant in ["pygraph", *(v for v in variants if v != "pygraph")]]
    # Of the case, not of a variant.
    made[0]["flags"] = [*_errors(entry), *made[0]["flags"]]
    return made


def _row(name: str, variant: str, entry: Entry, found: dict[str, list[Row]]) -> Row:
    us = {build: [run["us"][variant] for run in found[build] if variant in run["us"]] for build in BUILDS}
    choices = {
        build: list(dict.fromkeys(c for run in found[build] if (c := run["choice"].get(variant)))) for build in BUILDS
    }
    row: Row = {
        "case": name,
        "variant": variant,
        "us": {build: round(statistics.median(times), 2) if times else None for build, times in us.items()},
        "us_of_processes": us,
        "choices": choices,
        "flags": [],
    }
    flags = row["flags"]
    if variant == "pygraph":
        row["copied_bytes"] = {
            build: max((n for run in found[build] if (n := run.get("copied_bytes")) is not None), default=None)
            for build in BUILDS
        }
        row["reserved_mib"] = {build: entry.get("memory", {}).get(build, {}).get("reserved_mib") for build in BUILDS}
        layers = {
            layer: {build: _median([run["layers"][layer] for run in found[build]]) for build in BUILDS}
            for layer in LAYERS
            if all(layer in run.get("layers", ()) for build in BUILDS for run in found[build]) and all(found.values())
        }
        if layers:
            row["layers_us"] = layers
        flags += _slower_layers(layers)
        flags += _fewer_compiled(found)
        if _more(row["copied_bytes"]):
            flags.append("copies {new} bytes, {old} before".format(**row["copied_bytes"]))
        if _more(row["reserved_mib"]):
            flags.append("reserves {new} MiB, {old} before".format(**row["reserved_mib"]))
    if choices["old"] and set(choices["new"]) - set(choices["old"]):
        flags.append("another choice")
    if all(us.values()) and min(us["new"]) > max(us["old"]) and _ratio(row) > MAX_SLOWDOWN:
        flags.append(f"{_ratio(row):.2f} x the time")
    return row


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 2)


def _more(amounts: dict[str, float | None]) -> bool:
    old, new = (amounts[build] for build in BUILDS)
    return old is not None and new is not None and new > old


def _slower_layers(layers: dict[str, dict[str, float]]) -> list[str]:
    more = {layer: round(us["new"] - us["old"], 2) for layer, us in layers.items()}
    return [f"{layer} {us:+.2f} us" for layer, us in more.items() if us > MAX_LAYER_US]


def _fewer_compiled(found: dict[str, list[Row]]) -> list[str]:
    counts = {build: {run.get("compiled") for run in found[build]} - {None} for build in BUILDS}
    if all(counts.values()) and min(counts["new"]) < min(counts["old"]):
        return [f"compiled code replays {min(counts['new'])} graphs, {min(counts['old'])} before"]
    return []


def _errors(entry: Entry) -> list[str]:
    found = []
    for build in BUILDS:
        runs = entry[build]
        found += dict.fromkeys(f"{build}: {run['error']}" for run in runs if "error" in run)
        if any(not run.get("equal", True) for run in runs):
            found.append(f"{build}: results differ")
        failed = {variant: why for run in runs for variant, why in run.get("failed", {}).items()}
        found += [f"{build}: {variant}: {why}" for variant, why in failed.items()]
        memory = entry.get("memory", {}).get(build, {})
        if "error" in memory:
            found.append(f"{build} alone: {memory['error']}")
    return found


def _ratio(row: Row) -> float:
    return row["us"]["new"] / row["us"]["old"]


# text


def _pair(key: str, text: Callable[[Any], str] = str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        values = row.get(key, {})
        shown = ["-" if values.get(build) in (None, []) else text(values[build]) for build in BUILDS]
        return " / ".join(shown) if shown != ["-", "-"] else "-"

    return cell


def _difference(row: Row) -> str:
    if None in row["us"].values():
        return "-"
    return f"{row['us']['new'] - row['us']['old']:+.2f} ({100 * (_ratio(row) - 1):+.1f} %)"


def _us(build: str) -> Callable[[Row], str]:
    return lambda row: "-" if row["us"][build] is None else f"{row['us'][build]:.2f}"


COLUMNS: Columns = {
    "case": lambda row: row["case"] if row["variant"] == "pygraph" else f"{row['case']} {row['variant']}",
    "old us": _us("old"),
    "new us": _us("new"),
    "difference": _difference,
    "choice": _pair("choices", "|".join),
    "copied": _pair("copied_bytes", bytes_text),
    "reserved MiB": _pair("reserved_mib"),
    "flags": lambda row: "; ".join(row["flags"]),
}


def flagged(table: list[Row]) -> list[str]:
    return [f"{COLUMNS['case'](row)}: {flag}" for row in table for flag in row["flags"]]


def format_table(table: list[Row]) -> str:
    """Return PyGraph's row of each case, rows of other variants that have flags, and a line for each suite."""
    shown = [row for row in table if row["variant"] == "pygraph" or row["flags"]]
    lines = [as_table(shown, COLUMNS)] if shown else []
    by_suite: dict[str, list[float]] = {}
    for row in table:
        if row["variant"] == "pygraph" and all(row["us"].values()):
            by_suite.setdefault(row["case"].partition("/")[0], []).append(_ratio(row))
    lines += [
        f"{suite}: the new build takes {geomean(ratios):.3f} of the old build's time, geomean of {len(ratios)} cases"
        for suite, ratios in by_suite.items()
    ]
    lines.append(f"outside of the limits: {len(flagged(table))}")
    return "\n".join(lines)
