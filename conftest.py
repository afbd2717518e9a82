"""For all tests of this repository."""

from __future__ import annotations

import gc

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    # torch._dynamo.reset collects garbage several times a test. Without this it looks at each object of the imported
    # modules, which takes over a third of the time of a test that compiles.
    gc.collect()
    gc.freeze()
