"""A repository like this one, on upstream packages small enough to build in milliseconds."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pygraph_build import series, upstream, worktree


PYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"

FILES = {
    "torch": {
        "torch/__init__.py": b"from .version import __version__\n",
        "torch/version.py": b"__version__ = '2.11.0+cu130'\ncuda = '13.0'\n",
        "torch/_inductor/__init__.py": b"",
        "torch/_inductor/cudagraph_trees.py": b"def record():\n    copy_inputs()\n    capture()\n",
        "torch/_inductor/windows.py": b"first\r\nsecond\r\n",
        "torch/_inductor/old.py": b"unused = True",
        "torch/lib/libtorch.so": bytes(range(256)) * 8192,
        "torch/include/torch/csrc/api.h": b"#pragma once\n",
        "torch/bin/torch_shm_manager": b"\x7fELF",
        "functorch/__init__.py": b"",
    },
    "triton": {
        "triton/__init__.py": b"__version__ = '3.6.0'\n",
        "triton/backends/nvidia/compiler.py": b"stages = []\n",
        "triton/backends/nvidia/driver.c": b"int launch(void);\n",
        "triton/_C/libtriton.so": b"\x7fELF" * 100,
    },
}

SERIES = {"torch": ("fixes", "core"), "triton": ("core",)}

METADATA = {
    "torch": (
        "Metadata-Version: 2.4\nName: torch\nVersion: 2.11.0\nRequires-Dist: filelock\n"
        'Requires-Dist: triton==3.6.0; platform_system == "Linux"\n\nVersion: 2.11.0 of the description\n'
    ),
    "triton": "Metadata-Version: 2.4\nName: triton\nVersion: 3.6.0\n\n",
}


def make_wheel(directory: Path, name: str, version: str) -> Path:
    tag = f"{PYTHON}-{PYTHON}-manylinux_2_28_{platform.machine()}"
    wheel = directory / f"{name}-{version}-{tag}.whl"
    dist_info = f"{name}-{version}.dist-info"
    files = FILES[name] | {
        f"{dist_info}/METADATA": METADATA[name].encode(),
        f"{dist_info}/WHEEL": f"Wheel-Version: 1.0\nTag: {tag}\n".encode(),
        f"{dist_info}/licenses/LICENSE": b"BSD-3-Clause\n",
    }
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(zipfile.ZipInfo(f"{dist_info}/", (2026, 3, 23, 13, 40, 36)), b"")
        for path, content in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            rows.writerow([path, f"sha256={digest}", len(content)])
            info = zipfile.ZipInfo(path, (2026, 3, 23, 13, 40, 36))
            info.external_attr = (0o100755 if path.startswith("torch/bin/") else 0o100644) << 16
            # Level 1 is not what the build compresses with: what it compresses again shows.
            archive.writestr(info, content, zipfile.ZIP_DEFLATED, 1)
        rows.writerow([f"{dist_info}/RECORD", "", ""])
        archive.writestr(zipfile.ZipInfo(f"{dist_info}/RECORD", (2026, 3, 23, 13, 40, 36)), record.getvalue())
    return wheel


class Project:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.wheels = {}
        pinned = {"release": "pygraph.1"}
        for name, version in {"torch": "2.11.0", "triton": "3.6.0"}.items():
            wheel = make_wheel(root, name, version)
            self.wheels[name] = wheel
            pinned[name] = {
                "version": version,
                "repository": str(root / f"{name}.git"),
                "tag": f"v{version}",
                "wheels": {wheel.name: hashlib.sha256(wheel.read_bytes()).hexdigest()},
            }
            for each in SERIES[name]:
                (root / "patches" / name / each).mkdir(parents=True)
                (root / "patches" / name / each / ".patches").touch()
            (root / f"{name}_overlay").mkdir()
        (root / "patches" / ".series").write_text("fixes\ncore\n")
        (root / "ci").mkdir()
        (root / "ci" / "upstream.json").write_text(json.dumps(pinned))
        self.torch, self.triton = upstream.load(root).values()

    def work_tree(self, package: upstream.Upstream) -> Path:
        tree = self.root / "trees" / package.name
        worktree.import_series(package, self.wheels[package.name], tree)
        return tree

    def add_patch(self, package: upstream.Upstream, subject: str, changes: dict[str, bytes | None]) -> None:
        """Adds a patch to the package's last series, in the way that a developer does."""
        tree = self.root / "trees" / package.name
        if not tree.exists():
            self.work_tree(package)
        self.commit(tree, subject, changes)
        worktree.export_series(package, tree)

    def commit(self, tree: Path, message: str, changes: dict[str, bytes | None]) -> None:
        for path, content in changes.items():
            file = tree / path
            if content is None:
                file.unlink()
            else:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
        author = ["-c", "user.name=Grace Höpper", "-c", "user.email=grace@example.org"]
        subprocess.run(["git", "add", "--all"], cwd=tree, check=True)
        subprocess.run(["git", *author, "commit", "--quiet", "--message", message], cwd=tree, check=True)

    def changed_files(self, package: upstream.Upstream) -> dict[str, bytes | None]:
        return series.changed_files(package, FILES[package.name].get)

    def add_overlay(self, package: upstream.Upstream, path: str, content: bytes = b"new = True\n") -> None:
        file = package.overlay / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)

    def install(self, site: Path) -> Path:
        for name, wheel in self.wheels.items():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
        return site


@pytest.fixture
def project(tmp_path: Path) -> Project:
    root = tmp_path / "project"
    root.mkdir()
    return Project(root)
