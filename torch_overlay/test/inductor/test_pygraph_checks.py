# Owner(s): ["module: inductor"]
"""
Checks behind the graph: what is raised, printed, returned and changed is that of eager mode.

PYTEST_DONT_REWRITE: assertions of the programs are compiled.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import random
import re
import threading
import traceback
from unittest import mock

import torch
import torch._dynamo
from torch._dynamo.utils import counters
from torch._inductor.pygraph import report, reset_report
from torch._inductor.pygraph.dynamo import early
from torch._inductor.pygraph.types.reason import Code
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, subtest
from torch.testing._internal.inductor_utils import HAS_CPU
from torch.testing._internal.pygraph_mend import BOX, log, MendTestCase


TABLE = torch.arange(6.0)
LIMIT = 5
LOCK = threading.Lock()
WEIGHT = torch.ones(4, requires_grad=True)


def passes():
    return torch.arange(1.0, 5.0)


def fails():
    return torch.arange(4.0) * 3 - 4


# Each check holds, fails, and holds again.
INPUTS = (passes, fails, passes)


class Mode:
    """What a program sets, and sets back."""

    def __init__(self) -> None:
        self.running = False
        self.name = None


MODE = Mode()


class Failure(Exception):
    def __init__(self, message: str, values: object) -> None:
        super().__init__(message, values)


def is_bad(x):
    return (x < 0).any()


# Programs whose checks are made behind one graph


def raises(x):
    y = x * 2
    if is_bad(y):
        raise ValueError("negative")
    return y + 1


def raises_if_not(x):
    if not (x >= 0).all():
        raise ValueError
    return x + 1


def raises_last(x):
    if (x >= 0).all():
        return x + 1
    raise RuntimeError("negative")


def raises_either(x):
    if is_bad(x) or x.sum() > 100:
        raise ValueError("out of range")
    return x + 1


def asserts_a_range(x):
    assert 0 < x.min() <= 5, "too small"
    return x + 1


def raises_out_of_range(x):
    y = x * 2
    if not (0 <= y[-1] < 9):
        raise ValueError("range", y.shape)
    return y


def raises_without_a_variable(x):
    y = x * 2
    if is_bad(y):
        del y
        raise ValueError("negative")
    return y


def raises_own(x):
    y = x * 2
    if is_bad(x):
        smallest = y.min()
        raise Failure(f"{smallest:.1f} of {x.shape[0]} below {LIMIT}", (y, [smallest], y.dtype))
    return y + 1


def raises_from(x):
    if is_bad(x):
        log.error("sum %s", x.sum())
        BOX.seen.append("raised")
        raise KeyError("key") from ValueError("cause")
    return x + 1


def raises_by_case(x):
    if is_bad(x):
        if x.min() < -3:
            raise ValueError([f"{v:.0f}" for v in x])
        raise KeyError(BOX.step)
    return x + 1


def asserts(x):
    assert (x >= 0).all(), "negative"
    return x + 1


def asserts_without_text(x):
    assert not is_bad(x)
    return x + 1


def asserts_with_text(x):
    y = x.sin()
    assert (x >= 0).all(), f"smallest {x.min():.2f}, {y}"
    return y + 1


def asserts_function(x):
    torch._assert((x >= 0).all(), "negative")
    torch._assert(x.min() >= 0, f"negative {x.min()}")
    return x + 1


def checks_all(x):
    torch._check_tensor_all(x >= 0)
    return x + 1


def checks_all_with_text(x):
    y = x * 2
    n = 3
    torch._check_tensor_all(y >= 0, lambda: f"{n} {y.sum():.1f} {y}")
    return y + n


def checks_all_with(x):
    torch._check_tensor_all_with(IndexError, x >= 0, lambda: "negative")
    return x + 1


def text_of(text):
    return text


def compilable_check(cond, text, kind=ValueError):
    """What models of transformers call."""
    message = text if callable(text) else (lambda: text)
    torch._check_tensor_all_with(kind, cond, message)


def checks_inline(x):
    compilable_check(x >= 0, f"negative in {x.shape[0]}")
    compilable_check(x.sum() < 100, lambda: f"sum {x.sum()}", kind=IndexError)
    return x + 1


def inner(x, name):
    y = x - 1
    if is_bad(y):
        raise ValueError(f"{name}: {y.min()}")
    return y.exp()


def checks_in_calls(x):
    y = inner(x, "first") - 1
    print("between", y.sum())
    return inner(y, "second")


def checks_in_loop(x):
    for i in range(3):
        if x.max() > 7:
            raise ValueError(f"turn {i}")
        x = x * 2
    return x


def between_prints(x):
    print("before", x.sum())
    if is_bad(x):
        raise ValueError("negative")
    print("after", x.mean())
    return x + 1


def with_closure(x):
    scale = x.shape[0] * 2

    def text():
        return f"{scale} and {x.sum()}"

    if is_bad(x):
        raise ValueError(text())
    return x * scale


def values_of_the_call(x):
    y = x * 2
    z = y.sum()
    if z < 0 or is_bad(y):
        raise ValueError(f"{y} {z}")
    y += 1
    z.add_(y.sum())
    return y * z


def indexes(x):
    i = x.long()
    assert i.min() >= 0 and i.max() < 6, f"index {i.max()}"
    return TABLE[i] + TABLE[i.view(2, 2)].sum()


def indexes_after_two(x):
    i = x.long()
    if i.max() >= 6:
        raise IndexError("high")
    y = TABLE[i]
    if i.min() < 1:
        raise IndexError("low")
    return torch.nn.functional.embedding(i - 1, TABLE.view(6, 1)) + y


def scatters(x):
    """As a model puts the parts of a picture among words: the operator would raise, too."""
    mask = x < 3
    assert mask.sum() <= 2, f"{mask.sum()} places"
    return x.masked_scatter(mask, x[:2] * WEIGHT[:2])


def scatters_too_much(x):
    """The check holds, and the operator raises."""
    assert x.sum() < 100
    return x.masked_scatter(x < 3, x[:2] * 10)


def sets_a_mode_back(x):
    MODE.running, MODE.name = True, "forward"
    y = x * 2 if MODE.running else x
    MODE.running, MODE.name = False, None
    if is_bad(x):
        raise ValueError(f"running: {MODE.running}")
    return y + 1


def makes_tensors(x):
    if is_bad(x):
        raise ValueError("negative")
    return torch.nn.ReLU()(x.new_ones(4) + x.new_full((4,), 2) - x.new_zeros(4)) * x


def classes(x):
    labels = x.long()
    if labels.min() < 0:
        raise ValueError(f"labels are at least 0, not {labels.min()}")
    logits = torch.outer(x, torch.ones(6)).cos()
    return torch.nn.functional.cross_entropy(logits, labels) + torch.gather(logits, 1, labels.view(-1, 1))


def changes_later(x):
    if is_bad(x):
        raise ValueError("negative")
    BOX.step = 7
    return x + 1


def under_no_grad(x):
    with torch.no_grad():
        if is_bad(x):
            raise ValueError(f"{x * WEIGHT}")
    return x * 2


def flag_of_nan(x):
    if x.sum() * float("inf") * 0:
        raise ValueError("NaN is true")
    return x + 1


def before_divisions(x):
    """As wav2vec2, which computes lengths and the weights of its convolution."""
    if is_bad(x):
        raise ValueError("negative")
    lengths = torch.div(x.long() - 1, 2, rounding_mode="floor") + x.long() // 3
    weight = torch._weight_norm(torch.ones(4, 1), torch.ones(4, 1))
    return x + lengths * weight[:, 0]


ONE_GRAPH = [raises, raises_if_not, raises_last, raises_either, raises_own, raises_from, raises_by_case]
ONE_GRAPH += [asserts, asserts_without_text, asserts_with_text, asserts_function]
ONE_GRAPH += [asserts_a_range, raises_out_of_range, raises_without_a_variable]
ONE_GRAPH += [checks_all, checks_all_with_text, checks_all_with, checks_inline, checks_in_calls, checks_in_loop]
ONE_GRAPH += [between_prints, with_closure, values_of_the_call, indexes, indexes_after_two, scatters, scatters_too_much]
ONE_GRAPH += [sets_a_mode_back, makes_tensors, classes, changes_later, under_no_grad, flag_of_nan, before_divisions]


# Programs that break the graph as without PyGraph


def in_try(x):
    try:
        if is_bad(x):
            raise ValueError("caught")
    except ValueError:
        x = x + 10
    return x * 2


def called_in_try(x):
    try:
        x = raises(x)
    except ValueError:
        x = x + 10
    return x * 2


def in_finally(x):
    try:
        if is_bad(x):
            raise ValueError("not caught")
    finally:
        BOX.seen.append("finally")
    return x * 2


def before_a_write(x):
    if is_bad(x):
        raise ValueError("negative")
    x += 1
    return x * 2


def between_a_print_and_a_write(x):
    n = x.sum()
    print("before", n)
    if is_bad(x):
        raise ValueError(f"{n}")
    x.add_(1)
    return x * 2


def before_statistics(x):
    if is_bad(x):
        raise ValueError("negative")
    mean, var = TABLE[:1], TABLE[1:2]
    return torch.nn.functional.batch_norm(x.view(4, 1), mean, var, training=True)


def checks_and_counts(x):
    if x.min() < -9:
        raise ValueError("very negative")
    BOX.step += 1
    return x.long()


def counts_before_an_error(x):
    return x + TABLE[checks_and_counts(x) + 1]


def before_an_operator_that_raises(x):
    if is_bad(x):
        raise ValueError("negative")
    return torch.linalg.cholesky(x.view(2, 2) + 10 * torch.eye(2))


def behind_a_change(x):
    BOX.step += 1
    if is_bad(x):
        raise ValueError(f"step {BOX.step}")
    return x + 1


def reads_an_object(x):
    y = {"sum": x.sum()}
    if is_bad(x):
        raise ValueError(y)
    return x + 1


def reads_a_history(x):
    y = x.detach().requires_grad_() * 2
    if is_bad(x):
        raise ValueError(f"{y}")
    return y


def selects(x):
    y = x[x > 0] if x.dim() else x
    return y * 2


def sets_flags(x):
    with torch.backends.cudnn.flags(enabled=False if x.dim() else True):
        return x * 2


def flag_of_many(x):
    if x > 0:
        raise ValueError("ambiguous")
    return x + 1


def before_a_write_to_data(x):
    data = x.data
    if is_bad(x):
        raise ValueError("negative", x)
    data.add_(1)
    return x * 2


BREAKS = [
    in_try,
    in_finally,
    before_a_write,
    before_a_write_to_data,
    before_statistics,
    before_an_operator_that_raises,
]
BREAKS += [behind_a_change, reads_an_object, reads_a_history, flag_of_many]


def around_a_break(x):
    print("one")
    if x.sum() < -100:
        raise ValueError("one")
    torch._dynamo.graph_break()
    if is_bad(x):
        raise ValueError("two")
    print("two", x.mean())
    return x + 1


ORDERED = (around_a_break, called_in_try, between_a_print_and_a_write, counts_before_an_error)


class CheckTest(MendTestCase):
    def observe(self, fn, inputs=INPUTS):
        values = TABLE.clone()
        try:
            return [super().observe(fn, inputs), TABLE.clone()]
        finally:
            TABLE.copy_(values)

    def check(self, fn, inputs=INPUTS):
        return super().check(fn, inputs)

    @parametrize("fn", [subtest(fn, name=fn.__name__) for fn in ONE_GRAPH])
    def test_one_graph(self, fn):
        self.assertEqual(self.check(fn), {"graphs": 1, "breaks": 0})
        if not fn.__name__.startswith("flag"):
            self.assertIsInstance(self.observe(fn)[0][1][1][0], tuple)

    @contextlib.contextmanager
    def reading_early(self, **settings):
        """Read values of the CPU early, too, and note them."""
        read, init = [], early.Flag.__init__

        def made(flag, value):
            read.append(value.clone())
            init(flag, value)

        settings = {"DEVICES": ("cpu", "cuda"), "MIN_OPERATORS_OF_GRAPH": 0, **settings}
        with mock.patch.multiple(early, **settings), mock.patch.object(early.Flag, "__init__", made):
            yield read

    @parametrize("fn", [subtest(fn, name=fn.__name__) for fn in ONE_GRAPH])
    def test_read_early(self, fn):
        """What is raised is the same if the host does not wait for the graph."""
        with self.reading_early():
            self.assertEqual(self.check(fn), {"graphs": 1, "breaks": 0})

    def test_what_is_read_early(self):
        """Values that depend on nothing but inputs, and that the graph would not round otherwise."""

        def of_input(x):
            assert (x >= 0).all(), f"{x.min():.0f}"
            torch._check_tensor_all(x < 100)
            return x.sin()

        def is_used(x):
            flag = (x >= 0).all()
            assert flag
            return x.sin() * flag

        def guards_an_index(x):
            if (x * 1.5).sum() < 0:
                raise ValueError
            return TABLE[x.long()]

        def is_written(x):
            y = x.sin()
            x.add_(1)
            assert (x >= 0).all()
            return y

        def is_written_by_the_graph(x):
            y = x * 2
            y.mul_(2)
            assert (y >= 0).all()
            return y

        def is_computed(x):
            y = torch.linalg.vector_norm(x)
            assert y >= 0
            return y + 1

        others = is_used, guards_an_index, is_written, is_written_by_the_graph, is_computed
        for fn, expected in (of_input, 2), *((fn, 0) for fn in others):
            with self.subTest(fn.__name__), self.reading_early() as read:
                self.check(fn)
                self.assertEqual(len(read), expected * len(INPUTS))
            # Nor if the graph is so small that waiting takes no longer.
            with self.reading_early(MIN_OPERATORS_OF_GRAPH=8) as read:
                self.check(fn)
                self.assertEqual(read, [])

    def test_labels_that_are_read_early(self):
        """The graph reads the value, too, for an operator that would find an index out of bounds."""

        def fn(labels):
            if labels.max() >= len(TABLE):
                raise ValueError(f"{labels.max()}")
            return TABLE[labels] * 2

        inputs = [functools.partial(torch.tensor, values) for values in ([0, 5], [0, 99], [1, 2])]
        with self.reading_early() as read:
            self.assertEqual(self.check(fn, inputs), {"graphs": 1, "breaks": 0})
        self.assertEqual([value.item() for value in read], [False, True, False])

    @parametrize("fn", [subtest(fn, name=fn.__name__) for fn in BREAKS])
    def test_breaks(self, fn):
        found = self.check(fn)
        _, without = self.observe_compiled(fn, INPUTS, pygraph_mend=False)
        self.assertEqual(found, without)

    @parametrize("fn", [subtest(fn, name=fn.__name__) for fn in ORDERED])
    def test_order(self, fn):
        self.check(fn)

    @parametrize("fn", [subtest(fn, name=fn.__name__) for fn in (raises_own, asserts_with_text, indexes, scatters, classes)])
    def test_inductor(self, fn):
        with self.inductor():
            self.assertEqual(self.check(fn), {"graphs": 1, "breaks": 0})

    def test_gradients(self):
        """Conditions and texts of tensors that require a gradient have no part in the backward."""
        weight = torch.ones(4, requires_grad=True)

        def fn(x):
            loss = (x * weight).sum()
            if loss.isnan() or loss < 0:
                raise ValueError(f"loss {loss:.1f} {loss.item()}")
            return loss * 2

        with self.inductor():
            compiled = torch.compile(fn, options={"pygraph": True})
            for call in range(2):
                weight.grad = None
                compiled(torch.arange(4.0) + call).backward()
                self.assertEqual(weight.grad, 2 * (torch.arange(4.0) + call))
                with self.assertRaisesRegex(ValueError, "loss -4.0 -4.0"):
                    compiled(-torch.ones(4))
        self.assertEqual(counters["graph_break"], {})

    def test_size_of_a_history(self):
        """A path may read the size of a tensor that requires a gradient."""
        weight = torch.ones(3, requires_grad=True)

        def fn(x):
            logits, labels = torch.outer(x, weight), x.long()
            if labels.max() >= logits.shape[1]:
                raise ValueError(f"below {logits.shape[1]}, of {logits.size(0)} and {logits.dtype}")
            return torch.nn.functional.cross_entropy(logits * 2, labels)

        def gradient(of):
            weight.grad = None
            of(torch.arange(3.0)).backward()
            return weight.grad

        with self.inductor():
            compiled = torch.compile(fn, options={"pygraph": True})
            self.assertEqual(gradient(compiled), gradient(fn))
            with self.assertRaisesRegex(ValueError, "below 3, of 3 and torch.float32"):
                compiled(torch.arange(3.0) + 1)
            self.assertEqual(gradient(compiled), gradient(fn))
        self.assertEqual(counters["graph_break"], {})

    def test_mode_that_was_another_one(self):
        """Where the check raises, an attribute that has had another value has the new one, as in eager mode."""

        def step(fn, x, was):
            mode.running, mode.name = was
            try:
                return fn(x), mode.running, mode.name
            except ValueError as error:
                return str(error), mode.running, mode.name

        def fn(x):
            y = x * 2
            mode.running, mode.name = False, None
            if is_bad(x):
                raise ValueError("negative")
            return y + 1

        mode = Mode()
        compiled = torch.compile(fn, options={"pygraph": True})
        for was in ((False, None), (True, None), (False, "other"), (0, None), (False, None)):
            for x in (passes(), fails()):
                found, expected = step(compiled, x, was), step(fn, x, was)
                self.assertEqual(found, expected)
                self.assertIs(found[1], expected[1])

    def test_random_numbers(self):
        """A graph that draws the program's random numbers raises before it draws."""

        def fn(x):
            if is_bad(x):
                raise ValueError("negative")
            return torch.nn.functional.dropout(x, 0.5) + torch.rand([])

        for fallback_random in (False, True):
            torch._dynamo.reset()
            counters.clear()
            with torch._inductor.config.patch(fallback_random=fallback_random):
                compiled = torch.compile(fn, options={"pygraph": True})
                state = torch.get_rng_state()
                with self.assertRaises(ValueError):
                    compiled(-torch.ones(4))
                if fallback_random:
                    self.assertEqual(torch.get_rng_state(), state)
                compiled(torch.ones(4))
            self.assertEqual(counters["stats"]["unique_graphs"], 1 + fallback_random)

    def test_random_numbers_that_decide(self):
        """Bytecode draws in front of the graph, and so not in front of a check."""

        def fn(x):
            if is_bad(x):
                raise ValueError("negative")
            return x * 2 if torch.rand([]) < 0.5 else x * 3

        compiled = torch.compile(fn, options={"pygraph": True})
        compiled(torch.ones(4))
        state = torch.get_rng_state()
        with self.assertRaises(ValueError):
            compiled(-torch.ones(4))
        self.assertEqual(torch.get_rng_state(), state)

    def test_random_numbers_of_python(self):
        """Bytecode draws Python's numbers in front of the graph, too."""

        def fn(x):
            number = random.randint(0, 9)
            if is_bad(x):
                raise ValueError("negative")
            return x * number * random.randint(1, 9)

        outcomes = []
        for f in (fn, torch.compile(fn, options={"pygraph": True})):
            random.seed(0)
            found = f(torch.ones(4))
            with self.assertRaises(ValueError):
                f(-torch.ones(4))
            outcomes.append((found, f(torch.ones(4)), random.getstate()))
        self.assertEqual(*outcomes)

    def test_fullgraph(self):
        compiled = torch.compile(raises_own, options={"pygraph": True}, fullgraph=True)
        compiled(passes())
        with self.assertRaises(Failure):
            compiled(fails())

    def test_traceback(self):
        """The traceback names the line that raises."""
        compiled = torch.compile(raises_own, options={"pygraph": True})
        lines = []
        for fn in (raises_own, compiled):
            try:
                fn(fails())
            except Failure as e:
                last = traceback.extract_tb(e.__traceback__)[-1]
            lines.append((last.filename, last.lineno, last.name))
        self.assertEqual(*lines)


