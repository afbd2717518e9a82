"""
What PyGraph does for a BERT with random weights, inference and a training step.

With a GPU: the time of a call without CUDA graphs, with stock ones and with PyGraph, bytes copied,
memory, and whether results are equal. Without one: the same model compiled for an H200 all the
same, what would be captured, and the inputs that a replay would no longer copy.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from torch.testing._internal.fake_cuda import CompiledGraph


BENCHMARKS = Path(__file__).resolve().parents[1] / "torch_overlay" / "benchmarks" / "dynamo"
NAMES = ("bert_inference", "bert_training")


def measure() -> None:
    print(f"Measuring on {torch.cuda.get_device_name()}", flush=True)
    command = [sys.executable, "-m", "pygraph", "--cases", ",".join(NAMES), "--logs", "build/quickstart-logs"]
    path = [str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(path)}, check=True)


def compile_for_h200(name: str) -> list[CompiledGraph]:
    """The graphs of one step of a case."""
    from pygraph.catalogue import CASES
    from pygraph.program import build, Program, VARIANTS

    from torch.testing._internal.fake_cuda import fake_cuda

    case = CASES[name]
    with fake_cuda(compile_kernels=True) as graphs, torch.device("cuda"):
        model = build(case, torch.device("cuda"), small=False)
        program = Program(case, model, VARIANTS["pygraph"], "cuda")
        with program.configured():
            program.step(*case.inputs(False))
    return graphs


def describe() -> None:
    from torch.testing._internal.fake_cuda import report

    print("No GPU here: compiling for an H200 (sm_90), without running", flush=True)
    summary = []
    for name in NAMES:
        print(f"\n== {name}: compiling", flush=True)
        start = time.perf_counter()
        graphs = compile_for_h200(name)
        seconds = time.perf_counter() - start
        kernels = sum(len(graph.kernels) for graph in graphs)
        print(f"{len(graphs)} graphs, {kernels} Triton kernels compiled for sm_90, {seconds:.0f} s\n")
        print(report(graphs), flush=True)
        summary.append((name, graphs))

    header = f"{'':16} {'kernels captured':>16} {'external inputs':>15} {'bytes stock CUDA graphs copy a call':>35}"
    print(f"\n{header}\n{'-' * len(header)}")
    for name, graphs in summary:
        partitions = [p for graph in graphs for p in graph.partitions]
        captured = sum(p.kernels for p in partitions if p.captured)
        external = sum(len(graph.external_inputs) for graph in graphs)
        copied = sum(graph.copied_bytes for graph in graphs)
        print(f"{name:16} {f'{captured} of {sum(p.kernels for p in partitions)}':>16} {external:15} {copied:35,}")
    print("\nPyGraph writes the addresses of external inputs into the captured kernels instead of copying them.")
    print("Times need a GPU: README.md says where measured ones are.")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    sys.path.insert(0, str(BENCHMARKS))
    (measure if torch.cuda.is_available() else describe)()
