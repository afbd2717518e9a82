"""
Whether gradients are held beyond the step that computed them.

Gradients that are gone when the next step begins need no memory of their own: they may lie
in the graphs' pool, where the activations were that the backward is done with. Before a
backward is recorded, that is found out here. Afterwards trees find it out, which see to it
that the gradients are gone in every step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._inductor.cudagraph_trees import CUDAGraphTreeManager
from torch.multiprocessing.reductions import StorageWeakRef


if TYPE_CHECKING:
    from torch._inductor.cudagraph_utils import OutputType
    from torch._inductor.pygraph.select.controller import Controller

get_curr_generation = CUDAGraphTreeManager.get_curr_generation

# What backwards that are not recorded yet returned in one step, and the step's generation.
_gradients: dict[Controller, tuple[int, list[StorageWeakRef]]] = {}


def begin_call(controller: Controller) -> None:
    """
    Look for gradients that outlived their step.

    A function that is no backward begins the next step.
    """
    is_backward = controller.spec.is_backward
    for backward in (controller,) if is_backward else tuple(_gradients):
        # Autograd's threads, one for each device, may look at the same entry.
        noted = _gradients.get(backward)
        if noted is None:
            continue
        generation, refs = noted
        if is_backward and generation == get_curr_generation():
            # Several layers have the code of this backward.
            continue
        _gradients.pop(backward, None)
        outlive = any(not ref.expired() for ref in refs)
        backward.stepped(outputs_outlive=outlive)


def end_call(controller: Controller, outputs: OutputType) -> None:
    """Take note of the gradients that a backward returned."""
    generation = get_curr_generation()
    noted, refs = _gradients.get(controller, (generation, []))
    kept = [ref for ref in refs if noted == generation and not ref.expired()]
    kept += [
        StorageWeakRef(t.untyped_storage())
        for i in controller.spec.returned_output_idxs
        if isinstance(t := outputs[i], torch.Tensor)
    ]
    _gradients[controller] = generation, kept