def sizes_decide(x):
    return x + 1 if torch.arange(x.shape[0]).max() > 2 else x


def host_decides(x):
    return x + 1 if torch.rand([]) < 0.5 else x


def both_paths_run(x):
    if (x * 2).cos().norm() > 2:
        return x + 1
    return x * 3


def bool_in_graph(x):
    return x + 1, not x.norm() > 2


def body_compiled(x):
    for i in range(4):
        if x.norm() > 9:
            break
        x = x.prod() + i
    return x


def branch_stays(x):
    return x.prod() if x.norm() > 2 else x.cumsum(0)


def stores(x):
    if x.norm() > 2:
        BOX.seen.append(x.norm())
    return x + 1


def join_is_seen(x):
    return x if x.norm() > 2 else x + 1


def bool_is_read(x):
    return x + 1 if (x.norm() > 2).item() is True else x


def loop_stays(x):
    for i in range(4):
        if x.norm() > 9:
            break
        y = x = x.prod() + i
    return y


def error_in_handler(x):
    try:
        y = TABLE[x.long().clamp(0, 5)]
        return x + y.norm() if x.norm() > 2 else x.cumsum(0)
    except IndexError:
        return x


def long_paths(x):
    y = x + 1
    if y.norm() > 2:
        y = y * 2
    else:
        y = y * 3
    return y.exp()


