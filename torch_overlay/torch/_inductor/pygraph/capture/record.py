"""
Cudagraph-trees nodes that leave nothing of the caller's in the graphs' memory pool.

What trees copy at every replay, a BoundGraphNode captures at placeholders; a replay sets
the nodes whose pointers changed and launches. What trees return from the pool, to be
overwritten by the next replay, is bound to new memory in each call; see allocation.py.
Everything else (liveness, generations, pool checkpoints, static and managed inputs) is
CUDAGraphNode's: the pool holds what partitions and a forward and its backward pass on.

Mutated external inputs need no care: the graph writes the caller's memory, as the
uncaptured function does. Outputs that alias an external input are rebuilt on the input of
the call.

Trees' copies also separated an input from the pool. One that lies there all the same, the
output of a function that is not ours, is staged, that is copied first, as trees do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import pickle
import random
import re
import sys
import threading
import warnings
import weakref
from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo.utils import counters
from torch._inductor import cudagraph_trees
from torch._inductor.cudagraph_trees import (
    AliasesBoundMemory,
    CompilationMode,
    CUDAGraphNode,
    is_live,
    RecordingAbandoned,
    thread_containers,
    UnaliasedStorage,
)
from torch._inductor.cudagraph_utils import CheckInvariantStatus
from torch._inductor.pygraph import native
from torch._inductor.pygraph.capture.allocation import (
    Allocation,
    AllocationTrace,
    Copied,
    PlacedAllocations,
    with_allocator,
)
from torch._inductor.pygraph.capture.collectives import (
    Captured,
    has_collectives,
    LeftOut,
    under,
)
from torch._inductor.pygraph.capture.shared import (
    are_aligned,
    caches_are_whole,
    has_own_memory,
    InputHeld,
    is_lazy,
    is_steady,
    lies_within,
    NoTrees,
    renew,
)
from torch._inductor.pygraph.graph.binding import BindingError, NodeUpdateBinding
from torch._inductor.pygraph.graph.driver import DriverError
from torch._inductor.pygraph.graph.memory import fill_free, OwnPool, room, segments_of
from torch._inductor.pygraph.graph.placeholder import (
    arena,
    MAX_ALIGNMENT,
    NAN,
    Placeholder,
    PlaceholderMap,
    POISONS,
    storage_extent,
    take_damage,
    tensor_at,
    UNWRITTEN,
    ZERO,
)
from torch._inductor.pygraph.graph.prelude import Prelude, PreludeUnavailable
from torch._inductor.pygraph.graph.table import Table
from torch._inductor.pygraph.report import NODE_UPDATE, TABLE
from torch._inductor.pygraph.types.replay_state import Cell
from torch._inductor.pygraph.values.deliver import CapturedValues, delivers_of
from torch._inductor.pygraph.verify.proof import identical, mark_unwritten, Proof
from torch._inductor.utils import clone_preserve_strides
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from typing import NoReturn

    from torch._inductor.cudagraph_trees import (
        CUDAGraphTreeManager,
        StorageWeakRefWrapper,
    )
    from torch._inductor.cudagraph_utils import (
        FunctionID,
        ModelType,
        OutputType,
        PlaceholderInfo,
    )
    from torch._inductor.pygraph.select.controller import Function
    from torch._inductor.utils import InputType
    from torch.cuda import _POOL_HANDLE


# A recording accepts inputs of one alignment in bytes, the largest of these that divides
# all of its external inputs' addresses: at most this many recordings for alignment.
ALIGNMENTS = (MAX_ALIGNMENT, 16, 8, 4, 2, 1)


# Runs that have to give the same before a function is taken to be deterministic: an order
# of atomic additions may repeat itself.
RERUNS = 8

# Runs that say by how much a function that is not deterministic differs from itself. One may
# be close by chance: what is summed before may make one number the error of all that follows.
OTHER_RUNS = 3


# Of an operator that launches on a stream that is not captured, such as the default one.
NOT_CAPTURED = "an operator launches kernels that are not captured"


# What free memory is filled with, as int64, to see whether it is read. The last one is any
# number that floating-point results tell from the first. It comes last: had indices been there,
# the second, which is in bounds, would have told, and the device fails for those that are not.
FILLS = (0, 1, int.from_bytes(bytes([UNWRITTEN]) * 8, "little", signed=True))


def common_alignment(pointers: Sequence[int]) -> int:
    combined = functools.reduce(operator.or_, pointers, 0)
    return next(a for a in ALIGNMENTS if combined % a == 0)


def is_saved_activation(info: PlaceholderInfo) -> bool:
    """
    Whether a backward's input is a tensor that the forward computed.

    AOTAutograd names a backward's placeholders after the forward's nodes: inputs of the
    forward are primals_*, gradients of its outputs tangents_*.
    """
    return re.fullmatch(r"(primals|tangents|arg\d+)_\d+", info.name) is None


def times_on_path(manager: CUDAGraphTreeManager, function: Function) -> int:
    """How many of the graphs of the current path are of a function."""
    count, node = 0, manager.current_node
    while node is not None:
        count += node.wrapped_function.pygraph is function
        node = node.parent
    return count


class PoolRanges:
    """Address ranges of a memory pool's segments."""

    def __init__(self, pool: tuple[int, int]) -> None:
        self.bounds: list[int] = []
        for segment in sorted(segments_of(pool), key=lambda s: s["address"]):
            start = segment["address"]
            self.bounds += (start, start + segment["total_size"])

    def __contains__(self, address: int) -> bool:
        return lies_within(self.bounds, address)


def write(t: torch.Tensor, values: torch.Tensor) -> None:
    # Else a tensor that was made in inference mode could not be written outside of it,
    # which code that was compiled does.
    with torch.inference_mode():
        t.copy_(values)


