"""Random small programs that mix GPU and CPU values, and what can be observed of them.

:func:`programs` is a hypothesis strategy for a :class:`Program`: a module with arguments,
attributes and closures, called several times with values that change in between. A program is
valid in eager by construction, because each statement is run on meta tensors when it is drawn,
and deterministic. ``Program.source()`` is a script that needs only torch; what a test runs is that
very script's functions.

:func:`observe` calls a program and keeps everything a caller could see: values, dtypes, devices,
shapes, strides, which tensors share storage, what was mutated, and the type of an exception.
:func:`difference` names the first thing in which two observations differ.

Values are small whole numbers, which every dtype represents. As long as only operations are applied
that keep them so, the result is exact in any order of evaluation and has to be equal bit for
bit; from the first other operation on, a bound on the rounding error is carried along, which is the
tolerance of the comparison. Nothing discrete (a comparison, a branch, a cast to integers) is
computed from values that are not exact.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import linecache
import math
import random
import re
import types
from typing import Any, TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st

import torch


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    Draw = Callable[[st.SearchStrategy[Any]], Any]
    Compile = Callable[[torch.nn.Module], Callable[..., Any]]

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32)
# The largest whole number up to which all are representable.
EXACT_UP_TO = {
    torch.float64: 2.0**53,
    torch.float32: 2.0**24,
    torch.float16: 2.0**11,
    torch.bfloat16: 2.0**8,
    torch.int64: 2.0**62,
    torch.int32: 2.0**31 - 1,
    torch.bool: 1.0,
    float: 2.0**53,
    int: 2.0**62,
    bool: 1.0,
}
# What fill() of the script draws, and what is assumed of values that outlive a call: those may
# have been clamped to STATE_BOUND by an earlier one.
FILL_BOUND = 4
STATE_BOUND = 8.0
CALLS_FORCED = 6
# Until the choice is made and for some calls after.
CALLS_SELECTING = 60


@dataclasses.dataclass
class Value:
    """What is known of a variable while a program is drawn.

    ``meta`` is a meta tensor with the dtype, strides and aliasing of the value, or a Python or
    NumPy scalar. ``error`` bounds how far two correct evaluations may differ; 0 for whole numbers
    computed exactly. ``origin`` says where a CPU value came from: "input", "constructed",
    "computed" or "copied". ``index``: all elements are in [0, index). ``persists``: the storage
    outlives a call.
    """

    name: str
    meta: Any
    device: str | None
    bound: float
    error: float = 0.0
    origin: str = "input"
    index: int = 0
    unique: bool = False
    persists: bool = False
    caller_owns: bool = False

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.meta, torch.Tensor)

    @property
    def dtype(self) -> Any:
        if self.is_tensor:
            return self.meta.dtype
        return type(self.meta.item()) if isinstance(self.meta, np.generic) else type(self.meta)

    @property
    def is_numpy(self) -> bool:
        return isinstance(self.meta, np.generic)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.meta.shape) if self.is_tensor else ()

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS or self.dtype is float

    @property
    def is_bool(self) -> bool:
        return self.dtype in (torch.bool, bool)

    @property
    def is_number(self) -> bool:
        return not self.is_bool and not self.index

    @property
    def is_cpu_scalar(self) -> bool:
        return self.is_numpy or (self.is_tensor and self.device == "cpu" and self.meta.dim() == 0)

    @property
    def storage(self) -> Any:
        return self.meta.untyped_storage()._cdata if self.is_tensor else None

    @property
    def is_dense(self) -> bool:
        """No two elements share memory."""
        return self.meta.numel() < 2 or torch._debug_has_internal_overlap(self.meta) == 0


@dataclasses.dataclass(frozen=True)
class Line:
    """A statement. ``storages`` numbers those of ``target`` and ``uses``; ``writes`` is the one it
    writes to. ``effect``: the caller can see it, whatever is returned."""

    code: str
    target: str | None
    uses: tuple[str, ...]
    storages: tuple[int, ...]
    writes: int | None = None
    effect: bool = False
    features: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Input:
    """``where``: "argument", which is new in each call, "kept argument", "closure", "attribute" or
    "buffer". ``change`` is run between calls. ``error``: of what the program leaves in it."""

    name: str
    where: str
    code: str
    change: str | None = None
    error: float = 0.0
    features: frozenset[str] = frozenset()

    @property
    def is_argument(self) -> bool:
        return "argument" in self.where

    @property
    def is_kept(self) -> bool:
        return self.where in ("kept argument", "closure")

    @property
    def is_attribute(self) -> bool:
        return self.where in ("attribute", "buffer")


@dataclasses.dataclass(frozen=True)
class Output:
    """``held``: looked at again after the last call."""

    name: str
    storage: int | None
    error: float = 0.0
    held: bool = False
    features: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Program:
    """See the module. ``feeds`` are names of outputs and of the arguments they are in the next call."""

    inputs: tuple[Input, ...]
    lines: tuple[Line, ...]
    outputs: tuple[Output, ...]
    feeds: tuple[tuple[str, str], ...] = ()
    backward: bool = False
    no_grad: bool = False
    # Leaves the choice to PyGraph, and calls until it is made and for some calls after.
    selecting: bool = False

    @property
    def arguments(self) -> list[str]:
        return [i.name for i in self.inputs if i.is_argument]

    @property
    def attributes(self) -> list[str]:
        return [i.name for i in self.inputs if i.is_attribute]

    @property
    def calls(self) -> int:
        return CALLS_SELECTING if self.selecting else CALLS_FORCED

    @property
    def options(self) -> dict[str, Any]:
        return {"pygraph": True, **({} if self.selecting else {"pygraph_force": "node_update"})}

    @property
    def features(self) -> frozenset[str]:
        """Which of :data:`FEATURES` it has."""
        called: dict[str, Any] = {
            "backward": self.backward,
            "no_grad": self.no_grad,
            "calls: selecting": self.selecting,
        }
        called |= {"calls: feed": self.feeds, "calls: hold": any(o.held for o in self.outputs)}
        found = {name for name, has in called.items() if has}
        storages = [o.storage for o in self.outputs if o.storage is not None]
        if len(set(storages)) < len(storages):
            found.add("return: alias")
        return frozenset(found.union(*(part.features for part in (*self.inputs, *self.lines, *self.outputs))))

    def pruned(self) -> Program:
        """Without statements and inputs of which the caller sees nothing."""
        names = {o.name for o in self.outputs}
        storages = {o.storage for o in self.outputs}
        lines = []
        for line in reversed(self.lines):
            if line.effect or line.target in names or (line.writes is not None and line.writes in storages):
                names.update(line.uses)
                storages.update(line.storages)
                lines.append(line)
        code = "\n".join([*names, *(line.code for line in lines)])
        inputs: list[Input] = []
        for i in reversed(self.inputs):
            # One argument may be a view of another.
            if re.search(rf"\b{i.name}\b", "\n".join([code, *(other.code for other in inputs)])):
                inputs.append(i)
        kept = {i.name for i in inputs} | {o.name for o in self.outputs}
        feeds = tuple(pair for pair in self.feeds if kept.issuperset(pair))
        return dataclasses.replace(self, inputs=tuple(inputs[::-1]), lines=tuple(lines[::-1]), feeds=feeds)

    def simpler(self) -> Iterator[Program]:
        """Valid programs with one thing less, those that lose most first."""
        replace = dataclasses.replace
        for name in ("backward", "selecting", "no_grad"):
            if getattr(self, name):
                yield replace(self, **{name: False})
        for n in range(len(self.outputs)):
            if len(self.outputs) > 1:
                yield replace(self, outputs=self.outputs[:n] + self.outputs[n + 1 :]).pruned()
        used = {name for line in self.lines for name in line.uses} | {o.name for o in self.outputs}
        for n, line in enumerate(self.lines):
            # What is written is assumed to grow by it, never to shrink: bounds stay valid.
            if line.target is None or line.target not in used:
                yield replace(self, lines=self.lines[:n] + self.lines[n + 1 :]).pruned()
        if self.feeds:
            yield replace(self, feeds=())
        for n, o in enumerate(self.outputs):
            if o.held:
                yield replace(self, outputs=(*self.outputs[:n], replace(o, held=False), *self.outputs[n + 1 :]))
        for n, i in enumerate(self.inputs):
            if i.change:
                features = frozenset(f for f in i.features if not f.startswith("between"))
                less = replace(i, change=None, features=features)
                yield replace(self, inputs=(*self.inputs[:n], less, *self.inputs[n + 1 :]))

    def source(self, gpu: str = "cuda", check: bool = True) -> str:
        """A script. ``gpu`` stands in for "cuda"; without ``check``, only its functions."""
        arguments = ", ".join(self.arguments)
        closures = [f"{i.name} = kept[{i.name!r}]" for i in self.inputs if i.where == "closure"]
        returned = "".join(f"{o.name}, " for o in self.outputs).strip()
        statements = [*(line.code for line in self.lines), f"return ({returned})"]
        code = "\n".join(statements)
        lines = [
            "import random",
            "",
            "import numpy as np",
            "import torch",
            "",
            *(text for kind, text in CUSTOM_OPERATORS.items() if f"pygraph_programs.{kind}(" in code),
            "",
            "def fill(shape, dtype, device, low=-4, high=4):",
            "    return torch.randint(low, high + 1, shape).to(device, dtype)",
            "",
            "",
            "def make():",
            "    kept = {" + ", ".join(f"{i.name!r}: {i.code}" for i in self.inputs if i.is_kept) + "}",
            *(f"    {line}" for line in closures),
            "",
            "    class Model(torch.nn.Module):",
            "        def __init__(self):",
            "            super().__init__()",
            *(f'            self.register_buffer("{i.name}", {i.code})' for i in self.inputs if i.where == "buffer"),
            *(f"            self.{i.name} = {i.code}" for i in self.inputs if i.where == "attribute"),
            "",
            f"        def forward({', '.join(['self', *self.arguments])}):",
            *(f"            {line}" for line in statements),
            "",
            "    return Model(), kept",
            "",
            "",
            "def arguments(kept):",
            *(f"    {i.name} = {i.code}" for i in self.inputs if i.where == "argument"),
            *(f"    {i.name} = kept[{i.name!r}]" for i in self.inputs if i.where == "kept argument"),
            f"    return [{arguments}]",
            "",
            "",
            "def between(model, kept):",
            *(f"    {i.change}" for i in self.inputs if i.change),
            "    return",
            "",
        ]
        if check:
            lines += self._check()
        return _for_device("\n".join(lines) + "\n", gpu)

    def _check(self) -> list[str]:
        call = ["outputs = function(*args)"]
        if self.no_grad:
            call = ["with torch.no_grad():", f"    {call[0]}"]
        watched = ["*args", "*outputs", "*kept.values()", *(f"model.{name}" for name in self.attributes)]
        body = [
            "seed(call + 1)",
            *(["if call:", "    between(model, kept)"] if any(i.change for i in self.inputs) else []),
            "args = arguments(kept)",
            *(line for o, a in self.feed_positions() for line in ("if call:", f"    args[{a}] = outputs[{o}]")),
            *call,
            f"seen += look(call, [{', '.join(watched)}])",
        ]
        if self.backward:
            body += [
                "roots = [t for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]",
                "torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])",
                "seen += look(call, [t.grad for t in args if isinstance(t, torch.Tensor) and t.grad is not None])",
            ]
        if hold := [n for n, o in enumerate(self.outputs) if o.held]:
            body.append(f"held += [outputs[i] for i in {hold}]")
        return [
            *LOOK.splitlines(),
            "",
            "",
            "def run(compile):",
            "    torch._dynamo.reset()",
            "    seed(0)",
            "    model, kept = make()",
            "    function = compile(model)",
            "    seen, held = [], []",
            f"    for call in range({self.calls}):",
            *(f"        {line}" for line in body),
            '    return seen + look("held", held)',
            "",
            *COMPARE.format(options=self.options).splitlines(),
        ]

    def feed_positions(self) -> list[tuple[int, int]]:
        names = [o.name for o in self.outputs]
        return [(names.index(o), self.arguments.index(a)) for o, a in self.feeds]


# In a printed script: the first call and thing in which eager and compiled differ, if any.
LOOK = """
def look(call, things):
    storages = [t.untyped_storage()._cdata if isinstance(t, torch.Tensor) else 0 for t in things]
    copies = [t.detach().clone() if isinstance(t, torch.Tensor) else t for t in things]
    return [(call, i, storages.index(storages[i]), t) for i, t in enumerate(copies)]


