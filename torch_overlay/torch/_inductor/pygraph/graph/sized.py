"""
The executable graphs of a recording, whose nodes are set to the launches of each call's sizes.

A node whose launch differs is set by one call, which leaves its attributes as they are. Launches with other attributes
have an executable graph of their own. cuGraphExecUpdate would take over other attributes, but a node computed wrong
results after it, on an H100.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import weakref
from types import CellType
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor.pygraph import native
from torch._inductor.pygraph.graph.binding import description, NodeUpdate
from torch._inductor.pygraph.graph.captured import PLAIN_EDGE
from torch._inductor.pygraph.graph.driver import bindings, check, DriverError, entry_point
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch._inductor.pygraph.graph.binding import Word
    from torch._inductor.pygraph.graph.captured import CapturedNode


log = logging.getLogger(__name__)

# Of one recording, beside the one that was captured.
MAX_OWN_GRAPHS = 32
# A further one takes the place of one that was not launched in so many launches. To make graphs in turn for sizes that
# come in turn would take longer than running the function uncaptured.
IDLE_LAUNCHES = 8 * MAX_OWN_GRAPHS

# Of rows of launches that were compared on one executable graph.
MAX_PROVEN_ROWS = 1 << 16


def set_enabled(executable: Any, node: Any, flag: ctypes.c_uint32) -> tuple[Any, ...]:
    return bindings().cuGraphNodeSetEnabled(executable, node, flag.value)


# As entry_point has it.
set_enabled.__name__ = "cuGraphNodeSetEnabled"


def enabled_update(executable: Any, node: Any, word: Word) -> NodeUpdate:
    """Return the update that switches a node on or off, as a word of the call says."""
    return NodeUpdate([word], set_enabled, (executable, node, word.value))


class Launch:
    """Launches an executable graph in the current stream, as Launch of the compiled module."""

    def __init__(self, general: Callable[[Any], None], like: Launch | None) -> None:
        self.general = general
        # How many launches the recording had. Its executable graphs share the list.
        self.count: list[int] = [0] if like is None else like.count
        self._note()

    def _note(self) -> None:
        self.count[0] += 1
        self.last = self.count[0]

    def __call__(self, graph: Any) -> None:
        self._note()
        self.general(graph)

    @property
    def age(self) -> int:
        """How many other launches of the recording there were since the last one."""
        return self.count[0] - self.last


class OwnGraph:
    """
    A graph of the same nodes as a captured one, over the same memory. Its nodes have attributes of their own.

    A node is added with its parameters and gets its attributes then, since clusters have to fit its grid and function.

    Args:
        captured: owns the memory
        updates: of the nodes of ``captured``, in a row
        inputs: what their words refer to
        like: another one of the same recording, or None

    Attributes:
        launch: called with any argument, launches it
    """

    def __init__(
        self,
        captured: object,
        updates: Sequence[NodeUpdate],
        inputs: Sequence[int],
        device_index: int,
        like: OwnGraph | None = None,
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
        launch_python = functools.partial(_launch, self.executable, device_index)
        like_launch = None if like is None else like.launch
        if native.compiled is None:
            self.launch: Any = Launch(launch_python, like_launch)
        else:
            self.launch = native.compiled.Launch(
                entry_point("cuGraphLaunch"),
                int(self.executable),
                device_index,
                torch._C._cuda_getDevice,
                torch._C._cuda_getCurrentRawStream,
                launch_python,
                like_launch,
            )

    def _begin_early(self, node: Any, edge: tuple[int, int, int]) -> None:
        cu = bindings()
        data = cu.CUgraphEdgeData()
        kind, data.from_port, data.to_port = edge
        data.type = cu.CUgraphDependencyType(kind)
        check(cu.cuGraphAddDependencies(self.graph, self.nodes[-1:], [node], [data], 1))

    def replay(self) -> None:
        """As torch.cuda.CUDAGraph.replay, without random numbers."""
        self.launch(self)


def _launch(executable: Any, device_index: int, graph: object) -> None:
    cu = bindings()
    stream = cu.CUstream(torch._C._cuda_getCurrentRawStream(device_index))
    with torch.cuda.device(device_index):
        _check(cu.cuGraphLaunch, (executable, stream), "the graph")


class CallUpdates(list[NodeUpdate]):
    """What sets a graph's nodes of one library call, for all rows in which it launches the same. ``keep`` owns that."""

    __slots__ = ("keep", "__weakref__")

    def __init__(self, updates: Iterable[NodeUpdate], keep: object) -> None:
        super().__init__(updates)
        self.keep = keep


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
        proven: rows of launches whose results were compared with those of an uncaptured run
    """

    def __init__(self, graph: Any, executable: Any, nodes: dict[int, Any], fixed: Sequence[NodeUpdate]) -> None:
        self.cell = CellType(graph)
        self.executable = executable
        self.nodes = nodes
        self.fixed = self.bound(fixed)
        self.updates: list[NodeUpdate] = []
        self.native: Any = None
        self.proven: OrderedSet[Any] = OrderedSet()
        # The key is the position of a library call, and the id of what the call launches.
        self._of_calls: weakref.WeakValueDictionary[tuple[int, int], CallUpdates] = weakref.WeakValueDictionary()

    @property
    def graph(self) -> Any:
        return self.cell.cell_contents

    def bound(self, updates: Sequence[NodeUpdate]) -> list[NodeUpdate]:
        """Return what sets this graph's nodes, of updates of the captured ones."""
        return [
            update._replace(args=(self.executable, self.nodes[int(update.args[1])], *update.args[2:]))
            for update in updates
        ]

    def of_call(self, position: int, launched: object, new: Callable[[], Sequence[NodeUpdate]]) -> CallUpdates:
        """
        Return what sets the nodes of a library call to what it launches. Rows share it: a node whose parameters did not
        change is not set again.
        """
        key = position, id(launched)
        if (found := self._of_calls.get(key)) is None:
            found = self._of_calls[key] = CallUpdates(self.bound(new()), launched)
        return found


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
        self._make_room()
        fixed, order = new_fixed(), self.captured.nodes
        by_node = {int(u.args[1]): u for u in (*fixed, *launches.new_updates()) if u.set is not set_enabled}
        like = next((own.graph for own in self.own.values()), None)
        own = OwnGraph(self.captured.graph, [by_node[node] for node in order], inputs, self.device_index, like)
        added = SizedGraph(own, own.executable, dict(zip(order, own.nodes)), fixed)
        self.own[launches.attributes] = added
        return added

    def _make_room(self) -> None:
        """Drop the least recently launched graph if there are too many. Raises DriverError: all are in use."""
        if len(self.own) < MAX_OWN_GRAPHS:
            return
        oldest = max(self.own, key=lambda attributes: self.own[attributes].graph.launch.age)
        if self.own[oldest].graph.launch.age < IDLE_LAUNCHES:
            raise DriverError(f"{MAX_OWN_GRAPHS} graphs with other attributes are in use")
        # Replays find it empty.
        self.own.pop(oldest).cell.cell_contents = None


