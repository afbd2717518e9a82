"""Operators of other libraries in a function that is captured."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
from torch._inductor.pygraph.capture.collectives import NAMESPACES
from torch._inductor.pygraph.graph.edges import capturing_graph, count_nodes
from torch._inductor.pygraph.types.reason import Code, Reason, RefusedError
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


if TYPE_CHECKING:
    from torch._inductor.cudagraph_utils import ModelType, OutputType
    from torch._inductor.utils import InputType


# Namespaces of operators that launch on the current stream, the same in each call.
SHIPPED = ("aten", "prims", "inductor", *NAMESPACES)


class CustomOperators(TorchDispatchMode):
    """
    Raises RefusedError if an operator of another library adds no node to the graph that is captured. Such an operator launches
    on a stream that is not captured, or works on the host. A replay would leave that out.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in SHIPPED:
            return func(*args, **kwargs)
        before = count_nodes(capturing_graph())
        results = func(*args, **kwargs)
        leaves = pytree.tree_leaves((args, kwargs, results))
        has_elements = any(isinstance(t, torch.Tensor) and t.is_cuda and t.numel() for t in leaves)
        if has_elements and count_nodes(capturing_graph()) == before:
            raise RefusedError(Reason.of(Code.KERNELS_NOT_CAPTURED))
        return results


def with_custom_operators(model: ModelType) -> ModelType:
    """Return what runs ``model`` while it is captured, with its operators of other libraries watched."""

    def run(inputs: list[InputType]) -> OutputType:
        with CustomOperators():
            return model(inputs)

    return run
