"""
The reports of this process, and the structured trace that other processes read them from.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from torch._guards import CompileId
from torch._inductor.pygraph.types.report import as_json, FunctionReport, GraphReport
from torch._logging import trace_structured
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Iterable

# The name of a report in the structured trace.
ARTIFACT = "pygraph_report"

functions: list[FunctionReport] = []
graphs: list[GraphReport] = []


def clear() -> None:
    functions.clear()
    graphs.clear()


def add(entry: FunctionReport | GraphReport) -> None:
    if isinstance(entry, FunctionReport):
        functions.append(entry)
    else:
        graphs.append(entry)
    publish(entry)


def drop(entries: Iterable[FunctionReport]) -> None:
    numbers = OrderedSet(entry.number for entry in entries)
    functions[:] = [f for f in functions if f.number not in numbers]


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
