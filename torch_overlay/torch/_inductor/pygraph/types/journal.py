"""
The reports of this process, and the structured trace that other processes read them from.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from torch._guards import CompileId
from torch._inductor.pygraph.types.report import as_json, FunctionReport, GraphReport
from torch._logging import trace_structured


if TYPE_CHECKING:
    from collections.abc import Collection

# The name of a report in the structured trace.
ARTIFACT = "pygraph_report"

functions: list[FunctionReport] = []
graphs: list[GraphReport] = []


def clear() -> None:
    functions.clear()
    graphs.clear()


def add(entry: FunctionReport | GraphReport) -> None:
    (functions if isinstance(entry, FunctionReport) else graphs).append(entry)
    publish(entry)


def drop(entries: Collection[FunctionReport]) -> None:
    functions[:] = [f for f in functions if f not in entries]


def publish(entry: FunctionReport | GraphReport) -> None:
    """Write to the structured trace. The last report of a function there is the valid one."""
    kind = "function" if isinstance(entry, FunctionReport) else "graph"
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": ARTIFACT, "encoding": "json"},
        payload_fn=lambda: json.dumps({kind: entry}, default=as_json),
        expect_trace_id=False,
        compile_id=CompileId.from_string(entry.compile_id or None),
    )
