#!/usr/bin/env python3
"""Training steps of PyTorch on the CPU, or on a CUDA device: the same work as `echelon bench train`, for compare_torch.py.

    torch_train.py MODEL f32|tf32|bf16 eager|compile THREADS BATCH SEQ_LEN STEPS [cpu|cuda]

MODEL: gpt2-124m or llama-42m. Prints one JSON object: the median seconds of a step, its causal FLOPs, the FLOP/s of a
product of 2048 x 2048 matrices in the same process (8192 x 8192 on a device), and the peak of resident memory in bytes, on a device
of what torch has allocated there.
"""
import json, resource, statistics, sys, time

import torch
import torch.nn.functional as F
from torch import nn

SIZES = {
    "gpt2-124m": dict(layers=12, hidden=768, heads=12, vocab=50257, mlp=3072, gpt=True),
    "llama-42m": dict(layers=8, hidden=512, heads=8, vocab=32000, mlp=1376, gpt=False),
}


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-5)


def rotated(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Layer(nn.Module):
    def __init__(self, s):
        super().__init__()
        width, self.heads, self.gpt = s["hidden"], s["heads"], s["gpt"]
        norm = nn.LayerNorm if self.gpt else RMSNorm
        self.norm1, self.norm2 = norm(width), norm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=self.gpt)
        self.out = nn.Linear(width, width, bias=self.gpt)
        self.up = nn.Linear(width, s["mlp"] * (1 if self.gpt else 2), bias=self.gpt)
        self.down = nn.Linear(s["mlp"], width, bias=self.gpt)

    def forward(self, x, turns):
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2)
                   for part in self.qkv(self.norm1(x)).chunk(3, -1))
        if turns is not None:
            q, k = rotated(q, *turns), rotated(k, *turns)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        hidden = self.up(self.norm2(x))
        if self.gpt:
            return x + self.down(F.gelu(hidden, approximate="tanh"))
        gate, up = hidden.chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, s, length):
        super().__init__()
        width, self.head_dim, self.gpt = s["hidden"], s["hidden"] // s["heads"], s["gpt"]
        self.embedding = nn.Embedding(s["vocab"], width)
        self.positions = nn.Embedding(length, width) if self.gpt else None
        self.layers = nn.ModuleList(Layer(s) for _ in range(s["layers"]))
        self.norm = (nn.LayerNorm if self.gpt else RMSNorm)(width)
        self.head = nn.Linear(width, s["vocab"], bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
        if self.gpt:
            self.head.weight = self.embedding.weight

    def forward(self, tokens, targets):
        x, turns = self.embedding(tokens), None
        if self.gpt:
            x = x + self.positions.weight[: tokens.shape[1]]
        else:
            rate = 10000 ** (-torch.arange(0, self.head_dim, 2).float() / self.head_dim)
            angle = (torch.arange(tokens.shape[1]).float()[:, None] * rate).to(x.device)
            turns = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, turns)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def main():
    name, dtype, mode = sys.argv[1:4]
    threads, batch, length, steps = map(int, sys.argv[4:8])
    device = sys.argv[8] if len(sys.argv) > 8 else "cpu"
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    torch.manual_seed(1)
    s, narrow = SIZES[name], dtype == "bf16"
    model = Model(s, length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    run = torch.compile(model) if mode == "compile" else model
    tokens, targets = (torch.randint(0, s["vocab"], (batch, length), device=device) for _ in range(2))

    def step():
        begin = time.perf_counter()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=narrow):
            loss = run(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        return time.perf_counter() - begin

    for _ in range(1 if device == "cpu" else 4):
        step()
    seconds = statistics.median(step() for _ in range(steps))
    resident = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if device == "cpu"
                else torch.cuda.max_memory_allocated())
    n = 2048 if device == "cpu" else 8192
    a, b = (torch.randn(n, n, dtype=torch.bfloat16 if narrow else torch.float32, device=device) for _ in range(2))
    done = (lambda: None) if device == "cpu" else torch.cuda.synchronize
    peak = 0.0
    for _ in range(12):
        done()
        begin = time.perf_counter()
        a @ b
        done()
        peak = max(peak, 2 * n**3 / (time.perf_counter() - begin))
    multiplied = sum(p.numel() for p in model.parameters())
    multiplied -= length * s["hidden"] if s["gpt"] else s["vocab"] * s["hidden"]
    print(json.dumps({
        "torch": torch.__version__,
        "tokens_per_second": batch * length / seconds,
        "mfu": (6 * multiplied + 6 * s["layers"] * s["hidden"] * length) * batch * length / seconds / peak,
        "peak_flops": peak,
        "resident_bytes": resident,
    }))


if __name__ == "__main__":
    main()
