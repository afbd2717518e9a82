"""The overlay's layers: imports point down, and modules and functions stay small."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx
import pytest

from pygraph_build.upstream import ROOT


PACKAGE = "torch._inductor.pygraph"
SOURCES = ROOT / "torch_overlay" / "torch" / "_inductor" / "pygraph"
SUPPORT = ROOT / "torch_overlay" / "torch" / "testing" / "_internal"

# The lowest first. A module imports from its own layer and from those below.
LAYERS = (
    "native",
    "types",
    "graph",
    "schedule",
    "verify",
    "values",
    "trees",
    "capture",
    "replay",
    "select",
    "compile",
    "calls",
    "report",
    "dynamo",
)

# The package itself offers what its users import.
TOP = ("__init__",)

MAX_MODULE_LINES = 600
MAX_FUNCTION_LINES = 80

# Tables of texts.
TABLES = {"types/reason.py"}


def modules() -> dict[str, Path]:
    """Dotted name below the package -> file."""
    found = {}
    for file in sorted(SOURCES.rglob("*.py")):
        parts = file.relative_to(SOURCES).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = file
    return found


MODULES = modules()


def imports(file: Path) -> Iterator[tuple[str, bool]]:
    """(module below the package, whether the import is inside a function) of each import of the package."""
    tree = ast.parse(file.read_text())
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name == PACKAGE or name.startswith(f"{PACKAGE}."):
                below = name.removeprefix(PACKAGE).lstrip(".")
                # A name of a module, or of something in one.
                while below and below not in MODULES:
                    below = below.rpartition(".")[0]
                yield below or "__init__", id(node) in inside


def layer(module: str) -> int:
    first = module.partition(".")[0]
    return len(LAYERS) if first in TOP else LAYERS.index(first)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    up = [name for name, _ in imports(MODULES[module]) if layer(name) > layer(module)]
    assert not up, f"{module} imports from a layer above it"


def test_no_circles() -> None:
    arrows = networkx.DiGraph((module, name) for module, file in MODULES.items() for name, _ in imports(file))
    arrows.remove_edges_from(list(networkx.selfloop_edges(arrows)))
    assert not list(networkx.simple_cycles(arrows))


@pytest.mark.parametrize("module", MODULES)
def test_no_import_inside_a_function(module: str) -> None:
    assert not [name for name, is_inside in imports(MODULES[module]) if is_inside]


@pytest.mark.parametrize("module", MODULES)
def test_sizes(module: str) -> None:
    file = MODULES[module]
    text = file.read_text()
    if file.relative_to(SOURCES).as_posix() not in TABLES:
        assert len(text.splitlines()) <= MAX_MODULE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, node.name


@pytest.mark.parametrize("file", sorted(SUPPORT.glob("*.py")), ids=lambda file: file.stem)
def test_sizes_of_what_tests_share(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= MAX_MODULE_LINES
