"""
The nodes of an executable graph whose launches are set to those of each call's sizes.

A node whose launch differs is set by one call, which leaves its attributes as they are. If those of one node differ, a
second graph has nodes with these attributes, and cuGraphExecUpdate takes over what they launch.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import weakref
from collections import OrderedDict
from typing import Any, TYPE_CHECKING

from torch._inductor.pygraph import native
from torch._inductor.pygraph.graph.binding import description, NodeUpdate
from torch._inductor.pygraph.graph.captured import PLAIN_EDGE
from torch._inductor.pygraph.graph.driver import bindings, check, DriverError, entry_point


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._inductor.pygraph.graph.binding import Word
    from torch._inductor.pygraph.graph.captured import CapturedNode


log = logging.getLogger(__name__)

# Of one graph, one for each set of attributes.
MAX_SOURCES = 32


def set_enabled(executable: Any, node: Any, flag: ctypes.c_uint32) -> tuple[Any, ...]:
    return bindings().cuGraphNodeSetEnabled(executable, node, flag.value)


# As entry_point has it.
set_enabled.__name__ = "cuGraphNodeSetEnabled"


def enabled_update(executable: Any, node: Any, word: Word) -> NodeUpdate:
    """Return the update that switches a node on or off, as a word of the call says."""
    return NodeUpdate([word], set_enabled, (executable, node, word.value))


class SizedGraph:
    """
    An executable graph, and what its nodes were set to last.

    Args:
        order: nodes of the graph that ``executable`` was made of, in a row
        fixed: updates that are the same for all Launches

    Attributes:
        updates: of each node the last one; empty if it is not known what the nodes hold
        attributes: of the nodes of library calls, None if they are not known
        sources: by attributes, the least recently used one first
        native: the last one of compiled code, which has ``updates`` and ``attributes`` then
    """

    def __init__(
        self, order: Sequence[Any], executable: Any, fixed: list[NodeUpdate], attributes: tuple[Any, ...]
    ) -> None:
        self.order = [*map(int, order)]
        self.executable = executable
        self.fixed = fixed
        self.updates: list[NodeUpdate] = []
        self.attributes: tuple[Any, ...] | None = attributes
        self.sources: OrderedDict[tuple[Any, ...], SourceGraph] = OrderedDict()
        self.native: Any = None
        self.numbers: dict[tuple[Any, ...], int] = {attributes: 0}

    @functools.cached_property
    def descriptions(self) -> list[tuple[Any, ...]]:
        return [*map(description, self.fixed)]


class Launches:
    """
    Kernels, attributes and updates of a graph's nodes, for all sizes at which library calls launch the same kernels.
    ``set`` writes addresses and numbers of a call into the nodes. It returns False if the driver refuses, or if the
    graph needs a SourceGraph first.

    Args:
        count: of what words refer to: addresses, then numbers of the call's sizes
        updates: besides those that are fixed. No two have parameters in the same memory
        of_libraries: for each node of a library call (node, what it launches). Other nodes launch
            the same function at all sizes
        keep: owns the graphs of what library calls launch

    Attributes:
        source: the source of the attributes, once it was needed
        replay: a Replay of these launches, or None
        is_proven: whether results were compared with those of an uncaptured run
    """

    def __init__(
        self,
        of: SizedGraph,
        count: int,
        updates: list[NodeUpdate],
        of_libraries: list[tuple[Any, CapturedNode]],
        *,
        keep: object,
    ) -> None:
        self.of = of
        self.updates = [*of.fixed, *updates]
        self.keep = keep
        self.attributes = tuple(launched.attributes for _, launched in of_libraries)
        self.kernels = [(launched.launch, launched.attributes) for _, launched in of_libraries]
        self.source: SourceGraph | None = None
        self.replay: Any = None
        self.is_proven = False
        self.set: Any = self._compiled(count, updates) or self._set

    def _compiled(self, count: int, updates: list[NodeUpdate]) -> Any:
        """Return native.compiled.Nodes of these updates, or None where there is none."""
        if native.compiled is None:
            return None
        of = self.of
        attributes = of.numbers.setdefault(self.attributes, len(of.numbers))
        try:
            nodes = [*of.descriptions, *map(description, updates)]
        except DriverError as e:
            log.info("nodes are set by Python: %s", e)
            return None
        of.native = native.compiled.Nodes([0] * count, nodes, self.updates, attributes, of.native)
        return of.native

    def move(self, inputs: Sequence[int]) -> None:
        """Set the nodes' parameters and grids for a call. Raises DriverError: the graph must not be launched then."""
        if self.set(inputs):
            return
        if self.source is None:
            self._add_source(inputs)
            if self.set(inputs):
                return
        raise DriverError(self._refusal(inputs))

    def _set(self, inputs: Sequence[int]) -> bool:
        of, source = self.of, self.source
        has_attributes = of.attributes == self.attributes
        if not has_attributes and source is None:
            # What adds the source writes words, of nodes that others share too.
            of.updates = []
            return False
        before = of.updates or [None] * len(self.updates)
        # Unknown until all are set.
        of.updates, of.attributes = [], None
        changed = [update for update, held in zip(self.updates, before) if update.write(inputs) or update is not held]
        try:
            if not has_attributes:
                self._take_over()
                # Nodes that were off may be on.
                changed = [update for update in self.updates if update.set not in set_in_graph()]
            for update in changed:
                _check(update.set, update.args, update.keep)
        except DriverError:
            return False
        of.updates, of.attributes = self.updates, self.attributes
        return True

    def _in_order(self) -> list[NodeUpdate]:
        updates = {int(update.args[1]): update for update in self.updates if update.set in set_in_graph()}
        return [updates[node] for node in self.of.order]

    def _add_source(self, inputs: Sequence[int]) -> None:
        sources, in_order = self.of.sources, self._in_order()
        if (source := sources.get(self.attributes)) is None:
            source = sources[self.attributes] = SourceGraph(in_order, inputs)
            if len(sources) > MAX_SOURCES:
                sources.popitem(last=False)
        sources.move_to_end(self.attributes)
        self.source = source
        if self.set == self._set:
            return
        nodes = {int(update.args[1]): int(node) for update, node in zip(in_order, source.nodes)}
        functions = set_in_graph()
        setters = [
            (entry_point(functions[update.set].__name__), nodes[int(update.args[1])])
            if update.set in functions
            else None
            for update in self.updates
        ]
        # It owns the source.
        self.set.add_source(int(source.graph), entry_point("cuGraphExecUpdate"), setters, source)

    def _take_over(self) -> None:
        """Raises DriverError"""
        self.source.set(self._in_order())  # type: ignore[union-attr]
        _check(bindings().cuGraphExecUpdate, (self.of.executable, self.source.graph), "the graph")  # type: ignore[union-attr]

    def _refusal(self, inputs: Sequence[int]) -> str:
        """Set all nodes again, and return which refuses and how."""
        for update in self.updates:
            update.write(inputs)
        try:
            self._take_over()
            for update in self.updates:
                _check(update.set, update.args, update.keep)
        except DriverError as e:
            return str(e)
        return "a node of the graph could not be set"


