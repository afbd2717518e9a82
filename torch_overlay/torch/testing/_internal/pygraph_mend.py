"""Compares what compiled and eager calls of a program return, print, log, warn, raise and change."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from typing import Any, TYPE_CHECKING

import torch
import torch._dynamo
from torch._dynamo.utils import counters
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
