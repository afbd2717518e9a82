# Owner(s): ["module: inductor"]
"""User-defined Triton kernels with parameters that are passed by address."""

from __future__ import annotations

import triton
import triton.language as tl

import torch
import torch._dynamo
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.fake_cuda import fake_cuda


def copy(a_ptr, o_ptr, BLOCK: tl.constexpr):
    x = tl.arange(0, BLOCK)
    tl.store(o_ptr + x, tl.load(a_ptr + x))


def decorated(decorators, **jit_options):
    kernel = triton.jit(**jit_options)(copy)
    if "heuristics" in decorators:
        kernel = triton.heuristics({"BLOCK": lambda args: 64})(kernel)
    if "autotune" in decorators:
        kernel = triton.autotune([triton.Config({}, num_warps=2)], key=[])(kernel)
    return kernel


@instantiate_parametrized_tests
class IndirectArgsTest(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()

    def trace(self, kernel, block):
        "What ends the tracing of a call as one graph; without an error, Traced does."

        class Traced(Exception):
            pass

        def backend(graph_module, example_inputs):
            raise Traced

        @torch.compile(backend=backend, fullgraph=True)
        def call(a, out):
            kernel[(1,)](a, out, **block)
            return out

        with fake_cuda():
            a = torch.empty(64, device="cuda")
            try:
                call(a, torch.empty_like(a))
            except Exception as error:
                return f"{type(error).__name__}: {error}"

    @parametrize("decorators", ["", "heuristics", "autotune", "autotune heuristics"])
    def test_breaks_the_graph(self, decorators):
        block = {} if "heuristics" in decorators else {"BLOCK": 64}
        kernel = decorated(decorators, indirect_args={"a_ptr": 16})
        end = self.trace(kernel, block)
        self.assertRegex(end, "^Unsupported: .*\n.*triton.jit's indirect_args")

    @parametrize("decorators", ["", "heuristics", "autotune", "autotune heuristics"])
    def test_other_kernels_do_not(self, decorators):
        block = {} if "heuristics" in decorators else {"BLOCK": 64}
        self.assertIn("Traced", self.trace(decorated(decorators), block))


if __name__ == "__main__":
    run_tests()
