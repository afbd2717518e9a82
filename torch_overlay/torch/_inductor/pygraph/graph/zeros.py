"""
Tensors of zeros that share one physical page of 2 MiB, whatever their size. The driver maps each page of a range of virtual
addresses to it, as for placeholders (placeholder.py). Nothing may write these tensors.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch._inductor.pygraph.graph.placeholder import extent, PAGE_BYTES, PlaceholderArena, round_up, tensor_of, ZERO


if TYPE_CHECKING:
    from collections.abc import Sequence


@functools.cache
def pages_of(device_index: int) -> PlaceholderArena:
    # Recordings write the page of arena(device_index, ZERO).
    return PlaceholderArena(device_index, ZERO)


def shared_zeros(size: Sequence[int], dtype: torch.dtype, device_index: int) -> torch.Tensor:
    """
    Return a contiguous tensor of zeros, which nothing may write. The process keeps its memory. Raises DriverError if the
    device cannot map pages. Raises RuntimeError if pages have to be mapped while the current stream is captured.
    """
    stride = torch._prims_common.make_contiguous_strides_for(size)
    pages = pages_of(device_index)
    nbytes = round_up(extent(size, stride, dtype), PAGE_BYTES)
    is_new = nbytes > pages.nbytes
    if is_new and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the page would be filled by the captured graph alone")
    # Twice as much as before, so that growing sizes reserve few ranges.
    start = pages.reserve(max(nbytes, 2 * pages.nbytes) if is_new else nbytes)
    if is_new:
        # Other streams may be the first to read.
        torch.cuda.current_stream(device_index).synchronize()
    return tensor_of(start, size, stride, dtype, device_index)
