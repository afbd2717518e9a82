"Nodes and topologies of a Llama step whose caches grow by torch.cat, over 200 lengths."

import os
import random
import sys

from common import backends, ContextLost, DEVICE, FAKE, left, print_transplants, restart, Result, survey, transplants

import torch
import torch.nn.functional as F
from torch import nn


H, HEADS, KV, D, FFN, VOCAB, LAYERS = (64, 4, 2, 16, 128, 100, 2) if FAKE else (2048, 32, 8, 64, 8192, 32000, 2)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.o = nn.Linear(H, HEADS * D, bias=False), nn.Linear(HEADS * D, H, bias=False)
        self.k, self.v = nn.Linear(H, KV * D, bias=False), nn.Linear(H, KV * D, bias=False)
        self.gate, self.up, self.down = (
            nn.Linear(H, FFN, bias=False),
            nn.Linear(H, FFN, bias=False),
            nn.Linear(FFN, H, bias=False),
        )
        self.n1, self.n2 = nn.RMSNorm(H), nn.RMSNorm(H)

    def forward(self, x, cos, sin, k_cache, v_cache, mask, repeat):
        y = self.n1(x)
        q, k, v = (m(y).view(1, 1, -1, D).transpose(1, 2) for m in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = torch.cat((k_cache, k), 2), torch.cat((v_cache, v), 2)
        kk, vv = k, v
        if repeat:
            kk, vv = (
                t[:, :, None].expand(1, KV, HEADS // KV, t.shape[2], D).reshape(1, HEADS, t.shape[2], D) for t in (k, v)
            )
        a = F.scaled_dot_product_attention(q, kk, vv, attn_mask=mask, enable_gqa=not repeat)
        x = x + self.o(a.transpose(1, 2).reshape(1, 1, HEADS * D))
        y = self.n2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y)), k, v


class Llama(nn.Module):
    def __init__(self, masked, repeat):
        super().__init__()
        self.masked, self.repeat = masked, repeat
        self.words = nn.Embedding(1000, H)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(H), nn.Linear(H, VOCAB, bias=False)
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(0, D, 2).float() / D))

    def forward(self, ids, position, *caches):
        x = self.words(ids)
        angles = position[:, :, None].float() * self.frequencies.float()
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        mask = None
        if self.masked:
            n = caches[0].shape[2] + 1
            mask = (torch.arange(n, device=x.device)[None] <= position)[None, None].expand(1, 1, 1, n)
        out = []
        for i, layer in enumerate(self.layers):
            x, k, v = layer(x, cos, sin, caches[2 * i], caches[2 * i + 1], mask, self.repeat)
            out += [k, v]
        return (self.head(self.norm(x)), *out)


def inputs(size, dtype):
    g = torch.Generator(device=DEVICE).manual_seed(size)
    ids, position = (
        torch.zeros(1, 1, dtype=torch.long, device=DEVICE),
        torch.full((1, 1), size, dtype=torch.long, device=DEVICE),
    )
    return (
        ids,
        position,
        *(torch.randn(1, KV, size, D, device=DEVICE, dtype=dtype, generator=g) for _ in range(2 * LAYERS)),
    )


# Name: backends, mask, heads repeated (as transformers does where there is a mask), dtype.
CONFIGS = {
    "bf16 efficient masked repeat": (("efficient",), True, True, torch.bfloat16),
    "bf16 flash gqa": (("flash",), False, False, torch.bfloat16),
    "bf16 math masked gqa": (("math",), True, False, torch.bfloat16),
    "bf16 efficient repeat": (("efficient",), False, True, torch.bfloat16),
    "bf16 flash repeat": (("flash",), False, True, torch.bfloat16),
    "fp32 efficient masked repeat": (("efficient",), True, True, torch.float32),
    "bf16 default masked repeat": (("default",), True, True, torch.bfloat16),
}


def main():
    only_transplants = len(sys.argv) > 1 and sys.argv[1] == "transplants"
    result = Result("decode_transplants" if only_transplants else "decode")
    rng = random.Random(0)
    sizes = list(range(100, 220)) + rng.sample(range(220, 4096), 60) + rng.sample(range(2, 100), 20)
    rng.shuffle(sizes)
    configs = list(CONFIGS.items())
    if only_transplants:
        configs = configs[:3]
        sizes = [7, 16, 33, 64, 100, 127, 128, 200, 257, 512, 1000, 2049, 4000]
    if FAKE:
        sizes = sizes[:5]
    with torch.inference_mode():
        for i, (name, (allowed, masked, repeat, dtype)) in enumerate(configs):
            if i < int(os.environ.get("FIRST", "0")):
                continue
            if left() < 4:
                result.data.setdefault("not_reached", []).append(name)
                continue
            try:
                backends(*allowed)
                torch.default_generator.manual_seed(0)
                model = Llama(masked, repeat).to(DEVICE, dtype).eval()
                make = lambda n: inputs(n, dtype)  # noqa: B023,E731
                seconds = max(left() - 2, 0) / (len(configs) - i)
                if only_transplants:
                    transplants(result, name, make, model, sizes, seconds)
                    print_transplants(name, result.data["transplants"][name])
                else:
                    survey(result, name, make, model, sizes, seconds, warm_sizes=(97, 4096) if not FAKE else (17,))
            except ContextLost:
                restart(result, i + 1)
            except Exception as error:
                result.data["errors"].append({"step": name, "error": repr(error)[:300]})
            result.save()
    result.done()


main()
