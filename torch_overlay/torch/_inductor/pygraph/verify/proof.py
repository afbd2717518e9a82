"""
Proof that a graph computes what the uncaptured function does.

A graph's parameter words say where inputs are. They do not say that an address is nowhere
else: a kernel may read pointers from memory, or keep an address in a form that is no plain
word. So before a recording is used, the function runs once uncaptured on the inputs of the
call (rehearsal.py). Then the graph, which was captured at poisoned placeholders and moved to
the same inputs, has to reproduce that run: outputs, mutated inputs, and no trace on the
poisoned pages (diagnose.py).
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
from torch._inductor.pygraph.types.reason import Code, Reason
from torch._inductor.pygraph.verify.fingerprint import (
    Fingerprint,
    fingerprint,
    identical,
    is_unwritten,
    same,
)
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class Proof:
    """
    Fingerprints of the results of one run, uncaptured or as a graph.

    Args:
        inputs: the inputs of the call; those at ``mutated`` are fingerprinted
        outputs: what the function returned; only CUDA tensors are fingerprinted
        unmarked: outputs of a graph whose memory was not marked before the uncaptured run
    """

    def __init__(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        mutated: Sequence[int],
        unmarked: Sequence[int] = (),
    ) -> None:
        self.mutated = list(mutated)
        self.unmarked = {i: outputs[i] for i in unmarked}
        self.kinds = [
            f"{o.dtype} {list(o.shape)}" if isinstance(o, torch.Tensor) else ""
            for o in outputs
        ]
        self.outputs = [self._of_output(o) for o in outputs]
        self.inputs = [fingerprint(inputs[i]) for i in self.mutated]

    @staticmethod
    def _of_output(output: Any) -> Fingerprint | None:
        if not isinstance(output, torch.Tensor) or not output.is_cuda:
            return None
        return fingerprint(output)

    def seeds(self) -> list[int]:
        """
        Return the unmarked outputs that may be a generator's seed or offset.

        Attention returns them, and leaves them uninitialised if it draws nothing.
        """
        return [
            i
            for i, t in self.unmarked.items()
            if t.dim() == 0 and t.dtype in (torch.int64, torch.uint64)
        ]

    def unwritten(self) -> list[int]:
        """Return the other unmarked outputs that the run did not write."""
        seeds = self.seeds()
        return [
            i for i, t in self.unmarked.items() if i not in seeds and is_unwritten(t)
        ]

    def is_exact(self, actual: Proof) -> bool:
        """Return whether another run gave the same bits."""
        return next(self._differing(actual, identical), None) is None

    def differing(self, actual: Proof) -> OrderedSet[tuple[str, int]]:
        """
        Return the results that differ in their bits from another run's: pairs of "output" or
        "mutated input" and an index.
        """
        return OrderedSet(self._differing(actual, identical))

    def failure(self, actual: Proof, others: Sequence[Proof] = ()) -> Reason | None:
        """
        Return why a graph's results do not match, naming the first that differs, or None.

        Args:
            others: of further uncaptured runs on the same inputs
        """
        for what, i in self._differing(actual, same, others):
            kind = f" ({actual.kinds[i]})" if what == "output" else ""
            return Reason.of(Code.DIFFERS, result=f"{what} {i}{kind}")
        return None

    def _differing(
        self,
        actual: Proof,
        matches: Callable[..., bool],
        others: Sequence[Proof] = (),
    ) -> Iterator[tuple[str, int]]:
        skipped = [*actual.seeds(), *actual.unwritten()]
        for i, expected in enumerate(self.outputs):
            if expected is None or i in skipped:
                continue
            known = [other.outputs[i] for other in others]
            if not matches(expected, actual.outputs[i], *known):
                yield "output", i
        for k, i in enumerate(self.mutated):
            known = [other.inputs[k] for other in others]
            if not matches(self.inputs[k], actual.inputs[k], *known):
                yield "mutated input", i
