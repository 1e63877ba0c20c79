"""Variables of the formulation, in containers that answer questions."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ortools.sat.python import cp_model

from shardwise.data.plan import CP_COMM_TYPES, PLACED, Degrees

if TYPE_CHECKING:
    from shardwise.data.instance import Instance
    from shardwise.formulations.candidates import Candidate
    from shardwise.formulations.coefficients import MemoryCoefficients, TimeCoefficients
    from shardwise.formulations.objective import Worth

Linear = cp_model.LinearExpr

DEGREES = tuple(field.name for field in fields(Degrees))


@dataclass(frozen=True)
class Option:
    """A candidate with what its constraints need: integer time coefficients, memory, an admissible bound on its inner value,
    and what that is made of."""

    candidate: Candidate
    time: TimeCoefficients
    memory: MemoryCoefficients
    bound: int
    worth: Worth

    @property
    def stages(self) -> int:
        return self.candidate.degrees.pp

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """Chunks of a stage, in network order."""
        return self.candidate.layout.chunks_of(stage)

    @property
    def last_chunk(self) -> int:
        return self.candidate.degrees.virtual_stages - 1


@dataclass(frozen=True)
class Choice:
    """x: which candidate, and the degree and placement variables that follow it."""

    literals: tuple[cp_model.IntVar, ...]
    degrees: dict[str, cp_model.IntVar]

    def uses(self, option: int) -> cp_model.IntVar:
        return self.literals[option]


@dataclass(frozen=True)
class Chunks:
    """Cut points and layer counts. `cut[i]` starts chunk i; `count[q][i]` layers of kind q."""

    cut: tuple[cp_model.IntVar, ...]
    layers: tuple[cp_model.IntVar, ...]
    count: tuple[tuple[cp_model.IntVar, ...], ...]

    def __len__(self) -> int:
        return len(self.layers)


@dataclass(frozen=True)
class RecomputeChoice:
    """Per chunk: which set of modules is repeated if any, layers recomputed at the start, and counts per kind.

    `selective` and `selected` have a row for each set of `sets`.
    """

    sets: tuple[str, ...]
    selective: tuple[tuple[cp_model.IntVar, ...], ...]
    block: tuple[cp_model.IntVar, ...]
    full_layers: tuple[cp_model.IntVar, ...]
    full: tuple[tuple[cp_model.IntVar, ...], ...]
    selected: tuple[tuple[tuple[cp_model.IntVar, ...], ...], ...]
    any_full: tuple[cp_model.IntVar, ...]


@dataclass(frozen=True)
class Clock:
    """T and what it is made of: per chunk its passes of one micro-batch, `weight` the part of the backward pass that is
    weight gradients; per stage what it needs after its last pass, and the times of simple paths."""

    step: cp_model.IntVar
    forward: tuple[cp_model.IntVar, ...]
    backward: tuple[cp_model.IntVar, ...]
    weight: tuple[cp_model.IntVar, ...]
    tail: tuple[cp_model.IntVar, ...]
    fill: tuple[cp_model.IntVar, ...]
    end: tuple[cp_model.IntVar, ...]


def weighted(coefficients: tuple[float, ...], counts: tuple[tuple[cp_model.IntVar, ...], ...], chunk: int) -> Linear:
    """Sum over kinds of coefficient times count in one chunk."""
    variables = [row[chunk] for row in counts]
    return cp_model.LinearExpr.weighted_sum(variables, [int(c) for c in coefficients[: len(counts)]])


def on_stage(coefficients: tuple[float, ...], option: Option, chunks: Chunks, stage: int) -> Linear | int:
    """Sum of `coefficients` over what a stage holds, embedding and head included."""
    own = option.chunks_of(stage)
    ends = int(coefficients[-2]) * (0 in own) + int(coefficients[-1]) * (option.last_chunk in own)
    return sum(weighted(coefficients, chunks.count, i) for i in own) + ends


def degree(option: Option, name: str) -> int:
    """The value of a degree; an algorithm of context parallelism is its place in `CP_COMM_TYPES`, a share in per mille."""
    value = getattr(option.candidate.degrees, name)
    if name == "offload_optimizer":
        return int(1000 * value)
    return CP_COMM_TYPES.index(value) if name == "cp_comm_type" else int(value)


def new_choice(model: cp_model.CpModel, options: tuple[Option, ...]) -> Choice:
    """x_c and the degree variables, over the values that occur."""
    literals = tuple(model.new_bool_var(f"candidate[{i}]") for i in range(len(options)))
    degrees = {}
    for name in DEGREES:
        values = sorted({degree(option, name) for option in options})
        degrees[name] = model.new_int_var_from_domain(cp_model.Domain.from_values(values), name)
    for axis in PLACED:
        for level in range(len(options[0].candidate.placement.tp)):
            values = sorted({option.candidate.placement.factors(axis)[level] for option in options})
            name = f"{axis}_at_level[{level}]"
            degrees[name] = model.new_int_var_from_domain(cp_model.Domain.from_values(values), name)
    return Choice(literals, degrees)


def new_chunks(model: cp_model.CpModel, instance: Instance, chunks: int) -> Chunks:
    """Cut points and counts of `chunks` chunks."""
    total, kinds = len(instance.model.layers), len(instance.model.kinds)
    cut = tuple(model.new_int_var(0, total, f"cut[{i}]") for i in range(chunks + 1))
    layers = tuple(model.new_int_var(0, total, f"layers[{i}]") for i in range(chunks))
    if kinds == 1:
        return Chunks(cut, layers, (layers,))
    indices = instance.model.kind_indices
    count = tuple(
        tuple(model.new_int_var(0, indices.count(q), f"count[{q}][{i}]") for i in range(chunks)) for q in range(kinds)
    )
    return Chunks(cut, layers, count)
