"Topologies of a BERT forward compiled with dynamic shapes, captured as a whole."

import os
import random
import time


os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "8")
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR", os.path.join(os.environ.get("OUT", "sizes_probe_out"), "..", "sizes_probe_inductor")
)

from common import backends, DEVICE, FAKE, left, Result, survey  # noqa: E402
from model_bert import Bert, inputs  # noqa: E402

import torch  # noqa: E402


def main():
    result = Result("bert_compiled")
    kwargs = {"h": 64, "heads": 4, "ffn": 128, "vocab": 1000} if FAKE else {}
    rng = random.Random(0)
    sizes = list(range(16, 513, 8)) + rng.sample([n for n in range(16, 513) if n % 8], 60)
    rng.shuffle(sizes)
    if FAKE:
        sizes = sizes[:6]
    configs = [
        ("compiled bf16 efficient masked b8", torch.bfloat16, ("efficient",), True),
        ("compiled bf16 flash b8", torch.bfloat16, ("flash",), False),
    ]
    for i, (name, dtype, allowed, masked) in enumerate(configs):
        if left() < 15:
            result.data.setdefault("not_reached", []).append(name)
            continue
        with result.step("compile " + name), torch.no_grad():
            torch._dynamo.reset()
            backends(*allowed)
            torch.default_generator.manual_seed(0)
            model = Bert(**kwargs).to(DEVICE, dtype).eval()
            graphs = torch._dynamo.utils.counters["stats"]
            before = graphs["unique_graphs"]
            f = torch.compile(model, dynamic=True, backend="eager" if FAKE else "inductor")
            t0 = time.perf_counter()
            f(*inputs(117, 8, masked, DEVICE))
            entry = result.data.setdefault("compile", {})[name] = {"first_s": round(time.perf_counter() - t0, 2)}
            t0 = time.perf_counter()
            for n in (128, 200, 33, 512):
                f(*inputs(n, 8, masked, DEVICE))
            entry["four_more_sizes_s"] = round(time.perf_counter() - t0, 2)
            entry["graphs"] = graphs["unique_graphs"] - before
            result.save()
            make = lambda n: inputs(n, 8, masked, DEVICE)  # noqa: B023,E731
            survey(
                result,
                name,
                make,
                f,
                sizes,
                max(left() - 2, 0) / (len(configs) - i) if i else left(0.75),
                warm_sizes=(97, 512) if not FAKE else (17,),
            )
            entry["graphs_in_the_end"] = graphs["unique_graphs"] - before
    result.done()


main()
