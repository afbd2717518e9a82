from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from pygraph_build import series, upstream, wheel
from pygraph_build.upstream import BuildError, ROOT


UPSTREAMS = upstream.load()


def raw(path: Path, name: str) -> bytes:
    """The member as it is compressed."""
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(name)
    content = path.read_bytes()[info.header_offset :]
    start = 30 + int.from_bytes(content[26:28], "little") + int.from_bytes(content[28:30], "little")
    return content[start : start + info.compress_size]


def check_record(path: Path) -> None:
    """RECORD names every file, with its hash and size."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        files = {info.filename for info in archive.infolist() if not info.is_dir()}
        (record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
        rows = {name: rest for name, *rest in csv.reader(io.StringIO(archive.read(record).decode()))}
        assert rows.keys() == files
        assert rows.pop(record) == ["", ""]
        for name, (digest, size) in rows.items():
            content = archive.read(name)
            sha256 = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            assert (digest, size) == (f"sha256={sha256}", str(len(content))), name


def test_the_patched_wheel(project, tmp_path):
    project.add_patch(
        project.torch,
        "Record",
        {"torch/_inductor/cudagraph_trees.py": b"patched = 1\n", "torch/_inductor/old.py": None},
    )
    project.add_overlay(project.torch, "torch/_inductor/pygraph/__init__.py")
    project.add_overlay(project.torch, "test/inductor/test_pygraph.py")
    old = project.wheels["torch"]
    new = wheel.build(project.torch, old, tmp_path / "dist")

    assert new.name == old.name.replace("2.11.0", "2.11.0+pygraph.1")
    check_record(new)
    with zipfile.ZipFile(old) as before, zipfile.ZipFile(new) as after:
        names = {name.replace("2.11.0.dist-info", "2.11.0+pygraph.1.dist-info") for name in before.namelist()}
        added = {"torch/_inductor/pygraph/__init__.py"}
        assert set(after.namelist()) == names - {"torch/_inductor/old.py"} | added
        assert after.read("torch/_inductor/cudagraph_trees.py") == b"patched = 1\n"
        assert b"'2.11.0+pygraph.1'" in after.read("torch/version.py")
        metadata = after.read("torch-2.11.0+pygraph.1.dist-info/METADATA").decode()
        assert after.getinfo("torch/bin/torch_shm_manager").external_attr >> 16 == 0o100755
    assert metadata.splitlines()[2:5] == [
        "Version: 2.11.0+pygraph.1",
        "Requires-Dist: filelock",
        'Requires-Dist: triton==3.6.0+pygraph.1; platform_system == "Linux"',
    ]
    assert metadata.endswith("\nVersion: 2.11.0 of the description\n")
    for name in ("torch/lib/libtorch.so", "torch/__init__.py"):
        assert raw(new, name) == raw(old, name)


class Stream:
    """A file that cannot go back, so that zipfile puts sizes behind the data, as streaming tools do."""

    def __init__(self) -> None:
        self.content = b""

    def write(self, content: bytes) -> int:
        self.content += content
        return len(content)

    def flush(self) -> None: ...


def test_a_wheel_that_was_streamed(project, tmp_path):
    stream = Stream()
    with zipfile.ZipFile(project.wheels["torch"]) as before, zipfile.ZipFile(stream, "w") as after:
        for info in before.infolist():
            after.writestr(info.filename, before.read(info), zipfile.ZIP_DEFLATED)
            assert info.is_dir() or after.getinfo(info.filename).flag_bits & 0x08
    streamed = tmp_path / project.wheels["torch"].name
    streamed.write_bytes(stream.content)
    project.torch.wheels[streamed.name] = hashlib.sha256(stream.content).hexdigest()
    check_record(wheel.build(project.torch, streamed, tmp_path / "dist"))


def test_two_builds_are_the_same(project, tmp_path):
    project.add_overlay(project.torch, "torch/_inductor/pygraph/__init__.py")
    first = wheel.build(project.torch, project.wheels["torch"], tmp_path / "first")
    os.utime(project.torch.overlay / "torch/_inductor/pygraph/__init__.py", (0, 0))
    second = wheel.build(project.torch, project.wheels["torch"], tmp_path / "second")
    assert first.read_bytes() == second.read_bytes()


def test_a_wheel_of_another_version_is_refused(project, tmp_path):
    other = project.wheels["torch"].rename(tmp_path / "torch-2.12.0-cp311-cp311-manylinux_2_28_x86_64.whl")
    with pytest.raises(BuildError, match="torch-2.12.0.* is not a wheel that PyGraph is built on"):
        wheel.build(project.torch, other, tmp_path / "dist")
    assert not (tmp_path / "dist").exists()


def test_a_wheel_with_other_content_is_refused(project, tmp_path):
    with project.wheels["torch"].open("ab") as file:
        file.write(b"more")
    with pytest.raises(BuildError, match="has sha256 .* not the pinned one"):
        wheel.build(project.torch, project.wheels["torch"], tmp_path / "dist")
    assert not (tmp_path / "dist").exists()


def test_nothing_is_written_when_a_patch_does_not_apply(project, tmp_path):
    project.add_patch(project.torch, "Old", {"torch/_inductor/old.py": b"used = True\n"})
    patch = project.torch.patches / "core" / "Old.patch"
    patch.write_text(patch.read_text().replace("+used", "+abused"))
    with pytest.raises(BuildError, match=r"Old\.patch is damaged"):
        wheel.build(project.torch, project.wheels["torch"], tmp_path / "dist")
    assert not (tmp_path / "dist").exists()


def test_a_python_without_wheel(project, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "s390x")
    with pytest.raises(BuildError, match=r"no pinned wheel for cp3\d+ on linux s390x: use CPython on Linux"):
        wheel.fetch(project.torch)


def test_what_was_fetched_is_used_again(project, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(project.root))
    fetched = wheel.fetch(project.torch)
    assert fetched.read_bytes() == project.wheels["torch"].read_bytes()
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert wheel.fetch(project.torch) == fetched
    with pytest.raises(BuildError, match="pip could not fetch triton-3.6.0"):
        wheel.fetch(project.triton)
    assert list((tmp_path / "pygraph").iterdir()) == [fetched]


def test_an_index_with_other_content_is_refused(project, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(project.root))
    name = project.wheels["torch"].name
    project.torch.wheels[name] = "0" * 64
    with pytest.raises(BuildError, match="not the pinned one"):
        wheel.fetch(project.torch)
    assert list((tmp_path / "pygraph").iterdir()) == []


def test_every_supported_python_is_pinned():
    for package in UPSTREAMS.values():
        for python in ("cp310", "cp311", "cp312", "cp313"):
            for machine in ("x86_64", "aarch64"):
                names = [name for name in package.wheels if f"-{python}-{python}-" in name and machine in name]
                assert len(names) == 1


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """This repository's wheels, by scripts/build."""
    build = [sys.executable, ROOT / "scripts" / "build"]
    output = subprocess.run(build, check=True, stdout=subprocess.PIPE, text=True).stdout
    return {path.name.partition("-")[0]: path for path in map(Path, output.split())}


