"""Which nodes of Dynamo's graph never raise for the values of their tensors."""

from __future__ import annotations

import operator

import torch
import torch.fx


# By name, since functions, methods and operators of Python share them. Shapes and dtypes are checked when they are traced.
TOTAL = frozenset(
    """
    abs absolute acos acosh add addcdiv addcmul addmm all amax amin and any arange argmax argmin asin asinh atan
    atan2 atanh avg_pool1d avg_pool2d baddbmm batch_norm bfloat16 bitwise_and bitwise_not bitwise_or bitwise_xor
    bmm bool broadcast_to cat ceil celu chunk clamp clamp_max clamp_min clone conj contiguous conv1d conv2d conv3d
    cos cosh cumsum detach diff double dropout einsum elu eq erf exp exp2 expand expand_as expm1 flatten flip float
    floor full full_like ge gelu getattr group_norm gt half hardtanh iadd iand imul instance_norm int invert ior
    is_all_true isclose isfinite isinf isnan isneginf isposinf isub itruediv l1_loss layer_norm le leaky_relu lerp
    linear log log10 log1p log2 log_softmax logical_and logical_not logical_or logical_xor logsumexp long lt
    masked_fill matmul max max_pool2d maximum mean min minimum mish mm mse_loss mul ne neg norm normalize not ones
    ones_like or outer pad permute pow prelu prod reciprocal relu relu6 repeat reshape rms_norm roll round rsqrt
    scaled_dot_product_attention select selu sigmoid sign silu sin sinh smooth_l1_loss softmax softplus sqrt square
    squeeze stack std sub sum t tan tanh tile to transpose tril triu truediv unbind unflatten unsqueeze var view
    view_as where xor zeros zeros_like
    """.split()
)


def is_total(node: torch.fx.Node) -> bool:
    if node.op in ("placeholder", "get_attr", "output"):
        return True
    if node.target is torch._C._set_grad_enabled:
        return True
    name = name_of(node)
    if node.target in (operator.getitem, operator.setitem):
        # A tensor as an index may be out of bounds.
        return not any(isinstance(i, torch.fx.Node) for i in indices(node.args[1]))
    if name.strip("_") in TOTAL:
        return isinstance(node.target, str) or is_of_torch(node.target)
    return False


# Operators that raise for elements of these operands alone: their place and their name, and those of what they index.
INDEXING = {
    "cross_entropy": (1, "target", 0, "input"),
    "embedding": (0, "input", 1, "weight"),
    "gather": (2, "index", 0, "input"),
    "getitem": (1, "", 0, ""),
    "index_select": (2, "index", 0, "input"),
    "nll_loss": (1, "target", 0, "input"),
    "setitem": (1, "", 0, ""),
    "take_along_dim": (1, "indices", 0, "input"),
}
INTEGERS = (torch.int64, torch.int32)

# Of those that never raise, these draw random numbers.
DRAWING = ("dropout", "scaled_dot_product_attention")


def name_of(node: torch.fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def draws(node: torch.fx.Node) -> bool:
    return name_of(node).strip("_") in DRAWING


def indices_of(node: torch.fx.Node) -> list[torch.fx.Node] | None:
    """Return the tensors for whose elements alone an operator may raise, or None. Zeros never make it raise."""
    if (place := INDEXING.get(name_of(node))) is None or not (isinstance(node.target, str) or is_of_torch(node.target)):
        return None

    def operand(index: int, name: str) -> object:
        return node.args[index] if len(node.args) > index else node.kwargs.get(name)

    indexed = operand(*place[2:])
    example = indexed.meta.get("example_value") if isinstance(indexed, torch.fx.Node) else None
    if not isinstance(example, torch.Tensor) or 0 in example.shape:
        return None
    found = [i for i in indices(operand(*place[:2])) if isinstance(i, torch.fx.Node)]
    return found if all(getattr(i.meta.get("example_value"), "dtype", None) in INTEGERS for i in found) else None


def writes_statistics(node: torch.fx.Node) -> bool:
    """Return whether a norm may write running statistics, of which no version tells."""
    if name_of(node) not in ("batch_norm", "instance_norm"):
        return False
    has_statistics = len(node.args) > 1 and node.args[1] is not None or node.kwargs.get("running_mean") is not None
    return has_statistics and True in (*node.args, *node.kwargs.values())


def indices(index: object) -> list[object]:
    if isinstance(index, slice):
        return [index.start, index.stop, index.step]
    if isinstance(index, (tuple, list)):
        return [i for part in index for i in indices(part)]
    return [index]


def is_of_torch(function: object) -> bool:
    module = getattr(function, "__module__", None) or ""
    return module.partition(".")[0] in ("torch", "_operator", "builtins", "_VariableFunctions")
