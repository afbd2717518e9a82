"""The process of one build, for compare.py: lines of JSON with an operation and its arguments, and the answers."""

import gc
import json
import os
import shutil
import sys
import time
import traceback


answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
import torch
import torch._dynamo


try:
    from pygraph import catalogue
except ImportError:
    from pygraph import cases as catalogue
from pygraph import layers as L
from pygraph.cgct_run import CpuValuesRun
from pygraph.program import VARIANTS
from pygraph.worker import CaseRun, hardly_called, report, reset_report, totals


DEVICE = os.environ.get("OLD_NEW_DEVICE", "cuda")
SMALL = DEVICE == "cpu"
sync = torch.cuda.synchronize if DEVICE == "cuda" else (lambda: None)


def clean():
    torch._dynamo.reset()
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def cases(suite):
    return [c.name for c in catalogue.select(suite) if not c.missing]


def make(suite, name, variants, rounds):
    (case,) = catalogue.select(suite, [name])
    CpuValuesRun if suite == "cgct" and len(variants) > 3 else CaseRun
    return CaseRun(case, DEVICE, small=SMALL, variants={v: VARIANTS[v] for v in variants}, rounds=rounds)


def compile_(suite, name, variants):
    clean()
    t = time.time()
    run = make(suite, name, variants, 3)
    run.prepare()
    failed = dict(run.failed)
    del run
    clean()
    out = {"failed": failed, "s": round(time.time() - t, 1)}
    if DEVICE == "cuda":
        # A graph is forced, so that reserved memory and copied bytes depend on no timing.
        run = make(suite, name, ["forced_node_update"], 3)
        clean()
        base = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        reset_report()
        ring = [run._inputs() for _ in range(run.case.ring)]
        loop = run._program("forced_node_update").loop(ring)
        for _ in range(12):
            loop(1)
        sync()
        gc.collect()
        entries = [e for e in report() if not hardly_called(e)]
        out |= {
            "reserved_mib": (torch.cuda.memory_reserved() - base) / 2**20,
            "peak_mib": (torch.cuda.max_memory_reserved() - base) / 2**20,
            "forced_copied": totals(entries)["copied_bytes"],
            "forced_choice": totals(entries)["choice"],
            "bound": sorted(str(e.get("bound_inputs")) for e in entries),
        }
        del run, loop, ring
        clean()
    out["s_all"] = round(time.time() - t, 1)
    return out


def measure(suite, name, variants, rounds):
    clean()
    shutil.rmtree(os.path.join(os.environ["TORCHINDUCTOR_CACHE_DIR"], "pygraph"), ignore_errors=True)
    t = time.time()
    run = make(suite, name, variants, rounds)
    row = run.measure()
    keep = {
        k: row.get(k)
        for k in ("no_cg_us", "pygraph_us", "choice", "copied_bytes", "equal", "bitwise", "failed", "note", "ratios")
    }
    keep["candidates"] = [
        {"choice": e["choice"], "t": dict((e.get("timings_us") or {}).items())} for e in row["graphs"]
    ]
    if DEVICE == "cuda":
        keep["reserved"] = torch.cuda.memory_reserved() / 2**20
    keep["s"] = round(time.time() - t, 1)
    del run
    clean()
    return keep


state = {}


def layers_prepare(name):
    clean()
    torch._dynamo.config.recompile_limit = 64
    case = L.CASES[name]
    with torch.set_grad_enabled(case.trains):
        state["layers"] = {n: L.Layers(case, DEVICE, o) for n, o in L.VARIANTS.items()}
    state["trains"] = case.trains
    return {"compiled": len(state["layers"]["pygraph"].compiled_replays()) if DEVICE == "cuda" else None}


def layers_sample(rounds):
    with torch.set_grad_enabled(state["trains"]):
        return L._time_layers(state["layers"], sync, rounds)


OPS = {
    "cases": cases,
    "compile": compile_,
    "measure": measure,
    "layers_prepare": layers_prepare,
    "layers_sample": layers_sample,
}
for line in sys.stdin:
    op, args = json.loads(line)
    try:
        out = OPS[op](*args)
    except BaseException as e:
        traceback.print_exc()
        out = {"error": f"{type(e).__name__}: {e}"[:400]}
    print(json.dumps(out, default=str), file=answers, flush=True)
