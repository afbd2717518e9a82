"""
Addresses to capture external inputs and outputs at, which belong to nothing else in the process: a range of virtual
addresses is reserved, and each of its 2 MiB pages is mapped to the same physical page. The page is poisoned; see
proof.py.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import itertools
import threading
from typing import TYPE_CHECKING

import torch
from torch._inductor.pygraph.graph.driver import bindings, check


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


# The granularity of cuMemCreate and cuMemMap on every device that has them.
PAGE_BYTES = 2 << 20

# Kernels are handed addresses one past a tensor's end, or, for padded convolutions, before its start.
GUARD_BYTES = PAGE_BYTES

# Where to reserve, if the driver lets us choose. Few bits of a small address tell it from another parameter.
ADDRESS_HINT = 0x5A3C_9600_0000

# The byte that fills the pages. Floating-point inputs are NaN in every dtype. Integers may be indices, so they have to
# stay in bounds. An output has the value of what nothing wrote.
NAN, ZERO, UNWRITTEN = POISONS = 0xFF, 0, 0xA5

# What inputs hold instead, to see whether it is read, as int64. In every floating-point dtype of two bytes and more it is a
# finite number that is not zero. Integers may be indices: they hold zero and one.
OTHER_WORDS = {NAN: 0x3F80_3F80_3F80_3F80, ZERO: 1}

# Vendor libraries pick kernels by the alignment they see, up to this (cublasLt).
MAX_ALIGNMENT = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Placeholder:
    """The range [start, end) belongs to one tensor whose first element is at address."""

    start: int
    end: int
    address: int


def round_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


class PlaceholderArena:
    """The placeholders of one device and one kind of poison. The next recording uses the same addresses again."""

    def __init__(self, device_index: int, poison: int) -> None:
        self.device_index = device_index
        self.poison = poison
        self.page: int | None = None
        self.start = 0
        self.nbytes = 0
        # Each thread has trees of its own, which may record at the same time.
        self.lock = threading.Lock()

    def place(self, requests: Sequence[tuple[int, int]]) -> list[Placeholder]:
        """
        Return one placeholder for each (size, alignment), both in bytes. Each address is a multiple of its alignment
        and of no larger power of two: a kernel chosen by alignment must not need more than replay guarantees.
        """
        spans = [2 * GUARD_BYTES + round_up(nbytes + alignment, PAGE_BYTES) for nbytes, alignment in requests]
        with self.lock:
            self._reserve(sum(spans))
            ends = [*itertools.accumulate(spans, initial=self.start)]
        return [
            Placeholder(start, end, start + GUARD_BYTES + alignment)
            for (start, end), (_, alignment) in zip(itertools.pairwise(ends), requests)
        ]

    def reserve(self, nbytes: int) -> int:
        """Return where a range of at least ``nbytes`` starts. Ranges that were returned before stay."""
        with self.lock:
            self._reserve(nbytes)
            return self.start

    def _reserve(self, nbytes: int) -> None:
        if nbytes <= self.nbytes:
            return
        cu = bindings()
        if self.page is None:
            prop = cu.CUmemAllocationProp()
            prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            prop.location.id = self.device_index
            self.page = check(cu.cuMemCreate(PAGE_BYTES, prop, 0))
        hint = cu.CUdeviceptr(ADDRESS_HINT + (self.poison << 36))
        start = int(check(cu.cuMemAddressReserve(nbytes, 0, hint, 0)))
        for offset in range(0, nbytes, PAGE_BYTES):
            check(cu.cuMemMap(start + offset, PAGE_BYTES, 0, self.page, 0))
        access = cu.CUmemAccessDesc()
        access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.device_index
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        check(cu.cuMemSetAccess(start, nbytes, [access], 1))
        self.start, self.nbytes = start, nbytes
        self._page_bytes().fill_(self.poison)

    def _page_bytes(self) -> torch.Tensor:
        like = torch.empty(PAGE_BYTES, dtype=torch.uint8, device="meta")
        return tensor_at(self.start, like, self.device_index)

    def take_damage(self) -> bool:
        """Return whether the page was written since it was last poisoned; poison it again."""
        if not self.nbytes:
            return False
        page = self._page_bytes()
        # No temporary: a segment of the caching allocator would stay behind.
        low, high = page.aminmax()
        damaged = not low.item() == high.item() == self.poison
        if damaged:
            page.fill_(self.poison)
        return damaged


    def fill(self, word: int) -> None:
        """Write an int64 to all of the page."""
        if self.nbytes:
            self._page_bytes().view(torch.int64).fill_(word)


@functools.cache
def arena(device_index: int, poison: int) -> PlaceholderArena:
    return PlaceholderArena(device_index, poison)


def take_damage(device_index: int) -> bool:
    """Return whether a placeholder of a device was written since this was last asked."""
    return sum(arena(device_index, poison).take_damage() for poison in POISONS) > 0


@contextlib.contextmanager
def other_values(device_index: int) -> Iterator[None]:
    """A context in which the placeholders of inputs hold other values: OTHER_WORDS."""
    for poison, word in OTHER_WORDS.items():
        arena(device_index, poison).fill(word)
    yield
    for poison in OTHER_WORDS:
        arena(device_index, poison).take_damage()


def tensor_at(address: int, like: torch.Tensor, device_index: int) -> torch.Tensor:
    """Return a tensor at a device address, with size, stride and dtype of ``like``. Not owned."""
    return tensor_of(address, like.shape, like.stride(), like.dtype, device_index)


def tensor_of(
    address: int,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device_index: int,
    nbytes: int | None = None,
) -> torch.Tensor:
    """Return a tensor at a device address. Not owned. ``nbytes``: its extent, if it is known."""
    nbytes = extent(size, stride, dtype) if nbytes is None else nbytes
    storage = torch._C._construct_storage_from_data_pointer(address, torch.device("cuda", device_index), nbytes)
    return _tensor_in(storage, size, stride, dtype)


def tensor_in(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor in a storage of the device, with size, stride and dtype of ``like``."""
    return _tensor_in(storage, like.shape, like.stride(), like.dtype)


