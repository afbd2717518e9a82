"""Kernels with indirect parameters, compiled without a GPU: what differs from the plain kernel, and what must not."""

from __future__ import annotations

import re
import subprocess
from collections import Counter

import pytest
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import param_indirection
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.experimental import gluon
from triton.experimental.gluon import language as ttgl
from triton.experimental.gluon._runtime import GluonASTSource


SLOT_LOAD = "ld.global.nc.b64"
SIZES = ["M", "N", "K", "n"]


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path):
    with knobs.cache.scope(), knobs.runtime.scope():
        knobs.cache.dir = str(tmp_path)
        yield


@triton.jit
def pointwise(a_ptr, b_ptr, o_ptr, n, BLOCK: tl.constexpr):
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o_ptr + x, tl.load(a_ptr + x, x < n) + tl.load(b_ptr + x, x < n), x < n)


@triton.jit
def in_place(io_ptr, scale_ptr, n, BLOCK: tl.constexpr):
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(io_ptr + x, tl.load(io_ptr + x, x < n) * tl.load(scale_ptr), x < n)


@triton.jit
def reduction(a_ptr, b_ptr, o_ptr, N, BM: tl.constexpr, BN: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, N, BN):
        cols = start + tl.arange(0, BN)[None, :]
        a = tl.load(a_ptr + rows * N + cols, cols < N, other=0.0, eviction_policy="evict_first")
        acc += a * tl.load(b_ptr + cols, cols < N, other=0.0, eviction_policy="evict_last")
    tl.store(o_ptr + rows, tl.sum(acc, 1)[:, None])


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a_ptrs = a_ptr + m[:, None] * K + k[None, :]
    b_ptrs = b_ptr + k[:, None] * N + n[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, K, BK):
        acc = tl.dot(tl.load(a_ptrs), tl.load(b_ptrs), acc)
        a_ptrs += BK
        b_ptrs += BK * N
    tl.store(c_ptr + m[:, None] * N + n[None, :], acc.to(tl.float16))


@triton.jit
def matmul_tma(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WS: tl.constexpr):
    a_desc = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BM, BK])
    b_desc = tl.make_tensor_descriptor(b_ptr, [N, K], [K, 1], [BN, BK])
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, K, BK, warp_specialize=WS):
        acc = tl.dot(a_desc.load([m, k]), b_desc.load([n, k]).T, acc)
    c_ptrs = c_ptr + (m + tl.arange(0, BM))[:, None] * N + (n + tl.arange(0, BN))[None, :]
    tl.store(c_ptrs, acc.to(tl.float16))


@triton.jit
def host_descriptor(a_desc, o_ptr, BM: tl.constexpr, BN: tl.constexpr):
    x = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    tl.store(o_ptr + x, a_desc.load([0, 0]))


@triton.jit
def block_pointer(a_ptr, o_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    block = tl.make_block_ptr(a_ptr, (M, N), (N, 1), (tl.program_id(0) * BM, 0), (BM, BN), (1, 0))
    tl.store(o_ptr + tl.program_id(0) * BM + tl.arange(0, BM), tl.sum(tl.load(block, boundary_check=(0, 1)), 1))


@triton.jit
def atomics(a_ptr, index_ptr, o_ptr, lock_ptr, BLOCK: tl.constexpr):
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.atomic_add(o_ptr + tl.load(index_ptr + x), tl.load(a_ptr + x))
    tl.atomic_xchg(lock_ptr, 0)


@triton.jit(noinline=True)
def device_function(p_ptr, q_ptr, x):
    return tl.sum(tl.load(p_ptr + x + tl.arange(0, 512)) * tl.load(q_ptr + x + tl.arange(0, 512)))


@triton.jit
def calls(a_ptr, b_ptr, o_ptr, BLOCK: tl.constexpr):
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o_ptr + x, tl.load(a_ptr + x) + device_function(a_ptr, b_ptr, tl.program_id(0) * BLOCK))


