"Attention as the default chooses it, at lengths that are new: time of the first call, of later ones, of a capture."

import os
import random
import statistics
import sys
import time

from common import backends, DEVICE, Dump, FAKE, left, NAMES, Result, Scratch, short, sync, table

import torch
import torch.nn.functional as F


BACKENDS = {-1: "error", 0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}


# Not the default generator: a capture that failed can leave that one unusable.
GENERATOR = torch.Generator(device=DEVICE).manual_seed(0)


def qkv(batch, heads, queries, keys, kv_heads, dtype, grad=False):
    make = lambda h, s: (
        torch.randn(batch, s, h, 64, device=DEVICE, dtype=dtype, generator=GENERATOR)
        .transpose(1, 2)
        .requires_grad_(grad)
    )  # noqa: E731
    return make(heads, queries), make(kv_heads, keys), make(kv_heads, keys)


def bert(s, dtype, masked=False, grad=False):
    mask = torch.ones(8, s, dtype=torch.bool, device=DEVICE)[:, None, None].expand(8, 1, s, s) if masked else None
    return *qkv(8, 12, s, s, 12, dtype, grad), mask, False


def decode(s, dtype, masked=False, gqa=False):
    mask = torch.ones(1, 1, 1, 4 * s, dtype=torch.bool, device=DEVICE) if masked else None
    heads = 8 if gqa else 32
    # A cache that grew by cat is laid out as (batch, head, length, 64).
    q, _, _ = qkv(1, 32, 1, 1, 1, dtype)
    k, v = (torch.randn(1, heads, 4 * s, 64, device=DEVICE, dtype=dtype, generator=GENERATOR) for _ in range(2))
    return q, k, v, mask, gqa


def train(s, dtype):
    return bert(s, dtype, grad=True)


CASES = {
    "bert bf16": (bert, {"dtype": torch.bfloat16}),
    "bert bf16 masked": (bert, {"dtype": torch.bfloat16, "masked": True}),
    "decode bf16 masked": (decode, {"dtype": torch.bfloat16, "masked": True}),
    "decode bf16 gqa": (decode, {"dtype": torch.bfloat16, "gqa": True}),
    "bert bf16 training": (train, {"dtype": torch.bfloat16}),
    "bert fp16": (bert, {"dtype": torch.float16}),
    "bert fp32": (bert, {"dtype": torch.float32}),
}


def attend(q, k, v, mask, gqa):
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)
    if q.requires_grad:
        out.backward(out.detach())
        q.grad = k.grad = v.grad = None
    return out


def timed(fn, *args):
    sync()
    t0 = time.perf_counter()
    fn(*args)
    sync()
    return (time.perf_counter() - t0) * 1e3


def measure(make, kwargs, sizes, seconds):
    entry = {"sizes": 0, "first_ms": [], "cold_captures": [], "choice": None, "errors": []}
    end = time.monotonic() + seconds
    args = make(97, **kwargs)
    try:
        entry["choice"] = BACKENDS.get(
            int(torch._fused_sdp_choice(*args[:3], attn_mask=args[3], enable_gqa=args[4])), "?"
        )
    except Exception as error:
        entry["errors"].append("choice: " + short(error))
    entry["very_first_ms"] = timed(attend, *args)
    second, third = [], []
    for s in sizes[:-6]:
        # The captures below need time too.
        if time.monotonic() > end - 0.3 * seconds:
            break
        args = make(s, **kwargs)
        entry["first_ms"].append(round(timed(attend, *args), 3))
        second.append(timed(attend, *args))
        third.append(timed(attend, *args))
        entry["sizes"] += 1
    if "training" not in str(kwargs) and make is not train:
        scratch = Scratch()
        for s in sizes[-6:]:
            if time.monotonic() > end:
                break
            args = make(s, **kwargs)
            t0 = time.perf_counter()
            try:
                graph, _ = scratch.capture(attend, *args)
            except Exception as error:
                entry["cold_captures"].append({"size": s, "error": short(error)})
                try:
                    scratch.run(attend, *args)
                    graph, _ = scratch.capture(attend, *args)
                except Exception as again:
                    entry["errors"].append("capture after a run: " + short(again))
                    continue
            else:
                entry["cold_captures"].append({"size": s, "ms": round((time.perf_counter() - t0) * 1e3, 3)})
            try:
                dump = Dump(graph)
                entry.setdefault("kernels", {})[s] = [table(NAMES.get(n.function, n.kind)) for n in dump.nodes]
            except Exception as error:
                entry["errors"].append("dump: " + short(error))
    if entry["first_ms"]:
        entry.update(
            first_median_ms=statistics.median(entry["first_ms"]),
            first_max_ms=max(entry["first_ms"]),
            second_median_ms=round(statistics.median(second), 3),
            third_median_ms=round(statistics.median(third), 3),
        )
    return entry


def main():
    label = sys.argv[1] if len(sys.argv) > 1 else "default"
    result = Result("cudnn_" + label)
    result.data["environment"] = {k: v for k, v in os.environ.items() if "SDPA" in k}
    result.data["cudnn"] = torch.backends.cudnn.version()
    cases = list(CASES.items())
    jobs = [(name, ("default",), c) for name, c in cases]
    if label == "default":
        # What the other backends take, in the same process.
        jobs += [
            (f"{name}, {b}", (b,), dict(cases)[name])
            for name in ("bert bf16", "decode bf16 masked")
            for b in ("flash", "efficient")
            if (name, b) != ("decode bf16 masked", "flash")
        ]
    rng = random.Random(2)
    for i, (name, allowed, (make, kwargs)) in enumerate(jobs):
        if left() < 2:
            result.data.setdefault("not_reached", []).append(name)
            continue
        with result.step(name):
            backends(*allowed)
            sizes = rng.sample(range(16, 513), 46 if not FAKE else 12)
            with torch.set_grad_enabled(make is train):
                entry = result.data.setdefault("cases", {})[name] = measure(
                    make, kwargs, sizes, max(left() - 1, 0) / (len(jobs) - i)
                )
            print(
                f"  {label:14s} {name:28s} {entry['choice']:10s} first {entry.get('first_median_ms')} ms, later {entry.get('third_median_ms')} ms",
                flush=True,
            )
    result.done()


main()
