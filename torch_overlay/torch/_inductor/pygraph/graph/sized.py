"""
The executable graphs of a recording, whose nodes are set to the launches of each call's sizes.

A node whose launch differs is set by one call, which leaves its attributes as they are. Launches with other attributes
have an executable graph of their own. cuGraphExecUpdate would take over other attributes, but a node computed wrong
results after it, on an H100.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import weakref
from types import CellType
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor.pygraph import native
from torch._inductor.pygraph.graph.binding import description, NodeUpdate
from torch._inductor.pygraph.graph.captured import PLAIN_EDGE
from torch._inductor.pygraph.graph.driver import bindings, check, DriverError


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._inductor.pygraph.graph.binding import Word
    from torch._inductor.pygraph.graph.captured import CapturedNode


log = logging.getLogger(__name__)

# Of one recording, beside the one that was captured. The least recently launched one is dropped.
MAX_OWN_GRAPHS = 32

_launches = itertools.count()


def set_enabled(executable: Any, node: Any, flag: ctypes.c_uint32) -> tuple[Any, ...]:
    return bindings().cuGraphNodeSetEnabled(executable, node, flag.value)


# As entry_point has it.
set_enabled.__name__ = "cuGraphNodeSetEnabled"


def enabled_update(executable: Any, node: Any, word: Word) -> NodeUpdate:
    """Return the update that switches a node on or off, as a word of the call says."""
    return NodeUpdate([word], set_enabled, (executable, node, word.value))


class OwnGraph:
    """
    A graph of the same nodes as a captured one, over the same memory. Its nodes have attributes of their own.

    A node is added with its parameters and gets its attributes then, since clusters have to fit its grid and function.

    Args:
        captured: owns the memory
        updates: of the nodes of ``captured``, in a row
        inputs: what their words refer to
    """

    def __init__(
        self, captured: object, updates: Sequence[NodeUpdate], inputs: Sequence[int], device_index: int
    ) -> None:
        cu = bindings()
        self.captured = captured
        self.device_index = device_index
        self.graph = check(cu.cuGraphCreate(0))
        weakref.finalize(self, cu.cuGraphDestroy, self.graph)
        self.nodes: list[Any] = []
        for update in updates:
            update.write(inputs)
            behind = self.nodes[-1:] if update.keep.edge == PLAIN_EDGE else []
            add = cu.cuGraphAddKernelNode if update.keep.is_kernel else cu.cuGraphAddMemsetNode
            # A memset's parameters are followed by the context.
            node = _check(add, (self.graph, behind, len(behind), *update.args[2:]), update.keep)
            if update.keep.is_kernel:
                _check(cu.cuGraphKernelNodeCopyAttributes, (node, update.keep.node), update.keep)
            if update.keep.edge != PLAIN_EDGE:
                self._begin_early(node, update.keep.edge)
            self.nodes.append(node)
        self.executable = _check(cu.cuGraphInstantiate, (self.graph, 0), "the graph")
        weakref.finalize(self, cu.cuGraphExecDestroy, self.executable)
        self.last_launch = next(_launches)

    def _begin_early(self, node: Any, edge: tuple[int, int, int]) -> None:
        cu = bindings()
        data = cu.CUgraphEdgeData()
        kind, data.from_port, data.to_port = edge
        data.type = cu.CUgraphDependencyType(kind)
        check(cu.cuGraphAddDependencies(self.graph, self.nodes[-1:], [node], [data], 1))

    def replay(self) -> None:
        """As torch.cuda.CUDAGraph.replay, without random numbers."""
        self.last_launch = next(_launches)
        cu = bindings()
        stream = cu.CUstream(torch._C._cuda_getCurrentRawStream(self.device_index))
        with torch.cuda.device(self.device_index):
            _check(cu.cuGraphLaunch, (self.executable, stream), "the graph")


class SizedGraph:
    """
    An executable graph, and what its nodes were set to last.

    Args:
        graph: a torch.cuda.CUDAGraph or an OwnGraph, which launches ``executable``
        nodes: by the captured ones that they stand for
        fixed: updates of the captured nodes that are the same for all Launches

    Attributes:
        cell: has ``graph``, or None once it was dropped
        updates: of each node the last one; empty if it is not known what the nodes hold
        native: the last one of compiled code, which has ``updates`` then
    """

    def __init__(self, graph: Any, executable: Any, nodes: dict[int, Any], fixed: Sequence[NodeUpdate]) -> None:
        self.cell = CellType(graph)
        self.executable = executable
        self.nodes = nodes
        self.fixed = self.bound(fixed)
        self.updates: list[NodeUpdate] = []
        self.native: Any = None

    @property
    def graph(self) -> Any:
        return self.cell.cell_contents

    def bound(self, updates: Sequence[NodeUpdate]) -> list[NodeUpdate]:
        """Return what sets this graph's nodes, of updates of the captured ones."""
        return [
            update._replace(args=(self.executable, self.nodes[int(update.args[1])], *update.args[2:]))
            for update in updates
        ]


