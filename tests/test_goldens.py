"""What the engine generates, reports and decides is what it was when goldens.json was written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


pytest.importorskip("torch._inductor.pygraph")

HERE = Path(__file__).resolve().parent
GOLDENS = HERE / "data" / "goldens.json"

sys.path.insert(0, str(HERE))

import goldens  # noqa: E402


def check(*args: str) -> None:
    """In a process of its own: what others compiled or patched says nothing there."""
    command = [sys.executable, HERE / "goldens.py", "--check", GOLDENS, *args]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, f"{found.stdout[-10_000:]}\n{found.stderr[-2_000:]}"


def test_quick() -> None:
    check("--quick")


def test_file_has_what_is_written_today() -> None:
    golden = json.loads(GOLDENS.read_text())
    assert list(golden["entries"]) == goldens.names_of(golden["programs"])
    assert set(goldens.QUICK_MODELS) <= set(goldens.MODELS)


def test_wording_is_told_from_structure() -> None:
    old = {"structure": {"reports": [[1, ["aten.add"]]]}, "words": ["slow", "slow", "", "bad"]}
    new = {"structure": {"reports": [[2, ["aten.add"]]]}, "words": ["SLOW", "SLOW", "", "bad"]}
    differences = goldens.Differences()
    differences.add("model/a", old, old)
    assert (differences.parts, differences.words) == ([], {})
    differences.add("model/a", old, new)
    assert differences.parts == [("model/a", "structure", "[reports][0][0]", 1, 2)]
    assert differences.words == {("slow", "SLOW"): ["model/a", "model/a"]}
    assert "several" not in differences.text(None, {})
    differences.add("model/b", {"words": ["slow"]}, {"words": ["other"]})
    assert differences.text(None, {}).count("(one of several)") == 2
    # A reason more or less is no wording.
    differences.add("model/c", {"words": ["a"]}, {"words": ["a", "b"]})
    assert differences.parts[-1][:2] == ("model/c", "words")


def test_code_that_differs_is_shown(tmp_path: Path) -> None:
    (tmp_path / "model.a.pygraph.0.txt").write_text("x = 1\ny = 2\n")
    differences = goldens.Differences()
    differences.add("model/a", {"code": {"pygraph": ["1"]}}, {"code": {"pygraph": ["2"]}})
    shown = differences.text(tmp_path, {"model.a.pygraph.0": "x = 1\ny = 3\n"}).splitlines()
    assert "-y = 2" in shown and "+y = 3" in shown


def test_modules_that_moved_generate_the_same() -> None:
    before = "from torch._inductor.pygraph.deliver import Deliver\ntorch._inductor.pygraph.allocation.empty(3)\n"
    after = "from torch._inductor.pygraph.values.deliver import Deliver\ntorch._inductor.pygraph.capture.a.empty(3)\n"
    assert goldens.normalized(before) == goldens.normalized(after)
    assert goldens.normalized(before) == "from pygraph import Deliver\npygraph.empty(3)\n"
    assert goldens.normalized("#include </a/b/cpp_prefix.h>\n") == "#include <cpp_prefix.h>\n"
