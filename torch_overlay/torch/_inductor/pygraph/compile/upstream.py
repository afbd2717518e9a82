"""
The codes of reasons that upstream's compiler keeps as text: its own, and NOT_DESCRIBED. No other module reads a reason's
text.
"""

from __future__ import annotations

import re

from torch._inductor.pygraph.types.reason import Code, Reason
from torch._inductor.pygraph.types.report import Blocker
from torch._inductor.pygraph.types.source import innermost


# How the reason begins that or_uncaptured of blockers.py gives.
NOT_DESCRIBED = "PyGraph does not understand the generated code: "

# The first pattern that is found counts.
_CODES = (
    (f"{NOT_DESCRIBED}(?P<error>.*)", Code.NOT_DESCRIBED),
    (r"^cpu ops", Code.CPU_OP),
    (r"^DeviceCopy ops", Code.DEVICE_COPY),
    (r"^Conditional ops|control flow operator: (?P<op>torch\.\w+)", Code.CONTROL_FLOW),
    (r"unbacked binding|unbacked symint|incompatible op (?P<op>aten\.nonzero\S*)", Code.DATA_DEPENDENT),
    (r"CUDAGraph-unsafe custom ops|incompatible op (?P<op>\S+)", Code.UNSAFE_OP),
    (r"custom partition op", Code.CUSTOM_PARTITION_OP),
    (r"dynamic shape|symbolic shapes", Code.DYNAMIC_SHAPES),
    (r"cudagraphs is disabled", Code.GRAPHS_OFF),
    (r"boolean indexing", Code.BOOLEAN_INDEX),
    (r"multiple devices: (?P<devices>.*)", Code.MULTIPLE_DEVICES),
    (r"cpu device \((?P<op>.*)\)", Code.CPU_DEVICE),
    (r"mutated inputs", Code.MUTATED_INPUTS),
    (r"complex memory overlap", Code.OVERLAPPING_INPUT),
    (r"non-Tensor inputs", Code.NON_TENSOR_INPUT),
    (r"sparsity", Code.SPARSE),
)


def reason_of(text: str) -> Reason:
    """Return the reason of what should_partition returned: a code of blockers.py, or text of upstream's."""
    return Reason.of(text) if isinstance(text, Code) else blocker_of_graph(text).reason


def blocker_of_graph(text: str) -> Blocker:
    """Return why a graph is not captured, as far as ``text`` tells, with the operator and its line."""
    said, _, trace = text.partition("Found from")
    for pattern, code in _CODES:
        if found := re.search(pattern, said):
            details = {k: v for k, v in found.groupdict().items() if v is not None}
            op = details.pop("op", "")
            return Blocker(op, Reason(code, details), innermost(trace))
    said = said.removeprefix("skipping cudagraphs due to ").strip(". \n")
    return Blocker("", Reason.of(Code.UPSTREAM, said=said), innermost(trace))
