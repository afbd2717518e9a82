# Owner(s): ["module: inductor"]
"""
Graphs with collectives, on two GPUs, and how ranks agree. test_pygraph_record.py has the same
on a modelled device, and what is not bound.
"""

from __future__ import annotations

import contextlib
import datetime
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from unittest import mock

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor.pygraph import report
from torch._inductor.pygraph.capture import bound, collectives
from torch._inductor.test_case import TestCase
from torch.distributed import _functional_collectives as functional
from torch.testing._internal.common_distributed import (
    _dynamo_dist_per_rank_init,
    DynamoDistributedMultiProcTestCase,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def reduced(x: torch.Tensor) -> torch.Tensor:
    return functional.all_reduce(x, "sum", dist.group.WORLD)


class AgreeTest(TestCase):
    @parametrize("ready", ((True, True, True), (True, False, True), (False,) * 3))
    def test_all_or_none(self, ready):
        store = dist.HashStore()

        def ask(ready):
            return collectives._agree(store, "key", 3, ready=ready)

        with ThreadPoolExecutor(3) as pool:
            self.assertEqual(list(pool.map(ask, ready)), [all(ready)] * 3)

    @parametrize("kind", ("hash", "file", "tcp"))
    def test_rank_that_does_not_come(self, kind):
        "What was decided without it holds for it when it does."
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        if kind == "file":
            store = dist.FileStore(f"{directory.name}/store", 2)
        elif kind == "tcp":
            store = dist.TCPStore("localhost", 0, 1, True, wait_for_workers=False)
        else:
            store = dist.HashStore()
        patience = datetime.timedelta(seconds=0.1)
        with mock.patch.object(collectives, "PATIENCE", patience):
            for _ in range(2):
                self.assertFalse(collectives._agree(store, "key", 2, ready=True))

    def test_group_that_is_gone(self):
        self.assertFalse(collectives.agree("no such group", "key", ready=True))


instantiate_parametrized_tests(AgreeTest)


@unittest.skipIf(torch.cuda.device_count() < 2, "requires CUDA and two GPUs")
class CollectivesTest(DynamoDistributedMultiProcTestCase):
    @property
    def world_size(self) -> int:
        return 2

    @contextlib.contextmanager
    def ranks(self) -> Iterator[None]:
        # By file: tests may run beside each other.
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group(
            "nccl", store=store, rank=self.rank, world_size=self.world_size
        )
        try:
            with _dynamo_dist_per_rank_init(self.rank, self.world_size, init_pg=False):
                yield
        finally:
            dist.destroy_process_group()

    def randn(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda")

    def check(self, fn: Callable[..., torch.Tensor]) -> None:
        "Each rank has inputs of its own, other ones in each call."
        compiled = torch.compile(fn, options={"pygraph": True})
        uncaptured = torch.compile(fn)
        torch.manual_seed(self.rank)
        kept = []
        for _ in range(9):
            inputs = [self.randn(64, 64), self.randn(64)]
            expected = uncaptured(*(x.clone() for x in inputs))
            kept.append((compiled(*inputs), expected))
        for actual, expected in kept:
            self.assertTrue(torch.equal(actual, expected))

    def test_between_kernels(self):
        with self.ranks():
            weight = self.randn(64, 64)
            self.check(lambda x, y: reduced(x @ weight).relu() @ weight + y)
            (entry,) = report()
            self.assertEqual((entry.choice, entry.copied_bytes), ("node_update", 0))
            self.assertGreater(counters["pygraph"]["bound_inputs"], 0)

    def test_of_an_output(self):
        with self.ranks():
            self.check(lambda x, y: reduced(x.sin() + y))
            (entry,) = report()
            self.assertEqual((entry.choice, entry.copied_bytes), ("node_update", 0))

    def test_several(self):
        def fn(x, y):
            for _ in range(5):
                x = reduced(x.sin() + y).cos()
            return x

        with self.ranks():
            self.check(fn)
            (entry,) = report()
            self.assertEqual(entry.choice, "node_update")

    def test_gathered(self):
        def fn(x, y):
            x = functional.all_gather_tensor(x.sin() + y, 0, dist.group.WORLD)
            return x.cos()

        with self.ranks():
            self.check(fn)
            (entry,) = report()
            self.assertEqual(entry.choice, "copy")

    def test_one_rank_fails(self):
        "Its proof: neither deploys the graph, nor runs a collective that the other does not."
        wrong = mock.patch.object(
            bound.BoundGraphNode, "_difference", return_value="made up"
        )
        with self.ranks():
            if self.rank == 1:
                wrong.start()
                self.addCleanup(wrong.stop)
            self.check(lambda x, y: reduced(x.sin() + y).cos())
            (entry,) = report()
            self.assertEqual(entry.choice, "no_graph")


if __name__ == "__main__":
    run_tests()
