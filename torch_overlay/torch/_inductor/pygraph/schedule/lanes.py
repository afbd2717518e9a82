"""
Schedules: which calls of a graph run side by side.

chain   all calls in the order of the capture
lanes   so many rows of calls. A crossing from row to row takes time on the device
dag     each call starts when what it waits for has ended
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._inductor.pygraph.schedule.dag import reduced, Waits, width
from torch._inductor.pygraph.types.candidate import CHAIN, DAG, LANES


if TYPE_CHECKING:
    from collections.abc import Sequence

# What a dependency between two lanes takes on an H100, beyond one in a lane.
CROSSING_US = 1.5

# A call leaves the lane of what it waits for only if it ends so much earlier.
GAIN_US = 0.5

# The most calls side by side. Driver and device take long for wide fans: 132 nodes without an
# edge take the host 252 us.
MAX_LANES = 16


def order(schedule: str, waits: Waits, times: Sequence[float]) -> Waits:
    """Return what each call waits for in a schedule, given what it has to wait for."""
    if schedule == CHAIN:
        return [{i - 1} if i else set() for i in range(len(waits))]
    if schedule == DAG and width(waits) <= MAX_LANES:
        return reduced(waits)
    return in_lanes(waits, times, LANES.get(schedule, MAX_LANES))


def in_lanes(waits: Waits, times: Sequence[float], count: int) -> Waits:
    """Assign each call in turn to the lane in which it ends first. Calls of a lane stay in their order."""
    end: list[float] = []
    lane_of: list[int] = []
    last: list[int | None] = [None] * count
    result: Waits = []

    def end_in(lane: int, mine: set[int], time: float) -> float:
        starts = [end[i] + (0.0 if lane_of[i] == lane else CROSSING_US) for i in mine]
        if (before := last[lane]) is not None:
            starts.append(end[before])
        return max(starts, default=0.0) + time

    for i, (mine, time) in enumerate(zip(waits, times, strict=True)):
        latest = max(mine, key=lambda before: end[before], default=None)
        lane = 0 if latest is None else lane_of[latest]
        best = min(range(count), key=lambda other: end_in(other, mine, time))
        if end_in(best, mine, time) < end_in(lane, mine, time) - GAIN_US:
            lane = best
        end.append(end_in(lane, mine, time))
        lane_of.append(lane)
        before = last[lane]
        result.append(mine if before is None else mine | {before})
        last[lane] = i
    return reduced(result)
