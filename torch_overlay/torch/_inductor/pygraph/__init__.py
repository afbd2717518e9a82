"""
PyGraph: CUDA graphs that replay without copying their inputs, deployed only where
they are faster.

With ``config.pygraph`` every function that cudagraph trees would record goes through
these packages. Terms (node, path, generation, liveness) are those of cudagraph_trees.py;
sections are those of "PyGraph: Robust Compiler Support for CUDA Graphs in PyTorch"
(https://arxiv.org/abs/2503.19779).

compile  CPU values that GPU code reads get a GPU home in front of what is captured. What reads
         CPU memory all the same is left out, and logged with its line
select   the function first runs uncaptured and is timed. A function that keeps the device busy
         by itself is never recorded (section 3.4). Replays are timed in the program itself. The
         fastest candidate stays, and later processes find the decision
capture  the external inputs, which trees would copy at every replay, and the outputs, which the
         next replay would overwrite, are captured at addresses that belong to nothing else and
         cost no memory
graph    every parameter word that points to such an address is found in the nodes of the
         captured graph. Setting these words moves the input (section 3.3), and gives each call
         outputs of its own
values   small CPU values are parameters of a captured kernel, and bound as addresses are;
         larger ones are copied when they changed
verify   the bound graph, run on the inputs of the call, must reproduce what the uncaptured
         function gave; otherwise trees record it as before, with copies
replay   what trees look up at each call is known in advance for a path's first graph
calls    compiled bytecode calls the replay without the layers in between
dynamo   fewer graph breaks
report   what was recorded, bound, chosen, and why

Nothing here runs unless ``config.pygraph`` is set, and nothing here may fail a program:
what cannot be bound is copied, what cannot be captured runs uncaptured.
"""

from torch._inductor.pygraph.report import Report, report, reset_report
from torch._inductor.pygraph.types.report import FunctionReport


__all__ = ["FunctionReport", "Report", "report", "reset_report"]
