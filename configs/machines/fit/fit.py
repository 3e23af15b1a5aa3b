#!/usr/bin/env python3
"""Fits the numbers of machines and training programs on the marked rows of the published tables.

    cmake --preset planner-only && ninja -C build/planner-only score_published
    ECHELON_PUBLISHED=... configs/machines/fit/fit.py build/planner-only/tests/score_published GROUP | intervals

Every third row of a small table is fitted on (every fifth of a sweep); the others are only reported. The loss is
robust (an error of 10% weighs little less than one of 50%), so that rows from broken runs do not pull. The search
is a pattern search over the logarithms of the numbers; it needs nothing but Python's own library. What it finds is
written into configs/; which of a file's numbers are fitted its list `fitted` says. The scorer has the presets built in: build it
again before the next group, and before the last one, `intervals`, which writes the intervals of each program.
"""
import math
import pathlib
import random
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]

# number: (start, least, most)
SOFTWARE = {
    'gradient_bytes': (4, 2, 8), 'logit_bytes': (12, 4, 32), 'fragmentation': (0.1, 0, 0.6), 'saved_factor': (1.2, 0.8, 2.5),
    'product_efficiency': (1, 0.6, 1.08), 'elementwise_passes': (1.2, 0.5, 3), 'attention_efficiency': (0.8, 0.2, 1.3),
    'overlap_slowdown': (1.1, 1.0, 1.5), 'network_efficiency': (1, 0.1, 1.1), 'tensor_overlap': (0.1, 0, 0.95),
    'step_seconds': (0.005, 0, 0.01), 'launch_seconds': (2e-5, 0, 2e-4), 'optimizer_passes': (1, 0.5, 4),
    'message_seconds': (1e-4, 0, 1e-2), 'straggling': (0.003, 0, 0.05), 'collective_launch_seconds': (2e-4, 0, 2e-3), 'collective_rank_seconds': (0, 0, 1e-3), 'shard_copy_seconds': (2e-5, 0, 2e-4), 'expert_efficiency': (0.8, 0.2, 1), 'expert_passes': (2, 0.5, 10),
    'expert_launch_seconds': (1e-3, 0, 1e-2), 'expert_pair_seconds': (4e-3, 0, 2e-2), 'scan_efficiency': (1, 0.1, 1.5), 'expert_call_seconds': (1e-5, 0, 1e-4),
}


def of(name, *keys):
    return {f'software.{name}.{key}': SOFTWARE[key] for key in keys}


# name: (tables, {assignment: (start, least, most)})
GROUPS = {
    'megatron-2021': (['sc21-table1', 'korthikanti'],
                      of('megatron-2021', 'product_efficiency', 'elementwise_passes', 'network_efficiency', 'straggling',
                         'message_seconds')),
    'megatron-deepspeed': (['vtrain-multinode', 'vtrain-singlenode'],
                           {**of('megatron-deepspeed', 'product_efficiency', 'elementwise_passes', 'launch_seconds',
                                 'step_seconds', 'network_efficiency', 'message_seconds', 'optimizer_passes', 'straggling'),
                            # Its vocabulary of 50257 is odd on one tp rank, and a multiple of 4 on four.
                            'machine.a100.gemm_unaligned': (0.35, 0.1, 1)}),
    'zero-bubble': (['zero-bubble'],
                    of('zero-bubble', 'product_efficiency', 'elementwise_passes', 'message_seconds', 'step_seconds')),
    'fsdp': (['llm-foundry'],
             of('fsdp', 'product_efficiency', 'elementwise_passes', 'attention_efficiency', 'launch_seconds',
                'step_seconds', 'network_efficiency', 'overlap_slowdown', 'straggling')),
    'torchtitan': (['torchtitan'],
                   {**of('torchtitan', 'elementwise_passes'), **of('torchtitan*', 'attention_efficiency'),
                    # A device of 500 W: products in 16 and in 8 bits reach the same part of their peaks, as on h100.
                    'machine.h100-96.gemm_efficiency+gemm_fp8_efficiency': (0.55, 0.3, 0.66)}),
    'nanotron': (['nanotron'],
                 of('nanotron', 'product_efficiency', 'elementwise_passes', 'attention_efficiency', 'launch_seconds',
                    'collective_launch_seconds', 'tensor_overlap', 'network_efficiency', 'message_seconds',
                    'straggling', 'shard_copy_seconds')),
    'nanotron-memory': (['nanotron'], of('nanotron', 'gradient_bytes', 'logit_bytes', 'fragmentation', 'saved_factor')),
    'current': (['bridge-dense'],
                {**of('current', 'elementwise_passes', 'tensor_overlap', 'step_seconds', 'message_seconds', 'straggling'),
                 # In 16 bits, too, there are no fewer passes than the least possible.
                 'software.current.elementwise_passes': (1.2, 1, 3),
                 # For products in 16 bits its rows have only the output matrix: gemm_efficiency stays what it is, and in
                 # 8 bits no larger part of the peak is reached.
                 'machine.h100.gemm_fp8_efficiency': (0.6, 0.4, 0.659)}),
    # Behind it: 8 and 4 bits on Blackwell, in 16 bits a B200's products were measured, of whose chip a GB200 is made.
    'blackwell': (['bridge-dense'],
                  {'machine.blackwell.gemm_fp8_efficiency': (0.6, 0.35, 0.8),
                   'machine.blackwell.gemm_fp4_efficiency': (0.4, 0.15, 0.8),
                   # The same peaks in 8 bits, and more power to sustain them; in 16 bits, of which nothing else is known, the
                   # same part of the peak.
                   'machine.blackwell-ultra.gemm_efficiency+gemm_fp8_efficiency': (0.6, 0.35, 0.8),
                   'machine.blackwell-ultra.gemm_fp4_efficiency': (0.4, 0.15, 0.8)}),
    # Behind it, on the machine that it found. Each configuration was published twice: both rows are fitted on, or none.
    'nemo-2024': (['nemo-2407'], of('nemo-2024', 'product_efficiency', 'elementwise_passes')),
    'experts': (['bridge-experts'],
                of('current', 'expert_efficiency', 'expert_call_seconds', 'expert_passes', 'expert_launch_seconds', 'expert_pair_seconds')),
    # Behind it: what hybrids have that no other model does.
    'hybrid': (['bridge-hybrid'], of('current', 'scan_efficiency')),
}


