"""
What code generation knows about a compiled graph and the functions in it that may be captured.

compile/describe.py makes these objects while Inductor generates the code. CompiledFxGraph holds
a GraphInfo, so a graph from a cache has one as well. All of it is plain data. An object of the
generated module, such as a kernel, appears by name, by which ``Runner.objects`` has it.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from torch._inductor.pygraph.types.report import PartitionReport


# Where an input comes from: "forward" is an input of the forward graph, "tangent" the gradient of
# one of its outputs, "saved" a tensor that the forward computed, "partition" a result of the code
# in front of the function. "other" is no tensor, but a size for instance.
Origin = Literal["forward", "tangent", "saved", "partition", "other"]


@dataclasses.dataclass(frozen=True)
class Input:
    """``buffers`` of the function lie in the input's memory, because nothing reads it any more."""

    name: str
    origin: Origin
    buffers: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Call:
    """
    A kernel launch, or a call of an operator.

    Args:
        kind: "triton" for a kernel that generated code launches, "subgraph" for a nested region
        name: of the kernel in the module, or of the operator
        reads, writes: buffers, by the name of the one that owns the memory
        is_declared: reads and writes are all that the call does
        kernels: Triton kernels that the call launches, by name
    """

    kind: Literal["triton", "extern", "collective", "deliver", "subgraph"]
    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    is_declared: bool = True
    kernels: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class AllocatorCall:
    """
    A call of the function's allocator.

    Args:
        size, stride: an expression for each dimension, as in the code
        buffers: those that lie in the memory, in the order in which they get it
    """

    size: tuple[str, ...]
    stride: tuple[str, ...]
    dtype: str
    buffers: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class PartitionInfo:
    """
    One generated function that may be captured: a partition, or the graph if it has none.

    Args:
        outputs: names of buffers
        calls, allocations: in the order of the code
        allocator: the function's parameter that it allocates with; None if it has none
        delivers: names of the Deliver objects that the function launches
        groups: names of the process groups of its collectives
        has_collectives: it calls operators that wait for other ranks
        returned_output_idxs: outputs that leave the graph. The others are what later partitions
            or the backward need.
        reused_input_idxs: inputs that are not mutated and that the code may write all the same,
            because nothing reads them any more
        code_hash: of the graph's code; None if decisions on the function are not kept
    """

    name: str
    inputs: tuple[Input, ...] = ()
    outputs: tuple[str, ...] = ()
    calls: tuple[Call, ...] = ()
    allocator: str | None = None
    allocations: tuple[AllocatorCall, ...] = ()
    delivers: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    has_collectives: bool = False
    returned_output_idxs: tuple[int, ...] = ()
    reused_input_idxs: tuple[int, ...] = ()
    report: PartitionReport = PartitionReport(0, "")
    code_hash: str | None = None

    @property
    def kernels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(k for call in self.calls for k in call.kernels))

    @property
    def output_allocations(self) -> tuple[int | None, ...]:
        """For each output the allocation that it lies in; None if code does not allocate it."""
        places = {b: n for n, a in enumerate(self.allocations) for b in a.buffers}
        return tuple(places.get(name) for name in self.outputs)

    def is_saved(self, idx: int) -> bool:
        return self.inputs[idx].origin == "saved"


@dataclasses.dataclass(frozen=True)
class DirectCall:
    """
    What Runner.call does if it only calls its one partition and moves CPU values to the GPU.
    Arguments of the graph have an index; the result of the k-th stage is num_args + k.

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
    """

    functions: tuple[PartitionInfo, ...] = ()
    reports: tuple[PartitionReport, ...] | None = None
    direct: DirectCall | None = None

    @property
    def object_names(self) -> tuple[str, ...]:
        """Objects of the module that this and its functions name."""
        names = [n for f in self.functions for n in (*f.kernels, *f.delivers)]
        if self.direct is not None:
            names += (name for name, _ in (*self.direct.packs, *self.direct.stages))
        return tuple(dict.fromkeys(names))
