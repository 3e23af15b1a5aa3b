"""Keyword arguments in the words of the command line's flags."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Mapping

from ._errors import RequestError


_LEGAL = "a text, a number, True, False, a path, a Model, Machine, Software or Plan, or a list of these"


def _word(value: Any, directory: List[str]) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, str):
        return value
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, int):
        return repr(int(value))  # an IntEnum too
    if isinstance(value, float):
        return repr(value)
    if hasattr(value, "to_toml"):  # a Model, a Machine, a Plan: handed over as its file
        if not directory:
            directory.append(tempfile.mkdtemp(prefix="echelon-"))
        name = getattr(value, "name", type(value).__name__)
        path = os.path.join(directory[0], f"{len(os.listdir(directory[0]))}-{name.replace(os.sep, '-')}.toml")
        with open(path, "w", encoding="utf-8") as file:
            file.write(value.to_toml())
        return path
    if isinstance(value, list):
        return ",".join(_word(one, directory) for one in value)
    raise TypeError(type(value).__name__)


def _plain(value: Any) -> Any:
    """Scalars and arrays of numpy and torch as Python's own, tuples and ranges as lists."""
    if isinstance(value, (list, tuple, range)):
        return [_plain(one) for one in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else value


def texts_of(field: str, value: Any) -> List[str]:
    """One text, or a list of them with at least one."""
    texts = [value] if isinstance(value, str) else _plain(value)
    if isinstance(texts, list) and texts and all(isinstance(one, str) for one in texts):
        return texts
    if not isinstance(texts, list):
        wrong = f"a value of type {type(value).__name__}"
    elif not texts:
        wrong = "an empty list"
    else:
        wrong = "a list with a value of type " + next(type(one).__name__ for one in texts if not isinstance(one, str))
    raise RequestError(f"--{field}: {wrong}; legal: a text, or a list of texts")


@contextmanager
def words_of(arguments: Mapping[str, Any]) -> Iterator[Dict[str, List[str]]]:
    """The values as texts; None is as if it were not given."""
    directory: List[str] = []
    try:
        words: Dict[str, List[str]] = {}
        for name, value in arguments.items():
            if value is None:
                continue
            value = _plain(value)
            try:
                if not isinstance(value, list):
                    words[name] = [_word(value, directory)]
                elif any(isinstance(one, list) for one in value):  # F,B,W;F,B,W
                    words[name] = [";".join(_word(one, directory) for one in value)]
                else:
                    words[name] = [_word(one, directory) for one in value]
            except TypeError as error:
                legal = _LEGAL
                if callable(value):
                    legal += "; on_step, on_start, on_evaluation, on_checkpoint and on_text take functions"
                elif hasattr(value, "to_text"):  # a Schedule: what is saved of a run names its file
                    legal = "the path of a file that holds its to_text()"
                raise RequestError(f"--{name.replace('_', '-')}: a value of type {error}; legal: {legal}") from None
        yield words
    finally:
        for path in directory:
            for file in os.listdir(path):
                os.unlink(os.path.join(path, file))
            os.rmdir(path)
