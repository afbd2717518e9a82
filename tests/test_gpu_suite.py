"""The logic behind the GPU record, on machines without a GPU."""

from __future__ import annotations

import copy
import dataclasses
import importlib.machinery
import importlib.util
import itertools
import json
import math
import subprocess
import sys
import threading
import time
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace

import pytest


ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "torch_overlay" / "benchmarks" / "dynamo"
sys.path.insert(0, str(BENCHMARKS))

from pygraph import outcomes, report  # noqa: E402
from pygraph.report import format_table  # noqa: E402
from pygraph.timing import (  # noqa: E402
    DRAWS,
    FEWEST_ROUNDS,
    LoopFailed,
    MAX_TIMES,
    ratio,
    time_interleaved,
    TIMES_DRAWN,
    Timing,
)


torch = pytest.importorskip("torch")

from pygraph import catalogue, frames, launches, plan, processes, program, schedule, smoke, suite, worker  # noqa: E402
from pygraph.case import Case  # noqa: E402
from pygraph.compare import compare, snapshot  # noqa: E402
from pygraph.models.small import MutatedInput  # noqa: E402


ROW = {
    "suite": "pi",
    "name": "case",
    "no_cg_us": 10.0,
    "stock_cg_us": 20.0,
    "pygraph_us": 8.0,
    "forced_node_update_us": 8.5,
    "ratios": {"no_cg": [0.79, 0.8, 0.81], "stock_cg": [0.39, 0.4, 0.41]},
    "choice": "node_update",
    "copied_bytes": 0,
    "stock_copied_bytes": 4096,
    "reserved_mib": 10,
    "stock_reserved_mib": 12,
    "equal": True,
    "bitwise": True,
    "max_diff": 0.0,
    "note": "",
}


def _case(**overrides):
    return Case("case", "pi", lambda small: torch.nn.Identity(), lambda small: ((), {}), **overrides)


# timing


def _timing(samples_us, host_us):
    return Timing.of(dict(enumerate(samples_us)), host_us)


class Device:
    """A clock, and a device that works behind the host."""

    def __init__(self):
        self.now = self.busy_until = 0.0
        self.order = []

    def loop(self, name, host, device):
        def run(calls):
            self.order.append(name)
            for _ in range(calls):
                self.now += host
                self.busy_until = max(self.busy_until, self.now) + device

        return run

    def synchronize(self):
        self.now = max(self.now, self.busy_until)

    def mark(self):
        return max(self.now, self.busy_until)

    def seconds(self, start, end):
        return end - start


def _time(device, loops, **options):
    return time_interleaved(loops, device.synchronize, clock=lambda: device.now, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_an_error_is_one_line(tmp_path):
    command = [sys.executable, "-m", "pygraph", "--suite", "pi", "--logs", str(tmp_path)]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "error: measuring needs a GPU; --smoke needs none\n")


def test_timing_is_the_slower_of_host_and_device():
    device = Device()
    loops = {"host bound": device.loop("h", 50e-6, 1e-6), "device bound": device.loop("d", 5e-6, 80e-6)}
    timings = _time(device, loops)
    assert timings["host bound"].median_us == pytest.approx(50, rel=0.01)
    assert timings["device bound"].median_us == pytest.approx(80, rel=0.01)
    assert timings["host bound"].iqr_us == pytest.approx(0, abs=0.1)
    assert timings["device bound"].host_us == pytest.approx(5, rel=0.01)


@pytest.mark.parametrize("host,device_s", ((2e-3, 6e-3), (6e-3, 2e-3), (5e-5, 1e-6)))
def test_marks_leave_out_what_the_first_call_waits_for(host, device_s):
    device = Device()
    loops = {"a": device.loop("a", host, device_s)}
    found = _time(device, loops, marks=device)["a"]
    assert found.median_us == pytest.approx(max(host, device_s) * 1e6)
    assert found.host_us == pytest.approx(host * 1e6)
    # Five calls from an idle device on.
    if device_s == 6e-3:
        assert _time(device, loops)["a"].median_us == pytest.approx((host / 5 + device_s) * 1e6)


def test_rounds_are_repeated_until_they_are_clear():
    device, seen = Device(), []

    def is_clear(timings):
        seen.append(len(timings["a"].samples_us))
        return len(seen) == 3

    loops = {"a": device.loop("a", 1e-3, 0)}
    timings = _time(device, loops, rounds=5, is_clear=is_clear)
    first = seen[0]
    assert seen == [first, 2 * first, 3 * first]
    assert len(timings["a"].samples_us) == 3 * first
    # Not for ever.
    timings = _time(device, loops, rounds=5, is_clear=lambda timings: False)
    assert len(timings["a"].samples_us) == MAX_TIMES * first
    # Twice the rounds would take longer than they may.
    loops = {"a": device.loop("a", 0.2, 0)}
    timings = _time(device, loops, rounds=9, is_clear=lambda timings: False)
    assert len(timings["a"].samples_us) == 9


def test_long_calls_are_few():
    device = Device()
    _time(device, {"a": device.loop("a", 0.03, 0)}, rounds=10)
    few = device.now
    _time(device, {"a": device.loop("a", 0.01, 0)}, rounds=10)
    assert few == pytest.approx(0.03 * (6 + 10 * 4))
    assert device.now - few == pytest.approx(0.01 * (6 + 10 * 9))


def test_rounds_are_interleaved():
    device = Device()
    _time(device, {name: device.loop(name, 1e-2, 0) for name in "abc"}, rounds=12)
    # Each turn is a lead-in, one call, none, and a measurement; before the rounds, all are estimated.
    turns = [device.order[i : i + 4] for i in range(6, len(device.order), 4)]
    assert all(len({*turn}) == 1 for turn in turns)
    rounds = ["".join(turn[0] for turn in turns[i : i + 3]) for i in range(0, len(turns), 3)]
    assert len(rounds) == 12
    assert {"".join(sorted(names)) for names in rounds} == {"abc"}
    # In several orders.
    assert len({*rounds}) > 3


def test_a_slow_loop_is_timed_in_fewer_rounds():
    device = Device()
    loops = {name: device.loop(name, host, 0) for name, host in (("fast", 1e-3), ("slow", 4e-3), ("slower", 2e-3))}
    timings = _time(device, loops)
    assert [len(timings[name].samples_us) for name in loops] == [21, 7, 21]
    # A ratio is of the rounds in which both were timed.
    assert ratio(timings["slow"], timings["fast"]) == pytest.approx((4, 4, 4))
    # Of few rounds, it is timed in all.
    assert [len(timing.samples_us) for timing in _time(device, loops, rounds=9).values()] == [9, 9, 9]


def test_loops_of_a_round_draw_the_same():
    device, drawn, work = Device(), [], {"a": [], "b": []}

    def loop(name):
        def run(calls):
            device.now += 1e-3 * calls
            work[name].append((drawn[-1:], calls))

        return run

    rounds = DRAWS + 2
    found = _time(device, {name: loop(name) for name in work}, rounds=rounds, fixed_calls=6, draw=drawn.append)
    assert len(found["a"].samples_us) == rounds
    timed = {name: [seed for (seed,), calls in filter(itemgetter(0), made) if calls == 6] for name, made in work.items()}
    assert timed["a"] == timed["b"] and [*timed["a"]][-rounds:] == [*range(DRAWS), 0, 1]
    # Each loop ran with each seed before the rounds. Calls in front of the timed ones have a seed, too.
    assert len(timed["a"]) == rounds + TIMES_DRAWN * DRAWS
    assert all(drawn for drawn, calls in work["a"][2:])


def test_rounds_that_take_long_are_fewer():
    device = Device()
    loops = {name: device.loop(name, 0.1, 0) for name in "abcdef"}
    assert {len(timing.samples_us) for timing in _time(device, loops).values()} == {8}
    assert {len(timing.samples_us) for timing in _time(device, loops, max_rounds_s=15).values()} == {6}
    # A few are made in any case.
    loops = {name: device.loop(name, 1.0, 0) for name in "abcdef"}
    assert {len(timing.samples_us) for timing in _time(device, loops).values()} == {FEWEST_ROUNDS}


def test_the_host_time_leaves_out_what_a_loop_sets_up():
    device = Device()

    def loop(calls):
        device.now += 30e-6
        device.loop("a", 50e-6, 1e-6)(calls)

    assert _time(device, {"a": loop})["a"].host_us == pytest.approx(50, rel=0.01)


def test_what_slows_a_round_is_in_no_ratio():
    slow = [1.0 + 0.5 * (i % 3) for i in range(21)]
    ours = _timing([0.9 * s for s in slow], [1.0])
    assert ratio(ours, _timing(slow, [1.0])) == pytest.approx((0.9, 0.9, 0.9))


def test_the_interval_of_a_ratio():
    one = _timing([1.0] * 21, [1.0])
    found = ratio(_timing([float(i) for i in range(1, 22)], [1.0]), one)
    # As in tables of the sign test: the 6th from either end, of 21.
    assert found == (6.0, 11.0, 16.0)
    # Of few rounds, all of them.
    assert ratio(_timing([1.0, 2.0, 3.0], [1.0]), _timing([1.0] * 3, [1.0])) == (1.0, 2.0, 3.0)


def test_slow_calls_still_get_a_few_and_the_collector_comes_back():
    import gc

    device = Device()
    assert _time(device, {"slow": device.loop("s", 1.0, 0)}, rounds=2)["slow"].median_us == pytest.approx(1e6)
    assert gc.isenabled()


def test_a_loop_that_fails_is_named():
    def broken(calls):
        raise ValueError("no")

    device = Device()
    with pytest.raises(LoopFailed) as failure:
        _time(device, {"good": device.loop("g", 1e-6, 0), "bad": broken})
    assert failure.value.name == "bad" and isinstance(failure.value.__cause__, ValueError)


def test_median_and_spread():
    assert _timing([1.0, 2.0, 3.0, 4.0, 100.0], [1.0]).median_us == 3.0
    assert _timing([5.0] * 8, [1.0, 2.0, 9.0]) == Timing(5.0, 0.0, 2.0, {})


# comparison


def _compare(reference, result, tolerance=1e-4):
    return compare(snapshot(reference), snapshot(result), tolerance)


def test_bitwise_equality_sees_zero_signs_and_accepts_nan():
    nan = torch.tensor([float("nan"), 1.0])
    assert _compare({"x": nan}, {"x": nan.clone()}).bitwise
    assert not _compare({"x": torch.zeros(1)}, {"x": -torch.zeros(1)}).bitwise
    scalar = torch.tensor(True)
    assert _compare([scalar], [scalar.clone()]).bitwise


def test_closeness_is_relative_to_the_values():
    small = torch.full((100,), 1e-6)
    close, far = _compare([small], [small * (1 + 1e-6)]), _compare([small], [small * 2])
    assert close.close and not close.bitwise
    # allclose with an absolute tolerance would let this pass.
    assert not far.close
    assert far.max_diff == pytest.approx(1e-6)


def test_rounding_is_relative_to_large_values():
    generator = torch.Generator().manual_seed(0)
    logits = 22 * torch.randn(100_000, generator=generator)
    tuned_apart = logits + 0.1 * torch.randn(100_000, generator=generator)
    assert _compare([logits], [tuned_apart], tolerance=1e-2).close
    tuned_apart[logits.abs().argmin()] = 11
    assert not _compare([logits], [tuned_apart], tolerance=1e-2).close


