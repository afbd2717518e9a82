"""The suite replay: what it must show, from times that are given, and a row on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "torch_overlay" / "benchmarks" / "dynamo"))

torch = pytest.importorskip("torch")

from pygraph import layers, replay  # noqa: E402
from pygraph.compare import Difference  # noqa: E402


def _times(pygraph: float, stock: float, **more: float) -> dict[str, dict[str, float]]:
    return {
        "no_cg": {"host": 40.0, "total": 41.0},
        "stock_cg": {"trees": 9.0, "inputs": 6.0, "launch": 6.0, "host": stock, "total": stock + 1},
        "pygraph": {"trees": 3.0, "inputs": 1.5, "launch": 2.5, "host": pygraph, "total": pygraph + 1} | more,
    }


def test_limits_are_shares_of_what_stock_takes() -> None:
    call, below = replay.musts("linear_relu", _times(20.0, 75.0), None)
    assert call == {"what": "a call: 21.0 us, 0.28 of stock's 76.0 us, must 0.39", "met": True}
    assert below == {"what": "trees and below, with the launch: 7.0 us, 0.33 of stock's 21.0 us, must 0.33", "met": False}
    # On a machine whose host is slower, both take longer.
    assert replay.musts("linear_relu", _times(200.0, 750.0), None)[0]["met"]
    assert not replay.musts("linear_relu", _times(23.0, 57.0), None)[0]["met"]


def test_an_extra_graph_is_what_three_take_more_than_one() -> None:
    one = _times(20.0, 60.0)
    (extra,) = replay.musts("three_graphs", _times(36.0, 120.0), one)
    assert extra == {"what": "host for each extra graph: 8.0 us, 0.27 of stock's 30.0 us, must 0.27", "met": True}
    assert not replay.musts("three_graphs", _times(36.4, 120.0), one)[0]["met"]
    assert replay.musts("three_graphs", _times(36.0, 120.0), None)[0]["met"] is False
    # A run in which stock took no time for it says nothing.
    assert not replay.musts("three_graphs", _times(20.0, 60.0), one)[0]["met"]


def test_training_is_held_to_stock() -> None:
    (host,) = replay.musts("training", _times(60.0, 121.0), None)
    assert host["met"]
    assert not replay.musts("training", _times(61.0, 121.0), None)[0]["met"]


def test_every_limit_is_of_a_case() -> None:
    assert set(replay.MUSTS) <= {*layers.CASES, "training"}
    assert {replay.ONE_GRAPH, "three_graphs"} <= set(layers.CASES)


def test_a_wrong_result_is_a_failed_row() -> None:
    differences = {name: Difference() for name in layers.VARIANTS}
    right = replay.row("a", _times(1.0, 2.0), differences, [])
    assert right["equal"] and right["missed"] == [] and right["stock_cg_us"] == 3.0
    assert right["host_us"] == {"no_cg": 40.0, "stock_cg": 2.0, "pygraph": 1.0}
    differences["pygraph"] = Difference(False, False, 1.0, "['outputs']")
    wrong = replay.row("a", _times(1.0, 2.0), differences, [])
    reason = "wrong result: ['outputs'] differs from eager's"
    assert not wrong["equal"] and wrong["failed"] == {"pygraph": reason} and wrong["missed"] == [f"pygraph: {reason}"]


def test_gradients_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "CHECKED_CALLS", 1)
    monkeypatch.setattr(replay, "VARIANTS", {"no_cg": {}})
    make = lambda device: torch.nn.Linear(4, 4)  # noqa: E731
    case = layers.Case(make, lambda device: (torch.ones(2, 4),), trains=True)
    monkeypatch.setattr(torch, "compile", lambda fn, **kwargs: fn)
    assert replay.check(case, "cpu")["no_cg"].bitwise

    def detached(fn, **kwargs):
        return lambda x: torch.nn.functional.linear(x, fn.weight, fn.bias.detach())

    monkeypatch.setattr(torch, "compile", detached)
    found = replay.check(case, "cpu")["no_cg"]
    assert not found.close and found.where == "['grads']['bias']"


def test_variants_are_compared_with_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "CHECKED_CALLS", 2)
    monkeypatch.setattr(replay, "VARIANTS", {"no_cg": {}})
    case = layers.CASES["pointwise_2x4KiB"]
    with torch.no_grad():
        assert replay.check(case, "cpu")["no_cg"].close
        original = torch.compile
        monkeypatch.setattr(torch, "compile", lambda fn, **kwargs: lambda *args: 2 * original(fn, **kwargs)(*args))
        assert not replay.check(case, "cpu")["no_cg"].close
