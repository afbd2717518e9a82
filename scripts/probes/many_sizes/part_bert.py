"Topologies of an eager BERT forward over lengths 16 to 512."

import os
import random
import sys

from common import backends, ContextLost, DEVICE, FAKE, left, print_transplants, restart, Result, survey, transplants
from model_bert import Bert, inputs

import torch


# Name: dtype, backends, mask, batch, share of the time.
CONFIGS = {
    "bf16 efficient masked b8": (torch.bfloat16, ("efficient",), True, 8),
    "bf16 flash b8": (torch.bfloat16, ("flash",), False, 8),
    "fp32 efficient masked b8": (torch.float32, ("efficient",), True, 8),
    "fp16 efficient masked b8": (torch.float16, ("efficient",), True, 8),
    "bf16 efficient b8": (torch.bfloat16, ("efficient",), False, 8),
    "bf16 efficient masked b1": (torch.bfloat16, ("efficient",), True, 1),
    "fp16 flash b8": (torch.float16, ("flash",), False, 8),
    "bf16 flash b1": (torch.bfloat16, ("flash",), False, 1),
    "fp32 default b8": (torch.float32, ("default",), False, 8),
    "bf16 default b8": (torch.bfloat16, ("default",), False, 8),
    "bf16 default masked b8": (torch.bfloat16, ("default",), True, 8),
}


def lengths():
    rng = random.Random(0)
    eighths = list(range(16, 513, 8))
    rest = [n for n in range(16, 513) if n % 8]
    rng.shuffle(rest)
    # The odd ones early: what time is left for is a sample in any case.
    first = eighths + rest[:40]
    rng.shuffle(first)
    return first + rest[40:]


def main():
    only_transplants = len(sys.argv) > 1 and sys.argv[1] == "transplants"
    result = Result("bert_transplants" if only_transplants else "bert")
    kwargs = {"h": 64, "heads": 4, "ffn": 128, "vocab": 100} if FAKE else {}
    sizes = [16, 24, 33, 40, 100, 128, 200, 255, 256, 384, 511, 512]
    configs = list(CONFIGS.items())
    if only_transplants:
        configs = configs[:5] + configs[5:6]
    with torch.inference_mode():
        for i, (name, (dtype, allowed, masked, batch)) in enumerate(configs):
            if i < int(os.environ.get("FIRST", "0")):
                continue
            if left() < 4:
                result.data.setdefault("not_reached", []).append(name)
                continue
            try:
                backends(*allowed)
                torch.default_generator.manual_seed(0)
                model = Bert(**kwargs).to(DEVICE, dtype).eval()
                if FAKE:
                    model.words = torch.nn.Embedding(1000, 64).to(dtype)
                make = lambda n: inputs(n, batch, masked, DEVICE)  # noqa: B023,E731
                seconds = max(left() - 2, 0) / (len(configs) - i)
                if only_transplants:
                    transplants(result, name, make, model, sizes[:3] if FAKE else sizes, seconds)
                    print_transplants(name, result.data["transplants"][name])
                else:
                    survey(
                        result,
                        name,
                        make,
                        model,
                        lengths()[:20] if FAKE else lengths(),
                        seconds,
                        warm_sizes=(97, 512) if not FAKE else (17,),
                    )
            except ContextLost:
                restart(result, i + 1)
            except Exception as error:
                result.data["errors"].append({"step": name, "error": repr(error)[:300]})
            result.save()
    result.done()


main()
