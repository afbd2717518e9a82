"""
Parameter indirection in one host action a call, however many kernels read an input.

A graph gets a first node, the prelude: a kernel that takes the addresses of a call by value and writes each to a
parameter of a device-updatable node (cudaGraphKernelNodeSetParam, CUDA 12.4). To the host the prelude is a kernel node
like others: binding.py finds the placeholders in its parameters and sets that one node.

The prelude is compiled with NVRTC, once for an architecture and version, and kept beside Inductor's caches.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
from pathlib import Path
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch._inductor.codecache import write_atomic
from torch._inductor.pygraph.graph import binding
from torch._inductor.pygraph.graph.driver import bindings, check, DriverError, edge_data
from torch._inductor.pygraph.types.reason import Code, Reason, RefusedError
from torch._inductor.runtime.cache_dir_utils import cache_dir


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._inductor.pygraph.graph.placeholder import PlaceholderMap


log = logging.getLogger(__name__)

# The first CUDA version with device-side updates of nodes.
DRIVER_VERSION = 12040

# Addresses that a prelude's kernel takes. The last number fills the 4096 bytes of parameters. A second prelude takes
# further addresses.
CAPACITIES = (16, 128, 500)

# The host takes longer to set so many nodes than the prelude takes (benchmark suite `bindings`).
PAYS_FROM_KERNELS = 32

# Of a block. Each thread sets one node.
THREADS = 128

SOURCE = (
    r"""
#ifdef SETS_NODES
// To ``offset`` bytes of the parameters of the node ``target``: word number ``word`` plus ``delta``.
struct Write {
    cudaGraphDeviceNode_t target;
    size_t offset;
    unsigned long long word;
    unsigned long long delta;
};

template <int n>
struct Words {
    unsigned long long values[n];
};

// Thread i makes the writes first[i] to first[i + 1] - 1: those to one target, since a node
// is not documented to be updated by several threads.
#define PRELUDE(n)                                                                      \
    extern "C" __global__ void pygraph_prelude_##n(                                     \
        const Write* writes, const int* first, int* error, int targets,                 \
        const __grid_constant__ Words<n> words) {                                       \
        int i = blockIdx.x * blockDim.x + threadIdx.x;                                  \
        if (i >= targets) return;                                                       \
        for (int k = first[i]; k < first[i + 1]; k++) {                                 \
            Write w = writes[k];                                                        \
            unsigned long long value = words.values[w.word] + w.delta;                  \
            int status = cudaGraphKernelNodeSetParam(w.target, w.offset, &value, 8);    \
            if (status) *error = status;                                                \
        }                                                                               \
        __threadfence();                                                                \
    }

"""
    + "\n".join(f"PRELUDE({n})" for n in CAPACITIES)
    + r"""

// In front of a conditional node; see conditional.py.
extern "C" __global__ void pygraph_branch(cudaGraphConditionalHandle handle, const bool* predicate) {
    cudaGraphSetConditional(handle, *predicate);
}
#endif

// See copies.py. Returns the bytes that are left.
template <typename T>
__device__ unsigned long long copy_all(char*& to, const char*& from, unsigned long long nbytes) {
    const unsigned long long align = (unsigned long long)to | (unsigned long long)from;
    if (align % sizeof(T)) return nbytes;
    const unsigned long long count = nbytes / sizeof(T), step = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        ((T*)to)[i] = ((const T*)from)[i];
    }
    to += count * sizeof(T);
    from += count * sizeof(T);
    return nbytes % sizeof(T);
}

