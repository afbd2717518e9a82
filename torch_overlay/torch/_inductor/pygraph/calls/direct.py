"""
From compiled bytecode to a graph's replay in one call.

Between the two, of an inference graph, lie the wrapper in which Dynamo disables itself,
AOTAutograd's, Inductor's CompiledFxGraph, and the generated code that calls its partition.
Where that partition is the whole graph, all they do in a steady call is to put arguments
in another order:

- Dynamo disables itself: so does Direct, since trees are called from a replay
- AOTAutograd: what is left out is in forwards_to, where wrappers that do nothing but
  disable gradients say so; Direct does. The number of outputs is compared once, here
- CompiledFxGraph ends what the first call began, its metrics and the caches of its
  autotuning; a graph that is replayed was called before
- the generated code: types.partition.DirectCall describes it. It may also give CPU values to
  the GPU, which Direct has the same objects do, in front of the replay

Direct asks in each call whether the partition is a replay at present, whether the program
captures the stream, and whether somebody profiles or records the order of graphs, who is to
see every layer. All else goes through the layers, as do calls that the replay was not
recorded for.
"""

from __future__ import annotations

import types
from typing import Any, TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch._dynamo.eval_frame import innermost_fn
from torch._functorch._aot_autograd.runtime_wrappers import SerializableCompiledFunction
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.pygraph import native


if TYPE_CHECKING:
    from collections.abc import Callable


# Functions that only pass on their arguments to another one, and its results: that one, and the
# number of outputs that they check, if any.
forwards_to: WeakKeyDictionary[Callable[..., Any], tuple[Callable[..., Any], int | None]] = (
    WeakKeyDictionary()
)

# Of AOTAutograd's runtime wrapper of a training graph, by training.py: the arguments of
# _replay.Training, which does the same.
natives: WeakKeyDictionary[Callable[..., Any], dict[str, Any]] = WeakKeyDictionary()


def direct(disabled: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    """
    What compiled bytecode is to call instead of ``disabled``, which is ``forward`` with Dynamo
    disabled; ``disabled`` itself where the layer below it has work to do.
    """
    layer, graph, num_outputs = layers_below(forward)
    if isinstance(graph, CompiledFxGraph) and num_outputs is not None:
        found = replay(graph, disabled, num_outputs)
        return disabled if found is None else found
    return disabled if layer is forward else _disabled(layer)


def layers_below(fn: Any) -> tuple[Any, Any, int | None]:
    """
    The first layer that does more than to hand its arguments on, the first one that is not of
    forwards_to, and the number of outputs that one of these expects, which tells an inference
    graph.
    """
    layer, num_outputs = fn, None
    while True:
        if isinstance(fn, SerializableCompiledFunction):
            fn = fn.compiled_fn
        elif isinstance(fn, types.FunctionType) and fn in forwards_to:
            fn, expected = forwards_to[fn]
            num_outputs = expected if num_outputs is None else num_outputs
        else:
            return layer, fn, num_outputs
        if num_outputs is None:
            layer = fn


def _disabled(layer: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    "``layer`` with Dynamo disabled, in a frame, or without one if it is a training graph's."
    set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame

    def call(*args: Any) -> Any:
        prior = set_eval_frame(None)
        try:
            return layer(list(args))
        finally:
            set_eval_frame(prior)

    if native.compiled is None or layer not in natives:
        return call
    return native.compiled.Training(
        slow=call, set_eval_frame=set_eval_frame, **natives[layer]
    )


def replay(
    graph: Any, slow: Callable[..., Any] | None = None, num_outputs: int | None = None
) -> Any:
    """
    What runs ``graph`` by its replay, called with its arguments, which takes the ``slow`` way
    where there is none at present. None if something between the two has work to do.
    """
    if native.compiled is None or not isinstance(graph, CompiledFxGraph):
        return None
    call = graph.current_callable
    runner = graph.compiled_fn_runner
    direct_call = None if graph.graph_info is None else graph.graph_info.direct
    if (
        runner is None
        or direct_call is None
        or not isinstance(call, types.MethodType)
        or call.__self__ is not runner
    ):
        return None
    if num_outputs is not None and len(direct_call.outputs) != num_outputs:
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
        set_eval_frame=torch._C._dynamo.eval_frame.set_eval_frame,
        profiler=vars(torch.autograd.profiler),
        debug=vars(torch._inductor.debug),
    )


def boxed_replay(disabled: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """
    As ``disabled``, a graph with Dynamo disabled that was called before, without the layers
    in front of its generated code, unless somebody looks at them.
    """
    graph = innermost_fn(disabled)
    if not isinstance(graph, CompiledFxGraph):
        return disabled
    set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame
    profiler, debug = torch.autograd.profiler, torch._inductor.debug

    def call(args: list[Any]) -> Any:
        if profiler._is_profiler_enabled or debug.RECORD_GRAPH_EXECUTION:
            return disabled(args)
        prior = set_eval_frame(None)
        try:
            return graph.current_callable(args)
        finally:
            set_eval_frame(prior)

    return call
