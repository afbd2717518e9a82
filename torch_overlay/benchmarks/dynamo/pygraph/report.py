"""
Tables of a suite's rows. A row is what the GPU record keeps of a case; tables and plots are
made of rows alone.
"""

from __future__ import annotations

import json
import re
import statistics
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path


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


# What the paper says of all its workloads: over no CUDA graphs, and over PyTorch 2.4's, which has no graph partition.
PAPER_FIGURES = {
    "NVIDIA H100 NVL (the paper)": {"workloads": "25", "stock_whole": "1.29 (up to 3.36)"},
    "NVIDIA A6000 (the paper)": {"workloads": "25", "no_cg": "1.18 (up to 3.25)"},
}

# Kernels of a function one after another, as its report says
CHAIN = "chain"
# Of the best candidates' times, in the mean.
MAX_REGRET = 0.005
# Of stock's seconds until the steady state, all workloads together.
MAX_START_UP = 1.15
# Of the median in the same run: an operator in eager mode that takes longer says that the host is slower.
MAX_HOST = 1.1
# A host that needs less than this part of a call's time waits for the device.
WAITING = 0.9

# facts of a row


def candidates(row: Row) -> dict[str, float]:
    """Microseconds a call of what PyGraph could be in its place, those with right results."""
    times = {name: time_of(row, name) for name in row.get("candidates_us", ("no_cg", "stock_cg"))}
    return {name: time for name, time in times.items() if time}


def best_candidate(row: Row) -> str | None:
    times = candidates(row)
    return min(times, key=times.__getitem__, default=None)


def best_other(row: Row) -> str | None:
    """The best candidate, without one that runs the graphs that PyGraph chose: the two times differ by chance alone."""
    times = {name: time for name, time in candidates(row).items() if not runs_as(row, name)}
    return min(times, key=times.__getitem__, default=None)


def is_scheduled(row: Row) -> bool:
    """Whether calls of a graph run side by side."""
    return any(f.get("schedule", CHAIN) != CHAIN for f in row.get("graphs", ()))


def runs_as(row: Row, variant: str) -> bool:
    """Whether a variant that PyGraph was forced to be runs the graphs that PyGraph chose."""
    is_what_was_chosen = variant.startswith("forced_") and as_choice(variant) == row.get("choice")
    return is_what_was_chosen and bool(row.get("graphs")) and not is_scheduled(row)


def regret(row: Row) -> float | None:
    """What PyGraph takes of the best candidate's time; 1 where the difference is within the noise."""
    best = best_candidate(row)
    if best is not None and runs_as(row, best):
        return 1.0
    if best not in row.get("ratios", {}):
        # Of what has no rounds in common.
        pygraph = time_of(row, "pygraph") if "candidates_us" in row else None
        return pygraph / min(row["candidates_us"].values()) if pygraph and row["candidates_us"] else None
    low, median, _ = row["ratios"][best]
    return median if low > 1 else 1.0


def time_of(row: Row, variant: str) -> float | None:
    """Microseconds a call, if the results were right."""
    if variant in row.get("failed", ()) or (variant == "pygraph" and not row.get("equal")):
        return None
    return row.get(f"{variant}_us")


def speedup(row: Row, variant: str, over: str) -> float | None:
    time, reference = time_of(row, variant), time_of(row, over)
    if time and (variant, over) == ("pygraph", "hand_written"):
        # By the times of the turns that the two took, if they did.
        time = row.get("pygraph_beside_hand_us", time)
    return reference / time if time and reference else None


def best_speedup(row: Row) -> float | None:
    """PyGraph's, over the better of no CUDA graphs and stock ones."""
    return min(present(speedup(row, "pygraph", over) for over in ("no_cg", "stock_cg")), default=None)


def coverage(row: Row, variant: str) -> float | None:
    """Percent of the kernels launched from CUDA graphs."""
    found = row.get("launches", {}).get(variant)
    return 100 * found["kernels_in_graphs"] / found["kernels"] if found and found["kernels"] else None


def copied(row: Row, variant: str) -> int | None:
    """Bytes of inputs copied a call: counted where it was profiled, or else what PyGraph reports."""
    found = row.get("launches", {}).get(variant)
    reported = {"pygraph": "copied_bytes", "stock_cg": "stock_copied_bytes"}.get(variant)
    return row.get(reported) if found is None else found["copied_bytes"]


