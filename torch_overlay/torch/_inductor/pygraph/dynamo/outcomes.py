"""
What a guard computes to find the outcomes of branches (hosts.py).

A guard that waits for the GPU would launch the program's operators one by one in each call. So the backend compiles
them as it compiles a graph, and they are captured, too. The host reads all outcomes at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import Any, TYPE_CHECKING

import torch
import torch.fx
from torch._dynamo import capabilities
from torch._dynamo.decorators import disable
from torch._dynamo.eval_frame import innermost_fn
from torch._dynamo.guards import _get_closure_vars
from torch._dynamo.utils import preserve_rng_state
from torch._guards import tracing, TracingContext
from torch._inductor.pygraph.dynamo.operators import is_draw
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._dynamo.guards import GuardBuilder
    from torch._guards import Guard
    from torch.utils._ordered_set import OrderedSet

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Decision:
    """
    Attributes:
        node: whose truth decided
        last: the last node that guards had to compute when it was decided
        truth: of the node
    """

    node: torch.fx.Node
    last: torch.fx.Node
    truth: bool


class DiffersError(RuntimeError):
    """A branch has another outcome than in the call that was traced."""


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """
    Attributes:
        graph: computes what decides, from a generator and the inputs, and returns its last value. Raises DiffersError.
        inputs: their expressions
        draws: it draws from the generator
    """

    graph: torch.fx.Graph
    inputs: list[str]
    draws: bool

    def finder(self, global_scope: dict[str, Any]) -> Callable[[Any], bool | None]:
        """
        Return what finds the last truth in a call from its variables, or None if an earlier one differs. The call's
        generator stays as it is.
        """
        function = torch.fx.GraphModule({}, self.graph).forward
        read = self.reader(global_scope)

        def find(local_scope: Any) -> bool | None:
            generator = torch.default_generator.clone_state() if self.draws else None
            with torch.no_grad() if self.inputs else contextlib.nullcontext():
                try:
                    return bool(function(generator, *read(local_scope)))
                except (IndexError, RuntimeError):
                    # An outcome differs, or the program raises it where it computes the value.
                    return None

        return find

    def compiled_finder(
        self, backend: Callable[..., Any], local_scope: Any, global_scope: dict[str, Any]
    ) -> Callable[[Any], bool | None]:
        """Return a finder for inputs as those in ``local_scope`` that runs what a backend compiles."""
        read = self.reader(global_scope)
        mode = FakeTensorMode(shape_env=ShapeEnv())
        inputs = [mode.from_tensor(t.detach(), static_shapes=True) for t in read(local_scope)]
        graph, earlier = self.with_all_truths()
        with preserve_rng_state(), tracing(TracingContext(mode)), torch.no_grad():
            function = backend(torch.fx.GraphModule({}, graph), inputs)
        innermost = innermost_fn(function)
        function = disable(function, reason="a guard runs it")
        # The series perf has them.
        direct_calls = getattr(capabilities, "direct_calls", {})
        if innermost in direct_calls:
            function = direct_calls[innermost](function, innermost)

        def find(local_scope: Any) -> bool | None:
            with torch.no_grad():
                (truths,) = function(*read(local_scope))
            *found, last = truths.tolist()
            return last if found == earlier else None

        return find

    def reader(self, global_scope: dict[str, Any]) -> Callable[[Any], tuple[torch.Tensor, ...]]:
        """Return what reads the inputs of a call from its variables."""
        scope = {**_get_closure_vars(), "G": global_scope}
        return eval(f"lambda L: ({''.join(f'{name}, ' for name in self.inputs)})", scope)

    def with_all_truths(self) -> tuple[torch.fx.Graph, list[bool]]:
        """Return a graph of the inputs that returns all truths in one tensor, and those expected before the last."""
        graph = torch.fx.Graph()
        last = graph.graph_copy(self.graph, {})
        generator, *_ = graph.nodes
        graph.erase_node(generator)
        expected, flags = [], []
        for node in [n for n in graph.nodes if n.target is expect]:
            value, truth = node.args
            with graph.inserting_before(node):
                # The program may write the value later.
                flags.append(flag_of(graph, value))
            graph.erase_node(node)
            expected.append(truth)
        flags.append(flag_of(graph, last))
        graph.output((graph.call_function(torch.cat, (flags,)),))
        return graph, expected


def flag_of(graph: torch.fx.Graph, value: torch.fx.Node) -> torch.fx.Node:
    return graph.call_function(torch.ne, (graph.call_function(torch.reshape, (value, (1,))), 0))


def outcomes_of(found: OrderedSet[torch.fx.Node], decided: Sequence[Decision], last: torch.fx.Node) -> Outcomes:
    """
    Return the computation of ``last``, which is asked after ``decided``. It stops at the first branch whose outcome
    differs. So it computes and writes nothing that the program reaches only by the traced outcome.
    """
    nodes = [node for node in last.graph.nodes if node in found]
    graph = torch.fx.Graph()
    generator = graph.placeholder("generator")
    inputs = [node for node in nodes if node.op == "placeholder"]
    inside = {node: graph.placeholder(node.name) for node in inputs}
    behind = iter(decided)
    decision = next(behind, None)
    for node in last.graph.nodes:
        if node in found and node.op != "placeholder":
            inside[node] = graph.node_copy(node, inside.__getitem__)
            # Guards live longer than the examples.
            inside[node].meta.clear()
            if is_draw(node):
                inside[node].update_kwarg("generator", generator)
        while decision is not None and decision.last is node:
            graph.call_function(expect, (inside[decision.node], decision.truth))
            decision = next(behind, None)
    graph.output(inside[last])
    names = [node.meta["grapharg"].source.name for node in inputs]
    return Outcomes(graph, names, any(map(is_draw, nodes)))


def expect(value: torch.Tensor, truth: bool) -> None:
    if bool(value) is not truth:
        raise DiffersError


def guard_on(
    builder: GuardBuilder, guard: Guard, outcomes: Outcomes, truth: bool, backend: Callable[..., Any] | None
) -> None:
    """Add a guard on the last outcome, compiled by ``backend`` if there is one."""
    find = outcomes.finder(builder.scope["G"])
    if backend is not None:
        try:
            find = outcomes.compiled_finder(backend, builder.scope["L"], builder.scope["G"])
        except Exception:
            log.warning("What a guard computes does not compile. It runs eagerly.", exc_info=True)
    # The guards of the inputs come first.
    builder.guard_manager.root.add_epilogue_lambda_guard(
        lambda local_scope: find(local_scope) is truth, ["the outcomes of branches"], None
    )
