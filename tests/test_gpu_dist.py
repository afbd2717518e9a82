"""Suite dist, and the example of the guide, on two processes without GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest


OVERLAY = Path(__file__).resolve().parent.parent / "torch_overlay"
BENCHMARKS = OVERLAY / "benchmarks" / "dynamo"
GUIDE = OVERLAY / "docs" / "source" / "user_guide" / "torch_compiler" / "torch.compiler_pygraph_sharded.md"
sys.path.insert(0, str(BENCHMARKS))

pytest.importorskip("torch")

from pygraph import dist  # noqa: E402


CASES = ["fsdp_tp_1x2", "pipeline", "ddp_accumulates", "ddp_static"]


def test_programs_train(tmp_path, monkeypatch):
    """FSDP of tensor-parallel blocks, which shards most, a pipeline, whose ranks run other code, and DDP."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = {"logs": tmp_path, "device": "cpu", "rounds": 2, "variants": "eager", "small": True}
    rows = list(dist.measure(CASES, Namespace(**options), time.monotonic() + 120))
    assert len(rows) == len(CASES)
    for row in rows:
        assert row["missed"] == [] and row["late_recordings"] == {"eager": 0} and row["eager_us"] > 0, row


def test_copies_for_collectives_are_no_miss():
    """Other copies are."""
    bound = {"choice": "node_update", "copied_bytes": 2 << 20, "stock_copied_bytes": 4 << 20}
    other = {"choice": "prelude", "copied_bytes": 0, "stock_copied_bytes": 8}
    assert not [*dist.copies([bound, other])]
    assert dist.staged([bound, other]) == "copies 2 MiB of inputs for collectives, stock copies 4 MiB in these graphs"
    unbound = {"choice": "copy", "copied_bytes": 8, "stock_copied_bytes": 8}
    assert [*dist.copies([bound, unbound])] == ["copies 8 bytes a call"]
    assert dist.staged([other, unbound]) == ""


@pytest.mark.parametrize("ranks", ("1", "2"))
def test_example_of_the_guide(tmp_path, monkeypatch, ranks):
    (example,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    for text, shorter in (("range(300)", "range(2)"), ("step % 100 == 99", "step == 1")):
        assert text in example
        example = example.replace(text, shorter)
    program = tmp_path / "train.py"
    program.write_text(example)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, str(program)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert found.returncode == 0, found.stderr[-4000:]
    assert re.search(r"^1 \d\.\d+$", found.stdout, re.MULTILINE) and "PyGraph" in found.stdout, found.stdout
    assert ("PyGraph, rank 0" in found.stdout) == (ranks == "2")
