"""What the tests share: the program, whose --json is the yardstick, and a text to train on."""

import json
import os
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def binary():
    """The program of the same build; ECHELON_BINARY says where it is."""
    path = os.environ.get("ECHELON_BINARY")
    if not path:
        pytest.skip("ECHELON_BINARY is not set: there is nothing to compare with")
    return path


@pytest.fixture(scope="session")
def told(binary):
    """What a verb prints with --json; its exit status is 0 or 1."""

    def run(verb, *flags):
        answer = subprocess.run(
            [binary, *verb.split(), *map(str, flags), "--json"], capture_output=True, text=True, errors="replace",
            check=False,
        )  # fmt: skip
        assert answer.returncode in (0, 1), answer.stderr
        return json.loads(answer.stdout)

    return run


@pytest.fixture(scope="session")
def refused(binary):
    """What a verb says of a request that it refuses."""

    def run(verb, *flags):
        answer = subprocess.run([binary, *verb.split(), *map(str, flags)], capture_output=True, text=True, check=False)
        assert answer.returncode == 2, answer.stdout
        return answer.stderr.removeprefix("echelon: ").rstrip("\n")

    return run


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("In the beginning God created the heaven and the earth. " * 200)
    return path


# A run of a second: a tiny model on short sequences.
TINY = {"model": "gpt2-tiny", "seq_len": 16, "global_batch": 4, "micro_batch": 2, "threads": 1}


@pytest.fixture
def tiny():
    return dict(TINY)


@pytest.fixture(scope="session")
def root():
    return Path(__file__).resolve().parents[2]
