"""What a notebook shows of answers."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Iterable, List

if TYPE_CHECKING:
    from ._core import PlanAnswer, Simulation


def _table(header: List[str], rows: Iterable[List[str]]) -> str:
    def row(cells: List[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + row(header, "th") + "".join(row(cells, "td") for cells in rows) + "</table>"


def html_of_plans(answer: "PlanAnswer") -> str:
    """The ranking as a table."""
    if answer.best is None:
        return f"<pre>{escape(answer.table())}</pre>"
    rows = [
        [
            f"{one.rank}{'=' if one.rank_is_shared else ''}",
            f"{one.step_seconds:.3f} s",
            f"{one.tokens_per_second_per_gpu:.0f}",
            f"{100 * one.mfu:.1f}%",
            f"{one.memory.total / 1e9:.1f} GB",
            one.summary,
        ]
        for one in answer.plans
    ]
    return _table(["rank", "step", "tokens/s/GPU", "MFU", "memory", "plan"], rows)


def html_of_simulation(simulation: "Simulation") -> str:
    """The figures, and the drawing below them."""
    if not simulation.valid:
        return f"<p>{escape(simulation.name)}: {escape(simulation.reason)}</p>"
    figures = _table(
        ["schedule", "makespan", "bubble", "peak activations", "messages"],
        [
            [
                simulation.name,
                f"{simulation.makespan:.6g}",
                f"{simulation.bubble_time:.6g} ({100 * simulation.bubble_fraction:.1f}%)",
                f"{max(simulation.peak_activations):.6g}",
                str(simulation.messages),
            ]
        ],
    )
    return figures + simulation.to_svg()
