"""
Numbers that depend on the sizes of a call: the steps that compute them, lowered to Python code, and
the words and grids of a function's launches. See types/sizes.py.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch._inductor.pygraph.graph.placeholder import extent
from torch._inductor.pygraph.types.sizes import DeliverAt, KernelAt, OperatorAt, TensorAt
from torch._inductor.runtime.triton_heuristics import GridExpr


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch._inductor.pygraph.types.sizes import Operation, SizeMap, Step, Value


# The function that does a step, and the code for it.
OPERATIONS: dict[Operation, tuple[Callable[[int, int], int], str]] = {
    "add": (operator.add, "{} + {}"),
    "multiply": (operator.mul, "{} * {}"),
    "floor_divide": (operator.floordiv, "{} // {}"),
    "modulo": (operator.mod, "{} % {}"),
    "minimum": (min, "min({}, {})"),
    "maximum": (max, "max({}, {})"),
}

NEUTRAL: dict[Operation, int] = {"add": 0, "multiply": 1, "floor_divide": 1}


class Steps:
    """Collects steps, each once."""

    def __init__(self, num_sizes: int, steps: Iterable[Step] = ()) -> None:
        self.num_sizes = num_sizes
        self.steps = [*steps]
        self.places = {step: num_sizes + i for i, step in enumerate(self.steps)}

    def _place(self, step: Step) -> Value:
        if (place := self.places.get(step)) is None:
            place = self.places[step] = self.num_sizes + len(self.steps)
            self.steps.append(step)
        return place

    def constant(self, number: int) -> Value:
        return self._place(("constant", number, 0))

    def known(self, value: Value) -> int | None:
        """Return the number that ``value`` is at all sizes; None if it depends on them."""
        if value < self.num_sizes:
            return None
        operation, number, _ = self.steps[value - self.num_sizes]
        return number if operation == "constant" else None

    def add(self, operation: Operation, left: Value, right: Value) -> Value:
        known, other = self.known(left), self.known(right)
        if other is not None and NEUTRAL.get(operation) == other:
            return left
        # A division by zero is left to the call that has such a size.
        if known is not None and other is not None and (other or operation not in ("floor_divide", "modulo")):
            return self.constant(OPERATIONS[operation][0](known, other))
        return self._place((operation, left, right))


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """An operand of a launcher's grid expression, which adds the steps that compute it."""

    steps: Steps
    value: Value

    def _add(self, operation: Operation, other: Traced | int) -> Traced:
        return Traced(self.steps, self.steps.add(operation, self.value, value_of(self.steps, other)))

    def __add__(self, other: Traced | int) -> Traced:
        return self._add("add", other)

    def __mul__(self, other: Traced | int) -> Traced:
        return self._add("multiply", other)

    def __floordiv__(self, other: Traced | int) -> Traced:
        return self._add("floor_divide", other)

    def __mod__(self, other: Traced | int) -> Traced:
        return self._add("modulo", other)

    def __neg__(self) -> Traced:
        return self * -1

    def __sub__(self, other: Traced | int) -> Traced:
        return self + -other

    def __rsub__(self, other: int) -> Traced:
        return -self + other

    __radd__ = __add__
    __rmul__ = __mul__


def value_of(steps: Steps, number: Traced | int) -> Value:
    return number.value if isinstance(number, Traced) else steps.constant(operator.index(number))


def lower(num_sizes: int, steps: Sequence[Step], results: Sequence[Value]) -> Callable[..., tuple[int, ...]]:
    """Return a function of the sizes that computes ``results``."""
    # Each step needs earlier ones only.
    needed = {*results}
    for place in range(num_sizes + len(steps) - 1, num_sizes - 1, -1):
        operation, left, right = steps[place - num_sizes]
        if place in needed and operation != "constant":
            needed |= {left, right}
    names = {place: f"s{place}" for place in range(num_sizes)}
    lines = [f"def compute({', '.join(names.values())}):"]
    for place in sorted(needed - names.keys()):
        operation, left, right = steps[place - num_sizes]
        if operation == "constant":
            names[place] = str(left) if left >= 0 else f"({left})"
        else:
            names[place] = f"v{place}"
            lines.append(f"    v{place} = {OPERATIONS[operation][1].format(names[left], names[right])}")
    lines.append(f"    return ({''.join(names[place] + ', ' for place in results)})")
    scope: dict[str, Any] = {}
    exec("\n".join(lines), scope)
    return scope["compute"]


@dataclasses.dataclass(frozen=True)
class TensorOf:
    """A tensor, as TensorAt has it. Numbers are places in what SizedFunction computes."""

    owner: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class LaunchOf:
    """
    The launch of a Triton kernel. Numbers are places in what SizedFunction computes.

    Args:
        pointers: (parameter, owner, offset)
        words: (parameter, bytes, number)
        grid: of the launch, and at least 1 in each dimension
        is_launched: 0 if the grid is 0 in one dimension, so that nothing is launched
    """

    kernel: str
    pointers: tuple[tuple[int, str, int], ...]
    words: tuple[tuple[int, int, int], ...]
    grid: tuple[int, int, int]
    is_launched: int


@dataclasses.dataclass(frozen=True)
class OperatorOf:
    """The call of an operator."""

    name: str
    operands: tuple[TensorOf, ...]
    results: tuple[TensorOf, ...] = ()


