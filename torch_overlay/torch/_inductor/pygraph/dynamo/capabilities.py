"""
What Dynamo does for PyGraph, as the capabilities of Inductor with ``config.pygraph``.

PyGraph extends the analysis of each frame:

- items      the value of a 0-d CPU tensor becomes an input of the graph (items.py)
- slices     a slice with tensor bounds breaks the graph where it is used (slices.py)
- loops      the code before a loop that breaks the graph is compiled (eager.py)
- obstacles  none of this happens where compiled code may differ from eager code (obstacles.py)
"""

from __future__ import annotations

import contextlib
from typing import Any, TYPE_CHECKING

from torch._dynamo.capabilities import BackendCapabilities, FrameExtension
from torch._dynamo.exc import RestartAnalysis, SkipFrame, Unsupported
from torch._inductor.pygraph import native
from torch._inductor.pygraph.dynamo import eager, slices
from torch._inductor.pygraph.dynamo.items import Items
from torch._inductor.pygraph.dynamo.obstacles import Traced


if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Sequence

    from torch._dynamo.bytecode_transformation import Instruction
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.lists import SliceVariable
    from torch._dynamo.variables.tensor import TensorVariable


class PyGraphFrame(FrameExtension):
    def __init__(self) -> None:
        super().__init__()
        self.traced = Traced()
        self.items = Items(self.traced)

    def on_instruction(self, tx: InstructionTranslatorBase, inst: Instruction) -> None:
        self.traced.add_instruction(inst, tx.stack)

    def on_call(self, tx: InstructionTranslatorBase, fn: VariableTracker) -> None:
        self.traced.add_call(fn)

    def make_slice(self, tx: InstructionTranslatorBase, items: Sequence[VariableTracker]) -> SliceVariable | None:
        return slices.make_slice(tx, items, self.traced)

    def item(self, tx: InstructionTranslatorBase, tensor: TensorVariable) -> VariableTracker | None:
        return self.items.wrap(tx, tensor)

    def on_break_in_loop(self, tx: InstructionTranslatorBase) -> bool:
        return eager.mark_break_in_loop(tx)

    def check_subgraph(self, tx: InstructionTranslatorBase) -> None:
        eager.skip_if_different(tx, self.traced)

    def check_graph(self, tx: InstructionTranslatorBase) -> None:
        self.items.check_graph(tx)

    def around_backend(self, tx: InstructionTranslatorBase) -> contextlib.AbstractContextManager[None]:
        return self.items.around_backend(tx)

    def on_failure(self, tx: InstructionTranslatorBase, error: Exception) -> None:
        if isinstance(error, RestartAnalysis):
            return
        # Without the items there may be no error.
        self.items.break_at_all(tx)
        if not isinstance(error, Unsupported) and eager.is_eager(tx.f_code):
            raise SkipFrame("a frame that may run eagerly does not compile") from error


class PyGraphCapabilities(BackendCapabilities):
    delivers_floats = True
    as_tensor = ("torch._inductor.pygraph.native", "as_tensor_fullprec")
    keeps_locals_in_variables = True
    avoids_python_in_guards = True

    def wrap_callback(self, callback: Any, backend: Callable[..., Any]) -> Any:
        return native.callback(callback, backend)

    def extend_frame(self) -> PyGraphFrame:
        return PyGraphFrame()

    def on_guard_failure(self, code: types.CodeType, error: Exception) -> None:
        if eager.is_eager(code):
            # Only the tracer may raise SkipFrame.
            raise Unsupported("a frame that may run eagerly has no guards") from error


PYGRAPH = PyGraphCapabilities()
