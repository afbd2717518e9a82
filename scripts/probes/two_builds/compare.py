"""
Two builds on one GPU: how long a replay takes in each, what each captures, copies, reserves and chooses.

    python compare.py OLD NEW OUT SECONDS [compile,layers,measure]

OLD and NEW are checkouts; git archive COMMIT | tar -x -C OLD makes one. A process of each build, on the benchmarks
of its checkout, stays for the whole run, and both take turns:

compile   cases side by side; what a forced graph copies and reserves
layers    the suite replay: each layer, in blocks of rounds by the old and the new build in turns; lowest deciles
measure   the suites scg, bindings and cgct: times and choices, case by case, until SECONDS are over

Lines with FLAG differ. OUT gets old_new.json and the logs. 70 cases and the layers take 450 s on a machine with
16 cores. OLD_NEW_SUITES names suites, OLD_NEW_LIMIT the number of cases of each.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


here = Path(__file__).resolve().parent
SCRATCH = tempfile.mkdtemp()
old, new, out, budget = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4])
parts = sys.argv[5].split(",") if len(sys.argv) > 5 else ["compile", "layers", "measure"]
LIMIT = int(os.environ.get("OLD_NEW_LIMIT", "0"))
device = os.environ.get("OLD_NEW_DEVICE", "cuda")
T0 = time.time()
deadline = T0 + budget
out.mkdir(exist_ok=True, parents=True)
result = {"compile": {}, "measure": {}, "layers": {}}


def log(*a):
    print(f"{time.time() - T0:6.1f}", *a, flush=True)


paths = {}


def overlay(build, root):
    d = Path(f"{SCRATCH}/{build}")
    done = subprocess.run([sys.executable, str(root / "scripts" / "overlay"), str(d)], capture_output=True, text=True)
    if done.returncode:
        print(done.stdout, done.stderr)
    paths[build] = f"{d}:{root / 'torch_overlay' / 'benchmarks' / 'dynamo'}"


with ThreadPoolExecutor(2) as pool:
    list(pool.map(lambda p: overlay(*p), [("old", old), ("new", new)]))
log("overlays")


class Child:
    def __init__(self, build, tag, threads=2):
        cache = f"{SCRATCH}/cache_{build}"
        env = {
            **os.environ,
            "PYTHONPATH": paths[build],
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TRITON_CACHE_DIR": cache + "/triton",
            "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
            "PYTHONPYCACHEPREFIX": f"{SCRATCH}/pyc_{build}",
            "OMP_NUM_THREADS": "4",
        }
        self.p = subprocess.Popen(
            [sys.executable, str(here / "serve.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(out / f"{build}_{tag}.log", "w"),
            env=env,
            text=True,
            cwd=SCRATCH,
        )

    def ask(self, op, *args):
        try:
            self.p.stdin.write(json.dumps([op, list(args)]) + "\n")
            self.p.stdin.flush()
            line = self.p.stdout.readline()
            return json.loads(line) if line else {"error": f"process ended {self.p.poll()}"}
        except (OSError, ValueError) as e:
            return {"error": str(e)}

    def close(self):
        self.p.kill()


def save():
    (out / "old_new.json").write_text(json.dumps(result, indent=1))


main = {b: Child(b, "main") for b in ("old", "new")}
SUITES = os.environ.get("OLD_NEW_SUITES", "scg,bindings,cgct").split(",")
todo = []
with ThreadPoolExecutor(2) as pool:
    per = dict(zip(main, pool.map(lambda b: {s: main[b].ask("cases", s) for s in SUITES}, main)))
for s in SUITES:
    both = [c for c in per["new"][s] if c in per["old"][s]]
    todo += [(s, c) for c in (both[:LIMIT] if LIMIT else both)]
log(len(todo), "cases")
VAR = ["no_cg", "pygraph"]
if "compile" in parts:
    N = 7 if device == "cuda" else 1

    def chunk(args):
        build, i = args
        child = Child(build, f"c{i}")
        for s, c in todo[i::N]:
            if time.time() > deadline - 30:
                break
            result["compile"].setdefault(f"{s}/{c}", {})[build] = child.ask(
                "compile", s, c, [*VAR, "forced_node_update"]
            )
        child.close()

    with ThreadPoolExecutor(2 * N) as pool:
        list(pool.map(chunk, [(b, i) for i in range(N) for b in main]))
    save()
    log("compiled")
    flags = 0
    for k, v in result["compile"].items():
        o, n = v.get("old", {}), v.get("new", {})
        bad = [f for f in ("forced_copied", "forced_choice") if o.get(f) != n.get(f)]
        if n.get("reserved_mib", 0) > o.get("reserved_mib", 0):
            bad.append(f"reserved {o.get('reserved_mib')} {n.get('reserved_mib')}")
        if n.get("peak_mib", 0) > o.get("peak_mib", 0):
            bad.append(f"peak {o.get('peak_mib')} {n.get('peak_mib')}")
        if "error" in o or "error" in n or o.get("failed") or n.get("failed"):
            bad.append(str((o.get("error"), n.get("error"), o.get("failed"), n.get("failed")))[:200])
        if bad:
            flags += 1
            log("FLAG", k, bad)
    log(
        "compile: cases",
        len(result["compile"]),
        "flags",
        flags,
        "slowest",
        sorted((v.get("new", {}).get("s_all", 0), k) for k, v in result["compile"].items())[-3:],
    )
if "layers" in parts:
    rounds = 3 if device == "cuda" else 1
    for case in ("linear_relu", "pointwise_16x4MiB", "pointwise_2x4KiB", "mlp_20", "three_graphs", "training")[
        : LIMIT or None
    ]:
        with ThreadPoolExecutor(2) as pool:
            ready = dict(zip(main, pool.map(lambda b: main[b].ask("layers_prepare", case), main)))
        if any("error" in r for r in ready.values()):
            log(case, ready)
            continue
        samples = {b: {} for b in main}
        for i in range(12 if device == "cuda" else 2):
            for b in ("old", "new") if i % 2 else ("new", "old"):
                got = main[b].ask("layers_sample", rounds)
                for v, ls in got.items():
                    for l, xs in ls.items():
                        samples[b].setdefault(v, {}).setdefault(l, []).append(xs)
        table = {}
        for b in main:
            for v, ls in samples[b].items():
                # Other processes of the host can only add time.
                low = {l: statistics.quantiles([x for xs in blocks for x in xs], n=10)[0] for l, blocks in ls.items()}
                order = [l for l in ls if l != "total"]
                below = 0.0
                row = {}
                for l in order:
                    row[l] = round(low[l] - below, 2)
                    below = low[l]
                row["host"] = round(low[order[-1]], 2)
                row["total"] = round(low["total"], 2)
                table.setdefault(v, {})[b] = row
        result["layers"][case] = {"ready": ready, "table": table, "samples": samples}
        save()
        for v, t in table.items():
            log(case, v, t)
        d = {
            l: round(table["pygraph"]["new"][l] - table["pygraph"]["old"][l], 2)
            for l in table["pygraph"]["new"]
            if l in table["pygraph"]["old"]
        }
        log(case, "pygraph new - old", d, ready)
if "measure" in parts:
    n = bad_n = 0
    for s, c in todo:
        if time.time() > deadline - 8:
            log("out of time at", s, c)
            break
        row = {}
        for b in ("old", "new") if n % 2 else ("new", "old"):
            row[b] = main[b].ask("measure", s, c, VAR, 7)
        n += 1
        result["measure"][f"{s}/{c}"] = row
        o, w = row["old"], row["new"]
        if "error" in o or "error" in w:
            log("ERROR", s, c, o.get("error"), w.get("error"))
        bad = []
        if o.get("choice") != w.get("choice"):
            bad.append(
                f"choice {o.get('choice')} {w.get('choice')} old {o.get('candidates')} new {w.get('candidates')}"
            )
        if (w.get("copied_bytes") or 0) > (o.get("copied_bytes") or 0):
            bad.append(f"copied {o.get('copied_bytes')} {w.get('copied_bytes')}")
        if w.get("failed") or not w.get("equal"):
            bad.append(f"equal {o.get('equal')} {w.get('equal')} {w.get('failed')} {w.get('note')}")
        if bad:
            bad_n += 1
        log(
            f"{s}/{c}",
            "no_cg",
            o.get("no_cg_us"),
            w.get("no_cg_us"),
            "pygraph",
            o.get("pygraph_us"),
            w.get("pygraph_us"),
            w.get("choice"),
            o.get("s"),
            w.get("s"),
            *(["FLAG", *bad] if bad else []),
        )
    save()
    rs = [
        v["new"]["pygraph_us"] / v["old"]["pygraph_us"]
        for v in result["measure"].values()
        if v["new"].get("pygraph_us") and v["old"].get("pygraph_us")
    ]
    rc = [
        v["new"]["no_cg_us"] / v["old"]["no_cg_us"]
        for v in result["measure"].values()
        if v["new"].get("no_cg_us") and v["old"].get("no_cg_us")
    ]
    if rs:
        log(
            "cases",
            n,
            "flags",
            bad_n,
            "geomean new/old pygraph",
            round(statistics.geometric_mean(rs), 4),
            "control no_cg",
            round(statistics.geometric_mean(rc), 4),
        )
save()
for m in main.values():
    m.close()
log("done")
