"""What the scripts share: progress on stderr, and an error as one line."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable

from .upstream import BuildError


def main(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], None]) -> None:
    parser.add_argument("-v", "--verbose", action="store_true", help="name what has no place in a wheel")
    args = parser.parse_args()
    logging.basicConfig(level=logging.DEBUG if args.verbose else logging.INFO, format="%(message)s")
    try:
        run(args)
    except (BuildError, OSError) as error:
        sys.exit(f"error: {error}")
