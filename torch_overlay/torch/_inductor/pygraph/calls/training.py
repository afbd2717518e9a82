"""
A training graph's autograd.Function, with nothing but what this graph needs.

AOTAutograd's CompiledFunction asks in each call what its metadata said when it was compiled:
which outputs alias, which inputs are mutated, what is saved for the backward and how, what
each gradient is to look like. With config.pygraph it asks once. A plain graph, see is_plain,
gets a forward that runs it and saves, and a backward that lays out gradients as the graph was
compiled for and runs it. All else keeps CompiledFunction's own methods.

What can change from call to call is still asked in each, and where the answer is not the
usual one, CompiledFunction's own methods do all of the call, so that results and errors are
theirs: functorch's transforms, a backward that is to be differentiated or to keep its graph,
one that is not compiled yet, gradients that are not plain tensors, deterministic algorithms.
What C++ does around both stays: hooks of saved tensors, version counters, buffers that were
freed by an earlier backward, anomaly mode, gradients that are made of zeros. Compiled
autograd calls neither, but has its own of the attributes that are set here.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
from torch._functorch import config
from torch._functorch._aot_autograd.runtime_wrappers import (
    coerce_to_expected_memory_format,
)
from torch._functorch._aot_autograd.schemas import OutputType, PlainTensorMeta
from torch._functorch._aot_autograd.utils import normalize_as_list
from torch._inductor.pygraph import native
from torch._inductor.pygraph.calls.direct import boxed_replay, natives, replay


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._functorch._aot_autograd.runtime_wrappers import (
        _FirstInvocationContext,
    )
    from torch._functorch._aot_autograd.schemas import (
        MemoryFormatMeta,
        ViewAndMutationMeta,
    )


def specialize(function: type[torch.autograd.Function], disable_amp: bool) -> None:
    "``function`` is a CompiledFunction; it gets other methods if its graph is plain."
    metadata = function.metadata
    if not (_is_boxed(function.compiled_fw) and is_plain(metadata)):
        return
    node = function._backward_cls
    # Of each call, what is never anything else.
    node.symints, node.opaque_objects, node._tensors_no_vc_check = [], [], []
    function.forward = staticmethod(_forward(function.compiled_fw, metadata))
    # What the engine calls, which else looks for CompiledFunction.backward.
    node.apply = _backward(function, node.apply, disable_amp)


def _is_boxed(fn: Any) -> bool:
    return getattr(fn, "_boxed_call", False)


def is_plain(metadata: ViewAndMutationMeta) -> bool:
    "Whether all that the graph returns and saves are tensors of their own."
    return not (
        metadata.num_mutated_inp_runtime_indices
        or metadata.num_outputs_aliased
        or metadata.num_intermediate_bases
        or metadata.tokens
        or metadata.num_backward_tokens
        or metadata.is_rng_op_functionalized
        or metadata.num_graphsafe_rng_states
        or metadata.num_symints_saved_for_bw
        or metadata.num_opaque_objects_saved_for_bw
        or metadata.num_tensors_saved_with_no_vc_check
        or metadata.dynamic_saved_tensors_idxs
        or len(metadata.subclass_tangent_meta) != len(_tangents(metadata))
        or any(
            type(meta) is not PlainTensorMeta or meta.memory_format is None
            for meta in metadata.subclass_tangent_meta
        )
        or config.debug_assert
    )


def _tangents(metadata: ViewAndMutationMeta) -> list[int]:
    "The outputs whose gradients the backward takes."
    return [
        i
        for i, info in enumerate(metadata.output_info)
        if info.output_type
        in (
            OutputType.non_alias,
            OutputType.unsafe_view_alias,
            OutputType.custom_function_view,
        )
        and issubclass(info.raw_type, torch.Tensor)
        and info.requires_grad
    ]


def runtime_wrapper(
    apply: Callable[..., Any],
    general: Callable[[list[Any]], Any],
    first: _FirstInvocationContext,
    num_outputs: int,
    mutated: list[int],
    to_detach: list[int],
    disable_amp: bool,
) -> Callable[[list[Any]], Any]:
    """
    As ``general``, AOTAutograd's runtime wrapper, of a graph that needs no epilogue.

    Args:
        apply: of its CompiledFunction
        first: whether the next call is
        mutated: inputs that the graph mutates where autograd is to see it
        to_detach: inputs that never need gradients
    """
    is_grad_enabled = torch.is_grad_enabled
    set_grad_enabled = torch._C._set_grad_enabled
    is_view_replay_enabled = torch._C._is_view_replay_enabled
    set_view_replay_enabled = torch._C._set_view_replay_enabled
    increment_version = torch.autograd.graph.increment_version
    profiler = torch.autograd.profiler
    disable_autocast = torch._C._DisableAutocast

    def wrapper(args: list[Any]) -> list[Any]:
        if profiler._is_profiler_enabled or first.is_needed():
            return general(args)
        if mutated:
            increment_version([args[i] for i in mutated])
        if to_detach:
            # See Note [Detaching inputs that never need gradients]
            args = list(args)
            for i in to_detach:
                if isinstance(args[i], torch.Tensor):
                    args[i] = args[i].detach()
        # As general does: some output may need gradients in no_grad, too.
        was_grad_enabled = is_grad_enabled()
        if not was_grad_enabled:
            set_grad_enabled(True)
        was_view_replay_enabled = is_view_replay_enabled()
        set_view_replay_enabled(True)
        try:
            if disable_amp:
                with disable_autocast():
                    outs = apply(*args)
            else:
                outs = apply(*args)
        finally:
            set_view_replay_enabled(was_view_replay_enabled)
            if not was_grad_enabled:
                set_grad_enabled(False)
        if len(outs) != num_outputs:
            raise AssertionError(f"expected {num_outputs} outputs, got {len(outs)}")
        return list(outs)

    if not to_detach:
        natives[wrapper] = dict(
            # What autograd.Function.apply calls without transforms and setup_context.
            apply=super(torch.autograd.Function, apply.__self__).apply,
            first=first,
            has_transforms=torch._C._are_functorch_transforms_active,
            increment_version=increment_version,
            mutated=mutated,
            disable_amp=disable_amp,
            num_outputs=num_outputs,
            profiler=vars(profiler),
        )
    return wrapper


def saved_tensors(outputs: list[Any], start: int) -> tuple[torch.Tensor, ...]:
    "Outputs from ``start`` on. See Note [Detaching saved tensors in AOTAutograd]."
    return tuple([x.detach() if x._is_view() else x for x in outputs[start:]])


def _forward(
    compiled_fw: Callable[[list[Any]], Any], metadata: ViewAndMutationMeta
) -> Callable[..., Any]:
    "As CompiledFunction.forward, in a runtime wrapper, which has autocast disabled."
    num_outputs = metadata.num_forward_returns
    unsafe_views = tuple(metadata.unsafe_view_out_indices)
    not_differentiable = tuple(
        i for i, info in enumerate(metadata.output_info) if not info.requires_grad
    )
    run = replay(compiled_fw)
    saved = saved_tensors if native.compiled is None else native.compiled.saved

    def forward(ctx: Any, *args: Any) -> tuple[Any, ...]:
        outs = compiled_fw(list(args)) if run is None else run(*args)
        if type(outs) is not list:
            outs = normalize_as_list(outs)
        ctx.to_save = saved(outs, num_outputs)
        returned = outs[:num_outputs]
        for i in unsafe_views:
            returned[i] = torch.ops.aten._unsafe_view(returned[i], returned[i].shape)
        if not_differentiable:
            ctx.non_differentiable = tuple(
                [
                    returned[i]
                    for i in not_differentiable
                    if isinstance(returned[i], torch.Tensor)
                ]
            )
            ctx._materialize_non_diff_grads = False
        return tuple(returned)

    return forward


def _backward(
    function: type[torch.autograd.Function],
    general: Callable[..., Any],
    disable_amp: bool,
) -> Callable[..., Any]:
    "As BackwardCFunction.apply, which is ``general``, of CompiledFunction.backward."
    metadata = function.metadata
    tangents = list(
        zip(
            _tangents(metadata),
            [_layout(meta.memory_format) for meta in metadata.subclass_tangent_meta],
        )
    )
    must_not_be_deterministic = metadata.deterministic is False
    tensor = torch.Tensor
    is_grad_enabled = torch.is_grad_enabled
    keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
    transform = torch._C._functorch.peek_interpreter_stack
    is_deterministic = torch._C._get_deterministic_algorithms
    disable_autocast = torch._C._DisableAutocast
    compiled_bw = run = None

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        nonlocal compiled_bw, run
        if (
            is_grad_enabled()
            or keeps_graph()
            or transform() is not None
            or (must_not_be_deterministic and is_deterministic())
        ):
            return general(ctx, *grads)
        for i, _ in tangents:
            if type(grads[i]) is not tensor:
                return general(ctx, *grads)
        if compiled_bw is None:
            # It is compiled in a first call, or called for the first time.
            outs = general(ctx, *grads)
            if _is_boxed(function.compiled_bw):
                # In this order: autograd may run this in several threads.
                run = boxed_replay(function.compiled_bw)
                compiled_bw = function.compiled_bw
            return outs
        # While the graph runs nobody else has what was saved, nor copies of gradients.
        args = [*ctx.saved_tensors, *[lay_out(grads[i]) for i, lay_out in tangents]]
        ctx.maybe_clear_saved_tensors()
        if disable_amp:
            with disable_autocast():
                outs = run(args)
        else:
            outs = run(args)
        return tuple(normalize_as_list(outs))

    return backward


def _layout(expected: MemoryFormatMeta) -> Callable[[torch.Tensor], torch.Tensor]:
    "coerce_to_expected_memory_format"
    if expected.memory_format is not torch.contiguous_format:
        return lambda x: coerce_to_expected_memory_format(x, expected)
    # The same, in less time, if there is nothing to do.
    return torch.Tensor.contiguous
