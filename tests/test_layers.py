"""The benchmark that splits a call by layer, on the CPU, where it ends at Inductor's kernels."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "torch_overlay" / "benchmarks" / "dynamo"))

torch = pytest.importorskip("torch")

from pygraph import layers  # noqa: E402


CPU_LAYERS = ("dynamo", "aot", "inductor", "kernels")


@pytest.fixture
def variant() -> layers.Layers:
    torch._dynamo.reset()
    with torch.no_grad():
        yield layers.Layers(layers.CASES["three_graphs"], "cpu", {})


def test_each_layer_runs_what_is_above_it(variant: layers.Layers) -> None:
    ran = []
    for graph in variant.graphs:
        original = graph.current_callable
        graph.current_callable = lambda inputs, original=original: ran.append("kernels") or original(inputs)
    call = torch._inductor.output_code.CompiledFxGraph.__call__
    for layer, graphs_run, kernels_run in zip(CPU_LAYERS, (False, False, True, True), (False, False, False, True)):
        ran.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                torch._inductor.output_code.CompiledFxGraph,
                "__call__",
                lambda graph, inputs: ran.append("graph") or call(graph, inputs),
            )
            with variant.down_to(layer) as run:
                run(2)
        assert ran.count("graph") == 2 * len(variant.graphs) * graphs_run, layer
        assert ran.count("kernels") == 2 * len(variant.graphs) * kernels_run, layer


@pytest.mark.parametrize("case", ["pointwise_2x4KiB", "training"])
def test_measure(case: str) -> None:
    rows = layers.measure(layers.CASES[case], "cpu", rounds=2)
    assert list(rows) == list(layers.VARIANTS)
    for times in rows.values():
        assert tuple(times) == (*CPU_LAYERS, "host", "total")
        assert sum(times[layer] for layer in CPU_LAYERS) == pytest.approx(times["host"])
        assert times["host"] <= times["total"]