def seed(value):
    torch.manual_seed(value)
    random.seed(value)
"""
COMPARE = """
if __name__ == "__main__":
    expected = run(lambda model: model)
    actual = run(lambda model: torch.compile(model, options={options}))
    for (call, i, storage, e), (_, _, actual_storage, a) in zip(expected, actual):
        where = f"call {{call}}, thing {{i}}: "
        torch.testing.assert_close(a, e, check_stride=True, msg=lambda m: where + m)
        if storage != actual_storage:
            raise AssertionError(f"{{where}}shares storage with {{actual_storage}}, not {{storage}}")
    print("equal")
"""

# Names that programs(without=...) takes.
FEATURES = {
    "scalar: argument": "a 0-d CPU tensor of the caller's read by GPU code, or copied there",
    "scalar: NumPy": "a NumPy scalar read by GPU code, or copied there",
    "scalar: constructed": "a 0-d CPU tensor made in the program read by GPU code, or copied there",
    "scalar: computed": "a 0-d CPU tensor computed in the program read by GPU code, or copied there",
    "scalar: copied": "a 0-d CPU tensor copied from the GPU read by GPU code, or copied there",
    "scalar: dtypes": "CPU scalars of several dtypes read by GPU code",
    "scalar: NumPy promotes": "a NumPy scalar of a wider category than the tensor's",
    "Python scalar": "a Python number of the caller's",
    "index: argument": "a GPU tensor indexed by a CPU tensor of the caller's",
    "index: constructed": "a GPU tensor indexed by a CPU tensor made in the program",
    "index: computed": "a GPU tensor indexed by a CPU tensor computed in the program",
    "index: copied": "a GPU tensor indexed by a CPU tensor copied from the GPU",
    "index: scalar": "a 0-d CPU integer as an index",
    "index: put": "elements of an indexed tensor set",
    "constructor: CPU": "a tensor made on the CPU in the program",
    "constructor: GPU": "a tensor made on the GPU in the program",
    "constructor: scalar": "a tensor made of a Python or NumPy scalar of the caller's",
    "copy: to the GPU": "a CPU tensor copied to the GPU",
    "copy: to the CPU": "a GPU tensor copied to the CPU",
    "copy: in place": "copy_ from the other device",
    "CPU operation": "CPU tensors of at least one dimension in an operation",
    "return: input": "an output that is an input",
    "return: view of input": "an output that shares an input's storage",
    "return: view": "an output that is a view of a tensor of the program's own",
    "return: alias": "two outputs that share storage",
    "return: CPU input": "an output on the CPU that is or shares an input",
    "return: CPU constructed": "an output on the CPU, made in the program",
    "return: CPU computed": "an output on the CPU, computed in the program",
    "return: CPU copied": "an output on the CPU, copied from the GPU",
    "return: scalar": "a Python scalar returned",
    "mutation: argument": "an argument on the GPU written to",
    "mutation: CPU argument": "an argument on the CPU written to",
    "mutation: attribute": "an attribute, buffer or closure on the GPU written to",
    "mutation: CPU attribute": "an attribute, buffer or closure on the CPU written to",
    "mutation: float64 scalar": "a 0-d float64 of the caller's on the CPU written to",
    "mutation: intermediate": "a tensor of the program's own written to",
    "mutation: rebound attribute": "an attribute set to another tensor",
    "item": "a tensor's value read by the program: .item(), a branch",
    "graph break": "torch._dynamo.graph_break()",
    "custom operator": "an operator that Inductor knows nothing of",
    "custom operator: scalar": "an operator that Inductor knows nothing of on a 0-d CPU tensor",
    "custom operator: unsafe": "one that is tagged cudagraph_unsafe",
    "layout: transposed": "an input that is not contiguous",
    "layout: expanded": "an input with an expanded dimension",
    "layout: sliced": "an input with gaps",
    "layout: offset": "an input that begins within its storage, misaligned",
    "layout: alias": "an argument that is a view of another",
    "between: in place": "an attribute or closure written to between calls",
    "between: NumPy": "a CPU tensor changed through NumPy between calls",
    "between: rebound": "an attribute set to another value between calls",
    "calls: hold": "outputs are looked at again after the last call",
    "calls: feed": "an output is an argument of the next call",
    "calls: selecting": "enough calls for a choice to be measured",
    "backward": "gradients of all outputs",
    "backward: CPU": "gradients of arguments on the CPU",
    "no_grad": "under torch.no_grad()",
    "matmul": "a matrix product",
    "large": "numbers that only the widest dtypes represent",
}

CUSTOM_OPERATORS = {
    "double": """@torch.library.custom_op("pygraph_programs::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return torch.mul(x, 2, out=torch.empty_like(x))


double.register_fake(torch.empty_like)
""",
    "unsafe": """@torch.library.custom_op(
    "pygraph_programs::unsafe", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def unsafe(x: torch.Tensor) -> torch.Tensor:
    return torch.mul(x, 2, out=torch.empty_like(x))


unsafe.register_fake(torch.empty_like)
""",
    "bump": """@torch.library.custom_op("pygraph_programs::bump", mutates_args=("x",))
def bump(x: torch.Tensor) -> None:
    x.neg_()


bump.register_fake(lambda x: None)
""",
}


def _for_device(source: str, gpu: str) -> str:
    if gpu == "cuda":
        return source
    source = source.replace('"cuda"', f'"{gpu}"')
    return source.replace(".cuda()", f'.to("{gpu}")')


class _Builder:
    """Draws a program a statement at a time. A statement that would be invalid, or need a feature
    that is excluded, is left out."""

    def __init__(self, draw: Draw, without: Collection[str], backward: bool) -> None:
        self.draw = draw
        self.without = frozenset(without)
        self.backward = backward
        self.values: list[Value] = []
        self.inputs: list[Value] = []
        self.lines: list[Line] = []
        self.program_inputs: dict[str, Input] = {}
        self.scalar_dtypes: set[Any] = set()
        self.names = itertools.count()
        rows = draw(st.sampled_from((3, 1, 4)))
        columns = draw(st.sampled_from((4, 5, 16)))
        self.shapes = ((rows, columns), (columns,), (rows, 1), (columns, rows), (rows,))
        # Their memory is the identity of a meta storage.
        self.meta_tensors: list[torch.Tensor] = []

    def choose(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def chance(self, percent: int) -> bool:
        return self.draw(st.integers(0, 99)) >= 100 - percent

    def pick(self, condition: Callable[[Value], bool]) -> Value | None:
        candidates = [v for v in self.values if condition(v)]
        # The latest twice: chains are worth more than trees.
        return self.draw(st.sampled_from([*candidates, *candidates[-2:]])) if candidates else None

    def repeat(self, kinds: Sequence[str], least: int, most: int) -> None:
        """Draws some of ``kinds``, each in a span of its own, which shrinking makes "nothing" of."""
        one = st.sampled_from(("nothing", *kinds)).map(lambda kind: getattr(self, kind)())
        for _ in range(self.draw(st.integers(least, most))):
            self.draw(one)

    def nothing(self) -> None:
        pass

    def allowed(self, features: Collection[str]) -> bool:
        if unknown := set(features) - FEATURES.keys():
            raise ValueError(f"not in FEATURES: {unknown}")
        return self.without.isdisjoint(features)

    # inputs

    def tensor_input(self) -> None:
        device = self.choose("cuda", "cpu")
        scalar = self.chance(50 if device == "cpu" else 5)
        self.add_tensor(device, () if scalar else self.choose(*self.shapes))

    def index_input(self) -> None:
        self.add_tensor(self.choose("cpu", "cuda"), self.choose(self.shapes[1], self.shapes[4], ()), index=True)

    def cpu_scalar_input(self) -> None:
        if self.chance(60):
            self.add_tensor("cpu", ())
        else:
            self.scalar_input()

    def add_tensor(self, device: str, shape: tuple[int, ...], index: bool = False) -> None:
        dtype = self.choose(torch.float32, torch.int64, *FLOATS[1:], torch.int32, torch.bool)
        features = set()
        bound = STATE_BOUND
        low_high = ""
        limit = 0
        unique = False
        if index:
            limit = self.choose(*self.shapes[0])
            dtype = self.choose(torch.int64, torch.int64, torch.int32)
            low_high, bound = f", 0, {limit - 1}", limit - 1
        elif dtype is torch.bool:
            low_high, bound = ", 0, 1", 1.0
        elif shape == () and dtype in (torch.float64, torch.int64) and self.chance(20):
            largest = 2**49 if dtype.is_floating_point else 2**58
            features.add("large")
            low_high, bound = f", {-largest}, {largest}", float(largest)
        make = lambda *s: f'fill({s}, {dtype}, "{device}"{low_high})'  # noqa: E731
        code = make(*shape)
        if index and shape and shape[0] <= limit and self.chance(50):
            unique = True
            code = f'torch.randperm({limit})[:{shape[0]}].to("{device}", {dtype})'
        elif shape and not index and not self.backward:
            layout = self.choose("", "", "transposed", "expanded", "sliced", "offset")
            if layout == "transposed" and len(shape) == 2:
                code = f"{make(*shape[::-1])}.t()"
            elif layout == "expanded":
                code = f"{make(1, *shape[1:])}.expand{shape}"
            elif layout == "sliced":
                code = f"{make(*shape[:-1], shape[-1] * 2)}[..., ::2]"
            elif layout == "offset":
                code = f"{make(math.prod(shape) + 1)}[1:].view{shape}"
            else:
                layout = ""
            if layout:
                features.add(f"layout: {layout}")
        where = self.choose("argument", "argument", "attribute", "buffer", "closure", "kept argument")
        if where in ("attribute", "buffer") and "large" in features:
            where = "argument"
        if self.backward and dtype in (torch.float32, torch.float64) and where == "argument":
            code += ".requires_grad_()"
            features |= {"backward: CPU"} if device == "cpu" else set()
        if self.allowed(features):
            self.add_input(where, code, features, device=device, bound=bound, index=limit, unique=unique)

    def alias_input(self) -> None:
        """Another argument that is a view of an argument."""
        if self.backward or not self.allowed(["layout: alias"]):
            return
        base = self.pick(lambda v: v.is_tensor and v.name.startswith("x") and len(v.shape) > 0 and not v.index)
        if base is None or base.persists:
            return
        code = base.name + self.choose("", ".t()" if len(base.shape) == 2 else "", "[1:]" if base.shape[0] > 1 else "")
        self.add_input("argument", code, {"layout: alias"}, device=base.device, bound=base.bound)

    def scalar_input(self) -> None:
        kind = self.choose("float", "int", "bool", "np.float64", "np.float32", "np.int64", "np.int32")
        where = self.choose("argument", "attribute")
        large = self.chance(10) and kind in ("float", "int", "np.float64", "np.int64") and self.allowed(["large"])
        bound = (2.0**49 if "float" in kind else 2.0**58) if large else STATE_BOUND
        low, high = (-int(bound), int(bound)) if large else (-4, 4)
        if kind == "bool":
            low, high, bound = 0, 1, 1.0
        index = 0
        if kind == "int" and not large and self.chance(30):
            index = min(s for s in self.shapes[0])
            low, high, bound = 0, index - 1, index - 1
        code = f"{kind}(random.randint({low}, {high}))"
        self.add_input(where, code, {"large"} if large else set(), device=None, bound=bound, index=index)

    def add_input(self, where: str, code: str, features: Collection[str], **known: Any) -> None:
        prefix = {"argument": "x", "kept argument": "x", "closure": "c", "attribute": "a", "buffer": "b"}[where]
        name = f"{prefix}{next(self.names)}"
        persists = where != "argument"
        value = Value(
            f"self.{name}" if prefix in "ab" else name,
            self.evaluate(code, {v.name: v for v in self.values}),
            persists=persists,
            caller_owns=True,
            **known,
        )
        # What outlives a call is changed between calls; arguments are new in each.
        changes = []
        path = f"model.{name}" if prefix in "ab" else f"kept[{name!r}]"
        if persists and value.is_tensor:
            if value.is_dense:
                changes.append(("between: in place", f"{path}.copy_({code})"))
                if value.device == "cpu" and value.dtype is not torch.bfloat16:
                    changes.append(("between: NumPy", f"{path}.numpy()[...] = {code}.numpy()"))
            if where == "attribute":
                changes.append(("between: rebound", f"{path} = {code}"))
        elif persists and value.is_numpy:
            # A new value of a Python attribute would be a recompilation.
            changes.append(("between: rebound", f"{path} = {code}"))
        changes = [(feature, line) for feature, line in changes if self.allowed([feature])]
        change = None
        if changes and self.chance(70):
            feature, change = self.choose(*changes)
            features = {*features, feature}
        self.program_inputs[name] = Input(name, where, code, change, features=frozenset(features))
        self.values.append(value)
        if value.is_tensor:
            # As they were at the start: an attribute may be bound to another.
            self.inputs.append(dataclasses.replace(value))

    # statements

    def evaluate(self, code: str, values: dict[str, Value]) -> Any:
        """The result on the meta device. Copies between devices are ``copied`` in the code."""
        attributes = {n.removeprefix("self."): v.meta for n, v in values.items() if n.startswith("self.")}
        names = {"torch": torch, "np": np, "fill": _meta_fill, "self": types.SimpleNamespace(**attributes)}
        names |= {n: v.meta for n, v in values.items() if not n.startswith("self.")}
        source = code.replace('"cuda"', '"meta"').replace('"cpu"', '"meta"')
        # A scalar stands for all that may be drawn; 0 is valid as an index too.
        source = re.sub(r"random\.randint\([^()]*\)", "0", source)
        result = eval(source, names)  # noqa: S307
        if isinstance(result, torch.Tensor):
            result = result.to("meta")
            self.meta_tensors.append(result)
        return result

    def emit(
        self,
        code: str,
        *operands: Value,
        bound: float,
        error: float = 0.0,
        device: str | None = None,
        meta: str | None = None,
        features: Collection[str] = (),
        origin: str | None = None,
        index: int = 0,
        unique: bool = False,
    ) -> Value | None:
        """Adds ``name = code``; ``meta`` is what to run on meta tensors in its place."""
        names = [v.name for v in operands]
        found = {*features, *self._scalar_features(operands, device)}
        if not self.allowed(found):
            return None
        try:
            result = self.evaluate((meta or code).format(*names), {v.name: v for v in operands})
        except (RuntimeError, IndexError, TypeError, ValueError, OverflowError):
            return None
        tensors = [v for v in operands if v.is_tensor]
        if device is None and isinstance(result, torch.Tensor):
            device = "cuda" if any(v.device == "cuda" for v in tensors) else "cpu"
        value = Value(f"v{next(self.names)}", result, device, bound, error, index=index, unique=unique)
        if not isinstance(result, torch.Tensor):
            value.device = None
        owner = next((v for v in self.values if v.storage is not None and v.storage == value.storage), None)
        if owner is not None:
            value.persists, value.caller_owns = owner.persists, owner.caller_owns
        value.origin = origin or (owner.origin if owner else "computed")
        if device == "cpu" and tensors and origin is None and owner is None and any(v.shape for v in tensors):
            found.add("CPU operation")
        if not self._settle(value, operands) or not self.allowed(found):
            return None
        self.scalar_dtypes |= {v.meta.dtype for v in operands if v.is_cpu_scalar and device == "cuda"}
        self.values.append(value)
        self._line(f"{value.name} = {code.format(*names)}", value, operands, features=found)
        return value

    def _line(
        self,
        code: str,
        target: Value | None,
        operands: Sequence[Value],
        written: Value | None = None,
        features: Collection[str] = (),
    ) -> None:
        self.lines.append(
            Line(
                code,
                target.name if target else None,
                tuple(v.name for v in operands),
                tuple(v.storage for v in (*operands, *([target] if target else [])) if v.storage is not None),
                written.storage if written else None,
                written is not None and written.caller_owns,
                frozenset(features),
            )
        )

    def _scalar_features(self, operands: Sequence[Value], device: str | None = None) -> Iterator[str]:
        if any(not v.is_tensor and not v.is_numpy for v in operands):
            yield "Python scalar"
        if device != "cuda" and not any(v.is_tensor and v.device == "cuda" for v in operands):
            return
        dtypes = set(self.scalar_dtypes)
        for v in operands:
            if v.is_cpu_scalar:
                origin = "argument" if v.origin == "input" else v.origin
                yield "scalar: NumPy" if v.is_numpy else f"scalar: {origin}"
                dtypes.add(v.meta.dtype)
        if len(dtypes) > 1:
            yield "scalar: dtypes"

    def _settle(self, value: Value, operands: Sequence[Value]) -> bool:
        """Adds the rounding of a result in its dtype. False: it may overflow."""
        if isinstance(value.meta, (list, tuple)):
            return True
        limit = EXACT_UP_TO.get(value.dtype)
        if limit is None:
            return False
        if not value.is_float:
            # A discrete function of inexact values is no function at all.
            return value.bound <= limit and not value.error
        largest = torch.finfo(value.dtype).max / 4 if value.is_tensor else 1e300
        if max([value.bound, *(v.bound for v in operands)]) > largest:
            return False
        if value.error or max([value.bound, *(v.bound for v in operands)]) > limit:
            value.error += max([value.bound, *(v.bound for v in operands)]) / limit * 4
        return True

    # Each of these draws one statement.

    def unary(self) -> None:
        v = self.pick(lambda v: v.is_tensor and not v.index)
        if v is None:
            return
        exact = {
            "-{0}": v.bound,
            "{0}.abs()": v.bound,
            "{0}.relu()": v.bound,
            "{0}.clamp(-8, 8)": min(v.bound, STATE_BOUND),
            "{0} * {0}": v.bound**2,
        }
        smooth = {"{0}.sin()": 1.0, "{0}.tanh()": 1.0, "{0}.sigmoid()": 1.0}
        if v.is_bool:
            self.emit("{0}.logical_not()", v, bound=1.0)
            return
        code = self.choose(*exact, *smooth)
        if code in exact:
            if self.backward and v.error:
                return
            self.emit(code, v, bound=exact[code], error=v.error * (2 * v.bound if "*" in code else 1))
        elif not v.is_float or v.bound <= 1e4:
            limit = EXACT_UP_TO[v.dtype if v.is_float else torch.float32]
            self.emit(code, v, bound=1.0, error=v.error + 8 / limit)

    def binary(self) -> None:
        a = self.pick(lambda v: v.is_tensor and v.is_number)
        scalar = self.chance(60)
        if a is not None and scalar:
            self.cpu_scalar()
        b = a and self.pick(
            lambda v: (
                v.is_number and (not v.is_tensor or _mixes(a, v)) and (not scalar or v.is_cpu_scalar or not v.is_tensor)
            )
        )
        if a is None or b is None:
            return
        if a.device == "cpu" and b.device == "cuda":
            a, b = b, a
        features = ["scalar: NumPy promotes"] if _numpy_promotes(a, b) else []
        operator = self.choose("+", "*", "-", "maximum", "/", ">", "==", "where")
        if operator in "+-":
            left = not b.is_numpy and self.chance(30)
            code = f"{{1}} {operator} {{0}}" if left else f"{{0}} {operator} {{1}}"
            self.emit(code, a, b, bound=a.bound + b.bound, error=a.error + b.error, features=features)
        elif operator == "*":
            error = a.error * b.bound + b.error * a.bound + a.error * b.error
            self.emit("{0} * {1}", a, b, bound=a.bound * b.bound, error=error, features=features)
        elif operator == "/":
            limit = EXACT_UP_TO[a.dtype if a.is_float else torch.float32]
            error = a.error + a.bound * b.error + a.bound * 8 / limit
            if not self.backward or not b.error:
                self.emit("{0} / (abs({1}) + 1)", a, b, bound=max(a.bound, b.bound + 1), error=error, features=features)
        elif self.backward and (a.error or b.error):
            return
        elif operator == "maximum":
            if b.is_tensor:
                error = a.error + b.error
                self.emit("torch.maximum({0}, {1})", a, b, bound=max(a.bound, b.bound), error=error)
        elif operator == "where":
            error = a.error + b.error
            if not a.error and a.device == b.device or not b.is_tensor and not b.is_numpy and not a.error:
                self.emit(
                    "torch.where({0} > 0, {0}, {1})", a, b, bound=max(a.bound, b.bound), error=error, features=features
                )
        else:
            self.emit(f"{{0}} {operator} {{1}}", a, b, bound=1.0, error=a.error + b.error, features=features)

    def logical(self) -> None:
        a = self.pick(lambda v: v.is_tensor and v.is_bool)
        b = a and self.pick(lambda v: v.is_tensor and _mixes(a, v) and (v.is_bool or v.is_number))
        if a is None or b is None:
            return
        if a.device == "cpu" and b.device == "cuda":
            return
        if b.is_bool:
            self.emit(f"{{0}} {self.choose('&', '|', '==')} {{1}}", a, b, bound=1.0)
        else:
            self.emit("{0} * {1}", a, b, bound=b.bound, error=b.error)

    def reduction(self) -> None:
        v = self.pick(lambda v: v.is_tensor and not v.index and v.shape != ())
        if v is None:
            return
        dims = self.choose("", "0", "-1", "-1, keepdim=True")
        count = v.meta.numel() if not dims else v.shape[0 if dims == "0" else -1]
        kind = self.choose("sum", "amax", "mean")
        if v.is_bool:
            kind = self.choose("sum", "any")
        if kind == "any":
            self.emit(f"{{0}}.any({dims})", v, bound=1.0)
        elif kind == "sum":
            self.emit(f"{{0}}.sum({dims})", v, bound=v.bound * count, error=v.error * count)
        elif kind == "mean" and v.is_float:
            error = v.error + v.bound * count * 4 / EXACT_UP_TO[v.dtype]
            self.emit(f"{{0}}.mean({dims})", v, bound=v.bound * count, error=error)
        elif kind == "amax" and not (self.backward and v.error):
            self.emit(f"{{0}}.amax({dims})", v, bound=v.bound, error=v.error)

    def matmul(self) -> None:
        a = self.pick(lambda v: v.is_float and len(v.shape) == 2)
        b = a and self.pick(
            lambda v: (
                v.is_tensor
                and v.dtype == a.dtype
                and v.device == a.device
                and len(v.shape) == 2
                and a.shape[1] in v.shape
            )
        )
        if a is None or b is None:
            return
        code = "{0} @ {1}" if b.shape[0] == a.shape[1] else "{0} @ {1}.t()"
        count = a.shape[1]
        error = (a.error * b.bound + b.error * a.bound) * count
        self.emit(code, a, b, bound=a.bound * b.bound * count, error=error, features=["matmul"])

    def view(self) -> None:
        v = self.pick(lambda v: v.is_tensor and v.shape != () and not v.index)
        if v is not None:
            views = [
                "{0}.reshape(-1)",
                "{0}[0]",
                "{0}[..., ::2]",
                "{0}.unsqueeze(0)",
                "{0}[None].expand(2, *{0}.shape)",
            ]
            views += ["{0}.t()"] if len(v.shape) == 2 else []
            views += ["{0}[1:]"] if v.shape[0] > 1 else []
            self.emit(self.choose(*views), v, bound=v.bound, error=v.error)

    def cpu_scalar(self) -> None:
        """Makes one where there are few, of each origin."""
        way = self.choose("", "", "input", "computed", "reduced", "constructed")
        if way == "input":
            self.cpu_scalar_input()
        elif way == "constructed":
            dtype = self.choose(torch.float32, torch.float64, torch.int64)
            known: dict[str, Any] = {"device": "cpu", "origin": "constructed", "features": ["constructor: CPU"]}
            self.emit(f"torch.tensor(3, dtype={dtype})", bound=3.0, **known)
        elif way:
            v = self.pick(lambda v: v.is_tensor and v.device == "cpu" and v.is_number)
            if v is not None and v.shape == ():
                self.emit("{0} + 1", v, bound=v.bound + 1, error=v.error)
            elif v is not None and way == "reduced":
                self.emit("{0}.sum()", v, bound=v.bound * v.meta.numel(), error=v.error * v.meta.numel())
            elif v is not None:
                self.emit("{0}" + "[0]" * len(v.shape), v, bound=v.bound, error=v.error)

    def new_index(self) -> None:
        way = self.choose("", "input", "constructed", "literal", "computed")
        device = self.choose("cpu", "cuda")
        where = "" if device == "cpu" else ', device="cuda"'
        features = [f"constructor: {'CPU' if device == 'cpu' else 'GPU'}"]
        known: dict[str, Any] = {"device": device, "origin": "constructed", "features": features}
        if way == "input":
            self.index_input()
        elif way == "constructed":
            n = self.choose(*self.shapes[0])
            self.emit(f"torch.arange({n}{where})", bound=n, index=n, unique=True, **known)
        elif way == "literal":
            self.emit(f"torch.tensor([1, 0]{where})", bound=1.0, index=2, unique=True, **known)
        elif way == "computed":
            i = self.pick(lambda v: v.index > 0 and len(v.shape) == 1)
            if i is not None:
                self.emit("{0}.flip(0)", i, bound=i.bound, index=i.index, unique=i.unique)

    def index(self) -> None:
        self.new_index()
        i = self.pick(lambda v: v.index > 0)
        x = i and self.pick(
            lambda v: (
                v.is_tensor
                and v.shape != ()
                and not v.index
                and (v.device == "cuda" or i.device != "cuda")
                and max(v.shape[0], v.shape[-1]) >= i.index
            )
        )
        if x is None or i is None:
            return
        dim = 0 if x.shape[0] >= i.index else -1
        features = []
        if x.device == "cuda" and i.device == "cpu":
            features = [f"index: {'argument' if i.origin == 'input' else i.origin}"]
            if i.shape == ():
                features.append("index: scalar")
        place = "{1}" if dim == 0 else "..., {1}"
        meta = None
        if i.shape == () and i.is_tensor:
            # Eager reads it, and takes a view.
            features.append("item")
            meta = "{0}" + f"[{place.format('', '0')}]"
        self.emit(f"{{0}}[{place}]", x, i, bound=x.bound, error=x.error, features=features, device=x.device, meta=meta)

    def index_put(self) -> None:
        self.new_index()
        i = self.pick(lambda v: v.index > 0 and (v.unique or v.shape == ()))
        x = i and self.pick(
            lambda v: (
                self.writable(v)
                and v.shape != ()
                and (v.device == "cuda" or i.device != "cuda")
                and v.shape[0] >= i.index
            )
        )
        if x is None or i is None:
            return
        # Its value selects the elements: eager reads a 0-d index.
        features = {"index: put", *(["item"] if i.shape == () and i.is_tensor else [])}
        if x.device == "cuda" and i.device == "cpu":
            features.add(f"index: {'argument' if i.origin == 'input' else i.origin}")
        self.write("{0}[{1}] = 2", x, i, bound=2.0, features=features)

    def constructor(self) -> None:
        device = self.choose("cpu", "cuda")
        features = [f"constructor: {'CPU' if device == 'cpu' else 'GPU'}"]
        shape = self.choose(*self.shapes)
        scalar = self.pick(lambda v: not v.is_tensor and v.is_number)
        where = "" if device == "cpu" else ', device="cuda"'
        dtype = self.choose(torch.float32, torch.int64, torch.float64, torch.bfloat16)
        known: dict[str, Any] = {"device": device, "origin": "constructed", "features": features}
        kinds = ["zeros", "arange", "tensor", "scalar tensor", "ones_like"]
        if scalar is not None and isinstance(scalar.meta, (bool, int, float, np.generic)):
            kinds.append("full of")
            if not (scalar.is_numpy and dtype == torch.int64):
                # Eager makes no tensor of integers of a NumPy float.
                kinds.append("tensor of")
        kind = self.choose(*kinds)
        if kind == "zeros":
            self.emit(f"torch.zeros({shape}, dtype={dtype}{where})", bound=0.0, **known)
        elif kind == "arange":
            n = self.choose(*self.shapes[0])
            if self.choose(True, False):
                self.emit(f"torch.arange({n}{where})", bound=n, index=n, unique=True, **known)
            else:
                self.emit(f"torch.arange({n}, dtype={dtype}{where})", bound=n, **known)
        elif kind == "tensor":
            self.emit(f"torch.tensor([1, 0], dtype={dtype}{where})", bound=1.0, **known)
        elif kind == "scalar tensor":
            self.emit(f"torch.tensor(3, dtype={dtype}{where})", bound=3.0, **known)
        elif kind == "ones_like":
            like = self.pick(lambda v: v.is_tensor and not v.index)
            if like is not None:
                known |= {
                    "device": like.device,
                    "features": [f"constructor: {'CPU' if like.device == 'cpu' else 'GPU'}"],
                }
                self.emit("torch.ones_like({0})", like, bound=1.0, **known)
        elif scalar is not None:
            features.append("constructor: scalar")
            known["bound"], known["error"] = scalar.bound, scalar.error
            if kind == "full of":
                self.emit(f"torch.full({shape}, {{0}}, dtype={dtype}{where})", scalar, **known)
            else:
                self.emit(f"torch.tensor({{0}}, dtype={dtype}{where})", scalar, **known)

    def copy(self) -> None:
        v = self.pick(lambda v: v.is_tensor)
        if v is None:
            return
        known: dict[str, Any] = {"bound": v.bound, "error": v.error, "index": v.index, "unique": v.unique}
        known["origin"] = "copied"
        if v.device == "cpu":
            code = self.choose("{0}.cuda()", '{0}.to("cuda")', '{0}.to("cuda", non_blocking=True)')
            self.emit(code, v, meta="{0}.clone()", device="cuda", features=["copy: to the GPU"], **known)
        else:
            code = self.choose("{0}.cpu()", '{0}.to("cpu")')
            self.emit(code, v, meta="{0}.clone()", device="cpu", features=["copy: to the CPU"], **known)

    def cast(self) -> None:
        v = self.pick(lambda v: v.is_tensor and not v.index)
        if v is None:
            return
        dtype = self.choose(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)
        code = f"{{0}}.to({dtype})"
        if v.device == "cpu" and self.chance(30):
            code = f'{{0}}.to("cuda", {dtype})'
            self.emit(
                code,
                v,
                meta=f"{{0}}.to({dtype}, copy=True)",
                device="cuda",
                bound=v.bound,
                error=v.error,
                origin="copied",
                features=["copy: to the GPU"],
            )
            return
        self.emit(code, v, bound=v.bound, error=v.error)

    # mutation

    def writable(self, v: Value) -> bool:
        return v.is_tensor and not v.index and not self.backward and v.is_dense and not v.is_bool

    def write(self, code: str, target: Value, *operands: Value, bound: float, error: float = 0.0, **known: Any) -> None:
        """Adds ``code``, which writes to ``target``."""
        features = set(known.get("features", ())) | set(self._scalar_features((target, *operands)))
        where = "intermediate"
        if target.caller_owns:
            where = "attribute" if target.persists else "argument"
            where = f"CPU {where}" if target.device == "cpu" else where
        features.add(f"mutation: {where}")
        aliases = [v for v in self.values if v.storage == target.storage]
        if any(v.caller_owns and v.is_cpu_scalar and v.dtype is torch.float64 for v in aliases):
            features.add("mutation: float64 scalar")
        if any(v.index for v in aliases):
            return
        bound = max([bound, *(v.bound for v in aliases)])
        error = max([error, *(v.error for v in aliases)])
        if target.persists and (error or bound > STATE_BOUND):
            return
        names = [v.name for v in (target, *operands)]
        copy = dataclasses.replace(target, bound=bound, error=error)
        probe = known.get("meta") or code
        expression = f"{names[0]}.copy_({names[0]})" if "= 2" in probe else probe.format(*names)
        try:
            self.evaluate(expression, {v.name: v for v in (target, *operands)})
        except (RuntimeError, IndexError, TypeError, ValueError):
            return
        if not self._settle(copy, operands) or not self.allowed(features):
            return
        if target.persists and copy.error:
            return
        for v in aliases:
            v.bound, v.error = copy.bound, copy.error
        if target.device == "cuda":
            self.scalar_dtypes |= {v.meta.dtype for v in operands if v.is_cpu_scalar}
        self._line(code.format(*names), None, (target, *operands), target, features)

    def inplace(self) -> None:
        x = self.pick(self.writable)
        if x is None:
            return
        kind = self.choose("neg", "zero", "clamp", "add", "mul", "first", "copy", "copy")
        if kind in ("neg", "zero"):
            self.write(f"{{0}}.{kind}_()", x, bound=x.bound)
            return
        if kind == "clamp":
            self.write("{0}.clamp_(-8, 8)", x, bound=x.bound, error=x.error)
            return
        if kind == "first":
            if x.shape != ():
                self.write("{0}[0] = 2", x, bound=2.0)
            return
        if kind == "copy":
            cross = self.chance(60)
            if cross and self.chance(50):
                self.add_tensor("cpu" if x.device == "cuda" else "cuda", x.shape)
            y = self.pick(
                lambda v: (
                    v.is_tensor
                    and v.shape == x.shape
                    and not v.index
                    and not v.error
                    and (not cross or v.device != x.device)
                )
            )
            if y is not None:
                features = ["copy: in place"] if y.device != x.device else []
                if x.device == "cuda" and y.device == "cpu":
                    features.append("copy: to the GPU")
                elif x.device == "cpu" and y.device == "cuda":
                    features.append("copy: to the CPU")
                # Another storage, so that nothing is copied onto itself.
                if y.storage != x.storage and (x.is_float or not y.is_float):
                    self.write("{0}.copy_({1})", x, y, bound=y.bound, error=y.error, features=features)
            return
        y = self.pick(
            lambda v: (
                v.is_number
                and (not v.is_tensor or (v.storage != x.storage and (v.device == x.device or v.is_cpu_scalar)))
            )
        )
        if y is None or (x.device == "cpu" and y.device == "cuda") or (y.is_float and not x.is_float):
            return
        # Also for an argument, which an output may become.
        bounded = x.persists or self.chance(50)
        bound = x.bound + y.bound if kind == "add" else x.bound * y.bound
        error = x.error + y.error if kind == "add" else x.error * y.bound + y.error * x.bound
        features = ["scalar: NumPy promotes"] if _numpy_promotes(x, y) else []
        if bounded and bound <= EXACT_UP_TO[x.dtype] and not error:
            self.write(f"{{0}}.{kind}_({{1}}).clamp_(-8, 8)", x, y, bound=min(bound, STATE_BOUND), features=features)
        elif not bounded:
            self.write(f"{{0}}.{kind}_({{1}})", x, y, bound=bound, error=error, features=features)

    def rebind(self) -> None:
        a = self.pick(lambda v: v.name.startswith("self.a") and v.is_tensor and not v.index)
        if a is not None and not a.is_bool and not a.error:
            self.emit("{0}.clamp(-8, 8) * 1", a, bound=a.bound)
        v = a and self.pick(
            lambda v: (
                v.is_tensor
                and not v.caller_owns
                and not v.index
                and (v.dtype, v.device, v.shape) == (a.dtype, a.device, a.shape)
                and not v.error
                and v.bound <= STATE_BOUND
                and v.meta.is_contiguous()
                and v.meta.untyped_storage().nbytes() == v.meta.nbytes
            )
        )
        if a is None or v is None or self.backward or not self.allowed(["mutation: rebound attribute"]):
            return
        for alias in self.values:
            if alias.storage == v.storage:
                alias.persists = True
        written = dataclasses.replace(v, caller_owns=True)
        self._line(f"{a.name} = {v.name}", None, (v,), written, ["mutation: rebound attribute"])
        a.meta, a.origin = v.meta, v.origin

    def item(self) -> None:
        v = self.pick(lambda v: v.is_tensor and v.meta.numel() == 1)
        if v is not None:
            self.emit("{0}.item()", v, meta=_item_of(v), bound=v.bound, error=v.error, features=["item"])

    def item_operand(self) -> None:
        """A value that nobody looks at: it reaches the GPU without the host."""
        if self.chance(50):
            self.cpu_scalar_input()
        x = self.pick(lambda v: v.is_tensor and v.is_number)
        s = x and self.pick(lambda v: v.is_tensor and v.is_cpu_scalar and v.is_float and v.origin == "input")
        if x is None or s is None:
            return
        operator = self.choose("*", "+", "-")
        bound, error = x.bound + s.bound, x.error + s.error
        if operator == "*":
            bound, error = x.bound * s.bound, x.error * s.bound + s.error * x.bound + x.error * s.error
        code = f"{{1}}.item() {operator} {{0}}" if self.chance(30) else f"{{0}} {operator} {{1}}.item()"
        meta = f"{{0}} {operator} 1.0"
        self.emit(code, x, s, meta=meta, device=x.device, bound=bound, error=error, features=["item"])

    def branch(self) -> None:
        v = self.pick(lambda v: v.is_tensor and v.is_number and not v.error)
        x = v and self.pick(lambda x: x.is_tensor and x.is_number)
        if v is not None and x is not None:
            self.emit(
                "{1} + 1 if {0}.sum() > 0 else {1} - 1",
                v,
                x,
                meta="{1} + 1",
                device=x.device,
                bound=x.bound + 1,
                error=x.error,
                features=["item"],
            )

    def python(self) -> None:
        v = self.pick(lambda v: not v.is_tensor and not v.is_numpy and v.is_number and not v.is_bool)
        if v is not None and isinstance(v.meta, (int, float)):
            self.emit("{0} * 2 + 1", v, bound=v.bound * 2 + 1, error=v.error * 2)

    def graph_break(self) -> None:
        if self.allowed(["graph break"]):
            self.lines.append(Line("torch._dynamo.graph_break()", None, (), (), None, True, frozenset(["graph break"])))

    def custom(self) -> None:
        kind = self.choose("double", "unsafe", "bump")
        v = self.pick(lambda v: self.writable(v) if kind == "bump" else v.is_tensor and v.is_float)
        if v is None or self.backward:
            return
        features = ["custom operator"] + (["custom operator: unsafe"] if kind == "unsafe" else [])
        features += ["custom operator: scalar"] if v.is_cpu_scalar else []
        code = f"torch.ops.pygraph_programs.{kind}({{0}})"
        if kind == "bump":
            self.write(code, v, bound=v.bound, error=v.error, features=features, meta="{0}.neg_()")
        else:
            # As fake as the operator's: the strides of empty_like.
            self.emit(code, v, meta="torch.empty_like({0})", bound=v.bound * 2, error=v.error * 2, features=features)


INPUTS = ("tensor_input",) * 3 + ("cpu_scalar_input",) * 2 + ("alias_input", "index_input")
STATEMENTS = (
    *("binary",) * 8,
    *("unary",) * 2,
    *("copy",) * 3,
    *("inplace",) * 4,
    *("index",) * 3,
    *("constructor",) * 3,
    "view",
    "reduction",
    "cast",
    "index_put",
    "logical",
    "matmul",
    "python",
    "rebind",
    "custom",
    "item",
    *("item_operand",) * 2,
    "branch",
    "graph_break",
)


def _meta_fill(shape: tuple[int, ...], dtype: torch.dtype, device: str, *range: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _mixes(a: Value, b: Value) -> bool:
    """Eager accepts both in one operation."""
    if a.device != b.device and not ((a.shape == () and a.device == "cpu") or (b.shape == () and b.device == "cpu")):
        return False
    try:
        torch.broadcast_shapes(a.shape, b.shape)
    except RuntimeError:
        return False
    return True


def _category(v: Value) -> int:
    return 2 if v.is_float else 0 if v.is_bool else 1


def _numpy_promotes(a: Value, b: Value) -> bool:
    """Eager takes a NumPy scalar for a Python number, which decides no dtype within its category."""
    return b.is_numpy and (_category(b) > _category(a) or a.shape == ())


def _item_of(v: Value) -> str:
    return "1.0" if v.is_float else "True" if v.is_bool else "0"


def _output(v: Value, inputs: Sequence[Value]) -> Output:
    if not v.is_tensor:
        return Output(v.name, None, v.error, features=frozenset(["return: scalar"]))
    features = set()
    owners = [i for i in inputs if i.storage == v.storage]
    if not owners and v.meta.untyped_storage().nbytes() != v.meta.nbytes:
        features.add("return: view")
    if owners:
        same = any(v.meta is i.meta for i in owners)
        features.add("return: input" if same else "return: view of input")
    if v.device == "cpu":
        origin = "input" if owners else "computed" if v.origin == "input" else v.origin
        features.add(f"return: CPU {origin}")
    return Output(v.name, v.storage, v.error, features=frozenset(features))


@st.composite
def programs(
    draw: Draw,
    without: Collection[str] = (),
    max_statements: int = 12,
    calls: bool = True,
) -> Program:
    """Programs with none of the features ``without`` (of :data:`FEATURES`).

    ``calls``: also draw how the program is called: what changes between calls, outputs held or
    fed back, and whether the choice of PyGraph is forced. Without, it is called as often as it
    takes to compile and replay it.
    """
    without = frozenset(without)
    if unknown := without - FEATURES.keys():
        raise ValueError(f"not in FEATURES: {sorted(unknown)}")
    backward = "backward" not in without and draw(st.integers(0, 9)) == 9
    b = _Builder(draw, without, backward)
    b.add_input(
        "argument",
        f'fill({b.shapes[0]}, torch.float32, "cuda"){".requires_grad_()" if backward else ""}',
        (),
        device="cuda",
        bound=STATE_BOUND,
    )
    b.repeat(INPUTS, 1, 4)
    b.repeat(STATEMENTS, max_statements // 2, max_statements)

    candidates = b.values[::-1]
    used = {name for line in b.lines for name in line.uses}
    unused = [v for v in candidates if v.name not in used and not v.caller_owns] or candidates
    returned = unused[: draw(st.sampled_from((3, 4, 2, 1)))]
    returned += draw(st.lists(st.sampled_from(candidates), max_size=2))
    outputs = [(v, _output(v, b.inputs)) for v in returned]
    outputs = [(v, o) for v, o in outputs if b.allowed(o.features)]
    if not b.allowed(["return: alias"]):
        outputs = [*{v.storage: (v, o) for v, o in outputs}.values()]
    backward = backward and any(v.is_tensor and v.meta.requires_grad for v, _ in outputs)

    feeds: list[tuple[str, str]] = []
    selecting = no_grad = False
    if calls:
        fits = [(v, i) for v, _ in outputs for i in b.values if not backward and _can_be_fed(v, i, b)]
        if fits and b.allowed(["calls: feed"]) and draw(st.booleans()):
            v, i = draw(st.sampled_from(fits))
            feeds.append((v.name, i.name))
        if b.allowed(["calls: hold"]) and draw(st.integers(0, 3)) == 3:
            outputs = [(v, dataclasses.replace(o, held=True)) for v, o in outputs]
        selecting = b.allowed(["calls: selecting"]) and draw(st.integers(0, 2)) == 2
        no_grad = not backward and b.allowed(["no_grad"]) and draw(st.integers(0, 2)) == 2

    errors = {v.name.removeprefix("self."): v.error for v in b.values if v.caller_owns}
    # The addresses of meta tensors say nothing.
    numbers: dict[int | None, int] = {}
    number = lambda storage: None if storage is None else numbers.setdefault(storage, len(numbers))  # noqa: E731
    program = Program(
        inputs=tuple(
            dataclasses.replace(i, error=errors[name], change=i.change if calls else None)
            for name, i in b.program_inputs.items()
        ),
        lines=tuple(
            dataclasses.replace(line, storages=tuple(map(number, line.storages)), writes=number(line.writes))
            for line in b.lines
        ),
        outputs=tuple(dataclasses.replace(o, storage=number(o.storage)) for _, o in outputs),
        feeds=tuple(feeds),
        backward=backward,
        no_grad=no_grad,
        selecting=selecting,
    )
    return program.pruned()


def _can_be_fed(v: Value, i: Value, b: _Builder) -> bool:
    """An output can be an argument of the next call."""
    alike = i.caller_owns and not i.persists and i.name in b.program_inputs and v.is_tensor and i.is_tensor
    return (
        alike
        and not v.caller_owns
        and not i.index
        and (i.dtype, i.device, i.shape, i.meta.stride()) == (v.dtype, v.device, v.shape, v.meta.stride())
        and i.is_dense
        and not v.error
        and v.bound <= STATE_BOUND
    )


@dataclasses.dataclass(frozen=True)
class Seen:
    """One thing a caller sees after a call. ``facts`` are compared first, in order; ``value`` is a
    copy on the CPU, a Python scalar, or None where values are not compared."""

    where: str
    facts: dict[str, Any]
    value: Any = None
    tolerance: float = 0.0


@dataclasses.dataclass(frozen=True)
class Difference:
    """``kind`` is "exception", "value", "held value", or the name of a fact."""

    kind: str
    where: str
    expected: Any
    actual: Any

    def __str__(self) -> str:
        return f"{self.kind} of {self.where}: expected {self.expected}, got {self.actual}"


# By dtype of a gradient, relative to the largest element; orders of summation differ.
GRADIENT_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


class _Watch:
    """Looks at tensors after each call."""

    def __init__(self, program: Program, values: bool) -> None:
        self.tolerances = {i.name: i.error for i in program.inputs}
        self.tolerances |= {f"output {n}": o.error for n, o in enumerate(program.outputs)}
        self.values = values
        self.seen: list[Seen] = []

    def tensors(self, call: int, named: list[tuple[str, Any]], versions: dict[int, int]) -> None:
        storages: dict[int, tuple[str, int]] = {}
        objects: dict[int, str] = {}
        for name, value in named:
            where = f"call {call}, {name}"
            if not isinstance(value, torch.Tensor):
                self.seen.append(Seen(where, {"type": type(value)}, value, self.tolerances.get(name, 0.0)))
                continue
            storage = value.untyped_storage()._cdata
            first, offset = storages.setdefault(storage, (name, value.storage_offset()))
            facts = {
                "type": "tensor",
                "dtype": value.dtype,
                "device": value.device,
                "shape": tuple(value.shape),
                "stride": _stride(value),
                "alias": "none" if first == name else f"{first} + {value.storage_offset() - offset}",
                "identity": objects.setdefault(id(value), name),
                "requires_grad": value.requires_grad,
            }
            if id(value) in versions:
                facts["written to"] = value._version != versions[id(value)]
            self.seen.append(Seen(where, facts, self.copy(value), self.tolerances.get(name, 0.0)))

    def copy(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().cpu().clone() if self.values else None


def _stride(t: torch.Tensor) -> tuple[int, ...]:
    """Where it means something."""
    if t.numel() < 2:
        return ()
    return tuple(s for s, size in zip(t.stride(), t.shape) if size > 1)


def load(program: Program, gpu: str = "cuda") -> dict[str, Any]:
    """The functions of the program's script."""
    source = program.source(gpu, check=False)
    # Not in a directory of torch's, which Dynamo does not compile.
    filename = f"<pygraph program {hash(source):x}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"__name__": "pygraph_program"}
    exec(compile(source, filename, "exec"), namespace)
    return namespace


def observe(
    program: Program, compile: Compile, *, gpu: str = "cuda", values: bool = True, calls: int | None = None
) -> list[Seen]:
    """What is seen of ``program`` when ``compile`` makes a function of its module."""
    names = program.arguments
    watch = _Watch(program, values)
    torch.manual_seed(0)
    random.seed(0)
    functions = load(program, gpu)
    model, kept = functions["make"]()
    held: list[Any] = []
    outputs: Sequence[Any] = ()
    call = 0
    try:
        function = compile(model)
        for call in range(program.calls if calls is None else calls):
            torch.manual_seed(call + 1)
            random.seed(call + 1)
            if call and values:
                functions["between"](model, kept)
            args = functions["arguments"](kept)
            if call:
                for output, argument in program.feed_positions():
                    args[argument] = outputs[output]
            state = {name: getattr(model, name) for name in program.attributes}
            owned = [*zip(names, args), *state.items(), *kept.items()]
            versions = {id(t): t._version for _, t in owned if isinstance(t, torch.Tensor)}
            context = torch.no_grad() if program.no_grad else contextlib.nullcontext()
            with context:
                outputs = function(*args)
            state = {name: getattr(model, name) for name in program.attributes}
            named = [*zip(names, args), *((n, t) for n, t in kept.items() if n not in names), *state.items()]
            named += [(f"output {i}", t) for i, t in enumerate(outputs)]
            watch.tensors(call, named, versions)
            if program.backward:
                roots = [t for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
                torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
                watch.seen += _gradients(call, named, values)
            held.append(outputs)
        for call, outputs in enumerate(held):
            for i, output in enumerate(program.outputs):
                if not output.held:
                    continue
                t = outputs[i]
                where = f"output {i} of call {call}, held"
                device = t.device.type if isinstance(t, torch.Tensor) else None
                watch.seen.append(Seen(where, {"held device": device}, watch.copy(t), output.error))
    except Exception as error:
        watch.seen.append(Seen(f"call {call}", {"exception": type(error).__name__}, None))
        watch.seen.append(Seen("message", {}, str(error)))
    return watch.seen


def _gradients(call: int, named: list[tuple[str, Any]], values: bool) -> Iterator[Seen]:
    for name, t in named:
        if isinstance(t, torch.Tensor) and t.is_leaf and t.grad is not None:
            grad = t.grad
            facts = {"dtype": grad.dtype, "device": grad.device, "shape": tuple(grad.shape)}
            value = grad.detach().cpu().clone() if values else None
            largest = float(value.abs().max()) if values and value.numel() else 0.0
            yield Seen(
                f"call {call}, gradient of {name}", facts, value, GRADIENT_TOLERANCE[grad.dtype] * max(1.0, largest)
            )
            t.grad = None


def difference(expected: Sequence[Seen], actual: Sequence[Seen]) -> Difference | None:
    """The first difference, if any."""
    for e, a in itertools.zip_longest(expected, actual):
        if e is None or a is None or e.where != a.where:
            failed = next((s for s in (e, a) if s and "exception" in s.facts), None)
            message = next((s.value for s in actual if s.where == "message"), "")
            if failed is not None:
                what = [
                    f"{s.facts['exception']}: {message}" if s and "exception" in s.facts else "none" for s in (e, a)
                ]
                return Difference("exception", failed.where, *what)
            return Difference("missing", (e or a).where, e and e.where, a and a.where)
        if e.where == "message":
            continue
        for fact in e.facts:
            if e.facts[fact] != a.facts.get(fact):
                return Difference(fact, e.where, e.facts[fact], a.facts.get(fact))
        if not _equal(e.value, a.value, e.tolerance):
            kind = "held value" if e.where.endswith("held") else "value"
            return Difference(kind, e.where, e.value, a.value)
    return None


def _equal(expected: Any, actual: Any, tolerance: float) -> bool:
    if isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor):
        if not tolerance:
            return torch.equal(expected, actual)
        distance = (expected.double() - actual.double()).abs()
        return bool((distance <= 4 * tolerance).all())
    if isinstance(expected, float) and tolerance:
        return abs(expected - actual) <= 4 * tolerance
    return expected == actual
