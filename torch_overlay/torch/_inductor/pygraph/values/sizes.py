"""
Numbers that depend on the sizes of a call: the steps that compute them, lowered to Python code, and
the words and grids of a function's launches. See types/sizes.py.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, TYPE_CHECKING

from torch._inductor.pygraph.types.sizes import KernelAt
from torch._inductor.runtime.triton_heuristics import GridExpr


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

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
class LaunchWords:
    """
    What to set in the node of a launch. Numbers are places in what LaunchValues computes.

    Args:
        call: of SizeMap.calls
        words: (parameter, bytes, number)
        offsets: (parameter, number): of pointers with an offset that depends on the sizes
        grid: of the launch. If one of the numbers is 0, nothing is launched.
    """

    call: int
    words: tuple[tuple[int, int, int], ...]
    offsets: tuple[tuple[int, int], ...]
    grid: tuple[int, int, int]


class LaunchValues:
    """
    The numbers that Triton launches of a function take at the sizes of a call.

    Attributes:
        launches: one for each launch for which a number depends on the sizes
        compute: a function of the sizes
    """

    def __init__(self, size_map: SizeMap, kernels: Mapping[str, Any]) -> None:
        """
        Args:
            kernels: by name, as Runner.objects has them; their configurations have been chosen

        Raises:
            TypeError: a launcher computes its grid with other operations.
        """
        steps = Steps(len(size_map.sizes), size_map.steps)
        places: dict[Value, int] = {}
        launches: list[LaunchWords] = []

        def place(value: Value) -> int:
            return places.setdefault(value, len(places))

        for i, call in enumerate(size_map.calls):
            if not isinstance(call, KernelAt):
                continue
            grid = grid_of(steps, call, kernels[call.kernel])
            offsets = [p for p in call.pointers if steps.known(p.offset) is None]
            if call.words or offsets or any(steps.known(value) is None for value in grid):
                x, y, z = map(place, grid)
                launches.append(
                    LaunchWords(
                        i,
                        tuple((word.parameter, word.nbytes, place(word.value)) for word in call.words),
                        tuple((pointer.parameter, place(pointer.offset)) for pointer in offsets),
                        (x, y, z),
                    )
                )
        self.launches = tuple(launches)
        self.compute = lower(steps.num_sizes, steps.steps, [*places])


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
