#!/usr/bin/env python3
"""Step times of twenty configurations on this machine: what the calibrated planner says, and what training takes.

    bench/calibrated_steps.py build/release/echelon TEXT [--steps 30] [--only N] [--machine cpu.toml]

Calibrates first, unless --machine names a file that `echelon calibrate` wrote. Wants a quiet machine. The time of a
step is the median over the steps after the first five. The status is 1 when the mean error of all twenty is above
15%, or when fewer than 15 lie inside their intervals; with --only there is no verdict.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

# Two ranks each: a core for every rank, which is what the calibration measures.
CONFIGURATIONS = [
    '--dp 2', '--dp 2 --micro-batch 4', '--dp 2 --zero 1', '--dp 2 --zero 2', '--dp 2 --zero 3', '--dp 2 --recompute full',
    '--dp 2 --recompute selective', '--dp 2 --zero 3 --micro-batch 2 --recompute full', '--tp 2', '--tp 2 --sp off',
    '--tp 2 --micro-batch 4', '--cp 2 --cp-kind ring', '--cp 2 --cp-kind ulysses', '--cp 2 --cp-kind allgather',
    '--pp 2 --schedule 1f1b', '--pp 2 --schedule interleaved --chunks 3', '--pp 2 --schedule zb-h1', '--pp 2 --schedule zb-v',
    '--pp 2 --schedule dualpipev', '--pp 2 --schedule gpipe --micro-batch 2',
]


def run(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, errors='replace')
    if done.returncode != 0:
        sys.exit(f'{" ".join(map(str, command))}: {done.stderr or done.stdout}')
    return done.stdout


def pinned(flags):
    words = flags.split()
    for axis in ('--dp', '--tp', '--pp', '--cp'):
        if axis not in words:
            words += [axis, '1']
    for flag, value in (('--zero', '0'), ('--recompute', 'none'), ('--micro-batch', '1')):
        if flag not in words:
            words += [flag, value]
    return words


def measured(echelon, plan, text, steps, folder):
    log = folder / 'log'
    run(echelon, 'train', '--plan', plan, '--data', text, '--steps', steps, '--log', log, '--json')
    seconds = [json.loads(line)['step_seconds'] for line in log.read_text().splitlines() if 'step_seconds' in line]
    log.unlink()
    return statistics.median(seconds[5:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('echelon')
    parser.add_argument('text')
    parser.add_argument('--steps', type=int, default=30)
    parser.add_argument('--only', type=int, default=len(CONFIGURATIONS))
    parser.add_argument('--machine')
    parser.add_argument('--model', default='gpt2-tiny')
    a = parser.parse_args()
    if a.steps < 10:
        parser.error(f'--steps {a.steps}: give at least 10, of which the first five are not counted')
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        machine = a.machine or folder / 'cpu.toml'
        if not a.machine:
            print(run(a.echelon, 'calibrate', '--out', machine).splitlines()[-1])
        errors, inside = [], 0
        for flags in CONFIGURATIONS[:a.only]:
            plan = folder / 'plan.toml'
            words = pinned(flags)
            answer = run(a.echelon, 'plan', '--model', a.model, '--machine', machine, '--software', 'echelon', '--precision', 'f32',
                         '--gpus', 2, '--global-batch', 16, '--seq-len', 256, '--top', 1, '--json', '--out', plan, *words)
            best = json.loads(answer.splitlines()[0])['plans'][0]
            seconds = measured(a.echelon, plan, a.text, a.steps, folder)
            error = best['step_seconds'] / seconds - 1
            within = best['step_seconds_p10'] <= seconds <= best['step_seconds_p90']
            errors.append(abs(error))
            inside += within
            print(f'{flags:<50} {1e3 * best["step_seconds"]:8.1f} ms predicted '
                  f'{1e3 * seconds:8.1f} ms measured {100 * error:+6.1f}%{"" if within else "  outside its interval"}', flush=True)
        print(f'{len(errors)} configurations: mean error {100 * statistics.mean(errors):.1f}%, {inside} inside their intervals')
        if len(errors) == len(CONFIGURATIONS):
            sys.exit(0 if statistics.mean(errors) <= 0.15 and inside >= 15 else 1)


if __name__ == '__main__':
    main()
