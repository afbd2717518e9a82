"""What PyGraph did with each function that trees could record."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class FunctionReport:
    """
    One function (a graph, or one partition of it, for one set of sizes).

    Times are medians in microseconds, bytes are per replay. ``stock_copied_bytes`` is
    what cudagraph trees would copy, ``copied_bytes`` what the chosen candidate does.
    ``kernel_nodes`` are the nodes of the last recording, of any kind, ``updated_nodes``
    those that hold an external input.
    """

    name: str
    mode: str
    choice: str = "undecided"
    reason: str = ""
    timings_us: dict[str, float] = dataclasses.field(default_factory=dict)
    external_inputs: int = 0
    stock_copied_bytes: int = 0
    copied_bytes: int = 0
    kernel_nodes: int = 0
    updated_nodes: int = 0


_reports: list[FunctionReport] = []


def new_report(name: str, mode: str) -> FunctionReport:
    entry = FunctionReport(name, mode)
    _reports.append(entry)
    return entry


def report() -> list[FunctionReport]:
    """The functions seen since the process started or :func:`reset_report` was called."""
    return list(_reports)


def reset_report() -> None:
    _reports.clear()
