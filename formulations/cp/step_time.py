"""(G6) T is at least every simple path (T1)-(T5); longer paths of a simulated schedule are to be added here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.formulations.cp.variables import (
    Choice,
    Chunks,
    Clock,
    Linear,
    Option,
    RecomputeChoice,
    weighted,
)

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


def add_step_time(
    model: cp_model.CpModel,
    options: tuple[Option, ...],
    choice: Choice,
    chunks: Chunks,
    recompute: RecomputeChoice,
    most: int,
) -> Clock:
    """(G6): fill_k, end_k and T of the chosen candidate, none above `most` units."""
    stages = max(option.stages for option in options)
    clock = Clock(
        model.new_int_var(0, most, "step_time"),
        tuple(model.new_int_var(0, most, f"fill[{k}]") for k in range(stages)),
        tuple(model.new_int_var(0, most, f"end[{k}]") for k in range(stages)),
    )
    for c, option in enumerate(options):
        chosen = choice.uses(c)
        model.add(clock.step >= option.bound).only_enforce_if(chosen)
        for k in range(option.stages):
            for constraint in _paths(option, chunks, recompute, clock, k):
                model.add(constraint).only_enforce_if(chosen)
    return clock


def _paths(
    option: Option, chunks: Chunks, recompute: RecomputeChoice, clock: Clock, k: int
) -> list[cp_model.BoundedLinearExpression | bool]:
    """The linear inequalities of stage k."""
    time, last = option.time, option.stages - 1
    rows = option.chunks_of(k)
    work: list[Linear] = []
    for i in rows:
        work.append(weighted(time.busy, chunks.count, i))
        work.append(weighted(time.busy_selective, recompute.selected, i))
        work.append(weighted(time.busy_full, recompute.full, i))
    busy = sum(work) + int(time.transfers[k]) + int((k == 0) * time.embedding_busy + (k == last) * time.head_busy)
    out: list[cp_model.BoundedLinearExpression | bool] = [clock.end[k] >= clock.fill[k] + busy]
    if k < last:
        hop = int(time.hops[k])
        forward = weighted(time.forward, chunks.count, k) + int((k == 0) * time.embedding_forward)
        backward = (
            weighted(time.backward, chunks.count, k)
            + weighted(time.backward_selective, recompute.selected, k)
            + weighted(time.backward_full, recompute.full, k)
            + int((k == 0) * time.embedding_backward)
        )
        out.append(clock.fill[k + 1] >= clock.fill[k] + hop + forward)
        out.append(clock.end[k] >= clock.end[k + 1] + hop + backward)
    tied = int(time.tied) if last and k in (0, last) else 0
    for tail, embedding, head in (
        (time.tail_floor, time.embedding_tail_floor, time.head_tail_floor),
        (time.tail_overlap, time.embedding_tail_overlap, time.head_tail_overlap),
    ):
        ends = int((k == 0) * embedding + (k == last) * head) + tied + int(time.overhead)
        out.append(clock.step >= clock.end[k] + sum(weighted(tail, chunks.count, i) for i in rows) + ends)
    return out
