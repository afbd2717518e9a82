"""Child processes that end with all that they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def process_group(command: list[str], output: Any) -> Iterator[subprocess.Popen]:
    """Start a command in a group of its own, and kill the group at the end."""
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
