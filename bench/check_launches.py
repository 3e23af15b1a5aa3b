#!/usr/bin/env python3
"""Holds what `echelon plan --launch-for` writes to the programs' own parsers.

    python3 -m venv v && v/bin/pip install torch megatron-core torchtitan==0.2.2 deepspeed && \\
        v/bin/pip install --no-deps megatron-bridge && \\
        v/bin/pip install git+https://github.com/huggingface/nanotron@0e0a27ea83cfe1ba61332a00383bb8307dd9e13d
    v/bin/python bench/check_launches.py build/release/echelon [--megatron DIR]

DIR is a checkout of Megatron-LM: its pretrain_gpt.py's arguments are no part of the package, whose layout parser is asked
all the same. Each check is of a plan that the planner ranks first for that program; the status is 1 where one is refused.
"""
import ast
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import types
import unittest.mock

ECHELON = os.path.abspath(sys.argv[1])
MEGATRON = os.path.abspath(sys.argv[sys.argv.index('--megatron') + 1]) if '--megatron' in sys.argv else None

LLAMA = '--model llama-3-70b --machine h100 --gpus 64 --global-batch 512 --seq-len 8192'
SMALL = '--model llama-3-8b --machine h100 --gpus 64 --global-batch 512 --seq-len 8192'
OLD = '--model llama-2-7b --machine h100 --gpus 16 --global-batch 128 --seq-len 4096'
# Layers of one part each, in one stage and in several.
HYBRIDS = [f'--model {model} --machine h100 --gpus 64 --global-batch 512 --seq-len 8192{pp}'
           for model in ('nemotron-h-8b', 'nemotron-3-nano-30b-a3b') for pp in ('', ' --pp 1', ' --pp 2')]
# The textbook questions of docs/planning.md.
TEXTBOOK = [LLAMA,
            '--model llama-3-70b --machine a100-80 --gpus 80 --dp 80 --precision f32 --global-batch 80 --micro-batch 1 --seq-len 4096'
            ' --recompute full --zero 3 --hsdp 1',
            '--model llama-3-70b --machine a100-80 --gpus 512 --global-batch 1024 --seq-len 4096',
            '--model llama-3-405b --machine h100 --gpus 16384 --global-batch 2048 --seq-len 8192']
PLANS = {
    'megatron-core': [*TEXTBOOK, LLAMA + ' --tp 8 --pp 4 --cp 1', SMALL + ' --pp 1 --cp 2 --zero 1',
                      '--model mixtral-8x7b --machine h100 --gpus 64 --global-batch 256 --ep 8 --pp 1',
                      '--model llama-3-405b --machine h100 --gpus 16384 --global-batch 2048 --seq-len 8192 --tp 8 --pp 16',
                      SMALL + ' --precision fp8 --zero 1 --pp 2 --recompute full', *HYBRIDS],
    'megatron-bridge': [LLAMA, LLAMA + ' --tp 8 --pp 4 --cp 1', SMALL + ' --tp 1 --pp 1',
                        '--model qwen3-30b-a3b --machine b200 --gpus 64 --global-batch 512 --seq-len 4096', *HYBRIDS],
    'torchtitan': [LLAMA, SMALL + ' --pp 4 --schedule interleaved --chunks 2', SMALL + ' --pp 4 --schedule zb-h1 --cp 1',
                   SMALL + ' --cp 2 --precision fp8'],
    'nanotron': [OLD + ' --recompute none', OLD + ' --recompute none --pp 2 --tp 2', OLD + ' --recompute full --tp 2'],
    'deepspeed': [OLD, OLD + ' --pp 4 --zero 1 --cp 1', OLD + ' --tp 2 --pp 1 --cp 1 --zero 1', OLD + ' --cp 2 --pp 1 --tp 1'],
}
SOFTWARE = {'megatron-core': 'current', 'megatron-bridge': 'current'}


def command_of(folder):
    """The words of launch.sh's last command, with what it takes from the environment filled in."""
    text = (folder / 'launch.sh').read_text()
    subprocess.run(['bash', '-n', str(folder / 'launch.sh')], check=True)
    line = text.replace('\\\n', ' ').strip().splitlines()[-1]
    echo = subprocess.run(['bash', '-c', 'for w in ' + line + '; do printf "%s\\n" "$w"; done'], capture_output=True, text=True,
                          check=True, env={**os.environ, 'RECIPE': 'recipe.py', 'TRAIN': 'train.py'})
    return echo.stdout.splitlines()


MEGATRON_CHECK = '''
import os, sys, types, typing
import torch, typing_extensions
typing.override = typing_extensions.override
torch.cuda.get_device_properties = lambda *a, **k: types.SimpleNamespace(major=9, minor=0)
torch.cuda.get_device_capability = lambda *a, **k: (9, 0)
from megatron.training.arguments import parse_args, validate_args
args = parse_args()
validate_args(args)
'''


