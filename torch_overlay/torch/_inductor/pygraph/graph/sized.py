"""
The nodes of an executable graph whose launches are set to those of each call's sizes.

A node whose launch differs is set by one call. If the attributes of one differ, all nodes of the
graph are set and cuGraphExecUpdate takes over the graph: on an H100 it takes 0.75 us a node, where
setting a node takes 0.9 us, and at another size most nodes differ. A recording for each set of
attributes would take memory, and a capture at each of the first sizes.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from typing import Any, TYPE_CHECKING

from torch._inductor.pygraph.graph.binding import Nodes, NodeUpdate
from torch._inductor.pygraph.graph.driver import bindings
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._inductor.pygraph.graph.binding import Word
    from torch._inductor.pygraph.graph.captured import CapturedNode


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


class SizedNodes(Nodes):
    """
    Args:
        graph: that ``executable`` was made of
        count: of the numbers of a call
        launches: of the sizes of the capture
    """

    def __init__(self, graph: Any, executable: Any, count: int, launches: Launches) -> None:
        super().__init__([-1] * count, launches.updates, [])
        self.graph = graph
        self.executable = executable
        # None was set yet.
        self.launches: Launches | None = Launches([], launches.of_libraries)

    def move(self, numbers: Sequence[int], launches: Launches) -> bool:
        """
        Set the nodes to what they launch in a call. Return False if a node refused: the graph
        must not be launched then.

        Args:
            numbers: addresses, and numbers of the call's sizes, to which the words refer
        """
        before, self.launches = self.launches, None
        self.updates = launches.updates
        if before is None or before.attributes != launches.attributes:
            is_set = self._update_graph(numbers, launches)
        else:
            moved = (k for k, (a, b) in enumerate(zip(self.pointers, numbers)) if a != b)
            changed = OrderedSet(i for k in moved for i in launches.nodes_of.get(k, ()))
            if before is not launches:
                updates = itertools.zip_longest(before.updates, launches.updates)
                changed |= OrderedSet(i for i, (a, b) in enumerate(updates) if a is not b)
            is_set = self.set(sorted(changed), numbers)
        if is_set:
            self.launches = launches
        return is_set

    def _update_graph(self, numbers: Sequence[int], launches: Launches) -> bool:
        cu = bindings()
        set_in_graph = {
            cu.cuGraphExecKernelNodeSetParams: cu.cuGraphKernelNodeSetParams,
            cu.cuGraphExecMemsetNodeSetParams: cu.cuGraphMemsetNodeSetParams,
        }
        for node, launched in launches.of_libraries:
            if launched.is_kernel and cu.cuGraphKernelNodeCopyAttributes(node, launched.node)[0] != 0:
                return False
        switches = []
        for i, update in enumerate(self.updates):
            if update.set not in set_in_graph:
                switches.append(i)
                continue
            for word in update.words:
                word.value.value = numbers[word.input] + word.offset
            _, node, params, *_ = update.args
            if set_in_graph[update.set](node, params)[0] != 0:
                return False
        if cu.cuGraphExecUpdate(self.executable, self.graph)[0] != 0:
            return False
        return self.set(switches, numbers)
