"""
The verdict on a graph: whether it may be used, and if not, why and for good or not. Checks that cost little come first.
A graph that differs is examined further: the reason decides whether inputs can be copied, or no graph is possible.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TYPE_CHECKING

from torch._inductor.pygraph.graph.memory import room
from torch._inductor.pygraph.graph.placeholder import other_values, take_damage
from torch._inductor.pygraph.types.reason import Code, first_line, Reason
from torch._inductor.pygraph.verify.rehearsal import RERUNS
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._inductor.pygraph.verify.proof import Proof
    from torch._inductor.pygraph.verify.rehearsal import Rehearsal


@dataclasses.dataclass(frozen=True)
class Verdict:
    """
    With a ``reason`` the graph must not be used, unless it ``may_vary`` and launches what the function launches.

    Attributes:
        is_capturable: whether a graph with another binding may be used
        varies: the results differ from those of a run of the function by no more than those of other runs do
        by_atomics: atomic additions would explain how the results differ
    """

    reason: Reason | None = None
    is_capturable: bool = True
    varies: bool = False
    by_atomics: bool = False

    def may_vary(self, adds_atomically: bool) -> bool:
        """Return whether the function itself may have such results in another run."""
        return self.varies or (self.by_atomics and adds_atomically)


def verify(
    rehearsal: Rehearsal, run_graph: Callable[[], None], outputs: Sequence[Any], *, calls_custom: bool = False
) -> Verdict:
    """
    Compare a graph's first run, the last thing that happened on the stream, with the rehearsal.

    Args:
        run_graph: runs the graph again
        outputs: where the graph's outputs lie, in every run
        calls_custom: see PartitionInfo
    """
    return _Examination(rehearsal, run_graph, outputs, calls_custom).verdict()


@dataclasses.dataclass
class _Examination:
    rehearsal: Rehearsal
    run_graph: Callable[[], None]
    outputs: Sequence[Any]
    calls_custom: bool

    def __post_init__(self) -> None:
        self.wrote_placeholder = take_damage(self.rehearsal.device_index)

    def verdict(self) -> Verdict:
        found = self._difference()
        if self.wrote_placeholder or take_damage(self.rehearsal.device_index):
            return Verdict(Reason.of(Code.WROTE_PLACEHOLDER), found.is_capturable)
        if found.reason is None or not found.is_capturable or not self.calls_custom or self._reads_placeholders():
            return found
        # A graph with copies would differ as well: no address is hidden in this one. Nor do atomic additions explain
        # what an operator does not launch.
        reason = Reason.of(Code.KERNELS_NOT_CAPTURED)
        return dataclasses.replace(found, reason=reason, is_capturable=False, by_atomics=False)

    def _difference(self) -> Verdict:
        rehearsal, expected = self.rehearsal, self.rehearsal.proof
        actual: Proof | None = None
        try:
            # First, before another run writes over what this one wrote.
            actual = rehearsal.results(self.outputs, rehearsal.unmarked, has_seeds=not self.calls_custom)
            if rehearsal.writes_any(actual.unwritten()):
                return _never(Code.KERNELS_NOT_CAPTURED)
            if expected.is_exact(actual):
                return Verdict()
            failure = expected.failure(actual, rehearsal.others)
            if failure is None:
                if not rehearsal.repeats_itself():
                    return Verdict()
                # An input may influence only a small part of the result.
                return Verdict(Reason.of(Code.ONLY_CLOSE), by_atomics=True)
        except RuntimeError as e:
            actual = None
            failure = Reason.of(Code.NOT_COMPARABLE, error=first_line(e))
        if not rehearsal.can_rerun:
            return Verdict(failure)
        if (code := self._host_code_varies()) is not None:
            return _never(code)
        if actual is None:
            return Verdict(failure)
        try:
            # Last, for a graph that varies as the function does. One that holds the host's first numbers may be as
            # close.
            others = rehearsal.other_runs(rehearsal.inputs)
            failing = expected.not_alike(actual, others)
            varying = OrderedSet(result for other in others for result in expected.differing(other))
            varies = not expected.not_alike(actual, others, by_norm=False)
            return Verdict(expected.failure(actual, others), varies=varies, by_atomics=failing <= varying)
        except RuntimeError:
            return Verdict(failure)

    def _run_graph(self) -> Proof:
        self.rehearsal.restore()
        self.run_graph()
        return self.rehearsal.results(self.outputs)

    def _reads_placeholders(self) -> bool:
        """Return whether the graph, which repeats itself, has other results when the placeholders hold other values."""
        try:
            first = self._run_graph()
            if not first.is_exact(self._run_graph()):
                return False
            with other_values(self.rehearsal.device_index):
                return not first.is_exact(self._run_graph())
        except RuntimeError:
            # Comparing takes memory.
            return False

    def _host_code_varies(self) -> Code | None:
        """Return a code if the function varies from run to run and its graph does not."""
        if room(self.rehearsal.device_index) < self.rehearsal.needed_bytes:
            return Code.NO_MEMORY_FOR_PROOF
        try:
            first = self._run_graph()
            if any(not first.is_exact(self._run_graph()) for _ in range(RERUNS - 1)):
                return None
            return None if self.rehearsal.repeats_itself() else Code.HOST_CODE_VARIES
        except RuntimeError:
            # Comparing takes memory as well.
            return Code.NO_MEMORY_FOR_PROOF


def _never(code: Code) -> Verdict:
    return Verdict(Reason.of(code), is_capturable=False)
