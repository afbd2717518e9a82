from __future__ import annotations

import ast
import re

import pytest

from pygraph_build import pull_requests, series, upstream
from pygraph_build.message import read_message
from pygraph_build.pull_requests import PullRequest, Result, SECTIONS, STATES
from pygraph_build.series import ABSENT
from pygraph_build.upstream import BuildError


DIRECTORY = upstream.ROOT / "patches" / "upstream"
REQUESTS = pull_requests.load()
each_request = pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: each.name)


def test_the_directory_is_complete():
    assert [each.name[:2] for each in REQUESTS] == [f"{i:02}" for i in range(1, len(REQUESTS) + 1)]
    assert len(REQUESTS) >= 8
    for name in "RFC.md", "port.md":
        assert (DIRECTORY / name).read_text().startswith("# ")


@each_request
def test_text(request_):
    subject = read_message(request_.patch).subject
    assert request_.text.startswith(f"# {subject}\n")
    assert re.findall(r"^## (.*)", request_.text, re.MULTILINE) == list(SECTIONS)
    bug = request_.text.partition("## Bug\n\n")[2].partition("\n\n```python")[0]
    assert len(bug.splitlines()) <= 5
    ast.parse(request_.program)
    for state in STATES:
        transcript = request_.transcripts[state]
        assert re.findall(r"^\$ .*", transcript, re.MULTILINE) == [
            "$ python repro.py",
            *(f"$ python -m pytest {test}" for test in request_.tests),
        ]
    assert re.search(r"^\d+ failed", request_.transcripts["stock"], re.MULTILINE)
    assert re.search(r"^\d+ passed$", request_.transcripts["patched"], re.MULTILINE)


@each_request
def test_message(request_):
    said = read_message(request_.patch)
    assert re.match(r"\[[A-Za-z ]+\] [A-Z]", said.subject) and len(said.subject) <= 72
    for test in request_.tests:
        assert f"Test Plan: python -m pytest {test}" in said.body
    assert "authored with an AI assistant" in said.body


@each_request
def test_changes(request_):
    """A patch adds tests, changes files of the wheel, and names nothing of PyGraph's."""
    assert request_.tests
    installed = list((upstream.ROOT / "build").glob("upstream-*/lib/python*/site-packages"))
    for change in request_.changes:
        assert (change.before == ABSENT) == (change.path in request_.tests)
        assert b"pygraph" not in change.hunks.lower()
        for site in installed:
            assert (site / change.path).exists() == (change.before != ABSENT)


def test_port_lacks_a_patch(project):
    project.add_patch(project.torch, "[area] Do it\n\nWhy.\n", {"torch/_inductor/old.py": None})
    (patch,) = (file for package in upstream.load(project.root).values() for file in series.patch_files(package))
    directory = project.root / "patches" / "upstream"
    directory.mkdir()
    (directory / "port.md").write_text("")
    assert pull_requests.missing_in_port(project.root) == [patch.name]
    (directory / "port.md").write_text(f"`{patch.name}`")
    assert not pull_requests.missing_in_port(project.root)


def fake(summaries: dict[str, str], **printed: str) -> tuple[PullRequest, Result]:
    transcripts = {"stock": "1\n", "patched": "2\n"}
    request = PullRequest("01-a", DIRECTORY / "01-a" / "change.patch", (), "", "", transcripts)
    return request, Result(summaries, transcripts | printed)


def test_faults():
    good = {"stock": "1 failed, 2 passed", "patched": "3 passed"}
    assert not pull_requests.faults(*fake(good))
    assert len(pull_requests.faults(*fake(good, patched="3\n"))) == 1
    assert len(pull_requests.faults(*fake(good, patched="1\n"))) == 2
    for state, summary in ("stock", "3 passed"), ("stock", "1 error"), ("patched", "2 passed, 1 skipped"):
        assert len(pull_requests.faults(*fake(good | {state: summary}))) == 1


def test_table():
    request, result = fake({"stock": "1 failed", "patched": "1 passed"})
    lines = pull_requests.table({"01-a": result}, {"01-a": []}).splitlines()
    assert lines[1].split("  ")[0] == "01-a" and lines[1].endswith("as printed")


def test_link(tmp_path):
    source = tmp_path / "source"
    (source / "a" / "b").mkdir(parents=True)
    (source / "a" / "own.py").write_text("old")
    (source / "a" / "other.py").write_text("other")
    (source / "c").mkdir()
    target = tmp_path / "target"
    pull_requests.link(source, target, {"a/own.py", "a/new.py"})
    assert (target / "c").is_symlink() and (target / "a" / "b").is_symlink()
    assert (target / "a" / "other.py").read_text() == "other"
    assert not (target / "a" / "own.py").exists() and not (target / "a").is_symlink()


def test_a_directory_without_a_program(tmp_path):
    directory = tmp_path / "patches" / "upstream" / "01-a"
    directory.mkdir(parents=True)
    (directory / "change.patch").write_text("")
    (directory / "PR.md").write_text("# [a] B\n")
    with pytest.raises(BuildError, match="has to hold a program"):
        pull_requests.load(tmp_path)


def test_record(tmp_path):
    directory = tmp_path / "patches" / "upstream" / "01-a"
    directory.mkdir(parents=True)
    (directory / "change.patch").write_text("")
    (directory / "PR.md").write_text("```python\n```\n```console\nold\n```\n```console\nold\n```\n")
    (request,) = pull_requests.load(tmp_path)
    request = pull_requests.record(request, Result({}, {"stock": "1\n", "patched": "2\n"}))
    assert request.transcripts == {"stock": "1\n", "patched": "2\n"}
