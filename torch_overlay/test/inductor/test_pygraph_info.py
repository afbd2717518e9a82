# Owner(s): ["module: inductor"]
"""
What code generation tells of the functions that may be captured, against the code that it
generates, on a machine that need not have a GPU.
"""

from __future__ import annotations

import ast
import functools
import os
import pickle
import sys
import types
import warnings
from typing import Any, TYPE_CHECKING
from unittest import mock

import hypothesis

import torch
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import (
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    SubclassGetAttrAOTInput,
    TangentAOTInput,
)
from torch._inductor import config as inductor_config, ir
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen.wrapper import (
    CommentLine,
    EnterDeviceContextManagerLine,
    ExitDeviceContextManagerLine,
    ExternKernelAllocLine,
    MultiOutputLine,
    PartitionCallLine,
    UnbackedSymbolDefsLine,
)
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.pygraph.compile import describe
from torch._inductor.pygraph.compile.lowering import HostCopy, PackLine
from torch._inductor.pygraph.types.calls import NOTE
from torch._inductor.pygraph.types.partition import DirectCall, GraphInfo, PartitionInfo
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import fresh_cache
from torch._inductor.virtualized import V
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.fake_cuda import CompiledGraph, fake_cuda
from torch.testing._internal.pygraph_observed import observe
from torch.testing._internal.pygraph_program import Program
from torch.testing._internal.pygraph_programs import programs


# Make the helper files in test/ importable
pytorch_test_dir = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.append(pytorch_test_dir)
from inductor.test_pygraph_codegen import OPTIONS, PROGRAMS


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class Code:
    """One generated function, by inspection of its source."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self.function = function
        self.name = function.name
        self.parameters = [argument.arg for argument in function.args.args if argument.arg not in (NOTE, "branches")]
        statements = list(_statements(function.body))
        self.inputs: list[str] = []
        # What owns the memory that a name's tensor lies in, as far as generated code says.
        self.owners: dict[str, str] = {}
        self.kernels: list[str] = []
        self.delivers: list[str] = []
        for statement in statements:
            self._read(statement)

    def _read(self, statement: ast.stmt) -> None:
        value = getattr(statement, "value", None)
        target = None
        if isinstance(statement, ast.Assign):
            if isinstance(value, ast.Name) and value.id == "args":
                self.inputs = _names(statement.targets[0])
                return
            (name,) = statement.targets
            target = name.id if isinstance(name, ast.Name) else None
        # Another one is a size.
        is_buffer = target is not None and target.startswith("buf")
        if isinstance(value, ast.Name) and is_buffer:
            self.owners[target] = self.owner(value.id)
        if not isinstance(value, ast.Call):
            return
        callee = ast.unparse(value.func)
        if callee == "reinterpret_tensor" and is_buffer:
            self.owners[target] = self.owner(_names(value.args[0])[0])
        elif callee.endswith(".launch"):
            self.delivers.append(callee.removesuffix(".launch"))
        elif callee.endswith(".run"):
            self.kernels.append(callee.removesuffix(".run"))

    def owner(self, name: str) -> str:
        return self.owners.get(name, name)

    @property
    def reused_inputs(self) -> set[str]:
        return {*self.owners.values()} & {*self.inputs}

    @property
    def has_collectives(self) -> bool:
        attributes = {n.attr for n in ast.walk(self.function) if isinstance(n, ast.Attribute)}
        return bool(attributes & {"_c10d_functional", "symm_mem"})


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield what code runs without a recording, which notes its calls."""
    for statement in body:
        condition = ast.unparse(statement.test) if isinstance(statement, ast.If) else ""
        if isinstance(statement, ast.With) or condition.startswith(f"{NOTE} is None or "):
            yield from _statements(statement.body)
        elif condition != f"{NOTE} is not None":
            yield statement


def _names(node: ast.AST) -> list[str]:
    return [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]


