"""A build that stops after a series: what it changes can be imported. ``scripts/test --series`` runs its tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from pygraph_build import overlay, series, upstream


EARLIER = (upstream.ROOT / "patches" / ".series").read_text().split()[:-1]

PROGRAM = """
import importlib, sys, torch
assert torch.__version__ == sys.argv[1], torch.__version__
for name in sys.argv[2:]:
    importlib.import_module(name)
x = torch.ones(3)
assert torch.equal(torch.compile(lambda x: x.sin() + 1, backend="aot_eager")(x), x.sin() + 1)
"""


@pytest.mark.parametrize("last", EARLIER)
def test_imports(last, tmp_path):
    upstreams = upstream.load(last=last)
    overlay.overlay_directory(upstreams.values(), tmp_path / "overlay")
    paths = {change.path for change in series.read_series(upstreams["torch"])}
    changed = {path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths}
    sources = [(tmp_path / "overlay" / path).read_text() for path in paths]
    # What a later series brings is not named by what is there.
    hooked = {
        name for source in sources for name in re.findall(r"from (torch\._inductor\.pygraph[\w.]*) import", source)
    }
    assert bool(hooked) == upstreams["torch"].takes_overlay
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "overlay")}
    command = [sys.executable, "-c", PROGRAM, upstreams["torch"].release, *sorted(changed | hooked)]
    subprocess.run(command, check=True, env=environment)
