"""Lines of the program, from the stack traces of operators."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from collections.abc import Iterable


_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')
_TORCH = os.path.dirname(torch.__file__)


def _frames(trace: str) -> list[tuple[str, int, str]]:
    """Return (file, line, function) of a stack trace, outermost first, without frames of torch if there are others."""
    frames = [(f, int(line), fn) for f, line, fn in _FRAME.findall(trace)]
    return [f for f in frames if not f[0].startswith(_TORCH + os.sep)] or frames


def innermost(trace: str) -> str:
    """Return the line of the program that a trace ends in: "file:line in function"."""
    frames = _frames(trace)
    if not frames:
        return ""
    file, line, function = frames[-1]
    return f"{file}:{line} in {function}"


def span(traces: Iterable[str | None]) -> str:
    """Return the lines that most of the traces go through in one function: "file:first-last in function"."""
    lines: dict[tuple[str, str], list[int]] = {}
    for trace in traces:
        if frames := _frames(trace or ""):
            file, line, function = frames[0]
            lines.setdefault((file, function), []).append(line)
    if not lines:
        return ""
    (file, function), found = max(lines.items(), key=lambda item: len(item[1]))
    first, last = min(found), max(found)
    where = f"{first}" if first == last else f"{first}-{last}"
    return f"{file}:{where} in {function}"
