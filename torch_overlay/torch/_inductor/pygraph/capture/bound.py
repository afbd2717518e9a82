"""
A node of CUDA graph trees that leaves nothing of the caller's in the graphs' pool.

A BoundGraphNode captures the function with placeholders in the place of the inputs that trees would copy at every
replay. A replay sets the nodes whose addresses changed and launches. The buffers that become outputs are bound to new
memory in each call (allocation.py). Liveness, generations, checkpoints of the pool, static and managed inputs are
CUDAGraphNode's.

An external input that lies in the pool, such as the output of a function that is not PyGraph's, is copied first.
"""

from __future__ import annotations

from types import CellType
from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo.utils import counters
from torch._inductor.cudagraph_trees import AliasesBoundMemory, RecordingRefused, UnaliasedStorage
from torch._inductor.cudagraph_utils import CheckInvariantStatus
from torch._inductor.pygraph.capture import allocation
from torch._inductor.pygraph.capture.again import adds_atomically, Again
from torch._inductor.pygraph.capture.branches import CapturedBranches, with_branches
from torch._inductor.pygraph.capture.collectives import Collectives
from torch._inductor.pygraph.capture.copying import CopyGraphNode
from torch._inductor.pygraph.capture.library import Scratch
from torch._inductor.pygraph.graph.binding import kernels_that_read, NodeUpdateBinding
from torch._inductor.pygraph.graph.copies import replace_copies
from torch._inductor.pygraph.graph.driver import bindings, DriverError
from torch._inductor.pygraph.graph.memory import FreeMemory, PoolRanges, room, zero_free
from torch._inductor.pygraph.graph.placeholder import PlaceholderMap, storage_extent, take_damage, tensor_at
from torch._inductor.pygraph.graph.prelude import Prelude, prelude_pays, PreludeUnavailable
from torch._inductor.pygraph.schedule.recording import ScheduledRecording
from torch._inductor.pygraph.trees.cached import are_aligned, is_steady, NotReplayed
from torch._inductor.pygraph.types.candidate import NODE_UPDATE
from torch._inductor.pygraph.types.function import Evidence
from torch._inductor.pygraph.types.reason import Code, first_line, Reason, RefusedError
from torch._inductor.pygraph.verify.diagnose import verify
from torch._inductor.pygraph.verify.proof import mark_unwritten
from torch._inductor.pygraph.verify.rehearsal import Rehearsal, SavedInput, write
from torch._inductor.utils import clone_preserve_strides
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from typing import NoReturn

    from torch._inductor.cudagraph_utils import ModelType, OutputType
    from torch._inductor.utils import InputType


