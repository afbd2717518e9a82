"""
Child processes: some are killed together with their own children, others answer requests. Of those that share a machine,
one at a time can have all others stopped while it times something.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import threading
import time
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Between stopping the other processes and timing.
DRAIN_S = 0.2
# Between looks at the clock of a process that may be stopped.
WATCH_S = 0.1
# Between SIGTERM and SIGKILL.
END_S = 10.0


@contextlib.contextmanager
def process_group(command: list[str], output: Any) -> Iterator[subprocess.Popen]:
    """
    Start a command in a group of its own, and end it and the group. A command that starts processes in other groups, as
    torchrun does, ends them if it gets SIGTERM.
    """
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Machine:
    """Stops all processes but one while that one is ``quiet``."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.processes: set[Answering] = set()
        # The process that has the machine to itself, since when, and since when the others have been stopped
        self.quiet: Answering | None = None
        self.since = self.stopped_at = 0.0
        # For how long there was one
        self.stopped_s = 0.0

    def clock(self) -> float:
        """Seconds that go by while no process has the machine to itself."""
        with self.changed:
            return (self.stopped_at if self.quiet else time.monotonic()) - self.stopped_s

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Wait until no process is quiet, and let none become quiet."""
        with self.changed:
            self.changed.wait_for(lambda: self.quiet is None)
            yield

    def begin(self, process: Answering) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.quiet is None)
            self.quiet = process
            self.stopped_at = time.monotonic()
            for other in self.processes - {process}:
                other.signal(signal.SIGSTOP)
        # Kernels that were enqueued end.
        time.sleep(DRAIN_S)
        self.since = time.monotonic()

    def end(self, process: Answering) -> None:
        with self.changed:
            if self.quiet is not process:
                return
            seconds = time.monotonic() - self.since
            process.quiet_s += seconds
            process.spent[process.at] = process.spent.get(process.at, 0.0) + seconds
            self.quiet = None
            self.stopped_s += time.monotonic() - self.stopped_at
            for other in self.processes - {process}:
                other.signal(signal.SIGCONT)
                other.stopped_s += time.monotonic() - self.stopped_at
            self.changed.notify_all()


class Answering:
    """A process that answers lines on stdin with lines of JSON on stdout."""

    # Seconds for which it had the machine to itself, and may have it
    quiet_s = 0.0
    max_quiet_s = math.inf
    # How many seconds an answer may take by the clock of the process
    max_s = math.inf
    # Answers whether there is time for more of the work.
    has_time: Callable[[], bool] = staticmethod(lambda: True)
    # Seconds for which it was stopped
    stopped_s = 0.0

    def __init__(
        self, command: list[str], environment: dict[str, str], errors: Any = None, machine: Machine | None = None
    ) -> None:
        # The work that the process named last, and for how many seconds each work had the machine to itself
        self.at = ""
        self.spent: dict[str, float] = {}
        self.machine = machine or Machine()
        with self.machine.running():
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                # Its children, as compile workers, stop and end with its group.
                start_new_session=True,
            )
            self.machine.processes.add(self)

    def ask(self, question: str, deadline: float) -> dict[str, Any]:
        """The answer, or an object that says why there is none: ``late`` if the deadline ended the process."""
        self.at = ""
        timers = [self._kill_in(deadline - time.monotonic())]
        by, answered = self.clock() + self.max_s, threading.Event()
        if math.isfinite(by):
            threading.Thread(target=self._kill_at, args=(by, answered), daemon=True).start()
        try:
            print(question, file=self.process.stdin, flush=True)
            for line in self.process.stdout:
                answer = json.loads(line)
                if answer.get("quiet"):
                    self.machine.begin(self)
                    timers.append(self._kill_in(self.max_quiet_s - self.quiet_s))
                    # It waits for this line.
                    print(file=self.process.stdin, flush=True)
                elif "quiet" in answer:
                    timers.pop().cancel()
                    self.machine.end(self)
                elif answer.get("asks") == "time":
                    print("yes" if self.has_time() else "no", file=self.process.stdin, flush=True)
                elif "at" in answer:
                    self.at = answer["at"]
                else:
                    return answer
        except (BrokenPipeError, ValueError):
            pass  # it ended, perhaps in the middle of a line
        finally:
            answered.set()
            for timer in timers:
                timer.cancel()
            self.machine.end(self)
        code = self.process.wait()
        is_late = time.monotonic() >= deadline
        if is_late or self.quiet_s >= self.max_quiet_s or self.clock() >= by:
            return {"error": "out of time", "late": is_late}
        return {"error": f"process ended with status {code}"}

    def clock(self) -> float:
        """Seconds that go by while it is not stopped."""
        with self.machine.changed:
            is_stopped = self.machine.quiet not in (None, self)
            return (self.machine.stopped_at if is_stopped else time.monotonic()) - self.stopped_s

    def _kill_at(self, time_of_clock: float, answered: threading.Event) -> None:
        """Kill the process when its clock shows a time, unless it has answered by then."""
        while (left := time_of_clock - self.clock()) > 0:
            # While the process is stopped, its clock stands still. So the time may not have come after the wait.
            if answered.wait(max(left, WATCH_S)):
                return
        self.kill()

    def _kill_in(self, seconds: float) -> threading.Timer:
        timer = threading.Timer(min(max(0.0, seconds), threading.TIMEOUT_MAX), self.kill)
        timer.start()
        return timer

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def close(self) -> None:
        with self.machine.changed:
            self.machine.processes.discard(self)
        self.kill()
        self.process.wait()
        # Closing writes the lines that the process has not read.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
