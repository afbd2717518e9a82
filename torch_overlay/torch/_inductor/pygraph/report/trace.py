"""From a finished run to reports: one for each process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TYPE_CHECKING

from torch._inductor.pygraph.report import Report
from torch._inductor.pygraph.types.journal import ARTIFACT
from torch._inductor.pygraph.types.reason import Reason
from torch._inductor.pygraph.types.report import (
    Blocker,
    BreakReport,
    CpuValue,
    FunctionReport,
    GraphReport,
    PartitionReport,
)


if TYPE_CHECKING:
    from collections.abc import Iterator


def load(path: Path) -> list[Report]:
    """Return the reports of a directory of traces, of one such log, or of Report.json(); ValueError if it has none."""
    try:
        if path.suffix == ".json":
            content = json.loads(path.read_text())
            functions = map(_function, content["functions"])
            return [Report(functions, map(_graph, content["graphs"]), content["title"])]
        logs = sorted(path.rglob("*.log")) if path.is_dir() else [path]
        reports = [report for log in logs if (report := _of_log(log)) is not None]
    except (LookupError, TypeError, ValueError) as e:
        raise ValueError(f"{path} is no TORCH_TRACE or JSON of this version of PyGraph: {e!r}") from e
    if not reports:
        raise ValueError(
            f"{path} has no {ARTIFACT}: the program ran without TORCHINDUCTOR_PYGRAPH=1, "
            "or compiled nothing for a GPU, or this is not its TORCH_TRACE=DIRECTORY"
        )
    if len(reports) == 1 and path.is_dir():
        reports[0].title = ""
    return reports


def _of_log(path: Path) -> Report | None:
    functions: dict[int, FunctionReport] = {}
    graphs = []
    breaks = []
    title = path.name
    for record, payload in _artifacts(path):
        if "function" in payload:
            function = _function(payload["function"])
            functions[function.number] = function
        elif "graph" in payload:
            graphs.append(_graph(payload["graph"]))
        else:
            breaks.append(_break(payload["break"]))
        if "rank" in record:
            title = f"rank {record['rank']}"
    return Report(functions.values(), graphs, title, breaks) if functions or graphs or breaks else None


def _function(content: dict[str, Any]) -> FunctionReport:
    return FunctionReport(**{**content, "reasons": [*map(Reason.from_json, content["reasons"])]})


def _graph(content: dict[str, Any]) -> GraphReport:
    partitions = [
        PartitionReport(p["kernels"], p["source"], tuple(_blockers(p)), tuple(CpuValue(**v) for v in p["cpu_values"]))
        for p in content["partitions"]
    ]
    return GraphReport(**{**content, "blockers": _blockers(content), "partitions": partitions})


def _break(content: dict[str, Any]) -> BreakReport:
    return BreakReport(**{**content, "reason": Reason.from_json(content["reason"])})


def _blockers(content: dict[str, Any]) -> list[Blocker]:
    return [Blocker(b["op"], Reason.from_json(b["reason"]), b["source"]) for b in content["blockers"]]


def _artifacts(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield (record, payload) of each report: lines of "PREFIX] RECORD", each followed by a tab and the payload."""
    record: dict[str, Any] | None = None
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            # The last line that a process wrote before it was killed may be a part.
            if line.startswith("\t"):
                if record is not None and line.endswith("\n"):
                    yield record, json.loads(line)
                record = None
            else:
                # Most of a trace is other artifacts, which need not be parsed.
                is_report = f'"{ARTIFACT}"' in line and line.endswith("\n")
                record = json.loads(line[line.index("{") :]) if is_report else None
