"""Schedules and simulate() beside the command line's --json."""

import pytest

import echelon
from echelon import Instruction as I
from echelon import Schedule


@pytest.mark.parametrize("name", Schedule.names())
def test_equals_the_command_line(told, name):
    pp, microbatches = 4, 8
    answer = echelon.simulate(name, pp=pp, microbatches=microbatches, times=(1, 1.5, 0.5), comm_time=0.25)
    flags = ["--schedule", name, "--pp", pp, "--microbatches", microbatches, "--times", "1,1.5,0.5"]
    assert answer.to_dict() == told("simulate", *flags, "--comm-time", 0.25)
    assert answer.timeline.makespan == answer.makespan
    assert len(answer.peak_activations) == pp
    assert answer.schedule.num_ranks == pp


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "dualpipev", "2bw"])
def test_a_schedule_as_data_is_the_named_one(name):
    schedule = Schedule.named(name, pp=4, microbatches=8)
    schedule.check()
    rebuilt = Schedule(
        [[I(i.op, i.stage, i.microbatch, i.version, i.overlaps_next) for i in rank] for rank in schedule.ranks],
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        name=name,
    )
    assert rebuilt == schedule
    assert Schedule.from_text(schedule.to_text()).to_text() == schedule.to_text()
    assert echelon.simulate(rebuilt).to_dict() == echelon.simulate(name, pp=4, microbatches=8).to_dict()


def test_one_of_ones_own():
    mine = Schedule([[I("F", 0, m) for m in range(3)] + [I("BW", 0, m) for m in range(3)],
                     [I(op, 1, m) for m in range(3) for op in ("F", "BW")]])  # fmt: skip
    mine.check()
    assert (mine.num_ranks, mine.num_stages, mine.num_microbatches) == (2, 2, 3)
    answer = echelon.simulate(mine, times=(1, 1, 1))
    assert answer.makespan == 1 + 3 * 3 + 2
    assert answer.peak_activations == [3, 1]
    assert [str(i) for i in mine.lower().ranks[0]][:2] == ["0F0", "send of the activation 0.0 to rank 1"]
    assert answer.timeline.busy(0) == 9
    spans = answer.timeline.ranks[1]
    assert (spans[0].begin, spans[0].end, spans[0].instruction) == (1, 2, I("F", 1, 0))
    with pytest.raises(IndexError):
        answer.timeline.busy(2)


@pytest.mark.parametrize(
    "ranks, words",
    [
        ([[I("BW", 0, 0), I("F", 0, 0)]], ["rank 0", "0BW0", "before F"]),
        ([[I("F", 0, 0)]], ["stage 0", "microbatch 0"]),
        ([[I("F", 0, 0), I("BW", 0, 0)], [I("F", 5, 0), I("BW", 5, 0)]], ["stage"]),
        # Each waits for the other.
        ([[I("F", 0, 0), I("F", 3, 0), I("BW", 3, 0), I("BW", 0, 0)],
          [I("F", 2, 0), I("F", 1, 0), I("BW", 2, 0), I("BW", 1, 0)]], ["rank", "activation of stage"]),
    ],
)  # fmt: skip
def test_a_wrong_one_is_told_why(ranks, words):
    with pytest.raises(echelon.RequestError) as refusal:
        Schedule(ranks).check()
    for word in words:
        assert word in str(refusal.value)
    with pytest.raises(echelon.RequestError):
        echelon.simulate(Schedule(ranks))


@pytest.mark.parametrize("make", [lambda: I("G", 0), lambda: I("F", -1), lambda: I("F", 0, 1 << 30), lambda: I("send", 0),
                                  lambda: Schedule([]), lambda: Schedule([[I("F", 0)]], num_stages=0),
                                  lambda: Schedule.named("zb-h9", 4, 8), lambda: Schedule.from_text("0Q0")])  # fmt: skip
def test_what_no_instruction_could_mean(make):
    with pytest.raises(echelon.RequestError):
        make()


def test_a_named_one_has_the_sizes_that_simulate_has():
    size = {"pp": 10**6, "microbatches": 10**6}
    refusals = []
    for make in (lambda: Schedule.named("1f1b", **size), lambda: echelon.simulate("1f1b", **size)):
        with pytest.raises(echelon.RequestError, match="pieces of work; legal: up to 8388608") as refusal:
            make()
        refusals.append(str(refusal.value))
    assert refusals[0] == refusals[1]
    for steps in (0, 2):
        with pytest.raises(echelon.RequestError) as refusal:
            Schedule.named("1f1b", 4, 8, steps=steps)
        assert refusal.value.field == "steps"
    assert Schedule.named("2bw", 2, 2, steps=3).num_microbatches == 6


