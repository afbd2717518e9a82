# Owner(s): ["module: inductor"]
"""Conversions of inputs that have nothing to convert: compiled functions have the results of eager mode."""

from __future__ import annotations

import torch
import torch._dynamo
from torch._dynamo.utils import counters
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, subtest
from torch.testing._internal.inductor_utils import HAS_CPU
from torch.testing._internal.pygraph_mend import BranchTestCase


class Frequencies(torch.nn.Module):
    """Registers one of its buffers in each call, as rotary embeddings of transformers"""

    def __init__(self):
        super().__init__()
        self.used = torch.nn.Buffer(torch.ones(2), persistent=False)
        self.short = torch.nn.Buffer(torch.arange(2.0), persistent=False)

    def forward(self, x):
        short = self.short.to(x.device)
        self.register_buffer("used", short, persistent=False)
        self.short = short
        return x + self.used


def tag(x):
    return x.to("cpu").tag + x.float().contiguous().tag, x * 2


def returned(x):
    return x.cpu(), x.to(torch.float32, copy=True), x.contiguous() is x, x.double() is x


def written(x):
    y = x.detach().contiguous()
    z = y.to(torch.float32)
    z.mul_(2)
    return x.detach().to("cpu") + y, z


def others(x):
    """Tensors that have something to convert"""
    y = x.t().contiguous()
    y = y.to(torch.float64)
    return hasattr(y, "tag"), hasattr(x.bfloat16(), "tag"), hasattr(x.to("cpu", copy=True), "tag"), y


FUNCTIONS = (tag, returned, written, others)


class ConversionTest(BranchTestCase):
    @parametrize("fn", [subtest(f, name=f.__name__) for f in FUNCTIONS])
    @parametrize("grad", (False, True))
    def test_equal(self, fn, grad):
        x = torch.randn(3, 2, requires_grad=grad)
        x.tag = 3
        self.check(fn, [(x,), (x,)], graphs=1)

    @parametrize("calls", (1, 3))
    def test_buffer(self, calls):
        model = Frequencies()
        self.check(model, [(torch.full((2,), float(i)),) for i in range(calls)], graphs=1)
        self.assertIs(model.used, model.short)
        self.assertFalse(model.state_dict())
        self.assertFalse(counters["graph_break"])

    def test_attribute_that_changes(self):
        """A guard finds what the program has set on the input."""
        inputs = [torch.ones(2) for _ in range(2)]
        for i, x in enumerate(inputs):
            x.tag = i
        self.check(lambda x: x.to("cpu").sin() + x.to("cpu").tag, [(x,) for x in inputs], graphs=None)


instantiate_parametrized_tests(ConversionTest)


if __name__ == "__main__":
    if HAS_CPU:
        run_tests()
