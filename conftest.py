"""For all tests of this repository."""

from __future__ import annotations

import gc

import pytest


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
