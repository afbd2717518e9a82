"""Tables of operators that decide where the CPU values of a GPU graph may go."""

from __future__ import annotations

import torch
from torch._higher_order_ops.flex_attention import (
    flex_attention,
    flex_attention_backward,
)
from torch.utils._ordered_set import OrderedSet


aten = torch.ops.aten
prims = torch.ops.prims

# Each makes a tensor from arguments that are no tensors.
CONSTRUCTORS = OrderedSet(
    [
        aten.full.default,
        aten.scalar_tensor.default,
        aten.eye.default,
        aten.eye.m,
        prims.iota.default,
    ]
)

# Each gives the same bits on the CPU and on the GPU, for every dtype.
SAME_ON_EVERY_DEVICE = OrderedSet(
    [
        aten.alias.default,
        aten.clone.default,
        aten.diagonal.default,
        aten.expand.default,
        aten.permute.default,
        aten.reshape.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
    ]
)

# Each gives the same bits on the CPU and on the GPU if all operands are integers or booleans.
# Floating-point results may differ: GPU code contracts a multiplication and an addition.
SAME_ON_EVERY_DEVICE_FOR_INTEGERS = OrderedSet(
    [
        aten.add.Tensor,
        aten.bitwise_not.default,
        aten.logical_not.default,
        aten.mul.Tensor,
        aten.neg.default,
        aten.sub.Tensor,
        aten.where.self,
        *(
            overload
            for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "eq", "ge", "gt", "le", "lt", "ne")
            for overload in (getattr(aten, name).Scalar, getattr(aten, name).Tensor)
        ),
    ]
)

# Each takes a tensor and returns memory that it does not initialize.
UNINITIALIZED = OrderedSet(
    [
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
        aten.resize.default,
    ]
)

INDEX_PUTS = OrderedSet(
    [
        aten._unsafe_index_put.default,
        aten.index_put.default,
        aten.index_put_.default,
    ]
)

# Each works on the GPU and accepts CPU tensors that have dimensions. Other GPU operators
# accept 0-d CPU tensors only.
TAKES_CPU_TENSORS = INDEX_PUTS | OrderedSet(
    [
        aten._unsafe_index.Tensor,
        aten.copy.default,
        aten.copy_.default,
        aten.index.Tensor,
        aten.slice_scatter.default,
    ]
)

# Each kernel accepts a CPU learning rate of any dtype, but reads a GPU learning rate as float32.
FUSED_OPTIMIZER_STEPS = OrderedSet(
    [
        op.tensor_lr
        for name in ("adagrad", "adam", "adamw", "sgd")
        for op in (getattr(aten, f"_fused_{name}"), getattr(aten, f"_fused_{name}_"))
    ]
)

# Each takes non_blocking as its third argument.
COPIES = OrderedSet([aten.copy.default, aten.copy_.default, prims.device_put.default])

# Each inlines the graphs that it is given into a kernel. A kernel has no place for copies.
INLINES_GRAPHS = OrderedSet([flex_attention, flex_attention_backward])

# The forward hands the generator's seed and offset to the backward: on the GPU if the forward
# is captured, else on the CPU. The backward expects them by the same rule, see Note [Seed and
# Offset Device] in ATen/native/transformers/cuda/attention.cu. One of the two may be captured
# without the other.
MEMORY_EFFICIENT_ATTENTION = OrderedSet(
    [
        aten._efficient_attention_backward.default,
        aten._efficient_attention_forward.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
    ]
)
