from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from pygraph_build import series, upstream, worktree
from pygraph_build.series import ABSENT, blob_id, changed_files
from pygraph_build.upstream import BuildError


UPSTREAMS = upstream.load()

lines = st.lists(st.sampled_from([b"a\n", b"b\n", b"c\r\n", b"-d\n", b"+e\n", b"@@ -1 +1 @@\n", b"\n", b"\\ f\n"]))
contents = st.builds(lambda body, end: b"".join(body) + end, lines, st.sampled_from([b"", b"no newline"]))


@settings(max_examples=60, deadline=None)
@given(contents, contents)
def test_a_patch_applies_as_git_does(old, new):
    with tempfile.TemporaryDirectory() as directory:
        for name, content in ("old", old), ("new", new):
            Path(directory, name).write_bytes(content)
        git = ["git", "diff", "--no-index", "--full-index", "--unified=1", "old", "new"]
        diff = subprocess.run(git, cwd=directory, capture_output=True).stdout
    if old == new:
        return
    diff = re.sub(rb"\Adiff --git .*\n", b"diff --git a/torch/f.py b/torch/f.py\n", diff)
    (change,) = series.read_patch("p", diff)
    assert (change.before, change.after) == (blob_id(old), blob_id(new))
    assert change.apply(old) == new


def test_added_changed_and_deleted_files(project):
    project.add_patch(
        project.torch,
        "Record without copies\n\nCopies are slow.",
        {
            "torch/_inductor/cudagraph_trees.py": b"def record():\n    capture()\n",
            "torch/_inductor/windows.py": b"first\r\nother\r\n",
            "torch/_inductor/old.py": None,
            "torch/_inductor/added.py": b"",
        },
    )
    project.add_patch(project.torch, "Record twice", {"torch/_inductor/cudagraph_trees.py": b"def record():\n"})
    project.add_overlay(project.torch, "torch/_inductor/pygraph/__init__.py")
    changed = project.changed_files(project.torch)
    assert changed == {
        "torch/_inductor/cudagraph_trees.py": b"def record():\n",
        "torch/_inductor/windows.py": b"first\r\nother\r\n",
        "torch/_inductor/old.py": None,
        "torch/_inductor/added.py": b"",
        "torch/_inductor/pygraph/__init__.py": b"new = True\n",
        "torch/version.py": b"__version__ = '2.11.0+pygraph.1'\ncuda = '13.0'\n",
    }


def test_triton_paths_are_mapped(project):
    project.add_patch(
        project.triton,
        "Stage",
        {
            "third_party/nvidia/backend/compiler.py": b"stages = [1]\n",
            "third_party/nvidia/backend/driver.c": b"int launch(int);\n",
            "python/triton/__init__.py": b"__version__ = '3.6.0'\nnew = 1\n",
        },
    )
    project.add_overlay(project.triton, "python/triton/runtime/indirect.py")
    project.add_overlay(project.triton, "lib/Target/LLVMIR/ParamIndirection.cpp")
    project.add_overlay(project.triton, "test/LLVMIR/param-indirection.mlir")
    assert sorted(project.changed_files(project.triton)) == [
        "triton/__init__.py",
        "triton/backends/nvidia/compiler.py",
        "triton/backends/nvidia/driver.c",
        "triton/runtime/indirect.py",
    ]


def test_what_is_not_in_the_wheel_is_left_out(project, caplog):
    patch = project.torch.patches / "core" / "native.patch"
    sections = []
    for path in ("torch/csrc/cuda/Graph.cpp", "test/inductor/test_a.py", "torch/CMakeLists.txt"):
        sections.append(
            f"diff --git a/{path} b/{path}\nindex {'1' * 40}..{'2' * 40} 100644\n--- a/{path}\n+++ b/{path}\n"
            "@@ -1 +1 @@\n-a\n+b\n"
        )
    patch.write_text("".join(sections))
    (project.torch.patches / "core" / ".patches").write_text("native.patch\n")
    project.add_overlay(project.torch, "test/inductor/test_pygraph.py")
    with caplog.at_level("DEBUG"):
        assert list(project.changed_files(project.torch)) == ["torch/version.py"]
    assert caplog.text.count("has no place in the wheel") == 4


def test_a_patch_for_another_file_is_refused(project):
    project.add_patch(project.torch, "Old", {"torch/_inductor/old.py": b"used = True\n"})
    with pytest.raises(BuildError) as error:
        changed_files(project.torch, lambda member: b"something else\n")
    assert str(error.value) == (
        "patches/torch/core/Old.patch does not apply: torch/_inductor/old.py is not the file it was made for"
    )


def test_a_damaged_patch_is_refused(project):
    project.add_patch(project.torch, "Old", {"torch/_inductor/old.py": b"used = True\n"})
    patch = project.torch.patches / "core" / "Old.patch"
    patch.write_text(patch.read_text().replace("+used", "+abused"))
    with pytest.raises(BuildError, match=r"Old\.patch is damaged: torch/_inductor/old\.py"):
        project.changed_files(project.torch)


