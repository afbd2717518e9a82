"""
The executable graphs of a recording, whose nodes are set to the launches of each call's sizes.

A node whose launch differs is set by one call, which leaves its attributes as they are. Launches with other attributes
have an executable graph of their own. cuGraphExecUpdate would take over other attributes, but a node computed wrong
results after it, on an H100.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import weakref
from types import CellType
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch._inductor.pygraph import native
from torch._inductor.pygraph.graph.binding import description, NodeUpdate
from torch._inductor.pygraph.graph.captured import PLAIN_EDGE
from torch._inductor.pygraph.graph.driver import bindings, check, DriverError, entry_point
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._inductor.pygraph.graph.binding import Word
    from torch._inductor.pygraph.graph.entry import Entry, Source


log = logging.getLogger(__name__)

# Of executable graphs.
_numbers = itertools.count()
# Of library calls of one.
MAX_CALLS = 1 << 20

# Of one recording, beside the one that was captured.
MAX_OWN_GRAPHS = 32
# A further one takes the place of one that was not launched in so many launches. To make graphs in turn for sizes that
# come in turn would take longer than running the function uncaptured.
IDLE_LAUNCHES = 8 * MAX_OWN_GRAPHS

# Of one executable graph.
MAX_TRUSTED_ROWS = 1 << 16
# One in so many rows is proven, even if nothing in it is new.
UNPROVEN_ROWS = 16


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
        drawing: a captured graph that draws as many random numbers, None if there are none

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
        drawing: Any = None,
    ) -> None:
        cu = bindings()
        self.captured = captured
        self.drawing = drawing
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
        """As torch.cuda.CUDAGraph.replay, whose first part gives the generator's state to the kernels."""
        if self.drawing is not None:
            self.drawing.replay()
        self.launch(self)


def _launch(executable: Any, device_index: int, graph: object) -> None:
    cu = bindings()
    stream = cu.CUstream(torch._C._cuda_getCurrentRawStream(device_index))
    with torch.cuda.device(device_index):
        _check(cu.cuGraphLaunch, (executable, stream), "the graph")


class LibraryNodes(NamedTuple):
    """The captured nodes of a library call of a recording, and where a call has the addresses of its tensors."""

    nodes: Sequence[Any]
    sources: Sequence[Source | None]


class SizedGraph:
    """
    An executable graph, and what its nodes were set to last.

    Args:
        graph: a torch.cuda.CUDAGraph or an OwnGraph, which launches ``executable``
        nodes: by the captured ones that they stand for
        fixed: updates of the captured nodes that are the same for all Launches

    Attributes:
        cell: has ``graph``, or None once it was dropped
        fixed: what sets the nodes of ``fixed``: a native.compiled.NodeSet, or updates
        updates: of each node the last one; empty if it is not known what the nodes hold
        row: the native.compiled.Row that was made last. It takes the place of ``updates``
        trusted: rows of launches that were proven, or in which nothing was new
        unproven: how many of the latter came since the last proof
        replay: a Replay of this graph, or None
    """

    replay: Any = None

    def __init__(self, graph: Any, executable: Any, nodes: dict[int, Any], fixed: Sequence[NodeUpdate]) -> None:
        self.cell = CellType(graph)
        self.executable = executable
        self.nodes = nodes
        bound = [
            update._replace(args=(executable, nodes[int(update.args[1])], *update.args[2:])) for update in fixed
        ]
        self.fixed_updates = bound
        self.fixed = _compiled(lambda: native.compiled.NodeSet([*map(description, bound)], bound)) or bound
        self.updates: list[NodeUpdate] = []
        self.row: Any = None
        self.trusted: OrderedSet[Any] = OrderedSet()
        self.unproven = 0
        # With a position it identifies the nodes of a library call.
        self.number = next(_numbers) * MAX_CALLS

    @property
    def graph(self) -> Any:
        return self.cell.cell_contents

    def drop(self) -> None:
        """Replays find it empty."""
        self.cell.cell_contents = self.replay = None

    def updates_of(self, call: LibraryNodes, entry: Entry) -> list[NodeUpdate]:
        """Return what sets the nodes of a library call to what an entry launches."""
        return entry.updates(self.executable, [self.nodes[int(node)] for node in call.nodes], call.sources)

    def of_call(self, position: int, call: LibraryNodes, entry: Entry) -> Any:
        """As updates_of, or a NodeSet. Rows share it: a node whose parameters did not change is not set again."""
        if (found := entry.sets.get(self.number + position)) is None:
            nodes = [self.nodes[int(node)] for node in call.nodes]
            compiled = _compiled(lambda: entry.compiled(self.executable, nodes, call.sources))
            found = entry.sets[self.number + position] = compiled or self.updates_of(call, entry)
        return found


