# Owner(s): ["module: inductor"]
"""
Code that Inductor generates for a GPU, on a machine that need not have one: off, PyGraph changes
nothing; on, the kernels are those of stock CUDA graphs. And tests of the harness that shows it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import config
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import fresh_cache
from torch.testing import FileCheck
from torch.testing._internal.fake_cuda import fake_cuda, report
from torch.testing._internal.python_autograd import run_backward


if TYPE_CHECKING:
    from collections.abc import Callable

    # torch.compile with the options under test.
    Compile = Callable[..., Callable[..., Any]]

try:
    import transformers
except ImportError:
    transformers = None


@torch.library.custom_op("test_pygraph_codegen::scale", mutates_args=())
def scale(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


@scale.register_fake
def _(x: torch.Tensor, by: float) -> torch.Tensor:
    return torch.empty_like(x)


def randn(*size: int, **kwargs: Any) -> torch.Tensor:
    return torch.randn(*size, device="cuda", **kwargs)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8)).to("cuda")


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1)
    ).to("cuda")


class Programs:
    """What is compiled on both sides of a comparison."""

    @staticmethod
    def mlp_inference(compile: Compile) -> None:
        with torch.no_grad():
            compile(mlp())(randn(8, 64))

    @staticmethod
    def mlp_training(compile: Compile) -> None:
        compile(mlp())(randn(8, 64)).sum().backward()

    @staticmethod
    def conv_training(compile: Compile) -> None:
        compile(conv_net())(randn(4, 3, 32, 32)).sum().backward()

    @staticmethod
    def autocast_training(compile: Compile) -> None:
        model = mlp()

        def loss(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return model(x).float().square().mean()

        compile(loss)(randn(8, 64)).backward()

    @staticmethod
    def optimizer(compile: Compile) -> None:
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), capturable=True, foreach=True)
        model(randn(8, 64)).sum().backward()
        # Compiling cannot make the optimizer's state: that happens on the real device.
        optimizer.step()
        compile(optimizer.step)()

    @staticmethod
    def dynamic_shapes(compile: Compile) -> None:
        compiled = compile(mlp())
        for batch in (4, 8, 12):
            compiled(randn(batch, 64)).sum().backward()

    @staticmethod
    def partitioned(compile: Compile) -> None:
        def f(x: torch.Tensor, on_cpu: torch.Tensor) -> torch.Tensor:
            mean = (x.sum(0).cpu() * on_cpu).to("cuda")
            return (x - mean).relu() @ x

        compile(f)(randn(64, 64), torch.randn(64))

    @staticmethod
    def custom_op(compile: Compile) -> None:
        compile(lambda x: torch.ops.test_pygraph_codegen.scale(x.sin(), 2.0) + 1)(randn(8, 8))

    @staticmethod
    def mutation(compile: Compile) -> None:
        def f(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            state.mul_(0.9).add_(x)
            return state.relu() + x

        compile(f)(randn(8, 8), randn(8, 8))

    @staticmethod
    def cpu_scalar(compile: Compile) -> None:
        compile(lambda x, s: x * s + 1)(randn(8, 8), torch.tensor(3.0))

    @staticmethod
    def graph_break(compile: Compile) -> None:
        def f(x: torch.Tensor) -> torch.Tensor:
            x = F.softmax(x, -1)
            torch._dynamo.graph_break()
            return x.cos() @ x

        compile(f)(randn(16, 16))

    @staticmethod
    def encoder_training(compile: Compile) -> None:
        model_config = transformers.BertConfig(
            vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
        )
        model = transformers.BertForMaskedLM(model_config).to("cuda")
        ids = torch.zeros(2, 16, dtype=torch.int64, device="cuda")
        compile(model)(input_ids=ids, labels=ids).loss.backward()


PROGRAMS = {name: program.__func__ for name, program in vars(Programs).items() if isinstance(program, staticmethod)}
if transformers is None:
    del PROGRAMS["encoder_training"]

OPTIONS = {
    "default": {},
    "cudagraphs": {"triton.cudagraphs": True},
    "pygraph": {"pygraph": True},
}


def comparable(source: str) -> str:
    """Without paths, and the hash of Triton's sources that a patched Triton changes."""
    source = source.replace(str(Path(torch.__file__).parent), "torch")
    source = re.sub(r"(?m)^# kernel path: .*$", "", source)
    return re.sub(r"'backend_hash': '\w+'", "'backend_hash': ''", source)


