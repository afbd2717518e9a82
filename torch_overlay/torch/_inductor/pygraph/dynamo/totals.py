"""Which nodes of Dynamo's graph never raise for the values of their tensors."""

from __future__ import annotations

import operator

import torch
import torch.fx


# By name, since functions, methods and operators of Python share them. Shapes and dtypes are checked when they are traced.
TOTAL = frozenset(
    """
    abs absolute acos acosh add addcdiv addcmul addmm all amax amin any argmax argmin asin asinh atan atan2 atanh
    avg_pool1d avg_pool2d baddbmm batch_norm bmm broadcast_to cat ceil celu chunk clamp clamp_max clamp_min clone conj
    contiguous conv1d conv2d conv3d cos cosh cumsum detach diff dropout elu eq erf exp exp2 expand expand_as expm1
    flatten flip float floor full full_like ge gelu getattr group_norm gt half hardtanh iadd imul instance_norm isfinite
    isinf isnan isub itruediv l1_loss layer_norm le leaky_relu lerp linear log log10 log1p log2 log_softmax
    logical_and logical_not logical_or logsumexp lt masked_fill matmul max max_pool2d maximum mean min minimum mish mm
    mse_loss mul ne neg norm normalize ones ones_like permute pow prelu prod reciprocal relu relu6 repeat
    reshape rms_norm roll round rsqrt scaled_dot_product_attention select selu sigmoid sign silu sin sinh
    smooth_l1_loss softmax softplus sqrt square squeeze stack std sub sum t tan tanh tile to transpose tril triu
    truediv unbind unflatten unsqueeze var view view_as where zeros zeros_like
    """.split()
)


def is_total(node: torch.fx.Node) -> bool:
    if node.op in ("placeholder", "get_attr", "output"):
        return True
    if node.target is torch._C._set_grad_enabled:
        return True
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    if node.target in (operator.getitem, operator.setitem):
        # A tensor as an index may be out of bounds.
        return not any(isinstance(i, torch.fx.Node) for i in indices(node.args[1]))
    if name.strip("_") in TOTAL:
        return isinstance(node.target, str) or is_of_torch(node.target)
    return False


def indices(index: object) -> list[object]:
    if isinstance(index, slice):
        return [index.start, index.stop, index.step]
    if isinstance(index, (tuple, list)):
        return [i for part in index for i in indices(part)]
    return [index]


def is_of_torch(function: object) -> bool:
    module = getattr(function, "__module__", None) or ""
    return module.partition(".")[0] in ("torch", "_operator", "builtins", "_VariableFunctions")
