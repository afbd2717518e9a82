"""Builds PyGraph: upstream's PyTorch and Triton + patches/ + *_overlay/.

    upstream   what is built on: pinned versions and hashes, where a source file lives in the wheel
    series     the patch series, and the files it and the overlay change
    native     C++ of the overlay -> extension modules
    wheel      upstream wheel -> patched wheel
    overlay    installed package -> patched package, in a directory or in place
    worktree   patch series <-> git work tree, for working on the patches
    source     upstream checkout -> patched wheel, compiled

The standard library is enough for all of it, besides pip to fetch wheels and git to work on patches:
a machine with a GPU often has no package index.
"""

from __future__ import annotations

import sys


if not (3, 10) <= sys.version_info[:2] <= (3, 13):
    sys.exit(f"error: this is Python {sys.version.split()[0]}, PyGraph is for 3.10 to 3.13: use one of those")
