#!/usr/bin/env python3
"""Trains a byte-level EFLA model on text in plain PyTorch, then lets it write (no GPU needed).

python examples/train.py data/austen/train/*.txt --steps 300    (scripts/quickstart.sh fetches them)
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from efla.nn import EFLA, Cache, RMSNorm, SwiGLU
from torch import nn


class Block(nn.Module):
    def __init__(self, dim, layer_idx):
        super().__init__()
        self.attn_norm, self.mlp_norm = RMSNorm(dim), RMSNorm(dim)
        self.attn = EFLA(hidden_size=dim, num_heads=dim // 32, layer_idx=layer_idx)
        self.mlp = SwiGLU(dim, 3 * dim)

    def forward(self, x, cache=None):
        x = x + self.attn(self.attn_norm(x), past_key_values=cache)[0]
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self, dim=128, depth=3):
        super().__init__()
        self.embeddings = nn.Embedding(256, dim)
        self.layers = nn.ModuleList(Block(dim, i) for i in range(depth))
        self.norm, self.head = RMSNorm(dim), nn.Linear(dim, 256, bias=False)

    def forward(self, ids, cache=None):
        x = self.embeddings(ids)
        for layer in self.layers:
            x = layer(x, cache)
        return self.head(self.norm(x))


def train(model, paths, steps, batch=8, length=256, seed=0, device="cpu", report=print):
    text = torch.frombuffer(
        bytearray(b"".join(Path(p).read_bytes() for p in paths)), dtype=torch.uint8
    )
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1, (s + 1) / 20) * (1 - s / steps)
    )
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - length, (batch,), generator=generator)
        rows = torch.stack([text[s : s + length + 1] for s in starts]).long().to(device)
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(), schedule.step(), optimizer.zero_grad()
        if step % 20 == 0 or step in (1, steps):
            report(f"step {step}: {loss.item():.3f} nats per byte")


@torch.no_grad()
def write(model, prompt, length, device="cpu"):
    cache, ids = Cache(), list(prompt.encode())
    fresh = torch.tensor([ids], device=device)
    for _ in range(length):
        weights = (model(fresh, cache)[0, -1] / 0.8).softmax(-1)
        ids.append(torch.multinomial(weights, 1).item())
        fresh = torch.tensor([ids[-1:]], device=device)
    return bytes(ids).decode(errors="replace")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("text", nargs="+")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Model().to(args.device)
    train(model, args.text, args.steps, args.batch, device=args.device)
    print(write(model, "It was a truth", 200, args.device))
