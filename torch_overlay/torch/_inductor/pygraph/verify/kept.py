"""
Outputs of a rehearsal that cannot run again. The graph needs memory for the same outputs. So they wait on the host, unless
they are a small part of what is reserved.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
from torch._inductor.pygraph.graph.memory import PoolRanges, reservable
from torch._inductor.pygraph.graph.placeholder import tensor_at


if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from torch._inductor.cudagraph_utils import OutputType
    from torch._inductor.pygraph.graph.memory import OwnPool

# Tensors that take more together stay on the device: the host may have little memory.
MAX_BYTES = 4 << 30

# Outputs that take at most this part of the reserved memory wait on the device: copies to pageable memory of the host are slow.
# An estimate.
MAX_PART = 0.1


def apart(outputs: OutputType, addresses: Container[int]) -> OutputType:
    """
    Return the outputs of an uncaptured run, copied where they lie in the graphs' pool, at ``addresses``: a gradient may
    be written over an activation, which is dead to trees then.
    """
    return [
        o.clone() if isinstance(o, torch.Tensor) and o.untyped_storage().data_ptr() in addresses else o for o in outputs
    ]


def _is_small(nbytes: int, device_index: int) -> bool:
    return nbytes <= min(reservable(device_index) / 2, MAX_PART * torch.cuda.memory_reserved(device_index))


class KeptOutputs:
    """
    Args:
        outputs: of the run
        own_pool: where memory was allocated for the run. Outputs outside of it are kept as they are
        lent: addresses of tensors that the run put into the graphs' pool, which the graph will write
    """

    def __init__(
        self, outputs: Sequence[Any], own_pool: OwnPool, device_index: int, lent: Container[int] = ()
    ) -> None:
        ranges = PoolRanges(own_pool.pool)
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
        self.memory: dict[int, torch.Tensor] = {}
        # (address of the storage, dtype, size, stride, offset) by output
        self.places: dict[int, tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...], int]] = {}
        if sum(storages.values()) > MAX_BYTES:
            own, storages = {}, {}
        self.outputs = apart([None if i in own else t for i, t in enumerate(outputs)], lent)
        keep = torch.Tensor.clone if _is_small(sum(storages.values()), device_index) else torch.Tensor.cpu
        with own_pool.left():
            for address, nbytes in storages.items():
                like = torch.empty(nbytes, dtype=torch.uint8, device="meta")
                self.memory[address] = keep(tensor_at(address, like, device_index))
        for i, t in own.items():
            address = t.untyped_storage().data_ptr()
            self.places[i] = address, t.dtype, tuple(t.shape), t.stride(), t.storage_offset()

    def on_device(self) -> OutputType:
        """Return the outputs. Those that share memory still do."""
        device = torch.device("cuda", self.device_index)
        storages = {address: memory.to(device) for address, memory in self.memory.items()}
        outputs = list(self.outputs)
        for i, (address, dtype, size, stride, offset) in self.places.items():
            memory = storages[address]
            whole = memory[: memory.nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
            # A tensor of its own, no view that autograd knows.
            outputs[i] = whole.as_strided(size, stride, offset).data
        return outputs
