"""Suite cgct on machines without a GPU: it would see what is wrong, and what it asks for can be had."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "torch_overlay" / "benchmarks" / "dynamo"))

torch = pytest.importorskip("torch")

from pygraph import catalogue, cgct_run, program, suite  # noqa: E402

from torch.utils import _pytree as pytree  # noqa: E402


NAMES = catalogue.SUITES["cgct"].variants
CASES = {case.name: case for case in catalogue.select("cgct")}


@pytest.fixture(autouse=True)
def _reset_dynamo(monkeypatch):
    monkeypatch.setattr(cgct_run, "CHECKS", 8)
    yield
    torch._dynamo.reset()


def _measure(case, backend="eager", wrong="pygraph"):
    variants = {
        name: dataclasses.replace(program.VARIANTS[name], compile={"backend": "eager"}, config={}) for name in NAMES
    }
    variants[wrong] = dataclasses.replace(variants[wrong], compile={"backend": backend})
    run = cgct_run.CpuValuesRun(case, "cpu", small=True, variants=variants, rounds=2, round_s=1e-4)
    run.prepare()
    row = run.measure()
    json.dumps(row)
    return row


@pytest.mark.parametrize(
    "name", ["cpu_dtypes", "cpu_scalar_mutated", "cpu_tensor_attribute", "mutated_input", "cpu_item"]
)
def test_equal(name):
    row = _measure(CASES[name])
    assert row["equal"] and row["bitwise"] and not row["failed"] and not row["note"]
    assert all(row[f"{variant}_us"] > 0 for variant in NAMES)


def _stale(gm, inputs):
    kept = []

    def run(*args):
        kept.append([a.clone() if isinstance(a, torch.Tensor) and a.dim() == 0 else a for a in args])
        return gm(*(a if b.dim() else b for a, b in zip(args, kept[0])))

    return run


def _drops_mutation(gm, inputs):
    return lambda *args: gm(*(a.clone() for a in args))


def _changes_dtype(gm, inputs):
    return lambda *args: tuple(t.double() for t in gm(*args))


def _returns_copies(gm, inputs):
    return lambda *args: tuple(t.clone() for t in gm(*args))


def _overwrites(gm, inputs):
    memory = []

    def run(*args):
        outputs = gm(*args)
        memory.extend([] if memory else [t.clone() for t in outputs])
        return tuple(kept.copy_(t) for kept, t in zip(memory, outputs))

    return run


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("cpu_scalar_output", _stale),
        ("cpu_scalar_attribute", _stale),
        ("cpu_scalar_mutated", _drops_mutation),
        ("cpu_scalar_output", _changes_dtype),
        ("cpu_scalar_mutated", _returns_copies),
        ("cpu_scalar_output", _overwrites),
    ],
)
def test_what_is_wrong_is_found(name, backend):
    row = _measure(CASES[name], backend)
    assert not row["equal"] and "wrong result" in row["failed"]["pygraph"]
    assert "results differ" in suite.missed(CASES[name], row)


def test_what_stock_gets_wrong_says_nothing_of_pygraph():
    row = _measure(CASES["cpu_scalar_output"], _changes_dtype, wrong="stock_cg")
    assert row["equal"] and set(row["failed"]) == {"stock_cg"}


def test_values_are_on_the_gpu_before_the_call():
    moved = cgct_run.OnGpu.__new__(cgct_run.OnGpu)
    moved.device_type = "meta"
    for case in CASES.values():
        for value in pytree.tree_leaves(pytree.tree_map(moved._moved, case.inputs(True))):
            assert isinstance(value, torch.Tensor) and value.device.type == "meta"


ROW = {
    "suite": "cgct",
    "name": "cpu_sum",
    "program": "x * v.sum()",
    "no_cg_us": 30.0,
    "stock_cg_us": None,
    "pygraph_us": 33.0,
    "gpu_us": 30.0,
    "forced_node_update_us": 34.0,
    "gpu_node_update_us": 31.0,
    "cost": {"pygraph": [1.05, 1.1, 1.4], "forced_node_update": [1.05, 1.1, 1.15]},
    "choice": "node_update",
    "copied_bytes": 0,
    "equal": True,
    "bitwise": True,
    "launches": {"forced_node_update": {"kernels": 2.0, "kernels_in_graphs": 2.0, "graph_launches": 1.0}},
}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        (
            {"cost": {**ROW["cost"], "pygraph": [1.31, 1.33, 1.4]}},
            ["pygraph takes 1.33 times (1.31 to 1.40) as long as with values on the GPU"],
        ),
        ({"cost": {"pygraph": ROW["cost"]["pygraph"]}}, ["forced_node_update or gpu_node_update was not measured"]),
        ({"equal": False}, ["results differ"]),
        ({"choice": None}, ["no choice was made"]),
        ({"copied_bytes": 8}, ["copies 8 bytes a call"]),
        ({"launches": {}}, ["it is not known what is launched"]),
        ({"error": "out of time"}, ["out of time"]),
    ],
)
def test_musts(changes, found):
    assert suite.missed(CASES["cpu_sum"], {**ROW, **changes}) == found


@pytest.mark.parametrize(
    ("launched", "found"),
    [
        ({"graph_launches": 2.0}, ["2 graphs, not 1"]),
        ({"kernels_in_graphs": 1.0}, ["1 kernels outside of the graph"]),
    ],
)
def test_all_is_in_one_graph(launched, found):
    launches = {"forced_node_update": {**ROW["launches"]["forced_node_update"], **launched}}
    assert suite.missed(CASES["cpu_sum"], {**ROW, "launches": launches}) == found


def test_where_the_host_is_needed_a_call_may_take_longer():
    launches = {"forced_node_update": {"kernels": 5.0, "kernels_in_graphs": 4.0, "graph_launches": 2.0}}
    row = {**ROW, "cost": dict.fromkeys(ROW["cost"], [2.9, 3.0, 3.1]), "launches": launches}
    assert not suite.missed(CASES["cpu_in_the_middle"], row)



# Those that do not need the value of a tensor while they are compiled.
@pytest.mark.parametrize("name", [name for name in CASES if name != "branch_on_sum"])
@pytest.mark.parametrize("variant", ["pygraph", "gpu"])
def test_what_is_captured(name, variant):
    from torch.testing._internal.fake_cuda import fake_cuda

    random.seed(0)
    case = CASES[name]
    with fake_cuda() as graphs, torch.no_grad():
        module = case.module if variant == "pygraph" or case.on_gpu is None else case.on_gpu
        case = dataclasses.replace(case, module=module)
        kind = program.Program if variant == "pygraph" else cgct_run.OnGpu
        with torch.device("cuda"):
            ring = [case.inputs(True)]
        if name == "cpu_item":
            # Of which a fake tensor has none.
            (_, scalar), _ = ring[0]
            scalar.item_memo = 0.5
        kind(case, module(True).to("cuda"), program.VARIANTS[variant], "cuda").loop(ring)(1)
    (graph,) = graphs
    captured = [p for p in graph.partitions if p.captured and p.kernels]
    assert len(captured) == (case.graphs if variant == "pygraph" else 1)
    assert not any(p.cpu_inputs for p in captured)
    if variant == "gpu":
        assert len(graph.partitions) == 1
