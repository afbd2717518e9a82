"""PyGraph over an installed torch and triton, in a directory for PYTHONPATH or in place.

The directory mirrors the packages: Python files are copied, so that no edit reaches the installation,
large files and directories without Python (libraries, headers) are links to it. Libraries find their
neighbours as before, since a path through a linked directory goes on in the installation.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

from .native import extensions
from .series import changed_files, overlay_files, patch_files
from .upstream import BuildError, Upstream


log = logging.getLogger(__name__)

Changes = dict[str, "bytes | None"]

LARGE = 2**20
# Marks a directory that may be replaced, and holds what an overlay in place has replaced.
MARK = ".pygraph-overlay"


def overlay_directory(upstreams: Iterable[Upstream], directory: Path) -> None:
    if directory.exists() and not (directory / MARK).exists() and any(directory.iterdir()):
        raise BuildError(f"{directory} is not empty and no overlay: give another directory")
    changes = _changes_by_site(upstreams)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        new = Path(scratch, "new")
        new.mkdir(mode=0o755)
        for site, changed in changes.items():
            for package in {Path(member).parts[0] for member in changed}:
                _mirror(site / package, new / package, [site / member for member in changed])
            _write(changed, new)
        (new / MARK).touch()
        if directory.exists():
            directory.rename(Path(scratch, "old"))
        new.rename(directory)
    log.info("PYTHONPATH=%s", directory.resolve())


def overlay_in_place(upstreams: Iterable[Upstream]) -> None:
    upstreams = list(upstreams)
    revert(upstreams)
    for site, changed in _changes_by_site(upstreams).items():
        replaced = [member for member in changed if (site / member).exists()]
        with tempfile.TemporaryDirectory(dir=site) as scratch:
            backup = Path(scratch, MARK)
            for member in replaced:
                (backup / member).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(site / member, backup / member)
            added = sorted(changed.keys() - replaced)
            (backup / "manifest.json").write_text(json.dumps({"replaced": replaced, "added": added}))
            backup.rename(site / MARK)
        _write(changed, site)
        log.info("%s: %d files replaced, %d added", site, len(replaced), len(added))


def revert(upstreams: Iterable[Upstream]) -> None:
    """Takes back an overlay in place; without one, does nothing."""
    for site in {_site(upstream) for upstream in upstreams if _has_sources(upstream)}:
        backup = site / MARK
        if not backup.exists():
            continue
        manifest = json.loads((backup / "manifest.json").read_text())
        for member in manifest["replaced"]:
            if (backup / member).exists():  # else moved back by a revert that was interrupted
                os.replace(backup / member, site / member)
        for member in manifest["added"]:
            (site / member).unlink(missing_ok=True)
            _prune((site / member).parent)
        shutil.rmtree(backup)
        log.info("%s: as installed again", site)


def _changes_by_site(upstreams: Iterable[Upstream]) -> dict[Path, Changes]:
    changes: dict[Path, Changes] = {}
    for upstream in filter(_has_sources, upstreams):
        site = _site(upstream)
        if (site / MARK).exists():
            raise BuildError(f"{site} has an overlay in place: take it back with --revert first")
        changed = changes.setdefault(site, {})
        changed |= changed_files(upstream, lambda member: _read(site / member))
        changed |= extensions(upstream, lambda: nullcontext(site / "torch" / "include"))
    return changes


def _has_sources(upstream: Upstream) -> bool:
    return bool(patch_files(upstream)) or any(True for _ in overlay_files(upstream))


def _site(upstream: Upstream) -> Path:
    """The directory that holds the installed package."""
    wanted = f"{upstream.name} {upstream.version}"
    try:
        distribution = importlib.metadata.distribution(upstream.name)
    except importlib.metadata.PackageNotFoundError:
        raise BuildError(f"{wanted} is not installed for this Python") from None
    version = distribution.version
    if version == upstream.release or version.split("+")[0] != upstream.version:
        raise BuildError(f"an overlay needs upstream's {wanted}, installed is {version}")
    return Path(str(distribution.locate_file(""))).resolve()


def _read(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def _mirror(source: Path, target: Path, changed: Iterable[Path]) -> None:
    own = {source}  # the directories that cannot be links: with Python or changed files below
    files = (Path(where, name) for where, _, names in os.walk(source) for name in names)
    for file in [*changed, *(file for file in files if file.suffix in (".py", ".pyc"))]:
        directory = file.parent
        while source in directory.parents and directory not in own:
            own.add(directory)
            directory = directory.parent
    for directory in sorted(filter(Path.is_dir, own)):
        copied = target / directory.relative_to(source)
        copied.mkdir(parents=True)
        for entry in os.scandir(directory):
            if entry.is_dir() and Path(entry.path) in own:
                continue
            if entry.is_dir() or entry.stat().st_size > LARGE:
                (copied / entry.name).symlink_to(entry.path)
            else:
                shutil.copy2(entry.path, copied / entry.name)


def _write(changed: Changes, root: Path) -> None:
    """Writes new files and puts them in place of the old, which other names may share."""
    for member, content in changed.items():
        file = root / member
        if content is None:
            file.unlink(missing_ok=True)
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.new")
        new.write_bytes(content)
        if file.exists():
            shutil.copymode(file, new)
        os.replace(new, file)


def _prune(directory: Path) -> None:
    """Removes directories that only bytecode is left in, innermost first."""
    while not directory.exists() or not any(entry.name != "__pycache__" for entry in os.scandir(directory)):
        shutil.rmtree(directory, ignore_errors=True)
        directory = directory.parent
