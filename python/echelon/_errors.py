"""What goes wrong. Bad requests are ValueErrors, runs that fail RuntimeErrors."""

from __future__ import annotations

import re
from typing import Optional

_FLAG = re.compile(r"--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)")
_BEGINNING = re.compile(r"^--([a-z][a-z0-9-]*)(?: (.*?))?: ", re.DOTALL)
_LEGAL = re.compile(r"(?:legal(?: here)?: |must be )(.*)$", re.DOTALL)


def _keyword(flag: str) -> str:
    return "from_" if flag == "from" else flag.replace("-", "_")


def in_pythons_words(message: str) -> str:
    """With the flags of the command line as arguments: --global-batch is global_batch."""
    return _FLAG.sub(lambda flag: _keyword(flag[1]), message)


class RequestError(ValueError):
    """The request is wrong: the message names the argument, its value and what would be legal.

    ``field`` is the argument's name, ``value`` what was given, as text, and ``legal`` what would be legal, in
    words; each is None where the message does not say it.
    """

    field: Optional[str]
    value: Optional[str]
    legal: Optional[str]

    def __init__(self, message: str) -> None:
        super().__init__(in_pythons_words(message))
        beginning, legal = _BEGINNING.match(message), _LEGAL.search(str(self))
        self.field = _keyword(beginning[1]) if beginning else None
        self.value = beginning[2] if beginning else None
        self.legal = legal[1] if legal else None


class RunError(RuntimeError):
    """It failed while running: a full disk, a damaged file, no memory."""


class CommError(RunError):
    """A rank was lost, disagreed on a collective or did not arrive in time."""


class InvariantError(RuntimeError):
    """A bug of Echelon's own."""
