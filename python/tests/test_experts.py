"""Mixtures of experts: the same functions, and the routing simulated."""

import echelon
import pytest


def flags_of(request):
    return [word for name, value in request.items() for word in ("--" + name.replace("_", "-"), value)]


def test_the_model_says_what_it_has():
    model = echelon.Model("mixtral-8x7b")
    assert (model.num_experts, model.experts_per_token, model.num_shared_experts) == (8, 2, 0)
    assert model.num_active_parameters < model.num_parameters
    assert echelon.Model("llama-3-8b").num_experts == 0
    names = [one.name for one in echelon.Model("mixtral-tiny").parameters()]
    assert any("experts" in name for name in names)


def test_plans_are_the_command_lines(told):
    request = {"model": "mixtral-8x7b", "gpus": 16, "global_batch": 64, "seq_len": 4096, "ep": 8, "top": 3}
    answer, expected = echelon.plan(**request), told("plan", *flags_of(request))
    assert [one.step_seconds for one in answer.plans] == [one["step_seconds"] for one in expected["plans"]]
    assert answer.best.plan.ep == 8 and answer.best.traffic_bytes_per_gpu["ep"] > 0


def test_trains_and_verifies(tiny, text, told):
    request = {**tiny, "model": "mixtral-tiny", "dp": 2, "ep": 2}
    answer = echelon.train(text, steps=2, sample=0, aux_loss=0.01, **request)
    for record in answer.steps:
        assert len(record.experts) == answer.plan.model.num_layers
        layer = record.experts[0]
        # Every token of the batch goes to that many experts.
        assert sum(layer.tokens) == record.tokens * answer.plan.model.experts_per_token
    assert answer.measured_traffic.bytes("dp") == answer.predicted_traffic.bytes("dp")
    assert answer.measured_traffic.bytes("ep", "all_to_all") > 0  # how much the data decide
    checked = {"model": "mixtral-tiny", "dp": 2, "ep": 2, "steps": 1, "seq_len": 16, "threads": 1}
    report = echelon.verify(**checked)
    assert report and report.to_dict()["loss_max_rel_diff"] == told("verify", *flags_of(checked))["loss_max_rel_diff"]


def test_a_dry_run_counts_its_experts(told):
    request = {"model": "mixtral-tiny", "dp": 4, "ep": 4}
    assert echelon.dry_run(**request).to_dict() == told("train", "--dry-run", *flags_of(request))


def test_routing_is_simulated(told):
    request = {"model": "mixtral-8x7b", "ep": 4, "tokens": 256, "steps": 20}
    answer = echelon.simulate_experts("none", "bias", **request)
    assert answer.to_dict() == told("simulate", "--moe", "--compare", "none,bias", *flags_of(request))
    assert [one.method for one in answer.methods] == ["none", "bias"]
    none, bias = answer.methods
    assert len(none.chosen) == 20 and len(none.chosen[0]) == 8 and bias.slowest_device < none.slowest_device
    assert answer._repr_svg_().startswith("<svg") and answer.to_svg(devices=True) != answer.to_svg()
    with pytest.raises(echelon.RequestError, match="microbatches"):
        echelon.simulate_experts("none", microbatches=3)
    with pytest.raises(echelon.RequestError) as refusal:
        echelon.simulate_experts("nothing")
    assert refusal.value.field == "compare"
