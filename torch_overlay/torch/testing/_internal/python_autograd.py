"""
The autograd engine in Python, for machines without a driver: the C++ engine asks it for the streams of CUDA nodes.

Order (latest node first), sums, reductions and casts are those of the C++ engine. Hooks of tensors and nodes do not run,
and no graph is freed. :func:`run_backward_in_task` lets compiled functions free what they saved.
"""

from __future__ import annotations

import collections
import heapq
import itertools
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
import torch.fx.traceback as fx_traceback
from torch.autograd.function import BackwardCFunction, Function
from torch.autograd.graph import _get_grad_fn_or_grad_acc, GradientEdge, Node


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def run_backward(
    outputs: Sequence[torch.Tensor | GradientEdge],
    grads: Sequence[torch.Tensor | None],
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[torch.Tensor | GradientEdge],
    allow_unreachable: bool,
    accumulate_grad: bool,
) -> tuple[torch.Tensor | None, ...]:
    """See the module's docstring."""
    accumulators: dict[int, Node] = {}

    def edge(t: torch.Tensor | GradientEdge) -> tuple[Node, int]:
        if isinstance(t, GradientEdge):
            return t.node, t.output_nr
        # A leaf's accumulator is otherwise found by making a view of the leaf, which would be traced.
        return accumulators.get(id(t)) or _get_grad_fn_or_grad_acc(t), t.output_nr

    roots = [edge(t) for t in outputs]
    waiting_for = collections.Counter(node for node, _ in roots)
    predecessors: dict[Node, list[Node]] = collections.defaultdict(list)
    order = list(waiting_for)  # grows while it is walked
    for node in order:
        if isinstance(variable := getattr(node, "variable", None), torch.Tensor):
            accumulators[id(variable)] = node
        for successor, _ in node.next_functions:
            if successor is None:
                continue
            if successor not in waiting_for:
                order.append(successor)
            waiting_for[successor] += 1
            predecessors[successor].append(node)

    captures = [edge(t) for t in inputs]
    captured: dict[tuple[Node, int], torch.Tensor] = {}
    if inputs:
        lead_to_capture = [node for node, _ in captures]
        executed = {node for node in lead_to_capture if accumulate_grad and node in accumulators.values()}
        for node in lead_to_capture:
            for predecessor in predecessors[node]:
                if predecessor not in executed:
                    executed.add(predecessor)
                    lead_to_capture.append(predecessor)
    else:
        executed = set(order)

    received: dict[Node, list[torch.Tensor | None]] = {node: [None] * len(node._input_metadata) for node in order}
    ready: list[tuple[int, int, Node]] = []
    arrival = itertools.count()

    def send(grad: torch.Tensor | None, node: Node, input_nr: int) -> None:
        if grad is not None:
            metadata = node._input_metadata[input_nr]
            if grad.shape != metadata.shape:
                grad = grad.sum_to_size(metadata.shape)
            if grad.dtype != metadata.dtype:
                grad = grad.to(metadata.dtype)
            sum_so_far = received[node][input_nr]
            received[node][input_nr] = grad if sum_so_far is None else sum_so_far + grad
        waiting_for[node] -= 1
        if not waiting_for[node]:
            heapq.heappush(ready, (-node._sequence_nr(), next(arrival), node))

    with (
        torch.set_grad_enabled(create_graph),
        mock.patch.object(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: retain_graph),
    ):
        for (node, input_nr), grad in zip(roots, grads):
            send(grad, node, input_nr)
        while ready:
            *_, node = heapq.heappop(ready)
            node_grads = received.pop(node)
            captured.update({(n, i): node_grads[i] for n, i in captures if n is node})
            edges = [e for e in node.next_functions if e[0] is not None]
            if node in executed:
                results = _call_node(node, node_grads)
            else:
                results = [None] * len(edges)
            for grad, (successor, input_nr) in zip(results, edges, strict=True):
                send(grad, successor, input_nr)

    result = tuple(captured.get(c) for c in captures)
    if not allow_unreachable and None in result:
        raise RuntimeError("One of the differentiated Tensors appears to not have been used in the graph.")
    return result


class _Task(Function):
    """A node on the CPU, in whose backward something runs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: Callable[[], None]) -> torch.Tensor:
        ctx.run = run
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        ctx.run()
        return None, None


def run_backward_in_task(
    outputs: Sequence[torch.Tensor | GradientEdge],
    grads: Sequence[torch.Tensor | None],
    retain_graph: bool,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor | None, ...]:
    """
    Run :func:`run_backward` in a task of the C++ engine. A compiled function asks the task whether the graph is retained,
    and else frees what it saved. Nodes of operators still keep theirs.
    """
    results: list[tuple[torch.Tensor | None, ...]] = []

    def run() -> None:
        results.append(run_backward(outputs, grads, retain_graph, *args, **kwargs))

    with torch.enable_grad():
        root = _Task.apply(torch.zeros((), device="cpu", requires_grad=True), run)
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((root,), (torch.ones((), device="cpu"),), retain_graph, False, (), True, True)
    return results[0]


def _call_node(node: Node, grads: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Run ``node``; the results are those for its edges that lead somewhere."""
    fx_traceback.set_stack_trace(node.metadata.get("traceback_", []))
    fx_traceback.set_grad_fn_seq_nr(node._sequence_nr())
    try:
        if isinstance(node, BackwardCFunction):
            grads = [
                torch.zeros(m.shape, dtype=m.dtype, device=m.device) if g is None else g
                for g, m in zip(grads, node._input_metadata)
            ]
            results, wanted = node.apply(*grads), node.needs_input_grad
        else:
            results, wanted = node(*grads), (successor is not None for successor, _ in node.next_functions)
        return [r for r, want in zip(results if isinstance(results, tuple) else (results,), wanted) if want]
    finally:
        fx_traceback.reset_grad_fn_seq_nr()
