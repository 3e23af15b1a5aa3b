"""generate() beside the command line's --json."""

import subprocess

import pytest

import echelon


@pytest.fixture(scope="module")
def saved(text, tmp_path_factory):
    """A little training: what it writes is no English, but always the same."""
    path = tmp_path_factory.mktemp("saved")
    echelon.train(text, checkpoint=path, model="mixtral-tiny", seq_len=32, global_batch=4, micro_batch=2, threads=1,
                  steps=3, sample=0)  # fmt: skip
    return path


def test_equals_the_command_line(told, saved):
    request = {"prompt": "In the ", "max_tokens": 12, "temperature": 0.7, "seed": 3, "threads": 1}
    flags = [word for name, value in request.items() for word in ("--" + name.replace("_", "-"), value)]
    answer = echelon.generate(saved, **request)
    assert isinstance(answer, echelon.Generated)
    assert answer.to_dict() == told("generate", "--checkpoint", saved, *flags)
    assert answer.prompt == "In the " and len(answer.tokens) == 12
    assert str(answer) == answer.prompt + answer.text
    assert echelon.generate(echelon.open_checkpoint(saved), **request).tokens == answer.tokens


def test_an_empty_prompt_is_the_beginning_of_a_document(told, saved):
    answer = echelon.generate(saved, "", max_tokens=4)
    assert answer.to_dict() == told("generate", "--checkpoint", saved, "--prompt", "", "--max-tokens", 4)
    with pytest.raises(echelon.RequestError, match="data_cache: its value is empty"):
        echelon.train("x.txt", data_cache="")


def test_several_prompts_over_ranks(told, saved):
    prompts = ["In the", "And", "earth"]
    flags = [word for one in prompts for word in ("--prompt", one)]
    answers = echelon.generate(saved, prompts, max_tokens=5, dp=2, tp=2, threads=1)
    assert [one.prompt for one in answers] == prompts
    command = told("generate", "--checkpoint", saved, *flags, "--max-tokens", 5, "--dp", 2, "--tp", 2)
    assert [one.tokens for one in answers] == [one["tokens"] for one in command["texts"]]


def test_text_comes_in_pieces(saved):
    pieces = []
    whole = echelon.generate(saved, "In", max_tokens=20, threads=1, on_text=lambda piece, i: pieces.append((i, piece)))
    assert {i for i, _ in pieces} == {0} and len(pieces) > 1
    assert "".join(piece for _, piece in pieces) == whole.text
    some = echelon.generate(saved, "In", max_tokens=20, threads=1, on_text=lambda *_: False)
    assert 0 < len(some.tokens) < 20 and whole.tokens[: len(some.tokens)] == some.tokens

    def fail(piece, index):
        raise KeyError(piece)

    with pytest.raises(KeyError):
        echelon.generate(saved, "In", max_tokens=20, threads=1, on_text=fail)


def test_tokens_alone(saved):
    answer = echelon.generate(saved, prompt_tokens=[10, 20], max_tokens=3, threads=1)
    assert answer.prompt_tokens == [10, 20] and len(answer.tokens) == 3 and answer.text is None
    assert str(answer) == " ".join(map(str, answer.tokens))


@pytest.mark.parametrize(
    "arguments, field",
    [
        ({"checkpoint": "/nowhere"}, None),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "tp": 3}, "tp"),
        ({"prompt": "a", "chat": True}, "chat"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", 3]}, "prompt"),
        ({"prompt": {"a": "b"}}, "prompt"),
        ({"prompt": "a", "max_tokns": 3}, "max_tokns"),
    ],
)
def test_refusals(saved, arguments, field):
    with pytest.raises(echelon.RequestError) as refusal:
        echelon.generate(**{"checkpoint": saved, "threads": 1, **arguments})
    if field:
        assert refusal.value.field == field


def test_the_notebooks_sample_is_what_the_program_prints(binary, saved):
    answer = echelon.generate(saved, "In the ", max_tokens=8, threads=1)
    printed = subprocess.run([binary, "generate", "--checkpoint", saved, "--prompt", "In the ", "--max-tokens", "8",
                              "--threads", "1"], capture_output=True, check=True)  # fmt: skip
    assert printed.stdout.decode("utf-8", "replace") == f"{answer}\n"