@triton.jit
def inline_asm(a_ptr, o_ptr, BLOCK: tl.constexpr):
    x = tl.arange(0, BLOCK)
    # The text of the asm has what looks like the names of values.
    y = tl.inline_asm_elementwise("{ .reg .b32 %0; mov.b32 %0, $1; add.u32 $0, %0, 1; }", "=r,r", [tl.load(a_ptr + x)],
                                  dtype=tl.int32, is_pure=True, pack=1)
    tl.store(o_ptr + x, y)


@triton.jit
def optional(a_ptr, bias_ptr, o_ptr, BLOCK: tl.constexpr):
    x = tl.arange(0, BLOCK)
    y = tl.load(a_ptr + x)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + x)
    tl.store(o_ptr + x, y)


@triton.jit
def in_tuple(ptrs, o_ptr, BLOCK: tl.constexpr):
    x = tl.arange(0, BLOCK)
    tl.store(o_ptr + x, tl.load(ptrs[0] + x) + tl.load(ptrs[1] + x))


TILES = dict(BM=128, BN=128, BK=64)
MATMUL = dict(a_ptr="*fp16", b_ptr="*fp16", c_ptr="*fp16", M="i32", N="i32", K="i32")

# name: (kernel, signature, constexprs, options, architecture)
KERNELS = {
    "pointwise": (pointwise, dict(a_ptr="*fp32", b_ptr="*fp32", o_ptr="*fp32", n="i32"), dict(BLOCK=1024), {}, 90),
    "pointwise_const": (pointwise, dict(a_ptr="*kfp32", b_ptr="*fp32", o_ptr="*fp32",
                                        n="i32"), dict(BLOCK=1024), {}, 90),
    "pointwise_bf16": (pointwise, dict(a_ptr="*bf16", b_ptr="*bf16", o_ptr="*bf16",
                                       n="i32"), dict(BLOCK=1024), dict(num_warps=2), 90),
    "in_place": (in_place, dict(io_ptr="*fp32", scale_ptr="*fp32", n="i32"), dict(BLOCK=1024), {}, 90),
    "reduction": (reduction, dict(a_ptr="*fp32", b_ptr="*fp32", o_ptr="*fp32",
                                  N="i32"), dict(BM=4, BN=1024), dict(num_warps=8), 90),
    "matmul_sm80": (matmul, MATMUL, TILES | dict(BK=32), dict(num_stages=4), 80),
    "matmul_sm90": (matmul, MATMUL, TILES, dict(num_stages=4, num_warps=8), 90),
    "matmul_tma": (matmul_tma, MATMUL, TILES | dict(WS=False), dict(num_warps=8), 90),
    "warp_specialized_sm90": (matmul_tma, MATMUL, TILES | dict(WS=True), {}, 90),
    "warp_specialized_sm100": (matmul_tma, MATMUL, TILES | dict(WS=True), {}, 100),
    "host_descriptor": (host_descriptor, dict(a_desc="tensordesc<fp16[64,64]>", o_ptr="*fp16"), dict(BM=64,
                                                                                                     BN=64), {}, 90),
    "block_pointer": (block_pointer, dict(a_ptr="*fp32", o_ptr="*fp32", M="i32", N="i32"), dict(BM=32, BN=64), {}, 90),
    "atomics": (atomics, dict(a_ptr="*fp32", index_ptr="*i64", o_ptr="*fp32",
                              lock_ptr="*i32"), dict(BLOCK=512), {}, 90),
    "calls": (calls, dict(a_ptr="*fp32", b_ptr="*fp32", o_ptr="*fp32"), dict(BLOCK=512), {}, 90),
    "inline_asm": (inline_asm, dict(a_ptr="*i32", o_ptr="*i32"), dict(BLOCK=512), {}, 90),
}


def compiled(fn, signature, constexprs=None, options=None, arch=90, indirect=None):
    """``fn`` with its sizes and the pointers that are not indirect known to be multiples of 16."""
    constexprs = constexprs or {}
    signature = signature | dict.fromkeys(constexprs, "constexpr")
    attrs = {(i, ): [["tt.divisibility", 16]]
             for i, name in enumerate(fn.arg_names)
             if str(signature[name]).startswith("*") or name in SIZES}
    fn = triton.jit(indirect_args=indirect)(fn.fn)
    source = ASTSource(fn, {name: signature[name] for name in fn.arg_names}, constexprs, attrs)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def pointers(signature, alignment=16):
    return {name: alignment for name, ty in signature.items() if ty.startswith("*")}


