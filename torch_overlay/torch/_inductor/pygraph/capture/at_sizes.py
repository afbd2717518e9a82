"""A function that may be recorded for many sizes, and its captures at the sizes of calls."""

from __future__ import annotations

import array
import dataclasses
import itertools
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor import cudagraph_trees
from torch._inductor.pygraph.capture import allocation
from torch._inductor.pygraph.capture.allocation import Allocation, place, poison_of, with_allocator
from torch._inductor.pygraph.capture.library import (
    CallTrace,
    cublas_workspaces,
    NAMES,
    NAMES_OF_PRODUCTS,
    operator_name,
)
from torch._inductor.pygraph.graph import placeholder
from torch._inductor.pygraph.graph.binding import aligned_words
from torch._inductor.pygraph.graph.captured import PLAIN_EDGE, read_graph
from torch._inductor.pygraph.graph.driver import bindings
from torch._inductor.pygraph.graph.memory import PoolRanges
from torch._inductor.pygraph.trees.cached import is_lazy
from torch._inductor.pygraph.types.reason import Code, Reason, RefusedError
from torch._inductor.pygraph.types.sizes import KernelAt, OperatorAt, SizeMap
from torch._inductor.pygraph.values.deliver import CapturedValues
from torch._inductor.pygraph.values.sizes import DeliverOf, LaunchOf, OperatorOf, SizedFunction, Steps, TensorOf
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch._inductor.cudagraph_utils import ModelType
    from torch._inductor.pygraph.capture.library import Memo, Operand, TracedCall
    from torch._inductor.pygraph.graph.captured import CapturedNode
    from torch._inductor.pygraph.types.function import FunctionSpec
    from torch._inductor.pygraph.values.sizes import AtSizes
    from torch._inductor.utils import InputType
    from torch.cuda import _POOL_HANDLE


def unknown(call: str) -> RefusedError:
    return RefusedError(Reason.of(Code.CALL_AT_OTHER_SIZES, call=call))


def differs(at: AtSizes, what: str) -> RefusedError:
    return RefusedError(Reason.of(Code.DIFFERS_AT_SIZES, sizes=", ".join(map(str, at.sizes)), what=what))


def not_for_many_sizes(spec: FunctionSpec, inputs: Sequence[InputType]) -> Reason | None:
    """Return why a function is not recorded for many sizes; None if it may be."""
    info, size_map = spec.info, spec.info.sizes
    if not isinstance(size_map, SizeMap):
        return size_map
    if any(not (isinstance(v, int) or (isinstance(v, torch.Tensor) and v.is_cuda)) for v in inputs):
        return Reason.of(Code.CPU_INPUT)
    steps = Steps(len(size_map.sizes), size_map.steps)
    calls = [call for call in size_map.calls if isinstance(call, OperatorAt)]
    # Then cuDNN times its kernels at each new size, which a capture cannot.
    is_timed = torch.backends.cudnn.benchmark and any(operator_name(call.name) == "convolution" for call in calls)
    unknown = [
        *(call.name for call in calls if operator_name(call.name) not in NAMES),
        *(call.name for call in calls if any(steps.known(number) is None for number in call.numbers)),
        *(["a collective"] if info.collectives else []),
        *(["a convolution with torch.backends.cudnn.benchmark"] if is_timed else []),
    ]
    if any(operator_name(name) == "_scaled_dot_product_cudnn_attention" for name in unknown):
        return Reason.of(Code.CUDNN_PLANS)
    return Reason.of(Code.CALL_AT_OTHER_SIZES, call=unknown[0]) if unknown else None


def _takes_scratch(launcher: Any) -> bool:
    """Return whether a kernel's blocks take global memory, which was allocated for the grid at capture."""
    return bool(getattr(launcher, "global_scratch", None))