@pytest.mark.parametrize(
    "package, pinned",
    [
        (UPSTREAMS["torch"], ['Requires-Dist: triton==3.6.0+pygraph.1; platform_system == "Linux"']),
        (UPSTREAMS["triton"], []),
    ],
    ids=["torch", "triton"],
)
def test_the_wheels_of_this_repository(package, pinned, built):
    check_record(built[package.name])
    with zipfile.ZipFile(wheel.fetch(package)) as before, zipfile.ZipFile(built[package.name]) as after:
        old = {info.filename: info.CRC for info in before.infolist()}
        new = {info.filename: info.CRC for info in after.infolist()}
        requirements = after.read(f"{package.name}-{package.release}.dist-info/METADATA").decode()
    assert [line for line in requirements.splitlines() if line.startswith("Requires-Dist: triton")] == pinned
    dist_info, ours = (f"{package.name}-{version}.dist-info/" for version in (package.version, package.release))
    licenses = [name for name in old if name.startswith(f"{dist_info}licenses/")]
    assert licenses
    for name in licenses:
        assert new[name.replace(dist_info, ours)] == old[name]
    changed = {name for name in old.keys() & new.keys() if old[name] != new[name]}
    in_patches = {package.to_wheel(change.path) for change in series.read_series(package)}
    assert changed <= in_patches | {"torch/version.py"}


@pytest.mark.parametrize("package", UPSTREAMS.values(), ids=list(UPSTREAMS))
def test_pip_wheel_makes_the_same_bytes(package, built, tmp_path):
    environment = os.environ | {"PYGRAPH_PACKAGE": package.name}
    pip = [sys.executable, "-m", "pip", "wheel", "--wheel-dir", tmp_path, ROOT]
    subprocess.run(pip, check=True, env=environment)
    (made,) = tmp_path.iterdir()
    assert made.name == built[package.name].name
    assert made.read_bytes() == built[package.name].read_bytes()


def test_both_install_together(built, tmp_path):
    """In a fresh environment that finds their other requirements in the one that runs the tests."""
    venv.create(tmp_path, with_pip=True)
    (site,) = (tmp_path / "lib").glob("python*/site-packages")
    (tested,) = (path for path in sys.path if Path(path, "torch-2.11.0.dist-info").exists())
    Path(site, "tested.pth").write_text(f"{tested}\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = {"cwd": tmp_path, "env": environment, "check": True, "capture_output": True, "text": True}
    python = tmp_path / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--no-deps", "--no-compile", *built.values()], **run)
    checked = subprocess.run([python, "-m", "pip", "check"], **run)
    assert checked.stdout == "No broken requirements found.\n"
    program = "import torch, triton; print(torch.__version__, torch.__file__, triton.__file__)"
    shown = subprocess.run([python, "-c", program], **run).stdout.split()
    assert shown == [UPSTREAMS["torch"].release, f"{site}/torch/__init__.py", f"{site}/triton/__init__.py"]


def test_setup_py_reports_one_line(tmp_path):
    environment = os.environ | {"PYGRAPH_PACKAGE": "numpy"}
    setup = [sys.executable, "setup.py", "bdist_wheel", "--dist-dir", tmp_path]
    done = subprocess.run(setup, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr == "error: PYGRAPH_PACKAGE is 'numpy', it must be one of torch, triton\n"