def start_up(row: Row, variant: str) -> float | None:
    """Seconds of the CPU to compile from cold caches, and seconds of warming up."""
    alone = row.get("alone", {}).get(variant)
    return alone["compile_s"] + alone["warm_up_s"] if alone else None


def _executed(row: Row) -> float | None:
    """Instructions of bytecode with the flag off, of stock's."""
    found = row.get("bytecodes")
    return found["flag_off"] / found["stock"] if found else None


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


def write_rows(file: Path, rows: list[Row] | Row) -> None:
    """All at once: it may be read at any time."""
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(rows, indent=1, default=str) + "\n")
    draft.replace(file)


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
    return ("FAIL" if row.get("missed") else "pass") + (", noisy" if "noise" in row else "")


def _ratio_to_best(row: Row) -> str:
    best = best_candidate(row)
    if best in row.get("ratios", {}):
        low, median, high = row["ratios"][best]
        return f"{median:.3f} ({low:.2f} to {high:.2f})"
    return f"{row['pygraph_us'] / row[f'{best}_us']:.3f}" if best and row.get("pygraph_us") else "-"


def _parallelism(row: Row) -> float | None:
    """Time of all calls of a step, of that of the calls that wait for one another."""
    known = [s for s in row.get("schedules", ()) if s["critical_us"]]
    return sum(s["calls_us"] for s in known) / sum(s["critical_us"] for s in known) if known else None


def sweep_gain(row: Row, other: str) -> float | None:
    """How many times as fast PyGraph was as another over random sizes."""
    times = [row.get("sweep", {}).get(name, {}).get("us") for name in (other, "pygraph")]
    return times[0] / times[1] if all(times) else None


def captured_share(row: Row) -> float | None:
    """Of the calls of functions that are recorded for many sizes, once they are recorded."""
    known = [f for f in row.get("functions", ()) if f["calls"]]
    return sum(f["captured_calls"] for f in known) / sum(f["calls"] for f in known) if known else None


def _start_up_ratio(row: Row) -> float | None:
    ours, theirs = start_up(row, "pygraph"), start_up(row, "stock_cg")
    return ours / theirs if ours and theirs else None


def _shown_memory(mib: Callable[[dict[str, list[int]]], int]) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        found = {variant: mib(pools) for variant, pools in row.get("pools_mib", {}).items()}
        return _of(found.get("pygraph"), found.get("stock_cg"))

    return cell


def _of(ours: float | None, theirs: float | None, text: Callable[[float | None], str] = _amount) -> str:
    return "-" if ours is None and theirs is None else f"{text(ours)} of {text(theirs)}"


def _seconds(value: float | None) -> str:
    return _number(value, ".1f")


TITLES = {
    "eager": "eager",
    "no_cg": "no CG",
    "stock_cg": "stock CG",
    "stock_whole": "whole graphs",
    "pygraph": "PyGraph",
    "mend_off": "mend off",
    "chain": "in a row",
    "by_size": "by size",
    "forced_lanes2": "2 lanes",
    "forced_lanes4": "4 lanes",
    "forced_dag": "DAG",
    "gpu": "GPU values",
    "forced_copy": "copies",
    "forced_node_update": "node update",
    "forced_prelude": "prelude",
    "hand_written": "hand-written",
    "jax": "JAX",
}


def _times(*variants: str) -> Columns:
    return {TITLES[variant]: _shown_time(variant) for variant in variants}


HOST: Columns = {"host": lambda row: _us(row.get("host_us", {}).get("pygraph"))}
JUDGED: Columns = {"equal": _equality, "must": _must}

SMALL_COLUMNS: Columns = {
    "case": lambda row: row["name"],
    **_times("no_cg", "stock_cg", "pygraph"),
    "x best": _ratio_to_best,
    **HOST,
    **_times("gpu", "forced_copy", "forced_node_update", "forced_prelude", "hand_written", "jax"),
    "best": lambda row: row.get("best") or "-",
    "choice": lambda row: row.get("choice") or "-",
    "copied": lambda row: _of(row.get("copied_bytes"), row.get("stock_copied_bytes"), bytes_text),
    "reserved MiB": lambda row: _of(row.get("reserved_mib"), row.get("stock_reserved_mib")),
    "peak MiB": lambda row: _of(row.get("peak_reserved_mib"), row.get("peak_stock_reserved_mib")),
    **JUDGED,
}
# Those that are shown where no row of a suite has them.
ALWAYS = {"case", "no CG", "stock CG", "PyGraph", "x best", *JUDGED}