def test_a_patch_of_another_making_is_refused(project):
    (project.torch.patches / "core" / "a.patch").write_text("diff --git a/torch/a.py b/torch/a.py\nindex 12..34\n")
    (project.torch.patches / "core" / ".patches").write_text("a.patch\n")
    with pytest.raises(BuildError, match="export it again"):
        project.changed_files(project.torch)


def test_a_missing_patch_is_refused(project):
    (project.torch.patches / "core" / ".patches").write_text("gone.patch\n")
    with pytest.raises(BuildError, match=r"gone\.patch is missing"):
        project.changed_files(project.torch)


@pytest.mark.parametrize("path", ["torch/_inductor/old.py", "torch/_inductor/added.py"])
def test_an_overlay_adds_files_only(project, path):
    project.add_patch(project.torch, "Add", {"torch/_inductor/added.py": b"1\n"})
    project.add_overlay(project.torch, path)
    with pytest.raises(BuildError, match=f"torch_overlay/{path} exists in upstream"):
        project.changed_files(project.torch)


@pytest.mark.parametrize(
    "package, source, member",
    [
        ("torch", "torch/_inductor/config.py", "torch/_inductor/config.py"),
        ("torch", "torchgen/model.py", "torchgen/model.py"),
        ("torch", "torch/csrc/cuda/Graph.cpp", None),
        ("torch", "aten/src/ATen/cuda/CUDAGraph.cpp", None),
        ("torch", "test/inductor/test_cudagraph_trees.py", None),
        ("triton", "python/triton/knobs.py", "triton/knobs.py"),
        ("triton", "python/src/llvm.cc", None),
        ("triton", "third_party/nvidia/backend/driver.c", "triton/backends/nvidia/driver.c"),
        ("triton", "third_party/nvidia/language/cuda/libdevice.py", "triton/language/extra/cuda/libdevice.py"),
        ("triton", "third_party/amd/backend/compiler.py", "triton/backends/amd/compiler.py"),
        ("triton", "third_party/proton/proton/hook.py", "triton/profiler/hook.py"),
        ("triton", "third_party/nvidia/lib/Dialect/a.cpp", None),
    ],
)
def test_where_a_source_file_is_in_the_wheel(package, source, member):
    assert UPSTREAMS[package].to_wheel(source) == member
    if member is not None:
        assert UPSTREAMS[package].to_source(member) == source


@pytest.mark.parametrize("member", ["torch/lib/libtorch.so", "torch-2.11.0.dist-info/RECORD"])
def test_what_the_build_makes_has_no_source(member):
    assert UPSTREAMS["torch"].to_source(member) is None


def add_fix(project, content: bytes) -> None:
    """Adds a patch at the end of the series 'fixes', below that of 'core'."""
    tree = project.root / "trees" / "torch"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "rebase.updateRefs=true"]
    subprocess.run([*git, "checkout", "--quiet", "fixes"], cwd=tree, check=True)
    project.commit(tree, "Fix", {"torch/_inductor/windows.py": content})
    subprocess.run([*git, "checkout", "--quiet", "pygraph"], cwd=tree, check=True)
    subprocess.run([*git, "rebase", "--quiet", "fixes"], cwd=tree, check=True)
    worktree.export_series(project.torch, tree)


def test_a_build_that_stops_after_a_series(project):
    project.add_patch(project.torch, "Record", {"torch/_inductor/cudagraph_trees.py": b"recorded = 1\n"})
    add_fix(project, b"fixed\r\n")
    project.add_overlay(project.torch, "torch/_inductor/pygraph/__init__.py")
    project.add_overlay(project.torch, "torch/testing/_internal/fake_cuda.py")
    whole = upstream.load(project.root)["torch"]
    assert [str(f.relative_to(whole.patches)) for f in series.patch_files(whole)] == [
        "fixes/Fix.patch",
        "core/Record.patch",
    ]
    assert upstream.load(project.root, "core")["torch"] == whole
    # Triton has no series that comes as early.
    (fixes,) = upstream.load(project.root, "fixes").values()
    assert fixes.pins == {"torch==2.11.0": "torch==2.11.0+pygraph.1.fixes"}
    assert project.changed_files(fixes) == {
        "torch/_inductor/windows.py": b"fixed\r\n",
        "torch/testing/_internal/fake_cuda.py": b"new = True\n",
        "torch/version.py": b"__version__ = '2.11.0+pygraph.1.fixes'\ncuda = '13.0'\n",
    }


def test_a_series_that_there_is_not(project):
    with pytest.raises(BuildError, match="there is no series 'fixed': patches/.series has fixes, core"):
        upstream.load(project.root, "fixed")


@pytest.mark.parametrize("package", UPSTREAMS.values(), ids=list(UPSTREAMS))
def test_the_series_of_this_repository(package):
    assert sorted(series.patch_files(package)) == sorted(package.patches.rglob("*.patch"))
    content: dict[str, str] = {}
    for change in series.read_series(package):
        assert content.setdefault(change.path, change.before) == change.before, f"{change.patch}: {change.path}"
        content[change.path] = change.after


def test_absent_files_have_gits_id():
    assert blob_id(None) == ABSENT
    assert blob_id(b"") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
