"""An uncaptured run of a function on the inputs of a recording, and the state that it changes, to run it again."""

from __future__ import annotations

import pickle
import random
import sys
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor import cudagraph_trees
from torch._inductor.pygraph.graph.memory import OwnPool
from torch._inductor.pygraph.graph.placeholder import storage_extent
from torch._inductor.pygraph.types.reason import Code, Reason, RefusedError
from torch._inductor.pygraph.verify.kept import apart, KeptOutputs, MAX_BYTES
from torch._inductor.pygraph.verify.proof import mark_unwritten, Proof
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch._inductor.cudagraph_utils import ModelType, OutputType
    from torch._inductor.pygraph.graph.memory import FreeMemory
    from torch._inductor.utils import InputType


# Runs that have to give the same bits before a function is taken to be deterministic.
RERUNS = 8

# Runs that show how much a function that is not deterministic differs from itself. One may be close by chance.
OTHER_RUNS = 3


def write(t: torch.Tensor, values: torch.Tensor) -> None:
    # A tensor that was made in inference mode can only be written there. The version counter, the program's, stays.
    with torch.inference_mode():
        t.data.copy_(values)


class SavedInput:
    """A copy of an input's memory. An expanded or overlapping tensor cannot be written as a tensor."""

    def __init__(self, t: torch.Tensor, *, on_host: bool = False) -> None:
        memory = self._memory(t)
        self.memory = memory.to("cpu", copy=True) if on_host else memory.clone()

    @staticmethod
    def _memory(t: torch.Tensor) -> torch.Tensor:
        return t.as_strided((storage_extent(t) // t.element_size(),), (1,))

    def like(self, t: torch.Tensor) -> torch.Tensor:
        """Return the copy as a tensor with the input's size and stride."""
        return self.memory.as_strided(t.shape, t.stride())

    def restore(self, t: torch.Tensor) -> None:
        write(self._memory(t), self.memory)


def save_inputs(inputs: Sequence[Any], idxs: Collection[int]) -> dict[int, SavedInput]:
    """
    Return copies of inputs: on the host, since the program may fill the device with these inputs, or on the device if the
    copies take more than MAX_BYTES.
    """
    on_host = sum(storage_extent(inputs[i]) for i in idxs) <= MAX_BYTES
    return {i: SavedInput(inputs[i], on_host=on_host) for i in idxs}


class RngState:
    """States of the device's generators that a function may draw from."""

    def __init__(self, device_index: int, inputs: Sequence[Any]) -> None:
        generators = [torch.cuda.default_generators[device_index]]
        generators += [g for g in inputs if isinstance(g, torch.Generator)]
        # (setter, state, ...)
        self.states: list[tuple[Any, ...]] = [(g.set_state, g.get_state()) for g in generators]

    def restore(self) -> None:
        for set_state, state, *_ in self.states:
            set_state(state)


class HostGenerators(RngState):
    """States of the host's generators. A graph would replay the seed that an operator drew during capture."""

    def __init__(self) -> None:
        state = torch.get_rng_state()
        # (setter, state, what states are compared by)
        self.states = [
            (torch.set_rng_state, state, state.tolist()),
            (random.setstate, state := random.getstate(), state),
        ]
        if (numpy := sys.modules.get("numpy.random")) is not None:
            # legacy=False: the program may have set another bit generator.
            state = numpy.get_state(legacy=False)
            self.states.append((numpy.set_state, state, pickle.dumps(state)))

    def equals(self, other: HostGenerators) -> bool:
        return [key for *_, key in self.states] == [key for *_, key in other.states]


class Rehearsal:
    """
    One uncaptured run, and further ones where a question needs them. Afterwards inputs and generators are as before.

    Args:
        run: runs the function without collectives, and marks the memory that it allocates
        inspect: called with the outputs of the first run; returns those that lie in memory that was not marked
        managed: inputs that an earlier graph of the path left in the pool. No further run comes after the replay
        mutated: inputs that the program sees written
        reused: inputs whose memory the code may use again
        free: memory of the graphs' pool that ``run`` may use, if there are managed inputs. No later run uses it
        runs_again: with managed inputs, runs in front of the first one show how much the function varies

    Attributes:
        inputs: of the call, None for those that are managed

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
        free: FreeMemory | None = None,
        runs_again: bool = False,
    ) -> None:
        written = OrderedSet(mutated) | OrderedSet(i for i in reused if isinstance(inputs[i], torch.Tensor))
        self.model = model
        self.run = run
        self.device_index = device_index
        self.inputs = [None if i in managed else t for i, t in enumerate(inputs)]
        self.mutated = mutated
        self.rng = RngState(device_index, inputs)
        self.before = save_inputs(inputs, written)
        # (outputs, mutated inputs, generators) after the run, if there is no further run
        self.kept: tuple[KeptOutputs, dict[int, SavedInput], RngState] | None = None
        # Results of further runs, where they had to be made before the recording.
        self.others: list[Proof] = []
        own_pool = OwnPool(device_index)
        host = HostGenerators()
        try:
            # A graph has cuBLAS workspaces of its own.
            with cudagraph_trees.clear_cublas_manager(), own_pool:
                if managed and runs_again:
                    self.others = self.other_runs(inputs)
                    self._restore(inputs)
                self._first_run(inputs, inspect, own_pool if managed else None, free)
                if not host.equals(HostGenerators()) and self._draws_from(host, inputs):
                    raise RefusedError(Reason.of(Code.HOST_RANDOM), is_capturable=False)
        finally:
            self._restore(inputs)
        self.needed_bytes = own_pool.nbytes + (free.nbytes if free is not None else 0)
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
        keep_from: OwnPool | None,
        free: FreeMemory | None,
    ) -> None:
        outputs = self.run(list(inputs))
        self.unmarked = inspect(outputs)
        self.proof = Proof(inputs, outputs, self.mutated)
        if keep_from is None:
            return
        # An output in the memory of a managed input must neither be restored with the input nor keep it alive.
        reused = {
            t.untyped_storage().data_ptr()
            for t, kept in zip(inputs, self.inputs)
            if isinstance(t, torch.Tensor) and kept is None
        }
        lent = () if free is None else free.addresses
        self.kept = (
            KeptOutputs(apart(outputs, reused), keep_from, self.device_index, lent),
            save_inputs(inputs, self.mutated),
            RngState(self.device_index, inputs),
        )

    def _draws_from(self, host: HostGenerators, inputs: list[InputType]) -> bool:
        """Return whether the function draws from the host's generators, the same in each run, not another thread."""
        seen, after = HostGenerators(), []
        for _ in range(2):
            self._restore(inputs)
            host.restore()
            self.run(list(inputs))
            after.append(HostGenerators())
        draws = after[0].equals(after[1]) and not host.equals(after[0])
        (host if draws else seen).restore()
        return draws

    def results(self, outputs: Sequence[Any], unmarked: Sequence[int] = (), *, has_seeds: bool = True) -> Proof:
        """Return the fingerprints of a run on ``inputs``, which may have been a graph's."""
        return Proof(self.inputs, outputs, self.mutated, unmarked, has_seeds=has_seeds)

    def _run_again(self, inputs: Sequence[Any], unmarked: Sequence[int] = ()) -> Proof:
        # The outputs have no name, so that they are freed before the next run.
        self._restore(inputs)
        return Proof(inputs, self.run(list(inputs)), self.mutated, unmarked)

    def other_runs(self, inputs: Sequence[Any]) -> list[Proof]:
        """Return the results of further runs. ``inputs`` are as the last run left them."""
        return [self._run_again(inputs) for _ in range(OTHER_RUNS)]

    def rerun(self) -> OutputType:
        """Return the outputs of the call, uncaptured, with its mutations and draws."""
        if self.kept is not None:
            outputs, after, rng = self.kept
            for i, saved in after.items():
                saved.restore(self.inputs[i])
            rng.restore()
            return outputs.on_device()
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
        Return whether the uncaptured function writes one of these outputs, which operators allocate. Their memory is
        marked after one run and looked at after the next, where that run gets the same memory.
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
                return len(self.results(outputs, idxs, has_seeds=False).unwritten()) < len(idxs)
            before = addresses
            for t in found:
                mark_unwritten(t)
            # The next run must not need memory beside these.
            del outputs, found, t
        return False

    def repeats_itself(self) -> bool:
        """Return whether the function gives the same bits in RERUNS further runs. False if there is no further run."""
        return self.can_rerun and all(
            self.proof.is_exact(self._run_again(self.inputs, self.unmarked)) for _ in range(RERUNS)
        )
