"""The reports of this process, and the structured trace that other processes read them from."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from torch._guards import CompileId
from torch._inductor.pygraph.types.report import as_json, BreakReport, FunctionReport, GraphReport
from torch._logging import trace_structured


if TYPE_CHECKING:
    from collections.abc import Collection

# The name of a report in the structured trace.
ARTIFACT = "pygraph_report"

functions: list[FunctionReport] = []
graphs: list[GraphReport] = []
breaks: list[BreakReport] = []

KINDS = {FunctionReport: ("function", functions), GraphReport: ("graph", graphs), BreakReport: ("break", breaks)}


def clear() -> None:
    for _, entries in KINDS.values():
        entries.clear()


def add(entry: FunctionReport | GraphReport | BreakReport) -> None:
    KINDS[type(entry)][1].append(entry)
    publish(entry)


def drop(entries: Collection[FunctionReport]) -> None:
    functions[:] = [f for f in functions if f not in entries]


def publish(entry: FunctionReport | GraphReport | BreakReport) -> None:
    """Write to the structured trace. The last report of a function there is the valid one."""
    kind, _ = KINDS[type(entry)]
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": ARTIFACT, "encoding": "json"},
        payload_fn=lambda: json.dumps({kind: entry}, default=as_json),
        expect_trace_id=False,
        compile_id=CompileId.from_string(entry.compile_id or None),
    )
