"""What the user could change about a reason that something is not captured."""

from __future__ import annotations

import re


# The first pattern that is found in the reason counts. Reasons are those of
# Scheduler.should_partition, of the checks in cudagraph_utils.py, output_code.py and
# lowering.py, and of select.py and record.py.
_ADVICE = (
    (
        r"^cpu ops",
        "It runs on the CPU in each call: in front of what is captured, or between two "
        "graphs if it needs a result of the GPU. Compute it on the GPU, or outside of the "
        "compiled function.",
    ),
    (
        r"result of the GPU to the CPU",
        "The host waits there for the GPU. Copy results to the CPU after the compiled "
        "function, and compute on the GPU what GPU code needs again.",
    ),
    (
        r"cpu device|lies on the CPU",
        "Create or pass the tensor on the GPU, or leave it out of the compiled function.",
    ),
    (
        r"the CPU tensor|a CPU tensor",
        "The operator takes or gives tensors on the CPU and on the GPU. Give it those on the "
        "GPU, or call it where nothing on the GPU waits for it.",
    ),
    (
        r"float from the host",
        "Use the tensor instead of its .item().",
    ),
    (
        r"DeviceCopy",
        "A tensor moves between CPU and GPU. Create it where it is used, and copy results "
        "to the CPU after the compiled function.",
    ),
    (
        r"unbacked binding|unbacked symint|dynamic output shape|incompatible op aten\.nonzero",
        "The result's size, or a number that the host reads, depends on data. Use a form "
        "with a fixed size (torch.where, nonzero_static, padding), or keep the number on "
        "the GPU instead of .item().",
    ),
    (
        r"boolean indexing",
        "Write x = torch.where(mask, value, x) instead of x[mask] = value.",
    ),
    (
        r"Conditional|torch\.cond|torch\.while_loop",
        "Control flow on data. Where both branches are cheap, compute both and select with "
        "torch.where.",
    ),
    (
        r"CUDAGraph-unsafe custom ops|incompatible op",
        "The operator is known not to be capturable, or tagged torch.Tag.cudagraph_unsafe. "
        "Remove the tag if it neither waits for the device nor reads results on the host.",
    ),
    (
        r"custom partition op",
        "It is named in torch._inductor.config.custom_should_partition_ops.",
    ),
    (
        r"dynamic shape|symbolic shapes",
        "torch._inductor.config.triton.cudagraph_skip_dynamic_graphs is set. Unset it to "
        "capture one graph for each size, and pad inputs to few sizes.",
    ),
    (
        r"multiple devices",
        "A graph is captured on one GPU. Compile the parts for each GPU by themselves.",
    ),
    (
        r"complex memory overlap",
        "Elements of an input share memory (expand, as_strided). Pass a contiguous copy.",
    ),
    (
        r"non-Tensor inputs",
        "Pass tensors and numbers only.",
    ),
    (
        r"sparsity",
        "Set torch._inductor.config.graph_partition, so that only the sparse operators "
        "stay out.",
    ),
    (
        r"were off when it was compiled",
        "Its forward was not captured, or cpp_wrapper is set: see there.",
    ),
    (
        r"do not know this thread",
        "Call it from the thread that imported torch, or compile it in the thread that "
        "calls it.",
    ),
    (
        r"out of memory",
        "Capturing needs the memory that the uncaptured function takes, on top of what the "
        "program has then. Free some, or make the batch smaller.",
    ),
    (
        r"capture failed|can not be captured",
        "An operator waits for the device or allocates outside of PyTorch. If it is a "
        "custom operator, tag it torch.Tag.cudagraph_unsafe: the rest is captured then.",
    ),
    (
        r"differs from the uncaptured|address it should not hold|address is copied",
        "A kernel keeps the input's address where it cannot be set, so that the input is "
        "copied. If its address never changes, mark it with "
        "torch._dynamo.mark_static_address.",
    ),
    (
        r"mutated inputs|is mutated|mutated input",
        "Return the new value instead of writing into the input.",
    ),
)


def advice(reason: str) -> str:
    """One or two sentences, empty where there is nothing to change."""
    return next((text for pattern, text in _ADVICE if re.search(pattern, reason)), "")
