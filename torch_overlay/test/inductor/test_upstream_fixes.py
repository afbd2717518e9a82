# Owner(s): ["module: inductor"]
"""
The series ``fixes``: each test fails with stock PyTorch, and passes with the series alone, without
the modules of PyGraph. No test sets config.pygraph.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import types
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
import torch._dynamo
import torch._inductor.cudagraph_trees as trees
import torch.distributed as dist
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.utils import counters
from torch._dynamo.variables import optimizer
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.testing import FileCheck
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.fake_cuda import fake_cuda
from torch.testing._internal.inductor_utils import HAS_CPU


if TYPE_CHECKING:
    from collections.abc import Callable


FLOATS = (0.25, 0.5, 1.5, 0.75)


@torch.library.custom_op("test_upstream_fixes::pair", mutates_args=())
def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + 1, x - 1


@pair.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.custom_op("test_upstream_fixes::distinct", mutates_args=())
def distinct(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.unique(return_counts=True)


@distinct.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    n = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(n), x.new_empty(n, dtype=torch.int64)


@torch.library.custom_op("test_upstream_fixes::negate", mutates_args=("x",))
def negate(x: torch.Tensor) -> None:
    x.neg_()


negate.register_fake(lambda x: None)


def views(n: int, *offsets: int, size: int = 4) -> tuple[torch.Tensor, ...]:
    """Return views of a new tensor with n elements."""
    base = torch.arange(n, dtype=torch.float32)
    return tuple(base[offset : offset + size] for offset in offsets)


# Offsets of two views, with the number of elements of their base. Without, each has a base.
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "none_then_overlap": ((), (8, 0, 2)),
    "overlap_then_none": ((8, 0, 2), ()),
    "disjoint_then_overlap": ((8, 0, 4), (8, 0, 2)),
    "overlap_then_disjoint": ((8, 0, 2), (8, 0, 4)),
    "one_moves": ((8, 0, 2), (8, 0, 1)),
    "both_move": ((8, 0, 2), (8, 1, 3)),
    "other_base": ((8, 0, 2), (20, 0, 2)),
}


def double_and_add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.mul_(2)
    return a + b


class Config:
    def __init__(self) -> None:
        self.layers = 2

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)

    def twice(self) -> int:
        return 2 * self.layers


def python_frames(fn: Callable[[], Any]) -> list[str]:
    """Return the names of the Python functions that a call runs."""
    names: list[str] = []

    def profile(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            names.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return names


class FixesTestCase(TestCase):
    def setUp(self) -> None:
        super().setUp()
        torch._dynamo.reset()
        counters.clear()


class FloatTest(FixesTestCase):
    """A Python float that varies is an input of the graph."""

    @parametrize("training", (False, True))
    def test_constant_is_not_cached(self, training: bool) -> None:
        fn = lambda x, by: x * by + torch.full_like(x, by)  # noqa: E731
        x = torch.ones(3, requires_grad=training)
        for _ in range(2):
            torch._dynamo.reset()
            compiled = torch.compile(fn)
            for by in FLOATS:
                y = compiled(x, by)
                self.assertEqual(y, fn(x, by))
                if training:
                    (grad,) = torch.autograd.grad(y.sum(), x)
                    self.assertEqual(grad, torch.full((3,), by))

    def test_alpha(self) -> None:
        fn = lambda x, by: torch.add(x, by, alpha=2)  # noqa: E731
        compiled = torch.compile(fn)
        for by in FLOATS:
            self.assertEqual(compiled(torch.ones(3), by), fn(torch.ones(3), by))

    def test_write_that_nothing_reads(self) -> None:
        """The result of the write has the example value of the input that is specialized."""

        @torch.compile
        def count(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            n.add_(1)
            return x * 2

        n = torch.tensor(0.0, dtype=torch.float64)
        for i in range(3):
            count(torch.ones(3), n)
            self.assertEqual(n.item(), i + 1)


class DynamoTest(FixesTestCase):
    def test_graph_break_ahead_of_a_long_handler(self) -> None:
        """The jump over the handler has an EXTENDED_ARG, which begins a range of the exception table."""
        for lines in (2, 8, 16, 30):
            source = f"""
