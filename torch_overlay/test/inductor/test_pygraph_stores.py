# Owner(s): ["module: inductor"]
"""What the paths of a branch store to objects: compiled functions leave them as eager mode does, with one graph."""

from __future__ import annotations

import copy
from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo.utils import counters
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, subtest
from torch.testing._internal.inductor_utils import HAS_CPU
from torch.testing._internal.pygraph_mend import BranchTestCase, number_of_graphs, VALUES


if TYPE_CHECKING:
    from collections.abc import Callable


class State:
    def __init__(self) -> None:
        super().__init__()
        self.state, self.other, self.buffer = torch.zeros(4), torch.ones(4), torch.zeros(4)
        self.flag: Any = None
        self.count = 0
        self.items = [torch.zeros(4), torch.ones(4)]
        self.table = {"a": torch.zeros(4), "b": torch.ones(4)}

    def keep(self, x):
        self.state = x


class Module(State, torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        del self.buffer
        self.register_buffer("buffer", torch.zeros(4))


class Slow(State):
    def __setattr__(self, name, value):
        object.__setattr__(self, name, value)


def work(x):
    """Return what takes more operators than paths may have that both run."""
    for _ in range(9):
        x = x.sin() + x
    return x


def in_both(m, x):
    if x.sum() > 0:
        m.state, y = x * 2, x + 1
    else:
        m.state, y = x - 1, x
    return x + y


def in_one(m, x):
    if x.sum() > 0:
        m.state = x.detach() * 2
    return x + 1


def in_conds(m, x):
    if x.sum() > 0:
        m.state = work(x)
    else:
        m.state = work(-x)
    if x.sum() > 5:
        m.buffer = work(x.detach())
    return x + m.state


def read(m, x):
    if x.sum() > 0:
        m.state = x.detach() * 2
        y = x + m.state
    else:
        y = x - m.state
    return y + m.state


def twice(m, x):
    if x.sum() > 0:
        m.state = x.detach() * 2
    if x.sum() > 5:
        m.state = x.detach() * 3
    return x + 1


def overwritten(m, x):
    if x.sum() > 0:
        m.state = x.detach() * 2
    m.state = m.state + 1
    return x + 1


def inlined(m, x):
    if x.sum() > 0:
        m.keep(x.detach() * 2)
    else:
        m.other = x.detach() * 3
    return x + 1


def exchanged(m, x):
    if x.sum() > 0:
        m.state, m.other = m.other, m.state
    return x + 1


def early_return(m, x):
    if x.sum() > 0:
        m.state = x.detach() * 2
        return x + 1
    return x - 1


def flags(m, x):
    if x.sum() > 0:
        m.flag = True
    else:
        m.flag = bool(x.mean() < -5)
    return x + 1 if m.flag else x - 1


def numbers(m, x):
    if x.sum() > 0:
        m.flag = "positive"
    else:
        m.flag = 0.5
    return x + 1


def containers(m, x):
    if x.sum() > 0:
        m.items[0], m.table["a"] = x.detach() * 2, x.detach() + 1
    else:
        m.items[0] = x.detach() * 3
    return x + m.items[0]


def variable(m, x):
    y = x + 1

    def double():
        return y * 2

    if x.sum() > 0:
        y = x * 2
    else:
        y = x * 3
    return double()


ONE_GRAPH = (in_both, in_one, in_conds, read, twice, overwritten, inlined, exchanged, early_return, flags, numbers)
ONE_GRAPH += (containers, variable)


def returned(m, x):
    if x.sum() > 0:
        m.state = x.detach() * 2
    return m.state, x + 1


def written_behind(m, x):
    if x.sum() > 0:
        m.state = x.detach() * 2
    m.state.add_(1)
    return x + 1


def shared(m, x):
    y = x.detach() * 3
    if x.sum() > 0:
        y = x.detach() * 2
        m.state = y
    y.add_(1)
    return y


def named_twice(m, x):
    y = x.detach() * 3
    if x.sum() > 0:
        y = x.detach() * 2
        m.flag = y
    return y


def with_gradient(m, x):
    if x.sum() > 0:
        m.state = x * 2
    return x + 1


def counted(m, x):
    if x.sum() > 0:
        m.count += 1
    return x + m.count


def added(m, x):
    if x.sum() > 0:
        m.new = x.detach() * 2
    return x + 1


def added_in_both(m, x):
    m.more = 1
    if x.sum() > 0:
        m.new = x.detach() * 2
    else:
        m.new, m.last = "none", True
    return x + 1


def added_by_cond(m, x):
    y = x
    if x.sum() > 0:
        y = work(x)
        m.new = x.dtype
    m.last = 2
    return y + 1


def added_to_new(m, x):
    m.other = State()
    if x.sum() > 0:
        m.other.new, m.other.more = x.detach() * 2, x.dtype
    return x + 1


def is_added(m, x):
    if x.sum() > 0:
        m.new = x.detach() * 2
    return x + 1 if hasattr(m, "new") else x - 1


def read_if_added(m, x):
    if x.sum() > 0:
        m.new = 2
    return x + getattr(m, "new", 3)


def found_in_dictionary(m, x):
    if x.sum() > 0:
        m.new = x.detach() * 2
    return x + 1 if "new" in m.__dict__ else x - 1


def added_again(m, x):
    if x.sum() > 0:
        m.new = x.detach() * 2
    m.more = 1
    m.new = 3
    return x + 1


def added_in_other_order(m, x):
    if x.sum() > 0:
        m.new, m.more = 1, 2
    else:
        m.more, m.new = 3, 4
    return x + 1


def added_with_gradient(m, x):
    if x.sum() > 0:
        m.new = x * 2
    return x + 1


ADDED = (added, added_in_both, added_by_cond, added_to_new)
ADDED_BREAKS = (is_added, read_if_added, found_in_dictionary, added_again, added_in_other_order)
ADDED_BREAKS += (added_with_gradient,)


def added_key(m, x):
    if x.sum() > 0:
        m.table["c"] = x.detach() * 2
    return x + 1


def moved(m, x):
    if x.sum() > 0:
        m.table["a"] = x.detach() * 2
        m.table["a"] = m.table.pop("a")
    return x + 1


def appended(m, x):
    if x.sum() > 0:
        m.items.append(x.detach() * 2)
    return x + 1


def removed(m, x):
    if x.sum() > 0 and "b" in m.table:
        m.table.popitem()
    return x + len(m.table)


def deleted(m, x):
    if x.sum() > 0 and hasattr(m, "other"):
        delattr(m, "other")
    return x + 1


def none(m, x):
    if x.sum() > 0:
        m.flag = x.detach() * 2
    return x + 1


def raising(m, x):
    if x.sum() > 0:
        m.state = x.detach() * 2
        if m.state.sum() > 20:
            raise ValueError(m.state.sum())
    return x + 1


BREAKS = (returned, written_behind, shared, named_twice, with_gradient, counted, added_key, moved, appended, removed)
BREAKS += (deleted, none, raising)


class StoreTest(BranchTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.without_hosts()

    def observe(self, fn: Callable[..., Any], model: State, *, grad: bool, values: Any = VALUES) -> list[Any]:
        """Return results, gradients, the state, and which objects are those of before."""
        seen = []
        for value in values:
            x = torch.tensor(value, requires_grad=grad)
            before = self.state_of(model)
            try:
                result = fn(model, x)
            except ValueError as e:
                seen.append((type(e), str(e), self.state_of(model)))
                continue
            total = sum(t.sum() for t in torch.utils._pytree.tree_leaves(result) if t.requires_grad)
            if isinstance(total, torch.Tensor):
                total.backward()
            after = self.state_of(model)
            same = [after.get(name) is held for name, held in before.items()]
            aliases = [value is r for value in after.values() for r in (result if type(result) is tuple else (result,))]
            plain = copy.deepcopy(torch.utils._pytree.tree_map(torch.detach, result))
            state = {n: v.detach().clone() if isinstance(v, torch.Tensor) else v for n, v in after.items()}
            seen.append((plain, x.grad, state, same, aliases, [*vars(model)], [*model.table]))
            model.state = model.state.detach()
        return seen

    def state_of(self, model: State) -> dict[str, Any]:
        names = ("state", "other", "flag", "count", "buffer", "new", "more", "last")
        found = {name: getattr(model, name) for name in names if hasattr(model, name)}
        return {**found, **dict(enumerate(model.items)), **model.table}

    def check_program(self, fn: Callable[..., Any], make: type[State], *, grad: bool) -> None:
        compiled = torch.compile(fn, options={"pygraph": True})
        self.assertEqual(self.observe(compiled, make(), grad=grad), self.observe(fn, make(), grad=grad))

    @parametrize("fn", [subtest(f, name=f.__name__) for f in ONE_GRAPH])
    @parametrize("make", (State, Module))
    def test_one_graph(self, fn, make):
        self.check_program(fn, make, grad=make is Module)
        # Some programs leave values that are guarded in the next call.
        self.assertEqual(counters["resumes"], {})
        self.assertLessEqual(number_of_graphs(), 3)

    @parametrize("fn", [subtest(f, name=f.__name__) for f in BREAKS])
    @parametrize("grad", (False, True))
    def test_equal(self, fn, grad):
        self.check_program(fn, State, grad=grad)

    def observe_new(self, fn: Callable[..., Any], make: type[State]) -> list[Any]:
        """Observe calls, each of which gets a new object."""
        seen = []
        for value in VALUES:
            model = make()
            seen += self.observe(fn, model, grad=True, values=[value])
            if isinstance(model.other, State):
                seen[-1] = seen[-1][:2], self.state_of(model.other), [*vars(model.other)]
        return seen

    @parametrize("fn", [subtest(f, name=f.__name__) for f in ADDED + ADDED_BREAKS])
    @parametrize("make", (State, Module, Slow))
    def test_attribute_of_one_path(self, fn, make):
        """An object has an attribute in the calls in which a path adds it."""
        compiled = torch.compile(fn, options={"pygraph": True})
        self.assertEqual(self.observe_new(compiled, make), self.observe_new(fn, make))
        self.assertEqual((counters["resumes"], number_of_graphs()) == ({}, 1), fn in ADDED)


instantiate_parametrized_tests(StoreTest)


if __name__ == "__main__":
    if HAS_CPU:
        run_tests()
