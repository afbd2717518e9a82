from __future__ import annotations

import subprocess

import pytest

from pygraph_build import series, upstream, wheel, worktree
from pygraph_build.upstream import BuildError


UPSTREAMS = upstream.load()


def contents(directory):
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def names(package):
    return [str(file.relative_to(package.patches)) for file in series.patch_files(package)]


@pytest.fixture
def patched(project):
    project.add_patch(
        project.torch,
        "[Inductor] Ünlike: others\n\nReason.",
        {
            "torch/_inductor/windows.py": b"first\r\nother\r\n",
            "torch/_inductor/old.py": b"unused = False",
            "torch/_inductor/added.py": b"",
        },
    )
    project.add_patch(
        project.torch,
        "Second",
        {"torch/_inductor/old.py": None, "torch/_inductor/added.py": b"now = 1\n"},
    )
    return project


def test_import_then_export_changes_nothing(patched):
    before = contents(patched.torch.patches)
    assert names(patched.torch) == ["core/Inductor-nlike-others.patch", "core/Second.patch"]
    tree = patched.root / "again"
    worktree.import_series(patched.torch, patched.wheels["torch"], tree)
    worktree.export_series(patched.torch, tree)
    assert contents(patched.torch.patches) == before


def test_the_work_tree_holds_what_the_wheel_gets(patched):
    tree = patched.root / "trees" / "torch"
    changed = patched.changed_files(patched.torch)
    del changed["torch/version.py"]
    for path, content in changed.items():
        assert (tree / path).exists() == (content is not None)
        assert content is None or (tree / path).read_bytes() == content


def test_export_drops_and_renames_patches(patched):
    tree = patched.root / "trees" / "torch"
    subprocess.run(["git", "reset", "--quiet", "--hard", "HEAD~1"], cwd=tree, check=True)
    patched.commit(tree, "Other", {"torch/_inductor/old.py": None})
    worktree.export_series(patched.torch, tree)
    exported = ["core/Inductor-nlike-others.patch", "core/Other.patch"]
    assert names(patched.torch) == exported
    assert sorted(contents(patched.torch.patches)) == ["core/.patches", *exported, "fixes/.patches"]


def test_a_patch_moves_to_another_series(patched):
    """Rebasing takes the branches along, and the series end where their branches are."""
    tree = patched.root / "trees" / "torch"
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=tree)
    subprocess.run(["git", "branch", "--force", "fixes", "HEAD~1"], cwd=tree, check=True)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    amend = f"git {' '.join(identity)} commit --quiet --amend --no-edit --date=now"
    rebase = ["git", *identity, "rebase", "--quiet", "--exec", amend, "upstream"]
    subprocess.run(rebase, cwd=tree, check=True, capture_output=True)
    assert subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=tree) != head
    worktree.export_series(patched.torch, tree)
    assert names(patched.torch) == ["fixes/Inductor-nlike-others.patch", "core/Second.patch"]
    again = patched.root / "again"
    worktree.import_series(patched.torch, patched.wheels["torch"], again)
    assert subprocess.check_output(["git", "log", "--format=%s", "upstream..fixes"], cwd=again, text=True) == (
        "[Inductor] Ünlike: others\n"
    )


def test_export_needs_the_end_of_each_series(patched):
    tree = patched.root / "trees" / "torch"
    before = contents(patched.torch.patches)
    subprocess.run(["git", "branch", "--quiet", "--delete", "--force", "fixes"], cwd=tree, check=True)
    with pytest.raises(BuildError, match="has no branch 'fixes' between 'upstream' and HEAD: git branch --force"):
        worktree.export_series(patched.torch, tree)
    assert contents(patched.torch.patches) == before


