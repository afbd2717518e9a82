"""
The range of a tensor's elements, where sizes and constants tell it.

Models compare such tensors: ``if position_ids.max() + 1 > limit``, with positions that arange made, or
``if torch.rand([]) < layerdrop``, with a probability of 0. Bounds may depend on sizes that vary: a comparison of them is
a guard, as that of any sizes.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, TYPE_CHECKING

import torch
import torch.fx
from torch._inductor.pygraph.dynamo.operators import is_of_torch, name_of, plain_name
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Number = int | bool | torch.SymInt | torch.SymBool

# Sums of integers below stay exact.
LARGE = 2**50


@dataclasses.dataclass(frozen=True)
class Range:
    """
    Attributes:
        low, high: no element is less or greater
        is_tight: one element is low, and one is high
    """

    low: Number
    high: Number
    is_tight: bool = False


def range_of(node: torch.fx.Node, known: dict[torch.fx.Node, Range | None] | None = None) -> Range | None:
    """Return the range of a tensor of Dynamo's graph, or None if it is not known."""
    known = {} if known is None else known
    if node not in known:
        known[node] = _range_of(node, known)
    return known[node]


def _range_of(node: torch.fx.Node, known: dict[torch.fx.Node, Range | None]) -> Range | None:
    example = node.meta.get("example_value")
    if not isinstance(example, torch.Tensor) or not is_untouched(node, example):
        return None
    if not is_of_torch(node) or not example.numel() > 0:
        return None
    name = plain_name(node)
    if name in MAKERS:
        kwargs = dict(zip(node.kwargs, values_of([*node.kwargs.values()])))
        return MAKERS[name](example, values_of(node.args), kwargs)
    if not node.args or not is_tensor(node.args[0]):
        return None
    operand = node.args[0].meta["example_value"]
    first = range_of(node.args[0], known)
    if first is None:
        return None
    if name in SAME:
        # The elements are those of the operand, unless they are converted.
        return first if example.dtype == operand.dtype or operand.dtype == torch.bool else None
    if name == "getitem":
        return selected(first, node.args[1])
    if node.kwargs or len(node.args) > 2:
        return None
    is_truth = operand.dtype == example.dtype == torch.bool
    if len(node.args) == 1:
        if name in REDUCTIONS and (is_truth or name not in ("any", "all")):
            return REDUCTIONS[name](first)
        return Range(not first.high, not first.low, first.is_tight) if name in NEGATIONS and is_truth else None
    other = node.args[1]
    if is_tensor(other):
        second = range_of(other, known)
        if second is None or name not in LOGIC or not is_truth or other.meta["example_value"].dtype != torch.bool:
            return None
        combine = LOGIC[name]
        is_tight = example.numel() == 1 and first.is_tight and second.is_tight
        return Range(combine(first.low, second.low), combine(first.high, second.high), is_tight)
    (number,) = values_of([other])
    if name in COMPARISONS and type(number) is float and operand.dtype.is_floating_point and is_far(first, number):
        return COMPARISONS[name](first, number)
    if not is_exact(number, operand.dtype):
        return None
    if name in COMPARISONS:
        return COMPARISONS[name](first, number)
    if name in ARITHMETIC and example.dtype == operand.dtype == torch.int64:
        by = ARITHMETIC[name]
        return Range(by(first.low, number), by(first.high, number), first.is_tight)
    return None


