"""
A while loop on a tensor whose body is a function (loops.py), as torch.while_loop: the graph has all of its turns.

Without it the host reads the condition in each turn. With config.pygraph_conditionals, the captured graph has a WHILE
node (compile/conditionals.py). Eager mode cannot be told from this if

- nothing requires a gradient, and the body does nothing but compute what the next turn reads
- what the loop stores are tensors on the GPU, whose sizes, strides and dtypes stay
- each turn ends with the same branch, and the same code follows, whether there was a turn or not
- the program does not tell the loop's result from its operand, if the loop may run zero times (joins.py)
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo import variables
from torch._dynamo.exc import ObservedException, TorchRuntimeError, UncapturedHigherOrderOpError, Unsupported
from torch._dynamo.variables.functions import BaseUserFunctionVariable
from torch._dynamo.variables.higher_order_ops import _call_while_loop, WhileLoopHigherOrderVariable
from torch._inductor import config
from torch._inductor.pygraph.compile import conditionals
from torch._inductor.pygraph.dynamo import turns
from torch._inductor.pygraph.dynamo.branches import Branches, plain_tensor, truth_of
from torch._inductor.pygraph.dynamo.breaks import gist, is_broken, restart
from torch._inductor.pygraph.dynamo.effects import last_node, nodes_after
from torch._inductor.pygraph.dynamo.hosts import is_on_gpu
from torch._inductor.pygraph.dynamo.joins import Join
from torch._inductor.pygraph.dynamo.operators import draws, is_total
from torch._inductor.pygraph.dynamo.paths import Truth
from torch._inductor.pygraph.dynamo.ranges import outcome_of
from torch._inductor.pygraph.dynamo.stores import RefusedError
from torch._inductor.pygraph.types.reason import Code
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker
    from torch._inductor.pygraph.dynamo.breaks import Call


WHILE_LOOP = torch.ops.higher_order.while_loop

FAILURES = (RefusedError, Unsupported, ObservedException, NotImplementedError, TorchRuntimeError)
FAILURES += (UncapturedHigherOrderOpError,)


class GoesOn(BaseUserFunctionVariable):
    """The condition of torch.while_loop, which carries it."""

    def call_function(self, tx: Any, args: Sequence[VariableTracker], kwargs: dict[str, Any]) -> VariableTracker:
        return args[0].call_method(tx, "clone", [], {})


class Turn(BaseUserFunctionVariable):
    """The body of torch.while_loop. ``exit`` is known once it is traced."""

    _nonvar_fields = {"exit", *BaseUserFunctionVariable._nonvar_fields}

    def __init__(self, body: VariableTracker, others: list[VariableTracker]) -> None:
        super().__init__()
        self.body = body
        self.others = others
        self.exit: int | None = None

    def call_function(self, tx: Any, args: Sequence[VariableTracker], kwargs: dict[str, Any]) -> VariableTracker:
        carried = args[1:]
        turn = self.body.call_function(tx, [*carried, *self.others], {})
        value, *exits = (v.realize() for v in turn.items[:3])
        if_true, if_false = (v.as_python_constant() for v in exits)
        if not is_tensor_on_gpu(value) or (if_true == turns.NEXT) == (if_false == turns.NEXT):
            raise RefusedError("a turn ends in several ways")
        goes_on = truth_of(tx, value)
        if if_true == turns.NEXT:
            self.exit = if_false
        else:
            self.exit, goes_on = if_true, goes_on.call_method(tx, "logical_not", [], {})
        state = [v.realize() for v in turn.items[3:]]
        given = OrderedSet(v.as_proxy().node for v in carried)
        if not all(map(is_tensor_on_gpu, state)):
            raise RefusedError("it stores other values than tensors")
        # torch.while_loop refuses a body that returns one of its operands.
        state = [v.call_method(tx, "clone", [], {}) if v.as_proxy().node in given else v for v in state]
        return variables.TupleVariable([goes_on, *state])


class Whiles(Branches):
    def loop_in_graph(self, tx: InstructionTranslatorBase, call: Call) -> VariableTracker | None:
        """Return what a while loop of turns.py returns, or None if it is no torch.while_loop."""
        function = getattr(call.fn.realize(), "value", None)
        if function not in (turns.while_true, turns.while_false, turns.repeat):
            return None
        site = (tx.f_code, tx.instruction_pointer)
        body, *condition, state, others, exits = call.values
        carried = [v.realize() for v in state.items]
        if (
            not config.pygraph_conditionals
            or torch.is_grad_enabled()
            or tx.output.current_tracer is not tx.output.root_tracer
            or not carried
            or not all(map(is_tensor_on_gpu, carried))
            or not conditionals.have_nodes(carried[0].as_proxy().node.meta["example_value"].device)
            or is_broken(tx, site)
        ):
            return None
        last = last_node(tx.output.graph)
        goes_on, has_turn = self.first_condition(tx, function, condition, carried)
        if goes_on is None:
            return None
        turn = Turn(body, others.items)
        args = (GoesOn(), turn, variables.TupleVariable([goes_on, *carried]), variables.TupleVariable([]))
        loop = WhileLoopHigherOrderVariable.make(WHILE_LOOP)
        try:
            result = _call_while_loop(loop, tx, args, {}, stack_output=False, hop_name="torch.while_loop")
            own = OrderedSet(nodes_after(last))
            check_body(tx, own)
        except FAILURES as e:
            restart([site], Code.LOOP_STAYS, gist(str(e)))
        stored = result.items[1:]
        if not has_turn:
            pairs = [[v.as_proxy().node for v in pair] for pair in zip(stored, carried)]
            self.joins += [Join(node, before, own, site) for node, before in pairs]
        flags = [variables.ConstantVariable.create(n == turn.exit) for n in exits.as_python_constant()]
        return variables.TupleVariable([*flags, variables.TupleVariable(stored)])

    def first_condition(
        self,
        tx: InstructionTranslatorBase,
        function: Any,
        condition: list[VariableTracker],
        carried: list[VariableTracker],
    ) -> tuple[VariableTracker | None, bool]:
        """Return whether there is a first turn, as a tensor, and whether that is certain."""
        if function is turns.repeat:
            ones = variables.TorchInGraphFunctionVariable(torch.ones)
            kwargs = {
                "dtype": variables.ConstantVariable.create(torch.bool),
                "device": variables.ConstantVariable.create(carried[0].as_proxy().node.meta["example_value"].device),
            }
            return ones.call_function(tx, [variables.TupleVariable([])], kwargs), True
        value = condition[0].tensor if isinstance(condition[0], Truth) else condition[0]
        value = plain_tensor(tx, value)
        if value is None or not is_tensor_on_gpu(value):
            return None, False
        truth = truth_of(tx, value)
        outcome = outcome_of(value.as_proxy().node)
        if function is turns.while_true:
            return truth, outcome is True
        return truth.call_method(tx, "logical_not", [], {}), outcome is False


def is_tensor_on_gpu(value: VariableTracker) -> bool:
    return type(value) is variables.TensorVariable and is_on_gpu(value.as_proxy().node)


def check_body(tx: InstructionTranslatorBase, nodes: OrderedSet[torch.fx.Node]) -> None:
    """Raises RefusedError: a captured graph could not have the loop."""
    (loop,) = [node for node in nodes if node.target is WHILE_LOOP]
    body = tx.output.nn_modules[loop.args[1].target]
    for node in body.graph.nodes:
        if not is_total(node) or draws(node):
            raise RefusedError(f"{node.name} in a turn")
        examples = node.meta.get("example_value")
        if isinstance(examples, torch.Tensor) and not is_on_gpu(node):
            raise RefusedError(f"{node.name} is not on the GPU")