def direct_call(call: ast.FunctionDef) -> DirectCall | None:
    """
    DirectCall of Runner.call, by inspection of its source: all of its statements have to be of
    the kinds that are listed here.
    """
    body = [s for s in call.body if not isinstance(s, ast.Delete)]
    if len(body) < 5:
        return None
    unpack, clear, *values, prepare, run, give = body
    args = [n for n in _names(unpack) if n != "args"]
    inputs = [n for n in _names(prepare) if n != "partition0_args"]
    produced = [n for n in _names(run) if n not in ("self", "partition0_args")]
    returned = _names(give)
    expected = f"""
def call(self, args):
    {_tuple(args)} = args
    args.clear()
    partition0_args = [{", ".join(inputs)}]
    {_tuple(produced)} = self.partitions[0](partition0_args)
    return {_tuple(returned)}
"""
    plain = ast.parse(expected).body[0].body
    if [*map(ast.unparse, plain)] != [*map(ast.unparse, (unpack, clear, prepare, run, give))]:
        return None
    places = {name: i for i, name in enumerate(args)}
    packs: list[tuple[str, tuple[int, ...]]] = []
    stages: list[tuple[str, int]] = []
    for statement in values:
        if isinstance(statement, ast.With):
            set_device, *renames = (s for s in statement.body if not isinstance(s, ast.Delete))
            if not ast.unparse(set_device).startswith("torch.cuda.set_device("):
                return None
            for rename in renames:
                if not (isinstance(rename, ast.Assign) and isinstance(rename.value, ast.Name)):
                    return None
                new, old = _names(rename)
                places[new] = places[old]
            continue
        owner, how = _callee(statement)
        given = [n for n in _names(statement.value) if n != owner]
        if not {*given} <= {*args}:
            return None
        if how == "pack" and ast.unparse(statement) == f"{owner}.pack([{', '.join(given)}])":
            packs.append((owner, tuple(places[n] for n in given)))
        elif how == "stage" and len(given) == 1:
            (result,) = _names(statement.targets[0])
            if ast.unparse(statement) != f"{result} = {owner}.stage({given[0]})":
                return None
            places[result] = len(args) + len(stages)
            stages.append((owner, places[given[0]]))
        else:
            return None
    if not args or not produced or not {*inputs} <= {*places} or not {*returned} <= {*produced}:
        return None
    return DirectCall(
        len(args),
        tuple(packs),
        tuple(stages),
        tuple(places[n] for n in inputs),
        len(produced),
        tuple(map(produced.index, returned)),
    )


def _callee(statement: ast.stmt) -> tuple[str, str]:
    call = getattr(statement, "value", None)
    function = getattr(call, "func", None)
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return function.value.id, function.attr
    return "", ""


def _tuple(names: list[str]) -> str:
    return f"({', '.join(names)},)" if names else "()"


class InfoTestCase(TestCase):
    def compile(self, fn: Callable[..., Any], *inputs: Callable[[], Any] | Any, **options: Any) -> list[CompiledGraph]:
        torch._dynamo.reset()
        with warnings.catch_warnings(), fake_cuda() as graphs:
            warnings.simplefilter("ignore")
            inputs = [make() if callable(make) else make for make in inputs]
            outputs = torch.compile(fn, options={"pygraph": True, **options})(*inputs)
            if torch.is_grad_enabled():
                sum(t.sum() for t in outputs if t.requires_grad).backward()
        for graph in graphs:
            self.check(graph)
        return graphs

    def check(self, graph: CompiledGraph) -> None:
        """The description is what an inspection of the code finds."""
        info = graph.info
        self.assertIsInstance(info, GraphInfo)
        self.assertEqual(pickle.loads(pickle.dumps(info)), info)
        module = ast.parse(graph.source)
        defined = {s.name: s for s in module.body if isinstance(s, (ast.FunctionDef, ast.ClassDef))}
        codes = [Code(f) for n, f in defined.items() if n.startswith("partition_")]
        if "Runner" in defined:
            runner = {f.name: f for f in defined["Runner"].body}
            self.assertEqual(info.direct, direct_call(runner["call"]))
        else:
            codes = [Code(defined["call"])]
        self.assertEqual([f.name for f in info.functions], [c.name for c in codes])
        for function, code in zip(info.functions, codes):
            self.check_function(function, code)
        # The objects are there when the module is loaded.
        (objects,) = (
            s.value for s in module.body if isinstance(s, ast.Assign) and ast.unparse(s.targets[0]).endswith(".objects")
        )
        self.assertEqual(tuple(k.value for k in objects.keys), info.object_names)
        self.assertEqual([k.value for k in objects.keys], [v.id for v in objects.values])
        captured = [r for r in info.reports or () if not r.blockers]
        if info.reports is not None:
            self.assertEqual([f.report for f in info.functions], captured)

    def check_function(self, function: PartitionInfo, code: Code) -> None:
        on_gpu = function.allocator is not None
        self.assertEqual(code.parameters, ["args", *([function.allocator] if on_gpu else [])])
        reused = {code.inputs[i] for i in function.reused_input_idxs}
        self.assertLessEqual(code.reused_inputs, reused)
        # Others are results of other partitions.
        self.assertTrue(all(name.startswith("buf") for name in reused - code.reused_inputs))
        # Those of nested regions follow.
        kernels = [*dict.fromkeys(code.kernels)]
        self.assertEqual([*function.kernels[: len(kernels)]], kernels)
        self.assertEqual([*function.delivers], code.delivers)
        self.assertEqual(bool(function.collectives), code.has_collectives)

    def inputs(self, graph: CompiledGraph) -> list[str]:
        module = ast.parse(graph.source)
        (function,) = (s for s in module.body if isinstance(s, ast.FunctionDef) and s.name == "partition_0")
        return Code(function).inputs

    def saved(self, graph: CompiledGraph) -> set[str]:
        (function,) = graph.info.functions
        return {self.inputs(graph)[i] for i in function.saved_input_idxs}

    def matrix(self, **kwargs: Any) -> Callable[[], torch.Tensor]:
        return lambda: torch.randn(64, 64, device="cuda", **kwargs)