def selected(r: Range, index: object) -> Range | None:
    """Return the range of ``elements[index]``."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is None or part is Ellipsis or type(part) in (int, slice) for part in parts):
        return None
    has_all = all(part is None or part is Ellipsis or is_whole(part) for part in parts)
    return Range(r.low, r.high, r.is_tight and has_all)


def is_whole(part: object) -> bool:
    return isinstance(part, slice) and part.start is part.stop is part.step is None


# What is known of a node


def is_tensor(arg: object) -> bool:
    return isinstance(arg, torch.fx.Node) and isinstance(arg.meta.get("example_value"), torch.Tensor)


def is_untouched(node: torch.fx.Node, example: torch.Tensor) -> bool:
    """Return whether the graph has not written a tensor by now, and no alias that has a version of its own."""
    return (
        type(example).__name__ == "FakeTensor"
        and example._version == 0
        and not any(name_of(user) in ("_get_data_attr", "set_", "data", "numpy") for user in node.users)
    )


def values_of(args: Sequence[Any]) -> list[Any]:
    """Return arguments with the values of those that are sizes, and None for what else the graph computes."""

    def value(arg: object) -> object:
        return arg.meta.get("example_value") if isinstance(arg, torch.fx.Node) else arg

    values = [value(arg) for arg in args]
    return [None if isinstance(v, torch.Tensor) else v for v in values]


def is_integer(value: object) -> bool:
    if isinstance(value, torch.SymInt):
        return not free_unbacked_symbols(value)
    return type(value) is int and abs(value) < LARGE


def is_exact(number: object, dtype: torch.dtype) -> bool:
    """Return whether an operator with elements of ``dtype`` takes a number as it is."""
    if isinstance(number, float) and dtype.is_floating_point:
        return torch.tensor(number, dtype=dtype).item() == number
    return dtype == torch.int64 and is_integer(number) or dtype.is_floating_point and number in (0, 1)


def is_far(r: Range, number: float) -> bool:
    """Return whether a comparison does not depend on how a number is rounded."""
    return all(abs(bound - number) > abs(bound) / 50 > 0 for bound in (r.low, r.high))


# Operators


def arange(example: torch.Tensor, args: list[Any], kwargs: dict[str, Any]) -> Range | None:
    if not all(map(is_integer, args)) or not 1 <= len(args) <= 2 or not {"device", "dtype"}.issuperset(kwargs):
        return None
    start, end = (0, *args)[-2:]
    if example.dtype != torch.int64 or not end > start:
        return None
    return Range(start, end - 1, is_tight=True)


def full(value: int) -> Callable[..., Range | None]:
    def make(example: torch.Tensor, args: list[Any], kwargs: dict[str, Any]) -> Range | None:
        is_number = example.dtype in (torch.int64, torch.bool) or example.dtype.is_floating_point
        is_plain = {"device", "dtype"}.issuperset(kwargs) and is_number
        return Range(value, value, is_tight=example.numel() > 0) if is_plain else None

    return make


def rand(example: torch.Tensor, args: list[Any], kwargs: dict[str, Any]) -> Range | None:
    return Range(0, 1) if example.is_floating_point() else None


MAKERS = {"arange": arange, "zeros": full(0), "ones": full(1), "rand": rand}

# The elements of the result are those of the operand.
SAME = frozenset("clone contiguous cpu cuda detach expand flatten long reshape squeeze to unsqueeze view".split())

REDUCTIONS: dict[str, Callable[[Range], Range | None]] = {
    "max": lambda r: Range(r.high, r.high, is_tight=True) if r.is_tight else r,
    "min": lambda r: Range(r.low, r.low, is_tight=True) if r.is_tight else r,
}
REDUCTIONS |= {"amax": REDUCTIONS["max"], "amin": REDUCTIONS["min"], "any": REDUCTIONS["max"], "all": REDUCTIONS["min"]}

NEGATIONS = frozenset(("logical_not", "invert", "bitwise_not"))


ARITHMETIC = {"add": operator.add, "sub": operator.sub}


def compare(holds: Callable[[Any, Any], Any], *, is_rising: bool) -> Callable[[Range, Any], Range]:
    """Return the range of ``elements OP number``, whose truth rises or falls with the elements."""

    def combine(r: Range, other: Any) -> Range:
        low, high = (holds(r.low, other), holds(r.high, other))
        return Range(*((low, high) if is_rising else (high, low)), r.is_tight)

    return combine


COMPARISONS = {
    "gt": compare(operator.gt, is_rising=True),
    "ge": compare(operator.ge, is_rising=True),
    "lt": compare(operator.lt, is_rising=False),
    "le": compare(operator.le, is_rising=False),
}


LOGIC = {
    "and": lambda a, b: bool(a) and bool(b),
    "or": lambda a, b: bool(a) or bool(b),
    "logical_and": lambda a, b: bool(a) and bool(b),
    "logical_or": lambda a, b: bool(a) or bool(b),
}


def outcome_of(node: torch.fx.Node) -> bool | None:
    """Return the truth of a tensor of one element, or None if sizes do not tell. May guard on them."""
    found = range_of(node)
    if found is None:
        return None
    if node.meta["example_value"].dtype == torch.bool:
        low, high = bool(found.low), bool(found.high)
        return low if low == high else None
    return bool(found.low != 0) if found.is_tight and found.low == found.high else None