@dataclasses.dataclass(frozen=True)
class Block:
    """
    Memory of several tensors that a forward saves. It has the same number of elements in each call, so that the
    allocator can reuse the block of an earlier call. ``offsets`` has the first byte of each tensor's memory, by name.
    """

    name: str
    dtype: torch.dtype
    elements: int
    offsets: dict[str, int]

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, nbytes: dict[str, int]) -> Block:
        ends = [*itertools.accumulate(placeholder.round_up(n, placeholder.MAX_ALIGNMENT) for n in nbytes.values())]
        return cls(name, dtype, ends[-1] // dtype.itemsize, dict(zip(nbytes, [0, *ends])))


class SizedModel:
    """
    A function that may be recorded for many sizes.

    Attributes:
        delivers: what delivers CPU values, by its name in the module
        inputs: names of the inputs that are tensors, by input
        memory: what the function allocates, and what its operators return
        returned: those of ``memory`` that outputs lie in
        saved: those of ``returned`` that only the backward reads, by dtype

    Raises:
        RefusedError: it may not be.
    """

    def __init__(self, model: ModelType, spec: FunctionSpec, inputs: Sequence[InputType]) -> None:
        size_map = spec.info.sizes
        self.model = model
        self.spec = spec
        try:
            self.function = SizedFunction(size_map, spec.objects)
        except (TypeError, ValueError) as e:
            raise RefusedError(Reason.of(Code.SIZES_NOT_DESCRIBED, error=str(e))) from e
        for call in size_map.calls:
            if isinstance(call, KernelAt) and any(map(_takes_scratch, spec.objects[call.kernel].launchers)):
                raise unknown(call.kernel)
        self.delivers = {name: spec.objects[name] for name in spec.info.delivers}
        self.inputs = {i: size_map.inputs[i] for i, t in enumerate(inputs) if isinstance(t, torch.Tensor)}
        self.memory = dict(self.function.allocations)
        for event in self.function.events:
            if not isinstance(event, LaunchOf):
                self.memory.update((t.owner, t) for t in event.results if t.owner not in self.memory)
        names = OrderedSet(self.inputs.values())
        outputs = [o for o in self.function.outputs if isinstance(o, TensorOf) and o.owner not in names]
        self.returned = [*OrderedSet(o.owner for o in outputs)]
        if any(o.owner not in self.memory or o.dtype != self.memory[o.owner].dtype for o in outputs):
            raise unknown("an output")
        # A replay returns views with the dtype of the input.
        dtypes = {name: inputs[i].dtype for i, name in self.inputs.items()}  # type: ignore[union-attr]
        if any(isinstance(o, TensorOf) and o.dtype != dtypes.get(o.owner, o.dtype) for o in self.function.outputs):
            raise unknown("an output")
        for event in self.function.events:
            # Each of its values has a place in the memory of the graph.
            if isinstance(event, DeliverOf):
                dtypes, expected = [t.dtype for t in event.results], [d for d, _ in self.delivers[event.deliver].values]
                if dtypes != expected or any(t.owner in self.returned for t in event.results):
                    raise unknown(event.deliver)
        self.saved: dict[torch.dtype, list[str]] = {}
        if spec.mode == "forward":
            for owner in self.returned:
                idxs = [i for i, o in enumerate(self.function.outputs) if isinstance(o, TensorOf) and o.owner == owner]
                offsets = [self.function.outputs[i].offset for i in idxs]
                if not spec.returned_output_idxs & OrderedSet(idxs) and None not in map(self.function.known, offsets):
                    self.saved.setdefault(self.memory[owner].dtype, []).append(owner)

    def blocks(self, at: AtSizes, reserve: AtSizes) -> list[Block]:
        """Return the blocks for what a forward saves. Each is large enough for the sizes ``at`` and ``reserve``."""
        extent = lambda owner: max(ats.extent(self.memory[owner]) for ats in (at, reserve))  # noqa: E731
        return [
            Block.of(f"saved {dtype}", dtype, {owner: extent(owner) for owner in owners})
            for dtype, owners in self.saved.items()
            if len(owners) > 1
        ]

    def launches_all(self, sizes: tuple[int, ...]) -> bool:
        """Return whether each launch and operator has something to do."""
        try:
            at = self.function.at(sizes)
        except ZeroDivisionError:
            return False
        launches = (e for e in self.function.events if isinstance(e, LaunchOf))
        return all(at.numbers[e.is_launched] for e in launches) and all(map(at.extent, self.memory.values()))

    def top(self, at: Sequence[int]) -> tuple[int, ...]:
        """Return the largest sizes of the bucket, if the guards admit them."""
        tops = [end_of_bucket(n) for n in at]
        uppers = [size.upper for size in self.function.size_map.sizes]
        return tuple(n if upper is None else min(n, upper) for n, upper in zip(tops, uppers))


def end_of_bucket(n: int) -> int:
    """
    Return the next size that is a power of two, or one and a half times one. With powers of two alone, memory would be for up to
    twice the size. With more buckets, a program whose sizes grow would record more often.
    """
    n = max(n, 1)
    power = 1 << (n - 1).bit_length()
    between = power * 3 // 4
    return between if between >= n else power


def alone_of(model: SizedModel, blocks: Sequence[Block]) -> list[str]:
    """Return the names of the outputs' memory that no block contains."""
    return [owner for owner in model.returned if not any(owner in block.offsets for block in blocks)]


class FunctionCapture:
    """
    A function, captured at placeholders with the inputs of a call.

    Args:
        alignments: of the tensor inputs, by name
        reserve: sizes that its memory has to be large enough for
        blocks: memory of what it saves, as SizedModel.blocks returns it

    Attributes:
        addresses: of inputs and memory, by name
        returned: for each output the input that it is, or None
        nodes: of the graph
        calls: the calls of operators
        results: for each call what its results are
        values: the CPU values that the function delivers
        temporary: address ranges from which operators take temporary memory
    """

    def __init__(
        self,
        model: SizedModel,
        inputs: Sequence[InputType],
        at: AtSizes,
        alignments: dict[str, int],
        reserve: AtSizes,
        blocks: Sequence[Block],
        memo: Memo,
        pool: _POOL_HANDLE,
    ) -> None:
        self.model = model
        self.at = at
        self.reserve = reserve
        self.device = memo.device
        self.results: list[list[TensorOf | None]] = []
        self.events = [e for e in model.function.events if isinstance(e, OperatorOf)]
        self.allocations = iter(model.function.allocations)
        tensors = {name: inputs[i] for i, name in model.inputs.items()}
        wanted = [(poison_of(t), placeholder.storage_extent(t), alignments[name]) for name, t in tensors.items()]
        alone = alone_of(model, blocks)
        nbytes = [*(at.extent(model.memory[owner]) for owner in alone), *(b.elements * b.dtype.itemsize for b in blocks)]
        wanted += [(placeholder.UNWRITTEN, n, placeholder.MAX_ALIGNMENT) for n in nbytes]
        placeholders = place(wanted, self.device)
        self.placeholders = placeholder.PlaceholderMap(placeholders)
        names = [*tensors, *alone, *(block.name for block in blocks)]
        self.addresses = {name: p.address for name, p in zip(names, placeholders)}
        for block in blocks:
            self.addresses.update((owner, self.addresses[block.name] + n) for owner, n in block.offsets.items())
        given = [
            placeholder.tensor_at(self.addresses[model.inputs[i]], t, self.device) if isinstance(t, torch.Tensor) else t
            for i, t in enumerate(inputs)
        ]
        # A tensor without elements has the address 0.
        self.addresses.update((name, given[i].data_ptr()) for i, name in model.inputs.items())
        run = with_allocator(model.model, model.spec.info, self._allocate)
        # An attribute would make a reference cycle: a dropped graph would keep its memory until Python's collector runs.
        trace = CallTrace(self._place_results)
        self.calls = trace.calls

        def traced() -> list[int | None]:
            with trace:
                outputs = run([*given])
            if any(isinstance(t, torch.Tensor) and is_lazy(t) for t in outputs):
                raise RefusedError(Reason.of(Code.LAZY_OUTPUT))
            return [next((i for i, t in enumerate(given) if t is o), None) for o in outputs]

        multiplies = any(operator_name(e.name) in NAMES_OF_PRODUCTS for e in self.events)
        workspace = memo.workspace() if multiplies else cublas_workspaces()
        self.values = CapturedValues([*model.delivers.values()], is_bound=True)
        with cudagraph_trees.preserve_rng_state(), workspace, self.values:
            self.graph, self.returned = memo.capture(traced, pool)
        self.temporary = PoolRanges(pool, memo.pool)
        self.nodes = read_graph(bindings().CUgraph(self.graph.raw_cuda_graph()))
        if trace.unknown is not None:
            raise unknown(trace.unknown)

    def _layout(self, t: TensorOf) -> Allocation:
        return Allocation(*self.at.layout(t))

    def _memory(self, owner: str, like: torch.Tensor) -> torch.Tensor:
        """Return memory for ``owner``: at its placeholder, or so much as the reserved sizes take."""
        if owner in self.model.returned:
            t = placeholder.tensor_at(self.addresses[owner], like, self.device)
        else:
            nbytes = max(placeholder.storage_extent(like), self.reserve.extent(self.model.memory[owner]))
            flat = allocation.empty_strided_cuda((-(-nbytes // like.element_size()),), (1,), like.dtype)
            t = flat.as_strided(like.shape, like.stride())
        self.addresses[owner] = t.data_ptr()
        return t

    def _allocate(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._memory(next(self.allocations), Allocation(tuple(size), tuple(stride), dtype).like())

    def _place_results(self, call: int, made: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return memory of the recording for the results of an operator that the function uses."""
        expected = [] if call >= len(self.events) else [*self.events[call].results]
        results: list[TensorOf | None] = []
        placed = []
        for t in made:
            layout = Allocation.of(t)
            if (found := next((e for e in expected if layout.has_elements_of(self._layout(e))), None)) is not None:
                expected.remove(found)
            results.append(found)
            placed.append(t if found is None else self._memory(found.owner, t))
        self.results.append(results)
        return placed

    def pairs(self) -> Iterator[tuple[LaunchOf | OperatorOf | DeliverOf, TracedCall | None, list[CapturedNode]]]:
        """Yield for each event of the function its call and its nodes. Raises RefusedError: there are others."""
        calls, position = iter(self.calls), 0
        for event in self.model.function.events:
            if isinstance(event, LaunchOf):
                end = position + (self.at.numbers[event.is_launched] != 0)
                call, name = None, event.kernel
            elif isinstance(event, DeliverOf):
                call, name, end = None, event.deliver, position + 1
            else:
                call, name = next(calls, None), event.name
                if call is None or call.first != position or call.op.overloadpacket.__name__ != operator_name(name):
                    raise differs(self.at, f"{name} is another call")
                end = call.last
            if len(self.nodes) < end:
                raise differs(self.at, f"{name} has no node")
            nodes = self.nodes[position:end]
            # Alone, the first kernel of a call has none to begin with.
            if any(node.edge != PLAIN_EDGE for node in nodes[:1]):
                raise RefusedError(Reason.of(Code.NODES_NOT_IN_ROW))
            if isinstance(event, DeliverOf):
                self._find_delivered(event, nodes[0])
            yield event, call, nodes
            position = end
        if position != len(self.nodes) or next(calls, None) is not None:
            raise differs(self.at, "there are further nodes")

    def _find_delivered(self, event: DeliverOf, node: CapturedNode) -> None:
        """Note where the kernel of a Deliver writes the values. Raises RefusedError: it is another kernel."""
        deliver = self.model.delivers[event.deliver]
        tokens = array.array("Q", self.values.tokens_of(deliver)).tobytes()
        if not node.is_kernel or len(node.captured) != 2 or node.captured[1] != tokens:
            raise differs(self.at, f"{event.deliver} is another kernel")
        (start,) = aligned_words(node.captured[0])
        self.addresses.update((t.owner, start + n) for t, n in zip(event.results, deliver.starts))

    def operand(self, event: OperatorOf, operand: Operand) -> TensorOf:
        """Return which tensor of the function an operand is. Addresses of constants are noted."""
        found = OrderedSet[TensorOf]()
        for t in (*event.operands, *event.results):
            size, stride, dtype = self.at.layout(t)
            # A bias that is expanded is given as its first row.
            row = dataclasses.replace(t, size=t.size[1:], stride=t.stride[1:])
            for candidate in (t, row) if size else (t,):
                start = self.addresses.get(t.owner, operand.address - self.at.offset(t))
                if operand.layout.has_elements_of(self._layout(candidate)) and start + self.at.offset(t) == operand.address:
                    found.add(candidate)
        if len(found) != 1:
            # Two tensors may have the same elements where a size is 0 or 1.
            sizes = ", ".join(map(str, self.at.sizes))
            raise RefusedError(Reason.of(Code.OPERANDS_AT_SIZES, sizes=sizes, call=event.name, count=len(found)))
        (t,) = found
        self.addresses.setdefault(t.owner, operand.address - self.at.offset(t))
        return t
