"""What a modelled driver does with graphs that PyGraph copies from captured ones, and launches by itself."""

from __future__ import annotations

from typing import Any

from torch.testing._internal.modelled_nodes import cu


class Clones:
    """A part of ModelledDriver. ``clones``: of each copy of a graph, its nodes by those of the graph."""

    def __init__(self) -> None:
        self.clones: dict[int, dict[int, int]] = {}

    def cuGraphClone(self, graph: Any) -> Any:
        copied = self.add_graph()
        self.clones[copied] = found = {}
        for i in self.graphs[int(graph)]:
            behind = [found[before] for before, after in self.edges if after == i and before in found]
            found[i] = self.add_node(copied, self.nodes[i], behind)
        return self.success, cu.CUgraph(copied)

    def cuGraphNodeFindInClone(self, node: Any, graph: Any) -> Any:
        return self.success, cu.CUgraphNode(self.clones[int(graph)][int(node)])

    def cuGraphInstantiate(self, graph: Any, flags: int) -> Any:
        return self.success, cu.CUgraphExec(self.instantiate(int(graph)))

    def cuGraphLaunch(self, executable: Any, stream: Any) -> Any:
        self.launch(int(executable))
        return (self.success,)

    def cuGraphExecDestroy(self, executable: Any) -> Any:
        del self.executables[int(executable)]
        return (self.success,)

    def cuGraphDestroy(self, graph: Any) -> Any:
        self.graphs[int(graph)] = []
        return (self.success,)
