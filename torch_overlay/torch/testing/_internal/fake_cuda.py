"""Run ``torch.compile`` for an H200 on a machine that has no GPU and no driver.

Inductor asks the device only a few questions (capability, number of multiprocessors, ...) and
needs it otherwise only to run what it generated. :func:`fake_cuda` answers the questions, makes
every tensor fake, and stops short of running: each compiled graph is replaced by an interpretation
of its FX graph on fake tensors, so that graph breaks, the following graphs and ``backward()`` are
reached in the order in which a real run would reach them. Inductor's passes, scheduler, partitions
and wrapper code are the real ones.

Typical use::

    with fake_cuda() as graphs:
        model = torch.nn.Linear(64, 64, device="cuda")
        x = torch.randn(8, 64, device="cuda")
        torch.compile(model, mode="reduce-overhead")(x).sum().backward()
    print(report(graphs))

What differs from a real run: nothing that needs measured times is decided (shape padding and
autotuning are off), constants are not folded by running kernels, and values do not exist, so that
code which branches on them raises, as it does under any ``FakeTensorMode``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import math
import re
import types
from typing import Any, TYPE_CHECKING
from unittest import mock

from triton.runtime import driver as triton_driver

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.compile_fx as compile_fx
import torch._inductor.cudagraph_trees as cudagraph_trees
import torch._inductor.output_code
import torch._inductor.utils as inductor_utils
import torch._subclasses.fake_tensor as fake_tensor
import torch.fx.experimental.proxy_tensor as proxy_tensor
import torch.utils._triton
from torch._dynamo import device_interface
from torch._dynamo.device_interface import CudaInterface
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, PlainAOTOutput, TangentAOTInput
from torch._guards import detect_fake_mode
from torch._inductor import async_compile, config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CacheBase
from torch._inductor.cudagraph_utils import PlaceholderInfo, to_placeholder_info
from torch._inductor.graph import GraphLowering, SubgraphLowering
from torch._inductor.ir import IRNode
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.scheduler import NopKernelSchedulerNode, Scheduler
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.python_autograd import run_backward


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch._inductor.pygraph.types.partition import GraphInfo
    from torch._inductor.scheduler import BaseSchedulerNode


H200 = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    gcnArchName="",
    total_memory=140 << 30,
    L2_cache_size=60 << 20,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    is_integrated=False,
)


@dataclasses.dataclass(frozen=True)
class GraphInput:
    """One tensor input of an Inductor graph.

    ``origin`` is the expression for it in the compiled function, or what AOTAutograd says of it.
    ``nbytes`` counts distinct elements (an expanded dimension counts once), symbolic sizes with
    their hints.
    """

    idx: int
    name: str
    origin: str
    shape: tuple[str, ...]
    dtype: torch.dtype
    device: str
    nbytes: int
    static: bool
    mutated: bool

    @property
    def external(self) -> bool:
        """On the GPU with an address that may change: what stock copies and PyGraph does not."""
        return self.device == "cuda" and not self.static


@dataclasses.dataclass(frozen=True)
class Partition:
    """A run of kernels that can be captured as a whole or, for ``reasons``, cannot.

    ``copied`` maps the inputs that stock CUDA graphs copy at each replay of this partition to
    their bytes: external inputs of the graph that no earlier captured partition has handed on,
    and results of partitions that are not captured. ``mutated`` are the external inputs it
    writes to; with any, stock runs it without a CUDA graph and copies nothing. ``cpu_inputs``
    are tensors on the CPU, of which a captured partition must have none.
    """

    captured: bool
    kernels: int
    reasons: tuple[str, ...]
    copied: dict[str, int]
    mutated: tuple[str, ...]
    cpu_inputs: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class CompiledGraph:
    """What Inductor made of one FX graph.

    ``outputs`` are (dtype, type of device) of the tensors that generated code returns.
    ``skip_reason`` is why the graph as a whole is not captured, if so; ``kernels`` maps the names
    of Triton kernels to PTX for sm_90 and is empty unless asked for. ``info`` is None without
    config.pygraph.
    """

    source: str
    is_backward: bool
    skip_reason: str | None
    partitions: tuple[Partition, ...]
    placeholders: tuple[PlaceholderInfo, ...]
    static_input_idxs: tuple[int, ...]
    inputs: tuple[GraphInput, ...]
    outputs: tuple[tuple[torch.dtype, str], ...]
    kernels: dict[str, str]
    info: GraphInfo | None

    @property
    def external_inputs(self) -> tuple[GraphInput, ...]:
        return tuple(i for i in self.inputs if i.external)

    @property
    def cpu_inputs(self) -> tuple[GraphInput, ...]:
        return tuple(i for i in self.inputs if i.device == "cpu")

    @property
    def copied_bytes(self) -> int:
        """Bytes that stock CUDA graphs copy each time this graph is replayed."""
        return sum(sum(p.copied.values()) for p in self.partitions if p.captured)


def report(graphs: Iterable[CompiledGraph]) -> str:
    """What would be captured, what would not and why, and which inputs are external, as text."""
    lines = []
    total = 0
    for number, graph in enumerate(graphs):
        captured = [p for p in graph.partitions if p.captured]
        lines.append(
            f"graph {number}, {'backward' if graph.is_backward else 'forward'}: "
            f"{sum(p.kernels for p in captured)} of {sum(p.kernels for p in graph.partitions)} kernels captured "
            f"in {len(captured)} of {len(graph.partitions)} partitions"
        )
        if graph.skip_reason:
            lines.append(f"  not captured: {graph.skip_reason.splitlines()[0].rstrip()}")
        else:
            for p in graph.partitions:
                if not p.captured:
                    lines.append(f"  not captured: {p.kernels} kernels, {', '.join(p.reasons)}")
        for p in captured:
            if p.mutated:
                lines.append(f"  captured by PyGraph only: {p.kernels} kernels, writes to {', '.join(p.mutated)}")
        for i in graph.external_inputs:
            lines.append(
                f"  external: {i.name} = {i.origin}, {str(i.dtype).removeprefix('torch.')}"
                f"[{', '.join(i.shape)}], {i.nbytes:,} bytes{', written to' if i.mutated else ''}"
            )
        for i in graph.cpu_inputs:
            lines.append(f"  on the CPU: {i.name} = {i.origin}")
        lines.append(f"  copied at each replay by stock CUDA graphs: {graph.copied_bytes:,} bytes")
        total += graph.copied_bytes
    lines.append(f"copied at each replay by stock CUDA graphs, all graphs: {total:,} bytes")
    return "\n".join(lines)


def _origin(node: torch.fx.Node, sources: Sequence[str]) -> str:
    desc = node.meta.get("desc")
    if isinstance(desc, PlainAOTInput) and desc.idx < len(sources):
        return sources[desc.idx]
    if isinstance(desc, TangentAOTInput) and isinstance(desc.output, PlainAOTOutput):
        return f"gradient of output {desc.output.idx}"
    return str(desc)


def _hint(value: int | torch.SymInt) -> int:
    if not isinstance(value, torch.SymInt):
        return int(value)
    hint = value.node.hint
    return config.unbacked_symint_fallback if hint is None else hint


def _tensor_nbytes(t: torch.Tensor) -> int:
    sizes = (_hint(s) for s, stride in zip(t.shape, t.stride()) if stride != 0)
    return math.prod(sizes) * t.element_size()


def _buffer_nbytes(buffer: Any) -> int:
    numel = V.graph.sizevars.optimization_hint(buffer.get_numel(), fallback=config.unbacked_symint_fallback)
    return numel * buffer.get_dtype().itemsize


class _Recorder:
    """Collects, while one graph is compiled, what its :class:`CompiledGraph` is made of."""

    def __init__(self, compile_kernels: bool) -> None:
        self.graphs: list[CompiledGraph] = []
        self.compile_kernels = compile_kernels
        self.sources: list[str] = []
        self.reset()

    def reset(self) -> None:
        self.source = ""
        self.partitions: list[Partition] = []
        self.outputs: tuple[tuple[torch.dtype, str], ...] = ()
        self.kernels: dict[str, str] = {}
        self.cudagraphified = False
        self.stock_external_names: frozenset[str] = frozenset()

    # Each of the following wraps the function of the same name.

    def compile_fx(self, original: Callable[..., Any], gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        sources = [getattr(node, "_dynamo_source", None) for node in gm.graph.find_nodes(op="placeholder")]
        # L['x'][0] is the local variable's x[0].
        self.sources = [re.sub(r"^L\['(\w+)'\]", r"\1", source.name) if source else "" for source in sources]
        return original(gm, *args, **kwargs)

    def _compile_fx_inner(
        self, original: Callable[..., Any], gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Any:
        self.reset()
        # Inductor's passes work in place on gm.
        eager = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
        nodes = eager.graph.find_nodes(op="placeholder")
        placeholders = tuple(map(to_placeholder_info, nodes))
        static_input_idxs = tuple(kwargs.get("static_input_idxs") or ())
        # Without PyGraph, all that the forward saved is at a fixed address: its inputs were copied.
        saved = inductor_utils.count_tangents(gm) if kwargs["is_backward"] else 0
        self.stock_external_names = frozenset(
            p.name for i, p in enumerate(placeholders) if i >= saved and i not in static_input_idxs
        )
        compiled = original(gm, example_inputs, **kwargs)
        if not isinstance(compiled, CompiledFxGraph):
            return compiled
        info = compiled.cudagraph_info
        self.graphs.append(
            CompiledGraph(
                source=self.source,
                is_backward=kwargs["is_backward"],
                skip_reason=compiled.disabled_cudagraphs_reason
                or ", ".join(info.cudagraph_fail_reasons if info else ())
                or None,
                partitions=tuple(
                    dataclasses.replace(p, captured=p.captured and self.cudagraphified) for p in self.partitions
                ),
                placeholders=placeholders,
                static_input_idxs=static_input_idxs,
                inputs=tuple(
                    GraphInput(
                        idx=i,
                        name=p.name,
                        origin=_origin(node, self.sources),
                        shape=tuple(map(str, t.shape)),
                        dtype=t.dtype,
                        device=t.device.type,
                        nbytes=_tensor_nbytes(t),
                        static=i in static_input_idxs,
                        mutated=i in compiled.mutated_input_idxs,
                    )
                    for i, (p, t, node) in enumerate(zip(placeholders, example_inputs, nodes))
                    if isinstance(t, torch.Tensor)
                ),
                outputs=self.outputs,
                kernels=self.kernels,
                info=getattr(compiled, "graph_info", None),  # stock has none
            )
        )

        def run(args: list[Any]) -> Any:
            inputs = list(args)
            args.clear()
            loops = eager.graph.find_nodes(op="call_function", target=torch.ops.higher_order.while_loop)
            # A loop ignores the symbols of its body in an environment that the mode need not have.
            with contextlib.ExitStack() as stack:
                if loops:
                    stack.enter_context(mock.patch.object(detect_fake_mode(inputs), "shape_env", ShapeEnv()))
                return torch.fx.Interpreter(eager).run(*inputs)

        compiled.current_callable = run
        return compiled

    def save_output_code(self, source: str) -> None:
        self.source = source

    def codegen(self, original: Callable[..., Any], scheduler: Scheduler) -> Any:
        if not isinstance(V.graph, SubgraphLowering):
            tensors = (o for o in V.graph.graph_outputs if isinstance(o, IRNode) and o.get_device() is not None)
            self.outputs = tuple((o.get_dtype(), o.get_device().type) for o in tensors)
        if not config.graph_partition and not isinstance(V.graph, SubgraphLowering):
            inputs = {name: node for name, node in V.graph.graph_inputs.items() if isinstance(node, IRNode)}
            self.partitions.append(self._partition(scheduler, scheduler.nodes, False, inputs, set()))
        return original(scheduler)

    def graph_partition(self, original: Callable[..., Any], scheduler: Scheduler) -> Any:
        partitions, signatures = original(scheduler)
        if not isinstance(V.graph, SubgraphLowering):
            managed: set[str] = set()
            for nodes, signature in zip(partitions, signatures):
                skip = signature.skip_cudagraph
                self.partitions.append(self._partition(scheduler, nodes, skip, signature.input_nodes, managed))
                if not skip:
                    managed.update(buffer.get_name() for buffer in signature.output_nodes)
        return partitions, signatures

    def _partition(
        self,
        scheduler: Scheduler,
        nodes: Sequence[BaseSchedulerNode],
        skip: bool,
        inputs: dict[str, Any],
        managed: set[str],
    ) -> Partition:
        """``inputs``: IR of the partition's inputs by name; ``managed``: those at fixed addresses
        because an earlier captured partition returns them."""
        nodes = [n for n in nodes if not isinstance(n, NopKernelSchedulerNode)]
        reasons = dict.fromkeys(filter(None, map(scheduler.should_partition, nodes)))
        copied = {}
        if not skip:
            for name, buffer in inputs.items():
                fixed = name in managed or (name in V.graph.graph_inputs and name not in self.stock_external_names)
                sizes = buffer.maybe_get_size()  # None: stock lets a list be an input
                device = buffer.get_device()
                if not fixed and sizes is not None and device is not None and device.type == "cuda":
                    copied[name] = _buffer_nbytes(buffer)
        mutated = tuple(name for name in copied if name in V.graph.mutated_inputs)
        cpu_inputs = tuple(
            name for name, buffer in inputs.items() if (device := buffer.get_device()) and device.type == "cpu"
        )
        return Partition(not skip, len(nodes), tuple(reasons), {} if mutated else copied, mutated, cpu_inputs)

    def cudagraphify(self, original: Callable[..., Any], model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.cudagraphified = True
        return model

    def triton(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``AsyncCompile.triton``: called with (self, kernel name, source, ...) as the wrapper module is loaded."""
        _, name, source = args[:3]
        if self.compile_kernels:
            kernel = async_compile._load_triton_kernel_from_source(name, source)
            # Static launchers keep the cubin only.
            with config.patch(use_static_triton_launcher=False):
                self.kernels[name] = kernel._precompile_config(kernel.configs[0]).kernel.asm["ptx"]
        return None


