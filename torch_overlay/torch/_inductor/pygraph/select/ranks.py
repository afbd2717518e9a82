"""
Selection of a function with collectives, by all ranks together. Each rank times each candidate for the same number of
calls, and the largest time of each candidate over the ranks decides. The ranks exchange times between two calls: no
rank waits for a collective then.

A rank that comes late, has other sizes, recompiles or dies leaves the others without an agreement. They decide by
themselves then: no graph if not all of them have recorded it, else the graph.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TYPE_CHECKING

from torch._dynamo.utils import counters
from torch._inductor.pygraph.select.selection import Selection, TimedAgain
from torch._inductor.pygraph.select.timing import Cost, Estimate
from torch._inductor.pygraph.types.candidate import BINDINGS, COPY, NO_GRAPH, UNDECIDED
from torch._inductor.pygraph.types.reason import Code, Reason


if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from torch._inductor.cudagraph_utils import ModelType


# Functions on which the ranks did not agree, by name.
_not_agreed: set[str] = set()


class NoAgreement(Exception):
    """The ranks did not decide together in time."""


def slowest(costs: list[list[list[float]]]) -> list[list[float]]:
    """Return the largest of each time of one candidate on all ranks."""
    return [max(of_ranks) for of_ranks in zip(*costs)]


def same(values: list[Any]) -> list[Any]:
    """Return the value that all ranks have, or nothing."""
    return values[:1] if all(value == values[0] for value in values) else []


@dataclasses.dataclass(eq=False)
class RankSelection(Selection):
    """
    Args:
        agree: what the ranks decide: (name of the step, value, function of all values), see capture/agreement.py
        lost: names of functions on which the ranks did not agree once. Nobody waits for those again
    """

    _: dataclasses.KW_ONLY
    name: str
    agree: Callable[[str, Any, Callable[[list[Any]], Any]], Any]
    lost: set[str]

    has_fixed_samples = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.exchanges = 0
        self.is_recorded_by_all = False

    def _exchange(self, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Raises NoAgreement if not all ranks come, in the same call."""
        self.exchanges += 1
        step = f"{self.name}/select/{self.exchanges}"
        is_lost = self.controller.spec.rank_name in self.lost
        posted = None if is_lost else [[self.calls, self.report.sizes], value]

        def decide_if_alike(values: list[Any]) -> Any:
            calls, of_ranks = zip(*values)
            return decide(list(of_ranks)) if same(list(calls)) else None

        decision = self.agree(step, posted, decide_if_alike)
        if decision is None:
            self.lost.add(self.controller.spec.rank_name)
            raise NoAgreement
        return decision

    def _steps(self) -> Iterator[ModelType]:
        yield self.uncaptured
        remembered = self.remembered
        try:
            # Another rank may have no cache, or another one.
            agreed = self._exchange("" if remembered is None else remembered.choice, same)
            if remembered is not None and agreed == [remembered.choice]:
                counters["pygraph"]["remembered"] += 1
                self.controller.remember(remembered.timings_us, remembered.choice)
                if remembered.choice == NO_GRAPH:
                    self._decide(NO_GRAPH, *remembered.reasons)
                else:
                    yield from self._recorded()
                    if self._is_captured() and self.state.binding == remembered.choice:
                        self._decide(remembered.choice, *remembered.reasons)
                    else:
                        self.controller.undecide()
        except NoAgreement:
            self._decide_alone()
        yield from self._select() if self.report.choice == UNDECIDED else self._finish()

    def _compare(self) -> Iterator[ModelType]:
        try:
            yield from super()._compare()
        except NoAgreement:
            self._decide_alone()

    def _decide_alone(self) -> None:
        if self.is_recorded_by_all and self.state.is_capturable:
            self._decide(self.state.binding, Reason.of(Code.COLLECTIVES_NOT_TIMED))
            return
        if self.replay is not None:
            self.losers.append(self.state.id)
        self._decide(NO_GRAPH, Reason.of(Code.RANKS_DISAGREE))

    def _time(self, choice: str | None = None) -> Generator[ModelType, None, Cost]:
        own = yield from super()._time(choice)
        cost = Cost(*(Estimate(*e) for e in self._exchange([own.program, own.host, own.device], slowest)))
        self.controller.timed(choice or self.state.binding, cost.call.us)
        return cost

    def _is_captured(self) -> bool:
        binding = self.state.binding if self.state.is_capturable else NO_GRAPH
        self.is_recorded_by_all = self._exchange(binding, same) in ([COPY], *([b] for b in BINDINGS))
        return self.is_recorded_by_all

    def _timed_again(self) -> TimedAgain:
        return TimedAgain(self._exchange(super()._timed_again(), min))

    def _joins(self) -> Generator[ModelType, None, bool]:
        # Neighbours may be decided at another time on each rank.
        return self.state.binding != COPY
        yield

    def _decide(self, choice: str, *reasons: Reason) -> None:
        # No rank decides anew by itself.
        self.controller.decide(choice, *reasons)


def by_all_ranks(name: str, agree: Callable[[str, Any, Callable[[list[Any]], Any]], Any]) -> Callable[..., Selection]:
    """Return what makes the selection of a function that all ranks know by ``name``."""
    return functools.partial(RankSelection, name=name, agree=agree, lost=_not_agreed)
