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
- the generated code: see orders. It may also give CPU values to the GPU, which Direct has
  the same objects do, in front of the replay

Direct asks in each call whether the partition is a replay at present, whether the program
captures the stream, and whether somebody profiles or records the order of graphs, who is to
see every layer. All else goes through the layers, as do calls that the replay was not
recorded for.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
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
    if (
        runner is None
        or len(runner.partitions) != 1
        or not isinstance(call, types.MethodType)
        or call.__self__ is not runner
        or (found_orders := orders(call.__func__)) is None
    ):
        return None
    if num_outputs is not None and len(found_orders.outputs) != num_outputs:
        return None
    return native.compiled.Direct(
        slow=slow or (lambda *args: graph(list(args))),
        partitions=runner.partitions,
        **vars(found_orders),
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


@dataclasses.dataclass
class Orders:
    """
    What Runner.call gives to its one partition, and what it returns, by index.

    Args:
        num_args: of the graph
        packs: what delivers CPU values, with the arguments that it takes
        stages: what copies a CPU value to the GPU, with the argument that it takes
        inputs: of the partition: arguments of the graph, followed by what was staged
        num_outputs: of the partition
        outputs: of the graph: which of the partition's
    """

    num_args: int
    packs: list[tuple[Any, list[int]]]
    stages: list[tuple[Any, int]]
    inputs: list[int]
    num_outputs: int
    outputs: list[int]


def orders(call: types.FunctionType) -> Orders | None:
    """
    Of Runner.call that calls its one partition, and does nothing else but to give CPU values
    among its arguments to the GPU. None if it does, by comparison with the code of one that
    does not.
    """
    try:
        source = textwrap.dedent(inspect.getsource(call))
    except OSError:
        return None
    (function,) = ast.parse(source).body
    if not isinstance(function, ast.FunctionDef):
        return None
    body = _without_deletions(function.body)
    if len(body) < 5:
        return None
    unpack, clear, *cpu_values, prepare, run, give = body
    args = [n for n in _names(unpack) if n != "args"]
    inputs = [n for n in _names(prepare) if n != "partition0_args"]
    produced = [n for n in _names(run) if n not in ("self", "partition0_args")]
    returned = _names(give)
    expected = f"""
def call(self, args):
    {_tuple(args)} = args
    args.clear()
    partition0_args = [{", ".join(inputs)}]
    {_tuple(produced)} = self.partitions[0](partition0_args)
    return {_tuple(returned)}
"""
    body = [unpack, clear, prepare, run, give]
    plain = ast.FunctionDef(**{**dict(ast.iter_fields(function)), "body": body})
    if not (args and produced) or not _is_code(plain, expected):
        return None

    # Of each name, the place among arguments and what is staged.
    places = {n: i for i, n in enumerate(args)}
    if len(places) != len(args):
        return None
    packs, stages = [], []
    for statement in cpu_values:
        if (renamed := _renamed(statement)) is not None:
            for new, old in renamed:
                if new in places or old not in places:
                    return None
                places[new] = places[old]
        elif isinstance(statement, ast.Expr) and _names(statement):
            owner, *values = _names(statement)
            pack = getattr(call.__globals__.get(owner), "pack", None)
            if (
                not _is_code(statement, f"{owner}.pack([{', '.join(values)}])")
                or owner in places
                or not isinstance(pack, native.compiled.Pack)
                or not {*values} <= {*args}
            ):
                return None
            packs.append((pack, [places[n] for n in values]))
        elif isinstance(statement, ast.Assign) and len(_names(statement)) == 3:
            result, value, owner = _names(statement)
            stage = getattr(call.__globals__.get(owner), "stage", None)
            if (
                not _is_code(statement, f"{result} = {owner}.stage({value})")
                or owner in places
                or result in places
                or not isinstance(stage, native.compiled.Stage)
                or value not in args
            ):
                return None
            places[result] = len(args) + len(stages)
            stages.append((stage, places[value]))
        else:
            return None
    if (
        len({*produced}) != len(produced)
        or not {*inputs} <= {*places}
        or not {*returned} <= {*produced}
    ):
        return None
    return Orders(
        num_args=len(args),
        packs=packs,
        stages=stages,
        inputs=[places[n] for n in inputs],
        num_outputs=len(produced),
        outputs=[produced.index(n) for n in returned],
    )


def _without_deletions(body: list[ast.stmt]) -> list[ast.stmt]:
    "Of names, which no later statement has. The caller has the arguments anyway."
    return [
        s
        for s in body
        if not isinstance(s, ast.Delete)
        or not all(isinstance(t, ast.Name) for t in s.targets)
    ]


def _renamed(statement: ast.stmt) -> list[tuple[str, str]] | None:
    "The new and the old names, of a block for one device that does nothing else."
    if not isinstance(statement, ast.With):
        return None
    set_device, *body = _without_deletions(statement.body) or [ast.Pass()]
    pairs = [_names(s) for s in body]
    if any(len(pair) != 2 for pair in pairs):
        return None
    constants = [n.value for n in ast.walk(set_device) if isinstance(n, ast.Constant)]
    if len(constants) != 1 or type(constants[0]) is not int:
        return None
    expected = [
        f"with torch.cuda._DeviceGuard({constants[0]}):",
        f"    torch.cuda.set_device({constants[0]})",
        *(f"    {new} = {old}" for new, old in pairs),
    ]
    plain = ast.With(items=statement.items, body=[set_device, *body])
    return pairs if _is_code(plain, "\n".join(expected)) else None


def _names(statement: ast.stmt) -> list[str]:
    return [n.id for n in ast.walk(statement) if isinstance(n, ast.Name)]


def _is_code(statement: ast.stmt, source: str) -> bool:
    return ast.dump(statement) == ast.dump(ast.parse(source).body[0])


def _tuple(names: list[str]) -> str:
    return f"({', '.join(names)},)" if names else "()"
