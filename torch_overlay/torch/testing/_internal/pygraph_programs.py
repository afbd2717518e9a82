"""
Random small programs that mix GPU and CPU values.

:func:`programs` is a hypothesis strategy for a :class:`Program`: a module with arguments, attributes and closures, called
several times with values that change in between. A program is valid in eager by construction, because each statement is
run on meta tensors when it is drawn, and deterministic. ``Program.source()`` is a script that needs only torch; what a
test runs is that very script's functions. pygraph_observed.py has what a caller sees of it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st

import torch
from torch.testing._internal.pygraph_program import EXACT_UP_TO, FEATURES, Line, Output, Program, STATE_BOUND, Value
from torch.testing._internal.pygraph_program_builder import Builder, item_of, mixes, numpy_promotes


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    Draw = Callable[[st.SearchStrategy[Any]], Any]


class _Statements(Builder):
    """Each method draws one statement."""

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
                v.is_number and (not v.is_tensor or mixes(a, v)) and (not scalar or v.is_cpu_scalar or not v.is_tensor)
            )
        )
        if a is None or b is None:
            return
        if a.device == "cpu" and b.device == "cuda":
            a, b = b, a
        features = ["scalar: NumPy promotes"] if numpy_promotes(a, b) else []
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
        b = a and self.pick(lambda v: v.is_tensor and mixes(a, v) and (v.is_bool or v.is_number))
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
        features = ["scalar: NumPy promotes"] if numpy_promotes(x, y) else []
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
            self.emit("{0}.item()", v, meta=item_of(v), bound=v.bound, error=v.error, features=["item"])

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
    b = _Statements(draw, without, backward)
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


def _can_be_fed(v: Value, i: Value, b: Builder) -> bool:
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
