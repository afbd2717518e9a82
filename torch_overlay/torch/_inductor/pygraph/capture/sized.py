"""
A recording of a function for many sizes.

It is captured in a call, with memory for the largest sizes of a bucket, and replayed at all sizes of the bucket. A
SizeMap says how parameters and grids of Triton kernels depend on the sizes. What operators launch is known from
library.Memo. All tensors that the function takes are bound, and no output lies in a pool: to trees the call is an
uncaptured one.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import logging
from collections import OrderedDict
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch._inductor.pygraph.capture.allocation import Allocation, allocator_at, view_at
from torch._inductor.pygraph.capture.at_sizes import alone_of, differs, FunctionCapture, unknown
from torch._inductor.pygraph.capture.compared import CallComparison, launches_same
from torch._inductor.pygraph.capture.library import alignment_of, SEEDS, settings, Signature
from torch._inductor.pygraph.graph.binding import Word, WORD_BYTES
from torch._inductor.pygraph.graph.driver import bindings, DriverError
from torch._inductor.pygraph.graph.entry import Source
from torch._inductor.pygraph.graph.memory import PoolRanges
from torch._inductor.pygraph.graph.placeholder import MAX_ALIGNMENT
from torch._inductor.pygraph.graph.sized import enabled_update, Launches, LibraryNodes, SizedGraphs
from torch._inductor.pygraph.trees.cached import is_lazy
from torch._inductor.pygraph.types.reason import Code, Reason, RefusedError
from torch._inductor.pygraph.values.sizes import DeliverOf, LaunchOf, TensorOf
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch._inductor.cudagraph_utils import OutputType
    from torch._inductor.pygraph.capture.at_sizes import SizedModel
    from torch._inductor.pygraph.capture.library import Memo, TracedCall
    from torch._inductor.pygraph.graph.binding import NodeUpdate
    from torch._inductor.pygraph.graph.captured import CapturedNode
    from torch._inductor.pygraph.graph.entry import Entry, Slot
    from torch._inductor.pygraph.values.sizes import AtSizes
    from torch._inductor.utils import InputType
    from torch.cuda import _POOL_HANDLE


log = logging.getLogger(__name__)

# Of a recording.
MAX_ROWS = 1024


@dataclasses.dataclass(frozen=True, eq=False)
class Launch:
    """A Triton kernel of a recording, or the kernel of a Deliver, as it was captured."""

    event: LaunchOf | DeliverOf
    node: CapturedNode
    words: list[Word]


@dataclasses.dataclass(frozen=True, eq=False)
class LibraryCall:
    """
    Args:
        tensors: operands, then results; None is no tensor of the function
        sources: of these, among what a replay sets
        nodes: of the recording
    """

    call: TracedCall
    tensors: tuple[TensorOf | None, ...]
    sources: tuple[Source | None, ...]
    nodes: list[CapturedNode]

    @functools.cached_property
    def kinds(self) -> list[Any]:
        return [node.kind for node in self.nodes]


class KeptSizes(NamedTuple):
    """A recording at some sizes."""

    at: AtSizes
    launches: Launches


class SizedRecording:
    """
    A recording for all sizes up to ``top``. What a replay sets are numbers by their place: addresses of inputs, of the
    memory of outputs, and of the recording's own, then what SizedFunction computes from the sizes, then CPU values.

    Attributes:
        values: the CPU values that it delivers
        bound_alignments: of the inputs, in bytes
        allocators: of the memory of outputs
        views, outputs: see ReplayPlan

    Raises:
        RefusedError: there is none.
    """

    def __init__(
        self,
        model: SizedModel,
        inputs: Sequence[InputType],
        sizes: tuple[int, ...],
        top: tuple[int, ...],
        memo: Memo,
        pool: _POOL_HANDLE,
    ) -> None:
        self.model = model
        self.memo = memo
        self.pool = pool
        # By what library calls depend on, the most recently used one last.
        self.rows: OrderedDict[tuple[int, ...], Launches | None] = OrderedDict()
        # Kernels of library calls that its nodes did not take, and why.
        self.refused: list[list[Any]] = []
        self.refusal: Reason | None = None
        self.top = top
        at = model.function.at(sizes)
        tensors = {name: inputs[i] for i, name in model.inputs.items()}
        self.alignments = {name: alignment_of(t.data_ptr()) for name, t in tensors.items()}  # type: ignore[union-attr]
        self.reserve = model.function.at(self.top)
        self.blocks = model.blocks(at, self.reserve)
        self.alone = alone_of(model, self.blocks)
        # By the name of memory in a block: the block's name, and the first byte in the block.
        self.within = {owner: (block.name, n) for block in self.blocks for owner, n in block.offsets.items()}
        capture = FunctionCapture(model, inputs, at, self.alignments, self.reserve, self.blocks, memo, pool)
        self.graph = capture.graph
        self.returned = capture.returned
        units = [*capture.pairs()]
        # Before the addresses are numbered: here constants are found.
        operands = [
            tuple(capture.operand(event, o) for o in call.operands)
            for event, call, _ in units
            if call is not None
        ]
        self.values = capture.values
        self.num_numbers = len(at.numbers)
        self._number_addresses(capture)
        try:
            self.graph.instantiate()
        except RuntimeError as e:
            raise RefusedError(Reason.of(Code.INSTANTIATE_FAILED, error=str(e).partition("\n")[0])) from e
        self.executable = bindings().CUgraphExec(self.graph.raw_cuda_graph_exec())
        self.launches: list[Launch] = []
        self.calls: list[LibraryCall] = []
        of_calls = zip(operands, capture.results)
        for event, call, nodes in units:
            if isinstance(event, LaunchOf):
                self.launches.append(self._launch(capture, event, nodes))
            elif call is None:
                self.launches.append(Launch(event, nodes[0], self._words_of_values(event, nodes[0])))
            else:
                tensors = tuple(itertools.chain(*next(of_calls)))
                sources = tuple(None if t is None else self._address(t.owner, t.offset) for t in tensors)
                self.calls.append(LibraryCall(call, tensors, sources, nodes))
        self.library_nodes = [LibraryNodes([n.node for n in call.nodes], call.sources) for call in self.calls]
        self.of_libraries = [*OrderedSet(n for call in self.calls for n in self._numbers_of(call))]
        order = [node.node for node in capture.nodes]
        attributes = tuple(node.attributes for call in self.calls for node in call.nodes)
        fixed, calls = self._fixed_updates(), self.library_nodes
        draws = [call.call for call in self.calls if call.call.op.overloadpacket in SEEDS]
        self.draws = bool(draws)
        drawing = functools.partial(memo.drawing, draws) if draws else None
        self.graphs = SizedGraphs(self.graph, self.executable, order, attributes, fixed, calls, memo.device, drawing)
        self._outputs()
        kept = self.at_sizes(sizes)
        if kept is None:
            raise differs(at, "an operator launches other kernels alone")
        self.compare(capture, kept.at)

    def close(self) -> None:
        """Let go of replays, which have the graph and are held by it."""
        self.graphs.close()

    @property
    def num_nodes(self) -> int:
        return len(self.launches) + sum(len(call.nodes) for call in self.calls)

    # Numbers

    def _number_addresses(self, capture: FunctionCapture) -> None:
        model, reserve = self.model, self.reserve
        self.owners = [*model.inputs.values(), *self.alone, *(block.name for block in self.blocks)]
        bound = len(self.owners)
        self.owners += [o for o in capture.addresses if o not in self.owners and o not in self.within]
        self.places = {owner: i for i, owner in enumerate(self.owners)}
        self.addresses = [capture.addresses[owner] for owner in self.owners]
        # A replay's allocators and views read sizes and offsets of blocks from its numbers, so these are among them.
        self.constants = {n: len(self.owners) - bound + i for i, n in enumerate(self._numbers_of_blocks())}
        self.owners += map(str, self.constants)
        self.addresses += self.constants
        self.fixed = self.addresses[bound:]
        self.alignments.update((o, alignment_of(a)) for o, a in zip(self.owners[bound:], self.fixed))
        self.alignments.update((owner, MAX_ALIGNMENT) for owner in model.returned)
        own = (model.memory[o] for o in (*self.owners[bound:], *self.within) if o in model.memory)
        # Layers have memory of the same layouts.
        layouts = {(t.size, t.stride, t.dtype): t for t in own if self._varies(t)}
        self.reserved = [(t, max(reserve.extent(t), capture.at.extent(t))) for t in layouts.values()]
        self.bound_alignments = tuple(self.alignments[owner] for owner in model.inputs.values())

    def _numbers_of_blocks(self) -> OrderedSet[int]:
        known, outputs = self.model.function.known, self.model.function.outputs
        saved = (o for o in outputs if isinstance(o, TensorOf) and o.owner in self.within)
        starts = (self.within[o.owner][1] + known(o.offset) for o in saved)  # type: ignore[operator]
        return OrderedSet([1, *(block.elements for block in self.blocks), *starts])

    def _varies(self, t: TensorOf) -> bool:
        return any(self.model.function.known(n) is None for n in (*t.size, *t.stride))

    def _number(self, place: int) -> int:
        return len(self.owners) + place

    def _address(self, owner: str, offset: int) -> Source:
        """Return where a call has an address. ``offset`` is the place of the bytes behind ``owner`` among the numbers."""
        within, first = self.within.get(owner, (owner, 0))
        base, known = self.places[within], self.model.function.known(offset)
        return Source(base, first, self._number(offset)) if known is None else Source(base, first + known, None)

    def numbers(self, at: AtSizes) -> tuple[int, ...]:
        """Return what a replay sets, behind the addresses of a call."""
        return *self.fixed, *at.numbers

    # Nodes

    def _launch(self, capture: FunctionCapture, event: LaunchOf, nodes: list[CapturedNode]) -> Launch:
        if not nodes:
            raise differs(capture.at, f"{event.kernel} launches nothing")
        (node,) = nodes
        functions = [int(launcher.kernel.function) for launcher in self.model.spec.objects[event.kernel].launchers]
        if not node.is_kernel or node.function not in functions:
            raise differs(capture.at, f"{event.kernel} is another kernel")
        known = OrderedSet((parameter, 0) for parameter, *_ in event.pointers)
        for buffer, offset, value in node.words():
            if capture.placeholders.find(value) is not None and (buffer, offset) not in known:
                raise unknown(event.kernel)
        return Launch(event, node, self._words(event, node))

    def _fixed_updates(self) -> list[NodeUpdate]:
        """Return new updates that set the nodes of Triton kernels, and switch them on or off."""
        updates = []
        for launch in self.launches:
            # What is compared is not what an executable graph's node holds.
            held, event = launch.node.copied(), launch.event
            if isinstance(event, LaunchOf):
                switch = Word(self._number(event.is_launched), 0, _word(bytearray(4), 0, 4))
                updates += [
                    held.update(self.executable, held.node, self._words(event, held)),
                    enabled_update(self.executable, held.node, switch),
                ]
            else:
                updates.append(held.update(self.executable, held.node, self._words_of_values(event, held)))
        return updates

    def _words_of_values(self, event: DeliverOf, node: CapturedNode) -> list[Word]:
        """Return the words of a Deliver's kernel: where it writes, and the values."""
        # A value's place is its token's among all.
        first = self._number(self.num_numbers) - self.values.all_tokens().start
        tokens = self.values.tokens_of(self.model.delivers[event.deliver])
        values = [Word(first + t, 0, _word(node.buffers[1], WORD_BYTES * i, WORD_BYTES)) for i, t in enumerate(tokens)]
        return [Word(self.places[event.results[0].owner], 0, _word(node.buffers[0], 0, WORD_BYTES)), *values]

    def _words(self, event: LaunchOf, node: CapturedNode) -> list[Word]:
        words: list[Word] = []
        for parameter, owner, offset in event.pointers:
            # The address of a constant stays.
            if owner in self.places or owner in self.within:
                base, delta, plus = self._address(owner, offset)
                words.append(Word(base, delta, _word(node.buffers[parameter], 0, WORD_BYTES), plus))
        for parameter, nbytes, number in event.words:
            words.append(Word(self._number(number), 0, _word(node.buffers[parameter], 0, nbytes)))
        return words + [Word(self._number(n), 0, p) for n, p in zip(event.grid, node.grid_places())]

    def _numbers_of(self, call: LibraryCall) -> Iterator[int]:
        """Yield the places of the numbers that decide on what a library call launches."""
        for t in call.tensors[: len(call.call.operands)]:
            if t is not None:
                yield from (n for n in (*t.size, *t.stride, t.offset) if self.model.function.known(n) is None)

    # Sizes

    def at_sizes(self, sizes: tuple[int, ...]) -> KeptSizes | None:
        """Return the recording at these sizes, None if it cannot do them."""
        try:
            at = self.model.function.at(sizes)
        except ZeroDivisionError:
            return None
        if any(at.extent(t) > nbytes for t, nbytes in self.reserved):
            return None
        key = tuple(at.numbers[n] for n in self.of_libraries)
        if key not in self.rows or ((known := self.rows[key]) is not None and known.was_dropped):
            self.rows[key] = self._launches(at, key)
            if len(self.rows) > MAX_ROWS:
                self.rows.popitem(last=False)
        self.rows.move_to_end(key)
        return None if (launches := self.rows[key]) is None else KeptSizes(at, launches)

    def _launches(self, at: AtSizes, row: tuple[int, ...]) -> Launches | None:
        entries = self._entries(at)
        if any(entries[like].kinds != self.calls[like].kinds for like in self.distinct):
            # The nodes of a graph are its own.
            return None
        count = self._number(self.num_numbers) + self.values.num_words
        launches = Launches(count, row, entries)
        return None if self.refused and launches.kernels in self.refused else launches

    def _entries(self, at: AtSizes) -> tuple[Entry, ...]:
        """Return what each library call launches. Calls with one signature at all sizes share an entry."""
        signatures = self._signatures(self.distinct, at)
        by_call = dict(zip(signatures, self.memo.entries([*signatures.values()])))
        return tuple(by_call[like] for like in self.alike)

    @functools.cached_property
    def alike(self) -> list[int]:
        """For each library call the first one that has the same signature at all sizes."""
        first: dict[Any, int] = {}
        return [first.setdefault(self._identity(call), i) for i, call in enumerate(self.calls)]

    @functools.cached_property
    def distinct(self) -> list[int]:
        return [*OrderedSet(self.alike)]

    def _identity(self, call: LibraryCall) -> tuple[Any, ...]:
        operands = (t for t in call.tensors[: len(call.call.operands)] if t is not None)
        layouts = tuple((t.size, t.stride, t.offset, t.dtype, self.alignments[t.owner]) for t in operands)
        return call.call.op, layouts, call.call.arguments

    def _signatures(self, calls: Iterable[int], at: AtSizes) -> dict[int, Signature]:
        """Return the signature of each of these library calls."""
        found, chosen_by = {}, settings()
        for i in calls:
            call = self.calls[i].call
            operands = [
                (Allocation(*at.layout(t)), min(self.alignments[t.owner], alignment_of(at.offset(t))))
                for t in self.calls[i].tensors[: len(call.operands)]
                if t is not None
            ]
            found[i] = Signature(call.op, tuple(operands), call.arguments, chosen_by)
        return found

    # Outputs

    def _outputs(self) -> None:
        model = self.model
        memory = [model.memory[owner] for owner in self.alone]
        numbers = [(self._in_numbers(t.size), self._in_numbers(t.stride), t.dtype) for t in memory]
        numbers += [((self.constants[b.elements],), (self.constants[1],), b.dtype) for b in self.blocks]
        self.allocators = [allocator_at(*layout, self.memo.device) for layout in numbers]
        self.views: list[tuple[Any, ...]] = []
        self.outputs: list[tuple[str, Any]] = []
        for o, i in zip(model.function.outputs, self.returned, strict=True):
            if not isinstance(o, TensorOf):
                self.outputs.append(("constant", None) if o is None else ("number", *self._in_numbers([o])))
            elif i is not None:
                self.outputs.append(("input", i))
            elif o in memory:
                self.outputs.append(("bound", len(model.inputs) + memory.index(o)))
            else:
                base, bytes_in_block, _ = self._address(o.owner, o.offset)
                (offset,) = self._in_numbers([o.offset])
                if o.owner in self.within:
                    offset = self.constants[bytes_in_block]
                view = base, self._in_numbers(o.size), self._in_numbers(o.stride), offset, o.dtype.itemsize
                if view not in self.views:
                    self.views.append(view)
                first = len(model.inputs) + len(self.allocators)
                self.outputs.append(("bound", first + self.views.index(view)))

    def _in_numbers(self, places: Iterable[int]) -> tuple[int, ...]:
        """Return where the numbers at these places are in ``numbers``."""
        return tuple(len(self.fixed) + place for place in places)

    # Proof

    def is_compared(self, kept: KeptSizes) -> bool:
        """Return whether what each library call launches has forms that were compared."""
        return all(kept.launches.calls[like].is_compared for like in self.distinct)

    def confirm(self, kept: KeptSizes) -> bool:
        """Capture the calls whose forms were not compared once more. Return whether all forms are compared then."""
        new = [like for like in self.distinct if not kept.launches.calls[like].is_compared]
        calls = {signature: kept.launches.calls[i] for i, signature in self._signatures(new, kept.at).items()}
        return not calls or self.memo.confirm(calls)

    def compare(self, capture: FunctionCapture, at: AtSizes) -> None:
        """Compare a capture, node by node, with what a replay at its sizes launches. Raises RefusedError."""
        # Going through the nodes also finds where CPU values were delivered.
        units = [*capture.pairs()]
        addresses = [capture.addresses.get(o, a) for o, a in zip(self.owners, self.addresses)]
        numbers = [*addresses, *at.numbers, *self.values.all_tokens()]
        launches, calls = iter(self.launches), iter(self._signatures(range(len(self.calls)), at).items())
        temporary = PoolRanges(self.memo.pool)
        for _, traced, nodes in units:
            if traced is None:
                launch = next(launches)
                for word in launch.words:
                    word.write(numbers)
                if nodes and not launches_same(launch.node, nodes[0]):
                    raise differs(at, f"a kernel is expected to be {launch.node} and is {nodes[0]}")
            else:
                i, signature = next(calls)
                self._compare_call(self.calls[i], signature, traced, nodes, numbers, capture, at, temporary)
        for form in itertools.chain(*(entry.forms for entry in self._entries(at))):
            form.is_compared = True

    def _compare_call(
        self,
        call: LibraryCall,
        signature: Signature,
        traced: TracedCall,
        nodes: list[CapturedNode],
        numbers: list[int],
        capture: FunctionCapture,
        at: AtSizes,
        temporary: PoolRanges,
    ) -> None:
        # An operator's own memory of results, which the function gets elsewhere.
        results = [operand.address for operand in traced.results]

        def address(slot: Slot) -> int:
            first = slot.tensor - len(traced.operands)
            if first >= 0:
                return results[first] + slot.delta
            word, offset, plus = call.sources[slot.tensor]
            return numbers[word] + offset + slot.delta + (0 if plus is None else numbers[plus])

        entry = self.memo.entry(signature)
        comparison = CallComparison(
            entry=entry,
            nodes=nodes,
            address=address,
            is_temporary=temporary,
            is_elsewhere=capture.temporary,
            undefined=functools.partial(self.memo.undefined, entry, signature),
        )
        if (difference := comparison.difference()) is not None:
            raise differs(at, f"{traced.op} {difference}")

    def scratch(self, inputs: Sequence[InputType], at: AtSizes) -> FunctionCapture:
        """Return a capture at other sizes, which is never launched."""
        # In the memory of the recording, which holds as much.
        return FunctionCapture(self.model, inputs, at, self.alignments, self.reserve, self.blocks, self.memo, self.pool)

    # Calls

    def is_trusted(self, kept: KeptSizes) -> bool:
        """
        Return whether a call may replay these launches without a proof: there was one, or each library call has a form
        that was compared, and the graph was proven with other launches.
        """
        launches = kept.launches
        if launches.on is None and (known := self.graphs.known(launches)) is not None:
            launches.begin(known, self.library_nodes)
        return launches.is_trusted or (self.is_compared(kept) and launches.trust())

    def bind(self, inputs: Sequence[InputType], kept: KeptSizes, *, again: bool = False) -> list[torch.Tensor] | None:
        """
        Set the nodes for a call: with ``again`` to these launches, to others, and to these. Return its bound inputs and
        the memory of its outputs, None if a node refused.
        """
        tensors: list[torch.Tensor] = [inputs[i] for i in self.model.inputs]  # type: ignore[misc]
        addresses = [t.data_ptr() for t in tensors]
        if any(a % n for a, n in zip(addresses, self.bound_alignments)) or any(map(is_lazy, tensors)):
            return None
        numbers = self.numbers(kept.at)
        tensors += [allocate(numbers) for allocate in self.allocators]
        pointers = [*(t.data_ptr() for t in tensors), *numbers, *self.values.words()]
        try:
            if kept.launches.on is None:
                found = self.graphs.find(kept.launches, pointers, self._fixed_updates)
                kept.launches.begin(found, self.library_nodes)
            for launches in self._others(kept.launches) if again else ():
                kept.launches.move(pointers)
                launches.move(pointers)
            kept.launches.move(pointers)
        except DriverError as e:
            self.refuse(kept, str(e))
            return None
        return tensors

    def _others(self, launches: Launches) -> list[Launches]:
        """Return the launches of other sizes that this graph had last, if there are some."""
        others = (other for other in self.rows.values() if other is not None and other is not launches)
        return [other for other in others if other.on is launches.on][-1:]

    def refuse(self, kept: KeptSizes, error: str) -> None:
        """Take note that the driver refused kernels for these nodes. ``at_sizes`` returns None for sizes with these kernels."""
        log.info("a recording for many sizes cannot be set to %s: %s", kept.at.sizes, error)
        self.refusal = Reason.of(Code.DRIVER, error=error)
        self.refused.append(kept.launches.kernels)
        self.rows.clear()

    def launch(self, inputs: Sequence[InputType], kept: KeptSizes, tensors: list[torch.Tensor]) -> OutputType:
        """Launch the graph in a call for which ``bind`` has set it."""
        kept.launches.on.graph.replay()  # type: ignore[union-attr]
        numbers = self.numbers(kept.at)
        tensors = [*tensors, *(view_at(tensors, view, numbers) for view in self.views)]
        given = {"input": inputs, "bound": tensors, "number": numbers}
        return [value if kind == "constant" else given[kind][value] for kind, value in self.outputs]  # type: ignore[index]


def _word(buffer: Any, offset: int, nbytes: int) -> ctypes.c_uint64 | ctypes.c_uint32:
    type_ = {4: ctypes.c_uint32, 8: ctypes.c_uint64}[nbytes]
    return type_.from_buffer(buffer, offset)
