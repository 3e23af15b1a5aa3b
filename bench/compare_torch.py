#!/usr/bin/env python3
"""`echelon bench train` and PyTorch on the same work, in turns on one machine: the table of docs/performance.md.

    compare_torch.py ECHELON [--runs N] [--dtypes f32,bf16] [--models gpt2-124m,llama-42m] [--modes eager,compile]
                     [--recompute none]

Needs `pip install torch` (CPU) in the Python that runs it. An allocator named in LD_PRELOAD serves PyTorch alone.
"""
import argparse, json, os, statistics, subprocess, sys

SHAPES = {"gpt2-124m": (4, 1024), "llama-42m": (8, 512)}  # sequences, tokens of each


def ours(echelon, model, dtype, threads, steps, recompute):
    batch, length = SHAPES[model]
    command = [echelon, "bench", "train", "--model", model, "--global-batch", str(batch), "--micro-batch", str(batch),
               "--seq-len", str(length), "--threads", str(threads), "--precision", dtype, "--steps", str(steps),
               "--recompute", recompute, "--json"]
    without = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    said = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=without).stdout)
    return said["tokens_per_second"], said["mfu"], said["peak_resident_bytes"], said["cpu"]


def theirs(mode, model, dtype, threads, steps):
    batch, length = SHAPES[model]
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "torch_train.py")
    command = [sys.executable, script, model, dtype, mode, str(threads), str(batch), str(length), str(steps)]
    said = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    return said["tokens_per_second"], said["mfu"], said["resident_bytes"], said["torch"]


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("echelon")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    for name, default in (("dtypes", "f32,bf16"), ("models", ",".join(SHAPES)), ("modes", "eager,compile"), ("recompute", "none")):
        parser.add_argument(f"--{name}", default=default)
    o = parser.parse_args()
    print("| model | dtype | program | tokens/s | of its own products | peak resident |\n|---|---|---|---|---|---|")
    for model in o.models.split(","):
        for dtype in o.dtypes.split(","):
            programs = {"Echelon": lambda d: ours(o.echelon, model, d, o.threads, o.steps, o.recompute)}
            if dtype == "bf16":
                programs["Echelon, bf16-lean"] = lambda d: ours(o.echelon, model, "bf16-lean", o.threads, o.steps,
                                                                   o.recompute)
            for mode in filter(None, o.modes.split(",")):
                programs[f"PyTorch, {mode}"] = lambda d, mode=mode: theirs(mode, model, d, o.threads, o.steps)
            runs = {name: [] for name in programs}
            for _ in range(o.runs):
                for name, run in programs.items():
                    runs[name].append(run(dtype))
            for name, results in runs.items():
                rate, part, memory = (statistics.median(r[i] for r in results) for i in range(3))
                print(f"| {model} | {dtype} | {name} | {rate:.0f} | {part:.0%} | {memory / 2**30:.2f} GiB |", flush=True)
            versions = {name: results[-1][3] for name, results in runs.items()}
    print("; ".join(sorted({str(v) for v in versions.values()})))


if __name__ == "__main__":
    main()