class Scorer:
    def __init__(self, program, tables, memory):
        mode = ['--memory'] if memory else []
        self.pipe = subprocess.Popen([program, '--fit', *mode, *tables], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def errors(self, values):
        line = ' '.join(f'{key}={value:.12g}' for key, value in values.items())
        self.pipe.stdin.write(line + '\n')
        self.pipe.stdin.flush()
        return [float(x) for x in self.pipe.stdout.readline().split()]


def loss(errors, scale=0.05):
    return sum(math.sqrt(1 + (e / scale) ** 2) - 1 for e in errors) / max(1, len(errors))


def climb(scorer, parameters, values, rounds=40):
    steps = {key: max(0.2 * values[key], (most - least) / 20) for key, (_, least, most) in parameters.items()}
    best = loss(scorer.errors(values))
    for _ in range(rounds):
        moved = False
        for key, (_, least, most) in parameters.items():
            for sign in (1, -1):
                trial = dict(values)
                trial[key] = min(most, max(least, values[key] + sign * steps[key]))
                if trial[key] == values[key]:
                    continue
                now = loss(scorer.errors(trial))
                if now < best - 1e-7:
                    best, values, moved = now, trial, True
                    steps[key] *= 1.5
                    break
            else:
                steps[key] *= 0.5
        if not moved and all(steps[k] < 1e-3 * (m - l) for k, (_, l, m) in parameters.items()):
            break
    return best, values


def search(scorer, parameters, starts=5):
    """From the starting values and from the best of some random ones: the loss has several valleys."""
    draw = random.Random(1)
    tried = []
    for _ in range(60):
        values = {key: draw.uniform(least, most) for key, (_, least, most) in parameters.items()}
        tried.append((loss(scorer.errors(values)), values))
    tried.sort(key=lambda pair: pair[0])
    begin = [{key: start for key, (start, _, _) in parameters.items()}] + [v for _, v in tried[:starts]]
    best, values = min((climb(scorer, parameters, v, 12) for v in begin), key=lambda pair: pair[0])
    best, values = climb(scorer, parameters, values)
    return values, best


# Machines and programs that share a number.
FAMILIES = {'torchtitan*': ['torchtitan', 'torchtitan-eager'], 'blackwell': ['b200', 'gb200'],
            'blackwell-ultra': ['b300', 'gb300'], 'a100': ['a100-40', 'a100-80']}


def write(key, value):
    kind, family, fields = key.split('.')
    for name in FAMILIES.get(family, [family]):
        for field in fields.split('+'):
            write_one(kind, name, field, value)


def write_one(kind, name, field, value):
    write_line(ROOT / 'configs' / ('machines' if kind == 'machine' else 'software') / f'{name}.toml', field, f'{value:.4g}')


def write_line(path, field, value):
    text = path.read_text()
    line = f'{field} = {value}'
    if re.search(rf'^{field} = ', text, re.M):
        text = re.sub(rf'^{field} = .*$', line, text, count=1, flags=re.M)
    else:
        text += line + '\n'
    path.write_text(text)


def main():
    if len(sys.argv) != 3 or sys.argv[2] not in [*GROUPS, 'intervals']:
        # Until it is built again the scorer knows nothing of what another group found.
        sys.exit(f'usage: fit.py SCORER GROUP; groups: {", ".join(GROUPS)}, and behind them intervals')
    program, names = sys.argv[1], sys.argv[2:]
    if names == ['intervals']:
        return intervals(program)
    for name in names:
        tables, parameters = GROUPS[name]
        memory = name.endswith('memory')
        scorer = Scorer(program, tables, memory)
        values, best = search(scorer, parameters)
        errors = sorted(scorer.errors(values))
        print(f'{name}: {len(parameters)} numbers on {len(errors)} rows, loss {best:.3f}, mean error '
              f'{100 * sum(abs(math.expm1(e)) for e in errors) / len(errors):.1f}%')
        for key, value in values.items():
            print(f'  {key} = {value:.4g}')
            write(key, value)


# Behind all fits, with a scorer that was built with what they found: the scorer finds the intervals (tests/published/intervals.h).
def intervals(program):
    lines = subprocess.run([program, '--intervals'], capture_output=True, text=True, check=True)
    for line in lines.stdout.splitlines():
        key, text = line.split(' = ', 1)
        _, name, field = key.split('.')
        write_line(ROOT / 'configs' / 'software' / f'{name}.toml', field, text)
    print(lines.stderr, end='')


if __name__ == '__main__':
    main()
