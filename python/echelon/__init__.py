"""Echelon from Python: plan, simulate, verify, train and sample distributed transformers, on thread ranks.

What the command line's verbs take as flags these functions take as keyword arguments, with underscores:
``echelon train --global-batch 8`` is ``echelon.train(global_batch=8)``. ``echelon.arguments("train")`` lists
them. Answers are objects; ``to_dict()`` of one is what ``--json`` prints.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Callable, List, NamedTuple, Optional, Sequence, Tuple, Union, overload

from ._checkpoint import Checkpoint, Tensor, Tensors, open_checkpoint, save_safetensors
from ._core import (
    Difference,
    DryRun,
    ExpertLoad,
    Generated,
    Instruction,
    Machine,
    Memory,
    Model,
    Parameter,
    Plan,
    PlanAnswer,
    PlannedStep,
    RankClass,
    Routing,
    RoutingAnswer,
    RunCost,
    Schedule,
    Simulation,
    Software,
    Span,
    StartInfo,
    StepRecord,
    Sweep,
    Timeline,
    Traffic,
    TrainAnswer,
    VerifyAnswer,
)
from ._core import version as __version__
from . import _core
from ._errors import CommError, InvariantError, RequestError, RunError
from ._show import html_of_plans, html_of_simulation
from ._words import texts_of, words_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._arguments import (
        DryRunArguments,
        GenerateArguments,
        PlanArguments,
        SimulateArguments,
        SimulateExpertsArguments,
        TrainArguments,
        VerifyArguments,
    )

__all__ = [
    "Argument",
    "Checkpoint",
    "CommError",
    "Difference",
    "Drawing",
    "DryRun",
    "ExpertLoad",
    "Generated",
    "Instruction",
    "InvariantError",
    "Machine",
    "Memory",
    "Model",
    "Parameter",
    "Plan",
    "PlanAnswer",
    "PlannedStep",
    "RankClass",
    "RequestError",
    "Routing",
    "RoutingAnswer",
    "RunCost",
    "RunError",
    "Schedule",
    "Simulation",
    "Software",
    "Span",
    "StartInfo",
    "StepRecord",
    "Sweep",
    "Tensor",
    "Tensors",
    "Timeline",
    "Traffic",
    "TrainAnswer",
    "VerifyAnswer",
    "__version__",
    "arguments",
    "compare",
    "draw",
    "dry_run",
    "generate",
    "open_checkpoint",
    "plan",
    "save_safetensors",
    "simulate",
    "simulate_experts",
    "sweep",
    "train",
    "verify",
    "why_not",
]


class Argument(NamedTuple):
    """A keyword argument, as the command line's help has it."""

    name: str
    type: str
    help: str
    default: str


def arguments(verb: str) -> List[Argument]:
    """The keyword arguments of ``plan``, ``simulate``, ``simulate_experts``, ``train``, ``dry_run``, ``verify``
    or ``generate``."""
    return [Argument(*one[:4]) for one in _core._keywords_of(verb)]


def plan(**arguments: Unpack[PlanArguments]) -> PlanAnswer:
    """Finds the fastest configuration of a model on a machine that fits, by looking at every legal one.

    What is given is held, what is not is searched: ``plan(model="llama-3-70b", machine="h100", gpus=64, tp=8)``.
    Models, machines and plans may be objects. RequestError where no configuration could have these sizes.
    """
    with words_of(arguments) as words:
        return _core._plan(words)


def why_not(answer: PlanAnswer, **pins: Any) -> str:
    """Why a plan with these fields loses against the best of ``answer``: ``why_not(answer, tp=8, pp=4)``."""
    with words_of(pins) as words:
        for key, values in words.items():
            if len(values) > 1:
                raise RequestError(f"{key}: has {len(values)} values; legal: one, since one plan is compared")
        return answer._why_not(",".join(f"{key.replace('_', '-')}={value}" for key, [value] in words.items()))


def sweep(sweep: str, **arguments: Unpack[PlanArguments]) -> Sweep:
    """Plans for each value of ``gpus``, ``seq-len`` or ``global-batch``: ``sweep("gpus=64..1024", model=...)``
    doubles, ``"seq-len=4096,8192"`` lists."""
    with words_of({**arguments, "sweep": sweep}) as words:
        return _core._sweep(words)


def simulate(
    schedule: Union[str, os.PathLike[str], Schedule] = "1f1b", **arguments: Unpack[SimulateArguments]
) -> Simulation:
    """Runs a pipeline schedule on paper: a published one, a file of rows, or a Schedule.

    Of a Schedule the arguments are costs alone: ``times``, ``stage_times``, ``output_layer``, ``comm_time`` and
    ``overlap_factor``. RequestError naming rank, instruction and missing value for one that cannot finish.
    """
    if isinstance(schedule, Schedule):
        with words_of(arguments) as words:
            return schedule._simulate(words)
    with words_of({**arguments, "schedule": schedule}) as words:
        return _core._simulate(words)


def compare(*schedules: Union[str, os.PathLike[str]], **arguments: Unpack[SimulateArguments]) -> List[Simulation]:
    """Simulates several, published ones or files. One that the numbers do not fit says why (``reason``) and is not
    ``valid``. Schedules that are objects stand side by side in ``draw([simulate(one), simulate(other)])``."""
    names = [os.fsdecode(one) if isinstance(one, os.PathLike) else one for one in schedules]
    with words_of({**arguments, "compare": texts_of("compare", names)}) as words:
        return _core._compare(words)


