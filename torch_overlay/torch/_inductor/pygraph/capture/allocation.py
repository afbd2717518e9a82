"""
Memory of what a function returns.

In the graphs' pool it would be overwritten by the next replay, whether the program still
has it or not. So the buffers that become outputs are bound as external inputs are:
captured at placeholders, and given memory of their own in each call.

Code that is generated with config.pygraph takes its allocator as an argument. The rehearsal
passes one that notes which allocation each output lies in, the capture one that puts these
allocations at placeholders. An operator that allocates what it returns is not seen; the graph ends with
a copy of such an output (Copied), or, where outputs share memory, each call copies it out
of the pool. Gradients may do without; see Controller.owned_output_idxs.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch._inductor.pygraph import native
from torch._inductor.pygraph.graph.placeholder import storage_extent, tensor_at
from torch._inductor.pygraph.verify.fingerprint import as_bytes, mark_unwritten
from torch.multiprocessing.reductions import StorageWeakRef


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from torch._inductor.cudagraph_utils import ModelType, OutputType
    from torch._inductor.pygraph.types.partition import PartitionInfo
    from torch._inductor.utils import InputType

# What generated code allocates with, on the current device: (size, stride, dtype).
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda


class Allocation(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def like(self) -> torch.Tensor:
        size, stride, dtype = self
        return torch.empty_strided(size, stride, dtype=dtype, device="meta")

    def allocator(self, device_index: int) -> Callable[[], torch.Tensor]:
        if native.compiled is not None:
            return native.compiled.Allocator(*self, device_index)
        if torch.cuda.device_count() == 1:
            return functools.partial(empty_strided_cuda, *self)
        device = torch.device("cuda", device_index)
        return functools.partial(
            torch.empty_strided,
            self.size,
            self.stride,
            dtype=self.dtype,
            device=device,
        )


def with_allocator(
    model: ModelType, info: PartitionInfo, allocate: Callable[..., torch.Tensor]
) -> ModelType:
    """Return ``model`` allocating with ``allocate``, or as it is if it takes no allocator."""
    if info.allocator is None:
        return model
    return functools.partial(model, **{info.allocator: allocate})


class AllocationTrace:
    """
    Allocates as the wrapper does, marks what it gives, and remembers in what order.

    Args:
        pooled: storages that the graph needs in its pool; complete once the function ran
    """

    def __init__(self, pooled: Collection[StorageWeakRef] = ()) -> None:
        self.pooled = pooled
        self.allocations: list[Allocation] = []
        # By storage, not by address: an operator may allocate where a buffer was.
        self.ordinals: dict[StorageWeakRef, int] = {}

    def __call__(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        t = empty_strided_cuda(size, stride, dtype)
        # As the graph's is. What neither writes is then the same, and what only the graph
        # does not write is seen.
        mark_unwritten(t)
        self.ordinals[StorageWeakRef(t.untyped_storage())] = len(self.allocations)
        self.allocations.append(Allocation(tuple(size), tuple(stride), dtype))
        return t

    def holds(self, t: torch.Tensor) -> bool:
        """Whether an output lies in one of them."""
        return StorageWeakRef(t.untyped_storage()) in self.ordinals

    def can_place(self, t: torch.Tensor) -> bool:
        """Whether it lies in one that the graph can have elsewhere than in its pool."""
        return self.holds(t) and StorageWeakRef(t.untyped_storage()) not in self.pooled

    def of(self, outputs: Iterable[Any]) -> dict[int, Allocation]:
        """
        The allocations that outputs lie in, by their place in the order. One that an output
        fills is described as that output: memory that is used again is often returned in
        another shape than it was allocated in.
        """
        found = {}
        for t in outputs:
            if isinstance(t, torch.Tensor) and t.numel() > 0 and self.can_place(t):
                n = self.ordinals[StorageWeakRef(t.untyped_storage())]
                found.setdefault(n, self.allocations[n])
                nbytes = storage_extent(found[n].like())
                if t.storage_offset() == 0 and storage_extent(t) == nbytes:
                    found[n] = Allocation(tuple(t.shape), tuple(t.stride()), t.dtype)
        return dict(sorted(found.items()))

    def others(
        self,
        known: Sequence[Any],
        outputs: Sequence[Any],
        idxs: Iterable[int],
        device: torch.device,
    ) -> dict[int, Allocation]:
        """
        Of the outputs at ``idxs`` those that cannot be placed, most of them since operators
        allocated them, and of which a copy is as good: each is alone in its memory, shared
        with no ``known`` tensor, and fills it.
        """
        tensors = [t for t in (*known, *outputs) if isinstance(t, torch.Tensor)]
        sharing = Counter(StorageWeakRef(t.untyped_storage()) for t in tensors)
        return {
            i: Allocation(tuple(t.shape), tuple(t.stride()), t.dtype)
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


class PlacedAllocations:
    """
    Allocates as the wrapper does, except for some, which are put at given addresses.

    Args:
        placed: (size in bytes, address) by place in the order of allocations
    """

    def __init__(
        self, placed: Mapping[int, tuple[int, int]], device_index: int
    ) -> None:
        self.placed = placed
        self.device_index = device_index
        self.count = 0

    def __call__(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        expected, address = self.placed.get(self.count, (None, 0))
        self.count += 1
        like = Allocation(tuple(size), tuple(stride), dtype).like()
        if expected != storage_extent(like):
            return empty_strided_cuda(size, stride, dtype)
        return tensor_at(address, like, self.device_index)


class Copied:
    """
    A function some of whose outputs are copied to given addresses in the end, by kernels:
    the driver refuses to move the end of a copy node from a placeholder.

    Args:
        placed: (what it is, address) by output

    Attributes:
        sources: where the last call's copies are from; not owned
    """

    def __init__(
        self,
        model: ModelType,
        placed: Mapping[int, tuple[Allocation, int]],
        device_index: int,
    ) -> None:
        self.model = model
        self.device_index = device_index
        self.copies = {
            i: tensor_at(address, allocation.like(), device_index)
            for i, (allocation, address) in placed.items()
        }
        self.sources: list[torch.Tensor] = []

    def __call__(self, inputs: list[InputType]) -> OutputType:
        outputs = self.model(inputs)
        if not self.copies:
            return outputs
        outputs = list(outputs)
        for i, copy in self.copies.items():
            source: torch.Tensor = outputs[i]  # type: ignore[assignment]
            copy_by_kernel(copy, source)
            self.sources.append(
                tensor_at(source.data_ptr(), source, self.device_index)
            )
            outputs[i] = copy
        return outputs


def copy_by_kernel(to: torch.Tensor, source: torch.Tensor) -> None:
    """Of two dense tensors of one size and stride; copy_ would be no kernel."""
    dtype = torch.int32 if to.nbytes % 4 == 0 else torch.uint8
    words = as_bytes(source).view(dtype)
    torch.bitwise_or(words, 0, out=as_bytes(to).view(dtype))