class BoundGraphNode(CopyGraphNode):
    """
    See the module's docstring. What is bound is numbered alike everywhere: the external inputs in the order of
    ``bound_input_idxs``, then the outputs' allocations. In addresses, the words of CPU values follow.

    Attributes:
        call_tensors: what is bound, in the current call
        input_pointers: addresses of the external inputs in the last call
        written_bound: external inputs that the graph writes, by their number
        staged: (number, input, copy that the graph reads) of the current call
        replay_graph: a cell with the graph while the node can be replayed without trees (replay/), else None
    """

    binds_values = True
    binding: NodeUpdateBinding
    prelude: Prelude | None = None
    call_tensors: list[torch.Tensor]
    input_pointers: list[int]
    alignment: int
    allocators: list[Callable[[], torch.Tensor]]
    pool_ranges: PoolRanges
    written_bound: OrderedSet[int]
    staged: list[tuple[int, torch.Tensor, torch.Tensor]]
    replay_graph: CellType

    # While it is recorded.
    collectives: Collectives | None = None
    scheduled: ScheduledRecording | None = None
    # For each choice of paths.
    path_rehearsals: list[tuple[dict[str, bool], Rehearsal]] = []
    saved_managed: Mapping[int, SavedInput] = {}
    memory: allocation.BoundMemory
    layout: allocation.OutputLayout
    rehearsal: Rehearsal | None = None

    # Recording, in the order in which CUDAGraphNode's constructor calls it

    def _bind_inputs(self, inputs: list[InputType]) -> list[int]:
        function = self.wrapped_function
        spec = self.request.spec
        super()._bind_inputs(inputs)
        if self.steps is not None:
            self.collectives = Collectives(function.model, self.steps, self.device, binds_all=spec.info.ranks_decide)
        self.replay_graph = CellType(None)
        self.staged = []
        # Integers are sizes. Each combination of them has a function of its own.
        external = {i: t for i in self.non_static_input_idx if isinstance(t := inputs[i], torch.Tensor)}
        self.non_static_input_idx = [*external]
        device = torch.device("cuda", self.device)
        bound = [i for i, t in external.items() if t.device == device]
        self._learned(external_inputs=len(bound))
        if any(not t.is_cuda and t.numel() > 0 for t in external.values()):
            # The graph would replay the values of this call.
            self._refuse(Reason.of(Code.CPU_INPUT), inputs, is_capturable=False)
        if self.cudagraph_managed_idxs:
            if any(i in self.cudagraph_managed_idxs for i in function.mutated_input_idxs):
                # Capture has to let go of managed inputs, so that the mutation could not be undone.
                self._refuse(Reason.of(Code.MUTATED_GRAPH_OUTPUT), inputs)
            if self.collectives is not None and not spec.info.ranks_decide:
                # The proof overwrites managed inputs, and the call runs the graph again.
                self._refuse(Reason.of(Code.COLLECTIVE_AFTER_GRAPH), inputs)
        try:
            external_inputs = self._leave_pool(bound, inputs)
            self.input_pointers = [t.data_ptr() for t in external_inputs]
            self.alignment = min(self.request.state.alignment, allocation.common_alignment(self.input_pointers))
            self._learned(alignment=self.alignment, external_bytes=sum(map(storage_extent, external_inputs)))
            self._rehearse(inputs)
            self.memory, self.call_tensors = allocation.BoundMemory.place(
                external_inputs, self.alignment, self.layout, self.device
            )
            self.allocators = self.memory.allocators
            # After the outputs have their memory, in which nothing of the pool can lie.
            if (lack := self._lack_of_memory()) is not None:
                raise RefusedError(lack, is_capturable=False)
            if self.collectives is not None:
                self.collectives.agree_to_capture()
        except RecordingRefused:
            raise
        except RefusedError as e:
            self._refuse(e.reason, inputs, is_capturable=e.is_capturable)
        except torch.OutOfMemoryError:
            # Copies may not fit either.
            self._refuse(Reason.of(Code.NO_MEMORY_BEFORE_CAPTURE), inputs, is_capturable=False)
        except Exception as e:
            # If the error is the program's own, the uncaptured run raises it again.
            self._refuse(Reason.of(Code.ERROR, error=f"{type(e).__name__}: {first_line(e)}"), inputs)
        return bound

    def _leave_pool(self, bound: list[int], inputs: list[InputType]) -> list[torch.Tensor]:
        """Return the external inputs. Those in the pool are replaced by copies."""
        pool = PoolRanges(self.cuda_graphs_pool)
        for i in bound:
            t: torch.Tensor = inputs[i]  # type: ignore[assignment]
            if t.data_ptr() in pool:
                if i in self.wrapped_function.mutated_input_idxs:
                    self._refuse(Reason.of(Code.MUTATED_POOL_INPUT), inputs)
                inputs[i] = self.call_inputs[i] = clone_preserve_strides(t)
        return [inputs[i] for i in bound]  # type: ignore[misc]

    def _rehearse(self, inputs: list[InputType]) -> None:
        function, request = self.wrapped_function, self.request
        collectives = self.collectives
        branches = self.branches
        managed = self.cudagraph_managed_idxs
        # The graph overwrites managed inputs. With collectives or branches, the call runs again after the proof, and
        # needs copies of these inputs. A proof needs them to find out why results differ. It always finds that out
        # if the function calls custom operators: what these do may differ later.
        is_rerun = (collectives or branches) is not None
        wants_copies = request.state.evidence == Evidence.COPIES or request.spec.info.calls_custom
        if managed and not is_rerun and wants_copies:
            is_rerun = self._has_room_for_copies(inputs)
            if request.spec.info.calls_custom and not is_rerun:
                raise RefusedError(Reason.of(Code.NO_MEMORY_FOR_PROOF), is_capturable=False)
        free = FreeMemory(self.cuda_graphs_pool, self.device) if managed and not is_rerun else None
        trace = allocation.AllocationTrace(() if collectives is None else collectives.operands, free)
        traced = with_branches(allocation.with_allocator(function.model, request.spec.info, trace), branches)
        self.scheduled = scheduled = ScheduledRecording(
            request, self.device, self.cuda_graphs_pool, has_managed=bool(self.cudagraph_managed_idxs)
        )

        # A gradient may be written over an activation of the pool, which is dead then.
        reused = request.spec.reused_input_idxs & OrderedSet(self.cudagraph_managed_idxs)
        kept = [t for i, t in enumerate(inputs) if i not in reused]

        # Without the node, which has to be gone before the function runs again.
        def run(inputs: list[InputType]) -> OutputType:
            trace.begin()
            return traced(inputs, **scheduled.note_rehearsal())

        def along(chosen: dict[str, bool]) -> ModelType:
            return run if branches is None else branches.along(chosen, run)

        def inspect(outputs: OutputType) -> list[int]:
            self.layout = allocation.OutputLayout.of(
                trace,
                outputs,
                request.owned_output_idxs,
                known=[*kept, *function.constants],
                # Of a collective's operand that moves, the graph makes a copy.
                external=[] if request.spec.info.ranks_decide else [inputs[i] for i in self.non_static_input_idx],
                device=torch.device("cuda", self.device),
            )
            return trace.others_of(outputs)

        if is_rerun and managed:
            self.saved_managed = {i: SavedInput(inputs[i]) for i in managed}  # type: ignore[arg-type]
            inputs = [self.saved_managed[i].like(t) if i in managed else t for i, t in enumerate(inputs)]  # type: ignore[arg-type]
            managed = []

        def rehearse(chosen: dict[str, bool]) -> Rehearsal:
            return Rehearsal(
                function.model,
                collectives.rehearsed(run) if collectives is not None else along(chosen),
                inspect,
                inputs,
                device_index=self.device,
                managed=OrderedSet(managed),
                mutated=list(function.mutated_input_idxs),
                reused=request.spec.reused_input_idxs,
                free=free,
                runs_again=request.state.evidence >= Evidence.FURTHER_RUNS,
            )

        paths = [dict(choice) for choice in request.spec.info.paths]
        self.path_rehearsals = [(chosen, rehearse(chosen)) for chosen in paths]
        self.rehearsal = rehearse({})
        # Memory of the paths cannot be used in front of or behind them.
        most = max((other.needed_bytes for _, other in self.path_rehearsals), default=0)
        self._learned(needed_bytes=self.rehearsal.needed_bytes + most)

    def _has_room_for_copies(self, inputs: list[InputType]) -> bool:
        copied_bytes = sum(storage_extent(inputs[i]) for i in self.cudagraph_managed_idxs)  # type: ignore[arg-type]
        # The rehearsal and the capture each take what a call takes.
        return room(self.device) >= copied_bytes + 2 * self.request.state.needed_bytes

    def _needed_bytes(self) -> int:
        if self.rehearsal is None:
            return self.request.state.needed_bytes
        return (self.facts.needed_bytes or 0) + self.layout.copied_bytes

    def _refuse(
        self, reason: Reason, inputs: list[InputType], *, is_capturable: bool = True, **kwargs: Any
    ) -> NoReturn:
        if self.steps is not None:
            # Other ranks do not capture it again: this one may not be able to.
            is_capturable = is_capturable and not self.steps.has_begun
        if self.rehearsal is not None:
            kwargs["rerun"] = self.rehearsal.rerun
        super()._refuse(reason, inputs, is_capturable=is_capturable, **kwargs)

    def _recording_input(self, idx: int, inp: torch.Tensor) -> torch.Tensor:
        if idx not in self.bound_input_idxs:
            return super()._recording_input(idx, inp)
        place = self.memory.placeholders.placeholders[self.bound_input_idxs.index(idx)]
        return tensor_at(place.address, inp, self.device)

    def _new_graph(self) -> torch.cuda.CUDAGraph:
        # The nodes of the captured graph are the handles of the executable graph's.
        return torch.cuda.CUDAGraph(keep_graph=True)

    def _record(self, model: ModelType, inputs: list[InputType]) -> OutputType:
        scheduled, needed_bytes = self.scheduled, self.rehearsal.needed_bytes
        buffers = scheduled.allocator(self.bound_input_idxs, allocation.empty_strided_cuda, needed_bytes)
        placed = allocation.placed_allocator(self.memory.allocations, self.device, buffers)
        model = self._with_branches(allocation.with_allocator(model, self.request.spec.info, placed))
        model = scheduled.note_capture(model)
        if self.collectives is not None:
            model = self.collectives.captured(model, self.memory.placeholders)
        self.copied = allocation.Copied(model, self.memory.copies, self.device)
        return super()._record(self.copied, inputs)

    def _bound_memory_alias(self, output: torch.Tensor) -> AliasesBoundMemory | None:
        hit = self.memory.placeholders.find(output.untyped_storage().data_ptr())
        if hit is None:
            return None
        k, offset = hit
        offset += output.storage_offset() * output.element_size()
        is_whole = offset == 0 and allocation.Allocation.of(output) == allocation.Allocation.of(self.call_tensors[k])
        return AliasesBoundMemory(k, offset, is_whole)

    def _first_replay(self) -> None:
        with torch.cuda.device(self.device):
            try:
                self._bind_graph(self.graph)
                self._prove(self.graph)
            except RefusedError as e:
                self._refuse(e.reason, self.call_inputs, is_capturable=e.is_capturable)
            except DriverError as e:
                self._refuse(Reason.of(Code.DRIVER, error=str(e)), self.call_inputs)
        self._recorded()

    def _bind_graph(self, graph: torch.cuda.CUDAGraph) -> None:
        """Bind the captured graph to the tensors of the call. Raises RefusedError, DriverError."""
        bound = self.memory.placeholders
        placeholders = PlaceholderMap([*bound.placeholders, *self.values.placeholders()])
        self._learned(schedule=self.scheduled.apply(graph.raw_cuda_graph(), placeholders))
        replace_copies(graph.raw_cuda_graph(), placeholders, self.device, self._bodies)
        self.prelude = self._add_prelude(graph, placeholders)
        self._instantiate(graph, placeholders)
        words = range(len(self.call_tensors), len(placeholders.placeholders))
        if not all(self.binding.nodes_of[k] for k in words):
            raise RefusedError(Reason.of(Code.CPU_VALUE_NOT_FOUND))
        if self.request.spec.info.calls_custom:
            self._check_written(graph, placeholders)
        if self.collectives is not None:
            self.collectives.set_aside(graph.raw_cuda_graph_exec(), bound)
        # Forget the damage of others.
        take_damage(self.device)
        self.binding.update([t.data_ptr() for t in self.call_tensors] + self.values.words())

    def _check_written(self, graph: torch.cuda.CUDAGraph, placeholders: PlaceholderMap) -> None:
        """
        Raise RefusedError if no node has an input that the function writes. In this call, an operator that is not captured may
        have written what was there before: no comparison shows that.
        """
        # The binding lacks nodes that the graph sets itself.
        readers = kernels_that_read(bindings().CUgraph(graph.raw_cuda_graph()), placeholders)
        held = OrderedSet(word.input for reader in readers for *_, word in reader.words)
        held |= (k for k, nodes in enumerate(self.binding.nodes_of) if nodes)
        for k, i in enumerate(self.bound_input_idxs):
            if i in self.wrapped_function.mutated_input_idxs and self.call_tensors[k].numel() and k not in held:
                raise RefusedError(Reason.of(Code.KERNELS_NOT_CAPTURED), is_capturable=False)

    @property
    def _bodies(self) -> Mapping[int, Sequence[Any]]:
        return self.branches.bodies if isinstance(self.branches, CapturedBranches) else {}

    def _instantiate(self, graph: torch.cuda.CUDAGraph, placeholders: PlaceholderMap) -> None:
        """Make the executable graph, and its binding. Raises RefusedError, DriverError."""
        try:
            graph.instantiate()
        except RuntimeError as e:
            raise RefusedError(Reason.of(Code.INSTANTIATE_FAILED, error=first_line(e))) from e
        set_on_device: Collection[int] = ()
        if self.prelude is not None:
            self.prelude.upload(graph.raw_cuda_graph_exec())
            set_on_device = self.prelude.nodes
        self.binding = NodeUpdateBinding(
            graph.raw_cuda_graph(), graph.raw_cuda_graph_exec(), placeholders, set_on_device, self._bodies
        )

    def _remove_stand_ins(self, graph: torch.cuda.CUDAGraph) -> None:
        """Instantiate the proven graph again, without the stand-ins of its collectives. Raises RefusedError, DriverError."""
        # The driver makes one executable graph of a graph that sets its own nodes.
        if self.prelude is None and self.collectives.stand_ins:
            pointers = self.binding.pointers
            self.collectives.remove_stand_ins(graph.raw_cuda_graph())
            bound = self.memory.placeholders.placeholders
            self._instantiate(graph, PlaceholderMap([*bound, *self.values.placeholders()]))
            self.binding.update(pointers)

    def _add_prelude(self, graph: torch.cuda.CUDAGraph, placeholders: PlaceholderMap) -> Prelude | None:
        request, raw_graph = self.request, graph.raw_cuda_graph()
        if request.state.binding == NODE_UPDATE or not (request.is_decided or prelude_pays(raw_graph, placeholders)):
            return None
        if self.branches is not None:
            # Whether the device can update nodes of paths is not known.
            error = "it has branches"
            self._learned(no_prelude=Reason.of(Code.NO_PRELUDE, binding=request.state.binding, error=error))
            return None
        self._learned(has_prelude=True)
        try:
            return Prelude(raw_graph, placeholders, self.device)
        except PreludeUnavailable as e:
            # The host can set the nodes.
            reason = Reason.of(Code.NO_PRELUDE, binding=request.state.binding, error=str(e))
            self._learned(has_prelude=False, no_prelude=reason)
            return None

    def _prove(self, graph: torch.cuda.CUDAGraph) -> None:
        """Run the bound graph once and compare it with the rehearsal. Raises RefusedError, DriverError."""
        self.recording_outputs = list(self.recording_outputs)  # type: ignore[arg-type]
        self.pool_ranges = PoolRanges(self.cuda_graphs_pool)
        for i, alias in enumerate(self.output_storage_alias):
            if isinstance(alias, AliasesBoundMemory):
                metadata: Any = self.outputs_metadata[i]
                self.recording_outputs[i] = self._alias_of_bound_memory(alias, metadata)
        for chosen, rehearsal in self.path_rehearsals:
            self._choose_paths(graph, chosen)
            self._compare(graph, rehearsal)
        self._choose_paths(graph, {})
        self._compare(graph, self.rehearsal)
        if self.collectives is not None:
            self._remove_stand_ins(graph)
            self.collectives.agree_to_deploy(graph.raw_cuda_graph_exec())
            # The call itself: other ranks wait for its collectives.
            self.rehearsal.restore()
            self._run_again()

    def _choose_paths(self, graph: torch.cuda.CUDAGraph, chosen: dict[str, bool]) -> None:
        if isinstance(self.branches, CapturedBranches):
            self.branches.choose(graph.raw_cuda_graph_exec(), chosen, self.binding.updates)
            # The run before wrote inputs.
            self.rehearsal.restore()

    def _compare(self, graph: torch.cuda.CUDAGraph, rehearsal: Rehearsal) -> None:
        """Run the graph and compare it with a rehearsal. Raises RefusedError if it differs."""
        self._mark_memory()
        try:
            self._run_again()
        except RuntimeError as e:
            raise RefusedError(Reason.of(Code.LAUNCH_FAILED, error=first_line(e))) from e
        calls_custom = self.request.spec.info.calls_custom
        verdict = verify(rehearsal, self._run_again, self.recording_outputs, calls_custom=calls_custom)
        if (failure := self.prelude and self.prelude.failure()) is not None:
            raise RefusedError(failure, is_capturable=verdict.is_capturable)
        reason = verdict.reason
        if reason is None:
            return
        if verdict.is_capturable and rehearsal.can_rerun:
            difference = self._launch_difference(graph)
            may_vary = verdict.may_vary(adds_atomically(self.request.spec))
            if may_vary and difference is None:
                return
            if may_vary and difference:
                reason = Reason.of(Code.LAUNCHES_DIFFER, difference=difference)
            else:
                # If the launches are the same, no parameter of a kernel hides an address.
                launches = "the same" if difference is None else difference or "not compared"
                reason = Reason.of(reason.code, **reason.details, launches=launches)
        self._learned(needs_evidence=not rehearsal.can_rerun)
        raise RefusedError(reason, is_capturable=verdict.is_capturable)

    def _launch_difference(self, graph: torch.cuda.CUDAGraph) -> str | None:
        """
        Capture the function again. Return how its launches differ from the graph's, or None if they are the same. Return an
        empty string if they cannot be compared.
        """
        spec = self.request.spec
        if self.values.delivers or self.collectives or self.branches is not None:
            return ""
        # A capture that runs out of memory leaves some of it allocated. A refused graph's call then runs uncaptured, and needs
        # memory for that.
        if room(self.device) < 2 * self._needed_bytes():
            return ""
        inputs = [*self.call_inputs]
        self.restore_managed(inputs)
        scratch = Scratch(self.device, self.stream)
        model = self.scheduled.allocating_alike(self.wrapped_function.model)
        placed = [self._recording_input(i, t) if i in self.bound_input_idxs else t for i, t in enumerate(inputs)]  # type: ignore[arg-type]
        again = Again(model, spec, inputs, placed, self.memory, self.call_tensors, scratch)
        return again.difference(graph, self.pool_ranges, 0 if self.prelude is None else len(self.prelude.arrays))

    def _run_again(self) -> None:
        for i, metadata in self.managed_metadata:
            if (saved := self.saved_managed.get(i)) is not None:
                saved.restore(self._reconstruct_from_tensor_metadata(metadata))
        self.run_graph()

    def _mark_memory(self) -> None:
        """Mark the memory of outputs, and zero temporary memory, so that it shows what the graph does not write."""
        for t in self.call_tensors[len(self.bound_input_idxs) :]:
            mark_unwritten(t)
        if self.request.spec.info.calls_custom:
            # While the graph was captured, an operator may have written its results there, and static inputs, on another
            # stream. That stream may still run. The graph may read the memory as indices, and zero is always in bounds.
            torch.cuda.synchronize()
            if self.rehearsal.can_rerun:
                self.rehearsal.restore()
            zero_free(self.cuda_graphs_pool, self.device)
        # An output may lie in the memory of a managed input, which the graph has yet to read. If there are copies,
        # _run_again writes the inputs back.
        metadata = () if self.saved_managed else [m for _, m in self.managed_metadata]
        managed = [(m["data_ptr"], m["data_ptr"] + m["nbytes"]) for m in metadata]
        outputs = zip(self.recording_outputs, self.output_storage_alias)  # type: ignore[arg-type]
        for t in (*(t for t, alias in outputs if alias is UnaliasedStorage), *self.copied.sources):
            # Outside of the pool an operator may have computed it once for all calls.
            if not isinstance(t, torch.Tensor) or (start := t.data_ptr()) not in self.pool_ranges:
                continue
            if not any(start < last and first < start + storage_extent(t) for first, last in managed):
                mark_unwritten(t)

    def _recorded(self) -> None:
        # A backward may write over an activation. A gradient that lies there is rebuilt from the input.
        written = self.request.spec.reused_input_idxs | OrderedSet(self.wrapped_function.mutated_input_idxs)
        self.written_bound = OrderedSet(k for k, i in enumerate(self.bound_input_idxs) if i in written)
        if self.collectives is not None:
            self._learned(staged_bytes=self.collectives.staged_bytes)
        self.rehearsal = self.collectives = self.scheduled = None
        self.path_rehearsals = []
        self.saved_managed = {}
        self.call_tensors = []
        del self.memory, self.layout, self.copied
        updated_nodes, counts = len(self.binding.updates), counters["pygraph"]
        if self.prelude is not None:
            counts["device_updated_nodes"] += len(self.prelude.nodes)
        counts["bound_inputs"] += len(self.bound_input_idxs)
        counts["bound_outputs"] += len(self.allocators)
        counts["updated_nodes"] += updated_nodes
        self._learned(num_nodes=self.binding.num_nodes, updated_nodes=updated_nodes)
        super()._recorded()

    # Replay, by trees

    def _alias_of_bound_memory(self, alias: AliasesBoundMemory, metadata: dict[str, Any]) -> torch.Tensor:
        bound = self.call_tensors[alias.index]
        if alias.is_whole:
            # If it is an input, the caller's own object: autograd watches its version counter.
            return bound
        offset = bound.storage_offset() * bound.element_size() + alias.offset
        metadata = {**metadata, "storage_offset": offset // metadata["dtype"].itemsize}
        return self._reconstruct_from_tensor_metadata(metadata, bound.untyped_storage())

    def check_invariants(self, inputs: list[InputType]) -> tuple[CheckInvariantStatus, Callable[..., str]]:
        pointers = [inputs[i].data_ptr() for i in self.bound_input_idxs]  # type: ignore[union-attr]
        if pointers != self.input_pointers:
            if not are_aligned(pointers, self.alignment):
                status = CheckInvariantStatus.BoundInputAlignmentMismatch
                return status, lambda: str(status)
            self.input_pointers = pointers
        return super().check_invariants(inputs)

    def _copy_inputs_and_remove_from_src(self, dsts: list[InputType], srcs: list[InputType]) -> None:
        super()._copy_inputs_and_remove_from_src(dsts, srcs)
        if self.rehearsal is not None:
            # The node is being recorded, at placeholders.
            return
        # Before the allocations: the collector may run a finalizer there that packs other values.
        words = self.values.words()
        outputs = [allocate() for allocate in self.allocators]
        self.call_tensors = [srcs[i] for i in self.bound_input_idxs] + outputs  # type: ignore[assignment]
        pointers = self.input_pointers + [t.data_ptr() for t in outputs] + words
        if pointers != self.binding.pointers:
            try:
                self.move(self.call_tensors, pointers)
            except DriverError as e:
                # The call is about to run uncaptured, on all of its inputs.
                raise NotReplayed(self.restore_managed(srcs), e) from e

    def move(self, tensors: list[torch.Tensor], pointers: list[int]) -> None:
        """Bind the tensors of a call. Raises DriverError if a node refused: the graph must not be launched then."""
        copies = []
        for k in range(len(self.bound_input_idxs)):
            if pointers[k] in self.pool_ranges:
                staged = clone_preserve_strides(tensors[k])
                pointers[k] = staged.data_ptr()
                copies.append((k, tensors[k], staged))
                counters["pygraph"]["staged_inputs"] += 1
        self.binding.update(pointers)
        # If the update raises, nothing is written back.
        self.staged = copies

    def run_graph(self) -> None:
        super().run_graph()
        for k, original, staged in self.staged:
            if k in self.written_bound:
                write(original, staged)
        self.staged = []

    def _initialize_cached_tensors(self) -> None:
        super()._initialize_cached_tensors()
        if is_steady(self):
            self.replay_graph.cell_contents = self.graph
        else:
            # Trees replay it, which is slower.
            counters["pygraph"]["unsteady_recordings"] += 1

    def remove_node_cached_tensors(self) -> None:
        self.replay_graph.cell_contents = None
        super().remove_node_cached_tensors()

    def run(self, new_inputs: list[InputType]) -> OutputType:
        outputs = super().run(new_inputs)
        self.call_tensors = []
        return outputs