def simulate_experts(*methods: str, **arguments: Unpack[SimulateExpertsArguments]) -> RoutingAnswer:
    """How a router of popular experts loads the devices, and what each way of balancing does about it:
    ``simulate_experts("none", "aux-loss", "bias", model="mixtral-8x7b", ep=8)``. Nothing is trained."""
    given = {**arguments, "compare": texts_of("compare", methods)} if methods else arguments
    with words_of(given) as words:
        return _core._simulate_experts(words)


class Drawing:
    """Simulations on one time axis. Shown as it is in a notebook."""

    def __init__(self, simulations: Union[Simulation, Sequence[Simulation]]) -> None:
        self._simulations = [simulations] if isinstance(simulations, Simulation) else list(simulations)
        for one in self._simulations:
            if not isinstance(one, Simulation):
                what = type(one).__name__
                raise RequestError(f"--simulations: a value of type {what}; legal: what simulate() returns")

    def to_svg(self) -> str:
        return _core._draw_together(self._simulations, False)

    def to_html(self) -> str:
        """A page that needs nothing else, with zoom and hover."""
        return _core._draw_together(self._simulations, True)

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def __repr__(self) -> str:
        return f"<Drawing of {', '.join(one.name for one in self._simulations)}>"


def draw(simulations: Union[Simulation, Sequence[Simulation]]) -> Drawing:
    """Draws one, or several on one time axis; those that are not ``valid`` are left out."""
    return Drawing(simulations)


def dry_run(**arguments: Unpack[DryRunArguments]) -> DryRun:
    """What every rank of a training would hold, by category, and send in a step, by axis and verb, to the byte."""
    with words_of(arguments) as words:
        return _core._dry_run(words)


def train(
    data: Any,
    *,
    on_step: Optional[Callable[[StepRecord], Any]] = None,
    on_start: Optional[Callable[[StartInfo], Any]] = None,
    on_evaluation: Optional[Callable[[Tuple[int, float]], Any]] = None,
    on_checkpoint: Optional[Callable[[str], Any]] = None,
    **arguments: Unpack[TrainArguments],
) -> TrainAnswer:
    """Trains a model on ranks that are threads of this process.

    ``data`` is a path, or several, of text, .jsonl, directories or token files. ``on_step`` is called with the
    record of every step, ``on_evaluation`` with the pair of the step and its validation loss, ``on_checkpoint``
    with its path. When ``on_step`` returns False, or whatever else is false but None, no rank begins another step,
    and the training ends with its checkpoint. What the other functions say, and Ctrl-C, is heard after the step
    that is under way. (A schedule without a flush has begun the next step by then, and empties its pipeline with
    one more.) What a function raises ends the training too, and is raised then, as KeyboardInterrupt is; its
    attribute ``answer`` is what would have been returned. With ``staleness`` no step is common to all workers: that
    training ends at once, without a checkpoint. Other threads of Python run on meanwhile. RequestError before any
    rank starts, RunError or CommError afterwards.
    """
    paths = list(data) if isinstance(data, (list, tuple)) else [data]
    with words_of({**arguments, "data": paths}) as words:
        return _core._train(words, on_step, on_start, on_evaluation, on_checkpoint)


def verify(**arguments: Unpack[VerifyArguments]) -> VerifyAnswer:
    """Runs one rank and a mesh side by side, and compares every tensor. The answer is true where they agree."""
    with words_of(arguments) as words:
        return _core._verify(words)


@overload
def generate(
    checkpoint: Any,
    prompt: Optional[str] = None,
    *,
    on_text: Optional[Callable[[str, int], Any]] = None,
    **arguments: Unpack[GenerateArguments],
) -> Generated: ...
@overload
def generate(
    checkpoint: Any,
    prompt: Sequence[str],
    *,
    on_text: Optional[Callable[[str, int], Any]] = None,
    **arguments: Unpack[GenerateArguments],
) -> List[Generated]: ...
def generate(
    checkpoint: Any,
    prompt: Union[str, Sequence[str], None] = None,
    *,
    on_text: Optional[Callable[[str, int], Any]] = None,
    **arguments: Unpack[GenerateArguments],
) -> Union[Generated, List[Generated]]:
    """Samples text from a checkpoint, which may be its path: ``generate("runs/first", "And God said")``.

    Of a list of prompts a list is returned. ``on_text(piece, index)`` is called with the text as it comes, and the
    index of its prompt; where it returns False, or whatever else is false but None, the answer has what came until
    then. For models whose tokenizer is not beside the checkpoint: ``prompt_tokens=[...]``.
    """
    path = checkpoint.path if isinstance(checkpoint, Checkpoint) else checkpoint
    prompts = None if prompt is None else texts_of("prompt", prompt)
    with words_of({**arguments, "checkpoint": path, "prompt": prompts}) as words:
        texts = _core._generate(words, on_text)
    return texts[0] if prompt is None or isinstance(prompt, str) else texts


PlanAnswer._repr_html_ = html_of_plans  # type: ignore[attr-defined]
Simulation._repr_html_ = html_of_simulation  # type: ignore[attr-defined]
