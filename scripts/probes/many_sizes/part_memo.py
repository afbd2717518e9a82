"What it costs to capture one library call alone and to read its nodes; which words are addresses."

import ctypes
import json
import os
import random
import statistics
import subprocess
import time
from collections import Counter

from common import clear_error, cu, DEVICE, Dump, FAKE, left, raw_nodes, Result, Scratch, table

import torch


HERE = os.path.dirname(os.path.abspath(__file__))
DTYPES = {"bf16": 15, "fp16": 5, "fp32": 6}

# Name: operator, dtype, size -> (m, n, k, batch).
CASES = {}
for dtype in ("bf16", "fp32", "fp16"):
    CASES[f"mm {dtype} 8L x 768 x 768"] = ("mm", dtype, lambda s: (8 * s, 768, 768, 1))
    CASES[f"linear {dtype} 8L x 3072 x 768"] = ("linear", dtype, lambda s: (8 * s, 3072, 768, 1))
    CASES[f"linear {dtype} 8L x 768 x 3072"] = ("linear", dtype, lambda s: (8 * s, 768, 3072, 1))
    CASES[f"linear {dtype} L x 768 x 768"] = ("linear", dtype, lambda s: (s, 768, 768, 1))
    CASES[f"bmm {dtype} 96 x L x L x 64"] = ("bmm", dtype, lambda s: (min(s, 400), min(s, 400), 64, 96))
    CASES[f"bmm {dtype} 32 x 1 x 64 x L"] = ("bmm", dtype, lambda s: (1, 64, s, 32))
    if dtype != "fp32":
        CASES[f"flash {dtype} b8 h12 L x L"] = ("flash", dtype, lambda s: (s, s, 12, 8))
        CASES[f"flash {dtype} b1 h32 1 x 4L"] = ("flash", dtype, lambda s: (1, 4 * s, 32, 1))
    CASES[f"efficient {dtype} b8 h12 L x L"] = ("efficient", dtype, lambda s: (s, s, 12, 8))
    CASES[f"efficient_bias {dtype} b8 h12 L x L"] = ("efficient_bias", dtype, lambda s: (s, s, 12, 8))
    CASES[f"efficient {dtype} b1 h32 1 x 4L"] = ("efficient", dtype, lambda s: (1, 4 * s, 32, 1))


def library():
    path = os.path.join(HERE, "bin/memo.so")
    try:
        lib = ctypes.CDLL(path)
        built = "as carried"
    except OSError as error:
        built = f"here, since: {error}"
        subprocess.run(["bash", os.path.join(HERE, "build.sh"), "memo"], check=True, timeout=max(left() - 5, 5))
        lib = ctypes.CDLL(path)
    lib.memo_case.restype = lib.memo_run.restype = ctypes.c_char_p
    lib.memo_case.argtypes = [ctypes.c_char_p, ctypes.c_int] + [ctypes.c_int64] * 4
    lib.memo_run.argtypes = lib.memo_case.argtypes + [ctypes.c_int]
    return lib, built


def median(values):
    values = [v for v in values if v is not None]
    return round(statistics.median(values), 2) if values else None