@pytest.mark.parametrize("exact", [None, {}])
def test_a_gradient_that_cancels_out_is_rounding(exact):
    weight = torch.randn(8, 8)
    close = []
    for reference, result in ((1e-9, 2e-9), (1e-9, 1e-3), (1e-3, 2e-3)):
        steps = [{"grads": {"weight": weight, "bias": torch.randn(8) * scale}} for scale in (reference, result)]
        close.append(compare(*map(snapshot, steps), 1e-4, exact).close)
    assert close == [True, False, False]
    # Outputs are what they are.
    assert not _compare({"weight": weight, "bias": torch.full((8,), 1e-9)}, {"weight": weight, "bias": torch.zeros(8)}).close


@pytest.mark.parametrize(
    ("changed", "where"),
    [
        (torch.zeros(2, 3, dtype=torch.float64), "dtype"),
        (torch.zeros(3, 2), "shape"),
        (torch.zeros(3, 2).t(), "stride"),
        (None, "x"),
    ],
)
def test_metadata_counts(changed, where):
    difference = _compare({"x": torch.zeros(2, 3)}, {"x": changed})
    assert not difference.close and where in difference.where


def test_a_missing_result_is_a_difference():
    assert not compare(snapshot({"a": 1, "b": 2}), snapshot({"a": 1}), 1e-4).close


def test_integers_are_equal_or_not():
    difference = _compare([torch.tensor([1, 2])], [torch.tensor([1, 3])], tolerance=1.0)
    assert not difference.close and difference.max_diff == 1


def test_the_worst_difference_is_named():
    reference = {"a": torch.ones(4), "b": torch.ones(4)}
    result = {"a": torch.ones(4) * (1 + 1e-6), "b": torch.ones(4) * 3}
    difference = _compare(reference, result)
    assert "b" in difference.where and difference.max_diff == pytest.approx(2.0)


def test_snapshots_outlive_their_source():
    x = torch.ones(2)
    copy = snapshot([x])
    x.zero_()
    assert compare(copy, snapshot([torch.ones(2)]), 0.0).bitwise


# cases, in a process without CUDA graphs


@pytest.fixture(autouse=True)
def _reset_dynamo():
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    # More wait for each other longer than such sizes compute.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _variant(name, compile):
    return dataclasses.replace(program.VARIANTS[name], compile=compile, config={})


# Those that run without a GPU, and in this process.
PI = [name for name in catalogue.SUITES["pi"].variants if name not in ("hand_written", "jax")]
EAGER = {name: _variant(name, {"backend": "eager"}) for name in PI}


def _measure(case, variants, **options):
    run = worker.CaseRun(case, "cpu", small=True, variants=variants, rounds=2, round_s=1e-4, **options)
    run.prepare()
    return run.measure()


def _tiny(mode="inference", module=None):
    return Case(
        "tiny",
        "pi",
        module or (lambda small: MutatedInput(4, 1)),
        lambda small: ((torch.randn(2, 4), torch.randn(2, 4)), {}),
        mode,
    )


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_equal_variants(mode):
    row = _measure(_tiny(mode), EAGER)
    assert row["equal"] and row["bitwise"] and row["repeatable"] and not row["note"]
    assert set(row["spread"]) == set(row["host_us"]) == set(PI)
    assert all(row[key] > 0 for key in ("no_cg_us", "stock_cg_us", "pygraph_us", "forced_node_update_us"))
    json.dumps(row)


def _backend(change):
    def compile_with(module, inputs):
        return change(module.forward)

    return {"backend": compile_with}


def test_a_wrong_result_is_found():
    wrong = _backend(lambda forward: lambda *args: tuple(out * 1.5 for out in forward(*args)))
    row = _measure(_tiny(), {**EAGER, "pygraph": _variant("pygraph", wrong)})
    assert not row["equal"] and row["max_diff"] > 0


def test_a_result_that_is_wrong_once_is_found():
    calls = []

    def sometimes(forward):
        def run(*args):
            calls.append(1)
            return tuple(out + (len(calls) == 9) for out in forward(*args))

        return run

    assert not _measure(_workload(), {**EAGER, "pygraph": _variant("pygraph", _backend(sometimes))})["equal"]


def test_stale_inputs_are_found():
    # As a graph that replays the addresses it was captured with.
    def first_inputs(forward):
        kept = []

        def run(*args):
            kept.append(args)
            return forward(*kept[0])

        return run

    assert not _measure(
        _tiny(), {**EAGER, "forced_node_update": _variant("forced_node_update", _backend(first_inputs))}
    )["equal"]


class Unrepeatable(torch.nn.Module):
    """As a kernel that adds in any order."""

    runs = 0

    def forward(self, x, counter):
        return x + counter


def test_results_close_to_an_unrepeatable_reference_are_equal():
    def drift(forward):
        def run(*args):
            Unrepeatable.runs += 1
            return tuple(out * (1 + 1e-6 * (Unrepeatable.runs % 7)) for out in forward(*args))

        return run

    drifting = {name: _variant(name, _backend(drift)) for name in PI}
    row = _measure(_tiny(module=lambda small: Unrepeatable()), drifting)
    assert row["equal"] and not row["bitwise"] and not row["repeatable"]


@pytest.mark.parametrize("in_tf32", [False, True])
def test_other_kernels_in_tf32_give_close_results(in_tf32):
    def rounded(forward):
        return lambda *args: tuple(out * (1 + 2e-5) for out in forward(*args))

    variants = {**EAGER, "pygraph": _variant("pygraph", _backend(rounded))}
    row = _measure(dataclasses.replace(_tiny(), in_tf32=in_tf32), variants)
    assert row["equal"] == in_tf32 and row["repeatable"] and not row["bitwise"]


def _failing_from(call):
    calls = []

    def fail(forward):
        def run(*args):
            calls.append(1)
            if len(calls) >= call:
                raise ValueError("no\nmore")
            return forward(*args)

        return run

    return _backend(fail)


# When it is compiled, while it settles, when it is timed.
@pytest.mark.parametrize(("failing", "call"), [("pygraph", 1), ("forced_node_update", 4), ("stock_cg", 20)])
def test_a_variant_that_fails_leaves_the_others_their_results(failing, call):
    row = _measure(_tiny(), {**EAGER, failing: _variant(failing, _failing_from(call))})
    assert row["failed"] == {failing: "ValueError: no"} and row[f"{failing}_us"] is None
    assert all(row[f"{name}_us"] > 0 for name in PI if name != failing)
    assert row["equal"] == (failing == "stock_cg")
    assert f"{failing}: ValueError: no" in format_table([{**row, "missed": []}])


def test_a_device_that_is_lost_ends_the_case_and_names_the_variant(monkeypatch):
    told = []
    run = worker.CaseRun(
        _tiny(),
        "cpu",
        small=True,
        variants={**EAGER, "stock_cg": _variant("stock_cg", _failing_from(2))},
        rounds=2,
        round_s=1e-4,
        on_variant=told.append,
    )
    run.prepare()

    def synchronize():
        if run.failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(run, "_synchronize", synchronize)
    with pytest.raises(worker.DeviceLost, match="ValueError: no"):
        run.measure()
    assert told[-1] == "stock_cg"


# against eager


WORKLOAD = {name: _variant(name, None if name == "eager" else {"backend": "eager"}) for name in (*PI, "eager")}


def _workload(mode="inference", module=None, **overrides):
    return dataclasses.replace(_tiny(mode, module), suite="paper", about="a case", **overrides)


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_variants_equal_to_eager(mode):
    row = _measure(_workload(mode), WORKLOAD)
    assert row["equal"] and row["bitwise"] and not row["failed"] and not row["note"]
    assert row["eager_us"] > 0
    assert (row["mode"], row["about"]) == (mode, "a case")


def test_all_kernels_can_be_wrong_alike():
    wrong = _backend(lambda forward: lambda *args: tuple(out * 1.5 for out in forward(*args)))
    variants = {name: _variant(name, wrong) for name in WORKLOAD} | {"eager": WORKLOAD["eager"]}
    row = _measure(_workload(), variants)
    assert row["bitwise"] is False and not row["equal"]
    assert set(row["failed"]) == set(PI)
    assert row["failed"]["no_cg"] == "wrong result: ['outputs'] differs from eager's"


def test_a_case_that_eager_cannot_repeat_says_so():
    wrong = _backend(lambda forward: lambda *args: tuple(out * 1.5 for out in forward(*args)))
    variants = {name: _variant(name, wrong) for name in WORKLOAD} | {"eager": WORKLOAD["eager"]}
    row = _measure(_workload(not_as_eager="it rolls dice"), variants)
    assert row["equal"] and not row["failed"] and row["note"] == "the suite does not compare its results with eager mode's: it rolls dice"


def test_other_kernels_may_round_as_they_like():
    rounding = _backend(lambda forward: lambda *args: tuple(out * (1 + 1e-7) for out in forward(*args)))
    variants = {name: _variant(name, rounding) for name in WORKLOAD} | {"eager": WORKLOAD["eager"]}
    row = _measure(_workload(), variants)
    assert row["equal"] and row["bitwise"] and not row["failed"]


class Cancels(torch.nn.Module):
    """What is left in float32 is exact to three digits."""

    def forward(self, x, y):
        return (x * 1e4 + y) - x * 1e4


def _noisy(name):
    """Off by another small number in each call."""
    errors = itertools.cycle([1e-4, 2e-4, 3e-4, 4e-4, 5e-4])
    noise = _backend(lambda forward: lambda *args: tuple(out + next(errors) for out in forward(*args)))
    return {name: _variant(name, noise)}


def test_stock_may_round_otherwise_where_eager_is_no_more_exact():
    row = _measure(_workload(module=lambda small: Cancels()), {**WORKLOAD, **_noisy("stock_cg")})
    assert row["bitwise"] and not row["failed"]
    assert row["note"] == "stock_cg is hardly further from exact results than eager: ['outputs']"


def test_pygraph_may_not_where_no_cg_repeats_itself():
    row = _measure(_workload(module=lambda small: Cancels()), {**WORKLOAD, **_noisy("pygraph")})
    assert not row["equal"] and set(row["failed"]) == {"pygraph"}


@pytest.mark.parametrize("on_the_cpu", [False, True])
def test_what_is_computed_on_the_cpu_may_round_otherwise(on_the_cpu, monkeypatch):
    monkeypatch.setattr(worker, "reads_cpu_values", lambda: on_the_cpu)
    row = _measure(_workload(module=lambda small: Cancels()), {**WORKLOAD, **_noisy("pygraph")})
    assert row["equal"] == on_the_cpu and row["repeatable"] and not row["bitwise"]
    assert ("pygraph" in row["failed"]) != on_the_cpu


def test_which_programs_have_other_graphs():
    def has_same(suite_name, *counts):
        run = worker.CaseRun(dataclasses.replace(_tiny(), suite=suite_name), "cpu", variants={})
        frames = [SimpleNamespace(breaks=breaks, graphs=graphs) for breaks, graphs in counts]
        run.frames = dict(zip(("no_cg", "pygraph"), frames))
        return run._has_graphs_of("no_cg", ["pygraph"])

    assert not has_same("modern", (8, 7), (0, 1)) and not has_same("mend", (8, 7), (0, 1))
    # PyGraph's program may run what Dynamo compiled for the other.
    assert has_same("modern", (0, 1), (0, 0)) and not has_same("mend", (1, 0), (1, 2))


