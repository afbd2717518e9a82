"""Launches of kernels with indirect parameters: the binder and its caches without a GPU, results on one."""

import ctypes
import importlib.util
import json
import types
from pathlib import Path

import pytest
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

import torch


GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")


@triton.jit(indirect_args={"a_ptr": 16, "o_ptr": 16})
def scale(a_ptr: tl.pointer_type(tl.float32), o_ptr: tl.pointer_type(tl.float32), n, factor, BLOCK: tl.constexpr):
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o_ptr + x, tl.load(a_ptr + x, x < n) * factor, x < n)


class Target:
    """A driver that knows what to compile for, and records launches."""

    def __init__(self):
        self.launches = []
        properties = dict(max_shared_mem=232448, multiprocessor_count=132, warpSize=32)
        self.utils = types.SimpleNamespace(get_device_properties=lambda device: properties, load_binary=lambda *args:
                                           (object(), object(), 32, 0, 1024))

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def launcher_cls(self, src, metadata):
        # After the grid, the stream, the function, metadata and hooks come the arguments.
        return lambda *args: self.launches.append(args[9:])


@pytest.fixture
def target(tmp_path, monkeypatch):
    fake = Target()
    monkeypatch.setattr(driver, "_active", fake)
    with knobs.cache.scope(), knobs.runtime.scope():
        knobs.cache.dir = str(tmp_path)
        yield fake


@pytest.fixture
def fresh_scale():
    return triton.jit(indirect_args={"a_ptr": 16, "o_ptr": 16})(scale.fn)


def test_slots_share_a_kernel(target, fresh_scale):
    """The address of a slot, at a multiple of 16 or not, as a number or as a tensor, changes nothing."""
    table = torch.zeros(4, dtype=torch.int64)
    kernels = set()
    for first, second in ((0, 1), (1, 0), (2, 3)):
        slots = [table.data_ptr() + 8 * slot for slot in (first, second)]
        kernels.add(fresh_scale[(1, )](*slots, 64, 2.0, BLOCK=512))
        assert target.launches[-1][:2] == tuple(slots)
        slots = [table[slot:slot + 1] for slot in (first, second)]
        kernels.add(fresh_scale[(1, )](*slots, 64, 2.0, BLOCK=512))
    kernel, = kernels
    assert kernel.metadata.indirect_params == [[0, 16], [1, 16]]
    assert "ld.global.v4.b32" in kernel.asm["ptx"]


def test_type_of_the_argument(target):
    """Without an annotation the element type is that of what is passed, as for any argument."""
    plain_names = triton.jit(indirect_args={"p_ptr": 16})(untyped.fn)
    slot = torch.zeros(1, dtype=torch.int64)
    kernel = plain_names.warmup(triton.reinterpret(slot, tl.float16), torch.float16, grid=(1, ))
    assert kernel.metadata.indirect_params == [[0, 16]]
    assert kernel.src.signature["p_ptr"] == "*fp16"


@triton.jit
def untyped(p_ptr, o_ptr):
    x = tl.arange(0, 512)
    tl.store(o_ptr + x, tl.load(p_ptr + x))


def test_none(target):

    @triton.jit(indirect_args={"a_ptr": 16, "bias_ptr": 16})
    def add(a_ptr: tl.pointer_type(tl.float32), bias_ptr, o_ptr):
        x = tl.arange(0, 512)
        y = tl.load(a_ptr + x)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + x)
        tl.store(o_ptr + x, y)

    out = torch.zeros(512)
    absent = add[(1, )](4096, None, out)
    assert absent.metadata.indirect_params == [[0, 16]]
    present = add[(1, )](4096, triton.reinterpret(torch.zeros(1, dtype=torch.int64), tl.float32), out)
    assert present.metadata.indirect_params == [[0, 16], [1, 16]]


def test_autotuned(target):
    configs = [triton.Config(dict(BLOCK=block), num_warps=warps) for block, warps in ((512, 2), (1024, 4))]
    times = iter([[2.0] * 3, [1.0] * 3])

    def do_bench(call, quantiles):
        call()
        return next(times)

    fn = triton.jit(indirect_args={"a_ptr": 16, "o_ptr": 16})(scale.fn)
    tuned = triton.autotune(configs, key=["n"], do_bench=do_bench)(fn)
    kernel = tuned[(1, )](4096, 4104, 64, 2.0)
    assert tuned.best_config is configs[1]
    assert kernel.metadata.num_warps == 4
    assert kernel.metadata.indirect_params == [[0, 16], [1, 16]]
    assert [launch[:2] for launch in target.launches] == [(4096, 4104)] * 3


