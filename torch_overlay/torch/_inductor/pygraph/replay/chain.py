"""The recordings of one function that are replayed without trees."""

from __future__ import annotations

import itertools
from typing import Any, TYPE_CHECKING

from torch._inductor.pygraph import native
from torch._inductor.pygraph.replay.interpreter import Replay
from torch._inductor.pygraph.replay.plan import replay_plan


if TYPE_CHECKING:
    from torch._inductor.cudagraph_trees import CompilationMode, CUDAGraphTreeManager
    from torch._inductor.cudagraph_utils import ModelType
    from torch._inductor.pygraph.capture.bound import BoundGraphNode
    from torch._inductor.pygraph.replay.plan import ReplayPlan
    from torch._inductor.pygraph.trees.policy import GraphPolicy


# At most so many recordings of a function are tried before trees are.
MAX_REPLAYS = 32


def make_replay(plan: ReplayPlan, state: Any, general: ModelType) -> Any:
    """Return a Replay of the compiled module, or of Python where there is none."""
    replay_type = Replay if native.compiled is None else native.compiled.Replay
    return replay_type(plan, state, general)


class ReplayChain:
    """
    The recordings of one function, a chain: each replay leaves to the next one what it was
    not recorded for, and the last one leaves it to ``general``.
    """

    def __init__(
        self,
        policy: GraphPolicy,
        manager: CUDAGraphTreeManager,
        state: Any,
        mode: CompilationMode,
        owner: object,
    ) -> None:
        """
        Args:
            state: the TreeState of ``manager``
            owner: the containers of the thread that records
        """
        self.policy = policy
        self.manager = manager
        self.state = state
        self.mode = mode
        self.owner = owner
        # (recording, its replay)
        self.replays: list[tuple[BoundGraphNode, Any]] = []

    def add(self, general: ModelType) -> ModelType | None:
        """
        Add the recording that trees ran last, unless it is known, in place of those that
        were dropped. Return the first replay if it changed, else None.
        """
        node: Any = self.manager._current_node
        before = self.replays
        if any(node is known for known, _ in before):
            return None
        recorded = [(n, r) for n, r in before if n.graph is not None]
        if (
            len(recorded) == MAX_REPLAYS
            or not self.policy.binds_inputs
            or not isinstance(node, self.policy.node_type())
            or [n.wrapped_function.pygraph for n in node._path_to_root].count(
                self.policy
            )
            != 1
            or node.wrapped_function.pygraph is not self.policy
        ):
            return None
        plan = replay_plan(node, self.manager, self.mode, self.owner)
        added = make_replay(plan, self.state, general)
        self.replays = [*recorded, (node, added)]
        for (_, replay), (_, following) in itertools.pairwise(self.replays):
            replay.general = following
        _, first = self.replays[0]
        return None if before and first is before[0][1] else first
