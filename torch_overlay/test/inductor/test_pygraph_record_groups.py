# Owner(s): ["module: inductor"]
"""Process groups are destroyed, whose collectives graphs have captured. Recorded on the modelled device."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING
from unittest import mock

import torch.distributed as dist
from torch._inductor.pygraph import report
from torch._inductor.pygraph.types.reason import Code
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.modelled_cuda import ModelledGraph
from torch.testing._internal.pygraph_collectives import CollectiveTestCase, Ranks


if TYPE_CHECKING:
    from collections.abc import Callable


class ProcessGroupTest(CollectiveTestCase):
    def setUp(self) -> None:
        super().setUp()
        # Whatever else holds a graph.
        self.graphs: list[ModelledGraph] = []
        init = ModelledGraph.__init__

        def noted(graph: ModelledGraph, *args: Any, **kwargs: Any) -> None:
            init(graph, *args, **kwargs)
            self.graphs.append(graph)

        patch = mock.patch.object(ModelledGraph, "__init__", noted)
        patch.start()
        self.addCleanup(patch.stop)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        self.addCleanup(lambda: dist.is_initialized() and dist.destroy_process_group())

    def launched(self) -> list[bool]:
        """Return for each graph that was instantiated with nodes whether it is destroyed."""
        return [g.is_destroyed for g in self.graphs if g.launches]

    def function(self, name: str, group: dist.ProcessGroup, **options: Any) -> Callable[..., list[Any]]:
        """Return a function with a collective of a group, whose results each call checks."""
        self.groups = (group.group_name,)
        body = "c10d = torch.ops._c10d_functional\n" + self.COLLECTIVES[name].strip()
        fn = self.deploy(body, [self.randn(), self.randn()], **options)

        def call() -> list[Any]:
            inputs = [self.randn(), self.randn()]
            with Ranks(self.device):
                expected = self.expected(fn, inputs)
                outputs = fn(*inputs)
                self.assertEqual(self.values([*outputs, *inputs]), expected)
            return outputs

        return call

    @parametrize("force", ("node_update", "prelude", "copy"))
    @parametrize("destroy", ("destroy_process_group", "_abort_process_group"))
    def test_graphs_are_destroyed_first(self, force, destroy):
        "NCCL would wait for them. The program holds an output, and calls the function again."
        call = self.function("in_between", dist.group.WORLD, force=force)
        for _ in range(6):
            kept = call()
        self.assertEqual(self.launched(), [False])
        seen = []
        with mock.patch.object(dist.ProcessGroup, "shutdown", lambda pg: seen.extend(self.launched())):
            getattr(dist.distributed_c10d, destroy)()
        self.assertEqual(seen or self.launched(), [True])
        (entry,) = report()
        self.assertEqual((entry.choice, entry.reasons[-1].code), ("no_graph", Code.GROUP_DESTROYED))
        for _ in range(3):
            kept = call()
        del kept
        self.assertEqual(len(self.launched()), 1)

    def test_graphs_of_another_group_stay(self):
        other = dist.new_group([0, 1])
        for _ in range(2):
            call, of_other = self.function("in_between", dist.group.WORLD), self.function("of_an_output", other)
        for _ in range(6):
            call(), of_other()
        count = len(self.launched())
        dist.destroy_process_group(other)
        self.assertEqual(sorted(self.launched()), [False] * (count - 1) + [True])
        for _ in range(3):
            call(), of_other()
        self.assertEqual(len(self.launched()), count)

    def test_graph_behind_one_that_is_destroyed(self):
        "It is destroyed, too, and recorded again."
        first = self.function("in_between", dist.group.WORLD, returned=())
        behind = self.deploy("x, = args; args.clear(); a = new(); launch(sin, a, x); return (a,)", [self.randn()])
        for i in range(9):
            # In the pool of the graphs.
            kept = first()
            if i == 5:
                self.assertEqual(self.launched(), [False, False])
                dist.destroy_process_group()
            x = self.randn()
            expected = self.expected(behind, [x])
            self.assertEqual(self.values([*behind(x), x]), expected)
            del kept
        destroyed, others = self.launched()[:2], self.launched()[2:]
        self.assertEqual((destroyed, set(others)), ([True, True], {False}))


instantiate_parametrized_tests(ProcessGroupTest)


class PythonProcessGroupTest(ProcessGroupTest):
    "Without compiled code."

    compiled = None


if __name__ == "__main__":
    run_tests()
