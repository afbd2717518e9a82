"""
Gradients of results that a program does not differentiate.

A training program often gets logits beside its loss, and differentiates the loss alone. Autograd then makes zeros for the
gradient of the logits. In each backward it allocates, writes and reads as many bytes as the logits have. UnusedGradients
makes these zeros instead of autograd. All of them share one page of memory, see graph/zeros.py. The backward must neither
write such a gradient nor return its memory: GraphInfo.shared_input_idxs names the inputs with which it does. Their zeros
have memory of their own.
"""

from __future__ import annotations

import logging
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor.pygraph.graph.driver import DriverError
from torch._inductor.pygraph.graph.placeholder import PAGE_BYTES
from torch._inductor.pygraph.graph.zeros import shared_zeros


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._inductor.pygraph.types.partition import GraphInfo

log = logging.getLogger(__name__)

# Autograd makes smaller gradients. They fit into one page anyway.
MIN_BYTES = PAGE_BYTES


def is_large(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and tensor.nbytes >= MIN_BYTES


class UnusedGradients:
    """
    Makes the gradients of results that the program does not differentiate, for all calls of one training graph.

    Args:
        places: among the results, those that have a gradient

    Attributes:
        is_served: whether UnusedGradients makes zeros, because some result of the first call was large. If not, autograd does.
            None before the first call
        like: dtype and device of each of ``places``
        may_share: by index of ``places``, whether the backward takes shared zeros
        last: by index of ``places``, the shared zeros of the last call that took some
    """

    def __init__(self, places: Sequence[int]) -> None:
        self.places = tuple(places)
        self.is_served: bool | None = None
        self.like: list[tuple[torch.dtype, torch.device]] = []
        self.may_share = [False] * len(self.places)
        self.last: list[torch.Tensor | None] = [None] * len(self.places)

    def note(self, ctx: Any, results: Sequence[Any]) -> None:
        """Keep the sizes of one call's results in ``ctx``, its autograd node, and tell autograd to make no zeros."""
        if self.is_served is None:
            of_gradients = [results[i] for i in self.places]
            self.like = [(t.dtype, t.device) for t in of_gradients]
            # In this order: another thread may run a backward.
            self.is_served = any(map(is_large, of_gradients))
        if self.is_served:
            ctx.materialize_grads = False
            ctx.sizes = [results[i].shape for i in self.places]

    def note_backward(self, info: GraphInfo | None) -> None:
        """Learn from the description of the backward which of its gradients may be shared zeros."""
        if info is not None and info.shared_input_idxs is not None:
            # The gradients are the backward's last inputs.
            count = len(self.places)
            self.may_share = [k - count not in info.shared_input_idxs for k in range(count)]

    def filled(self, ctx: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the gradients that autograd passes to the backward, with zeros in the place of each None."""
        if not any(grads[i] is None for i in self.places):
            return grads
        found = [*grads]
        for k, i in enumerate(self.places):
            if found[i] is None:
                found[i] = self._zeros(k, ctx.sizes[k])
        return tuple(found)

    def _zeros(self, k: int, size: torch.Size) -> torch.Tensor:
        last = self.last[k]
        if last is not None and last.shape == size:
            return last
        dtype, device = self.like[k]
        if self.may_share[k] and size.numel() * dtype.itemsize >= MIN_BYTES:
            try:
                found = self.last[k] = shared_zeros(size, dtype, device.index)
                return found
            except (DriverError, ImportError, RuntimeError) as e:
                self.may_share[k] = False
                log.info("zeros for an unused gradient of size %s have memory of their own: %s", tuple(size), e)
        return torch.zeros(size, dtype=dtype, device=device)
