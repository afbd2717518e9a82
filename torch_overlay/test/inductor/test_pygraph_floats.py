# Owner(s): ["module: inductor"]
"""
Python floats and item() of CPU tensors in compiled code: types, values and gradients are eager mode's.
"""

from __future__ import annotations

import copy
import itertools
import unittest
from unittest import mock

import numpy as np

import torch
import torch._dynamo
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.pygraph import native
from torch._inductor.test_case import run_tests, TestCase
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.fake_cuda import fake_cuda
from torch.testing._internal.inductor_utils import HAS_CPU
from torch.testing._internal.pygraph_values import cuda


class FloatTest(TestCase):
    "What Dynamo has made of a float that varies."

    def assertSame(self, value):
        made = native.as_tensor_fullprec(value)
        expected = torch._as_tensor_fullprec(value)
        self.assertIs(type(made), type(expected))
        self.assertEqual(made.device, expected.device)
        self.assertEqual(made.is_inference(), expected.is_inference())
        self.assertEqual(made.requires_grad, expected.requires_grad)
        if type(made) is torch.Tensor:
            self.assertEqual(made, expected, atol=0, rtol=0, equal_nan=True)
        return made

    def test_as_in_eager_mode(self):
        class Float(float):
            pass

        for value in 1.5, 1 / 3, -0.0, float("nan"), float("inf"), 5e-324:
            made = self.assertSame(value)
            self.assertEqual(made.dtype, torch.float64)
            self.assertEqual(str(made.item()), str(value))
        for value in 3, True, Float(2.5), np.float32(0.1), np.ones(3), [1.0, 2.0]:
            self.assertSame(value)
        self.assertEqual(native.as_tensor_fullprec(3).dtype, torch.int64)
        with self.assertRaises(TypeError):
            native.as_tensor_fullprec("text")
        # Each is the caller's.
        kept = native.as_tensor_fullprec(1.5)
        native.as_tensor_fullprec(2.5)
        self.assertEqual(kept, 1.5)
        kept.requires_grad_().mul(3).backward()
        self.assertEqual(kept.grad, 3.0)

    def test_modes(self):
        for mode in (
            FakeTensorMode,
            torch.inference_mode,
            torch.no_grad,
            lambda: torch.device("meta"),
            lambda: torch.autocast("cpu"),
        ):
            with mode():
                self.assertSame(1.5)

        def fn(x):
            self.assertSame(1.5)
            return x * native.as_tensor_fullprec(2.5)

        self.assertEqual(torch.func.grad(fn)(torch.tensor(1.0)), 2.5)
        self.assertEqual(torch.func.vmap(fn)(torch.ones(2)), [2.5, 2.5])
        self.assertIn("lift_fresh", make_fx(fn)(torch.ones(2)).code)

    @parametrize("by_option", (False, True))
    def test_compiled_code_calls_it(self, by_option):
        real = native.as_tensor_fullprec
        for on in True, False:
            setting = {"pygraph": on}
            with (
                mock.patch.object(native, "as_tensor_fullprec", wraps=real) as made,
                config.patch({} if by_option else setting),
                fake_cuda() as graphs,
                torch.no_grad(),
            ):
                fn = torch.compile(
                    lambda x, a, b: x * a + b, options=setting if by_option else {}
                )
                for n in range(4):
                    fn(cuda(8), n + 0.5, n + 0.25)
            self.assertEqual(len(graphs), 2)
            values = [float(call.args[0]) for call in made.call_args_list]
            expected = [n + f for n in (1, 2, 3) for f in (0.5, 0.25)]
            self.assertEqual(values, expected if on else [])


instantiate_parametrized_tests(FloatTest)


