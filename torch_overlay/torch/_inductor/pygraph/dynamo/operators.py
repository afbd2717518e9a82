"""What is known of the operators of Dynamo's graph: which raise for no value, which write, and which draw."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
import torch.fx
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.nn import functional
from torch.utils._pytree import tree_iter


if TYPE_CHECKING:
    from collections.abc import Collection


# By name, since functions, methods and operators of Python share them. Shapes and dtypes are checked when they are
# traced. Of elements, and reductions:
POINTWISE = frozenset(
    """
    abs absolute add all amax amin and any bfloat16 bitwise_and bitwise_not bitwise_or bitwise_xor bool ceil clamp
    clamp_max clamp_min clone cos cosh detach div double elu eq erf exp exp2 expm1 float floor ge gelu gt half hardtanh
    int invert is_all_true isfinite isinf isnan le leaky_relu lerp log log10 log1p log2 logical_and logical_not logical_or
    logical_xor long lt max maximum mean min minimum mish mul nan_to_num ne neg or reciprocal relu relu6 round rsqrt
    selu sigmoid sign silu sin sinh softplus sqrt square sub sum tan tanh to truediv where xor
    """.split()
)
VIEWS = frozenset(
    """
    contiguous cpu expand flatten getattr getitem permute reshape squeeze t transpose unflatten unsqueeze view
    """.split()
)
CONSTRUCTORS = frozenset(
    "arange full full_like new_full new_ones new_zeros ones ones_like tensor zeros zeros_like".split()
)
OTHERS = frozenset(
    """
    acos acosh addcdiv addcmul addmm argmax argmin as_strided asin asinh atan atan2 atanh avg_pool1d avg_pool2d baddbmm
    batch_norm bmm broadcast_to cat celu chunk conj conv1d conv2d conv3d cumsum diff dropout einsum expand_as flip
    group_norm iadd iand imul instance_norm interpolate ior isclose isneginf isposinf isub itruediv l1_loss
    layer_norm linear log_softmax logsumexp masked_fill matmul max_pool2d mm mse_loss multi_head_attention_forward norm
    normalize not outer pad pow prelu prod rand rand_like randn randn_like repeat rms_norm roll
    scaled_dot_product_attention select smooth_l1_loss softmax stack std tile transformer_encoder_layer_fwd tril triu
    type_as unbind var view_as weight_norm
    """.split()
)
TOTAL = POINTWISE | VIEWS | CONSTRUCTORS | OTHERS

# Functions of Python that write their first operand
IN_PLACE = frozenset(("iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift"))
IN_PLACE |= frozenset(("isub", "itruediv", "ixor", "setitem"))

# Functions whose draws the host can make
DRAWS = frozenset(("rand", "randn", "randint"))

# Functions that draw by operators of other names.
DRAWING = frozenset(
    (functional.gumbel_softmax, torch.pca_lowrank, torch.svd_lowrank)
    + (functional.fractional_max_pool2d, functional.fractional_max_pool2d_with_indices)
    + (functional.fractional_max_pool3d, functional.fractional_max_pool3d_with_indices)
)

# Functions that compute nothing
SETTINGS = (torch._C._set_grad_enabled, torch._C._log_api_usage_once)

# Operators that raise for elements of these operands alone: their place and their name, and those of what they index.
INDEXING = {
    "cross_entropy": (1, "target", 0, "input"),
    "embedding": (0, "input", 1, "weight"),
    "gather": (2, "index", 0, "input"),
    "getitem": (1, "", 0, ""),
    "index_select": (2, "index", 0, "input"),
    "masked_scatter": (1, "mask", 0, "input"),
    "nll_loss": (1, "target", 0, "input"),
    "setitem": (1, "", 0, ""),
    "take_along_dim": (1, "indices", 0, "input"),
}
INTEGERS = (torch.int64, torch.int32)


def name_of(node: torch.fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def plain_name(node: torch.fx.Node) -> str:
    """Return the name of an operator, whether it is a method, a function or in place."""
    return name_of(node).strip("_")


def is_of_torch(node: torch.fx.Node) -> bool:
    """Return whether a node is an operator that its name tells."""
    module = getattr(node.target, "__module__", None) or ""
    modules = ("torch", "_operator", "builtins", "_VariableFunctions", "")
    return node.op == "call_method" or (node.op == "call_function" and module.partition(".")[0] in modules)


def is_in_place(node: torch.fx.Node) -> bool:
    """Return whether a node writes its first operand, or the one that it is given as ``out``."""
    name = name_of(node)
    ends = name.endswith("_") and not name.endswith("__") and name not in ("and_", "or_", "not_")
    return plain_name(node) in IN_PLACE or ends or "out" in node.kwargs or is_asked_to_write(node)


def is_asked_to_write(node: torch.fx.Node) -> bool:
    """Return whether a node is a function such as relu, which writes its first operand with ``inplace=True``."""
    code = getattr(node.target, "__code__", None)
    if code is None or "inplace" not in code.co_varnames:
        return False
    return argument(node, code.co_varnames.index("inplace"), "inplace", False) is not False


def is_total(node: torch.fx.Node) -> bool:
    """Return whether a node raises for no value of its tensors."""
    if node.op in ("placeholder", "get_attr", "output") or node.target in SETTINGS:
        return True
    name = plain_name(node)
    if name in ("getitem", "setitem") and any(isinstance(i, torch.fx.Node) for i in indices(node.args[1])):
        # A tensor as an index may be out of bounds.
        return False
    if name == "floordiv" or "rounding_mode" in node.kwargs:
        # Integers raise if the divisor is zero.
        divisor = node.args[1] if len(node.args) > 1 else None
        return type(divisor) in (int, float) and divisor != 0 and is_of_torch(node)
    return (name in TOTAL or name == "setitem") and is_of_torch(node)


def is_pure(node: torch.fx.Node) -> bool:
    """Return whether a node computes a tensor, by elements, as a view or from nothing, and does nothing else."""
    return (
        plain_name(node) in POINTWISE | VIEWS | CONSTRUCTORS
        and is_total(node)
        and not is_in_place(node)
        and (plain_name(node) != "getattr" or node.args[1] in ("mT", "T"))
    )


def draws(node: torch.fx.Node) -> bool:
    """Return whether the node draws random numbers, but not inside of another operator, as dropout in torch.lstm."""
    if not node.op.startswith("call_"):
        return False
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    name = getattr(target, "__name__", str(target))
    if "dropout" in name:
        return argument(node, 2, "training", True) is not False
    if name == "scaled_dot_product_attention":
        return argument(node, 4, "dropout_p", 0.0) != 0
    if name == "multi_head_attention_forward":
        training = argument(node, 13, "training", True)
        return training is not False and argument(node, 10, "dropout_p", 0.0) != 0
    operator = getattr(torch.ops.aten, name, None)
    return target in DRAWING or (
        name not in ("lstm", "gru", "rnn_relu", "rnn_tanh")
        and isinstance(operator, torch._ops.OpOverloadPacket)
        and any(
            torch.Tag.nondeterministic_seeded in getattr(operator, overload).tags for overload in operator.overloads()
        )
    )


def is_draw(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and name_of(node) in DRAWS and is_of_torch(node)


def argument(node: torch.fx.Node, place: int, name: str, default: Any) -> Any:
    """Return the argument at ``place`` or of this name."""
    given = node.args[place] if len(node.args) > place else default
    return node.kwargs.get(name, given)


def indices_of(node: torch.fx.Node) -> list[torch.fx.Node] | None:
    """Return the tensors for whose elements alone an operator may raise, or None. Zeros never make it raise."""
    if (place := INDEXING.get(name_of(node))) is None or not is_of_torch(node):
        return None

    def operand(index: int, name: str) -> object:
        return node.args[index] if len(node.args) > index else node.kwargs.get(name)

    indexed = operand(*place[2:])
    example = indexed.meta.get("example_value") if isinstance(indexed, torch.fx.Node) else None
    if not isinstance(example, torch.Tensor) or 0 in example.shape:
        return None
    found = [i for i in indices(operand(*place[:2])) if isinstance(i, torch.fx.Node)]
    dtypes = (torch.bool,) if name_of(node) == "masked_scatter" else INTEGERS
    return found if all(getattr(i.meta.get("example_value"), "dtype", None) in dtypes for i in found) else None


def writes_statistics(node: torch.fx.Node) -> bool:
    """Return whether a norm may write running statistics, of which no version tells."""
    if name_of(node) not in ("batch_norm", "instance_norm"):
        return False
    has_statistics = len(node.args) > 1 and node.args[1] is not None or node.kwargs.get("running_mean") is not None
    return has_statistics and True in (*node.args, *node.kwargs.values())


def storage_of(node: torch.fx.Node) -> int | None:
    """Return what tells which tensors of a graph share memory."""
    example = node.meta.get("example_value")
    # torch.func.grad and jvp wrap tensors.
    while isinstance(example, torch.Tensor) and is_functorch_wrapped_tensor(example):
        example = get_unwrapped(example)
    is_strided = isinstance(example, torch.Tensor) and example.layout == torch.strided
    return example.untyped_storage()._cdata if is_strided else None


def is_of_input(node: torch.fx.Node) -> bool:
    """Return whether a tensor shares memory with an input of the graph, which may share it with other inputs."""
    inputs = (n for n in node.graph.nodes if n.op in ("placeholder", "get_attr"))
    return storage_of(node) in map(storage_of, inputs)


def may_write(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the operands that a node may write."""
    writes = is_in_place(node)
    # The first operand of torch._foreach_add_ is a list.
    is_first = writes and node.args and "out" not in node.kwargs
    operands = tree_iter(node.args[:1]) if is_first else node.all_input_nodes
    is_read = node.op == "call_method" or name_of(node) == "getitem" or is_total(node) or is_lookup(node)
    if node.op == "output" or (is_read and not writes and not writes_statistics(node)):
        return []
    return [n for n in operands if isinstance(n, torch.fx.Node)]