def kernel_body(ptx):
    """The PTX of the kernel without comments, and without that of functions it calls."""
    return re.sub(r"//.*", "", re.search(r"\.visible \.entry .*?// -- End function", ptx, re.DOTALL)[0])


def memory_operations(ptx):
    """How often each kind of access is in the PTX: its width, cache operator and address space are in the name."""
    accesses = r"\b((?:ld|st|atom|red|cp|prefetch\w*|wgmma|tcgen05|mbarrier|ldmatrix|stmatrix)\.[\w.:]+)"
    return Counter(re.findall(accesses, re.sub(r"//.*", "", ptx)))


def loaded_slots(ptx):
    """The positions of the parameters that are read through memory: each once, and used for nothing else."""
    body = kernel_body(ptx)
    positions = []
    for slot in re.findall(rf"{re.escape(SLOT_LOAD)}\s+%rd\d+, \[(%rd\d+)\];", body):
        assert len(re.findall(rf"{slot}\b", body)) == 2, "the address of the slot has another use"
        positions.append(int(re.search(rf"ld\.param\.b64\s+{slot}, \[\w+_param_(\d+)\];", body)[1]))
    return sorted(positions)


def resources(kernel):
    """(registers, bytes spilled) of a kernel, from ptxas."""
    arch = kernel.metadata.target.arch
    gpu = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
    done = subprocess.run([get_ptxas(arch).path, "-v", f"--gpu-name={gpu}", "-o", "/dev/null", "-"],
                          input=kernel.asm["ptx"], capture_output=True, text=True, check=True)
    said = done.stderr[done.stderr.index(f"entry function '{kernel.name}'"):]
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    return int(re.search(r"Used (\d+) registers", said)[1]), int(spilled[1]) + int(spilled[2])


@pytest.mark.parametrize("name", KERNELS)
def test_all_pointers(name):
    fn, signature, constexprs, options, arch = KERNELS[name]
    plain = compiled(fn, signature, constexprs, options, arch)
    indirect = compiled(fn, signature, constexprs, options, arch, indirect=pointers(signature))

    # A host descriptor of rank 2 is five parameters of the kernel.
    expected = [5] if name == "host_descriptor" else list(range(len(pointers(signature))))
    assert indirect.metadata.indirect_params == [[position, 16] for position in expected]
    assert not hasattr(plain.metadata, "indirect_params")
    assert loaded_slots(indirect.asm["ptx"]) == expected

    # Nothing else differs in memory: vectors, asynchronous copies, TMA, cache hints, atomics.
    before, after = memory_operations(plain.asm["ptx"]), memory_operations(indirect.asm["ptx"])
    assert after - before == {SLOT_LOAD: len(expected)}
    assert not before - after
    # Above LLVM IR the mark is all that differs. Automatic warp specialization for sm_90 does not give the same
    # TTGIR each time: what its partitions capture comes in no fixed order.
    for ir in ("ttir", "ttgir")[:1 if name == "warp_specialized_sm90" else 2]:
        assert re.sub(r", tt\.indirect = 1 : i32", "", indirect.asm[ir]) == plain.asm[ir]

    registers, spilled = resources(indirect)
    plain_registers, _ = resources(plain)
    print(f"\n{name}: {plain_registers} -> {registers} registers, {spilled} bytes spilled")
    assert spilled == 0
    # A pointer to be held takes two registers, where a parameter can be read again; ptxas adds noise.
    assert registers <= plain_registers + 2 * len(expected) + 8


