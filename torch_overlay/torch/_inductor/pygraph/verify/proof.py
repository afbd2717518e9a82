"""
Proof that a graph computes what the uncaptured function does. The graph, which was captured at poisoned placeholders
and moved to the inputs of the call, has to reproduce the rehearsal: outputs, mutated inputs, and no trace on the
poisoned pages. Runs are compared by fingerprints of at most 64 KiB a tensor, so that outputs can be freed before the
capture. Fingerprints wait on the host: on the device they would lie in the segments that outputs are freed from.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch._inductor.pygraph.graph.placeholder import UNWRITTEN
from torch._inductor.pygraph.types.reason import Code, Reason
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


# Each tensor is summed in this many pieces. The elements left over are pieces of their own.
CHUNKS = 1024

# Elements that are summed at a time. A sum in a wider dtype converts its operand first.
MAX_ELEMENTS = 1 << 22

# Sums that wait on the device until they are copied to the host.
MAX_SUMS = 1 << 18

# Comparing takes as much memory as it compares.
MAX_BYTES_COMPARED = 1 << 24

# Kernels with atomics are not deterministic. The sum over a chunk may differ by this fraction of the norm.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 2e-2}

# Sums that cancel out differ by more. The graph may then differ by OWN_DIFFERENCES times the largest difference between
# uncaptured runs, and by at most MAX_DIFFERENCE of the norm. Memory that the graph does not write differs by all of it.
OWN_DIFFERENCES = 8
MAX_DIFFERENCE = {"total": 0.3, "signed": 0.3, "norm": 0.9}

# Integer dtypes by element size. Not int64 for 8 bytes: sums wrap and weights are odd, so
# that an even number of flipped signs would not be seen.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """
    Sums over the chunks of a tensor: CHUNKS of one size, and one for each element left over. They are on the host.

    Attributes:
        bits: int64 [chunks], weighted sums of the elements' bits as integers. The weight depends on the place: the
            indices that a sort returns have the same plain sum for any input.
        values: float64 [3, chunks]: sums of the elements, with some signs flipped, and of their magnitudes. None if the
            dtype has no TOLERANCE
        counts: (chunks, elements in each) for each size of chunks
        tolerance: of the dtype
    """

    bits: torch.Tensor
    values: torch.Tensor | None = None
    counts: Sequence[tuple[int, int]] = ()
    tolerance: float = 0.0

    @functools.cached_property
    def sums(self) -> dict[str, torch.Tensor]:
        """
        What is compared if bits differ, float64 [chunks] each. total: sums of the elements. signed: sums with some signs
        flipped. The gradient of a normalization always has the plain sum zero. norm: the L1 norm plus sqrt(number of
        elements) times the median of the chunks' mean magnitudes, the error of a typical element. The median, since a mask may
        hold a few elements that stand for minus infinity.
        """
        if self.values is None:
            return {}
        total, signed, norm = self.values
        counts = torch.cat([norm.new_full((chunks,), n) for chunks, n in self.counts])
        of_element = (norm / counts)[norm.isfinite()]
        if of_element.numel():
            norm = norm + counts.sqrt() * of_element.median()
        return {"total": total, "signed": signed, "norm": norm}


def _dense(t: torch.Tensor) -> torch.Tensor:
    """Return the elements as one contiguous dimension, without a copy if they are dense."""
    t = t.resolve_conj().resolve_neg()
    if torch.is_complex(t):
        t = torch.view_as_real(t)
    if torch.ops.aten.is_non_overlapping_and_dense(t):
        return t.as_strided((t.numel(),), (1,))
    # reshape returns a view if the elements are at one distance.
    return t.reshape(-1).contiguous()


def fingerprints(tensors: Sequence[torch.Tensor]) -> list[Fingerprint]:
    """Return the fingerprint of each tensor. The sums of many tensors of a device are copied to the host at a time."""
    found: list[Fingerprint] = []
    weights = _Weights()
    for _, of_device in itertools.groupby(tensors, lambda t: t.device):
        waiting: list[_Sums] = []
        count = 0
        for t in of_device:
            waiting.append(sums := _Sums.of(t, weights))
            count += sums.count
            if count > MAX_SUMS:
                found += _on_host(waiting)
                waiting, count = [], 0
        found += _on_host(waiting)
    return found


class _Weights:
    """Weights and their signs, which most tensors share with others."""

    def __init__(self) -> None:
        # By number and device, and by dtype as well.
        self.weights: dict[tuple[int, torch.device], torch.Tensor] = {}
        self.signs: dict[tuple[int, torch.device, torch.dtype], torch.Tensor] = {}

    def of(self, count: int, device: torch.device) -> torch.Tensor:
        if (count, device) not in self.weights:
            self.weights[count, device] = _weights(count, device)
        return self.weights[count, device]

    def signs_of(self, count: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        if (count, device, dtype) not in self.signs:
            self.signs[count, device, dtype] = self.of(count, device).sign().to(dtype)
        return self.signs[count, device, dtype]


class _Sums(NamedTuple):
    """
    The sums of one tensor's fingerprint, while they are on the device.

    Attributes:
        sums: int64, each the sums of some rows. First those of the bits of all pieces. Then the bits of float64 sums, if the
            dtype has a TOLERANCE: of the elements, of the elements with signs, and of their magnitudes
        counts: (chunks, elements in each) of each piece
        tolerance: None if the dtype has no TOLERANCE
    """

    sums: list[torch.Tensor]
    counts: list[tuple[int, int]]
    tolerance: float | None

    @property
    def count(self) -> int:
        return sum(chunks for chunks, _ in self.counts) * (1 if self.tolerance is None else 4)

    @classmethod
    def of(cls, t: torch.Tensor, weights: _Weights) -> _Sums:
        flat = _dense(t.detach())
        body = flat.numel() // CHUNKS * CHUNKS
        pieces = [flat[:body].view(CHUNKS, -1)] if body else []
        if body != flat.numel():
            pieces.append(flat[body:].view(-1, 1))
        tolerance = TOLERANCE.get(flat.dtype)
        if not pieces:
            return cls([], [], None)
        as_bits = _BITS[flat.element_size()]
        # An 8-byte element is two int32.
        key = 2 * pieces[0].shape[1], t.device
        # For some rows at a time.
        rows = [r for p in pieces for r in p.split(max(1, MAX_ELEMENTS // p.shape[1]))]
        found = [_weighted(r.view(as_bits), weights.of(*key)) for r in rows]
        if tolerance is not None:
            signs = weights.signs_of(*key, flat.dtype)
            found += [r.sum(1, dtype=torch.float64) for r in rows]
            found += [(r * signs[: r.shape[1]]).sum(1, dtype=torch.float64) for r in rows]
            found += [torch.linalg.vector_norm(r, 1, dim=1, dtype=torch.float64) for r in rows]
        return cls([sums.view(torch.int64) for sums in found], [(*p.shape,) for p in pieces], tolerance)

    def fingerprint(self, values: torch.Tensor) -> Fingerprint:
        """``values``: the sums, on the host."""
        if self.tolerance is None:
            return Fingerprint(values)
        bits, floats = values.tensor_split([len(values) // 4])
        return Fingerprint(bits, floats.view(torch.float64).view(3, -1), self.counts, self.tolerance)


def _on_host(found: Sequence[_Sums]) -> list[Fingerprint]:
    rows = [row for sums in found for row in sums.sums]
    # One copy to the host, where they wait.
    values = torch.cat(rows).cpu() if rows else torch.empty(0, dtype=torch.int64, device="cpu")
    parts = values.split([sums.count for sums in found])
    return [sums.fingerprint(part) for sums, part in zip(found, parts)]


def _weighted(bits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    bits = bits.long()
    return bits.mul_(weights[: bits.shape[1]]).sum(1)


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Return odd int64 numbers that look random and are always the same (splitmix64)."""
    weights = torch.arange(1, count + 1, device=device) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        weights = (weights ^ weights >> shift) * factor
    return weights | 1


