"""
Whether what comes before a loop that breaks the graph is compiled.

Upstream skips the whole frame. Compiled up to its last checkpoint, it goes through what any
graph break goes through, and where that is not what eager mode does the frame is skipped:

- What an operator of the graph raises is raised by the call of the graph, which is in no
  try statement of the frame.
- Of the locals, only those that bytecode reads are there again, beside some of Dynamo's own.
- A new object of a class that extends set comes back empty.
- NumPy's draws are made by torch's generator.

Frames that upstream compiles are as before.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch._dynamo.code_context import code_context
from torch._dynamo.exc import RestartAnalysis, Unsupported
from torch._dynamo.variables import UserDefinedSetVariable


if TYPE_CHECKING:
    import types
    from collections.abc import Sequence

    import torch.fx
    from torch._dynamo.bytecode_transformation import Instruction
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase


# In the context of the code, once it was found to break in a loop.
IS_COMPILED = "pygraph_prefix"

# They find locals by name.
FRAME_READERS = frozenset(
    ("locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe")
)


def may_be_compiled(tx: InstructionTranslatorBase) -> bool:
    """Called where a loop breaks the graph. Remembers the answer for is_left_out."""
    if tx.output.root_tx is None:
        return False
    code = tx.output.root_tx.f_code
    checkpoint = tx.current_speculation
    end = 0 if checkpoint is None else checkpoint.instruction_pointer
    may_be = (
        FRAME_READERS.isdisjoint(code.co_names)
        and not in_try_statement(tx.instructions, end)
        and not any(
            isinstance(v, UserDefinedSetVariable)
            for v in tx.output.side_effects.id_to_variable.values()
        )
        and not draws_as_numpy(tx.output.graph)
    )
    code_context.get_context(code)[IS_COMPILED] = may_be
    return may_be


def is_left_out(code: types.CodeType, failure: Exception) -> bool:
    """
    Whether a frame that could not be compiled is skipped. Upstream skips it before it tries
    to compile what comes before the loop, and so does not fail.
    """
    return (
        code_context.has_context(code)
        and code_context.get_context(code).get(IS_COMPILED, False)
        and not isinstance(failure, (RestartAnalysis, Unsupported))
    )


def in_try_statement(instructions: Sequence[Instruction], end: int) -> bool:
    """Whether an instruction before ``end`` is in one. A with statement is none here."""
    following = dict(zip(map(id, instructions), instructions[1:]))

    def is_handled(inst: Instruction) -> bool:
        # Up to Python 3.10.
        if inst.opname == "SETUP_FINALLY":
            return True
        entry = inst.exn_tab_entry
        return (
            entry is not None
            and entry.target.opname == "PUSH_EXC_INFO"
            and following[id(entry.target)].opname != "WITH_EXCEPT_START"
        )

    return any(map(is_handled, instructions[:end]))


def draws_as_numpy(graph: torch.fx.Graph) -> bool:
    def module_of(target: Any) -> object:
        # A wrapper of torch._numpy's function.
        return getattr(getattr(target, "f", None), "__module__", None)

    return any(module_of(node.target) == "torch._numpy.random" for node in graph.nodes)
