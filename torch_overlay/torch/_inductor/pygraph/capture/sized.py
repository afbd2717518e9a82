"""
A recording of a function for many sizes.

It is captured in a call, with memory for the largest sizes of a bucket, and replayed at all sizes
of the bucket. A SizeMap says which parameters and grids of Triton kernels depend on the sizes, and
how. What operators launch is known from library.Memo. Outputs have their exact size and strides.

All tensors that the function takes, weights as well, are bound, and no output lies in a pool. So
trees know nothing of such a recording: to them the call is an uncaptured one.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import logging
from collections import OrderedDict
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor.pygraph.capture.allocation import Allocation
from torch._inductor.pygraph.capture.at_sizes import differs, FunctionCapture, unknown
from torch._inductor.pygraph.capture.compared import CallComparison, launches_same
from torch._inductor.pygraph.capture.library import alignment_of, cublas_workspaces, settings, Signature
from torch._inductor.pygraph.graph.binding import Word, WORD_BYTES
from torch._inductor.pygraph.graph.driver import bindings, DriverError
from torch._inductor.pygraph.graph.memory import PoolRanges
from torch._inductor.pygraph.graph.placeholder import MAX_ALIGNMENT
from torch._inductor.pygraph.graph.sized import enabled_update, Launches, SizedNodes
from torch._inductor.pygraph.trees.cached import is_lazy
from torch._inductor.pygraph.types.reason import Code, Reason, RefusedError
from torch._inductor.pygraph.values.sizes import LaunchOf, OperatorOf, TensorOf
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._inductor.cudagraph_utils import OutputType
    from torch._inductor.pygraph.capture.at_sizes import SizedModel
    from torch._inductor.pygraph.capture.library import Entry, Memo, Slot, TracedCall
    from torch._inductor.pygraph.graph.binding import NodeUpdate
    from torch._inductor.pygraph.graph.captured import CapturedNode
    from torch._inductor.pygraph.values.sizes import AtSizes
    from torch._inductor.utils import InputType
    from torch.cuda import _POOL_HANDLE


log = logging.getLogger(__name__)

# Sizes of a recording that are kept.
MAX_KEPT_SIZES = 128

# Generated code makes views by it.
reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Launch:
    """A Triton kernel of a recording: the update of its node, and the one that switches it on or off."""

    event: LaunchOf
    node: CapturedNode
    update: NodeUpdate
    switch: NodeUpdate


@dataclasses.dataclass(frozen=True, eq=False)
class LibraryCall:
    """
    Args:
        tensors: operands, then results; None is no tensor of the function
        indices: of these, among the numbers of a call: (index, offset)
        nodes: of the recording
    """

    call: TracedCall
    tensors: tuple[TensorOf | None, ...]
    indices: tuple[tuple[int, int] | None, ...]
    nodes: list[CapturedNode]

    @property
    def kinds(self) -> list[bool]:
        return [node.is_kernel for node in self.nodes]


@dataclasses.dataclass(frozen=True, eq=False)
class KeptSizes:
    """
    What a replay does at some sizes.

    Args:
        entries, updates: what each library call launches
        allocators: of the memory that is returned
        outputs: (kind, number, layout); see SizedRecording.launch
    """

    at: AtSizes
    entries: list[Entry]
    updates: list[list[NodeUpdate]]
    launches: Launches
    allocators: list[Callable[[], torch.Tensor]]
    outputs: list[tuple[str, Any, Any]]


class SizedRecording:
    """
    A recording for all sizes up to ``top``.

    What a replay sets are numbers by their place: addresses of inputs, of the memory of outputs, and
    of the recording's own, then what SizedFunction computes from the sizes, then sums of both.

    Raises:
        RefusedError: there is none.
    """

    def __init__(
        self, model: SizedModel, inputs: Sequence[InputType], sizes: tuple[int, ...], memo: Memo, pool: _POOL_HANDLE
    ) -> None:
        self.model = model
        self.memo = memo
        self.pool = pool
        self.kept: OrderedDict[tuple[int, ...], KeptSizes | None] = OrderedDict()
        # Kernels of library calls that its nodes did not take, and why.
        self.refused: list[list[Any]] = []
        self.refusal: Reason | None = None
        self.top = model.top(sizes)
        at = model.function.at(sizes)
        tensors = {name: inputs[i] for i, name in model.inputs.items()}
        self.alignments = {name: alignment_of(t.data_ptr()) for name, t in tensors.items()}  # type: ignore[union-attr]
        self.reserve = model.function.at(self.top)
        self.capture = FunctionCapture(model, inputs, at, self.alignments, self.reserve, memo, pool)
        self.graph = self.capture.graph
        self.returned = self.capture.returned
        self.input_of = {name: i for i, name in model.inputs.items()}
        self._index()
        try:
            self.graph.instantiate()
        except RuntimeError as e:
            raise RefusedError(Reason.of(Code.INSTANTIATE_FAILED, error=str(e).partition("\n")[0])) from e
        self.executable = bindings().CUgraphExec(self.graph.raw_cuda_graph_exec())
        self._units()
        kept = self.at_sizes(sizes)
        if kept is None:
            raise differs(at, "an operator launches other kernels alone")
        self.compare(self.capture, kept.at)
        order = [node.node for node in self.capture.nodes]
        self.nodes = SizedNodes(order, self.executable, len(self._numbers(self.addresses, at)), kept.launches)
        # Its addresses, which a call sets.
        del self.capture

    @property
    def num_nodes(self) -> int:
        return len(self.launches) + sum(len(call.nodes) for call in self.calls)

    # Numbers

    def _index(self) -> None:
        capture, model, reserve = self.capture, self.model, self.reserve
        self.units = [*capture.pairs()]
        # Before the addresses are numbered: here constants are found.
        self.operands = [
            tuple(capture.operand(event, o) for o in call.operands)
            for event, call, _ in self.units
            if isinstance(event, OperatorOf)
        ]
        self.owners = [*model.inputs.values(), *model.returned]
        bound = len(self.owners)
        self.owners += [owner for owner in capture.addresses if owner not in self.owners]
        self.places = {owner: i for i, owner in enumerate(self.owners)}
        self.addresses = [capture.addresses[owner] for owner in self.owners]
        self.fixed = self.addresses[bound:]
        self.alignments.update((o, alignment_of(a)) for o, a in zip(self.owners[bound:], self.fixed))
        self.alignments.update((owner, MAX_ALIGNMENT) for owner in model.returned)
        own = [owner for owner in self.owners[bound:] if owner in model.memory]
        self.reserved = {o: max(reserve.extent(model.memory[o]), capture.at.extent(model.memory[o])) for o in own}
        self.num_numbers = len(capture.at.numbers)
        self.sums: dict[tuple[int, int], int] = {}

    def _number(self, place: int) -> int:
        return len(self.owners) + place

    def _address(self, owner: str, offset: int) -> tuple[int, int]:
        """Return (index, offset) of an address. ``offset`` is the place of a number."""
        base, known = self.places[owner], self.model.function.known(offset)
        if known is not None:
            return base, known
        first = len(self.owners) + self.num_numbers
        return self.sums.setdefault((base, offset), first + len(self.sums)), 0

    def _numbers(self, addresses: list[int], at: AtSizes) -> list[int]:
        numbers = at.numbers
        return [*addresses, *numbers, *(addresses[base] + numbers[offset] for base, offset in self.sums)]

    # Nodes

    def _units(self) -> None:
        operands = iter(self.operands)
        results = iter(self.capture.results)
        self.launches: list[Launch] = []
        self.calls: list[LibraryCall] = []
        for event, call, nodes in self.units:
            if isinstance(event, LaunchOf):
                if not nodes:
                    raise differs(self.capture.at, f"{event.kernel} launches nothing")
                self.launches.append(self._launch(event, nodes[0]))
            else:
                tensors = (*next(operands), *next(results))
                indices = tuple(None if t is None else self._address(t.owner, t.offset) for t in tensors)
                self.calls.append(LibraryCall(call, tensors, indices, nodes))
        self.fixed_updates = [u for launch in self.launches for u in (launch.update, launch.switch)]
        del self.units, self.operands

    def _launch(self, event: LaunchOf, node: CapturedNode) -> Launch:
        functions = [int(launcher.kernel.function) for launcher in self.model.spec.objects[event.kernel].launchers]
        if not node.is_kernel or node.function not in functions:
            raise differs(self.capture.at, f"{event.kernel} is another kernel")
        words: list[Word] = []
        known = OrderedSet[tuple[int, int]]()
        for parameter, owner, offset in event.pointers:
            known.add((parameter, 0))
            # The address of a constant stays.
            if owner in self.places:
                words.append(Word(*self._address(owner, offset), _word(node.buffers[parameter], 0, WORD_BYTES)))
        for parameter, nbytes, number in event.words:
            words.append(Word(self._number(number), 0, _word(node.buffers[parameter], 0, nbytes)))
        words += [Word(self._number(n), 0, p) for n, p in zip(event.grid, node.grid_places())]
        for buffer, offset, value in node.words():
            if self.capture.placeholders.find(value) is not None and (buffer, offset) not in known:
                raise unknown(event.kernel)
        switch = Word(self._number(event.is_launched), 0, _word(bytearray(4), 0, 4))
        return Launch(
            event,
            node,
            node.update(self.executable, node.node, words),
            enabled_update(self.executable, node.node, switch),
        )

    # Sizes

    def at_sizes(self, sizes: tuple[int, ...]) -> KeptSizes | None:
        """Return what a replay does at these sizes, None if the recording cannot do it."""
        if sizes in self.kept:
            self.kept.move_to_end(sizes)
            return self.kept[sizes]
        last = next((kept for kept in reversed(self.kept.values()) if kept is not None), None)
        kept = self.kept[sizes] = self._made_for(sizes, last)
        while len(self.kept) > MAX_KEPT_SIZES:
            self.kept.popitem(last=False)
        return kept

    def _made_for(self, sizes: tuple[int, ...], last: KeptSizes | None) -> KeptSizes | None:
        if any(n > top for n, top in zip(sizes, self.top)):
            return None
        try:
            at = self.model.function.at(sizes)
        except ZeroDivisionError:
            return None
        if any(at.extent(self.model.memory[owner]) > nbytes for owner, nbytes in self.reserved.items()):
            return None
        with cublas_workspaces():
            entries = [self._entry(call, at) for call in self.calls]
        if any(entry.kinds != call.kinds for entry, call in zip(entries, self.calls)):
            # The nodes of a graph are its own.
            return None
        updates = [
            last.updates[i] if last is not None and last.entries[i] is entry else self._updates(call, entry)
            for i, (call, entry) in enumerate(zip(self.calls, entries))
        ]
        nodes = [
            (node.node, launched)
            for call, entry in zip(self.calls, entries)
            for node, launched in zip(call.nodes, entry.nodes)
        ]
        launches = Launches([*self.fixed_updates, *itertools.chain(*updates)], nodes)
        if launches.kernels in self.refused:
            return None
        return KeptSizes(at, entries, updates, launches, *self._outputs(at))

    def _entry(self, call: LibraryCall, at: AtSizes) -> Entry:
        return self.memo.entry(self._signature(call, at), call.call.spec)

    def _signature(self, call: LibraryCall, at: AtSizes) -> Signature:
        operands = [
            (Allocation(*at.layout(t)), min(self.alignments[t.owner], alignment_of(at.offset(t))))
            for t in call.tensors[: len(call.call.operands)]
            if t is not None
        ]
        return Signature(call.call.op, tuple(operands), call.call.arguments, str(call.call.spec), settings())

    def _updates(self, call: LibraryCall, entry: Entry) -> list[NodeUpdate]:
        updates = []
        for node, launched, slots in zip(call.nodes, entry.nodes, entry.slots):
            words = []
            for buffer, offset, tensor, delta in slots:
                # Results that the function does not use stay where the memo has them.
                if (index := call.indices[tensor]) is not None:
                    word = _word(launched.buffers[buffer], offset, WORD_BYTES)
                    words.append(Word(index[0], index[1] + delta, word))
            updates.append(launched.update(self.executable, node.node, words))
        return updates

    def _outputs(self, at: AtSizes) -> tuple[list[Callable[[], torch.Tensor]], list[tuple[str, Any, Any]]]:
        model, device = self.model, self.memo.device
        layouts: dict[str, Any] = {}
        for o in model.function.outputs:
            # An output that fills the memory is the tensor that is allocated.
            if isinstance(o, TensorOf) and o.owner in model.memory and at.offset(o) == 0:
                if at.extent(o) == at.extent(model.memory[o.owner]):
                    layouts.setdefault(o.owner, at.layout(o))
        allocated = [layouts.get(owner, at.layout(model.memory[owner])) for owner in model.returned]
        outputs: list[tuple[str, Any, Any]] = []
        for o, i in zip(model.function.outputs, self.returned, strict=True):
            if not isinstance(o, TensorOf):
                outputs.append(("number", None if o is None else at.numbers[o], None))
            elif i is not None:
                outputs.append(("input", i, None))
            else:
                size, stride, dtype = layout = at.layout(o)
                view = size, stride, at.offset(o) // dtype.itemsize
                if o.owner in model.returned:
                    k = model.returned.index(o.owner)
                    is_whole = at.offset(o) == 0 and layout == allocated[k]
                    outputs.append(("memory", k, None if is_whole else view))
                else:
                    outputs.append(("input", self.input_of[o.owner], view))
        return [Allocation(*layout).allocator(device) for layout in allocated], outputs

    # Proof

    def compare(self, capture: FunctionCapture, at: AtSizes) -> None:
        """
        Compare a capture, node by node, with what a replay at its sizes launches.

        Raises:
            RefusedError: they differ.
        """
        addresses = [capture.addresses.get(o, a) for o, a in zip(self.owners, self.addresses)]
        numbers = self._numbers(addresses, at)
        launches, calls = iter(self.launches), iter(self.calls)
        for event, traced, nodes in capture.pairs():
            if isinstance(event, LaunchOf):
                launch = next(launches)
                launch.update.write(numbers)
                if nodes and not launches_same(launch.node, nodes[0]):
                    raise differs(at, f"{event.kernel} is expected to be {launch.node} and is {nodes[0]}")
            else:
                self._compare_call(next(calls), traced, nodes, numbers, capture, at)

    def _compare_call(
        self,
        call: LibraryCall,
        traced: TracedCall | None,
        nodes: list[CapturedNode],
        numbers: list[int],
        capture: FunctionCapture,
        at: AtSizes,
    ) -> None:
        # An operator's own memory of results, which the function gets elsewhere.
        results = [operand.address for operand in traced.results]

        def address(slot: Slot) -> int:
            first = slot.tensor - len(traced.operands)
            if first >= 0:
                return results[first] + slot.delta
            index, delta = call.indices[slot.tensor]
            return numbers[index] + delta + slot.delta

        comparison = CallComparison(
            entry=self._entry(call, at),
            nodes=nodes,
            address=address,
            is_temporary=PoolRanges(self.memo.pool),
            is_elsewhere=capture.pool,
            capture=functools.partial(self.memo.captured, self._signature(call, at), call.call.spec),
        )
        if (difference := comparison.difference()) is not None:
            raise differs(at, f"{traced.op} {difference}")

    def scratch(self, inputs: Sequence[InputType], at: AtSizes) -> FunctionCapture:
        """Return a capture at other sizes, which is never launched."""
        # In the memory of the recording, which holds as much.
        return FunctionCapture(self.model, inputs, at, self.alignments, self.reserve, self.memo, self.pool)

    # Calls

    def bind(self, inputs: Sequence[InputType], kept: KeptSizes) -> list[torch.Tensor] | None:
        """
        Set the nodes to what they launch in a call. Return the memory of its outputs, or None if the
        recording cannot be bound: the graph must not be launched then.
        """
        tensors: list[torch.Tensor] = [inputs[i] for i in self.model.inputs]  # type: ignore[misc]
        addresses = [t.data_ptr() for t in tensors]
        if any(a % self.alignments[n] for a, n in zip(addresses, self.owners)) or any(map(is_lazy, tensors)):
            return None
        memory = [allocate() for allocate in kept.allocators]
        addresses += [t.data_ptr() for t in memory]
        addresses += self.fixed
        try:
            self.nodes.move(self._numbers(addresses, kept.at), kept.launches)
        except DriverError as e:
            self.refuse(kept, str(e))
            return None
        return memory

    def refuse(self, kept: KeptSizes, error: str) -> None:
        """Do without this recording where its nodes have to launch what they refused."""
        log.info("a recording for many sizes cannot be set to %s: %s", kept.at.sizes, error)
        self.refusal = Reason.of(Code.DRIVER, error=error)
        self.refused.append(kept.launches.kernels)
        self.kept.clear()

    def launch(self, inputs: Sequence[InputType], kept: KeptSizes, memory: list[torch.Tensor]) -> OutputType:
        """Launch the graph in a call for which ``bind`` has set it."""
        self.graph.replay()
        made: dict[tuple[Any, ...], torch.Tensor] = {}
        outputs: list[Any] = []
        for kind, value, view in kept.outputs:
            if kind == "number":
                outputs.append(value)
                continue
            t = memory[value] if kind == "memory" else inputs[value]
            if view is not None:
                if (key := (kind, value, view)) not in made:
                    made[key] = reinterpret_tensor(t, *view)
                t = made[key]
            outputs.append(t)
        return outputs


def _word(buffer: Any, offset: int, nbytes: int) -> ctypes.c_uint64 | ctypes.c_uint32:
    type_ = {4: ctypes.c_uint32, 8: ctypes.c_uint64}[nbytes]
    return type_.from_buffer(buffer, offset)
