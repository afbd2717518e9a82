"""A kernel that declares nothing is, byte for byte, the one that stock Triton makes of it, under the same key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import triton

from pygraph_build.overlay import MARK


SITE = Path(sysconfig.get_paths()["purelib"])
KERNELS = """
import hashlib, json, sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

@triton.jit
def pointwise(a, b, o, n, BLOCK: tl.constexpr):
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o + x, tl.load(a + x, x < n) + tl.load(b + x, x < n), x < n)

@triton.jit
def rows(a, o, n, BM: tl.constexpr, BN: tl.constexpr):
    block = tl.make_block_ptr(a, (n, n), (n, 1), (tl.program_id(0) * BM, 0), (BM, BN), (1, 0))
    tl.store(o + tl.program_id(0) * BM + tl.arange(0, BM), tl.sum(tl.load(block, boundary_check=(0, 1)), 1))

@triton.jit
def tiles(a, b, o, n, BLOCK: tl.constexpr):
    a_desc = tl.make_tensor_descriptor(a, [n, n], [n, 1], [BLOCK, BLOCK])
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, n, BLOCK):
        acc = tl.dot(a_desc.load([0, k]), b.load([0, k]).T, acc)
    tl.atomic_add(o + tl.arange(0, BLOCK)[:, None] * n + tl.arange(0, BLOCK)[None, :], acc)

cases = [
    (pointwise, dict(a="*fp32", b="*bf16", o="*fp32", n="i32"), dict(BLOCK=1024), 90),
    (pointwise, dict(a="*kfp32", b="*fp32", o="*fp32", n="i32"), dict(BLOCK=512), 80),
    (rows, dict(a="*fp16", o="*fp32", n="i32"), dict(BM=32, BN=64), 100),
    (tiles, dict(a="*fp16", b="tensordesc<fp16[64,64]>", o="*fp32", n="i32"), dict(BLOCK=64), 90),
]
made = []
for fn, signature, constexprs, arch in cases:
    signature = {name: signature.get(name, "constexpr") for name in fn.arg_names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, ty in enumerate(signature.values()) if ty[0] in "*i"}
    source = ASTSource(fn, signature, constexprs, attrs)
    target = GPUTarget("cuda", arch, 32)
    kernel = triton.compile(source, target=target)
    # The hash is also of Triton's own sources, and names of files are of where Triton lies.
    home = triton.__path__[0]
    metadata = {k: str(v).replace(home, "") for k, v in kernel.metadata._asdict().items() if k != "hash"}
    asm = {ir: kernel.asm[ir].replace(home, "") for ir in ("ttir", "ttgir", "llir", "ptx")}
    asm["cubin"] = hashlib.sha256(kernel.asm["cubin"]).hexdigest()
    options = make_backend(target).parse_options({}).hash()
    made.append([fn.__name__, fn.cache_key, source.hash(), options, metadata, asm])
json.dump([triton.__file__, made], sys.stdout)
"""


def kernels(script: Path, cache: Path, path: str) -> tuple[Path, list]:
    env = {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache), "TRITON_DISABLE_LINE_INFO": "1"}
    done = subprocess.run([sys.executable, script], env=os.environ | env, stdout=subprocess.PIPE, check=True)
    file, made = json.loads(done.stdout)
    return Path(file), made


def test_plain_kernels(tmp_path):
    if Path(triton.__file__).is_relative_to(SITE) or (SITE / MARK).exists():
        pytest.skip("needs stock Triton installed, and PyGraph's laid over it in another directory")
    script = tmp_path / "kernels.py"
    script.write_text(KERNELS)
    stock_file, stock = kernels(script, tmp_path / "stock", "")
    file, ours = kernels(script, tmp_path / "ours", os.environ["PYTHONPATH"])
    assert stock_file.is_relative_to(SITE)
    assert not file.is_relative_to(SITE)
    assert ours == stock