def enters_lock(x):
    with LOCK:
        return x + 1


def locks(x):
    return enters_lock(x + 1) * 2


def mutates(x):
    x = x + 1
    if x.norm() > 2:
        BOX.seen.append(x.norm())
        x = x.cumsum(0)
    return x


def unique_in_try(x):
    # The paths cannot be joined. A guard finds which one a call takes.
    x = x.prod() if x.sum() > 20 else x.cumsum(0)
    try:
        y = x.unique()
    except IndexError:
        return x
    return y


def unique_in_loop(x):
    for _ in range(2):
        x = x * 2 + x.unique()[:4].sum()
    return x


def sets_class(x):
    x = x + 1
    torch.utils.hooks.RemovableHandle({})
    return x * 2


class ReportTest(MendTestCase):
    """The report and the log list repaired graph breaks, and graph breaks that stay."""

    def seen(self, fn) -> list[tuple[str, Code, bool]]:
        reset_report()
        self.observe_compiled(fn, INPUTS)
        lines, first = inspect.getsourcelines(fn)
        found = []
        for entry in report().breaks:
            path, line, function = re.fullmatch(r"(.*):(\d+) in (.*)", entry.source).groups()
            self.assertEqual(path, __file__)
            found.append(
                (
                    lines[int(line) - first].strip() if function == fn.__name__ else function,
                    entry.reason.code,
                    entry.is_repaired,
                )
            )
        return found

    def test_repaired(self):
        self.assertEqual(
            self.seen(between_prints),
            [
                ('print("before", x.sum())', Code.CALL_BEHIND_GRAPH, True),
                ("if is_bad(x):", Code.CHECK_BEHIND_GRAPH, True),
                ('print("after", x.mean())', Code.CALL_BEHIND_GRAPH, True),
            ],
        )

    @parametrize(
        "fn, code",
        [
            (sizes_decide, Code.SIZES_DECIDE),
            (host_decides, Code.HOST_DECIDES),
            (both_paths_run, Code.BOTH_PATHS_RUN),
            (bool_in_graph, Code.BOOL_IN_GRAPH),
            (body_compiled, Code.BODY_COMPILED),
        ],
        name_fn=lambda fn, code: fn.__name__,
    )
    def test_forms(self, fn, code):
        found = [entry[1:] for entry in self.seen(fn)]
        self.assertIn((code, True), found)
        self.assertNotIn((Code.DYNAMO, False), found)

    @parametrize(
        "fn, code",
        [
            (branch_stays, Code.BRANCH_STAYS),
            (stores, Code.BRANCH_STAYS),
            (join_is_seen, Code.JOIN_IS_SEEN),
            (bool_is_read, Code.BOOL_IS_READ),
            (loop_stays, Code.LOOP_STAYS),
            (behind_a_change, Code.BEHIND_A_CHANGE),
            (before_a_write, Code.BEFORE_A_WRITE),
            (before_statistics, Code.BEFORE_A_WRITE),
            (before_an_operator_that_raises, Code.BEFORE_AN_ERROR),
            (reads_an_object, Code.NOT_PLAIN),
            (flag_of_many, Code.DYNAMO),
            (selects, Code.DATA_DEPENDENT),
            (sets_flags, Code.NO_TENSOR),
            (error_in_handler, Code.ERROR_IN_HANDLER),
        ],
        name_fn=lambda fn, code: fn.__name__,
    )
    def test_stays(self, fn, code):
        place, found = next((place, found) for place, found, is_repaired in self.seen(fn) if not is_repaired)
        self.assertEqual(found, code)
        self.assertRegex(place, "if ")
        self.assertTrue(found.advice)

    def test_inlined(self):
        """The break is where the program has it, not where the outermost frame calls."""
        self.assertEqual({place for place, *_ in self.seen(checks_in_calls)}, {"inner", 'print("between", y.sum())'})

    def test_line_of_branch(self):
        found = self.seen(long_paths)
        self.assertEqual(found, [("if y.norm() > 2:", Code.BOTH_PATHS_RUN, True)])

    def test_other_breaks(self):
        """A break has the reason of its own line, also if Dynamo resumes at an earlier one, or runs the frame eagerly."""
        for fn, place, code in (
            (locks, "enters_lock", Code.DYNAMO),
            (mutates, "if x.norm() > 2:", Code.BRANCH_STAYS),
            (unique_in_try, "y = x.unique()", Code.DATA_DEPENDENT),
            (unique_in_loop, "x = x * 2 + x.unique()[:4].sum()", Code.DATA_DEPENDENT),
            (sets_class, "torch.utils.hooks.RemovableHandle({})", Code.DYNAMO),
        ):
            with self.subTest(fn.__name__):
                stays = [(place, code) for place, code, is_repaired in self.seen(fn) if not is_repaired]
                self.assertEqual(stays, [(place, code)])

    def test_explanation(self):
        for fn, said in ((locks, "a `lock` context manager"), (mutates, "Mutating a variable from outside")):
            self.seen(fn)
            self.assertTrue(any(said in entry.reason.text for entry in report().breaks))

    def test_log_and_text(self):
        with self.assertLogs("torch._inductor.pygraph", logging.INFO) as logged:
            self.seen(behind_a_change)
        text = str(report())
        for said in ("(BEHIND_A_CHANGE)", "Move it in front of the statement"):
            self.assertTrue(any(said in line for line in logged.output), logged.output)
        self.assertIn("Graph breaks that stay", text)
        self.assertIn("change: Move it in front", text)
        self.assertIn('"BEHIND_A_CHANGE"', report().json())


instantiate_parametrized_tests(CheckTest)
instantiate_parametrized_tests(ReportTest)


if __name__ == "__main__":
    if HAS_CPU:
        run_tests()
