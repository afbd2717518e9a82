"""
Results of a graph that the program does not differentiate, in calls that drop layers (drops.py).

AOTAutograd takes zeros for the gradient of a result that is not used. If all layers of a decoder are dropped, a gradient
reaches the encoder only by the encoder's own result. If the program does not use that, eager mode gives the encoder no
gradient, and AOTAutograd gives zeros. So in such a call, a hook of the graph's node takes them away.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo import capabilities
from torch._dynamo.decorators import disable
from torch._dynamo.eval_frame import innermost_fn


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Alternatives, each of which is a set of gates and their outcomes
Condition = frozenset[frozenset[tuple[int, bool]]]


def holds(condition: Condition, outcomes: Sequence[bool]) -> bool:
    return any(all(outcomes[i] is side for i, side in term) for term in condition)


@dataclasses.dataclass(frozen=True)
class Results:
    """
    Which results lead gradients to which inputs.

    Attributes:
        gates: inputs of the graph, the outcomes of gates
        conditions: by input and the place of the result, when a gradient reaches the one from the other
    """

    gates: list[torch.fx.Node]
    conditions: dict[torch.fx.Node, dict[int, Condition]]

    def backend(self, graph: torch.fx.Graph, backend: Callable[..., Any]) -> Callable[..., Any]:
        """Return a backend for ``graph`` whose function takes away gradients that eager mode would not have."""
        inputs = {n: i for i, n in enumerate(graph.find_nodes(op="placeholder"))}
        gates = [inputs[n] for n in self.gates]
        conditions = {inputs[n]: by_result for n, by_result in self.conditions.items()}

        @functools.wraps(backend)
        def compile_with_hook(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            compiled = backend(*args, **kwargs)
            innermost = innermost_fn(compiled)
            compiled = disable(compiled, reason="a wrapper runs it")
            # The series perf has them.
            direct_calls = getattr(capabilities, "direct_calls", {})
            if innermost in direct_calls:
                compiled = direct_calls[innermost](compiled, innermost)
            reaching = functools.lru_cache(maxsize=1024)(functools.partial(reaching_results, conditions))
            return functools.partial(call_with_hook, compiled, gates, reaching)

        return compile_with_hook


def reaching_results(
    conditions: dict[int, dict[int, Condition]], outcomes: tuple[bool, ...]
) -> dict[int, list[int]]:
    """Return the inputs that fewer results reach than in other calls, and these results."""
    found = {}
    for place, by_result in conditions.items():
        results = [r for r, condition in by_result.items() if holds(condition, outcomes)]
        if 0 < len(results) < len(by_result):
            found[place] = results
    return found


def call_with_hook(
    function: Callable[..., Any],
    gates: Sequence[int],
    reaching: Callable[[tuple[bool, ...]], dict[int, list[int]]],
    *args: Any,
) -> Any:
    results = function(*args)
    found = reaching(tuple(bool(args[i]) for i in gates))
    if found and torch.is_grad_enabled():
        take_away({args[place]: [results[i] for i in found[place]] for place in found})
    return results


def take_away(reached_by: dict[torch.Tensor, list[torch.Tensor]]) -> None:
    """Let the node of results give tensors no gradient if no result that reaches them has one."""
    node = next(iter(reached_by.values()))[0].grad_fn
    places = {edge_of(t): [r.output_nr for r in results] for t, results in reached_by.items() if t.requires_grad}
    edges = [(getattr(function, "variable", function), number) for function, number in node.next_functions]
    rows = {i: places[edge] for i, edge in enumerate(edges) if edge in places}

    def without(gradients: tuple[Any, ...], of_results: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            None if i in rows and all(of_results[r] is None for r in rows[i]) else gradient
            for i, gradient in enumerate(gradients)
        )

    node.register_hook(without)


def edge_of(tensor: torch.Tensor) -> tuple[Any, int]:
    return (tensor, 0) if tensor.is_leaf else (tensor.grad_fn, tensor.output_nr)
