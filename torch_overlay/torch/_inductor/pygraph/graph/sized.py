"""
The nodes of an executable graph whose launches are set to those of each call's sizes.

A node whose launch differs is set by one call. That leaves its attributes as they are. If those of one
node differ, a second graph has nodes with these attributes, and cuGraphExecUpdate takes over what they
launch: on an H100 it takes 0.75 us a node, where setting a node takes 0.9 us, and at another size most
nodes differ. A recording for each set of attributes would take memory, and a capture at each of the first
sizes.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import weakref
from collections import OrderedDict
from typing import Any, TYPE_CHECKING

from torch._inductor.pygraph.graph.binding import Nodes, NodeUpdate
from torch._inductor.pygraph.graph.driver import bindings, check, DriverError
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._inductor.pygraph.graph.binding import Word
    from torch._inductor.pygraph.graph.captured import CapturedNode


# Of one graph, one for each set of attributes.
MAX_SOURCES = 32


def set_enabled(executable: Any, node: Any, flag: ctypes.c_uint32) -> tuple[Any, ...]:
    return bindings().cuGraphNodeSetEnabled(executable, node, flag.value)


def enabled_update(executable: Any, node: Any, word: Word) -> NodeUpdate:
    """Return the update that switches a node on or off, as a word of the call says."""
    return NodeUpdate([word], set_enabled, (executable, node, word.value))


@dataclasses.dataclass(eq=False)
class Launches:
    """
    What the nodes launch at some sizes.

    Args:
        updates: of all nodes
        of_libraries: for each node of a library call (node, what it launches). Other nodes launch
            the same function at all sizes

    Attributes:
        nodes_of: for each number of a call the updates that hold it
    """

    updates: list[NodeUpdate]
    of_libraries: list[tuple[Any, CapturedNode]]

    def __post_init__(self) -> None:
        self.nodes_of: dict[int, list[int]] = {}
        for i, update in enumerate(self.updates):
            for index in OrderedSet(word.input for word in update.words):
                self.nodes_of.setdefault(index, []).append(i)
        self.attributes = [launched.attributes for _, launched in self.of_libraries]
        self.kernels = [(launched.launch, launched.attributes) for _, launched in self.of_libraries]


class SizedNodes(Nodes):
    """
    Args:
        order: nodes of the graph that ``executable`` was made of, in a row
        count: of the numbers of a call
        launches: of the sizes of the capture
    """

    def __init__(self, order: Sequence[Any], executable: Any, count: int, launches: Launches) -> None:
        super().__init__([-1] * count, launches.updates, [])
        self.order = [*map(int, order)]
        self.executable = executable
        # The least recently used one first.
        self.sources: OrderedDict[tuple[Any, ...], SourceGraph] = OrderedDict()
        # None was set yet.
        self.launches: Launches | None = Launches([], launches.of_libraries)

    def move(self, numbers: Sequence[int], launches: Launches) -> None:
        """
        Set the nodes to what they launch in a call.

        Args:
            numbers: addresses, and numbers of the call's sizes, to which the words refer

        Raises:
            DriverError: a node refused. The graph must not be launched then.
        """
        before, self.launches = self.launches, None
        self.updates = launches.updates
        if before is None or before.attributes != launches.attributes:
            self._update_graph(numbers, launches)
            switches = [i for i, update in enumerate(self.updates) if update.set not in set_in_graph()]
            self._set(switches, numbers)
        else:
            moved = (k for k, (a, b) in enumerate(zip(self.pointers, numbers)) if a != b)
            changed = OrderedSet(i for k in moved for i in launches.nodes_of.get(k, ()))
            if before is not launches:
                updates = itertools.zip_longest(before.updates, launches.updates)
                changed |= OrderedSet(i for i, (a, b) in enumerate(updates) if a is not b)
            self._set(sorted(changed), numbers)
        self.launches = launches

    def _set(self, changed: Sequence[int], numbers: Sequence[int]) -> None:
        if not self.set(changed, numbers):
            raise DriverError(refusal([self.updates[i] for i in changed], numbers))

    def _update_graph(self, numbers: Sequence[int], launches: Launches) -> None:
        updates = {int(update.args[1]): update for update in self.updates if update.set in set_in_graph()}
        in_order = [updates[node] for node in self.order]
        key = tuple(launches.attributes)
        if (source := self.sources.get(key)) is None:
            source = self.sources[key] = SourceGraph(in_order, numbers)
            if len(self.sources) > MAX_SOURCES:
                self.sources.popitem(last=False)
        else:
            source.set(in_order, numbers)
        self.sources.move_to_end(key)
        _check(bindings().cuGraphExecUpdate, (self.executable, source.graph), "the graph")


class SourceGraph:
    """
    A graph that is never launched: an executable graph of as many nodes takes over what its nodes launch.

    A node is added with its parameters and gets its attributes then. The parameters of a node with other
    attributes are not replaced: clusters have to fit the grid and the function of their node.

    Args:
        updates: of the nodes of the executable graph, in their order
        numbers: to which the words refer
    """

    def __init__(self, updates: Sequence[NodeUpdate], numbers: Sequence[int]) -> None:
        cu = bindings()
        self.graph = check(cu.cuGraphCreate(0))
        weakref.finalize(self, cu.cuGraphDestroy, self.graph)
        self.nodes: list[Any] = []
        for update in updates:
            update.write(numbers)
            behind = self.nodes[-1:]
            add = cu.cuGraphAddKernelNode if update.keep.is_kernel else cu.cuGraphAddMemsetNode
            # A memset's parameters are followed by the context.
            node = _check(add, (self.graph, behind, len(behind), *update.args[2:]), update.keep)
            if update.keep.is_kernel:
                _check(cu.cuGraphKernelNodeCopyAttributes, (node, update.keep.node), update.keep)
            self.nodes.append(node)

    def set(self, updates: Sequence[NodeUpdate], numbers: Sequence[int]) -> None:
        """Set the nodes to what they launch in a call."""
        for node, update in zip(self.nodes, updates):
            update.write(numbers)
            _check(set_in_graph()[update.set], (node, update.args[2]), update.keep)


def set_in_graph() -> dict[Any, Any]:
    """Return for each call that sets a node of an executable graph the one that sets it in the graph."""
    cu = bindings()
    return {
        cu.cuGraphExecKernelNodeSetParams: cu.cuGraphKernelNodeSetParams,
        cu.cuGraphExecMemsetNodeSetParams: cu.cuGraphMemsetNodeSetParams,
    }


def refusal(updates: Sequence[NodeUpdate], numbers: Sequence[int]) -> str:
    """Set nodes again, and return which refuses and how."""
    for update in updates:
        update.write(numbers)
        try:
            _check(update.set, update.args, update.keep)
        except DriverError as e:
            return str(e)
    return "a node of the graph could not be set"


def _check(call: Any, args: tuple[Any, ...], what: object) -> Any:
    status, *info = call(*args)
    if int(status) != 0:
        # Of cuGraphExecUpdate.
        results = [result.name for i in info if (result := getattr(i, "result", None)) is not None]
        raise DriverError(f"{call.__name__}: {', '.join([status.name, *results])}: {what}")
    return info[0] if info else None
