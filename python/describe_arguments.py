"""Writes _arguments.py: the keyword arguments of each function as a typed dictionary, from the module's own tables
of flags. Run by the build: describe_arguments.py DIRECTORY_OF_THE_MODULE FILE."""

import importlib
import keyword
import sys
from textwrap import wrap

sys.path.insert(0, sys.argv[1])
core = importlib.import_module("_core")

VERBS = {"plan": "Plan", "simulate": "Simulate", "simulate_experts": "SimulateExperts", "dry_run": "DryRun", "train": "Train", "verify": "Verify",
         "generate": "Generate"}
OBJECTS = {"model": "Model", "machine": "Machine", "software": "Software", "plan": "Plan"}
GIVEN = {"train": {"data"}, "simulate": {"schedule"}, "generate": {"checkpoint", "prompt"},
         "simulate_experts": {"compare"}}  # arguments that the function names itself


def type_of(name: str, shown: str, is_switch: bool, is_list: bool) -> str:
    words = shown.split("|")
    if is_list or "," in shown:
        return "Union[Integer, Several]" if shown == "N" else "Union[Text, Several]"
    if is_switch or words == ["on", "off"]:
        return "Switch"
    if shown == "N":
        return "Integer"
    if shown == "X":
        return "Number"
    if name in OBJECTS:
        return f"Union[Text, {OBJECTS[name]}]"
    if len(words) > 1 and all(word and word == word.lower() for word in words):
        return "Literal[" + ", ".join(f'"{word}"' for word in words) + "]"
    return "Union[Text, Number]"


lines = [
    '"""Keyword arguments, as the tables of flags have them. Made by the build."""',
    "",
    "from __future__ import annotations",
    "",
    "import os",
    "from typing import Any, Literal, Sequence, TypedDict, Union",
    "",
    "import numpy as np",
    "import numpy.typing as npt",
    "",
    "from ._core import Machine, Model, Plan, Software",
    "",
    'Text = Union[str, "os.PathLike[str]"]',
    "Switch = Union[bool, np.bool_]",
    'Integer = Union[int, "np.integer[Any]"]',
    'Number = Union[float, Integer, "np.floating[Any]"]',
    'Several = Union[Sequence[Any], "npt.NDArray[Any]"]',
]
for verb, title in VERBS.items():
    lines += ["", "", f"class {title}Arguments(TypedDict, total=False):", f'    """Of {verb}()."""', ""]
    for name, shown, help, default, is_switch, is_list in core._keywords_of(verb):
        if name in GIVEN.get(verb, ()):
            continue
        assert name.isidentifier() and not keyword.iskeyword(name), name
        told = help + (f" (default: {default})" if default and "(default" not in help else "")
        lines.append(f"    {name}: {type_of(name, shown, is_switch, is_list)}")
        doc = wrap(told.replace("\\", "\\\\").replace('"""', "'''"), 100)
        if doc and doc[-1].endswith('"'):
            doc[-1] += " "
        lines.append('    """' + "\n    ".join(doc) + '"""')
with open(sys.argv[2], "w", encoding="utf-8") as file:
    file.write("\n".join(lines) + "\n")
