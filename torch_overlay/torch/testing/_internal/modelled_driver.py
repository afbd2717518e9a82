"""
A CUDA driver on host memory, for tests of CUDA graphs without a GPU.

:class:`ModelledDriver` has the functions of ``cuda.bindings.driver`` that read and set graphs and map memory, with
the driver's own structs. Compiled code calls them by address. :func:`modelled_driver` puts it in the place of
``cuda.bindings.driver``.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import mmap
import os
from typing import Any, TYPE_CHECKING
from unittest import mock

from torch._inductor.pygraph.graph import binding, conditional, driver, placeholder, zeros
from torch._inductor.pygraph.graph.captured import ATTRIBUTE_BYTES
from torch._inductor.pygraph.graph.placeholder import PAGE_BYTES
from torch._inductor.pygraph.graph.prelude import CAPACITIES
from torch.testing._internal.modelled_clones import Clones
from torch.testing._internal.modelled_nodes import (
    BRANCH_FUNCTION,
    BranchNode,
    ConditionalNode,
    CONTEXT,
    COPY_FUNCTION,
    CopyingNode,
    cu,
    DEVICE_NODE,
    EXECUTABLE,
    GRAPH,
    KERNEL_FUNCTION,
    KernelNode,
    MemcpyNode,
    MemsetNode,
    ModelledKernel,
    Node,
    NODE_FUNCTION,
    PRELUDE_FUNCTION,
    PreludeNode,
    SIDE_STREAM,
    u64,
)
from torch.testing._internal.modelled_operators import host_operators


if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Iterator, Sequence


class ModelledDriver(Clones):
    """
    The part of cuda.bindings.driver that PyGraph calls.

    Args:
        nodes: of the graph GRAPH, whose executable graph is EXECUTABLE

    Attributes:
        nodes: of all graphs; a handle is an index
        graphs: the nodes of each graph
        executables: the graph of each executable graph
        capturing: the graph that is being captured
        disabled: nodes that a launch leaves out
        kernels: what several nodes launch, by handle
        held: by the executable graph, for each node: for a kernel the bytes of each
            parameter, for a copy its two addresses, for a memset its one
        sets: the nodes that were set, in order
        refused: nodes that cannot be set; what they hold then is unknown
        refuses: whether a node that is set refuses this time
        failing: a call that fails
        edges: (node, a node behind it); captured nodes are in a row
        allocations: gives the ranges of device memory that is no placeholder
        updatable: nodes that can be set from the device, in the order of their handles
        stubborn: nodes that cannot become updatable
        conditions: of conditional nodes, by handle: the graph, and the value
        captures: the graph of a path that is captured, by stream
        streams: how many streams PyGraph created
    """

    def __init__(self, nodes: Sequence[Node] = ()) -> None:
        super().__init__()
        self.conditions: dict[int, tuple[int, int | None]] = {}
        self.captures: dict[int, int] = {}
        self.streams = 0
        self.nodes = list(nodes)
        self.graphs = {GRAPH: [*range(len(self.nodes))]}
        self.executables = {EXECUTABLE: GRAPH}
        self.capturing = 0
        self.disabled: set[int] = set()
        self.kernels: dict[int, ModelledKernel] = {}
        self.refuses: Callable[[int], bool] = lambda node: False
        self.sets: list[int] = []
        self.refused: set[int] = set()
        self.failing: str | None = None
        self.functions: list[Any] = []
        self.pages: list[tuple[Any, mmap.mmap]] = []
        self.files: list[int] = []
        self.reserved: list[tuple[int, int]] = []
        self.hints: list[int] = []
        self.mapped: dict[int, int] = {}
        self.accessible: list[tuple[int, int]] = []
        self.occupied: list[tuple[int, int]] = []
        if cu is not None:
            self.success = cu.CUresult.CUDA_SUCCESS
            self.invalid = cu.CUresult.CUDA_ERROR_INVALID_VALUE
        self.held: list[Any] = [self._captured(i) for i in range(len(self.nodes))]
        self.edges = [(i, i + 1) for i in range(len(self.nodes) - 1)]
        self.allocations: Callable[[], Iterable[tuple[int, int]]] = lambda: ()
        self.updatable: list[int] = []
        self.stubborn: set[int] = set()

    def __getattribute__(self, name: str) -> Any:
        # Structs and enums are CU*, calls are cu*.
        if name.startswith("CU"):
            return getattr(cu, name)
        if name.startswith("cu") and name == self.failing:
            return lambda *args: (cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
        return super().__getattribute__(name)

    def _captured(self, i: int) -> Any:
        node = self.nodes[i]
        if isinstance(node, KernelNode):
            return list(node.parameters)
        if isinstance(node, (MemcpyNode, MemsetNode)):
            return self._addresses(node.params(i))
        return None

    # Graphs

    def cuGraphGetNodes(self, graph: Any, count: int = 0) -> Any:
        if int(graph) not in self.graphs:
            return self.invalid, None, 0
        nodes = self.graphs[int(graph)]
        return self.success, [cu.CUgraphNode(i) for i in nodes[:count]], count or len(nodes)

    def cuGraphNodeGetType(self, node: Any) -> Any:
        return self.success, self.nodes[int(node)].type

    def _get_params(self, node: Any) -> Any:
        return self.success, self.nodes[int(node)].params(int(node))

    cuGraphKernelNodeGetParams = _get_params
    cuGraphMemcpyNodeGetParams = _get_params
    cuGraphMemsetNodeGetParams = _get_params

    def cuFuncGetAttribute(self, which: Any, function: Any) -> Any:
        return self.success, 0

    def cuKernelGetFunction(self, kern: Any) -> Any:
        return self.success, cu.CUfunction(int(kern) + 0x10000)

    def cuFuncGetParamInfo(self, function: Any, index: int) -> Any:
        if int(function) in self.kernels:
            layout = self.kernels[int(function)].layout
        elif int(function) == BRANCH_FUNCTION:
            layout = [(0, 8), (8, 8)]
        elif int(function) == COPY_FUNCTION:
            layout = [(0, 8), (8, 8), (16, 8)]
        elif int(function) - PRELUDE_FUNCTION in CAPACITIES:
            words = 8 * (int(function) - PRELUDE_FUNCTION)
            layout = [(0, 8), (8, 8), (16, 8), (24, 4), (32, words)]
        else:
            layout = self.nodes[int(function) - NODE_FUNCTION].layout
        if index >= len(layout):
            return self.invalid, 0, 0
        return self.success, *layout[index]

    def cuFuncGetName(self, function: Any) -> Any:
        if int(function) in self.kernels:
            return self.success, self.kernels[int(function)].name.encode()
        return self.success, f"kernel_{int(function) - NODE_FUNCTION}".encode()

    def cuGraphGetRootNodes(self, graph: Any, count: int = 0) -> Any:
        behind = {b for _, b in self.edges}
        roots = [i for i in self.graphs[int(graph)] if i not in behind]
        return self.success, [cu.CUgraphNode(i) for i in roots[:count]], len(roots)

    def cuGraphAddKernelNode(self, graph: Any, behind: list[Any], count: int, params: Any) -> Any:
        if int(graph) not in self.graphs or count != len(behind):
            return self.invalid, None
        grid = (params.gridDimX, params.gridDimY, params.gridDimZ)
        block = (params.blockDimX, params.blockDimY, params.blockDimZ)
        if 0 in grid or 0 in block:
            return self.invalid, None
        values = [bytes(value) for _, value in binding.kernel_parameters(params)]
        if int(params.func) == BRANCH_FUNCTION:
            new = BranchNode(*values)
        elif int(params.func) == COPY_FUNCTION:
            new = CopyingNode(*values)
        else:
            new = PreludeNode(*values, threads=grid[0] * block[0])
        return self.success, cu.CUgraphNode(self.add_node(int(graph), new, map(int, behind)))

    # Conditional nodes

    def cuDriverGetVersion(self) -> Any:
        return self.success, 13000

    def cuGraphConditionalHandleCreate(self, graph: Any, context: Any, default: int, flags: int) -> Any:
        if int(graph) not in self.graphs or int(context) != CONTEXT:
            return self.invalid, None
        handle = 0xF00 + len(self.conditions)
        self.conditions[handle] = int(graph), None
        return self.success, cu.CUgraphConditionalHandle(handle)

    def cuGraphAddNode(self, graph: Any, behind: list[Any], data: Any, count: int, params: Any) -> Any:
        conditional, handle = params.conditional, int(params.conditional.handle)
        kinds = cu.CUgraphConditionalNodeType
        size = {kinds.CU_GRAPH_COND_TYPE_IF: 2, kinds.CU_GRAPH_COND_TYPE_WHILE: 1}[conditional.type]
        is_right = (
            params.type == cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
            and (conditional.size, int(conditional.ctx), data, count) == (size, CONTEXT, None, len(behind))
            and self.conditions.get(handle) == (int(graph), None)
            and isinstance(setter := self.nodes[int(behind[0])], BranchNode)
            and setter.parameters[0] == u64(handle)
        )
        if not is_right:
            return self.invalid, None
        node = ConditionalNode(handle, tuple(self.add_graph() for _ in range(size)))
        # Where the struct has phGraph_out.
        ctypes.c_void_p.from_address(int(params.getPtr()) + 32).value = ctypes.addressof(node.memory)
        return self.success, cu.CUgraphNode(self.add_node(int(graph), node, map(int, behind)))

    def cuStreamCreate(self, flags: int) -> Any:
        self.streams += 1
        return self.success, cu.CUstream(SIDE_STREAM + self.streams)

    def cuStreamUpdateCaptureDependencies(
        self, stream: Any, nodes: list[Any], data: Any, count: int, flags: int
    ) -> Any:
        # A captured node is behind the last one.
        last = self.graphs[self.captured_by(int(stream))][-1]
        return (self.success if ([*map(int, nodes)], data, count, flags) == ([last], None, 1, 1) else self.invalid,)

    def cuStreamBeginCaptureToGraph(
        self, stream: Any, graph: Any, behind: Any, data: Any, count: int, mode: Any
    ) -> Any:
        if int(stream) in self.captures or count or self.graphs[int(graph)] or not self.capturing:
            return (self.invalid,)
        self.captures[int(stream)] = int(graph)
        return (self.success,)

    def cuStreamEndCapture(self, stream: Any) -> Any:
        if int(stream) not in self.captures:
            return self.invalid, None
        return self.success, cu.CUgraph(self.captures.pop(int(stream)))

    def captured_by(self, stream: int) -> int:
        """Return the graph that a stream is captured into."""
        if stream > SIDE_STREAM:
            return self.captures[stream]
        return self.capturing

    def with_bodies(self, graph: int) -> Iterator[int]:
        """Yield the nodes of a graph, and those in the bodies of conditional nodes."""
        for i in self.graphs[graph]:
            yield i
            if isinstance(node := self.nodes[i], ConditionalNode):
                for body in node.bodies:
                    yield from self.with_bodies(body)

    def add_node(self, graph: int, node: Node, behind: Iterable[int]) -> int:
        new = len(self.nodes)
        self.nodes.append(node)
        self.graphs[graph].append(new)
        self.held.append(self._captured(new))
        self.edges += [(before, new) for before in behind]
        return new

    def add_graph(self) -> int:
        handle = GRAPH + 0x10000 * len(self.graphs)
        self.graphs[handle] = []
        return handle

    def instantiate(self, graph: int) -> int:
        handle = graph + (EXECUTABLE - GRAPH)
        has_branches = any(isinstance(self.nodes[i], ConditionalNode) for i in self.graphs[graph])
        if handle in self.executables and has_branches:
            raise RuntimeError("a graph with conditional nodes has one executable graph at a time")
        self.executables[handle] = graph
        for i in self.with_bodies(graph):
            self.held[i] = self._captured(i)
            self.disabled.discard(i)
        return handle

    def add_kernel(self, name: str, layout: list[tuple[int, int]]) -> ModelledKernel:
        """Return the kernel of this name and layout."""
        for kernel in self.kernels.values():
            if (kernel.name, kernel.layout) == (name, layout):
                return kernel
        kernel = ModelledKernel(name, KERNEL_FUNCTION + len(self.kernels), layout)
        self.kernels[kernel.function] = kernel
        return kernel

    def launch(self, executable: int, order: random.Random | None = None) -> None:
        """
        Run a graph: preludes, then kernels.

        Args:
            order: draws one of the orders that dependencies allow; by default nodes run as they were added
        """
        nodes = self.graphs[self.executables[executable]]
        self.run_preludes(nodes)
        self._run(nodes, order)

    def _run(self, nodes: Sequence[int], order: random.Random | None) -> None:
        waiting = [i for i in nodes if not isinstance(self.nodes[i], PreludeNode)]
        behind = collections.defaultdict(list)
        for before, after in self.edges:
            behind[after].append(before)
        left = {*waiting}
        while waiting:
            ready = (at for at, i in enumerate(waiting) if left.isdisjoint(behind[i]))
            i = waiting.pop(next(ready) if order is None else order.choice([*ready]))
            left.discard(i)
            if i not in self.disabled:
                self.run_node(i, order)

    def run_node(self, i: int, order: random.Random | None) -> None:
        node = self.nodes[i]
        if isinstance(node, ConditionalNode):
            while True:
                graph, value = self.conditions[node.handle]
                if value is None:
                    raise AssertionError("no condition was set")
                # The next launch has to set it again.
                self.conditions[node.handle] = graph, None
                is_loop = len(node.bodies) == 1
                if not is_loop or value:
                    self._run(self.graphs[node.bodies[value == 0]], order)
                if not is_loop or not value:
                    return
        computes = isinstance(node, KernelNode) and node.launch is not None
        if not computes and not isinstance(node, (BranchNode, CopyingNode, MemcpyNode)):
            return
        if self.held[i] is None:
            raise AssertionError("launched with a node that refused")
        if isinstance(node, MemcpyNode):
            ctypes.memmove(*self.held[i], node.nbytes)
        elif isinstance(node, CopyingNode):
            ctypes.memmove(*(int.from_bytes(p, "little") for p in self.held[i]))
        elif isinstance(node, BranchNode):
            handle, address = (int.from_bytes(p, "little") for p in self.held[i])
            self.conditions[handle] = self.conditions[handle][0], ctypes.c_uint8.from_address(address).value
        else:
            node.launch.run(self.held[i])

    def cuGraphNodeSetEnabled(self, executable: Any, node: Any, enabled: int) -> Any:
        if int(executable) not in self.executables:
            return (self.invalid,)
        (self.disabled.discard if enabled else self.disabled.add)(int(node))
        return (self.success,)

    def cuGraphDestroyNode(self, node: Any) -> Any:
        for nodes in self.graphs.values():
            if int(node) in nodes:
                nodes.remove(int(node))
        self.edges = [edge for edge in self.edges if int(node) not in edge]
        return (self.success,)

    def cuGraphUpload(self, executable: Any, stream: Any) -> Any:
        return (self.success if int(executable) in self.executables else self.invalid,)

    def cuStreamGetCaptureInfo(self, stream: Any) -> Any:
        status = cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        graph = self.captured_by(int(stream))
        last = [cu.CUgraphNode(i) for i in self.graphs[graph][-1:]]
        return self.success, status, 1, cu.CUgraph(graph), last, None, len(last)

    def cuGraphKernelNodeSetParams(self, node: Any, params: Any) -> Any:
        if int(node) in self.refused or int(node) not in range(len(self.nodes)):
            return (self.invalid,)
        held = self.nodes[int(node)]
        pointers = (ctypes.c_void_p * len(held.layout)).from_address(params.kernelParams)
        values = [ctypes.string_at(pointer, size) for pointer, (_, size) in zip(pointers, held.layout)]
        self.nodes[int(node)] = KernelNode(*values, launch=held.launch)
        return (self.success,)

    def cuGraphAddDependencies(self, graph: Any, froms: list[Any], tos: list[Any], *edges_and_count: Any) -> Any:
        if edges_and_count != (None, len(froms)) or len(froms) != len(tos):
            return (self.invalid,)
        added = [(int(a), int(b)) for a, b in zip(froms, tos)]
        if {*added} & {*self.edges}:
            return (self.invalid,)
        self.edges += added
        return (self.success,)

    def cuGraphRemoveDependencies(self, graph: Any, froms: list[Any], tos: list[Any], *edges_and_count: Any) -> Any:
        removed = {(int(a), int(b)) for a, b in zip(froms, tos)}
        if edges_and_count != (None, len(froms)) or not removed <= {*self.edges}:
            return (self.invalid,)
        self.edges = [edge for edge in self.edges if edge not in removed]
        return (self.success,)

    def cuGraphGetEdges(self, graph: Any, count: int = 0) -> Any:
        nodes = {*self.graphs[int(graph)]}
        edges = [edge for edge in self.edges if edge[0] in nodes]
        froms, tos = ([cu.CUgraphNode(edge[i]) for edge in edges[:count]] for i in (0, 1))
        return self.success, froms, tos, [cu.CUgraphEdgeData() for _ in froms], count or len(edges)

    def cuPointerGetAttribute(self, attribute: Any, address: int) -> Any:
        for start, end in (*self.allocations(), *self.reserved):
            if start <= address < end:
                is_start = attribute == cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
                return self.success, start if is_start else end - start
        hosts = (node.host for node in self.nodes if isinstance(node, MemcpyNode) and node.pinned)
        if any(0 <= address - ctypes.addressof(host) < ctypes.sizeof(host) for host in hosts if host is not None):
            return self.success, cu.CUmemorytype.CU_MEMORYTYPE_HOST.value
        return self.invalid, None

    def cuGraphKernelNodeSetAttribute(self, node: Any, which: Any, value: Any) -> Any:
        if int(node) in self.stubborn or int(node) in self.updatable:
            return (self.invalid,)
        if value.deviceUpdatableKernelNode.deviceUpdatable != 1:
            return (self.invalid,)
        self.updatable.append(int(node))
        return (self.success,)

    def cuGraphKernelNodeGetAttribute(self, node: Any, which: Any) -> Any:
        value = cu.CUkernelNodeAttrValue()
        if which != cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE:
            return self.success, value
        handle = DEVICE_NODE + self.updatable.index(int(node))
        value.deviceUpdatableKernelNode.devNode = cu.CUgraphDeviceNode(handle)
        return self.success, value

    def run_preludes(self, nodes: Iterable[int] | None = None) -> None:
        "What they do at the start of a launch, each behind those that it depends on."
        for i in range(len(self.nodes)) if nodes is None else nodes:
            if isinstance(node := self.nodes[i], PreludeNode):
                for target, offset, value in node.writes(self.held[i]):
                    held = self.held[at := self.updatable[target - DEVICE_NODE]]
                    k, (start, _) = max(
                        (k, place) for k, place in enumerate(self.nodes[at].layout) if place[0] <= offset
                    )
                    held[k] = held[k][: offset - start] + u64(value) + held[k][offset - start + 8 :]

    def cuCtxGetCurrent(self) -> Any:
        return self.success, cu.CUcontext(CONTEXT)

    def _set(self, executable: Any, node: Any, read: Callable[[Node], Any]) -> Any:
        i = int(node)
        if int(executable) not in self.executables:
            return (self.invalid,)
        self.sets.append(i)
        if i in self.refused or self.refuses(i):
            self.held[i] = None
            return (self.invalid,)
        self.held[i] = read(self.nodes[i])
        return (self.success,)

    def cuGraphExecKernelNodeSetParams(self, executable: Any, node: Any, params: Any) -> Any:
        def read(kernel: Node) -> list[bytes]:
            function = int(params.func) or int(params.kern) + 0x10000
            if function != (kernel.function or int(node) + NODE_FUNCTION):
                raise AssertionError("another kernel")
            if not params.kernelParams or params.extra:
                raise AssertionError("either kernelParams or extra")
            if (params.gridDimX, params.blockDimX, params.sharedMemBytes) != (7, 128, 4096):
                raise AssertionError("another launch")
            layout = kernel.layout
            pointers = (ctypes.c_void_p * len(layout)).from_address(params.kernelParams)
            return [ctypes.string_at(pointer, size) for pointer, (_, size) in zip(pointers, layout)]

        return self._set(executable, node, read)

    def _addresses(self, params: Any) -> tuple[int, ...]:
        if isinstance(params, cu.CUDA_MEMSET_NODE_PARAMS):
            if (params.value, params.elementSize, params.width) != (9, 4, 64):
                raise AssertionError("another memset")
            return (int(params.dst),)
        if params.srcMemoryType == cu.CUmemorytype.CU_MEMORYTYPE_HOST:
            return int(params.dstDevice), int(params.srcHost)
        return int(params.dstDevice), int(params.srcDevice)

    def cuGraphExecMemcpyNodeSetParams(self, executable: Any, node: Any, params: Any, context: Any) -> Any:
        if int(context) != CONTEXT:
            return (self.invalid,)
        return self._set(executable, node, lambda _: self._addresses(params))

    def cuGraphExecMemsetNodeSetParams(self, executable: Any, node: Any, params: Any, context: Any) -> Any:
        return self.cuGraphExecMemcpyNodeSetParams(executable, node, params, context)

    # The same, as compiled code calls it.

    def cuGetProcAddress(self, name: bytes, version: int, flags: int) -> Any:
        found = {
            b"cuGraphExecKernelNodeSetParams": (int, int, cu.CUDA_KERNEL_NODE_PARAMS),
            b"cuGraphExecMemcpyNodeSetParams": (int, int, cu.CUDA_MEMCPY3D, cu.CUcontext),
            b"cuGraphExecMemsetNodeSetParams": (int, int, cu.CUDA_MEMSET_NODE_PARAMS, cu.CUcontext),
            b"cuGraphNodeSetEnabled": (int, int, int),
            b"cuGraphLaunch": (int, int),
            b"cuGraphKernelNodeGetAttribute": (int, int, None),
        }.get(name)
        if found is None:
            return self.success, 0, cu.CUdriverProcAddressQueryResult.CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
        function = getattr(self, name.decode())

        def called(*arguments: int | None) -> int:
            # ctypes turns a null pointer into None.
            status, *values = function(*(type_(a or 0) for type_, a in zip(found, arguments) if type_))
            for value in values:
                ctypes.memmove(arguments[-1], int(value.getPtr()), ATTRIBUTE_BYTES)
            return int(status)

        pointer = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * len(found))(called)
        self.functions.append(pointer)
        address = ctypes.cast(pointer, ctypes.c_void_p).value
        return self.success, address, cu.CUdriverProcAddressQueryResult.CU_GET_PROC_ADDRESS_SUCCESS

    # Memory

    def cuMemCreate(self, nbytes: int, prop: Any, flags: int) -> Any:
        file = os.memfd_create("page")
        os.ftruncate(file, nbytes)
        self.files.append(file)
        self.pages.append((prop, mmap.mmap(file, nbytes)))
        return self.success, cu.CUmemGenericAllocationHandle(len(self.pages) - 1)

    def cuMemAddressReserve(self, nbytes: int, alignment: int, hint: Any, flags: int) -> Any:
        start = int(hint)
        self.hints.append(start)
        if nbytes % PAGE_BYTES or start % PAGE_BYTES:
            return self.invalid, None
        for low, high in sorted(self.reserved + self.occupied):
            if start < high and low < start + nbytes:
                start = high
        while not _map(start, nbytes, 0):
            start += nbytes
        self.reserved.append((start, start + nbytes))
        return self.success, cu.CUdeviceptr(start)

    def cuMemMap(self, address: int, nbytes: int, offset: int, handle: Any, flags: int) -> Any:
        low_high = [r for r in self.reserved if r[0] <= address < r[1]]
        if not low_high or nbytes != PAGE_BYTES or offset or address in self.mapped:
            return (self.invalid,)
        self.mapped[int(address)] = int(handle)
        return (self.success,)

    def cuMemSetAccess(self, address: int, nbytes: int, descs: list[Any], count: int) -> Any:
        pages = range(address, address + nbytes, PAGE_BYTES)
        if not all(page in self.mapped for page in pages) or count != len(descs):
            return (self.invalid,)
        for page in pages:
            if not _map(page, PAGE_BYTES, mmap.PROT_READ | mmap.PROT_WRITE, self.files[self.mapped[page]]):
                return (self.invalid,)
        self.accessible.append((address, address + nbytes))
        return (self.success,)

    def close(self) -> None:
        """Unmap what was mapped."""
        for start, end in self.reserved:
            _libc().munmap(start, end - start)
        for file, (_, page) in zip(self.files, self.pages):
            page.close()
            os.close(file)


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def _map(address: int, nbytes: int, access: int, file: int | None = None) -> bool:
    """Map a file, or reserve addresses, exactly there. Return whether it could."""
    fixed, no_reserve, fixed_no_replace = 0x10, 0x4000, 0x100000
    if file is None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve | fixed_no_replace
    else:
        flags = mmap.MAP_SHARED | fixed
    return _libc().mmap(address, nbytes, access, flags, -1 if file is None else file, 0) == address


@contextlib.contextmanager
def modelled_driver(*nodes: Node, driver_type: Callable[..., ModelledDriver] | None = None) -> Iterator[ModelledDriver]:
    """
    A driver with these nodes in one graph in the place of ``cuda.bindings.driver``. Operators on CUDA tensors run on
    the host.
    """
    model = ModelledDriver(nodes) if driver_type is None else driver_type()
    caches = (driver.bindings, placeholder.arena, zeros.pages_of, conditional.side_stream)
    with mock.patch("cuda.bindings.driver", model), host_operators():
        for cache in caches:
            cache.cache_clear()
        try:
            yield model
        finally:
            for cache in caches:
                cache.cache_clear()
            model.close()
