"""
``x.to(device)`` and other methods that return ``x`` itself if there is nothing to convert.

Dynamo takes the result for a new tensor, of which it knows no attribute that the program has set. To Dynamo,
``buffer.to(device)`` is a torch.nn.Buffer without ``persistent``, and the graph breaks where a module registers it, as
in models that choose frequencies of positions in each call. With PyGraph, the result is the input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._dynamo import variables
from torch._dynamo.variables.misc import GetAttrVariable
from torch._subclasses.fake_tensor import FakeTensor


if TYPE_CHECKING:
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker
    from torch._inductor.pygraph.dynamo.breaks import Call


CONVERSIONS = frozenset("bfloat16 contiguous cpu cuda double float half int long to type_as".split())


def convert(tx: InstructionTranslatorBase, call: Call) -> VariableTracker | None:
    """Trace a conversion of an input. Return None if the call is another one."""
    fn = call.fn
    if not isinstance(fn, GetAttrVariable) or fn.name not in CONVERSIONS or not fn.obj.is_tensor():
        return None
    output, of = tx.output, fn.obj.realize()
    if (
        type(of) is not variables.TensorVariable
        or of.source is None
        or output.current_tracer is not output.root_tracer
        or torch._C._functorch.peek_interpreter_stack() is not None
        or tx.symbolic_torch_function_state.in_torch_function_mode()
    ):
        return None
    result = of.call_method(tx, fn.name, [*call.args], {**call.kwargs})
    if type(result) is not variables.TensorVariable:
        return result
    node, example = result.as_proxy().node, of.as_proxy().node.meta["example_value"]
    # An operator that returns its operand does so with fake tensors, too.
    if type(example) is not FakeTensor or node.meta["example_value"] is not example:
        return result
    output.graph.erase_node(node)
    return of
