# Owner(s): ["module: inductor"]
"""
What Dynamo does around the graphs of PyGraph: bytecode of graph breaks, guards, the backend of its
callback, and what it keeps alive. Nothing is compiled, so that it runs anywhere.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import pathlib
import sys
import types
import weakref
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
import torch._dynamo
from torch._dynamo.capabilities import BackendCapabilities, FrameExtension
from torch._dynamo.eval_frame import _debug_get_cache_entry_list, innermost_backend
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch._inductor.pygraph import native
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    subtest,
)
from torch.testing._internal.pygraph_common import (
    DynamoTestCase,
    needs_compiled,
    opaque,
    PYGRAPH,
)


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


graph_break = torch._dynamo.graph_break


def of_values(x: torch.Tensor) -> Any:
    return x.sin() * opaque(x + 1) - opaque(x.cos())


def branch(x: torch.Tensor) -> Any:
    y = x * 2
    if y.sum() > 0:
        return y + x
    return y - x


def branch_of_value(x: torch.Tensor) -> Any:
    y = x * 2
    return (y.sum() > 0 or y) if x.sum() < 0 else (y.mean() > 0 and x)


def returned(x: torch.Tensor) -> Any:
    return opaque(x + 1)


def reassigned(x: torch.Tensor) -> Any:
    old = x
    x = x + 1
    graph_break()
    y, x = x, old * 2
    graph_break()
    return old, x, y


def aliases(x: torch.Tensor) -> Any:
    a = b = [x + 1, x]
    c = x * 3
    graph_break()
    a.append(c)
    graph_break()
    return a, b, a is b, c


def closures(x: torch.Tensor) -> Any:
    total = x + 1

    def add(y: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total = total + y
        return total

    graph_break()
    z = add(x)
    graph_break()
    return add(z), total


def of_arguments(x: torch.Tensor, *args: Any, scale: float = 2.0, **kwargs: Any) -> Any:
    y = x * scale
    graph_break()
    z = [a + y for a in args]
    graph_break()
    return y, z, {k: v * x for k, v in kwargs.items()}


def with_contexts(x: torch.Tensor) -> Any:
    with torch.no_grad():
        y = x * 2
        graph_break()
        z = y + torch.is_grad_enabled()
    guard = torch.enable_grad()
    graph_break()
    with guard:
        return z + torch.is_grad_enabled(), y


def with_exception(x: torch.Tensor) -> Any:
    y = x + 1

    def fail(z: torch.Tensor) -> torch.Tensor:
        w = z + y
        opaque()
        raise ValueError(w.sum().item())

    try:
        fail(x * 2)
    except ValueError as e:
        graph_break()
        return y * 2, str(e)
    return None


def without_graph(x: torch.Tensor) -> Any:
    graph_break()
    graph_break()
    return x


def of_attributes(x: torch.Tensor) -> Any:
    box = type("Box", (), {})()
    box.value = x + 1
    y = box.value * 2
    graph_break()
    box.value = y
    graph_break()
    return box.value + y, hasattr(box, "other")


def inside_call(x: torch.Tensor) -> Any:
    def inner(y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        w = y + z
        graph_break()
        return w * y

    return [inner(x, x + 1), x.sin()][0] + inner(x.cos(), x)


def in_loop(x: torch.Tensor) -> Any:
    for i in range(3):
        x = x + i
        opaque(x)
    return x * 2


def scaled_in_loop(x: torch.Tensor) -> Any:
    for i in range(2):
        x = x * opaque(x).sum().item() + i
    return x


def before_loop(x: torch.Tensor) -> Any:
    found = [x + 1]
    y = x.sin()
    for i, row in enumerate(y):
        found.append(opaque(row) * i)
        y = y + row
    return found, y


class Sizes:
    def __init__(self, sizes: list[tuple[int, int]]) -> None:
        self.sizes = sizes


def proposals(x: torch.Tensor) -> Any:
    "As torchvision's RegionProposalNetwork.filter_proposals."
    x, images = torch.stack([x, -x]), Sizes([(2, 2), (3, 3)])
    num_images, device = x.shape[0], x.device
    levels = torch.cat([torch.full((n,), i, device=device) for i, n in enumerate([2, 1])], 0)
    levels = levels.reshape(1, -1).expand_as(x)
    top, offset = [], 0
    for part in x.split([2, 1], 1):
        top.append(part.topk(min(part.shape[1], 2), dim=1)[1] + offset)
        offset += part.shape[1]
    rows = torch.arange(num_images, device=device)[:, None]
    scores, levels = (t[rows, torch.cat(top, 1)] for t in (x, levels))
    found = []
    for score, level, size in zip(torch.sigmoid(scores), levels, images.sizes):
        found.append((opaque(score).clamp(max=size[0]), level))
    return found


def in_while_loop(x: torch.Tensor) -> Any:
    y, count = x.abs() + 1, 0
    while y.sum() < 100:
        y = y * 2
        count += 1
    return y, count


def before_comprehension(x: torch.Tensor) -> Any:
    y = x.sin()
    rows = [opaque(row + y) for row in x]
    return rows, y.cos()


def loop_in_call(x: torch.Tensor) -> Any:
    def inner(y: torch.Tensor) -> torch.Tensor:
        z = y.cos()
        for row in y:
            z = z + opaque(row)
            if z.sum() > 4:
                break
        else:
            return -z
        return z

    return inner(x.sin()) + inner(x) * 2


def loop_in_contexts(x: torch.Tensor) -> Any:
    y = x.cos() + 1
    try:
        with torch.no_grad():
            for row in y.sin():
                y = y + opaque(row) + torch.is_grad_enabled()
                if y.sum() > 8:
                    raise ValueError
    except ValueError:
        y = -y
    return y, torch.is_grad_enabled()


PROGRAMS = [
    of_values,
    branch,
    branch_of_value,
    returned,
    reassigned,
    aliases,
    closures,
    of_arguments,
    with_contexts,
    with_exception,
    without_graph,
    of_attributes,
    inside_call,
    in_loop,
    before_loop,
    proposals,
    in_while_loop,
    before_comprehension,
    loop_in_call,
    loop_in_contexts,
]


class BytecodeTest(DynamoTestCase):
    @parametrize("program", [subtest(p, name=p.__name__) for p in PROGRAMS])
    @parametrize("profiled", [False, True])
    def test_as_eager(self, program: Callable[..., Any], profiled: bool) -> None:
        arguments: dict[str, Any] = {}
        args: tuple[Any, ...] = ()
        if program is of_arguments:
            args, arguments = (torch.ones(3), torch.zeros(3)), {"scale": 3.0, "other": torch.ones(3)}
        compiled = self.compile(program)
        profiler = torch.profiler.profile() if profiled else contextlib.nullcontext()
        with profiler:
            for i in range(4):
                x = torch.randn(3) * (-1) ** i
                self.assertEqual(compiled(x, *args, **arguments), program(x, *args, **arguments))
        # Dynamo skips a frame that breaks before there is a graph.
        if profiled and program not in (without_graph, in_loop):
            self.assertIn("Pregraph bytecode", {e.name for e in profiler.events()})

    def test_records_only_while_profiled(self) -> None:
        "A profiler that starts later has its record, and nothing is compiled again."
        compiled = self.compile(lambda x, scale: (x * scale).sin())
        x, names = torch.randn(3), []

        def note(frame: Any, event: str, arg: Any) -> None:
            names.append(frame.f_code.co_name)

        def run() -> None:
            self.assertEqual(compiled(x, 2), (x * 2).sin())

        run()
        sys.setprofile(note)
        try:
            run()
        finally:
            sys.setprofile(None)
        self.assertEqual([name for name in names if name.startswith("record_pregraph")], [])
        with torch._dynamo.config.patch(error_on_recompile=True):
            with torch.profiler.profile() as profiler:
                run()
            run()
        self.assertEqual([e.name for e in profiler.events()].count("Pregraph bytecode"), 1)

    def test_no_lists(self) -> None:
        def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            z = x + y
            graph_break()
            return z * x

        x = torch.randn(3)
        self.assertEqual(self.compile(f)(x, x), (x + x) * x)
        names = {i.opname for i in dis.get_instructions(self.final_code(f))}
        self.assertFalse(names & {"BUILD_LIST", "LIST_EXTEND", "CALL_FUNCTION_EX"})

    @parametrize("program", [subtest(p, name=p.__name__) for p in (before_loop, proposals)])
    def test_what_comes_before_a_loop_is_captured(self, program: Callable[..., Any]) -> None:
        graphs = {}
        for pygraph in (True, False):
            torch._dynamo.reset()
            counters.clear()
            compiled = self.compile(program, pygraph=pygraph)
            for _ in range(3):
                x = torch.randn(3)
                self.assertEqual(compiled(x), program(x))
            graphs[pygraph] = self.num_graphs()
        self.assertEqual(graphs, {True: 1, False: 0})

    @parametrize("lines", (2, 8, 16, 30))
    @parametrize(
        "before",
        [
            subtest("for i in range(2): y = y + opaque(x)", name="loop"),
            subtest("graph_break()", name="break"),
        ],
    )
    def test_ahead_of_a_long_handler(self, before: str, lines: int) -> None:
        "The jump over it begins a range of the exception table, with an EXTENDED_ARG."
        source = f"""
