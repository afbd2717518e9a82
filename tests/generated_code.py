"""Prints, as JSON, what Inductor generates for random programs on a modelled GPU, with the flag off.

    python tests/generated_code.py [--programs N]

The torch that is imported decides the series. The programs and the model come from this repository, so
that stock PyTorch can be asked too.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import re
import sys
import warnings
from pathlib import Path

import hypothesis
from hypothesis.internal.conjecture import providers

import torch


SUPPORT = Path(__file__).resolve().parent.parent / "torch_overlay" / "torch" / "testing" / "_internal"

# Inductor alone, and with stock CUDA graphs.
SETTINGS = {"plain": {}, "stock": {"triton.cudagraphs": True}}

# Fake tensors on the CPU have no values, and take no gradient there.
WITHOUT = frozenset({"item", "backward: CPU"})


def load_support(name: str):
    spec = importlib.util.spec_from_file_location(f"torch.testing._internal.{name}", SUPPORT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def draw(pygraph_programs, count: int) -> list:
    drawn = []
    settings = hypothesis.settings(
        max_examples=count,
        phases=[hypothesis.Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    # Hypothesis would draw constants of the modules that are imported, which are not the same everywhere.
    providers._get_local_constants = lambda: providers._local_constants
    strategy = pygraph_programs.programs(WITHOUT, calls=False)
    hypothesis.seed(0)(settings(hypothesis.given(strategy)(lambda program: drawn.append(program))))()
    return drawn


def generate(pygraph_programs, fake_cuda, program) -> dict[str, list[str]]:
    """Returns the code of each graph by setting, and the exception's type if there was one."""
    generated = {}
    for setting, options in SETTINGS.items():
        torch._dynamo.reset()
        with warnings.catch_warnings(), fake_cuda.fake_cuda() as graphs:
            warnings.simplefilter("ignore")
            compile = lambda model: torch.compile(model, options=options)  # noqa: B023, E731
            seen = pygraph_programs.observe(program, compile, values=False, calls=1)
        raised = [f"raises {s.facts['exception']}" for s in seen if "exception" in s.facts]
        # Both depend on the build of Triton.
        sources = [re.sub(r"# kernel path: .*|'backend_hash': '\w+', ", "", graph.source) for graph in graphs]
        generated[setting] = sources + raised
    return generated


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", type=int, default=10)
    args = parser.parse_args()
    torch._inductor.config.force_disable_caches = True
    pygraph_programs, fake_cuda = load_support("pygraph_programs"), load_support("fake_cuda")
    programs = draw(pygraph_programs, args.programs)
    gc.freeze()  # torch._dynamo.reset collects garbage
    json.dump(
        [{"program": p.source(check=False), **generate(pygraph_programs, fake_cuda, p)} for p in programs], sys.stdout
    )


if __name__ == "__main__":
    main()
