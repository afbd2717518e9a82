# Owner(s): ["module: inductor"]
"""
Frames that stock Dynamo runs eagerly: with PyGraph they have the same results, errors and effects.
"""

from __future__ import annotations

import collections
import contextlib
import random
import sys
from typing import Any, TYPE_CHECKING
from unittest import mock

import numpy as np

import torch
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    subtest,
)
from torch.testing._internal.pygraph_common import aot_eager, DynamoTestCase, opaque


if TYPE_CHECKING:
    from collections.abc import Callable


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


class EagerFrameTest(DynamoTestCase):
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


instantiate_parametrized_tests(EagerFrameTest)


if __name__ == "__main__":
    run_tests()
