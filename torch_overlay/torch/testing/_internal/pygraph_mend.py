"""Compares what compiled and eager calls of a program return, print, log, warn, raise and change."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import sys
import warnings
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
import torch._dynamo
from torch._dynamo.utils import counters
from torch._inductor.pygraph.dynamo.branches import Branches
from torch.testing._internal.pygraph_common import DynamoTestCase


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = logging.getLogger("pygraph_mend")
log.setLevel(logging.INFO)
log.propagate = False


class Box:
    """State of the program."""

    def __init__(self) -> None:
        self.step = 0
        self.seen: list[Any] = []


BOX = Box()


def counting(call: int) -> torch.Tensor:
    return torch.arange(4.0) + call


class MendTestCase(DynamoTestCase):
    # How warnings are filtered.
    action = "always"

    def observe(self, fn: Callable[..., Any], inputs: Sequence[Callable[[], torch.Tensor]] | None = None) -> list[Any]:
        """What calls print, log, return and raise, and the state after each."""
        seen: list[Any] = []
        BOX.__init__()
        text = io.StringIO()
        handler = logging.StreamHandler(text)
        handler.setFormatter(logging.Formatter("%(levelname)s %(filename)s:%(lineno)d %(funcName)s %(message)s"))
        log.addHandler(handler)
        module = type(self).__module__
        file = sys.modules[module].__file__
        try:
            for call in range(3) if inputs is None else inputs:
                x = counting(call) if inputs is None else call()
                BOX.step += 1
                with (
                    contextlib.redirect_stdout(text),
                    contextlib.redirect_stderr(text),
                    warnings.catch_warnings(record=True) as warned,
                ):
                    warnings.filterwarnings(self.action, module=module)
                    try:
                        result = fn(x)
                    except Exception as e:
                        result = type(e), e.args
                of_test = [(str(w.message), w.category, w.lineno) for w in warned if w.filename == file]
                seen.append((result, x, BOX.step, [*BOX.seen], of_test))
        finally:
            log.removeHandler(handler)
        return [text.getvalue(), seen]

    def observe_compiled(
        self, fn: Callable[..., Any], inputs: Sequence[Callable[[], torch.Tensor]] | None = None, **options: Any
    ) -> tuple[list[Any], dict[str, int]]:
        torch._dynamo.reset()
        counters.clear()
        seen = self.observe(torch.compile(fn, options={"pygraph": True, **options}), inputs)
        return seen, {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}

    def check(
        self, fn: Callable[..., Any], inputs: Sequence[Callable[[], torch.Tensor]] | None = None
    ) -> dict[str, int]:
        """Compare with eager mode, and return how many graphs and breaks there are."""
        seen, found = self.observe_compiled(fn, inputs)
        self.assertEqual(seen, self.observe(fn, inputs))
        return found


VALUES = ([1.0, 1, 1, 1], [-1.0, -1, -1, -1], [1.0, -1, 0, 0], [9.0, 9, 9, 9], [-9.0, -9, -9, -9])
VALUES += ([float("nan"), 0, 1, 2], [float("inf"), 0, 1, 2], [0.0, 0, 0, 0])


def number_of_graphs() -> int:
    return counters["stats"]["unique_graphs"]


class BranchTestCase(DynamoTestCase):
    """Compares with eager mode."""

    def setUp(self) -> None:
        super().setUp()
        counters.clear()

    def without_hosts(self) -> None:
        """Let no guard find which path is taken."""
        patch = mock.patch.object(Branches, "_decide", lambda *args: None)
        patch.start()
        self.addCleanup(patch.stop)

    def check(
        self, fn: Callable[..., Any], calls: list[tuple[Any, ...]], *, graphs: int | None, **options: Any
    ) -> None:
        """Call ``fn`` with copies of each arguments, eagerly and compiled, and compare all that a program can see."""
        compiled = torch.compile(fn, options={"pygraph": True}, **options)
        self.compare_calls((fn, fn), (compiled, fn), calls)
        if graphs is not None:
            self.assertEqual(number_of_graphs(), graphs)

    def compare_calls(
        self,
        one: tuple[Callable[..., Any], object],
        other: tuple[Callable[..., Any], object],
        calls: Sequence[tuple[Any, ...]],
        seed: int = 0,
    ) -> list[tuple[Any, ...]]:
        """Compare the calls of two functions, each with its module if it has one. Return the outcomes of the second."""
        outcomes = []
        for fn, module in (one, other):
            torch.manual_seed(seed)
            outcomes.append([outcome_of(fn, module, args) for args in calls])
        for expected, found in zip(*outcomes):
            self.assertEqual(expected, found)
        return outcomes[1]


def outcome_of(fn: Callable[..., Any], module: object, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the result or the error, gradients, arguments afterwards and the state of the generator."""
    args = copy.deepcopy(args)
    leaves = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
    leaves += list(module.parameters()) if isinstance(module, torch.nn.Module) else []
    leaves = [t for t in leaves if t.requires_grad]
    for leaf in leaves:
        leaf.grad = None
    try:
        result = fn(*args)
    except Exception as e:  # noqa: BLE001
        return type(e), str(e), args
    tensors = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    needs = [t.requires_grad for t in tensors]
    total = sum(t.float().sum() * (i + 1) for i, t in enumerate(tensors) if t.requires_grad)
    if any(needs):
        try:
            total.backward()
        except RuntimeError:
            return RuntimeError, "backward", args
    gradients = [None if t.grad is None else t.grad.clone() for t in leaves]
    inputs = [[i for i, a in enumerate(args) if a is t] for t in tensors]
    plain = torch.utils._pytree.tree_map(lambda t: t.detach().clone() if isinstance(t, torch.Tensor) else t, result)
    return plain, needs, gradients, inputs, args, torch.get_rng_state()
