from __future__ import annotations

import re
import subprocess
import zipfile

import pytest

from pygraph_build import source, worktree
from pygraph_build.upstream import BuildError, ROOT


# What the builds of both packages read from the environment, as their setup.py do.
SETUP = """
import os, setuptools
branch = os.popen("git branch --show-current").read()
suffix = "" if branch.startswith("release") else "+git"
version = os.environ.get("PYTORCH_BUILD_VERSION") or "3.6.0" + suffix + os.environ["TRITON_WHEEL_VERSION_SUFFIX"]
requirements = os.environ.get("PYTORCH_EXTRA_INSTALL_REQUIREMENTS", "").split("|")
setuptools.setup(name=NAME, version=version, packages=["PACKAGE"], install_requires=list(filter(None, requirements)))
"""


@pytest.fixture
def upstreams(project):
    """The project, with git repositories of both upstreams that build in seconds."""
    for package, folder in (project.torch, "torch"), (project.triton, "triton"):
        repository = project.root / f"{package.name}.git"
        repository.mkdir()
        subprocess.run(["git", "init", "--quiet"], cwd=repository, check=True)
        files = {
            "setup.py": SETUP.replace("NAME", repr(package.name)).replace("PACKAGE", folder).encode(),
            f"{folder}/__init__.py": b"patched = False\n",
            ".gitignore": b"build/\n*.egg-info/\n",
        }
        project.commit(repository, "Release", files)
        subprocess.run(["git", "tag", package.tag], cwd=repository, check=True)
        project.commit(repository, "After the release", {f"{folder}/__init__.py": b"later = True\n"})
    return project


def test_build(upstreams, tmp_path):
    upstreams.add_overlay(upstreams.torch, "torch/new.py")
    for package in upstreams.torch, upstreams.triton:
        source.build(package, tmp_path / package.name, tmp_path / "dist")
    torch, triton = sorted((tmp_path / "dist").iterdir())
    assert torch.name.startswith("torch-2.11.0+pygraph.1-")
    assert triton.name.startswith("triton-3.6.0+pygraph.1-")
    with zipfile.ZipFile(torch) as wheel:
        assert "torch/new.py" in wheel.namelist()
        assert b"triton==3.6.0+pygraph.1" in wheel.read("torch-2.11.0+pygraph.1.dist-info/METADATA")


def test_prepare_starts_over(upstreams, tmp_path):
    checkout = tmp_path / "torch"
    tree = tmp_path / "tree"
    source.clone(upstreams.torch, checkout)
    upstreams.add_overlay(upstreams.torch, "torch/new.py")
    upstreams.add_overlay(upstreams.torch, "test/test_new.py")
    source.prepare(upstreams.torch, checkout)
    assert (checkout / "test/test_new.py").exists()
    (upstreams.torch.overlay / "torch/new.py").unlink()
    worktree.import_series(upstreams.torch, checkout, tree)
    upstreams.commit(tree, "Patch", {"torch/__init__.py": b"patched = True\n"})
    worktree.export_series(upstreams.torch, tree)
    for _ in range(2):
        source.prepare(upstreams.torch, checkout)
        assert not (checkout / "torch/new.py").exists()
        assert (checkout / "torch/__init__.py").read_bytes() == b"patched = True\n"


def test_changes_in_the_checkout_are_kept(upstreams, tmp_path):
    source.clone(upstreams.torch, tmp_path / "torch")
    (tmp_path / "torch/torch/__init__.py").write_text("mine = 1\n")
    with pytest.raises(BuildError, match="uncommitted changes"):
        source.prepare(upstreams.torch, tmp_path / "torch")
    assert (tmp_path / "torch/torch/__init__.py").read_text() == "mine = 1\n"


def test_an_overlay_adds_files_only(upstreams, tmp_path):
    source.clone(upstreams.torch, tmp_path / "torch")
    upstreams.add_overlay(upstreams.torch, "setup.py")
    with pytest.raises(BuildError, match="torch_overlay/setup.py exists in upstream"):
        source.prepare(upstreams.torch, tmp_path / "torch")


def test_a_checkout_without_the_tag(upstreams, tmp_path):
    source.clone(upstreams.torch, tmp_path / "torch")
    subprocess.run(["git", "tag", "--delete", upstreams.torch.tag], cwd=tmp_path / "torch", check=True)
    with pytest.raises(BuildError, match=r"git checkout failed in .*v2\.11\.0"):
        source.prepare(upstreams.torch, tmp_path / "torch")


def test_a_failed_build(upstreams, tmp_path, monkeypatch):
    source.clone(upstreams.torch, tmp_path / "torch")
    monkeypatch.setattr(source, "build_variables", lambda upstream: {"PYTORCH_BUILD_VERSION": "not a version"})
    with pytest.raises(BuildError, match="upstream's build of .* failed"):
        source.build(upstreams.torch, tmp_path / "torch", tmp_path / "dist")


def test_the_dockerfile_names_what_exists():
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    commands = re.findall(r"^RUN (.*)$", text, re.MULTILINE)
    assert commands
    for command in commands:
        subprocess.run(["bash", "-n", "-c", command], check=True)
    setup = (ROOT / "setup.py").read_text()
    for variable in re.findall(r"\bPYGRAPH_\w+", text):
        assert variable in setup
