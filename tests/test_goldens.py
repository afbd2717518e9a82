"""What PyGraph generates, reports and decides is what goldens.json says, but for what listed patches change."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pygraph_build.message import read_message
from pygraph_build.upstream import ROOT


pytest.importorskip("torch._inductor.pygraph")

HERE = Path(__file__).resolve().parent
GOLDENS = HERE / "data" / "goldens.json"

sys.path.insert(0, str(HERE))

import goldens  # noqa: E402


KINDS = (
    "^program/00",
    "^(selection|prelude)",
    "^model/[ab]",
    "^record/00",
    "^program/0[^0]",
    "^model/[^ab]",
    "^record/0[^0]",
)
# The rest takes minutes: PYGRAPH_GOLDENS=all compares it too.
SAMPLE = KINDS[:4]


@pytest.fixture(scope="module")
def golden() -> dict:
    return json.loads(GOLDENS.read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_differs_but_what_is_allowed(kind: str, tmp_path: Path) -> None:
    if kind not in SAMPLE and os.environ.get("PYGRAPH_GOLDENS") != "all":
        pytest.skip("PYGRAPH_GOLDENS=all compares these")
    # A process for each kind: what others compiled or patched is not there.
    command = [sys.executable, HERE / "goldens.py", "--check", GOLDENS, "--only", kind]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert found.returncode == 0, f"{found.stdout[-10_000:]}\n{found.stderr[-2_000:]}"


def test_every_entry_is_compared(golden: dict) -> None:
    assert [*golden["entries"]] == goldens.names_of(golden["programs"])
    assert all(sum(bool(re.search(kind, name)) for kind in KINDS) == 1 for name in golden["entries"])


def test_only_patches_are_allowed_to_change_code(golden: dict) -> None:
    patches = {read_message(file).subject: file.parent.name for file in (ROOT / "patches" / "torch").glob("*/*.patch")}
    assert {*golden["allowed"], *goldens.CHANGED} <= {*patches}
    # Off is stock plus fixes.
    for patch, differences in golden["allowed"].items():
        off = [place for _, place, *_ in differences if "[plain]" in place or "[stock]" in place]
        assert not off or patches[patch] == "fixes"


def test_a_difference_is_found_once_and_explained_once() -> None:
    old = {"code": {"stock": ["1", "2"]}, "structure": {"reports": [[1, ["aten.add"]]]}, "reasons": ["SLOWER"]}
    new = {"code": {"stock": ["1", "3"]}, "structure": {"reports": [[2, ["aten.add"]]]}, "reasons": ["SLOWER", "X"]}
    assert goldens.differences("model/a", old, old) == []
    found = goldens.differences("model/a", old, new)
    assert found == [
        ["model/a", "code[stock][1]", "2", "3"],
        ["model/a", "structure[reports][0][0]", 1, 2],
        ["model/a", "reasons", ["SLOWER"], ["SLOWER", "X"]],
    ]
    other = ["model/a", "code[stock][0]", "1", "0"]
    assert goldens.unexplained(found, [found[0], other]) == (found[1:], [other])


def test_code_before_a_listed_change_is_had_again() -> None:
    before = "from torch._inductor.pygraph.deliver import Deliver\ndef partition_0(args):\n    buf1 = buf0; del buf0  # reuse\n"
    before += "    f(torch._inductor.pygraph.g)\n"
    after = (
        "from torch._inductor.pygraph.values.deliver import Deliver\n"
        "def partition_0(args, empty_strided_cuda=empty_strided_cuda, note_call=None, branches=None):\n"
        "    if note_call is None or note_call.reuses: buf1 = buf0; del buf0  # reuse\n"
        "    else: del buf0; buf1 = empty_strided_cuda((4, ), (1, ), torch.float32)\n"
        "    if note_call is not None: note_call(0, buf1)\n"
        "    f(torch._inductor.pygraph.values.g)\n"
        "runner.objects = {'deliver_buf0': deliver_buf0}\n"
    )
    assert goldens.normalized(before) == goldens.normalized(after)
    assert goldens.normalized(before) == "from pygraph import Deliver\ndef partition_0(args):\n    buf1 = buf0; del buf0  # reuse\n    f(pygraph.g)\n"
    assert goldens.normalized("#include </a/b/cpp_prefix.h>\n") == "#include <cpp_prefix.h>\n"
