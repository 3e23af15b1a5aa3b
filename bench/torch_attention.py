"""PyTorch's causal attention of kernels_bench's shapes in f32, in ms: of random queries, and of ones 30 times as large.

    python3 torch_attention.py [THREADS]
"""

import sys
import time

import torch
import torch.nn.functional as F

TOKENS, HEADS, DEPTH = 4096, 12, 64


def least_seconds(length, factor):
    shape = (TOKENS // length, HEADS, length, DEPTH)
    q, k, v, dout = (torch.randn(shape) for _ in range(4))
    q, k, v = (q * factor).requires_grad_(), k.requires_grad_(), v.requires_grad_()
    forward = backward = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        middle = time.perf_counter()
        out.backward(dout)
        forward = min(forward, middle - begin)
        backward = min(backward, time.perf_counter() - middle)
    return forward, backward


torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
torch.manual_seed(1)
for length in (1024, 4096):
    for factor in (1, 30):
        forward, backward = least_seconds(length, factor)
        print(f"T {length}, queries {factor}: forward {1e3 * forward:.1f}, backward {1e3 * backward:.1f}")
