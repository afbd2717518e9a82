"""
The verdict on a graph: whether it may be used, and if not, why and for good or not.

The checks that cost little come first. A graph that differs is examined further, since the
reason decides what can be tried next: inputs that are copied, or no graph at all.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TYPE_CHECKING

from torch._inductor.pygraph.graph.memory import fill_free, room
from torch._inductor.pygraph.graph.placeholder import take_damage
from torch._inductor.pygraph.types.reason import Code, first_line, Reason
from torch._inductor.pygraph.verify.fingerprint import identical
from torch._inductor.pygraph.verify.proof import Proof
from torch._inductor.pygraph.verify.rehearsal import FILLS, RERUNS


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._inductor.pygraph.verify.rehearsal import Rehearsal
    from torch.cuda import _POOL_HANDLE


@dataclasses.dataclass(frozen=True)
class Verdict:
    """
    Args:
        reason: why the graph must not be used, or None
        is_capturable: whether a graph with another binding may be used
    """

    reason: Reason | None = None
    is_capturable: bool = True


@dataclasses.dataclass(frozen=True)
class GraphRun:
    """
    A graph that ran once on the inputs of the call.

    Args:
        outputs: where the graph's outputs lie, in every run
        run: runs it again
        pool: the memory pool that it was captured in
    """

    outputs: Sequence[Any]
    run: Callable[[], None]
    pool: _POOL_HANDLE
    device_index: int


def verify(rehearsal: Rehearsal, graph: GraphRun) -> Verdict:
    """
    Compare a graph's first run with the rehearsal.

    The first run must be the last thing that happened on the stream: what it wrote is
    compared before anything else runs.
    """
    return _Examination(rehearsal, graph).verdict()


class _Examination:
    def __init__(self, rehearsal: Rehearsal, graph: GraphRun) -> None:
        self.rehearsal = rehearsal
        self.graph = graph
        self.wrote_placeholder = False

    def verdict(self) -> Verdict:
        found = self._difference()
        if take_damage(self.graph.device_index) or self.wrote_placeholder:
            reason = Reason.of(Code.WROTE_PLACEHOLDER)
            return Verdict(reason, is_capturable=found.is_capturable)
        return found

    def _difference(self) -> Verdict:
        rehearsal, expected = self.rehearsal, self.rehearsal.proof
        actual: Proof | None = None
        try:
            # First, before another run writes over what this one wrote.
            actual = Proof(
                rehearsal.inputs,
                self.graph.outputs,
                rehearsal.mutated,
                rehearsal.unmarked,
            )
            if rehearsal.writes_any(actual.unwritten()):
                return _never(Code.KERNELS_NOT_CAPTURED)
            if expected.is_exact(actual):
                return Verdict()
            failure = expected.failure(actual, rehearsal.others)
            if failure is None:
                if not rehearsal.repeats_itself():
                    return Verdict()
                # An input may influence only a small part of the result.
                return Verdict(Reason.of(Code.ONLY_CLOSE))
        except RuntimeError as e:
            actual = None
            failure = Reason.of(Code.NOT_COMPARABLE, error=first_line(e))
        if actual is not None and self._leaves_results(actual):
            return _never(Code.KERNELS_NOT_CAPTURED)
        if self._reads_free_memory():
            return _never(Code.KERNELS_NOT_CAPTURED)
        if (code := self._host_code_varies()) is not None:
            return _never(code)
        if actual is None or not rehearsal.can_rerun:
            return Verdict(failure)
        try:
            # Last, for a graph that varies as the function does. A graph that holds the
            # first of the numbers that the host passes may be as close.
            others = rehearsal.other_runs(rehearsal.inputs)
            return Verdict(expected.failure(actual, others))
        except RuntimeError:
            return Verdict(failure)

    def _leaves_results(self, actual: Proof) -> bool:
        """
        Return whether the graph does not write a result that differs.

        A write to an address that no parameter shows would have gone to a placeholder.
        """
        rehearsal = self.rehearsal
        if not rehearsal.can_rerun:
            return False
        if take_damage(self.graph.device_index):
            self.wrote_placeholder = True
            return False
        expected, before = rehearsal.proof, rehearsal.unchanged
        # The uncaptured function does not write these either.
        unwritten = actual.unwritten()
        differ = [
            i
            for i, output in enumerate(expected.outputs)
            if output is not None
            and i not in unwritten
            and not identical(output, actual.outputs[i])
        ]
        if Proof(rehearsal.inputs, self.graph.outputs, [], differ).unwritten():
            return True
        return any(
            identical(unchanged, now) and not identical(unchanged, after)
            for unchanged, now, after in zip(
                before.inputs, actual.inputs, expected.inputs
            )
        )

    def _reads_free_memory(self) -> bool:
        """
        Return whether the graph's results depend on what its pool held before.

        A kernel that should write that memory then ran eagerly during capture. The answer is
        False where the uncaptured function's results depend on such memory too, and where
        managed inputs died.
        """
        if not self.rehearsal.can_rerun:
            return False
        first: Proof | None = None
        try:
            for word in FILLS:
                result, again = (self._run_over(word) for _ in range(2))
                if not result.is_exact(again):
                    return False
                first = first or result
                if results := first.differing(result):
                    return not self.rehearsal.depend_on_free_memory(results)
        except RuntimeError:
            # Comparing takes memory.
            pass
        return False

    def _run_over(self, word: int) -> Proof:
        """Return the graph's results after free memory of its pool was filled."""
        rehearsal = self.rehearsal
        fill_free(self.graph.pool, self.graph.device_index, word)
        rehearsal.restore()
        self.graph.run()
        return Proof(rehearsal.inputs, self.graph.outputs, rehearsal.mutated)

    def _host_code_varies(self) -> Code | None:
        """
        Return a code if the function varies from run to run and its graph does not.

        The order of atomic operations would vary in both. The answer is None where managed
        inputs died.
        """
        rehearsal = self.rehearsal
        if not rehearsal.can_rerun:
            return None
        if room(self.graph.device_index) < rehearsal.needed_bytes:
            return Code.NO_MEMORY_FOR_PROOF
        first: Proof | None = None
        try:
            for _ in range(RERUNS):
                rehearsal.restore()
                self.graph.run()
                result = Proof(rehearsal.inputs, self.graph.outputs, rehearsal.mutated)
                if first is not None and not first.is_exact(result):
                    return None
                first = first or result
            if rehearsal.repeats_itself():
                return None
        except RuntimeError:
            # Comparing takes memory as well.
            return Code.NO_MEMORY_FOR_PROOF
        return Code.HOST_CODE_VARIES


def _never(code: Code) -> Verdict:
    return Verdict(Reason.of(code), is_capturable=False)
