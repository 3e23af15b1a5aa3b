"""train() and verify() beside the command line; callbacks, interrupts and the lock."""

import _thread
import json
import os
import signal
import subprocess
import threading
import time

import numpy as np
import pytest

import echelon


def test_train_has_the_losses_of_the_command_line(binary, tiny, text, tmp_path):
    log = tmp_path / "log.jsonl"
    flags = [word for name, value in tiny.items() for word in ("--" + name.replace("_", "-"), str(value))]
    subprocess.run([binary, "train", "--data", text, *flags, "--dp", "2", "--steps", "4", "--sample", "0",
                    "--log", log], check=True, capture_output=True)  # fmt: skip
    steps = [one for one in map(json.loads, log.read_text().splitlines()) if "grad_norm" in one]
    seen = []
    answer = echelon.train(text, dp=2, steps=4, sample=0, on_step=seen.append, **tiny)
    assert [(one.step, one.loss, one.grad_norm, one.lr, one.tokens) for one in seen] == [
        (one["step"], one["loss"], one["grad_norm"], one["lr"], one["tokens"]) for one in steps
    ]
    assert [one.loss for one in answer.steps] == [one.loss for one in seen]
    assert seen[-1].to_dict()["loss"] == seen[-1].loss


def test_the_summary(tiny, text):
    started = []
    answer = echelon.train(text, dp=2, tp=2, steps=2, sample=5, on_start=started.append, **tiny)
    told = answer.to_dict()
    assert answer.last_step == told["steps"] == 2
    assert answer.final_loss == told["final_loss"] == answer.steps[-1].loss
    assert answer.predicted_memory == answer.measured_memory
    assert answer.measured_traffic == answer.predicted_traffic
    assert answer.plan.tp == 2 and answer.plan.num_ranks == 4
    assert not answer.stopped and answer.checkpoint == "" and len(answer.sample) == 5
    assert started[0].num_params == echelon.Model("gpt2-tiny").num_parameters
    assert answer.validation_loss == list(answer.evaluations.values())[-1]
    assert answer.timeline.makespan > 0
    parameters = started[0].num_params
    assert repr(started[0]) == f"<StartInfo: 4 ranks, {parameters} parameters, after step 0>"


def test_resumes_to_the_same_bits(tiny, text, tmp_path):
    saved = []
    whole = echelon.train(text, steps=9, sample=0, **tiny)
    first = echelon.train(text, steps=9, sample=0, checkpoint=tmp_path, on_checkpoint=saved.append,
                          on_step=lambda record: record.step < 2, **tiny)  # fmt: skip
    assert first.stopped and first.last_step == 2 and saved == first.checkpoints == [first.checkpoint]
    rest = echelon.train(text, steps=9, sample=0, checkpoint=tmp_path, resume=True, **tiny)
    assert [one.loss for one in first.steps + rest.steps] == [one.loss for one in whole.steps]
    done = echelon.train(text, steps=9, sample=0, checkpoint=tmp_path, resume=True, **tiny)
    assert done.complete and done.final_loss is None and repr(done) == "<TrainAnswer: step 9, no step was done>"


@pytest.mark.parametrize("said, steps", [(np.False_, 1), (0, 1), (None, 3), (np.True_, 3), ("go", 3)])
def test_what_on_step_returns_is_a_truth_value(tiny, text, said, steps):
    answer = echelon.train(text, steps=3, sample=0, on_step=lambda record: said, **tiny)
    assert len(answer.steps) == steps and answer.stopped == (steps < 3)


def test_what_has_no_truth_value_is_raised(tiny, text):
    with pytest.raises(ValueError, match="ambiguous"):
        echelon.train(text, steps=3, sample=0, on_step=lambda record: np.zeros(2), **tiny)


def test_an_exception_ends_the_run(tiny, text, tmp_path):
    class Enough(Exception):
        pass

    def stop(record):
        if record.step == 2:
            raise Enough(record.step)

    with pytest.raises(Enough, match="2") as raised:
        echelon.train(text, steps=100000, sample=0, dp=2, checkpoint=tmp_path, on_step=stop, **tiny)
    assert echelon.open_checkpoint(tmp_path).step == 2
    assert raised.value.answer.checkpoint.endswith("step-00000002")


