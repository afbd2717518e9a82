"""A modelled H200 for the tests and programs of the pull requests, where there is no GPU.

    python -m pytest -p modelled_gpu TEST_FILE
    python modelled_gpu.py PROGRAM

Inductor generates the code that it generates for a GPU. Nothing is launched, so tensors have no
values. On a machine with a GPU the tests and programs use that GPU.
"""

from __future__ import annotations

import contextlib
import functools
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal import inductor_utils
from torch.testing._internal.fake_cuda import fake_cuda


@contextlib.contextmanager
def modelled_gpu() -> Iterator[None]:
    # A result whose size depends on values gets a symbol for that size.
    init = FakeTensorMode.__init__
    shape_env = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)

    @functools.wraps(init)
    def with_shape_env(mode: FakeTensorMode, *args: Any, **kwargs: Any) -> None:
        init(mode, *args, **({"shape_env": shape_env} | kwargs))

    with mock.patch.object(FakeTensorMode, "__init__", with_shape_env):
        model = fake_cuda()
        model.__enter__()
    try:
        yield
    finally:
        model.__exit__(None, None, None)


def needs_gpu(module: ModuleType) -> bool:
    return hasattr(module, "HAS_CUDA_AND_TRITON")


def pytest_configure() -> None:
    if not torch.cuda.is_available():
        # Tests ask for them when they are imported.
        inductor_utils.HAS_CUDA_AND_TRITON = inductor_utils.HAS_MULTIGPU = True


@pytest.fixture(autouse=True)
def gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    modelled = needs_gpu(request.module) and not torch.cuda.is_available()
    with modelled_gpu() if modelled else contextlib.nullcontext():
        yield


if __name__ == "__main__":
    on_gpu = 'device="cuda' in Path(sys.argv[1]).read_text()
    with modelled_gpu() if on_gpu and not torch.cuda.is_available() else contextlib.nullcontext():
        runpy.run_path(sys.argv[1], run_name="__main__")