class SizedGraphs:
    """
    The executable graphs of a recording.

    Args:
        graph: that was captured
        nodes: of it, in a row
        attributes: of those of library calls
        fixed: see SizedGraph
    """

    def __init__(
        self,
        graph: Any,
        executable: Any,
        nodes: Sequence[Any],
        attributes: tuple[Any, ...],
        fixed: Sequence[NodeUpdate],
        device_index: int,
    ) -> None:
        self.device_index = device_index
        self.attributes = attributes
        self.captured = SizedGraph(graph, executable, {int(node): node for node in nodes}, fixed)
        self.own: dict[tuple[Any, ...], SizedGraph] = {}

    def find(
        self, launches: Launches, inputs: Sequence[int], new_fixed: Callable[[], Sequence[NodeUpdate]]
    ) -> SizedGraph:
        """
        Return the graph with the attributes of ``launches``. If there is none, make it for a call with ``inputs``.
        Raises DriverError.
        """
        if launches.attributes == self.attributes:
            return self.captured
        if (found := self.own.get(launches.attributes)) is not None:
            return found
        fixed, order = new_fixed(), self.captured.nodes
        by_node = {int(u.args[1]): u for u in (*fixed, *launches.updates) if u.set is not set_enabled}
        own = OwnGraph(self.captured.graph, [by_node[node] for node in order], inputs, self.device_index)
        added = SizedGraph(own, own.executable, dict(zip(order, own.nodes)), fixed)
        if len(self.own) == MAX_OWN_GRAPHS:
            oldest = min(self.own, key=lambda attributes: self.own[attributes].graph.last_launch)
            # Replays find it empty.
            self.own.pop(oldest).cell.cell_contents = None
        self.own[launches.attributes] = added
        return added


class Launches:
    """
    What a graph's nodes launch, for all sizes at which library calls launch the same kernels.

    Args:
        count: of what words refer to: addresses, then numbers of the call's sizes
        updates: of the captured nodes of library calls. No two have parameters in the same memory
        of_libraries: what library calls launch. Other nodes launch the same function at all sizes
        keep: owns the graphs of what library calls launch

    Attributes:
        on: the graph, None before the first call
        set: writes addresses and numbers of a call into its nodes. Returns False if the driver refuses
        replay: a Replay of these launches, or None
        is_proven: whether results were compared with those of an uncaptured run
    """

    on: SizedGraph | None = None
    set: Any = None
    replay: Any = None
    is_proven = False

    def __init__(
        self,
        count: int,
        updates: list[NodeUpdate],
        of_libraries: Sequence[CapturedNode],
        *,
        keep: object,
    ) -> None:
        self.count = count
        self.updates = updates
        self.keep = keep
        self.attributes = tuple(launched.attributes for launched in of_libraries)
        self.kernels = [(launched.launch, launched.attributes) for launched in of_libraries]

    @property
    def was_dropped(self) -> bool:
        return self.on is not None and self.on.graph is None

    def begin(self, on: SizedGraph) -> None:
        self.updates = [*on.fixed, *on.bound(self.updates)]
        self.on = on
        self.set = self._compiled(on) or self._set

    def move(self, inputs: Sequence[int]) -> None:
        """Set the nodes' parameters and grids for a call. Raises DriverError: the graph must not be launched then."""
        if not self.set(inputs):
            raise DriverError(self._refusal(inputs))

    def _compiled(self, on: SizedGraph) -> Any:
        """Return native.compiled.Nodes of these updates, or None where there is none."""
        if native.compiled is None:
            return None
        try:
            nodes = [*map(description, self.updates)]
        except DriverError as e:
            log.info("nodes are set by Python: %s", e)
            return None
        on.native = native.compiled.Nodes([0] * self.count, nodes, self.updates, on.native)
        return on.native

    def _set(self, inputs: Sequence[int]) -> bool:
        on = self.on
        before = on.updates or [None] * len(self.updates)  # type: ignore[union-attr]
        # Unknown until all are set.
        on.updates = []  # type: ignore[union-attr]
        changed = [update for update, held in zip(self.updates, before) if update.write(inputs) or update is not held]
        try:
            for update in changed:
                _check(update.set, update.args, update.keep)
        except DriverError:
            return False
        on.updates = self.updates  # type: ignore[union-attr]
        return True

    def _refusal(self, inputs: Sequence[int]) -> str:
        """Set all nodes again, and return which refuses and how."""
        for update in self.updates:
            update.write(inputs)
        try:
            for update in self.updates:
                _check(update.set, update.args, update.keep)
        except DriverError as e:
            return str(e)
        return "a node of the graph could not be set"


def _check(call: Any, args: tuple[Any, ...], what: object) -> Any:
    status, *info = call(*args)
    if int(status) != 0:
        raise DriverError(f"{call.__name__}: {status.name}: {what}")
    return info[0] if info else None
