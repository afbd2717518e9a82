"""Pull requests to upstream: patches/upstream/*/, checked on the wheel of ci/upstream-2.15.json.

Each directory holds one patch, which changes files of the wheel and adds a test file, and PR.md: the
bug with a program, the fix, and what program and tests print on stock and on patched. A check runs
both, on a modelled GPU where the machine has none, and compares.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .cli import main as run_main
from .series import FileChange, patch_files, read_patch
from .upstream import BuildError, load as load_upstreams, ROOT, Upstream
from .wheel import fetch
from .worktree import apply_patches, git


log = logging.getLogger(__name__)

SECTIONS = ("Bug", "Fix", "Test plan", "AI disclosure")
STATES = ("stock", "patched")
MODEL = ("torch/testing/_internal/fake_cuda.py", "torch/testing/_internal/python_autograd.py")

_PROGRAM = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_TRANSCRIPT = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)

# One test of them compiles C++ for the CPU several times.
TIMEOUT = 900


@dataclass(frozen=True)
class PullRequest:
    """``transcripts`` maps each of STATES to pairs of a command in PR.md and its output."""

    name: str
    patch: Path
    changes: tuple[FileChange, ...]
    text: str
    program: str
    transcripts: dict[str, str]

    @property
    def tests(self) -> list[str]:
        return [change.path for change in self.changes if change.path.startswith("test/")]


@dataclass(frozen=True)
class Result:
    """What one pull request gives in each of STATES: the test summary, and the transcript."""

    summaries: dict[str, str]
    transcripts: dict[str, str]


def pinned(root: Path = ROOT) -> Upstream:
    described = json.loads((root / "ci" / "upstream-2.15.json").read_text())
    return Upstream(name="torch", release=described["version"], root=root, series=(), pins={}, **described)


def load(root: Path = ROOT) -> list[PullRequest]:
    directories = sorted(path for path in (root / "patches" / "upstream").iterdir() if path.is_dir())
    return [_read(path) for path in directories if path.name[0].isdigit()]


def _read(directory: Path) -> PullRequest:
    patches = list(directory.glob("*.patch"))
    if len(patches) != 1:
        raise BuildError(f"{directory} has {len(patches)} patches, not one")
    text = (directory / "PR.md").read_text()
    programs = _PROGRAM.findall(text)
    transcripts = _TRANSCRIPT.findall(text)
    if not programs or len(transcripts) != len(STATES):
        raise BuildError(f"{directory}/PR.md has to hold a program, and a transcript of stock and of patched")
    changes = tuple(read_patch(patches[0].name, patches[0].read_bytes()))
    return PullRequest(
        directory.name, patches[0], changes, text, programs[0], dict(zip(STATES, transcripts, strict=True))
    )


def environment(upstream: Upstream, python: str = sys.executable) -> Path:
    """Returns the Python of the environment with upstream's wheel, which is made if it is not there."""
    directory = upstream.root / "build" / f"upstream-{sys.version_info.major}.{sys.version_info.minor}"
    requirements = upstream.root / "ci" / "requirements-upstream.txt"
    installed = directory / "installed"
    wanted = upstream.version + "\n" + requirements.read_text()
    if not installed.exists() or installed.read_text() != wanted:
        wheel = fetch(upstream)
        log.info("Installing %s and the test tools into %s (about 5 GB)", wheel.name, directory)
        subprocess.run([python, "-m", "venv", "--clear", directory], check=True)
        pip = [directory / "bin" / "python", "-m", "pip", "install", "--quiet"]
        done = subprocess.run([*pip, wheel, "--requirement", requirements], stdout=sys.stderr)
        if done.returncode != 0:
            raise BuildError("pip could not install upstream's wheel; what it says is above")
        installed.write_text(wanted)
    return directory / "bin" / "python"


def site_of(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip())


def link(source: Path, target: Path, own: set[str]) -> None:
    """Fills ``target`` with links to what ``source`` holds, but for the files ``own`` and the way to them."""
    target.mkdir(parents=True)
    below: dict[str, set[str]] = {}
    for path in own:
        head, _, rest = path.partition("/")
        below.setdefault(head, set()).add(rest)
    for entry in os.scandir(source):
        inside = below.get(entry.name)
        if inside is None:
            (target / entry.name).symlink_to(entry.path)
        elif entry.is_dir():
            link(Path(entry.path), target / entry.name, inside)


def lay(upstream: Upstream, request: PullRequest, state: str, site: Path, directory: Path) -> None:
    """Makes ``directory`` a place to run in: torch, the tests and the program."""
    written = {path: (upstream.overlay / path).read_bytes() for path in MODEL}
    written["repro.py"] = request.program.encode()
    for change in request.changes:
        if state == "patched" or change.path in request.tests:
            old = site / change.path
            written[change.path] = change.apply(old.read_bytes() if old.exists() else None)
    link(site / "torch", directory / "torch", {path[6:] for path in written if path.startswith("torch/")})
    for path, content in written.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(content)


