"""Equality of everything a step leaves behind: outputs, gradients, buffers, inputs."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._dynamo.utils import same
from torch.utils import _pytree as pytree


log = logging.getLogger(__name__)

# An element may be wrong by as much as one of so many root mean squares, however small it is.
RMS_OF_LARGE = 8

# Where gradients are, of all that a step leaves behind.
GRADIENTS = "['grads']"

# A gradient of at most this part of the largest one, both as root mean squares, is taken for the rounding in float32 of a sum
# that cancels out. The gradient of a bias in front of a batch norm is such a sum.
ROUNDING = 2**-20


@dataclass(frozen=True)
class Difference:
    """How a result differs from the reference; ``where`` names what differs most."""

    bitwise: bool = True
    close: bool = True
    max_diff: float = 0.0
    where: str = ""

    def __or__(self, other: Difference) -> Difference:
        worst = max(self, other, key=lambda d: (not d.close, not d.bitwise, d.max_diff))
        return Difference(
            self.bitwise and other.bitwise,
            self.close and other.close,
            max(self.max_diff, other.max_diff),
            worst.where,
        )


def snapshot(tree: Any) -> dict[str, Any]:
    """A copy that later steps cannot overwrite, as the outputs of a graph are."""
    leaves, _ = pytree.tree_flatten_with_path(tree)
    return {
        pytree.keystr(path): leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for path, leaf in leaves
    }


def compare(
    reference: dict[str, Any], result: dict[str, Any], tolerance: float, exact: dict[str, Any] | None = None
) -> Difference:
    """
    Of results that should be equal, or, with ``exact`` (the same in double precision; it
    may be empty), of results of other kernels. Those are close if they are so in the way
    of benchmarks/dynamo: hardly further from exact than the reference or, where that is
    not known, similar.
    """
    if reference.keys() != result.keys():
        missing = sorted(reference.keys() ^ result.keys())
        return Difference(False, False, math.inf, f"only in one: {missing[0]}")
    total = Difference()
    for where, ref in reference.items():
        if exact is None:
            found = _compare_leaf(where, ref, result[where], tolerance)
        else:
            found = _compare_kernels(where, ref, result[where], tolerance, exact.get(where))
        if not found.close and math.isfinite(found.max_diff) and where.startswith(GRADIENTS):
            largest = max(_rms(t) for name, t in reference.items() if name.startswith(GRADIENTS))
            is_rounding = max(_rms(ref), _rms(result[where])) <= ROUNDING * largest
            found = replace(found, close=is_rounding)
        total |= found
    return total


def _rms(t: Any) -> float:
    """Return the root mean square of a tensor's elements, 0 of other objects and of tensors without elements."""
    if not isinstance(t, torch.Tensor) or not t.numel():
        return 0.0
    return t.float().norm().item() / math.sqrt(t.numel())


def _compare_kernels(where: str, ref: Any, res: Any, tolerance: float, exact: Any) -> Difference:
    found = _compare_kind(where, ref, res)
    if found is not None:
        return found
    known = isinstance(exact, torch.Tensor) and exact.dtype == torch.float64 and exact.shape == ref.shape
    close = same(
        ref,
        res,
        exact if known else None,
        # Says nothing of a single value.
        cos_similarity=not known and ref.numel() > 1,
        tol=tolerance,
        equal_nan=True,
        log_error=log.debug,
    )
    return Difference(False, close, (ref - res).abs_().max().item(), where)


def _compare_kind(where: str, ref: Any, res: Any) -> Difference | None:
    """None if values have to be looked at that may be close."""
    if not isinstance(ref, torch.Tensor) or not isinstance(res, torch.Tensor):
        equal = type(ref) is type(res) and ref == res
        return Difference() if equal else Difference(False, False, math.inf, where)
    for attribute in ("dtype", "device", "shape"):
        if getattr(ref, attribute) != getattr(res, attribute):
            return Difference(False, False, math.inf, f"{where}.{attribute}")
    if torch.equal(_bytes(ref), _bytes(res)):
        return Difference()
    if not ref.is_floating_point():
        return Difference(False, False, float((ref != res).sum().item()), where)
    return None


def _compare_leaf(where: str, ref: Any, res: Any, tolerance: float) -> Difference:
    found = _compare_kind(where, ref, res)
    if isinstance(ref, torch.Tensor) and (found is None or found.close) and ref.stride() != res.stride():
        return Difference(False, False, math.inf, f"{where}.stride()")
    if found is not None:
        return found
    ref, res = ref.float(), res.float()
    distance = (ref - res).abs_()
    # Absolute tolerances say little about gradients, which can be small throughout.
    norm = ref.norm().item()
    relative = distance.norm().item() / norm if norm else math.inf
    # Nor about one that is almost zero among large ones: it is a sum of such that cancel out,
    # and kernels that were tuned apart may add in another order.
    rms = norm / math.sqrt(ref.numel())
    close = relative <= tolerance and torch.allclose(
        ref, res, rtol=tolerance, atol=tolerance * max(1.0, RMS_OF_LARGE * rms), equal_nan=True
    )
    return Difference(False, close, distance.max().item(), where)


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(-1).view(torch.uint8)
