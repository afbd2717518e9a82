from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pygraph_build import overlay, upstream
from pygraph_build.upstream import BuildError, ROOT


@pytest.fixture
def site(project, tmp_path, monkeypatch):
    """Where upstream's packages are installed; files share their content with another name, as uv installs them."""
    project.add_patch(
        project.torch,
        "Record",
        {"torch/_inductor/cudagraph_trees.py": b"patched = 1\n", "torch/_inductor/old.py": None},
    )
    project.add_patch(project.triton, "Launch", {"third_party/nvidia/backend/driver.c": b"int launch(int);\n"})
    project.add_overlay(project.torch, "torch/_inductor/pygraph/__init__.py")
    site = project.install(tmp_path / "site")
    shutil.copytree(site, tmp_path / "cache", copy_function=os.link)
    monkeypatch.syspath_prepend(site)
    return site


def contents(directory: Path) -> dict[str, bytes]:
    return {str(f.relative_to(directory)): f.read_bytes() for f in sorted(directory.rglob("*")) if f.is_file()}


def both(project):
    return [project.torch, project.triton]


def check_patched(root: Path) -> None:
    assert (root / "torch/_inductor/cudagraph_trees.py").read_bytes() == b"patched = 1\n"
    assert (root / "torch/_inductor/pygraph/__init__.py").exists()
    assert not (root / "torch/_inductor/old.py").exists()
    assert b"'2.11.0+pygraph.1'" in (root / "torch/version.py").read_bytes()
    assert (root / "triton/backends/nvidia/driver.c").read_bytes() == b"int launch(int);\n"
    assert (root / "torch/lib/libtorch.so").stat().st_size == 2**21


def test_a_directory(project, site, tmp_path):
    before = contents(site)
    directory = tmp_path / "new" / "overlay"
    overlay.overlay_directory(both(project), directory)
    check_patched(directory)
    assert contents(site) == before
    assert (directory / "torch/lib").is_symlink() and not (directory / "torch/__init__.py").is_symlink()
    assert not (directory / "functorch").exists()


def test_a_directory_is_made_anew(project, site, tmp_path):
    directory = tmp_path / "overlay"
    overlay.overlay_directory(both(project), directory)
    shutil.rmtree(project.torch.overlay / "torch")
    overlay.overlay_directory(both(project), directory)
    assert not (directory / "torch/_inductor/pygraph").exists()


def test_changes_among_libraries_stay_in_the_directory(project, site, tmp_path):
    """A directory without Python is linked as a whole, unless something in it changes."""
    shutil.move(site / "triton/backends/nvidia/compiler.py", site / "triton/compiler.py")
    before = contents(site)
    overlay.overlay_directory(both(project), tmp_path / "overlay")
    check_patched(tmp_path / "overlay")
    assert contents(site) == before


