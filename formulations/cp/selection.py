"""(G1) One candidate; its degrees and the factors of its placement follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortools.sat.python import cp_model

from shardwise.formulations.cp.variables import degree

if TYPE_CHECKING:
    from shardwise.formulations.cp.variables import Choice, Option


def add_selection(model: cp_model.CpModel, options: tuple[Option, ...], choice: Choice) -> None:
    """(G1): exactly one x_c, and every degree variable equal to the value of the chosen candidate."""
    model.add_exactly_one(choice.literals)
    for name, variable in choice.degrees.items():
        values = [_value(option, name) for option in options]
        model.add(variable == cp_model.LinearExpr.weighted_sum(choice.literals, values))


def _value(option: Option, name: str) -> int:
    if "_at_level[" in name:
        axis, level = name.removesuffix("]").split("_at_level[")
        return option.candidate.placement.factors(axis)[int(level)]
    return degree(option, name)
