"""
The pass of the source tree, compiled against a packaged LLVM and MLIR: its lit test, and the kernels it gives next to
those of the rewrite that serves where libtriton was built without it.

Needs LLVM 22, as Triton 3.6.0 does, with headers and tools of MLIR: packages llvm-22-dev, libmlir-22-dev and
mlir-22-tools, or LLVM_SYSPATH=DIRECTORY, which Triton's own build takes too. Skipped without.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import triton
from triton._C.libtriton import ir, llvm, passes
from triton.backends.nvidia import param_indirection

from pygraph_build import upstream
from pygraph_build.series import read_series
from pygraph_build.upstream import ROOT


LLVM = Path(os.environ.get("LLVM_SYSPATH", "/usr/lib/llvm-22"))
OPT, TABLEGEN, TRANSLATE = (LLVM / "bin" / name for name in ("mlir-opt", "mlir-tblgen", "mlir-translate"))
OVERLAY = ROOT / "triton_overlay"
PASS = "triton-llvm-param-indirection"

pytestmark = pytest.mark.skipif(
    not all(path.exists() for path in (OPT, TABLEGEN, TRANSLATE, LLVM / "include" / "mlir")) or shutil.which("c++") is None,
    reason="needs a C++ compiler, and LLVM 22 with MLIR in LLVM_SYSPATH",
)

# What upstream's Passes.h does with the file that is generated from Passes.td.
HEADER = """
#pragma once
#include "mlir/Pass/Pass.h"
namespace mlir {
#define GEN_PASS_DECL
#include "triton/Target/LLVMIR/Passes.h.inc"
#define GEN_PASS_REGISTRATION
#include "triton/Target/LLVMIR/Passes.h.inc"
}
"""

PLUGIN = """
#include "mlir/Tools/Plugins/PassPlugin.h"
#include "triton/Target/LLVMIR/Passes.h"
extern "C" ::mlir::PassPluginLibraryInfo mlirGetPassPluginInfo() {
  return {MLIR_PLUGIN_API_VERSION, "TritonLLVMIR", "1", mlir::registerLLVMParamIndirection};
}
"""


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kernels = load(OVERLAY / "python" / "test" / "unit" / "language" / "test_indirect_args.py")


# Their LLVM dialect is printed in a form that LLVM 22 does not read.
WARP_SPECIALIZED = [name for name in kernels.KERNELS if name.startswith("warp_specialized")]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory) -> Path:
    """A plugin for mlir-opt with the pass, from the overlay's source and the patch's entry in Passes.td."""
    build = tmp_path_factory.mktemp("pass")
    include = build / "triton" / "Target" / "LLVMIR"
    include.mkdir(parents=True)
    changes = {change.path: change for change in read_series(upstream.load()["triton"])}
    hunks = changes["include/triton/Target/LLVMIR/Passes.td"].hunks.decode()
    patched = "\n".join(line[1:] for line in hunks.splitlines() if line[:1] in " +")
    entry = re.search(r"^def LLVMParamIndirection\b.*?^}", patched, re.MULTILINE | re.DOTALL)[0]
    (include / "Passes.td").write_text(f'include "mlir/Pass/PassBase.td"\n{entry}\n')
    (include / "Passes.h").write_text(HEADER)
    (build / "plugin.cpp").write_text(PLUGIN)
    generate = [TABLEGEN, "-gen-pass-decls", "-name", "LLVMIR", "-I", LLVM / "include", include / "Passes.td"]
    subprocess.run([*generate, "-o", include / "Passes.h.inc"], check=True)
    flags = ["-std=c++17", "-shared", "-fPIC", "-fno-rtti", "-fno-exceptions", "-Wall", "-I", build]
    flags += ["-isystem", LLVM / "include"]
    sources = [build / "plugin.cpp", OVERLAY / "lib" / "Target" / "LLVMIR" / "LLVMParamIndirection.cpp"]
    library = build / "plugin.so"
    compiler = ["c++", *flags, *sources, "-o", library]
    done = subprocess.run(compiler, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    return library


def mlir_opt(plugin: Path, *arguments) -> list:
    return [OPT, f"--load-pass-plugin={plugin}", f"--pass-pipeline=builtin.module({PASS})", *arguments]


def test_lit(plugin):
    file = OVERLAY / "test" / "LLVMIR" / "param-indirection.mlir"
    command = re.match(rf"// RUN: triton-opt %s -{PASS} (.*) \| FileCheck %s\n", file.read_text())[1].split()
    done = subprocess.run(mlir_opt(plugin, *command, file), stdout=subprocess.PIPE, check=True)
    subprocess.run([Path(triton.__file__).with_name("FileCheck"), file], input=done.stdout, check=True)


def normalized(llir: str) -> str:
    """LLVM IR up to the names of values, and where in the source it is from."""
    llir = re.sub(r", !dbg !\d+| !dbg !\d+", "", llir)
    llir = re.sub(r"^!.*\n", "", llir, flags=re.MULTILINE)
    llir = re.sub(r"!invariant\.load !(\d+|\{\})", "!invariant.load", llir)
    functions = []
    for function in re.split(r"(?=^define )", llir, flags=re.MULTILINE):
        names: dict[str, str] = {}
        blocks = re.sub(r"^(\d+):.*$", r"%\1:", re.sub(r"; preds = .*", "", function), flags=re.MULTILINE)
        rename = lambda match: match[0] if match[0][0] == '"' else names.setdefault(match[0], f"%v{len(names)}")  # noqa: B023
        functions.append(re.sub(r'"[^"]*"|%[-\w$.]+', rename, blocks))
    return "\n".join(line.rstrip() for line in "".join(functions).splitlines() if line.strip())


@pytest.mark.parametrize("name", [name for name in kernels.KERNELS if name not in WARP_SPECIALIZED])
def test_both_forms(plugin, tmp_path, monkeypatch, name):
    """Triton compiles what the pass made of its LLVM dialect, as it would if it had the pass."""
    fn, signature, constexprs, options, arch = kernels.KERNELS[name]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    to_module, before, after = llvm.to_module, [], []

    def rewritten(module, context):
        result = to_module(module, context)
        positions = [position for position, _ in python_form.metadata.indirect_params]
        before.append(param_indirection.rewrite(str(result), positions))
        dialect = tmp_path / "kernel.mlir"
        dialect.write_text(str(module))
        done = tmp_path / "loaded.mlir"
        subprocess.run(mlir_opt(plugin, "--mlir-print-debuginfo", dialect, "-o", done), check=True)
        loaded = ir.parse_mlir_module(str(done), module.context)
        after.append((loaded, to_module(loaded, context)))
        return after[0][1]

    python_form = kernels.compiled(fn, signature, constexprs, options, arch, indirect=kernels.pointers(signature))
    monkeypatch.setattr(passes.llvmir, "add_param_indirection", lambda pm: None, raising=False)
    monkeypatch.setattr(llvm, "to_module", rewritten)
    cxx_form = kernels.compiled(fn, signature, constexprs, options, arch, indirect=kernels.pointers(signature))

    # The same program, before LLVM optimizes it.
    module, optimized = after[0]
    assert normalized(str(to_module(module, llvm.context()))) == normalized(before[0])
    # The same kernel for who launches it, and for memory.
    assert cxx_form.metadata.indirect_params == python_form.metadata.indirect_params
    ptx = cxx_form.asm["ptx"]
    assert kernels.loaded_slots(ptx) == kernels.loaded_slots(python_form.asm["ptx"])
    assert kernels.memory_operations(ptx) == kernels.memory_operations(python_form.asm["ptx"])
    registers, spilled = kernels.resources(cxx_form)
    print(f"\n{name}: {kernels.resources(python_form)[0]} registers, {registers} by the pass")
    assert spilled == 0


@pytest.mark.parametrize("name", WARP_SPECIALIZED)
def test_both_forms_of_llvm_ir(plugin, tmp_path, monkeypatch, name):
    """The two on LLVM IR, which for the pass is taken to the LLVM dialect and back."""
    fn, signature, constexprs, options, arch = kernels.KERNELS[name]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    to_module, programs = llvm.to_module, []

    def recorded(module, context):
        result = to_module(module, context)
        programs.append(str(result))
        return result

    monkeypatch.setattr(llvm, "to_module", recorded)
    kernels.compiled(fn, signature, constexprs, options, arch)

    def translated(text: str, flag: str) -> str:
        command = [TRANSLATE, flag, "-"]
        return subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=True).stdout

    pointers = range(len(kernels.pointers(signature)))
    expected = translated(param_indirection.rewrite(programs[0], list(pointers)), "--import-llvm")
    dialect = translated(programs[0], "--import-llvm")
    kernel = re.search(r"llvm\.func ptx_kernelcc .*", dialect)[0]
    marked = kernel
    for index in pointers:
        marked = marked.replace(f"%arg{index}: !llvm.ptr<1>", f"%arg{index}: !llvm.ptr<1> {{tt.indirect = 1 : i32}}")
    command = mlir_opt(plugin, "--mlir-print-debuginfo", "-")
    dialect = dialect.replace(kernel, marked)
    loaded = subprocess.run(command, input=dialect, stdout=subprocess.PIPE, text=True, check=True).stdout
    made, expected = (normalized(translated(text, "--mlir-to-llvmir")) for text in (loaded, expected))
    assert made.count("!invariant.load") == len(pointers)
    assert made == expected
