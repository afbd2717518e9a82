"""
A node of CUDA graph trees whose outputs belong to the caller. Trees return outputs in the graphs' pool, where the next
replay overwrites them. A CopyGraphNode copies them out, and its external inputs into the pool, as trees do.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo.utils import counters
from torch._inductor.cudagraph_trees import AliasesBoundMemory, CompilationMode, CUDAGraphNode, RecordingRefused
from torch._inductor.pygraph.capture.agreement import Steps
from torch._inductor.pygraph.capture.allocation import Allocation
from torch._inductor.pygraph.capture.branches import CapturedBranches, RehearsedBranches, with_branches
from torch._inductor.pygraph.capture.collectives import captured_together
from torch._inductor.pygraph.capture.custom import with_custom_operators
from torch._inductor.pygraph.graph.memory import lack_of_memory
from torch._inductor.pygraph.graph.placeholder import storage_extent
from torch._inductor.pygraph.trees.cached import CachedTensor, is_lazy, NotReplayed, renew
from torch._inductor.pygraph.trees.manager import destroy_graph, empty_capture, without_trees
from torch._inductor.pygraph.types.function import RecordingFacts, RecordingRequest, Refused
from torch._inductor.pygraph.types.reason import Code, first_line, Reason, RefusedError
from torch._inductor.pygraph.values.deliver import CapturedValues
from torch._inductor.pygraph.verify.kept import apart
from torch._inductor.pygraph.verify.rehearsal import HostGenerators, Rehearsal
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn

    from torch._inductor.cudagraph_trees import StorageWeakRefWrapper
    from torch._inductor.cudagraph_utils import CheckInvariantStatus, ModelType, OutputType
    from torch._inductor.pygraph.trees.manager import GraphPolicy
    from torch._inductor.utils import InputType


class CopyGraphNode(CUDAGraphNode):
    """
    See the module's docstring. Raises RecordingRefused.

    Attributes:
        facts: what the recording found out until now
        call_inputs: the inputs of the call that records, None for managed ones
        returned_from_pool: outputs in the pool that each call copies: (output, first output that is the same tensor) in
            one list for each storage
        returned_inputs: the static input that an output is, by output
        made_outputs: what makes views of static inputs, and outputs without elements, by output
        managed_metadata: (input, metadata) of inputs that earlier graphs of the path left in the pool
        thread_of_values: the only thread that may replay the graph, which reads memory that this thread packs
    """

    request: RecordingRequest
    facts = RecordingFacts()
    call_inputs: list[InputType]
    returned_from_pool: list[list[tuple[int, int]]]
    returned_inputs: dict[int, int]
    made_outputs: dict[int, Callable[[], torch.Tensor]]
    managed_metadata: list[tuple[int, dict[str, Any]]]
    values: CapturedValues
    thread_of_values: int | None = None
    binds_values = False

    # While it is recorded.
    graph: torch.cuda.CUDAGraph | None = None
    steps: Steps | None = None
    branches: RehearsedBranches | CapturedBranches | None = None

    def __init__(self, *args: Any) -> None:
        try:
            with without_trees():
                super().__init__(*args)
        except BaseException:
            self._abandon()
            raise
        if self.non_static_input_idx and torch.is_inference_mode_enabled():
            # Later calls could else copy their inputs only in inference mode.
            with torch.inference_mode(False):
                self.reconstructed_inputs = [
                    self._reconstruct_from_tensor_metadata(self._tensor_metadata(t))
                    if isinstance(t, torch.Tensor)
                    else t
                    for t in self.reconstructed_inputs
                ]

    def _abandon(self) -> None:
        """Called when there is no recording, for whatever reason."""
        if self.steps is not None:
            self.steps.refuse()
        destroy_graph(self)

    @property
    def policy(self) -> GraphPolicy:
        return self.wrapped_function.pygraph

    def _learned(self, **facts: Any) -> None:
        self.facts = dataclasses.replace(self.facts, **facts)

    def _declared_static_idxs(self, inputs: list[InputType], mode: CompilationMode | None) -> Sequence[int]:
        declared = super()._declared_static_idxs(inputs, mode)
        managed = OrderedSet(self.cudagraph_managed_idxs)
        if mode == CompilationMode.BACKWARD:
            # Trees take every saved tensor for static. They move in every step if the forward is no graph.
            saved = self.policy.spec.info.saved_input_idxs
            declared = [i for i in declared if i in managed or i not in saved]
        unmanaged = {i: t for i in declared if i not in managed and isinstance(t := inputs[i], torch.Tensor)}
        self.request = self.policy.request(unmanaged)
        if (refusal := self.request.refusal) is not None:
            self._refuse(refusal, inputs, is_capturable=False)
        static = OrderedSet(self.request.static_input_idxs)
        return [i for i in declared if i in managed or i in static or not isinstance(inputs[i], torch.Tensor)]

    def _bind_inputs(self, inputs: list[InputType]) -> list[int]:
        self.managed_metadata = [
            (i, self._tensor_metadata(inputs[i], ignore_storage_offset=False))  # type: ignore[arg-type]
            for i in self.cudagraph_managed_idxs
        ]
        spec, info = self.policy.spec, self.policy.spec.info
        if info.collectives:
            self.steps = Steps(spec.number_on_ranks, info.groups)
        if (lack := self._lack_of_memory()) is not None:
            self._refuse(lack, inputs, is_capturable=False)
        if info.paths:
            if info.collectives:
                self._refuse(Reason.of(Code.BRANCH_WITH_COLLECTIVES), inputs, is_capturable=False)
            self.branches = RehearsedBranches()
            if not self.binds_values:
                self._run_paths(self.branches, inputs)
        managed = OrderedSet(self.cudagraph_managed_idxs)
        # Managed inputs have to die during capture as they will in replay.
        self.call_inputs = [None if i in managed else t for i, t in enumerate(inputs)]
        return super()._bind_inputs(inputs)

    def _run_paths(self, branches: RehearsedBranches, inputs: list[InputType]) -> None:
        """Run each path once, so that the capture loads no kernel. Inputs and generators are as before."""
        model = self.wrapped_function.model
        try:
            for choice in self.request.spec.info.paths:
                Rehearsal(
                    model,
                    branches.along(dict(choice), with_branches(model, branches)),
                    lambda outputs: [],
                    inputs,
                    device_index=self.device,
                    managed=OrderedSet(),
                    mutated=list(self.wrapped_function.mutated_input_idxs),
                    reused=self.request.spec.reused_input_idxs,
                )
            return
        except RefusedError as e:
            reason = e.reason
        except torch.OutOfMemoryError:
            reason = Reason.of(Code.NO_MEMORY_BEFORE_CAPTURE)
        except Exception as e:
            # If the error is the program's own, the uncaptured run raises it again.
            reason = Reason.of(Code.ERROR, error=f"{type(e).__name__}: {first_line(e)}")
        self._refuse(reason, inputs, is_capturable=False)

    def _with_branches(self, model: ModelType) -> ModelType:
        """Return ``model`` whose branches are captured."""
        if isinstance(self.branches, RehearsedBranches):
            self.branches = CapturedBranches(self.branches, self.device, self.cuda_graphs_pool)
        return with_branches(model, self.branches)

    def _refuse(
        self,
        reason: Reason,
        inputs: list[InputType],
        *,
        is_capturable: bool = True,
        restored: frozenset[int] = frozenset(),
        rerun: Callable[[], OutputType] | None = None,
    ) -> NoReturn:
        # Closures must not keep the node, which has to be gone before the function runs.
        model = self.wrapped_function.model
        rerun = rerun or (lambda: apart(model(inputs), restored))
        raise RecordingRefused(Refused(reason, is_capturable, self.facts, rerun))

    def _needed_bytes(self) -> int:
        """Return the device memory that the capture takes, or 0 if that is not known."""
        needed = self.request.state.needed_bytes
        # Inputs get copies in the pool, outputs, a part of what a call takes, outside of it.
        return 2 * needed + self.request.external_bytes if needed else 0

    def _lack_of_memory(self) -> Reason | None:
        needed = self._needed_bytes()
        return lack_of_memory(needed, self.device, self.cuda_graphs_pool) if needed else None

    def check_invariants(self, inputs: list[InputType]) -> tuple[CheckInvariantStatus, Callable[..., str]]:
        read = (*self.non_static_input_idx, *self.bound_input_idxs)
        if self.thread_of_values not in (None, threading.get_ident()) or any(
            isinstance(t := inputs[i], torch.Tensor) and is_lazy(t) for i in read
        ):
            raise NotReplayed
        try:
            return super().check_invariants(inputs)
        except RuntimeError:
            # Trees let go of the inputs to see whether they die.
            raise NotReplayed(self.restore_managed(inputs)) from None

    def restore_managed(self, inputs: list[InputType]) -> frozenset[int]:
        """Rebuild managed inputs that were let go, and nothing has overwritten. Return their addresses."""
        for i, metadata in self.managed_metadata:
            inputs[i] = self._reconstruct_from_tensor_metadata(metadata)
        return frozenset(metadata["data_ptr"] for _, metadata in self.managed_metadata)

    def _record(self, model: ModelType, inputs: list[InputType]) -> OutputType:
        copied = (inputs[i] for i in self.non_static_input_idx)
        copied_bytes = sum(storage_extent(t) for t in copied if isinstance(t, torch.Tensor))
        self._learned(has_captured=True, copied_bytes=copied_bytes)
        stream = torch.cuda.current_stream(self.device)
        spec = self.request.spec
        own = [spec.objects[name] for name in spec.info.delivers]
        self.values = CapturedValues(own, is_bound=self.binds_values)
        # A rehearsal has seen already whether the function draws on the host.
        is_rehearsed = self.request.state.needed_bytes or self.facts.needed_bytes
        host = None if is_rehearsed else HostGenerators()
        if spec.info.calls_custom:
            model = with_custom_operators(model)
        if not self.binds_values:
            model = self._with_branches(model)
            if self._ranks_decide():
                if not self.steps.capture():
                    self._give_up(Reason.of(Code.RANKS_DISAGREE_ON_CAPTURE))
                model = captured_together(model, self.steps)
        try:
            with self.values:
                outputs = super()._record(model, inputs)
        except Exception as e:
            # The end of a capture that was left raises in its turn.
            cause = e.__context__ if isinstance(e.__context__, RefusedError) else e
            failed = Reason.of(Code.CAPTURE_FAILED, error=first_line(e))
            reason = cause.reason if isinstance(cause, RefusedError) else failed
        else:
            if host is not None and not host.equals(HostGenerators()):
                host.restore()
                self._give_up(Reason.of(Code.HOST_RANDOM))
            if any(isinstance(t, torch.Tensor) and is_lazy(t) for t in outputs):
                # Later calls rebuild outputs from addresses, sizes and strides.
                self._give_up(Reason.of(Code.LAZY_OUTPUT))
            if self.values.delivers and not self.binds_values:
                self.thread_of_values = threading.get_ident()
            return outputs
        clean_up_failed_capture(self, stream)
        self._give_up(reason)

    def _recording_input(self, idx: int, inp: torch.Tensor) -> torch.Tensor:
        try:
            return super()._recording_input(idx, inp)
        except torch.OutOfMemoryError:
            # The exception holds the copies that were made, so that the refusal is raised behind it.
            pass
        self._give_up(Reason.of(Code.NO_MEMORY_BEFORE_CAPTURE))

    def _ranks_decide(self) -> bool:
        return self.steps is not None and self.request.spec.info.ranks_decide and bool(self.steps.groups)

    def _first_replay(self) -> None:
        if self._ranks_decide() and not self.steps.deploy():
            self._give_up(Reason.of(Code.RANKS_DISAGREE_ON_DEPLOY))
        try:
            super()._first_replay()
        except RuntimeError as e:
            failure = Reason.of(Code.LAUNCH_FAILED, error=first_line(e))
        else:
            self._recorded()
            return
        self._give_up(failure)

    def _recorded(self) -> None:
        """Called when the recording is complete."""
        self.call_inputs = []
        self.branches = self.steps = None
        self.policy.recorded(self.facts)

    def _give_up(self, reason: Reason) -> NoReturn:
        """Refuse the recording with any binding, once managed inputs have died."""
        restored = self.restore_managed(self.call_inputs)
        self._refuse(reason, self.call_inputs, is_capturable=False, restored=restored)

    def _add_first_outputs(
        self, outputs: OutputType, static_input_persistent_storage_ptrs: dict[int, StorageWeakRefWrapper]
    ) -> None:
        """Take note of outputs that lie in a static input, or nowhere."""
        # Trees return the recorded object for these. Autograd watches the version counter of a parameter that is saved,
        # and gives a history to a tensor without elements, or to a view of a parameter.
        super()._add_first_outputs(outputs, static_input_persistent_storage_ptrs)
        self.returned_inputs, self.made_outputs = {}, {}
        for i, t in enumerate(self.static_output_tensors):
            if t is None:
                continue
            if same := [j for j in self.non_managed_static_input_idxs if self.call_inputs[j] is t]:
                self.returned_inputs[i] = same[0]
            elif t.numel() > 0:
                # The program may change the sizes of ``t``, and give it a history.
                self.made_outputs[i] = t.detach().detach
            else:
                self.made_outputs[i] = Allocation.of(t).allocator(self.device)
            # A stand-in, so that the recording does not keep the tensor alive.
            self.static_output_tensors[i] = torch.empty(0, device="cpu")

    def run_graph(self) -> None:
        if not self.binds_values:
            self.values.write()
        super().run_graph()

    def _initialize_cached_tensors(self) -> None:
        """Take a cached tensor for alive while C++ holds it: autograd may have saved it of a first forward."""
        # Later backwards could else write their gradients only in inference mode.
        with torch.inference_mode(False):
            super()._initialize_cached_tensors()
        node_ref = weakref.ref(self)
        for i, ref in enumerate(self.outputs_weakrefs):
            if ref is not None and ref.extra_ref_check is not None:
                ref.extra_ref_check = functools.partial(CopyGraphNode._is_only_cached, node_ref, i, ref.extra_ref_check)

    def reconstruct_outputs(self) -> OutputType:
        if not all(
            t is None or CachedTensor.of(metadata).describes(t)  # type: ignore[arg-type]
            for t, metadata in zip(self.cached_tensor_outputs, self.outputs_metadata)
        ):
            # Trees make them anew.
            self.remove_node_cached_tensors()
        for t in self.cached_tensor_outputs:
            if t is not None:
                renew(t)
        return super().reconstruct_outputs()

    @staticmethod
    def _is_only_cached(node_ref: weakref.ref[CopyGraphNode], i: int, check: Callable[[], bool]) -> bool:
        if (node := node_ref()) is None:
            return False
        # No name for the tensor: ``check`` counts references.
        cached: Any = node.cached_tensor_outputs
        memory: int = node.outputs_metadata[i]["data_ptr"]  # type: ignore[index]
        # The program may have given it other memory.
        return cached[i]._use_count() == 1 and cached[i].untyped_storage().data_ptr() == memory and check()

    def run_first_inputs(self, new_inputs: list[InputType]) -> OutputType:
        outputs = super().run_first_inputs(new_inputs)
        sharing: dict[int, list[int]] = {}
        facts = self.outputs_metadata, self.static_output_tensors, self.output_storage_alias
        for i, (metadata, static, alias) in enumerate(zip(*facts)):
            if isinstance(metadata, dict) and static is None and not isinstance(alias, AliasesBoundMemory):
                sharing.setdefault(metadata["data_ptr"], []).append(i)
        owned = self.request.owned_output_idxs
        self.returned_from_pool = [
            [(i, next(j for j in idxs if outputs[j] is outputs[i])) for i in idxs]
            for idxs in sharing.values()
            if not owned.isdisjoint(idxs)
        ]
        counters["pygraph"]["copied_outputs"] += len(self.returned_from_pool)
        return self._copied_from_pool(outputs)

    def run(self, new_inputs: list[InputType]) -> OutputType:
        if self.facts.copied_bytes:
            self.policy.copied(self.facts.copied_bytes)
        own = {i: new_inputs[j] for i, j in self.returned_inputs.items()}
        own |= {i: make() for i, make in self.made_outputs.items()}
        outputs = super().run(new_inputs)
        for i, t in own.items():
            outputs[i] = t
        return self._copied_from_pool(outputs)

    def _copied_from_pool(self, outputs: OutputType) -> OutputType:
        if not self.returned_from_pool:
            return outputs
        outputs = list(outputs)
        for idxs in self.returned_from_pool:
            storage = outputs[idxs[0][0]].untyped_storage().clone()  # type: ignore[union-attr]
            for i, first in idxs:
                # The same tensor needs one version counter: the program may write an output that is saved, too.
                metadata: Any = self.outputs_metadata[i]
                outputs[i] = outputs[first] if first < i else self._reconstruct_from_tensor_metadata(metadata, storage)
        return outputs


def clean_up_failed_capture(node: CUDAGraphNode, stream: torch.cuda.Stream) -> None:
    """
    Undo what torch.cuda.graph leaves behind when the driver invalidated the capture: the capturing stream is current,
    allocations go to the pool, and only the end of a capture changes the state of the generators.
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