# In a process of its own: of the checkout, where there is one. The package has it since 0.18.
PATTERN_CHECK = '''
import sys
from megatron.core.models.hybrid.hybrid_layer_allocation import parse_hybrid_pattern, validate_segment_layers
pattern = parse_hybrid_pattern(sys.argv[1]).main_pattern
print(*[len(validate_segment_layers(segment)) for segment in pattern.split('|')])
'''


def check_hybrid_pattern(text, plan):
    """Its stages, in the order of the model, are the plan's."""
    env = {**os.environ, 'PYTHONPATH': MEGATRON} if MEGATRON is not None else None
    run = subprocess.run([sys.executable, '-c', PATTERN_CHECK, text], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr[-600:]
    counts = [int(word) for word in run.stdout.split()]
    assert counts == plan['layers_per_stage'], counts


def megatron_core(folder, plan):
    words = command_of(folder)
    at = next(i for i, word in enumerate(words) if word.endswith(('pretrain_gpt.py', 'pretrain_hybrid.py')))
    is_hybrid = words[at].endswith('pretrain_hybrid.py')
    flags = words[at + 1:]
    if is_hybrid:
        check_hybrid_pattern(flags[flags.index('--hybrid-layer-pattern') + 1], plan)
    elif plan['pp'] > 1:
        from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
        layout = PipelineParallelLayerLayout(flags[flags.index('--pipeline-model-parallel-layout') + 1], plan['pp'])
        layout.validate_layer_layout(sum(plan['layers_per_stage']), None)
        counts = [[str(kind).count('decoder') for kind in stage] for rank in layout.layout for stage in rank]
        order = [sum(counts[rank * layout.virtual_pipeline_model_parallel_size + chunk])
                 for chunk in range(layout.virtual_pipeline_model_parallel_size) for rank in range(plan['pp'])]
        assert order == plan['layers_per_stage'], order
    if MEGATRON is None:
        return 'pattern' if is_hybrid else 'layout' if plan['pp'] > 1 else None
    ranks = plan['dp'] * plan['tp'] * plan['pp'] * plan['cp']
    env = {**os.environ, 'PYTHONPATH': MEGATRON, 'WORLD_SIZE': str(ranks), 'RANK': '0'}
    if plan['zero'] < 2:
        env['CUDA_DEVICE_MAX_CONNECTIONS'] = '1'
    run = subprocess.run([sys.executable, '-c', MEGATRON_CHECK, *flags], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr[-600:]
    return 'arguments'


def fields_of(path, name):
    """A dataclass's fields, and those of the classes that it extends in the same file."""
    tree = {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}
    if name not in tree:
        return set()
    found = {node.target.id for node in tree[name].body if isinstance(node, ast.AnnAssign)}
    for base in tree[name].bases:
        found |= fields_of(path, ast.unparse(base).split('[')[0].split('.')[-1])
    return found


def megatron_bridge(folder, plan):
    import yaml
    import megatron.core
    core = pathlib.Path(megatron.core.__file__).parent
    bridge = core.parent / 'bridge'
    config = bridge / 'training/config.py'
    overrides = yaml.safe_load((folder / 'bridge.yaml').read_text())
    pattern = overrides['model'].get('hybrid_layer_pattern')
    provider = (('models/gpt_provider.py', 'GPTModelProvider') if pattern is None else
                ('models/hybrid/hybrid_provider.py', 'HybridModelProvider'))
    known = {
        'model': fields_of(core / 'transformer/transformer_config.py', 'TransformerConfig') |
                 fields_of(core / 'model_parallel_config.py', 'ModelParallelConfig') |
                 fields_of(bridge / provider[0], provider[1]),
        'train': fields_of(config, 'TrainingConfig'),
        'dataset': fields_of(config, 'GPTDatasetConfig') | {'sequence_length'},
        'ddp': fields_of(core / 'distributed/distributed_data_parallel_config.py', 'DistributedDataParallelConfig'),
        'optimizer': fields_of(core / 'optimizer/optimizer_config.py', 'OptimizerConfig'),
        'checkpoint': fields_of(config, 'CheckpointConfig'),
    }
    container = fields_of(config, 'ConfigContainer')
    command_of(folder)
    if pattern is not None:
        check_hybrid_pattern(pattern, plan)
    for section, values in overrides.items():
        assert section in container, section
        if isinstance(values, dict):
            for key in values:
                assert key in known[section], f'{section}.{key}'
        else:
            recipes = (bridge / 'training/mixed_precision.py').read_text()
            assert f'def {values}(' in recipes, values
    assert overrides['model']['tensor_model_parallel_size'] == plan['tp']
    return 'keys'


def torchtitan(folder, plan):
    from torch.distributed.pipelining.schedules import _Action, _validate_schedule, get_schedule_class
    from torchtitan.config import ConfigManager
    words = command_of(folder)
    at = words.index('torchtitan.train')
    os.chdir(folder)
    config = ConfigManager().parse_args(words[at + 1:])
    p = config.parallelism
    assert (p.tensor_parallel_degree, p.pipeline_parallel_degree, p.context_parallel_degree) == (plan['tp'], plan['pp'], plan['cp'])
    assert p.data_parallel_replicate_degree * p.data_parallel_shard_degree == plan['dp']
    from torchtitan.components.quantization import float8  # which registers its converters
    from torchtitan.protocols.model_converter import _registry_model_converter_cls as converters
    assert all(name in converters for name in config.model.converters), config.model.converters
    assert config.quantize.linear.float8.enable_fsdp_float8_all_gather == bool(config.model.converters), float8.__name__
    from torchtitan.models.llama3 import llama3_args
    layers = llama3_args[config.model.flavor].n_layers
    if plan['pp'] > 1:
        modules = [name for stage in p.module_fqns_per_model_part for name in stage]
        assert modules == ['tok_embeddings', *(f'layers.{i}' for i in range(layers)), 'norm', 'output']
        get_schedule_class(p.pipeline_parallel_schedule)
    if p.pipeline_parallel_schedule_csv:
        import csv
        with open(p.pipeline_parallel_schedule_csv, newline='') as table:
            order = {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(csv.reader(table))}
        _validate_schedule(order, plan['pp'], len(p.module_fqns_per_model_part), plan['microbatches'])
        return 'job and schedule'
    return 'job'


def nanotron(folder, plan):
    # It imports its logging and its configuration from each other.
    stub = types.ModuleType('nanotron.logging')
    stub.__getattr__ = lambda name: unittest.mock.MagicMock()
    sys.modules['nanotron.logging'] = stub
    from nanotron.config import get_config_from_file
    command_of(folder)
    config = get_config_from_file(str(folder / 'nanotron.yaml'))
    p = config.parallelism
    assert (p.dp, p.tp, p.pp) == (plan['dp'], plan['tp'], plan['pp'])
    assert config.tokens.micro_batch_size * config.tokens.batch_accumulation_per_replica * p.dp == config.global_batch_size
    assert config.optimizer.zero_stage == plan['zero']
    assert p.recompute_layer == (plan['recompute'] == 'full')
    assert [stage.data.dataset for stage in config.data_stages] == [None]
    assert config.optimizer.optimizer_factory.adam_beta2 == 0.95
    return 'configuration'


def deepspeed(folder, plan):
    from deepspeed.runtime.config import DeepSpeedConfig
    command_of(folder)
    with open(folder / 'ds_config.json') as file:
        text = json.load(file)
    # A PipelineModule says how many ranks share the data out; else initialize() knows the world alone.
    sizes = types.SimpleNamespace(get_data_parallel_world_size=lambda: plan['dp']) if plan['pp'] > 1 else None
    world = plan['dp'] * plan['tp'] * plan['pp'] * plan['cp']
    patched = {'get_rank': lambda: 0, 'get_world_size': lambda: world}  # no process group is there
    with unittest.mock.patch.multiple('deepspeed.runtime.config.dist', **patched):
        config = DeepSpeedConfig(text, mpu=sizes)
    assert config.zero_config.stage == plan['zero']
    assert config.train_micro_batch_size_per_gpu == plan['micro_batch']
    assert config.gradient_accumulation_steps == plan['microbatches']
    return 'configuration'


def main():
    refused = 0
    for program, plans in PLANS.items():
        passed = unasked = 0
        for flags in plans:
            with tempfile.TemporaryDirectory() as place:
                folder = pathlib.Path(place)
                command = [ECHELON, 'plan', *flags.split(), '--software', SOFTWARE.get(program, program), '--top', '1', '--json',
                           '--launch-for', program, '--launch-out', str(folder)]
                run = subprocess.run(command, capture_output=True, text=True)
                try:
                    assert run.returncode == 0, run.stderr.strip()[-400:]
                    what = globals()[program.replace('-', '_')](folder, json.loads(run.stdout)['plans'][0])
                    print(f'{program}: {what or "nothing without --megatron"} of {flags}')
                    passed += what is not None
                    unasked += what is None
                except Exception as error:  # of any parser
                    print(f'{program}: REFUSED {shlex.join(command[2:])}\n  {type(error).__name__}: {error}')
                os.chdir('/')
        print(f'{program}: {passed} of {len(plans) - unasked}')
        refused += len(plans) - unasked - passed
    return 1 if refused else 0


if __name__ == '__main__':
    sys.exit(main())