def test_the_user_configuration_does_not_show(patched, monkeypatch):
    before = contents(patched.torch.patches)
    config = patched.root / "gitconfig"
    config.write_text("[diff]\n\tnoprefix = true\n[format]\n\tsignature = me\n[core]\n\tautocrlf = true\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    tree = patched.root / "again"
    worktree.import_series(patched.torch, patched.wheels["torch"], tree)
    worktree.export_series(patched.torch, tree)
    assert contents(patched.torch.patches) == before


def test_a_checkout_takes_patches_to_files_that_no_wheel_has(project):
    checkout = project.root / "checkout"
    checkout.mkdir()
    subprocess.run(["git", "init", "--quiet"], cwd=checkout, check=True)
    project.commit(checkout, "Release", {"lib/Target/LLVMIR.cpp": b"int a;\n"})
    subprocess.run(["git", "tag", project.triton.tag], cwd=checkout, check=True)
    tree = project.root / "tree"
    worktree.import_series(project.triton, checkout, tree)
    project.commit(tree, "Rewrite parameters", {"lib/Target/LLVMIR.cpp": b"int b;\n"})
    worktree.export_series(project.triton, tree)
    before = contents(project.triton.patches)
    again = project.root / "again"
    worktree.import_series(project.triton, checkout, again)
    worktree.export_series(project.triton, again)
    assert (again / "lib/Target/LLVMIR.cpp").read_bytes() == b"int b;\n"
    assert contents(project.triton.patches) == before
    assert project.changed_files(project.triton) == {}
    with pytest.raises(BuildError, match="has no lib/Target/LLVMIR.cpp, which a patch changes: use --source CHECKOUT"):
        worktree.import_series(project.triton, project.wheels["triton"], project.root / "third")


def test_export_refuses_what_no_patch_would_hold(patched):
    tree = patched.root / "trees" / "torch"
    before = contents(patched.torch.patches)
    (tree / "torch/_inductor/added.py").write_text("later = 1\n")
    with pytest.raises(BuildError, match="uncommitted changes"):
        worktree.export_series(patched.torch, tree)
    patched.commit(tree, "Second", {})
    with pytest.raises(BuildError, match=r"two commits would both be Second\.patch"):
        worktree.export_series(patched.torch, tree)
    assert contents(patched.torch.patches) == before


def test_export_waits_for_the_end_of_a_rebase(patched):
    tree = patched.root / "trees" / "torch"
    rebase = ["git", "-c", "sequence.editor=sed -i 1s/pick/edit/", "rebase", "--quiet", "--interactive", "upstream"]
    subprocess.run(rebase, cwd=tree, check=True, capture_output=True)
    with pytest.raises(BuildError, match="in the middle of a rebase"):
        worktree.export_series(patched.torch, tree)


def test_import_leaves_nothing_when_a_patch_does_not_apply(patched):
    patch = patched.torch.patches / "core" / "Second.patch"
    patch.write_text(patch.read_text().replace("-unused = False", "-unused = Other"))
    with pytest.raises(BuildError, match="git am failed.*old.py") as error:
        worktree.import_series(patched.torch, patched.wheels["torch"], patched.root / "again")
    assert "\n" not in str(error.value)
    assert not (patched.root / "again").exists()


def test_import_keeps_a_directory_that_exists(patched):
    with pytest.raises(BuildError, match="exists already"):
        worktree.import_series(patched.torch, patched.wheels["torch"], patched.root / "trees" / "torch")


def test_import_refuses_part_of_a_wheel(patched):
    wheel = patched.root / "part.whl"
    wheel.write_bytes(patched.wheels["torch"].read_bytes()[:1000])
    with pytest.raises(BuildError, match="part.whl is no whole wheel"):
        worktree.import_series(patched.torch, wheel, patched.root / "again")
    assert not (patched.root / "again").exists()


def test_without_git(project, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BuildError, match="git is needed"):
        project.work_tree(project.torch)
    assert not (project.root / "trees" / "torch").exists()


@pytest.mark.parametrize("package", UPSTREAMS.values(), ids=list(UPSTREAMS))
def test_the_series_of_this_repository(package, tmp_path, monkeypatch):
    """It applies with git am to upstream's files, and import then export changes nothing."""
    # What is compiled is in no wheel: patches to it need upstream's checkout.
    compiled = {change.patch for change in series.read_series(package) if package.to_wheel(change.path) is None}
    copied = upstream.Upstream(**{**vars(package), "root": tmp_path})
    for each in package.series:
        kept = [f for f in series.files_of_series(package, each) if str(f.relative_to(package.root)) not in compiled]
        (copied.patches / each).mkdir(parents=True)
        for file in kept:
            (copied.patches / each / file.name).write_bytes(file.read_bytes())
        (copied.patches / each / ".patches").write_text("".join(f"{file.name}\n" for file in kept))
    before = contents(copied.patches)
    tree = tmp_path / "tree"
    worktree.import_series(copied, wheel.fetch(package), tree)
    worktree.export_series(copied, tree)
    assert contents(copied.patches) == before
