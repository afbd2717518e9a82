"""
Memory of what a function returns. The next replay would overwrite it in the graphs' pool. So the buffers that become
outputs are captured at placeholders, and get memory of their own in each call.

Generated code takes its allocator as an argument: an AllocationTrace in the rehearsal, a placed_allocator in the
capture. An operator that allocates what it returns is not seen; the graph ends with a copy of such an output (Copied),
or, where outputs share memory, each call copies it out of the pool.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections import Counter
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch._inductor.pygraph import native
from torch._inductor.pygraph.graph import placeholder
from torch._inductor.pygraph.graph.placeholder import storage_extent, tensor_at
from torch._inductor.pygraph.types.reason import Code, Reason, RefusedError
from torch._inductor.pygraph.verify.proof import as_bytes, mark_unwritten
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from torch._inductor.cudagraph_utils import ModelType, OutputType
    from torch._inductor.pygraph.graph.memory import FreeMemory
    from torch._inductor.pygraph.types.partition import PartitionInfo
    from torch._inductor.utils import InputType

# What generated code allocates with, on the current device: (size, stride, dtype).
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda

# Generated code makes views by it.
reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor


# A recording accepts external inputs of one alignment in bytes: the largest of these that divides all addresses.
ALIGNMENTS = (placeholder.MAX_ALIGNMENT, 16, 8, 4, 2, 1)


def common_alignment(pointers: Sequence[int]) -> int:
    combined = functools.reduce(operator.or_, pointers, 0)
    return next(a for a in ALIGNMENTS if combined % a == 0)


class Allocation(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, t: torch.Tensor) -> Allocation:
        return cls(tuple(t.shape), tuple(t.stride()), t.dtype)

    def like(self) -> torch.Tensor:
        return torch.empty_strided(*self[:2], dtype=self.dtype, device="meta")

    def has_elements_of(self, other: Allocation) -> bool:
        """Return whether both have the same elements: the stride of a single one says nothing."""
        strides = zip(self.size, self.stride, other.stride)
        return self[::2] == other[::2] and all(a == b for n, a, b in strides if n != 1)

    def allocator(self, device_index: int) -> Callable[[], torch.Tensor]:
        if native.compiled is not None:
            return native.compiled.Allocator(*self, device_index)
        if torch.cuda.device_count() == 1:
            return functools.partial(empty_strided_cuda, *self)
        device = torch.device("cuda", device_index)
        return functools.partial(torch.empty_strided, *self[:2], dtype=self.dtype, device=device)


def allocator_at(
    size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device_index: int
) -> Callable[[Sequence[int]], torch.Tensor]:
    """Return what allocates a tensor, given numbers. ``size`` and ``stride`` are places in these."""
    if native.compiled is not None:
        return native.compiled.Allocator(size, stride, dtype, device_index, True)

    def allocate(numbers: Sequence[int]) -> torch.Tensor:
        layout = (tuple(numbers[n] for n in places) for places in (size, stride))
        return Allocation(*layout, dtype).allocator(device_index)()

    return allocate


def view_at(tensors: Sequence[torch.Tensor], view: tuple[Any, ...], numbers: Sequence[int]) -> torch.Tensor:
    """Return a view of one of some tensors; see ReplayPlan.views."""
    k, size, stride, offset, itemsize = view
    layout = (tuple(numbers[n] for n in places) for places in (size, stride))
    return reinterpret_tensor(tensors[k], *layout, numbers[offset] // itemsize)


def with_allocator(model: ModelType, info: PartitionInfo, allocate: Callable[..., torch.Tensor]) -> ModelType:
    """Return ``model`` allocating with ``allocate``, or as it is if it takes no allocator."""
    if info.allocator is None:
        return model
    return functools.partial(model, **{info.allocator: allocate})


class AllocationTrace:
    """
    Allocate as the wrapper does, mark the memory, and remember the order. ``pooled`` are storages that the graph needs
    in its pool. They are all known once the function ran. ``free`` is memory to use before any other.
    """

    def __init__(self, pooled: Collection[StorageWeakRef] = (), free: FreeMemory | None = None) -> None:
        self.pooled = pooled
        self.free = free
        self.begin()

    def begin(self) -> None:
        """Forget an earlier run."""
        self.allocations: list[Allocation] = []
        # By storage, not by address: an operator may allocate where a buffer was.
        self.ordinals: dict[StorageWeakRef, int] = {}

    def __call__(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        allocation = Allocation(tuple(size), tuple(stride), dtype)
        t = None if self.free is None else self.free.lend(allocation.like())
        if t is None:
            t = empty_strided_cuda(size, stride, dtype)
        # As the graph's is.
        mark_unwritten(t)
        self.ordinals[StorageWeakRef(t.untyped_storage())] = len(self.allocations)
        self.allocations.append(allocation)
        return t

    def holds(self, t: torch.Tensor) -> bool:
        """Return whether an output lies in one of the allocations."""
        return StorageWeakRef(t.untyped_storage()) in self.ordinals

    def others_of(self, outputs: OutputType) -> list[int]:
        """Return which outputs lie in none of the allocations."""
        tensors = ((i, t) for i, t in enumerate(outputs) if isinstance(t, torch.Tensor))
        return [i for i, t in tensors if t.numel() > 0 and not self.holds(t)]

    def can_place(self, t: torch.Tensor) -> bool:
        """Return whether it lies in one that need not be in the graph's pool."""
        return self.holds(t) and StorageWeakRef(t.untyped_storage()) not in self.pooled

    def of(self, outputs: Iterable[Any]) -> dict[int, Allocation]:
        """
        Return the allocations that outputs lie in, by their place in the order. One that an output fills is described
        as that output: memory that is used again often has another shape by then.
        """
        found = {}
        for t in outputs:
            if isinstance(t, torch.Tensor) and t.numel() > 0 and self.can_place(t):
                n = self.ordinals[StorageWeakRef(t.untyped_storage())]
                found.setdefault(n, self.allocations[n])
                if t.storage_offset() == 0 and storage_extent(t) == storage_extent(found[n].like()):
                    found[n] = Allocation.of(t)
        return dict(sorted(found.items()))

    def others(
        self, known: Sequence[Any], outputs: Sequence[Any], idxs: Iterable[int], device: torch.device
    ) -> dict[int, Allocation]:
        """
        Return the outputs at ``idxs`` that cannot be placed, and of which a copy is as good: each is alone in its
        memory, shared with no ``known`` tensor, and fills it.
        """
        tensors = [t for t in (*known, *outputs) if isinstance(t, torch.Tensor)]
        sharing = Counter(StorageWeakRef(t.untyped_storage()) for t in tensors)
        return {
            i: Allocation.of(t)
            for i in idxs
            if isinstance(t := outputs[i], torch.Tensor)
            and t.device == device
            and t.numel() > 0
            and not self.can_place(t)
            and sharing[StorageWeakRef(t.untyped_storage())] == 1
            and t.storage_offset() == 0
            and torch.ops.aten.is_non_overlapping_and_dense(t)
            and not t.is_conj()
            and not t.is_neg()
        }


