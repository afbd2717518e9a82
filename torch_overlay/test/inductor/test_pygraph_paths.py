# Owner(s): ["module: inductor"]
"""Dynamo traces both paths of a branch and joins their results. These programs could notice it."""

from __future__ import annotations

import contextlib
import itertools
import operator
from typing import Any

import torch
import torch._dynamo
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, subtest
from torch.testing._internal.inductor_utils import HAS_CPU
from torch.testing._internal.pygraph_common import opaque
from torch.testing._internal.pygraph_mend import BranchTestCase, number_of_graphs, VALUES


ITERATORS = {
    "generator": lambda: (i for i in range(9)),
    "range": lambda: iter(range(9)),
    "list": lambda: iter([0, 1, 2]),
    "enumerate": lambda: (i for i, _ in enumerate("abcd")),
    "filter": lambda: filter(lambda i: i > 1, [1, 2, 3, 4]),
    "cycle": lambda: itertools.cycle([1, 2, 3]),
    "chain": lambda: itertools.chain([1, 2], [3, 4]),
    "count": itertools.count,
}


def advanced_in_a_list(x):
    numbers = [iter(range(9))]
    y = x + next(numbers[0]) if x.sum() > 0 else x
    return y + next(numbers[0])


def advanced_by_a_closure(x):
    numbers = iter(range(9))

    def add(y):
        return y + next(numbers)

    return add(add(x) if x.sum() > 0 else x)


class Counter:
    def __init__(self):
        self.numbers = iter(range(9))

    def add(self, x):
        return x + next(self.numbers)


def advanced_by_an_object(x):
    counter = Counter()
    return counter.add(counter.add(x) if x.sum() > 0 else x)


def unknown_attribute(x):
    if x.isnan().all():
        x = x.unknown
    return x + 1


TABLE = torch.arange(4.0)


class Box:
    step = 0


BOX = Box()


def index_in_try(x):
    try:
        y = TABLE[x.long()] if x.sum() > 0 else x
    except IndexError:
        y = x * 0
    return y


def bool_in_try(x):
    try:
        is_positive = bool(x.sum() > 0)
        y = TABLE[x.long()]
    except IndexError:
        y = x * 0
    return y + 1 if is_positive else y


def called_in_try(x):
    def look_up(y):
        return TABLE[y.long()] if y.sum() > 0 else y

    try:
        return look_up(x)
    except IndexError:
        return x * 0


def suppressed(x):
    y = x
    with contextlib.suppress(IndexError):
        y = TABLE[x.long()] if x.sum() > 0 else x
    return y


def assertion_in_try(x):
    try:
        assert x.sum().item() > 0
    except AssertionError:
        return x * 0
    return x + 1


def assertion_behind_a_change(x):
    BOX.step += 1
    assert x.sum().item() > 0, "negative"
    return x + 1


def assertion_of_a_bool(x):
    is_positive = bool(x.sum() > 0)
    assert is_positive
    return x + 1


def slice_of_a_bool(x):
    is_positive = bool(x.sum() > 0)
    return x[is_positive:]


def on_meta(x):
    y = x.to("meta")
    return x + 1 if y.sum() > 0 else x - 1


def by_operator(x):
    y = x * 2
    z = y if x.sum() > 0 else y + 1
    return y + operator.is_(z, y)


def by_id(x):
    y = x * 2
    z = y if x.sum() > 0 else y + 1
    return y + (id(z) == id(y))


def by_key(x):
    y = x * 2
    numbers = {y: 1}
    z = y if x.sum() > 0 else y + 1
    return y + numbers.get(z, 5)


def by_item(x):
    y = x * 2
    z = y if x.sum() > 0 else y + 1
    numbers = {}
    numbers[y] = 1
    numbers[z] = 2
    return y + len(numbers)


def by_set(x):
    y = x * 2
    z = y if x.sum() > 0 else y + 1
    return y + len({y, z}) + len({y: 1, z: 2})


def by_key_in_a_tuple(x):
    y = x * 2
    z = y if x.sum() > 0 else y + 1
    return y + {(y, 1): 1}.get((z, 1), 5) + len({(y, 2), (z, 2)})


def by_keys_of_a_sequence(x):
    y = x * 2
    z = y if x.sum() > 0 else y + 1
    return y + len(dict.fromkeys((y, z)))


def by_attribute(x):
    y = x * 2
    y.tag = 3
    z = y if x.sum() > 0 else y + 1
    return y + getattr(z, "tag", 7)