@pytest.mark.parametrize("indirect, expected", [
    ({"b_ptr": 16}, [[1, 16]]),
    ({0: 16, "o_ptr": 16}, [[0, 16], [2, 16]]),
    ({"o_ptr": 256}, [[2, 256]]),
])
def test_some_pointers(indirect, expected):
    fn, signature, constexprs, options, arch = KERNELS["pointwise"]
    kernel = compiled(fn, signature, constexprs, indirect=indirect)
    plain = compiled(fn, signature, constexprs)
    assert kernel.metadata.indirect_params == expected
    assert loaded_slots(kernel.asm["ptx"]) == [position for position, _ in expected]
    assert memory_operations(kernel.asm["ptx"]) - memory_operations(plain.asm["ptx"]) == {SLOT_LOAD: len(expected)}


@pytest.mark.parametrize("alignment, loads", [(16, {"ld.global.v4.b32": 2}), (8, {"ld.global.v2.b32": 4}),
                                              (4, {"ld.global.b32": 8}), (1, {"ld.global.b32": 8})])
def test_alignment_is_that_of_the_pointer(alignment, loads):
    """Whatever else says of the argument, which is a slot's address, accesses are as wide as the declaration allows."""
    signature = dict(a_ptr="*fp32", o_ptr="*fp32")

    @triton.jit
    def copy(a_ptr, o_ptr):
        x = tl.arange(0, 1024)
        tl.store(o_ptr + x, tl.load(a_ptr + x))

    kernel = compiled(copy, signature, indirect={"a_ptr": alignment})
    found = memory_operations(kernel.asm["ptx"])
    assert {access: count
            for access, count in found.items()
            if access.startswith("ld.global")} == loads | {SLOT_LOAD: 1}
    assert found["st.global.v4.b32"] == 2
    assert kernel.metadata.indirect_params == [[0, alignment]]


def test_machine_code():
    """The loads reach SASS, on the read-only path, and the wide accesses stay wide."""
    fn, signature, constexprs, options, arch = KERNELS["pointwise"]
    plain = compiled(fn, signature, constexprs).asm["sass"]
    sass = compiled(fn, signature, constexprs, indirect=pointers(signature)).asm["sass"]
    assert plain.count("LDG.E.64") == 0
    assert sass.count("LDG.E.64.CONSTANT") == 3
    for wide in ("LDG.E.128", "STG.E.128"):
        assert sass.count(wide) == plain.count(wide) > 0


def test_device_function_gets_the_pointer():
    fn, signature, constexprs, options, arch = KERNELS["calls"]
    kernel = compiled(fn, signature, constexprs, indirect=pointers(signature))
    ptx = kernel.asm["ptx"]
    assert ptx.count(SLOT_LOAD) == kernel_body(ptx).count(SLOT_LOAD) == 3
    assert "call.uni" in kernel_body(ptx)


def test_declaration_of_a_device_function_is_for_launches_only():
    callee = triton.jit(indirect_args={"p_ptr": 16})(device_function.fn)

    @triton.jit
    def caller(p_ptr, o_ptr):
        tl.store(o_ptr, callee(p_ptr, p_ptr, 0))

    assert SLOT_LOAD not in compiled(caller, dict(p_ptr="*fp32", o_ptr="*fp32")).asm["ptx"]


def test_unused_pointer():

    @triton.jit
    def unused(a_ptr, o_ptr):
        tl.store(o_ptr, 1.0)

    kernel = compiled(unused, dict(a_ptr="*fp32", o_ptr="*fp32"), indirect={"a_ptr": 16})
    assert SLOT_LOAD not in kernel.asm["ptx"]
    assert kernel.metadata.indirect_params == [[0, 16]]


def test_none():
    """An optional tensor that is absent is compiled away, and takes no parameter."""
    indirect = {"a_ptr": 16, "bias_ptr": 16, "o_ptr": 16}
    kernel = compiled(optional, dict(a_ptr="*fp32", o_ptr="*fp32"), dict(bias_ptr=None, BLOCK=512), indirect=indirect)
    assert kernel.metadata.indirect_params == [[0, 16], [1, 16]]
    assert loaded_slots(kernel.asm["ptx"]) == [0, 1]
    present = compiled(optional, dict(a_ptr="*fp32", bias_ptr="*fp32", o_ptr="*fp32"), dict(BLOCK=512),
                       indirect=indirect)
    assert loaded_slots(present.asm["ptx"]) == [0, 1, 2]