def test_graph_breaks_of_a_program_that_was_dropped():
    """Its results are still compared with those of others."""
    run = worker.CaseRun(_tiny(), "cpu", variants=EAGER)
    run._compile("pygraph")
    run._drop("pygraph")
    assert run._traced() == {"breaks": 0, "dynamo_graphs": 1, "first_breaks": 0}


def test_kernels_of_other_graphs_may_round_otherwise(monkeypatch):
    """Where PyGraph repairs a graph break of the variant that it is compared with."""
    monkeypatch.setattr(worker.CaseRun, "_has_graphs_of", lambda self, reference, names: False)
    row = _measure(_workload(module=lambda small: Cancels()), {**WORKLOAD, **_noisy("pygraph")})
    assert row["equal"] and not row["bitwise"] and not row["failed"]


@pytest.mark.parametrize("known", [True, False])
def test_what_does_not_repeat_is_as_exact_as_eager(known, monkeypatch):
    if not known:
        monkeypatch.setattr(worker.CaseRun, "_exact", lambda self, inputs: {})
    variants = {**WORKLOAD, **_noisy("pygraph"), **_noisy("no_cg")}
    row = _measure(_workload(module=lambda small: Cancels()), variants)
    assert row["equal"] == known and not row["bitwise"] and not row["repeatable"]
    assert ("pygraph" in row["failed"]) != known


def test_a_failing_eager_leaves_the_others_their_results(monkeypatch):
    step = program.Program.step

    def failing(self, args, kwargs):
        if self.compiled is self.module:
            raise ValueError("no eager")
        return step(self, args, kwargs)

    monkeypatch.setattr(program.Program, "step", failing)
    row = _measure(_workload(), WORKLOAD)
    assert row["failed"] == {"eager": "ValueError: no eager"}
    assert row["equal"] and row["pygraph_us"] > 0


def test_dropout_drops_nothing_when_compared_with_eager():
    case = _workload("training", lambda small: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)))
    case = dataclasses.replace(case, inputs=lambda small: ((torch.randn(8, 4),), {}))
    assert _measure(case, WORKLOAD)["bitwise"]
    assert program.build(case, torch.device("cpu"), True)[1].p > 0
    assert program.build(dataclasses.replace(case, suite="pi"), torch.device("cpu"), True)[1].p == 0.5


@pytest.mark.parametrize("options", [{}, {"pygraph": True}])
def test_a_frame_that_breaks_and_runs_eagerly_is_one_break(options):
    def reads_locals(x):
        y = x.sin() * 2
        for _ in range(2):
            torch._dynamo.graph_break()
        return y, sorted(locals())

    found = frames.Frames()
    with found.running():
        torch.compile(reads_locals, options=options)(torch.ones(2))
    assert (found.graphs, found.breaks) == (0, 1)


def test_a_frame_that_is_compiled_again_is_one_break():
    def prints(x):
        y = x.sin() * 2
        torch._dynamo.graph_break()
        return y + 1

    found = frames.Frames()
    with found.running():
        for size in (2, 3):
            torch.compile(prints, dynamic=False, backend="eager")(torch.ones(size))
    assert (found.graphs, found.breaks) == (4, 1)


def test_slow_calls_are_timed_in_fewer_rounds():
    run = worker.CaseRun(_tiny(), "cpu", small=True, variants=EAGER, rounds=21, round_s=0.05)
    for call_s, rounds in ((0.0, 21), (1e-3, 21), (10e-3, 14), (1.0, 9)):
        run.call_s = call_s
        assert run._rounds() == rounds
    run.rounds = 2
    assert run._rounds() == 2


def test_without_time_only_what_matters_is_compiled():
    options = {"small": True, "rounds": 2, "round_s": 1e-4, "has_time": lambda: False}
    run = worker.CaseRun(_workload(), "cpu", variants=WORKLOAD, **options)
    run.prepare()
    row = run.measure()
    assert {name for name in WORKLOAD if f"{name}_us" in row} == {*worker.ESSENTIAL}
    assert row["left_out"] == [name for name in WORKLOAD if name not in worker.ESSENTIAL] and row["equal"]
    # PyGraph's kernels are counted, as no forced variant took its place.
    assert [name for name in run.suite.profiled if name in run.programs] == ["stock_cg", "pygraph"]
    # What the row is judged by is compiled.
    run = worker.CaseRun(_tiny(), "cpu", variants=EAGER, **options)
    run.prepare()
    assert {*run.suite.must_equal} <= run.programs.keys() and not run.left_out


@pytest.mark.parametrize("spreads", [(0.05,), (0.3, 0.05), (0.3, 0.2)])
def test_a_noisy_case_is_timed_again_and_then_marked(spreads, monkeypatch):
    left = list(spreads)

    def timed(loops, *args, **options):
        spread = left.pop(0) if len(loops) > 1 else 0.0
        return {name: _timing([10 - 10 * spread, 10.0, 10 + 10 * spread], [1.0]) for name in loops}

    monkeypatch.setattr(worker, "time_interleaved", timed)
    quiet = []
    row = _measure(_tiny(), {name: EAGER[name] for name in ("no_cg", "stock_cg")}, be_quiet=quiet.append)
    assert left == [] and row.get("noise", 0.0) == pytest.approx(0.4 if spreads == (0.3, 0.2) else 0.0)
    assert quiet == [True, False] * len(spreads)
    assert len(row["eager_loop_us"]) == 2 * len(spreads) and min(row["eager_loop_us"]) > 0


def test_stock_meets_random_sizes_last():
    """Its recordings empty the allocator's cache, for which the next variant would pay."""
    run, ran = worker.CaseRun(_tiny(), "cpu", variants=EAGER), []
    run._program = lambda name: SimpleNamespace(loop=lambda inputs: lambda calls: ran.append(name))
    run._captured = lambda name: (len(ran), 0)
    found = run._sweep(["no_cg", "stock_cg", "pygraph"])
    # The first is not timed.
    assert ran == ["no_cg", "no_cg", "pygraph", "stock_cg"]
    assert found.keys() == {"no_cg", "stock_cg", "pygraph"} and all(row["calls"] for row in found.values())


def test_what_a_variant_leaves_of_the_time_to_settle_is_for_the_next(monkeypatch):
    """
    The last variant that selects may use all of the time that is left. A variant that does not select makes a few calls. They
    use up none of that time.
    """
    variants = {name: EAGER[name] for name in ("no_cg", "pygraph")} | {"chain": _variant("chain", {"backend": "eager"})}
    run, left = worker.CaseRun(_tiny(), "cpu", variants=variants), []
    run.settle_s = 100.0
    now = iter((0.0, 60.0, 100.0, 110.0, 150.0, 200.0, 200.0))
    monkeypatch.setattr(worker.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(program.Variant, "selects", property(lambda variant: variant is not EAGER["no_cg"]))
    for name in ("pygraph", "pygraph", "no_cg", "chain"):
        with run._settling_by(name) as by:
            left.append(by)
    assert left == pytest.approx([70.0, 100.0 + 28.0, 150.0 + 30.0, 200.0 + 30.0])


@pytest.mark.parametrize("selects", [True, False])
def test_a_variant_that_selects_makes_fewer_calls_once_its_time_is_over(monkeypatch, selects):
    """Each of its calls may record."""
    run = worker.CaseRun(_tiny(), "cpu", variants=EAGER)
    monkeypatch.setattr(program.Variant, "selects", property(lambda variant: selects))
    by, calls = time.perf_counter() - 1, 0
    while run._settling("pygraph", calls, by):
        calls += 1
    assert calls == (worker.MIN_WARM_UP_CALLS if selects else worker.SETTLE_CALLS["pygraph"])


def test_what_took_long_is_not_timed_again(monkeypatch):
    noisy = _timing([5.0, 10.0, 15.0], [1.0])
    monkeypatch.setattr(worker, "time_interleaved", lambda loops, *args, **options: dict.fromkeys(loops, noisy))
    monkeypatch.setattr(worker, "AGAIN", 0.0)
    row = _measure(_tiny(), {name: EAGER[name] for name in ("no_cg", "stock_cg")})
    assert row["noise"] > 0.1 and len(row["eager_loop_us"]) == 2


@pytest.mark.parametrize("has_memory", [True, False])
def test_pygraph_takes_turns_with_what_is_captured_by_hand(monkeypatch, has_memory):
    order, timed = [], worker.CaseRun._time
    monkeypatch.setattr(worker, "HandWritten", worker.Program)
    monkeypatch.setattr(worker.CaseRun, "_applies", lambda self, variant: True)
    monkeypatch.setattr(worker.CaseRun, "_has_memory_for_more", lambda self: has_memory)
    monkeypatch.setattr(worker.CaseRun, "_time", lambda self, names, ring: order.append([*names]) or timed(self, names, ring))
    names = "no_cg", "stock_cg", "pygraph", "forced_node_update", "hand_written"
    variants = {name: EAGER.get(name, EAGER["no_cg"]) for name in names}
    for name in names[3:]:
        variants[name] = dataclasses.replace(variants[name], alone=True, hand_written=name == "hand_written")
    row = _measure(_tiny(), variants)
    by_hand = ["pygraph", "hand_written"] if has_memory else ["hand_written"]
    assert order == [["no_cg", "stock_cg", "pygraph"], by_hand, ["forced_node_update"]]
    assert ("pygraph_beside_hand_us" in row) is has_memory
    assert row["hand_written_us"] > 0 and row["forced_node_update_us"] > 0 and row["equal"]


def test_pygraph_selects_while_nothing_else_runs(monkeypatch):
    quiet, settled = [False], {}

    def settle(self, name, ring, expected):
        settled[name] = quiet[-1]
        return original(self, name, ring, expected)

    original = worker.CaseRun._settle
    monkeypatch.setattr(worker.CaseRun, "_settle", settle)
    monkeypatch.setattr(program.Variant, "selects", property(lambda variant: variant is EAGER["pygraph"]))
    assert _measure(_tiny(), EAGER, be_quiet=quiet.append)["equal"]
    assert settled == {"stock_cg": False, "pygraph": True, "forced_node_update": False} and not quiet[-1]


def test_a_case_that_takes_long_is_measured_in_fewer_ways(monkeypatch):
    monkeypatch.setattr(worker, "ENOUGH", 0.0)
    row = _measure(_tiny(), EAGER)
    assert row["forced_node_update_us"] is None and "no time to measure forced_node_update" in row["note"]
    assert row["pygraph_us"] and row["stock_cg_us"]


def test_this_build_has_every_setting():
    known = torch._inductor.config.get_config_copy().keys()
    for variant in program.VARIANTS.values():
        assert {*(variant.compile or {}).get("options", {}), *variant.config} <= known


def test_buffers_start_from_the_same_state():
    # As a cache that a decoder fills.
    class Cache(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(2, 4))

        def forward(self, x, y):
            self.seen.add_(x)
            return self.seen + y

    row = _measure(_workload(module=lambda small: Cache()), WORKLOAD)
    assert row["bitwise"]


def test_buffers_may_become_one():
    # As the frequencies of rotary embeddings do in transformers.
    class Rotary(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("original", torch.ones(4))
            self.register_buffer("scaled", torch.ones(4))

        def forward(self, x, y):
            self.scaled = self.original
            return self.scaled * x + y

    assert _measure(_workload(module=lambda small: Rotary()), WORKLOAD)["bitwise"]


def test_inference_shares_weights_and_training_does_not():
    for mode, shared in (("inference", True), ("training", False)):
        case = _workload(mode)
        original = program.build(case, torch.device("cpu"), True)
        copy = program.Program(case, original, program.VARIANTS["eager"], "cpu").module
        pairs = list(zip(original.parameters(), copy.parameters()))
        assert pairs and all((a is b) == shared for a, b in pairs)


def test_clones_alias_as_the_originals():
    x = torch.ones(2)
    (a, (b, c)), _ = program.clone(((x, (x, 3)), {}))
    assert a is b and a is not x and c == 3


def test_loss_is_the_models_own_or_of_all_outputs():
    x = torch.ones(4, requires_grad=True)
    assert program.loss_of(SimpleNamespace(loss=x)) is x
    assert program.loss_of(2 * x).item() == 4
    assert program.loss_of((2 * x, (x.sum(), 3))).item() == 8


def test_state_is_restored_before_each_comparison():
    # Weights and running statistics move at every step, yet every step starts from the same.
    def build(small):
        return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))

    case = Case("bn", "pi", build, lambda small: ((torch.randn(8, 4),), {}), "training")
    assert _measure(case, EAGER)["bitwise"]


