"""
Generated code on the modelled device of modelled_cuda.py, for tests of recordings for many sizes.

:class:`SizedDriver` has nodes whose function, grid and attributes can be set, as cuda.bindings.driver has. A function
that needs other clusters than its node has is refused, and does not run.

:class:`SizedDevice` runs operators as a library does: it chooses a kernel for the sizes, passes addresses in a struct
with sizes that nobody can read, splits large products in two kernels, and takes temporary memory or a workspace.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import struct
import sys
import types
import warnings
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
import torch._inductor.compile_fx as compile_fx
from torch._inductor import async_compile, config, cudagraph_trees
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.cudagraph_utils import PyGraphOptions
from torch._inductor.pygraph.capture.library import NAMES_OF_PRODUCTS
from torch._inductor.pygraph.graph.placeholder import tensor_at
from torch._inductor.pygraph.values import deliver
from torch.testing._internal.fake_cuda import CompiledGraph, fake_cuda
from torch.testing._internal.modelled_cuda import ModelledDevice, ModelledStream, WORKSPACE_FLOATS
from torch.testing._internal.modelled_driver import ModelledDriver
from torch.testing._internal.modelled_nodes import cu, KernelNode, memory, ModelledKernel, Node, u64
from torch.testing._internal.modelled_operators import on_host
from torch.testing._internal.modelled_triton import ModelledTriton


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@dataclasses.dataclass(eq=False)
class SizedKernel(ModelledKernel):
    """
    Attributes:
        execute: takes the grid and the bytes of each parameter
        cluster: that its node has to have
    """

    execute: Callable[[tuple[int, ...], list[bytes]], None] | None = None
    cluster: int = 1


class SizedNode(KernelNode):
    """A node that launches a SizedKernel."""

    def __init__(self, kernel: SizedKernel, grid: tuple[int, ...], parameters: Sequence[bytes]) -> None:
        super().__init__(*parameters)
        self.kernel = kernel
        self.layout = kernel.layout
        self.grid = grid
        self.cluster = kernel.cluster

    @property
    def function(self) -> int:
        return self.kernel.function

    def params(self, handle: int) -> Any:
        params = super().params(handle)
        params.gridDimX, params.gridDimY, params.gridDimZ = self.grid
        return params


class FillNode(Node):
    """Fills bytes with zeros."""

    def __init__(self, address: int, nbytes: int) -> None:
        super().__init__("MEMSET")
        self.address, self.nbytes = address, nbytes

    def params(self, handle: int) -> Any:
        params = cu.CUDA_MEMSET_NODE_PARAMS()
        params.dst = cu.CUdeviceptr(self.address)
        params.value, params.elementSize, params.width, params.height = 0, 1, self.nbytes, 1
        return params


# What a node of an executable graph launches: kernel, grid, parameters, clusters; or address and bytes.
Held = tuple[Any, ...]


class SizedDriver(ModelledDriver):
    """
    Attributes:
        holds: of each node of an executable graph what it launches
        own: executable graphs of the program's own, of graphs that were not captured
        own_launches: how often one was launched
        programmatic: nodes whose kernel may begin while the one before runs
        drawn_from: the generator's state that the last replay of a captured graph began with
    """

    def __init__(self) -> None:
        super().__init__()
        self.holds: dict[int, Held] = {}
        self.own: list[int] = []
        self.own_launches = 0
        self.programmatic: set[int] = set()
        self.drawn_from: torch.Tensor | None = None

    def add_sized_kernel(
        self, name: str, layout: list[tuple[int, int]], execute: Callable[..., None], cluster: int = 1
    ) -> SizedKernel:
        known = self.add_kernel(name, layout)
        if not isinstance(known, SizedKernel):
            known = SizedKernel(name, known.function, layout, execute, cluster)
            self.kernels[known.function] = known
        return known

    def launch(self, executable: int, *args: Any) -> Any:
        """Only the replay of a captured graph gives its state to kernels, and advances the generator."""
        generator = torch.cuda.default_generators[0]
        before = generator.get_state()
        if executable not in self.own:
            self.drawn_from = before
            return super().launch(executable, *args)
        if self.drawn_from is not None:
            generator.set_state(self.drawn_from)
        try:
            return super().launch(executable, *args)
        finally:
            generator.set_state(before)

    @staticmethod
    def _captured_by(node: Node) -> Held | None:
        if isinstance(node, SizedNode):
            return node.kernel, node.grid, [*node.parameters], node.cluster
        return (node.address, node.nbytes) if isinstance(node, FillNode) else None

    def instantiate(self, graph: int) -> int:
        executable = super().instantiate(graph)
        for i in self.with_bodies(graph):
            if (held := self._captured_by(self.nodes[i])) is not None:
                self.holds[i] = held
        return executable

    def run_node(self, i: int, order: Any) -> None:
        if i not in self.holds:
            super().run_node(i, order)
            return
        if self.held[i] is None and isinstance(self.nodes[i], SizedNode):
            raise AssertionError("launched with a node that refused")
        match self.holds[i]:
            case kernel, grid, parameters, cluster:
                if kernel.cluster != cluster:
                    raise AssertionError("the context ends")
                kernel.execute(grid, parameters)
            case address, nbytes:
                ctypes.memset(address, 0, nbytes)

    def _read_kernel(self, i: int, params: Any) -> Held:
        function = int(params.func)
        kernel = self.kernels[function]
        if not params.kernelParams or params.extra:
            raise AssertionError("either kernelParams or extra")
        pointers = (ctypes.c_void_p * len(kernel.layout)).from_address(params.kernelParams)
        values = [ctypes.string_at(pointer, size) for pointer, (_, size) in zip(pointers, kernel.layout)]
        grid = params.gridDimX, params.gridDimY, params.gridDimZ
        if 0 in grid:
            raise AssertionError("an empty grid")
        return kernel, grid, values

    def _set(self, executable: Any, node: Any, read: Callable[[Node], Any]) -> Any:
        if int(node) not in self.with_bodies(self.executables[int(executable)]):
            raise AssertionError("a node of another graph")
        return super()._set(executable, node, read)

    def cuGraphExecKernelNodeSetParams(self, executable: Any, node: Any, params: Any) -> Any:
        i = int(node)
        if i not in self.holds:
            return super().cuGraphExecKernelNodeSetParams(executable, node, params)
        (status,) = self._set(executable, node, lambda _: [])
        if int(status):
            return (status,)
        kernel, grid, values = self._read_kernel(i, params)
        cluster = self.holds[i][3]
        if kernel.cluster != cluster:
            return (cu.CUresult.CUDA_ERROR_INVALID_CLUSTER_SIZE,)
        self.holds[i] = kernel, grid, values, cluster
        return (self.success,)

    def cuGraphExecMemsetNodeSetParams(self, executable: Any, node: Any, params: Any, context: Any) -> Any:
        i = int(node)
        if i not in self.holds:
            return super().cuGraphExecMemsetNodeSetParams(executable, node, params, context)
        (status,) = self._set(executable, node, lambda _: ())
        if not int(status):
            self.holds[i] = int(params.dst), params.width * params.elementSize
        return (status,)

    def cuGraphCreate(self, flags: int) -> Any:
        return self.success, cu.CUgraph(self.add_graph())

    def cuGraphDestroy(self, graph: Any) -> Any:
        return (self.success,)

    def cuGraphAddKernelNode(self, graph: Any, behind: list[Any], count: int, params: Any) -> Any:
        if int(params.func) not in self.kernels:
            return super().cuGraphAddKernelNode(graph, behind, count, params)
        kernel, grid, values = self._read_kernel(0, params)
        node = SizedNode(kernel, grid, values)
        node.cluster = 1
        return self._add(graph, node, behind)

    def cuGraphAddMemsetNode(self, graph: Any, behind: list[Any], count: int, params: Any, context: Any) -> Any:
        return self._add(graph, FillNode(int(params.dst), params.width * params.elementSize), behind)

    def _add(self, graph: Any, node: Node, behind: list[Any]) -> Any:
        if self.refuses(len(self.nodes)):
            return self.invalid, None
        return self.success, cu.CUgraphNode(self.add_node(int(graph), node, map(int, behind)))

    def cuGraphAddDependencies(self, graph: Any, froms: list[Any], tos: list[Any], data: Any, count: int) -> Any:
        if data is None:
            return super().cuGraphAddDependencies(graph, froms, tos, data, count)
        if [(int(edge.type), edge.from_port) for edge in data] != [(1, 1)] * count:
            return (self.invalid,)
        self.edges += zip(map(int, froms), map(int, tos))
        self.programmatic.update(map(int, tos))
        return (self.success,)

    def cuGraphKernelNodeCopyAttributes(self, to: Any, source: Any) -> Any:
        node, cluster = self.nodes[int(to)], self.nodes[int(source)].cluster
        if node.kernel.cluster != cluster:
            return (cu.CUresult.CUDA_ERROR_INVALID_CLUSTER_SIZE,)
        node.cluster = cluster
        return (self.success,)

    def cuGraphExecUpdate(self, executable: Any, graph: Any) -> Any:
        """On an H100 a node computed wrong results after it."""
        raise AssertionError("no node may be updated so")

    def cuGraphInstantiate(self, graph: Any, flags: int) -> Any:
        for i in self.graphs[int(graph)]:
            if isinstance(node := self.nodes[i], SizedNode) and node.cluster != node.kernel.cluster:
                return cu.CUresult.CUDA_ERROR_INVALID_CLUSTER_SIZE, None
        self.own.append(executable := self.instantiate(int(graph)))
        return self.success, cu.CUgraphExec(executable)

    def cuGraphExecDestroy(self, executable: Any) -> Any:
        self.own.remove(int(executable))
        del self.executables[int(executable)]
        return (self.success,)

    def cuGraphLaunch(self, executable: Any, stream: Any) -> Any:
        if int(executable) not in self.own:
            return (self.invalid,)
        self.own_launches += 1
        self.launch(int(executable))
        return (self.success,)

    def _captured(self, i: int) -> Any:
        return () if isinstance(self.nodes[i], FillNode) else super()._captured(i)

    def cuGraphKernelNodeGetAttribute(self, node: Any, which: Any) -> Any:
        value = cu.CUkernelNodeAttrValue()
        if which == cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
            value.clusterDim.x = getattr(self.nodes[int(node)], "cluster", 1)
        return self.success, value

    def cuGraphGetEdges(self, graph: Any, count: int = 0) -> Any:
        nodes = {*self.graphs[int(graph)]}
        edges = [(a, b) for a, b in self.edges if a in nodes]
        early = [int(b in self.programmatic) for _, b in edges]
        data = [types.SimpleNamespace(type=n, from_port=n, to_port=0) for n in early]
        froms, tos = ([cu.CUgraphNode(edge[k]) for edge in edges] for k in range(2))
        return self.success, froms, tos, data, len(edges)


def stack_depth() -> int:
    """Return how many Python frames there are. What a library leaves undefined depends on its callers."""
    frame, depth = sys._getframe(), 0
    while frame is not None:
        frame, depth = frame.f_back, depth + 1
    return depth


class SizedDevice(ModelledDevice):
    """
    Attributes:
        calls: of operators that were captured
        begins_early: whether the second kernel of a product begins while the first one runs
        undefined: what a library has in bytes of its parameters that it leaves undefined
        operands: results and operands of the operator that is being captured
    """

    driver: SizedDriver

    def __init__(self, driver: SizedDriver) -> None:
        super().__init__(driver)
        self.new_stream = lambda *args, **kwargs: ModelledStream(self, next(self.numbers))
        self.calls = 0
        self.undefined: Callable[[], int] = lambda: 0
        self.operands: list[torch.Tensor] = []
        self.begins_early = False
        self._tokens: dict[int, tuple[Callable[..., Any], list[torch.Tensor], tuple[Any, ...]]] = {}

    def add_node(self, node: Node) -> int:
        graph = self.capturing
        return self.driver.add_node(graph, node, self.driver.graphs[graph][-1:])

    def launch_kernel(self, kernel: SizedKernel, grid: tuple[int, ...], parameters: list[bytes]) -> None:
        if self.captured is None:
            kernel.execute(grid, parameters)
        else:
            self.add_node(SizedNode(kernel, grid, parameters))

    def capture_operator(self, name: str, compute: Callable[..., Any], tensors: list[torch.Tensor]) -> None:
        """Add the nodes of an operator: of one that fills with zeros a memset, else kernels of a library."""
        self.calls += 1
        if name in ("zero_", "fill_"):
            self.add_node(FillNode(tensors[0].data_ptr(), tensors[0].nbytes))
            return
        total = sum(t.numel() for t in tensors)
        variant = total % 3
        grid = (1 + total % 5, 1 + total % 2, 1)
        likes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors]
        # Another one in each byte.
        token = (len(self._tokens) + 1) * 0x0101010101010101 % (1 << 64)
        self._tokens[token] = compute, likes, (variant, grid)
        self.operands = tensors
        content = u64(token, self.undefined(), *(t.data_ptr() for t in tensors))
        self.operands = []
        if total > 6000:
            # A part of the product goes by way of temporary memory.
            is_product = name in NAMES_OF_PRODUCTS
            temporary = self.workspace(WORKSPACE_FLOATS) if is_product else self.empty_strided((16,), (1,), torch.float32)
            self._add_library_kernel("split", u64(temporary.data_ptr()), self._split, 0, (3, 1, 1))
            content += u64(temporary.data_ptr())
        node = self._add_library_kernel(f"product_{variant}", content, self._product, variant, grid)
        if self.begins_early and total > 6000:
            self.driver.programmatic.add(node)

    def _add_library_kernel(self, name: str, content: bytes, execute: Any, variant: int, grid: tuple[int, ...]) -> int:
        cluster = 2 if variant == 2 else 1
        kernel = self.driver.add_sized_kernel(f"{name}_{len(content)}", [(0, len(content))], execute, cluster)
        return self.add_node(SizedNode(kernel, grid, [content]))

    def _split(self, grid: tuple[int, ...], parameters: list[bytes]) -> None:
        (temporary,) = struct.unpack("<Q", parameters[0])
        memory(temporary, 64)[:] = b"\x5a" * 64

    def _product(self, grid: tuple[int, ...], parameters: list[bytes]) -> None:
        token, _, *addresses = struct.unpack(f"<{len(parameters[0]) // 8}Q", parameters[0])
        compute, likes, (variant, expected) = self._tokens[token]
        if grid != expected:
            raise AssertionError("a grid of other sizes")
        if len(addresses) > len(likes) and bytes(memory(addresses[-1], 64)) != b"\x5a" * 64:
            raise AssertionError("temporary memory was overwritten")
        compute(*(on_host(tensor_at(address, like, 0)) for address, like in zip(addresses, likes)))


class _Torch:
    """The module torch, with some names of its own."""

    def __init__(self, **names: Any) -> None:
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


# There is no device to choose.
_NO_DEVICES = types.SimpleNamespace(_DeviceGuard=lambda index: contextlib.nullcontext(), set_device=lambda index: None)


@contextlib.contextmanager
def delivering(modelled: SizedDevice) -> Iterator[None]:
    """The kernel of a Deliver runs on the device, which has the memory of every CPU value's copy."""
    kept = []

    def empty(size: Any, *, dtype: torch.dtype, device: torch.device | str, pin_memory: bool = False) -> torch.Tensor:
        if torch.device(device).type != "cuda":
            # No memory is pinned.
            return torch.empty(size, dtype=dtype, device=device)
        like = torch.empty(size, dtype=dtype, device="meta")
        # Each buffer lies elsewhere.
        kept.append(t := modelled.empty_strided(like.shape, like.stride(), dtype, is_counted=False))
        return t

    def kernel(sizes: tuple[int, ...]) -> SizedKernel:
        *starts, _ = deliver.offsets(sizes, deliver.MAX_ALIGNMENT)
        *pieces, nbytes = deliver.offsets(sizes, deliver.PIECE_BYTES)

        def execute(grid: tuple[int, ...], parameters: list[bytes]) -> None:
            (to,) = struct.unpack("<Q", parameters[0])
            for start, piece, size in zip(starts, pieces, sizes):
                memory(to + start, size)[:] = parameters[1][piece : piece + size]

        layout = [(0, 8), (deliver.PIECE_BYTES, nbytes)]
        return modelled.driver.add_sized_kernel(f"deliver_{'_'.join(map(str, sizes))}", layout, execute)

    def launch(kernel: SizedKernel, *args: Any) -> tuple[int]:
        pointers = (ctypes.c_void_p * 2).from_address(args[-2])
        content = [ctypes.string_at(pointer, size) for pointer, (_, size) in zip(pointers, kernel.layout)]
        modelled.launch_kernel(kernel, args[:3], content)
        return (0,)

    with (
        mock.patch.object(deliver, "torch", _Torch(empty=empty)),
        mock.patch.object(deliver, "_kernel", kernel),
        mock.patch.object(modelled.driver, "cuLaunchKernel", launch, create=True),
    ):
        yield


