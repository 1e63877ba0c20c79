"""The sections of the page of two plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.solver.compare import ORDER, in_words
from shardwise.solver.render import degrees_in_words, verdict_in_words
from shardwise.solver.report.blocks import Block, Cell, Note, Section, cut, number, table
from shardwise.solver.report.charts import bars

if TYPE_CHECKING:
    from shardwise.solver.compare import Comparison


def comparison_sections(comparison: Comparison) -> tuple[Section, ...]:
    """What the terminal says too, and the walk as a chart."""
    c = comparison
    a, b = c.a.evaluation.step_time_s, c.b.evaluation.step_time_s
    heads = tuple(
        Note(
            f"{side.instance.model.name} on {side.instance.cluster.name}: step time {side.evaluation.step_time_s:.4f} s, "
            f"{verdict_in_words(side.evaluation)}; {degrees_in_words(side.plan)}",
            cut(side.name, 200),
        )
        for side in (c.a, c.b)
    )
    against = Note(f"The second plan takes {b - a:+.4f} s a step, {100 * (b / a - 1):+.2f} %." if a else "")
    rows = [(Cell(d.what.replace("_", " ")), Cell(cut(d.a)), Cell(cut(d.b))) for d in c.differences]
    listed = table("What differs", ("what", "first", "second"), rows) if rows else (Note("Nothing differs."),)
    measures = [
        (
            Cell(m.what),
            Cell(f"{m.group}, {m.unit}" if m.unit else m.group),
            _cell(m.a, m.unit),
            _cell(m.b, m.unit),
            _cell(m.change, m.unit, sign=True),
        )
        for m in c.told
    ]
    columns = ("quantity", "kind", "first", "second", "change")
    return (
        Section("headline", "Result", (*heads, against)),
        Section("differences", "What differs", listed),
        Section("measures", "What each is worth", table("Both plans in numbers", columns, measures)),
        Section("walk", "From the first plan to the second", _walk(c)),
    )


def _walk(comparison: Comparison) -> tuple[Block, ...]:
    c = comparison
    if c.no_walk:
        return (Note(f"{c.no_walk}."),)
    if len(c.walk) == 1:
        return (Note("The plans are equal: there is nothing to change."),)
    stops = [(cut(step.change, 24), step.step_time_s) for step in c.walk]
    chart = bars("walk-chart", "Step time after each change", [(name, t) for name, t in stops if t is not None], "s")
    rows = [
        (
            number(index, str(index)),
            Cell(cut(step.change)),
            Cell("none") if step.step_time_s is None else _cell(step.step_time_s, "s"),
            Cell("") if step.delta_s is None else _cell(step.delta_s, "s", sign=True),
            Cell("") if step.devices is None else number(step.devices, str(step.devices)),
            Cell(cut(f"{step.verdict}: {step.fault}" if step.fault else step.verdict)),
        )
        for index, step in enumerate(c.walk)
    ]
    order = Note(
        f"Changes come in this order: {', '.join(ORDER)}; what depends on a changed degree follows it. Another order shares "
        "the same sum out differently."
    )
    columns = ("stop", "what changes", "step s", "change s", "devices", "verdict")
    return (chart, order, *table("The walk, one change at a time", columns, rows))


def _cell(value: float | None, unit: str, *, sign: bool = False) -> Cell:
    text = in_words(value, unit, sign=sign)
    return Cell("not known") if value is None else number(value, text)