def f(x):
    y = x.sin() * 2
    torch._dynamo.graph_break()
    found = [0, 0]
    try:
        found[0] = len(found)
    except KeyError:
        {"; ".join(["found = [found[0] + 1, str(found[1])]"] * lines)}
    finally:
        found[0] += 1
    return y, found
"""
            scope: dict[str, Any] = {"torch": torch}
            exec(source, scope)
            x = torch.randn(3)
            self.assertEqual(torch.compile(scope["f"])(x), scope["f"](x))

    def test_rest_of_a_sequence(self) -> None:
        def fn(x, values):
            first, *rest = values
            rest.append(x + first)
            return rest

        values = (1, 2, 3)
        self.assertEqual(torch.compile(fn, backend="eager", fullgraph=True)(torch.ones(2), values), fn(torch.ones(2), values))

    def test_equality_of_sequences(self) -> None:
        class Number:
            def __eq__(self, other):
                return 0

            def __ne__(self, other):
                return 1

        def fn(x, a, b):
            return x + 1, [a] == [b], (a,) != (b,)

        found = torch.compile(fn, backend="eager", fullgraph=True)(torch.ones(2), Number(), Number())
        self.assertIs(found[1], False)
        self.assertIs(found[2], True)

    def test_input_that_is_also_global(self) -> None:
        holder = types.SimpleNamespace(weight=torch.ones(2))
        # The globals of two functions
        scope = {"holder": holder, "weight": holder.weight}
        exec("def of_object(x, y): return x + holder.weight, y", scope)
        exec("def of_module(x, y): return x + weight, y * 2", scope)
        for name in ("of_object", "of_module"):
            compiled = torch.compile(scope[name], backend="eager", fullgraph=True)
            for y in (holder.weight, -torch.ones(2)):
                self.assertEqual(compiled(torch.zeros(2), y), scope[name](torch.zeros(2), y))

    def test_random_number_and_symbolic_integer(self) -> None:
        def add(x, n):
            return x.t(), n + random.randint(0, 2)

        def multiply(x, n):
            n *= random.random()
            return x.t(), n

        for fn in (add, multiply):
            compiled = torch.compile(fn, backend="eager", dynamic=True)
            for n in (3, 4):
                random.seed(n)
                expected = fn(torch.ones(2, 3), n)
                random.seed(n)
                found = compiled(torch.ones(2, 3), n)
                self.assertEqual(found, expected)
                self.assertIs(type(found[1]), type(expected[1]))

    def test_setter_of_a_property(self) -> None:
        class Scaled:
            def __init__(self, value):
                self.value = value

            @property
            def twice(self):
                return self.value * 2

            @twice.setter
            def twice(self, value):
                self.value = value / 2

        def fn(scaled, x):
            scaled.twice = x + 1
            before = scaled.value
            scaled.value = x
            return before, scaled.twice

        found, expected = Scaled(torch.zeros(2)), Scaled(torch.zeros(2))
        x = torch.ones(2)
        self.assertEqual(torch.compile(fn, backend="eager", fullgraph=True)(found, x), fn(expected, x))
        self.assertEqual(vars(found), vars(expected))

    def test_raise_of_argument(self) -> None:
        def plain(x, error):
            x.add_(1)
            raise error

        def chained(x, error):
            x.add_(1)
            raise error from KeyError(2)

        for fn in (plain, chained):
            x, error = torch.zeros(2), ValueError("of the caller")
            with self.assertRaises(ValueError) as caught:
                torch.compile(fn)(x, error)
            self.assertIs(caught.exception, error)
            self.assertEqual(repr(error.__cause__), "None" if fn is plain else "KeyError(2)")
            self.assertEqual(x, torch.ones(2))

    def test_deterministic_mode_of_inductor(self) -> None:
        with torch._inductor.config.patch(deterministic=True):
            torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(2))
            self.assertTrue(torch._inductor.config.deterministic)

    def test_optimizer_before_a_graph_runs(self) -> None:
        """A manager of CUDA graph trees need not have a current node."""
        gradient = types.SimpleNamespace(is_cuda=True, device=types.SimpleNamespace(index=0))
        manager = types.SimpleNamespace(current_node=None)
        with mock.patch.object(trees, "get_manager", lambda *args: manager):
            self.assertFalse(optimizer._is_static_for_cudagraphs(gradient))

    def test_record_of_bytecode(self) -> None:
        """Without a profiler the two functions that bytecode calls return at once."""
        self.assertIsNone(dynamo_utils.record_pregraph_bytecode_enter())
        compiled = torch.compile(lambda x: x + 1, backend="eager")
        compiled(torch.ones(3))
        # Dynamo does not look at them.
        self.assertEqual(counters["frames"]["total"], 1)
        frames = python_frames(lambda: compiled(torch.ones(3)))
        self.assertEqual(len([name for name in frames if name.startswith("record_pregraph")]), 2)
        self.assertNotIn("nonrecursive_disable_wrapper", frames)
        with torch.profiler.profile() as profile:
            compiled(torch.ones(3))
        self.assertEqual(len([e for e in profile.events() if e.name == "Pregraph bytecode"]), 1)

    def test_guard_of_saved_tensors_hooks(self) -> None:
        """One Python frame a call tells whether hooks are to be inlined; such hooks recompile."""
        f = lambda x: (x * x).sin()  # noqa: E731
        compiled = torch.compile(f)
        x = torch.randn(3, requires_grad=True)
        compiled(x)
        frames = python_frames(lambda: compiled(x))
        self.assertEqual([name for name in frames if "hooks" in name], [])
        graphs = counters["stats"]["unique_graphs"]
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t + 0, lambda t: t):
            self.assertEqual(compiled(x), f(x))
        self.assertEqual(counters["stats"]["unique_graphs"], graphs)
        pack, unpack = (torch.fx.symbolic_trace(g) for g in (lambda t: t + 0, lambda t: t))
        for _ in range(2):
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                self.assertEqual(compiled(x), f(x))
            self.assertEqual(compiled(x), f(x))
            self.assertEqual(counters["stats"]["unique_graphs"], graphs + 1)

    def test_guards_of_aliased_modules_run_no_python(self) -> None:
        """Linear and ReLU reach one module, torch.nn.functional; no function is generated that compares the two."""
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
        compiled = torch.compile(model, backend="eager")
        x = torch.randn(3, 3)
        compiled(x)
        self.assertNotIn("guard", python_frames(lambda: compiled(x)))
        with mock.patch.object(torch.nn.modules.activation, "F", types.SimpleNamespace(relu=lambda x, inplace: -x)):
            self.assertEqual(compiled(x), -model[0](x))
        self.assertEqual(compiled(x), model(x))

    @parametrize("container", (dict, list))
    def test_items_that_are_not_read(self, container: type) -> None:
        """The program changes an item of a dictionary or a list. Other items may have any value."""

        def f(x, seen):
            seen[0] = True
            return x + 1

        compiled = torch.compile(f, backend="eager")
        counters.clear()
        for other in (False, True, False):
            seen = {0: False, 1: other} if container is dict else [False, other]
            self.assertEqual(compiled(torch.ones(3), seen), torch.full((3,), 2.0))
            self.assertEqual([seen[0], seen[1]], [True, other])
        self.assertEqual(counters["stats"]["unique_graphs"], 1)


class PartitionTest(FixesTestCase):
    """What is generated for stock CUDA graphs."""

    def compile(
        self, fn: Callable[..., Any], *inputs: Any, raises: type[Exception] | None = None, **options: Any
    ) -> Any:
        """Return the graph that is compiled for inputs on a modelled GPU."""
        with fake_cuda() as graphs, torch.no_grad():
            args = [
                torch.empty(size, device=device, dtype=dtype[0] if dtype else None) for size, device, *dtype in inputs
            ]
            compiled = torch.compile(fn, options={"triton.cudagraphs": True, **options})
            if raises is None:
                compiled(*args)
            else:
                # It was compiled, and fake tensors have no values.
                self.assertRaises(raises, lambda: compiled(*args))
        (graph,) = graphs
        return graph

    def test_two_devices(self) -> None:
        """Each partition enters its own device, and the code parses."""
        fn = lambda x, y: (x.sin() + 1, y.cos(), x + y.to(x.device))  # noqa: E731
        graph = self.compile(fn, (64, "cuda:0"), (64, "cuda:1"))
        self.assertIn("multiple devices", graph.skip_reason)
        check = FileCheck().check("def partition_0").check("_DeviceGuard(0)").check("_DeviceGuard(1)")
        check.check("class Runner").check("_DeviceGuard(0)").run(graph.source)

    def test_random_draws_stay_in_order(self) -> None:
        def fn(x: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            first = torch.multinomial(x.sin().softmax(-1).cpu(), 2)
            return first, x[torch.multinomial(q, 3)] + 1

        graph = self.compile(fn, (8, "cuda"), (8, "cpu"))
        self.assertEqual(re.findall(r"multinomial\.default\(\w+, (\d)\)", graph.source), ["2", "3"])

    def test_elements_of_a_result_stay_with_their_operator(self) -> None:
        """No partition takes the list that an operator returns."""

        def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(y.sin() for y in torch.ops.test_upstream_fixes.pair(x.cos()))

        graph = self.compile(fn, ((8, 8), "cuda"), custom_should_partition_ops=["test_upstream_fixes::pair"])
        (returned,) = re.findall(r"(buf\d+) = torch\.ops\.", graph.source)
        for args in re.findall(r"partition\d+_args = \[(.*)\]", graph.source):
            self.assertNotIn(returned, re.findall(r"\w+", args))

    def test_list_is_freed_in_its_partition(self) -> None:
        """A view that aliases the list of its operator is used by another partition."""

        def fn(x: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten.view.dtype(x + 1, torch.float8_e4m3fn).cpu().cuda()

        graph = self.compile(fn, (2, "cuda", torch.int32))
        captured, _, runner = graph.source.partition("class Runner")
        (returned,) = re.findall(r"(buf\d+) = torch\.ops\.", captured)
        self.assertIn(f"del {returned}\n", captured)
        self.assertNotIn(returned, runner)

    @torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    def test_size_of_a_result(self) -> None:
        """The partition takes the symbol, and not the list that gives it."""

        def fn(x: torch.Tensor) -> torch.Tensor:
            values, counts = torch.ops.test_upstream_fixes.distinct(x.sin())
            return (values * counts).sum()

        graph = self.compile(fn, (8, "cuda"), raises=DynamicOutputShapeException)
        runner = graph.source.partition("class Runner")[2]
        (returned,) = re.findall(r"(buf\d+) = torch\.ops\.", runner)
        self.assertNotRegex(graph.source, rf"(return|args).*\b{returned}\b")

    @torch._dynamo.config.patch(capture_scalar_outputs=True)
    def test_integer_that_is_read(self) -> None:
        """The partition takes the symbol, and not the None that item() gives besides."""
        fn = lambda x, n: x * n.item() + 1  # noqa: E731
        graph = self.compile(fn, (8, "cuda"), ((), "cpu", torch.int64), raises=DataDependentOutputException)
        runner = graph.source.partition("class Runner")[2]
        FileCheck().check("u0 = ").check_regex(r"partition0_args = \[arg\d+_1, u0\]").run(runner)


class LoopFusionTest(FixesTestCase):
    def test_added_dependencies_are_kept(self) -> None:
        """A loop that is given the sizes of another one still waits for the readers of what it writes."""

        def fn(v: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y, z = torch.arange(4)[:, None] * u, v @ v
            v.copy_(u)
            return y, z

        v, u = torch.randn(4, 4), torch.randn(4, 4)
        expected = fn(v.clone(), u)
        self.assertEqual(torch.compile(fn)(v, u), expected)


class CondTest(FixesTestCase):
    def test_gradients_of_two(self) -> None:
        """A branch overwrites no operand, which the other torch.cond reads."""

        def inner(x):
            return torch.cond(x.sum() > 0, lambda x: x.exp(), lambda x: x.neg(), (x,))

        x = torch.ones(4, requires_grad=True)
        torch.compile(lambda x: inner(x) + inner(-x))(x).sum().backward()
        self.assertEqual(x.grad, torch.full((4,), torch.e + 1))

    @parametrize("backend", (None, "aot_eager"))
    def test_random_gradient(self, backend) -> None:
        """The backward would draw another mask than the forward."""

        def fn(x, function):
            return torch.cond(x.sum() > 0, function, lambda x: x.cos(), (x,))

        if backend is not None:
            fn = torch.compile(fn, backend=backend)
        x = torch.ones(16, requires_grad=True)
        with self.assertRaisesRegex(RuntimeError, "depends on random numbers"):
            fn(x, lambda x: torch.nn.functional.dropout(x, 0.5)).sum().backward()
        fn(x, lambda x: x * x + torch.rand_like(x)).sum().backward()
        self.assertEqual(x.grad, torch.full((16,), 2.0))

    @parametrize("backend", ("eager", "aot_eager"))
    def test_gradient_next_to_integers(self, backend) -> None:
        """The backward takes no tangents of integers and bools."""

        def fn(x):
            positive, negative = lambda x: (x > 1, x.exp(), x.long()), lambda x: (x > 2, x.neg(), x.long() + 1)
            return torch.cond(x.sum() > 0, positive, negative, (x,))

        x = torch.ones(4, requires_grad=True)
        above, result, number = torch.compile(fn, backend=backend)(x)
        result.sum().backward()
        self.assertEqual((above, number, x.grad), (x > 1, x.long(), x.exp()))

    def test_operands_are_freed(self) -> None:
        """Whichever branch runs."""

        def fn(x):
            y = x @ x
            return torch.cond(x.sum() > 0, lambda y: y @ y, lambda y: y @ y + 1, (y,)).sin()

        _, (code,) = run_and_get_code(torch.compile(fn), torch.ones(4, 4))
        branches = re.search(r"\n +if .*_predicate:\n(.*\n){3}", code)
        self.assertIsNotNone(branches)
        self.assertNotIn("del ", branches[0])


class OverlapTest(FixesTestCase):
    """Inputs that a graph mutates, and that overlap each other in some calls."""

    def check(
        self,
        fn: Callable[..., torch.Tensor],
        compiled: Callable[..., torch.Tensor],
        inputs: Callable[[], tuple[torch.Tensor, ...]],
    ) -> None:
        actual, expected = inputs(), inputs()
        self.assertEqual(compiled(*actual), fn(*expected))
        self.assertEqual(actual, expected)

    @parametrize("backend", ("aot_eager", "inductor"))
    @parametrize("dynamic", (False, True))
    @parametrize("name", sorted(LAYOUTS))
    def test_overlap_is_guarded(self, backend, dynamic, name) -> None:
        compiled = torch.compile(double_and_add, backend=backend, dynamic=dynamic)
        for layout in LAYOUTS[name]:
            self.check(double_and_add, compiled, lambda: views(*layout) if layout else views(4, 0) + views(4, 0))

    def test_input_that_is_not_mutated_overlaps(self) -> None:
        """The graph of a base has the offsets of all views of the base's memory."""

        def fn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            a.add_(1)
            return a.sum() + b * c

        compiled = torch.compile(fn, backend="aot_eager")
        for inputs in (
            lambda: views(12, 0, 2, 8),
            lambda: views(12, 0, 2, 7),
            lambda: views(12, 0, 2) + views(4, 0),
        ):
            self.check(fn, compiled, inputs)

    def test_overlap_is_in_the_key_of_the_cache(self) -> None:
        for layout in ((8, 0, 2), (8, 0, 1), (8, 0, 4), (9, 0, 2)):
            torch._dynamo.reset()
            self.check(double_and_add, torch.compile(double_and_add), lambda: views(*layout))
        self.assertEqual(counters["aot_autograd"]["autograd_cache_hit"], 0)
        # An entry brings its guards.
        torch._dynamo.reset()
        compiled = torch.compile(double_and_add)
        for layout in ((8, 0, 2), (8, 0, 1)):
            self.check(double_and_add, compiled, lambda: views(*layout))
        self.assertEqual(counters["aot_autograd"]["autograd_cache_hit"], 2)

    def test_graph_without_overlap_is_not_compiled_again(self) -> None:
        compiled = torch.compile(double_and_add, backend="aot_eager", dynamic=False)
        for inputs in (lambda: views(8, 0, 4), lambda: views(12, 5, 1), lambda: views(4, 0) + views(4, 0)):
            self.check(double_and_add, compiled, inputs)
        self.assertEqual(counters["stats"]["unique_graphs"], 1)

    @parametrize("backend", ("aot_eager", "inductor"))
    def test_view_of_a_merged_input(self, backend) -> None:
        def fn(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
            a.add_(100)
            return b[0], b.view(-1), b.t()

        def inputs() -> tuple[torch.Tensor, ...]:
            a = torch.arange(24.0).view(4, 6)
            return a, a[1:]

        self.check(fn, torch.compile(fn, backend=backend), inputs)

    def test_overlap_that_cannot_be_merged(self) -> None:
        def inputs() -> tuple[torch.Tensor, ...]:
            a = torch.ones(4, requires_grad=True) * 2
            return a, a.detach()

        self.check(double_and_add, torch.compile(double_and_add, backend="aot_eager"), inputs)

    @parametrize("dynamic", (False, True))
    def test_views_that_autograd_does_not_know(self, dynamic) -> None:
        compiled = torch.compile(double_and_add, dynamic=dynamic)
        with torch.inference_mode():
            self.check(double_and_add, compiled, lambda: views(8, 0, 2))

    def test_size_of_views_varies(self) -> None:
        """No tensor that the graph takes has this size."""
        compiled = torch.compile(double_and_add)
        for offsets, size in (((3, 4), 4), ((4, 6), 4), ((4, 6), 5)):
            self.check(double_and_add, compiled, lambda: views(12, *offsets, size=size))


class AsStridedTest(FixesTestCase):
    @parametrize("dynamic", (None, True))
    @parametrize("view", ("as_strided", "as_strided_copy"))
    def test_input_with_a_storage_offset(self, view, dynamic):
        def fn(x):
            return getattr(torch, view)(x, (3,), (1,), 6) + 0, x.as_strided((3,), (2,)) + 0

        compiled = torch.compile(fn, dynamic=dynamic)
        for n in (20, 24):
            x = torch.arange(float(n))[5 : n - 5]
            self.assertEqual(compiled(x), fn(x))

    def test_slice_that_a_custom_operator_writes(self):
        "All elements of the base stay but those that it writes, whether the operator writes a copy or not."
        def in_place(x):
            negate(x[1])
            return x.sum()

        def copied(x):
            y = x + 1
            negate(x)
            return y.mean(-1)

        for fn in (in_place, copied):
            compiled = torch.compile(fn)
            for _ in range(2):
                bases = [torch.arange(20.0) for _ in range(2)]
                expected, actual = (f(b[2:18].view(4, 4)) for f, b in zip((fn, compiled), bases))
                self.assertEqual(actual, expected)
                self.assertEqual(*bases)


instantiate_parametrized_tests(AsStridedTest)


class ObjectTest(FixesTestCase):
    def test_dict_of_an_object(self) -> None:
        """It has the attributes that the frame has set."""
        config = Config()

        def fn(x):
            config.kind = "small"
            return x * config.twice() + len(config.__dict__), config.__dict__.get("kind")

        result = torch.compile(fn, backend="eager")(torch.ones(2))
        config = Config()
        self.assertEqual(result, fn(torch.ones(2)))


class CUDAGraphTreesTest(FixesTestCase):
    def test_config_is_asked_once_for_each_size(self) -> None:
        model = lambda inputs: [inputs[0] + 1]  # noqa: E731
        asked = []
        captures = lambda sizes: not asked.append(sizes)  # noqa: E731
        record = lambda model, inputs, *args, **kwargs: (model, model(inputs))  # noqa: E731
        with mock.patch.multiple(trees, is_cudagraph_capture_sizes=captures, cudagraphify=record):
            fn = trees.cudagraphify_impl(model, [torch.tensor(0), 3], ())
            for n in (3, 4, 3, 4, 3):
                self.assertEqual(fn([torch.tensor(n), n]), [torch.tensor(n + 1)])
        self.assertEqual(asked, [3, 4])

    def test_interrupt_once_a_graph_is_recorded(self) -> None:
        """The node does not keep the outputs of the interrupted call."""
        node = mock.MagicMock(recording_outputs=[torch.ones(1)])
        function = types.SimpleNamespace(pygraph=None)
        manager = mock.MagicMock(current_node=None, in_recording=False, ids_to_funcs={trees.FunctionID(0): function})
        with (
            mock.patch.object(trees, "CUDAGraphNode", return_value=node),
            mock.patch.object(torch.cuda, "synchronize", side_effect=[None, KeyboardInterrupt]),
            self.assertRaises(KeyboardInterrupt),
        ):
            trees.CUDAGraphTreeManager.record_function(manager, [], trees.FunctionID(0))
        self.assertIsNone(node.recording_outputs)

    def test_warm_up_that_raises(self) -> None:
        """The next call of the program can end the path."""
        function = types.SimpleNamespace(model=mock.Mock(side_effect=torch.OutOfMemoryError), constants=())
        manager = mock.MagicMock(
            current_node=None,
            device_index=0,
            disable_invalidate_aliases=True,
            ids_to_funcs={trees.FunctionID(0): function},
            ids_to_stack_traces={trees.FunctionID(0): ["of an output"]},
        )
        with (
            mock.patch.object(torch.cuda, "device"),
            mock.patch.object(trees, "check_memory_pool"),
            mock.patch.object(trees, "clear_cublas_manager"),
            mock.patch.object(trees, "disable_conv_cache_emptying"),
            mock.patch.object(trees, "_use_cuda_memory_pool_manager"),
            self.assertRaises(torch.OutOfMemoryError),
        ):
            trees.CUDAGraphTreeManager.run_eager(manager, [], trees.FunctionID(0))
        trees.CUDAGraphTreeManager.dealloc_current_path_weakrefs(manager)

    def test_thread_that_imports_trees_ends(self) -> None:
        """Its storage gives back references that it had."""
        program = """if True:
            import os, sys, threading, torch
            threads = len(os.listdir("/proc/self/task"))
            kept = []

            def first():
                from torch._inductor.cudagraph_trees import local
                kept.extend((local.tree_manager_containers, local.tree_manager_locks))

            thread = threading.Thread(target=first)
            thread.start()
            thread.join()
            while len(os.listdir("/proc/self/task")) > threads:
                pass
            print(*[sys.getrefcount(x) for x in kept], flush=True)
            # A count that is too low crashes the interpreter later.
            os._exit(0)
        """
        printed = subprocess.check_output([sys.executable, "-c", program], text=True)
        # The list's, the name's and the argument's.
        self.assertEqual(printed.split(), ["3", "3"])


class DeviceTest(FixesTestCase):
    def test_current_device(self) -> None:
        """Once CUDA is initialized, nobody asks which accelerators are available."""
        unavailable = AssertionError("asked for an accelerator")
        with (
            mock.patch("torch.cuda.is_available", side_effect=unavailable),
            mock.patch("torch.cuda.is_initialized", return_value=True),
            mock.patch("torch.cuda.current_device", return_value=1),
        ):
            self.assertEqual(torch.cuda._utils._get_device_index(None, optional=True), 1)
            self.assertEqual(torch.cuda._utils._get_device_index("cuda:3", optional=True), 3)


class DistributedTest(FixesTestCase):
    def test_specs_of_scalars(self) -> None:
        """The steps of an optimizer's parameters have one spec."""
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        self.addCleanup(dist.destroy_process_group)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

        def step() -> None:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

        step()
        init = DTensorSpec.__init__
        with mock.patch.object(DTensorSpec, "__init__", autospec=True, side_effect=init) as described:
            step()
        self.assertEqual(described.call_count, 1)
        self.assertEqual({float(state["step"]) for state in optimizer.state.values()}, {2.0})

    def test_ranges_of_fsdp(self) -> None:
        """The hooks of fully_shard enter ranges of the profiler only while it runs."""
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        self.addCleanup(dist.destroy_process_group)
        model = torch.nn.Linear(4, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))

        def step() -> None:
            model(torch.ones(2, 4)).sum().backward()

        step()
        enter = torch.autograd.profiler.record_function.__enter__
        with mock.patch.object(torch.autograd.profiler.record_function, "__enter__", autospec=True, side_effect=enter) as entered:
            step()
            self.assertEqual(entered.call_count, 0)
            with torch.profiler.profile() as profile:
                step()
        names = [event.name for event in profile.events() if event.is_user_annotation]
        for name in ("root_pre_forward", "all_gather", "post_forward", "pre_backward", "post_backward_reduce"):
            self.assertTrue(any(f"FSDP::{name}" in found for found in names), name)


instantiate_parametrized_tests(DynamoTest)
instantiate_parametrized_tests(FloatTest)
instantiate_parametrized_tests(CondTest)
instantiate_parametrized_tests(OverlapTest)

if __name__ == "__main__":
    if HAS_CPU:
        run_tests()