@unittest.skipUnless(HAS_CPU, "requires a C++ compiler")
class ItemTest(TestCase):
    "What generated code makes of the value of a tensor on the CPU, all on the CPU."

    VALUES = (0.3, 1.0, 0.0, -0.0, -2.5, float("inf"), float("nan"), 1e-45, 1e300)

    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        counters.clear()

    def assertEager(self, fn, compiled, *inputs):
        copies = copy.deepcopy(inputs)
        actual, expected = compiled(*inputs), fn(*copies)
        self.assertEqual(actual, expected, atol=0, rtol=0, exact_dtype=True)
        self.assertEqual(inputs, copies, atol=0, rtol=0)

    def check(self, fn, dtype=torch.float32, x=None, values=VALUES):
        x = torch.randn(19) if x is None else x
        compiled = torch.compile(fn, options={"pygraph": True})
        for value in values:
            self.assertEager(fn, compiled, x.clone(), torch.tensor(value, dtype=dtype))
        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

    @parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16))
    def test_of_all_dtypes(self, dtype):
        fn = lambda x, s: (x * s.item(), s.item() + x, x - s.item(), s.item() / x)  # noqa: E731
        self.assertEqual(self.check(fn, dtype), (1, 0))

    @parametrize("dtype", (torch.float64, torch.bfloat16, torch.int64, torch.bool))
    def test_promotes_nothing(self, dtype):
        for x in torch.arange(-4, 5).to(dtype), torch.tensor(3).to(dtype):
            torch._dynamo.reset()
            counters.clear()
            fn = lambda x, s: (x * s.item(), s.item() * x)  # noqa: E731
            self.assertEqual(self.check(fn, torch.float64, x), (1, 0))

    def test_in_place_of_integers(self):
        "Eager mode raises an error, and writes nothing."
        for fn in (lambda x, s: x.mul_(s.item()), lambda x, s: x.div_(s.item())):
            for dtype in torch.int64, torch.bool:
                compiled = torch.compile(fn, options={"pygraph": True})
                x = torch.tensor([1, 0, 1]).to(dtype)
                before = x.clone()
                with self.assertRaisesRegex(RuntimeError, "can't be cast"):
                    compiled(x, torch.tensor(0.5))
                self.assertEqual(x, before)

    def test_written_after(self):
        def fn(x, s):
            y = x * s.item()
            s += 1
            x.mul_(2)
            return y, s + 1

        self.assertEqual(self.check(fn), (1, 0))

    def test_no_arithmetic(self):
        "Tensors are made of it, or it is not used at all. Or arithmetic of more than two."
        for fn in (
            lambda x, s: x * s.item() + torch.full_like(x, s.item()),
            lambda x, s: torch.add(x, s.item(), alpha=2),
            lambda x, s: (x * 2, s.item())[0],
        ):
            torch._dynamo.reset()
            counters.clear()
            graphs, breaks = self.check(fn, values=(0.3,))
            self.assertGreater(breaks, 0)

    @parametrize("failure", ("backend", "guard", "specialized"))
    def test_backend(self, failure):
        "Had it looked at a value, it would be as without PyGraph."
        real = torch._TorchCompileInductorWrapper.__call__

        def backend(wrapper, gm, inputs):
            for item in gm.graph.find_nodes(op="call_method", target="item"):
                value = item.meta["example_value"]
                if failure == "backend":
                    raise RuntimeError("does not compile")
                if failure == "guard":
                    bool(value > 0)
                elif failure == "specialized":
                    TensorifyState.specialize(str(value.node._expr))
                    raise TensorifyScalarRestartAnalysis
            return real(wrapper, gm, inputs)

        with mock.patch.object(torch._TorchCompileInductorWrapper, "__call__", backend):
            # The graph that follows has a float, to which the same is done.
            self.assertEqual(self.check(lambda x, s: x * s.item(), values=(0.3,)), (1, 1))

    def test_symbols_of_other_frames(self):
        "Names are of few numbers."
        fn = lambda x, s: x * s.item()  # noqa: E731
        names = {f"zf{n}" for n in range(200)}
        with mock.patch.object(TensorifyState, "force_specializations", names):
            self.assertEqual(self.check(fn), (1, 0))

    def test_written_before_backward(self):
        def fn(x, s):
            return (x * s.item()).sin() * s.item()

        writes = {
            "in_place": lambda s: s.fill_(9),
            "data": lambda s: s.data.fill_(9),
            "numpy": lambda s: s.numpy().fill(9),
        }
        compiled = torch.compile(fn, options={"pygraph": True})
        for dtype in torch.float32, torch.float64:
            s = torch.zeros((), dtype=dtype)
            for value, (name, write) in itertools.product((0.3, 1.0, 0.0, 2.5), writes.items()):
                s.fill_(value)
                x = torch.randn(19, requires_grad=True)
                y, expected = compiled(x, s), fn(x, s)
                write(s)
                grads = (torch.autograd.grad(out.sum(), x) for out in (y, expected))
                self.assertEqual(*grads, msg=name)
        self.assertEqual(counters["stats"]["unique_graphs"], 2)
        self.assertEqual(counters["graph_break"], {})


instantiate_parametrized_tests(ItemTest)


if __name__ == "__main__":
    run_tests()