@contextlib.contextmanager
def symbolic_graphs(program: Callable[[], None], **options: Any) -> Iterator[list[tuple[CompiledGraph, Sequence[Any]]]]:
    """Compile a program. Yield its graphs, and for each its inputs, whose sizes are symbolic."""
    seen: list[list[Any]] = []
    with (
        warnings.catch_warnings(),
        fake_cuda() as graphs,
        config.patch({"pygraph": True, "pygraph_sizes": True, **options}),
    ):
        warnings.simplefilter("ignore")
        compile_inner = compile_fx._compile_fx_inner

        def note_inputs(gm: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
            seen.append([*inputs])
            return compile_inner(gm, inputs, **kwargs)

        with mock.patch.object(compile_fx, "_compile_fx_inner", note_inputs):
            program()
        yield [*zip(graphs, seen, strict=True)]


def expressions(i: Any) -> Iterator[Any]:
    """Yield the sizes and strides of a symbolic input, or the number that it is."""
    for value in (*i.shape, *i.stride()) if isinstance(i, torch.Tensor) else (i,):
        if isinstance(value, torch.SymInt):
            yield value.node.shape_env.replace(value.node.expr)
        else:
            yield value


def symbols(inputs: Sequence[Any]) -> list[str]:
    found = (e for i in inputs for e in expressions(i))
    return sorted({str(s) for e in found for s in getattr(e, "free_symbols", ())})


def numbers(i: Any, sizes: dict[str, int]) -> list[int]:
    """Return the sizes and strides of an input at some sizes, or the number that it is."""
    return [
        int(e.subs({s: sizes[str(s)] for s in e.free_symbols})) if hasattr(e, "free_symbols") else e
        for e in expressions(i)
    ]


@dataclasses.dataclass
class CompiledProgram:
    """
    A graph of a compiled program.

    Attributes:
        inputs: symbolic
        autotuners: of its Triton kernels, by name
    """

    graph: CompiledGraph
    inputs: Sequence[Any]
    autotuners: dict[str, Any] = dataclasses.field(default_factory=dict)

    def execute(self, make: Callable[[str, str], Any]) -> dict[str, Any]:
        """Return the names of its code, where ``make`` makes a kernel of a name and a source."""
        scope: dict[str, Any] = {"__name__": "sized"}
        with mock.patch.object(AsyncCompile, "triton", lambda _, name, source, *args, **kwargs: make(name, source)):
            exec(compile(self.graph.source, "<sized>", "exec"), scope)
        return scope


def compiled(program: Callable[[], None], **options: Any) -> list[CompiledProgram]:
    with symbolic_graphs(program, **options) as graphs:
        programs = [CompiledProgram(graph, inputs) for graph, inputs in graphs]
        for p in programs:
            load = async_compile._load_triton_kernel_from_source
            p.execute(lambda name, source, p=p: p.autotuners.setdefault(name, load(name, source)))
        return programs


@dataclasses.dataclass
class Whole:
    """Generated code without partitions, as a Runner has them."""

    partitions: list[Callable[[list[Any]], Any]]
    objects: dict[str, Any]

    def call(self, args: list[Any]) -> Any:
        return self.partitions[0](args)


class SizedProgram:
    """
    Generated code of a graph on a device, which is deployed as the code of a compiled function is.

    Attributes:
        mutated: inputs of the partitions that the program sees written
    """

    def __init__(
        self, device: SizedDevice, program: CompiledProgram, force: str | None, mode: str = "inference"
    ) -> None:
        self.device, self.inputs, self.force, self.mode = device, program.inputs, force, mode
        self.info = program.graph.info
        self.mutated: tuple[int, ...] = ()
        scope = program.execute(lambda name, _: ModelledTriton(device, name, program.autotuners[name]))
        scope.update(torch=_Torch(cuda=_NO_DEVICES), empty_strided_cuda=device.empty_strided, get_raw_stream=lambda device: 0)
        self.runner = scope["runner"] if "runner" in scope else Whole([scope["call"]], scope["call"].objects)
        self.uncaptured = [*self.runner.partitions]
        for fn in scope.values():
            if isinstance(fn, types.FunctionType) and fn.__code__.co_varnames[1:2] == ("empty_strided_cuda",):
                # The first one is the allocator.
                fn.__defaults__ = (device.empty_strided, *(fn.__defaults__ or ())[1:])
        self.deployed = [*map(self._deployed, range(len(self.uncaptured)))]

    def _deployed(self, i: int) -> Callable[..., Any]:
        """Return the partition as it is deployed, from its first call on."""
        fn: Callable[..., Any] | None = None

        def call(args: list[Any]) -> Any:
            nonlocal fn
            if fn is None:
                fn = cudagraph_trees.cudagraphify_impl(
                    self.uncaptured[i],
                    args,
                    (),
                    device_index=0,
                    is_backward=self.mode == "backward",
                    is_inference=self.mode == "inference",
                    stack_traces=None,
                    mutated_input_idxs=self.mutated,
                    pygraph=PyGraphOptions(
                        info=self.info.functions[i],
                        objects=self.runner.objects,
                        force=self.force,
                        replace=lambda fn: None,
                    ),
                )
            return fn(args)

        return call if i < len(self.info.functions) else self.uncaptured[i]

    def make_inputs(self, sizes: dict[str, int]) -> list[Any]:
        made = []
        for i in self.inputs:
            values = numbers(i, sizes)
            if not isinstance(i, torch.Tensor):
                made.append(values[0])
                continue
            like = torch.empty_strided(values[: i.dim()], values[i.dim() :], dtype=i.dtype, device="meta")
            if i.device.type == "cpu":
                made.append(torch.randn(like.shape, dtype=i.dtype, device="cpu"))
                continue
            t = self.device.empty_strided(like.shape, like.stride(), i.dtype)
            if t.numel():
                on_host(t).copy_(torch.randn(like.shape) if i.is_floating_point() else torch.ones(like.shape))
            made.append(t)
        return made

    def run(self, inputs: Sequence[Any], *, captured: bool) -> list[Any]:
        self.runner.partitions = self.deployed if captured else self.uncaptured
        return self.runner.call([*inputs])

    def call(self, inputs: Sequence[Any], *, captured: bool) -> list[Any]:
        """Run the program, and return its results on the host."""
        outputs = self.run(inputs, captured=captured)
        return [on_host(t).clone() if isinstance(t, torch.Tensor) else t for t in outputs]