class SourceGraph:
    """
    A graph that is never launched: an executable graph of as many nodes takes over what its nodes launch.

    A node is added with its parameters and gets its attributes then, since clusters have to fit its grid and function.
    ``updates`` are those of the executable graph's nodes, ``inputs`` what their words refer to.
    """

    def __init__(self, updates: Sequence[NodeUpdate], inputs: Sequence[int]) -> None:
        cu = bindings()
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

    def _begin_early(self, node: Any, edge: tuple[int, int, int]) -> None:
        cu = bindings()
        data = cu.CUgraphEdgeData()
        kind, data.from_port, data.to_port = edge
        data.type = cu.CUgraphDependencyType(kind)
        check(cu.cuGraphAddDependencies(self.graph, self.nodes[-1:], [node], [data], 1))

    def set(self, updates: Sequence[NodeUpdate]) -> None:
        """Set this graph's nodes. The words of the call have been written into the updates."""
        for node, update in zip(self.nodes, updates):
            _check(set_in_graph()[update.set], (node, update.args[2]), update.keep)


def set_in_graph() -> dict[Any, Any]:
    """Return for each call that sets a node of an executable graph the one that sets it in the graph."""
    cu = bindings()
    return {
        cu.cuGraphExecKernelNodeSetParams: cu.cuGraphKernelNodeSetParams,
        cu.cuGraphExecMemsetNodeSetParams: cu.cuGraphMemsetNodeSetParams,
    }


def _check(call: Any, args: tuple[Any, ...], what: object) -> Any:
    status, *info = call(*args)
    if int(status) != 0:
        # Of cuGraphExecUpdate.
        results = [result.name for i in info if (result := getattr(i, "result", None)) is not None]
        raise DriverError(f"{call.__name__}: {', '.join([status.name, *results])}: {what}")
    return info[0] if info else None
