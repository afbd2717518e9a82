"""
Memory of a function's buffers while it is captured for a schedule. The caching allocator hands the memory of a dead
buffer to the next one, and calls that do not depend on one another wait for each other. Buffers keeps what died until a
call allocates as much that comes behind all calls that used it.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import TYPE_CHECKING

import torch
from torch._inductor.pygraph.graph.placeholder import storage_extent, tensor_in
from torch._inductor.pygraph.schedule.dag import critical_path, dependencies, reached
from torch._inductor.pygraph.schedule.notes import Apart, declared_call, NODE_US


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch._inductor.cudagraph_utils import ModelType, OutputType
    from torch._inductor.pygraph.schedule.dag import Waits
    from torch._inductor.pygraph.schedule.notes import CallLog, Note
    from torch._inductor.utils import InputType
    from torch.multiprocessing.reductions import StorageWeakRef


# Buffers lie apart if that makes the critical path so many times shorter. A U-Net with a 1.07 times shorter path was
# slower.
MIN_GAIN = 1.25


@dataclasses.dataclass(eq=False, slots=True)
class Held:
    """A storage that is kept. ``users``: the calls that used it, as bits."""

    ref: StorageWeakRef
    storage: torch.UntypedStorage
    nbytes: int
    users: int = 0

    @property
    def is_dead(self) -> bool:
        # The other reference is this one.
        return torch._C._storage_Use_Count(self.storage._cdata) == 1


def buffers_apart(
    rehearsed: CallLog,
    moving: Collection[int],
    times_us: Mapping[int, float],
    allocate: Callable[..., torch.Tensor],
    more: int,
) -> Buffers | None:
    """
    Return what allocates while a function is captured, or None if its calls wait for little memory. Buffers take at
    most ``more`` bytes beyond those of an earlier run, ``rehearsed``. Inputs ``moving`` lie elsewhere in another call.
    """
    if not rehearsed.is_complete:
        return None
    together, apart = (
        dependencies([declared_call(n, c, moving, apart=place) for n, c in zip(rehearsed.notes, rehearsed.calls)])
        for place in (None, Apart(rehearsed.notes))
    )
    times = [times_us.get(note.number, NODE_US) for note in rehearsed.notes]
    if critical_path(together, times) < MIN_GAIN * critical_path(apart, times):
        return None
    return Buffers(apart, allocate, peak_bytes(rehearsed.notes) + more)


def peak_bytes(notes: Sequence[Note]) -> int:
    """Return the most bytes of buffers that live at once."""
    inputs = {use.storage for note in notes for use in note.uses if use.operand.input is not None}
    change: collections.Counter[int] = collections.Counter()
    lives: dict[StorageWeakRef, tuple[int, int, int]] = {}
    for note in notes:
        for use in note.uses:
            if use.storage not in inputs:
                first, *_ = lives.get(use.storage, (note.number,))
                lives[use.storage] = first, note.number + 1, use.extent[1] - use.extent[0]
    for first, end, nbytes in lives.values():
        change[first] += nbytes
        change[end] -= nbytes
    return max(itertools.accumulate(change[number] for number in range(len(notes))), default=0)


class Buffers:
    """``waits`` is what calls wait for besides memory, ``limit`` the bytes of live and dead buffers."""

    def __init__(self, waits: Waits, allocate: Callable[..., torch.Tensor], limit: int) -> None:
        self.behind = reached(waits)
        self.allocate = allocate
        self.limit = limit
        # The call that comes next.
        self.number = 0
        self.inputs: set[StorageWeakRef] = set()
        self.held: dict[StorageWeakRef, Held] = {}
        self.by_size: dict[int, list[Held]] = collections.defaultdict(list)
        self.nbytes = 0
        # The call in front of which a storage was let go.
        self.ends: dict[StorageWeakRef, int] = {}

    def __call__(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        like = torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device="meta")
        nbytes = storage_extent(like)
        before = self.behind[self.number] if self.number < len(self.behind) else 0
        # What was used last may lie in the caches.
        for held in reversed(self.by_size[nbytes]):
            if not held.users & ~before and held.is_dead:
                return tensor_in(held.storage, like)
        for held in [*self.held.values()] if self.nbytes + nbytes > self.limit else ():
            if self.nbytes + nbytes > self.limit and held.is_dead:
                self._release(held)
        return self.allocate(size, stride, dtype)

    def noted(self, note: Note) -> None:
        """Keep what a call used."""
        self.number = note.number + 1
        self.inputs.update(use.storage for use in note.uses if use.operand.input is not None)
        for use in note.uses:
            if (held := self.held.get(use.storage)) is None:
                # A tensor that calls only read is a constant.
                if use.storage in self.inputs or not use.operand.writes:
                    continue
                storage = torch.UntypedStorage._new_with_weak_ptr(use.storage.cdata)
                held = self.held[use.storage] = Held(use.storage, storage, storage.nbytes())
                self.by_size[held.nbytes].append(held)
                self.nbytes += held.nbytes
            held.users |= 1 << note.number

    def _release(self, held: Held) -> None:
        self.ends[held.ref] = self.number
        self.by_size[held.nbytes].remove(held)
        self.nbytes -= held.nbytes
        del self.held[held.ref]

    def until_end(self, model: ModelType) -> ModelType:
        """Return a function that lets go of all that is kept when it ends."""

        def run(inputs: list[InputType]) -> OutputType:
            try:
                return model(inputs)
            finally:
                for held in [*self.held.values()]:
                    self._release(held)

        return run
