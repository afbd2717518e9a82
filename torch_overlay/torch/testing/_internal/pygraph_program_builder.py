"""What draws the inputs and lines of a random program, each of which is run on meta tensors at once."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import types
from typing import Any, TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st

import torch
from torch.testing._internal.pygraph_program import EXACT_UP_TO, FEATURES, FLOATS, Input, Line, STATE_BOUND, Value


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    Draw = Callable[[st.SearchStrategy[Any]], Any]


class Builder:
    """
    Draws a program a statement at a time. A statement that would be invalid, or needs a feature that is excluded, is
    left out.
    """

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


def _meta_fill(shape: tuple[int, ...], dtype: torch.dtype, device: str, *range: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def mixes(a: Value, b: Value) -> bool:
    """Eager accepts both in one operation."""
    if a.device != b.device and not ((a.shape == () and a.device == "cpu") or (b.shape == () and b.device == "cpu")):
        return False
    try:
        torch.broadcast_shapes(a.shape, b.shape)
    except RuntimeError:
        return False
    return True


def category(v: Value) -> int:
    return 2 if v.is_float else 0 if v.is_bool else 1


def numpy_promotes(a: Value, b: Value) -> bool:
    """Eager takes a NumPy scalar for a Python number, which decides no dtype within its category."""
    return b.is_numpy and (category(b) > category(a) or a.shape == ())


def item_of(v: Value) -> str:
    return "1.0" if v.is_float else "True" if v.is_bool else "0"