def run(request: PullRequest, python: Path, directory: Path) -> tuple[str, str]:
    """Returns the summary of the tests, and the transcript of all commands."""
    support = request.patch.parents[1]
    env = os.environ | {
        "PYTHONPATH": f"{directory}:{support}",
        "TORCHINDUCTOR_CACHE_DIR": str(directory / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }

    def output(*command: str | Path) -> str:
        done = subprocess.run(
            [python, *command], cwd=directory, env=env, capture_output=True, text=True, timeout=TIMEOUT
        )
        # Warnings depend on the machine, so they are no part of a transcript.
        log.debug("%s: %s\n%s%s", directory.name, command[-1], done.stdout, done.stderr)
        return done.stdout

    printed = output(support / "modelled_gpu.py", "repro.py")
    transcript = f"$ python repro.py\n{printed}"
    summaries = []
    for test in request.tests:
        reported = output("-m", "pytest", "-q", "-p", "modelled_gpu", "-p", "no:cacheprovider", test)
        last = reported.strip().rpartition("\n")[2]
        summaries.append(re.sub(r"(, \d+ warnings?)? in .*", "", last))
        transcript += f"$ python -m pytest {test}\n{summaries[-1]}\n"
    return ", ".join(summaries), transcript


def check(upstream: Upstream, requests: list[PullRequest], python: Path, scratch: Path) -> dict[str, Result]:
    site = site_of(python)

    def one(request: PullRequest, state: str) -> tuple[str, str]:
        directory = scratch / f"{request.name}-{state}"
        lay(upstream, request, state, site, directory)
        return run(request, python, directory)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        running = {(r.name, state): pool.submit(one, r, state) for r in requests for state in STATES}
        results = {}
        for request in requests:
            pairs = {state: running[request.name, state].result() for state in STATES}
            log.info("%s: %s", request.name, pairs["patched"][0])
            results[request.name] = Result(
                {state: pair[0] for state, pair in pairs.items()}, {state: pair[1] for state, pair in pairs.items()}
            )
    return results


def apply_in_sequence(requests: list[PullRequest], site: Path, tree: Path) -> list[str]:
    """Applies all patches with git am to the files that they change, and returns the paths of these files."""
    paths = sorted({change.path for request in requests for change in request.changes})
    tree.mkdir()
    git(tree, "init", "--quiet")
    for path in paths:
        if (site / path).exists():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(site / path, tree / path)
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", "upstream")
    apply_patches(tree, [request.patch for request in requests])
    return paths


def lint(root: Path, python: Path, tree: Path, paths: list[str]) -> str:
    """Returns what ruff finds with upstream's settings."""
    ruff = [python, "-m", "ruff"]
    config = ["--no-cache", "--config", root / "patches" / "upstream" / "lint.toml", *paths]
    found = [
        subprocess.run([*ruff, *command, *config], cwd=tree, capture_output=True, text=True)
        for command in (["check", "--quiet", "--output-format=concise"], ["format", "--check", "--quiet"])
    ]
    return "".join(done.stdout + done.stderr for done in found if done.returncode != 0)


def missing_in_port(root: Path) -> list[str]:
    """Returns the patches that port.md says nothing of."""
    text = (root / "patches" / "upstream" / "port.md").read_text()
    series = (patch for package in load_upstreams(root).values() for patch in patch_files(package))
    return [patch.name for patch in series if f"`{patch.name}`" not in text]


def faults(request: PullRequest, result: Result) -> list[str]:
    found = []
    if not re.match(r"\d+ failed", result.summaries["stock"]) or "error" in result.summaries["stock"]:
        found.append(f"no test fails on stock: {result.summaries['stock']}")
    if not re.fullmatch(r"\d+ passed", result.summaries["patched"]):
        found.append(f"not all tests pass with the patch: {result.summaries['patched']}")
    stock, patched = (result.transcripts[state].partition("\n$ ")[0] for state in STATES)
    if stock == patched:
        found.append(f"the program prints the same on stock and on patched:\n{stock}")
    for state in STATES:
        if result.transcripts[state] != request.transcripts[state]:
            found.append(f"PR.md says something else for {state} than what was printed:\n{result.transcripts[state]}")
    return found


def table(results: dict[str, Result], found: dict[str, list[str]]) -> str:
    rows = [("pull request", "stock", "patched", "PR.md")]
    rows += [(name, *r.summaries.values(), "differs" if found[name] else "as printed") for name, r in results.items()]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def record(request: PullRequest, result: Result) -> PullRequest:
    """Write the printed transcripts into PR.md, and return its new text."""
    printed = iter(result.transcripts[state] for state in STATES)
    text = _TRANSCRIPT.sub(lambda match: f"```console\n{next(printed)}```", request.text)
    (request.patch.parent / "PR.md").write_text(text)
    return _read(request.patch.parent)


def run_all(args: argparse.Namespace) -> None:
    upstream = pinned()
    requests = [each for each in load() if each.name.startswith(tuple(args.names) or "")]
    python = environment(upstream)
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        tree = scratch / "tree"
        paths = apply_in_sequence(requests, site_of(python), tree)
        linted = lint(upstream.root, python, tree, paths)
        results = check(upstream, requests, python, scratch)
    if args.record:
        requests = [record(request, results[request.name]) for request in requests]
    found = {request.name: faults(request, results[request.name]) for request in requests}
    for name, each in found.items():
        for fault in each:
            print(f"{name}: {fault}")
    unplanned = missing_in_port(upstream.root)
    for name in unplanned:
        print(f"port.md says nothing of {name}")
    print(linted, end="")
    print(table(results, found))
    lint_says = "fails" if linted else "clean"
    print(f"{len(requests)} patches apply in sequence with git am; lint by upstream's settings: {lint_says}")
    if linted or unplanned or any(found.values()):
        raise BuildError("not all pull requests are as their PR.md says")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="scripts/test --upstream", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="starts of the directories' names; by default all are checked")
    parser.add_argument("--record", action="store_true", help="write what was printed into PR.md")
    run_main(parser, run_all)
