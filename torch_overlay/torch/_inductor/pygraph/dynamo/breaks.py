"""
Which graph breaks were repaired, and which stay: for the report and the log.

A frame is analysed again at a break, and the call that it breaks at is not traced then. The reason why a repair was
refused is kept with the code of the outermost frame, by the line. It is the reason of a break that Dynamo makes in the
same line. Other breaks have Dynamo's reason.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import NoReturn, TYPE_CHECKING

import torch
from torch._dynamo.code_context import code_context
from torch._dynamo.exc import UnspecializeRestartAnalysis
from torch._guards import CompileContext
from torch._inductor.pygraph.dynamo import turns
from torch._inductor.pygraph.types import journal
from torch._inductor.pygraph.types.reason import Code, first_line, log_line, Reason
from torch._inductor.pygraph.types.report import BreakReport


if TYPE_CHECKING:
    import traceback
    import types
    from collections.abc import Iterable, Iterator, Sequence

    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker


log = logging.getLogger(__name__)

# Keys in a code object's context: why repairs were refused, by line; and why the graph has to break, by instruction.
REFUSED = "pygraph_refused_repairs"
BROKEN = "pygraph_broken"

# What Dynamo says of breaks that PyGraph never avoids
STOCK = {
    "Data dependent operator": Code.DATA_DEPENDENT,
    "Dynamic shape operator": Code.DATA_DEPENDENT,
    "torch.* op returned non-Tensor": Code.NO_TENSOR,
}


# How Dynamo's messages go on
EXPLANATION = "Explanation: "

# Its lines are no lines of the program.
TORCH = os.path.dirname(torch.__file__)


@dataclasses.dataclass
class Call:
    """A call that Dynamo is about to trace."""

    fn: VariableTracker
    args: Sequence[VariableTracker]
    kwargs: dict[str, VariableTracker]

    @property
    def values(self) -> list[VariableTracker]:
        return [*self.args, *self.kwargs.values()]


class Breaks:
    """What was repaired in one frame and the calls that it inlines."""

    def __init__(self) -> None:
        super().__init__()
        self.repaired: dict[str, Reason] = {}

    def repair(self, tx: InstructionTranslatorBase, reason: Reason) -> None:
        self.repaired[place_of(tx)] = reason

    def report_breaks(self, tx: InstructionTranslatorBase) -> None:
        """Called at the end of a graph, for a break or not."""
        for place, reason in self.repaired.items():
            add(place, reason, is_repaired=True)
        self.report_stay(tx)

    def report_stay(self, tx: InstructionTranslatorBase) -> None:
        """Report the break that the graph ends at, if it does."""
        why = tx.output.compile_subgraph_reason
        if why.graph_break and turns.__file__ not in why.reason:
            report_break(tx, why.reason, why.user_stack)


def report_break(tx: InstructionTranslatorBase, said: str, stack: Sequence[traceback.FrameSummary]) -> None:
    """
    Report a graph break of a frame ``tx``. ``said`` is Dynamo's message. ``stack`` has the program's lines that led to the
    break, functions that Dynamo inlined included, the innermost one last.
    """
    places = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in stack] or [place_of(tx)]
    of_program = [p for p in places if not p.startswith(TORCH)] or places
    add(of_program[-1], refused(tx.f_code).get(places[-1]) or reason_of(said), is_repaired=False)


def add(place: str, reason: Reason, *, is_repaired: bool) -> None:
    report = BreakReport(place, reason, is_repaired, str(CompileContext.current_compile_id() or ""))
    if report in journal.breaks:
        return
    journal.add(report)
    outcome = "graph break repaired" if report.is_repaired else "graph break"
    log.info("%s", log_line(report.source, report.compile_id, outcome, report.reason))


def reason_of(said: str) -> Reason:
    kind = first_line(said)
    return Reason.of(STOCK[kind]) if kind in STOCK else Reason.of(Code.DYNAMO, said=gist(said))


def gist(said: str) -> str:
    """Return the kind of a graph break and its explanation, from Dynamo's message."""
    kind, *lines = said.splitlines() or [""]
    explained = [line.strip() for line in lines if line.strip().startswith(EXPLANATION)]
    return f"{kind}: {explained[0].removeprefix(EXPLANATION)}" if explained else kind


def frames_of(tx: InstructionTranslatorBase) -> Iterator[InstructionTranslatorBase]:
    """Return a frame and those that it is inlined in, up to the one that Dynamo compiles."""
    frame: InstructionTranslatorBase | None = tx
    while frame is not None:
        yield frame
        frame = frame.parent


def refuse(tx: InstructionTranslatorBase, code: Code, **details: object) -> None:
    """Keep why the graph breaks in the current line."""
    refused(tx.output.root_tx.f_code)[place_of(tx)] = Reason.of(code, **details)


def refused(code: types.CodeType) -> dict[str, Reason]:
    return code_context.get_context(code).setdefault(REFUSED, {})


def broken(code: types.CodeType) -> dict[int, Reason]:
    """Return the instructions of a code object at which the graph has to break, and why. They survive a new analysis."""
    return code_context.get_context(code).setdefault(BROKEN, {})


def is_broken(tx: InstructionTranslatorBase, site: tuple[types.CodeType, int]) -> bool:
    """Return whether the graph has to break at a branch."""
    if (reason := broken(site[0]).get(site[1])) is not None:
        refuse(tx, reason.code, **reason.details)
    return reason is not None


def restart(sites: Iterable[tuple[types.CodeType, int]], code: Code, why: str) -> NoReturn:
    """Let the graph break at these branches."""
    for function, place in sites:
        broken(function)[place] = Reason.of(code, why=why)
    # In the next analysis, Dynamo speculates at other instructions.
    raise UnspecializeRestartAnalysis(restart_reason=f"{code.name}: {why}")


def place_of(tx: InstructionTranslatorBase) -> str:
    return f"{tx.f_code.co_filename}:{tx.lineno} in {tx.f_code.co_name}"
