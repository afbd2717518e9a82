"""
Which calls have to wait for which, from the memory and resources that they use. Calls are numbered in the order of
their capture. ``Waits`` holds for each call the earlier calls that it waits for.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections import Counter
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Waits = list[set[int]]


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """
    A call uses the addresses from ``start`` to before ``end``, where the function's ``input`` lies, if any. An input
    that ``moves`` lies elsewhere in another call, and may overlap other inputs there.
    """

    start: int
    end: int
    writes: bool
    input: int | None = None
    moves: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """Calls that share one of ``resources`` keep their order. One that ``is_barrier`` may use anything."""

    accesses: tuple[Access, ...] = ()
    resources: frozenset[str] = frozenset()
    is_barrier: bool = False


def dependencies(calls: Sequence[Call]) -> Waits:
    """Return what each call waits for: what it may not overtake."""
    points = sorted({p for call in calls for a in call.accesses for p in (a.start, a.end)})
    place = {p: i for i, p in enumerate(points)}
    # Of the bytes between two points: the last call that wrote them, and those that read them since.
    writer: list[int | None] = [None] * len(points)
    readers: list[list[int]] = [[] for _ in points]
    last_use: dict[str, int] = {}
    barrier: int | None = None
    waits: Waits = []
    for i, call in enumerate(calls):
        mine: set[int] = set() if barrier is None else {barrier}
        if call.is_barrier:
            mine.update(range(barrier or 0, i))
            barrier = i
        mine.update(last_use[resource] for resource in call.resources if resource in last_use)
        last_use.update(dict.fromkeys(call.resources, i))
        for a in call.accesses:
            for at in range(place[a.start], place[a.end]):
                if (last := writer[at]) is not None:
                    mine.add(last)
                if a.writes:
                    mine.update(readers[at])
        for a in call.accesses:
            for at in range(place[a.start], place[a.end]):
                if a.writes:
                    writer[at], readers[at] = i, []
                elif not readers[at] or readers[at][-1] != i:
                    readers[at].append(i)
        mine.discard(i)
        waits.append(mine)
    for before, after in overlapping_inputs(calls):
        waits[after].add(before)
    return waits


def overlapping_inputs(calls: Sequence[Call]) -> Iterable[tuple[int, int]]:
    """
    Yield (call, a later call) that use different inputs, one of which is written and one of which
    moves: in another call of the function these inputs may overlap.
    """
    uses = [(i, a) for i, call in enumerate(calls) for a in call.accesses if a.input is not None]
    if not any(a.writes for _, a in uses):
        return
    for (i, a), (j, b) in itertools.combinations(uses, 2):
        if i != j and a.input != b.input and (a.writes or b.writes) and (a.moves or b.moves):
            yield i, j


def reached(waits: Waits) -> list[int]:
    """Return each call and all that it comes behind, as bits."""
    found: list[int] = []
    for i, mine in enumerate(waits):
        found.append(functools.reduce(operator.or_, (found[before] for before in mine), 1 << i))
    return found


def reduced(waits: Waits) -> Waits:
    """Return the same order without what follows from the rest."""
    behind = reached(waits)
    found: Waits = []
    for mine in waits:
        covered = 0
        kept: set[int] = set()
        for before in sorted(mine, reverse=True):
            if not covered >> before & 1:
                kept.add(before)
                covered |= behind[before]
        found.append(kept)
    return found


def ends(waits: Waits, times: Sequence[float]) -> list[float]:
    """Return when each call ends if it starts as soon as it may."""
    found: list[float] = []
    for mine, time in zip(waits, times, strict=True):
        found.append(max((found[before] for before in mine), default=0.0) + time)
    return found


def critical_path(waits: Waits, times: Sequence[float]) -> float:
    """Return the longest time of calls that wait for one another."""
    return max(ends(waits, times), default=0.0)


def width(waits: Waits) -> int:
    """Return the most calls that wait for equally many calls in a row: so many run side by side."""
    levels = Counter(ends(waits, [1.0] * len(waits)))
    return max(levels.values(), default=0)