def measure(lib, op, dtype, shape, sizes):
    def call(s):
        answer = json.loads(lib.memo_case(op.encode(), DTYPES[dtype], *shape(s)))
        if "error" in answer:
            clear_error()
        return answer

    run = lambda s, n: json.loads(lib.memo_run(op.encode(), DTYPES[dtype], *shape(s), n))  # noqa: E731
    entry = {"sizes": 0, "never_ran_error": None, "cold_failures": [], "cold_failure_count": 0}
    # The operator has not run at all in this process, at least not with this dtype.
    first = call(sizes[0])
    entry["never_ran_error"] = first.get("error")
    entry["never_ran_us"] = first["cold"]["total"] if "cold" in first else None
    ran = run(sizes[0], 3)
    if "error" in ran:
        entry["run_error"] = ran["error"]
        return entry
    cold, again, functions, topologies, launches = [], [], Counter(), Counter(), set()
    words, node_info = {}, {}
    bad = Counter()
    where = {}
    for s in sizes[1:-10]:
        if left() < 2:
            break
        r = call(s)
        if "error" in r:
            entry["cold_failure_count"] += 1
            entry["cold_failures"] = (entry["cold_failures"] + [{"size": s, "error": r["error"]}])[:5]
            run(s, 2)
            r = call(s)
            if "error" in r:
                bad["fails even after a run"] += 1
                continue
        else:
            cold.append(r["cold"])
        again.append(r["again"])
        topologies["".join("K" if n["type"] == 0 else "S" if n["type"] == 2 else "?" for n in r["nodes"])] += 1
        launches.add(str([(n["function"], n["cluster"]) for n in r["nodes"]]))
        for n in r["nodes"]:
            functions[n["function"]] += 1
            info = node_info.setdefault(
                n["function"],
                {"clusters": set(), "packed": n["packed"], "parameters": n["parameters"], "bytes": n["bytes"]},
            )
            info["clusters"].add(str(n["cluster"]))
        for which in ("repeated", "moved"):
            c = r[which]
            bad[f"{which}: other topology"] += not c["same_topology"]
            for i, n in enumerate(c["nodes"]):
                bad[f"{which}: other launch"] += not n["same_launch"]
                bad[f"{which}: nodes with unexplained bytes"] += n["unexplained_bytes"] > 0
                name = r["nodes"][i]["function"]
                if n["unexplained_bytes"]:
                    key = f"{which} {table(name)}"
                    seen = where.setdefault(
                        key, {"nodes": 0, "bytes": n["unexplained_bytes"], "at (parameter+byte)": n["unexplained_at"]}
                    )
                    seen["nodes"] += 1
                if which == "moved":
                    bad["words at 4 mod 8"] += sum(not w["aligned"] for w in n["words"])
                    bad["words like a TMA descriptor's"] += n["words_like_tma"]
                    bad["pointers to other device memory"] += n["other_device_pointers"]
                    found = words.setdefault(name, {"nodes": 0, "places": Counter()})
                    found["nodes"] += 1
                    found["places"].update(
                        f"operand {w['operand']}+{w['delta'] if w['delta'] < 64 else 'x'} at {w['parameter']}+{w['at']} of {w['parameter_size']} bytes"
                        + (" TMA?" if w["like_tma"] else "")
                        for w in n["words"]
                    )
    plain = [run(s, 3) for s in sizes[-10:]]
    entry.update(
        sizes=len(again),
        cold_us={k: median([c[k] for c in cold]) for k in ("begin", "op", "end", "read", "destroy", "total")},
        cold_total_max_us=max((c["total"] for c in cold), default=None),
        again_us={k: median([c[k] for c in again]) for k in ("begin", "op", "end", "read", "destroy", "total")},
        plain_first_us=median([p["plain"][0] for p in plain if "plain" in p]),
        plain_later_us=median([v for p in plain if "plain" in p for v in p["plain"][1:]]),
        topologies=dict(topologies),
        functions=len(functions),
        function_and_cluster_sets=len(launches),
        checks=dict(bad),
        unexplained=where,
        nodes={
            table(k): {
                **v,
                "clusters": sorted(v["clusters"]),
                "count": functions[k],
                "words": dict(words.get(k, {}).get("places", {}).most_common(16)),
            }
            for k, v in node_info.items()
        },
    )
    return entry


def from_python(result, sizes):
    "The same through torch.cuda.CUDAGraph and cuda.bindings."
    rows = result.data["python"] = {}
    w = torch.zeros(768, 3072, device=DEVICE, dtype=torch.bfloat16)
    scratch = Scratch()
    scratch.run(torch.mm, torch.zeros(128, 768, device=DEVICE, dtype=torch.bfloat16), w)
    times = {"torch_cudagraph_us": [], "dump_us": [], "raw_capture_us": []}
    for s in sizes:
        x = torch.zeros(8 * s, 768, device=DEVICE, dtype=torch.bfloat16)
        out = torch.empty(8 * s, 3072, device=DEVICE, dtype=torch.bfloat16)
        t0 = time.perf_counter()
        graph, _ = scratch.capture(torch.mm, x, w)
        t1 = time.perf_counter()
        Dump(graph)
        t2 = time.perf_counter()
        times["torch_cudagraph_us"].append((t1 - t0) * 1e6)
        times["dump_us"].append((t2 - t1) * 1e6)
        if not FAKE:
            stream = scratch.stream.cuda_stream
            with torch.cuda.stream(scratch.stream):
                t0 = time.perf_counter()
                cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
                torch.mm(x, w, out=out)
                _, raw = cu.cuStreamEndCapture(stream)
                raw_nodes(raw)
                cu.cuGraphDestroy(raw)
                times["raw_capture_us"].append((time.perf_counter() - t0) * 1e6)
    rows.update({k: median(v) for k, v in times.items()})


def main():
    result = Result("memo")
    rng = random.Random(1)
    lib = None
    with result.step("build"):
        lib, result.data["built"] = library()
    result.data["cases"] = {}
    for i, (name, (op, dtype, shape)) in enumerate(CASES.items()):
        if lib is None or left() < 3:
            result.data.setdefault("not_reached", []).append(name)
            continue
        with result.step(name), torch.inference_mode():
            entry = result.data["cases"][name] = measure(
                lib, op, dtype, shape, rng.sample(range(16, 513), 15 if FAKE else 60)
            )
            print(
                f"  {name:36s} cold {entry.get('cold_us', {}).get('total')} us, again {entry.get('again_us', {}).get('total')}, plain call {entry.get('plain_later_us')}",
                flush=True,
            )
    with result.step("python"), torch.inference_mode():
        from_python(result, rng.sample(range(16, 513), 40))
    result.done()


main()
