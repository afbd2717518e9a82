"""Cases rewritten in JAX: the way to them and back, and, where JAX is installed, that they compute the same."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest


BENCHMARKS = Path(__file__).resolve().parent.parent / "torch_overlay" / "benchmarks" / "dynamo"
sys.path.insert(0, str(BENCHMARKS))

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from pygraph import catalogue, jax_peer, program, worker  # noqa: E402


EAGER = {
    name: dataclasses.replace(program.VARIANTS[name], compile={"backend": "eager"}, config={})
    for name in ("no_cg", "stock_cg", "pygraph", "forced_node_update")
}
VARIANTS = {**EAGER, "jax": program.VARIANTS["jax"]}


@pytest.fixture(autouse=True)
def _reset(monkeypatch: pytest.MonkeyPatch) -> None:
    path = [str(BENCHMARKS), *filter(None, sys.path)]
    monkeypatch.setenv("PYTHONPATH", ":".join(path))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    yield
    torch._dynamo.reset()


def _measure(name: str, **overrides: object) -> dict:
    (case,) = catalogue.select("pi", [name])
    case = dataclasses.replace(case, **overrides)
    run = worker.CaseRun(case, "cpu", small=True, variants=VARIANTS, rounds=2, round_s=1e-4)
    run.prepare()
    return run.measure()


@pytest.mark.parametrize("name", jax_peer.MODELS)
def test_the_same_computation(name: str) -> None:
    pytest.importorskip("jax")
    (case,) = catalogue.select("pi", [name])
    if case.missing:
        pytest.skip(f"needs {case.missing}")
    row = _measure(name)
    assert row["failed"] == {} and row["jax_us"] > 0 and row["note"].startswith("jax ")


def test_without_jax_there_is_no_such_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_peer.importlib.util, "find_spec", lambda name: None)
    row = _measure("pointwise_2x4KiB")
    assert "jax_us" not in row and row["failed"] == {} and row["note"] == ""


def _answering(monkeypatch: pytest.MonkeyPatch, compute, platform="cpu", status=0, is_bfloat16=False) -> None:
    """In the place of the process with JAX."""

    def run(command, **kwargs):
        *_, file, _ = command
        _, ring = pickle.loads(Path(file).read_bytes())
        outputs = [{"['outputs']": (compute(*(array for array, _ in args)), is_bfloat16)} for args, _ in ring]
        Path(file).with_suffix(".out").write_bytes(pickle.dumps(outputs))
        answer = {"platform": platform, "version": "0", "median_us": 3.0, "host_us": 2.0}
        return SimpleNamespace(returncode=status, stdout=f"a warning\n{json.dumps(answer)}\n")

    monkeypatch.setattr(worker, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE))
    monkeypatch.setattr(jax_peer, "available", lambda case: True)


def test_results_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    _answering(monkeypatch, lambda a, b: (np.sin(a) + b) * 2)
    row = _measure("pointwise_2x4KiB")
    assert (row["jax_us"], row["jax_host_us"], row["failed"]) == (3.0, 2.0, {}) and row["equal"]

    _answering(monkeypatch, lambda a, b: (np.sin(a) + b) * 2.1)
    row = _measure("pointwise_2x4KiB")
    assert row["failed"] == {"jax": "wrong result: ['outputs'] differs from no CUDA graphs'"}
    # That says nothing about PyGraph.
    assert row["equal"] and row["pygraph_us"] > 0


def test_what_did_not_run_on_the_same_device_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    _answering(monkeypatch, lambda a, b: (np.sin(a) + b) * 2, platform="gpu")
    row = _measure("pointwise_2x4KiB")
    assert row["failed"] == {"jax": "RuntimeError: jax 0 ran on gpu"} and "jax_us" not in row
    _answering(monkeypatch, lambda a, b: a, status=1)
    assert _measure("pointwise_2x4KiB")["failed"] == {"jax": "RuntimeError: ended with 1, see the log"}


def test_bits_of_bfloat16_go_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    def double(a, b):
        assert a.dtype == np.uint16
        wide = [torch.from_numpy(t).view(torch.bfloat16) for t in (a, b)]
        return ((torch.sin(wide[0]) + wide[1]) * 2).view(torch.uint16).numpy()

    _answering(monkeypatch, double, is_bfloat16=True)
    inputs = lambda small: (tuple(torch.randn(8, dtype=torch.bfloat16) for _ in range(2)), {})  # noqa: E731
    row = _measure("pointwise_2x4KiB", dtype=torch.bfloat16, inputs=inputs)
    assert row["failed"] == {} and row["jax_us"] == 3.0


def test_the_process_imports_no_torch() -> None:
    code = "import sys, pygraph.jax_peer; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, check=True)
