"""
Checks of what the program passes, which do not wait for the graph.

A check behind the graph waits for its value, and so for the graph. While the host waits, it launches nothing. So the GPU is
idle from the end of the graph until the host has launched what follows. If the value depends on nothing but inputs, bytecode
computes it in front of the graph, and begins to copy it to the host. The check then waits for the copy alone, while the
graph runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.fx
from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.codegen import PyCodegen
from torch._dynamo.decorators import disable
from torch._dynamo.variables.base import VariableTracker
from torch._inductor.pygraph.dynamo.effects import CallSite
from torch._inductor.pygraph.dynamo.hosts import (
    ancestors_of,
    devices_of,
    is_autocast,
    is_known_at_break,
    is_of_stream,
    with_writes,
)
from torch._inductor.pygraph.dynamo.operators import may_be_written
from torch._inductor.pygraph.dynamo.outcomes import outcomes_of


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._dynamo.symbolic_convert import InstructionTranslatorBase


# Reading a value of the CPU waits for nothing.
DEVICES = ("cuda",)
# The host launches the operators in front of the graph one by one, so there are at most so many. Behind a graph of fewer
# operators the host hardly waits. Estimates.
MAX_OPERATORS = 8
MIN_OPERATORS_OF_GRAPH = 8


class Flag:
    """The element of a tensor on its way to the host."""

    __slots__ = ("copied", "host")

    def __init__(self, value: torch.Tensor) -> None:
        self.copied: torch.cuda.Event | None = None
        self.host = value
        if value.is_cuda:
            # Without pinned memory the copy would wait.
            self.host = torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record(torch.cuda.current_stream(value.device))

    def read(self) -> torch.Tensor:
        """Wait for the element, and return a tensor of it on the host."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.host


class FlagVariable(VariableTracker):
    """A Flag in a variable of bytecode."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def reconstruct(self, codegen: PyCodegen) -> None:
        codegen.append_output(codegen.create_load(self.name))


def read_early(tx: InstructionTranslatorBase, node: torch.fx.Node) -> FlagVariable | None:
    """Return the value of a node of one element, which bytecode computes in front of the graph, or None if it does not."""
    output, found = tx.output, ancestors_of(node)
    inputs = [n for n in output.graph.nodes if n in found and n.op == "placeholder"]
    operators = [n for n in output.graph.nodes if n.op.startswith("call_")]
    examples = [n.meta.get("example_value") for n in found]
    if not all(isinstance(example, torch.Tensor) for example in examples):
        return None
    device = node.meta["example_value"].device.type
    is_exact = not any(example.dtype.is_floating_point or example.dtype.is_complex for example in examples)
    if (
        # The graph may round its own value otherwise, if it reads one.
        (not is_exact and (node.users or is_autocast(found)))
        or device not in DEVICES
        or devices_of(found) != {device}
        or not inputs
        or len(found) - len(inputs) > MAX_OPERATORS
        or len(operators) - (len(found) - len(inputs)) < MIN_OPERATORS_OF_GRAPH
        or not all(map(is_known_at_break, found))
        # The graph may write an input, or a tensor that it made, before the program reads it.
        or may_be_written(output.graph, DEVICES)
        or with_writes(node) != found
        or any(map(is_of_stream, output.graph.nodes))
    ):
        return None
    function = torch.fx.GraphModule({}, outcomes_of(found, [], node).graph).forward
    start = disable(starting(function), reason="what it computes was traced")
    codegen = PyCodegen(output.root_tx)
    name, variable = output.install_global("__start", start), output.new_var("flag")
    codegen.add_push_null(lambda: CallSite(name).reconstruct(codegen))
    for n in inputs:
        codegen(n.meta["grapharg"].source)
    codegen.extend_output(create_call_function(len(inputs), False))
    codegen.append_output(codegen.create_store(variable))
    output.pregraph_bytecode.extend(codegen.get_instructions())
    return FlagVariable(variable)


def starting(function: Callable[..., torch.Tensor]) -> Callable[..., Flag]:
    """Return a function that computes a value from inputs and begins to copy it."""

    def start(*inputs: torch.Tensor) -> Flag:
        with torch.no_grad():
            # The function draws no random numbers, so it gets no generator.
            return Flag(function(None, *inputs))

    return start


def as_tensor(value: torch.Tensor | Flag) -> torch.Tensor:
    """Wait for the value if it is a Flag."""
    return value.read() if isinstance(value, Flag) else value