def test_variants_do_not_evict_each_other():
    run = worker.CaseRun(_tiny(), "cpu", small=True, variants=EAGER, rounds=2, round_s=1e-4)
    run.prepare()
    assert "compiled again" not in run.measure()["note"]


@pytest.mark.parametrize("case", catalogue.CASES.values(), ids=lambda case: case.name)
def test_smoke(case):
    if case.missing:
        pytest.skip(f"needs {case.missing}")
    assert smoke.twice(case).bitwise


def test_the_suites():
    by_suite = {suite: catalogue.select(suite) for suite in catalogue.SUITES}
    assert len(by_suite["pi"]) == 14 and len(by_suite["scg"]) >= 30
    papers = [case.paper for case in by_suite["paper"]]
    assert len(papers) == len(set(papers)) == 25 and all(papers)
    assert all(case.about for suite in ("paper", "modern") for case in by_suite[suite])
    assert all(case.suite == "quick" for case in by_suite["quick"]) and 5 <= len(by_suite["quick"]) <= 12
    assert all(case.tolerance > 0 for case in catalogue.CASES.values())
    assert all(set(suite.variants) <= set(program.VARIANTS) for suite in catalogue.SUITES.values())


def test_selecting_cases():
    assert [case.name for case in catalogue.select("pi", ["conv2d", "mlp_20x64"])] == ["mlp_20x64", "conv2d"]
    with pytest.raises(ValueError, match="no case nonsense"):
        catalogue.select("pi", ["nonsense"])


def test_cases_of_several_suites():
    gpu_suite = _gpu_suite()

    def wanted(*arguments):
        return [(unit.kind, unit.name) for unit in gpu_suite.wanted(gpu_suite._parser().parse_args(arguments))]

    assert wanted("--suite", "pi", "--cases", "conv2d") == [("pi", "conv2d")]
    both = wanted("--suite", "pi,sizes", "--cases", "sizes/bert_lengths,pi/conv2d")
    assert both == [("pi", "conv2d"), ("sizes", "bert_lengths")]
    with pytest.raises(ValueError, match="SUITE/NAME.*: conv2d"):
        wanted("--suite", "pi,sizes", "--cases", "conv2d")


def test_a_variant_alone_is_settled_timed_and_weighed(monkeypatch):
    calls = []

    def count(forward):
        def run(*args):
            calls.append(1)
            return forward(*args)

        return run

    amounts = {"memory_reserved": 3 * 2**20, "max_memory_reserved": 2**23, "max_memory_allocated": 2**22}
    for name, value in {"synchronize": None, **amounts}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    segments = [((0, 0), 2**21, 2**20), ((0, 1), 2**22, 0), ((0, 2), 2**21, 2**21)]
    snapshot = [dict(zip(("segment_pool_id", "total_size", "allocated_size"), segment)) for segment in segments]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda include_traces: snapshot)
    variants = {"pygraph": _variant("pygraph", _backend(count))}
    launched = {"copied_bytes": 8, "kernels": 2.0, "kernels_in_graphs": 1.0, "graph_launches": 1.0}
    monkeypatch.setattr(worker.CaseRun, "_launches", lambda self, loop: launched)
    case = _workload()

    def alone(case):
        run = worker.CaseRun(case, "cpu", small=True, variants=variants)
        run.compile_alone("pygraph")
        return run.settle_alone("pygraph")

    assert alone(case)["launches"] == launched
    calls.clear()
    found = alone(_tiny())
    assert found.pop("launches") == launched
    assert found.pop("warm_up_s") >= 0
    assert found.pop("pools_mib") == {"graphs": (6, 2), "others": (2, 1)}
    assert found == {"reserved_mib": 3, "peak_reserved_mib": 8, "peak_allocated_mib": 4, "choice": None}
    assert len(calls) == worker.SETTLE_CALLS["pygraph"] + worker.CALLS_AFTER_DECISION


# what is launched


def test_kernels_belong_to_graphs_by_correlation():
    def event(cat, name, correlation):
        return {"cat": cat, "name": name, "args": {"correlation": correlation}}

    events = [
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        event("cuda_runtime", "cudaLaunchKernel", 1),
        event("kernel", "triton_", 1),
        event("cuda_runtime", "cudaGraphLaunch", 2),
        event("kernel", "triton_", 2),
        event("kernel", "gemm", 2),
        # Of the driver's cuGraphLaunch, which is not in the trace.
        event("kernel", "triton_", 3),
        event("cuda_driver", "cuLaunchKernelEx", 5),
        event("kernel", "triton_", 5),
        event("gpu_memcpy", "Memcpy DtoD", 4),
    ]
    assert launches.counted(events) == {"kernels": 5, "kernels_in_graphs": 3, "graph_launches": 2}


def test_copies_of_inputs_are_counted(monkeypatch):
    from torch._inductor.cudagraph_trees import CUDAGraphNode

    node = SimpleNamespace(non_static_input_idx=[0, 2], expanded_dims=[[], [], []])
    srcs = [torch.ones(3), torch.ones(100), torch.ones(5, dtype=torch.int64)]
    dsts = [torch.zeros_like(t) for t in srcs]
    original = CUDAGraphNode._copy_inputs_and_remove_from_src
    with launches.counting_copies() as sizes:
        CUDAGraphNode._copy_inputs_and_remove_from_src(node, dsts, srcs)
    assert sizes == [12, 40] and dsts[2].sum() == 5
    assert CUDAGraphNode._copy_inputs_and_remove_from_src is original


# the suite


class FakeWorker:
    answers: dict[str, dict] = {}
    closed: list[str] = []
    started: list[FakeWorker] = []
    quiet_s = now = 0.0
    max_s = max_quiet_s = math.inf

    def __init__(self, case, options, logs, threads, machine, cold=False):
        self.case, self.options, self.machine, self.cold = case, options, machine, cold
        self.at = ""
        self.spent = {}
        self.started.append(self)

    def forget_decisions(self):
        pass

    def clock(self):
        return self.now

    def ask(self, command, deadline):
        without = self.options[-1] if "--without" in self.options else ""
        key = f"{self.case.name} {command}{without and ' without ' + without}"
        if command.startswith("compile_alone"):
            # The worker builds the program first.
            self.now += 1.0 + ALONE["compile_s"]
            return {"compile_s": ALONE["compile_s"]}
        if command.startswith("fill_caches"):
            self.now += 2.0
            return {}
        nothing = {"error": "nothing to say"} if command.startswith("settle_alone") else None
        answer = self.answers.get(key, nothing)
        answer = answer.pop(0) if isinstance(answer, list) else copy.deepcopy(answer)
        self.at = answer.pop("at", "")
        return answer

    def close(self):
        self.closed.append(self.case.name)


def _run_suite(
    names,
    answers,
    budget_s=100.0,
    suite_name="pi",
    on_row=lambda row: None,
    device_gib=math.inf,
    record=None,
    claims=None,
    **overrides,
):
    FakeWorker.answers, FakeWorker.closed, FakeWorker.started = answers, [], []
    build = (lambda small: torch.nn.Identity(), lambda small: ((), {}))
    selected = [Case(name, suite_name, *build, **overrides) for name in names]
    return suite.run_suite(
        selected,
        options=[],
        logs=Path(),
        budget_s=budget_s,
        device_gib=device_gib,
        record=record,
        claims=claims,
        on_row=on_row,
        start_worker=FakeWorker,
    )


ALONE = {"compile_s": 2.0, "warm_up_s": 0.5, "peak_allocated_mib": 7.0}
POOLS = {"graphs": [6, 2], "others": [2, 1]}
SETTLED = {"warm_up_s": ALONE["warm_up_s"], "peak_allocated_mib": ALONE["peak_allocated_mib"], "pools_mib": POOLS}
MEMORY = {
    "a settle_alone stock_cg": {**SETTLED, "reserved_mib": 20.2, "peak_reserved_mib": 30.0, "choice": None},
    "a settle_alone pygraph": {**SETTLED, "reserved_mib": 10.4, "peak_reserved_mib": 31.0, "choice": "no_graph"},
}


def test_a_suite_merges_memory_into_the_rows():
    answers = {"a prepare": {}, "a measure": {**ROW, "name": "a"}, **MEMORY}
    (row,), skipped = _run_suite(["a"], answers, alone=True)
    assert (row["reserved_mib"], row["stock_reserved_mib"], row["peak_reserved_mib"]) == (10, 20, 31)
    assert row["pools_mib"] == {"stock_cg": POOLS, "pygraph": POOLS}
    assert row["note"] == "ran alone with no_graph"
    assert row["missed"] == [] and skipped == [] and row["alone"] == {"stock_cg": ALONE, "pygraph": ALONE}
    # Of the two that run alone: three seconds each.
    assert row["seconds"] == {"compile": 6.0, "longest": 0.0, "measure": 0.0, "device": 0.0}
    # In which order they start depends on the threads.
    assert sorted(worker.cold for worker in FakeWorker.started) == [False, True, True]
    # The others say nothing of memory.
    (row,), _ = _run_suite(["a"], {"a prepare": {}, "a measure": {**ROW, "name": "a"}})
    assert "alone" not in row and len(FakeWorker.started) == 1


def test_a_case_that_fails_is_a_row():
    rows, _ = _run_suite(
        ["a", "b", "c"],
        {
            "a prepare": {},
            "a measure": {**ROW, "name": "a"},
            "b prepare": {"error": "OutOfMemoryError: no"},
            "c prepare": {},
            "c measure": {"error": "process ended with status -11"},
            **MEMORY,
        },
    )
    found = {row["name"]: row["missed"] for row in rows}
    assert found == {"a": [], "b": ["OutOfMemoryError: no"], "c": ["process ended with status -11"]}
    assert set(FakeWorker.closed) == {"a", "b", "c"}
    table = format_table(rows)
    assert "b: OutOfMemoryError: no" in table


