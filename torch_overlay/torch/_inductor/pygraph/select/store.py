"""
Decisions of earlier processes, in files beside Inductor's caches, so that the next process deploys a function without
measuring. A file's name is a hash of the generated code and of what it was measured with (versions, driver, CPU). Keys
of Inductor's caches would not do: graphs that differ in their guards share one, and a graph that cannot be cached has
none.

A decision says what to try first. A wrong one costs time and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import os
import platform
from pathlib import Path
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor import config
from torch._inductor.codecache import torch_key, write_atomic
from torch._inductor.pygraph.capture import agreement
from torch._inductor.pygraph.types.candidate import Candidate
from torch._inductor.pygraph.types.reason import first_line, Reason
from torch._inductor.pygraph.types.report import as_json
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.runtime.triton_compat import HAS_TRITON, triton_key


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch._inductor.pygraph.types.function import FunctionSpec
    from torch._inductor.utils import InputType


log = logging.getLogger(__name__)


def is_enabled() -> bool:
    """Return whether decisions are kept: the next process has the same code only from Inductor's local cache."""
    return bool(config.fx_graph_cache) and not config.force_disable_caches


@dataclasses.dataclass(frozen=True)
class Decision:
    """A candidate, why it was chosen, and the measured microseconds per call."""

    choice: str
    reasons: list[Reason]
    timings_us: dict[str, float]


class Entry:
    """The file of the decision on what ``function`` identifies."""

    def __init__(self, directory: Path, function: dict[str, Any]) -> None:
        key = hashlib.sha256(json.dumps(function, sort_keys=True).encode()).hexdigest()
        self.path = directory / key[:2] / f"{key}.json"
        self.function = function

    def load(self) -> Decision | None:
        try:
            kept = json.loads(self.path.read_bytes())
            reasons = [Reason.from_json(reason) for reason in kept["reasons"]]
            timings_us = {str(k): float(v) for k, v in kept["timings_us"].items()}
            return Decision(str(Candidate.parse(kept["choice"])), reasons, timings_us)
        except FileNotFoundError:
            pass
        except Exception as e:
            # The file must not fail the program, whatever it holds.
            log.info("ignoring the decision in %s: %s", self.path, first_line(f"{type(e).__name__}: {e}"))
        return None

    def save(self, decision: Decision) -> None:
        # People can read what it is of.
        content = {"function": self.function, **vars(decision)}
        try:
            # By a rename, so that other processes see all of it or nothing.
            write_atomic(str(self.path), json.dumps(content, indent=1, default=as_json), make_dirs=True)
        except OSError as e:
            log.info("the decision cannot be kept in %s: %s", self.path, e)


def entry_for(spec: FunctionSpec, inputs: Sequence[InputType], static_input_idxs: Iterable[int]) -> Entry | None:
    """Return the entry of a function, given inputs of a call, None if decisions on it are not kept."""
    if spec.info.code_hash is None:
        return None
    try:
        directory = Path(cache_dir())
    except OSError as e:
        log.info("decisions are not kept: %s", e)
        return None
    device = torch.cuda.get_device_properties(spec.device_index)
    described = [_describe(t) for t in inputs]
    static = sorted(static_input_idxs)
    function = {
        "code": spec.info.code_hash,
        "name": spec.info.name,
        "mode": spec.mode,
        "inputs": hashlib.sha256(json.dumps([described, static]).encode()).hexdigest(),
        "device": device.name,
        "capability": f"{device.major}.{device.minor}",
        "tag": torch.compiler.config.cache_key_tag,
        "torch": torch_key().hex(),
        "triton": triton_key() if HAS_TRITON else None,
        "driver": _driver(),
        "CPU": _cpu(),
        # Replays take longer with these settings.
        "debugging": [
            os.environ.get("CUDA_LAUNCH_BLOCKING", "0"),
            config.triton.force_cudagraph_sync,
            config.triton.fast_path_cudagraph_asserts,
        ],
    }
    if spec.info.groups:
        function["ranks"] = agreement.sizes(spec.info.groups)
    return Entry(directory / "pygraph", function)


def _describe(value: InputType) -> Any:
    if isinstance(value, torch.Tensor):
        size, stride = list(value.shape), list(value.stride())
        return str(value.dtype), value.device.type, size, stride
    return value if isinstance(value, int) else type(value).__name__


@functools.cache
def _first_line(path: str, start: str) -> str | None:
    try:
        with open(path) as f:
            return next((line.strip() for line in f if line.startswith(start)), None)
    except OSError:
        return None


def _driver() -> str:
    line = _first_line("/proc/driver/nvidia/version", "NVRM")
    # The runtime knows only which CUDA version the driver supports.
    return line or str(torch._C._cuda_getDriverVersion())


def _cpu() -> str:
    # The CPU launches kernels that are not in a graph.
    return _first_line("/proc/cpuinfo", "model name") or platform.machine()
