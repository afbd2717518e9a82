"""
Which of two candidates is better, from what a call of each takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._inductor.pygraph.select.timing import is_less, MARGIN, noise
from torch._inductor.pygraph.types.reason import Code, Reason


if TYPE_CHECKING:
    from torch._inductor.pygraph.select.timing import Cost

# The program can gain or lose by a function at most so many times the function's own time.
MAX_DIFFERENCE = 10


def takes_less(a: Cost, b: Cost) -> bool:
    """
    Return whether the function takes less time by itself.

    A call takes at least the host's and at least the device's time. Whichever of the two is
    known better may show the difference.
    """
    return is_less(a.call, b.host) or is_less(a.call, b.device)


def is_own_difference(a: Cost, b: Cost) -> bool:
    """Return whether the function can be the cause of the program's difference."""
    most = max(cost.host.us + cost.device.us for cost in (a, b))
    return abs(a.program.us - b.program.us) <= MAX_DIFFERENCE * most


def judge(graph: Cost, uncaptured: Cost) -> tuple[bool, Reason]:
    """
    Return whether the graph is to stay, and why.

    The program's time decides where it shows a difference, the function's own time where it
    does not. The program's time includes what neighbouring functions, which are timed in
    the same calls, gain or lose. So a graph that gains nothing by itself, on the host or on
    the device, does not stay. A difference of many times the function's own time says
    nothing about the function.
    """
    gains = is_less(graph.host, uncaptured.host) or is_less(
        graph.device, uncaptured.device
    )
    is_own = is_own_difference(graph, uncaptured)
    from_call_to_call = {
        "graph_us": graph.program.us,
        "uncaptured_us": uncaptured.program.us,
    }
    if is_own and gains and is_less(graph.program, uncaptured.program):
        return True, Reason.of(Code.FASTER, **from_call_to_call)
    if is_own and is_less(uncaptured.program, graph.program):
        return False, Reason.of(Code.SLOWER, **from_call_to_call)
    if is_less(uncaptured.host, graph.host):
        # The program needs the host, too.
        if is_less(graph.device, uncaptured.device):
            return False, Reason.of(Code.SLOWER_ON_HOST)
        return False, Reason.of(Code.SLOWER_BY_ITSELF)
    if takes_less(graph, uncaptured):
        return True, Reason.of(Code.FASTER_BY_ITSELF)
    if takes_less(uncaptured, graph):
        return False, Reason.of(Code.SLOWER_BY_ITSELF)
    gain = uncaptured.call.us - graph.call.us
    if gain > (1 - MARGIN) * uncaptured.call.us:
        within = noise(graph.call, uncaptured.call)
        return False, Reason.of(Code.WITHIN_NOISE, gain_us=gain, noise_us=within)
    return False, Reason.of(Code.NOT_FASTER)


def depends_on_host(graph: Cost, uncaptured: Cost) -> bool:
    """
    Return whether the graph loses as much device time as the program gains.

    The host was probably still warming up when the uncaptured function was timed.
    """
    gain = uncaptured.program.us - graph.program.us
    return gain < graph.device.us - uncaptured.device.us


def costs_nothing(graph: Cost, uncaptured: Cost) -> bool:
    """
    Return whether a graph that did not win takes no longer: neither the function by itself,
    nor the host, nor the program.
    """
    # A difference within the noise is chance, but much noise must not hide a loss.
    most = min(noise(graph.call, uncaptured.call), (1 - MARGIN) * uncaptured.call.us)
    return graph.call.us - uncaptured.call.us <= most and not (
        is_less(uncaptured.host, graph.host)
        or (
            is_own_difference(graph, uncaptured)
            and is_less(uncaptured.program, graph.program)
        )
    )
