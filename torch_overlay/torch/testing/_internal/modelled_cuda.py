"""
A CUDA device on host memory, for tests of CUDA graphs without a GPU.

:class:`ModelledDevice` has memory, streams, pools and capture. Its tensors are CUDA tensors whose addresses are host
memory. :func:`modelled_device` puts it behind ``torch.cuda``, and lets the host run the operators that have a CUDA
kernel. :meth:`ModelledDevice.launch` computes on the host or, while a graph is captured, becomes a kernel node that
computes in each replay, at the addresses that the node then holds. Memory is handed out again as soon as its storage is
dead, as the caching allocator does, so that a graph that writes what the program still has is seen.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import threading
import types
import weakref
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
from torch._inductor import cudagraph_trees as trees
from torch._inductor.pygraph.capture import allocation
from torch._inductor.pygraph.graph import placeholder, prelude
from torch._inductor.pygraph.graph.placeholder import round_up, storage_extent, tensor_at
from torch._inductor.pygraph.graph.prelude import BRANCH, CAPACITIES, COPY
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.modelled_driver import modelled_driver, ModelledDriver
from torch.testing._internal.modelled_nodes import (
    BRANCH_FUNCTION,
    COPY_FUNCTION,
    cu,
    KernelNode,
    Launch,
    PRELUDE_FUNCTION,
    SIDE_STREAM,
    u64,
)
from torch.testing._internal.modelled_operators import host_operators, on_host


if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Sequence


@dataclasses.dataclass
class Block:
    """
    Attributes:
        owners: storages that lie in it; it is free once they are dead
    """

    memory: torch.Tensor
    nbytes: int
    pool: tuple[int, int] | None
    owners: list[StorageWeakRef]
    stream: int = 0

    @property
    def address(self) -> int:
        return -(-self.memory.data_ptr() // 256) * 256

    @property
    def is_free(self) -> bool:
        return all(owner.expired() for owner in self.owners)


class ModelledGraph:
    """What torch.cuda.CUDAGraph is."""

    def __init__(self, device: ModelledDevice, keep_graph: bool = False) -> None:
        self.device = device
        self.handle = device.driver.add_graph()
        self.executable: int | None = None
        self.is_destroyed = False
        self.keeps_graph = keep_graph

    @property
    def launches(self) -> list[Launch]:
        driver = self.device.driver
        return [driver.nodes[i].launch for i in driver.graphs[self.handle]]

    def register_generator_state(self, generator: Any) -> None:
        pass

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self.context = self.device.capture(self, pool)
        self.context.__enter__()

    def capture_end(self) -> None:
        self.context.__exit__(None, None, None)

    def reset(self) -> None:
        # Neither can be launched any more.
        self.executable = None
        self.is_destroyed = True

    def instantiate(self) -> None:
        self.executable = self.device.driver.instantiate(self.handle)

    def raw_cuda_graph(self) -> int:
        return self.handle

    def raw_cuda_graph_exec(self) -> int:
        if self.executable is None:
            raise AssertionError("not instantiated")
        return self.executable

    def replay(self) -> None:
        self.device.driver.launch(self.raw_cuda_graph_exec(), self.device.order)


class ModelledStream:
    """
    Attributes:
        work: functions, and of what it waits for the stream and how much that had to do
        done: so much of it
        is_captured: by the program
        is_destroyed: the program's own
    """

    def __init__(self, device: ModelledDevice, cuda_stream: int) -> None:
        self.device = device
        self.cuda_stream = cuda_stream
        self.work: list[Callable[[], Any] | tuple[ModelledStream, int]] = []
        self.done = 0
        self.is_captured = self.is_destroyed = False

    def wait_stream(self, other: ModelledStream) -> None:
        if other.is_destroyed:
            raise RuntimeError("invalid resource handle")
        self.device.waits.append((self.cuda_stream, other.cuda_stream))
        self.work.append((other, len(other.work)))

    def synchronize(self) -> None:
        pass

    def advance(self) -> bool:
        """Do one thing. Return False if there is none, or it waits."""
        if self.done == len(self.work):
            return False
        work = self.work[self.done]
        if isinstance(work, tuple):
            other, count = work
            if other.done < count:
                return False
        else:
            work()
        self.done += 1
        return True


class ModelledEvent(mock.Mock):
    def elapsed_time(self, other: Any) -> float:
        return 0.001


# Of a product of SizedDevice.
WORKSPACE_FLOATS = 1 << 10


class ModelledDevice:
    """
    Attributes:
        driver: of its graphs
        captured: the graph that is being captured
        pools: the pools that each thread allocates in, the last one now
        uses: graphs and contexts that hold a pool
        blocks: what functions allocate
        results: what operators allocate, by size; it takes no memory of the device
        limit: bytes that there are
        peak: the most bytes that blocks took, free ones too
        stream: the current one
        waits: streams of which the first waited for the second
        order: draws an order of a graph's nodes
        captures_chain: captured nodes depend on the one before; else, if there is an order, only on nodes that touch
            the same memory
        workspaces: of cuBLAS, by size
    """

    def __init__(self, driver: ModelledDriver) -> None:
        self.driver = driver
        self.stream = ModelledStream(self, 0)
        self.new_stream: Callable[..., Any] = mock.Mock()
        self.waits: list[tuple[int, int]] = []
        self.blocks: list[Block] = []
        self.results: collections.defaultdict[int, list[Block]] = collections.defaultdict(list)
        self.limit = 1 << 30
        self.peak = 0
        self.captured: ModelledGraph | None = None
        self.pool_of_capture: tuple[int, int] | None = None
        self.pools: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
        self.uses: collections.Counter[tuple[int, int]] = collections.Counter()
        self.numbers = itertools.count(1)
        self.checkpointed: list[StorageWeakRef] = []
        self.order: random.Random | None = None
        self.captures_chain = False
        self.workspaces: dict[int, torch.Tensor] = {}
        driver.allocations = self.allocations

    def allocations(self) -> Iterator[tuple[int, int]]:
        for block in itertools.chain(self.blocks, *self.results.values()):
            yield block.address, block.address + block.nbytes

    # Memory

    @property
    def pool(self) -> tuple[int, int] | None:
        """The pool that this thread allocates in."""
        if pools := self.pools.get(threading.get_native_id()):
            return pools[-1]
        # The capture of the first stream began it.
        return None if self.side_stream else self.pool_of_capture

    def empty_strided(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, *, is_counted: bool = True
    ) -> torch.Tensor:
        like = torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device="meta")
        nbytes = storage_extent(like)
        if nbytes == 0:
            return tensor_at(0, like, 0)
        pool = self.pool if is_counted else None
        blocks = self.blocks if is_counted else self.results[nbytes]
        stream = self.side_stream
        free = (b for b in blocks if (b.nbytes, b.pool, b.stream) == (nbytes, pool, stream) and b.is_free)
        block = next(free, None)
        if block is None:
            if is_counted and self.captured is None:
                self.empty_cache()
            if is_counted and self.nbytes + nbytes > self.limit:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            memory = torch.zeros(nbytes + 512, dtype=torch.uint8, device="cpu")
            block = Block(memory, nbytes, pool, [], stream)
            blocks.append(block)
            self.peak = max(self.peak, self.nbytes)
        t = tensor_at(block.address, like, 0)
        block.owners = [StorageWeakRef(t.untyped_storage())]
        if self.captured is None and t.is_contiguous():
            # What nobody wrote is no number, or a mark, which tells that.
            content = on_host(t).view(-1).view(torch.uint8)
            if not bool((content == placeholder.UNWRITTEN).all()):
                content.fill_(0xFF)
        return t

    def workspace(self, size: int) -> torch.Tensor:
        """Return the workspace of cuBLAS, of so many floats. It is allocated by the first call after it was cleared."""
        if size not in self.workspaces:
            self.workspaces[size] = self.empty_strided((size,), (1,), torch.float32)
        return self.workspaces[size]

    def blas_handle(self) -> int:
        self.workspace(WORKSPACE_FLOATS)
        return 1

    @contextlib.contextmanager
    def clear_workspaces(self) -> Iterator[None]:
        self.workspaces.clear()
        try:
            yield
        finally:
            self.workspaces.clear()

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self.blocks)

    def empty_cache(self) -> None:
        self.blocks[:] = [b for b in self.blocks if b.pool is not None or not b.is_free]

    def mem_get_info(self, device_index: int | None = None) -> tuple[int, int]:
        return self.limit - self.nbytes, self.limit

    def memory_snapshot(self, pool: Any = None, include_traces: bool = True) -> list[dict[str, Any]]:
        """A block is a segment."""
        return [
            {
                "address": b.address,
                "total_size": b.nbytes,
                "active_size": 0 if b.is_free else b.nbytes,
                "segment_pool_id": b.pool or (0, 0),
                "blocks": [
                    {
                        "address": b.address,
                        "size": round_up(b.nbytes, 8),
                        "requested_size": b.nbytes,
                        "state": "inactive" if b.is_free else "active_allocated",
                    }
                ],
            }
            for b in self.blocks
        ]

    def begin_allocate(self, device_index: int, pool: tuple[int, int]) -> None:
        self.uses[tuple(pool)] += 1
        self.pools[threading.get_native_id()].append(tuple(pool))

    def end_allocate(self, device_index: int, pool: tuple[int, int]) -> None:
        pools = self.pools[threading.get_native_id()]
        if self.pool_of_capture == tuple(pool) and tuple(pool) not in pools:
            self.pool_of_capture = None
        elif pools:
            pools.remove(tuple(pool))

    def release_pool(self, device_index: int, pool: tuple[int, int]) -> None:
        self.uses[tuple(pool)] -= 1
        if self.uses[tuple(pool)] <= 0:
            # The cache of all has it.
            for block in self.blocks:
                if block.pool == tuple(pool):
                    block.pool = None

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        t = self.empty_strided(values.shape, values.stride(), values.dtype)
        on_host(t).copy_(values)
        return t

    def clone(self, t: torch.Tensor) -> torch.Tensor:
        copied = self.empty_strided(t.shape, t.stride(), t.dtype)
        self.launch(torch.Tensor.copy_, copied, t)
        return copied

    def clone_storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        like = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
        return self.clone(tensor_at(storage.data_ptr(), like, 0)).untyped_storage()

    def set_checkpoint(self, device: int, state: Any, stale: list[Any], live: list[int]) -> None:
        "Memory of live outputs, which replays rebuilt, is not free."
        # Of an output that lies in another one there are two references.
        for cdata in {*live}:
            storage = torch.UntypedStorage._new_with_weak_ptr(cdata)
            # As addStorageDeleterFns of torch/csrc/cuda/Module.cpp has it.
            if any(s.cdata == cdata and not s.expired() for s in self.checkpointed):
                raise RuntimeError("Not expecting deleter function")
            self.checkpointed.append(StorageWeakRef(storage))
            (block,) = [b for b in self.blocks if b.address == storage.data_ptr()]
            block.owners.append(StorageWeakRef(storage))

    def check_pool(self, device: int, pool: Any, live: Sequence[Any]) -> None:
        "What trees take for live is what is not free."
        owned = {b.address for b in self.blocks if b.pool == tuple(pool) and not b.is_free}
        claimed = {w.data_ptr() for w in live if w()}
        if owned != claimed:
            raise AssertionError(f"live in the pool: {owned}, as trees see it: {claimed}")

    def new_pool(self) -> tuple[int, int]:
        return (0, next(self.numbers))

    # Graphs

    def launch(self, compute: Callable[..., Any], *args: torch.Tensor, written: Sequence[int] = (0,)) -> None:
        """
        Args:
            written: arguments that it writes
        """
        if self.captured is None:
            compute(*map(on_host, args))
            return
        likes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in args]
        layout = [(8 * i, 8) for i in range(len(args))]
        kernel = self.driver.add_kernel(getattr(compute, "__name__", "kernel"), layout)
        node = KernelNode(*(u64(t.data_ptr()) for t in args), launch=Launch(compute, likes, written, kernel))
        self.driver.add_node(self.capturing, node, self.nodes_before(node))

    @property
    def capturing(self) -> int:
        """The graph that the current stream is captured into."""
        return self.driver.captured_by(self.side_stream)

    @property
    def side_stream(self) -> int:
        """The current stream if PyGraph created it, or 0. That of trees is a mock."""
        stream = self.stream.cuda_stream
        return stream if isinstance(stream, int) and stream > SIDE_STREAM else 0

    def capture_operator(self, name: str, compute: Callable[..., Any], tensors: list[torch.Tensor]) -> None:
        """Add the nodes of an operator that works on these tensors, and may write all of them."""
        self.launch(compute, *tensors, written=range(len(tensors)))

    def nodes_before(self, node: KernelNode) -> list[int]:
        """Return the captured nodes that it depends on: the last one, or those that touch the same memory."""
        nodes = self.driver.graphs[self.capturing]
        if self.order is None or self.captures_chain:
            return nodes[-1:]
        return [i for i in nodes if depend(self.driver.nodes[i], node)]

    @contextlib.contextmanager
    def capture(self, graph: ModelledGraph, pool: Any = None, **kwargs: Any) -> Iterator[None]:
        if self.captured is not None:
            raise AssertionError("captured twice")
        self.captured = graph
        self.driver.capturing = graph.handle
        self.pool_of_capture = pool = (0, next(self.numbers)) if pool is None else tuple(pool)
        self.uses[pool] += 1
        weakref.finalize(graph, self.release_pool, 0, pool)
        try:
            yield
        finally:
            if self.pool_of_capture is None:
                self.end_allocate(0, pool)
            self.captured = self.pool_of_capture = None
            self.driver.capturing = 0
        if not graph.keeps_graph:
            graph.executable = self.driver.instantiate(graph.handle)

    @contextlib.contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def is_capturing(self) -> bool:
        if self.stream.is_destroyed:
            raise RuntimeError("invalid resource handle")
        return self.captured is not None or self.stream.is_captured

    @contextlib.contextmanager
    def allocate_to_pool(self, device: int, mem_pool: Any, stream: Any) -> Iterator[None]:
        self.begin_allocate(device, mem_pool)
        try:
            yield
        finally:
            self.end_allocate(device, mem_pool)
            self.release_pool(device, mem_pool)


def depend(first: KernelNode, second: KernelNode) -> bool:
    """Return whether the order of two nodes matters. Inputs of other calls may share memory that is written."""
    ranges = []
    for node in (first, second):
        starts = [int.from_bytes(p, "little") for p in node.parameters]
        ends = [start + storage_extent(like) for start, like in zip(starts, node.launch.likes)]
        ranges.append([(s, e, i in node.launch.written) for i, (s, e) in enumerate(zip(starts, ends))])
    return any(
        (writes or also_writes) and start < other_end and other_start < end
        for start, end, writes in ranges[0]
        for other_start, other_end, also_writes in ranges[1]
    )


@contextlib.contextmanager
def modelled_device(
    driver_type: Callable[..., ModelledDriver] | None = None,
    device_type: Callable[[Any], ModelledDevice] = ModelledDevice,
) -> Iterator[ModelledDevice]:
    """A device in the place of device 0."""
    with modelled_driver(driver_type=driver_type) as modelled:
        device = device_type(modelled)
        nothing = lambda *args, **kwargs: contextlib.nullcontext()  # noqa: E731

        functions: dict[Any, Any] = {n: cu.CUfunction(PRELUDE_FUNCTION + n) for n in CAPACITIES}
        functions |= {BRANCH: cu.CUfunction(BRANCH_FUNCTION), COPY: cu.CUfunction(COPY_FUNCTION)}
        patches: list[tuple[Any, dict[str, Any]]] = [
            (
                torch.cuda,
                {
                    "CUDAGraph": functools.partial(ModelledGraph, device),
                    "graph": device.capture,
                    "graph_pool_handle": device.new_pool,
                    "device": nothing,
                    "stream": device.on_stream,
                    "Stream": device.new_stream,
                    "ExternalStream": lambda raw, device_index=None, **kwargs: ModelledStream(device, raw),
                    "Event": lambda **kwargs: ModelledEvent(),
                    "current_stream": lambda index=None: device.stream,
                    "set_stream": mock.Mock(),
                    "_sleep": lambda cycles: None,
                    "synchronize": lambda *args: None,
                    "empty_cache": device.empty_cache,
                    "mem_get_info": device.mem_get_info,
                    "memory_reserved": lambda index=None: device.nbytes,
                    "memory_snapshot": device.memory_snapshot,
                    "get_per_process_memory_fraction": lambda index=None: 1.0,
                    "is_current_stream_capturing": device.is_capturing,
                    "device_count": lambda: 1,
                    "default_generators": [torch.Generator()],
                },
            ),
            (
                torch._C,
                {
                    "_cuda_getCheckpointState": lambda *args: object(),
                    "_cuda_setCheckpointPoolState": device.set_checkpoint,
                    "_cuda_cudaCachingAllocator_raw_delete": lambda address: None,
                    "_cuda_clearCublasWorkspaces": device.workspaces.clear,
                    "_cuda_getCurrentBlasHandle": device.blas_handle,
                    "_has_Standard_Deleter": lambda storage: True,
                    "_cuda_isCurrentStreamCapturing": device.is_capturing,
                    "_cuda_getCurrentRawStream": lambda index: device.stream.cuda_stream,
                    "_cuda_getDevice": lambda: 0,
                    "_cuda_beginAllocateCurrentThreadToPool": device.begin_allocate,
                    "_cuda_endAllocateToPool": device.end_allocate,
                    "_cuda_releasePool": device.release_pool,
                },
            ),
            (
                trees,
                {
                    "check_memory_pool": device.check_pool,
                    "preserve_rng_state": nothing,
                    "clear_cublas_manager": device.clear_workspaces,
                    "_use_cuda_memory_pool_manager": device.allocate_to_pool,
                },
            ),
            # Generated code allocates in C++, without an operator.
            (
                allocation,
                {"empty_strided_cuda": device.empty_strided, "native": types.SimpleNamespace(compiled=None)},
            ),
            # No kernel is compiled.
            (prelude, {"_kernels": lambda *args: functions}),
            (torch.UntypedStorage, {"clone": lambda storage: device.clone_storage(storage)}),
        ]
        with contextlib.ExitStack() as stack:
            stack.enter_context(host_operators(device))
            for target, values in patches:
                stack.enter_context(mock.patch.multiple(target, **values))
            yield device
