"""Two builds compared, on machines without a GPU: builds that answer as benchmarks do, and rows that are given."""

from __future__ import annotations

import copy
import dataclasses
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "torch_overlay" / "benchmarks" / "dynamo"
sys.path.insert(0, str(BENCHMARKS))

torch = pytest.importorskip("torch")

from pygraph import against, against_table, catalogue, program, worker  # noqa: E402
from pygraph.suite import Worker  # noqa: E402


# A build whose benchmarks say what their file says.
MAIN = """
import json, os, sys, time
from pathlib import Path
here = Path(__file__).parent
suite, case = (sys.argv[sys.argv.index(option) + 1] for option in ("--suite", "--worker"))
for line in sys.stdin:
    with open(here / "asked", "a") as asked:
        print(time.time(), f"{suite}/{case}", line.strip(), os.getpid(), *sys.argv[1:], file=asked)
    answer = json.loads((here / "answers.json").read_text()).get(line.split()[0], {})
    if answer == "hangs":
        time.sleep(600)
    if answer == "ends":
        os._exit(3)
    decisions = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "pygraph")
    if line.strip() == "measure":
        answer["found decisions"] = decisions.exists()
        decisions.mkdir(parents=True, exist_ok=True)
        if answer["found decisions"]:
            answer = {"error": "decisions of another process"}
    print(json.dumps(answer), flush=True)
"""
REPLAY = """
import json, sys
from pathlib import Path
here = Path(__file__).parent
case, file = (sys.argv[sys.argv.index(option) + 1] for option in ("--cases", "--output"))
row = {**json.loads((here / "answers.json").read_text())["replay"], "name": case}
# One case brings another one along.
Path(file).write_text(json.dumps([{**row, "name": "first", "layers": {}}, row]))
"""

ROW = {
    "no_cg_us": 30.0,
    "pygraph_us": 8.0,
    "forced_table_us": 9.0,
    "candidates_us": {"no_cg": 30.0},
    "host_us": {"pygraph": 8.0},
    "choice": "node_update",
    "forced": {"table": "table"},
    "copied_bytes": 0,
    "equal": True,
    "failed": {},
}
SETTLED = {"reserved_mib": 20.2, "peak_reserved_mib": 31.7, "choice": "node_update"}
LAYERS = {"dynamo": 2.0, "aot": 1.0, "inductor": 1.0, "trees": 3.0, "inputs": 1.5, "launch": 2.5}
REPLAYED = {
    "layers": {"stock_cg": {}, "pygraph": {**LAYERS, "host": 11.0, "total": 12.0, "compiled": 3}},
    "equal": True,
    "failed": {},
}
ANSWERS = {"measure": ROW, "settle_alone": SETTLED, "replay": REPLAYED}
CASE = "mlp_1x64_of_8"


