"""python -m torch._inductor.pygraph.report: what a finished run did, and why."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from torch._inductor.pygraph.report.html import render
from torch._inductor.pygraph.report.trace import load


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m torch._inductor.pygraph.report", description=__doc__)
    parser.add_argument("run", type=Path, help="directory or log that TORCH_TRACE wrote, or a file with Report.json()")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page instead of text")
    args = parser.parse_args()
    try:
        reports = load(args.run)
        if args.html is not None:
            args.html.write_text(render(reports), encoding="utf-8")
            return
    except (OSError, ValueError) as e:
        parser.exit(1, f"{e}\n")
    width = min(shutil.get_terminal_size((88, 24)).columns, 100)
    print("\n\n".join(report.text(width) for report in reports))


if __name__ == "__main__":
    main()
