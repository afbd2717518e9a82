"""
PyGraph: CUDA graphs that replay without copying their inputs, deployed only where
they are faster.

With ``config.pygraph`` every function that cudagraph trees would record goes through
the steps below, one module each. Terms (node, path, generation, liveness) are those of
cudagraph_trees.py; sections are those of "PyGraph: Robust Compiler Support for CUDA
Graphs in PyTorch" (https://arxiv.org/abs/2503.19779).

transform    CPU values that GPU code reads are given a GPU home in front of what is captured;
             what reads CPU memory all the same is left out, and logged with its line
select       the function first runs uncaptured and is timed; a function that keeps the
             device busy by itself is never recorded (section 3.4)
memory       a rehearsal shows what the function takes of the device's memory: where that
             is not free, it is not captured
allocation   and which of its allocations the outputs lie in
placeholder  the external inputs, which trees would copy at every replay, and the outputs,
             which the next replay would overwrite, are captured at addresses that belong
             to nothing else and cost no memory
record       a BoundGraphNode captures the function on the placeholders
binding      every parameter word that points into a placeholder is found in the nodes of
             the captured graph; setting those words moves the input (section 3.3), and
             gives each call outputs of its own
prelude      or the graph's first node sets them, one host action however many they are, and
table        writes a table that Triton kernels load their pointers from
deliver      small CPU values are parameters of a captured kernel, and bound as addresses
             are; larger ones are copied when they changed
proof        the bound graph, run on the inputs of the call, must reproduce what the
             uncaptured function gave; otherwise trees record it as before, with copies
replay       what trees look up at each call, known in advance for a path's first graph
select       replays are timed in the program itself, and the fastest candidate stays
store        decisions of earlier processes are found again
report       what was recorded, bound, chosen, and why

Nothing here runs unless ``config.pygraph`` is set, and nothing here may fail a program:
what cannot be bound is copied, what cannot be captured runs uncaptured.
"""

from torch._inductor.pygraph.report import (
    Report,
    report,
    reset_report,
)
from torch._inductor.pygraph.types.report import (
    FunctionReport,
)


__all__ = ["FunctionReport", "Report", "report", "reset_report"]
