"""Proofs of recordings for many sizes: which calls are proven, and how. docs/many-sizes.md says why these."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo.utils import counters
from torch._inductor.pygraph.capture.again import adds_atomically
from torch._inductor.pygraph.capture.allocation import AllocationTrace, with_allocator
from torch._inductor.pygraph.capture.at_sizes import differs
from torch._inductor.pygraph.graph.placeholder import take_damage
from torch._inductor.pygraph.types.reason import Code, first_line, Reason, RefusedError
from torch._inductor.pygraph.verify.diagnose import verify
from torch._inductor.pygraph.verify.proof import equal_bits, mark_unwritten
from torch._inductor.pygraph.verify.rehearsal import Rehearsal, RngState, SavedInput
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._inductor.cudagraph_utils import ModelType, OutputType
    from torch._inductor.pygraph.capture.sized import KeptSizes, SizedRecording
    from torch._inductor.pygraph.types.function import FunctionSpec
    from torch._inductor.utils import InputType


# At so many sizes beside the first one a graph is proven as a recording is. At others SizedRecording.is_trusted says
# whether its results are compared first.
PROVEN_SIZES = 3

# Of the largest number of a result, by how much it may differ if the function's own runs do.
CLOSE = 1e-3


class Proofs:
    """What was proven of all recordings of one function, and how further calls are proven."""

    def __init__(self, spec: FunctionSpec, model: ModelType) -> None:
        self.spec, self.model = spec, model
        self.proven: OrderedSet[tuple[int, ...]] = OrderedSet()
        # Rows of launches at which results of a replay were not equal to those of an uncaptured run.
        self.unequal: OrderedSet[Any] = OrderedSet()
        self.adds_atomically = adds_atomically(spec)
        # Results that differ between runs of the function, where it adds atomically.
        self.varying: OrderedSet[int] = OrderedSet()

    @property
    def has_proven_first(self) -> bool:
        """Whether the first sizes are proven. Proofs of further ones take less time."""
        return len(self.proven) > PROVEN_SIZES

    def is_first(self, sizes: tuple[int, ...]) -> bool:
        """Return whether a graph is to be proven at these sizes as a recording is."""
        return sizes not in self.proven and not self.has_proven_first

    def is_trusted(self, recording: SizedRecording, kept: KeptSizes) -> bool:
        """Return whether a call may replay a row without a proof. New rows may not while it is open why results differ."""
        return kept.launches.is_trusted or (not self.unequal and recording.is_trusted(kept))

    def rehearse(self, inputs: list[InputType]) -> Rehearsal:
        """Run the function uncaptured, for a replay to be compared with."""
        trace = AllocationTrace()
        traced = with_allocator(self.model, self.spec.info, trace)

        def run(inputs: list[InputType]) -> OutputType:
            trace.begin()
            return traced(inputs)

        return Rehearsal(
            self.model,
            run,
            trace.others_of,
            inputs,
            device_index=self.spec.device_index,
            managed=OrderedSet(),
            mutated=list(self.spec.mutated_input_idxs),
            reused=self.spec.reused_input_idxs,
        )

    def prove(
        self,
        recording: SizedRecording,
        kept: KeptSizes,
        inputs: list[InputType],
        run_call: ModelType,
        *,
        is_first: bool,
    ) -> OutputType | None:
        """
        Compare a recording at further sizes. ``run_call`` runs the function uncaptured in the place of the call. Returns
        and raises as prove_whole.
        """
        if is_first or not recording.confirm(kept):
            recording.compare(recording.scratch(inputs, kept.at), kept.at)
        row = kept.launches.row
        if not is_first and row not in self.unequal:
            return self._compared(recording, kept, inputs, run_call)
        rehearsal = self.rehearse(inputs)
        if not is_first:
            # With atomic additions, runs that agree do not show that the graph is wrong.
            if not self.adds_atomically and rehearsal.repeats_itself():
                raise differs(kept.at, "it has other results than the function")
            rehearsal.restore()
        return self.prove_whole(recording, kept, inputs, rehearsal)

    def _compared(
        self, recording: SizedRecording, kept: KeptSizes, inputs: list[InputType], run_call: ModelType
    ) -> OutputType | None:
        """
        Replay a recording beside the call, run the call uncaptured with the same random numbers, and compare both. Return
        the outputs of the uncaptured run, or None if the inputs cannot be bound. If results differ, the recording may be
        wrong, or the function may differ in each run: the next call finds out.
        """
        # Another thread may draw meanwhile.
        restore = RngState(self.spec.device_index, inputs).restore if recording.draws else lambda: None
        aside = self._copied(inputs)
        if (tensors := recording.bind(aside, kept, again=True)) is None:
            return None
        for t in tensors[len(recording.model.inputs) :]:
            # So that it shows what the graph does not write.
            mark_unwritten(t)
        replayed = self._results(recording.launch(aside, kept, tensors), aside)
        other: list[Any] | None = None
        if self.adds_atomically:
            restore()
            aside = self._copied(inputs)
            other = self._results(self.model([*aside]), aside)
        restore()
        outputs = run_call([*inputs])
        results = self._results(outputs, inputs)
        if other is not None:
            self.varying |= OrderedSet(i for i, (a, b) in enumerate(zip(results, other)) if not _are_identical(a, b))
        pairs = enumerate(zip(replayed, results))
        if all(_are_identical(a, b) or (i in self.varying and _are_close(a, b)) for i, (a, b) in pairs):
            kept.launches.note_proof()
        else:
            self.unequal.add(kept.launches.row)
        return outputs

    def _copied(self, inputs: Sequence[InputType]) -> list[InputType]:
        """Return the inputs for a run beside the call. Inputs that the function overwrites are copies."""
        written = OrderedSet([*self.spec.mutated_input_idxs, *self.spec.reused_input_idxs])
        return [SavedInput(t).like(t) if i in written else t for i, t in enumerate(inputs)]  # type: ignore[arg-type]

    def _results(self, outputs: OutputType, inputs: Sequence[InputType]) -> list[Any]:
        return [*outputs, *(inputs[i] for i in self.spec.mutated_input_idxs)]

    def prove_whole(
        self, recording: SizedRecording, kept: KeptSizes, inputs: list[InputType], rehearsal: Rehearsal
    ) -> OutputType | None:
        """
        Replay a recording and compare it with an uncaptured run. Return None if the inputs cannot be bound. Raises
        RefusedError: they differ, and the inputs are as they were.
        """
        # Forget the damage of others.
        take_damage(self.spec.device_index)
        if (tensors := recording.bind(inputs, kept, again=True)) is None:
            return None
        for t in tensors[len(recording.model.inputs) :]:
            # So that it shows what the graph does not write.
            mark_unwritten(t)
        try:
            outputs = recording.launch(inputs, kept, tensors)
            verdict = verify(rehearsal, kept.launches.on.graph.replay, outputs)
            failure = verdict.reason
            if failure is not None and verdict.may_vary(self.adds_atomically):
                # Raises RefusedError if the launches differ as well.
                recording.compare(recording.scratch(inputs, kept.at), kept.at)
                failure = None
        except RefusedError as e:
            failure = e.reason
        except RuntimeError as e:
            failure = Reason.of(Code.LAUNCH_FAILED, error=first_line(e))
        if failure is not None:
            rehearsal.restore()
            raise RefusedError(failure)
        self.proven.add(kept.at.sizes)
        self.unequal.discard(kept.launches.row)
        kept.launches.note_proof()
        counters["pygraph"]["proven_sizes"] += 1
        return outputs


def _are_identical(a: Any, b: Any) -> bool:
    """Return whether two outputs are equal bit by bit."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return a is b or a == b
    return a is b or equal_bits(a, b)


def _are_close(a: Any, b: Any) -> bool:
    """Return whether two outputs differ by no more than sums in another order."""
    if not isinstance(a, torch.Tensor) or not a.is_floating_point() or not a.numel():
        return False
    return torch.allclose(a, b, rtol=0, atol=CLOSE * b.abs().max().item(), equal_nan=True)
