"""With the flag off, generated code is stock's but for the series ``fixes``."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pygraph_build.upstream import ROOT


PROGRAMS = 12


def generated(path: str | None, cache: Path) -> list[dict]:
    """Returns what torch at a path generates, stock's for None."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYTHONHASHSEED": "0", "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    if path is not None:
        environment["PYTHONPATH"] = path
    command = [sys.executable, ROOT / "tests" / "generated_code.py", "--programs", str(PROGRAMS)]
    return json.loads(subprocess.check_output(command, env=environment, stderr=subprocess.DEVNULL))


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> list[dict]:
    if importlib.metadata.version("torch") != "2.11.0":
        pytest.skip("needs upstream's torch as installed")
    return generated(None, tmp_path_factory.mktemp("stock"))


def explained(stock: str, off: str) -> bool:
    """Whether a fix makes the difference of two graphs: an order of draws, or a list that a partition takes."""
    draws = [re.findall(r"aten\.(?:rand|multinomial|bernoulli|normal)\w*", code) for code in (stock, off)]
    lists = re.findall(r"^\s+(buf\d+) = torch\.ops\.", stock, re.MULTILINE)
    taken = re.findall(r"\w+", " ".join(re.findall(r"partition\d+_args = \[(.*)\]", stock)))
    return draws[0] != draws[1] or bool({*lists} & {*taken})


def test_off_is_stock_plus_fixes(stock, tmp_path):
    off = generated(os.environ.get("PYTHONPATH"), tmp_path)
    assert [p["program"] for p in off] == [p["program"] for p in stock]
    assert sum(len(p["stock"]) for p in stock) >= PROGRAMS / 2
    for ours, theirs in zip(off, stock):
        for setting in "plain", "stock":
            assert len(ours[setting]) == len(theirs[setting])
            for new, old in zip(ours[setting], theirs[setting]):
                assert new == old or explained(old, new), ours["program"]
