"""An uncaptured run of a function on the inputs that are about to be recorded."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
from torch._inductor import cudagraph_trees
from torch._inductor.pygraph.graph.memory import fill_free, OwnPool
from torch._inductor.pygraph.graph.placeholder import UNWRITTEN
from torch._inductor.pygraph.types.reason import Code, Reason, RefusedError
from torch._inductor.pygraph.verify.fingerprint import mark_unwritten
from torch._inductor.pygraph.verify.proof import Proof
from torch._inductor.pygraph.verify.state import HostGenerators, RngState, SavedInput
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._inductor.cudagraph_utils import ModelType, OutputType
    from torch._inductor.utils import InputType


# Runs that have to give the same bits before a function is taken to be deterministic. The
# order of atomic additions may repeat itself.
RERUNS = 8

# Runs that show how much a function that is not deterministic differs from itself. One run
# may be close by chance: an early sum can make one number the error of all that follow.
OTHER_RUNS = 3

# What free memory is filled with, as int64, to see whether it is read. Floating-point results
# tell the last number from the first. It comes last because the memory may hold indices: the
# second number is in bounds and has told by then, and the device fails for indices that are
# out of bounds.
FILLS = (0, 1, int.from_bytes(bytes([UNWRITTEN]) * 8, "little", signed=True))


class Rehearsal:
    """
    One uncaptured run, and further ones where a question needs them.

    The run gives the proof something to compare with, and the caller the outputs of the call
    should the recording be refused. Afterwards inputs and generators are as they were before.

    Args:
        model: the function
        run: runs the function without collectives, and marks the memory that it allocates
        inspect: called with the outputs of the first run; returns the outputs that lie in
            memory that was not marked
        inputs: of the call
        managed: inputs that an earlier graph of the path left in the pool. The replay
            overwrites them, so that there is no further run after it
        mutated: inputs that the program sees written
        reused: inputs whose memory the code may use again

    Attributes:
        inputs: of the call, None for those that are managed
        needed_bytes: device memory that the run took

    Raises:
        RefusedError: no graph would do what the function does, or ``inspect`` raised it.
    """

    def __init__(
        self,
        model: ModelType,
        run: Callable[[list[InputType]], OutputType],
        inspect: Callable[[OutputType], list[int]],
        inputs: list[InputType],
        *,
        device_index: int,
        managed: OrderedSet[int],
        mutated: Sequence[int],
        reused: OrderedSet[int],
    ) -> None:
        written = OrderedSet(mutated) | OrderedSet(
            i for i in reused if isinstance(inputs[i], torch.Tensor)
        )
        self.model = model
        self.run = run
        self.device_index = device_index
        self.inputs = [None if i in managed else t for i, t in enumerate(inputs)]
        self.mutated = mutated
        self.rng = RngState.save(device_index, inputs)
        self.before = {i: SavedInput(inputs[i]) for i in written}  # type: ignore[arg-type]
        # (outputs, mutated inputs, generators) after the run, if there is no further run
        self.kept: tuple[list[Any], dict[int, SavedInput], RngState] | None = None
        # The mutated inputs before any run.
        self.unchanged = Proof(inputs, [], mutated)
        # Results of further runs, where they had to be made before the recording.
        self.others: list[Proof] = []
        own_pool = OwnPool(device_index)
        host = HostGenerators()
        try:
            # A graph has cuBLAS workspaces of its own.
            with cudagraph_trees.clear_cublas_manager(), own_pool:
                if managed:
                    self.others = self.other_runs(inputs)
                    self._restore(inputs)
                self._first_run(inputs, inspect, keep=bool(managed))
                if not host.equals(HostGenerators()) and self._draws_from(host, inputs):
                    reason = Reason.of(Code.HOST_RANDOM)
                    raise RefusedError(reason, is_capturable=False)
        finally:
            self._restore(inputs)
        self.needed_bytes = own_pool.nbytes
        if self.kept is not None:
            self.before.clear()

    def _restore(self, inputs: Sequence[Any]) -> None:
        self.rng.restore()
        for i, saved in self.before.items():
            saved.restore(inputs[i])

    def _first_run(
        self,
        inputs: list[InputType],
        inspect: Callable[[OutputType], list[int]],
        *,
        keep: bool,
    ) -> None:
        outputs = self.run(list(inputs))
        self.unmarked = inspect(outputs)
        self.proof = Proof(inputs, outputs, self.mutated)
        if not keep:
            return
        # An output in the memory of a managed input must neither be restored with the input
        # nor keep it alive.
        reused = OrderedSet(
            t.untyped_storage().data_ptr()
            for i, t in enumerate(inputs)
            if isinstance(t, torch.Tensor) and self.inputs[i] is None
        )
        self.kept = (
            [
                o.clone()
                if isinstance(o, torch.Tensor)
                and o.untyped_storage().data_ptr() in reused
                else o
                for o in outputs
            ],
            {i: SavedInput(inputs[i]) for i in self.mutated},  # type: ignore[arg-type]
            RngState.save(self.device_index, inputs),
        )

    def _draws_from(self, host: HostGenerators, inputs: list[InputType]) -> bool:
        """
        Return whether the function draws from the host's generators, not another thread.

        The function draws the same numbers in each run. The generators are as before if it
        is the function, else as the other thread left them.
        """
        seen, after = HostGenerators(), []
        for _ in range(2):
            self._restore(inputs)
            host.restore()
            self.run(list(inputs))
            after.append(HostGenerators())
        draws = after[0].equals(after[1]) and not host.equals(after[0])
        (host if draws else seen).restore()
        return draws

    def other_runs(self, inputs: list[InputType]) -> list[Proof]:
        """Return the results of further runs. ``inputs`` are as the last run left them."""
        found = []
        for _ in range(OTHER_RUNS):
            self._restore(inputs)
            outputs = self.run(list(inputs))
            found.append(Proof(inputs, outputs, self.mutated))
            # The next run must not need memory beside these.
            del outputs
        return found

    def rerun(self) -> OutputType:
        """Return the outputs of the call, uncaptured, with its mutations and draws."""
        if self.kept is not None:
            outputs, after, rng = self.kept
            for i, saved in after.items():
                saved.restore(self.inputs[i])
            rng.restore()
            return outputs
        self.restore()
        return self.model(list(self.inputs))

    @property
    def can_rerun(self) -> bool:
        """Whether the function can run again: no managed input has died."""
        return self.kept is None

    def restore(self) -> None:
        """Undo what the function wrote. Called only while no managed input has died."""
        self._restore(self.inputs)

    def writes_any(self, idxs: Sequence[int]) -> bool:
        """
        Return whether the uncaptured function writes one of these outputs.

        Operators allocate them, so that their memory is marked after one run and looked at
        after the next, where that run gets the same memory. Returns False if none does, or
        if there is no further run.
        """
        if not self.can_rerun:
            return False
        before: list[int] = []
        for _ in range(OTHER_RUNS if idxs else 0):
            self.restore()
            outputs = self.run(list(self.inputs))
            found: list[torch.Tensor] = [outputs[i] for i in idxs]  # type: ignore[misc]
            addresses = [t.data_ptr() for t in found]
            if addresses == before:
                result = Proof(self.inputs, outputs, self.mutated, idxs)
                return len(result.unwritten()) < len(idxs)
            before = addresses
            for t in found:
                mark_unwritten(t)
            # The next run must not need memory beside these.
            del outputs, found, t
        return False

    def depend_on_free_memory(self, results: OrderedSet[tuple[str, int]]) -> bool:
        """
        Return whether these results depend on what the function's memory held before.

        An operator may write only a part of what it returns. Called while no managed input
        has died.

        Args:
            results: named as Proof.differing does
        """
        first: Proof | None = None
        found: OrderedSet[tuple[str, int]] = OrderedSet()
        with (
            cudagraph_trees.clear_cublas_manager(),
            OwnPool(self.device_index) as own_pool,
        ):
            # The later runs get the memory that this run takes.
            self.restore()
            self.run(list(self.inputs))
            for word in FILLS:
                fill_free(own_pool.pool, self.device_index, word)
                self.restore()
                result = Proof(self.inputs, self.run(list(self.inputs)), self.mutated)
                first = first or result
                found |= first.differing(result)
        return results <= found

    def repeats_itself(self) -> bool:
        """
        Return whether the function gives the same bits in RERUNS further runs. False if
        there is no further run.
        """
        if not self.can_rerun:
            return False
        for _ in range(RERUNS):
            self.restore()
            # The outputs have no name, so that they are freed before the next run.
            if not self.proof.is_exact(
                Proof(
                    self.inputs,
                    self.run(list(self.inputs)),
                    self.mutated,
                    self.unmarked,
                )
            ):
                return False
        return True
