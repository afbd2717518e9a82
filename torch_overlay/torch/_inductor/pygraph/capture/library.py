"""
What operators launch: the kernels that a library chooses for the sizes of a call. A call is captured alone, at
placeholders, the first time that its signature comes, and its nodes are kept. Layers and functions share them, and the
pool of their temporary memory, because the calls of one manager follow one another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import weakref
from collections import OrderedDict
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch._inductor import cudagraph_trees
from torch._inductor.pygraph.capture.allocation import Allocation
from torch._inductor.pygraph.capture.compared import CallComparison, undefined_bytes
from torch._inductor.pygraph.capture.copying import clean_up_failed_capture
from torch._inductor.pygraph.graph import placeholder
from torch._inductor.pygraph.graph.captured import read_graph, Shared
from torch._inductor.pygraph.graph.driver import bindings
from torch._inductor.pygraph.graph.edges import capturing_graph, count_nodes
from torch._inductor.pygraph.graph.entry import Entry, Form, form_key, Slot
from torch._inductor.pygraph.graph.memory import PoolRanges
from torch._inductor.pygraph.types.reason import Code, first_line, Reason, RefusedError
from torch.utils import _pytree as pytree
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import TorchDispatchMode


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager
    from torch._inductor.pygraph.capture.compared import Place
    from torch._inductor.pygraph.graph.captured import CapturedNode
    from torch._inductor.pygraph.graph.placeholder import Placeholder
    from torch.cuda import _POOL_HANDLE


log = logging.getLogger(__name__)

aten = torch.ops.aten

# Of a function's random numbers. The generator's state is where all graphs read it.
SEEDS = OrderedSet([aten.randint])

# Of cuBLAS, which has a workspace for each stream.
PRODUCTS = OrderedSet([aten.mm, aten.addmm, aten.bmm, aten.baddbmm])

# Operators that depend on the metadata of their operands, and on nothing else.
OPERATORS = OrderedSet(
    [
        *PRODUCTS,
        aten.convolution,
        aten.zero_,
        *SEEDS,
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_flash_attention_backward,
        aten._scaled_dot_product_efficient_attention_backward,
    ]
)
NAMES = OrderedSet(packet.__name__ for packet in OPERATORS)
NAMES_OF_PRODUCTS = OrderedSet(packet.__name__ for packet in PRODUCTS)


def operator_name(call: str) -> str:
    """Return the name of the operator that generated code calls, of a name as OperatorAt has it."""
    return [*call.split("."), call][1].removeprefix("bias_")


# Of all entries of a memo.
MAX_MEMO_BYTES = 64 << 20


class _Tensor:
    """Stands for a tensor in ``Arguments.values``."""


class Arguments(NamedTuple):
    """
    The arguments of an operator's call, without the tensors.

    Attributes:
        values: of positional arguments, then of keyword ones
        names: of the latter
    """

    values: tuple[Any, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Arguments, list[torch.Tensor]]:
        """Return the arguments, and the tensors in their order."""
        given = [*args, *kwargs.values()]
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        values = (_Tensor if isinstance(v, torch.Tensor) else tuple(v) if isinstance(v, list) else v for v in given)
        return cls(tuple(values), tuple(kwargs)), tensors

    def call(self, op: Any, tensors: Iterable[torch.Tensor]) -> Any:
        """Call an operator with these arguments and tensors."""
        rest = iter(tensors)
        values = [next(rest) if value is _Tensor else value for value in self.values]
        first = len(values) - len(self.names)
        return op(*values[:first], **dict(zip(self.names, values[first:])))


class Signature(NamedTuple):
    """
    What an operator's launches depend on: metadata and alignment in bytes of each tensor, other arguments, and settings of
    the process.
    """

    op: Any
    operands: tuple[tuple[Allocation, int], ...]
    arguments: Arguments
    settings: tuple[Any, ...]


def settings() -> tuple[Any, ...]:
    """Return what a library chooses by, beside the operands."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return (
        # Both have what the older settings mean. To read those raises if the program uses the newer ones.
        matmul.fp32_precision,
        cudnn.conv.fp32_precision,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_accumulation,
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.preferred_blas_library(),
        cudnn.enabled,
        cudnn.deterministic,
        cudnn.benchmark,
    )