_deepcopy_module = torch.fx.GraphModule.__deepcopy__


def _copy_module(module: torch.fx.GraphModule, memo: dict[int, Any]) -> torch.fx.GraphModule:
    # Of a lazily compiled backward: its constants are real tensors.
    with unset_fake_temporarily():
        return _deepcopy_module(module, memo)


class _TritonDriver:
    """Knows its target and nothing else, which is all that compiling takes."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def is_active(self) -> bool:
        return True


def _clear_device_caches() -> None:
    """Forget what was found out about the device."""
    for module in (inductor_utils, torch.utils._triton):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    DeviceProperties.create.cache_clear()
    CacheBase.get_system.cache_clear()


def _constant_name(graph: GraphLowering, name: str, device_override: torch.device | None) -> str:
    """``GraphLowering.constant_name``, whose copy to the device is fake."""
    constant = graph.constants[name]
    if device_override is None or constant.device == device_override:
        return name
    copied = f"{name}_{device_override.type}{device_override.index or 0}"
    if copied in graph.constants:
        return copied
    stride = torch.empty_like(constant, device="meta").stride()
    with V.fake_mode:
        data = torch.empty_strided(constant.shape, stride, dtype=constant.dtype, device=device_override)
    # It has no memory that could be another constant's.
    with mock.patch.object(torch._inductor.graph, "is_same_tensor", lambda data, value: False):
        return graph.allocate_non_dup_const_name(copied, data)


@contextlib.contextmanager
def _pretend_h200() -> Iterator[None]:
    """Everything that asks for the device is told of an H200; nothing touches a driver."""
    device_functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "_lazy_init": lambda: None,
        "synchronize": lambda device=None: None,
        "get_device_name": lambda device=None: H200.name,
        "get_device_properties": lambda device=None: H200,
        "get_device_capability": lambda device=None: (H200.major, H200.minor),
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
    }
    with contextlib.ExitStack() as stack:
        patch = lambda *args: stack.enter_context(mock.patch.object(*args))  # noqa: E731
        for name, function in device_functions.items():
            patch(torch.cuda, name, function)
            # The interface holds the functions themselves, some without their underscore.
            if name.lstrip("_") in vars(CudaInterface):
                patch(CudaInterface, name.lstrip("_"), staticmethod(function))
        for cache in (
            device_interface.caching_worker_current_devices,
            device_interface.caching_worker_device_properties,
        ):
            stack.enter_context(mock.patch.dict(cache, clear=True))
        patch(torch._C, "_cuda_hasPrimaryContext", lambda device: False)
        patch(fake_tensor, "init_gpu_context", lambda device: None)
        patch(FakeTensorMode, "avoid_device_init", True)
        # Tracing would compute with small constants, on the device they belong to.
        patch(proxy_tensor, "CONSTANT_NUMEL_LIMIT", -1)
        patch(GraphLowering, "constant_name", _constant_name)
        patch(triton_driver, "_active", _TritonDriver())
        patch(triton_helpers, "set_driver_to_gpu", lambda: None)
        _clear_device_caches()
        stack.callback(_clear_device_caches)
        yield


@contextlib.contextmanager
def fake_cuda(*, compile_kernels: bool = False) -> Iterator[list[CompiledGraph]]:
    """Yields a list that receives a :class:`CompiledGraph` for each graph Inductor compiles.

    Inside, all new tensors are fake and those on ``"cuda"`` belong to a pretended H200. With
    ``compile_kernels``, Triton kernels are compiled for sm_90 (first configuration of each).
    Compiled functions do not outlive the context.
    """
    recorder = _Recorder(compile_kernels)
    hooks = (
        (compile_fx, "compile_fx", recorder.compile_fx),
        (compile_fx, "_compile_fx_inner", recorder._compile_fx_inner),
        (compile_fx, "cudagraphify", recorder.cudagraphify),
        (Scheduler, "codegen", recorder.codegen),
        (Scheduler, "graph_partition", recorder.graph_partition),
        (AsyncCompile, "triton", recorder.triton),
    )
    torch._dynamo.reset()
    collecting = gc.isenabled()
    # Collecting the fake tensors of an earlier context while new ones are made has crashed the
    # interpreter, so their cycles are collected at the end, outside the mode.
    gc.disable()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(inductor_utils.fresh_cache())
            stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
            stack.enter_context(_pretend_h200())
            for owner, name, hook in hooks:
                wrapped = functools.partial(hook, getattr(owner, name))
                if isinstance(owner, type):
                    wrapped = functools.partialmethod(wrapped)
                stack.enter_context(mock.patch.object(owner, name, wrapped))
            stack.enter_context(mock.patch.object(GraphLowering, "save_output_code", recorder.save_output_code))
            # Kernels for the CPU are not built, and a backward may run without its forward's manager.
            stack.enter_context(mock.patch.object(AsyncCompile, "cpp_pybinding", lambda *args, **kwargs: None))
            stack.enter_context(mock.patch.object(cudagraph_trees, "get_manager", mock.MagicMock()))
            stack.enter_context(
                config.patch(
                    {
                        "fx_graph_cache": False,
                        "compile_threads": 1,
                        # Finding out the instruction set takes a C++ compiler and its time.
                        "cpp.vec_isa_ok": False,
                        # These run kernels.
                        "shape_padding": False,
                        "joint_graph_constant_folding": False,
                    }
                )
            )
            # Module.to() swaps fake parameters, which a weak reference of the fake mode would prevent.
            stack.enter_context(
                mock.patch.object(torch.utils, "weakref", types.SimpleNamespace(getweakrefs=lambda t: []))
            )
            stack.enter_context(mock.patch.object(torch.fx.GraphModule, "__deepcopy__", _copy_module))
            stack.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", run_backward))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            yield recorder.graphs
    finally:
        torch._dynamo.reset()
        gc.collect()
        if collecting:
            gc.enable()
