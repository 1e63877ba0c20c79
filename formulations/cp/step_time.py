"""(G6) T is at least the simple paths (T6) of the schedule, and every path that was cut off before (E2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.data.pipeline import SPLIT
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
from shardwise.formulations.passes import links_of
from shardwise.formulations.schedule import BACKWARD, DRAINED, FORWARD, INPUT, UNSYNCHRONISED, WEIGHT

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

    from shardwise.formulations.timeline import Shape

    Constraint = cp_model.BoundedLinearExpression | bool


@dataclass(frozen=True)
class Cut:
    """(E2) One path: how often it holds each (kind, slot) and waits for each link, and the stage that it ends on.

    It holds for every candidate of its shape.
    """

    shape: Shape
    passes: tuple[tuple[int, int, int], ...]
    hops: tuple[tuple[int, int], ...]
    stage: int


def add_step_time(
    model: cp_model.CpModel,
    options: tuple[Option, ...],
    choice: Choice,
    chunks: Chunks,
    recompute: RecomputeChoice,
    most: int,
    cuts: tuple[Cut, ...] = (),
) -> Clock:
    """(G6): T and its parts of the chosen candidate, none above `most` units."""
    stages, size = max(option.stages for option in options), len(chunks)
    split = any(option.candidate.schedule in SPLIT for option in options)

    def variables(name: str, count: int) -> tuple[cp_model.IntVar, ...]:
        return tuple(model.new_int_var(0, most, f"{name}[{i}]") for i in range(count))

    clock = Clock(
        model.new_int_var(0, most, "step_time"),
        variables("forward", size),
        variables("backward", size),
        variables("weight", size if split else 0),
        variables("tail", stages),
        variables("fill", stages),
        variables("end", stages),
    )
    for c, option in enumerate(options):
        chosen = choice.uses(c)
        rows: list[Constraint] = [clock.step >= option.bound] if option.worth.plain else []
        rows += _passes(option, chunks, recompute, clock)
        rows += _tails(option, chunks, clock)
        rows += _simple_paths(option, clock)
        rows += [_path(option, cut, clock) for cut in cuts if cut.shape == option.candidate.shape]
        for row in rows:
            model.add(row).only_enforce_if(chosen)
    return clock


def _passes(option: Option, chunks: Chunks, recompute: RecomputeChoice, clock: Clock) -> list[Constraint]:
    """(T1) What a chunk takes for one micro-batch."""
    time, candidate = option.time, option.candidate
    none = candidate.degrees.pp
    sends = (*(int(x) for x in time.sends[:none]), 0)
    rows: list[Constraint] = []
    for i, (after, before) in enumerate(zip(*links_of(candidate.layout, none), strict=True)):
        edges = [unit for unit, at in ((-2, 0), (-1, option.last_chunk)) if i == at]
        forward = weighted(time.forward, chunks.count, i) + sends[after] + sum(int(time.forward[u]) for u in edges)
        backward = (
            weighted(time.backward, chunks.count, i)
            + sum(weighted(time.of_set(index), own, i) for index, own in enumerate(recompute.selected))
            + weighted(time.full, recompute.full, i)
            + sends[before]
            + sum(int(time.backward[u]) for u in edges)
        )
        rows += [clock.forward[i] == forward, clock.backward[i] == backward]
        if clock.weight:
            weight = weighted(time.weight, chunks.count, i) + sum(int(time.weight[u]) for u in edges)
            rows.append(clock.weight[i] == weight)
    return rows


def _tails(option: Option, chunks: Chunks, clock: Clock) -> list[Constraint]:
    """(T4) The larger of two, and the all-reduce of tied embeddings."""
    time, last = option.time, option.stages - 1
    rows: list[Constraint] = []
    for k in range(option.stages):
        tied = int(time.tied) if last and k in (0, last) else 0
        for tail in (time.tail_floor, time.tail_overlap):
            rows.append(clock.tail[k] >= on_stage(tail, option, chunks, k) + tied)
    return rows


def _simple_paths(option: Option, clock: Clock) -> list[Constraint]:
    """(T6)."""
    time, candidate = option.time, option.candidate
    schedule, m = candidate.schedule, candidate.micro_batches
    rows: list[Constraint] = []
    for k in range(option.stages):
        work: Linear | int = m * sum(clock.forward[i] + clock.backward[i] for i in option.chunks_of(k))
        start = 0 if schedule in UNSYNCHRONISED else clock.fill[k]
        rows.append(clock.end[k] >= start + work)
        rows.append(clock.step >= clock.end[k] + clock.tail[k] + int(time.overhead))
        if k + 1 < option.stages:
            lag = int(time.lags[k])
            rows.append(clock.fill[k + 1] >= clock.fill[k] + clock.forward[k] + lag)
            if schedule in DRAINED:
                rows.append(clock.end[k] >= clock.end[k + 1] + lag + clock.backward[k])
    rows.append(clock.step >= _there_and_back(option, clock))
    return rows


def _there_and_back(option: Option, clock: Clock) -> Linear:
    """(T6) The first micro-batch goes through all chunks and back; weight gradients do not hold it up."""
    time, where = option.time, option.candidate.layout
    slots = range(len(where.stage))
    lags = 2 * sum(int(time.lags[link]) for link in where.hop_before if link >= 0)
    way: Linear = sum(clock.forward[i] + clock.backward[i] for i in slots) + clock.tail[0] + int(time.overhead) + lags
    return way - sum(clock.weight[i] for i in slots) if option.candidate.schedule in SPLIT else way


def _path(option: Option, cut: Cut, clock: Clock) -> Constraint:
    """(E2) of one cut."""
    length: Linear = clock.tail[cut.stage] + int(option.time.overhead)
    for kind, slot, count in cut.passes:
        if kind == FORWARD:
            length = length + count * clock.forward[slot]
        elif kind == BACKWARD:
            length = length + count * clock.backward[slot]
        elif kind == INPUT:
            length = length + count * (clock.backward[slot] - clock.weight[slot])
        elif kind == WEIGHT:
            length = length + count * clock.weight[slot]
    return clock.step >= length + sum(count * int(option.time.lags[link]) for link, count in cut.hops)