def f(x):
    y = x.sin() * 2
    {before}
    found = [0, 0]
    try:
        found[0] = len(found)
    except KeyError:
        {"; ".join(["found = [found[0] + 1, str(found[1])]"] * lines)}
    finally:
        found[0] += 1
    return y, found
"""
        scope: dict[str, Any] = {"opaque": opaque, "graph_break": graph_break}
        exec(source, scope)
        x = torch.randn(3)
        self.assertEqual(self.compile(scope["f"])(x), scope["f"](x))

    def test_off_is_stock(self) -> None:
        def f(x: torch.Tensor) -> torch.Tensor:
            z = x + 1
            graph_break()
            return z * x

        x = torch.randn(3)
        self.assertEqual(torch.compile(f)(x), (x + 1) * x)
        names = {i.opname for i in dis.get_instructions(self.final_code(f))}
        self.assertIn("CALL_FUNCTION_EX", names)

    def test_dead_locals_are_freed(self) -> None:
        """A local that is read in one branch only does not live on in the other one."""
        outputs: list[Any] = []
        alive: list[int] = []

        def remember(_self: Any, gm: torch.fx.GraphModule, _inputs: list[Any]) -> Any:
            def run(*args: Any) -> Any:
                result = gm(*args)
                outputs.extend(weakref.ref(t) for t in result)
                return result

            return run

        @torch._dynamo.disable
        def look() -> None:
            alive.append(sum(ref() is not None for ref in outputs))

        def f(x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            if x.sum() > 0:
                look()
                return x
            return y * 2

        # The branch breaks the graph.
        stays = torch._inductor.config.patch(pygraph_mend=False)
        with stays, mock.patch.object(torch._TorchCompileInductorWrapper, "__call__", remember):
            compiled = self.compile(f)
            for _ in range(3):
                outputs.clear()
                compiled(torch.ones(3))
                self.assertEqual(len(outputs), 2)
        self.assertEqual(alive, [0, 0, 0])


class Hooked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class GuardTest(DynamoTestCase):
    def check(self, module: torch.nn.Module, compiled: Any) -> None:
        x = torch.randn(2, 3)
        self.assertEqual(compiled(x), module(x))

    def compiled_module(
        self, **options: Any
    ) -> tuple[torch.nn.Module, Any, Callable[..., Any]]:
        module = Hooked()

        def f(x: torch.Tensor) -> torch.Tensor:
            return module(x)

        compiled = self.compile(f, **options)
        with torch.no_grad():
            for _ in range(3):
                self.check(module, compiled)
        return module, compiled, f

    def test_what_is_guarded_stays_guarded(self) -> None:
        """Each of these changes what a call returns."""

        def replace_layer(module: Any) -> None:
            module.layers[0] = torch.nn.Linear(3, 5)

        def append_layer(module: Any) -> None:
            module.layers.append(torch.nn.Tanh())

        def replace_parameter(module: Any) -> None:
            module.layers[0].weight = torch.nn.Parameter(torch.randn(7, 3))
            module.layers[0].bias = torch.nn.Parameter(torch.randn(7))

        def write_parameter(module: Any) -> None:
            module.layers[0].weight.mul_(2)

        def replace_forward(module: Any) -> None:
            module.layers.forward = lambda x: x + 1

        def in_place(module: Any) -> None:
            module.layers[1].inplace = True

        def iterate(module: Any) -> None:
            module.layers.__class__ = type(
                "Reversed",
                (torch.nn.Sequential,),
                {"__iter__": lambda self: reversed(self._modules.values())},
            )

        for change in (
            replace_layer,
            append_layer,
            replace_parameter,
            write_parameter,
            replace_forward,
            in_place,
            iterate,
        ):
            with self.subTest(change.__name__), torch.no_grad():
                torch._dynamo.reset()
                module, compiled, _ = self.compiled_module(pygraph=False)
                change(module)
                x = torch.randn(2, 3)
                if not torch.equal(compiled(x), module(x)):
                    self.skipTest("stock does not see it, with Python 3.13.0")
                torch._dynamo.reset()
                module, compiled, _ = self.compiled_module()
                change(module)
                self.check(module, compiled)
                self.check(module, compiled)

    def test_module_of_python_is_replaced(self) -> None:
        """Two names of one module of Python are guarded."""
        module, compiled, _ = self.compiled_module()
        other = types.ModuleType("functional")
        vars(other).update(vars(torch.nn.functional))
        other.relu = lambda input, inplace: input.tanh()
        for name in (torch.nn.modules.activation, torch.nn.modules.linear):
            with torch.no_grad(), mock.patch.object(name, "F", other):
                self.check(module, compiled)
            with torch.no_grad():
                self.check(module, compiled)

    def test_float_that_varies(self) -> None:
        "No tensor is made to compare it with, and NaN is still told from numbers."
        as_tensor = mock.Mock(wraps=torch._as_tensor_fullprec)
        with mock.patch.object(torch, "_as_tensor_fullprec", as_tensor):
            compiled = self.compile(lambda x, by: x * by + 1)
            x = torch.randn(4)
            for by in (0.5, 1.5, 2.5):
                self.assertEqual(compiled(x, by), x * by + 1)
            graphs = self.num_graphs()
            as_tensor.reset_mock()
            for by in (3.5, -0.0, float("inf")):
                self.assertEqual(compiled(x, by), x * by + 1)
        self.assertEqual((as_tensor.call_count, self.num_graphs()), (0, graphs))
        self.assertTrue(compiled(x, float("nan")).isnan().all())
        self.assertEqual(self.num_graphs(), graphs + 1)


class BackendTest(DynamoTestCase):
    def fn(self) -> Callable[..., Any]:
        def f(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        return f

    @needs_compiled
    def test_is_found_in_two_steps(self) -> None:
        f = self.fn()
        self.compile(f)(torch.ones(3))
        (entry,) = _debug_get_cache_entry_list(f.__code__)
        self.assertIsInstance(entry.backend, native.compiled.Link)
        self.assertIsInstance(innermost_backend(entry.backend), torch._TorchCompileInductorWrapper)

    def test_equal_backends_share_and_others_do_not(self) -> None:
        f, x = self.fn(), torch.ones(3)
        self.compile(f)(x)
        self.compile(f)(x)
        self.assertEqual(self.num_graphs(), 1)
        self.compile(f, max_autotune=True)(x)
        self.assertGreater(self.num_graphs(), 1)
        torch.compile(f)(x)
        self.assertEqual(self.num_graphs(), 3)
        other = CompileCounter()
        torch.compile(f, backend=other)(x)
        self.assertEqual(other.frame_count, 1)
        self.compile(f)(x)
        torch.compile(f)(x)
        self.assertEqual(self.num_graphs(), 4)

    @parametrize(
        "stance", ["force_eager", "eager_on_recompile", "fail_on_recompile", "eager_then_compile"]
    )
    def test_stances(self, stance: str) -> None:
        f, x = self.fn(), torch.ones(3)
        compiled = self.compile(f)
        compiled(x)
        with torch.compiler.set_stance(stance):
            self.assertEqual(compiled(x), x + 1)
            other = torch.ones(3, dtype=torch.float64)
            if stance == "fail_on_recompile":
                with self.assertRaisesRegex(RuntimeError, "Detected recompile"):
                    compiled(other)
            else:
                self.assertEqual(compiled(other), other + 1)
        self.assertEqual(compiled(x), x + 1)
        self.assertEqual(self.num_graphs(), 1)

    def test_fullgraph(self) -> None:
        def f(x: torch.Tensor) -> torch.Tensor:
            graph_break()
            return x + 1

        with self.assertRaises(torch._dynamo.exc.Unsupported):
            torch.compile(f, fullgraph=True, options=PYGRAPH)(torch.ones(3))
        compiled = torch.compile(self.fn(), fullgraph=True, options=PYGRAPH)
        self.assertEqual(compiled(torch.ones(3)), torch.ones(3) + 1)

    @needs_compiled
    def test_link_does_what_its_object_does(self) -> None:
        def callback(a: int, *, b: int) -> int:
            return a + b

        callback.name = "it"
        end = native.compiled.Link(callback, None)
        link = native.compiled.Link(callback, end)
        self.assertEqual(link(1, b=2), 3)
        self.assertEqual(link.name, "it")
        self.assertTrue(link == end and link == callback and not link != callback)
        self.assertEqual(hash(link), hash(callback))
        self.assertFalse(hasattr(link, "_torchdynamo_orig_backend"))
        with self.assertRaises(TypeError):
            link(1)


class LifetimeTest(DynamoTestCase):
    """Dynamo holds nothing that it traced once a frame is compiled."""

    def setUp(self) -> None:
        super().setUp()
        # A cycle would be collected at any time.
        gc.collect()
        gc.disable()
        self.addCleanup(gc.enable)

    def assertFreed(self, refs: Sequence[weakref.ref[Any]]) -> None:
        self.assertEqual([ref() for ref in refs], [None] * len(refs))

    @parametrize("pygraph", (False, True))
    def test_optimizer(self, pygraph: bool) -> None:
        model = torch.nn.Linear(4, 4, bias=False)
        optimizer: Any = torch.optim.Adam(model.parameters())
        step = self.compile(lambda: optimizer.step(), pygraph=pygraph)
        model(torch.ones(4)).sum().backward()
        step()
        self.assertEqual(self.num_graphs(), 1)
        grads = [weakref.ref(p.grad) for p in model.parameters()]
        optimizer.zero_grad(set_to_none=True)
        self.assertFreed(grads)
        states = [weakref.ref(t) for s in optimizer.state.values() for t in s.values()]
        optimizer = None
        self.assertEqual(len(states), 3)
        self.assertFreed(states)

    @parametrize("pygraph", (False, True))
    def test_module(self, pygraph: bool) -> None:
        model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
        forward = self.compile(lambda x: model(x), pygraph=pygraph)
        forward(torch.ones(4))
        self.assertEqual(self.num_graphs(), 1)
        parameters = [weakref.ref(p) for p in model.parameters()]
        model = None
        self.assertFreed(parameters)

    @parametrize("program", [subtest(p, name=p.__name__) for p in (before_loop, scaled_in_loop)])
    def test_break(self, program: Callable[..., Any]) -> None:
        "Without PyGraph, the frame that is skipped is kept, as in stock Dynamo."
        x = torch.ones(3, 3)
        self.compile(program)(x)
        ref = weakref.ref(x)
        del x
        self.assertFreed([ref])

    @parametrize("pygraph", (False, True))
    def test_item(self, pygraph: bool) -> None:
        x, scale = torch.ones(3), torch.tensor(2.0)
        self.compile(lambda x, scale: x * scale.item(), pygraph=pygraph)(x, scale)
        refs = [weakref.ref(x), weakref.ref(scale)]
        del x, scale
        self.assertFreed(refs)


class HooksTest(DynamoTestCase):
    """Without PyGraph, tracing runs what stock Dynamo runs."""

    def test_no_extension_without_pygraph(self) -> None:
        "No method is called for a traced instruction or call, no object is made for a frame."
        made = []
        init = FrameExtension.__init__
        record = lambda self: made.append(type(self)) or init(self)  # noqa: E731
        with mock.patch.object(FrameExtension, "__init__", record):
            for pygraph in (False, True):
                torch._dynamo.reset()
                self.compile(before_loop, pygraph=pygraph)(torch.ones(3, 3))
                self.assertEqual(bool(made), pygraph)

    def test_dynamo_names_no_backend(self) -> None:
        "A backend is asked for its capabilities."
        root = pathlib.Path(torch._dynamo.__file__).parent
        found = [p for p in root.rglob("*.py") if "pygraph" in p.read_text()]
        self.assertEqual(found, [])

    def test_any_backend_may_have_capabilities(self) -> None:
        class Backend:
            def __call__(self, gm: torch.fx.GraphModule, _inputs: list[Any]) -> Any:
                return gm.forward

            def dynamo_capabilities(self) -> BackendCapabilities:
                return capabilities

        calls = []

        class Extension(FrameExtension):
            def on_call(self, _tx: Any, fn: Any) -> None:
                calls.append(fn.as_python_constant())

        capabilities = BackendCapabilities()
        capabilities.extend_frame = Extension
        compiled = torch.compile(lambda x: torch.sin(x), backend=Backend())
        x = torch.ones(3)
        self.assertEqual(compiled(x), x.sin())
        self.assertEqual(calls, [torch.sin])


instantiate_parametrized_tests(LifetimeTest)
instantiate_parametrized_tests(BytecodeTest)
instantiate_parametrized_tests(BackendTest)


if __name__ == "__main__":
    run_tests()