def test_a_case_begins_before_its_variants_alone(monkeypatch):
    """It takes longest: it compiles all variants."""
    monkeypatch.setattr(suite.os, "sched_getaffinity", lambda pid: range(1))
    _run_suite(["a"], {"a prepare": {}, "a measure": {**ROW, "name": "a"}, **MEMORY}, alone=True)
    assert [worker.cold for worker in FakeWorker.started] == [False, True, True]


def test_workloads_run_alone_from_cold_caches():
    launched = {"copied_bytes": 8, "kernels": 2.0, "kernels_in_graphs": 1.0, "graph_launches": 1.0}
    row = {**ROW, "name": "a", "suite": "paper", "launches": {"stock_whole": launched}}
    answers = {"a prepare": {}, "a measure": row, **copy.deepcopy(MEMORY)}
    answers["a settle_alone stock_cg"]["launches"] = launched
    answers["a settle_alone pygraph"]["launches"] = {"error": "RuntimeError: no"}
    (row,), _ = _run_suite(["a"], answers, suite_name="paper", alone=True)
    assert row["alone"] == {"stock_cg": ALONE, "pygraph": ALONE}
    assert row["launches"] == {"stock_whole": launched, "stock_cg": launched} and row["stock_reserved_mib"] == 20
    assert "pygraph was not profiled: RuntimeError: no" in row["note"]
    # Where it ran beside others, they may keep its functions from being captured.
    beside = {**launched, "kernels_in_graphs": 0.0}
    for choice, expected in ("node_update", launched), ("1 node_update + 1 undecided", beside):
        answers["a measure"] = {**row, "launches": {"pygraph": beside}}
        answers["a settle_alone pygraph"] |= {"launches": launched, "choice": choice}
        (found,), _ = _run_suite(["a"], answers, suite_name="paper", alone=True)
        assert found["launches"]["pygraph"] == expected


def test_rows_are_complete_when_they_are_told():
    found = []
    answers = {"a prepare": {}, "a measure": {**ROW, "name": "a"}, "b prepare": {}, "b measure": {**ROW, "name": "b"}}
    _run_suite(["a", "b"], answers, on_row=lambda row: found.append(copy.deepcopy(row)))
    assert sorted(row["name"] for row in found) == ["a", "b"]
    assert found[0]["reserved_mib"] == 10 and found[0]["missed"] == []


def test_what_did_not_compile_in_time_is_left_for_the_next_run():
    late = {"error": "out of time", "late": True}
    answers = {"a prepare": late, "b prepare": {}, "b measure": {**ROW, "name": "b"}}
    rows, skipped = _run_suite(["a", "b"], answers)
    assert [row["name"] for row in rows] == ["b"] and skipped == ["a"]


def test_a_case_whose_memory_is_not_known_in_time_is_left_for_the_next_run():
    late = {"error": "out of time", "late": True}
    answers = {"a prepare": {}, "a measure": {**ROW, "name": "a"}, **MEMORY, "a settle_alone stock_cg": late}
    assert _run_suite(["a"], answers, alone=True) == ([], ["a"])


@pytest.mark.parametrize("is_late", [False, True])
def test_a_case_that_hangs_is_a_row_and_one_that_the_budget_ends_is_none(is_late):
    ended = {"error": "out of time", "late": is_late}
    answers = {"a prepare": {}, "a measure": ended, "b prepare": {}, "b measure": {**ROW, "name": "b"}}
    rows, skipped = _run_suite(["a", "b"], answers)
    assert {row["name"]: row.get("error") for row in rows} == {"b": None} | ({} if is_late else {"a": "out of time"})
    assert skipped == ["a"] * is_late and all("late" not in row for row in rows)
    if not is_late:
        (row,) = (row for row in rows if row["name"] == "a")
        assert row["note"] == "with all variants after 0 s alone on the device () and 0 s in all"


def test_regret_is_what_is_beyond_the_noise():
    def row(*interval, **changed):
        times = {"no_cg": 10.0, "stock_cg": 20.0, "forced_copy": 21.0, "forced_node_update": 8.0}
        timed = {f"{name}_us": us for name, us in times.items()}
        name = f"of {interval} {changed}"
        ratios = {"ratios": {"forced_node_update": list(interval)}}
        return {**ROW, "name": name, "suite": "scg", "candidates_us": times, **timed, **ratios, **changed}

    rows = [row(0.99, 1.02, 1.05), row(0.9, 0.95, 0.99), row(1.01, 1.03, 1.05, choice="no_graph")]
    assert [report.regret(r) for r in rows] == [1.0, 1.0, 1.03]
    assert report.regret(ROW) == 1.0 and report.regret({**ROW, "ratios": {}}) is None
    lines = "\n".join(report.selection_summary(rows))
    assert "Of 3 cases" in lines and "noise, in 2; in 2 the choice was" in lines
    assert "geomean 0.99 % (FAIL), of at most 0.5 %; 3.0 % in of (1.01, 1.03, 1.05)" in lines
    assert "(FAIL)" not in "\n".join(report.selection_summary(rows[:2]))
    assert "1.030 (1.01 to 1.05)" in format_table(rows)


def test_an_exhaustive_suite_times_all_in_turns():
    case = dataclasses.replace(_tiny(), suite="scg")
    variants = {name: _variant(name, {"backend": "eager"}) for name in catalogue.SUITES["scg"].variants}
    row = _measure(case, variants)
    assert row["equal"] and set(row["ratios"]) == set(row["candidates_us"]) == set(catalogue.SUITES["scg"].candidates)
    assert row["best"] in ("no_graph", "copy", "node_update")


def test_a_variant_that_ends_the_process_is_left_out_of_a_second_run():
    row = {**ROW, "name": "a", "failed": {}}
    answers = {
        "a prepare": {},
        "a measure": {"error": "process ended with status -11", "at": "stock_cg"},
        "a measure without stock_cg": {**row, "stock_cg_us": None},
    }
    (found,), _ = _run_suite(["a"], answers)
    assert found["failed"] == {"stock_cg": "process ended with status -11"}
    assert found["pygraph_us"] == row["pygraph_us"] and found["equal"]

    answers["a measure"]["at"] = "pygraph"
    answers["a measure without pygraph"] = {**row, "pygraph_us": None}
    (found,), _ = _run_suite(["a"], answers)
    assert not found["equal"] and "not measured" in found["missed"]

    # Nothing to compare with.
    answers["a measure"]["at"] = "no_cg"
    (found,), _ = _run_suite(["a"], answers)
    assert found["error"] == "process ended with status -11"


class Scripted(suite.Worker):
    """A worker that is another program."""

    def __init__(self, script):
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", f"import os\ninput()\n{script}"]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        self.caches, self.machine = None, processes.Machine()


@pytest.mark.parametrize(
    ("script", "seconds", "answer"),
    [
        ('print(\'{"at": "stock_cg"}\\n{"x": 1}\', flush=True); input()', 60, {"x": 1}),
        ('print(\'{"at": "stock_cg"}\', flush=True); os._exit(3)', 60, {"error": "process ended with status 3"}),
        (
            'print(\'{"at": "stock_cg"}\\n{"x"\', end=\'\', flush=True); os._exit(4)',
            60,
            {"error": "process ended with status 4"},
        ),
        ('print(\'{"at": "stock_cg"}\', flush=True); input()', 2, {"error": "out of time", "late": True}),
        (
            'print(\'{"at": "stock_cg"}\\n{"asks": "time"}\', flush=True); print(\'{"x": "%s"}\' % input(), flush=True)',
            60,
            {"x": "yes"},
        ),
    ],
)
def test_what_a_worker_answers_and_what_it_was_at(script, seconds, answer):
    worker = Scripted(script)
    assert worker.ask("measure", time.monotonic() + seconds) == answer
    assert worker.at == "stock_cg"
    worker.close()


# Counts while it may, and is quiet where it is asked to be, until a file is there.
COUNTS = """
import json, sys, threading, time
from operator import itemgetter
from pathlib import Path
file = Path(sys.argv[1])
def count():
    n = 0
    while True:
        n += 1
        file.with_suffix(".draft").write_text(str(n))
        file.with_suffix(".draft").replace(file)
        time.sleep(0.005)
threading.Thread(target=count, daemon=True).start()
def send(**line):
    print(json.dumps(line), flush=True)
for line in sys.stdin:
    if "quiet" in line:
        send(quiet=True)
        sys.stdin.readline()
        while not Path(line.split()[1]).exists():
            time.sleep(0.01)
        send(quiet=False)
    send(done=1)
"""


@pytest.fixture
def counting(tmp_path, monkeypatch):
    """Starts processes of one machine that count, and gives each with what reads its count."""
    monkeypatch.setattr(processes, "DRAIN_S", 0.05)
    machine, started = processes.Machine(), []

    def start():
        file = tmp_path / str(len(started))
        process = processes.Answering([sys.executable, "-c", COUNTS, str(file)], {}, machine=machine)
        started.append(process)
        assert process.ask("", time.monotonic() + 60) == {"done": 1}
        while not file.exists():
            time.sleep(0.01)
        return process, lambda: int(file.read_text())

    yield machine, start
    for process in started:
        process.close()


def _goes_on(count):
    """Whether a process counts, however long that takes under load."""
    before, until = count(), time.monotonic() + 60
    while count() == before and time.monotonic() < until:
        time.sleep(0.01)
    return count() > before


def test_while_one_process_is_quiet_the_others_stop(counting, tmp_path):
    machine, start = counting
    (a, _), (b, count) = start(), start()
    end, started = tmp_path / "end", []
    quiet = threading.Thread(target=a.ask, args=(f"quiet {end}", time.monotonic() + 60))
    quiet.start()
    while not machine.since:
        time.sleep(0.01)
    # Nor does another start before the end.
    third = threading.Thread(target=lambda: started.append(start()))
    third.start()
    before = count()
    time.sleep(0.2)
    assert count() == before and not started and machine.quiet is a
    end.touch()
    quiet.join()
    third.join()
    ((_, count_of_third),) = started
    assert machine.quiet is None and a.quiet_s >= 0.2 and b.quiet_s == 0
    assert _goes_on(count) and _goes_on(count_of_third)


def test_the_time_for_which_a_process_is_stopped_does_not_count(counting, tmp_path):
    machine, start = counting
    (a, _), (b, _) = start(), start()
    before, begin = b.clock(), time.monotonic()
    threading.Timer(0.3, (tmp_path / "end").touch).start()
    assert a.ask(f"quiet {tmp_path / 'end'}", time.monotonic() + 60) == {"done": 1}
    elapsed = time.monotonic() - begin
    assert b.stopped_s >= a.quiet_s > 0 and a.stopped_s == 0
    assert b.clock() - before <= elapsed - a.quiet_s


def test_a_process_that_is_quiet_for_too_long_ends_and_the_others_go_on(counting, tmp_path):
    machine, start = counting
    (a, _), (b, count) = start(), start()
    a.max_quiet_s = 0.2
    assert a.ask(f"quiet {tmp_path / 'never'}", time.monotonic() + 60) == {"error": "out of time", "late": False}
    assert machine.quiet is None and _goes_on(count)
    (tmp_path / "end").touch()
    assert b.ask(f"quiet {tmp_path / 'end'}", time.monotonic() + 60) == {"done": 1}


