"""
From compiled bytecode to a graph's generated code in fewer steps, for AOTAutograd, which asks
``torch._inductor.call_shortener``.

**Inference.** Where one partition is the whole graph, ``native.compiled.Direct`` replaces the layers between bytecode
and the replay. It disables Dynamo and gradients as they do, and moves the CPU values of types.partition.DirectCall.
Calls that the replay was not recorded for, or while the program captures, profiles or records the order of graphs, go
through them. Where generated code has more to do, ``native.compiled.DirectCode`` calls that.

**Training.** AOTAutograd's CompiledFunction asks in each call what its metadata said when it was compiled. A plain
graph, see is_plain, gets a forward and a backward that only ask what can change from call to call. Where the answer is
not the usual one, CompiledFunction's own methods do all of the call. Compiled autograd calls neither method.
"""

from __future__ import annotations

import functools
import types
from typing import Any, NamedTuple, TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch._dynamo.capabilities import direct_calls
from torch._dynamo.eval_frame import innermost_fn
from torch._functorch import config
from torch._functorch._aot_autograd.runtime_wrappers import (
    coerce_to_expected_memory_format,
    maybe_mark_dynamic_helper,
    SerializableCompiledFunction,
)
from torch._functorch._aot_autograd.schemas import OutputType, PlainTensorMeta
from torch._functorch._aot_autograd.utils import normalize_as_list
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.pygraph import native
from torch._inductor.pygraph.calls.unused import UnusedGradients


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._functorch._aot_autograd.runtime_wrappers import _FirstInvocationContext
    from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta

set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame
profiler = torch.autograd.profiler


class Forwarding(NamedTuple):
    """
    A function calls ``to`` with its own arguments, and returns what that returns.

    Attributes:
        num_outputs: how many outputs the function expects of ``to``, or None if it does not count them
        mutated: indices of the arguments that the graph mutates. The function increments their versions first
    """

    to: Callable[..., Any]
    num_outputs: int | None = None
    mutated: Sequence[int] = ()


forwards_to: WeakKeyDictionary[Callable[..., Any], Forwarding] = WeakKeyDictionary()

# Of AOTAutograd's runtime wrapper of a training graph: the arguments of native.compiled.Training, which does the same.
natives: WeakKeyDictionary[Callable[..., Any], dict[str, Any]] = WeakKeyDictionary()


