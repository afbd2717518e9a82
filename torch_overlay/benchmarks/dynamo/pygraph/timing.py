"""
Steady-state time of several ways to run the same work, taken in turns.

A round times every loop once, so that clocks, temperature and neighbours change for all
of them alike, and medians over rounds can be compared. Each round takes them in another
order, since what ran before may leave other clocks and caches.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable

    Loop = Callable[[int], None]

# All rounds are run again until the timings are clear: so many times at most, and only if they then end within so many
# seconds.
MAX_TIMES = 4
MAX_AGAIN_S = 12.0
# Calls of a round, and those in front of it; of a loop whose calls take so many seconds.
MIN_CALLS, LEAD_IN = 5, 3
LONG_CALL_S = 0.02
MIN_LONG_CALLS, LONG_LEAD_IN = 2, 1
# A loop that takes MUCH_SLOWER times as long as the fastest is timed in one of SELDOM rounds, if that leaves ENOUGH_ROUNDS.
# Otherwise slow loops would take most of the time.
MUCH_SLOWER, SELDOM, ENOUGH_ROUNDS = 3.0, 3, 5

# Random numbers of so many seeds are drawn by rounds in turns. A program that draws its path records a new path when it meets
# one. Before the rounds, each loop takes the paths of all seeds so many times, if that takes no more seconds.
DRAWS, TIMES_DRAWN, MAX_DRAWING_S = 6, 3, 8.0
# Rounds that would take more seconds in all are fewer.
MAX_ROUNDS_S, FEWEST_ROUNDS = 20.0, 5

# What one may take of another's time, in the median of the rounds. It is slower where the
# whole of the median's confidence interval is above, which noise is not likely to do, and
# nothing is known where the interval is so wide that this would let anything pass.
MAX_SLOWDOWN = 1.02
MAX_WIDTH = 0.08
# Of stock CUDA graphs' time, the range of its middle half of the rounds. Noisier cases are timed again, and marked.
MAX_NOISE = 0.1
# A case may have the machine to itself for some time. After this part of it, no further variant is measured.
ENOUGH = 0.75


class LoopFailed(Exception):
    """One loop raised what is its cause."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclass(frozen=True)
class Timing:
    median_us: float
    iqr_us: float
    # Of one call, until it returns, with an idle device.
    host_us: float
    # By round
    samples_us: dict[int, float] = field(compare=False, repr=False)

    @property
    def noise(self) -> float:
        return self.iqr_us / self.median_us

    @classmethod
    def of(cls, samples_us: dict[int, float], host_us: list[float]) -> Timing:
        low, median, high = statistics.quantiles(samples_us.values(), n=4)
        return cls(median, high - low, statistics.median(host_us), samples_us)


def fields(timings: dict[str, Timing]) -> dict[str, Any]:
    """What a row has of its timings."""
    return {
        **{f"{name}_us": round(timing.median_us, 2) for name, timing in timings.items()},
        "spread": {name: round(timing.iqr_us, 2) for name, timing in timings.items()},
        "host_us": {name: round(timing.host_us, 2) for name, timing in timings.items()},
    }


class Interval(NamedTuple):
    """A median, and between what it is with a confidence of 95 %."""

    low: float
    median: float
    high: float

    @property
    def is_unclear(self) -> bool:
        return self.low <= MAX_SLOWDOWN < self.high and self.high - self.low > MAX_WIDTH


def ratio(ours: Timing, theirs: Timing) -> Interval:
    """
    Of our time to theirs, in the rounds in which both were timed: what slows a round slows both.
    The bounds are order statistics, which hold for any distribution.
    """
    both = ours.samples_us.keys() & theirs.samples_us.keys()
    ratios = sorted(ours.samples_us[i] / theirs.samples_us[i] for i in both)
    n = len(ratios)
    outside, below = 0, 1 / 2**n
    while below <= 0.025:
        outside += 1
        below += math.comb(n, outside) / 2**n
    outside = max(0, outside - 1)
    return Interval(ratios[outside], statistics.median(ratios), ratios[n - 1 - outside])


class Marks(Protocol):
    """Points on the device's timeline."""

    def mark(self) -> Any:
        """Return the point at which the device will have done all work that is queued now. Does not wait for it."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two points that the device has passed."""


