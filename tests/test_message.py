from __future__ import annotations

import re
import subprocess

import pytest

from pygraph_build import message, series, upstream


UPSTREAMS = upstream.load()
PATCHES = [
    pytest.param(package, each, file, id=f"{package.name}/{each}/{file.stem}")
    for package in UPSTREAMS.values()
    for each in package.series
    for file in series.files_of_series(package, each)
]


@pytest.mark.parametrize("package, each, file", PATCHES)
def test_what_a_patch_says(package, each, file):
    said = message.read_message(file)
    assert re.match(r"\[[a-z ]+\] [A-Z]", said.subject), said.subject
    assert len(said.subject) <= 72, said.subject
    assert said.reason, "the message does not say why the patch exists"
    tests = said.trailers("Test")
    assert tests, "no test fails without the patch"
    for test in tests:
        defined = message.tests_in(message.test_file(package, test))
        assert test.partition("::")[2] in defined, f"{test} does not exist"
    gains = said.trailers("Gain")
    assert len(gains) == (each == "perf"), "a patch of perf, and no other one, says what it gains"
    for gain in gains:
        assert re.search(r"\d", gain), gain


def test_trailers(project):
    text = "[area] Do it\n\nWhy: because.\n\nUpstream: an issue that\n takes two lines\nTest: a.py::A::test_a\nTest: b.py::test_b\n"
    project.add_patch(project.torch, text, {"torch/_inductor/old.py": None})
    (file,) = series.patch_files(project.torch)
    said = message.read_message(file)
    assert said.subject == "[area] Do it"
    assert said.reason == "Why: because."
    assert said.trailers("Test") == ["a.py::A::test_a", "b.py::test_b"]
    assert said.trailers("Upstream") == ["an issue that takes two lines"]
    assert said.trailers("Gain") == []
    files = [project.torch.overlay / "a.py", project.torch.overlay / "b.py"]
    assert message.own_tests([project.torch]) == (files, "(A and test_a) or (test_b)")


def test_long_subject(project):
    subject = "[area] " + "Very " * 12 + "long"
    project.add_patch(project.torch, f"{subject}\n\nWhy.", {"torch/_inductor/old.py": None})
    (file,) = series.patch_files(project.torch)
    assert message.read_message(file).subject == subject


def test_tests_that_a_file_defines(tmp_path):
    file = tmp_path / "test_a.py"
    file.write_text("class A:\n    def test_a(self): pass\n    def helper(self): pass\ndef test_b(): pass\nx = 1\n")
    assert message.tests_in(file) == {"A::test_a", "test_b"}


@pytest.mark.parametrize("last", ["fixes", "core"])
def test_tests_of_a_series(last):
    command = ["python3", "-m", "pygraph_build.message", "--series", last]
    printed = subprocess.check_output(command, text=True, cwd=upstream.ROOT / "scripts").splitlines()
    files, selected = message.own_tests(upstream.load(last=last).values())
    assert printed == [*map(str, files), selected]
