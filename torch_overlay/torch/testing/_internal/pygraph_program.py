"""
A small program that mixes GPU and CPU values, as a script that needs only torch.

Values are small whole numbers, which every dtype represents. As long as only operations are applied that keep them so,
the result is exact in any order of evaluation and has to be equal bit for bit. From the first other operation on, a
bound on the rounding error is carried along, which is the tolerance of the comparison. Nothing discrete (a comparison,
a branch, a cast to integers) is computed from values that are not exact.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, TYPE_CHECKING

import numpy as np

import torch


if TYPE_CHECKING:
    from collections.abc import Iterator


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