def _tensor_in(
    storage: torch.UntypedStorage, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    metadata = {"size": size, "stride": stride, "dtype": dtype, "device": storage.device, "storage_offset": 0}
    return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(metadata, storage)


def storage_extent(t: torch.Tensor) -> int:
    """Return the bytes from the first element of a strided tensor to the end of its last."""
    return extent(t.shape, t.stride(), t.dtype)


def extent(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes from the first element of such a tensor to the end of its last."""
    # For each new size this is called for all operands. A generator takes twice as long.
    last = 0
    for n, step in zip(size, stride):
        if n == 0:
            return 0
        last += (n - 1) * step
    return (last + 1) * dtype.itemsize


class PlaceholderMap:
    """Finds the placeholder that an address belongs to."""

    def __init__(self, placeholders: Sequence[Placeholder]) -> None:
        self.placeholders = placeholders
        self.order = sorted(range(len(placeholders)), key=lambda i: placeholders[i].start)
        self.starts = [placeholders[i].start for i in self.order]
        self.low = min(self.starts, default=0)
        self.high = max((p.end for p in placeholders), default=0)

    def find(self, address: int) -> tuple[int, int] | None:
        """Return (index of the placeholder, offset in bytes from its address), or None."""
        if not self.low <= address < self.high:
            return None
        index = self.order[bisect.bisect_right(self.starts, address) - 1]
        placeholder = self.placeholders[index]
        return (index, address - placeholder.address) if address < placeholder.end else None

    def __contains__(self, address: int) -> bool:
        return self.find(address) is not None

    def is_better_aligned(self, index: int, offset: int) -> bool:
        """Return whether the address behind a placeholder's is a multiple of a larger power of two than guaranteed."""
        # The sum of two odd multiples of the alignment is an even one.
        address = self.placeholders[index].address
        alignment = address & -address
        return alignment < MAX_ALIGNMENT and offset & -offset == alignment
