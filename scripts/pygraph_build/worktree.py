"""Working on the patches: the series as commits of a git work tree, and back."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path

from .series import ABSENT, patch_names, read_series
from .upstream import BuildError, Upstream


log = logging.getLogger(__name__)

# The tag on the commit that holds upstream's files; what follows it is the series.
BASE = "upstream"


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
            git(tree, "checkout", "--quiet", "-B", "pygraph", upstream.tag)
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
            git(tree, "init", "--quiet", "--initial-branch=pygraph")
            git(tree, "add", "--all", "--force")
            git(tree, "commit", "--quiet", "--message", f"{upstream.name} {upstream.version}")
        git(tree, "tag", "--force", BASE)
        apply_series(upstream, tree)
        tree.rename(directory)
    log.info("%s: %d patches on tag '%s'", directory, len(patch_names(upstream)), BASE)


def apply_series(upstream: Upstream, tree: Path) -> None:
    patches = [str(upstream.patches / name) for name in patch_names(upstream)]
    if patches:
        exact = ["--keep-cr", "--quoted-cr=nowarn", "--keep-non-patch", "--committer-date-is-author-date"]
        git(tree, "am", "--quiet", *exact, *patches)


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
    """Writes the commits of the work tree after the tag ``upstream`` as the patch series."""
    if git(directory, "status", "--porcelain"):
        raise BuildError(f"{directory} has uncommitted changes: commit them to the patch that they belong to")
    if any(directory.glob(".git/rebase-*")):
        raise BuildError(f"{directory} is in the middle of a rebase: finish it")
    if git(directory, "rev-list", "--merges", f"{BASE}..HEAD"):
        raise BuildError(f"{directory} has merge commits, which no patch can hold: rebase them")
    with tempfile.TemporaryDirectory(dir=upstream.patches.parent) as scratch:
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
            f"--output-directory={scratch}",
            f"{BASE}..HEAD",
        )
        names = []
        for file in map(Path, written.splitlines()):
            name = re.sub(r"^\d+-", "", file.name)
            if name in names:
                raise BuildError(f"two commits would both be {name}: give them different subjects")
            names.append(name)
            file.rename(file.with_name(name))
        series = Path(scratch, ".patches")
        series.write_text("".join(f"{name}\n" for name in names))
        for name in set(patch_names(upstream)) - set(names):
            (upstream.patches / name).unlink(missing_ok=True)
        for name in [*names, series.name]:
            shutil.copyfile(Path(scratch, name), upstream.patches / name)
    log.info("%s: %d patches", upstream.patches, len(names))
