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


PROGRAMS = 8


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


def lines_of(code: str) -> list[str]:
    """Returns the statements of a graph, without those that free a buffer or choose a device."""
    lines = (line.strip() for line in code.splitlines())
    return [line for line in lines if not re.match(r"del |with torch\.cuda|torch\.cuda\.set_device", line)]


def is_no_element(line: str) -> bool:
    """Returns whether a statement takes no element of a result, nor checks one."""
    return not re.match(r"buf\d+ = buf\d+(\[\d+\])?$|assert_size_stride\(|assert_alignment\(|# buffer", line)


def explained(stock: str, off: str) -> bool:
    """Returns whether a fix makes the difference of two graphs.

    Random draws have another order, elements of results are taken behind their operators, or a partition
    of stock's takes the list of results itself.
    """
    draws = [re.findall(r"aten\.(?:rand|multinomial|bernoulli|normal)\w*", code) for code in (stock, off)]
    results = re.findall(r"^\s+(buf\d+) = torch\.ops\.", stock, re.MULTILINE)
    taken = re.findall(r"\w+", " ".join(re.findall(r"partition\d+_args = \[(.*)\]", stock)))
    old, new = lines_of(stock), lines_of(off)
    only_elements = sorted(old) == sorted(new) and [*filter(is_no_element, old)] == [*filter(is_no_element, new)]
    return draws[0] != draws[1] or bool({*results} & {*taken}) or only_elements


def test_off_is_stock_plus_fixes(stock, tmp_path):
    off = generated(os.environ.get("PYTHONPATH"), tmp_path)
    assert [p["program"] for p in off] == [p["program"] for p in stock]
    assert sum(len(p["stock"]) for p in stock) >= PROGRAMS / 2
    for ours, theirs in zip(off, stock):
        for setting in "plain", "stock":
            assert len(ours[setting]) == len(theirs[setting])
            for new, old in zip(ours[setting], theirs[setting]):
                assert new == old or explained(old, new), ours["program"]
