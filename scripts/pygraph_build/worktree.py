"""Working on the patches: the series as commits of a git work tree, and back.

A branch of each series' name is on its last commit, and the checked out one on that of the last series.
``git rebase`` moves them along: import sets rebase.updateRefs.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path

from .series import ABSENT, files_of_series, patch_files, read_series
from .upstream import BuildError, Upstream


log = logging.getLogger(__name__)

# The tag on the commit that holds upstream's files; the series follow it.
BASE = "upstream"
# The branch that is checked out. It holds all series, and has no branch of the last series' name beside it.
BRANCH = "pygraph"


def require_git() -> None:
    if shutil.which("git") is None:
        raise BuildError("git is needed for this: install it")


def git(directory: Path, *args: str) -> str:
    require_git()
    if not directory.is_dir():
        raise BuildError(f"{directory} is no directory")
    # The user's configuration must not show in what is written (diff prefixes, signatures, hooks).
    env = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    identity = ["-c", "user.name=PyGraph", "-c", "user.email=pygraph@localhost"]
    done = subprocess.run(["git", *identity, *args], cwd=directory, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        reasons = [line for line in said if line.startswith(("error: ", "fatal: "))] or said
        raise BuildError(f"git {args[0]} failed in {directory}: {' '.join(reasons[:1])}")
    return done.stdout


def import_series(upstream: Upstream, source: Path, directory: Path) -> None:
    """Makes ``directory`` a git work tree of upstream's files with one commit for each patch.

    ``source`` is upstream's wheel, or a checkout of its repository where patches reach files that
    a wheel does not have.
    """
    if directory.exists():
        raise BuildError(f"{directory} exists already: export and delete it, or give another directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        tree = Path(scratch) / "tree"
        if source.is_dir():
            log.info("Cloning %s at %s", source, upstream.tag)
            git(source, "clone", "--quiet", "--no-checkout", str(source.resolve()), str(tree))
            git(tree, "checkout", "--quiet", "-B", BRANCH, upstream.tag)
        else:
            log.info("Unpacking the Python sources of %s", source.name)
            try:
                _unpack(upstream, source, tree)
            except zipfile.BadZipFile as error:
                raise BuildError(f"{source} is no whole wheel: {error}") from error
            before: dict[str, str] = {}
            for change in read_series(upstream):
                before.setdefault(change.path, change.before)
            for path in before:
                if before[path] != ABSENT and not (tree / path).exists():
                    raise BuildError(f"{source.name} has no {path}, which a patch changes: use --source CHECKOUT")
            git(tree, "init", "--quiet", f"--initial-branch={BRANCH}")
            git(tree, "add", "--all", "--force")
            git(tree, "commit", "--quiet", "--message", f"{upstream.name} {upstream.version}")
        git(tree, "tag", "--force", BASE)
        git(tree, "config", "rebase.updateRefs", "true")
        for series in upstream.series:
            apply_patches(tree, files_of_series(upstream, series))
            if series != upstream.series[-1]:
                git(tree, "branch", "--force", series)
        tree.rename(directory)
    log.info("%s: %d patches on tag '%s'", directory, len(patch_files(upstream)), BASE)


def apply_patches(tree: Path, patches: list[Path]) -> None:
    if patches:
        exact = ["--keep-cr", "--quoted-cr=nowarn", "--keep-non-patch", "--committer-date-is-author-date"]
        git(tree, "am", "--quiet", *exact, *map(str, patches))


def _unpack(upstream: Upstream, wheel: Path, tree: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            source = upstream.to_source(member)
            # Beside its Python sources a wheel has libraries, headers and generated stubs.
            if source is not None and member.endswith((".py", ".c")):
                target = tree / source
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(member))


def export_series(upstream: Upstream, directory: Path) -> None:
    """Writes the commits of the work tree after the tag ``upstream`` as the patches of the series."""
    if git(directory, "status", "--porcelain"):
        raise BuildError(f"{directory} has uncommitted changes: commit them to the patch that they belong to")
    if any(directory.glob(".git/rebase-*")):
        raise BuildError(f"{directory} is in the middle of a rebase: finish it")
    if git(directory, "rev-list", "--merges", f"{BASE}..HEAD"):
        raise BuildError(f"{directory} has merge commits, which no patch can hold: rebase them")
    ranges = _ranges(upstream, directory)
    with tempfile.TemporaryDirectory(dir=upstream.root / "patches") as scratch:
        written = {
            series: _write_patches(directory, commits, Path(scratch, series)) for series, commits in ranges.items()
        }
        for series, names in written.items():
            target = upstream.patches / series
            for file in files_of_series(upstream, series):
                file.unlink(missing_ok=True)
            for name in names:
                shutil.copyfile(Path(scratch, series, name), target / name)
            (target / ".patches").write_text("".join(f"{name}\n" for name in names))
    log.info("%s: %s", upstream.patches, ", ".join(f"{len(names)} {series}" for series, names in written.items()))


def _ranges(upstream: Upstream, directory: Path) -> dict[str, str]:
    """Returns the commits of each series, as git names a range."""
    ranges = {}
    start = BASE
    for series in upstream.series:
        end = "HEAD" if series == upstream.series[-1] else f"refs/heads/{series}"
        try:
            for earlier, later in (start, end), (end, "HEAD"):
                git(directory, "merge-base", "--is-ancestor", earlier, later)
        except BuildError:
            raise BuildError(
                f"{directory} has no branch '{series}' between '{start.rpartition('/')[2]}' and HEAD: "
                f"git branch --force {series} LAST_COMMIT_OF_THE_SERIES"
            ) from None
        ranges[series] = f"{start}..{end}"
        start = end
    return ranges


def _write_patches(directory: Path, commits: str, target: Path) -> list[str]:
    """Writes one patch for each commit, named by its subject, and returns the names in order."""
    target.mkdir()
    written = git(
        directory,
        "format-patch",
        "--no-numbered",
        "--no-signature",
        "--no-stat",
        "--no-renames",
        "--zero-commit",
        "--full-index",
        "--subject-prefix=PATCH",
        f"--output-directory={target}",
        commits,
    )
    names: list[str] = []
    for file in map(Path, written.splitlines()):
        name = re.sub(r"^\d+-", "", file.name)
        if name in names:
            raise BuildError(f"two commits would both be {name}: give them different subjects")
        names.append(name)
        file.rename(file.with_name(name))
    return names
