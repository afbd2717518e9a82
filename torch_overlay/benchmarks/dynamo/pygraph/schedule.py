"""
Which case of a suite begins next, so that what is begun ends before the deadline: a case that does not end is lost.

Cases compile side by side, and so do the variants of a case that takes long. All of them stop while one case is timed. So
all that is begun has ended once the process that takes longest has run, and everything was timed. If there is no room for a
case, the next ones begin, so that no cores are idle.

A case claims the memory that compiling takes. To be measured it needs more. The schedule keeps free what the begun case that
needs most more would take. So each begun case can be measured once no other is.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .plan import VARIANTS


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .case import Case
    from .plan import Work
    from .processes import Machine


# Of what a case is said to take: other cases may slow it down more than those of the run that says so.
MARGIN = 1.15
# A process that is said to take more than this part of all the time may begin when it starts.
MAX_SHARE = 0.65
# Cases that are measured at the same time. One is stopped while the other is timed.
MAX_MEASURED = 2


@dataclass(eq=False)
class Begun:
    """A case until all of its processes have ended: its own, and those of variants that run alone or compile apart."""

    case: Case
    work: Work
    # At a time, which hold so much of the device's memory
    processes: int
    gib: float
    # Processes that have not ended, and the machine's clock when the case began
    unfinished: int
    since: float
    is_compiled: bool = False
    is_timed: bool = False


class Schedule:
    """``processes`` and ``gib`` are what the machine has for all cases at a time."""

    def __init__(
        self, machine: Machine, deadline: float, processes: int, gib: float, work: Callable[[Case], Work]
    ) -> None:
        self.machine, self.deadline, self.work = machine, deadline, work
        self.processes, self.gib, self.limits = processes, gib, (processes, gib)
        self.longest = MAX_SHARE * (deadline - time.monotonic())
        self.begun: list[Begun] = []
        self.measured = 0
        self.changed = threading.Condition()

    def next(self, waiting: list[Case], more_processes: Callable[[Case], int]) -> Begun | None:
        """Wait until one of the cases can end in time and has room, and return the first. Return None if no case can."""
        with self.changed:
            while True:
                planned = (self._planned(case, 1 + more_processes(case)) for case in waiting)
                chosen = next(filter(None, planned), None)
                if chosen is not None:
                    self.processes -= chosen.processes
                    self.gib -= chosen.gib
                    self.begun.append(chosen)
                    return chosen
                if not self.begun:
                    return None
                # What is begun may take less time than it is said to.
                self.changed.wait()

    def leave(self, begun: Begun) -> None:
        """Give back the room of a case that does not begin after all."""
        with self.changed:
            self.begun.remove(begun)
            self.processes, self.gib = self.processes + begun.processes, self.gib + begun.gib
            self.changed.notify_all()

    def compiled(self, begun: Begun) -> None:
        with self.changed:
            begun.is_compiled = True
            self.changed.notify_all()

    def timed(self, begun: Begun) -> None:
        with self.changed:
            begun.is_timed = True
            self.changed.notify_all()

    @contextlib.contextmanager
    def measuring(self, begun: Begun) -> Iterator[None]:
        """Hold the memory that measuring the case takes besides. Waits for it, unless no other case is measured."""
        more = self._more(begun.work)
        with self.changed:
            self.changed.wait_for(lambda: not self.measured or (self.measured < MAX_MEASURED and more <= self.gib))
            self.measured += 1
            self.gib -= more
        try:
            yield
        finally:
            with self.changed:
                self.measured -= 1
                self.gib += more
                self.changed.notify_all()

    def ended(self, begun: Begun) -> None:
        """One of its processes."""
        with self.changed:
            begun.unfinished -= 1
            if begun.unfinished < begun.processes:
                gib = begun.gib if not begun.unfinished else min(begun.gib, begun.work.compiling / 2)
                self.processes, self.gib = self.processes + 1, self.gib + gib
                begun.processes, begun.gib = begun.processes - 1, begun.gib - gib
            if not begun.unfinished:
                self.begun.remove(begun)
            self.changed.notify_all()

    def has_time(self, begun: Begun) -> bool:
        """Whether one more variant of a case may be compiled, and all that is begun still be timed."""
        with self.changed:
            needed = begun.work.longest / VARIANTS + self._device_s(self.begun)
            return MARGIN * needed <= self.deadline - time.monotonic()

    def _planned(self, case: Case, processes: int) -> Begun | None:
        """
        Return the case with as many processes at a time as there is room for, or None if it has no room or would not end in
        time. A case that would take more than half of the memory gets as few processes as it needs to end in time.
        """
        work = self.work(case)
        most = self._at_once(work, processes, *self.limits)
        widest = self._at_once(work, processes, self.processes, self._room(work))
        shortest = min(self.longest, max(work.longest, work.cores / most))
        takes_much = self._gib(work, widest) > self.limits[1] / 2
        for at_once in range(1 if takes_much else max(widest, 1), widest + 1):
            longest = shortest if at_once == most else max(shortest, work.cores / at_once)
            gib = self._gib(work, at_once)
            begun = Begun(case, work._replace(longest=longest), at_once, gib, processes, self.machine.clock())
            if self._ends_in_time(begun):
                return begun
        return None

    def _at_once(self, work: Work, processes: int, free: int, gib: float) -> int:
        """Return how many of a case's processes there is room for."""
        at_once = min(processes, free)
        while at_once and self._gib(work, at_once) > gib:
            at_once -= 1
        return at_once

    def _gib(self, work: Work, at_once: int) -> float:
        """
        Return the memory of so many processes of a case, until it is measured. A process with one variant needs about half of
        what the process with all variants needs. A case that needs more than there is for all cases may begin alone.
        """
        return work.compiling * (at_once + 1) / 2 if at_once > 1 else min(self.limits[1], work.compiling)

    def _more(self, work: Work) -> float:
        """Return by how many GiB measuring a case takes more memory than compiling it."""
        return min(self.limits[1], work.gib) - min(self.limits[1], work.gib, work.compiling)

    def _room(self, work: Work) -> float:
        """Return the GiB that a case may claim for compiling, so that each begun case can still be measured."""
        if not self.begun:
            return self.gib
        more = max(self._more(each) for each in (work, *(begun.work for begun in self.begun if not begun.is_timed)))
        return min(self.gib, self.limits[1] - sum(begun.gib for begun in self.begun) - more)

    def _ends_in_time(self, another: Begun) -> bool:
        begun, now = [*self.begun, another], self.machine.clock()
        longest = max(0.0 if each.is_compiled else each.work.longest - (now - each.since) for each in begun)
        return MARGIN * (max(0.0, longest) + self._device_s(begun)) <= self.deadline - time.monotonic()

    def _device_s(self, begun: list[Begun]) -> float:
        return sum(each.work.device for each in begun if not each.is_timed)