def test_a_process_hangs_by_its_own_clock(counting, tmp_path):
    machine, start = counting
    (a, _), (b, _) = start(), start()
    a.max_s, b.max_s = 1.0, 0.2
    never = f"quiet {tmp_path / 'never'}"
    hangs = threading.Thread(target=a.ask, args=(never, time.monotonic() + 60))
    hangs.start()
    while machine.quiet is not a:
        time.sleep(0.01)
    # It is stopped until the other one ends.
    clock = b.clock()
    time.sleep(0.3)
    assert machine.quiet is a and b.clock() == clock
    assert b.ask(never, time.monotonic() + 60) == {"error": "out of time", "late": False}
    assert not hangs.is_alive() or machine.quiet is not a
    hangs.join()


def test_cases_that_need_more_memory_than_the_device_has_are_rows():
    ((row,), skipped), closed = _run_suite(["a"], {}, gib=8.0, device_gib=4.0), FakeWorker.closed
    assert row["skipped"] == "needs 8 GiB" and skipped == closed == []


def test_while_one_case_is_measured_others_compile(monkeypatch):
    measured, compiled = threading.Event(), threading.Event()

    class Waits(FakeWorker):
        def ask(self, command, deadline):
            if (self.case.name, command) == ("a", "measure"):
                measured.set()
                assert compiled.wait(30)
            elif (self.case.name, command) == ("b", "prepare"):
                assert measured.wait(30)
                compiled.set()
            return super().ask(command, deadline)

    monkeypatch.setattr(sys.modules[__name__], "FakeWorker", Waits)
    monkeypatch.setattr(suite.os, "sched_getaffinity", lambda pid: range(2))
    answers = {f"{name} prepare": {} for name in "ab"}
    rows, _ = _run_suite("ab", answers | {f"{name} measure": {**ROW, "name": name} for name in "ab"})
    assert sorted(row["name"] for row in rows) == ["a", "b"]


def test_a_case_whose_library_is_missing_is_a_row():
    (row,), skipped = _run_suite(["a"], {}, needs=("no_such_library",))
    assert row["skipped"] == "needs no_such_library" and row["missed"] == [] and skipped == []
    assert "needs no_such_library" in format_table([row])


def _recorded(**seconds):
    cases = [
        {"suite": "pi", "name": name, "seconds": {"compile": compiled, "measure": device, "device": device}}
        for name, (compiled, device) in seconds.items()
    ]
    return {"cases": cases}


def test_a_case_that_would_not_end_is_not_begun():
    answers = {"a prepare": {}, "a measure": {**ROW, "name": "a"}, "b prepare": {}, "b measure": {**ROW, "name": "b"}}
    rows, skipped = _run_suite(["a", "b"], answers, record=_recorded(a=(50.0, 60.0), b=(50.0, 6.0)))
    assert [row["name"] for row in rows] == ["b"] and skipped == ["a"]
    assert [worker.case.name for worker in FakeWorker.started] == ["b"]
    # One that takes longer than any budget is tried, since it may take less.
    rows, skipped = _run_suite(["a"], answers, record=_recorded(a=(500.0, 6.0)))
    assert [row["name"] for row in rows] == ["a"] and skipped == []


def test_a_case_that_another_process_has_begun_is_left_to_it(tmp_path):
    answers = {f"{name} {step}": {} for name in "ab" for step in ("prepare", "measure")}
    answers |= {f"{name} measure": {**ROW, "name": name} for name in "ab"}
    claims = suite.Claims(tmp_path)
    a, b, c = (dataclasses.replace(_case(), name=name) for name in "abc")
    assert claims.take(a) and not claims.take(a)
    rows, skipped = _run_suite(["a", "b"], answers, claims=claims)
    assert [row["name"] for row in rows] == ["b"] and skipped == []
    assert claims.is_taken(b) and not claims.is_taken(c)
    # Nobody has begun what there is no time for.
    long = _recorded(c=(50.0, 60.0))
    assert _run_suite(["b", "c"], answers, claims=claims, record=long) == ([], ["c"])


def test_variants_of_a_case_that_takes_long_compile_side_by_side(monkeypatch):
    """The case's own process finds their code in its caches."""
    asked, ask = [], FakeWorker.ask

    def noted(self, command, deadline):
        asked.append(command)
        return ask(self, command, deadline)

    monkeypatch.setattr(FakeWorker, "ask", noted)
    answers = {"a prepare": {}, "a measure": {**ROW, "name": "a"}}
    (row,), _ = _run_suite(["a"], answers, 900.0, record=_recorded(a=(plan.APART_S + 1, 1.0)))
    compiled = [f"fill_caches {name}" for name in ("no_cg", "stock_cg", "pygraph")]
    assert sorted(asked[:3]) == sorted(compiled) and asked[3:] == ["prepare", "measure"]
    assert row["seconds"]["compile"] == 6.0
    # In another case one process compiles all.
    asked.clear()
    _run_suite(["a"], answers, 900.0, record=_recorded(a=(plan.APART_S, 0.0)))
    assert asked == ["prepare", "measure"]


def test_a_variant_fills_the_caches():
    variants = {name: _variant(name, {"backend": "eager"}) for name in ("no_cg", "pygraph")}
    run = worker.CaseRun(_tiny(), "cpu", variants=variants)
    run.fill_caches("no_cg")
    # The case's own process was started without it.
    run.fill_caches("stock_cg")
    assert [*run.programs] == ["no_cg"]


class Planned:
    """
    A schedule of cases with names, on a clock that moves when it is told to. A fourth number of a case is its memory, a fifth
    one its memory until it is measured.
    """

    def __init__(self, monkeypatch, places=16, gib=100.0, **works):
        self.now = 0.0
        monkeypatch.setattr(schedule.time, "monotonic", lambda: self.now)
        build = (lambda small: torch.nn.Identity(), lambda small: ((), {}))
        self.cases = {name: Case(name, "pi", *build) for name in works}
        works = {name: plan.Work(*work, *work[3:4]) if len(work) < 5 else plan.Work(*work) for name, work in works.items()}
        self.schedule = schedule.Schedule(processes.Machine(), 500.0, places, gib, lambda case: works[case.name])

    def next(self, names, alone=0):
        return self.schedule.next([self.cases[name] for name in names], lambda case: alone)


def test_what_is_begun_ends_before_another_case_would_keep_it_from_that(monkeypatch):
    planned = Planned(monkeypatch, a=(200.0, 200.0, 100.0), b=(100.0, 100.0, 150.0), c=(10.0, 10.0, 20.0))
    a = planned.next("abc")
    assert a.case.name == "a"
    # All stop while b is timed, so that a would end too late. A short case has time.
    c = planned.next("bc")
    assert c.case.name == "c"
    for step in (planned.schedule.compiled, planned.schedule.timed, planned.schedule.ended):
        step(c)
    # Once a has compiled, nothing else needs that time.
    planned.schedule.compiled(a)
    assert planned.next("b").case.name == "b"
    planned.now = 490.0
    for begun in [*planned.schedule.begun]:
        planned.schedule.ended(begun)
    assert planned.next("bc") is None


def test_while_another_case_ends_the_next_one_waits(monkeypatch):
    planned = Planned(monkeypatch, a=(200.0, 200.0, 100.0), b=(100.0, 100.0, 150.0))
    a, found = planned.next("ab"), []
    waiting = threading.Thread(target=lambda: found.append(planned.next("b")))
    waiting.start()
    waiting.join(0.05)
    assert found == [] and waiting.is_alive()
    planned.schedule.ended(a)
    waiting.join(10)
    assert [begun.case.name for begun in found] == ["b"]


def test_a_case_begins_with_places_for_its_variants_alone(monkeypatch):
    planned = Planned(monkeypatch, places=4, a=(30.0, 10.0, 1.0), b=(30.0, 10.0, 1.0))
    a = planned.next("ab", alone=2)
    assert (a.processes, planned.schedule.processes) == (3, 1)
    # One process at a time has room, so the case takes longer.
    b = planned.next("b", alone=2)
    assert (b.processes, b.work.longest, planned.schedule.processes) == (1, 30.0, 0)
    for begun in (a, b):
        for _ in range(3):
            planned.schedule.ended(begun)
    assert (planned.schedule.processes, planned.schedule.gib) == (4, 100.0)
    # Nothing begins without a process.
    planned = Planned(monkeypatch, places=1, a=(30.0, 10.0, 1.0), b=(30.0, 10.0, 1.0))
    a, found = planned.next("ab"), []
    waiting = threading.Thread(target=lambda: found.append(planned.next("b")))
    waiting.start()
    waiting.join(0.05)
    assert found == [] and waiting.is_alive()
    planned.schedule.ended(a)
    waiting.join(10)
    assert [begun.case.name for begun in found] == ["b"]
    # Where there is less memory, they run one after another.
    planned = Planned(monkeypatch, gib=2.5, a=(30.0, 10.0, 1.0))
    a = planned.next("a", alone=2)
    assert (a.processes, a.work.longest, planned.schedule.gib) == (1, 30.0, 0.5)
    for _ in range(3):
        planned.schedule.ended(a)
    assert (planned.schedule.processes, planned.schedule.gib) == (16, 2.5)


def test_a_case_without_room_lets_the_next_one_begin(monkeypatch):
    planned = Planned(monkeypatch, gib=5.0, a=(100.0, 100.0, 1.0), b=(90.0, 90.0, 1.0, 4.0), c=(10.0, 10.0, 1.0))
    assert [planned.next(names).case.name for names in ("abc", "bc")] == ["a", "c"]
    # A case of much memory leaves some, if it then ends in time.
    planned = Planned(monkeypatch, gib=50.0, a=(400.0, 100.0, 1.0, 20.0), b=(900.0, 100.0, 1.0, 20.0))
    a = planned.next("a", alone=7)
    assert (a.processes, a.work.longest, a.gib) == (1, 400.0, 20.0)
    planned.schedule.leave(a)
    b = planned.next("b", alone=7)
    assert (b.processes, b.work.longest, b.gib) == (3, 300.0, 40.0)
    # With less room for its processes, a case may take too long.
    planned = Planned(monkeypatch, places=4, a=(100.0, 30.0, 1.0), b=(900.0, 300.0, 1.0), c=(10.0, 10.0, 1.0))
    assert [planned.next(names, alone=2).case.name for names in ("abc", "bc")] == ["a", "c"]


def test_a_case_needs_more_memory_while_it_is_measured(monkeypatch):
    works = dict.fromkeys("abcde", (10.0, 10.0, 1.0, 30.0, 5.0))
    planned = Planned(monkeypatch, gib=42.0, **works)
    a, b, c = (planned.next(names) for names in ("abcde", "bcde", "cde"))
    assert planned.schedule.gib == 27.0
    # With a fourth one, none could be measured.
    found = []
    waiting = threading.Thread(target=lambda: found.append(planned.next("de")))
    waiting.start()
    waiting.join(0.05)
    assert found == []
    second = planned.schedule.measuring(b)
    with planned.schedule.measuring(a):
        assert planned.schedule.gib == 2.0
        others = threading.Thread(target=second.__enter__)
        others.start()
        others.join(0.05)
        assert others.is_alive()
    others.join(10)
    assert not others.is_alive() and planned.schedule.measured == 1
    planned.schedule.timed(a)
    planned.schedule.ended(a)
    waiting.join(10)
    assert [begun.case.name for begun in found] == ["d"]


