# Owner(s): ["module: inductor"]
"""Calls of print and loggers behind the graph: what is printed, returned and raised is that of eager mode."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import sys
import warnings
from unittest import mock

import torch
import torch._dynamo
from torch._dynamo.utils import counters
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, subtest
from torch.testing._internal.fake_cuda import fake_cuda
from torch.testing._internal.inductor_utils import HAS_CPU
from torch.testing._internal.pygraph_common import opaque
from torch.testing._internal.pygraph_mend import BOX, log, MendTestCase


graph_break = torch._dynamo.graph_break


# Programs whose calls are made behind one graph


def plain(x):
    y = x * 2
    print("values", 1, 2.5, None, True, [1, "a"], (x.shape, 3), y.shape[0])
    return y + 1


def tensors(x):
    print(x, x.sum(), [x.mean(), (x + 1,)])
    return x.cos()


def options(x):
    print("a", x.sum(), sep="-", end="~\n", flush=True)
    return x + 1


def formatted(x):
    y = x.sum()
    print(f"{y:.2f} and {y}", f"{x.shape[0]}")
    return y


def written_later(x):
    y = x * 2
    print("before", y, y[0])
    y += 1
    print("after", y, y[0])
    return y


def input_written_later(x):
    print("before", x)
    x.add_(1)
    print("between", x)
    x[0] = 7
    return x.sum()


def alias_written_later(x):
    view = x[1:]
    print("before", view)
    x.mul_(2)
    return view + 1


def list_changed_later(x):
    parts = ["a"]
    print(parts, x.sum())
    parts.append("b")
    print(parts)
    return x + len(parts)


def inner(x, name):
    print("inner", name, x.sum())
    return x + 1


def inlined(x):
    y = inner(x, "first")
    print("outer")
    return inner(y, "second")


def in_loop(x):
    for i in range(3):
        print(i, x.mean())
        x = x * 2
    return x


def number_that_varies(x):
    print("step", BOX.step, [BOX.step])
    return x + 1


def under_no_grad(x):
    with torch.no_grad():
        print(x.sum())
    return x * 2


def logged(x):
    log.info(
        "%s and %d",
        x.sum(),
        3,
    )
    log.warning("shape %s", x.shape)
    log.debug("never")
    return x + 1


def logged_from(x):
    log.error(f"mean {x.mean():.3f}")
    return x


def logged_inline(x):
    return logged_from(x) + logged_from(x + 1)


def warns(x):
    print("before")
    warnings.warn(f"sum {x.sum()}")
    warnings.warn("deprecated", DeprecationWarning)
    print("after", x.mean(), UserWarning)
    return x + 1


def warns_inline(x):
    return warns(x) + warns(x * 2)


@functools.lru_cache(None)
def warning_once(self, *args):
    self.warning(*args)


logging.Logger.warning_once = warning_once


def logs_once(x):
    log.warning_once("deprecated")
    log.warning_once("shape %s", x.shape[0])
    return x + 1


def values_and_end(x):
    print("a", x, end="~")
    x += 1
    print("a", x)
    return x * 2


def result_of_print(x):
    r = print("r")
    return x + 1, r


def data_written_later(x):
    y = x * 2
    data, other = x.data, y.data
    print(x, y, x.sum())
    data.add_(1)
    print(x, y)
    other.mul_(2)
    return x + y


ONE_GRAPH = [plain, tensors, options, formatted, written_later, input_written_later, alias_written_later]
ONE_GRAPH += [data_written_later]
ONE_GRAPH += [list_changed_later, inlined, in_loop, number_that_varies, under_no_grad, logged, logged_inline, result_of_print]
ONE_GRAPH += [warns, warns_inline, logs_once, values_and_end]


# Programs that break the graph as without PyGraph


def to_stderr(x):
    print("err", x.sum(), file=sys.stderr)
    return x + 1


class Named:
    def __str__(self) -> str:
        BOX.step += 1
        return f"named {BOX.step}"


NAMED = Named()


def prints_object(x):
    print(NAMED)
    return x + BOX.step


def in_try(x):
    try:
        print("try", x.sum())
    except ValueError:
        x = x + 1
    return x * 2


def index_later(x):
    print("before", x.sum())
    return x[(x > 0).long() * 9]


def embedding_later(x):
    print("before")
    return torch.nn.functional.embedding((x > 0).long() * 9, x.view(-1, 1))


def history(x):
    w = x.detach().requires_grad_()
    y = w * 2
    print(y)
    return y


def log_with_keywords(x):
    log.info("kept", extra={"more": 1})
    return x + 1


def warning_behind_a_change(x):
    BOX.seen.append(1)
    warnings.warn("w")
    return x + 1


def warning_before_a_write(x):
    warnings.warn("w")
    x += 1
    return x * 2


class CountingLogger(logging.Logger):
    def warning(self, *args):
        BOX.step += 1


counting_log = CountingLogger("counting")


def logger_of_another_class(x):
    counting_log.warning("counted")
    return x + BOX.step


class Other(UserWarning):
    pass


def prints_short(x):
    torch.set_printoptions(precision=2)
    print(x / 3)
    torch.set_printoptions(precision=4)
    return x + 1


class Numbering(logging.Filter):
    def filter(self, record):
        record.msg = f"[{BOX.step}] {record.msg}"
        return True


def logs_behind_a_change(x):
    BOX.step += 1
    log.info("trained")
    return x + 1


DATA = torch.zeros(4)
SAME = DATA.detach()


def written_through_another_input(x):
    view = DATA.view(-1)
    print(view, x.sum())
    SAME.add_(1)
    return x + 1


def warning_of_another_kind(x):
    warnings.warn("w", Other)
    warnings.warn("w", stacklevel=2)
    return x + 1


BREAKS = [logger_of_another_class, prints_short, warning_behind_a_change, warning_before_a_write, warning_of_another_kind, to_stderr, prints_object, in_try, index_later, embedding_later, history, log_with_keywords]


def around_a_break(x):
    print("one", x.sum())
    graph_break()
    print("two", x.mean())
    return x + 1


def printed_rows(x):
    for i in range(3):
        print("row", i)
        yield x * i


def in_a_generator(x):
    rows = printed_rows(x)
    y = next(rows)
    opaque(y)
    return y + next(rows)


def counted(x):
    BOX.step += 1
    print("step", BOX.step)
    BOX.seen.append(BOX.step)
    return x + 1


def raises(x):
    print("before", x.sum())
    if x.shape[0] == 4:
        raise ValueError("raised")
    return x


def raises_in_a_call(x):
    print("before", x.sum())
    y = x + 1
    print("then", y)
    raise_error(y)
    return y


@torch._dynamo.disable
def raise_error(y):
    raise RuntimeError(f"{y.sum()}")


class EffectTest(MendTestCase):
    @parametrize("fn", [subtest(fn, name=fn.__name__) for fn in ONE_GRAPH])
    def test_one_graph(self, fn):
        seen, found = self.observe_compiled(fn)
        warning_once.cache_clear()
        self.assertEqual(seen, self.observe(fn))
        self.assertEqual(found, {"graphs": 1, "breaks": 0})
        # Without PyGraph, resumed functions have other names in the log.
        _, without = self.observe_compiled(fn, pygraph_mend=False)
        self.assertNotEqual(without, found)

    @parametrize("fn", [subtest(fn, name=fn.__name__) for fn in BREAKS])
    def test_breaks(self, fn):
        self.assertEqual(self.observe_compiled(fn), self.observe_compiled(fn, pygraph_mend=False))

    @parametrize("fn", [subtest(fn, name=fn.__name__) for fn in (around_a_break, in_a_generator, counted, raises, raises_in_a_call, prints_short)])
    def test_order(self, fn):
        self.check(fn)

    @parametrize("fn", [subtest(fn, name=fn.__name__) for fn in (warns, warns_inline, warning_behind_a_change, warning_before_a_write)])
    @parametrize("action", ("error", "default", "ignore"))
    def test_filter(self, fn, action):
        self.action = action
        globals().pop("__warningregistry__", None)
        expected = self.observe(fn)
        globals().pop("__warningregistry__", None)
        seen, _ = self.observe_compiled(fn)
        self.assertEqual(seen, expected)
        self.assertEqual(isinstance(seen[1][0][0], tuple), action == "error")

    def test_filter_of_a_logger(self):
        """The filter sees what the program changed before the call."""
        # Without the handlers that pytest adds
        patch = mock.patch.object(log, "handlers", [])
        patch.start()
        self.addCleanup(patch.stop)
        self.assertEqual(self.check(logs_behind_a_change)["breaks"], 0)
        numbering = Numbering()
        log.addFilter(numbering)
        self.addCleanup(log.removeFilter, numbering)
        self.check(logs_behind_a_change)

    def test_inputs_that_share_memory(self):
        """Two inputs in the same memory have no common version. A print shows the values before a write of the other one."""
        seen, _ = self.observe_compiled(written_through_another_input)
        DATA.zero_()
        self.assertEqual(seen, self.observe(written_through_another_input))

    def test_gradients(self):
        """A tensor that is only printed has no part in the backward."""
        one, other = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)

        def fn(x):
            print(f"{(x * other).sum():.1f}")
            return (x * one).sum()

        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            torch.compile(fn, options={"pygraph": True})(torch.arange(4.0)).backward()
        self.assertEqual(text.getvalue(), "6.0\n")
        self.assertEqual(one.grad, torch.arange(4.0))
        self.assertIsNone(other.grad)
        self.assertEqual(counters["graph_break"], {})

    def test_parameter_that_is_written(self):
        """The text of a parameter is not that of a copy."""
        parameter = torch.nn.Parameter(torch.ones(2), requires_grad=False)

        def fn(x):
            print(parameter)
            parameter.add_(1)
            return x + 1

        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            torch.compile(fn, options={"pygraph": True})(torch.ones(2))
        self.assertEqual(text.getvalue(), "Parameter containing:\ntensor([1., 1.])\n")

    def test_print_that_is_replaced(self):
        compiled = torch.compile(plain, options={"pygraph": True})
        with contextlib.redirect_stdout(io.StringIO()):
            compiled(torch.ones(4))
        with mock.patch("builtins.print") as replaced:
            compiled(torch.ones(4))
        replaced.assert_called_once()

    def test_level_that_changes(self):
        def fn(x):
            log.info("sum %s", x.sum())
            return x + 1

        compiled = torch.compile(fn, options={"pygraph": True})
        with self.assertLogs(log, logging.INFO) as found:
            compiled(torch.ones(2))
            with mock.patch.object(log, "level", logging.ERROR):
                log.manager._clear_cache()
                compiled(torch.ones(2))
            log.manager._clear_cache()
            compiled(torch.ones(2))
        self.assertEqual(len(found.records), 2)

    @parametrize("fn", [subtest(fn, name=fn.__name__) for fn in (tensors, written_later, input_written_later, inlined)])
    def test_inductor(self, fn):
        with self.inductor():
            self.assertEqual(self.check(fn), {"graphs": 1, "breaks": 0})

    @parametrize("needs_gpu", (False, True))
    def test_index_on_a_gpu(self, needs_gpu):
        """The host does not see an index that is out of bounds. A text of the GPU's values could not be made then."""

        def fn(x, i):
            print("before", x.sum() if needs_gpu else x.shape)
            return x[i]

        with fake_cuda(), contextlib.redirect_stdout(io.StringIO()):
            x, i = torch.empty(4, device="cuda"), torch.empty(2, dtype=torch.int64, device="cuda")
            torch.compile(fn, options={"pygraph": True})(x, i)
        self.assertEqual(bool(counters["graph_break"]), needs_gpu)

    def test_off(self):
        found = torch._TorchCompileInductorWrapper("default", {"pygraph": True, "pygraph_mend": False}, None)
        self.assertNotEqual(type(found.dynamo_capabilities().extend_frame()).__name__, "MendingFrame")


instantiate_parametrized_tests(EffectTest)


if __name__ == "__main__":
    if HAS_CPU:
        run_tests()