def generate(modes: list[str]) -> dict[str, dict[str, list[str]]]:
    """Generated code of each graph, by mode and program."""
    result: dict[str, dict[str, list[str]]] = {}
    for mode in modes:
        result[mode] = {}
        for name, program in PROGRAMS.items():
            with fake_cuda() as graphs:
                program(functools.partial(torch.compile, options=OPTIONS[mode]))
            result[mode][name] = [comparable(graph.source) for graph in graphs]
    return result


# Runs with either tree; a stock one has no fake_cuda.
CHILD = """
import gc, importlib.util, json, sys
import torch
import torch.testing._internal
output, support, test, *modes = sys.argv[1:]
torch.testing._internal.__path__.append(support)
spec = importlib.util.spec_from_file_location("test_pygraph_codegen", test)
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
gc.freeze()  # torch._dynamo.reset collects garbage
with open(output, "w") as f:
    json.dump({"torch": torch.__file__, "code": module.generate(modes)}, f)
"""


class Child:
    """generate() in a process that finds torch along ``python_path``."""

    def __init__(self, python_path: str, modes: list[str]) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.output = Path(self.directory.name, "code.json")
        support = str(Path(torch.testing._internal.__file__).parent)
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(self.output), support, __file__, *modes],
            env={**os.environ, "PYTHONPATH": python_path, "TORCHINDUCTOR_PYGRAPH": "0"},
            cwd=self.directory.name,
        )

    def result(self) -> dict[str, Any]:
        if self.process.wait():
            raise RuntimeError(f"generating code ended with status {self.process.returncode}")
        return json.loads(self.output.read_text())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.directory.cleanup()


def stock_python_path() -> str | None:
    """A PYTHONPATH with which Python finds the torch that this one was laid over, if there is one."""
    overlay = Path(torch.__file__).resolve().parents[1]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    python_path = os.pathsep.join(p for p in paths if p and Path(p).resolve() != overlay)
    found = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__file__)"],
        env={**os.environ, "PYTHONPATH": python_path},
        cwd=tempfile.gettempdir(),
        capture_output=True,
        text=True,
    )
    return None if found.returncode or os.path.samefile(found.stdout.strip(), torch.__file__) else python_path


def kernels(code: list[str]) -> list[str]:
    """Sources of all kernels that a graph's wrapper compiles."""
    return [kernel for source in code for kernel in re.findall(r"async_compile\.\w+\(.*?'''(.*?)'''", source, re.S)]


