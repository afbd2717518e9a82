"""What a whole record has, in parts that are continued, with runs that take no GPU."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "torch_overlay" / "benchmarks" / "dynamo"))

pytest.importorskip("torch")

from pygraph import plan  # noqa: E402
from pygraph.plan import Unit  # noqa: E402


H100, A100 = "NVIDIA H100", "NVIDIA A100"


def _load(*path):
    file = ROOT.joinpath(*path)
    loader = importlib.machinery.SourceFileLoader(file.name, str(file))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(file.name, loader))
    loader.exec_module(module)
    return module


def _case(unit, **more):
    return {"suite": unit.kind, "name": unit.name, "sources": "new", "device": H100, **more}


COMPLETE = {"passed": 1, "failed": 0, "skipped": 0, "complete": True}


def test_parts_are_all_of_it_and_alike():
    whole = plan.whole()
    assert {Unit("tests"), Unit("paper", "eos"), Unit("pi", "conv2d"), Unit("replay", "training")} <= {*whole}
    assert not {unit.kind for unit in whole} & plan.APART
    parts = [plan.part(whole, index, 2) for index in (1, 2)]
    assert sorted([*parts[0], *parts[1]], key=str) == sorted(whole, key=str)
    minutes = [plan.seconds(part, {}) / 60 for part in parts]
    assert abs(minutes[0] - minutes[1]) < 2
    # What the record says is known once the parts ran. They stay the same, and each has to end within two sessions.
    record = json.loads((ROOT / "ci" / "gpu_record.json").read_text())
    assert max(plan.seconds(part, known) for part in parts for known in ({}, record)) < 2 * plan.SESSION_S
    # A case of replay is compared with another one.
    assert all(
        len([unit for unit in part if unit.kind == "replay"]) in (0, len(plan.names_of("replay"))) for part in parts
    )
    assert plan.part(whole, 1, 1) == whole


def test_every_row_of_the_record_has_a_case():
    cases = json.loads((ROOT / "ci" / "gpu_record.json").read_text())["cases"]
    names = {suite: plan.names_of(suite) for suite in {case["suite"] for case in cases} - {"tp"}}
    assert not [
        (case["suite"], case["name"]) for case in cases if case["name"] not in names.get(case["suite"], [case["name"]])
    ]


def test_what_is_missing():
    a, b, c, d, e = (Unit("paper", name) for name in "abcde")
    record = {
        "cases": [
            _case(a),
            _case(b, sources="old"),
            _case(c, error="out of time"),
            _case(d, skipped="needs something"),
            _case(e, device=A100),
        ]
    }
    # What failed is last.
    assert plan.missing([a, c, b, d, e], record, "new") == [b, c, d]
    assert plan.missing([a, b, e], record, "new", H100) == [b, e]


@pytest.mark.parametrize(
    ("kind", "entry", "is_missing"),
    [
        ("tests", None, True),
        ("tests", {**COMPLETE, "sources": "new"}, False),
        ("tests", {**COMPLETE, "sources": "old"}, True),
        ("tests", {**COMPLETE, "sources": "new", "complete": False}, True),
        ("upstream", {"sources": "new", "stock": COMPLETE, "on": COMPLETE, "differs": {}}, False),
        ("upstream", {"sources": "new", "stock": COMPLETE, "on": {**COMPLETE, "complete": False}}, True),
        ("programs", [{"sources": "new", "programs": plan.PROGRAMS - 1}, {"sources": "old", "programs": 9}], True),
        ("programs", [{"sources": "new", "programs": plan.PROGRAMS - 1}, {"sources": "new", "programs": 1}], False),
    ],
)
def test_what_is_no_case_is_missing_until_it_is_complete(kind, entry, is_missing):
    record = {} if entry is None else {kind: entry}
    assert plan.missing([Unit(kind)], record, "new") == [Unit(kind)] * is_missing


def test_the_plan_names_what_no_part_has():
    cases = [{**_case(Unit("tp", name)), "sources": sources} for name, sources in (("a", "old"), ("b", "new"))]
    assert plan.table([], {"cases": cases}, "new", 1).endswith("\nNo part has these rows of other sources: 1 of tp.")
    assert "No part" not in plan.table([], {"cases": cases[1:]}, "new", 1)


def test_times_are_those_of_the_last_run():
    unit, other = Unit("paper", "a"), Unit("paper", "b")
    recorded = {"compile": 32.0, "measure": 10.0, "device": 6.0}
    record = {"cases": [_case(unit, sources="old", seconds=recorded)], "tests": {"seconds": 77.0}}
    # What other processes compile meanwhile stops while it is timed.
    assert plan.seconds([unit], record) == pytest.approx((32.0 + 4.0) / (plan.CORES * plan.BUSY) + 6.0)
    assert plan.seconds([Unit("tests")], record) == 77.0
    # Without them, slower calls take longer, until no further variant is measured.
    times = [
        plan.seconds([other], {"cases": [_case(other, pygraph_us=us, stock_cg_us=us)]}) for us in (1e3, 1e4, 1e6, 1e7)
    ]
    assert times == sorted(times) and times[1] > times[0] > 0 and times[2] == times[3] < 60


def test_variants_that_compile_side_by_side_take_less_time():
    unit = Unit("paper", "a")
    seconds = {"compile": 400.0, "measure": 6.0, "device": 6.0}
    row = _case(unit, seconds=seconds)
    longest = 400.0 * (1 / plan.VARIANTS + plan.OF_CACHES)
    expected = plan.Work(400.0, longest, 6.0, compiling=2.0 * plan.COMPILING)
    assert plan.work(unit, row) == expected and plan.compiles_apart(expected)
    # What it took is known.
    assert plan.work(unit, _case(unit, seconds={**seconds, "longest": 90.0})).longest == 90.0
    assert plan.work(unit, _case(unit, gib=10.0))[3:] == pytest.approx((11.0, 11.0 * plan.COMPILING))
    assert plan.work(unit, _case(unit, gib=10.0, compile_gib=2.0))[3:] == pytest.approx((11.0, 2.2))
    assert plan.work(unit, _case(unit, seconds={**seconds, "compile": plan.APART_S})).longest == plan.APART_S


def test_programs_take_as_long_as_those_before():
    run = {"sources": "new", "programs": plan.PROGRAMS // 2}
    start = plan.PROGRAMS_START_S
    assert plan.seconds([Unit("programs")], {"programs": [run]}, "new") == start + plan.OTHERS["programs"] / 2
    record = {"programs": [{**run, "seconds": 30.0}, {"sources": "new", "programs": 0, "seconds": 9.0, "error": "no"}]}
    assert plan.seconds([Unit("programs")], record, "new") == pytest.approx(start + 30.0)
    assert plan.seconds([Unit("programs")], record, "newer") == pytest.approx(start + 60.0)


def test_what_takes_long_is_first():
    units = [Unit("paper", name) for name in "abc"]
    seconds = [{"compile": s, "measure": 4.0, "device": 2.0} for s in (20.0, 200.0, 56.0)]
    record = {"cases": [_case(unit, seconds=s) for unit, s in zip(units, seconds)]}
    assert [unit.name for unit in plan.longest_first(units, record)] == ["b", "c", "a"]
    # Not what the machine does for it, but the time until its end.
    record["cases"][0]["seconds"] = {"compile": 20.0, "measure": 20.0, "device": 20.0}
    assert [unit.name for unit in plan.longest_first(units, record)] == ["b", "c", "a"]
    # How long a case takes that never ran is not known.
    assert [unit.name for unit in plan.longest_first([*units, Unit("paper", "d")], record)] == ["d", "b", "c", "a"]


def test_the_plan_says_what_is_missing_and_how_many_commands_it_takes():
    units = [Unit("tests"), *(Unit("paper", str(i)) for i in range(300))]
    lines = plan.table(units, {"cases": [_case(unit) for unit in units[1:41]]}, "new", 2).splitlines()
    missing = {line.split()[0]: line for line in lines}
    assert "260 of 300" in missing["paper"] and "1 of 1" in missing["tests"]
    assert lines[-3].startswith("--part 1/2: ") and lines[-3].endswith("3 commands of 10 minutes")
    assert lines[-1].startswith("In all ")
    assert "In all 0 commands, or 0 sessions" in plan.table(
        units[1:41], {"cases": [_case(u) for u in units[1:41]]}, "new", 1
    )


class Machine:
    """Runs parts of a record: a clock that moves, and cases that take a minute each."""

    def __init__(self, monkeypatch, tmp_path, units, device=H100):
        self.now, self.suite, self.record, self.ran = 0.0, _load("scripts", "gpu_suite"), {}, []
        self.tmp_path = tmp_path
        monkeypatch.setattr(plan, "whole", lambda: units)
        monkeypatch.setattr(self.suite.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(self.suite, "_machine", lambda: {"device": device, "driver": "1", "versions": {}})
        monkeypatch.setattr(self.suite, "_gpu_record", lambda: self)
        monkeypatch.setattr(self.suite.Run, "build", lambda run, seconds: True)
        monkeypatch.setattr(self.suite, "gpus", lambda: ["0"])
        for kind, take in {"tests": self.tests, "programs": self.programs, "suite": self.cases}.items():
            monkeypatch.setattr(self.suite.Run, kind, lambda run, *args, take=take: take(*args))
        monkeypatch.setenv("OUT", str(tmp_path))
        self.monkeypatch = monkeypatch

    def load(self):
        return self.record

    def source_hash(self):
        return "new"

    def tests(self, seconds):
        return self.took("tests", 200.0, seconds, {**COMPLETE, "failures": {}})

    def programs(self, number, seed, seconds):
        done = min(number, int(seconds * 10))
        return self.took(
            "programs", done / 10, seconds, {"seed": seed, "programs": done, "equal": done, "passed": True}
        )

    def took(self, what, needed, seconds, result):
        self.ran.append(what)
        self.now += min(needed, seconds)
        return result if needed <= seconds else {**result, "complete": False}

    def cases(self, name, module, arguments, seconds, found):
        rows, end = [], self.now + seconds
        for case in arguments[arguments.index("--cases") + 1].split(","):
            suite, _, name = case.rpartition("/")
            if self.now + 60 > end:
                self.now = end
                break
            self.now += 60
            self.ran.append(name)
            rows.append({"suite": suite or arguments[arguments.index("--suite") + 1], "name": name})
            found(rows)

    def command(self, *arguments):
        """Run scripts/gpu_suite --all, merge its result into the record, and return the cases that ran."""
        self.now, self.ran = 0.0, []
        self.monkeypatch.setattr(sys, "argv", ["gpu_suite", "--all", *arguments])
        self.suite.main()
        assert self.now <= 575
        if self.ran:
            result = json.loads((self.tmp_path / "result.json").read_text())
            self.record = _load("ci", "gpu_record").merge(self.record, result)
            assert len([file for file in self.tmp_path.iterdir() if file.is_file()]) <= 8
        return self.ran


@pytest.fixture
def machine(monkeypatch, tmp_path):
    cases = [Unit("paper" if i % 2 else "pi", f"c{i}") for i in range(16)]
    return Machine(monkeypatch, tmp_path, [Unit("tests"), Unit("programs"), *cases])


def test_a_record_is_made_by_runs_that_go_on_where_the_last_one_ended(machine):
    ran = []
    for index in ("1/2", "2/2"):
        while found := machine.command("--part", index, "--resume"):
            ran += found
            assert len(ran) < 40
    assert ran.count("tests") == 1
    assert sorted(name for name in ran if name[0] == "c") == sorted(f"c{i}" for i in range(16))
    assert sum(run["programs"] for run in machine.record["programs"]) >= plan.PROGRAMS
    assert plan.missing(plan.whole(), machine.record, "new", H100) == []
    assert machine.record["tests"]["seconds"] == 200.0
    # On another device nothing of it is known.
    machine.monkeypatch.setattr(machine.suite, "_machine", lambda: {"device": A100})
    assert machine.command("--resume")


def test_each_gpu_runs_a_share(machine, capsys):
    """Results come together, and what the processes say."""

    def run_child(command, env, seconds, output, watch):
        index, count = machine.suite._part(command[command.index("--gpu") + 1])
        assert command[2:4] == ["--all", "--resume"] and 0 < seconds - float(command[-1]) < 30
        rows, out = [], Path(env["OUT"])
        result = {"sources": "new", "device": H100, "cases": rows}
        for unit in plan.shares(plan.whole(), count, machine.record)[index - 1]:
            if unit.name:
                rows.append({"suite": unit.kind, "name": unit.name})
            else:
                programs = [{"seed": 0, "programs": 7, "passed": True}]
                result[unit.kind] = programs if unit.kind == "programs" else {**COMPLETE, "failures": {}}
            machine.suite.write(out, result)
        (out / "log.txt").write_text(f"log of {index}\n")
        print("begun\nnot yet a li", end="", file=output, flush=True)
        watch()

    machine.monkeypatch.setattr(machine.suite, "gpus", lambda: ["4", "7"])
    machine.monkeypatch.setattr(machine.suite, "_call", run_child)
    machine.command("--resume")
    result = json.loads((machine.tmp_path / "result.json").read_text())
    assert sorted(case["name"] for case in result["cases"]) == sorted(u.name for u in plan.whole() if u.name)
    assert result["tests"]["passed"] == COMPLETE["passed"] and len(result["programs"]) == 1
    assert {*capsys.readouterr().out.splitlines()} >= {"1/2: begun", "2/2: begun"}
    assert {"log of 1", "log of 2"} <= {*(machine.tmp_path / "log.txt").read_text().splitlines()}


def test_a_share_has_a_gpu_and_cores_of_its_own(machine):
    pinned = []
    machine.monkeypatch.setattr(machine.suite, "gpus", lambda: ["4", "7"])
    machine.monkeypatch.setattr(machine.suite.os, "sched_getaffinity", lambda pid: {8, 9, 2, 3})
    machine.monkeypatch.setattr(machine.suite.os, "sched_setaffinity", lambda pid, cores: pinned.append(cores))
    machine.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    units = [Unit("paper", f"c{i}") for i in range(8)]
    machine.monkeypatch.setattr(plan, "whole", lambda: [Unit("tests"), *units])
    ran = []
    for index in (1, 2):
        ran += machine.command("--gpu", f"{index}/2")
        assert machine.suite.os.environ["CUDA_VISIBLE_DEVICES"] == ["4", "7"][index - 1]
    assert pinned == [[2, 3], [8, 9]]
    assert sorted(ran) == sorted(unit.name or unit.kind for unit in plan.whole())


def test_a_gpu_that_is_done_begins_cases_of_others(machine):
    machine.monkeypatch.setattr(machine.suite, "gpus", lambda: ["4", "7"])
    machine.monkeypatch.setattr(machine.suite.os, "sched_setaffinity", lambda pid, cores: None)
    machine.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    units = [Unit("paper", f"c{i}") for i in range(8)]
    machine.monkeypatch.setattr(plan, "whole", lambda: [Unit("tests"), *units])
    first, second = plan.shares(plan.whole(), 2, machine.record)
    ran = [name for name in machine.command("--gpu", "1/2", "--claims", str(machine.tmp_path)) if name != "tests"]
    # The process gets the cases of all shares, and those of its own share first. Suites leave out cases that have begun.
    own = [unit.name for unit in first if unit.name]
    assert len(ran) > len(own) and ran == [*own, *(unit.name for unit in second if unit.name)][: len(ran)]


@pytest.mark.parametrize(("gpus", "shares"), [("0,1", 1), ("0,1,2", 1), ("3,2,1,0", 2)])
def test_each_two_gpus_have_a_share_of_what_needs_two(gpus, shares, machine):
    asked = []

    def run_child(command, env, seconds, output, watch):
        index, count = machine.suite._part(command[command.index("--gpu") + 1])
        with machine.monkeypatch.context() as patch:
            patch.setattr(machine.suite.os, "sched_setaffinity", lambda pid, cores: None)
            patch.setenv("OUT", env["OUT"])
            patch.setattr(sys, "argv", command[1:])
            patch.setenv("CUDA_VISIBLE_DEVICES", gpus)
            machine.suite.main()

    def run_suite(run, name, module, arguments, *args):
        cases = arguments[arguments.index("--cases") + 1].split(",")
        asked.append((machine.suite.os.environ["CUDA_VISIBLE_DEVICES"], cases))

    machine.monkeypatch.setattr(machine.suite, "gpus", lambda: gpus.split(","))
    machine.monkeypatch.setattr(machine.suite.Run, "suite", run_suite)
    machine.monkeypatch.setattr(machine.suite, "_call", run_child)
    # One after the other, since they would have one environment.
    machine.monkeypatch.setattr(machine.suite, "ThreadPoolExecutor", lambda count: ThreadPoolExecutor(1))
    machine.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    machine.monkeypatch.setattr(sys, "argv", ["gpu_suite", "--suite", "dist"])
    machine.suite.main()
    assert [own for own, _ in asked] == ([gpus] if shares == 1 else ["3,2", "1,0"])
    assert sorted(name for _, cases in asked for name in cases) == sorted(plan.names_of("dist"))


def test_tests_are_not_begun_where_their_end_would_not_come(machine):
    machine.monkeypatch.setattr(plan, "PROGRAMS", 4000)
    machine.monkeypatch.setattr(plan, "whole", lambda: [Unit("programs"), Unit("tests")])
    machine.monkeypatch.setattr(plan, "OTHERS", {"programs": 500.0, "tests": 300.0})
    assert machine.command("--resume") == ["programs"]
    assert machine.command("--resume") == ["tests"]


def test_cases_of_one_suite_and_of_several(machine):
    asked = []
    machine.monkeypatch.setattr(machine.suite.Run, "suite", lambda run, *args: asked.append(args[:3]))
    for arguments in (["--suite", "pi", "--cases", "conv2d"], ["--suite", "quick,replay"], ["--suite", "bindings"]):
        machine.monkeypatch.setattr(sys, "argv", ["gpu_suite", *arguments])
        assert machine.suite.main() == 0
    # Programs of their own come behind the cases, which compile on all cores.
    (one, quick, replay, cases, bindings) = asked
    # Which cases are begun depends on how long they took.
    record = ["--record", str(machine.suite.RECORD)]
    assert one == ("cases", "pygraph", ["--suite", "pi", "--cases", "conv2d", *record, "--device", "cuda"])
    assert replay[1] == "pygraph.replay" and replay[2][1].startswith("linear_relu,")
    assert quick[2][:2] == ["--suite", "quick"] and "/" not in quick[2][3]
    # What the suite has beside cases is measured too.
    assert bindings == ("bindings", "pygraph.bindings", []) and cases[2][:2] == ["--suite", "bindings"]


def test_programs_behind_the_cases_keep_their_time(machine):
    asked = {}
    machine.monkeypatch.setattr(
        machine.suite.Run, "suite", lambda run, part, module, args, seconds, found: asked.__setitem__(part, seconds)
    )
    replay = plan.seconds([Unit("replay", name) for name in plan.names_of("replay")], {}, "new")
    # If there is time for both, and if there is not.
    for budget, most in ((replay + 60, 60), (replay, replay)):
        machine.monkeypatch.setattr(sys, "argv", ["gpu_suite", "--suite", "paper,replay", "--budget", str(budget)])
        assert machine.suite.main() == 0
        assert list(asked) == ["cases", "replay"] and asked["cases"] == pytest.approx(most)
