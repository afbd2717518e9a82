"""When and where each call of a schedule runs, for the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._inductor.pygraph.types.schedule import ScheduledCall


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._inductor.pygraph.schedule.dag import Waits


def timeline(names: Sequence[str], waits: Waits, times: Sequence[float]) -> tuple[ScheduledCall, ...]:
    """Return the calls in their order, each as early as it may start, in the row of what it waits for if that is free."""
    found: list[ScheduledCall] = []
    ends: list[float] = []
    # Of the last call of each row.
    busy: list[float] = []
    for name, mine, us in zip(names, waits, times, strict=True):
        before = sorted(mine, key=lambda i: -ends[i])
        start = ends[before[0]] if before else 0.0
        rows = [*(found[i].row for i in before), *range(len(busy))]
        row = next((row for row in rows if busy[row] <= start), len(busy))
        end = start + us
        busy[row : row + 1] = [end]
        ends.append(end)
        found.append(ScheduledCall(name, row, start, us))
    return tuple(found)
