"""
Which sizes of a function are selected for, where each size has a recording of its own. A program may call a function at
few sizes: each has such a recording. Once there are more sizes, the new ones share a recording, if PyGraph can record
the function for many sizes (many_sizes.py).

Timing a size and recording it takes time, which a size that comes seldom does not gain back. So only the first size is
selected for at once. Calls of further sizes run uncaptured and are counted. Selection begins for a size that came often
enough, while few others are being timed. Once sizes are decided, often enough is as many calls as gain what a recording
takes.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch._inductor.pygraph.select import selection, store, timing
from torch._inductor.pygraph.types import journal
from torch._inductor.pygraph.types.candidate import UNDECIDED
from torch._inductor.pygraph.types.reason import Code, Reason


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._inductor.cudagraph_utils import ModelType, OutputType
    from torch._inductor.pygraph.select.selection import Selection
    from torch._inductor.utils import InputType


# Selection begins for a size after MIN_CALLS calls, as long as no size is decided, and after MAX_CALLS at the latest. If
# a graph lost, further sizes wait MORE_CALLS times as long.
MIN_CALLS = 4
MAX_CALLS = 4096
MORE_CALLS = 4

# MIN_TIMED sizes are timed at a time, or one in TIMED_PART of the waiting ones if that is more.
MIN_TIMED = 4
TIMED_PART = 4

# If more sizes wait, the half of them that came least often is forgotten.
MAX_WAITING = 2048

# Up to so many sizes have recordings of their own. Such a recording sets no sizes in a replay, takes memory for one size
# alone, and its calls may run side by side.
FEW_SIZES = 3


class Sizes(dict[Any, "ModelType"]):
    """
    What the program's calls of a function run, by sizes. The entry of None runs all sizes that have no entry.

    Attributes:
        first: the Deployment of the first sizes, by which calls of waiting sizes run. None if no sizes are to wait
        min_calls: how often a size comes before it is selected for
        waiting: sizes that are not selected for yet
        timed: sizes that are not decided yet
        faster: sizes at which a graph was measured faster, and which candidate
        num_sizes: how many sizes came for the first time
    """

    def __init__(self) -> None:
        super().__init__()
        self.first: Any = None
        self.min_calls: float = MIN_CALLS
        self.waiting: dict[Any, Waiting] = {}
        self.timed: dict[Any, Selection] = {}
        self.faster: dict[tuple[int, ...], str] = {}
        self.num_sizes = 0

    @property
    def are_many(self) -> bool:
        return self.num_sizes > FEW_SIZES

    def add(self, sizes: Any, inputs: list[InputType], start: Callable[..., ModelType]) -> ModelType:
        """Return what is to be called for sizes that came for the first time. ``start`` deploys them."""
        self.num_sizes += 1
        if self.first is None or (self.are_many and self.first.may_share(inputs)):
            return self._start(sizes, start(inputs=inputs))
        if len(self.waiting) >= MAX_WAITING:
            self._forget()
        self[sizes] = self.waiting[sizes] = waiting = Waiting(self, sizes, start)
        return waiting

    def _start(self, sizes: Any, fn: ModelType, *, is_timed: bool = True) -> ModelType:
        if None in self:
            return fn
        self[sizes] = fn
        if is_timed and isinstance(fn, selection.Selection) and not fn.is_forced:
            self.timed[sizes] = fn
        return fn

    def is_due(self, waiting: Waiting, inputs: list[InputType]) -> bool:
        """Return whether selection is to begin for sizes that came again."""
        if waiting.calls == 2 and self.first.is_remembered(inputs):
            return True
        if waiting.calls <= self.min_calls:
            return False
        self._note_decisions()
        if waiting.calls <= self.min_calls:
            return False
        return self._decision_around(waiting.sizes) is not None or self._has_place(waiting)

    def start(self, waiting: Waiting, inputs: list[InputType]) -> ModelType:
        # Another thread may have started it.
        self.waiting.pop(waiting.sizes, None)
        decision = self._decision_around(waiting.sizes)
        return self._start(waiting.sizes, waiting.start(inputs=inputs, decision=decision), is_timed=decision is None)

    def _decision_around(self, sizes: Any) -> store.Decision | None:
        """
        Return the candidate that selection chose at smaller and at larger sizes. Return None if there is none for both.
        It then wins between them, too: with the sizes the device's time grows, and the host's time stays.
        """
        sizes = _as_tuple(sizes)
        smaller = {choice for other, choice in self.faster.items() if all(a <= b for a, b in zip(other, sizes))}
        larger = {choice for other, choice in self.faster.items() if all(a >= b for a, b in zip(other, sizes))}
        common = sorted(smaller & larger)
        return store.Decision(common[0], [Reason.of(Code.AS_OTHER_SIZES)], {}) if common else None

    def _note_decisions(self) -> None:
        for sizes, timed in [*self.timed.items()]:
            report = timed.report
            if report.choice == UNDECIDED:
                continue
            self.timed.pop(sizes, None)
            if report.is_graph:
                self.faster[_as_tuple(sizes)] = report.candidate
            if report.remembered:
                continue
            if report.saved_us > 0:
                calls = timed.record_us / report.saved_us
                self.min_calls = min(max(MIN_CALLS, calls), MAX_CALLS)
            else:
                self.min_calls = min(MORE_CALLS * self.min_calls, MAX_CALLS)

    def _has_place(self, waiting: Waiting) -> bool:
        if len(self.timed) < max(MIN_TIMED, len(self.waiting) // TIMED_PART):
            return True
        # The program has not called these sizes again since the waiting ones came first.
        stalled = next((sizes for sizes, timed in [*self.timed.items()] if timed.entered < waiting.since), None)
        if stalled is None:
            return False
        self._drop_timed(stalled)
        return True

    def _drop_timed(self, sizes: Any) -> None:
        timed = self.timed.pop(sizes, None)
        if timed is not None and timed.state.recordings == 0 and self.get(sizes) is timed:
            del self[sizes]
            journal.drop([timed.report])

    def share(self, fn: ModelType) -> None:
        """Deploy ``fn`` for all sizes without a recording or a decision."""
        self._note_decisions()
        for sizes in [*self.timed]:
            self._drop_timed(sizes)
        for sizes in [*self.waiting]:
            self.pop(sizes, None)
        self.waiting.clear()
        self[None] = fn

    def _forget(self) -> None:
        by_calls = sorted(self.waiting.values(), key=lambda waiting: waiting.calls)
        for waiting in by_calls[: len(by_calls) // 2]:
            self.waiting.pop(waiting.sizes, None)
            if self.get(waiting.sizes) is waiting:
                del self[waiting.sizes]


def _as_tuple(sizes: Any) -> tuple[int, ...]:
    return sizes if isinstance(sizes, tuple) else (sizes,)


class Waiting:
    """Runs a function uncaptured at some sizes, until these are to be selected for."""

    __slots__ = ("of", "sizes", "start", "calls", "since")

    def __init__(self, of: Sizes, sizes: Any, start: Callable[..., ModelType]) -> None:
        self.of, self.sizes, self.start = of, sizes, start
        self.calls = 0
        self.since = timing.clock_us()

    def __call__(self, inputs: list[InputType]) -> OutputType:
        self.calls += 1
        of = self.of
        # A Selection has to see a call from its start.
        if self.calls > 1 and of.is_due(self, inputs):
            return of.start(self, inputs)(inputs)
        first = of.first
        if not first.spec.is_backward:
            selection.begin_call(first.controller)
        return first.uncaptured(inputs)
