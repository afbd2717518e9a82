"""
How much device memory a recording takes, and whether it is free. The caching allocator frees nothing of its cache
during a capture, and a capture that fails leaves its allocations in the pool. So nothing is captured where less is
free.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor.pygraph.graph.binding import is_known, read_host_memory
from torch._inductor.pygraph.graph.placeholder import round_up, storage_extent, tensor_at
from torch._inductor.pygraph.types.reason import Code, Reason, RefusedError
from torch.multiprocessing.reductions import StorageWeakRef


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Self

    from torch.cuda import _POOL_HANDLE


def segments_of(pool: _POOL_HANDLE) -> list[dict[str, Any]]:
    """Return the segments of a pool, as torch.cuda.memory_snapshot describes them."""
    # memory_snapshot drops a reference to each of its arguments that it never took.
    for argument in (*pool, False):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(argument))
    return [
        segment
        for segment in torch.cuda.memory_snapshot(pool, include_traces=False)
        if tuple(segment["segment_pool_id"]) == tuple(pool)
    ]


def allocated_in(pool: _POOL_HANDLE) -> set[tuple[int, int]]:
    """Return where allocations of a pool lie."""
    return {
        (block["address"], block["address"] + block["requested_size"])
        for segment in segments_of(pool)
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


def lies_within(bounds: Sequence[int], address: int) -> bool:
    """Return whether an address lies in a range. ``bounds``: starts and ends, ascending."""
    return bisect.bisect_right(bounds, address) % 2 == 1


class PoolRanges:
    """The address ranges of the segments of memory pools."""

    def __init__(self, *pools: _POOL_HANDLE) -> None:
        segments = sorted((s["address"], s["total_size"]) for pool in pools for s in segments_of(pool))
        self.bounds = [bound for start, n in segments for bound in (start, start + n)]

    def __contains__(self, address: int) -> bool:
        return lies_within(self.bounds, address)

    def find(self, address: int) -> tuple[int, int] | None:
        """Return the segment that an address lies in, or None."""
        i = bisect.bisect_right(self.bounds, address)
        return (self.bounds[i - 1], self.bounds[i]) if i % 2 else None


def is_pageable(address: int) -> bool:
    """Return whether an address is of memory of the host that CUDA does not know."""
    if is_known(address):
        return False
    try:
        read_host_memory(address, 1)
    except (RefusedError, OverflowError):
        return False
    return True


def reservable(device_index: int) -> int:
    """Return how many bytes the process can still reserve."""
    free, total = torch.cuda.mem_get_info(device_index)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device_index))
    return min(free, allowed - torch.cuda.memory_reserved(device_index))


def room(device_index: int, pool: _POOL_HANDLE | None = None) -> int:
    """Free the allocator's cache. Return how many bytes the process can still allocate, in ``pool`` too."""
    torch.cuda.empty_cache()
    free = reservable(device_index)
    of_pool = () if pool is None else segments_of(pool)
    return free + sum(s["total_size"] - s["active_size"] for s in of_pool)


@contextlib.contextmanager
def without_growth(device_index: int) -> Iterator[None]:
    """A context that frees the allocator's cache on exit if more memory is reserved than on entry."""
    reserved = torch.cuda.memory_reserved(device_index)
    yield
    # A workspace of cuBLAS would keep the whole segment that it lies in.
    torch._C._cuda_clearCublasWorkspaces()
    if torch.cuda.memory_reserved(device_index) > reserved:
        torch.cuda.empty_cache()


def lack_of_memory(needed: int, device_index: int, pool: _POOL_HANDLE) -> Reason | None:
    """Return why there are not so many bytes, or None."""
    if (free := room(device_index, pool)) >= needed:
        return None
    return Reason.of(Code.OUT_OF_MEMORY, needed_mib=needed >> 20, free_mib=free >> 20)


def zero_free(pool: _POOL_HANDLE, device_index: int) -> None:
    """Zero all of a pool's memory that no tensor lies in."""
    for segment in segments_of(pool):
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                like = torch.empty(block["size"], dtype=torch.uint8, device="meta")
                tensor_at(block["address"], like, device_index).fill_(0)


# The allocator keeps tensors of fewer bytes in segments of their own, which FreeMemory leaves alone.
MIN_LENT_BYTES = 1 << 20
# The allocator's addresses are multiples of so many bytes.
LENT_ALIGNMENT = 512


class FreeMemory:
    """
    Unused memory of a graphs' pool. A rehearsal puts tensors there, so that it needs no further segments beside the
    pool. The graph that is captured next will use the same memory.

    Attributes:
        nbytes: the largest sum of bytes that tensors took at a time
        addresses: where tensors were put
    """

    def __init__(self, pool: _POOL_HANDLE, device_index: int) -> None:
        self.device_index = device_index
        self.blocks: list[tuple[int, int]] = sorted(
            (block["address"], block["size"])
            for segment in segments_of(pool)
            for block in segment["blocks"]
            if block["state"] == "inactive" and block["size"] >= MIN_LENT_BYTES
        )
        self.largest = max((nbytes for _, nbytes in self.blocks), default=0)
        self.nbytes = 0
        self.addresses: set[int] = set()
        # (address, bytes) by storage
        self.lent: dict[StorageWeakRef, tuple[int, int]] = {}

    def _gaps(self) -> Iterator[tuple[int, int]]:
        """Yield the size in bytes and the address of each range that no tensor was put into."""
        self.lent = {ref: lent for ref, lent in self.lent.items() if not ref.expired()}
        taken = iter(sorted(self.lent.values()))
        lent = next(taken, None)
        for address, nbytes in self.blocks:
            end = address + nbytes
            while lent is not None and lent[0] < end:
                start, length = lent
                yield start - address, address
                address = start + length
                lent = next(taken, None)
            yield end - address, address

    def lend(self, like: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor in the smallest range that holds it, or None. The range is free again once the storage is gone."""
        nbytes = round_up(storage_extent(like), LENT_ALIGNMENT)
        if not MIN_LENT_BYTES <= nbytes <= self.largest:
            return None
        gap = min((gap for gap in self._gaps() if gap[0] >= nbytes), default=None)
        if gap is None:
            return None
        _, address = gap
        t = tensor_at(address, like, self.device_index)
        self.lent[StorageWeakRef(t.untyped_storage())] = address, nbytes
        self.addresses.add(address)
        self.nbytes = max(self.nbytes, sum(length for _, length in self.lent.values()))
        return t


class OwnPool:
    """A context in which this thread allocates in a pool that is released at the end, with ``nbytes`` then."""

    def __init__(self, device_index: int) -> None:
        self.device_index = device_index
        self.pool = torch.cuda.graph_pool_handle()
        self.nbytes = 0

    def __enter__(self) -> Self:
        # The allocator does not free its cache for a pool.
        torch.cuda.empty_cache()
        self._begin()
        return self

    def _begin(self) -> None:
        torch._C._cuda_beginAllocateCurrentThreadToPool(self.device_index, self.pool)

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """A context in which this thread allocates as it did before."""
        torch._C._cuda_endAllocateToPool(self.device_index, self.pool)
        try:
            yield
        finally:
            self._begin()
            # Each time that it begins counts as a use of the pool.
            torch._C._cuda_releasePool(self.device_index, self.pool)

    def __exit__(self, *args: object) -> None:
        torch._C._cuda_endAllocateToPool(self.device_index, self.pool)
        try:
            self.nbytes = sum(s["total_size"] for s in segments_of(self.pool))
        finally:
            torch._C._cuda_releasePool(self.device_index, self.pool)
            # Nothing else may use the pool's memory until it is freed.
            torch.cuda.empty_cache()