@pytest.mark.parametrize(
    "mesh, last",
    [
        ({}, 3),
        ({"dp": 2, "clip": 0}, 3),
        ({"pp": 2, "dp": 2}, 3),
        ({"model": "llama-tiny", "pp": 2, "schedule": "pipedream", "clip": 0}, 5),  # begun: the fourth; one more empties the pipeline
        ({"dp": 2, "staleness": 1}, 3),
    ],
)
def test_ctrl_c_ends_it_after_its_step(tiny, text, tmp_path, mesh, last):
    """As if it had come from the terminal in the middle of the third step, before rank 0 had shown it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    steps = []

    def note(record):
        steps.append(record.step)
        if record.step == 3:
            _thread.interrupt_main()

    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            echelon.train(text, steps=100000, sample=0, checkpoint=tmp_path, on_step=note, **{**tiny, **mesh})
    finally:
        signal.signal(signal.SIGINT, before)
    answer = raised.value.answer
    assert answer.stopped and answer.last_step == last == steps[-1] == len(steps)
    assert [one.step for one in answer.steps] == steps and answer.final_loss == answer.steps[-1].loss
    if "staleness" not in mesh:
        assert echelon.open_checkpoint(tmp_path).step == last
        assert answer.measured_memory.total > 0


def test_keyboard_interrupt_ends_it_with_a_checkpoint(tiny, text, tmp_path):
    """Another thread sends it, which it can only while the lock is free; without it the run would not end."""
    # Where the tests run in the background it may be ignored, as shells have it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    begun = threading.Event()
    steps = []

    def send():
        begun.wait()
        os.kill(os.getpid(), signal.SIGINT)

    def note(record):
        steps.append(record.step)
        begun.set()

    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            echelon.train(text, steps=1000000, sample=0, checkpoint=tmp_path, on_step=note, **tiny)
    finally:
        signal.signal(signal.SIGINT, before)
    sender.join()
    assert echelon.open_checkpoint(tmp_path).step == steps[-1]


@pytest.mark.parametrize(
    "long",
    [
        lambda: echelon.verify(model="gpt2-tiny", dp=2, steps=1000000, seq_len=16, threads=1),
        lambda: echelon.sweep("global-batch=" + ",".join(["1024"] * 10000), model="llama-3-70b", gpus=1024),
        lambda: echelon.simulate_experts(tokens=4096, steps=100000),
    ],
    ids=["verify", "sweep", "simulate_experts"],
)
def test_keyboard_interrupt_ends_what_writes_nothing(long):
    """What would take hours; the signal comes once it runs, on a thread of its own."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    calm = len(os.listdir("/proc/self/task")) + 1

    def send():
        while len(os.listdir("/proc/self/task")) <= calm:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            long()
    finally:
        signal.signal(signal.SIGINT, before)
    sender.join()


def test_runs_beside_another(tiny, text):
    answers = [None, None]

    def run(i):
        answers[i] = echelon.train(text, steps=3, sample=0, **tiny)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert [one.loss for one in answers[0].steps] == [one.loss for one in answers[1].steps]


@pytest.mark.parametrize(
    "arguments, field",
    [
        ({"data": "/nowhere/at.all"}, "data"),
        ({"tp": 3}, "tp"),
        ({"on_nan": "go"}, "on_nan"),
        ({"zero_prefetch": 2}, "zero_prefetch"),
        ({"resume": "maybe"}, "resume"),
        ({"comm": "mpi"}, "comm"),
        ({"model": "gpt3-tiny"}, "model"),
        ({"on_steps": print}, "on_steps"),
        ({"pp": 2, "schedule": echelon.Schedule.named("1f1b", 2, 2)}, "schedule"),
    ],
)
def test_train_refuses(tiny, text, arguments, field):
    with pytest.raises(echelon.RequestError) as refusal:
        echelon.train(**{"data": text, "steps": 2, **tiny, **arguments})
    assert refusal.value.field == field
    if field == "on_steps":
        assert "on_step," in refusal.value.legal
    if field == "schedule":
        assert "to_text()" in refusal.value.legal


def test_a_run_that_fails_is_a_run_error(tiny, text):
    with pytest.raises(echelon.RunError) as failure:
        echelon.train(text, steps=3, sample=0, lr=1e30, clip=0, warmup=0, **tiny)
    assert isinstance(failure.value, RuntimeError) and not isinstance(failure.value, ValueError)


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"pp": 2, "schedule": "zb-h1"}, {"tp": 2, "precision": "f64"}])
def test_verify_equals_the_command_line(told, mesh):
    request = {"model": "llama-tiny", "seq_len": 16, "steps": 1, "threads": 1, **mesh}
    flags = [word for name, value in request.items() for word in ("--" + name.replace("_", "-"), str(value))]
    answer = echelon.verify(**request)
    report, expected = answer.to_dict(), told("verify", *flags)
    assert {key for key in report} == {key for key in expected}
    for key in ["pass", "bitwise", "ranks", "steps", "bound", "loss_max_rel_diff", "grad_max_rel_diff",
                "param_max_rel_diff", "first_difference"]:  # fmt: skip
        assert report[key] == expected[key], key
    assert answer and answer.passed and answer.first_difference is None
    assert len(answer.mesh_losses) == answer.steps == 1
    assert answer.bitwise == expected["bitwise"]
