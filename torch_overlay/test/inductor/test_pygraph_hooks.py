# Owner(s): ["module: inductor"]
"""What upstream's files tell PyGraph when a graph is compiled, on a machine that need not have a GPU."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch._dynamo
from torch._dynamo.capabilities import capabilities_of
from torch._inductor import config, memory
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.fake_cuda import fake_cuda
from torch.testing._internal.inductor_utils import HAS_CPU


class CapabilityTest(TestCase):
    def test_backend_of_a_frame(self) -> None:
        """The options of torch.compile count before the global setting, and another backend never has it."""

        def has_capabilities(**options: Any) -> bool:
            wrapper = torch._TorchCompileInductorWrapper("default", options, None)
            return capabilities_of(wrapper) is not None

        self.assertTrue(has_capabilities(pygraph=True))
        self.assertFalse(has_capabilities())
        with config.patch(pygraph=True):
            self.assertTrue(has_capabilities())
            self.assertFalse(has_capabilities(pygraph=False))
            self.assertIsNone(capabilities_of(lambda gm, inputs: gm.forward))


class SavedInputTest(TestCase):
    def test_static_in_the_backward_if_in_the_forward(self) -> None:
        """A parameter keeps its address. An input that the forward saved does not, unless the forward copied it."""

        def static(**options: Any) -> int:
            torch._dynamo.reset()
            with fake_cuda() as graphs:
                weight = torch.nn.Parameter(torch.empty(8, 8, device="cuda"))
                x = torch.empty(8, 8, device="cuda")
                torch.compile(lambda x: (x * weight).sin() * weight, options=options)(x).sum().backward()
            return sum(i.static for i in graphs[-1].inputs)

        self.assertEqual(static(**{"triton.cudagraphs": True}), 2)
        self.assertEqual(static(pygraph=True), 1)


class PeakMemoryTest(TestCase):
    def test_copies_wait_for_their_users(self) -> None:
        """Copies of inputs that later layers read are not made before the first layer runs."""

        def fn(x: torch.Tensor, position: torch.Tensor, caches: list[torch.Tensor]) -> torch.Tensor:
            for cache in caches:
                cache[0].index_copy_(0, position, x.to(cache.dtype))
                cache[1].index_copy_(0, position, (x * 2).to(cache.dtype))
                x = x + torch.softmax(x @ cache[0].float().t(), -1) @ cache[1].float()
            return x

        peaks: list[int] = []

        def estimate(*args: Any) -> Any:
            peak, steps = original(*args)
            peaks.append(peak)
            return peak, steps

        original = memory.estimate_peak_memory
        with mock.patch.object(memory, "estimate_peak_memory", estimate), fake_cuda():
            caches = [torch.empty(2, 4096, 256, dtype=torch.bfloat16, device="cuda") for _ in range(6)]
            position = torch.zeros(1, dtype=torch.int64, device="cuda")
            torch.compile(fn)(torch.empty(1, 256, device="cuda"), position, caches)
        # Of the order that Inductor begins with, of the four that it tries, and of the one that it took.
        *others, _, found = peaks
        self.assertEqual(len(others), 4)
        self.assertLess(1.5 * found, min(others))


class PartitionBudgetTest(TestCase):
    def test_few_bytes(self) -> None:
        """Nodes are reordered for fewer partitions though the peak of some bytes grows by more than a tenth."""

        def fn(x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = x[..., torch.arange(4)]
            y = (x * x).to("cpu")[0][0]
            z = x / (s.abs() + 1)
            return z.sum(-1), (y > y).cuda()

        with fake_cuda() as graphs, torch.no_grad():
            torch.compile(fn, options={"pygraph": True})(torch.empty(3, 4, device="cuda"), torch.empty(()))
        (graph,) = graphs
        self.assertEqual(len([p for p in graph.partitions if p.captured]), 2)


if __name__ == "__main__":
    if HAS_CPU:
        run_tests()