@dataclasses.dataclass(frozen=True)
class DeliverOf:
    """The launch of a Deliver's kernel."""

    deliver: str
    results: tuple[TensorOf, ...]


class AtSizes(NamedTuple):
    """A function at the sizes of a call: all numbers that it takes there."""

    sizes: tuple[int, ...]
    numbers: tuple[int, ...]

    def offset(self, t: TensorOf) -> int:
        return self.numbers[t.offset]

    def layout(self, t: TensorOf) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
        """Return size, stride and dtype."""
        numbers = self.numbers
        return tuple(numbers[i] for i in t.size), tuple(numbers[i] for i in t.stride), t.dtype

    def extent(self, t: TensorOf) -> int:
        """Return the bytes from the first element to the end of the last."""
        return extent(*self.layout(t))


class SizedFunction:
    """
    A function at any sizes: a SizeMap, of which each number has one place in what ``compute`` returns for the sizes.

    Attributes:
        events: what it launches and calls, in order
        allocations: calls of its allocator, by what the memory belongs to
        outputs: a tensor, a number, or None for another output
    """

    def __init__(self, size_map: SizeMap, kernels: Mapping[str, Any]) -> None:
        """
        Args:
            kernels: by name, as Runner.objects has them; their configurations have been chosen

        Raises:
            TypeError: a launcher computes its grid with other operations.
            ValueError: the configuration of a kernel was not chosen.
        """
        self.size_map = size_map
        self._steps = Steps(len(size_map.sizes), size_map.steps)
        self._places: dict[Value, int] = {}
        self.events = tuple(event for call in size_map.calls for event in self._events(call, kernels))
        self.allocations = {
            a.buffer: self._tensor(a.buffer, self._steps.constant(0), a.size, a.stride, a.dtype)
            for a in size_map.allocations
        }
        self.outputs = tuple(
            self._tensor_at(o) if isinstance(o, TensorAt) else None if o is None else self._place(o)
            for o in size_map.outputs
        )
        self.compute = lower(self._steps.num_sizes, self._steps.steps, [*self._places])

    def at(self, sizes: tuple[int, ...]) -> AtSizes:
        return AtSizes(sizes, self.compute(*sizes))

    def known(self, place: int) -> int | None:
        """Return a number that is the same at all sizes, or None."""
        return self._known[place]

    @functools.cached_property
    def _known(self) -> list[int | None]:
        return [self._steps.known(value) for value in self._places]

    def _place(self, value: Value) -> int:
        return self._places.setdefault(value, len(self._places))

    def _tensor(
        self, owner: str, offset: Value, size: Iterable[Value], stride: Iterable[Value], dtype: str
    ) -> TensorOf:
        sizes, strides = tuple(map(self._place, size)), tuple(map(self._place, stride))
        return TensorOf(owner, self._place(offset), sizes, strides, getattr(torch, dtype.removeprefix("torch.")))

    def _tensor_at(self, t: TensorAt) -> TensorOf:
        return self._tensor(t.owner, t.offset, t.size, t.stride, t.dtype)

    def _events(
        self, call: KernelAt | OperatorAt | DeliverAt, kernels: Mapping[str, Any]
    ) -> Iterator[LaunchOf | OperatorOf | DeliverOf]:
        if isinstance(call, OperatorAt):
            yield OperatorOf(call.name, tuple(map(self._tensor_at, call.operands)), tuple(map(self._tensor_at, call.results)))
            return
        if isinstance(call, DeliverAt):
            yield DeliverOf(call.deliver, tuple(map(self._tensor_at, call.results)))
            return
        for workspace in call.zeroed:
            yield OperatorOf("aten.zero_", (self._tensor_at(workspace),))
        grid = grid_of(self._steps, call, kernels[call.kernel])
        one = self._steps.constant(1)
        each = [self._steps.add("minimum", number, one) for number in grid]
        is_launched = self._steps.add("multiply", self._steps.add("multiply", each[0], each[1]), each[2])
        x, y, z = (self._place(self._steps.add("maximum", number, one)) for number in grid)
        yield LaunchOf(
            call.kernel,
            tuple((p.parameter, p.owner, self._place(p.offset)) for p in call.pointers),
            tuple((w.parameter, w.nbytes, self._place(w.value)) for w in call.words),
            (x, y, z),
            self._place(is_launched),
        )


def grid_of(steps: Steps, call: KernelAt, kernel: Any) -> tuple[Value, Value, Value]:
    """Return the grid of a launch with the kernel's chosen configuration."""
    (launcher,) = kernel.launchers
    names = kernel.inductor_meta.get("extra_launcher_args", ())
    arguments = [*call.arguments, *zip(names, call.grid_arguments, strict=True)]
    scope = {name: Traced(steps, value) for name, value in arguments}

    def maximum(*numbers: Traced | int) -> Traced:
        first, *others = (value_of(steps, number) for number in numbers)
        for other in others:
            first = steps.add("maximum", first, other)
        return Traced(steps, first)

    grid = GridExpr.from_meta(kernel.inductor_meta, launcher.config).eval_slow({**scope, "max": maximum})
    x, y, z = (value_of(steps, number) for number in grid)
    return x, y, z
