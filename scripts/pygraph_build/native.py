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
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

from .upstream import cache_directory, Upstream


log = logging.getLogger(__name__)

# Directory of sources in the overlay -> module in the wheel, without the suffix of a Python version.
EXTENSIONS = {"torch/csrc/inductor/pygraph": "torch/_inductor/pygraph/_replay"}

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
    if not upstream.takes_overlay:
        return built
    for directory, module in EXTENSIONS.items():
        sources = sorted((upstream.overlay / directory).glob("*.cpp"))
        if not sources:
            continue
        compiler = _compiler()
        if compiler is None:
            log.info("Without a C++ compiler %s is left to Python, which is slower", module)
            continue
        cached = cache_directory() / f"{Path(module).name}-{_key(upstream, sources[0].parent, compiler)}.so"
        if not cached.exists():
            log.info("Compiling %s", directory)
            with headers() as include:
                failure = _compile(compiler, sources, directory, include, cached)
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


def _key(upstream: Upstream, directory: Path, compiler: list[str]) -> str:
    """Of all that the result depends on; the version of upstream stands for its headers."""
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True).stdout
    except OSError:
        version = b""
    parts = (upstream.version, sysconfig.get_config_var("EXT_SUFFIX"), *FLAGS, *LINK_FLAGS, *LIBRARIES)
    key = hashlib.sha256("\n".join(parts).encode() + version)
    for file in sorted([*directory.glob("*.cpp"), *directory.glob("*.h")]):
        key.update(f"\n{file.name} {file.stat().st_size}\n".encode() + file.read_bytes())
    return key.hexdigest()[:16]


def _compile(compiler: list[str], sources: list[Path], name: str, include: Path, target: Path) -> str | None:
    """Writes ``target``, or returns why it could not.

    Args:
        name: of the directory of the sources, in the result
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    python = sysconfig.get_path("include")
    if not Path(python, "Python.h").exists():
        return f"{python} has no Python.h"
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        # No path of this machine goes into the file.
        maps = [
            f"-ffile-prefix-map={old}={new}"
            for old, new in (
                (sources[0].parent, name),
                (include, "torch/include"),
                (python, "python"),
                (scratch, "."),
            )
        ]
        includes = [f"-I{include}", f"-I{python}"]
        objects = [f"{scratch}/{source.stem}.o" for source in sources]
        compile_commands = [
            # Only the names of the libraries are needed: those that are loaded define the symbols.
            *(
                ["-shared", "-fPIC", f"-Wl,-soname,{library}", "-x", "c++", os.devnull, "-o", f"{scratch}/{library}"]
                for library in LIBRARIES
            ),
            *([*FLAGS, *maps, *includes, "-c", str(source), "-o", file] for source, file in zip(sources, objects)),
        ]
        link = [*LINK_FLAGS, "-o", f"{scratch}/module.so", *objects, *(f"{scratch}/{library}" for library in LIBRARIES)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            failures = [*pool.map(lambda command: _run([*compiler, *command]), compile_commands)]
        failure = next(filter(None, failures), None) or _run([*compiler, *link])
        if failure is not None:
            return failure
        os.replace(f"{scratch}/module.so", target)
    return None


def _run(command: list[str]) -> str | None:
    """Why the command failed, in one line, or None."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return None
    lines = done.stderr.splitlines()
    return next((line for line in lines if "error" in line), f"{command[0]} failed")
