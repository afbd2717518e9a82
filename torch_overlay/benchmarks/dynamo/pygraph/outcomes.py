"""
A pytest plugin that writes each test's outcome as it is known, so that a run that is
stopped, or ends with its process, leaves what it found.

    pytest -p pygraph.outcomes --outcomes FILE ...
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TYPE_CHECKING

import pytest

import torch._inductor.config


if TYPE_CHECKING:
    from collections.abc import Generator


SEVERITY = ("passed", "skipped", "failed")


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--outcomes", type=Path, metavar="FILE")


def pytest_configure(config: Any) -> None:
    file = config.getoption("outcomes")
    # The workers of pytest-xdist hand their reports to the main process.
    if file and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writer(file))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, Any, Any]:
    # Some of upstream's tests assign settings that the next ones are not meant to have.
    config = torch._inductor.config
    before = config.get_config_copy()
    try:
        return (yield)
    finally:
        config.load_config(before)


class _Writer:
    def __init__(self, file: Path) -> None:
        self.file = file
        file.write_text("")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._write(report)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._write(report)

    def _write(self, report: Any) -> None:
        details = report.longreprtext.strip() if report.failed else ""
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message.partition("\n")[0] if crash and report.failed else ""
        file, separator, test = report.nodeid.partition("::")
        line = {
            "test": Path(file).name + separator + test,
            "outcome": report.outcome,
            "reason": reason or details.rpartition("\n")[2],
            "details": details,
        }
        with open(self.file, "a") as out:
            print(json.dumps(line), file=out)


def read(file: Path) -> dict[str, dict[str, str]]:
    """The worst outcome of each test: one can pass and fail to clean up."""
    found: dict[str, dict[str, str]] = {}
    if not file.exists():
        return found
    for line in map(json.loads, file.read_text().splitlines()):
        known = found.setdefault(line["test"], line)
        if SEVERITY.index(line["outcome"]) > SEVERITY.index(known["outcome"]):
            found[line["test"]] = line
    return found
