"""Tensor parallelism, on two processes without GPUs."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "torch_overlay" / "benchmarks" / "dynamo"
sys.path.insert(0, str(BENCHMARKS))

torch = pytest.importorskip("torch")

from pygraph import tp  # noqa: E402
from pygraph.models.language import RelativeEncoder  # noqa: E402

from torch import nn  # noqa: E402


@pytest.fixture
def environment(monkeypatch):
    paths = [str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def _arguments(tmp_path, **overrides):
    options = {"logs": tmp_path, "device": "cpu", "rounds": 2, "variants": "eager", "small": True}
    return Namespace(**{**options, **overrides})


@pytest.mark.parametrize("name", tp.PARALLEL_CASES)
def test_a_split_case_computes_what_the_whole_does(environment, tmp_path, name):
    row = tp.measure(name, 2, _arguments(tmp_path), 120.0)
    assert row["failed"] == {} and row["missed"] == [] and row["choices"] == [[], []], row
    assert row["name"] == f"{name}_x2" and row["ranks"] == 2 and row["eager_us"] > 0


@pytest.mark.parametrize("name", sorted(tp.PARALLEL_CASES.keys() & tp.CASES.keys()))
def test_as_close_as_on_one_gpu(name):
    "DALL-E 2 computes in float32, but its convolutions do in TF32."
    assert tp.PARALLEL_CASES[name].tolerance == tp.CASES[name].tolerance


def test_ranks_that_hang_are_a_row(environment, tmp_path):
    row = tp.measure("xlnet", 2, _arguments(tmp_path), 0.5)
    assert row["name"] == "xlnet_x2" and row["missed"] == [row["error"]] == ["no result within 0 s"]


def test_ranks_that_fail_are_a_row(environment, tmp_path):
    row = tp.measure("xlnet", 1, _arguments(tmp_path, device="no_such_device"), 60.0)
    assert row["error"].startswith("ended with") and not row["equal"]


class Mesh:
    def size(self):
        return 3

    def get_local_rank(self):
        return 1


def test_heads_that_cannot_be_shared_stay_whole(monkeypatch):
    split = []
    monkeypatch.setattr(tp, "parallelize_module", lambda part, mesh, plan: split.append((part, set(plan))))
    module = nn.Module()
    module.uneven = RelativeEncoder(32, 64, 1, 4, 64).attention[0]
    module.even = RelativeEncoder(32, 96, 1, 6, 64).attention[0]
    whole = module.even.content_bias.detach().clone()
    tp.shard(module, Mesh())
    assert [part for part, _ in split] == [module.even] and split[0][1] == {"q", "k", "v", "r", "out"}
    assert (module.uneven.heads, module.even.heads) == (4, 2)
    assert torch.equal(module.even.content_bias, whole[2:4])


def test_what_the_budget_ends_is_no_row(environment, tmp_path, monkeypatch, capsys):
    def run(seconds, **measured):
        rows = {**tp.described("xlnet", 2), **measured}
        monkeypatch.setattr(tp, "measure", lambda *args: rows)
        command = ["tp", "--ranks", "1,2", "--rows", "xlnet_x2", "--device", "cpu", "--budget", str(seconds)]
        monkeypatch.setattr(sys, "argv", [*command, "--output", str(tmp_path / "rows.json"), "--logs", str(tmp_path)])
        tp.main()
        found = tmp_path / "rows.json"
        return [row["name"] for row in json.loads(found.read_text())] if found.exists() else []

    assert run(0.0, error="no result within 0 s") == []
    assert "xlnet on 2: out of time, not run" in capsys.readouterr().out
    assert run(100.0, error="ended with 1") == ["xlnet_x2"]
    assert tp.row_names("1,4")[:2] == ["xlnet_x1", "xlnet_x4"]
