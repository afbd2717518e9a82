"""The logic behind the GPU record, on machines without a GPU."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest


ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "torch_overlay" / "benchmarks" / "dynamo"
sys.path.insert(0, str(BENCHMARKS))

from pygraph import outcomes  # noqa: E402
from pygraph.report import format_table  # noqa: E402
from pygraph.timing import time_interleaved, Timing  # noqa: E402


torch = pytest.importorskip("torch")

from pygraph import cases, suite, worker  # noqa: E402
from pygraph.compare import compare, snapshot  # noqa: E402


ROW = {
    "suite": "pi",
    "name": "case",
    "no_cg_us": 10.0,
    "stock_cg_us": 20.0,
    "pygraph_us": 8.0,
    "forced_node_update_us": 8.5,
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
    return cases.Case("case", "pi", lambda small: torch.nn.Identity(), lambda small: ((), {}), **overrides)


# timing


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


def _time(device, loops, **options):
    return time_interleaved(loops, device.synchronize, clock=lambda: device.now, **options)


def test_timing_is_the_slower_of_host_and_device():
    device = Device()
    loops = {"host bound": device.loop("h", 50e-6, 1e-6), "device bound": device.loop("d", 5e-6, 80e-6)}
    timings = _time(device, loops)
    assert timings["host bound"].median_us == pytest.approx(50, rel=0.01)
    assert timings["device bound"].median_us == pytest.approx(80, rel=0.01)
    assert timings["host bound"].iqr_us == pytest.approx(0, abs=0.1)


def test_rounds_are_interleaved():
    device = Device()
    _time(device, {name: device.loop(name, 1e-3, 0) for name in "ab"}, rounds=3)
    # Each turn is a lead-in and a measurement; before the rounds, both are estimated.
    assert device.order[-12:] == ["a", "a", "b", "b"] * 3


def test_slow_calls_still_get_a_few_and_the_collector_comes_back():
    import gc

    device = Device()
    assert _time(device, {"slow": device.loop("s", 1.0, 0)}, rounds=2)["slow"].median_us == pytest.approx(1e6)
    assert gc.isenabled()


def test_median_and_spread():
    assert Timing.of([1.0, 2.0, 3.0, 4.0, 100.0]).median_us == 3.0
    assert Timing.of([5.0] * 8) == Timing(5.0, 0.0)


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


EAGER = {name: worker.Variant({"backend": "eager"}) for name in worker.VARIANTS}


def _measure(case, variants, **options):
    run = worker.CaseRun(case, "cpu", small=True, variants=variants, rounds=2, round_s=1e-4, **options)
    run.prepare()
    return run.measure()


def _tiny(mode="inference", module=None):
    return cases.Case(
        "tiny",
        "pi",
        module or (lambda small: cases.MutatedInput(4, 1)),
        lambda small: ((torch.randn(2, 4), torch.randn(2, 4)), {}),
        mode,
    )


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_equal_variants(mode):
    row = _measure(_tiny(mode), EAGER)
    assert row["equal"] and row["bitwise"] and row["repeatable"] and not row["note"]
    assert set(row["spread"]) == set(worker.VARIANTS)
    assert all(row[key] > 0 for key in ("no_cg_us", "stock_cg_us", "pygraph_us", "forced_node_update_us"))
    json.dumps(row)


def _backend(change):
    def compile_with(module, inputs):
        return change(module.forward)

    return {"backend": compile_with}


def test_a_wrong_result_is_found():
    wrong = _backend(lambda forward: lambda *args: tuple(out * 1.5 for out in forward(*args)))
    row = _measure(_tiny(), {**EAGER, "pygraph": worker.Variant(wrong)})
    assert not row["equal"] and row["max_diff"] > 0


def test_a_result_that_is_wrong_once_is_found():
    calls = []

    def sometimes(forward):
        def run(*args):
            calls.append(1)
            return tuple(out + (len(calls) == 9) for out in forward(*args))

        return run

    assert not _measure(_tiny(), {**EAGER, "pygraph": worker.Variant(_backend(sometimes))})["equal"]


def test_stale_inputs_are_found():
    # As a graph that replays the addresses it was captured with.
    def first_inputs(forward):
        kept = []

        def run(*args):
            kept.append(args)
            return forward(*kept[0])

        return run

    assert not _measure(_tiny(), {**EAGER, "forced": worker.Variant(_backend(first_inputs))})["equal"]


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

    drifting = {name: worker.Variant(_backend(drift)) for name in worker.VARIANTS}
    row = _measure(_tiny(module=lambda small: Unrepeatable()), drifting)
    assert row["equal"] and not row["bitwise"] and not row["repeatable"]


@pytest.mark.parametrize("failing", ["stock_cg", "pygraph", "forced"])
def test_a_variant_that_fails_leaves_the_others_their_results(failing):
    variants = {**EAGER, failing: worker.Variant({"options": {"no such option": True}})}
    row = _measure(_tiny(), variants)
    assert row["no_cg_us"] > 0
    assert f"{failing} failed: RuntimeError" in row["note"]
    assert row["equal"] == (failing == "stock_cg")


def test_state_is_restored_before_each_comparison():
    # Weights and running statistics move at every step, yet every step starts from the same.
    def build(small):
        return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))

    case = cases.Case("bn", "pi", build, lambda small: ((torch.randn(8, 4),), {}), "training")
    assert _measure(case, EAGER)["bitwise"]


def test_variants_do_not_evict_each_other():
    run = worker.CaseRun(_tiny(), "cpu", small=True, variants=EAGER, rounds=2, round_s=1e-4)
    run.prepare()
    assert "compiled again" not in run.measure()["note"]


def test_every_case_builds_small_inputs_and_names_its_suite():
    for case in cases.CASES.values():
        args, kwargs = case.inputs(True)
        assert args or kwargs
        assert case.suite == "pi" and case.tolerance > 0


def test_selecting_cases():
    assert [case.name for case in cases.select("pi", ["conv2d", "mlp_20x64"])] == ["mlp_20x64", "conv2d"]
    with pytest.raises(ValueError, match="no case nonsense"):
        cases.select("pi", ["nonsense"])


def test_memory_is_that_of_one_settled_variant(monkeypatch):
    calls = []

    def count(forward):
        def run(*args):
            calls.append(1)
            return forward(*args)

        return run

    for name, value in {"synchronize": None, "memory_reserved": 3 * 2**20, "max_memory_reserved": 2**23}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    variants = {"pygraph": worker.Variant(_backend(count))}
    run = worker.CaseRun(_tiny(), "cpu", small=True, variants=variants)
    assert run.memory("pygraph") == {"reserved_mib": 3, "peak_reserved_mib": 8, "choice": None}
    assert len(calls) == worker.SETTLE_CALLS["pygraph"]


# the suite


class FakeWorker:
    answers: dict[str, dict] = {}
    closed: list[str] = []

    def __init__(self, case, options, logs, threads):
        self.case = case

    def ask(self, command, deadline):
        return dict(self.answers[f"{self.case.name} {command}"])

    def close(self):
        self.closed.append(self.case.name)


def _run_suite(names, answers, budget_s=100.0):
    FakeWorker.answers, FakeWorker.closed = answers, []
    selected = [cases.Case(name, "pi", lambda small: torch.nn.Identity(), lambda small: ((), {})) for name in names]
    return suite.run_suite(selected, options=[], logs=Path(), budget_s=budget_s, start_worker=FakeWorker)


MEMORY = {
    "a memory stock_cg": {"reserved_mib": 20.2, "peak_reserved_mib": 30.0, "choice": None},
    "a memory pygraph": {"reserved_mib": 10.4, "peak_reserved_mib": 31.0, "choice": "no_graph"},
}


def test_a_suite_merges_memory_into_the_rows():
    (row,), skipped = _run_suite(["a"], {"a prepare": {}, "a measure": {**ROW, "name": "a"}, **MEMORY})
    assert (row["reserved_mib"], row["stock_reserved_mib"], row["peak_reserved_mib"]) == (10, 20, 31)
    assert row["note"] == "memory measured with no_graph"
    assert row["missed"] == [] and skipped == []


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
    assert [row["missed"] for row in rows] == [[], ["OutOfMemoryError: no"], ["process ended with status -11"]]
    assert set(FakeWorker.closed) == {"a", "b", "c"}
    table = format_table(rows)
    assert "b: OutOfMemoryError: no" in table


def test_the_budget_leaves_cases_out():
    rows, skipped = _run_suite(["a", "b"], {"a prepare": {}, "b prepare": {}}, budget_s=-1.0)
    assert rows == [] and skipped == ["a", "b"]
    assert set(FakeWorker.closed) == {"a", "b"}


@pytest.mark.parametrize(
    ("case", "row", "expected"),
    [
        ({}, {}, None),
        ({}, {"pygraph_us": 10.2}, None),
        ({}, {"pygraph_us": 10.3}, "10.3 us > 1.02 x 10.0 us"),
        ({}, {"stock_cg_us": None}, None),
        ({}, {"pygraph_us": None}, "not measured"),
        ({"min_gain_over_stock": 2.5}, {}, None),
        ({"min_gain_over_stock": 2.6}, {}, "2.50 x faster than stock CG, not 2.6 x"),
        ({}, {"choice": None}, "no choice was made"),
        ({}, {"choice": "1 copy + 1 undecided"}, "no choice was made"),
        ({}, {"choice": "no_graph"}, None),
        ({"must_capture": True}, {"choice": "no_graph"}, "not captured"),
        ({}, {"copied_bytes": 8}, "copies 8 bytes a call"),
        ({}, {"equal": False}, "results differ"),
        ({}, {"reserved_mib": 12}, None),
        ({}, {"reserved_mib": 13}, "reserves 13 MiB, more than 12 MiB"),
        ({"min_saved_mib": 3.0}, {}, "reserves 10 MiB, more than 9 MiB"),
    ],
)
def test_what_a_case_must_show(case, row, expected):
    assert suite.missed(_case(**case), {**ROW, **row}) == ([expected] if expected else [])


def test_choices_of_several_graphs():
    entry = {"choice": "copy", "copied_bytes": 1, "stock_copied_bytes": 2}
    totals = worker._totals([entry, {**entry, "choice": "no_graph", "copied_bytes": 0}, entry])
    assert totals == {"choice": "2 copy + 1 no_graph", "copied_bytes": 2, "stock_copied_bytes": 6}
    assert worker._totals([entry])["choice"] == "copy"
    assert worker._totals([])["choice"] is None


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


def test_differences_between_configurations():
    passed, failed = {"outcome": "passed", "reason": ""}, {"outcome": "failed", "reason": "AssertionError"}
    differs = _gpu_suite().differences(
        {"stock": {"t1": passed, "t2": passed, "t3": failed}, "on": {"t1": passed, "t2": failed, "t3": failed}}
    )
    assert differs == {"t2": {"stock": "passed", "on": "failed", "on reason": "AssertionError"}}


def test_a_test_that_did_not_run_differs():
    differs = _gpu_suite().differences({"stock": {"t": {"outcome": "passed", "reason": ""}}, "on": {}})
    assert differs == {"t": {"stock": "passed", "on": "not run"}}


def test_a_command_is_stopped_in_time_with_what_it_started():
    start = time.monotonic()
    command = [
        sys.executable,
        "-c",
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])",
    ]
    assert "no result" in str(_gpu_suite()._call(command, {}, 1.0))
    assert time.monotonic() - start < 20


def test_atomics_in_generated_code_are_seen(tmp_path, monkeypatch):
    kernel = tmp_path / "kernel.py"
    kernel.write_text("tl.store(p, x)")
    module = SimpleNamespace(__file__=str(kernel))
    monkeypatch.setattr(worker.PyCodeCache, "modules", [module, SimpleNamespace(__file__=str(tmp_path / "gone.py"))])
    assert not worker.adds_with_atomics()
    kernel.write_text("tl.atomic_add(p, x, mask, sem='relaxed')")
    assert worker.adds_with_atomics()