def direct(disabled: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return what bytecode is to call instead of ``disabled``, which is ``forward`` with Dynamo disabled."""
    layer, below = layers_below(forward)
    if isinstance(below.to, CompiledFxGraph) and below.num_outputs is not None:
        return replay(below.to, disabled, below.num_outputs, below.mutated) or _code(below, disabled) or disabled
    return disabled if layer is forward else _disabled(layer)


def layers_below(fn: Any) -> tuple[Any, Forwarding]:
    """
    Return the first layer that does more than to hand its arguments on, and the first one that is not of forwards_to, with
    what one of these does for it in inference.
    """
    layer, below = fn, Forwarding(fn)
    while True:
        if isinstance(fn, SerializableCompiledFunction):
            fn = fn.compiled_fn
        elif isinstance(fn, types.FunctionType) and fn in forwards_to:
            found = forwards_to[fn]
            fn = found.to
            if below.num_outputs is None:
                below = found
        else:
            return layer, below._replace(to=fn)
        if below.num_outputs is None:
            layer = fn


def _disabled(layer: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        prior = set_eval_frame(None)
        try:
            return layer(list(args))
        finally:
            set_eval_frame(prior)

    if native.compiled is None or layer not in natives:
        return call
    return native.compiled.Training(slow=call, set_eval_frame=set_eval_frame, **natives[layer])


def replay(
    graph: Any,
    slow: Callable[..., Any] | None = None,
    num_outputs: int | None = None,
    mutated: Sequence[int] = (),
) -> Any:
    """
    Return what runs ``graph`` by its replay or else by ``slow``, None if a layer in between has work to do. ``mutated``: see
    Forwarding.
    """
    if native.compiled is None or not isinstance(graph, CompiledFxGraph):
        return None
    runner = graph.compiled_fn_runner
    direct_call = None if graph.graph_info is None else graph.graph_info.direct
    if (
        direct_call is None
        or not _runs_code(graph)
        or num_outputs not in (None, len(direct_call.outputs))
    ):
        return None
    return native.compiled.Direct(
        slow=slow or (lambda *args: graph(list(args))),
        partitions=runner.partitions,
        num_args=direct_call.num_args,
        packs=[(runner.objects[name].pack, [*args]) for name, args in direct_call.packs],
        stages=[(runner.objects[name].stage, arg) for name, arg in direct_call.stages],
        inputs=[*direct_call.inputs],
        num_outputs=direct_call.num_outputs,
        outputs=[*direct_call.outputs],
        **_layers(mutated),
    )


def _runs_code(graph: CompiledFxGraph) -> bool:
    """Return whether a graph is called by its generated code alone."""
    runner = graph.compiled_fn_runner
    return runner is not None and getattr(graph.current_callable, "__self__", None) is runner


def _layers(mutated: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of a direct call with which it does what the layers would do around the graph."""
    return dict(
        mutated=[*mutated],
        increment_version=torch.autograd.graph.increment_version,
        set_eval_frame=set_eval_frame,
        profiler=vars(profiler),
        debug=vars(torch._inductor.debug),
    )


def _code(below: Forwarding, slow: Callable[..., Any]) -> Any:
    """Return what runs the code of an inference graph or else ``slow``, None if a layer in between has work to do."""
    graph: CompiledFxGraph = below.to  # type: ignore[assignment]
    if native.compiled is None or graph.graph_info is None or not _runs_code(graph):
        return None
    return native.compiled.DirectCode(slow=slow, code=graph.current_callable, **_layers(below.mutated))


def boxed_replay(disabled: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Return ``disabled``, a graph that was called before, without the layers in front of its generated code."""
    graph = innermost_fn(disabled)
    if not isinstance(graph, CompiledFxGraph):
        return disabled
    debug = torch._inductor.debug

    def call(args: list[Any]) -> Any:
        if profiler._is_profiler_enabled or debug.RECORD_GRAPH_EXECUTION:
            return disabled(args)
        prior = set_eval_frame(None)
        try:
            return graph.current_callable(args)
        finally:
            set_eval_frame(prior)

    return call


def specialize(function: type[torch.autograd.Function], disable_amp: bool) -> None:
    "``function`` is a CompiledFunction; it gets other methods if its graph is plain."
    metadata = function.metadata
    if not (getattr(function.compiled_fw, "_boxed_call", False) and is_plain(metadata)):
        return
    node = function._backward_cls
    # Of each call, what is never anything else.
    node.opaque_objects, node._tensors_no_vc_check = [], []
    if not metadata.num_symints_saved_for_bw:
        node.symints = []
    unused = UnusedGradients(_tangents(metadata))
    function.forward = staticmethod(_forward(function.compiled_fw, metadata, unused))
    function.marks_dynamic_outputs = True
    # What the engine calls, which else looks for CompiledFunction.backward.
    node.apply = _backward(function, node.apply, disable_amp, unused)
    function._compiled_autograd_key = staticmethod(_key(function._compiled_autograd_key))


def is_plain(metadata: ViewAndMutationMeta) -> bool:
    "Whether the graph returns nothing but tensors of their own, and saves nothing but such tensors and sizes."
    return not (
        metadata.num_mutated_inp_runtime_indices
        or metadata.num_outputs_aliased
        or metadata.num_intermediate_bases
        or metadata.tokens
        or metadata.num_backward_tokens
        or metadata.is_rng_op_functionalized
        or metadata.num_graphsafe_rng_states
        or metadata.num_opaque_objects_saved_for_bw
        or metadata.num_tensors_saved_with_no_vc_check
        or len(metadata.subclass_tangent_meta) != len(_tangents(metadata))
        or any(
            type(meta) is not PlainTensorMeta or meta.memory_format is None for meta in metadata.subclass_tangent_meta
        )
        or config.debug_assert
    )


def _tangents(metadata: ViewAndMutationMeta) -> list[int]:
    "The outputs whose gradients the backward takes."
    of = OutputType
    types = (of.non_alias, of.unsafe_view_alias, of.custom_function_view)
    return [
        i
        for i, info in enumerate(metadata.output_info)
        if info.output_type in types and issubclass(info.raw_type, torch.Tensor) and info.requires_grad
    ]


def runtime_wrapper(
    apply: Callable[..., Any],
    general: Callable[[list[Any]], Any],
    first: _FirstInvocationContext,
    num_outputs: int,
    mutated: list[int],
    to_detach: list[int],
    disable_amp: bool,
    has_dynamic_outputs: bool = False,
) -> Callable[[list[Any]], Any]:
    """
    As ``general``, AOTAutograd's runtime wrapper, of a graph that needs no epilogue. The graph mutates the inputs
    ``mutated``, and autograd has to see that. Inputs in ``to_detach`` never need gradients.
    """
    if has_dynamic_outputs and not getattr(apply.__self__, "marks_dynamic_outputs", False):
        return general
    increment_version = torch.autograd.graph.increment_version
    run = _without_autocast(apply) if disable_amp else apply

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
        was_grad_enabled = torch.is_grad_enabled()
        if not was_grad_enabled:
            torch._C._set_grad_enabled(True)
        was_view_replay_enabled = torch._C._is_view_replay_enabled()
        torch._C._set_view_replay_enabled(True)
        try:
            outs = run(*args)
        finally:
            torch._C._set_view_replay_enabled(was_view_replay_enabled)
            if not was_grad_enabled:
                torch._C._set_grad_enabled(False)
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


def _without_autocast(fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with torch._C._DisableAutocast():
            return fn(*args)

    return call


def saved_tensors(outputs: list[Any], start: int) -> tuple[torch.Tensor, ...]:
    "Outputs from ``start`` on. See Note [Detaching saved tensors in AOTAutograd]."
    return tuple([x.detach() if x._is_view() else x for x in outputs[start:]])


def _key(general: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def key(ctx: Any) -> Any:
        # Compiled autograd asks for the key first. It then runs AOTAutograd's own backward, which needs zeros for each gradient.
        ctx.materialize_grads = True
        return general(ctx)

    return key


def _forward(
    compiled_fw: Callable[..., Any], metadata: ViewAndMutationMeta, unused: UnusedGradients
) -> Callable[..., Any]:
    "As CompiledFunction.forward, in a runtime wrapper, which has autocast disabled."
    num_outputs = metadata.num_forward_returns
    unsafe_views = tuple(metadata.unsafe_view_out_indices)
    not_differentiable = tuple(i for i, info in enumerate(metadata.output_info) if not info.requires_grad)
    num_symints = metadata.num_symints_saved_for_bw
    # Dimensions that vary, by index
    of_saved = [*metadata.dynamic_saved_tensors_idxs.items()]
    of_outputs = [(i, info.dynamic_dims) for i, info in enumerate(metadata.output_info) if info.dynamic_dims]
    run = replay(compiled_fw)
    saved = getattr(native.compiled, "saved", saved_tensors)

    def forward(ctx: Any, *args: Any) -> tuple[Any, ...]:
        outs = compiled_fw(list(args)) if run is None else run(*args)
        if type(outs) is not list:
            outs = normalize_as_list(outs)
        if num_symints:
            ctx.symints = outs[-num_symints:]
            outs = outs[:-num_symints]
        tensors = ctx.to_save = saved(outs, num_outputs)
        for i, dims in of_saved:
            maybe_mark_dynamic_helper(tensors[i], dims)
        returned = outs[:num_outputs]
        for i in unsafe_views:
            returned[i] = torch.ops.aten._unsafe_view(returned[i], returned[i].shape)
        if not_differentiable:
            constants = [returned[i] for i in not_differentiable]
            ctx.non_differentiable = tuple([t for t in constants if isinstance(t, torch.Tensor)])
            ctx._materialize_non_diff_grads = False
        if unused.is_served is not False:
            unused.note(ctx, returned)
        # AOTAutograd's general runtime wrapper marks them, runtime_wrapper of this module does not.
        for i, dims in of_outputs:
            maybe_mark_dynamic_helper(returned[i], dims)
        return tuple(returned)

    return forward


def _backward(
    function: type[torch.autograd.Function], general: Callable[..., Any], disable_amp: bool, unused: UnusedGradients
) -> Callable[..., Any]:
    "As BackwardCFunction.apply, which is ``general``, of CompiledFunction.backward."
    metadata = function.metadata
    # A tensor that is laid out as it should be gets the first in less time.
    layouts = [
        torch.Tensor.contiguous
        if meta.memory_format.memory_format is torch.contiguous_format
        else functools.partial(coerce_to_expected_memory_format, memory_format=meta.memory_format)
        for meta in metadata.subclass_tangent_meta
    ]
    tangents = list(zip(_tangents(metadata), layouts))
    must_not_be_deterministic = metadata.deterministic is False
    tensor = torch.Tensor
    is_grad_enabled = torch.is_grad_enabled
    keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
    transform = torch._C._functorch.peek_interpreter_stack
    is_deterministic = torch._C._get_deterministic_algorithms
    compiled_bw = run = None

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        nonlocal compiled_bw, run
        if unused.is_served:
            grads = unused.filled(ctx, grads)
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
            if getattr(function.compiled_bw, "_boxed_call", False):
                # In this order: autograd may run this in several threads.
                run = boxed_replay(function.compiled_bw)
                if disable_amp:
                    run = _without_autocast(run)
                graph = innermost_fn(function.compiled_bw)
                unused.note_backward(graph.graph_info if isinstance(graph, CompiledFxGraph) else None)
                compiled_bw = function.compiled_bw
            return outs
        # While the graph runs nobody else has what was saved, nor copies of gradients.
        args = [*ctx.symints, *ctx.saved_tensors, *[lay_out(grads[i]) for i, lay_out in tangents]]
        ctx.maybe_clear_saved_tensors()
        return tuple(normalize_as_list(run(args)))

    return backward


def note_forwarding(
    fn: Callable[..., Any], to: Callable[..., Any], num_outputs: int | None = None, mutated: Sequence[int] = ()
) -> None:
    """Note that ``fn`` does no more than Forwarding says."""
    forwards_to[fn] = Forwarding(to, num_outputs, mutated)
    direct_calls[fn] = direct
