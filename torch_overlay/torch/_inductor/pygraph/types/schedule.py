"""What a recording finds out about the order of its calls."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, TYPE_CHECKING


if TYPE_CHECKING:
    from torch._inductor.pygraph.types.reason import Reason


class ScheduledCall(NamedTuple):
    """A call of a schedule, as estimated from the times of single calls. Calls of a row follow one another."""

    name: str
    row: int
    start_us: float
    us: float


@dataclasses.dataclass(frozen=True)
class ScheduleFacts:
    """
    Args:
        schedule: the order that the graph has
        calls_us: time of all calls
        critical_us: the longest time of calls that wait for one another
        width: the most calls that may run side by side
        reason: why the graph does not have the order that was asked for, or why its calls are not known
        timeline: its calls, unless they are in a row
    """

    schedule: str
    calls_us: float = 0.0
    critical_us: float = 0.0
    width: int = 0
    reason: Reason | None = None
    timeline: tuple[ScheduledCall, ...] = ()