class Scratch:
    """Captures what never runs, or what a SizedRecording runs, on the stream of a manager's graphs."""

    def __init__(self, device_index: int, stream: torch.cuda.Stream) -> None:
        self.device = device_index
        self.stream = stream
        # As nodes of trees name it, for clean_up_failed_capture.
        self.cuda_graphs_pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Any], pool: _POOL_HANDLE) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Return the graph, which is not instantiated, and what ``run`` returned. Raises RefusedError."""
        stream = torch.cuda.current_stream(self.device)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    return graph, run()
                finally:
                    graph.capture_end()
        except RefusedError as e:
            refusal = RefusedError(e.reason, is_capturable=e.is_capturable)
        except Exception as e:
            refusal = RefusedError(Reason.of(Code.CAPTURE_FAILED, error=first_line(e)))
        # The capture's tensors can be freed now: the frames of its error held them, and Python has deleted the error.
        self.cuda_graphs_pool = pool
        clean_up_failed_capture(self, stream)
        raise refusal


class Memo(Scratch):
    """
    The entries of one manager: the least recently used ones are dropped.

    Attributes:
        known: entries, by signature
        nbytes: bytes that these entries take
        forms: by form_key
        shared: facts that the nodes of entries share
    """

    def __init__(self, manager: CUDAGraphTreeManager) -> None:
        super().__init__(manager.device_index, manager.stream)
        self.pool = torch.cuda.graph_pool_handle()
        # Hold the pool, also while no graph does.
        torch._C._cuda_beginAllocateCurrentThreadToPool(self.device, self.pool)
        torch._C._cuda_endAllocateToPool(self.device, self.pool)
        weakref.finalize(self, torch._C._cuda_releasePool, self.device, self.pool)
        self.known: OrderedDict[Signature, Entry] = OrderedDict()
        self.nbytes = 0
        self.forms: dict[Any, Form] = {}
        # No function's address gets another function: libraries stay loaded.
        self.shared = Shared()

    @contextlib.contextmanager
    def workspace(self) -> Iterator[None]:
        """
        A context in which cuBLAS has its workspace in this pool, also in captures whose memory is of another pool. A
        replay launches kernels of entries, with their workspace. A workspace in the other pool would stay there unused.
        """
        with cublas_workspaces():
            with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
                torch._C._cuda_beginAllocateCurrentThreadToPool(self.device, self.pool)
                try:
                    # It takes the workspace.
                    torch.cuda.current_blas_handle()
                finally:
                    torch._C._cuda_endAllocateToPool(self.device, self.pool)
                    torch._C._cuda_releasePool(self.device, self.pool)
            yield

    def entry(self, signature: Signature) -> Entry:
        """As ``entries``, of one call."""
        (entry,) = self.entries([signature])
        return entry

    def entries(self, calls: Sequence[Signature]) -> list[Entry]:
        """Return the entry of each call. Raises RefusedError: a call cannot be captured."""
        missing = [*OrderedSet(calls) - self.known.keys()]
        try:
            made = self.captured(missing)
        except RefusedError:
            # Others may be captured.
            made = [entry for signature in missing for entry in self.captured([signature])]
        self.known.update(zip(missing, made))
        self.nbytes += sum(entry.nbytes for entry in made)
        found = [self.known[signature] for signature in calls]
        for signature in calls:
            self.known.move_to_end(signature)
        while self.nbytes > MAX_MEMO_BYTES and len(self.known) > len(calls):
            _, dropped = self.known.popitem(last=False)
            self.nbytes -= dropped.nbytes
        return found

    def undefined(self, entry: Entry, signature: Signature, captures: bool) -> OrderedSet[Place]:
        """
        Return the bytes of an entry that the library leaves undefined. The forms of the entry have them. ``captures``:
        whether to capture the call again first, to find more.
        """
        if captures:
            self._find_undefined({signature: entry})
        return OrderedSet((k, *place) for k, form in enumerate(entry.forms) for place in form.undefined)

    def _find_undefined(self, calls: dict[Signature, Entry]) -> None:
        captures = undefined_bytes(
            [*calls.values()],
            lambda around: self.captured([*calls], around=around),
            PoolRanges(self.pool),
        )
        for entry, undefined in zip(calls.values(), captures):
            for node, buffer, byte in undefined:
                entry.forms[node].undefined.add((buffer, byte))

    def confirm(self, calls: dict[Signature, Entry]) -> bool:
        """
        Capture the calls once more, with operands at other addresses. Return whether the library passes the parameters that
        the entries have for these addresses. If so, mark the forms of the entries as compared.
        """
        others = self.captured([*calls], poison=placeholder.UNWRITTEN)
        self._find_undefined(calls)
        memory = PoolRanges(self.pool)
        for (signature, entry), other in zip(calls.items(), others):
            comparison = CallComparison(
                entry=entry,
                nodes=other.nodes,
                address=lambda slot, other=other: other.addresses[slot.tensor] + slot.delta,
                is_temporary=memory,
                is_elsewhere=memory,
                undefined=functools.partial(self.undefined, entry, signature),
            )
            if (difference := comparison.difference()) is not None:
                log.info("%s %s", signature.op, difference)
                return False
            for form in entry.forms:
                form.is_compared = True
        return True

    def drawing(self, calls: Sequence[TracedCall]) -> torch.cuda.CUDAGraph:
        """
        Return a graph that draws as the calls do. A replay sets the memory from which all graphs read the generator's state,
        and advances the generator.
        """

        def run() -> None:
            for call in calls:
                call.arguments.call(call.op, (o.layout.allocator(self.device)() for o in call.operands))

        with cudagraph_trees.preserve_rng_state():
            graph, _ = self.capture(run, self.pool)
        graph.instantiate()
        return graph

    def captured(
        self,
        calls: Sequence[Signature],
        *,
        poison: int = placeholder.ZERO,
        around: Callable[[Callable[[], Any]], Any] = lambda run: run(),
    ) -> list[Entry]:
        """
        Return entries of calls, captured in a row.

        Args:
            poison: of the placeholders of operands
            around: runs what it is called with: each operator
        """
        if not calls:
            return []
        given = [self._operands(signature, poison) for signature in calls]
        ends = [0]

        def run() -> list[list[tuple[int, int]]]:
            results = []
            graph = capturing_graph()
            for signature, (_, operands) in zip(calls, given):
                made = around(functools.partial(signature.arguments.call, signature.op, operands))
                results.append([(t.data_ptr(), placeholder.storage_extent(t)) for t in new_tensors(made, operands)])
                ends.append(count_nodes(graph))
            return results

        with cublas_workspaces():
            graph, results = self.capture(run, self.pool)
        nodes = read_graph(bindings().CUgraph(graph.raw_cuda_graph()), self.shared)
        each = zip(given, results, itertools.pairwise(ends))
        return [
            self._entry(places, of_call, _without_edge(nodes[first:end]), graph)
            for (places, _), of_call, (first, end) in each
        ]

    def _operands(self, signature: Signature, poison: int) -> tuple[list[tuple[Placeholder, int]], list[torch.Tensor]]:
        """Return placeholders of operands with the bytes that each takes, and tensors there."""
        layouts = [layout for layout, _ in signature.operands]
        nbytes = [placeholder.extent(*layout) for layout in layouts]
        alignments = (alignment for _, alignment in signature.operands)
        places = placeholder.arena(self.device, poison).place([*zip(nbytes, alignments)])
        each = zip(places, layouts, nbytes)
        operands = [placeholder.tensor_of(p.address, *layout, self.device, n) for p, layout, n in each]
        return [*zip(places, nbytes)], operands

    def _entry(
        self,
        operands: Sequence[tuple[Placeholder, int]],
        results: Sequence[tuple[int, int]],
        nodes: tuple[CapturedNode, ...],
        graph: torch.cuda.CUDAGraph,
    ) -> Entry:
        placeholders = placeholder.PlaceholderMap([place for place, _ in operands])
        addresses = *(place.address for place, _ in operands), *(address for address, _ in results)
        lowest = min((*placeholders.starts, *addresses), default=0)
        slots: list[tuple[Slot, ...]] = []
        for node in nodes:
            of_node = []
            for buffer, offset, value in node.words(lowest):
                hit = placeholders.find(value)
                if hit is not None and placeholders.is_better_aligned(*hit):
                    raise RefusedError(Reason.of(Code.HIDDEN_ALIGNMENT))
                if (hit := hit or _find(results, len(operands), value)) is not None:
                    of_node.append(Slot(buffer, offset, *hit))
            slots.append(self.shared.same(tuple(of_node)))
        forms = tuple(map(self._form, nodes, slots))
        met = [slot.tensor for of_node in slots for slot in of_node]
        is_whole = all(i in met for i, (_, nbytes) in enumerate([*operands, *results[:1]]) if nbytes)
        return Entry(nodes, self.shared.same(tuple(slots)), graph, self.shared.same(forms), addresses, is_whole)

    def _form(self, node: CapturedNode, slots: Sequence[Slot]) -> Form:
        key = form_key(node, slots)
        if (known := self.forms.get(key)) is None:
            known = self.forms[key] = Form()
        return known


def _without_edge(nodes: Sequence[CapturedNode]) -> tuple[CapturedNode, ...]:
    """Return the nodes of a call as if no other call came before it. There may be none."""
    return (*(node.alone() for node in nodes[:1]), *nodes[1:])


def _find(results: Sequence[tuple[int, int]], first: int, address: int) -> tuple[int, int] | None:
    for i, (start, nbytes) in enumerate(results):
        if start <= address < start + max(nbytes, 1):
            return first + i, address - start
    return None


def new_tensors(results: Any, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors among the results of an operator that are none of its operands."""
    found = results if isinstance(results, (tuple, list)) else (results,)
    return [t for t in found if isinstance(t, torch.Tensor) and t.is_cuda and not any(t is o for o in operands)]


