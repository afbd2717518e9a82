"""State that a run of a function changes, saved so that the function can run again."""

from __future__ import annotations

import dataclasses
import pickle
import random
import sys
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor.pygraph.graph.placeholder import storage_extent


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def write(t: torch.Tensor, values: torch.Tensor) -> None:
    # A tensor that was made in inference mode can only be written there, but compiled code
    # writes it anywhere. The version counter is the program's, so that it stays.
    with torch.inference_mode():
        t.data.copy_(values)


class SavedInput:
    """
    A copy of the memory of an input, from its first element to its last.

    It is saved as memory because an expanded or overlapping tensor cannot be written as a
    tensor.
    """

    def __init__(self, t: torch.Tensor) -> None:
        self.memory = self._memory(t).clone()

    @staticmethod
    def _memory(t: torch.Tensor) -> torch.Tensor:
        return t.as_strided((storage_extent(t) // t.element_size(),), (1,))

    def restore(self, t: torch.Tensor) -> None:
        write(self._memory(t), self.memory)


@dataclasses.dataclass(frozen=True)
class RngState:
    """States of the device's generators that a function may draw from."""

    generators: list[torch.Generator]
    states: list[torch.Tensor]

    @classmethod
    def save(cls, device_index: int, inputs: Sequence[Any]) -> RngState:
        generators = [torch.cuda.default_generators[device_index]]
        generators += [g for g in inputs if isinstance(g, torch.Generator)]
        return cls(generators, [g.get_state() for g in generators])

    def restore(self) -> None:
        for generator, state in zip(self.generators, self.states):
            generator.set_state(state)


class HostGenerators:
    """
    States of the host's generators that a function may draw from.

    An operator may draw its seed on the host. A graph would replay the seed that was drawn
    while it was captured.
    """

    def __init__(self) -> None:
        state = torch.get_rng_state()
        # (setter, state, what states are compared by)
        states: list[tuple[Callable[[Any], object], Any, object]] = [
            (torch.set_rng_state, state, state.tolist()),
            (random.setstate, state := random.getstate(), state),
        ]
        if (numpy := sys.modules.get("numpy.random")) is not None:
            # legacy=False: the program may have set another bit generator.
            state = numpy.get_state(legacy=False)
            states.append((numpy.set_state, state, pickle.dumps(state)))
        self.states = states

    def equals(self, other: HostGenerators) -> bool:
        return [key for *_, key in self.states] == [key for *_, key in other.states]

    def restore(self) -> None:
        for set_state, state, _ in self.states:
            set_state(state)