def may_be_written(graph: torch.fx.Graph, devices: Collection[str] = ("cpu",)) -> bool:
    """
    Return whether the graph may have written a tensor of ``devices`` by now that it did not make. Versions do not tell:
    x.data has its own.
    """
    inputs = [storage_of(node) for node in graph.nodes if node.op in ("placeholder", "get_attr")]

    def is_of_graph(node: torch.fx.Node, operand: torch.fx.Node) -> bool:
        return is_in_place(node) and name_of(node) != "set_" and storage_of(operand) not in (None, *inputs)

    return any(is_on(n, devices) and not is_of_graph(node, n) for node in graph.nodes for n in may_write(node))


def is_on(node: torch.fx.Node, devices: Collection[str]) -> bool:
    example = node.meta.get("example_value")
    return isinstance(example, torch.Tensor) and example.device.type in devices


def is_lookup(node: torch.fx.Node) -> bool:
    """Return whether a node looks up rows, and writes none. An embedding with a largest norm does."""
    return indices_of(node) is not None and argument(node, 3, "max_norm", None) is None


def indices(index: object) -> list[object]:
    if isinstance(index, slice):
        return [index.start, index.stop, index.step]
    if isinstance(index, (tuple, list)):
        return [i for part in index for i in indices(part)]
    return [index]
