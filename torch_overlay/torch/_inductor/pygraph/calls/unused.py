"""
Gradients of results that a program does not differentiate.

A model that returns its logits beside its loss is differentiated by the loss alone. Autograd then makes zeros for the
gradient of the logits: as many bytes as the logits have are allocated, written and read in each backward. Here they lie
in one page instead, see graph/zeros.py. That takes a backward that neither writes the gradient nor returns it, which
GraphInfo.shared_input_idxs tells. Other gradients are zeros of their own, as autograd makes them.
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

# A smaller gradient gains less than it takes to look for it.
MIN_BYTES = PAGE_BYTES


def is_large(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and tensor.nbytes >= MIN_BYTES


class UnusedGradients:
    """
    Of the calls of one training graph.

    Args:
        places: among the results, those that have a gradient

    Attributes:
        is_served: whether a result was large enough in the first call, so that this makes the gradients. Else autograd does
    """

    def __init__(self, places: Sequence[int]) -> None:
        self.places = tuple(places)
        self.is_served: bool | None = None
        self.like: list[tuple[torch.dtype, torch.device]] = []
        self.may_share = [False] * len(self.places)
        self.last: list[torch.Tensor | None] = [None] * len(self.places)

    def note(self, ctx: Any, results: Sequence[Any]) -> None:
        """Keep the sizes of the results of one call for its backward."""
        if self.is_served is None:
            of_gradients = [results[i] for i in self.places]
            self.like = [(t.dtype, t.device) for t in of_gradients]
            # In this order: another thread may run a backward.
            self.is_served = any(map(is_large, of_gradients))
        if self.is_served:
            ctx.materialize_grads = False
            ctx.sizes = [results[i].shape for i in self.places]

    def note_backward(self, info: GraphInfo | None) -> None:
        """Let the backward with this description read shared zeros."""
        if info is not None and info.shared_input_idxs is not None:
            # Gradients are its last inputs.
            first = info.num_inputs - len(self.places)
            self.may_share = [first + k not in info.shared_input_idxs for k in range(len(self.places))]

    def filled(self, ctx: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return gradients with zeros for those that autograd did not make."""
        if not self.is_served or not any(grads[i] is None for i in self.places):
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
                log.info("a gradient of %s is zeros of its own: %s", tuple(size), e)
        return torch.zeros(size, dtype=dtype, device=device)