class InspectionTest(InfoTestCase):
    "What code generation tells is what was found by inspection of the code before."

    def test_inference(self):
        with torch.no_grad():
            (graph,) = self.compile(lambda x: (x.sin() @ x, x.cos()), self.matrix())
        (function,) = graph.info.functions
        self.assertEqual(len(function.kernels), 1)
        self.assertIsNotNone(graph.info.direct)
        self.assertEqual(function.groups, ())

    def test_training(self):
        def fn(x, w):
            for _ in range(3):
                x = torch.nn.functional.gelu(x @ w).sin()
            return (x.sum(),)

        matrix = self.matrix(requires_grad=True)
        forward, backward = self.compile(fn, matrix, matrix)
        (function,) = forward.info.functions
        self.assertEqual(function.saved_input_idxs, ())
        self.assertEqual(len(function.returned_output_idxs), 1)
        (function,) = backward.info.functions
        saved = {name for name in self.inputs(backward) if not name.startswith(("primals_", "tangents_"))}
        self.assertTrue(saved)
        self.assertEqual(self.saved(backward), saved)
        self.assertTrue(function.reused_input_idxs)

    def test_saved_inputs_of_the_forward(self):
        forward, backward = self.compile(
            lambda x, w: ((x @ w).relu() * w,), self.matrix(), self.matrix(requires_grad=True)
        )
        self.assertIn("primals_2", self.inputs(backward))
        self.assertNotIn("primals_2", self.saved(backward))

    def test_cpu_values(self):
        def fn(x, s, v):
            return x * s + v.to("cuda")

        with torch.no_grad():
            (graph,) = self.compile(
                fn,
                lambda: torch.empty(1024, device="cuda"),
                lambda: torch.tensor(2.0),
                lambda: torch.ones(1024),
            )
        direct = graph.info.direct
        self.assertEqual([args for _, args in direct.packs], [(1,)])
        self.assertEqual([arg for _, arg in direct.stages], [2])
        self.assertEqual(direct.inputs, (0, 3))
        (function,) = graph.info.functions
        ((pack, _),) = direct.packs
        self.assertEqual(function.delivers, (pack,))
        self.assertIn(pack, graph.info.object_names)

    @parametrize("size", (9, 1025))
    def test_cpu_values_that_the_host_computes(self, size):
        def fn(x, v):
            return x / v.sum() if size == 9 else x + v[1:].to("cuda")

        with torch.no_grad():
            (graph,) = self.compile(fn, lambda: torch.empty(1024, device="cuda"), lambda: torch.ones(size))
        self.assertIsNone(graph.info.direct)

    @parametrize(
        "option",
        ("triton.debug_sync_graph", "annotate_training", "nan_asserts", "profiler_mark_wrapper_call"),
    )
    def test_statements_around_the_partition(self, option):
        with torch.no_grad():
            (plain,) = self.compile(lambda x: x.sin(), self.matrix())
            self.assertIsNotNone(plain.info.direct)
            (graph,) = self.compile(lambda x: x.sin(), self.matrix(), **{option: True})
        self.assertIsNone(graph.info.direct)

    def test_partitions(self):
        def fn(x):
            y = x.sin()
            z = (x @ x).cos()
            return (y @ z) * y.sum(0).cpu().sum().item(), z

        with torch.no_grad(), torch._dynamo.config.patch(capture_scalar_outputs=True):
            (graph,) = self.compile(fn, self.matrix())
        self.assertEqual(len(graph.info.functions), 2)
        self.assertEqual(len(graph.info.reports), 3)
        self.assertIsNone(graph.info.direct)
        self.assertTrue(graph.info.functions[1].reused_input_idxs)

    def test_without_partitions(self):
        with torch.no_grad():
            (graph,) = self.compile(lambda x: (x.sin() @ x,), self.matrix(), graph_partition=False)
        (function,) = graph.info.functions
        self.assertEqual((function.name, graph.info.reports), ("call", None))
        self.assertEqual(function.returned_output_idxs, (0,))
        self.assertIn("call.objects = ", graph.source)

    def test_sizes(self):
        def fn(x):
            return (x.sin() @ x.t(),)

        with torch.no_grad():
            graphs = self.compile(fn, lambda: _dynamic(torch.randn(64, 64, device="cuda")))
        (function,) = graphs[-1].info.functions
        self.assertEqual(function.saved_input_idxs, ())
        self.assertIsNone(graphs[-1].info.direct)

    def test_user_defined_kernel(self):
        import triton
        import triton.language as tl

        @triton.jit
        def double(x, y, n, BLOCK: tl.constexpr):
            i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            tl.store(y + i, 2 * tl.load(x + i, i < n), i < n)

        def fn(x):
            y = torch.empty_like(x)
            double[(4,)](x, y, x.numel(), BLOCK=1024)
            return y.sin()

        with torch.no_grad():
            (graph,) = self.compile(fn, self.matrix())
        (function,) = graph.info.functions
        self.assertEqual(sum(name.startswith("double") for name in function.kernels), 1)

    def test_custom_operator(self):
        with torch.no_grad(), torch.library._scoped_library("test_pygraph_info", "FRAGMENT") as library:
            library.define("twice(Tensor x) -> Tensor")
            library.impl("twice", lambda x: torch.empty_like(x), "Meta")
            (custom,) = self.compile(lambda x: torch.ops.test_pygraph_info.twice(x).sin(), self.matrix())
            (shipped,) = self.compile(lambda x: (x @ x).sort(0).values, self.matrix())
        self.assertEqual([g.info.functions[0].calls_custom for g in (custom, shipped)], [True, False])

    def test_nested_region(self):
        @torch.compiler.nested_compile_region
        def region(x, w):
            return (x @ w).sin()

        def fn(x, w):
            return region(region(x, w), w)

        with torch.no_grad():
            (graph,) = self.compile(fn, self.matrix(), self.matrix())
        (function,) = graph.info.functions
        self.assertEqual(len(function.kernels), 1)
        self.assertIn(function.kernels[0], graph.info.object_names)

    @parametrize("name", sorted(PROGRAMS))
    def test_programs(self, name):
        for graph_partition in (True, False):
            options = {**OPTIONS["pygraph"], "graph_partition": graph_partition}
            torch._dynamo.reset()
            with warnings.catch_warnings(), fake_cuda() as graphs:
                warnings.simplefilter("ignore")
                PROGRAMS[name](functools.partial(torch.compile, options=options))
            self.assertTrue(graphs)
            for graph in graphs:
                self.check(graph)

    @hypothesis.settings(
        max_examples=int(os.environ.get("PYGRAPH_INFO_PROGRAMS", "15")),
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(programs())
    def test_random_programs(self, program: Program):
        torch._dynamo.reset()
        with warnings.catch_warnings(), fake_cuda() as graphs:
            warnings.simplefilter("ignore")
            compile = lambda module: torch.compile(module, options=program.options)  # noqa: E731
            observe(program, compile, values=False, calls=1)
        for graph in graphs:
            self.check(graph)


instantiate_parametrized_tests(InspectionTest)


def _dynamic(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.mark_dynamic(x, 0)
    return x


class CollectivesTest(InfoTestCase):
    def test_groups(self):
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        self.addCleanup(torch.distributed.destroy_process_group)
        group = torch.distributed.group.WORLD

        functional = torch.distributed._functional_collectives

        def fn(x):
            y = functional.all_reduce(x.sin(), "sum", group)
            y = functional.all_gather_tensor(y.cos(), 0, group) @ x
            y = functional.reduce_scatter_tensor(y, "sum", 0, group)
            return functional.all_to_all_single(y, None, None, group) + 1

        with torch.no_grad():
            (graph,) = self.compile(fn, self.matrix())
            (other,) = self.compile(lambda x: x.sin(), self.matrix())
        (function,) = graph.info.functions
        self.assertEqual(function.groups, (group.group_name,))
        self.assertEqual(
            [c.op for c in function.collectives if c.group is not None],
            ["all_reduce_", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"],
        )
        (function,) = other.info.functions
        self.assertEqual((function.groups, function.collectives), ((), ()))


class SavedTest(TestCase):
    def is_saved(self, desc: Any, is_backward: bool, value: Any = None) -> bool:
        node = torch.fx.Graph().placeholder("x")
        node.meta["val"] = torch.empty(1) if value is None else value
        if desc is not None:
            node.meta["desc"] = desc
        with V.set_graph_handler(types.SimpleNamespace(is_backward=is_backward)):
            return describe.is_saved(node)

    def test_saved(self):
        tangent = TangentAOTInput(PlainAOTOutput(0))
        for desc, is_backward, expected in (
            (PlainAOTInput(0), False, False),
            (PlainAOTInput(0), True, False),
            (ParamAOTInput("w"), True, False),
            (tangent, True, False),
            (SubclassGetAttrAOTInput(tangent, "a"), True, False),
            (None, True, True),
            (None, False, False),
        ):
            self.assertEqual(self.is_saved(desc, is_backward), expected, desc)
        self.assertFalse(self.is_saved(None, True, 3))


class DirectCallTest(TestCase):
    "Runner.call from the lines of its wrapper, which a test makes by hand."

    ARGS = ["arg0_1", "arg1_1"]

    def partition(self, inputs: Sequence[str], outputs: Sequence[str]) -> PartitionCallLine:
        nodes = [types.SimpleNamespace(get_name=lambda name=name: name) for name in outputs]
        signature = types.SimpleNamespace(
            input_deallocation=dict.fromkeys(inputs, True), symbol_inputs=(), output_nodes=nodes
        )
        return PartitionCallLine(None, 0, signature)

    def stage(self, result: str, value: str, op: Any = torch.ops.pygraph.stage) -> ExternKernelAllocLine:
        copy = object.__new__(HostCopy)
        copy.name, copy.op_overload = result, op.default
        copy.codegen_args = lambda: [value]
        return ExternKernelAllocLine(None, copy)

    def direct(
        self,
        *before: Any,
        inputs: Sequence[str] = ("arg0_1",),
        outputs: Sequence[str] = ("buf0",),
        returned: Sequence[str] = ("buf0",),
        after: Sequence[Any] = (),
        **kwargs: Any,
    ) -> DirectCall | None:
        wrapper = types.SimpleNamespace(
            lines=[*before, self.partition(inputs, outputs), *after],
            has_other_statements=False,
            get_graph_input_names=lambda: self.ARGS,
            get_output_refs=lambda: [*returned],
        )
        vars(wrapper).update(kwargs)
        return describe._direct_call(wrapper)

    def test_orders(self):
        self.assertEqual(self.direct(), DirectCall(2, (), (), (0,), 1, (0,)))
        # An argument that the partition hands back, for the backward.
        self.assertEqual(
            self.direct(inputs=("arg1_1", "arg0_1"), outputs=("buf0", "arg1_1"), returned=("arg1_1", "buf0")),
            DirectCall(2, (), (), (1, 0), 2, (1, 0)),
        )

    def test_cpu_values(self):
        found = self.direct(
            CommentLine("# Topologically"),
            self.stage("buf1", "arg1_1"),
            UnbackedSymbolDefsLine(None, "buf1", (), {}),
            EnterDeviceContextManagerLine(0, None),
            MultiOutputLine(None, "buf2", "buf1", []),
            ExitDeviceContextManagerLine(),
            PackLine("deliver_buf3", ["arg0_1"]),
            inputs=("buf2", "arg0_1"),
        )
        expected = DirectCall(2, (("deliver_buf3", (0,)),), (("stage_buf1", 1),), (2, 0), 1, (0,))
        self.assertEqual(found, expected)

    def test_other_runners(self):
        "Each does more than to give its arguments to one partition and to return its outputs."
        second = self.partition(["buf0"], ["buf1"])
        for name, (before, kwargs) in {
            "asserts": ((), {"has_other_statements": True}),
            "returns_an_argument": ((), {"returned": ("buf0", "arg0_1")}),
            "returns_a_constant": ((), {"returned": ("buf0", "None")}),
            "returns_a_view": ((), {"returned": ("reinterpret_tensor(buf0, (4,), (1,), 0)",)}),
            "returns_nothing": ((), {"outputs": (), "returned": ()}),
            "runs_a_kernel": ((), {"after": ["extern_kernels.mm(buf0, buf0, out=buf0)"]}),
            "two_partitions": ((), {"after": [second], "returned": ("buf1",)}),
            "has_a_size": ((), {"inputs": ("arg1_1", "s0")}),
            "packs_what_it_computes": ((PackLine("deliver_buf1", ["buf2"]),), {}),
            "packs_what_it_stages": (
                (self.stage("buf1", "arg1_1"), PackLine("deliver_buf2", ["buf1"])),
                {},
            ),
            "packs_later": ((), {"after": [PackLine("deliver_buf1", ["arg0_1"])]}),
            "uploads": (
                (self.stage("buf1", "arg1_1", torch.ops.pygraph.upload),),
                {"inputs": ("arg0_1", "buf1")},
            ),
            "stages_what_it_stages": (
                (self.stage("buf1", "arg1_1"), self.stage("buf2", "buf1")),
                {"inputs": ("arg0_1", "buf2")},
            ),
            "runs_an_operator": (
                (ExternKernelAllocLine(None, object.__new__(ir.FallbackKernel)),),
                {},
            ),
            "takes_an_element": (
                (MultiOutputLine(None, "buf1", "arg0_1", [(list, 0)]),),
                {"inputs": ("buf1",)},
            ),
            "packs_on_a_device": (
                (EnterDeviceContextManagerLine(0, None), PackLine("deliver_buf1", ["arg0_1"])),
                {},
            ),
            "reads_a_size": ((UnbackedSymbolDefsLine(None, "arg0_1", (), {"u0": ()}),), {}),
            "returns_what_is_staged": (
                (self.stage("buf1", "arg1_1"),),
                {"inputs": ("arg0_1", "buf1"), "returned": ("buf0", "buf1")},
            ),
            "two_arguments_of_one_name": ((), {"get_graph_input_names": lambda: ["arg0_1"] * 2}),
            "no_arguments": ((), {"get_graph_input_names": list, "inputs": ()}),
        }.items():
            self.assertIsNone(self.direct(*before, **kwargs), name)


# Compiles in a process of its own; a second one finds what the first left in the cache.
class CacheTest(TestCase):
    def compiled(self, *, pygraph: bool = True) -> list[tuple[GraphInfo | None, list[str] | None]]:
        """Returns what each graph brings that a program compiles or finds in the cache."""
        seen = []
        post_compile = CompiledFxGraph.post_compile

        def noted(graph: CompiledFxGraph, *args: Any) -> None:
            post_compile(graph, *args)
            owner = graph.compiled_fn_runner or graph.current_callable
            seen.append((graph.graph_info, [*owner.objects] if graph.graph_info is not None else None))

        torch._dynamo.reset()
        PyCodeCache.cache_clear()
        counters.clear()
        x = torch.randn(8, requires_grad=True)
        with mock.patch.object(CompiledFxGraph, "post_compile", noted):
            torch.compile(lambda x: x.sin() * x.sum(), options={"pygraph": pygraph})(x).sum().backward()
        return seen

    @parametrize("autograd_cache", (False, True))
    @fresh_cache()
    def test_graph_from_the_cache(self, autograd_cache):
        hits = ("aot_autograd", "autograd_cache_hit") if autograd_cache else ("inductor", "fxgraph_cache_hit")
        with (
            inductor_config.patch(fx_graph_cache=True),
            functorch_config.patch(enable_autograd_cache=autograd_cache),
        ):
            first = self.compiled()
            self.assertEqual(counters["inductor"]["fxgraph_cache_hit"], 0)
            again = self.compiled()
            self.assertGreater(counters[hits[0]][hits[1]], 0)
        self.assertEqual(again, first)
        self.assertEqual(len(first), 2)
        for info, names in first:
            self.assertIsInstance(info, GraphInfo)
            self.assertIsNotNone(names)

    @fresh_cache()
    def test_off(self):
        self.assertEqual(self.compiled(pygraph=False), [(None, None)] * 2)


instantiate_parametrized_tests(CacheTest)


if __name__ == "__main__":
    run_tests()
