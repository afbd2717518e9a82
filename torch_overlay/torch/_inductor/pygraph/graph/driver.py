"""The CUDA driver API, by way of cuda-bindings."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable


@functools.cache
def bindings() -> Any:
    """Return ``cuda.bindings.driver``. Raises ImportError in a source build without cuda-bindings."""
    from cuda.bindings import driver

    return driver


class DriverError(RuntimeError):
    """A driver call failed."""


# The version of the driver's functions that are called by address, and of their structs, as cuda-bindings has them.
API_VERSION = 12000


def entry_point(name: str) -> int:
    """Return the address of a driver function. Raises DriverError if there is none."""
    address, status = check(bindings().cuGetProcAddress(name.encode(), API_VERSION, 0))
    if not address:
        raise DriverError(f"CUDA driver: {name}: {status.name}")
    return int(address)


def function(name: str, *arguments: Any) -> Callable[..., int]:
    """
    Return a driver function that takes arguments of these ctypes, and returns its status. cuda.bindings makes objects of
    what a call returns, which takes several times as long as the call. Raises DriverError if there is none.
    """
    return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(entry_point(name))


def edge_data() -> list[None]:
    """Return what calls that take edges take for their data: nothing before CUDA 13, None for plain edges since."""
    return [None] if bindings().CUDA_VERSION >= 13000 else []


def check(result: tuple[Any, ...]) -> Any:
    """Unwrap what a ``cuda.bindings`` call returned: one value, a tuple, or None."""
    status, *values = result
    if int(status) != 0:
        raise DriverError(f"CUDA driver: {status.name}")
    return tuple(values) if len(values) > 1 else next(iter(values), None)