def test_few_cases_are_measured_at_the_same_time(monkeypatch):
    works = dict.fromkeys("abc", (10.0, 10.0, 1.0))
    planned = Planned(monkeypatch, **works, d=(10.0, 10.0, 1.0, 400.0, 200.0))
    a, b, c = (planned.next(name) for name in "abc")
    third = planned.schedule.measuring(c)
    with planned.schedule.measuring(a), planned.schedule.measuring(b):
        others = threading.Thread(target=third.__enter__)
        others.start()
        others.join(0.05)
        assert others.is_alive()
    others.join(10)
    assert not others.is_alive()
    # What needs more than there is begins alone, and is measured.
    planned = Planned(monkeypatch, d=(10.0, 10.0, 1.0, 400.0, 200.0))
    d = planned.next("d")
    with planned.schedule.measuring(d):
        assert planned.schedule.gib == 0.0


def test_a_variant_is_left_out_where_the_case_would_not_end(monkeypatch):
    planned = Planned(monkeypatch, a=(100.0, 100.0, 40.0), b=(100.0, 100.0, 60.0))
    a, b = planned.next("ab"), planned.next("b")
    planned.now = 350.0
    assert planned.schedule.has_time(a)
    planned.now = 400.0
    assert not planned.schedule.has_time(a)
    # Once the other case was timed, there is time again.
    planned.schedule.timed(b)
    assert planned.schedule.has_time(a)


@pytest.mark.parametrize(("percent", "is_known"), [(80.0, True), (10.0, False)])
def test_a_row_that_lost_what_it_is_judged_by_is_left_for_the_next_run(percent, is_known):
    launches = {"pygraph": {"kernels": 1000, "kernels_in_graphs": 10 * percent}}
    row = {**ROW, "name": "a", "suite": "paper", "paper": "ST", "launches": launches}
    answers = {"a prepare": {}, "a measure": {**row, "left_out": ["forced_copy"]}}
    rows, skipped = _run_suite(["a"], answers, suite_name="paper")
    assert len(rows) == is_known and skipped == ["a"] * (not is_known)
    assert all("no time to compile forced_copy" in row["note"] and "left_out" not in row for row in rows)
    # What was compiled says that no more can be captured.
    answers["a measure"]["left_out"] = ["hand_written"]
    (row,), _ = _run_suite(["a"], answers, suite_name="paper")
    assert bool(row["missed"]) != is_known


def test_the_budget_leaves_cases_out():
    rows, skipped = _run_suite(["a", "b"], {"a prepare": {}, "b prepare": {}}, budget_s=-1.0)
    assert rows == [] and skipped == ["a", "b"]
    assert FakeWorker.closed == []


@pytest.mark.parametrize(
    ("case", "row", "expected"),
    [
        ({}, {}, None),
        ({}, {"ratios": {"no_cg": [1.01, 1.03, 1.05]}}, None),
        ({}, {"ratios": {"no_cg": [1.021, 1.03, 1.05]}}, "1.030 x no_cg (1.021 to 1.050), more than 1.02"),
        ({}, {"ratios": {"no_cg": [0.9, 1.0, 1.05]}}, "1.000 x no_cg (0.900 to 1.050): too noisy to tell"),
        ({}, {"ratios": {"no_cg": [0.7, 0.8, 1.0]}}, None),
        ({}, {"stock_cg_us": None}, None),
        # What is wrong is no alternative.
        ({}, {"ratios": {"no_cg": [2, 2, 2], "stock_cg": [1, 1, 1]}, "failed": {"no_cg": "wrong"}}, None),
        ({}, {"ratios": {"forced_copy": [1, 1, 1]}}, "not measured"),
        (
            {},
            {
                "candidates_us": {"no_cg": 10.0, "forced_node_update": 8.5},
                "ratios": {"no_cg": [0.8, 0.8, 0.8], "forced_node_update": [1.03, 1.04, 1.05]},
            },
            "1.040 x forced_node_update (1.030 to 1.050), more than 1.02",
        ),
        # It is what PyGraph chose.
        *(
            (
                {},
                {
                    "choice": "node_update",
                    "graphs": [{"schedule": schedule}],
                    "candidates_us": {"no_cg": 10.0, "forced_node_update": 8.5},
                    "ratios": {"no_cg": [0.8, 0.8, 0.8], "forced_node_update": [1.03, 1.04, 1.05]},
                },
                expected,
            )
            for schedule, expected in (
                ("chain", None),
                ("dag", "1.040 x forced_node_update (1.030 to 1.050), more than 1.02"),
            )
        ),
        ({"min_gain_over_stock": 2.5}, {}, None),
        ({"min_gain_over_stock": 2.56}, {}, None),
        ({"min_gain_over_stock": 2.6}, {}, "2.50 x faster than stock CG, not 2.6 x"),
        ({}, {"choice": None}, "no choice was made"),
        ({}, {"choice": "1 copy + 1 undecided"}, "no choice was made"),
        ({}, {"choice": "no_graph"}, None),
        ({"must_capture": True}, {"choice": "no_graph"}, "not captured"),
        ({}, {"copied_bytes": 8}, "copies 8 bytes a call"),
        ({}, {"equal": False}, "results differ"),
        ({}, {"reserved_mib": 12}, None),
        ({}, {"reserved_mib": 13}, "reserves 13 MiB, more than 12.24 MiB"),
        # Variants that make more calls meet more breaks.
        ({}, {"breaks": 3, "stock_breaks": 2, "first_breaks": 2, "stock_first_breaks": 2}, None),
        ({}, {"first_breaks": 3, "stock_first_breaks": 2}, "3 graph breaks in the first call, stock 2"),
        ({}, {"first_breaks": 3, "stock_first_breaks": 0, "failed": {"stock_cg": "wrong"}}, None),
        ({"max_breaks": 0}, {"breaks": 1}, "1 graph breaks, not 0"),
        ({"min_saved_mib": 3.0}, {}, "reserves 10 MiB, more than 9.24 MiB"),
    ],
)
def test_what_a_case_must_show(case, row, expected):
    assert suite.missed(_case(**case), {**ROW, **row}) == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({}, []),
        ({"ratios": {"no_cg": [1, 1, 1]}}, ["not measured without schedules"]),
        ({"ratios": {"no_cg": [1, 1, 1], "chain": [1.02, 1.025, 1.03]}}, ["0.976 x as fast with schedules"]),
        # Both run the same graphs.
        ({"ratios": {"no_cg": [1, 1, 1], "chain": [1.02, 1.025, 1.03]}, "graphs": [{"schedule": "chain"}]}, []),
        ({"reserved_mib": 20}, []),
        ({"reserved_mib": 21}, ["reserves 21 MiB, more than 20 MiB"]),
        ({"stock_reserved_mib": 100, "reserved_mib": 110}, []),
        # In a chain no buffer lies apart.
        ({"reserved_mib": 13, "graphs": [{"schedule": "chain"}]}, ["reserves 13 MiB, more than 12.24 MiB"]),
    ],
)
def test_what_a_case_with_schedules_must_show(row, expected):
    ratios = {"no_cg": [1, 1, 1], "chain": [1.0, 1.02, 1.03]}
    known = {**ROW, "ratios": ratios, "graphs": [{"schedule": "chain"}, {"schedule": "dag"}]}
    assert suite.missed(dataclasses.replace(_case(), suite="concurrent"), {**known, **row}) == expected


VARYING = {
    "pygraph_us": 5.0,
    "by_size_us": 12.5,
    "ratios": {"no_cg": [0.4, 0.41, 0.42], "stock_cg": [0.5, 0.6, 0.7], "by_size": [0.3, 0.4, 0.5]},
    "functions": [{"calls": 10, "captured_calls": 10, "by_size": "", "buckets": [[8]]}],
    "alone": {name: {"compile_s": 10.0, "warm_up_s": s} for name, s in (("no_cg", 2.0), ("pygraph", 3.6))},
    "reserved_mib": 110,
    "stock_reserved_mib": None,
    "largest_size_reserved_mib": 100,
}


@pytest.mark.parametrize(
    ("case", "row", "expected"),
    [
        ({}, {}, []),
        (
            {"min_sizes_gain": 2.5},
            {},
            ["2.44 x as fast as no_cg, not 2.5"],
        ),
        # In the ring stock has a recording of each size.
        ({}, {"ratios": {**VARYING["ratios"], "stock_cg": [1.03, 1.05, 1.06]}}, []),
        ({}, {"sweep": {"stock_cg": {"us": 20.0, "calls": 1000}, "pygraph": {"us": 5.0, "calls": 1000}}}, []),
        (
            {},
            {"sweep": {"stock_cg": {"us": 4.0, "calls": 80}, "pygraph": {"us": 5.0, "calls": 1000}}},
            ["0.80 x as fast as stock_cg over 80 random sizes, not 0.99"],
        ),
        ({}, {"functions": []}, ["0% of the calls captured, not 90%"]),
        (
            {},
            {"sweep": {"no_cg": {"us": 4.0, "calls": 1000}, "pygraph": {"us": 5.0, "calls": 1000}}},
            ["0.80 x as fast as no_cg over 1000 random sizes, not 0.99"],
        ),
        ({}, {"reserved_mib": 111}, ["reserves 111 MiB, a recording of the largest size 100 MiB"]),
        (
            {},
            {"alone": {**VARYING["alone"], "pygraph": {"compile_s": 12.0, "warm_up_s": 3.0}}},
            ["start-up 15.0 s, 1.25 of that without CUDA graphs, not 1.15"],
        ),
    ],
)
def test_what_a_case_of_varying_sizes_must_show(case, row, expected):
    assert suite.missed(dataclasses.replace(_case(**case), suite="sizes"), {**ROW, **VARYING, **row}) == expected


def test_the_overview_shows_sizes_that_vary():
    row = {**ROW, **VARYING, "suite": "sizes", "equal": True, "about": "a program"}
    line = report.overview({"cases": [row]})
    # 20 us and 10 us, of 5 us.
    assert "| 4.000 (4.000 to 4.000) | 2.000 (2.000 to 2.000) |" in line
    assert "without `config.pygraph_sizes` 0.800 (0.800 to 0.800)" in line
    assert "4.000" not in report.overview({"cases": [{**row, "equal": False}]})
    assert "13.6 of 12.0" in report.document("sizes", [row], {})