WORKLOAD_COLUMNS: Columns = {
    "workload": lambda row: f"{row['name']} ({row['paper']})" if row.get("paper") else row["name"],
    **_times("eager", "no_cg", "stock_cg", "pygraph"),
    "/ no CG": lambda row: _number(speedup(row, "pygraph", "no_cg")),
    "/ stock": lambda row: _number(speedup(row, "pygraph", "stock_cg")),
    "/ best": lambda row: _number(best_speedup(row)),
    **HOST,
    "graphs": lambda row: "{} of {}".format(*deployed(row)) if row.get("graphs") else "-",
    **JUDGED,
}

VARIANT_COLUMNS: Columns = {
    "workload": label,
    **_times("no_cg", "stock_whole", "stock_cg"),
    "CGCT": _shown_time("forced_copy"),
    "+ PI": _shown_time("forced_node_update"),
    "+ SCG": _shown_time("pygraph"),
    **_times("hand_written"),
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
    "of it in pools": _shown_memory(lambda pools: pools["graphs"][0]),
    "unused besides": _shown_memory(lambda pools: pools["others"][0] - pools["others"][1]),
    "peak MiB": lambda row: _of(row.get("peak_reserved_mib"), row.get("peak_stock_reserved_mib")),
}

ABOUT_COLUMNS: Columns = {
    "workload": label,
    "mode": lambda row: row.get("mode", "-"),
    "program": lambda row: row.get("about", "-"),
    "obstacle for stock": lambda row: row.get("obstacle") or "-",
}

BREAK_COLUMNS: Columns = {
    "workload": label,
    **{
        f"{title} {kind}": lambda row, key=f"{prefix}{field}": _amount(row.get(key))
        for kind, field in {"breaks": "breaks", "graphs": "dynamo_graphs"}.items()
        for title, prefix in {"stock": "stock_", "mend off": "mend_off_", "PyGraph": ""}.items()
    },
    **_times("stock_cg", "mend_off", "pygraph"),
}

SCHEDULE_COLUMNS: Columns = {
    "workload": label,
    **_times("stock_cg", "hand_written", "chain", "pygraph"),
    "/ in a row": lambda row: _number(speedup(row, "pygraph", "chain")),
    "/ stock": lambda row: _number(speedup(row, "pygraph", "stock_cg")),
    "sum / critical": lambda row: _number(_parallelism(row)),
    "chosen": lambda row: " + ".join(dict.fromkeys(s["schedule"] for s in row.get("schedules", ()))) or "-",
    "reserved MiB": lambda row: _of(row.get("reserved_mib"), row.get("stock_reserved_mib")),
}

SIZE_COLUMNS: Columns = {
    "workload": label,
    **_times("no_cg", "stock_cg", "by_size", "pygraph"),
    "/ no CG": lambda row: _number(speedup(row, "pygraph", "no_cg")),
    "/ stock": lambda row: _number(speedup(row, "pygraph", "stock_cg")),
    "random / no CG": lambda row: _number(sweep_gain(row, "no_cg")),
    "random / stock": lambda row: _number(sweep_gain(row, "stock_cg")),
    "calls captured": lambda row: "-" if (share := captured_share(row)) is None else f"{share:.0%}",
    "recordings": lambda row: str(sum(len(f["buckets"]) for f in row.get("functions", ()))),
    "start-up s": lambda row: _of(start_up(row, "pygraph"), start_up(row, "no_cg"), _seconds),
    "reserved MiB": lambda row: _of(row.get("reserved_mib"), row.get("largest_size_reserved_mib")),
}

# Of the suite overhead, whose rows have no time of a call.
OVERHEAD_COLUMNS: Columns = {
    "case": lambda row: row["name"],
    "unit": lambda row: row.get("unit", "-"),
    "stock": lambda row: _number(row.get("stock")),
    "flag off": lambda row: _number(row.get("flag_off")),
    "x stock": lambda row: "{1:.3f} ({0:.3f} to {2:.3f})".format(*row["ratio"]) if "ratio" in row else "-",
    "pairs": lambda row: _amount(row.get("pairs")),
    "x stock's bytecode": lambda row: _number(_executed(row), ".4f"),
    "must": _must,
}

