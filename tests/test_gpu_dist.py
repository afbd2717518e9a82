"""Suite dist, on two processes without GPUs."""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest


BENCHMARKS = Path(__file__).resolve().parent.parent / "torch_overlay" / "benchmarks" / "dynamo"
sys.path.insert(0, str(BENCHMARKS))

pytest.importorskip("torch")

from pygraph import dist  # noqa: E402


def test_programs_train(tmp_path, monkeypatch):
    """FSDP of tensor-parallel blocks, which shards most, and a pipeline, whose ranks run other code."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = {"logs": tmp_path, "device": "cpu", "rounds": 2, "variants": "eager", "small": True}
    rows = list(dist.measure(["fsdp_tp_1x2", "pipeline"], Namespace(**options), time.monotonic() + 120))
    assert len(rows) == 2
    for row in rows:
        assert row["missed"] == [] and row["late_recordings"] == {"eager": 0} and row["eager_us"] > 0, row
