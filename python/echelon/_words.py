"""Keyword arguments in the words of the command line's flags."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Mapping


def _word(value: Any, directory: List[str]) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
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
    if isinstance(value, (list, tuple)):
        return ",".join(_word(one, directory) for one in value)
    return str(value)


@contextmanager
def words_of(arguments: Mapping[str, Any]) -> Iterator[Dict[str, List[str]]]:
    """The values as texts; None is as if it were not given."""
    directory: List[str] = []
    try:
        words: Dict[str, List[str]] = {}
        for name, value in arguments.items():
            if value is None:
                continue
            if isinstance(value, (list, tuple)):
                if any(isinstance(one, (list, tuple)) for one in value):  # F,B,W;F,B,W
                    words[name] = [";".join(_word(one, directory) for one in value)]
                else:
                    words[name] = [_word(one, directory) for one in value]
            else:
                words[name] = [_word(value, directory)]
        yield words
    finally:
        for path in directory:
            for file in os.listdir(path):
                os.unlink(os.path.join(path, file))
            os.rmdir(path)