def test_a_directory_of_something_else_is_kept(project, site, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(BuildError, match="not empty and no overlay"):
        overlay.overlay_directory(both(project), tmp_path / "mine")
    assert contents(tmp_path / "mine") == {"file": b""}


def test_in_place_and_back(project, site, tmp_path):
    before = contents(site)
    overlay.overlay_in_place(both(project))
    check_patched(site)
    assert contents(tmp_path / "cache") == before
    overlay.overlay_in_place(both(project))  # again, as after an edit
    check_patched(site)
    (site / "torch/_inductor/pygraph/__pycache__").mkdir()
    (site / "torch/_inductor/pygraph/__pycache__/__init__.pyc").touch()
    overlay.revert(both(project))
    assert contents(site) == before
    assert not (site / "torch/_inductor/pygraph").exists()
    overlay.revert(both(project))
    assert contents(site) == before


def test_a_directory_over_an_overlay_in_place_is_refused(project, site, tmp_path):
    overlay.overlay_in_place(both(project))
    with pytest.raises(BuildError, match="has an overlay in place: take it back with --revert"):
        overlay.overlay_directory(both(project), tmp_path / "overlay")
    check_patched(site)


def test_a_revert_that_was_interrupted_goes_on(project, site, monkeypatch):
    before = contents(site)
    overlay.overlay_in_place(both(project))
    replace, replaced = os.replace, []

    def interrupted(*paths):
        if replaced:
            raise KeyboardInterrupt
        replaced.append(paths)
        replace(*paths)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        overlay.revert(both(project))
    monkeypatch.undo()
    monkeypatch.syspath_prepend(site)
    shutil.rmtree(site / "torch/_inductor/pygraph")
    overlay.revert(both(project))
    assert contents(site) == before


@pytest.mark.parametrize("in_place", [True, False])
def test_nothing_changes_when_a_patch_does_not_apply(project, site, tmp_path, in_place):
    (site / "triton/backends/nvidia/driver.c").write_bytes(b"edited")
    before = contents(site)
    with pytest.raises(BuildError, match=r"Launch\.patch does not apply: third_party/nvidia/backend/driver\.c"):
        if in_place:
            overlay.overlay_in_place(both(project))
        else:
            overlay.overlay_directory(both(project), tmp_path / "overlay")
    assert contents(site) == before
    assert not (tmp_path / "overlay").exists()


@pytest.mark.parametrize("version", ["2.12.0", "2.11.0+pygraph.1"])
def test_another_version_is_refused(project, site, tmp_path, version):
    metadata = site / "torch-2.11.0.dist-info/METADATA"
    metadata.write_text(metadata.read_text().replace("2.11.0", version, 1))
    with pytest.raises(BuildError, match=f"needs upstream's torch 2.11.0, installed is {re.escape(version)}"):
        overlay.overlay_directory(both(project), tmp_path / "overlay")


def test_a_local_label_of_upstream_is_accepted(project, site, tmp_path):
    metadata = site / "torch-2.11.0.dist-info/METADATA"
    metadata.write_text(metadata.read_text().replace("2.11.0", "2.11.0+cu130", 1))
    overlay.overlay_directory(both(project), tmp_path / "overlay")
    check_patched(tmp_path / "overlay")


def test_a_package_that_nothing_changes_may_be_missing(project, tmp_path, monkeypatch):
    project.add_overlay(project.torch, "torch/_inductor/pygraph/__init__.py")
    site = project.install(tmp_path / "site")
    shutil.rmtree(site / "triton-3.6.0.dist-info")
    monkeypatch.setattr(sys, "path", [str(site)])
    overlay.overlay_directory(both(project), tmp_path / "overlay")
    assert not (tmp_path / "overlay" / "triton").exists()


def test_without_the_package(project, site, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(BuildError, match=r"torch 2\.11\.0 is not installed"):
        overlay.overlay_directory(both(project), tmp_path / "overlay")


def test_this_repository_over_the_installed_torch(tmp_path):
    directory = tmp_path / "overlay"
    subprocess.run([sys.executable, ROOT / "scripts" / "overlay", directory], check=True)
    program = "import torch; print(torch.__version__, torch.__file__, torch.backends.cudnn.version() or 0)"
    environment = os.environ | {"PYTHONPATH": str(directory)}
    run = {"cwd": tmp_path, "env": environment, "check": True, "capture_output": True, "text": True}
    version, file, cudnn = subprocess.run([sys.executable, "-c", program], **run).stdout.split()
    assert version == upstream.load()["torch"].release
    assert file == f"{directory}/torch/__init__.py"
    assert int(cudnn) > 0  # its libraries were found in the installation


@pytest.mark.parametrize("arguments", [[], ["--in-place", "--revert"], ["directory", "--revert"]])
def test_one_thing_at_a_time(arguments):
    done = subprocess.run([sys.executable, ROOT / "scripts" / "overlay", *arguments], capture_output=True, text=True)
    assert done.returncode == 2


def test_an_error_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    done = subprocess.run([sys.executable, ROOT / "scripts" / "overlay", tmp_path], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path} is not empty and no overlay: give another directory\n"