extern "C" __global__ void pygraph_copy(char* to, const char* from, unsigned long long nbytes) {
    nbytes = copy_all<uint4>(to, from, nbytes);
    nbytes = copy_all<unsigned int>(to, from, nbytes);
    copy_all<char>(to, from, nbytes);
}
"""
)

# The names of the other kernels. COPY sets no node.
BRANCH, COPY = "branch", "copy"

# The first CUDA version with IF nodes of two bodies.
BRANCH_DRIVER_VERSION = 12080


class Write(NamedTuple):
    """The address of an input plus ``delta`` goes to ``offset`` in the parameters of the node ``target``."""

    input: int
    delta: int
    target: int
    offset: int


class PreludeUnavailable(RuntimeError):
    """There can be no prelude. The graph is as it was captured."""


def _device_runtime() -> Path | None:
    "libcudadevrt.a of NVIDIA's packages or of an installed toolkit."
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    found = [f for folder in folders for f in folder.glob("*/lib/libcudadevrt.a")]
    if "CUDA_HOME" in os.environ:
        found += Path(os.environ["CUDA_HOME"]).glob("lib64/libcudadevrt.a")
    return found[0] if found else None


def _nvrtc(result: tuple[Any, ...]) -> Any:
    try:
        return check(result)
    except DriverError as e:
        raise PreludeUnavailable(f"NVRTC: {result[0].name}") from e


def compile_prelude(architecture: str, *, sets_nodes: bool) -> bytes:
    """
    Return the kernels as a cubin for an architecture like sm_90. Those that set nodes are linked with the device
    runtime.

    Raises:
        PreludeUnavailable: NVRTC does not know the architecture, or device-side updates.
    """
    from cuda.bindings import nvjitlink, nvrtc

    options = [f"--gpu-architecture={architecture}".encode()]
    if sets_nodes:
        options += [b"--relocatable-device-code=true", b"--define-macro=SETS_NODES"]
    program = _nvrtc(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"pygraph_prelude.cu", 0, [], []))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(status) != 0:
            text = b" " * _nvrtc(nvrtc.nvrtcGetProgramLogSize(program))
            _nvrtc(nvrtc.nvrtcGetProgramLog(program, text))
            lines = text.decode(errors="replace").strip("\0\n ").splitlines()
            raise PreludeUnavailable(f"NVRTC: {lines[0] if lines else status.name}")
        cubin = b" " * _nvrtc(nvrtc.nvrtcGetCUBINSize(program))
        _nvrtc(nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    if not sets_nodes:
        return cubin
    linker = nvjitlink.create(1, [f"-arch={architecture}"])
    try:
        kind = nvjitlink.InputType
        nvjitlink.add_data(linker, kind.CUBIN, cubin, len(cubin), "pygraph_prelude")
        if (library := _device_runtime()) is not None:
            nvjitlink.add_file(linker, kind.LIBRARY, str(library))
        nvjitlink.complete(linker)
        linked = bytearray(nvjitlink.get_linked_cubin_size(linker))
        nvjitlink.get_linked_cubin(linker, linked)
    finally:
        nvjitlink.destroy(linker)
    return bytes(linked)


def _cache_path(architecture: str, *, sets_nodes: bool) -> Path:
    from cuda.bindings import nvjitlink, nvrtc

    compilers = _nvrtc(nvrtc.nvrtcVersion()), nvjitlink.version()
    has_runtime = _device_runtime() is not None
    key = repr((SOURCE, architecture, sets_nodes, compilers, has_runtime))
    name = f"prelude_{hashlib.sha256(key.encode()).hexdigest()}.cubin"
    return Path(cache_dir()) / "pygraph" / name


def _load(cubin: bytes, *, sets_nodes: bool) -> dict[Any, Any]:
    cu = bindings()
    module = check(cu.cuModuleLoadData(cubin))
    names: dict[Any, bytes] = {COPY: b"pygraph_copy"}
    if sets_nodes:
        names |= {BRANCH: b"pygraph_branch", **{n: f"pygraph_prelude_{n}".encode() for n in CAPACITIES}}
    return {key: check(cu.cuModuleGetFunction(module, name)) for key, name in names.items()}


@functools.cache
def _kernels(device_index: int, sets_nodes: bool) -> dict[Any, Any]:
    """Return the CUfunction of COPY, and of BRANCH and each capacity if ``sets_nodes``. Raises PreludeUnavailable."""
    if sets_nodes and check(bindings().cuDriverGetVersion()) < DRIVER_VERSION:
        raise PreludeUnavailable("the driver has no device-side updates of nodes")
    properties = torch.cuda.get_device_properties(device_index)
    architecture = f"sm_{properties.major}{properties.minor}"
    try:
        path = _cache_path(architecture, sets_nodes=sets_nodes)
        if path.exists():
            try:
                return _load(path.read_bytes(), sets_nodes=sets_nodes)
            except (OSError, DriverError) as e:
                log.info("compiling the prelude in %s anew: %s", path, e)
        cubin = compile_prelude(architecture, sets_nodes=sets_nodes)
        try:
            write_atomic(str(path), cubin, make_dirs=True)
        except OSError as e:
            log.info("the prelude can not be kept in %s: %s", path, e)
        return _load(cubin, sets_nodes=sets_nodes)
    except PreludeUnavailable:
        raise
    except Exception as e:
        # A library is missing, too old, or of another version than the driver.
        reason = f"{type(e).__name__}: {e}".partition("\n")[0]
        raise PreludeUnavailable(f"it can not be compiled: {reason}") from e


def copy_kernel(device_index: int) -> Any:
    """Return the CUfunction that copies: (to, from, number of bytes). Raises PreludeUnavailable."""
    return _kernels(device_index, False)[COPY]


def branch_kernel(device_index: int) -> Any:
    """Return the CUfunction that sets a condition: (handle, address of a bool). Raises PreludeUnavailable."""
    try:
        version = min(bindings().CUDA_VERSION, check(bindings().cuDriverGetVersion()))
    except (ImportError, RuntimeError) as e:
        # cuda-bindings or libcuda is missing where code is compiled.
        raise PreludeUnavailable(f"there is no driver: {e}") from e
    if version < BRANCH_DRIVER_VERSION:
        raise PreludeUnavailable("the driver has no conditional nodes with two bodies")
    return _kernels(device_index, True)[BRANCH]


def _make_updatable(node: Any) -> int:
    """Make a kernel node device-updatable, for good. Return its handle in device code. Raises DriverError."""
    cu = bindings()
    attribute = cu.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE
    value = cu.CUkernelNodeAttrValue()
    value.deviceUpdatableKernelNode.deviceUpdatable = 1
    check(cu.cuGraphKernelNodeSetAttribute(node, attribute, value))
    value = check(cu.cuGraphKernelNodeGetAttribute(node, attribute))
    return int(value.deviceUpdatableKernelNode.devNode)


def prelude_pays(raw_graph: int, placeholders: PlaceholderMap) -> bool:
    """Return whether a prelude sets the kernels that read an input faster than the host does."""
    graph = bindings().CUgraph(raw_graph)
    return len([*binding.kernels_that_read(graph, placeholders)]) >= PAYS_FROM_KERNELS


class Prelude:
    """
    The prelude of a graph that was captured and not instantiated. A graph without kernels that read an input gets none.

    Attributes:
        nodes: handles of the nodes that the device updates, and the host never
        arrays, error: device memory that the prelude reads, and that its failure is written to

    Raises:
        PreludeUnavailable: there can be no prelude. The graph is as it was captured.
        RefusedError: the graph was changed and cannot be used, or its inputs cannot be bound.
    """

    def __init__(self, raw_graph: int, placeholders: PlaceholderMap, device_index: int) -> None:
        self.graph = bindings().CUgraph(raw_graph)
        self.device_index = device_index
        self.nodes: set[int] = set()
        self.arrays: list[tuple[torch.Tensor, ...]] = []
        self.error: torch.Tensor | None = None
        readers = list(binding.kernels_that_read(self.graph, placeholders))
        if not readers:
            return
        # Before anything is changed: whether there can be a prelude.
        kernels = _kernels(device_index, True)
        try:
            if writes := self._updates(readers):
                self.error = torch.zeros(1, dtype=torch.int32, device=self._device)
                self._add_nodes(kernels, placeholders, writes)
                return
        except RuntimeError as e:
            raise RefusedError(Reason.of(Code.PRELUDE_NOT_ADDED, error=str(e))) from e
        raise PreludeUnavailable("no kernel can be updated on the device")

    @property
    def _device(self) -> torch.device:
        return torch.device("cuda", self.device_index)

    def _updates(self, readers: list[binding.ReadParameters]) -> list[Write]:
        """Make kernels device-updatable. The host sets the others."""
        writes: list[Write] = []
        for reader in readers:
            try:
                target = _make_updatable(reader.node)
            except DriverError as e:
                name = check(bindings().cuFuncGetName(binding.kernel_function(reader.params)))
                log.info("%s is updated by the host: %s", name.decode(), e)
                continue
            self.nodes.add(int(reader.node))
            writes += [Write(k, delta, target, reader.parameters[i][0] + at) for i, at, (k, delta, *_) in reader.words]
        return writes

    def _add_nodes(self, kernels: dict[int, Any], placeholders: PlaceholderMap, writes: list[Write]) -> None:
        cu = bindings()
        _, count = check(cu.cuGraphGetRootNodes(self.graph))
        roots = list(check(cu.cuGraphGetRootNodes(self.graph, count))[0][:count])
        on_device: Callable[..., torch.Tensor] = functools.partial(torch.tensor, device=self._device)
        written = sorted({w.input for w in writes})
        last: list[Any] = []
        for start in range(0, len(written), CAPACITIES[-1]):
            inputs = written[start : start + CAPACITIES[-1]]
            capacity = next(n for n in CAPACITIES if n >= len(inputs))
            word_of = {k: n for n, k in enumerate(inputs)}
            chosen = sorted((w for w in writes if w.input in word_of), key=lambda w: w.target)
            first = [n for n, w in enumerate(chosen) if n == 0 or chosen[n - 1].target != w.target]
            rows = [[w.target, w.offset, word_of[w.input], w.delta] for w in chosen]
            ends = on_device([*first, len(chosen)], dtype=torch.int32)
            arrays = (on_device(rows, dtype=torch.int64), ends, self.error)
            words = (ctypes.c_uint64 * capacity)(*[placeholders.placeholders[k].address for k in inputs])
            buffers = [*[ctypes.c_uint64(a.data_ptr()) for a in arrays], ctypes.c_int32(len(first)), words]
            blocks = -(-len(first) // THREADS)
            last = [binding.add_kernel(self.graph, last, kernels[capacity], buffers, blocks, THREADS)]
            self.arrays.append(arrays)
        if roots:
            check(cu.cuGraphAddDependencies(self.graph, last * count, roots, *edge_data(), count))

    def upload(self, raw_executable: int) -> None:
        """Upload the graph. A graph that updates its own nodes needs that ahead of its first launch."""
        if not self.nodes:
            return
        cu = bindings()
        stream = torch.cuda.current_stream(self.device_index)
        executable = cu.CUgraphExec(raw_executable)
        check(cu.cuGraphUpload(executable, cu.CUstream(stream.cuda_stream)))
        stream.synchronize()

    def failure(self) -> Reason | None:
        """Return what went wrong on the device since this was last asked, or None. Waits."""
        if self.error is None or (status := int(self.error.item())) == 0:
            return None
        self.error.zero_()
        return Reason.of(Code.NODE_REFUSED_ON_DEVICE, status=status)
