"BERT-base by hand, with two layers and the head of masked language modelling."

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, h=768, heads=12, ffn=3072):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(h, h) for _ in range(4))
        self.up, self.down = nn.Linear(h, ffn), nn.Linear(ffn, h)
        self.n1, self.n2 = nn.LayerNorm(h, eps=1e-12), nn.LayerNorm(h, eps=1e-12)

    def forward(self, x, mask):
        b, s, h = x.shape
        q, k, v = (m(x).view(b, s, self.heads, h // self.heads).transpose(1, 2) for m in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.n1(x + self.o(a.transpose(1, 2).reshape(b, s, h)))
        return self.n2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    def __init__(self, layers=2, h=768, heads=12, ffn=3072, vocab=30522):
        super().__init__()
        self.words, self.places, self.types = nn.Embedding(vocab, h), nn.Embedding(512, h), nn.Embedding(2, h)
        self.norm = nn.LayerNorm(h, eps=1e-12)
        self.layers = nn.ModuleList(Layer(h, heads, ffn) for _ in range(layers))
        self.dense, self.head_norm, self.decoder = nn.Linear(h, h), nn.LayerNorm(h), nn.Linear(h, vocab)
        self.register_buffer("position_ids", torch.arange(512)[None])

    def forward(self, ids, mask=None):
        b, s = ids.shape
        x = self.words(ids) + self.places(self.position_ids[:, :s]) + self.types.weight[0]
        x = self.norm(x)
        if mask is not None:
            mask = mask[:, None, None, :].expand(b, 1, s, s)
        for layer in self.layers:
            x = layer(x, mask)
        return self.decoder(self.head_norm(F.gelu(self.dense(x))))


def inputs(size, batch, masked, device):
    g = torch.Generator().manual_seed(size)
    ids = torch.randint(0, 1000, (batch, size), generator=g).to(device)
    if not masked:
        return (ids,)
    lengths = torch.randint(max(size // 2, 1), size + 1, (batch,), generator=g)
    return ids, (torch.arange(size)[None] < lengths[:, None]).to(device)
