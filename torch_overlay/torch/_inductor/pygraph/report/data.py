"""The reports of one process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import overload, TYPE_CHECKING

from torch._inductor.pygraph.types.report import as_json, FunctionReport, GraphReport


if TYPE_CHECKING:
    from collections.abc import Iterable


class ReportData(Sequence[FunctionReport]):
    """The functions and graphs of one process; as a sequence, its functions."""

    def __init__(
        self,
        functions: Iterable[FunctionReport],
        graphs: Iterable[GraphReport],
        title: str = "",
    ) -> None:
        self.functions = list(functions)
        self.graphs = list(graphs)
        self.title = title

    def __len__(self) -> int:
        return len(self.functions)

    @overload
    def __getitem__(self, index: int) -> FunctionReport: ...

    @overload
    def __getitem__(self, index: slice) -> list[FunctionReport]: ...

    def __getitem__(self, index: int | slice) -> FunctionReport | list[FunctionReport]:
        return self.functions[index]

    def by_gain(self) -> list[FunctionReport]:
        """Return the functions: those that save most first, then those that take longest."""
        return sorted(
            self.functions,
            key=lambda f: (-f.saved_us, -max(f.timings_us.values(), default=0)),
        )

    def json(self) -> str:
        content = {
            "title": self.title,
            "functions": self.functions,
            "graphs": self.graphs,
        }
        return json.dumps(content, indent=1, default=as_json)