def test_instructions_beyond_the_schedule_are_refused():
    for schedule in [Schedule([[I("F", 3, 0), I("BW", 3, 0)]], num_stages=1),
                     Schedule([[I("F", 0, 3), I("BW", 0, 3)]], num_microbatches=1),
                     Schedule([[I("V", 7, 0)], [I("F", 0, 0)]], vocabulary_parts=1)]:  # fmt: skip
        with pytest.raises(echelon.RequestError):
            schedule.check()
        with pytest.raises(echelon.RequestError):
            echelon.simulate(schedule)
        with pytest.raises(echelon.RequestError):
            schedule.lower()
        with pytest.raises(echelon.RequestError):
            schedule._repr_svg_()


def test_several_at_once(told):
    answers = echelon.compare("gpipe", "1f1b", "dualpipe", pp=4, microbatches=6)
    flags = ["--compare", "gpipe,1f1b,dualpipe", "--pp", 4, "--microbatches", 6]
    assert {"schedules": [one.to_dict() for one in answers]} == told("simulate", *flags)
    assert [one.valid for one in answers] == [True, True, False]
    assert answers[2].reason.startswith("pp") or answers[2].reason.startswith("microbatches"), answers[2].reason
    assert "--" not in repr(answers[2]) and "--" in answers[2].to_dict()["reason"]
    # It has no makespan of 0, which would be the least.
    with pytest.raises(echelon.RequestError) as refusal:
        min(answers, key=lambda one: one.makespan)
    assert str(refusal.value) == answers[2].reason
    for name in ["bubble_fraction", "peak_activations", "messages", "timeline", "schedule"]:
        with pytest.raises(echelon.RequestError):
            getattr(answers[2], name)
    assert echelon.draw(answers[0]).to_svg().startswith("<svg")
    assert repr(echelon.draw(answers)) == "<Drawing of gpipe, 1f1b, dualpipe>"
    assert "gpipe" in echelon.draw(answers).to_svg()
    assert echelon.draw(answers).to_html().lstrip().lower().startswith("<!doctype html>")


def test_files_stand_beside_published_ones(tmp_path):
    rows = tmp_path / "mine.txt"
    rows.write_text(Schedule.named("gpipe", 2, 3).to_text())
    mine, gpipe = echelon.compare(rows, "gpipe", pp=2, microbatches=3)
    assert mine.name == "mine" and mine.makespan == gpipe.makespan


def test_what_is_no_schedule_is_refused_in_public_words():
    schedule = Schedule.named("1f1b", 4, 8)
    assert echelon.simulate(None).to_dict() == echelon.simulate().to_dict()
    for make, field in [
        (lambda: echelon.simulate(5), "schedule"),
        (lambda: echelon.simulate({}), "schedule"),
        (lambda: echelon.compare("1f1b", schedule), "compare"),
        (lambda: echelon.compare(), "compare"),
        (lambda: echelon.draw([schedule]), "simulations"),
    ]:
        with pytest.raises(echelon.RequestError) as refusal:
            make()
        assert refusal.value.field == field and "_" not in str(refusal.value)


def test_stage_times_and_the_output_layer(told):
    answer = echelon.simulate("1f1b", pp=2, microbatches=4, stage_times=[(1, 1, 1), (2, 2, 2)], output_layer=(1, 1, 0))
    flags = ["--schedule", "1f1b", "--pp", 2, "--microbatches", 4, "--stage-times", "1,1,1;2,2,2"]
    assert answer.to_dict() == told("simulate", *flags, "--output-layer", "1,1,0")


def test_drawings(told):
    schedule = Schedule.named("zb-h1", pp=4, microbatches=8)
    assert schedule._repr_svg_().startswith("<svg")
    answer = echelon.simulate(schedule)
    assert "<svg" in answer._repr_html_() and "makespan" in answer._repr_html_()
    assert answer.timeline.to_text(width=60)
    assert '"traceEvents"' in answer.timeline.to_perfetto()
    assert "0F0" in Schedule.named("1f1b", pp=4, microbatches=8).to_csv()
    with pytest.raises(echelon.RequestError, match="width"):
        answer.timeline.to_text(width=3)
    for unit in [0, -1, float("nan"), float("inf")]:
        with pytest.raises(echelon.RequestError, match="microseconds_per_unit"):
            answer.timeline.to_perfetto(unit)
    assert schedule.lower()._repr_svg_() is None
    assert repr(schedule) == "<Schedule zb-h1: 4 ranks, 4 stages, 8 microbatches>"
    assert repr(Schedule.from_text("0F0 0BW0")) == "<Schedule mine: 1 rank, 1 stage, 1 microbatch>"


def test_costs_that_a_schedule_cannot_have():
    schedule = Schedule.named("1f1b", pp=4, microbatches=8)
    for arguments in [{"pp": 4}, {"times": (1, 1)}, {"stage_times": [(1, 1, 1)] * 3}, {"comm_time": -1}]:
        with pytest.raises(echelon.RequestError):
            echelon.simulate(schedule, **arguments)
