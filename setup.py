"""Builds a PyGraph wheel: ``pip wheel .`` or ``python setup.py bdist_wheel``.

Environment variables:

    PYGRAPH_PACKAGE=torch|triton
        which wheel: one build makes one, torch by default. scripts/build makes both.

    PYGRAPH_SOURCE=DIRECTORY
        compile upstream's checkout in DIRECTORY, at the pinned tag and with its submodules, with
        cmake and ninja, as the Dockerfile does. By default upstream's wheel is patched.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent / "scripts"))

from pygraph_build import source, upstream, wheel
from pygraph_build.upstream import BuildError


try:
    from setuptools import setup
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:
    sys.exit("error: setuptools >= 70.1 is needed: python -m pip install 'setuptools>=70.1,<82'")


upstreams = upstream.load()
name = os.environ.get("PYGRAPH_PACKAGE", "torch")
if name not in upstreams:
    sys.exit(f"error: PYGRAPH_PACKAGE is {name!r}, it must be one of {', '.join(upstreams)}")
package = upstreams[name]


class BuildWheel(bdist_wheel):
    def run(self) -> None:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        checkout = os.environ.get("PYGRAPH_SOURCE")
        dist_dir = Path(self.dist_dir)
        try:
            if checkout:
                source.build(package, Path(checkout), dist_dir)
            else:
                wheel.build(package, wheel.fetch(package), dist_dir)
        except (BuildError, OSError) as error:
            sys.exit(f"error: {error}")


# At the root, its entry points would hide those of the installed triton.
egg_base = Path(__file__).parent / "build"
egg_base.mkdir(exist_ok=True)

setup(
    options={"egg_info": {"egg_base": str(egg_base)}},
    name=package.name,
    version=package.release,
    packages=[],
    cmdclass={"bdist_wheel": BuildWheel},
)