LAYER_COLUMNS: Columns = {
    "case": lambda row: row["name"],
    **{
        f"{name} {title}": lambda row, of=variant, layer=name.lower(): _us(row["layers"].get(of, {}).get(layer))
        for name in ("Dynamo", "AOT", "Inductor", "trees", "inputs", "launch", "host")
        for variant, title in {"stock_cg": "stock", "pygraph": "PyGraph"}.items()
    },
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
        "Each alone in a process: seconds of the first call, with cold caches, and from there to the steady state; memory, "
        "PyGraph's of stock's: what the allocator reserves, in the graphs' pools, and besides without use.",
        COST_COLUMNS,
        "alone",
    ),
    (
        "Graph breaks",
        "Of Dynamo, counted in the programs that were measured. A frame that Dynamo skips at a break counts as a break, and "
        "its code runs eagerly. `mend off` is PyGraph without `config.pygraph_mend`.",
        BREAK_COLUMNS,
        "stock_breaks",
    ),
    (
        "Kernels side by side",
        "PyGraph chooses between a chain, lanes and a DAG. `in a row` is PyGraph without `config.pygraph_schedules`. "
        "`sum / critical` bounds the gain: the time of all kernels, of that of the longest "
        "row of kernels that wait for one another. Memory is that of PyGraph and of stock's, each alone in a process.",
        SCHEDULE_COLUMNS,
        "chain_us",
    ),
    (
        "Sizes that vary",
        "Each call of 40 in turn has a size of its own. `by size` is PyGraph without `config.pygraph_sizes`, which has a "
        "recording for each size. `/ no CG` and `/ stock` are PyGraph's speed-ups; `random` is that over 1,000 further calls of "
        "random sizes, whose recordings count, at most 6 seconds of each variant. `calls captured` is the share of calls that "
        "a recording for many sizes served. Start-up is that of PyGraph and of no CUDA graphs, memory that of PyGraph and of "
        "one recording of the largest size of the ring, each alone in a process.",
        SIZE_COLUMNS,
        "by_size_us",
    ),
    (
        "Where the host's time goes",
        "Layers from the outside in, each without those below it.",
        LAYER_COLUMNS,
        "layers",
    ),
)


# tables


def format_table(rows: list[Row], *, markdown: bool = False) -> str:
    """Times in microseconds a call, bytes copied a call, and what the case must show."""
    if markdown:
        return as_table(rows, _columns(rows), markdown)
    text = as_table(rows, _columns_of_suite(rows) or _columns(rows))
    notes = [f"{row['name']}: {note}" for row in rows for note in _notes(row)]
    return "\n".join([text, *notes, *_totals(rows)])


def _are_workloads(rows: list[Row]) -> bool:
    return any("about" in row for row in rows)


def _is_overhead(rows: list[Row]) -> bool:
    return any("flag_off" in row for row in rows)


def _columns_of_suite(rows: list[Row]) -> Columns | None:
    """Return the columns of the suites concurrent and sizes."""
    for field, columns in {"chain_us": SCHEDULE_COLUMNS, "by_size_us": SIZE_COLUMNS}.items():
        if any(field in row for row in rows):
            return {**columns, **JUDGED}
    return None


def _columns(rows: list[Row]) -> Columns:
    if _is_overhead(rows):
        return OVERHEAD_COLUMNS
    if _are_workloads(rows):
        return WORKLOAD_COLUMNS
    shown = SMALL_COLUMNS.items()
    return {title: cell for title, cell in shown if title in ALWAYS or any(cell(row) != "-" for row in rows)}


def as_table(rows: list[Row], columns: Columns, markdown: bool = False) -> str:
    """Return a line for each row, below the titles of the columns."""
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
    met = [must["what"] for must in row.get("musts", ()) if must["met"]]
    missed = row.get("missed", ())
    noise = f"stock CUDA graphs' rounds spread over {100 * row['noise']:.0f} %, twice" if "noise" in row else ""
    said = filter(None, [row.get("skipped"), row.get("note"), noise, row.get("explanation")])
    # What another variant failed by may be what is missed.
    return list(dict.fromkeys([*missed, *met, *failed, *said]))


def _over_stock(row: Row, *, waits: bool) -> float | None:
    """
    PyGraph's speed-up, of a row whose host ``waits`` for the device with stock CUDA graphs, or
    does not. Where it does, less work of the host gains nothing.
    """
    host, whole = row.get("host_us", {}).get("stock_cg"), row.get("stock_cg_us")
    if not host or not whole or (host < WAITING * whole) != waits:
        return None
    return speedup(row, "pygraph", "stock_cg")


