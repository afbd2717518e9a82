"""
Counts the graphs and graph breaks of one program.

Once Dynamo has skipped a frame, it skips the frame for all programs of the process. Frames gives each program skips of
its own.
"""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar, TYPE_CHECKING
from unittest import mock

from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo.convert_frame import CatchErrorsWrapper
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch._dynamo.utils import counters, graph_break_reasons


if TYPE_CHECKING:
    import types
    from collections.abc import Iterator

    from torch._dynamo.types import ConvertFrameReturn


TRACED = FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT)


class Frames:
    # By identity: code objects of other functions may be equal.
    skipped_by_any: ClassVar[dict[int, types.CodeType]] = {}

    def __init__(self) -> None:
        self.graphs = 0
        # (file, line) of what breaks the graph, or of where code begins that Dynamo skips for a break. Code objects say less:
        # Dynamo may compile one several times, and may resume within a line or run the rest eagerly.
        self.broken: set[tuple[str, int]] = set()
        self.skipped: dict[int, FrameExecStrategy] = {}

    @property
    def breaks(self) -> int:
        return len(self.broken)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Give Dynamo the skips of this program, and count its graphs and breaks."""
        for key, code in self.skipped_by_any.items():
            set_code_exec_strategy(code, self.skipped.get(key, TRACED))
        graphs = counters["stats"]["unique_graphs"]
        convert = CatchErrorsWrapper.__call__

        def noting(wrapper: CatchErrorsWrapper, frame: Any, *args: Any, **kwargs: Any) -> ConvertFrameReturn:
            # Of counters["graph_break"], breaks at branches are missing.
            unsupported, reasons = counters["unimplemented"].total(), len(graph_break_reasons)
            result = convert(wrapper, frame, *args, **kwargs)
            found = {(s[-1].filename, s[-1].lineno) for r in graph_break_reasons[reasons:] if (s := r.user_stack)}
            if result.guarded_code is None and result.apply_to_code:
                self.skipped_by_any[id(frame.f_code)] = frame.f_code
                self.skipped[id(frame.f_code)] = result.frame_exec_strategy
                # Dynamo gives no reason where it skips the frame for a break. PyGraph may skip it after Dynamo gave one.
                if not found and counters["unimplemented"].total() > unsupported:
                    found = {(frame.f_code.co_filename, frame.f_code.co_firstlineno)}
            self.broken |= found
            return result

        with mock.patch.object(CatchErrorsWrapper, "__call__", noting):
            yield
        self.graphs += counters["stats"]["unique_graphs"] - graphs