class GeneratedCodeTest(TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.stock = None
        if (python_path := stock_python_path()) is not None:
            cls.stock = Child(python_path, ["default", "cudagraphs"])
            cls.addClassCleanup(cls.stock.close)
        patched = Child(os.environ.get("PYTHONPATH", ""), list(OPTIONS))
        cls.addClassCleanup(patched.close)
        cls.patched = patched.result()["code"]

    def test_programs_exercise_what_they_are_named_after(self) -> None:
        code = {name: "\n".join(sources) for name, sources in self.patched["cudagraphs"].items()}
        FileCheck().check("extern_kernels.addmm").run(code["mlp_inference"])
        FileCheck().check("_forward'").check("_backward'").run(code["mlp_training"])
        FileCheck().check_dag("extern_kernels.convolution").check_dag("inductor_seeds").run(code["conv_training"])
        FileCheck().check("bfloat16").run(code["autocast_training"])
        self.assertRegex(code["dynamic_shapes"], r"numel = 128\*s\d+")
        FileCheck().check("def partition_0").check("def partition_1").run(code["partitioned"])
        FileCheck().check("torch.ops.test_pygraph_codegen.scale.default(").run(code["custom_op"])
        FileCheck().check("mutated_arg_names': ['").run(code["mutation"])
        self.assertEqual(len(self.patched["cudagraphs"]["graph_break"]), 2)
        for name, sources in self.patched["cudagraphs"].items():
            with self.subTest(name):
                self.assertTrue(kernels(sources))

    def test_off_is_stock(self) -> None:
        if self.stock is None:
            self.skipTest("PyGraph is installed in place of the stock torch")
        stock = self.stock.result()
        self.assertNotEqual(stock["torch"], torch.__file__)
        for mode, programs in stock["code"].items():
            for name, code in programs.items():
                with self.subTest(mode=mode, program=name):
                    self.assertEqual(self.patched[mode][name], code)

    def test_on_has_the_kernels_of_cudagraphs(self) -> None:
        for name, code in self.patched["cudagraphs"].items():
            with self.subTest(name):
                if name == "cpu_scalar":
                    # Stock packs CPU values with a kernel.
                    packing, kernel = kernels(code)
                    self.assertIn('extern "C"', packing)
                    kernel = kernel.replace("_mul_1", "_mul_0")
                    self.assertEqual(kernels(self.patched["pygraph"][name]), [kernel])
                else:
                    self.assertEqual(kernels(self.patched["pygraph"][name]), kernels(code))


class RunBackwardTest(TestCase):
    """The engine that the harness puts in place of the C++ one, against the C++ one."""

    def check(self, output: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> None:
        gradient = torch.randn_like(output)
        result = run_backward((output,), (gradient,), True, False, inputs, True, False)
        expected = torch.autograd.grad((output,), inputs, (gradient,), allow_unused=True)
        self.assertEqual(result, expected, atol=0, rtol=0)

    def test_sums_reductions_and_casts(self) -> None:
        x = torch.randn(3, 4, requires_grad=True)
        row = torch.randn(4, dtype=torch.float64, requires_grad=True)
        unused = torch.randn(3, requires_grad=True)
        y = x * row
        self.check((y + y.sin() + x.exp() * y).relu(), (x, row, unused))

    def test_not_a_leaf(self) -> None:
        x = torch.randn(3, 4, requires_grad=True)
        hidden = x.exp()
        self.check(hidden.sin() * hidden, (hidden,))
        self.check(hidden.sin() * hidden, (x, hidden))

    def test_several_outputs(self) -> None:
        x = torch.randn(3, 4, requires_grad=True)
        first, _, third = x.unbind()
        self.check(first * third, (x,))

    def test_python_function(self) -> None:
        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, by, y):
                ctx.by = by
                return x * by, y.exp()

            @staticmethod
            def backward(ctx, grad_x, grad_y):
                return grad_x * ctx.by, None, grad_y

        x, y = (torch.randn(3, requires_grad=True) for _ in range(2))
        first, second = Function.apply(x, 2.0, y)
        self.check(first + 1, (x, y))
        self.check(first * second, (x, y))

    def test_accumulates(self) -> None:
        x = torch.randn(3, requires_grad=True)
        for _ in range(2):
            run_backward((x.square().sum(),), (torch.ones(()),), False, False, (), True, True)
        self.assertEqual(x.grad, 4 * x.detach())

    def test_unused_input(self) -> None:
        x, y = (torch.randn(3, requires_grad=True) for _ in range(2))
        with self.assertRaisesRegex(RuntimeError, "not have been used"):
            run_backward((x.sum(),), (torch.ones(()),), False, False, (y,), False, False)


class FakeCudaTest(TestCase):
    def compile(self, program: Callable[[Compile], None], **kwargs: Any) -> list[Any]:
        with fake_cuda(**kwargs) as graphs:
            program(functools.partial(torch.compile, mode="reduce-overhead"))
        return graphs

    def test_training(self) -> None:
        self.assertExpectedInline(
            report(self.compile(Programs.mlp_training)),
            """\
graph 0, forward: 3 of 3 kernels captured in 1 of 1 partitions
  external: primals_3 = args[0], float32[8, 64], 2,048 bytes
  copied at each replay by stock CUDA graphs: 2,048 bytes
graph 1, backward: 5 of 5 kernels captured in 1 of 1 partitions
  external: tangents_1 = gradient of output 0, float32[8, 8], 256 bytes
  copied at each replay by stock CUDA graphs: 256 bytes
copied at each replay by stock CUDA graphs, all graphs: 2,304 bytes""",
        )

    def test_constant_in_backward(self) -> None:
        "It is a real tensor, which is copied when the backward is compiled."

        def program(compile: Compile) -> None:
            compile(lambda x: x.sin() * torch.tensor(3.0, dtype=torch.float64))(
                randn(8, 64, requires_grad=True)
            ).sum().backward()

        self.assertEqual([graph.is_backward for graph in self.compile(program)], [False, True])

    def test_partitions(self) -> None:
        graphs = self.compile(Programs.partitioned)
        self.assertExpectedInline(
            report(graphs),
            """\
graph 0, forward: 3 of 6 kernels captured in 2 of 3 partitions
  not captured: 3 kernels, cpu ops, DeviceCopy ops
  external: arg0_1 = x, float32[64, 64], 16,384 bytes
  on the CPU: arg1_1 = on_cpu
  copied at each replay by stock CUDA graphs: 16,640 bytes
copied at each replay by stock CUDA graphs, all graphs: 16,640 bytes""",
        )
        # x comes to the second partition from the first, at the address it has there.
        first, second = (p for p in graphs[0].partitions if p.captured)
        self.assertIn("arg0_1", first.copied)
        self.assertNotIn("arg0_1", second.copied)

    def test_mutated_input(self) -> None:
        self.assertExpectedInline(
            report(self.compile(Programs.mutation)),
            """\
graph 0, forward: 1 of 1 kernels captured in 1 of 1 partitions
  captured by PyGraph only: 1 kernels, writes to arg0_1
  external: arg0_1 = state, float32[8, 8], 256 bytes, written to
  external: arg1_1 = x, float32[8, 8], 256 bytes
  copied at each replay by stock CUDA graphs: 0 bytes
copied at each replay by stock CUDA graphs, all graphs: 0 bytes""",
        )

    def test_cudagraphs_off(self) -> None:
        with fake_cuda() as graphs:
            torch.compile(lambda x: x + 1)(randn(8))
        self.assertExpectedInline(
            report(graphs),
            """\
graph 0, forward: 0 of 1 kernels captured in 0 of 1 partitions
  not captured: 1 kernels, partition includes all ops when cudagraphs is disabled
  external: arg0_1 = x, float32[8], 32 bytes
  copied at each replay by stock CUDA graphs: 0 bytes
copied at each replay by stock CUDA graphs, all graphs: 0 bytes""",
        )

    def test_whole_graph_skipped(self) -> None:
        with config.patch(graph_partition=False):
            graphs = self.compile(Programs.partitioned)
        self.assertExpectedInline(
            report(graphs),
            """\
graph 0, forward: 0 of 6 kernels captured in 0 of 1 partitions
  not captured: skipping cudagraphs due to cpu device (arg1_1). Found from :
  external: arg0_1 = x, float32[64, 64], 16,384 bytes
  on the CPU: arg1_1 = on_cpu
  copied at each replay by stock CUDA graphs: 0 bytes
copied at each replay by stock CUDA graphs, all graphs: 0 bytes""",
        )

    def test_dynamic_shapes(self) -> None:
        graphs = self.compile(Programs.dynamic_shapes)
        self.assertEqual([g.is_backward for g in graphs], [False, True] * 2)
        static, dynamic = graphs[0].external_inputs[0], graphs[2].external_inputs[0]
        self.assertEqual((static.shape, static.nbytes), (("4", "64"), 4 * 64 * 4))
        self.assertRegex(dynamic.shape[0], "s")
        self.assertEqual(dynamic.nbytes, 8 * 64 * 4)

    def test_expanded_input(self) -> None:
        with fake_cuda() as graphs:
            torch.compile(lambda x: x + 1, mode="reduce-overhead")(randn(8, 1).expand(8, 1024))
        self.assertEqual(graphs[0].external_inputs[0].nbytes, 8 * 4)

    def test_graph_break_and_recompile(self) -> None:
        graphs = self.compile(Programs.graph_break)
        self.assertEqual([[i.origin for i in g.external_inputs] for g in graphs], [["x"], ["x"]])

    def test_saved_input_is_static_in_backward_of_stock(self) -> None:
        # With PyGraph it may be external, but stock does not copy it a second time.
        for mode in OPTIONS["cudagraphs"], OPTIONS["pygraph"]:
            with fake_cuda() as graphs:
                torch.compile(mlp(), options=mode)(randn(8, 64)).sum().backward()
            self.assertEqual([g.copied_bytes for g in graphs], [8 * 64 * 4, 8 * 8 * 4])

    def test_kernels_for_sm_90(self) -> None:
        (graph,) = self.compile(Programs.custom_op, compile_kernels=True)
        self.assertEqual(len(graph.kernels), 2)
        for ptx in graph.kernels.values():
            FileCheck().check(".target sm_90").check(".visible .entry").run(ptx)

    def test_leaves_nothing_behind(self) -> None:
        def state() -> list[Any]:
            functions = ("is_available", "current_device", "get_device_properties", "_lazy_init")
            return [
                [getattr(torch.cuda, name) for name in functions],
                config.get_config_copy(),
                torch.autograd._engine_run_backward,
                torch._inductor.compile_fx._compile_fx_inner,
                torch.utils._triton.has_triton(),
                torch.utils._python_dispatch._get_current_dispatch_mode(),
                os.environ.get("TORCHINDUCTOR_CACHE_DIR"),
            ]

        before = state()
        with fake_cuda():
            self.assertTrue(torch.cuda.is_available())
            self.assertTrue(torch.utils._triton.has_triton())
        with self.assertRaisesRegex(RuntimeError, "inside"), fake_cuda():
            raise RuntimeError("inside")
        self.assertEqual(state(), before)
        # On the CPU, with the C++ engine.
        with fresh_cache():
            model = nn.Linear(4, 4)
            x = torch.randn(2, 4)
            self.assertEqual(torch.compile(model, backend="aot_eager")(x), model(x))
            torch.compile(model, backend="aot_eager")(x).sum().backward()
            self.assertEqual(model.weight.grad, x.sum(0).expand(4, 4))


if __name__ == "__main__":
    run_tests()
