from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest

from pygraph_build import native, overlay, wheel
from pygraph_build.upstream import load, ROOT


SOURCE = b"""
#include <Python.h>
#include <torch/csrc/api.h>
#include "other.h"
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_replay", doc(), -1, nullptr};
PyMODINIT_FUNC PyInit__replay() { return PyModule_Create(&module); }
"""
OTHER = {
    "other.h": b"const char* doc();\n",
    "other.cpp": b'#include "other.h"\nconst char* doc() { return __FILE__; }\n',
}
(DIRECTORY, MODULE) = next(iter(native.EXTENSIONS.items()))
PATH = f"{DIRECTORY}/module.cpp"

needs_compiler = pytest.mark.skipif(native._compiler() is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pygraph"


@pytest.fixture
def torch(project):
    """A package with C++."""
    project.add_overlay(project.torch, PATH, SOURCE)
    for name, content in OTHER.items():
        project.add_overlay(project.torch, f"{DIRECTORY}/{name}", content)
    project.add_overlay(project.torch, "torch/_inductor/pygraph/__init__.py")
    return project.torch


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name.startswith(MODULE)}


@needs_compiler
def test_the_module_is_in_the_wheel(project, torch, tmp_path):
    built = wheel.build(torch, project.wheels["torch"], tmp_path / "dist")
    ((name, content),) = members(built).items()
    assert re.fullmatch(rf"{MODULE}\.cpython-\d+-.*\.so", name)
    assert str(tmp_path).encode() not in content
    assert f"{DIRECTORY}/other.cpp".encode() in content  # __FILE__


@needs_compiler
def test_two_builds_are_the_same(project, torch, tmp_path, monkeypatch):
    results = []
    for name in ("first", "second"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        results.append(wheel.build(torch, project.wheels["torch"], tmp_path / name / "dist").read_bytes())
    assert results[0] == results[1]


@needs_compiler
def test_it_is_compiled_once(project, torch, cache, tmp_path, monkeypatch):
    site = project.install(tmp_path / "site")
    first = native.extensions(torch, lambda: nullcontext(site / "torch" / "include"))
    assert len(first) == len(list(cache.iterdir())) == 1

    def no_headers():
        raise AssertionError("compiled again")

    assert native.extensions(torch, no_headers) == first
    for name, content in OTHER.items():
        project.add_overlay(torch, f"{DIRECTORY}/{name}", content + b"// changed\n")
        with pytest.raises(AssertionError, match="compiled again"):
            native.extensions(torch, no_headers)
        project.add_overlay(torch, f"{DIRECTORY}/{name}", content)
        assert native.extensions(torch, no_headers) == first


@needs_compiler
def test_an_overlay_has_it(project, torch, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(project.install(tmp_path / "site"))
    overlay.overlay_directory([torch], tmp_path / "overlay")
    (module,) = (tmp_path / "overlay" / MODULE).parent.glob("*.so")
    program = f"import sys; sys.path.insert(0, {str(module.parent)!r}); import _replay; print(_replay.__doc__)"
    environment = {"LD_LIBRARY_PATH": str(stub_libraries(tmp_path))}
    done = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout == f"{DIRECTORY}/other.cpp\n"


def stub_libraries(directory: Path) -> Path:
    """What torch would have loaded."""
    for library in native.LIBRARIES:
        command = [*native._compiler(), "-shared", "-x", "c++", "/dev/null", f"-Wl,-soname,{library}"]
        subprocess.run([*command, "-o", directory / library], check=True)
    return directory


@pytest.mark.parametrize(
    "compiler, line",
    [
        (None, "Without a C++ compiler"),
        (["no-such-compiler"], "No such file"),
        (["false"], "false failed"),
    ],
)
def test_without_a_compiler(project, torch, tmp_path, monkeypatch, caplog, compiler, line):
    monkeypatch.setattr(native, "_compiler", lambda: compiler)
    with caplog.at_level("INFO"):
        built = wheel.build(torch, project.wheels["torch"], tmp_path / "dist")
    assert members(built) == {}
    (said,) = [record.getMessage() for record in caplog.records if "left to Python" in record.getMessage()]
    assert line in said and "\n" not in said


@needs_compiler
@pytest.mark.parametrize("name, content", [("module.cpp", SOURCE), ("other.cpp", OTHER["other.cpp"])])
def test_a_source_that_does_not_compile(project, torch, tmp_path, caplog, name, content):
    project.add_overlay(torch, f"{DIRECTORY}/{name}", content + b"nonsense;\n")
    with caplog.at_level("INFO"):
        built = wheel.build(torch, project.wheels["torch"], tmp_path / "dist")
    assert members(built) == {}
    (said,) = [record.getMessage() for record in caplog.records if "left to Python" in record.getMessage()]
    assert "nonsense" in said and "\n" not in said


@needs_compiler
def test_a_wheel_from_source(project, torch, tmp_path):
    """It has the headers too; what is added is in its RECORD."""
    made = tmp_path / project.wheels["torch"].name.replace("2.11.0", torch.release)
    with zipfile.ZipFile(project.wheels["torch"]) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name.replace("2.11.0.dist-info", f"{torch.release}.dist-info"), content)
    wheel.add_extensions(torch, made)
    ((name, _),) = members(made).items()
    with zipfile.ZipFile(made) as archive:
        assert f"{name},sha256=" in archive.read(f"torch-{torch.release}.dist-info/RECORD").decode()


@needs_compiler
def test_this_repository_over_the_installed_torch(tmp_path, monkeypatch):
    """It is imported where torch was imported first, and by a torch that it fits."""
    # scripts/test has compiled it.
    monkeypatch.delenv("XDG_CACHE_HOME")
    subprocess.run([sys.executable, ROOT / "scripts" / "overlay", tmp_path / "overlay"], check=True)
    program = "import torch\nfrom torch._inductor.pygraph import native\nprint(native.compiled.__name__)"
    environment = {"PYTHONPATH": str(tmp_path / "overlay"), "LD_BIND_NOW": "1", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout == "torch._inductor.pygraph._replay\n"
    assert set(native.EXTENSIONS) == {
        str(file.parent.relative_to(load()["torch"].overlay)) for file in load()["torch"].overlay.rglob("*.cpp")
    }
