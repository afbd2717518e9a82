"""A case, run in one of several ways: uncompiled, without CUDA graphs, with stock ones, with PyGraph."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import itertools
import operator
import random
from dataclasses import dataclass, field, replace
from typing import Any, TYPE_CHECKING

import numpy as np

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .catalogue import SUITES
from .compare import snapshot
from .frames import Frames


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .case import Case, Inputs


@dataclass(frozen=True)
class Variant:
    """A way to run a case."""

    # Arguments of torch.compile, or None for eager.
    compile: dict[str, Any] | None
    # Inductor's configuration while it runs.
    config: dict[str, Any] = field(default_factory=dict)
    # Measured after the others, and dropped, so that not all of them hold memory at once.
    alone: bool = False
    # Captured by hand, in one graph.
    hand_written: bool = False
    # Rewritten in JAX, in a process of its own.
    in_jax: bool = False
    # Called with the largest inputs of the ring alone.
    largest: bool = False

    @property
    def selects(self) -> bool:
        """Whether PyGraph times its functions."""
        return bool((self.compile or {}).get("options", {}).get("pygraph")) and "pygraph_force" not in self.config


def _forced(candidate: str, **options: Any) -> Variant:
    config = {"pygraph": True, "pygraph_force": candidate, **options}
    return Variant({"options": config}, config, alone=True)


VARIANTS = {
    "eager": Variant(None),
    "no_cg": Variant({}),
    "stock_cg": Variant({"mode": "reduce-overhead"}),
    # As in the PyTorch of the paper, where one CPU node keeps all of a graph from capture.
    "stock_whole": Variant({"options": {"triton.cudagraphs": True, "graph_partition": False}}),
    "pygraph": Variant({"options": {"pygraph": True}}),
    # With the graph breaks of stock.
    "mend_off": Variant({"options": {"pygraph": True, "pygraph_mend": False}}),
    # Kernels of a graph one after another.
    "chain": Variant({"options": {"pygraph": True, "pygraph_schedules": False}}),
    # A recording for each size.
    "by_size": Variant({"options": {"pygraph": True, "pygraph_sizes": False}}),
    # One recording for the largest size: what memory a recording for many sizes is compared with.
    "largest_size": replace(_forced("node_update"), largest=True),
    "forced_lanes2": _forced("node_update,lanes2"),
    "forced_lanes4": _forced("node_update,lanes4"),
    "forced_dag": _forced("node_update,dag"),
    # The ablation: every graph deployed with its inputs copied, which leaves the code
    # transformations; every graph with its inputs bound, which adds parameter indirection.
    # With selection that is pygraph itself.
    "forced_copy": _forced("copy"),
    "forced_node_update": _forced("node_update"),
    # Other ways to bind inputs.
    "forced_prelude": _forced("prelude"),
    "hand_written": Variant({}, alone=True, hand_written=True),
    "jax": Variant(None, in_jax=True),
    # Of the same program with its CPU values on the GPU; see cgct_run.py.
    "gpu": Variant({"options": {"pygraph": True}}),
    "gpu_node_update": _forced("node_update"),
}


def build(case: Case, device: torch.device, small: bool) -> nn.Module:
    seed()
    with torch.device("cpu") if case.built_on_cpu else device:
        module = case.module(small)
    if not SUITES[case.suite].dropout:
        for part in module.modules():
            # A layer that drops nothing stays as it is. Eager mode and compiled code draw different numbers, and at 1e-30
            # either may drop an element.
            if isinstance(part, nn.Dropout) and part.p:
                part.p = 1e-30
    module.train(case.mode == "training")
    return module.to(device, case.dtype) if case.mode == "inference" else module.to(device)


def seed(number: int = 0) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


class Events:
    """Marks of timing.time_interleaved on the timeline of the current stream."""

    @classmethod
    def of(cls, device: torch.device) -> Events | None:
        return cls() if device.type == "cuda" else None

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1e3


class Program:
    """``original`` run in one way. When training it has weights of its own, and always buffers."""

    def __init__(self, case: Case, original: nn.Module, variant: Variant, device_type: str) -> None:
        self.case = case
        self.device_type = device_type
        self.training = case.mode == "training"
        shared = {} if self.training else {id(p): p for p in original.parameters()}
        self.module = copy.deepcopy(original, shared)
        self.compiled = self.module
        dynamic = SUITES[case.suite].dynamic or None
        if variant.compile is not None and case.compiled_part:
            self.module.get_submodule(case.compiled_part).compile(dynamic=dynamic, **variant.compile)
        elif variant.compile is not None:
            self.compiled = torch.compile(self.module, dynamic=dynamic, **variant.compile)
        self.config = variant.config
        self.frames = Frames()
        self.optimizer = None
        if self.training and SUITES[case.suite].optimizer:
            self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-3)

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.case.attributes:
            kwargs = dict(kwargs)
            for name in self.case.attributes:
                setattr(self.module, name, kwargs.pop(name))
        if not self.training:
            return self.compiled(*args, **kwargs)
        self.release()
        with torch.autocast(self.device_type, self.case.dtype, enabled=self.case.autocast):
            out = self.compiled(*args, **kwargs)
        loss_of(out).backward()
        if self.optimizer:
            self.optimizer.step()
        return out

    def warm(self, inputs: Inputs) -> None:
        """Compiles the step, and captures nothing."""
        with self.configured():
            Program.step(self, *inputs)
        self.release()

    def release(self) -> None:
        self.module.zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def configured(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.config:
                stack.enter_context(torch._inductor.config.patch(self.config))
            stack.enter_context(torch.set_grad_enabled(self.training))
            stack.enter_context(self.frames.running())
            yield

    def loop(self, ring: list[Inputs]) -> Callable[[int], None]:
        inputs = itertools.cycle(ring)

        def run(calls: int) -> None:
            with self.configured():
                for args, kwargs in itertools.islice(inputs, calls):
                    self.step(args, kwargs)
            # The next program gets the memory of the gradients.
            self.release()

        return run

    def observe(self, inputs: Inputs, state: dict[str, torch.Tensor]) -> dict[str, Any]:
        """A copy of all that a step from the given state leaves behind. Does not wait."""
        # One tensor may have become two buffers.
        buffers = self.module.named_buffers(remove_duplicate=False)
        own = dict(itertools.chain(self.module.named_parameters(), buffers))
        with torch.no_grad():
            for name, value in state.items():
                own[name].copy_(value)
        seed()
        with self.configured():
            outputs = self.step(*inputs)
            found = snapshot(
                {
                    "outputs": _plain(outputs),
                    "inputs": inputs,
                    "buffers": dict(self.module.named_buffers()),
                    "grads": {n: p.grad for n, p in self.module.named_parameters()} if self.training else {},
                }
            )
        del outputs
        self.release()
        return found


class HandWritten(Program):
    """
    The compiled step, captured as a user would do it: once, at addresses to which the
    inputs of each call are copied.
    """

    graph: torch.cuda.CUDAGraph | None = None

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.graph is None:
            self._capture((args, kwargs))
        torch._foreach_copy_(self.static, _tensors(args, kwargs))
        self.graph.replay()
        return self.outputs

    def release(self) -> None:
        # The graph writes to the gradients that it was captured with.
        if self.graph is None:
            super().release()

    def _capture(self, inputs: Inputs) -> None:
        args, kwargs = inputs = clone(inputs)
        self.static = _tensors(args, kwargs)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                super().step(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        super().release()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.outputs = super().step(*inputs)
        self.graph = graph


def loss_of(outputs: Any) -> torch.Tensor:
    loss = getattr(outputs, "loss", None)
    if loss is not None:
        return loss
    found = [outputs] if isinstance(outputs, torch.Tensor) else pytree.tree_leaves(outputs)
    terms = []
    for t in found:
        if isinstance(t, torch.Tensor) and t.requires_grad:
            t = t if t.dtype == torch.float64 else t.float()
            terms.append(t.square().mean() if t.dim() else t)
    return functools.reduce(operator.add, terms)


def in_double_precision(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, tree)


def clone(tree: Any) -> Any:
    """Of the tensors; one that occurs twice does so in the clone."""
    clones: dict[int, torch.Tensor] = {}

    def once(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in clones:
            clones[id(t)] = t.clone()
        return clones[id(t)]

    return pytree.tree_map_only(torch.Tensor, once, tree)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found = [*args, *kwargs.values()]
    if not all(isinstance(t, torch.Tensor) for t in found):
        found = [t for t in pytree.tree_leaves(found) if isinstance(t, torch.Tensor)]
    return found


def _plain(outputs: Any) -> Any:
    # Model outputs of transformers are mappings without key paths.
    return dict(outputs) if isinstance(outputs, collections.abc.Mapping) else outputs
