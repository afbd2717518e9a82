"""What a patch says of itself: subject, reason and trailers.

Test: PATH::CLASS::TEST   a test that fails without the patch; at least one. PATH is as in the source
                          tree, or in tests/ of this repository
Gain: TEXT                series perf: how much, of what, against what, and where it was measured
Upstream: TEXT            issue or pull request, or what later versions do
"""

from __future__ import annotations

import argparse
import ast
import email
import re
from collections.abc import Iterable
from dataclasses import dataclass
from email.policy import default as policy
from pathlib import Path

from .series import patch_files
from .upstream import BuildError, load, Upstream


_TRAILER = re.compile(r"^(Test|Gain|Upstream): (.*(?:\n .*)*)", re.MULTILINE)


@dataclass(frozen=True)
class Message:
    subject: str
    body: str

    def trailers(self, key: str) -> list[str]:
        return [" ".join(value.split()) for name, value in _TRAILER.findall(self.body) if name == key]

    @property
    def reason(self) -> str:
        return _TRAILER.sub("", self.body).strip("- \n")


def read_message(patch: Path) -> Message:
    text = patch.read_bytes().partition(b"\ndiff --git ")[0]
    header = email.message_from_bytes(text, policy=policy)
    subject = re.sub(r"\s+", " ", header["Subject"]).removeprefix("[PATCH] ")
    return Message(subject, header.get_content())


def test_file(upstream: Upstream, test: str) -> Path:
    """Returns the file of a test: in tests/ of this repository, or in the overlay."""
    path = test.partition("::")[0]
    return (upstream.root if path.startswith("tests/") else upstream.overlay) / path


def tests_in(file: Path) -> set[str]:
    """Returns the tests that a file defines, as CLASS::TEST or TEST. Parameters are no part of a name."""
    found = set()
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{each.name}" for each in node.body if _is_test(each)}
        elif _is_test(node):
            found.add(node.name)
    return found


def _is_test(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test")


def own_tests(upstreams: Iterable[Upstream]) -> tuple[list[Path], str]:
    """Returns the files of the tests that patches name, and what ``pytest -k`` takes to select these tests."""
    files = []
    selected = []
    for upstream in upstreams:
        for patch in patch_files(upstream):
            for test in read_message(patch).trailers("Test"):
                files.append(test_file(upstream, test))
                # The names of parametrized tests go on after the name of the function.
                selected.append("(" + " and ".join(test.split("::")[1:]) + ")")
    return list(dict.fromkeys(files)), " or ".join(dict.fromkeys(selected))


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the tests that patches name: files, and last what -k takes.")
    parser.add_argument("--series", help="the last series")
    files, selected = own_tests(load(last=parser.parse_args().series).values())
    print(*files, selected, sep="\n")


if __name__ == "__main__":
    try:
        main()
    except BuildError as error:
        raise SystemExit(f"error: {error}") from None
