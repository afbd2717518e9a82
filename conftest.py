"""For all tests of this repository."""

from __future__ import annotations

import gc
import os

import pytest


# An error while PyGraph describes generated code fails the test. For users the graph is not captured.
os.environ.setdefault("TORCHINDUCTOR_PYGRAPH_STRICT", "1")

FILE = pytest.StashKey[object]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # torch._dynamo.reset collects garbage several times a test. Without this it looks at each object of the imported
    # modules and of earlier files, which takes over half of the time of a test that compiles.
    if item.session.stash.get(FILE, None) != item.path:
        item.session.stash[FILE] = item.path
        gc.unfreeze()
        gc.collect()
        gc.freeze()
