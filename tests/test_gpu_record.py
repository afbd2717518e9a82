from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def checkout(tmp_path):
    """A repository that holds sources and the script, and nothing else."""
    (tmp_path / "ci").mkdir()
    shutil.copy(ROOT / "ci" / "gpu_record", tmp_path / "ci")
    for name, text in {
        "patches/torch/hooks.patch": "patch",
        "torch_overlay/torch/a.py": "a = 1\n",
        "triton_overlay/b.py": "b = 1\n",
        "README.md": "read me\n",
    }.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def _load(path):
    loader = importlib.machinery.SourceFileLoader(path.name, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(path.name, loader))
    loader.exec_module(module)
    return module


def _run(checkout, *arguments):
    # Without the packages of this environment: checking needs none.
    command = [sys.executable, "-I", "-S", str(checkout / "ci" / "gpu_record"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _result(checkout, name, **parts):
    sources = _load(checkout / "ci" / "gpu_record").source_hash(checkout)
    file = checkout / name
    file.write_text(json.dumps({"sources": sources, "date": f"2026-01-01T{name}", **parts}))
    return file


def _case(name, us, suite="pi"):
    return {"suite": suite, "name": name, "pygraph_us": us}


def _record(checkout):
    return json.loads((checkout / "ci" / "gpu_record.json").read_text())


def test_hash_is_of_names_and_contents_of_the_sources(checkout):
    source_hash = _load(checkout / "ci" / "gpu_record").source_hash
    before = source_hash(checkout)

    (checkout / "README.md").write_text("other\n")
    cache = checkout / "torch_overlay/torch/__pycache__"
    cache.mkdir()
    (cache / "a.pyc").write_bytes(b"\0")
    (checkout / "patches/upstream").mkdir(parents=True, exist_ok=True)
    (checkout / "patches/upstream/change.patch").write_text("other\n")
    (checkout / "patches/README.md").write_text("other\n")
    assert source_hash(checkout) == before

    (checkout / "torch_overlay/torch/a.py").rename(checkout / "torch_overlay/torch/c.py")
    renamed = source_hash(checkout)
    assert renamed != before
    (checkout / "torch_overlay/torch/c.py").write_text("a = 2\n")
    assert source_hash(checkout) not in (before, renamed)


def test_hash_keeps_names_and_contents_apart(checkout):
    source_hash = _load(checkout / "ci" / "gpu_record").source_hash
    overlay = checkout / "triton_overlay"
    (overlay / "b.py").write_text("1")
    (overlay / "c.py").write_text("")
    before = source_hash(checkout)
    (overlay / "b.py").write_text("")
    (overlay / "c.py").write_text("1")
    assert source_hash(checkout) != before


def test_check(checkout):
    answer = _run(checkout, "--check")
    assert answer.returncode == 1 and len(answer.stdout.splitlines()) == 1

    result = _result(checkout, "1.json", tests={"passed": 1}, cases=[_case("a", 1.0), _case("b", 2.0)])
    assert _run(checkout, "--merge", result).returncode == 0
    answer = _run(checkout, "--check")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout == "3 entries of these sources, 0 random programs\n"

    (checkout / "patches/torch/hooks.patch").write_text("changed")
    answer = _run(checkout, "--check")
    assert answer.returncode == 1
    assert answer.stdout == ("ci/gpu_record.json is stale: 3 of 3 entries ran on other sources (tests, pi/a, pi/b)\n")

    # Running one case again does not vouch for the rest.
    _run(checkout, "--merge", _result(checkout, "2.json", cases=[_case("a", 1.0)]))
    assert "2 of 3 entries" in _run(checkout, "--check").stdout


def test_merge_replaces_what_ran_again_and_keeps_the_rest(checkout):
    first = _result(
        checkout, "1.json", device="old", tests={"passed": 1}, cases=[_case("a", 1.0), _case("a", 5.0, suite="other")]
    )
    (checkout / "torch_overlay/torch/a.py").write_text("a = 2\n")
    second = _result(checkout, "2.json", device="new", cases=[_case("a", 2.0), _case("b", 3.0)])
    # Given in any order, the newer one wins.
    _run(checkout, "--merge", second, first)

    record = _record(checkout)
    old, new = (json.loads(file.read_text())["sources"] for file in (first, second))
    assert record["sources"] == new
    assert record["device"] == "new"
    run1 = {"sources": old, "date": "2026-01-01T1.json", "device": "old"}
    run2 = {"sources": new, "date": "2026-01-01T2.json", "device": "new"}
    assert record["tests"] == {"passed": 1, **run1}
    assert record["cases"] == [
        {**_case("a", 2.0), **run2},
        {**_case("a", 5.0, suite="other"), **run1},
        {**_case("b", 3.0), **run2},
    ]


def test_merge_into_an_existing_record(checkout):
    _run(checkout, "--merge", _result(checkout, "1.json", cases=[_case("a", 1.0)]))
    _run(checkout, "--merge", _result(checkout, "2.json", upstream={"differs": {}}))
    record = _record(checkout)
    assert [case["name"] for case in record["cases"]] == ["a"]
    assert record["upstream"]["sources"] == record["sources"]


def test_entries_of_a_record_from_before_keep_the_run_it_named(checkout):
    case = {**_case("a", 1.0), "sources": "0" * 64}
    record = {"sources": "0" * 64, "device": "old", "date": "2025", "cases": [case]}
    (checkout / "ci" / "gpu_record.json").write_text(json.dumps(record))
    _run(checkout, "--merge", _result(checkout, "1.json", device="new", cases=[_case("b", 1.0)]))
    a, b = _record(checkout)["cases"]
    assert (a["device"], a["date"], b["device"]) == ("old", "2025", "new")


def test_a_skipped_case_replaces_none_that_ran(checkout):
    skipped = {**_case("a", None), "skipped": "needs a library"}
    _run(checkout, "--merge", _result(checkout, "1.json", cases=[skipped]))
    assert _record(checkout)["cases"][0]["skipped"]
    _run(checkout, "--merge", _result(checkout, "2.json", cases=[_case("a", 1.0)]))
    _run(checkout, "--merge", _result(checkout, "3.json", cases=[skipped]))
    (case,) = _record(checkout)["cases"]
    assert case["pygraph_us"] == 1.0 and "skipped" not in case


def test_rows_of_two_devices_are_of_the_same_sources(checkout):
    cases = [_case("a", 1.0), _case("b", 1.0)]
    _run(checkout, "--merge", _result(checkout, "1.json", device="H200", cases=cases))
    _run(checkout, "--merge", _result(checkout, "2.json", device="A100", cases=[_case("a", 2.0)]))
    found = [(case["name"], case["device"], case["pygraph_us"]) for case in _record(checkout)["cases"]]
    assert found == [("a", "H200", 1.0), ("b", "H200", 1.0), ("a", "A100", 2.0)]
    assert _run(checkout, "--check").stdout.startswith("3 entries of these sources")
    # On other sources, both are replaced.
    (checkout / "torch_overlay/torch/a.py").write_text("a = 2\n")
    _run(checkout, "--merge", _result(checkout, "3.json", device="A100", cases=[_case("a", 3.0)]))
    found = [(case["name"], case["device"], case["pygraph_us"]) for case in _record(checkout)["cases"]]
    assert found == [("a", "A100", 3.0), ("b", "H200", 1.0)]


def _programs(seed, programs=10, **others):
    return {"seed": seed, "programs": programs, "equal": programs, "passed": True, **others}


def test_random_programs_add_up(checkout):
    _run(checkout, "--merge", _result(checkout, "1.json", programs=[_programs(0)]))
    _run(checkout, "--merge", _result(checkout, "2.json", programs=[_programs(1, 30)], device="H200"))
    runs = _record(checkout)["programs"]
    assert [(run["seed"], run["programs"], run["date"]) for run in runs] == [
        (0, 10, "2026-01-01T1.json"),
        (1, 30, "2026-01-01T2.json"),
    ]
    assert _run(checkout, "--check").stdout == "2 entries of these sources, 40 random programs\n"
    # The same seed draws the same programs.
    _run(checkout, "--merge", _result(checkout, "3.json", programs=[_programs(1, 20)]))
    assert _run(checkout, "--check").stdout == "2 entries of these sources, 30 random programs\n"
    # What ran on other sources says nothing about these.
    (checkout / "torch_overlay/torch/a.py").write_text("a = 2\n")
    assert "2 of 2 entries ran on other sources (programs/0, programs/1)" in _run(checkout, "--check").stdout
    _run(checkout, "--merge", _result(checkout, "4.json", programs=[_programs(2, 5)]))
    assert [run["seed"] for run in _record(checkout)["programs"]] == [2]


def test_parts_of_a_suite_add_up(checkout):
    _run(checkout, "--merge", _result(checkout, "1.json", bindings={"figure8": [1], "kernels": [1]}))
    _run(checkout, "--merge", _result(checkout, "2.json", bindings={"figure8": [2]}))
    found = _record(checkout)["bindings"]
    assert (found["figure8"], found["kernels"], found["date"]) == ([2], [1], "2026-01-01T2.json")
    (checkout / "torch_overlay/torch/a.py").write_text("a = 2\n")
    _run(checkout, "--merge", _result(checkout, "3.json", bindings={"figure8": [3]}))
    assert "kernels" not in _record(checkout)["bindings"]


def test_texts_are_no_sources(checkout):
    source_hash = _load(checkout / "ci" / "gpu_record").source_hash
    before = source_hash(checkout)
    page = checkout / "torch_overlay/docs/source/page.md"
    page.parent.mkdir(parents=True)
    page.write_text("text\n")
    assert source_hash(checkout) == before


def test_an_explanation_stays_until_the_case_runs_again(checkout):
    _run(checkout, "--merge", _result(checkout, "1.json", cases=[_case("a", 1.0)]))
    assert _run(checkout, "--note", "pi/a", "the clocks").returncode == 0
    assert _run(checkout, "--note", "pi/b", "nothing").stderr == "ci/gpu_record.json has no case pi/b\n"
    _run(checkout, "--merge", _result(checkout, "2.json", tests={"passed": 1}))
    assert _record(checkout)["cases"][0]["explanation"] == "the clocks"
    _run(checkout, "--merge", _result(checkout, "3.json", cases=[_case("a", 1.0)]))
    assert "explanation" not in _record(checkout)["cases"][0]


def test_readme_says_what_the_record_does():
    record = _load(ROOT / "ci" / "gpu_record")
    readme = record.README.read_text()
    _, begin, rest = readme.partition(record.BEGIN)
    block, end, _ = rest.partition(record.END)
    assert begin and end
    assert block.strip() == record.readme_block(), "run ci/gpu_record --readme"
    for file in re.findall(r"\((docs/[^)]*)\)", block):
        assert (ROOT / file).exists(), f"no {file}: run ci/gpu_record --readme"


def test_readme_says_that_the_record_is_stale_as_long_as_a_list_says_what_is_new():
    record = _load(ROOT / "ci" / "gpu_record")
    says, listed = "The record is stale" in record.README.read_text(), (ROOT / "docs" / "sources.md").exists()
    assert says == listed, "docs/sources.md goes with what README says of it"
    assert not (says and record.check() is None), "the record is whole: docs/sources.md can go"


def test_pages_say_what_the_record_does(tmp_path):
    pytest.importorskip("matplotlib")
    record = _load(ROOT / "ci" / "gpu_record")
    found = {page.name: page.read_text() for page in record.PAGES.glob("*.md")}
    assert found == {page.name: page.read_text() for page in record.pages(tmp_path)}, "run ci/gpu_record --readme"
    assert {file.name for file in record.PAGES.iterdir()} == {file.name for file in tmp_path.iterdir()}


def test_the_checkout_hashes():
    assert len(_load(ROOT / "ci" / "gpu_record").source_hash()) == 64
