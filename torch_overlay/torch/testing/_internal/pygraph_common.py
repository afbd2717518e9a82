"""What PyGraph's tests share: what they need of the machine, and which code runs."""

from __future__ import annotations

import argparse
import collections
import contextlib
import sys
import unittest
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
import torch._dynamo
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters
from torch._inductor.pygraph import native
from torch._inductor.test_case import TestCase
from torch.testing._internal.modelled_nodes import cu


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

needs_structs = unittest.skipIf(cu is None, "requires cuda-bindings")
needs_compiled = unittest.skipIf(native.compiled is None, "requires _replay")

PYGRAPH = {"pygraph": True}


class ByPython:
    """Of a TestCase: its tests run where nothing is compiled."""

    def setUp(self) -> None:
        super().setUp()
        patch = mock.patch.object(native, "compiled", None)
        patch.start()
        self.addCleanup(patch.stop)


def as_is(_self: Any, gm: torch.fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
    return gm.forward


def aot_eager(_self: Any, gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    return torch._dynamo.lookup_backend("aot_eager")(gm, inputs)


@torch._dynamo.disable
def opaque(*args: Any) -> Any:
    """Break the graph."""
    return args[0] if args else None


class DynamoTestCase(TestCase):
    """Runs Dynamo's graphs as they are, without Inductor."""

    def setUp(self) -> None:
        super().setUp()
        torch._dynamo.reset()
        self.backend = mock.patch.object(torch._TorchCompileInductorWrapper, "__call__", as_is)
        self.backend.start()
        self.addCleanup(self.backend.stop)

    @contextlib.contextmanager
    def inductor(self) -> Iterator[None]:
        """Compile with Inductor instead."""
        self.backend.stop()
        try:
            yield
        finally:
            self.backend.start()

    def compile(self, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return torch.compile(fn, options=PYGRAPH | options)

    def num_graphs(self) -> int:
        return counters["stats"]["unique_graphs"]

    def final_code(self, fn: Callable[..., Any]) -> Any:
        return _debug_get_cache_entry_list(fn.__code__)[0].code


def wants_programs() -> bool:
    """Return whether the command line asks for random programs in place of the tests."""
    return any(argument.startswith("--programs") for argument in sys.argv)


def run_programs(test: TestCase, run: Callable[[int, collections.Counter[str]], None]) -> None:
    """
    Run random programs on the command line, ``--programs NUMBER [--seed FIRST] [--device cuda]``, and print what they
    counted.

    Args:
        test: is set up for each program
        run: runs the program of a seed, and adds to the counts
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_default_device(args.device)
    totals: collections.Counter[str] = collections.Counter()
    for seed in range(args.seed, args.seed + args.programs):
        test.setUp()
        try:
            run(seed, totals)
        except AssertionError as e:
            raise AssertionError(f"seed {seed}") from e
        finally:
            test.doCleanups()
        if seed % 20 == 19:
            print(dict(totals), flush=True)
    print(dict(totals))