def _compiled(make: Callable[[], Any]) -> Any:
    """Return a NodeSet, or None where there is none."""
    if native.compiled is None:
        return None
    try:
        return make()
    except DriverError as e:
        log.info("nodes are set by Python: %s", e)
        return None


class SizedGraphs:
    """
    The executable graphs of a recording.

    Args:
        graph: that was captured
        nodes: of it, in a row
        attributes: of those of library calls
        fixed: see SizedGraph
        calls: the library calls of the recording
        new_drawing: makes OwnGraph's ``drawing``, None if no random numbers are drawn
    """

    def __init__(
        self,
        graph: Any,
        executable: Any,
        nodes: Sequence[Any],
        attributes: tuple[Any, ...],
        fixed: Sequence[NodeUpdate],
        calls: Sequence[LibraryNodes],
        device_index: int,
        new_drawing: Callable[[], Any] | None,
    ) -> None:
        self.new_drawing = new_drawing
        self.device_index = device_index
        self.attributes = attributes
        self.calls = calls
        self.captured = SizedGraph(graph, executable, {int(node): node for node in nodes}, fixed)
        self.own: dict[tuple[Any, ...], SizedGraph] = {}

    def known(self, launches: Launches) -> SizedGraph | None:
        """Return the graph with the attributes of ``launches``, if there is one."""
        return self.captured if launches.attributes == self.attributes else self.own.get(launches.attributes)

    def find(
        self, launches: Launches, inputs: Sequence[int], new_fixed: Callable[[], Sequence[NodeUpdate]]
    ) -> SizedGraph:
        """As ``known``. If there is none, make it for a call with ``inputs``. Raises DriverError."""
        if (found := self.known(launches)) is not None:
            return found
        self._make_room()
        fixed, order = new_fixed(), self.captured.nodes
        of_calls = itertools.chain(*map(self.captured.updates_of, self.calls, launches.calls))
        by_node = {int(u.args[1]): u for u in (*fixed, *of_calls) if u.set is not set_enabled}
        like = next((own.graph for own in self.own.values()), None)
        updates = [by_node[node] for node in order]
        own = OwnGraph(self.captured.graph, updates, inputs, self.device_index, like, self._drawing)
        added = SizedGraph(own, own.executable, dict(zip(order, own.nodes)), fixed)
        self.own[launches.attributes] = added
        return added

    @functools.cached_property
    def _drawing(self) -> Any:
        return None if self.new_drawing is None else self.new_drawing()

    def close(self) -> None:
        """Let go of replays, which have the graphs and what these belong to."""
        for graph in (self.captured, *self.own.values()):
            graph.replay = None

    def _make_room(self) -> None:
        """Drop the least recently launched graph if there are too many. Raises DriverError: all are in use."""
        if len(self.own) < MAX_OWN_GRAPHS:
            return
        oldest = max(self.own, key=lambda attributes: self.own[attributes].graph.launch.age)
        if self.own[oldest].graph.launch.age < IDLE_LAUNCHES:
            raise DriverError(f"{MAX_OWN_GRAPHS} graphs with other attributes are in use")
        self.own.pop(oldest).drop()


