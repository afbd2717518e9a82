"""Prints, as JSON, what Inductor generates for random programs on a modelled GPU, with the flag off.

    python tests/generated_code.py [--programs N]

The torch that is imported decides the series. The programs and the model come from this repository, so
that stock PyTorch can be asked too.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import warnings
from pathlib import Path

import hypothesis
from hypothesis.internal.conjecture import providers

import torch
import torch.testing._internal


# Where stock PyTorch has none of these modules.
torch.testing._internal.__path__.append(
    str(Path(__file__).resolve().parent.parent / "torch_overlay" / "torch" / "testing" / "_internal")
)

from torch.testing._internal.fake_cuda import fake_cuda  # noqa: E402
from torch.testing._internal.pygraph_observed import observe  # noqa: E402
from torch.testing._internal.pygraph_programs import programs  # noqa: E402


# Inductor alone, and with stock CUDA graphs.
SETTINGS = {"plain": {}, "stock": {"triton.cudagraphs": True}}

# Fake tensors on the CPU have no values, and take no gradient there.
WITHOUT = frozenset({"item", "backward: CPU"})


def draw(count: int) -> list:
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
    strategy = programs(WITHOUT, calls=False)
    hypothesis.seed(0)(settings(hypothesis.given(strategy)(lambda program: drawn.append(program))))()
    return drawn


def generate(program) -> dict[str, list[str]]:
    """Returns the code of each graph by setting, and the exception's type if there was one."""
    generated = {}
    for setting, options in SETTINGS.items():
        torch._dynamo.reset()
        with warnings.catch_warnings(), fake_cuda() as graphs:
            warnings.simplefilter("ignore")
            compile = lambda model: torch.compile(model, options=options)  # noqa: B023, E731
            seen = observe(program, compile, values=False, calls=1)
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
    drawn = draw(args.programs)
    gc.freeze()  # torch._dynamo.reset collects garbage
    json.dump(
        [{"program": p.source(check=False), **generate(p)} for p in drawn], sys.stdout
    )


if __name__ == "__main__":
    main()
