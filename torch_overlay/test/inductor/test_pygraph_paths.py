# Owner(s): ["module: inductor"]
"""Programs that could tell that Dynamo has traced the path of a branch that does not run."""

from __future__ import annotations

import itertools
from unittest import mock

import torch
import torch._dynamo
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, subtest
from torch.testing._internal.inductor_utils import HAS_CPU
from torch.testing._internal.pygraph_mend import BranchTestCase, VALUES


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


ADVANCED = (advanced_in_a_list, advanced_by_a_closure, advanced_by_an_object)


class PathTest(BranchTestCase):
    def setUp(self):
        super().setUp()
        # Not what the host can know before the graph runs
        self.hosts = mock.patch("torch._inductor.pygraph.dynamo.branches.Branches.decide", lambda *args: None)
        self.hosts.start()
        self.addCleanup(self.hosts.stop)
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

    def test_iterator_of_a_comprehension(self):
        """Its own loop is not one that a path could advance."""
        self.check(lambda x: [x + i if x.sum() > i else x - i for i in range(3)], self.calls, graphs=1)

    def test_error_of_dynamo(self):
        """Dynamo itself fails in a path that does not run."""
        self.check(unknown_attribute, self.calls, graphs=None)


instantiate_parametrized_tests(PathTest)


if __name__ == "__main__":
    if HAS_CPU:
        run_tests()
