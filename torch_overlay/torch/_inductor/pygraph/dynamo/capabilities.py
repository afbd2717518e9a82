"""
What Dynamo does for PyGraph, as the capabilities of Inductor with ``config.pygraph``. The classes that extend the
analysis of each frame are described in their modules. Branches, checks, copies, effects, fills and bodies of loops
need ``config.pygraph_mend``.
"""

from __future__ import annotations

import contextlib
from typing import Any, TYPE_CHECKING

import torch
import torch.fx
from torch._dynamo.capabilities import BackendCapabilities
from torch._dynamo.exc import RestartAnalysis, SkipFrame, UnspecializeRestartAnalysis, Unsupported
from torch._inductor.pygraph import native
from torch._inductor.pygraph.dynamo.breaks import broken, Call, report_break, restart
from torch._inductor.pygraph.dynamo.checks import Checks
from torch._inductor.pygraph.dynamo.conversions import convert
from torch._inductor.pygraph.dynamo.copies import Copies
from torch._inductor.pygraph.dynamo.effects import nodes_after
from torch._inductor.pygraph.dynamo.fills import Fills
from torch._inductor.pygraph.dynamo.hosts import ancestors_of
from torch._inductor.pygraph.dynamo.items import break_at, Items
from torch._inductor.pygraph.dynamo.joins import MAX_OPERATORS
from torch._inductor.pygraph.dynamo.leaves import Leaves
from torch._inductor.pygraph.dynamo.lookups import Lookups
from torch._inductor.pygraph.dynamo.loops import iterates_tensors, jumps_back, Loops
from torch._inductor.pygraph.dynamo.obstacles import is_eager
from torch._inductor.pygraph.dynamo.operators import is_draw
from torch._inductor.pygraph.dynamo.sharded import release_gathered
from torch._inductor.pygraph.dynamo.slices import make_slice
from torch._inductor.pygraph.dynamo.whiles import Whiles
from torch._inductor.pygraph.types.reason import Code, Reason


if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Iterator, Sequence

    from torch._dynamo.bytecode_transformation import Instruction
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.lists import SliceVariable


class PyGraphFrame(Items):
    def make_slice(self, tx: InstructionTranslatorBase, items: Sequence[VariableTracker]) -> SliceVariable | None:
        return make_slice(tx, items, self)

    def check_graph(self, tx: InstructionTranslatorBase) -> None:
        super().check_graph(tx)
        release_gathered(tx)

    def on_failure(self, tx: InstructionTranslatorBase, error: Exception) -> None:
        if isinstance(error, RestartAnalysis):
            return
        # Without the items there may be no error.
        break_at(tx, self.by_name)
        if not isinstance(error, Unsupported) and is_eager(tx.f_code):
            raise SkipFrame("a frame that may run eagerly does not compile") from error


