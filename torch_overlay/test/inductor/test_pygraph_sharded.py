# Owner(s): ["module: inductor"]
"""Programs whose parameters are sharded."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._guards import TracingContext
from torch._inductor.pygraph import report
from torch._inductor.pygraph.capture import bound
from torch._inductor.pygraph.dynamo.capabilities import MENDING, PYGRAPH
from torch._inductor.test_case import run_tests, TestCase
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.modelled_operators import on_host
from torch.testing._internal.pygraph_functions import RecordTestCase


if TYPE_CHECKING:
    from collections.abc import Callable


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Backend:
    """Runs graphs as they are. Notes the static inputs of forwards, and where their parameters are in each call."""

    def __init__(self, capabilities: Any) -> None:
        self.capabilities = capabilities
        self.static: list[list[int]] = []
        self.addresses: list[list[int]] = []

    def dynamo_capabilities(self) -> Any:
        return self.capabilities

    def compile(self, gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        static = list(TracingContext.get().fw_metadata.static_input_indices)
        shapes = [node.meta["val"].shape for node in gm.graph.find_nodes(op="placeholder")]
        self.static.append(static)

        def run(args: list[Any]) -> Any:
            self.addresses.append([t.data_ptr() for t, shape in zip(args, shapes) if shape != (2, 4)])
            return torch.fx.Interpreter(gm).boxed_run(list(args))

        run._boxed_call = True
        return run

    def __call__(self, gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return aot_autograd(fw_compiler=self.compile, bw_compiler=boxed_nop)(gm, inputs)


class FullyShardTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        self.addCleanup(dist.destroy_process_group)

    def steps(self, backend: Backend, *, whole: bool, reshard: bool, shards: bool = True) -> None:
        model = nn.Sequential(Block(), Block())
        mesh = init_device_mesh("cpu", (2,))
        for module in (*model, model) if shards else ():
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
        for module in (model,) if whole else model:
            module.compile(backend=backend)
        kept = []
        for i in range(3):
            # Another program has its memory elsewhere in each step.
            kept.append([torch.empty(size) for size in (8, 32) for _ in range(i)])
            model(torch.randn(2, 4)).sum().backward()

    @parametrize("whole", (True, False))
    @parametrize("reshard", (True, False))
    @parametrize("mends", (True, False))
    def test_gathered_parameters_are_external(self, whole, reshard, mends):
        backend = Backend(MENDING if mends else PYGRAPH)
        self.steps(backend, whole=whole, reshard=reshard)
        self.assertEqual(backend.static, [[], []])
        self.assertGreater(len(set(map(tuple, backend.addresses[::2]))), 1)

    def test_stock_takes_them_for_static(self):
        backend = Backend(None)
        self.steps(backend, whole=False, reshard=True)
        self.assertEqual(backend.static, [[0, 1, 3, 4]] * 2)

    def test_parameters_that_stay_are_static(self):
        backend = Backend(MENDING)
        self.steps(backend, whole=False, reshard=True, shards=False)
        self.assertEqual(backend.static, [[0, 1, 3, 4]] * 2)


class GatheredParametersTest(RecordTestCase):
    """A block, recorded on the modelled device, whose parameter is gathered for its forward, and again for its backward."""

    @parametrize("force", ("node_update", "prelude"))
    def test_freed_by_resharding(self, force):
        "Each lies elsewhere in each step. Nothing holds it, copies it or records again."
        forward = self.deploy(
            "w, x = args; args.clear(); a = new(); launch(mul, a, w, x); b = new(); launch(sin, b, a); return (b, a)",
            [self.randn(), self.randn()],
            mode="forward",
            force=force,
        )
        backward = self.deploy(
            "w, a, t = args; args.clear(); launch(mul, a, a, t); b = new(); launch(mul, b, w, a); return (b,)",
            [self.randn(), self.randn(), self.randn()],
            mode="backward",
            names=("primals_1", "mul", "tangents_1"),
            reused=(1,),
            force=force,
        )
        recorded, record = [], bound.BoundGraphNode._record

        def noted(node: bound.BoundGraphNode, *args: Any) -> Any:
            recorded.append(step)
            return record(node, *args)

        patch = mock.patch.object(bound.BoundGraphNode, "_record", noted)
        patch.start()
        self.addCleanup(patch.stop)
        # So that the next parameter lies elsewhere.
        others = []
        for step in range(12):
            weight, x, tangent = (torch.randn(8) for _ in range(3))
            gathered, ref = self.gathered(weight)
            y, activation = forward(gathered, self.device.tensor(x))
            self.assertEqual(on_host(y), (weight * x).sin())
            del gathered
            if is_steady := step > 5:
                self.assertTrue(ref.expired())
            others.append(self.randn())
            gathered, ref = self.gathered(weight)
            saved = [gathered, activation, self.device.tensor(tangent)]
            del gathered, activation
            (gradient,) = backward.call(saved)
            self.assertEqual(on_host(gradient), weight * (weight * x * tangent))
            if is_steady:
                self.assertTrue(ref.expired())
            others.append(self.randn())
            del y, gradient
        self.assertEqual([(e.choice, e.copied_bytes) for e in report()], [(force, 0)] * 2)
        self.assertLess(max(recorded), 6, recorded)

    def gathered(self, weight: torch.Tensor) -> tuple[torch.Tensor, StorageWeakRef]:
        found = self.device.tensor(weight)
        return found, StorageWeakRef(found.untyped_storage())


instantiate_parametrized_tests(FullyShardTest)
instantiate_parametrized_tests(GatheredParametersTest)


class PythonGatheredParametersTest(GatheredParametersTest):
    "Without compiled code."

    compiled = None

if __name__ == "__main__":
    run_tests()
