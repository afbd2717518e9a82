"""
When a recording for many sizes prepares a new size. It captures the library calls of the size, and proves some sizes. That
takes as long as several calls. If new sizes came seldom of late, calls of a new size will gain that time: the first call
prepares it. Otherwise its calls run uncaptured until the size has come often enough itself.

A size may never come again once it was prepared. So preparing has a budget: most of the time that captured calls gain, and a
small part of the time that calls take. The budget never exceeds what two preparations take. Otherwise a program that gained
for long would spend all of it when its sizes change. Whatever its sizes are, a program is hardly slower than without CUDA
graphs.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch._inductor.pygraph.types.candidate import NO_GRAPH


if TYPE_CHECKING:
    from torch._inductor.pygraph.types.report import FunctionReport


# If more sizes wait, the counts of all of them begin anew.
MAX_WAITING = 4096

# The least part of a new time in the mean.
WEIGHT = 1 / 16

# How many times the calls of a size are to gain what preparing takes. Some sizes never come again.
MARGIN = 2

# The part of the last new size in the share of calls that have a new size.
NEW_WEIGHT = 1 / 4

# The budget holds the time of so many preparations at most.
SAVED = 2

# Each call adds the first part of the uncaptured function's time to the budget. Each captured call adds the second part of what
# it gains. Estimates.
ALLOWED, SPENT = 0.01, 0.8


class Preparation:
    """
    Attributes:
        us: what preparing a size takes on average, of lately prepared ones, 0 before the first
        waiting: how often sizes came that are not prepared yet
        new: the share of calls that have a new size, of late
        budget_us: the time that preparing may take. It is below 0 after preparing took longer than expected
    """

    def __init__(self) -> None:
        self.us = 0.0
        self.count = 0
        self.waiting: dict[Any, int] = {}
        self.new = 0.0
        # How many calls there were until the last new size.
        self.calls = 0
        self.budget_us = 0.0
        # How many calls and captured calls there were when their gain was last added to the budget.
        self.earned = (0, 0)

    def note(self, us: float) -> None:
        """Take note that a call took so long to prepare its sizes."""
        self.count += 1
        self.budget_us -= us
        self.us += (max(us, 0.0) - self.us) * max(WEIGHT, 1 / self.count)

    def is_due(self, sizes: Any, report: FunctionReport) -> bool:
        """Return whether a call is to prepare its sizes. Until selection decides, all are."""
        if not report.is_graph or report.saved_us <= 0:
            return True
        if len(self.waiting) >= MAX_WAITING:
            self.waiting.clear()
        came = self.waiting.pop(sizes, 0) + 1
        if came == 1:
            self._note_new(report)
        self._earn(report)
        # A size that comes for the first time will come as often as others did.
        if self.us <= self.budget_us and max(came, 1 / self.new) * report.saved_us >= MARGIN * self.us:
            return True
        self.waiting[sizes] = came
        return False

    def _earn(self, report: FunctionReport) -> None:
        """Add to the budget the time that calls gained since the last time."""
        calls, captured = report.calls - self.earned[0], report.captured_calls - self.earned[1]
        self.earned = report.calls, report.captured_calls
        earned = ALLOWED * calls * report.timings_us.get(NO_GRAPH, 0.0) + SPENT * captured * report.saved_us
        self.budget_us = min(self.budget_us + earned, SAVED * self.us)

    def _note_new(self, report: FunctionReport) -> None:
        if self.calls:
            self.new += (1 / max(report.calls - self.calls, 1) - self.new) * NEW_WEIGHT
        else:
            self.new = min(report.num_sizes / max(report.calls, 1), 1.0)
        self.calls = report.calls
