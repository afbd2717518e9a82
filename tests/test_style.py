from __future__ import annotations

import subprocess
import sys

import pytest

from pygraph_build.upstream import ROOT


def test_ruff():
    subprocess.run([sys.executable, "-m", "ruff", "check", "--quiet"], cwd=ROOT, check=True)


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").iterdir()), ids=lambda script: script.name)
def test_shell(script):
    if script.is_file() and b"bash" in script.read_bytes().partition(b"\n")[0]:
        subprocess.run(["bash", "-n", script], check=True)
