"""Where the outputs of a function lie, and the placeholders that it is captured on."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor.pygraph.capture.allocation import (
    Allocation,
    AllocationTrace,
    with_allocator,
)
from torch._inductor.pygraph.graph.placeholder import (
    arena,
    MAX_ALIGNMENT,
    NAN,
    Placeholder,
    PlaceholderMap,
    POISONS,
    storage_extent,
    UNWRITTEN,
    ZERO,
)
from torch._inductor.pygraph.types.reason import Code, Reason, RefusedError
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from torch._inductor.cudagraph_utils import ModelType, OutputType
    from torch._inductor.pygraph.types.partition import PartitionInfo
    from torch._inductor.utils import InputType


# A recording accepts external inputs of one alignment in bytes: the largest of these that
# divides all of their addresses. So at most this many recordings differ in alignment.
ALIGNMENTS = (MAX_ALIGNMENT, 16, 8, 4, 2, 1)


def common_alignment(pointers: Sequence[int]) -> int:
    combined = functools.reduce(operator.or_, pointers, 0)
    return next(a for a in ALIGNMENTS if combined % a == 0)


class TracedRun:
    """
    Runs a function uncaptured, and remembers the allocations of the last run.

    Args:
        pooled: storages that the graph needs in its pool
    """

    def __init__(
        self, model: ModelType, info: PartitionInfo, pooled: Collection[StorageWeakRef]
    ) -> None:
        self.model = model
        self.info = info
        self.pooled = pooled

    def __call__(self, inputs: list[InputType]) -> OutputType:
        # A rehearsal does not run in the graphs' pool: inputs stay alive in it that die
        # during capture, and the pool would keep the memory that it takes.
        self.trace = AllocationTrace(self.pooled)
        return with_allocator(self.model, self.info, self.trace)(inputs)


@dataclasses.dataclass(frozen=True)
class OutputLayout:
    """
    Attributes:
        allocations: the allocations that owned outputs lie in, by their place in the order
        copies: what the graph copies an owned output to, by output
        copied_bytes: bytes of the other owned outputs, which each call copies from the pool
    """

    allocations: dict[int, Allocation]
    copies: dict[int, Allocation]
    copied_bytes: int

    @classmethod
    def of(
        cls,
        run: TracedRun,
        outputs: OutputType,
        owned: OrderedSet[int],
        known: Sequence[Any],
        external: Iterable[Any],
        device: torch.device,
    ) -> OutputLayout:
        """
        Args:
            outputs: of the last run
            known: inputs and constants, in whose memory outputs may lie
            external: inputs whose address changes from call to call

        Raises:
            RefusedError: an external input has to lie in the pool.
        """
        pooled = run.pooled
        if any(StorageWeakRef(t.untyped_storage()) in pooled for t in external):
            raise RefusedError(Reason.of(Code.COLLECTIVE_OF_INPUT))
        trace = run.trace
        copies = trace.others(known, outputs, owned, device)
        not_in_pool = OrderedSet(
            t.untyped_storage().data_ptr() for t in known if isinstance(t, torch.Tensor)
        )
        copied = {
            storage.data_ptr(): storage.nbytes()
            for i in owned
            if i not in copies
            and isinstance(t := outputs[i], torch.Tensor)
            and t.is_cuda
            and not trace.can_place(t)
            and (storage := t.untyped_storage()).data_ptr() not in not_in_pool
        }
        return cls(
            trace.of(outputs[i] for i in owned), copies, sum(copied.values())
        )


@dataclasses.dataclass(frozen=True)
class BoundMemory:
    """
    The placeholders of what is bound: external inputs, then allocations, then copies.

    Attributes:
        allocators: what makes the memory of the allocations and copies in each call
        allocations: (bytes, address) by place in the order of allocations
        copies: (copy, address) by output
    """

    placeholders: PlaceholderMap
    allocators: list[Callable[[], torch.Tensor]]
    allocations: dict[int, tuple[int, int]]
    copies: dict[int, tuple[Allocation, int]]

    @classmethod
    def place(
        cls,
        inputs: Sequence[torch.Tensor],
        alignment: int,
        layout: OutputLayout,
        device_index: int,
    ) -> tuple[BoundMemory, list[torch.Tensor]]:
        """Return the placeholders, and the tensors of this call that they stand for."""
        owned = [*layout.allocations.values(), *layout.copies.values()]
        allocators = [a.allocator(device_index) for a in owned]
        outputs = [allocate() for allocate in allocators]
        # (poison, (bytes, alignment))
        requests = [
            (
                NAN if t.is_floating_point() or t.is_complex() else ZERO,
                (storage_extent(t), alignment),
            )
            for t in inputs
        ]
        requests += [(UNWRITTEN, (storage_extent(t), MAX_ALIGNMENT)) for t in outputs]
        placed: dict[int, Placeholder] = {}
        for poison in POISONS:
            ks = [k for k, request in enumerate(requests) if request[0] == poison]
            placed.update(
                zip(ks, arena(device_index, poison).place([requests[k][1] for k in ks]))
            )
        placeholders = [placed[k] for k in range(len(requests))]
        addresses = [p.address for p in placeholders[len(inputs) :]]
        memory = cls(
            PlaceholderMap(placeholders),
            allocators,
            {
                n: (storage_extent(allocation.like()), address)
                for (n, allocation), address in zip(
                    layout.allocations.items(), addresses
                )
            },
            {
                i: (copy, address)
                for (i, copy), address in zip(
                    layout.copies.items(), addresses[len(layout.allocations) :]
                )
            },
        )
        return memory, [*inputs, *outputs]
