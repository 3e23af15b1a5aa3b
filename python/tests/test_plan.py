"""plan(), sweep() and dry_run() beside the command line's --json."""

import copy
import inspect
import json
import pickle
import subprocess

import numpy as np
import pytest

import echelon
from echelon._words import words_of

REQUESTS = [
    {"model": "llama-3-8b", "machine": "h100", "gpus": 8, "global_batch": 64, "top": 3},
    {"model": "llama-3-70b", "machine": "h100", "gpus": 64, "global_batch": 256, "seq_len": 4096, "tp": 8, "top": 2},
    {"model": "llama-3-8b", "gpus": 8, "pp": 2, "schedule": "zb-h1", "recompute": "none", "sp": True, "tp": 2},
    {"model": "llama-3-8b", "gpus": 8, "global_batch": 64, "tokens": 1e12, "mtbf_hours": 50000.0, "price": 2.5},
    {"model": "llama-3-70b", "gpus": 8, "global_batch": 8, "zero": 0, "tp": 1, "pp": 1, "cp": 1},  # does not fit
]


def flags_of(request):
    flags = []
    for name, value in request.items():
        flags += ["--" + name.replace("_", "-"), {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value]
    return flags


def without_time(answer):
    del answer["search_seconds"]
    return answer


@pytest.mark.parametrize("request_", REQUESTS)
def test_equals_the_command_line(told, request_):
    assert without_time(echelon.plan(**request_).to_dict()) == without_time(told("plan", *flags_of(request_)))


def test_attributes_are_what_the_object_says():
    answer = echelon.plan(model="llama-3-8b", gpus=8, global_batch=64, top=2)
    first = answer.to_dict()["plans"][0]
    best = answer.best
    assert (len(answer), answer.gpus, answer.considered) == (2, 8, answer.to_dict()["considered"])
    assert best.to_dict() == first
    for name in ["step_seconds", "step_seconds_p10", "step_seconds_p90", "tokens_per_second_per_gpu", "mfu", "rank",
                 "bubble_fraction", "microbatches", "layers_per_stage", "time_seconds", "traffic_bytes_per_gpu"]:  # fmt: skip
        assert getattr(best, name) == first[name], name
    for name in ["dp", "tp", "pp", "cp", "zero", "schedule", "micro_batch"]:
        assert getattr(best.plan, name) == first[name], name
    assert best.memory.to_dict() == first["memory_bytes"]
    assert [one.total for one in best.rank_memory] == first["rank_memory_bytes"]
    assert sum(best.time_seconds.values()) == pytest.approx(best.step_seconds, rel=1e-9)
    assert "llama-3-8b" in answer.to_html() and "<td>" in answer._repr_html_()
    assert best.timeline().makespan <= best.step_seconds


def test_a_plan_is_planned_again(tmp_path):
    best = echelon.plan(model="llama-3-8b", gpus=8, global_batch=64, top=1).best
    again = echelon.plan(plan=echelon.Plan.from_toml(best.to_toml()), gpus=8).best
    assert again.step_seconds == best.step_seconds
    path = tmp_path / "plan.toml"
    path.write_text(best.to_toml())
    assert echelon.plan(plan=path, gpus=8).best.step_seconds == best.step_seconds


def test_values_may_be_numpys_and_tuples(tmp_path):
    given = {"gpus": np.int64(8), "price": np.float32(2.5), "sp": np.bool_(True), "top": np.array(2),
             "schedule": ("gpipe", "1f1b"), "times": ((1, 1, 1), np.array([2, 1, 1])), "plan": tmp_path, "hsdp": None}  # fmt: skip
    with words_of(given) as words:
        assert words == {"gpus": ["8"], "price": ["2.5"], "sp": ["on"], "top": ["2"], "schedule": ["gpipe", "1f1b"],
                         "times": ["1,1,1;2,1,1"], "plan": [str(tmp_path)]}  # fmt: skip
    for value in ({"a": 1}, {8}, b"8", lambda: 8, [{}]):
        with pytest.raises(echelon.RequestError, match="^global_batch: a value of type .*; legal: a text, a number"):
            echelon.plan(global_batch=value)


def test_names_may_be_paths(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(echelon.Model("llama-tiny").to_toml())
    assert echelon.Model(path) == echelon.Model(str(path)) == echelon.Model("llama-tiny")
    for make in (lambda: echelon.Model("llama-3-8b\0"), lambda: echelon.plan(model="llama-3-8b\0", gpus=8)):
        with pytest.raises(echelon.RequestError, match="a character of code 0"):
            make()
    with pytest.raises(TypeError, match="expected str"):
        echelon.Machine(5)


def test_models_and_machines_are_objects():
    model = echelon.Model("llama-3-8b")
    by_object = echelon.plan(model=model, machine=echelon.Machine("h100"), gpus=8, global_batch=64, top=1)
    by_name = echelon.plan(model="llama-3-8b", machine="h100", gpus=8, global_batch=64, top=1)
    assert without_time(by_object.to_dict()) == without_time(by_name.to_dict())
    assert model.num_parameters == sum(one.numel for one in model.parameters()) == 8030261248
    assert echelon.Model.from_toml(model.to_toml()) == model != echelon.Model("gpt2-tiny")
    assert "llama-3-8b" in echelon.Model.presets() and "h100" in echelon.Machine.presets()
    assert echelon.Machine("h100").peak_flops["bf16"] == 989.4e12


def test_what_is_a_file_is_pickled():
    plan = echelon.plan(model="mixtral-8x7b", gpus=16, global_batch=64, ep=8, top=1).best.plan
    for one in (plan, plan.model, echelon.Machine("h100"), echelon.Software("deepspeed")):
        for other in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
            assert type(other) is type(one) and other.to_toml() == one.to_toml()
            assert other == one and hash(other) == hash(one) and one != one.to_toml()
    assert plan != echelon.Plan.from_toml(plan.to_toml().replace("global-batch = 64", "global-batch = 128"))
    with pytest.raises(echelon.RequestError, match="seq_len 0"):
        plan.model.flops_per_token(0)
    answer = echelon.dry_run(model="llama-tiny", dp=2)
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(answer)


def test_objects_tell_what_they_are():
    dry = echelon.dry_run(model="llama-tiny", dp=2, tp=2)
    assert dry.checkpoint_bytes == dry.to_dict()["checkpoint_bytes"] == 3 * 4 * 402_624
    sweep = echelon.sweep("gpus=4..16", model="llama-3-8b", global_batch=64)
    cost = echelon.plan(model="llama-3-8b", gpus=8, global_batch=64, tokens=1e12, top=1).run
    assert repr(dry).startswith("<DryRun of 4 ranks") and "tp 2" in repr(dry)
    assert repr(echelon.dry_run(model="llama-tiny", dp=1)).startswith("<DryRun of 1 rank, 1 kind of them: ")
    assert repr(sweep) == "<Sweep of gpus: 3 values>"
    assert repr(cost).startswith(f"<RunCost: {cost.steps} steps, ")


def test_equal_objects_have_equal_hashes():
    def dry():
        return echelon.dry_run(model="llama-tiny", dp=2)

    def simulated():
        return echelon.Schedule.named("1f1b", 4, 8)

    made = [lambda: echelon.Model("llama-3-8b"), lambda: dry().memory(0), lambda: dry().traffic(0), simulated,
            lambda: simulated().ranks[0][3], lambda: simulated().lower().ranks[0][1]]  # fmt: skip
    for make in made:
        one, other = make(), make()
        assert one == other and one is not other and len({one, other}) == 1, one
    assert len({echelon.Model(name) for name in ("llama-3-8b", "llama-3-70b", "gpt2-tiny")}) == 3
    assert len(set(simulated().ranks[0])) == 16


def test_why_not_and_launch_files():
    answer = echelon.plan(model="llama-3-8b", gpus=8, global_batch=64, top=1)
    assert "longer" in echelon.why_not(answer, tp=8, pp=1)
    with pytest.raises(echelon.RequestError, match="tp: has 2 values; legal: one"):
        echelon.why_not(answer, tp=[2, 4])
    assert "torchrun" in answer.best.launch_files("megatron-core")["launch.sh"]
    with pytest.raises(echelon.RequestError, match="megatron-core"):
        answer.best.launch_files("megatron")


def test_sweep_equals_the_command_line(told):
    flags = ["--model", "llama-3-8b", "--global-batch", 64, "--sweep", "gpus=4..16"]
    sweep = echelon.sweep("gpus=4..16", model="llama-3-8b", global_batch=64)
    assert sweep.to_dict() == told("plan", *flags)
    assert sweep.key == "gpus" and sweep.values == [4, 8, 16]
    assert sweep._repr_svg_().startswith("<svg")


def test_dry_run_equals_the_command_line(told):
    flags = ["--dry-run", "--model", "llama-tiny", "--dp", 2, "--tp", 2, "--pp", 2, "--zero", 1]
    dry = echelon.dry_run(model="llama-tiny", dp=2, tp=2, pp=2, zero=1)
    assert dry.to_dict() == told("train", *flags)
    assert len(dry) == 8 == sum(one.ranks for one in dry.classes)
    for one in dry.classes:
        assert dry.memory(one.first) == one.memory and dry.traffic(one.first) == one.traffic
        assert one.memory.total == sum(value for key, value in one.memory.to_dict().items() if key != "total")
    tp = dry.traffic(0).to_dict()["tp"]
    assert dry.traffic(0).bytes("tp") == sum(tp.values())
    assert all(dry.traffic(0).bytes("tp", verb) == sent for verb, sent in tp.items())
    with pytest.raises(IndexError):
        dry.memory(8)
    with pytest.raises(echelon.RequestError, match="steps: no such argument"):
        echelon.dry_run(model="llama-tiny", steps=3)


@pytest.mark.parametrize(
    "arguments", [{"check_replicas": 10}, {"device": "cuda"}, {"device": "cuda", "cuda_graphs": True}]
)
def test_dry_run_takes_what_changes_its_memory(told, arguments):
    request = {"model": "llama-tiny", "dp": 1, **arguments}
    dry = echelon.dry_run(**request)
    assert dry.to_dict() == told("train", "--dry-run", *flags_of(request))
    assert dry.memory(0) != echelon.dry_run(model="llama-tiny", dp=1).memory(0)


@pytest.mark.parametrize("limit, fits", [("1GiB", True), (1000, False)])
def test_dry_run_says_whether_it_fits(binary, limit, fits):
    dry = echelon.dry_run(model="llama-tiny", dp=1, memory_limit=limit)
    command = [binary, "train", "--dry-run", "--model", "llama-tiny", "--dp", "1", "--memory-limit", str(limit)]
    answer = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert dry.fits is fits and answer.returncode == (0 if fits else 1)
    assert dry.to_dict() == json.loads(answer.stdout)
    assert ("fits in --memory-limit" if fits else "more than --memory-limit") in str(dry)
    assert echelon.dry_run(model="llama-tiny", dp=1).fits is None


def test_dry_run_refuses_what_the_command_line_refuses():
    with pytest.raises(echelon.RequestError, match="cuda_graphs on"):
        echelon.dry_run(model="llama-tiny", dp=1, cuda_graphs=True)


@pytest.mark.parametrize(
    "arguments, field, value",
    [
        ({"gpus": 8, "tp": 3}, "tp", "3"),
        ({"model": "llama-9"}, "model", "llama-9"),
        ({"global_btach": 3}, "global_btach", None),
        ({"micro_batch": 0}, "micro_batch", "0"),
        ({"objective": "fame"}, "objective", "fame"),
        ({"json": True}, "json", None),
    ],
)
def test_refusals_name_the_field(arguments, field, value):
    with pytest.raises(ValueError) as refusal:
        echelon.plan(**arguments)
    assert isinstance(refusal.value, echelon.RequestError)
    assert (refusal.value.field, refusal.value.value) == (field, value)
    assert "--" not in str(refusal.value)


def test_refusals_are_those_of_the_command_line(refused):
    said = refused("plan", "--gpus", 8, "--tp", 3)
    with pytest.raises(echelon.RequestError) as refusal:
        echelon.plan(gpus=8, tp=3)
    assert str(refusal.value) == said.replace("--gpus", "gpus").replace("--tp", "tp")
    assert refusal.value.legal == "1, 2, 4, 8"


def test_every_function_names_its_arguments():
    for verb in ["plan", "simulate", "simulate_experts", "train", "dry_run", "verify", "generate"]:
        told = echelon.arguments(verb)
        assert told and all(one.name.isidentifier() and one.help for one in told)
        assert inspect.getdoc(getattr(echelon, verb))
    assert "from_" in [one.name for one in echelon.arguments("train")]
    with pytest.raises(echelon.RequestError):
        echelon.arguments("bench")
