"""(G7) V is at least what the plan of the chosen candidate is worth (O1)-(O3)."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from shardwise.formulations.cp.variables import (
    Choice,
    Chunks,
    Clock,
    Linear,
    Option,
    RecomputeChoice,
    on_stage,
    weighted,
)

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


@dataclass(frozen=True)
class Value:
    """The objective: V is `factor` times `variable`, for every candidate of the model."""

    variable: cp_model.IntVar
    factor: int


def add_value(
    model: cp_model.CpModel,
    options: tuple[Option, ...],
    choice: Choice,
    chunks: Chunks,
    recompute: RecomputeChoice,
    clock: Clock,
) -> Value:
    """(G7): one variable above the inner value of the chosen candidate times its multiplier, common factors left out."""
    factor = gcd(*(option.worth.multiplier for option in options))
    if all(option.worth.plain and option.worth.multiplier == factor for option in options):
        return Value(clock.step, factor)
    stages = max(option.stages for option in options)
    step = max(clock.step.proto.domain)
    layers = max(chunks.cut[-1].proto.domain)
    most = max(_most(option, step, layers) * (option.worth.multiplier // factor) for option in options)
    value = model.new_int_var(0, most, "value")
    tails = [model.new_int_var(-most, most, f"tail_value[{k}]") for k in range(stages)]
    for c, option in enumerate(options):
        worth, chosen = option.worth, choice.uses(c)
        inner: Linear = worth.weight * clock.step + worth.constant
        if not worth.plain:
            inner = inner + sum(tails[: option.stages])
            for i in range(option.last_chunk + 1):
                inner = inner + weighted(worth.full, recompute.full, i)
                units = len(worth.full)
                for index, own in enumerate(recompute.selected):
                    again = worth.selective[index * units : (index + 1) * units]
                    inner = inner + weighted(again, own, i)
            for k in range(option.stages):
                for tail in (worth.tail_floor, worth.tail_overlap):
                    model.add(tails[k] >= on_stage(tail, option, chunks, k)).only_enforce_if(chosen)
        multiplier = worth.multiplier // factor
        model.add(value >= multiplier * inner).only_enforce_if(chosen)
        model.add(value >= multiplier * option.bound).only_enforce_if(chosen)
    return Value(value, factor)


def _most(option: Option, step: int, layers: int) -> int:
    """Above the inner value of every plan that lasts at most `step` units."""
    worth = option.worth
    unit = sum(
        max(map(abs, each), default=0) for each in (worth.full, worth.selective, worth.tail_floor, worth.tail_overlap)
    )
    return worth.weight * step + abs(worth.constant) + (layers + 2) * unit
