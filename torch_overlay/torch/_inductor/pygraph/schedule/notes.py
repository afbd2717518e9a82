"""
What generated code notes of each call while it runs: the tensors that the call uses, where they lie, and, in a capture,
which of the graph's nodes belong to the call.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TYPE_CHECKING

from torch._inductor.pygraph.graph.edges import capturing_graph, count_nodes
from torch._inductor.pygraph.graph.placeholder import storage_extent
from torch._inductor.pygraph.schedule.dag import Access, Call
from torch.multiprocessing.reductions import StorageWeakRef


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch._inductor.pygraph.types.calls import CallInfo, Operand

Range = tuple[int, int]

# The assumed time of a call that was not timed.
NODE_US = 3.0

# No device memory lies behind it.
APART = 1 << 60


class Use(NamedTuple):
    """
    A tensor of a call, where its storage lies (``extent``), and what is used: of an input the whole storage, because a
    kernel may read more than the tensor has. An address is used again, a storage is not.
    """

    operand: Operand
    memory: Range
    storage: StorageWeakRef
    extent: Range


class Note(NamedTuple):
    """A call that ran. ``end``: how many nodes the graph had behind it, if it was captured."""

    number: int
    end: int
    uses: list[Use]


class CallLog:
    """
    Called by generated code behind each call. ``noted`` is called with each note. ``ends`` has the call in front of
    which a storage was let go that was kept until then. ``reuses``: see types/calls.py.
    """

    def __init__(
        self,
        calls: Sequence[CallInfo],
        device_index: int,
        *,
        is_captured: bool = True,
        reuses: bool = False,
        noted: Callable[[Note], None] = lambda note: None,
        ends: Mapping[StorageWeakRef, int] | None = None,
    ) -> None:
        self.calls = calls
        self.device_index = device_index
        self.is_captured = is_captured
        self.reuses = reuses
        self.noted = noted
        self.ends = {} if ends is None else ends
        self.notes: list[Note] = []

    def __call__(self, number: int, *values: Any) -> None:
        uses = [
            use
            for operand, value in zip(self.calls[number].operands, values, strict=True)
            for use in _uses(operand, value)
        ]
        end = count_nodes(capturing_graph(self.device_index)) if self.is_captured else 0
        self.notes.append(Note(number, end, uses))
        self.noted(self.notes[-1])

    @property
    def is_complete(self) -> bool:
        """Whether the log has a note of each described call, in their order."""
        return [note.number for note in self.notes] == [*range(len(self.calls))]


def _uses(operand: Operand, value: Any) -> list[Use]:
    """Return the memory that a call uses of a value. The value of an operator may be a list of tensors."""
    if isinstance(value, (list, tuple)):
        return [found for v in value for found in _uses(operand, v)]
    if not hasattr(value, "untyped_storage") or not value.is_cuda:
        return []
    storage = value.untyped_storage()
    extent = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    start = value.data_ptr()
    memory = (start, start + storage_extent(value)) if operand.input is None else extent
    return [Use(operand, memory, StorageWeakRef(storage), extent)] if memory[0] < memory[1] else []


class Apart:
    """
    Addresses of a program whose buffers never use memory again, but for those of inputs. ``places`` has those of each
    note's uses.
    """

    def __init__(self, notes: Sequence[Note]) -> None:
        inputs = {use.storage for note in notes for use in note.uses if use.operand.input is not None}
        shifts: dict[StorageWeakRef, int] = dict.fromkeys(inputs, 0)
        end = APART
        self.places: list[list[Range]] = []
        for note in notes:
            found = []
            for use in note.uses:
                if use.operand.begins or use.storage not in shifts:
                    start, stop = use.extent
                    shifts[use.storage] = end - start
                    end += stop - start
                shift = shifts[use.storage]
                found.append((use.memory[0] + shift, use.memory[1] + shift))
            self.places.append(found)


def declared_call(
    note: Note, call: CallInfo, moving: Collection[int], others: Collection[Range] = (), apart: Apart | None = None
) -> Call:
    """Return what a call uses, with memory that it does not declare, ``others``, and buffers that ``apart`` moves."""
    if not call.is_declared:
        return Call(is_barrier=True)
    places = [use.memory for use in note.uses] if apart is None else apart.places[note.number]
    operands = (use.operand for use in note.uses)
    accesses = [Access(*memory, o.writes, o.input, o.input in moving) for o, memory in zip(operands, places)]
    accesses += [Access(*memory, writes=True) for memory in sorted(others)]
    return Call(tuple(accesses), frozenset(call.resources))