class Launches:
    """
    What a graph's nodes launch, for all sizes at which library calls launch the same kernels.

    Args:
        count: of what words refer to: addresses, then numbers of the call's sizes
        row: what identifies these launches
        calls: what each library call launches. Other nodes launch the same function at all sizes

    Attributes:
        on: the graph, None before the first call
        set: writes addresses and numbers of a call into its nodes. Returns False if the driver refuses
    """

    # There are as many as sizes, and the collector visits them all.
    __slots__ = ("on", "set", "count", "row", "calls", "nodes", "attributes")

    def __init__(self, count: int, row: Any, calls: tuple[Entry, ...]) -> None:
        self.on: SizedGraph | None = None
        self.set: Any = None
        self.nodes: Sequence[LibraryNodes] = ()
        self.count = count
        self.row = row
        self.calls = calls
        self.attributes = tuple(node.attributes for call in calls for node in call.nodes)

    @property
    def kernels(self) -> list[Any]:
        return [(node.launch, node.attributes) for call in self.calls for node in call.nodes]

    @property
    def was_dropped(self) -> bool:
        return self.on is not None and self.on.graph is None

    @property
    def is_trusted(self) -> bool:
        """Whether the graph as it is may launch these."""
        return self.on is not None and self.row in self.on.trusted

    def trust(self) -> bool:
        """Let the graph launch these without a proof, if it was proven with others. Return whether it may."""
        if (on := self.on) is None or not on.trusted or on.unproven + 1 >= UNPROVEN_ROWS:
            return False
        on.unproven += 1
        self._add(on)
        return True

    def note_proof(self) -> None:
        """Results were compared with those of an uncaptured run."""
        on: Any = self.on
        on.unproven = 0
        self._add(on)

    def _add(self, on: SizedGraph) -> None:
        if len(on.trusted) < MAX_TRUSTED_ROWS:
            on.trusted.add(self.row)

    def begin(self, on: SizedGraph, calls: Sequence[LibraryNodes]) -> None:
        """``calls``: the library calls of the recording."""
        self.on = on
        self.nodes = calls
        sets = [on.fixed, *(on.of_call(i, *both) for i, both in enumerate(zip(calls, self.calls)))]
        self.set = self._set
        if not any(isinstance(each, list) for each in sets):
            self.set = on.row = native.compiled.Row(self.count, sets, on.row)

    def move(self, inputs: Sequence[int]) -> None:
        """Set the nodes' parameters and grids for a call. Raises DriverError: the graph must not be launched then."""
        if not self.set(inputs):
            raise DriverError(self._refusal(inputs))

    def _updates(self) -> list[NodeUpdate]:
        on: Any = self.on
        of_calls = (on.of_call(i, *both) for i, both in enumerate(zip(self.nodes, self.calls)))
        return [update for updates in (on.fixed, *of_calls) for update in updates]

    def _set(self, inputs: Sequence[int]) -> bool:
        on: Any = self.on
        updates = self._updates()
        before = on.updates or [None] * len(updates)
        # Unknown until all are set.
        on.updates = []
        changed = [update for update, held in zip(updates, before) if update.write(inputs) or update is not held]
        try:
            for update in changed:
                _check(update.set, update.args, update.keep)
        except DriverError:
            return False
        on.updates = updates
        return True

    def _refusal(self, inputs: Sequence[int]) -> str:
        """Set all nodes again, and return which refuses and how."""
        on: Any = self.on
        of_calls = map(on.updates_of, self.nodes, self.calls)
        updates = [update for updates in (on.fixed_updates, *of_calls) for update in updates]
        for update in updates:
            update.write(inputs)
        try:
            for update in updates:
                _check(update.set, update.args, update.keep)
        except DriverError as e:
            return str(e)
        return "a node of the graph could not be set"


def _check(call: Any, args: tuple[Any, ...], what: object) -> Any:
    status, *info = call(*args)
    if int(status) != 0:
        raise DriverError(f"{call.__name__}: {status.name}: {what}")
    return info[0] if info else None
