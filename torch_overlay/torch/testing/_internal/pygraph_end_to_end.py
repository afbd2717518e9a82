"""
``torch.compile`` on the modelled device, from Dynamo to the replay.

:func:`end_to_end` puts the device of modelled_sizes.py behind ``torch.compile``: Dynamo, guards, AOTAutograd, Inductor,
trees, selection and compiled replays are the real ones. Generated Triton kernels run with numpy.

:func:`observe` runs a program, a function that takes a :class:`Run`, and returns what it saw. A :class:`Variant` says what
compiles it. :func:`difference` compares two runs bit by bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import random
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.utils as inductor_utils
from torch._dynamo.utils import counters
from torch._inductor import async_compile, config, cudagraph_trees as trees
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.pygraph import report, reset_report
from torch._inductor.pygraph.schedule import buffers, plan
from torch._inductor.pygraph.select import by_size, timing
from torch.testing._internal import fake_cuda
from torch.testing._internal.modelled_cuda import modelled_device
from torch.testing._internal.modelled_operators import on_host
from torch.testing._internal.modelled_sizes import delivering, SizedDevice, SizedDriver
from torch.testing._internal.modelled_triton import ModelledTriton
from torch.testing._internal.python_autograd import run_backward_in_task


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


CONFIG = {
    "fx_graph_cache": False,
    "compile_threads": 1,
    # These run kernels.
    "shape_padding": False,
    "joint_graph_constant_folding": False,
    "triton.cudagraph_dynamic_shape_warn_limit": None,
}


@contextlib.contextmanager
def end_to_end() -> Iterator[SizedDevice]:
    """Functions that ``torch.compile`` compiles run on a modelled device."""
    torch._dynamo.reset()
    with contextlib.ExitStack() as stack:
        patch = lambda *args: stack.enter_context(mock.patch.object(*args))  # noqa: E731
        stack.enter_context(inductor_utils.fresh_cache())
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        stack.enter_context(config.patch(CONFIG))
        stack.enter_context(fake_cuda._pretend_h200())
        device = stack.enter_context(modelled_device(SizedDriver, SizedDevice))
        stack.enter_context(delivering(device))
        patch(torch._C._dynamo.guards, "_empty_strided_cuda", device.empty_strided)
        patch(torch.cuda, "_DeviceGuard", lambda index: contextlib.nullcontext())
        patch(torch.autograd, "_engine_run_backward", run_backward_in_task)
        patch(torch.accelerator, "is_available", lambda: False)
        generator = torch.cuda.default_generators[0]
        patch(torch.cuda, "get_rng_state", lambda device="cuda": generator.get_state())
        patch(torch.cuda, "set_rng_state", lambda state, device="cuda": generator.set_state(state))
        patch(torch.cuda, "manual_seed_all", generator.manual_seed)

        def triton(self: Any, name: str, source: str, *args: Any, **kwargs: Any) -> ModelledTriton:
            return ModelledTriton(device, name, async_compile._load_triton_kernel_from_source(name, source))

        patch(AsyncCompile, "triton", triton)
        trees.reset_cudagraph_trees()
        reset_report()
        counters.clear()
        try:
            yield device
        finally:
            torch._dynamo.reset()
            trees.reset_cudagraph_trees()
            gc.collect()


@dataclasses.dataclass(frozen=True)
class Variant:
    """
    How programs are compiled.

    Attributes:
        pygraph: whether PyGraph is on
        force: what it does without measuring
        shares_sizes: whether the first sizes have no recordings of their own
        seed: of the costs that selection finds, if nothing is forced; of the order in which a graph's nodes run, if it is
            scheduled
    """

    pygraph: bool = True
    force: str | None = None
    shares_sizes: bool = False
    seed: int = 0

    @property
    def options(self) -> dict[str, Any]:
        if not self.pygraph:
            return {}
        return {"pygraph": True} | ({} if self.force is None else {"pygraph_force": self.force})


STOCK = Variant(pygraph=False)
VARIANTS = {
    "bound": Variant(force="node_update"),
    "copied": Variant(force="copy"),
    "scheduled": Variant(force="node_update,dag"),
    "lanes": Variant(force="node_update,lanes2"),
    "selected": Variant(seed=1),
    "sizes": Variant(force="node_update", shares_sizes=True),
    "selected_sizes": Variant(shares_sizes=True, seed=2),
}
# One sample of each kind.
FEW_SAMPLES = {
    "WARMUP_SAMPLES": 0,
    "SAMPLES": 1,
    "MIN_SAMPLES": 1,
    "MAX_SAMPLES": 1,
    "DEVICE_SAMPLES": 1,
    "MAX_DEVICE_SAMPLES": 1,
}


@contextlib.contextmanager
def compiled_as(variant: Variant) -> Iterator[None]:
    """:func:`end_to_end` with what a variant asks for."""
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(end_to_end())
        draw = random.Random(variant.seed)
        if variant.force is not None and "," in variant.force:
            device.order = draw
            for module in (buffers, plan):
                stack.enter_context(mock.patch.object(module, "MIN_GAIN", 1.0))
        if variant.shares_sizes:
            stack.enter_context(mock.patch.object(by_size, "FEW_SIZES", 0))
        if variant.pygraph and variant.force is None:

            def cost(samples: timing.Samples) -> timing.Cost:
                return timing.Cost(*[timing.Estimate(draw.choice((10.0, 20.0, 40.0)))] * 3)

            stack.enter_context(mock.patch.multiple(timing, **FEW_SAMPLES))
            stack.enter_context(mock.patch.object(timing.Samples, "cost", cost))
        torch.manual_seed(0)
        yield


def on_device(values: torch.Tensor) -> torch.Tensor:
    t = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device="cuda")
    if values.numel():
        on_host(t).copy_(values)
    return t


def module_on_device(module: torch.nn.Module) -> torch.nn.Module:
    for m in module.modules():
        for name, p in m._parameters.items():
            if p is not None:
                m._parameters[name] = torch.nn.Parameter(on_device(p.data), requires_grad=p.requires_grad)
        for name, b in m._buffers.items():
            if b is not None:
                m._buffers[name] = on_device(b)
    return module


def _values(x: Any) -> Any:
    """Return a copy of a value, on the host."""
    if isinstance(x, torch.Tensor):
        return (on_host(x.detach()) if x.is_cuda else x.detach()).clone()
    return type(x)(map(_values, x)) if isinstance(x, (list, tuple)) else x


def _facts(x: Any) -> Any:
    """Return what a program can see of a tensor besides its values."""
    if not isinstance(x, torch.Tensor):
        return type(x).__name__
    nbytes = x.untyped_storage().nbytes() if x.numel() else 0
    return (
        *(x.dtype, tuple(x.shape), x.stride(), x.storage_offset(), nbytes, x.device.type),
        *(x.requires_grad, x.is_leaf, x._is_view(), type(x.grad_fn).__name__),
    )


@dataclasses.dataclass
class Sight:
    """
    Values that a program passed to :meth:`Run.see` in one call, and facts about them.

    Attributes:
        values: copies on the host
        facts: of each value
        aliases: pairs of values that share memory
    """

    label: str
    values: list[Any]
    facts: list[Any]
    aliases: list[tuple[int, int]]


class Run:
    """
    Compiles functions and makes tensors for a program, and stores what the program saw.

    Attributes:
        sights: in order
        choices: what became of each captured function
        counts: PyGraph's counters
        recordings: how many graphs were recorded since the last reset of Dynamo
    """

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.generator = torch.Generator().manual_seed(0)
        self.sights: list[Sight] = []
        self.kept: list[tuple[Any, ...]] = []
        self.choices: list[str] = []
        self.counts: dict[str, int] = {}
        self.recordings = 0

    def compile(self, fn: Any, **options: Any) -> Any:
        return torch.compile(fn, options=self.variant.options or None, **options)

    def on_cpu(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator)

    def randn(self, *size: int) -> torch.Tensor:
        return on_device(self.on_cpu(*size))

    def whole(self, *size: int, low: int = -4, high: int = 5) -> torch.Tensor:
        """Return whole numbers, whose sums do not depend on an order."""
        return on_device(torch.randint(low, high, size, generator=self.generator).float())

    def see(self, *values: Any, label: str = "") -> None:
        starts = [x.untyped_storage().data_ptr() if isinstance(x, torch.Tensor) and x.numel() else 0 for x in values]
        aliases = [(i, k) for k, b in enumerate(starts) for i, a in enumerate(starts[:k]) if a == b != 0]
        self.sights.append(Sight(label, [*map(_values, values)], [*map(_facts, values)], aliases))

    def keep(self, *values: Any) -> None:
        """See values now, and again when the program has ended."""
        self.kept.append(values)
        self.see(*values)


def observe(program: Callable[[Run], None], variant: Variant = STOCK) -> Run:
    with compiled_as(variant):
        run = Run(variant)
        program(run)
        for values in run.kept:
            run.see(*values, label="kept")
        run.kept.clear()
        run.choices = [entry.choice for entry in report()]
        run.counts = dict(counters["pygraph"])
        if (manager := trees.get_manager(0, create_if_none_exists=False)) is not None:
            run.recordings = manager.new_graph_id().id
    return run


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


def _differ(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (a.shape, a.dtype) != (b.shape, b.dtype) or a.numel() > 0 and not torch.equal(_bits(a), _bits(b))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) != len(b) or any(map(_differ, a, b))
    # The repr of a number tells the sign of zero, and NaN equals NaN.
    return type(a) is not type(b) or repr(a) != repr(b)


def difference(expected: Run, found: Run) -> str | None:
    """Return the first difference between two runs of a program, or None."""
    for i, (a, b) in enumerate(zip(expected.sights, found.sights)):
        at = f"sight {i} {a.label}"
        if a.label != b.label or _differ(a.values, b.values):
            return f"{at}:\n{a.values}\nis expected, and found is\n{b.label} {b.values}"
        if (a.facts, a.aliases) != (b.facts, b.aliases):
            return f"{at}:\n{a.facts} {a.aliases}\nis expected, and found is\n{b.facts} {b.aliases}"
    if len(expected.sights) != len(found.sights):
        return f"{len(found.sights)} sights instead of {len(expected.sights)}"
    return None
