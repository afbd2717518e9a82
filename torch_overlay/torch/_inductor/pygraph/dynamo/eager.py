"""
Which frames run eagerly without PyGraph, and are compiled with it unless there is an obstacle.

Marks in the context of the code object survive the analysis, which Dynamo may repeat.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch._dynamo.code_context import code_context
from torch._dynamo.exc import SkipFrame
from torch._dynamo.resume_execution import ContinueExecutionCache
from torch._inductor.pygraph.dynamo import obstacles
from torch._inductor.pygraph.types.reason import Code, log_line, Reason


if TYPE_CHECKING:
    import types

    from torch._dynamo.symbolic_convert import InstructionTranslatorBase


log = logging.getLogger(__name__)

# A loop of the code breaks the graph: without PyGraph, Dynamo skips the frame.
BREAKS_IN_LOOP = "pygraph_breaks_in_loop"

# A tensor of the code is indexed by a slice that breaks the graph: without PyGraph, the graph
# breaks where the slice is made, and Dynamo cannot resume there.
BREAKS_AT_SLICE = "pygraph_breaks_at_slice"


def mark_break_in_loop(tx: InstructionTranslatorBase) -> bool:
    """Return whether PyGraph may compile the code before the loop that ``tx`` is in."""
    root = tx.output.root_tx
    if root is None:
        return False
    code_context.get_context(root.f_code)[BREAKS_IN_LOOP] = True
    return True


def mark_break_at_slice(code: types.CodeType) -> None:
    code_context.get_context(original(code))[BREAKS_AT_SLICE] = True


def is_eager(code: types.CodeType) -> bool:
    """Return whether a frame of ``code`` runs eagerly without PyGraph."""
    whole = original(code)
    return is_marked(code, BREAKS_IN_LOOP) or (whole is not code and is_marked(whole, BREAKS_AT_SLICE))


def is_marked(code: types.CodeType, mark: str) -> bool:
    return code_context.has_context(code) and mark in code_context.get_context(code)


def original(code: types.CodeType) -> types.CodeType:
    """Return the function's code if ``code`` follows a graph break in it, else ``code``."""
    part = ContinueExecutionCache.generated_code_metadata.get(code)
    return code if part is None else part.code


def skip_if_different(root: InstructionTranslatorBase, traced: obstacles.Traced) -> None:
    """
    Raises:
        SkipFrame: the frame runs eagerly without PyGraph, and there is an obstacle.
    """
    code = root.f_code
    if is_eager(code):
        if (obstacle := next(obstacles.of_frame(root, traced), None)) is not None:
            reason = Reason.of(Code.EAGER, obstacle=obstacle)
            place = f"{code.co_filename}:{code.co_firstlineno}"
            log.info("%s", log_line(place, code.co_name, "runs eagerly", reason))
            raise SkipFrame(reason.text)
