"""Outputs of a rehearsal that cannot run again. They wait on the host: the graph needs memory for the same outputs."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
from torch._inductor.pygraph.graph.placeholder import tensor_at


if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from torch._inductor.cudagraph_utils import OutputType
    from torch._inductor.pygraph.graph.memory import PoolRanges

# Tensors that take more together stay on the device: the host may have little memory.
MAX_BYTES = 4 << 30


def apart(outputs: OutputType, addresses: Container[int]) -> OutputType:
    """
    Return the outputs of an uncaptured run, copied where they lie in the graphs' pool, at ``addresses``: a gradient may
    be written over an activation, which is dead to trees then.
    """
    return [
        o.clone() if isinstance(o, torch.Tensor) and o.untyped_storage().data_ptr() in addresses else o for o in outputs
    ]


class KeptOutputs:
    """
    Args:
        outputs: of the run
        ranges: memory that was allocated for the run. Outputs outside of it are kept as they are
        lent: addresses of tensors that the run put into the graphs' pool, which the graph will write
    """

    def __init__(
        self, outputs: Sequence[Any], ranges: PoolRanges, device_index: int, lent: Container[int] = ()
    ) -> None:
        self.device_index = device_index
        # Copies on the host would lose that a tensor is a lazy conjugate or negative.
        own = {
            i: t
            for i, t in enumerate(outputs)
            if isinstance(t, torch.Tensor)
            and t.is_cuda
            and (t.data_ptr() in ranges or t.untyped_storage().data_ptr() in lent)
            and not (t.is_conj() or t.is_neg())
        }
        # By address: outputs may share memory.
        storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in own.values())}
        self.on_host: dict[int, torch.Tensor] = {}
        # (address of the storage, dtype, size, stride, offset) by output
        self.places: dict[int, tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...], int]] = {}
        if sum(storages.values()) > MAX_BYTES:
            own, storages = {}, {}
        self.outputs = apart([None if i in own else t for i, t in enumerate(outputs)], lent)
        for address, nbytes in storages.items():
            like = torch.empty(nbytes, dtype=torch.uint8, device="meta")
            self.on_host[address] = tensor_at(address, like, device_index).cpu()
        for i, t in own.items():
            address = t.untyped_storage().data_ptr()
            self.places[i] = address, t.dtype, tuple(t.shape), t.stride(), t.storage_offset()

    def on_device(self) -> OutputType:
        """Return the outputs. Those that share memory still do."""
        device = torch.device("cuda", self.device_index)
        storages = {address: memory.to(device) for address, memory in self.on_host.items()}
        outputs = list(self.outputs)
        for i, (address, dtype, size, stride, offset) in self.places.items():
            memory = storages[address]
            whole = memory[: memory.nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
            # A tensor of its own, no view that autograd knows.
            outputs[i] = whole.as_strided(size, stride, offset).data
        return outputs
