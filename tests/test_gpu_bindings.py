"""What python -m pygraph.bindings makes of its measurements. The measurements need a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "torch_overlay" / "benchmarks" / "dynamo"))

pytest.importorskip("torch")

from pygraph import bindings, catalogue, program, report, suite  # noqa: E402


def _points(**ways):
    """Microseconds by number of parameters, for each way."""
    return [
        {
            "parameters": n,
            "ways": {
                way: {"us": cost(n), "host_us": 1.0, "latency_us": cost(n)} if cost(n) else {"error": "failed"}
                for way, cost in ways.items()
            },
        }
        for n in bindings.POINTS
    ]


def _by_time(points):
    found = bindings.crossovers(points)
    return {(c["faster"], c["than"]): c["from"] for c in found if c["by"] == "us"}


def test_crossover():
    points = _points(node_update=lambda n: 5 + n, prelude=lambda n: 20 + n / 2)
    assert _by_time(points) == {("prelude", "node_update"): 32}


def test_no_crossover():
    # One is always the faster, or they cross and cross back.
    assert _by_time(_points(node_update=lambda n: n, prelude=lambda n: 2 * n)) == {}
    points = _points(node_update=lambda n: 10, prelude=lambda n: 5 if n == 16 else 20)
    assert _by_time(points) == {("node_update", "prelude"): 32}


def test_ways_that_failed():
    points = _points(node_update=lambda n: 5 + n, prelude=lambda n: None, copies=lambda n: 1 if n == 1 else 8 * n)
    assert _by_time(points) == {("node_update", "copies"): 2}
    assert "-" in "\n".join(report.beside_cases({"figure8": points}))


def test_bindings_copy_nothing():
    (case,) = catalogue.select("bindings", ["mlp_20x64"])
    row = {
        **dict.fromkeys(("pygraph_us", "forced_prelude_us"), 9.0),
        "no_cg_us": 30.0,
        "candidates_us": {"no_cg": 30.0, "forced_prelude": 9.0},
        "choice": "prelude",
        "copied_bytes": 0,
        "equal": True,
        "ratios": {"forced_prelude": [0.98, 1.0, 1.01]},
    }
    forced = {"copy": "copy", "node_update": "no_graph", "prelude": "node_update"}
    assert not suite.missed(case, {**row, "forced": forced})
    assert suite.missed(case, {**row, "forced": {**forced, "prelude": "1 copy + 1 prelude"}}) == [
        "prelude copies: 1 copy + 1 prelude"
    ]
    ratios = {"forced_prelude": [1.03, 1.04, 1.05]}
    assert suite.missed(case, {**row, "ratios": ratios}) == ["1.040 x forced_prelude (1.030 to 1.050), more than 1.02"]


def test_suite_forces_each_binding():
    forced = {name for name in catalogue.SUITES["bindings"].variants if name.startswith("forced_")}
    assert forced == {"forced_copy", "forced_node_update", "forced_prelude"}
    for name in forced:
        config = program.VARIANTS[name].config
        assert config == {"pygraph": True, "pygraph_force": name.removeprefix("forced_")}
    assert [case.name for case in catalogue.select("bindings")] == [case.name for case in catalogue.select("pi")]
