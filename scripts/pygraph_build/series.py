"""The patch series of a package, and the files that they and the overlay add or change.

patches/.series gives the order of the series, patches/PACKAGE/SERIES/.patches that of the patches in one.

Patches are what ``git format-patch --full-index`` writes. Their index lines name the exact content
(as git blob ids) that each file must have before and after, so nothing else pins the files, and a
patch is applied with neither fuzz nor a tool that a machine may lack.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .upstream import BuildError, Upstream


log = logging.getLogger(__name__)

ABSENT = "0" * 40

# The tests of every series import it.
TEST_SUPPORT = "torch/testing/"

_FILE = re.compile(rb"^diff --git a/(?P<old>\S+) b/(?P<new>\S+)\n", re.MULTILINE)
_INDEX = re.compile(rb"^index ([0-9a-f]{40})\.\.([0-9a-f]{40})( \d+)?\n", re.MULTILINE)
_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@.*\n", re.MULTILINE)


@dataclass(frozen=True)
class FileChange:
    patch: str
    path: str
    before: str  # git blob id, or ABSENT
    after: str
    hunks: bytes

    def apply(self, old: bytes | None) -> bytes | None:
        if blob_id(old) != self.before:
            raise BuildError(f"{self.patch} does not apply: {self.path} is not the file it was made for")
        new = None if self.after == ABSENT else _apply_hunks(old or b"", self.hunks)
        if blob_id(new) != self.after:
            raise BuildError(f"{self.patch} is damaged: {self.path} is not what its index line promises")
        return new


def blob_id(content: bytes | None) -> str:
    if content is None:
        return ABSENT
    return hashlib.sha1(b"blob %d\0%s" % (len(content), content)).hexdigest()


def patch_files(upstream: Upstream) -> list[Path]:
    """Returns the patches of the package in the order in which they apply."""
    return [file for series in upstream.series for file in files_of_series(upstream, series)]


def files_of_series(upstream: Upstream, series: str) -> list[Path]:
    """Returns the patches of one series of the package."""
    listed = upstream.patches / series / ".patches"
    return [listed.with_name(name) for name in listed.read_text().split()]


def read_series(upstream: Upstream) -> Iterator[FileChange]:
    for path in patch_files(upstream):
        if not path.is_file():
            raise BuildError(f"{path} is missing, though {path.parent / '.patches'} lists it")
        yield from read_patch(path.relative_to(upstream.root).as_posix(), path.read_bytes())


def read_patch(name: str, text: bytes) -> Iterator[FileChange]:
    starts = list(_FILE.finditer(text))
    ends = [match.start() for match in starts[1:]] + [len(text)]
    for start, end in zip(starts, ends):
        diff = text[start.end() : end]
        index = _INDEX.search(diff)
        if index is None or start["old"] != start["new"]:
            raise BuildError(f"{name} is not as 'scripts/patches export' writes it; export it again")
        before, after = index[1].decode(), index[2].decode()
        yield FileChange(name, start["new"].decode(), before, after, diff[index.end() :])


def _apply_hunks(old: bytes, hunks: bytes) -> bytes:
    lines = _lines(old)
    new: list[bytes] = []
    position = 0
    previous = b""
    _, *parts = _HUNK.split(hunks)
    for start, count, body in zip(parts[0::3], parts[1::3], parts[2::3]):
        # A hunk that only adds names the line before it, others the first line that they take.
        begin = int(start) if count == b"0" else int(start) - 1
        new += lines[position:begin]
        position = begin
        for line in _lines(body):
            if line[:1] in b" -":
                position += 1
            if line[:1] in b" +":
                new.append(line[1:])
            if line[:1] == b"\\" and previous != b"-":
                new[-1] = new[-1].removesuffix(b"\n")
            previous = line[:1]
    return b"".join(new + lines[position:])


def _lines(content: bytes) -> list[bytes]:
    return re.findall(rb"[^\n]*\n|[^\n]+", content)


def overlay_files(upstream: Upstream) -> Iterator[tuple[str, Path]]:
    """Yields (path in the source tree, file) of each file of the overlay that the series need."""
    for file in sorted(upstream.overlay.rglob("*")):
        path = file.relative_to(upstream.overlay).as_posix()
        hidden = file.name.startswith(".") or file.suffix == ".pyc"
        needed = upstream.takes_overlay or path.startswith(TEST_SUPPORT)
        if file.is_file() and not hidden and needed:
            yield path, file


def changed_files(upstream: Upstream, read: Callable[[str], bytes | None]) -> dict[str, bytes | None]:
    """The files of the package that differ from upstream: path in the wheel -> content, None if gone.

    ``read`` gives upstream's content of a file, None where upstream has none.
    """
    changed: dict[str, bytes | None] = {}
    for change in read_series(upstream):
        member = upstream.to_wheel(change.path)
        old = changed[member] if member in changed else member and read(member)
        # Beside the Python sources lie files for the compiled build only, such as CMakeLists.txt.
        build_only = old is None and change.before != ABSENT and not change.path.endswith(".py")
        if member is None or build_only:
            log.debug("%s: %s has no place in the wheel", change.patch, change.path)
            continue
        changed[member] = change.apply(old)
    for path, file in overlay_files(upstream):
        member = upstream.to_wheel(path)
        if member is None:
            log.debug("%s: %s has no place in the wheel", upstream.overlay.name, path)
            continue
        if member in changed or read(member) is not None:
            raise BuildError(f"{upstream.overlay.name}/{path} exists in upstream: change it with a patch")
        changed[member] = file.read_bytes()
    if upstream.name == "torch":
        version = read("torch/version.py") or b""
        changed["torch/version.py"] = re.sub(
            rb"^__version__ = .*$",
            f"__version__ = '{upstream.release}'".encode(),
            version,
            flags=re.MULTILINE,
        )
    return changed
