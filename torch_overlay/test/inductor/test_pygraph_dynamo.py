# Owner(s): ["module: inductor"]
"""
What Dynamo does around the graphs of PyGraph: bytecode of graph breaks, guards, and the
backend of its callback. Nothing is compiled, so that it runs anywhere.
"""

from __future__ import annotations

import collections
import contextlib
import dis
import gc
import math
import operator
import pathlib
import random
import sys
import types
import unittest
import weakref
from typing import Any, TYPE_CHECKING
from unittest import mock

import numpy as np

import torch
import torch._dynamo
from torch._dynamo.capabilities import BackendCapabilities, FrameExtension
from torch._dynamo.eval_frame import _debug_get_cache_entry_list, innermost_backend
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch._inductor.pygraph import native
from torch._inductor.pygraph.dynamo import obstacles
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    subtest,
)
from torch.utils.checkpoint import checkpoint


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PYGRAPH = {"pygraph": True}
requires_compiled = unittest.skipIf(native.compiled is None, "needs a C++ compiler")
graph_break = torch._dynamo.graph_break


def as_is(_self: Any, gm: torch.fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
    return gm.forward


class PyGraphTestCase(TestCase):
    def setUp(self) -> None:
        super().setUp()
        torch._dynamo.reset()
        backend = mock.patch.object(torch._TorchCompileInductorWrapper, "__call__", as_is)
        backend.start()
        self.addCleanup(backend.stop)

    def compile(self, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return torch.compile(fn, options=PYGRAPH | options)

    def num_graphs(self) -> int:
        return counters["stats"]["unique_graphs"]

    def final_code(self, fn: Callable[..., Any]) -> Any:
        return _debug_get_cache_entry_list(fn.__code__)[0].code


@torch._dynamo.disable
def opaque(*args: Any) -> Any:
    return args[0] if args else None


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


def raises_before_loop(x: torch.Tensor, n: int) -> Any:
    try:
        y = x[torch.tensor([n])] * 2
    except IndexError:
        y = x.sin()
    for row in y:
        opaque(row)
    return y


def local_by_name(x: torch.Tensor, n: int) -> Any:
    y = (x.sin() * 2 + 1).tanh()
    bound = n + 1
    for row in y:
        opaque(row)
    return y, "{bound}".format(**locals())


Pair = collections.namedtuple("Pair", "first second")


def not_rebuilt(x: torch.Tensor, n: int) -> Any:
    y = x.sin()
    pair = Pair(y, n)._replace(first=y + 1)
    for row in y:
        opaque(row)
    return pair.second


def not_traced_again(x: torch.Tensor, n: int) -> Any:
    generator = random.Random(n)
    y = (x.sin() * 2 + 1).tanh()
    for row in y:
        opaque(row)
    return y, generator.random()


class Numbers(set):
    pass


def rebuilt_empty(x: torch.Tensor, n: int) -> Any:
    y = (x.sin() * 2 + 1).tanh()
    numbers = Numbers([1, n])
    numbers.add(4)
    for row in y:
        opaque(row)
    return y, sorted(numbers)


def draws_as_numpy(x: torch.Tensor, n: int) -> Any:
    np.random.seed(n)
    y, drawn = x.sin(), np.random.rand(2)
    for row in y:
        opaque(row)
    return y, drawn


def raises_in_while_loop(x: torch.Tensor, n: int) -> Any:
    count = 0
    while count < 3:
        count += 1
        x = x * 2
        if count == 2:
            opaque(x)
        try:
            x = x[torch.tensor([n])]
        except IndexError:
            x = x + 100
    return x


def raises_in_suppress(x: torch.Tensor, n: int) -> Any:
    with contextlib.suppress(IndexError):
        x = x[torch.tensor([n])]
    y = x + 1
    for row in y:
        opaque(row)
    return y


def tries(x: torch.Tensor, n: int) -> Any:
    try:
        yield x[torch.tensor([n])]
    except IndexError:
        yield x.sin()


def raises_in_generator(x: torch.Tensor, n: int) -> Any:
    y = next(iter(list(tries(x, n)))) + 1
    for row in y:
        opaque(row)
    return y


# Not for pytest, which makes something else of an assertion.
exec(
    """
def asserts(x, n):
    assert (x > 10).all(), "small"
    y = x + n
    for row in y:
        opaque(row)
    return y
""",
    asserting := {"opaque": opaque},
)


def raises_after_effect(x: torch.Tensor, n: int) -> Any:
    found: list[int] = []

    def fails() -> None:
        found.append(n)
        y = x[torch.tensor([n])] + 1
        for row in y:
            opaque(row)

    # What the caller sees.
    with contextlib.suppress(IndexError):
        fails()
    return found


def deletes_argument(x: torch.Tensor, n: int) -> Any:
    y = x.sin() + n
    del n
    for row in y:
        opaque(row)
    try:
        return n  # noqa: F821
    except UnboundLocalError:
        return y


def starred(x: torch.Tensor, n: int) -> Any:
    first, *rest = [n, n + 1, 3]
    y = x.sin() + first
    for row in y:
        opaque(row)
    rest.append(4)
    return y, rest


def half_reversed(x: torch.Tensor, n: int) -> Any:
    numbers = reversed([1, 2, n])
    next(numbers)
    y = x.sin() + 1
    for row in y:
        opaque(row)
    return y, list(numbers)


def iterated_list_grows(x: torch.Tensor, n: int) -> Any:
    numbers = [1, n]
    rest = iter(numbers)
    next(rest)
    y = x.sin() + 1
    for row in y:
        opaque(row)
    numbers.append(3)
    return y, list(rest)


def dtype_of_numpy(x: torch.Tensor, n: int) -> Any:
    numbers = np.array([1, n], dtype=np.int16)
    half, total = numbers / 2, numbers.sum()
    y = x.sin() + 1
    for row in y:
        opaque(row)
    return y, half.dtype.name, type(total).__name__


def moves_to_end(x: torch.Tensor, n: int) -> Any:
    order = collections.OrderedDict.fromkeys("ab")

    def move() -> None:
        order.move_to_end("a")
        y = x.sin() + n
        for row in y:
            opaque(row)

    move()
    return list(order)


def repeats_list(x: torch.Tensor, n: int) -> Any:
    numbers = [1]

    def repeat(numbers: list[int]) -> None:
        numbers *= n
        y = x.sin() + 1
        for row in y:
            opaque(row)

    repeat(numbers)
    return numbers


class Logged:
    def __init__(self) -> None:
        self.log: list[int] = []

    @property
    def value(self) -> int:
        return len(self.log)

    @value.setter
    def value(self, value: int) -> None:
        self.log.append(value)


def sets_property(x: torch.Tensor, n: int) -> Any:
    logged = Logged()
    logged.value = 1
    logged.value = n
    y = x.sin() + 1
    for row in y:
        opaque(row)
    return y, logged.log


def annotates(x: torch.Tensor, n: int) -> Any:
    def number(a: int) -> str:
        return str(a)

    y = x.sin() + n
    for row in y:
        opaque(row)
    return y, sorted(number.__annotations__)


def formats(x: torch.Tensor, n: int) -> Any:
    text = f"{n:>5}", f"{n / 10}"
    y = x.sin() * n
    for row in y:
        opaque(row)
    return y, text


def rounds(x: torch.Tensor, n: int) -> Any:
    tens = round(n + 16, -1)
    y = x.sin() * n
    for row in y:
        opaque(row)
    return y, tens


def adds_in_order(x: torch.Tensor, n: int) -> Any:
    nothing = (n / 10 + 1e16) - 1e16
    y = x.sin() * n
    for row in y:
        opaque(row)
    return y, nothing


# Changed between calls.
ORDERED = collections.OrderedDict(a=1, b=2)
TENSOR = torch.ones(3)
NUMBER = np.float64(2)
SET = {8, 16}
DICT = {0.0: 1}


def merges(x: torch.Tensor, n: int) -> Any:
    merged = {**ORDERED}
    y = x.sin() + 1
    for row in y:
        opaque(row)
    return y, list(merged)


def as_text(x: torch.Tensor, n: int) -> Any:
    text = str(ORDERED)
    y = x.sin() + 1
    for row in y:
        opaque(row)
    return y, text


def asks_for_base(x: torch.Tensor, n: int) -> Any:
    has_base = TENSOR._base is not None
    y = x.sin() + 1
    for row in y:
        opaque(row)
    return y, has_base


class OneOfEach(type):
    made: dict[type, Any] = {}

    def __call__(cls) -> Any:
        if cls not in OneOfEach.made:
            OneOfEach.made[cls] = super().__call__()
        return OneOfEach.made[cls]


class Settings(metaclass=OneOfEach):
    def __init__(self) -> None:
        self.scale = 1


def makes_once(x: torch.Tensor, n: int) -> Any:
    settings = Settings()
    y = x.sin() * settings.scale + n
    for row in y:
        opaque(row)
    return y, settings is Settings()


NAN_KEY = {float("nan"): 1}


def guards_fail(x: torch.Tensor, n: int) -> Any:
    length = len(NAN_KEY) + n
    y = x.sin() + 1
    for row in y:
        opaque(row)
    return y, length


def attempt(fn: Callable[[], Any]) -> Any:
    try:
        return fn()
    except IndexError:
        return None


def raises_in_call(x: torch.Tensor, n: int) -> Any:
    index = torch.tensor([n])
    y = attempt(lambda: x[index] * 2)
    z = x.sin() + 1
    for row in z:
        opaque(row)
    return y, z


def starred_tail(numbers: list[int]) -> list[int]:
    _, *rest = numbers
    return rest


def starred_in_call(x: torch.Tensor, n: int) -> Any:
    rest = starred_tail([1, n, 3])
    y = x.sin() + 1
    for row in y:
        opaque(row)
    rest += [4]
    return y, rest


def in_call(made: Callable[[int], Any]) -> Callable[..., Any]:
    "A program that calls it, and lists the rest of what it made behind a loop."

    def program(x: torch.Tensor, n: int) -> Any:
        numbers = made(n)
        y = x.sin() + 1
        for row in y:
            opaque(row)
        return y, list(numbers)

    program.__name__ = made.__name__
    return program


def repeat(numbers: list[int], n: int) -> None:
    numbers *= n


@in_call
def repeats_list_in_call(n: int) -> Any:
    numbers = [1]
    repeat(numbers, n)
    return numbers


@in_call
def half_reversed_in_call(n: int) -> Any:
    numbers = reversed([1, 2, n])
    next(numbers)
    return numbers


def overwritten_in_loop(x: torch.Tensor, n: int) -> Any:
    numbers = [1, n]
    rest = iter(numbers)
    next(rest)
    y = x.sin() + 1
    found = None
    for row in y:
        if rest is not None:
            numbers.append(3)
            found, rest = list(rest), None
        opaque(row)
    return y, found


SCALE = torch.tensor(2.0)


def item_in_try(x: torch.Tensor, n: int) -> Any:
    try:
        y = x[torch.tensor([n])] * SCALE.item()
    except IndexError:
        y = x * SCALE.item()
    return y


def item_in_loop(x: torch.Tensor, n: int) -> Any:
    for _ in range(2):
        x = x * SCALE.item()
    _, *rest = [n, n + 1, 3]
    rest.append(4)
    return x, rest


def slice_before_try(x: torch.Tensor, n: int) -> Any:
    y = x.sin()[: torch.tensor(2)]
    try:
        z = x[torch.tensor([n])]
    except IndexError:
        z = x
    return y, z


def slice_before_starred(x: torch.Tensor, n: int) -> Any:
    y = x.sin()[: torch.tensor(2)]
    _, *rest = [n, n + 1, 3]
    rest.append(4)
    return y * 2, rest


def number_of_numpy(x: torch.Tensor, n: int) -> Any:
    y = (torch.arange(3) + 1) * NUMBER
    for row in y:
        opaque(row)
    return y.dtype


def adds_in_graph(x: torch.Tensor, n: int) -> Any:
    y = x.sin() * (n / 10 + 1e16 - 1e16)
    for row in y:
        opaque(row)
    return y


def iterates_set(x: torch.Tensor, n: int) -> Any:
    y, order = x.sin() * 2, []
    for number in {3, n + 4, 1}:
        order.append(number)
    for row in y:
        opaque(row)
    return y, order


def removes_from_set(x: torch.Tensor, n: int) -> Any:
    numbers = {n + number for number in (0, 8, 16, 2)}
    numbers.remove(n)
    numbers.remove(n + 8)
    y = x.sin() * 2
    for row in y:
        opaque(row)
    return y, list(numbers)


def set_that_was_there(x: torch.Tensor, n: int) -> Any:
    y, order = x.sin() * 2, []
    for number in SET:
        order.append(number)
    for row in y:
        opaque(row)
    return y, order


def keys_of_zero(x: torch.Tensor, n: int) -> Any:
    y = x.abs()
    for key in DICT:
        y = y * key
    for row in y:
        opaque(row)
    return y.signbit().tolist()


def loop_in_first_call(x: torch.Tensor, n: int) -> Any:
    y = x.sin() * 2
    if n == 0:
        for row in x:
            opaque(row)
    _, *rest = [n, n + 1, 3]
    rest.append(4)
    return y, rest


def loop_in_first_call_and_break(x: torch.Tensor, n: int) -> Any:
    y = x.sin() * 2
    if n == 0:
        for row in x:
            opaque(row)
    _, *rest = [n, n + 1, 3]
    opaque(y)
    rest.append(4)
    return y, rest


def asks_whether_compiled(x: torch.Tensor, n: int) -> Any:
    y = x.sin() * (2 if torch.compiler.is_compiling() else 3)
    for row in y:
        opaque(row)
    return y


def asks_for_version(x: torch.Tensor, n: int) -> Any:
    y = x.sin()
    y.add_(1)
    for row in y:
        opaque(row)
    return y._version


def sets_default_dtype(x: torch.Tensor, n: int) -> Any:
    torch.set_default_dtype(torch.float64)
    y = x.sin() + torch.ones(3)
    for row in y:
        opaque(row)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    return y.dtype, dtype


def sets_determinism(x: torch.Tensor, n: int) -> Any:
    torch.use_deterministic_algorithms(True)
    y = x.sin() * 2
    for row in y:
        opaque(row)
    mode = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    return y, mode


def sets_precision(x: torch.Tensor, n: int) -> Any:
    torch.set_float32_matmul_precision("high")
    y = x.sin() * 2
    for row in y:
        opaque(row)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    return y, precision


def sets_attention(x: torch.Tensor, n: int) -> Any:
    torch.backends.cuda.enable_flash_sdp(False)
    y = x.sin() * 2
    for row in y:
        opaque(row)
    enabled = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(True)
    return y, enabled


def slice_of_number_of_numpy(x: torch.Tensor, n: int) -> Any:
    y = ((torch.arange(3) + 1) * NUMBER)[: torch.tensor(2)]
    return y.dtype


def slice_of_sum(x: torch.Tensor, n: int) -> Any:
    return (x.sin() * (n / 10 + 1e16 - 1e16))[: torch.tensor(2)]


def slice_where_compiled(x: torch.Tensor, n: int) -> Any:
    return (x.sin() * (2 if torch.compiler.is_compiling() else 3))[: torch.tensor(2)]


# What upstream runs eagerly can not be compiled, or not without a change.
UNCHANGED = [
    sets_attention,
    sets_precision,
    slice_of_number_of_numpy,
    slice_of_sum,
    slice_where_compiled,
    asks_whether_compiled,
    asks_for_version,
    sets_default_dtype,
    sets_determinism,
    loop_in_first_call,
    loop_in_first_call_and_break,
    iterates_set,
    removes_from_set,
    set_that_was_there,
    keys_of_zero,
    number_of_numpy,
    adds_in_graph,
    formats,
    rounds,
    adds_in_order,
    merges,
    as_text,
    asks_for_base,
    makes_once,
    guards_fail,
    raises_in_call,
    starred_in_call,
    repeats_list_in_call,
    half_reversed_in_call,
    overwritten_in_loop,
    item_in_try,
    item_in_loop,
    slice_before_try,
    slice_before_starred,
    raises_in_while_loop,
    raises_in_suppress,
    raises_in_generator,
    asserting["asserts"],
    raises_after_effect,
    deletes_argument,
    starred,
    half_reversed,
    iterated_list_grows,
    dtype_of_numpy,
    moves_to_end,
    repeats_list,
    sets_property,
    annotates,
    raises_before_loop,
    local_by_name,
    not_rebuilt,
    not_traced_again,
    rebuilt_empty,
    draws_as_numpy,
]


def losses_of_input(x: torch.Tensor, n: int) -> Any:
    first, second = x.sin().pow(2).sum(), (x * n).cos().sum()
    for _ in range(2):
        opaque(first)
    return first, second


def losses_of_slice(x: torch.Tensor, n: int) -> Any:
    y = x[: torch.tensor(2)]
    return y.sin().pow(2).sum(), (y * n).cos().sum()


def losses_of_same_statement(x: torch.Tensor, n: int) -> Any:
    y = (x.sin() * x)[: torch.tensor(2)]
    return (y * n).sum(), torch.zeros(0, requires_grad=True).sum()


def backward_by_backward(fn: Callable[..., Any], x: torch.Tensor, n: int) -> Any:
    x = x.clone().requires_grad_()
    for loss in fn(x, n):
        loss.backward()
    return x.grad


def penalty(fn: Callable[..., Any], x: torch.Tensor, n: int) -> Any:
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(sum(fn(x, n)), x, create_graph=True)
    grad.pow(2).sum().backward()
    return x.grad


def aot_eager(_self: Any, gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    return torch._dynamo.lookup_backend("aot_eager")(gm, inputs)


class BytecodeTest(PyGraphTestCase):
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

    def test_no_lists(self) -> None:
        def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            z = x + y
            graph_break()
            return z * x

        x = torch.randn(3)
        self.assertEqual(self.compile(f)(x, x), (x + x) * x)
        names = {i.opname for i in dis.get_instructions(self.final_code(f))}
        self.assertFalse(names & {"BUILD_LIST", "LIST_EXTEND", "CALL_FUNCTION_EX"})

    @parametrize("program", [subtest(p, name=p.__name__) for p in UNCHANGED])
    def test_what_upstream_runs_eagerly_is_as_eager(self, program: Callable[..., Any]) -> None:
        def outcome(fn: Callable[..., Any], x: torch.Tensor, n: int) -> Any:
            try:
                return fn(x, n)
            except Exception as e:
                return type(e).__name__

        compiled = self.compile(program)
        # It simplifies what is computed with numbers.
        backend = mock.patch.object(torch._TorchCompileInductorWrapper, "__call__", aot_eager)
        backend.start()
        self.addCleanup(backend.stop)
        for n in (0, 1, 3, 2):
            x = torch.randn(3)
            keys = sorted(ORDERED, reverse=n % 2 == 1)
            tensor = torch.ones(4)[1:] if n == 3 else torch.ones(3)
            changed = {"ORDERED": collections.OrderedDict.fromkeys(keys), "TENSOR": tensor}
            changed |= {"SET": set([8, 16][:: (-1) ** n]), "DICT": {(-1) ** n * 0.0: 1}}
            with mock.patch.multiple(sys.modules[__name__], **changed):
                expected = outcome(program, x, n)
                self.assertEqual(outcome(compiled, x, n), expected)

    @parametrize("use", [subtest(u, name=u.__name__) for u in (backward_by_backward, penalty)])
    @parametrize(
        "program",
        [
            subtest(p, name=p.__name__)
            for p in (losses_of_input, losses_of_slice, losses_of_same_statement)
        ],
    )
    def test_gradients_of_what_upstream_runs_eagerly(
        self, program: Callable[..., Any], use: Callable[..., Any]
    ) -> None:
        "A graph has one backward for all that it returns."
        compiled = self.compile(program)
        with mock.patch.object(torch._TorchCompileInductorWrapper, "__call__", aot_eager):
            for n in (1, 2, 3):
                x = torch.randn(3)
                self.assertEqual(use(compiled, x, n), use(program, x, n))

    def test_input_that_is_written_before_a_loop(self) -> None:
        "A graph that raises has not written it."
        for target, of_input, is_write in (
            (operator.ifloordiv, True, True),
            (operator.setitem, True, True),
            (torch.relu_, True, True),
            (operator.ifloordiv, False, False),
            (operator.floordiv, True, False),
            (operator.add, True, False),
        ):
            graph = torch.fx.Graph()
            x = graph.placeholder("x")
            graph.call_function(target, (x if of_input else graph.call_function(torch.sin, (x,)), 2))
            self.assertEqual(any("writes an input" in o for o in obstacles.of_graph(graph)), is_write)
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        graph.call_function(torch.sin, (graph.call_method("cos", (x,)),), {"out": x})
        self.assertEqual(sum("writes an input" in o for o in obstacles.of_graph(graph)), 1)

    @parametrize("dynamic", (False, True))
    def test_views_before_a_loop(self, dynamic: bool) -> None:
        "Of what is computed, Inductor makes some dense, and of two that are equal one."

        def is_compiled(make: Callable[[torch.Tensor], Any]) -> bool:
            def f(x: torch.Tensor) -> Any:
                y = make(x.sin() * 2)
                for _ in range(2):
                    opaque()
                return y

            torch.compile(f, options=PYGRAPH, dynamic=dynamic)(torch.rand(3, 3))
            return bool(_debug_get_cache_entry_list(f.__code__))

        for make, expected in (
            (lambda y: y[1:], True),
            (lambda y: y.t()[1:], True),
            (lambda y: (y.t() / 3), True),
            (lambda y: (y, y[1:], y[:2], [y]), True),
            (lambda y: (y.t() / 3)[1:], False),
            (lambda y: [(y > 0), (y > 0).view(-1)], True),
            (lambda y: [y, y.view(3, 3)], False),
            (lambda y: [y[1:], y[1:]], False),
        ):
            torch._dynamo.reset()
            self.assertEqual(is_compiled(make), expected)

    def test_draws_before_a_loop(self) -> None:
        F = torch.nn.functional

        def attention(x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
            x = x.expand(3, 1, 3)
            weights = (torch.ones(9, 3), torch.ones(9), None, None, False, p)
            return F.multi_head_attention_forward(
                *(x, x, x, 3, 1, *weights, torch.ones(3, 3), torch.ones(3)), training=training
            )[0]

        for fn, is_random in (
            (lambda x: torch.rand(3), True),
            (lambda x: x.bernoulli(), True),
            (lambda x: x.sin().uniform_(), True),
            (lambda x: torch.randperm(3), True),
            (lambda x: F.dropout(x, 0.2), True),
            (lambda x: F.dropout(x, training=False), False),
            (lambda x: F.dropout2d(x[None, None], 0.2, True), True),
            (lambda x: F.gumbel_softmax(x), True),
            (lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]), False),
            (lambda x: F.scaled_dot_product_attention(*[x[None]] * 3, dropout_p=0.5), True),
            (lambda x: F.scaled_dot_product_attention(*[x[None]] * 3, None, 0.5, True), True),
            (lambda x: F.scaled_dot_product_attention(*[x[None]] * 3, None, 0.0, True), False),
            (lambda x: F.fractional_max_pool2d(x.expand(1, 3, 3), 2, output_size=1), True),
            (lambda x: torch.svd_lowrank(x.expand(3, 3), 1)[1], True),
            (lambda x: attention(x, 0.5, True), True),
            (lambda x: attention(x, 0.5, False), False),
            (lambda x: attention(x, 0.0, True), False),
            (lambda x: torch.ops.aten.bernoulli.p(x, 0.5), True),
            (lambda dropout: dropout * 2, False),
            (lambda x: x.sort()[0], False),
        ):
            graphs: list[torch.fx.Graph] = []

            def backend(gm: torch.fx.GraphModule, _inputs: list[Any]) -> Any:
                graphs.append(gm.graph)  # noqa: B023
                return gm.forward

            torch.compile(fn, backend=backend)(torch.rand(3))
            self.assertEqual(any("is random" in o for o in obstacles.of_graph(graphs[0])), is_random)

    def test_sign_of_zero_before_a_loop(self) -> None:
        def f(x: torch.Tensor, n: float) -> Any:
            y = x.abs() * n
            for row in y:
                opaque(row)
            return y.signbit().tolist()

        def rebound(x: torch.Tensor, n: float) -> Any:
            y = x.abs() * n
            n = 1
            for row in y:
                opaque(row)
            return y.signbit().tolist()

        x = torch.ones(3)
        for fn in (f, rebound):
            compiled = self.compile(fn)
            for n in (0.0, -0.0):
                self.assertEqual(compiled(x, n), fn(x, n))

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


class GuardTest(PyGraphTestCase):
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

    def test_hooks_of_saved_tensors(self) -> None:
        def f(x: torch.Tensor) -> torch.Tensor:
            return (x * x).sin()

        compiled = self.compile(f)
        x = torch.randn(3, requires_grad=True)
        compiled(x)
        graphs = self.num_graphs()
        # They are not inlined, so that nothing is compiled for them.
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t + 0, lambda t: t):
            self.assertEqual(compiled(x), f(x))
        self.assertEqual(self.num_graphs(), graphs)
        pack, unpack = (torch.fx.symbolic_trace(g) for g in (lambda t: t + 0, lambda t: t))
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            self.assertEqual(compiled(x), f(x))
        self.assertEqual(self.num_graphs(), graphs + 1)


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


global_scale = torch.tensor(1.0)


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(1.0))
        self.shift = torch.tensor(1.0, dtype=torch.float64)
        self.kept = [torch.nn.Parameter(torch.tensor(1.0), requires_grad=False)]

    def forward(self, x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return x * self.scale.item() + self.shift.item() - self.kept[0].item() / x

    def set(self, value: float) -> None:
        for t in (self.scale, self.shift, self.kept[0]):
            t.fill_(value)


def of_closure() -> tuple[Callable[..., Any], Callable[[float], Any]]:
    scale = torch.tensor(1.0)
    return lambda x, s: x * scale.item(), scale.fill_


def of_global(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return x * global_scale.item()


def with_context(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x * s.item()
    return y + x


def in_place(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    v = s.item()
    y = x.clone()
    y *= v
    return y.add_(v).mul_(v)


def written_after(x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * s.item()
    s.add_(1)
    return y, y * s


def rebound(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    y = x * s.item()
    s = s + 1
    return y * s


# What may be done to the value of a tensor on the CPU.
OPERANDS = {
    "right": lambda x, s: x * s.item() + s.item() - s.item() / x,
    "left": lambda x, s: s.item() - s.item() / (s.item() * (s.item() + x)),
    "functions": lambda x, s: torch.mul(x, s.item()).add(s.item()).div(s.item()),
    "float": lambda x, s: x * float(s),
    "tensor_too": lambda x, s: (x + s) * s.item(),
    "integers": lambda x, s: x.int() * s.item(),
    "inner_function": lambda x, s: (lambda t: x * t.item())(s),
    "with_context": with_context,
    "in_place": in_place,
    "written_after": written_after,
    "rebound": rebound,
    "of_global": of_global,
}


def with_data(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    s.data.add_(1)
    return x * s.item()


def with_other_data(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    s.data = torch.full_like(s, 3)
    return x * s.item()


def written_twice(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    y = x * s.item()
    s.mul_(2)
    y = y + s.item()
    s.copy_(y.sum())
    return y * s.item()


def alias_written(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    s.view(1)[0] = 3
    return x * s.item()


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        ctx.scale = s.item()
        return x * ctx.scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.scale, None


def kept_by_program(x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    found = {}
    found["scale"] = s.item()
    return x * found["scale"], found


def in_try(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    try:
        return x * s.item() if s.item() < 1 else x / 0 * s.item()
    finally:
        x.sin_()


# With these it is as without PyGraph: the graph breaks where the value is read.
BREAKS = {
    "branch": lambda x, s: x * s.item() if s.item() > 0.5 else x + 1,
    "branch_later": lambda x, s: (x * s.item()) * (2 if s.item() > 0.5 else 3),
    "integer": lambda x, s: x * int(s.item() * 3),
    "size": lambda x, s: x.new_zeros(int(s) + 2),
    "boolean": lambda x, s: x * s.item() if s else x,
    "python": lambda x, s: x * (s.item() + 1),
    "python_of_two": lambda x, s: x * (s.item() * s.item()),
    "function": lambda x, s: x * math.exp(s.item()),
    "maximum": lambda x, s: x * max(s.item(), 0.5),
    "comparison": lambda x, s: x > s.item(),
    "power": lambda x, s: x ** s.item(),
    "clamp": lambda x, s: x.clamp(max=s.item()),
    "alpha": lambda x, s: torch.add(x, s, alpha=s.item()),
    "complex": lambda x, s: (x + 1j) * s.item(),
    "full": lambda x, s: x + torch.full_like(x, s.item()),
    "returned": lambda x, s: (x * s.item(), s.item()),
    "dictionary": lambda x, s: x * {s.item(): s.item()}[s.item()],
    "element": lambda x, s: x * s.view(1)[0].item(),
    "written_before": lambda x, s: s.add_(1) * x * s.item(),
    "written_twice": written_twice,
    "with_data": with_data,
    "with_other_data": with_other_data,
    "alias_written": alias_written,
    "result": lambda x, s: x * (s + 1).item(),
    "function_of_autograd": lambda x, s: Function.apply(x, s),
    "checkpoint": lambda x, s: checkpoint(lambda y: y * s.item(), x, use_reentrant=False),
    "kept_by_program": kept_by_program,
    "printed": lambda x, s: (x * s.item(), f"{s.item():.3f}"),
    "formatted": lambda x, s: (x * s.item(), "%.3f" % float(s)),  # noqa: UP031
    "in_try": in_try,
}

VALUES = (0.3, 1.0, 0.0, -0.0, -2.5, 0.7, float("inf"), float("nan"), 1e-45, 0.1)
FINITE = (0.3, 1.0, 0.0, 0.7, 0.1)


class ItemTest(PyGraphTestCase):
    """The value of a tensor on the CPU is an input of the graph, where nobody looks at it."""

    def check(
        self,
        fn: Callable[..., Any],
        values: Sequence[float] = VALUES,
        dtype: torch.dtype = torch.float32,
        change: Callable[[float], Any] = global_scale.fill_,
        **options: Any,
    ) -> None:
        compiled = self.compile(fn, **options)
        for value in values:
            x = torch.rand(5)
            s = torch.tensor(value, dtype=dtype)
            inputs = x.clone(), s.clone()
            change(value)
            actual = compiled(*inputs)
            change(value)
            self.assertEqual(actual, fn(x, s), atol=0, rtol=0, exact_dtype=True)
            self.assertEqual(inputs, (x, s), atol=0, rtol=0)

    def assertOneGraph(self) -> None:
        self.assertEqual((self.num_graphs(), counters["graph_break"]), (1, {}))

    @parametrize("name", list(OPERANDS))
    def test_operands(self, name: str) -> None:
        self.check(OPERANDS[name])
        self.assertOneGraph()

    @parametrize("dtype", (torch.float64, torch.bfloat16, torch.float16))
    def test_dtypes(self, dtype: torch.dtype) -> None:
        self.check(OPERANDS["right"], dtype=dtype)
        self.assertOneGraph()

    def test_module(self) -> None:
        module = Scale()
        self.check(module, change=module.set)
        self.assertOneGraph()

    def test_closure(self) -> None:
        fn, change = of_closure()
        self.check(fn, change=change)
        self.assertOneGraph()

    def test_first_value_is_none_that_a_symbol_could_have(self) -> None:
        for value in VALUES:
            torch._dynamo.reset()
            counters.clear()
            self.check(OPERANDS["right"], (value, 0.3))
            self.assertOneGraph()

    @parametrize("mode", (torch.no_grad, torch.inference_mode))
    def test_modes(self, mode: Callable[[], Any]) -> None:
        with mode():
            self.check(OPERANDS["right"])
        self.assertOneGraph()

    @parametrize("dynamic", (False, True))
    def test_dynamic(self, dynamic: bool) -> None:
        fn = OPERANDS["right"]
        compiled = torch.compile(fn, options=PYGRAPH, dynamic=dynamic)
        for n, value in enumerate(VALUES):
            x, s = torch.rand(n + 3 if dynamic else 3), torch.tensor(value)
            self.assertEqual(compiled(x, s), fn(x, s), atol=0, rtol=0)
        self.assertOneGraph()

    def test_no_guard_reads_it(self) -> None:
        for dtype in (torch.float32, torch.float64):
            torch._dynamo.reset()
            fn = lambda x, s: x * s.item()  # noqa: E731
            self.check(fn, dtype=dtype)
            (entry,) = _debug_get_cache_entry_list(fn.__code__)
            self.assertNotIn("L['s'].item", str(entry.guard_manager))

    @parametrize("name", list(BREAKS))
    def test_breaks(self, name: str) -> None:
        self.check(BREAKS[name], FINITE)
        graphs = self.num_graphs()
        torch._dynamo.reset()
        counters.clear()
        self.check(BREAKS[name], FINITE, pygraph=False)
        # Fewer, where it is read again after the graph was broken.
        self.assertLessEqual(graphs, self.num_graphs())

    def test_alias(self) -> None:
        "Another argument that is the tensor, or has its memory."

        def fn(x: torch.Tensor, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            t += 1
            return x * s.item()

        x, s = torch.rand(5), torch.tensor(2.0)
        for t in (s, s.detach(), s.view(1), s.data, torch.tensor(0.0)):
            torch._dynamo.reset()
            expected = x * (s.item() + (t.data_ptr() == s.data_ptr()))
            self.assertEqual(self.compile(fn)(x, s, t), expected)

    def test_gradients_are_not_lost(self) -> None:
        def fn(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
            return x * s.item() + s

        compiled = self.compile(fn)
        for value in FINITE:
            s = torch.tensor(value, requires_grad=True)
            x = torch.rand(3, requires_grad=True)
            actual = torch.autograd.grad(compiled(x, s).sum(), (x, s))
            expected = torch.autograd.grad(fn(x, s).sum(), (x, s))
            self.assertEqual(actual, expected)
        self.assertOneGraph()

    @parametrize("joined", (False, True))
    def test_two_losses(self, joined: bool) -> None:
        "Of two graphs the one is called backward after the other."

        def fn(x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            first = x.sin().pow(2).sum()
            second = (s.item() * (first + x if joined else x)).cos().sum()
            return first, second

        compiled = self.compile(fn)
        with mock.patch.object(torch._TorchCompileInductorWrapper, "__call__", aot_eager):
            for value in FINITE:
                x, grads = torch.rand(3, requires_grad=True), []
                for f in (fn, compiled):
                    for loss in reversed(f(x, torch.tensor(value))):
                        grads.append(torch.autograd.grad(loss, x, retain_graph=joined)[0])
                self.assertEqual(grads[:2], grads[2:])
        self.assertGreater(self.num_graphs(), 1)

    def test_gradient_of_a_result(self) -> None:
        "Of two graphs the first gives it, and the second takes it."

        def fn(x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = x.sin()
            return hidden, (s.item() * hidden).cos().sum()

        compiled = self.compile(fn)
        with mock.patch.object(torch._TorchCompileInductorWrapper, "__call__", aot_eager):
            for value in FINITE:
                x, grads = torch.rand(3, requires_grad=True), []
                for f in (fn, compiled):
                    hidden, loss = f(x, torch.tensor(value))
                    hidden.retain_grad()
                    loss.backward()
                    grads.append(hidden.grad)
                self.assertEqual(*grads)

    @parametrize("transform", (torch.func.grad, torch.func.vmap))
    def test_functorch(self, transform: Callable[..., Any]) -> None:
        self.check(lambda x, s: transform(lambda y: (y * s.item()).sum())(x), FINITE)

    def test_others_break(self) -> None:
        fn = lambda x, s: x * s.item()  # noqa: E731
        backend = CompileCounter()
        for compiled in (torch.compile(fn, backend=backend), torch.compile(fn)):
            torch._dynamo.reset()
            counters.clear()
            for value in FINITE:
                x, s = torch.rand(3), torch.tensor(value)
                self.assertEqual(compiled(x, s), fn(x, s))
            self.assertGreater(sum(counters["graph_break"].values()), 0)

    def test_fullgraph(self) -> None:
        "As stock does it, with a symbol that has no value."
        fn = OPERANDS["right"]
        compiled = torch.compile(fn, options=PYGRAPH, fullgraph=True)
        for value in FINITE:
            x, s = torch.rand(3), torch.tensor(value)
            self.assertEqual(compiled(x, s), fn(x, s))
        self.assertOneGraph()


def paste(x: torch.Tensor, box: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(8, 8)
    left, right = box[0].clamp(min=0), box[1] + 1
    y[left:right, left:right] = x.sin()[(left - box[0]) : (right - box[0]), : right - left]
    return y.cos() + 1


def sliced_in_loop(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    for i in range(2):
        y = y + x[:n].sum() + i
    return y


def sliced_in_context(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x.sin()[n:].cos()
    return y + 1


def sliced_in_function(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    def first(x: torch.Tensor) -> torch.Tensor:
        return x.sin()[: n + 1]

    return first(x).cos()


def sliced_in_place(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    y[n:] += x.cos()[n:]
    return y.cos()


def deleted_from_list(x: torch.Tensor, n: torch.Tensor) -> list[torch.Tensor]:
    xs = [x.sin(), x.cos(), x + 1]
    try:
        del xs[n:]
    except TypeError:
        xs.append(x)
    return xs[: n + 1]


def sliced_in_function_before_try(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    def first(x: torch.Tensor) -> torch.Tensor:
        return x.sin()[: n + 1]

    y = first(x)
    try:
        z = y.cos() * 2
    except IndexError:
        z = y
    return z.tanh() + 1


class Rows:
    def __init__(self, x: torch.Tensor) -> None:
        self.rows = list(x.sin())

    def __getitem__(self, key: Any) -> Any:
        try:
            del self.rows[key[-1]]
        except TypeError:
            return None
        return self.rows


# Of a tensor of 4 x 4 and one that bounds a slice, and whether PyGraph captures more; None
# where that depends on the version of Python.
SLICES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], bool | None]] = {
    "paste": (lambda x, n: paste(x, torch.stack([n - 1, n + 1])), True),
    "start_stop_and_step": (lambda x, n: x.sin()[n - 1 : n + 2 : n + 1].cos(), True),
    "ellipsis": (lambda x, n: x.sin()[..., : n + 0].cos(), True),
    "beside_others": (lambda x, n: x.sin()[x.sum(1) > 2, n : n + 1].cos(), True),
    "argument": (lambda x, n: torch.cat([x.sin(), x.cos()[:n]]), True),
    "branch": (lambda x, n: (x.sin()[n:] if x.dim() == 2 else x[:n]).cos(), True),
    "function_before_try": (sliced_in_function_before_try, True),
    "in_place": (sliced_in_place, None),
    "context": (sliced_in_context, True),
    "function": (sliced_in_function, True),
    "loop": (sliced_in_loop, False),
    "list": (deleted_from_list, False),
    "tuple": (lambda x, n: (x.sin(), x.cos(), x)[n:], False),
    "list_of_a_class": (lambda x, n: Rows(x)[n, n:], None),
    "no_index": (lambda x, n: slice(n, n + 1).stop * x, False),
}


class SliceTest(PyGraphTestCase):
    """What is indexed by values of tensors breaks the graph there, and no sooner."""

    def captured(self, fn: Callable[..., Any], pygraph: bool) -> int:
        "How many calls are, of all frames."
        torch._dynamo.reset()
        count = 0

        def backend(_self: Any, gm: torch.fx.GraphModule, _inputs: list[Any]) -> Any:
            nonlocal count
            count += sum(node.op.startswith("call_") for node in gm.graph.nodes)
            return gm.forward

        compiled = self.compile(fn, pygraph=pygraph)
        with mock.patch.object(torch._TorchCompileInductorWrapper, "__call__", backend):
            for n in (1, 2, 3, 1, 4, 0):
                x, bound = torch.rand(4, 4), torch.tensor(n)
                self.assertEqual(compiled(x, bound), fn(x, bound), atol=0, rtol=0)
        return count

    @parametrize("name", list(SLICES))
    def test_captured(self, name: str) -> None:
        fn, captures_more = SLICES[name]
        on, off = self.captured(fn, True), self.captured(fn, False)
        if captures_more is None:
            self.assertGreaterEqual(on, off)
        elif captures_more:
            self.assertGreater(on, off)
        else:
            self.assertEqual(on, off)

    def test_what_follows_does_not_compile(self) -> None:
        "It runs eagerly, as without pygraph."

        def refuse(_self: Any, gm: torch.fx.GraphModule, _inputs: list[Any]) -> Any:
            if any(node.target == "copy_" for node in gm.graph.nodes):
                raise RuntimeError("not supported")
            return gm.forward

        def fn(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            y = x.sin()[:n].sum()
            x.copy_(x + y)
            return x + y

        compiled = self.compile(fn)
        with mock.patch.object(torch._TorchCompileInductorWrapper, "__call__", refuse):
            for n in (1, 2, 3):
                x, bound = torch.rand(4), torch.tensor(n)
                self.assertEqual(compiled(x.clone(), bound), fn(x.clone(), bound))

    def test_fullgraph(self) -> None:
        fn = lambda x, n: x.sin()[: n.clamp(0, 4)].sum()  # noqa: E731
        compiled = torch.compile(fn, options=PYGRAPH, fullgraph=True)
        x, n = torch.rand(4), torch.tensor(2)
        self.assertEqual(compiled(x, n), fn(x, n))
        self.assertEqual(self.num_graphs(), 1)


class BackendTest(PyGraphTestCase):
    def fn(self) -> Callable[..., Any]:
        def f(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        return f

    @requires_compiled
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

    @requires_compiled
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


class LifetimeTest(PyGraphTestCase):
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


class HooksTest(PyGraphTestCase):
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
instantiate_parametrized_tests(ItemTest)
instantiate_parametrized_tests(SliceTest)


if __name__ == "__main__":
    run_tests()