def identical(expected: Fingerprint, actual: Fingerprint) -> bool:
    # The program may compute NaN, which equals itself only as bits.
    return torch.equal(expected.bits, actual.bits)


def same(expected: Fingerprint, actual: Fingerprint, *others: Fingerprint, by_norm: bool = True) -> bool:
    """
    Return whether both can be results of one function. ``others`` are results of further runs, which show how much it varies
    by itself. With ``by_norm``, results may differ by a part of their norm at most. A sum that cancels out has a norm that is
    no larger than its rounding.
    """
    if identical(expected, actual):
        return True
    if not expected.sums or not actual.sums or expected.bits.shape != actual.bits.shape:
        return False
    norm = expected.sums["norm"]
    allowed = expected.tolerance * norm
    result = allowed.isfinite()
    # The signed sum and the norm tell a sum that cancels out from the sum of unwritten memory.
    for name, most in MAX_DIFFERENCE.items():
        difference = (expected.sums[name] - actual.sums[name]).abs()
        # NaN compares false, so a chunk with NaN in either is not within tolerance.
        within = difference <= allowed
        for other in others:
            own = OWN_DIFFERENCES * (expected.sums[name] - other.sums[name]).abs().max()
            within |= difference <= ((most * norm).clamp(max=own) if by_norm else own)
        result &= within
    return bool(result.all())


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    # With a version counter of its own: writing the bytes is no change that the program made.
    return _dense(t.data).view(torch.uint8)


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of one layout, both of which are there, hold the same bits."""
    pieces = (as_bytes(t).split(MAX_BYTES_COMPARED) for t in (a, b))
    return a.shape == b.shape and a.dtype == b.dtype and all(map(torch.equal, *pieces))


def mark_unwritten(t: torch.Tensor) -> None:
    """Fill a tensor's memory with UNWRITTEN before a run: a function may return memory that it did not write."""
    if torch.ops.aten.is_non_overlapping_and_dense(t):
        as_bytes(t).fill_(UNWRITTEN)


