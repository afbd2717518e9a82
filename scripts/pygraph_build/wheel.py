"""Upstream's wheel for the running Python -> the patched wheel.

What is unchanged is copied as it is compressed: that is quick, and leaves half a gigabyte of
libraries alone. Nothing that is written depends on the time or the machine.
"""

from __future__ import annotations

import base64
import copy
import csv
import hashlib
import io
import logging
import os
import platform
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .native import extensions
from .series import changed_files
from .upstream import BuildError, cache_directory, Upstream


log = logging.getLogger(__name__)


def fetch(upstream: Upstream) -> Path:
    """Upstream's wheel for the running Python, from the cache or the package index."""
    name = _pinned_name(upstream)
    cache = cache_directory()
    wheel = cache / name
    if not wheel.exists():
        log.info("Fetching %s", name)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
            requirement = f"{upstream.name}=={upstream.version}"
            # pip's progress goes to stderr: stdout is for what is built.
            done = subprocess.run([*pip, "--dest", scratch, requirement], stdout=sys.stderr)
            fetched = Path(scratch, name)
            if done.returncode != 0 or not fetched.exists():
                raise BuildError(f"pip could not fetch {name}; what it says is above")
            check(upstream, fetched)
            os.replace(fetched, wheel)
    return wheel


def _pinned_name(upstream: Upstream) -> str:
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    tag = f"-{python}-{python}{sys.abiflags}-"
    machine = f"_{platform.machine()}.whl"
    if sys.platform == "linux":
        for name in upstream.wheels:
            if tag in name and name.endswith(machine):
                return name
    raise BuildError(
        f"{upstream.name} {upstream.version} has no pinned wheel for {python}{sys.abiflags} on {sys.platform} "
        f"{platform.machine()}: use CPython on Linux x86_64 or aarch64"
    )


def check(upstream: Upstream, wheel: Path) -> None:
    """Refuses what is not one of upstream's pinned wheels."""
    if wheel.name not in upstream.wheels:
        raise BuildError(f"{wheel.name} is not a wheel that PyGraph is built on (ci/upstream.json)")
    sha256 = hashlib.sha256()
    with wheel.open("rb") as file:
        while block := file.read(2**20):
            sha256.update(block)
    if sha256.hexdigest() != upstream.wheels[wheel.name]:
        raise BuildError(f"{wheel} has sha256 {sha256.hexdigest()}, not the pinned one: delete it and try again")


def build(upstream: Upstream, wheel: Path, directory: Path) -> Path:
    """Writes the patched wheel into ``directory``."""
    check(upstream, wheel)
    old_stem, new_stem = (f"{upstream.name}-{v}" for v in (upstream.version, upstream.release))
    result = directory / wheel.name.replace(old_stem, new_stem, 1)
    with zipfile.ZipFile(wheel) as old:
        names = set(old.namelist())
        changed = changed_files(upstream, lambda name: old.read(name) if name in names else None)
        metadata = f"{old_stem}.dist-info/METADATA"
        changed[metadata] = _pin_release(upstream, old.read(metadata))
        changed |= extensions(upstream, lambda: _headers(old))
    _rewrite(wheel, result, changed, f"{old_stem}.dist-info", f"{new_stem}.dist-info")
    return result


def add_extensions(upstream: Upstream, wheel: Path) -> None:
    """Adds to a wheel that was compiled from source what is compiled against its headers."""
    with zipfile.ZipFile(wheel) as old:
        added = extensions(upstream, lambda: _headers(old))
    dist_info = f"{upstream.name}-{upstream.release}.dist-info"
    if added:
        _rewrite(wheel, wheel, added, dist_info, dist_info)


@contextmanager
def _headers(wheel: zipfile.ZipFile) -> Iterator[Path]:
    """The directory of the wheel's headers."""
    with tempfile.TemporaryDirectory() as scratch:
        root = "torch/include/"
        wheel.extractall(scratch, [name for name in wheel.namelist() if name.startswith(root)])
        yield Path(scratch, root)


def _rewrite(
    wheel: Path, result: Path, changed: Mapping[str, bytes | None], dist_info: str, new_dist_info: str
) -> None:
    """Writes the wheel with changed members, None for what is gone, and with another name of .dist-info."""
    log.info("Writing %s", result.name)
    with zipfile.ZipFile(wheel) as old, _replacing(result) as file, zipfile.ZipFile(file, "w") as new:
        members = {info.filename: info for info in old.infolist()}
        metadata, record = f"{dist_info}/METADATA", f"{dist_info}/RECORD"
        rows = {row[0]: row for row in csv.reader(io.StringIO(old.read(record).decode()))}

        def renamed(name: str) -> str:
            return name.replace(dist_info, new_dist_info, 1)

        for name, info in members.items():
            if name not in changed and name != record:
                _copy_member(old, info, new, renamed(name))
        # zip files hold local times: those of upstream make the same file everywhere.
        stamp = members[metadata]
        for name, content in sorted(changed.items()):
            if content is None:
                rows.pop(name, None)
            else:
                _write_member(new, members.get(name, stamp), renamed(name), content)
                digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
                rows[name] = [name, f"sha256={digest}", str(len(content))]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([renamed(name), *rest] for name, *rest in rows.values())
        _write_member(new, members[record], renamed(record), text.getvalue().encode())


def _pin_release(upstream: Upstream, metadata: bytes) -> bytes:
    """METADATA with our version, and our release of each upstream package it requires."""
    header, blank, description = metadata.decode().partition("\n\n")
    lines = []
    for line in header.split("\n"):
        if line == f"Version: {upstream.version}":
            line = f"Version: {upstream.release}"
        for pin, ours in upstream.pins.items():
            if line.partition(";")[0] == f"Requires-Dist: {pin}":
                line = line.replace(pin, ours)
        lines.append(line)
    return ("\n".join(lines) + blank + description).encode()


def _copy_member(old: zipfile.ZipFile, info: zipfile.ZipInfo, new: zipfile.ZipFile, name: str) -> None:
    """Copies a member as it is compressed, which zipfile has no call for."""
    copied = copy.copy(info)
    copied.filename = name
    copied.flag_bits &= ~0x08  # the sizes stand in the header, not behind the data
    copied.header_offset = new.start_dir
    # The data follows a header of 30 bytes, the name and an extra field, whose sizes end the 30.
    old.fp.seek(info.header_offset + 26)
    old.fp.seek(sum(struct.unpack("<HH", old.fp.read(4))), os.SEEK_CUR)
    new.fp.write(copied.FileHeader())
    remaining = info.compress_size
    while remaining:
        block = old.fp.read(min(remaining, 2**20))
        new.fp.write(block)
        remaining -= len(block)
    new.start_dir = new.fp.tell()
    new.filelist.append(copied)
    new.NameToInfo[name] = copied


def _write_member(new: zipfile.ZipFile, like: zipfile.ZipInfo, name: str, content: bytes) -> None:
    info = zipfile.ZipInfo(name, like.date_time)
    info.create_system = like.create_system
    info.external_attr = like.external_attr
    info.compress_type = zipfile.ZIP_DEFLATED
    new.writestr(info, content)


@contextmanager
def _replacing(path: Path) -> Iterator:
    """A file to write that takes its place when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        part = Path(scratch, path.name)
        with part.open("wb") as file:
            yield file
        os.replace(part, path)