@dataclasses.dataclass(frozen=True)
class OutputLayout:
    """
    Attributes:
        allocations: the allocations that owned outputs lie in, by their place in the order
        copies: what the graph copies an owned output to, by output
        copied_bytes: of the other owned outputs, which each call copies from the pool
    """

    allocations: dict[int, Allocation]
    copies: dict[int, Allocation]
    copied_bytes: int

    @classmethod
    def of(
        cls,
        trace: AllocationTrace,
        outputs: OutputType,
        owned: OrderedSet[int],
        known: Sequence[Any],
        external: Iterable[Any],
        device: torch.device,
    ) -> OutputLayout:
        """
        Args:
            outputs: of the run that was traced
            known: inputs and constants, in whose memory outputs may lie
            external: inputs whose address changes. Raises RefusedError if one has to lie in the pool
        """
        if any(StorageWeakRef(t.untyped_storage()) in trace.pooled for t in external):
            raise RefusedError(Reason.of(Code.COLLECTIVE_OF_INPUT))
        copies = trace.others(known, outputs, owned, device)
        not_in_pool = OrderedSet(t.untyped_storage().data_ptr() for t in known if isinstance(t, torch.Tensor))
        copied = {
            storage.data_ptr(): storage.nbytes()
            for i in owned
            if i not in copies
            and isinstance(t := outputs[i], torch.Tensor)
            and t.is_cuda
            and not trace.can_place(t)
            and (storage := t.untyped_storage()).data_ptr() not in not_in_pool
        }
        return cls(trace.of(outputs[i] for i in owned), copies, sum(copied.values()))


