"""
Proof that a bound graph computes what the uncaptured function does.

Finding parameter words says where inputs are, not that no other place holds them: a
kernel may read pointers from memory, or keep an address in a form that is not a plain
word. So before a recording is used, the function runs once uncaptured on the inputs of
the call, and the graph, captured at poisoned placeholders and moved to the same inputs,
has to reproduce it: outputs, mutated inputs, and no trace on the poisoned page.

Results are compared by fingerprints, of at most 64 KiB a tensor, so that the outputs of
the uncaptured run are gone before the graph is captured.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor.pygraph.graph.placeholder import UNWRITTEN
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


# Each tensor is summed in this many pieces, and what is left over element by element.
CHUNKS = 1024

# Elements that are summed at a time: a sum in a wider dtype converts what it sums first.
MAX_ELEMENTS = 1 << 22

# Where kernels are not deterministic (atomics), the sum over a chunk may differ by this
# fraction of the chunk's L1 norm, and of what a typical element's error adds up to: that an
# element is almost zero, as a sum of others may be, does not make it more exact. NaN, the
# poison, is in no tolerance.
TOLERANCE = {
    torch.float64: 1e-6,
    torch.float32: 1e-3,
    torch.float16: 1e-2,
    torch.bfloat16: 2e-2,
}

# Sums that cancel out, of numbers that were rounded in a narrower dtype before, differ by
# more: by so many times what uncaptured runs differ by where they differ most, if that is
# no more than this fraction of the norm, whatever the dtype. What was not written differs
# by all of it.
OWN_DIFFERENCES = 8
MAX_DIFFERENCE = 0.3
# Of norms, which differ by as much as the errors where there is nothing else.
MAX_NORM_DIFFERENCE = 0.9

# Not int64: sums wrap, weights are odd, and an even number of flipped signs went unseen.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


@dataclasses.dataclass(frozen=True, slots=True)
class Fingerprint:
    """
    Of a tensor's chunks: CHUNKS of one size, and one for each element that is left over.

    bits: int64 [chunks], sums of the elements' bits as integers, each with a weight by its
        place: the indices that a sort gives sum up to the same for any input.
    total: float64 [chunks], sums of the elements; None where dtype has no TOLERANCE.
    signed: float64 [chunks], their sums with some signs changed. Gradients of what was
        normalized sum up to zero, whatever they are.
    norm: float64 [chunks], what TOLERANCE is a fraction of: L1 norms, and the root of the
        number of elements times the median of the chunks' mean magnitudes.
    """

    bits: torch.Tensor
    total: torch.Tensor | None
    signed: torch.Tensor | None
    norm: torch.Tensor | None
    tolerance: float


def _dense(t: torch.Tensor) -> torch.Tensor:
    "The elements of a tensor as one contiguous dimension, without a copy if it is dense."
    t = t.resolve_conj().resolve_neg()
    if torch.is_complex(t):
        t = torch.view_as_real(t)
    if torch.ops.aten.is_non_overlapping_and_dense(t):
        return t.as_strided((t.numel(),), (1,))
    # Of elements at one distance reshape makes a view.
    return t.reshape(-1).contiguous()


def fingerprint(t: torch.Tensor) -> Fingerprint:
    flat = _dense(t.detach())
    body = flat.numel() // CHUNKS * CHUNKS
    pieces = [flat[:body].view(CHUNKS, -1)] if body else []
    if body != flat.numel():
        pieces.append(flat[body:].view(-1, 1))
    if not pieces:
        empty = torch.empty(0, dtype=torch.int64, device=t.device)
        return Fingerprint(empty, None, None, None, 0.0)
    as_bits = _BITS[flat.element_size()]
    # Twice as many where an element is two.
    weights = _weights(2 * pieces[0].shape[1], t.device)
    bits = _sums(
        pieces,
        lambda p: (b := p.view(as_bits).long()).mul_(weights[: b.shape[1]]).sum(1),
    )
    tolerance = TOLERANCE.get(flat.dtype)
    if tolerance is None:
        return Fingerprint(bits, None, None, None, 0.0)
    total = _sums(pieces, lambda p: p.sum(1, dtype=torch.float64))
    signs = weights.sign().to(flat.dtype)
    signed = _sums(
        pieces, lambda p: (p * signs[: p.shape[1]]).sum(1, dtype=torch.float64)
    )
    norm = _sums(
        pieces,
        lambda p: torch.linalg.vector_norm(p, 1, dim=1, dtype=torch.float64),
    )
    counts = torch.cat([norm.new_full((len(p),), p.shape[1]) for p in pieces])
    of_element = (norm / counts)[norm.isfinite()]
    if of_element.numel():
        # The median: a few elements that stand for minus infinity are not typical.
        norm = norm + counts.sqrt() * of_element.median()
    return Fingerprint(bits, total, signed, norm, tolerance)


def _weights(count: int, device: torch.device) -> torch.Tensor:
    "Odd numbers that look random, always the same. As splitmix64 makes them."
    weights = torch.arange(1, count + 1, device=device) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        weights = (weights ^ weights >> shift) * factor
    return weights | 1


def _sums(
    pieces: Sequence[torch.Tensor], sums: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    "Of the rows of each, some at a time."
    return torch.cat(
        [sums(r) for p in pieces for r in p.split(max(1, MAX_ELEMENTS // p.shape[1]))]
    )


def identical(expected: Fingerprint, actual: Fingerprint) -> bool:
    # As bits, since a NaN that the program itself computes is not equal to itself.
    return torch.equal(expected.bits, actual.bits)


def same(expected: Fingerprint, actual: Fingerprint, *others: Fingerprint) -> bool:
    """
    Whether both are results of one function, given what ``others`` it gave.
    """
    if identical(expected, actual):
        return True
    if expected.total is None or expected.norm is None or actual.total is None:
        return False
    if expected.total.shape != actual.total.shape:
        return False
    allowed = expected.tolerance * expected.norm
    result = allowed.isfinite()
    # A sum that cancels out is small beside the norm. So is any other that does, and that of
    # nothing, whose norm is not the same.
    for name, most in (
        ("total", MAX_DIFFERENCE),
        ("signed", MAX_DIFFERENCE),
        ("norm", MAX_NORM_DIFFERENCE),
    ):
        of = operator.attrgetter(name)
        difference = (of(expected) - of(actual)).abs()
        # NaN compares false, so a chunk with NaN in either is not within tolerance.
        within = difference <= allowed
        for other in others:
            own = OWN_DIFFERENCES * (of(expected) - of(other)).abs().max()
            within |= difference <= (most * expected.norm).clamp(max=own)
        result &= within
    return bool(result.all())


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    return _dense(t.detach()).view(torch.uint8)


def mark_unwritten(t: torch.Tensor) -> None:
    """
    Before a run. A function may return memory that it never wrote (``torch.empty``), or
    wrote a part of: what was there before has to be the same for the graph.
    """
    if torch.ops.aten.is_non_overlapping_and_dense(t):
        as_bytes(t).fill_(UNWRITTEN)


def is_unwritten(t: torch.Tensor) -> bool:
    # The first bytes tell, mostly; and comparing takes as much memory as what is compared.
    return all(
        bool((some == UNWRITTEN).all()) for some in as_bytes(t).split(MAX_ELEMENTS)
    )


class Proof:
    """
    What one run of a function gave for the inputs of a call, uncaptured or as a graph.

    Args:
        inputs: the inputs; those at ``mutated`` are fingerprinted after the run
        outputs: what the function returned; what is no CUDA tensor is skipped
        unmarked: of a graph, the outputs whose memory was not marked before the uncaptured run
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
        What may be the generator's seed and offset, which attention returns, and leaves
        uninitialised where it draws nothing.
        """
        return [
            i
            for i, t in self.unmarked.items()
            if t.dim() == 0 and t.dtype in (torch.int64, torch.uint64)
        ]

    def unwritten(self) -> list[int]:
        """
        Of the other outputs that were not marked, those that hold what an output is marked
        with.
        """
        seeds = self.seeds()
        return [
            i for i, t in self.unmarked.items() if i not in seeds and is_unwritten(t)
        ]

    def is_exact(self, actual: Proof) -> bool:
        """Whether another run gave the same to the bit."""
        return next(self._differing(actual, identical), None) is None

    def differing(self, actual: Proof) -> OrderedSet[tuple[str, int]]:
        """
        What another run did not give to the bit: pairs of "output" or "mutated input" and an
        index.
        """
        return OrderedSet(self._differing(actual, identical))

    def failure(self, actual: Proof, others: Sequence[Proof] = ()) -> str | None:
        """
        Why a graph's results do not match, naming the first that differs, or None.

        Args:
            others: what other uncaptured runs gave for the same inputs
        """
        for what, i in self._differing(actual, same, others):
            kind = f" ({actual.kinds[i]})" if what == "output" else ""
            return f"{what} {i}{kind} differs from the uncaptured function's"
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
