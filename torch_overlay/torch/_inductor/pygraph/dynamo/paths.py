"""
Tracing both paths of a branch into one graph, and joining what they leave.

The translator itself traces one path up to the join, is set back, and traces the other one. Stores to objects that
existed before are taken back, and other changes are refused. What a path leaves are the stack and the
variables that are read later, and what it stored to objects (stores.py). Of two tensors, the join is torch.where
(joins.py); equal constants and the same object stay; of two bools the join is a Truth, which is branched on or negated
without a wait. Anything else is refused.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo import variables
from torch._dynamo.bytecode_analysis import HASLOCAL
from torch._dynamo.current_scope_id import enter_new_scope
from torch._dynamo.exc import RestartAnalysis, unimplemented
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import LocalGeneratorObjectVariable
from torch._inductor.pygraph.dynamo.breaks import gist
from torch._inductor.pygraph.dynamo.effects import last_node, nodes_after
from torch._inductor.pygraph.dynamo.flow import flow_of, RETURNS
from torch._inductor.pygraph.dynamo.obstacles import OPAQUE_NAMES
from torch._inductor.pygraph.dynamo.stores import RefusedError, Stores
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch._dynamo.bytecode_transformation import Instruction
    from torch._dynamo.codegen import PyCodegen
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._inductor.pygraph.dynamo.stores import Slot


# A path with one of these breaks the graph: it changes what cannot be taken back, leaves its block, or only raises.
LEAVES = (
    ("ASYNC", "BEFORE", "DELETE", "END_ASYNC", "GET_A", "IMPORT", "LOAD_ASSERTION", "LOAD_BUILD_CLASS", "LOAD_CLOSURE")
    + ("MAKE_CELL", "POP_BLOCK", "POP_EXCEPT", "PUSH_EXC", "RAISE", "RERAISE", "RETURN_GENERATOR", "SEND", "SETUP")
    + ("STORE_GLOBAL", "STORE_NAME", "STORE_SLICE", "WITH", "YIELD")
)

ITERATORS = (variables.IteratorVariable, LocalGeneratorObjectVariable)

# A path that traces more is a loop.
MAX_INSTRUCTIONS = 10_000


class Returned(Exception):  # noqa: N818
    """Both paths of a branch in a path return."""

    def __init__(self, value: VariableTracker) -> None:
        super().__init__()
        self.value = value


class Truth(VariableTracker):
    """The bool of a tensor that has no dimensions. Where something else needs it, bytecode reads the tensor."""

    def __init__(self, tensor: variables.TensorVariable, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tensor = tensor

    def python_type(self) -> type:
        return bool

    def as_proxy(self) -> Any:
        unimplemented(
            gb_type="bool of a tensor",
            context=str(self),
            explanation="The graph cannot take a bool that depends on a tensor.",
            hints=[],
        )

    def reconstruct(self, codegen: PyCodegen) -> None:
        codegen(self.tensor)
        codegen.load_method("item")
        codegen.call_method(0)


@dataclasses.dataclass
class Fork:
    """
    Attributes:
        join: the index of the first instruction behind both paths; None if both return
        region: indices of the paths' instructions
        live: variables that may be read from the join on
    """

    join: int | None
    region: OrderedSet[int]
    live: list[str]


@dataclasses.dataclass
class Path:
    """
    Attributes:
        stack, variables: at the end of the path
        nodes: of the graph that the path made
        stores: what it left in objects from before
        returned: what it returns
    """

    stack: list[VariableTracker]
    variables: dict[str, VariableTracker]
    nodes: list[torch.fx.Node]
    stores: dict[Slot, VariableTracker]
    returned: VariableTracker | None = None


def fork_at(tx: InstructionTranslatorBase, inst: Instruction) -> Fork:
    """Return how the paths of a conditional jump run. Raises RefusedError: they cannot be joined."""
    flow, jump = flow_of(tx.f_code), tx.indexof[inst]
    join = flow.meeting(jump)
    if join is None:
        raise RefusedError("the paths do not meet")
    returns = join == len(flow.instructions)
    region = flow.reached(flow.successors[jump], join)
    if jump in region:
        raise RefusedError("a path leads to the next turn of a loop")
    for i in region:
        opname = flow.instructions[i].opname
        leaves = opname.startswith(LEAVES) or (opname in RETURNS and not returns)
        if leaves or flow.handlers[i] != flow.handlers[jump]:
            raise RefusedError(f"a path has {opname}")
    return Fork(None, region, []) if returns else Fork(join, region, flow.names(flow.live[join]))


def trace(tx: InstructionTranslatorBase, fork: Fork, start: int, stack: list[VariableTracker]) -> Path:
    """Trace a path from ``start``. Raises RefusedError: it changes what existed before, breaks the graph, or raises."""
    output = tx.output
    if OPAQUE_NAMES.intersection(tx.f_code.co_names):
        raise RefusedError("the code may read its variables by name")
    if reads_iterator(tx, fork):
        raise RefusedError("a path may advance an iterator")
    last, before, versions = last_node(output.graph), state_of(tx), versions_of(output.graph)
    num_calls = count_calls(output.graph.nodes)
    line = tx.lineno
    kept = (tx.stack, tx.symbolic_locals, tx.instruction_pointer, tx.current_instruction, tx.one_graph)
    tx.stack, tx.symbolic_locals = [*stack], dict(tx.symbolic_locals)
    tx.instruction_pointer = tx.start_point = start
    # An instruction that breaks the graph raises an error then.
    tx.one_graph = True
    stores = Stores()
    output.extension.stores.append(stores)
    try:
        with enter_new_scope():
            returned = run(tx, fork)
        left = stores.take(output.side_effects)
        path = Path(tx.stack, tx.symbolic_locals, [*nodes_after(last)], left, returned)
    except (RefusedError, RestartAnalysis):
        raise
    except Exception as e:
        # The program may never take the path.
        raise RefusedError(gist(str(e)) or type(e).__name__) from e
    finally:
        output.extension.stores.pop()
        tx.stack, tx.symbolic_locals, tx.instruction_pointer, tx.current_instruction, tx.one_graph = kept
        tx.start_point = tx.instruction_pointer
        tx.starts_line(line)
    after = versions_of(output.graph)
    if state_of(tx) != before or any(after[node] != version for node, version in versions.items()):
        raise RefusedError("a path changes what existed before")
    if count_calls(output.graph.nodes) != num_calls + count_calls(path.nodes):
        # Dynamo puts the nodes of a hook next to its tensor, in front of the path. New inputs are there too, but are no calls.
        raise RefusedError("a path registers a hook")
    return path


def run(tx: InstructionTranslatorBase, fork: Fork) -> VariableTracker | None:
    """Trace up to the join. Return what the path returns, if it does."""
    for _ in range(MAX_INSTRUCTIONS):
        place = tx.instruction_pointer
        if place == fork.join:
            return None
        if place not in fork.region:
            raise RefusedError("a path leaves its block")
        inst = tx.instructions[place]
        if inst.opname in RETURNS:
            return tx.stack.pop() if inst.opname == "RETURN_VALUE" else tx._load_const(inst)
        try:
            if not tx.step():
                raise RefusedError("a path ends the analysis")
        except Returned as e:
            return e.value
    raise RefusedError("a path is long")


def reads_iterator(tx: InstructionTranslatorBase, fork: Fork) -> bool:
    """Return whether a path may read an iterator from before. Dynamo does not always tell what advances it."""
    names = OrderedSet(tx.instructions[i].argval for i in fork.region if tx.instructions[i].opcode in HASLOCAL)
    values = [value for name, value in tx.symbolic_locals.items() if name in names]
    found: list[VariableTracker] = []
    VariableTracker.visit(found.append, [values, tx.output.side_effects.store_attr_mutations])
    return any(isinstance(value, ITERATORS) for value in found)


def versions_of(graph: torch.fx.Graph) -> dict[torch.fx.Node, int]:
    """Return how often each tensor was written."""
    examples = ((node, node.meta.get("example_value")) for node in graph.nodes)
    return {node: value._version for node, value in examples if isinstance(value, torch.Tensor)}


def count_calls(nodes: Iterable[torch.fx.Node]) -> int:
    return sum(node.op.startswith("call_") for node in nodes)


def state_of(tx: InstructionTranslatorBase) -> tuple[Any, ...]:
    """Return what else a path may not change."""
    output = tx.output
    extension: Any = output.extension
    collections = (tx.block_stack, output.random_calls, output.side_effects.tensor_hooks)
    of_extension = (extension.queue, extension.decided, extension.certain, extension.by_name)
    return (*map(len, collections), *map(len, of_extension), torch.is_grad_enabled())
