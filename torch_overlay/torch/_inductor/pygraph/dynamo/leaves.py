"""
``y.requires_grad = True`` of a tensor that the graph made, as speech models say in training for layers that may be
checkpointed.

It makes the tensor a leaf, and AOTAutograd knows no leaf inside of a graph: Dynamo breaks the graph. With PyGraph,
Dynamo goes on as if the tensor were a leaf, and the graph has none. Its results and the gradients of its inputs are
those of eager mode if no result needs a gradient because of the leaf alone, and the leaf itself is no result.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo import variables
from torch._inductor.pygraph.dynamo.branches import Branches
from torch._inductor.pygraph.dynamo.breaks import is_broken, restart
from torch._inductor.pygraph.dynamo.operators import name_of
from torch._inductor.pygraph.types.reason import Code, Reason
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    import types

    import torch.fx
    from torch._dynamo.bytecode_transformation import Instruction
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker


class Unread(variables.UserDefinedObjectVariable):
    """An object that the instruction stores to instead."""

    def __init__(self) -> None:
        super().__init__(object())

    def call_method(self, *args: Any, **kwargs: Any) -> VariableTracker:
        return variables.ConstantVariable.create(None)


class Leaves(Branches):
    def __init__(self) -> None:
        super().__init__()
        self.leaves: list[tuple[tuple[types.CodeType, int], torch.fx.Node]] = []

    def on_instruction(self, tx: InstructionTranslatorBase, inst: Instruction) -> None:
        super().on_instruction(tx, inst)
        if inst.opname != "STORE_ATTR" or inst.argval != "requires_grad":
            return
        value, of = (v.realize() for v in tx.stack[-2:])
        site = (tx.f_code, tx.indexof[tx.current_instruction])
        if becomes_leaf(tx, of, value) and not is_broken(tx, site):
            node = of.as_proxy().node
            node.meta["example_value"].requires_grad_()
            of.synchronize_attributes(tx)
            self.leaves.append((site, node))
            self.repair(tx, Reason.of(Code.LEAF_IN_GRAPH))
            tx.stack[-1] = Unread()

    def check_graph(self, tx: InstructionTranslatorBase) -> None:
        """Raises RestartAnalysis: without a leaf, the graph is another one."""
        super().check_graph(tx)
        if self.leaves and (why := self.why_seen(tx)) is not None:
            restart([site for site, _ in self.leaves], Code.LEAF_IS_SEEN, why)

    def why_seen(self, tx: InstructionTranslatorBase) -> str | None:
        """Return how the program may tell that there is no leaf."""
        graph = tx.output.graph
        if tx.output.side_effects.tensor_hooks:
            return "it registers a hook"
        leaves = [example_of(node) for _, node in self.leaves]
        for node in graph.nodes:
            if name_of(node) in ("grad", "backward"):
                return "it differentiates in the graph"
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                return f"{node.target.name()} follows"
        # Inputs are results if the graph writes them.
        results = [*graph.output_node().all_input_nodes, *graph.find_nodes(op="placeholder")]
        for result in map(example_of, results):
            if any(result is leaf for leaf in leaves):
                return "it returns the tensor"
            if isinstance(result, torch.Tensor) and result.requires_grad and not needs_gradient(result, leaves):
                return "a result needs a gradient only because of it"
        return None


def becomes_leaf(tx: InstructionTranslatorBase, of: VariableTracker, value: VariableTracker) -> bool:
    """Return whether an attribute that is set makes a tensor of the graph a leaf, and nothing else."""
    if (
        type(of) is not variables.TensorVariable
        or of.source is not None
        or not (value.is_python_constant() and value.as_python_constant() is True)
        or tx.output.current_tracer is not tx.output.root_tracer
        or not torch.is_grad_enabled()
        or torch.is_inference_mode_enabled()
    ):
        return False
    example = example_of(of.as_proxy().node)
    # Some operators return their operand.
    same = [node for node in tx.output.graph.nodes if example_of(node) is example]
    return (
        type(example).__name__ == "FakeTensor"
        and example.is_leaf
        and not example.requires_grad
        and not example.is_inference()
        and example.is_floating_point()
        and len(same) == 1
        and same[0].op.startswith("call_")
    )


def needs_gradient(tensor: torch.Tensor, leaves: list[torch.Tensor]) -> bool:
    """Return whether a tensor has a gradient with regard to another leaf than these."""
    if tensor.grad_fn is None:
        return all(tensor is not leaf for leaf in leaves)
    ahead = [tensor.grad_fn]
    seen = OrderedSet(ahead)
    while ahead:
        fn = ahead.pop()
        leaf = getattr(fn, "variable", None)
        if leaf is not None and all(leaf is not other for other in leaves):
            return True
        new = OrderedSet(f for f, _ in fn.next_functions if f is not None) - seen
        seen |= new
        ahead += new
    return False


def example_of(node: torch.fx.Node) -> Any:
    return node.meta.get("example_value")
