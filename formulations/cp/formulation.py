"""Put the constraint groups together, and read a solution back as a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortools.sat.python import cp_model

from shardwise.data.plan import stage_in
from shardwise.formulations.cp.memory_capacity import add_memory_capacity
from shardwise.formulations.cp.objective import Value, add_value
from shardwise.formulations.cp.pinned_layers import add_pinned_layers
from shardwise.formulations.cp.recompute import add_recompute
from shardwise.formulations.cp.selection import add_selection
from shardwise.formulations.cp.stages import add_contiguous_stages, add_even_chunks
from shardwise.formulations.cp.step_time import Cut, add_step_time
from shardwise.formulations.cp.variables import (
    Choice,
    Chunks,
    Clock,
    Option,
    RecomputeChoice,
    new_choice,
    new_chunks,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.data.instance import Instance
    from shardwise.data.plan import Plan


@dataclass(frozen=True)
class Formulation:
    """A CP-SAT model of some candidates and its variables."""

    model: cp_model.CpModel
    options: tuple[Option, ...]
    choice: Choice
    chunks: Chunks
    recompute: RecomputeChoice
    clock: Clock
    value: Value

    def add_hint(self, plan: Plan, step_units: int) -> None:
        """Start the search from `plan`, if its candidate is among the options."""
        for c, option in enumerate(self.options):
            self.model.add_hint(self.choice.uses(c), option.candidate.is_of(plan))
        for i, layers in enumerate(self.chunks.layers):
            sizes = plan.chunk_layers
            self.model.add_hint(layers, sizes[i] if i < len(sizes) else 0)
        self.model.add_hint(self.clock.step, step_units)

    def fix(self, plan: Plan) -> None:
        """Leave only `plan`, of the single option."""
        (option,) = self.options
        for k, stage in enumerate(plan.stages):
            for i, layers in zip(option.chunks_of(k), stage.chunks, strict=True):
                self.model.add(self.chunks.layers[i] == layers)
                for own, flags in zip(self.recompute.sets, self.recompute.selective, strict=True):
                    self.model.add(flags[i] == int(stage.mode == own))
                self.model.add(self.recompute.block[i] == stage.recompute_layers)

    def plan(self, value: Callable[[cp_model.IntVar], int]) -> Plan:
        """The plan of a solution; `value` reads a variable."""
        chosen = next(c for c in range(len(self.options)) if value(self.choice.uses(c)))
        candidate = self.options[chosen].candidate
        stages = []
        for k in range(candidate.degrees.pp):
            rows = self.options[chosen].chunks_of(k)
            sizes = tuple(value(self.chunks.layers[i]) for i in rows)
            mode, block = self._setting(value, rows[0])
            stages.append(stage_in(sizes, mode, block))
        return candidate.plan(tuple(stages))

    def _setting(self, value: Callable[[cp_model.IntVar], int], chunk: int) -> tuple[str, int]:
        for own, flags in zip(self.recompute.sets, self.recompute.selective, strict=True):
            if value(flags[chunk]):
                return own, 0
        block = value(self.recompute.block[chunk])
        return ("full", block) if block else ("none", 0)


def build(instance: Instance, options: tuple[Option, ...], most: int, cuts: tuple[Cut, ...] = ()) -> Formulation:
    """The formulation of `options`, for plans of at most `most` units, with the cuts of their shapes; no objective yet."""
    model = cp_model.CpModel()
    choice = new_choice(model, options)
    chunks = new_chunks(model, instance, max(option.candidate.degrees.virtual_stages for option in options))
    add_selection(model, options, choice)
    add_contiguous_stages(model, instance, options, choice, chunks)
    if instance.rules.even_chunks:
        add_even_chunks(model, options, choice, chunks)
    add_pinned_layers(model, instance.limits, options, choice, chunks)
    recompute = add_recompute(model, instance, options, choice, chunks)
    add_memory_capacity(model, options, choice, chunks, recompute)
    clock = add_step_time(model, options, choice, chunks, recompute, most, cuts)
    value = add_value(model, options, choice, chunks, recompute, clock)
    return Formulation(model, options, choice, chunks, recompute, clock, value)
