"""
How close a replay is to a bare launch: the suite replay.

    python -m pygraph.replay --output rows.json [--cases a,b] [--budget 120]

What ``layers`` measures, as rows that say what each case must show: a share of the time that stock CUDA graphs take in
the same run.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, TYPE_CHECKING

import torch

from .case import TOLERANCE
from .compare import compare, Difference, snapshot
from .layers import CASES, LAYERS, measure, VARIANTS
from .report import format_table, write_rows
from .worker import summary


if TYPE_CHECKING:
    from collections.abc import Callable

    from .layers import Case
    from .report import Row

    # Of a variant: microseconds of each layer, "host" and "total".
    Times = dict[str, float]

log = logging.getLogger(__name__)

# Enough to select, record, and replay through each path.
CHECKED_CALLS = 24
# The graph that the other two of three_graphs are like.
ONE_GRAPH = "linear_relu"


@dataclass(frozen=True)
class Must:
    """``limit`` as a share of what stock takes."""

    what: str
    value: Callable[[Times], float]
    limit: float


def _trees_and_below(times: Times) -> float:
    return sum(times.get(layer, 0.0) for layer in LAYERS[LAYERS.index("trees") :])


MUSTS = {
    "linear_relu": (
        Must("a call", itemgetter("total"), 0.39),
        Must("trees and below, with the launch", _trees_and_below, 0.33),
    ),
    "pointwise_16x4MiB": (Must("a call", itemgetter("total"), 0.48),),
    "pointwise_2x4KiB": (Must("a call", itemgetter("total"), 0.4),),
    "mlp_20": (Must("a call", itemgetter("total"), 0.92),),
    "training": (Must("host", itemgetter("host"), 0.5),),
}
# Of three_graphs, over ONE_GRAPH.
EXTRA_GRAPH = Must("host for each extra graph", itemgetter("extra"), 0.27)


def musts(name: str, times: dict[str, Times], one_graph: dict[str, Times] | None) -> list[Row]:
    """What a case must show, what it showed, and what stock did."""
    held = list(MUSTS.get(name, ()))
    if name == "three_graphs":
        if one_graph is None:
            return [{"what": f"{EXTRA_GRAPH.what}: no {ONE_GRAPH} to compare with", "met": False}]
        held.append(EXTRA_GRAPH)
        times = {
            variant: {**own, "extra": (own["host"] - one_graph[variant]["host"]) / 2} for variant, own in times.items()
        }
    return [_held(must, times) for must in held]


def _held(must: Must, times: dict[str, Times]) -> Row:
    ours, theirs = must.value(times["pygraph"]), must.value(times["stock_cg"])
    share = ours / theirs if theirs > 0 else math.inf
    text = f"{must.what}: {ours:.1f} us, {share:.2f} of stock's {theirs:.1f} us, must {must.limit:g}"
    return {"what": text, "met": share <= must.limit}


def check(case: Case, device: str) -> dict[str, Difference]:
    """How far each variant is from eager, over calls whose inputs move."""
    found = {}
    for name, options in VARIANTS.items():
        torch._dynamo.reset()
        fn = case.make(device)
        compiled = torch.compile(fn, options=options)
        found[name] = Difference()
        for _ in range(CHECKED_CALLS):
            args = case.inputs(device)
            expected, result = (_observed(call, fn, args, case.trains) for call in (fn, compiled))
            found[name] |= compare(expected, result, TOLERANCE[torch.float32])
    return found


def _observed(call: Callable[..., Any], module: Any, args: Any, trains: bool) -> dict[str, Any]:
    """Its outputs, and the gradients that training with it leaves."""
    with torch.set_grad_enabled(trains):
        outputs = call(*args)
        if not trains:
            return snapshot({"outputs": outputs})
        outputs.sum().backward()
    found = snapshot({"outputs": outputs, "grads": {name: p.grad for name, p in module.named_parameters()}})
    module.zero_grad()
    return found


def row(name: str, times: dict[str, Times], differences: dict[str, Difference], held: list[Row]) -> Row:
    failed = {
        variant: f"wrong result: {found.where} differs from eager's"
        for variant, found in differences.items()
        if not found.close
    }
    pygraph = differences["pygraph"]
    return {
        "suite": "replay",
        "name": name,
        **{f"{variant}_us": round(own["total"], 2) for variant, own in times.items()},
        "host_us": {variant: round(own["host"], 2) for variant, own in times.items()},
        "layers": {variant: {layer: round(us, 2) for layer, us in own.items()} for variant, own in times.items()},
        "choice": VARIANTS["pygraph"].get("pygraph_force"),
        "equal": pygraph.close,
        "bitwise": pygraph.bitwise,
        "max_diff": pygraph.max_diff,
        "failed": failed,
        "musts": held,
        "missed": [must["what"] for must in held if not must["met"]]
        + [f"{variant}: {reason}" for variant, reason in failed.items()],
        "note": "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="pygraph.replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    deadline = time.monotonic() + args.budget
    names = args.cases.split(",")
    if "three_graphs" in names:
        names = list(dict.fromkeys([ONE_GRAPH, *names]))
    rows: list[Row] = []
    times: dict[str, dict[str, Any]] = {}
    # Variants share code objects.
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
        for name in names:
            if time.monotonic() > deadline:
                print(f"{name}: out of time, not run", flush=True)
                continue
            try:
                differences = check(CASES[name], args.device)
                times[name] = measure(CASES[name], args.device, args.rounds)
                rows.append(row(name, times[name], differences, musts(name, times[name], times.get(ONE_GRAPH))))
            except Exception as error:
                log.exception("%s", name)
                reason = summary(error)
                rows.append({"suite": "replay", "name": name, "equal": False, "error": reason, "missed": [reason]})
            write_rows(args.output, rows)
    print(format_table(rows))


if __name__ == "__main__":
    main()
