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
- the generated code: see orders

Direct asks in each call whether the partition is a replay at present, and whether somebody
profiles or records the order of graphs, who is to see every layer. All else goes through
the layers, as do calls that the replay was not recorded for.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from typing import Any, TYPE_CHECKING

import torch
from torch._functorch._aot_autograd.runtime_wrappers import SerializableCompiledFunction
from torch._functorch._aot_autograd.utils import forwards_to
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.pygraph import native


if TYPE_CHECKING:
    from collections.abc import Callable


def direct(disabled: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    """
    What compiled bytecode is to call instead of ``disabled``, which is ``forward`` with Dynamo
    disabled; ``disabled`` itself where something between it and the partition has work to do.
    """
    if native.compiled is None or (found := graph_below(forward)) is None:
        return disabled
    graph, num_outputs = found
    call = graph.current_callable
    runner = graph.compiled_fn_runner
    if (
        runner is None
        or len(runner.partitions) != 1
        or not isinstance(call, types.MethodType)
        or call.__self__ is not runner
        or (found_orders := orders(call.__func__)) is None
    ):
        return disabled
    num_args, inputs, num_partition_outputs, outputs = found_orders
    if len(outputs) != num_outputs:
        return disabled
    return native.compiled.Direct(
        slow=disabled,
        partitions=runner.partitions,
        num_args=num_args,
        inputs=inputs,
        num_outputs=num_partition_outputs,
        outputs=outputs,
        set_eval_frame=torch._C._dynamo.eval_frame.set_eval_frame,
        profiler=vars(torch.autograd.profiler),
        debug=vars(torch._inductor.debug),
    )


def graph_below(fn: Any) -> tuple[CompiledFxGraph, int] | None:
    """
    The graph that ``fn`` hands its arguments to, through nothing but functions of forwards_to,
    and the number of outputs that one of these expects, which tells an inference graph.
    """
    num_outputs = None
    while not isinstance(fn, CompiledFxGraph):
        if isinstance(fn, SerializableCompiledFunction):
            fn = fn.compiled_fn
        elif isinstance(fn, types.FunctionType) and fn in forwards_to:
            fn, expected = forwards_to[fn]
            num_outputs = expected if num_outputs is None else num_outputs
        else:
            return None
    return None if num_outputs is None else (fn, num_outputs)


def orders(
    call: types.FunctionType,
) -> tuple[int, list[int], int, list[int]] | None:
    """
    Of Runner.call that does nothing but to call its one partition: the number of its arguments,
    which of them the partition gets, the number of the partition's outputs, and which of them it
    returns. None if it does anything else, by comparison with the code of one that does not.
    """
    try:
        source = textwrap.dedent(inspect.getsource(call))
    except OSError:
        return None
    (function,) = ast.parse(source).body
    if not isinstance(function, ast.FunctionDef):
        return None
    # Of names. The caller has the arguments anyway.
    body = [s for s in function.body if not isinstance(s, ast.Delete)]
    if len(body) != 5:
        return None
    names = [
        [n.id for n in ast.walk(s) if isinstance(n, ast.Name)]
        for s in (body[0], body[2], body[3], body[4])
    ]
    args = [n for n in names[0] if n != "args"]
    inputs = [n for n in names[1] if n != "partition0_args"]
    produced = [n for n in names[2] if n not in ("self", "partition0_args")]
    returned = names[3]
    expected = f"""
def call(self, args):
    {_tuple(args)} = args
    args.clear()
    partition0_args = [{", ".join(inputs)}]
    {_tuple(produced)} = self.partitions[0](partition0_args)
    return {_tuple(returned)}
"""
    plain = ast.FunctionDef(**{**dict(ast.iter_fields(function)), "body": body})
    if (
        not (args and produced)
        or ast.dump(plain) != ast.dump(ast.parse(expected).body[0])
        or len({*args, *produced}) != len(args) + len(produced)
        or not {*inputs} <= {*args}
        or not {*returned} <= {*produced}
    ):
        return None
    return (
        len(args),
        [args.index(n) for n in inputs],
        len(produced),
        [produced.index(n) for n in returned],
    )


def _tuple(names: list[str]) -> str:
    return f"({', '.join(names)},)" if names else "()"