class MendingFrame(Leaves, Whiles, Lookups, Fills, Checks, Copies, Loops, PyGraphFrame):
    def __init__(self) -> None:
        super().__init__()
        # By code and instruction, the first value that decided there
        self.decided_at: dict[tuple[types.CodeType, int], torch.fx.Node] = {}

    def defer(
        self,
        tx: InstructionTranslatorBase,
        fn: VariableTracker,
        args: Sequence[VariableTracker],
        kwargs: dict[str, VariableTracker],
    ) -> VariableTracker | None:
        call = Call(fn, args, kwargs)
        if (items := self.enumerate_items(tx, call)) is not None:
            return items
        if (value := self.bool_of_call(tx, call)) is not None:
            return value
        if (value := convert(tx, call)) is not None:
            return value
        for trace, code in (
            (self.copy_object, Code.COPIED_BY_DYNAMO),
            (self.call_behind, Code.CALL_BEHIND_GRAPH),
            (self.check_behind, Code.CHECK_BEHIND_GRAPH),
            (self.loop_in_graph, Code.LOOP_IN_GRAPH),
        ):
            if (result := trace(tx, call)) is not None:
                self.repair(tx, Reason.of(code))
                return result
        return None

    def on_graph_break(self, tx: InstructionTranslatorBase, error: Unsupported) -> None:
        """Raises RestartAnalysis: the loop stays, and the graph breaks in a function that the loop calls, as in stock."""
        super().on_graph_break(tx, error)
        called = [site for site in self.truths if site[0] is not tx.f_code]
        if called and jumps_back(tx):
            # Dynamo would compile the rest of the loop as a resume function. It would call a further one in each turn.
            restart(called, Code.BRANCH_STAYS, "a loop that stays asks for it")

    def on_jump(self, tx: InstructionTranslatorBase, inst: Instruction) -> bool:
        if self.follow_sizes(tx, inst):
            code: Code | None = Code.SIZES_DECIDE
        elif self.check_at_jump(tx, inst):
            code = Code.CHECK_BEHIND_GRAPH
        else:
            code = self.branch(tx, inst)
        if code is None:
            self.read_bool(tx, inst)
        else:
            self.repair(tx, Reason.of(code))
        return code is not None

    def decide(self, tx: InstructionTranslatorBase, node: torch.fx.Node) -> bool | None:
        if self.is_selected(tx, node):
            return None
        site = tx.indexof[tx.current_instruction]
        first = self.decided_at.get((tx.f_code, site))
        if first is not None:
            self.select_layers(tx, node)
        # Paths of so many operators do not become torch.where.
        is_large = first is not None and len([*nodes_after(first)]) > MAX_OPERATORS * len(self.decided)
        root = tx.output.root_tx
        if is_large and (any(map(is_draw, ancestors_of(node))) or iterates_tensors(root)):
            # Each turn has two outcomes, and each of their combinations would have a graph. Turns that differ in a
            # tensor alone need no graph for all of them.
            self.outline(root)
        try:
            outcome = super().decide(tx, node)
        except UnspecializeRestartAnalysis as e:
            if is_large and torch.is_grad_enabled():
                # torch.cond gives gradients of zeros. The next analysis need not trace the paths.
                broken(tx.f_code)[site] = Reason.of(Code.BRANCH_STAYS, why=e.restart_reason)
            raise
        if outcome is not None:
            self.decided_at.setdefault((tx.f_code, site), node)
        return outcome

    def on_failure(self, tx: InstructionTranslatorBase, error: Exception) -> None:
        if isinstance(error, Unsupported) and not tx.one_graph:
            report_break(tx, error.msg, error.real_stack)
        super().on_failure(tx, error)
        # Stock breaks the graph before the error, and has run what the program does until then.
        if self.repaired and not tx.one_graph and not isinstance(error, RestartAnalysis | Unsupported):
            self.break_at_conds()
            raise SkipFrame("a frame whose graph breaks were repaired does not compile") from error

    def check_subgraph(self, tx: InstructionTranslatorBase) -> None:
        try:
            super().check_subgraph(tx)
        except SkipFrame:
            self.report_stay(tx)
            raise
        self.check_copies(tx)
        # Before effects change the graph
        self.guard_outcomes(tx)
        self.check_effects(tx, self.drawn_in_front(tx))
        self.settle_stores(tx)
        self.report_breaks(tx)

    def check_graph(self, tx: InstructionTranslatorBase) -> None:
        super().check_graph(tx)
        self.check_joins(tx)
        self.check_handlers(tx)
        self.complete_gates(tx)
        self.erase_draws(tx)

    @contextlib.contextmanager
    def around_backend(self, tx: InstructionTranslatorBase) -> Iterator[None]:
        with super().around_backend(tx), self.around_compilation(tx):
            yield


class PyGraphCapabilities(BackendCapabilities):
    delivers_floats = True
    as_tensor = ("torch._inductor.pygraph.native", "as_tensor_fullprec")
    keeps_locals_in_variables = True
    asks_for_profiler = True
    avoids_python_in_guards = True

    def __init__(self, frame: type[PyGraphFrame]) -> None:
        self.frame = frame

    def wrap_callback(self, callback: Any, backend: Callable[..., Any]) -> Any:
        return native.callback(callback, backend)

    def extend_frame(self) -> PyGraphFrame:
        return self.frame()

    def on_guard_failure(self, code: types.CodeType, error: Exception) -> None:
        if is_eager(code):
            # Only the tracer may raise SkipFrame.
            raise Unsupported("a frame that may run eagerly has no guards") from error


PYGRAPH = PyGraphCapabilities(PyGraphFrame)


class MendingCapabilities(PyGraphCapabilities):
    def wrap_callback(self, callback: Any, backend: Any) -> Any:
        if callback.hooks.guard_filter_fn is not None:
            # The filter may drop guards on the outcomes of branches. Calls with other outcomes would run the wrong path.
            backend.dynamo_capabilities = lambda: PYGRAPH
        return super().wrap_callback(callback, backend)


MENDING = MendingCapabilities(MendingFrame)