def test_attributes_of_the_source():
    """What ``indirect_args`` declares can be given to ASTSource, of elements of a tuple too."""
    mark = [["tt.divisibility", 16], ["tt.indirect", 1]]
    source = ASTSource(in_tuple, dict(ptrs=("*fp32", "*fp32"), o_ptr="*fp32", BLOCK="constexpr"), dict(BLOCK=512),
                       {(0, 1): mark, (1, ): [["tt.indirect", 1]]})
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    # Of an alignment that nobody vouches for, nothing is assumed.
    assert kernel.metadata.indirect_params == [[1, 16], [2, 1]]
    assert loaded_slots(kernel.asm["ptx"]) == [1, 2]


def test_gluon():

    @gluon.jit(indirect_args={"a_ptr": 16})
    def copy(a_ptr, o_ptr):
        layout: ttgl.constexpr = ttgl.BlockedLayout([4], [32], [4], [0])
        x = ttgl.arange(0, 512, layout)
        ttgl.store(o_ptr + x, ttgl.load(a_ptr + x))

    source = GluonASTSource(copy, dict(a_ptr="*fp32", o_ptr="*fp32"), {}, {(1, ): [["tt.divisibility", 16]]})
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert loaded_slots(kernel.asm["ptx"]) == [0]
    assert memory_operations(kernel.asm["ptx"])["ld.global.v4.b32"] == 1


def test_file_of_ir(tmp_path):
    fn, signature, constexprs, options, arch = KERNELS["pointwise"]
    kernel = compiled(fn, signature, constexprs, indirect={"a_ptr": 16})
    file = tmp_path / "kernel.ttgir"
    file.write_text(kernel.asm["ttgir"])
    again = triton.compile(str(file), target=GPUTarget("cuda", 90, 32))
    assert again.metadata.indirect_params == [[0, 16]]
    assert loaded_slots(again.asm["ptx"]) == [0]


@pytest.mark.parametrize("knob, value", [("disable_line_info", True), ("dump_ir_extract_di_local_variables", True)])
def test_debug_info(knob, value):
    fn, signature, constexprs, options, arch = KERNELS["pointwise"]
    with knobs.compilation.scope():
        setattr(knobs.compilation, knob, value)
        kernel = compiled(fn, signature, constexprs, indirect=pointers(signature))
    assert loaded_slots(kernel.asm["ptx"]) == [0, 1, 2]


def test_unoptimized(monkeypatch):
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    fn, signature, constexprs, options, arch = KERNELS["reduction"]
    kernel = compiled(fn, signature, constexprs, options, indirect=pointers(signature))
    assert kernel_body(kernel.asm["ptx"]).count(SLOT_LOAD) == 3


def test_cache_key():
    fn, signature, constexprs, options, arch = KERNELS["pointwise"]
    declared = [None, {"a_ptr": 16}, {"a_ptr": 4}, {"b_ptr": 16}, {"a_ptr": 16, "b_ptr": 16}]
    kernels = [compiled(fn, signature, constexprs, indirect=indirect) for indirect in declared]
    assert len({kernel.hash for kernel in kernels}) == len(kernels)
    assert len({kernel.asm["ptx"] for kernel in kernels}) == len(kernels)
    # From the cache: the metadata that was stored, and nothing is compiled.
    hits = []
    with knobs.compilation.scope():
        knobs.compilation.listener = lambda cache_hit, **_: hits.append(cache_hit)
        for kernel, indirect in zip(kernels, declared):
            again = compiled(fn, signature, constexprs, indirect=indirect)
            assert again.hash == kernel.hash
            assert again.metadata == kernel.metadata
            assert again.asm["cubin"] == kernel.asm["cubin"]
    assert hits == [True] * len(kernels)


