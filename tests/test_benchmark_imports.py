"""The benchmarks' modules import each other in one direction, wherever the import statement stands."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest


BENCHMARKS = Path(__file__).resolve().parent.parent / "torch_overlay" / "benchmarks" / "dynamo"
PACKAGE = "pygraph"
# What a suite is and which cases it has; this part runs nothing.
DECLARES = {"case", "catalogue", "cgct", "mend", "modern", "paper", "parallel", "pi", "scg", "varying"}


def _name(file: Path, root: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(root: Path, package: str) -> dict[str, set[str]]:
    """Return the modules of a package that each of its modules imports, at module level or in a function."""
    files = {_name(file, root): file for file in (root / package).rglob("*.py")}
    found: dict[str, set[str]] = {}
    for module, file in files.items():
        above = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
        names: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = above[: len(above) - node.level + 1] if node.level else []
                origin = ".".join([*base, *filter(None, [node.module])])
                # What is imported is a module, or is in one.
                modules = {f"{origin}.{alias.name}" for alias in node.names}
                names |= modules & files.keys() or {origin}
                names |= {origin} if not modules <= files.keys() else set()
        # That a package runs before its modules makes no circle.
        found[module] = (names & files.keys()) - {module, package}
    return found


def cycle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_module_imports_what_imports_it() -> None:
    found = imports(BENCHMARKS, PACKAGE)
    assert len(found) > 20 and found[f"{PACKAGE}.program"] >= {f"{PACKAGE}.catalogue", f"{PACKAGE}.case"}
    assert cycle(found) == []


def test_the_catalogue_does_not_import_what_runs_cases() -> None:
    found = imports(BENCHMARKS, PACKAGE)
    for name in DECLARES:
        own = {module.removeprefix(f"{PACKAGE}.") for module in found[f"{PACKAGE}.{name}"]}
        assert {module for module in own if not module.startswith("models.")} <= DECLARES, name


def test_the_names_of_cases_need_no_overlay() -> None:
    """scripts/gpu_suite asks for them, with torch as it is installed."""
    pytest.importorskip("torch")
    code = "import pygraph.replay, pygraph.tp, sys; sys.exit('torch._inductor.pygraph' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, check=True)


@pytest.mark.parametrize(
    "back",
    [
        "from . import low",
        "from .low import value",
        "import tree.low",
        "def use():\n    from .low import value",
        "def use():\n    from tree import low",
        "if TYPE_CHECKING:\n    from .low import value",
    ],
)
@pytest.mark.parametrize("forth", ["from . import high", "def use():\n    from .high import use"])
def test_a_cycle_is_found_at_either_level(tmp_path: Path, forth: str, back: str) -> None:
    package = tmp_path / "tree"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "low.py").write_text(f"value = 1\n{forth}\n")
    (package / "high.py").write_text(f"import json\n{back}\n")
    assert {*cycle(imports(tmp_path, "tree"))} == {"tree.low", "tree.high"}
    (package / "low.py").write_text("import json\nvalue = 1\n")
    assert cycle(imports(tmp_path, "tree")) == []


def test_a_cycle_through_a_folder_is_found(tmp_path: Path) -> None:
    package = tmp_path / "tree"
    (package / "models").mkdir(parents=True)
    for file in ("__init__.py", "models/__init__.py"):
        (package / file).touch()
    (package / "models" / "small.py").write_text("from ..case import Case\n")
    (package / "case.py").write_text("from .models.small import Network\n")
    assert {*cycle(imports(tmp_path, "tree"))} == {"tree.case", "tree.models.small"}
