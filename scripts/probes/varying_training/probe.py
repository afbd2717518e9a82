"""
Microseconds of a training step whose sizes vary, of eight small layers, with PyGraph off and on. On a CPU it shows what
AOTAutograd's functions take; no graph is captured there.

    scripts/overlay DIRECTORY && PYTHONPATH=DIRECTORY python scripts/probes/varying_training/probe.py
"""

import timeit

import torch
from torch._inductor import config


SIZES = (3, 5, 7, 4, 9)
STEPS = 10 * len(SIZES)


def us(pygraph: bool) -> float:
    """Return the least time of a step."""
    torch._dynamo.reset()
    layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(8)]
    module = torch.nn.Sequential(*layers)
    with config.patch(pygraph=pygraph):
        compiled = torch.compile(module, dynamic=True)

        def steps() -> None:
            for i in range(STEPS):
                compiled(torch.randn(SIZES[i % len(SIZES)], 8)).sum().backward()
                module.zero_grad()

        steps()
        return min(timeit.repeat(steps, number=1, repeat=30)) / STEPS * 1e6


torch.set_num_threads(1)
for turn in range(2):
    for pygraph in (False, True):
        print(f"pygraph {'on' if pygraph else 'off'}: {us(pygraph):.0f} us a step")
