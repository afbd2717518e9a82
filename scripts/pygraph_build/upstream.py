"""The upstream releases that PyGraph is built on, as pinned in ci/upstream.json."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]

# Source tree directory -> directory in the wheel, None for what a wheel has in compiled form only:
# its headers describe the binaries, so they stay those of upstream as well. The longest match wins.
WHEEL_DIRS: dict[str, dict[str, str | None]] = {
    "torch": {
        "torch": "torch",
        "torch/csrc": None,
        "torch/lib": None,
        "torchgen": "torchgen",
        "functorch": "functorch",
    },
    "triton": {
        "python/triton": "triton",
        "third_party/nvidia/backend": "triton/backends/nvidia",
        "third_party/nvidia/language/cuda": "triton/language/extra/cuda",
        "third_party/nvidia/tools/cuda": "triton/tools/extra/cuda",
        "third_party/amd/backend": "triton/backends/amd",
        "third_party/amd/language/hip": "triton/language/extra/hip",
        "third_party/amd/tools/hip": "triton/tools/extra/hip",
        "third_party/proton/proton": "triton/profiler",
    },
}


# The first series that uses the overlay's modules.
OVERLAY_SERIES = "core"


class BuildError(Exception):
    """Something the user can act on; shown as one line."""


@dataclass(frozen=True)
class Upstream:
    name: str
    version: str
    release: str  # the version of what is built from it
    repository: str
    tag: str
    wheels: dict[str, str]  # file name -> sha256
    root: Path  # of this repository
    series: tuple[str, ...]  # those that are applied, in this order
    pins: dict[str, str]  # "name==version" of each upstream -> the same of what replaces it

    @property
    def patches(self) -> Path:
        return self.root / "patches" / self.name

    @property
    def overlay(self) -> Path:
        return self.root / f"{self.name}_overlay"

    @property
    def takes_overlay(self) -> bool:
        """Whether the series that uses the overlay is applied."""
        return OVERLAY_SERIES in self.series

    def to_wheel(self, source: str) -> str | None:
        """Where the wheel has the file of the source tree, None if it cannot have it."""
        return _move(source, WHEEL_DIRS[self.name].items())

    def to_source(self, member: str) -> str | None:
        """Where the source tree has the file of the wheel, None if it was made by the build."""
        dirs = ((there, here) for here, there in WHEEL_DIRS[self.name].items() if there is not None)
        source = _move(member, dirs)
        return source if source is not None and self.to_wheel(source) == member else None


def _move(path: str, dirs) -> str | None:
    inside = [(old, new) for old, new in dirs if path.startswith(old + "/")]
    if not inside:
        return None
    old, new = max(inside, key=lambda pair: len(pair[0]))
    return None if new is None else new + path[len(old) :]


def cache_directory() -> Path:
    """Of what was fetched or compiled."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pygraph"


def load(root: Path = ROOT, last: str | None = None) -> dict[str, Upstream]:
    """Returns the packages that PyGraph changes by name, with the series up to ``last`` or with all.

    A package has the series that it has a directory for. A build that stops early has the name of its
    last series in its version.
    """
    pinned = json.loads((root / "ci" / "upstream.json").read_text())
    label = pinned.pop("release")
    series = (root / "patches" / ".series").read_text().split()
    if last is not None and last not in series:
        raise BuildError(f"there is no series '{last}': patches/.series has {', '.join(series)}")
    if last is not None and last != series[-1]:
        label = f"{label}.{last}"
        series = series[: series.index(last) + 1]
    applied = {name: tuple(each for each in series if (root / "patches" / name / each).is_dir()) for name in pinned}
    pinned = {name: p for name, p in pinned.items() if applied[name]}
    pins = {f"{name}=={p['version']}": f"{name}=={p['version']}+{label}" for name, p in pinned.items()}
    return {
        name: Upstream(name=name, release=f"{p['version']}+{label}", root=root, pins=pins, series=applied[name], **p)
        for name, p in pinned.items()
    }
