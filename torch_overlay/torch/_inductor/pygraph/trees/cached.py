"""
The tensors that a node caches, and returns again in each replay.

The program may have changed such a tensor in any way while it had it.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from torch._inductor.cudagraph_trees import CUDAGraphNode
    from torch._inductor.pygraph.graph.driver import DriverError


class NotReplayed(Exception):
    """
    A recording was not replayed in this call, which has to run uncaptured.

    An input in the pool, which the graph overwrites, is still held: ``retain_graph=True`` in
    this step and not in the recorded one. Or the graph reads CPU values that another thread
    packs, or an input is not the content of its memory, or the driver refused.

    Attributes:
        restored: addresses of the inputs that were let go and rebuilt. Nobody owns that
            memory, and the next graphs write it
        error: the driver's, or None
    """

    def __init__(
        self,
        restored: frozenset[int] = frozenset(),
        error: DriverError | None = None,
    ) -> None:
        super().__init__()
        self.restored = restored
        self.error = error


def is_lazy(t: torch.Tensor) -> bool:
    """Return whether a tensor is the conjugate or the negative of its memory."""
    return t.is_conj() or t.is_neg()


def renew(t: torch.Tensor) -> None:
    """
    Make a cached tensor like new before it is returned once more.

    Nobody has it any more. Its last owner may have left autograd's state, hooks and
    attributes.
    """
    if t.requires_grad:
        t.detach_()
    if t.grad is not None:
        t.grad = None
    if t._backward_hooks is not None:
        t._backward_hooks = None
    if t._post_accumulate_grad_hooks:
        # Autograd keeps the dictionary itself.
        t._post_accumulate_grad_hooks.clear()
    if t.__dict__:
        t.__dict__.clear()


def has_own_memory(t: torch.Tensor, metadata: dict[str, Any]) -> bool:
    """Return whether the program gave no other memory to a cached tensor."""
    return t.untyped_storage().data_ptr() == metadata["data_ptr"]


def caches_are_whole(node: CUDAGraphNode) -> bool:
    """
    Return whether the tensors that a node caches have the recorded shape, memory and type.

    The program may have changed these in place. ``renew`` does not undo that.
    """
    return all(
        t is None
        or (
            has_own_memory(t, metadata)  # type: ignore[arg-type]
            and t.storage_offset() == metadata["storage_offset"]  # type: ignore[index]
            and t.size() == metadata["size"]  # type: ignore[index]
            and t.stride() == metadata["stride"]  # type: ignore[index]
            and t.dtype == metadata["dtype"]  # type: ignore[index]
            and type(t) is torch.Tensor
            and not (is_lazy(t) or t.has_names())
        )
        for t, metadata in zip(node.cached_tensor_outputs, node.outputs_metadata)
    )
