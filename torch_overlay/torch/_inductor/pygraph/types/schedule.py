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
    The order that a graph has, the time of all calls, the longest time of calls that wait for one another, the most
    that may run side by side, why it has another order than it should, and its calls, unless they are in a row.
    """

    schedule: str
    calls_us: float = 0.0
    critical_us: float = 0.0
    width: int = 0
    reason: Reason | None = None
    timeline: tuple[ScheduledCall, ...] = ()
