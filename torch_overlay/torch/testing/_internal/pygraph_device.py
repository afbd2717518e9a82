"""Compares programs on a device with torch.compile without CUDA graphs."""

from __future__ import annotations

import gc
import unittest

import torch
import torch._dynamo
import torch._inductor.cudagraph_trees as trees
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor.pygraph import report, reset_report
from torch._inductor.test_case import TestCase
from torch.testing._internal.inductor_utils import HAS_CUDA_AND_TRITON


FORCED = {"pygraph": True, "pygraph_force": "node_update"}
DEVICE = "cuda"
# More than it takes to choose.
MOST_CALLS = 440


def randn(*size, **kwargs):
    return torch.randn(*size, device=DEVICE, **kwargs)


class MLP(torch.nn.Module):
    def __init__(self, dim=64, layers=3, dropout=0.0, norm=False):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(dim, dim) for _ in range(layers)
        )
        self.norm = torch.nn.BatchNorm1d(dim) if norm else torch.nn.Identity()
        self.dropout = dropout

    def forward(self, x):
        for layer in self.layers:
            x = F.gelu(layer(self.norm(x)))
        return F.dropout(x, self.dropout, self.training)


@unittest.skipUnless(HAS_CUDA_AND_TRITON, "requires CUDA and Triton")
class DeviceTestCase(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        torch.manual_seed(0)
        counters.clear()
        reset_report()

    def tearDown(self):
        super().tearDown()
        torch._dynamo.reset()
        gc.collect()

    def recordings(self):
        "Graphs recorded on the current device so far, and this call's own id."
        manager = trees.get_manager(torch.cuda.current_device())
        return manager.new_graph_id().id

    def compiled(self, fn, **options):
        return torch.compile(fn, options={**FORCED, **options})

    def check(self, fn, make_inputs, calls=6, exact=True, keep=False, **options):
        """
        Compares fn compiled with PyGraph and without CUDA graphs: outputs, and inputs
        afterwards, on fresh inputs for each call; with ``keep``, when all calls are done.
        Returns PyGraph's compiled function.
        """
        expected_fn = torch.compile(lambda *args: fn(*args))
        actual_fn = self.compiled(fn, **options)
        tolerance = {"atol": 0, "rtol": 0} if exact else {}
        pairs = []
        with torch.no_grad():
            for i in range(calls):
                inputs = make_inputs()
                copies = [
                    i.clone() if isinstance(i, torch.Tensor) else i for i in inputs
                ]
                expected = expected_fn(*copies)
                pairs += (actual_fn(*inputs), expected), (list(inputs), copies)
                del expected
                if not keep or i == calls - 1:
                    for actual, expected in pairs:
                        self.assertEqual(actual, expected, **tolerance)
                    pairs.clear()
                    del actual, expected
        return actual_fn

    def assertBound(self, functions=1):
        "Every recorded function replays with no input copied."
        self.assertEqual(counters["pygraph"]["unbound"], 0, str(report()))
        self.assertEqual([r.copied_bytes for r in report()], [0] * len(report()))
        self.assertEqual(len([r for r in report() if r.updated_nodes]), functions)
