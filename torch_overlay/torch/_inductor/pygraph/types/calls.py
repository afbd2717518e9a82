"""What generated code calls, and what each call uses; see compile/calls.py."""

from __future__ import annotations

import dataclasses


# The parameter of a generated function that is called behind each call: (number, tensor, ...). Its attribute
# ``reuses``: whether buffers take the place of dead ones, as they do without it.
NOTE = "note_call"

# The state of the device's random numbers.
RANDOM = "random"


@dataclasses.dataclass(frozen=True)
class Operand:
    """
    A tensor of a call: its name in the code, which stands for no other one, and which input it is, if any. ``begins``:
    the call is the first one of a buffer that may take the place of a dead one.
    """

    buffer: str
    writes: bool
    input: int | None = None
    begins: bool = False


@dataclasses.dataclass(frozen=True)
class CallInfo:
    """
    What generated code launches at once: a Triton kernel or an operator.

    Args:
        operands: the tensors that the call uses, in the order in which the code notes them
        resources: what it uses besides; calls that share one keep their order
        is_declared: the call uses nothing else, but memory of its own whose address its kernels take
        has_workspace: no later call reads what it leaves in this memory
    """

    name: str
    operands: tuple[Operand, ...] = ()
    resources: tuple[str, ...] = ()
    is_declared: bool = True
    has_workspace: bool = False
