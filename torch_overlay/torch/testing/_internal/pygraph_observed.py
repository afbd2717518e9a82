"""
What a caller sees of a random program.

:func:`observe` calls a program and keeps values, dtypes, devices, shapes, strides, which tensors share storage, what was
mutated, and the type of an exception. :func:`difference` names the first thing in which two observations differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import linecache
import random
from typing import Any, TYPE_CHECKING

import torch
from torch.testing._internal.pygraph_program import Program


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Compile = Callable[[torch.nn.Module], Callable[..., Any]]


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
