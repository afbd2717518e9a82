"""Upstream's checkout -> the patched wheel, compiled.

Upstream's own build does the work. It takes hours, a CUDA toolkit and many cores; see the Dockerfile.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .series import overlay_files, patch_files
from .upstream import BuildError, Upstream
from .wheel import add_extensions
from .worktree import apply_patches, git, require_git


log = logging.getLogger(__name__)

# Triton puts the commit into the version of what is built from a branch of another name.
BRANCH = "release/pygraph"


def build(upstream: Upstream, checkout: Path, directory: Path) -> None:
    """Compiles ``checkout``, cloned if it does not exist, with the series and the overlay on top."""
    if not checkout.exists():
        clone(upstream, checkout)
    prepare(upstream, checkout)
    directory.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "--wheel-dir"]
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        command = [*pip, scratch, str(checkout.resolve())]
        if subprocess.run(command, env=os.environ | build_variables(upstream)).returncode != 0:
            raise BuildError(f"upstream's build of {checkout} failed; what it says is above")
        (wheel,) = Path(scratch).iterdir()
        add_extensions(upstream, wheel)
        os.replace(wheel, directory / wheel.name)


def clone(upstream: Upstream, checkout: Path) -> None:
    require_git()
    log.info("Cloning %s %s", upstream.repository, upstream.tag)
    shallow = ["--depth=1", "--recurse-submodules", "--shallow-submodules"]
    command = ["git", "clone", *shallow, "--branch", upstream.tag, upstream.repository, str(checkout)]
    if subprocess.run(command).returncode != 0:
        raise BuildError(f"git could not clone {upstream.repository}; what it says is above")


def prepare(upstream: Upstream, checkout: Path) -> None:
    """Makes a branch of upstream's tag, the series and the overlay; run again, it starts over."""
    if git(checkout, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules"):
        raise BuildError(f"{checkout} has uncommitted changes: commit them or build from a clean checkout")
    git(checkout, "checkout", "--quiet", "-B", BRANCH, upstream.tag)
    apply_patches(checkout, patch_files(upstream))
    overlay = dict(overlay_files(upstream))
    for path, file in overlay.items():
        target = checkout / path
        if target.exists():
            raise BuildError(f"{upstream.overlay.name}/{path} exists in upstream: change it with a patch")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    git(checkout, "add", "--force", *overlay)
    git(checkout, "commit", "--quiet", "--allow-empty", "--message", "PyGraph's overlay")


def build_variables(upstream: Upstream) -> dict[str, str]:
    """What upstream's setup.py reads its version and requirements from."""
    if upstream.name == "triton":
        return {"TRITON_WHEEL_VERSION_SUFFIX": upstream.release.removeprefix(upstream.version)}
    triton = next(ours for ours in upstream.pins.values() if ours.startswith("triton=="))
    return {
        "PYTORCH_BUILD_VERSION": upstream.release,
        "PYTORCH_BUILD_NUMBER": "1",  # from 2 on it would be appended to the version
        "PYTORCH_EXTRA_INSTALL_REQUIREMENTS": f"{triton}; platform_system == 'Linux'",
    }
