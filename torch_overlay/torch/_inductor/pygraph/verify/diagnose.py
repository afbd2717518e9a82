"""
The verdict on a graph: whether it may be used, and if not, why and for good or not. Checks that cost little come first.
A graph that differs is examined further: the reason decides whether inputs can be copied, or no graph is possible.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TYPE_CHECKING

from torch._inductor.pygraph.graph.memory import fill_free, room
from torch._inductor.pygraph.graph.placeholder import take_damage
from torch._inductor.pygraph.types.reason import Code, first_line, Reason
from torch._inductor.pygraph.verify.proof import identical
from torch._inductor.pygraph.verify.rehearsal import FILLS, RERUNS
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._inductor.pygraph.verify.proof import Proof
    from torch._inductor.pygraph.verify.rehearsal import Rehearsal
    from torch.cuda import _POOL_HANDLE


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


def verify(rehearsal: Rehearsal, run_graph: Callable[[], None], outputs: Sequence[Any], pool: _POOL_HANDLE) -> Verdict:
    """
    Compare a graph's first run, the last thing that happened on the stream, with the rehearsal.

    Args:
        run_graph: runs the graph again
        outputs: where the graph's outputs lie, in every run
        pool: the memory pool that it was captured in
    """
    return _Examination(rehearsal, run_graph, outputs, pool).verdict()


@dataclasses.dataclass
class _Examination:
    rehearsal: Rehearsal
    run_graph: Callable[[], None]
    outputs: Sequence[Any]
    pool: _POOL_HANDLE

    def __post_init__(self) -> None:
        self.wrote_placeholder = take_damage(self.rehearsal.device_index)

    def verdict(self) -> Verdict:
        found = self._difference()
        if self.wrote_placeholder or take_damage(self.rehearsal.device_index):
            return Verdict(Reason.of(Code.WROTE_PLACEHOLDER), found.is_capturable)
        return found

    def _difference(self) -> Verdict:
        rehearsal, expected = self.rehearsal, self.rehearsal.proof
        actual: Proof | None = None
        try:
            # First, before another run writes over what this one wrote.
            actual = rehearsal.results(self.outputs, rehearsal.unmarked)
            if rehearsal.writes_any(actual.unwritten()):
                return NOT_CAPTURED
            if expected.is_exact(actual):
                return Verdict()
            failure = expected.failure(actual, rehearsal.others)
            if failure is None:
                if not rehearsal.repeats_itself():
                    return Verdict()
                if self._reads_free_memory():
                    return NOT_CAPTURED
                # An input may influence only a small part of the result.
                return Verdict(Reason.of(Code.ONLY_CLOSE), by_atomics=True)
        except RuntimeError as e:
            actual = None
            failure = Reason.of(Code.NOT_COMPARABLE, error=first_line(e))
        if not rehearsal.can_rerun:
            return Verdict(failure)
        if actual is not None and self._leaves_results(actual):
            return NOT_CAPTURED
        if self._reads_free_memory():
            return NOT_CAPTURED
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

    def _leaves_results(self, actual: Proof) -> bool:
        """Return whether the graph does not write a result that differs, not even at a placeholder."""
        if self.wrote_placeholder:
            return False
        rehearsal, expected = self.rehearsal, self.rehearsal.proof
        # The uncaptured function does not write these either.
        unwritten = actual.unwritten()
        differ = [
            i
            for i, output in enumerate(expected.outputs)
            if output is not None and i not in unwritten and not identical(output, actual.outputs[i])
        ]
        if rehearsal.results(self.outputs, differ).unwritten():
            return True
        return any(
            identical(unchanged, now) and not identical(unchanged, after)
            for unchanged, now, after in zip(rehearsal.unchanged.inputs, actual.inputs, expected.inputs)
        )

    def _reads_free_memory(self) -> bool:
        """
        Return whether the graph's results depend on what its pool held before, and those of the uncaptured function do
        not: a kernel that should write that memory ran eagerly during capture.
        """
        first: Proof | None = None
        try:
            for word in FILLS:
                fill_free(self.pool, self.rehearsal.device_index, word)
                result = self._run_graph()
                fill_free(self.pool, self.rehearsal.device_index, word)
                if not result.is_exact(self._run_graph()):
                    return False
                first = first or result
                if results := first.differing(result):
                    return not self.rehearsal.depend_on_free_memory(results)
        except RuntimeError:
            # Comparing takes memory.
            pass
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


# An operator launched kernels on a stream that was not captured.
NOT_CAPTURED = _never(Code.KERNELS_NOT_CAPTURED)
