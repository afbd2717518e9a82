"""Child processes: some are killed together with their own children, others answer requests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
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


class Answering:
    """A process that answers lines on stdin with lines of JSON on stdout."""

    def __init__(self, command: list[str], environment: dict[str, str], errors: Any = None) -> None:
        # The work that the process named last
        self.at = ""
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            # Its children, as compile workers, end with its group.
            start_new_session=True,
        )

    def ask(self, question: str, deadline: float) -> dict[str, Any]:
        """The answer, or an object that says why there is none."""
        self.at = ""
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), self.kill)
        timer.start()
        try:
            print(question, file=self.process.stdin, flush=True)
            for line in self.process.stdout:
                answer = json.loads(line)
                if "at" not in answer:
                    return answer
                self.at = answer["at"]
        except (BrokenPipeError, ValueError):
            pass  # it ended, perhaps in the middle of a line
        finally:
            timer.cancel()
        code = self.process.wait()
        if time.monotonic() >= deadline:
            return {"error": "out of time", "late": True}
        return {"error": f"process ended with status {code}"}

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
