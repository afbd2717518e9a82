"""
Workspaces of a library, whose content no later call reads. cuBLAS has one for a stream, so that all matmuls whose
kernels name it wait for one another. It is divided among them: their kernels write a small part of it. The words among
the kernels' parameters are moved, as those of inputs.

The parameters do not tell how much a kernel uses. The driver runs the captured kernels alone, which shows what they
write. PyGraph assumes that the values of a matmul's operands do not change which bytes of the workspace it writes.
MARGIN allows for some error in this.
"""

from __future__ import annotations

import itertools
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor.pygraph.graph.driver import bindings, check
from torch._inductor.pygraph.graph.edges import chain_of, change_edges
from torch._inductor.pygraph.graph.placeholder import round_up, tensor_at
from torch._inductor.pygraph.schedule.dag import reached
from torch._inductor.pygraph.schedule.pointers import words_of


if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch._inductor.pygraph.schedule.dag import Waits
    from torch._inductor.pygraph.schedule.pointers import Range

# The most parts of a workspace.
MAX_PARTS = 8

# A part is at least so many times as large as what kernels use.
MARGIN = 2

# PyGraph rounds the size of a part, and the number of bytes that a kernel uses, up to a multiple of this.
UNIT_BYTES = 64 << 10


def divided(memory: Range, used: int, count: int) -> list[Range]:
    """Return at most ``count`` parts of a workspace, of which kernels use the first bytes. One is the whole."""
    start, end = memory
    count = min(count, (end - start) // round_up(max(MARGIN * used, 1), UNIT_BYTES))
    if count < 2:
        return [memory]
    nbytes = (end - start) // count // UNIT_BYTES * UNIT_BYTES
    return [(start + k * nbytes, start + (k + 1) * nbytes) for k in range(count)]


def used_bytes(graph: Any, nodes: Collection[Any], memory: Range, device_index: int) -> int:
    """
    Return how many of the first bytes of a workspace captured kernels use, or its size if that cannot be found out. The
    kernels run, and overwrite their results.

    Raises:
        DriverError: the driver does not run them alone.
    """
    start, end = memory
    if (end - start) % UNIT_BYTES:
        return end - start
    words = (word - start for node in nodes for word in words_of(node) or ())
    used = max((word + 1 for word in words if 0 <= word < end - start), default=0)
    like = torch.empty((end - start) // UNIT_BYTES, UNIT_BYTES, dtype=torch.uint8, device="meta")
    units = tensor_at(start, like, device_index)
    cu = bindings()
    stream = cu.CUstream(torch.cuda.current_stream(device_index).cuda_stream)
    alone = check(cu.cuGraphClone(graph))
    try:
        kept = {int(check(cu.cuGraphNodeFindInClone(node, alone))) for node in nodes}
        if (chain := chain_of(alone)) is None:
            return end - start
        # Kernels of two matmuls side by side would take each other's words for their own.
        row = [int(node) for node in chain if int(node) in kept]
        direct = {(int(before), int(after)) for before, after in itertools.pairwise(chain)}
        change_edges(alone, chain, {*itertools.pairwise(row)} - direct, set())
        for node in chain:
            if int(node) not in kept:
                check(cu.cuGraphDestroyNode(node))
        executable = check(cu.cuGraphInstantiate(alone, 0))
        try:
            # A kernel that writes a byte changes it from at least one of these values.
            for byte in (0x5A, 0xA5):
                units.fill_(byte)
                check(cu.cuGraphLaunch(executable, stream))
                low, high = units.aminmax(dim=1)
                written = ((low != byte) | (high != byte)).tolist()
                used = max([used, *((i + 1) * UNIT_BYTES for i, is_written in enumerate(written) if is_written)])
        finally:
            check(cu.cuGraphExecDestroy(executable))
    finally:
        check(cu.cuGraphDestroy(alone))
    return used


def spread(waits: Waits, users: Collection[int], times: Sequence[float], count: int) -> dict[int, int]:
    """
    Return which of ``count`` parts each user takes: the one in which it starts first, and of these one whose last user
    it waits for anyway.
    """
    behind = reached(waits)
    ends: list[float] = []
    last: list[int | None] = [None] * count
    found: dict[int, int] = {}
    for i, (mine, time) in enumerate(zip(waits, times, strict=True)):
        start = max((ends[before] for before in mine), default=0.0)
        if i in users:

            def cost(k: int, i: int = i, start: float = start) -> tuple[float, bool]:
                user = last[k]
                return (start, False) if user is None else (max(start, ends[user]), not behind[i] >> user & 1)

            found[i] = k = min(range(count), key=cost)
            start, _ = cost(k)
            last[k] = i
        ends.append(start + time)
    return found
