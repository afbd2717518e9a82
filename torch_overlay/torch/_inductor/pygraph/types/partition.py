"""
What code generation knows about a compiled graph and the functions in it that may be captured. It is plain data, since
a graph from a cache has it as well: an object of the generated module appears by name, by which ``Runner.objects`` has
it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json

from torch._inductor.pygraph.types.calls import CallInfo
from torch._inductor.pygraph.types.reason import Reason
from torch._inductor.pygraph.types.report import PartitionReport
from torch._inductor.pygraph.types.sizes import SizeMap


@dataclasses.dataclass(frozen=True)
class Collective:
    """An operator that waits for other ranks, without its namespace, and its process group, if that is known."""

    op: str
    group: str | None = None


@dataclasses.dataclass(frozen=True)
class PartitionInfo:
    """
    One generated function that may be captured: a partition, or the graph if it has none.

    Args:
        allocator: the function's parameter that it allocates with; None if it has none
        kernels, delivers: names of the Triton kernels and of the Deliver objects that the function launches
        collectives: operators that wait for other ranks, in the order of the code
        calls_custom: whether it calls operators that PyTorch does not ship. These may launch on a stream of their own, and
            with other arguments in each call
        ranks_decide: config.pygraph_ranks when it was compiled
        saved_input_idxs: tensors that the forward computed
        returned_output_idxs: outputs that leave the graph. Later partitions or the backward need the others
        reused_input_idxs: inputs that are not mutated and that the code may write: nothing reads them any more
        code_hash: of the graph's code; None if decisions on the function are not kept
        sizes: what it does at other sizes, or why that is not known; None if it takes no size
        calls: what it launches, in its order; none if that is not known
        paths: choices of paths that together take each path of its torch.cond. A choice has the
            name of each torch.cond that runs then, and the path that it takes
    """

    name: str
    allocator: str | None = None
    kernels: tuple[str, ...] = ()
    delivers: tuple[str, ...] = ()
    collectives: tuple[Collective, ...] = ()
    calls_custom: bool = False
    ranks_decide: bool = False
    saved_input_idxs: tuple[int, ...] = ()
    returned_output_idxs: tuple[int, ...] = ()
    reused_input_idxs: tuple[int, ...] = ()
    report: PartitionReport = PartitionReport(0, "")
    code_hash: str | None = None
    sizes: SizeMap | Reason | None = None
    calls: tuple[CallInfo, ...] = ()
    paths: tuple[tuple[tuple[str, bool], ...], ...] = ()

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the process groups of the collectives."""
        return tuple(dict.fromkeys(c.group for c in self.collectives if c.group is not None))

    @property
    def signature(self) -> str:
        """Return a name of the collectives that all ranks have. The groups of a mesh have other names on other ranks."""
        places = {group: i for i, group in enumerate(self.groups)}
        ops = [(c.op, places.get(c.group)) for c in self.collectives]
        return hashlib.sha256(json.dumps(ops).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class DirectCall:
    """
    What Runner.call does if it only calls its one partition and moves CPU values to the GPU. Arguments of the graph
    have an index; the result of the k-th stage is num_args + k.

    Args:
        packs: name of a Deliver, arguments that it reads
        stages: name of a Stage, argument that it copies
        inputs: of the partition
        outputs: of the graph: which of the partition's
    """

    num_args: int
    packs: tuple[tuple[str, tuple[int, ...]], ...]
    stages: tuple[tuple[str, int], ...]
    inputs: tuple[int, ...]
    num_outputs: int
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class GraphInfo:
    """
    Args:
        functions: those that may be captured, as Runner.partitions has them
        reports: all partitions, also those that cannot be captured
        direct: None if Runner.call does more
        shared_input_idxs: of a backward, the inputs that it writes and those whose memory its results may share, counted from
            the last input, which is -1. None if the graph is no backward
    """

    functions: tuple[PartitionInfo, ...] = ()
    reports: tuple[PartitionReport, ...] | None = None
    direct: DirectCall | None = None
    shared_input_idxs: tuple[int, ...] | None = None

    @property
    def object_names(self) -> tuple[str, ...]:
        """Objects of the module that this and its functions name."""
        names = [n for f in self.functions for n in (*f.kernels, *f.delivers)]
        if self.direct is not None:
            names += (name for name, _ in (*self.direct.packs, *self.direct.stages))
        return tuple(dict.fromkeys(names))
