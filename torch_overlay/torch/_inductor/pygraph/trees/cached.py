"""The tensors that a node caches and returns again in each replay, after the program may have changed them."""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch._inductor import config
from torch._inductor.cudagraph_trees import AliasesBoundMemory


if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch._inductor.pygraph.graph.driver import DriverError


class NotReplayed(Exception):
    """
    A recording was not replayed in this call, which has to run uncaptured. ``restored`` are the addresses of inputs
    that were let go and rebuilt: nobody owns that memory, and the next graphs write it. ``error`` is the driver's, or
    None.
    """

    def __init__(self, restored: frozenset[int] = frozenset(), error: DriverError | None = None) -> None:
        self.restored = restored
        self.error = error


def is_steady(node: Any) -> bool:
    """Return whether a plan describes a BoundGraphNode: each output is bound, cached, a static input, or no tensor."""
    return (
        not node.non_static_input_idx
        and not node.returned_from_pool
        and node.rerecord_if_static_inputs_change
        and not config.triton.fast_path_cudagraph_asserts
        and not config.triton.force_cudagraph_sync
        and all(
            not isinstance(metadata, dict)
            or (isinstance(alias, AliasesBoundMemory) and alias.is_whole)
            or is_cached
            or static is not None
            for alias, metadata, is_cached, static in zip(
                node.output_storage_alias,
                node.outputs_metadata,
                node.unaliased_in_all_paths,
                node.static_output_tensors,
            )
        )
    )


def renew(t: torch.Tensor) -> None:
    """Take from a cached tensor what its last owner left: autograd's state, hooks, attributes, versions."""
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
    if t._version:
        torch._C._autograd._unsafe_set_version_counter((t,), (0,))


def is_lazy(t: torch.Tensor) -> bool:
    """Return whether the conjugate or the negative of what lies at its address is meant."""
    return t.is_conj() or t.is_neg()


def are_aligned(pointers: Iterable[int], alignment: int) -> bool:
    """Return whether all addresses are multiples of ``alignment``, a power of two."""
    return functools.reduce(operator.or_, pointers, 0) % alignment == 0


class CachedTensor(NamedTuple):
    """A tensor that a node caches, as it was recorded."""

    address: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, metadata: dict[str, Any]) -> CachedTensor:
        size, stride, dtype = (metadata[key] for key in ("size", "stride", "dtype"))
        # A tensor without elements says that it lies nowhere.
        address = metadata["data_ptr"] + metadata["storage_offset"] * dtype.itemsize
        return cls(0 if 0 in size else address, size, stride, dtype)

    def describes(self, t: torch.Tensor) -> bool:
        """Return whether its last owner left a tensor as it was recorded, but for what renew undoes."""
        return (
            type(t) is torch.Tensor
            and t.dtype == self.dtype
            and not (is_lazy(t) or t.has_names())
            and t.data_ptr() == self.address
            and t.size() == self.size
            and t.stride() == self.stride
        )
