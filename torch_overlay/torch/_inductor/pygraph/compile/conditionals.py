"""
torch.cond in a captured function: both paths are captured, and a conditional node of the graph runs one of them. A
conditional node repeats the body of a torch.while_loop.

A recording compares both paths with uncaptured runs. So each path runs with values for which the program takes the
other one, and it must not fail for them: an index out of bounds would end the context. Paths are captured that consist
of loops with known addresses, matmuls, convolutions and attention.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch._inductor import ir
from torch._inductor.fx_utils import draws_random_numbers
from torch._inductor.pygraph.compile.lowering import HostCopy, Pack
from torch._inductor.pygraph.graph.prelude import branch_kernel, PreludeUnavailable
from torch._inductor.pygraph.types.reason import Code
from torch._inductor.scheduler import operations_of_subgraphs
from torch._inductor.virtualized import V


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch._inductor.codegen.wrapper import PythonWrapperCodegen


aten = torch.ops.aten

# Operators of libraries that fail for no values of their operands.
TOTAL = (
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_mm,
    aten._transformer_encoder_layer_fwd,
    aten.addmm,
    aten.baddbmm,
    aten.bmm,
    aten.convolution,
    aten.mm,
)

# Of loops: an address that depends on values, and checks.
MAY_FAIL = ("check_bounds", "device_assert_async", "indirect_indexing", "inline_asm_elementwise", "load_seed")

# What launches nothing, or only Triton kernels of Inductor's templates.
HARMLESS = (ir.MultiOutput, ir.NopKernel, ir.TemplateBuffer)


def subgraphs_of(conditional: ir.Conditional) -> tuple[ir.Subgraph, ir.Subgraph]:
    return conditional.true_subgraph, conditional.false_subgraph  # type: ignore[return-value]


def conditional_reason(conditional: ir.Conditional | ir.WhileLoop) -> Code | None:
    """Return why torch.cond or torch.while_loop cannot be captured, else None."""
    is_loop = isinstance(conditional, ir.WhileLoop)
    if is_loop:
        if conditional.stack_output:
            return Code.SUBGRAPH_NOT_CAPTURABLE
        subgraphs = conditional.cond_subgraph, conditional.body_subgraph
        (predicate,) = conditional.cond_subgraph.graph.graph_outputs  # type: ignore[union-attr]
    else:
        subgraphs = subgraphs_of(conditional)
        predicate = conditional.predicate
    if isinstance(predicate, ir.ShapeAsConstantBuffer) or predicate.get_dtype() != torch.bool:  # type: ignore[union-attr]
        return Code.CONTROL_FLOW
    device = predicate.get_device()  # type: ignore[union-attr]
    if device is None or device.type != "cuda" or not have_nodes(device):
        return Code.CONTROL_FLOW
    for subgraph in subgraphs:
        inputs = subgraph.graph.graph_input_names  # type: ignore[union-attr]
        for operation in subgraph.graph.operations:  # type: ignore[union-attr]
            if any(name in inputs for name in operation.get_mutation_names()):
                return Code.SUBGRAPH_NOT_CAPTURABLE
            if is_loop and isinstance(operation, ir.Conditional):
                return Code.SUBGRAPH_NOT_CAPTURABLE
            if (reason := _operation_reason(operation)) is not None:
                return reason
        outputs = subgraph.graph.graph_outputs  # type: ignore[union-attr]
        if any(isinstance(o, (ir.NoneAsConstantBuffer, ir.ShapeAsConstantBuffer)) for o in outputs):
            return Code.SUBGRAPH_NOT_CAPTURABLE
        # Writing what the loop carries would change another value of the same iteration.
        if is_loop and any(o.get_name() in inputs for o in outputs):
            return Code.SUBGRAPH_NOT_CAPTURABLE
    return None


def have_nodes(device: torch.device) -> bool:
    try:
        branch_kernel(device.index)
    except PreludeUnavailable:
        return False
    return True


def _operation_reason(operation: ir.Operation) -> Code | None:
    if isinstance(operation, ir.Conditional):
        return conditional_reason(operation)
    device = operation.get_device()
    if isinstance(operation, (HostCopy, Pack)) or (device is not None and device.type == "cpu"):
        return Code.SUBGRAPH_ON_CPU
    if next(operations_of_subgraphs(operation), None) is not None or operation.get_unbacked_symbol_defs():
        return Code.SUBGRAPH_NOT_CAPTURABLE
    if isinstance(operation, ir.RandomSeeds):
        return Code.BRANCH_DRAWS
    if isinstance(operation, HARMLESS):
        return None
    if isinstance(operation, ir.ComputedBuffer):
        is_loop = isinstance(operation.data, ir.Loops) and not isinstance(operation.data, ir.Scatter)
        used = operation.data.inner_fn_opcount().used_ops if is_loop else MAY_FAIL
        return Code.BRANCH_MAY_FAIL if any(op in used for op in MAY_FAIL) else None
    fx_node = operation.fx_node if isinstance(operation, ir.ExternKernel) else None
    if fx_node is not None and draws_random_numbers(fx_node):
        return Code.BRANCH_DRAWS
    # Inductor's own choice for addmm is no overload.
    if getattr(operation, "python_kernel_name", None) == "extern_kernels.bias_addmm":
        return None
    op = getattr(operation, "op_overload", None)
    return None if getattr(op, "overloadpacket", None) in TOTAL else Code.BRANCH_MAY_FAIL


def paths_through(operations: Iterable[ir.Operation]) -> tuple[tuple[tuple[str, bool], ...], ...]:
    """
    Return choices of paths that together take each path of the captured torch.cond and torch.while_loop among these
    operations: for each one that runs, its name and the path that it takes. A loop takes one iteration or none.
    """
    rows = [[*_choices(o)] for o in operations if isinstance(o, (ir.Conditional, ir.WhileLoop))]
    longest = max(map(len, rows), default=0)
    return tuple(
        tuple(itertools.chain.from_iterable(row[n % len(row)] for row in rows)) for n in range(longest)
    )


def _choices(conditional: ir.Conditional | ir.WhileLoop) -> Iterator[tuple[tuple[str, bool], ...]]:
    if isinstance(conditional, ir.WhileLoop):
        yield ((conditional.get_name(), True),)
        yield ((conditional.get_name(), False),)
        return
    for taken, subgraph in zip((True, False), subgraphs_of(conditional)):
        for inner in paths_through(subgraph.graph.operations) or [()]:  # type: ignore[union-attr]
            yield (conditional.get_name(), taken), *inner


def codegen_captured(wrapper: PythonWrapperCodegen, conditional: ir.Conditional) -> bool:
    """Generate the call of a torch.cond that a recording captures. Return False if it captures none."""
    if V.graph.aot_mode or V.graph.cpp_wrapper or conditional_reason(conditional) is not None:
        return False
    predicate = conditional.predicate.codegen_reference()  # type: ignore[union-attr]
    operands = [predicate, *(operand.codegen_reference() for operand in conditional.operands or ())]
    _codegen_call(wrapper, "run_branch", conditional, subgraphs_of(conditional), operands)
    return True


def codegen_captured_loop(wrapper: PythonWrapperCodegen, loop: ir.WhileLoop) -> bool:
    """Generate the call of a torch.while_loop that a recording captures. Return False if it captures none."""
    if V.graph.aot_mode or V.graph.cpp_wrapper or conditional_reason(loop) is not None:
        return False
    operands = [o.codegen_reference() for o in (*(loop.carried_inputs or ()), *(loop.additional_inputs or ()))]
    _codegen_call(wrapper, "run_loop", loop, (loop.cond_subgraph, loop.body_subgraph), operands)  # type: ignore[arg-type]
    return True


def _codegen_call(
    wrapper: PythonWrapperCodegen,
    function: str,
    conditional: ir.Conditional | ir.WhileLoop,
    subgraphs: tuple[ir.Subgraph, ir.Subgraph],
    operands: list[str],
) -> None:
    name = conditional.get_name()
    layouts = []
    for output in conditional.outputs or ():
        layout = output.get_layout()
        size, stride = (wrapper.codegen_python_shape_tuple(tuple(sizes)) for sizes in (layout.size, layout.stride))
        layouts.append(f"({size}, {stride}, {layout.dtype})")
    functions = []
    for subgraph in subgraphs:
        subgraph.graph.is_captured_branch = True  # type: ignore[union-attr]
        wrapper.codegen_subgraph_common(subgraph)
        functions.append(subgraph.graph.name)  # type: ignore[union-attr]
    wrapper.get_root_graph().add_import_once(f"from torch._inductor.pygraph.capture.branches import {function}")
    # The arguments keep what is freed here.
    wrapper.writeline(f"{name}_args = [{', '.join(operands)}]")
    V.graph.scheduler.free_buffers()
    wrapper.writeline(
        f"{name} = {function}(branches, {name!r}, {', '.join(functions)}, {name}_args, [{', '.join(layouts)}], "
        f"{wrapper.get_allocator_parameter()})"
    )