# Of a row, by the names that tables give them.
SPEEDUPS: dict[str, Callable[[Row], float | None]] = {
    "Speed-up over stock CUDA graphs": lambda row: speedup(row, "pygraph", "stock_cg"),
    "... where stock's host waits for the device": lambda row: _over_stock(row, waits=True),
    "... where it does not": lambda row: _over_stock(row, waits=False),
    "Speed-up over no CUDA graphs": lambda row: speedup(row, "pygraph", "no_cg"),
    "Speed-up over the better of the two": best_speedup,
    "Speed-up over stock without graph partition": lambda row: speedup(row, "pygraph", "stock_whole"),
    "Compile and warm-up, of stock CUDA graphs'": _start_up_ratio,
}


def summary(rows: list[Row]) -> list[str]:
    """One line for each number that a suite is judged by."""
    ran = [row for row in rows if "skipped" not in row]
    right = [row for row in ran if time_of(row, "pygraph")]
    lines = [f"{len(right)} of {len(rows)} workloads ran with right results, {len(rows) - len(ran)} were skipped."]
    for name, ratio in SPEEDUPS.items():
        found = present(map(ratio, right))
        if found:
            lines.append(f"{name}: geomean {geomean(found):.3f} of {len(found)}, {_range(found)}.")
    both = [(start_up(row, "pygraph"), start_up(row, "stock_cg")) for row in right if _start_up_ratio(row)]
    if both:
        total = sum(ours for ours, _ in both) / sum(theirs for _, theirs in both)
        missed = "" if total <= MAX_START_UP else " (FAIL)"
        lines.append(f"Compile and warm-up of all together: {total:.3f} of stock's{missed}, of at most {MAX_START_UP}.")
    return lines


def geomean(values: list[float]) -> float:
    return statistics.geometric_mean(values)


