"""The CUDA driver API, by way of cuda-bindings."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def bindings() -> Any:
    """
    ``cuda.bindings.driver``.

    Raises:
        ImportError: cuda-bindings is not installed. It is a dependency of torch's CUDA
            wheels on Linux; a source build may lack it.
    """
    from cuda.bindings import driver

    return driver


class DriverError(RuntimeError):
    """A driver call failed."""


def check(result: tuple[Any, ...]) -> Any:
    """Unwraps what a ``cuda.bindings`` call returned: one value, a tuple, or None."""
    status, *values = result
    if int(status) != 0:
        raise DriverError(f"CUDA driver: {status.name}")
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)