def by_attribute_behind(x):
    y = x * 2
    z = y if x.sum() > 0 else y + 1
    z.tag = 3
    return y + z, getattr(y, "tag", 7)


TAGGED = torch.ones(4)
TAGGED.tag = 3


def by_attribute_from_outside(x):
    z = TAGGED if x.sum() > 0 else x + 1
    return z + getattr(z, "tag", 7) + hasattr(z, "tag")


def by_attribute_of_view(x):
    z = TAGGED.contiguous() if x.sum() > 0 else x + 1
    return z * 2, hasattr(z, "tag")


TOLD = (by_operator, by_id, by_key, by_item, by_set, by_attribute, by_attribute_behind)
TOLD += (by_attribute_from_outside, by_attribute_of_view, by_key_in_a_tuple, by_keys_of_a_sequence)

HANDLED = (index_in_try, bool_in_try, called_in_try, suppressed, assertion_in_try)
HANDLED += (slice_of_a_bool, on_meta)


class Rows:
    """Turns of a generator, which notes where it is closed."""

    def __init__(self, x):
        self.x = x
        self.seen = []

    def __iter__(self):
        try:
            for i in range(4):
                yield self.x * i
        finally:
            self.seen.append("closed")


def left_by_break(x):
    rows = Rows(x)
    for row in rows:
        if row.sum() > 5:
            break
    return row, [*rows.seen, "behind"]


def left_by_return(x):
    rows = Rows(x)

    def find():
        for row in rows:
            if row.sum() > 5:
                return row
        return x

    return find(), rows.seen


def left_by_any(x):
    rows = Rows(x)
    found = any(row.sum() > 5 for row in rows)
    return x + 1 if found else x - 1, rows.seen


def left_by_an_error(x):
    rows = Rows(x)
    try:
        for row in rows:
            if row.sum() > 5:
                raise ValueError
    except ValueError:
        rows.seen.append("handled")
    return x + 1, rows.seen


def asking_rows(x):
    for i in range(3):
        if (x + i).sum() > 6:
            yield x * i
        else:
            yield x - i


def goes_on_behind_a_break(x):
    rows = asking_rows(x)
    y = next(rows)
    opaque(y)
    return y + next(rows)


GENERATORS = (left_by_break, left_by_return, left_by_any, left_by_an_error, goes_on_behind_a_break)


def hook_of_older(x):
    y = x * 2
    if x.sum() > 0:
        y.register_hook(lambda grad: grad * 3)
    return y * y


def hook_of_input(x):
    if x.sum() > 0:
        x.register_hook(lambda grad: grad * 3)
    return x * x


def behind_grad(x):
    grad = torch.func.grad(lambda t: (t * t).sum())(x)
    return torch.func.grad(lambda t: (t**3).sum())(x) if grad.sum() > 0 else grad


def behind_jvp(x):
    _, tangent = torch.func.jvp(lambda t: t * t, (x,), (torch.ones(4),))
    return tangent * 2 if tangent.sum() > 0 else tangent + 1


ADVANCED = (advanced_in_a_list, advanced_by_a_closure, advanced_by_an_object)


