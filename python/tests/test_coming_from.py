"""docs/coming_from.md: each row's plan, written for the other program, has the row's words."""

import json
import re
import shlex
from pathlib import Path

import pytest

import echelon

PROGRAMS = {"Megatron-Core": "megatron-core", "torchtitan": "torchtitan", "nanotron": "nanotron", "DeepSpeed": "deepspeed"}


def rows():
    text = (Path(__file__).resolve().parents[2] / "docs/coming_from.md").read_text()
    for section in text.split("\n## ")[1:]:
        program = PROGRAMS[section.split("\n")[0]]
        for theirs, ours in re.findall(r"^\| `(.+)` \| `(--.+)` \|$", section, re.MULTILINE):
            yield pytest.param(program, theirs.replace("\\|", "|"), ours, id=f"{program}: {theirs}")


def arguments_of(flags):
    words = shlex.split(flags)
    return {flag[2:].replace("-", "_"): value for flag, value in zip(words[::2], words[1::2])}


# What the row does not say is the plainest there is, on a device that it fits.
PLAIN = {"model": "llama-3-8b", "machine": "b300", "global_batch": 64, "micro_batch": 1, "tp": 1, "pp": 1, "cp": 1,
         "zero": 0, "recompute": "none"}  # fmt: skip


def plan_of(program, flags):
    given = arguments_of(flags)
    asked = {**PLAIN, **given}
    if "ep" in given:
        asked["zero"] = 1  # a mixture of experts is larger
    if program == "torchtitan":
        asked["zero"] = given.get("zero", 2)  # it leaves states whole on data-parallel ranks alone
    if int(asked["pp"]) > 1:
        asked.setdefault("schedule", "1f1b")
    asked.setdefault("dp", 8 // (int(asked["tp"]) * int(asked["pp"]) * int(asked["cp"])))
    return echelon.plan(top=1, **asked)


def flat(text):
    """JSON on one line, as the rows have it; anything else as it is."""
    try:
        return json.dumps(json.loads(text))
    except ValueError:
        return text


@pytest.mark.parametrize("program, theirs, ours", list(rows()))
def test_has_the_words(program, theirs, ours):
    answer = plan_of(program, ours)
    assert answer.best is not None, answer.table()
    files = answer.best.launch_files(program)
    text = "\n".join(flat(one) for one in files.values())
    assert re.search(rf"(?<![\w-]){re.escape(theirs)}(?![\w-])", text), text


def test_all_programs_have_rows():
    assert {param.values[0] for param in rows()} == set(PROGRAMS.values())
