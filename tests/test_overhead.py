"""The suite overhead: what it counts, and how it compares builds, on samples that are given."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "torch_overlay" / "benchmarks" / "dynamo"
sys.path.insert(0, str(BENCHMARKS))

from pygraph import overhead, overhead_run, plan, report  # noqa: E402
from pygraph.timing import Interval  # noqa: E402


# counting


def test_bytecode_is_counted_exactly():
    def in_functions(times):
        def one(i):
            return i + 1

        return lambda: [one(i) for i in range(times)]

    counts = [overhead_run.bytecodes(in_functions(times))["bytecodes"] for times in (10, 11, 12, 12)]
    assert counts[0] < counts[1] < counts[2] == counts[3] and counts[2] - counts[1] == counts[1] - counts[0]
    # What compiled code does is no bytecode.
    assert overhead_run.bytecodes(lambda: sum(range(1000)))["bytecodes"] < 20


def test_a_trace_function_is_put_back():
    def trace(frame, event, argument):
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(ZeroDivisionError):
            overhead_run.bytecodes(lambda: 1 / 0)
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)


def test_a_counter_of_the_kernel():
    try:
        counter = overhead_run.Counter(overhead_run.TASK_CLOCK)
    except OSError as error:
        pytest.skip(f"perf_event_open: {error}")
    before, start = counter.read(), time.thread_time()
    while time.thread_time() - start < 0.05:
        pass
    # Nanoseconds.
    assert 0.04e9 < counter.read() - before < 5e9
    counter.close()


def test_where_instructions_are_not_counted_there_is_cpu_time(monkeypatch):
    monkeypatch.setattr(overhead_run, "SYSCALL", {})
    with pytest.raises(OSError, match="no number of perf_event_open"):
        overhead_run.Counter()
    sample = overhead_run.Meter().sample(lambda: sum(range(10**6)))
    assert sample["cpu_s"] > 0 and sample["instructions"] is None


# builds


@pytest.fixture
def builds(tmp_path):
    """An installed package, and an overlay that changes a file, adds one and removes one."""
    site, overlay = tmp_path / "site", tmp_path / "overlay"
    for root, init in (site, "stock"), (overlay, "patched"):
        for folder in ("torch/_dynamo", "torch/lib"):
            (root / folder).mkdir(parents=True)
        (root / "torch/__init__.py").write_text(init)
        (root / "torch/same.py").write_text("same")
    (site / "torch/removed.py").touch()
    (site / "other").mkdir()
    (overlay / overhead.MARK).touch()
    (overlay / "torch/new").mkdir()
    (overlay / "torch/new/a.py").touch()
    (overlay / "torch/_dynamo/added.py").touch()
    (overlay / "torch/lib").rmdir()
    (overlay / "torch/lib").symlink_to(site / "torch/lib")
    return site, overlay


def test_copies_have_the_same_layout(builds, tmp_path):
    site, overlay = builds
    found = overhead.copies(overlay, site, tmp_path / "copies")
    stock, patched = found["stock"], found["flag_off"]
    assert len(str(stock)) == len(str(patched)) and stock.parent == patched.parent
    assert (patched / "torch/__init__.py").read_text() == "patched" and (patched / "torch/new/a.py").exists()
    assert (stock / "torch/__init__.py").read_text() == "stock" and (stock / "torch/same.py").exists()
    assert not (stock / "torch/new").exists() and not (stock / "torch/_dynamo/added.py").exists()
    assert not (stock / "other").exists() and not (stock / overhead.MARK).exists()
    for copy in (stock, patched):
        assert (copy / "torch/lib").is_symlink() and (copy / "torch/lib").resolve() == site / "torch/lib"


def test_what_processes_get(builds, tmp_path):
    _, overlay = builds
    assert overhead.overlay_on(["", str(tmp_path), str(overlay)]) == overlay
    with pytest.raises(overhead.Failed, match="no overlay on PYTHONPATH"):
        overhead.overlay_on([str(tmp_path)])
    inherited = {
        "PYTHONPATH": os.pathsep.join([str(overlay), "/else"]),
        "TORCHINDUCTOR_PYGRAPH": "1",
        "TORCHINDUCTOR_PYGRAPH_FORCE": "copy",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": "/home",
    }
    found = overhead.environments({"stock": Path("/a"), "flag_off": Path("/b")}, overlay, inherited)
    paths = {build: own.pop("PYTHONPATH").split(os.pathsep) for build, own in found.items()}
    assert paths == {"stock": ["/a", str(BENCHMARKS), "/else"], "flag_off": ["/b", str(BENCHMARKS), "/else"]}
    assert found["stock"] == found["flag_off"] == {"HOME": "/home", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


# processes

RUN = """
import json, os, sys
for line in sys.stdin:
    if sys.argv[1] == "ends":
        sys.exit(3)
    print(json.dumps({"cpu_s": 0.25, "asked": [*sys.argv[1:], line.strip()], "patched": PATCHED}), flush=True)