def test_preload(target, fresh_scale):
    """What a hook is given to compile the kernel elsewhere makes the same kernel there."""
    data = []
    knobs.runtime.jit_cache_hook = lambda *, compile, **_: data.append(compile["specialization_data"])
    kernel = fresh_scale.warmup(4096, 4096, 64, 2.0, BLOCK=512, grid=(1, ))
    knobs.runtime.jit_cache_hook = None
    again = triton.jit(indirect_args={"a_ptr": 16, "o_ptr": 16})(scale.fn)
    assert json.loads(data[0])["name"].endswith("scale")
    assert again.preload(data[0]).hash == kernel.hash
    assert again.preload(data[0]).metadata.indirect_params == [[0, 16], [1, 16]]


def test_second_process_reads_the_cache(target, fresh_scale):
    """A function that has compiled nothing yet finds the kernel, and its metadata, on disk."""
    hits = []
    with knobs.compilation.scope():
        knobs.compilation.listener = lambda cache_hit, **_: hits.append(cache_hit)
        kernel = fresh_scale.warmup(4096, 4096, 64, 2.0, BLOCK=512, grid=(1, ))
        again = triton.jit(indirect_args={"a_ptr": 16, "o_ptr": 16})(scale.fn)
        assert again.warmup(4096, 4096, 64, 2.0, BLOCK=512, grid=(1, )).metadata == kernel.metadata
        plain = triton.jit(scale.fn).warmup(4096, 4096, 64, 2.0, BLOCK=512, grid=(1, ))
    assert hits == [False, True, False]
    assert plain.hash != kernel.hash


def test_plugin(target, monkeypatch):
    """The plugin with which Triton's own tests run: each pointer becomes a slot that holds it, everything else stays."""
    spec = importlib.util.spec_from_file_location("plugin", Path(__file__).parents[2] / "indirect_pointers.py")
    plugin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)

    @triton.jit
    def add(ptrs, o_ptr, bias_ptr, n, BLOCK: tl.constexpr):
        x = tl.arange(0, BLOCK)
        tl.store(o_ptr + x, tl.load(ptrs[0] + x, x < n) + tl.load(ptrs[1][0] + x, x < n), x < n)

    class Launcher:

        def __init__(self, src, metadata):
            pass

        def __call__(self, *args):
            a, (b, ) = args[9]
            slots = [ctypes.c_int64.from_address(slot).value for slot in (a, b, args[10])]
            target.launches.append((slots, args[11:]))

    methods = plugin.launching(Launcher.__init__, Launcher.__call__, device="cpu")
    Launcher.__init__, Launcher.__call__ = methods
    monkeypatch.setattr(ASTSource, "__init__", plugin.marking(ASTSource.__init__))
    target.launcher_cls = Launcher
    a, b, out = (torch.zeros(520) for _ in range(3))
    kernel = add[(1, )]((a, (b[1:], )), out, None, 512, BLOCK=512)
    assert target.launches == [([a.data_ptr(), b.data_ptr() + 4, out.data_ptr()], (None, 512, 512))]
    # Specialized on the tensors, not on their slots.
    assert kernel.metadata.indirect_params == [[0, 16], [1, 1], [2, 16]]


def table_of(*tensors):
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device="cuda")


def slot(table, index):
    return table.data_ptr() + 8 * index


@needs_gpu
def test_results():
    n = 5000
    table = torch.zeros(2, dtype=torch.int64, device="cuda")
    for _ in range(4):
        a, out = torch.randn(n, device="cuda"), torch.full((n + 1, ), 7.0, device="cuda")
        table.copy_(table_of(a, out))
        scale[(triton.cdiv(n, 1024), )](slot(table, 0), slot(table, 1), n, 3.0, BLOCK=1024)
        torch.testing.assert_close(out[:n], a * 3.0, rtol=0, atol=0)
        assert out[n] == 7.0