def test_a_part_is_compiled():
    """The module around it runs as it is."""
    compiled = []

    class Part(torch.nn.Module):
        def forward(self, x):
            return x.sin()

    class Around(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Part()

        def forward(self, x):
            compiled.append(torch.compiler.is_compiling())
            return self.part(x).relu()

    case = dataclasses.replace(
        _tiny(module=lambda small: Around()), inputs=lambda small: ((torch.randn(2, 4),), {}), compiled_part="part"
    )
    seen = []

    def backend(module, inputs):
        seen.append(module)
        return module.forward

    row = _measure(case, {"no_cg": _variant("no_cg", {"backend": backend})})
    assert row["failed"] == {} and len(seen) == 1 and not any(compiled)


def test_the_largest_size_alone(monkeypatch):
    """It is called at the largest inputs of the ring alone."""
    seen = []

    def note(forward):
        def run(*args):
            seen.append(max(t.numel() for t in args if isinstance(t, torch.Tensor)))
            return forward(*args)

        return run

    sizes = iter((2, 9, 3))
    inputs = lambda small: ((torch.randn(next(sizes), 4),) * 2, {})  # noqa: E731
    case = dataclasses.replace(_tiny(), inputs=inputs, ring=3)
    variant = dataclasses.replace(_variant("largest_size", _backend(note)), largest=True)
    monkeypatch.setitem(worker.VARIANTS, "largest_size", variant)
    run = worker.CaseRun(case, "cpu", small=True, variants=EAGER)
    run.compile_alone("largest_size")
    run.loop_alone(4)
    assert {*seen} == {36}


@pytest.mark.parametrize(
    ("percent", "expected"),
    [
        ({"pygraph": 74.3}, []),
        ({"pygraph": 74.1}, ["74.10 % of the kernels in CUDA graphs, not 74.22 %"]),
        # What the choice leaves out could have been captured.
        ({"pygraph": 0.0, "forced_copy": 80.0}, []),
        ({"pygraph": 0.0}, ["0.00 % of the kernels in CUDA graphs, not 74.22 %"]),
        ({"stock_cg": 90.0}, ["it is not known which kernels are in CUDA graphs"]),
    ],
)
def test_as_many_kernels_are_captured_as_in_the_paper(percent, expected):
    launches = {name: {"kernels": 1000, "kernels_in_graphs": 10 * share} for name, share in percent.items()}
    row = {**ROW, "suite": "paper", "paper": "ST", "launches": launches}
    assert suite.missed(dataclasses.replace(_case(), suite="paper", paper="ST"), row) == expected
    assert suite.missed(_case(paper="ST"), row) == []


def test_choices_of_several_graphs():
    entry = {"choice": "copy", "copied_bytes": 1, "stock_copied_bytes": 2}
    totals = worker.totals([entry, {**entry, "choice": "no_graph", "copied_bytes": 0}, entry])
    assert totals == {"choice": "2 copy + 1 no_graph", "copied_bytes": 2, "stock_copied_bytes": 6}
    assert worker.totals([entry])["choice"] == "copy"
    assert worker.totals([])["choice"] is None


def test_reports_name_no_files():
    from torch._inductor.pygraph import FunctionReport, reset_report
    from torch._inductor.pygraph.types import journal

    reset_report()
    journal.add(FunctionReport("partition_0", "inference", source="/somewhere/model.py:3"))
    (entry,) = worker.report()
    assert entry["name"] == "partition_0" and entry["choice"] == "undecided"
    assert "/somewhere" not in json.dumps(entry)
    reset_report()


# what is printed


def test_table():
    text = format_table([{**ROW, "missed": []}, {**ROW, "name": "other", "missed": ["too slow"], "note": "why"}])
    header, rule, first, second, *notes = text.splitlines()
    assert header.split()[:3] == ["case", "no", "CG"]
    assert set(rule) == {"-"}
    assert first.split()[:5] == ["case", "10.0", "20.0", "8.0", "0.800"] and first.endswith("pass")
    assert second.endswith("FAIL")
    assert notes == ["other: too slow", "other: why"]


def test_markdown_table():
    lines = format_table([ROW], markdown=True).splitlines()
    assert len(lines) == 3
    assert len({line.count("|") for line in lines}) == 1


# tests and their outcomes


def test_outcomes_survive_a_killed_run(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import os, pytest, unittest\n"
        "def test_a(): pass\n"
        "def test_b(): raise ValueError('no')\n"
        "@pytest.mark.skip\n"
        "def test_c(): pass\n"
        "class D(unittest.TestCase):\n"
        "    def test_d(self): pass\n"
        "    def tearDown(self): raise ValueError('left something')\n"
        "def test_e(): os._exit(3)\n"
    )
    file = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pygraph.outcomes"]
    subprocess.run(
        [*command, "-p", "no:xdist", "--outcomes", str(file), "test_it.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(BENCHMARKS), "PATH": ""},
        capture_output=True,
        check=False,
    )
    found = outcomes.read(file)
    assert {test: line["outcome"] for test, line in found.items()} == {
        "test_it.py::test_a": "passed",
        "test_it.py::test_b": "failed",
        "test_it.py::test_c": "skipped",
        "test_it.py::D::test_d": "failed",
    }
    assert found["test_it.py::test_b"]["reason"] == "ValueError: no"
    assert found["test_it.py::D::test_d"]["reason"] == "ValueError: left something"


def _gpu_suite():
    loader = importlib.machinery.SourceFileLoader("gpu_suite", str(ROOT / "scripts" / "gpu_suite"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_suite", loader))
    loader.exec_module(module)
    return module


def test_seeds_of_runs_are_all_different():
    gpu_suite = _gpu_suite()
    record = {"programs": [{"seed": 0, "sources": "new"}, {"seed": 4, "sources": "new"}, {"seed": 9, "sources": "old"}]}
    assert gpu_suite.next_seed(record, "new") == 5
    assert gpu_suite.next_seed(record, "newer") == gpu_suite.next_seed({}, "new") == 0


def test_the_last_line_counts_programs():
    last_line = _gpu_suite().last_line
    assert last_line('seed 3\n{"programs": 7, "equal": 7}\n') == {"programs": 7, "equal": 7}
    assert last_line("Segmentation fault\n") == {"error": "Segmentation fault"}
    assert last_line("") == {"error": "no output"} and last_line("3") == {"error": "3"}


ROWS_THEN_HANGS = """
import json, sys, time
from operator import itemgetter
from pathlib import Path
file = Path(sys.argv[sys.argv.index("--output") + 1])
for n in (1, 2):
    file.with_suffix(".draft").write_text(json.dumps([{"suite": "s", "name": str(i)} for i in range(n)]))
    file.with_suffix(".draft").replace(file)
    time.sleep(0.3)
time.sleep(60)
"""


def test_rows_are_known_before_their_suite_ends(tmp_path, monkeypatch):
    gpu_suite = _gpu_suite()
    monkeypatch.setattr(gpu_suite, "WATCH_S", 0.05)
    (tmp_path / "hangs.py").write_text(ROWS_THEN_HANGS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = gpu_suite.Run(tmp_path, tmp_path, tmp_path)
    found = []
    run.suite("s", "hangs", [], 4.0, found.append)
    assert [row["name"] for row in found[-1]] == ["0", "1"] and len(found) == 2


def test_an_overlay_of_these_sources_is_built_once(tmp_path, monkeypatch):
    gpu_suite, built = _gpu_suite(), []
    monkeypatch.setattr(gpu_suite, "_call", lambda command, env, seconds: built.append(Path(command[-1]).mkdir()) or 0)
    for command in ("one", "two"):
        assert gpu_suite.Run(tmp_path, tmp_path, tmp_path / command).build(9.0)
    assert len(built) == 1


def test_results_of_other_tests_leave_few_files(tmp_path):
    run = _gpu_suite().Run(tmp_path, tmp_path, tmp_path / "scratch")
    (run.logs / "cases").mkdir()
    (run.logs / "tests.log").write_text("failed")
    (run.logs / "cases" / "pi-a.log").write_text("x" * 2**20 + "end")
    run.write_log()
    (file,) = (file for file in tmp_path.iterdir() if file.is_file())
    text = file.read_text()
    assert text.endswith("xend\n==== tests\nfailed\n") and len(text) < 2**17


def test_rows_of_tp_may_be_chosen(monkeypatch, tmp_path):
    gpu_suite, asked = _gpu_suite(), []

    def suite(self, name, module, arguments, seconds, found):
        asked.append((name, arguments))

    monkeypatch.setattr(gpu_suite, "_call", lambda *args, **kwargs: 0)
    monkeypatch.setattr(gpu_suite.Run, "suite", suite)
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["gpu_suite", "--tp", "2", "--cases", "speech_transformer_x2"])
    assert gpu_suite.main() == 0
    ((name, arguments),) = asked
    assert (name, arguments[:4]) == ("tp", ["--ranks", "2", "--rows", "speech_transformer_x2"])


def test_differences_between_configurations():
    passed, failed = {"outcome": "passed", "reason": ""}, {"outcome": "failed", "reason": "AssertionError"}
    differs = _gpu_suite().differences(
        {"stock": {"t1": passed, "t2": passed, "t3": failed}, "on": {"t1": passed, "t2": failed, "t3": failed}}
    )
    assert differs == {"t2": {"stock": "passed", "on": "failed", "on reason": "AssertionError"}}


def test_a_test_that_did_not_run_differs():
    differs = _gpu_suite().differences({"stock": {"t": {"outcome": "passed", "reason": ""}}, "on": {}})
    assert differs == {"t": {"stock": "passed", "on": "not run"}}


def test_file_in_each_environment(tmp_path, monkeypatch):
    """As Triton's own tests are run: as they are, and with a plugin that changes what they call."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    (tmp_path / "doubles.py").write_text("import builtins\nbuiltins.double = True\n")
    (tmp_path / "test_sum.py").write_text(
        "import builtins\n"
        "def test_sum():\n    assert 1 + 1 == 2\n"
        "def test_single():\n    assert not hasattr(builtins, 'double')\n"
    )
    run = _gpu_suite().Run(tmp_path, tmp_path, tmp_path)
    plain = run.environment(overlaid=False)
    # Here everything was compiled before.
    assert Path(plain.pop("PYTHONPYCACHEPREFIX")).parent == tmp_path and "PYTHONDONTWRITEBYTECODE" not in plain
    doubled = {**plain, "PYTHONPATH": f"{plain['PYTHONPATH']}:{tmp_path}", "PYTEST_PLUGINS": "doubles"}
    found = run.in_each("sums", tmp_path / "test_sum.py", {"plain": plain, "doubled": doubled}, 300.0)
    assert found["plain"] == {"passed": 2, "failed": 0, "skipped": 0, "complete": True}
    assert found["doubled"] == {"passed": 1, "failed": 1, "skipped": 0, "complete": True}
    assert [test.rpartition("::")[2] for test in found["differs"]] == ["test_single"]


def test_a_command_is_stopped_in_time_with_what_it_started(tmp_path):
    start = time.monotonic()
    script = """
import pathlib, subprocess, sys
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
others = [subprocess.Popen(sleep, start_new_session=alone) for alone in (False, True)]
pathlib.Path(sys.argv[1]).write_text(" ".join(str(other.pid) for other in others))
others[0].wait()
"""
    assert "no result" in str(_gpu_suite()._call([sys.executable, "-c", script, str(tmp_path / "pids")], {}, 2.0))
    assert time.monotonic() - start < 20
    for pid in (tmp_path / "pids").read_text().split():
        assert _has_ended(pid)


def _has_ended(pid):
    try:
        # Its parent may not have waited for it.
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_command_ends_what_it_started_in_other_sessions(tmp_path):
    script = """
import pathlib, signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: (rank.kill(), sys.exit()))
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(rank.pid))
rank.wait()
"""
    pid = tmp_path / "pid"
    with processes.process_group([sys.executable, "-c", script, str(pid)], subprocess.DEVNULL):
        while not (pid.exists() and pid.read_text()):
            time.sleep(0.05)
    assert _has_ended(pid.read_text())


def test_atomics_in_generated_code_are_seen(tmp_path, monkeypatch):
    kernel = tmp_path / "kernel.py"
    kernel.write_text("tl.store(p, x)")
    module = SimpleNamespace(__file__=str(kernel))
    monkeypatch.setattr(worker.PyCodeCache, "modules", [module, SimpleNamespace(__file__=str(tmp_path / "gone.py"))])
    assert not worker.adds_with_atomics()
    kernel.write_text("tl.atomic_add(p, x, mask, sem='relaxed')")
    assert worker.adds_with_atomics()
