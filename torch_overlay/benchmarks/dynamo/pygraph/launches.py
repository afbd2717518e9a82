"""What a call launches, and how many bytes of inputs CUDA graph trees copy for it."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Parts of the names of calls that launch one kernel.
ONE_KERNEL = ("LaunchKernel", "LaunchCooperativeKernel")


def profiled(step: Callable[[], Any], calls: int = 3) -> dict[str, float]:
    """Kernels, those of them in graphs, and graph launches, per call."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(calls):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "trace.json")
        profile.export_chrome_trace(str(file))
        found = counted(json.loads(file.read_text())["traceEvents"])
    return {name: round(count / calls, 2) for name, count in found.items()}


def counted(events: list[dict[str, Any]]) -> dict[str, int]:
    """
    Of the events of a trace. The kernels of a graph have the correlation id of its launch, which the trace lacks if it was
    the driver's cuGraphLaunch.
    """
    alone = {
        event["args"]["correlation"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and any(part in event["name"] for part in ONE_KERNEL)
    }
    kernels = [event["args"].get("correlation") for event in events if event.get("cat") == "kernel"]
    in_graphs = [correlation for correlation in kernels if correlation not in alone]
    return {
        "kernels": len(kernels),
        "kernels_in_graphs": len(in_graphs),
        "graph_launches": len({*in_graphs}),
    }


@contextlib.contextmanager
def counting_copies() -> Iterator[list[int]]:
    """The sizes in bytes of the inputs that CUDA graph trees copy meanwhile."""
    from torch._inductor.cudagraph_trees import CUDAGraphNode

    sizes: list[int] = []
    copy_inputs = CUDAGraphNode._copy_inputs_and_remove_from_src

    def counting(node: CUDAGraphNode, dsts: list[Any], srcs: list[Any]) -> None:
        inputs = (srcs[i] for i in node.non_static_input_idx)
        sizes.extend(t.numel() * t.element_size() for t in inputs if isinstance(t, torch.Tensor))
        copy_inputs(node, dsts, srcs)

    with mock.patch.object(CUDAGraphNode, "_copy_inputs_and_remove_from_src", counting):
        yield sizes
