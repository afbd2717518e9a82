"""The overlay's C++ -> extension modules.

They are compiled against upstream's headers with the system's compiler, and need neither its build nor a
CUDA toolkit. Where there is no compiler, the package works without them: each has a way in Python too.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from .upstream import cache_directory, Upstream


log = logging.getLogger(__name__)

# Source in the overlay -> module in the wheel, without the suffix of a Python version.
EXTENSIONS = {"torch/csrc/inductor/pygraph/replay.cpp": "torch/_inductor/pygraph/_replay"}

# torch has loaded them before it loads an extension, and the loader finds them by name.
LIBRARIES = ("libtorch_python.so", "libtorch_cuda.so", "libtorch_cpu.so", "libc10.so")

FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-D_GLIBCXX_USE_CXX11_ABI=1")
LINK_FLAGS = ("-shared", "-s", "-Wl,--no-as-needed")


def extensions(upstream: Upstream, headers: Callable[[], AbstractContextManager[Path]]) -> dict[str, bytes]:
    """Module files of the package for the running Python: path in the wheel -> content. Those that
    cannot be compiled are left out, with a line that says why.

    ``headers`` gives the directory of upstream's headers, if something has to be compiled.
    """
    built = {}
    for source, module in EXTENSIONS.items():
        file = upstream.overlay / source
        if not file.exists():
            continue
        compiler = _compiler()
        if compiler is None:
            log.info("Without a C++ compiler %s is left to Python, which is slower", module)
            continue
        cached = cache_directory() / f"{Path(module).name}-{_key(upstream, file, compiler)}.so"
        if not cached.exists():
            log.info("Compiling %s", source)
            with headers() as include:
                failure = _compile(compiler, file, source, include, cached)
            if failure is not None:
                log.info("%s is left to Python, which is slower: %s", module, failure)
                continue
        built[module + sysconfig.get_config_var("EXT_SUFFIX")] = cached.read_bytes()
    return built


def _compiler() -> list[str] | None:
    if "CXX" in os.environ:
        return shlex.split(os.environ["CXX"])
    found = next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    return None if found is None else [found]


def _key(upstream: Upstream, file: Path, compiler: list[str]) -> str:
    """Of all that the result depends on; the version of upstream stands for its headers."""
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True).stdout
    except OSError:
        version = b""
    parts = (upstream.version, sysconfig.get_config_var("EXT_SUFFIX"), *FLAGS, *LINK_FLAGS, *LIBRARIES)
    return hashlib.sha256("\n".join(parts).encode() + version + file.read_bytes()).hexdigest()[:16]


def _compile(compiler: list[str], file: Path, name: str, include: Path, target: Path) -> str | None:
    """Writes ``target``, or returns why it could not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    python = sysconfig.get_path("include")
    if not Path(python, "Python.h").exists():
        return f"{python} has no Python.h"
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        # No path of this machine goes into the file.
        maps = [
            f"-ffile-prefix-map={old}={new}"
            for old, new in ((file, name), (include, "torch/include"), (python, "python"), (scratch, "."))
        ]
        includes = [f"-I{include}", f"-I{python}"]
        commands = [
            # Only the names of the libraries are needed: those that are loaded define the symbols.
            *(
                ["-shared", "-fPIC", f"-Wl,-soname,{library}", "-x", "c++", os.devnull, "-o", f"{scratch}/{library}"]
                for library in LIBRARIES
            ),
            [*FLAGS, *maps, *includes, "-c", str(file), "-o", f"{scratch}/module.o"],
            [
                *LINK_FLAGS,
                *("-o", f"{scratch}/module.so", f"{scratch}/module.o"),
                *(f"{scratch}/{library}" for library in LIBRARIES),
            ],
        ]
        for command in commands:
            try:
                done = subprocess.run([*compiler, *command], capture_output=True, text=True, errors="replace")
            except OSError as error:
                return str(error)
            if done.returncode != 0:
                lines = done.stderr.splitlines()
                return next((line for line in lines if "error" in line), f"{compiler[0]} failed")
        os.replace(f"{scratch}/module.so", target)
    return None