class PathTest(BranchTestCase):
    def setUp(self):
        super().setUp()
        self.without_hosts()
        self.calls = [(torch.tensor(v),) for v in VALUES]

    @parametrize("make", [subtest(f, name=n) for n, f in ITERATORS.items()])
    def test_iterator(self, make):
        """An iterator is advanced by the path that runs, and once."""

        def one(x):
            numbers = make()
            y = x + next(numbers) if x.sum() > 0 else x
            return y + next(numbers)

        def both(x):
            numbers = make()
            y = x + next(numbers) if x.sum() > 0 else x - next(numbers)
            return y + next(numbers)

        for fn in (one, both):
            self.check(fn, self.calls, graphs=None)

    @parametrize("fn", [subtest(f, name=f.__name__) for f in ADVANCED])
    def test_iterator_by_way_of(self, fn):
        self.check(fn, self.calls, graphs=None)

    @parametrize("fn", [subtest(f, name=f.__name__) for f in (hook_of_older, hook_of_input)])
    def test_hook_in_a_path(self, fn):
        """Dynamo puts a hook of a tensor of the graph in front of the branch."""
        self.check(fn, [(torch.tensor(v, requires_grad=True),) for v in VALUES], graphs=None)

    def test_iterator_of_a_comprehension(self):
        """Its own loop is not one that a path could advance."""
        self.check(lambda x: [x + i if x.sum() > i else x - i for i in range(3)], self.calls, graphs=1)

    @parametrize("fn", [subtest(f, name=f.__name__) for f in HANDLED])
    def test_error_of_the_program(self, fn):
        """The program sees its exceptions where it handles them, and their types."""
        values = [*VALUES[:4], *VALUES[-1:]]
        self.check(fn, [(torch.tensor(v),) for v in values], graphs=None)

    @parametrize("fn", [subtest(f, name=f.__name__) for f in (assertion_behind_a_change, assertion_of_a_bool)])
    def test_assertion(self, fn):
        """Of a number or a bool, it raises an AssertionError."""
        compiled = torch.compile(fn, options={"pygraph": True})
        with self.assertRaises(AssertionError):
            compiled(-torch.ones(4))
        self.assertEqual(compiled(torch.ones(4)), torch.ones(4) + 1)

    @parametrize("fn", [subtest(f, name=f.__name__) for f in TOLD])
    def test_identity(self, fn):
        """A join of an older tensor is another tensor, which the program may not tell."""
        self.check(fn, self.calls, graphs=None)

    def test_attribute(self):
        """The graph made the tensor, and the program has set no attribute."""

        def fn(x):
            y = x * 2
            z = y if x.sum() > 0 else y + 1
            return z + hasattr(z, "tag") + getattr(z, "tag", 7) + getattr([z], "tag", 7)

        self.check(fn, self.calls, graphs=1)

    def test_comprehension_in_a_block(self):
        """Neither a comprehension nor a context of torch handles exceptions."""

        def fn(x):
            with torch.autocast("cpu", enabled=False):
                return [t + 1 if t.sum() > 0 else t - 1 for t in (x, -x)]

        self.check(fn, self.calls, graphs=1)

    def test_nothing_to_handle(self):
        """A graph that does not raise may have a branch in a try statement, as in hooks that transformers adds."""

        def fn(x):
            BOX.step += 1
            try:
                y = x + 1 if x.sum() > 0 else x.sin()
            finally:
                BOX.step -= 1
            return y

        def behind_an_index(x):
            try:
                y = x + 1 if x.sum() > 0 else x.sin()
            except IndexError:
                y = x
            return TABLE[y.long()]

        BOX.step = 0
        self.check(fn, self.calls, graphs=1)
        self.check(behind_an_index, self.calls, graphs=None)
        self.assertEqual(BOX.step, 0)

    def test_many_returns(self):
        """A chain of early returns is nested, and no branch nests deeply."""
        lines = [
            f"    if x.sum() > {20 - i}:\n        return x.reshape(2, 2) @ x.reshape(2, 2) + {i}" for i in range(20)
        ]
        scope: dict[str, Any] = {}
        exec("def fn(x):\n" + "\n".join(lines) + "\n    return x.reshape(2, 2)\n", scope)
        self.check(scope["fn"], self.calls[:1], graphs=None)
        self.assertGreater(number_of_graphs(), 1)

    def test_error_of_dynamo(self):
        """Dynamo itself fails in a path that does not run."""
        self.check(unknown_attribute, self.calls, graphs=None)


class ProgramTest(BranchTestCase):
    """A guard decides in front of the graph, or both paths run."""

    @parametrize("fn", [subtest(f, name=f.__name__) for f in GENERATORS])
    @parametrize("without_hosts", (False, True))
    def test_generator(self, fn, without_hosts):
        """It is closed where a loop leaves it, and a generator that goes on behind a graph break asks in each call."""
        if without_hosts:
            self.without_hosts()
        self.check(fn, [(torch.tensor(v),) for v in VALUES], graphs=None)

    @parametrize("fn", [subtest(f, name=f.__name__) for f in (behind_grad, behind_jvp)])
    @parametrize("without_hosts", (False, True))
    def test_behind_a_transform(self, fn, without_hosts):
        """The graph has tensors that torch.func wraps."""
        if without_hosts:
            self.without_hosts()
        self.check(fn, [(torch.tensor(v),) for v in VALUES], graphs=None)
        self.assertGreater(number_of_graphs(), 0)


instantiate_parametrized_tests(PathTest)
instantiate_parametrized_tests(ProgramTest)


if __name__ == "__main__":
    if HAS_CPU:
        run_tests()
