"""The replays of a function, and the Python interpreter of their plans, as ``Replay`` of the compiled module."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor.pygraph import native
from torch._inductor.pygraph.capture.allocation import view_at
from torch._inductor.pygraph.graph.memory import lies_within
from torch._inductor.pygraph.replay.plan import replay_plan
from torch._inductor.pygraph.trees.cached import is_lazy, renew


if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch._inductor.cudagraph_trees import CUDAGraphNode, CUDAGraphTreeManager
    from torch._inductor.cudagraph_utils import ModelType, OutputType
    from torch._inductor.pygraph.capture.bound import BoundGraphNode
    from torch._inductor.pygraph.replay.plan import PathOutput, ReplayPlan
    from torch._inductor.pygraph.trees.manager import GraphPolicy
    from torch._inductor.utils import InputType


def are_dead(outputs: Iterable[PathOutput]) -> bool:
    """Return whether nobody but their nodes has these outputs."""
    for weakrefs, cached, i in outputs:
        ref = weakrefs[i]
        if (ref.extra_ref_check is not None and i >= len(cached)) or ref() is not None:
            return False
    return True


class Replay:
    """Replay a recording if its plan allows it, and else call ``general`` with all inputs."""

    def __init__(self, plan: ReplayPlan, state: Any, general: ModelType) -> None:
        self.plan = plan
        self.state = state
        self.general = general
        self._cached = [(i, o.value) for i, o in enumerate(plan.outputs) if o.kind == "cached"]
        self._last_seen: CUDAGraphNode | None = None
        self._live_of_last: tuple[PathOutput, ...] = ()

    def __call__(self, inputs: list[InputType], *of_sizes: Any) -> OutputType:
        """``of_sizes``: the numbers of the call and what sets the nodes, if the plan is for many sizes."""
        plan, state = self.plan, self.state
        if self._fits(inputs) and not plan.is_capturing() and plan.containers() is plan.owner and state.acquire():
            try:
                state.follow()
                outputs = self._run(inputs, *of_sizes)
            finally:
                state.release()
            if outputs is not None:
                return outputs
            if plan.dropped and inputs[plan.dropped[0]] is None:
                plan.restore(inputs)
        return self.general(inputs, *of_sizes)

    def _fits(self, inputs: list[InputType]) -> bool:
        """Return whether the static inputs are those of the recording."""
        plan = self.plan
        if type(inputs) is not list or len(inputs) < plan.num_inputs:
            return False
        return all(isinstance(t := inputs[i], torch.Tensor) and t.data_ptr() == address for i, address in plan.static)

    def _run(self, inputs: list[InputType], *of_sizes: Any) -> OutputType | None:
        """Return the outputs, or None if the general path has to be taken."""
        plan, numbers = self.plan, of_sizes[:1]
        nodes: Any = of_sizes[1] if of_sizes else plan.nodes
        last = None if plan.node is None else plan.manager._current_node
        if not self._may_follow(last) or not all(o.describes(plan.cached[i]) for i, o in self._cached):
            return None
        tensors: list[torch.Tensor] = [inputs[i] for i in plan.bound]  # type: ignore[misc]
        pointers = self._addresses(tensors)
        if pointers is None:
            return None
        # Before the allocations: there the collector may run a finalizer that packs other values.
        words = [] if plan.words is None else plan.words()
        for allocate in plan.allocators:
            tensors.append(t := allocate(*numbers))
            pointers.append(t.data_ptr())
        pointers += [*words, *itertools.chain(*numbers)]
        if not are_dead(plan.dead_before):
            return None
        for i in plan.dropped:
            inputs[i] = None
        if not are_dead(plan.dead_after) or not nodes(pointers):
            return None
        manager = plan.manager
        if plan.node is not None:
            if last is not plan.node:
                manager.current_node = plan.node
                if last is None:
                    manager.path_state = plan.executing
            manager.update_generation()
        plan.launch(plan.graph.cell_contents)
        if plan.pending_backward is not None:
            manager.running_forwards_with_pending_backwards = plan.pending_backward
        tensors += [view_at(tensors, view, *numbers) for view in plan.views]
        outputs = self._outputs(inputs, tensors, *numbers)
        inputs.clear()
        return outputs

    def _may_follow(self, last: CUDAGraphNode | None) -> bool:
        """Return whether the recording may follow the current path, and may be replayed at all."""
        plan = self.plan
        if last is not None and plan.manager.path_state is not plan.executing:
            return False
        if plan.parent is not None:
            if last is not plan.parent:
                return False
        elif last is not None:
            if last is not self._last_seen:
                self._live_of_last = plan.live_outputs(last)
                self._last_seen = last
            if not are_dead(self._live_of_last):
                return False
        return plan.graph.cell_contents is not None and not plan.is_outdated.cell_contents

    def _addresses(self, tensors: list[Any]) -> list[int] | None:
        """Return where inputs lie, or None if one cannot be bound as it is."""
        pool, pointers = self.plan.pool, []
        for t in tensors:
            if not isinstance(t, torch.Tensor) or is_lazy(t):
                return None
            pointer = t.data_ptr()
            if pool and lies_within(pool, pointer):
                return None
            pointers.append(pointer)
        return pointers if not any(map(operator.mod, pointers, self.plan.alignments)) else None

    def _outputs(
        self, inputs: list[InputType], tensors: list[torch.Tensor], numbers: tuple[int, ...] = ()
    ) -> OutputType:
        outputs: OutputType = self.plan.cached.copy()
        for i, (kind, value) in enumerate(self.plan.outputs):
            if kind == "bound":
                outputs[i] = tensors[value]
            elif kind == "input":
                outputs[i] = inputs[value]  # type: ignore[call-overload]
            elif kind == "number":
                outputs[i] = numbers[value]
            elif kind == "made":
                outputs[i] = value()
            elif kind == "constant":
                outputs[i] = value
        # Last: what they let go of may be the program's, whose finalizers run.
        for i, _ in self._cached:
            renew(outputs[i])  # type: ignore[arg-type]
        return outputs


# At most so many recordings of a function are tried before trees are.
MAX_REPLAYS = 128


def make_replay(plan: ReplayPlan, state: Any, general: ModelType) -> Any:
    """Return a Replay of the compiled module, or of Python where there is none."""
    return getattr(native.compiled, "Replay", Replay)(plan, state, general)


@dataclasses.dataclass(eq=False)
class ReplayChain:
    """
    The recordings of one function that are replayed without trees. Each replay leaves to the next one what it was not
    recorded for, and the last one leaves it to trees. ``owner`` is the containers of the thread that records.
    """

    policy: GraphPolicy
    manager: CUDAGraphTreeManager
    state: Any
    owner: object
    # (recording, its replay)
    replays: list[tuple[BoundGraphNode, Any]] = dataclasses.field(default_factory=list)

    def add(self, general: ModelType) -> ModelType | None:
        """Add the recording that trees ran last, unless it is known. Return the first replay if it changed."""
        node: Any = self.manager._current_node
        before, policy = self.replays, self.policy
        if any(node is known for known, _ in before):
            return None
        recorded = [(n, r) for n, r in before if n.graph is not None]
        if (
            len(recorded) == MAX_REPLAYS
            or not policy.binds_inputs
            or not isinstance(node, policy.node_type())
            or node.wrapped_function.pygraph is not policy
        ):
            return None
        plan = replay_plan(node, self.manager, policy.spec.mode, self.owner)
        self.replays = [*recorded, (node, make_replay(plan, self.state, general))]
        for (_, replay), (_, following) in itertools.pairwise(self.replays):
            replay.general = following
        _, first = self.replays[0]
        return None if before and first is before[0][1] else first
