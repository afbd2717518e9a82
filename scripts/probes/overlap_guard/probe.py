"""
What the guard on overlapping inputs costs a call: microseconds of check_synthetic_bases, for inputs of which each has a
storage of its own and half are mutated, and for views of one storage, of which one is mutated and none overlap.

    scripts/overlay DIRECTORY && PYTHONPATH=DIRECTORY python scripts/probes/overlap_guard/probe.py
"""

import timeit

import torch
from torch._functorch._aot_autograd.input_output_analysis import check_synthetic_bases


def us(inputs: list[torch.Tensor], num_mutated: int) -> float:
    return min(timeit.repeat(lambda: check_synthetic_bases(inputs, num_mutated, []), number=2000, repeat=9)) * 500


for count in (2, 100):
    print(f"{count} storages: {us([torch.ones(4) for _ in range(count)], count // 2):.1f} us")
base = torch.ones(64, 4)
print(f"64 views of one storage: {us([*base], 1):.1f} us")