def poison_of(t: torch.Tensor) -> int:
    """Return the poison of an input's placeholder."""
    return placeholder.NAN if t.is_floating_point() or t.is_complex() else placeholder.ZERO


def place(wanted: Iterable[tuple[int, int, int]], device_index: int) -> list[placeholder.Placeholder]:
    """Return a placeholder for each (poison, bytes, alignment)."""
    requests: dict[int, list[tuple[int, int]]] = {poison: [] for poison in placeholder.POISONS}
    for poison, nbytes, alignment in (wanted := [*wanted]):
        requests[poison].append((nbytes, alignment))
    places = {poison: iter(placeholder.arena(device_index, poison).place(sizes)) for poison, sizes in requests.items()}
    return [next(places[poison]) for poison, *_ in wanted]


@dataclasses.dataclass(frozen=True)
class BoundMemory:
    """
    The placeholders of what is bound: external inputs, then allocations, then copies.

    Attributes:
        allocators: what makes the memory of the allocations and copies in each call
        allocations: (bytes, address) by place in the order of allocations
        copies: (copy, address) by output
    """

    placeholders: placeholder.PlaceholderMap
    allocators: list[Callable[[], torch.Tensor]]
    allocations: dict[int, tuple[int, int]]
    copies: dict[int, tuple[Allocation, int]]

    @classmethod
    def place(
        cls, inputs: Sequence[torch.Tensor], alignment: int, layout: OutputLayout, device_index: int
    ) -> tuple[BoundMemory, list[torch.Tensor]]:
        """Return the placeholders, and the tensors of this call that they stand for."""
        owned = [*layout.allocations.values(), *layout.copies.values()]
        allocators = [a.allocator(device_index) for a in owned]
        outputs = [allocate() for allocate in allocators]
        tensors = [*inputs, *outputs]
        placeholders = place(
            [(poison_of(t), storage_extent(t), alignment) for t in inputs]
            + [(placeholder.UNWRITTEN, storage_extent(t), placeholder.MAX_ALIGNMENT) for t in outputs],
            device_index,
        )
        addresses = (p.address for p in placeholders[len(inputs) :])
        allocations = {n: (storage_extent(a.like()), next(addresses)) for n, a in layout.allocations.items()}
        copies = {i: (copy, next(addresses)) for i, copy in layout.copies.items()}
        return cls(placeholder.PlaceholderMap(placeholders), allocators, allocations, copies), tensors


def placed_allocator(
    placed: Mapping[int, tuple[int, int]], device_index: int, allocate_other: Callable[..., torch.Tensor] | None = None
) -> Callable[..., torch.Tensor]:
    """
    Return what allocates as the wrapper does, but puts some allocations, (size in bytes, address) by place in the order
    of allocations, at given addresses. ``allocate_other`` is for the others.
    """
    places = itertools.count()

    def allocate(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        expected, address = placed.get(next(places), (None, 0))
        like = Allocation(tuple(size), tuple(stride), dtype).like()
        if expected != storage_extent(like):
            return (allocate_other or empty_strided_cuda)(size, stride, dtype)
        return tensor_at(address, like, device_index)

    return allocate


class Copied:
    """
    A function that copies some of its outputs, ``placed``, to given addresses in the end. ``sources``, not owned, are
    where the last call's copies are from.
    """

    def __init__(self, model: ModelType, placed: Mapping[int, tuple[Allocation, int]], device_index: int) -> None:
        self.model = model
        self.device_index = device_index
        self.copies = {
            i: tensor_at(address, allocation.like(), device_index) for i, (allocation, address) in placed.items()
        }
        self.sources: list[torch.Tensor] = []

    def __call__(self, inputs: list[InputType]) -> OutputType:
        outputs = list(self.model(inputs))
        for i, copy in self.copies.items():
            source: torch.Tensor = outputs[i]  # type: ignore[assignment]
            copy_by_kernel(copy, source)
            self.sources.append(tensor_at(source.data_ptr(), source, self.device_index))
            outputs[i] = copy
        return outputs


def copy_by_kernel(to: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a dense tensor to another of its size and stride. The driver refuses to move the ends of a copy node."""
    words, out = as_bytes(source), as_bytes(to)
    # Elements of two bytes may begin in the middle of a word.
    if all(n % 4 == 0 for t in (words, out) for n in (t.nbytes, t.data_ptr(), t.storage_offset())):
        words, out = words.view(torch.int32), out.view(torch.int32)
    torch.bitwise_or(words, 0, out=out)