def time_interleaved(
    loops: dict[str, Loop],
    synchronize: Callable[[], None],
    *,
    rounds: int = 21,
    round_s: float = 0.02,
    max_calls: int = 1000,
    fixed_calls: int | None = None,
    marks: Marks | None = None,
    clock: Callable[[], float] = time.perf_counter,
    agree: Callable[[float], float] = float,
    draw: Callable[[int], None] | None = None,
    max_rounds_s: float = MAX_ROUNDS_S,
    is_clear: Callable[[dict[str, Timing]], bool] = lambda timings: True,
) -> dict[str, Timing]:
    """
    ``loops[name](n)`` makes n calls without waiting for the device. Each round runs as
    many as fill about ``round_s`` seconds, MIN_CALLS at least, and waits once, at the end. With ``marks``, the device
    tells when the call before them ended, and when the last of them ended. The host launches a call while the device works
    on the one before. Without ``marks``, the device is idle when the first call begins, and waits for the host. There are
    ``rounds`` rounds. They are repeated while the timings are not ``is_clear``, up to MAX_TIMES
    times, if that ends within MAX_AGAIN_S seconds. Of calls longer than LONG_CALL_S there are fewer in a round. A loop that
    takes much longer than the fastest is timed in fewer rounds. If the rounds would take more than ``max_rounds_s``, there
    are fewer, FEWEST_ROUNDS at least. ``draw`` gets a seed before the calls that are timed: with the same random numbers, all
    loops of a round do the same work. Rounds take DRAWS seeds in turns, and each loop ran with each seed before the rounds.
    With ``fixed_calls`` a round makes so many, and there are ``rounds`` rounds, once.
    ``agree`` makes one estimate of those of several processes that have to make the same
    calls. Raises LoopFailed.
    """

    def run(name: str, calls: int) -> float:
        """The seconds until it returns."""
        start = clock()
        try:
            loops[name](calls)
        except Exception as error:
            raise LoopFailed(name) from error
        return clock() - start

    def seconds(name: str, calls: int) -> float:
        if marks is not None:
            first = marks.mark()
            run(name, calls)
            last = marks.mark()
            synchronize()
            return marks.seconds(first, last)
        synchronize()
        start = clock()
        run(name, calls)
        synchronize()
        return clock() - start

    calls, lead_in, estimates = {}, {}, {}
    for name in loops:
        run(name, LEAD_IN)
        per_call = estimates[name] = agree(seconds(name, LEAD_IN)) / LEAD_IN
        is_long = per_call > LONG_CALL_S
        lead_in[name] = LONG_LEAD_IN if is_long else LEAD_IN
        least = MIN_LONG_CALLS if is_long else MIN_CALLS
        calls[name] = fixed_calls or max(least, min(max_calls, int(round_s / max(per_call, 1e-9))))

    limit = MUCH_SLOWER * min(estimates.values(), default=0.0)
    seldom = {name for name in loops if estimates[name] > limit and rounds >= SELDOM * ENOUGH_ROUNDS}

    def draw_again(i: int) -> None:
        if draw is not None:
            draw(i % DRAWS)

    def round_s_of(name: str) -> float:
        return estimates[name] * (lead_in[name] + 1 + calls[name]) / (SELDOM if name in seldom else 1)

    if not fixed_calls:
        all_s = max(sum(map(round_s_of, loops)), 1e-9)
        rounds = min(rounds, max(FEWEST_ROUNDS, int(max_rounds_s / all_s)))

    begin = clock()
    for i in range(TIMES_DRAWN * DRAWS if draw is not None else 0):
        if agree(clock() - begin) > MAX_DRAWING_S:
            break
        for name in loops:
            draw_again(i)
            run(name, calls[name])

    samples: dict[str, dict[int, float]] = {name: {} for name in loops}
    host: dict[str, list[float]] = {name: [] for name in loops}
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    timings: dict[str, Timing] = {}
    order = random.Random(0)
    begin = clock()
    try:
        for times in range(1, MAX_TIMES + 1):
            for i in range((times - 1) * rounds, times * rounds):
                for name in order.sample([*loops], len(loops)):
                    if name in seldom and i % SELDOM:
                        continue
                    # The first calls after another variant refill caches and restart the
                    # path through the recorded graphs.
                    draw_again(i)
                    run(name, lead_in[name])
                    synchronize()
                    # A loop sets up more than its calls, settings that a variant has.
                    host[name].append((run(name, 1) - run(name, 0)) * 1e6)
                    draw_again(i)
                    samples[name][i] = seconds(name, calls[name]) / calls[name] * 1e6
            timings = {name: Timing.of(samples[name], host[name]) for name in loops}
            if fixed_calls or is_clear(timings) or agree(clock() - begin) * (times + 1) / times > MAX_AGAIN_S:
                break
    finally:
        if collecting:
            gc.enable()
    return timings