class SavedInput:
    """
    The memory of an input, from its first element to its last. As memory, since an
    expanded or overlapping tensor can not be written as a tensor.
    """

    def __init__(self, t: torch.Tensor) -> None:
        self.memory = self._memory(t).clone()

    @staticmethod
    def _memory(t: torch.Tensor) -> torch.Tensor:
        return t.as_strided((storage_extent(t) // t.element_size(),), (1,))

    def restore(self, t: torch.Tensor) -> None:
        write(self._memory(t), self.memory)


@dataclasses.dataclass(frozen=True)
class RngState:
    """States of the generators that a function may draw from."""

    generators: list[torch.Generator]
    states: list[torch.Tensor]

    @classmethod
    def save(cls, device_index: int, inputs: Sequence[Any]) -> RngState:
        generators = [torch.cuda.default_generators[device_index]]
        generators += [g for g in inputs if isinstance(g, torch.Generator)]
        return cls(generators, [g.get_state() for g in generators])

    def restore(self) -> None:
        for generator, state in zip(self.generators, self.states):
            generator.set_state(state)


class HostGenerators:
    """
    States of the generators that host code may draw from, as of an operator that makes its
    own seed: a graph would have for ever what was drawn when it was captured.
    """

    def __init__(self) -> None:
        state = torch.get_rng_state()
        # What sets each, its state, and what states are compared by.
        states: list[tuple[Callable[[Any], object], Any, object]] = [
            (torch.set_rng_state, state, state.tolist()),
            (random.setstate, state := random.getstate(), state),
        ]
        if (numpy := sys.modules.get("numpy.random")) is not None:
            # Whichever generator it was set to.
            state = numpy.get_state(legacy=False)
            states.append((numpy.set_state, state, pickle.dumps(state)))
        self.states = states

    def equals(self, other: HostGenerators) -> bool:
        return [key for *_, key in self.states] == [key for *_, key in other.states]

    def restore(self) -> None:
        for set_state, state, _ in self.states:
            set_state(state)


class Rehearsal:
    """
    One uncaptured run of the function on the inputs that are about to be recorded.

    It gives the proof something to compare with, the recording the allocations that its
    outputs lie in, and what memory it takes, and the caller its outputs should the recording
    be abandoned. Afterwards inputs and generators are as they were before. It runs no
    collectives.

    Raises:
        BindingError: no graph of it would do what the function does.
    """

    def __init__(self, node: BoundGraphNode, inputs: list[InputType]) -> None:
        function = node.wrapped_function
        managed = OrderedSet(node.cudagraph_managed_idxs)
        mutated = list(function.mutated_input_idxs)
        written = OrderedSet(mutated) | OrderedSet(
            i
            for i in function.pygraph.reused_input_idxs
            if isinstance(inputs[i], torch.Tensor)
        )
        self.model = function.model
        self.device = node.device
        self.left_out = LeftOut() if node.collectives is not None else None
        self.inputs = node.call_inputs
        self.mutated = mutated
        self.rng = RngState.save(node.device, inputs)
        self.before = {i: SavedInput(inputs[i]) for i in written}  # type: ignore[arg-type]
        self.kept: tuple[list[Any], dict[int, SavedInput], RngState] | None = None
        # What is mutated, before any run.
        self.unchanged = Proof(inputs, [], mutated)
        # What other runs gave, if there are none later.
        self.others: list[Proof] = []
        own_pool = OwnPool(node.device)
        host = HostGenerators()
        try:
            # A graph has cuBLAS's workspaces of its own.
            with cudagraph_trees.clear_cublas_manager(), own_pool:
                if managed:
                    self.others = self.other_runs(inputs)
                    self._restore(inputs)
                self._run(node, inputs, has_managed=bool(managed))
                if not host.equals(HostGenerators()) and self._draws_from(host, inputs):
                    function.pygraph.is_capturable = False
                    raise BindingError("it draws random numbers on the host")
        finally:
            self._restore(inputs)
        function.pygraph.needed_bytes = own_pool.nbytes
        if self.kept is not None:
            self.before.clear()

    def _restore(self, inputs: Sequence[Any]) -> None:
        self.rng.restore()
        for i, saved in self.before.items():
            saved.restore(inputs[i])

    def _rehearse(
        self, inputs: Sequence[Any], trace: AllocationTrace
    ) -> OutputType:
        # Not in the graphs' pool: inputs stay alive here that die during capture, and that
        # pool would keep what it takes.
        run = with_allocator(self.model, trace)
        if self.left_out is not None:
            run = under(self.left_out, run)
        return run(list(inputs))

    def other_runs(self, inputs: Sequence[Any]) -> list[Proof]:
        """What more uncaptured runs give. ``inputs`` are as the last one left them."""
        found = []
        for _ in range(OTHER_RUNS):
            self._restore(inputs)
            outputs = self._rehearse(inputs, AllocationTrace())
            found.append(Proof(inputs, outputs, self.mutated))
            # Not beside what the next run returns.
            del outputs
        return found

    def _draws_from(self, host: HostGenerators, inputs: Sequence[Any]) -> bool:
        """
        Whether it is the function that draws, the same in each run, and no other thread.
        The generators are as they were before, if it is, else as that thread left them.
        """
        seen, after = HostGenerators(), []
        for _ in range(2):
            self._restore(inputs)
            host.restore()
            self._rehearse(inputs, AllocationTrace())
            after.append(HostGenerators())
        draws = after[0].equals(after[1]) and not host.equals(after[0])
        (host if draws else seen).restore()
        return draws

    def _run(
        self, node: BoundGraphNode, inputs: list[InputType], *, has_managed: bool
    ) -> None:
        operands: Collection[StorageWeakRef] = (
            self.left_out.operands if self.left_out is not None else ()
        )
        trace = AllocationTrace(operands)
        outputs = self._rehearse(inputs, trace)
        external = (inputs[i] for i in node.non_static_input_idx)
        if any(StorageWeakRef(t.untyped_storage()) in operands for t in external):  # type: ignore[union-attr]
            raise BindingError("a collective is given an input")
        function = node.wrapped_function
        owned = function.pygraph.owned_output_idxs
        known = [*inputs, *function.constants]
        self.allocations = trace.of(outputs[i] for i in owned)
        # By output, what the graph is to copy it to.
        self.copies = trace.others(
            known, outputs, owned, torch.device("cuda", node.device)
        )
        # Of the others of those, what each call copies out of the pool.
        not_in_pool = OrderedSet(
            t.untyped_storage().data_ptr() for t in known if isinstance(t, torch.Tensor)
        )
        copied = {
            storage.data_ptr(): storage.nbytes()
            for i in owned
            if i not in self.copies
            and isinstance(t := outputs[i], torch.Tensor)
            and t.is_cuda
            and not trace.can_place(t)
            and (storage := t.untyped_storage()).data_ptr() not in not_in_pool
        }
        self.copied_bytes = sum(copied.values())
        self.unmarked = [
            i
            for i, t in enumerate(outputs)
            if isinstance(t, torch.Tensor) and t.numel() > 0 and not trace.holds(t)
        ]
        self.proof = Proof(inputs, outputs, self.mutated)
        if has_managed:
            # The replay overwrites inputs that died, so there is no second run. An output
            # in the memory of an input must neither be restored with it nor keep it alive.
            reused = OrderedSet(
                t.untyped_storage().data_ptr()
                for i, t in enumerate(inputs)
                if isinstance(t, torch.Tensor) and self.inputs[i] is None
            )
            self.kept = (
                [
                    o.clone()
                    if isinstance(o, torch.Tensor)
                    and o.untyped_storage().data_ptr() in reused
                    else o
                    for o in outputs
                ],
                {i: SavedInput(inputs[i]) for i in self.mutated},  # type: ignore[arg-type]
                RngState.save(node.device, inputs),
            )

    def rerun(self) -> OutputType:
        """The outputs of the uncaptured function, its mutations and its random draws."""
        if self.kept is not None:
            outputs, after, rng = self.kept
            for i, saved in after.items():
                saved.restore(self.inputs[i])
            rng.restore()
            return outputs
        self.restore()
        return self.model(list(self.inputs))

    def restore(self) -> None:
        """Undoes what the function wrote. Called only while no managed input has died."""
        self._restore(self.inputs)

    def writes_any(self, idxs: Sequence[int]) -> bool:
        """
        Whether the uncaptured function writes one of these outputs, which operators allocate.
        It is seen where a run gets the memory that the one before had. False else, or if it
        can not be asked, since inputs died.
        """
        if self.kept is not None:
            return False
        before: list[int] = []
        for _ in range(OTHER_RUNS if idxs else 0):
            self.restore()
            outputs = self._rehearse(self.inputs, AllocationTrace())
            found: list[torch.Tensor] = [outputs[i] for i in idxs]  # type: ignore[misc]
            addresses = [t.data_ptr() for t in found]
            if addresses == before:
                result = Proof(self.inputs, outputs, self.mutated, idxs)
                return len(result.unwritten()) < len(idxs)
            before = addresses
            for t in found:
                mark_unwritten(t)
            # Not beside what the next run returns.
            del outputs, found, t
        return False

    def give_what_lay_there(self, results: OrderedSet[tuple[str, int]]) -> bool:
        """
        Whether these of the uncaptured function's, named as Proof.differing does, depend on
        what its memory held before, as where an operator writes only a part of what it
        returns. Asked while no input has died.
        """
        first: Proof | None = None
        found: OrderedSet[tuple[str, int]] = OrderedSet()
        with (
            cudagraph_trees.clear_cublas_manager(),
            OwnPool(self.device) as own_pool,
        ):
            # The first run takes the memory of those after it.
            self.restore()
            self._rehearse(self.inputs, AllocationTrace())
            for word in FILLS:
                fill_free(own_pool.pool, self.device, word)
                self.restore()
                result = Proof(
                    self.inputs,
                    self._rehearse(self.inputs, AllocationTrace()),
                    self.mutated,
                )
                first = first or result
                found |= first.differing(result)
        return results <= found

    def repeats_itself(self) -> bool:
        """
        Whether the uncaptured function gives the same results to the bit, run after run.
        False if it can not be asked, since inputs died.
        """
        if self.kept is not None:
            return False
        for _ in range(RERUNS):
            self.restore()
            # Without a name, so that they are gone before the next run's.
            if not self.proof.is_exact(
                Proof(
                    self.inputs,
                    self._rehearse(self.inputs, AllocationTrace()),
                    self.mutated,
                    self.unmarked,
                )
            ):
                return False
        return True


@contextlib.contextmanager
def without_trees() -> Iterator[None]:
    """
    For what a function calls while it is recorded: a custom operator may call another
    compiled function, whose replay would change the path that this one is about to join.
    So this thread has no trees meanwhile, and what it calls runs uncaptured.
    """
    local = cudagraph_trees.local
    is_local = hasattr(local, "tree_manager_containers")
    containers = thread_containers()
    local.tree_manager_containers = NoTrees()
    # Compiled code asks for those that autograd's threads share, without a look at the above.
    compiled = native.compiled
    was_without = compiled is not None and compiled.set_without_trees(True)
    try:
        yield
    finally:
        if is_local:
            local.tree_manager_containers = containers
        else:
            # It has them from the thread that autograd runs it for.
            del local.tree_manager_containers
        if compiled is not None:
            compiled.set_without_trees(was_without)


def apart(outputs: OutputType, function: Function) -> OutputType:
    """
    What a function returned that ran uncaptured on inputs that were restored. Where it lies in
    their memory, as a gradient does that is written over an activation, it is copied: to trees
    they are dead, and the next graphs write there.
    """
    where, function.restored = function.restored, OrderedSet()
    if not where:
        return outputs
    return [
        o.clone()
        if isinstance(o, torch.Tensor) and o.untyped_storage().data_ptr() in where
        else o
        for o in outputs
    ]


class CopyGraphNode(CUDAGraphNode):
    """
    Copies its inputs into the pool, as trees do, and what it returns out of it.
    """

    # Outputs in the pool that are copied out of it, each with the first that is the same
    # tensor. Those in one list share a storage.
    returned_from_pool: list[list[tuple[int, int]]]
    # The static input that an output is, by output.
    returned_inputs: dict[int, int]
    # Makes those without memory, by output.
    empty_outputs: dict[int, Callable[[], torch.Tensor]]
    # (input, metadata) of those that earlier graphs of the path left in the pool
    managed_metadata: list[tuple[int, dict[str, Any]]]
    # The other inputs, while it is recorded.
    call_inputs: list[InputType]
    # Of CPU tensors.
    values: CapturedValues
    # Each thread packs them by itself: the one whose values the graph reads, if it does.
    thread_of_values: int | None = None
    binds_values: bool = False
    # What each call copies of its inputs.
    copied_bytes: int = 0

    def __init__(self, *args: Any) -> None:
        with without_trees():
            super().__init__(*args)
        if self.non_static_input_idx and torch.is_inference_mode_enabled():
            # Else what later calls copy could only be copied in inference mode too.
            with torch.inference_mode(False):
                self.reconstructed_inputs = [
                    self._reconstruct_from_tensor_metadata(self._tensor_metadata(t))
                    if isinstance(t, torch.Tensor)
                    else t
                    for t in self.reconstructed_inputs
                ]

    def _declared_static_idxs(
        self, inputs: list[InputType], mode: CompilationMode | None
    ) -> Sequence[int]:
        declared = super()._declared_static_idxs(inputs, mode)
        managed = OrderedSet(self.cudagraph_managed_idxs)
        if mode == CompilationMode.BACKWARD:
            # Trees take every saved tensor for static, because a recorded forward leaves its
            # activations in the pool. Without a recorded forward they move at every step.
            placeholders = self.wrapped_function.placeholders
            declared = [
                i
                for i in declared
                if i in managed or not is_saved_activation(placeholders[i])
            ]
        function: Function = self.wrapped_function.pygraph
        function.note_static_inputs(
            {
                i: t
                for i in declared
                if i not in managed and isinstance(t := inputs[i], torch.Tensor)
            }
        )
        if not function.binds_inputs and any(
            i in function.moving_idxs and i not in managed
            for i in self.wrapped_function.mutated_input_idxs
        ):
            # The graph would write a copy.
            function.is_capturable = False
            self._abandon("a mutated input is another one in each call", inputs)
        return [i for i in declared if i not in function.moving_idxs]

    def _bind_inputs(self, inputs: list[InputType]) -> list[int]:
        self.managed_metadata = [
            (i, self._tensor_metadata(inputs[i], ignore_storage_offset=False))  # type: ignore[arg-type]
            for i in self.cudagraph_managed_idxs
        ]
        if (lack := self._lack_of_memory()) is not None:
            self.wrapped_function.pygraph.is_capturable = False
            self._abandon(lack, inputs)
        managed = OrderedSet(self.cudagraph_managed_idxs)
        # Managed inputs have to die during capture as they will in replay.
        self.call_inputs = [None if i in managed else t for i, t in enumerate(inputs)]
        return super()._bind_inputs(inputs)

    def _abandon(self, reason: str, inputs: list[InputType] | None = None) -> NoReturn:
        # Not of the node, which is to be gone by then.
        model, function = self.wrapped_function.model, self.wrapped_function.pygraph
        function.unbind(reason)
        raise RecordingAbandoned(reason, lambda: apart(model(inputs), function))

    def _needed_bytes(self, function: Function) -> int:
        "What the capture of a function takes that was rehearsed."
        # Inputs get copies in the pool, and outputs, a part of what a call takes, outside.
        return 2 * function.needed_bytes + function.report.stock_copied_bytes

    def _lack_of_memory(self) -> str | None:
        "Why a function that was rehearsed, now or before, can not be captured, or None."
        function: Function = self.wrapped_function.pygraph
        if not function.needed_bytes:
            return None
        needed = self._needed_bytes(function)
        free = room(self.device, self.cuda_graphs_pool)
        if free >= needed:
            return None
        return f"out of memory: capture takes {needed >> 20} MiB, {free >> 20} are free"

    def check_invariants(
        self, inputs: list[InputType]
    ) -> tuple[CheckInvariantStatus, Callable[..., str]]:
        if self.thread_of_values not in (None, threading.get_ident()):
            raise InputHeld
        if any(
            isinstance(t := inputs[i], torch.Tensor) and is_lazy(t)
            for i in (*self.non_static_input_idx, *self.bound_input_idxs)
        ):
            raise InputHeld
        try:
            return super().check_invariants(inputs)
        except RuntimeError:
            # Trees let go of the inputs to see whether they die.
            self.restore_managed(inputs)
            raise InputHeld from None

    def restore_managed(self, inputs: list[InputType]) -> None:
        "Managed inputs that were let go, in memory that nothing has overwritten."
        for i, metadata in self.managed_metadata:
            inputs[i] = self._reconstruct_from_tensor_metadata(metadata)
        self.wrapped_function.pygraph.restored = OrderedSet(
            metadata["data_ptr"] for _, metadata in self.managed_metadata
        )

    def _record(self, model: ModelType, inputs: list[InputType]) -> OutputType:
        self.wrapped_function.pygraph.recordings += 1
        self.copied_bytes = sum(
            storage_extent(inputs[i])  # type: ignore[arg-type]
            for i in self.non_static_input_idx
            if isinstance(inputs[i], torch.Tensor)
        )
        self._note_copied_bytes()
        stream = torch.cuda.current_stream(self.device)
        own = delivers_of(self.wrapped_function.model)
        self.values = CapturedValues(own, is_bound=self.binds_values)
        # A rehearsal has seen already whether it draws.
        is_rehearsed = self.wrapped_function.pygraph.needed_bytes > 0
        host = None if is_rehearsed else HostGenerators()
        try:
            with self.values:
                outputs = super()._record(model, inputs)
        except Exception as e:
            failure = str(e).partition("\n")[0]
        else:
            if host is not None and not host.equals(HostGenerators()):
                host.restore()
                self._give_up("it draws random numbers on the host")
            if any(isinstance(t, torch.Tensor) and is_lazy(t) for t in outputs):
                # What later calls return is made of addresses, sizes and strides.
                self._give_up("it returns a conjugate that is not computed")
            if self.values.delivers and not self.binds_values:
                self.thread_of_values = threading.get_ident()
            return outputs
        clean_up_failed_capture(self, stream)
        self._give_up(f"capture failed: {failure}")

    def _recording_input(self, idx: int, inp: torch.Tensor) -> torch.Tensor:
        try:
            return super()._recording_input(idx, inp)
        except torch.OutOfMemoryError:
            # Not from here: the exception holds the copies that there are.
            pass
        self._give_up("out of memory before it was captured")

    def _first_replay(self) -> None:
        try:
            super()._first_replay()
        except RuntimeError as e:
            failure = f"it can not be launched: {e}".partition("\n")[0]
        else:
            # It is recorded.
            self.call_inputs = []
            return
        self._give_up(failure)

    def _give_up(self, reason: str) -> NoReturn:
        "The function is not captured in another way either."
        self.wrapped_function.pygraph.is_capturable = False
        self.restore_managed(self.call_inputs)
        self._abandon(reason, self.call_inputs)

    def _add_first_outputs(
        self,
        outputs: OutputType,
        static_input_persistent_storage_ptrs: dict[int, StorageWeakRefWrapper],
    ) -> None:
        """
        Trees return the recorded object where an output lies in a static input, or nowhere.
        What each call returns has to be its own: of a parameter that is saved, autograd
        watches the version counter, and to a tensor without elements it gives a history.
        """
        super()._add_first_outputs(outputs, static_input_persistent_storage_ptrs)
        self.returned_inputs, self.empty_outputs = {}, {}
        for i, t in enumerate(self.static_output_tensors):
            if t is None:
                continue
            same = [
                j for j in self.non_managed_static_input_idxs if self.call_inputs[j] is t
            ]
            if same:
                self.returned_inputs[i] = same[0]
            elif t.numel() == 0:
                like = Allocation(tuple(t.shape), tuple(t.stride()), t.dtype)
                self.empty_outputs[i] = like.allocator(self.device)
            else:
                continue
            # In its place, so that the recording does not keep it alive.
            self.static_output_tensors[i] = torch.empty(0, device="cpu")

    def run_graph(self) -> None:
        if not self.binds_values:
            self.values.write()
        super().run_graph()

    def _initialize_cached_tensors(self) -> None:
        """
        Trees take a cached tensor for dead that only C++ holds, as autograd does what a
        forward saved: a second forward would write the activations of the first.
        """
        # Else each later backward's gradients could only be written in inference mode too.
        with torch.inference_mode(False):
            super()._initialize_cached_tensors()
        node_ref = weakref.ref(self)
        for i, ref in enumerate(self.outputs_weakrefs):
            if ref is not None and ref.extra_ref_check is not None:
                ref.extra_ref_check = functools.partial(
                    CopyGraphNode._is_only_cached, node_ref, i, ref.extra_ref_check
                )

    def reconstruct_outputs(self) -> OutputType:
        if not caches_are_whole(self):
            # They are made anew.
            self.remove_node_cached_tensors()
        for t in self.cached_tensor_outputs:
            if t is not None:
                renew(t)
        return super().reconstruct_outputs()

    @staticmethod
    def _is_only_cached(
        node_ref: weakref.ref[CopyGraphNode], i: int, check: Callable[[], bool]
    ) -> bool:
        node = node_ref()
        return (
            node is not None
            and node.cached_tensor_outputs[i]._use_count() == 1  # type: ignore[union-attr]
            and has_own_memory(node.cached_tensor_outputs[i], node.outputs_metadata[i])  # type: ignore[arg-type]
            and check()
        )

    def run_first_inputs(self, new_inputs: list[InputType]) -> OutputType:
        outputs = super().run_first_inputs(new_inputs)
        sharing: dict[int, list[int]] = {}
        for i, (alias, metadata) in enumerate(
            zip(self.output_storage_alias, self.outputs_metadata)
        ):
            if (
                isinstance(metadata, dict)
                and self.static_output_tensors[i] is None
                and not isinstance(alias, AliasesBoundMemory)
            ):
                sharing.setdefault(metadata["data_ptr"], []).append(i)
        owned = self.wrapped_function.pygraph.owned_output_idxs
        self.returned_from_pool = [
            [(i, next(j for j in idxs if outputs[j] is outputs[i])) for i in idxs]
            for idxs in sharing.values()
            if not owned.isdisjoint(idxs)
        ]
        counters["pygraph"]["copied_outputs"] += len(self.returned_from_pool)
        return self._copied_from_pool(outputs)

    def run(self, new_inputs: list[InputType]) -> OutputType:
        self._note_copied_bytes()
        own = {i: new_inputs[j] for i, j in self.returned_inputs.items()}
        own |= {i: make() for i, make in self.empty_outputs.items()}
        outputs = super().run(new_inputs)
        for i, t in own.items():
            outputs[i] = t
        return self._copied_from_pool(outputs)

    def _note_copied_bytes(self) -> None:
        if self.copied_bytes:
            self.wrapped_function.pygraph.note_copied_bytes(self.copied_bytes)

    def _copied_from_pool(self, outputs: OutputType) -> OutputType:
        if not self.returned_from_pool:
            return outputs
        outputs = list(outputs)
        for idxs in self.returned_from_pool:
            i, _ = idxs[0]
            storage = outputs[i].untyped_storage().clone()  # type: ignore[union-attr]
            for i, first in idxs:
                # One version counter, if one is written that is saved for a backward as well.
                outputs[i] = (
                    outputs[first]
                    if first < i
                    else self._reconstruct_from_tensor_metadata(
                        self.outputs_metadata[i],  # type: ignore[arg-type]
                        storage,
                    )
                )
        return outputs


class BoundGraphNode(CopyGraphNode):
    """
    See the module's docstring. What is bound, the external inputs and then the outputs'
    allocations, is numbered alike in placeholders, pointers and call_tensors. In pointers,
    the words of CPU values follow.

    Raises:
        RecordingAbandoned: the inputs could not be bound, or the proof failed. From then on
            the function will be recorded with copies or, if it was with a prelude, without
            one, or not at all.
    """

    binding: NodeUpdateBinding
    binds_values = True
    rehearsal: Rehearsal | None = None
    # What is bound, in the current call. Outputs that lie in it are rebuilt from it.
    call_tensors: list[torch.Tensor]
    # Of the external inputs, in the last call.
    input_pointers: list[int]
    # (position in bound_input_idxs, input, copy that the graph reads) of the current call.
    staged: list[tuple[int, torch.Tensor, torch.Tensor]]
    begins_with_prelude: bool = False
    # While it is recorded.
    collectives: Captured | None = None
    wrote_to_placeholder: bool = False

    def __init__(self, *args: Any) -> None:
        # The graph, while its tensors are cached and a ReplayPlan describes the node.
        self.replay_graph = Cell(None)
        super().__init__(*args)

    def _needed_bytes(self, function: Function) -> int:
        if self.rehearsal is None:
            return function.needed_bytes
        return function.needed_bytes + self.rehearsal.copied_bytes

    def _bind_inputs(self, inputs: list[InputType]) -> list[int]:
        function: Function = self.wrapped_function.pygraph
        if has_collectives(model := self.wrapped_function.model):
            entry = function.report
            name = f"{entry.compile_id}/{entry.mode}/{entry.name}"
            self.collectives = Captured(model, name, self.device)
        super()._bind_inputs(inputs)
        managed = self.cudagraph_managed_idxs
        self.staged = []
        # Integers are sizes. There is a function for each combination of them, and nothing to
        # copy or bind.
        external = {
            i: t
            for i in self.non_static_input_idx
            if isinstance(t := inputs[i], torch.Tensor)
        }
        self.non_static_input_idx = [*external]
        bound = [
            i
            for i, t in external.items()
            if t.is_cuda and t.device.index == self.device
        ]
        function.report.external_inputs = len(bound)
        if any(not t.is_cuda and t.numel() > 0 for t in external.values()):
            # Its value would be that of this call for ever.
            function.is_capturable = False
            self._abandon("an input lies on the CPU", inputs)
        if any(i in managed for i in self.wrapped_function.mutated_input_idxs):
            # Capture has to let go of managed inputs, so it could not be undone.
            self._abandon("an earlier graph's output is mutated", inputs)
        if managed and self.collectives is not None:
            # The proof overwrites them, and the call runs the graph once more.
            self._abandon("collectives follow an earlier graph's output", inputs)
        try:
            self.call_tensors = self._leave_pool(bound, inputs)
            self.input_pointers = [t.data_ptr() for t in self.call_tensors]
            self.alignment = min(
                function.alignment, common_alignment(self.input_pointers)
            )
            function.alignment = self.alignment
            function.report.stock_copied_bytes = sum(
                map(storage_extent, self.call_tensors)
            )
            self.rehearsal = Rehearsal(self, inputs)
            self._place(self.rehearsal.allocations, self.rehearsal.copies)
            # Outputs have their memory by now, which nothing in the pool can lie in before.
            if (lack := self._lack_of_memory()) is not None:
                function.is_capturable = False
                raise BindingError(lack)
            if self.collectives is not None and not self.collectives.agree():
                raise BindingError("not all ranks capture its collectives")
        except RecordingAbandoned:
            raise
        except BindingError as e:
            self._abandon(str(e), inputs)
        except torch.OutOfMemoryError:
            # Nor with copies: whether these fit is not known.
            function.is_capturable = False
            self._abandon("out of memory before it was captured", inputs)
        except Exception as e:
            # The program's own error comes again from the uncaptured run.
            failure = f"{type(e).__name__}: {e}".partition("\n")[0]
            self._abandon(failure, inputs)
        return bound

    def _leave_pool(
        self, bound: list[int], inputs: list[InputType]
    ) -> list[torch.Tensor]:
        "The external inputs, those in the pool replaced by copies."
        pool = PoolRanges(self.cuda_graphs_pool)
        for i in bound:
            t: torch.Tensor = inputs[i]  # type: ignore[assignment]
            if t.data_ptr() in pool:
                if i in self.wrapped_function.mutated_input_idxs:
                    self._abandon("a mutated input lies in the graphs' memory", inputs)
                inputs[i] = self.call_inputs[i] = clone_preserve_strides(t)
        return [inputs[i] for i in bound]  # type: ignore[misc]

    def _place(
        self, allocations: dict[int, Allocation], copies: dict[int, Allocation]
    ) -> None:
        # (poison, (size, alignment)) of each placeholder
        requests = [
            (
                NAN if t.is_floating_point() or t.is_complex() else ZERO,
                (storage_extent(t), self.alignment),
            )
            for t in self.call_tensors
        ]
        owned = [*allocations.values(), *copies.values()]
        self.allocators = [a.allocator(self.device) for a in owned]
        for allocate in self.allocators:
            self.call_tensors.append(t := allocate())
            requests.append((UNWRITTEN, (storage_extent(t), MAX_ALIGNMENT)))
        placed: dict[int, Placeholder] = {}
        for poison in POISONS:
            ks = [k for k, request in enumerate(requests) if request[0] == poison]
            placed.update(
                zip(ks, arena(self.device, poison).place([requests[k][1] for k in ks]))
            )
        placeholders = [placed[k] for k in range(len(requests))]
        self.placeholders = PlaceholderMap(placeholders)
        outputs = placeholders[len(requests) - len(owned) :]
        addresses = [placeholder.address for placeholder in outputs]
        self.placed_allocations = {
            n: (storage_extent(allocation.like()), address)
            for (n, allocation), address in zip(allocations.items(), addresses)
        }
        self.placed_copies = {
            i: (copy, address)
            for (i, copy), address in zip(copies.items(), addresses[len(allocations) :])
        }

    def _abandon(self, reason: str, inputs: list[InputType] | None = None) -> NoReturn:
        function: Function = self.wrapped_function.pygraph
        if self.collectives is not None:
            self.collectives.refuse()
            if self.collectives.captures:
                # The other ranks do not capture it again either: this one may not be able to.
                function.is_capturable = False
        if self.begins_with_prelude:
            function.bind_by_host(reason)
        else:
            function.unbind(reason)
        run: Callable[[], OutputType]
        if self.rehearsal is None:
            run = functools.partial(self.wrapped_function.model, inputs)
        else:
            run = self.rehearsal.rerun
        raise RecordingAbandoned(reason, run)

    def _recording_input(self, idx: int, inp: torch.Tensor) -> torch.Tensor:
        if idx not in self.bound_input_idxs:
            return super()._recording_input(idx, inp)
        k = self.bound_input_idxs.index(idx)
        return tensor_at(self.placeholders.placeholders[k].address, inp, self.device)

    def _new_graph(self) -> torch.cuda.CUDAGraph:
        # The nodes of the captured graph name those of the executable one.
        return torch.cuda.CUDAGraph(keep_graph=True)

    def _bound_memory_alias(self, output: torch.Tensor) -> AliasesBoundMemory | None:
        storage_address = output.untyped_storage().data_ptr()
        hit = self.placeholders.find(storage_address)
        if hit is None:
            return None
        k, _ = hit
        address = storage_address + output.storage_offset() * output.element_size()
        like = self.call_tensors[k]
        offset = address - self.placeholders.placeholders[k].address
        is_whole = (
            offset == 0
            and output.shape == like.shape
            and output.stride() == like.stride()
            and output.dtype == like.dtype
        )
        return AliasesBoundMemory(k, offset, is_whole)

    def _alias_of_bound_memory(
        self, alias: AliasesBoundMemory, metadata: dict[str, Any]
    ) -> torch.Tensor:
        bound = self.call_tensors[alias.index]
        if alias.is_whole:
            # If it is an input, the caller's own: autograd watches its version counter.
            return bound
        offset = bound.storage_offset() * bound.element_size() + alias.offset
        metadata = {
            **metadata,
            "storage_offset": offset // metadata["dtype"].itemsize,
        }
        return self._reconstruct_from_tensor_metadata(metadata, bound.untyped_storage())

    def _record(self, model: ModelType, inputs: list[InputType]) -> OutputType:
        placed = PlacedAllocations(self.placed_allocations, self.device)
        model = with_allocator(model, placed)
        if self.collectives is not None:
            model = under(self.collectives, model)
        self.copied = Copied(model, self.placed_copies, self.device)
        return super()._record(self.copied, inputs)

    def _first_replay(self) -> None:
        with torch.cuda.device(self.device):
            self._bind_and_prove()

    def _bind_and_prove(self) -> None:
        if self.graph is None or self.recording_outputs is None:
            raise AssertionError("nothing was recorded")
        self.recording_outputs = list(self.recording_outputs)
        pointers = [t.data_ptr() for t in self.call_tensors] + self.values.words()
        placeholders = [*self.placeholders.placeholders, *self.values.placeholders()]
        try:
            self.binding = self._bind(self.graph, PlaceholderMap(placeholders))
            words = range(len(self.call_tensors), len(placeholders))
            if not all(self.binding.nodes_of[k] for k in words):
                raise BindingError("a CPU value is no parameter of the graph")
            if self.collectives is not None:
                if any(map(self.placeholders.find, self.collectives.addresses)):
                    raise BindingError("a collective is given a placeholder")
                self.collectives.enable(
                    self.graph.raw_cuda_graph_exec(), enabled=False
                )
            take_damage(self.device)
            self.binding.update(pointers)
        except (BindingError, DriverError) as e:
            self._abandon(str(e))
        for t in self.call_tensors[len(self.bound_input_idxs) :]:
            mark_unwritten(t)
        self.pool_ranges = PoolRanges(self.cuda_graphs_pool)
        if not self.cudagraph_managed_idxs:
            # An output may lie where a managed input was, which the graph has yet to read.
            unaliased = [
                output
                for output, alias in zip(
                    self.recording_outputs, self.output_storage_alias
                )
                if alias is UnaliasedStorage and isinstance(output, torch.Tensor)
            ]
            for t in (*unaliased, *self.copied.sources):
                # Else it is an operator's, which may have computed it once for all.
                if t.data_ptr() in self.pool_ranges:
                    mark_unwritten(t)
        try:
            self.run_graph()
        except RuntimeError as e:
            self._abandon(f"it can not be launched: {e}".partition("\n")[0])
        for i, alias in enumerate(self.output_storage_alias):
            if isinstance(alias, AliasesBoundMemory):
                self.recording_outputs[i] = self._alias_of_bound_memory(
                    alias,
                    self.outputs_metadata[i],  # type: ignore[arg-type]
                )
        failure = self._difference()
        if take_damage(self.device) or self.wrote_to_placeholder:
            failure = "the graph wrote to an address it should not hold"
        if (prelude := self.binding.prelude) is not None:
            failure = prelude.failure() or failure
        if failure is not None:
            self._abandon(failure)
        if self.collectives is not None:
            try:
                self.collectives.enable(self.graph.raw_cuda_graph_exec(), enabled=True)
            except DriverError as e:
                self._abandon(str(e))
            if not self.collectives.agree():
                self._abandon("not all ranks deploy its collectives' graph")
            # The call, of which other ranks get their part.
            self.rehearsal.restore()
            self.run_graph()
        self.rehearsal = self.collectives = None
        self.call_inputs, self.call_tensors = [], []
        function: Function = self.wrapped_function.pygraph
        # Mutated, or written over, as a backward does with an activation: a gradient that
        # lies there is rebuilt from the input.
        self.written_bound = OrderedSet(
            k
            for k, i in enumerate(self.bound_input_idxs)
            if i in self.wrapped_function.mutated_input_idxs
            or i in function.reused_input_idxs
        )
        entry = function.report
        entry.kernel_nodes = self.binding.num_nodes
        entry.updated_nodes = len(self.binding.updates)
        if prelude is not None:
            counters["pygraph"]["device_updated_nodes"] += len(prelude.nodes)
            if prelude.table is not None:
                counters["pygraph"]["indirect_kernels"] += prelude.table.num_kernels
        counters["pygraph"]["bound_inputs"] += len(self.bound_input_idxs)
        counters["pygraph"]["bound_outputs"] += len(self.allocators)
        counters["pygraph"]["updated_nodes"] += len(self.binding.updates)

    def _bind(
        self, graph: torch.cuda.CUDAGraph, placeholders: PlaceholderMap
    ) -> NodeUpdateBinding:
        """
        Raises:
            BindingError, DriverError: the graph is of no use with this binding.
        """
        function: Function = self.wrapped_function.pygraph
        prelude = None
        if function.binding != NODE_UPDATE:
            table = None
            if function.binding == TABLE:
                table = Table(self.wrapped_function.model, self.device)
            self.begins_with_prelude = True
            try:
                prelude = Prelude(
                    graph.raw_cuda_graph(), placeholders, self.device, table
                )
            except PreludeUnavailable as e:
                self.begins_with_prelude = False
                function.bind_by_host(str(e))
        try:
            graph.instantiate()
        except RuntimeError as e:
            failure = f"it can not be instantiated: {e}".partition("\n")[0]
            raise BindingError(failure) from e
        if prelude is not None:
            prelude.upload(graph.raw_cuda_graph_exec())
        return NodeUpdateBinding(
            graph.raw_cuda_graph(), graph.raw_cuda_graph_exec(), placeholders, prelude
        )

    def _difference(self) -> str | None:
        "Why the first replay is not what the rehearsal was, or None."
        if self.rehearsal is None or self.recording_outputs is None:
            raise AssertionError("nothing was rehearsed")
        rehearsal, proof = self.rehearsal, self.rehearsal.proof
        actual: Proof | None = None
        try:
            # Before another run writes over what this one did.
            actual = Proof(
                rehearsal.inputs,
                self.recording_outputs,
                rehearsal.mutated,
                rehearsal.unmarked,
            )
            if rehearsal.writes_any(actual.unwritten()):
                self.wrapped_function.pygraph.is_capturable = False
                return NOT_CAPTURED
            if proof.is_exact(actual):
                return None
            failure = proof.failure(actual, rehearsal.others)
            if failure is None:
                if not rehearsal.repeats_itself():
                    return None
                # A small part of the result may be all that an input has an influence on.
                return "its results are only close to the uncaptured function's"
        except RuntimeError as e:
            actual = None
            failure = f"the outputs can not be compared: {e}".partition("\n")[0]
        lack = NOT_CAPTURED if actual and self._leaves_results(actual) else None
        lack = lack or self._lack_of_nodes() or self._lack_of_a_graph()
        if lack is not None:
            self.wrapped_function.pygraph.is_capturable = False
            return lack
        if actual is None or rehearsal.kept is not None:
            return failure
        try:
            # Asked last, of a graph that varies as the function does. One that has the first
            # of the numbers that the host gives may be as close.
            return proof.failure(actual, rehearsal.other_runs(rehearsal.inputs))
        except RuntimeError:
            return failure

    def _leaves_results(self, actual: Proof) -> bool:
        """
        Whether the graph writes nothing to a result that differs. Had it written where its
        parameters do not show, that would be a placeholder.
        """
        rehearsal, outputs = self.rehearsal, self.recording_outputs
        if rehearsal is None or outputs is None or rehearsal.kept is not None:
            return False
        if take_damage(self.device):
            self.wrote_to_placeholder = True
            return False
        proof, before = rehearsal.proof, rehearsal.unchanged
        # The uncaptured function does not write these either.
        unwritten = actual.unwritten()
        differ = [
            i
            for i, expected in enumerate(proof.outputs)
            if expected is not None
            and i not in unwritten
            and not identical(expected, actual.outputs[i])
        ]
        if Proof(rehearsal.inputs, outputs, [], differ).unwritten():
            return True
        return any(
            identical(unchanged, now) and not identical(unchanged, expected)
            for unchanged, now, expected in zip(
                before.inputs, actual.inputs, proof.inputs
            )
        )

    def _lack_of_nodes(self) -> str | None:
        """
        NOT_CAPTURED if the graph gives what lay in the pool before, which ran then while it
        was captured, else None. None also where inputs died, and where the same results of the
        uncaptured function are what lay in its memory as well.
        """
        rehearsal, outputs = self.rehearsal, self.recording_outputs
        if rehearsal is None or outputs is None or rehearsal.kept is not None:
            return None
        first: Proof | None = None
        try:
            for word in FILLS:
                result, again = (self._result_over(word) for _ in range(2))
                if not result.is_exact(again):
                    return None
                first = first or result
                if results := first.differing(result):
                    lay_there = rehearsal.give_what_lay_there(results)
                    return None if lay_there else NOT_CAPTURED
        except RuntimeError:
            # Comparing takes memory.
            pass
        return None

    def _result_over(self, word: int) -> Proof:
        "What the graph gives where free memory of its pool is filled with a number."
        rehearsal, outputs = self.rehearsal, self.recording_outputs
        if rehearsal is None or outputs is None:
            raise AssertionError("nothing was rehearsed")
        fill_free(self.cuda_graphs_pool, self.device, word)
        rehearsal.restore()
        self.run_graph()
        return Proof(rehearsal.inputs, outputs, rehearsal.mutated)

    def _lack_of_a_graph(self) -> str | None:
        """
        Why no graph can do what the function does, or None: the function varies from run to
        run, and this graph does not, as it would if that were the order of atomic operations.
        None also where inputs died, so that it can not be asked.
        """
        rehearsal, outputs = self.rehearsal, self.recording_outputs
        if rehearsal is None or outputs is None or rehearsal.kept is not None:
            return None
        no_memory = "there is no memory to see whether its host code varies"
        if room(self.device) < self.wrapped_function.pygraph.needed_bytes:
            return no_memory
        first: Proof | None = None
        try:
            for _ in range(RERUNS):
                rehearsal.restore()
                self.run_graph()
                result = Proof(rehearsal.inputs, outputs, rehearsal.mutated)
                if first is not None and not first.is_exact(result):
                    return None
                first = first or result
            if rehearsal.repeats_itself():
                return None
        except RuntimeError:
            # Comparing takes memory as well.
            return no_memory
        return "what the host gives to its kernels varies from call to call"

    def check_invariants(
        self, inputs: list[InputType]
    ) -> tuple[CheckInvariantStatus, Callable[..., str]]:
        pointers = [inputs[i].data_ptr() for i in self.bound_input_idxs]  # type: ignore[union-attr]
        if pointers != self.input_pointers:
            if not are_aligned(pointers, self.alignment):
                status = CheckInvariantStatus.BoundInputAlignmentMismatch
                return status, lambda: f"{status}"
            self.input_pointers = pointers
        return super().check_invariants(inputs)

    def _copy_inputs_and_remove_from_src(
        self, dsts: list[InputType], srcs: list[InputType]
    ) -> None:
        super()._copy_inputs_and_remove_from_src(dsts, srcs)
        if self.rehearsal is not None:
            # It is being recorded, at placeholders.
            return
        # Before the allocations, where the collector may run what packs others.
        words = self.values.words()
        outputs = [allocate() for allocate in self.allocators]
        self.call_tensors = [srcs[i] for i in self.bound_input_idxs] + outputs  # type: ignore[assignment]
        pointers = self.input_pointers + [t.data_ptr() for t in outputs] + words
        if pointers != self.binding.pointers:
            try:
                self.move(self.call_tensors, pointers)
            except DriverError:
                # The call is about to run uncaptured, on all of its inputs.
                self.restore_managed(srcs)
                raise

    def move(self, tensors: list[torch.Tensor], pointers: list[int]) -> None:
        """
        Binds the tensors of a call, which lie at ``pointers``.

        Raises:
            DriverError: a node refused. The graph must not be launched then.
        """
        copies = []
        for k in range(len(self.bound_input_idxs)):
            if pointers[k] in self.pool_ranges:
                staged = clone_preserve_strides(tensors[k])
                pointers[k] = staged.data_ptr()
                counters["pygraph"]["staged_inputs"] += 1
                copies.append((k, tensors[k], staged))
        self.binding.update(pointers)
        # Alive until the launch; the caching allocator orders what comes after. Of a call
        # that raises before, nothing is written back.
        self.staged = copies

    def run_graph(self) -> None:
        super().run_graph()
        if self.staged:
            for k, original, staged in self.staged:
                if k in self.written_bound:
                    write(original, staged)
            self.staged = []

    def _initialize_cached_tensors(self) -> None:
        super()._initialize_cached_tensors()
        if is_steady(self):
            self.replay_graph.value = self.graph
        else:
            # Trees replay it, slower.
            counters["pygraph"]["unsteady_recordings"] += 1

    def remove_node_cached_tensors(self) -> None:
        self.replay_graph.value = None
        super().remove_node_cached_tensors()

    def run(self, new_inputs: list[InputType]) -> OutputType:
        outputs = super().run(new_inputs)
        self.call_tensors = []
        return outputs


def empty_capture(
    device_index: int, stream: torch.cuda.Stream, pool: _POOL_HANDLE
) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with (
        warnings.catch_warnings(record=True),  # the graph is empty
        torch.cuda.device(device_index),
        torch.cuda.graph(
            graph, pool=pool, stream=stream, capture_error_mode="thread_local"
        ),
    ):
        pass
    return graph


def clean_up_failed_capture(node: CUDAGraphNode, stream: torch.cuda.Stream) -> None:
    """
    Undoes what torch.cuda.graph leaves behind when the driver invalidated the capture:
    the capture's stream is current, allocations go to the pool, and the generators think
    that they are captured, which only the end of a capture changes.
    """
    torch.cuda.set_stream(stream)
    if torch._C._cuda_isCurrentStreamCapturing():
        raise RuntimeError("the stream is still captured")
    try:
        torch._C._cuda_endAllocateToPool(node.device, node.cuda_graphs_pool)
    except RuntimeError:
        # The failure came before the capture or after it.
        pass
    empty_capture(node.device, node.stream, torch.cuda.graph_pool_handle())


def forget(manager: CUDAGraphTreeManager, function_id: FunctionID) -> bool:
    """
    Drops the recordings of a function that is not going to be replayed, and what follows
    them in the tree. The memory pool goes with the last recording, once the caching
    allocator's cache is emptied.

    Returns False, and drops none, while one has an output that is alive, or lies on a path
    that has.
    """
    found = recordings(manager, function_id)
    last = manager.current_node
    if last is not None:
        if last.all_outputs_are_dead():
            manager.current_node = None
        elif any(node in found for node in last._path_from_root):
            return False
    if any(is_live(ref) for node in found for ref in node.outputs_weakrefs):
        return False
    drop(manager, function_id)
    if not any(manager.roots.values()):
        renew_pool(manager)
    return True


def recordings(
    manager: CUDAGraphTreeManager, function_id: FunctionID
) -> list[CUDAGraphNode]:
    """Those of a function, and what follows them in the tree."""
    found = []

    def find(
        children: dict[FunctionID, list[CUDAGraphNode]], *, follows: bool
    ) -> None:
        for id, nodes in children.items():
            of_function = follows or id == function_id
            for node in nodes:
                if of_function:
                    found.append(node)
                find(node.children, follows=of_function)

    find(manager.roots, follows=False)
    return found


def functions_around(
    manager: CUDAGraphTreeManager, function_id: FunctionID
) -> OrderedSet[Function] | None:
    """
    The other functions of the paths that one was recorded on. None if its recordings went with
    those of a function before it, until it is recorded anew.
    """
    found = recordings(manager, function_id)
    if not found:
        return None
    return OrderedSet(
        function
        for node in found
        for on_path in node._path_from_root
        if on_path.wrapped_function.id != function_id
        and (function := on_path.wrapped_function.pygraph) is not None
    )


def drop(manager: CUDAGraphTreeManager, function_id: FunctionID) -> None:
    """Called while none of them is on the current path."""
    for node in recordings(manager, function_id):
        node.remove_node_cached_tensors()
        node.graph = None
        siblings = manager.roots if node.parent is None else node.parent.children
        siblings.pop(function_id, None)


def find_held_gradients(manager: CUDAGraphTreeManager) -> None:
    """
    Called when a step begins. Functions of the last path whose gradients are still held
    are to be recorded anew, with memory of their own for them.
    """
    node = manager.current_node
    while node is not None:
        function: Function | None = node.wrapped_function.pygraph
        if function is not None and any(
            is_live(node.outputs_weakrefs[i])
            for i in function.returned_output_idxs - function.owned_output_idxs
        ):
            function.outputs_outlive = function.is_outdated = True
        node = node.parent


def renew_pool(manager: CUDAGraphTreeManager) -> None:
    """
    Exchanges a pool that no graph uses. Its segments can be freed then: what a graph that
    was dropped, or a recording that failed, had allocated.
    """
    pool = torch.cuda.graph_pool_handle()
    manager.graph = empty_capture(manager.device_index, manager.stream, pool)
    manager.cuda_graphs_thread_pool = pool