@pytest.mark.parametrize("indirect, message", [
    ({"x_ptr": 16}, r"copy: indirect_args names 'x_ptr', which is none of its parameters \['a_ptr', 'n', 'BLOCK'\]"),
    ({3: 16}, "copy: indirect_args names 3, which is none of its parameters"),
    ({-1: 16}, "copy: indirect_args names -1, which is none of its parameters"),
    ({"BLOCK": 16}, "copy: parameter 'BLOCK' cannot be indirect, it is a constexpr"),
    ({"a_ptr": 16, 0: 4}, "copy: indirect_args has 'a_ptr' twice, by name and by index"),
    ({"a_ptr": 12}, "copy: the alignment of 'a_ptr' in indirect_args is 12, it must be a power of two"),
    ({"a_ptr": 0}, "the alignment of 'a_ptr' in indirect_args is 0"),
    ({"a_ptr": True}, "the alignment of 'a_ptr' in indirect_args is True"),
    (["a_ptr"], "copy: indirect_args must map each parameter to the alignment in bytes"),
    ("a_ptr", "copy: indirect_args must map each parameter to the alignment in bytes"),
])
def test_wrong_declaration(indirect, message):

    def copy(a_ptr, n, BLOCK: tl.constexpr):
        pass

    with pytest.raises(ValueError, match=message):
        triton.jit(indirect_args=indirect)(copy)


def test_no_pointer():
    pointwise_signature = KERNELS["pointwise"][1]
    with pytest.raises(ValueError, match="pointwise: parameter 'n' cannot be indirect, it is no pointer but i32"):
        compiled(pointwise, pointwise_signature, dict(BLOCK=1024), indirect={"n": 16})
    fn, signature, constexprs, options, arch = KERNELS["host_descriptor"]
    message = r"parameter 'a_desc' cannot be indirect, it is no pointer but tensordesc<fp16\[64,64\]>"
    with pytest.raises(ValueError, match=message):
        compiled(fn, signature, constexprs, indirect={"a_desc": 16})
    # A parameter with no annotation can be given a value to compile with.
    signature = {name: ty for name, ty in pointwise_signature.items() if name != "b_ptr"}
    with pytest.raises(ValueError, match="parameter 'b_ptr' cannot be indirect, it is no pointer but constexpr"):
        compiled(pointwise, signature, dict(b_ptr=7, BLOCK=1024), indirect={"b_ptr": 16})


@pytest.mark.parametrize("path, message", [
    ((2, ), "in_tuple: parameter 'BLOCK' cannot be indirect, it is no pointer but constexpr"),
    ((0, ), "in_tuple: parameter 'ptrs' cannot be indirect, it is no pointer but"),
    ((3, ), "in_tuple: parameter 3 cannot be indirect, there is none"),
])
def test_no_pointer_by_attribute(path, message):
    with pytest.raises(ValueError, match=message):
        ASTSource(in_tuple, dict(ptrs=("*fp32", "i32"), o_ptr="*fp32", BLOCK="constexpr"), dict(BLOCK=512),
                  {path: [["tt.indirect", 1]]})


@pytest.mark.parametrize("name, before, message", [
    ("pointwise", "%n: i32 {", "parameter 3 cannot be indirect, it is no pointer: %n: i32"),
    ("calls", "(%p_ptr: !tt.ptr<f32> {", "parameter 0 of a device function cannot be indirect: %p_ptr"),
])
def test_wrong_file_of_ir(tmp_path, name, before, message):
    fn, signature, constexprs, options, arch = KERNELS[name]
    ttgir = compiled(fn, signature, constexprs, indirect={"a_ptr": 16}).asm["ttgir"]
    assert ttgir.count(before) == 1
    file = tmp_path / "kernel.ttgir"
    file.write_text(ttgir.replace(before, before + "tt.indirect = 1 : i32, "))
    with pytest.raises(ValueError, match=message):
        triton.compile(str(file), target=GPUTarget("cuda", 90, 32))


def test_other_backend():
    """A backend that ignores the mark would make a kernel that takes the address of the slot for that of the data."""
    fn = triton.jit(indirect_args={"a_ptr": 16})(pointwise.fn)
    source = ASTSource(fn, KERNELS["pointwise"][1] | dict(BLOCK="constexpr"), dict(BLOCK=1024))
    with pytest.raises(NotImplementedError, match="indirect kernel parameters cannot be had from the backend 'hip'"):
        triton.compile(source, target=GPUTarget("hip", "gfx942", 64))


