"""
Workspaces of a library, whose content no later call reads. cuBLAS has one for a stream, so that all matmuls whose
kernels name it wait for one another. The words among the kernels' parameters are moved to further workspaces, as those
of inputs.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch._inductor.pygraph.schedule.dag import reached


if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch._inductor.pygraph.schedule.dag import Waits
    from torch.cuda import _POOL_HANDLE

# The most workspaces, with the captured one.
MAX_WORKSPACES = 4


def spread(waits: Waits, users: Collection[int], times: Sequence[float], count: int) -> dict[int, int]:
    """
    Return which of ``count`` workspaces each user takes: the one in which it starts first, and of these one whose last
    user it waits for anyway.
    """
    behind = reached(waits)
    ends: list[float] = []
    last: list[int | None] = [None] * count
    found: dict[int, int] = {}
    for i, (mine, time) in enumerate(zip(waits, times, strict=True)):
        start = max((ends[before] for before in mine), default=0.0)
        if i in users:

            def cost(k: int, i: int = i, start: float = start) -> tuple[float, bool]:
                user = last[k]
                return (start, False) if user is None else (max(start, ends[user]), not behind[i] >> user & 1)

            found[i] = k = min(range(count), key=cost)
            start, _ = cost(k)
            last[k] = i
        ends.append(start + time)
    return found


class Ring:
    """Further workspaces. The graphs of a manager share them, because their launches follow one another."""

    def __init__(self, device_index: int) -> None:
        self.device = torch.device("cuda", device_index)
        self.blocks: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def take(self, nbytes: int, count: int, budget: int) -> list[int]:
        """Return the addresses of at most ``count`` workspaces. ``budget``: bytes that all of them may take."""
        found = [block for block in self.blocks if block.nbytes >= nbytes][:count]
        while len(found) < count and self.nbytes + nbytes <= budget:
            try:
                found.append(torch.zeros(nbytes, dtype=torch.uint8, device=self.device))
            except torch.OutOfMemoryError:
                break
            self.blocks.append(found[-1])
        return [block.data_ptr() for block in found]


_rings: weakref.WeakValueDictionary[tuple[int, ...], Ring] = weakref.WeakValueDictionary()


def ring_of(device_index: int, pool: _POOL_HANDLE) -> Ring:
    """Return the workspaces of the manager whose graphs have this pool."""
    key = (device_index, *pool)
    ring = _rings.get(key)
    if ring is None:
        ring = _rings[key] = Ring(device_index)
    return ring
