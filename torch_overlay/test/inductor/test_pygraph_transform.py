# Owner(s): ["module: inductor"]
"""
CPU values that GPU code reads: with PyGraph, no captured kernel reads one. Code is generated for an
H200, on a machine that need not have a GPU.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import re
import tempfile
from pathlib import Path
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
import torch._dynamo
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.pygraph import report, reset_report
from torch._inductor.pygraph.compile import analysis, placement
from torch._inductor.pygraph.compile.analysis import FUSED_OPTIMIZER_STEPS
from torch._inductor.pygraph.report.trace import load
from torch._inductor.pygraph.values import deliver
from torch._inductor.test_case import run_tests, TestCase
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
)
from torch.nn.attention.flex_attention import flex_attention
from torch.testing import FileCheck
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.fake_cuda import fake_cuda
from torch.testing._internal.pygraph_values import (
    compile_for_h200,
    cpu,
    cuda,
    Program,
    PROGRAMS,
)
from torch.utils import _pytree as pytree


if TYPE_CHECKING:
    from collections.abc import Callable


MANY = analysis.MAX_KNOWN_BYTES // 4 + 1

# What a CPU value that reaches the GPU may not be, to be computed at compile time.
NOT_KNOWN = {
    "random": lambda x: (x[(i := torch.ones(8).multinomial(8))], i),
    "uninitialized": lambda x: x + torch.ones(8).new_empty_strided((8,), (1,)).sin().to("cuda"),
    "of_the_gpu": lambda x: x + (torch.ones(8, device="cuda").cpu() * 2).to("cuda"),
    "large": lambda x: x + torch.arange(float(MANY)).sin().to("cuda").sum(),
    "of_large_values": lambda x: x + torch.full((MANY,), 0.5).sin().sum(),
}


class Placed:
    """While active, keeps each graph that CPU values are placed in, before and after."""

    def __init__(self) -> None:
        self.graphs: list[tuple[torch.fx.GraphModule, torch.fx.GraphModule]] = []
        self.patch = mock.patch.object(
            placement,
            "place_cpu_values",
            functools.partial(self.place, placement.place_cpu_values),
        )

    def place(self, original: Callable[..., None], graph: torch.fx.Graph) -> None:
        def module() -> torch.fx.GraphModule:
            return torch.fx.GraphModule(graph.owning_module, copy.deepcopy(graph))

        before = module()
        original(graph)
        self.graphs.append((before, module()))


class OnTheCpu(torch.fx.Interpreter):
    def call_function(self, target, args, kwargs):
        # From one device to another it would be a copy.
        if target is torch.ops.prims.device_put.default:
            return args[0].clone()
        return super().call_function(target, args, kwargs)


def run_on_the_cpu(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    "Runs a graph with every GPU tensor on the CPU."

    def moved(a: Any) -> Any:
        return torch.device("cpu") if isinstance(a, torch.device) else a

    gm = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
    for node in gm.graph.nodes:
        node.args, node.kwargs = pytree.tree_map(moved, (node.args, node.kwargs))
    return OnTheCpu(gm).run(*inputs)


def like_placeholders(gm: torch.fx.GraphModule) -> list[Any]:
    vals = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]

    def like(v: torch.Tensor) -> torch.Tensor:
        size, stride = (tuple(map(int, n)) for n in (v.shape, v.stride()))
        given = [n if step else 1 for n, step in zip(size, stride)]
        t = torch.empty_strided(given, stride, dtype=v.dtype)
        return t.copy_(cpu(*given, dtype=v.dtype)).expand(size)

    return [like(v) if isinstance(v, torch.Tensor) else int(v) for v in vals]


class GeneratedCodeTest(TestCase):
    def setUp(self):
        super().setUp()
        counters.clear()

    def expected_outputs(self, program):
        with fake_cuda(), torch.no_grad():
            inputs = program.inputs()
            outputs = program.fn(*inputs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            # AOTAutograd returns inputs itself.
            return [
                (o.dtype, o.device.type)
                for o in outputs
                if not any(o is i for i in inputs)
            ]

    @parametrize("name", list(PROGRAMS))
    def test_program(self, name):
        program = PROGRAMS[name]
        placed = Placed()
        with placed.patch:
            (graph,) = compile_for_h200(program)
        self.assertIsNone(graph.skip_reason)
        captured = [p for p in graph.partitions if p.captured]
        self.assertEqual(len(captured), program.partitions)
        self.assertEqual([p.cpu_inputs for p in captured], [()] * len(captured))
        self.assertNotIn(".item()", graph.source)
        # Partitions come before the class that calls them; the operators need the host.
        self.assertNotIn(
            " = torch.ops.test_pygraph", graph.source.partition("class Runner")[0]
        )
        owner = r"((?:deliver|stage|upload)_buf\d+)"
        made = re.findall(rf"^{owner} = ", graph.source, re.MULTILINE)
        self.assertEqual({*re.findall(rf"\b{owner}\.", graph.source)}, {*made})
        for expected in self.expected_outputs(program):
            self.assertIn(expected, graph.outputs)
        self.assertEqual(
            counters["pygraph"]["delivered_values"], program.delivered, graph.source
        )
        staged = ("staged_tensors", "uploaded_tensors")
        self.assertEqual(sum(counters["pygraph"][k] for k in staged), program.staged)
        self.assertEqual(counters["pygraph"]["known_tensors"], program.known)
        # What was computed is nobody else's, and is on the GPU as it was on the CPU.
        self.assertNotRegex(graph.source, r"return .*_known|_known.*# (alias|reuse)")
        constant = r"^(\w+_known)(?:_cuda0)? = None  # device\(.*?\) (.*) \w+$"
        layouts = {*re.findall(constant, graph.source, re.MULTILINE)}
        self.assertEqual(len(layouts), len({name for name, _ in layouts}))
        if "custom_op" in name:
            return
        ((before, after),) = placed.graphs
        for _ in range(2):
            inputs = like_placeholders(before)
            copies = copy.deepcopy(inputs)
            self.assertEqual(
                run_on_the_cpu(after, copies), run_on_the_cpu(before, inputs)
            )
            self.assertEqual(copies, inputs)

    def test_elements_of_a_result_stay_with_it(self):
        "A graph is given tensors, and no lists, in whatever order nodes are."
        for program in "values_around_a_copy", "custom_op_with_two_results":
            (graph,) = compile_for_h200(
                PROGRAMS[program],
                **{"triton.reorder_for_reducing_graph_partitions": False},
            )
            lists = re.findall(r"(buf\d+) = (?:deliver_\w+\.launch|torch\.ops\.)", graph.source)
            self.assertTrue(lists)
            for args in re.findall(r"partition\d+_args = \[(.*)\]", graph.source):
                self.assertTrue({*lists}.isdisjoint(re.findall(r"\w+", args)), args)

    def test_integer_that_is_read_is_an_input_alone(self):
        "And not what item() gives besides, which is None."
        with (
            torch._dynamo.config.patch(capture_scalar_outputs=True),
            fake_cuda() as graphs,
            torch.no_grad(),
        ):
            # It was compiled, and fake tensors have no values.
            with self.assertRaises(DataDependentOutputException):
                torch.compile(lambda x, n: x * n.item() + 1, options={"pygraph": True})(
                    cuda(8), cpu(dtype=torch.int64)
                )
        (graph,) = graphs
        FileCheck().check("u0 = ").check("partition0_args = [arg1_1, u0]").run(
            graph.source.partition("class Runner")[2]
        )
        captured = [p for p in graph.partitions if p.captured]
        self.assertEqual([p.cpu_inputs for p in captured], [()])

    @parametrize("by_index", (True, False))
    def test_what_is_written_later_is_delivered_before(self, by_index):
        "One launch brings what the program has and what it computes from that."

        def fn(x, v):
            y = x + v.to("cuda")
            if by_index:
                v[0] = 0
            else:
                v[0].zero_()
            return y, x * v.to("cuda")

        (graph,) = compile_for_h200(Program(fn, lambda: (cuda(4, 4), cpu(4, 4))))
        _, _, runner = graph.source.partition("class Runner")
        delivery = re.search(r"deliver_\w+\.pack\(\[.*\]\)", runner)
        self.assertIsNotNone(delivery)
        written = r"(?m)cpp_\w+\(.*\barg0_1\)$"
        before, after = runner[: delivery.start()], runner[delivery.end() :]
        self.assertNotRegex(before, written)
        self.assertRegex(after, written)

    def test_one_launch_for_each_time(self):
        program = PROGRAMS["long_chain"]
        (graph,) = compile_for_h200(program)
        self.assertEqual(graph.source.count(" = Deliver("), 2)
        (graph,) = compile_for_h200(PROGRAMS["dtypes"])
        FileCheck().check_count(" = Deliver(", 1, exactly=True).run(graph.source)
        FileCheck().check("Deliver(0, (torch.float64, ()), (torch.int64, ()))").run(
            graph.source
        )

    def test_launches_hold_what_a_kernel_takes(self):
        def fn(x, scalars):
            for s in scalars:
                x = x + s
            return x

        program = Program(fn, lambda: (cuda(8), [cpu() for _ in range(5)]))
        room_for_three = 3 * deliver.PIECE_BYTES
        with mock.patch.object(placement, "MAX_DELIVERED_BYTES", room_for_three):
            (graph,) = compile_for_h200(program)
        self.assertEqual(graph.source.count(" = Deliver("), 2)
        self.assertEqual(counters["pygraph"]["delivered_values"], 5)
        self.assertEqual(len([p for p in graph.partitions if p.captured]), 1)

    def test_large_tensors_are_uploaded(self):
        numel = placement.MAX_STAGED_BYTES // 4

        def source(numel):
            program = Program(
                lambda x, v: x + v.to("cuda"), lambda: (cuda(numel), cpu(numel))
            )
            return compile_for_h200(program)[0].source

        FileCheck().check("= Stage(0)").run(source(numel))
        FileCheck().check("= Upload(0)").run(source(numel + 1))

    def test_copies_of_pinned_memory(self):
        "They are in the order of the stream, and wait only where the program's do."

        def there_and_back(**options):
            def fn(x):
                h = (x + 1).to("cpu", non_blocking=True)
                return h.to("cuda", **options) * 2

            return fn

        def both(x, v):
            return v.to("cuda", non_blocking=True) * v.to("cuda")

        def view(x, v):
            return v.view(2, -1).to("cuda", non_blocking=True) + 1

        def computed(x, v):
            return (v.to(torch.int32) + 1).to("cuda", non_blocking=True) + 1

        def filled(x, v):
            return x.copy_(v, non_blocking=True) + 1

        def filled_by_another_type(x, v):
            return x.double().copy_(v, non_blocking=True) + 1

        small, staged, uploaded = 8, 1024, placement.MAX_STAGED_BYTES // 4 + 1
        non_blocking = there_and_back(non_blocking=True)
        for fn, numel, owner in (
            (non_blocking, small, "Stage(0, True)"),
            (non_blocking, staged, "Stage(0, True)"),
            (non_blocking, uploaded, "Upload(0, True)"),
            (there_and_back(), small, "Deliver(0, (torch.float32, (8,)))"),
            (there_and_back(), staged, "Stage(0)"),
            (there_and_back(), uploaded, "Upload(0)"),
            (both, small, "Deliver(0, (torch.float32, (8,)))"),
            (both, staged, "Stage(0)"),
            (view, small, "Stage(0, True)"),
            (view, staged, "Stage(0, True)"),
            (computed, small, "Deliver(0, (torch.int32, (8,)))"),
            (filled, small, "Stage(0, True)"),
            (filled_by_another_type, small, "Deliver(0, (torch.float32, (8,)))"),
        ):
            takes_cpu = fn.__code__.co_argcount == 2
            program = Program(
                fn, lambda: (cuda(numel), cpu(numel)) if takes_cpu else (cuda(numel),)
            )
            torch._dynamo.reset()
            (graph,) = compile_for_h200(program)
            made = re.findall(
                r"^\w+ = ((?:Deliver|Stage|Upload)\(.*\))$", graph.source, re.MULTILINE
            )
            self.assertEqual(made, [owner], f"{fn.__name__} of {numel}")
            self.assertEqual([p.cpu_inputs for p in graph.partitions if p.captured][-1], ())

    def test_permuted_values_are_copied_as_they_lie(self):
        "To make them contiguous the host would read pinned memory at once."
        for rows in 4, 400:
            program = Program(
                lambda x, v: x + v.to("cuda"), lambda: (cuda(2, rows), cpu(rows, 2).t())
            )
            (graph,) = compile_for_h200(program)
            FileCheck().check(f"reinterpret_tensor(arg0_1, ({rows}, 2), (2, 1)").run(
                graph.source
            )
            self.assertNotIn("cpp_fused", graph.source)

    def test_what_is_delivered_again_is_not_written_by_others(self):
        "Neither reused for other results, nor handed out."
        program = Program(
            lambda x, v, s: (
                v.to("cuda").sin(),
                s.to("cuda"),
                v.to("cuda").index_put((x.argmax(),), s),
            ),
            lambda: (cuda(1024), cpu(1024), cpu()),
        )
        (graph,) = compile_for_h200(program)
        kept = re.findall(r"(buf\d+) = (?:deliver|stage)_buf", graph.source)
        self.assertEqual(len(kept), 2)
        # Their elements; see codegen_multi_output.
        kept += re.findall(rf"(buf\d+) = (?:{'|'.join(kept)})\b", graph.source)
        self.assertEqual(len(kept), 4)
        self.assertNotRegex(graph.source, rf"return .*\b({'|'.join(kept)})\b")
        self.assertNotRegex(graph.source, rf"= ({'|'.join(kept)})\b.*# reuse")
        self.assertNotRegex(graph.source, "'in_out_ptr0'")

    @parametrize("what", list(NOT_KNOWN))
    def test_not_known(self, what):
        compile_for_h200(Program(NOT_KNOWN[what], lambda: (cuda(8),)))
        self.assertEqual(counters["pygraph"]["known_tensors"], 0)
        placed = ("delivered_values", "uploaded_tensors")
        self.assertEqual(sum(counters["pygraph"][k] for k in placed), 1)

    def test_no_call_computes_what_is_known(self):
        (graph,) = compile_for_h200(PROGRAMS["known"])
        self.assertNotIn("cpp_fused", graph.source)

    def test_what_eager_mode_fails_to_compute_is_staged(self):
        program = PROGRAMS["known"]
        with mock.patch.object(placement.Placement, "compute", side_effect=RuntimeError):
            (graph,) = compile_for_h200(program)
        self.assertEqual(len([p for p in graph.partitions if p.captured]), 1)
        FileCheck().check("= Stage(0)").run(graph.source)

    @parametrize("training", (False, True))
    def test_score_of_flex_attention(self, training):
        "It becomes a part of a kernel, where nothing can be brought to the GPU."

        def fn(q, s):
            return flex_attention(q * s, q, q, score_mod=lambda score, *_: score * s)

        with fake_cuda() as graphs, torch.set_grad_enabled(training):
            compiled = torch.compile(fn, options={"pygraph": True})
            q = cuda(1, 2, 128, 64).requires_grad_(training)
            out = compiled(q, cpu())
            if training:
                out.sum().backward()
        self.assertEqual(len(graphs), 1 + training)
        self.assertIn(" = Deliver(", graphs[0].source)

    def test_many_integer_operations_in_a_row(self):
        "More than Python's stack has room for."

        def fn(x, i):
            for _ in range(200):
                i = i * 5 + 1
            return x[i & 7]

        (graph,) = compile_for_h200(
            Program(fn, lambda: (cuda(8), cpu(4, dtype=torch.int64)))
        )
        self.assertEqual(len([p for p in graph.partitions if p.captured]), 1)
        self.assertNotIn("cpp_fused", graph.source)

    REGIONS = {
        "draws_on_the_cpu": lambda x: x * (torch.rand(8) < 0.9).to("cuda"),
        "larger": lambda x: x * torch.rand(8, 1024).to("cuda")[:, 0],
        "table": lambda x: x * torch.arange(0, 512, 64).float().sin().to("cuda"),
        "on_the_gpu": lambda x: x * torch.arange(8).to("cuda") + x.sin(),
    }

    @parametrize("name", list(REGIONS))
    def test_nested_region(self, name):
        "It is captured as a whole, if what it does is done by a replay."
        region = torch.compiler.nested_compile_region(self.REGIONS[name])
        program = Program(lambda x: region(region(x).relu()), lambda: (cuda(8),))
        (graph,) = compile_for_h200(program)
        # Partitions come before the class that calls them, and the rest.
        _, _, runner = graph.source.partition("class Runner")
        self.assertEqual("repeated_subgraph0(" in runner, name != "on_the_gpu")
        # Inductor sets none of a subgraph.
        self.assertEqual(counters["pygraph"]["known_tensors"], 0)

    def test_without_trees(self):
        "A graph of torch._inductor.compile_fx.cudagraphify_impl would keep the first value."
        program = Program(lambda x, s: x * s, lambda: (cuda(8), cpu()))
        (graph,) = compile_for_h200(program, **{"triton.cudagraph_trees": False})
        self.assertNotIn("Deliver", graph.source)

    def test_floating_point_stays_on_the_cpu(self):
        "Where code for the GPU may contract a multiplication and an addition."
        for dtype, on_cpu in (torch.float32, True), (torch.int64, False):
            program = Program(
                lambda x, s: x * (s * 2 + 1), lambda: (cuda(8), cpu(dtype=dtype))
            )
            (graph,) = compile_for_h200(program)
            self.assertEqual("cpp_fused_add_mul" in graph.source, on_cpu)

    def test_value_with_the_negative_bit(self):
        "Its bytes are of what it is the negative of."
        program = Program(
            lambda x, s: x * s,
            lambda: (cuda(8), torch.tensor(1 + 2j).conj().imag),
        )
        (graph,) = compile_for_h200(program)
        FileCheck().check(".run(arg0_1, arg1_1.item(), ").run(graph.source)

    def test_learning_rate_of_a_fused_optimizer(self):
        "Kernels read one on the GPU as float32; another one is left to the host, as in eager mode."
        dtypes = torch.float32, torch.float64, torch.bfloat16
        with fake_cuda():
            x, rates = cuda(8), [cpu(dtype=dtype) for dtype in dtypes]
        for op, value in itertools.product(FUSED_OPTIMIZER_STEPS, rates):
            graph = torch.fx.Graph()
            lists = [[graph.placeholder(f"x{i}")] for i in range(6)]
            rate = graph.placeholder("rate")
            step = graph.call_function(op, tuple(lists), {"lr": rate})
            for (node,) in lists:
                node.meta["val"] = x
            rate.meta["val"], step.meta["val"] = value, [x]
            read_on_gpu = [c.value for c in analysis.crossings(graph)]
            self.assertEqual(read_on_gpu, [rate] if value.dtype == torch.float32 else [])

    @parametrize("index", ("mask", "second", "accumulate", "two"))
    def test_scalar_that_fills_by_a_mask(self, index):
        "index_put_ waits for the device if the scalar is on the GPU."

        def fn(x, m, s):
            y = x.sin()
            indices = {"mask": [m], "two": [m, m]}.get(index, [None, m])
            put = torch.ops.aten.index_put_
            return put(y, indices, s, index == "accumulate") + 1

        (graph,) = compile_for_h200(
            Program(fn, lambda: (cuda(8, 8), cpu(8, dtype=torch.bool), cpu()))
        )
        values = re.findall(r"aten\.index_put_\(\w+, \[.*\], (\w+), ", graph.source)
        self.assertEqual(values == ["arg1_1"], index == "second", graph.source)
        self.assertEqual(values == [], index == "mask")
        # The mask is on the GPU in any case.
        delivered = counters["pygraph"]["delivered_values"]
        self.assertEqual(delivered, 1 if index == "second" else 2)

    def test_float8_is_converted_on_the_cpu(self):
        "GPU code for some of its types there is on some GPUs only."
        for dtype in torch.float8_e4m3fn, torch.float8_e5m2fnuz:
            program = Program(
                lambda x, v: x * v.float().to("cuda"),
                lambda: (cuda(8), torch.zeros(8, dtype=dtype)),
            )
            (graph,) = compile_for_h200(program)
            self.assertIn("Deliver(0, (torch.float32, (8,)))", graph.source)

    def test_floats_do_not_recompile(self):
        for options in {}, {"pygraph_force": "node_update"}:
            with (
                # As TORCHINDUCTOR_PYGRAPH=1 with stock's setting left on.
                config.patch({"pygraph": True, "triton.cudagraphs": True}),
                fake_cuda() as graphs,
                torch.no_grad(),
            ):
                compiled = torch.compile(lambda x, by: x * by + 1, options=options)
                for by in (0.5, 1.5, 2.5, 3.5, 4.5):
                    compiled(cuda(8), by)
            self.assertEqual(len(graphs), 2)
            self.assertIn("Deliver(0, (torch.float64, ()))", graphs[1].source)

    def test_backward(self):
        def fn(x, v, s):
            return (x * v.to("cuda") * s).sin()

        with fake_cuda() as graphs:
            x = cuda(32, 32).requires_grad_()
            compiled = torch.compile(fn, options={"pygraph": True})
            compiled(x, cpu(32, 32), cpu().requires_grad_()).sum().backward()
        self.assertEqual([g.is_backward for g in graphs], [False, True])
        for graph in graphs:
            captured = [p for p in graph.partitions if p.captured]
            self.assertEqual([p.cpu_inputs for p in captured], [()])
            self.assertNotIn(".item()", graph.source)

    def test_item(self):
        "A value that the host has to have is not captured as that of one call."
        for fn, dtype, captured in (
            (lambda x, s: x * s.item(), torch.float32, True),
            (lambda x, s: torch.full_like(x, s.item()), torch.float32, False),
            # There is a recording for each integer.
            (lambda x, s: torch.full_like(x, s.item()), torch.int64, True),
        ):
            with (
                torch._dynamo.config.patch(capture_scalar_outputs=True),
                fake_cuda() as graphs,
            ):
                try:
                    compiled = torch.compile(fn, options={"pygraph": True})
                    compiled(cuda(8), cpu(dtype=dtype))
                except DataDependentOutputException:
                    pass  # it was compiled, and fake tensors have no values
            self.assertEqual(any(p.captured for p in graphs[0].partitions), captured)

    def test_item_as_an_operand(self):
        "Delivered as a float that varies is. Nothing waits, nothing is compiled for a value."
        for dtype in torch.float32, torch.float64, torch.bfloat16:
            torch._dynamo.reset()
            with fake_cuda() as graphs, torch.no_grad():
                compiled = torch.compile(
                    lambda x, s: x.sin() * s.item() + s.item(),
                    options={"pygraph": True},
                )
                for value in 0.5, 1.0, 0.0, -2.5:
                    s = torch.empty((), dtype=dtype)
                    s.item_memo = value
                    compiled(cuda(8), s)
            (graph,) = graphs
            self.assertEqual([p.cpu_inputs for p in graph.partitions if p.captured], [()])
            self.assertIn("Deliver(0, (torch.float64, ()))", graph.source)
            self.assertNotIn(".item()", graph.source)
            self.assertEqual(counters["graph_break"], {})

    def test_item_in_training(self):
        with fake_cuda() as graphs:
            x, s = cuda(32, 32).requires_grad_(), torch.empty(())
            s.item_memo = 0.5
            fn = torch.compile(lambda x, s: (x * s.item()).sin(), options={"pygraph": True})
            fn(x, s).sum().backward()
        self.assertEqual([g.is_backward for g in graphs], [False, True])
        for graph in graphs:
            captured = [p for p in graph.partitions if p.captured]
            self.assertEqual([p.cpu_inputs for p in captured], [()])
            self.assertNotIn(".item()", graph.source)

    def test_log_names_the_line(self):
        def fn(x, s):
            a = x.sin().sum(0).cpu()
            b = a + s
            return x * b.to("cuda")

        first = fn.__code__.co_firstlineno
        with self.assertLogs("torch._inductor.pygraph.report", logging.INFO) as logs:
            compile_for_h200(Program(fn, lambda: (cuda(8, 8), cpu())))
        message = "\n".join(logs.output)
        FileCheck().check(
            f"{__file__}:{first + 1} inference 0/0: prims.device_put.default is not captured "
            "(COPIES_TO_CPU) copies a result of the GPU to the CPU. The host waits"
        ).check(f"{__file__}:{first + 2} inference 0/0: ").check("(CPU_OP) runs on the CPU. It runs in each call").run(
            message
        )
        # That a CPU value is brought to the GPU is no line's doing.
        self.assertNotIn("BRINGS_CPU_VALUES", message)

    def test_report_names_the_values(self):
        big = placement.MAX_STAGED_BYTES // 4 + 1

        def fn(x, s, t, table, v):
            x = x * s + t.sum()
            x = x + torch.arange(8)[2]
            x = x[:, None] + table.to("cuda")
            x = x + torch.arange(128.0).sin().to("cuda")
            return x.sum() + v.to("cuda")

        reset_report()
        self.addCleanup(reset_report)
        inputs = lambda: (cuda(8), cpu(), cpu(8), cpu(8, 128), cpu(big))  # noqa: E731
        compile_for_h200(Program(fn, inputs))
        (graph,) = report().graphs
        first = fn.__code__.co_firstlineno
        found = {(v.how, v.type, v.source) for v in graph.cpu_values}
        at = [f"{__file__}:{first + i} in fn" for i in range(6)]
        expected = {
            ("delivered", "float32[]", at[1]),
            ("made on the GPU", "int64[8]", at[2]),
            ("staged", "float32[8, 128]", at[3]),
            ("computed at compile time", "float32[128]", at[4]),
            ("uploaded", f"float32[{big}]", at[5]),
        }
        self.assertEqual(found, expected)
        # Two scalars, which are told apart.
        self.assertEqual(len(graph.cpu_values), 6)

        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory, "report.json")
            file.write_text(report().json())
            (loaded,) = load(file)
        self.assertEqual(loaded.graphs, report().graphs)
        place = f"test_pygraph_transform.py:{first + 1} in fn"
        FileCheck().check("CPU values that GPU code reads").check(
            f"delivered: float32[] x 2, inductor/{place}"
        ).run(loaded.text())
        self.assertIn(f"delivered: float32[] x 2, inductor/{place}", loaded.html())
        self.assertNotIn("BRINGS_CPU_VALUES", loaded.text())

    def test_log_names_a_value_that_is_no_constant(self):
        fn = lambda x: x * torch.arange(128.0).sin().to("cuda")  # noqa: E731
        fails = mock.patch.object(placement.Placement, "compute", side_effect=RuntimeError("no kernel"))
        with fails, self.assertLogs(placement.log, logging.INFO) as logs:
            compile_for_h200(Program(fn, lambda: (cuda(128),)))
        self.assertIn(f"{__file__}:{fn.__code__.co_firstlineno} ", logs.output[0])
        self.assertIn(": computed in each call (NOT_CONSTANT) eager mode", logs.output[0])

    def test_log_names_why_a_graph_is_skipped(self):
        program = Program(lambda x, s: x * s, lambda: (cuda(8), cpu()))
        with (
            config.patch(graph_partition=False),
            self.assertLogs("torch._inductor.pygraph.report", logging.INFO) as logs,
        ):
            compile_for_h200(program)
        FileCheck().check("is not captured (CPU_DEVICE)").run(logs.output[0])

    def test_two_devices(self):
        "Not captured, and what is generated is right: each part enters its own device."

        def fn(x, y):
            return x.sin() + 1, y.cos(), x + y.to(x.device)

        with fake_cuda() as graphs, torch.no_grad():
            x, y = (torch.empty(64, device=f"cuda:{i}") for i in range(2))
            torch.compile(fn, options={"pygraph": True})(x, y)
        (graph,) = graphs
        self.assertIn("multiple devices", graph.skip_reason)
        FileCheck().check("def partition_0").check("_DeviceGuard(0)").check(
            "_DeviceGuard(1)"
        ).check("class Runner").check("_DeviceGuard(0)").run(graph.source)

    def test_off(self):
        with fake_cuda() as graphs, torch.no_grad():
            torch.compile(lambda x, s: x * s, mode="reduce-overhead")(cuda(8), cpu())
        self.assertNotIn("pygraph", graphs[0].source)


instantiate_parametrized_tests(GeneratedCodeTest)


if __name__ == "__main__":
    run_tests()