class Launches:
    """
    What a graph's nodes launch, for all sizes at which library calls launch the same kernels.

    Args:
        count: of what words refer to: addresses, then numbers of the call's sizes
        row: what identifies these launches
        calls: what each library call launches. Other nodes launch the same function at all sizes
        new: returns updates of the captured nodes of a library call, given its position and what it launches. No two
            have parameters in the same memory

    Attributes:
        on: the graph, None before the first call
        set: writes addresses and numbers of a call into its nodes. Returns False if the driver refuses
        replay: a Replay of these launches, or None
    """

    on: SizedGraph | None = None
    set: Any = None
    replay: Any = None

    def __init__(
        self,
        count: int,
        row: Any,
        calls: Sequence[Any],
        new: Callable[[int, Any], Sequence[NodeUpdate]],
    ) -> None:
        self.count = count
        self.row = row
        self.calls = calls
        self.new: Any = new
        of_libraries: list[CapturedNode] = [launched for call in calls for launched in call.nodes]
        self.attributes = tuple(launched.attributes for launched in of_libraries)
        self.kernels = [(launched.launch, launched.attributes) for launched in of_libraries]

    @property
    def was_dropped(self) -> bool:
        return self.on is not None and self.on.graph is None

    @property
    def is_proven(self) -> bool:
        """Whether results were compared with those of an uncaptured run, on the graph as it is."""
        return self.on is not None and self.row in self.on.proven

    def note_proof(self) -> None:
        if len(self.on.proven) < MAX_PROVEN_ROWS:  # type: ignore[union-attr]
            self.on.proven.add(self.row)  # type: ignore[union-attr]

    def new_updates(self) -> list[NodeUpdate]:
        """Return updates of the captured nodes of library calls, for a graph that is to be made."""
        return [update for i, call in enumerate(self.calls) for update in self.new(i, call)]

    def begin(self, on: SizedGraph) -> None:
        self.on = on
        self.of_calls = [on.of_call(i, call, functools.partial(self.new, i, call)) for i, call in enumerate(self.calls)]
        self.updates = [*on.fixed, *(update for of_call in self.of_calls for update in of_call)]
        # The function refers to the recording, and the recording to these launches.
        self.new = None
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