def _range(values: list[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}"


def _spread(rows: list[Row], name: str) -> str:
    found = present(map(SPEEDUPS[name], rows))
    return f"{geomean(found):.3f} ({_range(found)})" if found else "-"


def also(rows: list[Row]) -> str:
    """What is to be said of some suites beside speed-ups."""
    parts = []
    if any("by_size_us" in row for row in rows):
        without = present(speedup(row, "by_size", "no_cg") for row in rows)
        parts.append(f"{_spread(rows, 'Speed-up over no CUDA graphs')} over no CUDA graphs")
        parts += [f"without `config.pygraph_sizes` {geomean(without):.3f} ({_range(without)})"] * bool(without)
    covered = present(map(_start_up_ratio, rows))
    if covered:
        parts.append(f"start-up {geomean(covered):.2f} of stock's")
    behind = [row["pygraph_us"] - row["gpu_us"] for row in rows if row.get("gpu_us") and time_of(row, "pygraph")]
    if behind:
        parts.append(f"{statistics.median(behind):+.1f} us over GPU values, at most {max(behind):+.1f} us")
    chosen = [row for row in rows if row.get("best") and row.get("choice")]
    if chosen:
        parts.append(f"{sum(row['best'] == row['choice'] for row in chosen)} of {len(chosen)} chose the best")
    regrets = present(regret(row) for row in rows if row.get("candidates_us"))
    if regrets:
        parts.append(f"regret {100 * (geomean(regrets) - 1):.2f} %, at most {100 * (max(regrets) - 1):.1f} %")
    without = [row["ratio"][1] for row in rows if "flag_off" in row]
    if without:
        parts.append(f"{geomean(without):.3f} of stock's with the flag off, at most {max(without):.3f}")
    jax = present(speedup(row, "pygraph", "jax") for row in rows)
    if jax:
        parts.append(f"{geomean(jax):.2f} times as fast as JAX ({len(jax)})")
    by_hand = present(speedup(row, "pygraph", "hand_written") for row in rows)
    if by_hand:
        parts.append(f"{geomean(by_hand):.2f} times as fast as captured by hand ({len(by_hand)})")
    return "; ".join(parts) or "-"


def of_programs(runs: list[Row]) -> str:
    """Runs of random programs have seeds of their own, and add up."""
    programs, equal = (sum(run.get(key, 0) for run in runs) for key in ("programs", "equal"))
    seeds = ", ".join(str(run["seed"]) for run in runs)
    text = f"{programs} random programs (seeds {seeds}), {equal} equal to eager"
    own = {kind for run in runs for kind in run.get("inductors_causes", ())}
    others = [f"{programs - equal} differ"] if programs > equal else []
    others += [f"of torch.compile's own: {', '.join(sorted(own))}"] if own else []
    for run in runs:
        if not run["passed"]:
            others.append(f"seed {run['seed']} FAILED: {run.get('error') or ', '.join(run.get('causes', ()))}")
    return "; ".join([text, *others])


def _run(entry: Row) -> str:
    return f"{entry.get('date', '-')[:10]}, {entry.get('device') or '-'}, {entry.get('sources', '-')[:12]}"


def _when(rows: list[Row]) -> str:
    """The days and devices of several entries."""
    dates = sorted({entry.get("date", "-")[:10] for entry in rows})
    devices = sorted({entry.get("device") or "-" for entry in rows})
    return f"{' to '.join(dict.fromkeys([dates[0], dates[-1]]))}, {', '.join(devices)}"


def _runs(rows: list[Row]) -> list[str]:
    """Which rows are of which run, the newest first."""
    runs: dict[str, list[str]] = {}
    for row in rows:
        runs.setdefault(_run(row), []).append(f"`{row['name']}`")
    return [f"{run}: {', '.join(runs[run])}" for run in sorted(runs, reverse=True)]


def by_suite(record: Row) -> dict[str, list[Row]]:
    """Rows of each suite. Those of several devices are apart, by suite and device."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in record.get("cases", ()):
        found.setdefault((row["suite"], row.get("device") or "-"), []).append(row)
    suites = [suite for suite, _ in found]
    return {
        suite if suites.count(suite) == 1 else f"{suite}-{'-'.join(re.findall('[a-z0-9]+', device.lower()))}": rows
        for (suite, device), rows in found.items()
    }


def slow_hosts(rows: list[Row]) -> dict[str, float]:
    """How much longer the host took for an operator in eager mode, of the cases whose run was faster otherwise."""
    runs: dict[tuple[Any, Any], list[Row]] = {}
    for row in rows:
        if row.get("eager_loop_us"):
            runs.setdefault((row.get("date"), row.get("device")), []).append(row)
    found = {}
    for of_run in runs.values():
        usual = statistics.median(us for row in of_run for us in row["eager_loop_us"])
        slow = {row["name"]: max(row["eager_loop_us"]) / usual for row in of_run}
        found |= {name: ratio for name, ratio in slow.items() if ratio > MAX_HOST}
    return found


def _counted(tests: Row) -> str:
    counts = ", ".join(f"{tests[key]} {key}" for key in ("passed", "failed", "skipped"))
    return counts if tests["complete"] else f"{counts}, not complete"


# Test files that are not ours, by their key in the record.
UPSTREAM_TESTS = {
    "upstream": "Upstream's `test_cudagraph_trees.py`, of which the documentation says what no longer holds and why",
    "triton": "Triton's `test_core.py`",
}


def overview(record: Row, pages: str = "") -> str:
    """A line for each suite. ``pages``: the folder with a page for each, if they are to be linked."""

    def must(rows: list[Row]) -> str:
        ran = [row for row in rows if "skipped" not in row]
        return f"{sum(not row.get('missed') for row in ran)} of {len(ran)}"

    columns: Columns = {
        "suite": lambda line: f"[{line['suite']}]({pages}/{line['suite']}.md)" if pages else line["suite"],
        "pass": lambda line: must(line["rows"]),
        "over stock CUDA graphs": lambda line: _spread(line["rows"], "Speed-up over stock CUDA graphs"),
        "over the better of stock and none": lambda line: _spread(line["rows"], "Speed-up over the better of the two"),
        "also": lambda line: also(line["rows"]),
        "measured": lambda line: _when(line["rows"]),
    }
    lines = [{"suite": suite, "rows": rows} for suite, rows in by_suite(record).items()]
    parts = [as_table(lines, columns, True)] if lines else []
    others = []
    if "tests" in record:
        others.append(f"- Tests that need a GPU: {_counted(record['tests'])} ({_run(record['tests'])}).")
    for kind, title in UPSTREAM_TESTS.items():
        if kind in record:
            found = {name: value for name, value in record[kind].items() if isinstance(value, dict) and "passed" in value}
            each = "; ".join(f"{name} {_counted(counts)}" for name, counts in found.items())
            others.append(f"- {title}: {each} ({_run(record[kind])}).")
    if "bindings" in record:
        page = f"[bindings]({pages}/bindings.md)" if pages else "bindings"
        others.append(f"- What each way to give a graph its inputs takes: {page} ({_run(record['bindings'])}).")
    if record.get("programs"):
        others.append(f"- {of_programs(record['programs'])} ({_run(record['programs'][-1])}).")
    return "\n\n".join([*parts, *filter(None, ["\n".join(others)])])


# What README has speed-ups over, by device
FIGURES = {
    "over stock CUDA graphs": "stock_cg",
    "over no CUDA graphs": "no_cg",
    "over captured by hand": "hand_written",
    "over stock without graph partition": "stock_whole",
}


def figures(record: Row) -> str:
    """Geomeans of workloads by device, beside those of the paper."""
    lines = []
    for rows in by_suite(record).values():
        if not _are_workloads(rows) or rows[0]["suite"] not in PLOTTED:
            continue
        right = [row for row in rows if time_of(row, "pygraph")]
        line = {"device": rows[0].get("device") or "-", "workloads": f"{len(right)} of {rows[0]['suite']}"}
        for over in FIGURES.values():
            if found := present(speedup(row, "pygraph", over) for row in right):
                line[over] = f"{geomean(found):.2f} (up to {max(found):.2f})"
                line[over] += f", {len(found)} workloads" if len(found) < len(right) else ""
        lines.append(line)
    if not lines:
        return ""
    lines += [{"device": device, **line} for device, line in PAPER_FIGURES.items()]
    columns: Columns = {
        title: lambda line, key=key: line.get(key, "-")
        for title, key in {"device": "device", "workloads": "workloads", **FIGURES}.items()
    }
    return as_table(lines, columns, True)


def _of_sources(record: Row) -> str:
    """Return a sentence that says of which sources the results are, or of how many."""
    kinds = ("tests", *UPSTREAM_TESTS, "bindings")
    entries = [*record.get("cases", ()), *record.get("programs", ()), *(record[k] for k in kinds if k in record)]
    found = sorted({entry.get("sources", "-")[:12] for entry in entries})
    return f"All results are of the sources `{found[0]}`." if len(found) == 1 else f"Results are of {len(found)} sources."


# Whose plot README has, if the record has it.
PLOTTED = ("paper", "modern", "pi")


def readme(record: Row, pages: str) -> str:
    """What README says of the record; pages and plots are in the folder ``pages``."""
    suites = by_suite(record)
    parts = [
        "Speed-ups are geomeans (minimum to maximum) of PyGraph's over medians of the same run; `pass` counts the cases "
        f"that show all they must. {_of_sources(record)}",
        overview(record, pages),
    ]
    if table := figures(record):
        parts += ["Geomeans by device. The paper compares with PyTorch 2.4, whose graphs have no partitions.", table]
    plotted = next((name for suite in PLOTTED for name, rows in suites.items() if rows[0]["suite"] == suite), None)
    if plotted:
        parts.insert(0, f"![Speed-up of suite {plotted}]({pages}/{plotted}-speedup.png)")
    if slow := {name: ratio for rows in suites.values() for name, ratio in slow_hosts(rows).items()}:
        parts.append(f"The host was slower than usual, up to {max(slow.values()):.2f} times, beside {len(slow)} cases.")
    failing = [
        f"- `{row['name']}` ({'; '.join(row['missed'])}), of {suite}"
        for suite, rows in suites.items()
        for row in rows
        if row.get("missed")
    ]
    if failing:
        parts += ["These cases do not show all they must. The page of the suite has notes on each:", "\n".join(failing)]
    return "\n\n".join(parts)


# What figure 8 of the suite bindings has of each way to give a graph its inputs.
FIGURE8 = {"us": "in a row", "latency_us": "until one call is done", "host_us": "the host's part"}

KERNEL_COLUMNS: Columns = {
    "model": lambda row: row["model"],
    "kernel": lambda row: row.get("kernel", "-"),
    "pointers": lambda row: _amount(row.get("pointers")),
    **{
        title: lambda row, key=key: " to ".join(_amount(row.get(form, {}).get(key)) for form in ("plain", "indirect"))
        for key, title in {"registers": "registers", "spilled_bytes": "bytes spilled", "us": "us"}.items()
    },
    "note": lambda row: row.get("error", ""),
}


def ways(points: list[Row]) -> list[str]:
    return list(dict.fromkeys(way for point in points for way in point["ways"]))


def beside_cases(more: Row) -> list[str]:
    """What the suite bindings has beside its cases."""
    parts = []
    points = more.get("figure8", ())
    for key, title in FIGURE8.items() if points else ():
        columns: Columns = {"inputs": lambda point: str(point["parameters"])}
        columns |= {
            way: lambda point, way=way, key=key: _us(point["ways"].get(way, {}).get(key)) for way in ways(points)
        }
        parts += [f"## Microseconds by inputs that move: {title}", as_table(points, columns, True)]
    if more.get("crossovers"):
        parts.append(
            "\n".join(
                f"- `{c['faster']}` is faster than `{c['than']}` ({FIGURE8[c['by']]}) from {c['from']} inputs on."
                for c in more["crossovers"]
            )
        )
    if more.get("kernels"):
        parts += [
            "## Kernels, plain and with pointers loaded from a table",
            as_table(more["kernels"], KERNEL_COLUMNS, True),
        ]
    return parts


def as_choice(variant: str) -> str:
    return {"no_cg": "no_graph", "stock_cg": "copy"}.get(variant, variant.removeprefix("forced_"))


def selection_summary(rows: list[Row]) -> list[str]:
    """How close the choices are to the best ones."""
    found = {row["name"]: value for row in rows if (value := regret(row)) is not None}
    if not found:
        return []
    exact = sum(as_choice(best_candidate(row)) == row.get("choice") for row in rows if row["name"] in found)
    mean, worst = statistics.geometric_mean(found.values()) - 1, max(found, key=found.__getitem__)
    return [
        f"Of {len(found)} cases none of the candidates was faster than PyGraph, beyond the noise, in "
        f"{sum(value == 1 for value in found.values())}; in {exact} the choice was the fastest candidate.",
        f"Regret: geomean {100 * mean:.2f} %{'' if mean <= MAX_REGRET else ' (FAIL)'}, "
        f"of at most {100 * MAX_REGRET:g} %; {100 * (found[worst] - 1):.1f} % in {worst}.",
    ]


def _totals(rows: list[Row]) -> list[str]:
    if _are_workloads(rows):
        return summary(rows)
    return selection_summary(rows) if any("forced_copy" in row.get("candidates_us", ()) for row in rows) else []


def document(suite: str, rows: list[Row], plots: dict[str, str], more: Row | None = None) -> str:
    """A Markdown page: ``plots`` are titles and files, ``more`` is what a suite has beside its rows."""
    rows = in_order(rows)
    parts = [f"# Suite {suite}"]
    if totals := _totals(rows):
        parts.append("\n".join(f"- {line}" for line in totals))
    parts += [f"![{title}]({file})" for title, file in plots.items()]
    parts += rows and [
        "Importing torch and tracing a model, in the installed torch and in PyGraph's with the flag off: medians of "
        "samples in turns. `x stock` is the median over pairs of samples, and its confidence interval of 95 %. "
        "`x stock's bytecode` compares how many instructions of bytecode Python executes."
        if _is_overhead(rows)
        else "Microseconds a call: medians of interleaved rounds in one process, with new input buffers in each call. "
        "`host` is the time until a call of PyGraph's returns. `x best` is the median over the rounds of PyGraph's time "
        "to the best candidate's, and its confidence interval of 95 %; a miss counts if all of it is above 1.02.",
        format_table(rows, markdown=True),
    ]
    ran = [row for row in rows if "skipped" not in row and "error" not in row]
    for title, text, columns, key in SECTIONS:
        _, *cells = columns.values()
        having = [row for row in ran if row.get(key) and any(cell(row) != "-" for cell in cells)]
        if having:
            parts += [f"## {title}", text, as_table(having, columns, True)]
    parts += beside_cases(more or {})
    if _are_workloads(rows):
        parts += ["## The workloads", as_table(rows, ABOUT_COLUMNS, True)]
    notes = [f"- `{row['name']}`: {note}" for row in rows for note in _notes(row)]
    notes += [f"- `{name}`: the host was {ratio:.2f} times as slow" for name, ratio in slow_hosts(rows).items()]
    if notes:
        parts += ["## Notes", "\n".join(notes)]
    if rows:
        parts += ["## Runs", "\n".join(f"- {run}" for run in _runs(rows))]
    return "\n\n".join(parts) + "\n"