"""


def _environment(tmp_path, patched):
    package = tmp_path / "pygraph"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "overhead_run.py").write_text(RUN.replace("PATCHED", str(patched)))
    return {"PYTHONPATH": str(tmp_path)}


def test_a_process_answers_until_it_is_left(tmp_path):
    with overhead.running("trace_eager", 7, "stock", _environment(tmp_path, False)) as ask:
        assert [ask(what)["asked"] for what in ("count", "sample")] == [
            ["trace_eager", "7", "count"],
            ["trace_eager", "7", "sample"],
        ]


def test_each_import_has_a_process(tmp_path):
    with overhead.importing("import_torch", 7, "flag_off", _environment(tmp_path, True)) as ask:
        found = [ask("sample") for _ in range(2)]
    # The process's, in place of what it measured itself.
    assert all(answer["cpu_s"] != 0.25 and answer["wall_s"] > 0 for answer in found)


@pytest.mark.parametrize(
    ("name", "build", "reason"),
    [("trace_eager", "stock", "has another torch"), ("ends", "flag_off", "process ended with status 3")],
)
def test_a_process_that_is_of_no_use(tmp_path, name, build, reason):
    with pytest.raises(overhead.Failed, match=reason):
        with overhead.running(name, 1, build, _environment(tmp_path, True)) as ask:
            ask("sample")


def test_a_model_is_traced():
    pytest.importorskip("torch")
    path = os.pathsep.join([str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    with overhead.running("trace_eager", 1, "flag_off", environment) as ask:
        assert ask("sample")["cpu_s"] > 0
        first, second = (ask("count")["bytecodes"] for _ in range(2))
    # A finalizer or the order of a set adds some instructions now and then.
    assert first > 100_000 and abs(first - second) < first / 1000


# comparing


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def _case(cpu, bytecodes, seconds, name="trace_eager", instructions=None):
    """A case that is measured, and what was asked of which process."""
    clock, asked, processes = Clock(), [], []

    @contextlib.contextmanager
    def start(build):
        processes.append(build)
        number = processes.count(build)

        def ask(what):
            asked.append((what, build, number))
            clock.now += 1.0
            if what == "count":
                return {"bytecodes": bytecodes[build]}
            samples = len([1 for entry in asked if entry[:2] == ("sample", build)])
            counted = None if instructions is None else instructions[build]
            return {"cpu_s": cpu[build] + 1e-5 * samples, "instructions": counted}

        yield ask

    case = overhead.Case(name, start, clock)
    case.measure(seconds)
    return case, asked


EVEN = {"stock": 1.0, "flag_off": 1.0}
SAME = {"stock": 1000, "flag_off": 1000}


def test_builds_take_turns_in_several_processes():
    case, asked = _case(EVEN, SAME, 30.0)
    # The first samples are none: they fill caches.
    assert asked[:4] == [(what, build, 1) for what in ("sample", "count") for build in overhead.BUILDS]
    samples = [build for what, build, _ in asked[4:] if what == "sample"]
    pairs = [samples[i : i + 2] for i in range(0, len(samples), 2)]
    assert all({*pair} == {"stock", "flag_off"} for pair in pairs) and 11 <= len(pairs) <= 14
    assert pairs[0] != pairs[1] and pairs[0] == pairs[2]
    assert {number for _, _, number in asked} == {1, 2, 3}


def test_without_time_there_are_a_few_pairs():
    case, asked = _case(EVEN, SAME, 0.0)
    assert len(case.samples["stock"]) == overhead.MIN_PAIRS and {number for _, _, number in asked} == {1}
    assert case.row(4)["note"] == "3 pairs: the interval is all of their ratios"


def test_a_row():
    case, _ = _case({"stock": 1.0, "flag_off": 1.1}, {"stock": 1000, "flag_off": 1006}, 60.0)
    row = case.row(24)
    json.dumps(row)
    assert (row["suite"], row["name"], row["unit"], row["model_layers"]) == ("overhead", "trace_eager", "ms CPU", 24)
    assert row["stock"] == pytest.approx(1000, abs=1) and row["ratio"][1] == pytest.approx(1.1, abs=1e-3)
    assert row["missed"] == [
        "1.100 x stock (1.100 to 1.100), more than 1.02",
        "1.0060 x stock's bytecode, more than 1.001",
    ]
    shown = report.format_table([{**row, "name": "import_torch", "missed": []}, row]).splitlines()
    assert "1.100 (1.100 to 1.100)" in shown[2] and shown[2].endswith("pass") and shown[3].endswith("FAIL")
    assert "1.0060" in shown[3] and shown[-1].startswith("trace_eager: 1.0060 x")
    assert "x stock's bytecode" in report.document("overhead", [row], {})
    assert "1.100 of stock's with the flag off" in report.overview({"cases": [row]})


def test_instructions_are_used_where_they_are_counted():
    case, _ = _case({"stock": 1.0, "flag_off": 1.5}, SAME, 60.0, instructions={"stock": 2e9, "flag_off": 2e9})
    row = case.row(24)
    assert row["unit"] == "M instructions" and row["stock"] == 2000.0 and row["missed"] == []
    assert row["flag_off_cpu_s"] == pytest.approx(1.5, abs=1e-3)


@pytest.mark.parametrize(
    ("interval", "executed", "count"),
    [
        ((0.99, 1.0, 1.01), 1000, 0),
        ((1.021, 1.03, 1.04), 1000, 1),
        # Noise is no miss.
        ((0.8, 1.1, 1.4), 1000, 0),
        ((0.99, 1.0, 1.01), 1001, 0),
        ((0.99, 1.0, 1.01), 1002, 1),
        ((0.99, 1.0, 1.01), 900, 0),
    ],
)
def test_what_must_not_be_more(interval, executed, count):
    bytecodes = {"stock": 1000, "flag_off": executed}
    assert len(overhead.missed(Interval(*interval), 1.02, bytecodes)) == count


def test_gpu_suite_knows_the_suite():
    assert plan.names_of("overhead") == list(overhead.CASES)
