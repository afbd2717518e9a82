"""
What a function does at any sizes: the numbers that it computes from them, and where it uses each. compile/sizes.py
makes a SizeMap while Inductor generates the code. values/sizes.py computes the numbers.
"""

from __future__ import annotations

import dataclasses
from typing import Literal


# A number by its place: the sizes come first, then the results of the steps.
Value = int

# "constant" holds its number in place of an operand. Division and modulo round down, as in Python.
Operation = Literal["constant", "add", "multiply", "floor_divide", "modulo", "minimum", "maximum"]
Step = tuple[Operation, int, int]


@dataclasses.dataclass(frozen=True)
class SizeInput:
    """A number that the function takes, the place of the input, and the largest one that guards admit, if there is one."""

    name: str
    input: int
    upper: int | None


@dataclasses.dataclass(frozen=True)
class TensorAt:
    """
    A tensor, ``offset`` bytes behind the ``owner`` of its memory: an input, a buffer that the function allocates, the
    result of an operator, or a constant of the graph.
    """

    owner: str
    offset: Value
    size: tuple[Value, ...]
    stride: tuple[Value, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Pointer:
    """``parameter`` of a kernel is the address of ``owner`` and ``offset`` bytes."""

    parameter: int
    owner: str
    offset: Value


@dataclasses.dataclass(frozen=True)
class SizeWord:
    """``parameter`` of a kernel is a number of ``nbytes``, 4 or 8, that depends on the sizes."""

    parameter: int
    nbytes: int
    value: Value


@dataclasses.dataclass(frozen=True)
class KernelAt:
    """
    The launch of a Triton kernel.

    Args:
        kernel: its name in the module
        arguments: all integers that the launcher takes by name, of which its grid is a function
        grid_arguments: integers behind the kernel's own arguments, for the launcher only
        zeroed: workspaces that are filled with zeros in front of the launch
    """

    kernel: str
    pointers: tuple[Pointer, ...]
    words: tuple[SizeWord, ...]
    arguments: tuple[tuple[str, Value], ...]
    grid_arguments: tuple[Value, ...] = ()
    zeroed: tuple[TensorAt, ...] = ()


@dataclasses.dataclass(frozen=True)
class OperatorAt:
    """The call of an operator, which launches what a library chooses at these sizes."""

    name: str
    operands: tuple[TensorAt, ...]
    results: tuple[TensorAt, ...]
    numbers: tuple[Value, ...]


@dataclasses.dataclass(frozen=True)
class DeliverAt:
    """The launch of a Deliver's kernel, which writes CPU values: the name of the Deliver in the module, and the values."""

    deliver: str
    results: tuple[TensorAt, ...]


@dataclasses.dataclass(frozen=True)
class AllocationAt:
    """A call of the function's allocator, for ``buffer`` and for those that get its memory later."""

    buffer: str
    size: tuple[Value, ...]
    stride: tuple[Value, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class SizeMap:
    """
    Args:
        inputs: names of all inputs
        calls, allocations: in the order of the code
        outputs: a tensor, a number, or None for another output
    """

    inputs: tuple[str, ...]
    sizes: tuple[SizeInput, ...]
    steps: tuple[Step, ...]
    calls: tuple[KernelAt | OperatorAt | DeliverAt, ...]
    allocations: tuple[AllocationAt, ...]
    outputs: tuple[TensorAt | Value | None, ...]
