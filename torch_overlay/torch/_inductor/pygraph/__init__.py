"""
PyGraph: CUDA graphs that replay without copying their inputs, deployed only where they are faster.

With ``config.pygraph`` every function that cudagraph trees would record goes through these packages. Sections are those
of "PyGraph: Robust Compiler Support for CUDA Graphs in PyTorch" (https://arxiv.org/abs/2503.19779).

compile  CPU values that GPU code reads get a GPU home in front of what is captured
select   functions are timed as graphs and without, and deployed as what is faster (section 3.4)
capture  external inputs and outputs are captured at addresses that belong to nothing else
graph    every parameter word that points to such an address is found and set (section 3.3)
values   CPU values reach the GPU in each call
verify   a graph must reproduce what the uncaptured function gave
replay   what is checked, set and handed out in each call
calls    compiled bytecode calls the replay without the layers in between
dynamo   fewer graph breaks
report   what was recorded, bound, chosen, and why
"""

from torch._inductor.pygraph.report import Report, report, reset_report
from torch._inductor.pygraph.types.report import FunctionReport


__all__ = ["FunctionReport", "Report", "report", "reset_report"]
