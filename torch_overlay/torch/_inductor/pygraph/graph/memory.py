"""
What recording takes of the device's memory, and whether it is there.

A program may fill the device, and must not fail because it is recorded. While a graph is
captured, the caching allocator gives back nothing of its cache, and what a capture that
fails had allocated stays with the pool. So the function is rehearsed in a pool of its
own, which shows what it takes, and where that is not free it is not captured.
"""

from __future__ import annotations

import ctypes
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor.pygraph.graph.placeholder import tensor_at


if TYPE_CHECKING:
    from typing_extensions import Self

    from torch.cuda import _POOL_HANDLE


def segments_of(pool: _POOL_HANDLE) -> list[dict[str, Any]]:
    """Those of torch.cuda.memory_snapshot."""
    # It drops a reference to each of its arguments that it never took: an integer that is
    # not kept for ever is freed with the first call, while the pool's handle still has it.
    # Reported with https://github.com/pytorch/pytorch/pull/196366.
    for argument in (*pool, False):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(argument))
    return [
        segment
        for segment in torch.cuda.memory_snapshot(pool, include_traces=False)
        if tuple(segment["segment_pool_id"]) == tuple(pool)
    ]


def room(device_index: int, pool: _POOL_HANDLE | None = None) -> int:
    """
    Bytes that the process can still allocate, in ``pool`` if one is given, once the
    allocator gave back its cache, which this does.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device_index)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device_index))
    free = min(free, allowed - torch.cuda.memory_reserved(device_index))
    of_pool = () if pool is None else segments_of(pool)
    return free + sum(s["total_size"] - s["active_size"] for s in of_pool)


def fill_free(pool: _POOL_HANDLE, device_index: int, word: int) -> None:
    """Writes an int64 to all of a pool's memory that no tensor lies in."""
    for segment in segments_of(pool):
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                like = torch.empty(block["size"] // 8, dtype=torch.int64, device="meta")
                tensor_at(block["address"], like, device_index).fill_(word)


class OwnPool:
    """
    What this thread allocates meanwhile lies in a pool that goes with it.

    Attributes:
        nbytes: what the pool had in the end, and so the most that was needed at a time
    """

    def __init__(self, device_index: int) -> None:
        self.device_index = device_index
        self.pool = torch.cuda.graph_pool_handle()
        self.nbytes = 0

    def __enter__(self) -> Self:
        # The allocator does not do it for a pool.
        torch.cuda.empty_cache()
        torch._C._cuda_beginAllocateCurrentThreadToPool(self.device_index, self.pool)
        return self

    def __exit__(self, *args: object) -> None:
        torch._C._cuda_endAllocateToPool(self.device_index, self.pool)
        try:
            self.nbytes = sum(s["total_size"] for s in segments_of(self.pool))
        finally:
            torch._C._cuda_releasePool(self.device_index, self.pool)