class Operand(NamedTuple):
    """A tensor of a call as it was captured."""

    address: int
    layout: Allocation

    @classmethod
    def of(cls, t: torch.Tensor) -> Operand:
        return cls(t.data_ptr(), Allocation.of(t))


@dataclasses.dataclass(frozen=True, eq=False)
class TracedCall:
    """A call that was captured as the nodes from ``first`` to before ``last``."""

    op: Any
    operands: list[Operand]
    results: list[Operand]
    arguments: Arguments
    first: int
    last: int


class CallTrace(TorchDispatchMode):
    """
    Notes the calls of OPERATORS during a capture, and an ``unknown`` one that adds nodes to the graph. ``place``, given
    the number of a call and its new results, returns the tensors that the function gets in their place.
    """

    def __init__(self, place: Callable[[int, list[torch.Tensor]], list[torch.Tensor]]) -> None:
        super().__init__()
        self.place = place
        self.calls: list[TracedCall] = []
        self.unknown: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = count_nodes(capturing_graph())
        results = func(*args, **kwargs)
        last = count_nodes(capturing_graph())
        if func.overloadpacket not in OPERATORS or _draws(func, args, kwargs):
            if first != last:
                self.unknown = self.unknown or str(func)
            return results
        arguments, tensors = Arguments.of(args, kwargs)
        made = new_tensors(results, tensors)
        operands = [*map(Operand.of, tensors)]
        self.calls.append(TracedCall(func, operands, [*map(Operand.of, made)], arguments, first, last))
        placed = dict(zip(map(id, made), self.place(len(self.calls) - 1, made)))
        return pytree.tree_map(lambda leaf: placed.get(id(leaf), leaf), results)


def _draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether an attention drops out, by numbers that a graph would draw anew."""
    names = [argument.name for argument in func._schema.arguments]
    return bool({**dict(zip(names, args)), **kwargs}.get("dropout_p"))


def alignment_of(address: int) -> int:
    """Return by how many bytes an address is aligned, as far as libraries look."""
    return min(address & -address, placeholder.MAX_ALIGNMENT) or placeholder.MAX_ALIGNMENT


def cublas_workspaces() -> Any:
    """A context in which cuBLAS takes its workspaces from the memory of captures."""
    return cudagraph_trees.clear_cublas_manager()
