# Owner(s): ["module: inductor"]
"""Loops that ask a tensor: compiled functions have the results, gradients, changes and errors of eager mode."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import linecache
import textwrap
import traceback
import types
from typing import Any, TYPE_CHECKING
from unittest import mock

import hypothesis
from hypothesis import given, HealthCheck, settings, strategies as st

import torch
import torch._dynamo
from torch._dynamo.code_context import code_context
from torch._dynamo.utils import counters
from torch._inductor.pygraph.dynamo import loops
from torch._inductor.pygraph.dynamo.branches import Branches
from torch._inductor.pygraph.dynamo.flow import Flow
from torch._inductor.pygraph.dynamo.outlining import Outlining, StaysError
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, subtest
from torch.testing._internal.inductor_utils import HAS_CPU
from torch.testing._internal.pygraph_common import as_is


if TYPE_CHECKING:
    from collections.abc import Callable

BRANCH = Branches.branch
LOG: list[Any] = []
THIS = __file__


def outcome(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return all that a program can see of a call."""
    args = copy.deepcopy(args)
    LOG.clear()
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            result = fn(*args)
        except Exception as e:  # noqa: BLE001
            lines = [(f.lineno, f.line) for f in traceback.extract_tb(e.__traceback__) if f.filename == THIS]
            return type(e), str(e), lines[-1], args, [*LOG], printed.getvalue()
    tensors = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    needs = [t.requires_grad for t in tensors]
    if any(needs):
        sum(t.sum() * (i + 1) for i, t in enumerate(tensors) if t.requires_grad).backward()
    gradients = [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
    same = [[i for i, a in enumerate(args) if a is t] for t in tensors]
    return result, needs, gradients, same, args, [*LOG], printed.getvalue(), torch.get_rng_state()


# Programs of a tensor and a number


def while_below(x, n):
    y = x * 2
    while x.sum() < n:
        x = x + 1
    return x + y


def clock(x, n):
    dt = torch.tensor(1.0 / 8)
    t = torch.tensor(1.0)
    while t >= dt / 2:
        x = x - dt * (x * t).sin()
        t = t - dt
    return x


def while_not(x, n):
    done = x.sum() > n
    while not done:
        x = x + 1
        done = x.sum() > n
    else:
        x = x.sin()
    return x


def while_with_number(x, n):
    turns = 0
    while x.sum() < n and turns < 7:
        x = x + 0.5
        turns += 1
    return x, turns


def while_with_number_first(x, n):
    turns = 0
    while turns < 7 and x.sum() < n:
        x = x + 0.5
        turns += 1
    return x, turns


def while_of_values(x, n):
    while x.sum() < n or x.min() < 0:
        x = x.abs() + 1
    return x


def while_true(x, n):
    k = 0
    while True:
        x = x + 1
        k += 1
        if x[0] % 2 > 1:
            continue
        if x.sum() > n:
            break
    return x, k


def while_with_floats(x, n):
    t = 0.0
    while x.sum() < n:
        t += 0.25
        x = x + t
    return x, t


def for_break(x, n):
    for i in range(6):
        x = x * 1.5
        if x.sum() > n:
            break
        x = x + i
    else:
        x = x - 1
    return x


def for_break_first(x, n):
    for _ in range(6):
        if x.sum() > n:
            break
        x = x + 1
    return x


def for_return(x, n):
    for i in range(6):
        x = x + i
        if x.sum() > n:
            return x.sin(), i
    return x.cos(), None


def for_continue(x, n):
    kept = x
    for i in range(5):
        x = x + 1
        if x.sum() < n:
            continue
        kept = kept * x
    return kept


def no_turn(x, n):
    for i in range(n - n):
        last = x + i
        if last.sum() > 0:
            break
    return last


def value_of_last_turn(x, n):
    for i in range(4):
        last = x + i
        if last.sum() > n:
            break
    return last, i


def deletes(x, n):
    for i in range(4):
        y = x + i
        x = y * 2
        del y
        if x.sum() > n:
            del i
            break
    return x


def reads_deleted(x, n):
    for i in range(4):
        x = x + 1
        if x.sum() > n:
            del i
            break
    return x, i


def swaps(x, n):
    a, b = x, x + 1
    while a.sum() < n:
        a, b = b, a + b + 1
    return a, b


def returns_argument(x, n):
    y = x
    while y.sum() < n:
        y = y + 1
    return y


def nested_loops(x, n):
    for i in range(4):
        for j in range(i):
            if x.sum() > n:
                break
            x = x + j
        else:
            x = x + 1
            continue
        x = x + 100
    return x, i


def while_in_for(x, n):
    for scale in (1.0, 2.0, 3.0):
        y = x * scale
        while y.sum() < n:
            y = y + scale
        x = x + y
    return x


def two_loops(x, n):
    while x.sum() < n:
        x = x + 1
    y = x.sin()
    for _ in range(5):
        y = y + x
        if y.sum() > 2 * n:
            break
    return x, y


def loop_before(x, n):
    total = 0
    for i in range(3):
        total = total + x * i
    while x.sum() < n:
        for k in range(2):
            x = x + total * k
        x = x + 1
    return x


def generator_items(x, n):
    def numbers():
        for i in itertools.count():
            LOG.append(i)
            yield i

    for i in numbers():
        x = x + i
        if x.sum() > n:
            break
    return x


class Items:
    def __iter__(self):
        LOG.append("iter")
        self.count = 0
        return self

    def __next__(self):
        self.count += 1
        LOG.append(self.count)
        if self.count > 4:
            raise StopIteration
        return self.count


def object_items(x, n, items=Items()):
    for i in items:
        x = x + i
        if x.sum() > n:
            break
    return x


def iterator_goes_on(x, n):
    numbers = iter([1, 2, 3, 4, 5, 6])
    for i in numbers:
        x = x + i
        if x.sum() > n:
            break
        x = x + next(numbers)
    return x, list(numbers)


def zipped(x, n):
    for i, (a, b) in enumerate(zip([1, 2, 3], [x, x + 1, x + 2])):
        x = x + a * b
        if x.sum() > n:
            break
    return x, i


def dict_items(x, n):
    table = {"a": 1, "b": 2, "c": 3}
    for key, value in table.items():
        x = x + value
        if x.sum() > n:
            break
        table[key] = x
    return x, table


def appends(x, n):
    found = []
    while x.sum() < n:
        x = x + 4
        found.append(x)
    return found


def list_of_turn(x, n):
    while x.sum() < n:
        found = []
        for k in range(3):
            found.append(x * k + 1)
        x = x + sum(found)
    return x + n


def appends_to_alias(x, n):
    kept = []
    while x.sum() < n:
        x = x + 4
        found = kept
        found.append(x)
    return kept


def appends_or_begins(x, n):
    found = []
    while x.sum() < n:
        x = x + 4
        if len(found) > 1:
            found = []
        found.append(x)
    return x


def mutates(x, n):
    while x.sum() < n:
        x += 1
    return x


def stores_attribute(x, n, box=types.SimpleNamespace(value=None)):
    box.value = x
    while box.value.sum() < n:
        box.value = box.value + 1
    return box.value


def closure(x, n):
    step = x * 0 + 1

    def add(y):
        return y + step

    while x.sum() < n:
        x = add(x)
    return x


def stores_cell(x, n):
    count = 0

    def get():
        return count

    while x.sum() < n:
        x = x + 1
        count += 1
    return x, get()


def calls(x, n):
    def go_on(y):
        return bool(y.sum() < n)

    while go_on(x):
        x = x + 1
    return x


def is_unfinished(is_done):
    if is_done:
        return False
    return True


def asks_function(x, n):
    """As beam search asks, in a loop whose turns differ in the length of a list"""
    is_done, found = False, []
    while is_unfinished(is_done):
        x = inner_of_turn(x)
        found.append(x)
        is_done = x.sum() > n
    return found


def inner_of_turn(x):
    return (x + 1).abs()


def items(x, n):
    while x.sum().item() < n:
        x = x + 1
    return x


def inner(x, n):
    while x.sum() < n:
        x = x + 1
    return x * 2


def in_call(x, n):
    return inner(x.sin(), n).cos()


def in_call_in_loop(x, n):
    for _ in range(3):
        x = inner(x - n, n)
    return x


def without_gradient(x, n):
    with torch.no_grad():
        while x.sum() < n:
            x = x + 1
    return x * 2


def return_without_gradient(x, n):
    with torch.no_grad():
        for i in range(7):
            x = x + i
            if x.sum() > n:
                return x.sin()
    return x * 2


def gradient_inside(x, n):
    y = x
    while y.sum() < n:
        with torch.no_grad():
            step = y.detach() * 0 + 1
        y = y + step * x.sigmoid()
    return y


def changes_gradient(x, n):
    y = x
    while y.sum() < n:
        torch.set_grad_enabled(not torch.is_grad_enabled())
        y = y + x.sigmoid() + 1
    torch.set_grad_enabled(True)
    return y


def draws(x, n):
    while x.sum() < n:
        x = x + torch.rand(3)
    return x


def prints(x, n):
    while x.sum() < n:
        x = x + 1
        print("sum", x.sum().item())
        LOG.append(x.shape)
    return x


def raises(x, n):
    for i in range(6):
        x = x + 1
        if x.sum() > n:
            raise ValueError(f"turn {i}")
    return x


def raises_in_operator(x, n):
    while x.sum() < n:
        x = torch.cat([x, x])
        x[:5].view(5)
    return x


def reciprocal(i):
    return 1 / (3 - i)


def raises_in_item(x, n):
    for y in map(reciprocal, range(6)):
        x = x + y
        if x.sum() > 10 * n:
            break
    return x


def catches(x, n):
    k = 0
    try:
        while x.sum() < n:
            x = x + 1
            k += 1
            if k == 3:
                raise ValueError(k)
    except ValueError as e:
        return x, k, type(e)
    return x, k


def catches_inside(x, n):
    k = 0
    while x.sum() < n:
        try:
            x = x + 1
            k += 1
            if k % 2:
                raise ValueError(k)
        except ValueError:
            x = x + 0.5
        finally:
            LOG.append(k)
    return x, k


def breaks_in_try(x, n):
    while True:
        try:
            x = x + 1
            if x.sum() > n:
                break
        finally:
            LOG.append(1)
    return x


def suppresses(x, n):
    k = 0
    with contextlib.suppress(ValueError):
        while x.sum() < n:
            x = x + 1
            k += 1
            if k == 2:
                raise ValueError
    return x, k


def maybe_unbound(x, n):
    for i in range(5):
        if x.sum() > n:
            break
        y = x = x + 1
    return y


def unbound_in_turn(x, n):
    for i in range(5):
        if i > 2:
            x = x + y  # noqa: F821
        y = x + i
        if y.sum() > n:
            break
    return x


def comprehension(x, n):
    y = 5
    while x.sum() < n:
        parts = [x + y for y in range(3)]
        x = parts[0] + parts[1] + 1
    return x, y


def comprehension_behind(x, n):
    y = 0
    while x.sum() < n:
        y = y + 1
        x = x + 1
    parts = [x + y for y in range(3)]
    return y, parts


def item_of_bool(x, n):
    while (x.sum() < n).item():
        x = x + 1
    return x


def filtered(x, n):
    return [x + i for i in range(4) if (x + i).sum() > n]


def branch_in_turn(x, n):
    for i in range(8):
        if x[0] > 2:
            x = x + 1
        else:
            x = x + i
        if x.sum() > n:
            break
    return x


def break_in_branch(x, n):
    for _ in range(8):
        if x[0] > 2:
            x = x + 1
            if x.sum() > n:
                break
        else:
            x = x + 2
    return x


def break_in_else(x, n):
    for i in range(8):
        if x[0] < 2:
            x = x + 2
        else:
            break
    return x * i


def unrolled_in_path(x, n):
    if x.sum() > 0:
        for i in range(3):
            x = x * 2 + i
    else:
        x = x - 1
    return x


def loop_in_path(x, n):
    if x.sum() > 0:
        while x.sum() < n:
            x = x + 1
    else:
        x = x - 1
    return x


def break_then_raise(x, n):
    for _ in range(3):
        if (x.sum() > n).item():
            x = x - 1
        else:
            break
        x = x * 2
    raise ValueError(f"behind {x.sum()}")


def store_break_then_raise(x, n):
    k = 0
    for i in range(3):
        if (x.sum() > n).item():
            k = i + 5
            break
        x = x * 2
    raise ValueError(f"behind {x.sum()} {k}")


def break_out_of_with_then_raise(x, n):
    for _ in range(3):
        with torch.no_grad():
            x = x + 1
            if (x.sum() > n).item():
                break
        x = x * 2
    raise ValueError(f"behind {x.sum()} {torch.is_grad_enabled()}")


def inner_break_then_raise(x, n):
    for i in range(2):
        for _ in range(3):
            if (x.sum() > n).item():
                break
            x = x + i
        else:
            continue
        raise ValueError(f"behind {x.sum()}")
    return x


# What follows these loops only raises.
RAISE_BEHIND = (break_then_raise, store_break_then_raise, break_out_of_with_then_raise, inner_break_then_raise)

# Programs with loops and branches on tensors, and the number of their graphs
BRANCHES = {branch_in_turn: 3, break_in_branch: 4, break_in_else: 5, unrolled_in_path: 1, loop_in_path: 6}
BRANCHES |= {item_of_bool: 4}


class Policy(torch.nn.Module):
    """A flow-matching policy whose clock is a tensor."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 3)

    def forward(self, x, n):
        time = torch.ones(())
        dt = -1.0 / 5
        while time >= -dt / 2:
            velocity = self.net(torch.cat([x, time[None]]))
            x = x + dt * velocity
            time = time + dt
        return x * n


COMPILED = (
    (while_below, clock, while_not, while_with_number, while_with_number_first, while_of_values, while_true)
    + (while_with_floats, for_break, for_break_first, for_return, for_continue, value_of_last_turn, deletes)
    + (reads_deleted, swaps, returns_argument, nested_loops, while_in_for, two_loops, loop_before, object_items)
    + (iterator_goes_on, calls, items, mutates, closure, in_call, without_gradient, return_without_gradient)
    + (gradient_inside, changes_gradient, draws, prints, raises_in_operator, raises_in_item, catches_inside)
    + (comprehension, comprehension_behind, list_of_turn)
)

# Programs that run as without PyGraph, as far as their loops go.
STAY = (no_turn, generator_items, zipped, stores_attribute, stores_cell, catches, appends, dict_items) + (
    breaks_in_try,
    suppresses,
    maybe_unbound,
    filtered,
    appends_to_alias,
    appends_or_begins,
)

# Programs whose turns differ in numbers or floats only.
TURNS = (while_below, clock, while_with_number, while_true, while_with_floats, for_break_first, list_of_turn)


def named(programs: tuple[Callable[..., Any], ...]) -> list[Any]:
    return [subtest(p, name=p.__name__) for p in programs]


class LoopTest(TestCase):
    """Graphs run as Dynamo made them."""

    def setUp(self) -> None:
        super().setUp()
        torch._dynamo.reset()
        counters.clear()
        backend = mock.patch.object(torch._TorchCompileInductorWrapper, "__call__", as_is)
        backend.start()
        self.addCleanup(backend.stop)
        # The host knows the values of these tensors, and would unroll the loops.
        branches = mock.patch.object(Branches, "branch", return_value=None)
        branches.start()
        self.addCleanup(branches.stop)

    def num_graphs(self) -> int:
        return counters["stats"]["unique_graphs"]

    def check(self, fn: Callable[..., Any], calls: list[tuple[Any, ...]], **options: Any) -> None:
        compiled = torch.compile(fn, options={"pygraph": True, **options})
        for args in calls:
            torch.manual_seed(0)
            expected = outcome(fn, args)
            torch.manual_seed(0)
            self.assertEqual(outcome(compiled, args), expected, msg=lambda text, args=args: f"{args}: {text}")

    @parametrize("program", named((*COMPILED, *STAY, raises, in_call_in_loop, unbound_in_turn)))
    def test_equals_eager(self, program: Callable[..., Any]) -> None:
        x = torch.tensor([0.5, 1, -1])
        y = torch.ones(3, requires_grad=program is not mutates)
        with mock.patch.object(loops, "rewritten", wraps=loops.rewritten) as rewrite:
            self.check(program, [(x, 20), (x, -3), (y, 40)])
        if program in COMPILED:
            rewrite.assert_called()
            self.assertGreater(self.num_graphs(), 0)

    @parametrize("program", named(STAY))
    def test_stays(self, program: Callable[..., Any]) -> None:
        """Loops that PyGraph leaves to stock have the graphs of stock."""
        calls = [(torch.tensor([0.5, 1, -1]), 20)]
        self.check(program, calls)
        found = self.num_graphs()
        torch._dynamo.reset()
        counters.clear()
        self.check(program, calls, pygraph_mend=False)
        self.assertEqual(found, self.num_graphs())

    def test_function_of_the_condition(self) -> None:
        """In a function that a loop asks, the graph breaks as in stock: what the loop calls is compiled for all turns."""
        with mock.patch.multiple(Branches, branch=BRANCH, _decide=lambda *args: None):
            self.check(asks_function, [(torch.zeros(3), 50)])
        found = self.num_graphs()
        torch._dynamo.reset()
        counters.clear()
        self.check(asks_function, [(torch.zeros(3), 50)], pygraph_mend=False)
        self.assertEqual(found, self.num_graphs())

    @parametrize("program", named(TURNS))
    def test_turns_compile_nothing(self, program: Callable[..., Any]) -> None:
        self.check(program, [(torch.zeros(3), 9), (torch.zeros(3), 12)])
        found = self.num_graphs()
        self.check(program, [(torch.zeros(3), 100), (torch.zeros(3), 200)])
        self.assertEqual(self.num_graphs(), found)

    def test_many_turns(self) -> None:
        """Turns do not nest: code that resumed in a loop would call itself in each turn."""
        self.check(while_below, [(torch.zeros(3), 6000)])

    def test_many_turns_of_known_values(self) -> None:
        with mock.patch.object(Branches, "branch", BRANCH):
            self.check(while_below, [(torch.zeros(3), 600)])
        # Without the loop, the code before it, and that behind it
        self.assertLessEqual(self.num_graphs(), 3)

    @parametrize("program", named(RAISE_BEHIND))
    def test_raises_behind(self, program: Callable[..., Any]) -> None:
        """A break leads to code that only raises. It takes the iterator off the stack, and is not in the body."""
        self.check(program, [(torch.full((3,), value), 2) for value in (-1.0, 0.5, 1.0)])
        found = [*code_context.get_context(program.__code__)["pygraph_loops"].values()]
        self.assertEqual([*map(type, found)], [types.CodeType])

    @parametrize("program", named((*BRANCHES,)))
    def test_branches(self, program: Callable[..., Any]) -> None:
        """A branch in a loop, and a loop in a path, are traced as they are alone."""
        calls = [(torch.full((3,), float(value)), n) for n in (9, 40, 200) for value in (1, -2)]
        with mock.patch.multiple(Branches, branch=BRANCH, _decide=lambda *args: None):
            self.check(program, calls)
        self.assertEqual(self.num_graphs(), BRANCHES[program])

    def test_module(self) -> None:
        policy = Policy()
        x = torch.ones(3, requires_grad=True)
        for step in range(2):
            found = []
            for fn in (policy, torch.compile(policy, options={"pygraph": True})):
                policy.zero_grad()
                result = outcome(fn, (x, 2))
                found.append((result[:5], [p.grad.clone() for p in policy.parameters()]))
            self.assertEqual(*found)
        # Before the loop, in a turn, and behind the loop. The first turn's x is a leaf.
        self.assertLessEqual(self.num_graphs(), 4)

    def test_condition_is_read_by_the_caller_of_the_body(self) -> None:
        """A turn that ends with the condition is one graph, and no code resumes in it."""
        self.check(clock, [(torch.ones(3), 0)])
        self.assertEqual(self.num_graphs(), 2)
        self.assertEqual(len([*counters["resumes"]]), 1)

    @parametrize("options", [{"pygraph": False}, {"pygraph": True, "pygraph_mend": False}])
    def test_off(self, options: dict[str, Any]) -> None:
        with mock.patch("torch._inductor.pygraph.dynamo.loops.with_function") as rewrite:
            torch.compile(for_break, options=options)(torch.ones(3), 9)
            torch.compile(clock, options=options)(torch.ones(3), 9)
        rewrite.assert_not_called()

    def test_full_graph(self) -> None:
        compiled = torch.compile(for_break, options={"pygraph": True}, fullgraph=True)
        with self.assertRaisesRegex(torch._dynamo.exc.Unsupported, "Data-dependent branching"):
            compiled(torch.ones(3), 9)

    @settings(max_examples=10, deadline=None, suppress_health_check=[*HealthCheck])
    @given(st.data())
    def test_random(self, data: st.DataObject) -> None:
        torch._dynamo.reset()
        # Without PyGraph, too, Dynamo fails where a variable without a value is deleted.
        fn = Writer(data, deletes=False).function()
        calls = [(torch.tensor(a), b) for a, b in ((3, 1), (0, 2), (7, 5))]
        self.check(fn, calls)


class CodeTest(TestCase):
    """The code with a function for the body does what the code does. Nothing is traced."""

    @settings(max_examples=50, deadline=None, suppress_health_check=[*HealthCheck])
    @given(st.data())
    def test_random(self, data: st.DataObject) -> None:
        fn = Writer(data, deletes=True).function()
        flow = Flow(fn.__code__)
        for loop in flow.loops():
            hypothesis.event("loop")
            try:
                code = Outlining(flow, loop).code()
            except StaysError:
                continue
            hypothesis.event("rewritten loop")
            rewritten = types.FunctionType(code, fn.__globals__, fn.__name__)
            for args in itertools.product((-3, 1, 4), (1, 5)):
                self.assertEqual(outcome(rewritten, args), outcome(fn, args))


class Writer:
    """Writes a function of ``x`` and ``n`` with loops, by what hypothesis draws. All loops end."""

    def __init__(self, data: st.DataObject, *, deletes: bool) -> None:
        self.data = data
        self.deletes = deletes
        self.number = itertools.count()

    def choose(self, *options: Any) -> Any:
        return self.data.draw(st.sampled_from(options))

    def function(self) -> Callable[..., Any]:
        body = self.block(0, in_loop=False)
        lines = ["def program(x, n):", "    a = x + 1", *textwrap.indent("\n".join(body), "    ").split("\n")]
        lines.append(f"    return {self.choose('x', 'x, a', 'x, b', 'x, n, c')}")
        source = "\n".join(lines) + "\n"
        name = f"<program {hash(source)}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        scope = {"LOG": LOG, "contextlib": contextlib}
        exec(compile(source, name, "exec"), scope)  # noqa: S102
        return scope["program"]

    def block(self, depth: int, *, in_loop: bool) -> list[str]:
        lines = []
        for _ in range(self.data.draw(st.integers(1, 3))):
            lines += self.statement(depth, in_loop)
        return lines

    def value(self) -> str:
        return self.choose("x + 1", "a * 2 - x", "a + n", "x - a", "b + x", "x % 5 + c", "a % 7")

    def condition(self) -> str:
        return self.choose("x > 3", "a % 3 == 1", "n > 2", "x % 2 == 0 and a > 1", "not a > x", "x < 2 or n < 2")

    def statement(self, depth: int, in_loop: bool) -> list[str]:
        kinds = ["assign"] * 4 + ["log", "delete"]
        if depth < 3:
            kinds += ["if", "if", "for", "while", "for", "while", "try", "with"]
        if in_loop:
            kinds += ["break", "break", "continue", "return"]
        kind = self.choose(*kinds)
        if kind == "assign":
            return [f"{self.choose('x', 'a', 'b', 'c')} = {self.value()}"]
        if kind == "log":
            return ["LOG.append(n)"]
        if kind == "delete":
            is_deleted = self.deletes and self.choose(*range(4)) == 0
            return [f"del {self.choose('a', 'b', 'c')}" if is_deleted else "n = 4 - n"]
        if kind in ("break", "continue", "return"):
            return [f"if {self.condition()}:", f"    {kind} {'x, a' if kind == 'return' else ''}".rstrip()]
        return getattr(self, f"write_{kind}")(depth + 1, in_loop)

    def inner(self, depth: int, in_loop: bool) -> list[str]:
        return ["    " + line for line in self.block(depth, in_loop=in_loop)]

    def write_if(self, depth: int, in_loop: bool) -> list[str]:
        lines = [f"if {self.condition()}:", *self.inner(depth, in_loop)]
        return lines + (["else:", *self.inner(depth, in_loop)] if self.choose(True, False) else [])

    def write_for(self, depth: int, in_loop: bool) -> list[str]:
        items = self.choose("range(3)", "range(n)", "[1, 2]", "enumerate(range(2))", "iter((1, 2, 3))")
        names = "b, c" if "enumerate" in items else self.choose("b", "i")
        lines = [f"for {names} in {items}:", *self.inner(depth, True)]
        return lines + (["else:", *self.inner(depth, in_loop)] if self.choose(True, False) else [])

    def write_while(self, depth: int, in_loop: bool) -> list[str]:
        turns = f"t{next(self.number)}"
        lines = [f"{turns} = x * 0", f"while {self.choose(f'{turns} < 4', f'{turns} < 3 and ({self.condition()})')}:"]
        lines += [f"    {turns} = {turns} + 1", *self.inner(depth, True)]
        return lines + (["else:", *self.inner(depth, in_loop)] if self.choose(True, False) else [])

    def write_try(self, depth: int, in_loop: bool) -> list[str]:
        lines = ["try:", *self.inner(depth, in_loop), f"    if {self.condition()}:", "        raise ValueError(n)"]
        lines += ["except ValueError:", *self.inner(depth, in_loop)]
        return lines + (["finally:", "    LOG.append(1)"] if self.choose(True, False) else [])

    def write_with(self, depth: int, in_loop: bool) -> list[str]:
        return ["with contextlib.nullcontext():", *self.inner(depth, in_loop)]


instantiate_parametrized_tests(LoopTest)

if __name__ == "__main__" and HAS_CPU:
    run_tests()