class Builds:
    """An old and a new build, and what they were asked."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for build in against.BUILDS:
            package = root / build / "pygraph"
            package.mkdir(parents=True)
            (package / "__init__.py").touch()
            (package / "__main__.py").write_text(MAIN)
            (package / "replay.py").write_text(REPLAY)
            self.answer(build)

    def answer(self, build: str, **changes: object) -> None:
        answers = copy.deepcopy(ANSWERS)
        for command, change in changes.items():
            answers[command] = {**answers[command], **change} if isinstance(change, dict) else change
        (self.root / build / "pygraph" / "answers.json").write_text(json.dumps(answers))

    def asked(self, command: str) -> list[tuple[str, str]]:
        """(build, rest of the line) in the order of time."""
        found = []
        for build in against.BUILDS:
            file = self.root / build / "pygraph" / "asked"
            for line in file.read_text().splitlines() if file.exists() else ():
                when, case, rest = line.split(" ", 2)
                if rest.startswith(command):
                    found.append((float(when), build, f"{case} {rest}"))
        return [(build, rest) for _, build, rest in sorted(found)]

    def compare(self, suites, chosen=None, seconds=1000.0, **options):
        saved = []
        comparison = against.Comparison(
            {build: str(self.root / build) for build in against.BUILDS},
            ["--device", "cpu"],
            self.root,
            time.monotonic() + seconds,
            save=lambda entries: saved.append(copy.deepcopy(entries)),
            **options,
        )
        left = comparison.run(suites, chosen)
        return comparison.entries, left, saved


@pytest.fixture
def builds(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "caches"))
    return Builds(tmp_path)


def _flags(entries):
    return against_table.flagged(against_table.rows(entries))


def test_processes_of_both_builds_measure_in_turns(builds):
    entries, left, saved = builds.compare(["scg"], [CASE])
    measured = builds.asked("measure")
    assert [build for build, _ in measured] == ["old", "new", "old", "new"] and left == []
    assert len({rest.split()[2] for _, rest in measured}) == 4
    # Nothing compiles any more, and only what is compared was compiled.
    assert builds.asked("")[-4:] == measured and len(builds.asked("prepare")) == 4
    assert all("--device cpu" in rest and "--variants no_cg,pygraph" in rest for _, rest in measured)
    entry = entries[f"scg/{CASE}"]
    assert entry["old"] == entry["new"] == 2 * [against_table.measured(ROW)]
    assert entry["memory"]["new"] == {"reserved_mib": 20, "peak_reserved_mib": 32, "choice": "node_update"}
    assert saved == [entries] and _flags(entries) == []


def test_each_build_has_caches_of_its_own(builds):
    builds.compare(["scg"], [CASE])
    kept = builds.root / "caches" / "benchmarks" / "against"
    assert {path.relative_to(kept).as_posix() for path in kept.glob("*/*/*")} == {
        f"{build}/scg/{CASE}" for build in against.BUILDS
    }


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"measure": {"copied_bytes": 8}}, "copies 8 bytes, 0 before"),
        ({"measure": {"choice": "no_graph"}}, "another choice"),
        ({"measure": {"pygraph_us": 8.5}}, "1.06 x the time"),
        ({"measure": {"pygraph_us": 8.3}}, None),
        ({"measure": {"pygraph_us": 7.0}}, None),
        ({"measure": {"equal": False}}, "new: results differ"),
        ({"measure": {"failed": {"pygraph": "wrong result"}}}, "new: pygraph: wrong result"),
        ({"settle_alone": {"reserved_mib": 22.0}}, "reserves 22 MiB, 20 before"),
        ({"settle_alone": {"reserved_mib": 18.0}}, None),
        ({"measure": "ends"}, "new: process ended with status 3"),
        ({"prepare": "ends"}, "new: process ended with status 3"),
        ({"compile_alone": "ends"}, "new alone: process ended with status 3"),
    ],
)
def test_what_is_outside_of_the_limits_has_a_flag(builds, change, flag):
    builds.answer("new", **change)
    entries, left, _ = builds.compare(["scg"], [CASE])
    found = _flags(entries)
    assert found == ([f"scg/{CASE}: {flag}"] if flag else [])
    assert left == []


def test_what_the_old_build_did_too_has_no_flag(builds):
    for build in against.BUILDS:
        builds.answer(build, measure={"copied_bytes": 8, "choice": "copy"}, settle_alone={"reserved_mib": 30.0})
    assert _flags(builds.compare(["scg"], [CASE])[0]) == []


def test_a_choice_that_one_old_process_made_has_no_flag():
    def entry(old, new):
        runs = {
            name: [against_table.measured({**ROW, "choice": choice}) for choice in choices]
            for name, choices in (("old", old), ("new", new))
        }
        return {"scg/a": {**runs, "memory": {}}}

    assert _flags(entry(["copy", "table"], ["table", "table"])) == []
    assert _flags(entry(["copy", "copy"], ["copy", "table"])) == ["scg/a: another choice"]


def test_a_time_is_slower_if_no_process_was_as_fast():
    def entry(old, new):
        runs = {
            name: [against_table.measured({**ROW, "pygraph_us": us}) for us in times]
            for name, times in (("old", old), ("new", new))
        }
        return {"scg/a": {**runs, "memory": {}}}

    assert _flags(entry([8.0, 9.0], [8.9, 12.0])) == []
    assert _flags(entry([8.0, 9.0], [9.1, 12.0])) == ["scg/a: 1.24 x the time"]


def test_other_variants_have_rows(builds):
    builds.answer("new", measure={"forced_table_us": 12.0, "forced": {"table": "copy"}})
    entries, _, _ = builds.compare(["bindings"], ["mlp_20x64"])
    assert _flags(entries) == [
        "bindings/mlp_20x64 forced_table: another choice",
        "bindings/mlp_20x64 forced_table: 1.33 x the time",
    ]


@pytest.mark.parametrize(("us", "flags"), [(3.5, []), (3.51, ["trees +0.51 us"]), (1.0, [])])
def test_layers_of_a_replay(builds, us, flags):
    layers = {**REPLAYED["layers"]["pygraph"], "trees": us}
    builds.answer("new", replay={"layers": {"pygraph": layers}})
    entries, left, _ = builds.compare(["replay"], ["linear_relu"])
    assert left == [] and _flags(entries) == [f"replay/linear_relu: {flag}" for flag in flags]
    (row,) = against_table.rows(entries)
    assert row["layers_us"]["trees"] == {"old": 3.0, "new": us} and len(row["us_of_processes"]["old"]) == 2


def test_fewer_graphs_that_compiled_code_replays(builds):
    builds.answer("new", replay={"layers": {"pygraph": {**REPLAYED["layers"]["pygraph"], "compiled": 1}}})
    entries, _, _ = builds.compare(["replay"], ["three_graphs"])
    assert _flags(entries) == ["replay/three_graphs: compiled code replays 1 graphs, 3 before"]


def test_a_run_goes_on_where_another_one_ended(builds):
    entries, _, _ = builds.compare(["scg"], [CASE])
    before = builds.asked("")
    again, left, saved = builds.compare(["scg"], [CASE], entries=dict(entries))
    assert builds.asked("") == before and again == entries and left == saved == []
    # What has no result of each process is measured again.
    entries[f"scg/{CASE}"]["new"][1] = {"error": "process ended with status 3"}
    again, left, _ = builds.compare(["scg"], [CASE], entries=dict(entries))
    assert len(builds.asked("")) == 2 * len(before) and _flags(again) == []


def test_what_the_budget_ends_is_left_out(builds, monkeypatch):
    monkeypatch.setattr(against, "MIN_CASE_S", 0.0)
    builds.answer("new", measure="hangs")
    entries, left, saved = builds.compare(["scg"], [CASE, "chain_3"], seconds=4.0)
    assert entries == {} and saved == [] and left == [f"scg/{CASE}", "scg/chain_3"]
    # With too little time no case is begun.
    monkeypatch.setattr(against, "MIN_CASE_S", 60.0)
    before = builds.asked("")
    assert builds.compare(["replay", "scg"], [CASE, "linear_relu"], seconds=30.0)[1] == [
        "replay/linear_relu",
        f"scg/{CASE}",
    ]
    assert builds.asked("") == before


def test_a_process_that_hangs_is_an_error_if_there_is_time_left(builds, monkeypatch):
    builds.answer("new", measure="hangs")
    monkeypatch.setitem(against.SUITES, "scg", dataclasses.replace(catalogue.SUITES["scg"], max_case_s=1.0))
    entries, _, _ = builds.compare(["scg"], [CASE], pairs=1)
    assert _flags(entries) == [f"scg/{CASE}: new: out of time"]


def test_as_many_cases_are_prepared_as_there_are_cores(builds, monkeypatch):
    monkeypatch.setattr(against.os, "sched_getaffinity", lambda pid: range(8))
    builds.compare(["scg"], [CASE, "mlp_5x64_of_8", "chain_3"])
    order = [rest.split()[:2] for _, rest in builds.asked("") if rest.split()[1] in ("prepare", "measure")]
    commands = [command for _, command in order]
    assert commands == ["prepare"] * 8 + ["measure"] * 8 + ["prepare"] * 4 + ["measure"] * 4
    assert [case for case, _ in order[8:16]] == [f"scg/{CASE}"] * 4 + ["scg/mlp_5x64_of_8"] * 4


def test_table():
    runs = [against_table.measured({**ROW, "pygraph_us": us}) for us in (8.0, 10.0)]
    faster = [against_table.measured({**ROW, "pygraph_us": 4.5, "choice": "table", "copied_bytes": 2048})]
    memory = {"old": {"reserved_mib": 20}, "new": {"reserved_mib": 12}}
    failed = [{"error": "out of time"}]
    cases = {"scg/a": {"old": runs, "new": faster, "memory": memory}, "scg/b": {"old": failed, "new": runs}}
    table = against_table.rows(cases)
    json.dumps(table)
    header, _, first, second, *rest = against_table.format_table(table).splitlines()
    assert header.split("  ")[0] == "case" and header.rstrip().endswith("flags")
    for shown in ("9.00", "4.50", "-4.50 (-50.0 %)", "node_update / table", "0 B / 2 KiB", "20 / 12"):
        assert shown in first
    assert first.endswith("copies 2048 bytes, 0 before; another choice")
    assert second.split()[1:3] == ["-", "9.00"] and second.endswith("old: out of time")
    # Rows of other variants are shown if they have a flag.
    assert rest == [
        "scg: the new build takes 0.500 of the old build's time, geomean of 1 cases",
        "outside of the limits: 3",
    ]
    assert against_table.format_table([]) == "outside of the limits: 0"


# what this build answers to the program of a later one


def test_rows_of_this_build_have_what_is_compared():
    (case,) = catalogue.select("scg", [CASE])
    variants = {
        name: dataclasses.replace(program.VARIANTS[name], compile={"backend": "eager"}, config={})
        for name in against.VARIANTS["scg"]
    }
    run = worker.CaseRun(case, "cpu", small=True, variants=variants, rounds=2, round_s=1e-4)
    run.prepare()
    found = against_table.measured(run.measure())
    assert set(found["us"]) == set(against.VARIANTS["scg"]) and found["equal"] and found["copied_bytes"] == 0


def test_every_suite_has_the_variants_that_are_compared():
    for suite, names in against.VARIANTS.items():
        assert set(names) <= set(catalogue.SUITES[suite].variants), suite
        assert against.names(suite)
    assert against.names("replay")[0] == "linear_relu"


def test_this_build_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (case,) = catalogue.select("scg", [CASE])
    path = os.pathsep.join([str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
    options = ["--device", "cpu", "--rounds", "2", "--small", "--variants", "eager"]
    own = Worker(case, options, tmp_path, 1, caches=str(tmp_path), variables={"PYTHONPATH": path})
    try:
        assert own.ask("prepare", time.monotonic() + 120) == {}
        assert own.ask("compile_alone eager", time.monotonic() + 60).keys() == {"compile_s"}
    finally:
        own.close()


# gpu_suite


@pytest.fixture
def gpu_suite():
    loader = importlib.machinery.SourceFileLoader("gpu_suite", str(ROOT / "scripts" / "gpu_suite"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_suite", loader))
    loader.exec_module(module)
    return module


PASSED = {"passed": 3, "failed": 0, "skipped": 0, "complete": True, "failures": {}}


@pytest.fixture
def checkout(tmp_path):
    for file in ("scripts/overlay", "patches/torch/a.patch"):
        (tmp_path / "older" / file).parent.mkdir(parents=True)
        (tmp_path / "older" / file).write_text("")
    return tmp_path / "older"


def _main(gpu_suite, monkeypatch, out, arguments, found, tests=PASSED):
    """The exit status, and what ran."""
    ran = []

    def suite(self, name, module, arguments, seconds, tell):
        ran.append((name, module, arguments))
        tell(found)

    monkeypatch.setattr(gpu_suite.Run, "build", lambda self, seconds: ran.append(("build", self.checkout)) or True)
    monkeypatch.setattr(gpu_suite.Run, "tests", lambda self, seconds: ran.append(("tests", self.checkout)) or tests)
    monkeypatch.setattr(
        gpu_suite.Run, "programs", lambda self, *args: ran.append(("programs", self.checkout)) or {"passed": True}
    )
    monkeypatch.setattr(gpu_suite.Run, "suite", suite)
    monkeypatch.setenv("OUT", str(out))
    monkeypatch.setattr(sys, "argv", ["gpu_suite", *map(str, arguments)])
    return gpu_suite.main(), ran


def _found(choice="node_update"):
    old, new = ([against_table.measured({**ROW, "choice": c})] for c in ("node_update", choice))
    cases = {"scg/a": {"old": old, "new": new, "memory": {}}}
    return {"cases": cases, "table": against_table.rows(cases)}


def test_gpu_suite_tests_the_new_build_and_compares_both(gpu_suite, monkeypatch, tmp_path, checkout, capsys):
    status, ran = _main(gpu_suite, monkeypatch, tmp_path / "out", ["--against", checkout, "--programs", "5"], _found())
    assert status == 0
    assert [what[:2] for what in ran] == [
        ("build", ROOT),
        ("build", checkout),
        ("tests", ROOT),
        ("programs", ROOT),
        ("against", "pygraph.against"),
    ]
    arguments = ran[-1][2]
    old, new = (arguments[arguments.index(f"--{build}") + 1].split(os.pathsep) for build in against.BUILDS)
    assert old[1] == str(checkout / "torch_overlay" / "benchmarks" / "dynamo") and new[1] == str(BENCHMARKS)
    assert old[0] != new[0] and str(BENCHMARKS) not in old[:2]
    assert arguments[arguments.index("--suites") + 1] == ",".join(against.COMPARED)
    # The record takes the result, and not what is of two builds.
    assert {"tests", "programs"} <= json.loads((tmp_path / "out/result.json").read_text()).keys()
    assert "against" not in (tmp_path / "out/result.json").read_text()
    compared = json.loads((tmp_path / "out/against.json").read_text())
    assert compared["tests"] == PASSED and compared["cases"] == _found()["cases"]
    assert compared["sources"]["old"] != compared["sources"]["new"]
    assert capsys.readouterr().out.splitlines()[-1] == "outside of the limits: 0"


def test_gpu_suite_fails_with_a_flag(gpu_suite, monkeypatch, tmp_path, checkout, capsys):
    arguments = ["--against", checkout, "--suite", "scg", "--cases", "a"]
    status, ran = _main(gpu_suite, monkeypatch, tmp_path / "out", arguments, _found("copy"))
    assert status == 1 and capsys.readouterr().out.splitlines()[-1] == "outside of the limits: 1"
    assert ran[-1][2][4:6] == ["--suites", "scg"] and "--cases" in ran[-1][2]


def test_gpu_suite_goes_on(gpu_suite, monkeypatch, tmp_path, checkout, capsys):
    earlier = tmp_path / "earlier.json"
    _main(gpu_suite, monkeypatch, tmp_path / "out", ["--against", checkout], _found(), {**PASSED, "complete": False})
    (tmp_path / "out/against.json").rename(earlier)
    arguments = ["--against", checkout, "--earlier", earlier]
    _, ran = _main(gpu_suite, monkeypatch, tmp_path / "out", arguments, _found())
    assert [what[0] for what in ran] == ["build", "build", "tests", "against"]
    assert ran[-1][2][ran[-1][2].index("--earlier") + 1] == str(earlier)
    # Tests that all ran are not run again.
    (tmp_path / "out/against.json").rename(earlier)
    _, ran = _main(gpu_suite, monkeypatch, tmp_path / "out", arguments, _found())
    assert [what[0] for what in ran] == ["build", "build", "against"]
    assert json.loads((tmp_path / "out/against.json").read_text())["tests"] == PASSED
    # Of other sources nothing is kept.
    (checkout / "patches/torch/a.patch").write_text("changed")
    with pytest.raises(SystemExit):
        _main(gpu_suite, monkeypatch, tmp_path / "out", arguments, _found())
    assert "compared other sources: old" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--suite", "pi"], "--against does not run pi"),
        (["--resume", "--suite", "scg"], "goes with neither --resume nor --tp"),
        (["--cases", "a"], "--cases one suite"),
    ],
)
def test_gpu_suite_refuses(gpu_suite, monkeypatch, tmp_path, checkout, capsys, arguments, error):
    with pytest.raises(SystemExit):
        _main(gpu_suite, monkeypatch, tmp_path, ["--against", checkout, *arguments], {})
    assert error in capsys.readouterr().err
    with pytest.raises(SystemExit):
        _main(gpu_suite, monkeypatch, tmp_path, ["--against", tmp_path], {})
    assert "holds no checkout of this repository" in capsys.readouterr().err