def test_interpreter():
    with knobs.runtime.scope():
        knobs.runtime.interpret = True
        with pytest.raises(ValueError, match="indirect_args need a GPU: unset TRITON_INTERPRET"):
            triton.jit(indirect_args={"a_ptr": 16})(pointwise.fn)


@pytest.mark.parametrize("acts_on", ["reset_to_zero", "restore_value"])
def test_autotuner_leaves_slots_alone(acts_on):
    """It would clear or copy what it is passed: the slot, not the data."""
    indirect = triton.jit(indirect_args={"o_ptr": 16})(pointwise.fn)
    configs = [triton.Config(dict(BLOCK=block)) for block in (512, 1024)]
    with pytest.raises(ValueError, match="pointwise: the autotuner cannot reset or restore 'o_ptr', which is indirect"):
        triton.autotune(configs, key=["n"], **{acts_on: ["a_ptr", "o_ptr"]})(indirect)
    heuristics = triton.heuristics(dict(BLOCK=lambda args: 512))(indirect)
    with pytest.raises(ValueError, match="the autotuner cannot reset or restore 'o_ptr'"):
        triton.autotune(configs, key=["n"], **{acts_on: ["o_ptr"]})(heuristics)
    triton.autotune(configs, key=["n"], **{acts_on: ["a_ptr"]})(indirect)


LLIR = r'''
define internal float @callee(ptr addrspace(1) %0) {
  %2 = load float, ptr addrspace(1) %0
  ret float %2
}

define ptx_kernel void @"a kernel"(ptr addrspace(1) readonly captures(none) %0, ptr addrspace(1) noundef %out) #0 !dbg !4 {
entry:
    #dbg_value(ptr addrspace(1) %0, !9, !DIExpression(), !10)
  %1 = call float asm sideeffect "mov %0, $1; // \22%out\22 }", "=r,l"(ptr addrspace(1) %0)
  br label %"%0"

"%0":
  %2 = getelementptr float, ptr addrspace(1) %out, i64 1
  store float %1, ptr addrspace(1) %2
  ret void
}

attributes #0 = { nounwind memory(argmem: readwrite, inaccessiblemem: none) "nvvm.reqntid"="128" }
attributes #1 = { memory(none) }
'''


def test_rewrite_of_llvm_ir():
    """Names, strings and labels that look like the parameter stay; what was inferred of the plain kernel goes."""
    rewritten = param_indirection.rewrite(LLIR, [0, 1])
    changed = [line for line in rewritten.splitlines() if line not in LLIR.splitlines()]
    assert changed == [
        'define ptx_kernel void @"a kernel"(ptr addrspace(1) %0, ptr addrspace(1) %out) #0 !dbg !4 {',
        "  %indirect.0 = load ptr addrspace(1), ptr addrspace(1) %0, align 8, !invariant.load !{}",
        "  %indirect.1 = load ptr addrspace(1), ptr addrspace(1) %out, align 8, !invariant.load !{}",
        "    #dbg_value(ptr addrspace(1) %indirect.0, !9, !DIExpression(), !10)",
        r'  %1 = call float asm sideeffect "mov %0, $1; // \22%out\22 }", "=r,l"(ptr addrspace(1) %indirect.0)',
        "  %2 = getelementptr float, ptr addrspace(1) %indirect.1, i64 1",
        'attributes #0 = { nounwind "nvvm.reqntid"="128" }',
    ]
    lines = rewritten.splitlines()
    assert lines.index("entry:") == lines.index(changed[1]) - 1


def test_rewrite_refuses():
    with pytest.raises(RuntimeError, match="parameter 0 cannot be indirect: ptr byval"):
        param_indirection.rewrite("define ptx_kernel void @k(ptr byval([128 x i8]) align 64 %0) {\n  ret void\n}\n",
                                  [0])
    with pytest.raises(RuntimeError, match="expected one kernel in the LLVM IR, found 0"):
        param_indirection.rewrite("define void @k(ptr addrspace(1) %0) {\n  ret void\n}\n", [0])