def is_on_device(output: Any) -> bool:
    return isinstance(output, torch.Tensor) and output.is_cuda


def is_unwritten(t: torch.Tensor) -> bool:
    # In pieces: comparing takes as much memory as it compares, and the first piece mostly tells.
    return all(bool((some == UNWRITTEN).all()) for some in as_bytes(t).split(MAX_ELEMENTS))


class Proof:
    """
    Fingerprints of the results of one run, uncaptured or as a graph.

    Args:
        inputs: the inputs of the call; those at ``mutated`` are fingerprinted
        outputs: what the function returned; only CUDA tensors are fingerprinted
        unmarked: outputs of a graph whose memory was not marked before the uncaptured run
        has_seeds: whether some of these may be an attention's, which are not compared
    """

    def __init__(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        mutated: Sequence[int],
        unmarked: Sequence[int] = (),
        *,
        has_seeds: bool = True,
    ) -> None:
        self.mutated = list(mutated)
        self.has_seeds = has_seeds
        self.unmarked = {i: outputs[i] for i in unmarked}
        self.kinds = [f"{o.dtype} {list(o.shape)}" if isinstance(o, torch.Tensor) else "" for o in outputs]
        on_device = [i for i, o in enumerate(outputs) if is_on_device(o)]
        found = fingerprints([*(outputs[i] for i in on_device), *(inputs[i] for i in self.mutated)])
        of_outputs = dict(zip(on_device, found))
        self.outputs = [of_outputs.get(i) for i in range(len(outputs))]
        self.inputs = found[len(on_device) :]

    def seeds(self) -> list[int]:
        """Return the unmarked outputs that may be an attention's seed or offset, which it may leave unwritten."""
        scalars = [i for i, t in self.unmarked.items() if t.dim() == 0 and t.dtype in (torch.int64, torch.uint64)]
        return scalars if self.has_seeds else []

    def unwritten(self) -> list[int]:
        """Return the other unmarked outputs that the run did not write."""
        seeds = self.seeds()
        return [i for i, t in self.unmarked.items() if i not in seeds and is_unwritten(t)]

    def is_exact(self, actual: Proof) -> bool:
        """Return whether another run gave the same bits."""
        return next(self._differing(actual, identical), None) is None

    def differing(self, actual: Proof) -> OrderedSet[tuple[str, int]]:
        """Return which results differ in their bits: ("output" or "mutated input", index)."""
        return OrderedSet(self._differing(actual, identical))

    def not_alike(
        self, actual: Proof, others: Sequence[Proof] = (), *, by_norm: bool = True
    ) -> OrderedSet[tuple[str, int]]:
        """Return which results are not close, as ``differing`` does. See ``same``."""
        return OrderedSet(self._differing(actual, functools.partial(same, by_norm=by_norm), others))

    def failure(self, actual: Proof, others: Sequence[Proof] = ()) -> Reason | None:
        """Return why a graph's results do not match, or None. ``others`` are of further uncaptured runs."""
        for what, i in self.not_alike(actual, others):
            kind = f" ({actual.kinds[i]})" if what == "output" else ""
            return Reason.of(Code.DIFFERS, result=f"{what} {i}{kind}")
        return None

    def _differing(
        self, actual: Proof, matches: Callable[..., bool], others: Sequence[Proof] = ()
    ) -> Iterator[tuple[str, int]]:
        skipped = [*actual.seeds(), *actual.unwritten()]
        for i, expected in enumerate(self.outputs):
            if expected is None or i in skipped:
                continue
            if not matches(expected, actual.outputs[i], *(other.outputs[i] for other in others)):
                yield "output", i
        for k, i in enumerate(self.mutated):
            if not matches(self.inputs[k], actual.inputs[k], *(other.inputs[k] for other in others)):
                yield "mutated input", i
