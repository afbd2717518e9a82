"""
Steady-state time of several ways to run the same work, taken in turns.

A round times every loop once, so that clocks, temperature and neighbours change for all
of them alike, and medians over rounds can be compared.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable

    Loop = Callable[[int], None]


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

    @classmethod
    def of(cls, samples_us: list[float], host_us: list[float]) -> Timing:
        low, _, high = statistics.quantiles(samples_us, n=4)
        return cls(statistics.median(samples_us), high - low, statistics.median(host_us))


def time_interleaved(
    loops: dict[str, Loop],
    synchronize: Callable[[], None],
    *,
    rounds: int = 21,
    round_s: float = 0.05,
    max_calls: int = 1000,
    lead_in: int = 3,
    clock: Callable[[], float] = time.perf_counter,
    agree: Callable[[float], float] = float,
) -> dict[str, Timing]:
    """
    ``loops[name](n)`` makes n calls without waiting for the device. Each round runs as
    many as fill about ``round_s`` seconds and waits once, at the end. ``agree`` makes one
    estimate of those of several processes that have to make the same calls. Raises
    LoopFailed.
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
        synchronize()
        start = clock()
        run(name, calls)
        synchronize()
        return clock() - start

    calls = {}
    for name in loops:
        run(name, lead_in)
        per_call = agree(seconds(name, lead_in)) / lead_in
        calls[name] = max(5, min(max_calls, int(round_s / max(per_call, 1e-9))))

    samples: dict[str, list[float]] = {name: [] for name in loops}
    host: dict[str, list[float]] = {name: [] for name in loops}
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name in loops:
                # The first calls after another variant refill caches and restart the
                # path through the recorded graphs.
                run(name, lead_in)
                synchronize()
                host[name].append(run(name, 1) * 1e6)
                samples[name].append(seconds(name, calls[name]) / calls[name] * 1e6)
    finally:
        if collecting:
            gc.enable()
    return {name: Timing.of(samples[name], host[name]) for name in loops}