@needs_gpu
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_misaligned(offset):
    """A pointer that is a multiple of 4 bytes only, declared as such; an access of 16 bytes would fault."""
    n = 4096
    fn = triton.jit(indirect_args={"a_ptr": 4, "o_ptr": 4})(scale.fn)
    a, out = torch.randn(n + 4, device="cuda"), torch.zeros(n + 4, device="cuda")
    table = table_of(a[offset:], out[offset:])
    fn[(triton.cdiv(n, 1024), )](slot(table, 0), slot(table, 1), n, 3.0, BLOCK=1024)
    torch.testing.assert_close(out[offset:offset + n], a[offset:offset + n] * 3.0, rtol=0, atol=0)
    assert not out[:offset].any() and not out[offset + n:].any()


@triton.jit(indirect_args={"io_ptr": 16, "count_ptr": 8})
def accumulate(
        io_ptr: tl.pointer_type(tl.float32), count_ptr: tl.pointer_type(tl.int64), a_ptr, n, BLOCK: tl.constexpr):
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(io_ptr + x, tl.load(io_ptr + x, x < n) + tl.load(a_ptr + x, x < n), x < n)
    tl.atomic_add(count_ptr, 1)


@needs_gpu
def test_stores_and_atomics_through_the_pointer():
    n, block = 3000, 512
    a = torch.randn(n, device="cuda")
    for _ in range(3):
        io, count = torch.randn(n, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
        before, table = io.clone(), table_of(io, count)
        programs = triton.cdiv(n, block)
        accumulate[(programs, )](slot(table, 0), slot(table, 1), a, n, BLOCK=block)
        torch.testing.assert_close(io, before + a, rtol=0, atol=0)
        assert count.item() == programs


@needs_gpu
def test_two_parameters_one_tensor():
    n = 2048
    a = torch.randn(n, device="cuda")
    expected, table = a * 3.0, table_of(a, a)
    scale[(2, )](slot(table, 0), slot(table, 1), n, 3.0, BLOCK=1024)
    torch.testing.assert_close(a, expected, rtol=0, atol=0)


@triton.jit
def matmul(a_ptr: tl.pointer_type(tl.float16), b_ptr: tl.pointer_type(tl.float16), c_ptr: tl.pointer_type(tl.float32),
           M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    a_desc = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BM, BK])
    b_desc = tl.make_tensor_descriptor(b_ptr, [N, K], [K, 1], [BN, BK])
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(a_desc.load([m, k]), b_desc.load([n, k]).T, acc)
    tl.store(c_ptr + (m + tl.arange(0, BM))[:, None] * N + (n + tl.arange(0, BN))[None, :], acc)


@needs_gpu
@pytest.mark.skipif(not GPU or torch.cuda.get_device_capability()[0] < 9, reason="needs TMA")
def test_device_descriptor():
    """The same bits as the plain kernel, with pointers that move."""
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    indirect = triton.jit(indirect_args={"a_ptr": 16, "b_ptr": 16, "c_ptr": 16})(matmul.fn)
    size, tiles = 512, dict(BM=128, BN=128, BK=64)
    for _ in range(3):
        a, b = (torch.randn(size, size, dtype=torch.float16, device="cuda") for _ in range(2))
        expected, out = (torch.empty(size, size, device="cuda") for _ in range(2))
        matmul[(4, 4)](a, b, expected, size, size, size, **tiles)
        table = table_of(a, b, out)
        indirect[(4, 4)](*(slot(table, index) for index in range(3)), size, size, size, **tiles)
        assert torch.equal(out, expected)


@needs_gpu
def test_cuda_graph():
    """A recorded launch reaches other tensors after the table was rewritten, with no change to the graph."""
    n = 5000
    args = (n, 3.0)
    a, out = torch.randn(n, device="cuda"), torch.empty(n, device="cuda")
    table = table_of(a, out)

    def launch():
        scale[(triton.cdiv(n, 1024), )](slot(table, 0), slot(table, 1), *args, BLOCK=1024)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    unused = out.fill_(7.0)
    for _ in range(4):
        a, out = torch.randn(n, device="cuda"), torch.empty(n, device="cuda")
        table.copy_(table_of(a, out))
        graph.replay()
        torch.testing.assert_close(out, a * 3.0, rtol=0, atol=0)
    assert (unused == 7.0).all()
